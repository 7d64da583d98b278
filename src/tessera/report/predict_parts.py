"""What the terminal and the page both show of a prediction: its subgraphs in groups, its components, its words."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ArgumentError
from ..estimate.iteration import WINDOW_S
from ..estimate.search import Sweep, SweepRow
from ..hardware import lookup
from ..schema import EnergyDescriptor, EnergyReport
from ..units import format_bytes, format_duration, format_power, format_share
from .text import with_error

# So many subgraphs alike (the layers of a transformer) are one line; fewer keep their own, as in a small ResNet.
STACK = 4
TIED = 3
"""Combinations that a tie names; the rest are counted."""
_INDEX = re.compile(r"(?:(?<=[._])|^)\d+(?=\.)")

BOUNDS = {
    "host": "the host: the device waits for launches",
    "dispatch": "dispatch: PyTorch's own work before each operator",
    "compute": "arithmetic",
    "memory": "memory bandwidth",
    "overhead": "overhead: kernels too small to fill the chip",
    "power": "the power limit: the clock is held down",
}
"""What a prediction's `bound` means, in words."""


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


def row_name(row: SweepRow) -> str:
    """A combination in words: "a100 bf16 batch 8"."""
    return " ".join(part for part in (row.on, row.precision or "", f"batch {row.batch}" if row.batch else "") if part)


def ties(found: Sweep) -> list[str]:
    """Where the best combinations differ by less than their errors: a sentence for time, one for joules."""
    fastest, least = found.fastest(), found.best_batch()
    if fastest is None or least is None:
        return []
    # The chosen one first: of equals it is the one of the fewest joules.
    time = [(r.time_s, r.error_s, row_name(r)) for r in _first(fastest, found.feasible)]
    joules = [(r.energy_per_sample_j, r.error_per_sample_j, row_name(r)) for r in _first(least, found.feasible)]
    said = (_tie(time, "fastest"), _tie(joules, "fewest joules"))
    return [sentence for sentence in said if sentence]


def _first(chosen: SweepRow, rows: Sequence[SweepRow]) -> list[SweepRow]:
    return [chosen, *(row for row in rows if row is not chosen)]


def _tie(figures: Sequence[tuple[float | None, float | None, str]], question: str) -> str:
    known = [(value, error or 0.0, name) for value, error, name in figures if value is not None]
    if len(known) < 2:
        return ""
    (best, error, _), *others = known
    # Two predictions err each for itself, as far as they say.
    tied = sorted((v, e, name) for v, e, name in others if v - best <= math.hypot(e, error))
    if not tied:
        return ""
    tied.insert(0, known[0])
    shown = [name for *_, name in tied[:TIED]]
    shown += [f"{len(tied) - TIED} more"] if len(tied) > TIED else []
    return f"tied for {question} within 90%: {', '.join(shown[:-1])} and {shown[-1]}"


def chip_name(device: str) -> str:
    """A chip's full name by its id, with the power mode if one was chosen; the id where the catalogue lacks it."""
    try:
        return lookup(device).name
    except ArgumentError:
        return device


def setting(report: EnergyReport) -> str:
    """How it runs, in words: "bf16, infer, eager, batch 8"."""
    of = report.prediction
    if of is None:
        return report.total.source
    parts = [of.precision or "precision as it is", of.mode, of.launch, f"batch {of.batch}" if of.batch else ""]
    return ", ".join(part for part in parts if part)


def bound_text(report: EnergyReport) -> str:
    """What bounds a prediction, and how much of the tighter roof is reached, where somebody checked such a share."""
    of = report.prediction
    if of is None:
        return ""
    said = BOUNDS.get(of.bound, of.bound)
    if _kind(of.device) == "cpu":  # its share would be a GPU's efficiency under another name
        return said
    share = of.average_utilization
    return f"{said}; {f'{share:.0%}' if share >= 0.01 else 'under 1%'} of the tighter roof reached"


def _kind(device: str) -> str | None:
    try:
        return lookup(device).kind
    except ArgumentError:
        return None


def origin(report: EnergyReport) -> list[tuple[str, str]]:
    """(what, where it comes from) for every part of a prediction."""
    of = report.prediction
    return [] if of is None else [(name.replace("_", " "), text) for name, text in of.provenance.items() if text]


def power_text(report: EnergyReport) -> list[str]:
    """Mean watts, and the highest with the window it is a mean over: "691 W average", "752 W peak of 20 ms"."""
    known = [] if report.average_power_w is None else [f"{format_power(report.average_power_w, 3)} average"]
    if report.peak_w is not None:
        window = f" of {format_duration(WINDOW_S, 3)}" if report.prediction is not None else ""
        known.append(f"{format_power(report.peak_w, 3)} peak{window}")
    return known


def memory_text(peak_bytes: int, capacity_bytes: int | None) -> str:
    """The memory peak against what the chip has: "1.2 GiB of 80 GiB (2%)"."""
    if not capacity_bytes:
        return f"{format_bytes(peak_bytes, 3)} at the peak"
    share = peak_bytes / capacity_bytes
    part = format_share(share)
    return f"{format_bytes(peak_bytes, 3)} of {format_bytes(capacity_bytes, 3)} ({part})"
