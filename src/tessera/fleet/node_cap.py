"""The node's side of a lease, without a clock or a network: which cap holds now.

::

    send(now) ──► heartbeat ···► governor: counts the lease from when it decides
    receive(number, grant) ◄··· grant     the node counts it from when it *sent* that heartbeat, which was earlier

So the node's lease ends first, on any two clocks that run equally fast: neither needs the other's time. The node
falls back to its guaranteed share a little earlier still, so that its power is down when the lease ends.
"""

from __future__ import annotations

import math

from .leases import CapGrant

PENDING = 64
"""Heartbeats whose answer may still come; older ones are forgotten, and so are their answers."""
FALLBACK_SHARE = 0.15
"""The last part of a lease, in which the node already keeps to its guaranteed share: 3 s of 20 s."""


class CapHolder:
    """The cap of one node. Give it every answer, in any order; it keeps to the newest grant while that lasts."""

    def __init__(self, guaranteed_w: float = 0.0) -> None:
        self.guaranteed_w = guaranteed_w
        self.grant: CapGrant | None = None
        self.acked = 0
        self.end_s = -math.inf
        """When the node falls back."""
        self._number = 0
        self._sent_s: dict[int, float] = {}

    def send(self, now_s: float) -> int:
        """A heartbeat leaves now; its number goes with it and comes back with the answer."""
        self._number += 1
        self._sent_s[self._number] = now_s
        self._sent_s.pop(self._number - PENDING, None)
        return self._number

    def receive(self, number: int, grant: CapGrant) -> bool:
        """Take an answer; False where it is older than what holds, or belongs to no heartbeat of ours."""
        sent_s = self._sent_s.get(number)
        if sent_s is None or grant.seq <= (self.grant.seq if self.grant else 0):
            return False
        self.grant, self.guaranteed_w = grant, grant.guaranteed_w
        self.end_s = sent_s + grant.lease_s * (1.0 - FALLBACK_SHARE)
        return True

    def confirm(self) -> None:
        """The newest grant is in force on the hardware: the governor may count on it from the next heartbeat on."""
        self.acked = self.grant.seq if self.grant else 0

    def cap_w(self, now_s: float) -> float:
        """What the node may draw now."""
        return self.grant.cap_w if self.grant is not None and now_s < self.end_s else self.guaranteed_w

    def is_leased(self, now_s: float) -> bool:
        """Whether a grant holds; otherwise the node has fallen back to its guaranteed share."""
        return self.grant is not None and now_s < self.end_s
