"""Reads protocol buffers without generated code: the fields of a message, one after the other.

The formats read here (JAX's XSpace, Perfetto's traces) have a few dozen fields, of which only some are needed. A
generated reader would need a package whose version clashes with somebody else's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import RecordingError
from ..notes import Note
from ..read_limits import ReadBudget
from .columns import Builder
from .source import read_whole

Value = int | memoryview


class DamagedMessage(ValueError):
    """The bytes are not a message."""


def read_messages(
    path: Path, what: str, builder: Builder, budget: ReadBudget, notes: list[str], add: Callable[[memoryview], None]
) -> None:
    """Call `add` with each message of a file (its fields 1), until one is damaged; raise if that left no row.

    `what` names the expected kind of file for the error.
    """
    whole = memoryview(read_whole(path, budget, notes))
    try:
        with budget.slowly():
            for number, value in read_fields(whole):
                if number == 1:
                    add(as_message(value))
    except DamagedMessage as error:
        if not len(builder):
            why = f"its protocol buffer is damaged: {error}"
            raise RecordingError(f"{path} is not {what}", why=why, fix="record again") from error
        notes.append(Note(f"the trace was cut or damaged ({error}): what comes before that was read", "omission"))


def read_fields(message: memoryview) -> Iterator[tuple[int, Value]]:
    """Yield number and value of each field: an integer, or the bytes of a text, a message or a fixed-size number."""
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at, end)
        wire = key & 7
        if wire == 0:
            value, at = _varint(message, at, end)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(message, at, end)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise DamagedMessage(f"wire type {wire}")
        if at + size > end:
            raise DamagedMessage("cut")
        yield key >> 3, message[at : at + size]
        at += size


def collect_fields(message: memoryview, *repeated: int) -> dict[int, Any]:
    """Return the last value of each field by its number; a list of all values for `repeated` fields."""
    found: dict[int, Any] = {number: [] for number in repeated}
    for number, value in read_fields(message):
        if number in repeated:
            found[number].append(value)
        else:
            found[number] = value
    return found


def _varint(message: memoryview, at: int, end: int) -> tuple[int, int]:
    if at < end and message[at] < 128:  # most numbers have one byte
        return message[at], at + 1
    value = shift = 0
    while at < end and shift < 70:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise DamagedMessage("a number that does not end")


def as_text(value: Value) -> str:
    """Return the value of a text field."""
    return bytes(value).decode("utf-8", "replace") if isinstance(value, memoryview) else str(value)


def as_message(value: Value) -> memoryview:
    """Return the value of a message field; an empty message if it is a number."""
    return value if isinstance(value, memoryview) else memoryview(b"")


def as_number(value: Value) -> int:
    """Return the value of a number field, also of fixed size."""
    if isinstance(value, int):
        return value
    return int.from_bytes(value, "little") if len(value) in (4, 8) else 0


def as_signed(value: Value) -> int:
    """Return the value of an int64 field; negative values are stored as their complement."""
    number = as_number(value)
    return number - (1 << 64) if number >= 1 << 63 else number


def as_double(value: Value) -> float:
    """Return the value of a double field."""
    return float(struct.unpack("<d", value)[0]) if isinstance(value, memoryview) and len(value) == 8 else float("nan")
