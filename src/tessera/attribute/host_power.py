"""Divides the joules within one sample of a host's modelled power among operators and waiting, by a fit over samples.

    watts of sample i = sum over k of power_k * share_ik,     k: operators, short gaps, long gaps

A sample of 100 ms with 12 ms of work and 60 ms of sleep tells only what both took together. Samples with other mixes
tell how the powers differ. Each sample's joules are then divided by seconds times these watts, so no joule is lost. If
all samples have the same mix, the watts stay equal, and the intervals say that nearly any division is possible.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..joules import Z90, Floats, Ints
from .fit import PowerFit, solve

# The least noise of a sample, as a share of the highest: Python's threads wait up to 5 ms for one another
# (sys.getswitchinterval), so CPU time may be noted that late, in samples of 100 ms. Larger residuals increase it.
_LATE = 0.05
# Every part draws at least this share of the others, so that a sample with only one part keeps its joules.
_LEAST = 1e-3
_PARTS = 3
# A sample this many times as far from the fit as the median is from something else (3.4 standard deviations).
_FAR = 5.0
# A sample has both operators and gaps if each takes at least this share of its time.
_MIXED = 0.05


@dataclass(frozen=True, slots=True)
class HostDivision:
    """Where the joules of each sample went. `joules_at` returns their running sum at some times.

    `covariance` (J^2) is the error of the division itself, for operators, short and long gaps. `noise_w` is how much
    samples differ from the fit. `mixed` is the share of the joules in samples with both operators and gaps.
    """

    joules_at: Callable[[Ints], Floats]
    covariance: Floats
    noise_w: float
    mixed: float
    spacing_s: float


def divide_samples(
    times_ns: Ints, joules_at: Callable[[Ints], Floats], seen: Sequence[tuple[int, int]], gaps: tuple[Ints, Ints],
    is_long: Ints, most_w: float | None = None,
) -> HostDivision | None:  # fmt: skip
    """Divide each sample by the power of what it contains; return None if nothing can be told apart.

    `joules_at` divides each sample by time. `gaps` are the parts of `seen` without an operator, in order. Operators
    draw `most_w` at most, if a model says so.
    """
    inside = [times_ns[(times_ns > begin) & (times_ns < end)] for begin, end in seen]
    edges = np.unique(np.concatenate([np.ravel(np.array(seen, np.int64)), *inside]).astype(np.int64))
    if len(edges) < 2 or len(gaps[0]) == 0:
        return None
    elapsed = _running_seconds(*gaps, is_long, int(edges[0]))
    seconds, joules = np.diff(elapsed(edges), axis=0), np.diff(joules_at(edges))
    starts = np.array([begin for begin, _ in seen])
    is_seen = edges[:-1] < np.array([end for _, end in seen])[np.searchsorted(starts, edges[:-1], side="right") - 1]
    # A sample that reaches beyond the traced time contains unknown work: it is divided, but not used for the fit.
    is_whole = is_seen & np.isin(edges[:-1], times_ns) & np.isin(edges[1:], times_ns)
    found = _fit_watts(seconds, joules, is_whole)
    if found is None:
        return None
    watts, covariance, noise_w = found
    used = np.maximum(watts, _LEAST * watts.max())
    at_edges, at_seconds, cell_w = joules_at(edges), elapsed(edges), _watts_of_cells(seconds, joules, used, most_w)

    def weighted_at(at_ns: Ints) -> Floats:
        cell = np.clip(np.searchsorted(edges, at_ns, side="right") - 1, 0, len(edges) - 2)
        inside_j = ((elapsed(at_ns) - at_seconds[cell]) * cell_w[cell]).sum(axis=1)
        divided: Floats = at_edges[cell] + np.clip(inside_j, 0.0, at_edges[cell + 1] - at_edges[cell])
        return divided

    slopes = _slopes(seconds[is_seen], joules[is_seen], used, np.sqrt(np.diag(covariance)))
    in_operators = seconds[:, 0] / seconds.sum(axis=1)
    is_mixed = is_seen & (in_operators > _MIXED) & (in_operators < 1.0 - _MIXED)
    mixed = float(joules[is_mixed].sum() / joules.sum())
    lasts = np.sort(np.diff(edges))  # take the median by time, since there are short samples at edges
    spacing_s = float(lasts[np.searchsorted(np.cumsum(lasts), lasts.sum() / 2)]) * 1e-9
    return HostDivision(weighted_at, slopes @ covariance @ slopes.T, noise_w, mixed, spacing_s)


def _watts_of_cells(seconds: Floats, joules: Floats, watts: Floats, most_w: float | None) -> Floats:
    """Return watts of the three parts in each sample; they add up to its joules.

    If a sample has more than the fit expects, not all of that is a short operator's: an import may have run beside it.
    So operators draw at most what the fit gives them or the mean of the sample, and no more than `most_w`.
    """
    level = joules / (seconds @ watts)
    ops_w = np.minimum(level * watts[0], np.maximum(joules / seconds.sum(axis=1), watts[0]))
    if most_w is not None:
        ops_w = np.minimum(ops_w, most_w)
    gaps_j = seconds[:, 1:] @ watts[1:]
    has_gap = gaps_j > 0
    rest = np.divide(joules - ops_w * seconds[:, 0], gaps_j, out=level.copy(), where=has_gap)
    ops_w = np.where(has_gap, ops_w, level * watts[0])
    return np.column_stack([ops_w, rest[:, None] * watts[1:]])


def _running_seconds(start_ns: Ints, end_ns: Ints, is_long: Ints, origin_ns: int) -> Callable[[Ints], Floats]:
    """Return a function for the seconds of operators, short gaps and long gaps until some times."""
    curves = []
    for kind in range(2):
        own = is_long == kind
        at = np.column_stack([start_ns[own], end_ns[own]]).reshape(-1) - origin_ns
        so_far = np.repeat(np.cumsum((end_ns - start_ns)[own] * 1e-9), 2)
        so_far[0::2] -= (end_ns - start_ns)[own] * 1e-9
        curves.append((at.astype(np.float64), so_far))

    def sum_seconds(at_ns: Ints) -> Floats:
        where = (at_ns - origin_ns).astype(np.float64)
        idle = [np.interp(where, *curve) if len(curve[0]) else np.zeros(len(where)) for curve in curves]
        return np.column_stack([where * 1e-9 - idle[0] - idle[1], *idle])

    return sum_seconds


def _fit_watts(
    seconds: Floats, joules: Floats, is_whole: NDArray[np.bool_]
) -> tuple[Floats, Floats, float] | None:  # fmt: skip
    """Return the watts of the three parts, their covariance, and how far samples are from them.

    Only samples with operators and those right beside them count: what a program does long before (imports) is not
    waiting. Samples that are far from the fit, such as the one in which the imports end, are left out of a second fit.
    """
    has_op = np.concatenate([[False], (seconds[:, 0] > 1e-9), [False]])
    near = np.flatnonzero(is_whole & (has_op[:-2] | has_op[1:-1] | has_op[2:]))
    found = None
    for _ in range(2):
        found = _solve_ordered(seconds[near], joules[near])
        if found is None:
            return None
        off_w = np.abs(joules[near] - seconds[near] @ found.watts) / seconds[near].sum(axis=1)
        near = near[off_w <= np.maximum(_FAR * np.median(off_w), found.noise_w)]
    assert found is not None
    return found.watts, found.covariance, found.noise_w


def _solve_ordered(seconds: Floats, joules: Floats) -> PowerFit | None:
    """Return the watts of the parts, such that short gaps do not draw more than operators.

    Both are the same thread. A fit with more for short gaps is misled: on a busy machine, where operators wait for a
    core, some samples draw more than others whatever they contain. Then both are treated as one part, and the
    difference that the fit found is added to the uncertainty.
    """
    found = _solve_watts(seconds, joules)
    if found is None or found.watts[1] <= found.watts[0]:
        return found
    same = np.array([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    joined = _solve_watts(seconds @ same, joules)
    if joined is None:  # there are no long gaps
        return dataclasses.replace(found, watts=np.full(_PARTS, joules.sum() / seconds.sum()))
    covariance: Floats = same @ joined.covariance @ same.T + found.covariance
    return dataclasses.replace(joined, watts=same @ joined.watts, covariance=covariance)


def _solve_watts(seconds: Floats, joules: Floats) -> PowerFit | None:
    """Solve least squares over some samples; return None if they have no operators, or nothing else."""
    total_s, lasts_s = seconds.sum(axis=0), seconds.sum(axis=1)
    if not (len(joules) and total_s[0] > 0 and total_s[1:].sum() > 0 and joules.sum() > 0):
        return None
    samples_w = joules / lasts_s
    most_w, mean_w = float(samples_w.max()), float(joules.sum() / lasts_s.sum())
    # Waiting draws between nothing and the highest sample (90% half-width, once the sum is kept); operators draw the
    # rest.
    gap_w = math.sqrt(2.0) / Z90 * most_w
    op_w = gap_w * float(np.hypot(*total_s[1:])) / float(total_s[0])
    return solve(
        seconds / lasts_s[:, None], samples_w, [], 1.0, np.full(_PARTS, mean_w), np.array([op_w, gap_w, gap_w]), 0.0,
        noise_w=_LATE * most_w,
    )  # fmt: skip


def _slopes(seconds: Floats, joules: Floats, watts: Floats, sd_w: Floats) -> Floats:
    """Return how many joules each part (rows) gains for one more watt of each part (columns), over all samples."""
    parts_w = seconds * watts
    share = parts_w / parts_w.sum(axis=1, keepdims=True)
    slopes = np.zeros((_PARTS, _PARTS))
    for k in range(_PARTS):
        moved = -share * share[:, k : k + 1]
        moved[:, k] += share[:, k]
        # The error of a sample cannot be larger than its joules.
        most = 1.0 / np.maximum(Z90 * sd_w[k] * np.abs(moved).max(axis=1), 1e-300)
        slopes[:, k] = (moved * (joules * np.minimum(1.0 / watts[k], most))[:, None]).sum(axis=0)
    return slopes
