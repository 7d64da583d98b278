"""Opens run files as if an enemy had written them.

SQLite does what a file says: a view or a trigger is a program, a rollback journal may name any file of the user for
deletion, and one row may be listed a million times. So only the tables of `runfile_format` are accepted, word for word;
only reading them is allowed; and the size of the file limits what that may cost.

A run is sealed (`runfile_checksum`) when its file is complete. Files beside a sealed file do not belong to it and are
not read. A damaged file is refused, or a note says what was lost.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import urllib.parse
from pathlib import Path
from typing import Any

from ..errors import RecordingError
from ..read_limits import ReadBudget, open_file
from .runfile_checksum import ChecksumError, OpenRunCheck, check_open_run, check_seal
from .runfile_format import APPLICATION_ID, INDEXES, RUN_VERSION, TABLES

DAMAGED_FIX = "restore it from a copy, or record the run again"
SIDE_FILES = ("-wal", "-shm", "-journal")
"""Endings of files that SQLite keeps beside an open file, and that a killed writer leaves."""
DDL = {name: f"CREATE TABLE {name} {columns}" for name, columns in TABLES.items()} | {
    f"by_{number}": f"CREATE INDEX by_{number} ON {columns}" for number, columns in enumerate(INDEXES)
}
"""The statements that make a run file; no version had other ones."""

_FUNCTIONS = ("coalesce", "sum", "max")
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")  # end of a journal that names another file (sqlite.org/fileformat)
_ROW_BYTES = 8  # no row of ours takes less of the file
_PROGRESS_OPS = 20_000  # of SQLite's virtual machine: under a millisecond
_PIECE = 1 << 20


def bad_file(path: Path, why: str, fix: str = "give a .tessera file that Tessera wrote") -> RecordingError:
    """Return the error for a file that is not a run file or is broken."""
    return RecordingError(f"cannot read {path} as a run", why=why, fix=fix)


class RunDatabase:
    """A checked run file, open for reading; a copy of it if SQLite would have to write to it (`_connect_copy`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        if not path.is_file():
            raise RecordingError(f"there is no run file {path}", fix="give a run's .tessera file")
        self.budget = ReadBudget(str(path), size_with_log(path))
        try:
            sealed = check_seal(path)
            self.checked = OpenRunCheck() if sealed else check_open_run(path)
        except ChecksumError as exc:
            raise bad_file(path, str(exc), DAMAGED_FIX) from exc
        except OSError as exc:
            raise bad_file(path, str(exc), "check the path and permissions") from exc
        self.foreign = _list_journals(path) if sealed else []
        """Names of files beside a sealed run that do not belong to it, and were not read."""
        has_log, names_log = _find_log(path)
        self.log_is_missing = not sealed and names_log and not has_log
        try:
            # SQLite would make a -shm beside a file that names a log; while a writer is alive, there is one.
            if sealed or not has_log:
                whole = self.foreign or (names_log and (sealed or not Path(f"{path}-shm").exists()))
                self.db = self._connect(path, "ro&immutable=1" if whole else "ro")
            elif self.checked.lost_bytes or not self.checked.uses_log or not Path(f"{path}-shm").exists():
                self.db = self._connect_copy()
            else:
                self.db = self._connect(path, "ro")
        except sqlite3.OperationalError as exc:
            if "locked" in str(exc):
                raise bad_file(path, str(exc), "try again when its writer is done") from exc
            self.db = self._connect_copy()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as exc:
            raise bad_file(path, str(exc)) from exc

    def close(self) -> None:
        """Close the file, and delete the copy if there is one."""
        self.db.close()
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None

    def rows(self, sql: str, *args: Any) -> list[Any]:
        """Return all rows of a query. No query of ours returns more than the file has bytes."""
        rows, held = [], 0
        try:
            with self.budget.slowly():
                for row in self.db.execute(sql, args):
                    held += _ROW_BYTES
                    for cell in row:
                        if cell.__class__ is str or cell.__class__ is bytes:
                            held += len(cell)
                    # a live run grows
                    if held > self.budget.size + _PIECE and held > size_with_log(self.path) + _PIECE:
                        raise bad_file(self.path, "its tables list the same data again and again", DAMAGED_FIX)
                    rows.append(row)
        except sqlite3.Error as exc:
            raise self._explain(exc) from exc
        return rows

    def _explain(self, exc: sqlite3.Error) -> BaseException:
        if str(exc) != "interrupted":
            return bad_file(self.path, str(exc))
        # Python drops an exception raised in a progress handler. If the time is not over, it was a Ctrl-C.
        return self.budget.refuse_slow() if self.budget.is_spent else KeyboardInterrupt()

    def _connect(self, at: Path, mode: str) -> sqlite3.Connection:
        uri = f"file:{urllib.parse.quote(str(at.absolute()))}?mode={mode}"
        db = sqlite3.connect(uri, uri=True, timeout=5.0, check_same_thread=False, isolation_level=None)
        try:
            db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, max(self.budget.size, 64 * _PIECE))
            db.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
            db.set_progress_handler(lambda: self.budget.is_spent, _PROGRESS_OPS)
            for pragma in ("trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0"):
                db.execute(f"PRAGMA {pragma}")
            with self.budget.slowly():
                self._check_tables(db)
            db.set_authorizer(_authorize)
        except BaseException:
            db.close()
            raise
        return db

    def _check_tables(self, db: sqlite3.Connection) -> None:
        path = self.path
        mark, version = (db.execute(f"PRAGMA {p}").fetchone()[0] for p in ("application_id", "user_version"))
        made = db.execute("SELECT name, sql FROM sqlite_master LIMIT 100").fetchall()
        if not made and mark == 0 and self.log_is_missing:
            why = f"its data are in {path.name}-wal, which is not beside it: the run was killed, or is still running"
            raise bad_file(path, why, f"copy {path.name}-wal too, from where the run was recorded")
        if not made and mark == 0:
            raise bad_file(path, "it is empty: nothing was written to it")
        if mark != APPLICATION_ID:
            raise bad_file(path, "it is a database of another program")
        if version > RUN_VERSION:
            why = f"it has version {version}, and this Tessera reads up to version {RUN_VERSION}"
            raise bad_file(path, why, "use a newer Tessera: run git pull and pip install -U . in its clone")
        if not {name for name, _ in made} >= {"about", "facts", "chunks"}:
            raise bad_file(path, "its tables are missing")
        for name, sql in made:
            # SQLite makes indexes for UNIQUE and PRIMARY KEY itself; these have no statement.
            if sql != DDL.get(name) and not (sql is None and str(name).startswith("sqlite_")):
                raise bad_file(path, f"it has a table, view or trigger that Tessera does not make: {str(name)[:40]!r}")

    def _connect_copy(self) -> sqlite3.Connection:
        """Open a copy, with what a killed writer left beside the file, so that SQLite can write and recover it.

        A journal that names another file is refused, since SQLite would delete that file. We never write such a one.
        """
        self.folder = tempfile.TemporaryDirectory(prefix="tessera-")
        try:
            target = Path(self.folder.name) / "run.tessera"
            log = ("-wal",) if self.checked.uses_log else ()
            for side in ("", *log, "-journal"):  # SQLite makes the -shm, an index of the -wal, again
                if (source := Path(f"{self.path}{side}")).is_file():
                    shutil.copyfile(source, f"{target}{side}")
            check_journal(target, self.path)
            return self._connect(target, "rw")
        except (OSError, sqlite3.Error, UnicodeDecodeError) as exc:
            self.folder.cleanup()
            raise bad_file(self.path, str(exc)) from exc
        except BaseException:
            self.folder.cleanup()
            raise


