"""Reads a trace file as a stream of typed events: a megabyte at a time, cut between two events.

Where to cut is guessed from the text, and the decoder checks the guess: JSON that is cut inside a string or a nested
object does not decode, so a wrong guess is always found. Only then the text is repaired, or scanned token by token, at
a limited cost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw

from ..read_limits import JSON_BYTES, ReadBudget
from .events import Batch, Decoder, repair_json
from .source import CHUNK_BYTES, join_chunks

EVENT_BYTES = 2 * CHUNK_BYTES
"""Text of this length without the end of an event is damaged: real events have kilobytes."""
META_BYTES = JSON_BYTES // 2
"""Most text before or after the list of events."""
_RESUME_BYTES = 64

_BETWEEN = re.compile(rb'\}\s*,\s*\{\s*"')
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[][{}]', re.DOTALL)
# Strings that end at a line break at the latest, so that an unescaped quote damages one line, not the whole file.
_LINE_TOKEN = re.compile(rb'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+["\n]?|[][{}]', re.DOTALL)
_RESUME = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts)")')
_COMMA_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[][{},]', re.DOTALL)
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')


class Events:
    """The events of a trace in batches. Afterwards `meta` has the other fields, and `cut_bytes` tells what was lost."""

    def __init__(self, source: Iterator[bytes], budget: ReadBudget) -> None:
        self._source = source
        self._budget = budget
        self.decoder = Decoder()
        self.meta: dict[str, Any] = {}
        self.head = b""
        self.closed = False
        self.cut_bytes = 0
        self.found = False
        self.cut = self.empty = False

    def __iter__(self) -> Iterator[tuple[Batch, bytes]]:
        """Yield batches of events, each with its JSON list, for the few events that need more of it."""
        head, buffer = self._head()
        self.head = head
        tail, enough = b"", CHUNK_BYTES
        for chunk in join_chunks(self._source):
            buffer = (buffer + chunk).lstrip()
            if len(buffer) < enough:
                continue
            buffer, batches = self._take(buffer)
            yield from batches
            if self.closed:
                tail = buffer
                break
            if len(buffer) > EVENT_BYTES:  # it starts with something else than an event, or the event never ends
                buffer = self._skip_damaged(buffer) or self._drop_damaged(buffer)
            enough = max(CHUNK_BYTES, 2 * len(buffer))  # wait until there is much more text
        else:
            while not self.closed:
                left, batches = self._take(buffer)
                yield from batches
                if len(left) == len(buffer) and not (left := self._skip_damaged(buffer)):
                    break
                buffer = left
            if self.closed:
                tail = buffer
            else:
                self.cut_bytes = len(buffer.strip(b" \t\r\n,"))
        self._finish(head, tail)

    def _finish(self, head: bytes, tail: bytes) -> None:
        for piece in self._source:
            tail += piece
            if len(tail) > META_BYTES:
                break
        self.meta = _meta(head, tail, self.closed)
        # The closing bracket of a bare list is optional in Chrome's format.
        self.cut = self.cut_bytes > 0 or self.meta.pop("cut", False)
        if not self.found:
            self.empty = not head.strip()
            self.cut = self.empty or _is_unfinished(head)

    def _head(self) -> tuple[bytes, bytes]:
        """Return the text before the events, and the text from the first event on."""
        buffer, enough = b"", 0
        for piece in self._source:
            buffer += piece
            start = buffer[:CHUNK_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n")
            if start.startswith(b"["):
                self.found = True
                return b"", start[1:] + buffer[CHUNK_BYTES:]
            if len(buffer) >= enough:
                if end := _first_event(buffer):
                    self.found = True
                    return buffer[: end - 1], buffer[end:]
                enough = 2 * len(buffer)
            if len(buffer) > META_BYTES:
                return buffer, b""
        if end := _first_event(buffer):
            self.found = True
            return buffer[: end - 1], buffer[end:]
        return buffer, b""

    def _take(self, buffer: bytes) -> tuple[bytes, list[tuple[Batch, bytes]]]:
        """Return the rest of a buffer, and the whole events at its start."""
        cut = _guess(buffer)
        text = b"".join((b"[", memoryview(buffer)[:cut], b"]")) if cut is not None else b""  # copies only once
        if text and (events := self.decoder(text)) is not None:
            return _after_comma(buffer, cut or 0), [(events, text)]
        with self._budget.slowly():
            if self._budget.is_spent:
                raise self._budget.refuse_slow()
            if text and (mended := self.decoder.mend(text)) is not None:
                return _after_comma(buffer, cut or 0), [mended]
            return self._scan(buffer)

    def _skip_damaged(self, buffer: bytes) -> bytes:
        """Return a buffer that starts with a damaged event (unmatched brackets) from the next event on, or empty."""
        match = _RESUME.search(buffer)
        if match is None:
            return b""
        self.decoder.unreadable += 1
        return buffer[match.end() :]

    def _drop_damaged(self, buffer: bytes) -> bytes:
        """Drop all but the end, where the next event may begin."""
        self.decoder.unreadable += 1
        return buffer[-_RESUME_BYTES:]

    def _scan(self, buffer: bytes) -> tuple[bytes, list[tuple[Batch, bytes]]]:
        """Find events by their brackets, which is slow; decode them together or, if that fails, one by one."""
        best: tuple[list[bytes], list[tuple[int, int]], int | None] | None = None
        for token in (_TOKEN, _LINE_TOKEN):
            spans, close = _spans(buffer, token)
            text = b"[" + buffer[spans[0][0] : spans[-1][1]] + b"]" if spans else b"[]"
            if (events := self.decoder(text)) is not None:
                return self._rest_of(buffer, spans, close), [(events, text)]
            if (mended := self.decoder.mend(text)) is not None:
                return self._rest_of(buffer, spans, close), [mended]
            texts = [self._mend_span(buffer[start:end]) for start, end in spans]
            if best is None or sum(map(bool, texts)) > sum(map(bool, best[0])):
                best = texts, spans, close
        assert best is not None
        texts, spans, close = best
        return self._rest_of(buffer, spans, close), [self.decoder.join(texts)]

    def _mend_span(self, text: bytes) -> bytes:
        if self._budget.is_spent:
            raise self._budget.refuse_slow()
        # Profilers write no larger events, and a list is not an event.
        return self.decoder.mend_event(text) if text[:1] == b"{" and len(text) < EVENT_BYTES else b""

    def _rest_of(self, buffer: bytes, spans: list[tuple[int, int]], close: int | None) -> bytes:
        if close is not None:
            self.closed = True
            return buffer[close:]
        return _after_comma(buffer, spans[-1][1]) if spans else buffer


def _first_event(buffer: bytes) -> int:
    """Return where the list "traceEvents" of the outermost object begins, or 0; ignores the word in strings."""
    if not _EVENTS.search(buffer):
        return 0
    depth = 0
    for token in _TOKEN.finditer(buffer):
        mark = token[0]
        if depth == 1 and mark == b'"traceEvents"' and (match := _EVENTS.match(buffer, token.start())):
            return match.end()
        depth += (mark in (b"[", b"{")) - (mark in (b"]", b"}"))
    return 0


def _guess(buffer: bytes) -> int | None:
    """Return the end of what looks like the last event that is followed by another one."""
    window = 1 << 12
    while True:
        if matches := list(_BETWEEN.finditer(buffer, max(0, len(buffer) - window))):
            return matches[-1].start() + 1
        if window >= len(buffer):
            return None
        window *= 8


def _spans(buffer: bytes, tokens: re.Pattern[bytes]) -> tuple[list[tuple[int, int]], int | None]:
    """Return start and end of each whole event, and the place after the list's closing bracket, if it is there."""
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
            depth = max(0, depth - 1)  # an extra brace is damage, not the end
    return spans, None


