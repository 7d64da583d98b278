"""Where the time of each device went: computing, communicating, copying, idle and why; and what kernels hid.

::

    kernels       ──████████──────██████──────────────────     parts: compute │ compute + communication │ communication
    collectives   ──────██████████────────────────────────            (alone: exposed) │ idle, ...
    copies        ────────────────────────██──────────────     They are disjoint and sum to the span, to the nanosecond.

A device's span is from the start of its first row to the end of its last. Idle time is classified by the launch of the
row that ended it:

* **host-bound**: the launch call was made, or was still running, after the device ran out of work.
* **kernel gap**: the launch was done before, and the gap is short: the device going from one kernel to the next.
* **waiting**: the rest. The launch was done long before (another stream, another rank); or the host itself waited: in
  a synchronising call, for its data loader, or without any operator or call for more than a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from ..attribute.table import EnergyTable
from ..errors import ArgumentError
from ..notes import kind_of
from ..profile.open_recording import Progress, open_recording
from ..record import CODE
from ..timeline import Timeline
from ..timeline.columns import NONE, Ints
from ..timeline.intervals import EMPTY, Spans, covered_ns, difference, intersection, union
from .devices import (
    ACTIVITIES,
    WHERE,
    RankDevice,
    busy_spans,
    explain_no_device,
    explain_no_power,
    find_launches,
    find_twins,
    group_by_launch,
    list_devices,
    whole_span,
)
from .result import Result, columns
from .slowdown import slowdown_of

KERNEL_GAP_S = 10e-6
"""The longest gap, in seconds, between two kernels that were both queued: a launch takes 1-3 us, one with dependencies
up to 10 us.
"""
SILENT_NS = 1_000_000
"""Nanoseconds: a host without an operator or call for longer than this is not launching: it sleeps, reads data, or
waits.
"""
OUTSIDE = "outside first to last kernel"
IDLE = ("idle: host-bound", "idle: kernel gap", "idle: waiting")
_BLOCK = 1 << 16


# -- breakdown ------------------------------------------------------------------------------------------------------


def breakdown(
    trace: Any,
    *,
    power: Any = None,
    by: str | None = None,
    kernel_gap_s: float = KERNEL_GAP_S,
    progress: Progress | None = None,
) -> Result:
    """Return seconds, percent and joules of computing, communicating, copying and idling, by device.

    `by="step"` has them for each step too: a step begins on a device with the first row that was launched in it.
    `kernel_gap_s` is how long a gap between two queued kernels may be.

    >>> analyze.breakdown("trace.json.gz").facts["exposed_communication_s"]
    """
    if by not in (None, "device", "step"):
        raise ArgumentError(f"there is no breakdown by {by!r}", fix="use 'device' or 'step'")
    recording = open_recording(trace, power=power, progress=progress)
    timeline, table = recording.timeline, recording.find_energy()
    gap_ns = max(0, round(kernel_gap_s * 1e9))
    splits = [_split(timeline, device, gap_ns) for device in list_devices(timeline)]
    joules = _PartJoules(timeline, table, splits) if table is not None else None
    rows: list[dict[str, Any]] = []
    for split in splits:
        windows = _windows(timeline, split) if by == "step" else [(None, split.start_ns, split.end_ns)]
        for step, start_ns, end_ns in windows:
            rows += [{**split.device.ids, "step": step, **r} for r in _parts(split, step, start_ns, end_ns, joules)]
        if joules is not None and joules.outside_ns(split):
            rows.append({**split.device.ids, "step": None, **joules.outside(split)})
    if len(splits) > 1 and by != "step":
        rows += _sum_devices(rows)
    notes = [note for note in recording.notes if splits or kind_of(note) != "no_accelerator"]
    missing = {}
    if not splits:
        missing["device"] = explain_no_device(recording)
    else:
        if (tracing := slowdown_of(recording, table)) is not None and tracing.text:
            notes.append(tracing.text)
        if unlaunched := sum(split.unlaunched for split in splits):
            notes.append(
                f"{unlaunched} gaps end with a row whose launch was not recorded: they count as waiting when long"
            )
        if table is not None:
            notes.append("idle joules are divided by time; the parts sum to the energy of the run")
        else:
            missing["energy"] = explain_no_power(recording)
    if memsets := len(timeline.rows("memset")):
        notes.append(f"copies contain {memsets:,} memsets")
    shown = [("step", "step")] if by == "step" else []
    shown += [("part", "part"), ("time_s", "time"), ("pct", "of span")]
    shown += [("energy_j", "energy"), ("error_j", "±"), ("power_w", "power")] if table is not None else []
    return Result(
        kind="breakdown",
        title=f"Where the time of {recording.facts.name} went",
        columns=[*WHERE, *columns(*shown)],
        rows=rows,
        facts=_facts(splits, table if splits else None),
        notes=notes,
        missing=missing,
    )


@dataclass(slots=True)
class _Split:
    """The disjoint parts of a device's time, each as spans."""

    device: RankDevice
    start_ns: int
    end_ns: int
    parts: dict[str, Spans]
    activities: dict[str, Spans]
    unlaunched: int


