"""`tessera run SCRIPT`."""

from __future__ import annotations

import contextlib
import math
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ArgumentError, TesseraError
from .entry import check_writable
from .plain import say

if TYPE_CHECKING:
    from ..analyze.answer import Answer
    from ..attribute.table import EnergyTable
    from ..profile.launch import Plan
    from ..profile.runfile import RunFile
    from ..timeline.columns import Timeline

STDERR = 2
EXIT_SIGNAL = 128
# GPT-2's training makes 240 000 events a second, and each costs 10 us and 1 KB until it is in the file: five seconds
# are a hundred steps, 12 s of reading and a gigabyte.
LIMIT_S = 5.0


def _steps(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """`10:20`: steps 10 to 19; `20`: steps 0 to 19."""
    if value is None:
        return None
    first, colon, end = value.partition(":")
    try:
        found = (int(first or 0), int(end)) if colon else (0, int(first))
    except ValueError:
        found = (0, 0)
    if not 0 <= found[0] < found[1]:
        raise ArgumentError(
            f"--steps {value}: these are no steps",
            fix="give FIRST:END, such as 10:20 for steps 10 to 19, or END alone for all before it",
        )
    return found


def _seconds(_ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Seconds from 0 on: 0 is "no such limit", and what is no time must not reach the script's process."""
    if value is None or (math.isfinite(value) and value >= 0):
        return value
    meaning = {"limit_s": "to trace to the end", "flush_s": "to write at the end only"}[str(param.name)]
    raise ArgumentError(f"{param.opts[0]} {value:g} is not a time", fix=f"give seconds above 0, or 0 {meaning}")


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("-m", "--module", is_flag=True, help="Run a module, as `python -m` does.")
@click.option(
    "--mode",
    type=click.Choice(["timeline", "sampling", "summary"]),
    default="timeline",
    show_default=True,
    help="Every kernel; or power, clocks and stacks only; or totals by name, for days.",
)
@click.option(
    "--steps", metavar="[FIRST:]END", callback=_steps,
    help="Trace these steps only, END left out; 10 is 0:10. Power is recorded throughout.",
)  # fmt: skip
@click.option("--limit", "limit_s", callback=_seconds, type=float, default=LIMIT_S, show_default=True,
              help="Trace this many seconds from the first step on; 0: to the end.")  # fmt: skip
@click.option("--flush", "flush_s", callback=_seconds, type=float,
              help="Bring the trace to the file this often (s), against crashes; 0: at the end.")  # fmt: skip
@click.option("--shapes/--no-shapes", default=True, show_default=True, help="Record the shapes of operators.")
@click.option("--stack", is_flag=True, help="Trace Python functions too: slow.")
@click.option("--modules", is_flag=True, help="Record which nn.Module launched what.")
@click.option("--memory", is_flag=True, help="Record every allocation: memory over time on the page.")
@click.option("--counters", is_flag=True, help="Run it again under ncu for hardware counters (NVIDIA).")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="The run file. [default: runs/NAME.tessera]"
)
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a self-contained page too.")
@click.option("--json", "as_json", is_flag=True, help="Print the joules as JSON, on standard output.")
@click.argument("target", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    module: bool, mode: str, steps: tuple[int, int] | None, limit_s: float, flush_s: float | None, shapes: bool,
    stack: bool, modules: bool, memory: bool, counters: bool, out: Path | None, html: Path | None, as_json: bool,
    target: str, arguments: tuple[str, ...],
) -> int:  # fmt: skip
    """Run a Python script unchanged, and say which kernels, operators and steps its joules went to.

    \b
    Examples:
      tessera run train.py --epochs 1
      tessera run --steps 10:20 --html report.html train.py
      tessera run -m package.train
      torchrun --nproc-per-node 8 --no-python tessera run train.py

    Steps are those of the script's optimizer or, with --steps, the calls of its model. Its output goes where it
    always goes, its exit code is passed on, and Ctrl-C still reports. Everything is written to one file as it happens.
    Under torchrun each rank writes its own, and rank 0 prints.
    """
    from ..profile.launch import Plan
    from ..profile.options import MODES

    if not module and not Path(target).exists():
        raise ArgumentError(f"there is no script {target!r}", fix="give a Python file, or -m and the name of a module")
    for path in (out, html):
        if path is not None:
            check_writable(path, parents=True)
    chosen = next(m for m in MODES if m == mode)
    plan = Plan(
        target=target, module=module, argv=list(arguments), path=str(_path(out, target, module)), mode=chosen,
        command=["python", *(["-m"] if module else []), target, *arguments], shapes=shapes, stack=stack,
        modules=modules, memory=memory, steps=steps, flush_s=flush_s or None,
        limit_s=None if steps or chosen == "summary" else limit_s or None,
    )  # fmt: skip
    if os.environ.get("RANK", "0") != "0":
        return _run(plan, as_json, None)
    with contextlib.ExitStack() as opened:
        return _run_and_answer(plan, counters, html, as_json, opened)


def _run_and_answer(plan: Plan, counters: bool, html: Path | None, as_json: bool, opened: contextlib.ExitStack) -> int:
    """Run it and say what it cost; `opened` closes the run file when all is said."""
    found: list[tuple[RunFile, Timeline, EnergyTable]] = []

    def early() -> None:
        """Read the run while the script's process takes itself apart; what fails here is told when it is gone."""
        with contextlib.suppress(TesseraError):
            found.append(_read(plan, opened))

    code = _run(plan, as_json, None if counters else early)
    if not Path(plan.path).exists():
        return code or 1  # it said why
    try:
        if counters:
            _counters(plan)
        _answer(*(found[0] if found else _read(plan, opened)), code, html, as_json)
    except TesseraError as exc:
        say(f"error: {exc}", err=True)
        return code or 1
    return code


def _path(out: Path | None, target: str, module: bool) -> Path:
    from ..profile.session import default_path, with_rank

    if out is not None:
        path = with_rank(out)
        if path.exists():
            raise ArgumentError(
                f"{path} is there already", why="a run is never overwritten unasked", fix="give --out another name"
            )
        return path
    return default_path(target.replace(".", "-") if module else Path(target).stem or "run")


def _run(plan: Plan, quiet: bool, early: Callable[[], None] | None) -> int:
    """Run the plan in a child of this interpreter; its exit code, as a shell would say it.

    `early` is called when the run file is whole and the child still there: torch and CUDA take a second to go.
    """
    import msgspec

    from ..monitor.command import signals_to

    told, tells = os.pipe()
    argv = [sys.executable, "-m", "tessera.profile.launch", msgspec.json.encode(plan).decode(), str(tells)]
    with signals_to() as started:
        try:
            child = subprocess.Popen(argv, stdout=STDERR if quiet else None, pass_fds=(tells,))
        finally:
            os.close(tells)
        started(child)
        whole = early is not None and _listen(child, told)
    try:
        if early is not None and whole:
            early()  # signals are our own here: whoever will not wait for our reading may end it
    finally:
        with signals_to(child):
            code = child.wait()
        os.close(told)
    return EXIT_SIGNAL - code if code < 0 else code


def _listen(child: subprocess.Popen[bytes], told: int) -> bool:
    """Follow what the child says of its end; whether its file is whole and it still there. False where we cannot."""
    from ..profile.launch import CLOSED, ENDED

    try:
        gone = os.pidfd_open(child.pid)
    except (AttributeError, OSError):  # neither macOS nor Linux before 5.3 have it
        return False
    try:
        while told in select.select([told, gone], [], [])[0]:
            said = os.read(told, 1)
            if said == ENDED:
                _import()
            else:
                return said == CLOSED
        return False
    finally:
        os.close(gone)


def _import() -> None:
    """What the answer needs, while the trace is brought home."""
    from ..analyze import answer
    from ..attribute import ledger, solve
    from ..profile import untraced
    from . import report

    del answer, ledger, solve, untraced, report


def _read(plan: Plan, opened: contextlib.ExitStack) -> tuple[RunFile, Timeline, EnergyTable]:
    from ..profile.recorded import timeline_of
    from ..profile.runfile import RunFile
    from ..profile.untraced import table_of

    run = opened.enter_context(RunFile(plan.path))
    _progress(f"reading {run.rows:,} events")
    timeline = timeline_of(run)
    _progress("attributing joules")
    return run, timeline, table_of(run, timeline)


def _answer(run: RunFile, timeline: Timeline, table: EnergyTable, code: int, html: Path | None, as_json: bool) -> None:
    from ..analyze.answer import answer
    from .report import print_answer, write_page

    found = answer(run, table, timeline)
    page = html or (None if as_json else run.path.with_suffix(".html"))
    written = write_page(page, run, table, timeline, found) if page else None
    _progress("")
    if as_json:
        _json(run, table, found, code)
    else:
        print_answer(run, table, found, written, stderr=True)


def _counters(plan: Plan) -> None:
    """The counters of a second run under ncu, kept in the file: whoever reads it merges them by kernel."""
    from ..profile.counters import replay
    from ..profile.runfile import RunWriter

    argv = [sys.executable, *(["-m"] if plan.module else []), plan.target, *plan.argv]
    found = replay(argv, progress=lambda s: _progress(f"replaying under ncu, {s:.0f} s"))
    with RunWriter(plan.path, mode="append") as writer:
        writer.set("counters", list(found))


def _json(run: RunFile, table: EnergyTable, found: Answer, code: int) -> None:
    import msgspec

    sys.stdout.flush()
    said = {"returncode": code, "path": str(run.path), "mode": run.get("mode"), "run": found.whole.to_json()}
    said |= table.to_json()
    said["tracing"] = found.tracing.to_json() if found.tracing is not None else None
    summary = run.get("summary")
    if summary:
        said["summary"] = summary
    click.echo(msgspec.json.encode(said).decode())


def _progress(text: str, width: int = 60) -> None:
    """One line on a terminal, overwritten by the next; nothing elsewhere."""
    if sys.stderr.isatty():
        say("\r" + f"tessera: {text}".ljust(width) if text else "\r" + " " * width + "\r", nl=False, err=True)
