"""What kept a device busy: intervals of kernel classes, and how overlapping ones share it.

Kernels of one class draw the same power: one name, one launch configuration, one operator with one set of shapes. The
joules of a class are its watts times its seconds, so the solver looks for watts by class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..timeline import Timeline
from ..timeline.columns import NONE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Power falls with the clock when the limit holds it: kernels that run slower than their class usually does draw less.
# The exponent is the one that fits four recorded mixtures on an H200 best (benchmarks/attribution.py --fit: 1 to 2).
SPEED_EXPONENT = 1.7
_SPEED_RANGE = 0.2
# A class whose durations scatter more than this is not slowed and sped up by clocks alone.
_ONE_SPEED = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Everything that ran on one device, in order of start. `share_s` sums to the busy time: what overlaps shares it.

    `weight` is the power of a row relative to its class, from how fast it ran. `kind` is "kernel" ... or "op" (a host).
    """

    rows: Ints
    start_ns: Ints
    end_ns: Ints
    share_s: Floats
    weight: Floats
    cls: Ints
    names: list[str]
    """Of each class: the name of its first row."""
    first: Ints
    """Of each class: its first row in the timeline."""

    @property
    def busy_s(self) -> float:
        """Seconds in which something ran."""
        return float(self.share_s.sum())

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.names)


def activity(timeline: Timeline, rows: Ints, ops: Ints) -> Activity:
    """The activity of some rows of one device. `ops` has for every row of the timeline the operator it comes from."""
    order = rows[np.argsort(timeline["start_ns"][rows], kind="stable")]
    start, end = timeline["start_ns"][order], timeline["end_ns"][order]
    op = ops[order]
    shapes = np.where(op == NONE, NONE, timeline["shapes"][op])
    op_name = np.where(op == NONE, NONE, timeline["name"][op])
    size = np.where(
        timeline["bytes"][order] > 0, np.log2(np.maximum(timeline["bytes"][order], 1)).astype(np.int64), NONE
    )
    first, cls = distinct(
        timeline["kind"][order], timeline["name"][order], timeline["launch"][order], op_name, shapes, size
    )
    seconds = (end - start) * 1e-9
    return Activity(
        rows=order, start_ns=start, end_ns=end, share_s=shares(start, end), weight=_weights(seconds, cls, len(first)),
        cls=cls, names=[timeline.name(int(order[i])) for i in first], first=order[first],
    )  # fmt: skip


def distinct(*columns: Ints) -> tuple[Ints, Ints]:
    """The first place of every combination of values, and for each place the number of its combination.

    One column at a time: sorting rows of several columns at once takes five times as long.
    """
    number = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        _, values = np.unique(column, return_inverse=True)
        _, number = np.unique(number * (int(values.max(initial=0)) + 1) + values, return_inverse=True)
    _, first, cls = np.unique(number, return_index=True, return_inverse=True)
    return first, cls


def shares(start_ns: Ints, end_ns: Ints, so_far: Callable[[Ints], Floats] | None = None) -> Floats:
    """Seconds of the device each interval takes when those that overlap share it evenly; they sum to the busy time.

    `so_far` is the running sum of what else is to be shared: joules.
    """
    if len(start_ns) == 0:
        return np.zeros(0)
    times = np.concatenate([start_ns, end_ns])
    edge, where = np.unique(times, return_inverse=True)
    n = len(start_ns)
    count = np.cumsum(np.bincount(where[:n], minlength=len(edge)) - np.bincount(where[n:], minlength=len(edge)))
    dt = np.diff(edge) * 1e-9 if so_far is None else np.diff(so_far(edge))
    per = np.where(count[:-1] > 0, dt / np.maximum(count[:-1], 1), 0.0)
    done = np.concatenate([[0.0], np.cumsum(per)])
    found: Floats = done[where[n:]] - done[where[:n]]
    return found


def summed(keys: Ints, values: NDArray[np.floating[Any]], count: int) -> Floats:
    """The sum of the values of each key."""
    return np.bincount(keys, values, minlength=count).astype(np.float64)


def _weights(seconds: Floats, cls: Ints, classes: int) -> Floats:
    """Power relative to the class, by speed; 1 where the durations of a class scatter for other reasons."""
    logs = np.log(np.maximum(seconds, 1e-9))
    order = np.lexsort((logs, cls))
    count = np.bincount(cls, minlength=classes)
    begin = np.concatenate([[0], np.cumsum(count)[:-1]])
    median = logs[order][begin + count // 2]
    faster = median[cls] - logs
    spread = np.sqrt(np.bincount(cls, faster**2, minlength=classes) / np.maximum(count, 1))
    clipped = np.clip(faster, -_SPEED_RANGE, _SPEED_RANGE)
    return np.where(spread[cls] < _ONE_SPEED, np.exp(SPEED_EXPONENT * clipped), 1.0)


def gaps(found: Activity, start_ns: int, end_ns: int) -> tuple[Ints, Ints]:
    """The stretches of a window in which nothing ran."""
    if len(found.start_ns) == 0:
        return np.array([start_ns]), np.array([end_ns])
    until = np.maximum.accumulate(found.end_ns)
    begin = np.concatenate([[start_ns], until])
    stop = np.concatenate([found.start_ns, [end_ns]])
    begin, stop = np.clip(begin, start_ns, end_ns), np.clip(stop, start_ns, end_ns)
    real = stop > begin
    return begin[real], stop[real]
