"""`tessera predict` in the terminal: one prediction on one screen, a sweep as a table, two reports side by side."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..errors import ArgumentError
from ..estimate.search import Sweep, SweepRow
from ..hardware import lookup
from ..schema import DiffRow, EnergyDescriptor, EnergyDiff, EnergyReport, Opportunity
from ..units import format_bytes, format_duration, format_energy, format_power
from .text import energy_text, plain_table, with_error

BAR = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"
# So many subgraphs alike (the layers of a transformer) are one line; fewer keep their own, as in a small ResNet.
STACK = 4
_INDEX = re.compile(r"(?:(?<=[._])|^)\d+(?=\.)")

BOUNDS = {
    "host": "the host: the device waits for launches",
    "compute": "arithmetic",
    "memory": "memory bandwidth",
    "overhead": "overhead: kernels too small to fill the chip",
    "power": "the power limit: the clock is held down",
}
"""What a prediction's `bound` means, in words."""


# -- what both the terminal and the page show -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """Subgraphs of one name (or, in a deep stack, of one place in every layer), together."""

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
        """All joules of the group."""
        return self.compute_energy_j + self.memory_energy_j + self.static_energy_j


def consumers(report: EnergyReport, count: int) -> list[Consumer]:
    """The dearest subgraphs, grouped by name."""
    stacks: dict[tuple[str, str, float], list[EnergyDescriptor]] = {}
    for d in report.descriptors:
        stacks.setdefault((_INDEX.sub("*", d.subgraph_name, count=1), d.kind, d.flops), []).append(d)
    groups: dict[tuple[str, str], list[EnergyDescriptor]] = {}
    for (pattern, kind, _), members in stacks.items():
        deep = len({d.subgraph_name for d in members}) >= STACK
        for d in members:
            groups.setdefault((pattern if deep else d.subgraph_name, kind), []).append(d)
    total = report.total_energy_j
    found = [_consumer(name, kind, members, total) for (name, kind), members in groups.items()]
    return sorted(found, key=lambda c: c.energy_j, reverse=True)[:count]


def _consumer(name: str, kind: str, members: Sequence[EnergyDescriptor], total_j: float) -> Consumer:
    joules = sum(d.total_energy_j for d in members)
    return Consumer(
        name=name,
        kind=kind,
        count=sum(d.calls for d in members),
        latency_s=sum(d.latency_s for d in members),
        compute_energy_j=sum(d.compute_energy_j for d in members),
        memory_energy_j=sum(d.memory_energy_j for d in members),
        static_energy_j=sum(d.static_energy_j for d in members),
        share=joules / total_j if total_j > 0 else 0.0,
    )


def components(report: EnergyReport | SweepRow | Consumer) -> list[tuple[str, float, float]]:
    """(name, joules, share of the total) of compute, memory and static energy; [] where they are not known."""
    parts = [
        ("Compute", report.compute_energy_j),
        ("Memory", report.memory_energy_j),
        ("Static", report.static_energy_j),
    ]
    known = [(name, joules) for name, joules in parts if joules is not None]
    total = sum(joules for _, joules in known)
    return [(name, joules, joules / total if total > 0 else 0.0) for name, joules in known]


def time_text(seconds: float, error_s: float | None = None) -> str:
    """Seconds in a fitting prefix, with their error: "1.92 ± 0.11 ms"."""
    factor, unit = next(((f, u) for f, u in ((1.0, "s"), (1e-3, "ms")) if seconds >= f * 0.9995), (1e-6, "µs"))
    return with_error(seconds / factor, None if error_s is None else error_s / factor, unit)


def chip_name(device: str) -> str:
    """A chip's full name by its id, with the power mode if one was chosen; the id where the catalogue lacks it."""
    point = device.partition("@")[2]
    try:
        return lookup(device).name + (f" at {point}" if point else "")
    except ArgumentError:
        return device


def setting(report: EnergyReport) -> str:
    """How it runs, in words: "bf16, infer, eager, batch 8"."""
    of = report.prediction
    if of is None:
        return report.total.source
    parts = [of.precision or "precision as it is", of.mode, of.launch, f"batch {of.batch}" if of.batch else ""]
    return ", ".join(part for part in parts if part)


def origin(report: EnergyReport) -> list[tuple[str, str]]:
    """(what, where it comes from) for every part of a prediction."""
    of = report.prediction
    return [] if of is None else [(name.replace("_", " "), text) for name, text in of.provenance.items() if text]


def report_json(report: EnergyReport, opportunities: Sequence[Opportunity] | None = None) -> str:
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


# -- one prediction -------------------------------------------------------------------------------------------------


