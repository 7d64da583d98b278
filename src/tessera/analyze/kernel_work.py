"""The work of every call on a timeline: FLOPs, bytes and the unit, shared out to the kernels that an operator launched.

Kineto records the inputs of operators, not their outputs, and a convolution's padding and stride are arguments. So the
shape of a convolution's output comes from the backward operator of the same call (its gradient has it), or else from
the first operator afterwards that takes a tensor of that batch and that many channels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..attribute.work import OpWork, Shape, is_convolution, work_of
from ..joules import Floats
from ..record import CODE
from ..timeline.columns import NONE, Ints, Timeline
from ..timeline.distinct import distinct, rank_values
from ..timeline.shapes import parse
from .kernel_names import category

# Kernels that an operator launches beside the one that multiplies: they prepare, convert or add up.
_HELPER = re.compile(r"dot_do_o|convert|splitk?reduce|reduce|memset|philox|permute|transpose|nchw|nhwc", re.IGNORECASE)
_MATRIX = ("attention", "convolution", "matrix product")
_FP32 = re.compile(r"(?<!t)sgemm|simt|f32f32_f32f32|ffma|gemv|gemmk1|dot_kernel", re.IGNORECASE)
_LOOK_AHEAD = 40
"""Operators that are looked at after a convolution: its bias, a norm and an activation are among the first few."""
_AUTOGRAD_NODE = "autograd::engine::evaluate_function: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """One entry for each of `rows`. `flops` and `bytes` are NaN if unknown; `unit` is an index of `units`, or -1.

    `repeated` marks kernels of untraced steps, whose operator is that of traced ones. `counted` marks bytes that
    counters measured in device memory; `l2_bytes` are only counted ones. `works` has the work of a row's operator, by
    its index in `work`; -1 means none.
    """

    rows: Ints
    op: Ints
    repeated: NDArray[np.bool_]
    seconds: Floats
    flops: Floats
    bytes: Floats
    l2_bytes: Floats
    counted: NDArray[np.bool_]
    unit: Ints
    units: tuple[str, ...]
    work: Ints
    works: tuple[OpWork, ...]
    shapes_recorded: bool


def list_calls(timeline: Timeline) -> Calls:
    """Return device rows with their work; on a timeline without a device, the outermost operators that do work."""
    device = timeline.device_rows
    if len(device):
        return _calls(timeline, device, timeline.linked.op[device])
    ops = _outermost(timeline)
    return _calls(timeline, ops, ops)


def _outermost(timeline: Timeline) -> Ints:
    ops, parent = timeline.rows("op"), timeline.linked.parent
    does = {int(r) for r in ops.tolist() if work_of(timeline.name(r), timeline.text("shapes", r)) is not None}
    inside: set[int] = set()
    for row in sorted(does, key=lambda r: (int(timeline["start_ns"][r]), -int(timeline["end_ns"][r]))):
        up = int(parent[row])
        while up != NONE and up not in does:
            up = int(parent[up])
        if up != NONE:
            inside.add(row)
    return np.array(sorted(does - inside), np.int64)


def _calls(timeline: Timeline, rows: Ints, op: Ints) -> Calls:
    seconds = (timeline["end_ns"][rows] - timeline["start_ns"][rows]) * 1e-9
    works, work = _works(timeline, op)
    links = timeline.linked
    twin = links.find_twins(rows)
    repeated = twin != rows
    work[repeated & (links.shapes[rows] == NONE)] = NONE  # it runs another grid than the traced one
    flops, moved = (_by_work(works, work, field) for field in ("flops", "bytes"))
    share = np.zeros(len(timeline))
    own = ~repeated
    share[rows[own]] = _shares(timeline, rows[own], op[own], seconds[own], works, work[own])
    share = share[twin]
    # The bytes that a helper moves are unknown; it computes nothing.
    flops, moved = flops * share, np.where(share > 0, moved * share, np.nan)
    own = timeline["bytes"][rows]
    kind = timeline["kind"][rows]
    for code, times in ((CODE["memcpy"], _crossings(timeline, rows)), (CODE["memset"], np.ones(len(rows)))):
        is_kind = kind == code
        flops = np.where(is_kind, 0.0, flops)
        moved = np.where(is_kind, np.where(own >= 0, own * times, np.nan), moved)
    flops[kind == CODE["collective"]] = np.nan
    moved[kind == CODE["collective"]] = np.nan
    l2, counted = _counters(timeline, rows, seconds, flops, moved)
    units, unit = _units(timeline, rows, works, work)
    return Calls(
        rows=rows,
        op=op,
        repeated=repeated,
        seconds=seconds,
        flops=flops,
        bytes=moved,
        l2_bytes=l2,
        counted=counted,
        unit=unit,
        units=units,
        work=work,
        works=works,
        shapes_recorded=bool(np.any(timeline["shapes"] != NONE)),
    )


def _works(timeline: Timeline, op: Ints) -> tuple[tuple[OpWork, ...], Ints]:
    """Return the work of each row's operator, looked up once for each operator, name and shapes."""
    ops, inverse = rank_values(op)
    convs = trace_convolutions(timeline, ops[ops != NONE])
    numbers: dict[OpWork, int] = {}
    place = np.full(len(ops), NONE, np.int64)
    for i, row in enumerate(ops.tolist()):
        if row == NONE:
            continue
        output, goes_on = convs.get(row, (None, True))
        one = work_of(timeline.name(row), timeline.text("shapes", row), output, input_grad=goes_on)
        if one is not None:
            place[i] = numbers.setdefault(one, len(numbers))
    return tuple(numbers), place[np.asarray(inverse).reshape(-1)]


