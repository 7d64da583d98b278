"""Reads the files of several ranks, each in its own process if that is faster.

64 ranks of 40 MB each make 0.8 GB of columns with all operators, and a tenth of that with device rows only. So rows
that an analysis does not need are dropped as soon as they are read.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ArgumentError, RecordingError
from ...record import CODE, Kind
from ...recording import Facts
from ...timeline import Timeline
from ...timeline.columns import NONE, TEXTS
from ...timeline.open_trace import PERFETTO, XPLANE, is_trace, read_trace
from ...timeline.rocprof import KERNELS
from ...timeline.source import read_start
from ...timeline.transfers import ON_HOST
from ...units import format_duration
from ..runfile import RunFile
from .clocks import Offset
from .facts import describe_rank

TRACES = (".json", ".json.gz", ".json.gzip", *XPLANE, *PERFETTO, KERNELS)
RUNS = (".tessera",)
MOST_FOLDERS = 4096
"""Most subfolders to look into; there may be one for each rank."""
MOST_LEVELS = 3
VIEWED = ".trace.json.gz"
"""End of a file that JAX writes for viewers; it has the same content as the .xplane.pb of that name."""
MOST_WORKERS = 8
"""Most processes that read; more would only wait for the disk."""
Progress = Callable[[float], None]
_RANK = re.compile(r"rank[-_. ]?(\d+)", re.IGNORECASE)


@dataclass(slots=True, kw_only=True)
class RankFile:
    """The file of one rank: its rows, its host, and what an exchange of clocks said about it.

    `clock_id` is the same for ranks that read one clock; "" if unknown. `run_id` is the same in copies of one run file;
    "" for a trace. Only a run file has `facts` and `own` (`describe_rank`).
    """

    path: Path
    rank: int
    host: str
    clock_id: str
    timeline: Timeline
    exchanged: Offset | None
    run_id: str = ""
    facts: Facts | None = None
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def is_run(self) -> bool:
        """Whether it is a run file, with power and telemetry; otherwise it is a trace."""
        return self.path.name.endswith(RUNS)


def read_ranks(
    paths: Sequence[Path],
    *,
    kinds: Sequence[Kind] | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
) -> tuple[list[RankFile], list[Path]]:
    """Return the files of the ranks, sorted by rank, and the files that were skipped. `kinds`: rows to keep."""
    files, others = find_files(paths)
    if len(files) < 2:
        where = f" in {paths[0].resolve()}" if len(paths) == 1 and paths[0].is_dir() else ""
        raise ArgumentError(
            f"{len(files) or 'no'} recording of a rank was found{where}",
            why=f"these are not traces: {list_names(others)}" if others else "a merge takes two ranks or more",
            fix=f"give the file itself: {files[0]}"
            if files and where
            else "tessera merge rank0.tessera rank1.tessera -o merged.tessera",
        )
    _refuse_repeats([(f, str(f.resolve())) for f in files])
    ranks = sorted(_read_files(files, kinds, progress, workers), key=lambda one: one.rank)
    _refuse_repeats([(r.path, r.run_id) for r in ranks if r.run_id])
    for a, b in itertools.pairwise(ranks):
        if a.rank == b.rank:
            raise ArgumentError(
                f"{a.path} and {b.path} are both of rank {a.rank}",
                fix=f"give one file for each rank (rank0, ...); tessera diff {a.path} {b.path} compares two runs",
            )
    _check_same_time(ranks)
    for one in ranks:
        one.timeline.rank = one.rank
    return ranks, others


def _refuse_repeats(files: Sequence[tuple[Path, str]]) -> None:
    """Raise ArgumentError if two files are the same recording: its joules would count twice."""
    first: dict[str, Path] = {}
    for path, identity in files:
        if identity in first:
            raise ArgumentError(
                f"{first[identity]} and {path} are the same recording",
                why="its joules would count twice",
                fix="give the file of each rank once",
            )
        first[identity] = path


def list_names(files: Sequence[Path]) -> str:
    """Return the names of the first four files, and how many more there are."""
    names = [f.name for f in files[:4]]
    return ", ".join(names) + (f" and {len(files) - 4} more" if len(files) > 4 else "")


def _list_folder(path: Path) -> list[Path]:
    """List the runs and traces in a folder; if it has none, those in its subfolders, which may be one for each rank.

    JAX writes them three levels down (plugins/profile/DATE), and each again in a form for viewers, which is left out.
    """
    level = [path]
    for _ in range(1 + MOST_LEVELS):
        inside = sorted(f for folder in level for f in folder.iterdir())
        found = [f for f in inside if f.name.endswith((*RUNS, *TRACES))]
        if found:
            names = {str(f) for f in found}
            return [f for f in found if str(f).removesuffix(VIEWED) + XPLANE[0] not in names]
        level = [folder for folder in inside if folder.is_dir()][:MOST_FOLDERS]
    return []


def find_files(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return the recordings among `paths` and in its folders, and the other JSON files in those folders."""
    files: list[Path] = []
    others: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        inside = _list_folder(path)
        if not inside:
            raise RecordingError(
                f"there is no recording in the folder {path.resolve()}",
                why="it has no .tessera, .json or .json.gz file",
                fix="give the folder that the ranks wrote to",
            )
        # A file that is too damaged to tell counts as a recording: reading it then says what is wrong.
        recordings = [f for f in inside if f.suffix == ".tessera" or not read_start(f, 1) or is_trace(f)]
        files += recordings
        others += [f for f in inside if f not in recordings]
    return files, others


