"""Reads one AMD GPU through AMD SMI: its identity, its power or energy, its telemetry, in our units.

Written against amdsmi 7.0; tested against a fake at the ABI, untested on hardware. AMD SMI has four ways to say that a
value is unknown (an error, "N/A", 0, or the largest number of the field's width); this module turns all into None.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from ..clock import now_ns
from ..schema import Capability, Telemetry
from ._meters import CounterPower, PolledPower
from .base import telemetry_capabilities

T = TypeVar("T")

# amdsmi_status_t of amdsmi.h: TIMEOUT, RETRY, INTERRUPT, BUSY. The GPU is there, but it is busy.
TRANSIENT = frozenset({8, 9, 11, 30})
NO_PERMISSION = 10
# What fields of 16, 32 and 64 bits hold if the firmware does not fill them (MaxUIntegerTypes of the binding).
_UNFILLED = frozenset({0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})
# Power caps are in microwatts on bare metal and in watts on a hypervisor (amdsmi.h, amdsmi_power_cap_info_t). No
# board's cap is above 100 kW or below 0.1 W, so a larger number is in microwatts.
_MICROWATTS_ABOVE = 100_000
# The call for violations may sleep inside the library to read counters twice; it may take at most 2% of the time.
_VIOLATION_REST = 50
_VIOLATION_SLOW_NS = 20_000_000

_VIOLATIONS = {
    "active_ppt_pwr": "power",
    "active_socket_thrm": "thermal",
    "active_vr_thrm": "thermal-regulator",
    "active_hbm_thrm": "thermal-memory",
    "active_prochot_thrm": "prochot",
    "active_gfx_clk_below_host_limit": "clock-limit",
}


def as_nonzero(value: Any) -> float | None:
    """Return a reading that is never 0 while the GPU runs, or None if AMD SMI marks it as missing."""
    return as_number(value) or None


def as_number(value: Any) -> float | None:
    """Return a reading that may be 0 (a utilisation, memory used), or None if it is missing."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value in _UNFILLED:
        return None
    return float(value)


def as_watts(cap: Any) -> float | None:
    """Return a power cap in watts, or None if it is missing."""
    value = as_nonzero(cap)
    return value / 1e6 if value is not None and value > _MICROWATTS_ABOVE else value


def error_text(err: Exception) -> str:
    """Return the binding's description of an error, on one line."""
    return " ".join(str(getattr(err, "err_info", None) or err).split())


def select_visible(uuids: Sequence[Collection[str]], setting: str | None) -> list[int]:
    """Return the indices that a `*_VISIBLE_DEVICES` setting allows: up to the first entry that matches no GPU."""
    if setting is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in (part.strip().lower() for part in setting.split(",")):
        if entry.isdigit():
            matches = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matches = [i for i, names in enumerate(uuids) if entry and entry in {n.lower() for n in names}]
        if not matches or matches[0] in chosen:
            break
        chosen.append(matches[0])
    return chosen


class Smi:
    """Calls the binding's functions by name. A function that an older release lacks fails like one the GPU lacks."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.error: type[Exception] = module.AmdSmiException

    def call(self, function: str, *args: Any) -> Any:
        """Call a function of the binding. Raises the binding's own exception (`error`)."""
        if not hasattr(self.module, function):
            raise self.error(f"this amdsmi has no {function}")
        return getattr(self.module, function)(*args)


