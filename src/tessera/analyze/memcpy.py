"""Copies by direction and by whether the host's side is pinned."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..record import CODE
from ..timeline.columns import NONE
from ..timeline.intervals import covered_ns
from .devices import Place, by_launch, no_device, places, spans_of
from .result import Column, Result
from .source import Progress, open_source

_MEMSET = "memset"
_HOST = ("HtoD", "DtoH")
"""Only a copy from or to the host has memory that can be pinned."""


def memcpy(trace: Any, *, power: Any = None, progress: Progress | None = None) -> Result:
    """Copies by direction and pinned or pageable: calls, bytes, bytes a second, and how much ran beside kernels.

    Memsets have a row of their own (`kind` "memset"), and are in no sum of copies.

    >>> analyze.memcpy("trace.json.gz").facts["pinned_pct"]
    """
    source = open_source(trace, power=power, progress=progress)
    timeline = source.timeline
    found = places(timeline)
    sums: dict[tuple[str, bool | None], dict[str, int]] = {}
    for place in found:
        compute = spans_of(timeline, place, "kernel")
        for (direction, pinned), rows in _sorts(timeline, place):
            line = sums.setdefault(
                (direction, pinned), dict.fromkeys(("calls", "sized", "bytes", "ns", "sized_ns", "beside_ns"), 0)
            )
            start, end, size = (timeline[c][rows] for c in ("start_ns", "end_ns", "bytes"))
            sized = size != NONE
            line["calls"] += len(rows)
            line["sized"] += int(sized.sum())
            line["bytes"] += sum(size[sized].tolist())  # Python's sum: a damaged size must not wrap around
            line["ns"] += int((end - start).sum())
            line["sized_ns"] += int((end - start)[sized].sum())
            line["beside_ns"] += int(covered_ns(compute, start, end).sum())
    rows = [_row(direction, pinned, line) for (direction, pinned), line in sums.items()]
    rows.sort(key=lambda r: (r["kind"] == _MEMSET, -r["seconds"], r["direction"], r["memory"]))
    pinned_bytes, pageable_bytes = (
        sum(line["bytes"] for (d, q), line in sums.items() if d in _HOST and q is p) for p in (True, False)
    )
    known = pinned_bytes + pageable_bytes
    lines = [line for (direction, _), line in sums.items() if direction != _MEMSET]
    filled = sums.get((_MEMSET, None), {})
    facts = {
        "calls": sum(line["calls"] for line in lines), "bytes": sum(line["bytes"] for line in lines),
        "seconds": sum(line["ns"] for line in lines) / 1e9,
        "overlapped_s": sum(line["beside_ns"] for line in lines) / 1e9,
        "memsets": filled.get("calls", 0), "memset_s": filled.get("ns", 0) / 1e9,
        "pinned_pct": 100.0 * pinned_bytes / known if known else None,
    }  # fmt: skip
    columns = (
        Column(key="direction", title="direction"), Column(key="memory", title="host memory"),
        Column(key="calls", title="calls"), Column(key="bytes", title="bytes", unit="B"),
        Column(key="seconds", title="time", unit="s"), Column(key="bytes_per_s", title="rate", unit="B/s"),
        Column(key="overlap_pct", title="beside kernels", unit="%"),
    )  # fmt: skip
    missing = {} if lines else {"copies": "the trace has no copies" if found else no_device(source)}
    if any(d in _HOST and p is None for d, p in sums):
        missing["pinned"] = "some copies do not say whether the host's memory is pinned"
    return Result(
        kind="memcpy", title=f"Copies of {source.name}", columns=columns, rows=rows, facts=facts, notes=source.notes,
        missing=missing,
    )  # fmt: skip


def _sorts(timeline: Any, place: Place) -> list[tuple[tuple[str, bool | None], Any]]:
    """The rows of a place by direction and pinning."""
    kinds = timeline["kind"][place.rows]
    out: list[tuple[tuple[str, bool | None], Any]] = []
    for launch, rows in by_launch(timeline, place.rows[kinds == CODE["memcpy"]]):
        out.append((((launch.memcpy_dir if launch else None) or "unknown", launch.pinned if launch else None), rows))
    if np.any(kinds == CODE["memset"]):
        out.append(((_MEMSET, None), place.rows[kinds == CODE["memset"]]))
    return out


def _row(direction: str, pinned: bool | None, line: dict[str, int]) -> dict[str, Any]:
    return {
        "kind": _MEMSET if direction == _MEMSET else "memcpy", "direction": direction, "pinned": pinned,
        "memory": "" if pinned is None else "pinned" if pinned else "pageable", "calls": line["calls"],
        "bytes": line["bytes"] if line["sized"] else None, "seconds": line["ns"] / 1e9, "ns": line["ns"],
        "bytes_per_s": line["bytes"] / line["sized_ns"] * 1e9 if line["sized_ns"] and line["sized"] else None,
        "overlapped_s": line["beside_ns"] / 1e9, "overlapped_ns": line["beside_ns"],
        "overlap_pct": 100.0 * line["beside_ns"] / line["ns"] if line["ns"] else None,
    }  # fmt: skip
