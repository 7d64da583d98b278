"""Decides how a session ends when the program does not end it, and when the user does not want to wait.

::

    sys.exit, an exception    atexit ──► Session.stop, before torch is taken down: Kineto must not record then
    Ctrl-C                    the script ends, its trace is read and written
    Ctrl-C while writing      "one moment"
    Ctrl-C once more          the trace is dropped; screen and file say so
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .recorder import Session

STDERR = 2
SAME_S = 0.5
"""Signals this close together count as one: a killpg reaches us directly and again through `tessera run`."""
DROPPED = "the trace was dropped by a further Ctrl-C while it was being written: regions and power are here"


def stop_at_exit(session: Session) -> None:
    """Stop a session when the interpreter ends, unless it has been stopped by then.

    Call this once all parts of the session run: exit handlers run last first, and the run file, the sensors and torch
    have handlers of their own. If Kineto records while torch is taken down, the process segfaults (torch 2.13).
    """
    atexit.register(_stop, session)


def cancel_exit() -> None:
    """Undo `stop_at_exit`: the session has ended."""
    atexit.unregister(_stop)


def _stop(session: Session) -> None:
    try:
        session.stop()
    except Exception as exc:  # noqa: BLE001  (we must not change the program's exit code)
        sys.stderr.write(f"tessera: the session was not ended by the program, and could not be written whole: {exc}\n")


def wait_for_device() -> None:
    """Wait until the devices are idle. Ignore a failure of the device: the program gets the same error itself."""
    from ..monitor.scope import synchronize

    with contextlib.suppress(RuntimeError):
        synchronize()


@contextlib.contextmanager
def hold_interrupts() -> Iterator[None]:
    """Delay a SIGINT of the main thread to the end of the block. During Kineto's stop it would lose all operators."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: held.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        before(signal.SIGINT, held[0])


class Patience:
    """Handles SIGINT while a trace is read and written: the first one gets an answer, the next one drops the trace.

    As a handler it raises KeyboardInterrupt once, when the trace is dropped, and then ignores further signals.
    """

    def __init__(self, drop: Callable[[], None], *, say: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._drop = drop
        self._say = say
        self._clock = clock
        self._heard_s = -math.inf
        self._asked = False
        self._before: Any = None

    def hold(self) -> None:
        """Take SIGINT over, unless it is ignored in this process (a shell's background job). Safe to call twice."""
        if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, self.on_interrupt):
            return
        self._before = signal.signal(signal.SIGINT, self.on_interrupt)

    def is_new_interrupt(self) -> bool:
        """Return whether the interrupt that has just come is a new one, not an echo of the one before."""
        now_s = self._clock()
        if now_s - self._heard_s <= SAME_S:
            return False
        self._heard_s = now_s
        return True

    def release(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if not self.is_new_interrupt():
            return
        if not self._asked:
            self._asked = True
            self.tell("one moment, writing the trace (Ctrl-C again to drop it)")
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._drop()
        raise KeyboardInterrupt

    def tell(self, line: str) -> None:
        """Write to standard error without Python's buffers: the signal may have come in the middle of a write."""
        if self._say:
            with contextlib.suppress(OSError):
                os.write(STDERR, f"\ntessera: {line}\n".encode())


def end_with_parent() -> None:
    """Ask Linux for a SIGTERM when `tessera run` is killed: its launcher then takes this rank for ended."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG (linux/prctl.h)
