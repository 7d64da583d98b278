"""`tessera measure --runs N -- A -- B`: measures commands in turns, with progress, and prints the verdict."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import IO, TYPE_CHECKING

from ..errors import ArgumentError
from .options import print_json

if TYPE_CHECKING:
    from ..monitor import Monitor
    from ..schema import Work

TAIL_LINES = 20
"""So many last lines of a failed run are shown."""


def split_commands(words: Sequence[str]) -> list[list[str]]:
    """Return the commands between `--`."""
    commands = [list(part) for is_dash, part in groupby(words, lambda word: word == "--") if not is_dash]
    if ("--", "--") in pairwise([*words, "--"]):
        raise ArgumentError("there is no command after a `--`", fix="leave it out, or add the command")
    if not commands or not all(command[0].strip() for command in commands):
        raise ArgumentError(
            "no command to measure was given", fix="e.g. tessera measure --runs 10 -- python a.py -- python b.py"
        )
    return commands


def measure_in_turns(
    commands: Sequence[Sequence[str]],
    monitor: Monitor,
    *,
    runs: int,
    warmup: int,
    work: Sequence[Work],
    as_json: bool,
    show_output: bool,
) -> int:
    """Measure, print the screen on standard error or the JSON on standard output, and return the exit code."""
    from rich.progress import Progress

    from ..monitor.repeat import measure_repeatedly
    from ..report.console import Console
    from ..report.repeat import renderable

    console = Console(stderr=True, highlight=False)
    # It draws before each run and not during one: a thread that redraws would be measured as well.
    bar = Progress(console=console, transient=True, auto_refresh=False, disable=show_output or not console.is_terminal)
    task = bar.add_task("")

    def show_progress(number: int, total: int, what: str) -> None:
        bar.update(task, completed=number, total=total, description=what, refresh=True)

    with tempfile.TemporaryFile() as log:
        output = None if show_output else log
        with bar:
            result = measure_repeatedly(
                commands,
                monitor,
                runs=runs,
                warmup=warmup,
                work=work,
                output=output,
                quiet=as_json,
                progress=show_progress,
            )
        if result.returncode:
            _print_tail(log)
    if as_json:
        sys.stdout.flush()
        print_json(result.to_dict())
    else:
        console.show(renderable(result))
    return result.returncode


def _print_tail(log: IO[bytes]) -> None:
    """The last lines that the failed run printed."""
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    for line in lines:
        print("".join(c if c.isprintable() else " " for c in line), file=sys.stderr)
