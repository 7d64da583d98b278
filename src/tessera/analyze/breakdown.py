"""Where the time of each device went: computing, communicating, copying, idle and why; and what hid behind what.

::

    kernels       ──████████──────██████──────────────────     parts: compute │ compute + communication │ communication
    collectives   ──────██████████────────────────────────            (alone: exposed) │ idle, ...
    copies        ────────────────────────██──────────────     They are disjoint and sum to the span, to the nanosecond.

A device's span is from the start of its first row to the end of its last. Idle time is told apart by the launch of the
row that ended it:

* **host-bound**: the launch call was made, or was still running, after the device had run dry.
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
from ..record import CODE, ON_DEVICE
from ..timeline import Timeline
from ..timeline.columns import NONE, Ints
from ..timeline.intervals import EMPTY, Spans, covered_ns, difference, intersection, union
from .devices import NO_ACCELERATOR, SORTS, WHERE, Place, launches, named, no_device, no_power, places, spans_of
from .result import Column, Result
from .source import Progress, open_source

KERNEL_GAP_S = 10e-6
"""The longest gap between two kernels that were both queued: a launch takes 1-3 us, one with dependencies up to 10."""
SILENT_NS = 1_000_000
"""A host without an operator or call for longer than this is not launching: it sleeps, reads data, or waits."""
_BLOCK = 1 << 16
OUTSIDE = "outside first to last kernel"
IDLE = ("idle: host-bound", "idle: kernel gap", "idle: waiting")


# -- breakdown ------------------------------------------------------------------------------------------------------


def breakdown(
    trace: Any,
    *,
    power: Any = None,
    by: str | None = None,
    kernel_gap_s: float = KERNEL_GAP_S,
    progress: Progress | None = None,
) -> Result:
    """Seconds, percent and joules of computing, communicating, copying and idling, by device.

    `by="step"` has them for each step too: a step begins on a device with the first row that was launched in it.
    `kernel_gap_s` is how long a gap between two queued kernels may be.

    >>> analyze.breakdown("trace.json.gz").facts["exposed_communication_s"]
    """
    if by not in (None, "device", "step"):
        raise ArgumentError(f"a breakdown by {by!r} is unknown", fix="by='device' or by='step'")
    source = open_source(trace, power=power, progress=progress)
    timeline, table = source.timeline, source.energy()
    found = places(timeline)
    gap_ns = max(0, round(kernel_gap_s * 1e9))
    rows: list[dict[str, Any]] = []
    whole = [_split(timeline, place, gap_ns) for place in found]
    unlaunched = sum(split.unlaunched for split in whole)
    spent = _Spent(timeline, table, whole) if table is not None else None
    for place, split in zip(found, whole, strict=True):
        windows = _windows(timeline, place, split) if by == "step" else [(None, split.start_ns, split.end_ns)]
        for step, start_ns, end_ns in windows:
            rows += [{**place.ids, "step": step, **r} for r in _parts(split, start_ns, end_ns, spent)]
        if spent is not None and spent.outside_ns(split):
            rows.append({**place.ids, "step": None, **spent.outside(split)})
    if len(found) > 1 and by != "step":
        rows += _summed(rows)
    notes = [note for note in source.notes if found or NO_ACCELERATOR not in note]
    if found and (tracing := source.tracing()) is not None and tracing.text:
        notes.append(tracing.text)
    if unlaunched:
        notes.append(f"{unlaunched} gaps end with a row whose launch was not recorded: they count as waiting when long")
    if table is not None and found:
        notes.append("joules of idle parts are shared out by time; parts sum to the energy of the run")
    if len(timeline.rows("memset")):
        notes.append(f"copies contain {len(timeline.rows('memset')):,} memsets")
    columns = [
        *WHERE, *([Column(key="step", title="step")] if by == "step" else []), Column(key="part", title="part"),
        Column(key="seconds", title="time", unit="s"), Column(key="pct", title="of span", unit="%"),
        *(_JOULES if table is not None else ()),
    ]  # fmt: skip
    missing = {} if found else {"device": no_device(source)}
    if found and table is None:
        missing["energy"] = no_power(source)
    return Result(
        kind="breakdown", title=f"Where the time of {source.name} went", columns=columns, rows=rows,
        facts=_facts(timeline, whole, table if found else None), notes=notes, missing=missing,
    )  # fmt: skip


_JOULES = (
    Column(key="energy_j", title="energy", unit="J"), Column(key="energy_error_j", title="±", unit="J"),
    Column(key="power_w", title="power", unit="W"),
)  # fmt: skip


@dataclass(slots=True)
class _Split:
    """The disjoint parts of a device's time, each as spans."""

    place: Place
    start_ns: int
    end_ns: int
    parts: dict[str, Spans]
    sorts: dict[str, Spans]
    unlaunched: int


