"""What changed between two runs, on one screen: the totals, the rows that changed most, the verdict, what to type next.

Also what both the screen and the page say of a `Difference`: its headline figures and the texts of its numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..analyze.diff import Difference, Verdict
from ..analyze.diff_rows import Change
from ..analyze.kernel_names import distinct, fit
from ..units import (
    format_duration,
    format_energy,
    format_power,
    format_share,
    parse_duration,
    parse_energy,
    parse_power,
)
from .energy import TITLES, WIDTH
from .screen import colourless
from .text import plain_table, with_error

TOP = 12
_FACTOR = 20.0  # from here on percents are read as factors anyway, and are too wide for a column
_SHOW = {
    "J": (format_energy, parse_energy),
    "s": (format_duration, parse_duration),
    "W": (format_power, parse_power),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
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
        """After less before."""
        return self.after - self.before

    @property
    def share(self) -> float | None:
        """The change as a share of what was before."""
        return self.change / self.before if self.before > 0 and not math.isnan(self.change) else None

    @property
    def state(self) -> str:
        """One of "more", "less", "noise", "same", "unsure" (no scatter is known) and "unknown"."""
        if math.isnan(self.change):
            return "unknown"
        if abs(self.change) <= 1e-9 * max(abs(self.before), abs(self.after)):
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
    "unknown": "not known of both",
}
"""What a figure's state means, in words."""


def headline(found: Difference) -> list[Figure]:
    """Energy, time and mean power."""
    t, nan = found.total, math.nan
    figures = [
        Figure(
            name="energy", unit="J", before=t.before_j, before_error=t.before_error_j, after=t.after_j,
            after_error=t.after_error_j, change_error=t.error_j,
        ),
        Figure(
            name="time", unit="s", before=t.before_s, before_error=nan, after=t.after_s, after_error=nan,
            change_error=t.error_s,
        ),
    ]  # fmt: skip
    if not math.isnan(t.after_w - t.before_w):
        figures.append(
            Figure(
                name="power", unit="W", before=t.before_w, before_error=t.before_error_w, after=t.after_w,
                after_error=t.after_error_w, change_error=t.error_w,
            )
        )  # fmt: skip
    return figures


def quantity(value: float, error: float, unit: str, *, signed: bool = False) -> str:
    """A value with its half-width in one fitting prefix: "+1.20 ± 0.31 J"; "unknown" where it is not known."""
    if math.isnan(value):
        return "unknown"
    show, parse = _SHOW[unit]
    if unit == "s" and abs(value) >= 120:
        return f"{'+' if signed and value > 0 else ''}{show(value, 3)}"
    largest = max(abs(value), 0.0 if math.isnan(error) else error)
    word = show(largest, 3).split()[-1]
    scale = parse(f"1{word}")
    known = None if math.isnan(error) or not error > 0 else error / scale
    said = with_error(value / scale, known, word) if known else f"{value / scale:.3g} {word}"
    zero = float(said.split()[0]) == 0.0
    return said.removeprefix("-") if zero else f"+{said}" if signed and value > 0 else said


def percent(share: float | None, *, state: str = "both") -> str:
    """A signed share, or how many times as much; "new", "gone" and "not stated" where there is none."""
    if state != "both":
        return {"new": "new", "vanished": "gone", "unstated": "not stated"}[state]
    if share is None:
        return "-"
    if share >= _FACTOR:
        return f"{share + 1.0:,.0f} x"
    return format_share(share, signed=True)


def about(found: Difference) -> str:
    """What the numbers are: "per step, 12 and 24 steps; measured, predicted"."""
    if found.per == "run":
        per = "what was traced of each" if found.span == "trace" else "whole runs"
    else:
        per = f"per {found.per}: {found.work[0]:,.6g} and {found.work[1]:,.6g} {found.per}s"
        per += " of a run" if max(found.runs) > 1 else ""
    if max(found.runs) > 1:
        per += f", {found.runs[0]} and {found.runs[1]} runs"
    basis = found.basis[0] if found.basis[0] == found.basis[1] else f"{found.basis[0]} → {found.basis[1]}"
    return f"{per}; {basis}; 90% intervals"


