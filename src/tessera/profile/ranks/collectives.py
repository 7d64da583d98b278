"""Matches collectives across ranks: who came last, how long the others waited, what computed while bytes moved.

::

    rank 0   ──[ waits ······ ][ moves ]──        skew: latest start less earliest
    rank 1   ────────────────[ moves ]────        straggler: the rank that starts last; no bytes move before
                             ^ ready    ^ end
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...record import CODE
from ...timeline.columns import NONE, Ints, Launch, Timeline
from ...timeline.intervals import Spans, covered_ns, difference, union
from ...timeline.shapes import parse
from ...timeline.transfers import ON_HOST, collective_type
from .align import lines, place
from .align_gloo import PREFIX, host_lines
from .clocks import Offset
from .sequences import CollectiveSequence, Key

CALLS = ("c10d::", "_c10d_functional", "c10d_functional")
"""How the names of operators begin that start collectives or wait for them."""
_DTYPE_BYTES = {"f64": 8, "i64": 8, "c64": 8, "f32": 4, "i32": 4, "f16": 2, "bf16": 2, "i16": 2}  # others: 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """One collective on all the ranks that recorded it, on the reference clock.

    `rows` are rows of the merged timeline, in the order of `ranks`. `straggler` is None if the starts differ by less
    than the error of the clocks. `waits_s` are the seconds that each rank waited for the last one.
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
    waits_s: tuple[float, ...]

    @property
    def wait_s(self) -> float:
        """Seconds that all ranks together waited."""
        return sum(self.waits_s)

    @property
    def skew_s(self) -> float:
        """Latest start less earliest start."""
        return (self.ready_ns - self.start_ns) * 1e-9

    @property
    def move_s(self) -> float:
        """Seconds from the last rank's start to the latest end: the time that moving the bytes took."""
        return max(self.end_ns - self.ready_ns, 0) * 1e-9


def meetings(timelines: Sequence[Timeline], offsets: Sequence[Offset], first_rows: Sequence[int]) -> list[Meeting]:
    """Return the collectives that at least two ranks recorded, in time order. `first_rows`: first row of each rank."""
    numbers: dict[Key, int] = {}
    mine = [lines(t, numbers) | host_lines(t, numbers) for t in timelines]
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
    # The position of each rank's collectives in the first rank's numbering.
    placed: list[tuple[int, CollectiveSequence, Ints]] = []
    for i, line in zip(members, own, strict=True):
        if (found := place(own[0], line, reference)) is not None:
            placed.append((i, line, found[1]))
    if len(placed) < 2:
        return []
    low = min(int(places.min()) for _, _, places in placed)
    width = max(int(places.max()) for _, _, places in placed) + 1 - low
    starts, ends, rows = (np.full((len(placed), width), NONE, dtype=np.int64) for _ in range(3))
    for k, (i, line, places) in enumerate(placed):
        here = places - low
        starts[k, here], ends[k, here] = offsets[i].apply(line.starts), offsets[i].apply(line.ends)
        rows[k, here] = line.rows
    name = own[0].label or name_group(group)
    pairwise = "send_recv" in group
    out = []
    for at in np.flatnonzero((rows != NONE).sum(axis=0) >= 2):
        there = np.flatnonzero(rows[:, at] != NONE)
        who = [placed[int(k)][0] for k in there]
        begun = starts[there, at]
        if pairwise and int(begun.max()) >= int(ends[there, at].min()):
            continue  # messages between pairs of ranks, at different times: nobody waited
        last, soonest = int(np.argmax(begun)), int(np.argmin(begun))
        unsure = [offsets[who[k]].error_ns for k in (last, soonest)]
        margin = math.inf if None in unsure else sum(u or 0.0 for u in unsure)
        ready = int(begun[last])
        what = describe(timelines[who[0]], int(rows[there[0], at]))
        out.append(
            Meeting(
                group=name,
                kind=what.collective_type,
                bytes=what.collective_bytes,
                ranks=tuple(offsets[i].rank for i in who),
                rows=tuple(int(rows[k, at]) + first_rows[i] for k, i in zip(there, who, strict=True)),
                start_ns=int(begun[soonest]),
                ready_ns=ready,
                end_ns=int(ends[there, at].max()),
                straggler=offsets[who[last]].rank if ready - int(begun[soonest]) > margin else None,
                waits_s=tuple(((ready - begun) * 1e-9).tolist()),
            )
        )
    return out


def name_group(group: Key) -> str:
    """Return a name for a group without one: its number, else its ranks."""
    name = next((part for part in group if isinstance(part, str) and part not in (PREFIX, "send_recv")), None)
    ranks = next((part for part in group if isinstance(part, tuple)), ())
    return name or ", ".join(map(str, ranks)) or "default"


def describe(timeline: Timeline, row: int) -> Launch:
    """Return kind, bytes and group of a collective; on the host without torch's facts, by its name and shapes."""
    number = int(timeline["launch"][row])
    if number != NONE:
        return timeline.launches[number]
    name, shapes = timeline.name(row), timeline.text("shapes", row)
    if not name.startswith(ON_HOST):
        return Launch()
    tensors = parse(shapes) if shapes else []
    size = sum(math.prod(dims) * _DTYPE_BYTES.get(dtype, 1) for dims, dtype in tensors)
    return Launch(
        collective_type=collective_type(name.partition(":")[2]), collective_bytes=size if tensors else None,
        dtype=tensors[0][1] if tensors else None,
    )  # fmt: skip


