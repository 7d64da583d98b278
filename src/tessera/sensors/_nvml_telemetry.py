"""Reads the telemetry of an NVIDIA GPU: clocks, temperatures, throttling, utilisation, GPM activity."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ..clock import Clock
from ..schema import Capability, Telemetry
from ._nvml_power import absent_errors, number, read_field

T = TypeVar("T")

THROTTLE_REASONS = {  # nvmlClocksEventReason* in nvml.h
    0x001: "idle",
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "thermal (software)",
    0x040: "thermal (hardware)",
    0x080: "power brake",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability",
}
THROTTLE_TIME_FIELDS = {  # NVML_FI_DEV_CLOCKS_EVENT_REASON_*: nanoseconds since the driver was loaded
    74: "power cap",
    269: "thermal (software)",
    270: "thermal (hardware)",
    271: "power brake",
}
CLOCKS = {"graphics": 0, "sm": 1, "memory": 2, "video": 3}  # NVML_CLOCK_*
MEMORY_TEMP_FIELD = 82
# GPM_METRIC_* that we ask for: all in percent
GPM_METRICS = {2: "sm", 3: "occupancy", 5: "tensor", 10: "dram", 11: "fp64", 12: "fp32", 13: "fp16"}
GPM_RATES = {20: "pcie_tx", 21: "pcie_rx", 60: "nvlink_rx", 61: "nvlink_tx"}  # MiB/s
# A GPM window under ~50 ms gives 0 or NaN on the H200 (from the project's brief; not measured by a script here).
GPM_MIN_WINDOW_NS = 100_000_000
RAIL_VOLTAGE = Capability(
    name="rail voltages",
    available=False,
    reason="NVML does not report them",
    fix="a BMC may: add the Redfish sensor (TESSERA_REDFISH_URL), its PowerSupplies and Sensors have voltages",
)


class TelemetryReader:
    """Asks for each item. An item that is not supported or not permitted is noted once and not asked for again."""

    def __init__(self, nvml: Any, handle: Any, clock: Clock) -> None:
        self._nvml = nvml
        self._handle = handle
        self._clock = clock
        self.refused: dict[str, Exception] = {}
        self.failing: dict[str, Exception] = {}
        self._gpm: GpmReader | None = None
        support = self._ask("GPM activity", lambda: nvml.nvmlGpmQueryDeviceSupport(handle))
        if support is not None and support.isSupportedDevice:
            self._gpm = GpmReader(nvml, handle, clock)
        elif support is not None:
            self.refused["GPM activity"] = NotImplementedError("needs a Hopper GPU or later")

    def read(self, domain: str) -> Telemetry:
        """Ask for every item once; each takes about 20 µs (H200)."""
        nvml, h = self._nvml, self._handle
        memory = self._ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(h))
        rates = self._ask("utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(h))
        reasons = self._ask("throttle reasons", lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(h)))
        limit_mw = self._ask("power limit", lambda: int(nvml.nvmlDeviceGetEnforcedPowerLimit(h)))
        activity = self._ask("GPM activity", self._gpm.read) if self._gpm else None
        return Telemetry(
            time_ns=self._clock.monotonic_ns(),
            domain=domain,
            temperature_c=self._ask("temperature", lambda: float(nvml.nvmlDeviceGetTemperature(h, 0))),
            memory_temperature_c=self._ask("memory temperature", lambda: read_field(nvml, h, MEMORY_TEMP_FIELD)),
            clocks_mhz=self._clocks(),
            power_limit_w=None if limit_mw is None else limit_mw * 1e-3,
            throttle=None if reasons is None else throttle_names(reasons),
            throttled_s=self._ask("throttle times", self._throttled_s),
            utilization_pct=None if rates is None else float(rates.gpu),
            memory_utilization_pct=None if rates is None else float(rates.memory),
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            sm_activity_pct=(activity or {}).get("sm"),
            activity_pct=activity or {},
        )

    def capabilities(self, domain: str) -> list[Capability]:
        """Return what this GPU does not give, with the reasons."""
        return [
            Capability(name=f"{domain} {what}", available=False, reason=str(exc))
            for what, exc in {**self.refused, **self.failing}.items()
        ]

    def close(self) -> None:
        """Free the GPM samples."""
        if self._gpm is not None:
            self._gpm.close()

    def _ask(self, what: str, call: Callable[[], T]) -> T | None:
        if what in self.refused:
            return None
        nvml = self._nvml
        try:
            value = call()
        except absent_errors(nvml) as exc:
            self.refused[what] = exc
            return None
        except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_Uninitialized):
            raise
        except nvml.NVMLError as exc:  # it may pass: missing this time, asked again the next
            self.failing[what] = exc
            return None
        self.failing.pop(what, None)
        return value

    def _clocks(self) -> dict[str, float]:
        ask = self._nvml.nvmlDeviceGetClockInfo
        clocks = {n: self._ask(f"{n} clock", partial(ask, self._handle, kind)) for n, kind in CLOCKS.items()}
        return {name: float(mhz) for name, mhz in clocks.items() if mhz is not None}

    def _throttled_s(self) -> dict[str, float]:
        values = self._nvml.nvmlDeviceGetFieldValues(self._handle, list(THROTTLE_TIME_FIELDS))
        return {
            name: number(v.value, v.valueType) * 1e-9
            for name, v in zip(THROTTLE_TIME_FIELDS.values(), values, strict=True)
            if v.nvmlReturn == self._nvml.NVML_SUCCESS
        }


class GpmReader:
    """Reads GPM activity between two samples taken at least `GPM_MIN_WINDOW_NS` apart."""

    def __init__(self, nvml: Any, handle: Any, clock: Clock) -> None:
        self._nvml = nvml
        self._handle = handle
        self._clock = clock
        self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        self._taken_ns: int | None = None

    def read(self) -> dict[str, float] | None:
        """Return the percent by unit (and MiB/s by link) since the last read; None at the first read."""
        now = self._clock.monotonic_ns()
        if self._taken_ns is not None and now - self._taken_ns < GPM_MIN_WINDOW_NS:
            return None
        old, new = self._samples
        self._nvml.nvmlGpmSampleGet(self._handle, new)
        first, self._taken_ns = self._taken_ns is None, now
        self._samples = [new, old]
        return None if first else self._metrics(old, new)

    def _metrics(self, old: Any, new: Any) -> dict[str, float]:
        nvml = self._nvml
        wanted = {**GPM_METRICS, **GPM_RATES}
        ask = nvml.c_nvmlGpmMetricsGet_t()
        ask.version = nvml.NVML_GPM_METRICS_GET_VERSION
        ask.numMetrics = len(wanted)
        ask.sample1, ask.sample2 = old, new
        for i, metric in enumerate(wanted):
            ask.metrics[i].metricId = metric
        nvml.nvmlGpmMetricsGet(ask)
        answers = zip(wanted.values(), ask.metrics, strict=False)
        return {n: m.value for n, m in answers if m.nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(m.value)}

    def close(self) -> None:
        for sample in self._samples:
            self._nvml.nvmlGpmSampleFree(sample)
        self._samples = []


def throttle_names(bits: int) -> tuple[str, ...]:
    """Return the reasons in a bit field, without "idle" (an idle GPU is not throttled)."""
    return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit and name != "idle")
