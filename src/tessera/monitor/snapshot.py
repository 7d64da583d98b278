"""`Snapshot`: what every domain draws now and has used since the start, as a `PowerWatch` takes it repeatedly.

The live screen, its plain lines, JSON and the Prometheus exposition are four views of one snapshot.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from ..config import EnergyCost, load_or_warn
from ..joules import accumulate, sum_domains, sum_windows
from ..schema import SCHEMA_VERSION, Basis, Energy, Gap, Hold, PowerEvent, Telemetry
from ..sensors.discover import DiscoveredSensors
from ..sensors.processes import ProcessOwner
from ..sums import sum_known
from .core import Monitor, Window
from .cuda import Edge
from .process_table import OwnerTotal, ProcessReading, ProcessTable
from .series import PowerSeries

HISTORY = 60
# With 0.5 s between looks, a cell of the history is 0.1 s; with 100 ms it is one value of NVML's ring.
CELLS_PER_LOOK = 5
# How long a look may wait for a sensor to catch up: the ring's longest spacing on the H200 is 46 ms.
FRESH_S = 0.15
# No new value for this time (or for three of the sensor's own periods) means that the sensor is lost.
STALE_S = 3.0
CHUNK_NS = 60_000_000_000
CALM_NS = 5_000_000_000
CREST_S = 15.0
"""Prometheus usually scrapes this often, so no peak is missed between two scrapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainReading:
    """One domain now and since the start. None means unknown."""

    domain: str
    label: str
    source: str
    basis: Basis
    counted: bool
    resolution_s: float
    note: str = ""
    power_w: float | None = None
    """Mean of the newest data, over one interval or the sensor's resolution if that is longer."""
    age_s: float | None = None
    """How long ago these data ended in true time, including the sensor's lag."""
    mean_w: float | None = None
    energy_j: float = 0.0
    error_j: float = 0.0
    coverage: float = 0.0
    memory_w: float | None = None
    lost: str | None = None
    lost_s: float | None = None
    gaps: int = 0
    telemetry: Telemetry | None = None
    history_w: Sequence[float | None] = ()
    cell_s: float = 0.0
    top_w: float = 0.0
    crest_factor: float | None = None
    """Peak over root mean square of the newest `CREST_S` seconds, as fine as the sensor is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All domains at one moment. `missing` has the sensors that this machine does not have, with the reason."""

    epoch_s: float
    time_s: float
    readings: Sequence[DomainReading]
    power_w: float | None
    mean_w: float | None
    energy_j: float
    error_j: float
    basis: Basis
    cost: EnergyCost | None = None
    """Cost of the energy so far, by the user's factors."""
    missing: Mapping[str, str] = field(default_factory=dict)
    sensors: Mapping[str, bool] = field(default_factory=dict)
    processes: Sequence[ProcessReading] = ()
    """Who uses the CPUs and GPUs now; their watts are estimates."""
    owners: Sequence[tuple[ProcessOwner, OwnerTotal]] = ()
    """The same since the start, by user, job and pod."""
    events: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Over-current, near trips and the like since the start: how many, by domain and kind."""
    sampler_cpu_s: float = 0.0
    sampler_bytes: int = 0
    schema_version: int = SCHEMA_VERSION

    @property
    def counted_readings(self) -> list[DomainReading]:
        """The domains that add up to the total."""
        return [r for r in self.readings if r.counted]


class EnergyLedger:
    """Joules by domain since the start; they never decrease, whatever happens to the sensors.

    A long run is a chain of windows of a minute each. So a counter that is reset (driver restart) changes only one
    window, and the figure shown before is kept until the new one has passed it. No window ends near a gap, so that the
    counter can tell what the gap hid.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._window = monitor.open("watch")
        self._closing: list[Window] = []
        self._settled: dict[str, list[Energy]] = {}
        self._floor_j: dict[str, float] = {}

    def read(self, now_ns: int, calm: bool) -> dict[str, Energy]:
        """Return the joules of every domain up to now. `calm`: no gap is open or has just ended."""
        sampler = self._monitor.sampler
        for window in [w for w in self._closing if w.energies.keys() >= sampler.series.keys()]:
            self._closing.remove(window)
            for name, energy in window.energies.items():
                self._settled[name] = [_add_up([*self._settled.get(name, []), energy])]
        if calm and now_ns - self._window.start.host_ns > CHUNK_NS:
            self._monitor.close(self._window)
            self._closing.append(self._window)
            self._window = self._monitor.open("watch")
        parts = {name: list(settled) for name, settled in self._settled.items()}
        for window in (*self._closing, self._window):
            for name, energy in window.so_far(sampler, window.end or Edge(now_ns)).items():
                parts.setdefault(name, []).append(energy)
        energies = {name: _add_up(links, self._floor_j.get(name, 0.0)) for name, links in parts.items()}
        self._floor_j.update((name, e.energy_j) for name, e in energies.items())
        return energies


