r"""Joules between two times: the one place where power samples, and the ticks of an energy counter, become energy.

A sample train sees the true power late (lag), smeared (blur), and only now and then (resolution):

    true power   ____/‾‾‾‾‾‾‾‾‾\____
    samples      ____.__/‾.‾‾‾.‾‾\_.__.___      shifted right by the lag
    window           |<------->|
    integrated         |<------->|              the same window, moved by the lag

so a window is moved by the lag, and the sample curve is integrated between the moved edges, with the partial
intervals at both ends included. Everything is a running sum, kept beside each sample: a window costs two
look-ups (`mark`), however long it was, and the samples it spans may have been forgotten since.

Three things stay uncertain, and `window_error_j` adds them in quadrature: the level of the sensor, the power
between two samples, and where within the blur an edge lies.

A counter is exact over long spans and blind between its ticks; samples are the other way round. Where a counter was
recorded, it replaces the samples between its first and last tick inside the window:

    window     |-----------------------------------|
    ticks         ^         ^          ^        ^
    joules     |ss|cccccccccccccccccccccccccccccc|ss|      s: samples, c: counter
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .schema import MAX_BOARD_W, Basis, Domain, Energy, Hold

# -- Running sums ----------------------------------------------------------------------------------------------------

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Half-width of a 90% interval of a normal distribution, in standard deviations.
Z90 = 1.6449


@dataclass(frozen=True, slots=True)
class Mark:
    """The running sums at one moment: joules, seconds that were seen, variance (J²), and the swing (W) there.

    `loose_j2` is the variance of the mark itself, within an interval of which only the mean is known.
    """

    joules: float
    covered_s: float
    variance_j2: float
    swing_w: float
    loose_j2: float = 0.0


ZERO = Mark(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Sums:
    """Running sums beside a train of samples, up to and including each sample."""

    joules: Floats
    covered_s: Floats
    variance_j2: Floats


def accumulate(times_ns: Ints, watts: Floats, *, mean: bool, noise: float = 0.0, start: Mark = ZERO) -> Sums:
    """Sum up a train of samples, going on from `start` at its first sample.

    Intervals that end in NaN (nothing is known there) add nothing. `mean` says that a sample is the mean since
    the one before it; otherwise power runs straight between samples, and is known between two of them only to
    lie near that line: with a uniform prior as high as their difference, one interval's error is |Δw|·dt/√12.
    `noise` is the relative standard deviation of a single sample, added to that.
    """
    n = len(times_ns)
    joules, covered, variance = np.zeros(n), np.zeros(n), np.zeros(n)
    if n > 1:
        dt = np.diff(times_ns) * 1e-9
        known = ~np.isnan(watts[1:])
        begin = np.where(np.isnan(watts[:-1]), watts[1:], watts[:-1])  # after a gap: level from its end on
        level = watts[1:] if mean else 0.5 * (watts[1:] + begin)
        rise = np.zeros(n - 1) if mean else watts[1:] - begin
        np.cumsum(np.where(known, level * dt, 0.0), out=joules[1:])
        np.cumsum(np.where(known, dt, 0.0), out=covered[1:])
        spread = (rise * dt) ** 2 / 12.0 + (noise * level * dt) ** 2
        np.cumsum(np.where(known, spread, 0.0), out=variance[1:])
    return Sums(joules + start.joules, covered + start.covered_s, variance + start.variance_j2)


def mark(times_ns: Ints, watts: Floats, sums: Sums, x_ns: int, *, mean: bool) -> Mark:
    """The running sums at any time within the samples; beyond them nothing is known and nothing is added."""
    n = len(times_ns)
    if n == 0:
        return ZERO
    i = int(np.searchsorted(times_ns, x_ns, side="right")) - 1
    swing = _swing(watts, i)
    if i < 0 or n == 1:
        return Mark(float(sums.joules[0]), float(sums.covered_s[0]), float(sums.variance_j2[0]), swing)
    if i >= n - 1:
        return Mark(float(sums.joules[-1]), float(sums.covered_s[-1]), float(sums.variance_j2[-1]), swing)
    j0, c0, v0 = float(sums.joules[i]), float(sums.covered_s[i]), float(sums.variance_j2[i])
    w0, w1 = float(watts[i]), float(watts[i + 1])
    if np.isnan(w1):
        return Mark(j0, c0, v0, swing)
    inside_s = (x_ns - int(times_ns[i])) * 1e-9  # whole ns: a float of epoch size has steps of 256 ns
    fraction = inside_s / (float(times_ns[i + 1] - times_ns[i]) * 1e-9)
    if np.isnan(w0):
        w0 = w1
    if mean:
        # Inside an interval of which only the mean is known, the power may have been anywhere: at its ends the sum is
        # exact again. The spread is that of the neighbouring means, and at least the mean itself (a burst in idleness).
        spread_w = max(swing, w1)
        loose = (spread_w * inside_s * (1.0 - fraction)) ** 2 / 3.0
        return Mark(j0 + w1 * inside_s, c0 + inside_s, v0, swing, loose)
    part = (w0 + 0.5 * (w1 - w0) * fraction) * inside_s
    return Mark(j0 + part, c0 + inside_s, v0 + ((w1 - w0) * inside_s) ** 2 / 12.0, swing)


def _swing(watts: Floats, i: int) -> float:
    """How far the samples next to an edge (two on each side) lie apart."""
    near = watts[max(i - 1, 0) : i + 3]
    near = near[~np.isnan(near)]
    return float(near.max() - near.min()) if len(near) else 0.0


def window_error_j(start: Mark, end: Mark, *, gain_error: float, blur_s: float, unseen_s: float = 0.0) -> float:
    """90% half-width of the joules between two marks.

    An edge is known only within the blur, so it may be off by the blur times the swing of the samples around it
    (uniform: over √12), and never by more than the window is long. Time that was not seen may have drawn as much as
    the time that was, so it widens the interval by as much.
    """
    joules = end.joules - start.joules
    edge_s = min(blur_s, max(end.covered_s - start.covered_s, 0.0))
    edges = (edge_s * start.swing_w) ** 2 / 12.0 + (edge_s * end.swing_w) ** 2 / 12.0
    between = max(end.variance_j2 - start.variance_j2, 0.0) + start.loose_j2 + end.loose_j2
    seen_s = end.covered_s - start.covered_s
    unseen_j = abs(joules) / seen_s * unseen_s if seen_s > 0 and unseen_s > 0 else 0.0
    return float(np.sqrt((gain_error * joules) ** 2 + Z90**2 * (between + edges))) + unseen_j


# -- Joules of a domain ------------------------------------------------------------------------------------------------

# Rounding of edges alone leaves this much of a window: not worth a wider interval.
FULL = 0.995
BASES: tuple[Basis, ...] = ("measured", "predicted", "modelled", "simulated", "timed")

# Two seconds hold twenty ticks of an H200's counter: a tick misplaced by its ±3 ms is then under 0.2% of the span.
MIN_SPAN_NS = 2_000_000_000
# How far counter and samples agreed on ten loads of an H200 over >= 5 s (benchmarks/README.md).
ANCHOR_GAIN = 0.003
# What is still uncertain of a tick's time after the sensor has found its phase (half-width).
TICK_S = 0.003
# Beyond this the counter and the samples do not measure the same thing; the difference becomes the error.
DISAGREE = 0.05
# Samples that miss no more than this of a span have seen all of it.
WHOLE_S = 0.02

_NO_TIMES: Ints = np.zeros(0, np.int64)
_NO_JOULES: Floats = np.zeros(0)


@dataclass(frozen=True)
class DomainSamples:
    """The samples of one domain, and the ticks of its energy counter where they were recorded.

    `peaks_w` is the highest power each sample stands for: the sample itself, unless several were merged.
    """

    domain: Domain
    times_ns: Ints
    watts: Floats
    peaks_w: Floats
    ticks_ns: Ints = dataclasses.field(default_factory=lambda: _NO_TIMES)
    ticks_j: Floats = dataclasses.field(default_factory=lambda: _NO_JOULES)

    @classmethod
    def of(cls, domain: Domain, times_ns: Sequence[int] | Ints, watts: Sequence[float] | Floats) -> DomainSamples:
        """Plain samples, without a counter. Those that no board can have drawn are gaps."""
        w = drop_impossible_samples(domain, np.asarray(watts, dtype=np.float64))
        return cls(domain, np.asarray(times_ns, dtype=np.int64), w, w)

    @cached_property
    def _sums(self) -> Sums:
        return accumulate(self.times_ns, self.watts, mean=self._mean, noise=self.domain.sample_noise)

    @property
    def _mean(self) -> bool:
        return self.domain.hold is Hold.MEAN

    @property
    def lag_ns(self) -> int:
        """How late the sensor shows a change."""
        return round(self.domain.lag_s * 1e9)

    @property
    def known(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which samples have a value: NaN means that nothing is known since the sample before."""
        return ~np.isnan(self.watts)

    def shift(self, offset_ns: int) -> DomainSamples:
        """The same samples on another clock."""
        return dataclasses.replace(self, times_ns=self.times_ns + offset_ns, ticks_ns=self.ticks_ns + offset_ns)

    def mark(self, time_ns: int) -> Mark:
        """The running sums at a time."""
        return mark(self.times_ns, self.watts, self._sums, time_ns + self.lag_ns, mean=self._mean)

    def energy(self, start_ns: int, end_ns: int, *, fill_gaps: bool = False) -> Energy:
        """Joules between two times. `fill_gaps` asks the counter about the holes in the samples.

        Samples without a hole stand as they are: what a table shares out of them should sum to the whole.
        """
        seconds = max(end_ns - start_ns, 0) * 1e-9
        start, end = self.mark(start_ns), self.mark(end_ns)
        sampled = energy_between(self.domain, start, end, seconds)
        if not fill_gaps or sampled.coverage >= FULL:
            return sampled
        inside = (self.ticks_ns >= start_ns) & (self.ticks_ns <= end_ns)
        times, counted_j = self.ticks_ns[inside].tolist(), self.ticks_j[inside].tolist()
        if len(times) < 2 or np.any(np.diff(counted_j) < 0):  # less than before: the counter was reset
            return sampled
        first, last = (Anchor(times[i], counted_j[i], self.mark(times[i]), epoch=0) for i in (0, -1))
        correction = correct_by_counter(first, last)
        return sampled if correction is None else apply_correction(start, end, correction, self.domain, seconds)


