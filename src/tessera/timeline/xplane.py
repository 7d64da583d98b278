"""Reads traces of JAX and of XLA's profiler (`jax.profiler.start_trace`): `plugins/profile/*/HOST.xplane.pb`.

::

    XSpace ─► planes: /device:GPU:0 ─► lines: Stream #16(Kernel) ─► events: kernels, copies, with their HLO operator
                      /host:CPU     ─► lines: threads            ─► events: launch calls, Python, annotations

A kernel belongs to the operator of its HLO: the framework's name (`jit(f)/dot_general`) becomes an operator around the
call that launched the kernel. Derived lines (XLA Ops, Steps ...) repeat what the streams have, and are not read.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..errors import RecordingError
from ..notes import Note
from ..read_limits import ReadBudget
from .columns import NONE, Builder, Launch, Timeline
from .device_rows import add_call, add_copy, add_kernel
from .events import LIMIT_NS, NO_WALL_CLOCK, WALL_CLOCK_NS
from .protobuf import Value, as_message, as_number, as_signed, as_text, collect_fields, read_fields, read_messages
from .source import open_source

_DEVICE = re.compile(r"/device:[A-Z]+:(\d+)")
_STREAM = re.compile(r"Stream #(\d+)")
_CALL = re.compile(r"(?:hip|cuda|cu)[A-Z]\w*")
_COPY = re.compile(r"Mem(?:cpy|set)|Copy\w+To\w+|CopyBuffer", re.IGNORECASE)
_DETAIL = re.compile(r"(\w+):([\d,]+)")


def read_xplane(path: Path) -> Timeline:
    """Read kernels, copies, launch calls and annotations of an xplane.pb (or .pb.gz)."""
    budget, notes = open_source(path), list[str]()
    reader = _SpaceReader(budget)
    read_messages(path, "a trace of JAX", reader.builder, budget, notes, reader.add_plane)
    if not len(reader.builder):
        raise RecordingError(f"{path} contains no event", why="nothing ran while it was recorded", fix="record again")
    return reader.finish(notes)


class _Plane:
    """A plane: its name, its lines as in the file, and the names that its events and figures refer to."""

    def __init__(self, message: memoryview) -> None:
        fields = collect_fields(message, 3, 4, 5, 6)
        self.name = as_text(fields.get(2, ""))
        self.lines, self.own = ([as_message(value) for value in fields[number]] for number in (3, 6))
        self.events, self.stats = dict(map(_read_name, fields[4])), dict(map(_read_name, fields[5]))

    def figures(self, stats: list[memoryview]) -> dict[str, Any]:
        """Return the properties of an event by name: texts or whole numbers."""
        found: dict[str, Any] = {}
        for stat in stats:
            name, value = "", cast("str | int | None", None)
            for number, field in read_fields(stat):
                if number == 1:
                    name = self._find_text(field)
                elif number == 7:  # a text shared by many events
                    value = self._find_text(field)
                elif number in (3, 4, 5, 6):
                    value = as_text(field) if number > 4 else as_signed(field)
            if name and value is not None:
                found[name] = value
        return found

    def _find_text(self, number: Value) -> str:
        return self.stats.get(as_number(number), "")


def _read_name(entry: Value) -> tuple[int, str]:
    """Read an entry of the map of events or figures: its number, and its name or else its display name."""
    fields = collect_fields(as_message(entry))
    named = collect_fields(as_message(fields.get(2, 0)))
    return as_signed(fields.get(1, 0)), as_text(named.get(2, "")) or as_text(named.get(4, ""))


class _SpaceReader:
    """Collects the rows of all planes."""

    def __init__(self, budget: ReadBudget) -> None:
        self.builder = Builder()
        self._budget = budget
        self._base_ns = 0
        self._left_out: Counter[str] = Counter()
        self._threads: dict[int, str] = {}
        self._calls: dict[int, tuple[int, int, int]] = {}
        self._operators: dict[int, str] = {}
        self._seen = 0

    def add_plane(self, message: memoryview) -> None:
        plane = _Plane(message)
        if plane.name == "Task Environment":
            self._base_ns = int(plane.figures(plane.own).get("profile_start_time", 0) or 0)
        device = _DEVICE.match(plane.name)
        for place, line in enumerate(plane.lines):
            self._add_line(plane, line, int(device[1][:9]) if device else None, place)

    def _add_line(self, plane: _Plane, line: memoryview, device: int | None, place: int) -> None:
        fields = collect_fields(line, 4)
        name, start_ns, number = (
            as_text(fields.get(2, "")),
            as_signed(fields.get(3, 0)),
            as_signed(fields.get(1, place)),
        )
        stream = _STREAM.match(name)
        if device is not None and stream is None:
            return
        if device is None:
            self._threads[number] = name
        for event in fields[4]:
            self._seen += 1
            self._budget.check_row(self._seen)
            self._add_event(plane, as_message(event), start_ns, device, int(stream[1][:9]) if stream else number)

    def _add_event(self, plane: _Plane, event: memoryview, line_ns: int, device: int | None, track: int) -> None:
        fields = collect_fields(event, 4)
        name = plane.events.get(as_signed(fields[1]), "") if 1 in fields else ""
        offset_ps, lasts_ps = as_signed(fields.get(2, 0)), as_signed(fields.get(3, 0))
        stats = [as_message(stat) for stat in fields[4]]
        start_ns = line_ns + offset_ps // 1000
        end_ns = line_ns + (offset_ps + lasts_ps) // 1000
        if not 0 <= start_ns <= end_ns < LIMIT_NS:
            self._left_out["with times that cannot be"] += 1
        elif device is not None:
            self._add_device_row(plane.figures(stats), name, start_ns, end_ns, device, track)
        elif name.startswith("$"):  # a call of the Python tracer
            self._left_out["of the Python tracer"] += 1
        elif lasts_ps > 0:
            self._add_host_row(plane.figures(stats), name, start_ns, end_ns, track)

    def _add_device_row(
        self, figures: dict[str, Any], name: str, start_ns: int, end_ns: int, device: int, stream: int
    ) -> None:
        correlation = int(figures.get("correlation_id", NONE))
        details = dict(_DETAIL.findall(str(figures.get("kernel_details") or figures.get("memcpy_details") or "")))
        numbers = {key: int(text[:18]) for key, text in details.items() if text.isdecimal()}
        place: dict[str, Any] = {"device": device, "stream": stream, "correlation": correlation}
        if _COPY.match(name):
            add_copy(self.builder, name, start_ns, end_ns, size=numbers.get("size", NONE), **place)
            return
        framework = str(figures.get("tf_op") or "")
        operator = framework if "/" in framework else str(figures.get("hlo_op") or "")
        if operator:
            self._operators.setdefault(correlation, operator)
        grid, block = (_sizes(details.get(key, "")) for key in ("grid", "block"))
        shared = numbers.get("static_shared", numbers.get("shared"))
        launch = Launch(grid=grid, block=block, registers=numbers.get("regs"), shared_bytes=shared)
        add_kernel(self.builder, name.removesuffix(".kd"), start_ns, end_ns, launch=launch, **place)

    def _add_host_row(self, figures: dict[str, Any], name: str, start_ns: int, end_ns: int, thread: int) -> None:
        if _CALL.fullmatch(name):
            correlation = int(figures.get("correlation_id", NONE))
            add_call(self.builder, name, start_ns, end_ns, thread=thread, correlation=correlation)
            if correlation != NONE:
                self._calls[correlation] = (start_ns, end_ns, thread)
        elif "step_num" in figures:  # jax.profiler.StepTraceAnnotation("train", step_num=5)
            self.builder.add("region", f"step {figures['step_num']}", start_ns, end_ns, thread=thread)
        else:
            self.builder.add("op", name, start_ns, end_ns, thread=thread)

    def finish(self, notes: list[str]) -> Timeline:
        """Make the timeline, with an operator around each launch of a kernel that names one."""
        builder = self.builder
        for correlation, name in self._operators.items():
            if correlation in self._calls:
                start_ns, end_ns, thread = self._calls[correlation]
                builder.add("op", name, start_ns, end_ns, thread=thread, external=correlation)
        timeline = builder.build()
        if self._base_ns and timeline.start_ns < WALL_CLOCK_NS:
            for column in ("start_ns", "end_ns"):
                timeline.columns[column] += self._base_ns
        if timeline.start_ns < WALL_CLOCK_NS:
            notes.append(NO_WALL_CLOCK)
        is_device = timeline["device"] != NONE  # their correlation numbers link them to the operators added above
        timeline.columns["external"] = np.where(is_device, timeline["correlation"], timeline["external"])
        left_out = [Note(f"not read: {count:,} events {what}", "omission") for what, count in self._left_out.items()]
        timeline.notes = [*notes, *left_out]
        timeline.meta |= {"threads": self._threads, "recorded_by": "jax"}
        self._budget.check_devices(timeline["device"])
        return timeline


def _sizes(text: str) -> tuple[int, ...] | None:
    """Read '128,1,1'."""
    parts = [p for p in text.split(",") if p]
    return tuple(int(p[:9]) for p in parts) if parts else None
