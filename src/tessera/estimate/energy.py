"""Joules of each subgraph, by component, from the seconds and bytes of its kernels and the chip's power model.

`wasted_energy_j` is defined once, here: the static energy of a subgraph times (1 - its utilisation), summed.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..device import Device
from ..errors import ArgumentError
from ..graph.partition import PartitionReport, Subgraph
from ..schema import Domain, Energy, EnergyDescriptor, EnergyReport, Prediction
from .iteration import highest_mean_w
from .ops import Precision
from .power import PowerEstimate, PowerModel
from .roofline import CostModel, SubgraphCost, check_chip, check_subgraphs


@dataclass(frozen=True, slots=True)
class EnergyAnalyzer:
    """Energy of subgraphs on a chip (a `Device` or a name of the catalogue); precision None keeps theirs."""

    on: Device | str
    precision: str | Precision | None = None

    def __post_init__(self) -> None:
        check_chip(self.on, self.precision)

    def analyze(
        self,
        subgraphs: Sequence[Subgraph],
        report: PartitionReport | None = None,
        latencies: Sequence[float] | None = None,
    ) -> EnergyReport:
        """One descriptor per subgraph. `latencies` (seconds) replace the predicted time on the device.

        A latency that would need more watts than the limit allows is stretched: no board sustains that.
        """
        check_subgraphs(subgraphs)
        model = CostModel(self.on, self.precision)
        power = model.power or PowerModel.from_device(model.device)  # which says what is missing
        times = _check_latencies(latencies, len(subgraphs))
        costs = model.estimate(subgraphs, report)
        pairs = [(cost, _estimate(power, cost, seconds)) for cost, seconds in zip(costs, times, strict=True)]
        descriptors = [_descriptor(model, cost, e, times[i] is not None) for i, (cost, e) in enumerate(pairs)]
        made = _report(model, power, descriptors, pairs, report)
        again = functools.partial(_analyze_again, self, subgraphs, report, times)
        return replace(made, prediction=None if made.prediction is None else replace(made.prediction, again=again))


def _analyze_again(
    analyzer: EnergyAnalyzer,
    subgraphs: Sequence[Subgraph],
    report: PartitionReport | None,
    times: Sequence[float | None],
    *,
    on: Device | str | None = None,
    precision: str | None = None,
    **others: object,
) -> EnergyReport:
    """The same subgraphs on another chip or in another precision; given latencies change as the predicted ones do."""
    if others:
        raise ArgumentError(
            f"subgraphs are analysed without {', '.join(others)}", fix="tessera.predict(model, inputs) has such options"
        )
    changed = EnergyAnalyzer(on or analyzer.on, precision or analyzer.precision)
    found = changed.analyze(subgraphs, report)
    if None in times:
        return found
    own = analyzer.analyze(subgraphs, report)
    pairs = zip(times, found.descriptors, own.descriptors, strict=True)
    scaled = [(t or 0.0) * (new.latency_s / old.latency_s if old.latency_s > 0 else 1.0) for t, new, old in pairs]
    return changed.analyze(subgraphs, report, scaled)


def _check_latencies(latencies: Sequence[float] | None, count: int) -> Sequence[float | None]:
    if latencies is None:
        return [None] * count
    seconds = [float(getattr(x, "actual_latency", x)) for x in latencies]
    if len(seconds) != count:
        raise ArgumentError(f"{len(seconds)} latencies for {count} subgraphs", fix="give one for each, in seconds")
    if not all(math.isfinite(x) and x >= 0 for x in seconds):
        raise ArgumentError("a latency must be a number of seconds, not negative", why=f"got {min(seconds)}")
    return seconds


def _estimate(model: PowerModel, cost: SubgraphCost, given_s: float | None) -> PowerEstimate:
    """Joules at the predicted time, or at a given one: a longer time waits, a shorter one runs the same work faster."""
    own = cost.power or model.estimate(cost.work)
    if given_s is None:
        return own
    if given_s >= own.seconds:
        waits_j = model.static_w * (given_s - own.seconds)
        return replace(own, seconds=given_s, static_j=own.static_j + waits_j)
    share = given_s / own.seconds if own.seconds > 0 else 0.0
    work = cost.work
    faster = {name: getattr(work, name) * share for name in ("clock_s", "fixed_s", "busy_s")}
    return model.estimate(replace(work, **faster))


def _descriptor(costs: CostModel, cost: SubgraphCost, energy: PowerEstimate, time_given: bool) -> EnergyDescriptor:
    time_error = 0.0 if time_given else cost.relative_error
    total = energy.static_j + energy.compute_j + energy.memory_j
    return EnergyDescriptor(
        subgraph_name=cost.subgraph.name,
        compute_energy_j=energy.compute_j,
        memory_energy_j=energy.memory_j,
        static_energy_j=energy.static_j,
        latency_s=energy.seconds,
        error_j=math.hypot(total * energy.relative_error, _with_time_j(energy) * time_error),
        device_s=energy.seconds,
        error_s=energy.seconds * time_error,
        utilization=costs.utilization(cost, energy.seconds),
        kind=cost.subgraph.kind,
        flops=cost.flops,
        hbm_bytes=cost.hbm_bytes,
        provenance=cost.kernels[0].provenance if cost.kernels else "",
    )


def _with_time_j(energy: PowerEstimate) -> float:
    """Joules that grow in proportion to the time: the static ones, and about half of the busy units'."""
    return energy.static_j + 0.5 * energy.compute_j


