"""Where the rows of a timeline ran: on which device of which rank, launched by which call, in which regions."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..attribute.table import EnergyTable
from ..errors import RecordingError
from ..joules import Floats
from ..record import CODE
from ..recording import Recording
from ..timeline import Launch, Timeline
from ..timeline.columns import APART, NONE, UNTRACED, Ints
from ..timeline.distinct import distinct, rank_values
from ..timeline.intervals import Spans, difference, union
from ..timeline.link import Links
from .result import columns

ACTIVITIES = {"compute": ("kernel",), "communication": ("collective",), "copies": ("memcpy", "memset")}
"""The kinds of rows of each activity of a device."""
LONGEST_NS = 2**61
"""73 years in nanoseconds: longer spans are damaged data, and their sums would not fit 64 bits."""
WHERE = columns(("where", "device"))
"""The column that names the device and its rank."""
_STARTS_WORK = re.compile(r"Launch(?:Cooperative)?Kernel|Memcpy|Memset|GraphLaunch|LaunchHostFunc")
_COUNTER = re.compile(r"[ _#:/-]*\d+$")


def explain_no_device(recording: Recording) -> str:
    """Return what to say about a recording in which nothing ran on a device, and what to run instead."""
    timeline = recording.timeline
    has_operators = len(timeline.rows("op")) > 0
    if ranges := timeline.meta.get("profiler_ranges"):
        return (
            f"{len(ranges)} kernels were replayed for their counters (CUPTI's range profiler), and have no times of "
            "the program: `tessera analyze kernels TRACE` shows the counters; record without metrics to see times"
        )
    if timeline.meta.get("memory_timeline"):
        return "this is torch's memory timeline, which has allocations only: `tessera analyze memory TRACE` shows it"
    if launches := count_launches(timeline):
        return (
            f"this program launched {launches:,} kernels and copies, but the device's side of them is not in this "
            "recording: record with activities=[..., ProfilerActivity.CUDA]"
        )
    if recording.facts.kind == "trace":
        if has_operators:
            return (
                "nothing ran on a GPU in this trace: `tessera analyze critical_path TRACE` shows where the time of "
                "the CPU went; if a GPU was used: record with activities=[..., ProfilerActivity.CUDA]"
            )
        if unread := timeline.meta.get("unread"):
            return _explain_unread(recording.facts.name, unread)
        content = "it has neither kernels nor operators" if len(recording.timeline) else "it contains no event"
        return f"{recording.facts.name} is empty: {content}; record again, and export the trace after the work is done"
    name = str(recording.facts.path or recording.facts.name)
    path = shlex.quote(name) if name.endswith(".tessera") else "RUN"
    if has_operators:
        return (
            f"nothing ran on a GPU in this run: `tessera analyze critical_path {path}` shows where the time of the CPU "
            f"went, `tessera report {path} --by ops` where the joules went"
        )
    return f"this run has neither kernels nor operators: `tessera report {path}` shows what was recorded"


def _explain_unread(name: str, unread: Mapping[str, int]) -> str:
    advice = "give a trace of torch.profiler, or a profiler's own file (*.xplane.pb, *.pftrace)"
    if name.endswith(".trace.json.gz"):
        advice = "JAX and TensorFlow write all of it to the *.xplane.pb beside this file: give that one"
    what = "have no category (cat), so nothing tells kernels from calls"
    if named := [category[:40] for category in unread if category]:
        what = f"are of categories that are not read ({', '.join(named[:3])}{', ...' * (len(named) > 3)})"
    return f"the {sum(unread.values()):,} events of {name} {what}: {advice}"


def count_launches(timeline: Timeline) -> int:
    """Return how many calls of the host started something on a device."""
    starts = np.array([bool(_STARTS_WORK.search(name)) for name in timeline.names] or [False])
    rows = timeline.rows("runtime", "graph_launch")
    return int(starts[timeline["name"][rows]].sum())


def explain_no_power(recording: Recording) -> str:
    """Return what to do about a recording without power."""
    if recording.facts.kind == "run":
        return "this run has no power: `tessera doctor` lists the sensors; or --power power.csv, a log of the same time"
    return 'this trace has no power log: give one of the same time with power="power.csv", or --power power.csv'


@dataclass(frozen=True, slots=True)
class RankDevice:
    """One device of one rank, and the rows that ran there."""

    rank: int
    device: int
    rows: Ints

    @property
    def name(self) -> str:
        """Return the device's name for people."""
        return f"GPU {self.device}" if self.rank == NONE else f"rank {self.rank} GPU {self.device}"

    @property
    def ids(self) -> dict[str, Any]:
        """Return what identifies the device in a row of a table."""
        return {
            "where": self.name,
            "rank": None if self.rank == NONE else self.rank,
            "device": None if self.device == NONE else self.device,
        }


def list_devices(timeline: Timeline) -> list[RankDevice]:
    """Return the devices that ran anything, by rank (each rank of a merged timeline has devices of its own)."""
    rows = timeline.device_rows
    if not len(rows):
        return []
    span_ns = int(timeline["end_ns"].max()) - int(timeline["start_ns"].min())
    if span_ns >= LONGEST_NS:
        why = "some of its times are damaged"
        raise RecordingError(f"the trace spans {span_ns / 3.15576e16:.0f} years", why=why, fix="record again")
    first, which = distinct(timeline["rank"][rows], timeline["device"][rows])
    order = np.argsort(which, kind="stable")
    parts = np.split(rows[order], np.cumsum(np.bincount(which))[:-1])
    keys = [(int(timeline["rank"][rows[f]]), int(timeline["device"][rows[f]])) for f in first]
    devices = [RankDevice(*key, own) for key, own in zip(keys, parts, strict=True)]
    return sorted(devices, key=lambda d: (d.rank, d.device))


