"""`tessera-prof --pid PID`: look at a running process. `profile.attach` measures, `report/prof.py` renders."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .. import __version__
from ..errors import ArgumentError, TesseraError
from .failures import print_error
from .main import run_command
from .options import FILE, check_writable, duration_option, sensor_option

if TYPE_CHECKING:
    from ..profile.attach import Attached


@click.command("tessera-prof", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="tessera-prof")
@click.option("--pid", type=int, required=True, help="The process to look at: your own, or any as root.")
@click.option("--sample-ms", type=float, default=10.0, show_default=True, help="Milliseconds between two samples.")
@click.option("--gpu", is_flag=True, help="Show GPU clocks, utilisation and SM activity.")
@click.option("--mem", is_flag=True, help="Show memory of the process and the GPU, and DRAM activity.")
@click.option("--tc", is_flag=True, help="Show activity of tensor cores and other arithmetic units.")
@click.option("--collectives", is_flag=True, help="Show NVLink and PCIe traffic, and collectives in the trace.")
@click.option("--export", type=FILE, help="Write a trace for Perfetto (.json, .json.gz): Kineto's, with power in it.")
@click.option("--power", type=FILE, help="Write the power samples here; by default next to --export (.power.csv).")
@click.option("--summary", type=FILE, help="Write mean, min and max of every figure to this CSV.")
@duration_option("--duration", "How long to sample, e.g. 5s. [default: until the trace is complete]")
@click.option(
    "--steps", type=click.IntRange(0), default=3, show_default=True, help="Optimizer steps to trace; 0 traces by time."
)
@click.option(
    "--trace-ms", type=click.IntRange(1), default=250, show_default=True, help="How long to trace without steps."
)
@click.option(
    "--warmup-s",
    type=click.IntRange(0, 60),
    default=0,
    show_default=True,
    help="Seconds of GPU tracing to discard first.",
)
@click.option("--stacks", is_flag=True, help="Add Python stacks to the trace; slows the process while it is traced.")
@duration_option("--timeout", "How long to wait for the trace.", default="30s")
@sensor_option
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
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
) -> int:
    """Show power, clocks, activity and memory of a running process; record a Kineto trace of a PyTorch process.

    \b
    Example:
      tessera-prof --pid 12345 --export trace.json --summary perf.csv
      tessera-prof --pid 12345 --sample-ms 10 --gpu --mem --tc --collectives --duration 5s

    To be traced, a process must have been started with KINETO_USE_DAEMON=1 in its environment; no privilege is
    needed. The trace arrives within 8 s, because the process checks for requests every 5 s. Of a process started
    without it, Python functions are shown instead if py-spy is installed (the extra `attach`) and may read the
    process, as a debugger may. Figures of a GPU are those of the whole device, power of the CPU is the share of the
    process. --gpu --mem --tc --collectives choose what to show. [default: all]

    Exit code: 1 if --export was given and the process could not be traced, 2 for a wrong option.
    """
    from ..profile.attach import SECTIONS, AttachOptions, What, attach

    chosen = [s for s, on in zip(SECTIONS, (gpu, mem, tc, collectives), strict=True) if on]
    if export is not None and power is None:
        power = export.with_name(export.name.removesuffix(".gz").removesuffix(".json") + ".power.csv")
    files = {what: path for what, path in (("trace", export), ("power", power), ("summary", summary)) if path}
    if len(set(files.values())) < len(files):
        raise ArgumentError("two of --export, --power and --summary name the same file", fix="give each its own file")
    options = AttachOptions(
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

    with Quit() as quit_, _show_progress(as_json) as tell:
        attached = attach(pid, options, wait=quit_.wait, tell=tell)
    _write_files(attached, files)
    _print_answer(attached, files, as_json)
    return int(options.trace and attached.kineto is None and not attached.stopped)


@contextlib.contextmanager
def _show_progress(as_json: bool) -> Iterator[Callable[[str], None]]:
    """Show the current step on one line of the terminal."""
    if as_json or not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.text import Text

    from ..report.console import Console

    with Console(stderr=True).status("sampling") as status:
        yield lambda text: status.update(Text(text))  # a str would be markup


def _write_files(attached: Attached, files: dict[str, Path]) -> None:
    """Print an error for a file that cannot be written, and go on."""
    for what, write in (("trace", attached.export), ("power", attached.power.to_csv), ("summary", attached.summary)):
        if what in files:
            try:
                write(files[what])
            except (OSError, TesseraError) as exc:
                del files[what]
                print_error(exc)


def _print_answer(attached: Attached, files: dict[str, Path], as_json: bool) -> None:
    from ..report import prof as report

    if as_json:
        click.echo(report.to_json(attached, files))
        return
    from ..report.console import Console

    next_command = report.next_command(attached, files)
    Console(highlight=False).print(report.answer(attached, files=files, next_command=next_command))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `tessera-prof`."""
    run_command(command, "tessera-prof", argv)


if __name__ == "__main__":
    main()
