"""Links device rows to operators, regions, modules and steps, and backward work to its forward operators.

::

    kernel ──correlation──► runtime call ──thread, time──► region, module, step
       │──────External id──► operator ──parent──► outermost operator
       │                        └─ under XBackward0 ──Sequence number──► forward operator ──► its region, module
       ├─ of a CUDA graph ──graph_alignment──► the call that put it there ──► its operator, module
       └─ of a step that was not traced ──launch_alignment──► the same kernel of one that was

Everything is numpy over columns, with one exception: if operators of a thread overlap without one containing the other,
a scan with a stack nests them (0.6 us a row).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby, takewhile

import numpy as np

from ..record import CODE
from .columns import NONE, Ints, Timeline
from .distinct import rank_values
from .graph_alignment import GraphAlignment, align_graphs
from .intervals import Nesting, climb, latest, single
from .launch_alignment import LaunchAlignment, align_launches
from .launch_times import estimate_launches

_STEP = re.compile(r"ProfilerStep#(\d+)")
_STEP_OF_THE_USER = re.compile(r"(?:train_|training_)?(?:step|iteration|iter)[\s_#:/-]*(\d+)", re.IGNORECASE)
_OPTIMIZER = "Optimizer.step#"
"""What torch's regions around the steps of optimizers are called, before the class of the optimizer."""
_FOREVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the program; `row` is the row of its region, `NONE` if two marks made it."""

    name: str
    start_ns: int
    end_ns: int
    row: int = NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Arrays by row of the timeline; each has row numbers (`NONE`: none) unless it says otherwise.

    `op`: the innermost operator that a device or runtime row comes from; an operator itself. `top_op`: the outermost
    operator around that. `launch`: the runtime call of a device row. `launch_ns`, `launch_thread`: when and on which
    thread the host launched it; for host rows, their own. `parent`: the operator of a device or runtime row; for
    operators, regions and modules the next outer one of the same sort. `forward_op`: for rows under a backward
    operator, the outermost forward operator that made that node of autograd's graph. `region`: the innermost region
    that was open at the launch. `forward_region`: the region of the forward operator. `module`: the innermost module at
    the launch, or at the forward operator's launch. `step`: the place in `steps` of the step in which it was launched.
    `twin`: the traced row whose operator and module a device row has; itself if it was traced, `NONE` if unknown.
    `put_by`: the call that put a kernel into a CUDA graph. `shapes`: the name number of the shapes of its operator; for
    an untraced row only if its grid is its twin's.
    """

    op: Ints
    top_op: Ints
    parent: Ints
    launch: Ints
    launch_ns: Ints
    launch_thread: Ints
    forward_op: Ints
    region: Ints
    forward_region: Ints
    module: Ints
    step: Ints
    twin: Ints
    put_by: Ints
    shapes: Ints
    steps: tuple[Step, ...]
    ops: Nesting | None
    """The nested operators of the host if nothing ran on a device, since they then get the joules; else None."""

    def path(self, row: int) -> list[int]:
        """Return a row and all it is inside, outermost first: `path(links.region[row])`, `path(links.module[row])`."""
        rows: list[int] = []
        while row != NONE:
            rows.append(int(row))
            row = int(self.parent[row])
        return rows[::-1]

    def find_twins(self, rows: Ints) -> Ints:
        """Return the traced rows that device rows repeat; the rows themselves if they were traced or have no twin."""
        twin = self.twin[rows]
        return np.where(twin == NONE, rows, twin)