def whole_span(timeline: Timeline, rows: Ints) -> tuple[int, int]:
    """Return when the first of some rows started and the last one ended."""
    return int(timeline["start_ns"][rows].min()), int(timeline["end_ns"][rows].max())


def busy_spans(timeline: Timeline, rows: Ints, *kinds: str) -> Spans:
    """Return when some rows ran; with `kinds`, only those of these kinds."""
    if kinds:
        rows = rows[np.isin(timeline["kind"][rows], [CODE[k] for k in kinds])]
    return union(timeline["start_ns"][rows], timeline["end_ns"][rows])


def exposed_spans(timeline: Timeline, rows: Ints, *kinds: str) -> Spans:
    """Return when rows of these kinds ran and no kernel did: the only meaning of "exposed" in all analyses."""
    return difference(busy_spans(timeline, rows, *kinds), busy_spans(timeline, rows, "kernel"))


def find_launches(timeline: Timeline, rows: Ints) -> Ints:
    """Return the runtime call that launched each row, by correlation (`NONE`: not recorded)."""
    if timeline.links is not None:
        return timeline.links.launch[rows]
    from ..timeline.link import _by_key

    calls = timeline.rows("runtime", "graph_launch")
    return _by_key(timeline, "correlation", calls, rows, timeline["start_ns"][rows])


def find_twins(timeline: Timeline, rows: Ints) -> Ints:
    """Return the twins as `Links.find_twins` does, but do not link a timeline of which everything was traced."""
    return timeline.linked.find_twins(rows) if np.any(timeline["external"][rows] == UNTRACED) else rows


def group_by_launch(timeline: Timeline, rows: Ints) -> Iterator[tuple[Launch, Ints]]:
    """Yield rows by their launch configuration: direction and pinning of copies, kind and group of collectives."""
    which = timeline["launch"][rows]
    for number in np.unique(which).tolist():
        yield Launch() if number == NONE else timeline.launches[number], rows[which == number]


def is_blocking_call(name: str) -> bool:
    """Return whether a runtime call returns only when the device is done: cudaStreamSynchronize, hipMemcpy, ..."""
    return "ynchronize" in name or ("Memcpy" in name and "Async" not in name)


def split_ranks(recording: Recording) -> list[Timeline]:
    """Return the timelines of a merged timeline's ranks, in the order of their rows; itself if it has one rank."""
    ranks = rank_values(recording.timeline["rank"])[0]
    if len(ranks) < 2:
        return [recording.timeline]
    if recording.ranks:
        return [s.timeline for s in recording.ranks]
    from ..profile.ranks.merge import select_rank

    return [select_rank(recording.timeline, int(r)) for r in ranks]


def strip_counter(name: str) -> str:
    """Return the common part of the names of steps: `step` for `step_3`."""
    return _COUNTER.sub("", name) or name


def row_joules(timeline: Timeline, rows: Ints, table: EnergyTable) -> Floats:
    """Return joules of device rows: those of attribution, or each kernel's mean watts times the row's seconds."""
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
    """Return the number of each row's path, and the paths: names of the regions around it, outermost first.

    Steps go by the common part of their names, so that all of them are one path; so does a region of the program's own
    that has that name inside a step.
    """
    links = timeline.linked
    steps = {s.row for s in links.steps}
    innermost, inverse = rank_values(links.region[rows])
    numbers: dict[tuple[str, ...], int] = {}
    names: dict[int, tuple[str, bool]] = {}
    which = []
    for region in innermost.tolist():
        path: list[str] = []
        before: tuple[str, bool] | None = None
        for row in links.path(region):
            named = names.get(row) or names.setdefault(row, (_name_region(timeline, row, steps), row in steps))
            if not (named[1] and named == before):
                path.append(named[0])
            before = named
        which.append(numbers.setdefault(tuple(path), len(numbers)))
    return np.array(which, np.int64)[np.asarray(inverse).reshape(-1)], list(numbers)


def region_passes(timeline: Timeline) -> dict[str, list[int]]:
    """Return the rows of each region by its name in `region_paths`, without those inside another of that name."""
    links = timeline.linked
    steps = {s.row for s in links.steps}
    regions = timeline.rows("region").tolist()
    names = {row: _name_region(timeline, row, steps) for row in regions}
    outermost = _find_outermost(links, names)
    passes: dict[str, list[int]] = {}
    for row in regions:
        if row in outermost or timeline["value"][row] == APART:
            passes.setdefault(names[row], []).append(row)
    return passes


def _find_outermost(links: Links, names: Mapping[int, str]) -> set[int]:
    """Return the rows that are not inside another of their name, in one walk, however deep they are nested."""
    inside: dict[int, list[int]] = {}
    for row in names:
        inside.setdefault(int(links.parent[row]), []).append(row)
    found: set[int] = set()
    open_names: Counter[str] = Counter()
    left = [(row, True) for parent, rows in inside.items() if parent not in names for row in rows]
    while left:
        row, enters = left.pop()
        name = names[row]
        open_names[name] += 1 if enters else -1
        if enters:
            if open_names[name] == 1:
                found.add(row)
            left.append((row, False))
            left += [(child, True) for child in inside.get(row, ())]
    return found


def _name_region(timeline: Timeline, row: int, steps: Container[int]) -> str:
    return strip_counter(timeline.name(row)) if row in steps else timeline.name(row)
