"""`merge`: combines the recordings of several ranks into one `Recording`, on one clock."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...clock import EpochNs
from ...errors import ArgumentError, RecordingError
from ...notes import Note, kind_of
from ...record import Kind
from ...recording import Facts, Recording
from ...timeline import stream_names
from ...timeline.columns import FLOATS, INTEGERS, NONE, TEXTS, Ints, Launch, Timeline, keep_rows
from ..runfile import RunFile, RunWriter
from ..runfile_store import remove_run
from .align import align
from .clocks import Offset
from .collectives import Meeting, measure_overlap, meetings, summarize
from .power import PowerParts, read_power
from .read import Progress, RankFile, list_names, read_ranks
from .sequences import STRIDE

_NUMBERS = ("thread", "correlation", "external", "sequence")
# If ping-pong and collectives differ by more than this many times their combined error, one of them is wrong.
DISAGREE = 3.0
EXIT_SIGNAL = 128
"""An exit code above this means that a signal ended the process."""


class MergedRecording(Recording):
    """Several ranks as one recording, with the corrections of their clocks and their matched collectives."""

    def __init__(
        self,
        files: Sequence[RankFile],
        offsets: Sequence[Offset],
        timeline: Timeline,
        name: str,
        path: Path | None,
    ) -> None:
        self.files, self.offsets = files, offsets
        self._power_parts: PowerParts | None = None
        self.meetings: Sequence[Meeting] = ()
        self.collectives: dict[str, Any] = {}
        moved = [_move(f.timeline, o) for f, o in zip(files, offsets, strict=True)]
        super().__init__(
            timeline,
            lambda: self._parts().power,
            lambda: self._parts().telemetry,
            self._facts(timeline, name, path),
            stacks=lambda: self._parts().stacks,
            events=lambda: self._parts().events,
            ranks=[Recording(t, facts=Facts(name=f"rank {t.rank}")) for t in moved],
        )

    def _parts(self) -> PowerParts:
        if self._power_parts is None:
            self._power_parts = read_power(self.files, self.offsets, self.span_ns)
        return self._power_parts

    def _facts(self, timeline: Timeline, name: str, path: Path | None) -> Facts:
        """Return the facts of the merged run, from the first start of a rank to the last end.

        Its windows are the times in which any rank was traced, until the first rank reached its time limit: later steps
        would have the joules and calls of some ranks only. The span is that of the run files; rows count only for
        ranks without a run file, since a tracer writes rows after the end of a run ("Record Window End").
        """
        windows: list[tuple[int, int]] = []
        recorded = [(f.facts, o) for f, o in zip(self.files, self.offsets, strict=True) if f.facts is not None]
        spans = [_move_span(facts.span_ns, offset) for facts, offset in recorded if facts.span_ns is not None]
        if len(timeline) and len(spans) < len(self.files):
            spans.append((timeline.start_ns, timeline.end_ns))
        for facts, offset in recorded:
            windows += [_move_span(window, offset) for window in facts.accounted_windows if facts.windows]
        limits_ns = [_move_span(f.windows[-1], o)[1] for f, o in recorded if f.time_limit_reached and f.windows]
        start_ns, end_ns = min((s[0] for s in spans), default=0), max((s[1] for s in spans), default=0)
        first = recorded[0][0] if recorded else Facts()
        return Facts(
            name=name,
            path=path,
            kind="run" if len(recorded) == len(self.files) else "trace",
            span_ns=(EpochNs(start_ns), EpochNs(end_ns)),
            windows=_cut_windows(_join_windows(windows), min(limits_ns, default=None)),
            scheduled=True,
            mode=first.mode,
            command=first.command,
            time_limit_reached=any(facts.time_limit_reached for facts, _ in recorded),
            returncode=_find_job_code(self.files, self.offsets),
            meta={"command": first.meta["command"]} if "command" in first.meta else {},
        )

    def match_collectives(self, first_rows: Sequence[int]) -> None:
        """Match the collectives that ranks have in common, and find how much of each overlapped with compute."""
        self.meetings = meetings([f.timeline for f in self.files], self.offsets, first_rows)
        overlap = measure_overlap(self.timeline, self.meetings)
        extra = {row: dict(fields) for row, fields in self.timeline.extra.items()}
        for row, share in overlap.items():
            extra.setdefault(row, {})["collective_overlap_pct"] = share
        self.timeline.extra = extra
        self.collectives = summarize(self.meetings, overlap)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data without the rows."""
        ranks = [
            {**o.to_dict(), "path": str(f.path), "host": f.host, "rows": len(f.timeline)}
            for f, o in zip(self.files, self.offsets, strict=True)
        ]
        return {"ranks": ranks, "collectives": self.collectives, "notes": [str(n) for n in self.notes]}

    def write(self, path: str | Path, *, replace: bool = False) -> RunFile:
        """Write a run file with everything, on the common clock; with power and telemetry of the ranks' run files."""
        target = Path(path)
        if any(target.exists() and target.samefile(f.path) for f in self.files):
            raise ArgumentError(f"{target} is one of the files to merge", fix="give another name for the merged one")
        meta = {"ranks": self.timeline.meta["ranks"], "command": self.facts.command, "mode": self.facts.mode}
        meta = {key: value for key, value in meta.items() if value is not None}
        out = RunWriter(target, meta=meta, mode="replace" if replace else "new")
        try:
            with out:
                self._write_to(out)
        except RecordingError as exc:
            if out.error is None:
                raise
            remove_run(target)  # half of a merged run is of no use: the ranks' files are still there
            raise RecordingError(
                f"cannot write {target}", why=str(out.error), fix="free space on the disk, or write elsewhere"
            ) from exc
        return RunFile(target)

    def _write_to(self, out: RunWriter) -> None:
        out.add_timeline(self.timeline)
        out.set("collectives", self.collectives)
        for column in self.power.columns.values() if self.power is not None else ():
            out.add_samples(column.domain, column.times_ns, column.watts)
            out.add_anchors(column.domain.name, column.ticks_ns, column.ticks_j)
        out.add_gaps(self.power.gaps if self.power is not None else (), 0)
        out.add_telemetry(self.telemetry, 0)
        out.add_stacks(self.stacks)
        out.set("events", list(self.events))
        if any(f.is_run for f in self.files):
            start_ns, end_ns = self.span_ns
            out.set("start_ns", start_ns)
            out.set("end_ns", end_ns)
            out.set("windows", self.facts.windows)
            out.set("scheduled", self.facts.scheduled)
            out.set("returncode", self.facts.returncode)


