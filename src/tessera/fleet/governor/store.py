"""The leases on disk: one SQLite file, written before any answer is sent. A kill at any moment loses nothing.

Rows are whole jobs and nodes. A commit waits for the disk (`synchronous=FULL`), so a grant that a node may have
received is never forgotten, even by a power failure. Only one process can have the file open. Jobs that have ended are
in their own table, in the order in which they ended, and are decoded only when asked for: a governor that starts again
has thousands of them.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import msgspec

from ...errors import GovernorError
from ..leases import Emergency, GovernedNode, JobLease

VERSION = 2
Row = tuple[str, str, bytes | None]
"""Kind, name, and the encoded value; None: it was removed."""
ENDED = "ended"
"""The kind of a job that has ended."""
_KINDS: dict[str, Any] = {"node": GovernedNode, "job": JobLease, "emergency": Emergency, "clock": dict[str, Any]}


def encode_row(kind: str, name: str, value: object | None) -> Row:
    """Return a row for `LeaseStore.write`."""
    return kind, name, None if value is None else msgspec.msgpack.encode(value)


class EndedJobs(MutableMapping[str, JobLease]):
    """Jobs that have ended, the oldest first; those from the disk are decoded when they are asked for."""

    def __init__(self, rows: Mapping[str, bytes]) -> None:
        self._jobs: dict[str, JobLease | bytes] = dict(rows)

    def __getitem__(self, name: str) -> JobLease:
        job = self._jobs[name]
        if isinstance(job, bytes):
            job = self._jobs[name] = msgspec.msgpack.decode(job, type=JobLease)
        return job

    def __setitem__(self, name: str, job: JobLease) -> None:
        self._jobs[name] = job

    def __delitem__(self, name: str) -> None:
        del self._jobs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def __len__(self) -> int:
        return len(self._jobs)


class LeaseStore:
    """The file of one governor. Reading and writing raise `GovernorError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            with self._transaction():
                self._create()
        except (OSError, sqlite3.Error) as exc:
            raise self._explain(exc) from exc

    def _create(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise GovernorError(
                f"{self.path} is of another version of Tessera ({version})",
                fix="start the governor with the version that wrote it, or give another --state",
            )
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS state "
            "(kind TEXT, name TEXT, value BLOB, PRIMARY KEY (kind, name)) WITHOUT ROWID"
        )
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS ended (number INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, value BLOB)"
        )
        self._db.execute(f"PRAGMA user_version={VERSION}")

    @contextlib.contextmanager
    def _transaction(self) -> Any:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # a full disk has ended it already
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def write(self, rows: Iterable[Row]) -> None:
        """Write rows, all or none; once this returns, they survive a power failure."""
        rows = list(rows)
        gone = [(kind, name) for kind, name, value in rows if value is None and kind != ENDED]
        kept = [row for row in rows if row[2] is not None and row[0] != ENDED]
        ended = [(name, value) for kind, name, value in rows if kind == ENDED and value is not None]
        forgotten = [(name,) for kind, name, value in rows if kind == ENDED and value is None]
        try:
            with self._transaction():
                self._db.executemany("DELETE FROM state WHERE kind=? AND name=?", gone)
                self._db.executemany("INSERT OR REPLACE INTO state VALUES (?, ?, ?)", kept)
                self._db.executemany("DELETE FROM ended WHERE name=?", forgotten)
                self._db.executemany("INSERT OR REPLACE INTO ended (name, value) VALUES (?, ?)", ended)
        except sqlite3.Error as exc:
            raise self._explain(exc) from exc

    def read(self) -> dict[str, dict[str, Any]]:
        """Return everything except the jobs that have ended, by kind and name."""
        found: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}
        try:
            for kind, name, value in self._db.execute("SELECT kind, name, value FROM state"):
                found[kind][name] = msgspec.msgpack.decode(value, type=_KINDS[kind])
        except (sqlite3.Error, msgspec.DecodeError, KeyError) as exc:
            raise self._explain(exc) from exc
        return found

    def read_ended(self) -> EndedJobs:
        try:
            return EndedJobs(dict(self._db.execute("SELECT name, value FROM ended ORDER BY number")))
        except sqlite3.Error as exc:
            raise self._explain(exc) from exc

    def close(self) -> None:
        self._db.close()

    def _explain(self, exc: Exception) -> GovernorError:
        if "locked" in str(exc):
            return GovernorError(
                f"{self.path} is in use",
                why="another governor has it open",
                fix="stop that one, or give another --state",
            )
        return GovernorError(
            f"the governor's state cannot be read or written: {self.path}",
            why=str(exc),
            fix="check the disk and the file's owner; nodes keep to their guaranteed shares meanwhile",
        )
