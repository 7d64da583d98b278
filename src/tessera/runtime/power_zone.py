"""A power zone: the domains under one cap, their controller, and the sensor's readings of them.

If the bucket counts tokens of Tessera's own kernels, a board that spends `rate` tokens a second draws ::

    idle_w + token_j x rate         so the bucket is refilled at rate = (cap_w - idle_w) / token_j

The sensor corrects `token_j`, as it corrects `burst_w` for a bucket of joules. The controller is the same, in other
units: its duty is the rate as a share of the fastest pace that our kernels reached by themselves (1 / `token_s`), and
its `burst_w` is what the board would draw at that pace. Other work spends no tokens: its joules are counted with the
tokens beside it.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..errors import TesseraError
from ..hardware import host_cpu, identify_board
from ..monitor.sampler import Sampler
from ..schema import Domain
from ..units import format_power
from .cap_report import MeanPower
from .controller import MIN_DUTY, STUCK_DUTY, STUCK_GPU_DUTY, Cap, Controller, PaceCommand
from .pacer import PaceCounts, Pacer

# Without a reading for this long while work runs, the duty is predicted from what is known of the load.
BLIND_NS = 500_000_000
# With a sensor at least this fine, a load runs freely at first: the sensor shows its power before it has drawn much.
PROMPT_S = 0.05
# Above this share of a cap, every sample counts, and for NEAR_NS afterwards: a host that is fast enough only now and
# then draws little in between (compiled BERT on an H200: 360 to 420 W for up to two seconds, then 620 W; cap 487 W).
NEAR = 0.78
NEAR_NS = 5_000_000_000
# A sensor that smears still shows work for this many times its blur after the work ended (5% of an exponential remains
# then).
_SMEARED = 3.0
# A pace is measured over at least this much work: one launch between two looks tells too little.
ENOUGH_S = 0.005
# The fastest pace is forgotten over this time if it is no longer reached. Only the units change with it, not the rate.
FORGET_S = 10.0


@dataclass(slots=True)
class PowerZone:
    """The domains `names`, whose sum is capped, and the `pacers` of the devices whose work draws that power."""

    key: str
    names: Sequence[str]
    pacers: list[Pacer]
    board: str = ""  # the device's name, for a zone without a sensor
    caps: dict[int, Cap] = field(default_factory=dict)  # by owner; the tightest applies
    controller: Controller | None = None
    notes: dict[str, str] = field(default_factory=dict)
    command: PaceCommand = field(default_factory=PaceCommand)
    read_ns: int | None = None
    observed_ns: int = 0
    blind: bool = False
    running: bool = False  # whether a call is under way
    # by the name that is used among the node's processes
    latest: dict[str, tuple[float, int]] = field(default_factory=dict)
    processes: int = 1  # how many processes' power is in the node's reading
    tally: TokenTally | None = None  # None: a bucket of joules
    _duties: deque[tuple[int, float]] = field(default_factory=lambda: deque([(0, 1.0)], maxlen=256))
    _near_ns: int = -NEAR_NS  # when something last waited or was near its cap
    _points: int = -1  # points that had ended at the last reading

    def tightest(self, sampler: Sampler) -> Cap | None:
        """Return the lowest cap, over the shortest window that the sensor can resolve."""
        caps = list(self.caps.values())
        if not caps:
            return None
        shortest = min(c.window_s for c in caps)
        return Cap(min(c.power_w for c in caps), max(shortest, self.resolution_s(sampler)))

    def domains(self, sampler: Sampler) -> list[Domain]:
        """Return the domains that the sampler has."""
        return [sampler.series[n].domain for n in self.names if n in sampler.series]

    def resolution_s(self, sampler: Sampler) -> float:
        """Return the coarsest resolution among the domains; a shorter window cannot be measured."""
        return max((d.resolution_s for d in self.domains(sampler)), default=0.0)

    def blur_s(self, sampler: Sampler) -> float:
        """Return the largest blur among the domains."""
        return max((d.blur_s for d in self.domains(sampler)), default=0.0)

    def is_own_power(self, sampler: Sampler) -> bool:
        """Return whether the watts here are the program's own, not the machine's."""
        return {d.scope for d in self.domains(sampler)} == {"process"}

    def read(self, sampler: Sampler) -> MeanPower | None:
        """Return the mean power since the last reading; None when there is nothing new."""
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
        self.latest = {_node_name(s.domain): (p, end_ns) for s, p in zip(series, powers, strict=True)}
        return MeanPower(end_ns, (end_ns - start_ns) * 1e-9, sum(powers)) if math.isfinite(sum(powers)) else None

    def steer(self, sampler: Sampler, reading: MeanPower | None, now_ns: int, *, cap: Cap | None = None) -> PaceCommand:
        """Choose and return what the pacers should do for this zone's cap, or for the node's."""
        cap = cap or self.tightest(sampler)
        if cap is None:
            self.controller = None
            return self._set(PaceCommand(), now_ns)
        controller = self._get_controller(cap, sampler)
        active = self.running or any(p.count_queued() for p in self.pacers)
        if self.tally is not None:
            controller.rescale(self.tally.add_counts(self._sum_counts(), now_ns))
        if reading is not None:
            self._observe(controller, reading, sampler, now_ns, active=active)
        elif active and now_ns - self.observed_ns > BLIND_NS:
            self.blind = True
            self.notes["blind"] = (
                f"{' and '.join(self.names) or self.key}: no power reading came for a while; the cap was then held by "
                "prediction"
            )
            self._set(controller.predict(), now_ns)
        elif self.tally is not None:
            self._set(controller.command, now_ns)  # the first tokens are counted before the first reading
        if controller.floor_w is not None:
            self.notes["floor"] = self._describe_floor(cap, controller.floor_w, own=self.is_own_power(sampler))
        else:
            self.notes.pop("floor", None)
        return self.command

    def _observe(
        self, controller: Controller, reading: MeanPower, sampler: Sampler, now_ns: int, *, active: bool
    ) -> None:
        self.observed_ns, self.blind = now_ns, False
        ended = sum(p.counts().points for p in self.pacers)
        if self.tally is None:
            duty = self.duty_between(reading.start_ns, reading.time_ns)
        else:
            duty = self.tally.duty_between(reading.start_ns, reading.time_ns) or 0.0
        command = controller.observe(
            reading.power_w,
            reading.seconds,
            duty=duty,
            # With hardly a token spent, other work drew the power, so the reading does not describe ours.
            active=active and (self.tally is None or duty >= 0.5 * MIN_DUTY),
            # nothing waited, so the reading is of the load
            moved=ended != self._points or (self.tally is None and duty == 1.0),
            rested=active and self._rested_during(reading, sampler),
        )
        self._points = ended
        self._set(command, now_ns)

    def is_near_cap(self, now_ns: int) -> bool:
        """Return whether something waits here, or did lately, or soon may have to."""
        power_w = sum(p for p, _ in self.latest.values())
        if self.controller is None:
            return True
        if self.command.ratio > 0 or power_w > NEAR * self.controller.cap.power_w:
            self._near_ns = now_ns
        return now_ns - self._near_ns < NEAR_NS

    def begin(self, sampler: Sampler, now_ns: int) -> PaceCommand:
        """Return the command before the first reading, from the catalogue's figures or from what was learnt before."""
        cap = self.tightest(sampler)
        return self.command if cap is None else self._set(self._get_controller(cap, sampler).command, now_ns)

    def count_tokens(self, tally: TokenTally | None) -> None:
        """Count tokens from now on, or joules again: a new controller continues in the new units from the same duty."""
        self.tally, self.controller = tally, None

    @property
    def token_j(self) -> float | None:
        """Return the measured joules of a token above idle."""
        if self.tally is None or self.controller is None or self.tally.token_s == 0.0:
            return None
        return (self.controller.burst_w - self.controller.idle_w) * self.tally.token_s

    def _sum_counts(self) -> PaceCounts:
        """Add up the counts of all pacers; they end when the last of them does."""
        counts = [p.counts() for p in self.pacers]
        return replace(sum(counts, PaceCounts()), ended_s=max((c.ended_s for c in counts), default=0.0))

    def _rested_during(self, reading: MeanPower, sampler: Sampler) -> bool:
        """Return whether all work here waited during the whole reading, and during the time that is smeared into it."""
        since = [p.counts().resting_ns for p in self.pacers]
        until_ns = reading.start_ns - round(_SMEARED * self.blur_s(sampler) * 1e9)
        return bool(since) and all(ns is not None and ns <= until_ns for ns in since)

    def _describe_floor(self, cap: Cap, floor_w: float, *, own: bool = False) -> str:
        """Say that a cap cannot be held: why, what happens instead, what to do.

        Three digits tell the cap from the floor.
        """
        what = f"{self.key}: {format_power(cap.power_w, 3)} cannot be held: "
        floor = format_power(floor_w, 3)
        if self.key == "cpu" and not own:
            return (
                f"{what}the CPUs of this machine draw {floor} while this program waits (idling, other processes). "
                "Longer waits do not help, so it now waits for half of the time at most: the power is then this and "
                f"half of what the program draws at work. Raise the cap above {floor}, or end what else runs"
            )
        if self.key == "cpu":
            return (
                f"{what}this program and its children draw {floor}, by their CPU time, with {MIN_DUTY:.0%} of the time "
                f"at work. So that the program goes on, that stays as it is, at about {floor}. Raise the cap above it"
            )
        work = "of the time at work" if self.tally is None else "of the pace of Tessera's own kernels"
        who = "this node draws" if self.key == "node" else "the GPU draws"
        return (
            f"{what}{who} {floor} with {MIN_DUTY:.0%} {work} (idling, other processes). So that the program goes on, "
            f"it now has {STUCK_GPU_DUTY:.0%}, and the power is {floor} or a little more. Raise the cap above {floor}"
        )

    def restart(self, now_ns: int) -> None:
        """Forget the readings and notes from before a pause, after which work begins."""
        self.read_ns, self.observed_ns = None, now_ns
        self.notes.clear()
        if self.controller is not None:
            self.controller.floor_w = None

    def obey(self, command: PaceCommand, now_ns: int) -> None:
        """Obey another process, which leads the node. If that process ends, this one continues from its ratio."""
        self.controller = None
        self._set(command, now_ns)

    def follow(self, command: PaceCommand, now_ns: int) -> None:
        """Note the command that the pacers really follow (another zone may be stricter): readings are judged by it."""
        if command.duty != self._duties[-1][1]:
            self._duties.append((now_ns, command.duty))

    def duty_between(self, start_ns: int, end_ns: int) -> float:
        """Return the mean commanded duty in a span."""
        return _mean_between(self._duties, start_ns, end_ns)

    def _set(self, command: PaceCommand, now_ns: int) -> PaceCommand:
        if self.tally is not None:
            command = replace(command, token_s=self.tally.token_s)
        self.command = command
        self.follow(command, now_ns)
        return command

    def _get_controller(self, cap: Cap, sampler: Sampler) -> Controller:
        if self.controller is None:
            boards = [sampler.series[n].domain.label if n in sampler.series else "" for n in self.names]
            domains = list(zip(self.names, boards, strict=True)) or [(self.key, self.board)]
            idle_w, burst_w = guess_power(domains, cap.power_w)
            if self.is_own_power(sampler):
                idle_w = 0.0  # a program that waits draws nothing of its own
            if 0 < self.resolution_s(sampler) <= PROMPT_S:
                # the first readings come at once, and tell more than the catalogue
                burst_w = min(burst_w, NEAR * cap.power_w)
            stuck_duty = STUCK_DUTY if self.key == "cpu" else STUCK_GPU_DUTY
            if self.is_own_power(sampler):
                stuck_duty = MIN_DUTY  # nobody else draws it, and half of the time at work would be far above the cap
            blur_s = self.blur_s(sampler)
            self.controller = Controller(cap, idle_w=idle_w, burst_w=burst_w, blur_s=blur_s, stuck_duty=stuck_duty)
            if self.tally is not None or self.key == "cpu":
                self.controller.fastest_s = 0.0
            if self.command.ratio > 0:  # taken over from another leader
                self.controller.continue_from(self.command)
        elif cap != self.controller.cap:
            self.controller.set_cap(cap)
        return self.controller


