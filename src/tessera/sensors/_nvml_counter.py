"""Reads the total-energy counter of one NVIDIA GPU in the background, at its ticks, as an anchor for the samples.

One read takes 2.5 ms of CPU time (4 ms under load, H200), so it is read every five seconds (`CounterPace`), half-way
between two ticks, when its value is unambiguous. To find its ticks it is first read densely for half a second. From
time to time two reads around a tick check that the ticks are still there.

The counter is updated every 100 ms (a tick). A read returns the energy at the last tick, so without a correction it is
up to 100 ms (70 J at 700 W) out of date. Two reads between which the value changed enclose a tick. Ticks are evenly
spaced, so the enclosures of many ticks, folded onto one period, intersect to a millisecond or two.

    reads        r   r   r   r   r   r   r   r
    value        a   a   b   b   b   b   c   c
    enclosed           |–|             |–|          both hold phase + k·period
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from ..clock import Clock

# How much earlier the counter shows energy than the ring, on the H200: at tick T it holds the energy up to T - 9 ms, if
# the ring's lag is 16 ms (benchmarks/fit/fit_response.py).
COUNTER_LEAD_NS = 7_000_000
# The pauses differ: a load that repeats every 0.1, 0.2 or 0.5 s would otherwise always be read at the same phase, and
# the counter could not show how late the samples are (tessera.anchors).
READ_EVERY_NS = (1_000_000_000, 1_100_000_000, 800_000_000, 1_200_000_000, 900_000_000)
# Reading the counter is most of the cost of sampling. After EAGER_READS reads that agree with the samples within this
# share, it is read a fifth as often: a window between two reads gets its joules from the samples anyway. If samples and
# counter do not agree, the load is in step with the samples (tessera.anchors), and every read tells more about it.
EAGER_READS, SELDOM, AGREE = 10, 5, 0.01
WATCH_EVERY_NS = 30_000_000_000
LEARN_NS = 3_000_000
# Stop looking for ticks after this many reads (seconds of them): an idle or odd counter may not tick at all. The search
# is repeated later. Reads are counted instead of time, because this thread may not run for seconds while torch loads.
LEARN_READS = 400
RETRY_NS = 60_000_000_000

# The H200's counter was found to tick every 100.000 ms over 80 s (benchmarks/device/record_sensor.py). Vendors use
# round figures, so the period is the only multiple of 5 ms that fits the enclosures. If none fits, no period is
# assumed: a period known to 1% predicts no tick a second later.
SNAP_NS = 5_000_000
# The measured period must be known at least this well (relative): some multiple of 5 ms is always near.
SNAP_WITHIN = 0.03
# How much a tick may drift against the host's clock, per second elapsed: the device's clock was under 10 ppm off
# (benchmarks/fit/fit_response.py).
DRIFT = 20e-6
# An enclosure wider than this share of the period adds nothing to a known phase. To count ticks it must be narrower
# still: two reads that are far apart would otherwise see a change each time and be taken for ticks.
MAX_ENCLOSURE = 0.6
MAX_LEARNING = 0.4
LEARN_TICKS = 4
# The two reads around a tick are placed outside its possible range. They show that the tick is still there, but never
# narrow the phase, which drifts (15 ms in 12 minutes). Above this share of the period the phase is learnt anew.
MAX_UNCERTAINTY = 0.15
# If the dense reads pause longer than this, the ticks in between cannot be counted.
PAUSE_NS = 5_000_000_000
_KEPT = 64


class EnergyCounter:
    """Gives (time_ns, joules) anchors. `due_ns` says when it should be read next."""

    def __init__(
        self,
        nvml: Any,
        handle: Any,
        clock: Clock,
        *,
        ring_lag_s: float,
        sampled_j: Callable[[int], float | None],
    ) -> None:
        """`sampled_j` returns the joules of the ring's samples up to a time, from any fixed moment; None if unknown."""
        self._clock = clock
        self._nvml = nvml
        self._handle = handle
        self._ring_lag_ns = round(ring_lag_s * 1e9)
        self._lag_ns = max(self._ring_lag_ns - COUNTER_LEAD_NS, 0)
        self._sampled_j = sampled_j
        self._pace = CounterPace()
        self.ticks = TickFinder()
        self.due_ns = 0
        self._tries = 0
        self._last: tuple[int, int, int] | None = None  # start and end of the last read, its value
        self._watch_ns = 0
        self._watching = False
        self._last_mj = -1

    @property
    def learning(self) -> bool:
        """Return whether the ticks are unknown and are about to be looked for (not while resting after a failure)."""
        return not self.ticks.is_known and self.due_ns - self._clock.monotonic_ns() < READ_EVERY_NS[0]

    def read(self) -> list[tuple[int, float]]:
        """Read the counter once if it is due, and return the anchors from it."""
        begin = self._clock.monotonic_ns()
        if begin < self.due_ns:
            return []
        value_mj = int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        end = self._clock.monotonic_ns()
        if value_mj < self._last_mj:  # the driver restarted: its ticks are elsewhere now
            self.ticks = TickFinder()
            self._last = None
        elif self._last and value_mj != self._last[2]:
            self.ticks.add_tick(self._last[0], end)
        elif self._last:
            self.ticks.add_quiet(self._last[1], begin)
        self._last, self._last_mj = (begin, end, value_mj), value_mj
        tick = self.ticks.last_tick_ns(begin, end)
        if tick is not None:
            time_ns = tick - self._lag_ns
            self._pace.compare(value_mj * 1e-3, self._sampled_j(time_ns + self._ring_lag_ns))
        self._plan(end)
        return [] if tick is None else [(tick - self._lag_ns, value_mj * 1e-3)]

    def _plan(self, now: int) -> None:
        if not self.ticks.is_known:
            self._tries = (self._tries + 1) % LEARN_READS
            self.due_ns = now + (LEARN_NS if self._tries else RETRY_NS)
            return
        self._tries = 0
        if self._watching:  # this was the read before a tick: the next one goes just after it
            self._watching = False
            self.due_ns = self.ticks.next_tick_ns(now) + round(self.ticks.uncertainty_ns) + 500_000
        elif now >= self._watch_ns:
            self._watch_ns = now + WATCH_EVERY_NS
            self._watching = True
            before = self.ticks.next_tick_ns(now + 20_000_000)
            self.due_ns = before - round(self.ticks.uncertainty_ns) - 6_000_000
        else:
            self.due_ns = self.ticks.next_quiet_ns(now + self._pace.next_pause_ns())


