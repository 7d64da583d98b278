"""The node's side of a lease, without a clock or a network: which cap is in force now.

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
"""How many heartbeats may still be answered; older ones are forgotten, and so are their answers."""
FALLBACK_SHARE = 0.15
"""The last share of a lease, in which the node already keeps to its guaranteed share: 3 s of 20 s."""


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
        """Return the number of a heartbeat that leaves now; the answer comes back with this number."""
        self._number += 1
        self._sent_s[self._number] = now_s
        self._sent_s.pop(self._number - PENDING, None)
        return self._number

    def receive(self, number: int, grant: CapGrant) -> bool:
        """Take an answer; return False if it is older than the grant in force, or not to a heartbeat of ours."""
        sent_s = self._sent_s.get(number)
        if sent_s is None or grant.seq <= (self.grant.seq if self.grant else 0):
            return False
        self.grant, self.guaranteed_w = grant, grant.guaranteed_w
        self.end_s = sent_s + grant.lease_s * (1.0 - FALLBACK_SHARE)
        return True

    def confirm(self) -> None:
        """Note that the newest grant is in force on the hardware; the next heartbeat tells the governor."""
        self.acked = self.grant.seq if self.grant else 0

    def cap_w(self, now_s: float) -> float:
        """Return what the node may draw now."""
        return self.grant.cap_w if self.grant is not None and now_s < self.end_s else self.guaranteed_w

    def is_leased(self, now_s: float) -> bool:
        """Return whether a grant is in force; otherwise the node has fallen back to its guaranteed share."""
        return self.grant is not None and now_s < self.end_s
