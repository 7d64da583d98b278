"""Every step of a run of which only some steps were traced: a mean of the traced ones alone is not the run's."""

from __future__ import annotations

import math

import numpy as np

from ..attribute.table import EnergyRow, EnergyTable
from ..recording import Recording
from .run_energy import accounted_energies, is_partial
from .slowdown import SEEN


def find_every_step(recording: Recording, table: EnergyTable) -> list[EnergyRow]:
    """A row for each step of a partly traced run, from its edges and the sensors; empty where the table has them all.

    Empty too where ranks take a step together: their edges differ, and one sensor's joules would count several times.
    """
    power, timeline = recording.power, recording.timeline
    if power is None or recording.facts.kind != "run" or not table.steps or not is_partial(recording, table):
        return []
    steps = timeline.linked.steps
    if len(steps) <= len(table.steps) or len(np.unique(timeline["rank"])) > 1:
        return []
    rows = []
    spent = accounted_energies(power, timeline, [(s.start_ns, s.end_ns) for s in steps])
    for step, energy in zip(steps, spent, strict=True):
        is_seen = energy.coverage >= SEEN and energy.energy_j >= 0  # NaN is not
        row = EnergyRow(
            name=step.name,
            kind="step",
            calls=1,
            time_s=energy.time_s,
            energy_j=energy.energy_j if is_seen else math.nan,
            error_j=energy.error_j if is_seen else math.nan,
            share=math.nan,  # the table is of the traced part: no step of the run has a share of it
            wall_s=energy.time_s,
        )
        rows.append(row)
    return rows if any(not math.isnan(row.energy_j) for row in rows) else []
