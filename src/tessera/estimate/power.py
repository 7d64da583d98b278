"""Watts and the clock that follows from them: the energy of work, and how a power limit stretches its time.

Energy is counted in parts: `static` (a board whose clocks are up and whose SMs wait) times the time, the SMs while
they hold work, joules per FLOP by unit, joules per byte by level. When the average would pass the limit the clock
falls: time that follows the clock stretches, time bound by device memory does not, and the energy of the SM parts
falls with the square of the voltage. Constants are for random operands: zeros, sorted or ReLU'd data switch less
(`switching` < 1; the same H200 GEMM draws 403 W on zeros and 689 W on random numbers).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..device import Device
from ..errors import ArgumentError
from ..hardware import lookup
from .chip_fits import RELATIVES
from .kernel_time import STREAM_SHARE, Chip, KernelTime, chip, load_fit

_LOWEST_CLOCK = 0.1  # 210 of 1980 MHz: the lowest clock an H200 takes; nothing measured falls under 0.6


def highest_clock(watts: Callable[[float], float], limit_w: float, most: float = 1.0) -> float:
    """The highest clock, relative to boost and up to `most`, that keeps the average power within the limit."""
    if watts(most) <= limit_w:
        return most
    low, high = min(_LOWEST_CLOCK, most), most
    for _ in range(24):
        middle = 0.5 * (low + high)
        if watts(middle) > limit_w:
            high = middle
        else:
            low = middle
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """The work of a kernel or an iteration at the boost clock: seconds, FLOPs by unit, bytes by level. Adds up.

    `clock_s` stretches with 1/clock, `fixed_s` (bound by device memory, or latency) does not, `idle_s` is the device
    waiting for the host. `busy_s` is occupied-SM seconds divided by the number of SMs.
    """

    clock_s: float = 0.0
    fixed_s: float = 0.0
    idle_s: float = 0.0
    busy_s: float = 0.0
    flops: Mapping[str, float] = field(default_factory=dict)
    hbm_bytes: float = 0.0
    l2_bytes: float = 0.0

    def __post_init__(self) -> None:
        values = (self.clock_s, self.fixed_s, self.idle_s, self.busy_s, self.hbm_bytes, self.l2_bytes)
        if not all(value >= 0 for value in (*values, *self.flops.values())):
            raise ArgumentError("work cannot be negative", why=f"got {self}")

    @classmethod
    def of(cls, kernel: KernelTime, count: float = 1.0) -> DeviceWork:
        """The work of a kernel, `count` times."""
        many = count * kernel.activity
        flops = {kernel.unit: kernel.flops * many}
        if kernel.vector_flops:
            flops["vector.fp32"] = flops.get("vector.fp32", 0.0) + kernel.vector_flops * many
        return cls(
            clock_s=kernel.clock_s * count,
            fixed_s=max(0.0, kernel.seconds - kernel.clock_s) * count,
            busy_s=kernel.busy * kernel.draw * kernel.seconds * count,
            flops=flops,
            hbm_bytes=kernel.hbm_bytes * count,
            l2_bytes=kernel.l2_bytes * count,
        )

    def __add__(self, other: DeviceWork) -> DeviceWork:
        flops = dict(self.flops)
        for unit, value in other.flops.items():
            flops[unit] = flops.get(unit, 0.0) + value
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "flops"}
        return DeviceWork(**sums, flops=flops)

    def times(self, factor: float) -> DeviceWork:
        """This work, `factor` times."""
        numbers = {f.name: getattr(self, f.name) * factor for f in fields(self) if f.name != "flops"}
        return DeviceWork(**numbers, flops={unit: n * factor for unit, n in self.flops.items()})

    @property
    def seconds(self) -> float:
        """Seconds at the boost clock."""
        return self.clock_s + self.fixed_s + self.idle_s


@dataclass(frozen=True, slots=True)
class PowerEstimate:
    """Seconds and joules under the power limit; `clock` is relative to boost, the parts sum to `energy_j`."""

    seconds: float
    clock: float
    static_j: float
    compute_j: float
    memory_j: float
    relative_error: float

    @property
    def energy_j(self) -> float:
        """All joules."""
        return self.static_j + self.compute_j + self.memory_j

    @property
    def power_w(self) -> float:
        """Average watts; 0 for no time at all."""
        return self.energy_j / self.seconds if self.seconds > 0 else 0.0


def note_exceeded(device: Device, power_w: float) -> list[str]:
    """A note where work draws more than the limit that is set: the clock cannot fall further."""
    if device.power_limit_w is None or power_w <= device.power_limit_w:
        return []
    told = f"the limit of {device.power_limit_w:g} W is exceeded: its work draws {power_w:.0f} W at the lowest clock"
    return [f"{told}, and these figures are those of that clock"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerModel:
    """The energy of work on a device. `active_w` is drawn while every SM holds work, at the boost clock.

    `limit_w` is what the clock is lowered to hold; `board_limit_w`, the board's own, is never exceeded.
    """

    static_w: float
    limit_w: float
    board_limit_w: float
    active_w: float
    hbm_j_per_byte: float
    l2_j_per_byte: float
    j_per_flop: Mapping[str, float]
    voltage_slope: float
    voltage_floor: float
    relative_error: float
    provenance: str
    most_clock: float = 1.0

    @classmethod
    def from_device(cls, device: Device) -> PowerModel:
        """The model of a device: the H200's is fitted, others carry its ratios over to their own figures.

        A power limit or a clock that the driver sets lowers what the board may do, and changes nothing else.
        """
        model = _fit_to_chip(chip(device), *_board_figures(device))
        if device.power_limit_w is not None:
            model = replace(model, limit_w=device.power_limit_w * load_fit("h200_power.json")["limit_fraction"])
        if device.clock_limit_hz is not None:
            model = replace(model, most_clock=min(1.0, device.clock_limit_hz / chip(device).clock_hz))
        return model

    def voltage(self, clock: float) -> float:
        """Voltage relative to that at the boost clock."""
        return max(self.voltage_floor, 1.0 - self.voltage_slope * (1.0 - clock))

    def estimate(self, work: DeviceWork, *, switching: float = 1.0) -> PowerEstimate:
        """Seconds and joules of the work under the limit; `switching` scales the dynamic energy of its data."""
        clock = highest_clock(lambda f: self._watts(work, f, switching), self.limit_w, self.most_clock)
        # A board at its lowest clock has nothing left to lower: its memory's traffic may be above a limit that is set.
        # Traffic above the board's own limit is more than its memory can carry: it takes longer.
        seconds, static_j, compute_j, memory_j = self._parts(work, clock, switching)
        if static_j + compute_j + memory_j > self.board_limit_w * seconds:
            seconds = (compute_j + memory_j) / (self.board_limit_w - self.static_w)
            static_j = self.static_w * seconds
        return PowerEstimate(seconds, clock, static_j, compute_j, memory_j, self.relative_error)

    def _watts(self, work: DeviceWork, clock: float, switching: float) -> float:
        seconds, *parts = self._parts(work, clock, switching)
        joules = sum(parts)
        return joules / seconds if seconds > 0 else math.inf if joules > 0 else 0.0

    def _parts(self, work: DeviceWork, clock: float, switching: float) -> tuple[float, float, float, float]:
        running = work.clock_s / clock + work.fixed_s
        seconds = running + work.idle_s
        at_boost = work.clock_s + work.fixed_s
        square = self.voltage(clock) ** 2
        # Power of the clocked parts goes with clock * V^2, for as long as the work now takes.
        busy_s = work.busy_s * clock * (running / at_boost) if at_boost > 0 else 0.0
        flops_j = self.flops_j(work)
        compute_j = square * (self.active_w * busy_s + switching * flops_j)
        memory_j = switching * (self.hbm_j_per_byte * work.hbm_bytes + square * self.l2_j_per_byte * work.l2_bytes)
        return seconds, self.static_w * seconds, compute_j, memory_j

    def flops_j(self, work: DeviceWork) -> float:
        """Joules of the FLOPs at the boost clock; a unit nobody measured costs as much as the most expensive one."""
        most = max(self.j_per_flop.values(), default=0.0)
        return sum(self.j_per_flop.get(unit, most) * n for unit, n in work.flops.items())


def _board_figures(device: Device) -> tuple[float, float | None, str]:
    if device.tdp_w is None:
        raise ArgumentError(
            f"the power limit of {device.id} is not known",
            why="watts and joules cannot be predicted without it",
            fix="give tdp_w in a device file of your own",
        )
    return device.tdp_w.value, device.idle_w.value if device.idle_w else None, device.memory.kind or ""


# Energy of a transistor that switches, relative to the H200's 4N process at the same voltage. From what TSMC states at
# equal speed (N16 to N7 -60%, of which 12 nm has a part; N7 to N5 -30%; 4N and 4NP a few percent each); not measured.
_PROCESS = {"hopper": 1.0, "ada": 1.0, "blackwell": 0.95, "ampere": 1.4, "turing": 2.2, "volta": 2.2} | {
    "cdna2": 1.35,
    "cdna3": 1.05,
    "cdna4": 0.8,
}
# Joules per byte of device memory relative to HBM3E. A vendor's table gives HBM2E 6.0 pJ/bit, GDDR6 7.5, GDDR6X 7.25;
# assumed: HBM3E about 4.5, LPDDR5 about 4, DDR5 about 11 with its module.
_MEMORY = {"HBM3E": 1.0, "HBM3": 1.0, "HBM2E": 1.3, "HBM2": 1.3, "HBM": 1.15, "GDDR6": 1.7, "GDDR6X": 1.65} | {
    "GDDR7": 1.4,
    "LPDDR5": 0.9,
    "LPDDR5X": 0.8,
    "DDR5": 2.5,
}
_STREAM_DRAW = 1.06  # of SMs that add to numbers from device memory (h200_models.json: elementwise.dense.add)
_H200_TDP_W, _H200_IDLE_W, _H200_CLOCK_HZ, _H200_UNITS = 700.0, 77.0, 1.98e9, 132  # h200.toml
# The H200's peaks (h200.toml), to turn its joules per FLOP into watts at full rate.
_H200_PEAKS = (
    {"matrix.bf16": 9.89e14, "matrix.fp16": 9.89e14, "matrix.tf32": 4.947e14, "matrix.fp8": 1.979e15}
    | {"matrix.int8": 1.979e15, "matrix.fp64": 6.7e13, "vector.fp64": 3.4e13, "vector.fp32": 6.7e13}
    | {"vector.fp16": 1.338e14, "vector.bf16": 1.338e14}
)


@functools.lru_cache(maxsize=256)
def _fit_to_chip(of: Chip, tdp_w: float, idle_w: float | None, memory_kind: str) -> PowerModel:
    data = load_fit("h200_power.json")
    limit_w = tdp_w * data["limit_fraction"]
    law = {"limit_w": limit_w, "board_limit_w": limit_w}
    law |= {key: data[key] for key in ("voltage_slope", "voltage_floor")}
    if of.calibrated:
        names = ("static_w", "active_w", "hbm_j_per_byte", "l2_j_per_byte", "j_per_flop", "relative_error")
        constants = {name: data[name] for name in names}
        constants["static_w"] = min(constants["static_w"], 0.5 * limit_w)  # a limit set far below the board's own
        return PowerModel(provenance="fitted on an H200", **constants, **law)
    fitted = load_fit(f"{of.fitted}_kernels.json").get("power") if of.fitted else None
    if fitted is not None:
        provenance = f"fitted on public readings of the {of.fitted}: NVML's averages over a second"
        return _fit_streams(PowerModel(provenance=provenance, **fitted, **law), of)
    name = RELATIVES.get(of.capability) if of.nvidia else None
    if name is not None and "power" in load_fit(f"{name}_kernels.json"):
        constants = _carry_over(name, of, tdp_w, idle_w)
        constants["relative_error"] = max(constants["relative_error"], data["carried_over_error"])
        provenance = f"fitted on public readings of the {name}, carried over by TDP and peaks"
        return _fit_streams(PowerModel(provenance=provenance, **constants, **law), of)
    share = tdp_w / _H200_TDP_W
    # A board with its clocks up draws more than at idle, in the H200's proportion; at most half the limit.
    static_w = data["static_w"] * (idle_w / _H200_IDLE_W if idle_w else share)
    static_w = min(static_w, 0.5 * limit_w)
    switch = _switching_energy(of, data)
    active_w = data["active_w"] * share
    if (
        switch is not None
    ):  # at most its share of TDP, as joules per FLOP below: a V100 runs fp32 products at full clock
        active_w = min(active_w, data["active_w"] * switch * of.units / _H200_UNITS * of.clock_hz / _H200_CLOCK_HZ)
    memory_j = data["hbm_j_per_byte"] * _MEMORY.get(memory_kind, 1.3)
    model = PowerModel(
        static_w=static_w,
        active_w=min(active_w, 0.5 * (limit_w - static_w)),
        hbm_j_per_byte=memory_j,
        l2_j_per_byte=data["l2_j_per_byte"] * (switch or 1.0),
        j_per_flop=_per_flop(of, share, switch, data),
        relative_error=data["carried_over_error"],
        provenance="H200 constants carried over by process, clock, TDP and memory kind",
        **law,
    )
    return _fit_streams(model, of)


def _carry_over(name: str, of: Chip, tdp_w: float, idle_w: float | None) -> dict[str, Any]:
    """A relative's watts, from a chip with readings: at full rate no larger a share of its own TDP than there."""
    device, fitted = lookup(name), load_fit(f"{name}_kernels.json")["power"]
    known = chip(device)
    share = tdp_w / known.tdp_w if known.tdp_w else 1.0
    idle = idle_w / device.idle_w.value if idle_w and device.idle_w else share
    peaks = {f"{kind}.{n}": share * value for n, value, kind in known.peaks}
    bytes_share = min(1.0, share * known.bandwidth / of.bandwidth)
    own = {f"{kind}.{n}": value for n, value, kind in of.peaks if f"{kind}.{n}" in fitted["j_per_flop"]}
    return {
        "static_w": fitted["static_w"] * min(share, idle),
        "active_w": fitted["active_w"] * share,
        "hbm_j_per_byte": fitted["hbm_j_per_byte"] * bytes_share,
        "l2_j_per_byte": fitted["l2_j_per_byte"] * bytes_share,
        "j_per_flop": {unit: fitted["j_per_flop"][unit] * min(1.0, peaks[unit] / own[unit]) for unit in own},
        "relative_error": fitted["relative_error"],
    }


