"""What a process is told to record, the private folder in which it leaves the trace, and what is in the trace."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from ...errors import ArgumentError, MeasurementError
from ...joules import Ints
from ...read_limits import TRACE_BYTES, ReadBudget
from ...timeline import Timeline, kineto
from ...timeline.columns import NONE
from .process import PROC, TRACE_VARIABLE, Target, files_as, same_mounts

# libkineto writes on-demand traces only here, or in KINETO_ONDEMAND_TRACE_DIR (since June 2026).
TRACE_ROOT = "/tmp"
FILE = "trace.json"
# libkineto looks at its request once a second, and begins if the start lies within the next second. A start less than
# a second ahead may be over when libkineto looks: then the request is lost until the process asks again, 5 s later.
# The time beyond one second allows for the jitter of libkineto's thread, which is larger on a busy machine.
START_AHEAD_S = 1.25
START_AHEAD_BUSY_S = 1.8
_NOT_IN_A_CONFIG = ("=", "#", "\n", "..")


@dataclass(frozen=True, slots=True, kw_only=True)
class What:
    """How much to record: `steps` of the optimizer; `seconds` if the process has no optimizer, or `steps` is 0.

    Before a recording by time begins, the GPU's tracing runs for `warmup_s`.
    """

    steps: int = 3
    seconds: float = 0.25
    warmup_s: int = 0
    shapes: bool = True
    stacks: bool = False
    memory: bool = False


def config(what: What, file: str, *, attempt: int = 1, now_s: float | None = None) -> str:
    """Return the configuration for libkineto: one key=value on each line.

    The first attempt asks by steps and by time: a process that counts no optimizer steps takes the time (libkineto
    since September 2025). Older ones refuse that: later attempts ask by time only, and let libkineto choose the start.
    """
    lines = {
        "ACTIVITIES_LOG_FILE": file,
        "ACTIVITIES_DURATION_MSECS": str(max(round(what.seconds * 1e3), 1)),
        "ACTIVITIES_WARMUP_PERIOD_SECS": str(what.warmup_s),
        "PROFILE_REPORT_INPUT_SHAPES": _flag(what.shapes),
        "PROFILE_PROFILE_MEMORY": _flag(what.memory),
        "PROFILE_WITH_STACK": _flag(what.stacks),
    }
    if attempt == 1:
        busy = os.getloadavg()[0] > (os.cpu_count() or 1)
        ahead_s = what.warmup_s + (START_AHEAD_BUSY_S if busy else START_AHEAD_S)
        lines["PROFILE_START_TIME"] = str(round(((time.time() if now_s is None else now_s) + ahead_s) * 1e3))
        if what.steps > 0:
            lines |= {
                "PROFILE_START_ITERATION": "0",
                "ACTIVITIES_ITERATIONS": str(what.steps),
                "ACTIVITIES_WARMUP_ITERATIONS": "0",
            }
    return "".join(f"{key}={value}\n" for key, value in lines.items())


def _flag(value: bool) -> str:
    return "true" if value else "false"


class Folder:
    """A private folder of the process's user, where the process writes its trace. Leaving the block removes it."""

    def __init__(self, target: Target) -> None:
        root = target.environ.get(TRACE_VARIABLE) or TRACE_ROOT
        if not root.startswith("/") or any(part in root for part in _NOT_IN_A_CONFIG):
            raise ArgumentError(
                f"{TRACE_VARIABLE}={root} of process {target.pid} cannot be used", fix="an absolute path without = or #"
            )
        # The /tmp of a process in another mount namespace (a container) is reached through /proc.
        outside = Path(root) if same_mounts(target.pid) else PROC / str(target.pid) / "root" / root.lstrip("/")
        self._target = target
        try:
            with files_as(target):
                self.path = Path(tempfile.mkdtemp(prefix="tessera-prof-", dir=outside))
                self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as exc:
            raise MeasurementError(
                f"cannot make a folder in {outside} for the trace, as {target.user}", why=str(exc)
            ) from exc
        self.file = f"{root.rstrip('/')}/{self.path.name}/{FILE}"
        """The trace's path as the process sees it; libkineto inserts the PID before ".json"."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        with files_as(self._target):
            shutil.rmtree(self.path, ignore_errors=True)

    @property
    def has_begun(self) -> bool:
        """Whether the process has begun to record, since libkineto then opens its file."""
        try:
            return bool(os.listdir(self._fd))  # noqa: PTH208  (by descriptor: the path may lead elsewhere by now)
        except OSError:
            return False

    def take(self) -> bytes | None:
        """Return the trace, or None if it is not complete yet; raise RecordingError if it is too long for memory.

        libkineto renames a finished file. Older versions write it in place, so the end of the file is checked.
        """
        try:
            names = [n for n in os.listdir(self._fd) if n.endswith(".json")]  # noqa: PTH208
        except OSError:
            return None
        for name in names:
            data = self._read(name)
            if data is not None:
                return data
        return None

    def _read(self, name: str) -> bytes | None:
        """Read a file if it is a plain file of the process's user: root must not follow a link."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return None
        with os.fdopen(fd, "rb") as f:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != self._target.uid or status.st_nlink != 1:
                return None
            if status.st_size > TRACE_BYTES:
                why = f"it has {status.st_size:,} bytes, and {TRACE_BYTES:,} are the most that is read"
                raise ReadBudget("the trace", status.st_size).refuse(why)
            f.seek(max(status.st_size - 64, 0))
            if not f.read(64).rstrip().endswith(b"}"):
                return None
            f.seek(0)
            return f.read(status.st_size)  # it may grow meanwhile


