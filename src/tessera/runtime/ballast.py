"""Ballast: work without a result, that runs only where real work leaves the device free.

On a CUDA device it runs in a stream of its own, between calls: it waits in the stream for the end of a call's work, and
a call that begins ends it within `SLOT_S`. A stream of the lowest priority beside the work is not enough:
blocks of a matrix product come in clusters, for which several multiprocessors must be free at once, and ballast takes
each one that is (measured on an H200: products took 6 times as long). On a CPU it runs in processes of the lowest
priority (nice 19). Both read their level while they run, so that a new one takes effect within a slot.
"""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
import tempfile
import threading
from collections import deque
from typing import Any, Protocol

from ..errors import ScheduleError

SLOT_S = 0.0002
"""How long ballast on a GPU works between two looks at its level: the longest that real work waits for it."""
SLOTS = 250
"""In one launch, 50 ms: whoever is killed leaves no ballast for longer."""
AHEAD = 2
_POLL_S = 0.001


class Ballast(Protocol):
    """Work that can be set to a level between 0 and 1."""

    where: str

    def set_level(self, level: float) -> None:
        """The share of its time that it works when the device is free."""

    def ran_s(self) -> float:
        """How long it has worked, in seconds of the whole device at level 1."""

    def begin_work(self) -> None:
        """Real work comes now: make room."""

    def end_work(self) -> None:
        """All of it is queued: go on after it."""

    def close(self) -> None:
        """End it."""


# Each worker spins for `level` of every 10 ms, and writes its CPU time. It ends when its parent does.
_WORKER = """
import mmap, os, struct, sys, time
os.nice(19)
parent = os.getppid()
with open(sys.argv[1], "r+b") as file:
    words = mmap.mmap(file.fileno(), 0)
at = 16 + 8 * int(sys.argv[2])
while os.getppid() == parent:
    level, stop = struct.unpack_from("dd", words, 0)
    if stop:
        break
    end = time.monotonic() + 0.01 * level
    while time.monotonic() < end:
        pass
    struct.pack_into("d", words, at, time.process_time())
    time.sleep(0.01 * (1.0 - level) if level < 1.0 else 0.0)
"""


class HostBallast:
    """Spinning processes, one for each CPU of this one."""

    where = "in processes of the lowest priority"

    def __init__(self, workers: int | None = None) -> None:
        self._count = workers or len(os.sched_getaffinity(0))
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._file.truncate(16 + 8 * self._count)
        self._words = mmap.mmap(self._file.fileno(), 0)
        path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        self._workers = [
            subprocess.Popen([sys.executable, "-S", "-E", "-c", _WORKER, path, str(i)], stdin=subprocess.DEVNULL)
            for i in range(self._count)
        ]
        self._level, self._seen_s = 0.0, 0.0

    def set_level(self, level: float) -> None:
        self._level = level
        struct.pack_into("d", self._words, 0, level)

    def ran_s(self) -> float:
        return float(sum(struct.unpack_from(f"{self._count}d", self._words, 16))) / self._count

    def begin_work(self) -> None:
        """The kernel of the machine makes room by priority."""

    end_work = begin_work

    def is_working(self) -> bool:
        """Whether it worked since the last question, beyond looking at its level."""
        before, self._seen_s = self._seen_s, self.ran_s()
        return self._seen_s - before > 0.002

    def is_running(self) -> bool:
        """Whether a process of it exists."""
        return any(worker.poll() is None for worker in self._workers)

    def close(self) -> None:
        struct.pack_into("dd", self._words, 0, 0.0, 1.0)
        for worker in self._workers:
            try:
                worker.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self._file.close()


class StreamBallast:
    """A kernel in a stream of its own, launched by a thread that keeps `AHEAD` of them queued between calls."""

    where = "in a stream of its own, between calls"

    def __init__(self, device: Any) -> None:
        import torch

        from . import ballast_kernel as kernel

        if torch.version.hip is not None:
            raise ScheduleError("there is no ballast kernel for AMD GPUs yet", why="it reads NVIDIA's %globaltimer")
        self._torch, self._kernel, self.device = torch, kernel, device
        self._blocks = torch.cuda.get_device_properties(device).multi_processor_count * kernel.BLOCKS_PER_SM
        # The kernels look at their level in the device's memory. With the level in the host's, on an H200, 250 slots of
        # 0.2 ms took 0.3 s: ballast worked for a fifth of its level.
        self._control = torch.zeros(1, dtype=torch.int64, device=device)
        self._wanted = torch.zeros(1, dtype=torch.int64, device="cpu").pin_memory()
        self._stats = torch.zeros(1, dtype=torch.int64, device=device)
        self._seen = torch.zeros(1, dtype=torch.int64, device="cpu").pin_memory()
        self._word, self._ran = self._wanted.numpy(), self._seen.numpy()
        self.stream = torch.cuda.Stream(device, priority=0)  # 0 is the lowest that CUDA has
        self._looks = torch.cuda.Stream(device)
        self._level, self._calls, self._lock = 0.0, 0, threading.Lock()
        self._stop, self._wake = threading.Event(), threading.Event()
        self._launch()
        torch.cuda.synchronize(device)  # compiled and loaded now, not beside the first work
        self._thread = threading.Thread(target=self._run, name="tessera-ballast", daemon=True)
        self._thread.start()

    def set_level(self, level: float) -> None:
        with self._lock:
            self._level = level
            self._show()

    def begin_work(self) -> None:
        """Blocks that run end within a slot; those that are queued find no level and end at once."""
        with self._lock:
            self._calls += 1
            self._show()

    def end_work(self) -> None:
        """What is launched from now on begins after the work that the current stream has."""
        with self._lock:
            self._calls -= 1
            if not self._calls:
                self.stream.wait_stream(self._torch.cuda.current_stream(self.device))
            self._show()

    def _show(self) -> None:
        """Tell the kernels the level that holds: none while a call queues its work."""
        self._word[0] = 0 if self._calls else round(self._level * self._kernel.ONE)
        self._copy(self._control, self._wanted)
        if self._word[0] > 0:
            self._wake.set()

    def _copy(self, to: Any, source: Any) -> None:
        """Copy a word between host and device, which needs no multiprocessor."""
        with self._torch.cuda.device(self.device), self._torch.cuda.stream(self._looks):
            to.copy_(source, non_blocking=True)

    def ran_s(self) -> float:
        self._copy(self._seen, self._stats)
        self._looks.synchronize()
        return float(self._ran[0]) * 1e-9 / float(self._blocks)

    def close(self) -> None:
        self.set_level(0.0)
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=1.0)

    def _launch(self) -> Any:
        with self._torch.cuda.device(self.device), self._torch.cuda.stream(self.stream):
            self._kernel.launch(self._control, self._stats, self._blocks, round(SLOT_S * 1e9), SLOTS)
            ended = self._torch.cuda.Event()
            ended.record()
        return ended

    def _run(self) -> None:
        queued: deque[Any] = deque()
        while not self._stop.is_set():
            while queued and queued[0].query():
                queued.popleft()
            if self._word[0] <= 0 and not queued:
                self._wake.clear()
                if self._word[0] <= 0:  # set between the look and the clearing
                    self._wake.wait(0.1)
            elif self._word[0] > 0 and len(queued) < AHEAD:
                queued.append(self._launch())
            else:
                self._stop.wait(_POLL_S)


def make_ballast(device: int) -> Ballast:
    """The ballast of a CUDA device; -1 is the host."""
    if device < 0:
        return HostBallast()
    import torch

    return StreamBallast(torch.device("cuda", device))
