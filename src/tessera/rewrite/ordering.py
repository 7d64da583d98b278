"""Tasks in another order: the peak of power over a window made lower, dependencies kept, memory within a bound.

`peak_w` is the highest mean over a window (a sensor's 20 ms, a breaker's second) of iterations that follow each other.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import ArgumentError, RewriteError
from ..estimate.iteration import WINDOW_S, highest_mean_w
from ..graph.rewrites import Rewrite

# How far ahead of the program's own order an operator may be taken, in operators, and the level of power that is aimed
# at, from the mean (0) to the peak of the program's own order (1). All are tried; the best one that fits is kept.
REACHES = (4, 16, 64, 1 << 30)
LEVELS = (0.0, 0.3, 0.6, 0.85)


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work: joules, seconds, and the tasks that must have run before."""

    energy_j: float
    seconds: float
    after: frozenset[int]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that is there from the first of its users to the last; `stays` where it outlives them."""

    nbytes: int
    users: frozenset[int]
    stays: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An order of tasks, and what it does: peaks of power (mean over the window) and of memory, before and after.

    `free` is how many tasks had a choice of place at all; `moved` how many stand elsewhere.
    """

    order: tuple[int, ...]
    window_s: float
    peak_w_before: float
    peak_w_after: float
    peak_bytes_before: int
    peak_bytes_after: int
    free: int
    moved: int
    why: str

    def __str__(self) -> str:
        peaks = f"peak {self.peak_w_before:.0f} W before, {self.peak_w_after:.0f} W after"
        moved = f"{self.moved} of {len(self.order)} operators moved"
        return f"{peaks} (mean over {1e3 * self.window_s:.3g} ms); {moved}: {self.why}"

    @property
    def rewrites(self) -> list[Rewrite]:
        """One rewrite, or none where the order is the program's own."""
        if not self.moved:
            return []
        return [
            Rewrite(
                rule="reorder",
                before=f"{self.peak_w_before:.0f} W over {1e3 * self.window_s:.3g} ms",
                after=f"{self.peak_w_after:.0f} W",
                by="tessera",
                times=self.moved,
                saved_bytes=float(self.peak_bytes_before - self.peak_bytes_after),
                why=f"{self.why}; joules and seconds are taken to stay as they are",
            )
        ]


def peak_w(tasks: Sequence[Task], order: Sequence[int], window_s: float) -> float:
    """The highest mean power over any window of an iteration that repeats."""
    own = [tasks[i] for i in order]
    return highest_mean_w([t.seconds for t in own], [t.energy_j for t in own], window_s) or 0.0


def peak_bytes(buffers: Sequence[Buffer], order: Sequence[int]) -> int:
    """The most that is there at once."""
    place = {task: at for at, task in enumerate(order)}
    change = [0] * (len(order) + 1)
    for b in buffers:
        if b.users:
            places = [place[i] for i in b.users]
            change[min(places)] += b.nbytes
            if not b.stays:
                change[max(places) + 1] -= b.nbytes
    return max(itertools.accumulate(change), default=0)


def check(tasks: Sequence[Task], order: Sequence[int]) -> None:
    """An order runs every task once, and none before what it needs; anything else is an error of ours."""
    place = {task: at for at, task in enumerate(order)}
    if len(place) != len(order) or set(place) != set(range(len(tasks))):
        raise RewriteError("an order must hold every task once", why="the reordering has a fault: please report it")
    for i, task in enumerate(tasks):
        early = next((j for j in task.after if place[j] > place[i]), None)
        if early is not None:
            raise RewriteError(
                f"task {i} would run before task {early}, which it needs", why="the reordering has a fault"
            )


def best(
    tasks: Sequence[Task], buffers: Sequence[Buffer], *, window_s: float = WINDOW_S, memory_bytes: float | None = None
) -> Order:
    """The order of the lowest peak of those tried that keeps to the memory (default: what the program's own needs)."""
    if not window_s > 0:
        raise ArgumentError(f"window_s={window_s!r}", fix="a positive number of seconds")
    own = list(range(len(tasks)))
    before_w, before_bytes = peak_w(tasks, own, window_s), peak_bytes(buffers, own)
    bound = before_bytes if memory_bytes is None else memory_bytes
    free = freedom(tasks)
    found, found_w, found_bytes = own, before_w, before_bytes
    whole_s = sum(t.seconds for t in tasks)
    mean_w = sum(t.energy_j for t in tasks) / whole_s if whole_s > 0 else 0.0
    for reach, level in itertools.product(REACHES, LEVELS) if free and window_s < whole_s else ():
        tried = _greedy(tasks, buffers, window_s, bound, reach, mean_w + level * (before_w - mean_w))
        watts, nbytes = peak_w(tasks, tried, window_s), peak_bytes(buffers, tried)
        if watts < found_w * (1 - 1e-9) and nbytes <= bound:
            found, found_w, found_bytes = tried, watts, nbytes
    check(tasks, found)
    moved = sum(at != i for at, i in enumerate(found))
    return Order(
        order=tuple(found), window_s=window_s, peak_w_before=before_w, peak_w_after=found_w,
        peak_bytes_before=before_bytes, peak_bytes_after=found_bytes, free=free, moved=moved,
        why=_why(free, moved, window_s, whole_s),
    )  # fmt: skip


