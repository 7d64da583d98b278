"""The files behind control: a journal for each GPU, a lock for each GPU, and a file that shows a process is alive.

The journal says what was changed on a GPU, by whom, and what it was before. It is written and synced before the
hardware is touched: one file per GPU, `<folder>/<uuid>.json`, replaced whole (write, fsync, rename, fsync of the
folder), so a crash at any moment leaves the old text or the new. No file means that nothing is changed.

Locks are POSIX record locks (fcntl.lockf), not flock: a forked child (a DataLoader's worker) inherits a flock and
would keep it after its parent was killed. A record lock ends with the process that took it, and works across the PID
namespaces of containers. Record locks are per process, so threads also take a lock of their own, and no file is
opened twice in one process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ..errors import ActuatorError

VARIABLE = "TESSERA_RUNTIME_DIR"
"""Environment variable for the folder of locks and journals; containers that share a GPU should share it."""
# Drivers take limits in milliwatts (NVML) or microwatts (AMD SMI); some boards round them to whole watts.
ROUNDING_W = 1.0
# A lock's holder needs a few driver calls of milliseconds and two fsyncs.
LOCK_TIMEOUT_S = 10.0
_POLL_S = 0.002
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SAFE = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one holder asks of a GPU. `owner` names the file that its process keeps locked while it is alive."""

    id: str
    owner: str
    pid: int
    cap_w: float | None = None
    clocks_mhz: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitChange:
    """The limit was `was_w` before us. `ours_w` are the values we wrote: two while a write is under way."""

    was_w: float
    ours_w: tuple[float, ...]

    def wrote(self, limit_w: float) -> bool:
        """Whether this limit is one of ours, also after a driver rounded it to whole watts."""
        return any(abs(limit_w - ours_w) <= ROUNDING_W for ours_w in self.ours_w)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockChange:
    """The clocks were locked to `was_mhz` (None: not locked, or not readable); we asked for `ours_mhz`."""

    was_mhz: tuple[int, int] | None
    ours_mhz: tuple[int, int]
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """One GPU's file. `boot` identifies the kernel's boot: limits and locks end with it."""

    uuid: str
    gpu: str
    vendor: str
    boot: str
    claims: tuple[Claim, ...] = ()
    limit: LimitChange | None = None
    clocks: ClockChange | None = None


def boot_id() -> str:
    """The kernel's identifier of this boot."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # no /proc: then all boots look the same, and a stale journal is recognised by the limit's value
        return "unknown"


def _folder_path() -> Path:
    """/run/tessera for root, /var/tmp/tessera-UID for others.

    Not XDG_RUNTIME_DIR, which logind removes at logout while a job in tmux still holds a cap.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen)
    return Path("/run/tessera") if os.geteuid() == 0 else Path(f"/var/tmp/tessera-{os.geteuid()}")


def runtime_folder() -> Path:
    """The folder of locks and journals; created if missing, and only its owner may use it."""
    path = _folder_path()
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
    """A GPU's file in the folder."""
    if not _SAFE.fullmatch(uuid):
        raise ActuatorError(f"{uuid!r} is not a UUID of a GPU", why="it cannot be used as a file name")
    return runtime_folder() / f"{uuid}{suffix}"


def read_journal(uuid: str) -> Journal | None:
    """The journal of a GPU; None if nothing is changed."""
    path = gpu_file(uuid, ".json")
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(text, type=Journal)
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        raise ActuatorError(
            f"the journal {path} cannot be read",
            why=str(exc),
            fix=f"compare `nvidia-smi -q -d POWER,CLOCK` with {path}, correct the GPU, and remove the file",
        ) from exc


def write_journal(journal: Journal) -> None:
    """Replace the journal on disk; once this returns, it survives a crash."""
    path = gpu_file(journal.uuid, ".json")
    draft = path.with_suffix(".draft")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            text = msgspec.json.encode(journal)
            if os.write(fd, text) != len(text):  # a disk that fills up writes less
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
        finally:
            os.close(fd)
        draft.rename(path)
        _sync(path.parent)
    except OSError as exc:
        raise ActuatorError(
            f"the journal {path} cannot be written, so {journal.gpu} is not changed",
            why=str(exc),
            fix=f"free some space there, or set {VARIABLE}",
        ) from exc


def remove_journal(uuid: str) -> None:
    """Nothing is changed any more."""
    path = gpu_file(uuid, ".json")
    try:
        path.unlink(missing_ok=True)
        _sync(path.parent)
    except OSError as exc:
        raise ActuatorError(f"the journal {path} cannot be removed", why=str(exc), fix=f"rm {path}") from exc


def list_journals() -> list[str]:
    """UUIDs of the GPUs that have a journal."""
    return sorted(p.stem for p in runtime_folder().glob("*.json")) if _folder_path().exists() else []


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -- locks ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _LockState:
    """One lock per GPU for this process's threads, and the file that shows the process is alive."""

    mutex: threading.Lock = field(default_factory=threading.Lock)
    threads: dict[str, threading.Lock] = field(default_factory=dict)
    owner: tuple[Path, int] | None = None


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
        fd = _open(gpu_file(uuid, ".lock"))
        try:
            while not _try_lock(fd):
                if time.monotonic() > deadline:
                    raise busy
                time.sleep(_POLL_S)
            yield
        finally:
            os.close(fd)  # this also unlocks
    finally:
        thread_lock.release()


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise ActuatorError(f"the file {path} cannot be opened", why=str(exc), fix=f"set {VARIABLE}") from exc


def _try_lock(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows EAGAIN or EACCES
        return False
    return True


def owner_name() -> str:
    """This process's name in claims. From the first call on, the file of that name stays locked while it is alive."""
    with _state.mutex:
        place = runtime_folder()
        # Somebody may have cleaned up the folder, or it is another one now.
        if _state.owner is None or _state.owner[0].parent != place or not _state.owner[0].exists():
            path = place / f"{os.getpid()}-{os.urandom(4).hex()}.owner"
            fd = _open(path)
            fcntl.lockf(fd, fcntl.LOCK_EX)
            if _state.owner is not None:
                os.close(_state.owner[1])
            _state.owner = (path, fd)
        return _state.owner[0].stem


def is_alive(owner: str) -> bool:
    """Whether the process with this name is alive. Our own file is not opened: closing it would unlock it."""
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
    """At exit: remove the file that shows this process is alive."""
    if _state.owner is not None:
        _state.owner[0].unlink(missing_ok=True)


def reset_locks() -> None:
    """In a forked child: it holds nothing, and locks of the parent's threads are not its own."""
    if _state.owner is not None:
        os.close(_state.owner[1])
    _state.mutex, _state.threads, _state.owner = threading.Lock(), {}, None
