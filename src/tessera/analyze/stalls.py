"""`stalls` and `divergence`: what warps waited for and how many of their threads took part, from hardware counters.

Only counters know: without them there are no rows, and `missing` says how to get them. Percentages are means weighted
by the time of each call, over the calls that have counters; `counted_pct` says how much of the time that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ArgumentError, did_you_mean
from ..profile.counters.nvidia import STALLS
from ..timeline.columns import NONE, Ints, Timeline
from .devices import no_device
from .host_gaps import region_paths
from .result import Column, Result
from .source import Progress, Source, open_source

GROUPS = ("kernel", "op", "region")
COMMAND = "tessera run --counters script.py"
_KINDS = ("memory_stall_pct", "dependency_stall_pct", "structural_stall_pct")
_BESIDE = ("inst_issue_eff_pct", "sm_occupancy", "warps_eligible", "l2_hit_rate")
_NO_DIVERGENCE = f"divergence is a hardware counter: {COMMAND}"
_NO_COUNTERS = f"stall reasons are hardware counters: {COMMAND}"


def stalls(trace: Any, *, power: Any = None, group_by: str = "kernel", progress: Progress | None = None) -> Result:
    """Why warps waited, by kernel, operator or region; those that lose most time to stalls first.

    `stalled_s` is the time of the row times the share of warp cycles that were stalled.
    """
    source = _opened(trace, power, group_by, progress)
    timeline = source.timeline
    rows, names, total_s = _groups(timeline, group_by)
    found: list[dict[str, Any]] = []
    for name, members in names.items():
        mean = Weighted(timeline, rows[members], (*_KINDS, *_BESIDE, "stall_reasons"))
        if mean.counted_s == 0.0 or all(mean.value(k) is None for k in _KINDS):
            continue
        kinds = {k: mean.value(k) for k in _KINDS}
        reasons = mean.reasons()
        worst = max(reasons, key=reasons.__getitem__, default=None)
        stalled_pct = sum(v for v in kinds.values() if v is not None)
        found.append({
            "name": name, "calls": len(members), "time_s": mean.seconds, "share_pct": _share(mean.seconds, total_s),
            "stalled_s": mean.seconds * stalled_pct / 100.0, **kinds, "main_reason": worst,
            "main_reason_pct": reasons.get(worst) if worst else None,
            "main_reason_means": STALLS[worst].reason if worst in STALLS else None,
            **{k: mean.value(k) for k in _BESIDE}, "energy_j": mean.joules, "counted_pct": mean.counted_pct,
            "stall_reasons": dict(sorted(reasons.items(), key=lambda item: -item[1])),
        })  # fmt: skip
    found.sort(key=lambda r: -r["stalled_s"])
    columns = (
        Column(key="name", title=group_by.capitalize()), Column(key="calls", title="Calls"),
        Column(key="time_s", title="Time", unit="s"), Column(key="share_pct", title="Of device time", unit="%"),
        Column(key="stalled_s", title="Stalled", unit="s", help="time times the stalled share of warp cycles"),
        Column(key="memory_stall_pct", title="Memory", unit="%"),
        Column(key="dependency_stall_pct", title="Dependency", unit="%"),
        Column(key="structural_stall_pct", title="Structural", unit="%"),
        Column(key="main_reason", title="Main reason"), Column(key="main_reason_pct", title="Its share", unit="%"),
        Column(key="main_reason_means", title="Meaning"),
        Column(key="inst_issue_eff_pct", title="Issue slots used", unit="%"),
        Column(key="sm_occupancy", title="Occupancy", unit="%"),
        Column(key="warps_eligible", title="Eligible warps", help="per SM and cycle"),
        Column(key="l2_hit_rate", title="L2 hits", unit="%"), Column(key="energy_j", title="Energy", unit="J"),
        Column(key="counted_pct", title="Counted", unit="%", help="share of the time that has counters"),
        Column(key="stall_reasons", title="Reasons", unit="%"),
    )  # fmt: skip
    facts = {"group_by": group_by, **_overall(timeline, total_s, _KINDS)}
    return Result(
        kind="stalls", title="Why warps wait", columns=columns, rows=found, facts=facts, notes=source.notes,
        missing={} if found else {"stall_reasons": _NO_COUNTERS if len(rows) else no_device(source)},
    )  # fmt: skip


def divergence(
    trace: Any, *, power: Any = None, threshold: float = 0.2, group_by: str = "kernel", progress: Progress | None = None
) -> Result:
    """Kernels whose warps run with part of their threads: those above the threshold, most wasted time first.

    `threshold` is a fraction (0.2) or, above 1, percent. Partial warps and early exits count as divergence too.
    """
    limit_pct = _percent(threshold)
    source = _opened(trace, power, group_by, progress)
    timeline = source.timeline
    rows, names, total_s = _groups(timeline, group_by)
    found: list[dict[str, Any]] = []
    counted = 0
    for name, members in names.items():
        mean = Weighted(timeline, rows[members], ("warp_divergence_pct", "inst_issue_eff_pct", "stall_reasons"))
        pct, issue_pct = mean.value("warp_divergence_pct"), mean.value("inst_issue_eff_pct")
        if pct is None:
            continue
        counted += 1
        if pct <= limit_pct:
            continue
        found.append({
            "name": name, "calls": len(members), "time_s": mean.seconds, "share_pct": _share(mean.seconds, total_s),
            "warp_divergence_pct": pct, "threads_per_warp": 32.0 * (1.0 - pct / 100.0), "inst_issue_eff_pct": issue_pct,
            "branch_resolving_pct": mean.reasons().get("branch_resolving"),
            "wasted_s": None if issue_pct is None else mean.seconds * pct * issue_pct * 1e-4,
            "energy_j": mean.joules, "counted_pct": mean.counted_pct,
        })  # fmt: skip
    found.sort(key=lambda r: -(r["time_s"] * r["warp_divergence_pct"]))
    columns = (
        Column(key="name", title=group_by.capitalize()), Column(key="calls", title="Calls"),
        Column(key="time_s", title="Time", unit="s"), Column(key="share_pct", title="Of device time", unit="%"),
        Column(key="warp_divergence_pct", title="Divergence", unit="%", help="threads that sat out an instruction"),
        Column(key="threads_per_warp", title="Threads of 32"),
        Column(key="inst_issue_eff_pct", title="Issue slots used", unit="%"),
        Column(key="branch_resolving_pct", title="Waiting for branches", unit="%"),
        Column(key="wasted_s", title="Wasted", unit="s", help="issue slots used for threads that sat out"),
        Column(key="energy_j", title="Energy", unit="J"), Column(key="counted_pct", title="Counted", unit="%"),
    )  # fmt: skip
    notes = list(source.notes)
    if counted and not found:
        notes.append(f"none of {counted} {group_by}s with counters diverges by more than {limit_pct:.0f}%")
    facts = {"threshold_pct": limit_pct, "counted": counted, **_overall(timeline, total_s, ("warp_divergence_pct",))}
    return Result(
        kind="divergence", title="Warp divergence", columns=columns, rows=found, facts=facts, notes=notes,
        missing={} if counted else {"divergence": _NO_DIVERGENCE if len(rows) else no_device(source)},
    )  # fmt: skip


class Weighted:
    """Counters of some rows: means weighted by time over those that have them."""

    def __init__(self, timeline: Timeline, rows: Ints, fields: tuple[str, ...]) -> None:
        seconds = (timeline["end_ns"][rows] - timeline["start_ns"][rows]) * 1e-9
        self.seconds = float(seconds.sum())
        self.counted_s = 0.0
        self._sums: dict[str, list[float]] = {}
        self._reasons: dict[str, float] = {}
        self._reasons_s = 0.0
        self.joules: float | None = None
        if timeline.energy_j is not None:
            self.joules = float(np.nansum(timeline.energy_j[rows]))
        for row, lasted_s in zip(rows.tolist(), seconds.tolist(), strict=True):
            extra = timeline.extra.get(row)
            if extra:
                self._add(extra, lasted_s, fields)

    def _add(self, extra: Mapping[str, Any], seconds: float, fields: tuple[str, ...]) -> None:
        known = False
        for name in fields:
            value = extra.get(name)
            if value is None:
                continue
            known = True
            if name == "stall_reasons":
                self._reasons_s += seconds
                for reason, pct in value.items():
                    self._reasons[reason] = self._reasons.get(reason, 0.0) + pct * seconds
                continue
            sums = self._sums.setdefault(name, [0.0, 0.0])
            sums[0] += value * seconds
            sums[1] += seconds
        self.counted_s += seconds if known else 0.0

    @property
    def counted_pct(self) -> float:
        """The share of the time with counters."""
        return 100.0 * self.counted_s / self.seconds if self.seconds > 0 else 0.0

    def value(self, field: str) -> float | None:
        """The mean of a field; None where no call has it."""
        total, seconds = self._sums.get(field, (0.0, 0.0))
        return total / seconds if seconds > 0 else None

    def reasons(self) -> dict[str, float]:
        """Stall reasons in percent of the life of a warp."""
        return {k: v / self._reasons_s for k, v in self._reasons.items()} if self._reasons_s > 0 else {}


def _opened(trace: Any, power: Any, by: str, progress: Progress | None) -> Source:
    """The trace with its joules, for rows of a kind that there is."""
    if by not in GROUPS:
        raise ArgumentError(f"group_by={by!r}{did_you_mean(by, GROUPS)}", fix=f"one of: {', '.join(GROUPS)}")
    source = open_source(trace, power=power, progress=progress)
    source.energy()
    return source


def _groups(timeline: Timeline, by: str) -> tuple[Ints, dict[str, Ints], float]:
    """Device rows, the places of each group's among them, and the device's seconds."""
    rows = timeline.rows("kernel", "collective")
    total_s = float((timeline["end_ns"][rows] - timeline["start_ns"][rows]).sum()) * 1e-9
    links = timeline.linked
    if by == "kernel":
        keys = [timeline.names[i] for i in timeline["name"][rows].tolist()]
    elif by == "op":
        keys = [timeline.name(i) if i != NONE else "(no operator)" for i in links.op[rows].tolist()]
    else:
        numbers, paths = region_paths(timeline, rows)
        keys = ["/".join(paths[i]) or "(no region)" for i in numbers.tolist()]
    groups: dict[str, list[int]] = {}
    for place, key in enumerate(keys):
        groups.setdefault(key, []).append(place)
    return rows, {k: np.array(v, np.int64) for k, v in groups.items()}, total_s


def _overall(timeline: Timeline, total_s: float, fields: tuple[str, ...]) -> dict[str, Any]:
    mean = Weighted(timeline, timeline.rows("kernel", "collective"), fields)
    return {"time_s": total_s, "counted_pct": mean.counted_pct, **{f: mean.value(f) for f in fields}}


def _share(seconds: float, total_s: float) -> float | None:
    return 100.0 * seconds / total_s if total_s > 0 else None


def _percent(threshold: float) -> float:
    if isinstance(threshold, bool) or not 0.0 <= threshold <= 100.0:
        raise ArgumentError(f"threshold={threshold!r}", fix="a fraction (0.2) or percent (20)")
    return float(threshold) if threshold > 1.0 else 100.0 * threshold
