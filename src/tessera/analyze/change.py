"""`analyze.diff`: what changed between two runs, predictions or a run and its prediction, and whether it is noise.

::

    a, b ──► Side (compare.py) ──► per step where both have steps ──► rows by name, or by kind of operator
                                                                 └──► total: |change| > its 90% half-width?

The half-width of a difference is that of both sides in quadrature, without what they have in common: sides that the
same sensors measured (or the same model gave) are off by one factor, and so is their difference. Two predictions for
one chip err alike where their kernels are alike (`alike.py`). Of steps it contains how they scatter, so that a second
run of the same program differs by less than it nine times of ten.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..attribute.table import EnergyRow
from ..errors import ArgumentError, MissingExtra
from ..graph.kinds import KINDS, kind_of
from ..monitor.steady import t90
from ..schema import DiffRow, EnergyDiff
from ..units import format_duration, format_energy
from . import alike
from .compare import ZERO, Cell, Side, side_of

VIEWS = ("ops", "kernels", "regions", "modules")
Metric = Literal["energy", "time"]
_NAN = float("nan")
# A first step this much dearer than the middle one compiles, and says nothing of the others (as in `answer`).
FIRST = 1.5
_ROUNDING = 1e-9  # as a share: less is no change
_ATTENTION = re.compile(
    r"(?:_?(?:scaled_dot_product|flash|efficient|cudnn|mem_eff)\w*attention\w*?|attention)(_backward)?$"
)
_CONVOLUTION = re.compile(r"_?(?:cudnn_|miopen_|mkldnn_)?convolution(?:_transpose|_overrideable)?(_backward)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(DiffRow):
    """One line: joules and seconds before and after, in the difference's unit, and the half-widths of their changes.

    What is not known is NaN: joules of a trace without power, the scatter of a single measured run.
    """

    kind: str = ""
    before_error_j: float = _NAN
    after_error_j: float = _NAN
    error_s: float = _NAN
    before_calls: float = 0.0
    after_calls: float = 0.0
    state: Literal["both", "new", "vanished"] = "both"

    @property
    def change_s(self) -> float:
        """Seconds after less seconds before."""
        return self.after_s - self.before_s

    @property
    def share_j(self) -> float | None:
        """The change in joules as a share of those before; None where there were none, or they are unknown."""
        return _share(self.before_j, self.after_j)

    @property
    def share_s(self) -> float | None:
        """The change in seconds as a share of those before."""
        return _share(self.before_s, self.after_s)

    @property
    def significant_s(self) -> bool:
        """Whether the change in seconds is known to be more than noise."""
        return _moved(self.before_s, self.after_s, self.error_s)

    def to_json(self) -> dict[str, Any]:
        """Plain data; None for what is not known."""
        derived = ("change_j", "share_j", "change_s", "share_s", "significant_s")
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data |= {name: getattr(self, name) for name in derived}
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in data.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the second is worse than the first by more than a threshold, and whether that is more than noise."""

    metric: Metric
    share: float | None
    threshold: float | None
    significant: bool
    failed: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(EnergyDiff):
    """Two sides. `total` and the rows are per unit of `per` ("step", "sample", or "run"); `whole` is never scaled.

    Rows are those that changed most first. `matched` is the share of each side's joules (seconds, without power) in
    rows that both sides have, `views` what rows of both there are;
    `common` the share by which both are off together.
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
        return Verdict(
            metric=metric, share=share, threshold=fail_above, significant=sure, failed=above and sure,
            text=_told(self, metric, share, sure, fail_above),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        plain = {n: getattr(self, n) for n in ("before", "after", "by", "per", "significant")}
        lists = {n: list(getattr(self, n)) for n in ("basis", "work", "matched", "notes")}
        rows = {n: [r.to_json() for r in found] for n, found in (("components", self._parts), ("rows", self.rows))}
        return {**plain, **lists, "total": self.total.to_json(), "whole": self.whole.to_json(), **rows}

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

    Each is a run file, a session, a trace (`power_a`, `power_b` beside it), an `EnergyTable`, an `EnergyReport`
    (measured or predicted), or the JSON that `tessera predict`, `measure` or `report` printed. Where both did steps
    (or samples, tokens), everything is per step. A prediction's subgraphs are matched with a run's operators by name,
    then by kind, and `matched` says how much of the joules that reaches.
    """
    if by not in VIEWS:
        raise ArgumentError(f"there is no view {by!r}", fix=f"one of: {', '.join(VIEWS)}")
    one, two = side_of(a, power_a, "before"), side_of(b, power_b, "after")
    notes = [*one.notes, *(n for n in two.notes if n not in one.notes)]
    unit = _unit(one, two)
    amounts = (one.work[unit], two.work[unit]) if unit else (1.0, 1.0)
    if unit is None:
        notes += _uneven(one, two)
    view = _view(one, two, by, notes)
    mixed = one.predicted != two.predicted and view == "ops"
    left, right = one.views.get(view) or {}, two.views.get(view) or {}
    if not (left and right):  # everything would be new, or gone
        left, right = {}, {}
    if mixed:
        left, right = _aligned(left, right) if one.predicted else _aligned(right, left)[::-1]
    totals = [_total(side, unit, amount, notes) for side, amount in ((one, amounts[0]), (two, amounts[1]))]
    gain, said = _common(one, two)
    same = bool(one.model) and one.model == two.model
    if same:
        said = ["one model predicted both: what it errs alike for both is in each ± and cancels in the change"]
    notes[:0] = [*said, *_batches(one, two, unit)]  # what changes how a number is read comes first
    rows = _rows(left, right, amounts, [_relative_s(t) for t in totals], gain, same)
    total = _change("total", totals[0], totals[1], gain, same)
    return Difference(
        before=one.name, after=two.name, by=view, per=unit or "run", total=total,
        whole=_change("whole run", one.total, two.total, gain, same),
        components=_components(one, two, amounts, total), subgraphs=rows, basis=(one.basis, two.basis), work=amounts,
        matched=_matched(rows),
        notes=tuple(dict.fromkeys(notes)), note="; ".join(dict.fromkeys(notes)),
        views=tuple(v for v in VIEWS if one.views.get(v) and two.views.get(v)), common=gain,
    )  # fmt: skip


