"""A sweep of predictions over chips, precisions and batches: as a table in the terminal, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rich.console import Group, RenderableType
from rich.text import Text

from ..estimate.search import Sweep, SweepRow
from ..units import (
    format_bytes,
    format_duration,
    format_duration_error,
    format_energy,
    format_energy_error,
    format_power,
)
from .console import FittedTable, TableColumn, TextFlow, label_table, next_line, plain_console
from .energy import WIDTH
from .html import capitalize, definitions, note, number_cell, table, tile
from .plots import ParetoPoint, pareto_plot
from .predict import components, format_rate

MAX_TIED = 3
"""Combinations that are named in a tie; the others are counted."""
COMPONENTS = {"compute": "arithmetic", "memory": "moving data", "static": "power the chip draws in any case"}
"""The meaning of a bar's colours."""


def text(sweep: Sweep) -> str:
    """Return the screen as plain text."""
    return plain_console(WIDTH).text(comparison(sweep)).rstrip()


def comparison(sweep: Sweep, *, next_command: str | None = None) -> RenderableType:
    """Return one row per combination, the Pareto frontier marked; impossible ones and why; the best choices."""
    front = set(map(id, sweep.pareto()))
    parts: list[RenderableType] = [Text(sweep.name, style="bold").append(f"   {_about(sweep)}", style="dim")]
    if sweep.feasible:
        styles = ["bold" if id(row) in front else "" for row in sweep.feasible]
        parts.append(FittedTable(_columns(sweep.feasible, front), gap=1, styles=styles))
        legend = "* on the Pareto frontier of energy per sample and latency; ± is a 90% half-width"
        parts.append(Text(legend, style="dim"))
    impossible = reasons(sweep)
    if impossible:
        parts += [Text(""), Text("not possible", style="yellow")]
        parts += [Text(f"  {name}: {reason}") for name, reason in impossible]
    ending = label_table()
    for label, row in choices(sweep):
        energy = f"{row_name(row)}: {format_energy(row.energy_per_sample_j or 0.0, 3)} per sample"
        rate = f"{format_rate(row.throughput_per_s or 0.0)} samples/s"
        ending.add_row(label, TextFlow(energy, format_duration(row.time_s or 0.0, 3), rate, between=", "))
        if cost := row.million_cost:
            ending.add_row("", Text(f"1M samples: {cost.text}", style="dim"))
    for sentence in ties(sweep):
        ending.add_row("note", Text(sentence, style="yellow"))
    return Group(*parts, Text(""), ending, *([next_line(next_command)] if next_command else []))


def _about(sweep: Sweep) -> str:
    return f"{sweep.mode}, {sweep.launch}; {len(sweep.feasible)} of {len(sweep.rows)} combinations are possible"


def _columns(rows: Sequence[SweepRow], front: set[int]) -> list[TableColumn]:
    """Return the columns of a sweep, and the order in which a narrow terminal drops them."""
    formats = [row.precision or "-" for row in rows]
    latency = [format_duration_error(row.time_s or 0.0, row.error_s) for row in rows]
    joules = [format_energy_error(row.energy_per_sample_j or 0.0, row.error_per_sample_j) for row in rows]
    rates = [format_rate(row.throughput_per_s or 0.0) for row in rows]
    memory = [format_bytes(row.peak_memory_bytes or 0, 3) for row in rows]
    watts = ["-" if row.average_power_w is None else f"{row.average_power_w:.0f}" for row in rows]
    return [
        TableColumn(heading="", cells=["*" if id(row) in front else "" for row in rows]),
        TableColumn(heading="chip", cells=[row.on for row in rows]),
        TableColumn(heading="dtype", cells=formats, drop=1 if len(set(formats)) == 1 else 0),
        TableColumn(heading="batch", cells=[str(row.batch or "-") for row in rows], right=True),
        TableColumn(heading="latency", cells=latency, right=True),
        TableColumn(heading="per sample", cells=joules, right=True),
        TableColumn(heading="samples/s", cells=rates, right=True, drop=3),
        TableColumn(heading="W", cells=watts, right=True, drop=4),
        TableColumn(heading="memory", cells=memory, right=True, drop=5),
        TableColumn(heading=" bound by", cells=[f" {row.bound or '-'}" for row in rows], drop=2),
    ]


