"""Kineto's and Chrome's traces as a `Timeline`.

::

    file ─► stream (a MB of text) ─► events (typed) ─► rows (columns) ─► Timeline
                                                  └───► side (counters, marks, names of threads)

Times are exact: Kineto writes microseconds with three decimals, and they become integer nanoseconds of the wall clock.
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path

from ..errors import RecordingError
from ..notes import Note
from .columns import Timeline
from .rows import RowReader
from .stream import Events, pieces


def read(
    source: str | PathLike[str] | bytes, *, progress: Callable[[float], None] | None = None, frames: bool = False
) -> Timeline:
    """Read a Kineto or Chrome trace (.json, .json.gz, or its bytes).

    `progress` is called with the share of the file that was read. Modules that the Python tracer saw are operator
    rows, and `frames` keeps its other frames too: `meta["modules"]` and `meta["frames"]` have their name numbers.
    """
    notes: list[str] = []
    where = "the trace" if isinstance(source, bytes) else str(source)
    events = Events(pieces(source if isinstance(source, bytes) else Path(source), progress, notes))
    rows = RowReader(frames=frames)
    for batch, text in events:
        rows.add(batch, text)
    if events.cut and not rows.seen:
        raise RecordingError(
            f"{where} contains no complete event",
            why="it is empty" if events.empty else "it was cut before the first one ended",
            fix="record again, and let the program end before the file is copied",
        )  # fmt: skip
    if not events.found:
        raise RecordingError(
            f"{where} is not a trace", why='it has no "traceEvents" and is not a list of events',
            fix="give a file of torch.profiler (export_chrome_trace) or of tessera run",
        )  # fmt: skip
    if events.cut:
        notes.append(Note(f"the trace was cut: {events.cut_bytes} bytes at its end are not a whole event", "omission"))
    if events.decoder.unreadable:
        notes.append(Note(f"not read: {events.decoder.unreadable} events that cannot be decoded", "omission"))
    return rows.finish(events.meta, notes)