def _split(timeline: Timeline, device: RankDevice, gap_ns: int) -> _Split:
    start_ns, end_ns = whole_span(timeline, device.rows)
    whole = union(np.array([start_ns]), np.array([end_ns]))
    activities = {name: busy_spans(timeline, device.rows, *kinds) for name, kinds in ACTIVITIES.items()}
    parts: dict[str, Spans] = {}
    for used in product((True, False), repeat=len(activities)):
        if not any(used):
            continue
        inside = whole
        for spans, use in zip(activities.values(), used, strict=True):
            inside = intersection(inside, spans) if use else difference(inside, spans)
        parts[" + ".join(name for name, use in zip(activities, used, strict=True) if use)] = inside
    idle = difference(whole, busy_spans(timeline, device.rows))
    kinds, unlaunched = _classify_idle(timeline, device, idle, gap_ns)
    return _Split(device, start_ns, end_ns, parts | kinds, activities, unlaunched)


def _classify_idle(timeline: Timeline, device: RankDevice, idle: Spans, gap_ns: int) -> tuple[dict[str, Spans], int]:
    """Return idle stretches by reason, and how many end with a row whose launch was not recorded."""
    order = device.rows[np.argsort(timeline["start_ns"][device.rows], kind="stable")]
    following = order[np.searchsorted(timeline["start_ns"][order], idle.end_ns, side="left")]
    traced = find_twins(timeline, following)
    looked = _move_gaps(timeline, order, following, traced, idle)
    call = find_launches(timeline, traced)
    is_launched = call != NONE
    launch_end = np.where(is_launched, timeline["end_ns"][call], looked.start_ns)
    late = launch_end > looked.start_ns
    # A row that starts long after its launch has waited for something else meanwhile.
    waited_too = late & (looked.end_ns - launch_end > gap_ns)
    until = np.where(waited_too, launch_end, np.where(late, looked.end_ns, looked.start_ns))
    threads = np.where(is_launched, timeline["thread"][call], NONE)
    host = _host_bound(timeline, device.rank, looked.start_ns, until, threads)
    if looked is not idle:
        share = covered_ns(host, looked.start_ns, until) / (looked.end_ns - looked.start_ns)
        host = union(idle.end_ns - (share * (idle.end_ns - idle.start_ns)).astype(np.int64), idle.end_ns)
    short = ~late & (idle.end_ns - idle.start_ns <= gap_ns)
    gaps = Spans(idle.start_ns[short], idle.end_ns[short])
    waiting = difference(difference(idle, gaps), host)
    return dict(zip(IDLE, (host, gaps, waiting), strict=True)), int((~is_launched).sum())


def _move_gaps(timeline: Timeline, order: Ints, following: Ints, traced: Ints, idle: Spans) -> Spans:
    """Move gaps of untraced steps to before the traced kernels that end them; other gaps stay."""
    start_ns = timeline["start_ns"][traced]
    off_ns = start_ns - timeline["start_ns"][following]
    if not off_ns.any():
        return idle
    reached = np.maximum.accumulate(timeline["end_ns"][order])
    place = np.searchsorted(timeline["start_ns"][order], start_ns, side="left")
    begun = np.minimum(reached[np.maximum(place - 1, 0)], start_ns)
    is_gap = (off_ns != 0) & (place > 0) & (begun < start_ns)
    return Spans(np.where(is_gap, begun, idle.start_ns + off_ns), idle.end_ns + off_ns)


