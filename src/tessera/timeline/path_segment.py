"""`PathSegment`: a piece of a critical path. Analyses find them, exporters draw them."""

from __future__ import annotations

from typing import Literal, NamedTuple

PATH = "critical_path"
"""The category of its events in a Chrome trace."""
PathPlace = Literal["host", "device", "gap"]


class PathSegment(NamedTuple):
    """A stretch of time, who held the end up in it, and the row of that in the timeline (`NONE`: a gap or a pause)."""

    start_ns: int
    end_ns: int
    on: PathPlace
    kind: str
    name: str
    row: int