def _add_up(links: Sequence[Energy], floor_j: float = 0.0) -> Energy:
    """Add up consecutive windows; return at least what was shown before, and 0 while nothing was seen."""
    whole = sum_windows(links)
    if math.isnan(whole.energy_j):
        return dataclasses.replace(whole, energy_j=floor_j, error_j=0.0)
    return dataclasses.replace(whole, energy_j=max(whole.energy_j, floor_j))


class PowerWatch:
    """Takes snapshots of a monitor. Sampling starts when it is entered and stops when it is left."""

    def __init__(
        self, discovered: DiscoveredSensors, interval_s: float, *, processes: ProcessTable | None = None
    ) -> None:
        self._processes = processes
        self._monitor = Monitor(discovered.sensors, discovered.missing)
        self._interval_s = interval_s
        self._domains: dict[str, set[str]] = {}
        for sensor in discovered.sensors:
            self._domains.setdefault(sensor.name, set()).update(d.name for d in sensor.domains())
        self._top_w: dict[str, float] = {}
        self._gaps: dict[str, int] = {}
        self._newest_gap_ns: dict[str, int] = {}
        self._events: dict[str, dict[str, int]] = {}
        self._seen: set[PowerEvent] = set()

    def __enter__(self) -> Self:
        self._settings = load_or_warn()
        self._monitor.start()
        self._begun_ns = time.monotonic_ns()
        self._ledger = EnergyLedger(self._monitor)
        if self._processes is not None:
            self._processes.read({})
        return self

    def __exit__(self, *_: object) -> None:
        self._monitor.stop()

    @property
    def is_whole(self) -> bool:
        """Whether every counted domain was read, and telemetry twice, since activity is between two readings."""
        sampler = self._monitor.sampler
        with sampler.lock:
            read = all(sampler.series[name].last_ns is not None for name in sampler.counted_domains())
            return read and all(len(readings) > 1 for readings in sampler.telemetry.values())

    def take_snapshot(self) -> Snapshot:
        """Return every domain now, with the newest data of its sensor."""
        sampler = self._monitor.sampler
        self._freshen()
        now_ns = time.monotonic_ns()
        with sampler.lock:
            gaps = list(sampler.gaps)
            calm = all(g.end_ns is not None and now_ns - g.end_ns > CALM_NS for g in gaps)
            energies = self._ledger.read(now_ns, calm)
            open_gaps = {g.domain: g for g in gaps if g.end_ns is None}
            self._count_gaps(gaps)
            self._count_events(list(sampler.events))
            readings = [self._reading(s, energies[n], open_gaps.get(n), now_ns) for n, s in sampler.series.items()]
        counted = [r for r in readings if r.counted]
        time_s = (now_ns - self._begun_ns) * 1e-9
        total = sum_domains([energies[r.domain] for r in counted], time_s)
        table = self._processes
        running = table.read({r.domain: (r.source, r.energy_j) for r in counted}) if table is not None else ()
        return Snapshot(
            processes=running,
            owners=list(table.totals.items()) if table is not None else (),
            epoch_s=sampler.epoch.to_epoch(now_ns) * 1e-9,
            time_s=time_s,
            readings=readings,
            power_w=sum_known(r.power_w for r in counted),
            mean_w=sum_known(r.mean_w for r in counted),
            energy_j=total.energy_j,
            error_j=total.error_j,
            basis=total.basis,
            cost=self._settings.cost_of(total.energy_j, total.error_j),
            missing={c.name: c.reason or "" for c in self._monitor.missing},
            sensors={n: not domains <= open_gaps.keys() for n, domains in self._domains.items()},
            events={name: dict(counts) for name, counts in self._events.items()},
            sampler_cpu_s=sampler.cpu_time_s,
            sampler_bytes=sampler.nbytes,
        )

    def _count_gaps(self, gaps: Sequence[Gap]) -> None:
        """Count the gaps that begin after those counted so far; the sampler forgets old gaps."""
        for gap in gaps:
            if gap.start_ns > self._newest_gap_ns.get(gap.domain, 0):
                self._newest_gap_ns[gap.domain] = gap.start_ns
                self._gaps[gap.domain] = self._gaps.get(gap.domain, 0) + 1

    def _count_events(self, events: Sequence[PowerEvent]) -> None:
        """Count events that were not there at the last look; the sampler forgets old events."""
        for event in events:
            if event not in self._seen:
                counts = self._events.setdefault(event.domain, {})
                counts[event.kind] = counts.get(event.kind, 0) + 1
        self._seen = set(events)

    def _freshen(self) -> None:
        """Read fast sensors now; sensors slower than our looks keep their own pace."""
        sampler, now_ns = self._monitor.sampler, time.monotonic_ns()
        lost = {g.domain for g in list(sampler.gaps) if g.end_ns is None}
        for domain in [d for d in sampler.domains if d.counted and d.name not in lost]:
            late_s = domain.lag_s + domain.resolution_s
            if late_s <= self._interval_s:
                sampler.wait_for(now_ns - round(late_s * 1e9), FRESH_S, [domain.name])

    def _reading(self, series: PowerSeries, energy: Energy, gap: Gap | None, now_ns: int) -> DomainReading:
        d, sampler = series.domain, self._monitor.sampler
        telemetry = sampler.latest(d.name)
        limit_w = telemetry.power_limit_w if telemetry else None
        cell_s = max(d.resolution_s, self._interval_s / CELLS_PER_LOOK)
        age_s = None if series.last_ns is None else (now_ns - series.last_ns) * 1e-9 + d.lag_s
        lost, lost_s = _find_loss(gap, age_s, d.resolution_s + d.lag_s, now_ns)
        history = _power_history(series, cell_s, now_ns if lost else series.last_ns) if d.counted else []
        self._top_w[d.name] = max([self._top_w.get(d.name, 0.0), *(w for w in history if w is not None)])
        memory = sampler.series.get(f"{d.name}.memory")
        seen_s = energy.time_s * energy.coverage
        return DomainReading(
            domain=d.name,
            label=d.label,
            source=d.source,
            basis=d.basis,
            counted=d.counted,
            note=d.note,
            resolution_s=d.resolution_s,
            power_w=None if lost else _recent_power(series, self._interval_s),
            age_s=age_s,
            mean_w=energy.energy_j / seen_s if seen_s > 0 else None,
            energy_j=energy.energy_j,
            error_j=energy.error_j,
            coverage=energy.coverage,
            memory_w=None if lost or not memory else _recent_power(memory, self._interval_s),
            lost=lost,
            lost_s=lost_s,
            gaps=self._gaps.get(d.name, 0),
            telemetry=telemetry,
            history_w=history,
            cell_s=cell_s,
            top_w=limit_w or self._top_w[d.name],
            crest_factor=None if lost else _recent_crest(series),
        )


