"""Estimates when the host launched kernels whose launch was not traced: at the same point of their own step.

::

    host, traced step       |  forward  |x  backward |           x: the launch of the twin
    device                      . . .   . .x .
    host, another step      | forward   |  x  backward   |       at the same share of the time between the same edges

A device runs behind its host, by up to a step or more. So a kernel does not belong to the step or region that is open
when it runs. Steps of the device are counted, beginning at those that were traced, and matched with the host's steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .columns import NONE, Ints, Timeline
from .intervals import Nesting
from .launch_alignment import Bools, LaunchAlignment

if TYPE_CHECKING:
    from .link import Step

MARKERS = 8
"""Kernels that are tried for counting the steps of the device."""
APART = 0.5
"""If two steps are further apart than this share of a step, the program did something else between them."""
LATE = 0.01
"""The share of launches that may seem to run before their step began, since a step's end is not always exact."""


def estimate_launches(timeline: Timeline, aligned: LaunchAlignment, steps: tuple[Step, ...], launch_ns: Ints) -> Ints:
    """Return `launch_ns` with estimates for untraced rows where possible, else the times when they began to run."""
    out = launch_ns.copy()
    ranks = timeline["rank"]
    edges: dict[int, _StepEdges] = {}
    for lane in aligned.lanes:
        rank = int(ranks[lane[0]])
        if rank not in edges:
            own = tuple(s for s in steps if s.row == NONE or ranks[s.row] == rank)
            edges[rank] = _StepEdges(timeline, own, rank)
        if len(edges[rank].start_ns):
            _estimate_lane(timeline, aligned, edges[rank], lane, launch_ns, out)
    return out


def _estimate_lane(
    timeline: Timeline, aligned: LaunchAlignment, edges: _StepEdges, lane: Ints, launch_ns: Ints, out: Ints
) -> None:
    """Estimate the launches of one stream."""
    twin = aligned.twin[lane]
    is_traced = twin == lane
    twin_ns = np.where(aligned.in_order[lane], launch_ns[twin], NONE)
    twin_step = edges.at(twin_ns)
    own_step = np.where(is_traced, twin_step, NONE)
    if (own_step == NONE).all():
        return
    host = _find_steps(timeline["name"][lane], own_step, timeline["start_ns"][lane], edges)
    placed = np.flatnonzero((twin_step != NONE) & (host != NONE))
    moved = edges.move(twin_ns[placed], twin_step[placed], host[placed])
    before = np.searchsorted(placed, np.arange(len(lane)), side="right") - 1
    # A kernel without a twin is launched with the one before it if that is in the same step, else when its step begins.
    near = (before >= 0) & (host[placed[before]] == host)
    chosen = np.flatnonzero(~is_traced & (host != NONE))
    out[lane[chosen]] = np.where(near, moved[before], edges.start_ns[host])[chosen]


def _find_steps(names: Ints, own_step: Ints, start_ns: Ints, edges: _StepEdges) -> Ints:
    """Return the host's step of each launch of a stream, `NONE` before the first; `own_step` has the traced ones.

    Some kernel is launched equally often in every step: its launches are counted from the traced steps on. If no count
    agrees with the host's steps, a launch belongs to the step that was open when it ran. In that case, what ran between
    two steps that are far apart (an evaluation), or after the last step, belongs to none.
    """
    last = len(edges.start_ns) - 1
    by_time = np.searchsorted(edges.start_ns, start_ns, side="right") - 1
    host, least = np.where(edges.is_between(start_ns, by_time), NONE, by_time), np.inf
    for name, count, after in _list_markers(names, own_step):
        counted = _count_steps(np.flatnonzero(names == name), count, after, own_step)
        known = (counted >= 0) & (counted <= last)
        ahead = by_time[known] - counted[known]  # how many steps the host is ahead
        fits = np.mean(ahead < 0) < LATE and (counted[-1] >= last - 1 or ahead.max(initial=0) <= 2)
        if fits and ahead.mean() < least:  # the smallest lead: a kernel that was missing somewhere counts too few
            after_all = (counted > last) & edges.is_between(start_ns, np.full(len(names), last))
            host = np.where((counted < 0) | after_all, NONE, np.minimum(counted, last))
            least = float(ahead.mean())
    return np.where(own_step == NONE, host, own_step)


def _list_markers(names: Ints, own_step: Ints) -> list[tuple[int, int, int]]:
    """Return names that every traced step launches equally often, how often, and how many launches come after.

    Names at the end of a step come first.
    """
    traced = np.flatnonzero(own_step != NONE)
    steps, step = np.unique(own_step[traced], return_inverse=True)
    distinct, name = np.unique(names[traced], return_inverse=True)
    table = np.zeros((len(steps), len(distinct)), np.int64)
    np.add.at(table, (step, name), 1)
    whole = 2 * table.sum(axis=1) > table.sum(axis=1).max()  # leaves out steps in which tracing began or ended
    place = np.zeros_like(table)
    np.maximum.at(place, (step, name), np.arange(len(traced)))
    ends = place.max(axis=1)
    after = (ends[:, None] - place)[whole].max(axis=0)
    even = np.flatnonzero((table[whole].min(axis=0) == table[whole].max(axis=0)) & (table[whole].min(axis=0) > 0))
    best = even[np.lexsort((table[whole][0][even], after[even]))][:MARKERS]
    return [(int(distinct[i]), int(table[whole][0][i]), int(after[i])) for i in best.tolist()]