def drop_impossible_samples(domain: Domain, watts: Floats) -> Floats:
    """The samples, with NaN (nothing is known) in place of those below 0 or above `Domain.max_w`."""
    possible = (watts >= 0.0) & (watts <= domain.max_w)  # NaN is not
    return watts if possible.all() else np.where(possible, watts, np.nan)


def energy_between(domain: Domain, start: Mark, end: Mark, seconds: float) -> Energy:
    """Joules of one domain between two marks. A window of which nothing was seen has NaN joules, not 0."""
    covered_s = end.covered_s - start.covered_s
    coverage = min(max(covered_s / seconds, 0.0), 1.0) if seconds > 0 else 0.0
    unseen_s = (1.0 - coverage) * seconds if coverage < FULL else 0.0
    unknown = coverage <= 0.0 and seconds > 0
    error_j = window_error_j(start, end, gain_error=domain.gain_error, blur_s=domain.blur_s, unseen_s=unseen_s)
    return Energy(
        energy_j=math.nan if unknown else max(end.joules - start.joules, 0.0),
        error_j=math.nan if unknown else error_j,
        time_s=seconds,
        source=domain.source,
        coverage=coverage,
        basis=domain.basis,
    )


def sum_domains(parts: Sequence[Energy], seconds: float) -> Energy:
    """The sum of several domains over one window. Their errors are independent, so they add in quadrature.

    A domain of which nothing is known (NaN) is left out, and the error widened by what the others drew on average.
    """
    known = [p for p in parts if not math.isnan(p.energy_j)]
    joules = sum(p.energy_j for p in known)
    missing_j = (len(parts) - len(known)) * joules / len(known) if known else 0.0
    nothing = bool(parts) and not known
    return Energy(
        energy_j=math.nan if nothing else float(joules),
        error_j=math.nan if nothing else float(np.sqrt(sum(p.error_j**2 for p in known))) + missing_j,
        time_s=seconds,
        source="+".join(dict.fromkeys(p.source for p in parts)) or "none",
        coverage=min((p.coverage for p in parts), default=0.0),
        basis=worst_basis(p.basis for p in parts),
    )


