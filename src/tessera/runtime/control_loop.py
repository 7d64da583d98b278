"""The thread that holds caps: it reads the power, and gives commands to the pacers. There is one per process.

::

    Schedule ──PacedCall──► ControlLoop ──► PowerZone (caps, Controller) per GPU, and one for the node
                                ▲                │ PaceCommand
      monitor's samples ────────┘                ▼
                                              Pacer ──► pauses of the GPU, or waits on the host

The thread runs while a schedule with a cap is in a call or was in one a moment ago, and sleeps otherwise. Well below
the cap, it looks ten times a second and nothing waits; near the cap, it looks at every sample of the sensor. It makes
no CUDA call.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .. import monitor
from ..monitor.sampler import Sampler
from ..op import hints
from ..units import ScopedPower
from .cap_report import CapTracker, MeanPower
from .controller import Cap, PaceCommand
from .cpu_points import CpuPoints
from .gpu_pacer import GpuPacer, make_pacer
from .node_bucket import NodeBucket, NodeMember, job_key
from .node_lease import LeasedPower, LeaseReader
from .pacer import HostPacer, Pacer
from .power_zone import PowerZone, TokenTally
from .token_launches import OwnLaunches, TokenSpender

_log = logging.getLogger("tessera")

# An H200's ring gives a sample every 20 ms: a shorter tick would find nothing new.
TICK_NS = 20_000_000
# WATCH_NS: time between two looks if nothing is near its cap. FRESH_NS: how long that is unknown after a start.
WATCH_NS = 100_000_000
FRESH_NS = 400_000_000
# A call that ended less than this long ago may only have launched its work.
JUST_NS = 250_000_000
# The loop goes on for this long after the last call: the sensor is late, and queued work still runs.
LINGER_NS = 500_000_000
_ALONE_S = 0.1


class ControlLoop:
    """The zones, the pacers and the schedules of this process that are in use."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._zones: dict[str, PowerZone] = {}
        self._spenders: dict[int, TokenSpender] = {}  # by CUDA device; -1 is the host
        self._trackers: list[CapTracker] = []
        self._node: NodeBucket | None = None
        self._lease: LeaseReader | None = None  # None unless a schedule caps the node
        self._job_ratio = 0.0
        self.own = OwnLaunches(self.find_spender)
        self._idle = True
        self._woken_ns = 0
        self._stopping = False
        self._warned: set[str] = set()
        self.job = job_key()

    # -- what schedules call --------------------------------------------------------------------------------

    def enter(self, tracker: CapTracker) -> None:
        """Note that a call under a cap begins."""
        with self._wake:
            if tracker not in self._trackers:
                self._open(tracker)
            # two schedules are called in turn: choose again the tokens that suit both
            elif tracker.tokens != self.own.tokens:
                self._choose_tokens(self._trackers)
            now = time.monotonic_ns()
            tracker.running += 1
            tracker.calls += 1
            tracker.until_ns = now
            if _current_device() < 0:
                self._end_lingering(tracker, now)
            if tracker.tokens != "joules":
                self._listen()
            if self._idle:
                self._idle, self._woken_ns = False, now
                for zone in self._zones.values():
                    zone.restart(now)
                self._wake.notify_all()

    def leave(self, tracker: CapTracker) -> None:
        """Note that a call has ended."""
        with self._lock:
            tracker.running -= 1
            tracker.until_ns = time.monotonic_ns()
            if tracker.tokens != "joules":
                self._listen()

    def find_spender(self) -> TokenSpender:
        """Return the pacer of the current CUDA device, or of the host, with the tokens that are spent there."""
        device = _current_device()
        spender = self._spenders.get(device)
        if spender is not None:
            return spender
        with self._lock:
            if device not in self._spenders:
                self._spenders[device] = TokenSpender(make_pacer(device))
                self._share_pacers()
            return self._spenders[device]

    @property
    def _pacers(self) -> list[Pacer]:
        return [s.pacer for s in self._spenders.values()]

    def wait_for_readings(self, tracker: CapTracker) -> None:
        """Wait, at most a second, until the readings include a schedule's last call; do not wait while a call runs."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not (self._idle or tracker.running or tracker.is_up_to_date()):
            time.sleep(0.01)

    def _listen(self) -> None:
        self.own.enable(any(t.running and t.tokens != "joules" for t in self._trackers))

    def _choose_tokens(self, trackers: list[CapTracker]) -> None:
        """Choose what the buckets of all devices count: what these schedules count, or joules if they differ."""
        kinds = {t.tokens for t in trackers}
        tokens = kinds.pop() if len(kinds) == 1 else "joules"
        for tracker in trackers:
            if tracker.tokens != tokens:
                tracker.notes["tokens"] = (
                    f"schedules with other tokens than {tracker.tokens} ran at the same time: all were held by joules"
                )
        if tokens != self.own.tokens and trackers:
            self.own.tokens = tokens
            for pacer in self._pacers:
                pacer.pace_by_tokens(tokens != "joules")
            for zone in self._zones.values():
                zone.count_tokens(None if tokens == "joules" else TokenTally())
            for tracker in self._trackers:
                tracker.switch_tokens(tokens)

    # -- making zones ---------------------------------------------------------------------------------------

    def _open(self, tracker: CapTracker) -> None:
        sampler = monitor.default().sampler
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.init()
        pacer = self.find_spender().pacer
        pacer.pace_by_tokens(self.own.tokens != "joules")
        now = time.monotonic_ns()
        if (tracker.cap.scope == "node" or self.job) and self._node is None:
            self._node = NodeBucket()
        if tracker.cap.scope == "node" and self._lease is None:
            self._lease = LeaseReader()
        zones = self._zones_under(tracker.cap, sampler)
        tracker.open(zones, pacer, sampler, now)
        self._trackers.append(tracker)
        self._choose_tokens([t for t in self._trackers if t.running or t is tracker])  # not those that only linger
        tracker.switch_tokens(self.own.tokens)
        for zone in zones:
            if not zone.caps:
                zone.restart(now)
        self._hold(tracker, zones, now)
        if self._node is not None:
            self._look_at_node(self._node, sampler, {}, now)
        self._command(now)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tessera-pace", daemon=True)
            self._thread.start()

    def _hold(self, tracker: CapTracker, zones: Iterable[PowerZone], now: int) -> None:
        """Put a schedule's cap in force in its zones."""
        for zone in zones:
            zone.caps[id(tracker)] = self._node_cap(tracker)
            if zone.key != "node":
                zone.begin(monitor.default().sampler, now)

    def _end_lingering(self, entered: CapTracker, now: int) -> None:
        """End the caps of schedules without a call, if another schedule enters one: a CPU has nothing queued."""
        ended = [t for t in self._trackers if t.held and not t.running]
        if not ended and entered.held:
            return
        for tracker in ended:
            tracker.close()  # it still takes the readings of its last call
            for zone in self._zones.values():
                zone.caps.pop(id(tracker), None)
        if not entered.held:
            entered.resume()
            entered.switch_tokens(self.own.tokens)
        self._hold(entered, entered.zones, now)
        self._command(now)

    def _node_cap(self, tracker: CapTracker) -> Cap:
        """Return a schedule's cap under a lease: the tighter of both, or the lease if the cap follows it."""
        power_w = tracker.cap.power_w
        if self._lease is not None and tracker.cap.scope == "node" and (leased_w := self._lease.allow_w()) is not None:
            leased_w = max(leased_w, 1.0)  # a node without a share is as slow as it can be
            tracker.note_lease(leased_w, self._lease.path)
            power_w = leased_w if isinstance(tracker.cap, LeasedPower) else min(power_w, leased_w)
        return Cap(power_w, tracker.window_s)

    def _zones_under(self, cap: ScopedPower, sampler: Sampler) -> list[PowerZone]:
        counted = sampler.counted_domains()
        gpus = [n for n in counted if n.startswith("gpu")]
        if cap.scope == "node":
            return [self._zone("node", counted)]
        if _current_device() >= 0:
            return [self._zone(name, [name]) for name in gpus] or [self._zone(f"gpu{_current_device()}", [])]
        return [self._zone("cpu", counted)]  # only CPUs compute here: the cap is for all of them together

    def _zone(self, key: str, names: list[str]) -> PowerZone:
        if key not in self._zones:
            board = "" if names or _current_device() < 0 else sys.modules["torch"].cuda.get_device_name()
            tally = None if self.own.tokens == "joules" else TokenTally()
            self._zones[key] = PowerZone(key, names, [], board, tally=tally)
            self._share_pacers()
        return self._zones[key]

    def _share_pacers(self) -> None:
        """Give zones the pacers of their devices: torch's device i is the i-th GPU that NVML shows to this process."""
        gpus = [n for n in monitor.default().sampler.counted_domains() if n.startswith("gpu")]
        for device, spender in self._spenders.items():
            own = "cpu" if device < 0 else gpus[device] if device < len(gpus) else f"gpu{device}"
            for key in (own, "node"):
                zone = self._zones.get(key)
                if zone is not None and spender.pacer not in zone.pacers:
                    zone.pacers.append(spender.pacer)

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            with self._wake:
                if self._idle:
                    self._wake.wait(_ALONE_S)
            if self._idle:
                continue
            try:
                self._tick()
            except Exception as exc:  # noqa: BLE001  (a sensor or the node's file: the last command stays, work goes on)
                self._warn_once(f"{type(exc).__name__}: {exc}: the power cap continues with its last waits")
                time.sleep(_ALONE_S)

    def _tick(self) -> None:
        sampler = monitor.default().sampler
        names = sorted({n for z in self._zones.values() if z.caps for n in z.names})
        read = [z.read_ns for z in self._zones.values() if z.caps and z.read_ns is not None]
        began = time.monotonic_ns()
        tick_ns = TICK_NS if self._is_near(began) else WATCH_NS
        time.sleep(tick_ns * 1e-9)
        # After the pause, so that what is judged is the newest: power may have risen meanwhile.
        newest_ns = min(read, default=began) + tick_ns - TICK_NS // 2
        sampler.wait_for(newest_ns, timeout_s=_ALONE_S, names=names)
        with self._lock:
            self._steer(sampler, time.monotonic_ns())

    def _is_near(self, now: int) -> bool:
        """Return whether every sample counts: something waits or may soon have to, or too little is known yet."""
        return now - self._woken_ns < FRESH_NS or any(z.is_near_cap(now) for z in self._zones.values() if z.caps)

    def _steer(self, sampler: Sampler, now: int) -> None:
        readings = {}
        running = any(t.running or now - t.until_ns < JUST_NS for t in self._trackers)
        for tracker in self._trackers:
            if self._lease is not None and tracker.cap.scope == "node" and tracker.held:
                cap = self._zones["node"].caps[id(tracker)] = self._node_cap(tracker)
                if isinstance(tracker.cap, LeasedPower):
                    tracker.cap = replace(tracker.cap, power_w=cap.power_w)
        for key, zone in self._zones.items():
            zone.running = running
            readings[key] = zone.read(sampler)
            if key != "node":
                zone.steer(sampler, readings[key], now)
        if self._node is not None:
            self._look_at_node(self._node, sampler, readings, now)
        self._command(now)
        queued = any(p.count_queued() for p in self._pacers)
        for tracker in self._trackers:
            if tracker.running or queued:
                tracker.until_ns = now
            tracker.add_readings(readings)
        for zone in self._zones.values():
            for note in zone.notes.values():
                self._warn_once(note)
        self._retire(now)

    def _look_at_node(
        self, node: NodeBucket, sampler: Sampler, readings: dict[str, MeanPower | None], now: int
    ) -> None:
        zone = self._zones.get("node")
        cap = zone.tightest(sampler) if zone else None
        own = max((z.command.ratio for k, z in self._zones.items() if k != "node"), default=0.0)
        latest = zone.latest if zone else {}
        member = NodeMember(
            os.getpid(), cap.power_w if cap else 0.0, cap.window_s if cap else 0.0, own, self.job, latest
        )
        view = node.look(member, now)
        if view is None:
            readings["node"] = None
            return
        self._job_ratio = view.job_ratio
        if zone is None or cap is None:
            return
        power_w, reading = view.power_w(now, zone.latest), readings.get("node")
        # the reading's time, with the power of the domains of all processes
        reading = None if reading is None or power_w is None else replace(reading, power_w=power_w)
        readings["node"], zone.processes = reading, sum(bool(m.power_w) for m in view.members)
        if not view.leads:
            zone.obey(view.command, now)
            return
        if zone.controller is None:
            zone.begin(sampler, now)
        if zone.controller is not None:  # with more processes than GPUs, some processes take turns
            gpus = sum(n.startswith("gpu") for n in zone.names)
            zone.controller.shared = 0 < gpus < sum(m.cap_w > 0 for m in view.members)
        zone.steer(sampler, reading, now, cap=view.cap)
        node.set_command(zone.command, now)

    def _command(self, now: int) -> None:
        """Give each pacer the strictest command of its zones, or the job's if the job's is stricter still."""
        for spender in self._spenders.values():
            pacer = spender.pacer
            zones = [z for z in self._zones.values() if pacer in z.pacers]
            command = max((z.command for z in zones if z.caps), key=lambda c: c.ratio, default=None)
            if command is None:
                command = PaceCommand()
            elif self._job_ratio > command.ratio:
                command = replace(command, ratio=self._job_ratio)
            pacer.obey(command)
            if self.own.tokens != "joules":
                spender.adapt(pacer.counts(), command)
            for zone in zones:
                zone.follow(command, now)
                if isinstance(pacer, GpuPacer) and pacer.failure is not None:
                    zone.notes["pause"] = pacer.failure

    def _warn_once(self, text: str) -> None:
        about = text.partition(":")[0]  # warn once for each zone or reason: this may come fifty times a second
        if about not in self._warned:
            self._warned.add(about)
            _log.warning("%s", text)

    def _retire(self, now: int) -> None:
        """Forget schedules that ended a while ago, and stop ticking after the last one."""
        for tracker in list(self._trackers):
            if now - tracker.until_ns > LINGER_NS:
                self._trackers.remove(tracker)
                for zone in self._zones.values():
                    zone.caps.pop(id(tracker), None)
                tracker.close()
                self._choose_tokens([t for t in self._trackers if t.running])
        if not self._trackers:
            self.release_all()
            self._idle = True

    def release_all(self) -> None:
        """End all waits, also those of queued work."""
        for pacer in self._pacers:
            pacer.obey(PaceCommand())
        if self._node is not None:
            self._node.leave()

    def stop(self) -> None:
        """End all waits at exit: nobody must wait for queued work."""
        self._stopping = True
        self.own.enable(False)
        if self._thread is not None:
            self._thread.join(timeout=0.5)
        self.release_all()
        for pacer in self._pacers:
            if isinstance(pacer, GpuPacer):
                pacer.stop()


