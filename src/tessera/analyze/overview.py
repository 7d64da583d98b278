"""A run reduced to what can be drawn: a few thousand points and bars of its timeline, and its joules as a tree.

Nothing is dropped silently: kernels that are too short to see are one bar that says how many they are and which spends
most of its time. One step is kept whole, so that a reader who zooms in finds all its kernels. Small branches of the
tree are summed as `N more`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..attribute.table import EnergyTable
from ..joules import Floats
from ..schema import Telemetry
from ..timeline.columns import KINETO_MARKS, NONE, Ints, Timeline
from ..timeline.distinct import distinct
from ..trace import PowerTrace
from .devices import region_paths, row_joules
from .kernel_names import op_name, short_name
from .lanes import BARS, Lane, LaneMaker, find_first_view, find_one

POINTS = 6000
"""Points of one line: each of 3000 stretches keeps its lowest and highest, more than the pixels of a screen."""
MARKS = 400
SMALLEST = 0.0015
"""Share of all joules below which branches of one parent are merged: they would be narrower than two pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackLine:
    """A quantity over time. Times are nanoseconds since the overview's start; NaN breaks the line."""

    name: str
    unit: str
    times_ns: Ints
    values: Floats
    basis: str = "measured"


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
    """The view to show first: one that has rows."""
    rows: int = 0
    merged: int = 0
    hidden_lanes: int = 0
    """Number of streams without a lane: those with the least time."""
    one: tuple[int, int] | None = None
    """A step in the middle of the run; if bars are merged, its kernels are not."""
    idle_w: float | None = None
    limit_w: float | None = None


def overview(
    timeline: Timeline,
    power: PowerTrace | None,
    telemetry: Mapping[str, Sequence[Telemetry]],
    table: EnergyTable | None,
) -> Overview:
    """Reduce a run to what can be drawn; without power there is no table."""
    begins = [timeline.start_ns] if len(timeline) else []
    ends = [timeline.end_ns] if len(timeline) else []
    if power is not None and power.columns:
        begins.append(power.start_ns)
        ends.append(power.end_ns)
    start = min(begins, default=0)
    span = max(max(ends, default=0) - start, 1)
    one, maker = find_one(timeline), LaneMaker(timeline, start, span)
    bands, hidden = maker.make_devices(table, one if len(timeline.device_rows) > BARS else None)
    lanes = [*maker.make_regions(banded=len(bands) > 0), *bands]
    limits = [t.power_limit_w for rows in telemetry.values() for t in rows if t.power_limit_w is not None]
    return Overview(
        start_ns=start,
        span_ns=span,
        power=_power(power, start) if power else (),
        telemetry=_telemetry(telemetry, -start),
        throttle=_throttle(telemetry, -start),
        lanes=lanes,
        marks=_marks(timeline, start),
        names=list(maker.names),
        shown=find_first_view(timeline, start, span),
        rows=len(timeline.device_rows),
        merged=sum(int(lane.count[lane.count > 1].sum()) for lane in lanes if lane.kind == "device"),
        one=(one[0] - start, one[1] - start) if one else None,
        hidden_lanes=hidden,
        idle_w=table.idle_w if table is not None else None,
        limit_w=max(limits, default=None),
    )


# -- lines ----------------------------------------------------------------------------------------------------------


def thin(times_ns: Ints, values: Floats, points: int = POINTS) -> tuple[Ints, Floats]:
    """Return at most so many points: the lowest and the highest of each stretch, so that no peak is lost."""
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
    for name, samples in power.columns.items():
        column = samples.at_resolution  # its peaks are those that `tessera analyze power` shows
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
            if name == "memory clock" and np.ptp(values) == 0:  # nearly always, and it would flatten the SM clock
                continue
            out.append(TrackLine(name=f"{domain} {name}", unit=unit, times_ns=times, values=values))
    return out


def _throttle(telemetry: Mapping[str, Sequence[Telemetry]], offset_ns: int) -> list[tuple[str, int, int]]:
    """Return the stretches in which a device reported throttling, from the first such reading to the last."""
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
    """Build the tree of everything that the run spent; branches too small to see are summed as `N more`."""
    root = _Branch("run", 0.0, 0, {})
    rows = timeline.device_rows
    if len(rows):
        _grow(root, timeline, rows, row_joules(timeline, rows, table))
    elif timeline.energy_j is not None and len(ops := timeline.rows("op")):  # a program of the host
        _grow(root, timeline, ops, np.nan_to_num(timeline.energy_j[ops]))
    else:  # only a summary or a table: operators, or kernels, without what surrounds them
        alone = [r for r in table.ops if not math.isnan(r.error_j)]  # operators of a summary contain one another
        for r in alone or table.kernels:
            _add(root, [(op_name(r.name), "op") if alone else (short_name(r.name), "kernel")], r.energy_j, r.calls)
    if table.idle_j > 0:
        root.children[table.idle_name] = _Branch("idle", table.idle_j, 0, {})
        root.energy_j += table.idle_j
    return _prune("run", root, root.energy_j * SMALLEST)


def build_stack_tree(stacks: Sequence[tuple[str, int, float]]) -> EnergyNode:
    """Return weighted Python stacks, outermost on top: what a sampled run has instead of kernels."""
    root = _Branch("run", 0.0, 0, {})
    for stack, count, energy_j in stacks:
        _add(root, [(frame, "op") for frame in stack.split(";")], energy_j, count)
    return _prune("run", root, root.energy_j * SMALLEST)


def _grow(root: _Branch, timeline: Timeline, rows: Ints, energy_j_of: Floats) -> None:
    """Add branches of device rows, or of operators that computed on the host (which are leaves themselves)."""
    path, paths = region_paths(timeline, rows)
    on_host = bool((timeline["device"][rows] == NONE).all())
    ops = np.full(len(rows), NONE) if on_host else timeline.linked.op[rows]
    op = np.where(ops == NONE, NONE, timeline["name"][ops])
    name = timeline["name"][rows]
    first, leaf = distinct(path, op, name)
    joules, counts = np.bincount(leaf, weights=energy_j_of), np.bincount(leaf)
    leaves = zip(path[first].tolist(), op[first].tolist(), name[first].tolist(), strict=True)
    for (p, o, n), energy_j, calls in zip(leaves, joules.tolist(), counts.tolist(), strict=True):
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
