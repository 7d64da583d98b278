"""Fits watts by class to power samples: least squares with a prior and a lower bound, and the covariance of the result.

    sample_i = sum over classes of watts_k * exposure_ik + noise,      exposure = response * (class k runs)

This module knows nothing of kernels: classes are just columns. The noise is taken from the recording itself (its
residuals and their autocorrelation), so a load that oscillates around its power limit gets wider intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..joules import FULL, Z90, Floats, Ints
from ..schema import Domain, Energy, Hold
from ..sums import SQRT12

# NVML's ring on an H200: of exponentials and boxcars with a dead time, these fit four recorded mixtures of kernels best
# (benchmarks/measure/attribution.py --fit; they also meet the fall of the power in h200/waves.json at +26 and +45 ms).
# The mean delay is well determined (16 ms, +-1), the split between exponential and boxcar is not.
RING_TAU_S = 0.011
RING_BOX_S = 0.010
RING_DELAY_ERROR_S = 0.0025
# The share of the exponential that a boxcar with the same mean delay may replace (standard deviation): exponentials of
# 4 to 11 ms fit the recordings about equally well (docs/measuring.md).
SHAPE_ERROR = 0.5
# After this many time constants, 0.9% of an edge is still missing: good enough for a sum of watts.
_TAIL = 4.7
_STEP_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """How a sensor shows power late and smeared: a boxcar of `box_s`, an exponential of `tau_s`, then a dead time.

    A sample at time t is the sum over lags u of `lags()`'s weights times the power drawn at t - u. `delay_error_s` is
    the 90% half-width of the delay.
    """

    tau_s: float
    box_s: float
    dead_s: float = 0.0
    delay_error_s: float = RING_DELAY_ERROR_S

    @property
    def delay_s(self) -> float:
        return self.tau_s + 0.5 * self.box_s + self.dead_s

    @property
    def blur_s(self) -> float:
        """Standard deviation of the times that a sample averages."""
        return math.hypot(self.tau_s, self.box_s / SQRT12)

    @property
    def delay_sd_s(self) -> float:
        """Standard deviation of the delay."""
        return self.delay_error_s / Z90

    @property
    def memory_s(self) -> float:
        """How far back a sample looks."""
        return max(self.dead_s + self.box_s + _TAIL * self.tau_s, _STEP_S)

    def later(self, seconds: float) -> Response:
        return replace(self, dead_s=self.dead_s + seconds)

    def variants(self) -> list[Response]:
        """Return responses that differ by a standard deviation: a later one, and one of another shape."""
        later = [self.later(self.delay_sd_s)]
        moved_s = min(SHAPE_ERROR * self.tau_s, self.tau_s)
        return [*later, replace(self, tau_s=self.tau_s - moved_s, box_s=self.box_s + 2 * moved_s)] if moved_s else later

    def step_response(self, since_s: Floats) -> Floats:
        """Return the share of a step that the sensor shows so long after it."""
        t = since_s - self.dead_s
        box = max(self.box_s, 1e-6)
        return (_ramp(t, self.tau_s) - _ramp(t - box, self.tau_s)) / box

    def lags(self) -> tuple[Floats, Floats]:
        """Return edges of lag (s, ascending), and the weights of the power drawn between them; the weights sum to 1."""
        count = max(2, round((self.memory_s - self.dead_s) / _STEP_S))
        edges = self.dead_s + np.linspace(0.0, self.memory_s - self.dead_s, count + 1)
        weights = np.diff(self.step_response(edges))
        return edges, weights / weights.sum()


def _ramp(t: Floats, tau_s: float) -> Floats:
    """Return the integral of an exponential's step response."""
    t = np.maximum(t, 0.0)
    return t - tau_s * -np.expm1(-t / tau_s) if tau_s > 0 else t


def response_of(domain: Domain, spacing_s: float) -> Response:
    """Return the response of a domain's sensor: the ring has the shape of an H200's, others are a boxcar.

    Lag and blur are the domain's. For a ring whose domain has no error of the lag, they are an H200's too.
    """
    if (domain.taken_as or domain.source).removeprefix("replay:").startswith("nvml-samples"):
        ring = Response(tau_s=RING_TAU_S, box_s=RING_BOX_S)
        if domain.lag_error_s == 0.0:
            return ring
        wider = domain.blur_s / ring.blur_s
        error_s = max(domain.lag_error_s, RING_DELAY_ERROR_S)  # also covers what is unknown about the shape
        scaled = replace(ring, tau_s=wider * ring.tau_s, box_s=wider * ring.box_s, delay_error_s=error_s)
        return scaled.later(domain.lag_s - scaled.delay_s)
    if domain.hold is Hold.MEAN:  # each sample is the mean since the sample before
        return Response(tau_s=0.0, box_s=max(spacing_s, 1e-3), dead_s=max(domain.lag_s, 0.0))
    box_s = max(domain.blur_s * np.sqrt(12.0), min(domain.resolution_s, spacing_s), 1e-3)
    dead_s = domain.lag_s - 0.5 * box_s
    error_s = max(domain.lag_error_s or 0.1 * box_s, RING_DELAY_ERROR_S)
    return Response(tau_s=0.0, box_s=box_s, dead_s=dead_s, delay_error_s=error_s)


