"""One bucket for all processes of a node: a small mapped file; the kernel releases its lock when a process dies.

Every process that holds a `node:` cap, or belongs to a job of several ranks, has a slot. It publishes the power of the
domains it can see and the ratio it would use by itself. One process leads: it adds up the newest power of every
domain, and its controller sets one ratio for all, so each process is slowed down by the same share of its own demand,
and ranks of one job wait together. If the leader dies, its beat stops, and the next process that looks takes over from
the same ratio.

Ranks of one job (same MASTER_ADDR, port and run) on a node use the highest ratio that any of them asks for, with any
cap: the others would only spin in the next collective. Nothing is exchanged between nodes.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..actuators.guard import process_start
from ..actuators.journal import runtime_folder
from ..errors import ScheduleError
from .controller import Cap, PaceCommand

_HEAD = struct.Struct("<8sqqqddd")  # magic, leader's pid and start, beat, ratio, slice, power
_SLOT = struct.Struct("<qqqdddqq")  # pid, start, beat, cap, window, own ratio, job, domains
_POWER = struct.Struct("<qdq")  # domain, watts, time
_MAGIC = b"tsbuckt1"  # the last character is the layout
SLOTS, DOMAINS = 128, 24
_SLOT_BYTES = _SLOT.size + DOMAINS * _POWER.size
_BYTES = 64 + SLOTS * _SLOT_BYTES
# A process without a beat for this long is stopped or dying: it neither leads nor counts. Beats come every 20 ms while
# work runs and at least ten times a second.
SILENT_NS = 400_000_000
STALE_NS = 1_000_000_000
_LOCK_S = 0.01


@dataclass(frozen=True, slots=True)
class NodeMember:
    """What one process publishes."""

    pid: int
    cap_w: float
    window_s: float
    ratio: float
    job: int
    power_w: Mapping[int, tuple[float, int]] = field(default_factory=dict)  # domain -> watts, time


@dataclass(frozen=True, slots=True)
class NodeView:
    """The node at one moment."""

    leads: bool
    members: tuple[NodeMember, ...]
    command: PaceCommand
    job_ratio: float

    @property
    def cap(self) -> Cap | None:
        """The tightest cap of any process, over the shortest window; None where nobody holds one."""
        caps = [m for m in self.members if m.cap_w > 0]
        return Cap(min(m.cap_w for m in caps), min(m.window_s for m in caps)) if caps else None

    def power_w(self, now_ns: int, own: Mapping[int, tuple[float, int]] | None = None) -> float | None:
        """The sum of every domain's power; None where nothing is fresh.

        Our own domains (`own`) count as we read them, so that each of our spans is paid for once; domains that only
        others see count as those last read them.
        """
        newest: dict[int, tuple[float, int]] = {}
        for member in self.members:
            for domain, (power_w, time_ns) in member.power_w.items():
                if now_ns - time_ns < STALE_NS and time_ns > newest.get(domain, (0.0, 0))[1]:
                    newest[domain] = (power_w, time_ns)
        newest |= {d: (p, t) for d, (p, t) in (own or {}).items() if now_ns - t < STALE_NS}
        return sum(p for p, _ in newest.values()) if newest else None


def domain_key(name: str) -> int:
    """A domain's number in the file; board indices are the node's, whatever a process can see."""
    return zlib.crc32(name.encode())


def job_key(environ: Mapping[str, str] | None = None) -> int:
    """The job of this rank, from the variables of torch's launchers; 0 where it is alone."""
    env = os.environ if environ is None else environ
    if int(env.get("WORLD_SIZE") or "1") < 2:
        return 0
    return zlib.crc32("/".join(env.get(k, "") for k in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")).encode())


class NodeBucket:
    """This process's slot in the node's file. All processes must use the same clock."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or runtime_folder() / "node.bucket"
        self._fd = _open(self.path)
        try:
            self._map = mmap.mmap(self._fd, _BYTES)
        except (OSError, ValueError) as exc:
            os.close(self._fd)
            raise ScheduleError(f"the node's bucket cannot be mapped: {self.path}", why=str(exc)) from exc
        self._me = (os.getpid(), process_start(os.getpid()) or 0)
        self._slot: int | None = None

    def look(self, member: NodeMember, now_ns: int) -> NodeView | None:
        """Publish, and see the others; None when the file was busy (a process was stopped while it held the lock)."""
        with self._lock() as locked:
            if not locked:
                return None
            self._begin(now_ns)
            self._write(member, now_ns)
            members = tuple(self._live_members(now_ns))
            head = _HEAD.unpack_from(self._map, 0)
            leads = self._lead(head, now_ns)
            job = [m.ratio for m in members if member.job and m.job == member.job]
            return NodeView(leads, members, PaceCommand(head[4], max(head[5], 1e-6)), max(job, default=0.0))

    def set_command(self, command: PaceCommand, power_w: float, now_ns: int) -> None:
        """As the leader: set what all processes do from now on."""
        with self._lock() as locked:
            if locked and _HEAD.unpack_from(self._map, 0)[1:3] == self._me:
                self._put_head(now_ns, command, power_w)

    def leave(self) -> None:
        """Free the slot."""
        with self._lock() as locked:
            if locked and self._slot is not None:
                self._map[self._at(self._slot) : self._at(self._slot) + _SLOT_BYTES] = bytes(_SLOT_BYTES)
                self._slot = None
                head = _HEAD.unpack_from(self._map, 0)
                if head[1:3] == self._me:
                    _HEAD.pack_into(self._map, 0, _MAGIC, 0, 0, 0, *head[4:])

    def close(self) -> None:
        """Leave and unmap."""
        self.leave()
        self._map.close()
        os.close(self._fd)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """flock, which the kernel releases however the holder ends. Waits no longer than a tick."""
        give_up = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    yield False
                    return
                time.sleep(0.0005)
        try:
            yield True
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    # -- the rest runs with the lock held -------------------------------------------------------------------

    def _begin(self, now_ns: int) -> None:
        """Clear a file that is new, has another layout, or is from before a reboot (its clock is ahead of ours)."""
        head = _HEAD.unpack_from(self._map, 0)
        if head[0] != _MAGIC or head[3] > now_ns + STALE_NS:
            self._map[:] = bytes(_BYTES)
            _HEAD.pack_into(self._map, 0, _MAGIC, 0, 0, 0, 0.0, PaceCommand().slice_s, 0.0)

    def _at(self, slot: int) -> int:
        return 64 + slot * _SLOT_BYTES

    def _write(self, member: NodeMember, now_ns: int) -> None:
        if self._slot is None or _SLOT.unpack_from(self._map, self._at(self._slot))[:2] != self._me:
            self._slot = self._free_slot()
        at = self._at(self._slot)
        powers = list(member.power_w.items())[:DOMAINS]
        _SLOT.pack_into(
            self._map, at, *self._me, now_ns, member.cap_w, member.window_s, member.ratio, member.job, len(powers)
        )
        for i, (domain, (power_w, time_ns)) in enumerate(powers):
            _POWER.pack_into(self._map, at + _SLOT.size + i * _POWER.size, domain, power_w, time_ns)

    def _free_slot(self) -> int:
        for slot in range(SLOTS):
            pid, started = _SLOT.unpack_from(self._map, self._at(slot))[:2]
            if (pid, started) == self._me or pid == 0 or process_start(pid) != started:
                return slot
        raise ScheduleError(
            f"the node's bucket is full: {SLOTS} processes hold a cap", fix="one process per GPU is the usual number"
        )

    def _live_members(self, now_ns: int) -> Iterator[NodeMember]:
        for slot in range(SLOTS):
            at = self._at(slot)
            pid, started, beat, cap_w, window_s, ratio, job, count = _SLOT.unpack_from(self._map, at)
            if pid == 0 or abs(now_ns - beat) > SILENT_NS:
                continue
            if (pid, started) != self._me and process_start(pid) != started:
                _SLOT.pack_into(self._map, at, 0, 0, 0, 0.0, 0.0, 0.0, 0, 0)
                continue
            powers = (_POWER.unpack_from(self._map, at + _SLOT.size + i * _POWER.size) for i in range(count))
            yield NodeMember(pid, cap_w, window_s, ratio, job, {d: (w, t) for d, w, t in powers})

    def _lead(self, head: tuple[bytes, int, int, int, float, float, float], now_ns: int) -> bool:
        """Whether we lead: already, or because the leader is silent or dead."""
        pid, started, beat = head[1:4]
        if (pid, started) == self._me:
            return True
        if pid and abs(now_ns - beat) < SILENT_NS and process_start(pid) == started:
            return False
        self._put_head(now_ns, PaceCommand(head[4], head[5]), head[6])
        return True

    def _put_head(self, now_ns: int, command: PaceCommand, power_w: float) -> None:
        _HEAD.pack_into(self._map, 0, _MAGIC, *self._me, now_ns, command.ratio, command.slice_s, power_w)


def _open(path: Path) -> int:
    """Open or create the file: only ours, not a link, long enough."""
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
    if status.st_size < _BYTES:
        os.ftruncate(fd, _BYTES)
    return fd
