"""A power reading that is asked for more often than it is refreshed: NVML's fields, AMD SMI, Redfish, IPMI.

A repeat is not data. Without a time stamp of the source's own, a value that stays is taken once per refresh
period, for there it was measured anew:

    source      ──210──────┬──230──────┬──230──────
    polls         ●    ●    ●    ●    ●    ●    ●
    kept          ●         ●         ●         ●       new value, new time stamp, or a refresh period later

The refresh period is known (given), or learnt from the times at which the value changes, or assumed until then.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from ..clock import NS_PER_S
from ..schema import Gap
from .base import Batch

# Assumed until changes are seen: common BMCs refresh about once a second, and so does the slowest GPU reading
# known (NVML's 1 s average, docs/measuring.md).
ASSUMED_REFRESH_S = 1.0
# Fewer intervals between changes than this say nothing about the refresh period.
CHANGES_TO_BELIEVE = 4
# Changes further apart are a steady load, not a slow sensor.
LONGEST_REFRESH_S = 60.0
# A time stamp that stands this long means that the source stopped measuring, not that it is slow.
STALE_S = 30.0
# A poll this much early, in refresh periods, is still the next refresh: one a second never comes to the nanosecond.
EARLY = 0.1


class PolledPower:
    """Follows one power reading: keeps what is new, reports each gap once, learns the refresh period.

    `started_ns` is when its source was seen to work: what fails before the first sample has failed since then.
    Where it is not given, the first sample comes after a NaN, as one after a gap does. `refresh_s` is a refresh
    period known from elsewhere: nothing is learnt then. Samples further apart than `hole_s` have a gap between.
    """

    def __init__(
        self,
        domain: str,
        *,
        started_ns: int | None = None,
        refresh_s: float | None = None,
        hole_s: float = math.inf,
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
        """Whether `resolution_s` is known or was seen in the readings, rather than assumed."""
        return self._known_s is not None or len(self._intervals_s) >= CHANGES_TO_BELIEVE

    @property
    def resolution_s(self) -> float:
        """The period at which the reading is refreshed."""
        if self._known_s is not None:
            return self._known_s
        if not self.refresh_seen:
            return ASSUMED_REFRESH_S
        # The quick quarter: a constant load skips changes, so long intervals span several refreshes.
        return statistics.quantiles(self._intervals_s, n=4)[0]

    def observe(self, batch: Batch, *, power_w: float, time_ns: int, stamp: str | None = None) -> None:
        """Add a reading unless it repeats the one before; `stamp` is the source's own time of it."""
        repeats = self._repeats(power_w, time_ns, stamp)
        self._asked_ns = time_ns
        if repeats:
            if stamp is not None and self._since_kept_s(time_ns) > STALE_S:
                self.fail(batch, time_ns, f"the source's own time stamp has stood still at {stamp[:40]}")
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
        """Open a gap at the last sample, once for each reason in a row; the next sample ends it."""
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
        # What was learnt under a steady load is too long; a constant value is confirmed as often as assumed.
        hold_s = self._known_s if self._known_s is not None else min(self.resolution_s, ASSUMED_REFRESH_S)
        # Early only if this poll is nearer to the refresh than the next one will be.
        early_s = min(EARLY * hold_s, (time_ns - self._asked_ns) / NS_PER_S / 2)
        return self._since_kept_s(time_ns) < hold_s - early_s

    def _note_hole(self, batch: Batch, time_ns: int) -> None:
        """Mark the time in which nobody asked; an open gap tells of it already."""
        if self._power_w is None or self._kept_ns is None or self._reason is not None:
            return
        hole_s = self._since_kept_s(time_ns)
        if hole_s > self._hole_s:
            reason = f"not read for {hole_s:.1f} s: the sampler was kept from running"
            batch.gaps.append(Gap(domain=self.domain, start_ns=self._kept_ns, end_ns=time_ns, reason=reason))
            self._unknown, self._changed_ns = True, None

    def _note_change(self, time_ns: int) -> None:
        """Learn from a change that was seen happening: not from the first reading, nor the first after a gap."""
        if self._power_w is None or self._unknown:
            return
        if self._changed_ns is not None and time_ns - self._changed_ns <= LONGEST_REFRESH_S * NS_PER_S:
            self._intervals_s.append((time_ns - self._changed_ns) / NS_PER_S)
        self._changed_ns = time_ns
