"""Measures what a recorded program and its children use of the CPUs: the fact `cpu_use` of a run file."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import msgspec

from ..errors import SensorUnavailable
from ..recording import CpuUse
from ..sensors.modelled import read_machine_s
from ..sensors.processes import PROC, ProcessTree, read_wait_s

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
FORMATS = {"amx_bf16": "bf16", "avx512_bf16": "bf16", "amx_int8": "int8", "avx512_vnni": "int8", "avx_vnni": "int8"}
"""Narrow formats that a CPU multiplies faster than fp32, by the flag that Linux shows for each."""


class CpuUseCounter:
    """Counts from now on. Call `poll` now and then, so that children are seen before they end."""

    def __init__(self) -> None:
        self._tree: ProcessTree | None = None
        with contextlib.suppress(SensorUnavailable):  # there is no /proc
            self._tree = ProcessTree()
        self._began_s = time.monotonic()
        self._waited_s, self._machine_s = read_wait_s("self"), read_machine_s()

    def poll(self) -> None:
        """Look for new and ended processes."""
        if self._tree is not None:
            self._tree.poll()

    def to_fact(self) -> dict[str, object] | None:
        """Return what is known so far, as plain data; None if nothing is known."""
        if self._tree is None:
            return None
        cpu_s, now_s, machine_s = self._tree.poll(), read_wait_s("self"), read_machine_s()
        torch = sys.modules.get("torch")
        use = CpuUse(
            cpu_s=cpu_s,
            children=self._tree.children(),
            cores=count_cores(),
            threads=torch.get_num_threads() if torch is not None else None,
            waited_s=None if now_s is None or self._waited_s is None else now_s - self._waited_s,
            others_s=None
            if machine_s is None or self._machine_s is None
            else max(machine_s - self._machine_s - cpu_s, 0.0),
            over_s=time.monotonic() - self._began_s,
            formats=list_formats(),
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
