"""`ProcessTable`: which processes use the CPUs and GPUs now, who owns them, and an estimate of their watts.

No sensor sees processes. A CPU's joules are divided by CPU time as `--scope process` does; a board's joules by the SM
time that NVML reports for each process. Both are estimates, and everything that shows them says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..hardware import host_cpu
from ..sensors.gpu_processes import GpuProcessReader
from ..sensors.processes import PROC, ProcessOwner, ProcessStat, find_owner, list_processes
from ..sums import sum_known

LEAST_CORES = 0.005
"""A process that uses fewer cores than this, and no GPU, is not listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """One process on one GPU. None: NVML does not tell."""

    memory_bytes: int | None = None
    sm_pct: float | None = None
    power_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReading:
    """One process since the last reading. Watts are estimates; None if its share is unknown."""

    pid: int
    name: str
    owner: ProcessOwner
    cores: float
    cpu_w: float | None = None
    gpus: Mapping[str, GpuUse] = field(default_factory=dict)

    @property
    def power_w(self) -> float | None:
        """CPU and GPUs together, as far as known."""
        return sum_known((self.cpu_w, *(g.power_w for g in self.gpus.values())))


@dataclass(slots=True)
class OwnerTotal:
    """What the processes of one user, job and pod have used since the start: estimated joules, measured CPU time."""

    cpu_s: float = 0.0
    cpu_j: float | None = None
    gpu_j: float | None = None
    power_w: float | None = None
    gpu_memory_bytes: int | None = None


class ProcessTable:
    """Reads all processes repeatedly, and those on GPUs too if there is NVML."""

    def __init__(
        self,
        *,
        proc: Path = PROC,
        gpus: GpuProcessReader | None = None,
        clock: Callable[[], float] = time.monotonic,
        full_w: float | None = None,
    ) -> None:
        self._proc = proc
        self._gpus = gpus
        self._clock = clock
        self._full_w = full_w
        self._processes: dict[int, ProcessStat] = {}
        self._owners: dict[tuple[int, int], ProcessOwner] = {}
        self._energies: dict[str, float] = {}
        self._read_s = 0.0
        self.totals: dict[ProcessOwner, OwnerTotal] = {}

    @classmethod
    def of_this_machine(cls) -> ProcessTable:
        """Make a table with NVML if it can be loaded, and with the power of the host's CPU."""
        tdp = host_cpu().tdp_w
        return cls(gpus=GpuProcessReader.open(), full_w=tdp.value if tdp is not None else None)

    def read(self, energies: Mapping[str, tuple[str, float]]) -> list[ProcessReading]:
        """Return every running process, most watts first; [] at the first call, which only begins the interval.

        `energies` has the source and the joules since the start for every counted domain.
        """
        now_s, before = self._clock(), self._processes
        took_s, self._read_s = now_s - self._read_s, now_s
        self._processes = {p.pid: p for p in list_processes(self._proc)}
        spent_j = {name: joules - self._energies.get(name, 0.0) for name, (_, joules) in energies.items()}
        self._energies = {name: joules for name, (_, joules) in energies.items()}
        on_gpus = self._read_gpus(spent_j, took_s)
        if not before or took_s <= 0:
            return []
        cpu_s = {p.pid: p.own_s - _own_s(before.get(p.pid), p) for p in self._processes.values()}
        cpu_j = self._share_cpu(energies, spent_j, cpu_s)
        self._owners = {key: owner for key, owner in self._owners.items() if key[0] in self._processes}
        readings = []
        for stat in self._processes.values():
            gpus, seconds = on_gpus.get(stat.pid, {}), cpu_s[stat.pid]
            if gpus or seconds > LEAST_CORES * took_s:
                joules = cpu_j.get(stat.pid)
                readings.append(
                    ProcessReading(
                        pid=stat.pid,
                        name=stat.name,
                        owner=self._owner(stat),
                        cores=seconds / took_s,
                        cpu_w=None if joules is None else joules / took_s,
                        gpus=gpus,
                    )
                )
        self._add_up(readings, took_s)
        return sorted(readings, key=lambda r: (-(r.power_w or 0.0), -r.cores))

    def _owner(self, stat: ProcessStat) -> ProcessOwner:
        key = (stat.pid, stat.began)
        if key not in self._owners:
            self._owners[key] = find_owner(stat.pid, self._proc)
        return self._owners[key]

    def _share_cpu(
        self, energies: Mapping[str, tuple[str, float]], spent_j: Mapping[str, float], cpu_s: Mapping[int, float]
    ) -> dict[int, float]:
        """Return joules by process: modelled ones by the CPU's power curve, measured ones by the share of CPU time."""
        packages = [name for name in energies if name.startswith(("cpu", "dram"))]
        busy_s = sum(cpu_s.values())
        if not packages or busy_s <= 0:
            return {}
        if all(energies[name][0] == "modelled" for name in packages):
            each_w = (self._full_w or 0.0) / (os.cpu_count() or 1)
            return {pid: each_w * seconds for pid, seconds in cpu_s.items()} if each_w else {}
        joules = sum(spent_j[name] for name in packages)
        return {pid: joules * seconds / busy_s for pid, seconds in cpu_s.items()}

    def _read_gpus(self, spent_j: Mapping[str, float], took_s: float) -> dict[int, dict[str, GpuUse]]:
        """Return each process's use of each GPU by NVML, with a share of the board's watts by its SM time."""
        found: dict[int, dict[str, GpuUse]] = {}
        for gpu, running in (self._gpus.read() if self._gpus is not None else {}).items():
            all_pct, joules = sum(p.sm_pct or 0.0 for p in running.values()), spent_j.get(gpu)
            for pid, on in running.items():
                power_w = None
                if joules is not None and all_pct > 0 and took_s > 0:
                    power_w = joules * (on.sm_pct or 0.0) / all_pct / took_s
                found.setdefault(pid, {})[gpu] = GpuUse(memory_bytes=on.memory_bytes, sm_pct=on.sm_pct, power_w=power_w)
        return found

    def _add_up(self, readings: Sequence[ProcessReading], took_s: float) -> None:
        for total in self.totals.values():
            total.power_w = total.gpu_memory_bytes = None
        for r in readings:
            total = self.totals.setdefault(r.owner, OwnerTotal())
            total.cpu_s += r.cores * took_s
            if r.cpu_w is not None:
                total.cpu_j = (total.cpu_j or 0.0) + r.cpu_w * took_s
            if r.power_w is not None:
                total.power_w = (total.power_w or 0.0) + r.power_w
            for use in r.gpus.values():
                if use.power_w is not None:
                    total.gpu_j = (total.gpu_j or 0.0) + use.power_w * took_s
                if use.memory_bytes is not None:
                    total.gpu_memory_bytes = (total.gpu_memory_bytes or 0) + use.memory_bytes


def _own_s(before: ProcessStat | None, now: ProcessStat) -> float:
    """Return the CPU seconds a process had at the last reading; 0 if it began since."""
    return before.own_s if before is not None and before.began == now.began else 0.0
