"""The joules of a run as a tree: region, operator, kernel; and idle beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..attribute.table import EnergyTable
from ..integral import Floats
from ..timeline.columns import NONE, Ints, Timeline
from .host_gaps import region_paths, row_joules
from .kernel_names import op_name, short_name

SMALLEST = 0.0015
"""Share of all joules below which branches of one parent become one: narrower than two pixels."""


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
        alone = [r for r in table.ops if not math.isnan(r.energy_error_j)]  # those of a summary hold one another
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
