"""Keeps the kernels of a long run in a file of bounded size: new ones one by one, older ones as sums.

::

    a day ago            2 h ago                 minutes ago          now
    | sums of a minute   | sums of a second      | every kernel       |

A sum is a row for one kernel (name, launch, device, stream). `count` says how many kernels it stands for, and it lasts
as long as all of them together. Counts, seconds and therefore joules are kept.
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
"""Sums of a second that are kept before they become sums of a minute."""
SECOND_NS, MINUTE_NS = 1_000_000_000, 60_000_000_000
_BATCH = 10
"""Periods that are summed at once, so that the border of a chunk cuts at most every tenth period in two."""
SUMMED = ("kind", "name", "launch", "device", "stream", "start_ns", "end_ns", "bytes", "count")


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """Rows of the file that were written together, and their time."""

    first_row: int
    rows: int
    start_ns: int
    end_ns: int


class _Level:
    """Chunks of one sort, oldest first: single kernels, or sums of a period."""

    def __init__(self, most_rows: int, into_ns: int) -> None:
        self.most_rows, self.into_ns = most_rows, into_ns
        self.rows = 0
        self.chunks: deque[StoredChunk] = deque()

    def add(self, chunk: StoredChunk) -> None:
        self.chunks.append(chunk)
        self.rows += chunk.rows

    def take_oldest(self) -> list[StoredChunk]:
        """Return the chunks to sum up next; none while there is room, or while they span too little time."""
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
    """Decides which chunks of kernels are to be summed up next."""

    def __init__(self) -> None:
        self._events = _Level(MOST_EVENTS, SECOND_NS)
        self._sums = _Level(MOST_SUMS, MINUTE_NS)

    def add(self, chunk: StoredChunk) -> None:
        """Note that a chunk of single kernels was written."""
        self._events.add(chunk)

    def take_due(self) -> tuple[list[StoredChunk], int]:
        """Return the chunks to sum up into one, and the period of its sums in ns; no chunks while there is room."""
        for level in (self._events, self._sums):
            if taken := level.take_oldest():
                return taken, level.into_ns
        return [], 0

    def replace(self, chunk: StoredChunk, period_ns: int) -> None:
        """Note that a chunk of sums was written in place of others."""
        if period_ns == SECOND_NS:  # sums of a minute stay as they are
            self._sums.add(chunk)


def sum_kernels(columns: Mapping[str, NDArray[Any]], period_ns: int) -> dict[str, NDArray[Any]]:
    """Sum up rows of kernels over periods. Rows that are not on a device are left out."""
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
    # The sums of a device follow each other from the begin of the period; if they do not fit, streams run in parallel.
    total_ns, in_row_ns = _line_up([sums[c] for c in ("period", "device")], length_ns)
    _, in_stream_ns = _line_up([sums[c] for c in ("period", "device", "stream")], length_ns)
    start_ns = sums.pop("period") * period_ns + np.where(total_ns <= period_ns, in_row_ns, in_stream_ns)
    sums |= {"start_ns": start_ns, "end_ns": start_ns + length_ns, "count": count}
    return sums | {"bytes": np.where(size > 0, size, NONE), "external": np.full(len(first), UNTRACED)}


def _find_changes(columns: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """Return the indices of the first row and of all rows that differ from the row before."""
    changed = np.zeros(len(columns[0]), bool)
    changed[:1] = True
    for values in columns:
        changed[1:] |= values[1:] != values[:-1]
    return np.flatnonzero(changed)


def _line_up(columns: Sequence[NDArray[Any]], length_ns: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return for each row the length of all rows of its lane, and of the rows before it in that lane."""
    lanes = _find_changes(columns)
    rows = np.diff(lanes, append=len(length_ns))
    before_ns = np.cumsum(length_ns) - length_ns
    total_ns = np.add.reduceat(length_ns, lanes) if len(lanes) else length_ns
    return np.repeat(total_ns, rows), before_ns - np.repeat(before_ns[lanes], rows)
