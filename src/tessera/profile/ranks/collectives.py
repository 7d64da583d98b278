"""Collectives across ranks: who came last, how long the others waited, and what compute ran while bytes moved.

::

    rank 0   ──[ waits ······ ][ moves ]──        skew: latest start less earliest
    rank 1   ────────────────[ moves ]────        straggler: the rank that starts last; until then nobody moves bytes
                             ^ ready    ^ end
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...timeline.columns import NONE, Timeline
from ...timeline.intervals import covered_ns, union
from .align import line_up, lines
from .clocks import Offset
from .sequences import CollectiveSequence, Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """One collective on all the ranks that recorded it, on the reference clock.

    `rows` are those of the merged timeline, in the order of `ranks`. `straggler` is None when the ranks start closer
    together than their clocks are known. `wait_s` is what all ranks together waited for the last one.
    """

    group: str
    kind: str | None
    bytes: int | None
    ranks: tuple[int, ...]
    rows: tuple[int, ...]
    start_ns: int
    ready_ns: int
    end_ns: int
    straggler: int | None
    wait_s: float

    @property
    def skew_s(self) -> float:
        """Latest start less earliest start."""
        return (self.ready_ns - self.start_ns) * 1e-9

    @property
    def move_s(self) -> float:
        """From the last rank's start to the last one's end: what moving the bytes took."""
        return max(self.end_ns - self.ready_ns, 0) * 1e-9


def meetings(timelines: Sequence[Timeline], offsets: Sequence[Offset], first_rows: Sequence[int]) -> list[Meeting]:
    """The collectives that at least two ranks recorded, in time order. `first_rows`: where each rank's rows begin."""
    numbers: dict[Key, int] = {}
    mine = [lines(t, numbers) for t in timelines]
    found: list[Meeting] = []
    for group in dict.fromkeys(g for one in mine for g in one):
        members = [i for i, one in enumerate(mine) if group in one]
        found += _match_group(group, members, [mine[i][group] for i in members], timelines, offsets, first_rows)
    return sorted(found, key=lambda m: m.start_ns)


def _match_group(
    group: Key,
    members: list[int],
    own: list[CollectiveSequence],
    timelines: Sequence[Timeline],
    offsets: Sequence[Offset],
    first_rows: Sequence[int],
) -> list[Meeting]:
    reference = offsets[members[0]].apply(own[0].ends)
    placed: list[tuple[int, CollectiveSequence, int]] = [(members[0], own[0], 0)]
    for i, line in zip(members[1:], own[1:], strict=True):
        if (lined := line_up(own[0], line, reference)) is not None:
            placed.append((i, line, lined[0]))
    if len(placed) < 2:
        return []
    low = min(shift for _, _, shift in placed)
    width = max(shift + len(line.rows) for _, line, shift in placed) - low
    starts, ends, rows = (np.full((len(placed), width), NONE, dtype=np.int64) for _ in range(3))
    for k, (i, line, shift) in enumerate(placed):
        here = slice(shift - low, shift - low + len(line.rows))
        starts[k, here], ends[k, here] = offsets[i].apply(line.starts), offsets[i].apply(line.ends)
        rows[k, here] = line.rows
    name = next((t for t in group if isinstance(t, str)), None) or ", ".join(map(str, _ranks_in(group))) or "default"
    out = []
    for at in np.flatnonzero((rows != NONE).sum(axis=0) >= 2):
        there = np.flatnonzero(rows[:, at] != NONE)
        who = [placed[int(k)][0] for k in there]
        begun = starts[there, at]
        last, soonest = int(np.argmax(begun)), int(np.argmin(begun))
        unsure = [offsets[who[k]].error_ns for k in (last, soonest)]
        margin = math.inf if None in unsure else sum(u or 0.0 for u in unsure)
        ready = int(begun[last])
        launch = int(timelines[who[0]]["launch"][rows[there[0], at]])
        what = timelines[who[0]].launches[launch] if launch != NONE else None
        out.append(
            Meeting(
                group=name,
                kind=what.collective_type if what else None,
                bytes=what.collective_bytes if what else None,
                ranks=tuple(offsets[i].rank for i in who),
                rows=tuple(int(rows[k, at]) + first_rows[i] for k, i in zip(there, who, strict=True)),
                start_ns=int(begun[soonest]),
                ready_ns=ready,
                end_ns=int(ends[there, at].max()),
                straggler=offsets[who[last]].rank if ready - int(begun[soonest]) > margin else None,
                wait_s=float((ready - begun).sum()) * 1e-9,
            )
        )
    return out


def _ranks_in(group: Key) -> tuple[Any, ...]:
    return next((part for part in group if isinstance(part, tuple)), ())


def measure_overlap(timeline: Timeline, met: Sequence[Meeting]) -> dict[int, float]:
    """How much of each collective's bytes moved while a kernel of the same rank and device ran, 0 to 100.

    A rank that waits for the last one seems to overlap with its own compute: that time moves nothing and is left out.
    """
    ready = np.full(len(timeline), NONE, dtype=np.int64)
    for meeting in met:
        ready[list(meeting.rows)] = meeting.ready_ns
    rows, kernels = timeline.rows("collective"), timeline.rows("kernel")
    ends = timeline["end_ns"]
    starts = np.where(ready < ends, np.maximum(timeline["start_ns"], ready), timeline["start_ns"])
    rows = rows[ends[rows] > starts[rows]]
    # One number for rank and device, both from -1.
    places = (timeline["rank"] + 1) * (int(timeline["device"].max(initial=0)) + 2) + timeline["device"] + 1
    found: dict[int, float] = {}
    for place in np.unique(places[rows]):
        asked, busy = rows[places[rows] == place], kernels[places[kernels] == place]
        beside = covered_ns(union(timeline["start_ns"][busy], ends[busy]), starts[asked], ends[asked])
        found |= dict(zip(asked.tolist(), (100.0 * beside / (ends[asked] - starts[asked])).tolist(), strict=True))
    return found


def summarize(met: Sequence[Meeting], overlap: dict[int, float]) -> dict[str, Any]:
    """The collectives in a few numbers: skew, what ranks waited and for whom, and how much hid behind compute."""
    if not met:
        return {"count": 0}
    skews = np.array([m.skew_s for m in met])
    ranks = sorted({r for m in met for r in m.ranks})
    last = {r: [m for m in met if m.straggler == r] for r in ranks}
    shares = [overlap[row] for m in met for row in m.rows if row in overlap]
    return {
        "count": len(met),
        "median_skew_s": float(np.median(skews)),
        "worst_skew_s": float(skews.max()),
        "wait_s": sum(m.wait_s for m in met),
        "move_s": sum(m.move_s for m in met),
        "overlap_pct": float(np.mean(shares)) if shares else None,
        "stragglers": {r: {"times": len(m), "wait_s": sum(x.wait_s for x in m)} for r, m in last.items() if m},
    }
