"""Buckets of launches, warps or cp.async copies of our own kernels: what a launch spends, and how fast they are spent.

A board that spends `rate` tokens a second draws ::

    idle_w + token_j x rate         so the bucket is refilled at    rate = (cap_w - idle_w) / token_j

`token_j` is what the sensor corrects, as `burst_w` is for a bucket of joules. The controller is the same one, in other
units: its duty is the rate as a share of the fastest that our kernels were seen to go by themselves (1 / `token_s`),
and its `burst_w` what the board would draw at that. Work that is not ours spends nothing: its joules are counted with
the tokens beside it.
"""

from __future__ import annotations

import math
from collections import deque

from .pace import Passed

# The fastest pace is taken from no less work than this: one launch between two looks says little.
ENOUGH_S = 0.005
# A pace that is not reached any more is forgotten within this time. Only the units change with it, not the rate.
FORGET_S = 10.0


def spent(kind: str, blocks: int, warps: int, copies: int) -> int:
    """The tokens of a launch, as op/hints.py tells of it."""
    if kind == "launches":
        return 1
    return blocks * (warps if kind == "warps" else copies)


class Tally:
    """Tokens by time, from the pace points' own counts and clock."""

    def __init__(self) -> None:
        self.token_s = 0.0  # device seconds of a token at the fastest pace; 0 before any was seen
        self._seen: Passed | None = None
        self._rates: deque[tuple[int, float]] = deque(maxlen=256)  # (until, tokens a second)
        self._recent = (0, 0.0, 0.0)  # tokens, seconds of work, seconds

    def note(self, passed: Passed, now_ns: int) -> float:
        """Take the counts; by how much the fastest pace is another than before (1.0: the same)."""
        was = self._seen
        if was is None or passed.ended_s < was.ended_s:
            self._seen = passed
            return 1.0
        tokens, span_s = passed.tokens - was.tokens, passed.ended_s - was.ended_s
        if tokens <= 0 or span_s <= 0:
            return 1.0
        self._seen = passed
        self._rates.append((now_ns, tokens / span_s))
        n, worked_s, past_s = self._recent
        self._recent = (n + tokens, worked_s + passed.worked_s - was.worked_s, past_s + span_s)
        return self._pace()

    def _pace(self) -> float:
        tokens, worked_s, past_s = self._recent
        if worked_s < ENOUGH_S:
            return 1.0
        self._recent = (0, 0.0, 0.0)
        # Streams that work at the same time each count their own: together they take no more than the time itself.
        found_s, before_s = min(worked_s, past_s) / tokens, self.token_s
        if before_s == 0.0 or found_s < before_s:
            self.token_s = found_s
        else:
            self.token_s += (found_s - before_s) * -math.expm1(-past_s / FORGET_S)
        return before_s / self.token_s if before_s else 1.0

    def duty_between(self, start_ns: int, end_ns: int) -> float | None:
        """The mean rate in a span, as a share of the fastest pace; None where nothing was counted yet."""
        if not self._rates or self.token_s == 0.0:
            return None
        total, until, rate = 0.0, end_ns, self._rates[-1][1]
        for time_ns, earlier in reversed(self._rates):
            if time_ns < until:
                begin = max(time_ns, start_ns)
                total += rate * (until - begin)
                until = begin
            rate = earlier
            if until <= start_ns:
                break
        total += rate * (until - start_ns)
        return total / (end_ns - start_ns) * self.token_s
