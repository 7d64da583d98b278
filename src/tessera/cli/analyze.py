"""`tessera analyze KIND TRACE`."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from ..analyze import KINDS
from ..errors import ArgumentError, TesseraError, did_you_mean
from . import completion
from .usage import quantity

if TYPE_CHECKING:
    from ..analyze.source import Source

LARGE_BYTES = 20 << 20
"""A smaller file is read before anybody looks at a progress bar."""


class KindType(click.ParamType):  # type: ignore[type-arg]
    """The name of an analysis; a wrong one is answered with the nearest."""

    name = "kind"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        plain = str(value).replace("-", "_")
        if plain not in KINDS:
            raise ArgumentError(
                f"there is no analysis {value!r}{did_you_mean(plain, KINDS)}", fix=f"one of: {', '.join(KINDS)}"
            )
        return plain

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(kind) for kind in KINDS if kind.startswith(incomplete.replace("-", "_"))]


def _bytes(text: str) -> int:
    from ..units import parse_bytes

    return parse_bytes(int(text) if text.isdigit() else text)


@click.command("analyze")
@click.argument("kind", type=KindType(), metavar="KIND")
@click.argument("trace", type=click.Path(exists=True, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--top", type=click.IntRange(1), default=20, show_default=True, help="How many rows to show.")
@click.option(
    "--power", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Power log of the same time as a trace: epoch_us, domain, watts; or nvidia-smi's CSV.",
)  # fmt: skip
@click.option("--by", help="breakdown: device or step; roofline: kernel or op.")
@click.option("--sort", help="kernels: time or energy.")
@click.option(
    "--min-bytes", callback=quantity(_bytes), metavar="SIZE", help="collectives: the smallest to list (64MiB)."
)
@click.option(
    "--on", "--arch", "on", shell_complete=completion.device, help="roofline, advise: the chip, such as h200 or sm90."
)
@click.option("--threshold", type=float, help="divergence: a fraction; power: watts.")
@click.option("--group-by", help="stalls, divergence: kernel, op or region.")
def command(kind: str, trace: Path, as_json: bool, top: int, power: Path | None, **options: Any) -> int:
    """Explain a recording: a run file, a Kineto trace (.json, .json.gz) or a folder with one for each rank.

    \b
    KIND is one of:
      breakdown     compute, communication, copies, idle and why, by device or step
      overlap       communication and copies that hide behind kernels
      kernels       every kernel: calls, times, joules
      critical_path what the end waited for
      collectives   bandwidth, skew and stragglers
      memcpy        copies by direction, pinned or pageable
      memory        allocated bytes and their peak
      power, roofline, stalls, divergence, advise

    \b
    Examples:
      tessera analyze breakdown trace.json.gz --by step
      tessera analyze collectives ranks/ --min-bytes 1MiB --json
    """
    from .. import analyze

    function = getattr(analyze, kind)
    given = _taken(kind, function, {k: v for k, v in options.items() if v is not None})
    try:
        with _progress(trace, quiet=as_json) as progress:
            source = read(kind, trace, power=power, progress=progress)
        result = function(source, **given)
    except TesseraError as exc:
        exc.what, exc.fix = typed(exc.what), typed(exc.fix) if exc.fix else None
        raise
    result = dataclasses.replace(result, missing={what: typed(fix) for what, fix in result.missing.items()})
    if as_json:
        click.echo(result.to_json())
        return 0
    from ..report.analysis import renderable
    from ..report.screen import Console

    console = Console(highlight=False)
    console.print(renderable(result, console.width, top=top), crop=False)
    return 0


_SPELLED = re.compile(r"""\b(power|by|sort|min_bytes|on|threshold|threshold_w|group_by)=(['"]?)([\w./%-]+)\2""")


def typed(text: str) -> str:
    """Arguments of the library as they are typed here: sort='time' is --sort time."""

    def option(found: re.Match[str]) -> str:
        return f"--{found[1].removesuffix('_w').replace('_', '-')} {found[3]}"

    return _SPELLED.sub(option, text)


def _taken(kind: str, function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options, once it is sure that the analysis has them."""
    known = inspect.signature(function).parameters
    taken = {}
    for name, value in options.items():
        own = next((n for n in (name, f"{name}_w") if n in known), None)  # --threshold of power is in watts
        if own is None:
            flag = name.replace("_", "-")
            raise ArgumentError(f"{kind} has no option --{flag}", fix="`tessera analyze --help` says which has it")
        taken[own] = value
    return taken


def read(
    kind: str, trace: Path, *, power: Path | None = None, progress: Callable[[float], None] | None = None
) -> Source:
    """Whatever a path leads to; the ranks of a folder are read by several processes."""
    from ..analyze.source import open_source

    if trace.is_dir():
        if power is not None:
            raise ArgumentError(
                f"--power is for one trace, and {trace} is a folder",
                why="runs of ranks (.tessera) have their power inside",
                fix="leave --power out, or give one trace of the folder",
            )
        from ..analyze.folder import kinds_for, read_folder

        return read_folder(trace, progress=progress, kinds=kinds_for(kind))
    if kind == "power" and trace.suffix == ".csv":  # a log alone has watts to look at, and nothing else
        from ..analyze.source import Source
        from ..profile.powerlog import read_power
        from ..timeline import Builder

        return Source(trace.name, Builder().build(), read_power(trace))
    return open_source(trace, power=power, progress=progress)


@contextlib.contextmanager
def _progress(trace: Path, *, quiet: bool) -> Iterator[Callable[[float], None] | None]:
    """A bar on stderr while a large recording is read, where somebody looks."""
    size = sum(f.stat().st_size for f in trace.iterdir() if f.is_file()) if trace.is_dir() else trace.stat().st_size
    if quiet or size < LARGE_BYTES or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import Progress

    from ..report.screen import Console

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"reading {trace.name}", total=1.0)
        yield lambda share: bar.update(task, completed=share)