# -- what is compared -----------------------------------------------------------------------------------------------


def _unit(one: Side, two: Side) -> str | None:
    """The work both did: steps where both have them, else the first unit they share; None where they did the same."""
    shared = [u for u in one.work if one.work[u] > 0 and two.work.get(u, 0) > 0]
    if "step" in shared:
        return "step"
    return next((u for u in shared if one.work[u] != two.work[u]), None)


def _common(one: Side, two: Side) -> tuple[float, list[str]]:
    """The share by which both sides' levels are off together, in words too; 0 where other sensors measured them."""
    if not one.sensors or one.sensors != two.sensors or one.basis != two.basis:
        return 0.0, []
    gain = min(one.gain, two.gain)
    what = "the same power model gave both" if one.basis == "modelled" else "the same sensors measured both"
    said = f"{what}: their common error of {gain:.0%} is in each ± and cancels in the change"
    return gain, [said] if gain > 0.005 else []


def _batches(one: Side, two: Side, unit: str | None) -> list[str]:
    """Steps of different size are no change of the program."""
    if unit != "step":
        return []
    for other in [u for u in one.work if u != "step" and one.work[u] > 0 and two.work.get(u, 0) > 0]:
        a, b = (side.work[other] / side.work["step"] for side in (one, two))
        if abs(a - b) > 0.01 * max(a, b):
            said = []
            for side in (one, two):
                if not math.isnan(side.total.energy_j):
                    said.append(format_energy(side.total.energy_j / side.work[other], 3))
            per = f"; per {other} {' and '.join(said)}" if len(said) == 2 else ""
            return [f"a step has {a:,.6g} {other}s before and {b:,.6g} after: steps are not the same work{per}"]
    return []


def _uneven(one: Side, two: Side) -> list[str]:
    if one.predicted == two.predicted and one.work == two.work:
        return []
    lacking = [s.name for s in (one, two) if not s.work] or ["either"]
    return [f"whole runs are compared: {' and '.join(lacking)} has no steps or other work that both did"]


def _view(one: Side, two: Side, by: str, notes: list[str]) -> str:
    """The view asked for, where either has it; else one that both have."""
    if one.views.get(by) and two.views.get(by):
        return by
    other = next((v for v in VIEWS if one.views.get(v) and two.views.get(v)), None)
    lacking = " and ".join(s.name for s in (one, two) if not s.views.get(by))
    if other is not None:
        notes.append(f"{lacking} has no {by}: rows are {other}")
        return other
    notes.append(f"{lacking} has no {by}: only the total can be compared")
    return by


def _total(side: Side, unit: str | None, amount: float, notes: list[str]) -> Cell:
    """One unit's joules and seconds: of steps their mean, with how they scatter; else the whole, divided."""
    steps = list(side.steps)
    if unit != "step" or not steps or len(steps) != amount:
        return side.total.scaled(1.0 / amount)
    seconds = [_wall_s(s) for s in steps]
    weighed = [s.energy_j for s in steps] if not math.isnan(steps[0].energy_j) else seconds
    if len(steps) >= 3 and weighed[0] > FIRST * float(np.median(weighed)):
        notes.append(f"{side.name}: the mean step is without {steps[0].name}, which is far dearer; rows contain it")
        steps, seconds = steps[1:], seconds[1:]
    joules = [s.energy_j for s in steps]
    level = side.total.error_j / side.total.energy_j if side.total.energy_j > 0 else 0.0
    own_j = max(math.hypot(*(s.energy_error_j for s in steps)) / len(steps), level * float(np.mean(joules)))
    return Cell(
        float(np.mean(joules)), math.hypot(own_j, _scatter(joules)), float(np.mean(seconds)),
        _scatter(seconds) if len(steps) > 1 else _NAN, 1.0,
    )  # fmt: skip


