"""Statistics of repeated batches: where the steady state begins, how wide the interval is, whether it drifts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..joules import Z90, Floats

# 95% quantile of Student's t (the two-sided 90% interval) by degrees of freedom; any statistics text.
_T95_TEXT = """
    6.314 2.920 2.353 2.132 2.015 1.943 1.895 1.860 1.833 1.812 1.796 1.782 1.771 1.761 1.753
    1.746 1.740 1.734 1.729 1.725 1.721 1.717 1.714 1.711 1.708 1.706 1.703 1.701 1.699 1.697"""
_T95 = tuple(float(t) for t in _T95_TEXT.split())
# A trend is called a drift if it is significant (3 standard errors) and larger than this over the run.
DRIFT = 0.02
# The lowest of many noisy scores is too optimistic: with it, 90% intervals of 9 steady batches contain 84% of the
# truths; with the earliest cut within this factor of it, 89% (simulated with normal batches;
# tests/monitor/test_steady_state.py).
NEAR_BEST = 2.0


@dataclass(frozen=True, slots=True)
class Uncertain:
    """A value with the half-width of its 90% interval; None if there is none (a single batch)."""

    value: float
    error: float | None

    @property
    def relative(self) -> float:
        """Half-width over value; infinite if unknown."""
        if self.error is None or self.value == 0:
            return float("inf")
        return abs(self.error / self.value)

    def with_level(self, gain_error: float) -> Uncertain:
        """Return the same with the sensor's level error added, which repetition does not make smaller."""
        if self.error is None:
            return self
        return Uncertain(self.value, (self.error**2 + (gain_error * self.value) ** 2) ** 0.5)

    def inverse(self, amount: float = 1.0) -> Uncertain:
        """Return `amount` divided by this value, with the same relative error."""
        value = amount / self.value if self.value else float("nan")
        return Uncertain(value, None if self.error is None else value * self.relative)

    def times(self, factor: float) -> Uncertain:
        """Return this value multiplied by a factor."""
        return Uncertain(self.value * factor, None if self.error is None else self.error * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBatch:
    """One batch of calls: how many, how long, how many joules."""

    calls: int
    time_s: float
    energy_j: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyState:
    """Time and energy per call, and mean power, of the batches after the warm-up; `skipped` batches came before.

    `drifts`: calls still become cheaper or more expensive, and the notes say so.
    """

    calls: int
    skipped: int
    time_s: Uncertain
    energy_j: Uncertain
    power_w: Uncertain
    notes: list[str] = field(default_factory=list)
    drifts: bool = False

    def within(self, target: float) -> bool:
        """Return whether both time and energy are known to the target."""
        return self.time_s.relative <= target and self.energy_j.relative <= target


def t90(degrees: int) -> float:
    """Return the half-width of the two-sided 90% interval in standard errors, by degrees of freedom."""
    if degrees < 1:
        return float("inf")
    return _T95[degrees - 1] if degrees <= len(_T95) else Z90 + 1.6 / degrees


def count_warm_up(values: Floats) -> int:
    """Return how many leading values to drop: the first cut that leaves (nearly) the least error of the mean (MSER).

    K. P. White, "An effective truncation heuristic for bias reduction in simulation output", 1997. At most half of the
    values are dropped: a later minimum means that these data have no steady state.
    """
    n = len(values)
    if n < 4:
        return 0
    cuts = range(n // 2 + 1)
    scores = [float(np.var(values[d:])) / (n - d) for d in cuts]
    best = min(scores)
    return next((d for d in cuts if scores[d] <= NEAR_BEST * best), 0)  # 0: NaN has no minimum


def mean_interval(values: Floats) -> Uncertain:
    """Return mean and 90% half-width; batches that resemble their neighbours count less (lag-1 correlation)."""
    n = len(values)
    mean = float(np.mean(values))
    if n < 2:
        return Uncertain(mean, None)
    deviation = values - mean
    variance = float(np.sum(deviation**2) / (n - 1))
    r1 = float(np.sum(deviation[1:] * deviation[:-1]) / np.sum(deviation**2)) if variance > 0 else 0.0
    inflate = (1 + min(max(r1, 0.0), 0.9)) / (1 - min(max(r1, 0.0), 0.9))
    return Uncertain(mean, t90(n - 1) * float(np.sqrt(variance / n * inflate)))


def find_drift(values: Floats) -> float | None:
    """Return the relative change over the run if there is a significant trend, else None."""
    n = len(values)
    if n < 6 or not np.mean(values):
        return None
    x = np.arange(n) - (n - 1) / 2
    slope = float(np.sum(x * values) / np.sum(x**2))
    residual = values - np.mean(values) - slope * x
    error = float(np.sqrt(np.sum(residual**2) / (n - 2) / np.sum(x**2)))
    change = slope * (n - 1) / float(np.mean(values))
    return change if abs(slope) > 3 * error and abs(change) > DRIFT else None


def find_steady_state(batches: Sequence[MeasuredBatch], *, warm: bool = False) -> SteadyState:
    """Find the steady state, in which both time and energy have settled. `warm`: all batches count."""
    time_s = np.array([b.time_s / b.calls for b in batches])
    energy_j = np.array([b.energy_j / b.calls for b in batches])
    skip = 0 if warm else max(count_warm_up(time_s), count_warm_up(energy_j))
    steady = batches[skip:]
    notes = []
    for what, values in (("time", time_s[skip:]), ("energy", energy_j[skip:])):
        trend = find_drift(values)
        if trend is not None:
            notes.append(f"{what} per call drifts by {trend:+.1%} over the run: it is not at a steady state")
    drifts = bool(notes)
    if len(steady) < 2:
        notes.append("only one batch was measured, so its repeatability is unknown; give it more time (budget_s)")
    return SteadyState(
        calls=sum(b.calls for b in steady),
        skipped=skip,
        time_s=mean_interval(time_s[skip:]),
        energy_j=mean_interval(energy_j[skip:]),
        power_w=mean_interval(np.array([b.energy_j / b.time_s if b.time_s > 0 else 0.0 for b in steady])),
        notes=notes,
        drifts=drifts,
    )
