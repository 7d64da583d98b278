"""Two runs compared on one screen: the totals, the rows that changed most, the verdict, what to type next.

Also the figures and texts of a `Difference` that the screen and the page share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..analyze.diff import Difference, DiffVerdict
from ..analyze.diff_rows import ROUNDING, RowChange
from ..analyze.kernel_names import distinct, fit
from ..notes import order_notes
from ..units import (
    format_duration,
    format_energy,
    format_error,
    format_power,
    format_share,
    parse_duration,
    parse_energy,
    parse_power,
)
from .console import FittedTable, TableColumn, label_table, next_line, note_dropped, open_table, plain_console
from .energy import TITLES, WIDTH

NARROWEST = 14
"""Least columns of a name."""
TOP = 12
_FACTOR = 20.0  # a larger change is written as a factor
_SHOW = {
    "J": (format_energy, parse_energy),
    "s": (format_duration, parse_duration),
    "W": (format_power, parse_power),
}


_LEAST_S = 1e-12
"""Times are whole nanoseconds, and a mean over a thousand calls whole picoseconds: what is less is rounding."""


@dataclass(frozen=True, slots=True)
class DiffFigure:
    """One headline figure: before, after, and the change with its half-width (NaN: unknown)."""

    name: str
    unit: str
    before: float
    before_error: float
    after: float
    after_error: float
    change_error: float

    @property
    def change(self) -> float:
        """Return after less before."""
        return 0.0 if is_unchanged(self.before, self.after) else self.after - self.before

    @property
    def share(self) -> float | None:
        """Return the change as a share of what was before."""
        return self.change / self.before if self.before > 0 and not math.isnan(self.change) else None

    @property
    def state(self) -> str:
        """Return one of "more", "less", "noise", "same", "unsure" (the scatter is unknown) and "unknown"."""
        if math.isnan(self.change):
            return "unknown"
        if is_unchanged(self.before, self.after):
            return "same"
        if math.isnan(self.change_error):
            return "unsure"
        return "noise" if abs(self.change) <= self.change_error else "more" if self.change > 0 else "less"


STATES = {
    "more": "more than noise",
    "less": "more than noise",
    "noise": "noise: within the 90% interval",
    "same": "no change",
    "unsure": "unknown: measured once",
    "unknown": "not known for both",
}
"""The meaning of a figure's state, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFigure:
    """One row in the unit that is compared: joules, or seconds if joules are not known for both."""

    row: RowChange
    name: str
    unit: str
    before: float
    after: float
    change: float
    error: float
    share: float | None
    is_sure: bool

    @property
    def texts(self) -> tuple[str, str, str, str]:
        """Return before, after, the change with its half-width, and its share, as texts."""
        before, after = (quantity(value, math.nan, self.unit) for value in (self.before, self.after))
        change = quantity(self.change, self.error, self.unit, signed=True)
        return before, after, change, percent(self.share, state=self.row.state)

    @property
    def direction(self) -> str:
        """Return one of "more", "less" and "noise"."""
        return "noise" if not self.is_sure else "more" if self.change > 0 else "less"

    @property
    def is_same(self) -> bool:
        """Return whether the row is the same except for rounding."""
        return self.row.state == "both" and is_unchanged(self.before, self.after)


def row_figures(difference: Difference) -> list[RowFigure]:
    """Return the rows, those that changed most first, with names for people: kernels short, no two the same."""
    unit = compared_unit(difference)
    kind = {"kernels": "kernel", "ops": "op"}.get(difference.by)
    names = distinct([r.name for r in difference.rows], kind) if kind else {}
    return [
        RowFigure(
            row=r,
            name=names.get(r.name, r.name),
            unit=unit,
            before=r.before_j if unit == "J" else r.before_s,
            after=r.after_j if unit == "J" else r.after_s,
            change=r.change_j if unit == "J" else r.change_s,
            error=r.error_j if unit == "J" else r.error_s,
            share=r.share_j if unit == "J" else r.share_s,
            is_sure=r.significant if unit == "J" else r.significant_s,
        )
        for r in difference.rows
    ]


def compared_unit(difference: Difference) -> str:
    """Return the unit in which rows are compared: joules, or seconds if joules are not known for both."""
    return "s" if math.isnan(difference.total.change_j) else "J"


def headline(difference: Difference) -> list[DiffFigure]:
    """Return energy, time and mean power."""
    t, nan = difference.total, math.nan
    figures = [
        DiffFigure("energy", "J", t.before_j, t.before_error_j, t.after_j, t.after_error_j, t.error_j),
        DiffFigure("time", "s", t.before_s, nan, t.after_s, nan, t.error_s),
    ]
    if not math.isnan(t.after_w - t.before_w):
        figures.append(DiffFigure("power", "W", t.before_w, t.before_error_w, t.after_w, t.after_error_w, t.error_w))
    return figures


