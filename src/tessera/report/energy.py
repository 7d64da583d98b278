"""An `EnergyTable` in the terminal and in a notebook. `report.run` shows the same rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..analyze.answer import Answer
from ..analyze.kernel_names import distinct, fit_all
from ..analyze.run_energy import FUNCTION
from ..analyze.time_answer import TimeRow
from ..attribute.table import VIEWS, EnergyRow, EnergyTable
from ..timeline.kineto import MODULE
from ..units import format_duration, format_energy, format_energy_error, format_error, format_power, format_share
from .console import note_dropped, open_table, plain_console
from .html import card, card_bar

SUMMARY_NOTE = "Calls are counted while tracing; joules are those of the whole run."
"""The note of a summary (`--mode summary`), which traces only part of the time."""
WIDTH = 100
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TITLES = {
    "kernels": "kernel",
    "ops": "operator",
    "regions": "region",
    "modules": "module",
    "steps": "step",
    "functions": "your function",
    "lines": "your line",
    "groups": "group",
}
"""The heading of a row in each view."""
OWN = ("functions", "lines")
"""The views of the user's own code, by sampled stacks."""


def text(table: EnergyTable, *, by: str | None = None, top: int = 10, width: int = WIDTH) -> str:
    """Return the table as plain text: the total, then the most expensive rows of one view (the first that has any)."""
    return plain_console(width).text(renderable(table, by=by, top=top, width=width), crop=True).rstrip()


def renderable(table: EnergyTable, *, by: str | None = None, top: int = 10, width: int = WIDTH) -> RenderableType:
    """Return the table for a terminal: what `tessera attribute` prints."""
    view = by or first_view(table)
    parts: list[RenderableType] = [headline(table)]
    rows = table.top(top, view)
    if rows:
        idle = idle_row(table, view)
        below = [idle] if idle else []
        parts += [rows_table(rows, view, width=width, total=len(table.rows(view)), below=below)]
        parts += legend(rows)
    else:
        parts.append(Text(f"the trace has no {view}", style="yellow"))
    if line := untraced_text(table):
        parts.append(Text(line, style="yellow"))
    parts += [Text(f"note  {note}", style="yellow") for note in list(table.notes)[:3]]
    return Group(*parts)


def first_view(table: EnergyTable) -> str:
    """Return the default view: the first that has rows."""
    return next((view for view in VIEWS if table.rows(view)), "kernels")


def untraced_text(table: EnergyTable) -> str:
    """Return what the power log has beside the trace; "" if that is almost nothing."""
    if table.covers == "run":
        return ""
    spent = f"{format_energy(table.untraced_j, 3)} in {format_duration(table.untraced_s, 3)}"
    return f"not traced: {spent} of the power log lie outside the trace, and are neither in a row nor idle"


def headline(table: EnergyTable) -> Text:
    """Return joules, watts, seconds, and their source."""
    seen_s = table.time_s * table.coverage
    watts = format_error(table.energy_j / seen_s, table.error_j / seen_s, "W") if seen_s > 0 else "- W"
    joules = format_energy_error(table.energy_j, table.error_j)
    line = Text("   ".join((joules, watts, format_duration(table.time_s))), style="bold")
    if table.basis == "measured":
        return line.append(f"   {table.source or 'power samples'}, 90% intervals", style="not bold dim")
    return line.append(f"   {table.basis.upper()}, not measured", style="not bold yellow")


def idle_row(table: EnergyTable, view: str = "kernels") -> EnergyRow | None:
    """Return idle as a row: kernels and idle sum to the total. Steps and regions include their idle time.

    On a host alone, it is the time between operators: Python runs then, so it is not idle.
    """
    if view in ("steps", "regions", "functions", "lines") or not table.idle_j > 0:
        return None
    return EnergyRow(
        name=table.idle_name,
        kind="idle",
        calls=0,
        time_s=table.idle_s,
        energy_j=table.idle_j,
        error_j=table.idle_error_j,
        share=table.idle_j / table.energy_j if table.energy_j > 0 else 0.0,
    )


def rest_rows(answer: Answer, view: str, shown: int | None = None) -> list[EnergyRow]:
    """Return what the `shown` rows of a run without attribution leave: others; imports and time between operators."""
    if view == "lines":
        return _outside_lines(answer)
    if view not in ("ops", "kernels") or not answer.rest_j > 0:
        return []
    others = [] if shown is None else answer.rows(view)[shown:]
    others_j = math.fsum(r.energy_j for r in others)
    left = {f"{len(others)} more {view}": others_j} if others else {}
    return [
        _make_rest(name, spent_j, answer.energy_j) for name, spent_j in (left | {"the rest": answer.rest_j}).items()
    ]


def _make_rest(name: str, energy_j: float, whole_j: float) -> EnergyRow:
    share = energy_j / whole_j if whole_j > 0 else 0.0
    return EnergyRow(name=name, kind="idle", calls=0, time_s=0.0, energy_j=energy_j, error_j=math.nan, share=share)


def _outside_lines(answer: Answer) -> list[EnergyRow]:
    """Return what was used while no line of the user's own code was on the stack."""
    rest_j = answer.whole.energy_j - math.fsum(r.energy_j for r in answer.lines)
    if not answer.lines or rest_j <= 0.001 * answer.whole.energy_j:
        return []
    return [_make_rest("not in your code", rest_j, answer.whole.energy_j)]


