"""The lanes of a page's timeline: steps and regions of the host, streams of a device, a band for each of many ranks.

Nothing is dropped silently: kernels that are too short to see are drawn as one bar that says how many they are and
which takes most of its time, and lanes that are not drawn are counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..attribute.table import EnergyTable
from ..joules import Floats
from ..profile.ranks.collectives import host_rows
from ..record import CODE, ON_DEVICE
from ..timeline import stream_names
from ..timeline.columns import NONE, Ints, Timeline
from ..timeline.distinct import rank_values
from .devices import RankDevice, busy_spans, list_devices, row_joules

BARS = 16_000
"""Bars of all device lanes together that are drawn individually."""
WHOLE = 8_000
"""Kernels of the one step that is drawn completely."""
LANES = 10
"""Lanes of streams: those with the most time."""
BANDS = 128
"""Devices with their own band."""
FEW = 16
"""Devices whose bands are high enough for names."""
REGIONS = 3000
"""Bars of one lane of regions that are drawn individually."""
RANKS = 64
"""Ranks of a job on CPUs with their own band."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Bars in one row. A bar with `count` above 1 stands for several short ones, and has the name of the longest."""

    label: str
    kind: str
    start_ns: Ints
    end_ns: Ints
    name: Ints
    op: Ints
    count: Ints
    energy_j: Floats
    height: int | None = None
    """In pixels; None: the default of its kind."""


