"""What a table has outside its steps: evaluation, and the rest (setup, saving, time between steps).

The screen, the page and the JSON all use this: steps, evaluation and the rest sum to the table's joules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..attribute.account import MOST_PASSES
from ..attribute.table import EnergyRow, EnergyTable
from ..recording import EVALUATION, Recording
from .run_energy import accounted_energies
from .run_steps import find_spans

NAME = "outside the steps"
_Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideSteps:
    """The joules of a table that no step has. All steps, `evaluation` and `rest` sum to the table's joules.

    `evaluation` is None if there was none between the steps. `places` are the joules of the rest "before" the first
    step, "between" steps and "after" the last one; empty for a device, which runs a step's kernels after the step has
    ended.
    """

    evaluation: EnergyRow | None
    rest: EnergyRow
    places: Mapping[str, float]

    @property
    def rows(self) -> list[EnergyRow]:
        """Return the rows that come below the steps in a table of them."""
        return [*([self.evaluation] if self.evaluation else []), self.rest]


def find_outside_steps(recording: Recording, table: EnergyTable) -> OutsideSteps | None:
    """Return what no step of a table has; None without steps or joules, or if steps overlap or are too many."""
    joules = [s.energy_j for s in table.steps]
    if not joules or len(recording.timeline.linked.steps) > MOST_PASSES or not table.energy_j > 0:
        return None
    passes = _find_evaluation(recording)
    evaluation = next((r for r in table.regions if r.name == EVALUATION), None) if passes else None
    apart = [r for r in (evaluation,) if r is not None]
    rest_j = table.energy_j - math.fsum([*joules, *(r.energy_j for r in apart)])
    if not rest_j >= 0:  # also true for NaN
        return None
    rest_s = max(table.time_s - math.fsum(r.spent_s for r in (*table.steps, *apart)), 0.0)
    share = rest_j / table.energy_j
    rest = EnergyRow(
        name=NAME,
        kind="idle",
        calls=0,
        time_s=rest_s,
        energy_j=rest_j,
        error_j=share * table.error_j,  # the error of the sensor's level, which all rows share
        share=share,
        wall_s=rest_s,
    )
    return OutsideSteps(evaluation=evaluation, rest=rest, places=_place(recording, table, passes, rest_j))


def _find_evaluation(recording: Recording) -> list[tuple[int, int]]:
    """Return the passes of evaluation; none if one overlaps a step, because it then shares the step's joules."""
    timeline = recording.timeline
    rows = timeline.rows("region")
    rows = rows[timeline["name"][rows] == timeline.names.index(EVALUATION)] if EVALUATION in timeline.names else []
    passes = [(int(timeline["start_ns"][r]), int(timeline["end_ns"][r])) for r in rows]
    steps = timeline.linked.steps
    return [] if any(s.start_ns < b and a < s.end_ns for a, b in passes for s in steps) else passes


def _place(recording: Recording, table: EnergyTable, passes: _Spans, rest_j: float) -> dict[str, float]:
    """Return the rest by time, shared out as the samples show it."""
    timeline, power = recording.timeline, recording.power
    counted = {s.name for s in table.steps}
    steps = [(a, b) for name, a, b in find_spans(timeline) if name in counted]
    if power is None or len(timeline.device_rows) or not steps:
        return {}
    first_ns, last_ns = min(a for a, _ in steps), max(b for _, b in steps)
    windows = recording.accounted_windows
    spans = {
        "before": [(a, min(b, first_ns)) for a, b in windows],
        "between": _without([(max(a, first_ns), min(b, last_ns)) for a, b in windows], steps),
        "after": [(max(a, last_ns), b) for a, b in windows],
    }
    seen = {}
    for where, parts in spans.items():
        spent = accounted_energies(power, timeline, _without(parts, passes))
        seen[where] = math.fsum(e.energy_j for e in spent if e.energy_j > 0)  # NaN: there was no sample
    total_j = math.fsum(seen.values())
    return {where: rest_j * joules / total_j for where, joules in seen.items()} if total_j > 0 else {}


def _without(spans: _Spans, others: _Spans) -> list[tuple[int, int]]:
    """Return some stretches of time without others."""
    parts = []
    for start_ns, end_ns in spans:
        at_ns = start_ns
        for a, b in sorted(others):
            if a < end_ns and b > at_ns:
                parts.append((at_ns, a))
                at_ns = b
        parts.append((at_ns, end_ns))
    return [(a, b) for a, b in parts if b > a]
