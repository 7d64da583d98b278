"""Decides who controls a GPU: the folder of its files, a lock per GPU, and a file that shows that a process is alive.

Locks are POSIX record locks (fcntl.lockf), not flock: a forked child (a DataLoader's worker) inherits a flock and
would keep it after its parent was killed. A record lock ends with the process that took it, and works across the PID
namespaces of containers. Record locks are per process, so threads also take a lock of their own, and no file is
opened twice in one process.

Two containers may have different folders, and neither would see what the other changed. So a process that holds
something also locks the GPU's device node (/dev/nvidia0), at a byte that stands for its folder. A process that finds
another byte locked leaves the GPU alone. That lock belongs to the open file (F_OFD_SETLK): NVML opens and closes the
same node, which would end a record lock of the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ActuatorError

VARIABLE = "TESSERA_RUNTIME_DIR"
"""Environment variable for the folder of locks and journals; containers that share a GPU should share it."""
# How long to wait for a lock: its holder needs a few driver calls of milliseconds and two fsyncs.
LOCK_TIMEOUT_S = 10.0
_POLL_S = 0.002
_SAFE = re.compile(r"[A-Za-z0-9._-]+")
_MOUNTS = Path("/proc/self/mountinfo")


def folder_path() -> Path:
    """Return /run/tessera for root, /var/tmp/tessera-UID for others.

    It is not XDG_RUNTIME_DIR, which logind removes at logout while a job in tmux still holds a cap.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen)
    return Path("/run/tessera") if os.geteuid() == 0 else Path(f"/var/tmp/tessera-{os.geteuid()}")


def runtime_folder() -> Path:
    """Return the folder of locks and journals. It is created if missing, and only its owner may use it."""
    path = folder_path()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as exc:
        raise ActuatorError(
            f"the folder for locks and journals cannot be created: {path}", why=str(exc), fix=f"set {VARIABLE}"
        ) from exc
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ActuatorError(
            f"the folder for locks and journals is open to other users: {path}",
            why="a user who can write there could make Tessera set limits",
            fix=f"rm -r {path} if it is yours, chmod 700 it, or set {VARIABLE}",
        )
    return path


def gpu_file(uuid: str, suffix: str) -> Path:
    """Return the path of a GPU's file in the folder."""
    if not _SAFE.fullmatch(uuid):
        raise ActuatorError(f"{uuid!r} is not a UUID of a GPU", why="it cannot be used as a file name")
    return runtime_folder() / f"{uuid}{suffix}"


@dataclass(slots=True)
class _LockState:
    """One lock per GPU for this process's threads, the file that shows the process is alive, and open device nodes."""

    mutex: threading.Lock = field(default_factory=threading.Lock)
    threads: dict[str, threading.Lock] = field(default_factory=dict)
    owner: tuple[Path, int] | None = None
    nodes: dict[str, int] = field(default_factory=dict)  # by UUID


_state = _LockState()


