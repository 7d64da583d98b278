"""`Recording`: one run of one or many ranks on one clock: what ran, its power, its telemetry, its facts.

A session, a run file, another tool's trace and a merge of ranks each produce a `Recording`; analyses, exporters,
reports, `diff` and TensorBoard accept only a `Recording`. So the terminal, the page and Python say the same about the
same run. All times are epoch nanoseconds.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from .attribute.account import account_run, account_samples, account_trace
from .attribute.table import EnergyTable
from .attribute.work import work_of
from .clock import EpochNs
from .errors import MeasurementError
from .notes import order_notes
from .record import NOT_THROTTLED, Record
from .schema import DeviceId, Pause, PowerEvent, Telemetry
from .timeline.columns import Chunk, Launch, Timeline
from .trace import PowerTrace
from .units import format_energy_error

Span = tuple[EpochNs, EpochNs]

EVALUATION = "evaluation"
"""Name of regions in which a training script evaluates: between `eval()` and `train()`, or without gradients. They
are part of no step."""
COMPILATION = "compilation"
"""Name of regions in which torch.compile compiles, or records a CUDA graph."""


class Stack(NamedTuple):
    """A sampled Python stack ("outermost;...;innermost"), and how many samples had it."""

    epoch_ns: int
    thread: int | str
    stack: str
    samples: int


class Rows(Protocol):
    """The rows of a timeline, to be read in chunks: from memory, or from a run file."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def launches(self) -> Sequence[Launch]: ...
    @property
    def row_meta(self) -> Mapping[str, Any]: ...
    @property
    def has_energy(self) -> bool: ...
    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[Chunk]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """CPU seconds of a program and its children; `children` has their number and seconds by name.

    `alive` has the most children of a name at once, and for how many seconds they lived, together: the
    workers of a DataLoader are new ones in every epoch.
    `beside` has the same of the program's Python threads other than the main one, whose operators are not traced.
    `cores` is how many may be used, by affinity and quota; `threads` is the number for torch's operators. `waited_s` is
    how long the main thread was ready to run but had no core. `others_s` are the CPU seconds of other programs on the
    machine during `over_s`, the time over which all this was counted. `formats` are the narrow number formats for which
    the CPU has instructions.
    """

    cpu_s: float
    children: Mapping[str, tuple[int, float]]
    cores: float
    alive: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    threads: int | None = None
    waited_s: float | None = None
    others_s: float | None = None
    over_s: float | None = None
    formats: Sequence[str] = ()
    beside: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def children_s(self) -> float:
        return sum(seconds for _, seconds in self.children.values())

    @property
    def beside_s(self) -> float:
        return sum(seconds for _, seconds in self.beside.values())

    @property
    def others_cores(self) -> float:
        """How many cores other programs used on average; 0 if unknown."""
        return self.others_s / self.over_s if self.others_s and self.over_s else 0.0

    @property
    def crowded_share(self) -> float:
        """The share of time in which the main thread waited for a core because of other programs; 0 if none ran.

        A program with more threads than cores also waits for itself. So the wait counts only if other programs ran for
        at least half as long.
        """
        waited_s = self.waited_s or 0.0
        return waited_s / self.over_s if self.over_s and (self.others_s or 0.0) >= 0.5 * waited_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known about a recording besides its rows and samples; None or empty if its source does not say.

    `kind` is "run" for what Tessera recorded from start to end, and "trace" for a part that another tool traced.
    `windows` are the times that were traced. With `scheduled` they were chosen, and the time between them was not meant
    to be traced. `operator_windows` are the parts in which operators were traced too, if that was not always so.
    `collectors` says what recorded "kernels" and "operators" ("cupti", "kineto"), and "why" CUPTI did not. `pauses` are
    times in which operators were collected while the program waited. `meta` is what the session stored at its begin.
    """

    name: str = "trace"
    kind: Literal["run", "trace"] = "trace"
    path: Path | None = None
    host: str = ""
    pid: int = 0
    mode: str | None = None
    command: str | Sequence[str] | None = None
    device: str = ""
    span_ns: Span | None = None
    windows: Sequence[tuple[int, int]] = ()
    operator_windows: Sequence[tuple[int, int]] = ()
    collectors: Mapping[str, str | None] = field(default_factory=dict)
    scheduled: bool = False
    tracing_s: float | None = None
    pauses: Sequence[Pause] = ()
    time_limit_reached: bool = False
    crashed: bool = False
    returncode: int | None = None
    work: Any = None
    summary: Mapping[str, Any] | None = None
    cpu_use: CpuUse | None = None
    version: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def title(self) -> str:
        """The name that the run was given, or else its file's."""
        return str(self.meta.get("name") or (self.path.stem if self.path is not None else self.name))

    @property
    def accounted_windows(self) -> list[tuple[int, int]]:
        """The times whose joules a table shares out; empty if the source does not say.

        For a schedule, each window by itself. Otherwise from the first window to the last, since the time between
        belongs to the run too (Kineto was restarted there). Without windows, the whole run.
        """
        if not self.windows or self.mode == "summary":
            return [self.span_ns] if self.span_ns is not None else []
        return list(self.windows) if self.scheduled else [(self.windows[0][0], self.windows[-1][1])]


