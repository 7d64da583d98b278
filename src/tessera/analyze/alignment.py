"""What ran when the power spiked: kernels by their share of the spikes' windows, boundaries at the spikes' rise."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..record import CODE, KINDS
from ..timeline.columns import NONE, Ints, Timeline
from ..timeline.distinct import rank_values
from ..timeline.intervals import Spans, covered_ns, difference, intersection, union
from .spikes import Chance, Curve, Spike, p_values

_Shares = tuple[Spans, float, float]
Aligned = Literal["aligned", "not aligned", "cannot tell"]

SIGNIFICANT = 0.05
# With fewer spikes, anything fits.
MIN_SPIKES = 3
# Something is named if it is at least so many times as common in spikes as outside.
MIN_LIFT = 1.25
# If the surroundings of boundaries, as far as the sensor reaches, cover more than this share of the time, they are
# everywhere.
CROWDED = 0.5
TOP_KERNELS = 12
PER_SPIKE = 4
CROWD = "changes follow each other faster than the sensor can tell apart"
EDGE_KINDS = ("start after idle", "phase", "step", "region")
_BACKWARD = "autograd::engine::evaluate_function"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeOverlap:
    """A kernel, copy or collective in a spike's window: the share of the window in which it ran, and its lift.

    `lift` is how many times more of the time it runs in spikes than outside; None if it runs in spikes only.
    """

    name: str
    kind: str
    overlap_s: float
    share: float
    lift: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A change of what ran, near a spike's rise: `offset_s` after (or, negative, before) the spike's start."""

    kind: str
    name: str
    time_ns: int
    offset_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Whether the spikes coincide with something.

    For what runs, `in_spikes` and `outside` are shares of the time. For boundaries, they are the share of spikes that
    rise at one, and the share that would by chance. `p_value` comes from shifting the spikes around the trace (for a
    kernel, it is the chance that any of those tried fits as well); None without spikes. `kind` is that of the rows,
    "activity" for the device being busy at all or with the backward pass, or the kind of boundary.
    """

    name: str
    kind: str
    in_spikes: float
    outside: float
    p_value: float | None
    verdict: Aligned
    reason: str = ""

    @property
    def lift(self) -> float | None:
        """Return how many times more common it is in spikes than outside; None if it is in spikes only."""
        return self.in_spikes / self.outside if self.outside > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTraffic:
    """How links were used, as far as a timeline shows: shares of the time with a copy or a collective."""

    in_spikes: float
    outside: float
    collectives: int
    copies: int


class SpikeWork:
    """What ran on a device, in and outside the windows of its spikes."""

    def __init__(self, timeline: Timeline, rows: Ints, curve: Curve, spikes: Sequence[Spike]) -> None:
        rows = rows[np.argsort(timeline["start_ns"][rows], kind="stable")]
        self.timeline, self.rows, self.curve, self.spikes = timeline, rows, curve, spikes
        self._starts, self._ends = timeline["start_ns"][rows], timeline["end_ns"][rows]
        self._reached = np.maximum.accumulate(self._ends)
        self._names, self._kinds = timeline["name"][rows], timeline["kind"][rows]
        self._reach_ns = round(curve.reach_s * 1e9)
        above = np.array([(s.start_ns, s.end_ns) for s in spikes], dtype=np.int64).reshape(-1, 2)
        self._above = union(above[:, 0], above[:, 1])
        self._windows = intersection(
            union(above[:, 0] - self._reach_ns, above[:, 1] + self._reach_ns), curve.known_spans
        )
        self._calm = difference(curve.known_spans, self._windows)
        self._by_name: dict[int, _Shares] = {}

    def _shares(self, pick: NDArray[np.bool_]) -> _Shares:
        """Return when some of the rows ran, and their shares of the time in the windows and outside."""
        ran = union(self._starts[pick], self._ends[pick])
        inside, outside = (
            float(covered_ns(ran, *spans).sum()) / max(spans.total_ns, 1) for spans in (self._windows, self._calm)
        )
        return ran, inside, outside

    def _name_shares(self, name: int) -> _Shares:
        if name not in self._by_name:
            self._by_name[name] = self._shares(self._names == name)
        return self._by_name[name]

    def alignments(self) -> list[Alignment]:
        """Return kinds of work as a whole, then the kernels that run most in the spikes."""
        chance = Chance(self.curve)
        groups = [("collectives", "collective", self._kinds == CODE["collective"])]
        groups += [("copies", "memcpy", self._kinds == CODE["memcpy"])]
        groups += [("device busy", "activity", np.ones(len(self.rows), dtype=bool))]
        groups += [("backward pass", "activity", find_backward(self.timeline, self.rows)[0])]
        tried = [(name, kind, self._shares(pick)) for name, kind, pick in groups if np.any(pick)]
        wholes = [self._judge([one], chance)[0] for one in tried]
        totals = np.bincount(self._names, weights=covered_ns(self._windows, self._starts, self._ends), minlength=1)
        top = [
            int(i)
            for i in np.argsort(-totals, kind="stable")[:TOP_KERNELS]
            if totals[i] > 0.01 * self._windows.total_ns
        ]
        kinds = [KINDS[int(self._kinds[np.argmax(self._names == i)])] for i in top]
        singles = [(self.timeline.names[i], k, self._name_shares(i)) for i, k in zip(top, kinds, strict=True)]
        return wholes + self._judge(singles, chance)

    def _judge(self, family: Sequence[tuple[str, str, _Shares]], chance: Chance) -> list[Alignment]:
        scores = [chance.overlap(self._above, ran) for _, _, (ran, _, _) in family]
        return [
            judge_alignment(name, kind, inside, outside, p, len(self.spikes))
            for (name, kind, (_, inside, outside)), p in zip(family, p_values(scores), strict=True)
        ]

    def describe(self, spike: Spike, edges: Sequence[Boundary]) -> Spike:
        """Return a spike with what ran in its window, longest first, and the boundaries (in time order) at its rise."""
        begin, end = spike.start_ns - self._reach_ns, spike.end_ns + self._reach_ns
        pick = slice(int(np.searchsorted(self._reached, begin, side="right")), int(np.searchsorted(self._starts, end)))
        lengths = np.minimum(self._ends[pick], end) - np.maximum(self._starts[pick], begin)
        totals = np.bincount(self._names[pick], weights=np.maximum(lengths, 0), minlength=1)
        overlaps = []
        for i in np.argsort(-totals, kind="stable")[:PER_SPIKE]:
            if totals[i] <= 0:
                continue
            ran, inside, outside = self._name_shares(int(i))
            overlap_s = int(covered_ns(ran, np.array([begin]), np.array([end]))[0]) * 1e-9
            kind = KINDS[int(self._kinds[pick][np.argmax(self._names[pick] == i)])]
            share, lift = overlap_s / ((end - begin) * 1e-9), inside / outside if outside > 0 else None
            name = self.timeline.names[i]
            overlaps.append(SpikeOverlap(name=name, kind=kind, overlap_s=overlap_s, share=share, lift=lift))
        rise = (spike.foot_ns - self._reach_ns, spike.start_ns + self._reach_ns)
        first, last = (bisect.bisect_left(edges, at, key=lambda b: b.time_ns) for at in rise)
        near = [dataclasses.replace(b, offset_s=(b.time_ns - spike.start_ns) * 1e-9) for b in edges[first:last]]
        near = sorted(near, key=lambda b: abs(b.offset_s))[:PER_SPIKE]
        return dataclasses.replace(spike, kernels=tuple(overlaps), boundaries=tuple(near))

    def traffic(self) -> LinkTraffic:
        """Return the shares of copies between host and device or peers, and of collectives, which use links."""
        collective = self._kinds == CODE["collective"]
        copy = self._kinds == CODE["memcpy"]
        launches = self.timeline["launch"][self.rows]
        inside_one = np.array([launch.memcpy_dir in ("DtoD", "d2d") for launch in self.timeline.launches] + [False])
        copy &= ~inside_one[launches]
        _, inside, outside = self._shares(collective | copy)
        counts = {"collectives": int(np.sum(collective)), "copies": int(np.sum(copy))}
        return LinkTraffic(in_spikes=inside, outside=outside, **counts)


def judge_alignment(name: str, kind: str, inside: float, outside: float, p: float, spikes: int) -> Alignment:
    """Return a verdict from shares and chance."""
    verdict: Aligned = "cannot tell"
    reason = ""
    if spikes < MIN_SPIKES:
        reason = "no spike" if spikes == 0 else "only 1 spike" if spikes == 1 else f"only {spikes} spikes"
    elif kind in EDGE_KINDS and outside > CROWDED:
        reason = CROWD
    elif p <= SIGNIFICANT and inside >= MIN_LIFT * outside:
        verdict = "aligned"
    elif inside <= outside:
        verdict, reason = "not aligned", "no more common in spikes than outside"
    elif p <= SIGNIFICANT:
        verdict, reason = "not aligned", "hardly more common in spikes than outside"
    else:
        reason = f"{p:.0%} of shifts of the spikes fit as well"
    return Alignment(
        name=name,
        kind=kind,
        in_spikes=inside,
        outside=outside,
        p_value=p if spikes else None,
        verdict=verdict,
        reason=reason,
    )


def find_boundaries(timeline: Timeline, rows: Ints, curve: Curve) -> list[Boundary]:
    """Return the changes of what a device does, in time order: work after idling, forward to backward, regions."""
    rows = rows[np.argsort(timeline["start_ns"][rows], kind="stable")]
    every = [*_after_idle(timeline, rows, curve.reach_s), *_phases(timeline, rows), *_regions(timeline, rows)]
    inside = [b for b in every if curve.start_ns <= b.time_ns <= curve.end_ns]
    return sorted(inside, key=lambda b: b.time_ns)


def align_boundaries(curve: Curve, spikes: Sequence[Spike], edges: Sequence[Boundary]) -> list[Alignment]:
    """Return whether the spikes rise at boundaries of a kind, more often than by chance."""
    alignments = []
    chance = Chance(curve)
    rise_ns = np.array([s.start_ns - s.foot_ns for s in spikes] or [0], dtype=np.int64)
    middles = np.array([(s.start_ns + s.foot_ns) // 2 for s in spikes], dtype=np.int64)
    half_ns = round(curve.reach_s * 1e9) + int(np.quantile(rise_ns, 0.8)) // 2
    for kind in EDGE_KINDS:
        times = np.array([b.time_ns for b in edges if b.kind == kind], dtype=np.int64)
        if len(times) == 0:
            continue
        near = union(times - half_ns, times + half_ns)
        hit = float(np.mean(covered_ns(near, middles, middles + 1))) if spikes else 0.0
        p = p_values([chance.hits(middles, near)])[0]
        expected = intersection(near, curve.known_spans).total_ns / curve.known_spans.total_ns
        alignments.append(judge_alignment(f"{kind} ({len(times)} times)", kind, hit, expected, p, len(spikes)))
    return alignments


def _after_idle(timeline: Timeline, rows: Ints, reach_s: float) -> list[Boundary]:
    """Return where work begins after an idle stretch that is long enough for the sensor to notice."""
    starts, reached = timeline["start_ns"][rows], np.maximum.accumulate(timeline["end_ns"][rows])
    idle_ns = starts[1:] - reached[:-1]
    at = np.append(0, np.flatnonzero(idle_ns >= 0.5e9 * reach_s) + 1)
    return [Boundary(kind="start after idle", name=timeline.name(int(rows[i])), time_ns=int(starts[i])) for i in at]


def find_backward(timeline: Timeline, rows: Ints) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which rows come from autograd's backward pass, and which rows have an operator at all."""
    ops, of_row = rank_values(timeline.linked.op[rows])
    at, has_op = ops, (ops != NONE)[of_row]
    parent, made_on = timeline["parent"], timeline["forward_thread"]
    named = np.array([n.startswith(_BACKWARD) for n in timeline.names] or [False])
    is_backward = np.zeros(len(ops), dtype=bool)
    while np.any(at != NONE):
        op = np.maximum(at, 0)
        is_backward |= (at != NONE) & (named[timeline["name"][op]] | (made_on[op] > 0))
        at = np.where(at == NONE, NONE, parent[op])
    return is_backward[of_row], has_op


def _phases(timeline: Timeline, rows: Ints) -> list[Boundary]:
    """Return where the device goes from work of the forward pass to that of autograd, and back."""
    is_backward, has_op = find_backward(timeline, rows)
    at = np.flatnonzero(has_op)
    changes = at[1:][is_backward[at][1:] != is_backward[at][:-1]]
    starts = timeline["start_ns"][rows]
    names = {True: "backward", False: "forward"}
    return [Boundary(kind="phase", name=names[bool(is_backward[i])], time_ns=int(starts[i])) for i in changes]


def _regions(timeline: Timeline, rows: Ints) -> list[Boundary]:
    """Return where the device goes from one step's or region's work to another's, by the launches' regions."""
    links = timeline.linked
    step, region, starts = links.step[rows], links.region[rows], timeline["start_ns"][rows]
    changes = []
    for i in np.flatnonzero((step[1:] != step[:-1]) | (region[1:] != region[:-1])) + 1:
        new = step[i] != step[i - 1]
        if new and step[i] != NONE:
            name = links.steps[int(step[i])].name
        else:
            name = timeline.name(int(region[i])) if region[i] != NONE else "outside any region"
        changes.append(Boundary(kind="step" if new else "region", name=name, time_ns=int(starts[i])))
    return changes
