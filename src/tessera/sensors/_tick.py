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

# The H200's counter was found to tick every 100.000 ms over 80 s (benchmarks/device/record_sensor.py); vendors
# use round figures, so a period within 3% of a multiple of 5 ms is taken to be that multiple.
SNAP_NS = 5_000_000
SNAP_WITHIN = 0.03
# How much a tick may wander from the host's clock per second elapsed: the device's oscillator was 6 ppm off.
DRIFT = 20e-6
# An enclosure wider than this teaches too little about the period.
MAX_ENCLOSURE = 0.6
LEARN_TICKS = 4


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
        else:
            self._refine(before_ns, after_ns)

    def _learn(self, before_ns: int, after_ns: int) -> None:
        self._enclosures.append((before_ns, after_ns))
        if len(self._enclosures) < LEARN_TICKS:
            return
        first, last = self._enclosures[0], self._enclosures[-1]
        steps = sorted(b[0] + b[1] - a[0] - a[1] for a, b in zip(self._enclosures, self._enclosures[1:], strict=False))
        rough = steps[len(steps) // 2] / 2
        spans = round(((last[0] + last[1]) - (first[0] + first[1])) / 2 / rough) if rough > 0 else 0
        if spans < 1:
            self._restart()
            return
        period = ((last[0] + last[1]) - (first[0] + first[1])) / 2 / spans
        snapped = round(period / SNAP_NS) * SNAP_NS
        self.period_ns = snapped if snapped and abs(snapped / period - 1) < SNAP_WITHIN else period
        self._low, self._high, self._at = float(first[0]), float(first[1]), float(first[1])
        for enclosure in self._enclosures[1:]:
            self._refine(*enclosure)
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
        margin = self.uncertainty_ns + DRIFT * max(end_ns - self._at, 0.0)
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
