"""Which node a job runs on: cool nodes first, cooling budgets of aisles, no new hot spots, moves away from old ones.

::

    nodes (temperature, watts, free GPUs) ─┐
    jobs (GPUs, watts)                     ├──► place_jobs ──► Placement: who runs where and why; who waits and why
    ThermalPolicy                          ┘    plan_moves ──► ReliefPlan: hot spots, moves, watts to shed

This module only decides: it has no clock, no sensor, no random numbers. The same input gives the same answer, so the
simulator runs the same code as an operator's command. A node's temperature after a change is taken as T + c_per_w x
added watts (a steady state); without `c_per_w`, only the present temperature counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..policy import ThermalPolicy
from .node_floor import (
    AisleLoad,
    NodeFloor,
    NodeLoad,
    NodeShare,
    Order,
    PlacementJob,
    PlacementNode,
    RackLoad,
    Refusal,
    Rule,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedJob:
    """A job with its nodes, the rule by which they were chosen, and the better nodes that refused it."""

    job: str
    on: tuple[NodeShare, ...]
    rule: Rule
    expected_c: float | None
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingJob:
    """A job that no node may take now."""

    job: str
    refused: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Who runs where, who waits, and the effect on nodes, aisles and racks."""

    placed: tuple[PlacedJob, ...]
    waiting: tuple[WaitingJob, ...]
    nodes: tuple[NodeLoad, ...]
    aisles: tuple[AisleLoad, ...]
    racks: tuple[RackLoad, ...] = ()

    @property
    def power_w(self) -> float:
        """Return watts of all nodes."""
        return sum(n.power_w for n in self.nodes)


def place_jobs(
    nodes: Sequence[PlacementNode],
    jobs: Sequence[PlacementJob],
    policy: ThermalPolicy | None = None,
    *,
    order: Order = "cool",
    rack_limits_w: Mapping[str, float] | None = None,
) -> Placement:
    """Place the queued jobs (those that run stay), the important and large ones first.

    No rack with a limit in `rack_limits_w` gets above it; a rack that is above it already gets nothing more.
    """
    policy = policy or ThermalPolicy(prefer_cool_nodes=True)
    floor = NodeFloor(nodes, jobs, policy, rack_limits_w)
    placed, waiting = [], []
    for job in sorted((j for j in jobs if not j.on), key=lambda j: (-j.priority, -j.power_w, -j.gpus, j.name)):
        rule, ranks = floor.rank(job, order)
        on, refused = floor.find_room(job, ranks)
        if on:
            floor.add(job, on)
            known = [c for c in (floor.expected_c(s.node) for s in on) if c is not None]
            if rule == "coolest" and len(known) < len(on):
                rule = "unknown"
            placed.append(
                PlacedJob(job=job.name, on=on, rule=rule, expected_c=max(known, default=None), refused=refused)
            )
        else:
            waiting.append(WaitingJob(job=job.name, refused=refused))
    return Placement(
        placed=tuple(placed),
        waiting=tuple(waiting),
        nodes=floor.node_loads(),
        aisles=floor.aisle_loads(),
        racks=floor.rack_loads(),
    )
