"""What `tessera run` prints of a run, or of a job of several ranks, when it has ended."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .options import print_json

if TYPE_CHECKING:
    from ..analyze.answer import Answer
    from ..recording import Recording


def report_run(recording: Recording, code: int, html: Path | None, as_json: bool) -> None:
    """Print the answer, on standard error, or as JSON; write the page beside the run unless it is JSON."""
    from ..analyze.answer import answer
    from ..analyze.run_list import remember_joules
    from .report import print_answer, write_page

    result, path = answer(recording), recording.facts.path
    remember_joules(recording, result)
    if recording.facts.crashed:  # the file does not know how its program ended
        result = dataclasses.replace(result, returncode=code)
    page = html or (None if as_json or path is None else path.with_suffix(".html"))
    written = write_page(page, recording, result) if page else None
    print_progress("")
    if as_json:
        _print_json(recording, result, code)
    else:
        print_answer(recording, result, written, stderr=True)


def _print_json(recording: Recording, result: Answer, code: int) -> None:
    from ..analyze.answer import find_rows
    from ..config import find_cost

    sys.stdout.flush()
    facts = recording.facts
    data = {"returncode": code, "path": str(facts.path), "mode": facts.mode, "run": result.whole.to_dict()}
    data |= find_rows(recording, recording.energy()).to_json()
    data["tracing"] = result.tracing.to_dict() if result.tracing is not None else None
    data["cost"] = find_cost(result.whole.energy_j, result.whole.error_j)
    data["collectors"] = dict(facts.collectors)
    data |= {"cpu_use": facts.cpu_use, "scope": result.scope}
    data |= {"children_j": result.children_j, "beside_j": result.beside_j}
    data["answer"] = result.to_dict()  # as `tessera report` has it: `tessera diff` reads the joules of every step there
    if result.job is not None:
        data["job"] = result.job.to_dict()
    if facts.summary:
        data["summary"] = facts.summary
    print_json(data)


def print_progress(text: str) -> None:
    """Print one line on a terminal, overwritten by the next; nothing elsewhere."""
    if sys.stderr.isatty():
        line = f"tessera: {text}".ljust(60) if text else " " * 60 + "\r"
        print(f"\r{line}", file=sys.stderr, end="", flush=True)
