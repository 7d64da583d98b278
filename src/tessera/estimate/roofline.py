"""How long each subgraph takes and what limits it, beside the two roofs of the chip.

Latencies are those of the kernel models (`OpModel`) under the power limit, not FLOPs over a peak: tiles and waves, the
achieved bandwidth, the cache and the launch are in them. The naive bounds are given beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..device import Device
from ..errors import ArgumentError
from ..graph.ir import Op
from ..graph.op_kinds import MATRIX_KINDS
from ..graph.partition import PartitionReport, Subgraph
from ..hardware import lookup
from .cache import CACHE_SHARE, count_traffic
from .kernel_time import KernelTime
from .ops import QUANTISED, OpModel, Precision, parse_precision, recast
from .power import DeviceWork, PowerEstimate, PowerModel

Bottleneck = Literal["compute", "memory", "overhead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubgraphCost:
    """A subgraph on a device: its kernels at the boost clock, and their sum under the power limit."""

    subgraph: Subgraph
    kernels: tuple[KernelTime, ...]
    work: DeviceWork
    power: PowerEstimate | None
    flops: float
    moved_bytes: float

    @property
    def seconds(self) -> float:
        """Seconds on the device under the power limit."""
        return self.power.seconds if self.power else self.work.seconds

    @property
    def hbm_bytes(self) -> float:
        """Bytes that cross device memory."""
        return self.work.hbm_bytes

    @property
    def relative_error(self) -> float:
        """Half-width of the 90% interval of its time, weighted by its kernels' times."""
        total = sum(k.seconds for k in self.kernels)
        return sum(k.relative_error * k.seconds for k in self.kernels) / total if total > 0 else 0.0


