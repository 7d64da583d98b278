"""Reads from /proc the CPU time of processes, and who owns them: user, Slurm job and Kubernetes pod.

`ProcessTree` counts the CPU time of a process, its threads and its children. When a child ends, no time is lost: the
kernel adds it to its parent's (`cutime` of /proc/PID/stat), and the tree counts only what it had not seen before.
"""

from __future__ import annotations

import functools
import math
import os
import pwd
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage, struct_rusage
from time import process_time
from typing import NamedTuple

from ..errors import SensorUnavailable

PROC = Path("/proc")
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
# Seconds between two full searches for new children, each of which reads a file for each thread. Children of main
# threads are looked for at every poll. What others ran between two searches is in the parent's `cutime`, or seen late.
LOOK_S = 0.5
SHORT_LIVED = "(short-lived)"
"""The name for children that began and ended between two searches."""
KEPT_NAMES = 100

_SLURM_JOB = re.compile(r"/job_(?P<job>\d+)")
_POD = re.compile(r"pod(?P<pod>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStat:
    """The state of one process: the CPU seconds of its threads (`own_s`) and of the children it has waited for."""

    pid: int
    parent: int
    name: str
    began: int
    own_s: float
    children_s: float


def read_stat(pid: int, proc: Path = PROC) -> ProcessStat | None:
    """Return a process by its number; None if it has ended."""
    try:
        text = _read_bytes(f"{proc}/{pid}/stat").decode(errors="replace")
        head, _, rest = text.rpartition(")")  # a name may contain spaces and brackets
        fields = rest.split()
        user, system, child_user, child_system = (int(v) * TICK_S for v in fields[11:15])
        return ProcessStat(
            pid=pid,
            parent=int(fields[1]),
            name=head.partition("(")[2],
            began=int(fields[19]),
            own_s=user + system,
            children_s=child_user + child_system,
        )
    except (OSError, ValueError, IndexError):
        return None


def _read_bytes(path: str) -> bytes:
    """Read a file of /proc without the cost of `open`, because many are read ten times a second."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = b""
        while part := os.read(file, 1 << 16):
            parts += part
        return parts
    finally:
        os.close(file)


def list_processes(proc: Path = PROC) -> Iterator[ProcessStat]:
    """Yield every process that is visible here."""
    for folder in proc.iterdir():
        if folder.name.isdigit() and (stat := read_stat(int(folder.name), proc)) is not None:
            yield stat


def read_wait_s(pid: int | str) -> float | None:
    """Return how long a process's main thread was ready but had no core; None if the kernel does not count it."""
    try:
        return int((PROC / str(pid) / "schedstat").read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return None


def read_thread_s(number: int | None) -> float | None:
    """Return the CPU seconds of a thread of this process, by its native number; None if it is not there."""
    try:
        return int((PROC / "self/task" / str(number) / "schedstat").read_text().split()[0]) * 1e-9
    except (OSError, ValueError, IndexError):
        return None


class OwnCpu(NamedTuple):
    """CPU seconds of this process's threads, and of the children that it has waited for (None: not read)."""

    own_s: float
    waited_s: float | None

    @classmethod
    def of(cls, reading: OwnCpuReading) -> OwnCpu:
        own_s, waited = reading
        return cls(own_s, None if waited is None else waited.ru_utime + waited.ru_stime)


OwnCpuReading = tuple[float, struct_rusage | None]


def read_threads_cpu() -> OwnCpuReading:
    """Read this process's CPU time for `OwnCpu.of`. It takes 0.5 us, because scopes read it at their edges."""
    return process_time(), None


def read_own_cpu() -> OwnCpuReading:
    """Read the same with the children that the process has waited for. It takes 1 us."""
    return process_time(), getrusage(RUSAGE_CHILDREN)


class ProcessTree:
    """Counts the CPU time of a process and everything it started, from now on; without the root if not `with_root`."""

    def __init__(
        self,
        root: int | None = None,
        *,
        with_root: bool = True,
        proc: Path = PROC,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = os.getpid() if root is None else root
        self._with_root = with_root
        self._proc = proc
        self._clock = clock
        self._look_s = -math.inf
        self._members: dict[int, ProcessStat] = {}  # a parent before its children
        self._counted_s: dict[int, float] = {}
        self._ended: dict[str, tuple[int, float]] = {}
        self._alive: dict[str, tuple[int, float]] = {}
        self._polled_s = clock()
        self._owed_s = 0.0
        self._gone_names: list[str] = []  # at the last poll: their parent may have waited for them after it
        self._own = OwnCpu(0.0, 0.0)
        if read_stat(self.root, proc) is None:
            raise SensorUnavailable(
                f"cannot read the CPU time of process {self.root}",
                why=f"{proc}/{self.root}/stat cannot be read",
                fix="the process must be running, and /proc mounted (Linux)",
            )
        self._baseline = True
        self.poll()
        self._baseline = False

    def poll(self) -> float:
        """Count what was used since the last call. Return the CPU seconds since the tree was made."""
        self._own = OwnCpu.of(read_own_cpu())  # first: to read files may take milliseconds on a busy machine
        pids = self._find_members()
        before, self._members = self._members, {}
        waited_s, gone = 0.0, dict(before)
        for pid in pids:
            last = before.get(pid)
            now = self._read(pid, last)
            if now is None or (last is not None and last.began != now.began):
                continue
            self._members[pid] = now
            gone.pop(pid, None)
            start = now if self._baseline else last
            waited_s += now.children_s - (start.children_s if start else 0.0)
            self._counted_s.setdefault(pid, 0.0)
            self._counted_s[pid] += now.own_s - (start.own_s if start else 0.0)
        self._note_alive()
        ended_s = sum(p.own_s + p.children_s for p in gone.values())
        for process in gone.values():
            self._add_ended(process.name, 1, self._counted_s.pop(process.pid, 0.0))
        # A process that ends adds all its time to its parent's, also what was counted here before. If the parent was
        # read just before that, the time arrives at the next poll: `_owed_s` keeps it for one poll.
        unseen_s = waited_s - ended_s - self._owed_s
        self._owed_s = max(ended_s - waited_s, 0.0)
        names = [process.name for process in gone.values()]
        # The time that ended children used after their last read. If no child is known, it was a short-lived one's.
        told = names or self._gone_names or [SHORT_LIVED]
        self._gone_names = names
        if unseen_s > 0:
            for name in told:
                self._add_ended(name, 0, unseen_s / len(told))
        return self.cpu_s

    def _read(self, pid: int, last: ProcessStat | None) -> ProcessStat | None:
        """Read a process; this process in microseconds instead of ticks of 10 ms, and without a file once known."""
        is_own = pid == os.getpid() and self._proc == PROC
        stat = last if is_own and last is not None else read_stat(pid, self._proc)
        if stat is None or not is_own:
            return stat
        return replace(stat, own_s=self._own.own_s, children_s=self._own.waited_s or 0.0)

    @property
    def own_cpu(self) -> OwnCpu | None:
        """Return this process's CPU time at the last `poll`, if it is the root and is counted."""
        is_own = self._with_root and self.root == os.getpid() and self._proc == PROC
        return self._own if is_own else None

    @property
    def cpu_s(self) -> float:
        """Return the CPU seconds up to the last `poll`."""
        own = 0.0 if self._with_root else self._counted_s.get(self.root, 0.0)
        return sum(self._counted_s.values()) - own + sum(seconds for _, seconds in self._ended.values())

    def children(self) -> dict[str, tuple[int, float]]:
        """Return how many children of each name there were, and their CPU seconds, largest first."""
        totals = dict(self._ended)
        for pid, stat in self._members.items():
            if pid != self.root:
                count, seconds = totals.get(stat.name, (0, 0.0))
                totals[stat.name] = (count + 1, seconds + self._counted_s[pid])
        return dict(sorted(totals.items(), key=lambda item: -item[1][1]))

    def alive(self) -> dict[str, tuple[int, float]]:
        """Return the most children of each name at once, and for how many seconds they all lived, together."""
        return dict(self._alive)

    def _note_alive(self) -> None:
        before_s, self._polled_s = self._polled_s, self._clock()
        names = Counter(stat.name for pid, stat in self._members.items() if pid != self.root)
        for name, count in names.items():
            if name in self._alive or len(self._alive) < KEPT_NAMES:
                most, lived_s = self._alive.get(name, (0, 0.0))
                self._alive[name] = max(most, count), lived_s + count * (self._polled_s - before_s)

    def _add_ended(self, name: str, count: int, seconds: float) -> None:
        name = name if name in self._ended or len(self._ended) < KEPT_NAMES else SHORT_LIVED
        had, had_s = self._ended.get(name, (0, 0.0))
        self._ended[name] = (had + count, had_s + seconds)

    def _find_members(self) -> list[int]:
        """Return the root and all its descendants. A child whose parent has ended stays a member."""
        known = list(self._members) or [self.root]
        now_s = self._clock()
        if now_s < self._look_s and not self._has_new_child(known):
            return known
        self._look_s = now_s + LOOK_S
        members = dict.fromkeys(known)
        listed = self._list_children(self.root)
        parents = None if listed is not None else self._read_parents()
        queue = list(members)
        for pid in queue:  # grows while it is read
            if parents is not None:
                children = parents.get(pid, [])
            else:
                children = (listed if pid == self.root else self._list_children(pid)) or []
            new = [child for child in children if child not in members]
            members |= dict.fromkeys(new)
            queue += new
        return list(members)

    def _has_new_child(self, known: Sequence[int]) -> bool:
        """Return whether the main thread of a known process has started a process that is not known."""
        return any(child not in self._members for pid in known for child in self._read_children(pid, pid) or ())

    def _list_children(self, pid: int) -> list[int] | None:
        """Return the children that the kernel lists by thread; None if it lists none (CONFIG_PROC_CHILDREN)."""
        try:
            threads = os.listdir(f"{self._proc}/{pid}/task")  # noqa: PTH208  (a path for each thread costs more)
        except OSError:
            return None
        listed = [children for thread in threads if (children := self._read_children(pid, thread)) is not None]
        return [child for children in listed for child in children] if listed else None

    def _read_children(self, pid: int, thread: int | str) -> list[int] | None:
        try:
            return [int(child) for child in _read_bytes(f"{self._proc}/{pid}/task/{thread}/children").split()]
        except (OSError, ValueError):
            return None  # the thread has ended

    def _read_parents(self) -> dict[int, list[int]]:
        children: dict[int, list[int]] = {}
        for stat in list_processes(self._proc):
            children.setdefault(stat.parent, []).append(stat.pid)
        return children


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOwner:
    """Who owns a process: its user, and its Slurm job and Kubernetes pod if it has one."""

    user: str | None = None
    job: str | None = None
    pod: str | None = None


def find_owner(pid: int, proc: Path = PROC) -> ProcessOwner:
    """Return who owns a process. What cannot be read (another user's environment, an ended process) is None."""
    folder = proc / str(pid)
    groups = _read(folder / "cgroup")
    job = re.search(r"(?:^|\0)SLURM_JOB_ID=(\d+)", _read(folder / "environ")) or _SLURM_JOB.search(groups)
    pod = _POD.search(groups) if "kubepods" in groups else None
    uid = re.search(r"^Uid:\s+(\d+)", _read(folder / "status"), re.MULTILINE)
    return ProcessOwner(
        user=find_user_name(int(uid[1])) if uid else None,
        job=job[1] if job else None,
        pod=pod["pod"].replace("_", "-") if pod else None,
    )


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


@functools.cache
def find_user_name(uid: int) -> str:
    """Return the name of a user, or the number of one that has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