def _authorize(action: int, first: str | None, second: str | None, *_: object) -> int:
    if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_TRANSACTION):
        return sqlite3.SQLITE_OK
    read = action == sqlite3.SQLITE_READ and first in TABLES
    call = action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS
    return sqlite3.SQLITE_OK if read or call else sqlite3.SQLITE_DENY


def size_with_log(path: Path) -> int:
    """Return the bytes of a run, with those that its writer has not yet put into the file."""
    return sum(p.stat().st_size for p in (path, Path(f"{path}-wal")) if p.exists())


def _list_journals(path: Path) -> list[str]:
    """List the files beside a run from which SQLite would take pages. Empty ones are left over by readers."""
    sides = (Path(f"{path}{side}") for side in ("-wal", "-journal"))
    return [side.name for side in sides if side.exists() and (not side.is_file() or side.stat().st_size)]


def _find_log(path: Path) -> tuple[bool, bool]:
    """Return whether there is a -wal with contents, and whether the file says that a -wal belongs to it."""
    with path.open("rb") as file:
        head = file.read(20)
    log = Path(f"{path}-wal")
    return log.is_file() and log.stat().st_size > 0, head[18:20] == b"\2\2"


def check_journal(at: Path, path: Path) -> None:
    """Refuse a rollback journal that names another file: SQLite would delete that file when it recovers this one."""
    try:
        with open_file(Path(f"{at}-journal")) as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - len(_JOURNAL_MAGIC)))
            tail = file.read()
    except FileNotFoundError:
        return
    if tail == _JOURNAL_MAGIC:
        why = f"{path.name}-journal names another file, which would be deleted: Tessera never writes such a journal"
        raise bad_file(path, why, f"do not trust it; without {path.name}-journal the run can be read")