def _report(
    costs: CostModel,
    power: PowerModel,
    descriptors: Sequence[EnergyDescriptor],
    pairs: Sequence[tuple[SubgraphCost, PowerEstimate]],
    report: PartitionReport | None,
) -> EnergyReport:
    seconds = math.fsum(d.latency_s for d in descriptors)
    joules = math.fsum(
        math.fsum(getattr(d, part) for d in descriptors)
        for part in ("compute_energy_j", "memory_energy_j", "static_energy_j")
    )
    device = costs.device
    source = f"predicted for {device.id}"
    error_j = math.hypot(power.relative_error * joules, _error_of_sum(descriptors, [_with_time_j(e) for _, e in pairs]))
    total = Energy(energy_j=joules, error_j=error_j, time_s=seconds, source=source, basis="predicted")
    domain = Domain(name=device.id, source=source, resolution_s=0.0, basis="predicted", gain_error=power.relative_error)
    # Each subgraph alone stays within the limit, and so does any window over several.
    peak_w = highest_mean_w([d.latency_s for d in descriptors], [d.total_energy_j for d in descriptors])
    return EnergyReport(
        name=report.graph.name if report else "subgraphs",
        total=total,
        by_domain={device.id: total},
        domains=(domain,),
        peak_w=peak_w,
        idle_w=device.idle_w.value if device.idle_w else None,
        descriptors=tuple(descriptors),
        prediction=_prediction(costs, power, descriptors, pairs, report),
    )


def _error_of_sum(descriptors: Sequence[EnergyDescriptor], values: Sequence[float]) -> float:
    """The error of a sum: parts of one kind of kernel have correlated errors, different kinds independent ones."""
    by_kind: defaultdict[str, float] = defaultdict(float)
    for d, value in zip(descriptors, values, strict=True):
        by_kind[d.kind] += value * d.error_s / d.latency_s if d.latency_s > 0 else 0.0
    return math.hypot(*by_kind.values()) if by_kind else 0.0


def _prediction(
    costs: CostModel,
    power: PowerModel,
    descriptors: Sequence[EnergyDescriptor],
    pairs: Sequence[tuple[SubgraphCost, PowerEstimate]],
    report: PartitionReport | None,
) -> Prediction:
    device, seconds = costs.device, math.fsum(d.latency_s for d in descriptors)
    parts = {
        "compute": sum(k.compute_s for cost, _ in pairs for k in cost.kernels),
        "memory": sum(k.memory_s for cost, _ in pairs for k in cost.kernels),
        "overhead": sum(k.overhead_s for cost, _ in pairs for k in cost.kernels),
    }
    slowed = sum(e.seconds * e.clock for _, e in pairs)
    used = math.fsum(d.utilization * d.latency_s for d in descriptors)
    idle = "not known" if device.idle_w is None else "assumed" if device.idle_w.assumed else "datasheet"
    return Prediction(
        device=device.id,
        precision=costs.precision,
        mode=report.graph.mode if report else "infer",
        launch="graph",
        batch=report.graph.samples if report else None,
        error_s=_error_of_sum(descriptors, [d.latency_s for d in descriptors]),
        device_s=seconds,
        host_s=0.0,
        clock=slowed / seconds if seconds > 0 else 1.0,
        bound=max(parts, key=parts.__getitem__),
        average_utilization=min(1.0, used / seconds) if seconds > 0 else 0.0,
        wasted_energy_j=math.fsum(d.static_energy_j * (1.0 - d.utilization) for d in descriptors),
        flops=math.fsum(d.flops for d in descriptors),
        hbm_bytes=math.fsum(d.hbm_bytes for d in descriptors),
        provenance={"power": power.provenance, "idle": idle, "time": descriptors[0].provenance if descriptors else ""},
        assumptions=report.graph.assumptions if report else (),
    )
