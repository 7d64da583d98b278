"""What the analyses of a timeline share: the devices of each rank, when rows of a sort ran there, who launched them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..attribute.activity import distinct
from ..errors import RecordingError
from ..record import CODE
from ..timeline import Launch, Timeline
from ..timeline.columns import NONE, Ints
from ..timeline.intervals import Spans, union
from .result import Column
from .source import Source

SORTS: dict[str, tuple[str, ...]] = {
    "compute": ("kernel",), "communication": ("collective",), "copies": ("memcpy", "memset"),
}  # fmt: skip
"""What runs on a device, by the kinds of its rows."""
LONGEST_NS = 2**61
"""73 years: longer spans are damage, and their sums would not fit 64 bits."""
NO_ACCELERATOR = "torch sees no accelerator"
"""How a session notes that it could trace a CPU only; `no_device` says it again, and what to do."""
_WITH_GPU = "record with activities=[..., ProfilerActivity.CUDA]"


def no_device(source: Source) -> str:
    """What to say of a recording in which nothing ran on a device, and what to run instead."""
    operators = len(source.timeline.rows("op")) > 0
    if source.run is None:
        if operators:
            instead = "`tessera analyze critical_path TRACE` shows where the time of the CPU went"
            return f"nothing ran on a GPU in this trace: {instead}; if a GPU was used: {_WITH_GPU}"
        known = "it has neither kernels nor operators" if len(source.timeline) else "there is no event in it"
        return f"{source.name} is empty: {known}; record again, and export the trace after the work is done"
    name = str(getattr(source.run, "path", source.name))
    path = shlex.quote(name) if name.endswith(".tessera") else "RUN"
    if operators:
        instead = f"`tessera analyze critical_path {path}` shows where the time of the CPU went"
        return f"nothing ran on a GPU in this run: {instead}, `tessera report {path} --by ops` where the joules went"
    return f"this run has neither kernels nor operators: `tessera report {path}` shows what was recorded"


def no_power(source: Source) -> str:
    """What to do about a recording without power."""
    if source.run is not None:
        return "no power sensor could be read in this run: `tessera doctor` says why"
    return 'no power log beside this trace: power="power.csv" with the watts of the same time'


@dataclass(frozen=True, slots=True)
class Place:
    """One device of one rank, and the rows that ran there."""

    rank: int
    device: int
    rows: Ints

    @property
    def name(self) -> str:
        """As people say it."""
        return f"GPU {self.device}" if self.rank == NONE else f"rank {self.rank} GPU {self.device}"

    @property
    def ids(self) -> dict[str, Any]:
        """What identifies it in a row of a table."""
        return {
            "where": self.name,
            "rank": None if self.rank == NONE else self.rank,
            "device": None if self.device == NONE else self.device,
        }


WHERE = (Column(key="where", title="device"),)
"""The column that says which device of which rank."""


def places(timeline: Timeline) -> list[Place]:
    """The devices that ran anything, by rank (each rank of a merged timeline has devices of its own)."""
    rows = timeline.device_rows
    if not len(rows):
        return []
    first_ns, last_ns = int(timeline["start_ns"].min()), int(timeline["end_ns"].max())
    if last_ns - first_ns >= LONGEST_NS:
        raise RecordingError(
            f"the trace spans {(last_ns - first_ns) / 3.15576e16:.0f} years", why="some of its times are damaged",
            fix="record again",
        )  # fmt: skip
    first, which = distinct(timeline["rank"][rows], timeline["device"][rows])
    order = np.argsort(which, kind="stable")
    parts = np.split(rows[order], np.cumsum(np.bincount(which))[:-1])
    keys = [(int(timeline["rank"][rows[f]]), int(timeline["device"][rows[f]])) for f in first]
    return sorted((Place(*key, own) for key, own in zip(keys, parts, strict=True)), key=lambda p: (p.rank, p.device))


def spans_of(timeline: Timeline, place: Place, *kinds: str) -> Spans:
    """When rows of some kinds ran at a place."""
    mine = place.rows[np.isin(timeline["kind"][place.rows], [CODE[k] for k in kinds])]
    return union(timeline["start_ns"][mine], timeline["end_ns"][mine])


def launches(timeline: Timeline, rows: Ints) -> Ints:
    """The runtime call that launched each row (`NONE`: not recorded), by correlation; without linking the rest."""
    if timeline.links is not None:
        return timeline.links.launch[rows]
    from ..timeline.link import _by_key

    calls = timeline.rows("runtime", "graph_launch")
    return _by_key(timeline, "correlation", calls, rows, timeline["start_ns"][rows])


def by_launch(timeline: Timeline, rows: Ints) -> Iterator[tuple[Launch | None, Ints]]:
    """Rows by their launch configuration: what copies and collectives of one sort share."""
    which = timeline["launch"][rows]
    for number in np.unique(which).tolist():
        yield None if number == NONE else timeline.launches[number], rows[which == number]


def named(timeline: Timeline, rows: Ints) -> dict[str, Ints]:
    """Rows of collectives and copies by the kind of the first and the direction of the second."""
    found: dict[str, list[Ints]] = {}
    kinds = timeline["kind"][rows]
    for launch, own in by_launch(timeline, rows[kinds != CODE["memset"]]):
        copies = timeline["kind"][own] == CODE["memcpy"]
        direction = (launch.memcpy_dir if launch else None) or "in an unknown direction"
        for name, some in (
            (f"copies {direction}", own[copies]),
            ((launch.collective_type if launch else None) or "other collective", own[~copies]),
        ):
            if len(some):
                found.setdefault(name, []).append(some)
    if (kinds == CODE["memset"]).any():
        found["memset"] = [rows[kinds == CODE["memset"]]]
    return {name: np.sort(np.concatenate(parts)) for name, parts in sorted(found.items())}


def is_sync(name: str) -> bool:
    """Whether a runtime call returns only when the device is done: cudaStreamSynchronize, hipMemcpy, ..."""
    return "ynchronize" in name or ("Memcpy" in name and "Async" not in name)


def ranks_of(source: Source) -> list[Timeline]:
    """The timelines of the ranks of a merged one, in the order of their rows; itself where there is one only."""
    ranks = np.unique(source.timeline["rank"])
    if len(ranks) < 2:
        return [source.timeline]
    if source.ranks:
        return [s.timeline for s in source.ranks]
    from ..profile.ranks.merge import only

    return [only(source.timeline, int(r)) for r in ranks]
