"""The mean step of a run: which steps count, what one costs, and how sure that is.

A run's screen and page, `analyze.diff` and `graph.profile` all state it from here, so that their ± are one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..attribute.table import EnergyRow
from ..units import format_duration, format_energy
from .repeats import scatter
from .step_rows import wall

DEAR = 1.5
"""A step is dear where it costs more than this many times the middle one: it compiles, tunes, or waits for a disk."""
SETTLES = 3
"""So many first steps may be left out, or a tenth of them: more dear ones are how the program runs."""
FEWEST = 3
"""Of fewer steps none is the middle one."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Counted:
    """The steps that count, by their places among all; `first` are those left out as dear, `unseen` as unmeasured.

    Dear steps are left out where the run begins with them: it has not settled. Later ones (a checkpoint, a validation)
    are the program's own, and count.
    """

    places: Sequence[int]
    first: Sequence[EnergyRow] = ()
    unseen: Sequence[EnergyRow] = ()

    @property
    def names(self) -> str | None:
        """Those left out as dear; None where the run begins with no such step."""
        return _listed(self.first) if self.first else None

    @property
    def left_out(self) -> str | None:
        """Which steps do not count and why, in words; None where all count."""
        parts = []
        if self.first:
            many, joules = len(self.first) > 1, math.fsum(s.energy_j for s in self.first)
            took = format_duration(sum(map(wall, self.first)), 3) if math.isnan(joules) else format_energy(joules, 3)
            rule = f"first, over {DEAR:g} times the middle"  # short: it shares a line of the first screen
            most = f"; {SETTLES} such or a tenth of all at most" if many else ""
            parts.append(f"{_listed(self.first)} ({took}; {rule}{most})")
        if self.unseen:
            parts.append(f"{_listed(self.unseen)}, whose power no sensor saw")
        return f"without {'; without '.join(parts)}" if parts else None


@dataclass(frozen=True, slots=True)
class MeanStep:
    """One step's joules and seconds, and the mean watts of all, with 90% half-widths.

    `error_j` and `error_w` have the sensor's error and how the steps scatter, `error_s` the scatter alone. Of a single
    step nobody knows how it scatters: `once`, the sensor's error is all there is, and `error_s` is NaN.
    """

    energy_j: float
    error_j: float
    seconds: float
    error_s: float
    error_w: float
    once: bool


def dear(spent: Floats) -> NDArray[np.bool_]:
    """Which steps are dear, by the joules of each (or seconds, where joules are not known)."""
    return spent > DEAR * np.median(spent) if len(spent) >= FEWEST else np.zeros(len(spent), np.bool_)


def counted(steps: Sequence[EnergyRow]) -> Counted:
    """Sort out which steps count: those that were measured, without the dear ones at the beginning."""
    known = [i for i, s in enumerate(steps) if not math.isnan(s.energy_j)]
    if not known:  # a trace without power
        high, known = dear(np.array([wall(s) for s in steps])), list(range(len(steps)))
    else:
        high = dear(np.array([steps[i].energy_j for i in known]))
    begin = min(int(np.argmin(high)), max(SETTLES, len(high) // 10)) if len(high) else 0
    places = set(known)
    unseen = [s for i, s in enumerate(steps) if i not in places]
    return Counted(known[begin:], [steps[i] for i in known[:begin]], unseen)


def mean_step(steps: Sequence[EnergyRow], level: float) -> MeanStep:
    """The mean of some steps. `level`: the share of the joules by which the sensor may be off in all of them."""
    joules, seconds = np.array([s.energy_j for s in steps]), np.array([wall(s) for s in steps])
    own_j = math.hypot(*(s.energy_error_j for s in steps)) / len(steps)
    return mean_of(joules, seconds, max(own_j, level * float(np.mean(joules))))


def mean_of(joules: Floats, seconds: Floats, own_j: float) -> MeanStep:
    """The mean of what was spent in each step; `own_j` is the half-width that the sensor alone gives it."""
    mean_j, mean_s = float(np.mean(joules)), float(np.mean(seconds))
    own_w = own_j / mean_s if mean_s > 0 else math.nan
    if len(joules) < 2:
        return MeanStep(mean_j, own_j, mean_s, math.nan, own_w, True)
    # A longer step costs more joules at the same watts. Of the ratio of both means only what the joules of a step
    # differ from its seconds at the mean watts is scatter (W. G. Cochran, "Sampling Techniques", 1977, chapter 6).
    apart_j = joules - seconds * (mean_j / mean_s) if mean_s > 0 else np.full(len(joules), math.nan)
    wide_w = math.hypot(own_w, scatter(apart_j) / mean_s) if mean_s > 0 else math.nan
    return MeanStep(mean_j, math.hypot(own_j, scatter(joules)), mean_s, scatter(seconds), wide_w, False)


def _listed(steps: Sequence[EnergyRow]) -> str:
    """Their names: all of a few, else the first and the last."""
    names = [s.name for s in steps]
    return " and ".join(names) if len(names) < 3 else f"{names[0]} to {names[-1]} ({len(names)} steps)"