def _read_files(
    files: Sequence[Path], kinds: Sequence[Kind] | None, progress: Progress | None, workers: int | None
) -> list[RankFile]:
    count = min(len(files), MOST_WORKERS, workers or len(os.sched_getaffinity(0)))
    ranks: list[RankFile] = []
    if count < 2 or sum(f.stat().st_size for f in files if f.exists()) < 4 << 20:  # starting a process takes longer
        for place, file in enumerate(files):
            ranks.append(read_rank(file, place, kinds))
            if progress:
                progress(len(ranks) / len(files))
        return ranks
    # Spawn, not fork: a fork would inherit locks of threads that run here (samplers, exporters).
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        for one in pool.map(read_rank, files, range(len(files)), [kinds] * len(files)):
            ranks.append(one)
            if progress:
                progress(len(ranks) / len(files))
    return ranks


def read_rank(path: Path, place: int, kinds: Sequence[Kind] | None) -> RankFile:
    """Read one rank with its number and host; may run in its own process. `place` is the rank if nothing tells it."""
    run_id, facts, own = "", None, {}
    if path.name.endswith(TRACES):
        timeline = read_trace(path)
        clock, named_host = timeline.meta.get("clock"), timeline.meta.get("host_name")
        host = clock_id = named_host if isinstance(named_host, str) else ""
    else:
        with RunFile(path) as run:
            timeline, host, clock = run.timeline(), run.about.get("host", ""), run.get("clock")
            clock_id, facts, own = run.about.get("boot") or host, run.recording().facts, describe_rank(run, timeline)
            if opened := run.about.get("opened_epoch_ns"):
                run_id = " ".join((clock_id, run.about.get("pid", ""), opened))
    named = _RANK.search(path.name)
    return RankFile(
        path=path,
        rank=timeline.rank if timeline.rank is not None else int(named[1]) if named else place,
        host=host,
        clock_id=clock_id,
        timeline=timeline if kinds is None else _keep_kinds(timeline, kinds),
        exchanged=Offset.from_dict(clock) if isinstance(clock, dict) and "offset_ns" in clock else None,
        run_id=run_id,
        facts=facts,
        own=own,
    )


def _keep_kinds(timeline: Timeline, kinds: Sequence[Kind]) -> Timeline:
    """Keep some kinds of rows, and collectives on the host; drop names that no row uses any more."""
    host = np.array([n.startswith(ON_HOST) for n in timeline.names] or [False])
    keep = np.flatnonzero(np.isin(timeline["kind"], [CODE[k] for k in kinds]) | host[timeline["name"]])
    columns: dict[str, Any] = {c: v[keep] for c, v in timeline.columns.items()}
    columns["parent"] = np.full(len(keep), NONE, np.int64)
    names = timeline.names
    used = np.unique(np.concatenate([columns[c] for c in TEXTS]))
    used = used[used != NONE]
    number = np.full(len(names) + 1, NONE, np.int64)
    number[used] = np.arange(len(used))
    columns |= {c: number[columns[c]] for c in TEXTS}
    return Timeline(
        columns=columns,
        names=[names[i] for i in used.tolist()],
        launches=timeline.launches,
        rank=timeline.rank,
        meta={**timeline.meta, "modules": [], "frames": [], "threads": {}, "forward_threads": {}},
        notes=timeline.notes,
    )


def _check_same_time(ranks: Sequence[RankFile]) -> None:
    """Raise ArgumentError for runs without a rank that do not overlap in time: ranks of one job run side by side."""
    spans = [
        (int(r.timeline["start_ns"].min()), int(r.timeline["end_ns"].max()), r.path)
        for r in ranks
        if len(r.timeline) and r.timeline.rank is None and not _RANK.search(r.path.name)
    ]
    for (_, end_ns, before), (start_ns, _, after) in itertools.pairwise(sorted(spans)):
        if start_ns >= end_ns:
            raise ArgumentError(
                f"{before} and {after} are two runs, one after the other",
                why=f"neither states its rank, and {format_duration((start_ns - end_ns) * 1e-9)} lie between them",
                fix=f"tessera diff {before} {after} compares them; ranks of one job are named rank0, rank1, ...",
            )
