"""Tell whether another order of the same work has a lower peak of power: cool operators between hot ones.

An order keeps every dependency (a value before its use, a write after the reads of what it overwrites, random numbers
in turn, nothing across a wait of the host) and stays within the memory. Most programs leave little freedom: a chain has
one order, and then the result is the program's own order, with the reason.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..device import Device
from ..errors import ArgumentError
from ..estimate.iteration import WINDOW_S, highest_mean_w
from ..graph.ir import Graph
from ..graph.rewrites import Rewrite

# How far ahead of the program's own order an operator may be taken, in operators, and the power that is aimed at, from
# the mean (0) to the peak of the program's own order (1). All are tried; the best one that fits is kept.
REACHES = (4, 16, 64, 1 << 30)
LEVELS = (0.0, 0.3, 0.6, 0.85)


@dataclass(frozen=True, slots=True)
class ScheduledTask:
    """A piece of work: joules, seconds, and the tasks that must have run before."""

    energy_j: float
    time_s: float
    after: frozenset[int]


@dataclass(frozen=True, slots=True)
class TaskBuffer:
    """Memory that exists from the first of its users to the last; `stays` where it outlives them."""

    nbytes: int
    users: frozenset[int]
    stays: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReorderPlan:
    """An order of operators, and what it does: peaks of power (mean over the window) and of memory, before and after.

    `free` is how many operators had a choice of place at all; `moved` how many stand elsewhere.
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
                why=f"{self.why}; joules and seconds are assumed to stay the same",
            )
        ]


def plan(
    graph: Graph, *, on: str | Device = "h200", window_s: float = WINDOW_S, memory_bytes: float | None = None
) -> ReorderPlan:
    """Find an order of a captured program's operators (indices into `graph.ops`), by predicted joules and seconds."""
    from ..estimate.predict import predict

    report = predict(graph, on=on, check_memory=False)
    spent = {
        op.index: (d.compute_energy_j + d.memory_energy_j + d.static_energy_j, d.latency_s)
        for op, d in zip(graph.kernels, report.descriptors, strict=True)
    }
    needs = find_dependencies(graph)
    tasks = [ScheduledTask(*spent.get(op.index, (0.0, 0.0)), frozenset(needs[op.index])) for op in graph.ops]
    return find_order(tasks, _list_buffers(graph), window_s=window_s, memory_bytes=memory_bytes)


# -- what must come before what -------------------------------------------------------------------------------------


def find_dependencies(graph: Graph) -> list[set[int]]:
    """Return the operators each one must follow: by what it reads and overwrites, by random numbers, across waits."""
    needs: list[set[int]] = [set() for _ in graph.ops]
    writer: dict[int, int] = {}
    views: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
    readers: dict[int, list[int]] = {}
    random = wait = None
    for op in graph.ops:
        own = needs[op.index]
        if op.sync:
            own.update(range(wait or 0, op.index))
            wait = op.index
        elif wait is not None:
            own.add(wait)
        if op.kind == "random" or op.params.get("dropout"):
            own.update(() if random is None else (random,))
            random = op.index
        for t in op.inputs:
            makers = (writer.get(t.storage), views.get((t.storage, t.shape, t.stride)))
            own.update(at for at in makers if at is not None)
        for t in op.outputs if op.kernels else ():
            own.update(readers.pop(t.storage, ()))
            own.update(() if t.storage not in writer else (writer[t.storage],))
        for t in op.inputs:
            readers.setdefault(t.storage, []).append(op.index)
        for t in op.outputs:
            if op.kernels:
                writer[t.storage] = op.index
            views[t.storage, t.shape, t.stride] = op.index
        own.discard(op.index)
    return needs


def _list_buffers(graph: Graph) -> list[TaskBuffer]:
    """Return what the iteration allocates. A value Python held waits for the operator after which it was let go."""
    users: defaultdict[int, set[int]] = defaultdict(set)
    for op in graph.ops:
        for t in (*op.inputs, *op.outputs):
            users[t.storage].add(op.index)
    buffers = []
    for s in graph.storages.values():
        if s.birth < 0 or s.id not in users:
            continue
        held = users[s.id] | ({s.death - 1} if s.death else set())
        buffers.append(TaskBuffer(s.nbytes, frozenset(i for i in held if i < len(graph.ops)), s.death is None))
    return buffers


# -- the search -----------------------------------------------------------------------------------------------------


def find_order(
    tasks: Sequence[ScheduledTask],
    buffers: Sequence[TaskBuffer],
    *,
    window_s: float = WINDOW_S,
    memory_bytes: float | None = None,
) -> ReorderPlan:
    """Return the order tried with the lowest peak within the memory (default: what the program's own order needs)."""
    if not window_s > 0:
        raise ArgumentError(f"window_s={window_s!r}", fix="a positive number of seconds")
    own = list(range(len(tasks)))
    before_w, before_bytes = compute_peak_w(tasks, own, window_s), compute_peak_bytes(buffers, own)
    bound = before_bytes if memory_bytes is None else memory_bytes
    free = _count_free(tasks)
    best, best_w, best_bytes = own, before_w, before_bytes
    whole_s = sum(t.time_s for t in tasks)
    mean_w = sum(t.energy_j for t in tasks) / whole_s if whole_s > 0 else 0.0
    for reach, level in itertools.product(REACHES, LEVELS) if free and window_s < whole_s else ():
        tried = _order_greedily(tasks, buffers, window_s, bound, reach, mean_w + level * (before_w - mean_w))
        watts, nbytes = compute_peak_w(tasks, tried, window_s), compute_peak_bytes(buffers, tried)
        if watts < best_w * (1 - 1e-9) and nbytes <= bound:
            best, best_w, best_bytes = tried, watts, nbytes
    moved = sum(at != i for at, i in enumerate(best))
    return ReorderPlan(
        order=tuple(best),
        window_s=window_s,
        peak_w_before=before_w,
        peak_w_after=best_w,
        peak_bytes_before=before_bytes,
        peak_bytes_after=best_bytes,
        free=free,
        moved=moved,
        why=_explain(free, moved, window_s, whole_s),
    )


