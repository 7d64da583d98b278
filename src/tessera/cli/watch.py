"""`tessera watch`: power, clocks and temperature live. `monitor.PowerWatch` measures, `report/watch.py` renders."""

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
from collections.abc import Iterator
from typing import Any, Self

import click

from ..errors import ArgumentError
from ..monitor.snapshot import PowerWatch, Snapshot
from ..report import watch as report
from ..sensors.discover import discover
from ..units import parse_duration
from . import completion
from .plain import say
from .usage import quantity

MIN_INTERVAL_S = 0.05
ONCE_S = 1.2  # telemetry comes once a second, and SM activity is what lies between two of them
SENSOR_HELP = "Use this sensor (nvml, rapl, modelled, replay:FILE.csv, ...); may be given again."


def _interval(ctx: click.Context, param: click.Parameter, value: str) -> float:
    interval_s = quantity(parse_duration)(ctx, param, value)
    if interval_s is None or interval_s < MIN_INTERVAL_S:
        raise ArgumentError(
            f"--interval {value} is too short",
            why="the finest sensor has a new value every 20 ms, and one look shows several of them",
            fix=f"give {MIN_INTERVAL_S * 1e3:.0f}ms or more; at 100ms the history has every value of NVML's ring",
        )
    return interval_s


@click.command()
@click.option("--interval", "interval_s", default="0.5s", show_default=True, metavar="TIME", callback=_interval,
              help="Time between two looks.")  # fmt: skip
@click.option("--sensor", "sensors", multiple=True, shell_complete=completion.sensors, metavar="NAME", help=SENSOR_HELP)
@click.option("--once", is_flag=True, help="Print one snapshot and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line, instead of a screen.")
@click.option("--duration", "duration_s", metavar="TIME", callback=quantity(parse_duration),
              help="Stop after so long, e.g. 10s or 5min.")  # fmt: skip
def command(interval_s: float, sensors: tuple[str, ...], once: bool, as_json: bool, duration_s: float | None) -> None:
    """Show power, clocks and temperature live; q or Ctrl-C quits.

    \b
    Example:
      tessera watch
      tessera watch --interval 100ms                 every value of NVML's sample ring
      tessera watch --json --duration 10s > w.jsonl

    Where the output is not a terminal, each domain gets one line of name=value pairs per interval.
    """
    until_s = math.inf if duration_s is None else duration_s
    live = sys.stdout.isatty() and not (once or as_json)
    found = discover(sensors or None)
    with Quit(keys=live) as quit_, PowerWatch(found, interval_s) as watch:
        if once:
            quit_.wait(ONCE_S)
            _print(watch.take_snapshot(), as_json)
        elif live:
            _screen(watch, _looks(quit_, interval_s, until_s))
            say(report.summary(watch.take_snapshot()))
        else:
            for _ in _looks(quit_, interval_s, until_s):
                _print(watch.take_snapshot(), as_json)


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
        from ..report.screen import Console

        console = Console()
        console.print(report.screen(snapshot, width=console.width, keys=False))
    else:
        for line in report.plain_lines(snapshot):
            say(line)


def _screen(watch: PowerWatch, looks: Iterator[None]) -> None:
    from rich.live import Live

    from ..report.screen import Console

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            shown = report.screen(watch.take_snapshot(), width=console.width, height=console.height)
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