def _node_name(domain: Domain) -> str:
    """Return a domain's name among the node's processes.

    If a "cpu0" is the watts of one process, every process has one, and they must add up.
    """
    return f"{domain.name} of {os.getpid()}" if domain.scope == "process" else domain.name


def guess_power(domains: Sequence[tuple[str, str]], cap_w: float) -> tuple[float, float]:
    """Return the idle and the working watts of (domain, board) before the first measurement, from the catalogue."""
    idle_w, burst_w = 0.0, 0.0
    for name, board in domains:
        device, cpu = None, name.startswith(("cpu", "dram"))
        with contextlib.suppress(TesseraError):
            device = host_cpu() if cpu else identify_board(board)
        if device is None or device.tdp_w is None:
            burst_w += 2.0 * cap_w / len(domains)  # unknown hardware: start low, the sensor corrects it
            continue
        idle = device.idle_context_w or device.idle_w
        idle_w += idle.value if idle else 0.0
        burst_w += device.tdp_w.value
    return min(idle_w, 0.9 * cap_w), burst_w


class TokenTally:
    """Tokens over time, from the counts and the clock of the waits."""

    def __init__(self) -> None:
        self.token_s = 0.0  # device seconds of a token at the fastest pace; 0 before any was seen
        self._seen: PaceCounts | None = None
        self._seen_ns = 0
        self._rates: deque[tuple[int, float]] = deque(maxlen=256)  # (since, tokens a second)
        self._recent = (0, 0.0, 0.0)  # tokens, seconds of work, seconds

    def add_counts(self, counts: PaceCounts, now_ns: int) -> float:
        """Take the counts; return the factor by which the fastest pace changed (1.0: not at all)."""
        was = self._seen
        if was is None or counts.ended_s < was.ended_s:
            self._seen, self._seen_ns = counts, now_ns
            return 1.0
        new, span_s = counts - was, counts.ended_s - was.ended_s
        if new.tokens <= 0 or span_s <= 0:
            return 1.0
        self._rates.append((self._seen_ns, new.tokens / span_s))
        self._seen, self._seen_ns = counts, now_ns
        tokens, worked_s, past_s = self._recent
        self._recent = (tokens + new.tokens, worked_s + new.worked_s, past_s + span_s)
        return self._update_pace()

    def _update_pace(self) -> float:
        tokens, worked_s, past_s = self._recent
        if worked_s < ENOUGH_S:
            return 1.0
        self._recent = (0, 0.0, 0.0)
        # Streams that work at the same time each count their own work, so their sum may exceed the time that has
        # passed.
        now_s, before_s = min(worked_s, past_s) / tokens, self.token_s
        if before_s == 0.0 or now_s < before_s:
            self.token_s = now_s
        else:
            self.token_s += (now_s - before_s) * -math.expm1(-past_s / FORGET_S)
        return before_s / self.token_s if before_s else 1.0

    def duty_between(self, start_ns: int, end_ns: int) -> float | None:
        """Return the mean rate in a span as a share of the fastest pace; None where nothing was counted yet."""
        if not self._rates or self.token_s == 0.0:
            return None
        return _mean_between(self._rates, start_ns, end_ns) * self.token_s


def _mean_between(steps: Sequence[tuple[int, float]], start_ns: int, end_ns: int) -> float:
    """Return the mean over a span of a value that changes in steps (since when, value).

    Before the first step, the first value holds.
    """
    total, until = 0.0, end_ns
    for since_ns, value in reversed(steps):
        begin = max(since_ns, start_ns)
        if begin < until:
            total += value * (until - begin)
            until = begin
        if since_ns <= start_ns:
            break
    return (total + steps[0][1] * (until - start_ns)) / (end_ns - start_ns)
