"""Another order for the same work: memory-bound operators between compute-bound ones, so that the peak of power falls.

An order keeps every dependency (a value before its use, a write after the reads of what it overwrites, random numbers
in turn, nothing across a wait of the host) and stays within the memory given. Most programs leave little freedom: a
chain has none, and then the order is the program's own, which the result says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..device import Device
from ..estimate.iteration import WINDOW_S
from ..graph.ir import Graph
from .ordering import Buffer, Order, Task, best


def plan(
    graph: Graph, *, on: str | Device = "h200", window_s: float = WINDOW_S, memory_bytes: float | None = None
) -> Order:
    """An order of a captured program's operators (indices into `graph.ops`), by their predicted joules and seconds."""
    from ..estimate.predict import predict

    report: Any = predict(graph, on=on, check_memory=False)
    spent = {op.index: d for op, d in zip(graph.kernels, report.descriptors, strict=True)}
    needs = dependencies(graph)
    tasks = []
    for op in graph.ops:
        d = spent.get(op.index)
        joules = d.compute_energy_j + d.memory_energy_j + d.static_energy_j if d else 0.0
        tasks.append(Task(joules, d.latency_s if d else 0.0, frozenset(needs[op.index])))
    return best(tasks, buffers_of(graph), window_s=window_s, memory_bytes=memory_bytes)


def dependencies(graph: Graph) -> list[set[int]]:
    """The operators each one must follow: by what it reads and overwrites, in random numbers, and across waits."""
    needs: list[set[int]] = [set() for _ in graph.ops]
    writer: dict[int, int] = {}
    views: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
    readers: dict[int, list[int]] = {}
    random = wait = None
    for op in graph.ops:
        mine = needs[op.index]
        if op.sync:
            mine.update(range(wait or 0, op.index))
            wait = op.index
        elif wait is not None:
            mine.add(wait)
        if op.kind == "random" or op.params.get("dropout"):
            mine.update(() if random is None else (random,))
            random = op.index
        for t in op.inputs:
            mine.update(
                at for at in (writer.get(t.storage), views.get((t.storage, t.shape, t.stride))) if at is not None
            )
        for t in op.outputs if op.kernels else ():
            mine.update(readers.pop(t.storage, ()))
            mine.update(() if t.storage not in writer else (writer[t.storage],))
        for t in op.inputs:
            readers.setdefault(t.storage, []).append(op.index)
        for t in op.outputs:
            if op.kernels:
                writer[t.storage] = op.index
            views[t.storage, t.shape, t.stride] = op.index
        mine.discard(op.index)
    return needs


def buffers_of(graph: Graph) -> list[Buffer]:
    """What the iteration allocates. A value that Python held on to waits for the operator after which it was let go."""
    users: dict[int, set[int]] = {}
    for op in graph.ops:
        for t in (*op.inputs, *op.outputs):
            users.setdefault(t.storage, set()).add(op.index)
    found = []
    for s in graph.storages.values():
        if s.birth < 0 or s.id not in users:
            continue
        held = users[s.id] | ({s.death - 1} if s.death else set())
        found.append(Buffer(s.nbytes, frozenset(i for i in held if i < len(graph.ops)), s.death is None))
    return found


def reordered(graph: Graph, order: Sequence[int]) -> Graph:
    """The captured program in another order, with the lives of its storages moved along: to be predicted like any."""
    place = {old: new for new, old in enumerate(order)}
    ops = tuple(replace(graph.ops[old], index=new) for new, old in enumerate(order))
    lives = {}
    users: dict[int, list[int]] = {}
    for op in ops:
        for t in (*op.inputs, *op.outputs):
            users.setdefault(t.storage, []).append(op.index)
    for s in graph.storages.values():
        mine = users.get(s.id, [place[s.birth]] if 0 <= s.birth < len(ops) else [])
        if s.birth < 0 or not mine:
            lives[s.id] = s
            continue
        death = None if s.death is None else max([*mine, *([place[s.death - 1]] if s.death > 0 else [])]) + 1
        lives[s.id] = replace(s, birth=min(mine), death=death)
    return replace(graph, ops=ops, storages=lives)