def _wall_s(row: EnergyRow) -> float:
    return row.wall_s if row.wall_s is not None else row.time_s


def _scatter(values: Sequence[float]) -> float:
    """Half-width of the 90% interval of a mean, from the scatter of its values."""
    if len(values) < 2:
        return 0.0
    return t90(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def _relative_s(total: Cell) -> float:
    return total.error_s / total.seconds if total.seconds > 0 else _NAN


def _rows(
    left: Mapping[str, Cell], right: Mapping[str, Cell], amounts: tuple[float, float], scatter: Sequence[float],
    gain: float = 0.0, same: bool = False,
) -> list[Change]:  # fmt: skip
    found = []
    for name in dict.fromkeys((*left, *right)):
        cells = []
        for side, amount, relative in ((left, amounts[0], scatter[0]), (right, amounts[1], scatter[1])):
            cell = side.get(name)
            cell = None if cell is None else cell.scaled(1.0 / amount)
            if cell is not None and math.isnan(cell.error_s):  # a row's time scatters about as its steps' does
                cell = dataclasses.replace(cell, error_s=relative * cell.seconds)
            cells.append(cell)
        found.append(_change(name, cells[0], cells[1], gain, same))
    return sorted(found, key=_weight, reverse=True)


def _weight(row: Change) -> tuple[float, float]:
    """How much a row changed, then how much it is; a rounding error is no change."""
    a, b = (row.before_s, row.after_s) if math.isnan(row.change_j) else (row.before_j, row.after_j)
    size = max(abs(a), abs(b))
    return (0.0 if abs(b - a) <= _ROUNDING * size else abs(b - a)), size


def _change(name: str, before: Cell | None, after: Cell | None, gain: float = 0.0, same: bool = False) -> Change:
    """A line; `gain` is the share both sides' joules are off by together, `same`: one model predicted both."""
    a, b = before or ZERO, after or ZERO
    own = [own_error(c.energy_j, c.error_j, gain) for c in (a, b)]
    error_j, error_s = math.hypot(*own, gain * (b.energy_j - a.energy_j)), math.hypot(a.error_s, b.error_s)
    if same and a.errors is not None and b.errors is not None:
        alike_s, alike_j = alike.difference(a.errors, b.errors)
        alike_s = math.hypot(alike_s, alike.SMALLEST * min(a.seconds, b.seconds))
        alike_j = math.hypot(alike_j, alike.SMALLEST * min(a.energy_j, b.energy_j))
        error_s, error_j = min(error_s, alike_s), min(error_j, alike_j)  # errors in common never widen a difference
    return Change(
        name=name, before_j=a.energy_j, after_j=b.energy_j, before_s=a.seconds, after_s=b.seconds, error_j=error_j,
        significant=_moved(a.energy_j, b.energy_j, error_j), kind=(before or b).kind, before_error_j=a.error_j,
        after_error_j=b.error_j, error_s=error_s, before_calls=a.calls, after_calls=b.calls,
        state="new" if before is None else "vanished" if after is None else "both",
    )  # fmt: skip


def own_error(value: float, error: float, gain: float) -> float:
    """A half-width without the part of it that both sides share; all of it where it cannot contain that part."""
    shared = gain * abs(value)
    if math.isnan(error) or error < 0.999 * shared:
        return error
    return math.sqrt(max(0.0, (error - shared) * (error + shared)))


def _components(one: Side, two: Side, amounts: tuple[float, float], total: Change) -> list[Change]:
    """Compute, memory and static joules of two predictions; their half-widths are the total's, by share."""
    whole = max(total.before_j + total.after_j, 1e-30)
    out = []
    for name in one.components.keys() & two.components.keys():
        a, b = one.components[name] / amounts[0], two.components[name] / amounts[1]
        wide = math.sqrt(max((a + b) / whole, 0.0) / 2.0) * total.error_j  # of each side; in quadrature the share's
        out.append(_change(name, Cell(a, wide, 0.0, _NAN, 1.0), Cell(b, wide, 0.0, _NAN, 1.0)))
    return sorted(out, key=lambda c: ("compute", "memory", "static").index(c.name))


def _matched(rows: Iterable[Change]) -> tuple[float, float]:
    shares = []
    for side in ("before", "after"):
        known = [(getattr(r, f"{side}_j"), getattr(r, f"{side}_s"), r.state) for r in rows]
        weights = [s if math.isnan(j) else j for j, s, _ in known]
        both = math.fsum(w for w, (_, _, state) in zip(weights, known, strict=True) if state == "both")
        whole = math.fsum(weights)
        shares.append(both / whole if whole > 0 else 0.0)
    return shares[0], shares[1]


def _moved(before: float, after: float, error: float) -> bool:
    """Whether a change is more than its half-width, and more than rounding; not where either is unknown (NaN)."""
    return abs(after - before) > error and abs(after - before) > _ROUNDING * max(abs(before), abs(after))


def _share(before: float, after: float) -> float | None:
    return (after - before) / before if before > 0 and not math.isnan(after) else None


# -- a prediction's subgraphs and a run's operators -----------------------------------------------------------------


def _aligned(predicted: Mapping[str, Cell], measured: Mapping[str, Cell]) -> tuple[dict[str, Cell], dict[str, Cell]]:
    """Both by operator ("mm", "sdpa_backward"); what only one side has, by its kind where the other has that kind."""
    ran: dict[str, Cell] = {}
    for name, cell in measured.items():
        plain = operator(name)
        kind = cell.kind if cell.kind in ("idle", "memcpy", "memset", "collective") else _kind(name, plain)
        _add(ran, plain, dataclasses.replace(cell, kind=kind))
    meant: dict[str, Cell] = {}
    for name, cell in predicted.items():
        plain = operator(name.rpartition(".")[2])
        base = plain.removesuffix("_backward")  # the gradient of a product is a product: "down.mm_backward" is mm
        _add(meant, base if plain not in ran and plain not in KINDS else plain, cell)
    kinds = {c.kind for n, c in meant.items() if n not in ran} & {c.kind for n, c in ran.items() if n not in meant}
    shared = meant.keys() & ran.keys()
    return _folded(meant, shared, kinds), _folded(ran, shared, kinds)


def operator(name: str) -> str:
    """An operator without its namespace, and attention and convolutions by one name whatever library ran them."""
    plain = name.removeprefix("aten::").removeprefix("tessera::")
    if not plain.startswith("_foreach_"):
        plain = plain.rstrip("_") or plain
    if found := _ATTENTION.fullmatch(plain.removesuffix("_forward")):
        return f"sdpa{found.group(1) or ''}"
    found = _CONVOLUTION.fullmatch(plain)
    return f"convolution{found.group(1) or ''}" if found else plain


def _kind(name: str, plain: str) -> str:
    """The family of a measured operator; one of ours by its full name, which torch may use for something else."""
    return kind_of(name if name.startswith("tessera::") else plain)


def _folded(rows: Mapping[str, Cell], shared: Iterable[str], kinds: Iterable[str]) -> dict[str, Cell]:
    out: dict[str, Cell] = {}
    for name, cell in rows.items():
        _add(out, name if name in shared or cell.kind not in kinds else f"other {cell.kind}", cell)
    return out


def _add(rows: dict[str, Cell], name: str, cell: Cell) -> None:
    rows[name] = rows[name] + cell if name in rows else cell


# -- in words -------------------------------------------------------------------------------------------------------


def _told(found: Difference, metric: Metric, share: float | None, sure: bool, fail_above: float | None) -> str:
    t, energy = found.total, metric == "energy"
    change, error = (t.change_j, t.error_j) if energy else (t.change_s, t.error_s)
    show = format_energy if energy else format_duration
    if math.isnan(change):
        return f"{'joules' if energy else 'seconds'} are not known of both: nothing can be said of {metric}"
    before, after = (t.before_j, t.after_j) if energy else (t.before_s, t.after_s)
    per = "" if found.per == "run" else f" per {found.per}"
    if abs(change) <= _ROUNDING * max(abs(before), abs(after)):
        return f"no change: {show(after, 3)}{per} in both{_unseen(error, before)}"
    size = "from nothing" if share is None else f"{abs(share):.1%}" if abs(share) < 0.995 else f"{abs(share):.0%}"
    more = ("more" if change > 0 else "less") + (" energy" if energy else " time")
    said = f"{show(abs(change), 3)} ({size}) {more}{per}"
    if math.isnan(error):
        return f"{said}; whether that is noise cannot be told: one run each, without steps, has no interval"
    wide = f"90% interval ± {show(error, 2)}"
    if not sure:
        return f"{said}: noise, it lies within its {wide}{_unseen(error, before)}"
    limit = ""
    if fail_above is not None and share is not None:
        limit = f"; {'above' if share > fail_above else 'within'} the limit of {fail_above:.1%}"
    return f"{said}, more than noise ({wide}){limit}"


def _unseen(error: float, before: float) -> str:
    """What a comparison cannot see, where that is worth a word."""
    if math.isnan(error) or not before > 0 or error < 0.005 * before:
        return ""
    return f" (it cannot see changes under {error / before:.0%})"