class CostModel:
    """Costs of subgraphs on one device, in one precision; the roofline and the energy analyzer share it."""

    def __init__(self, on: Device | str, precision: str | Precision | None = None) -> None:
        self.device = lookup(on) if isinstance(on, str) else on
        self.precision = parse_precision(precision, self.device)
        self.model = OpModel(self.device, precision=self.precision if self.precision in QUANTISED else None)
        self.power = PowerModel.from_device(self.device) if self.device.tdp_w is not None else None

    def estimate(self, subgraphs: Sequence[Subgraph], report: PartitionReport | None) -> list[SubgraphCost]:
        """The cost of each subgraph; with the report, data that earlier ones left in the cache count."""
        launches = [self._launches(s) for s in subgraphs]
        crossing: list[float | None] = [None] * sum(map(len, launches))
        if report is not None:
            flat = [op for ops in launches for op in ops]
            crossing = [*count_traffic(report.graph, flat, CACHE_SHARE * self.model.chip.cache_bytes)]
        costs, at = [], 0
        for s, ops in zip(subgraphs, launches, strict=True):
            costs.append(self._cost(s, ops, crossing[at : at + len(ops)]))
            at += len(ops)
        return costs

    def _launches(self, s: Subgraph) -> list[Op]:
        """The launches of a subgraph: each of its operators, or the one kernel they are fused into."""
        if not s.is_fused:
            return [self._recast(op) for op in s.kernels]
        return [self._recast(replace(s.main, inputs=s.reads, outputs=s.writes, index=s.ops[-1].index))]

    def _recast(self, op: Op) -> Op:
        # Quantised products are OpModel's what-if: the tensors around them are cast to 16 bits.
        return recast(op, "bf16" if self.precision in QUANTISED else self.precision)

    def _cost(self, s: Subgraph, ops: Sequence[Op], crossing: Sequence[float | None]) -> SubgraphCost:
        kernels = [self._time(s, op, hbm_bytes) for op, hbm_bytes in zip(ops, crossing, strict=True)]
        work = DeviceWork()
        for kernel in kernels:
            work = work + DeviceWork.of(kernel)
        return SubgraphCost(
            subgraph=s,
            kernels=tuple(kernels),
            work=work,
            power=self.power.estimate(work) if self.power else None,
            flops=float(s.flops),
            moved_bytes=float(sum(op.bytes_in + op.bytes_out for op in ops)),
        )

    def _time(self, s: Subgraph, op: Op, hbm_bytes: float | None) -> KernelTime:
        if not s.is_fused or op.kind not in MATRIX_KINDS:
            return self.model.time(op, hbm_bytes)
        # A product keeps its shapes and layouts; the bytes are those of everything fused with it.
        main, border = self._recast(s.main), float(op.bytes_in + op.bytes_out)
        if hbm_bytes is None and border > 1.02 * (main.bytes_in + main.bytes_out):
            hbm_bytes = border if border > self.model.chip.cache_bytes else 0.0
        return self.model.time(main, hbm_bytes)

    def utilization(self, cost: SubgraphCost, seconds: float) -> float:
        """The achieved share of the tighter roof, from 0 to 1."""
        if seconds <= 0:
            return 0.0
        bytes_s = cost.moved_bytes / self.model.chip.bandwidth
        return min(1.0, max(self.bound_s(cost), bytes_s) / seconds)

    def bound_s(self, cost: SubgraphCost) -> float:
        """FLOPs over the quoted peak of the unit that runs them."""
        total = 0.0
        for kernel in cost.kernels:
            unit, _, name = kernel.unit.partition(".")
            table = self.device.matrix if unit == "matrix" else self.device.vector
            peak = table[name].value if name in table else self.model.chip.peak(name)[0]
            total += kernel.flops / peak if kernel.flops and cost.flops else 0.0
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyDescriptor:
    """A subgraph under the roofline, in seconds.

    `actual_latency` is its predicted time, `error_s` the 90% half-width; `compute_s`, `memory_s` and `overhead_s` are
    the parts of the kernel model (they overlap: their sum is more). `compute_bound_s` and `memory_bound_s` are the
    naive roofs, FLOPs over the peak and all bytes over the bandwidth; with its bytes in the cache a subgraph may be
    faster than the second. `clock` is relative to boost, below 1 where the power limit holds it down.

    `roof` is the longer of the two naive bounds: the side of the ridge point. `bottleneck` is the longest part of the
    kernel model. They may differ, as a kernel may do more than its FLOPs and its bytes; `reason` says why.
    """

    subgraph_name: str
    actual_latency: float
    compute_s: float
    memory_s: float
    overhead_s: float
    bottleneck: Bottleneck
    compute_bound_s: float
    memory_bound_s: float
    arithmetic_intensity: float
    attained_flops: float
    attained_bandwidth: float
    utilization: float
    error_s: float
    clock: float = 1.0
    unit: str = ""

    @property
    def roof(self) -> Literal["compute", "memory"]:
        """Its roof: memory below the ridge point of its unit, compute above."""
        return "compute" if self.compute_bound_s > self.memory_bound_s else "memory"

    @property
    def reason(self) -> str:
        """Why its bottleneck limits it, in words."""
        if self.bottleneck == "overhead":
            return "too little work to fill the chip"
        if self.bottleneck == "memory":
            if self.memory_s < self.memory_bound_s:
                return "its bytes, partly from the cache"
            return _over(self.memory_s, self.memory_bound_s, "its bytes", "other layouts, a lower rate")
        if not self.compute_bound_s:
            return "instructions for each element, no FLOPs"
        return _over(self.compute_s, self.compute_bound_s, "its FLOPs", "tiles, waves, padding")


