"""Two runs compared, as Markdown for the summary of a CI job."""

from __future__ import annotations

import math

from ..analyze.diff import Difference, DiffVerdict
from ..analyze.kernel_names import fit
from .diff import STATES, about, all_notes, display_names, headline, is_significant, percent, quantity
from .energy import TITLES
from .html import capitalize

TOP = 8


def markdown(difference: Difference, verdict: DiffVerdict) -> str:
    """The verdict, the totals, and the rows that changed by more than noise."""
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
    timed, names = math.isnan(difference.total.change_j), display_names(difference)
    changed = [r for r in difference.rows if r.state != "unstated" and is_significant(r, timed=timed)][:TOP]
    if not changed:
        return []
    lines = ["", f"| {TITLES.get(difference.by, difference.by)} | before | after | change | |", "|---|--:|--:|--:|--:|"]
    for r in changed:
        unit = "s" if timed else "J"
        both = (r.before_s, r.after_s) if timed else (r.before_j, r.after_j)
        change = quantity(r.change_s if timed else r.change_j, r.error_s if timed else r.error_j, unit, signed=True)
        share = percent(r.share_s if timed else r.share_j, state=r.state)
        before, after = (quantity(v, math.nan, unit) for v in both)
        lines.append(f"| {_cell(fit(names[r.name], 60))} | {before} | {after} | {change} | {share} |")
    return lines


def _cell(text: str) -> str:
    """Text of a run or a trace as text: no markup, no links, no line breaks, no new cell."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return "".join(f"&#{ord(c)};" if c in "<>&|`*_[]\\~@#" else c for c in plain)