def merge(
    paths: Iterable[str | Path] | str | Path,
    *,
    kinds: Sequence[Kind] | None = None,
    progress: Progress | None = None,
    workers: int | None = 1,
    collectives: bool = True,
) -> MergedRecording:
    """Merge run files (.tessera) and Kineto traces (.json, .json.gz), one for each rank, or folders of them.

    `kinds` are the kinds of rows to keep (all by default). `workers` is the number of processes that read.
    `collectives=False` does not match the collectives that ranks have in common.
    """
    listed = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(p) for p in paths]
    files, others = read_ranks(listed, kinds=kinds, progress=progress, workers=workers)
    _name_hosts(files)
    timelines = [f.timeline for f in files]
    offsets = settle_offsets(files, align(timelines))
    counts = [len(t) for t in timelines]
    first_rows = [sum(counts[:i]) for i in range(len(counts))]
    timeline = _concatenate(timelines, offsets, first_rows)
    timeline.notes += _join_notes(files)
    timeline.notes += [n for o in offsets for n in o.notes]
    if others:
        timeline.notes.append(f"not traces, and skipped: {list_names(others)}")
    first = None if any(f.own.get("crashed") for f in files) else _find_first_failure(files, offsets)
    timeline.meta["ranks"] = [
        {
            **o.to_dict(),
            "path": str(f.path),
            "host": f.host,
            **f.own,
            "limited": f.facts is not None and f.facts.time_limit_reached,
            "failed_first": f is first and 0 < f.own["returncode"] <= EXIT_SIGNAL,
        }
        for f, o in zip(files, offsets, strict=True)
    ]
    name = listed[0].resolve().name if len(listed) == 1 else f"{len(files)} ranks"
    merged = MergedRecording(files, offsets, timeline, name, listed[0] if listed[0].is_dir() else None)
    if collectives:
        merged.match_collectives(first_rows)
    return merged


def _find_job_code(files: Sequence[RankFile], offsets: Sequence[Offset]) -> int | None:
    """Return the exit code of a job: that of the rank that failed first."""
    first = _find_first_failure(files, offsets)
    if first is not None:
        return first.facts.returncode if first.facts is not None else None
    return 0 if any(f.facts is not None and f.facts.returncode is not None for f in files) else None


def _find_first_failure(files: Sequence[RankFile], offsets: Sequence[Offset]) -> RankFile | None:
    """Return the rank that failed first with an exit code of its own; else the first that a signal ended."""
    failed = []
    for at, (file, offset) in enumerate(zip(files, offsets, strict=True)):
        if file.facts is not None and file.facts.returncode:
            _, end_ns = _move_span(file.facts.span_ns, offset) if file.facts.span_ns is not None else (0, 0)
            failed.append((file.facts.returncode > EXIT_SIGNAL, end_ns, at))
    return files[min(failed)[2]] if failed else None