class Recording:
    """A recorded run. `power` is None if none was recorded; `ranks` has one recording for each rank of a merge."""

    def __init__(
        self,
        timeline: Timeline | Callable[[], Timeline],
        power: PowerTrace | Callable[[], PowerTrace] | None = None,
        telemetry: Sequence[Telemetry] | Callable[[], Sequence[Telemetry]] = (),
        facts: Facts | None = None,
        *,
        stacks: Sequence[Stack] | Callable[[], Sequence[Stack]] = (),
        events: Sequence[PowerEvent] | Callable[[], Sequence[PowerEvent]] = (),
        ranks: Sequence[Recording] = (),
        rows: Rows | None = None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """Parts may be functions, so that a part of a run file is read only when it is needed."""
        self._timeline, self._power, self._telemetry, self._stacks = timeline, power, telemetry, stacks
        self._rows, self._close, self._events = rows, close, events
        self._energy: EnergyTable | None = None
        self.facts = facts or Facts()
        self.ranks = ranks
        self._notes: list[str] = []

    @cached_property
    def timeline(self) -> Timeline:
        """What ran when."""
        return self._timeline() if callable(self._timeline) else self._timeline

    @cached_property
    def power(self) -> PowerTrace | None:
        """Watts over time; None if no power was recorded."""
        power = self._power() if callable(self._power) else self._power
        return power if power is not None and power.columns else None

    @cached_property
    def telemetry(self) -> Sequence[Telemetry]:
        """Clocks, temperatures and the like, in time order."""
        return self._telemetry() if callable(self._telemetry) else self._telemetry

    @cached_property
    def events(self) -> Sequence[PowerEvent]:
        """What power supplies, PDUs and BMCs reported, in time order."""
        return self._events() if callable(self._events) else self._events

    @cached_property
    def stacks(self) -> Sequence[Stack]:
        """Sampled Python stacks, in time order."""
        return self._stacks() if callable(self._stacks) else self._stacks

    @property
    def rows(self) -> Rows:
        """The rows for an exporter that reads chunks: from the file, unless the timeline is already loaded."""
        return self.timeline if self._rows is None or "timeline" in self.__dict__ else self._rows

    @property
    def notes(self) -> list[str]:
        """What a reader should know; each note once."""
        return order_notes([*self.facts.notes, *self.timeline.notes, *self._notes])

    def close(self) -> None:
        """Release the file behind the recording, if there is one. Safe to call twice."""
        self._close()

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Describe the recording without reading more of it: a timeline may have millions of rows."""
        rows = f"{len(self.timeline)} rows" if "timeline" in self.__dict__ else "not read yet"
        table = self._energy
        spent = "" if table is None else f", {format_energy_error(table.energy_j, table.error_j)}"
        return f"<Recording {self.facts.name}: {rows}{spent}>"

    @property
    def span_ns(self) -> Span:
        """Start and end of the run, or else of its rows."""
        return self.facts.span_ns or (EpochNs(self.timeline.start_ns), EpochNs(self.timeline.end_ns))

    @property
    def accounted_windows(self) -> list[tuple[int, int]]:
        """The times whose joules `energy()` shares out."""
        is_trace = self.facts.kind == "trace" and not self.facts.windows
        windows = [self.timeline.traced_span] if is_trace else self.facts.accounted_windows
        if self.power is None or not is_trace:
            return windows or [self.span_ns]
        ((start_ns, end_ns),) = windows
        return [(max(start_ns, self.power.start_ns), min(end_ns, self.power.end_ns))]

    def energy(self) -> EnergyTable:
        """Return what the joules were spent on: kernels, operators, regions, modules, steps. Computed once.

        A run without power has a table whose joules are NaN, with a note; a trace without power has no table.
        """
        if self._energy is None:
            self._energy = self._account()
        return self._energy

    def _account(self) -> EnergyTable:
        if self.facts.kind == "run":
            if self.power is None:
                start_ns, end_ns = self.span_ns
                return account_samples(self.timeline, None, seconds=(end_ns - start_ns) * 1e-9)
            threads = self.facts.cpu_use.threads if self.facts.cpu_use is not None else None
            return account_run(self.timeline, self.power, self.accounted_windows, threads)
        if self.power is None:
            raise MeasurementError(
                "this trace has no power log",
                why="joules are computed from power samples",
                fix="give a power log of the same time: tessera.profile.load(trace, power='power.csv'), or --power",
            )
        return account_trace(self.timeline, self.power)

    def find_energy(self) -> EnergyTable | None:
        """Return `energy()`, or None if there is no power or no joules can be attributed; then a note says why."""
        if self.power is None:
            return None
        try:
            return self.energy()
        except MeasurementError as exc:
            self._notes.append(f"no joules: {exc.what}")
            self.power = None
            return None

    def records(self) -> Iterator[Record]:
        """Yield every row as a `Record`, in time order, with its joules and its device's state if these are known."""
        with contextlib.suppress(MeasurementError):  # without power, the records' joules are None and `why` tells it
            self.energy()
        return _add_device_state(self.timeline.records(), self.telemetry)


def _add_device_state(records: Iterator[Record], telemetry: Sequence[Telemetry]) -> Iterator[Record]:
    """Add power, temperature and throttling of their device to records."""
    by_device: dict[DeviceId, list[Telemetry]] = {}
    for reading in telemetry:
        by_device.setdefault(DeviceId.of_domain(reading.domain), []).append(reading)
    times = {device: [t.time_ns for t in readings] for device, readings in by_device.items()}
    for record in records:
        if record.kind == "op" and record.shapes is not None and record.flops is None:
            work = work_of(record.name, record.shapes)
            record.flops = work.flops if work is not None else None
        if record.energy_j is not None and record.seconds > 0 and record.power_w is None:
            record.power_w = record.energy_j / record.seconds
        device = DeviceId(record.host or "", "gpu", record.device) if record.device is not None else None
        if device in times:
            state = by_device[device][max(bisect.bisect_right(times[device], record.start_ns) - 1, 0)]
            record.temp_c = state.temperature_c
            if state.throttle is not None:
                record.throttle_reason = ", ".join(state.throttle) or NOT_THROTTLED
        yield record
