"""`tessera predict` in the terminal: one prediction on one screen, a sweep as a table, two reports side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..advice import Advice
from ..estimate.search import Sweep, SweepRow
from ..schema import DiffRow, EnergyDiff, EnergyReport
from ..units import format_bytes, format_duration, format_energy
from .narrow import Column, Fitted, Pieces, fitting, table_of
from .predict_parts import (
    bound_text,
    chip_name,
    components,
    consumers,
    memory_text,
    origin,
    power_text,
    row_name,
    setting,
    ties,
    time_text,
)
from .screen import colourless
from .text import answer, energy_text, plain_table

BAR = 40
_NAME, _HOW = 24, 45  # characters that a subgraph's name and an opportunity's action are given at least
_EIGHTHS = " ▏▎▍▌▋▊▉"


def report_json(report: EnergyReport, opportunities: Sequence[Advice] | None = None) -> str:
    """A prediction as JSON: the summary people read, the report it is made of, and what would save joules."""
    import msgspec

    names = (
        "total_energy_j", "compute_energy_j", "memory_energy_j", "static_energy_j", "average_power_w", "peak_power_w",
        "total_latency_s", "average_efficiency", "average_utilization", "wasted_energy_j",
    )  # fmt: skip
    of = report.prediction
    plain = dataclasses.replace(report, prediction=dataclasses.replace(of, again=None) if of else None)
    found: dict[str, Any] = {"summary": {name: getattr(report, name) for name in names}, "report": plain}
    if opportunities is not None:
        found["opportunities"] = list(opportunities)
    return msgspec.json.encode(found).decode()


def text(report: EnergyReport, *, width: int = 100) -> str:
    """The screen of a report as plain text."""
    shown = answer(report, advice=None, next_command=None) if report.prediction is None else prediction(report)
    return colourless(width).text(shown)


# -- one prediction -------------------------------------------------------------------------------------------------


def prediction(
    report: EnergyReport,
    *,
    top: int = 10,
    opportunities: Sequence[Advice] | None = None,
    next_command: str | None = None,
) -> RenderableType:
    """One screen: the answer first, then where the joules go, what would save some, and what to type next."""
    parts: list[RenderableType] = [_title(report), _headline(report), _facts(report), Text("")]
    parts += [_bar(name, joules, share) for name, joules, share in components(report)]
    if top and report.descriptors:
        parts += [Text(""), _consumers(report, top)]
    if opportunities is not None:
        parts += [Text(""), *_opportunities(opportunities)]
    parts.append(_ending(report))
    return Group(*parts, *_following(next_command))


def _title(report: EnergyReport) -> Pieces:
    of = report.prediction
    where = f" on {chip_name(of.device)}" if of is not None else ""
    return Pieces(Text(report.name + where, style="bold"), Text(setting(report), style="dim"))


def _headline(report: EnergyReport) -> Pieces:
    of = report.prediction
    latency = time_text(report.total_latency_s, of.latency_error_s if of else None)
    figures = [latency, energy_text(report.total_energy_j, report.total.error_j), ", ".join(power_text(report))]
    return Pieces(*(Text(figure, style="bold") for figure in figures if figure), Text("90% intervals", style="dim"))


def _facts(report: EnergyReport) -> Table:
    of = report.prediction
    table = plain_table()
    for unit, joules, error in report.per_work():
        amount = next(w.amount for w in report.work if w.unit == unit)
        rate = amount / report.total_latency_s if report.total_latency_s > 0 else 0.0
        table.add_row(f"per {unit}", Pieces(energy_text(joules, error), f"{_count(rate)} {unit}s/s"))
    if of is None:
        return table
    if of.peak_memory_bytes is not None:
        table.add_row("memory", memory_text(of.peak_memory_bytes, of.memory_capacity_bytes))
    table.add_row("bound by", bound_text(report))
    return table


def _bar(name: str, joules: float, share: float) -> Text:
    label = f"{name:<7} ({share:.1%}):"
    line = Text(f"{label:<17}")
    line.append(blocks(share, BAR), style={"Compute": "green", "Memory": "cyan", "Static": "yellow"}.get(name, ""))
    return line.append(f" {format_energy(joules, 3)}", style="dim")


def blocks(share: float, width: int) -> str:
    """A bar of block characters, to an eighth of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _consumers(report: EnergyReport, top: int) -> Fitted:
    found = consumers(report, top)
    names = [c.name if c.count == 1 else f"{c.name} ×{c.count}" for c in found]
    number = Column(heading="", cells=[f"{i}." for i in range(1, len(found) + 1)], right=True)
    numbers = [
        Column(heading="kind", cells=[c.kind for c in found], leaves=1, style="dim"),
        Column(heading="time", cells=[format_duration(c.latency_s, 3) for c in found], right=True),
        Column(heading="energy", cells=[format_energy(c.energy_j, 3) for c in found], right=True),
        Column(heading="share", cells=[f"{c.share:.1%}" for c in found], right=True),
    ]

    def draw(width: int) -> Table:
        kept, _ = fitting([number, *numbers], width - _NAME, gap=2)
        room = max(_NAME, width - sum(c.width + 2 for c in kept))
        short = [name if len(name) <= room else f"{name[: room - 1]}…" for name in names]
        return table_of([number, Column(heading="Top consumers", cells=short), *kept[1:]], gap=2)

    return Fitted(draw)


