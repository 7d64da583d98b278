"""A run small enough to draw: a few thousand points and bars of its timeline, and its joules as a tree.

Nothing is dropped silently: kernels too short to see are one bar that says how many there are and which spends most of
its time; one step is kept whole, so that a reader who zooms in finds every kernel of it. Small branches of the tree are
summed as `N more`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..attribute.table import EnergyTable
from ..joules import Floats
from ..profile.ranks.collectives import host_rows
from ..record import ON_DEVICE
from ..schema import DeviceId, Telemetry
from ..timeline import stream_names
from ..timeline.columns import KINETO_MARKS, NONE, Ints, Timeline
from ..trace import PowerTrace
from .devices import region_paths, row_joules
from .kernel_names import op_name, short_name

POINTS = 6000
"""Points of one line: each of 3000 stretches keeps its lowest and highest, more than a screen has pixels."""
BARS = 16_000
"""Bars of all device lanes together that are drawn each on its own."""
WHOLE = 8_000
"""Kernels of the one step that is kept whole."""
LANES = 10
REGIONS = 3000
"""Bars of one lane of regions that are drawn each on its own."""
RANKS = 16
"""Ranks with a band of their own."""
MARKS = 400
SMALLEST = 0.0015
"""Share of all joules below which branches of one parent become one: narrower than two pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackLine:
    """A quantity over time. Times are nanoseconds since the overview's start; NaN breaks the line."""

    name: str
    unit: str
    times_ns: Ints
    values: Floats
    basis: str = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Bars in one row. `count` is above 1 where several short ones are drawn as one, `name` then the longest's."""

    label: str
    kind: str
    start_ns: Ints
    end_ns: Ints
    name: Ints
    op: Ints
    count: Ints
    energy_j: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """What the page draws. Times are nanoseconds since `start_ns` (epoch)."""

    start_ns: int
    span_ns: int
    power: Sequence[TrackLine] = ()
    telemetry: Sequence[TrackLine] = ()
    throttle: Sequence[tuple[str, int, int]] = ()
    lanes: Sequence[Lane] = ()
    marks: Sequence[tuple[str, int]] = ()
    names: Sequence[str] = ()
    shown: tuple[int, int] = (0, 1)
    """What to look at first: where there are rows."""
    rows: int = 0
    merged: int = 0
    one: tuple[int, int] | None = None
    """A step in the middle of the run; where bars are merged, its kernels are not."""
    idle_w: float | None = None
    limit_w: float | None = None


def overview(
    timeline: Timeline, power: PowerTrace | None, telemetry: Mapping[str, Sequence[Telemetry]], table: EnergyTable
) -> Overview:
    """Reduce a run to what can be drawn."""
    begins = [timeline.start_ns] if len(timeline) else []
    ends = [timeline.end_ns] if len(timeline) else []
    if power is not None and power.columns:
        begins.append(power.start_ns)
        ends.append(power.end_ns)
    start = min(begins, default=0)
    span = max(max(ends, default=0) - start, 1)
    names: dict[str, int] = {}
    one = _one(timeline)
    whole = one if len(timeline.device_rows) > BARS else None
    lanes = [*_region_lanes(timeline, start, span, names), *_device_lanes(timeline, start, span, names, table, whole)]
    limits = [t.power_limit_w for rows in telemetry.values() for t in rows if t.power_limit_w is not None]
    return Overview(
        start_ns=start,
        span_ns=span,
        power=_power(power, start) if power else (),
        telemetry=_telemetry(telemetry, -start),
        throttle=_throttle(telemetry, -start),
        lanes=lanes,
        marks=_marks(timeline, start),
        names=list(names),
        shown=_first_view(timeline, start, span),
        rows=len(timeline.device_rows),
        merged=sum(int(lane.count[lane.count > 1].sum()) for lane in lanes if lane.kind == "device"),
        one=(one[0] - start, one[1] - start) if one else None,
        idle_w=table.idle_w,
        limit_w=max(limits, default=None),
    )


# -- lines ----------------------------------------------------------------------------------------------------------


