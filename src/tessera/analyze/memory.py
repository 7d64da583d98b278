"""Memory: how much of it is allocated over time (`memory`), and what is copied from, to and within it (`memcpy`)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from ..profile.open_recording import Progress, open_recording
from ..record import CODE
from ..timeline import Timeline
from ..timeline.columns import NONE, Ints
from ..timeline.intervals import covered_ns
from .devices import RankDevice, busy_spans, explain_no_device, group_by_launch, list_devices
from .result import Result, columns

COUNTER = "memory allocated"
"""The readers' name for the counter of PyTorch's allocator."""
CATEGORY = "memory of "
POINTS = 512
"""Points of a device's curve: each stretch keeps its largest, so that no peak is lost."""
_MEMSET = "memset"
_TO_HOST = ("HtoD", "DtoH")
"""Only a copy from or to the host has memory that can be pinned."""
_MEMORY_COLUMNS = columns(
    ("where", "device"),
    ("peak_bytes", "peak"),
    ("peak_at_s", "at", "since the start of the trace"),
    ("peak_op", "in operator"),
    ("mean_bytes", "mean"),
    ("first_bytes", "first"),
    ("last_bytes", "last"),
    ("changes", "changes"),
)
_COPY_COLUMNS = columns(
    ("direction", "direction"),
    ("memory", "host memory"),
    ("calls", "calls"),
    ("bytes", "bytes"),
    ("time_s", "time"),
    ("bytes_per_s", "rate"),
    ("overlap_pct", "overlaps kernels"),
)


def memory(trace: Any, *, power: Any = None, points: int = POINTS, progress: Progress | None = None) -> Result:
    """Return peak, mean and last allocated bytes by device; `facts["timeline"]` has the curves as [second, bytes].

    >>> analyze.memory("trace.json.gz").rows[0]["peak_bytes"]
    """
    recording = open_recording(trace, power=power, progress=progress)
    timeline = recording.timeline
    rows = timeline.rows("counter")
    number = timeline.names.index(COUNTER) if COUNTER in timeline.names else NONE
    rows = rows[(timeline["name"][rows] == number) & np.isfinite(timeline["value"][rows])]
    rows = rows[np.argsort(timeline["start_ns"][rows], kind="stable")]
    lines, curves = [], {}
    keys = np.column_stack((timeline["rank"][rows], timeline["device"][rows]))
    for rank, device in np.unique(keys, axis=0).tolist():
        own = rows[(keys[:, 0] == rank) & (keys[:, 1] == device)]
        place = RankDevice(rank, device, own)
        name = place.name if device != NONE else place.name.replace(f"GPU {NONE}", "host")
        lines.append({**place.ids, "where": name, **_memory_figures(timeline, own)})
        curves[name] = _thin_curve(timeline, own, max(2, points))
    by_category = _at_peak(timeline, rows) if len(rows) else {}
    fix = "the trace has no allocations: tessera run --memory, or torch.profiler.profile(profile_memory=True)"
    return Result(
        kind="memory",
        title=f"Allocated memory of {recording.facts.name}",
        columns=_MEMORY_COLUMNS,
        rows=lines,
        facts={"timeline": curves, **({"peak_by_category": by_category} if by_category else {})},
        notes=recording.notes,
        missing={} if lines else {"memory": fix},
    )


def _at_peak(timeline: Timeline, rows: Ints) -> dict[str, float]:
    """Return bytes by category (parameters, activations ...) at the peak, from torch's memory timeline."""
    at_ns = int(timeline["start_ns"][rows[int(np.argmax(timeline["value"][rows]))]])
    found = {}
    for number, name in enumerate(timeline.names):
        if name.startswith(CATEGORY):
            own = np.flatnonzero((timeline["name"] == number) & (timeline["start_ns"] <= at_ns))
            if len(own):
                found[name.removeprefix(CATEGORY)] = float(timeline["value"][own[-1]])
    return dict(sorted(found.items(), key=lambda kv: -kv[1]))


def _memory_figures(timeline: Timeline, rows: Ints) -> dict[str, Any]:
    times, values = timeline["start_ns"][rows], timeline["value"][rows]
    peak = int(np.argmax(values))
    lengths = (times[1:] - times[:-1]).astype(np.float64)
    mean = float(values[:-1] @ lengths / lengths.sum()) if lengths.sum() > 0 else float(values.mean())
    return {
        "peak_bytes": float(values[peak]),
        "peak_at_s": (int(times[peak]) - timeline.start_ns) / 1e9,
        "peak_op": _outermost_operator(timeline, int(rows[peak])),
        "mean_bytes": mean,
        "first_bytes": float(values[0]),
        "last_bytes": float(values[-1]),
        "changes": len(rows),
    }


def _outermost_operator(timeline: Timeline, row: int) -> str | None:
    """Return the outermost open operator at a row, because the inner ones are all aten::empty."""
    at_ns, thread = timeline["start_ns"][row], timeline["thread"][row]
    ops = timeline.rows("op")
    around = (timeline["start_ns"][ops] <= at_ns) & (timeline["end_ns"][ops] > at_ns)
    around &= (timeline["thread"][ops] == thread) & ~np.isin(timeline["name"][ops], timeline.meta.get("frames", ()))
    ops = ops[around]
    return timeline.name(int(ops[np.argmin(timeline["start_ns"][ops])])) if len(ops) else None


