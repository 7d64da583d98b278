"""The facts of one rank in a merged run: how it ended, and which joules are its own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...joules import sum_domains
from ...schema import Energy
from ...timeline.columns import Timeline
from ...trace import PowerTrace
from ..runfile import RunFile

MACHINE_WIDE = "the sensor counts the whole machine, which ranks share: its joules cannot be divided among them"


def describe_rank(run: RunFile, timeline: Timeline) -> dict[str, Any]:
    """Return plain data. `energy_j` is None with a reason if the rank's joules cannot be told from other ranks'."""
    power, (start_ns, end_ns) = run.power(), run.span_ns
    own = find_own_energy(power, timeline)
    known = own is not None and not math.isnan(own.energy_j)
    return {
        "time_s": (end_ns - start_ns) * 1e-9,
        "returncode": run.get("returncode"),
        "crashed": run.crashed,
        "world_size": run.get("world_size"),
        "energy_j": own.energy_j if own is not None and known else None,
        "energy_error_j": own.error_j if own is not None and known else None,
        "no_energy": None if known else MACHINE_WIDE if power.columns else "no power was recorded",
    }


def find_own_energy(power: PowerTrace, timeline: Timeline) -> Energy | None:
    """Return the joules of the boards that the rank used, or of its own processes if it used none; None if unknown."""
    used = set(np.unique(timeline["device"][timeline.device_rows]).tolist())
    counted = [c for c in power.columns.values() if c.domain.counted]
    boards = [c for c in counted if c.domain.device.is_gpu and c.domain.device.index in used]
    own = boards if used else [c for c in counted if c.domain.scope == "process"]
    if not own:
        return None
    return sum_domains([c.energy(power.start_ns, power.end_ns, fill_gaps=True) for c in own], power.seconds)