# The least noise of a sample: watts, a share of its level, and the jitter of its time (s) times the slope of the power.
# Only their proportions matter, since the residuals set the scale. They come from the residuals of recorded mixtures in
# flat and in steep parts (benchmarks/measure/attribution.py --fit).
_NOISE_W, _NOISE_SHARE, _JITTER_S = 4.0, 0.03, 0.0015
# Least correlation of consecutive residuals, since samples overlap: in no recording it was smaller.
_ALIKE = 0.2
_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerFit:
    """Watts by class and their covariance (W^2); `noise_w` is the scale of the residuals of `samples` samples.

    `informed` is, for each class, the share of its prior variance that the samples removed: 0 if they told nothing.
    """

    watts: Floats
    covariance: Floats
    informed: Floats
    noise_w: float
    samples: int


def exposure(
    times_ns: Ints, start_ns: Ints, end_ns: Ints, seconds: Floats, cls: Ints, classes: int, response: Response
) -> Floats:
    """Return how much of each sample (rows) is each class (columns), with the sensor's response. Exact at the edges.

    `seconds` is the weight of each interval: its share of a shared device times its relative power.
    """
    edges, weights = response.lags()
    asked_ns = times_ns[:, None] - np.round(edges * 1e9).astype(np.int64)[None, :]
    rate = weights / np.diff(edges)
    design = np.zeros((len(times_ns), classes))
    for number, sums in running_seconds(asked_ns, start_ns, end_ns, seconds, cls, classes):
        design[:, number] = (sums[:, :-1] - sums[:, 1:]) @ rate
    return design


def running_seconds(
    asked_ns: Ints, start_ns: Ints, end_ns: Ints, seconds: Floats, cls: Ints, classes: int
) -> Iterator[tuple[int, Floats]]:
    """Yield each class that ran, and the seconds of it until each of the asked times."""
    origin = int(asked_ns.min()) if asked_ns.size else 0
    where = (asked_ns - origin).astype(np.float64)
    if (np.diff(cls) < 0).any():
        order = np.argsort(cls, kind="stable")
        start_ns, end_ns, seconds, cls = start_ns[order], end_ns[order], seconds[order], cls[order]
    bounds = np.searchsorted(cls, np.arange(classes + 1))
    for k in range(classes):
        members = slice(bounds[k], bounds[k + 1])
        if bounds[k] == bounds[k + 1]:
            continue
        x = np.empty(2 * int(bounds[k + 1] - bounds[k]))
        x[0::2], x[1::2] = start_ns[members] - origin, end_ns[members] - origin
        done = np.cumsum(seconds[members])
        y = np.empty_like(x)
        y[1::2], y[0::2] = done, done - seconds[members]
        if np.any(np.diff(x) < 0):  # the class ran on two streams at once, so edges are not in order
            x, y = _merge_overlaps(x, seconds[members])
        yield k, np.interp(where, x, y, left=0.0, right=float(done[-1]))


