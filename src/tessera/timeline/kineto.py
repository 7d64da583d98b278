"""Reads traces of Kineto and of Chrome as a `Timeline`.

::

    file ─► stream (typed events) ─► RowReader (columns) ─► Timeline
                                         └───► side (counters, marks, names of threads)

Times are exact: Kineto writes microseconds with three decimals, and they become integer nanoseconds of the wall clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from ..errors import RecordingError
from ..notes import Note
from ..record import CODE, KINDS
from . import stream_names
from .columns import MOST_NUMBER, NONE, UNTRACED, Builder, Ints, Launch, Timeline
from .counter_args import OURS, fractions_to_percent, may_have_counters, read_counters
from .device_rows import name_collectives
from .events import (
    LIMIT_NS,
    NO_WALL_CLOCK,
    WALL_CLOCK_NS,
    Args,
    Batch,
    LateEvent,
    RawArgs,
    TraceEvent,
    fit,
    nanoseconds,
)
from .memory_timeline import is_memory_timeline, read_memory_timeline
from .path_segment import PATH
from .shapes import CAUSAL, compact, is_causal
from .side import NO_TIME, SideEvents
from .source import open_source, read_json, read_pieces, read_start
from .stream import Events
from .transfers import GRAPH_LAUNCH, ON_HOST, collective, copy, is_collective, stated_bytes

MODULE = "nn.Module: "
"""How the Python tracer's names of modules begin."""

_SKIP_QUIETLY = -9
_SKIP, _FRAME, _UNKNOWN, _ARROW, _FLOW, _OLD, _MTIA, _SYNC, _RANGE = -1, -2, -3, -4, -5, -6, -7, -8, -10
_CATEGORIES: dict[str, int] = {
    "kernel": CODE["kernel"], "concurrent_kernel": CODE["kernel"], "collective_comm": CODE["collective"],
    "gpu_memcpy": CODE["memcpy"], "gpu_memset": CODE["memset"], "cpu_op": CODE["op"], "operator": CODE["op"],
    "user_annotation": CODE["region"], "python_function": _FRAME, "Operator": _OLD, "mtia_ccp_events": _MTIA,
    "cuda_sync": _SYNC, "cuda_profiler_range": _RANGE,
    **{kind: CODE[kind] for kind in KINDS if kind not in ("mark", "counter")},  # the names that our exporter writes
}  # fmt: skip
_ARROWS = {"ac2g": _ARROW, "fwdbwd": _FLOW}
_COMMUNICATION = ("nccl:", "gloo:", "mpi:", "ucc:")  # c10d's annotations of its own calls; not regions of the user
# Categories that are left out without a note: the span of the trace, shadows of annotations, Kineto's own cost, and the
# path that our exporter draws above the rows.
_EXPECTED = frozenset({"Trace", "gpu_user_annotation", "overhead", PATH})
# torch before 1.10 uses one category for operators and for its own and its users' annotations.
_OLD_ANNOTATIONS = ("ProfilerStep#", "enumerate(DataLoader)", "Optimizer.", "DistributedDataParallel.")
_MTIA_WAITS = ("event_wait", "event_record")  # events of an MTIA stream in which nothing runs
_MOST_RANGES = 100_000
"""Most rows from CUPTI's range profiler; since it replays every kernel, nobody records many."""
_MOST_NOTES = 20  # notes of one sort


_both = b",".join  # joins two JSON texts, either of which may be missing; three times as fast as a tuple of them


class Known(dict[Any, int]):
    """Maps things to numbers and computes each number once: a look-up costs a tenth of the call."""

    def __init__(self, number: Callable[[Any], int]) -> None:
        super().__init__()
        self._number = number

    def __missing__(self, key: Any) -> int:
        self[key] = number = self._number(key)
        return number


