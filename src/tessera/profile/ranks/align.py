"""Finds the clock offsets of ranks from their collectives: the k-th of a group ends at nearly one time on all ranks.

::

    rank 0   ──[ wait ][ move ]──[..]──      starts differ by how late each rank is (skew), ends do not:
    rank 1   ────────[ move ]────[..]──      so ends give the clocks, and then starts give the straggler

Recordings may begin at different steps, so the sequences of a group are first shifted until they fit each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...errors import ArgumentError
from ...joules import Floats
from ...timeline.columns import NONE, Ints, Timeline
from .align_gloo import MOST_DRIFT, Bounds, host_lines, within
from .clocks import Offset, notes
from .sequences import TOGETHER, ClockFit, CollectiveSequence, Key, process_groups

# Ranks leave a ring one hop after the other: a few us that averaging does not remove. This value is assumed: no machine
# with several GPUs was available to measure it.
END_BIAS_NS = 5_000.0
Z90 = 1.645
MIN_MATCHED = 3
# Two shifted sequences must share at least this part of the shorter one.
MIN_SHARED = 0.5
MOST_SCATTER_NS = 1_000_000
"""Ends of the same kernels scatter by microseconds: if no shift is better than this, the traces have different ones."""
_PROBE = 64  # collectives that are compared first
_CLOSELY = 4096  # collectives that decide how well a shift fits


def lines(timeline: Timeline, numbers: dict[Key, int]) -> dict[Key, CollectiveSequence]:
    """Return a rank's collectives by process group. All ranks share `numbers`: equal collectives get equal numbers."""
    rows = timeline.rows("collective")
    rows = rows[np.argsort(timeline["start_ns"][rows], kind="stable")]
    members = _members(timeline)
    kinds: list[tuple[Key, int, bool]] = []
    for launch in timeline.launches:
        group: Key = (members.get(launch.group or "") or launch.group, launch.group_size)
        # An uneven all-to-all moves other bytes on every rank, and so do the send_recv kernels that NCCL runs it as.
        uneven = launch.collective_type in ("all_to_all", "send_recv")
        size = None if uneven else launch.collective_bytes
        if launch.collective_type == "send_recv":
            group = (*group, launch.collective_type)  # a sequence of its own: ranks may have different numbers of them
        what = numbers.setdefault((launch.collective_type, size), len(numbers))
        kinds.append((group, what, launch.collective_type in TOGETHER))
    kinds.append(((None, None), NONE, False))  # for rows without a launch
    which = timeline["launch"][rows]
    skip = {i for i, launch in enumerate(timeline.launches) if launch.collective_type in ("send", "recv")}
    found = {}
    for group in dict.fromkeys(kinds[i][0] for i in np.unique(which)):
        mine = np.array([k[0] == group and i not in skip for i, k in enumerate(kinds)])[which]
        picked, launches = rows[mine], which[mine]
        found[group] = CollectiveSequence(
            rows=picked,
            what=np.array([k[1] for k in kinds], dtype=np.int64)[launches],
            together=np.array([k[2] for k in kinds], dtype=bool)[launches],
            starts=timeline["start_ns"][picked],
            ends=timeline["end_ns"][picked],
            label=_label(timeline, launches),
        )
    return {group: line for group, line in found.items() if len(line.rows)}


def _label(timeline: Timeline, launches: Ints) -> str | None:
    """Return the name of the group of some rows; None if it has no name."""
    return timeline.launches[int(launches[0])].group_label if len(launches) and launches[0] != NONE else None


