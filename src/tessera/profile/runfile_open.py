"""Opens run files as if an enemy had written them, and seals those that are complete.

SQLite does what a file says: a view or a trigger is a program, a rollback journal may name any file of the user's to be
deleted, and a row may be listed a million times. So only the tables of `runfile_format` are accepted, word for word;
only reading them is allowed; and what that costs is limited by the size of the file.

A closed run ends in a seal, a checksum of every byte before it. SQLite does not look behind its last page. A run is
sealed when all of it is in the file: what lies beside a sealed file is not its own, and is not read.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
import tempfile
import urllib.parse
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import RecordingError
from ..read_limits import ReadBudget
from .runfile_format import APPLICATION_ID, INDEXES, RUN_VERSION, TABLES

DAMAGED_FIX = "restore it from a copy, or record the run again"
SIDE_FILES = ("-wal", "-shm", "-journal")
"""What SQLite keeps beside a file that is open, and what a killed writer leaves."""
DDL = {name: f"CREATE TABLE {name} {columns}" for name, columns in TABLES.items()} | {
    f"by_{number}": f"CREATE INDEX by_{number} ON {columns}" for number, columns in enumerate(INDEXES)
}
"""The statements that make a run file; no version had others."""

_FUNCTIONS = ("coalesce", "sum", "max")
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")  # ends a journal that names a super-journal (sqlite.org/fileformat)
_SEAL = struct.Struct("<8sQI")
_SEAL_MAGIC = b"TESSCRC1"
_ROW_BYTES = 8  # no row of ours takes less of the file
_PROGRESS_OPS = 20_000  # of SQLite's virtual machine: under a millisecond
_PIECE = 1 << 20


def bad_file(path: Path, why: str, fix: str = "give a .tessera file that Tessera wrote") -> RecordingError:
    """The error for a file that is not ours or is broken."""
    return RecordingError(f"cannot read {path} as a run", why=why, fix=fix)


class RunDatabase:
    """A run file that was checked, for reading. A copy where SQLite would have to write (`_connect_copy`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        if not path.is_file():
            raise RecordingError(f"there is no run file {path}", fix="give a run's .tessera file")
        self.budget = ReadBudget(str(path), size_with_log(path))
        sealed = _check_seal(path)
        self.foreign = _list_journals(path) if sealed else []
        """Names of files beside a sealed run that are not its own, and were not read."""
        self.log_is_missing = not sealed and _is_log_missing(path)
        try:
            self.db = self._connect(path, "ro&immutable=1" if self.foreign else "ro")
        except sqlite3.OperationalError as exc:
            if "locked" in str(exc):
                raise bad_file(path, str(exc), "try again when its writer is done") from exc
            self.db = self._connect_copy()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as exc:
            raise bad_file(path, str(exc)) from exc

    def close(self) -> None:
        """Close it; the copy is gone, where there was one."""
        self.db.close()
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None

    def rows(self, sql: str, *args: Any) -> list[Any]:
        """All rows of a query. No query of ours returns more than the file has bytes."""
        rows, held = [], 0
        try:
            with self.budget.slowly():
                for row in self.db.execute(sql, args):
                    held += _ROW_BYTES
                    for cell in row:
                        if cell.__class__ is str or cell.__class__ is bytes:
                            held += len(cell)
                    if (
                        held > self.budget.size + _PIECE and held > size_with_log(self.path) + _PIECE
                    ):  # a live run grows
                        raise bad_file(self.path, "its tables list the same data again and again", DAMAGED_FIX)
                    rows.append(row)
        except sqlite3.Error as exc:
            raise self._explain(exc) from exc
        return rows

    def _explain(self, exc: sqlite3.Error) -> BaseException:
        if str(exc) != "interrupted":
            return bad_file(self.path, str(exc))
        # Python drops an exception out of a progress handler: when the time is not spent, it was Ctrl-C.
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
            # SQLite makes an index for UNIQUE and PRIMARY KEY, and has no statement for it.
            if sql != DDL.get(name) and not (sql is None and str(name).startswith("sqlite_")):
                raise bad_file(path, f"it has a table, view or trigger that Tessera does not make: {str(name)[:40]!r}")

    def _connect_copy(self) -> sqlite3.Connection:
        """A copy, with what a killed writer left beside it, where SQLite may write: it recovers that.

        A journal that names another file is refused: SQLite would delete that file. We never write one.
        """
        self.folder = tempfile.TemporaryDirectory(prefix="tessera-")
        try:
            target = Path(self.folder.name) / "run.tessera"
            for side in ("", "-wal", "-journal"):  # the -shm is an index of the -wal, made anew
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
    """Bytes of a run, with those that its writer has not yet put into the file."""
    return sum(p.stat().st_size for p in (path, Path(f"{path}-wal")) if p.exists())


def _list_journals(path: Path) -> list[str]:
    """The files beside it from which SQLite would take pages. An empty one stays where a reader was not done."""
    sides = (Path(f"{path}{side}") for side in ("-wal", "-journal"))
    return [side.name for side in sides if side.exists() and (not side.is_file() or side.stat().st_size)]


def _is_log_missing(path: Path) -> bool:
    """Whether the file says that a -wal belongs to it, and there is none."""
    with path.open("rb") as file:
        head = file.read(20)
    log = Path(f"{path}-wal")
    return head[18:20] == b"\2\2" and (not log.exists() or log.stat().st_size == 0)


def check_journal(at: Path, path: Path) -> None:
    """Refuse a rollback journal that names another file: SQLite deletes that file when it recovers this one."""
    try:
        with Path(f"{at}-journal").open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - len(_JOURNAL_MAGIC)))
            tail = file.read()
    except FileNotFoundError:
        return
    if tail == _JOURNAL_MAGIC:
        why = f"{path.name}-journal names another file, which would be deleted: Tessera never writes such a journal"
        raise bad_file(path, why, f"do not trust it; without {path.name}-journal the run can be read")


