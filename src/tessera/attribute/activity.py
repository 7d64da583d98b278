"""Finds what kept a device busy: intervals of kernel classes, and how overlapping intervals share the device.

Kernels of one class draw the same power: they have one name, one launch configuration, one operator and one set of
shapes. The joules of a class are its watts times its seconds, so the solver looks for the watts of each class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..joules import Floats, Ints
from ..timeline import Timeline
from ..timeline.columns import NONE
from ..timeline.distinct import argsort_small, distinct
from ..timeline.link import Links

# When the limit holds the clock down, power falls with it: kernels slower than usual in their class usually draw less.
# The exponent fits four recorded mixtures on an H200 best (benchmarks/measure/attribution.py --fit: 1 to 2).
SPEED_EXPONENT = 1.7
_SPEED_RANGE = 0.2
# The solver's time grows with the cube of the number of classes. Models with fixed shapes have some hundreds at most;
# models whose shapes change with the data have thousands, most of them seen once.
MOST_CLASSES = 600
# In a class whose durations scatter more than this, the speed does not depend on the clock alone.
_ONE_SPEED = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Everything that ran on one device, in order of start. Overlapping intervals share the time: `share_s`.

    The sum of `share_s` is the busy time. `weight` is the power of a row relative to its class, by how fast it ran.
    """

    rows: Ints
    start_ns: Ints
    end_ns: Ints
    share_s: Floats
    weight: Floats
    cls: Ints
    names: list[str]
    """By class: the name of its first row."""
    first: Ints
    """By class: its first row in the timeline."""

    @property
    def busy_s(self) -> float:
        return float(self.share_s.sum())

    @property
    def classes(self) -> int:
        return len(self.names)


def activity(timeline: Timeline, rows: Ints, links: Links) -> Activity:
    """Return the activity of some rows of one device."""
    order = rows[np.argsort(timeline["start_ns"][rows], kind="stable")]
    start, end = timeline["start_ns"][order], timeline["end_ns"][order]
    op, shapes = links.op[order], links.shapes[order]
    op_name = np.where(op == NONE, NONE, timeline["name"][op])
    size = np.where(
        timeline["bytes"][order] > 0, np.log2(np.maximum(timeline["bytes"][order], 1)).astype(np.int64), NONE
    )
    kind, name = timeline["kind"][order], timeline["name"][order]
    cls = distinct(kind, name, timeline["launch"][order], op_name, shapes, size)[1]
    seconds = (end - start) * 1e-9
    first, cls = merge_rare_classes(cls, seconds, kind * len(timeline.names) + name, kind)
    return Activity(
        rows=order, start_ns=start, end_ns=end, share_s=shares(start, end), weight=_weights(seconds, cls, len(first)),
        cls=cls, names=[timeline.name(int(order[i])) for i in first], first=order[first],
    )  # fmt: skip


