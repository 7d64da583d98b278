"""The nodes that take jobs, as columns: what is free, how warm it is, and which node may take which job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..errors import ArgumentError, did_you_mean
from ..joules import Floats, Ints
from ..policy import ThermalPolicy
from ..units import format_power

# Assumed: a node is relieved until it is this far below the threshold, and takes new work only up to there. Fans hold a
# set point within about 2 K; without a margin, two nodes would pass one job back and forth.
MARGIN_C = 3.0
# A job whose watts per GPU are at most this share of what a GPU of the node can draw above idle is moderate. Assumed:
# half leaves room for two such jobs within one full one.
MODERATE_SHARE = 0.5

Order = Literal["cool", "pack", "spread"]
"""Which node is preferred: the coolest; for moderate jobs the fullest, else the coolest; the emptiest."""
RefusalKind = Literal[
    "unavailable", "no_free_gpus", "fleet_size", "fleet_full", "node_limit", "hot_spot", "aisle_budget", "rack_limit"
]
REFUSALS: dict[RefusalKind, str] = {
    "unavailable": "not available",
    "no_free_gpus": "too few free GPUs",
    "fleet_size": "the fleet has too few GPUs",
    "fleet_full": "the fleet has too few free GPUs",
    "node_limit": "above the node's power limit",
    "hot_spot": "above the hot-spot threshold",
    "aisle_budget": "above the aisle's cooling budget",
    "rack_limit": "above what the rack's feed carries",
}

Rule = Literal["coolest", "fullest", "emptiest", "first", "unknown"]
"""How a node was chosen.