def thin(times_ns: Ints, values: Floats, points: int = POINTS) -> tuple[Ints, Floats]:
    """At most so many points: of each stretch the lowest and the highest, so that no peak is lost."""
    if len(times_ns) <= points:
        return times_ns, values
    edges = np.linspace(0, len(times_ns), points // 2 + 1).astype(np.int64)[:-1]
    low, high = np.fmin.reduceat(values, edges), np.fmax.reduceat(values, edges)
    group = np.repeat(np.arange(len(edges)), np.diff(np.r_[edges, len(values)]))
    keep = []
    for wanted in (low, high):
        hit = np.flatnonzero((values == wanted[group]) | np.isnan(wanted[group]))
        keep.append(hit[np.unique(group[hit], return_index=True)[1]])
    chosen = np.unique(np.concatenate(keep))
    return times_ns[chosen], values[chosen]


def _power(power: PowerTrace, start_ns: int) -> list[TrackLine]:
    out = []
    for name, column in power.columns.items():
        if not len(column.times_ns):
            continue
        moved = column.times_ns - (start_ns + column.lag_ns)
        times, watts = thin(moved, column.watts)
        out.append(TrackLine(name=name, unit="W", times_ns=times, values=watts, basis=column.domain.basis))
    return out


def _telemetry(telemetry: Mapping[str, Sequence[Telemetry]], offset_ns: int) -> list[TrackLine]:
    out = []
    for domain, rows in telemetry.items():
        tracks: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for t in rows:
            readings: list[tuple[str, str, float | None]] = [
                *((f"{clock} clock", "MHz", mhz) for clock, mhz in t.clocks_mhz.items() if clock in ("sm", "memory")),
                ("temperature", "°C", t.temperature_c),
                ("memory temperature", "°C", t.memory_temperature_c),
                ("utilisation", "%", t.utilization_pct),
                ("SM activity", "%", t.sm_activity_pct),
            ]
            for name, unit, value in readings:
                if value is not None:
                    tracks.setdefault((name, unit), []).append((t.time_ns + offset_ns, float(value)))
        for (name, unit), pairs in tracks.items():
            times, values = thin(
                np.array([p[0] for p in pairs], np.int64), np.array([p[1] for p in pairs], np.float64), POINTS // 3
            )
            if name == "memory clock" and np.ptp(values) == 0:  # as nearly always; it would flatten the SM clock
                continue
            out.append(TrackLine(name=f"{domain} {name}", unit=unit, times_ns=times, values=values))
    return out


def _throttle(telemetry: Mapping[str, Sequence[Telemetry]], offset_ns: int) -> list[tuple[str, int, int]]:
    """Stretches in which a device reported throttling: from the first reading that reports it to the last."""
    out: list[tuple[str, int, int]] = []
    for domain, rows in telemetry.items():
        began: dict[str, int] = {}
        last = 0
        for t in rows:
            now = set(t.throttle or ())
            last = t.time_ns + offset_ns
            for reason in now - began.keys():
                began[reason] = last
            for reason in began.keys() - now:
                out.append((f"{domain}: {reason}", began.pop(reason), last))
        out += [(f"{domain}: {reason}", since, last) for reason, since in began.items()]
    return sorted(out, key=lambda s: s[1] - s[2])[:2000]


def _marks(timeline: Timeline, start_ns: int) -> list[tuple[str, int]]:
    rows = timeline.rows("mark")
    step = max(1, -(-len(rows) // MARKS))
    named = [(timeline.name(int(r)), int(timeline["start_ns"][r]) - start_ns) for r in rows[::step]]
    return [(KINETO_MARKS.get(name, name), at_ns) for name, at_ns in named]


# -- lanes ----------------------------------------------------------------------------------------------------------


def _one(timeline: Timeline) -> tuple[int, int] | None:
    """The step in the middle of the run, or some kernels there where there are no steps; at most `WHOLE` kernels."""
    starts = np.sort(timeline["start_ns"][timeline.device_rows])
    if not len(starts):
        return None
    if steps := timeline.linked.steps:
        middle = steps[len(steps) // 2]
        begin, end = middle.start_ns, middle.end_ns
    elif len(starts) > BARS:
        begin, end = int(starts[(len(starts) - WHOLE) // 2]), int(starts[-1])
    else:
        return None
    first = int(np.searchsorted(starts, begin))
    last = first + WHOLE
    return begin, min(end, int(starts[last])) if last < len(starts) else end


def _first_view(timeline: Timeline, start_ns: int, span_ns: int) -> tuple[int, int]:
    """The timeline with a margin, where the power trace is much longer; the steps of ranks without a device."""
    first_ns, last_ns = timeline.start_ns, timeline.end_ns
    steps = timeline.linked.steps
    if not len(timeline.device_rows) and steps and len(np.unique(timeline["rank"])) > 1:
        first_ns, last_ns = steps[0].start_ns, max(s.end_ns for s in steps)
    elif not len(timeline.device_rows):
        return 0, span_ns
    length = last_ns - first_ns
    if not 0 < length < 0.7 * span_ns:
        return 0, span_ns
    margin = round(0.08 * length)
    return max(first_ns - start_ns - margin, 0), min(last_ns - start_ns + margin, span_ns)


def _region_lanes(timeline: Timeline, start_ns: int, span_ns: int, names: dict[str, int]) -> list[Lane]:
    """Steps in a lane of their own, other regions by how deep they are nested; of several ranks, a band for each."""
    links, rows = timeline.linked, timeline.rows("region")
    steps = np.array([s.row for s in links.steps if s.row != NONE], np.int64)
    if ranks := [rank for rank in np.unique(timeline["rank"]).tolist() if rank != NONE][:RANKS]:
        bands = (("rank {} steps", "step", steps), ("collectives", "region", host_rows(timeline)))
        own = [(w.format(r), kind, rows[timeline["rank"][rows] == r]) for r in ranks for w, kind, rows in bands]
        return [_region_lane(timeline, rows, w, k, start_ns, span_ns, names) for w, k, rows in own if len(rows)]
    lanes = [_region_lane(timeline, steps, "steps", "step", start_ns, span_ns, names)] if len(steps) else []
    rows = np.setdiff1d(rows, steps)
    depth = np.zeros(len(rows), np.int64)
    outer = links.parent[rows]
    while (outer != NONE).any():
        depth += (outer != NONE) & ~np.isin(outer, steps)
        outer = np.where(outer == NONE, NONE, links.parent[outer])
    for level in range(min(4, int(depth.max(initial=-1)) + 1)):
        mine = rows[depth == level]
        label = "regions" if level == 0 else ""
        lanes.append(_region_lane(timeline, mine, label, "region", start_ns, span_ns, names))
    return lanes


def _region_lane(
    timeline: Timeline, rows: Ints, label: str, kind: str, start_ns: int, span_ns: int, names: dict[str, int]
) -> Lane:
    quantum = span_ns / REGIONS if len(rows) > REGIONS else 0.0
    return _bars(timeline, rows, np.full(len(rows), np.nan), label, kind, start_ns, quantum, names, None)


def _device_lanes(
    timeline: Timeline,
    start_ns: int,
    span_ns: int,
    names: dict[str, int],
    table: EnergyTable,
    whole: tuple[int, int] | None,
) -> list[Lane]:
    rows = timeline.rows(*ON_DEVICE)
    if not len(rows):
        return []
    joules = row_joules(timeline, rows, table)
    by_device = timeline.by_device(rows)
    lanes: list[tuple[DeviceId, int, Ints]] = []
    for device, own in by_device.items():
        streams = timeline["stream"][own]
        lanes += [(device, int(number), own[streams == number]) for number in np.unique(streams)]
    busiest = sorted(sorted(lanes, key=lambda lane: -len(lane[2]))[:LANES], key=lambda lane: lane[:2])
    quantum = span_ns / BARS * len(busiest) if len(rows) > BARS else 0.0
    out = []
    for device, number, own in busiest:
        label = stream_names.label(timeline.meta, device.index, number, timeline.rank)
        label = f"{device} {label}" if len(by_device) > 1 else label
        spent = joules[np.searchsorted(rows, own)]
        out.append(_bars(timeline, own, spent, label, "device", start_ns, quantum, names, whole))
    return out


def _bars(
    timeline: Timeline,
    rows: Ints,
    joules: Floats,
    label: str,
    kind: str,
    start_ns: int,
    quantum_ns: float,
    names: dict[str, int],
    whole: tuple[int, int] | None,
) -> Lane:
    order = np.argsort(timeline["start_ns"][rows], kind="stable")
    rows, joules = rows[order], joules[order]
    starts, ends = timeline["start_ns"][rows], timeline["end_ns"][rows]
    alone = ends - starts >= quantum_ns
    if whole is not None:
        alone |= (starts >= whole[0]) & (starts < whole[1])
    bucket = ((starts - start_ns) // max(quantum_ns, 1.0)).astype(np.int64)
    # A new bar where this one or the one before stands alone, or another stretch begins.
    new = np.r_[True, alone[1:] | alone[:-1] | (bucket[1:] != bucket[:-1])]
    group, first = np.cumsum(new) - 1, np.flatnonzero(new)
    name, op = _intern_names(timeline, timeline["name"][rows], names), _ops(timeline, rows, names)
    chosen = _longest(group, timeline["name"][rows], ends - starts)
    count = np.diff(np.r_[first, len(rows)])
    return Lane(
        label=label,
        kind=kind,
        start_ns=starts[first] - start_ns,
        end_ns=np.maximum.reduceat(ends, first) - start_ns,
        name=name[chosen],
        op=np.where(count == 1, op[chosen], NONE),
        count=count,
        energy_j=np.add.reduceat(joules, first),
    )


def _longest(group: Ints, name: Ints, lengths: Ints) -> Ints:
    """Of each group a row of the name that takes most of its time."""
    order = np.lexsort((name, group))
    g, n = group[order], name[order]
    first = np.flatnonzero(np.r_[True, (g[1:] != g[:-1]) | (n[1:] != n[:-1])])
    total = np.add.reduceat(lengths[order], first)
    best = np.lexsort((-total, g[first]))
    winner = best[np.unique(g[first][best], return_index=True)[1]]
    chosen: Ints = order[first[winner]]
    return chosen


def _intern_names(timeline: Timeline, column: NDArray[Any], names: dict[str, int]) -> Ints:
    used, inverse = np.unique(column, return_inverse=True)
    ids = [NONE if i == NONE else names.setdefault(timeline.names[i], len(names)) for i in used.tolist()]
    return np.array(ids, np.int64)[np.asarray(inverse).reshape(-1)]


def _ops(timeline: Timeline, rows: Ints, names: dict[str, int]) -> Ints:
    """The operator each device row comes from."""
    ops = timeline.linked.op[rows]
    column = np.where(ops == NONE, NONE, timeline["name"][ops])
    return _intern_names(timeline, column, names)


# -- the tree ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyNode:
    """A branch: its joules are those of its children and of nothing else."""

    name: str
    kind: str
    energy_j: float
    calls: int
    children: Sequence[EnergyNode] = ()


@dataclass(slots=True)
class _Branch:
    kind: str
    energy_j: float
    calls: int
    children: dict[str, _Branch]


def build_energy_tree(timeline: Timeline, table: EnergyTable) -> EnergyNode:
    """Everything the run spent; branches too small to see are summed as `N more`."""
    root = _Branch("run", 0.0, 0, {})
    rows = timeline.device_rows
    if len(rows):
        _grow(root, timeline, rows, row_joules(timeline, rows, table))
    elif timeline.energy_j is not None and len(ops := timeline.rows("op")):  # a program of the host
        _grow(root, timeline, ops, np.nan_to_num(timeline.energy_j[ops]))
    else:  # a summary or a table alone: operators, or kernels, without what surrounds them
        alone = [r for r in table.ops if not math.isnan(r.error_j)]  # those of a summary hold one another
        for r in alone or table.kernels:
            _add(root, [(op_name(r.name), "op") if alone else (short_name(r.name), "kernel")], r.energy_j, r.calls)
    if table.idle_j > 0:
        root.children["idle"] = _Branch("idle", table.idle_j, 0, {})
        root.energy_j += table.idle_j
    return _prune("run", root, root.energy_j * SMALLEST)


def build_stack_tree(stacks: Sequence[tuple[str, int, float]]) -> EnergyNode:
    """Weighted Python stacks, outermost on top: what a sampled run has instead of kernels."""
    root = _Branch("run", 0.0, 0, {})
    for stack, count, energy_j in stacks:
        _add(root, [(frame, "op") for frame in stack.split(";")], energy_j, count)
    return _prune("run", root, root.energy_j * SMALLEST)


def _grow(root: _Branch, timeline: Timeline, rows: Ints, energy_j_of: Floats) -> None:
    """Branches of rows of the device, or of operators that computed on the host (those are leaves themselves)."""
    path, paths = region_paths(timeline, rows)
    on_host = bool((timeline["device"][rows] == NONE).all())
    ops = np.full(len(rows), NONE) if on_host else timeline.linked.op[rows]
    op = np.where(ops == NONE, NONE, timeline["name"][ops])
    many = len(timeline.names) + 1  # one number for (path, operator, kernel): sorting one column is ten times faster
    keys = (path * many + op + 1) * many + timeline["name"][rows]
    leaves, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    joules = np.bincount(inverse, weights=energy_j_of)
    for key, energy_j, calls in zip(leaves.tolist(), joules.tolist(), counts.tolist(), strict=True):
        (p, o), n = divmod(key // many, many), key % many
        o -= 1
        steps = [(name, "region") for name in paths[p]]
        if on_host:
            steps.append((op_name(timeline.names[n]), "op"))
        else:
            steps.append((op_name(timeline.names[o]), "op") if o != NONE else ("no operator", "op"))
            steps.append((short_name(timeline.names[n]), "kernel"))
        _add(root, steps, energy_j, calls)


def _add(root: _Branch, steps: Sequence[tuple[str, str]], energy_j: float, calls: int) -> None:
    at = root
    at.energy_j += energy_j
    for name, kind in steps:
        at = at.children.setdefault(name, _Branch(kind, 0.0, 0, {}))
        at.energy_j += energy_j
        at.calls += calls


def _prune(name: str, branch: _Branch, least_j: float) -> EnergyNode:
    branches = sorted(branch.children.items(), key=lambda kv: (kv[1].kind == "idle", -kv[1].energy_j))
    small = [b for _, b in branches if b.energy_j < least_j]
    if len(small) == 1:
        small = []
    children = [_prune(n, b, least_j) for n, b in branches if b.energy_j >= least_j or not small]
    if small:
        joules, calls = sum(b.energy_j for b in small), sum(b.calls for b in small)
        children.append(EnergyNode(name=f"{len(small)} more", kind=small[0].kind, energy_j=joules, calls=calls))
    return EnergyNode(name=name, kind=branch.kind, energy_j=branch.energy_j, calls=branch.calls, children=children)
