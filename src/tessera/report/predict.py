"""A prediction in the terminal, and the words and groups that its page shares."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..advice import Advice
from ..config import find_cost
from ..device import Device
from ..errors import ArgumentError
from ..estimate.iteration import WINDOW_S
from ..estimate.search import SweepRow
from ..hardware import lookup
from ..schema import EnergyDescriptor, EnergyReport
from ..units import (
    format_bytes,
    format_duration,
    format_duration_error,
    format_energy,
    format_energy_error,
    format_power,
    format_share,
    format_si,
)
from .console import FittedTable, TableColumn, TextFlow, WidthDependent, label_table, next_line, plain_console
from .html import capitalize
from .measure import answer

BAR = 40
# At least this many like subgraphs (the layers of a transformer) share a line; fewer have a line each.
STACK = 4
_NAME, _HOW = 24, 45  # the least width of a subgraph's name and of an opportunity's action
_EIGHTHS = " ▏▎▍▌▋▊▉"
_COLOURS = {"Compute": "green", "Memory": "cyan", "Static": "yellow"}
_INDEX = re.compile(r"(?:(?<=[._])|^)\d+(?=\.)")
_ENERGY = ("total_energy_j", "compute_energy_j", "memory_energy_j", "static_energy_j")
_POWER = ("average_power_w", "peak_power_w", "total_latency_s")
SUMMARY = (*_ENERGY, *_POWER, "average_efficiency", "average_utilization", "wasted_energy_j")
"""The figures of a report that are "summary" in its JSON."""
BOUNDS = {
    "host": "the host: the device waits for launches",
    "dispatch": "dispatch: PyTorch's own work before each operator",
    "compute": "arithmetic",
    "memory": "memory bandwidth",
    "overhead": "overhead: kernels too small to fill the chip",
    "power": "the power limit: the clock is held down",
}
"""The meaning of a prediction's `bound`, in words."""


def report_json(report: EnergyReport, opportunities: Sequence[Advice] | None = None) -> str:
    """Return a prediction as JSON: the summary people read, the full report, and what would save energy."""
    import msgspec

    of = report.prediction
    plain = dataclasses.replace(report, prediction=dataclasses.replace(of, again=None) if of else None)
    data: dict[str, Any] = {"summary": {name: getattr(report, name) for name in SUMMARY}, "report": plain}
    data["cost"] = find_cost(report.total.energy_j, report.total.error_j)
    if opportunities is not None:
        data["opportunities"] = list(opportunities)
    return msgspec.json.encode(data).decode()


def text(report: EnergyReport, *, width: int = 100) -> str:
    """Return the screen of a report as plain text."""
    screen = answer(report, advice=None, next_command=None) if report.prediction is None else prediction(report)
    return plain_console(width).text(screen)


# -- the screen -----------------------------------------------------------------------------------------------------


def prediction(
    report: EnergyReport,
    *,
    top: int = 10,
    opportunities: Sequence[Advice] | None = None,
    next_command: str | None = None,
) -> RenderableType:
    """Return one screen: the answer first, then where the joules go, what would save some, and what to type next."""
    of = report.prediction
    where = f" on {chip_name(of.device)}" if of is not None else ""
    title = TextFlow(Text(report.name + where, style="bold"), Text(describe_setting(report), style="dim"))
    parts: list[RenderableType] = [title, _headline(report), _facts(report), Text("")]
    parts += [_bar(name, joules, share) for name, joules, share in components(report)]
    if top and report.descriptors:
        parts += [Text(""), _consumers(report, top)]
    if opportunities is not None:
        parts += [Text(""), *_opportunities(opportunities)]
    ending = label_table()
    for note in report.notes[:3]:
        ending.add_row("note", Text(note, style="yellow"))
    sources = "; ".join(f"{name}: {source}" for name, source in provenance(report))
    if sources:
        ending.add_row("from", Text(sources, style="dim"))
    return Group(*parts, ending, *([next_line(next_command)] if next_command else []))


def _headline(report: EnergyReport) -> TextFlow:
    of = report.prediction
    latency = format_duration_error(report.total_latency_s, of.error_s if of else None)
    energy = format_energy_error(report.total_energy_j, report.total.error_j)
    figures = [latency, energy, ", ".join(power_text(report))]
    return TextFlow(*(Text(figure, style="bold") for figure in figures if figure), Text("90% intervals", style="dim"))


