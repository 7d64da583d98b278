"""Files of several ranks as one timeline on one clock: each row says its rank, each collective who was late."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ArgumentError, RecordingError
from ...timeline import kineto, stream_names
from ...timeline.columns import FLOATS, INTEGERS, NONE, Ints, Launch, Timeline
from ...units import format_duration
from ..runfile import RunFile, RunWriter
from .clocks import Offset
from .match import align
from .meet import Meeting, meetings, overlap_pct, summary

TRACES = (".json", ".json.gz", ".json.gzip")
RUNS = (".tessera",)
# Numbers that tie rows together count from 0 on every rank: each rank gets a range of its own.
STRIDE = 1 << 48
_NUMBERS = ("thread", "correlation", "external", "sequence")
_RANK = re.compile(r"rank[-_. ]?(\d+)", re.IGNORECASE)
# Ping-pong and collectives that differ by more than this many times what both allow: one of them is wrong.
DISAGREE = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file that was merged."""

    path: Path
    rank: int
    host: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Several ranks as one: the timeline (column "rank"), what was done to the clocks, and the collectives."""

    timeline: Timeline
    offsets: Sequence[Offset]
    meetings: Sequence[Meeting]
    sources: Sequence[Source]
    collectives: dict[str, Any]

    @property
    def notes(self) -> list[str]:
        """What a reader should know."""
        return self.timeline.notes

    def rank(self, rank: int) -> Timeline:
        """The rows of one rank, on the common clock."""
        return only(self.timeline, rank)

    def to_json(self) -> dict[str, Any]:
        """Plain data without the rows."""
        ranks = [
            {**offset.to_json(), "path": str(s.path), "host": s.host, "rows": s.rows}
            for s, offset in zip(self.sources, self.offsets, strict=True)
        ]
        return {"ranks": ranks, "collectives": self.collectives, "notes": self.notes}

    def write(self, path: str | Path, *, replace: bool = False) -> RunFile:
        """A run file with all of it; power and telemetry of the ranks' run files too, on the common clock."""
        target = Path(path)
        if any(target.exists() and target.samefile(s.path) for s in self.sources):
            raise ArgumentError(f"{target} is one of the files to merge", fix="give another name for the merged one")
        with RunWriter(
            target, meta={"ranks": self.timeline.meta["ranks"]}, mode="replace" if replace else "new"
        ) as out:
            out.add_timeline(self.timeline)
            out.set("collectives", self.collectives)
            _write_power(out, self.sources, self.offsets)
        return RunFile(target)


def merge(paths: Iterable[str | Path] | str | Path) -> Merged:
    """Merge run files (.tessera) and Kineto traces (.json, .json.gz), one for each rank, or folders of them."""
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    files = [f for p in given for f in _files(Path(p))]
    if len(files) < 2:
        raise ArgumentError(
            f"{len(files)} file{'s' if len(files) != 1 else ''} to merge",
            why="merging takes the files of two or more ranks",
            fix="tessera merge rank0.tessera rank1.tessera -o merged.tessera",
        )
    loaded = sorted((_load(f, i) for i, f in enumerate(files)), key=lambda x: x[0].rank)
    for (a, *_), (b, *_) in itertools.pairwise(loaded):
        if a.rank == b.rank:
            raise ArgumentError(
                f"{a.path} and {b.path} are both of rank {a.rank}",
                fix=f"give one file for each rank (rank0, ...); tessera diff {a.path} {b.path} compares two runs",
            )
    sources, timelines, told = zip(*loaded, strict=True)
    _check_together(sources, timelines)
    for source, timeline in zip(sources, timelines, strict=True):
        timeline.rank = source.rank
    offsets = _settled(align(timelines), told)
    return _merged(sources, timelines, offsets)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(f for f in path.iterdir() if f.name.endswith((*RUNS, *TRACES)))
    if not found:
        raise RecordingError(
            f"there is nothing to merge in {path}", why="it has no .tessera, .json or .json.gz file",
            fix="give the folder the ranks wrote to",
        )  # fmt: skip
    return found


def _check_together(sources: Sequence[Source], timelines: Sequence[Timeline]) -> None:
    """Refuse runs that say no rank and have no moment in common: ranks of one job run side by side."""
    spans = [
        (int(t["start_ns"].min()), int(t["end_ns"].max()), s.path)
        for s, t in zip(sources, timelines, strict=True)
        if len(t) and t.rank is None and not _RANK.search(s.path.name)
    ]
    for (_, end_ns, before), (start_ns, _, after) in itertools.pairwise(sorted(spans)):
        if start_ns >= end_ns:
            raise ArgumentError(
                f"{before} and {after} are two runs, one after the other",
                why=f"neither says its rank, and {format_duration((start_ns - end_ns) * 1e-9)} lie between them",
                fix=f"tessera diff {before} {after} compares them; ranks of one job are named rank0, rank1, ...",
            )


