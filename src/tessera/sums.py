r"""Keeps running sums beside power samples, so that a window costs two look-ups, however long it was.

Samples show the true power late (lag), smeared (blur), and only at some moments (resolution):

    true power   ____/‾‾‾‾‾‾‾‾‾\____
    samples      ____.__/‾.‾‾‾.‾‾\_.__.___      shifted right by the lag
    window           |<------->|
    integrated         |<------->|              the same window, moved by the lag

So a window is moved by the lag, and the sample curve is integrated between the moved edges, with the partial intervals
at both ends. All of it is in running sums, which are kept beside each sample (`mark`), so the samples of a window may
be forgotten.

Three things stay uncertain, and `window_error_j` adds them in quadrature: the level of the sensor, the power between
two samples, and where within the blur an edge lies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .schema import Domain, Energy

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Half-width of a 90% interval of a normal distribution, in standard deviations.
Z90 = 1.6449
# A uniform distribution is this many standard deviations wide.
SQRT12 = math.sqrt(12.0)
# A window with this coverage counts as fully seen: the rounding of its edges alone costs that much.
FULL = 0.995


_Number = TypeVar("_Number", int, float)


def sum_known(values: Iterable[_Number | None]) -> _Number | None:
    """Return the sum of what is known; None if nothing is."""
    known = [v for v in values if v is not None]
    return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class Mark:
    """The running sums at one moment: joules, seconds that were seen, variance (J²); and the swing (W) there.

    `loose_j2` is the variance of the mark itself, if it lies in an interval of which only the mean is known. `power_w`
    is the power at that moment.
    """

    joules: float
    covered_s: float
    variance_j2: float
    swing_w: float
    loose_j2: float = 0.0
    power_w: float = 0.0


ZERO = Mark(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Sums:
    """Running sums beside samples; each includes its sample."""

    joules: Floats
    covered_s: Floats
    variance_j2: Floats


def accumulate(times_ns: Ints, watts: Floats, *, mean: bool, noise: float = 0.0, start: Mark = ZERO) -> Sums:
    """Sum up samples; `start` is the sum at the first sample.

    Intervals that end in NaN (unknown power) add nothing. With `mean`, a sample is the mean since the sample before.
    Otherwise power changes linearly between samples, and the true power is only known to lie near that line: with a
    uniform prior as high as their difference, the error of one interval is |Δw|·dt/√12. `noise` is the relative
    standard deviation of a single sample, added to that.
    """
    n = len(times_ns)
    joules, covered, variance = np.zeros(n), np.zeros(n), np.zeros(n)
    if n > 1:
        dt = np.diff(times_ns) * 1e-9
        known = ~np.isnan(watts[1:])
        begin = np.where(np.isnan(watts[:-1]), watts[1:], watts[:-1])  # constant after a gap, from its end on
        level = watts[1:] if mean else 0.5 * (watts[1:] + begin)
        rise = np.zeros(n - 1) if mean else watts[1:] - begin
        np.cumsum(np.where(known, level * dt, 0.0), out=joules[1:])
        np.cumsum(np.where(known, dt, 0.0), out=covered[1:])
        spread = (rise * dt) ** 2 / 12.0 + (noise * level * dt) ** 2
        np.cumsum(np.where(known, spread, 0.0), out=variance[1:])
    return Sums(joules + start.joules, covered + start.covered_s, variance + start.variance_j2)


def mark(times_ns: Ints, watts: Floats, sums: Sums, x_ns: int, *, mean: bool, reach_ns: int = 0) -> Mark:
    """The running sums at any time within the samples; beyond them nothing is known and nothing is added.

    `reach_ns` is how far from it a sample still shows the power there (`find_reach_ns`).
    """
    n = len(times_ns)
    if n == 0:
        return ZERO
    i = int(np.searchsorted(times_ns, x_ns, side="right")) - 1
    swing = _swing(times_ns, watts, i, x_ns, reach_ns)
    if i < 0 or n == 1:
        return Mark(float(sums.joules[0]), float(sums.covered_s[0]), float(sums.variance_j2[0]), swing)
    if i >= n - 1:
        return Mark(float(sums.joules[-1]), float(sums.covered_s[-1]), float(sums.variance_j2[-1]), swing)
    j0, c0, v0 = float(sums.joules[i]), float(sums.covered_s[i]), float(sums.variance_j2[i])
    w0, w1 = float(watts[i]), float(watts[i + 1])
    if np.isnan(w1):
        return Mark(j0, c0, v0, swing)
    inside_s = (x_ns - int(times_ns[i])) * 1e-9  # subtract whole ns: a float of epoch size has steps of 256 ns
    fraction = inside_s / (float(times_ns[i + 1] - times_ns[i]) * 1e-9)
    if np.isnan(w0):
        w0 = w1
    if mean:
        # Inside an interval of which only the mean is known, the power may be distributed in any way; at its ends the
        # sum is exact again. The spread is that of the neighbouring means, at least the mean itself (a burst).
        spread_w = max(swing, w1)
        loose = (spread_w * inside_s * (1.0 - fraction)) ** 2 / 3.0
        return Mark(j0 + w1 * inside_s, c0 + inside_s, v0, swing, loose, w1)
    part = (w0 + 0.5 * (w1 - w0) * fraction) * inside_s
    variance = v0 + ((w1 - w0) * inside_s) ** 2 / 12.0
    return Mark(j0 + part, c0 + inside_s, variance, swing, power_w=w0 + (w1 - w0) * fraction)


def find_reach_ns(domain: Domain) -> int:
    """How far from an edge samples still show it: half of a boxcar of the domain's blur; 0 where the next ones do."""
    reach_s = 0.5 * SQRT12 * domain.blur_s
    return round(reach_s * 1e9) if reach_s > domain.resolution_s else 0


