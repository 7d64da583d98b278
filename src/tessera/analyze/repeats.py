"""How sure a mean is: of the steps of a run, and of several runs of one program.

Steps of one run do not contain what differs between runs: the clocks of the day, where memory lies, who else is on the
machine. Runs repeated do, so that where there are several, their scatter alone decides.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..monitor.steady_state import mean_interval, t90
from .side import ZERO, Cell, Runs

Floats = NDArray[np.float64]

# A run slowly warms up, or somebody else comes and goes: neighbouring steps resemble each other, and the scatter from
# step to step says too little. So many stretches of it are few enough to be unlike, and enough to have a scatter.
BLOCKS = 5


def scatter(values: Sequence[float] | Floats) -> float:
    """Half-width of the 90% interval of a mean of steps; NaN of fewer than two, which have none.

    The wider of two: by the steps, where those that resemble their neighbours count for less, and by the means of
    BLOCKS stretches of the run, which drift.
    """
    found = np.asarray(values, np.float64)
    if len(found) < 2:
        return math.nan
    wide = mean_interval(found).error or 0.0
    if len(found) < 2 * BLOCKS:
        return wide
    return max(wide, between([float(part.mean()) for part in np.array_split(found, BLOCKS)]))


def between(values: Sequence[float]) -> float:
    """Half-width of the 90% interval of a mean of runs, which know nothing of each other; NaN of fewer than two."""
    if len(values) < 2:
        return math.nan
    return t90(len(values) - 1) * _standard_error(values)


def mean(cells: Sequence[Cell], others: Sequence[Cell] = ()) -> Cell:
    """One line of several runs. One run alone scatters as the `others` do where those are several, or as its steps do.

    The sensor's error is the same in each and stays as it is.
    """
    if len(cells) > 1:
        joules, seconds = [c.energy_j for c in cells], [c.seconds for c in cells]
        watts, calls = [c.power_w for c in cells], float(np.mean([c.calls for c in cells]))
        sensor_j, sensor_w = (float(np.mean([getattr(c, n) for c in cells])) for n in ("error_j", "power_error_w"))
        by_run = Runs(
            len(cells), _standard_error(joules), _standard_error(seconds), _standard_error(watts), sensor_j, sensor_w
        )
        return Cell(
            float(np.mean(joules)), math.hypot(sensor_j, between(joules)), float(np.mean(seconds)), between(seconds),
            calls, cells[0].kind, runs=by_run, error_w=math.hypot(sensor_w, between(watts)),
        )  # fmt: skip
    only = cells[0]
    if len(others) < 2 or only.errors is not None:  # a prediction does not scatter
        return only
    single = math.sqrt(len(others))  # one run scatters so much more than their mean
    named = ("energy_j", "seconds", "power_w")
    wide_j, wide_s, wide_w = (single * between([getattr(c, name) for c in others]) for name in named)
    error_s = wide_s if only.once else max(only.error_s, wide_s)
    return dataclasses.replace(
        only, error_j=math.hypot(only.error_j, wide_j), error_s=error_s, once=False,
        error_w=math.hypot(only.power_error_w, wide_w),
    )  # fmt: skip


def apart(before: Runs, after: Runs) -> tuple[float, float, float]:
    """90% half-widths (joules, seconds, watts) of a difference of two means of runs, by their scatter (Welch, 1947)."""
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
    return t90(max(int(1.0 / lost + 1e-9), 1)) * both  # fewer degrees of freedom than there are: rather too wide


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) / math.sqrt(len(values))


def rows(
    before: Sequence[dict[str, Cell]], after: Sequence[dict[str, Cell]]
) -> tuple[dict[str, Cell], dict[str, Cell]]:
    """The rows of some runs before and after, each as one; a row that a run does not have is nothing there."""
    sides = []
    for mine, others in ((before, after), (after, before)):
        found = {}
        for name in dict.fromkeys(n for run in mine for n in run):
            kind = next(run[name].kind for run in mine if name in run)
            nothing = dataclasses.replace(ZERO, kind=kind, errors=None)
            here = [run.get(name, nothing) for run in mine]
            found[name] = mean(here, [run.get(name, nothing) for run in others])
        sides.append(found)
    return sides[0], sides[1]
