"""One line for each run of a folder: when, what, joules, joules a step, host, size, state.

The joules are those of `analyze.answer`, so that a list and a report of one run agree. To compute them, the whole
timeline is read. So they are kept in $XDG_CACHE_HOME/tessera/runs/, for a file with that size and time of change. If a
run's joules are not kept there, a list shows only its facts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import socket
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..clock import boot_id
from ..errors import RecordingError, TesseraError
from ..profile.open_recording import open_recording
from ..profile.runfile import RunFile
from ..profile.runfile_format import version
from ..profile.runfile_open import SIDE_FILES
from ..recording import Recording
from .answer import Answer, answer, name_of

SUFFIX = ".tessera"
RunState = Literal["ended", "failed", "running", "killed", "unreadable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJoules:
    """The headline of a run, as `tessera report` shows it."""

    energy_j: float | None
    error_j: float | None
    step_j: float | None
    step_error_j: float | None
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """One run. `joules` is None if they have not been computed yet; `problem` says why a file cannot be read.

    A run is "failed" if its script ended with an exit code other than 0, "killed" if its file was never closed and its
    process is gone, and "running" if that process still exists on this machine.
    """

    path: Path
    size_bytes: int
    state: RunState
    command: str = ""
    host: str = ""
    start_ns: int = 0
    time_s: float | None = None
    joules: RunJoules | None = None
    problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "joules"}
        figures = dataclasses.asdict(self.joules) if self.joules else {}
        empty = dict.fromkeys(f.name for f in dataclasses.fields(RunJoules))
        return {**data, "path": str(self.path), **empty, **figures}


def find_runs(folder: Path) -> list[Path]:
    """Return the files of a folder that are named like runs; links are not followed."""
    return sorted(p for p in folder.glob(f"*{SUFFIX}") if p.is_file() and not p.is_symlink())


def describe_run(path: Path, *, read: bool = False) -> ListedRun:
    """Return the facts of a run, and its joules if they are kept; with `read`, from its timeline."""
    size = size_of(path)
    try:
        with open_recording(path) as recording:
            start_ns, end_ns = recording.span_ns
            joules, problem = recall_joules(path), None
            if joules is None and read:
                try:
                    joules = remember_joules(recording, answer(recording))
                except TesseraError as exc:  # its facts can be read nevertheless
                    problem = exc.what
            return ListedRun(
                path=path,
                size_bytes=size,
                state=_state(recording, path),
                command=name_of(recording),
                host=recording.facts.host,
                start_ns=start_ns,
                time_s=(end_ns - start_ns) * 1e-9,
                joules=joules,
                problem=problem,
            )
    except (RecordingError, OSError) as exc:
        return ListedRun(path=path, size_bytes=size, state="unreadable", problem=str(exc).split("\n")[0])


def _state(recording: Recording, path: Path) -> RunState:
    facts = recording.facts
    if not facts.crashed:
        return "failed" if facts.returncode else "ended"
    with RunFile(path) as run:
        here = run.about.get("boot") == boot_id() and facts.host == socket.gethostname()
    return "running" if here and facts.pid and Path(f"/proc/{facts.pid}").exists() else "killed"


def size_of(path: Path) -> int:
    """Return the bytes of a run and of the files that SQLite writes beside it."""
    return sum(p.stat().st_size for p in files_of(path))


def files_of(path: Path) -> list[Path]:
    """Return a run's file, and those that SQLite writes beside it while the run is written."""
    return [p for side in ("", *SIDE_FILES) if (p := path.with_name(path.name + side)).is_file()]


# -- joules that were computed before -------------------------------------------------------------------------------


def remember_joules(recording: Recording, result: Answer) -> RunJoules:
    """Keep the headline of a run for `tessera runs`, if the disk allows it."""
    step = next((p for p in result.per_work if p.unit == "step"), None)
    joules = RunJoules(
        energy_j=_known(result.whole.energy_j),
        error_j=_known(result.whole.error_j),
        step_j=_known(step.energy_j) if step else None,
        step_error_j=_known(step.error_j) if step else None,
        basis=result.basis,
    )
    path = recording.facts.path
    if path is not None and path.is_file() and not recording.facts.crashed:
        with contextlib.suppress(OSError):
            target = _joules_path(path)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=target.parent, suffix=".part")
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(joules))
            Path(name).replace(target)
    return joules


def recall_joules(path: Path) -> RunJoules | None:
    """Return what `remember_joules` kept for this file as it is now; None if it kept nothing."""
    try:
        return msgspec.json.decode(_joules_path(path).read_bytes(), type=RunJoules)
    except (OSError, msgspec.DecodeError):
        return None


def _joules_path(path: Path) -> Path:
    """Return the file for a run's joules: another size, time of change or version of Tessera has another name."""
    stat = path.stat()
    key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{version()}"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tessera" / "runs" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


# -- what may be deleted --------------------------------------------------------------------------------------------


def choose_old_runs(
    runs: Iterable[ListedRun], *, keep: int = 0, older_than_s: float = 0.0, now_ns: int
) -> list[ListedRun]:
    """Return the runs beyond the newest `keep` that started more than `older_than_s` ago, except one being written.

    A file that cannot be read as a run is never included.
    """
    ours = sorted((r for r in runs if r.state != "unreadable"), key=lambda r: r.start_ns, reverse=True)
    return [r for r in ours[keep:] if r.state != "running" and now_ns - r.start_ns >= older_than_s * 1e9]


def delete_runs(runs: Sequence[ListedRun]) -> int:
    """Delete runs with the files SQLite wrote beside them; return how many bytes that frees. Pages and links stay."""
    freed = 0
    for run in runs:
        if run.path.is_symlink() or not run.path.is_file():  # it is no longer the run that was chosen
            continue
        with contextlib.suppress(OSError):
            _joules_path(run.path).unlink(missing_ok=True)
        for file in files_of(run.path):  # the run first: if it cannot be deleted, its side files stay
            if not file.is_symlink():
                size = file.stat().st_size
                file.unlink()
                freed += size
    return freed
