"""Collectives in the terminal: sums by kind, and a map of which rank waits for which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..units import format_bytes, format_duration, format_si
from .console import open_table

MOST_RANKS = 16
"""Ranks of a map in a terminal: of more, those that waited longest. The page and JSON have all."""
_SHADES = " ░▒▓█"


def describe_collectives(facts: Mapping[str, Any]) -> list[RenderableType]:
    """One line for each kind, and who waited for whom where several ranks recorded them."""
    across = facts.get("across_ranks") or {}
    parts: list[RenderableType] = [_sum_kinds(facts["by_kind"])]
    if waits := across.get("waits_s"):
        parts += ["", Text("Who waited (rows) for whom (columns), in all collectives"), map_waits(waits)]
    return [*parts, ""]


def _sum_kinds(by_kind: Mapping[str, Mapping[str, Any]]) -> Table:
    table = open_table()
    titles = ("kind", "collectives", "bytes", "time", "bus", "overlaps compute", "waited")
    for title in titles:
        table.add_column(title, justify="left" if title == "kind" else "right", no_wrap=True)
    for kind, sums in sorted(by_kind.items(), key=lambda kv: -kv[1]["time_s"]):
        size, bus, overlap, waited = (sums.get(k) for k in ("bytes", "bus_bytes_per_s", "overlap_pct", "wait_s"))
        table.add_row(
            kind,
            f"{sums['count']:,}",
            "-" if size is None else format_bytes(size),
            format_duration(sums["time_s"], 3),
            "-" if bus is None else format_si(bus, "B/s"),
            "-" if overlap is None else f"{overlap:.0f}%",
            format_duration(waited, 3) if waited else "-",
        )
    return table


def map_waits(waits: Mapping[int, Mapping[int, float]]) -> Table:
    """A row for each rank that waited, a column for each it waited for, shaded by the seconds."""
    ranks = sorted(waits, key=lambda r: -sum(waits[r].values()))[:MOST_RANKS]
    late: dict[int, float] = {}
    for by in waits.values():
        for rank, seconds in by.items():
            late[rank] = late.get(rank, 0.0) + seconds
    columns = sorted(sorted(late, key=lambda r: -late[r])[:MOST_RANKS], key=int)
    most = max(seconds for by in waits.values() for seconds in by.values())
    table = open_table()
    table.add_column("rank", justify="right", no_wrap=True)
    for rank in columns:
        table.add_column(f"for {rank}", justify="right", no_wrap=True)
    table.add_column("waited", justify="right", no_wrap=True)
    for rank in sorted(ranks, key=int):
        cells = [waits[rank].get(c, 0.0) for c in columns]
        shaded = [_shade(seconds, most) for seconds in cells]
        table.add_row(str(rank), *shaded, format_duration(sum(waits[rank].values()), 3))
    return table


def _shade(seconds: float, most: float) -> str:
    if seconds <= 0:
        return "-"
    level = min(len(_SHADES) - 1, 1 + int(seconds / most * (len(_SHADES) - 1.001))) if most > 0 else 1
    return f"{format_duration(seconds, 2)} {_SHADES[level] * 2}"
