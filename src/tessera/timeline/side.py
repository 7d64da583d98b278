"""Reads the events of a trace that are not work: counters, marks, allocations, begin/end pairs, names of threads."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from ..record import CODE
from .columns import NONE, Builder, Timeline
from .events import Batch, LateEvent, RawArgs, TraceEvent, fit
from .stream_names import key as stream_key
from .stream_names import name_in

NO_TIME = -(2**63)
_UNIT = re.compile(r"[munkMGT]?(?:Wh|W|J|Hz|B|V|A|s)|Mi?B|Gi?B|GB/s|°?C|%")
_GPU = re.compile(r"\bGPU\s*(\d+)", re.IGNORECASE)


class SideEvents:
    """Collects rows of single events; `flush` appends them at once."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self.thread_names: dict[int, str] = {}
        self.stream_names: dict[str, str] = {}
        self.devices: set[int] = set()
        self.odd: Counter[str] = Counter()
        self.not_read: Counter[str] = Counter()
        self._threads: dict[str, int] = {}
        self._rows: list[tuple[int, ...]] = []
        self._values: list[float] = []
        self._open: dict[int, list[tuple[str, str, int]]] = {}
        self._flow_starts = array("q")
        self._flow_ends = array("q")
        self._args: tuple[bytes, list[RawArgs]] = (b"", [])

    def thread(self, tid: int | str) -> int:
        """Return the number of a thread; tracks with only a name get numbers below `NONE`."""
        if isinstance(tid, int):
            return fit(tid)
        number = self._threads.get(tid)
        if number is None:
            number = self._threads[tid] = -2 - len(self._threads)
            self.thread_names[number] = tid
        return number

    def add(self, event: TraceEvent | LateEvent, start_ns: int, index: int, text: bytes) -> None:
        """Read an event; `index` is its place in `text`, the JSON list that it comes from."""
        phase = event.ph
        if phase == "M":
            self._metadata(event)
        elif start_ns == NO_TIME:
            self.not_read["without a time"] += 1
        elif phase == "C":
            self._counters(event, start_ns, index, text)
        elif phase in ("i", "I", "R"):
            self._instant(event, start_ns)
        elif phase == "B":
            self._open.setdefault(self.thread(event.tid), []).append((event.name, event.cat, start_ns))
        elif phase == "E":
            self._close(self.thread(event.tid), start_ns)
        elif phase not in ("s", "t", "f"):
            self.not_read[f"of phase {phase!r}"] += 1

    def _metadata(self, event: TraceEvent | LateEvent) -> None:
        if event.name == "thread_name" and event.args.name is not None and isinstance(event.tid, int):
            if event.pid not in self.devices:
                self.thread_names[event.tid] = event.args.name
            elif (name := name_in(event.args.name)) is not None:
                self.stream_names[stream_key(int(event.pid), event.tid)] = name
        elif event.name == "process_labels" and isinstance(event.pid, int) and event.args.labels == f"GPU {event.pid}":
            self.devices.add(event.pid)

    def _instant(self, event: TraceEvent | LateEvent, at_ns: int) -> None:
        if event.args.allocated is not None:
            device = event.args.device_id
            self._row("counter", "memory allocated", at_ns, at_ns, float(event.args.allocated), device, "B", event.tid)
        else:
            self._row("mark", event.name, at_ns, at_ns, tid=event.tid)

    def _counters(self, event: TraceEvent | LateEvent, at_ns: int, index: int, text: bytes) -> None:
        try:
            if self._args[0] is not text:
                self._args = (text, msgspec.json.decode(text, type=list[RawArgs]))
            series = msgspec.json.decode(self._args[1][index].args, type=dict[str, float | None], strict=False)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.not_read["counters without a number"] += 1
            return
        gpu = _GPU.search(event.name)
        device = int(gpu[1]) if gpu else event.pid if event.pid in self.devices else NONE
        for key, value in series.items():
            unit = key if _UNIT.fullmatch(key) else None
            name = event.name if unit or len(series) == 1 else f"{event.name}/{key}"
            if value is not None:
                self._row("counter", name, at_ns, at_ns, value, int(device), unit)

    def _close(self, thread: int, end_ns: int) -> None:
        stack = self._open.get(thread)
        if not stack:
            self.not_read["closing what was never opened"] += 1
            return
        name, category, start_ns = stack.pop()
        self._row("op" if category in ("cpu_op", "op") else "region", name, start_ns, end_ns, tid=thread)

    def _row(
        self, kind: str, name: str, start_ns: int, end_ns: int, value: float = float("nan"), device: int = NONE,
        unit: str | None = None, tid: int | str = NONE,
    ) -> None:  # fmt: skip
        intern = self._builder.intern
        number = NONE if unit is None else intern(unit)
        self._rows.append((CODE[kind], intern(name), start_ns, end_ns, fit(device), self.thread(tid), number))
        self._values.append(value)

    def flush(self) -> None:
        if not self._rows:
            return
        table = np.array(self._rows, np.int64)
        names = ("kind", "name", "start_ns", "end_ns", "device", "thread", "unit")
        columns = {name: table[:, i] for i, name in enumerate(names)}
        self._builder.extend({**columns, "value": np.array(self._values)}, len(table))
        self._rows, self._values = [], []

    def flows(self, events: Batch, times_ns: Sequence[int]) -> None:
        """Read arrows from forward to backward operators: they tell the threads of autograd's thread numbers."""
        for event, at_ns in zip(events, times_ns, strict=True):
            if isinstance(event.id, int) and event.ph == "s":
                self._flow_starts.extend((fit(event.id), self.thread(event.tid)))
            elif isinstance(event.id, int) and event.ph == "f":
                self._flow_ends.extend((fit(event.id), self.thread(event.tid), at_ns))

    def finish(self) -> None:
        """Append what was opened and never closed."""
        for thread, stack in self._open.items():
            for name, _, start_ns in stack:
                self.odd["opened and never closed, taken as instants"] += 1
                self._row("region", name, start_ns, start_ns, tid=thread)
        self.flush()

    def forward_threads(self, timeline: Timeline) -> dict[int, int]:
        """Return autograd's thread numbers ("Fwd thread id") with their threads, as far as the arrows tell."""
        starts = np.array(self._flow_starts, np.int64).reshape(-1, 2)
        ends = np.array(self._flow_ends, np.int64).reshape(-1, 3)
        backward = np.flatnonzero(timeline["forward_thread"] > 0)
        if not len(starts) or not len(ends) or not len(backward):
            return {}
        starts = starts[np.argsort(starts[:, 0], kind="stable")]
        backward = backward[np.argsort(timeline["start_ns"][backward], kind="stable")]
        at = np.searchsorted(starts[:, 0], ends[:, 0]).clip(max=len(starts) - 1)
        row = backward[np.searchsorted(timeline["start_ns"][backward], ends[:, 2]).clip(max=len(backward) - 1)]
        sure = (starts[at, 0] == ends[:, 0]) & (timeline["start_ns"][row] == ends[:, 2])
        sure &= timeline["thread"][row] == ends[:, 1]
        pairs, counts = np.unique(
            np.stack([timeline["forward_thread"][row], starts[at, 1]], axis=1)[sure], axis=0, return_counts=True
        )
        return {int(number): int(thread) for number, thread in pairs[np.argsort(counts, kind="stable")]}
