"""Rack governors inside the simulator: the decisions of `budget.Budget`, fed with simulated sensors.

Every governed rack has a budget of its own. Its nodes send heartbeats with what they draw, and set the caps of their
GPUs to what they are granted. A job begins when all racks that it uses have admitted it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..policy import RackPowerGovernor
from .budget import Budget
from .engine import FleetEngine
from .jobs import FleetJob
from .leases import BudgetPolicy, JobState, PowerRequest

SHED = "rack governor sheds its jobs: above rack_cap"
"""The kind of the event of a rack whose measured power was above its cap."""
_ROUNDING_W = 1.0  # the curve of a supply is inverted by a table
_LONG_S = 1e7  # seconds of a lease that lasts for the whole simulation: its job does not stop asking


@dataclass(slots=True)
class _GovernedRack:
    """The budget of one class of racks, and its nodes: (class of nodes, name)."""

    budget: Budget
    nodes: list[tuple[int, str]]
    acked: dict[str, int] = field(default_factory=dict)
    next_s: float = 0.0
    shed_s: float | None = None


class RackGovernors:
    """All governed racks, each with its budget."""

    def __init__(self, engine: FleetEngine, policy: RackPowerGovernor, jobs: list[FleetJob]) -> None:
        self.engine, self.jobs = engine, jobs
        self.policy = BudgetPolicy.from_rack(policy)
        facility, tree = engine.facility, engine.tree
        idle_w = facility.node.plug_w(facility.node.gpus * facility.gpu.idle_w)
        share_w = min(idle_w, self.policy.limit_w / facility.rack_nodes)
        self.racks: list[_GovernedRack] = []
        for rack in range(len(tree.racks)):
            nodes = [
                (int(node), f"n{node}-{copy}")
                for node in np.flatnonzero(tree.nodes.parent == rack)
                for copy in range(int(tree.nodes.count[node]))
            ]
            # Daemons do not send at the same time: their heartbeats are spread over one interval.
            next_s = self.policy.heartbeat_s * rack / len(tree.racks)
            governed = _GovernedRack(Budget(self.policy), nodes, next_s=next_s)
            for _, name in nodes:
                governed.budget.join(0.0, name, share_w, max_w=facility.node_limit_w)
            self.racks.append(governed)
        self._jobs_of_node = self._find_jobs()
        # A node obeys its guaranteed share until its first heartbeat.
        self._granted_w = np.full(len(tree.nodes), share_w)
        self._set_caps(self._granted_w)
        self._asked_w = {job: np.array([of.get(job, 0.0) for of in self._jobs_of_node]) for job in range(len(jobs))}
        self._all_asked_w = sum(self._asked_w.values(), np.zeros(len(tree.nodes)))
        self.granted_j = np.zeros(len(jobs))
        self.shed: list[tuple[float, str, str]] = []

    def _find_jobs(self) -> list[dict[int, float]]:
        """Return, for each class of nodes, the watts at the plug that each of its jobs wants."""
        engine = self.engine
        found: list[dict[int, float]] = [{} for _ in range(len(engine.tree.nodes))]
        counts = engine.tree.gpus.count
        for gpu, node in enumerate(engine.tree.gpus.parent):
            job = int(engine.job[gpu])
            if job >= 0:
                peak_w = min(engine.waves[int(engine.wave[gpu])].peak_w, engine.cap_w)
                found[node][job] = found[node].get(job, 0.0) + float(counts[gpu]) * peak_w
        for wanted in found:
            busy = sum(wanted.values())
            for job in wanted:
                wanted[job] *= engine.facility.node.plug_w(busy) / busy
        return found

    def request(self, job: int, now_s: float) -> None:
        """Ask every rack that the job uses for its watts."""
        for rack in self.racks:
            watts = {
                name: self._jobs_of_node[node][job] for node, name in rack.nodes if job in self._jobs_of_node[node]
            }
            if watts:
                one = self.jobs[job]
                request = PowerRequest(
                    job=one.name, watts=watts, priority=one.priority, min_share=one.least_share, ttl_s=_LONG_S
                )
                rack.budget.request(now_s, request)

    def is_admitted(self, job: int) -> bool:
        """Return whether all racks that the job uses have admitted it."""
        name = self.jobs[job].name
        leases = [lease for rack in self.racks if (lease := rack.budget.queue.jobs.get(name)) is not None]
        return bool(leases) and all(lease.state is JobState.ACTIVE for lease in leases)

    def release(self, job: int, now_s: float) -> None:
        """Note that the job has ended."""
        name = self.jobs[job].name
        for rack in self.racks:
            if name in rack.budget.queue.jobs:
                rack.budget.release(now_s, name)

    def decide(self, now_s: float, node_w: NDArray[np.float64], is_seen: NDArray[np.bool_]) -> None:
        """Run the heartbeats that are due: measured watts in, caps out. A node whose sensor is lost reports nothing."""
        engine = self.engine
        caps_w = np.full(len(engine.tree.nodes), np.inf)
        due = [rack for rack in self.racks if now_s >= rack.next_s]
        for rack in due:
            rack.next_s = now_s + self.policy.heartbeat_s
            for node, name in rack.nodes:
                if not engine.arrays.nodes.alive[node]:
                    continue
                measured_w = float(node_w[node]) if is_seen[node] else None
                grant = rack.budget.heartbeat(now_s, name, acked=rack.acked.get(name, 0), measured_w=measured_w)
                rack.acked[name] = grant.seq
                caps_w[node] = min(caps_w[node], grant.cap_w)
            self._note_shed(rack, now_s)
        if due:
            self._set_caps(caps_w)
            np.copyto(self._granted_w, caps_w, where=np.isfinite(caps_w))

    def _note_shed(self, rack: _GovernedRack, now_s: float) -> None:
        since_s = None if rack.budget.emergency is None else rack.budget.emergency.since_s
        if since_s is not None and since_s != rack.shed_s:
            first = int(self.engine.tree.racks.first[self.racks.index(rack)])
            self.shed.append((now_s, SHED, self.engine.facility.name_rack(first)))
        rack.shed_s = since_s

    # -- what jobs asked for and got ------------------------------------------------------------------------------

    def count_grants(self, jobs: Iterable[int], seconds: float) -> None:
        """Add what the running jobs were granted for `seconds`."""
        instances = self.engine.tree.nodes.instances
        for job in jobs:
            asked_w = self._asked_w[job]
            share = np.divide(asked_w, self._all_asked_w, out=np.zeros_like(asked_w), where=asked_w > 0)
            granted_w = np.minimum(asked_w, self._granted_w * share)
            self.granted_j[job] += seconds * float(np.dot(granted_w, instances))

    def asked_w(self, job: int) -> float:
        """Return watts at the plugs of its nodes that a job asks for."""
        return float(np.dot(self._asked_w[job], self.engine.tree.nodes.instances))

    @property
    def rack_asked_w(self) -> float:
        """Return the most that all jobs ask of one rack."""
        nodes = self.engine.tree.nodes
        return float(np.bincount(nodes.parent, weights=self._all_asked_w * nodes.count).max())

    def is_held(self, job: int) -> bool:
        """Return whether a GPU of the job may only draw its idle power now: then the whole job waits."""
        gpus, chosen = self.engine.arrays.gpus, self.engine.job == job
        return bool(np.any(gpus.cap_w[chosen] < gpus.idle_w[chosen] + _ROUNDING_W))

    def _set_caps(self, caps_w: NDArray[np.float64]) -> None:
        """Set each GPU's limit from the watts at the plug of its node."""
        facility, gpus = self.engine.facility, self.engine.arrays.gpus
        known = np.isfinite(caps_w)
        load_w = facility.node.supply.find_load(np.where(known, caps_w, 0.0))
        each_w = np.clip((load_w - facility.node.host_w) / facility.node.gpus, facility.gpu.idle_w, self.engine.cap_w)
        chosen = known[gpus.node]
        gpus.cap_w[chosen] = each_w[gpus.node[chosen]]