def host_rows(timeline: Timeline) -> Ints:
    """Return the rows of collectives that ran on threads of the host."""
    ops = timeline.rows("op")
    rows: Ints = ops[_named(timeline, ON_HOST)[timeline["name"][ops]]]
    return rows


def computing_spans(timeline: Timeline, rows: Ints) -> Spans:
    """Return when some rows of a rank computed on the host: inside operators that do not communicate."""
    rows = rows[np.isin(rows, timeline.rows("op"))]
    starts, ends, names = timeline["start_ns"], timeline["end_ns"], timeline["name"]
    work = rows[~_named(timeline, ON_HOST)[names[rows]]]
    calls = work[_named(timeline, CALLS)[names[work]]]
    return difference(union(starts[work], ends[work]), union(starts[calls], ends[calls]))


def _named(timeline: Timeline, begins: tuple[str, ...]) -> NDArray[np.bool_]:
    """Return for each name whether it has one of these beginnings."""
    return np.array([n.startswith(begins) for n in timeline.names] or [False])


def measure_overlap(timeline: Timeline, met: Sequence[Meeting]) -> dict[int, float]:
    """Return which percentage of each collective's time the same rank computed while bytes moved.

    On a device, computing means that a kernel ran there; on the host, that an operator ran. The time in which a rank
    waits for the last one is left out: it seems to overlap with compute, but moves nothing.
    """
    ready = np.full(len(timeline), NONE, dtype=np.int64)
    for meeting in met:
        ready[list(meeting.rows)] = meeting.ready_ns
    ends = timeline["end_ns"]
    starts = np.where(ready < ends, np.maximum(timeline["start_ns"], ready), timeline["start_ns"])
    # One number for rank and device; both begin at -1.
    places = (timeline["rank"] + 1) * (int(timeline["device"].max(initial=0)) + 2) + timeline["device"] + 1
    found: dict[int, float] = {}
    for rows in (timeline.rows("collective"), host_rows(timeline)):
        asked = rows[ends[rows] > starts[rows]]
        for where in np.unique(places[asked]):
            here, beside = asked[places[asked] == where], np.flatnonzero(places == where)
            kernels = beside[timeline["kind"][beside] == CODE["kernel"]]
            # Decide by the kind, since a trace may not tell on which device a collective ran.
            on_device = timeline["kind"][here[0]] == CODE["collective"]
            busy = (
                union(timeline["start_ns"][kernels], ends[kernels]) if on_device else computing_spans(timeline, beside)
            )
            shared_ns = covered_ns(busy, starts[here], ends[here])
            found |= dict(zip(here.tolist(), (100.0 * shared_ns / (ends[here] - starts[here])).tolist(), strict=True))
    return found


def find_waits(met: Sequence[Meeting], rank: int) -> Spans:
    """Return when a rank waited for the last one; the waits of simultaneous collectives are counted once."""
    own = [(m.ready_ns, round(m.waits_s[m.ranks.index(rank)] * 1e9)) for m in met if rank in m.ranks]
    end_ns, waited_ns = np.array(own, np.int64).reshape(-1, 2).T
    return union(end_ns - waited_ns, end_ns)


def total_wait_s(met: Sequence[Meeting]) -> float:
    """Return the seconds that all ranks together waited for the last one."""
    return sum(find_waits(met, rank).total_ns for rank in {r for m in met for r in m.ranks}) * 1e-9


def sum_waits(met: Sequence[Meeting]) -> dict[int, dict[int, float]]:
    """Return, for each rank that waited, the seconds by straggler; unknown stragglers are left out."""
    waits: dict[int, dict[int, float]] = {}
    for straggler in sorted({m.straggler for m in met if m.straggler is not None}):
        late = [m for m in met if m.straggler == straggler]
        for rank in sorted({r for m in late for r in m.ranks} - {straggler}):
            waits.setdefault(rank, {})[straggler] = find_waits(late, rank).total_ns * 1e-9
    return dict(sorted(waits.items()))


def sum_delays(met: Sequence[Meeting]) -> dict[int, float]:
    """Return, for each straggler, the seconds that the other ranks waited for it, added up."""
    delays_s: dict[int, float] = {}
    for waited in sum_waits(met).values():
        for straggler, seconds in waited.items():
            delays_s[straggler] = delays_s.get(straggler, 0.0) + seconds
    return delays_s


def summarize(met: Sequence[Meeting], overlap: dict[int, float]) -> dict[str, Any]:
    """Summarize the collectives: skew, the seconds ranks waited and for whom, and how much overlapped with compute."""
    if not met:
        return {"count": 0}
    skews = np.array([m.skew_s for m in met])
    ranks = sorted({r for m in met for r in m.ranks})
    times, delays_s = Counter(m.straggler for m in met), sum_delays(met)
    shares = [overlap[row] for m in met for row in m.rows if row in overlap]
    return {
        "count": len(met),
        "median_skew_s": float(np.median(skews)),
        "worst_skew_s": float(skews.max()),
        "wait_s": total_wait_s(met),
        "move_s": sum(m.move_s for m in met),
        "overlap_pct": float(np.mean(shares)) if shares else None,
        "stragglers": {r: {"times": times[r], "wait_s": delays_s.get(r, 0.0)} for r in ranks if times[r]},
        "waits_s": sum_waits(met),
    }
