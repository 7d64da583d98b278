"""A trace file as a stream of events: a megabyte at a time, cut between two events.

Where to cut is guessed from the text, and the decoder is the judge: JSON that is cut inside a string or a nested object
does not decode, so a wrong guess is always found out. Only then is the text scanned token by token.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ..errors import RecordingError
from .events import Batch, Decoder, repair_json

CHUNK_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"
_BETWEEN = re.compile(rb'\}\s*,\s*\{\s*"')
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[][{}]', re.DOTALL)
# Strings that end at a line break at the latest: an unescaped quote then spoils one line, not the file.
_LINE_TOKEN = re.compile(rb'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+["\n]?|[][{}]', re.DOTALL)
_RESUME = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts)")')
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')


def pieces(source: Path | bytes, progress: Callable[[float], None] | None, notes: list[str]) -> Iterator[bytes]:
    """The bytes of a file, decompressed; what is whole of a file that was cut or spoilt."""
    if isinstance(source, bytes):
        yield from _unpack((source[i : i + CHUNK_BYTES] for i in range(0, len(source), CHUNK_BYTES)), notes)
        if progress:
            progress(1.0)
        return
    try:
        with source.open("rb") as file:
            yield from _unpack(_read_counted(file, source.stat().st_size, progress), notes)
    except OSError as error:
        raise RecordingError(f"cannot read {source}", why=str(error), fix="check the path and permissions") from error


def _read_counted(file: BinaryIO, size: int, progress: Callable[[float], None] | None) -> Iterator[bytes]:
    seen = 0
    # Compressed text grows about tenfold: smaller reads keep the chunks of both kinds of file alike.
    while piece := file.read(CHUNK_BYTES // 8):
        yield piece
        seen += len(piece)
        if progress:
            progress(min(1.0, seen / size) if size else 1.0)


def _unpack(packed: Iterator[bytes], notes: list[str]) -> Iterator[bytes]:
    first = next(packed, b"")
    if not first.startswith(_GZIP):
        if first:
            yield first
        yield from packed
        return
    inflate, rest = zlib.decompressobj(31), first
    try:
        while rest or (rest := next(packed, b"")):
            if data := inflate.decompress(rest, CHUNK_BYTES):
                yield data
            rest = inflate.unconsumed_tail
            if inflate.eof:  # gzip files may be several, one after the other
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


def _chunks(source: Iterator[bytes]) -> Iterator[bytes]:
    """Pieces put together: adding each to what is left over would copy that time and again."""
    held: list[bytes] = []
    for piece in source:
        held.append(piece)
        if sum(map(len, held)) >= CHUNK_BYTES:
            yield b"".join(held)
            held.clear()
    yield b"".join(held)


class Events:
    """The events of a trace in batches; afterwards `meta` has the fields beside them, and `cut_bytes` what was lost."""

    def __init__(self, source: Iterator[bytes]) -> None:
        self._source = source
        self.decoder = Decoder()
        self.meta: dict[str, Any] = {}
        self.closed = False
        self.cut_bytes = 0
        self.found = False
        self.cut = self.empty = False

    def __iter__(self) -> Iterator[tuple[Batch, bytes]]:
        """Batches of events, each with its JSON list (for the few events of which more is wanted)."""
        head, buffer = self._head()
        tail = b""
        for chunk in _chunks(self._source):
            buffer += chunk
            if len(buffer) < CHUNK_BYTES:
                continue
            left, batches = self._take(buffer)
            yield from batches
            buffer = left if len(left) < 8 * CHUNK_BYTES else self._skip_damaged(left)
            if self.closed:
                tail = buffer
                break
        else:
            while not self.closed:
                left, batches = self._take(buffer)
                yield from batches
                if len(left) == len(buffer) and (left := self._skip_damaged(buffer)) == buffer:
                    break
                buffer = left
            if self.closed:
                tail = buffer
            else:
                self.cut_bytes = len(buffer.strip(b" \t\r\n,"))
        self.meta = _meta(head, tail + b"".join(self._source), self.closed)
        # The closing bracket of a bare list is optional in Chrome's format.
        self.cut = self.cut_bytes > 0 or self.meta.pop("cut", False)
        if not self.found:
            self.empty = not head.strip()
            self.cut = self.empty or _is_unfinished(head)

    def _head(self) -> tuple[bytes, bytes]:
        """What stands before the events, and the text from the first event on."""
        buffer = b""
        for piece in self._source:
            buffer += piece
            start = buffer.lstrip(b"\xef\xbb\xbf \t\r\n")
            if start.startswith(b"["):
                self.found = True
                return b"", start[1:]
            if match := _first_key(buffer):
                self.found = True
                return buffer[: match.end() - 1], buffer[match.end() :]
        return buffer, b""

    def _take(self, buffer: bytes) -> tuple[bytes, list[tuple[Batch, bytes]]]:
        """The whole events at the start of a buffer, and what is left of it."""
        cut = _guess(buffer)
        if cut is not None:
            text = b"".join((b"[", memoryview(buffer)[:cut], b"]"))  # one copy, not three
            if (decoded := self._decode_events(text)) is not None:
                return _after_comma(buffer, cut), [decoded]
        return self._scan(buffer)

    def _decode_events(self, text: bytes) -> tuple[Batch, bytes] | None:
        """The events of a list, repair_json if need be, and the text they are in."""
        if (events := self.decoder(text)) is None:
            text = repair_json(text)
            events = self.decoder(text)
        return None if events is None else (events, text)

    def _skip_damaged(self, buffer: bytes) -> bytes:
        """A buffer that starts with a damaged event (its brackets do not match) from the next event on."""
        match = _RESUME.search(buffer)
        if match is None:
            return buffer
        self.decoder.unreadable += 1
        return buffer[match.end() :]

    def _scan(self, buffer: bytes) -> tuple[bytes, list[tuple[Batch, bytes]]]:
        """The slow way: find the events by their brackets, and decode them together or, failing that, one by one."""
        found = []
        for token in (_TOKEN, _LINE_TOKEN):
            spans, close = _spans(buffer, token)
            text = b"[" + buffer[spans[0][0] : spans[-1][1]] + b"]" if spans else b"[]"
            if (decoded := self._decode_events(text)) is not None:
                return self._rest_of(buffer, spans, close), [decoded]
            lost = self.decoder.unreadable
            singles = [self.decoder.one(buffer[start:end]) for start, end in spans]
            self.decoder.unreadable, lost = lost, self.decoder.unreadable - lost
            found.append((sum(len(events) for events, _ in singles), -lost, spans, close, singles))
        _, lost, spans, close, singles = max(found, key=lambda way: way[:2])
        self.decoder.unreadable -= lost
        return self._rest_of(buffer, spans, close), singles

    def _rest_of(self, buffer: bytes, spans: list[tuple[int, int]], close: int | None) -> bytes:
        if close is not None:
            self.closed = True
            return buffer[close:]
        return _after_comma(buffer, spans[-1][1]) if spans else buffer


def _first_key(buffer: bytes) -> re.Match[bytes] | None:
    """The key "traceEvents" of the outermost object; the same word in a string or deeper down is not it."""
    for match in _EVENTS.finditer(buffer):
        depth = 0
        for token in _TOKEN.finditer(buffer, 0, match.start()):
            depth += (token[0] in (b"[", b"{")) - (token[0] in (b"]", b"}"))
        if depth == 1:
            return match
    return None


def _guess(buffer: bytes) -> int | None:
    """The end of what looks like the last event that has another one after it."""
    window = 1 << 12
    while True:
        if found := list(_BETWEEN.finditer(buffer, max(0, len(buffer) - window))):
            return found[-1].start() + 1
        if window >= len(buffer):
            return None
        window *= 8


def _spans(buffer: bytes, tokens: re.Pattern[bytes]) -> tuple[list[tuple[int, int]], int | None]:
    """Start and end of each whole event, and where the list is closed (after the bracket), if it is."""
    spans: list[tuple[int, int]] = []
    depth = begin = 0
    for token in tokens.finditer(buffer):
        mark = token[0]
        if mark in (b"{", b"["):
            if depth == 0:
                begin = token.start()
            depth += 1
        elif mark in (b"}", b"]"):
            if depth == 1:
                spans.append((begin, token.end()))
            elif depth == 0 and mark == b"]":
                return spans, token.end()
            depth = max(0, depth - 1)  # a brace too many is damage, not the end
    return spans, None


def _after_comma(buffer: bytes, start: int) -> bytes:
    rest = buffer[start:].lstrip()
    return rest[1:] if rest.startswith(b",") else rest


def _meta(head: bytes, tail: bytes, closed: bool) -> dict[str, Any]:
    """The fields beside the events: the object with its list emptied is ordinary JSON."""
    if not head:
        return {}
    if closed and (found := _object(head + b"[]" + tail)) is not None:
        return found
    # A file cut after its list has lost keys: drop the last ones until the rest can be read.
    rest = tail if closed else b""
    while True:
        if (found := _object(head + b"[]" + rest.rstrip(b" \t\r\n,") + b"}")) is not None or not rest:
            return (found or {}) | {"cut": True}
        rest = rest[: max(0, rest.rfind(b","))]


def _is_unfinished(head: bytes) -> bool:
    """Whether text without a list of events is the start of an object that never ended."""
    depth = 0
    for token in _TOKEN.finditer(head):
        depth += (token[0] in (b"[", b"{")) - (token[0] in (b"]", b"}"))
    return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") and depth > 0


def _object(text: bytes) -> dict[str, Any] | None:
    for attempt in (text, repair_json(text)):
        try:
            found = msgspec.json.decode(attempt)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(found, dict):
            found.pop("traceEvents", None)
            return found
    return None
