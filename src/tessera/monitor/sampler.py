"""Reads every sensor when it is due, on one background thread; the user's thread reads none.

    sensors ──read()──► Sampler ──► PowerSeries (samples, running sums) ──► windows, traces
                           │    ──► CounterAnchors (counter ticks)
                           └──► telemetry, gaps, events (all bounded)

A sensor is read at its `period_s`, about once a second for NVML. A caller that needs data up to a moment wakes the
thread (`wait_for`), which then reads at the sensor's own pace until the data have come.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from ..clock import REAL, Clock, EpochMap
from ..errors import SensorError, SensorLost
from ..schema import Domain, Gap, PowerEvent, Telemetry
from ..sensors.base import Batch, Sensor
from ..sensors.processes import OwnCpuReading, read_own_cpu, read_threads_cpu
from .series import CounterAnchors, CpuEdge, PowerSeries

_log = logging.getLogger("tessera")

# A lost sensor is tried again after these delays (s): a driver restart takes seconds, but a dead GPU stays dead.
RETRY_S = (0.5, 1.0, 2.0, 5.0)
KEPT_TELEMETRY = 2048
KEPT_EVENTS = 1024
KEPT_GAPS = 1024
_URGENT_S = 0.01
_POLL_S = 0.003
_IDLE_S = 5.0
_LEARN_NS = 2_000_000_000


class _SensorSlot:
    """One sensor's place in the schedule."""

    def __init__(self, sensor: Sensor) -> None:
        self.sensor = sensor
        self.due_ns = 0
        self.learn_ns = 0
        self.failures = 0
        self.lost: SensorLost | None = None
        self.names: set[str] = set()  # kept here, since a lost sensor may not know its domains any more