@contextlib.contextmanager
def lock_gpu(uuid: str, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Exclude all other threads and processes from this GPU's journal."""
    deadline = time.monotonic() + timeout_s
    busy = ActuatorError(
        f"the lock of GPU {uuid} is taken",
        why=f"another process has kept it for {timeout_s:g} s; it may be stopped",
        fix=f"`fuser {gpu_file(uuid, '.lock')}` shows which one",
    )
    with _state.mutex:
        thread_lock = _state.threads.setdefault(uuid, threading.Lock())
    if not thread_lock.acquire(timeout=timeout_s):
        raise busy
    try:
        while (fd := _lock_file(gpu_file(uuid, ".lock"))) is None:
            if time.monotonic() > deadline:
                raise busy
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            os.close(fd)  # this also unlocks
    finally:
        thread_lock.release()


def _lock_file(path: Path) -> int | None:
    """Open and lock a file; None if it is taken, or was removed meanwhile (a new one has another lock)."""
    fd = _open(path)
    with contextlib.suppress(FileNotFoundError):
        if _try_lock(fd) and os.path.samestat(os.fstat(fd), path.stat()):
            return fd
    os.close(fd)
    return None


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with contextlib.suppress(FileNotFoundError):  # the folder was removed just now: once more
            return os.open(path, flags, 0o600)
        return os.open(runtime_folder() / path.name, flags, 0o600)
    except OSError as exc:
        raise ActuatorError(f"the file {path} cannot be opened", why=str(exc), fix=f"set {VARIABLE}") from exc


def _try_lock(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows EAGAIN or EACCES
        return False
    return True


def owner_name() -> str:
    """Return this process's name in claims. From the first call on, the process keeps the file of that name locked."""
    with _state.mutex:
        place = runtime_folder()
        path, fd = _state.owner or (None, None)
        if path is None or path.parent != place:
            path = place / f"{os.getpid()}-{os.urandom(4).hex()}.owner"
        elif path.exists():
            return path.stem
        # The first call, or the folder is another one now, or somebody has removed the file: keep the name.
        _state.owner = (path, _open(path))
        fcntl.lockf(_state.owner[1], fcntl.LOCK_EX)
        if fd is not None:
            os.close(fd)
        return _state.owner[0].stem


def is_ours(owner: str) -> bool:
    """Return whether this process has that name."""
    return _state.owner is not None and _state.owner[0].stem == owner


def is_alive(owner: str) -> bool:
    """Return whether the process with this name is alive. Our own file is not opened: closing it would unlock it."""
    path = runtime_folder() / f"{owner}.owner"
    if _state.owner is not None and _state.owner[0] == path:
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


def remove_owner_file() -> None:
    """Remove, at exit, the file that shows that this process is alive."""
    if _state.owner is not None:
        _state.owner[0].unlink(missing_ok=True)


def reset_locks() -> None:
    """Forget all locks in a forked child: it holds nothing, and locks of the parent's threads are not its own."""
    if _state.owner is not None:
        os.close(_state.owner[1])
    for fd in _state.nodes.values():
        os.close(fd)
    _state.mutex, _state.threads, _state.owner, _state.nodes = threading.Lock(), {}, None, {}


# -- the device node --------------------------------------------------------------------------------------------------

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux (fcntl.h): type, whence, start, length, PID


def lock_node(uuid: str, gpu: str, node: Path | None) -> None:
    """Mark the GPU as ours until we hold nothing of it any more. Raises ActuatorError if others have marked it.

    `node` is None if the GPU has no device node: then only processes with the same folder see each other.
    """
    if node is None or uuid in _state.nodes:
        return
    if not os.environ.get(VARIABLE) and not _is_shared(node):
        raise ActuatorError(
            f"{gpu} is not changed",
            why=f"{node} belongs to this container alone, so other containers cannot see who holds the GPU",
            fix=f"mount one folder into every container that uses the GPU, and set {VARIABLE} to it",
        )
    folder = runtime_folder().stat()
    byte = 1 + (folder.st_dev << 32 ^ folder.st_ino) % 2**48
    try:
        fd = os.open(node, os.O_RDWR | os.O_CLOEXEC)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as exc:
        raise ActuatorError(f"{gpu} is not changed: {node} cannot be locked", why=str(exc)) from exc
    if _is_locked(fd, 0, byte) or _is_locked(fd, byte + 1, 0):
        os.close(fd)
        raise ActuatorError(
            f"{gpu} is not changed: another process of Tessera holds it",
            why="that process has another folder for locks and journals, or its folder was removed",
            fix=f"wait until it ends, or set {VARIABLE} to one folder for all that use the GPU",
        )
    _state.nodes[uuid] = fd


def unlock_node(uuid: str) -> None:
    """Remove the mark, because this process holds nothing of the GPU any more."""
    if uuid in _state.nodes:
        os.close(_state.nodes.pop(uuid))


def is_node_locked(node: Path | None) -> bool:
    """Return whether some process holds the GPU with this device node, whichever folder it has."""
    try:
        fd = os.open(node or "", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return _is_locked(fd, 0, 0)
    finally:
        os.close(fd)


def _is_locked(fd: int, start: int, length: int) -> bool:
    """Return whether another open file has a lock in this range; a length of 0 means up to the end."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _is_shared(node: Path) -> bool:
    """Return whether this is the machine's own node, perhaps mounted into a container, and not one made for it."""
    device = node.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = (line.split() for line in _MOUNTS.read_text().splitlines())
    return any(m[2] == number and m[m.index("-") + 1] == "devtmpfs" for m in mounts)