def _over(part_s: float, naive_s: float, what: str, because: str) -> str:
    """A part of the kernel model against its naive bound; the best kernels take up to 1.5 times the bound."""
    if not naive_s or part_s < 1.5 * naive_s:
        return what
    return f"{part_s / naive_s:.1f} times {what} ({because})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineReport:
    """The subgraphs of a program under the roofs of a chip.

    `ceilings` are FLOP/s by unit and precision ("matrix.bf16"), `ridge_points` the FLOPs per byte above which each of
    them, and below which the memory, is the limit.
    """

    on: str
    precision: str | None
    latencies: tuple[LatencyDescriptor, ...]
    bandwidth_bytes_per_s: float
    ceilings: Mapping[str, float]
    ridge_points: Mapping[str, float]

    @property
    def total_latency_s(self) -> float:
        """Seconds of all subgraphs one after another, on the device alone."""
        return sum(d.actual_latency for d in self.latencies)

    @property
    def time_by_bottleneck(self) -> dict[str, float]:
        """Seconds spent under each ceiling."""
        spent: dict[str, float] = {"compute": 0.0, "memory": 0.0, "overhead": 0.0}
        for d in self.latencies:
            spent[d.bottleneck] += d.actual_latency
        return spent

    @property
    def critical_ceiling(self) -> str:
        """The ceiling most of the time is spent under."""
        spent = self.time_by_bottleneck
        return max(spent, key=spent.__getitem__)

    @property
    def average_utilization(self) -> float:
        """The mean share of the tighter roof, weighted by time."""
        total = self.total_latency_s
        return sum(d.utilization * d.actual_latency for d in self.latencies) / total if total > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RooflineAnalyzer:
    """Latency and bottleneck of subgraphs on a chip (a `Device` or a name of the catalogue)."""

    on: Device | str
    precision: str | Precision | None = None

    def __post_init__(self) -> None:
        check_chip(self.on, self.precision)

    def analyze(self, subgraphs: Sequence[Subgraph], report: PartitionReport | None = None) -> RooflineReport:
        """One descriptor per subgraph; with the `report`, reuse in the cache between subgraphs counts."""
        check_subgraphs(subgraphs)
        costs = CostModel(self.on, self.precision)
        device, bandwidth = costs.device, costs.model.chip.bandwidth
        tables = {"matrix": device.matrix, "vector": device.vector}
        ceilings = {f"{unit}.{name}": peak.value for unit, table in tables.items() for name, peak in table.items()}
        return RooflineReport(
            on=device.id,
            precision=costs.precision,
            latencies=tuple(_descriptor(costs, cost) for cost in costs.estimate(subgraphs, report)),
            bandwidth_bytes_per_s=bandwidth,
            ceilings=ceilings,
            ridge_points={name: peak / bandwidth for name, peak in ceilings.items()},
        )


def check_chip(on: Device | str, precision: str | Precision | None) -> None:
    """Refuse a chip that is not in the catalogue, and a precision that it lacks, before anything is analysed."""
    parse_precision(precision, lookup(on) if isinstance(on, str) else on)


def check_subgraphs(subgraphs: Any) -> None:
    """Refuse anything but a list of subgraphs, and say how to get one."""
    if isinstance(subgraphs, PartitionReport) or not all(isinstance(s, Subgraph) for s in subgraphs):
        raise ArgumentError(
            f"expected subgraphs, got {type(subgraphs).__name__}",
            fix="report = GraphPartitioner().partition(graph); analyze(report.subgraphs, report)",
        )


def _descriptor(costs: CostModel, cost: SubgraphCost) -> LatencyDescriptor:
    kernels, seconds = cost.kernels, cost.seconds
    clock = cost.power.clock if cost.power else 1.0
    parts: dict[Bottleneck, float] = {
        "compute": sum(k.compute_s for k in kernels) / clock,
        "memory": sum(k.memory_s for k in kernels),
        "overhead": sum(k.overhead_s for k in kernels),
    }
    return LatencyDescriptor(
        subgraph_name=cost.subgraph.name,
        actual_latency=seconds,
        compute_s=min(seconds, parts["compute"]),
        memory_s=min(seconds, parts["memory"]),
        overhead_s=min(seconds, parts["overhead"]),
        bottleneck=max(parts, key=parts.__getitem__),
        compute_bound_s=costs.bound_s(cost),
        memory_bound_s=cost.moved_bytes / costs.model.chip.bandwidth,
        arithmetic_intensity=cost.flops / cost.moved_bytes if cost.moved_bytes else 0.0,
        attained_flops=cost.flops / seconds if seconds > 0 else 0.0,
        attained_bandwidth=cost.moved_bytes / seconds if seconds > 0 else 0.0,
        utilization=costs.utilization(cost, seconds),
        error_s=cost.relative_error * seconds,
        clock=clock,
        unit=max(kernels, key=lambda k: k.seconds).unit if kernels else "",
    )
