"""`tessera attribute`: joules by kernel, operator and region from a trace and a power log of any tool."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from ..attribute.table import VIEWS
from .options import ExistingPath, WordChoice, print_json

POWER_HELP = (
    "Power log of the same time: power_trace().to_csv, the CSV of nvidia-smi, amd-smi or xpu-smi, or columns "
    "timestamp, power_w and, of several devices, index or domain (gpu0, cpu0)."
)


@click.command("attribute")
@click.argument("trace", type=ExistingPath())
@click.option("--power", required=True, metavar="FILE", type=ExistingPath(), help=POWER_HELP)
@click.option("--by", type=WordChoice(VIEWS), default=None, help="What to list. [default: kernels, or ops on a CPU]")
@click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="How many rows.")
@click.option("--json", "as_json", is_flag=True, help="Print all rows of all views as JSON.")
def command(trace: Path, power: Path, by: str | None, top: int, as_json: bool) -> None:
    """Assign the joules of a power log to the kernels of a Kineto trace, with error bars.

    \b
    Examples:
      tessera attribute trace.json.gz --power power.csv
      tessera attribute trace.json.gz --power smi.csv --by ops --json
    """
    from ..profile.open_recording import load

    table = load(trace, power).energy()
    if as_json:
        print_json(table.to_json())
        return
    from ..report.console import Console
    from ..report.energy import first_view, renderable

    console = Console(highlight=False)
    console.print(renderable(table, by=by, top=top, width=console.width))
    others = [v for v in VIEWS if table.rows(v) and v != (by or first_view(table))]
    if others:
        following = shlex.join(["tessera", "attribute", str(trace), "--power", str(power), "--by", others[0]])
        console.print(f"next  {following}", style="dim", soft_wrap=True)