def _why(free: int, moved: int, window_s: float, whole_s: float) -> str:
    if moved:
        return "memory-bound work between compute-bound work"
    if window_s >= whole_s:
        return f"an iteration of {1e3 * whole_s:.3g} ms fits the window: its order cannot be seen"
    return "every operator needs the one before it: a chain has one order" if not free else "no better order was found"


def freedom(tasks: Sequence[Task]) -> int:
    """Tasks that take time and could stand before or after another such task: neither needs the other in any way."""
    reach: list[int] = []  # a bit for every task needed, directly or not
    for task in tasks:
        bits = 0
        for j in task.after:
            bits |= reach[j] | (1 << j)
        reach.append(bits)
    timed = sum(1 << i for i, t in enumerate(tasks) if t.seconds > 0)
    needed_by = [0] * len(tasks)
    for i, bits in enumerate(reach):
        if tasks[i].seconds > 0:
            for j in _bits(bits & timed):
                needed_by[j] += 1
    total = timed.bit_count()
    return sum((reach[i] & timed).bit_count() + needed_by[i] + 1 < total for i, t in enumerate(tasks) if t.seconds > 0)


def _bits(value: int) -> Iterable[int]:
    while value:
        low = value & -value
        yield low.bit_length() - 1
        value ^= low


def _greedy(
    tasks: Sequence[Task], buffers: Sequence[Buffer], window_s: float, bound: float, reach: int, level_w: float
) -> list[int]:
    """At every place the ready task that brings the mean over the last window nearest to a level of power."""
    needed = [len(t.after) for t in tasks]
    needs: list[list[int]] = [[] for _ in tasks]
    for i, task in enumerate(tasks):
        for j in task.after:
            needs[j].append(i)
    ready = [i for i, n in enumerate(needed) if n == 0]
    memory, recent = _Live(buffers, len(tasks)), _Recent(window_s)
    order: list[int] = []
    done = [False] * len(tasks)
    oldest = 0
    while ready:
        while done[oldest]:
            oldest += 1
        near = ready[: bisect_left(ready, oldest + reach)] or ready[:1]
        fits = [i for i in near if memory.after(i) <= bound] or near[:1]
        i = min(fits, key=lambda i: (abs(recent.mean_after(tasks[i]) - level_w) if tasks[i].seconds > 0 else -1.0, i))
        ready.remove(i)
        order.append(i)
        done[i] = True
        memory.run(i)
        recent.run(tasks[i])
        for j in needs[i]:
            needed[j] -= 1
            if needed[j] == 0:
                insort(ready, j)
    return order


class _Recent:
    """Joules of the last window."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._times, self._joules = [0.0], [0.0]

    def run(self, task: Task) -> None:
        self._times.append(self._times[-1] + task.seconds)
        self._joules.append(self._joules[-1] + task.energy_j)

    def mean_after(self, task: Task) -> float:
        """Mean watts over the window that ends with the task, or over what there is."""
        if task.seconds >= self._window_s:
            return task.energy_j / task.seconds
        begin = self._times[-1] + task.seconds - self._window_s
        if begin <= 0:
            return (self._joules[-1] + task.energy_j) / (self._times[-1] + task.seconds)
        at = bisect_left(self._times, begin)
        span = self._times[at] - self._times[at - 1]
        part = (begin - self._times[at - 1]) / span if span > 0 else 0.0
        past = self._joules[at - 1] + part * (self._joules[at] - self._joules[at - 1])
        return (self._joules[-1] + task.energy_j - past) / self._window_s


class _Live:
    """Bytes there now, and what running a task would make of them."""

    def __init__(self, buffers: Sequence[Buffer], count: int) -> None:
        self._buffers = buffers
        self._of: list[list[int]] = [[] for _ in range(count)]
        self._left = [len(b.users) for b in buffers]
        self._now = 0
        for k, b in enumerate(buffers):
            for i in b.users:
                self._of[i].append(k)

    def after(self, i: int) -> int:
        """Bytes while the task runs."""
        return self._now + sum(self._buffers[k].nbytes for k in self._of[i] if self._untouched(k))

    def run(self, i: int) -> None:
        self._now = self.after(i)
        for k in self._of[i]:
            self._left[k] -= 1
            if self._left[k] == 0 and not self._buffers[k].stays:
                self._now -= self._buffers[k].nbytes

    def _untouched(self, k: int) -> bool:
        return self._left[k] == len(self._buffers[k].users)
