"""Finds the clock offsets of ranks whose collectives run on the host (gloo).

::

    rank 0   ──[ waits ······ ]──      nobody leaves a collective before all have begun it:
    rank 1   ────────[ moves  ]──      end(0) >= start(1) and end(1) >= start(0), by one clock

torch.profiler writes a row "gloo:all_reduce" on the thread that runs it. Its group, and its number in the group, come
from torch's flight recorder (`profile.flight_record`); without that, all rows must be of one group. The ends scatter
with the scheduling of the host, by far more than those of a GPU's kernels, so a line through the ends is only half of
the answer. The other half needs no statistics: each collective bounds the offset from both sides, and the line is kept
within all those bounds. Ranks that are late in turn have narrow bounds. If one rank is always the last, one side is as
wide as that rank is late.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...timeline.columns import Ints, Timeline
from ...timeline.transfers import UNEVEN, collective_type
from .sequences import ONE_TO_ONE, STRIDE, TOGETHER, ClockFit, CollectiveSequence, Key, process_groups

PREFIX = "gloo:"
# The median difference between the ends of two ranks, whichever is late: two processes over loopback on two busy cores,
# all_reduce of 4 KB and 800 KB, all_gather, barrier (five of six below 50 us).
HOST_BIAS_NS = 200_000.0
# Clocks drift by less than this: a quartz is 1-50 ppm off, and NTP slews by 500 ppm at most.
MOST_DRIFT = 1e-3
_SLOPES = 65
_SIZE = re.compile(r"\[[\d, ]*\]")  # matches "[1000]" in "[1000]f32", and in "([1000])", a list of tensors


def host_lines(timeline: Timeline, numbers: dict[Key, int]) -> dict[Key, CollectiveSequence]:
    """Return a rank's host collectives by process group, in the order in which they were issued.

    If torch did not tell the groups, all groups must have the same members. All ranks share `numbers`.
    """
    kinds = {i: collective_type(n) for i, n in enumerate(timeline.names) if n.startswith(PREFIX)}
    kinds = {i: kind for i, kind in kinds.items() if kind and kind not in ONE_TO_ONE}
    rows = np.flatnonzero(np.isin(timeline["name"], list(kinds)))
    groups = np.array([launch.group or "" for launch in timeline.launches] + [""])[timeline["launch"][rows]]
    found: dict[Key, CollectiveSequence] = {}
    for group in np.unique(groups[groups != ""]).tolist():
        own = rows[groups == group]
        own = own[np.argsort(timeline["correlation"][own], kind="stable")]
        label = timeline.launches[int(timeline["launch"][own[0]])].group_label
        found[PREFIX, group] = dataclasses.replace(
            _sequence(timeline, own, kinds, numbers), numbers=timeline["correlation"][own] % STRIDE, label=label
        )
    members = gloo_groups(timeline)
    if found or len(members) > 1 or not len(rows):
        return found
    return {(PREFIX, *members): _sequence(timeline, _as_issued(timeline, rows), kinds, numbers)}


def _sequence(
    timeline: Timeline, rows: Ints, kinds: dict[int, str | None], numbers: dict[Key, int]
) -> CollectiveSequence:
    names, shapes = timeline["name"][rows], timeline["shapes"][rows]
    what = []
    for name, shape in zip(names.tolist(), shapes.tolist(), strict=True):
        # Sizes help to tell collectives apart; an uneven all-to-all has a different size on every rank.
        size = None if shape < 0 or kinds[name] in UNEVEN else timeline.names[shape]
        what.append(numbers.setdefault((PREFIX, kinds[name], size), len(numbers)))
    return CollectiveSequence(
        rows=rows, what=np.array(what, dtype=np.int64),
        together=np.array([kinds[n] in TOGETHER for n in names.tolist()], dtype=bool),
        starts=timeline["start_ns"][rows], ends=timeline["end_ns"][rows], on_host=True,
    )  # fmt: skip


def _as_issued(timeline: Timeline, rows: Ints) -> Ints:
    """Return rows in the order in which the program issued them (c10d's operators), which is the same on all ranks.

    Several threads run the collectives, so two in flight may begin in either order.
    """
    calls = [i for i, n in enumerate(timeline.names) if n.startswith("c10d::")]
    waiting: defaultdict[Key, deque[int]] = defaultdict(deque)
    issued = []
    both = np.concatenate([np.flatnonzero(np.isin(timeline["name"], calls)), rows])
    chosen = set(rows.tolist())
    for row in both[np.argsort(timeline["start_ns"][both], kind="stable")].tolist():
        kind, start = collective_type(timeline.names[timeline["name"][row]]), int(timeline["start_ns"][row])
        shape = timeline["shapes"][row]
        size = _SIZE.search(timeline.names[shape]) if shape >= 0 and kind != "barrier" else None
        queue = waiting[kind, size and size[0]]
        if row not in chosen:
            queue.append(start)
        else:
            issued.append((queue.popleft() if queue else start, row))
    return np.array([row for _, row in sorted(issued)], dtype=np.int64)


def gloo_groups(timeline: Timeline) -> set[tuple[int, ...]]:
    """Return the members of each group that may run on gloo; empty if the trace does not tell."""
    groups = process_groups(timeline)
    return {ranks for g, ranks in groups if len(ranks) > 1 and "gloo" in str(g.get("backend_config"))}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a rank's offset to the reference: at least `low` at its `ends`, at most `high` at its `starts`."""

    starts: Ints
    ends: Ints
    low: Ints
    high: Ints

    @classmethod
    def of(cls, starts: Ints, ends: Ints, reference_starts: Ints, reference_ends: Ints) -> Bounds:
        """Make bounds from matched collectives; each side's times are by its own clock."""
        return cls(starts, ends, reference_starts - ends, reference_ends - starts)

    def room(self, slope: float, at_ns: int, base_ns: float) -> tuple[float, float]:
        """Return (least, most) offset less `base_ns` at `at_ns` for a drift; least > most: no offset is allowed."""
        low = (self.low - int(base_ns)) - slope * (self.ends - at_ns)
        high = (self.high - int(base_ns)) - slope * (self.starts - at_ns)
        return float(np.max(low)), float(np.min(high))


def within(found: ClockFit, bounds: Bounds) -> ClockFit:
    """Return the line nearest to `found` that all bounds allow; its error is at most as wide as the bounds."""
    at, base = found.at_ns, found.offset_ns

    def width(slope: float) -> float:
        low, high = bounds.room(slope, at, base)
        return high - low

    roomiest = _highest(width)
    drift = found.drift if width(found.drift) >= 0.0 else roomiest
    low, high = bounds.room(drift, at, base)
    error = math.hypot(found.error_ns, HOST_BIAS_NS)
    if low > high:  # a clock was stepped meanwhile, or the collectives were matched wrongly
        return dataclasses.replace(found, error_ns=error + (low - high))
    moved = min(max(0.0, low), high)
    slopes = np.linspace(_edge(width, roomiest, -MOST_DRIFT), _edge(width, roomiest, MOST_DRIFT), _SLOPES)
    widest = 0.0
    for x in (int(bounds.starts.min()) - at, int(bounds.ends.max()) - at):
        here = moved + drift * x
        for slope in slopes.tolist():
            least, most = bounds.room(slope, at, base)
            widest = max(widest, abs(least + slope * x - here), abs(most + slope * x - here))
    return dataclasses.replace(
        found, offset_ns=int(base) + moved, drift=drift, drift_error=min(found.drift_error, float(np.ptp(slopes))),
        error_ns=min(error, widest),
    )  # fmt: skip


def _highest(width: Callable[[float], float]) -> float:
    """Return the slope that leaves most room, by ternary search: the room is concave in the slope."""
    low, high = -MOST_DRIFT, MOST_DRIFT
    for _ in range(80):
        a, b = low + (high - low) / 3.0, high - (high - low) / 3.0
        low, high = (a, high) if width(a) < width(b) else (low, b)
    return (low + high) / 2.0


def _edge(width: Callable[[float], float], inside: float, outside: float) -> float:
    """Return the furthest slope towards `outside` that still leaves room."""
    if width(outside) >= 0.0:
        return outside
    for _ in range(40):
        middle = (inside + outside) / 2.0
        inside, outside = (middle, outside) if width(middle) >= 0.0 else (inside, middle)
    return inside
