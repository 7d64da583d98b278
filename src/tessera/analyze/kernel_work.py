"""The work of every call on a timeline: FLOPs, bytes and the unit, shared out to the kernels an operator launched."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..attribute.work import OpWork, work_of
from ..record import CODE
from ..timeline.columns import NONE, Ints, Timeline
from .kernel_names import category
from .outputs import convolutions

Floats = NDArray[np.float64]

# Kernels an operator launches beside the one that multiplies: they prepare, convert or add up.
_HELPER = re.compile(r"dot_do_o|convert|splitk?reduce|reduce|memset|philox|permute|transpose|nchw|nhwc", re.IGNORECASE)
_MATRIX = ("attention", "convolution", "matrix product")
_FP32 = re.compile(r"(?<!t)sgemm|simt|f32f32_f32f32|ffma|gemv|gemmk1|dot_kernel", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """One entry a row of `rows`. `flops`, `bytes` are NaN where unknown; `unit` is a place in `units`, or -1.

    `counted` marks bytes that counters measured in device memory; `l2_bytes` are counted ones only. `works` has the
    work of the operator of a row by its place in `work`, -1 for none.
    """

    rows: Ints
    op: Ints
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


def calls_of(timeline: Timeline) -> Calls:
    """Device rows with their work; on a timeline without a device, the outermost operators that do any."""
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
    flops, moved = (_by_work(works, work, field) for field in ("flops", "bytes"))
    share = _shares(timeline, rows, op, seconds, works, work)
    # What a helper moves is not known; it computes nothing.
    flops, moved = flops * share, np.where(share > 0, moved * share, np.nan)
    own = timeline["bytes"][rows]
    kind = timeline["kind"][rows]
    for code, times in ((CODE["memcpy"], _copied(timeline, rows)), (CODE["memset"], np.ones(len(rows)))):
        mine = kind == code
        flops = np.where(mine, 0.0, flops)
        moved = np.where(mine, np.where(own >= 0, own * times, np.nan), moved)
    flops[kind == CODE["collective"]] = np.nan
    moved[kind == CODE["collective"]] = np.nan
    l2, counted = _counters(timeline, rows, seconds, flops, moved)
    units, unit = _units(timeline, rows, works, work)
    return Calls(
        rows=rows, op=op, seconds=seconds, flops=flops, bytes=moved, l2_bytes=l2, counted=counted, unit=unit,
        units=units, work=work, works=works, shapes_recorded=bool(np.any(timeline["shapes"] != NONE)),
    )  # fmt: skip


def _works(timeline: Timeline, op: Ints) -> tuple[tuple[OpWork, ...], Ints]:
    """The work of each row's operator: looked up once for each operator, name and shapes."""
    found = np.full(len(op), NONE, np.int64)
    distinct, inverse = np.unique(op, return_inverse=True)
    convs = convolutions(timeline, distinct[distinct != NONE])
    numbers: dict[OpWork, int] = {}
    place = np.full(len(distinct), NONE, np.int64)
    for i, row in enumerate(distinct.tolist()):
        if row == NONE:
            continue
        output, goes_on = convs.get(row, (None, True))
        one = work_of(timeline.name(row), timeline.text("shapes", row), output, input_grad=goes_on)
        if one is not None:
            place[i] = numbers.setdefault(one, len(numbers))
    found = place[np.asarray(inverse).reshape(-1)]
    return tuple(numbers), found


def _by_work(works: tuple[OpWork, ...], work: Ints, field: str) -> Floats:
    values = np.array([*(np.nan if getattr(w, field) is None else getattr(w, field) for w in works), np.nan])
    return np.asarray(values[work], np.float64)  # -1 is the last: unknown


def _shares(timeline: Timeline, rows: Ints, op: Ints, seconds: Floats, works: tuple[OpWork, ...], work: Ints) -> Floats:
    """How much of its operator's work each row did: by time; of a product only kernels that multiply."""
    kernel = timeline["kind"][rows] == CODE["kernel"]
    if not np.any(kernel):
        return np.ones(len(rows))
    names = [_multiplies(name) for name in timeline.names]
    matrix_kernel = kernel & np.array(names, bool)[timeline["name"][rows]]
    matrix_work = np.array([*(w.matrix for w in works), False])[work]
    _, inverse = np.unique(op, return_inverse=True)
    group = np.asarray(inverse).reshape(-1)
    lasted = np.maximum(seconds, 1e-12)

    def summed(weight: Floats) -> Floats:
        return np.asarray(np.bincount(group, weight)[group], np.float64)

    weight = np.where(np.where(matrix_work, matrix_kernel, kernel), lasted, 0.0)
    # Where no kernel looks like one that multiplies, all of them did it together.
    weight = np.where(summed(weight) > 0, weight, np.where(kernel, lasted, 0.0))
    total = summed(weight)
    return np.divide(weight, total, out=np.zeros(len(rows)), where=total > 0)


def _multiplies(name: str) -> bool:
    return category(name) in _MATRIX and not _HELPER.search(name)


def _copied(timeline: Timeline, rows: Ints) -> Floats:
    """How often a copy's bytes cross device memory: twice within a device, once to or from it."""
    launch = timeline["launch"][rows]
    twice = np.array([*((entry.memcpy_dir or "") == "DtoD" for entry in timeline.launches), False], bool)
    return np.where(twice[launch], 2.0, 1.0)


def _counters(
    timeline: Timeline, rows: Ints, seconds: Floats, flops: Floats, moved: Floats
) -> tuple[Floats, NDArray[np.bool_]]:
    """Bytes and FLOPs that counters measured take the place of those from shapes (in `flops` and `moved`)."""
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
    """The unit of each row ("matrix.bf16"); of an fp32 product the kernel's name tells whether it runs as TF32."""
    names: dict[str, int] = {}
    keys = np.stack([work, timeline["name"][rows]], axis=1)
    distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
    place = np.full(len(distinct), NONE, np.int64)
    for i, (number, name) in enumerate(distinct.tolist()):
        unit = _unit(works[number], timeline.names[name]) if number != NONE else None
        if unit is not None:
            place[i] = names.setdefault(unit, len(names))
    return tuple(names), place[np.asarray(inverse).reshape(-1)]


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