def modelled(found: Difference) -> str | None:
    """A warning where a side's joules were not measured."""
    sides = [side for side, basis in zip(("before", "after"), found.basis, strict=True) if basis == "modelled"]
    if not sides:
        return None
    which = "both sides" if len(sides) == 2 else f"the run {sides[0]}"
    return f"MODELLED, not measured: the joules of {which} are utilisation x a power curve"


def calls_text(row: Change) -> str:
    """Calls before and after: whole numbers as such, means over steps with one or two digits behind the point."""

    def one(calls: float) -> str:
        if abs(calls - round(calls)) <= 1e-6 * max(calls, 1.0):
            return f"{round(calls):,}"
        return f"{calls:,.1f}" if calls >= 10 else f"{calls:.2f}"

    a, b = one(row.before_calls), one(row.after_calls)
    return a if a == b else f"{a} → {b}"


def told_notes(found: Difference) -> list[str]:
    """What a reader should know, with how much of the joules the rows of both sides reach, and what chance does."""
    notes = sorted(found.notes, key=lambda note: "left out" in note)
    low = min(found.matched)
    if found.rows and low < 0.995:
        a, b = found.matched
        sort = "seconds" if math.isnan(found.total.change_j) else "joules"
        notes.append(
            f"rows that both have hold {format_share(a)} of the {sort} before and {format_share(b)} of those after"
        )
    judged = [r for r in found.rows if not math.isnan(r.error_j if not math.isnan(r.change_j) else r.error_s)]
    if len(judged) >= 20 and any(r.significant or r.significant_s for r in judged):
        notes.append(f"each row is judged at 90%: of {len(judged)} up to {len(judged) // 10} differ by chance")
    return notes


def legend(found: Difference) -> str:
    """What the mark beside a row means here."""
    timed = math.isnan(found.total.change_j)
    if all(math.isnan(r.error_s if timed else r.error_j) for r in found.rows):
        return "~ unknown: how rows scatter was not recorded"
    return "~ noise: within its 90% interval"


def outside_text(found: Difference) -> str | None:
    """What runs spent outside the steps compared, which no row has."""
    out = found.outside
    if out is None or math.isnan(out.change_j) or max(out.before_j, out.after_j) <= 0:
        return None
    sides = (quantity(out.before_j, math.nan, "J"), quantity(out.after_j, math.nan, "J"))
    return f"outside these steps {sides[0]} before and {sides[1]} after, of the run, in no row"


def shown_names(found: Difference) -> dict[str, str]:
    """Rows as people read them: kernels short, none twice."""
    kind = {"kernels": "kernel", "ops": "op"}.get(found.by)
    names = [r.name for r in found.rows]
    return distinct(names, kind) if kind else {n: n for n in names}


# -- the screen -----------------------------------------------------------------------------------------------------


def text(found: Difference, *, top: int = TOP, width: int = WIDTH) -> str:
    """The screen as plain text."""
    return colourless(width).text(renderable(found, top=top, width=width)).rstrip()


