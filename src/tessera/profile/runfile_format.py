"""The format of a run file: its tables, and columns of many rows packed into one blob.

A million kernels as a million SQL rows would take a minute to write. As blobs of 65 536 rows they take a second or two,
and a reader that needs two columns unpacks only two. JSON beside each blob describes it, so that the file can be read
without Tessera: `select columns from chunks`, then base + little-endian integers, with zlib where the JSON says so.
"""

from __future__ import annotations

import importlib.metadata
import sqlite3
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..notes import NoteKind
from ..record import KINDS
from ..schema import Domain, PowerEvent
from ..timeline import stream_names
from ..timeline.columns import INTEGERS, MOST_NUMBER, NONE, TEXTS
from ..trace import MOST_NS

DAMAGE = (
    ValueError,
    TypeError,
    KeyError,
    OverflowError,
    RecursionError,
    zlib.error,
    msgspec.DecodeError,
    sqlite3.Error,
)
"""The exceptions that reading a damaged file may raise."""
MOST_ROWS = 1 << 18
"""Rows of one chunk; a writer puts 65 536 into one."""
MOST_FIGURE = 1e6
"""The largest lag (seconds) or noise (share) of a sensor that is believed."""
MOST = 1e30
"""The largest watts or joules that are believed: larger values overflow when they are squared and added."""

_Rank = Annotated[int, msgspec.Meta(ge=NONE, le=MOST_NUMBER)]
_NOTHING: NDArray[Any] = np.zeros(0, np.int64)


class TimelinePart(TypedDict):
    """Where the rows of an added timeline lie, and what it says besides its rows."""

    first_row: int
    rows: int
    rank: _Rank | None
    meta: dict[str, Any]
    notes: list[str]
    kinds: NotRequired[dict[str, NoteKind]]


FACTS: Mapping[str, Any] = {
    "meta": dict[str, Any],
    "timelines": list[TimelinePart],
    "start_ns": int | None,
    "end_ns": int | None,
    "rank": _Rank | None,
    "asked_ms": float | None,
    "windows": list[tuple[int, int]] | None,
    "operator_windows": list[tuple[int, int]] | None,
    "pauses": list[tuple[int, float]] | None,
    "notes": list[str] | None,
    "write_stalls": list[str] | None,
    "returncode": int | None,
    "summary": dict[str, Any] | None,
    "stack_interval_s": float | None,
    "events": list[PowerEvent] | None,
}
"""The types of the facts that Tessera reads; another type means damage. Other facts have any type."""


def as_text(column: str) -> str:
    """Return SQL that reads a text, whatever type a damaged file has in its place."""
    return f"coalesce(CAST({column} AS TEXT), '')"


def row_count(rows: Any) -> int:
    """Return the number of rows of a chunk; raise ValueError if it is impossible."""
    if not isinstance(rows, int) or not 0 <= rows <= MOST_ROWS:
        raise ValueError(f"a chunk cannot have {rows!r} rows")
    return rows


def check_time(*times_ns: int) -> None:
    """Raise ValueError for times that no clock can show."""
    if any(abs(t) > MOST_NS for t in times_ns):
        raise ValueError("a time that no clock shows")


def check_domain(domain: Domain) -> Domain:
    """Return the domain; raise ValueError if no sensor can have its figures."""
    figures = (
        domain.resolution_s, domain.lag_s, domain.lag_error_s, domain.blur_s, domain.sample_noise, domain.gain_error,
    )  # fmt: skip
    if any(not abs(figure) <= MOST_FIGURE for figure in figures):
        raise ValueError(f"no sensor is as {domain.name} is described")
    return domain


def points_beyond(columns: Mapping[str, NDArray[Any]], *, names: int, launches: int) -> bool:
    """Return whether a row points to a name or launch that does not exist (yet)."""
    ends = {**dict.fromkeys(TEXTS, names), "launch": launches}
    return any(int(columns[c].max(initial=NONE)) >= end for c, end in ends.items() if c in columns)


def check_columns(columns: dict[str, NDArray[Any]], *, names: int, launches: int) -> list[str]:
    """Check numbers and times; replace other references to missing entries, and return notes about these."""
    for column, end in (("kind", len(KINDS)), ("name", names)):
        values = columns.get(column, _NOTHING)
        if len(values) and not 0 <= values.min() <= values.max() < end:
            raise ValueError(f"they point to a {column} that is not there")
    for column in ("device", "rank"):
        values = columns.get(column, _NOTHING)
        if len(values) and not NONE <= values.min() <= values.max() <= MOST_NUMBER:
            raise ValueError(f"a {column} of theirs has an impossible number")
    for column in ("start_ns", "end_ns"):
        if len(values := columns.get(column, _NOTHING)):
            check_time(int(values.min()), int(values.max()))
    ends = {**dict.fromkeys(TEXTS[1:], names), "launch": launches}
    return [note for column, end in ends.items() for note in let_go(columns, column, end)]


