"""Reads one Intel GPU through Level Zero Sysman: its power domains and its telemetry, in our units.

Written against pyzes 0.1; tested against a fake at the ABI, untested on hardware. Sysman has a handle for each power
domain or sensor, with properties that say what it is. `Sysman` turns the C calls into lists and exceptions.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from ..clock import now_ns
from ..schema import Capability, Telemetry
from ._meters import CounterPower
from .base import telemetry_capabilities

# ze_result_t (ze_api.h): NOT_READY, DEVICE_IN_LOW_POWER_STATE, HANDLE_OBJECT_IN_USE. The GPU is there, but not ready.
TRANSIENT = frozenset({0x1, 0x70000007, 0x78000006})
PERMISSION = 0x70010000  # ZE_RESULT_ERROR_INSUFFICIENT_PERMISSIONS

# zes_freq_throttle_reason_flag_t (zes_api.h), bit by bit.
_THROTTLE = (
    *("power-average", "power-burst", "current", "thermal", "psu-alert"),
    *("software-range", "hardware-range", "voltage", "thermal", "power"),
)
# zes_power_domain_t (zes_api.h) with our names, best first: the user pays for the whole card.
_POWER_DOMAINS = {1: "card", 2: "package", 0: "device", 3: "stack", 5: "gpu", 4: "memory"}
# The error code for a call that the loader is too old to have: the specification's UNSUPPORTED_FEATURE.
UNSUPPORTED = 0x78000003


class ZesError(Exception):
    """A Sysman call failed; `code` is its ze_result_t."""

    def __init__(self, function: str, code: int, meaning: str) -> None:
        self.code = code
        super().__init__(f"{function}: {meaning}")


class Sysman:
    """Calls the binding, and raises an exception instead of returning a code."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._meanings = {
            value: name.removeprefix("ZE_RESULT_")
            for name, value in vars(module).items()
            if name.startswith("ZE_RESULT_") and isinstance(value, int)
        }

    def call(self, function: str, *args: Any) -> None:
        """Call a function. Raises ZesError if it fails."""
        try:
            code = int(getattr(self.module, function)(*args))
        except AttributeError as err:  # from the binding, or from a loader older than the function
            raise ZesError(function, UNSUPPORTED, str(err)) from err
        if code:
            raise ZesError(function, code, self._meanings.get(code, f"error 0x{code:08X}"))

    def enumerate(self, function: str, handle_type: Any, *parent: Any) -> list[Any]:
        """Return all handles of a kind. Sysman is asked for their count first, then for the handles."""
        count = ctypes.c_uint32(0)
        self.call(function, *parent, ctypes.byref(count), None)
        if count.value == 0:
            return []
        handles = (handle_type * count.value)()
        self.call(function, *parent, ctypes.byref(count), handles)
        return list(handles[: count.value])

    def fill(self, function: str, handle: Any, struct: Any) -> Any:
        """Let Sysman fill a structure, and return it."""
        self.call(function, handle, ctypes.byref(struct))
        return struct

    def make_struct(self, name: str) -> Any:
        """Make an empty structure with its type set, as the specification asks of the caller."""
        struct = getattr(self.module, f"zes_{name}_t")()
        struct.stype = getattr(self.module, f"ZES_STRUCTURE_TYPE_{name.upper()}")
        return struct

    def describe(self, function: str, handle: Any, name: str) -> Any:
        """Make a structure with `make_struct` and let Sysman fill it."""
        return self.fill(function, handle, self.make_struct(name))


@dataclass(slots=True)
class PowerDomain:
    """One energy counter of a GPU: the card's, the package's, a stack's (tile's) or the memory's."""

    handle: Any
    kind: str
    subdevice: int | None
    meter: CounterPower | None = None
    gone: bool = False

    @property
    def suffix(self) -> str:
        """Return what to append to the GPU's name for this part."""
        return self.kind if self.subdevice is None else f"{self.kind}{self.subdevice}"


