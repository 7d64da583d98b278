"""Clocks that time calls without waiting for them: the host's, and events in a CUDA stream."""

from __future__ import annotations

import functools
import time
from typing import Any, Protocol


class CallClock(Protocol):
    """Marks moments, and gives the time between two of them."""

    def mark(self) -> Any:
        """Mark this moment."""

    def measure_s(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks; this may wait for the second mark."""


class HostClock:
    """The host's clock."""

    def mark(self) -> float:
        """Read the clock."""
        return time.perf_counter()

    def measure_s(self, begin: float, end: float) -> float:
        """Return the seconds between two readings."""
        return end - begin


class StreamClock:
    """Events in the current CUDA stream, for the times at which the device reaches them.

    `marks` events are made in advance.
    """

    def __init__(self, marks: int) -> None:
        import torch

        self._make = functools.partial(torch.cuda.Event, enable_timing=True)
        self._ready = [self._make() for _ in range(marks)]
        for event in self._ready:
            event.record()  # torch creates the CUDA event at its first use

    def mark(self) -> Any:
        """Record an event."""
        event = self._ready.pop() if self._ready else self._make()
        event.record()
        return event

    def measure_s(self, begin: Any, end: Any) -> float:
        """Return the seconds between two events; this waits for the second event."""
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3
