"""The last ticks of an energy counter, each placed on the running sums of the samples: see `tessera.joules`."""

from __future__ import annotations

from collections import deque

from ..joules import Anchor
from .series import Series

KEPT = 4096


class Anchors:
    """The last anchors of one domain, bounded."""

    def __init__(self, series: Series) -> None:
        self._series = series
        self._waiting: deque[tuple[int, float]] = deque(maxlen=64)
        self._kept: deque[Anchor] = deque(maxlen=KEPT)
        self._epoch = 0
        self.resets = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, time_ns: int, joules: float) -> None:
        """Note a tick; it becomes an anchor when the samples have caught up with it."""
        self._waiting.append((time_ns, joules))
        self.catch_up()

    def restart(self) -> None:
        """The counter may have been reset (a driver restart): what comes cannot be subtracted from what was."""
        self._epoch += 1
        self._waiting.clear()

    def catch_up(self, force: bool = False) -> None:
        """Place the ticks that the samples have reached by now; all of them when no samples are to come (`force`)."""
        while self._waiting and (force or self._series.covers(self._waiting[0][0])):
            time_ns, joules = self._waiting.popleft()
            if self._kept and self._epoch == self._kept[-1].epoch and joules < self._kept[-1].joules:
                self._epoch += 1
                self.resets += 1
            if not self._kept or time_ns > self._kept[-1].time_ns:
                self._kept.append(Anchor(time_ns, joules, self._series.mark(time_ns), self._epoch))

    def first_after(self, time_ns: int) -> Anchor | None:
        """The first anchor at or after a time."""
        found = None
        for anchor in reversed(self._kept):
            if anchor.time_ns < time_ns:
                break
            found = anchor
        return found

    def last_before(self, time_ns: int) -> Anchor | None:
        """The last anchor at or before a time."""
        for anchor in reversed(self._kept):
            if anchor.time_ns <= time_ns:
                return anchor
        return None
