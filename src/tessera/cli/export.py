"""`tessera export RUN.tessera`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ArgumentError
from .options import FILE

if TYPE_CHECKING:
    from ..attribute.table import EnergyTable
    from ..profile.runfile import RunFile


@click.command("export")
@click.argument("run", type=FILE)
@click.option("--chrome", type=FILE, help="Write a Chrome/Perfetto trace (.json, or .json.gz).")
@click.option("--csv", type=FILE, help="Write a summary: a line per kernel, operator, region.")
@click.option("--parquet", type=FILE, help="Write every record to a Parquet file.")
@click.option("--tensorboard", type=click.Path(file_okay=False, path_type=Path), help="Write into this log directory.")
@click.option("--otlp", metavar="URL", help="Send metrics and spans to an OpenTelemetry collector.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(
    run: Path,
    chrome: Path | None,
    csv: Path | None,
    parquet: Path | None,
    tensorboard: Path | None,
    otlp: str | None,
    as_json: bool,
) -> None:
    """Write a recorded run in the formats of other tools; several at once are fine.

    \b
    Examples:
      tessera export runs/train.tessera --chrome trace.json.gz --csv summary.csv
      tessera export runs/train.tessera --otlp http://localhost:4318

    A trace opens in https://ui.perfetto.dev and chrome://tracing.
    """
    from ..profile import export
    from ..profile.runfile import RunFile
    from .report import check_run

    formats = {
        "chrome": (chrome, export.Chrome),
        "csv": (csv, export.Summary),
        "parquet": (parquet, export.Parquet),
        "tensorboard": (tensorboard, export.TensorBoard),
        "otlp": (otlp, export.Otlp),
    }
    exporters = {name: make(target) for name, (target, make) in formats.items() if target is not None}
    if not exporters:
        raise ArgumentError("no output format was given", fix="e.g. tessera export RUN.tessera --chrome trace.json")
    check_run(run)
    with RunFile(run) as source:
        notes = source.notes
        table = _attribute_energy(source, notes)
        written = {name: str(exporter.write(source, table)) for name, exporter in exporters.items()}
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode({"run": str(run), "written": written, "notes": notes}).decode())
        return
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    for name, where in written.items():
        print(f"{name}: {where}")


def _attribute_energy(run: RunFile, notes: list[str]) -> EnergyTable | None:
    """The energy table; None, with a note, for a run whose joules are unknown: it is exported without them."""
    from ..errors import TesseraError
    from ..profile.untraced import table_of

    if not run.domains:
        return None
    timeline = run.timeline()
    try:
        table = table_of(run, timeline)
    except TesseraError as exc:
        notes.append(f"exported without joules: {exc.what}")
        return None
    if timeline.energy_j is not None:
        run.use_energy(timeline.energy_j, timeline.energy_error_j)
    return table
