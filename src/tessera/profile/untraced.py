"""The joules of a run of which nothing was traced: the whole, and its regions and steps, straight from the samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from ..attribute.table import EnergyRow, EnergyTable
from ..errors import MeasurementError
from ..joules import sum_windows
from ..schema import Energy
from ..timeline.columns import Timeline
from ..trace import PowerTrace
from .energy import energy
from .runfile import RunFile

WHOLE = 0.98
"""A step of which this much was traced is whole."""
PASSES = 20_000
"""Passes through regions that are integrated one by one; of a run with more, the first ones."""


def table_of(run: RunFile, timeline: Timeline) -> EnergyTable:
    """The table of any run: attributed where something was traced, else what the samples alone know."""
    if not traced(timeline, run.domains) or not run.domains:
        return untraced(run, timeline)
    try:
        return _whole_steps(energy(run, timeline), timeline)
    except MeasurementError as exc:  # power of another time than the trace: the sum is still known
        return untraced(run, timeline, [exc.what])


def _whole_steps(table: EnergyTable, timeline: Timeline) -> EnergyTable:
    """Without the steps in which tracing began or ended: less of them was accounted for than they took."""
    took_s: dict[str, float] = {}
    for s in timeline.linked.steps:
        took_s[s.name] = min(took_s.get(s.name, math.inf), (s.end_ns - s.start_ns) * 1e-9)
    whole = [r.wall_s is None or r.wall_s >= WHOLE * took_s.get(r.name, 0.0) for r in table.steps]
    if not any(whole) or all(whole):
        return table
    kept = [r for r, is_whole in zip(table.steps, whole, strict=True) if is_whole]
    cut = [r.name for r, is_whole in zip(table.steps, whole, strict=True) if not is_whole]
    note = f"traced in part, and left out of the steps: {', '.join(cut[:3])}{' ...' if len(cut) > 3 else ''}"
    return dataclasses.replace(table, steps=kept, notes=[*table.notes, note])


def traced(timeline: Timeline, domains: Iterable[str]) -> bool:
    """Whether anything is there that joules can be given to; else a run would be idle from end to end.

    Operators of the host get joules of the host, never those of a board on which nothing ran.
    """
    on_host = any(not d.startswith("gpu") for d in domains)
    return bool(len(timeline.device_rows) or (on_host and len(timeline.rows("op"))))


def untraced(run: RunFile, timeline: Timeline, notes: Sequence[str] = ()) -> EnergyTable:
    """Without kernels and operators. Joules are NaN where no power was recorded."""
    power = run.power()
    if not power.columns:
        said = 'no power was recorded, so there are no joules: activities=["gpu", "power"]; see `tessera doctor`'
        start_ns, end_ns = run.span_ns
        return EnergyTable(
            total_j=math.nan, total_error_j=math.nan, idle_j=math.nan, idle_error_j=math.nan, kernels=(),
            seconds=(end_ns - start_ns) * 1e-9, busy_s=0.0, coverage=0.0, notes=[*notes, said],
        )  # fmt: skip
    total = power.energy()
    steps = [(s.name, s.start_ns, s.end_ns) for s in timeline.linked.steps[:PASSES]]
    named = {s.row for s in timeline.linked.steps}
    regions = [
        (timeline.name(r), int(timeline["start_ns"][r]), int(timeline["end_ns"][r]))
        for r in timeline.rows("region")[:PASSES].tolist()
        if r not in named
    ]
    passed = [row for step in steps for row in _rows(power, [step], "step", total.joules)]
    rows = [row for row in passed if not math.isnan(row.energy_j)]
    told = list(notes)
    if len(rows) < len(passed):
        told.append(f"{len(passed) - len(rows)} of {len(passed)} steps have no power sample, and no joules here")
    return EnergyTable(
        total_j=total.joules, total_error_j=total.error_j, idle_j=math.nan, idle_error_j=math.nan,
        seconds=total.seconds, busy_s=0.0, kernels=(), source=total.source, basis=total.basis,
        coverage=total.coverage, notes=told, steps=rows,
        regions=[r for r in _rows(power, regions, "region", total.joules) if not math.isnan(r.energy_j)],
    )  # fmt: skip


def _rows(power: PowerTrace, passes: Sequence[tuple[str, int, int]], kind: str, total_j: float) -> list[EnergyRow]:
    """Passes of one name together."""
    by_name: dict[str, list[Energy]] = {}
    for name, start_ns, end_ns in passes:
        by_name.setdefault(name, []).append(power.energy(None, start_ns, end_ns))
    out = []
    for name, parts in by_name.items():
        spent = sum_windows(parts)
        out.append(
            EnergyRow(
                name=name, kind=kind, calls=len(parts), time_s=spent.seconds, energy_j=spent.joules,
                energy_error_j=spent.error_j, share=spent.joules / total_j if total_j > 0 else 0.0,
                wall_s=spent.seconds,
            )
        )  # fmt: skip
    return out