def _count_steps(places: Ints, count: int, after: int, own_step: Ints) -> Ints:
    """Return the step of each launch, by the places of one kernel that each step launches `count` times.

    `after` launches of the same step follow the last of these.
    """
    steps, first = np.unique(own_step[places][::-1], return_index=True)
    at = len(places) - 1 - first[steps != NONE]  # the last place in each traced step
    steps = steps[steps != NONE]
    number = np.arange(len(places) + 1)
    anchor = np.maximum(np.searchsorted(at, number, side="right") - 1, 0)
    step = steps[anchor] - (at[anchor] - number) // count
    begins = np.clip(places + after + 1, 0, len(own_step))  # from there on, the next number counts
    return np.repeat(step, np.diff(np.concatenate(([0], begins, [len(own_step)]))))


class _StepEdges:
    """The steps of a rank, and the edges of the regions inside each step."""

    def __init__(self, timeline: Timeline, steps: tuple[Step, ...], rank: int) -> None:
        self.start_ns, self.end_ns = (
            np.array([getattr(s, e) for s in steps], np.int64) for e in ("start_ns", "end_ns")
        )
        places = np.arange(len(steps))
        self._nesting = Nesting(places, np.zeros_like(places), self.start_ns, self.end_ns)
        regions = np.setdiff1d(timeline.rows("region"), [s.row for s in steps])
        regions = regions[timeline["rank"][regions] == rank]
        inside = self.at(timeline["start_ns"][regions])
        regions, inside = regions[inside != NONE], inside[inside != NONE]
        # Ignore regions that only traced steps have: torch names its optimizers and compiled parts while it is traced.
        pairs = np.unique(timeline["name"][regions] * len(steps) + inside)
        names, steps_with = np.unique(pairs // len(steps), return_counts=True)
        common = np.isin(timeline["name"][regions], names[2 * steps_with >= len(steps)])
        regions, inside = regions[common], np.tile(inside[common], 2)
        times = np.concatenate([timeline["start_ns"][regions], timeline["end_ns"][regions]])
        labels = np.concatenate([2 * timeline["name"][regions], 2 * timeline["name"][regions] + 1])
        order = np.lexsort((labels, times, inside))
        self._times, self._labels = np.minimum(times, self.end_ns[inside])[order], labels[order]
        self._low, self._high = (np.searchsorted(inside[order], places, side=side) for side in ("left", "right"))

    def is_between(self, times_ns: Ints, step: Ints) -> Bools:
        """Return whether times are after the end of their step, and the next step begins far from there."""
        begins_ns = np.append(self.start_ns[1:], np.iinfo(np.int64).max)
        far = begins_ns - self.end_ns > APART * np.median(self.end_ns - self.start_ns)
        between: Bools = (step != NONE) & far[step] & (times_ns >= self.end_ns[step])
        return between

    def at(self, times_ns: Ints) -> Ints:
        """Return the step that is open at each time."""
        return self._nesting.at(np.zeros(len(times_ns), np.int64), times_ns)

    def move(self, times_ns: Ints, source: Ints, target: Ints) -> Ints:
        """Move times from some steps to others: to the same share of the time between the same edges."""
        into = np.maximum(target, 0)
        took, takes = (self.end_ns[s] - self.start_ns[s] for s in (source, into))
        share = (times_ns - self.start_ns[source]) / np.maximum(took, 1)
        out: Ints = self.start_ns[into] + (takes * share).astype(np.int64)
        has_edges = (self._high > self._low)[source] & (target != NONE)
        changes = np.flatnonzero((np.diff(source, prepend=-1) != 0) | (np.diff(target, prepend=-1) != 0))
        for begin, end in zip(changes, np.append(changes[1:], len(times_ns)), strict=True):
            if has_edges[begin]:
                warped = self._warp(times_ns[begin:end], int(source[begin]), int(target[begin]))
                out[begin:end] = out[begin:end] if warped is None else warped
        return out

    def _warp(self, times_ns: Ints, source: int, target: int) -> Ints | None:
        """Move times by the edges of regions; return None if the two steps have different edges."""
        if source == target:
            return times_ns
        a, b = (slice(self._low[s], self._high[s]) for s in (source, target))
        if not np.array_equal(self._labels[a], self._labels[b]):
            return None
        theirs, own = (
            np.concatenate(([0], self._times[part] - self.start_ns[s], [self.end_ns[s] - self.start_ns[s]]))
            for s, part in ((source, a), (target, b))
        )
        since = np.floor(np.interp(times_ns - self.start_ns[source], theirs, own))
        moved: Ints = since.astype(np.int64) + self.start_ns[target]
        return moved
