"""Decides which steps are traced: those of `trace_schedule` (as in torch.profiler), or the first few steady ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import ArgumentError

Action = Literal["wait", "warmup", "active", "last"]
"""What happens in a step; "last" is the active step that ends a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSchedule:
    """Cycles of steps. `repeat` 0 never ends; `skip_first` steps come before the first cycle."""

    wait: int = 0
    warmup: int = 0
    active: int
    repeat: int = 0
    skip_first: int = 0

    def __post_init__(self) -> None:
        for name in ("wait", "warmup", "repeat", "skip_first"):
            if getattr(self, name) < 0:
                raise ArgumentError(f"{name}={getattr(self, name)!r} is not a number of steps", fix="0 or more")
        if self.active < 1:
            raise ArgumentError(
                f"active={self.active!r} would trace nothing",
                fix="trace at least one: trace_schedule(wait=1, active=3)",
            )

    def action(self, step: int) -> Action:
        """Return what happens in a step (the first step is 0)."""
        step -= self.skip_first
        if step < 0:
            return "wait"
        cycle, at = divmod(step, self.wait + self.warmup + self.active)
        if (self.repeat and cycle >= self.repeat) or at < self.wait:
            return "wait"
        if at < self.wait + self.warmup:
            return "warmup"
        return "last" if at == self.wait + self.warmup + self.active - 1 else "active"

    @property
    def first(self) -> int:
        return self.skip_first + self.wait + self.warmup

    def describe_missed(self, steps: int) -> str | None:
        """Return a note for a program that had only `steps` steps, if steps to trace are missing; else None."""
        first, last = self.first, self.first + self.active - 1
        wanted = _steps(first, last)
        if 0 < first >= steps:
            came = (
                f"there were {steps} (0 to {steps - 1})"
                if steps > 1
                else "there was one"
                if steps
                else "there were none"
            )
            return f"{wanted} never came: {came}"
        if self.repeat == 1 and first < steps <= last:
            return f"of {wanted} only {_steps(first, steps - 1)} came"
        return None

    def over(self, step: int) -> bool:
        """Return whether nothing is traced from a step on."""
        cycle = self.wait + self.warmup + self.active
        return bool(self.repeat) and step - self.skip_first >= self.repeat * cycle


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def trace_schedule(
    *, wait: int = 0, warmup: int = 0, active: int, repeat: int = 0, skip_first: int = 0
) -> TracingSchedule:
    """Say which steps of a session to trace, counted by `sess.step()`. Power is recorded in all steps.

    >>> profile.session(schedule=profile.trace_schedule(wait=98, warmup=1, active=1))     # one step in a hundred
    """
    return TracingSchedule(wait=wait, warmup=warmup, active=active, repeat=repeat, skip_first=skip_first)


def between(first: int, end: int) -> TracingSchedule:
    """Return a schedule of the steps `first` to `end - 1`, once, with a warm-up step before them if there is one."""
    if not 0 <= first < end:
        raise ArgumentError(f"steps {first}:{end} are none", fix="first:end with first < end, such as 10:20")
    warmup = 1 if first else 0
    return TracingSchedule(skip_first=first - warmup, warmup=warmup, active=end - first, repeat=1)


SAME = 1.25
"""Two consecutive steps are steady if the longer one takes at most this many times as long as the other."""
LATEST = 10
"""After this many steps operators are traced, steady or not: if all steps differ, there is no better moment."""
SETTLED_NS = 500_000_000
"""How long to wait in a program without steps after its model first runs."""
LATE_NS = 60_000_000_000
"""The same if the program has an optimizer, whose first step may take long."""
LONGEST_NS, SHORTEST_NS, ENOUGH = 1_000_000_000, 300_000_000, 20_000
"""How long to trace a program without steps: until it has launched `ENOUGH` kernels, within these two times."""


class SteadySteps:
    """Finds the moment to trace the operators of a program: `count` steps, once two in a row took about as long.

    A program without visible steps is traced for some time, soon after its model began to run.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.steps_expected = False
        """Whether the program has an optimizer: its steps will come, but the first may take long."""
        self._ended_ns: list[int] = []
        self._began_ns: int | None = None

    def work_begins(self, now_ns: int) -> None:
        """Note that the model runs."""
        if self._began_ns is None:
            self._began_ns = now_ns

    def step_ended(self, now_ns: int) -> bool:
        """Note that a step has ended; return whether the next steps are to be traced."""
        self._ended_ns = [*self._ended_ns, now_ns][-LATEST:]
        if len(self._ended_ns) >= LATEST:
            return True
        if len(self._ended_ns) < 3:
            return False
        first, second, third = self._ended_ns[-3:]
        return max(second - first, third - second) <= SAME * min(second - first, third - second)

    def is_due(self, now_ns: int) -> bool:
        """Return whether a program without steps is to be traced now."""
        wait_ns = LATE_NS if self.steps_expected else SETTLED_NS
        return self._began_ns is not None and now_ns >= self._began_ns + wait_ns

    def find_length_ns(self, now_ns: int, kernels: int) -> int:
        """Return how long to trace a program without steps, by the number of kernels it has launched so far."""
        if self._began_ns is None or not kernels:
            return LONGEST_NS
        wanted_ns = ENOUGH * (now_ns - self._began_ns) // kernels
        return min(max(wanted_ns, SHORTEST_NS), LONGEST_NS)
