"""`tessera merge` in the terminal: the clock of each rank, and how long ranks wait for each other."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from ..profile.ranks.merge import MergedRecording
from ..units import format_duration
from .console import Console, open_table


def print_merge(merged: MergedRecording, output: Path, console: Console) -> None:
    """Print the result, the clocks, the collectives, the notes."""
    headline = f"{len(merged.files)} ranks, {len(merged.timeline)} rows -> {output}"
    console.print(Text(headline, style="bold"), soft_wrap=True)
    console.print(_clocks(merged))
    for line in _collectives(merged):
        console.print(Text(line), soft_wrap=True)
    for note in merged.notes:
        console.print(Text(note, style="yellow"), soft_wrap=True)


def _clocks(merged: MergedRecording) -> Table:
    table = open_table("rank", "host", "rows", "clock offset, us", "drift, ppm", "± us", "from")
    for source, offset in zip(merged.files, merged.offsets, strict=True):
        error = "?" if offset.error_ns is None else f"{offset.error_ns * 1e-3:.1f}"
        aligned_by = f"{offset.matched} collectives" if offset.matched else offset.source
        cells = (f"{offset.offset_ns * 1e-3:+.1f}", f"{offset.drift_ppm:+.3g}", error, aligned_by)
        table.add_row(str(source.rank), source.host or "-", str(len(source.timeline)), *cells)
    return table


def _collectives(merged: MergedRecording) -> list[str]:
    totals = merged.collectives
    if not totals["count"]:
        return ["no collective was recorded by two ranks"]
    lines = [
        f"{totals['count']} collectives: median skew {format_duration(totals['median_skew_s'])},"
        f" worst {format_duration(totals['worst_skew_s'])}; {format_duration(totals['move_s'])} transferring,"
        f" {format_duration(totals['wait_s'])} waiting (all ranks together)"
    ]
    if totals["overlap_pct"] is not None:
        lines.append(f"{totals['overlap_pct']:.0f}% of the transfer time overlaps compute")
    late = sorted(totals["stragglers"].items(), key=lambda kv: -kv[1]["wait_s"])
    for rank, cost in late[:3]:
        wait = format_duration(cost["wait_s"])
        lines.append(f"rank {rank} is last {cost['times']} times: the other ranks wait {wait} for it")
    if not late:
        lines.append("no straggler: the ranks start closer together than the error of their clocks")
    return lines
