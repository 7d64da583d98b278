"""Recordings whose table of joules the test gives, instead of attributing power samples."""

from __future__ import annotations

import numpy as np

from tessera.attribute.table import EnergyTable
from tessera.profile.runfile import RunFile
from tessera.record import CODE
from tessera.recording import Recording


def with_table(run: RunFile, table: EnergyTable | None) -> Recording:
    """A run whose `energy()` is a table; None: a run of which no joules are known. Rows get their class's watts."""
    recording = run.recording()
    recording.find_energy = lambda: table  # type: ignore[method-assign]
    if table is None:
        return recording
    recording.energy = lambda: table  # type: ignore[method-assign]
    timeline = recording.timeline
    timeline.energy_j, timeline.error_j = np.full(len(timeline), np.nan), np.full(len(timeline), np.nan)
    seconds = (timeline["end_ns"] - timeline["start_ns"]) * 1e-9
    names = np.array(timeline.names)
    for row in table.kernels:
        same = (timeline["kind"] == CODE[row.kind]) & (names[timeline["name"]] == row.name)
        if row.time_s > 0:
            timeline.energy_j[same] = row.energy_j / row.time_s * seconds[same]
            timeline.error_j[same] = row.error_j / row.time_s * seconds[same]
    return recording