def _host_bound(timeline: Timeline, rank: int, starts: Ints, ends: Ints, threads: Ints) -> Spans:
    """Return the stretches in which the host was late, without the time in which the host itself waited."""
    late = ends > starts
    if not late.any():
        return EMPTY
    names, rows = timeline.names, timeline.rows("runtime", "region", "op")
    waits_by_name = np.array(["ynchronize" in n or "DataLoader" in n for n in names] or [False])
    waits = rows[waits_by_name[timeline["name"][rows]] & (timeline["rank"][rows] == rank)]
    silent = _silent_spans(timeline, rank)
    parts = []
    for thread in np.unique(threads[late]).tolist():
        chosen = late & (threads == thread)
        waited = busy_spans(timeline, waits[timeline["thread"][waits] == thread])
        parts.append(difference(difference(union(starts[chosen], ends[chosen]), waited), silent))
    return union(np.concatenate([p.start_ns for p in parts]), np.concatenate([p.end_ns for p in parts]))


def _silent_spans(timeline: Timeline, rank: int) -> Spans:
    """Return stretches of more than `SILENT_NS` in which the host of a rank ran neither an operator nor a call."""
    kinds = [CODE["op"], CODE["runtime"], CODE["graph_launch"]]
    python, parts = timeline.python_names, []
    # in blocks, because there may be millions of operators, and few such stretches
    for begin in range(0, len(timeline), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        active = np.isin(timeline["kind"][block], kinds) & (timeline["rank"][block] == rank)
        active &= ~np.isin(timeline["name"][block], python)
        # Each row is extended by SILENT_NS, so that rows without silence between them become one span.
        parts.append(union(timeline["start_ns"][block][active], timeline["end_ns"][block][active] + SILENT_NS))
    busy = union(np.concatenate([p.start_ns for p in parts]), np.concatenate([p.end_ns for p in parts]))
    return Spans(busy.end_ns[:-1] - SILENT_NS, busy.start_ns[1:])


def _windows(timeline: Timeline, split: _Split) -> Iterator[tuple[str, int, int]]:
    """Steps as a device sees them: each from its first row to the first row of the next; together they are the span."""
    links, rows = timeline.linked, split.device.rows
    first = np.full(len(links.steps) + 1, np.iinfo(np.int64).max)  # the last cell is for rows in no step
    np.minimum.at(first, links.step[rows], timeline["start_ns"][rows])
    before, name = split.start_ns, "(before the first step)"
    for step, start_ns in zip(links.steps, first.tolist(), strict=False):
        if start_ns > split.end_ns:
            continue
        begins = max(before, start_ns)
        if begins > before:
            yield name, before, begins
        before, name = begins, step.name
    if split.end_ns > before:
        yield name, before, split.end_ns


def _parts(
    split: _Split, step: str | None, start_ns: int, end_ns: int, joules: _PartJoules | None
) -> list[dict[str, Any]]:
    """Return the parts that occur within a window, a step or all, with their joules."""
    window = Spans(np.array([start_ns]), np.array([end_ns]))
    known = joules.known_of(step, window) if joules is not None else None
    rows = []
    for part, spans in split.parts.items():
        inside = intersection(window, spans)
        if inside.total_ns:
            energy = joules.spent_in(split, part, inside, *known) if joules is not None and known else (None, None)
            rows.append(_part(part, inside.total_ns, 100.0 * inside.total_ns / (end_ns - start_ns), *energy))
    return rows


def _part(part: str, ns: int, pct: float | None, energy_j: float | None, error_j: float | None) -> dict[str, Any]:
    power_w = None if energy_j is None else energy_j / ns * 1e9
    figures = {"part": part, "time_s": ns / 1e9, "ns": ns, "pct": pct}
    return figures | {"energy_j": energy_j, "error_j": error_j, "power_w": power_w}


class _PartJoules:
    """The joules of parts. With the time outside the devices' spans they sum to the table's total."""

    def __init__(self, timeline: Timeline, table: EnergyTable, splits: Sequence[_Split]) -> None:
        self._timeline, self._table, self._splits = timeline, table, splits
        self._window_ns = round(table.time_s * 1e9)
        idle_ns = sum(s.parts[n].total_ns for s in splits for n in IDLE) + sum(map(self.outside_ns, splits))
        idle_s = max(idle_ns, 1) / 1e9
        self._idle_w, self._idle_error_w = table.idle_j / idle_s, table.idle_error_j / idle_s
        self._steps = {row.name: row for row in table.steps}

    def outside_ns(self, split: _Split) -> int:
        """Return how much of the accounted time lies before a device's first row and after its last."""
        return max(0, self._window_ns - (split.end_ns - split.start_ns))

    def outside(self, split: _Split) -> dict[str, Any]:
        ns = self.outside_ns(split)
        return _part(OUTSIDE, ns, None, self._idle_w * ns / 1e9, self._idle_error_w * ns / 1e9)

    def known_of(self, step: str | None, window: Spans) -> tuple[float, float]:
        """Return, for a step or all, the half-width of what was spent while busy, and the sum of its rows' errors."""
        row = self._steps.get(step) if step is not None else None
        error_j, idle_error_j = self._table.error_j, self._table.idle_error_j
        if row is not None:
            error_j, idle_error_j = row.error_j, self._idle_error_w * (row.idle_s or 0.0)
        else:
            window = Spans(*(np.array([edge]) for edge in (self._timeline.start_ns, self._timeline.end_ns)))
        all_errors_j = sum(self._sum(s.device.rows, window)[1] for s in self._splits)
        return math.hypot(error_j, idle_error_j), all_errors_j

    def spent_in(
        self, split: _Split, part: str, inside: Spans, busy_error_j: float, all_errors_j: float
    ) -> tuple[float, float]:
        """Return joules and half-width of a part within some spans; `known_of` has the last two."""
        if part in IDLE:
            return self._idle_w * inside.total_ns / 1e9, self._idle_error_w * inside.total_ns / 1e9
        energy_j, most_j = self._sum(split.device.rows, inside)
        # A part is also the total less idle less all other parts. If those are small, this is known far better than the
        # sum of kernels that the samples cannot tell apart.
        rest_j = max(0.0, all_errors_j - most_j)
        return energy_j, min(most_j, math.hypot(busy_error_j, rest_j))

    def _sum(self, rows: Ints, inside: Spans) -> tuple[float, float]:
        """What rows spent within some spans, each evenly over its own time, and the plain sum of their errors."""
        timeline = self._timeline
        if timeline.energy_j is None or timeline.error_j is None:
            return 0.0, 0.0
        start, end = timeline["start_ns"][rows], timeline["end_ns"][rows]
        share = covered_ns(inside, start, end) / np.maximum(end - start, 1)
        energies, errors = (np.nan_to_num(e[rows]) for e in (timeline.energy_j, timeline.error_j))
        return float(share @ energies), float(share @ errors)


def _sum_devices(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the parts of all devices together."""
    total_ns = sum(r["ns"] for r in rows if r["part"] != OUTSIDE)
    sums = []
    for part in dict.fromkeys(r["part"] for r in rows):
        same = [r for r in rows if r["part"] == part]
        ns = sum(r["ns"] for r in same)
        energy = [None if any(r[k] is None for r in same) else sum(r[k] for r in same) for k in ("energy_j", "error_j")]
        pct = None if part == OUTSIDE else 100.0 * ns / total_ns
        sums.append({"where": "all", "rank": None, "device": None, "step": None, **_part(part, ns, pct, *energy)})
    return sums


def _facts(splits: Sequence[_Split], table: EnergyTable | None) -> dict[str, Any]:
    """Return sums over all devices. Seconds of an activity include overlaps; exposed seconds have no kernel beside."""

    def total_s(*parts: str) -> float:
        return sum(s.parts[part].total_ns for s in splits for part in parts) / 1e9

    facts: dict[str, Any] = {"devices": len(splits), "span_s": sum(s.end_ns - s.start_ns for s in splits) / 1e9}
    facts |= {f"{name}_s": sum(s.activities[name].total_ns for s in splits) / 1e9 for name in ACTIVITIES}
    # Exposed: no kernel runs at the same time. Communication and copies together are exposed parts of both.
    facts |= {f"exposed_{name}_s": total_s(name, "communication + copies") for name in ("communication", "copies")}
    facts |= {"idle_s": total_s(*IDLE)}
    facts |= {f"{part.replace(': ', '_').replace('-', '_').replace(' ', '_')}_s": total_s(part) for part in IDLE}
    if table is not None:
        facts |= {key: getattr(table, key) for key in ("energy_j", "error_j", "idle_j", "idle_error_j")}
    return facts


# -- overlap --------------------------------------------------------------------------------------------------------


def overlap(trace: Any, *, power: Any = None, progress: Progress | None = None) -> Result:
    """Return how much of communication and copies ran while kernels did, by device and kind of collective or copy.

    >>> analyze.overlap("ranks/").facts["communication_overlap_pct"]
    """
    recording = open_recording(trace, power=power, progress=progress)
    timeline, rows = recording.timeline, []
    totals = {"communication": [0, 0], "copies": [0, 0]}
    devices = list_devices(timeline)
    for device in devices:
        compute = busy_spans(timeline, device.rows, "kernel")
        for group, members in _transfer_groups(timeline, device.rows).items():
            spans = busy_spans(timeline, members)
            hidden_ns = intersection(spans, compute).total_ns
            if group in totals:
                totals[group][0] += spans.total_ns
                totals[group][1] += hidden_ns
            figures = _hidden_figures(spans.total_ns, hidden_ns)
            rows.append({**device.ids, "what": group, "calls": len(members), **figures})
    facts: dict[str, Any] = {}
    for group, (ns, hidden_ns) in totals.items():
        figures = _hidden_figures(ns, hidden_ns)
        facts |= {f"{group}_s": figures["time_s"]}
        facts |= {f"{group}_{key}": figures[key] for key in ("overlapped_s", "overlap_pct", "exposed_s")}
    missing = {}
    if not rows:
        missing["overlap"] = "the trace has neither collectives nor copies" if devices else explain_no_device(recording)
    shown = columns(
        ("what", "what"),
        ("calls", "calls"),
        ("time_s", "time"),
        ("overlapped_s", "overlaps kernels"),
        ("overlap_pct", "overlap"),
        ("exposed_s", "exposed"),
    )
    return Result(
        kind="overlap",
        title=f"Overlap with kernels in {recording.facts.name}",
        columns=[*WHERE, *shown],
        rows=rows,
        facts=facts,
        notes=recording.notes,
        missing=missing,
    )


def _transfer_groups(timeline: Timeline, rows: Ints) -> dict[str, Ints]:
    """Return collectives together and by type, copies together and by direction, and memsets, which copy nothing."""
    kinds, groups = timeline["kind"][rows], {}
    for total, kind in (("communication", "collective"), ("copies", "memcpy")):
        members = rows[kinds == CODE[kind]]
        if not len(members):
            continue
        named: dict[str, list[Ints]] = {}
        for launch, own in group_by_launch(timeline, members):
            copy = f"copies {launch.memcpy_dir or 'in an unknown direction'}"
            name = copy if kind == "memcpy" else launch.collective_type or "other collective"
            named.setdefault(name, []).append(own)
        groups[total] = members
        groups |= {name: np.sort(np.concatenate(parts)) for name, parts in sorted(named.items())}
    if len(memsets := rows[kinds == CODE["memset"]]):
        groups["memset"] = memsets
    return groups


def _hidden_figures(ns: int, hidden_ns: int) -> dict[str, Any]:
    overlap_pct = 100.0 * hidden_ns / ns if ns else None
    times = {"time_s": ns / 1e9, "ns": ns, "overlapped_s": hidden_ns / 1e9, "exposed_s": (ns - hidden_ns) / 1e9}
    return times | {"overlap_pct": overlap_pct}
