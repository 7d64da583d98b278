"""Tokens of Tessera's own kernels: the kernels announce their launches, and every few launches a wait follows.

Announcements (op/hints.py) come from anywhere, also from compiled code and autograd's threads. Other work is not seen
and spends no tokens.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from ..op import hints
from .controller import PaceCommand
from .pacer import PaceCounts, Pacer

# Waits per slice: enough that a slice ends near its length, and few enough that launching them costs little.
PER_SLICE = 3
# While nothing has to wait, a wait kernel this often (device seconds) keeps the counts up to date.
SLACK_S = 0.005
MOST = 1024
# The distance of waits is chosen from the last work of about this length (device seconds): a training step's parts
# differ.
RECENT_S = 0.25
# After longer than this without a call, and with nothing queued, the device is taken to have been idle.
AWAY_NS = 2_000_000


def count_tokens(kind: str, blocks: int, warps: int, copies: int) -> int:
    """Return the tokens of one launch, as op/hints.py announces it."""
    if kind == "launches":
        return 1
    return blocks * (warps if kind == "warps" else copies)


class TokenSpender:
    """Adds up the tokens of launches on one device.

    How many launches come before a wait depends on the time they take.
    """

    def __init__(self, pacer: Pacer) -> None:
        self.pacer = pacer
        self.every = 1
        self._left_ns = 0
        self._put: deque[int] = deque(maxlen=4096)  # the launches before each wait that has yet to run
        self._seen = PaceCounts()
        self._recent = (0.0, 0.0)  # launches, and the seconds they worked
        self._lock = threading.Lock()
        self._tokens, self._left = 0, 1  # tokens since the last wait, and launches until the next wait

    def spend(self, tokens: int) -> None:
        """Count a launch of one of our kernels, and wait here if it is time to."""
        with self._lock:
            self._tokens += tokens
            self._left -= 1
            if self._left > 0:
                return
            tokens, self._tokens, self._left = self._tokens, 0, self.every
            self._put.append(self.every)
        self.pacer.spend(tokens)

    def enter_call(self) -> None:
        """Note that a call begins: time in which the device had nothing to do is not work."""
        if self._left_ns == 0 or (time.monotonic_ns() - self._left_ns > AWAY_NS and self.pacer.count_queued() == 0):
            self._put.append(0)
            self.pacer.spend(0, restart=True)

    def leave_call(self) -> None:
        """Note that a call has ended."""
        self._left_ns = time.monotonic_ns()

    def adapt(self, counts: PaceCounts, command: PaceCommand) -> None:
        """Set how often waits come, from the work since the last time."""
        new, self._seen = counts - self._seen, counts
        ours = new.points <= len(self._put)  # otherwise a replayed graph made some of them
        launches = sum(self._put.popleft() for _ in range(min(max(new.points, 0), len(self._put))))
        if not ours or new.worked_s < 0:
            return
        fade = 0.5 ** (new.worked_s / RECENT_S)
        self._recent = (fade * self._recent[0] + launches, fade * self._recent[1] + new.worked_s)
        recent, worked_s = self._recent
        if recent > 0 and worked_s > 0:
            apart_s = command.slice_s / PER_SLICE if command.ratio > 0 else SLACK_S
            self.every = min(max(round(apart_s * recent / worked_s), 1), MOST)


class OwnLaunches:
    """Hears of launches of Tessera's own kernels on every thread, while a schedule counts them."""

    def __init__(self, find_spender: Callable[[], TokenSpender]) -> None:
        self._find_spender = find_spender
        self.tokens = "joules"

    def enable(self, wanted: bool) -> None:
        """Start or stop listening."""
        hints.listener = self._on_launch if wanted else None

    def _on_launch(self, blocks: int, warps: int, copies: int) -> None:
        if self.tokens != "joules" and (tokens := count_tokens(self.tokens, blocks, warps, copies)):
            self._find_spender().spend(tokens)
