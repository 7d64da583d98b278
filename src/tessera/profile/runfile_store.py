"""`Store`: the run file as the writer's thread sees it. Its methods use SQLite, and none of them is thread-safe."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..clock import boot_id
from ..errors import ArgumentError, RecordingError
from ..notes import kinds_by_text
from ..record import CODE
from ..timeline.columns import CHUNK_ROWS, FLOATS, INTEGERS, NONE, TEXTS, Launch, Timeline
from .kernel_history import SUMMED, KernelHistory, StoredChunk, sum_kernels
from .runfile_checksum import PAGE, Checkpointer, seal, unseal
from .runfile_format import (
    APPLICATION_ID,
    DESCRIPTION,
    NAME_LISTS,
    OPEN_ROWS,
    RUN_VERSION,
    pack,
    to_json,
    unpack,
    version,
)
from .runfile_open import DAMAGED_FIX, DDL, SIDE_FILES, RunDatabase, bad_file, check_journal

Mode = Literal["new", "claimed", "replace", "append"]
Row = tuple[Any, ...]


def claim(path: Path) -> None:
    """Make an empty file, so that no other process takes its name; raise RecordingError if it already exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
    except FileExistsError as exc:
        raise RecordingError(f"{path} already exists", fix="give another name") from exc


def remove_run(path: Path) -> None:
    """Remove a run file, and what SQLite keeps beside it."""
    for side in ("", *SIDE_FILES):
        Path(f"{path}{side}").unlink(missing_ok=True)


def is_written(path: Path) -> bool:
    """Return whether a run was recorded; remove the empty file of a run that was claimed but never began."""
    if path.exists() and not path.stat().st_size:
        path.unlink()
    return path.exists()


