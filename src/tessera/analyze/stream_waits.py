"""Which stream, or which call of the host, waited for which row of the device: Kineto's synchronisation events.

::

    stream 20   ──[kernel a]──(record, correlation 1385)
    stream 24   ──────────────(wait, correlation 1389)──[kernel b]

b waits for a: the last row of stream 20 that was launched before 1385.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from ..timeline.columns import NONE, Timeline

KEY = "stream_waits"
"""The reader's key for them: (waiting stream, correlation, awaited stream, correlation of its record)."""


class StreamWaits:
    """What rows and calls waited for; empty if the trace has no such events (`enable_cuda_sync_events`)."""

    def __init__(self, timeline: Timeline) -> None:
        self.awaited: dict[int, int] = {}
        """For a device row, the row of another stream for which it had to wait."""
        self._calls: dict[int, tuple[int, int]] = {}
        events = timeline.meta.get(KEY) or ()
        self.known = bool(events) and len(np.unique(timeline["rank"])) < 2
        if not self.known:
            return
        rows = timeline.device_rows
        rows = rows[np.argsort(timeline["correlation"][rows], kind="stable")]
        self._by_stream: dict[int, tuple[list[int], list[int]]] = {}
        for stream in np.unique(timeline["stream"][rows]).tolist():
            own = rows[timeline["stream"][rows] == stream]
            self._by_stream[stream] = (timeline["correlation"][own].tolist(), own.tolist())
        for waiting, correlation, awaited, record in events:
            if waiting >= 0 and awaited >= 0:
                self._add_wait(waiting, correlation, awaited, record)
            elif waiting >= 0 or awaited >= 0:  # the host waits for a stream, or for an event in one
                stream = waiting if waiting >= 0 else awaited
                self._calls[correlation] = (stream, record if awaited >= 0 else correlation)

    def _add_wait(self, waiting: int, correlation: int, awaited: int, record: int) -> None:
        numbers, rows = self._by_stream.get(waiting, ([], []))
        after = bisect_left(numbers, correlation)
        before = self._last_before(awaited, record)
        if after < len(rows) and before is not None:
            self.awaited[rows[after]] = before

    def _last_before(self, stream: int, correlation: int) -> int | None:
        """Return the last row of a stream that was launched before a call."""
        numbers, rows = self._by_stream.get(stream, ([], []))
        place = bisect_left(numbers, correlation) - 1
        return rows[place] if place >= 0 and numbers[place] != NONE else None

    def of_call(self, correlation: int) -> int | None:
        """Return the row for which a synchronising call of the host waited; None if the trace does not tell."""
        if not self.known or correlation not in self._calls:
            return None
        return self._last_before(*self._calls[correlation])
