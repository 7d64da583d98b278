"""The clock of all measurements: integer nanoseconds of CLOCK_MONOTONIC. Other clocks are mapped to it only here.

Drivers stamp their samples with the wall clock (epoch). NTP or a person may step the wall clock while we measure; the
monotonic clock is never stepped. `EpochMap` keeps the offset between the two, detects a step, and places samples
stamped before and after it on the one monotonic line.

    epoch      ───────────┐  step (+1 h)
                          └───────────────►
    monotonic  ───────────────────────────►     (what traces are kept in)
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NewType

EpochNs = NewType("EpochNs", int)
"""Nanoseconds of the wall clock (Unix epoch), used for everything recorded. A monotonic time is a plain int."""
NS_PER_S = 1_000_000_000

# NTP slews at most 500 ppm (man 2 adjtimex), i.e. 0.5 ms between our reads a second apart. Anything above 20 ms
# between two reads is therefore a step, not a slew, and well above the ~1 ms a descheduled read can fake.
STEP_NS = 20_000_000


@dataclass(frozen=True, slots=True)
class Clock:
    """The two clocks of a machine; tests use simulated ones."""

    monotonic_ns: Callable[[], int] = time.monotonic_ns
    epoch_ns: Callable[[], int] = time.time_ns


REAL = Clock()


def boot_id() -> str:
    """Return an identifier of the kernel's boot: all processes with it read one clock, containers included."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def now_ns() -> int:
    """Return nanoseconds of the monotonic clock that Tessera uses for all times it measures."""
    return time.monotonic_ns()


def read_boot_clock() -> float:
    """Return the seconds since this machine booted, including sleep (CLOCK_BOOTTIME). Nobody can set this clock.

    Leases are counted by it: so a node that sleeps through the end of its lease notices.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class EpochMap:
    """Maps wall-clock (epoch) nanoseconds to monotonic nanoseconds, across steps of the wall clock.

    Call `observe` before mapping stamps that were taken since the last call. It returns True if the wall clock was
    stepped since then: a caller that asks a driver for "samples since T" must then start again from 0.
    """

    def __init__(self, clock: Clock = REAL) -> None:
        self._monotonic_ns = clock.monotonic_ns
        self._epoch_ns = clock.epoch_ns
        self.steps = 0
        self._previous_offset_ns: int | None = None  # offset before the last step, for stamps older than it
        self._observed_at_ns = 0
        self.offset_ns = self._measure()
        self._step_after_ns = 0  # the last step came after this observation ...
        self._step_until_ns = 0  # ... and up to this one

    def _measure(self) -> int:
        """Return epoch minus monotonic time: the tightest of three readings between two of the monotonic clock."""
        best: tuple[int, int] | None = None
        for _ in range(3):
            before = self._monotonic_ns()
            epoch = self._epoch_ns()
            after = self._monotonic_ns()
            if best is None or after - before < best[0]:
                best = (after - before, epoch - (before + after) // 2)
        assert best is not None
        self._observed_at_ns = self._monotonic_ns()
        return best[1]

    def observe(self) -> bool:
        """Measure the offset again; return True if the wall clock was stepped since the last call."""
        before_ns, was = self._observed_at_ns, self.offset_ns
        self.offset_ns = self._measure()
        if abs(self.offset_ns - was) <= STEP_NS:
            return False
        self.steps += 1
        self._previous_offset_ns, self._step_after_ns, self._step_until_ns = was, before_ns, self._observed_at_ns
        return True

    def to_monotonic(self, epoch_ns: int) -> int:
        """Return the monotonic time of a wall-clock stamp taken between the last two observations, or just before.

        After a step a stamp is ambiguous, since it may be older than the step. Take the reading that does not lie in
        the future and is nearest to now.
        """
        current = epoch_ns - self.offset_ns
        if self._previous_offset_ns is None:
            return current
        earlier = epoch_ns - self._previous_offset_ns
        newest = self._observed_at_ns + STEP_NS
        # With the new offset, a stamp cannot lie before the step; with the old offset, it cannot lie after it.
        if current <= newest and current >= self._step_after_ns - STEP_NS:
            return current
        if earlier <= self._step_until_ns + STEP_NS:
            return earlier
        return current

    def to_epoch(self, monotonic_ns: int) -> EpochNs:
        """Return the wall-clock nanoseconds of a monotonic time, by the present offset."""
        return EpochNs(monotonic_ns + self.offset_ns)
