"""`RunWriter`: writes everything that a session records to disk as it happens.

::

    user's threads ──► deque (rows) ─┐                       every 0.25 s, and when kernels come
    sampler, Kineto ─► deque (jobs) ─┴─► one writer thread ──► one transaction ──► runs/NAME.tessera (+ -wal)

If the disk is full or the file is locked for a while, everything waits in memory and is written later. A killed process
loses what was not yet committed: a quarter of a second, or all that waits. A transaction is complete or absent, so the
file is always readable. Commits do not wait for the disk (SQLite's synchronous=NORMAL): a machine that loses its power
may lose more data, but not the file.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, RecordingError
from ..record import Kind
from ..schema import Domain, Gap, Telemetry
from ..timeline.columns import CHUNK_ROWS, Timeline
from .runfile_format import FACTS, to_json
from .runfile_store import Mode, Row, Store

COMMIT_S = 0.25
"""How often the thread writes: half of what is promised, since a busy interpreter wakes it late."""
LAST_TRY_S = 8.0
"""How long `close` keeps trying: longer than SQLite waits for a lock."""
MAX_WAITING = 200_000
"""Rows, and other entries, that wait in memory while nothing can be written: minutes of a busy program."""
_NAN = float("nan")
_OPEN: set[RunWriter] = set()  # writers that nobody closes are closed at exit
_INHERITED: list[object] = []  # connections of the parent, which a forked child must never close

Ints = Sequence[int] | NDArray[Any]
Floats = Sequence[float] | NDArray[Any]


class RunWriter:
    """Writes a run file from any thread. Recording never waits for the disk.

    `mode` says what to do if the file already exists: "new" raises an error, "replace" deletes it, "append" continues
    it (to add counters after the run), "claimed" uses the empty file that `claim` has made. A full disk does not stop
    the user's program: what cannot be written waits (`stalls` says how long, and what did not fit into memory). While
    nothing can be written, `flush` and `close` raise `RecordingError`.
    """

    def __init__(self, path: str | Path, *, meta: Mapping[str, Any] | None = None, mode: Mode = "new") -> None:
        self.path = Path(path)
        self.error: Exception | None = None
        """Why nothing can be written now."""
        self.stalls: list[str] = []
        """A note for each time that nothing could be written: how long, why, and what was lost."""
        self.refused: list[str] = []
        self._rows: deque[Row] = deque()
        self._jobs: deque[Callable[[], object]] = deque()
        self._lock = threading.RLock()  # held while the database is used
        self._stop, self._wake = threading.Event(), threading.Event()
        self._closed = False
        self._committed_s = self._failed_s = time.monotonic()
        self._taken_rows: list[Row] = []  # taken since the last commit; put back if the next commit fails
        self._taken_jobs: list[Callable[[], object]] = []
        self._running: Callable[[], object] | None = None
        self._lost = 0
        try:
            self._store = Store(self.path, mode, meta or {})
        except (OSError, sqlite3.Error) as exc:
            raise RecordingError(
                f"cannot write the run file {self.path}",
                why=str(exc),
                fix="give a path that you can write to, on a disk with free space",
            ) from exc
        self.path = self._store.path
        _OPEN.add(self)
        threading.Thread(target=self._run, name="tessera-runfile", daemon=True).start()

    def add_row(
        self, kind: Kind, name: str, start_ns: int, end_ns: int, *, value: float = _NAN, **integers: int | str
    ) -> None:
        """Add a region, mark or counter as it happens (epoch ns). `integers` as in `timeline.columns.INTEGERS`.

        `unit` and `shapes` are given as text. `parent` is ignored, since rows get their numbers when they are written.
        """
        self._rows.append((kind, name, start_ns, end_ns, value, integers))

    def add_timeline(self, timeline: Timeline, *, may_shrink: bool = False) -> None:
        """Add many rows at once, with their names, launches, notes and, if attributed, joules.

        The writer's thread writes them later, so do not change the arrays; replacing them is fine. With `may_shrink`,
        kernels become sums per second once the run has too many of them (`kernel_history`).
        """
        now = dataclasses.replace(timeline, columns=dict(timeline.columns), links=None)
        self._jobs.append(partial(self._store.timeline, now, [], self._commit_when_due, may_shrink=may_shrink))
        self._wake.set()  # write at once: kernels have already waited in CUPTI's buffers, and a kill would lose them

    def add_samples(self, domain: Domain, epoch_ns: Ints, watts: Floats) -> None:
        """Add power samples of one domain; NaN watts mean that the power since the sample before is unknown."""
        self._add_pairs("samples", domain.name, to_json(domain), epoch_ns, watts)

    def add_anchors(self, domain: str, epoch_ns: Ints, joules: Floats) -> None:
        """Add ticks of a domain's energy counter."""
        self._add_pairs("anchors", domain, None, epoch_ns, joules)

    def _add_pairs(self, table: str, domain: str, about: str | None, epoch_ns: Ints, values: Floats) -> None:
        # Copied: the caller may reuse its buffers.
        times, floats = np.array(epoch_ns, "<i8"), np.array(values, "<f8")
        if times.shape != floats.shape or times.ndim != 1:
            raise ArgumentError(f"{times.size} times but {floats.size} values of {domain}", fix="give one per sample")
        if len(times):
            self._jobs.append(partial(self._store.pairs, table, domain, about, times, floats))

    def add_gaps(self, gaps: Iterable[Gap], epoch_offset_ns: int) -> None:
        """Add times without data. Gaps have monotonic times; the file has epoch times."""
        off = epoch_offset_ns
        rows = [(g.domain, g.start_ns + off, None if g.end_ns is None else g.end_ns + off, g.reason) for g in gaps]
        self._jobs.append(partial(self._store.db.executemany, "INSERT INTO gaps VALUES (?, ?, ?, ?)", rows))

    def add_telemetry(self, rows: Sequence[Telemetry], epoch_offset_ns: int) -> None:
        """Add clocks, temperatures and the like. `Telemetry.time_ns` is monotonic; the file has epoch times."""
        values = [_telemetry(r, epoch_offset_ns) for r in rows]
        self._jobs.append(partial(self._store.db.executemany, "INSERT INTO telemetry VALUES (?, ?, ?)", values))

    def add_stacks(self, stacks: Iterable[tuple[int, int | str, str, int]]) -> None:
        """Add sampled Python stacks: (epoch_ns, thread, folded stack "a;b;c", number of samples)."""
        rows, store = list(stacks), self._store

        def write() -> None:
            values = [(t, thread, store.intern(stack), count) for t, thread, stack, count in rows]
            store.db.executemany("INSERT INTO stacks VALUES (?, ?, ?, ?)", values)

        self._jobs.append(write)

    def set(self, key: str, value: Any) -> None:
        """Store a fact: anything that JSON has. A later value replaces an earlier one."""
        try:
            text = to_json(value)
        except (TypeError, ValueError, NotImplementedError) as exc:
            raise ArgumentError(f"the fact {key!r} cannot be kept", why=str(exc), fix="give plain JSON data") from exc
        try:
            msgspec.json.decode(text, type=FACTS.get(key, Any))
        except msgspec.ValidationError as exc:
            why = f"readers take it for something of their own: {exc}"
            raise ArgumentError(f"the fact {key!r} cannot be kept", why=why, fix="give it another name") from exc
        self._jobs.append(partial(self._store.db.execute, "INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, text)))

    def flush(self) -> None:
        """Commit everything that was recorded so far."""
        with self._lock:
            self._drain()
        self._raise()

    def close(self) -> None:
        """Write the rest, mark the file as closed, and leave no side files. Safe to call twice."""
        self._stop.set()
        self._wake.set()
        with self._lock:
            if self._closed:
                return
            until_s = time.monotonic() + LAST_TRY_S
            self._drain()
            while isinstance(self.error, sqlite3.OperationalError) and time.monotonic() < until_s:
                time.sleep(COMMIT_S)
                self._drain()
            self._closed = True
            self._lost += len(self._rows) + len(self._jobs)
            self._rows, self._jobs = deque(maxlen=0), deque(maxlen=0)  # drop what is added after closing
            _OPEN.discard(self)
            try:
                self._store.finish(clean=self.error is None)
            except (sqlite3.Error, OSError) as exc:
                self.error = self.error or exc
        self._raise()

    @property
    def closed(self) -> bool:
        return self._closed

    def drop_timelines(self) -> None:
        """Drop the timelines that are not written yet; everything else is still written."""
        with self._lock:
            if self._closed:
                return
            timeline = self._store.timeline
            self._jobs = deque(j for j in self._jobs if getattr(j, "func", None) != timeline)
            self._store.recover(commit=True)
            self._taken_rows, self._taken_jobs, self._running = [], [], None

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _raise(self) -> None:
        if self.error is not None:
            raise RecordingError(
                f"part of the run could not be written to {self.path}",
                why=f"{self.error}; {self._lost} entries are lost" if self._lost else str(self.error),
                fix="free space on the disk or write elsewhere; what was committed before can be read",
            ) from self.error
        if self.refused:
            count, first = len(self.refused), self.refused[0]
            self.refused = []
            raise RecordingError(
                f"{count} of the things recorded in {self.path} could not be kept",
                why=f"the first: {first}",
                fix="give the kinds and columns of tessera.record; all else was written",
            )

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(COMMIT_S)
            self._wake.clear()
            if self._rows or self._jobs:
                with self._lock:
                    self._drain()

    # Everything below runs with the lock held, on the writer's thread or in flush and close.

    def _drain(self) -> None:
        """Write all that is queued in one transaction; a long job may commit in between."""
        if self._closed:
            return
        if self.error is not None and not isinstance(self.error, sqlite3.OperationalError):  # the file is destroyed
            self._lost += len(self._rows) + len(self._jobs)
            self._rows.clear()
            self._jobs.clear()
            return
        try:
            if self.error is not None:
                self._store.recover(commit=False)
            self._store.db.execute("BEGIN")
            self._write_rows()
            for _ in range(len(self._jobs)):
                self._running = self._jobs.popleft()
                self._taken_jobs.append(self._running)
                self._run_guarded(self._running)
                self._running = None
                self._commit_when_due()
            self._commit()
        except sqlite3.Error as exc:  # a full disk or a lock: the user's program continues, and we try again later
            self._put_back(exc)
            return
        if self.error is not None:
            lost = f"{self._lost} entries were lost" if self._lost else "nothing was lost"
            stalled_s = time.monotonic() - self._failed_s
            self.stalls.append(f"the run file could not be written for {stalled_s:.1f} s ({self.error}): {lost}")
            self.set("write_stalls", self.stalls)  # for the case that the run is killed before its notes are written
            self.error, self._lost = None, 0

    def _put_back(self, error: sqlite3.Error) -> None:
        """Keep what was not committed for the next attempt; if it is too much, drop the oldest."""
        if self.error is None:
            self._failed_s = time.monotonic()
        self.error, self._running = error, None
        with contextlib.suppress(sqlite3.Error):
            self._store.db.rollback()
        self._rows.extendleft(reversed(self._taken_rows))
        self._jobs.extendleft(reversed(self._taken_jobs))
        self._taken_rows, self._taken_jobs = [], []
        for queue in (self._rows, self._jobs):
            for _ in range(len(queue) - MAX_WAITING):
                queue.popleft()
                self._lost += 1

    def _run_guarded(self, job: Callable[[], object]) -> bool:
        """Run a job. If it fails, refuse only this job, so that the rest of the run is still written."""
        try:
            job()
        except (sqlite3.OperationalError, sqlite3.DatabaseError) as exc:
            if not isinstance(exc, (sqlite3.InterfaceError, sqlite3.ProgrammingError, sqlite3.DataError)):
                raise
            self.refused.append(f"{type(exc).__name__}: {exc}")
            return False
        except Exception as exc:  # noqa: BLE001 - bad data may fail in any way, but the thread must not end
            self.refused.append(f"{type(exc).__name__}: {exc}")
            return False
        return True

    def _write_rows(self) -> None:
        while count := min(len(self._rows), CHUNK_ROWS):
            rows = [self._rows.popleft() for _ in range(count)]
            self._taken_rows += rows
            # Write one by one only if this fails, so that one bad row does not lose its neighbours.
            if not self._run_guarded(partial(self._store.rows, rows)):
                self.refused.pop()
                for row in rows:
                    self._run_guarded(partial(self._store.rows, [row]))

    def _commit(self) -> None:
        self._store.commit()
        self._committed_s = time.monotonic()
        self._taken_rows = []
        self._taken_jobs = [] if self._running is None else [self._running]  # only a part of it was committed

    def _commit_when_due(self) -> None:
        """Commit within a long job, so that live rows do not wait for a million kernels."""
        if time.monotonic() - self._committed_s >= COMMIT_S:
            self._write_rows()
            self._commit()
            self._store.db.execute("BEGIN")

    def _forget(self) -> None:
        """Forget the file in a forked child (a DataLoader's worker): it belongs to the parent."""
        _INHERITED.append(self._store)
        self._closed = True
        self._lock = threading.RLock()  # the parent's thread may have held it when we forked
        self._rows, self._jobs = deque(maxlen=0), deque(maxlen=0)


def _telemetry(row: Telemetry, epoch_offset_ns: int) -> Row:
    fields = {f: getattr(row, f) for f in row.__dataclass_fields__ if f not in ("time_ns", "domain")}
    present = {f: v for f, v in fields.items() if v is not None and v != {}}
    return row.domain, row.time_ns + epoch_offset_ns, to_json(present)


def _close_all() -> None:
    """Close all writers that are still open at exit."""
    for writer in list(_OPEN):
        with contextlib.suppress(RecordingError):  # at exit nobody can handle it
            writer.close()


def _forget_all() -> None:
    for writer in list(_OPEN):
        writer._forget()
    _OPEN.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)