def _after_comma(buffer: bytes, start: int) -> bytes:
    rest = buffer[start:].lstrip()
    return rest[1:] if rest.startswith(b",") else rest


def _meta(head: bytes, tail: bytes, closed: bool) -> dict[str, Any]:
    """Return the fields beside the events: without the events in its list, the object is ordinary JSON."""
    if not head:
        return {}
    if closed and (fields := _object(head + b"[]" + tail)) is not None:
        return fields
    # A file that was cut after its list has lost its last keys, but the keys before the cut can be read.
    head, tail = repair_json(head + b"[]"), repair_json(tail) if closed else b""
    ends = [0, *_ends_of_keys(tail), len(tail)]
    low, high = 0, len(ends)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _is_json(_close(head, tail[: ends[middle]])) else (low, middle)
    return (_object(_close(head, tail[: ends[low]])) or {}) | {"cut": True}


def _close(head: bytes, tail: bytes) -> bytes:
    return head + tail.rstrip(b" \t\r\n,") + b"}"


def _ends_of_keys(tail: bytes) -> Iterator[int]:
    """Yield the commas between the keys of the outermost object."""
    depth = 0
    for token in _COMMA_TOKEN.finditer(tail):
        mark = token[0]
        depth += (mark in (b"[", b"{")) - (mark in (b"]", b"}"))
        if depth == 0 and mark == b",":
            yield token.start()


def _is_unfinished(head: bytes) -> bool:
    """Return whether a text without a list of events is the start of an object that never ends."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    return text.startswith(b"{") and len(head) <= META_BYTES and not _is_json(text, unless="truncated")


def _is_json(text: bytes, unless: str = "") -> bool:
    """Return whether a text is JSON; with `unless`, also if it has errors other than this one."""
    try:
        msgspec.json.decode(text, type=Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return bool(unless) and unless not in str(error)
    return True


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
