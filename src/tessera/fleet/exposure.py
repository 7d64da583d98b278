"""What every node may draw at most, whichever messages it got. Only this module keeps the sum below the limit.

A node's exposure is the largest grant that has not ended and that the node has not replaced by a later one, or its
guaranteed share. `grant` gives at most the limit less the exposure of all other nodes. Nothing else in a governor must
be right for the sum to stay below the limit.
"""

from __future__ import annotations

import heapq

from .leases import GovernedNode, round_down


class ExposureLedger:
    """The nodes of a budget with what they may draw."""

    def __init__(self, limit_w: float) -> None:
        self.limit_w = limit_w
        self.nodes: dict[str, GovernedNode] = {}
        self.total_w = 0.0
        self._exposure_w: dict[str, float] = {}
        self._ends: list[tuple[float, str]] = []
        self._waiting: set[str] = set()  # nodes in `_ends`, with one entry each

    def add(self, node: GovernedNode, now_s: float) -> None:
        """Count a node from now on."""
        self.nodes[node.name] = node
        self.update(node, now_s)

    def remove(self, name: str) -> None:
        """Stop counting a node."""
        del self.nodes[name]
        self.total_w -= self._exposure_w.pop(name)

    def update(self, node: GovernedNode, now_s: float) -> float:
        """Update the node's exposure, also in the sum, and return it."""
        power_w = node.exposure_w(now_s)
        self.total_w += power_w - self._exposure_w.get(node.name, 0.0)
        self._exposure_w[node.name] = power_w
        if node.outstanding and node.name not in self._waiting:
            self._waiting.add(node.name)
            heapq.heappush(self._ends, (node.outstanding[-1][2], node.name))
        return power_w

    def free_w(self, node: GovernedNode) -> float:
        """Return what this node may draw while all others draw the most they may."""
        return self.limit_w - (self.total_w - self._exposure_w[node.name])

    def exposure_w(self, name: str) -> float:
        """Return the most that a node may draw."""
        return self._exposure_w[name]

    def settle(self, node: GovernedNode, now_s: float) -> None:
        """Give a node its guaranteed share, if others have given up that much by now."""
        if not node.joined and self.free_w(node) >= node.guaranteed_w:
            node.joined = True
            self.update(node, now_s)

    def grant(self, node: GovernedNode, cap_w: float, now_s: float, end_s: float) -> float:
        """Allow a node as much of `cap_w` as is free, at least its guaranteed share, and return the watts."""
        share_w = node.guaranteed_w if node.joined else 0.0
        cap_w = max(min(round_down(cap_w), self.free_w(node)), share_w) if node.joined else 0.0
        node.seq += 1
        node.outstanding.append((node.seq, cap_w, end_s))
        self.update(node, now_s)
        return cap_w

    def expire(self, now_s: float) -> None:
        """Forget grants that have ended, also those of nodes that are silent."""
        while self._ends and self._ends[0][0] <= now_s:
            name = heapq.heappop(self._ends)[1]
            self._waiting.discard(name)
            if name in self.nodes:
                self.update(self.nodes[name], now_s)
