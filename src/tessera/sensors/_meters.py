"""Turns the answers of a source into power samples and gaps: polled watts, or an energy counter with time stamps.

`PolledPower` follows watts that are polled more often than they are refreshed (NVML's fields, AMD SMI, Redfish, IPMI).
A repeated value is not a new measurement, and is dropped. If the source gives no time stamps, a value that stays the
same is kept once per refresh period, because it was measured anew by then:

    source      ──210──────┬──230──────┬──230──────
    polls         ●    ●    ●    ●    ●    ●    ●
    kept          ●         ●         ●         ●       new value, new time stamp, or a refresh period later

The refresh period is given, or learnt from the times at which the value changes, or assumed before enough changes.

`CounterPower` computes mean power from the energy counters of AMD and Intel GPUs. A counter's time stamp says when the
firmware took the reading, by a clock whose origin we do not know. A read takes a while, and a slow counter returns a
reading that is already old:

    firmware    ──E0──────────────E1──────────────E2──────►   stamps
    our reads   ────r───────r───────r───────r───────r──►      before/after of each call
    samples       |<-- mean of E1-E0 -->|                      placed at the stamps, moved to our clock

A repeated reading is dropped. After anything that makes an interval's energy unknown, a NaN sample starts anew.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from ..clock import NS_PER_S
from ..schema import MAX_BOARD_W, Gap
from .base import Batch

# Assumed before changes are seen: common BMCs refresh about once a second, and so does the slowest known GPU reading
# (NVML's 1 s average, docs/measuring.md).
ASSUMED_REFRESH_S = 1.0
# This many intervals between changes are needed before a refresh period is derived from them.
CHANGES_TO_BELIEVE = 4
# Changes that are further apart come from a steady load, not from a slow sensor.
LONGEST_REFRESH_S = 60.0
# If the source's time stamp stays the same for this long, the source has stopped measuring.
STALE_S = 30.0
# A poll that comes early by this share of a refresh period still counts as the next refresh: polling is not exact.
EARLY = 0.1
# The slowest counter seen refreshes each second (docs/measuring.md). One that stays the same for five seconds is stuck.
COUNTER_STALE_NS = 5 * NS_PER_S
# The drift of a device's clock against ours: crystal oscillators are within 100 ppm.
STAMP_DRIFT = 100e-6
# A stamp that runs this much slower or faster than our clock has another unit than documented, and is not used.
STAMP_RATIO = (0.2, 5.0)


class PolledPower:
    """Follows one power reading: keeps new values, reports each gap once, learns the refresh period.

    `started_ns` is when its source was first seen to work: a failure before the first sample counts from then. Without
    it, a NaN comes before the first sample, as after a gap. If `refresh_s` (the refresh period) is given, nothing is
    learnt. Two samples further apart than `hole_s` have a gap between them.
    """

    def __init__(
        self, domain: str, *, started_ns: int | None = None, refresh_s: float | None = None, hole_s: float = math.inf
    ) -> None:
        self.domain = domain
        self._known_s = refresh_s
        self._hole_s = hole_s
        self._kept_ns = started_ns
        self._asked_ns = 0
        self._changed_ns: int | None = None
        self._power_w: float | None = None
        self._stamp: str | None = None
        self._reason: str | None = None  # of the gap that is open
        self._unknown = started_ns is None  # whether a NaN goes before the next sample
        self._intervals_s: deque[float] = deque(maxlen=32)

    @property
    def refresh_seen(self) -> bool:
        """Return whether `resolution_s` is known or was seen in the readings, rather than assumed."""
        return self._known_s is not None or len(self._intervals_s) >= CHANGES_TO_BELIEVE

    @property
    def resolution_s(self) -> float:
        """Return the period at which the reading is refreshed."""
        if self._known_s is not None:
            return self._known_s
        if not self.refresh_seen:
            return ASSUMED_REFRESH_S
        # The lower quartile: a constant load hides changes, so long intervals span several refreshes.
        return statistics.quantiles(self._intervals_s, n=4)[0]

    def observe(self, batch: Batch, *, power_w: float, time_ns: int, stamp: str | None = None) -> None:
        """Add a reading unless it repeats the one before; `stamp` is the source's own time stamp of it."""
        repeats = self._repeats(power_w, time_ns, stamp)
        self._asked_ns = time_ns
        if repeats:
            if stamp is not None and self._since_kept_s(time_ns) > STALE_S:
                self.fail(batch, time_ns, f"the source's time stamp has not changed from {stamp[:40]}")
            return
        self._note_hole(batch, time_ns)
        if power_w != self._power_w:
            self._note_change(time_ns)
        if self._unknown:
            batch.add(self.domain, time_ns - 1, math.nan)
        batch.add(self.domain, time_ns, power_w)
        self._power_w, self._stamp, self._kept_ns = power_w, stamp, time_ns
        self._reason, self._unknown = None, False

    def fail(self, batch: Batch, time_ns: int, reason: str) -> None:
        """Open a gap at the last sample, once for the same reason; the next sample ends it."""
        if self._reason != reason:
            start_ns = self._kept_ns if self._kept_ns is not None else time_ns
            batch.gaps.append(Gap(domain=self.domain, start_ns=start_ns, end_ns=None, reason=reason))
        self._reason, self._unknown, self._changed_ns = reason, True, None

    def _since_kept_s(self, time_ns: int) -> float:
        return math.inf if self._kept_ns is None else (time_ns - self._kept_ns) / NS_PER_S

    def _repeats(self, power_w: float, time_ns: int, stamp: str | None) -> bool:
        if power_w != self._power_w:
            return False
        if stamp is not None:
            return stamp == self._stamp
        if self._reason is not None:
            return False
        # A period learnt under a steady load is too long, so a constant value is kept at least as often as assumed.
        hold_s = self._known_s if self._known_s is not None else min(self.resolution_s, ASSUMED_REFRESH_S)
        # A poll may count as early only if it is nearer to the refresh than the next poll will be.
        early_s = min(EARLY * hold_s, (time_ns - self._asked_ns) / NS_PER_S / 2)
        return self._since_kept_s(time_ns) < hold_s - early_s

    def _note_hole(self, batch: Batch, time_ns: int) -> None:
        """Add a gap for the time without reads, unless a gap is already open."""
        if self._power_w is None or self._kept_ns is None or self._reason is not None:
            return
        hole_s = self._since_kept_s(time_ns)
        if hole_s > self._hole_s:
            reason = f"not read for {hole_s:.1f} s: the sampler was kept from running"
            batch.gaps.append(Gap(domain=self.domain, start_ns=self._kept_ns, end_ns=time_ns, reason=reason))
            self._unknown, self._changed_ns = True, None

    def _note_change(self, time_ns: int) -> None:
        """Learn from a change between two polls, but not from the first reading or the first after a gap."""
        if self._power_w is None or self._unknown:
            return
        if self._changed_ns is not None and time_ns - self._changed_ns <= LONGEST_REFRESH_S * NS_PER_S:
            self._intervals_s.append((time_ns - self._changed_ns) / NS_PER_S)
        self._changed_ns = time_ns


