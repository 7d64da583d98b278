"""Why a job is told to move: a file, a signal, a temperature, or any function that is polled.

`OrderWatch` polls in its own thread, so that a step only reads a flag.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import TesseraError
from .job_checkpoint import OrderKind, read_json, write_json
from .leases import JobState, JobStatus

_log = logging.getLogger("tessera")
POLL_S = 1.0
# Assumed: after so many seconds above the threshold, the cause is not just a fan that has yet to catch up.
HOLD_S = 10.0


class JobGovernor(Protocol):
    """The method of a governor that is used here: `GovernorClient` of tessera.fleet.governor."""

    def show_job(self, job: str) -> JobStatus: ...


Source = Callable[[], OrderKind | None]
"""A function that is polled; None: no order."""


class OverheatSource:
    """Orders a move once a temperature has been above the threshold for `hold_s` without a break."""

    def __init__(
        self,
        read_temperature_c: Callable[[], float | None],
        threshold_c: float,
        *,
        hold_s: float = HOLD_S,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._threshold_c, self._hold_s, self._clock_s = read_temperature_c, threshold_c, hold_s, clock_s
        self._since_s: float | None = None

    def __call__(self) -> OrderKind | None:
        """Read the temperature once; an unknown one counts as neither hot nor cool."""
        temperature_c = self._read()
        if temperature_c is None:
            return None
        if temperature_c <= self._threshold_c:
            self._since_s = None
            return None
        now_s = self._clock_s()
        self._since_s = now_s if self._since_s is None else self._since_s
        return "overheat" if now_s - self._since_s >= self._hold_s else None


def read_hottest_c() -> float | None:
    """Return the hottest device of this machine, from the process's own monitor; None if no sensor tells."""
    from ..monitor.core import default

    sampler = default().sampler
    readings = [t for t in (sampler.latest(d.name) for d in sampler.domains) if t is not None]
    parts = [c for t in readings for c in (t.temperature_c, t.memory_temperature_c) if c is not None]
    return max(parts, default=None)


class ShedSource:
    """Orders a move when the governor sheds the job, which leaves it no watts on this node."""

    def __init__(self, governor: JobGovernor, job: str) -> None:
        self._governor, self._job = governor, job

    def __call__(self) -> OrderKind | None:
        """Ask the governor once."""
        return "request" if self._governor.show_job(self._job).state is JobState.SHED else None


class OrderFile:
    """`order.json` in the job's folder: {"ranks": 2, "node": "n7"}; both keys may be missing."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "order.json"

    def __call__(self) -> OrderKind | None:
        """Look for the file once."""
        return "request" if self.path.exists() else None

    def write(self, *, ranks: int | None = None, node: str | None = None) -> None:
        """Order a move."""
        write_json(self.path, {"ranks": ranks, "node": node})

    def take(self) -> dict[str, Any]:
        """Return the order and remove it; empty if there is none."""
        content = read_json(self.path) or {}
        self.path.unlink(missing_ok=True)
        return content


class OrderWatch:
    """Asks the sources until one orders a move. A signal orders a move at once."""

    def __init__(
        self, sources: Sequence[Source], signals: Sequence[signal.Signals] = (), poll_s: float = POLL_S
    ) -> None:
        self._sources, self._signals, self._poll_s = sources, signals, poll_s
        self._ended = threading.Event()
        self._order: OrderKind | None = None

    @property
    def order(self) -> OrderKind | None:
        """Return the first order that came; later ones do not replace it."""
        return self._order

    def request(self, kind: OrderKind = "request") -> None:
        """Order a move; an earlier order stays."""
        self._order = self._order or kind

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Ask the sources, and handle signals, inside the `with`. Only the main thread can set signal handlers."""
        with contextlib.ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                for number in self._signals:
                    old = signal.signal(number, lambda *_: self.request("signal"))
                    stack.callback(signal.signal, number, old)
            if self._sources:
                thread = threading.Thread(target=self._ask, name="tessera-orders", daemon=True)
                thread.start()
                stack.callback(thread.join)
                stack.callback(self._ended.set)  # before the join: callbacks run in reverse order
            yield

    def _ask(self) -> None:
        while self._order is None:
            for source in self._sources:
                try:
                    kind = source()
                except (TesseraError, OSError) as error:  # a governor that does not answer orders nothing
                    _log.debug("a source of orders failed: %s", error)
                    continue
                if kind is not None:
                    self.request(kind)
            if self._ended.wait(self._poll_s):
                return
