"""What is said of a difference, each in one sentence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..hardware import lookup
from ..units import format_duration, format_energy, format_power, format_share
from .alike import watts_error
from .line import ROUNDING

if TYPE_CHECKING:
    from ..schema import EnergyReport
    from .change import Difference, Metric

REPEAT = "tessera diff A1 A2 A3 -- B1 B2 B3"
"""How several runs of each are given."""


def told(found: Difference, metric: Metric, share: float | None, sure: bool, fail_above: float | None) -> str:
    """What changed by how much, and whether that is noise."""
    t, energy = found.total, metric == "energy"
    change, error = (t.change_j, t.error_j) if energy else (t.change_s, t.error_s)
    show = format_energy if energy else format_duration
    if math.isnan(change):
        return f"{'joules' if energy else 'seconds'} are not known of both: nothing can be said of {metric}"
    before, after = (t.before_j, t.after_j) if energy else (t.before_s, t.after_s)
    per = "" if found.per == "run" else f" per {found.per}"
    if abs(change) <= ROUNDING * max(abs(before), abs(after)):
        return f"no change: {show(after, 3)}{per} in both{_unseen(error, before)}"
    size = "from nothing" if share is None else format_share(abs(share))
    more = ("more" if change > 0 else "less") + (" energy" if energy else " time")
    said = f"{show(abs(change), 3)} ({size}) {more}{per}"
    if math.isnan(error):
        limit = "" if fail_above is None else f"; the limit of {format_share(fail_above)} was not applied"
        return f"unknown: measured once, and {said} may be noise{limit}. Record steps, or repeat both: {REPEAT}"
    wide = f"90% interval ± {show(error, 2)}{_of(found)}"
    if not sure:
        passed = (
            ""
            if fail_above is None
            else f"; passed: beyond {format_share(fail_above)} fails only what is more than noise"
        )
        return f"{said}: noise, it lies within its {wide}{_unseen(error, before)}{passed}"
    limit = ""
    if fail_above is not None and share is not None:
        limit = f"; {'above' if share > fail_above else 'within'} the limit of {format_share(fail_above)}"
    return f"{said}, more than noise ({wide}){limit}"


def _of(found: Difference) -> str:
    """What the interval is of, where runs were measured."""
    if "predicted" in found.basis:
        return ""
    return " by the steps of one run each" if max(found.runs) == 1 else f" by {found.runs[0]} and {found.runs[1]} runs"


def _unseen(error: float, before: float) -> str:
    """What a comparison cannot see, where that is worth a word."""
    if math.isnan(error) or not before > 0 or error < 0.005 * before:
        return ""
    return f" (it cannot see changes under {format_share(error / before)})"


def past_limit(report: EnergyReport) -> list[str]:
    """Where the ± of a predicted power reaches what the board cannot draw: that of joules and time knows no limiter."""
    of, total, error_w = report.prediction, report.total, watts_error(report)
    if of is None or error_w is None:
        return []
    try:
        limit = lookup(of.device).tdp_w
    except ArgumentError:  # predicted elsewhere, for a chip described there
        return []
    if limit is None or total.joules / total.seconds + error_w <= limit.value:
        return []
    return [
        f"the ± of the watts reaches past {format_power(limit.value)}, where the limiter holds {of.device}: "
        "only the part below is possible"
    ]
