"""Reads Perfetto's own traces (`rocprofv3 --output-format pftrace`): slices of tracks, by their categories.

::

    packet: track_descriptor   a track: its name, and the thread it is
    packet: interned_data      names and categories that later packets of the sequence refer to by number
    packet: track_event        a slice begins or ends on a track

Kernels, copies, calls and markers are recognised by rocprofv3's categories; other slices on threads are regions. A
converted trace (`traceconv json`) is a Chrome trace, and is read as one.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ..errors import RecordingError
from ..notes import Note
from ..read_limits import ReadBudget
from .columns import NONE, Builder, Timeline
from .device_rows import add_call, add_copy, add_kernel, name_copy
from .events import LIMIT_NS, NO_WALL_CLOCK, WALL_CLOCK_NS
from .protobuf import as_double, as_message, as_number, as_signed, as_text, collect_fields, read_fields, read_messages
from .source import open_source

_BEGIN, _END = 1, 2
_DEVICE = re.compile(r"(?:COMPUTE|COPY|GPU|Agent|to)\s*\[?(\d+)\]?", re.IGNORECASE)
_QUEUE = re.compile(r"(?:QUEUE|STREAM|ENGINE)\s*\[?(\d+)\]?", re.IGNORECASE)
_KERNEL, _COPIES, _CALLS = "kernel", ("memory_copy", "memcpy"), ("hip", "hsa", "rccl", "rocdecode")


def read_perfetto(path: Path) -> Timeline:
    """Read kernels, copies, calls and regions of a Perfetto trace."""
    budget, notes = open_source(path), list[str]()
    reader = _TraceReader(budget)
    read_messages(path, "a Perfetto trace", reader.builder, budget, notes, reader.add_packet)
    if not len(reader.builder):
        raise RecordingError(
            f"{path} contains no slice", why="kernels, calls and regions are slices of tracks",
            fix="rocprofv3 --sys-trace --output-format pftrace -- PROGRAM",
        )  # fmt: skip
    return reader.finish(notes)


@dataclass(slots=True)
class _Sequence:
    """What the packets of one writer refer to: stored texts, its default track, and incremental clocks."""

    categories: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    annotations: dict[int, str] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    track: int = 0
    clock: int = 0
    clocks: dict[int, list[int]] = field(default_factory=dict)
    """For each incremental clock: its last time, and the nanoseconds of its unit."""


@dataclass(slots=True)
class _Track:
    """A track: its name, its thread, and its open slices."""

    name: str = ""
    thread: int = NONE
    open: list[tuple[str, str, int, dict[str, Any]]] = field(default_factory=list)


class _TraceReader:
    """Makes rows from packets."""

    def __init__(self, budget: ReadBudget) -> None:
        self.builder = Builder()
        self._budget, self._seen = budget, 0
        self._sequences: dict[int, _Sequence] = {}
        self._tracks: dict[int, _Track] = {}
        self._left_out: Counter[str] = Counter()

    def add_packet(self, packet: memoryview) -> None:
        self._seen += 1
        self._budget.check_row(self._seen)
        fields = dict(read_fields(packet))
        state = self._sequences.setdefault(as_number(fields.get(10, 0)), _Sequence())
        if as_number(fields.get(13, 0)) & 1:  # from here on, the writer's stored texts are no longer valid
            state.categories, state.names, state.annotations, state.texts = {}, {}, {}, {}
        if 59 in fields:
            defaults = dict(read_fields(as_message(fields[59])))
            state.clock = as_number(defaults.get(58, state.clock))
            event = dict(read_fields(as_message(defaults.get(11, memoryview(b"")))))
            state.track = as_number(event.get(11, state.track))
        if 6 in fields:
            _read_clocks(as_message(fields[6]), state)
        if 12 in fields:
            _read_interned(as_message(fields[12]), state)
        if 60 in fields:
            self._describe_track(as_message(fields[60]))
        time_ns = _time_ns(fields, state)
        if 11 in fields and 0 <= time_ns < LIMIT_NS:
            self._add_event(as_message(fields[11]), state, time_ns)

    def _describe_track(self, message: memoryview) -> None:
        fields = dict(read_fields(message))
        track = self._tracks.setdefault(as_number(fields.get(1, 0)), _Track())
        thread = dict(read_fields(as_message(fields.get(4, memoryview(b"")))))
        if 2 in thread:
            track.thread = as_number(thread[2])
        named = fields.get(2) or fields.get(10) or thread.get(5)
        track.name = as_text(named) if named is not None else track.name

    def _add_event(self, message: memoryview, state: _Sequence, time_ns: int) -> None:
        fields = collect_fields(message, 3, 4, 22)
        kind, uuid = as_number(fields.get(9, 0)), as_number(fields.get(11, state.track))
        name = as_text(fields[23]) if 23 in fields else state.names.get(as_number(fields.get(10, NONE)), "")
        numbers = (v if isinstance(v, int) else (bytes(v) or b"\0")[0] for v in fields[3])
        categories = (*(state.categories.get(number, "") for number in numbers), *map(as_text, fields[22]))
        category = next(filter(None, categories), "")
        said = dict(pair for value in fields[4] for pair in _read_annotation(as_message(value), state).items())
        track = self._tracks.setdefault(uuid, _Track())
        if kind == _BEGIN:
            track.open.append((name, category, time_ns, said))
        elif kind == _END and track.open:
            begun = track.open.pop()
            self._add_slice(track, uuid, *begun, time_ns)
        elif kind == _END:
            self._left_out["end without a begin"] += 1

    def _add_slice(
        self, track: _Track, uuid: int, name: str, category: str, start_ns: int, said: dict[str, Any], end_ns: int
    ) -> None:
        correlation = said.get("corr_id", said.get("correlation_id", NONE))
        correlation = correlation if isinstance(correlation, int) else NONE
        sort, builder, end_ns = category.lower(), self.builder, max(start_ns, end_ns)
        thread = track.thread if track.thread != NONE else uuid % (1 << 31)
        is_kernel = _KERNEL in sort
        if is_kernel or any(word in sort for word in _COPIES):
            device, queue = _DEVICE.search(track.name), _QUEUE.search(track.name)
            place: dict[str, Any] = {
                "device": int(device[1][:9]) if device else 0,
                "stream": int(queue[1][:9]) if queue else uuid % (1 << 31),
                "correlation": correlation,
            }
            if is_kernel:
                add_kernel(builder, name, start_ns, end_ns, **place)
            else:
                size = said.get("bytes", said.get("size", NONE))
                size = size if isinstance(size, int) else NONE
                add_copy(builder, name_copy(name), start_ns, end_ns, size=size, **place)
        elif sort.startswith(_CALLS):
            add_call(builder, name, start_ns, end_ns, thread=thread, correlation=correlation)
        else:
            builder.add("region", name, start_ns, end_ns, thread=thread)

    def finish(self, notes: list[str]) -> Timeline:
        """Make the timeline; number GPUs from 0 in the order of their agents' numbers, which CPUs have too."""
        timeline = self.builder.build()
        device_rows = timeline.device_rows
        numbers = {n: i for i, n in enumerate(sorted(set(timeline["device"][device_rows].tolist())))}
        for row in device_rows.tolist():
            timeline.columns["device"][row] = numbers[int(timeline["device"][row])]
        still_open = sum(len(track.open) for track in self._tracks.values())
        if still_open:
            self._left_out["begin without an end"] += still_open
        left_out = [Note(f"not read: {count:,} slices: {what}", "omission") for what, count in self._left_out.items()]
        clock = [NO_WALL_CLOCK] if timeline.start_ns < WALL_CLOCK_NS else []
        timeline.notes = [*notes, *clock, *left_out]
        threads = {t.thread: t.name for t in self._tracks.values() if t.thread != NONE and t.name}
        timeline.meta |= {"threads": threads, "recorded_by": "perfetto"}
        self._budget.check_devices(timeline["device"])
        return timeline