def group_letter(group: int | None) -> str:
    """Return the letter of a group of kernels that cannot be distinguished."""
    return "" if group is None else LETTERS[group % 26] + ("" if group < 26 else str(group // 26))


def display_names(rows: Sequence[EnergyRow] | Sequence[TimeRow], view: str) -> dict[str, str]:
    """Return names for people: kernels and groups short, modules by their paths, no two the same."""
    kind = {"kernels": "kernel", "groups": "group", "ops": "op", "regions": "region"}.get(view)
    return distinct((r.name for r in rows), kind) if kind else {r.name: r.name.removeprefix(MODULE) for r in rows}


def rows_table(
    rows: Sequence[EnergyRow],
    view: str,
    *,
    width: int = WIDTH,
    total: int | None = None,
    below: Sequence[EnergyRow] = (),
) -> Table:
    """Return rows with joules, share, watts, joules per call and calls; fewer columns on a narrow terminal.

    Rows whose joules were shared out by time are marked "~", and have neither watts nor joules per call.
    `below` comes after the rows: the rest of the total.
    """
    table = open_table()
    more = f" ({len(rows)} of {total})" if total is not None and total > len(rows) else ""
    grouped = any(r.group is not None for r in rows)
    sampled = bool(rows) and rows[0].kind == FUNCTION
    title = FUNCTION if sampled and view not in OWN else TITLES.get(view, view)
    table.add_column(f"{title}{more}", no_wrap=True, overflow="ellipsis")
    if grouped:
        table.add_column("", no_wrap=True)
    attributed = not any(math.isnan(r.error_j) for r in rows)
    wide = width >= 80 and attributed
    headings = ["energy", "share", *(("power", "per call") if wide else ()), "samples" if sampled else "calls"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    names = display_names(rows, view)
    lines = [(row, _cells(row, wide=wide)) for row in [*rows, *below]]
    # Cut the names here, in the middle: rich would cut their ends, where they differ.
    widths = [max(len(c[i]) for _, c in lines) for i in range(len(headings))]
    numbers = sum(max(w, len(h)) + 2 for w, h in zip(widths, headings, strict=True))
    room = max(12, width - numbers - 2 - (3 if grouped else 0))
    texts = fit_all(names.values(), room, view)
    for row, cells in lines:
        name = texts[names[row.name]] if row.kind != "idle" and row.name in names else row.name
        letter = [Text(group_letter(row.group), style="magenta")] if grouped else []
        table.add_row(Text(name), *letter, *cells, style="dim" if row.kind == "idle" else "")
    return note_dropped(table, ("power", "per call") if attributed and not wide else ())


def _cells(row: EnergyRow, *, wide: bool) -> list[str]:
    if math.isnan(row.error_j) and not math.isnan(row.energy_j):
        spent = f"~{format_energy(row.energy_j, 3)}"  # shared out by time, not attributed
    else:
        spent = format_energy_error(row.energy_j, row.error_j)
    share = share_text(row)
    calls = f"{row.calls:,}" if row.calls else ""
    if not wide:
        return [spent, share, calls]
    watts = row.power_w
    power = format_power(watts, 3) if watts is not None else ""
    return [spent, share, power, format_energy(row.j_per_call, 3) if row.calls else "", calls]


def share_text(row: EnergyRow) -> str:
    """Return the share of a row, with its interval if it is counted in samples."""
    if row.share_error is None:
        return format_share(row.share)
    return f"{100 * row.share:.1f} ± {100 * row.share_error:.1f}%"


def legend(rows: Sequence[EnergyRow]) -> list[RenderableType]:
    """Return what the letters mean, if there are any."""
    groups = sorted({r.group for r in rows if r.group is not None})
    if not groups:
        return []
    letters = ", ".join(group_letter(g) for g in groups[:6])
    return [Text(f"{letters}: kernels with the same letter run together; only their sum is accurate", style="dim")]


# -- a notebook -----------------------------------------------------------------------------------------------------


def html(table: EnergyTable, *, top: int = 12) -> str:
    """Return the table for a notebook: the total, and each view folded."""
    total = f"{format_energy_error(table.energy_j, table.error_j)} in {format_duration(table.time_s)}"
    basis = table.source if table.basis == "measured" else f"{table.basis.upper()}, not measured"
    parts = [f"<p><b>{escape(total)}</b> {escape(basis)}</p>"]
    views = [v for v in VIEWS if table.rows(v)]
    for view in views:
        rows = table.top(top, view)
        count = len(table.rows(view))
        more = f"{len(rows)} of {count}" if count > len(rows) else str(count)
        state = " open" if view == views[0] else ""
        body = _html_rows(rows, view, table)
        parts.append(f"<details{state}><summary>{view}: {more}</summary>{body}</details>")
    parts += [f"<p>{escape(note)}</p>" for note in (untraced_text(table), *table.notes) if note]
    return card(*parts)


def _html_rows(rows: Sequence[EnergyRow], view: str, table: EnergyTable) -> str:
    idle = idle_row(table, view)
    names = display_names(rows, view) | ({idle.name: idle.name} if idle else {})
    longest = max((r.share for r in rows), default=0.0) or 1.0
    head = "".join(f"<th>{h}</th>" for h in (TITLES[view], "energy", "share", "", "power", "per call", "calls"))
    lines = []
    for row in [*rows, *([idle] if idle else [])]:
        spent, share, watts, each, calls = _cells(row, wide=True)
        bar = card_bar(row.share / longest)
        name = f"{names[row.name]} {group_letter(row.group)}".rstrip()
        cells = "".join(f"<td>{c}</td>" for c in (escape(spent), share, bar, escape(watts), escape(each), calls))
        kind = " class='dim'" if row.kind == "idle" else ""
        lines.append(f"<tr{kind}><td class='name' title='{escape(row.name)}'>{escape(name)}</td>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