def _explain(free: int, moved: int, window_s: float, whole_s: float) -> str:
    if moved:
        return "memory-bound work between compute-bound work"
    if window_s >= whole_s:
        return f"an iteration of {1e3 * whole_s:.3g} ms fits the window: its order makes no difference"
    return "every operator needs the one before it: a chain has one order" if not free else "no better order was found"


def compute_peak_w(tasks: Sequence[ScheduledTask], order: Sequence[int], window_s: float) -> float:
    """Return the highest mean power over any window of an iteration that repeats."""
    ordered = [tasks[i] for i in order]
    return highest_mean_w([t.time_s for t in ordered], [t.energy_j for t in ordered], window_s) or 0.0


def compute_peak_bytes(buffers: Sequence[TaskBuffer], order: Sequence[int]) -> int:
    """Return the most that is allocated at once."""
    place = {task: at for at, task in enumerate(order)}
    change = [0] * (len(order) + 1)
    for b in buffers:
        if b.users:
            places = [place[i] for i in b.users]
            change[min(places)] += b.nbytes
            if not b.stays:
                change[max(places) + 1] -= b.nbytes
    return max(itertools.accumulate(change), default=0)


def _count_free(tasks: Sequence[ScheduledTask]) -> int:
    """Count tasks that take time and could stand before or after another such task: neither needs the other."""
    timed = sum(1 << i for i, t in enumerate(tasks) if t.time_s > 0)
    before: list[int] = []  # a bit for every task needed, directly or not
    followers = [0] * len(tasks)
    for task in tasks:
        bits = 0
        for j in task.after:
            bits |= before[j] | (1 << j)
        before.append(bits)
        rest = bits & timed if task.time_s > 0 else 0
        while rest:
            low = rest & -rest
            followers[low.bit_length() - 1] += 1
            rest ^= low
    total = timed.bit_count()
    fixed = [(before[i] & timed).bit_count() + followers[i] + 1 for i in range(len(tasks))]
    return sum(fixed[i] < total for i, t in enumerate(tasks) if t.time_s > 0)


def _order_greedily(
    tasks: Sequence[ScheduledTask],
    buffers: Sequence[TaskBuffer],
    window_s: float,
    bound: float,
    reach: int,
    level_w: float,
) -> list[int]:
    """At every place take the ready task that brings the mean over the last window nearest to a level of power."""
    missing = [len(t.after) for t in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for i, task in enumerate(tasks):
        for j in task.after:
            followers[j].append(i)
    ready = [i for i, n in enumerate(missing) if n == 0]
    memory, recent = _LiveMemory(buffers, len(tasks)), _RecentPower(window_s)
    order: list[int] = []
    done = [False] * len(tasks)
    oldest = 0
    while ready:
        while done[oldest]:
            oldest += 1
        near = ready[: bisect_left(ready, oldest + reach)] or ready[:1]
        fits = [i for i in near if memory.bytes_during(i) <= bound] or near[:1]
        distance = {i: abs(recent.mean_after(tasks[i]) - level_w) if tasks[i].time_s > 0 else -1.0 for i in fits}
        i = min(fits, key=lambda i: (distance[i], i))
        ready.remove(i)
        order.append(i)
        done[i] = True
        memory.run(i)
        recent.run(tasks[i])
        for j in followers[i]:
            missing[j] -= 1
            if missing[j] == 0:
                insort(ready, j)
    return order


class _RecentPower:
    """Joules of the last window."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._times, self._joules = [0.0], [0.0]

    def run(self, task: ScheduledTask) -> None:
        self._times.append(self._times[-1] + task.time_s)
        self._joules.append(self._joules[-1] + task.energy_j)

    def mean_after(self, task: ScheduledTask) -> float:
        """Return mean watts over the window that ends with the task, or over what there is."""
        if task.time_s >= self._window_s:
            return task.energy_j / task.time_s
        begin = self._times[-1] + task.time_s - self._window_s
        if begin <= 0:
            return (self._joules[-1] + task.energy_j) / (self._times[-1] + task.time_s)
        at = bisect_left(self._times, begin)
        span = self._times[at] - self._times[at - 1]
        part = (begin - self._times[at - 1]) / span if span > 0 else 0.0
        past = self._joules[at - 1] + part * (self._joules[at] - self._joules[at - 1])
        return (self._joules[-1] + task.energy_j - past) / self._window_s


class _LiveMemory:
    """Bytes allocated now, and while a task runs."""

    def __init__(self, buffers: Sequence[TaskBuffer], count: int) -> None:
        self._buffers = buffers
        self._of: list[list[int]] = [[] for _ in range(count)]
        self._left = [len(b.users) for b in buffers]
        self._now = 0
        for k, b in enumerate(buffers):
            for i in b.users:
                self._of[i].append(k)

    def bytes_during(self, i: int) -> int:
        new = (self._buffers[k] for k in self._of[i] if self._left[k] == len(self._buffers[k].users))
        return self._now + sum(b.nbytes for b in new)

    def run(self, i: int) -> None:
        self._now = self.bytes_during(i)
        for k in self._of[i]:
            self._left[k] -= 1
            if self._left[k] == 0 and not self._buffers[k].stays:
                self._now -= self._buffers[k].nbytes
