"""Which captured launch each kernel of a CUDA graph repeats: a replay has no operators, its capture had.

::

    captured              a b c d e        the calls that put kernels into graphs, in their order, by `captured`
    replays, a stream     a b c d e   a b c d e   a b c d e

The same cursor as for untraced steps (`launch_alignment`) goes through what was captured, round and round: several
graphs stand there one after the other. A kernel that only one operator put into any graph has that operator wherever it
stands.
"""

from __future__ import annotations

import numpy as np

from .columns import NONE, Ints, Timeline
from .launch_alignment import Bools, find_by_key, follow_launches, split_lanes


def align_graphs(timeline: Timeline, device: Ints, op: Ints) -> tuple[Ints, Ints, Bools]:
    """Rows of graphs' kernels, the calls that put them there, and whether those have the same grid and block.

    `op` has the operators of calls.
    """
    put_there = timeline.columns.get("captured", op[:0])
    captured = np.flatnonzero(put_there != NONE)
    replayed = device[timeline["graph_node"][device] != NONE] if len(captured) else captured
    if not len(replayed):
        return device[:0], device[:0], np.zeros(0, bool)
    call = np.full(len(timeline), NONE, np.int64)
    captured = captured[np.argsort(timeline["start_ns"][captured], kind="stable")]
    name, exact = _name_kernels(timeline, captured, replayed)
    ranks = timeline["rank"]
    for lane in split_lanes(timeline, replayed):
        own = captured[ranks[captured] == ranks[lane[0]]]
        if len(own):
            places = follow_launches(name[own], name[lane], np.zeros(len(lane), np.int64))
            call[lane] = np.where(places == NONE, NONE, own[places])
    find_by_key(call, replayed, captured, exact, op, timeline["name"], override=True)
    find_by_key(call, replayed, captured, name, op, timeline["name"], override=False)
    known = replayed[(call[replayed] != NONE) & (op[call[replayed]] != NONE)]
    return known, call[known], exact[known] == exact[call[known]]


def _name_kernels(timeline: Timeline, captured: Ints, replayed: Ints) -> tuple[Ints, Ints]:
    """By row: a number for the rank and name of a kernel, and one for those with grid and block."""
    shapes: dict[object, int] = {}
    number = [shapes.setdefault((launch.grid, launch.block), len(shapes)) for launch in timeline.launches]
    shape = np.array([*number, NONE], np.int64)
    names, exact = (np.full(len(timeline), NONE, np.int64) for _ in range(2))
    for rows, column in ((captured, "captured"), (replayed, "name")):
        names[rows] = (timeline["rank"][rows] + 1) * len(timeline.names) + timeline[column][rows]
        exact[rows] = names[rows] * (len(shapes) + 1) + shape[timeline["launch"][rows]] + 1
    return names, exact
