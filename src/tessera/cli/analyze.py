"""`tessera analyze KIND TRACE`."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from ..analyze import KINDS
from ..errors import ArgumentError, did_you_mean
from .attribute import POWER_HELP
from .options import ExistingPath, complete_device, json_option, parse_option

if TYPE_CHECKING:
    from ..recording import Recording

ON_DEVICE_ONLY = ("overlap", "kernels", "memcpy")
"""The analyses that use only device rows. Collectives of a host hide behind its operators."""
LARGE_BYTES = 20 << 20
"""A smaller file is read before anybody notices a progress bar."""


class KindType(click.ParamType):  # type: ignore[type-arg]
    """The name of an analysis; a wrong one is answered with the nearest."""

    name = "kind"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        kind = str(value).replace("-", "_")
        if kind not in KINDS:
            raise ArgumentError(
                f"there is no analysis {value!r}{did_you_mean(kind, KINDS)}", fix=f"one of: {', '.join(KINDS)}"
            )
        return kind

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(kind) for kind in KINDS if kind.startswith(incomplete.replace("-", "_"))]


def _parse_bytes(text: str) -> int:
    from ..units import parse_bytes

    return parse_bytes(int(text) if text.isdigit() else text)


@click.command("analyze")
@click.argument("kind", type=KindType(), metavar="KIND")
@click.argument("trace", type=ExistingPath(folder=True))
@json_option
@click.option("--top", type=click.IntRange(1), default=20, show_default=True, help="How many rows to show.")
@click.option("--power", metavar="FILE", type=ExistingPath(), help=POWER_HELP)
@click.option(
    "--by", help="breakdown: device or step; roofline: kernel or op; sequences: stream or op; phases: phase or batch."
)
@click.option("--step", help="critical_path: of this step only: its name, the number in it, or a region.")
@click.option("--against", type=ExistingPath(folder=True), metavar="TRACE", help="modules: compare with this one.")
@click.option("--sort", help="kernels: time or energy.")
@click.option("--min-bytes", callback=parse_option(_parse_bytes), metavar="SIZE", help="collectives: the smallest.")
@click.option("--on", "--arch", "on", shell_complete=complete_device, help="roofline, advise: the chip, e.g. h200.")
@click.option("--threshold", type=float, help="divergence: a fraction; power: watts.")
@click.option("--group-by", help="stalls, divergence: kernel, op or region.")
def command(kind: str, trace: Path, as_json: bool, top: int, power: Path | None, **options: Any) -> int:
    """Explain a recording: a run file, a Kineto trace (.json, .json.gz) or a folder with one for each rank.

    \b
    Examples:
      tessera analyze breakdown trace.json.gz --by step
      tessera analyze collectives ranks/ --min-bytes 1MiB --json

    \b
    KIND is one of:
      breakdown     compute, communication, copies, idle and why, by device or step
      overlap       communication and copies that run at the same time as kernels
      kernels       every kernel: calls, times, joules
      sequences     kernels that follow each other again and again: candidates for fusion
      launches      launch delay, queue length and short kernels, by stream
      modules       the tree of modules with what each launched; --against TRACE: what differs
      phases        prefill and decode of vLLM and SGLang: tokens/s, joules a token
      critical_path the chain of work that decided when the run ended
      collectives   bandwidth, skew and stragglers
      memcpy        copies by direction, pinned or pageable
      memory        allocated bytes and their peak
      power, roofline, stalls, divergence, advise
    """
    from .. import analyze

    function = getattr(analyze, kind)
    arguments = _select_arguments(kind, function, {k: v for k, v in options.items() if v is not None})
    with _show_progress(trace, quiet=as_json) as progress:
        source = read(kind, trace, power=power, progress=progress)
    result = function(source, **arguments)
    if as_json:
        click.echo(result.to_json())
        return 0
    from ..report.analysis import renderable
    from ..report.console import Console

    console = Console(highlight=False)
    console.print(renderable(result, console.width, top=top), crop=False)
    return 0


def _select_arguments(kind: str, function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options as arguments of the analysis; an error where it has no such argument."""
    parameters = inspect.signature(function).parameters
    arguments = {}
    for option, value in options.items():
        name = next((n for n in (option, f"{option}_w") if n in parameters), None)  # power: --threshold is in watts
        if name is None:
            flag = option.replace("_", "-")
            raise ArgumentError(
                f"{kind} has no option --{flag}", fix="run `tessera analyze --help` to see which analysis has it"
            )
        arguments[name] = value
    return arguments


def read(
    kind: str, trace: Path, *, power: Path | None = None, progress: Callable[[float], None] | None = None
) -> Recording:
    """Read the recording at a path; several processes read the ranks of a folder."""
    from ..profile.open_recording import open_recording

    if trace.is_dir() and power is None:
        from ..profile.ranks.merge import merge
        from ..record import ON_DEVICE

        kinds = ON_DEVICE if kind in ON_DEVICE_ONLY else None
        return merge(trace, progress=progress, kinds=kinds, workers=None, collectives=False)
    if kind == "power" and trace.suffix == ".csv" and power is None:  # a power log without a trace
        from ..profile.powerlog import read_power
        from ..recording import Facts, Recording
        from ..timeline import Builder

        return Recording(Builder().build(), read_power(trace), facts=Facts(name=trace.name))
    return open_recording(trace, power=power, progress=progress)


@contextlib.contextmanager
def _show_progress(trace: Path, *, quiet: bool) -> Iterator[Callable[[float], None] | None]:
    """Show a bar on stderr while a large recording is read, if stderr is a terminal."""
    size = sum(f.stat().st_size for f in trace.iterdir() if f.is_file()) if trace.is_dir() else trace.stat().st_size
    if quiet or size < LARGE_BYTES or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import Progress

    from ..report.console import Console

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading the recording", total=1.0)
        yield lambda share: bar.update(task, completed=share)
