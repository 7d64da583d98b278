"""The monitor of this process: its sensors, its sampler, the windows that are open or not yet settled."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from ..joules import sum_domains, sum_windows
from ..schema import Capability, Energy, RegionEnergy
from ..sensors.base import Sensor
from ..sensors.discover import discover
from .cuda import DeviceClocks, Edge
from .regions import REGIONS_VARIABLE, by_joules, write_regions
from .sampler import Sampler
from .window import Window, on_device

_log = logging.getLogger("tessera")

# A window whose data have not come after this is settled with what there is (its coverage says so).
GIVE_UP_NS = 10_000_000_000
MAX_REGIONS = 10_000
# A window waits here for a second or two; more than this are opened faster than they can be settled.
MAX_PENDING = 50_000
# How long the sampler's thread settles windows before it reads again: what is left until the next sensor is due, within
# these. A counter whose ticks are sought is due every 3 ms, and thousands of short scopes take seconds to settle.
SETTLE_NS = (4_000_000, 200_000_000)
LAST_WAIT_S = 0.5
OTHER_REGION = "(other regions)"


_monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()


class _Region:
    """All windows of one name, added up as they settle."""

    __slots__ = ("calls", "end_ns", "energy", "start_ns")

    def __init__(self, energy: Energy, window: Window) -> None:
        self.calls = 1
        self.energy = energy
        self.start_ns = window.start.host_ns
        self.end_ns = window.end.host_ns if window.end else self.start_ns

    def add(self, energy: Energy, window: Window) -> None:
        self.calls += 1
        self.energy = sum_windows([self.energy, energy])
        self.start_ns = min(self.start_ns, window.start.host_ns)
        self.end_ns = max(self.end_ns, window.end.host_ns if window.end else 0)


class Monitor:
    """Sensors, one sampler thread, and the windows being measured. One per process is enough (`default`)."""

    def __init__(self, sensors: Sequence[Sensor], missing: Sequence[Capability] = ()) -> None:
        self.sampler = Sampler(sensors)
        self.clocks = DeviceClocks()
        self.missing = tuple(missing)
        self._lock = threading.Lock()
        self._pending: dict[int, Window] = {}
        self._said_untracked = False
        self._regions: dict[str, _Region] = {}
        self.sampler.on_read(self._after_read)
        _monitors.add(self)

    def start(self) -> Monitor:
        """Start sampling; returns self."""
        self.sampler.start()
        return self

    def stop(self) -> None:
        """Wait (briefly) for the windows just closed, then stop sampling and release the sensors.

        Windows read later keep what was measured.
        """
        self.settle_all(LAST_WAIT_S)
        self.sampler.stop()
        self._settle_pending(SETTLE_NS[1])

    def abandon(self) -> None:
        """In a forked child: locks and threads are the parent's. A monitor given by hand measures nothing here."""
        self._lock = threading.Lock()
        self._pending = {}
        self.clocks = DeviceClocks()
        self.sampler.abandon()

    # -- windows --------------------------------------------------------------------------------------------

    def open(self, name: str) -> Window:
        """Begin a window now: two clock readings at most on the caller's thread."""
        window = Window(name, self.clocks.edge())
        if len(self._pending) < MAX_PENDING:
            self._pending[id(window)] = window  # a dict assignment is atomic: no lock on the user's path
        else:
            self._say_untracked()
        return window

    def _say_untracked(self) -> None:
        if not self._said_untracked:
            self._said_untracked = True
            _log.warning(
                "more than %d scopes wait for the sensor: further ones are measured when read, but missing from the "
                "totals of their regions",
                MAX_PENDING,
            )

    def close(self, window: Window) -> None:
        """End a window now."""
        window.end = self.clocks.edge()

    def read(self, window: Window, timeout_s: float = 5.0, everything: bool = False) -> dict[str, Energy]:
        """The joules by domain of a closed window; waits for the sensor to catch up. An open one gives so far.

        Only the counted domains are waited for, unless `everything` is asked: HBM power is a one-second average.
        """
        names = list(self.sampler.series) if everything else self.sampler.counted()
        if window.end is None:
            now = Edge(time.monotonic_ns())
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
        """On the sampler's thread: renew clock anchors, settle the windows whose data have come."""
        self.clocks.renew()
        least_ns, most_ns = SETTLE_NS
        self._settle_pending(min(max(round(self.sampler.spare_s * 1e9), least_ns), most_ns))

    def _settle_pending(self, slice_ns: int) -> None:
        """Only the counted domains, and only for a slice of time: the sensors must be read again."""
        now = time.monotonic_ns()
        until = now + slice_ns
        counted = self.sampler.counted()
        for key, window in list(self._pending.items()):
            end = window.end
            stale = end is not None and now - end.host_ns > GIVE_UP_NS and end.event is None
            if window.settle(self.sampler, self.clocks, counted, force=stale):
                self._pending.pop(key, None)
                self._report(window)
            if time.monotonic_ns() > until:
                break

    def _report(self, window: Window) -> None:
        """Add a settled window to its region, once."""
        with self._lock:
            if window.reported:
                return
            window.reported = True
            name = window.name
            if name not in self._regions and len(self._regions) >= MAX_REGIONS:
                name = OTHER_REGION
            energy = self.total(window)
            if name in self._regions:
                self._regions[name].add(energy, window)
            else:
                self._regions[name] = _Region(energy, window)

    def total(self, window: Window) -> Energy:
        """The counted domains of a settled window, together."""
        names = [n for n in self.sampler.counted() if n in window.energies]
        gpu = any(on_device(self.sampler.series[n].domain) for n in names)
        return sum_domains([window.energies[n] for n in names], window.seconds(gpu))

    # -- what was measured ----------------------------------------------------------------------------------

    def settle_all(self, timeout_s: float = 5.0) -> None:
        """Wait until every closed window is settled, or the time is over."""
        deadline = time.monotonic() + timeout_s
        for key, window in list(self._pending.items()):
            if window.end is not None:
                self.read(window, max(deadline - time.monotonic(), 0.0))
                self._pending.pop(key, None)

    def regions(self) -> list[RegionEnergy]:
        """All settled windows by name, the most joules first.

        The errors of the windows are independent and add in quadrature, down to the level error they all share.
        """
        with self._lock:
            gain = max((d.gain_error for d in self.sampler.domains if d.counted), default=0.0)
            rows = [
                RegionEnergy(
                    name=name,
                    calls=r.calls,
                    energy=dataclasses.replace(r.energy, error_j=max(r.energy.error_j, gain * abs(r.energy.joules))),
                    start_ns=r.start_ns,
                    end_ns=r.end_ns,
                )
                for name, r in self._regions.items()
            ]
        return by_joules(rows)


_default: Monitor | None = None
_default_lock = threading.Lock()


def default() -> Monitor:
    """The process's own monitor, started at first use: every GPU this process may see, RAPL, or the model."""
    global _default  # noqa: PLW0603  (the one process-wide monitor)
    if _default is None:
        with _default_lock:
            if _default is None:
                found = discover()
                if found.modelled_only and REGIONS_VARIABLE not in os.environ:  # `tessera measure` has said it
                    _log.warning("no power sensor is readable here: joules are MODELLED (see `tessera doctor`)")
                _default = Monitor(found.sensors, found.missing).start()
    return _default


def use(monitor: Monitor | None) -> None:
    """Replace the process's monitor (a replay, a test, a hand-picked sensor); None goes back to discovery."""
    global _default
    with _default_lock:
        old, _default = _default, monitor
    if old is not None and old is not monitor:
        old.stop()


def _after_fork() -> None:
    """A forked child has no sampler thread: let it make its own when it first measures."""
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
        write_regions(Path(folder), _default.regions())
    _default.stop()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
