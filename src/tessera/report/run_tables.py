"""The tables of a run's page: energy by operator, kernel, region, module and step; the steps; the gaps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ..analyze.answer import Answer
from ..analyze.kernel_names import CATEGORIES, category, fit, fit_all, region_name
from ..analyze.run_energy import FUNCTION
from ..attribute.table import EnergyRow, EnergyTable
from ..units import format_duration, format_energy, format_energy_error, format_error, format_power
from .energy import OWN, TITLES, display_names, group_letter, idle_row, rest_rows, share_text
from .html import folding_table, number_cell, tabs_section
from .html import table as html_table

ROWS = 250
_TABS = {
    "ops": "Operators",
    "kernels": "Kernels",
    "regions": "Regions",
    "modules": "Modules",
    "steps": "Steps",
    "functions": "Your functions",
    "lines": "Your lines",
}
_COLUMNS = [("energy", True), ("", False), *((n, True) for n in ("share", "power", "per call", "calls", "time"))]
_CHART = (1200, 130)
_BARS = 120
_NAME = 90


def tables(table: EnergyTable, answer: Answer) -> str:
    """Return a tab for each view that has rows; each has a row for idle."""
    tabs = []
    for view, title in _TABS.items():
        rows = _known_steps(table) if view == "steps" else answer.rows(view)
        if rows:
            name = "Functions" if rows[0].kind == FUNCTION and view not in OWN else title
            tabs.append((view, name, len(rows), _view(table, answer, rows, view)))
    return tabs_section("Energy", tabs)


def _known_steps(table: EnergyTable) -> list[EnergyRow]:
    """Return the steps with joules: in a killed run, those after the last power sample have none."""
    return [row for row in table.steps if not math.isnan(row.energy_j)]


def _view(table: EnergyTable, answer: Answer, all_rows: Sequence[EnergyRow], view: str) -> str:
    rows = list(all_rows[:ROWS])
    idle = idle_row(table, view)
    below = [idle] if idle else rest_rows(answer, view)
    if view == "steps" and answer.outside_steps:
        below = list(answer.outside_steps.rows)
    lines = [*rows, *below]
    lines = lines if view == "steps" else sorted(lines, key=lambda r: r.energy_j, reverse=True)
    display = display_names(rows, view)
    cut = fit_all(display.values(), _NAME, view)
    names = {name: cut[text] for name, text in display.items()} | {r.name: r.name for r in below}
    most = max((r.energy_j + _error(r) for r in lines), default=0.0) or 1.0
    body = [_row(r, names[r.name], most, view) for r in lines]
    sampled = rows[0].kind == FUNCTION
    first = FUNCTION if sampled and view not in OWN else TITLES[view]
    columns = [("samples" if sampled and name == "calls" else name, number) for name, number in _COLUMNS]
    rest = format_energy(sum(r.energy_j for r in all_rows[ROWS:]), 3)
    hidden = len(all_rows) - ROWS
    more = f"<p class='dim'>and {hidden:,} more, {escape(rest)} together</p>" if hidden > 0 else ""
    shown = folding_table([(first, False), *columns], body, caption=f"Energy by {TITLES[view]}", sorted_by="energy")
    return f"{shown}{more}{_group_note(table, rows)}"


def _error(row: EnergyRow) -> float:
    return row.error_j if row.error_j > 0 else 0.0


def _row(row: EnergyRow, name: str, most_j: float, view: str) -> str:
    group = group_letter(row.group)
    letter = (
        f"<span class='group' title='cannot be distinguished from the other kernels of group {group}'>{group}</span>"
    )
    kind = "kidle" if row.kind == "idle" else f"k{CATEGORIES.index(category(row.name, row.kind))}"
    dot = f"<i class='{kind}'></i>" if view in ("kernels", "ops") else ""
    known = not math.isnan(row.error_j)  # otherwise shared out by time
    watts = row.power_w if known else None
    spent = format_energy_error(row.energy_j, row.error_j) if known else f"~{format_energy(row.energy_j, 3)}"
    each = row.j_per_call if row.calls and known else None
    cells = [
        f"<td class='name' title='{escape(fit(row.name, 300))}'>{dot}{escape(name)}"
        f"{letter if row.group is not None else ''}</td>",
        number_cell(spent, row.energy_j),
        f"<td>{_meter(row, most_j, kind)}</td>",
        number_cell(share_text(row), row.share),
        number_cell(_power(row, watts) if watts is not None else "-", watts),
        number_cell(format_energy(each, 3) if each is not None else "-", each),
        number_cell(f"{row.calls:,}" if row.calls else "-", row.calls or None),
        number_cell(format_duration(row.time_s, 3) if row.time_s > 0 else "-", row.time_s),
    ]
    return f"<tr{' class=idle' if row.kind == 'idle' else ''}>{''.join(cells)}</tr>"


def _power(row: EnergyRow, watts: float) -> str:
    """Return watts with their error: those of a short kernel may exceed the board's limit, within their error."""
    if not (row.energy_j > 0 and _error(row) > 0):
        return format_power(watts, 3)
    return format_error(watts, watts * _error(row) / row.energy_j, "W")


