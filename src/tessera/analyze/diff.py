"""`analyze.diff`: what changed between two runs, predictions or a run and its prediction, and whether it is noise.

::

    a, b ──► Sides (compare.py) ──► same amount of work (sides.py) ──► rows by name, or by kind of operator
                                                                     └──► total: |change| > its 90% half-width?

The half-width of a difference is that of both sides in quadrature, without what they have in common. Sides that the
same sensors measured (or the same model predicted) are off by one factor. Their difference is off by the same factor,
and keeps its sign and percentage (`common` is that factor's error). Two predictions for one chip have the same errors
where their kernels are the same (`sides.py`). With steps it contains how they scatter, for every row how that row does;
with several runs, how those do (`mean_step.py`). Two runs without steps, each measured once, have none. Then the noise
is unknown: the sensor's error does not tell how much a program scatters.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..attribute.table import IDLE_NAMES
from ..errors import ArgumentError, check_choice
from ..schema import EnergyDiff
from ..units import format_duration, format_energy, format_share
from .compare import side_of, split_runs
from .diff_rows import ROUNDING, ChangeMaker, RowChange, align_rows, find_common_error, find_load, mean_rows
from .kernel_names import fit
from .mean_step import select_steps
from .passes import compare_chips, count_passes
from .result import encode_json, make_frame
from .sides import UNSTATED, Cell, DiffSide, Span, amount, choose_steps, outside_of, rows_of, span_of, total_of, unit_of

VIEWS = ("ops", "kernels", "regions", "modules")
OUTSIDE = "outside these steps"
REPEAT = "tessera diff A1 A2 A3 -- B1 B2 B3"
"""How several runs of each side are given."""
Metric = Literal["energy", "time"]
_NAN = float("nan")
# The machine may have changed if this share of rows, and of their seconds, moves by at least this factor; fewer than
# _ENOUGH rows show nothing.
_NEARLY, _MOVED, _ENOUGH = 0.8, 1.2, 8
_LONGEST = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffVerdict:
    """Whether the second is worse than the first by more than a threshold, and whether that is more than noise.

    If not `known`, the measurements cannot show whether it is noise, and `failed` is False.
    """

    metric: Metric
    share: float | None
    threshold: float | None
    significant: bool
    failed: bool
    text: str
    known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(EnergyDiff):
    """Two sides. `total` and the rows are per unit of `per` ("step", "sample", or "run"); `whole` is never scaled.

    Rows are those that changed most first. Operators and kernels sum to the total; per step, `outside` is what the
    runs spent outside the steps compared, in all. `span` says what `per` "run" is: whole runs, or the "trace" of each.
    `runs` counts the runs of either side. A row that one side does not state ("unstated": the idle of a run beside a
    prediction) has no change, and is not part of such a sum. `matched` is the share of each side's joules (seconds,
    without power) in rows that both sides have, `views` which rows both have; `common` the share by which both are off
    together.
    """

    by: str
    per: str
    whole: RowChange
    total: RowChange
    subgraphs: Sequence[RowChange]
    basis: tuple[str, str] = ("measured", "measured")
    work: tuple[float, float] = (1.0, 1.0)
    matched: tuple[float, float] = (1.0, 1.0)
    notes: Sequence[str] = ()
    views: Sequence[str] = ()
    common: float = 0.0
    runs: tuple[int, int] = (1, 1)
    span: Span = "run"
    outside: RowChange | None = None
    commands_differ: bool = False

    @property
    def rows(self) -> Sequence[RowChange]:
        """Return the lines, those that changed most first."""
        return self.subgraphs

    @property
    def significant(self) -> bool:
        """Return whether the total joules changed by more than noise."""
        return self.total.significant

    def verdict(self, metric: Metric | None = None, fail_above: float | None = None) -> DiffVerdict:
        """Return whether `after` is worse: by more than `fail_above` (a share) and more than noise.

        By energy, unless "time" is asked for or the joules of one side are not known.
        """
        metric = metric or ("time" if math.isnan(self.total.change_j) else "energy")
        is_energy = metric == "energy"
        share = self.total.share_j if is_energy else self.total.share_s
        is_sure = self.total.significant if is_energy else self.total.significant_s
        is_above = fail_above is not None and share is not None and share > fail_above
        return DiffVerdict(
            metric=metric,
            share=share,
            threshold=fail_above,
            significant=is_sure,
            failed=is_above and is_sure,
            text=_describe_change(self, metric, share, is_sure, fail_above),
            known=not math.isnan(self.total.error_j if is_energy else self.total.error_s),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        plain = ("before", "after", "by", "per", "span", "significant", "commands_differ")
        data: dict[str, Any] = {name: getattr(self, name) for name in plain}
        data |= {name: list(getattr(self, name)) for name in ("basis", "work", "runs", "matched")}
        data["notes"] = [str(note) for note in self.notes]
        data |= {"total": self.total.to_dict(), "whole": self.whole.to_dict()}
        data["outside"] = None if self.outside is None else self.outside.to_dict()
        data["components"] = [c.to_dict() for c in self.components if isinstance(c, RowChange)]
        return data | {"rows": [r.to_dict() for r in self.rows]}

    def to_json(self) -> str:
        """Return the difference as JSON."""
        return encode_json(self.to_dict())

    def to_frame(self) -> Any:
        """Return a pandas DataFrame of the rows."""
        return make_frame([r.to_dict() for r in self.rows], list(self.total.to_dict()), "analyze.diff(...).to_frame")

    def __repr__(self) -> str:
        return f"<Difference {self.before} → {self.after}: {self.verdict().text}>"

    def __str__(self) -> str:
        from ..report.diff import text

        return text(self)

    def _repr_html_(self) -> str:
        from ..report.diff_html import diff_card

        return diff_card(self)


def diff(a: Any, b: Any, *, by: str = "ops", power_a: Any = None, power_b: Any = None) -> Difference:
    """Return what changed from `a` to `b` in joules and seconds: in all, per step, by row, with intervals.

    >>> analyze.diff("before.tessera", "after.tessera", by="kernels")
    >>> analyze.diff(["b1.json", "b2.json", "b3.json"], ["n1.json", "n2.json", "n3.json"])

    Each is a run file, a session, a trace (`power_a`, `power_b` beside it), an `EnergyTable`, an `EnergyReport`
    (measured or predicted), or the JSON that `tessera predict`, `measure`, `run` or `report` printed; or a list of
    several runs of one program, whose scatter then decides what is noise. Where all did steps (or samples, tokens),
    everything is per step. A prediction's subgraphs are matched with a run's operators by name, then by kind, and
    `matched` says how much of the joules that reaches.
    """
    check_choice("by", by, VIEWS)
    before, after = _read_sides(a, power_a, "before"), _read_sides(b, power_b, "after")
    notes = list(dict.fromkeys(n for side in (*before, *after) for n in side.notes))
    before, after = count_passes(before, after, notes)
    unit = unit_of([*before, *after], notes)
    of_steps: list[str] = []
    sides = choose_steps([*before, *after], of_steps)
    before, after = sides[: len(before)], sides[len(before) :]
    groups, one, two = (before, after), before[0], after[0]
    span = "run" if unit else span_of(sides)
    view = _choose_view(sides, by, notes)
    maker = ChangeMaker.of_sides(before, after)
    total = maker.from_runs("total", *([total_of(side, unit, span) for side in group] for group in groups))
    rows = maker.rows(*_match_rows(before, after, unit, view, span, notes))
    outside = None
    if unit == "step" and one.has_steps and two.has_steps:
        outside = maker.from_runs(OUTSIDE, *([outside_of(side) for side in group] for group in groups))
    commands = _compare_commands(one.command, two.command)
    is_prediction = one.is_prediction or two.is_prediction
    commands = [*compare_chips(one, two), *commands]
    machine = find_load(before, after)[1] or ([] if commands or is_prediction else _suspect_machine(rows, view))
    alone = total.significant and len(sides) == 2 and not is_prediction
    notes = [*commands, *machine, *_order_notes(sides, unit, maker, rows, notes, alone=alone)]
    notes = [*of_steps, *notes] if unit == "step" else notes  # for whole runs no step is compared
    amounts = (amount(one, unit), amount(two, unit))
    return Difference(
        before=_name(before),
        after=_name(after),
        by=view,
        per=unit or "run",
        span=span,
        total=total,
        whole=maker.from_runs("whole run", *([side.total for side in group] for group in groups)),
        outside=outside,
        components=_compare_components(one, two, amounts, total),
        subgraphs=rows,
        basis=(one.basis, two.basis),
        work=amounts,
        runs=(len(before), len(after)),
        matched=_matched_shares(rows),
        notes=tuple(notes),
        note="; ".join(notes),
        views=tuple(v for v in VIEWS if all(side.views.get(v) for side in sides)),
        common=maker.gain,
        commands_differ=bool(_compare_commands(one.command, two.command)),
    )


# -- what is compared -----------------------------------------------------------------------------------------------


def _read_sides(given: Any, power: Any, name: str) -> list[DiffSide]:
    """Read one thing, or several runs of one program."""
    several = [run for one in (given if isinstance(given, (list, tuple)) else [given]) for run in split_runs(one)]
    if not several:
        raise ArgumentError(f"there is nothing {name}", fix="give at least one run of each")
    sides = [side_of(one, power, name) for one in several]
    if len({side.is_prediction for side in sides}) > 1:
        raise ArgumentError(f"runs and predictions are mixed in what is {name}", fix="give runs, or one prediction")
    return sides


def _name(sides: Sequence[DiffSide]) -> str:
    return sides[0].name if len(sides) == 1 else f"{sides[0].name}, {len(sides)} runs"


def _match_rows(
    before: Sequence[DiffSide], after: Sequence[DiffSide], unit: str | None, view: str, span: Span, notes: list[str]
) -> tuple[Mapping[str, Cell], Mapping[str, Cell]]:
    """Return the rows of both, under common names if one of them is a prediction."""
    sides = [*before, *after]
    if not all(side.views.get(view) for side in sides):  # otherwise every row would be new or gone
        return {}, {}
    if unit == "step" and any(side.has_steps and not side.steps for side in sides):
        return {}, {}
    lacking = [side for side in sides if side.steps and side.stepped is None]
    if unit == "step" and lacking:
        notes.append(f"{lacking[0].name} has rows of all that was traced, not by step: rows are scaled to a step")
    rows = [[rows_of(side, unit, view, span, by_step=not lacking) for side in group] for group in (before, after)]
    left, right = mean_rows(*rows)
    if view != "ops" or before[0].is_prediction == after[0].is_prediction:
        return left, right
    predicted, measured = align_rows(left, right) if before[0].is_prediction else align_rows(right, left)
    # A prediction's operators include what the chip draws while it waits.
    predicted = {**{name: UNSTATED for name in IDLE_NAMES if name in measured}, **predicted}
    return (predicted, measured) if before[0].is_prediction else (measured, predicted)


def _choose_view(sides: Sequence[DiffSide], by: str, notes: list[str]) -> str:
    """Return the view asked for if all have it; else one that all have."""
    lacking = list(dict.fromkeys(side.name for side in sides if not side.views.get(by)))
    if not lacking:
        return by
    who = f"{lacking[0]} has no" if any(side.views.get(by) for side in sides) else "neither side has"
    other = next((v for v in VIEWS if all(side.views.get(v) for side in sides)), None)
    notes.append(f"{who} {by}: {'only the total can be compared' if other is None else f'rows are {other}'}")
    return other or by


def _compare_components(
    one: DiffSide, two: DiffSide, amounts: tuple[float, float], total: RowChange
) -> list[RowChange]:
    """Compare compute, memory and static joules of two predictions; half-widths are the total's, by share."""
    whole = max(total.before_j + total.after_j, 1e-30)
    changes = []
    for name in ("compute", "memory", "static"):
        if name not in one.components or name not in two.components:
            continue
        a, b = one.components[name] / amounts[0], two.components[name] / amounts[1]
        # error of each side; the share's is in quadrature
        error_j = math.sqrt(max((a + b) / whole, 0.0) / 2.0) * total.error_j
        cells = (Cell(joules, error_j, 0.0, _NAN, 1.0) for joules in (a, b))
        changes.append(ChangeMaker().make(name, *cells))
    return changes


