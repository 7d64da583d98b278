"""`tessera watch`: power, clocks and temperature live. `Watch` computes what `report/watch.py` lays out."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import click
import numpy as np

from ..errors import ArgumentError
from ..integral import accumulate
from ..monitor.core import Monitor
from ..monitor.cuda import Edge
from ..monitor.series import Series
from ..monitor.window import Window
from ..report import watch as report
from ..report.watch import Reading, Snapshot
from ..schema import Energy, Gap, Hold
from ..sensors.base import Sensor
from ..sensors.discover import Found, discover
from ..trace import combine
from ..units import parse_duration

MIN_INTERVAL_S = 0.05
ONCE_S = 1.2  # telemetry comes once a second, and SM activity is what lies between two of them
SENSOR_HELP = "Use this sensor (nvml, rapl, modelled, replay:FILE.csv, ...); may be given again."
HISTORY = 60
# At looks 0.5 s apart a cell of the history is 0.1 s; at 100 ms it is one value of NVML's ring.
CELLS_PER_LOOK = 5
# How long a look may wait for a sensor to catch up: the ring's longest spacing on the H200 is 46 ms.
FRESH_S = 0.15
# No new value for so long (or three of the sensor's own periods) is a loss, not a pause.
STALE_S = 3.0
CHUNK_NS = 60_000_000_000
CALM_NS = 5_000_000_000


@click.command()
@click.option("--interval", default="0.5s", show_default=True, metavar="TIME", help="Time between two looks.")
@click.option("--sensor", "sensors", multiple=True, metavar="NAME", help=SENSOR_HELP)
@click.option("--once", is_flag=True, help="Print one snapshot and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line, instead of a screen.")
@click.option("--duration", metavar="TIME", help="Stop after so long, e.g. 10s or 5min.")
def command(interval: str, sensors: tuple[str, ...], once: bool, as_json: bool, duration: str | None) -> None:
    """Show power, clocks and temperature live; q or Ctrl-C quits.

    \b
    Example:
      tessera watch
      tessera watch --interval 100ms                 every value of NVML's sample ring
      tessera watch --json --duration 10s > w.jsonl

    Where the output is not a terminal, each domain gets one line of name=value pairs per interval.
    """
    interval_s = parse_duration(interval)
    duration_s = math.inf if duration is None else parse_duration(duration)
    if interval_s < MIN_INTERVAL_S:
        raise ArgumentError(
            f"--interval {interval} is too short",
            why="the finest sensor has a new value every 20 ms, and one look shows several of them",
            fix=f"give {MIN_INTERVAL_S * 1e3:.0f}ms or more; at 100ms the history has every value of NVML's ring",
        )
    live = sys.stdout.isatty() and not (once or as_json)
    found = discover(sensors or None)
    with Quit(keys=live) as quit_, Watch(found, interval_s) as watch:
        if once:
            quit_.wait(max(interval_s, ONCE_S))
            _print(watch.look(), as_json)
        elif live:
            _screen(watch, _looks(quit_, interval_s, duration_s))
            click.echo(report.summary(watch.look()))
        else:
            for _ in _looks(quit_, interval_s, duration_s):
                _print(watch.look(), as_json)


def _looks(quit_: Quit, interval_s: float, duration_s: float) -> Iterator[None]:
    """One item each interval, on a fixed beat, until the time is over or somebody wants to quit."""
    begun = time.monotonic()
    for i in range(1, sys.maxsize):
        due_s = min(i * interval_s, duration_s)
        if quit_.wait(begun + due_s - time.monotonic()):
            return
        yield
        if due_s >= duration_s:
            return


def _print(snapshot: Snapshot, as_json: bool) -> None:
    if as_json:
        click.echo(report.json_line(snapshot))
    elif sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        console.print(report.screen(snapshot, width=console.width, keys=False))
    else:
        for line in report.plain_lines(snapshot):
            click.echo(line)


def _screen(watch: Watch, looks: Iterator[None]) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            shown = report.screen(watch.look(), width=console.width, height=console.height)
            live.update(shown, refresh=True)
            if next(looks, looks) is looks:
                return


class Quit:
    """Waits for a time, or for Ctrl-C, SIGTERM or (with `keys`, on a terminal) the key q, whichever comes first.

    The terminal shows keys at once and unechoed inside the `with`; leaving it, in whatever way, puts back the
    terminal and the signal handlers as they were. Signals only wake `wait`: nothing is interrupted half-way.
    """

    def __init__(self, *, keys: bool = False) -> None:
        self._keys = keys
        self._undo = contextlib.ExitStack()
        self._fds: list[int] = []
        self.asked = False

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            for end in (ours, theirs):
                end.setblocking(False)
                undo.callback(end.close)
            undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False))
            for number in (signal.SIGINT, signal.SIGTERM):
                undo.callback(signal.signal, number, signal.signal(number, lambda *_: None))
            self._fds = [ours.fileno()]
            if self._keys and sys.stdin.isatty():
                fd = sys.stdin.fileno()
                undo.callback(_restore, fd, termios.tcgetattr(fd))
                tty.setcbreak(fd)
                self._fds.append(fd)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait so long (None: for ever); True as soon as somebody wants to quit, and from then on."""
        end = math.inf if seconds is None else time.monotonic() + seconds
        while not self.asked:
            left = None if math.isinf(end) else max(end - time.monotonic(), 0.0)
            ready = select.select(self._fds, [], [], left)[0]
            if not ready:
                break
            self.asked = any(_wants_to_quit(fd, signals=fd == self._fds[0]) for fd in ready)
        return self.asked


