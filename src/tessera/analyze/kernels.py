"""Kernels by name: how often, how long, how many joules."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..attribute.activity import distinct, shares
from ..attribute.table import EnergyRow, EnergyTable
from ..errors import ArgumentError
from ..record import KINDS
from ..timeline.columns import Ints
from .devices import no_device, no_power, places
from .result import Column, Result
from .source import Progress, Source, open_source

SORTS = ("time", "energy")
_NEEDS_CALLS = 100
"""Below this the 99th percentile is the longest call."""


def kernels(trace: Any, *, power: Any = None, sort: str = "time", progress: Progress | None = None) -> Result:
    """Every kernel, copy and collective by name: calls, seconds, their spread, share, and joules where power was seen.

    `total_s` sums the calls; `self_s` counts what ran at once only once, shared evenly, and sums to the busy time.
    Percentiles are those of a call that occurred (nearest rank). `group` numbers kernels that the power samples cannot
    tell apart: only the sum of a group's joules is known well.

    >>> analyze.kernels("run.tessera", sort="energy").top(5)
    """
    if sort not in SORTS:
        raise ArgumentError(f"kernels cannot be sorted by {sort!r}", fix="sort='time' or sort='energy'")
    source = open_source(trace, power=power, progress=progress)
    timeline, table = source.timeline, source.energy()
    if sort == "energy" and table is None:
        raise ArgumentError("there are no joules to sort by", why="no power was recorded", fix=no_power(source))
    spent = {(r.kind, r.name): r for r in table.kernels} if table is not None else {}
    found = places(timeline)
    rows = np.concatenate([np.zeros(0, np.int64), *(p.rows for p in found)])
    start, end = timeline["start_ns"], timeline["end_ns"]
    own_s = np.concatenate([np.zeros(0), *(shares(start[p.rows], end[p.rows]) for p in found)])
    lasts = end[rows] - start[rows]
    lines = _lines(timeline["kind"][rows], timeline["name"][rows], lasts, own_s)
    whole_ns = max(1, int(lasts.sum()))
    out = []
    for kind, name, line in lines:
        joules = spent.get((KINDS[kind], timeline.names[name]))
        out.append(
            {
                "name": timeline.names[name], "kind": KINDS[kind], **line,
                "share_pct": 100.0 * line["total_ns"] / whole_ns, **_joules(joules),
            }
        )  # fmt: skip
    key = "energy_j" if sort == "energy" else "total_ns"
    out.sort(key=lambda r: (-(r[key] or 0), r["name"]))
    columns = (
        Column(key="name", title="kernel"), Column(key="calls", title="calls"),
        Column(key="total_s", title="time", unit="s"), Column(key="share_pct", title="share", unit="%"),
        *(_JOULES if table is not None else ()), Column(key="mean_s", title="mean", unit="s"),
        Column(key="p50_s", title="p50", unit="s"), Column(key="p99_s", title="p99", unit="s"),
        Column(key="min_s", title="min", unit="s"), Column(key="max_s", title="max", unit="s"),
        Column(key="self_s", title="self", unit="s", help="what ran at once counts once"),
    )  # fmt: skip
    notes = [*source.notes, *(table.notes if table is not None else ())]
    if any(r["calls"] < _NEEDS_CALLS for r in out[:10]):
        notes.append(f"the p99 of fewer than {_NEEDS_CALLS} calls is the longest one")
    return Result(
        kind="kernels", title=f"Kernels of {source.name}", columns=columns, rows=out,
        facts={
            "calls": len(rows), "names": len(out), "total_s": int(lasts.sum()) / 1e9, "busy_s": float(own_s.sum()),
            **(_whole(table) if table is not None and len(rows) else {}),
        },
        notes=list(dict.fromkeys(notes)),
        missing=_missing(source, bool(len(rows)), table is not None),
    )  # fmt: skip


def _whole(table: EnergyTable) -> dict[str, float]:
    return {
        "total_j": table.total_j, "total_error_j": table.total_error_j, "idle_j": table.idle_j,
        "idle_error_j": table.idle_error_j,
    }  # fmt: skip


def _missing(source: Source, ran: bool, joules: bool) -> dict[str, str]:
    if not ran:
        return {"kernels": no_device(source)}
    return {} if joules else {"energy": no_power(source)}


_JOULES = (
    Column(key="energy_j", title="energy", unit="J"), Column(key="energy_error_j", title="±", unit="J"),
    Column(key="power_w", title="power", unit="W"), Column(key="group", title="group"),
)  # fmt: skip


def _lines(kind: Ints, name: Ints, lasts: Ints, own_s: NDArray[np.float64]) -> list[tuple[int, int, dict[str, Any]]]:
    """Kind, name and durations of every distinct kernel."""
    if not len(lasts):
        return []
    first, which = distinct(kind, name)
    order = np.lexsort((lasts, which))
    count = np.bincount(which)
    begin = np.cumsum(count) - count
    ranked = lasts[order]
    total = np.add.reduceat(ranked, begin)
    alone = np.bincount(which, own_s)

    def rank(percent: int) -> Ints:  # the smallest duration that so many percent of the calls do not exceed
        at: Ints = ranked[begin + (count * percent + 99) // 100 - 1]
        return at

    figures = zip(
        kind[first].tolist(), name[first].tolist(), count.tolist(), total.tolist(), alone.tolist(),
        ranked[begin].tolist(), rank(50).tolist(), rank(99).tolist(), ranked[begin + count - 1].tolist(), strict=True,
    )  # fmt: skip
    return [
        (
            k, n, {
                "calls": calls, "total_s": ns / 1e9, "total_ns": ns, "self_s": self_s, "mean_s": ns / calls / 1e9,
                "min_s": least / 1e9, "p50_s": p50 / 1e9, "p99_s": p99 / 1e9, "max_s": most / 1e9,
            },
        )
        for k, n, calls, ns, self_s, least, p50, p99, most in figures
    ]  # fmt: skip


def _joules(row: EnergyRow | None) -> dict[str, Any]:
    if row is None:
        return {"energy_j": None, "energy_error_j": None, "power_w": None, "group": None}
    return {
        "energy_j": row.energy_j, "energy_error_j": row.energy_error_j, "power_w": row.power_w, "group": row.group
    }  # fmt: skip
