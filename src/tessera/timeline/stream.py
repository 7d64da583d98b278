"""A trace file as a stream of typed events: a megabyte at a time, cut between two events.

Where to cut is guessed from the text, and the decoder is the judge: JSON that is cut inside a string or a nested object
does not decode, so a wrong guess is always found out. Only then is the text scanned token by token. Profilers write
damaged JSON: `inf`, raw control characters, broken UTF-8, single backslashes. It is repaired, or skipped and counted.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from msgspec import Raw, Struct, field

from ..errors import RecordingError

NAN = float("nan")


class Args(Struct, frozen=True, gc=False):
    """The arguments we use; msgspec skips the others without making objects of them."""

    external: int = field(default=-1, name="External id")
    correlation: int = -1
    stream: int = -1
    device: int = -1
    bytes: int = -1
    sequence: int = field(default=-1, name="Sequence number")
    forward_thread: int = field(default=-1, name="Fwd thread id")
    dims: Raw = field(default=Raw(b""), name="Input Dims")
    types: Raw = field(default=Raw(b""), name="Input type")
    grid: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None
    registers: int | None = field(default=None, name="registers per thread")
    shared: int | None = field(default=None, name="shared memory")
    collective: str | None = field(default=None, name="Collective name")
    elements_in: int = field(default=0, name="In msg nelems")
    elements_out: int = field(default=0, name="Out msg nelems")
    dtype: str | None = None
    group: str | None = field(default=None, name="Process Group Name")
    group_size: int | None = field(default=None, name="Group size")
    name: str | None = None
    labels: str | None = None
    allocated: int | None = field(default=None, name="Total Allocated")
    device_id: int = field(default=-1, name="Device Id")


class _Event(Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    id: int | str = -1
    args: Args = Args()


class TraceEvent(_Event, gc=False):
    """One event; `ts` and `dur` in microseconds."""

    ts: float = NAN
    dur: float = NAN


class LateEvent(_Event, gc=False):
    """The same with `ts` and `dur` as text: from 2^43 us on (absolute times) a float does not hold nanoseconds."""

    ts: Raw = Raw(b"")
    dur: Raw = Raw(b"")


Batch = Sequence[TraceEvent | LateEvent]


class RawArgs(Struct, gc=False):
    """An event of which only the free-form arguments matter: counters."""

    args: Raw = Raw(b"{}")


FLOAT_HOLDS_US = 2.0**43
"""Below this a float of microseconds is within 0.49 ns of its text: rounding to a nanosecond is exact."""

LIMIT_NS = 2**61
"""73 years: the sum of a base, a start and a duration below this fits 64 bits."""

_ARGS: dict[str, tuple[str, Any]] = {f.encode_name: (f.name, f.type) for f in msgspec.structs.fields(Args)}
_CONTROLS = bytes(32 if b < 32 else b for b in range(256))  # a line break outside a string is as good as a space
_NOT_A_NUMBER = re.compile(rb'([\w)%]"\s*:\s*)[-+]?(?:nan|inf(?:inity)?)\b', re.IGNORECASE)  # only keys end so: exact
_REPAIR_TOKEN = re.compile(
    rb'("(?:[^"\\]|\\.)*")|[-+]?\b(?:nan|inf(?:inity)?)\b|-?\b\d[\d.]*e\+?\d{3,}', re.IGNORECASE | re.DOTALL
)
_PAIR = rb"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rb'\\(?:(["\\/bfnrt]|' + _PAIR + rb"|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})|(u[0-9a-fA-F]{4})|)")


def repair_json(text: bytes) -> bytes:
    """Repair control characters, broken UTF-8 and numbers that are not numbers."""
    text = text.translate(_CONTROLS).decode("utf-8", "replace").encode()
    return _NOT_A_NUMBER.sub(rb"\1null", text)


def _patch_event(text: bytes) -> bytes:
    """`repair_json`, and bad escapes and numbers in lists too: slower, for single events."""

    def escape(match: re.Match[bytes]) -> bytes:
        if match[1]:
            return match[0]
        return rb"\ufffd" if match[2] else rb"\\"  # half a surrogate pair; a lone backslash

    text = _ESCAPE.sub(escape, text.translate(_CONTROLS).decode("utf-8", "replace").encode())
    return _REPAIR_TOKEN.sub(lambda m: m[1] or b"null", text)


class Decoder:
    """Decodes runs of events. `late` turns on by itself when a time does not fit a float; `unreadable` counts."""

    def __init__(self) -> None:
        self._plain = msgspec.json.Decoder(list[TraceEvent])
        self._late = msgspec.json.Decoder(list[LateEvent])
        self.late = False
        self.unreadable = 0

    def __call__(self, text: bytes) -> Batch | None:
        """The events of a JSON list; None where it is not sound or not of the expected types."""
        try:
            if not self.late:
                events = self._plain.decode(text)
                if not (np.abs([e.ts for e in events]) >= FLOAT_HOLDS_US).any():  # NaN is not
                    return events
                self.late = True
            return self._late.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def one(self, text: bytes) -> tuple[Batch, bytes]:
        """An event that would not decode, as well as it can be read, with its list; nothing where it cannot."""
        for attempt in (text, _patch_event(text)):
            if (events := self(b"[" + attempt + b"]")) is not None:
                return events, b"[" + attempt + b"]"
        try:
            loose = b"[" + msgspec.json.encode(_coerce_event(msgspec.json.decode(_patch_event(text)))) + b"]"
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, RecursionError):
            loose = b""
        if (events := self(loose)) is None:
            self.unreadable += 1
            events = []
        return events, loose


def _coerce_event(event: Any) -> dict[str, Any]:
    """An event whose values have unexpected types, with those that can be used."""
    if not isinstance(event, dict):
        raise TypeError
    fields: dict[str, Any] = {}
    for key in ("ph", "cat", "name", "pid", "tid", "id"):
        value = event.get(key)
        if value is not None:
            number = key in ("pid", "tid", "id") and isinstance(value, int)
            fields[key] = value if number else str(value)
    for key in ("ts", "dur"):
        try:
            fields[key] = Raw(str(Decimal(str(event[key]))).encode())
        except (KeyError, InvalidOperation):
            continue
    raw_args = event.get("args")
    args: dict[str, Any] = {}
    for key, value in raw_args.items() if isinstance(raw_args, dict) else ():
        if key in _ARGS:
            try:
                args[key] = msgspec.convert(value, Any if _ARGS[key][1] is Raw else _ARGS[key][1], strict=False)
            except msgspec.ValidationError:
                continue
    return fields | {"args": args}


def nanoseconds(text: Raw | bytes) -> int | None:
    """Decimal microseconds as nanoseconds, exactly; None where it is no number or no time that can be."""
    try:
        ns = Decimal(bytes(text).decode()) * 1000
        return round(ns) if abs(ns) < LIMIT_NS else None
    except (InvalidOperation, UnicodeDecodeError):
        return None


def fit(value: int) -> int:
    """A number as 64 bits with a sign: handles are printed without one."""
    return value if -(2**63) <= value < 2**63 else (value + 2**63) % 2**64 - 2**63


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
        """The events of a list, repaired if need be, and the text they are in."""
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
        ways = []
        for token in (_TOKEN, _LINE_TOKEN):
            spans, close = _spans(buffer, token)
            text = b"[" + buffer[spans[0][0] : spans[-1][1]] + b"]" if spans else b"[]"
            if (decoded := self._decode_events(text)) is not None:
                return self._rest_of(buffer, spans, close), [decoded]
            lost = self.decoder.unreadable
            singles = [self.decoder.one(buffer[start:end]) for start, end in spans]
            self.decoder.unreadable, lost = lost, self.decoder.unreadable - lost
            ways.append((sum(len(events) for events, _ in singles), -lost, spans, close, singles))
        _, lost, spans, close, singles = max(ways, key=lambda way: way[:2])
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
        if matches := list(_BETWEEN.finditer(buffer, max(0, len(buffer) - window))):
            return matches[-1].start() + 1
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
    if closed and (fields := _object(head + b"[]" + tail)) is not None:
        return fields
    # A file cut after its list has lost keys: drop the last ones until the rest can be read.
    rest = tail if closed else b""
    while True:
        if (fields := _object(head + b"[]" + rest.rstrip(b" \t\r\n,") + b"}")) is not None or not rest:
            return (fields or {}) | {"cut": True}
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
            value = msgspec.json.decode(attempt)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(value, dict):
            value.pop("traceEvents", None)
            return value
    return None
