"""One process at a time on a GPU's journal, and who is still alive.

Both are POSIX record locks (fcntl.lockf) and not flock: a forked child (a DataLoader's worker) inherits a flock and
would keep it after its parent was killed; a record lock dies with the process that took it, and works across the PID
namespaces of containers, where a PID says nothing. Record locks are per process: threads exclude each other by a lock
of their own, and no file of ours is opened twice in one process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import ActuatorError
from .journal import VARIABLE, folder, path_of

# A holder needs a few driver calls of milliseconds and two fsyncs.
TIMEOUT_S = 10.0
_POLL_S = 0.002


class _Process:
    """This process's part: one lock per GPU for its threads, and the file that shows it is alive."""

    def __init__(self) -> None:
        self.making = threading.Lock()
        self.threads: dict[str, threading.Lock] = {}
        self.owner: tuple[Path, int] | None = None


_process = _Process()


@contextlib.contextmanager
def gpu_lock(uuid: str, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
    """Be the only one, of all threads and processes, who reads or changes this GPU's journal."""
    deadline = time.monotonic() + timeout_s
    with _process.making:
        thread_lock = _process.threads.setdefault(uuid, threading.Lock())
    if not thread_lock.acquire(timeout=timeout_s):
        raise _busy(uuid, timeout_s)
    try:
        fd = _open(path_of(uuid, ".lock"))
        try:
            while not _try_lock(fd):
                if time.monotonic() > deadline:
                    raise _busy(uuid, timeout_s)
                time.sleep(_POLL_S)
            yield
        finally:
            os.close(fd)  # which also unlocks
    finally:
        thread_lock.release()


def _busy(uuid: str, timeout_s: float) -> ActuatorError:
    return ActuatorError(
        f"the lock of GPU {uuid} is not to be had",
        why=f"another process has kept it for {timeout_s:g} s; is one of them stopped?",
        fix=f"`fuser {path_of(uuid, '.lock')}` shows who",
    )


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise ActuatorError(f"the file {path} cannot be opened", why=str(exc), fix=f"set {VARIABLE}") from exc


def _try_lock(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as POSIX has it
        return False
    return True


def owner() -> str:
    """This process's name in claims; from the first call on, the file of that name stays locked while it lives."""
    with _process.making:
        place = folder()
        # Someone may have cleaned the folder up, or it is another one now.
        if _process.owner is None or _process.owner[0].parent != place or not _process.owner[0].exists():
            path = place / f"{os.getpid()}-{os.urandom(4).hex()}.owner"
            fd = _open(path)
            fcntl.lockf(fd, fcntl.LOCK_EX)
            if _process.owner is not None:
                os.close(_process.owner[1])
            _process.owner = (path, fd)
        return _process.owner[0].stem


def alive(name: str) -> bool:
    """Whether the process that has this name still lives. Our own file is not opened: closing it would unlock it."""
    path = folder() / f"{name}.owner"
    if _process.owner is not None and _process.owner[0] == path:
        return True
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if not _try_lock(fd):
            return True
        path.unlink(missing_ok=True)
        return False
    finally:
        os.close(fd)


def sign_off() -> None:
    """At exit: remove our file."""
    if _process.owner is not None:
        _process.owner[0].unlink(missing_ok=True)


def forget() -> None:
    """In a forked child: it holds nothing, and locks taken by the parent's other threads are not its own."""
    if _process.owner is not None:
        os.close(_process.owner[1])
    _process.making, _process.threads, _process.owner = threading.Lock(), {}, None
