"""`Session`: records a part of a program into one run file, and keeps it whatever happens to the program.

::

    program's threads ── region, mark, counter, step ──────────────────────────┐
    Sampler (power, clocks) ──► PowerFeed ──┐                                  ├──► RunWriter ──► runs/NAME.tessera
    StackSampler (Python stacks) ───────────┴─ one thread, 0.3 s ──────────────┤
    CUPTI ───► KernelTracing ──► cupti_timeline ───────────────────────────────┤
    Kineto ──► Tracing (windows) ──► timeline.kineto.read, or RunSummary ──────┘
"""

from __future__ import annotations

import bisect
import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, MeasurementError, RecordingError, TesseraError
from ..notes import kind_of
from ..record import APART
from . import ending
from .options import SessionOptions
from .region import current, install
from .session_results import SessionResults
from .tracing_schedule import TracingSchedule

if TYPE_CHECKING:
    from ..monitor import EnergyScope, Monitor
    from ..recording import Recording
    from ..timeline.columns import Timeline
    from .cpu_use import CpuUseCounter
    from .export import Exporter
    from .power_feed import PowerFeed
    from .ranks.clocks import ClockReading
    from .region import Pop, Push
    from .runfile import RunWriter
    from .sampling import StackSampler
    from .summary_mode import RunSummary
    from .torch_hooks import ModuleRanges
    from .tracer import Tracer

PULL_S = 0.3
"""How often power and stacks go to the run file. It commits every quarter second, so half a second is promised."""
SUMMARY_S = 10.0
MAX_WINDOWS = 1000
REPLAY = "TESSERA_REPLAY"
"""Set while ncu runs a program again for its counters (`profile.counters`): a session then records nothing."""
_lock = threading.Lock()


def _note_nothing() -> None:
    """Do nothing, while the session has no sensors."""


def _never() -> bool:
    return False


def _compare_clocks() -> ClockReading:
    from .ranks.clocks import exchange

    return exchange()


