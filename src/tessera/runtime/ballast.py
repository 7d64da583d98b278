"""Ballast: work without a result, that runs only where real work leaves the device free.

On a CUDA device it runs in a stream of its own, between calls: it waits in the stream for the end of a call's work, and
a call that begins ends it within `SLOT_S`. A stream of the lowest priority beside the work is not enough:
blocks of a matrix product come in clusters, for which several multiprocessors must be free at once, and ballast takes
each one that is (measured on an H200: products took 6 times as long). On a CPU it runs in processes of the lowest
priority (nice 19). Both read their levels while they run, so that new ones take effect within a slot.
"""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import ScheduleError
from .ballast_control import BIN_S, BINS

SLOT_S = 0.0002
"""How long ballast on a GPU works between two looks at its level: the longest that real work waits for it."""
SLOTS = 1250
"""Slots in one launch: 250 ms. A launch that is already queued when the levels change leaves no ballast for at most two
of them. With launches of 50 ms, the power of an H200 fell by half for some 40 ms in most pauses (2026-11-18): the
host seemed to launch the next one too late.
"""
AHEAD = 2
_POLL_S = 0.005


class Ballast(Protocol):
    """Work that runs when real work has ended, at a level between 0 and 1 for each `BIN_S` since then."""

    where: str

    def set_levels(self, levels: Sequence[float]) -> None:
        """Set the shares of its time that the ballast works from now on; the last one holds for the rest of a pause."""

    def ran_s(self) -> float:
        """Return how long the ballast has worked, in seconds of the whole device at level 1."""

    def begin_work(self) -> None:
        """Stop the ballast, because real work comes now."""

    def end_work(self) -> None:
        """Let the ballast go on after the real work, all of which is queued now."""

    def ended_ns(self) -> int | None:
        """Return when the last real work ended, by the monotonic clock; None while some runs."""

    def close(self) -> None:
        """End the ballast."""


# Each worker spins for its level's share of every 10 ms, and writes its CPU time. A worker ends when its parent does.
# The shared words, in order: whether to stop; when the work ended (0: work runs); how many seconds a level lasts; the
# levels; the CPU time of each worker.
_WORKER = """
import mmap, os, struct, sys, time
os.nice(19)
parent, count = os.getppid(), int(sys.argv[3])
with open(sys.argv[1], "r+b") as file:
    words = mmap.mmap(file.fileno(), 0)
at = 8 * (3 + count + int(sys.argv[2]))
while os.getppid() == parent:
    stop, ended, each, *levels = struct.unpack_from("%dd" % (3 + count), words, 0)
    if stop:
        break
    now = time.monotonic()
    level = levels[min(max(int((now - ended) / each), 0), count - 1)] if ended else 0.0
    while time.monotonic() < now + 0.01 * level:
        pass
    struct.pack_into("d", words, at, time.process_time())
    time.sleep(0.01 * (1.0 - level) if level < 1.0 else 0.0)
"""


class HostBallast:
    """Processes that spin, one for each CPU that this process may use."""

    where = "in processes of the lowest priority"

    def __init__(self, workers: int | None = None) -> None:
        self._count = workers or len(os.sched_getaffinity(0))
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._file.truncate(8 * (3 + BINS + self._count))
        self._words = mmap.mmap(self._file.fileno(), 0)
        struct.pack_into("ddd", self._words, 0, 0.0, time.monotonic(), BIN_S)
        path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        self._workers = [
            subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", _WORKER, path, str(i), str(BINS)], stdin=subprocess.DEVNULL
            )
            for i in range(self._count)
        ]
        self._calls, self._lock = 0, threading.Lock()

    def set_levels(self, levels: Sequence[float]) -> None:
        struct.pack_into(f"{BINS}d", self._words, 24, *levels)

    def ran_s(self) -> float:
        return float(sum(struct.unpack_from(f"{self._count}d", self._words, 24 + 8 * BINS))) / self._count

    def begin_work(self) -> None:
        with self._lock:
            self._calls += 1
            struct.pack_into("d", self._words, 8, 0.0)

    def end_work(self) -> None:
        with self._lock:
            self._calls -= 1
            if not self._calls:
                struct.pack_into("d", self._words, 8, time.monotonic())

    def ended_ns(self) -> int | None:
        (ended_s,) = struct.unpack_from("d", self._words, 8)
        return round(ended_s * 1e9) if ended_s else None

    def close(self) -> None:
        struct.pack_into("d", self._words, 0, 1.0)
        for worker in self._workers:
            try:
                worker.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self._file.close()


