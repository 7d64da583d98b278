"""`analyze.diff`: what changed between two runs, predictions or a run and its prediction, and whether it is noise.

::

    a, b ──► Sides (compare.py) ──► like with like (per_unit.py) ──► rows by name, or by kind of operator (matching.py)
                                                               └──► total: |change| > its 90% half-width?

The half-width of a difference is that of both sides in quadrature, without what they have in common: sides that the
same sensors measured (or the same model gave) are off by one factor, and so is their difference. Two predictions for
one chip err alike where their kernels are alike (`prediction_errors.py`). Of steps it contains how they scatter, of
every row how that row does; of several runs, how those do (`repeats.py`). Two runs without steps, each
measured once, have none, and nothing is said of noise then: the sensor's error is not how a program scatters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ArgumentError, MissingExtra
from ..schema import EnergyDiff
from ..units import format_energy, format_share
from . import repeats
from .compare import side_of
from .diff_notes import REPEAT, other_commands, other_machine, told
from .diff_rows import Change, Lines, common
from .matching import aligned
from .mean_step import counted
from .per_unit import amount, outside_of, rows_of, span_of, total_of, unit_of
from .side import UNSTATED, Cell, Side, Span

VIEWS = ("ops", "kernels", "regions", "modules")
OUTSIDE = "outside these steps"
Metric = Literal["energy", "time"]
_NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the second is worse than the first by more than a threshold, and whether that is more than noise.

    Not `known`: whether it is noise cannot be told, and `failed` is False.
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
    `runs` counts the runs of either side. A row that one side does not tell apart ("unstated": the idle of a run beside
    a prediction) has no change, and is no part of such a sum. `matched` is the share of each side's joules (seconds,
    without power) in rows that both sides have, `views` what rows of both there are; `common` the share by which both
    are off together.
    """

    by: str
    per: str
    whole: Change
    total: Change
    subgraphs: Sequence[Change]
    basis: tuple[str, str] = ("measured", "measured")
    work: tuple[float, float] = (1.0, 1.0)
    matched: tuple[float, float] = (1.0, 1.0)
    notes: Sequence[str] = ()
    views: Sequence[str] = ()
    common: float = 0.0
    runs: tuple[int, int] = (1, 1)
    span: Span = "run"
    outside: Change | None = None
    commands_differ: bool = False

    @property
    def rows(self) -> Sequence[Change]:
        """The lines, those that changed most first."""
        return self.subgraphs

    @property
    def significant(self) -> bool:
        """Whether the total joules changed by more than noise."""
        return self.total.significant

    def verdict(self, metric: Metric | None = None, fail_above: float | None = None) -> Verdict:
        """Whether `after` is worse: by more than `fail_above` (a share) and more than noise.

        Of energy unless "time" is asked for, or joules are not known of both.
        """
        metric = metric or ("time" if math.isnan(self.total.change_j) else "energy")
        share = self.total.share_j if metric == "energy" else self.total.share_s
        sure = self.total.significant if metric == "energy" else self.total.significant_s
        above = fail_above is not None and share is not None and share > fail_above
        wide = self.total.error_j if metric == "energy" else self.total.error_s
        return Verdict(
            metric=metric, share=share, threshold=fail_above, significant=sure, failed=above and sure,
            text=told(self, metric, share, sure, fail_above), known=not math.isnan(wide),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        plain = {
            n: getattr(self, n) for n in ("before", "after", "by", "per", "span", "significant", "commands_differ")
        }
        lists = {n: list(getattr(self, n)) for n in ("basis", "work", "runs", "matched", "notes")}
        rows = {n: [r.to_json() for r in found] for n, found in (("components", self._parts), ("rows", self.rows))}
        sums = {n: None if c is None else c.to_json() for n, c in self._sums().items()}
        return {**plain, **lists, **sums, **rows}

    def _sums(self) -> dict[str, Change | None]:
        return {"total": self.total, "whole": self.whole, "outside": self.outside}

    @property
    def _parts(self) -> list[Change]:
        return [c for c in self.components if isinstance(c, Change)]

    def to_frame(self) -> Any:
        """A pandas DataFrame of the rows."""
        try:
            import pandas as pd
        except ImportError as exc:
            raise MissingExtra("pandas", "frame", "analyze.diff(...).to_frame") from exc
        return pd.DataFrame([r.to_json() for r in self.rows], columns=list(self.total.to_json()))

    def __str__(self) -> str:
        from ..report.diff import text

        return text(self)

    def _repr_html_(self) -> str:
        from ..report.diff_html import card

        return card(self)


def diff(a: Any, b: Any, *, by: str = "ops", power_a: Any = None, power_b: Any = None) -> Difference:
    """What changed from `a` to `b` in joules and seconds: in all, per step, by row, with intervals.

    >>> analyze.diff("before.tessera", "after.tessera", by="kernels")
    >>> analyze.diff(["b1.json", "b2.json", "b3.json"], ["n1.json", "n2.json", "n3.json"])

    Each is a run file, a session, a trace (`power_a`, `power_b` beside it), an `EnergyTable`, an `EnergyReport`
    (measured or predicted), or the JSON that `tessera predict`, `measure`, `run` or `report` printed; or a list of
    several runs of one program, whose scatter then decides what is noise. Where all did steps (or samples, tokens),
    everything is per step. A prediction's subgraphs are matched with a run's operators by name, then by kind, and
    `matched` says how much of the joules that reaches.
    """
    if by not in VIEWS:
        raise ArgumentError(f"there is no view {by!r}", fix=f"one of: {', '.join(VIEWS)}")
    before, after = _sides(a, power_a, "before"), _sides(b, power_b, "after")
    sides, one, two = [*before, *after], before[0], after[0]
    notes = list(dict.fromkeys(n for side in sides for n in side.notes))
    unit = unit_of(sides, notes)
    span = "run" if unit else span_of(sides)
    view = _view(sides, by, notes)
    line = Lines.of_sides(sides)
    total = line.of_runs("total", *([total_of(side, unit, span) for side in group] for group in (before, after)))
    rows = line.rows(*_rows(before, after, unit, view, span, notes))
    stepped = unit == "step" and one.steps and two.steps
    changed = other_commands(one.command, two.command)
    notes = _noted(sides, unit, line, rows, notes, alone=total.significant and len(sides) == 2)
    moved = [] if changed or one.predicted or two.predicted else other_machine(rows, view)
    notes = [*changed, *moved, *notes]
    amounts = (amount(one, unit), amount(two, unit))
    return Difference(
        before=_named(before), after=_named(after), by=view, per=unit or "run", span=span, total=total,
        whole=line.of_runs("whole run", *([side.total for side in group] for group in (before, after))),
        outside=line.of_runs(OUTSIDE, *([outside_of(side) for side in group] for group in (before, after)))
        if stepped else None,
        components=_components(one, two, amounts, total), subgraphs=rows, basis=(one.basis, two.basis), work=amounts,
        runs=(len(before), len(after)), matched=_matched(rows), notes=tuple(notes), note="; ".join(notes),
        views=tuple(v for v in VIEWS if all(side.views.get(v) for side in sides)), common=line.gain,
        commands_differ=bool(changed),
    )  # fmt: skip


# -- what is compared -----------------------------------------------------------------------------------------------


def _sides(given: Any, power: Any, name: str) -> list[Side]:
    """One thing, or several runs of one program."""
    several = list(given) if isinstance(given, (list, tuple)) else [given]
    if not several:
        raise ArgumentError(f"there is nothing {name}", fix="give at least one run of each")
    found = [side_of(one, power, name) for one in several]
    if len({side.predicted for side in found}) > 1:
        raise ArgumentError(f"runs and predictions are mixed in what is {name}", fix="give runs, or one prediction")
    return found


def _named(sides: Sequence[Side]) -> str:
    return sides[0].name if len(sides) == 1 else f"{sides[0].name}, {len(sides)} runs"


def _rows(
    before: Sequence[Side], after: Sequence[Side], unit: str | None, view: str, span: Span, notes: list[str]
) -> tuple[Mapping[str, Cell], Mapping[str, Cell]]:
    """The rows of both, under one name where one of them is a prediction."""
    sides = [*before, *after]
    if not all(side.views.get(view) for side in sides):  # everything would be new, or gone
        return {}, {}
    lacking = [side for side in sides if side.steps and side.stepped is None]
    if unit == "step" and lacking:
        notes.append(f"{lacking[0].name} has rows of all that was traced, not by step: rows are scaled to a step")
    found = [[rows_of(side, unit, view, span, by_step=not lacking) for side in group] for group in (before, after)]
    left, right = repeats.rows(*found)
    if view != "ops" or before[0].predicted == after[0].predicted:
        return left, right
    meant, ran = aligned(left, right) if before[0].predicted else aligned(right, left)
    if "idle" in ran:  # a prediction's operators hold what the chip draws while it waits
        meant = {"idle": UNSTATED, **meant}
    return (meant, ran) if before[0].predicted else (ran, meant)


def _noted(
    sides: Sequence[Side], unit: str | None, line: Lines, rows: Sequence[Change], notes: list[str], *, alone: bool
) -> list[str]:
    """All notes, those first that change how a number is read. `alone`: one run each is said to differ."""
    one, two = sides[0], sides[-1]
    _, said = common(sides)
    if line.same:
        said = ["one model predicted both: what it errs alike for both is in each ± and cancels in the change"]
    if alone and not (one.predicted or two.predicted):
        said.insert(0, f"the ± is by steps within one run each; what differs from run to run, repeats show: {REPEAT}")
    first = [
        *_batches(one, two, unit),
        *said,
        *_first(sides, unit),
        *_unstated(one, two, rows),
        *([] if unit else _uneven(one, two)),
    ]
    return list(dict.fromkeys([*first, *notes]))


def _batches(one: Side, two: Side, unit: str | None) -> list[str]:
    """Steps of different size are no change of the program."""
    if unit != "step":
        return []
    for other in [u for u in one.work if u != "step" and one.work[u] > 0 and two.work.get(u, 0) > 0]:
        a, b = (side.work[other] / side.work["step"] for side in (one, two))
        if abs(a - b) > 0.01 * max(a, b):
            each = [side.total.energy_j / side.work[other] for side in (one, two)]
            said = [format_energy(joules, 3) for joules in each if joules > 0]  # NaN is not
            per = f"; per {other} {said[0]} before and {said[1]} after" if len(said) == 2 else ""
            per += f" ({format_share(each[1] / each[0] - 1.0, signed=True)})" if per else ""
            return [f"a step has {a:,.6g} {other}s before and {b:,.6g} after: steps are not the same work{per}"]
    return []


def _first(sides: Sequence[Side], unit: str | None) -> list[str]:
    """Which steps are left out, and why."""
    found = [(side.name, counted(side.steps).left_out) for side in sides if side.steps] if unit == "step" else []
    return [f"{name}: {said}" for name, said in found if said]


def _unstated(one: Side, two: Side, rows: Sequence[Change]) -> list[str]:
    """Why a row has no change."""
    name = one.name if one.predicted else two.name
    why = "its operators hold what the chip draws while it waits, so idle is neither new nor gone"
    return [f"{name} states no idle: {why}" for r in rows if r.state == "unstated"]


def _uneven(one: Side, two: Side) -> list[str]:
    if one.predicted == two.predicted and one.work == two.work:
        return []
    lacking = [s.name for s in (one, two) if not s.work] or ["either"]
    return [f"not per step: {' and '.join(lacking)} has no steps or other work that both did"]


def _view(sides: Sequence[Side], by: str, notes: list[str]) -> str:
    """The view asked for, where all have it; else one that all have."""
    if all(side.views.get(by) for side in sides):
        return by
    other = next((v for v in VIEWS if all(side.views.get(v) for side in sides)), None)
    lacking = list(dict.fromkeys(side.name for side in sides if not side.views.get(by)))
    who = "neither side has" if all(not side.views.get(by) for side in sides) else f"{lacking[0]} has no"
    what = f"{who} {by}"
    if other is not None:
        notes.append(f"{what}: rows are {other}")
        return other
    notes.append(f"{what}: only the total can be compared")
    return by


def _components(one: Side, two: Side, amounts: tuple[float, float], total: Change) -> list[Change]:
    """Compute, memory and static joules of two predictions; their half-widths are the total's, by share."""
    whole = max(total.before_j + total.after_j, 1e-30)
    out = []
    for name in one.components.keys() & two.components.keys():
        a, b = one.components[name] / amounts[0], two.components[name] / amounts[1]
        wide = math.sqrt(max((a + b) / whole, 0.0) / 2.0) * total.error_j  # of each side; in quadrature the share's
        out.append(Lines().of(name, Cell(a, wide, 0.0, _NAN, 1.0), Cell(b, wide, 0.0, _NAN, 1.0)))
    return sorted(out, key=lambda c: ("compute", "memory", "static").index(c.name))


def _matched(rows: Iterable[Change]) -> tuple[float, float]:
    shares = []
    for side in ("before", "after"):
        known = [(getattr(r, f"{side}_j"), getattr(r, f"{side}_s"), r.state) for r in rows]
        weights = [0.0 if state == "unstated" and math.isnan(s) else s if math.isnan(j) else j for j, s, state in known]
        both = math.fsum(w for w, (_, _, state) in zip(weights, known, strict=True) if state == "both")
        whole = math.fsum(weights)
        shares.append(both / whole if whole > 0 else 0.0)
    return shares[0], shares[1]
