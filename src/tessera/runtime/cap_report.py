"""What a schedule's cap did: add up the readings of its time, and make the report from them. Memory is bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..monitor.sampler import Sampler
from ..schema import Basis
from ..units import ScopedPower, format_power
from .node_lease import LeasedPower
from .pacer import PaceCounts, Pacer

if TYPE_CHECKING:
    from .ballast_loop import BallastReport
    from .power_zone import PowerZone
    from .shaper import ShaperReport
    from .tuning.plan import Plan

# The controller learns the load's duty in this many seconds, or in two windows; windows in that time are reported
# separately.
FIRST_S = 0.5
# A reading that ends at most this long after the last call still belongs to the call: one sample of an H200's ring.
_TAIL_NS = 20_000_000


@dataclass(frozen=True, slots=True)
class MeanPower:
    """Mean power over a span that ends at `time_ns`."""

    time_ns: int
    seconds: float
    power_w: float

    @property
    def start_ns(self) -> int:
        """Return when the span begins."""
        return self.time_ns - round(self.seconds * 1e9)


class PowerMeter:
    """Adds up readings and slides a window of `window_s` over them; a gap between readings starts a new window."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self.first_s = max(FIRST_S, 2.0 * window_s)
        self.energy_j = 0.0
        self.seconds = 0.0
        self.windows = 0
        self.peak_w: float | None = None
        self.first_peak_w: float | None = None
        self._settled = (0.0, 0.0)  # joules and seconds after first_s
        # one window of (time_ns, joules so far), and one point before it
        self._sums: deque[tuple[int, float]] = deque()

    def add(self, reading: MeanPower) -> None:
        """Take the next reading."""
        joules = reading.power_w * reading.seconds
        self.energy_j += joules
        self.seconds += reading.seconds
        if self.seconds > self.first_s:
            self._settled = (self._settled[0] + joules, self._settled[1] + reading.seconds)
        sums = self._sums
        if not sums or abs(reading.start_ns - sums[-1][0]) > 1_000_000:
            sums.clear()
            sums.append((reading.start_ns, 0.0))
        sums.append((reading.time_ns, sums[-1][1] + joules))
        edge = reading.time_ns - round(self.window_s * 1e9)
        while len(sums) > 2 and sums[1][0] <= edge:
            sums.popleft()
        (t0, j0), (t1, j1) = sums[0], sums[1]
        if t0 <= edge:  # else there is no whole window yet
            at_edge = j0 + (j1 - j0) * (edge - t0) / (t1 - t0)
            self._add_window((sums[-1][1] - at_edge) / self.window_s)

    def _add_window(self, mean_w: float) -> None:
        self.windows += 1
        if self.seconds - self.window_s < self.first_s:
            self.first_peak_w = max(self.first_peak_w or 0.0, mean_w)
        else:
            self.peak_w = max(self.peak_w or 0.0, mean_w)

    @property
    def mean_w(self) -> float | None:
        """Return the mean power after the first seconds; if there was nothing after them, the mean power of all."""
        joules, seconds = self._settled
        if seconds > 0.2:
            return joules / seconds
        return self.energy_j / self.seconds if self.seconds > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneReport:
    """What was measured under the cap on one GPU, the CPUs or the node. None: the time was too short to tell.

    `mean_w` and `peak_w` (the highest mean of any window of `window_s`) leave out the beginning (half a second, or two
    windows), in which the controller learns the load; `first_peak_w` is the highest window of that time. `own` is true
    where the watts are those of this program and its children, not all that the machine draws. The node's watts are
    those of up to so many `processes` together.
    """

    zone: str
    domains: tuple[str, ...]
    basis: Basis
    window_s: float
    mean_w: float | None
    peak_w: float | None
    first_peak_w: float | None
    energy_j: float
    time_s: float
    own: bool = False
    processes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReport:
    """The tokens that launches of Tessera's own kernels spent. None: the time was too short to tell.

    `kind` is "launches", "warps" or "cp_async". `per_s` is the measured rate. `energy_per_token_j` is what one token
    costs above idle. It includes the joules of other work, which spends no tokens.
    """

    kind: str
    spent: int
    per_s: float | None
    energy_per_token_j: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleReport:
    """What a schedule was asked for, what it did, and what that cost.

    `how` is "token_bucket", "driver" or None (nothing is limited). The cap applies to the mean over `window_s`, which
    is the schedule's own or, where `window_from` is "sensor", the shortest window that the sensor can resolve.
    `slowdown` is the time waited over the time worked: the most that waiting adds to the run time, as clocks may rise
    after a pause. `tokens` is None for a bucket of joules, `plan` without a policy or before the first call, `ballast`
    without a floor or a ramp, `shaper` without one.
    """

    cap: ScopedPower | None = None
    how: str | None = None
    where: str | None = None
    window_s: float | None = None
    window_from: str | None = None
    zones: tuple[ZoneReport, ...] = ()
    calls: int = 0
    points: int = 0
    waits: int = 0
    waited_s: float = 0.0
    slowdown: float = 0.0
    tokens: TokenReport | None = None
    plan: Plan | None = None
    ballast: BallastReport | None = None
    shaper: ShaperReport | None = None
    notes: tuple[str, ...] = ()

    @property
    def energy_j(self) -> float:
        """Return the joules of all zones while the schedule was at work."""
        return sum(z.energy_j for z in self.zones)

    @property
    def energy_per_call_j(self) -> float | None:
        """Return the joules of one call; None before the first, without a reading, or if other processes share them."""
        shared = any(z.processes > 1 for z in self.zones)
        return self.energy_j / self.calls if self.calls and self.energy_j and not shared else None

    @property
    def mean_w(self) -> float | None:
        """Return the mean power of the zone that drew most."""
        return max((z.mean_w for z in self.zones if z.mean_w is not None), default=None)

    @property
    def peak_w(self) -> float | None:
        """Return the highest power of any window of any zone."""
        return max((z.peak_w for z in self.zones if z.peak_w is not None), default=None)

    def __str__(self) -> str:
        from ..report.schedule import schedule_text

        return schedule_text(self)


