"""What one schedule holds and has held: the live state of its cap, and the report made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..monitor.sampler import Sampler
from ..schema import Basis
from ..units import ScopedPower
from .meter import Meter, Reading
from .pace import Pacer, Passed
from .zone import Zone, resolution_s

# A reading that ends this much after the last call still belongs to it: one sample of an H200's ring.
_TAIL_NS = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneReport:
    """One GPU, the CPUs or the node: what was asked and what came of it. None: too short to tell.

    `mean_w` and `peak_w` (the highest mean of any window of `window_s`) are from the second second on;
    `first_peak_w` is the first one's, in which the load is being learnt.
    """

    zone: str
    domains: tuple[str, ...]
    basis: Basis
    window_s: float
    mean_w: float | None
    peak_w: float | None
    first_peak_w: float | None
    energy_j: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReport:
    """What launches of our own kernels have spent; other work spends nothing, and its joules are in `joules_each`.

    `kind` is "launches", "warps" or "cp_async". `per_s` is the rate that was held; `joules_each` what one token was
    learnt to cost above idle. None: too short to tell.
    """

    kind: str
    spent: int
    per_s: float | None
    joules_each: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleReport:
    """What a schedule was asked for, what it did, and what that cost.

    `how` is "token_bucket", "driver" or None (nothing is limited). The cap is promised for the mean over `window_s`,
    which is the schedule's own or, where `window_from` is "sensor", the finest the sensor can tell. `slowdown` is the
    time waited over the time worked: what waiting adds to the run time at most, as clocks may rise after a pause.
    `tokens` is None for a bucket of joules.
    """

    cap: ScopedPower | None
    how: str | None
    where: str | None
    window_s: float | None
    window_from: str | None
    zones: tuple[ZoneReport, ...] = ()
    calls: int = 0
    points: int = 0
    waits: int = 0
    waited_s: float = 0.0
    slowdown: float = 0.0
    tokens: TokenReport | None = None
    notes: tuple[str, ...] = ()

    @property
    def energy_j(self) -> float:
        """Joules of all zones while the schedule was at work."""
        return sum(z.energy_j for z in self.zones)

    @property
    def joules_per_call(self) -> float | None:
        """Joules of one call; None before the first, or without a sensor's reading."""
        return self.energy_j / self.calls if self.calls and self.energy_j else None

    @property
    def mean_w(self) -> float | None:
        """The mean of the zone that drew most."""
        return max((z.mean_w for z in self.zones if z.mean_w is not None), default=None)

    @property
    def peak_w(self) -> float | None:
        """The worst window of any zone."""
        return max((z.peak_w for z in self.zones if z.peak_w is not None), default=None)

    def __str__(self) -> str:
        from ..report.schedule import schedule_text

        return schedule_text(self)


class Held:
    """The cap of one schedule while it lives. The loop's lock guards it."""

    def __init__(self, cap: ScopedPower, window_s: float, *, tokens: str = "joules") -> None:
        self.cap, self.window_s, self.tokens = cap, window_s, tokens
        self.inside = 0
        self.calls = 0
        self.until_ns = 0
        self._from_ns = 0
        self._zones: Sequence[Zone] = ()
        self._meters: dict[str, Meter] = {}
        self._about: dict[str, tuple[tuple[str, ...], Basis]] = {}
        self._window_from = "cap_window_ms"
        self._pacer: Pacer | None = None
        self._base = Passed()
        self._before = Passed()
        self._open = False
        self._spent, self._since = 0, -1  # tokens, and the device's count from which on they are ours; -1: they are not
        self._token_j: float | None = None
        self.notes: dict[str, str] = {}

    def open(self, zones: Sequence[Zone], pacer: Pacer, sampler: Sampler, now_ns: int) -> None:
        """Work begins, for the first time or again."""
        self._zones, self._pacer, self._from_ns, self._open = zones, pacer, now_ns, True
        self._base = pacer.passed()
        for zone in zones:
            finest_s = resolution_s(sampler, zone.names)
            self._window_from = "sensor" if finest_s > self.window_s else "cap_window_ms"
            domains = [sampler.series[n].domain for n in zone.names if n in sampler.series]
            basis: Basis = "modelled" if any(d.basis == "modelled" for d in domains) else "measured"
            self._about[zone.key] = (tuple(zone.names), basis)
            self._meters.setdefault(zone.key, Meter(max(self.window_s, finest_s)))
            if not domains:
                self.notes["sensor"] = "no power sensor: the cap is held by prediction alone"

    def account(self, readings: Mapping[str, Reading | None]) -> None:
        """Take the readings that are of our time."""
        for zone in self._zones:
            self.notes.update(zone.notes)
            if self._since >= 0:
                self._token_j = zone.token_j or self._token_j
            reading = readings.get(zone.key)
            if reading is None or not self._from_ns <= reading.start_ns:
                continue
            if reading.time_ns <= self.until_ns + _TAIL_NS:
                self._meters[zone.key].add(reading)

    def told(self) -> bool:
        """Whether the sensor has told of the last call."""
        return all(z.read_ns is not None and z.read_ns >= self.until_ns for z in self._zones)

    def close(self) -> None:
        """Work has ended; what was done stays."""
        self.count(None)
        self._before, self._base, self._open = self._passed(), Passed(), False

    def count(self, tokens: str | None) -> None:
        """The device's tokens are these from now on; those of another kind are not ours."""
        now = self._pacer.passed().tokens if self._pacer is not None else 0
        self._spent += now - self._since if self._since >= 0 else 0
        self._since = now if tokens == self.tokens else -1

    def _passed(self) -> Passed:
        if self._pacer is None or not self._open:
            return self._before
        now, base, was = self._pacer.passed(), self._base, self._before
        return Passed(
            was.points + now.points - base.points,
            was.waits + now.waits - base.waits,
            was.waited_s + now.waited_s - base.waited_s,
            was.worked_s + now.worked_s - base.worked_s,
        )

    def _token_report(self) -> TokenReport | None:
        if self.tokens == "joules":
            return None
        if self._since >= 0:
            self.count(self.tokens)
        spent = self._spent
        if spent == 0:
            self.notes["spent"] = f"no {self.tokens} of Tessera's own kernels were seen: nothing waited for them"
        else:
            self.notes.pop("spent", None)
        seconds = max((m.seconds for m in self._meters.values()), default=0.0)
        return TokenReport(
            kind=self.tokens, spent=spent, per_s=spent / seconds if seconds > 0 else None, joules_each=self._token_j
        )

    def report(self, more: Sequence[str] = ()) -> ScheduleReport:
        """What came of it so far; `more` are notes of others."""
        passed = self._passed()
        tokens = self._token_report()
        zones = tuple(
            ZoneReport(
                zone=key, domains=self._about[key][0], basis=self._about[key][1], window_s=m.window_s, mean_w=m.mean_w,
                peak_w=m.peak_w, first_peak_w=m.first_peak_w, energy_j=m.energy_j, seconds=m.seconds,
            )
            for key, m in self._meters.items()
        )  # fmt: skip
        return ScheduleReport(
            cap=self.cap,
            how="token_bucket",
            where=self._pacer.where if self._pacer else None,
            window_s=max((z.window_s for z in zones), default=self.window_s),
            window_from=self._window_from,
            zones=zones,
            calls=self.calls,
            points=passed.points,
            waits=passed.waits,
            waited_s=passed.waited_s,
            slowdown=passed.waited_s / passed.worked_s if passed.worked_s > 0 else 0.0,
            tokens=tokens,
            notes=(*more, *self.notes.values()),
        )