"first": in the given order of the nodes; "unknown": the same, because its temperature is not known and no cool node of
known temperature may take the job.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementNode:
    """A node that may take jobs. `temperature_c` is its hottest device now; None: not known, so it comes last.

    `idle_w` is drawn without a job, `asleep_w` if the node sleeps while it has none (None: it cannot), `power_w` now
    (None: not measured, so computed from its jobs), `max_w` at most. `c_per_w`: degrees per added watt once settled.
    `fan_max_w`: what its fans draw at `max_w`; they follow the cube of the heat.
    """

    name: str
    gpus: int
    idle_w: float
    aisle: str = ""
    rack: str = ""
    temperature_c: float | None = None
    power_w: float | None = None
    asleep_w: float | None = None
    max_w: float | None = None
    c_per_w: float | None = None
    fan_max_w: float = 0.0
    is_available: bool = True

    def __post_init__(self) -> None:
        if self.gpus < 1 or not self.idle_w >= 0:
            raise ArgumentError(
                f"node {self.name!r} has {self.gpus} GPUs and {self.idle_w:g} W when idle",
                fix="give at least one GPU, and watts of at least 0",
            )
        if self.max_w is not None and not self.max_w >= self.idle_w:
            draws = f"{format_power(self.idle_w)} when idle, and {format_power(self.max_w)} at most"
            raise ArgumentError(f"node {self.name!r} draws {draws}", fix="a higher max, or a lower idle")
        if self.c_per_w is not None and not self.c_per_w >= 0:
            raise ArgumentError(f"node {self.name!r} has c_per_w={self.c_per_w!r}", fix="degrees per watt, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementJob:
    """A job. `power_w`: what all its GPUs draw above idle. `on`: the nodes and GPUs it runs on; empty: it is queued.

    `moderate` None: decided by MODERATE_SHARE where the nodes' `max_w` is known. Higher `priority` is placed first.
    """

    name: str
    gpus: int
    power_w: float
    duration_s: float | None = None
    priority: int = 0
    moderate: bool | None = None
    can_migrate: bool = False
    on: tuple[NodeShare, ...] = ()

    def __post_init__(self) -> None:
        if self.gpus < 1 or not self.power_w >= 0:
            raise ArgumentError(
                f"job {self.name!r} asks for {self.gpus} GPUs and {self.power_w:g} W",
                fix="give at least one GPU, and watts of at least 0",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShare:
    """A number of GPUs on a node."""

    node: str
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why `count` nodes do not take a job; the best of them is the example, with its value and the limit.

    `node` is empty if the reason is about all nodes together: the fleet's GPUs, and those that the job wants.
    """

    kind: RefusalKind
    count: int
    node: str
    value: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """A node after the placement: its jobs, watts and expected temperature."""

    node: str
    aisle: str
    jobs: tuple[str, ...]
    free_gpus: int
    power_w: float
    expected_c: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AisleLoad:
    """The heat of an aisle after the placement, and its cooling budget where it has one."""

    aisle: str
    heat_w: float
    budget_w: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RackLoad:
    """The watts of a rack after the placement, and what its feed carries where that is known."""

    rack: str
    power_w: float
    limit_w: float | None

    @property
    def over_w(self) -> float:
        """Return the watts above the limit. A placement adds nothing there, so the rack was above it already."""
        return 0.0 if self.limit_w is None else max(self.power_w - self.limit_w, 0.0)


class NodeFloor:
    """The nodes as columns, with what was placed on them so far. `rack_limits_w`: what the feeds of racks carry."""

    def __init__(
        self,
        nodes: Sequence[PlacementNode],
        jobs: Iterable[PlacementJob],
        policy: ThermalPolicy,
        rack_limits_w: Mapping[str, float] | None = None,
    ) -> None:
        self.nodes, self.policy = nodes, policy
        self.index = {n.name: i for i, n in enumerate(nodes)}
        if len(self.index) != len(nodes):
            name = next(n.name for i, n in enumerate(nodes) if self.index[n.name] != i)
            raise ArgumentError(f"two nodes have the same name, {name!r}", fix="give each node a name of its own")
        nan = float("nan")
        self.gpus = np.array([n.gpus for n in nodes], dtype=np.int64)
        self.free = self.gpus.copy()
        self.temperature_c = np.array([nan if n.temperature_c is None else n.temperature_c for n in nodes])
        self.c_per_w = np.array([n.c_per_w or 0.0 for n in nodes])
        self.max_w = np.array([np.inf if n.max_w is None else n.max_w for n in nodes])
        self.idle_w = np.array([n.idle_w for n in nodes])
        self.asleep_w = np.array([n.idle_w if n.asleep_w is None else n.asleep_w for n in nodes])
        self.available = np.array([n.is_available for n in nodes], dtype=bool)
        self._names = list(dict.fromkeys(n.aisle for n in nodes))
        self.aisle = np.array([self._names.index(n.aisle) for n in nodes], dtype=np.int64)
        self._racks = list(dict.fromkeys(n.rack for n in nodes))
        self.rack = np.array([self._racks.index(n.rack) for n in nodes], dtype=np.int64)
        self.limit_w = np.array([(rack_limits_w or {}).get(name, np.inf) for name in self._racks])
        self._placed: list[list[tuple[PlacementJob, NodeShare]]] = [[] for _ in nodes]
        for job in jobs:
            self._check_running(job)
            for share in job.on:
                i = self.index[share.node]
                self._placed[i].append((job, share))
                self.free[i] -= share.gpus
        if np.any(self.free < 0):
            i = int(np.argmin(self.free))
            raise ArgumentError(
                f"jobs use {self.gpus[i] - self.free[i]} GPUs of node {nodes[i].name!r}, which has {self.gpus[i]}",
                fix="correct the jobs' `on`, or the node's GPUs",
            )
        self.heat_w = np.array([self._heat_now(i) for i in range(len(nodes))])
        budgets = policy.cooling_budget_w or {}
        self.budget_w = np.array([budgets.get(name, np.inf) for name in self._names])

    def _check_running(self, job: PlacementJob) -> None:
        for share in job.on:
            if share.node not in self.index:
                near = did_you_mean(share.node, self.index)
                raise ArgumentError(f"job {job.name!r} runs on {share.node!r}, which is not a node{near}")
        if job.on and sum(s.gpus for s in job.on) != job.gpus:
            raise ArgumentError(
                f"job {job.name!r} has {job.gpus} GPUs and runs on {sum(s.gpus for s in job.on)}",
                fix="give the GPUs it has on each node; they add up to its GPUs",
            )

    def _heat_now(self, i: int) -> float:
        node, running = self.nodes[i], self._placed[i]
        if node.power_w is not None:
            return node.power_w
        if not running:
            return float(self.asleep_w[i])
        return node.idle_w + sum(job.power_w * share.gpus / job.gpus for job, share in running)

    # -- preferences --------------------------------------------------------------------------------------------------

    def rank(self, job: PlacementJob, order: Order) -> tuple[Rule, Ints]:
        """Return the nodes in the order in which they are tried, and the rule behind it."""
        index = np.arange(len(self.nodes))
        heat = np.where(np.isnan(self.temperature_c), np.inf, self.temperature_c)
        # A job of several nodes takes whole nodes first, for fewer nodes and shorter paths.
        parts = self.free < self.gpus if job.gpus > int(self.gpus.max(initial=0)) else np.zeros(len(index), dtype=bool)
        if order == "spread":
            return "emptiest", np.lexsort((index, -self.free, parts))
        cool = heat if self.policy.prefer_cool_nodes else index
        if order == "pack" and self._is_moderate(job):
            empty = self.free == self.gpus
            return "fullest", np.lexsort((index, cool, np.where(empty, 0, self.free), empty, parts))
        return ("coolest" if self.policy.prefer_cool_nodes else "first"), np.lexsort((index, cool, parts))

    def _is_moderate(self, job: PlacementJob) -> bool:
        if job.moderate is not None:
            return job.moderate
        span_w = (self.max_w - self.idle_w) / self.gpus
        return bool(np.isfinite(span_w).any()) and job.power_w / job.gpus <= MODERATE_SHARE * float(np.min(span_w))

    # -- what a node may take -----------------------------------------------------------------------------------------

    def find_room(
        self, job: PlacementJob, ranks: Ints, *, margin_c: float = 0.0, leaves: int | None = None
    ) -> tuple[tuple[NodeShare, ...], tuple[Refusal, ...]]:
        """Return the nodes for a job, all or none of it, and why nodes that come before them were refused.

        `leaves` is the node that the job runs on now: its watts there are free for another node of the same rack.
        """
        spans = job.gpus > int(self.gpus.max(initial=0))
        left, on = job.gpus, []
        left_w, rack_left_w = self._aisle_left_w(), self._rack_left_w()
        if leaves is not None:
            rack_left_w[self.rack[leaves]] += job.power_w
        has_room = self.available & (self.free >= (1 if spans else job.gpus))
        refused: dict[RefusalKind, Refusal] = {}
        tried = len(ranks)
        for at in np.flatnonzero(has_room[ranks]).tolist():
            i = int(ranks[at])
            take = min(left, int(self.free[i])) if spans else job.gpus
            problem = self._judge(i, take * job.power_w / job.gpus, left_w, rack_left_w, margin_c)
            if problem is not None:
                old = refused.get(problem.kind)
                refused[problem.kind] = replace(old, count=old.count + 1) if old else problem
                continue
            on.append(NodeShare(node=self.nodes[i].name, gpus=take))
            added_w = self._added_w(i, take * job.power_w / job.gpus)
            left_w[self.aisle[i]] -= added_w
            rack_left_w[self.rack[i]] -= added_w
            left -= take
            if left == 0:
                tried = at
                break
        full = [*self._refuse_full(ranks[:tried], 1 if spans else job.gpus)]
        if spans and left:  # the reason is the number of GPUs, not that some nodes are full
            full = [r for r in full if r.kind != "no_free_gpus"] + [*self._refuse_fleet(job.gpus)]
        return tuple(on) if left == 0 else (), (*full, *refused.values())

    def _refuse_full(self, tried: Ints, needed: int) -> Iterator[Refusal]:
        """Yield refusals of the tried nodes that are down, or have too few GPUs."""
        is_up = self.available[tried]
        is_full = is_up & (self.free[tried] < needed)
        if not np.all(is_up):
            yield self._refuse("unavailable", int(tried[np.argmin(is_up)]), 0.0, 0.0, int(np.sum(~is_up)))
        if np.any(is_full):
            i = int(tried[np.argmax(is_full)])
            yield self._refuse("no_free_gpus", i, float(self.free[i]), float(needed), int(np.sum(is_full)))

    def _refuse_fleet(self, wanted: int) -> Iterator[Refusal]:
        """Yield a refusal of all nodes together, if they have fewer GPUs than a job wants, or fewer free ones."""
        kinds: tuple[tuple[RefusalKind, int], ...] = (
            ("fleet_size", int(self.gpus.sum())),
            ("fleet_full", int(self.free[self.available].sum())),
        )
        for kind, gpus in kinds:
            if gpus < wanted:
                yield Refusal(kind=kind, count=len(self.nodes), node="", value=float(gpus), limit=float(wanted))
                return

    def _refuse(self, kind: RefusalKind, i: int, value: float, limit: float, count: int = 1) -> Refusal:
        return Refusal(kind=kind, count=count, node=self.nodes[i].name, value=value, limit=limit)

    def _judge(self, i: int, work_w: float, left_w: Floats, rack_left_w: Floats, margin_c: float) -> Refusal | None:
        added_w = self._added_w(i, work_w)
        if self.heat_w[i] + added_w > self.max_w[i]:
            return self._refuse("node_limit", i, float(self.heat_w[i] + added_w), float(self.max_w[i]))
        threshold_c = self.policy.hotspot_threshold_c
        if threshold_c is not None:
            after_c = self.temperature_c[i] + self.c_per_w[i] * added_w
            if after_c > threshold_c - margin_c:  # an unknown temperature does not count against a node
                return self._refuse("hot_spot", i, float(after_c), threshold_c - margin_c)
        at = self.aisle[i]
        if added_w > left_w[at]:
            return self._refuse(
                "aisle_budget", i, float(self.budget_w[at] - left_w[at] + added_w), float(self.budget_w[at])
            )
        at = self.rack[i]
        if added_w > rack_left_w[at]:
            value_w = float(self.limit_w[at] - rack_left_w[at] + added_w)
            return self._refuse("rack_limit", i, value_w, float(self.limit_w[at]))
        return None

    def _added_w(self, i: int, work_w: float) -> float:
        """Return how much more a node draws with work; one that sleeps is woken."""
        return work_w + (max(float(self.idle_w[i] - self.heat_w[i]), 0.0) if not self._placed[i] else 0.0)

    def _aisle_left_w(self) -> Floats:
        return np.asarray(self.budget_w - np.bincount(self.aisle, self.heat_w, minlength=len(self.budget_w)))

    def _rack_left_w(self) -> Floats:
        return np.asarray(self.limit_w - np.bincount(self.rack, self.heat_w, minlength=len(self.limit_w)))

    # -- changes ------------------------------------------------------------------------------------------------------

    def add(self, job: PlacementJob, on: Iterable[NodeShare], *, stays: bool = True) -> None:
        """Put a job on its nodes; with `stays` False, the same plan may move it again."""
        for share in on:
            i = self.index[share.node]
            added_w = self._added_w(i, share.gpus * job.power_w / job.gpus)
            self._warm(i, added_w)
            self.free[i] -= share.gpus
            shown = job if stays else PlacementJob(name=job.name, gpus=job.gpus, power_w=job.power_w)
            self._placed[i].append((shown, share))

    def remove(self, job: PlacementJob, share: NodeShare) -> None:
        """Remove a job's part from a node."""
        i = self.index[share.node]
        self._placed[i] = [(j, s) for j, s in self._placed[i] if (j.name, s) != (job.name, share)]
        self.free[i] += share.gpus
        self._warm(i, -share.gpus * job.power_w / job.gpus)

    def _warm(self, i: int, added_w: float) -> None:
        self.heat_w[i] += added_w
        self.temperature_c[i] += self.c_per_w[i] * added_w

    # -- questions ----------------------------------------------------------------------------------------------------

    def jobs_on(self, i: int) -> list[tuple[PlacementJob, NodeShare]]:
        """Return the jobs of a node with their parts of it."""
        return list(self._placed[i])

    def expected_c(self, name: str) -> float | None:
        """Return the temperature of a node with what was placed on it."""
        value = float(self.temperature_c[self.index[name]])
        return None if np.isnan(value) else value

    def hot_nodes(self) -> list[int]:
        """Return nodes above the threshold, hottest first, then those with jobs in aisles above their budget."""
        threshold_c = self.policy.hotspot_threshold_c
        heat = np.where(np.isnan(self.temperature_c), -np.inf, self.temperature_c)
        is_hot = heat > (np.inf if threshold_c is None else threshold_c)
        in_aisle = (self._aisle_left_w() < 0)[self.aisle] & np.array([bool(p) for p in self._placed], dtype=bool)
        ranks = np.lexsort((np.arange(len(heat)), -heat, ~is_hot))
        return [i for i in ranks.tolist() if is_hot[i] or in_aisle[i]]

    def over_c(self, i: int) -> float:
        """Return degrees above the threshold."""
        threshold_c = self.policy.hotspot_threshold_c
        above = float(self.temperature_c[i]) - (np.inf if threshold_c is None else threshold_c)
        return above if above > 0 else 0.0

    def over_w(self, i: int) -> float:
        """Return watts by which a node's aisle is above its cooling budget."""
        return max(-float(self._aisle_left_w()[self.aisle[i]]), 0.0)

    def excess_w(self, i: int) -> float | None:
        """Return the watts that a node must lose; None if it is hot and nobody knows how much a watt heats it."""
        threshold_c, over_w = self.policy.hotspot_threshold_c, self.over_w(i)
        too_hot_c = float(self.temperature_c[i]) - (np.inf if threshold_c is None else threshold_c - MARGIN_C)
        if not too_hot_c > 0 or (over_w > 0 and self.over_c(i) == 0):
            return over_w
        return max(too_hot_c / float(self.c_per_w[i]), over_w) if self.c_per_w[i] > 0 else None

    def node_loads(self) -> tuple[NodeLoad, ...]:
        return tuple(
            NodeLoad(
                node=n.name,
                aisle=n.aisle,
                jobs=tuple(dict.fromkeys(j.name for j, _ in self._placed[i])),
                free_gpus=int(self.free[i]),
                power_w=float(self.heat_w[i]),
                expected_c=self.expected_c(n.name),
            )
            for i, n in enumerate(self.nodes)
        )

    def aisle_loads(self) -> tuple[AisleLoad, ...]:
        heat_w = np.bincount(self.aisle, self.heat_w, minlength=len(self.budget_w))
        return tuple(
            AisleLoad(
                aisle=name,
                heat_w=float(heat_w[i]),
                budget_w=float(self.budget_w[i]) if np.isfinite(self.budget_w[i]) else None,
            )
            for i, name in enumerate(self._names)
        )

    def rack_loads(self) -> tuple[RackLoad, ...]:
        power_w = np.bincount(self.rack, self.heat_w, minlength=len(self.limit_w))
        return tuple(
            RackLoad(
                rack=name,
                power_w=float(power_w[i]),
                limit_w=float(self.limit_w[i]) if np.isfinite(self.limit_w[i]) else None,
            )
            for i, name in enumerate(self._racks)
        )