def quantity(value: float, error: float, unit: str, *, signed: bool = False) -> str:
    """Return a value with its half-width: "+1.20 ± 0.31 J"; "unknown" where it is NaN."""
    if math.isnan(value):
        return "unknown"
    if unit == "s":
        value, error = (x if math.isnan(x) or abs(x) >= _LEAST_S else 0.0 for x in (value, error))
    show, parse = _SHOW[unit]
    if unit == "s" and abs(value) >= 120:
        return f"{'+' if signed and value > 0 else ''}{show(value, 3)}"
    largest = max(abs(value), 0.0 if math.isnan(error) else error)
    word = show(largest, 3).split()[-1]
    scale = parse(f"1{word}")
    text = (
        format_error(value / scale, error / scale, word, signed=signed) if error > 0 else f"{value / scale:.3g} {word}"
    )
    zero = float(text.split()[0]) == 0.0
    return text.removeprefix("-") if zero else f"+{text}" if signed and value > 0 else text


def percent(share: float | None, *, state: str = "both") -> str:
    """Return a signed share, or a factor; "new", "gone" and "not stated" if one side has no value."""
    if state != "both":
        return {"new": "new", "vanished": "gone", "unstated": "not stated"}[state]
    if share is None:
        return "-"
    if share >= _FACTOR:
        return f"{share + 1.0:,.0f} x"
    return format_share(share, signed=True)


def about(difference: Difference) -> str:
    """Say what the numbers mean: "per step, 12 and 24 steps; measured → predicted"."""
    if difference.per == "run":
        per = "the traced part of each" if difference.span == "trace" else "whole runs"
    else:
        per = f"per {difference.per}: {difference.work[0]:,.6g} and {difference.work[1]:,.6g} {difference.per}s"
        per += " per run" if max(difference.runs) > 1 else ""
    if max(difference.runs) > 1:
        per += f", {difference.runs[0]} and {difference.runs[1]} runs"
    basis = " → ".join(dict.fromkeys(basis_text(word) for word in difference.basis))
    return f"{per}; {basis}; 90% intervals"


def basis_text(basis: str) -> str:
    """Return how the joules of a side are known, in words."""
    return "time only, no power" if basis == "timed" else basis


def modelled_warning(difference: Difference) -> str | None:
    """Return a warning if the joules of a side were not measured."""
    sides = [side for side, basis in zip(("before", "after"), difference.basis, strict=True) if basis == "modelled"]
    if not sides:
        return None
    which = "both sides" if len(sides) == 2 else f"the run {sides[0]}"
    return f"MODELLED, not measured: the joules of {which} are utilisation times a power curve"


def calls_text(row: RowChange) -> str:
    """Return calls before and after: whole numbers, or means over steps with one or two decimals."""

    def one(calls: float) -> str:
        if abs(calls - round(calls)) <= 1e-6 * max(calls, 1.0):
            return f"{round(calls):,}"
        return f"{calls:,.1f}" if calls >= 10 else f"{calls:.2f}"

    a, b = one(row.before_calls), one(row.after_calls)
    return a if a == b else f"{a} → {b}"


def all_notes(difference: Difference) -> list[str]:
    """Return the notes, how much of the energy is in rows that both sides have, and how many rows differ by chance."""
    notes = order_notes(difference.notes)
    low = min(difference.matched)
    if difference.rows and low < 0.995:
        a, b = difference.matched
        sort = "seconds" if math.isnan(difference.total.change_j) else "joules"
        notes.append(
            f"rows that both runs have contain {format_share(a)} of the {sort} before and {format_share(b)} after"
        )
    judged = [r for r in difference.rows if not math.isnan(r.error_j if not math.isnan(r.change_j) else r.error_s)]
    if len(judged) >= 20 and any(r.significant or r.significant_s for r in judged):
        notes.append(f"each row is tested at 90%: up to {len(judged) // 10} of {len(judged)} rows may differ by chance")
    return notes


def legend(difference: Difference) -> str:
    """Return what "~" means in this comparison."""
    if all(math.isnan(figure.error) for figure in row_figures(difference)):
        return "~ unknown: the scatter of the rows was not recorded"
    return "~ noise: within the 90% interval"


def outside_text(difference: Difference) -> str | None:
    """Return the energy outside the compared steps, which is in no row."""
    out = difference.outside
    if out is None or math.isnan(out.change_j) or max(out.before_j, out.after_j) <= 0:
        return None
    sides = (quantity(out.before_j, math.nan, "J"), quantity(out.after_j, math.nan, "J"))
    return f"not in these rows: {sides[0]} before and {sides[1]} after, outside the compared steps"


# -- the screen -----------------------------------------------------------------------------------------------------