def _matched_shares(rows: Iterable[RowChange]) -> tuple[float, float]:
    shares = []
    for side in ("before", "after"):
        values = [(getattr(r, f"{side}_j"), getattr(r, f"{side}_s"), r.state) for r in rows]
        weights = [
            0.0 if state == "unstated" and math.isnan(s) else s if math.isnan(j) else j for j, s, state in values
        ]
        both = math.fsum(w for w, (_, _, state) in zip(weights, values, strict=True) if state == "both")
        whole = math.fsum(weights)
        shares.append(both / whole if whole > 0 else 0.0)
    return shares[0], shares[1]


# -- in words -------------------------------------------------------------------------------------------------------


def _describe_change(
    found: Difference, metric: Metric, share: float | None, is_sure: bool, fail_above: float | None
) -> str:
    """Return what changed by how much, and whether that is noise."""
    t, energy = found.total, metric == "energy"
    change, error = (t.change_j, t.error_j) if energy else (t.change_s, t.error_s)
    before, after = (t.before_j, t.after_j) if energy else (t.before_s, t.after_s)
    show = format_energy if energy else format_duration
    limit = "" if fail_above is None else format_share(fail_above)
    if math.isnan(change):
        return f"{'joules' if energy else 'seconds'} are not known for both: {metric} cannot be compared"
    per = "" if found.per == "run" else f" per {found.per}"
    blind = ""
    if before > 0 and error >= 0.005 * before:  # false for NaN
        blind = f" (changes under {format_share(error / before)} cannot be detected)"
    if abs(change) <= ROUNDING * max(abs(before), abs(after)):
        return f"no change: {show(after, 3)}{per} in both{blind}"
    size = "from nothing" if share is None else format_share(abs(share))
    text = f"{show(abs(change), 3)} ({size}) {'more' if change > 0 else 'less'} {metric}{per}"
    if math.isnan(error):
        ignored = f"; the limit of {limit} was not applied" if limit else ""
        unknown = f"unknown: each was measured once, and {text} may be noise{ignored}"
        return f"{unknown}. Record steps, or repeat both: {REPEAT}"
    by = ""
    if "predicted" not in found.basis:
        a, b = found.runs
        by = ", from the steps of one run each" if max(a, b) == 1 else f", from {a} and {b} runs"
    interval = f"90% interval ± {show(error, 2)}{by}"
    if not is_sure:
        passed = f"; passed: only a change that is more than noise can fail the limit of {limit}" if limit else ""
        return f"{text}: noise, within its {interval}{blind}{passed}"
    side = (
        f"; {'above' if share > fail_above else 'within'} the limit of {limit}"
        if fail_above is not None and share is not None
        else ""
    )
    other = "; but the commands differ, see the note" if found.commands_differ else ""
    alone = "; one run of each: repeat both before you trust this" if by and max(found.runs) == 1 else ""
    return f"{text}, more than noise ({interval}){side}{other}{alone}"


