"""Records every kernel, copy and set of the whole program by CUPTI, without operators: about 1% of a step.

CUPTI starts with CUDA and stops with the session. Kineto registers its own callbacks and clock with CUPTI, so ours are
registered again after each time that Kineto has run (`handed_over`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from ..errors import TesseraError
from ..monitor.scope import synchronize
from .captured_kernels import CapturedKernel, tie_captured
from .cupti_collector import CuptiCollector
from .cupti_timeline import read_records
from .kineto_collector import add_stream_names, drop_unasked, find_sensor_numbers, name_streams, renumber_devices
from .options import SessionOptions
from .tracing import Deliver

FLUSH_S = 0.25
"""How often CUPTI is asked for complete buffers, if the session's thread ticks that often."""
_log = logging.getLogger("tessera")


class KernelTracing:
    """Collects CUPTI's records from the first use of CUDA on, and delivers them as rows a few times a second."""

    def __init__(self, options: SessionOptions, deliver: Deliver, *, is_taken: Callable[[], bool]) -> None:
        """`is_taken` returns whether Kineto records kernels at this moment; CUPTI must not be started then."""
        self.notes: list[str] = []
        self.why_nothing: str | None = None
        """Why no records are collected; None while they are, or may still be."""
        self.tracing_s = 0.0
        self.kept = 0
        self._options = options
        self._deliver = deliver
        self._collector: CuptiCollector | None = None
        self._lock = threading.Lock()  # `tick` and the others are called by different threads
        self._numbers: list[int] | None = None
        self._streams: dict[str, str] = {}
        self._is_taken = is_taken
        self._starts_later = self._is_paused = self._is_held = False
        self._began_ns = 0
        self._flushed_s = 0.0
        self._over = False

    @property
    def running(self) -> bool:
        """Whether records are being collected."""
        return self._collector is not None and not self._over and not self._is_paused

    def begin(self) -> None:
        """Start together with CUDA: at once if CUDA is initialised, else when the program first uses it."""
        import torch

        if torch.version.cuda is None:
            self.why_nothing = "this torch has no CUDA"
        elif getattr(torch.cuda._tls, "is_initializing", False):
            self._start()  # we are inside CUDA's own start (`tessera run`), whose lock `_lazy_call` would wait for
        else:  # to ask for a GPU here would initialise CUDA, after which the program must not fork
            torch.cuda._lazy_call(self._start)

    def _start(self) -> None:
        self._starts_later = self._is_taken()
        if self._over or self._starts_later:
            return
        try:
            collector = CuptiCollector()
            collector.start()
        except TesseraError as exc:
            self.why_nothing = f"{exc.what} ({exc.why})" if exc.why else exc.what
            return
        self._numbers = find_sensor_numbers()
        self._began_ns, self._flushed_s = time.time_ns(), time.monotonic()
        self._collector = collector

    @contextlib.contextmanager
    def handed_over(self, *, calls: bool) -> Iterator[None]:
        """Let another client use CUPTI in the block; afterwards collect again, with the host's `calls` or without."""
        if not self.running:
            yield
            return
        synchronize()  # the records of running kernels would be lost
        with self._lock:
            self._bring(CuptiCollector.stop)
            try:
                yield
            finally:
                self._run_guarded(lambda collector: collector.start(calls=calls))

    def pause(self) -> None:
        """Stop collecting, because a profiler of the program takes CUPTI."""
        if self.running:
            synchronize()
            with self._lock:
                self._is_paused = True
                self._bring(CuptiCollector.stop)
                self.notes.append("the program ran a profiler of its own: kernels of that time are not recorded")

    def resume(self) -> None:
        """Collect again: the program's profiler has ended."""
        with self._lock:
            if self._is_paused:
                self._is_paused = False
                self._run_guarded(CuptiCollector.start)

    def begin_capture(self) -> None:
        """Prepare for the capture of a CUDA graph: hold the calls back, so that they come in one piece."""
        synchronize()  # a forced flush hands over running kernels without their times
        with self._lock:
            self._bring(lambda collector: collector.flush(forced=True))
            self._is_held = True

    def end_capture(self, captured: Sequence[CapturedKernel]) -> None:
        """Deliver the calls of a capture that has ended, with the names of the kernels that they launched."""
        synchronize()
        with self._lock:
            self._is_held = False
            self._bring(lambda collector: collector.flush(forced=True), captured)

    def tick(self) -> None:
        """Deliver complete buffers; the session's thread calls this a few times a second."""
        if self._starts_later:
            self._start()
        if self.running and not self._is_held and time.monotonic() - self._flushed_s >= FLUSH_S:
            with self._lock:
                self._flushed_s = time.monotonic()
                self._bring(CuptiCollector.flush)

    def end(self) -> None:
        """Stop after the device has finished its work."""
        if self.running:
            synchronize()
            self._streams = name_streams()
        with self._lock:
            collector = self._collector
            if collector is None and self.why_nothing is None:
                self.why_nothing = "the program did not use CUDA"
            self._bring(CuptiCollector.stop)
            if collector is not None and collector.dropped and not self._over:
                self.notes.append(f"{collector.dropped} kernels and copies are missing: CUPTI had no buffer for them")
            self._over = True

    def _bring(self, call: Callable[[CuptiCollector], None], captured: Sequence[CapturedKernel] = ()) -> None:
        begun = time.thread_time()

        def bring(collector: CuptiCollector) -> None:
            call(collector)
            taken = collector.take()
            timeline = read_records(taken) if taken is not None else None
            if timeline is not None and len(timeline):
                if captured and not tie_captured(timeline, captured):
                    self.notes.append("the kernels of a CUDA graph have no operators: its launches were not all seen")
                self.kept += len(timeline)
                add_stream_names(timeline, self._streams)
                if self._numbers is not None:
                    renumber_devices(timeline, self._numbers)
                self._deliver(drop_unasked(timeline, self._options), self._began_ns, time.time_ns())

        self._run_guarded(bring)
        self.tracing_s += time.thread_time() - begun

    def _run_guarded(self, call: Callable[[CuptiCollector], None]) -> None:
        """Call it. If it fails, end the recording with a note: the program must not fail because of us."""
        if self._collector is None or self._over:
            return
        try:
            call(self._collector)
        except (TesseraError, OSError) as exc:
            self._over = True
            if self.kept:
                self.notes.append(f"kernels were recorded until CUPTI failed: {exc}")
            else:
                self.why_nothing = str(exc)
            with contextlib.suppress(TesseraError):
                self._collector.stop()
            _log.warning("recording by CUPTI ended early", exc_info=exc)
