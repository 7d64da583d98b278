"""A table of seconds where there are no joules: kernels, operators and steps of a trace without power."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np

from ..attribute.table import EnergyRow, EnergyTable
from ..joules import Floats
from ..record import KINDS
from ..timeline.columns import NONE, Ints, Timeline
from .devices import busy_spans, list_devices
from .mean_step import self_time
from .module_tree import sum_own, sum_passes

_NAN = float("nan")


def time_table(timeline: Timeline) -> EnergyTable:
    """Return a table without joules of a trace without power: calls and seconds by kernel, operator and step."""
    rows, links, traced_ns = timeline.device_rows, timeline.linked, timeline.traced_span
    host = not len(rows)
    if host:  # each operator's own time, as in attribution on a machine without GPU
        rows, seconds = self_time(timeline)
        ops = rows
    else:
        seconds = (timeline["end_ns"][rows] - timeline["start_ns"][rows]) * 1e-9
        ops = links.op[rows]
    kernels = [] if host else _timed_rows(timeline, timeline["name"][rows], timeline["kind"][rows], seconds)
    has_op = ops != NONE
    by_op = timeline["name"][np.where(has_op, ops, 0)]
    codes = np.full(len(rows), KINDS.index("op"))
    devices = list_devices(timeline)
    steps = []
    for step, took_s in zip(links.steps, _step_lengths(timeline), strict=True):
        of_rank = [d for d in devices if step.row == NONE or d.rank == timeline["rank"][step.row]]
        row = _timed_row(step.name, "step", 1, took_s, took_s)
        steps.append(dataclasses.replace(row, devices=max(1, len(of_rank))))
    return EnergyTable(
        energy_j=_NAN,
        error_j=_NAN,
        idle_j=_NAN,
        idle_error_j=_NAN,
        busy_s=float(seconds.sum()),
        time_s=(traced_ns[1] - traced_ns[0]) * 1e-9,
        basis="timed",
        kernels=kernels,
        steps=steps,
        coverage=0.0,
        ops=_timed_rows(timeline, by_op[has_op], codes[has_op], seconds[has_op]),
        modules=list_modules(timeline, rows, seconds),
    )


def sum_idle(timeline: Timeline, time_s: float) -> float | None:
    """Return the seconds of `time_s` in which devices did nothing, of all of them together; None if there is none."""
    devices = list_devices(timeline)
    busy_s = sum(busy_spans(timeline, device.rows).total_ns * 1e-9 for device in devices)
    return max(len(devices) * time_s - busy_s, 0.0) if devices else None


def _step_lengths(timeline: Timeline) -> list[float]:
    """Return the seconds of each step; on a device, from its first row to the first row of the next step.

    The host runs ahead: a step's kernels end after its region, so the rest of the region is not idle time of the
    device.
    """
    links, devices = timeline.linked, list_devices(timeline)
    by_host = [(s.end_ns - s.start_ns) * 1e-9 for s in links.steps]
    if len(devices) != 1 or not by_host:
        return by_host
    rows = devices[0].rows
    begins = np.full(len(by_host) + 1, np.iinfo(np.int64).max)  # the last cell is for rows in no step
    ends = np.zeros(len(by_host) + 1, np.int64)
    np.minimum.at(begins, links.step[rows], timeline["start_ns"][rows])
    np.maximum.at(ends, links.step[rows], timeline["end_ns"][rows])
    begins, ends = begins[:-1], ends[:-1]
    if not ends.all():  # a step has no row on the device
        return by_host
    until = np.r_[np.maximum(begins[1:], begins[:-1]), ends[-1]]
    return np.asarray((until - begins) * 1e-9).tolist()  # type: ignore[no-any-return]


def list_modules(timeline: Timeline, rows: Ints, seconds: Floats) -> list[EnergyRow]:
    """Return modules with everything inside them; what ran in several passes of one name counts once."""
    calls = Counter(timeline.name(row) for row in sum_passes(timeline, rows, seconds))
    sums: dict[str, float] = {}
    for module, value in sum_own(timeline, rows, seconds).items():
        for name in {timeline.name(row) for row in timeline.linked.path(module)}:
            sums[name] = sums.get(name, 0.0) + value
    return [_timed_row(name, "module", calls[name], value) for name, value in sums.items()]


def _timed_rows(timeline: Timeline, names: Any, kinds: Any, seconds: Any) -> list[EnergyRow]:
    used, first, inverse, counts = np.unique(names, return_index=True, return_inverse=True, return_counts=True)
    total = np.bincount(inverse.reshape(-1), weights=seconds, minlength=len(used))
    return [
        _timed_row(timeline.names[int(n)], KINDS[int(kinds[f])], int(c), float(s))
        for n, f, c, s in zip(used, first, counts, total, strict=True)
    ]


def _timed_row(name: str, kind: str, calls: int, seconds: float, wall_s: float | None = None) -> EnergyRow:
    return EnergyRow(
        name=name,
        kind=kind,
        calls=calls,
        time_s=seconds,
        energy_j=_NAN,
        error_j=_NAN,
        share=_NAN,
        wall_s=wall_s,
    )