def _by_work(works: tuple[OpWork, ...], work: Ints, field: str) -> Floats:
    values = np.array([*(np.nan if getattr(w, field) is None else getattr(w, field) for w in works), np.nan])
    return np.asarray(values[work], np.float64)  # -1 is the last entry: unknown


def _shares(timeline: Timeline, rows: Ints, op: Ints, seconds: Floats, works: tuple[OpWork, ...], work: Ints) -> Floats:
    """Return how much of its operator's work each row did, by time; in a product, only kernels that multiply count."""
    kernel = timeline["kind"][rows] == CODE["kernel"]
    if not np.any(kernel):
        return np.ones(len(rows))
    names = [_multiplies(name) for name in timeline.names]
    matrix_kernel = kernel & np.array(names, bool)[timeline["name"][rows]]
    matrix_work = np.array([*(w.matrix for w in works), False])[work]
    _, inverse = rank_values(op)
    group = np.asarray(inverse).reshape(-1)
    lasted = np.maximum(seconds, 1e-12)

    def sum_by_operator(weight: Floats) -> Floats:
        return np.asarray(np.bincount(group, weight)[group], np.float64)

    weight = np.where(np.where(matrix_work, matrix_kernel, kernel), lasted, 0.0)
    # If no kernel looks like one that multiplies, all of them did it together.
    weight = np.where(sum_by_operator(weight) > 0, weight, np.where(kernel, lasted, 0.0))
    total = sum_by_operator(weight)
    return np.divide(weight, total, out=np.zeros(len(rows)), where=total > 0)


def _multiplies(name: str) -> bool:
    return category(name) in _MATRIX and not _HELPER.search(name)


def _crossings(timeline: Timeline, rows: Ints) -> Floats:
    """Return how often a copy's bytes cross device memory: twice within a device, once to or from it."""
    launch = timeline["launch"][rows]
    twice = np.array([*((entry.memcpy_dir or "") == "DtoD" for entry in timeline.launches), False], bool)
    return np.where(twice[launch], 2.0, 1.0)


def _counters(
    timeline: Timeline, rows: Ints, seconds: Floats, flops: Floats, moved: Floats
) -> tuple[Floats, NDArray[np.bool_]]:
    """Put bytes and FLOPs that counters measured into `flops` and `moved`; return L2 bytes, and which are counted."""
    l2, counted = np.full(len(rows), np.nan), np.zeros(len(rows), bool)
    if not timeline.extra:
        return l2, counted
    for i, row in enumerate(rows.tolist()):
        extra = timeline.extra.get(row)
        if not extra:
            continue
        read, write = extra.get("dram_read_gbps"), extra.get("dram_write_gbps")
        if read is not None and write is not None:
            moved[i] = (read + write) * 1e9 * seconds[i]
            counted[i] = True
        if extra.get("l2_gbps") is not None:
            l2[i] = extra["l2_gbps"] * 1e9 * seconds[i]
        if extra.get("flops") is not None:
            flops[i] = extra["flops"]
    return l2, counted


def _units(timeline: Timeline, rows: Ints, works: tuple[OpWork, ...], work: Ints) -> tuple[tuple[str, ...], Ints]:
    """Return the unit of each row ("matrix.bf16"); the kernel's name tells whether an fp32 product runs as TF32."""
    names: dict[str, int] = {}
    name = timeline["name"][rows]
    first, inverse = distinct(work, name)
    place = np.full(len(first), NONE, np.int64)
    for i, at in enumerate(first.tolist()):
        unit = _unit(works[work[at]], timeline.names[name[at]]) if work[at] != NONE else None
        if unit is not None:
            place[i] = names.setdefault(unit, len(names))
    return tuple(names), place[inverse]


