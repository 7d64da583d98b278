"""The steps of a run: which count, what one costs on average, what every row spent in each, and how they scatter.

A run's screen and page, `analyze.diff` and `graph.profile` all take the mean step from here, so that their ± agree.

::

    timeline.energy_j ──by (name, step)──┐
    self time, shared by what overlaps ──┼──► StepSeries of each row: joules, seconds, calls by step
    the steps' own joules, less those ───┘    and of idle, the rest
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..attribute.activity import host_activity, shares, sum_by_key
from ..attribute.ledger import NO_OP
from ..attribute.table import EnergyRow, EnergyTable
from ..joules import Floats
from ..monitor.steady_state import mean_interval, t90
from ..record import CODE
from ..timeline.columns import NONE, Ints, Timeline
from ..units import format_duration, format_energy

EXPENSIVE = 1.5
"""A step that costs more than this many times the median is expensive: it compiles, tunes, or waits for a disk."""
SETTLES = 3
"""At most this many first steps may be left out, or a tenth of all: if more are expensive, the program runs like this.
"""
FEWEST = 3
"""Fewer steps have no meaningful median."""
DOMINATES = 0.2
"""If a step's joules above the median are more than this share of all steps' joules, the mean describes no step."""
# A run slowly warms up, or another program comes and goes: neighbouring steps resemble each other, and the scatter from
# step to step is too small. This many stretches of a run are few enough to differ, and enough to have a scatter.
BLOCKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpread:
    """How the steps differ: the median and the extremes."""

    count: int
    total_j: float
    median_j: float
    least_j: float
    least: str
    most_j: float
    most: str

    @property
    def factor(self) -> float:
        """Return how many times the median the most expensive step cost."""
        return self.most_j / self.median_j if self.median_j > 0 else math.inf

    @property
    def is_dominated(self) -> bool:
        """Return whether one step alone determines the mean: then the median tells more about the others."""
        return self.count >= FEWEST and self.most_j - self.median_j > DOMINATES * self.total_j


@dataclass(frozen=True, slots=True)
class CountedSteps:
    """The steps that count, by their places; `first` are left out as expensive, `unseen` as unmeasured.

    Expensive steps are left out if the run begins with them, because it has not settled. Later ones (a checkpoint, a
    validation) belong to the program, and count.
    """

    places: Sequence[int]
    first: Sequence[EnergyRow] = ()
    unseen: Sequence[EnergyRow] = ()

    @property
    def names(self) -> str | None:
        """Return the names of steps that are left out as expensive; None if the run begins with no such step."""
        return _list_names(self.first) if self.first else None

    @property
    def left_out(self) -> str | None:
        """Return which steps do not count and why, in words; None if all count."""
        parts = []
        if self.first:
            many, joules = len(self.first) > 1, math.fsum(s.energy_j for s in self.first)
            took = format_duration(sum(map(wall_s, self.first)), 3) if math.isnan(joules) else format_energy(joules, 3)
            rule = f"cost over {EXPENSIVE:g} times the median step"  # short: it shares a line of the first screen
            parts.append(f"{_list_names(self.first)}, which {rule} ({took}{' together' if many else ''})")
        if self.unseen:
            parts.append(f"{_list_names(self.unseen)}, whose power no sensor saw")
        return f"without {'; without '.join(parts)}" if parts else None


@dataclass(frozen=True, slots=True)
class MeanStep:
    """One step's joules and seconds, and the mean watts of all, with 90% half-widths.

    `error_j` and `error_w` include the sensor's error and the scatter of the steps; `error_s` is only the scatter. For
    a single step (`once`) the scatter is not known: `error_j` is the sensor's error, and `error_s` is NaN.
    """

    energy_j: float
    error_j: float
    seconds: float
    error_s: float
    error_w: float
    once: bool


def find_expensive(spent: Floats) -> NDArray[np.bool_]:
    """Return which steps are expensive, by the joules of each (or seconds, if joules are not known)."""
    return spent > EXPENSIVE * np.median(spent) if len(spent) >= FEWEST else np.zeros(len(spent), np.bool_)


def select_steps(steps: Sequence[EnergyRow]) -> CountedSteps:
    """Return which steps count: those that were measured, without the expensive ones at the beginning."""
    measured = [i for i, s in enumerate(steps) if not math.isnan(s.energy_j)]
    if not measured:  # a trace without power
        high, measured = find_expensive(np.array([wall_s(s) for s in steps])), list(range(len(steps)))
    else:
        high = find_expensive(np.array([steps[i].energy_j for i in measured]))
    begin = min(int(np.argmin(high)), max(SETTLES, len(high) // 10)) if len(high) else 0
    seen = set(measured)
    unseen = [s for i, s in enumerate(steps) if i not in seen]
    return CountedSteps(measured[begin:], [steps[i] for i in measured[:begin]], unseen)


def mean_step(steps: Sequence[EnergyRow], level: float) -> MeanStep:
    """Return the mean of some steps. `level`: the share of the joules by which the sensor may be off in all of them."""
    joules, seconds = np.array([s.energy_j for s in steps]), np.array([wall_s(s) for s in steps])
    own_j = math.hypot(*(s.error_j for s in steps)) / len(steps)
    return mean_of(joules, seconds, max(own_j, level * float(np.mean(joules))))


def mean_of(joules: Floats, seconds: Floats, own_j: float) -> MeanStep:
    """Return the mean of what was spent in each step; `own_j` is the half-width from the sensor alone."""
    mean_j, mean_s = float(np.mean(joules)), float(np.mean(seconds))
    own_w = own_j / mean_s if mean_s > 0 else math.nan
    if len(joules) < 2:
        return MeanStep(mean_j, own_j, mean_s, math.nan, own_w, True)
    # A longer step costs more joules at the same watts. In the ratio of both means, only the difference between a
    # step's joules and its seconds at the mean watts is scatter (W. G. Cochran, "Sampling Techniques", 1977, chapter
    # 6).
    residual_j = joules - seconds * (mean_j / mean_s) if mean_s > 0 else np.full(len(joules), math.nan)
    error_w = math.hypot(own_w, mean_error(residual_j) / mean_s) if mean_s > 0 else math.nan
    return MeanStep(mean_j, math.hypot(own_j, mean_error(joules)), mean_s, mean_error(seconds), error_w, False)


def _list_names(steps: Sequence[EnergyRow]) -> str:
    """Return the names of steps: all of a few, else the first and the last."""
    names = [s.name for s in steps]
    return " and ".join(names) if len(names) < 3 else f"{names[0]} to {names[-1]} ({len(names)} steps)"


def mean_error(values: Sequence[float] | Floats) -> float:
    """Return the half-width of the 90% interval of a mean of steps; NaN for fewer than two.

    The wider of two estimates: by the steps, where steps that resemble their neighbours count for less, and by the
    means of BLOCKS stretches of the run, which drift.
    """
    steps = np.asarray(values, np.float64)
    if len(steps) < 2:
        return math.nan
    error = mean_interval(steps).error or 0.0
    if len(steps) < 2 * BLOCKS:
        return error
    return max(error, independent_error([float(part.mean()) for part in np.array_split(steps, BLOCKS)]))


def independent_error(values: Sequence[float]) -> float:
    """Return the half-width of the 90% interval of a mean of independent runs; NaN for fewer than two."""
    if len(values) < 2:
        return math.nan
    return t90(len(values) - 1) * standard_error(values)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of some values."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


# -- rows by step -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepSeries:
    """One row, step by step."""

    joules: Floats
    seconds: Floats
    calls: Floats


@dataclass(frozen=True, slots=True)
class StepRows:
    """The steps of a recording whose rows are known one by one; `places` are those of `table.steps` among all steps.

    `windows` are the stretches of time that the table covers.
    """

    timeline: Timeline
    table: EnergyTable
    places: Ints
    windows: Sequence[tuple[int, int]] = ()

    def rows(self, view: str) -> dict[str, StepSeries]:
        """Return every row of a view. Operators, kernels and idle sum to the steps; regions and modules are nested."""
        if view in ("ops", "kernels"):
            return self._leaves(view)
        rows = np.arange(len(self.timeline))
        is_light = bool(np.any(self.timeline.linked.find_twins(rows) != rows))
        return self._modules() if view == "modules" and is_light else self._spans(view)

    def _leaves(self, view: str) -> dict[str, StepSeries]:
        timeline, links = self.timeline, self.timeline.linked
        rows, seconds = self_time(timeline)
        if view == "kernels" and not len(timeline.device_rows):
            return {}
        joules = np.full(len(rows), math.nan)
        if not math.isnan(self.table.energy_j) and timeline.energy_j is not None:
            joules = np.nan_to_num(timeline.energy_j[rows])
        owner = rows if view == "kernels" else links.op[rows]
        keys = np.where(owner == NONE, NONE, timeline["name"][owner])
        steps = self._numbers()[links.step[rows]]
        # A call is one kernel, or one operator with all kernels it launched: count the first one, and what repeats it.
        twin = links.find_twins(rows)
        own = np.flatnonzero(twin == rows)
        first = np.unique(np.where(owner == NONE, -2 - rows, owner)[own], return_index=True)[1]
        leads = np.zeros(len(timeline))
        leads[rows[own[first]]] = 1.0
        calls = leads[twin]
        inside = steps != NONE
        parts = self._by_name(keys[inside], steps[inside], joules[inside], seconds[inside], calls[inside])
        rows_by_name = {name: StepSeries(*values) for name, values in parts.items()}
        return {**rows_by_name, **self._idle(rows_by_name)} if rows_by_name else {}

    def _numbers(self) -> Ints:
        """Return for every step of the timeline, and for none, its place among the table's steps."""
        numbers = np.full(len(self.timeline.linked.steps) + 1, NONE, np.int64)  # one more, for NONE
        numbers[self.places] = np.arange(len(self.places))
        return numbers

    def _by_name(self, keys: Ints, steps: Ints, *values: Floats) -> dict[str, list[Floats]]:
        """Return each of the values summed by name and step."""
        count = len(self.places)
        used, where = np.unique(keys, return_inverse=True)
        flat = [np.bincount(where * count + steps, v, minlength=len(used) * count).reshape(-1, count) for v in values]
        names = [NO_OP if key == NONE else self.timeline.names[key] for key in used.tolist()]
        return {name: [part[i] for part in flat] for i, name in enumerate(names)}

    def _idle(self, rows: Mapping[str, StepSeries]) -> dict[str, StepSeries]:
        """Return the part of the steps that no row has, of all their devices together."""
        step_s, spent_j = (np.array([pick(s) for s in self.table.steps]) for pick in (wall_s, lambda s: s.energy_j))
        joules = spent_j - sum(s.joules for s in rows.values())
        seconds = step_s * [s.devices for s in self.table.steps] - sum(s.seconds for s in rows.values())
        if seconds.sum() < 0:  # the kernels of the last step end after it
            seconds = np.zeros(len(seconds))
        if not seconds.any() and not np.nan_to_num(joules).any():
            return {}
        return {self.table.idle_name: StepSeries(joules, seconds, np.zeros(len(seconds)))}

    def _modules(self) -> dict[str, StepSeries]:
        """Return the modules of a light run by the device's time in them: their calls were seen in a few steps only."""
        timeline, links = self.timeline, self.timeline.linked
        rows, seconds = self_time(timeline)
        module, steps = links.module[rows], self._numbers()[links.step[rows]]
        of_module = np.bincount(np.maximum(module, 0), np.where(module == NONE, 0.0, seconds), len(timeline))
        inside = (module != NONE) & (steps != NONE)
        count = len(self.places)
        used, where = np.unique(module[inside], return_inverse=True)
        flat = np.bincount(where * count + steps[inside], seconds[inside], len(used) * count).reshape(-1, count)
        by_step: dict[str, Floats] = {}
        whole_s: dict[str, float] = {}
        for i, row in enumerate(used.tolist()):
            for name in {timeline.name(outer) for outer in links.path(row)}:
                by_step[name] = by_step.get(name, 0.0) + flat[i]
                whole_s[name] = whole_s.get(name, 0.0) + float(of_module[row])
        series = {}
        for row in self.table.modules:
            if row.name in by_step:
                share = by_step[row.name] / max(whole_s[row.name], 1e-12)
                series[row.name] = StepSeries(row.energy_j * share, wall_s(row) * share, row.calls * share)
        return series

    def _spans(self, view: str) -> dict[str, StepSeries]:
        """Return each row's joules and calls by the time of its passes; only those inside steps count."""
        timeline, links = self.timeline, self.timeline.linked
        if view == "regions":
            passes = timeline.rows("region")
        else:
            named = np.isin(timeline["name"], list(timeline.meta.get("modules", ())))
            passes = np.flatnonzero((timeline["kind"] == CODE["op"]) & named)
        length_s = self._within(timeline["start_ns"][passes], timeline["end_ns"][passes])
        passes, length_s = passes[length_s > 0], length_s[length_s > 0]
        names, steps = timeline["name"][passes], self._numbers()[links.step[passes]]
        inside = steps != NONE
        by_step = self._by_name(names[inside], steps[inside], length_s[inside], np.ones(int(inside.sum())))
        whole_s = {timeline.names[n]: float(length_s[names == n].sum()) for n in np.unique(names).tolist()}
        series = {}
        for row in self.table.rows(view):
            if row.name in by_step:
                seconds, calls = by_step[row.name]
                share = seconds / whole_s[row.name]
                series[row.name] = StepSeries(row.energy_j * share, wall_s(row) * share, calls)
        return series

    def _within(self, start_ns: Ints, end_ns: Ints) -> Floats:
        """Return the seconds of some stretches that are inside the windows."""
        if not self.windows:
            return np.asarray(np.maximum(end_ns - start_ns, 1) * 1e-9, np.float64)
        inside = sum(np.maximum(np.minimum(end_ns, b) - np.maximum(start_ns, a), 0) for a, b in self.windows)
        return np.asarray(inside, np.float64) * 1e-9


