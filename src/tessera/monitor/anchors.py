"""The energy counter as an anchor: what the integral of the samples is checked against, and corrected by.

A counter is exact over long spans and blind between its ticks; the samples are the other way round. Over a
window with at least `MIN_SPAN_NS` between its first and last anchor, the counter's joules replace the samples'
for that span, and the samples fill the rests at both ends:

    window     |-----------------------------------|
    anchors       ^         ^          ^        ^
    joules     |ss|cccccccccccccccccccccccccccccc|ss|      s: samples, c: counter
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..integral import Z90, Mark
from .series import Series

# Two seconds hold twenty ticks of an H200's counter: a tick misplaced by its ±3 ms is then under 0.2% of the span.
MIN_SPAN_NS = 2_000_000_000
# How far counter and samples agreed on an H200 over >= 5 s: 0.1% in the median, 0.8% at worst (benchmarks/README.md).
ANCHOR_GAIN = 0.003
# What is still uncertain of a tick's time after the sensor has found its phase (half-width).
TICK_S = 0.003
# Beyond this counter and samples do not measure the same thing; both are then distrusted by the difference.
DISAGREE = 0.05
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
    """What the counter adds to the samples' joules of a window, and the error it leaves of that span."""

    joules: float
    span_j: float
    covered_s: float
    variance_j2: float  # of the samples within the span: replaced by the anchor's
    error_j: float
    ratio: float  # samples over counter
    used: bool  # False: they disagree, the samples' joules stand and only the error grows


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

    def catch_up(self) -> None:
        """Place the ticks that the samples have reached by now."""
        while self._waiting and self._series.covers(self._waiting[0][0]):
            time_ns, joules = self._waiting.popleft()
            if self._kept and joules < self._kept[-1].joules:
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
    """The counter's correction between two anchors; None when they are too near or of different epochs."""
    if first is None or last is None or first.epoch != last.epoch:
        return None
    span_ns = last.time_ns - first.time_ns
    counted_j = last.joules - first.joules
    if span_ns < MIN_SPAN_NS or counted_j <= 0:
        return None
    sampled_j = last.mark.joules - first.mark.joules
    sampled_s = last.mark.covered_s - first.mark.covered_s
    ratio = sampled_j / counted_j
    edges = (TICK_S * first.mark.swing_w) ** 2 + (TICK_S * last.mark.swing_w) ** 2
    error_j = float(((ANCHOR_GAIN * counted_j) ** 2 + Z90**2 * edges / 3.0) ** 0.5)
    whole = sampled_s >= 0.98 * span_ns * 1e-9
    if whole and abs(ratio - 1.0) > DISAGREE:
        return Correction(0.0, sampled_j, 0.0, 0.0, abs(sampled_j - counted_j), ratio, used=False)
    return Correction(
        joules=counted_j - sampled_j,
        span_j=counted_j,
        covered_s=span_ns * 1e-9 - sampled_s,
        variance_j2=last.mark.variance_j2 - first.mark.variance_j2,
        error_j=error_j,
        ratio=ratio,
        used=True,
    )
