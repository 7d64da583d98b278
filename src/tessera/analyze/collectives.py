"""Collectives: bytes, time, bandwidth, what hid behind kernels, and which rank the others waited for.

::

    algorithm bandwidth = bytes / time            bus bandwidth = algorithm bandwidth * factor(kind, ranks)

The bus bandwidth is what the links carry, comparable between kinds and numbers of ranks (nccl-tests' PERFORMANCE.md).
If several ranks recorded a collective, its time is from the last rank's start to the last rank's end: before that, the
others wait and nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..profile.open_recording import Progress, open_recording
from ..profile.ranks.align_gloo import gloo_groups
from ..profile.ranks.clocks import Offset
from ..profile.ranks.collectives import Meeting, describe, host_rows, measure_overlap, meetings, summarize, total_wait_s
from ..recording import Recording
from ..timeline import Timeline
from ..timeline.columns import NONE
from ..timeline.link import Step
from ..timeline.transfers import collective_algorithm
from ..units import format_bytes
from .devices import explain_no_device, list_devices, split_ranks
from .result import Result, columns

NEEDS_HOSTS = 'which hosts the ranks ran on is not in the trace: merge .tessera runs, or traces with "host_name"'
_HALF = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
_WHOLE = ("broadcast", "reduce", "send", "recv", "send_recv")
_COLUMNS = columns(
    ("start_s", "at", "since the start of the trace"),
    ("name", "collective", "what it is, and its process group"),
    ("ranks", "ranks"),
    ("bytes", "bytes"),
    ("time_s", "time"),
    ("bytes_per_s", "bandwidth", "bytes / time: what nccl-tests calls algorithm bandwidth"),
    ("bus_bytes_per_s", "bus", "bandwidth that the links carry, comparable between kinds and numbers of ranks"),
    ("overlap_pct", "overlaps compute"),
    ("skew_s", "skew"),
    ("straggler", "last rank"),
    ("wait_s", "waited"),
    ("path", "path"),
)
_OF_SEVERAL_RANKS = ("skew_s", "straggler", "wait_s")


def bus_factor(kind: str | None, ranks: int | None) -> float | None:
    """Return the factor from algorithm to bus bandwidth; None if it is not defined."""
    if kind in _WHOLE:
        return 1.0
    if not ranks or ranks < 2:
        return None
    if kind == "all_reduce":
        return 2.0 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if kind in _HALF else None


def collectives(trace: Any, *, power: Any = None, min_bytes: int = 0, progress: Progress | None = None) -> Result:
    """Return each collective of at least `min_bytes`; `facts` sums all: `by_kind`, `by_group`, `by_step`.

    In a folder of ranks, one row is one collective on all of them: `skew_s` is the latest start less the earliest,
    `straggler` the rank that came last (None if the clocks are not known so well), `wait_s` what the others waited.
    `facts["across_ranks"]["waits_s"]` sums for each rank how long it waited for which rank.

    >>> analyze.collectives("ranks/", min_bytes=1 << 20).facts["by_kind"]["all_reduce"]["bus_bytes_per_s"]
    """
    if min_bytes < 0:
        raise ArgumentError(f"min_bytes={min_bytes} is negative", fix="min_bytes=0 for all of them")
    recording = open_recording(trace, power=power, progress=progress)
    timeline = recording.timeline
    met = find_meetings(recording)
    overlaps = measure_overlap(timeline, met)
    rows = list_collectives(recording, met, overlaps)
    listed = [r for r in rows if not min_bytes or (r["bytes"] is not None and r["bytes"] >= min_bytes)]
    unsized = sum(r["bytes"] is None and r["kind"] != "barrier" for r in rows)
    notes, missing = list(recording.notes), {}
    if smaller := len(rows) - len(listed) - (unsized if min_bytes else 0):
        size = format_bytes(min_bytes)
        notes.append(
            f"{smaller} collectives under {size} are not listed (--min-bytes 0 lists them); the totals include them"
        )
    if unsized:
        missing["bytes"] = f"{unsized} of {len(rows)} collectives do not record their bytes: PyTorch >= 2.4 does"
    if any(r["on"] == "host" and r["skew_s"] is None for r in rows):
        notes.append("what ran on the host of one rank alone is what a thread took, waiting for others included")
    if not rows:
        has_devices = bool(list_devices(timeline))
        missing["collectives"] = "the trace has no collectives" if has_devices else explain_no_device(recording)
    elif all(r["path"] is None for r in rows):
        missing["path"] = NEEDS_HOSTS
    if rows and not met:
        missing["skew_s"] = "skew and stragglers need the traces of two or more ranks: give their folder"
    facts: dict[str, Any] = {"count": len(rows), "by_kind": _sum_by_kind(rows, met)}
    facts |= {"by_group": sum_by_group(rows, met), "by_step": sum_by_step(timeline, met, overlaps)}
    if met:
        facts["across_ranks"] = summarize(met, overlaps)
    return Result(
        kind="collectives",
        title=f"Collectives of {recording.facts.name}",
        columns=[c for c in _COLUMNS if met or c.key not in _OF_SEVERAL_RANKS],
        rows=listed,
        facts=facts,
        notes=notes,
        missing=missing,
    )


def find_meetings(recording: Recording) -> list[Meeting]:
    """Return the collectives that two or more ranks recorded; `rows` are those of the source's timeline."""
    timelines = split_ranks(recording)
    if len(timelines) < 2:
        return []
    ranks = {m.get("rank"): m for m in recording.timeline.meta.get("ranks") or () if isinstance(m, Mapping)}
    # The times are already on one clock, so only the uncertainty of the offsets matters.
    offsets = [
        Offset(rank=int(t.rank or 0), error_ns=ranks.get(t.rank, {}).get("error_ns"), source="merged")
        for t in timelines
    ]
    counts = [len(t) for t in timelines]
    return meetings(timelines, offsets, [sum(counts[:i]) for i in range(len(counts))])


