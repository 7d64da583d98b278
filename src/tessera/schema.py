"""The types that all of Tessera uses: Domain, Energy, EnergyReport, Telemetry, Gap, Device.

Times are integer nanoseconds of the one monotonic clock (`tessera.clock`). Every uncertainty is the half-width of a 90%
interval. What is missing is None (or a `Gap`, or an unavailable `Capability`) with a reason, never 0.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .advice import Advice as Advice
from .device import Device as Device
from .energy_diff import EnergyDiff as EnergyDiff
from .errors import ArgumentError, check_positive
from .power_event import PowerEvent as PowerEvent
from .units import format_duration, format_energy_error, format_power

# Above every board (the catalogue ends at 1.4 kW, MI355X), and far below what a corrupt or reset counter fakes.
MAX_BOARD_W = 10_000.0
# For short times, samples exceed a board's limit: an H200 of 700 W shows up to 965 W (estimate/iteration.py).
LIMIT_HEADROOM = 1.5
SCHEMA_VERSION = 1
"""Version of all formats that we write to disk; readers refuse a newer one and say so."""

Basis = Literal["measured", "modelled", "simulated", "predicted", "timed"]
"""How joules are known; "timed": only seconds are known."""
Scope = Literal["process", "machine"]
"""Whose power a domain has: that of a process with its children, or that of the whole machine."""


class Hold(enum.Enum):
    """What a power sample means between the samples."""

    LINEAR = "linear"
    """A (nearly) instantaneous reading: power changes linearly from one sample to the next."""
    MEAN = "mean"
    """The mean since the sample before, such as the difference of two readings of an energy counter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """Something that a sensor may provide; if it does not, why not and what would help."""

    name: str
    available: bool
    reason: str | None = None
    fix: str | None = None


@dataclass(frozen=True, slots=True, order=True)
class DeviceId:
    """A device of a machine. `host` is "" in a recording of one machine."""

    host: str
    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.host}.{self.kind}{self.index}" if self.host else f"{self.kind}{self.index}"

    @property
    def is_gpu(self) -> bool:
        """Whether it is an accelerator, of any vendor."""
        return self.kind == "gpu"

    @classmethod
    def of_domain(cls, name: str) -> DeviceId:
        """Return the device of a power domain: "gpu0", "gpu0.memory", "cpu", or "node7.gpu0" of a merged run.

        No other code reads a device from a name: sensors, power logs and run files name their domains like this.
        """
        match = _DEVICE_NAME.fullmatch(name)
        if match is None:
            return cls("", name, 0)
        return cls(match["host"] or "", match["kind"], int(match["index"] or 0))