def _opportunities(found: Sequence[Advice]) -> list[RenderableType]:
    if not found:
        return [Text("Opportunities: none of those tried saves 2% or more", style="dim")]
    return [Text("Opportunities", style="bold"), Fitted(lambda width: _saving(found, width))]


def _saving(found: Sequence[Advice], width: int) -> RenderableType:
    """What, how much, and how: side by side where there is room for the how, else below each other."""
    names = [Text(capital(o.kind), style="bold") for o in found]
    saves = [f"saves {energy_text(o.saves_j, o.error_j or 0.0)}/{o.unit} ({o.saves_share:.0%})" for o in found]
    hows = [Text(o.action).append(f"; takes {format_duration(o.time_s or 0.0, 3)}", style="dim") for o in found]
    beside = width - max(name.cell_len for name in names) - max(map(len, saves)) >= _HOW
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for _ in range(4 if beside else 2):
        table.add_column()
    for name, much, how in zip(names, saves, hows, strict=True):
        mark, amount = Text("✓", style="green"), Text(much, style="green")
        table.add_row(mark, *((name, amount, how) if beside else (Group(Pieces(name, amount, between="  "), how),)))
    return table


def capital(text: str) -> str:
    """The text with its first letter large."""
    return text[:1].upper() + text[1:]


def _ending(report: EnergyReport) -> Table:
    table = plain_table()
    for note in report.notes[:3]:
        table.add_row("note", Text(note, style="yellow"))
    sources = "; ".join(f"{name}: {text}" for name, text in origin(report))
    if sources:
        table.add_row("from", Text(sources, style="dim"))
    return table


def _following(command: str | None) -> list[RenderableType]:
    """The next command in one piece, however narrow the terminal: it is there to be copied."""
    if not command:
        return []
    line = Text("next  ", style="dim", no_wrap=True, overflow="ignore")
    return [line.append(command, style="not dim cyan")]


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# -- a sweep --------------------------------------------------------------------------------------------------------


def comparison(found: Sweep, *, next_command: str | None = None, width: int = 100) -> RenderableType:
    """A row a combination, those on the Pareto frontier marked; what cannot be and why; the best choices."""
    front = set(map(id, found.pareto()))
    feasible = len(found.feasible)
    title = Text(found.name, style="bold")
    title.append(
        f"   {found.mode}, {found.launch}; {feasible} of {len(found.rows)} combinations are possible", style="dim"
    )
    parts: list[RenderableType] = [title]
    if feasible:
        parts.append(Fitted(lambda terminal: _rows(found, front, min(width, terminal))))
        parts.append(
            Text("* on the Pareto frontier of energy per sample and latency; ± is a 90% half-width", style="dim")
        )
    impossible = [row for row in found.rows if not row.feasible]
    if impossible:
        parts += [Text(""), Text("not possible", style="yellow")]
        parts += [Text(f"  {name}: {reason}") for name, reason in reasons(impossible)]
    ending = plain_table()
    for label, row in choices(found):
        ending.add_row(label, choice_text(row))
    for sentence in ties(found):
        ending.add_row("note", Text(sentence, style="yellow"))
    return Group(*parts, Text(""), ending, *_following(next_command))


def _rows(found: Sweep, front: set[int], width: int) -> RenderableType:
    rows = found.feasible
    kept, gone = fitting(_columns(rows, front, wide=width >= 100), width)
    table = table_of(kept, styles=["bold" if id(row) in front else "" for row in rows])
    names = ", ".join(c.heading.strip() for c in gone)
    return (
        Group(table, Text(f"no room here for {names}: a wider terminal or --json has them", "dim")) if gone else table
    )


