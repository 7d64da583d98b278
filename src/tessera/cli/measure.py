"""`tessera measure -- COMMAND`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ArgumentError
from . import completion
from .entry import check_writable
from .plain import say

if TYPE_CHECKING:
    from ..monitor import Monitor
    from ..monitor.command import CommandRun

_AMOUNT = click.FloatRange(min=0, min_open=True)


@click.command("measure", context_settings={"allow_interspersed_args": False})
@click.option("--steps", type=_AMOUNT, help="How many steps the command does: gives J per step.")
@click.option("--samples", type=_AMOUNT, help="How many samples: gives J per sample.")
@click.option("--tokens", type=_AMOUNT, help="How many tokens: gives J per token.")
@click.option("--work", type=_AMOUNT, help="How much work of your own --unit.")
@click.option("--unit", help="The unit of --work, such as 'image'.")
@click.option(
    "--sensor",
    "sensors",
    multiple=True,
    shell_complete=completion.sensors,
    help="Use this sensor only (may be repeated); see `tessera doctor`.",
)
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Write the power samples to this CSV.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, on standard output.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def command(
    steps: float | None,
    samples: float | None,
    tokens: float | None,
    work: float | None,
    unit: str | None,
    sensors: tuple[str, ...],
    trace: Path | None,
    as_json: bool,
    command: tuple[str, ...],
) -> int:
    """Run any command, measure the machine meanwhile, and say what it cost.

    \b
    Examples:
      tessera measure -- python train.py
      tessera measure --steps 100 --trace power.csv -- python train.py --epochs 1

    The command's children are included, its output goes where it always goes, and its exit code is passed on.
    The answer is printed on standard error, so that pipes keep working. --json prints it on standard output, and
    what the command prints goes to standard error then.
    Scopes that the program opens itself (tessera.monitor.energy_scope) are listed as regions.
    """
    if not command or not command[0].strip():
        raise ArgumentError("no command to measure was given", fix="e.g. tessera measure -- python train.py")
    from ..schema import works

    named = {"step": steps, "sample": samples, "token": tokens}
    if work is not None and unit is None:
        raise ArgumentError("--work needs its --unit", fix="e.g. --work 5000 --unit image")
    given = list(works(named, work, unit, "e.g. --work 5000 --unit image").values())
    if trace:
        check_writable(trace, "--trace")
    from ..monitor import Monitor
    from ..monitor.command import CommandNotRun, measure_command
    from ..sensors.discover import discover

    found = discover(list(sensors) or None)
    monitor = Monitor(found.sensors, found.missing).start()
    if not as_json:
        _announce(monitor)
    try:
        run = measure_command(command, monitor, work=given, quiet=as_json)
    except CommandNotRun as exc:
        say(f"error: {exc}", err=True)
        return exc.exit_code
    finally:
        monitor.stop()
    _show(run, trace, as_json)
    if trace:
        try:
            run.trace.to_csv(trace)
        except OSError as exc:  # the disk filled up meanwhile: the answer above stands
            say(f"error: the power samples could not be written to {trace}: {exc.strerror}", err=True)
    return run.returncode


def _announce(monitor: Monitor) -> None:
    """The first line, before the command's own output: what measures, or that nothing does."""
    from ..report.screen import Console
    from ..report.text import sensors_line

    Console(stderr=True, highlight=False).print(sensors_line(monitor.sampler.domains))


def _show(run: CommandRun, trace: Path | None, as_json: bool) -> None:
    if as_json:
        import msgspec

        sys.stdout.flush()
        click.echo(msgspec.json.encode({"returncode": run.returncode, "report": run.report}).decode())
        return
    from ..analyze.rules_host import advise_measurement
    from ..report.screen import Console
    from ..report.text import answer, command_line

    out = Console(stderr=True, highlight=False)
    if trace:
        following = f"tessera measure --sensor replay:{trace} -- sleep 1"
    else:
        following = command_line(["tessera", "measure", "--trace", "power.csv", *_own_arguments()])
    advice = advise_measurement(run.report, run.telemetry)
    out.print(answer(run.report, advice=advice, next_command=following, returncode=run.returncode))


def _own_arguments() -> list[str]:
    """What the user typed after `measure`, to be typed again."""
    return sys.argv[sys.argv.index("measure") + 1 :] if "measure" in sys.argv else []