def _members(timeline: Timeline) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each process group, since two groups may have the same name on different ranks."""
    return {g["pg_name"]: ranks for g, ranks in process_groups(timeline) if isinstance(g.get("pg_name"), str)}


def place(a: CollectiveSequence, b: CollectiveSequence, times: Ints | None = None) -> tuple[Ints, Ints, int] | None:
    """Return the positions of a's and b's collectives in one numbering, and in how many ways they fit; None if none.

    Uses the numbers that torch gave the collectives, or else `line_up`.
    """
    if a.numbers is not None and b.numbers is not None:
        return a.numbers, b.numbers, 1
    if (lined := line_up(a, b, times)) is None:
        return None
    return np.arange(len(a.rows)), np.arange(len(b.rows)) + lined[0], lined[1]


def line_up(a: CollectiveSequence, b: CollectiveSequence, times: Ints | None = None) -> tuple[int, int] | None:
    """Return the shift of b against a (b's k-th collective is a's k + shift), and how many shifts fit; None if none.

    The time between two collectives is the same on both ranks, whatever their clocks say. `times` replaces a's ends, if
    these have been corrected.
    """
    ends = a.ends if times is None else times
    enough = max(1, math.ceil(MIN_SHARED * min(len(a.what), len(b.what))))
    if len(a.what) == len(b.what) and np.array_equal(a.what, b.what) and _spread(ends - b.ends) <= 2.0 * END_BIAS_NS:
        return 0, 1  # equal sequences at equal times: there is nothing to search

    def overlap_slices(shift: int, most: int | None = None) -> tuple[slice, slice]:
        i, j = max(shift, 0), max(-shift, 0)
        count = min(len(a.what) - i, len(b.what) - j, most or len(a.what))
        return slice(i, i + count), slice(j, j + count)

    def apart(shift: int, most: int) -> Ints:
        here, there = overlap_slices(shift, most)
        return ends[here] - b.ends[there]

    possible = range(enough - len(b.what), len(a.what) - enough + 1)
    same = [s for s in possible if _same(a, b, *overlap_slices(s, _PROBE)) and _same(a, b, *overlap_slices(s))]
    # A few hundred collectives rule out most shifts; only the remaining ones are compared closely.
    rough = {s: _spread(apart(s, 4 * _PROBE)) for s in same}
    limit = 4.0 * min(rough.values(), default=0.0) + 4.0 * END_BIAS_NS
    left = {s: apart(s, _CLOSELY) for s in same if rough[s] <= limit}
    fits = [(_spread(y), abs(float(np.median(y))), s) for s, y in left.items()]
    if not fits:
        return None
    best = min(spread for spread, _, _ in fits)
    # If both sequences are equally long, prefer no shift: where it is wrong, it is worse by the scatter of steps, many
    # times that of ends. On a busy machine ends scatter as much as steps, and then only chance tells shifts apart.
    if len(a.what) == len(b.what) and any(s == 0 and spread <= 4.0 * best + END_BIAS_NS for spread, _, s in fits):
        return 0, 1
    if best > MOST_SCATTER_NS and not (a.on_host or b.on_host):
        return None
    # These fit as well as the best one, within the usual scatter of ends: take the one with the nearest clocks.
    alike = [f for f in fits if f[0] <= 2.0 * best + END_BIAS_NS]
    return min(alike, key=lambda f: f[1])[2], len(alike)


def _same(a: CollectiveSequence, b: CollectiveSequence, here: slice, there: slice) -> bool:
    return np.array_equal(a.what[here], b.what[there])


def _spread(apart: Ints) -> float:
    """Return how much the ends of matched collectives scatter around a straight drift.

    If the match is wrong by m steps, the differences contain the time of m steps, and no two of those are equal.
    """
    y = (apart[:_CLOSELY] - apart[0]).astype(np.float64)
    third = len(y) // 3
    slope = (float(np.median(y[-third:])) - float(np.median(y[:third]))) / (len(y) - third) if third > 1 else 0.0
    y -= slope * np.arange(len(y))
    return float(np.median(np.abs(y - np.median(y))))


def fit(times_ns: Ints, reference_ns: Ints) -> ClockFit:
    """Return the offset and drift that bring times to a reference, by a robust line fit."""
    apart = reference_ns - times_ns
    base, at = int(np.median(apart)), int(np.median(times_ns))
    y, x = (apart - base).astype(np.float64), (times_ns - at).astype(np.float64)
    few = len(y) < MIN_MATCHED
    slope = 0.0 if few else _theil_sen(x, y)
    residual = y - slope * x
    residual -= np.median(residual)
    scale = 1.4826 * float(np.median(np.abs(residual)))
    good = np.abs(residual) <= max(4.0 * scale, 1000.0)
    x, y = x[good], y[good]
    mean_x, count = float(np.mean(x)), len(y)
    spread_x = float(np.sum((x - mean_x) ** 2))
    half_ns = float(np.max(np.abs(x - mean_x)))
    if few or count < MIN_MATCHED or spread_x <= 0.0:
        error = END_BIAS_NS + float(np.max(np.abs(y - np.mean(y))))
        return ClockFit(base + float(np.mean(y)), 0.0, math.inf, error, at)
    slope = float(np.sum((x - mean_x) * (y - np.mean(y))) / spread_x)
    if half_ns * MOST_DRIFT < END_BIAS_NS:  # in so short a time, drift is less than the scatter of ends
        error = END_BIAS_NS + Z90 * float(np.std(y)) / math.sqrt(count)
        return ClockFit(base + float(np.mean(y)), 0.0, math.inf, error, at)
    residual = y - np.mean(y) - slope * (x - mean_x)
    sigma = math.sqrt(float(np.sum(residual**2)) / max(count - 2, 1))
    slope_error = Z90 * sigma / math.sqrt(spread_x)
    if abs(slope) > MOST_DRIFT:  # no clock drifts that much: the ends scatter for another reason
        sigma = math.hypot(sigma, abs(slope) * math.sqrt(spread_x / count))
        slope = 0.0
    if abs(slope) <= 1.5 * slope_error:  # not significant: a line through noise would be wrong outside the span
        slope = 0.0
    error = math.hypot(END_BIAS_NS, Z90 * sigma / math.sqrt(count), slope_error * half_ns)
    return ClockFit(base + float(np.mean(y)), slope, slope_error, error, at + round(mean_x))


def _theil_sen(x: Floats, y: Floats) -> float:
    """Return the median slope between pairs of at most 256 points spread over the run."""
    pick = np.unique(np.linspace(0, len(x) - 1, min(len(x), 256)).astype(np.int64))
    dx, dy = np.subtract.outer(x[pick], x[pick]), np.subtract.outer(y[pick], y[pick])
    upper = np.triu(dx != 0, 1)
    return float(np.median(dy[upper] / dx[upper])) if np.any(upper) else 0.0


def align(timelines: Sequence[Timeline]) -> list[Offset]:
    """Return, for each timeline, the offset to the clock of the first one, by matching collectives.

    A rank that shares no group with the first one is reached through a rank that does. If nothing ties a rank to the
    others, its offset is 0 with `error_ns` None, and a note says so.
    """
    if not timelines:
        raise ArgumentError("there is no timeline to align", fix="give the timelines of two or more ranks")
    numbers: dict[Key, int] = {}
    # Kernels end together within microseconds; host collectives (gloo) do not, so they are used only without kernels.
    mine = [lines(t, numbers) or host_lines(t, numbers) for t in timelines]
    ranks = rank_numbers(timelines)
    found: dict[int, Offset] = {0: Offset(rank=ranks[0], error_ns=0.0, source="reference")}
    while True:
        # The pair that shares most collectives has the smallest error: it adds the next rank.
        pairs = [
            (_count_shared(mine[i], mine[j]), i, j) for i in found for j in range(len(timelines)) if j not in found
        ]
        count, i, j = max(pairs, default=(0, 0, 0), key=lambda p: (p[0], -p[2], -p[1]))
        if count == 0:
            break
        found[j] = _align_rank(mine[i], mine[j], found[i], ranks[j])
    alone = "shares no collective that ends on all ranks at once (all_reduce ...): its clock is taken as it is"
    return [found.get(i, Offset(rank=ranks[i], notes=(f"rank {ranks[i]} {alone}",))) for i in range(len(timelines))]


def rank_numbers(timelines: Sequence[Timeline]) -> list[int]:
    """Return the rank of each timeline, or its place in the list if it does not know its rank."""
    return [i if t.rank is None else t.rank for i, t in enumerate(timelines)]


def _count_shared(a: dict[Key, CollectiveSequence], b: dict[Key, CollectiveSequence]) -> int:
    return sum(min(int(a[g].together.sum()), int(b[g].together.sum())) for g in a.keys() & b.keys())


def _align_rank(a: dict[Key, CollectiveSequence], b: dict[Key, CollectiveSequence], known: Offset, rank: int) -> Offset:
    """Return the offset of a rank by comparing it with a rank whose offset is known."""
    theirs: list[tuple[Ints, Ints]] = []
    ours: list[tuple[Ints, Ints]] = []
    ways = 1
    for group in a.keys() & b.keys():
        one, two = a[group], b[group]
        if not one.together.any():
            continue
        ends = known.apply(one.ends)
        if (placed := place(one, two, ends)) is None:
            continue
        _, i, j = np.intersect1d(placed[0], placed[1], return_indices=True)
        i, j = i[one.together[i]], j[one.together[i]]
        theirs.append((known.apply(one.starts[i]), ends[i]))
        ours.append((two.starts[j], two.ends[j]))
        ways = max(ways, placed[2])
    if not sum(len(ends) for _, ends in ours):
        note = f"rank {rank} ran other collectives than the rest: its clock is taken as it is"
        return Offset(rank=rank, notes=(note,))
    starts, times = (np.concatenate(part) for part in zip(*ours, strict=True))
    reference_starts, reference = (np.concatenate(part) for part in zip(*theirs, strict=True))
    line = fit(times, reference)
    if any(found.on_host for found in b.values()):
        line = within(line, Bounds.of(starts, times, reference_starts, reference))
    said = notes(rank, line.offset_ns, line.drift * 1e6, line.drift_error * 1e6)
    if ways > 1:
        said += (
            f"rank {rank}: its collectives repeat so evenly that they fit in {ways} ways; the one with the nearest"
            " clocks was taken",
        )
    return Offset(
        rank=rank, offset_ns=line.offset_ns, drift_ppm=line.drift * 1e6, at_ns=line.at_ns, source="collectives",
        error_ns=math.hypot(line.error_ns, known.error_ns or 0.0), matched=len(times), notes=said,
    )  # fmt: skip