def _columns(rows: Sequence[SweepRow], front: set[int], *, wide: bool) -> list[Column]:
    """The columns of a sweep; those a narrow terminal can do without leave it one by one."""
    formats = [row.precision or "-" for row in rows]
    rates = [_count(row.throughput_per_s or 0.0) for row in rows]
    watts = ["-" if row.average_power_w is None else f"{row.average_power_w:.0f}" for row in rows]
    joules = [energy_text(row.energy_per_sample_j or 0.0, row.error_per_sample_j) for row in rows]
    columns = [
        Column(heading="", cells=["*" if id(row) in front else "" for row in rows]),
        Column(heading="chip", cells=[row.on for row in rows]),
        Column(heading="dtype", cells=formats, leaves=1 if len(set(formats)) == 1 else 0),
        Column(heading="batch", cells=[str(row.batch or "-") for row in rows], right=True),
        Column(heading="latency", cells=[time_text(row.time_s or 0.0, row.error_s) for row in rows], right=True),
        Column(heading="per sample", cells=joules, right=True),
        Column(heading="samples/s", cells=rates, right=True, leaves=3),
        Column(heading="W", cells=watts, right=True, leaves=4),
        Column(heading=" bound by", cells=[f" {row.bound or '-'}" for row in rows], leaves=2),
    ]
    if wide:
        memory = [format_bytes(row.peak_memory_bytes or 0, 3) for row in rows]
        columns.insert(-1, Column(heading="memory", cells=memory, right=True, leaves=5))
    return columns


def reasons(rows: Sequence[SweepRow]) -> list[tuple[str, str]]:
    """(combination, why it cannot be); batches that fail alike share a line."""
    alike: dict[tuple[str, str | None, str], list[SweepRow]] = {}
    for row in rows:
        alike.setdefault((row.on, row.precision, row.reason or ""), []).append(row)
    out = []
    for (device, precision, reason), members in alike.items():
        batches = ", ".join(str(row.batch) for row in members if row.batch)
        parts = (device, precision or "", f"batch {batches}" if batches else "")
        out.append((" ".join(part for part in parts if part), reason))
    return out


def choices(found: Sweep) -> list[tuple[str, SweepRow]]:
    """The rows one would choose: the fewest joules, the shortest, the most samples a second."""
    by = {"least energy": found.best_batch(), "fastest": found.fastest(), "most throughput": found.most_throughput()}
    return [(label, row) for label, row in by.items() if row is not None]


def choice_text(row: SweepRow) -> Pieces:
    """A chosen row in one line, or broken between its figures."""
    joules, latency = row.energy_per_sample_j or 0.0, row.time_s or 0.0
    rate = _count(row.throughput_per_s or 0.0)
    named = f"{row_name(row)}: {format_energy(joules, 3)} per sample"
    return Pieces(named, format_duration(latency, 3), f"{rate} samples/s", between=", ")


# -- two reports ----------------------------------------------------------------------------------------------------


def difference(diff: EnergyDiff, *, top: int = 10) -> RenderableType:
    """What changes from one report to another: the total, the components, the subgraphs that changed most."""
    title = Text(f"{diff.before}  →  {diff.after}", style="bold")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for heading in ("before", "after", "change", "", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in (diff.total, *diff.components, *list(diff.subgraphs)[:top]):
        table.add_row(*_diff_cells(row), style="bold" if row is diff.total else "")
    note = Text("~ the change lies within its 90% interval", style="dim")
    lines: list[RenderableType] = [title, table, note]
    if diff.note:
        lines.append(Text(diff.note, style="yellow"))
    return Group(*lines)


def _diff_cells(row: DiffRow) -> list[RenderableType]:
    share = row.change_j / row.before_j if row.before_j > 0 else None
    style = ("green" if row.change_j < 0 else "red") if row.significant else "dim"
    sign = "+" if row.change_j > 0 else ""
    change = Text(f"{sign}{energy_text(row.change_j, row.error_j)}", style=style)
    percent = "new" if share is None else f"{share:+.0%}"
    mark = "" if row.significant else " ~"
    seconds = f"{format_duration(row.before_s, 3)} → {format_duration(row.after_s, 3)}"
    return [
        Text(row.name), format_energy(row.before_j, 3), format_energy(row.after_j, 3), change,
        Text(percent + mark, style=style), seconds,
    ]  # fmt: skip