def _meter(row: EnergyRow, most_j: float, kind: str) -> str:
    """Return a bar as long as the joules, with their interval at its end."""
    low, high = max(row.energy_j - _error(row), 0.0), row.energy_j + _error(row)
    whisker = (
        f"<u style='left:{100 * low / most_j:.1f}%;width:{100 * (high - low) / most_j:.1f}%'></u>" if high > low else ""
    )
    wide = 100 * max(row.energy_j, 0.0) / most_j
    return f"<span class='meter' aria-hidden='true'><i class='{kind}' style='width:{wide:.1f}%'></i>{whisker}</span>"


def _group_note(table: EnergyTable, rows: Sequence[EnergyRow]) -> str:
    shown = {r.group for r in rows if r.group is not None}
    if not shown:
        return ""
    sums = [g for g in table.groups if g.group in shown]
    totals = "; ".join(f"{group_letter(g.group)} {format_energy_error(g.energy_j, g.error_j)}" for g in sums[:8])
    tail = f" Their sums: {totals}." if totals else ""
    text = f"Kernels with the same letter always ran together: only their sum was measured.{tail}"
    return f"<p class='dim'>{escape(text)}</p>"


# -- steps and gaps -------------------------------------------------------------------------------------------------


def steps(table: EnergyTable) -> str:
    """Return joules of every step in order, with their intervals; a line if there are many."""
    rows = _known_steps(table)
    if len(rows) < 3:
        return ""
    wide, high = _CHART
    base, top = high - 18, 8
    most = max(r.energy_j + _error(r) for r in rows) or 1.0
    scale = (base - top) / most
    step = (wide - 60) / len(rows)
    marks = []
    if len(rows) <= _BARS:
        for i, r in enumerate(rows):
            x, y = 56 + i * step, base - r.energy_j * scale
            middle = x + step * 0.425
            low, up = base - max(r.energy_j - _error(r), 0.0) * scale, base - (r.energy_j + _error(r)) * scale
            title = f"{r.name}: {format_energy_error(r.energy_j, r.error_j)}"
            marks.append(
                f"<g><title>{escape(title)}</title><rect x='{x:.1f}' y='{y:.1f}' width='{step * 0.85:.1f}' "
                f"height='{base - y:.1f}'/><path d='M{middle:.1f} {low:.1f}V{up:.1f}'/></g>"
            )
    else:
        points = " ".join(f"{56 + i * step:.1f},{base - r.energy_j * scale:.1f}" for i, r in enumerate(rows))
        marks.append(f"<polyline points='{points}'/>")
    label = escape(format_energy(most, 3))
    first, last = (escape(fit(region_name(row.name), 24)) for row in (rows[0], rows[-1]))
    return (
        f"<section><h2>Energy of each step</h2><svg class='steps' viewBox='0 0 {wide} {high}' "
        f"role='img' aria-label='Energy of {len(rows)} steps'><line x1='54' x2='{wide}' y1='{base}' y2='{base}'/>"
        f"{''.join(marks)}<text x='50' y='{top + 6}' text-anchor='end'>{label}</text>"
        f"<text x='50' y='{base}' text-anchor='end'>0</text><text x='56' y='{high - 4}'>{first}</text>"
        f"<text x='{wide}' y='{high - 4}' text-anchor='end'>{last}</text></svg></section>"
    )


def gaps(answer: Answer) -> str:
    """Return what the device waited for."""
    if not answer.gaps:
        return ""
    rows = "".join(
        f"<tr><td class='name' title='{escape(fit(g.during, 300))}'>{escape(fit(g.during, 90))}</td>"
        f"{number_cell(format_energy(g.energy_j, 3), g.energy_j)}"
        f"{number_cell(format_duration(g.time_s, 3), g.time_s)}"
        f"{number_cell(f'{g.count:,}', g.count)}{number_cell(format_duration(g.each_s, 3), g.each_s)}</tr>"
        for g in answer.gaps[:20]
    )
    columns = (("what the host did", False), ("energy", True), ("time", True), ("gaps", True), ("each", True))
    return (
        "<section><h2>What the device waited for</h2>"
        f"{html_table(columns, rows, caption='Idle joules by what the host did')}"
        "<p class='dim'>The idle joules are divided among the gaps by time; a gap up to 0.1 ms is a late launch."
        f"{_tracing_note(answer)}</p></section>"
    )


def _tracing_note(answer: Answer) -> str:
    """Return how much of the gaps tracing caused, if that matters."""
    if answer.tracing is None or not answer.tracing.matters or not answer.tracing.idle_s > 0:
        return ""
    most = "Up to" if answer.tracing.basis == "events" else "About"
    waited = f"{most} {format_duration(answer.tracing.idle_s, 3)} and {format_energy(answer.tracing.idle_j, 3)}"
    return f" {escape(waited)} of it are caused by tracing; which gaps is unknown."
