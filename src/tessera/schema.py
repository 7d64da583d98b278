"""The nouns everything speaks in: Domain, PowerTrace, Energy, EnergyReport, Telemetry, Device.

Times are integer nanoseconds of the one monotonic clock (`tessera.clock`). Every uncertainty is the half-width
of a 90% interval. What is missing is None (or a `Gap`, or an unavailable `Capability`) with a reason, never 0.
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
from .errors import ArgumentError
from .power_event import PowerEvent as PowerEvent
from .units import format_duration, format_energy_error, format_power

# Above any board there is (the catalogue ends at 1.4 kW, MI355X) and far below what a corrupt or reset counter fakes.
MAX_BOARD_W = 10_000.0
# Samples go above the limit of a board for moments: an H200 of 700 W shows up to 965 W (estimate/iteration.py).
LIMIT_HEADROOM = 1.5
SCHEMA_VERSION = 1
"""Version of everything we write to disk; readers refuse a newer one and say so."""

Basis = Literal["measured", "modelled", "simulated", "predicted", "timed"]
"""How joules are known; "timed": they are not, only seconds are."""
Scope = Literal["process", "machine"]
"""Whose power a domain is: that of a process with its children, or that of everything on the machine."""


class Hold(enum.Enum):
    """What a power sample means between the samples."""

    LINEAR = "linear"
    """A (nearly) instantaneous reading: power runs straight from one sample to the next."""
    MEAN = "mean"
    """The mean since the sample before, e.g. the difference of two readings of an energy counter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """Something a sensor may give; where it does not, why and what would help."""

    name: str
    available: bool
    reason: str | None = None
    fix: str | None = None


@dataclass(frozen=True, slots=True, order=True)
class DeviceId:
    """Which device of which machine. `host` is "" in a recording of one machine."""

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
        """The device that a power domain belongs to: "gpu0", "gpu0.memory", "cpu", and "node7.gpu0" of a merged run.

        The only place that reads a device out of a name: sensors, power logs and run files name their domains so.
        """
        match = _DEVICE_NAME.fullmatch(name)
        if match is None:
            return cls("", name, 0)
        return cls(match["host"] or "", match["kind"], int(match["index"] or 0))