def _hosts(recording: Recording) -> dict[int, str]:
    """Return the host of each rank, if the recordings name it."""
    ranks = recording.timeline.meta.get("ranks") or ()
    return {int(m["rank"]): m["host"] for m in ranks if isinstance(m, Mapping) and m.get("host")}


def list_collectives(
    recording: Recording, met: Sequence[Meeting], overlaps: Mapping[int, float]
) -> list[dict[str, Any]]:
    """Return one row for each meeting, and for each collective that only one rank has, in time order."""
    timeline, hosts = recording.timeline, _hosts(recording)
    on_host = set(host_rows(timeline).tolist())
    single = (set(timeline.rows("collective").tolist()) | on_host) - {r for m in met for r in m.rows}
    groups = gloo_groups(timeline)
    # with several groups, nobody knows which one a row is of
    only = len(next(iter(groups))) if len(groups) == 1 else None
    rows = []
    for m in met:
        launch, first = describe(timeline, m.rows[0]), m.rows[0]
        ns = max(m.end_ns - m.ready_ns, 0)
        shares = [overlaps[r] for r in m.rows if r in overlaps]
        row = _row(timeline, m.start_ns, m.kind, m.bytes, ns, launch.group_size or len(m.ranks))
        row |= {"group": m.group, "overlap_pct": sum(shares) / len(shares) if shares else None}
        row |= {"skew_s": m.skew_s, "straggler": m.straggler, "wait_s": m.wait_s, "recorded_by": list(m.ranks)}
        row |= {"path": _path(m.ranks, launch.group_size, hosts), "dtype": launch.dtype}
        rows.append(row | _describe_rows(timeline, m.rows, m.kind, m.group, first in on_host))
    for number in sorted(single):
        launch = describe(timeline, number)
        start_ns, end_ns, rank = (int(timeline[c][number]) for c in ("start_ns", "end_ns", "rank"))
        ranks = launch.group_size or (only if number in on_host else None)
        row = _row(timeline, start_ns, launch.collective_type, launch.collective_bytes, end_ns - start_ns, ranks)
        group = launch.group_label or launch.group
        row |= {"group": group, "overlap_pct": overlaps.get(number), "dtype": launch.dtype}
        row |= _describe_rows(timeline, [number], launch.collective_type, group, number in on_host)
        rows.append(row | {"recorded_by": [] if rank == NONE else [rank]})
    return sorted(rows, key=lambda r: r["start_s"])


