r"""GPUs that are alike are simulated once: a tree of classes, from rows to GPUs, with how many there are of each.

::

    row class ──► rack classes in it (count) ──► node classes in a rack (count) ──► GPU classes in a node (count)

Two GPUs are alike if they run the same wave of the same job with the same delays, in nodes, racks and rows that are
alike. Every class belongs to one class above it, so that heat and trips of a rack affect only its own GPUs. If every
GPU is distinct, all counts are 1 and the tree is the facility itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelClasses:
    """The classes of one level. Classes of one parent are together: `parent` rises.

    `count` is the number of members in one of the parent's class, `instances` the number of all members, and `first`
    the facility's number of one member.
    """

    parent: Ints32
    count: NDArray[np.float64]
    instances: NDArray[np.float64]
    first: Ints32

    def __len__(self) -> int:
        return len(self.parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTree:
    """The classes of all levels; the parent of rows is the feed.

    `*_class` is the class of each member of the facility.
    """

    gpus: LevelClasses
    nodes: LevelClasses
    racks: LevelClasses
    rows: LevelClasses
    rack_class: Ints32
    row_class: Ints32

    @property
    def rack_of_gpu(self) -> Ints32:
        """Return the class of the rack that a class of GPUs is in."""
        return self.nodes.parent[self.gpus.parent]


def build_tree(
    gpu_keys: NDArray[np.int64],
    *,
    node_gpus: int,
    rack_nodes: int,
    row_racks: int,
    marks: Mapping[str, Mapping[int, Any]],
) -> ClassTree:
    """Return the tree of a facility whose GPUs have these keys: GPUs with equal keys are alike.

    `marks` make a node, rack or row differ from others with the same content ("node", "rack", "row": number -> mark),
    for example by a fault.
    """
    nodes = gpu_keys.reshape(-1, node_gpus)
    racks_count, rows_count = len(nodes) // rack_nodes, len(nodes) // rack_nodes // row_racks
    node_kind = _number_kinds(
        [(row.tobytes(), marks.get("node", {}).get(i)) for i, row in enumerate(np.sort(nodes, axis=1))]
    ).reshape(racks_count, rack_nodes)
    rack_kind = _number_kinds(
        [(np.sort(row).tobytes(), marks.get("rack", {}).get(i)) for i, row in enumerate(node_kind)]
    ).reshape(rows_count, row_racks)
    row_kind = _number_kinds([(np.sort(row).tobytes(), marks.get("row", {}).get(i)) for i, row in enumerate(rack_kind)])
    return _expand(nodes, node_kind, rack_kind, row_kind)


def _number_kinds(keys: Sequence[Any]) -> NDArray[np.int64]:
    known: dict[Any, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)


def _expand(
    nodes: NDArray[np.int64], node_kind: NDArray[np.int64], rack_kind: NDArray[np.int64], row_kind: NDArray[np.int64]
) -> ClassTree:
    """Make classes with one parent each from the kinds of each level, top down."""
    rack_nodes, row_racks = node_kind.shape[1], rack_kind.shape[1]
    rows, row_class = _count_first(np.zeros(len(row_kind), dtype=np.int64), row_kind)
    row_of = np.repeat(row_class, row_racks)
    chosen = np.isin(np.repeat(np.arange(len(row_kind)), row_racks), rows.first)
    racks, rack_class = _level(row_of, rack_kind.ravel(), chosen, rows)
    rack_of = np.repeat(rack_class, rack_nodes)
    inside = np.isin(np.repeat(np.arange(len(rack_class)), rack_nodes), racks.first)
    made, node_class = _level(rack_of, node_kind.ravel(), inside, racks)
    node_gpus = nodes.shape[1]
    gpu_of = np.repeat(node_class, node_gpus)
    within = np.isin(np.repeat(np.arange(len(nodes)), node_gpus), made.first)
    gpus, _ = _level(gpu_of, nodes.ravel(), within, made)
    return ClassTree(gpus=gpus, nodes=made, racks=racks, rows=rows, rack_class=rack_class, row_class=row_class)


def _count_first(parent: NDArray[np.int64], kind: NDArray[np.int64]) -> tuple[LevelClasses, Ints32]:
    _, first, inverse, counts = np.unique(kind, return_index=True, return_inverse=True, return_counts=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    count = counts[order].astype(float)
    classes = LevelClasses(
        parent=parent[first[order]].astype(np.int32),
        count=count,
        instances=count.copy(),
        first=first[order].astype(np.int32),
    )
    return classes, rank[inverse].astype(np.int32)


def _level(
    parent: Ints32, kind: NDArray[np.int64], chosen: NDArray[np.bool_], above: LevelClasses
) -> tuple[LevelClasses, Ints32]:
    """Return classes of (parent, kind); `chosen` are those in the first of each parent class, which are counted."""
    pair = parent.astype(np.int64) * (int(kind.max()) + 1) + kind
    values, first, inverse = np.unique(pair, return_index=True, return_inverse=True)
    inside = np.bincount(inverse[chosen], minlength=len(values)).astype(float)
    # The first member of a class may be in another parent than the first one: count and name those of the first parent.
    order = np.lexsort((first, parent[first]))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    numbers = np.flatnonzero(chosen)
    firsts = np.full(len(values), -1, dtype=np.int64)
    firsts[inverse[numbers[::-1]]] = numbers[::-1]
    parents = parent[first[order]].astype(np.int32)
    count = inside[order]
    classes = LevelClasses(
        parent=parents, count=count, instances=count * above.instances[parents], first=firsts[order].astype(np.int32)
    )
    return classes, rank[inverse].astype(np.int32)
