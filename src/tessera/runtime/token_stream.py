"""Waits for tokens in the streams of a CUDA device, after launches of Tessera's own kernels: see wait_kernel.py.

The host makes no CUDA call except the launch of the wait: commands and counts go through pinned memory, so queued waits
and captured graphs follow the newest command.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import ScheduleError
from .controller import PaceCommand
from .pacer import LIMIT_S, LONGEST_S, PaceCounts

# Waits that are launched and have not run may hold this many seconds of work. Beyond that, the host waits too:
# otherwise seconds of queued work would follow after a schedule ends or after Ctrl-C (a CUDA stream takes about 1000
# launches).
AHEAD_S = 0.5
AHEAD = (4, 256)
GIVE_UP_S = 5.0
STREAMS = 32


class TokenStream:
    """The bucket of one device, and the waits for it in any of its streams."""

    def __init__(self, device: Any) -> None:
        import torch

        from . import wait_kernel as kernel

        if torch.cuda.is_current_stream_capturing():
            raise ScheduleError(
                "a power cap by tokens begins while a CUDA graph is captured",
                why="its memory and kernel must exist before the capture",
                fix="enter the schedule before the capture, or once before it",
            )
        self.ahead = AHEAD[1]
        self._kernel, self.device = kernel, device
        self._lock = threading.Lock()
        self._control = torch.zeros(kernel.WORDS, dtype=torch.int64, device="cpu").pin_memory()
        self._stats = torch.zeros(STREAMS, kernel.WORDS, dtype=torch.int64, device="cpu").pin_memory()
        self._state = torch.zeros(STREAMS, kernel.WORDS, dtype=torch.int64, device=device)
        self._bucket = torch.zeros(kernel.WORDS, dtype=torch.int64, device=device)
        # numpy shares the memory and reads it without a torch call
        self._words, self._numbers = self._control.numpy(), self._stats.numpy()
        self._points = self._numbers[:, kernel.POINTS]
        self._slots: dict[int, tuple[Any, Any]] = {}
        self._launchers: dict[int, Callable[..., None]] = {}
        self._home = 0  # the stream in which work last began
        self._launched = 0
        self._seen = (0, 0.0)  # waits that ran, and their seconds
        self._words[kernel.LIMIT_NS] = round(LIMIT_S * 1e9)
        self._words[kernel.LONGEST_NS] = round(LONGEST_S * 1e9)
        self.obey(PaceCommand())
        for restart in (True, False):  # to compile and load the kernel now, not while a graph is captured
            self.spend(0, restart=restart)
        torch.cuda.synchronize(device)
        if self._count_ran() < self._launched:
            raise ScheduleError(
                f"waits for tokens do not run on {torch.cuda.get_device_name(device)}",
                why="the kernel's counts in pinned host memory do not reach the host",
                fix='tokens="joules"',
            )

    def obey(self, command: PaceCommand) -> None:
        """Follow this command from now on, also with waits that are queued."""
        kernel, words = self._kernel, self._words
        words[kernel.SLICE_NS] = round(command.slice_s * 1e9)
        words[kernel.RATIO] = round(command.ratio * kernel.ONE)
        words[kernel.SAVED_NS] = round(command.saved_s * 1e9)
        words[kernel.TOKEN] = round(min(command.token_ns, LONGEST_S * 1e9) * kernel.ONE_NS)

    def spend(self, tokens: int, *, restart: bool = False) -> None:
        """Make the current stream wait here for the tokens that were spent before."""
        torch: Any = sys.modules["torch"]
        with torch.cuda.device(self.device), torch._C.DisableTorchFunction():
            captured = torch.cuda.is_current_stream_capturing()
            if captured and restart:
                return
            ran = self._count_ran()  # counted before the launch, which has yet to run
            # A captured wait runs where it is replayed, mostly in the stream in which the schedule was entered. So it
            # is timed together with what runs between replays.
            here = torch.cuda.current_stream().cuda_stream
            stream = self._home if captured else here
            if restart:
                self._home = stream
            self._launch(here, stream, tokens, restart)
        if captured:  # it runs at every replay, however often that is, so it is not counted as launched
            return
        with self._lock:  # replays run waits that were never counted, so the count goes on from those that ran
            self._launched = max(self._launched, ran) + 1
        if self._launched - ran > self.ahead:
            self._wait_for_queue()

    def _launch(self, here: int, stream: int, tokens: int, restart: bool) -> None:
        """Launch on `here` with the words of `stream`. The first launch compiles; later ones reuse its launcher."""
        launcher = self._launchers.get(stream)
        if launcher is not None:
            launcher(here, tokens, int(restart))
            return
        words = (self._control, self._bucket, *self._slot(stream))
        compiled = self._kernel.spend(*words, tokens, restart=restart)
        if compiled is not None:
            self._launchers[stream] = self._kernel.make_launcher(compiled, *words)

    def _slot(self, stream: int) -> tuple[Any, Any]:
        """Return the words of a stream. With more streams than slots, some share a slot and time each other's work."""
        slot = self._slots.get(stream)
        if slot is None:
            with self._lock:
                i = len(self._slots) % STREAMS
                slot = self._slots.setdefault(stream, (self._state[i], self._stats[i]))
        return slot

    def _wait_for_queue(self) -> None:
        """Wait until the queue is half as long.

        This only reads memory; it gives up where replayed waits confuse the count.
        """
        give_up = time.monotonic() + GIVE_UP_S
        while self.count_queued() > self.ahead // 2 and time.monotonic() < give_up:
            time.sleep(0.0005)
        if time.monotonic() >= give_up:
            self._launched = self._count_ran()

    def _count_ran(self) -> int:
        return int(sum(self._points.tolist()))

    def count_queued(self) -> int:
        """Return the number of waits that are launched and have not run."""
        return max(self._launched - self._count_ran(), 0)

    def counts(self) -> PaceCounts:
        """Return the counts so far, without waiting for the device."""
        kernel, total = self._kernel, self._numbers.sum(axis=0)
        counts = PaceCounts(
            int(total[kernel.POINTS]),
            int(total[kernel.WAITS]),
            float(total[kernel.WAITED_NS]) * 1e-9,
            float(total[kernel.BUSY_NS]) * 1e-9,
            int(total[kernel.TOKENS]),
            float(self._numbers[:, kernel.RESUME_NS].max()) * 1e-9,
        )
        self._limit_queue(counts)
        return counts

    def _limit_queue(self, counts: PaceCounts) -> None:
        """Let as many waits be queued as take AHEAD_S, by the waits that ran since the last look."""
        points, seconds = counts.points - self._seen[0], counts.worked_s + counts.waited_s - self._seen[1]
        if points > 0 and seconds > 0:
            self.ahead = min(max(round(AHEAD_S * points / seconds), AHEAD[0]), AHEAD[1])
            self._seen = (counts.points, counts.worked_s + counts.waited_s)
