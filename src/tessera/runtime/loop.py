"""The thread that closes the loop: power readings in, commands to the pace points out. One per process.

::

    Schedule ──hold/release──► Loop ──► Zone (cap, Controller) per GPU, and one for the node
                                ▲            │ Command
      monitor's samples ────────┘            ▼
                                          Pacer (control word in pinned memory) ──► points in the stream

It runs while a schedule with a cap is inside a call or its queued work runs, and sleeps otherwise. It makes no CUDA
call.
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
from .bucket import Cap, Command
from .held import Held
from .launches import Cadence, Countdown, OwnLaunches
from .meter import Reading
from .node import Member, NodeBucket, job_key
from .pace import pacer_of
from .tokens import Tally
from .zone import Zone

_log = logging.getLogger("tessera")

# One ring sample of an H200 comes every 20 ms: a shorter tick would find nothing new.
TICK_NS = 20_000_000
# After the last call: the sensor is late, and queued work still runs.
LINGER_NS = 500_000_000
_ALONE_S = 0.1


class Loop:
    """Zones, pacers and live schedules of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._zones: dict[str, Zone] = {}
        self._cadences: dict[int, Cadence] = {}  # by CUDA device; -1 is the host
        self._held: list[Held] = []
        self._node: NodeBucket | None = None
        self._job_ratio = 0.0
        self.countdown = Countdown()
        self.own = OwnLaunches(self.here, self.countdown)
        self._idle = True
        self._stopping = False
        self._said: set[str] = set()
        self.job = job_key()

    # -- what schedules call --------------------------------------------------------------------------------

    def enter(self, held: Held) -> None:
        """A call under a cap begins."""
        with self._wake:
            if held not in self._held:
                self._open(held)
            elif held.tokens != self.own.tokens:  # called in turn with another: what suits both
                self._agree(self._held)
            now = time.monotonic_ns()  # a first call has compiled its points by now: no reading was missed meanwhile
            held.inside += 1
            held.calls += 1
            held.until_ns = now
            if held.tokens != "joules":
                self._listen()
            if self._idle:
                self._idle = False
                for zone in self._zones.values():
                    zone.restart(now)
                self._wake.notify_all()

    def leave(self, held: Held) -> None:
        """A call has ended."""
        with self._lock:
            held.inside -= 1
            held.until_ns = time.monotonic_ns()
            if held.tokens != "joules":
                self._listen()

    def here(self, result: Any = None) -> Cadence:
        """The points of the device that work goes to: that of a CUDA result, the current CUDA device, or the host."""
        device = result.get_device() if getattr(result, "is_cuda", False) else _device()
        found = self._cadences.get(device)
        return found if found is not None else self._add_cadence(device)

    def settle(self, held: Held, timeout_s: float = 1.0) -> None:
        """Wait until the sensor has told of a schedule's last call; not while one runs."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not (self._idle or held.inside or held.told()):
            time.sleep(0.01)

    def _listen(self) -> None:
        self.own.hear(any(h.inside and h.tokens != "joules" for h in self._held))

    def _agree(self, among: list[Held]) -> None:
        """One bucket for each device: of what all of these count, and of joules where they differ."""
        kinds = {h.tokens for h in among}
        tokens = kinds.pop() if len(kinds) == 1 else "joules"
        for held in among:
            if held.tokens != tokens:
                held.notes["tokens"] = f"other schedules were held beside one of {held.tokens}: joules were for all"
        if tokens != self.own.tokens and among:
            self.own.tokens = tokens
            for zone in self._zones.values():
                zone.count(None if tokens == "joules" else Tally())
            for held in self._held:
                held.count(tokens)

    # -- making zones ---------------------------------------------------------------------------------------

    def _open(self, held: Held) -> None:
        sampler = monitor.default().sampler
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.init()
        here = self.here()
        now = time.monotonic_ns()
        if (held.cap.scope == "node" or self.job) and self._node is None:
            self._node = NodeBucket()
        zones = self._zones_of(held.cap, sampler)
        held.open(zones, here.pacer, sampler, now)
        self._held.append(held)
        self._agree([h for h in self._held if h.inside or h is held])  # not those that only linger
        held.count(self.own.tokens)
        for zone in zones:
            if not zone.caps:
                zone.restart(now)
            zone.hold(Cap(held.cap.power_w, held.window_s), id(held))
            if zone.key != "node":
                zone.begin(sampler, now)
        if self._node is not None:
            self._look_at_node(self._node, sampler, {}, now)
        self._command(now)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tessera-pace", daemon=True)
            self._thread.start()

    def _zones_of(self, cap: ScopedPower, sampler: Sampler) -> list[Zone]:
        counted = sampler.counted_domains()
        gpus = [n for n in counted if n.startswith("gpu")]
        if cap.scope == "node":
            return [self._zone("node", counted)]
        if _device() >= 0:
            return [self._zone(name, [name]) for name in gpus] or [self._zone(f"gpu{_device()}", [])]
        return [self._zone("cpu", counted)]  # nothing but CPUs computes here: the cap is theirs together

    def _zone(self, key: str, names: list[str]) -> Zone:
        if key not in self._zones:
            board = "" if names or _device() < 0 else sys.modules["torch"].cuda.get_device_name()
            self._zones[key] = Zone(key, names, [], board, tally=None if self.own.tokens == "joules" else Tally())
            self._share_pacers()
        return self._zones[key]

    def _add_cadence(self, device: int) -> Cadence:
        with self._lock:
            if device not in self._cadences:
                self._cadences[device] = Cadence(pacer_of(device))
                self._share_pacers()
            return self._cadences[device]

    def _share_pacers(self) -> None:
        """Device i of torch is the i-th GPU that NVML shows to this process; the node's zone has them all."""
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
            except Exception as exc:  # noqa: BLE001  (a sensor, the node's file: the last command stands, work goes on)
                self._say(f"{type(exc).__name__}: {exc}: the power cap goes on with its last waits")
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
        inside = any(h.inside for h in self._held)
        for key, zone in self._zones.items():
            zone.inside = inside
            readings[key] = zone.read(sampler, now)
            if key != "node":
                zone.steer(sampler, readings[key], now)
        if self._node is not None:
            self._look_at_node(self._node, sampler, readings, now)
        self._command(now)
        queued = any(c.pacer.queued() for c in self._cadences.values())
        for held in self._held:
            if held.inside or queued:
                held.until_ns = now
            held.account(readings)
        self._warn()
        self._retire(now)

    def _look_at_node(self, node: NodeBucket, sampler: Sampler, readings: dict[str, Reading | None], now: int) -> None:
        zone = self._zones.get("node")
        cap = zone.tightest(sampler) if zone else None
        own = max((z.command.ratio for k, z in self._zones.items() if k != "node"), default=0.0)
        member = Member(
            os.getpid(), cap.power_w if cap else 0.0, cap.window_s if cap else 0.0, own, self.job,
            zone.latest if zone else {},
        )  # fmt: skip
        view = node.look(member, now)
        if view is None:
            return
        self._job_ratio = view.job_ratio
        if zone is None or cap is None:
            return
        if view.leads:
            power_w = view.power_w(now, zone.latest)
            if zone.controller is None:
                zone.begin(sampler, now)
            if zone.controller is not None:  # more of them than GPUs: some take turns
                gpus = sum(n.startswith("gpu") for n in zone.names)
                zone.controller.shared = 0 < gpus < sum(m.cap_w > 0 for m in view.members)
            zone.steer(sampler, _of_the_node(readings.get("node"), power_w), now, cap=view.cap)
            node.command(zone.command, power_w or 0.0, now)
        else:
            zone.obey(view.command, now)

    def _command(self, now: int) -> None:
        """The strictest of all zones, for each pacer; the job's, if that is stricter still."""
        for cadence in self._cadences.values():
            commands = [z.command for z in self._zones.values() if cadence.pacer in z.pacers and z.caps]
            if not commands:
                command = Command()
            else:
                command = max(commands, key=lambda c: c.ratio)
                if self._job_ratio > command.ratio:
                    command = replace(command, ratio=self._job_ratio)
            cadence.pacer.obey(command)
            cadence.adapt(cadence.pacer.passed(), command)
            for zone in self._zones.values():
                if cadence.pacer in zone.pacers:
                    zone.follow(command, now)

    def _warn(self) -> None:
        for zone in self._zones.values():
            for note in zone.notes.values():
                self._say(note)

    def _say(self, text: str) -> None:
        about = text.partition(":")[0]  # once for each zone or reason: this may come fifty times a second
        if about not in self._said:
            self._said.add(about)
            _log.warning("%s", text)

    def _retire(self, now: int) -> None:
        """Forget schedules that ended a while ago; with the last one, stop ticking."""
        for held in list(self._held):
            if now - held.until_ns > LINGER_NS:
                self._held.remove(held)
                for zone in self._zones.values():
                    zone.release(id(held))
                held.close()
                self._agree([h for h in self._held if h.inside])
        if not self._held:
            self.release_all()
            self._idle = True

    def release_all(self) -> None:
        """Nothing waits any more, queued points included."""
        for cadence in self._cadences.values():
            cadence.pacer.obey(Command())
        if self._node is not None:
            self._node.leave()

    def stop(self) -> None:
        """At exit: what is queued must not be waited for."""
        self._stopping = True
        self.own.hear(False)
        if self._thread is not None:
            self._thread.join(timeout=0.5)
        self.release_all()


def _device() -> int:
    """The current CUDA device; -1 where there is none, or CUDA is not in use."""
    torch: Any = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else -1


def _of_the_node(own: Reading | None, power_w: float | None) -> Reading | None:
    """Our own reading, with the watts of everybody's domains."""
    return None if own is None or power_w is None else Reading(own.time_ns, own.seconds, power_w)


_loop: Loop | None = None
_making = threading.Lock()


def loop() -> Loop:
    """The loop of this process."""
    global _loop  # noqa: PLW0603  (one per process)
    if _loop is not None:
        return _loop
    with _making:
        if _loop is None:
            _loop = Loop()
            atexit.register(_loop.stop)
        return _loop


def _forget() -> None:
    """In a forked child: thread and locks are the parent's."""
    global _loop, _making
    _loop, _making = None, threading.Lock()
    hints.listener = None


os.register_at_fork(after_in_child=_forget)
