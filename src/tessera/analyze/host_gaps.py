"""Where on the timeline something lies: the joules of a row, the regions around it, and the gaps between rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..attribute.table import EnergyTable
from ..integral import Floats
from ..timeline.columns import NONE, Ints, Timeline
from ..timeline.nesting import Nesting
from .devices import busy_spans
from .kernel_names import op_name, region_name

LAUNCHING = "launching kernels"
BEFORE, AFTER = "before the first kernel", "after the last kernel"
PREPARING = "before the first whole step"
UNFED = (BEFORE, PREPARING, AFTER)
"""Gaps that no step has: nobody meant to feed the device then."""
STEPS = 3
"""A program of fewer steps may be what comes before them."""
LAUNCH_GAP_S = 100e-6
"""A gap up to this long is the host being late with a launch; a longer one is the host doing something else."""
_COUNTER = re.compile(r"[ _#:/-]*\d+$")


def family(name: str) -> str:
    """What the steps `step_3` and `step_4` have in common: `step`."""
    return _COUNTER.sub("", name) or name


def row_joules(timeline: Timeline, rows: Ints, table: EnergyTable) -> Floats:
    """Joules of device rows: those of attribution, else each kernel's mean watts times the row's seconds."""
    if timeline.energy_j is not None:
        return np.nan_to_num(timeline.energy_j[rows])
    spent: dict[str, float] = {}
    took: dict[str, float] = {}
    for r in table.kernels:
        spent[r.name] = spent.get(r.name, 0.0) + r.energy_j
        took[r.name] = took.get(r.name, 0.0) + r.time_s
    watts = {name: spent[name] / took[name] for name in spent if took[name] > 0}
    by_name = np.array([watts.get(n, 0.0) for n in timeline.names] or [0.0])
    seconds = (timeline["end_ns"][rows] - timeline["start_ns"][rows]) * 1e-9
    joules: Floats = by_name[timeline["name"][rows]] * seconds
    return joules


def region_paths(timeline: Timeline, rows: Ints) -> tuple[Ints, list[tuple[str, ...]]]:
    """For each row the number of its path, and the paths: names of the regions around it, outermost first.

    A step is called by what steps have in common, so that all of them are one path; a region of the program's own with
    that very name in it is the same.
    """
    links = timeline.linked
    steps = {s.row for s in links.steps}
    innermost, inverse = np.unique(links.region[rows], return_inverse=True)
    numbers: dict[tuple[str, ...], int] = {}
    which = []
    for region in innermost.tolist():
        around = links.path(region)
        names = [(family(timeline.name(r)) if r in steps else timeline.name(r), r in steps) for r in around]
        path = tuple(name for i, (name, _) in enumerate(names) if not i or names[i - 1] != (name, True))
        which.append(numbers.setdefault(path, len(numbers)))
    return np.array(which, np.int64)[np.asarray(inverse).reshape(-1)], list(numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGap:
    """Time in which a device waited, by what the host did meanwhile."""

    during: str
    count: int
    time_s: float
    energy_j: float

    @property
    def each_s(self) -> float:
        """Mean length of a gap."""
        return self.time_s / self.count


def host_gaps(
    timeline: Timeline, table: EnergyTable, start_ns: int, end_ns: int, *, windows: Sequence[tuple[int, int]] = ()
) -> list[HostGap]:
    """The time no device row ran, by what the host did meanwhile, most first. Joules are shared out by time.

    `windows` are the stretches between the two times that count, where not all of it was traced.
    """
    parts = [_gaps(timeline, begin, end) for begin, end in windows or [(start_ns, end_ns)]]
    starts, ends = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
    lengths = ends - starts
    total_s = float(lengths.sum()) * 1e-9
    if total_s <= 0:
        return []
    seconds: dict[str, float] = {}
    counts: Counter[str] = Counter()
    late = lengths <= LAUNCH_GAP_S * 1e9
    labels = np.full(len(starts), LAUNCHING, dtype=object)
    long = np.flatnonzero(~late)
    labels[long] = _labels(timeline, starts[long], ends[long])
    for label, length in zip(labels.tolist(), lengths.tolist(), strict=True):
        seconds[label] = seconds.get(label, 0.0) + length * 1e-9
        counts[label] += 1
    return [
        HostGap(during=label, count=counts[label], time_s=s, energy_j=table.idle_j * s / total_s)
        for label, s in sorted(seconds.items(), key=lambda kv: -kv[1])
    ]


def _gaps(timeline: Timeline, start_ns: int, end_ns: int) -> tuple[Ints, Ints]:
    """Idle stretches of all devices within a window."""
    parts = []
    for own in timeline.by_device().values():
        busy = busy_spans(timeline, own)
        begins, ends = np.r_[start_ns, busy.end_ns], np.r_[busy.start_ns, end_ns]
        begins, ends = np.maximum(begins, start_ns), np.minimum(ends, end_ns)
        parts.append((begins[ends > begins], ends[ends > begins]))
    none = np.zeros(0, np.int64)
    return np.concatenate([none, *(p[0] for p in parts)]), np.concatenate([none, *(p[1] for p in parts)])


def _labels(timeline: Timeline, starts: Ints, ends: Ints) -> list[str]:
    """What the host did in the middle of each gap: the region it was in and the operator or call inside it."""
    rows = timeline.device_rows
    first, last = int(timeline["start_ns"][rows].min()), int(timeline["end_ns"][rows].max())
    links = timeline.linked
    steps = {s.row for s in links.steps}
    middle = (starts + ends) // 2
    begun = links.steps[0].start_ns if len(links.steps) >= STEPS else first
    regions = timeline.rows("region")
    ops = timeline.rows("op")
    ops = ops[links.op[ops] != NONE]  # without the Python tracer's frames
    inside = [_open_at(timeline, part, middle) for part in (regions, links.top_op[ops], timeline.rows("runtime"))]
    out = []
    for i, (region, op, call) in enumerate(zip(*(rows.tolist() for rows in inside), strict=True)):
        if ends[i] <= first or starts[i] >= last:
            out.append(BEFORE if ends[i] <= first else AFTER)
            continue
        if middle[i] < begun:
            out.append(PREPARING)
            continue
        name = "" if region == NONE else region_name(timeline.name(region))
        where = family(name) if region in steps else name
        doing = op_name(timeline.name(op)) if op != NONE else timeline.name(call) if call != NONE else ""
        parts = [f"in {part}" for part in dict.fromkeys((where, doing)) if part]
        out.append(", ".join(parts) or "no operator running")
    return out


def _open_at(timeline: Timeline, rows: Ints, times: Ints) -> Ints:
    """The innermost of some rows at each time, on whatever thread; `NONE` where none is open."""
    rows = np.unique(rows)
    if not len(rows):
        return np.full(len(times), NONE, np.int64)
    nowhere = np.zeros_like(rows)
    nested = Nesting(rows, nowhere, timeline["start_ns"][rows], timeline["end_ns"][rows])
    return nested.at(np.zeros_like(times), times)
