"""Writes a run as a small CSV table: a line per kernel, copy, collective, call, operator, region, module and step."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...output import escape_formula, replace_when_written
from ...record import CODE, KINDS, ON_DEVICE

if TYPE_CHECKING:
    from ...attribute.table import EnergyRow, EnergyTable
    from ...recording import Recording, Rows

_VIEW = {**dict.fromkeys(ON_DEVICE, "kernels"), "op": "ops", "region": "regions"}
_KEPT = [CODE[k] for k in KINDS if k not in ("mark", "counter")]


class SummaryLine(NamedTuple):
    """One line of the summary, and the columns of the file. None (an empty cell) means that the value is not known."""

    name: str
    kind: str
    calls: int
    total_s: float | None
    active_s: float | None = None
    mean_us: float | None = None
    min_us: float | None = None
    max_us: float | None = None
    share_time_pct: float | None = None
    energy_j: float | None = None
    energy_error_j: float | None = None
    power_w: float | None = None
    j_per_call: float | None = None


@dataclass(frozen=True, slots=True)
class SummaryCsv:
    """`profile.summary("summary.csv")`.

    `share_time_pct` is a share of all device time for rows on a device; of the traced time for runtime calls,
    operators, modules, steps and idle (as in `analyze`); and of the run's wall time for regions, which are recorded all
    the time (nested and parallel regions overlap). Python frames ("python") contain one another and the operators, so
    they have no share. `total_s` of a module or step is wall time if attribution knows it, else time on the device.
    `active_s` is the time in which the joules were spent (an operator's self time, or its kernels'), and `power_w` is
    the mean over that time. Steps are listed once, as steps. The joules of kernels, copies, collectives and idle (for a
    host alone: of operators and "between operators") sum to the joules of the run.
    """

    path: str | Path

    def write(self, recording: Recording) -> Path:
        target = Path(self.path)
        with replace_when_written(target, make_folder=True) as part, part.open("w", newline="", encoding="utf-8") as f:
            out = csv.writer(f)
            out.writerow(SummaryLine._fields)
            out.writerows(map(_format_cell, line) for line in lines(recording))
        return target


def lines(recording: Recording) -> Iterator[SummaryLine]:
    """Yield the lines of the summary."""
    from ...analyze.answer import find_rows

    table = recording.find_energy()
    groups = _SummaryGroups.of(recording.rows)
    names = recording.rows.names
    run_s = (recording.span_ns[1] - recording.span_ns[0]) * 1e-9
    accounted_s = _length_s(recording.facts.accounted_windows) or run_s
    operators_s = _length_s(recording.facts.operator_windows) or accounted_s
    device_s = sum(total for (kind, _), (_, total, *_) in groups.items() if KINDS[kind] in ON_DEVICE) * 1e-9
    energies = _energies(table)
    steps = {r.name for r in table.steps} if table is not None else set()
    for (code, number), (calls, total, low, high, *own) in groups.items():
        kind, name, total_s = KINDS[code], names[number], total * 1e-9
        if kind == "region" and name in steps:
            continue
        row = energies.get((_VIEW.get(kind, ""), kind, name)) or energies.get((_VIEW.get(kind, ""), "", name))
        joules, error = own if row is None else (row.energy_j, row.error_j)
        # Joules are spent on the device: an operator's watts are over its time there, not over its time on the host.
        over_s = total_s if row is None else _span_s(row)
        whole_s = device_s if kind in ON_DEVICE else run_s if kind == "region" else operators_s
        yield SummaryLine(
            name, kind, calls, total_s, None if math.isnan(joules) else over_s, total / calls / 1e3, low / 1e3,
            high / 1e3, 100.0 * total_s / whole_s if whole_s > 0 and kind != "python" else None, joules, error,
            joules / over_s if over_s > 0 else None, joules / calls,
        )  # fmt: skip
    if table is not None:
        yield from _only_attributed(table, accounted_s)
        if not table.kernels and not table.ops:
            filled = find_rows(recording, table)
            regions = () if table.regions else filled.regions
            yield from _shared_by_time([*filled.kernels, *filled.ops, *regions], accounted_s)


def _shared_by_time(rows: Sequence[EnergyRow], seconds: float) -> Iterator[SummaryLine]:
    """Yield lines of a summary-mode run, or of sampled stacks: they have totals but no rows on the timeline."""
    for r in sorted(rows, key=lambda r: (r.time_s, r.energy_j), reverse=True):
        total_s = r.time_s or None
        yield SummaryLine(
            r.name, r.kind, r.calls, total_s, total_s, total_s / r.calls * 1e6 if total_s and r.calls else None,
            share_time_pct=100.0 * total_s / seconds if total_s and seconds > 0 else None, energy_j=r.energy_j,
            power_w=r.power_w, j_per_call=r.j_per_call,
        )  # fmt: skip


def _length_s(windows: Sequence[tuple[int, int]]) -> float:
    return sum(end_ns - start_ns for start_ns, end_ns in windows) * 1e-9


def _only_attributed(table: EnergyTable, seconds: float) -> Iterator[SummaryLine]:
    for kind, rows in (("module", table.modules), ("step", table.steps)):
        for r in rows:
            total_s = _span_s(r)
            mean_us = total_s / r.calls * 1e6 if r.calls else None
            share = 100.0 * total_s / seconds if seconds > 0 else None
            power_w = r.energy_j / total_s if total_s > 0 else None
            yield SummaryLine(
                r.name, kind, r.calls, total_s, total_s, mean_us, None, None, share, r.energy_j, r.error_j, power_w,
                r.j_per_call,
            )  # fmt: skip
    if not table.kernels and not table.ops:
        return  # nothing was traced: what ran is unknown, so the rest is not idle time
    idle_s = table.idle_s
    yield SummaryLine(
        table.idle_name, "idle", 1, idle_s, share_time_pct=100.0 * idle_s / seconds if seconds > 0 else None,
        energy_j=table.idle_j, energy_error_j=table.idle_error_j, power_w=table.idle_j / idle_s if idle_s > 0 else None,
        active_s=idle_s,
    )  # fmt: skip


def _span_s(row: EnergyRow) -> float:
    """Return the time in which a row's joules were spent; a region's and a step's joules include idle ones."""
    return row.time_s if row.wall_s is None else row.wall_s