class StampMap:
    """Places time stamps of a device's clock, whose origin is unknown, on the monotonic clock.

    A stamp is never later than the reply that carried it, so the smallest (reply - stamp) seen is the best offset.
    """

    def __init__(self) -> None:
        self._offset_ns: float | None = None
        self._observed_ns = 0

    def place(self, stamp_ns: int, after_ns: int) -> int:
        """Return the monotonic time of a stamp that came with a reply received at `after_ns`."""
        bound = float(after_ns - stamp_ns)
        if self._offset_ns is not None:
            bound = min(bound, self._offset_ns + STAMP_DRIFT * (after_ns - self._observed_ns))
        self._offset_ns, self._observed_ns = bound, after_ns
        return stamp_ns + round(bound)


@dataclass(frozen=True, slots=True)
class _CounterReading:
    energy_j: float
    stamp_ns: int
    read_ns: int
    placed_ns: int


class CounterPower:
    """Computes the mean power between the readings of one energy counter."""

    def __init__(self, domain: str) -> None:
        self.domain = domain
        self._stamps = StampMap()
        self._last: _CounterReading | None = None
        self._gap_open = False
        self._last_ns: int | None = None
        self._intervals_s: deque[float] = deque(maxlen=32)

    @property
    def resolution_s(self) -> float | None:
        """Return the period at which the counter really changes; None before three intervals were seen."""
        return statistics.median(self._intervals_s) if len(self._intervals_s) >= 3 else None

    def observe(self, batch: Batch, *, energy_j: float, stamp_ns: int, before_ns: int, after_ns: int) -> None:
        """Add the sample of a reading. The driver's call ran from `before_ns` to `after_ns`."""
        last = self._last
        middle_ns = (before_ns + after_ns) // 2
        if last is None:
            self._begin(batch, energy_j, stamp_ns, middle_ns, after_ns)
            return
        if energy_j == last.energy_j and stamp_ns >= last.stamp_ns:
            # Every chip draws power, so an unchanged counter was not updated yet; the next update covers this time too.
            if middle_ns - last.read_ns > COUNTER_STALE_NS:
                self.fail(batch, middle_ns, "the energy counter does not change")
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
        self._last, self._last_ns = _CounterReading(energy_j, stamp_ns, middle_ns, placed_ns), placed_ns

    def fail(self, batch: Batch, time_ns: int, reason: str) -> None:
        """Open a gap at the last sample, once; the next `observe` ends it."""
        if not self._gap_open:
            start_ns = self._last_ns if self._last_ns is not None else time_ns
            batch.gaps.append(Gap(domain=self.domain, start_ns=start_ns, end_ns=None, reason=reason))
        self._gap_open = True
        # The counter may have been reset while it did not answer, and may since have passed its old value.
        self._last = None

    def _begin(self, batch: Batch, energy_j: float, stamp_ns: int, middle_ns: int, after_ns: int) -> None:
        self._stamps = StampMap()
        placed_ns = self._stamps.place(stamp_ns, after_ns) if stamp_ns else middle_ns
        if self._last_ns is not None:
            placed_ns = max(placed_ns, self._last_ns + 1)
        batch.add(self.domain, placed_ns, math.nan)
        self._gap_open = False
        self._last, self._last_ns = _CounterReading(energy_j, stamp_ns, middle_ns, placed_ns), placed_ns

    @staticmethod
    def _span(last: _CounterReading, stamp_ns: int, middle_ns: int) -> tuple[int, bool]:
        """Return the nanoseconds between two readings, and whether they come from the time stamps."""
        by_host = max(middle_ns - last.read_ns, 1)
        by_stamp = stamp_ns - last.stamp_ns
        low, high = STAMP_RATIO
        # A counter updated each second may be updated between two reads that are close together: allow one second more.
        if low * by_host <= by_stamp <= high * by_host + NS_PER_S:
            return by_stamp, True
        return by_host, False


def _implausible(last: _CounterReading, energy_j: float, stamp_ns: int, power_w: float) -> str | None:
    if energy_j < last.energy_j:
        return "the energy counter went backwards (wrapped or reset)"
    if stamp_ns < last.stamp_ns:
        return "the counter's clock went backwards (wrapped or reset)"
    if power_w > MAX_BOARD_W:
        return f"the energy counter jumped by {energy_j - last.energy_j:.0f} J"
    return None
