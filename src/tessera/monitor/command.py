"""Measures a command from outside: runs it, watches the machine, and returns what it cost and its exit code."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from ..errors import TesseraError
from ..schema import EnergyReport, Hold, Telemetry, Work
from ..sensors.discover import SCOPE_VARIABLE
from ..sensors.modelled import read_machine_s
from ..sensors.processes import read_wait_s
from ..trace import PowerTrace
from .core import Monitor
from .regions import REGIONS_VARIABLE, read_regions
from .scope import OVERLAPS, EnergyScope, power_trace
from .series import PowerSeries

# The power before the command starts is its idle level, if the sensor remembers that far back (NVML's ring: 2.4 s).
IDLE_WINDOW_NS = 600_000_000
IDLE_LEVEL = 0.1
# How long a read at the edges of the command may take: RAPL and /proc answer within a millisecond. The command's CPU
# time is complete at its end, but a busy machine may read it late.
EDGE_S = 0.05
PROCESS_EDGE_S = 2.0
EXIT_NOT_FOUND = 127  # as shells do
EXIT_NOT_EXECUTABLE = 126
STDERR = 2
EXIT_SIGNAL = 128


class CommandNotRun(TesseraError):
    """The command could not be started; `exit_code` is what a shell would say."""

    exit_code = EXIT_NOT_FOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandCpu:
    """CPU seconds of a command and its children, and of other programs while it ran, during `over_s`.

    `waited_s` is how long its main thread was ready to run but had no core. None: the system does not count it.
    """

    cpu_s: float
    over_s: float
    waited_s: float | None
    others_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRun:
    """A measured command: its report, power trace, telemetry, exit code, and CPU times."""

    report: EnergyReport
    trace: PowerTrace
    telemetry: Mapping[str, Sequence[Telemetry]]
    returncode: int
    cpu: CommandCpu | None = None


def measure_command(
    argv: Sequence[str],
    monitor: Monitor,
    *,
    work: Sequence[Work] = (),
    quiet: bool = False,
    output: IO[bytes] | None = None,
) -> CommandRun:
    """Run a command to its end and measure it with its children.

    SIGINT, SIGTERM and SIGHUP go to the command; what was measured until then is still reported. `quiet` sends what the
    command prints to standard error, so that standard output is the caller's; `output` takes all that it prints. The
    command's own scopes measure the same processes or machine as the monitor's sensors.
    """
    own = any(d.scope == "process" for d in monitor.sampler.domains)
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder:
        env = {**os.environ, REGIONS_VARIABLE: folder, SCOPE_VARIABLE: "process" if own else "machine"}
        scope = EnergyScope(" ".join(argv), monitor=monitor)
        with power_trace(monitor=monitor) as trace, scope:
            _read_means(monitor)
            returncode, cpu = _run(argv, env, quiet, output)
            _read_means(monitor)
        regions = read_regions(Path(folder))
    base = scope.report()
    report = EnergyReport(
        name=base.name,
        total=base.total,
        by_domain=base.by_domain,
        domains=base.domains,
        regions=regions,
        work=tuple(work),
        # The trace is slightly longer than the scope: for a command of 2 ms it includes idle time.
        peak_w=None if trace.peak_w is None else max(trace.peak_w, base.total.power_w or 0.0),
        idle_w=_idle_w(monitor, trace.monotonic_span_ns[0]),
        gaps=base.gaps,
        missing=base.missing,
        events=list(monitor.sampler.events),
        notes=[*_notes(trace), *base.notes, *([OVERLAPS] if any(r.overlaps for r in regions) else [])],
    )
    telemetry = {name: trace.telemetry(name) for name in trace.columns}
    return CommandRun(report=report, trace=trace, telemetry=telemetry, returncode=returncode, cpu=cpu)


def _read_means(monitor: Monitor) -> None:
    """Read sensors of means now: a mean that reaches over an edge would lose a part of a short command."""
    means = [d for d in monitor.sampler.domains if d.hold is Hold.MEAN and d.counted]
    own = [d.name for d in means if d.scope == "process"]
    monitor.sampler.wait_for(time.monotonic_ns(), PROCESS_EDGE_S, own)
    monitor.sampler.wait_for(time.monotonic_ns(), EDGE_S, [d.name for d in means if d.name not in own])


def _notes(trace: PowerTrace) -> list[str]:
    return [f"{d.name}: {d.note}" for d in trace.domains if d.note and d.counted]


def _idle_w(monitor: Monitor, start_ns: int) -> float | None:
    """Return mean power of all counted domains just before the command; None if unknown or not idle."""
    with monitor.sampler.lock:
        levels = [_level_before(monitor.sampler.series[n], start_ns) for n in monitor.sampler.counted_domains()]
    watts = [w for w in levels if w is not None]
    return sum(watts) if watts and len(watts) == len(levels) else None


def _level_before(series: PowerSeries, start_ns: int) -> float | None:
    """Return a domain's power over the last moments, if seen and steady: a chip that still cools down is not idle."""
    marks = [series.mark(start_ns - IDLE_WINDOW_NS * k // 2) for k in (2, 1, 0)]
    halves = []
    for a, b in itertools.pairwise(marks):
        seen_s = b.covered_s - a.covered_s
        if seen_s < 0.2 * IDLE_WINDOW_NS * 1e-9 / 2:
            return None
        halves.append((b.joules - a.joules) / seen_s)
    return sum(halves) / 2 if abs(halves[1] - halves[0]) <= IDLE_LEVEL * halves[0] else None


def _run(argv: Sequence[str], env: Mapping[str, str], quiet: bool, output: IO[bytes] | None) -> tuple[int, CommandCpu]:
    """Run the command; return its exit code and who used the CPUs meanwhile."""
    began_s, all_s, own_s = time.monotonic(), read_machine_s(), _children_s()
    with forward_signals() as add_child:
        child = _start(argv, env, quiet, output)
        add_child(child)
        waited_s = _wait_for_end(child)
        code = child.wait()
    cpu_s, over_s, now_s = _children_s() - own_s, time.monotonic() - began_s, read_machine_s()
    others_s = None if now_s is None or all_s is None else max(now_s - all_s - cpu_s, 0.0)
    cpu = CommandCpu(cpu_s=cpu_s, over_s=over_s, waited_s=waited_s, others_s=others_s)
    return EXIT_SIGNAL - code if code < 0 else code, cpu


def _wait_for_end(child: subprocess.Popen[bytes]) -> float | None:
    """Wait until a child ends; return how long its main thread had no core, which is lost once it is reaped."""
    if not hasattr(os, "waitid"):
        return None
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    return read_wait_s(child.pid)


def _children_s() -> float:
    """Return the CPU seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _start(
    argv: Sequence[str], env: Mapping[str, str], quiet: bool, output: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    stdout = output or (STDERR if quiet else None)
    try:
        return subprocess.Popen(list(argv), env=dict(env), stdout=stdout, stderr=output)
    except (FileNotFoundError, NotADirectoryError) as exc:
        quoted = " ".join(argv[0].split())
        fix = "check the name after `--`, and your PATH"
        if " " in quoted:
            fix = f"without the quotes: tessera measure -- {quoted}"
        raise CommandNotRun(f"there is no command {argv[0]!r}", why=exc.strerror, fix=fix) from exc
    except OSError as exc:
        error = CommandNotRun(f"cannot run {argv[0]!r}", why=exc.strerror, fix="is it executable?")
        error.exit_code = EXIT_NOT_EXECUTABLE
        raise error from exc


def _terminal_interrupts() -> bool:
    """Return whether Ctrl-C on our terminal reaches the child too; then we must not send it again."""
    for fd in (0, 1, 2):
        try:
            return os.tcgetpgrp(fd) == os.getpgrp()
        except OSError:  # it is not a terminal
            continue
    return False


def survive_user_signals() -> None:
    """Ignore SIGUSR1 and SIGUSR2 in this process from now on: Slurm sends them to a whole job for a checkpoint.

    A handler does this, not SIG_IGN, because a child would inherit SIG_IGN but not a handler.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, lambda signum, frame: None)


@contextmanager
def forward_signals(
    child: subprocess.Popen[bytes] | None = None,
) -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Pass SIGTERM and SIGHUP on, and SIGINT unless a terminal sends it to both; restore the handlers afterwards.

    Ignored signals (`nohup`, a shell's background job) are not passed on: the child should ignore them too.

    Pass a child that starts inside the block to the function that this yields. Otherwise a signal that comes while it
    starts would end us and leave the child running. Such a signal goes to the child as soon as it runs, or to us if
    none starts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda child: None
        return
    children = [] if child is None else [child]
    early: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and _terminal_interrupts():
            return
        for one in children:
            one.send_signal(signum)
        if not children:
            early.append(signum)

    def add_child(one: subprocess.Popen[bytes]) -> None:
        children.append(one)
        while early:
            one.send_signal(early.pop(0))

    heard = [n for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT) if signal.getsignal(n) is not signal.SIG_IGN]
    old = {signum: signal.signal(signum, forward) for signum in heard}
    try:
        yield add_child
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)
        for missed in early:
            signal.raise_signal(missed)
