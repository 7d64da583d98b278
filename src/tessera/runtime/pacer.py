"""How work waits on a device: the interface that the control loop uses, and the waits of a CPU between its operators.

::

    device   ■■■■■■■■■■■■  wait  ■■■■■■■■■■■■  wait  ■■■
             ←  slice_s →   ratio x that

A GPU is paused from outside (gpu_pacer.py). A CPU has no queue: the thread that computes sleeps at points between its
operators (cpu_points.py), and each point decides by the newest `PaceCommand` whether a slice is full.

Work that spends tokens waits until the bucket, which regains one token every `token_ns`, is full again. The bucket
saves at most a few slices of idling. Work does not wait for a debt of less than a slice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from .controller import PaceCommand

# If a device had no wait for longer than this, it was idle or nothing had to wait, and the time beyond counts as no
# work; the sensor sees what was drawn. The time of a host thread is mostly its own work, so its limit is longer.
LIMIT_S = 0.05
HOST_LIMIT_S = 0.25
# The longest wait: a collective that waits for this work gives up after minutes.
LONGEST_S = 5.0
_LOOK_S = 0.005
# After this many commands without a wait (more than a second), calls on a CPU run without points between operators.
SLACK = 20


@dataclass(frozen=True, slots=True)
class PaceCounts:
    """Counts so far: points or pauses, how many of them took time, and how much time.

    `ended_s` is when the last point that spent tokens ended, by the device's own clock. `resting_ns` is since when all
    work has been waiting; None where some runs, or nobody can tell. Sums and differences leave both out.
    """

    points: int = 0
    waits: int = 0
    waited_s: float = 0.0
    worked_s: float = 0.0
    tokens: int = 0
    ended_s: float = 0.0
    resting_ns: int | None = None

    def __add__(self, other: PaceCounts) -> PaceCounts:
        return PaceCounts(
            self.points + other.points,
            self.waits + other.waits,
            self.waited_s + other.waited_s,
            self.worked_s + other.worked_s,
            self.tokens + other.tokens,
        )

    def __sub__(self, other: PaceCounts) -> PaceCounts:
        return self + PaceCounts(-other.points, -other.waits, -other.waited_s, -other.worked_s, -other.tokens)


class Pacer(Protocol):
    """Makes work wait on one device."""

    where: str

    def obey(self, command: PaceCommand) -> None:
        """Follow this command from now on, also for work that is already queued."""

    def pace_by_tokens(self, wanted: bool) -> None:
        """Let work wait for the tokens that it spends (`spend`), or for the time that it takes."""

    def spend(self, tokens: int, *, restart: bool = False) -> None:
        """Spend tokens here, and wait for them; `restart` when the device had nothing to do before."""

    def counts(self) -> PaceCounts:
        """Return the counts so far, without waiting for the device."""

    def count_queued(self) -> int:
        """Return the number of waits for tokens that are launched and have not run."""


class HostPacer:
    """Waits on the thread that computes, for a CPU, which runs an operator when it is launched."""

    where = "on the host between operators"

    def __init__(
        self, clock_ns: Callable[[], int] = time.monotonic_ns, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock_ns, self._sleep = clock_ns, sleep
        self._command = PaceCommand()
        self._threads = threading.local()
        self._lock = threading.Lock()
        self._counts = PaceCounts()
        # threads that had a point; even one that has ended may count as computing, because nobody can tell
        self._seen: set[int] = set()
        self._resting: dict[int, int] = {}  # threads that wait, and since when
        self._full_s = 0.0  # when the bucket of tokens is, or was, full
        self._early = 0  # points before the end of a slice
        self._free = 0  # commands in a row without a wait
        self.left_ns = 0  # when a call last ended

    def obey(self, command: PaceCommand) -> None:
        self._command = command
        self._free = 0 if command.ratio > 0 else self._free + 1

    @property
    def slack(self) -> bool:
        """Return whether nothing has had to wait for a while: then one point after each call is enough."""
        return self._free >= SLACK

    def pace_by_tokens(self, wanted: bool) -> None:
        pass  # a point spends tokens or time, whichever was chosen

    def spend(self, tokens: int, *, restart: bool = False) -> None:
        self.point(restart=restart, tokens=tokens)

    def count_queued(self) -> int:
        return 0

    def counts(self) -> PaceCounts:
        with self._lock:
            counts = replace(self._counts, points=self._counts.points + self._early)
            if not self._seen or not self._seen <= self._resting.keys():
                return counts
            return replace(counts, resting_ns=max(self._resting.values()))

    def point(self, *, restart: bool = False, tokens: int | None = None) -> None:
        """Wait here if a slice of work is full, or for tokens; `restart` when the thread did something else before."""
        began = self._clock_ns()
        resume: int = getattr(self._threads, "resume_ns", began)
        if tokens is None and not restart and 0 < began - resume < self._command.slice_s * 1e9:
            self._early += 1  # this is the usual case between operators, so nothing else is done
            return
        busy_s = 0.0 if restart else min(max((began - resume) * 1e-9, 0.0), HOST_LIMIT_S)
        waited_s = 0.0
        full = tokens is not None or busy_s >= self._command.slice_s
        if tokens is not None:
            waited_s = self._spend(began, busy_s, tokens)
        elif full:
            waited_s = self._wait(began, lambda: busy_s * self._command.ratio)
        if full or restart or resume == began:
            self._threads.resume_ns = self._clock_ns()
        with self._lock:
            self._seen.add(threading.get_ident())
            ended_s = self._counts.ended_s if tokens is None else self._clock_ns() * 1e-9
            one = PaceCounts(1, int(waited_s > 0), waited_s, busy_s if full else 0.0, tokens or 0)
            self._counts = replace(self._counts + one, ended_s=ended_s)

    def _wait(self, began_ns: int, total_s: Callable[[], float]) -> float:
        """Sleep in short pieces, so that a new command (or the end) takes effect at once; return the seconds slept."""
        me = threading.get_ident()
        with self._lock:
            self._resting[me] = began_ns
        try:
            while True:
                slept_s = (self._clock_ns() - began_ns) * 1e-9
                left_s = min(total_s(), LONGEST_S) - slept_s
                if left_s <= 0:
                    return max(slept_s, 0.0) if self._command.ratio else 0.0
                self._sleep(min(left_s, _LOOK_S))
        finally:
            with self._lock:
                self._resting.pop(me, None)

    def _spend(self, began_ns: int, busy_s: float, tokens: int) -> float:
        """Wait for tokens as the kernel does (wait_kernel.py); return the seconds slept."""

        def cost_s() -> float:
            return min(self._command.cost_s(tokens, busy_s), LONGEST_S)

        cost, began_s, slept_s = cost_s(), began_ns * 1e-9, 0.0
        with self._lock:
            before_s = max(self._full_s, began_s - busy_s - self._command.saved_s)
            self._full_s = before_s + cost
        if cost > 0 and before_s + cost - began_s >= self._command.slice_s:
            slept_s = self._wait(began_ns, lambda: before_s + now_s - began_s if (now_s := cost_s()) else 0.0)
        newest, now = cost_s(), self._clock_ns() * 1e-9
        with self._lock:
            # without a ratio the schedule has ended, and nothing is owed
            self._full_s = min(self._full_s + newest - cost, now + LONGEST_S if self._command.ratio else now)
        return slept_s