class RowReader:
    """Collects batches of events and makes the timeline."""

    def __init__(self, *, frames: bool) -> None:
        self.seen = 0
        self.ours = False
        self.builder = Builder()
        self._side = SideEvents(self.builder)
        self._frames = frames
        self._codes = dict(_CATEGORIES)
        self._modules: set[int] = set()
        self._frame_names: set[int] = set()
        self._left_out: Counter[str] = Counter()
        self._odd: Counter[str] = Counter()
        self._launches = Known(self._launch)
        self._copies = Known(lambda name: self.builder.intern_launch(copy(name)))
        self._names = Known(self._name)
        self._attention: dict[int, str] = {}
        self._tells_causal = False
        self._syncs: list[tuple[int, int, int, int]] = []
        self._ranges: list[tuple[int, str, dict[str, float]]] = []
        self._communicates = Known(is_collective)
        self._shapes = Known(self._shape)
        self._threads = Known(self._side.thread)
        self._said: dict[int, Args] = {}
        self.extra: dict[int, dict[str, Any]] = {}
        self._collectives: list[tuple[int, str, Args]] = []

    def add(self, events: Batch, text: bytes) -> None:
        """Append the rows of a batch. `text` is its JSON, for the events that need more of it."""
        self.seen += len(events)
        starts, lasting = _times(events)
        codes = self._codes
        kinds = np.array(
            [codes.get(e.cat, _UNKNOWN) if e.ph == "X" else _ARROWS.get(e.cat, _SKIP) for e in events],
            np.int64,
        )
        for i in np.flatnonzero(kinds == _UNKNOWN).tolist():
            kinds[i] = self._category(events[i].cat)
        for code, find_kind in ((_FRAME, self._frame), (_OLD, _old_kind), (_MTIA, _mtia_kind), (_SYNC, self._sync)):
            for i in np.flatnonzero(kinds == code).tolist():
                kinds[i] = find_kind(events[i])
        timed = starts != NO_TIME
        self._read_ranges(events, np.flatnonzero((kinds == _RANGE) & timed), starts, text)
        flows = np.flatnonzero((kinds == _FLOW) & timed)
        self._side.flows([events[i] for i in flows.tolist()], starts[flows].tolist())
        for i in np.flatnonzero((kinds == _SKIP) & timed).tolist():
            self._side.add(events[i], int(starts[i]), i, text)
        for i in np.flatnonzero(~timed).tolist():  # metadata needs no time
            self._side.add(events[i], NO_TIME, i, text)
        keep = np.flatnonzero((kinds >= 0) & timed)
        if keep.size:
            first = len(self.builder)
            self._extend([events[i] for i in keep.tolist()], kinds[keep], starts[keep], lasting[keep])
            self._read_counters(keep, first, text)
        self._side.flush()

    def _category(self, category: str) -> int:
        """Return the kind of a category that is seen for the first time; count categories that we do not read."""
        plain = category.lower()
        if plain.endswith(("_runtime", "_driver")) and not plain.startswith("gpu"):
            code = CODE["runtime"]
        else:
            code = _CATEGORIES.get(plain, _UNKNOWN)
        if code == _UNKNOWN:
            self._left_out[category] += 1
            return _UNKNOWN
        self._codes[category] = code
        return code

    def _name(self, text: str) -> int:
        number = self.builder.intern(text)
        if "attention" in text:
            self._attention[number] = text
        return number

    def _sync(self, event: TraceEvent | LateEvent) -> int:
        """Remember which stream, or which call of the host, waits for which; the critical path needs it."""
        a = event.args
        if a.sync_kind is not None and a.correlation > 0:
            waiting = a.stream if isinstance(a.stream, int) else NONE
            self._syncs.append((waiting, a.correlation, a.waited_stream, a.waited_record))
        return _SKIP_QUIETLY

    def _frame(self, event: TraceEvent | LateEvent) -> int:
        name = event.name
        if name.startswith(MODULE):
            self._modules.add(self.builder.intern(name))
        elif self._frames:
            self._frame_names.add(self.builder.intern(name))
        else:
            self._left_out["python_function"] += 1
            return _UNKNOWN
        return CODE["op"]

    def _extend(self, events: Batch, kinds: Ints, starts: Ints, lasting: Ints) -> None:
        count, first = len(events), len(self.builder)
        self._odd["without a duration, taken as instants"] += int((lasting == NO_TIME).sum())
        backwards = (lasting < 0) & (lasting != NO_TIME)
        self._odd["with a negative duration, taken as instants"] += int(backwards.sum())
        args = [e.args for e in events]
        names = self._names
        columns: dict[str, NDArray[Any]] = {
            "kind": kinds,
            "name": np.array([names[e.name] for e in events], np.int64),
            "start_ns": starts,
            "end_ns": starts + np.maximum(lasting, 0),
            "correlation": _ints([a.correlation for a in args]),
            "external": _ints([a.external if a.external != NONE else a.old_external for a in args]),
            **{c: np.full(count, NONE, np.int64) for c in ("device", "stream", "thread", "bytes", "shapes", "launch")},
            **{c: np.full(count, NONE, np.int64) for c in ("sequence", "forward_thread")},
        }
        for column in ("correlation", "external"):  # 0 means "none" in them; UNTRACED comes from our own exporter
            columns[column][(columns[column] <= 0) & (columns[column] != UNTRACED)] = NONE
        device = kinds <= CODE["collective"]
        self._device_rows(np.flatnonzero(device), events, args, columns, first)
        self._host_rows(np.flatnonzero(~device), events, args, columns, first)
        self.builder.extend(columns, count)

    def _read_counters(self, kept: Ints, first: int, text: bytes) -> None:
        """Read hardware counters from the arguments of kernels."""
        if not may_have_counters(text):
            return
        raw = msgspec.json.decode(text, type=list[RawArgs])
        for place, index in enumerate(kept.tolist()):
            if counters := read_counters(bytes(raw[index].args)):
                self.extra[first + place] = counters

    def _read_ranges(self, events: Batch, places: Ints, starts: Ints, text: bytes) -> None:
        """Read metrics of kernels that CUPTI replayed, in the order of their launches."""
        if not places.size:
            return
        raw = msgspec.json.decode(text, type=list[RawArgs])
        for i in places.tolist()[: _MOST_RANGES - len(self._ranges)]:
            fields = msgspec.json.decode(raw[i].args)
            metrics = {k: v for k, v in fields.items() if isinstance(v, (int, float))}
            self._ranges.append((int(starts[i]), events[i].name, metrics))

    def _host_rows(
        self, rows: Ints, events: Batch, args: list[Args], columns: dict[str, NDArray[Any]], first: int
    ) -> None:
        index, kinds, threads, shapes = rows.tolist(), columns["kind"], self._threads, self._shapes
        columns["thread"][rows] = _ints([threads[events[i].tid] for i in index])
        for i in np.flatnonzero(kinds == CODE["region"]).tolist():
            if events[i].name.startswith(_COMMUNICATION):
                kinds[i] = CODE["op"]
        ops = np.flatnonzero(kinds == CODE["op"])
        chosen = [args[i] for i in ops.tolist()]
        columns["sequence"][ops] = _ints([a.sequence for a in chosen])
        columns["forward_thread"][ops] = _ints([a.forward_thread for a in chosen])
        columns["shapes"][ops] = [shapes[_both((a.dims or a.old_dims, a.types))] for a in chosen]
        if self._attention:
            self._mark_causal(ops, args, columns)
        for i, a in zip(ops.tolist(), chosen, strict=True):
            if a.collective is None:
                continue
            if events[i].name.startswith(ON_HOST):
                self._collectives.append((first + i, events[i].name, a))
            elif a.external > 0:
                self._said[a.external] = a
        for i in np.flatnonzero(kinds == CODE["runtime"]).tolist():
            if events[i].name.startswith(GRAPH_LAUNCH):
                kinds[i] = CODE["graph_launch"]

    def _mark_causal(self, ops: Ints, args: list[Args], columns: dict[str, NDArray[Any]]) -> None:
        """Add a word to the shapes of causal attention, which computes half; its arguments tell that it is causal."""
        for row in ops[np.isin(columns["name"][ops], list(self._attention))].tolist():
            a, shapes = args[row], int(columns["shapes"][row])
            self._tells_causal |= bool(a.concrete)
            if shapes != NONE and is_causal(self._attention[int(columns["name"][row])], a.concrete):
                text = compact(a.dims or a.old_dims, a.types)
                columns["shapes"][row] = self.builder.intern(f"{text} {CAUSAL}")

    def _device_rows(
        self, rows: Ints, events: Batch, args: list[Args], columns: dict[str, NDArray[Any]], first: int
    ) -> None:
        index, kinds = rows.tolist(), columns["kind"]
        if not index:
            return
        pairs = [(events[i], args[i]) for i in index]
        # One list and one assignment per column: assigning single elements costs numpy ten times as much.
        devices = _ints([a.device if a.device >= 0 else _number(e.pid) for e, a in pairs])
        wrong = (devices < NONE) | (devices > MOST_NUMBER)
        self._odd["with the number of no device, taken as unknown"] += int(wrong.sum())
        columns["device"][rows] = np.where(wrong, NONE, devices)
        columns["stream"][rows] = _ints([s if (s := _number(a.stream)) >= 0 else _number(e.tid) for e, a in pairs])
        columns["bytes"][rows] = _ints([stated_bytes(a) for _, a in pairs])
        launches, kernel_launches, copies, communicates = [], self._launches, self._copies, self._communicates
        for i, code, (event, a) in zip(index, kinds[rows].tolist(), pairs, strict=True):
            number = NONE
            if code <= CODE["kernel"] and a.collective is None and not communicates[event.name]:
                number = kernel_launches[a.grid, a.block, a.registers, a.shared]
            elif code == CODE["memcpy"]:
                number = copies[event.name if a.direction is None else a.direction]
            elif code != CODE["memset"]:
                kinds[i] = CODE["collective"]
                self._collectives.append((first + i, event.name, a))
            launches.append(number)
        columns["launch"][rows] = launches
        self._side.devices.update(np.unique(columns["device"][rows]).tolist())

    def _shape(self, key: bytes) -> int:
        """Number the shapes of an operator by its "Input Dims" and "Input type", joined by `_both`."""
        dims, types = key[:-1], b""
        if not key.endswith(b","):
            dims, types = msgspec.json.decode(b"[%b]" % key, type=tuple[Raw, Raw]) if key[:1] != b"," else (b"", b"")
        text = compact(dims, types) if dims else ""
        return self.builder.intern(text) if text else NONE

    def _launch(self, key: tuple[Any, ...]) -> int:
        grid, block, registers, shared = key
        grid = None if isinstance(grid, str) else grid
        if all(part is None for part in key):
            return NONE
        return self.builder.intern_launch(Launch(grid=grid, block=block, registers=registers, shared_bytes=shared))

    def finish(self, meta: dict[str, Any], notes: list[str]) -> Timeline:
        """Make the timeline: complete collectives from their operators, and convert times to the wall clock."""
        # c10d writes a collective's size to the operator record_param_comms, not to each kernel.
        settled = []
        for row, name, args in self._collectives:
            launch = collective(name, args, self._said.get(args.external))
            settled.append((row, self.builder.intern_launch(launch), launch.collective_bytes))
        self._side.finish()
        timeline = self.builder.build(last=True)
        forward_threads = self._side.forward_threads(timeline)
        for row, number, size in settled:
            timeline.columns["launch"][row] = number
            if size is not None:
                timeline.columns["bytes"][row] = size
        base = meta.get("baseTimeNanoseconds")
        base_ns = base if isinstance(base, int) and abs(base) < LIMIT_NS else 0
        for column in ("start_ns", "end_ns"):
            timeline.columns[column] += base_ns
        if len(timeline) and timeline.start_ns < WALL_CLOCK_NS:
            notes.append(NO_WALL_CLOCK)
        unread = Counter({c: n for c, n in self._left_out.items() if c not in _EXPECTED})
        if len(timeline) == 0 and unread:
            meta["unread"] = dict(unread.most_common())
        odd = sorted(unread.most_common(_MOST_NOTES))
        notes += [Note(f"not read: {_events(n)} of category {c[:80]!r}", "omission") for c, n in odd]
        notes += [f"{what}: {_events(n)}" for what, n in sorted(self._odd.items()) if n]
        notes += [f"{what}: {_events(n)}" for what, n in sorted(self._side.odd.items())]
        left_out = sorted(self._side.not_read.most_common(_MOST_NOTES))
        notes += [Note(f"not read, {why[:80]}: {_events(n)}", "omission") for why, n in left_out]
        info = meta.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        timeline.rank = rank if isinstance(rank, int) and NONE <= rank <= MOST_NUMBER else None
        if not self.ours and (fractions := fractions_to_percent(self.extra)):
            notes.append(f"fractions of 1, read as percent: {', '.join(fractions)}")
        timeline.notes = notes
        timeline.extra = self.extra
        timeline.meta = meta | {
            "base_ns": base_ns, "threads": self._side.thread_names, "forward_threads": forward_threads,
            "modules": sorted(self._modules), "frames": sorted(self._frame_names),
        }  # fmt: skip
        if self._ranges:
            self._ranges.sort(key=lambda r: r[0])
            timeline.meta["profiler_ranges"] = [(name, metrics) for _, name, metrics in self._ranges]
        if self._tells_causal:
            timeline.meta["tells_causal"] = True
        if self._syncs:
            timeline.meta["stream_waits"] = self._syncs
        if self._side.stream_names:
            timeline.meta[stream_names.KEY] = self._side.stream_names
        name_collectives(timeline)
        return timeline