_STEP = "Optimizer.step#"
_TOP = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Heaviest:
    """All kernels (or operators) of one name: how many ran, and for how long."""

    name: str
    calls: int
    time_s: float


@dataclass(slots=True, kw_only=True)
class TraceFigures:
    """Counts and times of a trace. `kernels_with_shapes` are the kernels whose operator has input shapes.

    A trace with launches but no kernels has lost its kernels: libkineto drops those that lie outside of the recording
    by the GPU's clock.
    """

    base_ns: int
    events: int = 0
    time_s: float = 0.0
    ops: int = 0
    ops_with_shapes: int = 0
    launches: int = 0
    kernels: int = 0
    kernels_with_shapes: int = 0
    kernel_s: float = 0.0
    collectives: int = 0
    collective_s: float = 0.0
    steps: int = 0
    heaviest: list[Heaviest] = field(default_factory=list)


def figures(data: bytes) -> TraceFigures:
    """Count what is in a trace; raise RecordingError if the bytes are not a trace."""
    timeline = kineto.read(data)
    ops, collectives = timeline.rows("op"), timeline.rows("collective")
    kernels = np.concatenate([timeline.rows("kernel"), collectives])
    calls = timeline.linked.op[kernels]
    shapes = timeline["shapes"]
    return TraceFigures(
        base_ns=int(timeline.meta.get("base_ns") or 0),
        events=len(timeline),
        time_s=(timeline.end_ns - timeline.start_ns) * 1e-9,
        ops=len(ops),
        ops_with_shapes=int((shapes[ops] != NONE).sum()),
        launches=sum("Launch" in timeline.name(row) for row in timeline.rows("runtime", "graph_launch").tolist()),
        kernels=len(kernels),
        kernels_with_shapes=int((shapes[calls[calls != NONE]] != NONE).sum()),
        kernel_s=_time_s(timeline, kernels),
        collectives=len(collectives),
        collective_s=_time_s(timeline, collectives),
        steps=sum(timeline.name(row).startswith(_STEP) for row in timeline.rows("region").tolist()),
        heaviest=_find_heaviest(timeline),
    )


def _time_s(timeline: Timeline, rows: Ints) -> float:
    return float((timeline["end_ns"][rows] - timeline["start_ns"][rows]).sum()) * 1e-9


def _find_heaviest(timeline: Timeline) -> list[Heaviest]:
    """Return the names with the most device time. A trace without device rows: with the most time in operators.

    The time of an inner operator also counts for its outer one.
    """
    rows = timeline.device_rows
    rows = rows if len(rows) else timeline.rows("op")
    used, which, calls = np.unique(timeline["name"][rows], return_inverse=True, return_counts=True)
    ns = np.bincount(which, weights=timeline["end_ns"][rows] - timeline["start_ns"][rows], minlength=len(used))
    return [
        Heaviest(name=timeline.names[int(used[i])], calls=int(calls[i]), time_s=float(ns[i]) * 1e-9)
        for i in np.argsort(-ns, kind="stable")[:_TOP]
    ]