def _swing(times_ns: Ints, watts: Floats, i: int, x_ns: int, reach_ns: int) -> float:
    """How far the samples next to an edge (two on each side, and all that show it) lie apart."""
    first, last = max(i - 1, 0), i + 3
    if reach_ns:
        reached = np.searchsorted(times_ns, [x_ns - reach_ns, x_ns + reach_ns])
        first, last = min(first, int(reached[0])), max(last, int(reached[1]))
    near = watts[first:last]
    near = near[~np.isnan(near)]
    return float(near.max() - near.min()) if len(near) else 0.0


def between_variance(start: Mark, end: Mark) -> float:
    """Return the variance (J²) due to the unknown power between the samples of a window."""
    return max(end.variance_j2 - start.variance_j2, 0.0) + start.loose_j2 + end.loose_j2


def edge_variance(start: Mark, end: Mark, edge_s: float, least_w: float = 0.0) -> float:
    """Return the variance (J²) due to two edges, each known to `edge_s` (standard deviation).

    An error of an edge costs that time multiplied by the swing of the samples around it, or by `least_w` if that is
    more. It is never larger than the window.
    """
    edge_s = min(edge_s, max(end.covered_s - start.covered_s, 0.0) / SQRT12)
    return edge_s**2 * (max(start.swing_w, least_w) ** 2 + max(end.swing_w, least_w) ** 2)


def edge_sd_s(domain: Domain) -> float:
    """Return the standard deviation of an edge: its place within the blur (uniform: over √12), and the lag's error."""
    return math.hypot(domain.blur_s / SQRT12, domain.lag_error_s / Z90)


def window_error_j(start: Mark, end: Mark, *, gain_error: float, edge_s: float, unseen_s: float = 0.0) -> float:
    """Return the 90% half-width of the joules between two marks, whose edges are known to `edge_s` (`edge_sd_s`).

    Unseen time may have drawn as much as the seen time, so it widens the interval by that.
    """
    joules = end.joules - start.joules
    variance = between_variance(start, end) + edge_variance(start, end, edge_s)
    seen_s = end.covered_s - start.covered_s
    unseen_j = abs(joules) / seen_s * unseen_s if seen_s > 0 and unseen_s > 0 else 0.0
    return math.sqrt((gain_error * joules) ** 2 + Z90**2 * variance) + unseen_j


def energy_between(domain: Domain, start: Mark, end: Mark, seconds: float) -> Energy:
    """Return the joules of one domain between two marks; NaN, not 0, if nothing of the window was seen."""
    covered_s = end.covered_s - start.covered_s
    coverage = min(max(covered_s / seconds, 0.0), 1.0) if seconds > 0 else 0.0
    unseen_s = (1.0 - coverage) * seconds if coverage < FULL else 0.0
    unknown = coverage <= 0.0 and seconds > 0
    error_j = window_error_j(start, end, gain_error=domain.gain_error, edge_s=edge_sd_s(domain), unseen_s=unseen_s)
    joules = max(end.joules - start.joules, 0.0)
    return Energy(
        energy_j=math.nan if unknown else joules,
        error_j=math.nan if unknown else error_j,
        common_error_j=0.0 if unknown else domain.gain_error * joules,
        time_s=seconds,
        source=domain.source,
        coverage=coverage,
        basis=domain.basis,
    )