class PacedCall:
    """A context in which a schedule's cap is held: `schedule` enters one around a call or a block.

    On a GPU, this object does nothing in the program itself, unless the program spends tokens.
    """

    __slots__ = ("_each_call", "_loop", "_points", "_spender", "_tracker")

    def __init__(self, tracker: CapTracker, *, each_call: bool) -> None:
        self._loop, self._tracker, self._each_call = get_loop(), tracker, each_call
        self._points: CpuPoints | None = None
        self._spender: TokenSpender | None = None

    def __enter__(self) -> None:
        self._loop.enter(self._tracker)
        try:
            spender = self._loop.find_spender()
            if self._loop.own.tokens != "joules":
                self._spender = spender
                spender.enter_call()
            elif isinstance(spender.pacer, HostPacer):
                self._points = CpuPoints(spender.pacer, each_call=self._each_call)
                self._points.__enter__()
        except BaseException:
            self._loop.leave(self._tracker)
            raise

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: Any) -> None:
        try:
            if self._points is not None:
                self._points.__exit__(kind, exc, trace)
            if self._spender is not None:
                self._spender.leave_call()
        finally:
            self._loop.leave(self._tracker)


def _current_device() -> int:
    """Return the current CUDA device; -1 where there is none, or CUDA is not in use."""
    torch: Any = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else -1


_loop: ControlLoop | None = None
_making = threading.Lock()


def get_loop() -> ControlLoop:
    """Return the loop of this process."""
    global _loop  # noqa: PLW0603  (one per process)
    if _loop is not None:
        return _loop
    with _making:
        if _loop is None:
            _loop = ControlLoop()
            atexit.register(_loop.stop)
        return _loop


def _reset_after_fork() -> None:
    """Forget the loop in a forked child: its thread and its locks are the parent's."""
    global _loop, _making
    _loop, _making = None, threading.Lock()
    hints.listener = None


os.register_at_fork(after_in_child=_reset_after_fork)