def _load(path: Path, place: int) -> tuple[Source, Timeline, Offset | None]:
    """A file's timeline, and what an exchange of clocks said of its rank."""
    host, clock = "", None
    if path.name.endswith(TRACES):
        timeline = kineto.read(path)
        clock = timeline.meta.get("clock")
    else:
        with contextlib.closing(RunFile(path)) as run:
            timeline, host, clock = run.timeline(), run.about.get("host", ""), run.get("clock")
    named = _RANK.search(path.name)
    rank = timeline.rank if timeline.rank is not None else int(named[1]) if named else place
    told = Offset.from_json(clock) if isinstance(clock, dict) and "offset_ns" in clock else None
    return Source(path=path, rank=rank, host=host, rows=len(timeline)), timeline, told


def _settled(matched: Sequence[Offset], told: Sequence[Offset | None]) -> list[Offset]:
    """Of what collectives and exchanges say, the surer one; where they contradict each other, a note."""
    first = told[0]
    out = [matched[0]]
    for by_work, own in zip(matched[1:], told[1:], strict=True):
        if own is None or first is None or own.error_ns is None:
            out.append(by_work)
            continue
        # Exchanges are against rank 0, which may not be among the files.
        grown = (own.at_ns - first.at_ns) * first.drift_ppm * 1e-6
        by_clock = dataclasses.replace(
            own, rank=by_work.rank, offset_ns=own.offset_ns - first.offset_ns - grown,
            drift_ppm=own.drift_ppm - first.drift_ppm, error_ns=own.error_ns + (first.error_ns or 0.0),
        )  # fmt: skip
        out.append(_surer(by_work, by_clock))
    return out


def _surer(by_work: Offset, by_clock: Offset) -> Offset:
    if by_work.error_ns is None or by_clock.error_ns is None:
        return by_clock if by_work.error_ns is None else by_work
    best = min(by_work, by_clock, key=lambda o: o.error_ns or 0.0)
    at = np.array([by_work.at_ns], dtype=np.int64)
    apart = abs(int(by_work.apply(at)[0] - by_clock.apply(at)[0]))
    if apart <= DISAGREE * math.hypot(by_work.error_ns, by_clock.error_ns):
        return best
    note = (
        f"rank {best.rank}: its collectives and the exchange of clocks differ by {apart * 1e-3:.0f} us, more than both"
        f" allow; the {best.source} was taken"
    )
    return dataclasses.replace(best, notes=(*best.notes, note))


def _merged(sources: Sequence[Source], timelines: Sequence[Timeline], offsets: Sequence[Offset]) -> Merged:
    counts = [len(t) for t in timelines]
    first_rows = [sum(counts[:i]) for i in range(len(counts))]
    timeline = _concatenated(timelines, offsets, first_rows)
    met = meetings(timelines, offsets, first_rows)
    overlap = overlap_pct(timeline, met)
    extra = {row: dict(fields) for row, fields in timeline.extra.items()}
    for row, share in overlap.items():
        extra.setdefault(row, {})["collective_overlap_pct"] = share
    timeline.extra = extra
    timeline.notes += [f"rank {s.rank}: {n}" for s, t in zip(sources, timelines, strict=True) for n in t.notes]
    timeline.notes += [n for o in offsets for n in o.notes]
    timeline.meta["ranks"] = [
        {**o.to_json(), "path": str(s.path), "host": s.host} for s, o in zip(sources, offsets, strict=True)
    ]
    return Merged(
        timeline=timeline, offsets=tuple(offsets), meetings=tuple(met), sources=tuple(sources),
        collectives=summary(met, overlap),
    )  # fmt: skip


def _concatenated(timelines: Sequence[Timeline], offsets: Sequence[Offset], first_rows: Sequence[int]) -> Timeline:
    """All rows, rank after rank, with names, launches and numbers that mean the same everywhere."""
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
        # One cell more at the end: NONE stays NONE.
        text = np.array([*(names.setdefault(n, len(names)) for n in t.names), NONE], dtype=np.int64)
        launch = np.array([*(launches.setdefault(x, len(launches)) for x in t.launches), NONE], dtype=np.int64)
        columns = {c: t.columns.get(c, np.full(len(t), NONE, np.int64)) for c in INTEGERS}
        columns |= {c: t.columns.get(c, np.full(len(t), np.nan)) for c in FLOATS}
        columns |= {c: text[columns[c]] for c in ("name", "shapes", "unit")}
        columns |= {c: offset.apply(columns[c]) for c in ("start_ns", "end_ns")}
        columns |= {c: np.where(columns[c] < 0, columns[c], columns[c] + place * STRIDE) for c in _NUMBERS}
        made_on = columns["forward_thread"]  # 0 says "a forward operator", on every rank
        columns["forward_thread"] = np.where(made_on <= 0, made_on, made_on + place * STRIDE)
        columns["launch"] = launch[columns["launch"]]
        columns["parent"] = np.where(columns["parent"] == NONE, NONE, columns["parent"] + first)
        columns["rank"] = np.full(len(t), offset.rank, dtype=np.int64)
        parts.append(columns)
        _merge_meta(meta, t.meta, text, place)
        meta[stream_names.KEY] |= stream_names.of_rank(t.meta.get(stream_names.KEY), offset.rank)
    meta |= {key: sorted(meta[key]) for key in ("modules", "frames")}
    energies = [_joined([getattr(t, which) for t in timelines], timelines) for which in ("energy_j", "energy_error_j")]
    return Timeline(
        columns={c: np.concatenate([p[c] for p in parts]) for c in (*INTEGERS, *FLOATS)},
        names=list(names), launches=list(launches), meta=meta, energy_j=energies[0], energy_error_j=energies[1],
        extra={row + first: fields for t, first in zip(timelines, first_rows, strict=True)
               for row, fields in t.extra.items()},
    )  # fmt: skip