def _describe_rows(
    timeline: Timeline, rows: Sequence[int], kind: str | None, group: str | None, on_host: bool
) -> dict[str, Any]:
    """Return where a collective ran, by which algorithm, and the joules of its rows if they were attributed."""
    found: dict[str, Any] = {"on": "host" if on_host else "device", "name": name_collective(kind, group)}
    found["algorithm"] = None if on_host else collective_algorithm(timeline.name(rows[0]))
    spent, unsure = timeline.energy_j, timeline.error_j
    if spent is not None and unsure is not None and not np.isnan(spent[list(rows)]).all():
        # The rows are of one class: their errors have common causes, and add up as the joules do.
        found |= {"energy_j": float(np.nansum(spent[list(rows)])), "error_j": float(np.nansum(unsure[list(rows)]))}
    return found


def name_collective(kind: str | None, group: str | None) -> str:
    """Return the name of a collective with its process group, AllReduce[dp]; without the group if it is unknown."""
    name = "".join(word.capitalize() for word in (kind or "other").split("_"))
    return f"{name}[{group}]" if group else name


def _row(
    timeline: Timeline, start_ns: int, kind: str | None, size: int | None, ns: int, ranks: int | None
) -> dict[str, Any]:
    """Return a row with its bandwidths; figures that only some collectives have may be None."""
    rate = size / ns * 1e9 if size is not None and ns > 0 else None
    factor = bus_factor(kind, ranks)
    bus = None if rate is None or factor is None else rate * factor
    row: dict[str, Any] = {"kind": kind or "other", "ranks": ranks, "bytes": size, "time_s": ns / 1e9, "ns": ns}
    row |= {"bytes_per_s": rate, "bus_bytes_per_s": bus, "start_s": (start_ns - timeline.start_ns) / 1e9}
    return row | dict.fromkeys(("group", "overlap_pct", *_OF_SEVERAL_RANKS, "path", "dtype", "energy_j", "error_j"))


def _path(ranks: Sequence[int], size: int | None, hosts: Mapping[int, str]) -> str | None:
    """Return whether a group stays on one host; None if a member's host is not known."""
    used = {hosts[r] for r in ranks if r in hosts}
    if len(used) > 1:
        return "between nodes"
    complete = len(ranks) == (size or len(ranks)) and all(r in hosts for r in ranks)
    return "within a node" if used and complete else None


def _sum_by_kind(rows: Sequence[Mapping[str, Any]], met: Sequence[Meeting]) -> dict[str, dict[str, Any]]:
    sums: dict[str, dict[str, Any]] = {}
    for kind in sorted({r["kind"] for r in rows}):
        same = [r for r in rows if r["kind"] == kind]
        sized = [r for r in same if r["bytes_per_s"] is not None]
        ns, size = sum(r["ns"] for r in sized), sum(r["bytes"] for r in sized)
        bus = _mean_by_time(same, "bus_bytes_per_s")
        sums[kind] = {"count": len(same), "bytes": size if sized else None, "time_s": sum(r["ns"] for r in same) / 1e9}
        sums[kind] |= {"bytes_per_s": size / ns * 1e9 if ns else None, "bus_bytes_per_s": bus}
        sums[kind] |= {"overlap_pct": _mean_by_time(same, "overlap_pct")}
        sums[kind] |= {"wait_s": total_wait_s([m for m in met if (m.kind or "other") == kind])}
    return sums


