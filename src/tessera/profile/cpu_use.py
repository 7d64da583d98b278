"""Measures what a recorded program and its children use of the CPUs: the fact `cpu_use` of a run file."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from pathlib import Path

import msgspec

from ..errors import SensorUnavailable
from ..recording import CpuUse
from ..sensors.modelled import read_machine_s
from ..sensors.processes import PROC, ProcessTree, read_thread_s, read_wait_s
from .sampling import OWN

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
FORMATS = {"amx_bf16": "bf16", "avx512_bf16": "bf16", "amx_int8": "int8", "avx512_vnni": "int8", "avx_vnni": "int8"}
"""Narrow formats that a CPU multiplies faster than fp32, by the flag that Linux shows for each."""
MOST_THREADS = 100
"""How many threads are looked at: each look takes 10 us, a few times a second."""
_TARGET = re.compile(r"Thread-\d+ \((?P<target>.+)\)")
_NUMBERS = re.compile(r"[-_]\d+(_\d+)?$")


class ThreadTimes:
    """CPU seconds of the Python threads beside the main one, from now on. What one used after the last look is lost.

    The thread that makes this object is traced, and does not count either.
    """

    def __init__(self) -> None:
        self._shown = {threading.main_thread(), threading.current_thread()}
        self._ended: dict[str, tuple[int, float]] = {}
        self._alive: dict[threading.Thread, tuple[float, float]] = {}  # CPU seconds at the first and the last look
        self.poll()
        self._alive = {thread: (last_s, last_s) for thread, (_, last_s) in self._alive.items()}

    def poll(self) -> None:
        """Look at all threads."""
        shown, before = self._shown, self._alive
        threads = [t for t in threading.enumerate() if t not in shown and not t.name.startswith(OWN)][:MOST_THREADS]
        self._alive = {}
        for thread in threads:
            first_s, last_s = before.pop(thread, (0.0, 0.0))
            self._alive[thread] = first_s, max(read_thread_s(thread.native_id) or 0.0, last_s)
        for thread, (first_s, last_s) in before.items():
            _count(self._ended, thread.name, last_s - first_s)

    def by_name(self) -> dict[str, tuple[int, float]]:
        """Return number and CPU seconds by name, most seconds first. `Thread-7 (f)` is `f`, `pool_3` is `pool`."""
        found = dict(self._ended)
        for thread, (first_s, last_s) in list(self._alive.items()):
            _count(found, thread.name, last_s - first_s)
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def _count(found: dict[str, tuple[int, float]], name: str, seconds: float) -> None:
    target = _TARGET.fullmatch(name)
    name = target["target"] if target else _NUMBERS.sub("", name) or name
    number, sum_s = found.get(name, (0, 0.0))
    found[name] = number + 1, sum_s + seconds


class CpuUseCounter:
    """Counts from now on. Call `poll` now and then, so that children are seen before they end."""

    def __init__(self) -> None:
        self._tree: ProcessTree | None = None
        with contextlib.suppress(SensorUnavailable):  # there is no /proc
            self._tree = ProcessTree()
        self._threads = ThreadTimes()
        self._began_s = time.monotonic()
        self._waited_s, self._machine_s = read_wait_s("self"), read_machine_s()

    def poll(self) -> None:
        """Look for new and ended processes and threads."""
        self._threads.poll()
        if self._tree is not None:
            self._tree.poll()

    def to_fact(self) -> dict[str, object] | None:
        """Return what is known so far, as plain data; None if nothing is known."""
        if self._tree is None:
            return None
        self._threads.poll()
        cpu_s, now_s, machine_s = self._tree.poll(), read_wait_s("self"), read_machine_s()
        torch = sys.modules.get("torch")
        use = CpuUse(
            cpu_s=cpu_s,
            children=self._tree.children(),
            alive=self._tree.alive(),
            cores=count_cores(),
            threads=torch.get_num_threads() if torch is not None else None,
            waited_s=None if now_s is None or self._waited_s is None else now_s - self._waited_s,
            others_s=None
            if machine_s is None or self._machine_s is None
            else max(machine_s - self._machine_s - cpu_s, 0.0),
            over_s=time.monotonic() - self._began_s,
            formats=list_formats(),
            beside=self._threads.by_name(),
        )
        fact: dict[str, object] = msgspec.to_builtins(use)
        return fact


def count_cores(quota: Path = CPU_MAX) -> float:
    """Return how many cores this process may use, by its affinity and by its cgroup's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):
        most, period = quota.read_text().split()
        return cores if most == "max" else min(cores, int(most) / int(period))
    return cores


def list_formats(cpuinfo: Path = PROC / "cpuinfo") -> list[str]:
    """List the narrow formats that this CPU multiplies faster than fp32."""
    try:
        flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "").split()
    except OSError:
        return []
    return sorted({FORMATS[flag] for flag in flags if flag in FORMATS})