class Store:
    """An open run file, with the names, launches and domains stored in it and the number of the next row."""

    def __init__(self, path: Path, mode: Mode, meta: Mapping[str, Any]) -> None:
        self.path = path
        self._names: dict[str, int] = {}
        self._launches: dict[Launch, int] = {}
        self._domains: dict[str, tuple[int, str]] = {}
        self._next_row = 0
        self._checkpointer: Checkpointer | None = None
        self._history = KernelHistory()
        self._open_rows: tuple[int, list[Row]] = (0, [])  # first row and rows of the last chunk of live rows
        if mode == "new":
            claim(path)
        try:
            self.db = self._open(mode)
            self.path = path.absolute()  # the program may change its directory
            try:
                self._begin(meta)
            except BaseException:
                self._close()
                raise
        except BaseException:
            if mode in ("new", "replace"):  # what was begun is no run
                remove_run(path)
            raise

    def _open(self, mode: Mode) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        exists = self.path.exists()
        if mode == "replace":
            remove_run(self.path)  # a stale -wal would be replayed into the new file
        if mode == "append" and exists:
            check_journal(self.path, self.path)
            with contextlib.closing(RunDatabase(self.path)) as run:  # raises if it is not a run or of a newer version
                if run.foreign:
                    why = f"{run.foreign[0]} beside it is not of this run, and would be written into it"
                    raise bad_file(self.path, why, f"move {run.foreign[0]} away")
                if run.checked.lost_bytes:
                    raise bad_file(self.path, f"{self.path.name}-wal beside it is damaged", DAMAGED_FIX)
            unseal(self.path)
        # Autocommit mode: we say BEGIN and COMMIT ourselves.
        db = sqlite3.connect(self.path, timeout=5.0, isolation_level=None, check_same_thread=False)
        # If the file system cannot share memory (some network mounts), SQLite keeps using a rollback journal, which is
        # as safe and a little slower.
        db.execute(f"PRAGMA page_size={PAGE}")
        logs = db.execute("PRAGMA journal_mode=WAL").fetchone() == ("wal",)
        db.execute("PRAGMA synchronous=NORMAL")
        if logs and db.execute("PRAGMA page_size").fetchone() == (PAGE,):
            db.execute("PRAGMA wal_autocheckpoint=0")
            self._checkpointer = Checkpointer(self.path.absolute())
        return db

    def _begin(self, meta: Mapping[str, Any]) -> None:
        if self.db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            self._resume()
            return
        about = {
            "description": DESCRIPTION,
            "schema_version": RUN_VERSION,
            "tessera": version(),
            "host": socket.gethostname(),
            "boot": boot_id(),
            "pid": os.getpid(),
            "opened_epoch_ns": time.time_ns(),
        }
        self.db.execute("BEGIN")
        self.db.execute(f"PRAGMA application_id={APPLICATION_ID}")
        self.db.execute(f"PRAGMA user_version={RUN_VERSION}")
        for statement in DDL.values():
            self.db.execute(statement)
        self.db.executemany("INSERT INTO about VALUES (?, ?)", [(k, str(v)) for k, v in about.items()])
        self.db.execute("INSERT INTO facts VALUES ('meta', ?)", (to_json(dict(meta)),))
        self.db.execute("COMMIT")

    def _resume(self) -> None:
        """Continue a file: read the stored names, launches and domains, and the number of rows."""
        db = self.db
        self._names = {text: i for i, text in db.execute("SELECT id, text FROM names")}
        launches = db.execute("SELECT id, value FROM launches")
        self._launches = {msgspec.json.decode(text, type=Launch): i for i, text in launches}
        self._domains = {name: (i, text) for i, name, text in db.execute("SELECT id, name, value FROM domains")}
        stored = db.execute("SELECT coalesce(max(first_row + rows), 0) FROM chunks").fetchone()[0]
        self._next_row = max(self._next_row, stored)  # a half-written timeline keeps its row numbers

    def recover(self, *, commit: bool) -> None:
        """After an interrupt or an error: commit what was executed or undo it, and read what the file contains."""
        if self.db.in_transaction:
            self.db.execute("COMMIT" if commit else "ROLLBACK")
        self._open_rows = (0, [])
        self._history = KernelHistory()  # kernels that are already in the file are not summed up
        self._resume()

    def commit(self) -> None:
        self.db.execute("COMMIT")
        if self._checkpointer is not None and self._checkpointer.is_due():
            with contextlib.suppress(sqlite3.Error, OSError):  # the disk is full: everything stays in the log
                self._checkpointer.empty_log(self.db)

    def _close(self) -> None:
        self.db.close()
        if self._checkpointer is not None:
            self._checkpointer.close()

    def finish(self, clean: bool) -> None:
        """Close the file, and mark it as closed if `clean`; no side files stay."""
        whole = False
        try:
            if clean:
                self.db.execute("INSERT OR REPLACE INTO about VALUES ('closed_epoch_ns', ?)", (str(time.time_ns()),))
            # Leaving WAL mode deletes the side files. SQLite refuses while somebody has the file open: it is complete
            # nevertheless, beside an empty -wal. While somebody reads, part may stay in the -wal: then do not seal.
            if self._checkpointer is not None:
                self._checkpointer.remove_sums()
            self.db.execute("PRAGMA busy_timeout=500")
            whole = not self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            self.db.execute("PRAGMA journal_mode=DELETE")
        except sqlite3.OperationalError as exc:
            if "locked" not in str(exc):
                raise
        finally:
            self._close()
        if clean and whole:
            seal(self.path)

    def rows(self, rows: Sequence[Row]) -> None:
        """Write rows as `RunWriter.add_row` took them; rewrite the last chunk with them while it has few rows."""
        first, before = self._open_rows
        if not before or first + len(before) != self._next_row:
            first, before = self._next_row, []
        self._live_chunk(first, [*before, *rows])
        self._reserve(len(rows))
        self._open_rows = (first, [*before, *rows] if len(before) + len(rows) < OPEN_ROWS else [])

    def _live_chunk(self, first: int, rows: Sequence[Row]) -> None:
        kinds, names, starts, ends, values, integers = zip(*rows, strict=True)
        columns: dict[str, NDArray[Any]] = {
            "kind": np.array([CODE[k] for k in kinds], np.int64),
            "name": np.array([self.intern(n) for n in names], np.int64),
            "start_ns": np.array(starts, np.int64),
            "end_ns": np.array(ends, np.int64),
            "value": np.array(values, np.float64),
        }
        used = set().union(*integers) - {"parent"}
        if unknown := used - set(INTEGERS):
            raise ArgumentError(f"there is no column {min(unknown)!r}", fix=f"one of: {', '.join(INTEGERS)}")
        for column in sorted(used):
            cells = [i.get(column, NONE) for i in integers]
            if column in TEXTS:
                cells = [(self.intern(c) if c else NONE) if isinstance(c, str) else c for c in cells]
            columns[column] = np.array(cells, np.int64)
        self._chunk(first, columns, len(rows))

    def timeline(
        self, timeline: Timeline, place: list[int], pause: Callable[[], None], *, may_shrink: bool = False
    ) -> None:
        """Write a whole timeline. `pause` is called after each chunk; it may write rows and commit.

        `place` keeps the number of its first row, so that a second attempt replaces what the first one committed. With
        `may_shrink`, its rows become sums once there are too many (`kernel_history`).
        """
        count = len(timeline)
        ids = np.array([self.intern(n) for n in timeline.names] + [NONE], np.int64)  # so that ids[NONE] is NONE
        launches = np.array([self._intern_launch(launch) for launch in timeline.launches] + [NONE], np.int64)
        if not place:  # reserve all rows at once, since parents are row numbers and live rows are written in between
            place.append(self._reserve(count))
        base = place[0]
        if not may_shrink or timeline.notes or timeline.meta:  # kernels come every second, mostly without notes
            self._note(timeline, base, count, ids)
        present = [c for c in (*INTEGERS, *FLOATS) if c in timeline.columns]
        for i in range(0, count, CHUNK_ROWS):
            columns = {c: timeline.columns[c][i : i + CHUNK_ROWS] for c in present}
            for column in (c for c in TEXTS if c in columns):
                columns[column] = ids[columns[column]]
            if "launch" in columns:
                columns["launch"] = launches[columns["launch"]]
            if "parent" in columns:
                columns["parent"] = np.where(columns["parent"] == NONE, NONE, columns["parent"] + base)
            rows = len(columns["kind"])
            self._chunk(base + i, columns, rows)
            if may_shrink:
                start_ns, end_ns = int(columns["start_ns"].min()), int(columns["end_ns"].max())
                self._history.add(StoredChunk(base + i, rows, start_ns, end_ns))
            pause()
        if timeline.energy_j is not None:
            error = timeline.error_j if timeline.error_j is not None else np.full(count, np.nan)
            self.energy(base, {"energy_j": timeline.energy_j, "energy_error_j": error})
        extra = [(base + int(row), to_json(fields)) for row, fields in timeline.extra.items()]
        self.db.executemany("INSERT OR REPLACE INTO extra VALUES (?, ?)", extra)
        self._shrink()

    def _shrink(self) -> None:
        """Replace the oldest kernels by sums while there are too many."""
        while chunks := (due := self._history.take_due())[0]:
            first = chunks[0].first_row
            stored = [
                (rows, heads, data)
                for chunk in chunks
                for rows, heads, data in self.db.execute(
                    "SELECT rows, columns, data FROM chunks WHERE first_row = ?", (chunk.first_row,)
                )
            ]
            parts = [unpack(heads, data, rows, SUMMED) for rows, heads, data in stored]
            sums = sum_kernels({c: np.concatenate([p[c] for p in parts]) for c in SUMMED}, due[1])
            self.db.executemany("DELETE FROM chunks WHERE first_row = ?", [(c.first_row,) for c in chunks])
            self._chunk(first, sums, rows := len(sums["kind"]))
            self._history.replace(StoredChunk(first, rows, chunks[0].start_ns, chunks[-1].end_ns), due[1])

    def energy(self, first_row: int, columns: Mapping[str, NDArray[Any]]) -> None:
        """Store the joules of rows; replace earlier ones."""
        count = len(columns["energy_j"])
        self.db.execute("DELETE FROM energy WHERE first_row >= ? AND first_row < ?", (first_row, first_row + count))
        for i in range(0, count, CHUNK_ROWS):
            part = {name: values[i : i + CHUNK_ROWS] for name, values in columns.items()}
            row = (first_row + i, len(part["energy_j"]), *pack(part))
            self.db.execute("INSERT INTO energy VALUES (?, ?, ?, ?)", row)

    def pairs(
        self, table: str, domain: str, about: str | None, times: NDArray[np.int64], values: NDArray[np.float64]
    ) -> None:
        row = (self._domain(domain, about), len(times), times.tobytes(), values.tobytes())
        self.db.execute(f"INSERT INTO {table} VALUES (?, ?, ?, ?)", row)

    def intern(self, text: str) -> int:
        number = self._names.get(text)
        if number is None:
            number = len(self._names)
            try:
                self.db.execute("INSERT INTO names VALUES (?, ?)", (number, text))
            except UnicodeEncodeError:  # half a surrogate pair, from a file name that is not valid text
                self.db.execute("INSERT INTO names VALUES (?, ?)", (number, text.encode(errors="replace").decode()))
            self._names[text] = number
        return number

    def _intern_launch(self, launch: Launch) -> int:
        number = self._launches.get(launch)
        if number is None:
            number = self._launches[launch] = len(self._launches)
            self.db.execute("INSERT INTO launches VALUES (?, ?)", (number, to_json(launch)))
        return number

    def _domain(self, name: str, about: str | None) -> int:
        stored = self._domains.get(name)
        number = len(self._domains) if stored is None else stored[0]
        text = about if about is not None else stored[1] if stored else ""
        if stored is None or stored[1] != text:  # a domain may learn its true resolution while it runs
            self.db.execute("INSERT OR REPLACE INTO domains VALUES (?, ?, ?)", (number, name, text))
            self._domains[name] = (number, text)
        return number

    def _reserve(self, count: int) -> int:
        self._next_row += count
        return self._next_row - count

    def _chunk(self, first_row: int, columns: Mapping[str, NDArray[Any]], rows: int) -> None:
        self.db.execute("INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?)", (first_row, rows, *pack(columns)))

    def _note(self, timeline: Timeline, base: int, count: int, ids: NDArray[np.int64]) -> None:
        old = self.db.execute("SELECT value FROM facts WHERE key = 'timelines'").fetchone()
        parts = [p for p in msgspec.json.decode(old[0]) if p["first_row"] != base or not count] if old else []
        meta, notes = dict(timeline.meta), timeline.notes
        for key in NAME_LISTS:
            if key in meta:
                meta[key] = ids[np.asarray(meta[key], np.int64)].tolist()
        part = {"first_row": base, "rows": count, "rank": timeline.rank, "meta": meta}
        parts.append({**part, "notes": notes, "kinds": kinds_by_text(notes)})
        self.db.execute("INSERT OR REPLACE INTO facts VALUES ('timelines', ?)", (to_json(parts),))
