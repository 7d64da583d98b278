"""What `tessera runs` prints: one row for each run, newest first."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ..analyze.run_list import ListedRun
from ..units import format_bytes, format_duration, format_energy_error
from .console import FittedTable, TableColumn, next_line

_STYLES = {"failed": "red", "killed": "yellow", "unreadable": "yellow", "running": "green"}


def renderable(runs: Sequence[ListedRun], *, next_command: str | None) -> RenderableType:
    """Return a table, and what it does not show."""
    parts: list[RenderableType] = [FittedTable(_columns(runs), styles=[_STYLES.get(r.state, "") for r in runs])]
    if any(r.joules is not None and r.joules.basis != "measured" for r in runs):
        parts.append(Text("~ modelled, not measured; ± is the half-width of a 90% interval", style="dim"))
    parts += [Text(f"{r.path.name}: {r.problem}", style="yellow") for r in runs if r.problem]
    if next_command:
        parts.append(next_line(next_command))
    return Group(*parts)


def _columns(runs: Sequence[ListedRun]) -> list[TableColumn]:
    return [
        TableColumn(heading="started", cells=[format_date(r.start_ns) for r in runs]),
        TableColumn(heading="run", cells=[r.path.name for r in runs]),
        TableColumn(heading="energy", cells=[_energy(r) for r in runs], right=True),
        TableColumn(heading="time", cells=[_time(r) for r in runs], right=True, drop=1),
        TableColumn(heading="per step", cells=[_per_step(r) for r in runs], right=True, drop=2),
        TableColumn(heading="state", cells=[r.state for r in runs]),
        TableColumn(heading="size", cells=[format_bytes(r.size_bytes, 3) for r in runs], right=True, drop=4),
        TableColumn(heading="host", cells=[r.host for r in runs], drop=5),
        TableColumn(heading="command", cells=[r.command for r in runs], drop=6),
    ]


def format_date(time_ns: int) -> str:
    """Return local time to the minute; "-" if it is not known."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_ns * 1e-9)) if time_ns else "-"


def _energy(run: ListedRun) -> str:
    if run.joules is None or run.joules.energy_j is None:
        return "-"
    mark = "" if run.joules.basis == "measured" else "~"
    return mark + format_energy_error(run.joules.energy_j, run.joules.error_j)


def _per_step(run: ListedRun) -> str:
    if run.joules is None or run.joules.step_j is None:
        return "-"
    return format_energy_error(run.joules.step_j, run.joules.step_error_j)


def _time(run: ListedRun) -> str:
    return "-" if run.time_s is None else format_duration(run.time_s, 3)
