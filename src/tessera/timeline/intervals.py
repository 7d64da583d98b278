"""Unions, intersections, overlaps and nesting of time intervals, with numpy and exact in integer nanoseconds.

An interval includes its start but not its end. A `Spans` is sorted and disjoint, without empty intervals; `union` makes
one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .columns import NONE, Ints
from .distinct import rank_values


class Spans(NamedTuple):
    """Sorted disjoint intervals."""

    start_ns: Ints
    end_ns: Ints

    @property
    def total_ns(self) -> int:
        return int((self.end_ns - self.start_ns).sum())


EMPTY = Spans(np.zeros(0, np.int64), np.zeros(0, np.int64))


def union(start_ns: Ints, end_ns: Ints) -> Spans:
    """Return what at least one of the intervals covers; intervals that touch become one."""
    keep = end_ns > start_ns
    if not keep.any():
        return EMPTY
    start_ns, end_ns = start_ns[keep], end_ns[keep]
    order = np.argsort(start_ns, kind="stable")
    start_ns, reach = start_ns[order], np.maximum.accumulate(end_ns[order])
    first = np.concatenate(([True], start_ns[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Spans(start_ns[first], reach[last])


def union_by_key(keys: Ints, start_ns: Ints, end_ns: Ints) -> tuple[Ints, Spans]:
    """Return what the intervals of each key cover: the key of every span, and the spans, grouped by key."""
    distinct, where, counts = np.unique(keys, return_inverse=True, return_counts=True)
    parts = np.split(np.argsort(where, kind="stable"), np.cumsum(counts))[:-1]
    spans = [EMPTY, *(union(start_ns[part], end_ns[part]) for part in parts)]
    lengths = np.array([len(s.start_ns) for s in spans[1:]], np.int64)
    return np.repeat(distinct, lengths), Spans(*(np.concatenate(edges) for edges in zip(*spans, strict=True)))


def intersection(a: Spans, b: Spans) -> Spans:
    """Return what both cover."""
    low = np.searchsorted(b.end_ns, a.start_ns, side="right")
    high = np.searchsorted(b.start_ns, a.end_ns, side="left")
    counts = np.maximum(high - low, 0)
    of_a = np.repeat(np.arange(len(a.start_ns)), counts)
    of_b = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - low, counts)
    return Spans(np.maximum(a.start_ns[of_a], b.start_ns[of_b]), np.minimum(a.end_ns[of_a], b.end_ns[of_b]))


def difference(a: Spans, b: Spans) -> Spans:
    """Return what the first covers and the second does not."""
    if not len(a.start_ns) or not len(b.start_ns):
        return a
    edge = np.array([min(a.start_ns[0], b.start_ns[0])]), np.array([max(a.end_ns[-1], b.end_ns[-1])])
    gaps = Spans(np.concatenate((edge[0], b.end_ns)), np.concatenate((b.start_ns, edge[1])))
    some = gaps.end_ns > gaps.start_ns
    return intersection(a, Spans(gaps.start_ns[some], gaps.end_ns[some]))


def covered_ns(spans: Spans, start_ns: Ints, end_ns: Ints) -> Ints:
    """Return how much of each interval the spans cover; the intervals may overlap."""
    if not len(spans.start_ns):
        return np.zeros(len(start_ns), np.int64)
    before = np.concatenate(([0], np.cumsum(spans.end_ns - spans.start_ns)))

    def until(times: Ints) -> Ints:
        index = np.searchsorted(spans.start_ns, times, side="right") - 1
        inside = np.minimum(times, spans.end_ns[index]) - spans.start_ns[index]
        total: Ints = np.where(index < 0, 0, before[index] + inside)
        return total

    return until(np.maximum(start_ns, end_ns)) - until(start_ns)


class Nesting:
    """Intervals of rows, by thread. `parent` has for each of `rows` the row that it is inside, or `NONE`.

    The innermost of several open intervals is the one opened last. An interval counts as inside another if that one
    contains at least half of it. So a step that a hook begins just before the optimizer's region ends is not inside
    that region; but the region, which ends just after the step before it, is still inside that step.
    """

    def __init__(self, rows: Ints, threads: Ints, starts: Ints, ends: Ints) -> None:
        ends = np.maximum(starts, ends)
        order = np.lexsort((rows, -ends, starts, threads))
        self.rows = rows
        self._threads, lanes = np.unique(threads[order], return_inverse=True)
        self._edges = np.unique(np.concatenate((starts, ends)))
        self._width = len(self._edges) + 1
        # Thread and time as one number, so that all threads are handled at once.
        begins, stops = (lanes * self._width + np.searchsorted(self._edges, times[order]) for times in (starts, ends))
        parent, self._changes, tops = _tree(begins, stops)
        crossing = np.unique(lanes[(parent != NONE) & (stops > stops[parent])])
        if len(crossing):
            some = np.flatnonzero(np.isin(lanes, crossing))
            parent[some], at, innermost = _scan(lanes[some].tolist(), starts[order[some]], ends[order[some]])
            parent[some] = np.where(parent[some] == NONE, NONE, some[parent[some]])
            keep = ~np.isin(self._changes // self._width, crossing)
            scanned = np.where(at % 2, stops[some[at // 2]], begins[some[at // 2]])
            self._changes = np.concatenate((self._changes[keep], scanned))
            tops = np.concatenate((tops[keep], np.where(innermost == NONE, NONE, some[innermost])))
            by_time = np.argsort(self._changes, kind="stable")
            self._changes, tops = self._changes[by_time], tops[by_time]
        named = np.append(rows[order], NONE)  # the last one is for the index NONE (-1)
        self.parent = np.empty(len(rows), np.int64)
        self.parent[order], self._tops = named[parent], named[tops]

    def at(self, threads: Ints, times: Ints) -> Ints:
        """Return the innermost row that is open on each thread at each time, or `NONE`."""
        if not len(self._changes):
            return np.full(len(times), NONE, np.int64)
        lanes = np.searchsorted(self._threads, threads).clip(max=len(self._threads) - 1)
        asked = lanes * self._width + np.searchsorted(self._edges, times, side="right") - 1
        index = np.searchsorted(self._changes, asked, side="right") - 1  # the last change is the thread before's end
        return np.where((index >= 0) & (self._threads[lanes] == threads), self._tops[index], NONE)

    def stretches(self) -> tuple[Ints, Ints, Ints]:
        """Return row, start and end of every time in which a row is the innermost of its thread: its self time."""
        real = np.flatnonzero((np.diff(self._changes) > 0) & (self._tops[:-1] != NONE))
        starts, ends = (self._edges[self._changes[at] % self._width] for at in (real, real + 1))
        return self._tops[real], starts, ends


def _tree(starts: Ints, ends: Ints) -> tuple[Ints, Ints, Ints]:
    """Find the same as `_scan` in a quarter of its time, if everything that begins inside another also ends inside it.

    The depth of an interval is how many are open when it begins; its parent is the last one before it with a depth
    that is one less.
    """
    lasting = np.flatnonzero(ends > starts)  # intervals without length hold nothing, and are innermost for no time
    late = ends[lasting[::-1]]
    closing = np.argsort(late, kind="stable")  # of those that close at the same time, the outermost is the last
    closed = late[closing]
    begun: Ints = np.cumsum(ends > starts) - (ends > starts)  # how many have begun before each
    depth = begun - np.searchsorted(closed, starts, side="right")
    parent = np.full(len(starts), NONE, np.int64)
    by_depth = np.split(np.argsort(depth, kind="stable"), np.cumsum(np.bincount(depth))[:-1])
    for outer, inner in pairwise(by_depth):
        parent[inner] = outer[np.searchsorted(outer, inner) - 1]
    # The place of each opening and closing among all of them; what closes at a time comes before what opens then.
    opened, place = starts[lasting], np.arange(len(lasting))
    opening_at = place + np.searchsorted(closed, opened, side="right")
    closing_at = place + np.searchsorted(opened, closed, side="left")
    times, tops = np.empty((2, 2 * len(lasting)), np.int64)
    times[opening_at], tops[opening_at] = opened, lasting
    times[closing_at], tops[closing_at] = closed, parent[lasting[::-1][closing]]
    return parent, times, tops


def _scan(lanes: list[int], start_ns: Ints, end_ns: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the parents of the rows of some threads, and when the innermost row changes to which.

    A change is twice the number of the row that begins then, or one more if the row ends.
    """
    origin = int(start_ns.min())
    span = int(end_ns.max()) - origin + 1  # Python integers, so that products cannot overflow
    starts = [lane * span + start - origin for lane, start in zip(lanes, start_ns.tolist(), strict=True)]
    ends = [lane * span + end - origin for lane, end in zip(lanes, end_ns.tolist(), strict=True)]
    parents: list[int] = []
    times: list[int] = []
    tops: list[int] = []
    open_rows: list[int] = [NONE]
    open_ends: list[float] = [math.inf]  # never removed, so that the stack is never empty

    def close_last() -> None:
        closing, row = open_ends[-1], open_rows[-1]
        while open_ends[-1] <= closing:  # drop rows below that closed earlier (they overlapped)
            open_ends.pop()
            open_rows.pop()
        times.append(2 * row + 1)
        tops.append(open_rows[-1])

    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        while open_ends[-1] <= start:
            close_last()
        inside = len(open_rows) - 1
        while open_ends[inside] <= start or 2 * (open_ends[inside] - start) < end - start:
            inside -= 1
        parents.append(open_rows[inside])
        open_rows.append(row)
        open_ends.append(end)
        times.append(2 * row)
        tops.append(row)
    while len(open_ends) > 1:
        close_last()
    return np.array(parents, np.int64), np.array(times, np.int64), np.array(tops, np.int64)


