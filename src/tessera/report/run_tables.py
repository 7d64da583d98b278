"""The tables of a run's page: energy by operator, kernel, region, module and step, with their intervals drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ..analyze.answer import Answer, mean_w
from ..analyze.energy_by_time import FUNCTION
from ..analyze.kernel_names import CATEGORIES, category, fit, fitted, region_name
from ..attribute.table import EnergyRow, EnergyTable
from ..units import format_duration, format_energy, format_power, format_share
from .energy import TITLES, idle_row, joules, mark, rest_row, shown_names
from .run_parts import head, number
from .text import with_error

ROWS = 250
FOLDED = 15
"""Rows that are shown before somebody asks for all; so many as in run.css."""
_TABS = {"ops": "Operators", "kernels": "Kernels", "regions": "Regions", "modules": "Modules", "steps": "Steps"}
_COLUMNS = (("energy", True), ("", False), ("share", True), ("power", True), ("per call", True), ("calls", True),
            ("time", True))  # fmt: skip
_CHART = (1200, 130)
_BARS = 120
_NAME = 90


def tables(table: EnergyTable, said: Answer) -> str:
    """A tab for each view that has rows; idle is a row of its own in each."""
    views = [(view, title) for view, title in _TABS.items() if _rows(table, said, view)]
    if not views:
        return ""
    heads, panels = [], []
    for i, (view, title) in enumerate(views):
        found = _rows(table, said, view)
        state = "aria-selected='true' tabindex='0'" if i == 0 else "aria-selected='false' tabindex='-1'"
        name = "Functions" if found[0].kind == FUNCTION else title
        heads.append(
            f"<button type='button' role='tab' id='tab-{view}' aria-controls='panel-{view}' {state}>"
            f"{name} ({len(found):,})</button>"
        )
        panels.append(_panel(table, said, view, name, shown=i == 0))
    return (
        f"<section><h2>Energy by row</h2><div role='tablist' aria-label='Energy by'>{''.join(heads)}</div>"
        f"{''.join(panels)}</section>"
    )


def _rows(table: EnergyTable, said: Answer, view: str) -> Sequence[EnergyRow]:
    return _known(table) if view == "steps" else said.rows(view)


def _known(table: EnergyTable) -> list[EnergyRow]:
    """The steps with joules: those after the last power sample of a killed run have none."""
    return [row for row in table.steps if not math.isnan(row.energy_j)]


def _panel(table: EnergyTable, said: Answer, view: str, title: str, *, shown: bool) -> str:
    found = _rows(table, said, view)
    rows = list(found[:ROWS])
    idle = idle_row(table, view) or rest_row(said, view)
    lines = [*rows, *([idle] if idle else [])]
    lines = lines if view == "steps" else sorted(lines, key=lambda r: r.energy_j, reverse=True)
    named = shown_names(rows, view)
    cut = fitted(named.values(), _NAME)
    names = {name: cut[text] for name, text in named.items()} | ({idle.name: idle.name} if idle else {})
    most = max((r.energy_j + _error(r) for r in lines), default=0.0) or 1.0
    body = "".join(_row(r, names[r.name], most, view) for r in lines)
    sampled = bool(rows) and rows[0].kind == FUNCTION
    first = FUNCTION if sampled else TITLES[view]
    columns = [("samples" if sampled and name == "calls" else name, number) for name, number in _COLUMNS]
    heading = head(((first, False), *columns))
    rest = format_energy(sum(r.energy_j for r in found[ROWS:]), 3)
    more = f"<p class='dim'>and {len(found) - ROWS:,} more, {escape(rest)} together</p>" if len(found) > ROWS else ""
    state = "" if shown else " hidden"
    fold = " fold" if len(lines) > FOLDED + 3 else ""
    unfold = f"<button type='button' class='unfold'>Show all {len(lines)}</button>" if fold else ""
    return (
        f"<div role='tabpanel' id='panel-{view}' aria-labelledby='tab-{view}' data-title='{title}'{state}>"
        f"<div class='tools'><input type='search' placeholder='filter by name' aria-label='Filter {title.lower()}'>"
        f"<span class='dim' role='status'></span></div><div class='scroll'><table class='sort{fold}'>"
        f"<caption class='sr'>Energy by {TITLES[view]}</caption>{heading}<tbody>{body}</tbody></table></div>"
        f"{unfold}{more}{_group_note(table, rows)}</div>"
    )


def _error(row: EnergyRow) -> float:
    return row.energy_error_j if row.energy_error_j > 0 else 0.0


def _row(row: EnergyRow, name: str, most_j: float, view: str) -> str:
    group = mark(row.group)
    letter = f"<span class='group' title='cannot be told apart from the others of {group}'>{group}</span>"
    kind = "kidle" if row.kind == "idle" else f"k{CATEGORIES.index(category(row.name, row.kind))}"
    dot = f"<i class='{kind}'></i>" if view in ("kernels", "ops") else ""
    known = not math.isnan(row.energy_error_j)  # else shared out by time
    watts = mean_w(row) if known else None
    spent = joules(row.energy_j, row.energy_error_j) if known else f"~{format_energy(row.energy_j, 3)}"
    each = row.j_per_call if row.calls and known else None
    cells = [
        f"<td class='name' title='{escape(fit(row.name, 300))}'>{dot}{escape(name)}"
        f"{letter if row.group is not None else ''}</td>",
        number(spent, row.energy_j),
        f"<td>{_meter(row, most_j, kind)}</td>",
        number(format_share(row.share), row.share),
        number(_power(row, watts) if watts is not None else "-", watts),
        number(format_energy(each, 3) if each is not None else "-", each),
        number(f"{row.calls:,}" if row.calls else "-", row.calls or None),
        number(format_duration(row.time_s, 3) if row.time_s > 0 else "-", row.time_s),
    ]
    return f"<tr{' class=idle' if row.kind == 'idle' else ''}>{''.join(cells)}</tr>"


def _power(row: EnergyRow, watts: float) -> str:
    """Watts with their error: those of a short kernel may lie above the board's limit, and the error says why."""
    if not (row.energy_j > 0 and _error(row) > 0):
        return format_power(watts, 3)
    return with_error(watts, watts * _error(row) / row.energy_j, "W")