def _merge_meta(meta: dict[str, Any], own: dict[str, Any], text: Ints, place: int) -> None:
    for key in ("modules", "frames"):
        meta[key] |= {int(text[int(n)]) for n in own.get(key, ())}
    for key in ("threads", "forward_threads"):
        for number, value in (own.get(key) or {}).items():
            moved = value + place * STRIDE if key == "forward_threads" and isinstance(value, int) else value
            meta[key][int(number) + place * STRIDE] = moved


def _joined(parts: Sequence[NDArray[np.float64] | None], timelines: Sequence[Timeline]) -> NDArray[np.float64] | None:
    if all(p is None for p in parts):
        return None
    return np.concatenate([np.full(len(t), np.nan) if p is None else p for p, t in zip(parts, timelines, strict=True)])


def only(timeline: Timeline, rank: int) -> Timeline:
    """The rows of one rank of a merged timeline, as a timeline of its own: what most analyses want."""
    keep = timeline["rank"] == rank
    if not np.any(keep):
        have = ", ".join(map(str, np.unique(timeline["rank"])))
        raise ArgumentError(f"the timeline has no rank {rank}", fix=f"it has: {have}")
    number = np.append(np.where(keep, np.cumsum(keep) - 1, NONE), NONE)
    columns = {c: v[keep] for c, v in timeline.columns.items()}
    columns["parent"] = number[columns["parent"]]
    joules = [None if e is None else e[keep] for e in (timeline.energy_j, timeline.energy_error_j)]
    return Timeline(
        columns=columns, names=timeline.names, launches=timeline.launches, rank=rank, meta=timeline.meta,
        notes=timeline.notes, energy_j=joules[0], energy_error_j=joules[1],
        extra={int(number[row]): fields for row, fields in timeline.extra.items() if keep[row]},
    )  # fmt: skip


def _write_power(out: RunWriter, sources: Sequence[Source], offsets: Sequence[Offset]) -> None:
    """Power, telemetry and stacks. Ranks of one host see the same boards: each is kept once, the longest recording."""
    hosts = {s.host for s in sources}
    kept: dict[tuple[str, str], tuple[int, Source, Offset]] = {}
    spans = []
    for place, (source, offset) in enumerate(zip(sources, offsets, strict=True)):
        if not source.path.name.endswith(RUNS):
            continue
        with contextlib.closing(RunFile(source.path)) as run:
            spans.append(offset.apply(np.array(run.span_ns, dtype=np.int64)))
            told = Counter(r.domain for r in run.telemetry())
            for name in dict.fromkeys((*run.domains, *told)):
                count, key = len(run.samples(name)[0]) + told[name], (source.host, name)
                if key not in kept or count > kept[key][0]:
                    kept[key] = (count, source, offset)
            shift, threads = round(offset.offset_ns), place * STRIDE
            out.add_stacks(
                (t + shift, thread + threads if isinstance(thread, int) else thread, stack, samples)
                for t, thread, stack, samples in run.stacks()
            )
    for (host, name), (_, source, offset) in kept.items():
        with contextlib.closing(RunFile(source.path)) as run:
            _write_domain(out, run, name, name if len(hosts) == 1 else f"{host}.{name}", offset)
    if spans:
        out.set("start_ns", int(min(s[0] for s in spans)))
        out.set("end_ns", int(max(s[1] for s in spans)))


def _write_domain(out: RunWriter, run: RunFile, name: str, full: str, offset: Offset) -> None:
    if name in run.domains:
        times, watts = run.samples(name)
        out.add_samples(dataclasses.replace(run.domains[name], name=full), offset.apply(times), watts)
        ticks, joules = run.anchors(name)
        out.add_anchors(full, offset.apply(ticks), joules)
    shift = round(offset.offset_ns)
    out.add_telemetry([dataclasses.replace(r, domain=full) for r in run.telemetry(name)], shift)
    gaps = [g for g in run.power().gaps if g.domain == name]
    out.add_gaps([dataclasses.replace(g, domain=full) for g in gaps], shift)
