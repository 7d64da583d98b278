"""What Redfish and IPMI share: which readings of a management controller (BMC) are new, what its log means.

A BMC refreshes its power reading about once a second whatever the rate it is asked at. A repeat is not data:

    BMC value   ──210──────┬──230──────┬──230──────
    polls         ●    ●    ●    ●    ●    ●    ●
    kept          ●         ●         ●         ●       new value, new time stamp, or a refresh period later
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque

from ..clock import NS_PER_S
from ..schema import Gap
from .base import Batch

# Assumed until changes are seen: common BMCs refresh their power sensors about once a second.
ASSUMED_REFRESH_S = 1.0
# Fewer changes than this say nothing about the refresh period.
CHANGES_TO_BELIEVE = 4
# A time stamp that stands this long means that the BMC stopped measuring, not that it is slow.
STALE_S = 30.0
# Changes further apart are a steady load, not a slow sensor.
LONGEST_REFRESH_S = 60.0

_OVER_CURRENT = re.compile(r"over[- ]?current|\bocp\b|current (?:limit|threshold) exceeded|\boverload", re.I)
_BREAKER_TRIPPED = re.compile(r"breaker\b.*\btrip(?:ped)?\b|\btripped\b.*breaker", re.I)
_BREAKER_NEAR = re.compile(r"breaker\b.*(?:\bnear|warning|threshold|high load|approach)", re.I)
_SUPPLY = re.compile(r"power suppl|\bpsu ?\d*\b|\bps\d+\b", re.I)
_FAULT = re.compile(r"fail|fault|\blost\b|\bloss\b|out[- ]of[- ]range|critical|error|shut ?down", re.I)
_OVER = re.compile(r"current\b.*upper (?:critical|non-recoverable) going high", re.I)
_RECOVERED = re.compile(
    r"de-?assert|restored|cleared|recovered|\b(?:back|return\w*) to normal|\bno (?:longer|faults?)\b", re.I
)


def classify(text: str) -> str | None:
    """Return the kind of power event a log line tells of; None for recoveries and for anything else."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)  # MessageIds are CamelCase: PowerSupplyFailed
    if _RECOVERED.search(words):
        return None
    if _BREAKER_NEAR.search(words):
        return "breaker_near_trip"
    if _BREAKER_TRIPPED.search(words):
        return "breaker_tripped"
    if _OVER_CURRENT.search(words) or _OVER.search(words):
        return "over_current"
    return "psu_fault" if _SUPPLY.search(words) and _FAULT.search(words) else None


class Tracker:
    """Follows one power reading: keeps what is new, reports each gap once, learns the refresh period."""

    def __init__(self, domain: str, started_ns: int) -> None:
        self.domain = domain
        self._kept_ns = started_ns
        self._heard_ns = started_ns
        self._changed_ns: int | None = None
        self._power_w: float | None = None
        self._stamp: str | None = None
        self._changes_s: deque[float] = deque(maxlen=15)
        self._reason: str | None = None

    @property
    def refresh_seen(self) -> bool:
        """Whether `resolution_s` was seen in the readings, rather than assumed."""
        return len(self._changes_s) >= CHANGES_TO_BELIEVE

    @property
    def resolution_s(self) -> float:
        """The period at which the reading is refreshed."""
        return statistics.median(self._changes_s) if self.refresh_seen else ASSUMED_REFRESH_S

    def accept(self, batch: Batch, time_ns: int, power_w: float, stamp: str | None = None) -> None:
        """Add a reading as a sample unless it repeats the one before; `stamp` is the BMC's own time of it."""
        if self._repeats(time_ns, power_w, stamp):
            if stamp is not None and time_ns - self._heard_ns > STALE_S * NS_PER_S:
                self.fail(batch, f"the BMC's time stamp has stood still at {stamp[:40]}")
            return
        if power_w != self._power_w:
            self._note_change(time_ns)
        if self._reason is not None and self._power_w is not None:
            batch.add(self.domain, time_ns - 1, math.nan)
        self._power_w, self._stamp, self._reason = power_w, stamp, None
        self._kept_ns = self._heard_ns = time_ns
        batch.add(self.domain, time_ns, power_w)

    def fail(self, batch: Batch, reason: str) -> None:
        """Open a gap at the last sample, once for each reason in a row."""
        if self._reason != reason:
            batch.gaps.append(Gap(domain=self.domain, start_ns=self._kept_ns, end_ns=None, reason=reason))
        self._reason = reason
        self._changed_ns = None

    def _repeats(self, time_ns: int, power_w: float, stamp: str | None) -> bool:
        if self._power_w is None or power_w != self._power_w:
            return False
        if stamp is not None:
            return stamp == self._stamp
        if self._reason is not None:
            return False
        # A tenth of slack: a poll that comes a little early is still the next refresh.
        hold_s = 0.9 * min(self.resolution_s, ASSUMED_REFRESH_S)
        return time_ns - self._kept_ns < hold_s * NS_PER_S

    def _note_change(self, time_ns: int) -> None:
        if self._changed_ns is not None:
            seconds = (time_ns - self._changed_ns) / NS_PER_S
            if seconds <= LONGEST_REFRESH_S:
                self._changes_s.append(seconds)
        self._changed_ns = time_ns
