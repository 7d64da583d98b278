"""Board power of one NVIDIA GPU: the driver's sample ring, or the polled fields where there is no ring.

Measured on an H200 (benchmarks/device/record_sensor.py, benchmarks/results/): the ring has a sample every 20 ms
(8-46 ms), `nvmlDeviceGetPowerUsage` and field 185 are ~1 s averages refreshed at 10 Hz, field 186 an
instantaneous value refreshed at 10 Hz. A poll faster than the refresh repeats values; repeats are dropped.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

from ..clock import REAL, Clock, EpochMap
from ..schema import Domain, Gap

# Response of the ring on the H200, fitted on a random mixture of loads of 2-60 ms whose times were known
# (benchmarks/fit_response.py): mean delay 15 ms, ±1 ms between fits. Blur and noise of a sample are such that the
# 90% intervals held on the recording they were fitted on; benchmarks/device/accuracy.py checks them on other runs.
RING_LAG_S = 0.015
RING_BLUR_S = 0.012
RING_NOISE = 0.012
RING_RESOLUTION_S = 0.020
# Ring against counter on the H200: 0.1% typical, 0.8% worst over 6 s of ten loads (benchmarks/accuracy.py).
RING_GAIN_ERROR = 0.005
# Fields: NVML documents ±5% for older boards; their lag is half the averaging plus half the refresh.
FIELD_GAIN_ERROR = 0.05
POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT
POWER_AVERAGE = 185  # NVML_FI_DEV_POWER_AVERAGE
MEMORY_SCOPE = 2  # NVML_POWER_SCOPE_MEMORY
REFRESH_S = 0.1
_PROBE_S = 0.35
_STALE = 3.0
# A hole in the ring wider than this is lost samples (the tail of the spacing is 46 ms on the H200).
HOLE_NS = 250_000_000


class PowerReader(Protocol):
    """Reads one GPU's board power; `read` gives new samples and the gaps it found."""

    period_s: float

    def domain(self, name: str, label: str, note: str) -> Domain: ...

    def read(self, name: str) -> tuple[list[tuple[int, float]], list[Gap]]: ...


class RingReader:
    """The driver's ring of power samples (`nvmlDeviceGetSamples`): ~119 of them, so 2.4 s at 20 ms."""

    period_s = 1.0

    def __init__(self, nvml: Any, handle: Any, clock: Clock = REAL) -> None:
        self._clock = clock
        self._nvml = nvml
        self._handle = handle
        self._epoch = EpochMap(clock)
        self._last_stamp_us = 0
        self._last_ns: int | None = None
        self._silent = False

    def domain(self, name: str, label: str, note: str) -> Domain:
        return Domain(
            name=name, source="nvml-samples", label=label, note=note, resolution_s=RING_RESOLUTION_S,
            lag_s=RING_LAG_S, blur_s=RING_BLUR_S, sample_noise=RING_NOISE, gain_error=RING_GAIN_ERROR,
        )  # fmt: skip

    def read(self, name: str) -> tuple[list[tuple[int, float]], list[Gap]]:
        if self._epoch.observe():
            self._last_stamp_us = 0  # "newer than T" means nothing across a step of the wall clock
        samples = self._fetch()
        out: list[tuple[int, float]] = []
        gaps: list[Gap] = []
        for stamp_us, power_mw in samples:
            t = self._epoch.to_monotonic(stamp_us * 1000)
            if self._last_ns is not None and t <= self._last_ns:
                continue
            self._place(name, t, power_mw, out, gaps)
            self._last_ns, self._last_stamp_us = t, stamp_us
        gaps.extend(self._silence(name, bool(out)))
        return out, gaps

    def _fetch(self) -> list[tuple[int, int]]:
        """Stamps (µs) and milliwatts newer than the last; the driver says NotFound when there is none."""
        nvml = self._nvml
        try:
            _, raw = nvml.nvmlDeviceGetSamples(self._handle, nvml.NVML_TOTAL_POWER_SAMPLES, self._last_stamp_us)
        except nvml.NVMLError_NotFound:
            return []
        pairs = [(int(s.timeStamp), int(s.sampleValue.uiVal)) for s in raw if s.timeStamp]
        # Unfilled entries have stamp 0. Sorted, unless the wall clock was stepped: then the ring's own order holds.
        return pairs if self._epoch.steps else sorted(pairs)

    def _place(self, name: str, t: int, power_mw: int, out: list[tuple[int, float]], gaps: list[Gap]) -> None:
        last = self._last_ns
        if last is not None and t - last > HOLE_NS:
            reason = (
                f"no power samples for {(t - last) * 1e-9:.1f} s: the driver's ring holds 2.4 s and was not read "
                "in time (the sampler was kept from running), or the GPU was suspended"
            )
            gaps.append(Gap(domain=name, start_ns=last, end_ns=t, reason=reason))
            out.append((t - 1, math.nan))
        if power_mw == 0:
            gaps.append(Gap(domain=name, start_ns=last or t, end_ns=t, reason="the sensor read 0 W"))
            out.append((t, math.nan))
        else:
            out.append((t, power_mw * 1e-3))

    def _silence(self, name: str, fresh: bool) -> list[Gap]:
        """An open gap, once, when the ring has had nothing new for seconds."""
        if fresh or self._last_ns is None:
            self._silent = False
            return []
        quiet_s = (self._clock.monotonic_ns() - self._last_ns) * 1e-9
        if self._silent or quiet_s < _STALE:
            return []
        self._silent = True
        return [Gap(domain=name, start_ns=self._last_ns, end_ns=None, reason="the driver's ring has nothing new")]


