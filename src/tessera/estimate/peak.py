"""The highest power that a sensor would show of an iteration which repeats, and how far above its limit a board goes.

A limiter holds the mean over about half a second, not every moment. Recorded on an H200 limited to 700 W under mixed
loads (benchmarks/measure/limit_windows.py, all of them sustained): the highest mean over 20 ms is 965 W, over 50 ms
942 W, over 100 ms 846 W, over 200 ms 766 W, over 500 ms 682 W, over a second 670 W. On other boards nobody measured it:
there the peak is held at the limit, and said to be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .power import PowerModel
from .timeline import Solved

WINDOW_S = 0.02
"""A predicted peak is a mean over this: what one power sample of the H200 stands for (docs/measuring.md)."""

# The 965 W above over the 691 W that the same board sustains (`limit_fraction` of its 700 W).
_BURST = 965.0 / 690.9
_NOTED = 1.03  # nearer to the limit nobody would wonder: an iteration that is bound by it lies at it

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest mean over `WINDOW_S`, and what a reader has to know of it ("" where nothing)."""

    power_w: float
    note: str = ""


def of_iteration(solved: Solved, power: PowerModel, *, measured: bool, burst: bool = False) -> Peak | None:
    """The peak of a solved iteration; `measured`: the limiter is the H200's, whose bursts above its limit are known."""
    waits_j = power.static_w * solved.wait_s
    runs_j = solved.static_j + solved.compute_j + solved.memory_j - waits_j
    # The wait comes before its kernel: the two alternate.
    seconds = np.stack((solved.wait_s, solved.device_s), axis=1).ravel()
    joules = np.stack((waits_j, runs_j), axis=1).ravel()
    found_w = highest_mean_w(seconds, joules)
    if found_w is None:
        return None
    ceiling_w = math.inf if burst else _BURST * power.limit_w if measured else power.limit_w
    average_w = float(joules.sum() / seconds.sum())
    note = _above(found_w, measured, burst) if found_w > _NOTED * power.limit_w else ""
    return Peak(max(average_w, min(found_w, ceiling_w)), note)


def _above(found_w: float, measured: bool, burst: bool) -> str:
    """What is said of a peak above the limit."""
    if burst:
        return "the peak is above the power limit: a burst ends before it acts"
    if measured:
        return "the peak is above the power limit, which is held in the mean over half a second (recorded on an H200)"
    dearest = f"the dearest {1e3 * WINDOW_S:.0f} ms would draw {found_w:.3g} W"
    return f"{dearest}: the peak is held at the power limit, as nobody measured how far this board goes above it"


def highest_mean_w(
    seconds: Sequence[float] | Array, joules: Sequence[float] | Array, window_s: float = WINDOW_S
) -> float | None:
    """The highest mean power over any window of work that repeats without end; None where it takes no time."""
    took, spent = np.asarray(seconds, float), np.asarray(joules, float)
    whole_s = float(took.sum())
    if not whole_s > 0:
        return None
    average_w = float(spent.sum()) / whole_s
    # A window of many iterations holds whole ones, at the average, and a rest that may be the dearest part of one.
    rest_s = window_s % whole_s
    if rest_s <= 1e-9 * whole_s:
        return average_w
    times = np.concatenate(([0.0], np.cumsum(np.tile(took, 2))))
    energy = np.concatenate(([0.0], np.cumsum(np.tile(spent, 2))))
    # The joules within a window are linear between the moments at which either of its ends meets an edge.
    starts = np.concatenate((times, times - rest_s))
    starts = starts[(starts >= 0) & (starts + rest_s <= times[-1])]
    rest_j = float((np.interp(starts + rest_s, times, energy) - np.interp(starts, times, energy)).max())
    return (average_w * (window_s - rest_s) + rest_j) / window_s