def _facts(report: EnergyReport) -> Table:
    of = report.prediction
    table = label_table()
    for unit, joules, error in report.per_work():
        amount = next(w.amount for w in report.work if w.unit == unit)
        rate = amount / report.total_latency_s if report.total_latency_s > 0 else 0.0
        table.add_row(f"per {unit}", TextFlow(format_energy_error(joules, error), f"{format_rate(rate)} {unit}s/s"))
    if cost := million_cost(report):
        table.add_row(*cost)
    if of is None:
        return table
    if work := work_text(report):
        table.add_row("model", TextFlow(*work))
    if of.peak_memory_bytes is not None:
        table.add_row("memory", memory_text(of.peak_memory_bytes, of.memory_capacity_bytes))
    table.add_row("bound by", bound_text(report))
    return table


def work_text(report: EnergyReport) -> list[str]:
    """Return parameters, FLOPs and MFU: "8.03 G parameters", "15.1 TFLOP", "MFU 41%"."""
    of = report.prediction
    if of is None:
        return []
    texts = [f"{format_si(of.parameters)} parameters"] if of.parameters else []
    texts += [f"{format_si(of.flops)}FLOP"] if of.flops else []
    return [*texts, f"MFU {format_share(of.mfu)}"] if of.mfu is not None else texts


def million_cost(report: EnergyReport) -> tuple[str, str] | None:
    """Return the cost of a million samples (or runs), by the user's factors: that of one is too small to read."""
    work = next(iter(report.work), None)
    each_j = report.total.energy_j / work.amount if work else report.total.energy_j
    cost = find_cost(1e6 * each_j)
    return None if cost is None else (f"1M {work.unit if work else 'run'}s", cost.text)


def _bar(name: str, joules: float, share: float) -> Text:
    label = f"{name:<7} ({share:.1%}):"
    line = Text(f"{label:<17}").append(blocks(share, BAR), style=_COLOURS.get(name, ""))
    return line.append(f" {format_energy(joules, 3)}", style="dim")


def blocks(share: float, width: int) -> str:
    """Return a bar of block characters, to an eighth of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _consumers(report: EnergyReport, top: int) -> FittedTable:
    rows = consumers(report, top)
    columns = [
        TableColumn(heading="", cells=[f"{i}." for i in range(1, len(rows) + 1)], right=True),
        TableColumn(heading="Top consumers", cells=[c.label for c in rows], least=_NAME),
        TableColumn(heading="kind", cells=[c.kind for c in rows], drop=1, style="dim"),
        TableColumn(heading="time", cells=[format_duration(c.latency_s, 3) for c in rows], right=True),
        TableColumn(heading="energy", cells=[format_energy(c.energy_j, 3) for c in rows], right=True),
        TableColumn(heading="share", cells=[f"{c.share:.1%}" for c in rows], right=True),
    ]
    return FittedTable(columns)


def _opportunities(changes: Sequence[Advice]) -> list[RenderableType]:
    if not changes:
        return [Text("Opportunities: none of those tried saves 2% or more", style="dim")]
    return [Text("Opportunities", style="bold"), WidthDependent(lambda width: _savings(changes, width))]


def _savings(opportunities: Sequence[Advice], width: int) -> RenderableType:
    """Return what, how much, and how: side by side if there is room, else one below the other."""
    names = [Text(capitalize(o.kind), style="bold") for o in opportunities]
    amounts = [saving_text(o) for o in opportunities]
    hows = [Text(o.action).append(f"; takes {format_duration(o.time_s or 0.0, 3)}", style="dim") for o in opportunities]
    beside = width - max(name.cell_len for name in names) - max(map(len, amounts)) >= _HOW
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for _ in range(4 if beside else 2):
        table.add_column()
    for name, amount, how in zip(names, amounts, hows, strict=True):
        mark, saved = Text("✓", style="green"), Text(amount, style="green")
        below = Group(TextFlow(name, saved, between="  "), how)
        table.add_row(mark, *((name, saved, how) if beside else (below,)))
    return table


# -- shared with the page -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """Subgraphs of one name together; in a deep stack, those of one place in every layer."""

    name: str
    kind: str
    count: int
    latency_s: float
    compute_energy_j: float
    memory_energy_j: float
    static_energy_j: float
    share: float

    @property
    def energy_j(self) -> float:
        return self.compute_energy_j + self.memory_energy_j + self.static_energy_j

    @property
    def label(self) -> str:
        """Return the name, and how often it runs."""
        return self.name if self.count == 1 else f"{self.name} ×{self.count}"


def consumers(report: EnergyReport, count: int) -> list[Consumer]:
    """Return the subgraphs that use the most energy, grouped by name."""
    stacks: dict[tuple[str, str, float], list[EnergyDescriptor]] = {}
    for d in report.descriptors:
        stacks.setdefault((_INDEX.sub("*", d.subgraph_name, count=1), d.kind, d.flops), []).append(d)
    groups: dict[tuple[str, str], list[EnergyDescriptor]] = {}
    for (pattern, kind, _), members in stacks.items():
        deep = len({d.subgraph_name for d in members}) >= STACK
        for d in members:
            groups.setdefault((pattern if deep else d.subgraph_name, kind), []).append(d)
    rows = [_sum_members(name, kind, members, report.total_energy_j) for (name, kind), members in groups.items()]
    return sorted(rows, key=lambda c: c.energy_j, reverse=True)[:count]


def _sum_members(name: str, kind: str, members: Sequence[EnergyDescriptor], total_j: float) -> Consumer:
    return Consumer(
        name=name,
        kind=kind,
        count=sum(d.calls for d in members),
        latency_s=sum(d.latency_s for d in members),
        compute_energy_j=sum(d.compute_energy_j for d in members),
        memory_energy_j=sum(d.memory_energy_j for d in members),
        static_energy_j=sum(d.static_energy_j for d in members),
        share=sum(d.total_energy_j for d in members) / total_j if total_j > 0 else 0.0,
    )


def components(report: EnergyReport | SweepRow | Consumer) -> list[tuple[str, float, float]]:
    """Return (name, joules, share of the total) of compute, memory and static energy; [] if they are unknown."""
    names = {"Compute": report.compute_energy_j, "Memory": report.memory_energy_j, "Static": report.static_energy_j}
    known = {name: joules for name, joules in names.items() if joules is not None}
    total = sum(known.values())
    return [(name, joules, joules / total if total > 0 else 0.0) for name, joules in known.items()]


def format_rate(value: float) -> str:
    """Return samples per second."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def saving_text(o: Advice) -> str:
    """Return what an opportunity saves: "saves 1.2 ± 0.3 mJ/sample (12%)"."""
    unsure = ", not certain" if o.error_j is not None and o.saves_j <= o.error_j else ""
    return f"saves {format_energy_error(o.saves_j, o.error_j, signed=True)}/{o.unit} ({o.saves_share:.0%}{unsure})"


