"""`tessera measure -- COMMAND`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ArgumentError
from .failures import print_error, report_failure
from .options import FILE, check_writable, print_json, scope_option, sensor_option

if TYPE_CHECKING:
    from ..monitor import Monitor
    from ..monitor.command import CommandRun
    from ..recording import CpuUse
    from ..schema import Scope, Work

_AMOUNT = click.FloatRange(min=0, min_open=True)


@click.command("measure", context_settings={"allow_interspersed_args": False})
@click.option("--steps", type=_AMOUNT, help="How many steps the command does: gives J per step.")
@click.option("--samples", type=_AMOUNT, help="How many samples: gives J per sample.")
@click.option("--tokens", type=_AMOUNT, help="How many tokens: gives J per token.")
@click.option("--work", type=_AMOUNT, help="How much work, in your own --unit.")
@click.option("--unit", help="The unit of --work, such as 'image'.")
@click.option("--runs", type=click.IntRange(1), help="Measure this many runs of each command.")
@click.option("--warmup", type=click.IntRange(0), default=0, help="With --runs: runs before them that do not count.")
@click.option("--show-output", is_flag=True, help="With --runs: show what the commands print.")
@sensor_option
@scope_option
@click.option("--trace", type=FILE, help="Write the power samples to this CSV.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, on standard output.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def command(
    steps: float | None,
    samples: float | None,
    tokens: float | None,
    work: float | None,
    unit: str | None,
    runs: int | None,
    warmup: int,
    show_output: bool,
    sensors: tuple[str, ...],
    scope: Scope | None,
    trace: Path | None,
    as_json: bool,
    command: tuple[str, ...],
) -> int:
    """Run any command and report its energy.

    \b
    Examples:
      tessera measure -- python train.py
      tessera measure --steps 100 --trace power.csv -- python train.py --epochs 1
      tessera measure --runs 10 --warmup 2 -- python a.py -- python b.py

    Includes the command's child processes. What a sensor measures is everything that ran meanwhile on the chip; see
    --scope for the CPU. The command's output is not changed, and its exit code is passed on. The report is
    printed on standard error, so that pipes keep working; with --json it is printed on standard output, and the
    command's own output goes to standard error. Scopes that the program opens itself (tessera.monitor.energy_scope)
    are listed as regions.

    With --runs, commands are separated by -- and run in turns (A B, B A, ...), and what they print is shown only for a
    run that fails. That run ends the measurement, and its exit code is passed on; otherwise the exit code is 0. In a
    command that needs a -- of its own, quote it: sh -c 'git log -- file'.
    """
    amounts = {"step": steps, "sample": samples, "token": tokens}
    work_done = _check_work(command, amounts, work, unit)
    _check_runs(runs, trace, needs_runs=bool(warmup or show_output))
    from ..monitor.command import CommandNotRun, measure_command, survive_user_signals
    from .repeat import measure_in_turns, split_commands

    survive_user_signals()
    commands = split_commands(command) if runs is not None else []
    monitor = _start_monitor(sensors, scope, as_json)
    try:
        if runs is not None:
            return measure_in_turns(
                commands, monitor, runs=runs, warmup=warmup, work=work_done, as_json=as_json, show_output=show_output
            )
        run = measure_command(command, monitor, work=work_done, quiet=as_json)
    except CommandNotRun as exc:
        return report_failure(exc, exc.exit_code, as_json=as_json)
    finally:
        monitor.stop()
    _print_report(run, command, _write_trace(run, trace), as_json)
    return run.returncode


def _check_work(
    command: Sequence[str], amounts: Mapping[str, float | None], work: float | None, unit: str | None
) -> list[Work]:
    """Return the work that the command is said to do."""
    if not command or not command[0].strip():
        raise ArgumentError("no command to measure was given", fix="e.g. tessera measure -- python train.py")
    from ..schema import works

    if work is not None and unit is None:
        raise ArgumentError("--work needs --unit", fix="e.g. --work 5000 --unit image")
    return list(works(amounts, work, unit, "e.g. --work 5000 --unit image").values())


def _check_runs(runs: int | None, trace: Path | None, *, needs_runs: bool) -> None:
    """Refuse options that do not go together, before anything runs."""
    if trace:
        check_writable(trace)
    if runs is None and needs_runs:
        raise ArgumentError("--warmup and --show-output need --runs", fix="e.g. --runs 10 --warmup 2")
    if runs is not None and trace:
        raise ArgumentError("--trace is for a single run", fix="leave out --runs, or --trace")


def _start_monitor(sensors: Sequence[str], scope: Scope | None, as_json: bool) -> Monitor:
    """Start sampling for a command that this process starts, and say what is measured."""
    from ..monitor import Monitor
    from ..sensors.discover import discover
    from ..sensors.processes import ProcessTree

    available = discover(list(sensors) or None, scope=scope, tree=ProcessTree(with_root=False))
    monitor = Monitor(available.sensors, available.missing).start()
    if not as_json:
        from ..report.console import Console
        from ..report.measure import sensors_line

        Console(stderr=True, highlight=False).print(sensors_line(monitor.sampler.domains))
    return monitor


def _write_trace(run: CommandRun, trace: Path | None) -> Path | None:
    """Write the samples to a file; None where none was asked for, or the disk filled up: the report is worth having."""
    if trace is None:
        return None
    try:
        return run.trace.to_csv(trace)
    except ArgumentError as exc:
        print_error(exc)
        return None


def _print_report(run: CommandRun, command: Sequence[str], trace: Path | None, as_json: bool) -> None:
    if as_json:
        from ..config import find_cost

        sys.stdout.flush()
        total = run.report.total
        cost = find_cost(total.energy_j, total.error_j)
        whole = {"returncode": run.returncode, "command": list(command), "report": run.report}
        print_json({**whole, "cost": cost, "cpu_use": _cpu_use(run)})
        return
    from ..analyze.rules_host import advise_measurement
    from ..report.console import Console
    from ..report.measure import answer, busy_text

    if trace:
        next_command = shlex.join(["tessera", "measure", "--sensor", f"replay:{trace}", "--", "sleep", "1"])
    else:
        arguments = sys.argv[sys.argv.index("measure") + 1 :] if "measure" in sys.argv else []
        next_command = shlex.join(["tessera", "measure", "--trace", "power.csv", *arguments])
    advice = advise_measurement(run.report, run.telemetry)
    busy = busy_text(_cpu_use(run))
    screen = answer(run.report, advice=advice, next_command=next_command, returncode=run.returncode, busy=busy)
    Console(stderr=True, highlight=False).print(screen)


def _cpu_use(run: CommandRun) -> CpuUse | None:
    """Return who used the CPUs meanwhile, as in a recorded run."""
    from ..profile.cpu_use import count_cores
    from ..recording import CpuUse

    cpu = run.cpu
    if cpu is None:
        return None
    return CpuUse(
        cpu_s=cpu.cpu_s,
        over_s=cpu.over_s,
        waited_s=cpu.waited_s,
        others_s=cpu.others_s,
        children={},
        cores=count_cores(),
    )
