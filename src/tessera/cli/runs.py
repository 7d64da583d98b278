"""`tessera runs`: lists, compares and deletes run files."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ArgumentError, did_you_mean
from ..output import remove_controls
from .diff import command as diff_command
from .main import NearestGroup
from .options import RUNS, duration_option, json_option, print_json

if TYPE_CHECKING:
    from ..analyze.run_list import ListedRun

READ_BYTES = 8 << 20
"""Runs whose joules are not known yet are read at once up to this size in all: that takes a few seconds."""


class _RunsGroup(NearestGroup):
    """`tessera runs` and `tessera runs FOLDER` list."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group("runs", cls=_RunsGroup)
def command() -> None:
    """List the run files of a folder; compare two; delete old ones.

    \b
    Examples:
      tessera runs
      tessera runs diff runs/train.tessera runs/train-2.tessera
      tessera runs prune --keep 10 --older-than 30d

    Without a command it lists: `tessera runs list FOLDER`. If none is given, the folder is runs/, or the
    current one where there is no runs/.
    """


command.add_command(diff_command, "diff")
_FOLDER = click.argument("folder", required=False, type=click.Path(path_type=Path))


@command.command("list")
@_FOLDER
@click.option("--top", type=click.IntRange(1), help="Only so many of the newest.")
@click.option("--read", is_flag=True, help="Read large runs too whose joules are not known yet.")
@json_option
def list_runs(folder: Path | None, top: int | None, read: bool, as_json: bool) -> int:
    """List the run files of a folder, newest first: date, joules, seconds, joules a step, state, size, host, command.

    \b
    Example:
      tessera runs list runs --top 20

    The joules are those of `tessera report`. They are kept in ~/.cache/tessera once `tessera run`, `report` or `runs`
    has computed them, so that a long list is fast.
    """
    where = _check_folder(folder)
    runs = _read_runs(where, read=read)[:top]
    if as_json:
        print_json([r.to_dict() for r in runs])
        return 0
    from ..report.console import Console
    from ..report.runs import renderable

    if not runs:
        print(f"there is no run in {where}: record one with tessera run SCRIPT", file=sys.stderr)
        return 0
    Console(highlight=False).show(renderable(runs, next_command=_next_command(runs, where)))
    return 0


@command.command("prune")
@_FOLDER
@click.option("--keep", type=click.IntRange(0), help="Keep so many of the newest runs.")
@duration_option("--older-than", "Delete only runs that started longer ago than this, such as 30d.")
@click.option("--yes", is_flag=True, help="Delete; without it the command only shows what it would delete.")
def prune(folder: Path | None, keep: int | None, older_than_s: float | None, yes: bool) -> int:
    """Delete old run files, and the side files of a killed run. Without --yes it only shows them.

    \b
    Example:
      tessera runs prune runs --keep 10 --older-than 30d --yes

    Without FOLDER it is runs/, or the current folder where there is no runs/.

    A run is deleted if both conditions that you give hold. Other files, files that cannot be read as a run, runs that
    are being written, and HTML pages stay.
    """
    import time

    from ..analyze.run_list import choose_old_runs, delete_runs, describe_run, find_runs
    from ..units import format_bytes

    if keep is None and older_than_s is None:
        raise ArgumentError("nothing says which runs to delete", fix="give --keep 10, --older-than 30d, or both")
    runs = [describe_run(path) for path in find_runs(_check_folder(folder))]
    old = choose_old_runs(runs, keep=keep or 0, older_than_s=older_than_s or 0.0, now_ns=time.time_ns())
    for run in old:
        name = remove_controls(str(run.path)).replace("\n", " ")
        print(f"{'deleting' if yes else 'would delete'} {name} ({format_bytes(run.size_bytes, 3)})")
    size = delete_runs(old) if yes else sum(r.size_bytes for r in old)
    hint = "" if yes or not old else "; add --yes to delete them"
    print(f"{'deleted' if yes else 'would delete'} {len(old)} of {len(runs)} runs, {format_bytes(size, 3)}{hint}")
    return 0


def _check_folder(folder: Path | None) -> Path:
    where = folder or (RUNS if RUNS.is_dir() else Path())
    if where.is_dir():
        return where
    near = did_you_mean(where.name, list(command.commands))
    raise ArgumentError(f"there is no folder {where}{near}", fix="give the folder that the run files are in")


def _read_runs(folder: Path, *, read: bool) -> list[ListedRun]:
    from ..analyze.run_list import describe_run, find_runs

    runs = [describe_run(path) for path in find_runs(folder)]
    unknown = sum(r.size_bytes for r in runs if r.joules is None)
    if read or unknown <= READ_BYTES:
        runs = [r if r.joules or r.problem else describe_run(r.path, read=True) for r in runs]
    return sorted(runs, key=lambda r: r.start_ns, reverse=True)


def _next_command(runs: list[ListedRun], folder: Path) -> str | None:
    if any(r.joules is None and not r.problem for r in runs):
        return shlex.join(["tessera", "runs", "list", str(folder), "--read"])
    good = [r for r in runs if r.state == "ended"]
    if not good:
        return None
    before = next((r for r in good[1:] if _script(r) == _script(good[0])), None)
    if before is None:
        return shlex.join(["tessera", "report", str(good[0].path)])
    return shlex.join(["tessera", "diff", str(before.path), str(good[0].path)])


def _script(run: ListedRun) -> list[str]:
    """Return what ran, without its arguments: two runs of one script are worth a comparison."""
    return run.command.split()[:2]
