"""`tessera report RUN`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import ArgumentError, TesseraError
from .entry import save_page
from .missing import instead, missing
from .plain import show

if TYPE_CHECKING:
    from ..analyze.answer import Answer
    from ..analyze.correlate import Correlation
    from ..attribute.table import EnergyTable
    from ..profile.runfile import RunFile
    from ..timeline.columns import Timeline

ENDINGS = (".tessera",)
RECORD = "record one: tessera run SCRIPT"
GZIP = b"\x1f\x8b"
SQLITE = b"SQLite format 3"
"""How a run file begins: it is a database of SQLite's."""
HEAD_BYTES = 4 << 20
"""Where `traceEvents` begins, at the latest: Kineto writes the devices and process groups of a job before it."""
VIEWS = ("ops", "kernels", "regions", "modules", "steps")


@click.command("report")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write the page here; else beside RUN.")
@click.option("--by", type=click.Choice(VIEWS), help="Show one table only.")
@click.option("--top", type=click.IntRange(1), help="How many rows of each table to print.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON; writes a page only with --html.")
@click.option("--open", "open_page", is_flag=True, help="Open the page in the browser.")
def command(run: Path, html: Path | None, by: str | None, top: int | None, as_json: bool, open_page: bool) -> int:
    """What a recorded run cost, where its joules went, and one thing to do about it.

    \b
    Examples:
      tessera report runs/train.tessera
      tessera report runs/train.tessera --by kernels --top 30
      tessera report runs/train.tessera --json | jq .answer

    Prints one screen and writes one HTML page that needs no network: runs/train.html. A run that was killed can be
    read up to half a second before its end.
    """
    from ..analyze.answer import answer
    from ..profile.recorded import timeline_of
    from ..profile.runfile import RunFile
    from ..profile.untraced import table_of

    check_run(run)
    with RunFile(run) as file:
        timeline = timeline_of(file)
        table = table_of(file, timeline)
        said = answer(file, table, timeline)
        page = html or (None if as_json else run.with_suffix(".html"))
        written = write_page(page, file, table, timeline, said) if page else None
        if as_json:
            _print_json(file, table, said)
        else:
            print_answer(file, table, said, written, by, top)
    if open_page and written:
        import webbrowser

        webbrowser.open(written.absolute().as_uri())
    return 0 if written or not page else 1


def check_run(run: Path) -> None:
    """Say what to do where there is no such run, or where it is something else."""
    if not run.is_file():
        raise missing(run, ENDINGS, RECORD)
    with run.open("rb") as file:
        packed = file.read(2) == GZIP
    start = _start(run, packed)
    if not start or start.startswith(SQLITE):
        return  # RunFile says whose it is, and whether it is whole
    if not start.startswith((b"{", b"[")):
        script = f"record one first: tessera run {run}" if run.suffix == ".py" else None
        raise ArgumentError(
            f"{run} is no run file",
            why="a run (.tessera) is what `tessera run` and profile.session write",
            fix=script or _others(run),
        )
    if b'"traceEvents"' in start or (start.startswith(b"[") and b'"ph"' in start):
        raise ArgumentError(
            f"{run} is no run, but a trace of Kineto (torch.profiler)",
            why="a run (.tessera) holds power beside the trace",
            fix=f"tessera analyze breakdown {run}, or with a power log: tessera attribute {run} --power LOG.csv",
        )
    raise ArgumentError(
        f"{run} is no run, but JSON",
        why="a run (.tessera) is what `tessera run` and profile.session write; `tessera diff` reads reports in JSON",
        fix=_others(run),
    )


def _start(path: Path, packed: bool) -> bytes:
    """The beginning of a file, unpacked; nothing where it cannot be."""
    import gzip
    import zlib

    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            return file.read(HEAD_BYTES).lstrip()
    except (OSError, EOFError, zlib.error):
        return b""


def _others(run: Path) -> str:
    return instead(run, ENDINGS) or RECORD


def write_page(page: Path, run: RunFile, table: EnergyTable, timeline: Timeline, said: Answer) -> Path | None:
    """The path written; None, with a message, where it could not be: the screen is worth having all the same."""
    from ..report.run_html import page as rendered

    text = rendered(run, table, _correlation(run, timeline), timeline=timeline, found=said)
    return page if save_page(page, text) else None


def _correlation(run: RunFile, timeline: Timeline) -> Correlation | None:
    """Spikes and their checklist, where there are kernels and power to tie together."""
    from ..analyze.correlate import correlate

    if not len(timeline.device_rows) or not run.domains:
        return None
    try:
        return correlate(timeline, run.power(), telemetry=run.telemetry())
    except TesseraError:  # the page says nothing of spikes then; the answer does not depend on it
        return None


def _print_json(run: RunFile, table: EnergyTable, said: Answer) -> None:
    import msgspec

    about = {"path": str(run.path), "run": said.whole.to_json(), "crashed": run.crashed}
    tracing = said.tracing.to_json() if said.tracing is not None else None
    data = {**about, **table.to_json(), "tracing": tracing, "answer": said.to_json()}
    click.echo(msgspec.json.encode(data).decode())


def print_answer(
    run: RunFile, table: EnergyTable, said: Answer, page: Path | None, by: str | None = None, top: int | None = None,
    *, stderr: bool = False,
) -> None:  # fmt: skip
    """One screen; on standard error beside a program's own output."""
    from ..report.run import text
    from ..report.screen import Console

    out = Console(highlight=False, stderr=stderr)
    shown = text(run, table, html=page, width=out.width, by=by, top=top, found=said)
    show(out, shown, err=stderr)
