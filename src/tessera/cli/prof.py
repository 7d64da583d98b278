"""`tessera-prof --pid PID`: look at a running process. `profile.attach` computes, `report/prof.py` lays out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .. import __version__
from ..errors import ArgumentError, TesseraError
from ..units import parse_duration
from . import completion
from .entry import check_writable, enter
from .plain import say
from .usage import quantity

if TYPE_CHECKING:
    from ..profile.attach import Attached

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("tessera-prof", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="tessera-prof")
@click.option("--pid", type=int, required=True, help="The process to look at; your own (root may take any).")
@click.option("--sample-ms", type=float, default=10.0, show_default=True, help="Milliseconds between two samples.")
@click.option("--gpu", is_flag=True, help="GPU use: clocks, utilisation, SM activity.")
@click.option("--mem", is_flag=True, help="Memory: of the process, of the GPU, DRAM activity.")
@click.option("--tc", is_flag=True, help="Tensor cores and the other arithmetic units.")
@click.option("--collectives", is_flag=True, help="NVLink and PCIe traffic; collectives in the trace.")
@click.option("--export", type=_FILE, help="Write a trace for Perfetto (.json, .json.gz): Kineto's, with power in it.")
@click.option("--power", type=_FILE, help="Write the power samples here; by default beside --export (.power.csv).")
@click.option("--summary", type=_FILE, help="Write mean, min and max of every figure to this CSV.")
@click.option("--duration", "duration_s", metavar="TIME", callback=quantity(parse_duration),
              help="How long to look, e.g. 5s; by default until the trace is there.")  # fmt: skip
@click.option(
    "--steps", type=click.IntRange(0), default=3, show_default=True, help="Optimizer steps to trace; 0: by time."
)
@click.option("--trace-ms", type=click.IntRange(1), default=250, show_default=True, help="Time to trace without steps.")
@click.option("--warmup-s", type=click.IntRange(0, 60), default=0, show_default=True, help="GPU tracing on before it.")
@click.option("--stacks", is_flag=True, help="Python stacks in the trace; slows the process while it is traced.")
@click.option("--timeout", "timeout_s", default="30s", show_default=True, metavar="TIME",
              callback=quantity(parse_duration), help="How long to wait for the trace.")  # fmt: skip
@click.option(
    "--sensor",
    "sensors",
    multiple=True,
    shell_complete=completion.sensors,
    metavar="NAME",
    help="Use this power sensor; may be given again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@click.option("--debug", is_flag=True, help="Show a traceback when something goes wrong.")
def command(
    pid: int,
    sample_ms: float,
    gpu: bool,
    mem: bool,
    tc: bool,
    collectives: bool,
    export: Path | None,
    power: Path | None,
    summary: Path | None,
    duration_s: float | None,
    steps: int,
    trace_ms: int,
    warmup_s: int,
    stacks: bool,
    timeout_s: float,
    sensors: tuple[str, ...],
    as_json: bool,
    debug: bool,
) -> int:
    """Power, clocks, activity and memory of a running process; a Kineto trace of a PyTorch one.

    \b
    Example:
      tessera-prof --pid 12345 --export trace.json --summary perf.csv
      tessera-prof --pid 12345 --sample-ms 10 --gpu --mem --tc --collectives --duration 5s

    A trace needs a process that was started with KINETO_USE_DAEMON=1 in its environment; no privilege. It comes
    within 8 s, and within 5 s mostly where an optimizer steps: the process asks every 5 s. Power and activity are
    those of the whole device. --gpu --mem --tc --collectives choose; without any of them all are shown.

    Exit code 1: the process was to be traced, and was not; 2: a wrong option.
    """
    from ..profile.attach import SECTIONS, Options, What, attach

    chosen = [s for s, on in zip(SECTIONS, (gpu, mem, tc, collectives), strict=True) if on]
    if export is not None and power is None:
        power = export.with_name(export.name.removesuffix(".gz").removesuffix(".json") + ".power.csv")
    files = {what: path for what, path in (("trace", export), ("power", power), ("summary", summary)) if path}
    if len(set(files.values())) < len(files):
        raise ArgumentError("two of --export, --power and --summary name one file", fix="give each a name of its own")
    options = Options(
        sample_s=sample_ms * 1e-3,
        duration_s=duration_s,
        sections=chosen or SECTIONS,
        what=What(steps=steps, seconds=trace_ms * 1e-3, warmup_s=warmup_s, stacks=stacks, memory=mem),
        trace=export is not None,
        timeout_s=timeout_s,
        sensors=sensors,
    )
    for path in files.values():
        check_writable(path)
    from .watch import Quit

    with Quit() as quit_, _progress(as_json) as tell:
        attached = attach(pid, options, wait=quit_.wait, tell=tell)
    _write(attached, files)
    _show(attached, files, as_json)
    wanted = options.trace and attached.kineto_state.state in ("ready", "starting", "unreachable")
    return int(wanted and attached.kineto is None and not attached.stopped)


@contextlib.contextmanager
def _progress(as_json: bool) -> Iterator[Callable[[str], None]]:
    """A line on the terminal that says what is being waited for."""
    if as_json or not sys.stderr.isatty():
        yield lambda _text: None
        return
    from ..report.screen import Console

    with Console(stderr=True).status("sampling") as status:
        yield status.update


def _write(attached: Attached, files: dict[str, Path]) -> None:
    """What cannot be written is said and left out; the answer stands."""
    for what, write in (("trace", attached.export), ("power", attached.power.to_csv), ("summary", attached.summary)):
        if what in files:
            try:
                write(files[what])
            except (OSError, TesseraError) as exc:
                path = files.pop(what)
                say(f"error: {path} could not be written: {exc}", err=True)


def _show(attached: Attached, files: dict[str, Path], as_json: bool) -> None:
    from ..report import prof as report

    if as_json:
        click.echo(report.to_json(attached, files))
        return
    from ..report.screen import Console

    following = report.next_command(attached, files)
    Console(highlight=False).print(report.answer(attached, files=files, next_command=following))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `tessera-prof`."""
    enter(command, "tessera-prof", argv)


if __name__ == "__main__":
    main()
