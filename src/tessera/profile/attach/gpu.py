"""What NVML says of one process on each GPU: its memory, and its share of the SMs' and the memory's time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ...sensors._nvml_power import absent_errors

# The driver has a new utilisation sample about six times a second.
PERIOD_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One process's use of one GPU at a moment. None: NVML did not say."""

    gpu: str
    memory_bytes: int | None = None
    sm_pct: float | None = None
    memory_pct: float | None = None


class ProcessUse:
    """Asks NVML about some PIDs; what it does not support is noted in `missing` and not asked again."""

    def __init__(self, nvml: Any, pids: Collection[int]) -> None:
        self._nvml = nvml
        self._pids = frozenset(pids)
        nvml.nvmlInit()
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        self._seen_us = dict.fromkeys(range(len(self._handles)), int(time.time() * 1e6))
        self.missing: dict[str, str] = {}
        self.others = False
        """Whether NVML lists processes, but not ours: in a container it may list the host's PIDs."""
        self.found = False

    def read(self) -> list[Use]:
        """The GPUs the process is on, now."""
        uses = []
        for index, handle in enumerate(self._handles):
            memory_bytes = self._memory(handle)
            sm_pct, memory_pct = self._shares(index, handle)
            if memory_bytes is not None or sm_pct:
                self.found = True
                uses.append(Use(gpu=f"gpu{index}", memory_bytes=memory_bytes, sm_pct=sm_pct, memory_pct=memory_pct))
        return uses

    def close(self) -> None:
        """Let go of NVML."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _memory(self, handle: Any) -> int | None:
        what = "memory per process"
        if what in self.missing:
            return None
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._nvml.NVMLError as exc:
            self._note(what, exc)
            return None
        ours = [p.usedGpuMemory for p in running if p.pid in self._pids]
        self.others |= len(ours) < len(running)
        known = [int(m) for m in ours if m is not None]
        return sum(known) if known else None

    def _shares(self, index: int, handle: Any) -> tuple[float | None, float | None]:
        """Percent of the time since the last look; 0 where NVML has samples of others only, None where it has none."""
        what = "utilisation per process"
        if what in self.missing:
            return None, None
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(handle, self._seen_us[index])
        except self._nvml.NVMLError_NotFound:  # nothing new, or nothing ran
            return None, None
        except self._nvml.NVMLError as exc:
            self._note(what, exc)
            return None, None
        fresh = [s for s in samples if s.timeStamp > self._seen_us[index]]
        if not fresh:
            return None, None
        self._seen_us[index] = max(s.timeStamp for s in fresh)
        ours = [s for s in fresh if s.pid in self._pids]
        return _sum(ours, "smUtil"), _sum(ours, "memUtil")

    def _note(self, what: str, exc: Exception) -> None:
        if isinstance(exc, absent_errors(self._nvml)):
            self.missing[what] = str(exc)


def _sum(samples: list[Any], field: str) -> float:
    """The newest sample of each PID, added up."""
    newest = {s.pid: s for s in sorted(samples, key=lambda s: s.timeStamp)}
    return float(sum(getattr(s, field) for s in newest.values()))


def open_use(pids: Collection[int]) -> ProcessUse | None:
    """A reader, or None on a machine without NVML."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        return ProcessUse(pynvml, pids)
    except pynvml.NVMLError:
        return None
