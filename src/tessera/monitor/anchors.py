"""The energy counter as an anchor: what the integral of the samples is checked against, and corrected by.

A counter is exact over long spans and blind between its ticks; the samples are the other way round. Over a
window with at least `MIN_SPAN_NS` between its first and last anchor, the counter's joules replace the samples'
for that span, and the samples fill the rests at both ends:

    window     |-----------------------------------|
    anchors       ^         ^          ^        ^
    joules     |ss|cccccccccccccccccccccccccccccc|ss|      s: samples, c: counter
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from ..integral import Z90, Floats, Ints, Mark, accumulate, mark
from ..schema import MAX_BOARD_W, Domain, Energy, Hold
from ..trace import FULL, Column, column_energy, energy_between
from .series import Series

# Two seconds hold twenty ticks of an H200's counter: a tick misplaced by its ±3 ms is then under 0.2% of the span.
MIN_SPAN_NS = 2_000_000_000
# How far counter and samples agreed on ten loads of an H200 over >= 5 s (benchmarks/README.md).
ANCHOR_GAIN = 0.003
# What is still uncertain of a tick's time after the sensor has found its phase (half-width).
TICK_S = 0.003
# Beyond this counter and samples do not measure the same thing; both are then distrusted by the difference.
DISAGREE = 0.05
# Samples that miss no more than this of a span have seen it whole.
WHOLE_S = 0.02
KEPT = 4096


@dataclass(frozen=True, slots=True)
class Anchor:
    """A tick of the counter: its (true) time, its joules, and the samples' running sums at that time."""

    time_ns: int
    joules: float
    mark: Mark
    epoch: int  # counts the resets: anchors of different epochs cannot be subtracted


@dataclass(frozen=True, slots=True)
class Correction:
    """The joules of the span between two anchors: by the counter where it is `used`, else by the samples."""

    joules: float
    error_j: float
    span_s: float
    seen_s: float  # of the span: all of it by the counter
    sampled: Mark  # what the samples add up to over the span: taken out of the window's sums
    used: bool


class Anchors:
    """The last anchors of one domain, bounded."""

    def __init__(self, series: Series) -> None:
        self._series = series
        self._waiting: deque[tuple[int, float]] = deque(maxlen=64)
        self._kept: deque[Anchor] = deque(maxlen=KEPT)
        self._epoch = 0
        self.resets = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, time_ns: int, joules: float) -> None:
        """Note a tick; it becomes an anchor when the samples have caught up with it."""
        self._waiting.append((time_ns, joules))
        self.catch_up()

    def restart(self) -> None:
        """The counter may have been reset (a driver restart): what comes cannot be subtracted from what was."""
        self._epoch += 1
        self._waiting.clear()

    def catch_up(self, force: bool = False) -> None:
        """Place the ticks that the samples have reached by now; all of them when no samples are to come (`force`)."""
        while self._waiting and (force or self._series.covers(self._waiting[0][0])):
            time_ns, joules = self._waiting.popleft()
            if self._kept and self._epoch == self._kept[-1].epoch and joules < self._kept[-1].joules:
                self._epoch += 1
                self.resets += 1
            if not self._kept or time_ns > self._kept[-1].time_ns:
                self._kept.append(Anchor(time_ns, joules, self._series.mark(time_ns), self._epoch))

    def first_after(self, time_ns: int) -> Anchor | None:
        """The first anchor at or after a time."""
        found = None
        for anchor in reversed(self._kept):
            if anchor.time_ns < time_ns:
                break
            found = anchor
        return found

    def last_before(self, time_ns: int) -> Anchor | None:
        """The last anchor at or before a time."""
        for anchor in reversed(self._kept):
            if anchor.time_ns <= time_ns:
                return anchor
        return None


def correction(first: Anchor | None, last: Anchor | None) -> Correction | None:
    """What the counter says of the span between two anchors; None when they are too near or of different epochs."""
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
    if not _plausible(counted_j, sampled.joules, missing_s):
        error_j = abs(sampled.joules - counted_j)
        return Correction(sampled.joules, error_j, span_s, span_s - missing_s, sampled, used=False)
    edges = (TICK_S * first.mark.swing_w) ** 2 + (TICK_S * last.mark.swing_w) ** 2
    error_j = float(((ANCHOR_GAIN * counted_j) ** 2 + Z90**2 * edges / 3.0) ** 0.5)
    return Correction(counted_j, error_j, span_s, span_s, sampled, used=True)


def with_counter(start: Mark, end: Mark, fix: Correction, domain: Domain, seconds: float) -> Energy:
    """Joules between two marks of the samples, of which the span of a correction is the counter's."""
    begin = dataclasses.replace(
        start,
        joules=start.joules + fix.sampled.joules,
        covered_s=start.covered_s + fix.sampled.covered_s,
        variance_j2=start.variance_j2 + fix.sampled.variance_j2,
    )
    ends_s = max(seconds - fix.span_s, 0.0)
    ends = energy_between(domain, begin, end, ends_s)
    unseen = math.isnan(ends.joules)  # then they may have drawn what the span did on average
    return dataclasses.replace(
        ends,
        joules=fix.joules + (0.0 if unseen else ends.joules),
        error_j=fix.error_j + fix.joules / fix.span_s * ends_s if unseen else math.hypot(ends.error_j, fix.error_j),
        seconds=seconds,
        source=domain.source + ("+counter" if fix.used else ""),
        coverage=min((ends.coverage * ends_s + fix.seen_s) / seconds, 1.0),
    )


def recorded_energy(column: Column, ticks_ns: Ints, joules: Floats, start_ns: int, end_ns: int) -> Energy:
    """Joules of a recorded domain between two times, holes in its samples filled by its counter's recorded ticks.

    Samples without a hole stand as they are: what a table shares out of them should sum to the whole.
    """
    sampled = column_energy(column, start_ns, end_ns)
    inside = (ticks_ns >= start_ns) & (ticks_ns <= end_ns)
    times, counted = ticks_ns[inside], joules[inside]
    if sampled.coverage >= FULL or len(times) < 2 or np.any(np.diff(counted) < 0):  # less than before: it was reset
        return sampled
    domain = column.domain
    lag_ns, mean = round(domain.lag_s * 1e9), domain.hold is Hold.MEAN
    sums = accumulate(column.times_ns, column.watts, mean=mean, noise=domain.sample_noise)
    at = [start_ns, int(times[0]), int(times[-1]), end_ns]
    start, first, last, end = (mark(column.times_ns, column.watts, sums, t + lag_ns, mean=mean) for t in at)
    fix = correction(Anchor(at[1], float(counted[0]), first, epoch=0), Anchor(at[2], float(counted[-1]), last, epoch=0))
    return sampled if fix is None else with_counter(start, end, fix, domain, (end_ns - start_ns) * 1e-9)


def _plausible(counted_j: float, sampled_j: float, missing_s: float) -> bool:
    """Whether counter and samples can be of one thing: equal within `DISAGREE` but for what the samples missed."""
    if missing_s < WHOLE_S:
        return abs(sampled_j / counted_j - 1.0) <= DISAGREE
    return counted_j - sampled_j >= -DISAGREE * counted_j and (counted_j - sampled_j) / missing_s < MAX_BOARD_W
