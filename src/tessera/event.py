"""Events between streams: `ev = event.create(); ev.record(s1); ev.wait(s0)` makes s0 wait for what was queued on s1.

The host waits only in `synchronize`. On a CPU everything runs at once, so an event is just a time.
"""

from __future__ import annotations

import time
from typing import Any

from .errors import ArgumentError
from .stream import Stream, check, keep


class Event:
    """A moment on a stream. Made by `event.create`."""

    __slots__ = ("_at_ns", "_raw", "_where", "timing")

    def __init__(self, *, timing: bool = False) -> None:
        self.timing = timing
        self._raw: Any = None
        self._where: Any = None
        self._at_ns: int | None = None

    def record(self, stream: Stream | None = None) -> Event:
        """Mark the end of what is queued on the stream (None: the current one) so far; return self."""
        import torch

        if stream is not None:
            check(stream)
        on_host = stream.raw is None if stream is not None else not torch.cuda.is_available()
        self._at_ns = time.perf_counter_ns()
        if on_host:
            self._raw, self._where = None, torch.device("cpu")
            return self
        raw = torch.cuda.current_stream() if stream is None else stream.raw
        if self._raw is None or self._where != raw.device:  # a CUDA event belongs to the first device it is recorded on
            self._raw, self._where = torch.cuda.Event(enable_timing=self.timing), raw.device
        self._raw.record(raw)
        return self

    def wait(self, stream: Stream | None = None, *tensors: Any) -> Event:
        """Let later work on the stream (None: the current one) wait for this event; return self.

        `tensors` were made before the event and are used on that stream after it: their memory is kept until then.
        """
        self._check_recorded("waited for")
        if stream is not None:
            check(stream)
        if self._raw is not None and (stream is None or stream.raw is not None):
            import torch

            (torch.cuda.current_stream() if stream is None else stream.raw).wait_event(self._raw)
            keep(stream, *tensors)
        elif self._raw is not None:  # a CPU's work waits for a GPU's: only the host can do that
            self._raw.synchronize()
        return self

    def query(self) -> bool:
        """Return whether the work before the event has run."""
        self._check_recorded("asked")
        return True if self._raw is None else bool(self._raw.query())

    def synchronize(self) -> None:
        """Block this thread until the work before the event has run."""
        self._check_recorded("waited for")
        if self._raw is not None:
            self._raw.synchronize()

    def elapsed_s(self, later: Event) -> float:
        """Wait for a later event, and return the seconds from this one to it. Both need `timing=True`."""
        if not isinstance(later, Event):
            raise ArgumentError(f"later={later!r} is not a tessera event", fix="event.create(timing=True) makes one")
        for which in (self, later):
            which._check_recorded("timed")
            if not which.timing:
                raise ArgumentError("an event was made without timing=True", fix="event.create(timing=True)")
        if self._where != later._where:
            raise ArgumentError(
                f"the events are on {self._where} and {later._where}",
                why="devices have clocks of their own",
                fix="record both on streams of one device",
            )
        if self._raw is None:
            return ((later._at_ns or 0) - (self._at_ns or 0)) * 1e-9
        later._raw.synchronize()
        return float(self._raw.elapsed_time(later._raw)) * 1e-3

    def _check_recorded(self, what: str) -> None:
        # CUDA accepts an event that was never recorded, and a wait that does nothing is a race.
        if self._at_ns is None:
            raise ArgumentError(f"an event was {what} before it was recorded", fix="ev.record(stream) first")

    def __repr__(self) -> str:
        state = "not recorded" if self._at_ns is None else f"on {self._where}"
        return f"<Event {state}{', timing' if self.timing else ''}>"


def create(*, timing: bool = False) -> Event:
    """Make an event; `elapsed_s` needs `timing=True`, which costs the device a little more."""
    return Event(timing=bool(timing))
