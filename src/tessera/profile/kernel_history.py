"""The kernels of a long run in a file that does not grow with it: the newest one by one, older ones as sums.

::

    a day ago            2 h ago                 minutes ago          now
    | sums of a minute   | sums of a second      | every kernel       |

A sum is a row of a kernel (name, launch, device, stream): `count` says how many it stands for, and it lasts as long as
all of them together, beside the other sums of its second. So counts and seconds stay, and joules with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..record import CODE, ON_DEVICE
from ..timeline.columns import NONE, UNTRACED

MOST_EVENTS = 4_000_000
"""Kernels that are kept one by one: two minutes at 30,000 a second, and what a reader can hold in a gigabyte."""
MOST_SUMS = 1_000_000
SECOND_NS, MINUTE_NS = 1_000_000_000, 60_000_000_000
_BATCH = 10
"""Seconds (minutes) that are summed at once: each of them is then cut in two at most every tenth time."""
SUMMED = ("kind", "name", "launch", "device", "stream", "start_ns", "end_ns", "bytes", "count")


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """Rows of the file, and when they were."""

    first_row: int
    rows: int
    start_ns: int
    end_ns: int


class _Level:
    """Chunks of one sort, oldest first: events, or sums of a period."""

    def __init__(self, most_rows: int, into_ns: int) -> None:
        self.most_rows, self.into_ns = most_rows, into_ns
        self.rows = 0
        self.chunks: deque[StoredChunk] = deque()

    def add(self, chunk: StoredChunk) -> None:
        self.chunks.append(chunk)
        self.rows += chunk.rows

    def take_oldest(self) -> list[StoredChunk]:
        """Chunks that are to become sums; none while there is room, or they are too few to be worth it."""
        if self.rows <= self.most_rows or not self.chunks:
            return []
        end_ns = self.chunks[0].start_ns + _BATCH * self.into_ns
        if self.chunks[-1].end_ns < end_ns:
            return []
        taken: list[StoredChunk] = []
        while len(self.chunks) > 1 and (not taken or self.chunks[0].end_ns < end_ns):
            taken.append(self.chunks.popleft())
            self.rows -= taken[-1].rows
        return taken


class KernelHistory:
    """Which chunks of kernels are to be summed up next."""

    def __init__(self) -> None:
        self._events = _Level(MOST_EVENTS, SECOND_NS)
        self._sums = _Level(MOST_SUMS, MINUTE_NS)

    def add(self, chunk: StoredChunk) -> None:
        """A chunk of single kernels was written."""
        self._events.add(chunk)

    def take_due(self) -> tuple[list[StoredChunk], int]:
        """Chunks that are to become one of sums, and the nanoseconds of its period; none where there is room."""
        for level in (self._events, self._sums):
            if taken := level.take_oldest():
                return taken, level.into_ns
        return [], 0

    def replace(self, chunk: StoredChunk, period_ns: int) -> None:
        """A chunk of sums was written in place of others."""
        if period_ns == SECOND_NS:  # sums of a minute stay as they are
            self._sums.add(chunk)


def sum_kernels(columns: Mapping[str, NDArray[Any]], period_ns: int) -> dict[str, NDArray[Any]]:
    """Rows of kernels as sums of a period. What is not of a device is left out."""
    on_device = np.isin(columns["kind"], [CODE[kind] for kind in ON_DEVICE])
    rows = {name: values[on_device] for name, values in columns.items()}
    rows["period"] = rows["start_ns"] // period_ns
    order = np.lexsort([rows[c] for c in ("launch", "name", "kind", "stream", "device", "period")])
    rows = {name: values[order] for name, values in rows.items()}
    first = _find_changes([rows[c] for c in ("period", "device", "stream", "kind", "name", "launch")])
    length_ns, count, size = (
        np.add.reduceat(values, first) if len(first) else values
        for values in (
            rows["end_ns"] - rows["start_ns"],
            np.where(rows["count"] == NONE, 1, rows["count"]),
            np.maximum(rows["bytes"], 0),
        )
    )
    sums = {c: rows[c][first] for c in ("kind", "name", "launch", "device", "stream", "period")}
    # One after the other from the begin of the period; where that is too long, streams beside each other.
    total_ns, in_row_ns = _line_up([sums[c] for c in ("period", "device")], length_ns)
    _, in_stream_ns = _line_up([sums[c] for c in ("period", "device", "stream")], length_ns)
    start_ns = sums.pop("period") * period_ns + np.where(total_ns <= period_ns, in_row_ns, in_stream_ns)
    sums |= {"start_ns": start_ns, "end_ns": start_ns + length_ns, "count": count}
    return sums | {"bytes": np.where(size > 0, size, NONE), "external": np.full(len(first), UNTRACED)}


def _find_changes(columns: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """The rows that differ from the one before, and the first."""
    changed = np.zeros(len(columns[0]), bool)
    changed[:1] = True
    for values in columns:
        changed[1:] |= values[1:] != values[:-1]
    return np.flatnonzero(changed)


def _line_up(columns: Sequence[NDArray[Any]], length_ns: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The length of all rows of each lane, and of those before each row in it."""
    lanes = _find_changes(columns)
    rows = np.diff(lanes, append=len(length_ns))
    before_ns = np.cumsum(length_ns) - length_ns
    total_ns = np.add.reduceat(length_ns, lanes) if len(lanes) else length_ns
    return np.repeat(total_ns, rows), before_ns - np.repeat(before_ns[lanes], rows)
