"""`simulate`: a facility and its jobs over time, with the policies that run for real.

::

    Scenario ──► places of jobs ──► FleetEngine (blocks of 20 steps) ◄──► Decisions (every 100 ms) ──► Simulation
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError
from ..joules import Floats
from .decisions import Decisions
from .engine import FleetEngine, RankTable
from .faults import mark_differences
from .node_floor import PlacementJob, PlacementNode
from .placement import place_jobs
from .power_quality import judge, measure_quality
from .scenario import Scenario, load_scenario
from .simulation import AIR_HELD, JobResult, RackSummary, SimulatedEvent, Simulation
from .supplies import BatteryState

MANY_NODES = 20_000
"""With more nodes, jobs are placed one after another: comparing all places would take longer than simulating."""
MOST_VALUES = 200_000_000
"""Most watts of rows and feed that are kept: 1.6 GB."""
_TRIPS = ("supply switched off", "rack breaker tripped", "row breaker tripped")


def simulate(
    scenario: Scenario | str | Path,
    *,
    distinct: bool | None = None,
    engine: str = "auto",
    duration_s: float | None = None,
    seed: int | None = None,
) -> Simulation:
    """Simulate a facility: a `Scenario` or the path of its file.

    `distinct`: simulate every GPU, even if GPUs are alike; None or False: simulate equal GPUs together. `engine`:
    "numba", "numpy", or "auto" for the compiled one if numba is installed. The same seed gives the same result.
    """
    given = scenario if isinstance(scenario, Scenario) else load_scenario(scenario)
    asked: dict[str, Any] = {"duration_s": duration_s, "seed": seed}
    given = dataclasses.replace(given, **{name: value for name, value in asked.items() if value is not None})
    return Run(given, distinct=bool(distinct), engine=engine).finish()


class Run:
    """One simulation in progress."""

    def __init__(self, scenario: Scenario, *, distinct: bool, engine: str) -> None:
        self.began_s = time.process_time()
        self.scenario, facility = scenario, scenario.facility
        steps = round(scenario.duration_s / facility.step_s)
        waves = [wave for job in scenario.jobs for wave in job.waves]
        ranks = place_ranks(scenario)
        self.engine = FleetEngine(
            facility,
            ranks,
            waves,
            len(scenario.jobs),
            distinct=distinct,
            marks=mark_differences(list(scenario.faults), facility),
            engine=engine,
            steps=steps,
        )
        rows = len(self.engine.tree.rows)
        if steps * (rows + 2) > MOST_VALUES:
            raise ArgumentError(
                f"{scenario.duration_s:g} s of {rows} rows are too many values to keep",
                fix=f"simulate {MOST_VALUES / (rows + 2) * facility.step_s:.0f} s or less",
            )
        self.decisions = Decisions(self.engine, scenario)
        self.storage = BatteryState(facility.feed.storage) if facility.feed.storage else None
        self.load_w: list[Floats] = []
        self.feed_w: list[Floats] = []
        self.row_w: list[Floats] = []
        self.rack_mean_w: list[Floats] = []
        lowest = np.full(len(self.engine.tree.racks), -np.inf)
        self.rack_peak_w, self.rack_inlet_c, self.rack_hottest_c = lowest, lowest.copy(), lowest.copy()
        self.gpu_sum_w = np.zeros(len(self.engine.tree.gpus))
        self.throttled_s = 0.0
        self.trips: list[SimulatedEvent] = []
        self.air_held: dict[int, SimulatedEvent] = {}

    def finish(self) -> Simulation:
        """Run the simulation to its end."""
        facility = self.scenario.facility
        block = max(1, round(facility.decide_s / facility.step_s))
        total = max(1, round(self.scenario.duration_s / facility.step_s))
        done = 0
        while done < total:
            steps = min(block, total - done)
            now_s = done * facility.step_s
            self.decisions.decide(now_s)
            self._advance(now_s, steps)
            done += steps
        return self._make_result()

    def _advance(self, now_s: float, steps: int) -> None:
        engine, facility = self.engine, self.scenario.facility
        result = engine.advance(steps)
        fleet = engine.arrays
        self._note_trips(result.trips, now_s)
        self.decisions.count_grants(steps * facility.step_s)
        self.gpu_sum_w += fleet.gpus.sum_w
        self.decisions.warm(now_s, steps)
        self._note_held_air(now_s)
        if self.decisions.heat.is_slow:
            slow = self.decisions.heat.clock < 1.0
            self.throttled_s += float(np.sum(engine.tree.gpus.instances[slow])) * steps * facility.step_s
        self.load_w.append(result.feed_w)
        smoothed = result.feed_w if self.storage is None else self.storage.smooth(result.feed_w, facility.step_s)
        self.feed_w.append(smoothed / facility.feed.ups_efficiency)
        self.row_w.append(result.row_w)
        heat = self.decisions.heat
        hottest_c = np.maximum.reduceat(heat.gpu_c, self.decisions.rack_starts)
        self.rack_mean_w.append(fleet.racks.sum_w / steps)
        np.maximum(self.rack_peak_w, fleet.racks.max_w, out=self.rack_peak_w)
        np.maximum(self.rack_inlet_c, heat.inlet_c, out=self.rack_inlet_c)
        np.maximum(self.rack_hottest_c, hottest_c, out=self.rack_hottest_c)

    def _note_held_air(self, now_s: float) -> None:
        facility, rows = self.scenario.facility, self.engine.tree.rows
        for row in np.flatnonzero(self.decisions.heat.supply_c >= facility.aisle.highest_c).tolist():
            if row not in self.air_held:
                place, count = facility.name_row(int(rows.first[row])), int(rows.instances[row])
                self.air_held[row] = SimulatedEvent(time_s=now_s, kind=AIR_HELD, place=place, count=count)

    def _note_trips(self, trips: NDArray[np.int64], now_s: float) -> None:
        facility, tree = self.scenario.facility, self.engine.tree
        for step, level, number in trips:
            classes = (tree.nodes, tree.racks, tree.rows)[level]
            name = (facility.name_node, facility.name_rack, facility.name_row)[level](int(classes.first[number]))
            time_s = now_s + (int(step) + 1) * facility.step_s
            count = int(classes.instances[number])
            self.trips.append(SimulatedEvent(time_s=time_s, kind=_TRIPS[level], place=name, count=count))

    # -- the result -----------------------------------------------------------------------------------------------

    def _make_result(self) -> Simulation:
        self.gpu_j = self.gpu_sum_w * self.scenario.facility.step_s
        scenario, engine, tree = self.scenario, self.engine, self.engine.tree
        facility = scenario.facility
        feed_w, load_w = np.concatenate(self.feed_w), np.concatenate(self.load_w)
        rack_mean_w = np.array(self.rack_mean_w)
        spec = scenario.policies.utility_spec
        options: dict[str, Any] = {"from_s": scenario.steady_from_s}
        if spec is not None and spec.band_hz is not None:
            options["band_hz"] = spec.band_hz
        quality = measure_quality(feed_w, facility.step_s, **options)
        happened = [SimulatedEvent(time_s=t, kind=kind, place=place) for t, kind, place in self.decisions.all_events]
        ballast = engine.arrays.gpus.ballast_w * facility.step_s * tree.gpus.instances
        return Simulation(
            scenario=scenario,
            engine=engine.engine,
            step_s=facility.step_s,
            decide_s=facility.decide_s,
            feed_w=feed_w,
            load_w=load_w,
            row_w=np.concatenate(self.row_w),
            row_names=tuple(facility.name_row(int(i)) for i in tree.rows.first),
            row_counts=tuple(int(c) for c in tree.rows.instances),
            rack_mean_w=rack_mean_w,
            racks=tuple(self._summarize_rack(i, float(w)) for i, w in enumerate(rack_mean_w.mean(axis=0))),
            rack_class=tuple(int(i) for i in tree.rack_class),
            jobs=tuple(self._summarize_job(i, ballast) for i in range(len(scenario.jobs))),
            events=tuple(sorted((*happened, *self.trips, *self.air_held.values()), key=lambda e: e.time_s)),
            classes={name: len(getattr(tree, name)) for name in ("gpus", "nodes", "racks", "rows")},
            quality=quality,
            load_quality=measure_quality(load_w, facility.step_s, **options),
            verdicts=tuple(judge(quality, spec)),
            gpu_j=float(np.dot(self.gpu_j, tree.gpus.instances)),
            ballast_j=float(np.sum(ballast)),
            throttled_s=self.throttled_s,
            cpu_s=time.process_time() - self.began_s,
            rack_asked_w=None if self.decisions.governors is None else self.decisions.governors.rack_asked_w,
        )

    def _summarize_rack(self, rack: int, mean_w: float) -> RackSummary:
        facility, tree = self.scenario.facility, self.engine.tree
        first, peak_w = int(tree.racks.first[rack]), float(self.rack_peak_w[rack])
        return RackSummary(
            name=facility.name_rack(first),
            row=facility.name_row(first // facility.row_racks),
            count=int(tree.racks.instances[rack]),
            mean_w=mean_w,
            peak_w=peak_w,
            load=peak_w / facility.rack_full_w(first),
            inlet_c=float(self.rack_inlet_c[rack]),
            hottest_c=float(self.rack_hottest_c[rack]),
            is_closed=bool(self.engine.arrays.racks.closed[rack]),
        )

    def _summarize_job(self, number: int, ballast: Floats) -> JobResult:
        job, engine = self.scenario.jobs[number], self.engine
        end_s = min(self.decisions.ended_s.get(number, math.inf), self.scenario.duration_s)
        start_s = self.decisions.started_s.get(number)
        chosen = engine.job == number
        energy_j = float(np.dot(self.gpu_j[chosen], engine.tree.gpus.instances[chosen]))
        alive = bool(np.all(engine.arrays.gpus.alive[chosen]))
        ran_s = 0.0 if start_s is None else end_s - start_s
        work_s = self.decisions.count_work(number)
        state = "queued" if start_s is None else "finished" if number in self.decisions.ended_s else "running"
        governors = self.decisions.governors
        if state == "running" and governors is not None and governors.is_held(number):
            state = "held"
        reason = ""
        if start_s is not None and not alive:
            state = "stalled"
            node = int(engine.arrays.gpus.node[chosen & ~engine.arrays.gpus.alive][0])
            reason = f"{self.scenario.facility.name_node(int(engine.tree.nodes.first[node]))} is off"
        risen_s, risen_work_s, risen_j = self.decisions.risen.get(number, (math.inf, 0.0, 0.0))
        steady_s = end_s - risen_s
        return JobResult(
            name=job.name,
            state=state,
            gpus=job.gpus,
            start_s=start_s,
            waited_s=(end_s if start_s is None else start_s) - job.start_s,
            iterations=work_s / job.period_s,
            lost_share=1.0 - work_s / ran_s if ran_s > 0 else None,
            energy_j=energy_j,
            ballast_j=float(np.sum(ballast[chosen])),
            mean_w=energy_j / self.scenario.duration_s,
            asked_w=None if governors is None else governors.asked_w(number),
            granted_w=None if governors is None or ran_s <= 0 else float(governors.granted_j[number]) / ran_s,
            steady_lost_share=1.0 - (work_s - risen_work_s) / steady_s if steady_s > 0 else None,
            steady_granted_w=(
                None
                if governors is None or steady_s <= 0
                else (float(governors.granted_j[number]) - risen_j) / steady_s
            ),
            reason=reason,
        )


# -- places -------------------------------------------------------------------------------------------------------


def place_ranks(scenario: Scenario) -> RankTable:
    """Return which GPU runs which rank: by the thermal policy if there is one, else one job after another."""
    facility = scenario.facility
    ranks = RankTable.make_empty(facility.gpus)
    free = np.ones(facility.gpus, dtype=np.bool_)
    chosen_nodes = _choose_nodes(scenario)
    wave = 0
    for number, job in enumerate(scenario.jobs):
        gpus = np.flatnonzero(free)[: job.gpus] if chosen_nodes is None else chosen_nodes.get(job.name)
        if gpus is None:
            ranks.unplaced.add(number)
            wave += len(job.waves)
            continue
        if len(gpus) < job.gpus:
            raise ArgumentError(
                f"no room for job {job.name!r}: it wants {job.gpus:,} GPUs, {len(gpus):,} are free",
                fix="GPUs of jobs that end are not given to others within one simulation: simulate them apart",
            )
        free[gpus] = False
        order = np.arange(job.gpus)
        replica = order // (job.gpus // job.replicas)
        stage = order % (job.gpus // job.replicas) // (job.gpus // job.replicas // len(job.waves))
        ranks.job[gpus], ranks.wave[gpus], ranks.replica[gpus] = number, wave + stage, replica
        # Units that differ by chance: nodes that begin at any time, or groups with their own jitter.
        ranks.unit[gpus] = gpus // facility.node.gpus if job.scatter else replica * len(job.waves) + stage
        if not _needs_replicas(scenario):
            ranks.replica[gpus] = 0
            if not job.scatter:
                ranks.unit[gpus] = 0
        wave += len(job.waves)
    return ranks


def _needs_replicas(scenario: Scenario) -> bool:
    """Return whether replicas differ: a shaper shifts them or draws a jitter for each."""
    shaper = scenario.policies.power_shaper
    return shaper is not None and (not shaper.phase_shift.is_off or shaper.jitter_s[1] > 0)


def _choose_nodes(scenario: Scenario) -> dict[str, NDArray[np.int64]] | None:
    """Return the GPUs of each job that has a place, by `placement.place_jobs`; None without a thermal policy."""
    policy, facility = scenario.policies.thermal_policy, scenario.facility
    if policy is None or facility.nodes > MANY_NODES:
        return None
    size = facility.node.gpus
    idle_w = facility.node.plug_w(size * facility.gpu.idle_w)
    c_per_w = facility.gpu.heat.resistance_c_per_w / size
    air = facility.aisle
    nodes = [
        PlacementNode(
            name=facility.name_node(i),
            gpus=size,
            idle_w=idle_w,
            aisle=f"aisle{i // facility.rack_nodes // facility.row_racks + 1}",
            rack=facility.name_rack(i // facility.rack_nodes),
            temperature_c=air.supply_c + c_per_w * size * facility.gpu.idle_w,
            max_w=facility.node_limit_w,
            c_per_w=c_per_w,
        )
        for i in range(facility.nodes)
    ]
    queue = [
        PlacementJob(
            name=job.name,
            gpus=job.gpus,
            power_w=job.gpus * max(0.0, float(np.mean([w.mean_w for w in job.waves])) - facility.gpu.idle_w),
            priority=job.priority,
        )
        for job in scenario.jobs
    ]
    index = {node.name: i for i, node in enumerate(nodes)}
    taken = np.zeros(facility.nodes, dtype=np.int64)
    places: dict[str, NDArray[np.int64]] = {}
    for placed in place_jobs(nodes, queue, policy).placed:
        parts = []
        for share in placed.on:
            node = index[share.node]
            parts.append(node * size + taken[node] + np.arange(share.gpus))
            taken[node] += share.gpus
        places[placed.job] = np.concatenate(parts)
    return places