# -- shared with the page -------------------------------------------------------------------------------------------


def row_name(row: SweepRow) -> str:
    """Return a combination in words: "a100 bf16 batch 8"."""
    parts = (row.on, row.precision or "", f"batch {row.batch}" if row.batch else "")
    return " ".join(part for part in parts if part)


def reasons(sweep: Sweep) -> list[tuple[str, str]]:
    """Return (combination, why it is not possible); batches with the same reason share a line."""
    alike: dict[tuple[str, str | None, str], list[SweepRow]] = {}
    for row in sweep.rows:
        if not row.feasible:
            alike.setdefault((row.on, row.precision, row.reason or ""), []).append(row)
    lines = []
    for (device, precision, reason), members in alike.items():
        batches = ", ".join(str(row.batch) for row in members if row.batch)
        parts = (device, precision or "", f"batch {batches}" if batches else "")
        lines.append((" ".join(part for part in parts if part), reason))
    return lines


def choices(sweep: Sweep) -> list[tuple[str, SweepRow]]:
    """Return the best rows: least energy, lowest latency, most samples per second, labelled if others tie."""
    best = {"least energy": sweep.best_batch(), "fastest": sweep.fastest(), "most throughput": sweep.most_throughput()}
    tied = _tied(sweep)
    return [(f"{label} (tied)" if tied.get(label) else label, row) for label, row in best.items() if row is not None]


def ties(sweep: Sweep) -> list[str]:
    """Return sentences for ties: best combinations that differ by less than their errors, in time and in energy."""
    sentences, ties_of = [], _tied(sweep)
    for label, question in (("fastest", "lowest latency"), ("least energy", "least energy")):
        if tied := ties_of.get(label):
            names = tied[:MAX_TIED]
            names += [f"{len(tied) - MAX_TIED} more"] if len(tied) > MAX_TIED else []
            sentences.append(f"tied for {question} within 90%: {', '.join(names[:-1])} and {names[-1]}")
    return sentences


def _tied(sweep: Sweep) -> dict[str, list[str]]:
    """Return the best and the rows that differ from it by at most the error, as `tessera diff` would say."""
    fastest, least = sweep.fastest(), sweep.best_batch()
    if fastest is None or least is None:
        return {}
    time = [((r.time_s or 0.0) - (fastest.time_s or 0.0), r.difference_error(fastest)[0], r) for r in sweep.feasible]
    least_j = least.energy_per_sample_j or 0.0
    energy = [((r.energy_per_sample_j or 0.0) - least_j, r.difference_error(least)[1], r) for r in sweep.feasible]
    names = {id(row): name for row, name in zip(sweep.feasible, _distinct_names(sweep), strict=True)}
    tied = {}
    for label, best, others in (("fastest", fastest, time), ("least energy", least, energy)):
        alike = sorted((more, names[id(row)]) for more, error, row in others if row is not best and more <= error)
        tied[label] = [names[id(best)], *(name for _, name in alike)] if alike else []
    return tied


def _distinct_names(sweep: Sweep) -> list[str]:
    """Return what distinguishes each possible row from the others: chip, precision, batch, as far as they differ."""
    rows = sweep.feasible
    parts = [(row.on, row.precision or "", f"batch {row.batch}" if row.batch else "") for row in rows]
    differs = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    names = [" ".join(part for part, shown in zip(of, differs, strict=True) if shown and part) for of in parts]
    return [name or row.on for name, row in zip(names, rows, strict=True)]


# -- the page -------------------------------------------------------------------------------------------------------


def sweep_section(sweep: Sweep) -> str:
    """Return the section of a page: the best choices, the plot, the table."""
    front = set(map(id, sweep.pareto()))
    parts = [f"<h2>{escape(sweep.name)}</h2><div class='dim'>{escape(_about(sweep))}</div>", _choice_tiles(sweep)]
    parts += [
        f"<p role='note'>{escape(capitalize(tie))}. They differ by less than their intervals.</p>"
        for tie in ties(sweep)
    ]
    points = [
        _point(row, id(row) in front, name) for row, name in zip(sweep.feasible, _distinct_names(sweep), strict=True)
    ]
    if points:
        parts.append(f"<h3>Latency against energy per sample</h3><div class='scroll'>{pareto_plot(points)}</div>")
    parts.append(_html_table(sweep, front))
    impossible = reasons(sweep)
    if impossible:
        parts.append(f"<h3>Not possible</h3><dl>{definitions(impossible)}</dl>")
    return "".join(parts)