def _events(count: int) -> str:
    return f"{count:,} event{'s' * (count != 1)}"


def _times(events: Batch) -> tuple[Ints, Ints]:
    """Return start and duration in nanoseconds; `NO_TIME` if missing."""
    if events and isinstance(events[0], LateEvent):  # all events of a batch have the same type
        return _exact([e.ts for e in events]), _exact([e.dur for e in events])
    return _round_to_ns([e.ts for e in events]), _round_to_ns([e.dur for e in events])


def _exact(texts: list[Any]) -> Ints:
    return np.array([NO_TIME if (ns := nanoseconds(t)) is None else ns for t in texts], np.int64)


def _round_to_ns(microseconds: list[Any]) -> Ints:
    """Convert to exact nanoseconds: whole and fraction apart, since their product with 1000 may not fit a float."""
    us = np.array(microseconds, np.float64)
    in_range = np.abs(us) < LIMIT_NS / 1000  # False for NaN
    whole = np.floor(np.where(in_range, us, 0.0))
    ns: Ints = whole.astype(np.int64) * 1000 + np.rint((np.where(in_range, us, 0.0) - whole) * 1000).astype(np.int64)
    ns[~in_range] = NO_TIME
    return ns


def _ints(values: list[int]) -> Ints:
    try:
        return np.array(values, np.int64)
    except OverflowError:  # handles printed as unsigned 64-bit numbers
        return np.array([fit(v) for v in values], np.int64)