class CapTracker:
    """The cap of one schedule while it lives, and what was measured under it. The loop's lock guards it."""

    def __init__(self, cap: ScopedPower, window_s: float, *, tokens: str = "joules") -> None:
        self.cap, self.window_s, self.tokens = cap, window_s, tokens
        self.running = 0  # calls under way
        self.calls = 0
        self.until_ns = 0
        self.notes: dict[str, str] = {}
        self._from_ns = 0
        self.zones: Sequence[PowerZone] = ()
        self._meters: dict[str, PowerMeter] = {}
        self._domains: dict[str, tuple[tuple[str, ...], Basis, bool]] = {}
        self._processes: dict[str, int] = {}  # the highest number of processes in one reading
        self._window_from = "cap_window_ms"
        self._pacer: Pacer | None = None
        self.held = False  # whether the cap is in force
        self._at_open, self._earlier = PaceCounts(), PaceCounts()
        # tokens; then the device's count when it began to count ours, or -1 while it counts another kind
        self._spent, self._since = 0, -1
        self._token_j: float | None = None

    def open(self, zones: Sequence[PowerZone], pacer: Pacer, sampler: Sampler, now_ns: int) -> None:
        """Begin to measure: the work starts, for the first time or again."""
        self.zones, self._pacer, self._from_ns = zones, pacer, now_ns
        self.resume()
        for zone in zones:
            finest_s = zone.resolution_s(sampler)
            self._window_from = "sensor" if finest_s > self.window_s else "cap_window_ms"
            domains = zone.domains(sampler)
            basis: Basis = "modelled" if any(d.basis == "modelled" for d in domains) else "measured"
            own = zone.key != "node" and zone.is_own_power(sampler)
            self._domains[zone.key] = (tuple(zone.names), basis, own)
            self._meters.setdefault(zone.key, PowerMeter(max(self.window_s, finest_s)))
            if not domains:
                self.notes["sensor"] = "there is no power sensor: the cap is held by prediction alone"

    def note_lease(self, leased_w: float, path: Path) -> None:
        """Note that the lease of the node's governor is lower than this cap, as long as it is. A cap may follow it."""
        self.notes.pop("lease", None)
        if leased_w < self.cap.power_w and not isinstance(self.cap, LeasedPower):
            allowed = f"a power governor allows this node {format_power(leased_w)} ({path})"
            self.notes["lease"] = f"{allowed}: that holds instead of the cap"

    def resume(self) -> None:
        """Put the cap in force: the waits from now on count for this schedule."""
        assert self._pacer is not None
        self._at_open, self.held = self._pacer.counts(), True

    def add_readings(self, readings: Mapping[str, MeanPower | None]) -> None:
        """Take the readings that belong to this schedule's calls."""
        for zone in self.zones:
            self.notes.update(zone.notes)
            self._note_tighter(zone)
            if self._since >= 0:
                self._token_j = zone.token_j or self._token_j
            reading = readings.get(zone.key)
            if reading is None or reading.start_ns < self._from_ns:
                continue
            if reading.time_ns <= self.until_ns + _TAIL_NS:
                self._meters[zone.key].add(reading)
                self._processes[zone.key] = max(self._processes.get(zone.key, 1), zone.processes)

    def _note_tighter(self, zone: PowerZone) -> None:
        own, lowest = zone.caps.get(id(self)), min(zone.caps.values(), key=lambda c: c.power_w, default=None)
        if self.running and own is not None and lowest is not None and lowest.power_w < own.power_w:
            self.notes["tighter"] = (
                f"{zone.key}: another schedule's cap of {format_power(lowest.power_w)} was in force at the same time: "
                "waits for it are counted here too"
            )

    def is_up_to_date(self) -> bool:
        """Return whether the sensor's readings include the last call."""
        return all(z.read_ns is not None and z.read_ns >= self.until_ns for z in self.zones)

    def close(self) -> None:
        """Stop measuring, because the work has ended; the figures stay."""
        self.switch_tokens(None)
        self._earlier, self._at_open, self.held = self._counts(), PaceCounts(), False

    def switch_tokens(self, kind: str | None) -> None:
        """Note that the device counts this kind of tokens from now on; other kinds do not count for this schedule."""
        now = self._pacer.counts().tokens if self._pacer is not None else 0
        self._spent += now - self._since if self._since >= 0 else 0
        self._since = now if kind == self.tokens else -1

    def _counts(self) -> PaceCounts:
        if self._pacer is None or not self.held:
            return self._earlier
        return self._earlier + (self._pacer.counts() - self._at_open)

    def _token_report(self) -> TokenReport | None:
        if self.tokens == "joules":
            return None
        if self._since >= 0:
            self.switch_tokens(self.tokens)
        if self._spent == 0:
            self.notes["spent"] = f"no {self.tokens} of Tessera's own kernels were seen: nothing waited for them"
        else:
            self.notes.pop("spent", None)
        seconds = max((m.seconds for m in self._meters.values()), default=0.0)
        per_s = self._spent / seconds if seconds > 0 else None
        return TokenReport(kind=self.tokens, spent=self._spent, per_s=per_s, energy_per_token_j=self._token_j)

    def report(self, notes: Sequence[str] = ()) -> ScheduleReport:
        """Return the figures so far; `notes` come before this schedule's own."""
        counts = self._counts()
        # The pauses of a GPU count only the work between them as worked time; several threads of a CPU work and wait at
        # once.
        past_s = max((m.seconds for m in self._meters.values()), default=0.0)
        worked_s = max(counts.worked_s, past_s - counts.waited_s)
        tokens = self._token_report()
        zones = tuple(
            ZoneReport(
                zone=key,
                domains=self._domains[key][0],
                basis=self._domains[key][1],
                window_s=m.window_s,
                mean_w=m.mean_w,
                peak_w=m.peak_w,
                first_peak_w=m.first_peak_w,
                energy_j=m.energy_j,
                time_s=m.seconds,
                own=self._domains[key][2],
                processes=self._processes.get(key, 1),
            )
            for key, m in self._meters.items()
        )
        return ScheduleReport(
            cap=self.cap,
            how="token_bucket",
            where=self._pacer.where if self._pacer else None,
            window_s=max((z.window_s for z in zones), default=self.window_s),
            window_from=self._window_from,
            zones=zones,
            calls=self.calls,
            points=counts.points,
            waits=counts.waits,
            waited_s=counts.waited_s,
            slowdown=counts.waited_s / worked_s if worked_s > 0 else 0.0,
            tokens=tokens,
            notes=(*notes, *self.notes.values()),
        )