def let_go(columns: dict[str, NDArray[Any]], column: str, end: int) -> list[str]:
    """Replace references beyond the end by `NONE`; return a note about them, if any."""
    values = columns.get(column, _NOTHING)
    if not len(values) or NONE <= values.min() <= values.max() < end:
        return []
    lost = (values < NONE) | (values >= end)
    columns[column] = np.where(lost, NONE, values)
    return [f"the file is damaged: the {column} of {int(lost.sum())} rows is lost"]


def check_pairs(times: NDArray[np.int64], values: NDArray[np.float64], rows: Sequence[tuple[bytes, bytes]]) -> None:
    """Check times and watts (or joules) of a domain. NaN is allowed; it means unknown."""
    if any(len(t) != len(v) for t, v in rows):
        raise ValueError("there are not as many times as values")
    if len(times):
        check_time(int(times.min()), int(times.max()))
    if (np.abs(values) > MOST).any():
        raise ValueError("a value that no sensor can have given")


RUN_VERSION = 1
"""Version of the tables; readers refuse a newer one and say so."""
APPLICATION_ID = 0x54455353  # "TESS"; SQLite's field for the program that a file belongs to
OPEN_ROWS = 1_024
"""Live rows come a few at a time: their chunk is rewritten with them until it has this many."""
NAME_LISTS = ("modules", "frames")
"""Parts of a timeline's meta that are numbers of names, and so change when names are renumbered."""
BY_NUMBER = ("threads", "forward_threads")
"""Parts of a timeline's meta whose keys are numbers; JSON turns the keys into text."""
DESCRIPTION = (
    "A run recorded by Tessera: kernels, operators, regions, marks and counters (chunks), power samples, telemetry and"
    " Python stacks. Times are nanoseconds of the wall clock (epoch). Read it with tessera.profile.runfile.RunFile."
)
TABLES = {
    "about": "(key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID",
    "facts": "(key TEXT PRIMARY KEY, value TEXT /* JSON */) WITHOUT ROWID",
    "names": "(id INTEGER PRIMARY KEY, text TEXT)",
    "launches": "(id INTEGER PRIMARY KEY, value TEXT /* JSON */)",
    "chunks": "(first_row INTEGER PRIMARY KEY, rows INTEGER, columns TEXT /* JSON: what lies where */, data BLOB)",
    "extra": "(row INTEGER PRIMARY KEY, value TEXT /* JSON: fields of single rows */)",
    "energy": "(first_row INTEGER PRIMARY KEY, rows INTEGER, columns TEXT /* JSON */, data BLOB)",
    "domains": "(id INTEGER PRIMARY KEY, name TEXT UNIQUE, value TEXT /* JSON */)",
    "samples": "(domain INTEGER, count INTEGER, epoch_ns BLOB /* int64 */, watts BLOB /* float64 */)",
    "anchors": "(domain INTEGER, count INTEGER, epoch_ns BLOB /* int64 */, joules BLOB /* float64 */)",
    "gaps": "(domain TEXT, start_ns INTEGER, end_ns INTEGER, reason TEXT)",
    "telemetry": "(domain TEXT, epoch_ns INTEGER, value TEXT /* JSON */)",
    "stacks": "(epoch_ns INTEGER, thread, stack INTEGER /* -> names */, count INTEGER)",
}
INDEXES = ("samples (domain)", "anchors (domain)")

_WIDTHS = (np.uint8, np.uint16, np.uint32)
_DTYPES = ("|u1", "<u2", "<u4", "<i8", "<f8")
_SMALL = 256  # bytes; for less, zlib's overhead is more than it saves


class Packed(msgspec.Struct, array_like=True, omit_defaults=True):
    """One column of a chunk: only `base` if all rows are equal, else base + integers of `dtype` at `offset`."""

    name: str
    base: int | float | None
    dtype: str = ""
    offset: int = 0
    size: int = 0
    zipped: bool = False


