"""Unions, intersections and overlaps of time intervals: numpy, exact on integer nanoseconds.

An interval holds its start and not its end. A `Spans` is sorted and disjoint, without empty ones; `union` makes one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .columns import Ints


class Spans(NamedTuple):
    """Sorted disjoint intervals."""

    start_ns: Ints
    end_ns: Ints

    @property
    def total_ns(self) -> int:
        """How long they last together."""
        return int((self.end_ns - self.start_ns).sum())


EMPTY = Spans(np.zeros(0, np.int64), np.zeros(0, np.int64))


def union(start_ns: Ints, end_ns: Ints) -> Spans:
    """What any of the intervals covers; those that touch become one."""
    keep = end_ns > start_ns
    if not keep.any():
        return EMPTY
    start_ns, end_ns = start_ns[keep], end_ns[keep]
    order = np.argsort(start_ns, kind="stable")
    start_ns, reach = start_ns[order], np.maximum.accumulate(end_ns[order])
    first = np.concatenate(([True], start_ns[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Spans(start_ns[first], reach[last])


def intersection(a: Spans, b: Spans) -> Spans:
    """What both cover."""
    low = np.searchsorted(b.end_ns, a.start_ns, side="right")
    high = np.searchsorted(b.start_ns, a.end_ns, side="left")
    counts = np.maximum(high - low, 0)
    of_a = np.repeat(np.arange(len(a.start_ns)), counts)
    of_b = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - low, counts)
    return Spans(np.maximum(a.start_ns[of_a], b.start_ns[of_b]), np.minimum(a.end_ns[of_a], b.end_ns[of_b]))


def difference(a: Spans, b: Spans) -> Spans:
    """What the first covers and the second does not."""
    if not len(a.start_ns) or not len(b.start_ns):
        return a
    edge = np.array([min(a.start_ns[0], b.start_ns[0])]), np.array([max(a.end_ns[-1], b.end_ns[-1])])
    gaps = Spans(np.concatenate((edge[0], b.end_ns)), np.concatenate((b.start_ns, edge[1])))
    some = gaps.end_ns > gaps.start_ns
    return intersection(a, Spans(gaps.start_ns[some], gaps.end_ns[some]))


def covered_ns(spans: Spans, start_ns: Ints, end_ns: Ints) -> Ints:
    """How much of each interval (they may overlap) the spans cover."""
    if not len(spans.start_ns):
        return np.zeros(len(start_ns), np.int64)
    before = np.concatenate(([0], np.cumsum(spans.end_ns - spans.start_ns)))

    def until(times: Ints) -> Ints:
        index = np.searchsorted(spans.start_ns, times, side="right") - 1
        inside = np.minimum(times, spans.end_ns[index]) - spans.start_ns[index]
        total: Ints = np.where(index < 0, 0, before[index] + inside)
        return total

    return until(np.maximum(start_ns, end_ns)) - until(start_ns)
