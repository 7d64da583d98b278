"""A zone: power domains under one cap, their controller, and what the sensor says of them."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..errors import TesseraError
from ..hardware import host_cpu, identify_board
from ..monitor.sampler import Sampler
from ..units import format_power
from .bucket import FIRST_BURST, MIN_DUTY, STUCK_DUTY, Cap, Command, Controller
from .meter import Reading
from .node import domain_key
from .pace import Pacer, Passed
from .tokens import Tally

# No reading for so long while work runs: the duty goes on by what is known of the load.
BLIND_NS = 500_000_000
# A sensor that smears tells of work for so many times its blur after that has ended (5% of an exponential's are left).
_SMEARED = 3.0


@dataclass(slots=True)
class Zone:
    """`names` are the domains whose sum is capped; `pacers` those whose work spends it."""

    key: str
    names: Sequence[str]
    pacers: list[Pacer]
    board: str = ""  # what the device is called, for a zone without a sensor
    caps: dict[int, Cap] = field(default_factory=dict)
    controller: Controller | None = None
    notes: dict[str, str] = field(default_factory=dict)
    command: Command = field(default_factory=Command)
    read_ns: int | None = None
    asked_ns: int = 0
    blind: bool = False
    inside: bool = False
    latest: dict[int, tuple[float, int]] = field(default_factory=dict)
    tally: Tally | None = None  # None: a bucket of joules
    _duties: deque[tuple[int, float]] = field(default_factory=lambda: deque([(0, 1.0)], maxlen=256))
    _points: int = -1  # that had ended at the last reading
    _looked: int = -1  # and at the last look

    def hold(self, cap: Cap, owner: int) -> None:
        """Add a cap; the tightest holds."""
        self.caps[owner] = cap

    def release(self, owner: int) -> None:
        """Take a cap away."""
        self.caps.pop(owner, None)

    def tightest(self, sampler: Sampler) -> Cap | None:
        """The lowest cap, over the shortest window that the sensor can tell."""
        caps = list(self.caps.values())
        if not caps:
            return None
        shortest = min(c.window_s for c in caps)
        return Cap(min(c.power_w for c in caps), max(shortest, resolution_s(sampler, self.names)))

    def read(self, sampler: Sampler, now_ns: int) -> Reading | None:
        """The mean power since the last reading; None when there is nothing new."""
        with sampler.lock:
            series = [sampler.series[n] for n in self.names if n in sampler.series and not sampler.is_silent(n)]
            newest = [s.last_ns - round(s.domain.lag_s * 1e9) for s in series if s.last_ns is not None]
            if not series or len(newest) < len(series):
                return None
            end_ns, start_ns = min(newest), self.read_ns
            if start_ns is None:
                self.read_ns = end_ns
                return None
            if end_ns <= start_ns:
                return None
            marks = [(s.mark(start_ns), s.mark(end_ns)) for s in series]
        self.read_ns = end_ns
        if any(b.covered_s <= a.covered_s for a, b in marks):
            return None  # a gap: nothing is known of this span
        powers = [(b.joules - a.joules) / (b.covered_s - a.covered_s) for a, b in marks]
        self.latest = {domain_key(s.domain.name): (p, end_ns) for s, p in zip(series, powers, strict=True)}
        return Reading(end_ns, (end_ns - start_ns) * 1e-9, sum(powers)) if math.isfinite(sum(powers)) else None

    def steer(self, sampler: Sampler, reading: Reading | None, now_ns: int, *, cap: Cap | None = None) -> Command:
        """What the pacers should do by this zone's cap, or by the node's."""
        cap = cap or self.tightest(sampler)
        if cap is None:
            self.controller = None
            return self._set(Command(), now_ns)
        controller = self._controller(cap, sampler)
        ended = sum(p.passed().points for p in self.pacers)
        active = ended != self._looked or self.inside or any(p.queued() for p in self.pacers)
        self._looked = ended
        if self.tally is not None:
            controller.rescale(self.tally.note(self._passed(), now_ns))
        if reading is not None:
            self.asked_ns = now_ns
            self.blind = False
            duty = self._duty_of(reading)
            # With hardly a token spent what is drawn is not ours, and says nothing of our work.
            learns = active and (self.tally is None or duty >= 0.5 * MIN_DUTY)
            moved = ended != self._points  # since the last reading: looks come more often than a slow sensor's
            told = controller.observe(
                reading.power_w, reading.seconds, duty=duty, active=learns, moved=moved,
                rested=active and self._rested(reading, sampler),
            )  # fmt: skip
            self._points = ended
            self._set(told, now_ns)
        elif active and now_ns - self.asked_ns > BLIND_NS:
            self.blind = True
            self.notes["blind"] = (
                f"{' and '.join(self.names) or self.key}: no power reading came for a while; the cap was then held by "
                "prediction"
            )
            self._set(controller.predict(), now_ns)
        elif self.tally is not None:
            self._set(controller.command, now_ns)  # the first tokens are counted before the first reading
        if controller.floor_w is not None:
            self.notes["floor"] = self._too_low(cap, controller.floor_w)
        else:
            self.notes.pop("floor", None)
        return self.command

    def begin(self, sampler: Sampler, now_ns: int) -> Command:
        """Before the first reading: by the catalogue's figures, or by what was learnt before."""
        cap = self.tightest(sampler)
        return self.command if cap is None else self._set(self._controller(cap, sampler).command, now_ns)

    def count(self, tally: Tally | None) -> None:
        """Spend tokens from now on, or joules again: what was learnt is in other units, the duty is gone on from."""
        self.tally, self.controller = tally, None

    @property
    def token_j(self) -> float | None:
        """What a token was learnt to cost above idle."""
        if self.tally is None or self.controller is None or self.tally.token_s == 0.0:
            return None
        return (self.controller.burst_w - self.controller.idle_w) * self.tally.token_s

    def _passed(self) -> Passed:
        """The counts of all pacers together; they end when the last of them does."""
        found = [p.passed() for p in self.pacers]
        return Passed(
            worked_s=sum(p.worked_s for p in found), tokens=sum(p.tokens for p in found),
            ended_s=max((p.ended_s for p in found), default=0.0),
        )  # fmt: skip

    def _duty_of(self, reading: Reading) -> float:
        """That of a reading's span: as commanded, or as tokens were really spent."""
        if self.tally is None:
            return self.duty_between(reading.start_ns, reading.time_ns)
        return self.tally.duty_between(reading.start_ns, reading.time_ns) or 0.0

    def _rested(self, reading: Reading, sampler: Sampler) -> bool:
        """Whether all work here waited from a reading's first moment to its last, and for what is smeared into it."""
        since = [p.passed().resting_ns for p in self.pacers]
        until_ns = reading.start_ns - round(_SMEARED * self._blur_s(sampler) * 1e9)
        return bool(since) and all(ns is not None and ns <= until_ns for ns in since)

    def _blur_s(self, sampler: Sampler) -> float:
        return max((sampler.series[n].domain.blur_s for n in self.names if n in sampler.series), default=0.0)

    def _too_low(self, cap: Cap, floor_w: float) -> str:
        """That a cap cannot be held, why, and what to do; three digits tell the cap from what is drawn."""
        said = f"{self.key}: {format_power(cap.power_w, 3)} cannot be held: "
        drawn, fix = format_power(floor_w, 3), f"Raise the cap above {format_power(floor_w, 3)}"
        if self.key == "cpu":
            return (
                f"{said}the CPUs of this machine draw {drawn} while this program waits (idling, other processes). "
                "Longer waits do not help, so it now waits for half of the time at most. "
                f"{fix}, or end what else runs"
            )
        work = "of the time at work" if self.tally is None else "of the pace of Tessera's own kernels"
        who = "this node draws" if self.key == "node" else "the GPU draws"
        return f"{said}{who} {drawn} with {MIN_DUTY:.0%} {work} (idling, other processes). {fix}"

    def restart(self, now_ns: int) -> None:
        """Work begins after a pause: what was measured meanwhile is not of it, nor what was noted before."""
        self.read_ns, self.asked_ns = None, now_ns
        self.notes.clear()
        if self.controller is not None:
            self.controller.floor_w = None

    def obey(self, command: Command, now_ns: int) -> None:
        """Another process leads the node; should it end, its ratio is where we go on from."""
        self.controller = None
        self._set(command, now_ns)

    def follow(self, command: Command, now_ns: int) -> None:
        """What the pacers were really told (another zone may be stricter): readings are judged by that."""
        if command.duty != self._duties[-1][1]:
            self._duties.append((now_ns, command.duty))

    def duty_between(self, start_ns: int, end_ns: int) -> float:
        """The mean duty that was commanded in a span."""
        total, until = 0.0, end_ns
        for time_ns, duty in reversed(self._duties):
            begin = max(time_ns, start_ns)
            if begin < until:
                total += duty * (until - begin)
                until = begin
            if time_ns <= start_ns:
                break
        return total / (end_ns - start_ns) if until <= start_ns else self._duties[0][1]

    def _set(self, command: Command, now_ns: int) -> Command:
        if self.tally is not None:
            command = replace(command, token_s=self.tally.token_s)
        self.command = command
        self.follow(command, now_ns)
        return command

    def _controller(self, cap: Cap, sampler: Sampler) -> Controller:
        if self.controller is None:
            boards = [sampler.series[n].domain.label if n in sampler.series else "" for n in self.names]
            known = list(zip(self.names, boards, strict=True)) or [(self.key, self.board)]
            idle_w, burst_w = figures(known, cap.power_w)
            self.controller = Controller(
                cap, idle_w=idle_w, burst_w=burst_w, blur_s=self._blur_s(sampler),
                stuck_duty=STUCK_DUTY if self.key == "cpu" else MIN_DUTY,
            )  # fmt: skip
            if self.command.ratio > 0:  # taken over from another leader
                self.controller.go_on_from(self.command)
        elif cap != self.controller.cap:
            self.controller.set_cap(cap)
        return self.controller


def resolution_s(sampler: Sampler, names: Sequence[str]) -> float:
    """The coarsest resolution among domains; a shorter window cannot be told."""
    return max((sampler.series[n].domain.resolution_s for n in names if n in sampler.series), default=0.0)


def figures(domains: Sequence[tuple[str, str]], cap_w: float) -> tuple[float, float]:
    """Idle and working watts of (domain, board) to begin with, before anything was measured: the catalogue's."""
    idle_w, burst_w = 0.0, 0.0
    for name, board in domains:
        device, cpu = None, name.startswith(("cpu", "dram"))
        with contextlib.suppress(TesseraError):
            device = host_cpu() if cpu else identify_board(board)
        if device is None or device.tdp_w is None:
            burst_w += 2.0 * cap_w / len(domains)  # unknown hardware: begin careful, the sensor corrects it
            continue
        idle = device.idle_context_w or device.idle_w
        idle_w += idle.value if idle else 0.0
        burst_w += device.tdp_w.value * (1.0 if cpu else FIRST_BURST)
    return min(idle_w, 0.9 * cap_w), burst_w