def merge_rare_classes(cls: Ints, seconds: Floats, *coarser: Ints) -> tuple[Ints, Ints]:
    """Reduce to about `MOST_CLASSES` classes, in the form of `distinct`: classes with the least time are merged.

    They are merged with others of the same value in the first column of `coarser`, then in the next, while there are
    too many.
    """
    first, cls = distinct(cls)
    for column in coarser:
        if len(first) <= MOST_CLASSES:
            break
        total_s = sum_by_key(cls, seconds, len(first))
        is_rare = np.ones(len(first), bool)
        is_rare[np.argsort(-total_s, kind="stable")[: MOST_CLASSES // 2]] = False
        first, cls = distinct(np.where(is_rare[cls], len(first) + column, cls))
    return first, cls


class Sharing:
    """Intervals that share a device evenly while they overlap."""

    def __init__(self, start_ns: Ints, end_ns: Ints) -> None:
        times = np.concatenate([start_ns, end_ns])
        order = np.argsort(times, kind="stable")  # fast, since this is two runs that are almost in order
        ordered = times[order]
        new = np.ones(len(times), bool)
        new[1:] = ordered[1:] != ordered[:-1]
        where = np.empty(len(times), np.int64)
        where[order] = np.cumsum(new) - 1
        self._edge = ordered[new]
        self._begun, self._ended = where[: len(start_ns)], where[len(start_ns) :]
        opened, closed = (np.bincount(w, minlength=len(self._edge)) for w in (self._begun, self._ended))
        self._count = np.cumsum(opened - closed)[:-1]

    def of(self, so_far: Callable[[Ints], Floats] | None = None) -> Floats:
        """Return the seconds of each interval; or its joules, if `so_far` is their running sum."""
        if len(self._edge) == 0:
            return np.zeros(0)
        dt = np.diff(self._edge) * 1e-9 if so_far is None else np.diff(so_far(self._edge))
        per = np.where(self._count > 0, dt / np.maximum(self._count, 1), 0.0)
        done = np.concatenate([[0.0], np.cumsum(per)])
        seconds: Floats = done[self._ended] - done[self._begun]
        return seconds


def shares(start_ns: Ints, end_ns: Ints) -> Floats:
    """Return the seconds of the device that each interval takes if overlapping ones share it evenly."""
    return Sharing(start_ns, end_ns).of()


def sum_by_key(keys: Ints, values: NDArray[np.floating[Any]], count: int) -> Floats:
    """Return the sum of the values of each key."""
    return np.bincount(keys, values, minlength=count).astype(np.float64)


def _weights(seconds: Floats, cls: Ints, classes: int) -> Floats:
    """Return power relative to the class, by speed; 1 if the durations of a class scatter for other reasons."""
    logs = np.log(np.maximum(seconds, 1e-9))
    count = np.bincount(cls, minlength=classes)
    by_class = np.split(logs[argsort_small(cls, classes)], np.cumsum(count)[:-1])
    median = np.array([np.partition(part, len(part) // 2)[len(part) // 2] for part in by_class[:classes]])
    faster = median[cls] - logs
    spread = np.sqrt(np.bincount(cls, faster**2, minlength=classes) / np.maximum(count, 1))
    clipped = np.clip(faster, -_SPEED_RANGE, _SPEED_RANGE)
    return np.where(spread[cls] < _ONE_SPEED, np.exp(SPEED_EXPONENT * clipped), 1.0)


def gaps(activity: Activity, start_ns: int, end_ns: int) -> tuple[Ints, Ints]:
    """Return the parts of a window in which nothing ran."""
    if len(activity.start_ns) == 0:
        return np.array([start_ns]), np.array([end_ns])
    until = np.maximum.accumulate(activity.end_ns)
    begin = np.concatenate([[start_ns], until])
    stop = np.concatenate([activity.start_ns, [end_ns]])
    begin, stop = np.clip(begin, start_ns, end_ns), np.clip(stop, start_ns, end_ns)
    real = stop > begin
    return begin[real], stop[real]


def host_activity(timeline: Timeline, links: Links, rank: int | None = None) -> Activity:
    """Return self time of the host's operators as intervals; a class is operators of one name and set of shapes.

    `rank`: only of this rank.
    """
    assert links.ops is not None, "what ran on a device has the joules"
    rows, start, end = links.ops.stretches()
    order = np.argsort(start, kind="stable")
    if rank is not None:
        order = order[timeline["rank"][rows[order]] == rank]
    rows, start, end = rows[order], start[order], end[order]
    cls = distinct(timeline["name"][rows], timeline["shapes"][rows])[1]
    first, cls = merge_rare_classes(cls, shares(start, end), timeline["name"][rows], np.zeros_like(cls))
    return Activity(
        rows=rows, start_ns=start, end_ns=end, share_s=shares(start, end), weight=np.ones(len(rows)),
        cls=cls, names=[timeline.name(int(rows[i])) for i in first], first=rows[first],
    )  # fmt: skip
