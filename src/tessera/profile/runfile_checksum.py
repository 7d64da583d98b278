"""Computes and checks checksums of run files, so that damage is never taken for data.

::

    closed run      pages | checksum of all
    any other run   pages | checksum of each page        + log (-wal): frames, a checksum in each

SQLite silently stops at the first frame of the log whose checksum is wrong; here the frames are checked too, so that
readers can say what is lost. SQLite has no checksums for pages that have left the log, so ours follow the last page,
where SQLite does not look. They are removed before a checkpoint and appended after it: if they are there, the file is
complete without its log.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import struct
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..read_limits import open_file

PAGE = 4096
"""Bytes of a page in our files."""
MOST_FRAMES = 16_384
"""Frames after which the log is emptied into the file (64 MB); not more often, since that waits for the disk."""

_SEAL = struct.Struct("<8sQI")
_SEAL_MAGIC = b"TESSCRC1"
_SUMS = struct.Struct("<8s8sQQI")  # magic, mark and frames of the log, number of pages, CRC of everything before
_SUMS_MAGIC = b"TESSPAGE"
_LOG_HEAD, _FRAME = 32, 24 + PAGE  # bytes; sqlite.org/fileformat2.html explains the format of the log
_LOG_ORDERS = {0x377F0682: "<u4", 0x377F0683: ">u4"}
_PIECE = 256 * PAGE
_ATTEMPTS, _PAUSE_S = 5, 0.03  # a file that is just being written to looks damaged


class ChecksumError(ValueError):
    """The bytes are not those that were written."""


# Closed runs -------------------------------------------------------------------------------------------------------


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


def check_seal(path: Path) -> bool:
    """Return whether the file has a seal; raise `ChecksumError` if the seal is broken."""
    stored = _read_seal(path)
    if stored is None:
        return False
    length, checksum = stored
    with path.open("rb") as file:
        if length != path.stat().st_size - _SEAL.size or _checksum(file, length) != checksum:
            raise ChecksumError("its checksum is wrong: its bytes are not those that were written when the run ended")
    return True


def _read_seal(path: Path) -> tuple[int, int] | None:
    size = path.stat().st_size
    if size < _SEAL.size:
        return None
    with path.open("rb") as file:
        file.seek(size - _SEAL.size)
        magic, length, checksum = _SEAL.unpack(file.read(_SEAL.size))
    return (length, checksum) if magic == _SEAL_MAGIC else None


def _checksum(file: BinaryIO, size: int) -> int:
    value = 0
    while size > 0 and (piece := file.read(min(_PIECE, size))):
        size -= len(piece)
        value = zlib.crc32(piece, value)
    return value


# Other runs: the log -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunLog:
    """The checked contents of SQLite's log of a run."""

    mark: bytes
    """Changes each time the log is started again; empty if the head of the log is damaged."""
    sound: int
    """How many frames from the first on have right checksums."""
    written: int
    """How many frames were written; more than `sound` if a frame is damaged."""
    pages: NDArray[np.uint32]
    """The page of each frame that SQLite reads, up to the last commit."""


@functools.cache
def _weights(count: int) -> NDArray[np.uint32]:
    """Return the weights of SQLite's checksum: two for the checksum before, then one for each of `count` words.

    The checksum is the last two of r[n] = r[n-1] + r[n-2] + word[n] (mod 2**32). Such sums have Fibonacci weights.
    """
    numbers = [0, 1]
    while len(numbers) < count + 2:
        numbers.append((numbers[-1] + numbers[-2]) & 0xFFFFFFFF)
    before = [(numbers[count - 1], numbers[count]), (numbers[count], numbers[count + 1])]
    words = [(numbers[left - 1], numbers[left]) for left in range(count, 0, -1)]
    return np.array(before + words, np.uint32)


def read_log(path: Path) -> RunLog | None:
    """Read the log beside a run; return None if there is none or it is empty."""
    try:
        with open_file(Path(f"{path}-wal")) as file:
            head = file.read(_LOG_HEAD)
            return _read_frames(file, head) if len(head) == _LOG_HEAD else None
    except FileNotFoundError:
        return None


