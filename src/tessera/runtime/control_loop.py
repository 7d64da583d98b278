"""The thread that holds caps: power readings in, commands to the pace points out. One per process.

::

    Schedule ──PacedCall──► ControlLoop ──► PowerZone (caps, Controller) per GPU, and one for the node
                                ▲                │ PaceCommand
      monitor's samples ────────┘                ▼
                                              Pacer (control word in pinned memory) ──► points in the stream

It runs while a schedule with a cap is in a call or its queued work runs, and sleeps otherwise. It makes no CUDA call.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from dataclasses import replace
from typing import Any

from .. import monitor
from ..monitor.sampler import Sampler
from ..op import hints
from ..units import ScopedPower
from .cap_report import CapTracker, MeanPower
from .controller import Cap, PaceCommand
from .launches import Cadence, Countdown, OwnLaunches, PointPlacer
from .node_bucket import NodeBucket, NodeMember, job_key
from .node_lease import LeasedPower, LeaseReader
from .pacer import make_pacer
from .power_zone import PowerZone, TokenTally

_log = logging.getLogger("tessera")

# An H200's ring gives a sample every 20 ms: a shorter tick would find nothing new.
TICK_NS = 20_000_000
# After the last call: the sensor is late, and queued work still runs.
LINGER_NS = 500_000_000
_ALONE_S = 0.1


class ControlLoop:
    """The zones, pacers and live schedules of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._zones: dict[str, PowerZone] = {}
        self._cadences: dict[int, Cadence] = {}  # by CUDA device; -1 is the host
        self._trackers: list[CapTracker] = []
        self._node: NodeBucket | None = None
        self._lease: LeaseReader | None = None  # where there is a node's cap
        self._job_ratio = 0.0
        self.countdown = Countdown()
        self.own = OwnLaunches(self.find_cadence, self.countdown)
        self._idle = True
        self._stopping = False
        self._warned: set[str] = set()
        self.job = job_key()

    # -- what schedules call --------------------------------------------------------------------------------

    def enter(self, tracker: CapTracker) -> None:
        """A call under a cap begins."""
        with self._wake:
            if tracker not in self._trackers:
                self._open(tracker)
            elif tracker.tokens != self.own.tokens:  # called in turn with another: choose again what suits both
                self._choose_tokens(self._trackers)
            now = time.monotonic_ns()  # a first call has compiled its points by now: no reading was missed meanwhile
            tracker.running += 1
            tracker.calls += 1
            tracker.until_ns = now
            if tracker.tokens != "joules":
                self._listen()
            if self._idle:
                self._idle = False
                for zone in self._zones.values():
                    zone.restart(now)
                self._wake.notify_all()

    def leave(self, tracker: CapTracker) -> None:
        """A call has ended."""
        with self._lock:
            tracker.running -= 1
            tracker.until_ns = time.monotonic_ns()
            if tracker.tokens != "joules":
                self._listen()

    def find_cadence(self, result: Any = None) -> Cadence:
        """The points of the device that work goes to: that of a CUDA result, the current CUDA device, or the host."""
        device = result.get_device() if getattr(result, "is_cuda", False) else _current_device()
        cadence = self._cadences.get(device)
        if cadence is not None:
            return cadence
        with self._lock:
            if device not in self._cadences:
                self._cadences[device] = Cadence(make_pacer(device))
                self._share_pacers()
            return self._cadences[device]

    def wait_for_readings(self, tracker: CapTracker, timeout_s: float = 1.0) -> None:
        """Wait until the sensor's readings include a schedule's last call; not while one runs."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not (self._idle or tracker.running or tracker.is_up_to_date()):
            time.sleep(0.01)

    def _listen(self) -> None:
        self.own.enable(any(t.running and t.tokens != "joules" for t in self._trackers))

    def _choose_tokens(self, trackers: list[CapTracker]) -> None:
        """One bucket for each device: of the tokens that all of these count, or of joules where they differ."""
        kinds = {t.tokens for t in trackers}
        tokens = kinds.pop() if len(kinds) == 1 else "joules"
        for tracker in trackers:
            if tracker.tokens != tokens:
                tracker.notes["tokens"] = (
                    f"schedules with other tokens than {tracker.tokens} ran at the same time: all were held by joules"
                )
        if tokens != self.own.tokens and trackers:
            self.own.tokens = tokens
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
        pacer = self.find_cadence().pacer
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
            zone.caps[id(tracker)] = self._node_cap(Cap(tracker.cap.power_w, tracker.window_s), tracker.cap)
            if zone.key != "node":
                zone.begin(sampler, now)
        if self._node is not None:
            self._look_at_node(self._node, sampler, {}, now)
        self._command(now)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tessera-pace", daemon=True)
            self._thread.start()

    def _node_cap(self, cap: Cap, asked: ScopedPower) -> Cap:
        """The cap of a node with the lease of its governor: the tighter of both, or the lease where it is followed."""
        leased_w = None if self._lease is None or asked.scope != "node" else self._lease.allow_w()
        if leased_w is None:
            return cap
        power_w = max(leased_w, 1.0)  # a node without a share is as slow as it can be
        return replace(cap, power_w=power_w if isinstance(asked, LeasedPower) else min(cap.power_w, power_w))

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
        """Device i of torch is the i-th GPU that NVML shows to this process; the node's zone has all of them."""
        gpus = [n for n in monitor.default().sampler.counted_domains() if n.startswith("gpu")]
        for device, cadence in self._cadences.items():
            own = "cpu" if device < 0 else gpus[device] if device < len(gpus) else f"gpu{device}"
            for key in (own, "node"):
                zone = self._zones.get(key)
                if zone is not None and cadence.pacer not in zone.pacers:
                    zone.pacers.append(cadence.pacer)

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
            except Exception as exc:  # noqa: BLE001  (a sensor, the node's file: the last command stays, work goes on)
                self._warn_once(f"{type(exc).__name__}: {exc}: the power cap continues with its last waits")
                time.sleep(_ALONE_S)

    def _tick(self) -> None:
        sampler = monitor.default().sampler
        names = sorted({n for z in self._zones.values() if z.caps for n in z.names})
        read = [z.read_ns for z in self._zones.values() if z.caps and z.read_ns is not None]
        began = time.monotonic_ns()
        sampler.wait_for(min(read, default=began - TICK_NS) + TICK_NS // 2, timeout_s=_ALONE_S, names=names)
        left_ns = TICK_NS - (time.monotonic_ns() - began)
        if left_ns > 0:
            time.sleep(left_ns * 1e-9)
        with self._lock:
            self._steer(sampler, time.monotonic_ns())

    def _steer(self, sampler: Sampler, now: int) -> None:
        readings = {}
        running = any(t.running for t in self._trackers)
        for tracker in self._trackers:
            if self._lease is not None and tracker.cap.scope == "node":
                asked = Cap(tracker.cap.power_w, tracker.window_s)
                cap = self._zones["node"].caps[id(tracker)] = self._node_cap(asked, tracker.cap)
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
        queued = any(c.pacer.count_queued() for c in self._cadences.values())
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
            return
        self._job_ratio = view.job_ratio
        if zone is None or cap is None:
            return
        if not view.leads:
            zone.obey(view.command, now)
            return
        power_w, reading = view.power_w(now, zone.latest), readings.get("node")
        if zone.controller is None:
            zone.begin(sampler, now)
        if zone.controller is not None:  # with more processes than GPUs some take turns
            gpus = sum(n.startswith("gpu") for n in zone.names)
            zone.controller.shared = 0 < gpus < sum(m.cap_w > 0 for m in view.members)
        # our own reading, with the power of everybody's domains
        reading = None if reading is None or power_w is None else replace(reading, power_w=power_w)
        zone.steer(sampler, reading, now, cap=view.cap)
        node.set_command(zone.command, now)

    def _command(self, now: int) -> None:
        """Give each pacer the strictest command of its zones, or the job's if that is stricter still."""
        for cadence in self._cadences.values():
            zones = [z for z in self._zones.values() if cadence.pacer in z.pacers]
            command = max((z.command for z in zones if z.caps), key=lambda c: c.ratio, default=None)
            if command is None:
                command = PaceCommand()
            elif self._job_ratio > command.ratio:
                command = replace(command, ratio=self._job_ratio)
            cadence.pacer.obey(command)
            cadence.adapt(cadence.pacer.counts(), command)
            for zone in zones:
                zone.follow(command, now)

    def _warn_once(self, text: str) -> None:
        about = text.partition(":")[0]  # once for each zone or reason: this may come fifty times a second
        if about not in self._warned:
            self._warned.add(about)
            _log.warning("%s", text)

    def _retire(self, now: int) -> None:
        """Forget schedules that ended a while ago; with the last one, stop ticking."""
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
        """Nothing waits any more, queued points included."""
        for cadence in self._cadences.values():
            cadence.pacer.obey(PaceCommand())
        if self._node is not None:
            self._node.leave()

    def stop(self) -> None:
        """At exit: nobody must wait for what is queued."""
        self._stopping = True
        self.own.enable(False)
        if self._thread is not None:
            self._thread.join(timeout=0.5)
        self.release_all()


class PacedCall:
    """A context in which a schedule's cap is held: what `schedule` enters around a call or a block."""

    __slots__ = ("_loop", "_placer", "_tracker")

    def __init__(self, tracker: CapTracker, *, each_call: bool) -> None:
        self._loop, self._tracker = get_loop(), tracker
        spends = tracker.tokens != "joules"
        self._placer = PointPlacer(self._loop.find_cadence, self._loop.countdown, each_call=each_call, tokens=spends)

    def __enter__(self) -> None:
        self._loop.enter(self._tracker)
        try:
            self._placer.__enter__()
        except BaseException:
            self._loop.leave(self._tracker)
            raise

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: Any) -> None:
        try:
            self._placer.__exit__(kind, exc, trace)
        finally:
            self._loop.leave(self._tracker)


def _current_device() -> int:
    """The current CUDA device; -1 where there is none, or CUDA is not in use."""
    torch: Any = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else -1


_loop: ControlLoop | None = None
_making = threading.Lock()


def get_loop() -> ControlLoop:
    """The loop of this process."""
    global _loop  # noqa: PLW0603  (one per process)
    if _loop is not None:
        return _loop
    with _making:
        if _loop is None:
            _loop = ControlLoop()
            atexit.register(_loop.stop)
        return _loop


def _reset_after_fork() -> None:
    """In a forked child: thread and locks are the parent's."""
    global _loop, _making
    _loop, _making = None, threading.Lock()
    hints.listener = None


os.register_at_fork(after_in_child=_reset_after_fork)
