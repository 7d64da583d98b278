"""`tessera export RUN.tessera`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ArgumentError
from .plain import say

if TYPE_CHECKING:
    from ..attribute.table import EnergyTable
    from ..profile.export import Exporter
    from ..profile.runfile import RunFile

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("export")
@click.argument("run", type=_FILE)
@click.option("--chrome", type=_FILE, help="Write a Chrome/Perfetto trace (.json, or .json.gz).")
@click.option("--csv", "summary", type=_FILE, help="Write a summary: a line per kernel, operator, region.")
@click.option("--parquet", type=_FILE, help="Write every record to a Parquet file.")
@click.option("--tensorboard", type=click.Path(file_okay=False, path_type=Path), help="Write into this log directory.")
@click.option("--otlp", metavar="URL", help="Send metrics and spans to an OpenTelemetry collector.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(
    run: Path,
    chrome: Path | None,
    summary: Path | None,
    parquet: Path | None,
    tensorboard: Path | None,
    otlp: str | None,
    as_json: bool,
) -> None:
    """Write a recorded run in other tools' forms; several at once are fine.

    \b
    Examples:
      tessera export runs/train.tessera --chrome trace.json.gz --csv summary.csv
      tessera export runs/train.tessera --otlp http://localhost:4318

    A trace opens in https://ui.perfetto.dev and chrome://tracing.
    """
    from ..profile import export

    chosen: dict[str, Exporter] = {}
    if chrome is not None:
        chosen["chrome"] = export.Chrome(chrome)
    if summary is not None:
        chosen["csv"] = export.Summary(summary)
    if parquet is not None:
        chosen["parquet"] = export.Parquet(parquet)
    if tensorboard is not None:
        chosen["tensorboard"] = export.TensorBoard(tensorboard)
    if otlp is not None:
        chosen["otlp"] = export.Otlp(otlp)
    if not chosen:
        raise ArgumentError("nothing to write was given", fix="e.g. tessera export RUN.tessera --chrome trace.json")
    from ..profile.runfile import RunFile
    from .report import check_run

    check_run(run)
    with RunFile(run) as source:
        notes = source.notes
        table = _joules(source, notes)
        done = {form: str(exporter.write(source, table)) for form, exporter in chosen.items()}
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode({"run": str(run), "written": done, "notes": notes}).decode())
        return
    for note in notes:
        say(f"note: {note}", err=True)
    for form, where in done.items():
        say(f"{form}: {where}")


def _joules(run: RunFile, notes: list[str]) -> EnergyTable | None:
    """What the joules were spent on; a run without power is exported all the same."""
    from ..errors import TesseraError
    from ..profile.untraced import table_of

    if not run.domains:
        return None
    timeline = run.timeline()
    try:
        table = table_of(run, timeline)
    except TesseraError as exc:
        notes.append(f"written without joules: {exc.what}")
        return None
    if timeline.energy_j is not None:
        run.use_energy(timeline.energy_j, timeline.energy_error_j)
    return table
