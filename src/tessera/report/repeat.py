"""What `tessera measure --runs` prints: one row for each command, the verdict, and what to doubt."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ..config import find_cost
from ..monitor.repeat import RepeatedCommand, RepeatedRuns
from ..units import format_duration, format_duration_error, format_energy, format_energy_error, format_error
from .console import TableColumn, WidthDependent, build_table, dropped_note, fit_columns, label_table
from .measure import describe_exit


def renderable(result: RepeatedRuns) -> RenderableType:
    """Return one screen."""
    commands = result.commands
    parts: list[RenderableType] = []
    if commands:
        columns = _columns(commands)
        parts.append(WidthDependent(lambda width: _table(columns, width)))
        count = f"{len(commands[0].reports)} runs each" if len(commands) > 1 else f"{len(commands[0].reports)} runs"
        order = ", in turns" if len(commands) > 1 else ""
        warm = f" after {result.warmup} to warm up" if result.warmup else ""
        source = f"{commands[0].reports[0].total.source}, ± is the half-width of a 90% interval"
        parts.append(Text(f"{count}{order}{warm}; {source}", style="dim"))
    parts.append(_details(result))
    return Group(*parts)


def _table(columns: Sequence[TableColumn], width: int) -> RenderableType:
    """Return the columns that fit.

    If the commands do not fit, they have lines of their own, which say what A and B are.
    """
    labels, commands = columns[0], columns[-1]
    fitting, dropped = fit_columns(columns, width, gap=2)
    parts: list[RenderableType] = [build_table(fitting, gap=2)]
    if commands not in fitting:
        dropped = ", ".join(c.heading for c in columns[:-1] if c not in fitting)
        lines = label_table()
        for label, command in zip(labels.cells, commands.cells, strict=True):
            lines.add_row(label, command)
        parts.append(lines)
    return Group(*parts, *([dropped_note(dropped)] if dropped else []))


def _columns(commands: Sequence[RepeatedCommand]) -> list[TableColumn]:
    energy = [format_energy_error(c.energy_j.value, c.energy_j.error) for c in commands]
    time = [format_duration_error(c.time_s.value, c.time_s.error) for c in commands]
    power = [format_error(c.power_w.value, c.power_w.error, "W") for c in commands]
    joules = [f"{format_energy(c.joules.min(), 3)} … {format_energy(c.joules.max(), 3)}" for c in commands]
    seconds = [f"{format_duration(c.seconds.min(), 3)} … {format_duration(c.seconds.max(), 3)}" for c in commands]
    work = [
        TableColumn(
            heading=f"per {w.unit}",
            cells=[_per_unit(c, w.amount) for c in commands],
            right=True,
            drop=1,
        )
        for w in commands[0].reports[0].work
    ]
    return [
        TableColumn(heading="", cells=[c.label for c in commands], style="bold"),
        TableColumn(heading="energy", cells=energy, right=True),
        TableColumn(heading="lowest … highest", cells=joules, right=True, drop=3),
        *work,
        TableColumn(heading="time", cells=time, right=True),
        TableColumn(heading="fastest … slowest", cells=seconds, right=True, drop=4),
        TableColumn(heading="power", cells=power, right=True, drop=2),
        TableColumn(heading="command", cells=[c.name for c in commands], drop=5),
    ]


def _per_unit(command: RepeatedCommand, amount: float) -> str:
    each = command.energy_j.times(1 / amount)
    return format_energy_error(each.value, each.error)


def _details(result: RepeatedRuns) -> RenderableType:
    table = label_table()
    for comparison in result.comparisons:
        style = "bold green" if comparison.significant and comparison.energy_share.value < 0 else "bold"
        table.add_row("verdict", Text(comparison.text, style=style))
    for c in result.commands:
        if cost := find_cost(c.energy_j.value, c.energy_j.error):
            table.add_row("cost", f"{c.label}, a run: {cost.text}")
        for far in c.outliers:
            spent = f"{format_energy(far.energy_j, 3)} in {format_duration(far.time_s, 3)}"
            table.add_row("outlier", Text(f"{c.label}, run {far.run}: {spent}; {far.cause}", style="yellow"))
        for note in c.notes:
            table.add_row("note", Text(f"{c.label} {note}", style="yellow"))
    if result.failed is not None:
        ended = f"{result.failed} {describe_exit(result.returncode)}; no run was started after it"
        table.add_row("command", Text(ended, style="red"))
    return table
