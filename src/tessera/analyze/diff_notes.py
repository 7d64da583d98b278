"""What is said of a difference, each in one sentence."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..hardware import lookup
from ..units import format_duration, format_energy, format_power, format_share
from .diff_rows import ROUNDING, Change
from .kernel_names import fit
from .prediction_errors import watts_error

if TYPE_CHECKING:
    from ..schema import EnergyReport
    from .diff import Difference, Metric

# A machine that changed moves this share of rows, of their seconds too, by at least this factor; of a few rows nothing
# can be said.
_NEARLY, _MOVED, _ENOUGH = 0.8, 1.2, 8
_LONGEST = 60
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
    other = "; but the commands differ, see the note" if found.commands_differ else ""
    return f"{said}, more than noise ({wide}){limit}{other}"


def other_commands(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """That two commands differ, and in which arguments; nothing where one of them is not known."""
    before, after = _without_python(before), _without_python(after)
    if not before or not after or Counter(_parts(before)) == Counter(_parts(after)):
        return []
    one, two = _arguments(before), _arguments(after)
    # Counted: an argument may be given twice, and in another order it is the same.
    sides = ((one - two).elements(), (two - one).elements())
    found = [(fit(" ".join(words), _LONGEST), when) for words, when in zip(sides, ("before", "after"), strict=True)]
    said = [f"{words} {when}" for words, when in found if words]
    if not said:
        return []
    only = "only " if len(said) == 1 else ""
    return [f"the commands differ: {only}{', '.join(said)}. So both, and a step of both, may not be the same work"]


def _without_python(words: Sequence[str]) -> Sequence[str]:
    """A script's own words: `tessera run` records the interpreter, a session in the script does not."""
    return words[1:] if words and re.fullmatch(r"(?:.*/)?python[\d.]*", words[0]) else words


def _parts(words: Sequence[str]) -> list[str]:
    """`--batch=64` is `--batch 64`."""
    return [part for w in words for part in (w.split("=", 1) if w.startswith("--") else [w])]


def _arguments(words: Sequence[str]) -> Counter[str]:
    """Options with their values, and other words, each as often as it is there."""
    found: list[str] = []
    for word in _parts(words):
        if found and found[-1].startswith("-") and " " not in found[-1] and not word.startswith("-"):
            found[-1] += f" {word}"
        else:
            found.append(word)
    return Counter(found)


def other_machine(rows: Sequence[Change], by: str) -> list[str]:
    """Where nearly all rows moved the same way at the same count of calls, the machine may have changed."""
    known = [r for r in rows if r.state == "both" and r.kind != "idle" and r.before_s > 0 and r.after_s > 0]
    alike = [r for r in known if abs(r.before_calls - r.after_calls) <= 0.01 * r.before_calls]
    whole_s = sum(r.before_s + r.after_s for r in known)  # both: one row may have stalled in either
    if len(known) < _ENOUGH or len(alike) < _NEARLY * len(known):
        return []
    for slower in (True, False):
        moved = [r for r in alike if (r.after_s > _MOVED * r.before_s if slower else r.before_s > _MOVED * r.after_s)]
        if len(moved) < _NEARLY * len(known) or sum(r.before_s + r.after_s for r in moved) < _NEARLY * whole_s:
            continue
        factors = sorted(max(r.after_s / r.before_s, r.before_s / r.after_s) for r in moved)
        low, high = factors[len(factors) // 4], factors[-1 - len(factors) // 4]
        return [
            f"{len(moved)} of {len(known)} {by} were {'slower' if slower else 'faster'}, half of them {low:.2g} to "
            f"{high:.2g} times, with as many calls: the machine (its clock, other programs on it) or the size of the "
            f"inputs may have changed, rather than the code. Repeat both in turn: {REPEAT}"
        ]
    return []


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