def _unit(work: OpWork, kernel: str) -> str | None:
    precision = work.precision
    if precision is None:
        return "vector.fp32" if not work.matrix else None
    if not work.matrix:
        return f"vector.{precision}" if precision in ("fp64", "fp32", "fp16", "bf16") else "vector.fp32"
    if precision != "fp32":
        return f"matrix.{precision}"
    host = kernel.startswith("aten::")
    return "vector.fp32" if host or (_FP32.search(kernel) and "tf32" not in kernel.lower()) else "matrix.tf32"


# -- convolutions -----------------------------------------------------------------------------------------------------


def trace_convolutions(timeline: Timeline, ops: Ints) -> Mapping[int, tuple[Shape | None, bool]]:
    """Return for each convolution its output's shape, and whether the input's gradient is computed."""
    named = np.array([is_convolution(name) for name in timeline.names], bool)
    rows = ops[named[timeline["name"][ops]]] if len(ops) else ops
    if not len(rows):
        return {}
    gradients = _shapes_from_backward(timeline)
    outputs: dict[int, tuple[Shape | None, bool]] = {}
    order = _OperatorOrder(timeline)
    for row in rows.tolist():
        if "backward" in timeline.name(row):
            outputs[row] = None, order.continues_backward(row)
        else:
            path = timeline.linked.path(row)
            shape = next((gradients[r] for r in path if r in gradients), None)
            outputs[row] = shape or order.find_output(row, path[0]), True
    return outputs


def _shapes_from_backward(timeline: Timeline) -> dict[int, Shape]:
    """Return the output's shape by forward operator: that of the gradient that its backward operator got."""
    links, ops, out = timeline.linked, timeline.rows("op"), {}
    for row in ops[links.forward_op[ops] != NONE].tolist():
        name = timeline.name(row)
        if is_convolution(name) and "backward" in name:
            tensors = parse(timeline.text("shapes", row) or "")
            if tensors:
                out[int(links.forward_op[row])] = tensors[0][0]
    return out


class _OperatorOrder:
    """Operators of each thread in time order."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        ops = timeline.rows("op")
        self._order = ops[np.lexsort((timeline["start_ns"][ops], timeline["thread"][ops]))]
        self._at = {int(row): i for i, row in enumerate(self._order.tolist())}
        is_node = [name.startswith(_AUTOGRAD_NODE) and "AccumulateGrad" not in name for name in timeline.names]
        self._nodes = np.flatnonzero(np.array(is_node, bool)[timeline["name"][self._order]])

    def find_output(self, row: int, outermost: int) -> Shape | None:
        """Return the first tensor used later that could be the output: same batch, channels and dimensions."""
        t = self._timeline
        tensors = parse(t.text("shapes", row) or "")
        if len(tensors) < 2:
            return None
        (x, _), (w, _) = tensors[:2]
        transposed = any("transpose" in t.name(r) for r in t.linked.path(row))
        begin = self._at[row] + 1
        for later in self._order[begin : begin + _LOOK_AHEAD].tolist():
            if t["thread"][later] != t["thread"][row]:
                break
            # Operators inside the same convolution call take its inputs again.
            if is_convolution(t.name(later)) and t["end_ns"][later] <= t["end_ns"][outermost]:
                continue
            for shape, _ in parse(t.text("shapes", later) or ""):
                channels = len(shape) == len(x) and (shape[1] % w[1] == 0 if transposed else shape[1] == w[0])
                if channels and shape[0] == x[0]:
                    return shape
        return None

    def continues_backward(self, row: int) -> bool:
        """Return whether autograd evaluated another node after this one's in the same pass.

        The engine takes nodes by falling sequence number, so a larger one begins the next pass. The last node of a pass
        is the first layer, whose input needs no gradient.
        """
        t = self._timeline
        node = next((r for r in reversed(t.linked.path(row)) if t["sequence"][r] >= 0), row)
        number, end_ns = int(t["sequence"][node]), int(t["end_ns"][node])
        for at in self._nodes[np.searchsorted(self._nodes, self._at[row], side="right") :]:
            later = self._order[at]
            if t["thread"][later] != t["thread"][row]:
                break
            if t["start_ns"][later] >= end_ns:
                return bool(0 <= t["sequence"][later] < number)
        return False
