"""`tessera export RUN.tessera`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ArgumentError, TesseraError
from ..output import remove_controls
from .attribute import POWER_HELP
from .options import FILE, ExistingPath, check_writable, print_json

if TYPE_CHECKING:
    from ..recording import Recording


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--power", metavar="FILE", type=ExistingPath(), help=POWER_HELP)
@click.option("--chrome", type=FILE, help="Write a Chrome/Perfetto trace (.json, or .json.gz).")
@click.option("--critical-path", is_flag=True, help="--chrome: draw what the end of the run waited for above it.")
@click.option("--step", help="--critical-path: of this step only: its name, the number in it, or a region.")
@click.option("--csv", type=FILE, help="Write a summary: a line per kernel, operator, region.")
@click.option("--xlsx", type=FILE, help="Write a workbook: a sheet for each analysis.")
@click.option("--parquet", type=FILE, help="Write every record to a Parquet file.")
@click.option("--tensorboard", type=click.Path(file_okay=False, path_type=Path), help="Write into this log directory.")
@click.option("--otlp", metavar="URL", help="Send metrics and spans to an OpenTelemetry collector.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(
    run: Path,
    power: Path | None,
    chrome: Path | None,
    critical_path: bool,
    step: str | None,
    csv: Path | None,
    xlsx: Path | None,
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
      tessera export trace.json.gz --power power.csv --csv summary.csv
      tessera export ranks/ --xlsx report.xlsx
      tessera export trace.json.gz --chrome path.json.gz --critical-path --step 12

    A trace opens in https://ui.perfetto.dev and chrome://tracing.
    """
    from ..profile import export
    from ..profile.open_recording import open_recording
    from .report import check_run

    formats = {
        "chrome": (chrome, export.Chrome),
        "csv": (csv, export.SummaryCsv),
        "parquet": (parquet, export.Parquet),
        "tensorboard": (tensorboard, export.TensorBoard),
        "otlp": (otlp, export.Otlp),
    }
    exporters = {name: make(target) for name, (target, make) in formats.items() if target is not None}
    if not exporters and xlsx is None:
        raise ArgumentError("no output format was given", fix="e.g. tessera export RUN.tessera --chrome trace.json")
    if (critical_path and chrome is None) or (step is not None and not critical_path):
        flag, needs = ("--critical-path", "--chrome FILE") if critical_path else ("--step", "--critical-path")
        raise ArgumentError(f"{flag} needs {needs}", fix="tessera export RUN --chrome path.json.gz --critical-path")
    check_run(run)
    for path in (chrome, csv, xlsx, parquet):
        if path is not None:
            check_writable(path)
    with open_recording(run, power=power) as recording:
        recording.find_energy()
        notes = [str(note) for note in recording.notes]
        if critical_path and chrome is not None:
            from ..analyze.critical_path import find_path

            exporters["chrome"] = export.Chrome(chrome, find_path(recording, step))
        writers: dict[str, Callable[[Recording], object]] = {name: made.write for name, made in exporters.items()}
        if xlsx is not None:
            from ..report.workbook import write_workbook

            writers["xlsx"] = partial(write_workbook, xlsx)
        written = _write_each(writers, recording)
    _print_written(run, written, notes, as_json)


def _write_each(writers: Mapping[str, Callable[[Recording], object]], recording: Recording) -> dict[str, str]:
    """Write one format after the other; the error of one that fails says which formats are already written."""
    written: dict[str, str] = {}
    for name, write in writers.items():
        try:
            written[name] = str(write(recording))
        except TesseraError as exc:
            if len(writers) > 1:
                done = ", ".join(f"{n}: {where}" for n, where in written.items()) or "nothing"
                left = ", ".join(n for n in writers if n not in written)
                exc.why = "; ".join(filter(None, (exc.why, f"written before it: {done}; not written: {left}")))
            raise
    return written


def _print_written(run: Path, written: Mapping[str, str], notes: Sequence[str], as_json: bool) -> None:
    if as_json:
        print_json({"run": str(run), "written": written, "notes": notes})
        return
    from ..report.console import Console

    for note in notes:
        Console(highlight=False, stderr=True).print(f"note: {note}", soft_wrap=True)
    for name, where in written.items():
        print(remove_controls(f"{name}: {where}"))
