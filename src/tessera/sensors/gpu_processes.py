"""Asks NVML which processes are on which GPU and how much of it each uses. No other module asks for that."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from ._nvml_power import absent_errors

MEMORY, UTILIZATION = "memory per process", "utilisation per process"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """One process on one GPU since the last read. None means that NVML did not say; 0% that only others had samples."""

    memory_bytes: int | None = None
    sm_pct: float | None = None
    memory_pct: float | None = None


class GpuProcessReader:
    """Asks NVML about all processes. What it does not support is noted in `missing` and not asked again."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        self._seen_us = [round(time.time() * 1e6)] * len(self._handles)
        self.missing: dict[str, str] = {}

    @classmethod
    def open(cls) -> GpuProcessReader | None:
        """Return a reader, or None on a machine without NVML."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            return cls(pynvml)
        except pynvml.NVMLError:
            return None

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def read(self) -> dict[str, dict[int, GpuProcess]]:
        """Return the processes on each GPU, by PID."""
        return {f"gpu{index}": self._read_gpu(index) for index in range(len(self._handles))}

    def _read_gpu(self, index: int) -> dict[int, GpuProcess]:
        handle = self._handles[index]
        running = self._ask(MEMORY, self._nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        memory = {p.pid: p.usedGpuMemory for p in running}
        samples = self._ask(UTILIZATION, self._nvml.nvmlDeviceGetProcessUtilization, handle, self._seen_us[index])
        fresh: dict[int, list[Any]] = {}
        for sample in samples:
            if sample.timeStamp > self._seen_us[index]:
                fresh.setdefault(sample.pid, []).append(sample)
        self._seen_us[index] = max([self._seen_us[index], *(s.timeStamp for s in samples)])
        return {
            pid: GpuProcess(
                memory_bytes=None if memory.get(pid) is None else int(memory[pid]),
                sm_pct=_mean(fresh.get(pid, ()), "smUtil") if fresh else None,
                memory_pct=_mean(fresh.get(pid, ()), "memUtil") if fresh else None,
            )
            for pid in memory | fresh
        }

    def _ask(self, what: str, ask: Any, *args: Any) -> list[Any]:
        """Return NVML's answer; [] if it has nothing new, nothing runs, or it cannot tell."""
        if what in self.missing:
            return []
        try:
            return list(ask(*args))
        except self._nvml.NVMLError as exc:
            if isinstance(exc, absent_errors(self._nvml)):
                self.missing[what] = str(exc)
            return []


def _mean(samples: Any, field: str) -> float:
    return sum(float(getattr(s, field)) for s in samples) / len(samples) if samples else 0.0