class PolledReader:
    """A field that is refreshed now and then: polled at twice its refresh rate, repeats dropped."""

    def __init__(
        self, ask_mw: Callable[[], int], *, source: str, averaged_s: float, probe: bool = True, clock: Clock = REAL
    ) -> None:
        self._clock = clock
        self._ask_mw = ask_mw
        self.source = source
        self._averaged_s = averaged_s
        self.refresh_s, self.refresh_seen = self._find_refresh() if probe else (REFRESH_S, False)
        self.period_s = self.refresh_s / 2
        self._last: tuple[int, int] | None = None

    def _find_refresh(self) -> tuple[float, bool]:
        """Median time between changes of the value over a third of a second; the usual 0.1 s if none is seen."""
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

    def domain(self, name: str, label: str, note: str) -> Domain:
        seen = "found at start" if self.refresh_seen else "assumed: no change was seen at start"
        notes = [note] if note else []
        notes.append(f"refreshed every {self.refresh_s * 1e3:.0f} ms ({seen})")
        if self._averaged_s:
            notes.append(f"a {self._averaged_s:g} s average")
        return Domain(
            name=name, source=self.source, label=label, note="; ".join(notes),
            resolution_s=max(self.refresh_s, self._averaged_s), lag_s=(self._averaged_s + self.refresh_s) / 2,
            blur_s=(self._averaged_s + self.refresh_s) / math.sqrt(12), gain_error=FIELD_GAIN_ERROR,
        )  # fmt: skip

    def read(self, name: str) -> tuple[list[tuple[int, float]], list[Gap]]:
        power_mw = self._ask_mw()
        t = self._clock.monotonic_ns()
        if self._last and power_mw == self._last[1] and (t - self._last[0]) * 1e-9 < self.refresh_s:
            return [], []  # the same reading again, not a new one
        before, self._last = self._last, (t, power_mw)
        start = before[0] if before else t
        if power_mw == 0:
            return [(t, math.nan)], [Gap(domain=name, start_ns=start, end_ns=t, reason="the sensor read 0 W")]
        if t - start > HOLE_NS + round(1e9 * (5 * self.refresh_s + 2 * self._averaged_s)):
            reason = f"not read for {(t - start) * 1e-9:.1f} s: the sampler was kept from running"
            gap = Gap(domain=name, start_ns=start, end_ns=t, reason=reason)
            return [(t - 1, math.nan), (t, power_mw * 1e-3)], [gap]
        return [(t, power_mw * 1e-3)], []


def field_mw(nvml: Any, handle: Any, field: int, scope: int = 0) -> Callable[[], int]:
    """A call that returns one field in milliwatts and raises the field's own NVML error."""

    def ask() -> int:
        value = nvml.nvmlDeviceGetFieldValues(handle, [(field, scope)])[0]
        if value.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(value.nvmlReturn)
        return int(value.value.uiVal)

    return ask


def choose_reader(nvml: Any, handle: Any, clock: Clock, refuse: Callable[[str, Exception], None]) -> PowerReader | None:
    """The finest source this GPU and user have; `refuse` is told of each that does not work.

    Only a source that is not there or not permitted is passed over: an error that may pass is raised.
    """
    never = absent_errors(nvml)
    try:
        nvml.nvmlDeviceGetSamples(handle, nvml.NVML_TOTAL_POWER_SAMPLES, 0)
        return RingReader(nvml, handle, clock)
    except nvml.NVMLError_NotFound:
        return RingReader(nvml, handle, clock)  # there, and empty so far
    except never as exc:
        refuse("power sample ring", exc)
    sources: list[tuple[str, Callable[[], int], float]] = [
        ("nvml-instant", field_mw(nvml, handle, POWER_INSTANT), 0.0),
        ("nvml-usage", lambda: int(nvml.nvmlDeviceGetPowerUsage(handle)), 1.0),
    ]
    for source, ask, averaged_s in sources:
        try:
            return PolledReader(ask, source=source, averaged_s=averaged_s, clock=clock)
        except never as exc:
            refuse(source, exc)
    return None


def absent_errors(nvml: Any) -> tuple[type[Exception], ...]:
    """The errors that mean "not on this GPU" or "not for this user", as against those that may pass."""
    return (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_NoPermission,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_InvalidArgument,
    )
