"""Co-scheduling: what packing moderate jobs on fewer nodes saves against spreading them, in joules and in cooling.

Everything is modelled, from the nodes' idle, asleep and full watts and the jobs' watts. A node without jobs sleeps if
it can. Fans follow the cube of a node's heat, so the fans of a packed node draw more, and packing does not always save.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ArgumentError
from ..policy import ThermalPolicy
from .node_floor import NodeShare, Order, PlacementJob, PlacementNode
from .placement import Placement, place_jobs

SUPPLY_C = 20.0
"""Assumed temperature of the air that the cooling plant supplies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementEnergy:
    """The joules of a placement until its last job ends: of the nodes without their fans, of fans, and of cooling."""

    order: Order
    it_j: float
    fans_j: float
    cooling_j: float
    peak_w: float
    nodes_used: int
    time_s: float
    waiting: int

    @property
    def total_j(self) -> float:
        return self.it_j + self.fans_j + self.cooling_j


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingSavings:
    """Two placements of the same jobs over the same time, modelled. Negative savings: packing costs."""

    packed: PlacementEnergy
    spread: PlacementEnergy
    cop: float
    sharing_slowdown: float

    @property
    def saved_j(self) -> float:
        """Return joules that packing saves, cooling included."""
        return self.spread.total_j - self.packed.total_j

    @property
    def saved_cooling_j(self) -> float:
        """Return joules of cooling that packing saves."""
        return self.spread.cooling_j - self.packed.cooling_j

    @property
    def saved_share(self) -> float:
        """Return saved joules as a share of what spreading takes."""
        return self.saved_j / self.spread.total_j if self.spread.total_j > 0 else 0.0


def cooling_cop(supply_c: float) -> float:
    """Return the watts of heat that one watt of cooling removes, by the temperature of the supplied air.

    This is the fit of a chilled-water plant by Moore et al., "Making Scheduling Cool" (USENIX ATC 2005).
    """
    if not 5.0 <= supply_c <= 40.0:
        raise ArgumentError(f"supplied air of {supply_c:g} °C", why="the fit holds from 5 to 40 °C", fix="e.g. 20C")
    return 0.0068 * supply_c**2 + 0.0008 * supply_c + 0.458


def compare_packing(
    nodes: Sequence[PlacementNode],
    jobs: Sequence[PlacementJob],
    policy: ThermalPolicy | None = None,
    *,
    supply_c: float = SUPPLY_C,
    sharing_slowdown: float = 0.0,
    rack_limits_w: Mapping[str, float] | None = None,
) -> PackingSavings:
    """Place the jobs packed and spread, and compare the joules until the last job of either has ended.

    `sharing_slowdown`: by which share a job takes longer for each other job on its busiest node.
    """
    if not 0.0 <= sharing_slowdown <= 10.0:
        raise ArgumentError(f"sharing_slowdown={sharing_slowdown:g} is not from 0 to 10", fix="0.05 means 5% longer")
    for job in jobs:
        if job.duration_s is None or not job.duration_s > 0:
            raise ArgumentError(f"job {job.name!r} has no duration", fix="joules need one: duration: 2h")
    cop = cooling_cop(supply_c)
    orders: tuple[Order, ...] = ("pack", "spread")
    placements = {order: place_jobs(nodes, jobs, policy, order=order, rack_limits_w=rack_limits_w) for order in orders}
    ends = {order: _end_times(placement, jobs, sharing_slowdown) for order, placement in placements.items()}
    until_s = max((s for times in ends.values() for s in times.values()), default=0.0)
    energy = {
        order: _add_up(order, placement, nodes, jobs, ends[order], until_s, cop)
        for order, placement in placements.items()
    }
    return PackingSavings(packed=energy["pack"], spread=energy["spread"], cop=cop, sharing_slowdown=sharing_slowdown)


def _shares(placement: Placement, jobs: Sequence[PlacementJob]) -> dict[str, tuple[NodeShare, ...]]:
    """Return where each job runs, without the jobs that wait."""
    return {j.name: j.on for j in jobs if j.on} | {p.job: p.on for p in placement.placed}


def _end_times(placement: Placement, jobs: Sequence[PlacementJob], slowdown: float) -> dict[str, float]:
    where = _shares(placement, jobs)
    crowd = {n.node: len(n.jobs) for n in placement.nodes}
    return {
        job.name: (job.duration_s or 0.0) * (1.0 + slowdown * (max(crowd[s.node] for s in where[job.name]) - 1))
        for job in jobs
        if job.name in where
    }


def _add_up(
    order: Order,
    placement: Placement,
    nodes: Sequence[PlacementNode],
    jobs: Sequence[PlacementJob],
    ends: Mapping[str, float],
    until_s: float,
    cop: float,
) -> PlacementEnergy:
    """Add up joules between the ends of jobs, where the power is constant."""
    where = _shares(placement, jobs)
    by_name = {j.name: j for j in jobs}
    edges = sorted({0.0, until_s, *ends.values()})
    it_j = fans_j = peak_w = 0.0
    for start_s, end_s in itertools.pairwise(edges):
        watts = {n.name: 0.0 for n in nodes}
        busy = set()
        for name, on in where.items():
            if ends[name] > start_s:
                for share in on:
                    watts[share.node] += by_name[name].power_w * share.gpus / by_name[name].gpus
                    busy.add(share.node)
        it_w, fans_w = _sum_power(nodes, watts, busy)
        it_j, fans_j = it_j + it_w * (end_s - start_s), fans_j + fans_w * (end_s - start_s)
        peak_w = max(peak_w, (it_w + fans_w) * (1.0 + 1.0 / cop))
    return PlacementEnergy(
        order=order,
        it_j=it_j,
        fans_j=fans_j,
        cooling_j=(it_j + fans_j) / cop,
        peak_w=peak_w,
        nodes_used=len({s.node for on in where.values() for s in on}),
        time_s=max(ends.values(), default=0.0),
        waiting=len(placement.waiting),
    )


def _sum_power(nodes: Sequence[PlacementNode], watts: Mapping[str, float], busy: set[str]) -> tuple[float, float]:
    it_w = fans_w = 0.0
    for node in nodes:
        if node.name not in busy and node.asleep_w is not None:
            it_w += node.asleep_w
            continue
        power_w = node.idle_w + watts[node.name]
        it_w += power_w
        # air flow is proportional to the heat, and a fan's watts to the cube of its air flow (the fan laws)
        if node.max_w:
            fans_w += node.fan_max_w * (power_w / node.max_w) ** 3
    return it_w, fans_w