def _wants_to_quit(fd: int, signals: bool) -> bool:
    try:
        typed = os.read(fd, 64)
    except OSError:  # the terminal is gone
        return True
    if signals:
        return bool({signal.SIGINT, signal.SIGTERM} & set(typed))  # other signals wake us too
    return not typed or bool(set(b"qQ\x03\x04") & set(typed))


def _restore(fd: int, attributes: list[Any]) -> None:
    with contextlib.suppress(termios.error):  # a terminal that is gone needs nothing
        termios.tcsetattr(fd, termios.TCSADRAIN, attributes)


class Ledger:
    """Joules by domain since the start: they never decrease, whatever happens to the sensors.

    A long run is a chain of windows of a minute. A counter that is reset (driver restart) takes its correction
    from one link only, and what was shown before stays the floor until the new figure has passed it. No link
    ends near a gap, so that the counter can tell what the gap hid.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._window = monitor.open("watch")
        self._closing: list[Window] = []
        self._settled: dict[str, list[Energy]] = {}
        self._floor_j: dict[str, float] = {}

    def read(self, now_ns: int, calm: bool) -> dict[str, Energy]:
        """The joules of every domain up to now. `calm`: no gap is open or just over."""
        sampler = self._monitor.sampler
        for window in [w for w in self._closing if w.energies.keys() >= sampler.series.keys()]:
            self._closing.remove(window)
            for name, energy in window.energies.items():
                self._settled[name] = [_chain([*self._settled.get(name, []), energy])]
        if calm and now_ns - self._window.start.host_ns > CHUNK_NS:
            self._monitor.close(self._window)
            self._closing.append(self._window)
            self._window = self._monitor.open("watch")
        parts = {name: list(settled) for name, settled in self._settled.items()}
        for window in (*self._closing, self._window):
            for name, energy in window.so_far(sampler, window.end or Edge(now_ns)).items():
                parts.setdefault(name, []).append(energy)
        energies = {name: _chain(links, self._floor_j.get(name, 0.0)) for name, links in parts.items()}
        self._floor_j.update((name, e.joules) for name, e in energies.items())
        return energies


def _chain(links: Sequence[Energy], floor_j: float = 0.0) -> Energy:
    """One window after the other. Their errors are mostly the level of one sensor, so they add up."""
    seconds = sum(e.seconds for e in links)
    return Energy(
        joules=max(sum(e.joules for e in links), floor_j),
        error_j=sum(e.error_j for e in links),
        seconds=seconds,
        source=links[-1].source,
        coverage=sum(e.coverage * e.seconds for e in links) / seconds if seconds > 0 else 0.0,
        basis=links[-1].basis,
    )


class Watch:
    """A monitor looked at again and again. Starts the sampling when entered, stops it on the way out."""

    def __init__(self, found: Found, interval_s: float) -> None:
        self._monitor = Monitor(found.sensors, found.missing)
        self._interval_s = interval_s
        self._domains = _domains_by_sensor(found.sensors)
        self._top_w: dict[str, float] = {}
        self._gaps: dict[str, int] = {}
        self._newest_gap_ns: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._monitor.start()
        self._begun_ns = time.monotonic_ns()
        self._ledger = Ledger(self._monitor)
        return self

    def __exit__(self, *_: object) -> None:
        self._monitor.stop()

    def look(self) -> Snapshot:
        """Every domain now, with data as new as its sensor has them."""
        sampler = self._monitor.sampler
        self._freshen()
        now_ns = time.monotonic_ns()
        with sampler.lock:
            gaps = list(sampler.gaps)
            calm = all(g.end_ns is not None and now_ns - g.end_ns > CALM_NS for g in gaps)
            energies = self._ledger.read(now_ns, calm)
            open_gaps = {g.domain: g for g in gaps if g.end_ns is None}
            self._count(gaps)
            readings = [self._reading(s, energies[n], open_gaps.get(n), now_ns) for n, s in sampler.series.items()]
        counted = [r for r in readings if r.counted]
        seconds = (now_ns - self._begun_ns) * 1e-9
        total = combine([energies[r.domain] for r in counted], seconds)
        return Snapshot(
            time_s=sampler.epoch.to_epoch(now_ns) * 1e-9, seconds=seconds, readings=readings,
            power_w=_sum(r.power_w for r in counted), mean_w=_sum(r.mean_w for r in counted),
            energy_j=total.joules, error_j=total.error_j, basis=total.basis,
            missing={c.name: c.reason or "" for c in self._monitor.missing},
            sensors={n: not domains <= open_gaps.keys() for n, domains in self._domains.items()},
            sampler_cpu_s=sampler.cpu_time_s, sampler_bytes=sampler.nbytes,
        )  # fmt: skip

    def _count(self, gaps: Sequence[Gap]) -> None:
        """Count the gaps that begin after those counted so far: the sampler forgets old ones."""
        for gap in gaps:
            if gap.start_ns > self._newest_gap_ns.get(gap.domain, 0):
                self._newest_gap_ns[gap.domain] = gap.start_ns
                self._gaps[gap.domain] = self._gaps.get(gap.domain, 0) + 1

    def _freshen(self) -> None:
        """Have the fast sensors read now; one that is slower than our looks keeps its own pace."""
        sampler, now_ns = self._monitor.sampler, time.monotonic_ns()
        lost = {g.domain for g in list(sampler.gaps) if g.end_ns is None}
        for domain in [d for d in sampler.domains if d.counted and d.name not in lost]:
            late_s = domain.lag_s + domain.resolution_s
            if late_s <= self._interval_s:
                sampler.wait_for(now_ns - round(late_s * 1e9), FRESH_S, [domain.name])

    def _reading(self, series: Series, energy: Energy, gap: Gap | None, now_ns: int) -> Reading:
        d, sampler = series.domain, self._monitor.sampler
        telemetry = sampler.latest(d.name)
        limit_w = telemetry.power_limit_w if telemetry else None
        cell_s = max(d.resolution_s, self._interval_s / CELLS_PER_LOOK)
        age_s = None if series.last_ns is None else (now_ns - series.last_ns) * 1e-9 + d.lag_s
        lost, lost_s = _loss(gap, age_s, d.resolution_s + d.lag_s, now_ns)
        history = _history(series, cell_s, now_ns if lost else series.last_ns) if d.counted else []
        self._top_w[d.name] = max([self._top_w.get(d.name, 0.0), *(w for w in history if w is not None)])
        memory = sampler.series.get(f"{d.name}.memory")
        seen_s = energy.seconds * energy.coverage
        return Reading(
            domain=d.name, label=d.label, source=d.source, basis=d.basis, counted=d.counted, note=d.note,
            resolution_s=d.resolution_s, power_w=None if lost else _recent_w(series, self._interval_s), age_s=age_s,
            mean_w=energy.joules / seen_s if seen_s > 0 else None, energy_j=energy.joules, error_j=energy.error_j,
            coverage=energy.coverage, memory_w=None if lost or not memory else _recent_w(memory, self._interval_s),
            lost=lost, lost_s=lost_s, gaps=self._gaps.get(d.name, 0), telemetry=telemetry, history_w=history,
            cell_s=cell_s, top_w=limit_w or self._top_w[d.name],
        )  # fmt: skip


def _domains_by_sensor(sensors: Sequence[Sensor]) -> Mapping[str, set[str]]:
    found: dict[str, set[str]] = {}
    for sensor in sensors:
        found.setdefault(sensor.name, set()).update(d.name for d in sensor.domains())
    return found


def _loss(gap: Gap | None, age_s: float | None, late_s: float, now_ns: int) -> tuple[str | None, float | None]:
    """Why there is no data now and for how long; None, None when there is."""
    if gap is not None:
        return gap.reason, max(now_ns - gap.start_ns, 0) * 1e-9
    if age_s is not None and age_s > max(STALE_S, 3 * late_s):
        return "the sensor has had nothing new", age_s
    return None, None


def _recent_w(series: Series, span_s: float) -> float | None:
    """Mean power of the newest stretch of data; not one sample, which a periodic load would alias."""
    d = series.domain
    if series.last_ns is None:
        return None
    end_ns = series.last_ns - round(d.lag_s * 1e9)
    start, end = series.mark(end_ns - round(max(span_s, d.resolution_s) * 1e9)), series.mark(end_ns)
    seen_s = end.covered_s - start.covered_s
    return (end.joules - start.joules) / seen_s if seen_s > 0 else series.last_w


def _history(series: Series, cell_s: float, end_ns: int | None) -> list[float | None]:
    """Mean power of the last cells of time, the oldest first; None where nothing is known.

    The cells lie on a fixed grid, so that a bar does not change any more once it is drawn.
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


def _sum(values: Iterator[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None
