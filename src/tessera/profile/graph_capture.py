"""Records the operators of CUDA graphs while the program captures them, since a replay has no operators.

::

    capture_begin ── operators (Kineto) and the host's calls (CUPTI) ── capture_end
                        launch    launch    launch                        │ the driver lists the graph's kernels
                          │         │         │                           │ in the order they were added
                       kernel 0  kernel 1  kernel 2  ◄── one by one ──────┘

A call of the host has no kernel's name, and a graph has no operators. Together they tell which operator added which
kernel (the column `captured`). `timeline.graph_alignment` finds those kernels in each replay.

A program that captures nothing pays nothing. A program that captures pays for Kineto's start and stop each time, until
`MOST_S` are spent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..monitor.scope import is_capturing
from ..timeline.columns import Timeline
from .captured_kernels import CapturedKernel, read_captured
from .kernel_tracing import KernelTracing
from .kineto_collector import KinetoCollector

MOST_S = 2.0
"""Most seconds of the program's time that all captures may cost after the first, which also starts Kineto. A server
that captures its model for 60 batch sizes gets operators for the first of them; the others' kernels have the same
names."""
_log = logging.getLogger("tessera")


class GraphCaptures:
    """Traces the operators of each capture of `torch.cuda.CUDAGraph`, which torch's own graphs go through too."""

    def __init__(
        self,
        torch: Any,
        collector: KinetoCollector,
        kernels: KernelTracing,
        add_rows: Callable[[Timeline], None],
        *,
        is_traced: Callable[[], bool],
    ) -> None:
        """`is_traced` returns whether the session already records operators at this moment."""
        self.notes: list[str] = []
        self.captured = 0
        """Graphs whose operators were recorded."""
        self.tracing_s = 0.0
        self._torch = torch
        self._class = torch.cuda.CUDAGraph
        self._original = (self._class.capture_begin, self._class.capture_end)
        self._collector = collector
        self._kernels = kernels
        self._add_rows = add_rows
        self._is_traced = is_traced
        self._open = 0  # open captures of all threads
        self._failed = False
        self._first_s = 0.0  # how long the first capture took us
        self._thread: int | None = None  # the thread whose capture is being recorded

    @property
    def recording(self) -> bool:
        """Whether Kineto records a capture at this moment."""
        return self._collector.recording

    def install(self) -> None:
        begin, end = self._original

        def capture_begin(this: Any, *args: Any, **kwargs: Any) -> Any:
            self._run_guarded(self._begin)
            self._open += 1
            try:
                return begin(this, *args, **kwargs)
            except BaseException:
                self._open -= 1
                self._end_own(())
                raise

        def capture_end(this: Any) -> Any:
            captured: list[CapturedKernel] = []
            if self._thread == threading.get_ident():
                self._run_guarded(lambda: captured.extend(read_captured(self._torch.cuda.current_stream().cuda_stream)))
            try:
                return end(this)
            finally:
                self._open -= 1
                self._end_own(captured)

        self._class.capture_begin, self._class.capture_end = capture_begin, capture_end

    def remove(self) -> None:
        """Stop watching, and end a capture that the program never ended."""
        self._class.capture_begin, self._class.capture_end = self._original
        if self._thread is not None:
            self._run_guarded(lambda: self._end(()))

    def _begin(self) -> None:
        profiler_runs = getattr(self._torch.autograd.profiler, "_is_profiler_enabled", False)
        if self._open or not self._kernels.running or is_capturing():
            return  # to wait for the device would break the capture of another thread
        if not self._is_traced():
            is_spent = self._first_s > 0 and self.tracing_s - self._first_s >= MOST_S
            if profiler_runs or self._failed or is_spent:
                return
            self._time(self._collector.start)
        self._thread = threading.get_ident()
        self._time(self._kernels.begin_capture)

    def _end_own(self, captured: Sequence[CapturedKernel]) -> None:
        if self._thread == threading.get_ident():
            self._run_guarded(lambda: self._end(captured))

    def _end(self, captured: Sequence[CapturedKernel]) -> None:
        self._thread = None
        self._time(lambda: self._kernels.end_capture(captured))
        self.captured += bool(captured)
        if self._collector.recording:
            self._time(lambda: self._add_rows(self._collector.stop().timeline()))
        self._first_s = self._first_s or self.tracing_s

    def _time(self, call: Callable[[], None]) -> None:
        begun_s = time.perf_counter()
        try:
            call()
        finally:
            self.tracing_s += time.perf_counter() - begun_s

    def _run_guarded(self, call: Callable[[], None]) -> None:
        """Call it, and note an error: a graph without operators must not cost the program anything."""
        try:
            call()
        except Exception as exc:  # noqa: BLE001  (the program's capture must not fail because of us)
            self._failed = True
            self.notes.append(f"operators of CUDA graphs could not be recorded: {exc}")
            _log.debug("operators of CUDA graphs", exc_info=exc)
