"""Finds which captured launch each kernel of a CUDA graph repeats: a replay has no operators, but its capture had.

::

    captured     a b c d e | f g a b            calls that put kernels into graphs, in their order, by `captured`
    replays      [a b c d e] [a b c d e] [f g a b] [a b c d e]

All kernels of a replay have the number of one launch, and each has the number of its node. Replays with the same nodes
are of one graph: its kernels are searched once, as a sequence among the captured ones. If there is no such sequence (a
graph with branches, a replay that was cut off), the cursor of `launch_alignment` follows them. A kernel that only one
operator put into any graph gets that operator in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .columns import NONE, Ints, Timeline
from .launch_alignment import Bools, find_by_key, follow_launches

_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphAlignment:
    """Rows of graphs' kernels, the calls that put them there, and whether grid and block are the same.

    `by_key` are rows whose call stands for all `captured` calls with their key, and the keys by row.
    """

    nodes: Ints
    put_by: Ints
    is_same: Bools
    captured: Ints
    by_key: tuple[tuple[Ints, Ints], ...] = ()


def align_graphs(timeline: Timeline, device: Ints, op: Ints) -> GraphAlignment:
    """Find the call that put each kernel of a CUDA graph there; `op` has the operators of the calls."""
    captured = np.flatnonzero(timeline.columns.get("captured", op[:0]) != NONE)
    replayed = device[timeline["graph_node"][device] != NONE] if len(captured) else captured
    if not len(replayed):
        none = device[:0]
        return GraphAlignment(nodes=none, put_by=none, is_same=np.zeros(0, bool), captured=none)
    captured = captured[np.argsort(timeline["start_ns"][captured], kind="stable")]
    name, exact = _name_kernels(timeline, captured, replayed)
    call = np.full(len(timeline), NONE, np.int64)
    ranks, start_ns = timeline["rank"], timeline["start_ns"]
    for replays in _split_graphs(timeline, replayed):
        own = captured[ranks[captured] == ranks[replays[0, 0]]]
        by_node = replays[0]
        by_time = np.argsort(start_ns[by_node], kind="stable")
        places = np.full(len(by_node), NONE, np.int64)
        for keys in (exact, name):
            for order in (np.arange(len(by_node)), by_time):
                begin = _find_run(keys[own], keys[by_node[order]])
                if begin != NONE and places[0] == NONE:
                    places[order] = begin + np.arange(len(by_node))
        if len(own) and places[0] == NONE:
            places[by_time] = follow_launches(name[own], name[by_node[by_time]], np.zeros(len(by_node), np.int64))
        call[replays] = np.where(places == NONE, NONE, own[places] if len(own) else NONE)
    by_key = tuple(
        (find_by_key(call, replayed, captured, key, op, timeline["name"], override=False), key) for key in (exact, name)
    )
    known = replayed[(call[replayed] != NONE) & (op[call[replayed]] != NONE)]
    is_same = exact[known] == exact[call[known]]
    return GraphAlignment(nodes=known, put_by=call[known], is_same=is_same, captured=captured, by_key=by_key)


def _name_kernels(timeline: Timeline, captured: Ints, replayed: Ints) -> tuple[Ints, Ints]:
    """Return by row a number for the rank and name of a kernel, and one for these with grid and block."""
    shapes: dict[object, int] = {}
    number = [shapes.setdefault((launch.grid, launch.block), len(shapes)) for launch in timeline.launches]
    shape = np.array([*number, NONE], np.int64)
    names, exact = (np.full(len(timeline), NONE, np.int64) for _ in range(2))
    for rows, column in ((captured, "captured"), (replayed, "name")):
        names[rows] = (timeline["rank"][rows] + 1) * len(timeline.names) + timeline[column][rows]
        exact[rows] = names[rows] * (len(shapes) + 1) + shape[timeline["launch"][rows]] + 1
    return names, exact


def _split_graphs(timeline: Timeline, rows: Ints) -> list[Ints]:
    """Return the replays of each graph, one per line, with their kernels in the order of their nodes."""
    columns = [timeline[name][rows] for name in ("rank", "device", "correlation", "graph_node")]
    order = np.lexsort(columns[::-1])
    rows = rows[order]
    changes = np.zeros(len(rows), bool)
    changes[0] = True
    for column in columns[:-1]:
        changes[1:] |= np.diff(column[order]) != 0
    first = np.flatnonzero(changes)
    size = np.diff(first, append=len(rows))
    node = columns[-1][order].astype(np.uint64)
    mixed = (node ^ (node >> np.uint64(31))) * _MIX
    mixed ^= mixed >> np.uint64(29)
    keys = np.column_stack([size, np.add.reduceat(mixed, first).view(np.int64), columns[0][order][first]])
    _, which = np.unique(keys, axis=0, return_inverse=True)
    which = which.reshape(-1)
    return [
        rows[first[members][:, None] + np.arange(size[members[0]])]
        for members in (np.flatnonzero(which == group) for group in range(int(which.max()) + 1))
    ]


def _find_run(reference: Ints, sequence: Ints) -> int:
    """Return where a sequence begins in the reference as a whole, or `NONE`."""
    last = len(reference) - len(sequence)
    if last < 0:
        return NONE
    for begin in np.flatnonzero(reference[: last + 1] == sequence[0]).tolist():
        if np.array_equal(reference[begin : begin + len(sequence)], sequence):
            return int(begin)
    return NONE
