"""Accounts for the joules of a whole run: attributed if something was traced, else by the power samples alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ..errors import MeasurementError
from ..joules import sum_windows
from ..notes import Note
from ..timeline.columns import APART, NONE, Timeline
from ..timeline.distinct import rank_values
from ..timeline.intervals import union
from ..trace import PowerTrace
from .between_edges import narrow_errors
from .ledger import WHOLE
from .solve import attribute
from .table import EnergyRow, EnergyTable, note_overlaps

MOST_PASSES = 20_000
"""Most passes through regions that are integrated one by one; of a run with more, the first ones count."""
_NO_POWER = 'no power was recorded, so there are no joules: activities=["gpu", "power"]; see `tessera doctor`'


def account_run(
    timeline: Timeline, power: PowerTrace, windows: Sequence[tuple[int, int]], threads: int | None = None
) -> EnergyTable:
    """Return the table of a run over the windows that were traced, or of its samples alone if nothing was.

    `threads` is the number of threads that run the program's operators on a CPU.
    """
    if not is_traced(timeline, power):
        return account_samples(timeline, power)
    try:
        table = attribute(timeline, power, windows=windows, threads=threads)
    except MeasurementError as exc:  # for example power of another time than the trace: the sum is still known
        return account_samples(timeline, power, notes=[f"{exc.what}: {exc.why}" if exc.why else exc.what])
    table = narrow_errors(table, timeline, power, windows, threads)
    return _join_ranks(_drop_partial_steps(table, timeline), timeline)


def account_trace(timeline: Timeline, power: PowerTrace) -> EnergyTable:
    """The table of a trace that another tool recorded, of one rank or several."""
    return _join_ranks(attribute(timeline, power), timeline)


def _join_ranks(table: EnergyTable, timeline: Timeline) -> EnergyTable:
    """One row for a step of all ranks: they take it together."""
    if len(rank_values(timeline["rank"])[0]) < 2:
        return table
    is_modelled = table.basis == "modelled"
    by_name: dict[str, list[EnergyRow]] = {}
    for row in table.steps:
        by_name.setdefault(row.name, []).append(row)
    steps = [
        dataclasses.replace(
            rows[0],
            time_s=sum(r.time_s for r in rows),
            energy_j=sum(r.energy_j for r in rows),
            # The errors of one model's watts are the same on all ranks; those of boards are independent.
            error_j=sum(r.error_j for r in rows) if is_modelled else math.hypot(*(r.error_j for r in rows)),
            share=sum(r.share for r in rows),
            # The longest of each would overlap with the longest of the next, where the ranks are late in turns.
            wall_s=None if any(r.wall_s is None for r in rows) else sum(r.wall_s or 0.0 for r in rows) / len(rows),
            idle_s=sum(r.idle_s or 0.0 for r in rows),
            devices=sum(r.devices for r in rows),
        )
        for rows in by_name.values()
    ]
    return dataclasses.replace(table, steps=steps)


def is_traced(timeline: Timeline, power: PowerTrace) -> bool:
    """Return whether anything ran that can get joules; otherwise a run would be idle from end to end.

    Operators of the host get joules of the host, but never those of a board on which nothing ran.
    """
    on_host = any(not d.device.is_gpu for d in power.domains)
    return bool(len(timeline.device_rows) or (on_host and len(timeline.rows("op"))))


def _drop_partial_steps(table: EnergyTable, timeline: Timeline) -> EnergyTable:
    """Leave out the steps in which tracing began or ended, since only part of them was accounted for."""
    took_s: dict[str, float] = {}
    for s in timeline.linked.steps:
        took_s[s.name] = min(took_s.get(s.name, math.inf), (s.end_ns - s.start_ns) * 1e-9)
    whole = [r.wall_s is None or r.wall_s >= WHOLE * took_s.get(r.name, 0.0) for r in table.steps]
    if not any(whole) or all(whole):
        return table
    complete = [r for r, is_whole in zip(table.steps, whole, strict=True) if is_whole]
    partial = [r.name for r, is_whole in zip(table.steps, whole, strict=True) if not is_whole]
    names = f"{', '.join(partial[:3])}{' ...' if len(partial) > 3 else ''}"
    note = Note(f"traced only in part, so not among the steps: {names}", "omission")
    return dataclasses.replace(table, steps=complete, notes=[*table.notes, note])


def account_samples(
    timeline: Timeline, power: PowerTrace | None, *, notes: Sequence[str] = (), seconds: float = 0.0
) -> EnergyTable:
    """Return a table without kernels and operators: total, regions and steps. Joules are NaN without power."""
    if power is None:
        return EnergyTable(
            energy_j=math.nan,
            error_j=math.nan,
            idle_j=math.nan,
            idle_error_j=math.nan,
            kernels=(),
            time_s=seconds,
            busy_s=0.0,
            coverage=0.0,
            notes=[*notes, _NO_POWER],
        )
    total = power.energy()
    steps = [(s.name, s.start_ns, s.end_ns) for s in timeline.linked.steps[:MOST_PASSES]]
    step_rows = {s.row for s in timeline.linked.steps}
    passes = [
        (timeline.name(r), int(timeline["start_ns"][r]), int(timeline["end_ns"][r]))
        for r in timeline.rows("region")[:MOST_PASSES].tolist()
        if r not in step_rows and not _is_nested(timeline, r)
    ]
    all_steps = [row for step in steps for row in _sum_passes(power, [step], "step", total.energy_j)]
    regions = [r for r in _sum_passes(power, passes, "region", total.energy_j) if not math.isnan(r.energy_j)]
    rows = [row for row in all_steps if not math.isnan(row.energy_j)]
    if len(rows) < len(all_steps):
        missing = len(all_steps) - len(rows)
        notes = [*notes, f"{missing} of {len(all_steps)} steps have no power sample, and no joules here"]
    return EnergyTable(
        energy_j=total.energy_j,
        error_j=total.error_j,
        idle_j=math.nan,
        idle_error_j=math.nan,
        time_s=total.time_s,
        busy_s=0.0,
        kernels=(),
        source=total.source,
        basis=total.basis,
        coverage=total.coverage,
        notes=[*notes, *note_overlaps(regions)],
        steps=rows,
        regions=regions,
    )


def _is_nested(timeline: Timeline, row: int) -> bool:
    """Return whether a region lies within another of its name, which already includes its joules."""
    if timeline["value"][row] == APART:
        return False
    parent, names = timeline.linked.parent, timeline["name"]
    above = int(parent[row])
    while above != NONE and names[above] != names[row]:
        above = int(parent[above])
    return above != NONE


def _sum_passes(
    power: PowerTrace, passes: Sequence[tuple[str, int, int]], kind: str, total_j: float
) -> list[EnergyRow]:
    """Return one row for all passes of each name. A moment that lies in several passes counts once."""
    by_name: dict[str, list[tuple[int, int]]] = {}
    for name, start_ns, end_ns in passes:
        by_name.setdefault(name, []).append((start_ns, end_ns))
    rows = []
    for name, windows in by_name.items():
        covered = union(*np.array(windows, np.int64).T)
        stretches = list(zip(*(edges.tolist() for edges in covered), strict=True)) or windows[:1]
        energy = sum_windows([power.energy(None, begin, end) for begin, end in stretches])
        rows.append(
            EnergyRow(
                name=name,
                kind=kind,
                calls=len(windows),
                time_s=energy.time_s,
                energy_j=energy.energy_j,
                error_j=energy.error_j,
                share=energy.energy_j / total_j if total_j > 0 else 0.0,
                wall_s=energy.time_s,
                overlaps=covered.total_ns < sum(end - start for start, end in windows),
            )
        )
    return rows
