"""Writes the sampler's power, counter and telemetry readings to the run file as they come, in epoch time."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..schema import Hold, PowerEvent

if TYPE_CHECKING:
    from ..monitor.sampler import Sampler
    from ..monitor.series import CpuEdge, PowerSeries
    from .runfile import RunWriter

BEFORE_NS = 1_000_000_000
"""Time before the session whose samples are kept: they show the board's idle power."""
PROMPT_S = 0.05
"""Sensors at least this fine (NVML's ring, 0.5 ms a read) are read for every pull."""
BEHIND_NS = 500_000_000
"""A pull reads fine sensors whose data are older than this: a killed program loses this and one pull of power."""
# A sample of NVML's ring comes 8 to 46 ms after the one before it, and shows the power of 16 ms before.
CATCH_UP_S = 0.1
THIN_NS = 1_000_000_000
MOST_EVENTS = 10_000
"""Most power events to keep; a log with more repeats itself."""
MOST_EDGES = 4096
"""Most edges to keep between two pulls; with more, samples would be divided into parts shorter than they can tell."""
THIN_TELEMETRY_NS = 10_000_000_000


class PowerFeed:
    """Writes the new samples of every domain to a run file, each once. `thin` writes means of a second instead."""

    def __init__(
        self, writer: RunWriter, sampler: Sampler, *, thin: bool = False, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._writer = writer
        self._sampler = sampler
        self._clock = clock
        self._thin = thin
        self._start_ns = self._clock()
        self._since_ns: dict[str, int] = {}
        self._anchored_ns: dict[str, int] = {}
        self._told_ns: dict[str, int] = {}
        self._events: list[tuple[int, PowerEvent]] = []
        self._clock_steps = self._sampler.epoch.steps
        if not thin:
            self._sampler.cpu_edges = deque(maxlen=MOST_EDGES)

    @property
    def clock_steps(self) -> int:
        return self._sampler.epoch.steps - self._clock_steps

    def pull(self) -> None:
        prompt = self._prompt()
        if prompt:
            self._sampler.wait_for(self._clock() - BEHIND_NS, 0.05, prompt)
        self.take()

    def catch_up(self) -> None:
        """Let the fine sensors read up to now, because what comes next may stop every thread for seconds.

        The driver's ring holds 2.4 s. In a longer stall, samples that were not read before it are lost too: those of
        the end of the window that is being closed.
        """
        prompt = self._prompt()
        if prompt:
            self._sampler.wait_for(self._clock(), CATCH_UP_S, prompt, keep_lock=True)

    def _prompt(self) -> list[str]:
        return [d.name for d in self._sampler.domains if d.resolution_s <= PROMPT_S]

    def finish(self, end_ns: int) -> None:
        """Write the rest up to a monotonic time; wait up to 3 s for the sensors to get there."""
        self._sampler.wait_for(end_ns, 3.0, self._sampler.counted_domains())
        self.take(end_ns)
        self._sampler.cpu_edges = None
        gaps = [g for g in list(self._sampler.gaps) if g.start_ns < end_ns and (g.end_ns or end_ns) > self._start_ns]
        self._writer.add_gaps(gaps, self._sampler.epoch.offset_ns)

    def take(self, end_ns: int | None = None) -> None:
        """Write the new samples. `end_ns` is given at the end of the run, to end the last mean."""
        offset_ns = self._sampler.epoch.offset_ns
        with self._sampler.lock:
            edges = list(self._sampler.cpu_edges or ())
            for name, series in list(self._sampler.series.items()):
                if self._thin:
                    self._means(name, series, offset_ns, end_ns)
                else:
                    self._samples(name, series, offset_ns, edges)
            self._forget_edges(edges)
            for name, anchors in list(self._sampler.anchors.items()):
                last = anchors.history.last_before(self._clock())
                if last is not None and last.time_ns > self._anchored_ns.get(name, 0):
                    self._anchored_ns[name] = last.time_ns
                    self._writer.add_anchors(name, [last.time_ns + offset_ns], [last.joules])
            telemetry = {name: list(readings) for name, readings in self._sampler.telemetry.items()}
        for name, readings in telemetry.items():
            since_ns = self._told_ns.get(name, self._start_ns - BEFORE_NS)
            fresh = [t for t in readings if t.time_ns > since_ns]
            if self._thin:
                fresh = fresh[-1:] if fresh and fresh[-1].time_ns > since_ns + THIN_TELEMETRY_NS else []
            if fresh:
                self._told_ns[name] = fresh[-1].time_ns
                self._writer.add_telemetry(fresh, offset_ns)
        self._take_events(offset_ns)

    def _take_events(self, offset_ns: int) -> None:
        """Keep what supplies and PDUs have reported since the session began; the sampler forgets old events."""
        newest_ns = self._events[-1][0] if self._events else self._start_ns
        with self._sampler.lock:
            known = list(self._sampler.events)
        seen = {event for _, event in self._events}
        fresh = [(e.time_ns, e) for e in known if e.time_ns >= newest_ns and e not in seen]
        if fresh and len(self._events) < MOST_EVENTS:
            self._events += fresh[: MOST_EVENTS - len(self._events)]
            self._writer.set("events", [e.shift(offset_ns) for _, e in self._events])

    def _forget_edges(self, edges: Sequence[CpuEdge]) -> None:
        """Drop the edges whose samples have been written."""
        written_ns = min(self._since_ns.values(), default=0)
        for _ in range(sum(time_ns <= written_ns for time_ns, _ in edges)):
            if self._sampler.cpu_edges:
                self._sampler.cpu_edges.popleft()

    def _samples(self, name: str, series: PowerSeries, offset_ns: int, edges: Sequence[CpuEdge]) -> None:
        lag_ns = round(series.domain.lag_s * 1e9)
        since_ns = self._since_ns.get(name, self._start_ns - BEFORE_NS)
        column = series.column(since_ns - lag_ns, self._clock())
        fresh = column.times_ns > since_ns
        if fresh.any():
            times, watts = column.times_ns[fresh], column.watts[fresh]
            self._since_ns[name] = int(times[-1])
            if edges:
                times, watts = series.divide_samples(times, watts, edges)
            self._writer.add_samples(series.domain, times + offset_ns, watts)

    def _means(self, name: str, series: PowerSeries, offset_ns: int, end_ns: int | None) -> None:
        """Write means of a second. Their joules are exact, since they come from the running sums beside the samples."""
        domain = dataclasses.replace(series.domain, resolution_s=THIN_NS * 1e-9, hold=Hold.MEAN, lag_s=0.0)
        if name not in self._since_ns:
            if series.last_ns is None:
                return
            self._since_ns[name] = self._start_ns
            self._writer.add_samples(domain, [self._start_ns + offset_ns], [float("nan")])  # begin of the first mean
        times, watts = [], []
        while True:
            since_ns = self._since_ns[name]
            until_ns = since_ns + THIN_NS if end_ns is None else min(since_ns + THIN_NS, end_ns)
            if until_ns <= since_ns or not (series.covers(until_ns) or end_ns is not None):
                break
            a, b = series.mark(since_ns), series.mark(until_ns)
            seen_s = b.covered_s - a.covered_s
            times.append(until_ns + offset_ns)
            watts.append((b.joules - a.joules) / seen_s if seen_s > 0 else float("nan"))
            self._since_ns[name] = until_ns
        if times:
            self._writer.add_samples(domain, times, watts)