def _read_frames(file: BinaryIO, head: bytes) -> RunLog | None:
    magic, _, page = struct.unpack(">III", head[:12])
    order = _LOG_ORDERS.get(magic, "<u4")
    last = np.frombuffer(head, ">u4", 2, 24).astype(np.uint32)
    if (np.frombuffer(head, order, 6).astype(np.uint32) @ _weights(6)[2:] != last).any():
        return RunLog(b"", 0, (os.fstat(file.fileno()).st_size - _LOG_HEAD) // _FRAME, np.zeros(0, np.uint32))
    if page != PAGE:
        return None
    salt = np.frombuffer(head, ">u4", 2, 16)
    weights = np.insert(_weights(2 + PAGE // 4), [4] * 4, 0, axis=0)  # the checksum leaves out salt and checksum
    pages, sound, written, committed, at = [np.zeros(0, np.uint32)], 0, 0, 0, 0
    while count := len(piece := file.read(256 * _FRAME)) // _FRAME:
        words = np.frombuffer(piece, order, count * _FRAME // 4).reshape(count, -1).astype(np.uint32, copy=False)
        heads = np.frombuffer(piece, ">u4", words.size).reshape(count, -1)[:, :6].astype(np.uint32)
        before = np.concatenate([last[None], heads[:-1, 4:]])
        ours = heads[:, 2:4] == salt
        right = (words @ weights[2:] + before @ weights[:2] == heads[:, 4:]).all(axis=1)
        good = right & ours.all(axis=1) & (heads[:, 0] > 0)
        if sound == at:
            sound += count if good.all() else int(good.argmin())
            pages.append(heads[: sound - at, 0])
            committed = max([committed, *(at + 1 + heads[: sound - at, 1].nonzero()[0])])
        # Behind them may lie frames of an earlier log: both numbers of their salt differ.
        written = max([written, *(at + 1 + ours.any(axis=1).nonzero()[0])])
        last, at = heads[-1, 4:], at + count
    return RunLog(head[16:24], sound, int(written), np.concatenate(pages)[:committed])


# Other runs: the pages ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PageSums:
    """The checksums behind the last page of a run that was not closed."""

    sums: NDArray[np.uint64]
    mark: bytes
    """The mark of the log that was emptied last."""
    frames: int
    """How many frames that log had."""


def _sum_pages(data: bytes) -> NDArray[np.uint64]:
    """Return a checksum of each page. It detects any changed bit: one of two consecutive Fibonacci numbers is odd."""
    words = np.frombuffer(data, "<u4", len(data) // PAGE * PAGE // 4).reshape(-1, PAGE // 4)
    return np.ascontiguousarray(words @ _weights(PAGE // 4)[2:]).view(np.uint64)[:, 0]


def _read_page_sums(file: int) -> PageSums | None:
    """Return the checksums of the pages; None if there are none, or they are damaged themselves."""
    size = os.fstat(file).st_size
    if size < _SUMS.size:
        return None
    magic, mark, frames, count, checksum = _SUMS.unpack(os.pread(file, _SUMS.size, size - _SUMS.size))
    if magic != _SUMS_MAGIC or count * (PAGE + 8) + _SUMS.size != size:
        return None
    tail = os.pread(file, size - count * PAGE, count * PAGE)
    return PageSums(np.frombuffer(tail, "<u8", count), mark, frames) if zlib.crc32(tail[:-4]) == checksum else None


class Checkpointer:
    """Empties the log of a run into its file now and then, and appends the checksums of the pages."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # kept open: closing it would end this process's locks
        self._due, self._mark = MOST_FRAMES, b""
        stored = _read_page_sums(self._file)
        self._appended = stored is not None
        self._sums = stored.sums if stored else np.zeros(0, np.uint64)
        if stored is None and read_log(path) is None:  # a new run, or a closed one that is continued
            self._append(range(1, 1 + path.stat().st_size // PAGE), b"", 0)

    def close(self) -> None:
        os.close(self._file)

    def is_due(self) -> bool:
        """Return whether the log is long enough to be emptied."""
        try:
            with Path(f"{self._path}-wal").open("rb") as log:
                log.seek(16)
                if (mark := log.read(8)) != self._mark:
                    self._mark, self._due = mark, MOST_FRAMES
                log.seek(_LOG_HEAD + (self._due - 1) * _FRAME + 8)
                return log.read(8) == mark
        except OSError:
            return False

    def remove_sums(self) -> None:
        """Remove the checksums; call this before the file is written to."""
        if self._appended:
            os.ftruncate(self._file, len(self._sums) * PAGE)
            self._appended = False

    def empty_log(self, db: sqlite3.Connection) -> None:
        """Write the pages of the log into the file, then the checksums; no checksums if a reader is in the way."""
        log = read_log(self._path)
        self.remove_sums()
        busy, frames, written = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        self._due = frames + MOST_FRAMES
        if not busy and frames == written and log is not None:
            self._append(np.unique(log.pages).tolist(), log.mark, frames)

    def _append(self, changed: Iterable[int], mark: bytes, frames: int) -> None:
        count = os.fstat(self._file).st_size // PAGE
        sums = np.zeros(count, np.uint64)
        kept = min(count, len(self._sums))
        sums[:kept] = self._sums[:kept]
        pages = np.array([page for page in changed if page <= count], np.int64)
        for some in np.array_split(pages, 1 + len(pages) // 256):
            data = b"".join(os.pread(self._file, PAGE, (page - 1) * PAGE) for page in some.tolist())
            sums[some - 1] = _sum_pages(data)
        tail = sums.astype("<u8").tobytes() + _SUMS.pack(_SUMS_MAGIC, mark, frames, count, 0)[:-4]
        self._sums, self._appended = sums, True
        os.pwrite(self._file, tail + struct.pack("<I", zlib.crc32(tail)), count * PAGE)


# Other runs: reading -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenRunCheck:
    """What the checksums tell about a run that was not closed."""

    lost_bytes: int = 0
    """Bytes of the log that are damaged or follow damage; what they record is left out."""
    uses_log: bool = True
    """Whether the log is read. It is not if it is damaged in a part that the file already has."""
    is_checked: bool = True
    """Whether every page has a checksum. Runs killed during a checkpoint, and those of old versions, have not."""


def check_open_run(path: Path) -> OpenRunCheck:
    """Check a run that has no seal; raise `ChecksumError` if the readable rest would not be the run at any moment."""
    for attempt in range(_ATTEMPTS):
        try:
            found = _check_open_run(path)
            if not found.lost_bytes or attempt == _ATTEMPTS - 1:
                return found
        except ChecksumError:
            if attempt == _ATTEMPTS - 1:
                raise
        time.sleep(_PAUSE_S)
    raise AssertionError


def _check_open_run(path: Path) -> OpenRunCheck:
    log = read_log(path)
    with path.open("rb") as file:
        stored = _read_page_sums(file.fileno())
    lost, uses_log = 0, True
    if log is not None and log.written > log.sound:
        is_newer = stored is not None and stored.mark == log.mark and stored.frames > log.sound
        read = stored.frames if stored is not None and is_newer else len(log.pages)
        lost, uses_log = (log.written - read) * _FRAME, not is_newer
        pages = path.stat().st_size // PAGE if stored is None else len(stored.sums)
        if not read if pages <= 1 else stored is None:
            raise ChecksumError(f"{path.name}-wal beside it is damaged, and the file is not whole without it")
    in_log = log.pages if log is not None and uses_log else np.zeros(0, np.uint32)
    if stored is None:
        in_file = np.arange(1, 1 + path.stat().st_size // PAGE)
        return OpenRunCheck(lost, uses_log, is_checked=bool(np.isin(in_file, in_log).all()))
    _check_pages(path, stored.sums, in_log)
    return OpenRunCheck(lost, uses_log)


def _check_pages(path: Path, sums: NDArray[np.uint64], elsewhere: NDArray[np.uint32]) -> None:
    """Check the pages in the file, except those that are read from the log."""
    read_there = np.zeros(len(sums), bool)
    read_there[elsewhere[elsewhere <= len(sums)].astype(np.int64) - 1] = True
    with path.open("rb") as file:
        for at in range(0, len(sums), _PIECE // PAGE):
            expected = sums[at : at + _PIECE // PAGE]
            found = _sum_pages(file.read(len(expected) * PAGE))
            if len(found) < len(expected) or ((found != expected) & ~read_there[at : at + len(expected)]).any():
                raise ChecksumError("the checksum of a page is wrong: its bytes are not those that were written")
