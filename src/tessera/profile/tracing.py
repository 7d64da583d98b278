"""Decides when Kineto runs: opens and closes windows at the program's own boundaries.

::

    no schedule     |<------------------------ one window ------------------------>|
    flush_s=5       |<-- window -->|<-- window -->|<-- window -->|                      each read meanwhile
    schedule        ....warm|<- active ->|.........warm|<- active ->|
    paced           |<- 3 steps ->|................................|<- 3 steps ->|      at most 1% of the time spent
    paced, lead     |~~ setup, forgotten ~~|<- 3 steps ->|.........................     from the first step on
    steady          ........|<- 3 steps ->|.......................................      kernels meanwhile by CUPTI

Closing a window costs time of the program's thread: measured on 2 cores of a Xeon, 7 us per event in Kineto's stop (a
second for 150 000), and about 5 us more of the interpreter's lock per event while it is exported and read in the
background. GPT-2's training makes 12 000 events a step. That is the cost of `flush_s`, and the reason why `paced`
waits.

Stop and export each hold the lock from begin to end. (With torch 2.13 and 300 000 events, a thread that wanted to run
every millisecond ran once in the 2.4 s of the stop and once in the 0.7 s of the export; our reader lets it run all the
time.) So no sensor is read meanwhile, and the driver's ring of power samples holds only 2.4 s. `before_stall` is called
right before each of the two, to read the ring; what a longer stop loses then lies after the window. There is no good
way to hold the lock for less time: torch's bindings keep it, a fork of a process with CUDA and threads may hang, and
calling the C++ directly would end the program at its first exception (a full disk).
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Callable

from ..monitor.scope import is_capturing, synchronize
from ..notes import Note
from ..schema import Pause
from ..timeline.columns import Timeline
from .ending import hold_interrupts
from .kineto_collector import Finished, KinetoCollector
from .options import Mode
from .torch_hooks import MainThread, OpenRanges, OtherProfilers, model_runs
from .tracing_schedule import SteadySteps, TracingSchedule

_log = logging.getLogger("tessera")

NEVER = 1 << 62
# The main thread waits for a reader in pieces of this length. A Ctrl-C that the kernel hands to another thread is
# handled when the main thread next runs Python; one long wait would delay that until the trace is read.
_LOOK_S = 0.2
PACED_STEPS = 3
PACED_NS = 1_000_000_000
# Share of the program's time that windows may cost: opening, closing, exporting and reading them.
PACED_BUDGET = 0.01
# If the program has not come to a boundary after this time (without and with steps), its main thread is asked.
OVERDUE_NS = (300_000_000, 10_000_000_000)
# A trace with a limit has at most this many steps for each of its seconds. A hundred short steps tell as much as
# thousands, whose million events would stop the program for seconds when they are read. And steps that are left
# untraced tell what tracing costs.
LIMIT_STEPS_PER_S = 20.0
# How long a trace with a limit may run before a model is seen to run: importing, loading, moving weights.
LEAD_NS = 30_000_000_000
_AFTER = "after that there is power, but no events"
Deliver = Callable[[Timeline, int, int], None]
"""Takes a window's rows, and its start and end in epoch nanoseconds; runs on its own thread."""


