"""`Simulation`: what a simulated facility drew, how warm it got, what tripped, and how its jobs fared."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..joules import DomainSamples, Floats, sum_domains
from ..schema import Domain, EnergyReport, Hold, PowerEvent, Work
from ..trace import PowerTrace
from .faults import Fault
from .power_quality import PowerQuality, Verdict
from .scenario import Scenario

START_NS = 1_700_000_000_000_000_000
"""When a simulation begins on the clock of its trace: always the same, so that two runs with one seed are equal."""
# Half-width of 90%: of four recorded H200 waves that the model did not see, the worst is off by 5.7% of its joules
# (benchmarks/results/fleet_waves.json). Errors in a file's description of its facility are not included.
LEVEL_ERROR = 0.06

AIR_HELD = "air held at the model's highest"
"""The kind of the event of a row whose air would be warmer than `AisleHeat.highest_c`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEvent:
    """Something that happened: a trip, a fault, the start or the end of a job. `count`: how many of this kind."""

    time_s: float
    kind: str
    place: str
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """A job: what it took and what it lost. `lost_share` is of the iterations of a run that nothing slows.

    `energy_j` is that of its GPUs, `ballast_j` the part of it that did no work. `asked_w` and `granted_w` are watts at
    the plugs of its nodes, the latter the mean since it started: None without a rack governor. `steady_lost_share` and
    `steady_granted_w` are without its soft start; None: that was not over. `reason` says why it is stalled.
    """

    name: str
    state: str
    gpus: int
    start_s: float | None
    waited_s: float
    iterations: float
    lost_share: float | None
    energy_j: float
    ballast_j: float
    mean_w: float
    asked_w: float | None = None
    granted_w: float | None = None
    steady_lost_share: float | None = None
    steady_granted_w: float | None = None
    reason: str = ""

    @property
    def is_granted_all(self) -> bool:
        """Return whether the job had all that it asked for after its soft start."""
        return self.steady_granted_w is not None and self.steady_granted_w >= 0.99 * (self.asked_w or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RackSummary:
    """A rack of the map: watts during the run, load of its breaker, temperature."""

    name: str
    row: str
    count: int
    mean_w: float
    peak_w: float
    load: float
    inlet_c: float
    hottest_c: float
    is_closed: bool


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A finished simulation. Powers are per step of `step_s`, those of racks per decision, every `decide_s`.

    `feed_w` is what the utility delivers, after storage and UPS; `load_w` what the rows draw. `row_w` has a column for
    each class of rows; `row_names` is the first row of each class, and `row_counts` the number of rows in it. `racks`
    are classes too, and `rack_class` is the class of each rack of the facility.
    """

    scenario: Scenario
    engine: str
    step_s: float
    decide_s: float
    feed_w: Floats
    load_w: Floats
    row_w: Floats
    row_names: tuple[str, ...]
    row_counts: tuple[int, ...]
    rack_mean_w: Floats
    racks: tuple[RackSummary, ...]
    rack_class: tuple[int, ...]
    jobs: tuple[JobResult, ...]
    events: tuple[SimulatedEvent, ...]
    classes: dict[str, int]
    quality: PowerQuality
    load_quality: PowerQuality
    verdicts: tuple[Verdict, ...]
    gpu_j: float
    ballast_j: float
    throttled_s: float
    cpu_s: float
    rack_asked_w: float | None = None

    @property
    def duration_s(self) -> float:
        """Return how many seconds were simulated."""
        return len(self.feed_w) * self.step_s

    @property
    def energy_j(self) -> float:
        """Return the joules that the utility delivered."""
        return float(np.sum(self.feed_w)) * self.step_s

    @property
    def trips(self) -> list[SimulatedEvent]:
        """Return the breakers and supplies that switched off by themselves."""
        return [e for e in self.events if e.kind.endswith("tripped") or e.kind.endswith("switched off")]

    @property
    def ordered_trips(self) -> int:
        """Return how many breakers a fault of the file opened."""
        return sum(fault.kind == "breaker_trip" and fault.at_s < self.duration_s for fault in self.scenario.faults)

    @property
    def held_jobs(self) -> list[JobResult]:
        """Return jobs that a rack governor gave less than they asked for."""
        return [j for j in self.jobs if j.granted_w is not None and j.asked_w and j.granted_w < 0.99 * j.asked_w]

    @property
    def racks_above_cap(self) -> list[RackSummary]:
        """Return racks whose power was above the governor's `rack_cap`, for a step or longer."""
        governor = self.scenario.policies.rack_power_governor
        return [] if governor is None else [rack for rack in self.racks if rack.peak_w > governor.rack_cap_w]

    @property
    def racks_above_breaker(self) -> list[RackSummary]:
        """Return racks that draw more than their breaker is rated for, and whose breaker has not opened."""
        return [rack for rack in self.racks if rack.load > 1.0 and rack.is_closed]

    @property
    def cap_above_breaker(self) -> tuple[str, float] | None:
        """Return the rack whose breaker carries the least, and its watts, if `rack_cap` is above that; else None."""
        governor, facility = self.scenario.policies.rack_power_governor, self.scenario.facility
        breakers = {} if facility.rack_breaker is None else {0: facility.rack_breaker}
        least = min((breakers | dict(facility.own_breakers)).items(), key=lambda b: b[1].rating_w, default=None)
        if governor is None or least is None or governor.rack_cap_w <= least[1].rating_w:
            return None
        return facility.name_rack(least[0]), least[1].rating_w

    @property
    def late_faults(self) -> list[Fault]:
        """Return faults of the file that begin when the simulation is over."""
        return [fault for fault in self.scenario.faults if fault.at_s >= self.duration_s]

    @property
    def is_air_held(self) -> bool:
        """Return whether the air of a row reached the model's highest temperature: a real row would get warmer."""
        return any(e.kind == AIR_HELD for e in self.events)

    @property
    def passed(self) -> bool | None:
        """Return whether every line of the utility's spec is met; None without a spec."""
        return all(v.passed for v in self.verdicts) if self.verdicts else None

    @property
    def speed(self) -> float:
        """Return simulated seconds for each second of a processor."""
        return self.duration_s / self.cpu_s if self.cpu_s > 0 else float("inf")

    @property
    def feed_power(self) -> PowerTrace:
        """Return only the feed, for writing a CSV: a CSV cannot say that the rows are part of the feed."""
        return PowerTrace({"feed": self.power.columns["feed"]}, start_ns=self.power.start_ns, end_ns=self.power.end_ns)

    @cached_property
    def power(self) -> PowerTrace:
        """Feed, load and rows as a power trace, for `analyze.power`, `diff` and the exporters."""
        steps = len(self.feed_w)
        step_ns = round(self.step_s * 1e9)
        times_ns = START_NS + step_ns * np.arange(steps + 1, dtype=np.int64)
        columns = {"feed": self._column("feed", times_ns, self.feed_w, counted=True)}
        columns["load"] = self._column("load", times_ns, self.load_w, counted=False)
        for i, name in enumerate(self.row_names):
            columns[name] = self._column(name, times_ns, self.row_w[:, i], counted=False)
        return PowerTrace(columns, start_ns=START_NS, end_ns=START_NS + step_ns * steps)

    def _column(self, name: str, times_ns: Any, watts: Floats, *, counted: bool) -> DomainSamples:
        domain = Domain(
            name=name,
            source="simulated",
            resolution_s=self.step_s,
            gain_error=LEVEL_ERROR,
            hold=Hold.MEAN,
            counted=counted,
            basis="simulated",
            label=f"{name}, simulated",
        )
        # A sample is the mean since the one before it, and the first begins with the trace.
        return DomainSamples.of(domain, times_ns, np.concatenate([watts[:1], watts]))

    def report(self) -> EnergyReport:
        """Return joules, watts and events as the report that measured and predicted runs have."""
        trace = self.power
        by_domain = {name: trace.energy(name) for name in trace.columns}
        work = sum(job.iterations for job in self.jobs)
        return EnergyReport(
            name=self.scenario.facility.name,
            total=sum_domains([by_domain["feed"]], self.duration_s),
            by_domain=by_domain,
            domains=trace.domains,
            work=[Work(amount=work, unit="iterations")] if work > 0 else (),
            peak_w=float(np.max(self.feed_w)),
            events=[
                PowerEvent(time_ns=START_NS + round(e.time_s * 1e9), domain=e.place, kind=e.kind, message=e.kind)
                for e in self.events
            ],
            notes=[f"simulated, seed {self.scenario.seed}: no sensor was read"],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; curves have one value a second."""
        per_s = max(1, round(1.0 / self.step_s))
        return {
            "basis": "simulated",
            "name": self.scenario.facility.name,
            "seed": self.scenario.seed,
            "engine": self.engine,
            "duration_s": self.duration_s,
            "step_s": self.step_s,
            "facility": self.scenario.facility.to_dict(),
            "policies": self.scenario.policies.to_dict(),
            "classes": self.classes,
            "energy_j": self.energy_j,
            "gpu_j": self.gpu_j,
            "ballast_j": self.ballast_j,
            "throttled_s": self.throttled_s,
            "feed": self.quality.to_dict(),
            "load": self.load_quality.to_dict(),
            "verdicts": [v.to_dict() for v in self.verdicts],
            "passed": self.passed,
            "jobs": [dataclasses.asdict(job) for job in self.jobs],
            "events": [dataclasses.asdict(event) for event in self.events],
            "late_faults": [dataclasses.asdict(fault) for fault in self.late_faults],
            "rack_asked_w": self.rack_asked_w,
            "racks": [dataclasses.asdict(rack) for rack in self.racks],
            "feed_w_by_s": _average(self.feed_w, per_s),
            "cpu_s": self.cpu_s,
        }

    def __str__(self) -> str:
        from ..report.simulate import simulation_text

        return simulation_text(self)


def _average(values: Floats, count: int) -> list[float]:
    whole = len(values) // count * count
    return [float(v) for v in values[:whole].reshape(-1, count).mean(axis=1)] if whole else [float(np.mean(values))]