class Session(SessionResults):
    """Records between entering and leaving a `with` block. Made by `profile.session`.

    If an exception leaves the block, the session writes what it has and lets the exception go on. `stop` may be called
    twice. A session that is never left is stopped when the interpreter ends.
    """

    def __init__(
        self,
        options: SessionOptions,
        *,
        exporters: Sequence[Exporter] = (),
        path: Path,
        schedule: TracingSchedule | None = None,
        facts: dict[str, Any] | None = None,
        begin_tracing: bool = True,
        claimed: bool = False,
        next_path: Callable[[], Path] | None = None,
    ) -> None:
        """`claimed`: `path` is an empty file made for this run. `next_path`: another path if this one is taken."""
        self.options = options
        self.claimed, self.next_path = claimed, next_path
        self.path = path
        self.notes: list[str] = []
        self.push: Push | None = None
        self.pop: Pop | None = None
        self.compiling: Callable[[], bool] = _never
        self.steps = 0
        self._exporters = tuple(exporters)
        self._schedule = schedule
        self._monitor: Monitor | None = None
        self._facts = dict(facts or {})
        self._begin_tracing = begin_tracing
        self._pid = os.getpid()
        self._writer: RunWriter | None = None
        self._scope: EnergyScope | None = None
        self._feed: PowerFeed | None = None
        self.note_edge: Callable[[], None] = _note_nothing
        """Called when a region or a step begins or ends, so that modelled CPU samples are divided there."""
        self._stacks: StackSampler | None = None
        self._summary: RunSummary | None = None
        self._tracing: Tracer | None = None
        self._modules: ModuleRanges | None = None
        self._windows: list[tuple[int, int]] = []
        self._marks: dict[str, int] = {}
        self._step_ns = 0
        self._end_ns = self._end_mono_ns = 0
        self._stopped = False
        self._done = threading.Event()
        self._ticker: threading.Thread | None = None
        self._recording: Recording | None = None
        self._clock: ClockReading | None = None
        self._cpu_use: CpuUseCounter | None = None

    # -- begin and end ---------------------------------------------------------------------------------------------

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except TesseraError as own:
            if exc is None:
                raise
            exc.add_note(f"(and Tessera's session could not be ended well: {own.what})")

    def start(self) -> Session:
        """Begin to record; returns self."""
        from .assemble import assemble
        from .cpu_use import CpuUseCounter

        with _lock:
            other = current()
            if other is not None:
                raise MeasurementError(
                    "a session is already running" if other is not self else "this session is already running",
                    why=f"it writes {other.path}, and a process has one Kineto and one set of regions",
                    fix="end it first, or use profile.region(...) inside it to name a part of it",
                )
            if self._writer is not None:
                raise MeasurementError("a session records once", fix="make another: with profile.session(...):")
            if os.environ.get(REPLAY) == "1":
                return self
            assemble(self)
            self._cpu_use = CpuUseCounter()
            if self.options.align_clocks:
                self._clock = _compare_clocks()
            install(self)
            ending.stop_at_exit(self)
        self._ticker = threading.Thread(target=self._tick, name="tessera-session", daemon=True)
        self._ticker.start()
        if self._stacks is not None:
            self._stacks.start()
        return self

    __enter__ = start

    def begin_tracing(self) -> None:
        """Start tracing now, if the session was made to wait for this call."""
        if self._tracing is not None and not self._tracing.has_begun and not self._stopped:
            self._tracing.begin(self.steps)
            if self._modules is not None:
                self._modules.install()

    @property
    def tracing(self) -> bool:
        """Whether tracing was started, even if it still waits for its steps."""
        return self._tracing is not None and self._tracing.has_begun

    def next_step_begins(self, now_ns: int | None) -> None:
        """Set where the next step begins; what came before is in no step. None: unknown, so the step gets no region."""
        self._step_ns = now_ns or 0

    @property
    def sees_gpu(self) -> bool:
        """Whether any sensor shows a GPU; does not initialise a driver's runtime."""
        domains = self._monitor.sampler.domains if self._monitor is not None else []
        return any(d.device.is_gpu for d in domains)

    def set(self, key: str, value: Any) -> None:
        """Keep a fact in the run file."""
        if self._writer is not None:
            self._writer.set(key, value)

    def abandon(self) -> None:
        """Give up the session in a forked child, which has neither its threads nor its file nor Kineto."""
        self._stopped, self._tracing, self._summary = True, None, None

    def stop(self) -> None:
        """Stop recording, write the rest and run the exporters. Safe to call twice."""
        writer = self._writer
        if writer is None or self._stopped or os.getpid() != self._pid:
            return
        self._stopped = True
        install(None)
        ending.cancel_exit()
        self._end_ns, self._end_mono_ns = time.time_ns(), time.monotonic_ns()
        with contextlib.ExitStack() as rest:  # runs every callback, even if another one fails
            rest.callback(writer.close)
            rest.callback(self._write_facts, writer)
            rest.callback(self._write_clock, writer)
            rest.callback(self._finish_feed)
            rest.callback(self._stop_ticker)
            if self._tracing is not None:
                rest.callback(self._tracing.end)
            if self._modules is not None:
                rest.callback(self._modules.remove)
            if self._stacks is not None:  # runs first: ending the session is not the program's work
                rest.callback(self._stop_stacks, writer, self._stacks)
            ending.wait_for_device()
            self._end_ns, self._end_mono_ns = time.time_ns(), time.monotonic_ns()
            if self._scope is not None:
                self._scope.__exit__(None, None, None)
        self._export()

    def drop(self) -> None:
        """Close the file without the rest of the trace, after a `stop` that was interrupted."""
        writer = self._writer
        if writer is not None and not writer.closed:
            writer.drop_timelines()
            with contextlib.closing(writer):
                self._write_facts(writer)

    def _finish_feed(self) -> None:
        if self._feed is not None:
            self._feed.finish(self._end_mono_ns)

    def _stop_ticker(self) -> None:
        self._done.set()
        if self._ticker is not None:
            self._ticker.join()

    def _stop_stacks(self, writer: RunWriter, stacks: StackSampler) -> None:
        stacks.stop()
        writer.add_stacks(stacks.take())
        writer.set("stack_interval_s", stacks.period_s)
        self.notes += filter(None, [stacks.explain_rare()])

    def _write_clock(self, writer: RunWriter) -> None:
        """Compare clocks once more. After an interrupt this may fail: other ranks may have ended."""
        if self._clock is None:
            return
        from .ranks.clocks import settle

        try:
            end = _compare_clocks()
        except (MeasurementError, RuntimeError) as exc:  # the process group is gone, or a rank is
            end = None
            self.notes.append(f"clocks were compared only at the start: {exc}")
        writer.set("clock", settle(self._clock, end).to_dict())

    def _write_facts(self, writer: RunWriter) -> None:
        from ..timeline.columns import Builder

        with contextlib.suppress(RecordingError):  # `close` raises it again
            writer.flush()
        self.notes += writer.stalls
        if self._feed is not None and self._feed.clock_steps:
            self.notes.append("the wall clock was set during the run: times before and after it do not fit together")
        if self._summary is not None:
            writer.set("summary", self._summary.to_json())
        if self._tracing is not None:
            self.notes += self._tracing.notes
            if self._schedule is not None and self._tracing.has_begun:
                self.notes += filter(None, [self._schedule.describe_missed(self.steps)])
            for key in ("tracing_s", "pauses", "collectors", "mode"):
                writer.set(key, getattr(self._tracing, key))
        self.notes = list(dict.fromkeys(self.notes))  # after an interrupt this runs twice
        self.notes.sort(key=lambda note: kind_of(note) == "no_accelerator")  # a screen shows the first
        if self._cpu_use is not None:
            writer.set("cpu_use", self._cpu_use.to_fact())
        writer.set("windows", self._windows)
        writer.set("end_ns", self._end_ns)
        writer.set("notes", self.notes)
        said = Builder()  # readers look for notes in timelines
        said.notes = list(self.notes)
        writer.add_timeline(said.build())

    def _export(self) -> None:
        """Run every exporter, then raise the first error; the run file is already complete."""
        errors: list[TesseraError] = []
        if self._exporters:
            recording = self.recording()
            try:
                recording.energy()
            except TesseraError as exc:
                self.notes.append(f"exported without joules: {exc.what}")
            for exporter in self._exporters:
                try:
                    exporter.write(recording)
                except TesseraError as exc:
                    errors.append(exc)
        if errors:
            raise errors[0]

    def _tick(self) -> None:
        """On a thread, a few times a second: write what has come, and ask for what is due."""
        summary_s = time.monotonic()
        writer = self._writer
        assert writer is not None
        while not self._done.wait(PULL_S):
            if self._feed is not None:
                self._feed.pull()
            if self._cpu_use is not None:
                self._cpu_use.poll()
            if self._stacks is not None:
                writer.add_stacks(self._stacks.take())
            if self._tracing is not None:
                self._tracing.tick(time.time_ns())
            if self._summary is not None and time.monotonic() - summary_s > SUMMARY_S:
                summary_s = time.monotonic()
                writer.set("summary", self._summary.to_json())

    # -- what the program says of itself -----------------------------------------------------------------------------

    def add_region(self, name: str, start_ns: int, end_ns: int, thread: int, *, is_apart: bool = False) -> None:
        """Add a region that has ended (epoch ns, native thread number). `is_apart`: not inside another of its name."""
        if self._summary is not None:
            self._summary.add_row("region", name, end_ns - start_ns)
        elif self._writer is not None:
            self._writer.add_row("region", name, start_ns, end_ns, value=APART if is_apart else math.nan, thread=thread)
        if self._tracing is not None and end_ns >= self._tracing.due_ns:
            self._tracing.boundary(end_ns)

    def mark(self, name: str) -> None:
        """Put a moment on the timeline. `mark("start/x")` and, later, `mark("end/x")` make a region x."""
        now_ns, thread = time.time_ns(), threading.get_native_id()
        self.note_edge()
        if self._summary is not None:
            self._summary.add_row("mark", name, 0)
        elif self._writer is not None:
            self._writer.add_row("mark", name, now_ns, now_ns, thread=thread)
        edge, _, rest = name.partition("/")
        if edge == "start" and rest:
            self._marks[rest] = now_ns
        elif edge == "end" and rest in self._marks:
            self.add_region(rest, self._marks.pop(rest), now_ns, thread)
        elif self._tracing is not None:
            self._tracing.boundary(now_ns)

    def counter(self, name: str, value: float, unit: str = "") -> None:
        """Put a number on the timeline."""
        now_ns = time.time_ns()
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ArgumentError(f"value={value!r} of the counter {name!r} is not a number") from None
        if self._summary is not None:
            self._summary.add_counter(name, number, unit)
        elif self._writer is not None:
            self._writer.add_row("counter", name, now_ns, now_ns, value=number, unit=unit)

    def step(self) -> None:
        """End a step of the program: add a region `step_N` and tell the schedule."""
        self.end_step(time.time_ns())

    def end_step(self, now_ns: int) -> None:
        """End a step at a time; it began where the step before ended."""
        if self._stopped:
            return
        self.note_edge()
        begun_ns = self._step_ns
        name, self.steps, self._step_ns = f"step_{self.steps}", self.steps + 1, now_ns
        if self._summary is not None:
            self._summary.add_row("region", name, now_ns - begun_ns if begun_ns else 0)
        elif self._writer is not None and begun_ns:
            self._writer.add_row("region", name, begun_ns, now_ns, thread=threading.get_native_id())
        if self._tracing is not None and self._tracing.has_begun:
            self._tracing.step(self.steps)

    def deliver(self, timeline: Timeline, start_ns: int, end_ns: int) -> None:
        """Take the rows of a window of the trace, on the thread that read them."""
        assert self._writer is not None
        if self._summary is not None:
            self._summary.add_window(timeline, start_ns, end_ns)
        else:
            self.add_rows(timeline)
            if self._modules is not None:
                self.add_rows(self._modules.take())
        if self._windows and self._windows[-1][0] == start_ns:
            self._windows.pop()  # the same window, continued
        bisect.insort(self._windows, (start_ns, end_ns))  # a long window may be read after a later, short one
        self._writer.set("windows", self._windows)
        if self._summary is not None and len(self._windows) > MAX_WINDOWS:
            # A summary may last for days: the first and the last window are enough.
            del self._windows[1:-1]

    def forget_windows(self) -> None:
        """Forget the windows of a summary so far."""
        if self._summary is not None:
            self._summary.forget_windows()
            self._windows.clear()

    def add_rows(self, timeline: Timeline) -> None:
        """Take traced rows that are not a window of their own."""
        if self._writer is not None and len(timeline):
            # Rows of kernels with the calls that launched them teach which operator launches which: never sum them up.
            self._writer.add_timeline(timeline, may_shrink=len(timeline.device_rows) == len(timeline))

    def flush(self) -> None:
        """Write what was recorded so far to the file, if that is possible now."""
        if self._writer is not None:
            with contextlib.suppress(RecordingError):  # the rows wait for the next try; `stop` reports the error
                self._writer.flush()

    def __repr__(self) -> str:
        state = "not started" if self._writer is None else "stopped" if self._stopped else "recording"
        return f"<Session {self.path}, {self.options.mode}, {state}>"