def chip_name(device: str) -> str:
    """Return a chip's full name by its id, with the power mode if one was chosen; the id if the catalogue lacks it."""
    chip = _find_chip(device)
    return device if chip is None else chip.name


def describe_setting(report: EnergyReport) -> str:
    """Return how it runs, in words: "bf16, infer, eager, batch 8, sustained"."""
    of = report.prediction
    if of is None:
        return report.total.source
    size = f"batch {of.batch}" if of.batch else ""
    parts = [of.precision or "the model's precision", of.mode, of.launch, size, of.state]
    return ", ".join(part for part in parts if part)


def bound_text(report: EnergyReport) -> str:
    """Return what limits a prediction, and how much of the tighter roof is reached, where that was verified."""
    of = report.prediction
    if of is None:
        return ""
    limit = BOUNDS.get(of.bound, of.bound)
    chip = _find_chip(of.device)
    if chip is not None and chip.kind == "cpu":  # its share would be a GPU's efficiency under another name
        return limit
    share = of.average_utilization
    return f"{limit}; {f'{share:.0%}' if share >= 0.01 else 'under 1%'} of the tighter roof reached"


def _find_chip(device: str) -> Device | None:
    try:
        return lookup(device)
    except ArgumentError:
        return None


def provenance(report: EnergyReport) -> list[tuple[str, str]]:
    """Return (what, where it comes from) for every part of a prediction."""
    of = report.prediction
    return [] if of is None else [(name.replace("_", " "), source) for name, source in of.provenance.items() if source]


def power_text(report: EnergyReport) -> list[str]:
    """Return mean watts, and the peak with the window it is a mean over: "691 W average", "752 W peak of 20 ms"."""
    figures = [] if report.average_power_w is None else [f"{format_power(report.average_power_w, 3)} average"]
    if report.peak_w is not None:
        window = f" of {format_duration(WINDOW_S, 3)}" if report.prediction is not None else ""
        figures.append(f"{format_power(report.peak_w, 3)} peak{window}")
    return figures


def memory_text(peak_bytes: int, capacity_bytes: int | None) -> str:
    """Return the peak of memory, and the chip's capacity: "1.2 GiB of 80 GiB (2%)"."""
    if not capacity_bytes:
        return f"{format_bytes(peak_bytes, 3)} at the peak"
    share = format_share(peak_bytes / capacity_bytes)
    return f"{format_bytes(peak_bytes, 3)} of {format_bytes(capacity_bytes, 3)} ({share})"