def _time_ns(fields: dict[int, Any], state: _Sequence) -> int:
    """Return the time of a packet; some clocks count from the packet before."""
    stamp, clock = as_number(fields.get(8, 0)), as_number(fields.get(58, state.clock))
    if clock not in state.clocks:
        return stamp
    counting = state.clocks[clock]
    counting[0] += stamp * counting[1]
    return counting[0]


def _read_clocks(message: memoryview, state: _Sequence) -> None:
    for number, value in read_fields(message):
        if number == 1:
            clock = {n: as_number(v) for n, v in read_fields(as_message(value))}
            if clock.get(3):
                unit_ns = clock.get(4, 1) or 1
                state.clocks[clock.get(1, 0)] = [clock.get(2, 0) * unit_ns, unit_ns]


def _read_interned(message: memoryview, state: _Sequence) -> None:
    tables = {1: state.categories, 2: state.names, 3: state.annotations, 29: state.texts}
    for number, value in read_fields(message):
        if number in tables:
            entry = dict(read_fields(as_message(value)))
            tables[number][as_number(entry.get(1, 0))] = as_text(entry.get(2, memoryview(b"")))


def _read_annotation(message: memoryview, state: _Sequence) -> dict[str, Any]:
    name, found = "", cast("str | float | None", None)
    for number, value in read_fields(message):
        if number == 1:
            name = state.annotations.get(as_number(value), "")
        elif number == 10:
            name = as_text(value)
        elif number in (2, 3, 7):
            found = as_number(value)
        elif number == 4:
            found = as_signed(value)
        elif number == 5:
            found = as_double(value)
        elif number == 6:
            found = as_text(value)
        elif number == 17:
            found = state.texts.get(as_number(value), "")
    return {name: found} if name else {}