def _thin_curve(timeline: Timeline, rows: Ints, points: int) -> list[list[float]]:
    """Return a curve as [second, bytes], with at most so many points."""
    seconds, values = (timeline["start_ns"][rows] - timeline.start_ns) / 1e9, timeline["value"][rows]
    if len(rows) > points:
        edges = np.linspace(0, len(rows), points + 1).astype(np.int64)
        highest = np.array([a + int(np.argmax(values[a:b])) for a, b in pairwise(edges.tolist())])
        seconds, values = seconds[highest], values[highest]
    return np.column_stack((seconds, values)).tolist()  # type: ignore[no-any-return]


def memcpy(trace: Any, *, power: Any = None, progress: Progress | None = None) -> Result:
    """Return copies by direction and pinning: calls, bytes, bytes a second, and how much ran beside kernels.

    Memsets have their own row (`kind` "memset"), and are in no sum of copies.

    >>> analyze.memcpy("trace.json.gz").facts["pinned_pct"]
    """
    recording = open_recording(trace, power=power, progress=progress)
    timeline = recording.timeline
    devices = list_devices(timeline)
    sums: dict[tuple[str, bool | None], dict[str, int]] = {}
    for device in devices:
        compute = busy_spans(timeline, device.rows, "kernel")
        for key, rows in _copy_groups(timeline, device):
            line = sums.setdefault(key, dict.fromkeys(("calls", "sized", "bytes", "ns", "sized_ns", "beside_ns"), 0))
            start, end, size = (timeline[c][rows] for c in ("start_ns", "end_ns", "bytes"))
            sized = size != NONE
            line["calls"] += len(rows)
            line["sized"] += int(sized.sum())
            line["bytes"] += sum(size[sized].tolist())  # Python's sum, because a damaged size must not wrap around
            line["ns"] += int((end - start).sum())
            line["sized_ns"] += int((end - start)[sized].sum())
            line["beside_ns"] += int(covered_ns(compute, start, end).sum())
    lines = [_copy_row(direction, pinned, line) for (direction, pinned), line in sums.items()]
    lines.sort(key=lambda r: (r["kind"] == _MEMSET, -r["time_s"], r["direction"], r["memory"]))
    copies = [line for (direction, _), line in sums.items() if direction != _MEMSET]
    missing = {} if copies else {"copies": "the trace has no copies" if devices else explain_no_device(recording)}
    if any(direction in _TO_HOST and pinned is None for direction, pinned in sums):
        missing["pinned"] = "some copies do not say whether the host's memory is pinned"
    return Result(
        kind="memcpy",
        title=f"Copies of {recording.facts.name}",
        columns=_COPY_COLUMNS,
        rows=lines,
        facts=_copy_facts(sums),
        notes=recording.notes,
        missing=missing,
    )


def _copy_groups(timeline: Timeline, device: RankDevice) -> list[tuple[tuple[str, bool | None], Ints]]:
    """Return the copies of a device by direction and pinning; memsets."""
    kinds = timeline["kind"][device.rows]
    copies = group_by_launch(timeline, device.rows[kinds == CODE["memcpy"]])
    groups: list[tuple[tuple[str, bool | None], Ints]] = [
        ((launch.memcpy_dir or "unknown", launch.pinned), rows) for launch, rows in copies
    ]
    if np.any(kinds == CODE["memset"]):
        groups.append(((_MEMSET, None), device.rows[kinds == CODE["memset"]]))
    return groups


def _copy_row(direction: str, pinned: bool | None, line: dict[str, int]) -> dict[str, Any]:
    return {
        "kind": _MEMSET if direction == _MEMSET else "memcpy",
        "direction": direction,
        "pinned": pinned,
        "memory": "" if pinned is None else "pinned" if pinned else "pageable",
        "calls": line["calls"],
        "bytes": line["bytes"] if line["sized"] else None,
        "time_s": line["ns"] / 1e9,
        "ns": line["ns"],
        "bytes_per_s": line["bytes"] / line["sized_ns"] * 1e9 if line["sized_ns"] and line["sized"] else None,
        "overlapped_s": line["beside_ns"] / 1e9,
        "overlapped_ns": line["beside_ns"],
        "overlap_pct": 100.0 * line["beside_ns"] / line["ns"] if line["ns"] else None,
    }


def _copy_facts(sums: dict[tuple[str, bool | None], dict[str, int]]) -> dict[str, Any]:
    copies = {key: line for key, line in sums.items() if key[0] != _MEMSET}
    memsets = sums.get((_MEMSET, None), {})
    to_host = {True: 0, False: 0}
    for (direction, pinned), line in copies.items():
        if direction in _TO_HOST and pinned is not None:
            to_host[pinned] += line["bytes"]
    return {
        "calls": sum(line["calls"] for line in copies.values()),
        "bytes": sum(line["bytes"] for line in copies.values()),
        "time_s": sum(line["ns"] for line in copies.values()) / 1e9,
        "overlapped_s": sum(line["beside_ns"] for line in copies.values()) / 1e9,
        "memsets": memsets.get("calls", 0),
        "memset_s": memsets.get("ns", 0) / 1e9,
        "pinned_pct": 100.0 * to_host[True] / sum(to_host.values()) if any(to_host.values()) else None,
    }