def _choice_tiles(sweep: Sweep) -> str:
    named: dict[int, tuple[SweepRow, list[str]]] = {}
    for label, row in choices(sweep):
        named.setdefault(id(row), (row, []))[1].append(label)
    tiles = []
    for row, labels in named.values():
        energy = f"{format_energy(row.energy_per_sample_j or 0.0, 3)} per sample"
        rate = f"{row.throughput_per_s or 0:,.0f} samples/s"
        detail = f"{', '.join(labels)}: {energy}, {format_duration(row.time_s or 0.0, 3)}, {rate}"
        detail += f", 1M samples: {row.million_cost.text}" if row.million_cost else ""
        tiles.append(tile(row_name(row), detail))
    return f"<div class='tiles wide'>{''.join(tiles)}</div>"


def _point(row: SweepRow, frontier: bool, label: str) -> ParetoPoint:
    joules, latency = row.energy_per_sample_j or 0.0, row.time_s or 0.0
    error_j, error_s = row.error_per_sample_j or 0.0, row.error_s or 0.0
    lines = [
        row_name(row),
        format_duration_error(latency, error_s),
        f"{format_energy_error(joules, error_j)} per sample",
    ]
    lines += [f"{row.throughput_per_s or 0:,.0f} samples/s", format_power(row.average_power_w or 0.0, 3)]
    title = "\n".join(lines)
    return ParetoPoint(latency, joules, error_s, error_j, group=row.on, label=label, title=title, frontier=frontier)


def _html_table(sweep: Sweep, front: set[int]) -> str:
    words = ("", "chip", "precision")
    numbers = ("batch", "latency", "energy/sample", "samples/s", "power", "memory")
    columns = [*((w, False) for w in words), *((n, True) for n in numbers), ("bound by", False), ("energy by", False)]
    rows = "".join(_html_row(row, id(row) in front) for row in sweep.feasible)
    legend = (
        "Highlighted rows are on the Pareto frontier; ± is the half-width of a 90% interval. Click a heading to sort."
    )
    keys = "".join(f"<span><i class='{name}'></i>{name}: {escape(what)}</span>" for name, what in COMPONENTS.items())
    grid = table(columns, rows, sorted_by="")
    return f"<h3>All combinations</h3>{grid}<p class='legend'>{keys}</p>{note(legend)}"


def _html_row(row: SweepRow, frontier: bool) -> str:
    joules, latency, rate = row.energy_per_sample_j, row.time_s, row.throughput_per_s
    cells = [
        f"<td>{'★' if frontier else ''}</td><td>{escape(row.on)}</td><td>{escape(row.precision or '-')}</td>",
        number_cell(str(row.batch or "-"), row.batch),
        number_cell(format_duration_error(latency or 0.0, row.error_s), latency),
        number_cell(format_energy_error(joules or 0.0, row.error_per_sample_j), joules),
        number_cell(f"{rate or 0:,.0f}", rate),
        number_cell(f"{row.average_power_w or 0:.0f} W", row.average_power_w),
        number_cell(format_bytes(row.peak_memory_bytes or 0, 3), row.peak_memory_bytes),
        f"<td>{escape(row.bound or '-')}</td><td>{component_bar(components(row))}</td>",
    ]
    return f"<tr{' class=front' if frontier else ''}>{''.join(cells)}</tr>"


def component_bar(parts: Sequence[tuple[str, float, float]], length_pct: float = 100.0) -> str:
    """Return compute, memory and static energy as one bar."""
    pieces = "".join(
        f"<i class='{name.lower()}' style='width:{length_pct * share:.2f}%' "
        f"title='{name} {share:.1%}, {escape(format_energy(joules, 3))}'></i>"
        for name, joules, share in parts
    )
    return f"<div class='bar'>{pieces}</div>"
