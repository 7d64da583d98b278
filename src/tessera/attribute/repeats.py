"""What the alignment of a light run means for its table: how often operators were called, and how many are known.

A kernel of an untraced step is tied to the operator of its twin in a traced one (`timeline.launch_alignment`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..joules import Ints
from ..timeline import Timeline
from ..timeline.columns import NONE, UNTRACED
from ..timeline.distinct import rank_values
from .share import Share
from .table import OperatorCoverage


def count_repeats(timeline: Timeline, parts: Sequence[Share], around: Ints) -> Ints:
    """How often each row of the host that something ran for was called; `around` has that row by device row.

    A call of a traced step was made as often as its kernels repeat, where what repeats them is tied to it too.
    """
    links, counts = timeline.linked, timeline.columns.get("count")
    repeats = np.zeros(len(timeline) + 1, np.int64)  # one more, for NONE
    for part in parts:
        rows = np.unique(part.activity.rows) if part.on_host else part.activity.rows
        twin = links.find_twins(rows)
        rows, twin = (some[around[rows] == around[twin]] for some in (rows, twin))
        each = np.ones(len(rows)) if counts is None else np.maximum(counts[rows], 1)
        traced, where = rank_values(twin)
        np.maximum.at(repeats, around[traced], np.bincount(where, each, len(traced)).astype(np.int64))
    return repeats[:-1]


def count_calls(timeline: Timeline, parts: Sequence[Share], around: Ints, *, nested: bool) -> Ints:
    """How often each module or region of `around` was called, at least once.

    `nested`: what holds another was called as often as that. So it is with modules, which only a tracer sees; of the
    regions that a program names, every pass has a row of its own.
    """
    parent = timeline.linked.parent
    repeats = count_repeats(timeline, parts, around)
    inside = np.flatnonzero(repeats) if nested else np.zeros(0, np.int64)
    while len(inside):
        outer = parent[inside]
        held = outer != NONE
        np.maximum.at(repeats, outer[held], repeats[inside[held]])
        inside = np.unique(outer[held])
    return np.maximum(repeats, 1)


def cover_operators(timeline: Timeline, parts: Sequence[Share]) -> OperatorCoverage | None:
    """How much of a light run has an operator; None where all of a run was traced, or none of it."""
    links = timeline.linked
    counts, joules = np.zeros(3, np.int64), np.zeros(3)
    is_light = False
    for part in parts:
        rows = part.activity.rows
        if part.on_host or not len(rows):
            continue
        is_light |= bool((timeline["external"][rows] == UNTRACED).any())
        state = np.where(links.op[rows] == NONE, 2, links.twin[rows] != rows)
        counts += np.bincount(state, minlength=3)
        joules += np.bincount(state, part.row_j, 3)
    if not is_light or counts[0] == 0:
        return None
    return OperatorCoverage(
        traced_kernels=int(counts[0]),
        aligned_kernels=int(counts[1]),
        unknown_kernels=int(counts[2]),
        traced_j=float(joules[0]),
        aligned_j=float(joules[1]),
        unknown_j=float(joules[2]),
    )
