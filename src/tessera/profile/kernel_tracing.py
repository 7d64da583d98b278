"""Every kernel, copy and set of the whole program by CUPTI: no operators, about 1% of a step.

It has the calls of `Tracing`, which traces windows by Kineto. There are no windows here: CUPTI starts with CUDA and
stops with the session.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import TesseraError
from ..monitor.scope import synchronize
from .cupti_collector import CuptiCollector
from .cupti_timeline import read_records
from .tracing import NEVER, Deliver

FLUSH_S = 0.8
"""How often CUPTI is asked for what is complete: a killed program loses that much, and a buffer that was not full."""
_log = logging.getLogger("tessera")


class KernelTracing:
    """Keeps CUPTI's records from the first use of CUDA on, and delivers them as rows about once a second."""

    def __init__(self, deliver: Deliver, *, make_collector: Callable[[], CuptiCollector] = CuptiCollector) -> None:
        self.notes: list[str] = []
        self.due_ns = NEVER
        self.spent_s = 0.0
        self._deliver = deliver
        self._make_collector = make_collector
        self._collector: CuptiCollector | None = None
        self._lock = threading.Lock()  # `tick` and `end` are called by different threads
        self._began_ns = 0
        self._flushed_s = 0.0
        self._begun = self._over = False

    @property
    def has_begun(self) -> bool:
        return self._begun

    def begin(self, step: int = 0) -> None:
        """Start with CUDA: at once where it runs, else when the program first uses it."""
        import torch

        self._begun = True
        if torch.version.cuda is None:
            self._say_why_nothing("this torch has no CUDA")
        elif getattr(torch.cuda._tls, "is_initializing", False):
            self._start()  # `tessera run` begins within CUDA's own start, whose lock `_lazy_call` would wait for
        else:  # asking for a GPU here would initialise CUDA, after which the program may not fork
            torch.cuda._lazy_call(self._start)

    def _start(self) -> None:
        if self._over:
            return
        try:
            collector = self._make_collector()
            collector.start()
        except TesseraError as exc:
            self._say_why_nothing(f"{exc.what} ({exc.why})" if exc.why else exc.what)
            return
        self._began_ns, self._flushed_s = time.time_ns(), time.monotonic()
        self._collector = collector

    def _say_why_nothing(self, why: str) -> None:
        self.notes.append(f"no kernels were traced: {why}; mode='timeline' traces by Kineto")

    def work_begins(self) -> None:
        """Nothing changes: everything is traced."""

    def step(self, step: int) -> None:
        """Nothing changes: everything is traced."""

    def boundary(self, now_ns: int, *, of_step: bool = False) -> None:
        """Nothing changes: everything is traced."""

    def tick(self, now_ns: int) -> None:
        """Called by the session's thread a few times a second: bring what is complete to the file."""
        if self._collector is not None and time.monotonic() - self._flushed_s >= FLUSH_S:
            with self._lock:
                if not self._over:
                    self._flushed_s = time.monotonic()
                    self._bring(self._collector, self._collector.flush)

    def finish(self, why: str | None = None) -> None:
        """Stop tracing. The program and all other recording go on."""
        with self._lock:
            if self._over:
                return
            self._over = True
            if why:
                self.notes.append(why)
            collector = self._collector
            if collector is None:
                if not self.notes:
                    self._say_why_nothing("the program did not use CUDA")
                return
            self._bring(collector, collector.stop)
            if collector.dropped:
                self.notes.append(f"{collector.dropped} kernels and copies are missing: CUPTI had no buffer for them")

    def end(self) -> None:
        """Stop tracing, with what the device still runs."""
        if self._collector is not None and not self._over:
            synchronize()
        self.finish()

    def _bring(self, collector: CuptiCollector, call: Callable[[], Any]) -> None:
        begun = time.thread_time()
        try:
            call()
            timeline = read_records(collector.take())
            if len(timeline):
                self._deliver(timeline, self._began_ns, time.time_ns())
        except (TesseraError, OSError) as exc:  # the program must not fail because of us
            self._over = True
            self.notes.append(f"tracing ended early: {exc}")
            _log.warning("tracing by CUPTI ended early", exc_info=exc)
        self.spent_s += time.thread_time() - begun