def _number(value: int | str) -> int:
    return value if isinstance(value, int) else NONE


def _old_kind(event: TraceEvent | LateEvent) -> int:
    return CODE["region"] if event.name.startswith(_OLD_ANNOTATIONS) else CODE["op"]


def _mtia_kind(event: TraceEvent | LateEvent) -> int:
    if event.name in _MTIA_WAITS:
        return _SKIP_QUIETLY
    return CODE["memcpy"] if event.args.direction is not None else CODE["kernel"]


def read(
    source: str | PathLike[str] | bytes, *, progress: Callable[[float], None] | None = None, frames: bool = False
) -> Timeline:
    """Read a Kineto or Chrome trace (.json, .json.gz, or its bytes).

    `progress` is called with the share of the file that has been read. Modules that the Python tracer saw are operator
    rows. `frames` keeps its other frames too. `meta["modules"]` and `meta["frames"]` have their name numbers.
    """
    notes: list[str] = []
    where = "the trace" if isinstance(source, bytes) else str(source)
    file = source if isinstance(source, bytes) else Path(source)
    if is_memory_timeline(file[:64] if isinstance(file, bytes) else read_start(file, 64)):
        return read_memory_timeline(file if isinstance(file, bytes) else read_json(file), where)
    budget = open_source(file)
    events = Events(read_pieces(file, budget, notes, progress), budget)
    rows = RowReader(frames=frames)
    for batch, text in events:
        rows.ours = OURS in events.head
        rows.add(batch, text)
        budget.check_rows(max(rows.seen, len(rows.builder)))  # one counter event may make many rows
    if events.cut and not rows.seen:
        raise RecordingError(
            f"{where} contains no complete event",
            why="it is empty" if events.empty else "it was cut before the first one ended",
            fix="record again, and let the program end before the file is copied",
        )  # fmt: skip
    if not events.found:
        raise RecordingError(
            f"{where} is not a trace", why='it has no "traceEvents" and is not a list of events',
            fix="give a file written by torch.profiler (export_chrome_trace) or tessera run",
        )  # fmt: skip
    if events.cut:
        notes.append(Note(f"the trace was cut: {events.cut_bytes} bytes at its end are not a whole event", "omission"))
    if events.decoder.unreadable:
        notes.append(Note(f"not read: {events.decoder.unreadable} events that cannot be decoded", "omission"))
    timeline = rows.finish(events.meta, notes)
    budget.check_devices(timeline["device"])
    return timeline
