"""A process as /proc shows it: its user, its command, its CPU and memory, and whether libkineto waits in it.

Nothing here needs more rights than being the process's own user.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ...errors import ArgumentError, MeasurementError
from ...sensors.processes import find_user_name

PROC = Path("/proc")
SOCKET_VARIABLE = "KINETO_IPC_SOCKET_DIR"
TRACE_VARIABLE = "KINETO_ONDEMAND_TRACE_DIR"
_READ = (b"KINETO_", b"CUDA_")  # beginnings of the variables that are read; others may hold keys and passwords
_TORCH = ("libtorch_cpu.", "libtorch.", "libkineto.")
_PYTHON = re.compile(r"/(?:lib)?python\d[^/\n]*$", re.MULTILINE)
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_UTIME, _STARTED = 11, 19  # indices of fields of /proc/PID/stat, counted from the state
_MAX_DEPTH = 32  # ancestors to look at; a longer chain is a loop, since PIDs are reused while we read


class NoProcess(MeasurementError):
    """There is no such process, or it ended."""


class NotYours(MeasurementError):
    """The process is another user's."""


@contextlib.contextmanager
def files_as(target: Target) -> Iterator[None]:
    """Give this thread the target user's rights to files, and no more; files made in the block belong to that user.

    Root must not make or remove files in a folder that the target's environment names with root's own rights: the
    target may put a link there at any moment. With the target's file-system user ID (setfsuid(2), for one thread), a
    link leads only to places that the target itself could reach. Root keeps its supplementary groups: by default root
    is only in its own.
    """
    if target.uid == os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None)
    old_gid, old_uid = libc.setfsgid(target.gid), libc.setfsuid(target.uid)
    try:
        if libc.setfsuid(-1) != target.uid or libc.setfsgid(-1) != target.gid:  # -1 only returns the present ID
            raise NotYours(
                f"cannot make files as {target.user}, whose process {target.pid} is",
                why="this system does not let root take another user's rights to files",
                fix=f"sudo -u {target.user} tessera-prof --pid {target.pid}",
            )
        yield
    finally:
        libc.setfsuid(old_uid)
        libc.setfsgid(old_gid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The process to look at. `environ` has only the variables of its environment that matter here (`_READ`)."""

    pid: int
    uid: int
    gid: int
    user: str
    command: str
    environ: Mapping[str, str] = field(repr=False)
    torch: bool
    started: str
    pid_fd: int | None

    @property
    def alive(self) -> bool:
        """Whether the process still runs; a new process that got the same PID does not count."""
        if self.pid_fd is not None:
            return not select.select([self.pid_fd], [], [], 0)[0]
        fields = _stat(self.pid)
        return bool(fields) and fields[_STARTED] == self.started and fields[0] not in "ZX"

    @property
    def socket_dir(self) -> str | None:
        """The folder in which the process looks for its daemon; None: the abstract namespace."""
        return self.environ.get(SOCKET_VARIABLE) or None

    def close(self) -> None:
        if self.pid_fd is not None:
            os.close(self.pid_fd)


def find(pid: int) -> Target:
    """Return the process with a PID; raise if it does not run, or belongs to another user (root may look at any)."""
    if pid <= 0:
        raise ArgumentError(f"{pid} is not a PID", fix="give the number that `ps` or `nvidia-smi` shows")
    leader = status(pid).get("Tgid", str(pid))
    if leader != str(pid):
        raise ArgumentError(f"{pid} is a thread of process {leader}", fix=f"give --pid {leader}")
    try:
        pid_fd = _pid_fd(pid)
    except ProcessLookupError:
        raise NoProcess(f"there is no process {pid}", fix="run `ps -u $USER -o pid,args` to list the PIDs") from None
    try:
        return _look(pid, pid_fd)
    except BaseException:
        if pid_fd is not None:
            os.close(pid_fd)
        raise


def _pid_fd(pid: int) -> int | None:
    """Return a handle that no later process with this PID gets; None if the kernel has none (before 5.3, gVisor)."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):
        if not status(pid):
            raise ProcessLookupError(pid) from None
        return None


def _look(pid: int, pid_fd: int | None) -> Target:
    info, fields = status(pid), _stat(pid)
    if not info or not fields or fields[0] in "ZX":
        raise NoProcess(f"process {pid} has ended", fix="give the PID of one that runs")
    real, effective = (int(u) for u in info["Uid"].split()[:2])
    own_uid = os.geteuid()
    if own_uid not in (0, real) or own_uid not in (0, effective):
        raise NotYours(
            f"process {pid} belongs to {find_user_name(real)}, not to you",
            why="a trace shows what a program works on: only its own user, or root, may take one",
            fix=f"sudo -u {find_user_name(real)} tessera-prof --pid {pid}",
        )
    return Target(
        pid=pid, uid=real, gid=int(info["Gid"].split()[0]), user=find_user_name(real), command=_command(pid, info),
        environ=_environ(pid), torch=maps_torch(pid), started=fields[_STARTED], pid_fd=pid_fd,
    )  # fmt: skip


def descends(pid: int, from_pid: int) -> bool:
    """Whether `pid` is `from_pid` or one of its descendants."""
    for _ in range(_MAX_DEPTH):
        if pid == from_pid:
            return True
        parent = status(pid).get("PPid", "0")
        if parent in ("0", "1"):
            return False
        pid = int(parent)
    return False


def descendants(pid: int) -> list[int]:
    """Return the descendants of a process, nearest first."""
    children: dict[int, list[int]] = {}
    for other in pids():
        parent = status(other).get("PPid")
        if parent is not None:
            children.setdefault(int(parent), []).append(other)
    below_all, ahead = [], [pid]
    while ahead:
        below = children.pop(ahead.pop(0), [])
        below_all += below
        ahead += below
    return below_all


def same_mounts(pid: int) -> bool:
    """Whether a path means the same file here and in a process."""
    return same(pid, "ns/mnt") and same(pid, "root")


class CpuReader:
    """Reads the CPU time of all threads of a process: from its CPU clock, or in steps of 10 ms from /proc/PID/stat."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._clock = (~pid << 3) | 2  # what clock_getcpuclockid(3) returns
        try:
            time.clock_gettime(self._clock)
            self.read = self._from_clock
        except OSError:  # gVisor has no clocks of other processes
            self.read = self._from_stat

    def _from_clock(self) -> float:
        return time.clock_gettime(self._clock)

    def _from_stat(self) -> float:
        fields = _stat(self._pid)
        return (int(fields[_UTIME]) + int(fields[_UTIME + 1])) / _TICKS_PER_S


class MemoryReader:
    """Reads the resident memory of a process; keeps the file open, so that a reading is cheap."""

    def __init__(self, pid: int) -> None:
        self._file = (PROC / str(pid) / "statm").open("rb", buffering=0)

    def read(self) -> int:
        """Bytes in RAM."""
        self._file.seek(0)
        return int(self._file.read(256).split()[1]) * _PAGE

    def close(self) -> None:
        self._file.close()


def status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status; empty if the process has ended."""
    try:
        text = (PROC / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return {}
    return {k: v.strip() for k, _, v in (line.partition(":") for line in text.splitlines())}


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if the process has ended."""
    try:  # the name before the state stands in parentheses, and may itself have any character
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def pids() -> Iterator[int]:
    """List the PIDs of all processes that /proc shows us."""
    return (int(p.name) for p in PROC.iterdir() if p.name.isdigit())


def _command(pid: int, status: Mapping[str, str]) -> str:
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        words = []
    text = shlex.join(w.decode(errors="replace") for w in words[:-1])
    return " ".join("".join(c if c.isprintable() else " " for c in text or status.get("Name", "?")).split())


def _environ(pid: int) -> dict[str, str]:
    try:
        data = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in data.split(b"\0") if entry.startswith(_READ))
    return {os.fsdecode(k): os.fsdecode(v) for k, _, v in pairs}


def maps_torch(pid: int) -> bool:
    """Return whether PyTorch is loaded in a process."""
    return any(name in _read_maps(pid) for name in _TORCH)


def maps_python(pid: int) -> bool:
    """Return whether a process is a Python interpreter, or has one loaded."""
    return _PYTHON.search(_read_maps(pid)) is not None


def _read_maps(pid: int) -> str:
    try:
        return (PROC / str(pid) / "maps").read_text(errors="replace")
    except OSError:
        return ""


def same(pid: int, what: str) -> bool:
    """Return whether a process shares a namespace or root with us; True if they cannot be compared."""
    try:
        return (PROC / str(pid) / what).readlink() == (PROC / "self" / what).readlink()
    except OSError:
        return True


CLIENT_PREFIX = "dynoconfigclient"  # how libkineto names its socket
DAEMON_VARIABLE = "KINETO_USE_DAEMON"
State = Literal["ready", "starting", "off", "not torch", "unreachable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kineto:
    """Whether a process can be asked for a Kineto trace; if it cannot, why (`reason`) and what helps (`fix`)."""

    state: State
    reason: str = ""
    fix: str = ""

    @property
    def possible(self) -> bool:
        """Whether it is worth waiting for the process to ask."""
        return self.state in ("ready", "starting")


def kineto(target: Target) -> Kineto:
    """Return whether the process waits for a daemon: its open socket proves that; the variable only promises it."""
    restart = f"{DAEMON_VARIABLE}=1 {target.command}"
    if target.socket_dir and not target.socket_dir.startswith("/"):
        return Kineto(
            state="unreachable", reason=f"{SOCKET_VARIABLE}={target.socket_dir} is not an absolute path", fix=restart
        )
    if not target.socket_dir and not same(target.pid, "ns/net"):
        return Kineto(
            state="unreachable",
            reason="it lives in another network namespace (a container), and its socket with it",
            fix=f"run tessera-prof in that container, or start both with {SOCKET_VARIABLE}=/a/shared/folder",
        )
    ours = [target.pid] if target.torch else [target.pid, *descendants(target.pid)]
    if any(has_endpoint(p) for p in ours):
        return Kineto(state="ready")
    if DAEMON_VARIABLE in target.environ:
        return Kineto(
            state="starting",
            reason=f"{DAEMON_VARIABLE} is set, but PyTorch's profiler does not wait for a daemon (yet)",
            fix="is torch imported, and built with Kineto for Linux?",
        )
    if target.torch or any(maps_torch(p) for p in ours[1:]):
        return Kineto(state="off", reason=f"it was not started with {DAEMON_VARIABLE}=1", fix=restart)
    return Kineto(
        state="not torch",
        reason="it is not a PyTorch process (libtorch is not loaded)",
        fix=f"a PyTorch program can be traced when it is started so: {DAEMON_VARIABLE}=1 python train.py",
    )


def has_endpoint(pid: int) -> bool:
    """Return whether libkineto has opened its socket in a process; if so, it asks for a configuration every 5 s."""
    sockets = _socket_inodes(pid)
    return bool(sockets) and any(inode in sockets for inode, name in _unix_sockets(pid) if CLIENT_PREFIX in name)


def owner_of(address: str) -> str | None:
    """Return which process has bound a socket, as "name (PID 12)"; None if that cannot be seen."""
    wanted = "@" + address[1:].replace("\0", "@") if address.startswith("\0") else address
    inodes = {inode for inode, name in _unix_sockets(os.getpid()) if name == wanted}
    for pid in pids() if inodes else ():
        if _socket_inodes(pid) & inodes:
            return f"{status(pid).get('Name', '?')} (PID {pid})"
    return None


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    try:
        for fd in (PROC / str(pid) / "fd").iterdir():
            kind, _, inode = str(fd.readlink()).partition(":[")
            if kind == "socket":
                inodes.add(inode.rstrip("]"))
    except OSError:  # another user's, or gone meanwhile
        pass
    return inodes


def _unix_sockets(pid: int) -> Iterator[tuple[str, str]]:
    """Yield inode and name of each bound socket in the network namespace of a process."""
    try:
        lines = (PROC / str(pid) / "net" / "unix").read_text(errors="replace").splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split(maxsplit=7)
        if len(fields) == 8:
            yield fields[6], fields[7]