def _find_loss(gap: Gap | None, age_s: float | None, late_s: float, now_ns: int) -> tuple[str | None, float | None]:
    """Return why there is no data now and for how long; None, None if there is."""
    if gap is not None:
        return gap.reason, max(now_ns - gap.start_ns, 0) * 1e-9
    if age_s is not None and age_s > max(STALE_S, 3 * late_s):
        return "the sensor has delivered nothing new", age_s
    return None, None


def _recent_power(series: PowerSeries, span_s: float) -> float | None:
    """Return the mean power of the newest data; not of one sample, which a periodic load would alias."""
    d = series.domain
    if series.last_ns is None:
        return None
    end_ns = series.last_ns - round(d.lag_s * 1e9)
    start, end = series.mark(end_ns - round(max(span_s, d.resolution_s) * 1e9)), series.mark(end_ns)
    seen_s = end.covered_s - start.covered_s
    return (end.joules - start.joules) / seen_s if seen_s > 0 else series.last_w


def _recent_crest(series: PowerSeries) -> float | None:
    """Return peak over root mean square of the newest seconds; None before there are two samples."""
    if series.last_ns is None:
        return None
    column = series.column(series.last_ns - round(CREST_S * 1e9), series.last_ns)
    watts, seconds = column.watts[1:], np.diff(column.times_ns) * 1e-9
    known = ~np.isnan(watts)
    if not np.any(known) or not np.sum(seconds[known]) > 0:
        return None
    rms = math.sqrt(float(np.sum(watts[known] ** 2 * seconds[known]) / np.sum(seconds[known])))
    return float(np.max(watts[known])) / rms if rms > 0 else None


def _power_history(series: PowerSeries, cell_s: float, end_ns: int | None) -> list[float | None]:
    """Return mean power of the last cells of time, the oldest first; None if unknown.

    The cells lie on a fixed grid, so a bar does not change after it has been drawn.
    """
    if series.last_ns is None or end_ns is None:
        return []
    cell_ns = round(cell_s * 1e9)
    edges = (end_ns // cell_ns - np.arange(HISTORY, -1, -1)) * cell_ns
    lag_ns = round(series.domain.lag_s * 1e9)
    column = series.column(int(edges[0]) - lag_ns, int(edges[-1]) - lag_ns)
    sums = accumulate(column.times_ns, column.watts, mean=series.domain.hold is Hold.MEAN)
    joules = np.diff(np.interp(edges, column.times_ns, sums.joules))
    seen_s = np.diff(np.interp(edges, column.times_ns, sums.covered_s))
    return [float(j / s) if s > 0.1 * cell_s else None for j, s in zip(joules, seen_s, strict=True)]
