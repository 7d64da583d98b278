"""`Device`: what a chip can do and what that costs; every number has its source.

All values are SI: FLOP/s (or op/s), bytes, bytes/s, Hz, W, J. Peaks are dense, never the sparse ones that
datasheets print first, and matrix units (tensor cores, AMX, MXU) are kept apart from vector units.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from .errors import ArgumentError, UnitError, did_you_mean
from .units import parse_frequency, parse_power

PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp6", "fp4", "int8", "int4")
"""Number formats that may have a peak, widest first."""

Unit = Literal["vector", "matrix"]
Kind = Literal["gpu", "cpu", "accelerator", "soc"]

# An assumed figure has at least this relative error: an idle power guessed from a similar board was wrong by a factor
# of three for the H200 (30% of TDP against a measured 11%).
ASSUMED_ERROR = 0.30


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number from a datasheet or a measurement, with its source; `error` is the 90% half-width."""

    value: float
    source: str
    error: float | None = None
    assumed: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and self.value > 0):
            raise ArgumentError(f"a figure must be a positive number, not {self.value!r}")
        if not self.source.strip():
            raise ArgumentError("a figure needs a source", fix="say where the number comes from")
        if self.error is not None and not (math.isfinite(self.error) and self.error > 0):
            raise ArgumentError(f"an error must be a positive half-width, not {self.error!r}")

    def scale(self, factor: float, why: str = "") -> Figure:
        """Return the figure times a factor, with the same relative error; `why` is added to the source."""
        error = None if self.error is None else self.error * factor
        source = f"{self.source}; {why}" if why else self.source
        return Figure(value=self.value * factor, source=source, error=error, assumed=self.assumed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Device memory: its kind ("HBM3E", "GDDR6"), size, and peak bandwidth."""

    kind: str | None = None
    capacity_bytes: Figure | None = None
    bandwidth_bytes_per_s: Figure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """Cache sizes; L1 and shared memory (LDS, local memory) are per unit (SM, CU, core), the others per chip."""

    l1_bytes: Figure | None = None
    shared_bytes: Figure | None = None
    l2_bytes: Figure | None = None
    l3_bytes: Figure | None = None
    l2_bandwidth_bytes_per_s: Figure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Core clocks. Peaks are given at `boost_hz` unless a source says otherwise."""

    base_hz: Figure | None = None
    boost_hz: Figure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One interconnect of a chip with all its lanes; `direction` says what its source counts."""

    bytes_per_s: Figure
    direction: Literal["per direction", "total"]

    @property
    def one_way_bytes_per_s(self) -> float:
        """Bytes per second in one direction, whatever the source counts."""
        return self.bytes_per_s.value / (2.0 if self.direction == "total" else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """A power mode of a chip, as set by `nvpmodel`, a cooling variant or a configurable TDP."""

    name: str
    power_w: Figure
    clock_hz: Figure | None = None
    units: Figure | None = None
    bandwidth_bytes_per_s: Figure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a chip can do and what that costs, each figure with its source. None means unknown; see `notes`.

    `units` counts SMs, CUs or cores, as `unit_name` says; `threads` are a CPU's hardware threads. `energy` has joules
    per byte or per operation. `origin` names the files that the figures come from, the user's last. `power_limit_w` and
    `clock_limit_hz` are settings of the driver, below the board's own limit and clock.
    """

    id: str
    name: str
    kind: Kind
    vendor: str
    aliases: tuple[str, ...] = ()
    architecture: str | None = None
    compute_capability: str | None = None
    vector: Mapping[str, Figure] = field(default_factory=dict)
    matrix: Mapping[str, Figure] = field(default_factory=dict)
    memory: Memory = Memory()
    caches: Caches = Caches()
    units: Figure | None = None
    unit_name: str | None = None
    clocks: Clocks = Clocks()
    interconnect: Mapping[str, Link] = field(default_factory=dict)
    tdp_w: Figure | None = None
    idle_w: Figure | None = None
    idle_context_w: Figure | None = None
    energy: Mapping[str, Figure] = field(default_factory=dict)
    operating_points: tuple[OperatingPoint, ...] = ()
    point: str | None = None
    power_limit_w: float | None = None
    clock_limit_hz: float | None = None
    threads: int | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    origin: tuple[str, ...] = ()

    def peak(self, precision: str, unit: Unit | None = None) -> Figure | None:
        """Return the dense peak of a precision on one kind of unit, or on the faster one; None if there is none."""
        if precision not in PRECISIONS:
            raise ArgumentError(f"no precision {precision!r}{did_you_mean(precision, PRECISIONS)}")
        peaks = [
            figures[precision]
            for name, figures in (("vector", self.vector), ("matrix", self.matrix))
            if precision in figures and unit in (None, name)
        ]
        return max(peaks, key=lambda figure: figure.value, default=None)

    def at(self, point: str) -> Device:
        """Return the device at one of its operating points, or with a limit: `at("400W")`, `at("1200MHz")`."""
        wanted = point.strip().lower()
        for candidate in self.operating_points:
            if candidate.name.lower() == wanted:
                return _apply_point(self, candidate)
        limited = self._set_limit(point.strip())
        if limited is not None:
            return limited
        names = [p.name for p in self.operating_points]
        other = f"give a power limit or a clock: {self.id}@300W, {self.id}@1200MHz"
        if self.kind == "soc":
            other = f"it has one only: {self.id}"
        raise ArgumentError(
            f"{self.id} has no operating point {point!r}{did_you_mean(wanted, names)}",
            fix=f"known: {', '.join(f'{self.id}@{n}' for n in names)}" if names else other,
        )

    @property
    def least_limit_w(self) -> float:
        """Return the watts that a power limit must exceed: what the board draws while it waits, and some room."""
        return 1.5 * self.idle_w.value if self.idle_w else 0.0

    def _set_limit(self, point: str) -> Device | None:
        """Return the device with a power limit or clock set by its driver; None if the text is neither."""
        if self.kind == "soc":  # nvpmodel sets modes, not watts
            return None
        kind = point.lower()
        boost = self.clocks.boost_hz
        try:
            if kind.endswith("hz"):
                clock_hz = parse_frequency(point[:-3] + point[-3].upper() + "Hz")
                if boost is None or not 0.1 * boost.value <= clock_hz <= boost.value * 1.001:
                    most = boost.value / 1e6 if boost else None
                    raise ArgumentError(
                        f"{self.id} cannot be set to {point}",
                        why=f"its highest clock is {f'{most:.0f} MHz' if most else 'not known'}",
                        fix=self._name_range(math.ceil(0.1 * most), most, "MHz") if most else "give a power limit",
                    )
                return self._named(f"{clock_hz / 1e6:g}MHz", clock_limit_hz=clock_hz)
            if kind.endswith("w"):
                limit_w = parse_power(point[:-1] + "W")
                if self.tdp_w is None or not self.least_limit_w < limit_w <= self.tdp_w.value:
                    raise self._refuse_limit(point, self.least_limit_w)
                return self._named(f"{limit_w:g}W", power_limit_w=limit_w)
        except UnitError:
            return None
        return None

    def _refuse_limit(self, point: str, least_w: float) -> ArgumentError:
        told = f"{self.tdp_w.value:.0f} W" if self.tdp_w else "not known"
        least = f", and it needs more than {least_w:g} W" if least_w else ""
        names = [p.name for p in self.operating_points]
        fixes = [f"known: {', '.join(f'{self.id}@{n}' for n in names)}"] if names else []
        fixes += [self._name_range(math.floor(least_w) + 1, self.tdp_w.value, "W")] if self.tdp_w else []
        return ArgumentError(
            f"{self.id} cannot be limited to {point}{did_you_mean(point, names)}",
            why=f"its own limit is {told}{least}",
            fix="; ".join(fixes) or "give tdp_w in a device file of your own",
        )

    def _name_range(self, least: float, most: float, unit: str) -> str:
        return f"give one from {self.id}@{least:g}{unit} to {self.id}@{most:g}{unit}"

    def _named(self, point: str, **setting: float) -> Device:
        named = {"id": f"{self.id}@{point}", "name": f"{self.name} at {point}", "point": point}
        return dataclasses.replace(self, **named, **setting)  # type: ignore[arg-type]

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Yield every figure with its dotted name, as in the TOML file."""
        for group in ("vector", "matrix"):
            yield from ((f"peaks.{group}.{name}", figure) for name, figure in getattr(self, group).items())
        for part in ("memory", "caches", "clocks"):
            values = getattr(self, part)
            for entry in dataclasses.fields(values):
                figure = getattr(values, entry.name)
                if isinstance(figure, Figure):
                    yield f"{part}.{entry.name}", figure
        for name, link in self.interconnect.items():
            yield f"interconnect.{name}", link.bytes_per_s
        for name in ("units", "tdp_w", "idle_w", "idle_context_w"):
            figure = getattr(self, name)
            if figure is not None:
                yield name, figure
        yield from ((f"energy.{name}", figure) for name, figure in self.energy.items())


def _apply_point(device: Device, point: OperatingPoint) -> Device:
    boost, units, memory = device.clocks.boost_hz, device.units, device.memory
    factor, why = 1.0, []
    if point.clock_hz and boost:
        factor *= point.clock_hz.value / boost.value
        why.append("clock")
        boost = point.clock_hz
    if point.units and units:
        factor *= point.units.value / units.value
        why.append("active units")
        units = point.units
    if point.bandwidth_bytes_per_s:
        memory = dataclasses.replace(memory, bandwidth_bytes_per_s=point.bandwidth_bytes_per_s)
    notes = dict(device.notes)
    scaling = f"scaled to {point.name} by {' and '.join(why)}" if why else ""
    if not why:
        notes["peaks"] = f"the clock at {point.name} is not known: the peaks are those of the whole chip"
    return dataclasses.replace(
        device,
        id=f"{device.id}@{point.name}",
        name=f"{device.name} at {point.name}",
        vector={name: figure.scale(factor, scaling) for name, figure in device.vector.items()},
        matrix={name: figure.scale(factor, scaling) for name, figure in device.matrix.items()},
        memory=memory,
        units=units,
        # A base clock has no meaning in a fixed power mode, and could be above that mode's clock.
        clocks=Clocks(boost_hz=boost) if point.clock_hz else device.clocks,
        tdp_w=point.power_w,
        point=point.name,
        notes=notes,
    )
