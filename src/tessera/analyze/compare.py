"""Two reports side by side: a prediction and a run, two chips, before and after."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..schema import DiffRow, EnergyDiff, EnergyReport


def compare(before: EnergyReport, after: EnergyReport) -> EnergyDiff:
    """What changes in joules and seconds: in all, by component and by subgraph, and whether it is more than noise."""
    error = math.hypot(before.total.error_j, after.total.error_j)
    total = _row("total", before.total.joules, after.total.joules, before.total.seconds, after.total.seconds, error)
    components = []
    for name in ("compute", "memory", "static"):
        a, b = getattr(before, f"{name}_energy_j"), getattr(after, f"{name}_energy_j")
        if a is not None and b is not None:
            share = (a + b) / max(before.total.joules + after.total.joules, 1e-30)
            components.append(_row(name, a, b, 0.0, 0.0, error * math.sqrt(max(share, 0.0))))
    return EnergyDiff(
        before=_title(before),
        after=_title(after),
        total=total,
        components=tuple(components),
        subgraphs=tuple(_subgraphs(before, after)),
        note="" if components else "one of the two is a measurement of the whole: components cannot be compared",
    )


def _title(report: EnergyReport) -> str:
    return f"{report.name} on {report.prediction.device}" if report.prediction else report.name


def _row(name: str, before_j: float, after_j: float, before_s: float, after_s: float, error_j: float) -> DiffRow:
    return DiffRow(
        name=name, before_j=before_j, after_j=after_j, before_s=before_s, after_s=after_s, error_j=error_j,
        significant=abs(after_j - before_j) > error_j,
    )  # fmt: skip


def _subgraphs(before: EnergyReport, after: EnergyReport) -> list[DiffRow]:
    """By name, those that changed most first; regions stand in where a report was measured."""
    old, new = _by_name(before), _by_name(after)
    rows = []
    for name in dict.fromkeys((*old, *new)):
        a, b = old.get(name, (0.0, 0.0, 0.0)), new.get(name, (0.0, 0.0, 0.0))
        rows.append(_row(name, a[0], b[0], a[1], b[1], math.hypot(a[2], b[2])))
    key: Callable[[DiffRow], float] = lambda row: -abs(row.change_j)  # noqa: E731
    return sorted(rows, key=key)


def _by_name(report: EnergyReport) -> dict[str, tuple[float, float, float]]:
    found: dict[str, tuple[float, float, float]] = {}
    for d in report.descriptors:
        j, s, e = found.get(d.subgraph_name, (0.0, 0.0, 0.0))
        found[d.subgraph_name] = (j + d.total_energy_j, s + d.latency_s, math.hypot(e, d.error_j))
    for r in report.regions:
        found[r.name] = (r.energy.joules, r.energy.seconds, r.energy.error_j)
    return found
