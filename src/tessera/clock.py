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
"""Nanoseconds of the wall clock (Unix epoch): the clock of everything recorded. A monotonic time is a plain int."""
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
    """What all processes that read one clock share, containers included: the boot of the kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def now_ns() -> int:
    """Nanoseconds of the one monotonic clock all times in Tessera are kept in."""
    return time.monotonic_ns()


def read_boot_clock() -> float:
    """Seconds since this machine booted, also those it slept (CLOCK_BOOTTIME). Nobody can set it.

    Leases are counted in it: a node that sleeps through the end of its lease knows.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class EpochMap:
    """Maps wall-clock (epoch) nanoseconds to monotonic nanoseconds, across steps of the wall clock.

    Call `observe` before mapping stamps that were taken since the last call. It returns True when the wall clock was
    stepped since then: a caller that asks a driver for "samples since T" must start again from 0.
    """

    def __init__(self, clock: Clock = REAL) -> None:
        self._monotonic_ns = clock.monotonic_ns
        self._epoch_ns = clock.epoch_ns
        self.steps = 0
        self._previous_offset_ns: int | None = None  # before the last step, for stamps that predate it
        self._observed_at_ns = 0
        self.offset_ns = self._measure()
        self._step_after_ns = 0  # the last step came after this observation ...
        self._step_until_ns = 0  # ... and up to this one

    def _measure(self) -> int:
        """Epoch minus monotonic, from the tightest of three sandwiched readings."""
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
        """Measure the offset anew; True if the wall clock was stepped since the last call."""
        before_ns, was = self._observed_at_ns, self.offset_ns
        self.offset_ns = self._measure()
        if abs(self.offset_ns - was) <= STEP_NS:
            return False
        self.steps += 1
        self._previous_offset_ns, self._step_after_ns, self._step_until_ns = was, before_ns, self._observed_at_ns
        return True

    def to_monotonic(self, epoch_ns: int) -> int:
        """Monotonic time of a wall-clock stamp taken between the last two observations (or just before).

        After a step a stamp is ambiguous: it may be older than the step. Of the two readings the one that does
        not lie in the future, and is nearest to now, is taken.
        """
        current = epoch_ns - self.offset_ns
        if self._previous_offset_ns is None:
            return current
        earlier = epoch_ns - self._previous_offset_ns
        newest = self._observed_at_ns + STEP_NS
        # A stamp read with the new offset cannot be from before the step, one read with the old not from after it.
        if current <= newest and current >= self._step_after_ns - STEP_NS:
            return current
        if earlier <= self._step_until_ns + STEP_NS:
            return earlier
        return current

    def to_epoch(self, monotonic_ns: int) -> EpochNs:
        """Wall-clock nanoseconds of a monotonic time, by the present offset."""
        return EpochNs(monotonic_ns + self.offset_ns)
