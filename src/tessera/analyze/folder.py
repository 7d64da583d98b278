"""A folder of ranks, read by several processes at once; what an analysis does not look at is dropped where it is read.

64 ranks of 40 MB each are 0.8 GB of columns with all their operators, and a tenth of that with device rows alone.
"""

from __future__ import annotations

import dataclasses
import gzip
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ArgumentError, RecordingError
from ..profile.ranks.clocks import Offset
from ..profile.ranks.match import align
from ..profile.ranks.merge import Source as File
from ..profile.ranks.merge import _concatenated, _files, _load, _settled
from ..record import CODE, ON_DEVICE, Kind
from ..timeline import Timeline
from ..timeline.columns import NONE
from .collectives import ON_HOST
from .source import Source

MOST_WORKERS = 8
"""More processes than this wait for the disk, not for each other."""
_HEAD = 1 << 16
ON_DEVICE_ONLY = ("overlap", "kernels", "collectives", "memcpy")
"""The analyses that look at nothing but device rows."""

Read = tuple[File, Timeline, Offset | None]


def read_folder(
    path: Path, *, progress: Callable[[float], None] | None = None, workers: int | None = None,
    kinds: Sequence[Kind] | None = None,
) -> Source:  # fmt: skip
    """All ranks of a folder, their clocks aligned, as `open_source` has them. `kinds` are the rows to keep (all)."""
    files, others = _recordings(path)
    if len(files) < 2:
        raise ArgumentError(
            f"the folder {path.resolve()} has {len(files) or 'no'} recording of a rank",
            why=f"not traces: {_listed(others)}" if others else None,
            fix=f"give the file itself: {files[0]}" if files else "give a .tessera run or a Kineto trace",
        )
    loaded = sorted(_read(files, kinds, progress, workers), key=lambda one: one[0].rank)
    for (a, *_), (b, *_) in pairwise(loaded):
        if a.rank == b.rank:
            raise ArgumentError(
                f"{a.path} and {b.path} are both of rank {a.rank}", fix="keep one file for each rank in the folder"
            )
    sources, timelines, told = zip(*loaded, strict=True)
    offsets = _settled(align(timelines), told)
    counts = [len(t) for t in timelines]
    merged = _concatenated(timelines, offsets, [sum(counts[:i]) for i in range(len(counts))])
    merged.notes += [f"rank {s.rank}: {n}" for s, t in zip(sources, timelines, strict=True) for n in t.notes]
    merged.notes += [n for o in offsets for n in o.notes]
    merged.meta["ranks"] = [
        {**o.to_json(), "path": str(s.path), "host": s.host} for s, o in zip(sources, offsets, strict=True)
    ]
    for timeline, offset in zip(timelines, offsets, strict=True):
        for column in ("start_ns", "end_ns"):
            timeline.columns[column] = offset.apply(timeline.columns[column])
    ranks = [Source(f"rank {t.rank}", t) for t in timelines]
    if others:
        merged.notes.append(f"not traces, and skipped: {_listed(others)}")
    return Source(path.resolve().name, merged, ranks=ranks, notes=list(merged.notes))


def _recordings(path: Path) -> tuple[list[Path], list[Path]]:
    """The files of a folder that are recordings, and those that are other JSON."""
    try:
        files = _files(path)
    except RecordingError as exc:
        raise RecordingError(f"there is no recording in the folder {path.resolve()}", why=exc.why, fix=exc.fix) from exc
    kept = [f for f in files if f.suffix == ".tessera" or _is_trace(f)]
    return kept, [f for f in files if f not in kept]


def _is_trace(file: Path) -> bool:
    """Whether a JSON file is a trace, or too damaged to tell: then reading it says what is wrong."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as f:
            head = f.read(_HEAD)
            if b'"traceEvents"' in head or (head.lstrip()[:1] == b"[" and b'"ph"' in head):
                return True
            # Kineto writes what it knows of the machine first; a large file is hardly anything else.
            return len(head) == _HEAD and any(b'"traceEvents"' in part for part in iter(lambda: f.read(_HEAD), b""))
    except OSError:
        return True


def _listed(files: Sequence[Path]) -> str:
    names = [f.name for f in files[:4]]
    return ", ".join(names) + (f" and {len(files) - 4} more" if len(files) > 4 else "")


def _read(
    files: Sequence[Path], kinds: Sequence[Kind] | None, progress: Callable[[float], None] | None, workers: int | None
) -> list[Read]:
    count = min(len(files), MOST_WORKERS, workers or len(os.sched_getaffinity(0)))
    if count < 2 or sum(f.stat().st_size for f in files) < 4 << 20:  # starting a process takes longer
        found = []
        for place, file in enumerate(files):
            found.append(read_one(file, place, kinds))
            if progress:
                progress((place + 1) / len(files))
        return found
    found = []
    # Spawned: a fork would share locks of threads that are running here (samplers, exporters).
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        for one in pool.map(read_one, files, range(len(files)), [kinds] * len(files)):
            found.append(one)
            if progress:
                progress(len(found) / len(files))
    return found


def read_one(file: Path, place: int, kinds: Sequence[Kind] | None) -> Read:
    """One rank, with its number and host; called in a process of its own."""
    source, timeline, told = _load(file, place)
    host = source.host or timeline.meta.get("host_name")
    source = dataclasses.replace(source, host=host if isinstance(host, str) else "")
    timeline.rank = source.rank
    return source, timeline if kinds is None else _kept(timeline, kinds), told


def _kept(timeline: Timeline, kinds: Sequence[Kind]) -> Timeline:
    """Some kinds of rows, and collectives on the host; names that nobody needs any more are dropped too."""
    host = np.array([n.startswith(ON_HOST) for n in timeline.names] or [False])
    keep = np.flatnonzero(np.isin(timeline["kind"], [CODE[k] for k in kinds]) | host[timeline["name"]])
    columns: dict[str, Any] = {c: v[keep] for c, v in timeline.columns.items()}
    columns["parent"] = np.full(len(keep), NONE, np.int64)
    names = timeline.names
    used = np.unique(np.concatenate([columns[c] for c in ("name", "shapes", "unit")]))
    used = used[used != NONE]
    number = np.full(len(names) + 1, NONE, np.int64)
    number[used] = np.arange(len(used))
    columns |= {c: number[columns[c]] for c in ("name", "shapes", "unit")}
    return Timeline(
        columns=columns, names=[names[i] for i in used.tolist()], launches=timeline.launches, rank=timeline.rank,
        meta={**timeline.meta, "modules": [], "frames": [], "threads": {}, "forward_threads": {}},
        notes=timeline.notes,
    )  # fmt: skip


def kinds_for(analysis: str) -> Sequence[Kind] | None:
    """The rows an analysis looks at; None for all."""
    return ON_DEVICE if analysis in ON_DEVICE_ONLY else None
