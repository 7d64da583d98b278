"""Finds the runs below a log directory, and computes their pages and totals once per version of the file.

A run is only looked up among those that were found: no name that a browser sends becomes a path.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from ..analyze.answer import Answer, answer
from ..analyze.time_answer import TimeAnswer, answer_by_time
from ..profile.open_recording import open_recording
from ..report.run_html import page
from ..report.time_html import time_page
from ..timeline.open_trace import XPLANE

SUFFIX = ".tessera"
TRACES = (".pt.trace.json", ".pt.trace.json.gz", *XPLANE)
"""The traces that torch.profiler's handler and JAX write; listed if a log directory has no run file."""
MAX_DEPTH = 8
MAX_RUNS = 500
"""How many runs are listed, and how many levels deep they are searched, since a log directory may be a home."""
REFRESH_S = 5.0
"""How long a listing is used before the directory is searched again."""
CACHED_PAGES = 6
CACHED_ANSWERS = 200
_EXPORTED = ("plugins/tessera/", "plugins/profile/")  # where we and JAX put runs; left out of their names
_STAMPED = re.compile(r"(.+)\.(\d{13,19})$")
"""The name that torch.profiler's handler gives a trace: the worker, and when it was written, in ms or ns."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunEntry:
    """A run file: its name, its path, and the time and size that change with its content."""

    name: str
    path: Path
    modified_ns: int
    size: int


class RunDirectory:
    """All runs below some directories, newest first. Thread safe: TensorBoard answers from several threads."""

    def __init__(self, roots: Mapping[str, Path], clock: Callable[[], float] = time.monotonic) -> None:
        self.roots = dict(roots)
        self._clock = clock
        self._lock = threading.Lock()
        self._busy = threading.Lock()
        self._entries: dict[str, RunEntry] = {}
        self._listed_s: float | None = None
        self._pages: OrderedDict[RunEntry, str] = OrderedDict()
        self._answers: OrderedDict[RunEntry, Answer | TimeAnswer] = OrderedDict()

    def list(self) -> dict[str, RunEntry]:
        """Return the runs by name, newest first."""
        with self._lock:
            now = self._clock()
            if self._listed_s is None or now - self._listed_s > REFRESH_S:
                runs = [run for name, root in self.roots.items() for run in _prefer_runs([*_find_runs(name, root)])]
                runs.sort(key=lambda run: (-run.modified_ns, run.name))
                self._entries = {run.name: run for run in runs[:MAX_RUNS]}
                self._listed_s = now
            return dict(self._entries)

    def page(self, run: RunEntry) -> str:
        """Return the page of a run. Raises TesseraError if the file cannot be read."""
        return self._compute_once(self._pages, run, CACHED_PAGES, self._render)

    def answer(self, run: RunEntry) -> Answer | TimeAnswer:
        """Return what a run cost, in seconds if it has no power. Raises TesseraError if the file cannot be read."""
        return self._compute_once(self._answers, run, CACHED_ANSWERS, _read_answer)

    def _compute_once(
        self, cache: OrderedDict[RunEntry, T], run: RunEntry, most: int, compute: Callable[[RunEntry], T]
    ) -> T:
        with self._busy:  # one at a time: otherwise ten compared runs would be in memory at once
            if run not in cache:
                cache[run] = compute(run)
                while len(cache) > most:
                    cache.popitem(last=False)
            cache.move_to_end(run)
            return cache[run]

    def _render(self, run: RunEntry) -> str:
        with open_recording(run.path) as recording:
            if recording.facts.kind == "trace" and recording.find_energy() is None:
                return time_page(recording, answer_by_time(recording))
            result = self._answers[run] = answer(recording)
            return page(recording, result=result)


def _read_answer(run: RunEntry) -> Answer | TimeAnswer:
    with open_recording(run.path) as recording:
        if recording.facts.kind == "trace" and recording.find_energy() is None:
            return answer_by_time(recording)
        return answer(recording)


def _prefer_runs(found: list[RunEntry]) -> list[RunEntry]:
    """Return the run files, or the traces if there are none: the exporter puts a trace beside every run."""
    return [run for run in found if run.path.suffix == SUFFIX] or found


def _find_runs(label: str, root: Path) -> Iterator[RunEntry]:
    """Yield the run files below a directory. A link that leads out of it is not followed."""
    try:
        top = root.resolve(strict=True)
    except OSError:
        return
    count = 0
    for folder, folders, files in os.walk(top):
        if len(Path(folder).relative_to(top).parts) >= MAX_DEPTH:
            folders.clear()
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        names = sorted(f for f in files if f.endswith((SUFFIX, *TRACES)) and not f.startswith("."))
        for run in (_inspect(label, top, Path(folder) / name) for name in names):
            if run is not None:
                yield run
                count += 1
        if count >= 4 * MAX_RUNS:
            return


def _inspect(label: str, top: Path, path: Path) -> RunEntry | None:
    try:
        if not path.resolve(strict=True).is_relative_to(top) or not path.is_file():
            return None
        log = Path(f"{path}-wal")  # where a run that is still being recorded grows
        states = [p.stat() for p in (path, log) if p is path or p.exists()]
    except OSError:  # deleted meanwhile
        return None
    name = path.relative_to(top).as_posix()
    for folder in _EXPORTED:
        name = name.replace(folder, "")
    name = next((name.removesuffix(end) for end in (SUFFIX, *TRACES) if name.endswith(end)), name)
    if stamped := _STAMPED.fullmatch(name):
        seconds = int(stamped[2]) / 10 ** (len(stamped[2]) - 10)
        name = f"{stamped[1]} {datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
    name = f"{label}/{name}" if label else name
    return RunEntry(name, path, max(s.st_mtime_ns for s in states), sum(s.st_size for s in states))


def parse_roots(logdir: str | None, flags: Any = None) -> dict[str, Path]:
    """Return the directories of `--logdir`, or of `--logdir_spec name:path,other:path`."""
    if logdir:
        return {"": Path(logdir).expanduser()}
    parts = [p for p in str(getattr(flags, "logdir_spec", "") or "").split(",") if p.strip()]
    named = [p.split(":", 1) if ":" in p and not p.startswith("/") else [str(i), p] for i, p in enumerate(parts)]
    return {name.strip(): Path(path.strip()).expanduser() for name, path in named}
