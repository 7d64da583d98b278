"""Launches: how far the host runs ahead of each stream, how long kernels wait to start, and which are too short.

::

    host      ─[launch]───[launch]──[launch]──────          delay: from the end of the launch to the start on the device
    stream    ──────────[kernel]──[kernel]──[kernel]        queue: launched and not yet started, over time

A long queue with long delays is a device that is busy; a queue near nothing is a device that waits for the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import check_positive
from ..profile.open_recording import Progress, open_recording
from ..timeline import Timeline, stream_names
from ..timeline.columns import NONE, Ints
from .devices import RankDevice, explain_no_device, find_launches, list_devices
from .result import Result, columns

SHORT_S = 10e-6
"""Seconds: a kernel is short if it takes less than a launch costs the host (5 to 10 us on the machines we measured)."""
_COLUMNS = columns(
    ("where", "device"),
    ("stream", "stream"),
    ("calls", "rows", "kernels, copies and collectives"),
    ("delay_p50_s", "median delay", "from the end of the launch call to the start on the device"),
    ("delay_p99_s", "p99 delay"),
    ("delay_max_s", "longest"),
    ("queue_mean", "mean queue", "launched and not yet started, by time"),
    ("queue_max", "longest queue"),
    ("short_calls", "short", "those under 10 us, or what `short_s` says"),
    ("short_pct", "of the rows"),
    ("short_s", "their time"),
)


def launches(trace: Any, *, power: Any = None, short_s: float = SHORT_S, progress: Progress | None = None) -> Result:
    """Launch delay, queue length and short kernels of each stream, those with most rows first.

    Rows whose launch was not recorded, and those of a replayed graph (one launch for many), count as rows only.

    >>> analyze.launches("trace.json.gz").facts["short_pct"]
    """
    check_positive("short_s", short_s, fix="seconds, such as short_s=10e-6")
    recording = open_recording(trace, power=power, progress=progress)
    timeline = recording.timeline
    rows = []
    for device in list_devices(timeline):
        streams = timeline["stream"][device.rows]
        for number in np.unique(streams).tolist():
            rows.append(_describe_stream(timeline, device, number, device.rows[streams == number], short_s))
    rows.sort(key=lambda r: -r["calls"])
    calls, short = sum(r["calls"] for r in rows), sum(r["short_calls"] for r in rows)
    missing = {} if rows else {"launches": explain_no_device(recording)}
    if rows and not any(r["delay_p50_s"] is not None for r in rows):
        missing["delay_p50_s"] = "the trace has no launch calls: record with ProfilerActivity.CPU too"
    facts = {"calls": calls, "short_calls": short, "short_pct": 100.0 * short / calls if calls else None}
    return Result(
        kind="launches",
        title=f"Launches of {recording.facts.name}",
        columns=_COLUMNS,
        rows=rows,
        facts=facts,
        notes=recording.notes,
        missing=missing,
    )


def _describe_stream(timeline: Timeline, device: RankDevice, number: int, rows: Ints, short_s: float) -> dict[str, Any]:
    starts, ends = timeline["start_ns"][rows], timeline["end_ns"][rows]
    short = (ends - starts) * 1e-9 < short_s
    found: dict[str, Any] = {
        **device.ids, "stream": stream_names.label(timeline.meta, device.device, number, timeline.rank),
        "calls": len(rows), "short_calls": int(short.sum()), "short_pct": 100.0 * float(short.mean()),
        "short_s": float((ends - starts)[short].sum()) * 1e-9,
        **dict.fromkeys(("delay_p50_s", "delay_p99_s", "delay_max_s", "queue_mean", "queue_max")),
    }  # fmt: skip
    call = find_launches(timeline, rows)
    _, first, count = np.unique(call, return_inverse=True, return_counts=True)
    own = (call != NONE) & (count[np.asarray(first).reshape(-1)] == 1)  # a graph's launch is shared by many rows
    if not own.any():
        return found
    launched, begun = timeline["start_ns"][call[own]], starts[own]
    delays = np.maximum(begun - timeline["end_ns"][call[own]], 0) * 1e-9
    p50, p99 = np.percentile(delays, [50.0, 99.0]).tolist()
    found |= {"delay_p50_s": p50, "delay_p99_s": p99, "delay_max_s": float(delays.max())}
    # If a clock is slightly off, a row may start before its launch: then it was never queued.
    launched = np.minimum(launched, begun)
    times = np.concatenate([launched, begun])
    change = np.concatenate([np.ones(len(begun), np.int64), -np.ones(len(begun), np.int64)])
    order = np.lexsort((-change, times))
    length = np.cumsum(change[order])
    lasts = np.diff(times[order])
    mean = float(length[:-1] @ lasts) / float(lasts.sum()) if lasts.sum() > 0 else 0.0
    return found | {"queue_mean": mean, "queue_max": int(length.max())}
