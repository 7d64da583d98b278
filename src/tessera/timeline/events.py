"""Decodes the events of a trace into types, and repairs what a profiler wrote as damaged JSON or with other types.

Profilers write `inf`, raw control characters, broken UTF-8 and single backslashes. Such text is repaired, or skipped
and counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw, Struct, field

NAN = float("nan")


class Args(Struct, frozen=True, gc=False):
    """The arguments that we use; msgspec skips the others without making objects."""

    external: int = field(default=-1, name="External id")
    correlation: int = -1
    stream: int | str = -1  # ROCm writes the runtime's streams as text: a handle ("0x0")
    device: int = -1
    bytes: int | str = -1  # ROCm: "616"
    sequence: int = field(default=-1, name="Sequence number")
    forward_thread: int = field(default=-1, name="Fwd thread id")
    dims: Raw = field(default=Raw(b""), name="Input Dims")
    types: Raw = field(default=Raw(b""), name="Input type")
    concrete: Raw = field(default=Raw(b""), name="Concrete Inputs")
    grid: tuple[int, ...] | str | None = None  # a text for Triton's operators
    block: tuple[int, ...] | None = None
    registers: int | None = field(default=None, name="registers per thread")
    shared: int | None = field(default=None, name="shared memory")
    collective: str | None = field(default=None, name="Collective name")
    elements_in: int = field(default=0, name="In msg nelems")
    elements_out: int = field(default=0, name="Out msg nelems")
    dtype: str | None = None
    group: str | None = field(default=None, name="Process Group Name")
    group_description: str | None = field(default=None, name="Process Group Description")
    group_size: int | None = field(default=None, name="Group size")
    name: str | None = None
    labels: str | None = None
    allocated: int | None = field(default=None, name="Total Allocated")
    device_id: int = field(default=-1, name="Device Id")
    old_external: int = field(default=-1, name="external id")  # torch before 1.10; so is "Input dims"
    old_dims: Raw = field(default=Raw(b""), name="Input dims")
    direction: str | None = None  # for MTIA's copies
    size: int | str = -1
    sync_kind: str | None = field(default=None, name="cuda_sync_kind")
    waited_stream: int = field(default=-1, name="wait_on_stream")
    waited_record: int = field(default=-1, name="wait_on_cuda_event_record_corr_id")


class _Event(Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    id: int | str = -1
    args: Args = Args()


class TraceEvent(_Event, gc=False):
    """One event; `ts` and `dur` are microseconds."""

    ts: float = NAN
    dur: float = NAN


class LateEvent(_Event, gc=False):
    """The same with `ts` and `dur` as text: from 2^43 us on (absolute times), a float cannot hold nanoseconds."""

    ts: Raw = Raw(b"")
    dur: Raw = Raw(b"")


Batch = Sequence[TraceEvent | LateEvent]


class RawArgs(Struct, gc=False):
    """An event whose free-form arguments are wanted: a counter."""

    args: Raw = Raw(b"{}")


FLOAT_HOLDS_US = 2.0**43
"""Below this, a float of microseconds is within 0.49 ns of its text: rounding to nanoseconds is exact."""

LIMIT_NS = 2**61
"""73 years: the sum of a base, a start and a duration below this fits 64 bits."""
WALL_CLOCK_NS = 10**18
"""September 2001: an earlier time is not from a wall clock."""
NO_WALL_CLOCK = "times are not those of the wall clock: the trace does not say when it began"

_ARGS: dict[str, tuple[str, Any]] = {f.encode_name: (f.name, f.type) for f in msgspec.structs.fields(Args)}
_CONTROLS = bytes(32 if b < 32 else b for b in range(256))  # a line break outside a string is equivalent to a space
_NOT_A_NUMBER = re.compile(rb'([\w)%]"\s*:\s*)[-+]?(?:nan|inf(?:inity)?)\b', re.IGNORECASE)  # only keys end like this
_REPAIR_TOKEN = re.compile(
    rb'("[^"\\]*+(?:\\.[^"\\]*+)*+"?)|[-+]?\b(?:nan|inf(?:inity)?)\b|(?<![\w.])-?\d[\d.]*+e\+?\d{3,}',
    re.IGNORECASE | re.DOTALL,
)
_PAIR = rb"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rb'\\(?:(["\\/bfnrt]|' + _PAIR + rb"|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})|(u[0-9a-fA-F]{4})|)")


def repair_json(text: bytes) -> bytes:
    """Repair control characters, broken UTF-8 and numbers that are not numbers."""
    text = text.translate(_CONTROLS).decode("utf-8", "replace").encode()
    return _NOT_A_NUMBER.sub(rb"\1null", text)


def _patch_event(text: bytes) -> bytes:
    """Do the same as `repair_json`, and repair bad escapes and numbers in lists too. Slower; for single events."""

    def escape(match: re.Match[bytes]) -> bytes:
        if match[1]:
            return match[0]
        return rb"\ufffd" if match[2] else rb"\\"  # half of a surrogate pair, or a lone backslash

    text = _ESCAPE.sub(escape, text.translate(_CONTROLS).decode("utf-8", "replace").encode())
    return _REPAIR_TOKEN.sub(lambda m: m[1] or b"null", text)


class Decoder:
    """Decodes lists of events. `late` turns on when a time does not fit a float; `unreadable` counts lost events."""

    def __init__(self) -> None:
        self._plain = msgspec.json.Decoder(list[TraceEvent])
        self._late = msgspec.json.Decoder(list[LateEvent])
        self.late = False
        self.unreadable = 0

    def __call__(self, text: bytes) -> Batch | None:
        """Return the events of a JSON list; None if the list is damaged or has other types."""
        try:
            if not self.late:
                events = self._plain.decode(text)
                if not (np.abs([e.ts for e in events]) >= FLOAT_HOLDS_US).any():  # False for NaN
                    return events
                self.late = True
            return self._late.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def mend(self, text: bytes) -> tuple[Batch, bytes] | None:
        """Repair a list that did not decode; return its events and the repaired text, or None if it is not JSON."""
        text = repair_json(text)
        if (events := self(text)) is None:
            try:
                parts = msgspec.json.decode(text, type=list[Raw])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return None
            events, text = self.join([self.mend_event(part) for part in map(bytes, parts) if part[:1] in b"{["])
        return events, text

    def mend_event(self, text: bytes) -> bytes:
        """Return one event in a form that can be decoded, with the values that can be used; empty if impossible."""
        for mend in (bytes, _patch_event, _coerce_event):
            try:
                text = mend(text)
            except (msgspec.DecodeError, UnicodeDecodeError, TypeError, RecursionError):
                return b""
            if self(b"[%b]" % text) is not None:
                return text
        return b""

    def join(self, texts: Sequence[bytes]) -> tuple[Batch, bytes]:
        """Decode repaired events as one batch; count those that are empty."""
        kept = [text for text in texts if text]
        self.unreadable += len(texts) - len(kept)
        text = b"[%b]" % b",".join(kept)
        return self(text) or [], text


def _coerce_event(text: bytes) -> bytes:
    """Convert the values of an event to the expected types; leave out those that cannot be converted."""
    event = msgspec.json.decode(text)
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
        except (KeyError, ArithmeticError, ValueError):  # not a number, too large, or too many digits for Python
            continue
    raw_args = event.get("args")
    args: dict[str, Any] = {}
    for key, value in raw_args.items() if isinstance(raw_args, dict) else ():
        if key in _ARGS:
            try:
                args[key] = msgspec.convert(value, Any if _ARGS[key][1] is Raw else _ARGS[key][1], strict=False)
            except msgspec.ValidationError:
                continue
    return msgspec.json.encode(fields | {"args": args})


def nanoseconds(text: Raw | bytes) -> int | None:
    """Convert decimal microseconds exactly to nanoseconds; None if the text is not a number or not a possible time."""
    try:
        ns = Decimal(bytes(text).decode()) * 1000
        return round(ns) if abs(ns) < LIMIT_NS else None
    except (ArithmeticError, ValueError):
        return None


def fit(value: int) -> int:
    """Convert an unsigned to a signed 64-bit number: handles are printed without a sign."""
    return value if -(2**63) <= value < 2**63 else (value + 2**63) % 2**64 - 2**63