def find_step_rows(timeline: Timeline, table: EnergyTable, windows: Sequence[tuple[int, int]] = ()) -> StepRows | None:
    """Return the steps of a table in its timeline; None if one is not there."""
    places, at = [], 0
    names = [s.name for s in timeline.linked.steps]
    for row in table.steps:
        while at < len(names) and names[at] != row.name:
            at += 1
        if at == len(names):
            return None
        places.append(at)
        at += 1
    return StepRows(timeline, table, np.array(places, np.int64), windows) if places else None


def wall_s(row: EnergyRow) -> float:
    """Return the seconds that a row took by the clock; if it has none, those on its device."""
    return row.wall_s if row.wall_s is not None else row.time_s


def self_time(timeline: Timeline) -> tuple[Ints, Floats]:
    """Return rows of devices (of the host, if nothing ran on one) with each row's own seconds."""
    rows = timeline.device_rows
    if not len(rows):
        activity = host_activity(timeline, timeline.linked)
        used, where = np.unique(activity.rows, return_inverse=True)
        return used, sum_by_key(where.reshape(-1), activity.share_s, len(used))
    seconds = np.zeros(len(rows))
    for own in timeline.by_device(rows).values():
        seconds[np.searchsorted(rows, own)] = shares(timeline["start_ns"][own], timeline["end_ns"][own])
    return rows, seconds


def spread_steps(rows: Sequence[EnergyRow]) -> StepSpread | None:
    """Return how some steps differ; None for fewer than two."""
    steps = [s for s in rows if not math.isnan(s.energy_j)]
    if len(steps) < 2:
        return None
    spent = np.array([s.energy_j for s in steps])
    low, high = int(np.argmin(spent)), int(np.argmax(spent))
    return StepSpread(
        count=len(steps),
        total_j=math.fsum(spent),
        median_j=float(np.median(spent)),
        least_j=float(spent[low]),
        least=steps[low].name,
        most_j=float(spent[high]),
        most=steps[high].name,
    )