def text(difference: Difference, *, top: int = TOP, width: int = WIDTH) -> str:
    """Return the screen as plain text."""
    return plain_console(width).text(renderable(difference, top=top, width=width)).rstrip()


def renderable(
    difference: Difference,
    *,
    verdict: DiffVerdict | None = None,
    next_command: str | None = None,
    top: int = TOP,
    width: int = WIDTH,
) -> RenderableType:
    """Return the screen. The default `verdict` is that of the energy."""
    half = max(12, (width - 6) // 2)
    title = Text(f"{fit(difference.before, half)}  →  {fit(difference.after, half)}", style="bold")
    parts: list[RenderableType] = [title, Text(about(difference), style="dim")]
    if warning := modelled_warning(difference):
        parts.append(Text(warning, style="yellow"))
    parts += [Text(""), _figures(difference, width)]
    if difference.rows:
        parts += [Text(""), _rows(difference, top)]
        parts.append(Text(legend(difference), style="dim"))
    if outside := outside_text(difference):
        parts.append(Text(outside, style="dim"))
    if notes := all_notes(difference)[:4]:
        lines = label_table()
        for note in notes:
            lines.add_row("note   ", Text(note, style="yellow"))
        parts.append(lines)
    parts += [Text(""), _verdict(verdict or difference.verdict())]
    if next_command:
        parts.append(next_line(next_command, 7))
    return Group(*parts)


def _figures(difference: Difference, width: int) -> Table:
    lines, states = [], []
    for f in headline(difference):
        style = {"more": "red", "less": "green"}.get(f.state, "dim")
        change = Text(quantity(f.change, f.change_error, f.unit, signed=True), style=style)
        sides = (Text(quantity(f.before, f.before_error, f.unit)), Text(quantity(f.after, f.after_error, f.unit)))
        lines.append([Text(f.name), *sides, change, Text(percent(f.share), style=style)])
        states.append(Text(STATES[f.state], style="dim"))
    headings = ("", "before", "after", "change", "")
    widths = [max(len(h), *(len(line[i].plain) for line in lines)) + 2 for i, h in enumerate(headings)]
    longest = max(len(word) for state in states for word in state.plain.split())  # a state is folded between words
    kept = list(range(len(headings)))
    for place in (1, 2):
        if sum(widths[i] for i in kept) + longest > width:
            kept.remove(place)
    table = open_table(*(headings[i] for i in kept))
    table.add_column("")
    for line, state in zip(lines, states, strict=True):
        table.add_row(*(line[i] for i in kept), state)
    return note_dropped(table, [h for i, h in enumerate(headings) if i not in kept])


def _rows(difference: Difference, top: int) -> FittedTable:
    shown = row_figures(difference)[:top]
    count = f" ({len(shown)} of {len(difference.rows)})" if len(difference.rows) > len(shown) else ""
    names = TableColumn(heading=f"{TITLES[difference.by]}{count}", cells=[f.name for f in shown], least=NARROWEST)
    headings = ("before", "after", "change", "", *(("time",) if compared_unit(difference) == "J" else ()))
    drops = {"time": 3, "before": 2, "after": 1}  # the change is what it is about
    figures = [
        TableColumn(heading=heading, cells=cells, right=True, drop=drops.get(heading, 0))
        for heading, cells in zip(headings, zip(*map(_cells, shown), strict=True), strict=True)
    ]
    return FittedTable([names, *figures], styles=["" if figure.is_sure else "dim" for figure in shown])


def is_unchanged(before: float, after: float) -> bool:
    """Return whether two figures are the same except for rounding; False if one is unknown (NaN)."""
    return abs(after - before) <= ROUNDING * max(abs(before), abs(after))


def _cells(figure: RowFigure) -> list[Text]:
    row, (*_, change, share) = figure.row, figure.texts
    known = [Text("-" if math.isnan(v) else quantity(v, math.nan, figure.unit)) for v in (figure.before, figure.after)]
    if row.state == "unstated":
        return [*known, Text("-"), Text(share), *([Text("")] if figure.unit == "J" else [])]
    style = {"more": "red", "less": "green"}.get(figure.direction, "dim")
    share = STATES["same"] if figure.is_same else share + ("" if figure.is_sure else " ~")
    took = [Text(percent(row.share_s, state=row.state), style="dim")] if figure.unit == "J" else []
    return [*known, Text(change, style=style), Text(share, style=style), *took]


def _verdict(verdict: DiffVerdict) -> Table:
    better = verdict.significant and (verdict.share or 0) < 0
    style = "bold red" if verdict.failed else "bold green" if better else "bold"
    label = Text("FAILED ", style="not dim bold red") if verdict.failed else Text("verdict")
    table = label_table()
    table.add_row(label, Text(verdict.text, style=style))
    return table
