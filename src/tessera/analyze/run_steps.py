"""Every step of a run of which only some steps were traced: the mean of the traced steps is not the run's mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..attribute.table import EnergyRow, EnergyTable
from ..recording import Recording
from ..schema import Pause
from ..timeline.columns import Timeline
from ..timeline.link import Step
from .run_energy import accounted_energies, is_partial
from .slowdown import SEEN

PAUSED_SHARE = 0.1
"""A step that stood still for its tracer for more than this share of its time is no measure of the program: chosen."""


def find_every_step(recording: Recording, table: EnergyTable) -> list[EnergyRow]:
    """Return a row for each step of a partly traced run, by its edges and the sensors; empty if the table has all."""
    power, timeline = recording.power, recording.timeline
    if power is None or recording.facts.kind != "run" or not is_partial(recording, table):
        return []
    spans = find_spans(timeline)
    if len(spans) <= len(table.steps):
        return []
    spans = _leave_out_paused(spans, recording.facts.pauses)
    rows = []
    spent = accounted_energies(power, timeline, [(start_ns, end_ns) for _, start_ns, end_ns in spans])
    for (name, _, _), energy in zip(spans, spent, strict=True):
        is_seen = energy.coverage >= SEEN and energy.energy_j >= 0  # false for NaN
        row = EnergyRow(
            name=name,
            kind="step",
            calls=1,
            time_s=energy.time_s,
            energy_j=energy.energy_j if is_seen else math.nan,
            error_j=energy.error_j if is_seen else math.nan,
            share=math.nan,  # the table covers the traced part, of which a step of the run has no share
            wall_s=energy.time_s,
        )
        rows.append(row)
    return rows if any(not math.isnan(row.energy_j) for row in rows) else []


def _leave_out_paused(spans: list[tuple[str, int, int]], pauses: Sequence[Pause]) -> list[tuple[str, int, int]]:
    """Return the steps in which the program hardly stood still for its tracer; all of them if every step did.

    The extra cost of a step that stood still is the tracer's.
    """
    stood_ns = np.zeros(len(spans))
    begins, ends = (np.array([span[side] for span in spans]) for side in (1, 2))
    for start_ns, seconds in pauses:
        stood_ns += np.clip(np.minimum(ends, start_ns + seconds * 1e9) - np.maximum(begins, start_ns), 0, None)
    own = [span for span, ns in zip(spans, stood_ns.tolist(), strict=True) if ns <= PAUSED_SHARE * (span[2] - span[1])]
    return own or spans


def find_spans(timeline: Timeline) -> list[tuple[str, int, int]]:
    """Return the name and the edges of each step. Ranks take a step together, so its edges are the means of theirs.

    So a step ends where the next begins, and no joule counts twice. A step that a rank does not have is left out.
    """
    steps, ranks = timeline.linked.steps, np.unique(timeline["rank"])
    if len(ranks) < 2:
        return [(s.name, s.start_ns, s.end_ns) for s in steps]
    by_name: dict[str, list[Step]] = {}
    for step in steps:
        by_name.setdefault(step.name, []).append(step)
    return [
        (name, sum(s.start_ns for s in own) // len(own), sum(s.end_ns for s in own) // len(own))
        for name, own in by_name.items()
        if len(own) == len(ranks)
    ]
