"""Find when a counter ticks from a few reads of it, so that a value can be given its exact time.

A counter that is updated every 100 ms, read at some moment, holds the energy of its last tick, not of now:
taken at face value it is up to 100 ms (70 J at 700 W) out of date. Two reads between which the value changed
enclose a tick; ticks are evenly spaced, so the enclosures of many ticks, folded onto one period, intersect to a
millisecond or two.

    reads        r   r   r   r   r   r   r   r
    value        a   a   b   b   b   b   c   c
    enclosed           |–|             |–|          both hold phase + k·period
"""

from __future__ import annotations

import itertools
import math

# The H200's counter was found to tick every 100.000 ms over 80 s (benchmarks/device/record_sensor.py); vendors
# use round figures, so the period is the one multiple of 5 ms that the enclosures allow. Where they allow none, we
# do not guess: a period known to 1% is worth nothing a second later.
SNAP_NS = 5_000_000
# It must be known at least this well by itself: a multiple of 5 ms is near everything.
SNAP_WITHIN = 0.03
# How much a tick may wander from the host's clock per second elapsed: the device's clock was under 10 ppm off
# (benchmarks/fit/fit_response.py).
DRIFT = 20e-6
# An enclosure wider than this share of the period teaches nothing new of a known phase; to count ticks it must be
# narrower still, or reads that are far apart see a change each and pass for ticks.
MAX_ENCLOSURE = 0.6
MAX_LEARNING = 0.4
LEARN_TICKS = 4
# Two reads around a tick are placed outside of what is known of it: they show that it is still there, but never
# narrow the phase, which drifts apart (15 ms in 12 minutes). From here on it is learnt anew, by dense reads.
MAX_UNCERTAINTY = 0.15
# Across a longer pause in the learning, the ticks in between cannot be counted.
PAUSE_NS = 5_000_000_000
_KEPT = 64


class TickFinder:
    """Learns period and phase of a counter's ticks from enclosures (`saw`), then dates its values."""

    def __init__(self) -> None:
        self.period_ns: float | None = None
        self._enclosures: list[tuple[int, int]] = []
        self._low = self._high = 0.0  # the enclosure of one reference tick
        self._at = 0.0
        self.relearned = 0

    @property
    def known(self) -> bool:
        """Whether period and phase are known."""
        return self.period_ns is not None

    @property
    def uncertainty_ns(self) -> float:
        """Half-width of what is left of the phase."""
        return (self._high - self._low) / 2

    def saw(self, before_ns: int, after_ns: int) -> None:
        """A tick happened after `before_ns` (start of the last read of the old value) and up to `after_ns`."""
        if self.period_ns is None:
            self._learn(before_ns, after_ns)
            return
        self._refine(before_ns, after_ns)
        if self.known and self._margin_ns(after_ns) > MAX_UNCERTAINTY * self.period_ns:
            self._restart()

    def quiet(self, from_ns: int, to_ns: int) -> None:
        """No tick happened between two times. If one should have, what was learnt is wrong."""
        if self.period_ns is None:
            return
        margin = self._margin_ns(to_ns)
        if self.next_tick_ns(round(from_ns + margin)) + margin < to_ns:
            self._restart()

    def _margin_ns(self, at_ns: int) -> float:
        """How far a tick near a time may lie from where it is expected."""
        return self.uncertainty_ns + DRIFT * max(at_ns - self._at, 0.0)

    def _learn(self, before_ns: int, after_ns: int) -> None:
        if self._enclosures and before_ns - self._enclosures[-1][1] > PAUSE_NS:
            self._enclosures.clear()
        self._enclosures = [*self._enclosures[1 - _KEPT :], (before_ns, after_ns)]
        pairs = list(itertools.pairwise(self._enclosures))
        typical = sorted(_middle(b) - _middle(a) for a, b in pairs)[len(pairs) // 2] if pairs else 0.0
        narrow = [e for e in self._enclosures if e[1] - e[0] <= MAX_LEARNING * typical]
        # From tick to tick, where none went unseen in a long pause between two reads. To choose these as strictly
        # as `narrow` would prefer the ticks that happened to be seen soon, and be short in the mean.
        single = [_middle(b) - _middle(a) for a, b in pairs if max(a[1] - a[0], b[1] - b[0]) < typical]
        if len(narrow) < LEARN_TICKS or not single:
            return
        first, last = narrow[0], narrow[-1]
        spans = round((_middle(last) - _middle(first)) / (sum(single) / len(single)))
        period = (_middle(last) - _middle(first)) / spans
        error = (first[1] - first[0] + last[1] - last[0]) / 2 / spans
        multiples = range(math.ceil((period - error) / SNAP_NS), math.floor((period + error) / SNAP_NS) + 1)
        if error > SNAP_WITHIN * period or len(multiples) != 1:
            return  # a few ticks more will tell
        self.period_ns = float(multiples[0] * SNAP_NS)
        self._low, self._high, self._at = float(first[0]), float(first[1]), float(first[1])
        for enclosure in narrow[1:]:
            self._refine(*enclosure)
            if not self.known:
                return
        self._enclosures.clear()

    def _refine(self, before_ns: int, after_ns: int) -> None:
        assert self.period_ns is not None
        if after_ns - before_ns > MAX_ENCLOSURE * self.period_ns:
            return
        widen = DRIFT * max(before_ns - self._at, 0.0)
        low, high = self._low - widen, self._high + widen
        turns = round(((before_ns + after_ns) - (low + high)) / 2 / self.period_ns) * self.period_ns
        low, high = max(low + turns, before_ns), min(high + turns, after_ns)
        if low > high:  # the ticks are not where we thought: the period was wrong, or the driver restarted
            self._restart()
            return
        self._low, self._high, self._at = low, high, float(after_ns)

    def _restart(self) -> None:
        self.relearned += 1
        self.period_ns = None
        self._enclosures.clear()

    def last_tick_ns(self, begin_ns: int, end_ns: int) -> int | None:
        """The tick whose value a read between two times returned; None when a tick may fall inside the read."""
        if self.period_ns is None:
            return None
        reference = (self._low + self._high) / 2
        margin = self._margin_ns(end_ns)
        turn = (begin_ns - margin - reference) // self.period_ns
        if turn != (end_ns + margin - reference) // self.period_ns:
            return None
        return round(reference + turn * self.period_ns)

    def next_quiet_ns(self, after_ns: int) -> int:
        """A time in the middle between two ticks, at or after a time: where a read is unambiguous."""
        if self.period_ns is None:
            return after_ns
        reference = (self._low + self._high) / 2 + self.period_ns / 2
        return round(reference - (reference - after_ns) // self.period_ns * self.period_ns)

    def next_tick_ns(self, after_ns: int) -> int:
        """The first tick after a time."""
        assert self.period_ns is not None
        reference = (self._low + self._high) / 2
        return round(reference - (reference - after_ns) // self.period_ns * self.period_ns)


def _middle(enclosure: tuple[int, int]) -> float:
    return (enclosure[0] + enclosure[1]) / 2