class Tracing:
    """A `Tracer` that opens and closes windows of a collector."""

    def __init__(
        self,
        collector: KinetoCollector,
        deliver: Deliver,
        *,
        schedule: TracingSchedule | None = None,
        steady: SteadySteps | None = None,
        paced: bool = False,
        flush_s: float | None = None,
        limit_s: float | None = None,
        lead: bool = False,
        before_stall: Callable[[], None] = lambda: None,
        count_kernels: Callable[[], int] = lambda: 0,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self.collector = collector
        self.mode: Mode = "summary" if paced else "operators"
        self.notes: list[str] = collector.notes
        self.due_ns = NEVER
        """When the window is to be opened or closed (epoch): the first boundary after that does it."""
        self.tracing_s = 0.0
        self.pauses: list[Pause] = []
        self._deliver = deliver
        self._schedule = schedule
        self._steady = steady if schedule is None else None
        self._count_kernels = count_kernels
        self._paced = paced and schedule is None
        self._flush_ns = None if flush_s is None else round(flush_s * 1e9)
        self._limit_ns = None if limit_s is None else round(limit_s * 1e9)
        self._most_steps = math.inf if limit_s is None or schedule or steady else limit_s * LIMIT_STEPS_PER_S
        self._lead = lead
        self._saw_setup = self._paced and lead  # paced windows are taken for all of the work: none may show the setup
        self._forget = forget
        self._before_stall = before_stall
        self._thread: int | None = None
        self._hooks: list[OpenRanges | OtherProfilers] = []
        self._ranges: OpenRanges | None = None
        self._main = MainThread(self._on_step)
        self._readers: list[threading.Thread] = []
        self._opened_ns = 0
        self._since_ns = 0  # windows that opened earlier are forgotten
        self._starts_over = False
        self._until_ns = NEVER
        self._cost_ns = 0
        self._steps = 0  # steps in this window
        self.traced_steps = 0.0
        """Steps in windows; a step that is partly in a window counts by its share of time."""
        self._step_ns = 0  # when this step began
        self._step_traced_ns = 0  # time of this step in windows that have closed within it
        self._step_is_whole = False  # a window was open when the step began, and still is
        self._stepped = False  # the program has steps, and windows begin and end with them
        self._over = self._ends = False

    # -- what the session calls ------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        return self._thread is not None

    def begin(self, step: int = 0) -> None:
        """Start, in the way the schedule says for a step."""
        action = self._schedule.action(step) if self._schedule else "wait" if self._steady and self._lead else "active"
        if action == "warmup":
            self.collector.prepare()
        elif action != "wait":
            self._open()
        self._begin_step()
        self._thread = threading.get_ident()
        import torch  # not earlier: a schedule that waits does not need it

        self._hooks = [
            ranges := OpenRanges(torch),
            OtherProfilers(torch, self._yield, lambda: self.collector.starting),
        ]
        self._ranges = ranges
        for hook in self._hooks:
            hook.install()
        self._set_limit(max(self._limit_ns or 0, LEAD_NS) if self._lead else self._limit_ns or 0)

    @property
    def collectors(self) -> dict[str, str | None]:
        """Which library recorded kernels and operators."""
        by_kineto = "kineto" if self.has_begun else None
        return {"kernels": by_kineto, "operators": by_kineto, "why": None}

    def expect_steps(self) -> None:
        """Note that the program has an optimizer, so that its steps will be seen."""
        if self._steady is not None:
            self._steady.steps_expected = True

    def work_begins(self) -> None:
        """Note that the work to trace begins now; the time limit counts from here."""
        if self._steady is not None:
            self._steady.work_begins(time.time_ns())
        if self.has_begun:
            self._set_limit(self._limit_ns or 0)
            if self._saw_setup:
                self._starts_over, self.due_ns = True, 0

    def step(self, step: int) -> None:
        """Note that a step has ended and `step` begins."""
        if self._over or self._thread != threading.get_ident():
            return
        if not self._stepped:
            self._stepped = True
            self.work_begins()  # the first step compiles and allocates
            self._saw_setup = False
        self._steps += 1
        self._count_step(time.time_ns())
        self._move_window(step)
        self._begin_step()

    def _move_window(self, step: int) -> None:
        """Open or close the window at the end of a step, if that is due."""
        if self._schedule is not None:
            self._follow(self._schedule, step)
        elif self._steady is not None:
            self._follow_steady(self._steady, time.time_ns())
        elif self.traced_steps >= self._most_steps and not self._paced:
            self.finish(Note(f"tracing stopped after {self.traced_steps:.0f} steps: {_AFTER}", "time_limit"))
        elif self._paced and self.collector.recording and self._steps < PACED_STEPS and not self._starts_over:
            return
        else:
            if self._paced and self.collector.recording:
                self.due_ns = 0
            self.boundary(time.time_ns(), of_step=True)

    def _begin_step(self) -> None:
        self._step_ns, self._step_traced_ns, self._step_is_whole = time.time_ns(), 0, self.collector.recording

    def _count_step(self, now_ns: int) -> None:
        """Add the traced share of the step that ends; opening a window takes time of the step that is not traced."""
        if self.collector.recording:
            self._step_traced_ns += now_ns - max(self._opened_ns, self._step_ns)
        lasted_ns = max(now_ns - self._step_ns, 1)
        self.traced_steps += 1.0 if self._step_is_whole else min(self._step_traced_ns / lasted_ns, 1.0)

    def boundary(self, now_ns: int, *, of_step: bool = False) -> None:
        """Open or close a window if that is due: this is a suitable moment."""
        if now_ns < self.due_ns or self._over or self._thread != threading.get_ident() or is_capturing():
            return
        if (self._paced or self._steady) and self._stepped and not of_step:
            return
        if self._steady is not None:
            self._run_guarded(self.finish if self.collector.recording else self._open)
        elif self._starts_over:
            self._run_guarded(self._start_over)
        elif now_ns >= self._until_ns:
            if self._stepped and not of_step and now_ns < self._until_ns + OVERDUE_NS[True]:
                return  # first trace the present step to its end
            self.finish(Note(f"tracing stopped at its time limit: {_AFTER}", "time_limit"))
        elif not self.collector.recording:
            self._run_guarded(self._open)
        elif self._paced:
            self._run_guarded(self._close)
        elif any(r.is_alive() for r in self._readers):
            # The window before is still being read: do not let windows pile up.
            self.due_ns = min(now_ns + (self._flush_ns or 0), self._until_ns)
        else:
            self._run_guarded(self._close)
            self._run_guarded(self._open)

    def tick(self, now_ns: int) -> None:
        """Ask the main thread if a boundary is overdue; the session's thread calls this a few times a second."""
        main = threading.main_thread().ident
        if self._lead and model_runs(sys._current_frames().get(main or 0)):
            self._lead = False
            self.work_begins()
        self._look_for_work(now_ns)
        if not self._over and self._thread == main and now_ns > self.due_ns + OVERDUE_NS[self._stepped]:
            self._main.ask()

    def _look_for_work(self, now_ns: int) -> None:
        """Let the operators of a program without steps be traced once it is time for that."""
        steady = self._steady
        if steady is None or self._over or self._stepped or self.due_ns != NEVER:
            return
        if self._count_kernels():
            steady.work_begins(now_ns)  # for a program without a model, too
        if steady.is_due(now_ns):
            self.due_ns = now_ns

    def finish(self, why: str | None = None) -> None:
        """Stop tracing. The program and all other recording continue."""
        if self._over:
            return
        self._over, self.due_ns = True, NEVER
        if why:
            self.notes.append(why)
        self._run_guarded(self._close if self.collector.recording else self.collector.cancel)
        for hook in self._hooks:
            hook.remove()

    def end(self) -> None:
        """Stop tracing, and wait until all windows have been read."""
        self._ends = True
        if self.has_begun:
            self.finish()
        for reader in self._readers:
            while reader.is_alive():
                reader.join(_LOOK_S)

    # -- windows ---------------------------------------------------------------------------------------------------

    def _follow(self, schedule: TracingSchedule, step: int) -> None:
        before, now = schedule.action(step - 1), schedule.action(step)
        traced = now in ("active", "last")
        if self.collector.recording and (before == "last" or not traced):
            self._run_guarded(self._close)
        if schedule.over(step):
            self.finish()
        elif traced and not self.collector.recording:
            self._run_guarded(self._open)
        elif now == "warmup":
            self._run_guarded(self.collector.prepare)

    def _follow_steady(self, steady: SteadySteps, now_ns: int) -> None:
        if self.collector.recording:
            if self._steps >= steady.count or now_ns >= self.due_ns:
                self.finish()
        elif steady.step_ended(now_ns):
            self._run_guarded(self._open)

    def _open(self) -> None:
        t0 = time.perf_counter_ns()
        self.collector.start()
        self._cost_ns = time.perf_counter_ns() - t0
        self._opened_ns, self._steps = time.time_ns(), 0
        length_ns = PACED_NS if self._paced else self._flush_ns
        if self._steady is not None:
            length_ns = self._steady.find_length_ns(self._opened_ns, self._count_kernels())
        self.due_ns = min(NEVER if length_ns is None else self._opened_ns + length_ns, self._until_ns)

    def _start_over(self) -> None:
        """Forget what was traced before the work began, and trace from here."""
        self._starts_over = False
        if self.collector.recording:
            self._close(keep=False)
        self._since_ns, self.traced_steps = time.time_ns(), 0.0
        self._forget()
        self._open()

    def _close(self, *, keep: bool = True) -> None:
        t0 = time.perf_counter_ns()
        if self._ranges is not None:
            self._ranges.end_open()
        synchronize()  # Kineto would do it anyway; now the window ends when its last kernel ends
        now_ns, paused = time.time_ns(), time.perf_counter_ns()
        self._before_stall()
        finished = self.collector.stop()
        stopped = time.perf_counter_ns()
        if not self._ends:  # otherwise the program has ended, and does not wait
            self.pauses.append(Pause(now_ns, (stopped - paused) * 1e-9))
        self._cost_ns += stopped - t0
        self.due_ns = NEVER
        self._step_traced_ns += now_ns - max(self._opened_ns, self._step_ns)
        self._step_is_whole = False
        if not keep:
            finished.discard()
            return
        reader = threading.Thread(
            target=self._read, args=(finished, self._opened_ns, now_ns), name="tessera-trace", daemon=True
        )
        try:
            reader.start()
        except RuntimeError:  # the interpreter ends: Python 3.12 then starts no thread
            self._read(finished, self._opened_ns, now_ns)
            return
        self._readers = [r for r in self._readers if r.is_alive()] + [reader]

    def _read(self, finished: Finished, start_ns: int, end_ns: int) -> None:
        t0 = time.perf_counter_ns()
        try:
            self._before_stall()  # once more: no sensor was read during Kineto's stop
            timeline = finished.timeline()
            if start_ns >= self._since_ns:
                self._deliver(timeline, start_ns, end_ns)
        except Exception as exc:  # noqa: BLE001  (a lost window must not end the run)
            self.notes.append(f"a window of the trace could not be read: {type(exc).__name__}: {exc}")
            _log.warning("a window of the trace could not be read", exc_info=exc)
        self._cost_ns += time.perf_counter_ns() - t0
        self.tracing_s += self._cost_ns * 1e-9
        if self._paced:
            self.due_ns = time.time_ns() + max(round(self._cost_ns / PACED_BUDGET), PACED_NS)

    def _set_limit(self, limit_ns: int) -> None:
        if self._limit_ns is not None:
            old, self._until_ns = self._until_ns, time.time_ns() + limit_ns
            if self.due_ns in (old, NEVER) or self.due_ns > self._until_ns:
                self.due_ns = self._until_ns

    def _run_guarded(self, call: Callable[[], None]) -> None:
        """Call it. If it fails, end the trace with a note: the program's thread must not fail because of us."""
        if self._over and call == self._open:
            return
        try:
            with contextlib.nullcontext() if self._ends else hold_interrupts():
                call()
        except Exception as exc:  # noqa: BLE001  (torch's profiler asserts, too, and this is the program's own thread)
            self._over, self.due_ns = True, NEVER
            self.notes.append(f"tracing ended early: {str(exc) or type(exc).__name__}")

    def _yield(self) -> None:
        """End our trace when the program starts its own profiler: there is only one Kineto."""
        if self._thread == threading.get_ident():
            self.finish("the program started a profiler of its own: our trace ends there")

    def _on_step(self) -> None:
        self.boundary(time.time_ns(), of_step=True)
