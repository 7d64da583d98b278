"""A run from its start to its end, how much of that was traced, and where the rest is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..attribute.table import EnergyTable
from ..joules import sum_domains, sum_windows
from ..recording import Recording
from ..schema import Energy
from ..timeline.columns import Timeline
from ..timeline.link import Step
from ..trace import PowerTrace
from .energy_by_time import TimeShares

FULLY = 0.98
"""A run of which this much was traced is called traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Joules of a run that no row has: "before" what was traced, "between" its windows, "after" it; its steps there.

    "unsampled": while no sensor was read. The counter knows how many there were, and nobody where.
    """

    where: str
    energy_j: float
    seconds: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The run from its start to its end, whether traced or not. `steps` is None where it has none.

    `whole_steps` are those whose begin and end are known: of the first step of a script only the end is.
    """

    energy_j: float
    error_j: float
    seconds: float
    power_w: float | None
    power_error_w: float | None
    steps: int | None
    whole_steps: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data: what `--json` has as "run"."""
        return {
            "energy_j": self.energy_j, "energy_error_j": self.error_j, "seconds": self.seconds, "steps": self.steps,
        }  # fmt: skip


def is_partial(recording: Recording, table: EnergyTable) -> bool:
    """Whether the table is of less than the run: what was not traced is in no row of it."""
    start_ns, end_ns = recording.span_ns
    traced_s = sum(b - a for a, b in recording.accounted_windows) * 1e-9
    return bool(table.kernels or table.ops) and max(traced_s, table.seconds) < FULLY * (end_ns - start_ns) * 1e-9


def whole_of(recording: Recording, table: EnergyTable, partial: bool, shared: TimeShares | None) -> Whole:
    """Of the table where that is all; else from the samples of the devices the table is about."""
    found = recording.timeline.linked.steps
    steps, whole_steps = len(found) + _unbegun(recording, found), len(found)
    if shared is not None and shared.steps:
        steps, whole_steps = shared.steps, shared.whole_steps
    spent = Energy(
        joules=table.total_j, error_j=table.total_error_j, seconds=table.seconds, coverage=table.coverage,
        source=table.source, basis=table.basis,
    )  # fmt: skip
    if partial and recording.power is not None:
        spent = _filled(recording.power, recording.timeline)
    seen_s = spent.seconds * spent.coverage if spent.joules >= 0 else 0.0
    return Whole(
        energy_j=spent.joules, error_j=spent.error_j, seconds=spent.seconds, steps=steps or None,
        power_w=spent.joules / seen_s if seen_s > 0 else None,
        power_error_w=spent.error_j / seen_s if seen_s > 0 else None, whole_steps=whole_steps if steps else None,
    )  # fmt: skip


def _unbegun(recording: Recording, steps: Sequence[Step]) -> int:
    """One where the script's first step has no row: its optimizer says when a step ends, and nobody when one begins.

    Steps counted so follow one another without a gap, which regions that a program names itself never do.
    """
    if recording.facts.meta.get("command") is None or not steps or steps[0].name != "step_1":
        return 0
    return int(all(a.end_ns == b.start_ns for a, b in pairwise(steps[:3])))


def _filled(power: PowerTrace, timeline: Timeline) -> Energy:
    """The whole run's, holes in the samples filled by the counter: no row can be given those joules, the sum can."""
    names = _accounted(power, timeline)
    parts = [power.columns[n].energy(power.start_ns, power.end_ns, fill_gaps=True) for n in names]
    return sum_domains(parts, power.seconds)


def accounted_energies(power: PowerTrace, timeline: Timeline, spans: Sequence[tuple[int, int]]) -> list[Energy]:
    """Joules of some stretches of time, of the devices that the table is about."""
    columns = [power.columns[name] for name in _accounted(power, timeline)]
    return [sum_domains([c.energy(start, end) for c in columns], (end - start) * 1e-9) for start, end in spans]


def outside(recording: Recording, table_j: float, whole: Whole) -> list[Outside]:
    """Where the joules are that no row has: with the table's they are the whole run's."""
    timeline, power = recording.timeline, recording.power
    if power is None:
        return []
    first, last = power.start_ns, power.end_ns
    windows = [(min(max(a, first), last), min(max(b, first), last)) for a, b in recording.accounted_windows]
    spans: dict[str, list[tuple[int, int]]] = {
        "before": [(first, windows[0][0])],
        "between": [(one[1], two[0]) for one, two in pairwise(windows)],
        "after": [(windows[-1][1], last)],
    }
    middles = [(s.start_ns + s.end_ns) // 2 for s in timeline.linked.steps]
    found = []
    for where, stretches in spans.items():
        spent = accounted_energies(power, timeline, [(a, b) for a, b in stretches if b > a])
        part = sum_windows(spent) if spent else None
        if part is not None and part.joules > 0:
            steps = sum(a <= middle < b for a, b in stretches for middle in middles)
            seconds = part.seconds * part.coverage
            found.append(Outside(where=where, energy_j=part.joules, seconds=seconds, steps=steps))
    rest_j = whole.energy_j - table_j - sum(known.energy_j for known in found)
    if rest_j > max(whole.error_j, (1.0 - FULLY) * whole.energy_j):
        names = _accounted(power, timeline)
        gaps = [(max(g.start_ns, first), min(g.end_ns or last, last)) for g in power.gaps if g.domain in names]
        blind_s = sum(max(0, end - start) for start, end in gaps) * 1e-9 / max(1, len(names))
        found.append(Outside(where="unsampled", energy_j=rest_j, seconds=blind_s, steps=0))
    return found


def _accounted(power: PowerTrace, timeline: Timeline) -> list[str]:
    """The domains that attribution shares out: boards on which something ran, else the first of the host's."""
    counted = {name: c.domain.device for name, c in power.columns.items() if c.domain.counted}
    boards = [name for name, device in counted.items() if device.is_gpu]
    used = timeline.devices
    if not used:
        hosts = [name for name in counted if name not in boards]
        return hosts[:1] or boards
    boards = boards or list(counted)
    return [name for name in boards if counted[name] in used] or boards[:1]
