"""The critical path: the chain of work that the end of the recording waited for, walked backwards from its last event.

::

    host     ──[op][launch]─┐·············┌─[op]──[synchronise ······]        what is on the path: who held the next up
    device   ───────────────└[kernel][ker]┘ · · · ·[kernel]──────────┘

* A device row waits for the row before it on its stream and for its launch call: the later of the two is on the path.
* A synchronising call waits for the last device row that ends during it (cudaStreamSynchronize: nearly always what it
  was called for; streams of a call are not recorded). So does a copy that blocks.
* A collective that several ranks recorded cannot move before its last rank starts: the path goes on there.
* A thread that does nothing for a while was woken by another one of its process, if that one ended its last operator
  within the pause and rests after it (autograd's thread and the one that called backward).
* Which stream waits for which (CUDA events) is in the traces that have synchronisation events (cuda_sync). In others a
  row that starts later than its launch and its stream explain is taken to have waited for the row of its device that
  ended last before it.

The path of one step ends with the last row that the step launched, or with the step itself, and begins with the step.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError, did_you_mean
from ..profile.open_recording import Progress, open_recording
from ..record import CODE
from ..recording import Recording
from ..timeline import Timeline
from ..timeline.columns import NONE, Ints
from ..timeline.intervals import Nesting
from ..timeline.link import Step
from ..timeline.path_segment import PathPlace, PathSegment
from .collectives import find_meetings
from .devices import explain_no_device, find_launches, is_blocking_call, list_devices
from .result import Result, columns
from .slowdown import slowdown_of
from .stream_waits import StreamWaits

GAP_NS = 10_000
"""Nanoseconds: a row that starts this much later than its stream and launch explain has waited for another stream."""
PAUSE_NS = 5_000
"""Nanoseconds: a shorter pause of a thread is its own, such as Python between two operators."""
SEGMENTS = 1000
"""Most pieces of the path in a result."""
BETWEEN = "(between operators)"
GAP = "(gap)"
ASSUMED = (
    "events between streams are not in the trace: a late kernel is taken to have waited for the one that ended last "
    "before it on its device; a synchronising call for the last kernel that ended during it"
)
_COLUMNS = columns(
    ("on", "on"),
    ("name", "what"),
    ("segments", "segments", "pieces of the path, not calls"),
    ("time_s", "on the path"),
    ("share_pct", "share"),
)


def critical_path(
    trace: Any, *, power: Any = None, step: str | int | None = None, progress: Progress | None = None
) -> Result:
    """Return what the traced part of a run waited for, by operator on the host and kernel on the device.

    Parts are disjoint and sum to the length, which is the time from where the path begins to the end of the last event.
    `step` takes the path of one step only: by its name ("ProfilerStep#5"), or by the number in its name (5), or of the
    longest region with that name.

    `facts["segments"]` has the longest pieces of the path in time order: [start, end (s since the trace began), on,
    name]. `tessera export TRACE --chrome FILE --critical-path` draws all of them.

    >>> analyze.critical_path("trace.json.gz", step=5).facts["host_pct"]
    """
    recording = open_recording(trace, power=power, progress=progress)
    timeline = recording.timeline
    segments = find_path(recording, step)
    sums: dict[tuple[str, str, str], list[int]] = {}
    for s in segments:
        line = sums.setdefault((s.on, s.kind, s.name), [0, 0])
        line[0] += s.end_ns - s.start_ns
        line[1] += 1
    length_ns = sum(ns for ns, _ in sums.values())
    rows: list[dict[str, Any]] = []
    for (on, kind, name), (ns, times) in sorted(sums.items(), key=lambda kv: (-kv[1][0], kv[0])):
        share_pct = 100.0 * ns / length_ns
        figures = {"segments": times, "time_s": ns / 1e9, "ns": ns, "share_pct": share_pct}
        rows.append({"on": on, "kind": kind, "name": name, **figures})
    begun_ns, ended_ns = recording.span_ns
    windows = recording.facts.accounted_windows or [timeline.traced_span]
    facts: dict[str, Any] = {
        "length_s": length_ns / 1e9,
        "traced_s": sum(end - begin for begin, end in windows) / 1e9,
        "recorded_s": (ended_ns - begun_ns) / 1e9,
    }
    for on in ("host", "device", "gap"):
        ns = sum(r["ns"] for r in rows if r["on"] == on)
        facts |= {f"{on}_s": ns / 1e9, f"{on}_pct": 100.0 * ns / length_ns if length_ns else None}
    base = timeline.start_ns
    facts["segments"] = [[(s.start_ns - base) / 1e9, (s.end_ns - base) / 1e9, s.on, s.name] for s in _longest(segments)]
    tracing = slowdown_of(recording, None)
    slowed = [tracing.text] if tracing is not None and tracing.text else []
    has_devices = bool(list_devices(timeline))
    of_step = "" if step is None else f"{find_steps(timeline, step)[0].name} in "
    return Result(
        kind="critical_path",
        title=f"Critical path of {of_step}{recording.facts.name}",
        columns=_COLUMNS,
        rows=rows,
        facts=facts,
        notes=[*recording.notes, *slowed, *([ASSUMED] if has_devices and not StreamWaits(timeline).known else [])],
        missing={} if segments else {"path": explain_no_device(recording)},
    )


def find_path(recording: Recording, step: str | int | None = None) -> list[PathSegment]:
    """Return the pieces of the critical path of a recording, or of one of its steps, in time order."""
    timeline = recording.timeline
    steps = [] if step is None else find_steps(timeline, step)
    if not len(timeline.device_rows) and not len(timeline.rows("op", "runtime")):
        return []
    joined = {row: m for m in find_meetings(recording) for row in m.rows}
    walk = PathWalk(timeline, joined, StreamWaits(timeline))
    if step is None and recording.facts.operator_windows:  # in a light run, it is not known what was launched outside
        steps = [Step("", *recording.facts.operator_windows[-1])]
    return walk.walk_step(steps) if steps else walk.walk()


def find_steps(timeline: Timeline, step: str | int) -> list[Step]:
    """Return the step of that name, or whose name ends with that number; else the longest region of that name.

    For a merged recording, return one for each rank.
    """
    steps, wanted = timeline.linked.steps, str(step)
    number = int(wanted) if wanted.isdecimal() else None
    found = [s for s in steps if s.name == wanted or (number is not None and _number_of(s.name) == number)]
    if found:
        return found
    regions = [r for r in timeline.rows("region").tolist() if timeline.name(r) == wanted]
    longest: dict[int, Step] = {}
    for row in regions:
        region = Step(wanted, int(timeline["start_ns"][row]), int(timeline["end_ns"][row]), row)
        known = longest.setdefault(int(timeline["rank"][row]), region)
        if region.end_ns - region.start_ns > known.end_ns - known.start_ns:
            longest[int(timeline["rank"][row])] = region
    if longest:
        return list(longest.values())
    names = list(dict.fromkeys(s.name for s in steps))
    if not names:
        fix = "leave the step out, or give the name of a region; prof.step() and regions called step_1 ... are steps"
        raise ArgumentError("the recording has no steps", fix=fix)
    known_names = ", ".join(names if len(names) < 8 else [*names[:3], "...", names[-1]])
    raise ArgumentError(f"there is no step {wanted!r}{did_you_mean(wanted, names)}", fix=f"one of: {known_names}")


def _number_of(name: str) -> int | None:
    digits = re.search(r"\d+$", name)
    return int(digits[0]) if digits is not None else None


def _longest(segments: list[PathSegment]) -> list[PathSegment]:
    least = sorted((s.end_ns - s.start_ns for s in segments), reverse=True)[:SEGMENTS][-1:] or [0]
    return [s for s in segments if s.end_ns - s.start_ns >= least[0]][:SEGMENTS]


class PathWalk:
    """Walks back from the last event. `joined` has the meeting of each collective that several ranks recorded."""

    def __init__(self, timeline: Timeline, joined: dict[int, Any], waits: StreamWaits) -> None:
        self._t, self._stream_waits = timeline, waits
        self._joined = joined
        self._start = timeline["start_ns"].tolist()
        self._end = timeline["end_ns"].tolist()
        self._segments: list[PathSegment] = []
        self._device_order()
        self._host_order()

    def _device_order(self) -> None:
        """Find, for each device row, its launch, and what ran before it on its stream and on its device."""
        t, rows = self._t, self._t.device_rows
        lasting = t["end_ns"] > t["start_ns"]  # an instant delays nothing
        self._launch = dict(zip(rows.tolist(), find_launches(t, rows).tolist(), strict=True))
        self._before_on_stream: dict[int, int] = {}
        self._ended: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for device in list_devices(t):
            own = device.rows[lasting[device.rows]]
            own = own[np.lexsort((own, t["end_ns"][own], t["start_ns"][own]))]
            last: dict[int, int] = {}
            for row, stream in zip(own.tolist(), t["stream"][own].tolist(), strict=True):
                self._before_on_stream[row] = last.get(stream, NONE)
                last[stream] = row
            by_end = own[np.argsort(t["end_ns"][own], kind="stable")]
            self._ended[device.rank, device.device] = (t["end_ns"][by_end].tolist(), by_end.tolist())

    def _host_order(self) -> None:
        """Find, for each thread, the stretches of its innermost rows, and its calls that wait for a device."""
        t = self._t
        rows = t.rows("op", "runtime", "graph_launch")
        rows = rows[~np.isin(t["name"][rows], t.python_names)]
        rows = rows[t["end_ns"][rows] > t["start_ns"][rows]]
        stretch_rows, starts, ends = Nesting(
            rows, t["thread"][rows], t["start_ns"][rows], t["end_ns"][rows]
        ).stretches()
        self._lanes: dict[int, tuple[list[int], list[int], list[int]]] = {}
        threads = t["thread"][stretch_rows]
        order = np.lexsort((starts, threads))
        for own in np.split(order, np.flatnonzero(np.diff(threads[order])) + 1):
            if len(own):
                self._lanes[int(threads[own[0]])] = (
                    starts[own].tolist(),
                    ends[own].tolist(),
                    stretch_rows[own].tolist(),
                )
        waiting = np.array([is_blocking_call(n) for n in t.names] or [False])
        calls = rows[(t["kind"][rows] == CODE["runtime"])]
        self._waits = set(calls[waiting[t["name"][calls]]].tolist())
        self._rank_of = {thread: int(t["rank"][lane[2][0]]) for thread, lane in self._lanes.items()}
        self._host_ends: dict[int, list[tuple[int, int]]] = {rank: [] for rank in self._rank_of.values()}
        for thread, lane in self._lanes.items():
            self._host_ends[self._rank_of[thread]] += [(end, thread) for end in lane[1]]
        for ended in self._host_ends.values():
            ended.sort()

    def walk(self) -> list[PathSegment]:
        """Return the segments in time order; adjacent segments of one row are merged."""
        candidates = [c for c in (self._last_device(), self._last_host()) if c is not None]
        return self._walk_from(max(candidates), 0) if candidates else []

    def walk_step(self, steps: Sequence[Step]) -> list[PathSegment]:
        """Return the segments from the end of what a step launched back to where the step begins."""
        t, candidates = self._t, []
        for step in steps:
            device = self._launched_in(step, t.device_rows)
            device = device[t["end_ns"][device] > t["start_ns"][device]]
            candidates += [(self._end[r], r, NONE) for r in device[np.argsort(t["end_ns"][device])][-1:].tolist()]
            host = self._launched_in(step, t.rows("op", "runtime")) if step.row == NONE else np.array([step.row])
            threads = np.unique(t["thread"][host]).tolist()
            candidates += [(step.end_ns, NONE, thread) for thread in threads if thread in self._lanes]
        return self._walk_from(max(candidates), min(s.start_ns for s in steps)) if candidates else []

    def _launched_in(self, step: Step, rows: Ints) -> Ints:
        """Return the rows that a step of a rank launched; those of all ranks if two marks made the step."""
        launched = self._t.linked.launch_ns[rows]
        inside = (launched >= step.start_ns) & (launched < step.end_ns)
        if step.row != NONE:
            inside &= self._t["rank"][rows] == self._t["rank"][step.row]
        return rows[inside]

    def _walk_from(self, last: tuple[int, int, int], until_ns: int) -> list[PathSegment]:
        at, row, thread = last
        place: tuple[int, int] | None = (row, thread)
        # every turn goes back in time or to an earlier row, so there are never so many
        for _ in range(4 * len(self._t) + 16):
            if place is None or at <= until_ns:
                break
            row, thread = place
            at, place = self._on_device(row, at) if row != NONE else self._on_host(thread, at)
        if 0 < until_ns < at:  # nothing was recorded before, so this is the step itself
            self._add_other(until_ns, at, "host", "op", BETWEEN)
        merged: list[PathSegment] = []
        for s in reversed(self._segments):
            inside = s._replace(start_ns=max(s.start_ns, until_ns))
            if merged and merged[-1].end_ns == s.start_ns and merged[-1][2:] == s[2:]:
                merged[-1] = merged[-1]._replace(end_ns=s.end_ns)
            elif inside.end_ns > inside.start_ns:
                merged.append(inside)
        return merged

    def _last_device(self) -> tuple[int, int, int] | None:
        last = [(ends[-1], rows[-1], NONE) for ends, rows in self._ended.values() if rows]
        return max(last, default=None)

    def _last_host(self) -> tuple[int, int, int] | None:
        last = [(ends[-1], NONE, thread) for thread, (_, ends, _) in self._lanes.items()]
        return max(last, default=None)

    def _add(self, start: int, end: int, row: int) -> None:
        on: PathPlace = "device" if row in self._launch else "host"
        self._add_other(start, end, on, self._t.kind(row), self._t.name(row), row)

    def _add_other(self, start: int, end: int, on: PathPlace, kind: str, name: str, row: int = NONE) -> None:
        if end > start:
            self._segments.append(PathSegment(start, end, on, kind, name, row))

    def _on_device(self, row: int, at: int) -> tuple[int, tuple[int, int] | None]:
        """Return the part of a device row that is on the path until `at`, and what delayed it."""
        begin = self._start[row]
        met = self._joined.get(row)
        if met is not None and begin < met.ready_ns < at:
            self._add(met.ready_ns, at, row)
            last = max(met.rows, key=lambda r: (self._start[r], r))
            return self._find_blocker(last, met.ready_ns)
        self._add(begin, at, row)
        return self._find_blocker(row, min(begin, at))

    def _find_blocker(self, row: int, at: int) -> tuple[int, tuple[int, int] | None]:
        """Return why a device row did not start before `at`: its stream, its launch, or else another stream."""
        call, before = self._launch[row], self._before_on_stream.get(row, NONE)
        ready: list[tuple[int, int, tuple[int, int]]] = []  # (when, 1 for the stream, which wins a tie, where to go on)
        if before != NONE:
            ready.append((min(self._end[before], at), 1, (before, NONE)))
        awaited = self._stream_waits.awaited.get(row, NONE)
        if awaited != NONE and self._start[awaited] < at:
            ready.append((min(self._end[awaited], at), 1, (awaited, NONE)))
        if call != NONE and self._start[call] <= at:
            ready.append((min(self._end[call], at), 0, (NONE, int(self._t["thread"][call]))))
        latest = max(ready, default=None)
        if latest is None or (awaited == NONE and at - latest[0] > GAP_NS):
            other = self._ended_before(row, at)
            if other is not None and (latest is None or self._end[other] > latest[0]):
                latest = (self._end[other], 2, (other, NONE))
        if latest is None:
            return at, None
        self._add_other(latest[0], at, "gap", "gap", GAP if latest[1] else "(launch latency)")
        return latest[0], latest[2]

    def _ended_before(self, row: int, at: int) -> int | None:
        """Return the row of the same device that ended last, not after `at` and not of this stream."""
        t = self._t
        ends, rows = self._ended[int(t["rank"][row]), int(t["device"][row])]
        place = bisect_right(ends, at) - 1
        if place < 0 or rows[place] == row or self._start[rows[place]] >= at:
            return None
        return rows[place]

    def _on_host(self, thread: int, at: int) -> tuple[int, tuple[int, int] | None]:
        """Return the part of a thread that is on the path until `at`, and what delayed it."""
        starts, ends, rows = self._lanes.get(thread, ([], [], []))
        place = bisect_left(starts, at) - 1
        if place < 0:
            return self._find_waker(thread, at, None)
        if ends[place] < at:
            return self._find_waker(thread, at, ends[place])
        row = rows[place]
        if row in self._waits and (done := self._ended_within(row, at)) is not None:
            self._add(self._end[done], at, row)
            return self._end[done], (done, NONE)
        self._add(starts[place], at, row)
        return starts[place], (NONE, thread)

    def _ended_within(self, call: int, at: int) -> int | None:
        """Return the last row of the call's rank that ended after the call began, and by `at`."""
        named = self._stream_waits.of_call(int(self._t["correlation"][call]))
        if named is not None and self._start[call] < self._end[named] <= at:
            return named
        rank, last = int(self._t["rank"][call]), None
        for (owner, _), (ends, rows) in self._ended.items():
            place = bisect_right(ends, at) - 1
            if owner == rank and place >= 0 and ends[place] > self._start[call]:
                row = rows[place]
                last = row if last is None or self._end[row] > self._end[last] else last
        return last

    def _find_waker(self, thread: int, at: int, until: int | None) -> tuple[int, tuple[int, int] | None]:
        """Return a thread's pause that ends at `at`, and the thread of its process that was busy last in it."""
        best: tuple[int, int] | None = None
        ended = self._host_ends.get(self._rank_of.get(thread, NONE), [])
        place = bisect_right(ended, (at, math.inf)) - 1
        while best is None and place >= 0 and ended[place][0] > (NONE if until is None else until):
            other = ended[place][1]
            starts, ends, _ = self._lanes[other]
            if other != thread and ends[bisect_left(starts, at) - 1] <= at:  # otherwise it is still busy
                best = ended[place]
            place -= 1
        if best is not None and (until is None or at - until > PAUSE_NS):
            self._add_other(best[0], at, "host", "op", BETWEEN)
            return best[0], (NONE, best[1])
        if until is None:
            return at, None
        self._add_other(until, at, "host", "op", BETWEEN)
        return until, (NONE, thread)
