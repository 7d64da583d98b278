"""Restores GPUs when the process ends in any way other than leaving the `with` block.

::

    exception, return    the `with` block itself
    sys.exit, the end    atexit, for holds of other threads
    SIGTERM/INT/HUP      restore, then call the previous handler; if that returns, hold again
    kill -9, os._exit,   the watcher, a small separate process that is told what we hold (the journal may be removed);
    a crash in C           if it was killed too, `tessera doctor --restore` or the next hold on that GPU
    fork                 the child holds nothing

Python runs signal handlers in the main thread between two of its steps, so a handler may interrupt our own change of a
GPU. `defer_signals` then delays it until that change is done.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ActuatorError
from ..sensors.processes import read_stat
from . import journal, locks

if TYPE_CHECKING:
    from .hold import GpuHold

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
VARIABLE = "TESSERA_WATCHER"
"""Environment variable: "0" starts no watcher process."""
_POLL_S = 0.2

Handler = Callable[[int, Any], None]


@dataclass(slots=True)
class _GuardState:
    """What this process holds, and what was set up to restore it."""

    holds: list[GpuHold] = field(default_factory=list)
    depth: int = 0  # of `defer_signals`, in the main thread
    pending: list[tuple[Handler, int]] = field(default_factory=list)
    handlers: dict[int, tuple[Handler, Any]] = field(default_factory=dict)  # our handler and the previous one
    mutex: threading.Lock = field(default_factory=threading.Lock)  # while the watcher is started
    watched_pid: int = 0
    at_exit: bool = False
    # Other threads that have held something. They may do so again and cannot install handlers, so ours stay.
    threads: weakref.WeakSet[threading.Thread] = field(default_factory=weakref.WeakSet)
    ending: bool = False


_state = _GuardState()


def register(hold: GpuHold) -> None:
    """Note a hold before it changes anything, so that it ends with this process. An ending process takes no more."""
    _state.holds.append(hold)  # first: whoever ends the process either sees it in the list, or is seen below
    while _state.ending:
        if threading.current_thread() is threading.main_thread():
            _state.holds.remove(hold)
            raise ActuatorError("no more changes are made", why="the process is ending", fix="set the limit earlier")
        time.sleep(0.05)  # a thread that runs on while the process ends: it has nothing left to do
    if threading.current_thread() is not threading.main_thread():
        _state.threads.add(threading.current_thread())
    if not _state.at_exit:
        _state.at_exit = True
        atexit.register(_release_all)
    _install_handlers()
    with _state.mutex:  # a second thread changes nothing before the watcher can be told
        _start_watcher()


def unregister(hold: GpuHold) -> None:
    """Forget a hold that has ended, after everything is restored."""
    if hold in _state.holds:
        _state.holds.remove(hold)
    if not _state.holds and not any(thread.is_alive() for thread in list(_state.threads)):
        _remove_handlers()
        if _state.holds:  # of another thread, since a moment ago
            _install_handlers()


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Delay signal handlers while the body changes a GPU, because they would need the lock that it holds."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread only, and wait for this one
        return
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1
        while _state.depth == 0 and _state.pending:
            handler, signum = _state.pending.pop(0)
            handler(signum, None)


def _install_handlers() -> None:
    """Put our handlers before the existing ones. Only the main thread can; for other threads the watcher is enough."""
    if threading.current_thread() is not threading.main_thread():
        return
    for signum in SIGNALS:
        previous = signal.getsignal(signum)
        if previous is signal.SIG_IGN or previous is None:  # ignored (nohup), or a C handler that we could not call
            continue
        if signum in _state.handlers and _state.handlers[signum][0] is previous:
            continue
        handler = _make_handler(previous)
        _state.handlers[signum] = (handler, previous)
        signal.signal(signum, handler)


def _remove_handlers() -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # harmless: with nothing held they only call the previous ones
    for signum, (handler, previous) in list(_state.handlers.items()):
        if signal.getsignal(signum) is handler:  # else somebody installed a handler after us, and may call ours
            signal.signal(signum, previous)
            del _state.handlers[signum]


def _make_handler(previous: Any) -> Handler:
    def handler(signum: int, frame: Any) -> None:
        if _state.depth:
            _state.pending.append((handler, signum))
            return
        deadly = previous is signal.SIG_DFL
        _state.ending = _state.ending or deadly
        holds = list(_state.holds)
        try:
            for hold in holds:
                _warn_on_error(hold.suspend)
        finally:
            if deadly:  # die from the signal, as without us
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
        if deadly:
            return  # the signal is blocked: it arrives once it is unblocked
        try:
            previous(signum, frame)
        finally:  # it returned, or raised: the program continues, if only to unwind
            for hold in holds:
                _warn_on_error(hold.resume)

    return handler


def _warn_on_error(step: Callable[[], object]) -> None:
    try:
        step()
    except ActuatorError as exc:
        warnings.warn(str(exc), stacklevel=2)


def _release_all() -> None:
    _state.ending = True
    for hold in list(_state.holds):
        _warn_on_error(hold.release)
    locks.remove_owner_file()


def _reset_after_fork() -> None:
    """Forget all holds in a forked child: the parent holds them, and restores them."""
    for hold in _state.holds:
        hold.disown()
    _state.holds.clear()
    _state.pending.clear()
    _state.depth, _state.ending, _state.mutex = 0, False, threading.Lock()
    journal.forget()
    locks.reset_locks()


os.register_at_fork(after_in_child=_reset_after_fork)


# -- the watcher ------------------------------------------------------------------------------------------------------


def _start_watcher() -> None:
    """Start the watcher once per process, by a shell that ends at once: then it is not our child to wait for."""
    if _state.watched_pid == os.getpid() or os.environ.get(VARIABLE) == "0" or not sys.executable:
        return
    _state.watched_pid = os.getpid()
    code = "import sys; sys.path.append(sys.argv[1]); from tessera.actuators.guard import watch; watch(*sys.argv[2:])"
    root = str(Path(__file__).parents[2])
    python = [sys.executable, "-P", "-c", code, root, str(os.getpid()), str(process_start(os.getpid()))]
    read, write = os.pipe()
    with contextlib.suppress(OSError):  # no /bin/sh: only the journal is left
        subprocess.run(  # a shell gives /dev/null to what it starts with &, unless another stdin is named
            ["/bin/sh", "-c", 'exec 3<&0; "$@" <&3 3<&- &', "sh", *python],
            check=False,
            stdin=read,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    os.close(read)
    journal.connect_watcher(write)


def watch(pid: str, started: str) -> None:
    """Run the watcher: wait for a process to end, then restore what dead processes left changed."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)  # a signal that ends the process may go to its group; we must outlive it
    os.chdir("/")  # keep no folder busy
    _follow(int(pid), None if started == "None" else int(started))
    from .restore import restore_outstanding

    for change in restore_outstanding():
        with contextlib.suppress(OSError):  # perhaps nobody is left to read it
            sys.stderr.write(f"tessera: {change.text}\n")


def _follow(pid: int, started: int | None) -> None:
    """Read from stdin what the process says it holds, until it ends. Meanwhile this sleeps in the kernel."""
    pipe, pidfd, text = [sys.stdin.fileno()], [], b""
    with contextlib.suppress(OSError):  # it has ended, or the kernel is older than 5.3
        pidfd = [os.pidfd_open(pid)]
    ended = started is None or process_start(pid) != started
    while pipe or not ended:
        ready = select.select([*pipe, *pidfd], [], [], 0 if ended else None if pidfd else _POLL_S)[0]
        if pipe and pipe[0] in ready:
            chunk = os.read(pipe[0], 1 << 16)
            *lines, text = (text + chunk).split(b"\n")
            for line in lines:
                journal.receive_line(line)
            pipe = pipe if chunk else []
        elif ended:  # everything is read; a child that it forked may keep the pipe open
            return
        ended = ended or (pidfd[0] in ready if pidfd else process_start(pid) != started)


def process_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot (a reused PID has another start); None if it is gone."""
    stat = read_stat(pid)
    return None if stat is None else stat.began
