"""Computes joules from an energy counter: what its ticks tell of a window, and of the power samples beside it.

A counter is exact over long times and blind between its ticks; samples are the other way round. So the counter gives
the joules between its first and last tick inside a window, and the samples give those of the two ends:

    window        |-----------------------------------|
    ticks      ^     ^         ^          ^        ^        ^
    joules        |ss|cccccccccccccccccccccccccccccc|ss|       s: samples, c: counter
    segments   |--1--|----2----|----3-----|---4----|---5----|

All samples can be wrong in the same way: a load whose period is a multiple of the sensor's own is seen at the same
phase again and again ("in step"). Each segment between two ticks shows by how much. The samples of the ends, and of a
window too short for a tick, are scaled by what nearby segments show; segments at a similar level count most
(`CounterHistory.learn`). The interval includes the scatter of the segments, and how well the expected errors of the
samples explain it.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .notes import Note
from .schema import MAX_BOARD_W, Domain, Energy
from .sums import Z90, Mark, between_variance, edge_sd_s, edge_variance, energy_between

KEPT_ANCHORS = 4096
# The shortest time between ticks that tells the level: five ticks of an H200's counter, each misplaced by up to
# `TICK_S`. Ticks closer together (the sensor looks around one now and then) tell more about the edges.
MIN_SPAN_S = 0.5
# How far counter and samples agreed on ten loads of an H200 over >= 5 s (benchmarks/README.md).
ANCHOR_GAIN = 0.003
# The uncertainty of a tick's time after the sensor has found its phase (half-width).
TICK_S = 0.003
# Samples that miss at most this much of a time count as having seen all of it.
WHOLE_S = 0.02
# Every board draws more than this, even when idle: a counter that counts less is stuck.
LEAST_BOARD_W = 1.0

# The following values were chosen on those classes of benchmarks/measure/known_truth.py that are not held out, so that
# the 90% intervals contain 85-99% of the truths (benchmarks/measure/interval_coverage.py).
# Segments lose weight with their distance from a window, because a program's phases last seconds.
MEMORY_S = 8.0
SEGMENTS_BEFORE, SEGMENTS_AFTER = 8, 4
# Levels that differ this much (relative standard deviation) are different loads: one may be in step, the other not.
SAME_LOAD = 0.15
# The error of the samples is never known better than this share of its expected variance.
LEAST_SHARE = 0.3
# The expected variances count as much as this many segments; and the least share of them that remains after learning.
PRIOR_SEGMENTS, LEAST_VARIANCE = 2.0, 0.2
# Power that swings faster than the samples show shifts the edges of a window: by at least this share of the level, or
# by this multiple of the samples' error. Of a square wave in step at 20 ms the ring shows an eighth at most.
UNSEEN_SWING, UNSEEN_PER_OFF = 0.25, 8.0
# This share (squared) of the lag's correction stays uncertain: a slower sensor is also more blurred.
LAG_LEFT = 0.6
# The lag belongs to the sensor, not to the load. It is learnt from at least and (about) at most this many segments. It
# is corrected from two standard errors on; from one and a half on it makes edges less certain.
LAG_SEGMENTS, LAG_SIGMAS, LAG_DOUBT = (6.0, 50.0), 2.0, 1.5
# A lag that was learnt from kernels this well (90%) is better than one from the counter, whose own lag is an H200's.
LAG_LEARNT_S = 0.002
# A larger correction means a load in step with the ticks: no known ring is later than 40 ms in all.
MOST_LAG_S = 0.03
# Ring and counter of an H200 agree within 0.7%, except for square waves in step, where they differ by up to 3%
# (docs/design.md, docs/measuring.md). A larger difference is reported.
IN_STEP = 0.02


@dataclass(frozen=True, slots=True)
class Anchor:
    """A tick of the counter: its true time, its joules, and the running sums of the samples at that time."""

    time_ns: int
    joules: float
    mark: Mark
    epoch: int  # anchors of different epochs must not be subtracted: the counter was reset or stuck in between


@dataclass(frozen=True, slots=True)
class Segment:
    """The time between two anchors: joules by the counter and by the samples, and the samples' expected variance."""

    start_ns: int
    end_ns: int
    counted_j: float
    sampled_j: float
    variance_j2: float
    rise_w: float

    @property
    def off(self) -> float:
        """What the samples lack, as a share of their joules."""
        return self.counted_j / self.sampled_j - 1.0

    @property
    def power_w(self) -> float:
        """Mean power, by the samples."""
        return self.sampled_j / ((self.end_ns - self.start_ns) * 1e-9)