def renderable(
    found: Difference,
    *,
    verdict: Verdict | None = None,
    next_command: str | None = None,
    top: int = TOP,
    width: int = WIDTH,
) -> RenderableType:
    """The screen. `verdict` is the energy's unless another was asked for."""
    half = max(12, (width - 6) // 2)
    title = Text(f"{fit(found.before, half)}  →  {fit(found.after, half)}", style="bold")
    parts: list[RenderableType] = [title, Text(about(found), style="dim")]
    if warning := modelled(found):
        parts.append(Text(warning, style="yellow"))
    parts += [Text(""), _figures(found)]
    if found.rows:
        parts += [Text(""), _rows(found, top, width)]
        parts.append(Text(legend(found), style="dim"))
    if outside := outside_text(found):
        parts.append(Text(outside, style="dim"))
    if notes := told_notes(found)[:4]:
        parts.append(_hanging(*((Text("note"), Text(note, style="yellow")) for note in notes)))
    parts += [Text(""), _verdict(verdict or found.verdict())]
    if next_command:
        line = Text("next     ", style="dim", no_wrap=True, overflow="ignore")
        parts.append(line.append(next_command, style="not dim cyan"))
    return Group(*parts)


def _figures(found: Difference) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    for heading in ("before", "after", "change", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for f in headline(found):
        style = _style(f.state)
        table.add_row(
            f.name, quantity(f.before, f.before_error, f.unit), quantity(f.after, f.after_error, f.unit),
            Text(quantity(f.change, f.change_error, f.unit, signed=True), style=style),
            Text(percent(f.share), style=style), Text(STATES[f.state], style="dim"),
        )  # fmt: skip
    return table


def _style(state: str) -> str:
    return {"more": "red", "less": "green"}.get(state, "dim")


def _rows(found: Difference, top: int, width: int) -> Table:
    timed = math.isnan(found.total.change_j)
    shown, names = list(found.rows)[:top], shown_names(found)
    cells = [_cells(r, timed=timed) for r in shown]
    headings = ("before", "after", "change", "", *(() if timed else ("time",)))
    wide = sum(max(len(c[i].plain) for c in cells) + 2 for i in range(len(headings)))
    room = max(14, width - wide - 2)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    count = f" ({len(shown)} of {len(found.rows)})" if len(found.rows) > len(shown) else ""
    table.add_column(f"{TITLES.get(found.by, found.by)}{count}", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row, line in zip(shown, cells, strict=True):
        table.add_row(Text(fit(names[row.name], room)), *line, style="" if row_sure(row, timed=timed) else "dim")
    return table


def row_sure(row: Change, *, timed: bool) -> bool:
    """Whether a row changed by more than noise: in joules, in seconds where there are none."""
    return row.significant_s if timed else row.significant


def _cells(row: Change, *, timed: bool) -> list[Text]:
    if row.state == "unstated":
        sides = (row.before_s, row.after_s) if timed else (row.before_j, row.after_j)
        known = [Text("-" if math.isnan(v) else quantity(v, math.nan, "s" if timed else "J")) for v in sides]
        return [*known, Text("-"), Text(percent(None, state=row.state)), *([] if timed else [Text("")])]
    sure = row_sure(row, timed=timed)
    change = row.change_s if timed else row.change_j
    style = ("red" if change > 0 else "green") if sure else "dim"
    share = percent(row.share_s if timed else row.share_j, state=row.state) + ("" if sure else " ~")
    if timed:
        numbers = [quantity(v, math.nan, "s") for v in (row.before_s, row.after_s)]
        moved = Text(quantity(row.change_s, row.error_s, "s", signed=True), style=style)
        return [*(Text(n) for n in numbers), moved, Text(share, style=style)]
    numbers = [format_energy(v, 3) if not math.isnan(v) else "-" for v in (row.before_j, row.after_j)]
    moved = Text(quantity(row.change_j, row.error_j, "J", signed=True), style=style)
    took = Text(percent(row.share_s, state=row.state), style="dim")
    return [*(Text(n) for n in numbers), moved, Text(share, style=style), took]


def _hanging(*lines: tuple[Text, Text]) -> Table:
    """Lines that go on below their own text, not below the word before it."""
    table = plain_table()
    for head, said in lines:
        table.add_row(head, said)
    return table


def _verdict(verdict: Verdict) -> Table:
    style = (
        "bold red" if verdict.failed else "bold green" if verdict.significant and (verdict.share or 0) < 0 else "bold"
    )
    head = "FAILED" if verdict.failed else "verdict"
    said = Text(f"{head:<7}", style="not dim bold red" if verdict.failed else "")
    return _hanging((said, Text(verdict.text, style=style)))