class CounterPace:
    """Chooses the pause before the next read: a second at first and while samples and counter disagree, else five."""

    def __init__(self) -> None:
        self._pauses_ns = itertools.cycle(READ_EVERY_NS)
        self._eager = EAGER_READS
        self._base: tuple[float, float] | None = None

    def next_pause_ns(self) -> int:
        self._eager = max(self._eager - 1, 0)
        return next(self._pauses_ns) * (1 if self._eager else SELDOM)

    def compare(self, counted_j: float, sampled_j: float | None) -> None:
        """Compare counter and samples since the last read, or since the eager reads began; any origin will do."""
        if sampled_j is None:
            self._base = None
            return
        if self._eager > 1 and self._base is not None:
            return
        if self._base is not None:
            counted, sampled = counted_j - self._base[0], sampled_j - self._base[1]
            if not abs(counted - sampled) <= AGREE * sampled:
                self._eager = EAGER_READS + 1
        self._base = (counted_j, sampled_j)


class TickFinder:
    """Learns the period and phase of a counter's ticks from enclosures (`add_tick`), then dates its values."""

    def __init__(self) -> None:
        self.period_ns: float | None = None
        self._enclosures: list[tuple[int, int]] = []
        self._low = self._high = 0.0  # the enclosure of one reference tick
        self._at = 0.0
        self.relearned = 0

    @property
    def is_known(self) -> bool:
        """Return whether period and phase are known."""
        return self.period_ns is not None

    @property
    def uncertainty_ns(self) -> float:
        """Return the half-width of the interval in which the reference tick must lie."""
        return (self._high - self._low) / 2

    def add_tick(self, before_ns: int, after_ns: int) -> None:
        """Note a tick after `before_ns` (start of the last read of the old value) and up to `after_ns`."""
        if self.period_ns is None:
            self._learn(before_ns, after_ns)
            return
        self._refine(before_ns, after_ns)
        if self.is_known and self._margin_ns(after_ns) > MAX_UNCERTAINTY * self.period_ns:
            self._restart()

    def add_quiet(self, from_ns: int, to_ns: int) -> None:
        """Note that no tick happened between two times. If one was expected there, forget what was learnt."""
        if self.period_ns is None:
            return
        margin = self._margin_ns(to_ns)
        if self.next_tick_ns(round(from_ns + margin)) + margin < to_ns:
            self._restart()

    def _margin_ns(self, at_ns: int) -> float:
        """Return how far from its expected time a tick near `at_ns` may lie."""
        return self.uncertainty_ns + DRIFT * max(at_ns - self._at, 0.0)

    def _learn(self, before_ns: int, after_ns: int) -> None:
        if self._enclosures and before_ns - self._enclosures[-1][1] > PAUSE_NS:
            self._enclosures.clear()
        self._enclosures = [*self._enclosures[1 - _KEPT :], (before_ns, after_ns)]
        pairs = list(itertools.pairwise(self._enclosures))
        typical = sorted(_middle(b) - _middle(a) for a, b in pairs)[len(pairs) // 2] if pairs else 0.0
        narrow = [e for e in self._enclosures if e[1] - e[0] <= MAX_LEARNING * typical]
        # Differences between neighbouring ticks, with none missed in a long pause between two reads. Choosing them as
        # strictly as `narrow` would prefer ticks that were seen early, and make the mean too short.
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
            if not self.is_known:
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
        """Return the tick whose value a read between two times returned; None if a tick may fall inside the read."""
        if self.period_ns is None:
            return None
        reference = (self._low + self._high) / 2
        margin = self._margin_ns(end_ns)
        turn = (begin_ns - margin - reference) // self.period_ns
        if turn != (end_ns + margin - reference) // self.period_ns:
            return None
        return round(reference + turn * self.period_ns)

    def next_quiet_ns(self, after_ns: int) -> int:
        """Return the first time at or after `after_ns` in the middle between two ticks, when a read is unambiguous."""
        if self.period_ns is None:
            return after_ns
        reference = (self._low + self._high) / 2 + self.period_ns / 2
        return round(reference - (reference - after_ns) // self.period_ns * self.period_ns)

    def next_tick_ns(self, after_ns: int) -> int:
        """Return the first tick after a time."""
        assert self.period_ns is not None
        reference = (self._low + self._high) / 2
        return round(reference - (reference - after_ns) // self.period_ns * self.period_ns)


def _middle(enclosure: tuple[int, int]) -> float:
    return (enclosure[0] + enclosure[1]) / 2