@dataclass(frozen=True, slots=True)
class SampleScale:
    """How to correct the samples of a window: multiply their joules by `1 + off` (standard deviation `sd`).

    `scatter` is the variance of `off` from segment to segment; `variance` is the factor for the expected variances.
    """

    off: float = 0.0
    sd: float = 0.0
    scatter: float = 0.0
    variance: float = 1.0


def is_live(first: Anchor, last: Anchor) -> bool:
    """Return whether the counter counted between two anchors: not reset, not stuck, no more than a board draws."""
    seconds = (last.time_ns - first.time_ns) * 1e-9
    return first.epoch == last.epoch and 0.0 < last.joules - first.joules < MAX_BOARD_W * seconds


class CounterHistory:
    """The ticks of one counter in bounded memory, and what they show about the samples. Not thread-safe."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.anchors: list[Anchor] = []
        self._segments: list[Segment] = []
        self._begin: Anchor | None = None  # begin of the segment that is growing
        self._epoch = 0
        self._stuck = False
        self._lag = _LagFit()

    def restart(self) -> None:
        """Stop comparing with earlier values: the counter may have been reset (a driver restart)."""
        self._epoch += 1

    def add(self, time_ns: int, joules: float, mark: Mark) -> None:
        """Add a tick. A value below the last one means a reset; one hardly above it, that the counter is stuck."""
        last = self.anchors[-1] if self.anchors else None
        if last is not None and time_ns <= last.time_ns:
            return
        if last is not None and last.epoch == self._epoch:
            was_stuck = self._stuck
            self._stuck = 0.0 <= joules - last.joules < LEAST_BOARD_W * (time_ns - last.time_ns) * 1e-9
            if self._stuck and not was_stuck:
                self._forget(last)
            self._epoch += joules < last.joules or self._stuck or was_stuck
        anchor = Anchor(time_ns, joules, mark, self._epoch)
        self.anchors.append(anchor)
        _trim(self.anchors)
        self._extend(anchor)

    def _forget(self, last: Anchor) -> None:
        """Discard the last tick and its segment: a counter that is stuck now may already have been stuck then."""
        self._epoch += 1
        self.anchors[-1] = dataclasses.replace(last, epoch=self._epoch)
        if self._segments and self._segments[-1].end_ns == last.time_ns:
            self._segments.pop()

    def _extend(self, anchor: Anchor) -> None:
        """Complete a segment when it is long enough, and learn from it."""
        begin = self._begin
        if begin is None or begin.epoch != anchor.epoch:
            self._begin = anchor
            return
        seconds = (anchor.time_ns - begin.time_ns) * 1e-9
        if seconds < MIN_SPAN_S:
            return
        self._begin = anchor
        sampled_j = anchor.mark.joules - begin.mark.joules
        missing_s = seconds - (anchor.mark.covered_s - begin.mark.covered_s)
        if not is_live(begin, anchor) or missing_s > WHOLE_S or sampled_j <= 0.0:
            return
        edges = edge_variance(begin.mark, anchor.mark, edge_sd_s(self.domain))
        segment = Segment(
            begin.time_ns, anchor.time_ns, anchor.joules - begin.joules, sampled_j,
            between_variance(begin.mark, anchor.mark) + edges, anchor.mark.power_w - begin.mark.power_w,
        )  # fmt: skip
        self._segments.append(segment)
        _trim(self._segments)
        if not 0.0 < self.domain.lag_error_s < LAG_LEARNT_S:
            self._lag.add(segment)

    def first_after(self, time_ns: int) -> Anchor | None:
        """Return the first anchor at or after a time."""
        i = bisect.bisect_left(self.anchors, time_ns, key=lambda a: a.time_ns)
        return self.anchors[i] if i < len(self.anchors) else None

    def last_before(self, time_ns: int) -> Anchor | None:
        """Return the last anchor at or before a time."""
        i = bisect.bisect_right(self.anchors, time_ns, key=lambda a: a.time_ns)
        return self.anchors[i - 1] if i else None

    def _near(self, start_ns: int, end_ns: int) -> list[Segment]:
        """Return the segments that a window overlaps, and some before and after it."""
        i = bisect.bisect_right(self._segments, start_ns, key=lambda s: s.end_ns)
        j = bisect.bisect_left(self._segments, end_ns, key=lambda s: s.start_ns)
        return self._segments[max(i - SEGMENTS_BEFORE, 0) : j + SEGMENTS_AFTER]

    def learn(self, start_ns: int, end_ns: int, power_w: float) -> SampleScale:
        """Return how to correct the samples of a window with mean power `power_w`, as the segments near it show."""
        near = self._near(start_ns, end_ns)
        if not near or power_w <= 0.0:
            return SampleScale()
        weights = [math.exp(-_distance_s(s, start_ns, end_ns) / MEMORY_S) for s in near]
        least = (ANCHOR_GAIN / Z90) ** 2
        # First all segments, with one that shows nothing: the best guess for a load that was not seen before.
        total = sum(weights)
        mean, scatter = _mean_and_scatter(near, weights)
        prior = mean * total / (total + 1.0)
        prior_var = scatter + (mean - prior) ** 2 + least
        # Then the segments at the same level.
        levels = [math.log(s.power_w / power_w) / SAME_LOAD for s in near]
        weights = [w * math.exp(-0.5 * level**2) for w, level in zip(weights, levels, strict=True)]
        total = sum(weights)
        if total < 1e-6:
            return SampleScale(prior, math.sqrt(prior_var), prior_var)
        mean, scatter = _mean_and_scatter(near, weights)
        expected_j2 = sum(w * s.variance_j2 for w, s in zip(weights, near, strict=True)) / total
        expected = sum(w * (s.variance_j2 / s.sampled_j**2 + least) for w, s in zip(weights, near, strict=True)) / total
        precise = total / max(scatter, LEAST_SHARE * expected)
        off = (mean * precise + prior / prior_var) / (precise + 1.0 / prior_var)
        found_j2 = sum(w * (s.sampled_j * (s.off - off)) ** 2 for w, s in zip(weights, near, strict=True)) / total
        believed = PRIOR_SEGMENTS * expected_j2
        variance = (total * found_j2 + believed) / (total * expected_j2 + believed) if expected_j2 > 0.0 else 1.0
        return SampleScale(off, (precise + 1.0 / prior_var) ** -0.5, scatter, max(variance, LEAST_VARIANCE))

    def energy(self, start_ns: int, start: Mark, end_ns: int, end: Mark, first: Anchor | None = None) -> Energy:
        """Return the joules of a window: by the counter between its ticks if it was live, else by the scaled samples.

        `first` is the first anchor inside the window, if the window is so long that it was forgotten here.
        """
        seconds = max(end_ns - start_ns, 0) * 1e-9
        first = first or self.first_after(start_ns)
        last = self.last_before(end_ns)
        if first is None or last is None or last.time_ns - first.time_ns < MIN_SPAN_S * 1e9 or not is_live(first, last):
            return self._scale(start_ns, start, end_ns, end)
        counted_j, span_s = last.joules - first.joules, (last.time_ns - first.time_ns) * 1e-9
        ticks_j2 = (TICK_S * first.mark.swing_w) ** 2 / 3.0 + (TICK_S * last.mark.swing_w) ** 2 / 3.0
        ends = [
            self._scale(start_ns, start, first.time_ns, first.mark),
            self._scale(last.time_ns, last.mark, end_ns, end),
        ]
        known = [part for part in ends if not math.isnan(part.energy_j)]
        # The parts of the ends that nobody saw may have drawn as much as the rest did on average.
        unseen_j = counted_j / span_s * sum(part.time_s for part in ends if math.isnan(part.energy_j))
        level_j = ANCHOR_GAIN * counted_j
        variance_j2 = level_j**2 + Z90**2 * ticks_j2 + sum(part.error_j**2 for part in known)
        return Energy(
            energy_j=counted_j + sum(part.energy_j for part in known),
            error_j=math.sqrt(variance_j2) + unseen_j,
            common_error_j=math.hypot(level_j, *(part.common_error_j for part in known)),
            time_s=seconds,
            source=f"{self.domain.source}+counter",
            coverage=min((span_s + sum(part.coverage * part.time_s for part in ends)) / seconds, 1.0),
            basis=self.domain.basis,
        )

    def _scale(self, start_ns: int, start: Mark, end_ns: int, end: Mark) -> Energy:
        """Return the joules of a window by its samples, corrected as the counter shows."""
        domain, seconds = self.domain, max(end_ns - start_ns, 0) * 1e-9
        plain = energy_between(domain, start, end, seconds)
        if not self._segments or not plain.energy_j > 0.0:  # nothing to learn from, or nothing known
            return plain
        power_w = plain.power_w or 0.0
        scale = self.learn(start_ns, end_ns, power_w)
        lag_s = self._lag.off_s
        unseen_w = min(max(UNSEEN_SWING, UNSEEN_PER_OFF * abs(scale.off)), 1.0) * power_w
        edge_s = math.hypot(edge_sd_s(domain), LAG_LEFT**0.5 * self._lag.doubt_s)
        between_j2, edges_j2 = between_variance(start, end), edge_variance(start, end, edge_s, unseen_w)
        variance_j2 = min(scale.variance, 1.0) * between_j2 + edges_j2
        # A slow beat scatters as much in a short window as in a segment, a fast beat more: at most twice as much.
        widest_j2 = variance_j2 + (2.0 * plain.energy_j) ** 2 * scale.scatter
        variance_j2 = min(max(scale.variance, 1.0) * variance_j2, widest_j2)
        joules = plain.energy_j * (1.0 + scale.off) + lag_s * (end.power_w - start.power_w)
        unseen_j = power_w * (1.0 - plain.coverage) * seconds
        level_j = math.hypot(
            Z90 * scale.sd * plain.energy_j, ANCHOR_GAIN * joules
        )  # windows near it have the same scale
        return dataclasses.replace(
            plain,
            energy_j=max(joules, 0.0),
            error_j=math.hypot(Z90 * math.sqrt(variance_j2), level_j) + unseen_j,
            common_error_j=level_j,
            source=f"{domain.source}+counter",
        )

    def note_step(self, start_ns: int, end_ns: int) -> Note | None:
        """Return a note if samples and counter disagree over a window: the load is then in step with the sensor."""
        inside = [s for s in self._near(start_ns, end_ns) if s.start_ns < end_ns and s.end_ns > start_ns]
        sampled_j, counted_j = sum(s.sampled_j for s in inside), sum(s.counted_j for s in inside)
        if sampled_j <= 0.0 or abs(counted_j / sampled_j - 1.0) < IN_STEP:
            return None
        less = f"{abs(1.0 - sampled_j / counted_j):.0%} {'less' if sampled_j < counted_j else 'more'}"
        return Note(
            f"{self.domain.name}: in step with the sensor: its samples show {less} power than its energy counter, as "
            "they do when a load repeats at a multiple of their period; the joules are the counter's"
        )


def is_in_step(period_s: float, resolution_s: float) -> bool:
    """Return whether samples see a load with this period at the same phase for a second or more.

    That happens if the spacing of the samples is a multiple of the period, of its half or of its third (the harmonics
    that a sensor lets through).
    """
    if period_s <= 0.0 or resolution_s <= 0.0:
        return False
    turns = [harmonic * resolution_s / period_s for harmonic in (1, 2, 3)]  # of the phase, from sample to sample
    return any(round(t) >= 1 and abs(t - round(t)) < 0.5 * resolution_s for t in turns)


def _trim(kept: list[Any]) -> None:
    """Drop the older half once the list is twice as long as needed."""
    if len(kept) >= 2 * KEPT_ANCHORS:
        del kept[:-KEPT_ANCHORS]


def _distance_s(segment: Segment, start_ns: int, end_ns: int) -> float:
    """Return the seconds between a segment and a window; 0 if they overlap."""
    return max(start_ns - segment.end_ns, segment.start_ns - end_ns, 0) * 1e-9


def _mean_and_scatter(segments: Sequence[Segment], weights: Sequence[float]) -> tuple[float, float]:
    """Return weighted mean and variance of what the samples lack; corrected, since few segments scatter less."""
    total = sum(weights)
    mean = sum(w * s.off for w, s in zip(weights, segments, strict=True)) / total
    scatter = sum(w * (s.off - mean) ** 2 for w, s in zip(weights, segments, strict=True)) / total
    count = total**2 / sum(w * w for w in weights)
    return mean, scatter * min(count / max(count - 1.0, 1e-9), 2.0)


class _LagFit:
    """Finds how much later a sensor shows power than its domain says (`off_s`), and how much of that is doubtful.

    Samples that are late by d s lack d times the rise of the power over a segment. So what they lack is fitted by a
    share of the joules (level, aliasing) plus a share of the rise, in running sums that fade.
    """

    def __init__(self) -> None:
        self._n = self._jj = self._jr = self._rr = self._jy = self._ry = self._yy = 0.0
        self.off_s = self.doubt_s = 0.0

    def add(self, segment: Segment) -> None:
        joules, rise, lack = segment.sampled_j, segment.rise_w, segment.counted_j - segment.sampled_j
        keep = 1.0 - 1.0 / LAG_SEGMENTS[1]
        self._n = keep * self._n + 1.0
        self._jj, self._jr, self._rr = (
            keep * self._jj + joules**2,
            keep * self._jr + joules * rise,
            keep * self._rr + rise**2,
        )
        self._jy, self._ry, self._yy = (
            keep * self._jy + joules * lack,
            keep * self._ry + rise * lack,
            keep * self._yy + lack**2,
        )
        self._solve()

    def _solve(self) -> None:
        """Set `off_s` and `doubt_s`; only `doubt_s` while the lag does not differ significantly from 0."""
        determinant = self._jj * self._rr - self._jr**2
        if self._n < 3.0 or determinant <= 1e-9 * self._jj * self._rr:
            return
        level = (self._jy * self._rr - self._ry * self._jr) / determinant
        late_s = (self._ry * self._jj - self._jy * self._jr) / determinant
        rest = max(self._yy - level * self._jy - late_s * self._ry, 0.0) / (self._n - 2.0)
        sigmas = abs(late_s) / max(math.sqrt(rest * self._jj / determinant), 1e-12)
        late_s = min(max(late_s, -MOST_LAG_S), MOST_LAG_S)
        self.off_s = late_s if sigmas > LAG_SIGMAS and self._n >= LAG_SEGMENTS[0] else 0.0
        self.doubt_s = abs(late_s) if sigmas > LAG_DOUBT else 0.0
