"""`tessera run --nproc N SCRIPT`: torchrun starts the ranks, each records itself, and one answer is given for all.

::

    tessera run --nproc 4 train.py ──► torchrun ──► 4 x profile.launch ──► runs/train/rank0.tessera ... rank3.tessera
                                                                     └──► merge ──► runs/train.tessera, runs/train.html
"""

from __future__ import annotations

import contextlib
import importlib.util
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ArgumentError, TesseraError
from ..job_rank import JobRank
from .failures import report_failure
from .run_report import print_progress, report_run

if TYPE_CHECKING:
    from ..profile.launch import LaunchPlan
    from ..recording import Recording

WAIT_S = 20.0
"""How long rank 0 waits for the files of the other ranks on its node: they end together, and write for seconds."""


def run_ranks(
    plan: LaunchPlan, nproc: str, launcher: str | None, html: Path | None, as_json: bool, stack: contextlib.ExitStack
) -> int:
    """Run the plan on several ranks and report the job; return the exit code of torchrun. `stack` closes the files."""
    folder = Path(plan.path)
    try:
        code = _run_torchrun(plan, nproc, shlex.split(launcher or ""), as_json)
    finally:
        files = [f for f in sorted(folder.glob("rank*.tessera")) if f.stat().st_size]
        if not files:
            with contextlib.suppress(OSError):
                folder.rmdir()
    if not files:
        return code  # torchrun, or the ranks, have printed why
    try:
        report_run(_open_job(files, folder, stack), code, html, as_json)
    except TesseraError as exc:
        return report_failure(exc, code or 1, as_json=as_json)
    return code


def _run_torchrun(plan: LaunchPlan, nproc: str, options: list[str], quiet: bool) -> int:
    from ..monitor.command import EXIT_SIGNAL, STDERR, forward_signals, survive_user_signals

    if importlib.util.find_spec("torch") is None:
        raise ArgumentError("--nproc starts torchrun, and torch is not installed", fix="pip install torch")
    survive_user_signals()
    # -P: not from the working directory, as torchrun's own command. A port of its own, unless the user chose one.
    argv = [sys.executable, "-P", "-m", "torch.distributed.run", f"--nproc-per-node={nproc}"]
    argv += options or ["--standalone"]
    argv += ["--no-python", *plan.start()]
    with forward_signals() as started:
        child = subprocess.Popen(argv, env=plan.environment, stdout=STDERR if quiet else None)
        started(child)
        code = child.wait()
    return EXIT_SIGNAL - code if code < 0 else code


def _open_job(files: list[Path], folder: Path, stack: contextlib.ExitStack) -> Recording:
    """Return the ranks as one recording, written beside their folder; the run itself where there is only one rank."""
    from ..profile.open_recording import open_recording
    from ..profile.ranks import merge
    from ..sensors.response_store import keep_learnt

    path = files[0]
    if len(files) > 1:
        print_progress(f"merging {len(files)} ranks")
        path = folder.with_name(f"{folder.name}.tessera")
        merge(files).write(path, replace=True).close()
    recording = stack.enter_context(open_recording(path))
    print_progress(f"attributing joules to {len(recording.timeline):,} events")
    keep_learnt(recording.energy())
    return recording


def report_rank(
    plan: LaunchPlan, me: JobRank, code: int, html: Path | None, as_json: bool, stack: contextlib.ExitStack
) -> int:
    """Report a rank that another launcher started: rank 0 prints the job's answer if all files are there in time."""
    from ..profile.runfile_store import is_written

    path = Path(plan.path)
    if not is_written(path):
        return code  # the script's process has printed why
    if me.rank != 0:
        print(f"tessera: rank {me.rank} wrote {path}", file=sys.stderr)
        return code
    files = [path.with_name(path.name.replace("rank0", f"rank{r}")) for r in range(me.world_size or 1)]
    is_job = len(files) > 1
    try:
        whole = is_job and path.name == "rank0.tessera" and _wait_for(files, me)
        report_run(_open_job(files if whole else [path], path.parent, stack), code, html, as_json)
    except TesseraError as exc:
        return report_failure(exc, code or 1, as_json=as_json)
    if is_job and not whole:
        which = path.parent if path.name == "rank0.tessera" else path.with_name(path.name.replace("rank0", "rank*"))
        how = f"tessera report {which}" if which == path.parent else f"tessera merge {which}"
        print(f"tessera: this is rank 0 of {len(files)}; when all have ended: {how}", file=sys.stderr)
    return code


def _wait_for(files: list[Path], me: JobRank) -> bool:
    """Return whether all ranks have written their files; those of this node are waited for."""
    end_s = time.monotonic() + (WAIT_S if me.local_world_size == me.world_size else 0.0)
    while not all(map(_is_closed, files)):
        if time.monotonic() >= end_s:
            return False
        print_progress("waiting for the other ranks")
        time.sleep(0.1)
    return True


def _is_closed(path: Path) -> bool:
    from ..profile.runfile import RunFile

    if not path.exists() or not path.stat().st_size:
        return False
    try:
        with RunFile(path) as run:
            return not run.crashed
    except TesseraError:
        return False
