"""`power_trace`: the samples of a block, as fine as the sensor really is."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from ..clock import EpochNs
from ..errors import ArgumentError
from ..joules import DomainSamples
from ..schema import Gap, Telemetry
from ..trace import PowerTrace
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
        self._offset_ns = 0
        self._closed = False

    def __enter__(self) -> LiveTrace:
        self._monitor = self._given or default()
        self._offset_ns = self._monitor.sampler.epoch.offset_ns
        self._start_ns = self._now_ns()
        self._closed = False
        self._columns = {}
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._end_ns = self._now_ns()
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
    def end_ns(self) -> EpochNs:
        """The end: now, while the block runs."""
        return EpochNs(self._end_ns if self._closed or self._monitor is None else self._now_ns())

    def _now_ns(self) -> EpochNs:
        return self.to_epoch(time.monotonic_ns())

    def to_epoch(self, monotonic_ns: int) -> EpochNs:
        """A time of the sampler's clock on the clock of this trace."""
        return EpochNs(monotonic_ns + self._offset_ns)

    @property
    def monotonic_span_ns(self) -> tuple[int, int]:
        """Start and end on the clock of the sampler."""
        return self.start_ns - self._offset_ns, self.end_ns - self._offset_ns

    @property
    def columns(self) -> Mapping[str, DomainSamples]:
        """The samples by domain, one beyond each edge; so far, while the block runs."""
        if self._columns or self._monitor is None:
            return self._columns
        sampler = self._monitor.sampler
        start_ns, end_ns = self.monotonic_span_ns
        if self._closed:
            sampler.wait_for(end_ns)
        with sampler.lock:
            # Asked coarser than the sensor, it still keeps every sample: thinning would only lose peaks.
            columns = {n: s.column(start_ns, end_ns).shift(self._offset_ns) for n, s in sampler.series.items()}
        if self._closed:
            self._columns = columns
        return columns

    @property
    def gaps(self) -> Sequence[Gap]:
        """Gaps within the trace."""
        if self._monitor is None:
            return ()
        start_ns, end_ns = self.monotonic_span_ns
        return [
            gap.shift(self._offset_ns)
            for gap in list(self._monitor.sampler.gaps)
            if gap.start_ns < end_ns and (gap.end_ns is None or gap.end_ns > start_ns)
        ]

    def telemetry(self, domain: str) -> list[Telemetry]:
        """Clocks, temperature, throttling of a domain during the trace."""
        if self._monitor is None:
            return []
        start_ns, end_ns = self.monotonic_span_ns
        readings = list(self._monitor.sampler.telemetry.get(domain, ()))
        return [
            dataclasses.replace(t, time_ns=t.time_ns + self._offset_ns)
            for t in readings
            if start_ns <= t.time_ns <= end_ns
        ]


def power_trace(interval_ms: float | None = None, *, monitor: Monitor | None = None) -> LiveTrace:
    """Record power during a `with` block.

    >>> with monitor.power_trace(interval_ms=5) as pwr:
    ...     run_hotstep()
    >>> pwr.peak_w, pwr.crest_factor(), pwr.true_resolution_ms
    """
    return LiveTrace(interval_ms, monitor=monitor)