class Sampler:
    """Reads started sensors and keeps their readings in bounded memory. `start` makes the thread.

    Without `start` it can be driven by `read_due`, as tests do on a simulated clock.
    """

    def __init__(self, sensors: Sequence[Sensor], *, clock: Clock = REAL) -> None:
        self._clock = clock.monotonic_ns
        self._slots = [_SensorSlot(s) for s in sensors]
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._wanted: dict[str, int] = {}
        self._dead: set[str] = set()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._after_read: list[Callable[[], None]] = []
        self.epoch = EpochMap(clock)
        self.series: dict[str, PowerSeries] = {}
        self.anchors: dict[str, CounterAnchors] = {}
        self.telemetry: dict[str, deque[Telemetry]] = {}
        self.events: deque[PowerEvent] = deque(maxlen=KEPT_EVENTS)
        self.gaps: deque[Gap] = deque()
        self._warned: set[type[Exception]] = set()
        self.cpu_time_s = 0.0
        self.read_cpu: Callable[[], OwnCpuReading] | None = None
        """What windows read at their edges if a domain is divided by this process's CPU time; with its children's too,
        once one has ended."""
        self.cpu_edges: deque[CpuEdge] | None = None
        """Edges of windows, regions and steps, if a recording wants its samples divided there."""
        with self._lock:
            for slot in self._slots:
                self._adopt(slot)

    # -- what others ask ------------------------------------------------------------------------------------

    @property
    def lock(self) -> threading.RLock:
        """Held by the thread while it adds data; hold it to read several series consistently."""
        return self._lock

    @property
    def domains(self) -> list[Domain]:
        return [s.domain for s in list(self.series.values())]  # a copy, since the thread may add more

    @property
    def nbytes(self) -> int:
        """Bytes held by the sample memory."""
        with self._lock:
            return sum(s.nbytes for s in self.series.values())

    @property
    def spare_s(self) -> float:
        """Seconds until the next sensor is due."""
        if not self._slots:
            return _IDLE_S
        return max(min(s.due_ns for s in self._slots) - self._clock(), 0) * 1e-9

    def on_read(self, call: Callable[[], None]) -> None:
        """Call a function on the sampler's thread after each round of reads."""
        self._after_read.append(call)

    def note_cpu_edge(self) -> None:
        """Divide the samples of a recording here, by this process's CPU time; no effect if no recording wants that."""
        if self.cpu_edges is not None and self.read_cpu is not None:
            self.cpu_edges.append((self._clock(), self.read_cpu()))

    def latest(self, domain: str) -> Telemetry | None:
        telemetry = self.telemetry.get(domain)
        return telemetry[-1] if telemetry else None

    def gaps_between(self, start_ns: int, end_ns: int) -> list[Gap]:
        """Return the gaps that overlap a time."""
        return [g for g in list(self.gaps) if g.start_ns < end_ns and (g.end_ns is None or g.end_ns > start_ns)]

    def counted_domains(self) -> list[str]:
        """Return the names of the domains that add up to the total."""
        return [n for n, s in list(self.series.items()) if s.domain.counted]

    def covers(self, time_ns: int, names: Collection[str] | None = None) -> bool:
        """Return whether the named domains (by default all) have data up to a time; silent ones do not count."""
        with self._lock:
            return all(self._has_data(n, time_ns) for n in (self.series if names is None else names))

    def wait_for(
        self,
        time_ns: int,
        timeout_s: float = 3.0,
        names: Collection[str] | None = None,
        *,
        keep_lock: bool = False,
    ) -> bool:
        """Wait until the named domains have data up to a time; return False if a sensor did not deliver in time.

        `keep_lock` is for a call between any two bytecodes of a thread (`torch_hooks.MainThread`), perhaps while that
        thread holds the lock to read a window. Then no data arrive, and waiting has no effect but does no harm.
        """
        wanted = list(self.series) if names is None else list(names)
        if self.covers(time_ns, wanted):
            return True  # without waking the thread
        deadline = time.monotonic() + timeout_s
        try:
            return self._wait(time_ns, wanted, deadline, keep_lock)
        finally:  # nobody waits any more, so do not ask a sensor with nothing new a hundred times a second
            with self._lock:
                for name in wanted:
                    if self._wanted.get(name) == time_ns:
                        del self._wanted[name]

    def _wait(self, time_ns: int, wanted: Sequence[str], deadline: float, keep_lock: bool) -> bool:
        with self._wake:
            for name in wanted:
                self._wanted[name] = max(self._wanted.get(name, 0), time_ns)
            self._wake.notify_all()
        with contextlib.nullcontext() if keep_lock else self._wake:
            while not self.covers(time_ns, wanted):
                left = deadline - time.monotonic()
                if left <= 0 or self._stopping or (self._thread is not None and not self._thread.is_alive()):
                    return False
                if self._thread is None:  # driven by `read_due`
                    self.read_due()
                if keep_lock:
                    time.sleep(min(left, _POLL_S))
                else:
                    self._wake.wait(min(left, _URGENT_S if self._thread is None else 0.1))
        return True

    def _has_data(self, name: str, time_ns: int) -> bool:
        """Return whether a domain has data up to a time, or none will come: it is silent, or another sampler's."""
        series = self.series.get(name)
        return series is None or series.covers(time_ns) or self.is_silent(name)

    def _find_silent(self) -> set[str]:
        """Return the domains with an open gap: they deliver nothing now, so nobody should wait for them."""
        return {gap.domain for gap in self.gaps if gap.end_ns is None}

    def is_silent(self, name: str) -> bool:
        """Return whether a domain delivers nothing now: its sensor is lost, or it has an open gap."""
        with self._lock:
            return name in self._dead or name in self._find_silent()

    # -- the thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; the first read happens at once, so that data begin before the caller continues."""
        if self._thread is not None:
            return
        self.read_due()
        self._thread = threading.Thread(target=self._run, name="tessera-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Read once more, then stop the thread and the sensors. What was read can still be read."""
        with self._wake:
            if self._stopping:
                return
            self._stopping = True
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        for slot in self._slots:
            if not slot.lost:
                self._read(slot)
            slot.sensor.stop()

    def abandon(self) -> None:
        """Stop in a forked child: the thread does not exist there, and may have held a lock."""
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._stopping = True
        self._thread = None

    def _call_back(self) -> None:
        for call in self._after_read:
            try:
                call()
            except Exception as exc:  # noqa: BLE001  (the function may meet a failed device; sampling must continue)
                if type(exc) not in self._warned:  # warn once each, since this may happen every second
                    self._warned.add(type(exc))
                    _log.warning("sampling goes on after %s: %s", type(exc).__name__, exc)

    def _run(self) -> None:
        while not self._stopping:
            self.read_due()
            self._call_back()
            self.cpu_time_s = time.thread_time()
            with self._wake:
                self._wake.notify_all()
                if not self._stopping:
                    delay_s = self.spare_s  # after the calls, which take time too
                    self._wake.wait(min(delay_s, _URGENT_S) if self._unmet() else delay_s)

    def read_due(self) -> float:
        """Read the sensors that are due, or whose data somebody waits for; return the seconds until the next is due."""
        now = self._clock()
        self.epoch.observe()
        urgent = self._unmet()
        for slot in self._slots:
            if now >= slot.due_ns or (not slot.lost and slot.names & urgent):
                self._read(slot)
        return self.spare_s

    def _unmet(self) -> set[str]:
        """Return the domains whose data somebody still waits for; forget waits that are over."""
        with self._lock:
            self._wanted = {n: t for n, t in self._wanted.items() if not self._has_data(n, t)}
            return set(self._wanted)

    def _read(self, slot: _SensorSlot) -> None:
        try:
            self._read_slot(slot)
        except SensorError as exc:
            self._lose(slot, exc)
        except Exception as exc:  # noqa: BLE001  (an error in one vendor's binding must not end all measuring)
            self._lose(slot, SensorLost(f"the {slot.sensor.name} sensor failed", why=f"{type(exc).__name__}: {exc}"))

    def _read_slot(self, slot: _SensorSlot) -> None:
        if slot.lost:
            slot.sensor.start()
            with self._lock:
                self._adopt(slot)
                for name in slot.names:
                    self.anchors[name].restart()
        batch = slot.sensor.read()
        if slot.lost:
            self._dead -= slot.names
        slot.lost, slot.failures = None, 0
        slot.due_ns = self._clock() + round(slot.sensor.period_s * 1e9)
        if self._clock() >= slot.learn_ns or not slot.names.issuperset((*batch.samples, *batch.anchors)):
            slot.learn_ns = self._clock() + _LEARN_NS
            with self._lock:
                self._adopt(slot)
        self._take(batch)

    def _lose(self, slot: _SensorSlot, exc: SensorError) -> None:
        now = self._clock()
        if not slot.lost:
            slot.lost = exc if isinstance(exc, SensorLost) else SensorLost(exc.what, why=exc.why, fix=exc.fix)
            with self._lock:
                self._dead |= slot.names
                for d in [self.series[n].domain for n in slot.names]:
                    last = self.series[d.name].last_ns
                    reason = f"{exc.what}: {exc.why}" if exc.why else exc.what
                    self._note_gap(Gap(domain=d.name, start_ns=last or now, end_ns=None, reason=reason))
        slot.failures += 1
        slot.due_ns = now + round(RETRY_S[min(slot.failures, len(RETRY_S)) - 1] * 1e9)

    def _adopt(self, slot: _SensorSlot) -> None:
        """Add a sensor's domains, or update them with what the sensor has learnt since."""
        for domain in slot.sensor.domains():
            slot.names.add(domain.name)
            if domain.name not in self.series:
                self.series[domain.name] = PowerSeries(domain)
                self.anchors[domain.name] = CounterAnchors(self.series[domain.name])
            elif self.series[domain.name].domain != domain:
                self.series[domain.name].update(domain)

    def _take(self, batch: Batch) -> None:
        with self._wake:
            for gap in batch.gaps:  # before the samples, which may close it
                self._note_gap(gap)
            for name, samples in batch.samples.items():
                possible = self._end_gaps(name, self._drop_impossible(name, samples))
                self.series[name].extend(possible, replaces=batch.replaces)
                if batch.own_cpu is not None and name in batch.core_w:
                    self.series[name].note_cpu(batch.own_cpu, batch.core_w[name])
                    self.read_cpu = read_own_cpu if batch.own_cpu.waited_s else read_threads_cpu
            silent = self._find_silent()
            for name, ticks in batch.anchors.items():
                for time_ns, joules in ticks if name in self.anchors else ():
                    self.anchors[name].add(time_ns, joules)
            for name, anchors in self.anchors.items():
                anchors.catch_up(force=name in silent)
            for t in batch.telemetry:
                self.telemetry.setdefault(t.domain, deque(maxlen=KEPT_TELEMETRY)).append(t)
            self.events.extend(batch.events)
            self._wake.notify_all()

    def _note_gap(self, gap: Gap) -> None:
        """Keep a gap once; join it with a neighbour of the same reason; never drop an open one."""
        for i, old in enumerate(self.gaps):
            if _overlap(gap, old):
                return  # keep the first reason
            if (old.domain, old.reason, old.end_ns) == (gap.domain, gap.reason, gap.start_ns):
                self.gaps[i] = Gap(domain=gap.domain, start_ns=old.start_ns, end_ns=gap.end_ns, reason=gap.reason)
                return
        if len(self.gaps) >= KEPT_GAPS:
            oldest = next((i for i, old in enumerate(self.gaps) if old.end_ns is not None), 0)
            del self.gaps[oldest]
        self.gaps.append(gap)

    def _drop_impossible(self, name: str, samples: list[tuple[int, float]]) -> list[tuple[int, float]]:
        """Replace samples that no board can have drawn: they are failed readings, so a gap and NaN in the series."""
        series = self.series[name]
        most_w, last_ns = series.domain.max_w, series.last_ns
        kept = []
        for time_ns, power_w in samples:
            if power_w < 0.0 or power_w > most_w:
                reason = f"the sensor read {power_w:,.0f} W, which the board cannot draw (0 to {most_w:,.0f} W)"
                self._note_gap(Gap(domain=name, start_ns=last_ns or time_ns, end_ns=time_ns, reason=reason))
                power_w = math.nan  # noqa: PLW2901
            kept.append((time_ns, power_w))
            last_ns = time_ns
        return kept

    def _end_gaps(self, domain: str, samples: list[tuple[int, float]]) -> list[tuple[int, float]]:
        """End the open gaps of a domain that has data again, and mark their time as unknown."""
        for i, gap in enumerate(self.gaps):
            if gap.domain != domain or gap.end_ns is not None:
                continue
            first = next((k for k, (t, _) in enumerate(samples) if t > gap.start_ns), None)
            if first is not None:
                time_ns = samples[first][0]
                self.gaps[i] = Gap(domain=domain, start_ns=gap.start_ns, end_ns=time_ns, reason=gap.reason)
                samples = [*samples[:first], (time_ns - 1, math.nan), *samples[first:]]
        return samples


def _overlap(a: Gap, b: Gap) -> bool:
    return (
        a.domain == b.domain
        and (b.end_ns is None or a.start_ns < b.end_ns)
        and (a.end_ns is None or b.start_ns < a.end_ns)
    )
