"""Gives counters of replayed launches to the rows of a timeline, by kernel name and launch size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...timeline.columns import NONE, Launch, Timeline
from ..demangle import demangle
from .names import KernelCounters, canonical

Size = tuple[int, ...]
Key = tuple[str, Size | None, Size | None]

COPY = "a copy or fill has no kernel whose counters could be read"
COLLECTIVE = "collectives are not replayed: run alone, they would wait for the other GPUs forever"
NOT_REPLAYED = "no launch of this kernel was replayed"
OTHER_SIZE = "only launches of other sizes were replayed"
NOTHING_READ = "it was replayed, but gave no counters"


class SharedRows(Mapping[int, Mapping[str, Any]]):
    """Row -> fields. Many rows share one mapping: four bytes a row, for timelines of millions of rows."""

    def __init__(
        self, index: NDArray[np.int32], shared: Sequence[Mapping[str, Any]], own: Mapping[int, Mapping[str, Any]]
    ) -> None:
        self._index = index
        self._shared = shared
        # Keep the fields that rows had before, beside the counters.
        self._own = {r: {**fields, **(shared[index[r]] if index[r] != NONE else {})} for r, fields in own.items()}

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        own = self._own.get(row)
        if own is not None:
            return own
        at = int(self._index[row]) if 0 <= row < len(self._index) else NONE
        if at == NONE:
            raise KeyError(row)
        return self._shared[at]

    def __iter__(self) -> Iterator[int]:
        yield from map(int, np.flatnonzero(self._index != NONE))
        yield from (r for r in self._own if self._index[r] == NONE)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._index != NONE)) + sum(bool(self._index[r] == NONE) for r in self._own)


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a merge. `extra` is to be set as `Timeline.extra`; it keeps the fields that were there before."""

    extra: Mapping[int, Mapping[str, Any]]
    kernels: list[KernelCounters]
    """For each kernel and size that has rows in the timeline: the mean over its replayed launches."""
    rows: int
    """Rows of the timeline that ran on a device."""
    matched_rows: int
    seconds: float
    matched_s: float
    missing_s: dict[str, float]
    """Reason for missing counters -> device seconds."""

    @property
    def coverage(self) -> float | None:
        """The share of device time that has counters; None if there is no device time."""
        return self.matched_s / self.seconds if self.seconds else None

    def notes(self) -> list[str]:
        """Return sentences for people: how much has counters, and why the rest has none."""
        if self.coverage is None:
            return ["counters: nothing ran on a device"]
        lines = [f"counters: {self.coverage:.1%} of device time ({self.matched_rows} of {self.rows} rows)"]
        by_time = sorted(self.missing_s.items(), key=lambda item: -item[1])
        return lines + [f"without counters: {s / self.seconds:.1%} of device time: {why}" for why, s in by_time]


def merge(timeline: Timeline, counters: Iterable[KernelCounters]) -> Merged:
    """Give each row the mean counters of the replayed launches that have its name, grid and block.

    The values are those of the replay, in which one kernel at a time runs on the GPU, with cold caches. The timeline is
    not changed.
    """
    book = _Book(counters)
    rows = timeline.device_rows
    index = np.full(len(timeline), NONE, np.int32)
    shared: list[Mapping[str, Any]] = []
    kernels: list[KernelCounters] = []
    place_of: dict[int, int] = {}  # id of the mean -> its place in `shared`
    lasted_ns = timeline["end_ns"][rows] - timeline["start_ns"][rows]
    names, launches, kinds = (timeline[c][rows].astype(np.int64) for c in ("name", "launch", "kind"))
    # One look-up for each kernel and launch configuration, not for each row.
    _, first, inverse = np.unique(np.stack([names, launches, kinds]), axis=1, return_index=True, return_inverse=True)
    inverse = np.ravel(inverse)
    missing_ns: dict[str, int] = {}
    matched_rows, matched_ns = 0, 0
    group_ns = np.bincount(inverse, lasted_ns, minlength=len(first))  # floats are exact up to 2**53 ns: 100 days
    group_rows = np.bincount(inverse, minlength=len(first))
    places = np.full(len(first), NONE, np.int32)
    for group, at in enumerate(first):
        row = int(rows[at])
        number = int(launches[at])
        counters_or_reason = book.look_up(timeline.name(row), timeline.launches[number] if number != NONE else Launch())
        if isinstance(counters_or_reason, str) or not counters_or_reason.values:
            kind = timeline.kind(row)
            why = counters_or_reason if isinstance(counters_or_reason, str) else NOTHING_READ
            why = COPY if kind in {"memcpy", "memset"} else COLLECTIVE if kind == "collective" else why
            missing_ns[why] = missing_ns.get(why, 0) + int(group_ns[group])
            continue
        place = place_of.setdefault(id(counters_or_reason), len(shared))
        if place == len(shared):
            shared.append(counters_or_reason.values)
            kernels.append(counters_or_reason)
        places[group] = place
        matched_rows += int(group_rows[group])
        matched_ns += int(group_ns[group])
    if len(rows):
        index[rows] = places[inverse]
    return Merged(
        extra=SharedRows(index, shared, timeline.extra), kernels=kernels, rows=len(rows), matched_rows=matched_rows,
        seconds=int(lasted_ns.sum()) * 1e-9, matched_s=matched_ns * 1e-9,
        missing_s={why: ns * 1e-9 for why, ns in missing_ns.items()},
    )  # fmt: skip