def _order_notes(
    sides: Sequence[DiffSide],
    unit: str | None,
    maker: ChangeMaker,
    rows: Sequence[RowChange],
    notes: list[str],
    *,
    alone: bool,
) -> list[str]:
    """Return all notes; first those that change how a number is read. `alone`: one run of each side is compared."""
    one, two = sides[0], sides[-1]
    first = _compare_batches(one, two, unit)
    if one.from_start != two.from_start and not one.is_prediction and not two.is_prediction:
        first.append("`tessera measure` counts the interpreter's start; a recorded run begins with its script")
    if alone:
        first.append(f"± covers variation between steps only; to include variation between runs, repeat each: {REPEAT}")
    if maker.same:
        shared = "the ± of before and after contains the error that both share, the ± of a change does not"
        first.append(f"one model predicted both: {shared}")
    else:
        first += find_common_error(sides)[1]
    if unit == "step":
        dropped = [(side.name, select_steps(side.steps).left_out) for side in sides if side.steps]
        first += [f"{name}: {text}" for name, text in dropped if text]
    if any(r.state == "unstated" for r in rows):
        why = "its operators contain what the chip draws while it waits, so idle is neither new nor gone"
        first.append(f"{one.name if one.is_prediction else two.name} states no idle: {why}")
    if not unit and (one.is_prediction != two.is_prediction or one.work != two.work):
        lacking = [s.name for s in (one, two) if not s.work] or ["either"]
        first.append(f"not per step: {' and '.join(lacking)} has no steps or other work that both did")
    return list(dict.fromkeys([*first, *notes]))