def _split(timeline: Timeline, place: Place, gap_ns: int) -> _Split:
    start_ns = int(timeline["start_ns"][place.rows].min())
    end_ns = int(timeline["end_ns"][place.rows].max())
    whole = union(np.array([start_ns]), np.array([end_ns]))
    sorts = {name: spans_of(timeline, place, *kinds) for name, kinds in SORTS.items()}
    parts: dict[str, Spans] = {}
    for used in product((True, False), repeat=len(sorts)):
        if not any(used):
            continue
        inside = whole
        for spans, use in zip(sorts.values(), used, strict=True):
            inside = intersection(inside, spans) if use else difference(inside, spans)
        parts[" + ".join(name for name, use in zip(sorts, used, strict=True) if use)] = inside
    idle = difference(whole, spans_of(timeline, place, *ON_DEVICE))
    kinds, unlaunched = _idle_kinds(timeline, place, idle, gap_ns)
    return _Split(place, start_ns, end_ns, parts | kinds, sorts, unlaunched)


def _idle_kinds(timeline: Timeline, place: Place, idle: Spans, gap_ns: int) -> tuple[dict[str, Spans], int]:
    """Idle stretches by why, and how many end with a row of which nobody knows who launched it."""
    order = place.rows[np.argsort(timeline["start_ns"][place.rows], kind="stable")]
    following = order[np.searchsorted(timeline["start_ns"][order], idle.end_ns, side="left")]
    call = launches(timeline, following)
    known = call != NONE
    called = np.where(known, timeline["end_ns"][call], idle.start_ns)
    late = called > idle.start_ns
    # A row that starts long after its launch waited for something else meanwhile.
    until = np.where(late & (idle.end_ns - called > gap_ns), called, np.where(late, idle.end_ns, idle.start_ns))
    threads = np.where(known, timeline["thread"][call], NONE)
    host = _host_bound(timeline, place.rank, idle.start_ns, until, threads)
    short = ~late & (idle.end_ns - idle.start_ns <= gap_ns)
    gaps = Spans(idle.start_ns[short], idle.end_ns[short])
    waiting = difference(difference(idle, gaps), host)
    return dict(zip(IDLE, (host, gaps, waiting), strict=True)), int((~known).sum())


def _host_bound(timeline: Timeline, rank: int, starts: Ints, ends: Ints, threads: Ints) -> Spans:
    """What is left of the stretches in which the host was late, once its own waiting is taken away."""
    late = ends > starts
    if not late.any():
        return EMPTY
    names, rows = timeline.names, timeline.rows("runtime", "region", "op")
    waits_by_name = np.array(["ynchronize" in n or "DataLoader" in n for n in names] or [False])
    waits = rows[waits_by_name[timeline["name"][rows]] & (timeline["rank"][rows] == rank)]
    nothing = _silent(timeline, rank)
    found = []
    for thread in np.unique(threads[late]).tolist():
        chosen = late & (threads == thread)
        own = waits[timeline["thread"][waits] == thread]
        waited = union(timeline["start_ns"][own], timeline["end_ns"][own])
        found.append(difference(difference(Spans(starts[chosen], ends[chosen]), waited), nothing))
    return union(np.concatenate([f.start_ns for f in found]), np.concatenate([f.end_ns for f in found]))


def _silent(timeline: Timeline, rank: int) -> Spans:
    """Stretches of more than `SILENT_NS` in which the host of a rank ran neither an operator nor a call."""
    kinds = [CODE["op"], CODE["runtime"], CODE["graph_launch"]]
    frames = [*timeline.meta.get("modules", ()), *timeline.meta.get("frames", ())]
    parts = []
    for begin in range(0, len(timeline), _BLOCK):  # millions of operators, and few such stretches
        block = slice(begin, begin + _BLOCK)
        doing = np.isin(timeline["kind"][block], kinds) & (timeline["rank"][block] == rank)
        if frames:
            doing &= ~np.isin(timeline["name"][block], frames)
        # Each lasts so much longer that whatever is not silence becomes one.
        parts.append(union(timeline["start_ns"][block][doing], timeline["end_ns"][block][doing] + SILENT_NS))
    busy = union(np.concatenate([p.start_ns for p in parts]), np.concatenate([p.end_ns for p in parts]))
    return Spans(busy.end_ns[:-1] - SILENT_NS, busy.start_ns[1:])


