"""`RowChange`: one line of a difference; `ChangeMaker` computes what two sides differ by, and how sure that is.

The subgraphs of a prediction and the operators of a run get one name: by operator, then by kind of operator.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..energy_diff import DiffRow
from ..estimate.prediction_errors import SMALLEST_ERROR, difference_error_w, difference_errors
from ..graph.op_kinds import KINDS, kind_of
from ..monitor.steady_state import t90
from ..units import format_share
from .mean_step import independent_error, standard_error
from .sides import UNSTATED, ZERO, Cell, DiffSide, RunScatter

ROUNDING = 1e-9
"""As a share: a smaller change is none."""
LEAST_LOAD = 0.05
"""As a share of a run's time: what other programs account for below this is included in the scatter of the steps."""
_NAN = float("nan")
_ATTENTION = re.compile(
    r"(?:_?(?:scaled_dot_product|flash|efficient|cudnn|mem_eff)\w*attention\w*?|attention)(_backward)?$"
)
_CONVOLUTION = re.compile(r"_?(?:cudnn_|miopen_|mkldnn_)?convolution(?:_transpose|_overrideable)?(_backward)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChange(DiffRow):
    """One line: joules and seconds before and after, in the difference's unit, and the half-widths of their changes.

    Unknown figures are NaN: joules of a trace without power, the scatter of a single measured run. `state` "unstated":
    one side does not state this row (a prediction has no idle), so its change is unknown.
    """

    kind: str = ""
    before_error_j: float = _NAN
    after_error_j: float = _NAN
    error_s: float = _NAN
    before_error_w: float = _NAN
    after_error_w: float = _NAN
    error_w: float = _NAN
    before_calls: float = 0.0
    after_calls: float = 0.0
    state: Literal["both", "new", "vanished", "unstated"] = "both"

    @property
    def change_s(self) -> float:
        return self.after_s - self.before_s

    @property
    def before_w(self) -> float:
        """Return mean watts before; NaN if joules or seconds are not known."""
        return self.before_j / self.before_s if self.before_s > 0 else _NAN

    @property
    def after_w(self) -> float:
        return self.after_j / self.after_s if self.after_s > 0 else _NAN

    @property
    def share_j(self) -> float | None:
        """Return the change in joules as a share of those before; None if there were none, or they are unknown."""
        return _share(self.before_j, self.after_j)

    @property
    def share_s(self) -> float | None:
        """Return the change in seconds as a share of those before."""
        return _share(self.before_s, self.after_s)

    @property
    def significant_s(self) -> bool:
        """Return whether the change in seconds is known to be more than noise."""
        return _has_changed(self.before_s, self.after_s, self.error_s)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; None for what is not known."""
        derived = ("change_j", "share_j", "change_s", "share_s", "significant_s")
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data |= {name: getattr(self, name) for name in derived}
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in data.items()}


@dataclass(frozen=True, slots=True)
class ChangeMaker:
    """Computes lines. `gain`: the share by which both sides' joules are off together. `same`: one model predicted both.

    `mixed`: one side is a prediction, whose error is known, so a run that was measured once is good enough beside it.
    `load` is the share of a run's time that other programs on the machine may account for: smaller changes cannot be
    distinguished from theirs.
    """

    gain: float = 0.0
    same: bool = False
    mixed: bool = False
    load: float = 0.0

    @classmethod
    def of_sides(cls, before: Sequence[DiffSide], after: Sequence[DiffSide]) -> ChangeMaker:
        """Make a `ChangeMaker` for what the sides have in common."""
        sides, one, two = [*before, *after], before[0], after[0]
        same = bool(one.model) and all(side.model == one.model for side in sides)
        load, _ = find_load(before, after)
        return cls(find_common_error(sides)[0], same, one.is_prediction != two.is_prediction, load)

    def from_runs(self, name: str, before: Sequence[Cell], after: Sequence[Cell]) -> RowChange:
        """Return one line, from one run of each side or from several."""
        return self.make(name, mean_of_runs(before, after), mean_of_runs(after, before))

    def make(self, name: str, before: Cell | None, after: Cell | None) -> RowChange:
        a, b = before or ZERO, after or ZERO
        error_j, error_s, error_w = self._errors(a, b)
        error_j = math.hypot(error_j, self.load * max(a.energy_j, b.energy_j))
        error_s = math.hypot(error_s, self.load * max(a.seconds, b.seconds))
        return RowChange(
            name=name,
            kind=(before or b).kind,
            state=_state(before, after),
            before_j=a.energy_j,
            after_j=b.energy_j,
            before_error_j=a.error_j,
            after_error_j=b.error_j,
            error_j=error_j,
            significant=_has_changed(a.energy_j, b.energy_j, error_j),
            before_s=a.seconds,
            after_s=b.seconds,
            error_s=error_s,
            before_error_w=a.power_error_w,
            after_error_w=b.power_error_w,
            error_w=error_w,
            before_calls=a.calls,
            after_calls=b.calls,
        )

    def rows(self, left: Mapping[str, Cell], right: Mapping[str, Cell]) -> list[RowChange]:
        """Return lines of all names, those that changed most first."""
        changes = [self.make(name, left.get(name), right.get(name)) for name in dict.fromkeys((*left, *right))]
        return sorted(changes, key=_weight, reverse=True)

    def _errors(self, a: Cell, b: Cell) -> tuple[float, float, float]:
        """Return half-widths of the change in joules, seconds and watts; NaN if a side's scatter is not known."""
        if (a.once or b.once) and not self.mixed:
            return _NAN, _NAN, _NAN
        if a.runs and b.runs:
            sensed_j = self._apart(a.energy_j, a.runs.sensor_j, b.energy_j, b.runs.sensor_j)
            sensed_w = self._apart(a.power_w, a.runs.sensor_w, b.power_w, b.runs.sensor_w)
            apart_j, apart_s, apart_w = _welch_errors(a.runs, b.runs)
            return math.hypot(sensed_j, apart_j), apart_s, math.hypot(sensed_w, apart_w)
        error_j, error_s = self._apart(a.energy_j, a.error_j, b.energy_j, b.error_j), math.hypot(a.error_s, b.error_s)
        error_w = self._apart(a.power_w, a.power_error_w, b.power_w, b.power_error_w)
        if self.same and a.errors is not None and b.errors is not None:
            alike_s, alike_j = difference_errors(a.errors, b.errors)
            alike_s = math.hypot(alike_s, SMALLEST_ERROR * min(a.seconds, b.seconds))
            alike_j = math.hypot(alike_j, SMALLEST_ERROR * min(a.energy_j, b.energy_j))
            # Common errors never widen a difference.
            if min(a.seconds, b.seconds) > 0:
                alike_w = difference_error_w(a.errors, a.power_w, a.seconds, b.errors, b.power_w, b.seconds)
                error_w = min(error_w, math.hypot(alike_w, SMALLEST_ERROR * min(a.power_w, b.power_w)))
            return min(error_j, alike_j), min(error_s, alike_s), error_w
        return error_j, error_s, error_w

    def _apart(self, a: float, error_a: float, b: float, error_b: float) -> float:
        """Return the half-width of b - a without the common factor, which changes neither sign nor ratio."""
        return math.hypot(own_error(a, error_a, self.gain), own_error(b, error_b, self.gain))


def _state(before: Cell | None, after: Cell | None) -> Literal["both", "new", "vanished", "unstated"]:
    if before is UNSTATED or after is UNSTATED:
        return "unstated"
    return "new" if before is None else "vanished" if after is None else "both"


def find_common_error(sides: Sequence[DiffSide]) -> tuple[float, list[str]]:
    """Return the share by which all sides' levels are off together, also in words; 0 if sensors differ."""
    one = sides[0]
    if not one.sensors or any((side.sensors, side.basis) != (one.sensors, one.basis) for side in sides):
        return 0.0, []
    gain = min(side.gain for side in sides)
    what = "the same power model gave both" if one.basis == "modelled" else "the same sensors measured both"
    text = (
        f"{what}: the ± of before and after contains their common error of {format_share(gain)}. The ± of a change "
        "does not: that error changes neither its sign nor its percentage, only all joules and watts by one factor"
    )
    return gain, [text] if gain > 0.005 else []


def find_load(before: Sequence[DiffSide], after: Sequence[DiffSide]) -> tuple[float, list[str]]:
    """Return the share of a run's time by which other programs may have changed it, also in words; 0 if small.

    With several runs on each side, their scatter shows what others did to all of them; a single run does not show that.
    """
    a, b = (float(np.mean([side.crowded for side in sides])) for sides in (before, after))
    load = abs(a - b) if min(len(before), len(after)) > 1 else math.hypot(a, b)
    if load < LEAST_LOAD:
        return 0.0, []
    waited = f"waited {format_share(a)} of the time for a core before and {format_share(b)} after"
    return load, [
        f"the machine was busy: the main thread {waited}, because of other programs. That is in each ±: repeat "
        "both in turn, or on a quiet machine, to know more"
    ]


def _weight(row: RowChange) -> tuple[float, float]:
    """Return how much a row changed, then how large it is; a rounding error and an unstated row count as no change."""
    if row.state == "unstated":
        return -1.0, 0.0
    a, b = (row.before_s, row.after_s) if math.isnan(row.change_j) else (row.before_j, row.after_j)
    size = max(abs(a), abs(b))
    return (0.0 if abs(b - a) <= ROUNDING * size else abs(b - a)), size


def own_error(value: float, error: float, gain: float) -> float:
    """Return a half-width without the part that both sides share; all of it if it cannot contain that part."""
    shared = gain * abs(value)
    if math.isnan(error) or error < 0.999 * shared:
        return error
    return math.sqrt(max(0.0, (error - shared) * (error + shared)))


def _has_changed(before: float, after: float, error: float) -> bool:
    """Return whether a change is more than its half-width and more than rounding; False if either is unknown (NaN)."""
    return abs(after - before) > error and abs(after - before) > ROUNDING * max(abs(before), abs(after))


def _share(before: float, after: float) -> float | None:
    return (after - before) / before if before > 0 and not math.isnan(after) else None


# -- several runs -----------------------------------------------------------------------------------------------------


def mean_of_runs(cells: Sequence[Cell], others: Sequence[Cell] = ()) -> Cell:
    """Return one line of several runs.

    A single run scatters as the `others` do if those are several, or as its steps do. The sensor's error is the same in
    each run and stays as it is.
    """
    if len(cells) > 1:
        joules, seconds = [c.energy_j for c in cells], [c.seconds for c in cells]
        watts, calls = [c.power_w for c in cells], float(np.mean([c.calls for c in cells]))
        sensor_j, sensor_w = (float(np.mean([getattr(c, n) for c in cells])) for n in ("error_j", "power_error_w"))
        by_run = RunScatter(
            len(cells), standard_error(joules), standard_error(seconds), standard_error(watts), sensor_j, sensor_w
        )
        return Cell(
            float(np.mean(joules)),
            math.hypot(sensor_j, independent_error(joules)),
            float(np.mean(seconds)),
            independent_error(seconds),
            calls,
            cells[0].kind,
            runs=by_run,
            error_w=math.hypot(sensor_w, independent_error(watts)),
        )
    only = cells[0]
    if len(others) < 2 or only.errors is not None:  # a prediction does not scatter
        return only
    single = math.sqrt(len(others))  # one run scatters this much more than their mean
    keys = ("energy_j", "seconds", "power_w")
    wide_j, wide_s, wide_w = (single * independent_error([getattr(c, key) for c in others]) for key in keys)
    error_s = wide_s if only.once else max(only.error_s, wide_s)
    return dataclasses.replace(
        only,
        error_j=math.hypot(only.error_j, wide_j),
        error_s=error_s,
        once=False,
        error_w=math.hypot(only.power_error_w, wide_w),
    )


def _welch_errors(before: RunScatter, after: RunScatter) -> tuple[float, float, float]:
    """Return 90% half-widths (joules, seconds, watts) of a difference of two means of runs (Welch, 1947)."""
    return (
        _welch(before.joules, before.count, after.joules, after.count),
        _welch(before.seconds, before.count, after.seconds, after.count),
        _welch(before.watts, before.count, after.watts, after.count),
    )


def _welch(a: float, count_a: int, b: float, count_b: int) -> float:
    if math.isnan(a) or math.isnan(b):
        return math.nan
    both = math.hypot(a, b)
    if not both > 0:
        return 0.0
    lost = (a / both) ** 4 / (count_a - 1) + (b / both) ** 4 / (count_b - 1)
    return t90(max(int(1.0 / lost + 1e-9), 1)) * both  # fewer degrees of freedom than there are, so rather too wide


def mean_rows(
    before: Sequence[dict[str, Cell]], after: Sequence[dict[str, Cell]]
) -> tuple[dict[str, Cell], dict[str, Cell]]:
    """Return the rows of some runs before and after, each as one; a row that a run lacks is zero there."""
    sides = []
    for own, others in ((before, after), (after, before)):
        means = {}
        for name in dict.fromkeys(n for run in own for n in run):
            kind = next(run[name].kind for run in own if name in run)
            nothing = dataclasses.replace(ZERO, kind=kind, errors=None)
            cells = [run.get(name, nothing) for run in own]
            means[name] = mean_of_runs(cells, [run.get(name, nothing) for run in others])
        sides.append(means)
    return sides[0], sides[1]


# -- one name for what a prediction and a run both did ----------------------------------------------------------------


def align_rows(predicted: Mapping[str, Cell], measured: Mapping[str, Cell]) -> tuple[dict[str, Cell], dict[str, Cell]]:
    """Name both sides by operator ("mm", "sdpa_backward"); what only one side has, by its kind if the other has it."""
    ran: dict[str, Cell] = {}
    for name, cell in measured.items():
        plain = plain_operator(name)
        kind = cell.kind if cell.kind in ("idle", "memcpy", "memset", "collective") else _kind(name, plain)
        _add(ran, plain, dataclasses.replace(cell, kind=kind))
    meant: dict[str, Cell] = {}
    for name, cell in predicted.items():
        plain = plain_operator(name.rpartition(".")[2])
        base = plain.removesuffix("_backward")  # the gradient of a product is a product: "down.mm_backward" is mm
        _add(meant, base if plain not in ran and plain not in KINDS else plain, cell)
    kinds = {c.kind for n, c in meant.items() if n not in ran} & {c.kind for n, c in ran.items() if n not in meant}
    shared = meant.keys() & ran.keys()
    return _fold_kinds(meant, shared, kinds), _fold_kinds(ran, shared, kinds)


def plain_operator(name: str) -> str:
    """Return an operator without its namespace; attention and convolutions get one name for all libraries."""
    plain = name.removeprefix("aten::").removeprefix("tessera::")
    if not plain.startswith("_foreach_"):
        plain = plain.rstrip("_") or plain
    if match := _ATTENTION.fullmatch(plain.removesuffix("_forward")):
        return f"sdpa{match.group(1) or ''}"
    match = _CONVOLUTION.fullmatch(plain)
    return f"convolution{match.group(1) or ''}" if match else plain


def _kind(name: str, plain: str) -> str:
    """Return the family of a measured operator; ours go by full name, which torch may use for something else."""
    return kind_of(name if name.startswith("tessera::") else plain)


def _fold_kinds(rows: Mapping[str, Cell], shared: Iterable[str], kinds: Iterable[str]) -> dict[str, Cell]:
    out: dict[str, Cell] = {}
    for name, cell in rows.items():
        _add(out, name if name in shared or cell.kind not in kinds else f"other {cell.kind}", cell)
    return out


def _add(rows: dict[str, Cell], name: str, cell: Cell) -> None:
    rows[name] = rows[name] + cell if name in rows else cell
