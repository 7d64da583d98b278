"""Counts, for light runs, how often operators were called, and how much of the run has an operator.

A kernel of an untraced step is linked to the operator of its twin in a traced step (`timeline.launch_alignment`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ..joules import Floats, Ints
from ..timeline import Timeline
from ..timeline.columns import NONE, UNTRACED
from ..timeline.distinct import argsort_small, rank_combinations, rank_values
from .share import Share
from .table import OperatorCoverage


def count_repeats(timeline: Timeline, parts: Sequence[Share], around: Ints, *, nested: bool = False) -> Floats:
    """Return how often each host row was called for which something ran; `around` has that row by device row.

    A call of a traced step counts as often as its kernels repeat, if the repeats are linked to it too. A call that put
    kernels into a CUDA graph counts as often as these were replayed. `nested`: a kernel counts for all rows around it,
    not only for the innermost one.
    """
    links, counts = timeline.linked, timeline.columns.get("count")
    repeats = np.zeros(len(timeline))
    for part in parts:
        rows = np.unique(part.activity.rows) if part.on_host else part.activity.rows
        twin, put_by = links.find_twins(rows), links.put_by[rows]
        twin = np.where((put_by != NONE) & (around[put_by] == around[rows]), put_by, twin)
        is_tied = (around[rows] == around[twin]) & (around[rows] != NONE)
        each = np.ones(len(rows)) if counts is None else np.maximum(counts[rows], 1)
        kernels, where = rank_values(twin[is_tied])
        times, calls = np.bincount(where, each[is_tied], len(kernels)), around[kernels]
        if not np.any(times > 1):
            repeats[calls] = np.maximum(repeats[calls], 1.0)
            continue
        held = [(kernels, times, calls)]
        while nested and len(calls):
            calls = links.parent[calls]
            kernels, times, calls = (some[calls != NONE] for some in (kernels, times, calls))
            held.append((kernels, times, calls))
        found = share_repeats(timeline, *(np.concatenate(some) for some in zip(*held, strict=True)))
        np.maximum.at(repeats, *found)
    return repeats


def share_repeats(timeline: Timeline, kernels: Ints, times: Floats, calls: Ints) -> tuple[Ints, Floats]:
    """Return the traced calls, and how often each was made. Each kernel was repeated `times` on behalf of its call.

    The repeats of one call's kernels may be linked to several traced calls of its name, a part to each. So calls that
    run equally many kernels of one name are counted together: the number of these kernels, divided by how many a call
    runs. A kernel that a call put into a graph, and that also ran without it, is one of the call's kernels, not two.
    """
    names, captured = timeline["name"], timeline.columns.get("captured")
    put = np.full(len(kernels), NONE, np.int64) if captured is None else captured[kernels]  # the name of its kernel
    distinct_calls, place = rank_values(calls)
    most = np.zeros(len(distinct_calls))  # the most repeats of any of its kernels
    np.maximum.at(most, place, times)
    key, count = rank_combinations(names[calls], np.where(put == NONE, names[kernels], put))
    by_holders: dict[tuple[int, ...], list[float]] = {}
    order = argsort_small(key, count)
    for entries in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
        holders, where = np.unique(place[entries], return_inverse=True)
        is_put = put[entries] != NONE
        runs = np.maximum(*(np.bincount(where[some], minlength=len(holders)) for some in (is_put, ~is_put)))
        if runs.min() == runs.max():
            by_holders.setdefault(tuple(holders.tolist()), []).append(float(times[entries].sum() / runs[0]))
    made = most.copy()
    is_counted = np.zeros(len(made), bool)
    for holders_of, counts in sorted(by_holders.items(), key=lambda item: (-len(item[0]), -len(item[1]))):
        at = list(holders_of)
        if not is_counted[at].any():
            is_counted[at] = True
            made[at] = most[at] / most[at].sum() * _find_agreed(counts)
    return distinct_calls, made


def _find_agreed(counts: Sequence[float]) -> float:
    """Return the value that most counts have, within a percent; the largest of them, since some kernels run rarely."""
    near = Counter(round(100 * math.log(count)) for count in counts)
    agreed = max(near, key=lambda number: (near[number], number))
    return max(count for count in counts if round(100 * math.log(count)) == agreed)


def count_calls(timeline: Timeline, parts: Sequence[Share], around: Ints, *, nested: bool) -> Floats:
    """Return how often each module or region of `around` was called, at least once.

    `nested`: what contains another was called as often as that. This holds for modules, which only a tracer sees; a
    region that a program names has a row of its own for every pass.
    """
    return np.maximum(count_repeats(timeline, parts, around, nested=nested), 1.0)


def cover_operators(timeline: Timeline, parts: Sequence[Share]) -> OperatorCoverage | None:
    """Return how much of a light run has an operator; None if all of the run was traced, or none of it."""
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