def prediction(
    report: EnergyReport,
    *,
    top: int = 10,
    opportunities: Sequence[Opportunity] | None = None,
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


def _title(report: EnergyReport) -> Text:
    of = report.prediction
    title = Text(report.name, style="bold")
    if of is not None:
        title.append(f" on {chip_name(of.device)}", style="bold")
    return title.append(f"   {setting(report)}", style="dim")


def _headline(report: EnergyReport) -> Text:
    of = report.prediction
    latency = time_text(report.total_latency_s, of.latency_error_s if of else None)
    watts = report.average_power_w
    power = "" if watts is None else f"{format_power(watts, 3)} average"
    if report.peak_w is not None:
        power += f", {format_power(report.peak_w, 3)} peak"
    line = Text("   ".join((latency, energy_text(report.total_energy_j, report.total.error_j), power)), style="bold")
    return line.append("   90% intervals", style="dim")


def _facts(report: EnergyReport) -> Table:
    of = report.prediction
    table = plain_table()
    for unit, joules, error in report.per_work():
        amount = next(w.amount for w in report.work if w.unit == unit)
        rate = amount / report.total_latency_s if report.total_latency_s > 0 else 0.0
        table.add_row(f"per {unit}", f"{energy_text(joules, error)}   {_count(rate)} {unit}s/s")
    if of is None:
        return table
    if of.peak_memory_bytes is not None:
        table.add_row("memory", memory_text(of.peak_memory_bytes, of.memory_capacity_bytes))
    share = of.average_utilization
    utilised = f"{share:.0%} of the tighter roof reached" if share >= 0.01 else "under 1% of the tighter roof reached"
    table.add_row("bound by", f"{BOUNDS.get(of.bound, of.bound)}; {utilised}")
    return table


def memory_text(peak_bytes: int, capacity_bytes: int | None) -> str:
    """The memory peak against what the chip has: "1.2 GiB of 80 GiB (2%)"."""
    if not capacity_bytes:
        return f"{format_bytes(peak_bytes, 3)} at the peak"
    share = peak_bytes / capacity_bytes
    part = f"{share:.0%}" if share >= 0.01 else "<1%"
    return f"{format_bytes(peak_bytes, 3)} of {format_bytes(capacity_bytes, 3)} ({part})"


def _bar(name: str, joules: float, share: float) -> Text:
    label = f"{name:<7} ({share:.1%}):"
    line = Text(f"{label:<17}")
    line.append(blocks(share, BAR), style={"Compute": "green", "Memory": "cyan", "Static": "yellow"}.get(name, ""))
    return line.append(f" {format_energy(joules, 3)}", style="dim")


def blocks(share: float, width: int) -> str:
    """A bar of block characters, to an eighth of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _consumers(report: EnergyReport, top: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("Top consumers", no_wrap=True, overflow="ellipsis")
    table.add_column("kind", style="dim", no_wrap=True)
    for heading in ("time", "energy", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    for i, c in enumerate(consumers(report, top), 1):
        name = c.name if c.count == 1 else f"{c.name} ×{c.count}"
        cells = (format_duration(c.latency_s, 3), format_energy(c.energy_j, 3), f"{c.share:.1%}")
        table.add_row(f"{i}.", Text(name), c.kind, *cells)
    return table


def _opportunities(found: Sequence[Opportunity]) -> list[RenderableType]:
    if not found:
        return [Text("Opportunities: none of those tried saves 2% or more", style="dim")]
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for column in range(4):
        table.add_column(no_wrap=column < 3)
    for o in found:
        saves = f"saves {energy_text(o.saves_j, o.error_j)}/{o.unit} ({o.saves_share:.0%})"
        what = Text(o.action).append(f"; takes {format_duration(o.latency_s, 3)}", style="dim")
        table.add_row(Text("✓", style="green"), Text(capital(o.name), style="bold"), Text(saves, style="green"), what)
    return [Text("Opportunities", style="bold"), table]


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
        parts.append(_rows(found, front, wide=width >= 100))
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
    return Group(*parts, Text(""), ending, *_following(next_command))


def _rows(found: Sweep, front: set[int], *, wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in ("", "chip", "dtype"):
        table.add_column(heading, no_wrap=True)
    for heading in ("batch", "latency", "per sample", "samples/s", "W", *(("memory",) if wide else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(" bound by", no_wrap=True)
    for row in found.feasible:
        style = "bold" if id(row) in front else ""
        table.add_row("*" if id(row) in front else "", *_cells(row, wide), style=style)
    return table


def _cells(row: SweepRow, wide: bool) -> list[str]:
    joules, latency, rate = row.energy_per_sample_j, row.latency_s, row.throughput_per_s
    cells = [row.device, row.precision or "-", str(row.batch or "-")]
    cells.append("-" if latency is None else time_text(latency, row.latency_error_s))
    cells.append("-" if joules is None else energy_text(joules, row.energy_per_sample_error_j))
    cells.append("-" if rate is None else _count(rate))
    cells.append("-" if row.average_power_w is None else f"{row.average_power_w:.0f}")
    if wide:
        cells.append("-" if row.peak_memory_bytes is None else format_bytes(row.peak_memory_bytes, 3))
    return [*cells, f" {row.bound or '-'}"]


def row_name(row: SweepRow) -> str:
    """A combination in words: "a100 bf16 batch 8"."""
    return " ".join(
        part for part in (row.device, row.precision or "", f"batch {row.batch}" if row.batch else "") if part
    )


def reasons(rows: Sequence[SweepRow]) -> list[tuple[str, str]]:
    """(combination, why it cannot be); batches that fail alike share a line."""
    alike: dict[tuple[str, str | None, str], list[SweepRow]] = {}
    for row in rows:
        alike.setdefault((row.device, row.precision, row.reason or ""), []).append(row)
    out = []
    for (device, precision, reason), members in alike.items():
        batches = ", ".join(str(row.batch) for row in members if row.batch)
        parts = (device, precision or "", f"batch {batches}" if batches else "")
        out.append((" ".join(part for part in parts if part), reason))
    return out


def choices(found: Sweep) -> list[tuple[str, SweepRow]]:
    """The rows one would choose: the fewest joules, the shortest, the most samples a second."""
    rows = found.feasible
    if not rows:
        return []
    return [
        ("least energy", min(rows, key=lambda row: row.energy_per_sample_j or 0.0)),
        ("fastest", found.pareto()[0]),
        ("most throughput", max(rows, key=lambda row: row.throughput_per_s or 0.0)),
    ]


def choice_text(row: SweepRow) -> str:
    """A chosen row in one line."""
    joules, latency = row.energy_per_sample_j or 0.0, row.latency_s or 0.0
    rate = _count(row.throughput_per_s or 0.0)
    return f"{row_name(row)}: {format_energy(joules, 3)} per sample, {format_duration(latency, 3)}, {rate} samples/s"


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
