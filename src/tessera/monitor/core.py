"""`Monitor`: sensors, the thread that samples them, and the windows whose joules are measured."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ..anchors import Anchor, is_in_step
from ..job_rank import find_rank
from ..joules import Mark, sum_domains
from ..schema import Capability, Domain, Energy, Hold, RegionEnergy, Scope
from ..sensors.base import Sensor
from ..sensors.discover import discover
from ..sensors.processes import OwnCpu
from .cuda import DeviceClocks, Edge
from .regions import REGIONS_VARIABLE, ProcessRegions, RegionTotal, sort_regions, write_regions
from .sampler import Sampler
from .series import CounterAnchors

_log = logging.getLogger("tessera")

# A window whose data have not come after this time is settled with what there is (its coverage tells).
GIVE_UP_NS = 10_000_000_000
MAX_REGIONS = 10_000
# A window waits here for a second or two; with more, windows are opened faster than they can be settled.
MAX_PENDING = 50_000
# How long the sampler's thread settles windows before it reads again: until the next sensor is due, within these
# limits. A counter whose ticks are searched is due every 3 ms, and thousands of short scopes take seconds.
SETTLE_NS = (4_000_000, 400_000_000)
LAST_WAIT_S, LAST_SETTLE_NS = 0.5, 200_000_000
OTHER_REGION = "(other regions)"


_monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()


def on_device(domain: Domain) -> bool:
    """Return whether a domain uses the GPU's time (edges in the stream) or the host's."""
    return domain.name.startswith("gpu")


class Window:
    """Two edges, and the joules between them by domain, in constant memory.

    Each edge is marked in the running sums as soon as the samples have passed it. So a window may last for days or be
    read hours later, and no samples need to be kept. `settle` is called by the sampler's thread after each read, and by
    whoever reads the result. `overlaps`: a window of another thread was open at the same time, so both include what
    both threads did.
    """

    __slots__ = (
        "_ends", "_firsts", "_starts", "end", "energies", "met", "name", "nested", "overlaps", "reported", "start",
        "thread",
    )  # fmt: skip

    def __init__(self, name: str, start: Edge) -> None:
        self.name = name
        self.start = start
        self.end: Edge | None = None
        self.energies: dict[str, Energy] = {}
        self.reported = False
        self.overlaps = False
        self.nested = False
        self.thread = threading.get_ident()
        self.met = 0
        self._starts: dict[str, Mark] = {}
        self._ends: dict[str, Mark] = {}
        self._firsts: dict[str, Anchor] = {}

    def settle(self, sampler: Sampler, clocks: DeviceClocks, names: Collection[str], force: bool = False) -> bool:
        """Mark the edges of the named domains; True if their joules are known. `force`: use the data there are."""
        if self._has(names):
            return True
        if not clocks.resolve(self.start) and not force:
            return False
        with sampler.lock:
            self._mark(sampler, self.start, self._starts, names, force)
            self._find_first_anchors(sampler)
            if self.end is None or (not clocks.resolve(self.end) and not force):
                return False
            self._mark(sampler, self.end, self._ends, names, force)
            for name in names:
                if name not in self.energies and name in self._starts and name in self._ends:
                    self.energies[name] = self._energy(sampler.series[name].domain, sampler.anchors[name], self.end)
        return self._has(names)

    def settle_again(self, sampler: Sampler) -> None:
        """Compute the joules again with the counter's ticks that have come since."""
        if self.end is None:
            return
        with sampler.lock:
            for name in self.energies:
                self.energies[name] = self._energy(sampler.series[name].domain, sampler.anchors[name], self.end)

    def join(self, other: Window, sampler: Sampler) -> Window:
        """Return a window from the first start to the last end of two settled windows that overlap."""
        first, last = (self, other) if self.start.host_ns <= other.start.host_ns else (other, self)
        if last.end_ns <= first.end_ns:
            return first
        both = Window(self.name, first.start)
        both.end = last.end
        both._starts, both._firsts, both._ends = first._starts, first._firsts, last._ends
        both.energies = {name: energy for name, energy in last.energies.items() if name in first.energies}
        both.settle_again(sampler)
        return both

    def continue_after(self, before: Window, sampler: Sampler) -> Window:
        """Return the part of a settled window after the end of another."""
        assert before.end is not None
        rest = Window(self.name, before.end)
        rest.end, rest._starts, rest._ends = self.end, before._ends, self._ends
        rest.energies = {name: energy for name, energy in self.energies.items() if name in before.energies}
        rest.settle_again(sampler)
        return rest

    @property
    def end_ns(self) -> int:
        """Its end on the host's clock; its start while it is open."""
        return (self.end or self.start).host_ns

    def _has(self, names: Collection[str]) -> bool:
        return all(n in self.energies for n in names)

    def is_marked(self, names: Collection[str]) -> bool:
        """Return whether it is open and its start is marked: before its end only a first tick may have to be noted."""
        return self.end is None and all(n in self._starts for n in names)

    def so_far(self, sampler: Sampler, end: Edge) -> Mapping[str, Energy]:
        """Return the joules up to a provisional end, without ending the window."""
        probe = Window(self.name, self.start.copy_resolved())
        probe.end = end.copy_resolved()
        probe._starts.update(self._starts)
        probe._firsts.update(self._firsts)
        probe.settle(sampler, DeviceClocks(), list(sampler.series), force=True)
        return probe.energies

    def seconds(self, device: bool) -> float:
        """Return the length of the window on the device's or the host's clock."""
        if self.end is None:
            return 0.0
        return max(self.end.time_ns(device) - self.start.time_ns(device), 0) * 1e-9

    def _mark(self, sampler: Sampler, edge: Edge, marks: dict[str, Mark], names: Collection[str], force: bool) -> None:
        cpu = None if edge.cpu is None else OwnCpu.of(edge.cpu)
        for name in names:
            series = sampler.series[name]
            time_ns = edge.time_ns(on_device(series.domain))
            if name not in marks and (force or series.covers(time_ns)):
                marks[name] = series.mark(time_ns, cpu)

    def _find_first_anchors(self, sampler: Sampler) -> None:
        """Keep the first tick inside the window, since the window may outlast the memory of the ticks."""
        for name, anchors in sampler.anchors.items():
            if name not in self._firsts:
                first = anchors.history.first_after(self.start.time_ns(on_device(sampler.series[name].domain)))
                if first is not None:
                    self._firsts[name] = first

    def _energy(self, domain: Domain, anchors: CounterAnchors, end: Edge) -> Energy:
        """Return joules by the counter between its ticks, and by the samples at both ends (see `tessera.anchors`)."""
        name, device = domain.name, on_device(domain)
        return anchors.history.energy(
            self.start.time_ns(device),
            self._starts[name],
            end.time_ns(device),
            self._ends[name],
            self._firsts.get(name),
        )