class Forest:
    """Rows nested in each other, each with a place: a row comes directly before everything it contains.

    Indexed by place: `rows`, `parent` (a place, or `NONE`), `end` (after the last that a row contains). Indexed by row:
    `place`.
    """

    def __init__(self, rows: Ints, parent: Ints) -> None:
        """`rows` are ordered so that every parent comes before what it contains; `parent` is indexed by row."""
        count = len(rows)
        at = np.full(len(parent) + 1, NONE, np.int64)  # one extra cell, for the index NONE (-1)
        at[rows] = np.arange(count)
        above = at[parent[rows]].tolist()
        held = [1] * count
        for i in range(count - 1, -1, -1):
            if above[i] != NONE:
                held[above[i]] += held[i]
        places, free, depths, roots = [0] * count, [0] * count, [0] * count, 0
        for i, up in enumerate(above):
            if up == NONE:
                places[i], roots = roots, roots + held[i]
            else:
                places[i], free[up], depths[i] = free[up], free[up] + held[i], depths[up] + 1
            free[i] = places[i] + 1
        place = np.array(places, np.int64)
        self.place = np.full(len(parent) + 1, NONE, np.int64)
        self.place[rows] = place
        self.rows, self.parent, self.end, self._depth = (np.empty(count, np.int64) for _ in range(4))
        self.rows[place], self._depth[place], self.end[place] = rows, depths, place + np.array(held, np.int64)
        self.parent[place] = self.place[parent[rows]]

    def find_common(self, a: Ints, b: Ints) -> Ints:
        """Return the innermost place that contains both of two places (or is one of them), or `NONE`."""
        common = np.where(a == b, a, NONE)
        asked = np.flatnonzero((a != b) & (a != NONE) & (b != NONE))
        low, high = np.minimum(a[asked], b[asked]), np.maximum(a[asked], b[asked])
        size = np.frexp(high - low)[1] - 1  # two ranges of 2**size places cover all places after the first
        least = self._depth * (len(self.rows) + 1) + np.arange(len(self.rows))
        for doubled in range(int(size.max(initial=-1)) + 1):
            some = np.flatnonzero(size == doubled)
            shallow = np.minimum(least[low[some] + 1], least[high[some] - (1 << doubled) + 1])
            common[asked[some]] = self.parent[shallow % (len(self.rows) + 1)]
            least = np.minimum(least[: -(1 << doubled)], least[1 << doubled :])
        return common

    def sum_upwards(
        self, entries: Sequence[tuple[Ints, Ints | int, NDArray[np.floating[Any]] | float]], columns: int
    ) -> Iterator[tuple[int, NDArray[np.float64]]]:
        """Yield each place with the sums of the entries (place, column, value) in it; innermost first."""
        keys, values = [], []
        for at, which, amount in entries:  # a million entries have a few thousand places and columns
            there = at != NONE
            cells, cell = rank_values((at * columns + which)[there])
            keys.append(cells)
            values.append(np.bincount(cell, np.broadcast_to(amount, len(at))[there], len(cells)))
        cells, cell = rank_values(np.concatenate(keys))
        value = np.bincount(cell, np.concatenate(values), len(cells))
        column = cells % columns
        edges = np.searchsorted(cells // columns, np.arange(len(self.rows) + 1)).tolist()
        parent = self.parent.tolist()
        waiting: dict[int, NDArray[np.float64]] = {}
        for place in range(len(parent) - 1, -1, -1):
            sums, own = waiting.pop(place, None), slice(edges[place], edges[place + 1])
            if own.stop > own.start:
                added = np.bincount(column[own], value[own], minlength=columns).astype(np.float64, copy=False)
                sums = added if sums is None else sums + added
            if sums is not None:
                yield place, sums
                if (up := parent[place]) != NONE:
                    waiting[up] = waiting[up] + sums if up in waiting else sums


def climb(up: Ints) -> Ints:
    """Follow `up` for every row until a row points to itself; by doubling, so a few passes are enough."""
    while True:
        further = up[up]
        if np.array_equal(further, up):
            return up
        up = further


def latest(
    keys: Sequence[Ints], times: Ints, asked_keys: Sequence[Ints], asked_times: Ints, *, strict: bool = False
) -> Ints:
    """Return for each question the entry with the same keys and the latest time not after (`strict`: before) it.

    The result are places in the entries, `NONE` if there is none. Of entries at the same time the last one counts.
    """
    count, asked = len(times), len(asked_times)
    if not count or not asked:
        return np.full(asked, NONE, np.int64)
    place = np.arange(count + asked)
    is_question = place >= count
    first = ~is_question if strict else is_question  # which of the two comes later at equal times
    both = [np.concatenate(pair) for pair in zip(keys, asked_keys, strict=True)]
    order = np.lexsort((place, first, np.concatenate((times, asked_times)), *both[::-1]))
    running = np.maximum.accumulate(np.where(is_question[order], -1, np.arange(count + asked)))
    before = np.full(count + asked, NONE, np.int64)
    before[order] = np.where(running >= 0, order[running], NONE)
    entry = before[count:]
    same = entry >= 0
    for key, question in zip(keys, asked_keys, strict=True):
        same &= key[entry] == question
    return np.where(same, entry, NONE)


def single(keys: Ints, asked: Ints) -> Ints | None:
    """Return for each question the place of the entry with its key, or `NONE`; None if two entries share a key."""
    if not len(keys):
        return np.full(len(asked), NONE, np.int64)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    if np.any(ordered[1:] == ordered[:-1]):
        return None
    at = np.searchsorted(ordered, asked).clip(max=len(ordered) - 1)
    return np.where(ordered[at] == asked, order[at], NONE)
