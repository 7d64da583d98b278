"""The runs below a log directory, and their pages and totals, each computed once for a file as it is.

A run is only ever looked up among those that were found: no name that a browser sends becomes a path.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..analyze.answer import Answer, answer
from ..profile.load import open_recording
from ..report.run_html import page

SUFFIX = ".tessera"
DEPTH = 8
MOST = 500
"""Runs that are listed, and how deep they are looked for: a log directory may be somebody's home."""
LOOK_S = 5.0
"""How long a listing is used before the directory is walked again: TensorBoard asks whenever it is looked at."""
PAGES = 6
ANSWERS = 200
_INSIDE = "plugins/tessera/"  # where the exporter puts them; a reader needs no such part in the name

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """A run file: its name for people, where it lies, and what changes when it does."""

    name: str
    path: Path
    modified_ns: int
    size: int


class Runs:
    """All runs below some directories, newest first. Thread safe: TensorBoard answers from several threads."""

    def __init__(self, roots: Mapping[str, Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._roots = dict(roots)
        self._clock = clock
        self._lock = threading.Lock()
        self._busy = threading.Lock()
        self._seen: dict[str, Found] = {}
        self._looked_s: float | None = None
        self._pages: OrderedDict[Found, str] = OrderedDict()
        self._answers: OrderedDict[Found, Answer] = OrderedDict()

    @property
    def roots(self) -> dict[str, Path]:
        """The directories that are looked through."""
        return dict(self._roots)

    def found(self) -> dict[str, Found]:
        """The runs by name, newest first."""
        with self._lock:
            now = self._clock()
            if self._looked_s is None or now - self._looked_s > LOOK_S:
                runs = [run for name, root in self._roots.items() for run in _below(name, root)]
                runs.sort(key=lambda run: (-run.modified_ns, run.name))
                self._seen = {run.name: run for run in runs[:MOST]}
                self._looked_s = now
            return dict(self._seen)

    def page(self, run: Found) -> str:
        """The page of a run. TesseraError where the file cannot be read."""
        return self._once(self._pages, run, PAGES, self._render)

    def answer(self, run: Found) -> Answer:
        """What a run cost. TesseraError where the file cannot be read."""
        return self._once(self._answers, run, ANSWERS, self._answer)

    def _once(self, kept: OrderedDict[Found, T], run: Found, most: int, make: Callable[[Found], T]) -> T:
        with self._busy:  # one at a time: ten runs compared at once would otherwise be read into memory at once
            if run not in kept:
                _keep(kept, run, make(run), most)
            kept.move_to_end(run)
            return kept[run]

    def _render(self, run: Found) -> str:
        with open_recording(run.path) as recording:
            said = answer(recording)
            _keep(self._answers, run, said, ANSWERS)  # somebody who reads a page compares next
            return page(recording, found=said)

    @staticmethod
    def _answer(run: Found) -> Answer:
        with open_recording(run.path) as recording:
            return answer(recording)


def _keep(kept: OrderedDict[Found, T], run: Found, value: T, most: int) -> None:
    kept[run] = value
    while len(kept) > most:
        kept.popitem(last=False)


def _below(label: str, root: Path) -> Iterator[Found]:
    """Run files below a directory that really lie there: a link that leads out of it is not followed."""
    try:
        top = root.resolve(strict=True)
    except OSError:
        return
    count = 0
    for folder, folders, files in os.walk(top):
        here = Path(folder)
        if len(here.relative_to(top).parts) >= DEPTH:
            folders.clear()
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for file in sorted(files):
            path = here / file
            if path.suffix != SUFFIX or file.startswith("."):
                continue
            run = _looked_at(label, top, path)
            if run is not None:
                yield run
                count += 1
        if count >= 4 * MOST:
            return


def _looked_at(label: str, top: Path, path: Path) -> Found | None:
    try:
        if not path.resolve(strict=True).is_relative_to(top) or not path.is_file():
            return None
        states = [path.stat()]
        side = Path(f"{path}-wal")  # where a run that is still recorded grows
        if side.exists():
            states.append(side.stat())
    except OSError:  # gone between two looks
        return None
    name = path.relative_to(top).with_suffix("").as_posix().replace(_INSIDE, "")
    name = f"{label}/{name}" if label else name
    return Found(name, path, max(s.st_mtime_ns for s in states), sum(s.st_size for s in states))


def roots_of(logdir: str | None, flags: Any = None) -> dict[str, Path]:
    """The directories of `--logdir`, or of `--logdir_spec name:path,other:path`."""
    if logdir:
        return {"": Path(logdir).expanduser()}
    parts = [p for p in str(getattr(flags, "logdir_spec", "") or "").split(",") if p.strip()]
    named = [p.split(":", 1) if ":" in p and not p.startswith("/") else [str(i), p] for i, p in enumerate(parts)]
    return {name.strip(): Path(path.strip()).expanduser() for name, path in named}
