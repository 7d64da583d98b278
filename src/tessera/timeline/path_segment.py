"""`PathSegment`: a part of a critical path. Analyses find them, exporters draw them."""

from __future__ import annotations

from typing import Literal, NamedTuple

PATH = "critical_path"
"""The category of its events in a Chrome trace."""
PathPlace = Literal["host", "device", "gap"]


class PathSegment(NamedTuple):
    """A time in which one row held up the end; `row` is its row in the timeline, `NONE` for a gap or a pause."""

    start_ns: int
    end_ns: int
    on: PathPlace
    kind: str
    name: str
    row: int