def _meter(row: EnergyRow, most_j: float, kind: str) -> str:
    """A bar as long as the joules, and the interval over its end."""
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
    known = "; ".join(f"{mark(g.group)} {joules(g.energy_j, g.energy_error_j)}" for g in sums[:8])
    tail = f" Their sums: {known}." if known else ""
    said = "Kernels with the same letter always ran together: the samples know their sum, not each."
    return f"<p class='dim'>{escape(said + tail)}</p>"


# -- steps and gaps -------------------------------------------------------------------------------------------------


def steps(table: EnergyTable) -> str:
    """Joules of every step in order, with their intervals; a line where there are many."""
    found = _known(table)
    if len(found) < 3:
        return ""
    wide, high = _CHART
    base, top = high - 18, 8
    most = max(r.energy_j + _error(r) for r in found) or 1.0
    scale = (base - top) / most
    step = (wide - 60) / len(found)
    marks = []
    if len(found) <= _BARS:
        for i, r in enumerate(found):
            x, y = 56 + i * step, base - r.energy_j * scale
            middle = x + step * 0.425
            low, up = base - max(r.energy_j - _error(r), 0.0) * scale, base - (r.energy_j + _error(r)) * scale
            title = f"{r.name}: {joules(r.energy_j, r.energy_error_j)}"
            marks.append(
                f"<g><title>{escape(title)}</title><rect x='{x:.1f}' y='{y:.1f}' width='{step * 0.85:.1f}' "
                f"height='{base - y:.1f}'/><path d='M{middle:.1f} {low:.1f}V{up:.1f}'/></g>"
            )
    else:
        points = " ".join(f"{56 + i * step:.1f},{base - r.energy_j * scale:.1f}" for i, r in enumerate(found))
        marks.append(f"<polyline points='{points}'/>")
    label = escape(format_energy(most, 3))
    first, last = (escape(fit(region_name(row.name), 24)) for row in (found[0], found[-1]))
    return (
        f"<section><h2>Energy of each step</h2><svg class='steps' viewBox='0 0 {wide} {high}' "
        f"role='img' aria-label='Energy of {len(found)} steps'><line x1='54' x2='{wide}' y1='{base}' y2='{base}'/>"
        f"{''.join(marks)}<text x='50' y='{top + 6}' text-anchor='end'>{label}</text>"
        f"<text x='50' y='{base}' text-anchor='end'>0</text><text x='56' y='{high - 4}'>{first}</text>"
        f"<text x='{wide}' y='{high - 4}' text-anchor='end'>{last}</text></svg></section>"
    )


def gaps(said: Answer) -> str:
    """What the device waited for."""
    if not said.gaps:
        return ""
    rows = "".join(
        f"<tr><td class='name' title='{escape(fit(g.during, 300))}'>{escape(fit(g.during, 90))}</td>"
        f"{number(format_energy(g.energy_j, 3), g.energy_j)}{number(format_duration(g.time_s, 3), g.time_s)}"
        f"{number(f'{g.count:,}', g.count)}{number(format_duration(g.each_s, 3), g.each_s)}</tr>"
        for g in said.gaps[:20]
    )
    columns = (("what the host did", False), ("energy", True), ("time", True), ("gaps", True), ("each", True))
    return (
        "<section><h2>What the device waited for</h2><div class='scroll'><table class='sort'>"
        "<caption class='sr'>Idle joules by what the host did</caption>"
        f"{head(columns)}<tbody>{rows}</tbody></table></div>"
        "<p class='dim'>The idle joules, shared out by time among the gaps; a gap up to 0.1 ms is a late launch."
        f"{_slowed(said)}</p></section>"
    )


def _slowed(said: Answer) -> str:
    """What of the gaps is the tracer's, where that matters: in which of them it waited nobody knows."""
    if said.tracing is None or not said.tracing.matters or not said.tracing.idle_s > 0:
        return ""
    most = "up to" if said.tracing.basis == "events" else "about"
    waited = f"{most} {format_duration(said.tracing.idle_s, 3)} and {format_energy(said.tracing.idle_j, 3)}"
    return f" Of all of it, {escape(waited)} are the tracer's, in which gaps is not known."
