"""What is decided between two blocks of steps: jobs that begin and end, delays, floors, caps, heat, faults.

The rules are elsewhere, as for a real job and a real governor: phases, jitter and ballast in `runtime.shaping`, caps
and admission in `budget`, places in `placement`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..runtime.shaping import LOSS, GroupPlace, draw_jitter_s, rank_offset_s
from .engine import FleetEngine
from .governing import RackGovernors
from .heat import HeatState
from .scenario import Scenario


class Decisions:
    """The controllers of a simulation; `decide` is called before every block."""

    def __init__(self, engine: FleetEngine, scenario: Scenario) -> None:
        self.engine, self.scenario = engine, scenario
        self.jobs = list(scenario.jobs)
        self.started_s: dict[int, float] = {}
        self.ended_s: dict[int, float] = {}
        self.risen: dict[int, tuple[float, float, float]] = {}
        """When each job's soft start was over, its work done and the joules it was granted by then."""
        self._asked: set[int] = set()
        self._work_s: dict[int, float] = {}
        self._begun_place: dict[int, NDArray[np.float64]] = {}
        self._offset_s = np.zeros(len(engine.job))
        self._applied: set[int] = set()
        self._over: set[int] = set()
        self._iteration = np.full(len(self.jobs), -1, dtype=np.int64)
        self._set_node_cap()
        self.governors: RackGovernors | None = None
        if scenario.policies.rack_power_governor is not None:
            self.governors = RackGovernors(engine, scenario.policies.rack_power_governor, self.jobs)
        self._set_offsets()
        self._set_smoothing()
        tree = engine.tree
        self.rack_of_gpu = tree.rack_of_gpu
        self.rack_full_w = np.array([engine.facility.rack_full_w(first) for first in tree.racks.first.tolist()])
        self.rack_starts = np.flatnonzero(np.diff(self.rack_of_gpu, prepend=-1))
        self.heat = HeatState(
            engine.facility.gpu.heat,
            engine.facility.aisle,
            gpus=len(tree.gpus),
            racks=len(tree.racks),
            rows=len(tree.rows),
            racks_of_row=engine.facility.row_racks,
        )
        self.events = [(self.jobs[n].start_s, "no node may take the job", self.jobs[n].name) for n in engine.unplaced]

    # -- before the first block -----------------------------------------------------------------------------------

    def _set_offsets(self) -> None:
        """Set delays of replicas and stages by the shaper's phase shift: within what a synchronous job may lose."""
        shaper = self.scenario.policies.power_shaper
        if shaper is None or shaper.phase_shift.is_off:
            return
        engine = self.engine
        for number, job in enumerate(self.jobs):
            stages = len(job.waves)
            first = min(engine.wave[engine.job == number], default=0)
            for replica, stage in {
                (int(r), int(w) - int(first))
                for r, w in zip(engine.replica[engine.job == number], engine.wave[engine.job == number], strict=True)
            }:
                place = GroupPlace(replica=replica, replicas=job.replicas, stage=stage, stages=stages)
                most_s = LOSS * job.period_s if job.is_synchronous else np.inf
                offset_s = rank_offset_s(shaper.phase_shift, place, job.period_s, job.duty, most_s=most_s)
                chosen = (engine.job == number) & (engine.replica == replica) & (engine.wave == first + stage)
                self._offset_s[chosen] = offset_s

    def _set_smoothing(self) -> None:
        """Set floors and ramps: the board's own, and the shaper's ballast."""
        gpu, gpus = self.engine.facility.gpu, self.engine.arrays.gpus
        step_s = self.engine.step_s
        shaper = self.scenario.policies.power_shaper
        is_held = shaper is not None and (shaper.power_floor_w is not None or shaper.max_ramp_w_per_s is not None)
        smooths = (gpu.smooth_up_w_per_s, gpu.smooth_down_w_per_s, gpu.smooth_floor_w or None)
        self.engine.is_shaped = is_held or any(value is not None for value in smooths)
        if gpu.smooth_up_w_per_s is not None:
            gpus.up_w[:] = gpu.smooth_up_w_per_s * step_s
        if gpu.smooth_down_w_per_s is not None:
            gpus.down_w[:] = gpu.smooth_down_w_per_s * step_s
        if shaper is not None and shaper.max_ramp_w_per_s is not None:
            gpus.down_w[self.engine.job >= 0] = shaper.max_ramp_w_per_s * step_s

    def _set_node_cap(self) -> None:
        """Set `cap_rate` of what the node's supplies switch off at as the cap of its GPUs."""
        shaper, facility = self.scenario.policies.power_shaper, self.engine.facility
        if shaper is None or shaper.cap_rate is None:
            return
        supply = facility.node.supply
        limit_w = shaper.psu_limit_w or supply.limit_at * supply.capacity_w
        node = facility.node
        self.engine.set_cap(facility.gpu.share_cap(shaper.cap_rate * limit_w, host_w=node.host_w, gpus=node.gpus))

    # -- between blocks -------------------------------------------------------------------------------------------

    def decide(self, now_s: float) -> None:
        self._run_faults(now_s)
        if self.governors is not None:
            nodes = self.engine.arrays.nodes
            self.governors.decide(now_s, nodes.draw_w, self._find_seen(now_s))
        for number, job in enumerate(self.jobs):
            if number not in self.started_s and now_s >= job.start_s and number not in self.engine.unplaced:
                self._try_start(number, now_s)
            if job.end_s is not None and now_s >= job.end_s and number not in self.ended_s:
                self._end(number, now_s)
        self._set_delays()
        self._mark_risen(now_s)

    def _mark_risen(self, now_s: float) -> None:
        """Note how far each job has come when its soft start is over: what it loses from then on stays lost."""
        governor = self.scenario.policies.rack_power_governor
        rise_s = 0.0 if governor is None else governor.soft_start_s + governor.per_rack_jitter_s[1]
        for number, start_s in self.started_s.items():
            if number not in self.risen and now_s >= start_s + rise_s and number not in self.ended_s:
                granted_j = 0.0 if self.governors is None else float(self.governors.granted_j[number])
                self.risen[number] = (now_s, self.count_work(number), granted_j)

    def _try_start(self, number: int, now_s: float) -> None:
        if self.governors is not None:
            if number not in self._asked:
                self.governors.request(number, now_s)
                self._asked.add(number)
            if not self.governors.is_admitted(number):
                return
        engine, job = self.engine, self.jobs[number]
        chosen = engine.job == number
        self.started_s[number] = now_s
        engine.arrays.gpus.next_delay_s[chosen] = self._draw_delays(number, 0)[chosen]
        engine.start_job(number, at_s=job.at_s)
        if self.governors is not None:
            # Its schedule paces from the first launch on; a limit of the board alone would take 50 ms to take effect.
            gpus = engine.arrays.gpus
            room_w = gpus.cap_w[chosen] - gpus.idle_w[chosen]
            gpus.gain[chosen] = np.clip(room_w / np.maximum(1.0, job.peak_w - gpus.idle_w[chosen]), 0.0, 1.0)
        if job.scatter:
            draw = draw_jitter_s((0.0, job.period_s), self.scenario.seed, engine.unit[chosen].astype(np.uint64), 0)
            engine.arrays.gpus.place_s[chosen] = draw
        if self.governors is None and now_s == 0.0:
            # it has run before: time that a limit or the board's smoothing takes to settle is not a ramp
            engine.settle_job(number)
        shaper = self.scenario.policies.power_shaper
        floor_w = max(shaper.power_floor_w or 0.0 if shaper else 0.0, engine.facility.gpu.smooth_floor_w)
        engine.arrays.gpus.floor_w[chosen] = floor_w
        self._begun_place[number] = engine.arrays.gpus.place_s[chosen].astype(float)
        self._iteration[number] = 0
        self.events.append((now_s, "job started", job.name))

    def _end(self, number: int, now_s: float) -> None:
        self.ended_s[number] = now_s
        if number in self.started_s:
            self._work_s[number] = self.count_work(number)
            self.engine.end_job(number)
            self.events.append((now_s, "job ended", self.jobs[number].name))
        if self.governors is not None and number in self._asked:
            self.governors.release(number, now_s)

    def count_grants(self, seconds: float) -> None:
        """Count what the governors granted to the jobs that ran in the last block."""
        if self.governors is not None:
            self.governors.count_grants(self.started_s.keys() - self.ended_s.keys(), seconds)

    @property
    def all_events(self) -> list[tuple[float, str, str]]:
        """Return (time, kind, place) of jobs, faults and governors."""
        return self.events + (self.governors.shed if self.governors is not None else [])

    def _draw_delays(self, number: int, iteration: int) -> NDArray[np.float64]:
        shaper = self.scenario.policies.power_shaper
        delays = self._offset_s.copy()
        if shaper is not None and shaper.jitter_s[1] > 0:
            units = self.engine.unit.astype(np.uint64)
            delays += draw_jitter_s(shaper.jitter_s, self.scenario.seed + number, units, iteration)
        return delays

    def _set_delays(self) -> None:
        """Set the delay of the next iteration, for jobs that have begun another one since."""
        groups, gpus = self.engine.arrays.groups, self.engine.arrays.gpus
        for number in self.started_s:
            done = int(groups.iterations[number])
            if not self.jobs[number].is_synchronous:
                done = int(gpus.work_s[self.engine.job == number].max() / self.jobs[number].period_s + 0.5)
            if done + 1 != self._iteration[number] and number not in self.ended_s:
                self._iteration[number] = done + 1
                chosen = self.engine.job == number
                gpus.next_delay_s[chosen] = self._draw_delays(number, done + 1)[chosen]

    def count_work(self, number: int) -> float:
        """Return the seconds of nominal work that a job has done since it started; the slowest rank counts."""
        gpus, groups = self.engine.arrays.gpus, self.engine.arrays.groups
        if number in self._work_s:
            return self._work_s[number]
        if number not in self.started_s:
            return 0.0
        chosen, job = self.engine.job == number, self.jobs[number]
        place = np.minimum(gpus.place_s[chosen], gpus.sync_s[chosen]).astype(float)
        delay = gpus.delay_s[chosen]
        place = np.where(place >= 0, place, np.minimum(0.0, place + delay))
        if job.is_synchronous:
            return float(groups.iterations[number]) * job.period_s + float(place.min()) - job.at_s
        weights = self.engine.tree.gpus.instances[chosen]
        done = gpus.work_s[chosen] + place - self._begun_place[number]
        return float(np.dot(done, weights) / np.sum(weights))

    # -- faults and heat ------------------------------------------------------------------------------------------

    def _run_faults(self, now_s: float) -> None:
        engine, tree = self.engine, self.engine.tree
        for i, fault in enumerate(self.scenario.faults):
            if fault.end_s <= now_s and i not in self._over:
                self._over.add(i)
                self.events.append((now_s, fault.kind.replace("_lost", " back"), fault.place))
            if fault.at_s > now_s or i in self._applied:
                continue
            self._applied.add(i)
            self.events.append((now_s, fault.kind.replace("_", " "), fault.place))
            level, number = fault.find(engine.facility)
            if fault.kind == "node_lost":
                engine.kill_nodes(tree.nodes.first == number)
            elif fault.kind == "breaker_trip":
                rack = tree.racks.first == number if level == "rack" else tree.racks.parent == tree.row_class[number]
                if level == "row":
                    engine.arrays.rows.closed[tree.row_class[number]] = False
                engine.arrays.racks.closed[rack] = False
                engine.kill_nodes(rack[tree.nodes.parent])

    def _find_seen(self, now_s: float) -> NDArray[np.bool_]:
        """Return the nodes whose sensors answer."""
        tree = self.engine.tree
        seen = np.ones(len(tree.nodes), dtype=np.bool_)
        for fault in self.scenario.faults:
            if fault.kind == "sensor_lost" and fault.is_on(now_s):
                level, number = fault.find(self.engine.facility)
                if level == "node":
                    seen &= tree.nodes.first != number
                else:
                    seen &= tree.racks.first[tree.nodes.parent] != number
        return seen

    def warm(self, now_s: float, steps: int) -> None:
        """Compute the temperatures after a block, and the clocks that follow."""
        engine, tree = self.engine, self.engine.tree
        fleet = engine.arrays
        cooling = np.ones(len(tree.rows))
        for fault in self.scenario.faults:
            if fault.kind == "cooling_lost" and fault.is_on(now_s):
                cooling[tree.row_class[fault.find(engine.facility)[1]]] = 0.0
        self.heat.advance(
            steps * engine.step_s,
            rack_of_gpu=self.rack_of_gpu,
            row_of_rack=tree.racks.parent,
            gpu_w=np.multiply(fleet.gpus.sum_w, 1.0 / steps, dtype=np.float32, casting="same_kind"),
            rack_load=fleet.racks.sum_w / steps / self.rack_full_w,
            row_w=fleet.rows.sum_w / steps,
            cooling=cooling,
        )
        if self.heat.is_changing:
            engine.slow_gpus(self.heat.clock)