def sum_windows(parts: Sequence[Energy]) -> Energy:
    """The sum of one thing over several windows of time, errors in quadrature.

    Windows of which nothing is known lower the coverage and widen the error by what the others drew.
    """
    known = [p for p in parts if not math.isnan(p.energy_j)]
    seconds, known_s = sum(p.time_s for p in parts), sum(p.time_s for p in known)
    joules = sum(p.energy_j for p in known)
    unknown_j = joules / known_s * (seconds - known_s) if known_s > 0 else 0.0
    return Energy(
        energy_j=joules if known else math.nan,
        error_j=sum(p.error_j**2 for p in known) ** 0.5 + unknown_j if known else math.nan,
        time_s=seconds,
        source=parts[-1].source,
        coverage=sum(p.coverage * p.time_s for p in parts) / seconds if seconds > 0 else 0.0,
        basis=worst_basis(p.basis for p in parts),
    )


def worst_basis(bases: Iterable[Basis]) -> Basis:
    """One modelled or simulated part makes the whole so."""
    return max(bases, key=BASES.index, default="measured")


# -- The energy counter ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Anchor:
    """A tick of the counter: its true time, its joules, and the running sums of the samples at that time."""

    time_ns: int
    joules: float
    mark: Mark
    epoch: int  # counts the resets: anchors of different epochs cannot be subtracted