_DEVICE_NAME = re.compile(r"(?:(?P<host>.+)\.)?(?P<kind>gpu|cpu|dram)(?P<index>\d*)(?:\.[a-z_]+\d*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """A named place where power is drawn, and how well its sensor sees it.

    `resolution_s` is the period at which the sensor really has a new value, `lag_s` how late it shows a change,
    `lag_error_s` the 90% error of that (0: unknown), `blur_s` the standard deviation of the time one sample covers,
    `sample_noise` the relative standard deviation of one sample, `gain_error` the relative 90% error of its level.
    `counted` domains add up to the total; the others (HBM, a chassis) overlap them. `limit_w` is the highest power
    limit that the board accepts, not a lowered one. `scope`: the power of one process with its children, or of all that
    ran. `taken_as` is the source whose response a log without one gets. `label` is the board's name, `driver` its
    version, `rank` the rank of a merged run whose power this is, `core_w` a model's watts of a busy core.
    """

    name: str
    source: str
    resolution_s: float
    lag_s: float = 0.0
    blur_s: float = 0.0
    sample_noise: float = 0.0
    gain_error: float = 0.0
    hold: Hold = Hold.LINEAR
    counted: bool = True
    basis: Basis = "measured"
    label: str = ""
    note: str = ""
    limit_w: float | None = None
    scope: Scope = "machine"
    taken_as: str = ""
    lag_error_s: float = 0.0
    driver: str = ""
    rank: int | None = None
    core_w: float | None = None

    @property
    def device(self) -> DeviceId:
        """The device whose power this is, or is a part of."""
        return DeviceId.of_domain(self.name)

    @property
    def max_w(self) -> float:
        """The most watts that a sample can show; one above this or below 0 is a failed reading, and so a gap."""
        most_w = MAX_BOARD_W if self.device.is_gpu else math.inf
        return LIMIT_HEADROOM * self.limit_w if self.limit_w else most_w


class Pause(NamedTuple):
    """A time in which the program stood still for its tracer: its begin (epoch) and its length."""

    start_ns: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time without data, and why. An open gap (`end_ns` None) lasts until there are data again."""

    domain: str
    start_ns: int
    end_ns: int | None
    reason: str

    def shift(self, offset_ns: int) -> Gap:
        """Return the same gap on another clock."""
        end_ns = None if self.end_ns is None else self.end_ns + offset_ns
        return dataclasses.replace(self, start_ns=self.start_ns + offset_ns, end_ns=end_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What a device reports besides power, at one moment. For None, see the sensor's capabilities."""

    time_ns: int
    domain: str
    temperature_c: float | None = None
    memory_temperature_c: float | None = None
    clocks_mhz: Mapping[str, float] = field(default_factory=dict)
    power_limit_w: float | None = None
    throttle: tuple[str, ...] | None = None
    throttled_s: Mapping[str, float] | None = None
    utilization_pct: float | None = None
    memory_utilization_pct: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    sm_activity_pct: float | None = None
    activity_pct: Mapping[str, float] = field(default_factory=dict)
    current_a: float | None = None
    peak_current_a: float | None = None
    voltage_v: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Joules with their 90% half-width, their source, and the share of time that was seen (`coverage`).

    Joules are NaN (null in JSON) if nothing was seen: unknown is not zero. `common_error_j` is the part of `error_j`
    (in quadrature) that every window of the same sensor shares: the error of its level, which repetition does not
    average out. `joules.sum_windows` adds this part plainly, and the rest in quadrature.
    """

    energy_j: float
    error_j: float
    time_s: float
    source: str
    coverage: float = 1.0
    basis: Basis = "measured"
    common_error_j: float = 0.0

    @property
    def power_w(self) -> float | None:
        """Mean power over the time that was seen; None if nothing was seen."""
        seen_s = self.time_s * self.coverage
        return self.energy_j / seen_s if seen_s > 0 else None

    def __str__(self) -> str:
        power = "" if self.power_w is None else f", {format_power(self.power_w, 3)}"
        energy = format_energy_error(self.energy_j, self.error_j)
        return f"{energy}{power}, {format_duration(self.time_s, 3)}, {self.source}"

    @property
    def joules(self) -> float:
        """`energy_j`, by the name that the energy guide uses."""
        return self.energy_j


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionEnergy:
    """All passes through one named region of a program together, from its first start to its last end.

    A moment that lies in several passes counts once. `overlaps`: other passes or regions were open at the same time (in
    other threads or asyncio tasks), and each includes the joules of all. `apart`: the total does not include them.
    """

    name: str
    calls: int
    energy: Energy
    start_ns: int = 0
    end_ns: int = 0
    overlaps: bool = False
    apart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a run achieved, in the user's unit: steps, samples, tokens, FLOPs."""

    amount: float
    unit: str


def works(named: Mapping[str, float | None], work: float | None, unit: str | None, example: str) -> dict[str, Work]:
    """Return the kinds of work a user gave: by our names, or as `work` in their own `unit`. `example` shows how."""
    if unit is not None and work is None:
        raise ArgumentError("a unit needs an amount of work", why="a unit needs an amount", fix=example)
    if unit is not None and named.get(unit) is not None:
        raise ArgumentError(f"the work in {unit!r} is given twice", fix="give it once, or in another unit")
    given = {k: v for k, v in {**named, unit or "unit": work}.items() if v is not None}
    for name, amount in given.items():
        check_positive(name, amount, fix="the amount of work")
    return {name: Work(amount=float(amount), unit=name) for name, amount in given.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyDescriptor:
    """The joules of one subgraph, by component. Every uncertainty is the half-width of a 90% interval.

    `compute_energy_j` is what the busy units spend, `memory_energy_j` what moving its bytes costs, `static_energy_j`
    what the board draws anyway during the subgraph. `latency_s` is its share of the wall time: its time on the device
    (`device_s`) plus the time the device waited for the host to launch it. `utilization` is the achieved share of the
    tighter roof (FLOP/s or bytes/s), from 0 to 1.
    """

    subgraph_name: str
    compute_energy_j: float
    memory_energy_j: float
    static_energy_j: float
    latency_s: float
    error_j: float
    device_s: float
    error_s: float = 0.0
    utilization: float = 0.0
    kind: str = ""
    flops: float = 0.0
    hbm_bytes: float = 0.0
    calls: int = 1
    provenance: str = ""

    @property
    def total_energy_j(self) -> float:
        """All joules of the subgraph."""
        return self.compute_energy_j + self.memory_energy_j + self.static_energy_j

    @property
    def efficiency(self) -> float:
        """(compute + memory) / total: the share of the joules that did work."""
        total = self.total_energy_j
        return (self.compute_energy_j + self.memory_energy_j) / total if total > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a predicted report knows besides its joules: the chip, the mode, what bounds it, and how certain it is.

    `clock` is relative to the boost clock (below 1 if the power limit holds it down). `bound` is what most time is
    spent on ("host", "compute", "memory", "overhead", "power"). `state` is "sustained" under the power limit or "burst"
    at the boost clock. `hbm_bytes` cross device memory in one of many iterations: 0 if all stays in the last-level
    cache. `parameters` are those of the model's modules. `mfu` (model FLOPs utilisation) is `flops` over the time at
    the dense peak of the format most of them run in; None without FLOPs. `provenance` says for each part whether it is
    a datasheet's figure, calibrated on a measurement, or assumed.
    """

    device: str
    precision: str | None
    mode: str
    launch: str
    batch: int | None
    error_s: float
    device_s: float
    host_s: float
    clock: float
    bound: str
    average_utilization: float
    wasted_energy_j: float
    flops: float
    hbm_bytes: float
    parameters: int | None = None
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    memory_capacity_bytes: int | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    state: str = "sustained"
    again: Callable[..., EnergyReport] | None = None

    def __repr__(self) -> str:
        of = [self.mode, self.launch, self.precision, None if self.batch is None else f"batch {self.batch}"]
        return f"<Prediction for {self.device}: {', '.join(filter(None, of))}, bound by {self.bound}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # `again` holds the model, so it is left out of a report that is sent to another process.
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "again"}
        return functools.partial(Prediction, **values), ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyReport:
    """Joules, watts and seconds of one run, by domain, region and subgraph, with uncertainty and provenance.

    Measurements and predictions have the same type; a predicted report has `descriptors` and `prediction` too.
    """

    name: str
    total: Energy
    by_domain: Mapping[str, Energy]
    domains: Sequence[Domain] = ()
    regions: Sequence[RegionEnergy] = ()
    work: Sequence[Work] = ()
    peak_w: float | None = None
    idle_w: float | None = None
    gaps: Sequence[Gap] = ()
    missing: Sequence[Capability] = ()
    events: Sequence[PowerEvent] = ()
    notes: Sequence[str] = ()
    descriptors: Sequence[EnergyDescriptor] = ()
    prediction: Prediction | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def basis(self) -> Basis:
        """The basis of the numbers: one modelled domain makes the total modelled."""
        return self.total.basis

    @property
    def total_energy_j(self) -> float:
        """All joules."""
        return self.total.energy_j

    @property
    def total_latency_s(self) -> float:
        """Wall-clock seconds."""
        return self.total.time_s

    @property
    def average_power_w(self) -> float | None:
        """Mean watts."""
        return self.total.power_w

    @property
    def peak_power_w(self) -> float | None:
        """The highest power seen, or predicted as a mean over 20 ms."""
        return self.peak_w

    @property
    def compute_energy_j(self) -> float | None:
        """Joules of busy units; None for a measurement, which cannot tell."""
        return self._component("compute_energy_j")

    @property
    def memory_energy_j(self) -> float | None:
        """Joules of moved bytes; None for a measurement, which cannot tell."""
        return self._component("memory_energy_j")

    @property
    def static_energy_j(self) -> float | None:
        """Joules that the board draws whatever it does; None for a measurement, which cannot tell."""
        return self._component("static_energy_j")

    def _component(self, name: str) -> float | None:
        return math.fsum(getattr(d, name) for d in self.descriptors) if self.descriptors else None

    @property
    def average_efficiency(self) -> float | None:
        """The mean over subgraphs of (compute + memory) / total; None without subgraphs."""
        if not self.descriptors:
            return None
        return math.fsum(d.efficiency for d in self.descriptors) / len(self.descriptors)

    @property
    def average_utilization(self) -> float | None:
        """The mean share of the tighter roof, weighted by time; None for a measurement."""
        return self.prediction.average_utilization if self.prediction else None

    @property
    def wasted_energy_j(self) -> float | None:
        """Static joules times (1 - utilisation), summed over the subgraphs; None for a measurement."""
        return self.prediction.wasted_energy_j if self.prediction else None

    def top(self, count: int = 10) -> list[EnergyDescriptor]:
        """Return the subgraphs that spend most, the most expensive first."""
        return sorted(self.descriptors, key=lambda d: d.total_energy_j, reverse=True)[:count]

    def opportunities(self) -> list[Advice]:
        """Return what would save joules, most first, each by predicting the change; [] for a measurement."""
        from .estimate.opportunities import opportunities

        return opportunities(self)

    def diff(self, other: EnergyReport) -> EnergyDiff:
        """Return what changes from this report to another, by component and subgraph, with intervals."""
        from .analyze.diff import diff

        return diff(self, other)

    def __repr__(self) -> str:
        where = f" on {self.prediction.device}" if self.prediction else ""
        return f"<EnergyReport {self.name}{where}: {self.total}; print() shows more>"

    def __str__(self) -> str:
        from .report.predict import text

        return text(self)

    def _repr_html_(self) -> str:
        from .report.predict_html import card

        return card(self)

    def per_work(self) -> list[tuple[str, float, float]]:
        """Return (unit, joules per unit, 90% half-width) for each kind of work."""
        return [
            (w.unit, self.total.energy_j / w.amount, self.total.error_j / w.amount) for w in self.work if w.amount > 0
        ]