class Monitor:
    """Sensors, one sampler thread, and the windows being measured. One per process is enough (`default`)."""

    def __init__(self, sensors: Sequence[Sensor], missing: Sequence[Capability] = ()) -> None:
        self.sampler = Sampler(sensors)
        self.clocks = DeviceClocks()
        self.missing = tuple(missing)
        self._lock = threading.Lock()
        self._pending: dict[int, Window] = {}
        self._waiting: dict[int, Window] = {}  # open windows that wait for a tick; only the sampler's thread uses it
        self._ticks, self._warned_untracked = list[list[Anchor]](), False
        self._open_counts: dict[int, int] = {}  # open windows by thread
        self._met = 0  # how often a window was opened while one of another thread was open
        self._regions: dict[str, RegionTotal] = {}
        self.sampler.on_read(self._after_read)
        _monitors.add(self)

    def start(self) -> Monitor:
        """Start sampling; return self."""
        self.sampler.start()
        return self

    def stop(self) -> None:
        """Wait (briefly) for the windows just closed, then stop sampling and release the sensors.

        Windows read later keep what was measured.
        """
        self.settle_all(LAST_WAIT_S)
        self.sampler.stop()
        self._settle_pending(LAST_SETTLE_NS)

    def abandon(self) -> None:
        """Stop measuring in a forked child: locks and threads are the parent's."""
        self._lock = threading.Lock()
        self._pending, self._waiting = {}, {}
        self.clocks = DeviceClocks()
        self.sampler.abandon()

    # -- windows --------------------------------------------------------------------------------------------

    def open(self, name: str, *, nested: bool = False) -> Window:
        """Begin a window now; this reads at most two clocks on the caller's thread.

        `nested`: it lies within another window of its name, which already has its joules.
        """
        window = Window(name, self._edge())
        window.nested = nested
        window.met = self._met
        own = self._open_counts.get(window.thread, 0)
        if len(self._open_counts) > (own > 0):
            self._met += 1
        self._open_counts[window.thread] = own + 1
        if len(self._pending) < MAX_PENDING:
            self._pending[id(window)] = window  # a dict assignment is atomic, so the user's thread needs no lock
        elif not self._warned_untracked:
            self._warned_untracked = True
            _log.warning(
                "more than %d scopes wait for the sensor: further ones are measured when read, but missing from the "
                "totals of their regions",
                MAX_PENDING,
            )
        return window

    def _edge(self) -> Edge:
        edge, sampler = self.clocks.edge(), self.sampler
        if sampler.read_cpu is not None:
            edge.cpu = cpu = sampler.read_cpu()
            if sampler.cpu_edges is not None:
                sampler.cpu_edges.append((edge.host_ns, cpu))
        return edge

    def close(self, window: Window) -> None:
        """End a window now."""
        window.end = self._edge()
        window.overlaps = window.met != self._met
        if len(self._pending) < MAX_PENDING:
            self._pending[id(window)] = window  # again, since it may have waited for its end in `_waiting`
        left = self._open_counts.get(window.thread, 0) - 1
        if left > 0:
            self._open_counts[window.thread] = left
        else:
            self._open_counts.pop(window.thread, None)

    def read(self, window: Window, timeout_s: float = 5.0, everything: bool = False) -> dict[str, Energy]:
        """Return a window's joules by domain; wait for the sensor to catch up. An open window gives those so far.

        Waits only for the counted domains, unless you ask for `everything`: HBM power is a one-second average.
        """
        names = list(self.sampler.series) if everything else self.sampler.counted_domains()
        if window.end is None:
            now = Edge(time.monotonic_ns())
            now.cpu = self.sampler.read_cpu() if self.sampler.read_cpu is not None else None
            self.sampler.wait_for(now.host_ns, timeout_s, names)
            self.clocks.resolve(window.start)
            return dict(window.so_far(self.sampler, now))
        self.clocks.resolve(window.start, wait=True)
        self.clocks.resolve(window.end, wait=True)
        last_ns = max(window.end.time_ns(True), window.end.host_ns)
        if not window.settle(self.sampler, self.clocks, names):
            self.sampler.wait_for(last_ns, timeout_s, names)
            window.settle(self.sampler, self.clocks, names, force=True)
        self._report(window)
        return dict(window.energies)

    def _after_read(self) -> None:
        """On the sampler's thread: renew clock anchors, and settle the windows whose data have come."""
        self.clocks.renew()
        least_ns, most_ns = SETTLE_NS
        self._settle_pending(min(max(round(self.sampler.spare_s * 1e9), least_ns), most_ns))

    def _settle_pending(self, slice_ns: int) -> None:
        """Settle windows for a limited time, since the sensors must be read again."""
        now = time.monotonic_ns()
        until = now + slice_ns
        counted = self.sampler.counted_domains()
        self._wake_waiting(now)
        for key, window in list(self._pending.items()):
            end = window.end
            stale = end is not None and now - end.host_ns > GIVE_UP_NS and end.event is None
            if window.settle(self.sampler, self.clocks, counted, force=stale):
                self._pending.pop(key, None)
                self._report(window)
            elif window.is_marked(counted):  # do not look at it each time: there may be thousands of open scopes
                if len(self._waiting) < MAX_PENDING and not window._firsts.keys() >= self.sampler.anchors.keys():
                    self._waiting[key] = window
                self._pending.pop(key, None)
                if window.end is not None:  # it was closed in this moment
                    self._pending[key] = window
            if time.monotonic_ns() > until:
                break

    def _wake_waiting(self, now: int) -> None:
        """Look again at open windows when a tick has come; forget those for which none will come."""
        before, self._ticks = self._ticks, [a.history.anchors[-1:] for a in self.sampler.anchors.values()]
        if self._ticks != before:
            self._pending.update(self._waiting)
            self._waiting.clear()
        if self._waiting and now - next(iter(self._waiting.values())).start.host_ns > GIVE_UP_NS:
            self._waiting = {k: w for k, w in self._waiting.items() if now - w.start.host_ns <= GIVE_UP_NS}

    def _report(self, window: Window) -> None:
        """Add a settled window to its region, once."""
        with self._lock:
            if window.reported:
                return
            window.reported = True
            name = window.name
            if window.nested:
                return
            if name not in self._regions and len(self._regions) >= MAX_REGIONS:
                name = OTHER_REGION
            if name not in self._regions:
                self._regions[name] = RegionTotal(window)
            self._regions[name].add(window, self)

    def total(self, window: Window) -> Energy:
        """Return the joules of all counted domains of a settled window together."""
        return self._sum_counted(window, [n for n in self.sampler.counted_domains() if n in window.energies])

    def total_by_scope(self, window: Window) -> dict[Scope, Energy]:
        """Return the same, with what the process itself uses apart from what all on the machine use."""
        by_scope: dict[Scope, list[str]] = {}
        for name in self.sampler.counted_domains():
            if name in window.energies:
                by_scope.setdefault(self.sampler.series[name].domain.scope, []).append(name)
        return {scope: self._sum_counted(window, names) for scope, names in by_scope.items()}

    def _sum_counted(self, window: Window, names: Sequence[str]) -> Energy:
        gpu = any(on_device(self.sampler.series[n].domain) for n in names)
        return sum_domains([window.energies[n] for n in names], window.seconds(gpu))

    def note_steps(self, start: Edge, end: Edge, period_s: float = 0.0) -> list[str]:
        """Return notes on domains in step with what ran: by their counter, else by the period (not for means)."""
        notes: list[str | None] = []
        with self.sampler.lock:
            for name in self.sampler.counted_domains():
                domain, anchors = self.sampler.series[name].domain, self.sampler.anchors[name]
                device = on_device(domain)
                notes.append(anchors.history.note_step(start.time_ns(device), end.time_ns(device)))
                if domain.hold is not Hold.MEAN and not len(anchors) and is_in_step(period_s, domain.resolution_s):
                    notes.append(
                        f"{domain.name}: in step with the sensor: it looks every {domain.resolution_s * 1e3:.3g} ms, "
                        f"and the work repeats every {period_s * 1e3:.3g} ms; its samples may be off, and there is no "
                        "energy counter to tell"
                    )
        return [note for note in notes if note is not None]

    # -- what was measured ----------------------------------------------------------------------------------

    def settle_all(self, timeout_s: float = 5.0) -> None:
        """Wait until every closed window is settled or the time is over."""
        deadline = time.monotonic() + timeout_s
        for key, window in list(self._pending.items()):
            if window.end is not None:
                self.read(window, max(deadline - time.monotonic(), 0.0))
                self._pending.pop(key, None)

    def regions(self) -> list[RegionEnergy]:
        """Return all settled windows by name, the most joules first. A window inside another of its name is part of it.

        Windows of one name that overlap (threads, asyncio tasks) are a call each; a moment in several counts once. The
        errors of windows are independent and add in quadrature, except the level error, which all share.
        """
        with self._lock:
            rows = [
                RegionEnergy(
                    name=name,
                    calls=r.calls,
                    energy=r.energy(self),
                    start_ns=r.start_ns,
                    end_ns=r.end_ns,
                    overlaps=r.overlaps,
                )
                for name, r in self._regions.items()
            ]
        return sort_regions(rows)

    def process_regions(self) -> ProcessRegions:
        """Return the regions with the times they cover, for merging those of several processes."""
        regions = self.regions()
        with self._lock:
            stretches = {r.name: self._regions[r.name].stretches(self) for r in regions}
        return ProcessRegions(pid=os.getpid(), parent_pid=os.getppid(), regions=regions, stretches=stretches)