def _fit_streams(model: PowerModel, of: Chip) -> PowerModel:
    """The model with joules per byte of at most what a stream may draw: a board is built to use its bandwidth.

    With all SMs at work at the boost clock, the bytes have what static power and the SMs leave of the limit.
    """
    left_w = model.limit_w - model.static_w - _STREAM_DRAW * model.active_w
    j_per_byte = left_w / (STREAM_SHARE * of.bandwidth)
    share = min(1.0, j_per_byte / (model.hbm_j_per_byte + model.l2_j_per_byte))
    return replace(model, hbm_j_per_byte=share * model.hbm_j_per_byte, l2_j_per_byte=share * model.l2_j_per_byte)


def _switching_energy(of: Chip, data: Mapping[str, Any]) -> float | None:
    """Energy per switched transistor relative to the H200's: process, and the voltage that the boost clock needs."""
    process = _PROCESS.get(of.architecture)
    if process is None:
        return None
    voltage = max(data["voltage_floor"], 1.0 - data["voltage_slope"] * (1.0 - of.clock_hz / _H200_CLOCK_HZ))
    return float(process * voltage**2)


def _per_flop(of: Chip, share: float, switch: float | None, data: Mapping[str, Any]) -> dict[str, float]:
    """The H200's joules by process and voltage, at most those that draw its share of TDP in a full-rate product."""
    fitted: Mapping[str, float] = data["j_per_flop"]
    costs = {}
    for name, peak, kind in of.peaks:
        unit = f"{kind}.{name}"
        # Formats that were not measured on the H200 are assumed to draw half its TDP at full rate.
        full_w = fitted[unit] * _H200_PEAKS[unit] if unit in fitted else 0.5 * _H200_TDP_W
        by_share = full_w * share / peak
        if unit == "vector.fp32" and of.narrow:  # the H200 draws it at 0.77 of the peak, these reach 0.92 (gemm.py)
            by_share *= 0.77 / 0.92
        costs[unit] = min(by_share, fitted[unit] * switch) if switch is not None and unit in fitted else by_share
    return costs