def _compare_batches(one: DiffSide, two: DiffSide, unit: str | None) -> list[str]:
    """Return a note if steps have different sizes, which is not a change of the program."""
    if unit != "step":
        return []
    for other in [u for u in one.work if u != "step" and one.work[u] > 0 and two.work.get(u, 0) > 0]:
        a, b = (side.work[other] / side.work["step"] for side in (one, two))
        if abs(a - b) > 0.01 * max(a, b):
            before, after = (side.total.energy_j / side.work[other] for side in (one, two))
            per = ""
            if before > 0 and after > 0:  # false for NaN
                change = format_share(after / before - 1.0, signed=True)
                joules = [format_energy(j, 3) for j in (before, after)]
                per = f"; per {other} {joules[0]} before and {joules[1]} after ({change})"
            return [f"a step has {a:,.6g} {other}s before and {b:,.6g} after: steps are not the same work{per}"]
    return []


def _compare_commands(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return a note if two commands differ, with the arguments; nothing if one of them is not known."""
    before, after = _split_words(before), _split_words(after)
    one, two = _pair_options(before), _pair_options(after)
    # Counted, because an argument may be given twice, and its order does not matter.
    sides = (("before", (one - two).elements()), ("after", (two - one).elements()))
    texts = [f"{words} {when}" for when, extra in sides if (words := fit(" ".join(extra), _LONGEST))]
    if not one or not two or not texts or Counter(before) == Counter(after):
        return []
    only = "only " if len(texts) == 1 else ""
    return [f"the commands differ: {only}{', '.join(texts)}. The two runs may do different work per step"]


def _split_words(words: Sequence[str]) -> list[str]:
    """Return the words of a script's command, `--batch=64` as two, without the interpreter (a session has none)."""
    words = words[1:] if words and re.fullmatch(r"(?:.*/)?python[\d.]*", words[0]) else words
    return [part for w in words for part in (w.split("=", 1) if w.startswith("--") else [w])]


def _pair_options(words: Sequence[str]) -> Counter[str]:
    """Options with their values, and other words, each as often as it is there."""
    arguments: list[str] = []
    for word in words:
        if arguments and arguments[-1].startswith("-") and " " not in arguments[-1] and not word.startswith("-"):
            arguments[-1] += f" {word}"
        else:
            arguments.append(word)
    return Counter(arguments)


def _suspect_machine(rows: Sequence[RowChange], by: str) -> list[str]:
    """Return a note if nearly all rows moved the same way with equal counts of calls: the machine may have changed."""
    timed = [r for r in rows if r.state == "both" and r.kind != "idle" and r.before_s > 0 and r.after_s > 0]
    same_calls = [r for r in timed if abs(r.before_calls - r.after_calls) <= 0.01 * r.before_calls]
    whole_s = sum(r.before_s + r.after_s for r in timed)  # of both sides, because one row may have stalled in either
    if len(timed) < _ENOUGH or len(same_calls) < _NEARLY * len(timed):
        return []
    slower = [r for r in same_calls if r.after_s > _MOVED * r.before_s]
    faster = [r for r in same_calls if r.before_s > _MOVED * r.after_s]
    for moved, way in ((slower, "slower"), (faster, "faster")):
        if len(moved) < _NEARLY * len(timed) or sum(r.before_s + r.after_s for r in moved) < _NEARLY * whole_s:
            continue
        factors = sorted(max(r.after_s / r.before_s, r.before_s / r.after_s) for r in moved)
        low, high = factors[len(factors) // 4], factors[-1 - len(factors) // 4]
        return [
            f"{len(moved)} of {len(timed)} {by} were {way}, half of them {low:.2g} to {high:.2g} times, with as many "
            "calls: the machine (its clock, other programs on it) or the size of the inputs may have changed, rather "
            f"than the code. Repeat both in turn: {REPEAT}"
        ]
    return []