def sum_by_group(rows: Sequence[Mapping[str, Any]], met: Sequence[Meeting]) -> list[dict[str, Any]]:
    """One row for each kind and group, most time first. `latency_s` and `skew_s` are medians, `time_s` the sum."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["name"], []).append(row)
    sums = []
    for name, same in groups.items():
        own = [m for m in met if name_collective(m.kind, m.group) == name]
        sums.append(_sum_group(name, same) | {"wait_s": total_wait_s(own) if own else None})
    return sorted(sums, key=lambda r: -r["time_s"])


def _sum_group(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first, sized = rows[0], [r for r in rows if r["bytes_per_s"] is not None]
    ns, moved = sum(r["ns"] for r in sized), sum(r["bytes"] for r in sized)
    skews = [r["skew_s"] for r in rows if r["skew_s"] is not None]
    known = [r for r in rows if r["energy_j"] is not None]
    return {
        "name": name, "kind": first["kind"], "group": first["group"], "count": len(rows), "met": len(skews),
        "ranks": max((r["ranks"] for r in rows if r["ranks"]), default=None),
        "time_s": sum(r["ns"] for r in rows) * 1e-9, "latency_s": float(np.median([r["time_s"] for r in rows])),
        "bytes": moved if sized else None, "bytes_per_s": moved / ns * 1e9 if ns else None,
        "bus_bytes_per_s": _mean_by_time(rows, "bus_bytes_per_s"),
        "path": _join_words(r["path"] for r in rows), "algorithm": _join_words(r["algorithm"] for r in rows),
        "skew_s": float(np.median(skews)) if skews else None, "worst_skew_s": max(skews, default=None),
        "overlap_pct": _mean_by_time(rows, "overlap_pct"),
        "energy_j": sum(r["energy_j"] for r in known) if known else None,
        "error_j": sum(r["error_j"] for r in known) if known else None,
    }  # fmt: skip


def sum_by_step(timeline: Timeline, met: Sequence[Meeting], overlaps: Mapping[int, float]) -> list[dict[str, Any]]:
    """Return for each step, summed over ranks, how long its collectives moved bytes, and how much compute hid."""
    ready = {row: m.ready_ns for m in met for row in m.rows}
    sums: dict[str, dict[str, Any]] = {}
    steps: dict[int, list[Step]] = {}
    for step in timeline.linked.steps:
        sums.setdefault(step.name, {"step": step.name, "calls": 0, "time_s": 0.0, "hidden_s": 0.0})
        steps.setdefault(NONE if step.row == NONE else int(timeline["rank"][step.row]), []).append(step)
    starts = {rank: np.array([s.start_ns for s in own]) for rank, own in steps.items()}
    for row, share in overlaps.items():
        rank, start_ns, end_ns = (int(timeline[c][row]) for c in ("rank", "start_ns", "end_ns"))
        own = steps.get(rank, [])
        at = int(np.searchsorted(starts[rank], start_ns, side="right")) - 1 if own else -1
        if at < 0 or start_ns >= own[at].end_ns:
            continue
        seconds = (end_ns - max(start_ns, min(ready.get(row, start_ns), end_ns))) * 1e-9
        total = sums[own[at].name]
        total["calls"] += 1
        total["time_s"] += seconds
        total["hidden_s"] += seconds * share / 100.0
    found = [s for s in sums.values() if s["calls"]]
    return [s | {"overlap_pct": 100.0 * s["hidden_s"] / s["time_s"] if s["time_s"] > 0 else None} for s in found]


def _join_words(words: Iterable[str | None]) -> str | None:
    """Return each word once, joined; None if there is none."""
    return ", ".join(dict.fromkeys(word for word in words if word)) or None


def _mean_by_time(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Return the mean of a figure weighted by time, over the rows that have it."""
    has = [r for r in rows if r[key] is not None]
    ns = sum(r["ns"] for r in has)
    return sum(r[key] * r["ns"] for r in has) / ns if ns else None
