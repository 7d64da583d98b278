"""What is in a Kineto trace, in a few figures: enough to say that it is worth looking at."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...integral import Ints
from ...timeline import Timeline, kineto
from ...timeline.columns import NONE

_STEP = "Optimizer.step#"
_TOP = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Heaviest:
    """All calls of one name: how often it ran, and for how long."""

    name: str
    calls: int
    time_s: float


@dataclass(slots=True, kw_only=True)
class TraceFigures:
    """Counts and times of a trace. `kernels_with_shapes` are those whose operator has its input shapes.

    A trace with launches and without kernels lost them: libkineto drops what the GPU's clock puts outside of the
    recording.
    """

    base_ns: int
    events: int = 0
    time_s: float = 0.0
    ops: int = 0
    ops_with_shapes: int = 0
    launches: int = 0
    kernels: int = 0
    kernels_with_shapes: int = 0
    kernel_s: float = 0.0
    collectives: int = 0
    collective_s: float = 0.0
    steps: int = 0
    heaviest: list[Heaviest] = field(default_factory=list)


def figures(data: bytes) -> TraceFigures:
    """Read a trace and count; raises RecordingError for bytes that are not a trace."""
    timeline = kineto.read(data)
    ops, collectives = timeline.rows("op"), timeline.rows("collective")
    kernels = np.concatenate([timeline.rows("kernel"), collectives])
    calls = timeline.linked.op[kernels]
    shapes = timeline["shapes"]
    return TraceFigures(
        base_ns=int(timeline.meta.get("base_ns") or 0),
        events=len(timeline),
        time_s=(timeline.end_ns - timeline.start_ns) * 1e-9,
        ops=len(ops),
        ops_with_shapes=int((shapes[ops] != NONE).sum()),
        launches=sum("Launch" in timeline.name(row) for row in timeline.rows("runtime", "graph_launch").tolist()),
        kernels=len(kernels),
        kernels_with_shapes=int((shapes[calls[calls != NONE]] != NONE).sum()),
        kernel_s=_time_s(timeline, kernels),
        collectives=len(collectives),
        collective_s=_time_s(timeline, collectives),
        steps=sum(timeline.name(row).startswith(_STEP) for row in timeline.rows("region").tolist()),
        heaviest=_find_heaviest(timeline),
    )


def _time_s(timeline: Timeline, rows: Ints) -> float:
    return float((timeline["end_ns"][rows] - timeline["start_ns"][rows]).sum()) * 1e-9


def _find_heaviest(timeline: Timeline) -> list[Heaviest]:
    """By time on the device; of a trace without one by time in operators (an inner one is in its outer one too)."""
    rows = timeline.device_rows
    rows = rows if len(rows) else timeline.rows("op")
    names = timeline["name"][rows]
    found = [
        Heaviest(name=timeline.names[n], calls=int((names == n).sum()), time_s=_time_s(timeline, rows[names == n]))
        for n in np.unique(names).tolist()
    ]
    return sorted(found, key=lambda h: -h.time_s)[:_TOP]
