"""Samples one process on a thread: CPU and memory at each beat, its use of the GPUs ten times a second.

Device telemetry is the monitor's; it is collected here as it comes, since the monitor keeps the newest only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ...monitor.sampler import Sampler
from ...schema import Telemetry
from ...sensors._nvml_power import absent_errors
from .process import CpuReader, MemoryReader, Target
from .tracks import Section, Track, track

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
        sizes = [int(m) for m in ours if m is not None]
        return sum(sizes) if sizes else None

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


_TELEMETRY_S = 0.1
# An hour at 10 ms. Beyond it every second sample is dropped and the beat doubled, so that memory stays bounded.
MAX_SAMPLES = 400_000


class ProcessSampler:
    """Use it as a `with` block. It ends by itself when the process does; `tracks` has what it saw."""

    def __init__(self, target: Target, interval_s: float, sampler: Sampler, use: ProcessUse | None = None) -> None:
        self._target = target
        self._interval_s = interval_s
        self._sampler = sampler
        self._use = use
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tessera-process", daemon=True)
        self._times_ns, self._cpu_s, self._rss = array("q"), array("d"), array("q")
        self._uses: list[tuple[int, Use]] = []
        self.telemetry: dict[str, list[Telemetry]] = {}
        self.ended_ns: int | None = None
        """When the process was seen to have ended."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)
        if self._use is not None:
            self._use.close()

    @property
    def interval_s(self) -> float:
        """Time between two samples (longer than asked after an hour)."""
        return self._interval_s

    def _run(self) -> None:
        try:
            memory, cpu = MemoryReader(self._target.pid), CpuReader(self._target.pid)
        except OSError:
            self.ended_ns = time.monotonic_ns()
            return
        with contextlib.closing(memory):
            due = time.monotonic()
            slow_due = due
            while not self._stop.wait(max(due - time.monotonic(), 0.0)):
                try:
                    self._sample(memory, cpu)
                except (OSError, IndexError, ValueError):  # the process is gone: its files fail or are empty
                    self.ended_ns = time.monotonic_ns()
                    break
                now = time.monotonic()
                if now >= slow_due:
                    slow_due = now + _TELEMETRY_S
                    self._slow()
                due = max(due + self._interval_s, now)
        self._collect()

    def _sample(self, memory: MemoryReader, cpu: CpuReader) -> None:
        rss = memory.read()
        if rss == 0 or not self._target.alive:  # a zombie has no memory
            raise ProcessLookupError
        cpu_s, now_ns = cpu.read(), time.monotonic_ns()
        self._times_ns.append(now_ns)
        self._cpu_s.append(cpu_s)
        self._rss.append(rss)
        if len(self._times_ns) >= MAX_SAMPLES:
            self._times_ns, self._cpu_s, self._rss = self._times_ns[::2], self._cpu_s[::2], self._rss[::2]
            self._interval_s *= 2

    def _slow(self) -> None:
        self._collect()
        if self._use is not None and len(self._uses) < MAX_SAMPLES:
            now_ns = time.monotonic_ns()
            self._uses += [(now_ns, use) for use in self._use.read()]

    def _collect(self) -> None:
        for domain, readings in list(self._sampler.telemetry.items()):
            ours = self.telemetry.setdefault(domain, [])
            after_ns = ours[-1].time_ns if ours else -1
            if len(ours) < MAX_SAMPLES:
                ours += [t for t in list(readings) if t.time_ns > after_ns]

    def device_telemetry(self, start_ns: int, end_ns: int) -> Mapping[str, Sequence[Telemetry]]:
        """What the devices reported between two times (epoch)."""
        offset_ns = self._sampler.epoch.offset_ns
        moved = {
            domain: [dataclasses.replace(t, time_ns=t.time_ns + offset_ns) for t in readings]
            for domain, readings in self.telemetry.items()
        }
        return {d: [t for t in readings if start_ns <= t.time_ns <= end_ns] for d, readings in moved.items()}

    def tracks(self, sections: Collection[Section]) -> list[Track]:
        """CPU always (100% is one core), the rest by section."""
        tracks = [track("process.cpu", "%", "process", "always", self._cpu_points(), self._cpu_mean())]
        if "mem" in sections:
            points = [(t, float(v)) for t, v in zip(self._times_ns, self._rss, strict=True)]
            tracks.append(track("process.rss", "B", "process", "mem", points))
        for gpu in sorted({u.gpu for _, u in self._uses}):
            here = [(t, u) for t, u in self._uses if u.gpu == gpu]
            if "gpu" in sections:
                sm = [(t, u.sm_pct) for t, u in here if u.sm_pct is not None]
                tracks.append(track(f"process.{gpu}.sm_utilization", "%", "process", "gpu", sm))
            if "mem" in sections:
                held = [(t, float(u.memory_bytes)) for t, u in here if u.memory_bytes is not None]
                tracks.append(track(f"process.{gpu}.memory", "B", "process", "mem", held))
                busy = [(t, u.memory_pct) for t, u in here if u.memory_pct is not None]
                tracks.append(track(f"process.{gpu}.memory_utilization", "%", "process", "mem", busy))
        offset_ns = self._sampler.epoch.offset_ns
        return [dataclasses.replace(t, times_ns=t.times_ns + offset_ns) for t in tracks if t is not None]

    def _cpu_mean(self) -> float | None:
        if len(self._times_ns) < 2:
            return None
        return 100.0 * (self._cpu_s[-1] - self._cpu_s[0]) / ((self._times_ns[-1] - self._times_ns[0]) * 1e-9)

    def _cpu_points(self) -> list[tuple[int, float]]:
        """Percent of a core between two samples, at the second."""
        points = []
        for i in range(1, len(self._times_ns)):
            wall_s = (self._times_ns[i] - self._times_ns[i - 1]) * 1e-9
            share = 100.0 * (self._cpu_s[i] - self._cpu_s[i - 1]) / wall_s if wall_s > 0 else math.nan
            if math.isfinite(share):
                points.append((self._times_ns[i], share))
        return points