def _windows(timeline: Timeline, place: Place, split: _Split) -> Iterator[tuple[str, int, int]]:
    """Steps as a device sees them: each from its first row to the first row of the next; together they are the span."""
    links = timeline.linked
    step = links.step[place.rows]
    first = np.full(len(links.steps) + 1, np.iinfo(np.int64).max)  # the last cell is of rows in no step
    np.minimum.at(first, step, timeline["start_ns"][place.rows])
    before, name = split.start_ns, "(before the first step)"
    for one, start_ns in zip(links.steps, first.tolist(), strict=False):
        if start_ns > split.end_ns:
            continue
        begins = max(before, start_ns)
        if begins > before:
            yield name, before, begins
        before, name = begins, one.name
    if split.end_ns > before:
        yield name, before, split.end_ns


def _parts(split: _Split, start_ns: int, end_ns: int, spent: _Spent | None) -> list[dict[str, Any]]:
    """The parts that occur within a window, with their joules."""
    window = Spans(np.array([start_ns]), np.array([end_ns]))
    rows = []
    for part, spans in split.parts.items():
        inside = intersection(window, spans)
        if inside.total_ns:
            joules = spent.at(split, part, inside) if spent is not None else (None, None)
            rows.append(_part(part, inside.total_ns, 100.0 * inside.total_ns / (end_ns - start_ns), *joules))
    return rows


def _part(part: str, ns: int, pct: float | None, joules: float | None, error: float | None) -> dict[str, Any]:
    return {
        "part": part, "seconds": ns / 1e9, "ns": ns, "pct": pct, "energy_j": joules, "energy_error_j": error,
        "power_w": None if joules is None else joules / ns * 1e9,
    }  # fmt: skip


class _Spent:
    """The joules of parts. With the time outside the devices' spans they sum to the table's total."""

    def __init__(self, timeline: Timeline, table: EnergyTable, whole: Sequence[_Split]) -> None:
        self._timeline, self._window_ns = timeline, round(table.seconds * 1e9)
        idle_ns = sum(s.parts[n].total_ns for s in whole for n in IDLE) + sum(map(self.outside_ns, whole))
        idle_s = max(idle_ns, 1) / 1e9
        self._idle_w, self._idle_error_w = table.idle_j / idle_s, table.idle_error_j / idle_s
        self._busy_error_j = math.hypot(table.total_error_j, table.idle_error_j)
        self._all_errors_j = sum(self._summed(s.place.rows, union(*_ends(timeline, s.place.rows)))[1] for s in whole)

    def outside_ns(self, split: _Split) -> int:
        """What of the accounted time lies before a device's first row and after its last."""
        return max(0, self._window_ns - (split.end_ns - split.start_ns))

    def outside(self, split: _Split) -> dict[str, Any]:
        """That as a row."""
        ns = self.outside_ns(split)
        return _part(OUTSIDE, ns, None, self._idle_w * ns / 1e9, self._idle_error_w * ns / 1e9)

    def at(self, split: _Split, part: str, inside: Spans) -> tuple[float, float]:
        """Joules and half-width of a part within some spans."""
        if part in IDLE:
            return self._idle_w * inside.total_ns / 1e9, self._idle_error_w * inside.total_ns / 1e9
        joules, most = self._summed(split.place.rows, inside)
        # A part is also the total less idle less all other parts: where those are small, that is known far better
        # than the sum of kernels that the samples cannot tell apart.
        rest = max(0.0, self._all_errors_j - most)
        return joules, min(most, math.hypot(self._busy_error_j, rest))

    def _summed(self, rows: Ints, inside: Spans) -> tuple[float, float]:
        """What rows spent within some spans, each evenly over its own time; their errors' plain sum is the most."""
        timeline = self._timeline
        if timeline.energy_j is None or timeline.energy_error_j is None:
            return 0.0, 0.0
        start, end = _ends(timeline, rows)
        share = covered_ns(inside, start, end) / np.maximum(end - start, 1)
        joules, errors = (np.nan_to_num(e[rows]) for e in (timeline.energy_j, timeline.energy_error_j))
        return float(share @ joules), float(share @ errors)


def _ends(timeline: Timeline, rows: Ints) -> tuple[Ints, Ints]:
    return timeline["start_ns"][rows], timeline["end_ns"][rows]


