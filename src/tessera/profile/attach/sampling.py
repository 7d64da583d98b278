"""Samples one process on a thread: CPU and memory at every interval, its use of the GPUs ten times a second.

The monitor reads the devices' telemetry and keeps only the newest; it is collected here as it comes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Self

from ...monitor.sampler import Sampler
from ...schema import Telemetry
from ...sensors.gpu_processes import GpuProcess, GpuProcessReader
from ...sums import sum_known
from .process import CpuReader, MemoryReader, Target
from .tracks import Section, Track, track


class ProcessUse:
    """Reads how much some processes together use each GPU."""

    def __init__(self, gpus: GpuProcessReader, pids: Collection[int]) -> None:
        self._gpus = gpus
        self._pids = frozenset(pids)
        self.others = False
        """Whether NVML has listed processes other than ours."""
        self.found = False

    @property
    def missing(self) -> Mapping[str, str]:
        """The figures that NVML does not give -> why."""
        return self._gpus.missing

    def read(self) -> dict[str, GpuProcess]:
        """Return the present use of each GPU on which the processes are."""
        uses = {}
        for gpu, running in self._gpus.read().items():
            ours = [use for pid, use in running.items() if pid in self._pids]
            self.others |= len(ours) < len(running)
            use = GpuProcess(
                memory_bytes=sum_known(u.memory_bytes for u in ours),
                sm_pct=sum_known(u.sm_pct for u in ours),
                memory_pct=sum_known(u.memory_pct for u in ours),
            )
            if use.memory_bytes is not None or use.sm_pct:
                self.found = True
                uses[gpu] = use
        return uses

    def close(self) -> None:
        self._gpus.close()


# The driver has a new utilisation sample about six times a second.
_TELEMETRY_S = 0.1
# An hour at 10 ms. Then every second sample is dropped and the interval is doubled, so that memory stays bounded.
MAX_SAMPLES = 400_000


class ProcessSampler:
    """Samples one process during a `with` block, or until the process ends; `tracks` returns the samples."""

    def __init__(self, target: Target, interval_s: float, sampler: Sampler, use: ProcessUse | None) -> None:
        self._target = target
        self._interval_s = interval_s
        self._sampler = sampler
        self._use = use
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tessera-process", daemon=True)
        self._times_ns, self._cpu_s, self._rss = array("q"), array("d"), array("q")
        self._uses: dict[str, list[tuple[int, GpuProcess]]] = {}
        self._looks = 0
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
        """Time between two samples; in long recordings it is longer than asked (`MAX_SAMPLES`)."""
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
        if self._use is not None and self._looks < MAX_SAMPLES:
            now_ns, self._looks = time.monotonic_ns(), self._looks + 1
            for gpu, use in self._use.read().items():
                self._uses.setdefault(gpu, []).append((now_ns, use))

    def _collect(self) -> None:
        for domain, readings in list(self._sampler.telemetry.items()):
            ours = self.telemetry.setdefault(domain, [])
            after_ns = ours[-1].time_ns if ours else -1
            if len(ours) < MAX_SAMPLES:
                ours += [t for t in list(readings) if t.time_ns > after_ns]

    def device_telemetry(self, start_ns: int, end_ns: int) -> Mapping[str, Sequence[Telemetry]]:
        """Return what the devices reported between two epoch times."""
        offset_ns = self._sampler.epoch.offset_ns
        moved = {
            domain: [dataclasses.replace(t, time_ns=t.time_ns + offset_ns) for t in readings]
            for domain, readings in self.telemetry.items()
        }
        return {d: [t for t in readings if start_ns <= t.time_ns <= end_ns] for d, readings in moved.items()}

    def tracks(self, sections: Collection[Section]) -> list[Track]:
        """Return the tracks of the process: always CPU (100% is one core), others if their section is asked for."""
        tracks = [track("process.cpu", "%", "process", "always", self._cpu_points(), self._cpu_mean())]
        if "mem" in sections:
            points = [(t, float(v)) for t, v in zip(self._times_ns, self._rss, strict=True)]
            tracks.append(track("process.rss", "B", "process", "mem", points))
        for gpu, here in sorted(self._uses.items()):
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
        """Return the percent of a core used between two samples, at the time of the later sample."""
        points = []
        for i in range(1, len(self._times_ns)):
            wall_s = (self._times_ns[i] - self._times_ns[i - 1]) * 1e-9
            share = 100.0 * (self._cpu_s[i] - self._cpu_s[i - 1]) / wall_s if wall_s > 0 else math.nan
            if math.isfinite(share):
                points.append((self._times_ns[i], share))
        return points