def link(timeline: Timeline) -> Links:
    """Link the rows of a timeline; fill its column "parent" and keep the result as `timeline.links`."""
    count, kind = len(timeline), timeline["kind"]
    start, thread = timeline["start_ns"], timeline["thread"]
    ops = np.flatnonzero((kind == CODE["op"]) & ~np.isin(timeline["name"], timeline.python_names))
    calls = timeline.rows("runtime", "graph_launch")
    device = timeline.device_rows
    nested_ops = _nest(timeline, ops)
    parent = np.full(count, NONE, np.int64)
    parent[ops] = nested_ops.parent

    launch = np.full(count, NONE, np.int64)
    launch[device] = _by_key(timeline, "correlation", calls, device, start[device])
    launched = device[launch[device] != NONE]
    launch_ns, launch_thread = start.copy(), thread.copy()
    launch_ns[launched], launch_thread[launched] = start[launch[launched]], thread[launch[launched]]

    op = np.full(count, NONE, np.int64)
    op[ops] = ops
    op[calls] = _by_key(timeline, "external", ops, calls, start[calls])
    lone = calls[op[calls] == NONE]
    # Ask for the middle of the call: operators and calls have two clocks that differ by a microsecond.
    op[lone] = nested_ops.at(thread[lone], (start[lone] + timeline["end_ns"][lone]) // 2)
    op[device] = _by_key(timeline, "external", ops, device, launch_ns[device])
    lone = launched[op[launched] == NONE]
    op[lone] = op[launch[lone]]
    # Without the runtime call, the operator's start is the nearest host time; without both, the device's own start.
    loose = device[(launch[device] == NONE) & (op[device] != NONE)]
    launch_ns[loose], launch_thread[loose] = start[op[loose]], thread[op[loose]]
    steps = steps_of(timeline)
    graphs = align_graphs(timeline, device, op)
    nodes, put_by = graphs.nodes, graphs.put_by
    graph_call = np.full(count, NONE, np.int64)
    graph_call[nodes] = put_by
    op[nodes] = op[put_by]  # before `align_launches`, since traced graphs tell the operators of untraced ones
    aligned = align_launches(timeline, device, op, launch)
    twin, repeats = aligned.twin, aligned.repeats
    op[repeats], launch_thread[repeats] = op[twin[repeats]], launch_thread[twin[repeats]]
    op[nodes], aligned.is_same[nodes] = op[put_by], graphs.is_same
    launch_ns = estimate_launches(timeline, aligned, steps, launch_ns)
    parent[calls], parent[device] = op[calls], op[device]

    root = climb(np.where((parent != NONE) & (kind == CODE["op"]), parent, np.arange(count)))
    top_op = np.where(op == NONE, NONE, root[op])
    forward_op = _forward(timeline, ops, op, parent)
    origin = _origin(forward_op)

    spanning = np.flatnonzero((kind != CODE["mark"]) & (kind != CODE["counter"]) & (kind != CODE["region"]))
    region = _regions(timeline, parent, launch_thread, launch_ns, spanning, steps)
    module = _modules(timeline, parent, launch_thread, launch_ns, spanning)
    module = np.where((module == NONE) & (origin != NONE), module[origin], module)
    _take_modules(timeline, module, parent, aligned, graphs)
    _take_regions(timeline, repeats, twin[repeats], region, steps)
    timeline.columns["parent"] = parent
    timeline.links = Links(
        op=op, top_op=top_op, parent=parent, launch=launch, launch_ns=launch_ns, launch_thread=launch_thread,
        forward_op=forward_op, region=region, forward_region=np.where(origin == NONE, NONE, region[origin]),
        module=module, step=_open_steps(timeline, steps, launch_ns), steps=steps, twin=twin,
        put_by=graph_call, shapes=_shapes(timeline, op, device, aligned), ops=None if len(device) else nested_ops,
    )  # fmt: skip
    return timeline.links


def _open_steps(timeline: Timeline, steps: tuple[Step, ...], times: Ints) -> Ints:
    """Return the place in `steps` of the step that is open at the time of each row, among the steps of its rank.

    A step made by two marks has no rank, so it is a step of all ranks.
    """
    edges = np.array([(s.start_ns, s.end_ns) for s in steps], np.int64).reshape(-1, 2)
    ranks, rank = rank_values(timeline["rank"])
    rows = np.array([s.row for s in steps], np.int64)
    marked = np.flatnonzero(rows == NONE)
    numbers = np.concatenate([np.flatnonzero(rows != NONE), np.repeat(marked, len(ranks))])
    own = np.concatenate([rank[rows[rows != NONE]], np.tile(np.arange(len(ranks)), len(marked))])
    order = np.argsort(numbers, kind="stable")
    numbers, own = numbers[order], own[order]
    return Nesting(numbers, own, edges[numbers, 0], edges[numbers, 1]).at(rank, times)


def _take_regions(timeline: Timeline, rows: Ints, twins: Ints, region: Ints, steps: tuple[Step, ...]) -> None:
    """Give untraced rows those regions of their twins that only a tracer names: torch's optimizers.

    The program's own regions are there in untraced steps too, where no operator is inside them.
    """
    named, start, end, rank = (timeline[column] for column in ("name", "start_ns", "end_ns", "rank"))
    of_program: set[int] = set()
    regions, ops = timeline.rows("region"), timeline.rows("op")
    for number in np.unique(rank[regions]).tolist():
        own, began = regions[rank[regions] == number], np.sort(start[ops[rank[ops] == number]])
        inside = np.searchsorted(began, end[own]) - np.searchsorted(began, start[own])
        of_program.update(named[own[inside == 0]].tolist())
    theirs = np.where(region[twins] == NONE, NONE, named[region[twins]])
    only_traced = (theirs != NONE) & ~np.isin(theirs, list(of_program))
    only_traced &= ~np.isin(region[twins], [s.row for s in steps])
    region[rows] = np.where(only_traced, region[twins], region[rows])


def _shapes(timeline: Timeline, op: Ints, device: Ints, aligned: LaunchAlignment) -> Ints:
    shapes = timeline["shapes"].copy()
    known = device[aligned.is_same[device]]
    shapes[device] = NONE
    shapes[known] = np.where(op[known] == NONE, NONE, timeline["shapes"][op[known]])
    return shapes


def _nest(timeline: Timeline, rows: Ints) -> Nesting:
    return Nesting(rows, timeline["thread"][rows], timeline["start_ns"][rows], timeline["end_ns"][rows])


def _by_key(timeline: Timeline, column: str, entries: Ints, rows: Ints, times: Ints) -> Ints:
    """Return the entry that has a row's number in a column; if several have it (merged traces), the latest before."""
    keys, starts = timeline[column], timeline["start_ns"]
    entries = entries[keys[entries] != NONE]
    only = single(keys[entries], keys[rows])
    if only is not None:
        return np.where(only == NONE, NONE, entries[only]) if len(entries) else only
    entry = latest([keys[entries]], starts[entries], [keys[rows]], times)
    lost = np.flatnonzero(entry == NONE)  # the device's clock may be slightly early
    entry[lost] = latest([keys[entries]], starts[entries], [keys[rows[lost]]], np.full(len(lost), _FOREVER))
    return np.where(entry == NONE, NONE, entries[entry]) if len(entries) else entry


def _forward(timeline: Timeline, ops: Ints, op: Ints, parent: Ints) -> Ints:
    """Return the forward operator of each row that runs under a backward operator.

    Autograd increments its sequence number when it makes a node, and an operator has the number at its own start. So
    the last forward operator with a node's number made it, and the operators around it with that number began it.
    """
    sequence, made_on, start = timeline["sequence"], timeline["forward_thread"], timeline["start_ns"]
    itself = np.arange(len(timeline))
    backward = (made_on > 0) & (sequence >= 0)
    forward = ops[(sequence[ops] >= 0) & (made_on[ops] <= 0)]
    nodes = ops[backward[ops]]
    out = np.full(len(timeline), NONE, np.int64)
    if not len(forward) or not len(nodes):
        return out
    threads = _threads_of(timeline, made_on[nodes])
    entry = latest(
        [sequence[forward], timeline["thread"][forward]], start[forward], [sequence[nodes], threads], start[nodes],
        strict=True,
    )  # fmt: skip
    lost = np.flatnonzero((entry == NONE) & (threads == NONE))
    entry[lost] = latest([sequence[forward]], start[forward], [sequence[nodes[lost]]], start[nodes[lost]], strict=True)
    same = (parent != NONE) & (sequence[parent] == sequence) & (made_on[parent] <= 0)
    began = climb(np.where(same, parent, itself))
    of_node = np.full(len(timeline), NONE, np.int64)
    of_node[nodes] = np.where(entry == NONE, NONE, began[forward[entry]])
    under = climb(np.where(backward[itself] | (parent == NONE), itself, parent))
    have = op != NONE
    out[have] = of_node[under[op[have]]]
    return out


def _threads_of(timeline: Timeline, numbers: Ints) -> Ints:
    """Return the threads for autograd's thread numbers; `NONE` if the trace does not tell."""
    thread_by_number = {int(k): int(v) for k, v in timeline.meta.get("forward_threads", {}).items()}
    distinct, inverse = np.unique(numbers, return_inverse=True)
    return np.array([thread_by_number.get(int(n), NONE) for n in distinct], np.int64)[inverse]


def _origin(forward_op: Ints) -> Ints:
    """Return the first forward operator of a chain of them: recomputed work belongs to what was called first."""
    itself = np.arange(len(forward_op))
    last = climb(np.where(forward_op == NONE, itself, forward_op))
    return np.where(forward_op == NONE, NONE, last)


def _regions(timeline: Timeline, parent: Ints, threads: Ints, times: Ints, rows: Ints, steps: tuple[Step, ...]) -> Ints:
    """Return the innermost region of each row, on its thread or else on any of its rank; set the regions' parents."""
    regions = timeline.rows("region")
    starts, ends = timeline["start_ns"][regions], _end_with_steps(timeline, steps)[regions]
    nested = Nesting(regions, timeline["thread"][regions], starts, ends)
    parent[regions] = nested.parent
    out = np.full(len(timeline), NONE, np.int64)
    out[rows] = nested.at(threads[rows], times[rows])
    # Autograd's threads have no regions of their own; they work for the region that was opened last.
    lone, rank = rows[out[rows] == NONE], timeline["rank"]
    anywhere = Nesting(regions, rank[regions], starts, ends)
    out[lone] = anywhere.at(rank[lone], times[lone])
    out[regions] = parent[regions]
    return out


def _end_with_steps(timeline: Timeline, steps: tuple[Step, ...]) -> Ints:
    """Return the end of every row; an optimizer's region in which a hook begins the next step ends there.

    Between the hook and the region's end, the thread may wait for a core or for Python's lock for longer than the next
    step lasts. That step is not inside the region even then.
    """
    start, thread, end = timeline["start_ns"], timeline["thread"], timeline["end_ns"].copy()
    regions, named = timeline.rows("region"), timeline["name"]
    optimizers = [n for n, name in enumerate(timeline.names) if name.startswith(_OPTIMIZER)]
    rows = np.array([s.row for s in steps if s.row != NONE], np.int64)
    around = _nest(timeline, regions[np.isin(named[regions], optimizers)]).at(thread[rows], start[rows])
    outlasts = (around != NONE) & (end[rows] > end[around])
    end[around[outlasts]] = start[rows[outlasts]]
    return end


def _modules(timeline: Timeline, parent: Ints, threads: Ints, times: Ints, rows: Ints) -> Ints:
    """Return the innermost module of each row; set the parents of modules and frames."""
    named = timeline["name"]
    modules = np.flatnonzero(np.isin(named, timeline.meta.get("modules", ())))
    frames = np.flatnonzero(np.isin(named, timeline.meta.get("frames", ())))
    out = np.full(len(timeline), NONE, np.int64)
    if len(frames):
        both = _nest(timeline, np.sort(np.concatenate((modules, frames))))
        parent[both.rows] = both.parent
    if len(modules):
        nested = _nest(timeline, modules)
        parent[modules] = nested.parent
        out[rows] = nested.at(threads[rows], times[rows])
    return out


def _take_modules(
    timeline: Timeline, module: Ints, parent: Ints, aligned: LaunchAlignment, graphs: GraphAlignment
) -> None:
    """Give untraced rows the modules of their twins, and kernels of graphs those of the calls that put them there."""
    device, repeats, nodes = timeline.device_rows, aligned.repeats, graphs.nodes
    module[repeats] = module[aligned.twin[repeats]]
    traced = device[aligned.twin[device] == device]
    for rows, key in aligned.by_key:
        _enclose(timeline, module, parent, traced, rows, key)
    of_calls = module[graphs.put_by]
    module[nodes] = np.where(of_calls == NONE, module[nodes], of_calls)
    for rows, key in graphs.by_key:
        _enclose(timeline, module, parent, graphs.captured, rows, key)


def _enclose(timeline: Timeline, module: Ints, parent: Ints, traced: Ints, rows: Ints, key: Ints) -> None:
    """Give each of the rows the innermost module that encloses all `traced` rows with its key.

    `module` has that of the row's twin, which is only one of them: equal layers run equal kernels.
    """
    named = timeline["name"]
    path_of: dict[int, list[int]] = {NONE: []}

    def find_path(row: int) -> list[int]:
        """Return a module and the modules around it, outermost first."""
        if row not in path_of:
            path_of[row] = [*find_path(int(parent[row])), *([row] if named[row] in modules else [])]
        return path_of[row]

    modules = frozenset(timeline.meta.get("modules", ()))
    if not modules or not len(rows):
        return
    traced = traced[(parent[traced] != NONE) & np.isin(key[traced], key[rows])]  # those of operators
    pairs = np.unique(np.column_stack((key[traced], module[traced])), axis=0)
    depths: dict[int, int] = {}
    for number, group in groupby(pairs.tolist(), lambda pair: pair[0]):
        paths = [[int(named[row]) for row in find_path(found)] for _, found in group]
        depths[number] = sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False)))
    pairs, which = np.unique(np.column_stack((key[rows], module[rows])), axis=0, return_inverse=True)
    outer = [([NONE, *find_path(found)])[depths.get(number, 0)] for number, found in pairs.tolist()]
    module[rows] = np.array(outer, np.int64)[which.reshape(-1)]


