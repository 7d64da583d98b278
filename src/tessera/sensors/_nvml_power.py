"""Reads the board power of one NVIDIA GPU: the driver's sample ring, or the polled fields if there is no ring.

Measured on an H200 (benchmarks/device/record_sensor.py, benchmarks/results/): the ring has a sample every 20 ms
(8-46 ms). `nvmlDeviceGetPowerUsage` and field 185 are ~1 s averages refreshed at 10 Hz, field 186 is an
instantaneous value refreshed at 10 Hz. Polls faster than the refresh return repeats, which are dropped.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..clock import REAL, Clock, EpochMap
from ..schema import Domain, Gap
from ._meters import PolledPower
from .base import Batch

# The ring's response if none was learnt on the board itself (response_store.py): that of an H200, from recorded
# mixtures of kernels (benchmarks/measure/learn_sensor.py: lags of 16 to 18 ms; benchmarks/fit/fit_response.py: 15 to
# 16). Another board's response is unknown: lags of 5 to 25 ms are allowed for. The noise of a sample is chosen so that
# the 90% intervals held on those recordings; benchmarks/device/accuracy.py checks them on other runs.
RING_LAG_S, RING_LAG_ERROR_S = 0.016, 0.0025
RING_BLUR_S = 0.0114
LEARNT_ON = "H200"
OTHER_LAG_ERROR_S = 0.010
RING_NOISE = 0.012
RING_RESOLUTION_S = 0.020
# Ring against counter on the H200 over >= 5 s: under 0.3% on ten loads, more on square waves (benchmarks/README.md).
RING_GAIN_ERROR = 0.005
# Fields: NVML documents ±5% for older boards. Their lag is half the averaging time plus half the refresh period.
FIELD_GAIN_ERROR = 0.05
POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT
POWER_AVERAGE = 185  # NVML_FI_DEV_POWER_AVERAGE
MEMORY_SCOPE = 2  # NVML_POWER_SCOPE_MEMORY
REFRESH_S = 0.1
_PROBE_S = 0.35
_STALE = 3.0
# A hole in the ring wider than this means lost samples (the tail of the spacing is 46 ms on the H200).
HOLE_NS = 250_000_000
# How many sums are kept with the last samples. The counter is compared with them; its reads are at most 0.1 s old.
_KEPT_SUMS = 64
# A GPU that runs draws power, so 0 W means that the sensor failed.
ZERO_READ = "the sensor read 0 W"


class RingReader:
    """Reads the driver's ring of power samples (`nvmlDeviceGetSamples`): ~119 samples, so 2.4 s at 20 ms."""

    period_s = 1.0

    def __init__(self, nvml: Any, handle: Any, clock: Clock = REAL, *, name: str = "gpu0") -> None:
        self._name = name
        self._clock = clock
        self._nvml = nvml
        self._handle = handle
        self._epoch = EpochMap(clock)
        self._last_stamp_us = 0
        self._last_ns: int | None = None
        self._silent = False
        self._sums: deque[tuple[int, float, float]] = deque(maxlen=_KEPT_SUMS)  # time, watts, joules so far

    def domain(self, label: str, note: str) -> Domain:
        return Domain(
            name=self._name,
            source="nvml-samples",
            label=label,
            note=note,
            resolution_s=RING_RESOLUTION_S,
            lag_s=RING_LAG_S,
            lag_error_s=RING_LAG_ERROR_S if LEARNT_ON in label else OTHER_LAG_ERROR_S,
            blur_s=RING_BLUR_S,
            sample_noise=RING_NOISE,
            gain_error=RING_GAIN_ERROR,
        )

    def read(self, batch: Batch) -> None:
        if self._epoch.observe():
            self._last_stamp_us = 0  # "newer than T" means nothing across a step of the wall clock
        fresh = False
        for stamp_us, power_mw in self._fetch():
            t = self._epoch.to_monotonic(stamp_us * 1000)
            if self._last_ns is not None and t <= self._last_ns:
                continue
            self._place(batch, t, power_mw)
            self._last_ns, self._last_stamp_us, fresh = t, stamp_us, True
        self._note_silence(batch, fresh)

    def _fetch(self) -> list[tuple[int, int]]:
        """Return stamps (µs) and milliwatts newer than the last read. The driver answers NotFound if there is none."""
        nvml = self._nvml
        try:
            kind, raw = nvml.nvmlDeviceGetSamples(self._handle, nvml.NVML_TOTAL_POWER_SAMPLES, self._last_stamp_us)
        except nvml.NVMLError_NotFound:
            return []
        pairs = [(int(s.timeStamp), round(number(s.sampleValue, kind))) for s in raw if s.timeStamp]
        # Unfilled entries have stamp 0. The rest is sorted, except after a step of the wall clock: then keep the order.
        return pairs if self._epoch.steps else sorted(pairs)

    def _place(self, batch: Batch, t: int, power_mw: int) -> None:
        last = self._last_ns
        if last is not None and t - last > HOLE_NS:
            reason = (
                f"no power samples for {(t - last) * 1e-9:.1f} s: the driver's ring holds 2.4 s and was not read "
                "in time (the sampler was kept from running), or the GPU was suspended"
            )
            batch.gaps.append(Gap(domain=self._name, start_ns=last, end_ns=t, reason=reason))
            batch.add(self._name, t - 1, math.nan)
            self._sums.clear()
        if power_mw == 0:
            batch.gaps.append(Gap(domain=self._name, start_ns=last or t, end_ns=t, reason=ZERO_READ))
            self._sums.clear()
        else:
            before_ns, before_w, so_far_j = self._sums[-1] if self._sums else (t, 0.0, 0.0)
            power_w = power_mw * 1e-3
            self._sums.append((t, power_w, so_far_j + 0.5e-9 * (power_w + before_w) * (t - before_ns)))
        batch.add(self._name, t, power_mw * 1e-3 if power_mw else math.nan)

    def joules_until(self, time_ns: int) -> float | None:
        """Return the joules of the samples up to a time, since the last hole; None if the samples do not reach it."""
        i = bisect.bisect_left(self._sums, time_ns, key=lambda s: s[0])
        if not 0 < i < len(self._sums):
            return None
        (a_ns, a_w, a_j), (b_ns, b_w, _) = self._sums[i - 1], self._sums[i]
        share = (time_ns - a_ns) / (b_ns - a_ns)
        return a_j + (a_w + 0.5 * (b_w - a_w) * share) * (time_ns - a_ns) * 1e-9

    def _note_silence(self, batch: Batch, fresh: bool) -> None:
        """Open a gap, once, if the ring has had nothing new for seconds."""
        if fresh or self._last_ns is None:
            self._silent = False
            return
        quiet_s = (self._clock.monotonic_ns() - self._last_ns) * 1e-9
        if self._silent or quiet_s < _STALE:
            return
        self._silent = True
        reason = "the driver's ring has nothing new"
        batch.gaps.append(Gap(domain=self._name, start_ns=self._last_ns, end_ns=None, reason=reason))


