"""What happens to holds when the process does not leave by the front door.

::

    exception, return    the `with` block itself
    sys.exit, the end    atexit, for holds of other threads
    SIGTERM/INT/HUP      put back, then the handler that was there; if that comes back, hold again
    kill -9, os._exit,   the watcher, a small process of its own (watch.py); if that was killed too, `tessera doctor
    a crash in C           --restore` or the next hold on that GPU
    fork                 the child holds nothing

Python runs signal handlers in the main thread between two of its steps. So a handler may come in the middle of our own
change of a GPU: it is then kept until that change is done (`critical`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ActuatorError
from . import lock
from .watch import start_time

if TYPE_CHECKING:
    from .hold import Hold

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
VARIABLE = "TESSERA_WATCHER"
"""Environment variable: "0" starts no watcher process."""

Handler = Callable[[int, Any], None]


@dataclass(slots=True)
class _Process:
    """What this process holds, and how far it is watched over."""

    holds: list[Hold] = field(default_factory=list)
    depth: int = 0  # of `critical`, in the main thread
    pending: list[tuple[Handler, int]] = field(default_factory=list)
    ours: dict[int, tuple[Handler, Any]] = field(default_factory=dict)  # our handler and the one before it
    watched_pid: int = 0
    at_exit: bool = False
    ending: bool = False


_process = _Process()


def watch_over(hold: Hold) -> None:
    """Before a hold changes anything: see that it ends with this process. One that is ending takes no more."""
    _process.holds.append(hold)  # first: whoever ends the process either sees it in the list, or is seen below
    while _process.ending:
        if threading.current_thread() is threading.main_thread():
            _process.holds.remove(hold)
            raise ActuatorError("nothing is changed any more", why="the process is ending", fix="hold it earlier")
        time.sleep(0.05)  # a thread that goes on while the process ends: it has nothing left to do
    if not _process.at_exit:
        _process.at_exit = True
        atexit.register(_at_exit)
    _install()
    _start_watcher()


def dismiss(hold: Hold) -> None:
    """The hold has ended and everything is put back."""
    if hold in _process.holds:
        _process.holds.remove(hold)
    if not _process.holds:
        _uninstall()


@contextlib.contextmanager
def critical() -> Iterator[None]:
    """Keep signals waiting while the body changes a GPU: their handlers would need the lock it holds."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread only, and wait for this one
        return
    _process.depth += 1
    try:
        yield
    finally:
        _process.depth -= 1
        while _process.depth == 0 and _process.pending:
            handler, signum = _process.pending.pop(0)
            handler(signum, None)


def _install() -> None:
    """Put our handlers before those there are. Only the main thread may; otherwise the watcher has to do."""
    if threading.current_thread() is not threading.main_thread():
        return
    for signum in SIGNALS:
        prior = signal.getsignal(signum)
        if prior is signal.SIG_IGN or prior is None:  # ignored (nohup), or a handler of C's that we could not call
            continue
        if signum in _process.ours and _process.ours[signum][0] is prior:
            continue
        handler = _make_handler(prior)
        _process.ours[signum] = (handler, prior)
        signal.signal(signum, handler)


def _uninstall() -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # harmless: with nothing held they only call the earlier ones
    for signum, (handler, prior) in list(_process.ours.items()):
        if signal.getsignal(signum) is handler:  # else somebody came after us, and may call us
            signal.signal(signum, prior)
            del _process.ours[signum]


def _make_handler(prior: Any) -> Handler:
    def handler(signum: int, frame: Any) -> None:
        if _process.depth:
            _process.pending.append((handler, signum))
            return
        deadly = prior is signal.SIG_DFL
        _process.ending = _process.ending or deadly
        held = list(_process.holds)
        try:
            for hold in held:
                _quietly(hold.suspend)
        finally:
            if deadly:  # die of the signal, as without us
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
        if deadly:
            return  # the signal is blocked: it comes when it is let through
        try:
            prior(signum, frame)
        finally:  # it returned, or raised: the program goes on, if only to unwind
            for hold in held:
                _quietly(hold.resume)

    return handler


def _quietly(step: Callable[[], object]) -> None:
    try:
        step()
    except ActuatorError as exc:
        warnings.warn(str(exc), stacklevel=2)


def _at_exit() -> None:
    _process.ending = True
    for hold in list(_process.holds):
        _quietly(hold.release)
    lock.sign_off()


def _start_watcher() -> None:
    """Start the watcher once per process; by a shell that ends at once, so that it is no child of ours to wait for."""
    if _process.watched_pid == os.getpid() or os.environ.get(VARIABLE) == "0" or not sys.executable:
        return
    _process.watched_pid = os.getpid()
    code = "import sys; sys.path.append(sys.argv[1]); from tessera.actuators.watch import main; main(*sys.argv[2:])"
    root = str(Path(__file__).parents[2])
    python = [sys.executable, "-P", "-c", code, root, str(os.getpid()), str(start_time(os.getpid()))]
    with contextlib.suppress(OSError):  # no /bin/sh: then the journal alone has to do
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *python],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )


def _after_fork() -> None:
    """A forked child holds nothing: its parent does, and will put it back."""
    for hold in _process.holds:
        hold.disown()
    _process.holds.clear()
    _process.pending.clear()
    _process.depth, _process.ending = 0, False
    lock.forget()


os.register_at_fork(after_in_child=_after_fork)