class StreamBallast:
    """A kernel in a stream of its own.

    A thread launches one kernel behind the work, and keeps `AHEAD` more queued behind that one.
    """

    where = "in a stream of its own, between calls"

    def __init__(self, device: Any) -> None:
        import torch

        from . import ballast_kernel as kernel

        if torch.version.hip is not None:
            raise ScheduleError("there is no ballast kernel for AMD GPUs yet", why="it reads NVIDIA's %globaltimer")
        self._torch, self._kernel, self.device = torch, kernel, device
        props = torch.cuda.get_device_properties(device)
        each = max(1, props.shared_memory_per_multiprocessor // (kernel.SHARED_BYTES + 1024))
        self._blocks = props.multi_processor_count * min(each, 2)
        # The kernels look at their level in the device's memory. With the level in the host's, on an H200, 250 slots of
        # 0.2 ms took 0.3 s: ballast worked for a fifth of its level.
        self._control = torch.zeros(kernel.LEVELS + BINS, dtype=torch.int64, device=device)
        self._wanted = torch.zeros(kernel.LEVELS + BINS, dtype=torch.int64, device="cpu").pin_memory()
        self._stats = torch.zeros(1, dtype=torch.int64, device=device)
        self._seen = torch.zeros(1, dtype=torch.int64, device="cpu").pin_memory()
        self._words, self._ran = self._wanted.numpy(), self._seen.numpy()
        self._matrices = kernel.make_matrices(torch, device)
        self.stream = torch.cuda.Stream(device, priority=0)  # 0 is the lowest that CUDA has
        self._looks = torch.cuda.Stream(device)
        self._calls, self._lock = 0, threading.Lock()
        self._stop, self._wake = threading.Event(), threading.Event()
        self._end: Any = None  # an event behind the last work
        self._ended_ns: int | None = time.monotonic_ns()
        self._words[kernel.WORKS] = 1
        self._launch()
        torch.cuda.synchronize(device)  # compiled and loaded now, not beside the first work
        self._show(slice(None))
        self._thread = threading.Thread(target=self._run, name="tessera-ballast", daemon=True)
        self._thread.start()

    def set_levels(self, levels: Sequence[float]) -> None:
        with self._lock:
            self._words[self._kernel.LEVELS :] = [round(level * self._kernel.ONE) for level in levels]
            self._show(slice(self._kernel.LEVELS, None))

    def begin_work(self) -> None:
        """Stop the ballast: blocks that run end within a slot, those that are queued end at once."""
        with self._lock:
            self._calls += 1
            self._ended_ns = self._end = None
            self._words[self._kernel.WORKS] = 0
            self._show(slice(None))

    def end_work(self) -> None:
        """Let the ballast that is launched from now on begin after the work that the current stream has."""
        with self._lock:
            self._calls -= 1
            if self._calls:
                return
            self.stream.wait_stream(self._torch.cuda.current_stream(self.device))
            self._end = self._torch.cuda.Event(blocking=True)
            self._end.record(self.stream)
            self._words[self._kernel.WORKS] = 1
            self._show(slice(None))

    def ended_ns(self) -> int | None:
        return self._ended_ns

    def _show(self, part: slice) -> None:
        """Copy words to the device for the kernels: whether to work, and the levels.

        The time since the work starts anew.
        """
        self._copy(self._control[part], self._wanted[part])
        if self._words[self._kernel.WORKS] > 0:
            self._wake.set()

    def _copy(self, to: Any, source: Any) -> None:
        """Copy words between host and device, which needs no multiprocessor."""
        with self._torch.cuda.device(self.device), self._torch.cuda.stream(self._looks):
            to.copy_(source, non_blocking=True)

    def ran_s(self) -> float:
        self._copy(self._seen, self._stats)
        self._looks.synchronize()
        return float(self._ran[0]) * 1e-9 / float(self._blocks)

    def close(self) -> None:
        with self._lock:
            self._words[self._kernel.WORKS] = 0
            self._show(slice(None))
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=1.0)

    def _launch(self) -> Any:
        with self._torch.cuda.device(self.device), self._torch.cuda.stream(self.stream):
            self._kernel.launch(
                self._control, self._stats, self._matrices,
                blocks=self._blocks, slot_ns=round(SLOT_S * 1e9), slots=SLOTS, bin_ns=round(BIN_S * 1e9),
            )  # fmt: skip
            ended = self._torch.cuda.Event()
            ended.record()
        return ended

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        queued: deque[Any] = deque()
        while not self._stop.is_set():
            queued = deque(event for event in queued if not event.query())
            if not self._may_work():
                self._wake.clear()
                if not self._may_work():  # it may have been set between the look and the clearing
                    self._wake.wait(0.1)
                continue
            if len(queued) < (AHEAD if self._ended_ns is not None else 1):
                queued.append(self._launch())
            elif self._ended_ns is None:
                self._wait_for_end()
            else:
                self._stop.wait(_POLL_S)

    def _may_work(self) -> bool:
        """Return whether work has ended, or will, and there is any ballast to add."""
        return bool(self._words[self._kernel.WORKS] > 0 and self._words[self._kernel.LEVELS :].any())

    def _wait_for_end(self) -> None:
        """Wait until the work has ended: in the driver, without the interpreter's lock."""
        end = self._end
        if end is None:
            return
        end.synchronize()
        with self._lock:
            if end is self._end:  # no other work has begun meanwhile
                self._ended_ns = time.monotonic_ns()


def make_ballast(device: int) -> Ballast:
    """Return the ballast of a CUDA device; -1 is the host."""
    if device < 0:
        return HostBallast()
    import torch

    return StreamBallast(torch.device("cuda", device))