def find_one(timeline: Timeline) -> tuple[int, int] | None:
    """Return the step in the middle of the run, or if there are no steps, at most `WHOLE` kernels there."""
    starts = np.sort(timeline["start_ns"][timeline.device_rows], kind="stable")  # device rows are almost in order
    if not len(starts):
        return None
    if steps := timeline.linked.steps:
        middle = steps[len(steps) // 2]
        begin, end = middle.start_ns, middle.end_ns
    elif len(starts) > BARS:
        begin, end = int(starts[(len(starts) - WHOLE) // 2]), int(starts[-1])
    else:
        return None
    first = int(np.searchsorted(starts, begin))
    last = first + WHOLE
    return begin, min(end, int(starts[last])) if last < len(starts) else end


def find_first_view(timeline: Timeline, start_ns: int, span_ns: int) -> tuple[int, int]:
    """Return the span of the timeline with a margin, if power was recorded for much longer."""
    first_ns, last_ns = timeline.start_ns, timeline.end_ns
    steps = timeline.linked.steps
    if not len(timeline.device_rows) and steps and len(np.unique(timeline["rank"])) > 1:
        first_ns, last_ns = steps[0].start_ns, max(s.end_ns for s in steps)
    elif not len(timeline.device_rows):
        return 0, span_ns
    length = last_ns - first_ns
    if not 0 < length < 0.7 * span_ns:
        return 0, span_ns
    margin = round(0.08 * length)
    return max(first_ns - start_ns - margin, 0), min(last_ns - start_ns + margin, span_ns)


class LaneMaker:
    """Makes the lanes of a timeline, from `start_ns` on; `names` numbers the names of their bars."""

    def __init__(self, timeline: Timeline, start_ns: int, span_ns: int) -> None:
        self._timeline, self._start_ns, self._span_ns = timeline, start_ns, span_ns
        self.names: dict[str, int] = {}

    def make_regions(self, *, banded: bool) -> list[Lane]:
        """Make a lane of steps, and lanes of other regions by nesting; for several ranks, a band for each."""
        timeline = self._timeline
        links, rows = timeline.linked, timeline.rows("region")
        steps = np.array([s.row for s in links.steps if s.row != NONE], np.int64)
        if ranks := [rank for rank in np.unique(timeline["rank"]).tolist() if rank != NONE][:RANKS]:
            bands = [("rank {} steps", "step", steps), ("collectives", "region", host_rows(timeline))]
            if banded:  # the device's rows tell more of a rank, so the steps of one rank are enough
                ranks, bands = ranks[:1], bands[:1]
            own = [(w.format(r), kind, rows[timeline["rank"][rows] == r]) for r in ranks for w, kind, rows in bands]
            return [self._make_region(rows, label, kind) for label, kind, rows in own if len(rows)]
        lanes = [self._make_region(steps, "steps", "step")] if len(steps) else []
        rows = np.setdiff1d(rows, steps)
        depth = np.zeros(len(rows), np.int64)
        outer = links.parent[rows]
        while (outer != NONE).any():
            depth += (outer != NONE) & ~np.isin(outer, steps)
            outer = np.where(outer == NONE, NONE, links.parent[outer])
        for level in range(min(4, int(depth.max(initial=-1)) + 1)):
            lanes.append(self._make_region(rows[depth == level], "" if level else "regions", "region"))
        return lanes

    def _make_region(self, rows: Ints, label: str, kind: str) -> Lane:
        quantum_ns = self._span_ns / REGIONS if len(rows) > REGIONS else 0.0
        return self._draw_bars(rows, np.full(len(rows), np.nan), label, kind, quantum_ns)

    def make_devices(self, table: EnergyTable | None, whole: tuple[int, int] | None) -> tuple[list[Lane], int]:
        """Make a lane for each stream, those with most time, or bands for many devices; return how many are not shown.

        Rows that begin within `whole` are drawn one by one, however short.
        """
        timeline, rows = self._timeline, self._timeline.rows(*ON_DEVICE)
        if not len(rows):
            return [], 0
        joules = np.full(len(rows), np.nan) if table is None else row_joules(timeline, rows, table)
        devices = list_devices(timeline)
        streams: list[tuple[str, Ints]] = []
        for device in devices:
            numbers = timeline["stream"][device.rows]
            for number in np.unique(numbers).tolist():
                label = stream_names.label(timeline.meta, device.device, number, timeline.rank)
                label = f"{device.name} {label}" if len(devices) > 1 else label
                streams.append((label, device.rows[numbers == number]))
        if len(devices) > 1 and len(streams) > LANES:
            chosen, hidden = _bands(timeline, devices)
        else:
            by_time = sorted(range(len(streams)), key=lambda i: -busy_spans(timeline, streams[i][1]).total_ns)[:LANES]
            chosen, hidden = [(*streams[i], 24) for i in sorted(by_time)], len(streams) - len(by_time)
        quantum_ns = self._span_ns / BARS * len(chosen) if len(rows) > BARS else 0.0
        lanes = []
        for label, own, height in chosen:
            lane = self._draw_bars(own, joules[np.searchsorted(rows, own)], label, "device", quantum_ns, whole)
            lanes.append(dataclasses.replace(_without_overlap(lane), height=height) if len(devices) > 1 else lane)
        return lanes, hidden

    def _draw_bars(
        self,
        rows: Ints,
        joules: Floats,
        label: str,
        kind: str,
        quantum_ns: float,
        whole: tuple[int, int] | None = None,
    ) -> Lane:
        """Return a bar for each row; rows shorter than `quantum_ns` in one stretch of that length share one."""
        timeline = self._timeline
        order = np.argsort(timeline["start_ns"][rows], kind="stable")
        rows, joules = rows[order], joules[order]
        starts, ends = timeline["start_ns"][rows], timeline["end_ns"][rows]
        alone = ends - starts >= quantum_ns
        if whole is not None:
            alone |= (starts >= whole[0]) & (starts < whole[1])
        bucket = ((starts - self._start_ns) // max(quantum_ns, 1.0)).astype(np.int64)
        # A new bar begins if this row or the one before stands alone, or if another stretch begins.
        new = np.r_[True, alone[1:] | alone[:-1] | (bucket[1:] != bucket[:-1])]
        group, first = np.cumsum(new) - 1, np.flatnonzero(new)
        ops = timeline.linked.op[rows]
        name = self._intern(timeline["name"][rows])
        op = self._intern(np.where(ops == NONE, NONE, timeline["name"][ops]))
        chosen = _longest(group, timeline["name"][rows], ends - starts)
        count = np.diff(np.r_[first, len(rows)])
        return Lane(
            label=label,
            kind=kind,
            start_ns=starts[first] - self._start_ns,
            end_ns=np.maximum.reduceat(ends, first) - self._start_ns,
            name=name[chosen],
            op=np.where(count == 1, op[chosen], NONE),
            count=count,
            energy_j=np.add.reduceat(joules, first),
        )

    def _intern(self, column: NDArray[Any]) -> Ints:
        """Return the page's numbers for names of the timeline."""
        used, inverse = rank_values(column)
        names, texts = self.names, self._timeline.names
        ids = [NONE if i == NONE else names.setdefault(texts[i], len(names)) for i in used.tolist()]
        return np.array(ids, np.int64)[inverse]


def _bands(timeline: Timeline, devices: Sequence[RankDevice]) -> tuple[list[tuple[str, Ints, int]], int]:
    """Return for each device a lane of what computes and copies, and a thin one of its collectives below."""
    shown = devices[:BANDS]
    single = len({d.rank for d in devices}) == len(devices) and devices[0].rank != NONE
    high, low = (20, 9) if len(shown) <= FEW else (11, 5)
    bands = []
    for device in shown:
        is_collective = timeline["kind"][device.rows] == CODE["collective"]
        label = f"rank {device.rank}" if single else device.name
        for name, own, height in (
            (label, device.rows[~is_collective], high),
            ("", device.rows[is_collective], low),
        ):
            if len(own):
                bands.append((name, np.sort(own), height))
    return bands, len(devices) - len(shown)


def _without_overlap(lane: Lane) -> Lane:
    """Let each bar begin when the one before has ended: streams of one device may run at the same time."""
    reached = np.r_[0, np.maximum.accumulate(lane.end_ns)[:-1]] if len(lane.end_ns) else lane.end_ns
    start = np.maximum(lane.start_ns, reached)
    return dataclasses.replace(lane, start_ns=np.minimum(start, lane.end_ns), end_ns=np.maximum(lane.end_ns, start))


def _longest(group: Ints, name: Ints, lengths: Ints) -> Ints:
    """Return for each group a row with the name that takes most of its time."""
    order = np.lexsort((name, group))
    g, n = group[order], name[order]
    first = np.flatnonzero(np.r_[True, (g[1:] != g[:-1]) | (n[1:] != n[:-1])])
    total = np.add.reduceat(lengths[order], first)
    best = np.lexsort((-total, g[first]))
    winner = best[np.unique(g[first][best], return_index=True)[1]]
    chosen: Ints = order[first[winner]]
    return chosen
