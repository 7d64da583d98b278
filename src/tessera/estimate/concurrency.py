"""What can run at the same time: subgraphs that do not wait for each other, and tiles within each.

Three levels: stages (the longest chain of dependencies, each stage after the one before), operators (how many
subgraphs a stage holds), tiles (how many blocks a subgraph gives the chip's units, and in how many waves they run).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..device import Device
from ..graph.partition import PartitionReport, Subgraph
from ..hardware import lookup
from .kernel_time import chip
from .roofline import RooflineAnalyzer


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelStage:
    """Subgraphs (by index) that depend only on earlier stages; their cost in total, and that of the most expensive."""

    index: int
    subgraphs: tuple[int, ...]
    cost: float
    longest: float

    @property
    def width(self) -> int:
        """How many subgraphs could run at once."""
        return len(self.subgraphs)

    @property
    def speedup(self) -> float:
        """How much faster the stage would be if all of it ran at once and shared nothing."""
        return self.cost / self.longest if self.longest > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TileParallelism:
    """Blocks of a subgraph against the units of the chip; `occupancy` is the mean share of units with work."""

    subgraph_name: str
    tiles: int
    units: int | None
    waves: int | None
    occupancy: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyReport:
    """Parallelism of a program. Costs are seconds on a chip, without a chip FLOPs (`cost_unit`)."""

    name: str
    on: str | None
    cost_unit: str
    stages: tuple[ParallelStage, ...]
    tiles: tuple[TileParallelism, ...]
    critical_path: tuple[int, ...]
    critical_path_names: tuple[str, ...]
    critical_path_cost: float
    total_cost: float

    @property
    def max_width(self) -> int:
        """The most subgraphs in one stage."""
        return max((s.width for s in self.stages), default=0)

    @property
    def mean_width(self) -> float:
        """Subgraphs per stage."""
        return sum(s.width for s in self.stages) / len(self.stages) if self.stages else 0.0

    @property
    def speedup_bound(self) -> float:
        """Total cost over that of the critical path: no schedule of whole subgraphs is faster."""
        return self.total_cost / self.critical_path_cost if self.critical_path_cost > 0 else 1.0

    @property
    def mean_occupancy(self) -> float | None:
        """The mean share of units with work over the subgraphs; None without a chip."""
        shares = [t.occupancy for t in self.tiles if t.occupancy is not None]
        return sum(shares) / len(shares) if shares else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        derived = ("max_width", "mean_width", "speedup_bound", "mean_occupancy")
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {**plain, **{key: getattr(self, key) for key in derived}}


@dataclass(frozen=True, slots=True)
class ConcurrencyAnalyzer:
    """Finds what could run at the same time; with `on` (a `Device` or a name of the catalogue) costs are seconds."""

    on: Device | str | None = None

    def analyze(self, report: PartitionReport) -> ConcurrencyReport:
        """Stages, widths, tiles and the critical path of a partitioned program."""
        device = lookup(self.on) if isinstance(self.on, str) else self.on
        costs = _costs(report, device)
        level = _levels(report.subgraphs)
        path, longest = _critical(report.subgraphs, costs)
        units = chip(device).units if device else None
        return ConcurrencyReport(
            name=report.graph.name,
            on=device.id if device else None,
            cost_unit="s" if device else "FLOP",
            stages=tuple(_stages(level, costs)),
            tiles=tuple(_tiles(s, units) for s in report.subgraphs),
            critical_path=tuple(path),
            critical_path_names=tuple(report.subgraphs[i].name for i in path),
            critical_path_cost=longest,
            total_cost=math.fsum(costs),
        )


def _costs(report: PartitionReport, device: Device | None) -> list[float]:
    if device is None:
        return [float(s.flops) for s in report.subgraphs]
    return [d.actual_latency for d in RooflineAnalyzer(device).analyze(report.subgraphs, report).latencies]


def _levels(subgraphs: Sequence[Subgraph]) -> list[int]:
    """The stage of each subgraph: one after the last stage it depends on. Subgraphs come after their dependencies."""
    level: list[int] = []
    for s in subgraphs:
        level.append(1 + max((level[d] for d in s.depends_on), default=-1))
    return level


def _stages(level: Sequence[int], costs: Sequence[float]) -> list[ParallelStage]:
    members: dict[int, list[int]] = {}
    for i, stage in enumerate(level):
        members.setdefault(stage, []).append(i)
    return [
        ParallelStage(
            index=stage,
            subgraphs=tuple(members[stage]),
            cost=math.fsum(costs[i] for i in members[stage]),
            longest=max(costs[i] for i in members[stage]),
        )
        for stage in sorted(members)
    ]


def _critical(subgraphs: Sequence[Subgraph], costs: Sequence[float]) -> tuple[list[int], float]:
    """The most expensive chain of dependencies, and its cost."""
    total: list[float] = []
    before: list[int | None] = []
    for i, s in enumerate(subgraphs):
        last = max(s.depends_on, key=total.__getitem__, default=None)
        before.append(last)
        total.append(costs[i] + (total[last] if last is not None else 0.0))
    if not total:
        return [], 0.0
    at: int | None = max(range(len(total)), key=total.__getitem__)
    longest = total[at] if at is not None else 0.0
    path: list[int] = []
    while at is not None:
        path.append(at)
        at = before[at]
    return path[::-1], longest


def _tiles(s: Subgraph, units: int | None) -> TileParallelism:
    waves = None if units is None else -(-s.tiles // units)
    occupancy = None if units is None or waves is None else s.tiles / (waves * units)
    return TileParallelism(subgraph_name=s.name, tiles=s.tiles, units=units, waves=waves, occupancy=occupancy)