class AmdGpu:
    """One GPU and what is known about it. The sensor chooses its `meter`; a GPU without one has no domain."""

    def __init__(self, smi: Smi, handle: Any) -> None:
        self._smi = smi
        self._handle = handle
        self.name = ""
        self.meter: CounterPower | PolledPower | None = None
        self.capabilities: list[Capability] = []
        self.failure: str | None = None
        self.denied = False
        self.gone = False
        self.power_field = "power"
        self._missing: dict[str, str] = {}
        self._violations_due_ns = 0
        asic = self._ask("label", "amdsmi_get_gpu_asic_info") or {}
        place = self._ask("hip_id", "amdsmi_get_gpu_enumeration_info") or {}
        self.label: str = asic.get("market_name") or "AMD GPU"
        self.bdf: str = self._ask("bdf", "amdsmi_get_gpu_device_bdf") or "?"
        self.hip_id: int | None = place.get("hip_id") if isinstance(place.get("hip_id"), int) else None
        uuid = self._ask("uuid", "amdsmi_get_gpu_device_uuid") or ""
        # ROCr names a GPU "GPU-" and its serial number in hexadecimal (rocminfo); AMD SMI also has an RFC 4122 UUID.
        serial = str(asic.get("asic_serial", "")).lower().removeprefix("0x")
        self.uuids = {n for n in (uuid, place.get("hip_uuid"), f"GPU-{serial}" if serial else None) if n}
        self.is_dual_die = "MI250" in self.label
        self.note = f"{self.bdf} {uuid}".strip()
        if self.is_dual_die:
            self.note += "; an MI250X reading covers both dies of the package"

    def read_energy(self) -> tuple[float, int] | None:
        """Return the counter's joules and its time stamp in nanoseconds; None for N/A. Raises the binding's error."""
        count = self._smi.call("amdsmi_get_energy_count", self._handle)
        ticks = as_nonzero(count.get("energy_accumulator"))
        resolution_uj = as_nonzero(count.get("counter_resolution"))
        if ticks is None or resolution_uj is None:
            return None
        return ticks * resolution_uj * 1e-6, int(as_nonzero(count.get("timestamp")) or 0)

    def read_power_w(self) -> float | None:
        """Return the present socket power, or the average if there is no present one; None for N/A. Raises."""
        info = self._smi.call("amdsmi_get_power_info", self._handle)
        for field in ("current_socket_power", "average_socket_power"):
            power_w = as_nonzero(info.get(field))
            if power_w is not None:
                self.power_field = field.replace("_", "-")
                return power_w
        return None

    def probe(self, read: Callable[[], T | None]) -> T | None:
        """Return a reading, or None, and then keep the reason in `failure`."""
        try:
            value = read()
        except self._smi.error as err:
            self.denied = self.denied or getattr(err, "err_code", None) == NO_PERMISSION
            self.failure = error_text(err)
            return None
        if value is None:
            self.failure = "the reading is N/A or 0"
        return value

    def _ask(self, what: str, function: str, *args: Any) -> Any:
        """Return the answer, or None, and then keep the reason under `what`."""
        try:
            return self._smi.call(function, self._handle, *args)
        except (self._smi.error, ValueError) as err:  # ValueError: a serial or name the binding cannot decode
            self._missing[what] = error_text(err)
            return None

    def probe_telemetry(self) -> list[Capability]:
        """Read everything once, and return which telemetry this GPU has."""
        self._missing.clear()
        first = self.telemetry()
        rates = {"utilization": first.utilization_pct}
        return telemetry_capabilities(first, rates, self._missing, "the reading is N/A")

    def telemetry(self) -> Telemetry:
        """Read everything but power."""
        activity = self._ask("utilization", "amdsmi_get_gpu_activity") or {}
        used, total = self._memory("usage"), self._memory("total")
        return Telemetry(
            time_ns=now_ns(),
            domain=self.name,
            # MI300 has no edge sensor, consumer boards have both. The hot spot is what makes a GPU throttle.
            temperature_c=self._temperature("temperature", "HOTSPOT") or self._temperature("temperature", "EDGE"),
            memory_temperature_c=self._temperature("memory_temperature", "VRAM"),
            clocks_mhz={k: v for k, t in (("sys", "SYS"), ("mem", "MEM")) if (v := self._clock(t)) is not None},
            power_limit_w=self._power_limit_w(),
            throttle=self._throttle(),
            utilization_pct=as_number(activity.get("gfx_activity")),
            memory_utilization_pct=as_number(activity.get("umc_activity")),
            memory_used_bytes=None if used is None else int(used),
            memory_total_bytes=int(total) if total else None,
        )

    def _temperature(self, what: str, place: str) -> float | None:
        smi = self._smi.module
        place, metric = smi.AmdSmiTemperatureType[place], smi.AmdSmiTemperatureMetric.CURRENT
        return as_nonzero(self._ask(what, "amdsmi_get_temp_metric", place, metric))

    def _clock(self, kind: str) -> float | None:
        info = self._ask("clocks", "amdsmi_get_clock_info", self._smi.module.AmdSmiClkType[kind])
        return as_nonzero(info.get("clk")) if info else None

    def _memory(self, what: str) -> float | None:
        vram = self._smi.module.AmdSmiMemoryType.VRAM
        return as_number(self._ask("memory", f"amdsmi_get_gpu_memory_{what}", vram))

    def _power_limit_w(self) -> float | None:
        info = self._ask("power_limit", "amdsmi_get_power_cap_info") or {}
        return as_watts(info.get("power_cap"))

    def _throttle(self) -> tuple[str, ...] | None:
        before_ns = now_ns()
        if before_ns < self._violations_due_ns:
            return None
        status = self._ask("throttle", "amdsmi_get_violation_status") or {}
        after_ns = now_ns()
        if after_ns - before_ns > _VIOLATION_SLOW_NS:
            self._violations_due_ns = after_ns + _VIOLATION_REST * (after_ns - before_ns)
        # The binding gives True, False or "N/A", and "N/A" is true in Python.
        active = {name: status.get(field) for field, name in _VIOLATIONS.items()}
        if not any(isinstance(value, bool) for value in active.values()):
            return None
        return tuple(name for name, value in active.items() if value is True)
