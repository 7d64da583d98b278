"""Collectives: sums by kind, and a map of which rank waits for which, in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..units import format_bytes, format_duration, format_si
from .console import open_table

MOST_RANKS = 16
"""Ranks of a map in a terminal: those that waited longest. The page and JSON have all."""
_SHADES = " ░▒▓█"


def describe_collectives(facts: Mapping[str, Any]) -> list[RenderableType]:
    """Return one line for each kind, and who waited for whom if several ranks recorded them."""
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
    """Return a row for each rank that waited, a column for each it waited for, shaded by the seconds."""
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


CAPTION_WIDTH = 330
"""Pixels that the words below a map need, however few cells it has."""


def waits_section(waits: Mapping[int, Mapping[int, float]]) -> str:
    """Return the map for the page: all ranks, one square each, darker the longer the row's rank waited."""
    if not waits:
        return ""
    late = sorted({rank for by in waits.values() for rank in by}, key=int)
    most = max(seconds for by in waits.values() for seconds in by.values()) or 1.0
    wide, high = (34, 20) if len(waits) <= MOST_RANKS else (16, 10)
    left, out = 64, []
    for y, rank in enumerate(sorted(waits, key=int)):
        out.append(f"<text x='{left - 6}' y='{y * high + high - 3}' text-anchor='end'>rank {rank}</text>")
        for x, other in enumerate(late):
            seconds = waits[rank].get(other, 0.0)
            if seconds > 0:
                said = f"rank {rank} waited {format_duration(seconds, 3)} for rank {other}"
                out.append(
                    f"<g data-n='{escape(said)}' data-t=''><rect x='{left + x * wide}' y='{y * high}' "
                    f"width='{wide - 1}' height='{high - 1}' "
                    f"style='fill:var(--power);fill-opacity:{0.12 + 0.88 * seconds / most:.2f}'/></g>"
                )
    below = len(waits) * high
    every = max(1, -(-len(late) * 22 // max(len(late) * wide, 1)))
    for x, other in enumerate(late):
        if x % every == 0:
            out.append(f"<text x='{left + x * wide + 2}' y='{below + 13}'>{other}</text>")
    width, height = max(left + len(late) * wide + 40, CAPTION_WIDTH), below + 34
    out.append(f"<text x='{left}' y='{height - 4}'>rank that came last</text>")
    total = sum(seconds for by in waits.values() for seconds in by.values())
    label = f"Who waited for whom: {format_duration(total, 3)} in all; the table of ranks has the sums"
    return (
        f"<h3>Who waited for whom</h3><figure class='plot scroll'><svg class='heat' viewBox='0 0 {width} {height}' "
        f"role='group' tabindex='0' style='width:{width}px' aria-label='{escape(label)}'>{''.join(out)}</svg></figure>"
    )