def steps_of(timeline: Timeline) -> tuple[Step, ...]:
    """Return the profiler's steps, or else regions named like steps; plus times between start/X and end/X marks.

    Where most regions named like steps are outside the profiler's, the program had one of its own for a few steps only.
    `Links.steps` has the same. Use this function if nothing else of the links is needed.
    """
    start, end, named = timeline["start_ns"], timeline["end_ns"], timeline["name"]
    regions = timeline.rows("region")
    texts = {n: timeline.names[n] for n in np.unique(named[regions]).tolist()}
    profiled, counted = (
        regions[np.isin(named[regions], [n for n, text in texts.items() if pattern.fullmatch(text)])]
        for pattern in (_STEP, _STEP_OF_THE_USER)
    )
    if len(profiled):
        outside = (start[counted] < start[profiled].min()) | (start[counted] >= end[profiled].max())
        counted = counted if 2 * np.count_nonzero(outside) > len(counted) else profiled
    steps = [Step(timeline.name(r), int(start[r]), int(end[r]), r) for r in counted.tolist()]
    begun: dict[str, list[int]] = {}
    marks = timeline.rows("mark")
    for row in marks[np.argsort(start[marks], kind="stable")].tolist():
        edge, _, name = timeline.name(row).partition("/")
        if edge == "start":
            begun.setdefault(name, []).append(int(start[row]))
        elif edge == "end" and begun.get(name):
            steps.append(Step(name, begun[name].pop(), int(start[row])))
    return tuple(sorted(steps, key=lambda s: (s.start_ns, -s.end_ns)))