def _join_notes(files: Sequence[RankFile]) -> list[str]:
    """Return notes that all ranks have, once; then notes of single ranks, with the rank."""
    by_rank = [f.timeline.notes for f in files]
    common = [n for n in by_rank[0] if all(n in notes for notes in by_rank[1:])]
    return common + [
        Note(f"rank {f.rank}: {n}", kind_of(n))
        for f, notes in zip(files, by_rank, strict=True)
        for n in notes
        if n not in common
    ]


def _join_windows(windows: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort windows and join those that overlap."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(windows):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def _cut_windows(windows: Sequence[tuple[int, int]], stop_ns: int | None) -> list[tuple[int, int]]:
    """Cut windows off at a time."""
    if stop_ns is None:
        return list(windows)
    return [(begin, min(end, stop_ns)) for begin, end in windows if begin < stop_ns]


def _name_hosts(files: Sequence[RankFile]) -> None:
    """Give hosts that differ different names: two machines may both be called "localhost"."""
    clocks: dict[str, list[str]] = {}
    for file in files:
        known = clocks.setdefault(file.host, [])
        if file.clock_id not in known:
            known.append(file.clock_id)
    for file in files:
        number = clocks[file.host].index(file.clock_id)
        file.host = file.host if number == 0 or not file.host else f"{file.host}-{number + 1}"


# -- Clocks -----------------------------------------------------------------------------------------------------------


def settle_offsets(files: Sequence[RankFile], matched: Sequence[Offset]) -> list[Offset]:
    """Return one offset for each host: ranks that read one clock are never moved against each other.

    A host takes the most certain offset of any of its ranks, from collectives or from the exchange of clocks.
    """
    offsets = _take_surest(matched, [f.exchanged for f in files])
    by_clock: dict[str, Offset] = {files[0].clock_id: offsets[0]} if files[0].clock_id else {}
    for file, offset in zip(files, offsets, strict=True):
        best = by_clock.get(file.clock_id)
        if file.clock_id and file.clock_id != files[0].clock_id and (best is None or _error(offset) < _error(best)):
            by_clock[file.clock_id] = offset
    settled = []
    for file, offset in zip(files, offsets, strict=True):
        shared = by_clock.get(file.clock_id)
        if shared is None or shared is offset:
            settled.append(offset)
        else:
            source = "same host"
            settled.append(dataclasses.replace(shared, rank=offset.rank, source=source, matched=0, notes=()))
    return settled


def _error(offset: Offset) -> float:
    return math.inf if offset.error_ns is None else offset.error_ns


def _take_surest(matched: Sequence[Offset], exchanged: Sequence[Offset | None]) -> list[Offset]:
    """Return the offset that is known better, from collectives or exchanges; add a note where they contradict."""
    first = exchanged[0]
    out = [matched[0]]
    for by_work, own in zip(matched[1:], exchanged[1:], strict=True):
        if own is None or first is None or own.error_ns is None:
            out.append(by_work)
            continue
        # Exchanges are with rank 0, which may not be among the files: take differences to the first file.
        grown = (own.at_ns - first.at_ns) * first.drift_ppm * 1e-6
        by_clock = dataclasses.replace(
            own,
            rank=by_work.rank,
            offset_ns=own.offset_ns - first.offset_ns - grown,
            drift_ppm=own.drift_ppm - first.drift_ppm,
            error_ns=own.error_ns + (first.error_ns or 0.0),
        )
        out.append(_surer_of(by_work, by_clock))
    return out


def _surer_of(by_work: Offset, by_clock: Offset) -> Offset:
    if by_work.error_ns is None or by_clock.error_ns is None:
        return by_clock if by_work.error_ns is None else by_work
    best = min(by_work, by_clock, key=_error)
    at = np.array([by_work.at_ns], dtype=np.int64)
    apart = abs(int(by_work.apply(at)[0] - by_clock.apply(at)[0]))
    if apart <= DISAGREE * math.hypot(by_work.error_ns, by_clock.error_ns):
        return best
    note = (
        f"rank {best.rank}: its collectives and the exchange of clocks differ by {apart * 1e-3:.0f} us, more than both"
        f" allow; the {best.source} was used"
    )
    return dataclasses.replace(best, notes=(*best.notes, note))


# -- Rows -------------------------------------------------------------------------------------------------------------


def _move_span(span_ns: tuple[int, int], offset: Offset) -> tuple[int, int]:
    start_ns, end_ns = offset.apply(np.array(span_ns, dtype=np.int64)).tolist()
    return start_ns, end_ns


def _move(timeline: Timeline, offset: Offset) -> Timeline:
    """Return a rank's timeline on the common clock."""
    moved = {c: offset.apply(timeline.columns[c]) for c in ("start_ns", "end_ns")}
    return dataclasses.replace(timeline, columns={**timeline.columns, **moved}, links=None)


def _concatenate(timelines: Sequence[Timeline], offsets: Sequence[Offset], first_rows: Sequence[int]) -> Timeline:
    """Join all rows, rank after rank; renumber names, launches and identifiers so that they agree."""
    names: dict[str, int] = {}
    launches: dict[Launch, int] = {}
    parts: list[dict[str, NDArray[Any]]] = []
    meta: dict[str, Any] = {
        **timelines[0].meta,
        "modules": set(),
        "frames": set(),
        "threads": {},
        "forward_threads": {},
        stream_names.KEY: {},
    }
    for place, (t, offset, first) in enumerate(zip(timelines, offsets, first_rows, strict=True)):
        # One extra cell at the end maps NONE (-1) to NONE.
        text = np.array([*(names.setdefault(n, len(names)) for n in t.names), NONE], dtype=np.int64)
        launch = np.array([*(launches.setdefault(x, len(launches)) for x in t.launches), NONE], dtype=np.int64)
        columns = {c: t.columns.get(c, np.full(len(t), NONE, np.int64)) for c in INTEGERS}
        columns |= {c: t.columns.get(c, np.full(len(t), np.nan)) for c in FLOATS}
        columns |= {c: text[columns[c]] for c in TEXTS}
        columns |= {c: offset.apply(columns[c]) for c in ("start_ns", "end_ns")}
        columns |= {c: np.where(columns[c] < 0, columns[c], columns[c] + place * STRIDE) for c in _NUMBERS}
        made_on = columns["forward_thread"]  # 0 means "a forward operator", on every rank
        columns["forward_thread"] = np.where(made_on <= 0, made_on, made_on + place * STRIDE)
        columns["launch"] = launch[columns["launch"]]
        columns["parent"] = np.where(columns["parent"] == NONE, NONE, columns["parent"] + first)
        columns["rank"] = np.full(len(t), offset.rank, dtype=np.int64)
        parts.append(columns)
        _merge_meta(meta, t.meta, text, place)
        meta[stream_names.KEY] |= stream_names.of_rank(t.meta.get(stream_names.KEY), offset.rank)
    meta |= {key: sorted(meta[key]) for key in ("modules", "frames")}
    energy_j = _join_energy([t.energy_j for t in timelines], timelines)
    energy_error_j = _join_energy([t.error_j for t in timelines], timelines)
    return Timeline(
        columns={c: np.concatenate([p[c] for p in parts]) for c in (*INTEGERS, *FLOATS)},
        names=list(names),
        launches=list(launches),
        meta=meta,
        energy_j=energy_j,
        error_j=energy_error_j,
        extra={
            row + first: fields
            for t, first in zip(timelines, first_rows, strict=True)
            for row, fields in t.extra.items()
        },
    )


def _merge_meta(meta: dict[str, Any], own: dict[str, Any], text: Ints, place: int) -> None:
    for key in ("modules", "frames"):
        meta[key] |= {int(text[int(n)]) for n in own.get(key, ())}
    for key in ("threads", "forward_threads"):
        for number, value in (own.get(key) or {}).items():
            moved = value + place * STRIDE if key == "forward_threads" and isinstance(value, int) else value
            meta[key][int(number) + place * STRIDE] = moved


def _join_energy(
    parts: Sequence[NDArray[np.float64] | None], timelines: Sequence[Timeline]
) -> NDArray[np.float64] | None:
    if all(p is None for p in parts):
        return None
    return np.concatenate([np.full(len(t), np.nan) if p is None else p for p, t in zip(parts, timelines, strict=True)])


def select_rank(timeline: Timeline, rank: int) -> Timeline:
    """Return the rows of one rank of a merged timeline as a timeline of its own, which most analyses need."""
    keep = timeline["rank"] == rank
    if not np.any(keep):
        have = ", ".join(map(str, np.unique(timeline["rank"])))
        raise ArgumentError(f"the timeline has no rank {rank}", fix=f"it has: {have}")
    return dataclasses.replace(keep_rows(timeline, keep), rank=rank)