@dataclass(frozen=True, slots=True)
class CounterCorrection:
    """The joules of the span between two anchors: by the counter where it is `used`, else by the samples."""

    joules: float
    error_j: float
    span_s: float
    seen_s: float  # of the span: all of it by the counter
    sampled: Mark  # what the samples add up to over the span: taken out of the window's sums
    used: bool


def correct_by_counter(first: Anchor | None, last: Anchor | None) -> CounterCorrection | None:
    """What the counter says about the span between two anchors; None when it is too short or the counter was reset."""
    if first is None or last is None or first.epoch != last.epoch:
        return None
    span_s = (last.time_ns - first.time_ns) * 1e-9
    counted_j = last.joules - first.joules
    if span_s < MIN_SPAN_NS * 1e-9 or counted_j <= 0:
        return None
    sampled = Mark(
        last.mark.joules - first.mark.joules,
        last.mark.covered_s - first.mark.covered_s,
        last.mark.variance_j2 - first.mark.variance_j2,
        0.0,
    )
    missing_s = max(span_s - sampled.covered_s, 0.0)
    if not _is_plausible(counted_j, sampled.joules, missing_s):
        error_j = abs(sampled.joules - counted_j)
        return CounterCorrection(sampled.joules, error_j, span_s, span_s - missing_s, sampled, used=False)
    edges = (TICK_S * first.mark.swing_w) ** 2 + (TICK_S * last.mark.swing_w) ** 2
    error_j = float(((ANCHOR_GAIN * counted_j) ** 2 + Z90**2 * edges / 3.0) ** 0.5)
    return CounterCorrection(counted_j, error_j, span_s, span_s, sampled, used=True)


def apply_correction(start: Mark, end: Mark, correction: CounterCorrection, domain: Domain, seconds: float) -> Energy:
    """Joules between two marks of the samples, with the span of a correction replaced by the counter's joules."""
    begin = dataclasses.replace(
        start,
        joules=start.joules + correction.sampled.joules,
        covered_s=start.covered_s + correction.sampled.covered_s,
        variance_j2=start.variance_j2 + correction.sampled.variance_j2,
    )
    ends_s = max(seconds - correction.span_s, 0.0)
    ends = energy_between(domain, begin, end, ends_s)
    unseen = math.isnan(ends.energy_j)  # then they may have drawn what the span did on average
    mean_w = correction.joules / correction.span_s
    return dataclasses.replace(
        ends,
        energy_j=correction.joules + (0.0 if unseen else ends.energy_j),
        error_j=correction.error_j + mean_w * ends_s if unseen else math.hypot(ends.error_j, correction.error_j),
        time_s=seconds,
        source=domain.source + ("+counter" if correction.used else ""),
        coverage=min((ends.coverage * ends_s + correction.seen_s) / seconds, 1.0),
    )


def _is_plausible(counted_j: float, sampled_j: float, missing_s: float) -> bool:
    """Whether the counter and the samples agree within `DISAGREE`, but for what the samples missed."""
    if missing_s < WHOLE_S:
        return abs(sampled_j / counted_j - 1.0) <= DISAGREE
    return counted_j - sampled_j >= -DISAGREE * counted_j and (counted_j - sampled_j) / missing_s < MAX_BOARD_W