def _merge_overlaps(x: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Return the running sum of overlapping intervals; each adds its seconds evenly from its start to its end."""
    rate = seconds / np.maximum(x[1::2] - x[0::2], 1.0)
    order = np.argsort(x, kind="stable")
    steps = np.empty_like(x)
    steps[0::2], steps[1::2] = rate, -rate
    slope = np.cumsum(steps[order])
    at = x[order]
    return at, np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(at))])


def solve(
    design: Floats, samples_w: Floats, variants: Sequence[Floats], later_s: float, prior_w: Floats, sd_w: Floats,
    least_w: float, *, noise_w: float = _NOISE_W,
) -> PowerFit:  # fmt: skip
    """Return watts by class. `noise_w` is the least noise of a sample without power.

    `variants` are the designs of responses that differ by a standard deviation; the first is the one that is `later_s`
    later. How much the sensor differs is solved together with the watts: in a loop, every step has the same error of
    the response, so more steps do not make it smaller.
    """
    classes, extra = len(prior_w), len(variants)
    precision = np.diag(1.0 / np.concatenate([sd_w, np.ones(extra)]) ** 2)
    expected = np.concatenate([prior_w, np.zeros(extra)])
    least = np.concatenate([np.full(classes, least_w), np.full(extra, -np.inf)])
    scale, found, columns = 1.0, expected, design
    weight = np.ones(len(samples_w))
    for _ in range(_ROUNDS):
        level = design @ found[:classes]
        differ = [variant @ found[:classes] - level for variant in variants]
        columns = np.column_stack([design, *differ])
        jitter_w = differ[0] * (_JITTER_S / later_s) if differ else 0.0
        sigma = np.sqrt(noise_w**2 + (_NOISE_SHARE * level) ** 2 + jitter_w**2)
        weight = 1.0 / (scale * sigma) ** 2
        found = _solve_bounded(columns, samples_w, weight, precision, expected, least)
        scale = _scale((samples_w - columns @ found) / sigma, columns, weight, precision)
    hessian = columns.T @ (columns * weight[:, None]) + precision
    covariance: Floats = np.linalg.inv(hessian).astype(np.float64)[:classes, :classes]
    informed = 1.0 - np.clip(np.diag(covariance) / sd_w**2, 0.0, 1.0)
    left_w = float(np.sqrt(np.mean((samples_w - columns @ found) ** 2))) if len(samples_w) else 0.0
    return PowerFit(
        watts=found[:classes], covariance=covariance, informed=informed, noise_w=left_w, samples=len(samples_w)
    )


def _scale(residuals: Floats, design: Floats, weight: Floats, precision: Floats) -> float:
    """Return how much the residuals exceed the assumed noise, corrected for fitted parameters and autocorrelation."""
    n = len(residuals)
    if n < 3:
        return 1.0
    data = design.T @ (design * weight[:, None])
    fitted = float(np.trace(np.linalg.solve(data + precision, data)))  # degrees of freedom that the samples determine
    variance = float(np.sum(residuals**2)) / max(n - fitted, 0.2 * n)
    alike = float(np.sum(residuals[1:] * residuals[:-1]) / max(np.sum(residuals**2), 1e-12))
    alike = min(max(alike, _ALIKE), 0.9)
    return float(np.sqrt(max(variance, 1.0) * (1.0 + alike) / (1.0 - alike)))


def _solve_bounded(
    design: Floats, samples_w: Floats, weight: Floats, precision: Floats, prior_w: Floats, least_w: Floats
) -> Floats:
    """Solve least squares with a prior and a lower bound; classes below the bound are held there one by one."""
    hessian = design.T @ (design * weight[:, None]) + precision
    right = design.T @ (weight * samples_w) + precision @ prior_w
    held = np.zeros(len(prior_w), bool)
    watts: Floats = np.linalg.solve(hessian, right).astype(np.float64)
    while np.any((watts < least_w) & ~held):
        held[np.argmin(np.where(held, np.inf, watts - least_w))] = True
        free = ~held
        watts = np.where(held, least_w, 0.0)
        if free.any():
            rest = right[free] - hessian[np.ix_(free, held)] @ watts[held]
            watts[free] = np.linalg.solve(hessian[np.ix_(free, free)], rest)
    return watts


def conserve_energy(watts: Floats, covariance: Floats, seconds: Floats, joules: float) -> tuple[Floats, Floats]:
    """Return the most likely change that makes the parts sum to the measured joules: uncertain parts change most."""
    if not np.any(seconds > 0):
        return watts, covariance
    direction = covariance @ seconds
    total = float(seconds @ direction)
    if total <= 0:
        return watts * (joules / float(seconds @ watts)), covariance
    moved = watts + direction * ((joules - float(seconds @ watts)) / total)
    if np.any(moved < 0):  # too large for a correction of single parts: scale all of them
        moved = watts * (joules / float(seconds @ watts))
    return moved, covariance - np.outer(direction, direction) / total


def add_level_error(watts: Floats, covariance: Floats, energy: Energy) -> Floats:
    """Add the error of the sensor's level, which all classes share and no sample can tell.

    Time that was not seen only widens the error of the sum: it is not part of what the classes get.
    """
    unseen_j = energy.energy_j * (1.0 / energy.coverage - 1.0) if energy.coverage < FULL else 0.0
    relative = max(energy.error_j - unseen_j, 0.0) / energy.energy_j / Z90
    return covariance + np.outer(watts, watts) * relative**2


def groups(design: Floats, alike: float = 0.98) -> Ints:
    """Number the groups of classes whose exposures rise and fall together in the samples; -1 if a class is alone."""
    n = design.shape[1]
    if len(design) < 3:  # in two samples, everything moves together
        return np.full(n, -1, np.int64)
    centred = design - design.mean(axis=0)
    size = np.sqrt(np.sum(centred**2, axis=0))
    unit = centred / np.where(size > 0, size, 1.0)
    same = (unit.T @ unit > alike) & (size > 0)[:, None] & (size > 0)[None, :]
    number = np.full(n, -1, np.int64)
    count = 0
    for k in range(n):
        if number[k] >= 0 or same[k].sum() < 2:
            continue
        waiting, members = [k], set()
        while waiting:
            i = waiting.pop()
            if i in members:
                continue
            members.add(i)
            waiting += [int(j) for j in np.flatnonzero(same[i]) if int(j) not in members]
        number[list(members)] = count
        count += 1
    return number