def _summed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The parts of all devices together."""
    total_ns = sum(r["ns"] for r in rows if r["part"] != OUTSIDE)
    out = []
    for part in dict.fromkeys(r["part"] for r in rows):
        same = [r for r in rows if r["part"] == part]
        ns = sum(r["ns"] for r in same)
        joules, error = (
            None if any(r[k] is None for r in same) else sum(r[k] for r in same) for k in ("energy_j", "energy_error_j")
        )
        out.append(
            {
                "where": "all", "rank": None, "device": None, "step": None, "part": part, "seconds": ns / 1e9,
                "ns": ns, "pct": None if part == OUTSIDE else 100.0 * ns / total_ns, "energy_j": joules,
                "energy_error_j": error, "power_w": None if joules is None else joules / ns * 1e9,
            }
        )  # fmt: skip
    return out


def _facts(timeline: Timeline, whole: Sequence[_Split], table: EnergyTable | None) -> dict[str, Any]:
    """Sums over all devices. A sort's own seconds count what overlaps with others too; the exposed do not."""

    def total(*names: str) -> float:
        return sum(s.parts[n].total_ns for s in whole for n in names) / 1e9

    facts: dict[str, Any] = {
        "devices": len(whole), "span_s": sum(s.end_ns - s.start_ns for s in whole) / 1e9,
        **{f"{name}_s": sum(s.sorts[name].total_ns for s in whole) / 1e9 for name in SORTS},
        "exposed_communication_s": total("communication"), "exposed_copies_s": total("copies"),
        "idle_s": total(*IDLE),
        **{f"{name.replace(': ', '_').replace('-', '_').replace(' ', '_')}_s": total(name) for name in IDLE},
    }  # fmt: skip
    if table is not None:
        facts |= {"total_j": table.total_j, "total_error_j": table.total_error_j}
        facts |= {"idle_j": table.idle_j, "idle_error_j": table.idle_error_j}
    return facts


# -- overlap --------------------------------------------------------------------------------------------------------


def overlap(trace: Any, *, power: Any = None, progress: Progress | None = None) -> Result:
    """How much of communication and copies ran while kernels did, by device and kind of collective or copy.

    >>> analyze.overlap("ranks/").facts["communication_overlap_pct"]
    """
    source = open_source(trace, power=power, progress=progress)
    timeline, rows = source.timeline, []
    totals = {"communication": [0, 0], "copies": [0, 0]}
    for place in places(timeline):
        compute = spans_of(timeline, place, "kernel")
        for sort, total in totals.items():
            kind = CODE["collective" if sort == "communication" else "memcpy"]  # a memset copies nothing
            found = {sort: place.rows[timeline["kind"][place.rows] == kind]}
            if not len(found[sort]):
                continue
            found |= named(timeline, found[sort])
            for what, own in found.items():
                spans = union(timeline["start_ns"][own], timeline["end_ns"][own])
                hidden_ns = intersection(spans, compute).total_ns
                if what == sort:
                    total[0], total[1] = total[0] + spans.total_ns, total[1] + hidden_ns
                rows.append({**place.ids, "what": what, "calls": len(own), **_hidden(spans.total_ns, hidden_ns)})
        filled = place.rows[timeline["kind"][place.rows] == CODE["memset"]]
        if len(filled):
            spans = union(*_ends(timeline, filled))
            hidden = _hidden(spans.total_ns, intersection(spans, compute).total_ns)
            rows.append({**place.ids, "what": "memset", "calls": len(filled), **hidden})
    facts: dict[str, Any] = {}
    for sort, (ns, hidden_ns) in totals.items():
        found = _hidden(ns, hidden_ns)
        facts |= {f"{sort}_s": found["seconds"]} | {
            f"{sort}_{key}": found[key] for key in ("overlapped_s", "overlap_pct", "exposed_s")
        }
    missing = {}
    if not rows:
        missing["overlap"] = "the trace has neither collectives nor copies" if places(timeline) else no_device(source)
    columns = (
        *WHERE, Column(key="what", title="what"), Column(key="calls", title="calls"),
        Column(key="seconds", title="time", unit="s"), Column(key="overlapped_s", title="beside kernels", unit="s"),
        Column(key="overlap_pct", title="overlap", unit="%"), Column(key="exposed_s", title="exposed", unit="s"),
    )  # fmt: skip
    return Result(
        kind="overlap", title=f"What hides behind kernels in {source.name}", columns=columns, rows=rows, facts=facts,
        notes=source.notes, missing=missing,
    )  # fmt: skip


def _hidden(ns: int, hidden_ns: int) -> dict[str, Any]:
    return {
        "seconds": ns / 1e9, "ns": ns, "overlapped_s": hidden_ns / 1e9,
        "overlap_pct": 100.0 * hidden_ns / ns if ns else None, "exposed_s": (ns - hidden_ns) / 1e9,
    }  # fmt: skip
