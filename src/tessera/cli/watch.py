"""`tessera watch`: power, clocks and temperature live. `monitor.PowerWatch` measures, `report/watch.py` renders."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import select
import signal
import socket
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

import click

from ..errors import ArgumentError
from ..monitor.process_table import ProcessTable
from ..monitor.snapshot import PowerWatch, Snapshot
from ..output import remove_controls
from ..report import watch as report
from ..sensors.discover import discover
from ..units import parse_duration
from .options import duration_option, parse_option, sensor_option

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..report.console import Console

MIN_INTERVAL_S = 0.05
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONCE_S = 1.2  # the second telemetry comes after half a second, and SM activity is what lies between two of them
LATEST_S = 10.0  # how long a single look waits for that on a machine that has more to do


def _parse_interval(ctx: click.Context, param: click.Parameter, value: str) -> float:
    interval_s = parse_option(parse_duration)(ctx, param, value)
    if interval_s is None or interval_s < MIN_INTERVAL_S:
        raise ArgumentError(
            f"--interval {value} is too short",
            why="the fastest sensor has a new value every 20 ms, and a refresh shows several of them",
            fix=f"give {MIN_INTERVAL_S * 1e3:.0f}ms or more; at 100ms the history shows every value of NVML",
        )
    return interval_s


@click.command()
@click.option(
    "--interval",
    "interval_s",
    default="0.5s",
    show_default=True,
    metavar="TIME",
    callback=_parse_interval,
    help="Time between two refreshes.",
)
@sensor_option
@click.option("--once", is_flag=True, help="Print one snapshot and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line, instead of a screen.")
@click.option(
    "--processes", type=click.IntRange(0), default=8, show_default=True, help="How many processes to list; 0 for none."
)
@duration_option("--duration", "Stop after this time, e.g. 5min.")
def command(
    interval_s: float, sensors: tuple[str, ...], once: bool, as_json: bool, processes: int, duration_s: float | None
) -> None:
    """Show power, clocks and temperature live, and which processes use them; q or Ctrl-C quits.

    \b
    Example:
      tessera watch
      tessera watch --interval 100ms                 every value of NVML's sample ring
      tessera watch --json --duration 10s > w.jsonl

    If the output is not a terminal, prints one line of name=value pairs per domain and interval. The watts of processes
    are estimates: a CPU's by CPU time, a GPU's by SM time.
    """
    until_s = math.inf if duration_s is None else duration_s
    live = sys.stdout.isatty() and not (once or as_json)
    available = discover(sensors or None, scope="machine")
    table = ProcessTable.of_this_machine() if processes and (live or once or as_json) else None
    with Quit(keys=live) as quit_, PowerWatch(available, interval_s, processes=table) as watch:
        if once:
            wait_for_look(quit_, watch)
            _print(watch.take_snapshot(), as_json, processes)
        elif live:

            def draw(console: Console) -> RenderableType:
                look = watch.take_snapshot()
                return report.screen(look, width=console.width, height=console.height, processes=processes)

            show_live(draw, wait_intervals(quit_, interval_s, until_s))
            print(remove_controls(report.summary(watch.take_snapshot())))
        else:
            for _ in wait_intervals(quit_, interval_s, until_s):
                _print(watch.take_snapshot(), as_json, processes)


def wait_intervals(quit_: Quit, interval_s: float, duration_s: float) -> Iterator[None]:
    """Yield once per interval, at fixed times, until the time is over or the user quits."""
    start = time.monotonic()
    for i in range(1, sys.maxsize):
        due_s = min(i * interval_s, duration_s)
        if quit_.wait(start + due_s - time.monotonic()):
            return
        yield
        if due_s >= duration_s:
            return


def _print(snapshot: Snapshot, as_json: bool, processes: int) -> None:
    if as_json:
        click.echo(report.json_line(dataclasses.replace(snapshot, processes=snapshot.processes[:processes])))
    elif sys.stdout.isatty():
        from ..report.console import Console

        console = Console()
        console.print(report.screen(snapshot, width=console.width, keys=False, processes=processes))
    else:
        for line in report.plain_lines(snapshot):
            print(remove_controls(line), flush=True)


def show_live(draw: Callable[[Console], RenderableType], intervals: Iterator[None]) -> None:
    """Draw a screen, and again at each interval."""
    from rich.live import Live

    from ..report.console import Console

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(draw(console), refresh=True)
        for _ in intervals:
            live.update(draw(console), refresh=True)


def wait_for_look(quit_: Quit, watch: PowerWatch) -> None:
    """Wait for a single look: its time, and on a busy machine until all of it is there, or the user quits."""
    until = time.monotonic() + LATEST_S
    done = quit_.wait(ONCE_S)
    while not done and not watch.is_whole and time.monotonic() < until:
        done = quit_.wait(0.05)


class Quit:
    """Waits for a time, or for Ctrl-C, SIGTERM, SIGHUP or (with `keys`, on a terminal) the key q.

    Inside the `with`, keys arrive at once and are not echoed; leaving it restores the terminal and the signal handlers.
    Signals only wake `wait`: nothing is interrupted half-way.
    """

    def __init__(self, *, keys: bool = False) -> None:
        self._keys = keys
        self._undo = contextlib.ExitStack()
        self._fds: list[int] = []
        self.requested = False

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            for end in (ours, theirs):
                end.setblocking(False)
                undo.callback(end.close)
            undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False))
            for number in _ENDINGS:
                undo.callback(signal.signal, number, signal.signal(number, lambda *_: None))
            self._fds = [ours.fileno()]
            if self._keys and sys.stdin.isatty():
                fd = sys.stdin.fileno()
                undo.callback(_restore_terminal, fd, termios.tcgetattr(fd))
                tty.setcbreak(fd)
                self._fds.append(fd)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait this long (None: without end); return True as soon as the user wants to quit, and from then on."""
        end = math.inf if seconds is None else time.monotonic() + seconds
        while not self.requested:
            left = None if math.isinf(end) else max(end - time.monotonic(), 0.0)
            ready = select.select(self._fds, [], [], left)[0]
            if not ready:
                break
            self.requested = any(_wants_to_quit(fd, signals=fd == self._fds[0]) for fd in ready)
        return self.requested


def _wants_to_quit(fd: int, signals: bool) -> bool:
    try:
        data = os.read(fd, 64)
    except OSError:  # the terminal is gone
        return True
    if signals:
        return bool(set(_ENDINGS) & set(data))  # other signals wake us too
    return not data or bool(set(b"qQ\x03\x04") & set(data))


def _restore_terminal(fd: int, attributes: list[Any]) -> None:
    with contextlib.suppress(termios.error):  # a terminal that is gone needs nothing
        termios.tcsetattr(fd, termios.TCSADRAIN, attributes)
