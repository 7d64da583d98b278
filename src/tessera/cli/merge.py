"""`tessera merge`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

    from ..profile.ranks.merge import Merged


@click.command("merge")
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "-o", "--output", default="merged.tessera", show_default=True, type=click.Path(dir_okay=False, path_type=Path),
    help="The run file to write.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the output if it is there already.")
@click.option("--json", "as_json", is_flag=True, help="Print clocks and collectives as JSON.")
def command(paths: tuple[Path, ...], output: Path, force: bool, as_json: bool) -> None:
    """Merge the runs of several ranks into one, on one clock.

    \b
    Example:
      tessera merge rank0.tessera rank1.tessera -o merged.tessera

    PATHS are run files, Kineto traces (.json, .json.gz), one for each rank, or a folder of them. Clocks are aligned by
    what the ranks exchanged while they ran, or by their collectives, which end together. Says how far each host's
    clock was off, which rank the others wait for, and how much communication is hidden behind compute.
    """
    from ..profile.ranks import merge

    merged = merge(paths)
    merged.write(output, replace=force).close()
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode({"output": str(output), **merged.to_json()}, enc_hook=str).decode())
        return
    from rich.text import Text

    from ..report.screen import Console

    console = Console(highlight=False)
    console.print(Text(_headline(merged, output), style="bold"), soft_wrap=True)
    console.print(_clocks(merged))
    for line in _collectives(merged):
        console.print(Text(line), soft_wrap=True)
    for note in merged.notes:
        console.print(Text(note, style="yellow"), soft_wrap=True)


def _headline(merged: Merged, output: Path) -> str:
    return f"{len(merged.sources)} ranks, {len(merged.timeline)} rows -> {output}"


def _clocks(merged: Merged) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("rank", "host", "rows", "clock offset, us", "drift, ppm", "± us", "from"):
        table.add_column(title, justify="left" if title in ("host", "from") else "right")
    for source, offset in zip(merged.sources, merged.offsets, strict=True):
        error = "?" if offset.error_ns is None else f"{offset.error_ns * 1e-3:.1f}"
        source_of = f"{offset.matched} collectives" if offset.matched else offset.source
        cells = (f"{offset.offset_ns * 1e-3:+.1f}", f"{offset.drift_ppm:+.3g}", error, source_of)
        table.add_row(str(source.rank), source.host or "-", str(source.rows), *cells)
    return table


def _collectives(merged: Merged) -> list[str]:
    from ..units import format_duration

    found = merged.collectives
    if not found["count"]:
        return ["no collective was recorded by two ranks"]
    lines = [
        f"{found['count']} collectives: skew {format_duration(found['median_skew_s'])} in the median,"
        f" {format_duration(found['worst_skew_s'])} at worst; {format_duration(found['move_s'])} moving,"
        f" {format_duration(found['wait_s'])} waited by all ranks together"
    ]
    if found["overlap_pct"] is not None:
        lines.append(f"{found['overlap_pct']:.0f}% of the moving is hidden behind compute")
    late = sorted(found["stragglers"].items(), key=lambda kv: -kv[1]["wait_s"])
    for rank, cost in late[:3]:
        lines.append(f"rank {rank} is last {cost['times']} times: the others wait {format_duration(cost['wait_s'])}")
    if not late:
        lines.append("no straggler: the ranks start closer together than their clocks are known")
    return lines
