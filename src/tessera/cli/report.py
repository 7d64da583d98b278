"""`tessera report RUN`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ArgumentError
from .attribute import POWER_HELP
from .options import FILE, ExistingPath, WordChoice, missing_file, print_json, save_page, suggest_files

if TYPE_CHECKING:
    from ..analyze.answer import Answer
    from ..recording import Recording

SUFFIXES = (".tessera",)
HOW_TO_RECORD = "record one: tessera run SCRIPT"
WHAT_A_RUN_IS = "`tessera run` and profile.session write run files (.tessera)"
OF_RANKS = ("*rank*.tessera", "*rank*.json*", "*.pt.trace.json*")
"""Names of the files of a job's ranks, written by Tessera and by torch.profiler."""
SQLITE = b"SQLite format 3"
"""How a run file begins: it is an SQLite database."""
VIEWS = ("ops", "kernels", "regions", "modules", "steps", "functions", "lines")


@click.command("report")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--power", metavar="FILE", type=ExistingPath(), help=POWER_HELP)
@click.option("--html", type=FILE, help="Where to write the page. [default: next to RUN]")
@click.option("--by", type=WordChoice(VIEWS), help="Show only this table.")
@click.option("--top", type=click.IntRange(1), help="How many rows of each table to print.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON; writes a page only with --html.")
@click.option("--open", "open_page", is_flag=True, help="Open the page in the browser.")
def command(
    run: Path, power: Path | None, html: Path | None, by: str | None, top: int | None, as_json: bool, open_page: bool
) -> int:
    """Show what a recorded run cost, where its joules went, and what to change first.

    \b
    Examples:
      tessera report runs/train.tessera
      tessera report runs/train.tessera --by kernels --top 30
      tessera report runs/train.tessera --json | jq .answer
      tessera report runs/train/
      tessera report trace.json.gz --power power.csv

    RUN is a run file, the folder of a job with the file of each rank, or a trace: of torch.profiler (.json, .json.gz),
    rocprofv3 (.json, kernel_trace.csv, .pftrace) or JAX (.xplane.pb).
    Without power a trace is shown in seconds. Prints one screen and writes one HTML page that needs no network:
    runs/train.html. The file of a killed run is readable up to half a second before its end.
    """
    from ..analyze.answer import answer
    from ..analyze.run_list import remember_joules
    from ..profile.open_recording import open_recording

    check_run(run)
    with open_recording(run, power=power, frames=by == "functions") as recording:
        page = html or (None if as_json else find_page(run))
        by_time = by == "functions" or recording.find_energy() is None  # Python frames have no joules of their own
        if recording.facts.kind == "trace" and by_time:
            return _report_time(recording, page, by, top, as_json, open_page)
        result = answer(recording)
        remember_joules(recording, result)
        written = write_page(page, recording, result) if page else None
        if as_json:
            _print_json(recording, result)
        else:
            print_answer(recording, result, written, by, top)
    return _end(written, page, open_page)


def _end(written: Path | None, page: Path | None, open_page: bool) -> int:
    if open_page and written:
        import webbrowser

        webbrowser.open(written.absolute().as_uri())
    return 0 if written or not page else 1


def find_page(run: Path) -> Path:
    """Return the path of a run's page: beside the run."""
    if run.is_dir():
        return run.with_name(f"{run.name}.html")
    name = run.name
    for end in (".gz", ".json", ".tessera", ".pb", ".xplane", ".pftrace", "_kernel_trace.csv"):
        name = name.removesuffix(end)
    return run.with_name(f"{name}.html")


def _report_time(
    recording: Recording, page: Path | None, by: str | None, top: int | None, as_json: bool, open_page: bool
) -> int:
    """Return a recording without power: seconds instead of joules."""
    from ..analyze.time_answer import VIEWS as OF_TIME
    from ..analyze.time_answer import answer_by_time
    from ..report.console import Console
    from ..report.time_html import time_page
    from ..report.time_text import time_text

    if by is not None and by not in OF_TIME:
        raise ArgumentError(
            f"{recording.facts.name} has no table of {by}",
            why="it has no power: its tables are of seconds",
            fix=f"--by {', '.join(OF_TIME)}; or give a power log with --power",
        )
    result = answer_by_time(recording)
    if by == "functions" and not result.functions:
        raise ArgumentError(
            f"{recording.facts.name} has no functions of your code",
            why="the trace has no Python frames, or none of them launched anything",
            fix="record it with torch.profiler.profile(..., with_stack=True)",
        )
    written = page if page and save_page(page, time_page(recording, result)) else None
    if as_json:
        print_json({"path": str(recording.facts.path), **result.to_dict()})
        return _end(written, page, open_page)
    console = Console(highlight=False)
    console.show(time_text(result, width=console.width, by=by, top=top))
    if written is not None:
        click.echo(f"page: {written}")
    return _end(written, page, open_page)


def check_run(run: Path) -> None:
    """Raise an error that says what to do if there is no such file, or it is not a run file."""
    if run.is_dir() and _has_ranks(run):
        return  # of a job: reading them says what is wrong
    if not run.is_file():
        raise missing_file(run, SUFFIXES, HOW_TO_RECORD)
    from ..timeline.open_trace import is_trace
    from ..timeline.source import read_start

    start = read_start(run, 256).lstrip()
    if not start or start.startswith(SQLITE):
        return  # RunFile checks whether it is complete, and ours
    if is_trace(run):
        return
    runs = suggest_files(run, SUFFIXES) or HOW_TO_RECORD
    if not start.startswith((b"{", b"[")):
        fix = f"record a run first: tessera run {run}" if run.suffix == ".py" else runs
        raise ArgumentError(f"{run} is not a Tessera run file", why=WHAT_A_RUN_IS, fix=fix)
    why = f"{WHAT_A_RUN_IS}; `tessera diff` reads reports in JSON"
    raise ArgumentError(f"{run} is JSON, not a Tessera run file", why=why, fix=runs)


def _has_ranks(folder: Path) -> bool:
    """Return whether a folder has the files of ranks; where it has no files of its own, its subfolders may."""
    below = "" if any(f.is_file() for f in folder.iterdir()) else "*/"
    return any(any(folder.glob(f"{below}{name}")) for name in OF_RANKS)


def write_page(page: Path, recording: Recording, result: Answer) -> Path | None:
    """Return the path written; None, after an error message, if it could not be written."""
    from ..report.run_html import page as render

    text = render(recording, result=result)
    return page if save_page(page, text) else None


def _print_json(recording: Recording, result: Answer) -> None:
    from ..analyze.answer import find_rows

    table, facts = find_rows(recording, recording.energy()), recording.facts
    about = {"path": str(facts.path), "run": result.whole.to_dict(), "crashed": facts.crashed}
    tracing = result.tracing.to_dict() if result.tracing is not None else None
    print_json({**about, **table.to_json(), "tracing": tracing, "answer": result.to_dict()})


def print_answer(
    recording: Recording,
    result: Answer,
    page: Path | None,
    by: str | None = None,
    top: int | None = None,
    *,
    stderr: bool = False,
) -> None:
    """Print one screen, on standard error if a program's own output is on standard output."""
    from ..report.console import Console
    from ..report.run import text

    console = Console(highlight=False, stderr=stderr)
    console.show(text(recording, html=page, width=console.width, by=by, top=top, result=result))