def _energies(table: EnergyTable | None) -> dict[tuple[str, str, str], EnergyRow]:
    """Return attributed rows by (view, kind, name), and by (view, "", name) for rows whose kind differs here."""
    rows: dict[tuple[str, str, str], EnergyRow] = {}
    if table is None:
        return rows
    for view in ("kernels", "ops", "regions"):
        for row in table.rows(view):
            rows[view, row.kind, row.name] = row
            if view != "kernels":
                rows[view, "", row.name] = row
    return rows


class _SummaryGroups:
    """Sums over rows of one kind and name: calls, total, shortest, longest (ns), joules and their error.

    The errors of rows of one kind and name have the same causes, so they are added plainly, not in quadrature.
    """

    def __init__(self, names: int) -> None:
        size = len(KINDS) * max(names, 1)
        self._names = max(names, 1)
        self.calls, self.total = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.low, self.high = np.full(size, np.iinfo(np.int64).max), np.zeros(size, np.int64)
        self.joules, self.error = np.zeros(size), np.zeros(size)
        self.known = np.zeros(size, np.int64)

    @classmethod
    def of(cls, rows: Rows) -> dict[tuple[int, int], tuple[int, int, int, int, float, float]]:
        """Return (kind code, name number) -> sums, the longest first within each kind."""
        energy = ("energy_j", "energy_error_j") if rows.has_energy else ()
        self = cls(len(rows.names))
        frames = list(rows.row_meta.get("frames", ()))
        for chunk in rows.chunks(("kind", "name", "start_ns", "end_ns", *energy)):
            is_frame = (chunk["kind"] == CODE["op"]) & np.isin(chunk["name"], frames)
            kind = np.where(is_frame, CODE["python"], chunk["kind"])
            counted = np.isin(chunk["kind"], _KEPT)
            lasts = np.maximum(chunk["end_ns"] - chunk["start_ns"], 0)[counted]
            group = (kind * self._names + chunk["name"])[counted]
            self._add(group, lasts, *((chunk[c][counted] for c in energy) if energy else (None, None)))
        used = np.flatnonzero(self.calls)
        used = used[np.lexsort((-self.total[used], used // self._names))]
        unknown = self.known == 0
        self.joules[unknown] = self.error[unknown] = np.nan
        columns = (self.calls, self.total, self.low, self.high, self.joules, self.error)
        sums: list[Any] = list(zip(*(c[used].tolist() for c in columns), strict=True))
        return {divmod(g, self._names): one for g, one in zip(used.tolist(), sums, strict=True)}

    def _add(
        self, group: NDArray[Any], lasts: NDArray[Any], joules: NDArray[Any] | None, error: NDArray[Any] | None
    ) -> None:
        if not group.size:
            return
        order = np.argsort(group, kind="stable")
        group, lasts = group[order], lasts[order]
        starts = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
        number = group[starts]
        self.calls[number] += np.diff(np.r_[starts, len(group)])
        self.total[number] += np.add.reduceat(lasts, starts)
        self.low[number] = np.minimum(self.low[number], np.minimum.reduceat(lasts, starts))
        self.high[number] = np.maximum(self.high[number], np.maximum.reduceat(lasts, starts))
        if joules is not None and error is not None:
            self.known[number] += np.add.reduceat((~np.isnan(joules[order])).astype(np.int64), starts)
            self.joules[number] += np.add.reduceat(np.nan_to_num(joules[order]), starts)
            self.error[number] += np.add.reduceat(np.nan_to_num(error[order]), starts)


def _format_cell(value: object) -> object:
    """Return a cell of the file; nine digits are more than any figure here is accurate to."""
    if isinstance(value, float):
        return f"{value:.9g}" if math.isfinite(value) else ""
    return "" if value is None else escape_formula(value)
