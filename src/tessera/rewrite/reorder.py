"""Tell whether another order of the same work has a lower peak of power: cool operators between hot ones.

An order keeps every dependency (a value before its use, a write after the reads of what it overwrites, random numbers
in turn, nothing across a wait of the host) and stays within the memory. Most programs leave little freedom: a chain has
only one order. Then the result is the program's own order, with the reason.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..device import Device
from ..errors import check_positive
from ..estimate.iteration import WINDOW_S, highest_mean_w
from ..graph.ir import Graph

# How many operators ahead of the program's own order an operator may be taken. A longer reach holds more memory, so all
# are tried, and the best order that fits is kept.
REACHES = (2, 4, 8, 16, 64, 1 << 30)


@dataclass(frozen=True, slots=True)
class ScheduledTask:
    """A piece of work: joules, seconds, and the tasks that must have run before."""

    energy_j: float
    time_s: float
    after: frozenset[int]


@dataclass(frozen=True, slots=True)
class TaskBuffer:
    """Memory that exists from the first of its users to the last; with `stays`, it outlives them."""

    nbytes: int
    users: frozenset[int]
    stays: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReorderPlan:
    """An order of operators, and its effect: peaks of power (mean over the window) and of memory, before and after.

    `free` is how many operators could be placed elsewhere at all; `moved` is how many were.
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
    """Return the operators that each one must follow: by what it reads and overwrites, random numbers, and waits."""
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
    """Return what the iteration allocates.

    A value that Python held is freed after the operator at which it was let go.
    """
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
    """Return the order with the lowest peak that fits the memory (default: what the program's own order needs)."""
    check_positive("window_s", window_s, fix="seconds")
    own = list(range(len(tasks)))
    before_w, before_bytes = compute_peak_w(tasks, own, window_s), compute_peak_bytes(buffers, own)
    bound = before_bytes if memory_bytes is None else memory_bytes
    free = _count_free(tasks)
    best, best_w, best_bytes = own, before_w, before_bytes
    whole_s = sum(t.time_s for t in tasks)
    for reach in REACHES if free and window_s < whole_s else ():
        tried = _interleave(tasks, reach)
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
    """Return the most bytes that are allocated at once."""
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
    """Count tasks that take time and could run before or after another such task: neither needs the other."""
    before: list[int] = []  # a bit for every task needed, directly or not
    timed = free = 0
    for i, task in enumerate(tasks):
        before.append(sum(1 << j for j in task.after))
        for j in task.after:
            before[i] |= before[j]
        if task.time_s > 0:
            unrelated = timed & ~before[i]
            free |= unrelated | (1 << i if unrelated else 0)
            timed |= 1 << i
    return free.bit_count()


def _interleave(tasks: Sequence[ScheduledTask], reach: int) -> list[int]:
    """At every place, take the ready task that keeps the joules so far nearest to those of the mean power."""
    mean_w = sum(t.energy_j for t in tasks) / sum(t.time_s for t in tasks)
    excess_j = [t.energy_j - mean_w * t.time_s for t in tasks]
    missing = [len(t.after) for t in tasks]
    followers: defaultdict[int, list[int]] = defaultdict(list)
    for i, task in enumerate(tasks):
        for j in task.after:
            followers[j].append(i)
    ready = [i for i, n in enumerate(missing) if n == 0]
    order, balance_j = list[int](), 0.0
    while ready:
        near = [i for i in ready if i < min(ready) + reach]
        i = min(near, key=lambda i: (tasks[i].time_s > 0, abs(balance_j + excess_j[i]), i))
        balance_j += excess_j[i]
        order.append(i)
        ready.remove(i)
        for j in followers[i]:
            missing[j] -= 1
            if missing[j] == 0:
                ready.append(j)
    return order
