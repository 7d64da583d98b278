"""One bucket for all processes of a node: a small file under a lock that the kernel releases when a process dies.

Every process that holds a `node:` cap, or belongs to a job of several ranks, has an entry in the file: the power of the
domains that it can see, and the ratio that it would use by itself. One process leads: it adds up the newest power of
every domain, and its controller sets one ratio for all, so each process is slowed down by the same share of its own
demand, and ranks of one job wait together. If the leader dies, it no longer updates its beat time, and the next process
that looks takes over from the same ratio.

Ranks of one job (same MASTER_ADDR, port and run) on a node use the highest ratio that any of them asks for, with any
cap: the others would only spin in the next collective. Nothing is exchanged between nodes.

The file is read and written whole, and not mapped: a mapped file that somebody truncates ends the process (SIGBUS).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from ..actuators.guard import process_start
from ..actuators.locks import runtime_folder
from ..errors import ScheduleError
from ..job_rank import find_rank
from .controller import Cap, PaceCommand

# A process without a beat for this long has been stopped or is dying: it neither leads nor counts. Beats come every 20
# ms while work runs, and at least ten times a second otherwise.
SILENT_NS = 400_000_000
STALE_NS = 1_000_000_000
_LOCK_S = 0.01
# How often in a row the file may have been removed or exchanged. More often than that, the file system is at fault.
_REOPENINGS = 3


@dataclass(frozen=True, slots=True)
class NodeMember:
    """What one process publishes. `started` distinguishes it from a later process with the same PID."""

    pid: int
    cap_w: float
    window_s: float
    ratio: float
    job: str
    power_w: Mapping[str, tuple[float, int]] = field(default_factory=dict)  # domain -> watts, time
    started: int = 0
    beat_ns: int = 0


@dataclass(slots=True)
class _BucketFile:
    """The content of the node's file."""

    leader: tuple[int, int] = (0, 0)  # PID and start
    beat_ns: int = 0
    command: PaceCommand = field(default_factory=PaceCommand)
    members: dict[int, NodeMember] = field(default_factory=dict)  # by PID


@dataclass(frozen=True, slots=True)
class NodeView:
    """The node at one moment."""

    leads: bool
    members: tuple[NodeMember, ...]
    command: PaceCommand
    job_ratio: float

    @property
    def cap(self) -> Cap | None:
        """Return the tightest cap of any process, over the shortest window; None where no process holds one."""
        caps = [m for m in self.members if m.cap_w > 0]
        return Cap(min(m.cap_w for m in caps), min(m.window_s for m in caps)) if caps else None

    def power_w(self, now_ns: int, own: Mapping[str, tuple[float, int]] | None = None) -> float | None:
        """Return the sum of the power of all domains; None where no reading is fresh.

        A domain that several processes see has one name; the watts of a single process have a name of their own. Our
        own domains (`own`) count as this process reads them, so that each of our spans is paid for once; domains that
        only others see count as those processes last read them.
        """
        newest: dict[str, tuple[float, int]] = {}
        for member in self.members:
            for domain, (power_w, time_ns) in member.power_w.items():
                if now_ns - time_ns < STALE_NS and time_ns > newest.get(domain, (0.0, 0))[1]:
                    newest[domain] = (power_w, time_ns)
        newest |= {d: (p, t) for d, (p, t) in (own or {}).items() if now_ns - t < STALE_NS}
        return sum(p for p, _ in newest.values()) if newest else None


def job_key(environ: Mapping[str, str] | None = None) -> str:
    """Return the job of this rank, from the variables of torch's launchers; empty where the rank is alone."""
    env = os.environ if environ is None else environ
    me = find_rank(env)
    if me is None or (me.world_size or 1) < 2:
        return ""
    return "/".join((me.job, env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")))


class NodeBucket:
    """This process's entry in the node's file. All processes must use the same clock."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or runtime_folder() / "node.bucket"
        self._fd = _open(self.path)
        self._me = (os.getpid(), process_start(os.getpid()) or 0)

    def look(self, member: NodeMember, now_ns: int) -> NodeView | None:
        """Publish this process's entry and read the others.

        Returns None when the file was busy (a process was stopped while it held the lock).
        """
        with self._change(now_ns) as file:
            if file is None:
                return None
            file.members[self._me[0]] = replace(member, started=self._me[1], beat_ns=now_ns)
            file.members = {p: m for p, m in file.members.items() if self._is_alive(p, m.started)}
            members = tuple(m for m in file.members.values() if abs(now_ns - m.beat_ns) <= SILENT_NS)
            silent = abs(now_ns - file.beat_ns) >= SILENT_NS
            if file.leader != self._me and (silent or not self._is_alive(*file.leader)):
                file.leader, file.beat_ns = self._me, now_ns
            job = [m.ratio for m in members if member.job and m.job == member.job]
            return NodeView(file.leader == self._me, members, file.command, max(job, default=0.0))

    def set_command(self, command: PaceCommand, now_ns: int) -> None:
        """Set what all processes do from now on, if this process leads."""
        with self._change(now_ns) as file:
            if file is not None and file.leader == self._me:
                file.command, file.beat_ns = command, now_ns

    def leave(self) -> None:
        """Remove this process's entry, and give up the lead."""
        with self._change() as file:
            if file is not None:
                file.members.pop(self._me[0], None)
                file.leader = (0, 0) if file.leader == self._me else file.leader

    def close(self) -> None:
        """Remove this process's entry, and close the file."""
        self.leave()
        os.close(self._fd)

    def _is_alive(self, pid: int, started: int) -> bool:
        return (pid, started) == self._me or process_start(pid) == started

    @contextlib.contextmanager
    def _change(self, now_ns: int | None = None) -> Iterator[_BucketFile | None]:
        """Give the file's content, and write it back after the body; None if the lock was not free within a tick.

        A file that is new, damaged, or from before a reboot (its clock is ahead of ours) begins empty.
        """
        if not self._lock():
            yield None
            return
        try:
            try:
                file = msgspec.msgpack.decode(os.pread(self._fd, 1 << 20, 0), type=_BucketFile)
            except (msgspec.DecodeError, ValueError):
                file = _BucketFile()
            if now_ns is not None and file.beat_ns > now_ns + STALE_NS:
                file = _BucketFile()
            yield file
            text = msgspec.msgpack.encode(file)
            os.pwrite(self._fd, text, 0)
            os.ftruncate(self._fd, len(text))
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _lock(self) -> bool:
        """Lock the file, a new one if somebody removed it. The kernel releases the lock however the holder ends."""
        give_up, reopened = time.monotonic() + _LOCK_S, 0
        while reopened <= _REOPENINGS:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(self._fd), self.path.stat()):
                    return True
            except BlockingIOError:
                if time.monotonic() > give_up:
                    return False
                time.sleep(0.0005)
                continue
            except FileNotFoundError:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd, self._fd = self._fd, _open(self.path)
            os.close(fd)
            reopened += 1
        return False


def _open(path: Path) -> int:
    """Open or create the file; it must be a regular file that only this user can access."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise ScheduleError(f"the node's bucket cannot be opened: {path}", why=str(exc)) from exc
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(fd)
        raise ScheduleError(
            f"the node's bucket is open to other users: {path}",
            why="a user who can write there could stop our work",
            fix=f"rm {path}",
        )
    return fd
