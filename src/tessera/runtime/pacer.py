"""Pace points: they time the work before them and wait, in the stream of a CUDA device or on the host for a CPU.

::

    stream   ■■■■■■■■■■■■ ● wait ■■■■■■■■■■■■ ● wait ■■■       ● a point that found a whole slice of work before it
             ←  slice_s →   ratio x that

Points come often (after a few launches); each decides when it runs whether a slice is full. So the host need not know
how long kernels take, and queued launches follow the newest `PaceCommand`, not the one at their launch.

A point with tokens spends them instead: it waits until the bucket, which regains one token every `token_ns`, is full
again. At most a few slices of idling are saved, and a debt of less than a slice is not waited for.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..errors import ScheduleError
from .controller import PaceCommand

# A stream without a point for longer than this was mostly idle, and idling owes nothing; the sensor sees what a longer
# kernel drew. The time of a host thread is mostly its own work.
LIMIT_S = 0.05
HOST_LIMIT_S = 0.25
# The longest wait: whoever waits for this stream (a collective) gives up after minutes.
LONGEST_S = 5.0
# Points that are launched and have not run may hold this many seconds of work. Beyond, the host waits too, so that
# leaving a schedule or Ctrl-C is not followed by seconds of queued work (a CUDA stream takes about 1000 launches).
AHEAD_S = 0.5
AHEAD = (4, 256)
GIVE_UP_S = 5.0
STREAMS = 32
_LOOK_S = 0.005


@dataclass(frozen=True, slots=True)
class PaceCounts:
    """What pace points have done so far: how many ran, how many of them waited, and for how long.

    `ended_s` is when the last one that spent tokens ended, by the device's own clock. `resting_ns` is since when all
    work has been waiting; None where some runs, or nobody can tell. Sums and differences leave both out.
    """

    points: int = 0
    waits: int = 0
    waited_s: float = 0.0
    worked_s: float = 0.0
    tokens: int = 0
    ended_s: float = 0.0
    resting_ns: int | None = None

    def __add__(self, other: PaceCounts) -> PaceCounts:
        return PaceCounts(
            self.points + other.points,
            self.waits + other.waits,
            self.waited_s + other.waited_s,
            self.worked_s + other.worked_s,
            self.tokens + other.tokens,
        )

    def __sub__(self, other: PaceCounts) -> PaceCounts:
        return self + PaceCounts(-other.points, -other.waits, -other.waited_s, -other.worked_s, -other.tokens)


class Pacer(Protocol):
    """The pace points of one device."""

    where: str
    ahead: int  # points that may be queued before the host waits

    def obey(self, command: PaceCommand) -> None:
        """Follow this command from now on, queued points included."""

    def point(self, *, restart: bool = False, tokens: int | None = None) -> None:
        """Put a point here, which may spend tokens; `restart` when the device had nothing to do before it."""

    def counts(self) -> PaceCounts:
        """What the points have done; never waits for the device."""

    def count_queued(self) -> int:
        """Points that are launched and have not run."""


class HostPacer:
    """Waits on the thread that computes: for a CPU, where launching is running."""

    where = "on the host between operators"
    ahead = AHEAD[1]

    def __init__(
        self, clock_ns: Callable[[], int] = time.monotonic_ns, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock_ns, self._sleep = clock_ns, sleep
        self._command = PaceCommand()
        self._threads = threading.local()
        self._lock = threading.Lock()
        self._counts = PaceCounts()
        self._seen: set[int] = set()  # threads that had a point; one that has ended may still compute, for all we know
        self._resting: dict[int, int] = {}  # threads that wait, and since when
        self._full_s = 0.0  # when the bucket of tokens is, or was, full

    def obey(self, command: PaceCommand) -> None:
        self._command = command

    def count_queued(self) -> int:
        return 0

    def counts(self) -> PaceCounts:
        with self._lock:
            if not self._seen or not self._seen <= self._resting.keys():
                return self._counts
            return replace(self._counts, resting_ns=max(self._resting.values()))

    def point(self, *, restart: bool = False, tokens: int | None = None) -> None:
        began = self._clock_ns()
        resume: int = getattr(self._threads, "resume_ns", began)
        busy_s = 0.0 if restart else min(max((began - resume) * 1e-9, 0.0), HOST_LIMIT_S)
        waited_s = 0.0
        full = tokens is not None or busy_s >= self._command.slice_s
        if tokens is not None:
            waited_s = self._spend(began, busy_s, tokens)
        elif full:
            waited_s = self._wait(began, lambda: busy_s * self._command.ratio)
        if full or restart or resume == began:
            self._threads.resume_ns = self._clock_ns()
        with self._lock:
            self._seen.add(threading.get_ident())
            ended_s = self._counts.ended_s if tokens is None else self._clock_ns() * 1e-9
            one = PaceCounts(1, int(waited_s > 0), waited_s, busy_s if full else 0.0, tokens or 0)
            self._counts = replace(self._counts + one, ended_s=ended_s)

    def _wait(self, began_ns: int, total_s: Callable[[], float]) -> float:
        """Sleep in short pieces, so that a new command (or the end) takes effect at once; seconds slept."""
        me = threading.get_ident()
        with self._lock:
            self._resting[me] = began_ns
        try:
            while True:
                slept_s = (self._clock_ns() - began_ns) * 1e-9
                left_s = min(total_s(), LONGEST_S) - slept_s
                if left_s <= 0:
                    return max(slept_s, 0.0) if self._command.ratio else 0.0
                self._sleep(min(left_s, _LOOK_S))
        finally:
            with self._lock:
                self._resting.pop(me, None)

    def _spend(self, began_ns: int, busy_s: float, tokens: int) -> float:
        """The same as the kernel does (wait_kernel.py); seconds slept."""

        def cost_s() -> float:
            return min(self._command.cost_s(tokens, busy_s), LONGEST_S)

        cost, began_s, slept_s = cost_s(), began_ns * 1e-9, 0.0
        with self._lock:
            before_s = max(self._full_s, began_s - busy_s - self._command.saved_s)
            self._full_s = before_s + cost
        if cost > 0 and before_s + cost - began_s >= self._command.slice_s:
            slept_s = self._wait(began_ns, lambda: before_s + now_s - began_s if (now_s := cost_s()) else 0.0)
        newest, now = cost_s(), self._clock_ns() * 1e-9
        with self._lock:
            # without a ratio the schedule has ended, and nothing is owed
            self._full_s = min(self._full_s + newest - cost, now + LONGEST_S if self._command.ratio else now)
        return slept_s


class StreamPacer:
    """Waits in the current stream of one CUDA device, without the host: see wait_kernel.py.

    The host makes no CUDA call except the launch itself: commands and counts go through pinned memory.
    """

    where = "in the stream between launches"

    def __init__(self, device: Any) -> None:
        import torch

        from . import wait_kernel as kernel

        if torch.cuda.is_current_stream_capturing():
            raise _capturing_error()
        self.ahead = AHEAD[1]
        self._kernel, self.device = kernel, device
        self._lock = threading.Lock()
        self._control = torch.zeros(kernel.WORDS, dtype=torch.int64, device="cpu").pin_memory()
        self._stats = torch.zeros(STREAMS, kernel.WORDS, dtype=torch.int64, device="cpu").pin_memory()
        self._state = torch.zeros(STREAMS, kernel.WORDS, dtype=torch.int64, device=device)
        self._bucket = torch.zeros(kernel.WORDS, dtype=torch.int64, device=device)
        self._spends = False  # whether the kernel of tokens is loaded
        # numpy shares the memory and reads it without a torch call, which a function mode would see
        self._words, self._numbers = self._control.numpy(), self._stats.numpy()
        self._points = self._numbers[:, kernel.POINTS]
        self._slots: dict[int, tuple[Any, Any]] = {}
        self._launchers: dict[tuple[int, str], Callable[..., None]] = {}
        self._home = 0  # the stream in which work last began
        self._launched = 0
        self._words[kernel.LIMIT_NS] = round(LIMIT_S * 1e9)
        self._words[kernel.LONGEST_NS] = round(LONGEST_S * 1e9)
        self.obey(PaceCommand())
        for restart in (True, False) * 2:  # compiled and loaded now, not while a graph is captured
            self.point(restart=restart)
        torch.cuda.synchronize(device)
        if self._count_ran() < self._launched:
            raise ScheduleError(
                f"pace points do not run on {torch.cuda.get_device_name(device)}",
                why="the kernel's counts in pinned host memory do not reach the host",
                fix='cap_policy="driver" with permission to set the power limit',
            )

    def obey(self, command: PaceCommand) -> None:
        self._words[self._kernel.SLICE_NS] = round(command.slice_s * 1e9)
        self._words[self._kernel.RATIO] = round(command.ratio * self._kernel.ONE)
        self._words[self._kernel.SAVED_NS] = round(command.saved_s * 1e9)
        self._words[self._kernel.TOKEN] = round(min(command.token_ns, LONGEST_S * 1e9) * self._kernel.ONE_NS)

    def point(self, *, restart: bool = False, tokens: int | None = None) -> None:
        torch: Any = sys.modules["torch"]
        # A backward hook may run with another device current, and under the launch mode, which must not count the
        # torch calls of a launch as launches.
        with torch.cuda.device(self.device), torch._C.DisableTorchFunction():
            captured = torch.cuda.is_current_stream_capturing()
            if captured and tokens is not None and not self._spends:
                raise _capturing_error()
            if captured and restart:
                return
            ran = self._count_ran()  # before the launch: what is counted beyond it has yet to run
            # A captured point runs where it is replayed, mostly the stream in which the schedule was entered: it is
            # timed together with what runs between replays.
            here = torch.cuda.current_stream().cuda_stream
            stream = self._home if captured else here
            if restart:
                self._home = stream
            self._launch(here, stream, restart, tokens)
        if captured:  # runs at every replay, however often that is: not counted as launched
            return
        with self._lock:  # replays run points that were never counted; beyond them the count continues
            self._launched = max(self._launched, ran) + 1
        if self._launched - ran > self.ahead:
            self._wait_for_queue()

    def _launch(self, here: int, stream: int, restart: bool, tokens: int | None) -> None:
        """Launch on `here` with the words of `stream`; the first of a kind compiles, the next reuse its launcher."""
        kind = "spends" if tokens is not None else "restarts" if restart else "times"
        launcher = self._launchers.get((stream, kind))
        if launcher is not None:
            launcher(here, *(() if tokens is None else (tokens, int(restart))))
            return
        state, stats = self._slot(stream)
        words: tuple[Any, ...]
        if tokens is None:
            words = (self._control, state, stats, restart)
            compiled = self._kernel.launch(*words[:3], restart=restart)
        else:
            words = (self._control, self._bucket, state, stats)
            compiled = self._kernel.spend(*words, tokens, restart=restart)
            self._spends = True
        if compiled is not None:
            self._launchers[stream, kind] = self._kernel.make_launcher(compiled, *words)

    def _slot(self, stream: int) -> tuple[Any, Any]:
        """The words of a stream. With more streams than slots some share, and then time each other's work."""
        slot = self._slots.get(stream)
        if slot is None:
            with self._lock:
                i = len(self._slots) % STREAMS
                slot = self._slots.setdefault(stream, (self._state[i], self._stats[i]))
        return slot

    def _wait_for_queue(self) -> None:
        """Wait until the queue is half as long. Only reads memory; gives up where replayed points confuse the count."""
        give_up = time.monotonic() + GIVE_UP_S
        while self.count_queued() > self.ahead // 2 and time.monotonic() < give_up:
            time.sleep(0.0005)
        if time.monotonic() >= give_up:
            self._launched = self._count_ran()

    def _count_ran(self) -> int:
        return int(sum(self._points.tolist()))

    def count_queued(self) -> int:
        return max(self._launched - self._count_ran(), 0)

    def counts(self) -> PaceCounts:
        kernel, total = self._kernel, self._numbers.sum(axis=0)
        return PaceCounts(
            int(total[kernel.POINTS]),
            int(total[kernel.WAITS]),
            float(total[kernel.WAITED_NS]) * 1e-9,
            float(total[kernel.BUSY_NS]) * 1e-9,
            int(total[kernel.TOKENS]),
            float(self._numbers[:, kernel.RESUME_NS].max()) * 1e-9,
        )


def _capturing_error() -> ScheduleError:
    return ScheduleError(
        "a power cap begins while a CUDA graph is captured",
        why="its memory and kernel must exist before the capture",
        fix="enter the schedule before the capture, or once before it",
    )


def make_pacer(device: int) -> Pacer:
    """The pacer of a CUDA device; -1 is the host."""
    if device < 0:
        return HostPacer()
    import torch

    if torch.version.hip is not None:
        raise ScheduleError(
            "there is no pace kernel for AMD GPUs yet",
            why="it reads NVIDIA's %globaltimer",
            fix='cap_policy="driver" with permission to set the power limit',
        )
    return StreamPacer(torch.device("cuda", device))
