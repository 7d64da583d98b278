"""`tessera run SCRIPT`."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ArgumentError, RecordingError, TesseraError
from ..job_rank import find_rank
from ..output import cannot_write
from .failures import report_failure
from .options import FILE, RUNS, WordChoice, check_writable, scope_option
from .run_report import print_progress, report_run

if TYPE_CHECKING:
    from ..profile.launch import LaunchPlan
    from ..recording import Recording

# GPT-2's training makes 240 000 events a second, and each costs 10 us and 1 KB until it is in the file: five seconds
# are a hundred steps, 12 s of reading and a gigabyte.
LIMIT_S = 5.0


def _parse_steps(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Parse `10:20` as steps 10 to 19, and `20` as steps 0 to 19."""
    if value is None:
        return None
    first, colon, end = value.partition(":")
    try:
        steps = (int(first or 0), int(end)) if colon else (0, int(first))
    except ValueError:
        steps = (0, 0)
    if not 0 <= steps[0] < steps[1]:
        raise ArgumentError(
            f"--steps {value} is not a range of steps",
            fix="give FIRST:END, such as 10:20 for steps 10 to 19, or END alone for the first steps",
        )
    return steps


def _parse_seconds(_ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Return seconds, 0 or more; 0 means "no such limit"."""
    if value is None or (math.isfinite(value) and value >= 0):
        return value
    meaning = {"limit_s": "to trace to the end", "flush_s": "to write only at the end"}[str(param.name)]
    raise ArgumentError(f"{param.opts[0]} {value:g} is not a time", fix=f"give seconds above 0, or 0 {meaning}")


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("-m", "--module", is_flag=True, help="Run a module, as `python -m` does.")
@click.option(
    "--mode",
    type=WordChoice(["light", "operators", "sampling", "summary"], former=["timeline", "kernels"]),
    help="light: every kernel of the whole run, operators of a few steps (the default); operators: every operator too, "
    "which slows the program; sampling: only power, clocks and stacks; summary: totals by name, for runs of days.",
)
@click.option(
    "--operator-steps",
    type=click.IntRange(min=0),
    metavar="N",
    help="With light: trace the operators of N steady steps.  [default: 3]",
)
@click.option(
    "--steps",
    metavar="[FIRST:]END",
    callback=_parse_steps,
    help="Trace operators in these steps only, without END; 10 means 0:10. Power is recorded throughout.",
)
@click.option(
    "--limit",
    "limit_s",
    callback=_parse_seconds,
    type=float,
    default=LIMIT_S,
    show_default=True,
    help="Where operators are traced throughout (--mode operators, or no GPU): this many seconds from the first step "
    "on, and the step that runs then to its end, but at most 20 steps for each second; 0 traces to the end.",
)
@click.option(
    "--flush",
    "flush_s",
    callback=_parse_seconds,
    type=float,
    help="Write the trace to the file this often (s), in case of a crash; 0 writes at the end.",
)
@click.option("--shapes/--no-shapes", default=True, show_default=True, help="Record the shapes of operators.")
@click.option("--stack", is_flag=True, help="Trace Python functions too: slow.")
@click.option("--modules", is_flag=True, help="Record which nn.Module launched each kernel.")
@click.option("--memory", is_flag=True, help="Record every allocation: shows memory over time on the page.")
@click.option("--counters", is_flag=True, help="Run it a second time under ncu for hardware counters (NVIDIA).")
@scope_option
@click.option("--out", type=FILE, help="The run file. [default: runs/NAME.tessera]")
@click.option("--html", type=FILE, help="Where to write the page. [default: next to the run file]")
@click.option("--json", "as_json", is_flag=True, help="Print the joules as JSON, on standard output.")
@click.option("--nproc", metavar="N", help="Start N ranks with torchrun, and report the whole job.")
@click.option("--torchrun", "launcher", metavar="OPTIONS", help="With --nproc: more options of torchrun, in quotes.")
@click.argument("target", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    counters: bool,
    out: Path | None,
    html: Path | None,
    as_json: bool,
    nproc: str | None,
    launcher: str | None,
    target: str,
    arguments: tuple[str, ...],
    **recording: Any,
) -> int:
    """Run a Python script unchanged, and show which kernels, operators and steps used its energy.

    \b
    Examples:
      tessera run train.py --epochs 1
      tessera run --steps 10:20 --html report.html train.py
      tessera run -m package.train
      tessera run --nproc 4 train.py
      srun tessera run train.py

    Steps are those of the script's optimizer or, with --steps, the calls of its model. Its output is not changed, its
    exit code is passed on, and Ctrl-C still prints the report. Everything is written to one file while it happens,
    from the script's first line on: `tessera measure` counts the interpreter's start too.
    With --nproc, or under torchrun or srun, each rank writes a file of its own into one folder, and one answer is
    printed for all of them.
    """
    if not recording["module"] and not Path(target).exists():
        raise ArgumentError(f"there is no script {target!r}", fix="give a Python file, or -m and the name of a module")
    if not recording["module"] and Path(target).is_dir() and not Path(target, "__main__.py").exists():
        raise ArgumentError(f"{target!r} is a folder without a __main__.py", fix="give a Python file in it")
    for path in (out, html):
        if path is not None:
            if path.parent == RUNS:  # the default folder, which a run without --out makes too
                RUNS.mkdir(exist_ok=True)
            check_writable(path)
    with contextlib.ExitStack() as stack:
        if nproc is not None or launcher is not None:
            from .run_ranks import run_ranks

            check_nproc(nproc, counters)
            plan = _make_plan(target, arguments, claim_job(out, target, recording["module"]), ranks=True, **recording)
            return run_ranks(plan, str(nproc), launcher, html, as_json, stack)
        plan = _make_plan(target, arguments, _claim_path(out, target, recording["module"]), **recording)
        me = find_rank()
        if me is None:
            return _run_and_report(plan, counters, html, as_json, stack)
        from .run_ranks import report_rank

        return report_rank(plan, me, _run_script(plan, as_json, None), html, as_json, stack)


def _make_plan(
    target: str, arguments: Sequence[str], path: Path, *, module: bool, mode: str | None, operator_steps: int | None,
    steps: tuple[int, int] | None, limit_s: float, flush_s: float | None, ranks: bool = False, **recorded: Any,
) -> LaunchPlan:  # fmt: skip
    """Return what the script's process is to record; `recorded` are options that mean there what they mean here."""
    from ..profile.launch import LaunchPlan
    from ..profile.options import choose_mode

    chosen, few = choose_mode(mode, operator_steps, for_all=recorded["stack"] or recorded["memory"])
    return LaunchPlan(
        target=target, module=module, argv=list(arguments), path=str(path), claimed=not ranks, ranks=ranks, mode=chosen,
        operator_steps=few,
        command=["python", *(["-m"] if module else []), target, *arguments], steps=steps, flush_s=flush_s or None,
        limit_s=None if steps or chosen == "summary" else limit_s or None, **recorded,
    )  # fmt: skip


def check_nproc(nproc: str | None, counters: bool) -> None:
    """Refuse a number of ranks that torchrun would refuse, before anything is started."""
    if nproc is None:
        raise ArgumentError("--torchrun was given without --nproc", fix="add --nproc, the number of ranks on this node")
    if counters:
        raise ArgumentError("--counters works with one process only", fix="leave --counters or --nproc out")
    if nproc not in ("auto", "gpu", "cpu") and not (nproc.isdecimal() and int(nproc) > 0):
        raise ArgumentError(f"--nproc {nproc} is not a number of ranks", fix="give a number, such as 4, or gpu")


def _run_and_report(
    plan: LaunchPlan, counters: bool, html: Path | None, as_json: bool, stack: contextlib.ExitStack
) -> int:
    """Run the script and report its energy; `stack` closes the run file at the end."""
    from ..profile.runfile_store import is_written

    read: list[Recording] = []

    def read_early() -> None:
        """Read the run while the script's process exits; an error here is raised again after it has exited."""
        with contextlib.suppress(TesseraError):
            read.append(_read_run(plan, stack))

    code = _run_script(plan, as_json, None if counters else read_early)
    if not is_written(Path(plan.path)):
        return code  # the script's process has printed why
    try:
        if counters:
            _add_counters(plan)
        report_run(read[0] if read else _read_run(plan, stack), code, html, as_json)
    except TesseraError as exc:
        return report_failure(exc, code or 1, as_json=as_json)
    return code


def _claim_path(out: Path | None, target: str, module: bool) -> Path:
    """Return the path of the run, made as an empty file now: others may run the same script at the same time."""
    from ..profile.runfile_store import claim
    from ..profile.session import default_path, with_rank

    while True:
        path = default_path(_name_run(target, module), folder=True) if out is None else with_rank(out)
        try:
            claim(path)
        except RecordingError as exc:
            if out is None:
                continue
            raise ArgumentError(f"{path} already exists", fix="delete it, or give --out another name") from exc
        except OSError as exc:
            raise cannot_write(path, exc) from exc
        return path


def claim_job(out: Path | None, target: str, module: bool) -> Path:
    """Make and return the folder of a job's ranks: NAME/ beside NAME.tessera, the merged run."""
    for number in itertools.count(1):
        name = _name_run(target, module)
        path = out or Path("runs", f"{name}.tessera" if number == 1 else f"{name}-{number}.tessera")
        folder = path.with_suffix("")
        try:
            if not path.exists():
                folder.mkdir(parents=True)
                return folder
        except FileExistsError:
            pass
        except OSError as exc:
            raise cannot_write(folder, exc) from exc
        if out is not None:
            taken = path if path.exists() else folder
            raise ArgumentError(f"{taken} already exists", fix="delete it, or give --out another name")
    raise AssertionError


def _name_run(target: str, module: bool) -> str:
    return target.replace(".", "-") if module else Path(target).stem or "run"


def _run_script(plan: LaunchPlan, quiet: bool, on_closed: Callable[[], None] | None) -> int:
    """Run the plan in a child of this interpreter; return its exit code, as a shell reports it.

    Calls `on_closed` when the run file is complete and the child still exits: torch and CUDA take a second for that.
    """
    from ..monitor.command import EXIT_SIGNAL, STDERR, forward_signals, survive_user_signals

    survive_user_signals()
    reader, writer = os.pipe()
    with forward_signals() as started:
        try:
            child = subprocess.Popen(
                plan.start(writer), env=plan.environment, stdout=STDERR if quiet else None, pass_fds=(writer,)
            )
        finally:
            os.close(writer)
        started(child)
        closed = on_closed is not None and _wait_for_close(child, reader)
    try:
        if on_closed is not None and closed:
            on_closed()  # signals end our own reading here
    finally:
        with forward_signals(child):
            code = child.wait()
        os.close(reader)
    return EXIT_SIGNAL - code if code < 0 else code


def _wait_for_close(child: subprocess.Popen[bytes], reader: int) -> bool:
    """Wait until the child reports that its file is closed; False if it exits first, or this system cannot tell."""
    from ..profile.launch import CLOSED, ENDED

    try:
        exited = os.pidfd_open(child.pid)
    except (AttributeError, OSError):  # neither macOS nor Linux before 5.3 have it
        return False
    try:
        while reader in select.select([reader, exited], [], [])[0]:
            message = os.read(reader, 1)
            if message != ENDED:
                return message == CLOSED
            _import_early()
        return False
    finally:
        os.close(exited)


def _import_early() -> None:
    """Import what the report needs while the child still writes its trace."""
    from ..analyze import answer
    from ..attribute import account, ledger
    from . import report

    del account, answer, ledger, report


def _read_run(plan: LaunchPlan, stack: contextlib.ExitStack) -> Recording:
    from ..profile.open_recording import open_recording
    from ..sensors.response_store import keep_learnt

    recording = stack.enter_context(open_recording(plan.path))
    print_progress("reading events")
    print_progress(f"attributing joules to {len(recording.timeline):,} events")
    keep_learnt(recording.energy())
    return recording


def _add_counters(plan: LaunchPlan) -> None:
    """Run the script a second time under ncu, and store the counters in the file; a reader merges them by kernel."""
    from ..profile.counters import replay
    from ..profile.runfile import RunWriter

    argv = [sys.executable, *(["-m"] if plan.module else []), plan.target, *plan.argv]
    counters = replay(argv, progress=lambda s: print_progress(f"replaying under ncu, {s:.0f} s"))
    with RunWriter(plan.path, mode="append") as writer:
        writer.set("counters", list(counters))
