"""Kernels by name: how often, how long, how many joules."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..attribute.activity import distinct, shares
from ..errors import ArgumentError
from ..integral import Floats
from ..profile.load import Progress, open_recording
from ..record import KINDS
from ..timeline.columns import Ints
from .devices import explain_no_device, explain_no_power, list_devices
from .result import Result, columns

SORTS = ("time", "energy")
_NEEDS_CALLS = 100
"""Of fewer calls the 99th percentile is the longest one."""
_TIME_COLUMNS = columns(("name", "kernel"), ("calls", "calls"), ("total_s", "time"), ("share_pct", "share"))
_JOULES_COLUMNS = columns(("energy_j", "energy"), ("error_j", "±"), ("power_w", "power"), ("group", "group"))
_SPREAD_COLUMNS = columns(
    ("mean_s", "mean"),
    ("p50_s", "p50"),
    ("p99_s", "p99"),
    ("min_s", "min"),
    ("max_s", "max"),
    ("self_s", "self", "what ran at once counts once"),
)


def kernels(trace: Any, *, power: Any = None, sort: str = "time", progress: Progress | None = None) -> Result:
    """Every kernel, copy and collective by name: calls, seconds, their spread, share, and joules where power was seen.

    `total_s` sums the calls; `self_s` counts what ran at once only once, shared evenly, and sums to the busy time.
    Percentiles are those of a call that occurred (nearest rank). `group` numbers kernels that the power samples cannot
    tell apart: only the sum of a group's joules is known well.

    >>> analyze.kernels("run.tessera", sort="energy").top(5)
    """
    if sort not in SORTS:
        raise ArgumentError(f"kernels cannot be sorted by {sort!r}", fix="sort by 'time' or 'energy'")
    recording = open_recording(trace, power=power, progress=progress)
    timeline, table = recording.timeline, recording.find_energy()
    if sort == "energy" and table is None:
        raise ArgumentError(
            "there are no joules to sort by", why="no power was recorded", fix=explain_no_power(recording)
        )
    spent = {(r.kind, r.name): r for r in table.kernels} if table is not None else {}
    devices = list_devices(timeline)
    rows = np.concatenate([np.zeros(0, np.int64), *(d.rows for d in devices)])
    start, end = timeline["start_ns"], timeline["end_ns"]
    self_s = np.concatenate([np.zeros(0), *(shares(start[d.rows], end[d.rows]) for d in devices)])
    lengths = end[rows] - start[rows]
    total_ns = max(1, int(lengths.sum()))
    lines = []
    for code, name, figures in _summarise(timeline["kind"][rows], timeline["name"][rows], lengths, self_s):
        line = {"name": timeline.names[name], "kind": KINDS[code], **figures}
        line["share_pct"] = 100.0 * line["total_ns"] / total_ns
        row = spent.get((line["kind"], line["name"]))
        line |= {key: getattr(row, key, None) for key in ("energy_j", "power_w", "group")}
        line["error_j"] = None if row is None else row.energy_error_j
        lines.append(line)
    key = "energy_j" if sort == "energy" else "total_ns"
    lines.sort(key=lambda r: (-(r[key] or 0), r["name"]))
    notes = [*recording.notes, *(table.notes if table is not None else ())]
    if any(r["calls"] < _NEEDS_CALLS for r in lines[:10]):
        notes.append(f"the p99 of fewer than {_NEEDS_CALLS} calls is the longest one")
    facts = {"calls": len(rows), "names": len(lines), "total_s": int(lengths.sum()) / 1e9}
    facts["busy_s"] = float(self_s.sum())
    missing = {}
    if not len(rows):
        missing["kernels"] = explain_no_device(recording)
    elif table is None:
        missing["energy"] = explain_no_power(recording)
    else:
        facts |= {key: getattr(table, key) for key in ("total_j", "total_error_j", "idle_j", "idle_error_j")}
    return Result(
        kind="kernels",
        title=f"Kernels of {recording.facts.name}",
        columns=(*_TIME_COLUMNS, *(_JOULES_COLUMNS if table is not None else ()), *_SPREAD_COLUMNS),
        rows=lines,
        facts=facts,
        notes=list(dict.fromkeys(notes)),
        missing=missing,
    )


def _summarise(kind: Ints, name: Ints, lengths: Ints, self_s: Floats) -> list[tuple[int, int, dict[str, Any]]]:
    """Kind, name and durations of every distinct kernel."""
    if not len(lengths):
        return []
    first, which = distinct(kind, name)
    order = np.lexsort((lengths, which))
    count = np.bincount(which)
    begin = np.cumsum(count) - count
    rank_values = lengths[order]

    def percentile(percent: int) -> Ints:
        """The smallest duration that so many percent of the calls do not exceed."""
        at: Ints = rank_values[begin + (count * percent + 99) // 100 - 1]
        return at

    total = np.add.reduceat(rank_values, begin)
    figures = {"calls": count, "total_s": total / 1e9, "total_ns": total, "self_s": np.bincount(which, self_s)}
    figures |= {"mean_s": total / count / 1e9, "min_s": rank_values[begin] / 1e9, "max_s": percentile(100) / 1e9}
    figures |= {"p50_s": percentile(50) / 1e9, "p99_s": percentile(99) / 1e9}
    values = zip(*(column.tolist() for column in figures.values()), strict=True)
    lines = (dict(zip(figures, row, strict=True)) for row in values)
    return list(zip(kind[first].tolist(), name[first].tolist(), lines, strict=True))
