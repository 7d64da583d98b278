"""What must hold of a run file's contents: a damaged file ends in one error that says so, never in a wrong number."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..notes import NoteKind
from ..record import KINDS
from ..schema import Domain
from ..timeline.columns import NONE
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
"""What reading a damaged file may raise."""
DAMAGED_FIX = "restore it from a copy, or record the run again"
MOST_ROWS = 1 << 24
"""Rows of one chunk; a writer puts 65 536 into one."""
MOST_FIGURE = 1e6
"""Of a sensor: seconds of its lag, shares of its noise."""
MOST = 1e30
"""Of watts and joules: what is larger overflows when it is squared and added."""

_NOTHING: NDArray[Any] = np.zeros(0, np.int64)


class TimelinePart(TypedDict):
    """Where a timeline that was added lies."""

    first_row: int
    rows: int
    rank: int | None
    meta: dict[str, Any]
    notes: list[str]
    kinds: NotRequired[dict[str, NoteKind]]


FACTS: Mapping[str, Any] = {
    "meta": dict[str, Any],
    "timelines": list[TimelinePart],
    "start_ns": int | None,
    "end_ns": int | None,
    "rank": int | None,
    "asked_ms": float | None,
    "windows": list[tuple[int, int]] | None,
    "notes": list[str] | None,
    "returncode": int | None,
    "summary": dict[str, Any] | None,
    "stack_interval_s": float | None,
}
"""Facts that are read as something; what is not of its type is damage. Others are kept as they are."""


def as_text(column: str) -> str:
    """SQL for a text, whatever a damaged file has in its place."""
    return f"coalesce(CAST({column} AS TEXT), '')"


def row_count(rows: Any) -> int:
    """The rows of a chunk."""
    if not isinstance(rows, int) or not 0 <= rows <= MOST_ROWS:
        raise ValueError(f"a chunk cannot have {rows!r} rows")
    return rows


def check_time(*times_ns: int) -> None:
    """That a clock can have shown them."""
    if any(abs(t) > MOST_NS for t in times_ns):
        raise ValueError("a time that no clock shows")


def check_domain(domain: Domain) -> Domain:
    """The domain, once its sensor is one that could be."""
    figures = (domain.resolution_s, domain.lag_s, domain.blur_s, domain.sample_noise, domain.gain_error)
    if any(not abs(figure) <= MOST_FIGURE for figure in figures):
        raise ValueError(f"no sensor is as {domain.name} is described")
    return domain


def check_columns(columns: dict[str, NDArray[Any]], *, names: int, launches: int) -> list[str]:
    """That kinds, names and times are such. What else points to something that is not there is let go, with a note."""
    for column, end in (("kind", len(KINDS)), ("name", names)):
        found = columns.get(column, _NOTHING)
        if len(found) and not 0 <= found.min() <= found.max() < end:
            raise ValueError(f"they point to a {column} that is not there")
    for column in ("start_ns", "end_ns"):
        if len(found := columns.get(column, _NOTHING)):
            check_time(int(found.min()), int(found.max()))
    return [n for c, end in (("shapes", names), ("unit", names), ("launch", launches)) for n in let_go(columns, c, end)]


def let_go(columns: dict[str, NDArray[Any]], column: str, end: int) -> list[str]:
    """Make nothing of what points beyond the end; the note that says so, if there was any."""
    found = columns.get(column, _NOTHING)
    if not len(found) or NONE <= found.min() <= found.max() < end:
        return []
    lost = (found < NONE) | (found >= end)
    columns[column] = np.where(lost, NONE, found)
    return [f"the file is damaged: the {column} of {int(lost.sum())} rows is lost"]


def check_pairs(times: NDArray[np.int64], values: NDArray[np.float64], rows: Sequence[tuple[bytes, bytes]]) -> None:
    """Times and watts, or joules, of a domain. NaN is right: it says that nothing is known."""
    if any(len(t) != len(v) for t, v in rows):
        raise ValueError("there are not as many times as values")
    if len(times):
        check_time(int(times.min()), int(times.max()))
    if (np.abs(values) > MOST).any():
        raise ValueError("a value that no sensor can have given")