_DEVICE_NAME = re.compile(r"(?:(?P<host>.+)\.)?(?P<kind>gpu|cpu|dram)(?P<index>\d*)(?:\.[a-z_]+\d*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """A named place where power is drawn, and how well its sensor sees it.

    `resolution_s` is the period at which the sensor really has something new, `lag_s` how late it shows a change,
    `lag_error_s` the 90% error of that (0: not known), `blur_s` the standard deviation of what one sample looks at,
    `sample_noise` the relative standard deviation of one sample, `gain_error` the relative 90% error of its level.
    `counted` domains add up to the total; the others (HBM, a chassis) overlap them. `limit_w` is the highest power
    limit that the board accepts, not a lowered one; `scope` says if it is the power of one process and its children or
    of all that ran. `taken_as` is the source whose response a log without one is taken to have; `label` the board's
    name, `driver` its version; `rank`, in a merged run, whose these alone are; `core_w` a model's watts of a busy core.
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
        """The most watts a sample can show: a sample above this, or below 0, is a failed reading and so a gap."""
        most_w = MAX_BOARD_W if self.device.is_gpu else math.inf
        return LIMIT_HEADROOM * self.limit_w if self.limit_w else most_w


class Pause(NamedTuple):
    """A stretch in which the program stood still for its tracer: when it began (epoch), and how long it took."""

    start_ns: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A stretch of time without data, and why. An open gap (`end_ns` None) lasts until data come again."""

    domain: str
    start_ns: int
    end_ns: int | None
    reason: str

    def shift(self, offset_ns: int) -> Gap:
        """The same gap on another clock."""
        end_ns = None if self.end_ns is None else self.end_ns + offset_ns
        return dataclasses.replace(self, start_ns=self.start_ns + offset_ns, end_ns=end_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What a device says of itself beside power, at one moment. None: see the sensor's capabilities."""

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
    """Joules with their 90% half-width, the source they come from and the share of time that was seen.

    Joules are NaN (null in JSON) when nothing at all was seen: unknown is not zero. `common_error_j` is the part of
    `error_j` (in quadrature) that every window of the same sensor is off by alike: the level, which no repetition
    averages out. `joules.sum_windows` adds it up, and the rest in quadrature.
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
        """Mean power over the time that was seen; None where nothing was."""
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
    """All the passes through one named region of a program, together, from its first start to its last end.

    A moment that lies in several passes counts once. `overlaps`: other passes or regions were open at the same time (in
    other threads or asyncio tasks), and each contains the joules of all of them. `apart`: the total does not.
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
    """The kinds of work a user gave: by a name of ours, or as `work` of their own `unit`. `example` shows how."""
    if unit is not None and work is None:
        raise ArgumentError("a unit needs an amount of work", why="a unit needs an amount", fix=example)
    if unit is not None and named.get(unit) is not None:
        raise ArgumentError(f"the work in {unit!r} is given twice", fix="give it once, or in another unit")
    given = {k: v for k, v in {**named, unit or "unit": work}.items() if v is not None}
    for name, amount in given.items():
        if not 0 < amount < math.inf:
            raise ArgumentError(f"the work must be a positive number: {name}={amount!r}", fix="give an amount above 0")
    return {name: Work(amount=float(amount), unit=name) for name, amount in given.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyDescriptor:
    """The joules of one subgraph, by component. Every uncertainty is the half-width of a 90% interval.

    `compute_energy_j` is what the busy units spend, `memory_energy_j` what moving its bytes costs, `static_energy_j`
    what the board draws anyway for as long as the subgraph takes. `latency_s` is its share of the wall time: the time
    on the device (`device_s`) and the time the device waited for the host to launch it. `utilization` is the achieved
    share of the tighter roof (FLOP/s or bytes/s), from 0 to 1.
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
    """What a predicted report knows beside its joules: for which chip and how, what bounds it, and how sure it is.

    `clock` is relative to the boost clock (below 1 where the power limit holds it down), `bound` what the time is
    spent on ("host", "compute", "memory", "overhead", "power"), `state` "sustained" under the power limit or "burst" at
    the boost clock. `hbm_bytes` cross device memory in one iteration of many: 0 where all that it touches stays in the
    last-level cache. `parameters` are those of the model's modules. `mfu` (model FLOPs utilisation) is `flops` over the
    time at the dense peak of the format most of them run in; None where there are none. `provenance` says for each part
    whether it is a datasheet's figure, calibrated on a measurement, or assumed.
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
        # `again` holds the model: a report that travels to another process keeps its figures, not that.
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "again"}
        return functools.partial(Prediction, **values), ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyReport:
    """Joules, watts, seconds of one run, split by domain, region and subgraph, with uncertainty and provenance.

    The same noun for what was measured and what was predicted: a predicted report has `descriptors` and `prediction`.
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
        """Where the numbers come from, worst of the domains: one modelled domain makes the total modelled."""
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
        """Joules the board draws whatever it does; None for a measurement, which cannot tell."""
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
        """The subgraphs that spend most, the most expensive first."""
        return sorted(self.descriptors, key=lambda d: d.total_energy_j, reverse=True)[:count]

    def opportunities(self) -> list[Advice]:
        """What would save joules, each computed by predicting the change, most first; [] for a measurement."""
        from .estimate.opportunities import opportunities

        return opportunities(self)

    def diff(self, other: EnergyReport) -> EnergyDiff:
        """What changes from this report to another, by component and subgraph, with intervals."""
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
        """(unit, joules per unit, 90% half-width) for each kind of work."""
        return [
            (w.unit, self.total.energy_j / w.amount, self.total.error_j / w.amount) for w in self.work if w.amount > 0
        ]
