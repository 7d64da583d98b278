"""Reads the bytes of a trace file and decompresses them, within the limit for a file of its size."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from ..errors import RecordingError
from ..read_limits import JSON_BYTES, TRACE_BYTES, ReadBudget, open_file

CHUNK_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"


def open_source(source: Path | bytes) -> ReadBudget:
    """Return the read budget of a file, or of its bytes."""
    if isinstance(source, bytes):
        return ReadBudget("the trace", len(source))
    try:
        return ReadBudget(str(source), source.stat().st_size)
    except OSError as error:
        raise _cannot_read(source, error) from error


def read_pieces(
    source: Path | bytes, budget: ReadBudget, notes: list[str], progress: Callable[[float], None] | None = None
) -> Iterator[bytes]:
    """Yield the bytes of a file, decompressed; of a damaged file, the bytes before the damage."""
    if isinstance(source, bytes):
        yield from _unpack((source[i : i + CHUNK_BYTES] for i in range(0, len(source), CHUNK_BYTES)), budget, notes)
        if progress:
            progress(1.0)
        return
    try:
        with open_file(source) as file:
            yield from _unpack(_read_counted(file, budget.size, progress), budget, notes)
    except OSError as error:
        raise _cannot_read(source, error) from error


def read_start(path: Path, size: int) -> bytes:
    """Return the first bytes of a file, decompressed; empty if it cannot be read."""
    start = b""
    try:
        for piece in read_pieces(path, open_source(path), []):
            start += piece
            if len(start) >= size:
                break
    except RecordingError:
        return b""
    return start[:size]


def read_whole(path: Path, budget: ReadBudget, notes: list[str], most: int = TRACE_BYTES, of: str = "") -> bytes:
    """Return all bytes of a file, decompressed; refuse more than `most`."""
    pieces, size = [], 0
    for piece in read_pieces(path, budget, notes):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise budget.refuse(f"it has more than {most:,} bytes{of}")
    return b"".join(pieces)


def read_json(path: Path) -> bytes:
    """Return the whole text of a JSON file, decompressed; refuse a text whose objects would need too much memory."""
    return read_whole(path, open_source(path), [], JSON_BYTES, " of JSON")


def _cannot_read(source: Path, error: OSError) -> RecordingError:
    return RecordingError(f"cannot read {source}", why=str(error), fix="check the path and permissions")


def _read_counted(file: BinaryIO, size: int, progress: Callable[[float], None] | None) -> Iterator[bytes]:
    seen = 0
    # Compressed text expands about tenfold: smaller reads give chunks of similar size for both kinds of file.
    while piece := file.read(CHUNK_BYTES // 8):
        yield piece
        seen += len(piece)
        if progress:
            progress(min(1.0, seen / size) if size else 1.0)


def _unpack(packed: Iterator[bytes], budget: ReadBudget, notes: list[str]) -> Iterator[bytes]:
    first = next(packed, b"")
    if not first.startswith(_GZIP):
        if first:
            yield first
        yield from packed
        return
    inflate, rest, inflated = zlib.decompressobj(31), first, 0
    try:
        while rest or (rest := next(packed, b"")):
            if data := inflate.decompress(rest, CHUNK_BYTES):
                inflated += len(data)
                budget.check_inflated(inflated)
                yield data
            rest = inflate.unconsumed_tail
            if inflate.eof:  # a gzip file may have several parts
                rest = inflate.unused_data or next(packed, b"")
                if not rest.startswith(_GZIP):
                    return
                inflate = zlib.decompressobj(31)
        if data := inflate.flush():
            yield data
        if not inflate.eof:
            notes.append("the compressed file was cut: it has no end")
    except zlib.error as error:
        notes.append(f"the compressed file is damaged ({error}): what comes before that was read")


def join_chunks(source: Iterator[bytes]) -> Iterator[bytes]:
    """Join small pieces to chunks: appending each piece to the rest would copy the rest again and again."""
    held: list[bytes] = []
    size = 0
    for piece in source:
        held.append(piece)
        size += len(piece)
        if size >= CHUNK_BYTES:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)
