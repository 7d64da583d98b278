"""Which running jobs leave a hot node, and for which node: redistribution on overheat.

It only decides, as `placement`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..policy import ThermalPolicy
from .node_floor import MARGIN_C, NodeFloor, NodeShare, PlacementJob, PlacementNode

Unmoved = Literal["", "redistribute is off", "migration is off", "no job can migrate", "no cool node has room"]
"""Why nothing (more) moves away from a hot spot; empty if enough moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A running job that leaves GPUs of one node for those of others. It needs a checkpoint (`fleet.migratable`)."""

    job: str
    gpus: int
    power_w: float
    leaves: str
    takes: tuple[NodeShare, ...]
    expected_c: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HotSpot:
    """A node above the threshold, or in an aisle above its budget, and the watts it must still shed after the moves.

    `shed_w` is None if `c_per_w` is not known. `unmoved` says why not enough moves away.
    """

    node: str
    aisle: str
    temperature_c: float | None
    over_c: float
    over_w: float
    shed_w: float | None
    unmoved: Unmoved


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliefPlan:
    """What to do about hot spots now."""

    hot_spots: tuple[HotSpot, ...]
    moves: tuple[Move, ...]


def plan_moves(
    nodes: Sequence[PlacementNode],
    jobs: Sequence[PlacementJob],
    policy: ThermalPolicy | None = None,
    *,
    rack_limits_w: Mapping[str, float] | None = None,
) -> ReliefPlan:
    """Return hot spots, hottest first, and which running jobs should leave them for which nodes.

    The smallest job that cools the node enough leaves; if none does, the largest, then the next. No move puts a rack
    above its limit in `rack_limits_w`.
    """
    policy = policy or ThermalPolicy()
    floor = NodeFloor(nodes, jobs, policy, rack_limits_w)
    moves: list[Move] = []
    spots = []
    for i in floor.hot_nodes():
        before_c, over_c, over_w = floor.temperature_c[i], floor.over_c(i), floor.over_w(i)
        if over_c == 0 and over_w == 0:  # a node before it has relieved its aisle
            continue
        unmoved: Unmoved
        if not policy.redistribute:
            unmoved = "redistribute is off"
        elif not policy.migration_on_overheat:
            unmoved = "migration is off"
        else:
            found, unmoved = _relieve(floor, i)
            moves += found
        spots.append(
            HotSpot(
                node=nodes[i].name,
                aisle=nodes[i].aisle,
                temperature_c=None if np.isnan(before_c) else float(before_c),
                over_c=over_c,
                over_w=over_w,
                shed_w=floor.excess_w(i),
                unmoved=unmoved,
            )
        )
    return ReliefPlan(hot_spots=tuple(spots), moves=tuple(moves))


def settle_moves(
    nodes: Sequence[PlacementNode], jobs: Sequence[PlacementJob], plan: ReliefPlan
) -> tuple[list[PlacementNode], list[PlacementJob]]:
    """Return the nodes and jobs as they will be after the moves: the next placement is decided on them."""
    on = {job.name: list(job.on) for job in jobs}
    added_w = {node.name: 0.0 for node in nodes}
    for move in plan.moves:
        left = next(s for s in on[move.job] if s.node == move.leaves)
        on[move.job].remove(left)
        on[move.job] += move.takes
        added_w[move.leaves] -= move.power_w
        for share in move.takes:
            added_w[share.node] += move.power_w * share.gpus / move.gpus
    return [_add_power(node, added_w[node.name]) for node in nodes], [
        replace(job, on=tuple(on[job.name])) for job in jobs
    ]


def _add_power(node: PlacementNode, added_w: float) -> PlacementNode:
    power_w, temperature_c = node.power_w, node.temperature_c
    if added_w > 0 and power_w is not None:  # a node that slept is woken
        added_w += max(node.idle_w - power_w, 0.0)
    if power_w is not None:
        power_w += added_w
    if temperature_c is not None and node.c_per_w is not None:
        temperature_c += node.c_per_w * added_w
    return replace(node, power_w=power_w, temperature_c=temperature_c)


def _relieve(floor: NodeFloor, i: int) -> tuple[list[Move], Unmoved]:
    """Move jobs away from a node until it is cool enough, or nothing more can."""
    moves: list[Move] = []
    stuck: set[str] = set()
    while (excess_w := floor.excess_w(i)) is None or excess_w > 0:
        here = [(j, s) for j, s in floor.jobs_on(i) if j.can_migrate and j.name not in stuck]
        if not here:
            return moves, "no cool node has room" if stuck else "no job can migrate"
        watts = [j.power_w * s.gpus / j.gpus for j, s in here]
        enough = [k for k, w in enumerate(watts) if excess_w is not None and w >= excess_w]
        names = [j.name for j, _ in here]
        pick = (
            min(enough, key=lambda k: (watts[k], names[k]))
            if enough
            else max(range(len(here)), key=lambda k: (watts[k], names[k]))
        )
        job, share = here[pick]
        part = PlacementJob(name=job.name, gpus=share.gpus, power_w=watts[pick])
        _, ranks = floor.rank(part, "cool")
        # A node of the same aisle cannot relieve an aisle above its budget, and a hot spot cannot relieve itself.
        banned = floor.aisle == floor.aisle[i] if floor.over_w(i) > 0 else np.arange(len(floor.nodes)) == i
        on, _ = floor.find_room(part, ranks[~banned[ranks]], margin_c=MARGIN_C, leaves=i)
        if not on:
            stuck.add(job.name)
            continue
        floor.remove(job, share)
        floor.add(part, on, stays=False)
        known = [c for c in (floor.expected_c(s.node) for s in on) if c is not None]
        moves.append(
            Move(
                job=job.name,
                gpus=share.gpus,
                power_w=watts[pick],
                leaves=share.node,
                takes=on,
                expected_c=max(known, default=None),
            )
        )
        if excess_w is None:  # nobody knows how much one job cools it, so look again after the first
            return moves, ""
    return moves, ""