# The seal ---------------------------------------------------------------------------------------------------------


def seal(path: Path) -> None:
    """Append the checksum of a complete run file."""
    with path.open("r+b") as file:
        size = path.stat().st_size
        checksum = _checksum(file, size)
        file.seek(size)
        file.write(_SEAL.pack(_SEAL_MAGIC, size, checksum))


def unseal(path: Path) -> None:
    """Remove the seal, so that the file may be written to."""
    if _read_seal(path) is not None:
        os.truncate(path, path.stat().st_size - _SEAL.size)


def _read_seal(path: Path) -> tuple[int, int] | None:
    size = path.stat().st_size
    if size < _SEAL.size:
        return None
    with path.open("rb") as file:
        file.seek(size - _SEAL.size)
        magic, length, checksum = _SEAL.unpack(file.read(_SEAL.size))
    return (length, checksum) if magic == _SEAL_MAGIC else None


def _check_seal(path: Path) -> bool:
    """Whether it has a seal; raises where the seal is broken."""
    try:
        stored = _read_seal(path)
        if stored is None:
            return False
        length, checksum = stored
        with path.open("rb") as file:
            whole = length == path.stat().st_size - _SEAL.size and _checksum(file, length) == checksum
    except OSError as exc:
        raise bad_file(path, str(exc), "check the path and permissions") from exc
    if not whole:
        why = "its checksum is wrong: its bytes are not those that were written when the run ended"
        raise bad_file(path, why, DAMAGED_FIX)
    return True


def _checksum(file: Any, size: int) -> int:
    def pieces() -> Iterator[bytes]:
        left = size
        while left > 0 and (piece := file.read(min(_PIECE, left))):
            left -= len(piece)
            yield piece

    value = 0
    for piece in pieces():
        value = zlib.crc32(piece, value)
    return value
