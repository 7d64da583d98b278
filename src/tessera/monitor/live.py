"""`power_trace`: the samples of a block, as fine as the sensor really is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from ..errors import ArgumentError
from ..schema import Gap, Telemetry
from ..trace import Column, PowerTrace
from .core import Monitor, default


class LiveTrace(PowerTrace):
    """A `PowerTrace` of what happens inside a `with` block; complete once the block is left.

    The body is not slowed: the sampler reads in the background. The first look after the block waits until the
    sensor has caught up with its end.
    """

    def __init__(self, interval_ms: float | None = None, *, monitor: Monitor | None = None) -> None:
        if interval_ms is not None and not interval_ms > 0:
            raise ArgumentError(
                f"interval_ms={interval_ms!r} is not a time",
                why="a sampling interval is a positive number of milliseconds",
                fix="leave it out for the sensor's own resolution, or give e.g. interval_ms=20",
            )
        super().__init__({}, start_ns=0, end_ns=0, asked_ms=interval_ms)
        self._given = monitor
        self._monitor: Monitor | None = None
        self._closed = False

    def __enter__(self) -> LiveTrace:
        self._monitor = self._given or default()
        self.epoch_offset_ns = self._monitor.sampler.epoch.offset_ns
        self._start_ns = time.monotonic_ns()
        self._closed = False
        self._columns = {}
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._end_ns = time.monotonic_ns()
        self._closed = True

    @property
    def notes(self) -> list[str]:
        """What a reader should know: a sensor coarser than was asked, a modelled one, data merged with age."""
        found = []
        for c in self._counted(None):
            d, true_ms = c.domain, c.domain.resolution_s * 1e3
            if self.asked_ms is not None and self.asked_ms < 0.75 * true_ms:
                found.append(
                    f"{d.name}: asked for {self.asked_ms:g} ms, but {d.source} has a new value every {true_ms:.3g} ms; "
                    "the trace has those, repeats are not counted as data"
                )
            if d.basis != "measured":
                found.append(f"{d.name}: {d.basis}, not measured ({d.note})")
        return found

    @property
    def end_ns(self) -> int:
        """Monotonic end: now, while the block runs."""
        return self._end_ns if self._closed or self._monitor is None else time.monotonic_ns()

    @property
    def columns(self) -> Mapping[str, Column]:
        """The samples by domain, one beyond each edge; so far, while the block runs."""
        if self._columns or self._monitor is None:
            return self._columns
        sampler = self._monitor.sampler
        end_ns = self.end_ns
        if self._closed:
            sampler.wait_for(end_ns)
        with sampler.lock:
            # Asked coarser than the sensor, it still keeps every sample: thinning would only lose peaks.
            columns = {n: s.column(self._start_ns, end_ns) for n, s in sampler.series.items()}
        if self._closed:
            self._columns = columns
        return columns

    @property
    def gaps(self) -> Sequence[Gap]:
        """Gaps within the trace."""
        if self._monitor is None:
            return ()
        end = self.end_ns
        kept = list(self._monitor.sampler.gaps)
        return [g for g in kept if g.start_ns < end and (g.end_ns is None or g.end_ns > self._start_ns)]

    def telemetry(self, domain: str) -> list[Telemetry]:
        """Clocks, temperature, throttling of a domain during the trace."""
        if self._monitor is None:
            return []
        kept = list(self._monitor.sampler.telemetry.get(domain, ()))
        return [t for t in kept if self._start_ns <= t.time_ns <= self.end_ns]


def power_trace(interval_ms: float | None = None, *, monitor: Monitor | None = None) -> LiveTrace:
    """Record power during a `with` block.

    >>> with monitor.power_trace(interval_ms=5) as pwr:
    ...     run_hotstep()
    >>> pwr.peak_w, pwr.crest_factor(), pwr.true_resolution_ms
    """
    return LiveTrace(interval_ms, monitor=monitor)
