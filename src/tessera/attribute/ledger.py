"""Turns solved classes into lines: what kernels, operators, regions, modules and steps spent, with intervals.

The joules of a line are a sum of class watts times seconds, so its variance follows from the covariance of the classes:
two kernels that the samples cannot tell apart are each uncertain, but the region that contains both is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..joules import Z90, Floats, Ints, worst_basis
from ..record import CODE, KINDS
from ..schema import DeviceId
from ..timeline import Timeline
from ..timeline.columns import APART, NONE
from ..timeline.distinct import distinct, rank_values
from ..timeline.intervals import Forest, union_by_key
from ..timeline.link import Links
from .activity import sum_by_key
from .repeats import count_calls, count_repeats, cover_operators
from .share import Share, join_coverage, join_errors, note_fits
from .table import EnergyRow, EnergyTable, note_overlaps

NO_OP = "(no operator)"
WHOLE = 0.98
"""A step, or a pass through a region, counts as whole if at least this share of it was traced."""


@dataclass(slots=True)
class _Line:
    """One line while it is summed up: weighted seconds by class on each device."""

    kind: str
    calls: int = 0
    time_s: float = 0.0
    wall_s: float = 0.0
    overlaps: bool = False
    idle_s: float = 0.0
    seconds: dict[DeviceId, Floats] = field(default_factory=dict)
    later_j: float = 0.0
    groups: set[int] = field(default_factory=set)


def table(
    timeline: Timeline, links: Links, parts: Sequence[Share], windows: Sequence[tuple[int, int]], notes: Sequence[str],
    *, is_cut: bool = False,
) -> EnergyTable:  # fmt: skip
    """Return the table of all devices; fill `timeline.energy_j` and `error_j`.

    `is_cut`: the tracer began and ended with the windows, so passes through regions that reach beyond are partial.
    """
    _fill(timeline, parts)
    total_j = float(sum(p.joules for p in parts))
    ledger = _Ledger(timeline, links, parts, total_j, windows, is_cut)
    on_host = all(p.on_host for p in parts)
    idle = [_idle(p) for p in parts]
    idle_s = sum(i[2] for i in idle)
    regions = ledger.regions()
    return EnergyTable(
        energy_j=total_j,
        error_j=join_errors(parts, [p.error_j for p in parts]),
        idle_j=float(sum(i[0] for i in idle)),
        idle_error_j=join_errors(parts, [i[1] for i in idle]),
        busy_error_j=join_errors(parts, [_busy_error_j(p) for p in parts]),
        time_s=sum(end_ns - begin_ns for begin_ns, end_ns in windows) * 1e-9,
        busy_s=float(sum(p.activity.busy_s for p in parts)),
        kernels=() if on_host else ledger.kernels(),
        ops=ledger.ops(),
        regions=regions,
        modules=ledger.modules(),
        steps=ledger.steps(),
        groups=() if on_host else ledger.sum_groups(),
        source="+".join(dict.fromkeys(p.domain.source for p in parts)),
        basis=worst_basis(p.domain.basis for p in parts),
        coverage=join_coverage(parts),
        operators=cover_operators(timeline, parts),
        idle_w=float(sum(i[0] for i in idle)) / idle_s if idle_s > 0 else None,
        notes=[*notes, *note_fits(parts), *note_overlaps(regions)],
    )


def _fill(timeline: Timeline, parts: Sequence[Share]) -> None:
    """Fill in the joules of every row, with the half-width of its class."""
    joules = np.full(len(timeline), np.nan)
    error = np.full(len(timeline), np.nan)
    for p in parts:
        rows = p.activity.rows
        sd_w = np.sqrt(np.maximum(np.diagonal(p.covariance), 0.0))
        joules[rows], error[rows] = 0.0, 0.0
        np.add.at(joules, rows, p.row_j)
        np.add.at(error, rows, Z90 * p.seconds * sd_w[p.activity.cls])
    timeline.energy_j, timeline.error_j = joules, error


def _idle(part: Share) -> tuple[float, float, float]:
    """Return the joules of the time in which nothing ran, their half-width, and the seconds."""
    seconds = sum_by_key(part.gap_cls, part.gap_s, len(part.watts))
    lasts_s = float((part.gap_end_ns - part.gap_start_ns).sum() * 1e-9)
    return float(seconds @ part.watts), _half(seconds, part.covariance), lasts_s


def _busy_error_j(part: Share) -> float:
    """Return the half-width of the joules in which something ran; by covariance, since classes share the level."""
    return _half(sum_by_key(part.activity.cls, part.seconds, len(part.watts)), part.covariance)


def _half(seconds: Floats, covariance: Floats) -> float:
    variance = max(float(seconds @ covariance @ seconds), 0.0)
    return Z90 * math.sqrt(variance)


class _Ledger:
    """Sums rows into lines, by what they belong to."""

    def __init__(
        self, timeline: Timeline, links: Links, parts: Sequence[Share], total_j: float,
        windows: Sequence[tuple[int, int]], is_cut: bool,
    ) -> None:  # fmt: skip
        self._timeline = timeline
        self._links = links
        self._parts = parts
        self._total_j = total_j
        self._is_cut = is_cut
        self._windows = np.array(windows, np.int64).reshape(-1, 2)
        counts = timeline.columns.get("count")
        self._counts = np.ones(len(timeline)) if counts is None else np.where(counts == NONE, 1, counts)

    def kernels(self) -> list[EnergyRow]:
        keys = self._timeline["kind"] * len(self._timeline.names) + self._timeline["name"]
        return self._lines(keys, self._kernel_line, groups=True)

    def _kernel_line(self, key: int) -> tuple[str, str]:
        kind, name = divmod(key, len(self._timeline.names))
        return self._timeline.names[name], KINDS[kind]

    def ops(self) -> list[EnergyRow]:
        op = self._links.op
        keys = np.where(op == NONE, NONE, self._timeline["name"][op])
        calls = self._op_calls()
        return self._lines(keys, lambda k: (NO_OP if k == NONE else self._timeline.names[k], "op"), calls=calls)

    def _op_calls(self) -> dict[int, int]:
        """Return how often operators that launched something were called; one call may launch several kernels."""
        calls = count_repeats(self._timeline, self._parts, self._links.op)
        used = np.flatnonzero(calls)
        names, where = rank_values(self._timeline["name"][used])
        counts = np.rint(np.bincount(where, calls[used], len(names))).astype(np.int64)
        return dict(zip(names.tolist(), counts.tolist(), strict=True))

    def regions(self) -> list[EnergyRow]:
        """Return regions by name with all inside them; kernels count for all regions around their launch. No steps."""
        steps = {s.name for s in self._links.steps}
        rows = self._sum_nested(self._links.region, "region", self._links.forward_region)
        return [row for row in rows if row.name not in steps]

    def modules(self) -> list[EnergyRow]:
        return self._sum_nested(self._links.module, "module", None)

    def steps(self) -> list[EnergyRow]:
        """Return each step with its kernels and the idle time beside them, so that steps sum to their total."""
        lines: dict[int, _Line] = {}
        for p in self._parts:
            step = self._links.step[p.activity.rows]
            self._add(lines, p, step, p.activity.rows, "step")
            self._add_gaps(lines, p, step)
        steps = self._links.steps
        wall_s = self._wall_s(*np.array([(s.start_ns, s.end_ns) for s in steps], np.int64).reshape(-1, 2).T)
        rows = []
        for index, line in sorted(lines.items()):
            if index != NONE:
                line.calls, line.wall_s = 1, float(wall_s[index])
                rows.append(self._row(steps[index].name, line, wall=True))
        return rows

    def sum_groups(self) -> list[EnergyRow]:
        """Return a line for each group of kernels that the samples cannot tell apart: their sum is known."""
        rows = []
        number = 0
        for p in self._parts:
            for group in range(int(p.group.max(initial=-1)) + 1):
                members = np.flatnonzero(p.group == group)
                inside = np.isin(p.activity.cls, members)
                line = _Line("group", calls=int(inside.sum()), time_s=float(p.activity.share_s[inside].sum()))
                line.seconds[p.device] = sum_by_key(p.activity.cls[inside], p.seconds[inside], len(p.watts))
                name = " + ".join(dict.fromkeys(p.activity.names[m] for m in members))
                rows.append(self._row(name, line, group=number + group))
            number += int(p.group.max(initial=-1)) + 1
        return rows

    # -- summing ------------------------------------------------------------------------------------------------

    def _lines(
        self, keys: Ints, named: Callable[[int], tuple[str, str]], *, groups: bool = False,
        calls: dict[int, int] | None = None,
    ) -> list[EnergyRow]:  # fmt: skip
        lines: dict[int, _Line] = {}
        number = 0
        for p in self._parts:
            self._add(lines, p, keys[p.activity.rows], p.activity.rows, "")
            if groups:
                self._note_groups(lines, p, keys, number)
                number += int(p.group.max(initial=-1)) + 1
        rows = []
        for key, line in lines.items():
            name, line.kind = named(key)
            line.calls = calls.get(key, line.calls) if calls else line.calls
            rows.append(self._row(name, line, group=min(line.groups) if line.groups else None))
        return _sort_by_energy(rows)

    def _note_groups(self, lines: dict[int, _Line], part: Share, keys: Ints, number: int) -> None:
        for cls, group in enumerate(part.group.tolist()):
            if group >= 0:
                key = int(keys[part.activity.first[cls]])
                if key in lines:
                    lines[key].groups.add(number + group)

    def _add(self, lines: dict[int, _Line], part: Share, keys: Ints, rows: Ints, kind: str) -> None:
        """Add every row of a device to the line of its key."""
        if len(keys) == 0:
            return
        distinct_keys, where = rank_values(keys)
        classes = len(part.watts)
        flat = np.bincount(where * classes + part.activity.cls, part.seconds, minlength=len(distinct_keys) * classes)
        by_key = flat.reshape(len(distinct_keys), classes)
        time_s = sum_by_key(where, part.activity.share_s, len(distinct_keys))
        count = len(distinct_keys)  # each row of a device is one interval
        counts = _distinct(where, rows, count) if part.on_host else np.bincount(where, self._counts[rows], count)
        for i, key in enumerate(distinct_keys.tolist()):
            line = lines.setdefault(key, _Line(kind))
            line.calls += int(counts[i])
            line.time_s += float(time_s[i])
            line.seconds[part.device] = line.seconds.get(part.device, 0.0) + by_key[i]

    def _add_gaps(self, lines: dict[int, _Line], part: Share, step: Ints) -> None:
        """Give each idle time to the step whose kernel comes next; the part before its begin to the step before.

        Idle time outside of all steps (before the first, after the last) is given to none.
        """
        begin = np.array([s.start_ns for s in self._links.steps] or [0], np.int64)
        end = np.array([s.end_ns for s in self._links.steps] or [0], np.int64)
        after = np.searchsorted(part.activity.start_ns, part.gap_end_ns, side="left")
        padded = np.concatenate([step, [NONE]])
        coming, gone = padded[after], padded[after - 1]
        gap_start, gap_end = part.gap_start_ns, part.gap_end_ns
        cut = np.where(coming == NONE, gap_end, np.clip(begin[coming], gap_start, gap_end))
        self._give(lines, part, coming, cut, gap_end)
        self._give(lines, part, gone, gap_start, np.where(gone == NONE, gap_start, np.minimum(cut, end[gone])))

    def _give(self, lines: dict[int, _Line], part: Share, keys: Ints, start_ns: Ints, end_ns: Ints) -> None:
        """Add one idle time of every gap to the line of its key."""
        seconds = np.maximum(end_ns - start_ns, 0) * 1e-9
        real = (seconds > 0) & (keys != NONE)
        distinct_keys, where = rank_values(keys[real])
        classes = len(part.watts)
        weighted = seconds if part.gap_weight is None else seconds * part.gap_weight
        by_key = sum_by_key(where * classes + part.gap_cls[real], weighted[real], len(distinct_keys) * classes)
        idle_s = sum_by_key(where, seconds[real], len(distinct_keys))
        for i, key in enumerate(distinct_keys.tolist()):
            if key in lines:
                self._idle_of(lines[key], part, by_key.reshape(-1, classes)[i], float(idle_s[i]))

    @staticmethod
    def _idle_of(line: _Line, part: Share, seconds: Floats, idle_s: float) -> None:
        """Add idle time to a line; `seconds` by class are weighted by relative power, for the joules."""
        line.seconds[part.device] = line.seconds.get(part.device, 0.0) + seconds
        line.idle_s += idle_s

    def _sum_nested(self, innermost: Ints, kind: str, forward: Ints | None) -> list[EnergyRow]:
        """Return lines by name over all levels of nesting: each row of a device counts for everything around it."""
        lines: dict[int, _Line] = {}
        passes = self._named_rows(kind)
        start_ns, end_ns = (self._timeline[key][passes] for key in ("start_ns", "end_ns"))
        forest = Forest(passes[np.lexsort((passes, -end_ns, start_ns))], self._links.parent)
        again = self._again(forest)
        partial = self._find_partial(passes, again)
        left_out = again | partial
        for p in self._parts:
            self._add_held(lines, p, kind, forest, innermost, left_out)
            if kind == "region" and p.on_host:
                self._add_gaps_of_host(lines, p, left_out)
        times = count_calls(self._timeline, self._parts, innermost, nested=kind == "module")
        self._count_calls(lines, passes[~partial[passes]], again, times)
        if forward is not None:
            self._add_later(lines, innermost, forward, partial)
        rows = [
            self._row(self._timeline.names[k], line, wall=kind == "region", later=forward is not None)
            for k, line in lines.items()
        ]
        return _sort_by_energy(rows)

    def _add_held(
        self, lines: dict[int, _Line], part: Share, kind: str, forest: Forest, innermost: Ints,
        left_out: NDArray[np.bool_],
    ) -> None:  # fmt: skip
        """Give every pass, and all passes around it, its device rows and the idle time between two of those."""
        activity, classes = part.activity, len(part.watts)
        time, idle, calls = classes, classes + 1, classes + 2  # further columns, behind the seconds by class
        at = forest.place[innermost[activity.rows]]
        entries: list[tuple[Ints, Ints | int, NDArray[np.floating[Any]] | float]]
        entries = [(at, activity.cls, part.seconds), (at, time, activity.share_s), (at, calls, 1.0)]
        if kind == "region" and not part.on_host and len(at) > 1:
            after = np.searchsorted(activity.start_ns, part.gap_end_ns, side="left")
            between = (after < len(at)) & (after > 0)
            within = forest.find_common(at[after[between] - 1], at[after[between]])
            gap_s = (part.gap_end_ns[between] - part.gap_start_ns[between]) * 1e-9
            entries += [(within, part.gap_cls[between], gap_s), (within, idle, gap_s)]
        for place, sums in forest.sum_upwards(entries, classes + 3):
            row = int(forest.rows[place])
            if not left_out[row]:
                line = lines.setdefault(int(self._timeline["name"][row]), _Line(kind))
                line.seconds[part.device] = line.seconds.get(part.device, 0.0) + sums[:classes]
                line.time_s += float(sums[time])
                line.idle_s += float(sums[idle])
                line.calls += int(sums[calls])

    def _add_gaps_of_host(self, lines: dict[int, _Line], part: Share, left_out: NDArray[np.bool_]) -> None:
        """Give regions of the host all idle time from their begin to their end: that is where their program is."""
        rows = self._named_rows("region")
        rows = rows[~left_out[rows]]
        if part.domain.rank is not None:
            rows = rows[self._timeline["rank"][rows] == part.domain.rank]
        if len(rows) == 0 or len(part.gap_cls) == 0:
            return
        origin = int(part.gap_start_ns[0])
        keys, covered = union_by_key(*(self._timeline[key][rows] for key in ("name", "start_ns", "end_ns")))
        edges = [(edge - origin).astype(np.float64) for edge in covered]
        named, where = np.unique(keys, return_inverse=True)
        inside, idle_s = np.zeros((len(named), len(part.watts))), np.zeros(len(named))
        for cls in np.unique(part.gap_cls).tolist():
            of_class = part.gap_cls == cls
            at = np.column_stack([part.gap_start_ns[of_class], part.gap_end_ns[of_class]]).reshape(-1) - origin
            for counts_s, is_time in ((part.gap_s, False), ((part.gap_end_ns - part.gap_start_ns) * 1e-9, True)):
                so_far = np.repeat(np.cumsum(counts_s[of_class]), 2)
                so_far[0::2] -= counts_s[of_class]
                begun, ended = (np.interp(edge, at.astype(np.float64), so_far) for edge in edges)
                within = sum_by_key(where, ended - begun, len(named))
                if is_time:
                    idle_s += within
                else:
                    inside[:, cls] = within
        for i, key in enumerate(named.tolist()):
            if idle_s[i] > 0:
                self._idle_of(lines.setdefault(key, _Line("region")), part, inside[i], float(idle_s[i]))

    def _named_rows(self, kind: str) -> Ints:
        timeline = self._timeline
        if kind == "region":
            return timeline.rows("region")
        modules = np.isin(timeline["name"], list(timeline.meta.get("modules", ())))
        return np.flatnonzero((timeline["kind"] == CODE["op"]) & modules)

    def _again(self, forest: Forest) -> NDArray[np.bool_]:
        """Return which rows lie inside one of their own name, at any depth: the outer one already has their joules."""
        inside_own_name = np.zeros(len(self._timeline) + 1, bool)  # one more, for NONE
        names = self._timeline["name"][forest.rows]
        order = np.argsort(names, kind="stable")
        first = names[order] * (len(order) + 1)  # offsets, so that names do not overlap
        reach = np.maximum.accumulate(first + forest.end[order])
        inside_own_name[forest.rows[order[1:]]] = (first + order)[1:] < reach[:-1]
        return inside_own_name

    def _find_partial(self, rows: Ints, again: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return passes that were traced only in part, if others of their name were traced whole; they do not count."""
        partial = np.zeros(len(self._timeline) + 1, bool)  # one more, for NONE
        if not self._is_cut:
            return partial
        start_ns, end_ns, names = (self._timeline[key][rows] for key in ("start_ns", "end_ns", "name"))
        seen_s = self._wall_s(start_ns, end_ns)
        short = seen_s < WHOLE * (end_ns - start_ns) * 1e-9
        has_whole = np.isin(names, names[~short & (seen_s > 0)])
        partial[rows] = short & has_whole & ~again[rows]
        return partial

    def _count_calls(self, lines: dict[int, _Line], rows: Ints, again: NDArray[np.bool_], times: Floats) -> None:
        """Count the calls of a region: its passes, except those inside another of its name.

        Its wall time lies within the windows; a moment that lies in several passes counts once for each rank.
        """
        timeline = self._timeline
        begun = np.searchsorted(self._windows[:, 0], timeline["end_ns"][rows], side="left")
        over = np.searchsorted(self._windows[:, 1], timeline["start_ns"][rows], side="right")
        rows = rows[begun > over]
        rows = rows[~again[rows] | (timeline["value"][rows] == APART)]
        names, where = rank_values(timeline["name"][rows])
        ranks, rank = rank_values(timeline["rank"][rows])
        keys, covered = union_by_key(where * len(ranks) + rank, timeline["start_ns"][rows], timeline["end_ns"][rows])
        calls = np.rint(np.bincount(where, times[rows], len(names)))
        passes = np.bincount(where, minlength=len(names))
        took_s = sum_by_key(where, self._wall_s(timeline["start_ns"][rows], timeline["end_ns"][rows]), len(names))
        wall_s = sum_by_key(keys // max(len(ranks), 1), self._wall_s(*covered), len(names))
        overlaps = took_s > wall_s + 1e-9 * calls  # more than rounding to nanoseconds
        for i, key in enumerate(names.tolist()):
            if key in lines:
                line = lines[key]
                line.calls, line.overlaps = int(calls[i]), bool(overlaps[i])
                line.wall_s = float(wall_s[i] * calls[i] / passes[i])

    def _wall_s(self, start_ns: Ints, end_ns: Ints) -> Floats:
        """Return the seconds of some times that lie in the windows of the joules."""
        inside = np.zeros(len(start_ns), np.int64)
        for begin_ns, stop_ns in self._windows.tolist():
            inside += np.maximum(np.minimum(end_ns, stop_ns) - np.maximum(start_ns, begin_ns), 0)
        return np.asarray(inside * 1e-9, np.float64)

    def _add_later(self, lines: dict[int, _Line], innermost: Ints, forward: Ints, partial: NDArray[np.bool_]) -> None:
        """Add what autograd spent elsewhere on behalf of a region's forward operators."""
        names = self._timeline["name"]
        for p in self._parts:
            rows = p.activity.rows
            apart = np.flatnonzero((forward[rows] != NONE) & (forward[rows] != innermost[rows]))
            rows_apart = rows[apart]
            first, where = distinct(forward[rows_apart], innermost[rows_apart])
            joules = sum_by_key(where, p.row_j[apart], len(first))
            pairs = zip(forward[rows_apart[first]].tolist(), innermost[rows_apart[first]].tolist(), strict=True)
            for (ahead, here), spent in zip(pairs, joules.tolist(), strict=True):
                # A region around both (the step) already has these joules.
                around = {int(names[r]) for r in self._links.path(here)}
                for key in {int(names[r]) for r in self._links.path(ahead) if not partial[r]} - around:
                    lines.setdefault(key, _Line("region")).later_j += spent

    def _row(
        self, name: str, line: _Line, *, group: int | None = None, wall: bool = False, later: bool = False
    ) -> EnergyRow:
        parts = [p for p in self._parts if p.device in line.seconds]
        joules = sum(float(line.seconds[p.device] @ p.watts) for p in parts)
        error_j = join_errors(parts, [_half(line.seconds[p.device], p.covariance) for p in parts])
        return EnergyRow(
            name=name, kind=line.kind, calls=line.calls, time_s=line.time_s, energy_j=joules,
            error_j=error_j, share=joules / self._total_j if self._total_j > 0 else 0.0, group=group,
            with_backward_j=joules + line.later_j if later else None, wall_s=line.wall_s if wall else None,
            idle_s=line.idle_s if wall else None, devices=len(parts) if line.kind == "step" else 1,
            overlaps=wall and line.overlaps,
        )  # fmt: skip


def _distinct(where: Ints, rows: Ints, count: int) -> Ints:
    """Return how many different rows each key has; an operator's self time may come in several intervals."""
    key = np.full(int(rows.max(initial=NONE)) + 1, NONE, np.int64)
    key[rows] = where
    return np.bincount(key[key != NONE], minlength=count).astype(np.int64)


def _sort_by_energy(rows: list[EnergyRow]) -> list[EnergyRow]:
    return sorted(rows, key=lambda r: r.energy_j, reverse=True)