def mean(kernels: Sequence[KernelCounters]) -> KernelCounters:
    """Return the mean of launches of one kernel. A field that only some launches have is averaged over those."""
    if len(kernels) == 1:
        return kernels[0]
    values = {f: _mean([k.values[f] for k in kernels if f in k.values]) for k in kernels for f in k.values}
    figures = {f: float(np.mean([k.figures[f] for k in kernels if f in k.figures])) for k in kernels for f in k.figures}
    missing = {f: why for k in kernels for f, why in k.missing.items() if f not in values}
    first = kernels[0]
    return KernelCounters(
        name=first.name, grid=first.grid, block=first.block, values=values, figures=figures, missing=missing,
        source=first.source, device=first.device, launches=sum(k.launches for k in kernels),
    )  # fmt: skip


def _mean(values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        return {k: sum(v.get(k, 0.0) for v in values) / len(values) for v in values for k in v}
    return sum(values) / len(values)


class _Book:
    """The replayed launches by name and size."""

    def __init__(self, counters: Iterable[KernelCounters]) -> None:
        self._launches: dict[Key, list[KernelCounters]] = {}
        self._sizes: dict[str, set[Key]] = {}
        self._means: dict[Key, KernelCounters] = {}
        for kernel in counters:
            # By the exact name, which is looked up first, and by the part of it that all demanglers write alike.
            for name in dict.fromkeys((demangle(kernel.name), canonical(kernel.name))):
                key = (name, _pad_size(kernel.grid), _pad_size(kernel.block))
                self._launches.setdefault(key, []).append(kernel)
                self._sizes.setdefault(name, set()).add(key)

    def look_up(self, name: str, launch: Launch) -> KernelCounters | str:
        """Return the mean of the replayed launches that match a launch, or why there is none."""
        full, short = demangle(name), canonical(name)
        grid, block = _pad_size(launch.grid), _pad_size(launch.block)
        for kernel in (full, short):
            for key in ((kernel, grid, block), (kernel, _total(grid), _total(block))):
                if key in self._launches:
                    return self._mean(key)
        sizes = self._sizes.get(full) or self._sizes.get(short)
        if not sizes:
            return NOT_REPLAYED
        if len(sizes) == 1 and (launch.grid is None or next(iter(sizes))[1] is None):
            return self._mean(next(iter(sizes)))  # the size is unknown on one side, but there is only one size
        return OTHER_SIZE

    def _mean(self, key: Key) -> KernelCounters:
        if key not in self._means:
            self._means[key] = mean(self._launches[key])
        return self._means[key]


def _pad_size(size: Size | None) -> Size | None:
    """Return a size in three dimensions. A single number stays: it is the total (AMD)."""
    if size is None or len(size) == 1:
        return size
    return (*size, 1, 1)[:3]


def _total(size: Size | None) -> Size | None:
    return None if size is None else (math.prod(size),)
