"""Two runs compared, as Markdown for the summary of a CI job."""

from __future__ import annotations

from ..analyze.diff import Difference, DiffVerdict
from ..analyze.kernel_names import fit, printable
from .diff import STATES, about, all_notes, headline, percent, quantity, row_figures
from .energy import TITLES
from .html import capitalize

TOP = 8


def markdown(difference: Difference, verdict: DiffVerdict) -> str:
    """Return the verdict, the totals, and the rows that changed by more than noise."""
    is_worse = verdict.significant and (verdict.share or 0.0) > 0 and verdict.threshold is None
    mark = ":x: failed" if verdict.failed else ":warning:" if is_worse or not verdict.known else ":white_check_mark:"
    lines = [
        f"### Energy: {_cell(difference.before)} → {_cell(difference.after)}",
        f"**{mark} {_cell(capitalize(verdict.text))}.**",
        "",
        "| | before | after | change | | |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for f in headline(difference):
        before, after = quantity(f.before, f.before_error, f.unit), quantity(f.after, f.after_error, f.unit)
        change = quantity(f.change, f.change_error, f.unit, signed=True)
        lines.append(f"| {f.name} | {before} | {after} | {change} | {percent(f.share)} | {STATES[f.state]} |")
    lines += _rows(difference)
    return "\n".join([*lines, "", _cell(about(difference)), *(f"- {_cell(n)}" for n in all_notes(difference)), ""])


def _rows(difference: Difference) -> list[str]:
    changed = [f for f in row_figures(difference) if f.row.state != "unstated" and f.is_sure][:TOP]
    if not changed:
        return []
    lines = ["", f"| {TITLES[difference.by]} | before | after | change | |", "|---|--:|--:|--:|--:|"]
    return lines + [f"| {' | '.join((_cell(fit(f.name, 60)), *f.texts))} |" for f in changed]


def _cell(text: str) -> str:
    """Return text of a run or a trace without effect: no markup, no links, no line breaks, no new cell."""
    return "".join(f"&#{ord(c)};" if c in "<>&|`*_[]\\~@#" else c for c in printable(text))
