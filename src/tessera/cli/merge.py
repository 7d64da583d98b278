"""`tessera merge`."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import ArgumentError
from .options import FILE, ExistingPath


@click.command("merge")
@click.argument("paths", nargs=-1, required=True, type=ExistingPath(folder=True))
@click.option("-o", "--output", default="merged.tessera", show_default=True, type=FILE, help="The run file to write.")
@click.option("--force", is_flag=True, help="Overwrite the output if it already exists.")
@click.option("--json", "as_json", is_flag=True, help="Print clocks and collectives as JSON.")
def command(paths: tuple[Path, ...], output: Path, force: bool, as_json: bool) -> None:
    """Merge the runs of several ranks into one, on one clock.

    \b
    Example:
      tessera merge rank0.tessera rank1.tessera -o merged.tessera

    PATHS are run files or Kineto traces (.json, .json.gz), one for each rank, or a folder of them. The clocks are
    aligned by timestamps that the ranks exchanged while they ran, or by their collectives, which end at the same time.
    Prints each host's clock offset, the rank that the others wait for, and how much communication overlaps compute.
    """
    from ..profile.ranks import merge

    if output.exists() and not force:
        raise ArgumentError(f"{output} already exists", fix="--force overwrites it, -o writes another file")
    merged = merge(paths)
    merged.write(output, replace=force).close()
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode({"output": str(output), **merged.to_dict()}, enc_hook=str).decode())
        return
    from ..report.console import Console
    from ..report.merge import print_merge

    print_merge(merged, output, Console(highlight=False))
