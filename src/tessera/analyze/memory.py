"""Allocated memory over time: the peak, when and in which operator it was reached, by device."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..timeline import Timeline
from ..timeline.columns import NONE, Ints
from .devices import Place
from .result import Column, Result
from .source import Progress, open_source

COUNTER = "memory allocated"
"""What the readers call the counter of PyTorch's allocator."""
POINTS = 512
"""Points of a device's curve: each stretch keeps its largest, so that no peak is lost."""


def memory(trace: Any, *, power: Any = None, points: int = POINTS, progress: Progress | None = None) -> Result:
    """Peak, mean and last allocated bytes by device; `facts["timeline"]` has the curves as [second, bytes].

    >>> analyze.memory("trace.json.gz").rows[0]["peak_bytes"]
    """
    source = open_source(trace, power=power, progress=progress)
    timeline = source.timeline
    rows = timeline.rows("counter")
    number = timeline.names.index(COUNTER) if COUNTER in timeline.names else NONE
    rows = rows[(timeline["name"][rows] == number) & np.isfinite(timeline["value"][rows])]
    rows = rows[np.argsort(timeline["start_ns"][rows], kind="stable")]
    out, curves = [], {}
    keys = np.column_stack((timeline["rank"][rows], timeline["device"][rows]))
    for rank, device in np.unique(keys, axis=0).tolist():
        mine = rows[(keys[:, 0] == rank) & (keys[:, 1] == device)]
        place = Place(rank, device, mine)
        name = place.name if device != NONE else place.name.replace(f"GPU {NONE}", "host")
        out.append({**place.ids, "where": name, **_figures(timeline, mine)})
        curves[name] = _curve(timeline, mine, max(2, points))
    columns = (
        Column(key="where", title="device"), Column(key="peak_bytes", title="peak", unit="B"),
        Column(key="peak_at_s", title="at", unit="s", help="since the start of the trace"),
        Column(key="peak_op", title="in operator"), Column(key="mean_bytes", title="mean", unit="B"),
        Column(key="first_bytes", title="first", unit="B"), Column(key="last_bytes", title="last", unit="B"),
        Column(key="changes", title="changes"),
    )  # fmt: skip
    fix = "the trace has no allocations: tessera run --memory, or torch.profiler.profile(profile_memory=True)"
    return Result(
        kind="memory", title=f"Allocated memory of {source.name}", columns=columns, rows=out,
        facts={"timeline": curves}, notes=source.notes, missing={} if out else {"memory": fix},
    )  # fmt: skip


def _figures(timeline: Timeline, rows: Ints) -> dict[str, Any]:
    times, values = timeline["start_ns"][rows], timeline["value"][rows]
    peak = int(np.argmax(values))
    held = (times[1:] - times[:-1]).astype(np.float64)
    mean = float(values[:-1] @ held / held.sum()) if held.sum() > 0 else float(values.mean())
    return {
        "peak_bytes": float(values[peak]), "peak_at_s": (int(times[peak]) - timeline.start_ns) / 1e9,
        "peak_op": _operator(timeline, int(rows[peak])), "mean_bytes": mean, "first_bytes": float(values[0]),
        "last_bytes": float(values[-1]), "changes": len(rows),
    }  # fmt: skip


def _operator(timeline: Timeline, row: int) -> str | None:
    """The outermost operator that was open when and where a row was recorded: the inner ones are all aten::empty."""
    at_ns, thread = timeline["start_ns"][row], timeline["thread"][row]
    ops = timeline.rows("op")
    around = (timeline["start_ns"][ops] <= at_ns) & (timeline["end_ns"][ops] > at_ns)
    around &= (timeline["thread"][ops] == thread) & ~np.isin(timeline["name"][ops], timeline.meta.get("frames", ()))
    found = ops[around]
    return timeline.name(int(found[np.argmin(timeline["start_ns"][found])])) if len(found) else None


def _curve(timeline: Timeline, rows: Ints, points: int) -> list[list[float]]:
    """At most so many points of a curve."""
    seconds: NDArray[np.float64] = (timeline["start_ns"][rows] - timeline.start_ns) / 1e9
    values = timeline["value"][rows]
    if len(rows) > points:
        edges = np.linspace(0, len(rows), points + 1).astype(np.int64)
        kept = np.array([a + int(np.argmax(values[a:b])) for a, b in pairwise(edges.tolist())])
        seconds, values = seconds[kept], values[kept]
    return np.column_stack((seconds, values)).tolist()  # type: ignore[no-any-return]