_default: Monitor | None = None
_default_lock = threading.Lock()


def default() -> Monitor:
    """Return the process's own monitor, started at first use: all visible GPUs, RAPL, or a model of the chip."""
    global _default  # noqa: PLW0603  (the one process-wide monitor)
    if _default is None:
        with _default_lock:
            if _default is None:
                discovered = discover()
                me = find_rank()
                is_first = me is None or me.rank == 0  # only one of all ranks warns
                if discovered.modelled_only and is_first and REGIONS_VARIABLE not in os.environ:  # else `measure` warns
                    _log.warning("no power sensor is readable here: joules are MODELLED (see `tessera doctor`)")
                _default = Monitor(discovered.sensors, discovered.missing).start()
    return _default


def use(monitor: Monitor | None) -> None:
    """Replace the process's monitor (by a replay, a test, a chosen sensor); None returns to discovery."""
    global _default
    with _default_lock:
        old, _default = _default, monitor
    if old is not None and old is not monitor:
        old.stop()


def _after_fork() -> None:
    """Forget the monitor in a forked child, which has no sampler thread; it makes its own when it first measures."""
    global _default, _default_lock
    _default, _default_lock = None, threading.Lock()
    for monitor in list(_monitors):
        monitor.abandon()


def _at_exit() -> None:
    if _default is None:
        return
    folder = os.environ.get(REGIONS_VARIABLE)
    if folder:
        _default.settle_all()
        write_regions(Path(folder), _default.process_regions())
    _default.stop()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
