"""`PowerEvent`: what a power supply, a PDU or a BMC reports beside its readings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerEvent:
    """An event that a power supply, PDU or BMC logged: over-current, a breaker near its trip, a supply fault.

    It was seen at `time_ns`, and happened between `since_ns` and then (None: at `time_ns`): logs are read only every
    few seconds, and the clock of a BMC is often wrong.
    """

    time_ns: int
    domain: str
    kind: str
    message: str
    since_ns: int | None = None

    @property
    def start_ns(self) -> int:
        """The earliest time at which the event may have happened."""
        return self.time_ns if self.since_ns is None else self.since_ns

    def shift(self, offset_ns: int) -> PowerEvent:
        """Return the same event on another clock."""
        since_ns = None if self.since_ns is None else self.since_ns + offset_ns
        return dataclasses.replace(self, time_ns=self.time_ns + offset_ns, since_ns=since_ns)