class IntelGpu:
    """One GPU: its identity, power domains and telemetry."""

    def __init__(self, sysman: Sysman, handle: Any, name: str) -> None:
        self._sysman = sysman
        self._handle = handle
        self.name = name
        self.failure: str | None = None
        self.denied = False
        self._missing: dict[str, str] = {}
        self._engine_before: dict[int, tuple[int, int]] = {}
        self._traffic_before: dict[int, tuple[int, int]] = {}
        properties = sysman.describe("zesDeviceGetProperties", handle, "device_properties")
        self.kind = int(properties.core.type)
        self.tiles = max(int(properties.numSubdevices), 1)
        self.label = _text(properties.core.name) or _text(properties.modelName) or "Intel GPU"
        self.note = f"{self._bdf()} {bytes(properties.core.uuid.id).hex()}".strip()
        self._temperatures: list[tuple[Any, Any]] = []
        self._clocks: list[tuple[Any, Any]] = []
        self._memories: list[tuple[Any, Any]] = []
        self._engines: list[tuple[Any, Any]] = []

    def _bdf(self) -> str:
        try:
            address = self._sysman.describe("zesDevicePciGetProperties", self._handle, "pci_properties").address
        except ZesError:
            return ""
        return f"{address.domain:04x}:{address.bus:02x}:{address.device:02x}.{address.function:x}"

    def power_domains(self) -> list[PowerDomain]:
        """Return the domains whose counter answers. The one that stands for the whole GPU comes first."""
        module = self._sysman.module
        domains: list[PowerDomain] = []
        try:
            handles = self._sysman.enumerate("zesDeviceEnumPowerDomains", module.zes_pwr_handle_t, self._handle)
        except ZesError as err:
            self._note_failure(err)
            return []
        for handle in handles:
            try:
                properties, kind = self._power_properties(handle)
                self.energy(handle)
            except ZesError as err:
                self._note_failure(err)
                continue
            subdevice = int(properties.subdeviceId) if properties.onSubdevice else None
            if subdevice is not None and kind == "device":
                kind = "stack"  # what a driver without the extended properties calls a tile
            domains.append(PowerDomain(handle, kind, subdevice))
        order = list(_POWER_DOMAINS.values())
        return sorted(domains, key=lambda d: (d.subdevice is not None, order.index(d.kind), d.subdevice or 0))

    def _power_properties(self, handle: Any) -> tuple[Any, str]:
        extended = self._sysman.make_struct("power_ext_properties")
        properties = self._sysman.make_struct("power_properties")
        properties.pNext = ctypes.cast(ctypes.pointer(extended), ctypes.c_void_p)
        self._sysman.fill("zesPowerGetProperties", handle, properties)
        return properties, _POWER_DOMAINS.get(int(extended.domain), "device")

    def energy(self, handle: Any) -> tuple[float, int]:
        """Read a counter: its joules and its time stamp in nanoseconds. Raises ZesError."""
        counter = self._sysman.module.zes_power_energy_counter_t()
        self._sysman.fill("zesPowerGetEnergyCounter", handle, counter)
        if counter.energy in (0, 0xFFFFFFFFFFFFFFFF):
            raise ZesError("zesPowerGetEnergyCounter", UNSUPPORTED, "the counter reads 0 or nothing")
        return counter.energy * 1e-6, int(counter.timestamp) * 1000

    def _note_failure(self, err: ZesError) -> None:
        self.denied = self.denied or err.code == PERMISSION
        self.failure = str(err)

    def probe_telemetry(self, power: Any) -> list[Capability]:
        """Find the sensors and read everything once (rates start here). Return which telemetry this GPU has."""
        z = self._sysman.module
        self._missing.clear()
        self._temperatures = self._sensors("temperature", "Temperature", "TemperatureSensors", z.zes_temp_handle_t)
        self._clocks = self._sensors("clocks", "Frequency", "FrequencyDomains", z.zes_freq_handle_t)
        self._memories = self._sensors("memory", "Memory", "MemoryModules", z.zes_mem_handle_t)
        self._engines = self._sensors("utilization", "Engine", "EngineGroups", z.zes_engine_handle_t)
        first = self.telemetry(power)
        rates = {
            "throttle_time": first.throttled_s,
            "utilization": self._engine_before or None,
            "memory_utilization": self._traffic_before or None,
        }
        return telemetry_capabilities(first, rates, self._missing, "the GPU has no such sensor")

    def _sensors(self, what: str, noun: str, plural: str, handle_type: Any) -> list[tuple[Any, Any]]:
        """Return the handles of a kind with their properties."""
        short = {"Temperature": "temp", "Frequency": "freq", "Memory": "mem", "Engine": "engine"}[noun]
        sensors = []
        try:
            for handle in self._sysman.enumerate(f"zesDeviceEnum{plural}", handle_type, self._handle):
                properties = self._sysman.describe(f"zes{noun}GetProperties", handle, f"{short}_properties")
                sensors.append((handle, properties))
        except ZesError as err:
            self._missing[what] = str(err)
        return sensors

    def _ask(self, what: str, function: str, handle: Any, struct: Any) -> Any:
        """Return the filled structure, or None, and then keep the reason under `what`."""
        try:
            return self._sysman.fill(function, handle, struct)
        except ZesError as err:
            self._missing[what] = str(err)
            return None

    def telemetry(self, power: Any) -> Telemetry:
        """Read everything but power. `power` is the handle whose limit is reported."""
        used, total = self._memory()
        clocks, throttle, throttled_s = self._frequency()
        return Telemetry(
            time_ns=now_ns(),
            domain=self.name,
            # zes_temp_sensors_t: 0 is the maximum of all sensors, 1 of the GPU, 2 of the memory.
            temperature_c=self._temperature("temperature", (1, 0)),
            memory_temperature_c=self._temperature("memory_temperature", (2,)),
            clocks_mhz=clocks,
            power_limit_w=self._power_limit_w(power),
            throttle=throttle,
            throttled_s=throttled_s,
            utilization_pct=self._utilization(),
            memory_utilization_pct=self._traffic(),
            memory_used_bytes=used,
            memory_total_bytes=total,
        )

    def _temperature(self, what: str, kinds: tuple[int, ...]) -> float | None:
        for kind in kinds:
            answers = [
                self._ask(what, "zesTemperatureGetState", handle, ctypes.c_double())
                for handle, properties in self._temperatures
                if properties.type == kind
            ]
            valid = [a.value for a in answers if a is not None and a.value > 0.0]
            if valid:
                return float(max(valid))
        return None

    def _frequency(self) -> tuple[dict[str, float], tuple[str, ...] | None, dict[str, float] | None]:
        """Return clocks, reasons for throttling now, and seconds throttled, over all tiles (the slowest one counts)."""
        z = self._sysman.module
        clocks: dict[str, float] = {}
        reasons: set[str] = set()
        throttled_s: dict[str, float] = {}
        answered = False
        for handle, properties in self._clocks:
            name = {0: "gpu", 1: "mem", 2: "media"}.get(int(properties.type))
            state = self._sysman.make_struct("freq_state")
            if name is None or self._ask("clocks", "zesFrequencyGetState", handle, state) is None:
                continue
            if state.actual > 0.0:  # negative: not known (zes_freq_state_t)
                clocks[name] = min(clocks.get(name, state.actual), state.actual)
            answered = True
            reasons |= {word for bit, word in enumerate(_THROTTLE) if state.throttleReasons >> bit & 1}
            spent = self._ask("throttle_time", "zesFrequencyGetThrottleTime", handle, z.zes_freq_throttle_time_t())
            if spent is not None:
                throttled_s[name] = max(throttled_s.get(name, 0.0), spent.throttleTime * 1e-6)
        return clocks, tuple(sorted(reasons)) if answered else None, throttled_s or None

    def _memory(self) -> tuple[int | None, int | None]:
        """Return the used and the total bytes of the memory on the card (zes_mem_loc_t 1), over all tiles."""
        used, total = 0, 0
        for handle, properties in self._memories:
            state = self._sysman.make_struct("mem_state")
            if properties.location != 1 or self._ask("memory", "zesMemoryGetState", handle, state) is None:
                continue
            used, total = used + state.size - state.free, total + state.size
        return (used, total) if total else (None, None)

    def _traffic(self) -> float | None:
        """Return the bandwidth used since the last call, in percent of the modules' maximum together."""
        moved = possible = 0.0
        for i, (handle, _) in enumerate(self._memories):
            traffic = self._sysman.module.zes_mem_bandwidth_t()
            if self._ask("memory_utilization", "zesMemoryGetBandwidth", handle, traffic) is None:
                continue
            count, stamp_us = traffic.readCounter + traffic.writeCounter, traffic.timestamp
            before = self._traffic_before.get(i)
            self._traffic_before[i] = (count, stamp_us)
            if before is not None and stamp_us > before[1] and count >= before[0]:
                moved += count - before[0]
                possible += traffic.maxBandwidth * (stamp_us - before[1]) * 1e-6
        return min(100.0 * moved / possible, 100.0) if possible else None

    def _utilization(self) -> float | None:
        """Return the share of time since the last call that any engine was busy, as the mean of the tiles."""
        shares: list[float] = []
        for i, (handle, properties) in enumerate(self._engines):
            struct = self._sysman.module.zes_engine_stats_t()
            if properties.type != 0 or self._ask("utilization", "zesEngineGetActivity", handle, struct) is None:
                continue
            active, stamp = int(struct.activeTime), int(struct.timestamp)
            before = self._engine_before.get(i)
            self._engine_before[i] = (active, stamp)
            if before is not None and stamp > before[1] and active >= before[0]:
                shares.append(min(100.0 * (active - before[0]) / (stamp - before[1]), 100.0))
        return sum(shares) / len(shares) if shares else None

    def _power_limit_w(self, power: Any) -> float | None:
        """Return the sustained limit (zes_power_level_t 1) in watts; Sysman gives milliwatts."""
        z = self._sysman.module
        count = ctypes.c_uint32(0)
        try:
            self._sysman.call("zesPowerGetLimitsExt", power, ctypes.byref(count), None)
            if count.value == 0:
                return None
            limits = (z.zes_power_limit_ext_desc_t * count.value)()
            for limit in limits:
                limit.stype = z.ZES_STRUCTURE_TYPE_POWER_LIMIT_EXT_DESC
            self._sysman.call("zesPowerGetLimitsExt", power, ctypes.byref(count), limits)
        except ZesError as err:
            self._missing["power_limit"] = str(err)
            return None
        watts = [d.limit * 1e-3 for d in limits if d.level == 1 and d.limitUnit == 2 and d.enabled and d.limit > 0]
        return min(watts) if watts else None


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace").strip()
