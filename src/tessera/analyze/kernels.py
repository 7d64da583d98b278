"""Kernels by name: how often, how long, how many joules; and from hardware counters why their warps waited.

Without counters `stalls` and `divergence` have no rows, and `missing` says how to get them. Their percentages are means
weighted by the time of each call, over the calls that have counters; `counted_pct` says how much of the time that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..attribute.activity import shares
from ..errors import ArgumentError, check_choice
from ..joules import Floats
from ..profile.counters.nvidia import STALLS
from ..profile.open_recording import Progress, open_recording
from ..record import KINDS
from ..recording import Recording
from ..timeline.columns import NONE, Ints, Timeline
from ..timeline.distinct import distinct
from .cupti_ranges import list_ranges
from .devices import explain_no_device, explain_no_power, list_devices, region_paths
from .result import Result, columns

SORTS = ("time", "energy")
_NEEDS_CALLS = 100
"""With fewer calls, the 99th percentile is the longest one."""
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
GROUPS = ("kernel", "op", "region")
COMMAND = "tessera run --counters script.py"
_KINDS = ("memory_stall_pct", "dependency_stall_pct", "structural_stall_pct")
_BESIDE = ("inst_issue_eff_pct", "sm_occupancy", "warps_eligible", "l2_hit_rate")
_STALL_COLUMNS = columns(
    ("calls", "Calls"),
    ("time_s", "Time"),
    ("share_pct", "Of device time"),
    ("stalled_s", "Stalled", "time times the stalled share of warp cycles"),
    ("memory_stall_pct", "Memory"),
    ("dependency_stall_pct", "Dependency"),
    ("structural_stall_pct", "Structural"),
    ("main_reason", "Main reason"),
    ("main_reason_pct", "Its share"),
    ("main_reason_means", "Meaning"),
    ("inst_issue_eff_pct", "Issue slots used"),
    ("sm_occupancy", "Occupancy"),
    ("warps_eligible", "Eligible warps", "per SM and cycle"),
    ("l2_hit_rate", "L2 hits"),
    ("energy_j", "Energy"),
    ("counted_pct", "Counted", "share of the time that has counters"),
    ("stall_reasons", "Reasons"),
)
_DIVERGENCE_COLUMNS = columns(
    ("calls", "Calls"),
    ("time_s", "Time"),
    ("share_pct", "Of device time"),
    ("warp_divergence_pct", "Divergence", "threads that sat out an instruction"),
    ("threads_per_warp", "Threads of 32"),
    ("inst_issue_eff_pct", "Issue slots used"),
    ("branch_resolving_pct", "Waiting for branches"),
    ("wasted_s", "Wasted", "issue slots used for threads that sat out"),
    ("energy_j", "Energy"),
    ("counted_pct", "Counted"),
)


def kernels(trace: Any, *, power: Any = None, sort: str = "time", progress: Progress | None = None) -> Result:
    """Return every kernel, copy and collective by name: calls, seconds, spread, share, and joules if power is known.

    `total_s` sums the calls; `self_s` divides overlapping time evenly, and sums to the busy time. Percentiles are those
    of a call that occurred (nearest rank). `group` numbers kernels that the power samples cannot separate: only the sum
    of a group's joules is known well.

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
    if not devices and timeline.meta.get("profiler_ranges"):
        return list_ranges(recording)
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
        line["error_j"] = None if row is None else row.error_j
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
        facts |= {key: getattr(table, key) for key in ("energy_j", "error_j", "idle_j", "idle_error_j")}
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
    """Return kind, name and durations of every distinct kernel."""
    if not len(lengths):
        return []
    first, which = distinct(kind, name)
    order = np.lexsort((lengths, which))
    count = np.bincount(which)
    begin = np.cumsum(count) - count
    in_order = lengths[order]

    def percentile(percent: int) -> Ints:
        """Return the smallest duration that so many percent of the calls do not exceed."""
        at: Ints = in_order[begin + (count * percent + 99) // 100 - 1]
        return at

    total = np.add.reduceat(in_order, begin)
    figures = {"calls": count, "total_s": total / 1e9, "total_ns": total, "self_s": np.bincount(which, self_s)}
    figures |= {"mean_s": total / count / 1e9, "min_s": in_order[begin] / 1e9, "max_s": percentile(100) / 1e9}
    figures |= {"p50_s": percentile(50) / 1e9, "p99_s": percentile(99) / 1e9}
    values = zip(*(column.tolist() for column in figures.values()), strict=True)
    lines = (dict(zip(figures, row, strict=True)) for row in values)
    return list(zip(kind[first].tolist(), name[first].tolist(), lines, strict=True))


# -- hardware counters ------------------------------------------------------------------------------------------------


def stalls(trace: Any, *, power: Any = None, group_by: str = "kernel", progress: Progress | None = None) -> Result:
    """Return why warps waited, by kernel, operator or region; those that lose most time to stalls first."""
    recording, groups = _open(trace, power, group_by, progress)
    rows: list[dict[str, Any]] = []
    for name, members in groups.members.items():
        mean = CounterMeans(recording.timeline, members, (*_KINDS, *_BESIDE, "stall_reasons"))
        if mean.counted_s == 0.0 or all(mean.value(k) is None for k in _KINDS):
            continue
        kinds = {k: mean.value(k) for k in _KINDS}
        reasons = mean.reasons()
        worst = max(reasons, key=reasons.__getitem__, default=None)
        stalled_pct = sum(v for v in kinds.values() if v is not None)
        row = {**groups.head(name, mean), "stalled_s": mean.seconds * stalled_pct / 100.0, **kinds}
        row |= {"main_reason": worst, "main_reason_pct": reasons.get(worst) if worst else None}
        row |= {"main_reason_means": STALLS[worst].reason if worst in STALLS else None}
        row |= {k: mean.value(k) for k in _BESIDE}
        rows.append(row | {"stall_reasons": dict(sorted(reasons.items(), key=lambda item: -item[1])) or None})
    rows.sort(key=lambda r: -r["stalled_s"])
    missing = f"stall reasons are hardware counters: {COMMAND}" if groups.members else explain_no_device(recording)
    return Result(
        kind="stalls",
        title="Why warps wait",
        columns=(*columns(("name", group_by.capitalize())), *_STALL_COLUMNS),
        rows=rows,
        facts={"group_by": group_by, **groups.overall(_KINDS)},
        notes=recording.notes,
        missing={} if rows else {"stall_reasons": missing},
    )


def divergence(
    trace: Any, *, power: Any = None, threshold: float = 0.2, group_by: str = "kernel", progress: Progress | None = None
) -> Result:
    """Return kernels whose warps run with part of their threads: those above the threshold, most wasted time first.

    `threshold` is a fraction (0.2) or, above 1, percent. Partial warps and early exits count as divergence too.
    """
    if isinstance(threshold, bool) or not 0.0 <= threshold <= 100.0:
        raise ArgumentError(f"threshold={threshold!r}", fix="a fraction (0.2) or percent (20)")
    limit_pct = float(threshold) if threshold > 1.0 else 100.0 * threshold
    recording, groups = _open(trace, power, group_by, progress)
    rows: list[dict[str, Any]] = []
    counted = 0
    for name, members in groups.members.items():
        fields = ("warp_divergence_pct", "inst_issue_eff_pct", "stall_reasons")
        mean = CounterMeans(recording.timeline, members, fields)
        pct, issue_pct = mean.value("warp_divergence_pct"), mean.value("inst_issue_eff_pct")
        counted += pct is not None
        if pct is None or pct <= limit_pct:
            continue
        row = {**groups.head(name, mean), "warp_divergence_pct": pct, "threads_per_warp": 32.0 * (1.0 - pct / 100.0)}
        row |= {"inst_issue_eff_pct": issue_pct, "branch_resolving_pct": mean.reasons().get("branch_resolving")}
        rows.append(row | {"wasted_s": None if issue_pct is None else mean.seconds * pct * issue_pct * 1e-4})
    rows.sort(key=lambda r: -(r["time_s"] * r["warp_divergence_pct"]))
    notes = list(recording.notes)
    if counted and not rows:
        notes.append(f"none of {counted} {group_by}s with counters diverges by more than {limit_pct:.0f}%")
    missing = f"divergence is a hardware counter: {COMMAND}" if groups.members else explain_no_device(recording)
    return Result(
        kind="divergence",
        title="Warp divergence",
        columns=(*columns(("name", group_by.capitalize())), *_DIVERGENCE_COLUMNS),
        rows=rows,
        facts={"threshold_pct": limit_pct, "counted": counted, **groups.overall(("warp_divergence_pct",))},
        notes=notes,
        missing={} if counted else {"divergence": missing},
    )


class CounterMeans:
    """Means of counters over some rows, weighted by time, over those that have counters."""

    def __init__(self, timeline: Timeline, rows: Ints, fields: tuple[str, ...]) -> None:
        seconds = (timeline["end_ns"][rows] - timeline["start_ns"][rows]) * 1e-9
        self.calls, self.seconds, self.counted_s = len(rows), float(seconds.sum()), 0.0
        self.energy_j = None if timeline.energy_j is None else float(np.nansum(timeline.energy_j[rows]))
        self._sums: dict[str, list[float]] = {}
        self._reasons: dict[str, float] = {}
        self._reasons_s = 0.0
        has_counters = np.isin(rows, np.fromiter(timeline.extra, np.int64))  # few rows of many do
        for row, row_s in zip(rows[has_counters].tolist(), seconds[has_counters].tolist(), strict=True):
            extra = timeline.extra[row]
            self._add({f: extra[f] for f in fields if extra.get(f) is not None}, row_s)

    def _add(self, values: Mapping[str, Any], seconds: float) -> None:
        for name, value in values.items():
            if name == "stall_reasons":
                self._reasons_s += seconds
                for reason, pct in value.items():
                    self._reasons[reason] = self._reasons.get(reason, 0.0) + pct * seconds
                continue
            sums = self._sums.setdefault(name, [0.0, 0.0])
            sums[0] += value * seconds
            sums[1] += seconds
        self.counted_s += seconds if values else 0.0

    @property
    def counted_pct(self) -> float:
        return 100.0 * self.counted_s / self.seconds if self.seconds > 0 else 0.0

    def value(self, field: str) -> float | None:
        """Return the mean of a field; None if no call has it."""
        total, seconds = self._sums.get(field, (0.0, 0.0))
        return total / seconds if seconds > 0 else None

    def reasons(self) -> dict[str, float]:
        """Return stall reasons in percent of the life of a warp."""
        return {k: v / self._reasons_s for k, v in self._reasons.items()} if self._reasons_s > 0 else {}


class _RowGroups:
    """The kernels and collectives of a timeline by kernel, operator or region."""

    def __init__(self, timeline: Timeline, by: str) -> None:
        self._timeline = timeline
        self._rows = rows = timeline.rows("kernel", "collective")
        self.total_s = float((timeline["end_ns"][rows] - timeline["start_ns"][rows]).sum()) * 1e-9
        links = timeline.linked
        if by == "kernel":
            numbers, names = timeline["name"][rows], timeline.names
        elif by == "op":
            op = links.op[rows]
            numbers = np.where(op == NONE, NONE, timeline["name"][op])
            names = [*timeline.names, "(no operator)"]  # the last one is for NONE
        else:
            numbers, paths = region_paths(timeline, rows)
            names = ["/".join(path) or "(no region)" for path in paths]
        order = np.argsort(numbers, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else []
        groups: dict[str, list[Ints]] = {}
        for part in sorted(parts, key=lambda places: int(places[0])):
            groups.setdefault(names[int(numbers[part[0]])], []).append(rows[part])
        self.members = {name: np.sort(np.concatenate(members)) for name, members in groups.items()}

    def head(self, name: str, mean: CounterMeans) -> dict[str, Any]:
        """Return what the rows of both analyses have in common."""
        share_pct = 100.0 * mean.seconds / self.total_s if self.total_s > 0 else None
        head = {"name": name, "calls": mean.calls, "time_s": mean.seconds, "share_pct": share_pct}
        return head | {"energy_j": mean.energy_j, "counted_pct": mean.counted_pct}

    def overall(self, fields: tuple[str, ...]) -> dict[str, Any]:
        mean = CounterMeans(self._timeline, self._rows, fields)
        return {"time_s": self.total_s, "counted_pct": mean.counted_pct, **{f: mean.value(f) for f in fields}}


def _open(trace: Any, power: Any, by: str, progress: Progress | None) -> tuple[Recording, _RowGroups]:
    """Return the trace with its joules, and its rows grouped as asked for."""
    check_choice("group_by", by, GROUPS)
    recording = open_recording(trace, power=power, progress=progress)
    recording.find_energy()
    return recording, _RowGroups(recording.timeline, by)