def enc_hook(value: Any) -> Any:
    """Convert numpy values, sets and paths to what JSON has."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, str):  # a Note
        return str(value)
    if isinstance(value, (set, frozenset, Path)):
        return sorted(value) if not isinstance(value, Path) else str(value)
    raise NotImplementedError(f"JSON has no {type(value).__name__}")


def version() -> str:
    """Return the version of the installed Tessera."""
    try:
        return importlib.metadata.version("tessera-energy")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def to_json(value: Any) -> str:
    """Return plain data as JSON text; NaN and infinities become null."""
    return msgspec.json.encode(value, enc_hook=enc_hook).decode()


def pack(columns: Mapping[str, NDArray[Any]]) -> tuple[str, bytes]:
    """Return the columns of a chunk as (JSON that describes them, blob). Columns with only `NONE` or NaN are left out.

    `end_ns` is stored as the duration, which takes four bytes instead of eight.
    """
    heads: list[Packed] = []
    parts: list[bytes] = []
    offset = 0
    for name, values in columns.items():
        column = values - columns["start_ns"] if name == "end_ns" else values
        head, data = _pack_floats(name, column) if column.dtype.kind == "f" else _pack_integers(name, column)
        if head is None:
            continue
        if len(data) >= _SMALL:
            small = zlib.compress(data, 1)
            if len(small) < 0.9 * len(data):
                data, head.zipped = small, True
        head.offset, head.size = (offset, len(data)) if data else (0, 0)
        offset += len(data)
        heads.append(head)
        parts.append(data)
    return msgspec.json.encode(heads).decode(), b"".join(parts)


def _pack_integers(name: str, values: NDArray[Any]) -> tuple[Packed | None, bytes]:
    low, high = int(values.min()), int(values.max())
    if low == high:
        return (None, b"") if low == NONE else (Packed(name, low), b"")
    width: Any = next((w for w in _WIDTHS if high - low <= np.iinfo(w).max), None)
    if width is None:  # beyond 32 bits the difference itself might overflow: keep the values as they are
        return Packed(name, 0, "<i8"), np.ascontiguousarray(values, "<i8").tobytes()
    dtype = np.dtype(width).newbyteorder("<")
    return Packed(name, low, dtype.str), (values - low).astype(dtype).tobytes()


def _pack_floats(name: str, values: NDArray[Any]) -> tuple[Packed | None, bytes]:
    if np.isnan(values).all():
        return None, b""
    return Packed(name, None, "<f8"), np.ascontiguousarray(values, "<f8").tobytes()


def unpack(heads: str, data: bytes, rows: int, wanted: Collection[str]) -> dict[str, NDArray[Any]]:
    """Return the wanted columns of a chunk; columns that were left out are `NONE` (integers) or NaN."""
    packed = {h.name: h for h in msgspec.json.decode(heads, type=list[Packed])}
    need = set(wanted) | ({"start_ns"} if "end_ns" in wanted else set())
    out = {name: _unpack(packed.get(name), data, rows, name in INTEGERS) for name in need}
    if "end_ns" in out:
        out["end_ns"] = out["end_ns"] + out["start_ns"]
    return {name: out[name] for name in wanted}


def _unpack(head: Packed | None, data: bytes, rows: int, integer: bool) -> NDArray[Any]:
    if head is None or not head.dtype:  # one value for all rows: takes no memory, and is read-only
        value = (NONE if integer else np.nan) if head is None else head.base
        return np.broadcast_to(np.array(value, np.int64 if integer else np.float64), rows)
    if head.dtype not in _DTYPES:
        raise ValueError(f"column {head.name!r} is of type {head.dtype!r}, which no writer uses")
    raw = data[head.offset : head.offset + head.size]
    values: NDArray[Any] = np.frombuffer(_unzip(raw, 8 * rows) if head.zipped else raw, head.dtype)
    if len(values) != rows:
        raise ValueError(f"column {head.name!r} has {len(values)} rows, not {rows}")
    return values.astype(np.float64) if head.dtype == "<f8" else values.astype(np.int64) + int(head.base or 0)


def join_columns(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Join a column of several chunks; it takes no memory if it has the same value in all of them."""
    if all(part.strides == (0,) for part in parts):
        values = np.array([part[0] for part in parts if len(part)])
        if len(values) and (values[0] == values).all() | np.isnan(values).all():
            return np.broadcast_to(values[0], sum(len(part) for part in parts))
    return np.concatenate(parts)


def _unzip(data: bytes, most: int) -> bytes:
    """Decompress at most `most` bytes: a damaged file must not ask for gigabytes."""
    stream = zlib.decompressobj()
    unpacked = stream.decompress(data, most + 1)
    if len(unpacked) > most or not stream.eof:
        raise ValueError("its compressed rows are cut off, or longer than stated")
    return unpacked


def merge_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the meta of several timelines into one."""
    out: dict[str, Any] = {}
    for meta in metas:
        for key, value in meta.items():
            if key in NAME_LISTS:
                out[key] = sorted({*out.get(key, ()), *value})
            elif key == stream_names.KEY and isinstance(value, dict):
                out[key] = {**out.get(key, {}), **value}
            elif key in BY_NUMBER and isinstance(value, dict):
                out[key] = {**out.get(key, {}), **{int(k): v for k, v in value.items()}}
            else:
                out[key] = value
    return out


def renumber_rows(
    parent: NDArray[Any], firsts: NDArray[np.int64], counts: NDArray[np.int64], starts: NDArray[np.int64]
) -> NDArray[Any]:
    """Convert row numbers of the file to positions in the arrays; `NONE` for a row that was lost."""
    at = np.clip(np.searchsorted(firsts, parent, side="right") - 1, 0, None)
    inside = parent - firsts[at]
    present = (parent != NONE) & (inside >= 0) & (inside < counts[at])
    return np.where(present, starts[at] + inside, NONE)
