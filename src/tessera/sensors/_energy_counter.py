"""Power from an energy counter with stamps of its own, as AMD and Intel GPUs have it.

A counter's stamp says when the firmware took the reading, by a clock whose origin we do not know. Reading
it takes a while, and a slow counter answers with a reading that is already old:

    firmware    ──E0──────────────E1──────────────E2──────►   stamps
    our reads   ────r───────r───────r───────r───────r──►      before/after of each call
    samples       |<-- mean of E1-E0 -->|                      placed at the stamps, moved to our clock

`CounterPower` turns that into `Hold.MEAN` samples. It drops repeats, and starts again with a NaN sample after
anything it cannot bridge. A reading of watts that is polled is `_polled.PolledPower`'s.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from ..clock import NS_PER_S
from ..schema import MAX_BOARD_W, Gap
from .base import Batch

# The slowest counter seen refreshes each second (docs/measuring.md); one that stands still five times as long
# is stuck.
STALE_NS = 5 * NS_PER_S
# Crystal oscillators are within 100 ppm; the offset of a device's clock may creep that fast.
DRIFT = 100e-6
# A stamp that runs this much faster or slower than our clock is in another unit than documented: it is not
# used.
STAMP_RATIO = (0.2, 5.0)


class StampMap:
    """Places stamps of a device's clock, whose origin is unknown, on the monotonic clock.

    A stamp is never later than the reply that carried it, so the smallest (reply - stamp) seen is the best
    offset.
    """

    def __init__(self) -> None:
        self._offset_ns: float | None = None
        self._observed_ns = 0

    def place(self, stamp_ns: int, after_ns: int) -> int:
        """Monotonic time of a stamp that came with a reply received at `after_ns`."""
        bound = float(after_ns - stamp_ns)
        if self._offset_ns is not None:
            bound = min(bound, self._offset_ns + DRIFT * (after_ns - self._observed_ns))
        self._offset_ns, self._observed_ns = bound, after_ns
        return stamp_ns + round(bound)


@dataclass(frozen=True, slots=True)
class _Reading:
    energy_j: float
    stamp_ns: int
    read_ns: int
    placed_ns: int


class CounterPower:
    """Mean power between the readings of one energy counter."""

    def __init__(self, domain: str) -> None:
        self.domain = domain
        self._stamps = StampMap()
        self._last: _Reading | None = None
        self._gap_open = False
        self._last_ns: int | None = None
        self._intervals_s: deque[float] = deque(maxlen=32)

    @property
    def resolution_s(self) -> float | None:
        """The period at which there really is something new; None until three intervals were seen."""
        return statistics.median(self._intervals_s) if len(self._intervals_s) >= 3 else None

    def observe(self, batch: Batch, *, energy_j: float, stamp_ns: int, before_ns: int, after_ns: int) -> None:
        """Add what a reading tells; the call to the driver ran from `before_ns` to `after_ns`."""
        last = self._last
        middle_ns = (before_ns + after_ns) // 2
        if last is None:
            self._begin(batch, energy_j, stamp_ns, middle_ns, after_ns)
            return
        if energy_j == last.energy_j and stamp_ns >= last.stamp_ns:
            # No chip draws nothing: an unchanged counter has not ticked, the next tick covers this time too.
            if middle_ns - last.read_ns > STALE_NS:
                self.fail(batch, middle_ns, "the energy counter stands still")
            return
        span_ns, stamped = self._span(last, stamp_ns, middle_ns)
        power_w = (energy_j - last.energy_j) / (span_ns * 1e-9)
        why = _implausible(last, energy_j, stamp_ns, power_w)
        if why:
            self.fail(batch, middle_ns, why)
            self._begin(batch, energy_j, stamp_ns, middle_ns, after_ns)
            return
        placed_ns = self._stamps.place(stamp_ns, after_ns) if stamped else middle_ns
        placed_ns = max(placed_ns, last.placed_ns + 1)
        batch.add(self.domain, placed_ns, power_w)
        self._intervals_s.append(span_ns * 1e-9)
        self._keep(_Reading(energy_j, stamp_ns, middle_ns, placed_ns))

    def fail(self, batch: Batch, time_ns: int, reason: str) -> None:
        """Note that nothing is known from the last sample on, once, until `observe` gives data again."""
        if not self._gap_open:
            start_ns = self._last_ns if self._last_ns is not None else time_ns
            batch.gaps.append(Gap(domain=self.domain, start_ns=start_ns, end_ns=None, reason=reason))
        self._gap_open = True
        # What a counter did while it did not answer is not known: it may have been reset and overtaken
        # itself.
        self._last = None

    def _begin(self, batch: Batch, energy_j: float, stamp_ns: int, middle_ns: int, after_ns: int) -> None:
        self._stamps = StampMap()
        placed_ns = self._stamps.place(stamp_ns, after_ns) if stamp_ns else middle_ns
        if self._last_ns is not None:
            placed_ns = max(placed_ns, self._last_ns + 1)
        batch.add(self.domain, placed_ns, math.nan)
        self._gap_open = False
        self._keep(_Reading(energy_j, stamp_ns, middle_ns, placed_ns))

    def _keep(self, reading: _Reading) -> None:
        self._last, self._last_ns = reading, reading.placed_ns

    @staticmethod
    def _span(last: _Reading, stamp_ns: int, middle_ns: int) -> tuple[int, bool]:
        """Nanoseconds between two readings, and whether they come from the stamps."""
        by_host = max(middle_ns - last.read_ns, 1)
        by_stamp = stamp_ns - last.stamp_ns
        low, high = STAMP_RATIO
        # A counter that ticks each second may tick between two reads close together: that much slack,
        # upwards only.
        if low * by_host <= by_stamp <= high * by_host + NS_PER_S:
            return by_stamp, True
        return by_host, False


def _implausible(last: _Reading, energy_j: float, stamp_ns: int, power_w: float) -> str | None:
    if energy_j < last.energy_j:
        return "the energy counter went backwards (wrapped or reset)"
    if stamp_ns < last.stamp_ns:
        return "the counter's clock went backwards (wrapped or reset)"
    if power_w > MAX_BOARD_W:
        return f"the energy counter jumped by {energy_j - last.energy_j:.0f} J"
    return None