class FieldReader:
    """Polls a field at twice its refresh rate, and drops repeats."""

    def __init__(
        self,
        ask_mw: Callable[[], int],
        *,
        name: str,
        source: str,
        averaged_s: float,
        probe: bool = True,
        clock: Clock = REAL,
    ) -> None:
        self._clock = clock
        self._ask_mw = ask_mw
        self._name = name
        self.source = source
        self._averaged_s = averaged_s
        self.refresh_s, self.refresh_seen = self._find_refresh() if probe else (REFRESH_S, False)
        self.period_s = self.refresh_s / 2
        self._power = PolledPower(
            name,
            started_ns=clock.monotonic_ns(),
            # The period is not learnt while reading, even if it is assumed: HBM is polled too rarely for that.
            refresh_s=self.refresh_s,
            hole_s=HOLE_NS * 1e-9 + 5 * self.refresh_s + 2 * averaged_s,
        )

    def _find_refresh(self) -> tuple[float, bool]:
        """Return the median time between changes of the value over a third of a second; 0.1 s if it never changes."""
        changes: list[int] = []
        value = self._ask_mw()
        end = time.monotonic() + _PROBE_S
        while time.monotonic() < end and len(changes) < 16:
            time.sleep(0.001)
            new = self._ask_mw()
            if new != value:
                changes.append(time.monotonic_ns())
                value = new
        gaps = sorted(b - a for a, b in itertools.pairwise(changes))
        return (max(gaps[len(gaps) // 2] * 1e-9, 0.001), True) if gaps else (REFRESH_S, False)

    def domain(self, label: str, note: str) -> Domain:
        seen = "found at start" if self.refresh_seen else "assumed: no change was seen at start"
        refreshed = f"refreshed every {self.refresh_s * 1e3:.0f} ms ({seen})"
        averaged = f"a {self._averaged_s:g} s average" if self._averaged_s else ""
        span_s = self._averaged_s + self.refresh_s
        return Domain(
            name=self._name,
            source=self.source,
            label=label,
            note="; ".join(filter(None, (note, refreshed, averaged))),
            resolution_s=max(self.refresh_s, self._averaged_s),
            lag_s=span_s / 2,
            blur_s=span_s / math.sqrt(12),
            gain_error=FIELD_GAIN_ERROR,
        )

    def fail(self, batch: Batch, reason: str) -> None:
        """Open a gap, so that nobody waits for samples."""
        self._power.fail(batch, self._clock.monotonic_ns(), reason)

    def read(self, batch: Batch) -> None:
        power_mw = self._ask_mw()
        time_ns = self._clock.monotonic_ns()
        if power_mw == 0:
            self._power.fail(batch, time_ns, ZERO_READ)
        else:
            self._power.observe(batch, power_w=power_mw * 1e-3, time_ns=time_ns)


# The member of the union that holds the value, by nvmlValueType_t.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


def number(value: Any, kind: int) -> float:
    """Return the number in one of NVML's unions; `kind` is the type that came with it."""
    return float(getattr(value, _MEMBERS[kind] if kind < len(_MEMBERS) else "uiVal"))


def read_field(nvml: Any, handle: Any, field: int, scope: int = 0) -> float:
    """Return the value of one field. Raises the field's own NVML error."""
    value = nvml.nvmlDeviceGetFieldValues(handle, [(field, scope)])[0]
    if value.nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(value.nvmlReturn)
    return number(value.value, value.valueType)


def field_mw(nvml: Any, handle: Any, field: int, scope: int = 0) -> Callable[[], int]:
    """Return a function that reads one field in whole milliwatts."""
    return lambda: round(read_field(nvml, handle, field, scope))


def choose_reader(
    nvml: Any, handle: Any, name: str, clock: Clock, refuse: Callable[[str, Exception], None]
) -> RingReader | FieldReader | None:
    """Return the reader with the finest resolution that works here; `refuse` gets each one that does not.

    Only a source that is absent or not permitted is skipped. An error that may pass is raised.
    """
    never = absent_errors(nvml)
    try:
        with contextlib.suppress(nvml.NVMLError_NotFound):  # the ring exists, and is still empty
            nvml.nvmlDeviceGetSamples(handle, nvml.NVML_TOTAL_POWER_SAMPLES, 0)
        return RingReader(nvml, handle, clock, name=name)
    except never as exc:
        refuse("power sample ring", exc)
    sources: list[tuple[str, Callable[[], int], float]] = [
        ("nvml-instant", field_mw(nvml, handle, POWER_INSTANT), 0.0),
        ("nvml-usage", lambda: int(nvml.nvmlDeviceGetPowerUsage(handle)), 1.0),
    ]
    for source, ask, averaged_s in sources:
        try:
            return FieldReader(ask, name=name, source=source, averaged_s=averaged_s, clock=clock)
        except never as exc:
            refuse(source, exc)
    return None


def absent_errors(nvml: Any) -> tuple[type[Exception], ...]:
    """Return the errors that mean "not on this GPU" or "not for this user"; other errors may pass."""
    return (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_NoPermission,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_InvalidArgument,
    )
