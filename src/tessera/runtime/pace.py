"""Pace points: where work is timed and waits are made, in the stream of a CUDA device or on the host for a CPU.

::

    stream   ■■■■■■■■■■■■ ● wait ■■■■■■■■■■■■ ● wait ■■■       ● a point that found a whole slice of work before it
             ←  slice_s →   ratio x that

Points are put often (after a few launches); each finds out by itself, when it runs, whether a slice is full. So the
host need not know how long kernels take, and a queue of launches obeys the newest `Command`, not the one of its launch.

A point that is given tokens spends them instead: it waits until the bucket, refilled by one token every `token_ns`, is
whole again (tokens.py). A few slices of idling are saved at most, and less than a slice of debt is not waited for.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..errors import ScheduleError
from .bucket import Command

# A stream without a point for longer than this stood idle, mostly, and idling owes nothing; what a longer kernel drew
# the sensor sees. What a thread takes is mostly its own work.
LIMIT_S = 0.05
HOST_LIMIT_S = 0.25
# One wait is never longer: whoever waits for this stream (a collective) waits for minutes before giving up.
LONGEST_S = 5.0
# Points launched and not yet run may be worth so many seconds: beyond, the host waits too, so that leaving a schedule
# or Ctrl-C is not followed by seconds of queued work (a CUDA stream takes about a thousand launches by itself).
AHEAD_S = 0.5
AHEAD = (4, 256)
GIVE_UP_S = 5.0
STREAMS = 32
_LOOK_S = 0.005


@dataclass(frozen=True, slots=True)
class Passed:
    """What pace points have done so far: how many ran, how many of them waited, and for how long.

    `ended_s` is when the last that spent tokens ended, by the device's own clock. `resting_ns` is since when all work
    here has been waiting; None where some runs, or nobody can tell.
    """

    points: int = 0
    waits: int = 0
    waited_s: float = 0.0
    worked_s: float = 0.0
    tokens: int = 0
    ended_s: float = 0.0
    resting_ns: int | None = None


class Pacer(Protocol):
    """Pace points of one device."""

    where: str
    ahead: int  # points that may be queued before the host waits

    def obey(self, command: Command) -> None:
        """Do this from now on, queued points included."""

    def point(self, *, restart: bool = False, tokens: int | None = None) -> None:
        """A point here and now, that may spend tokens; `restart` when the device had nothing to do before it."""

    def passed(self) -> Passed:
        """What the points have done; never waits for the device."""

    def queued(self) -> int:
        """Points that are launched and have not run."""


class HostPacer:
    """Waits on the thread that computes: for a CPU, where launching is running."""

    where = "on the host between operators"
    ahead = AHEAD[1]

    def __init__(
        self, clock_ns: Callable[[], int] = time.monotonic_ns, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock_ns, self._sleep = clock_ns, sleep
        self._command = Command()
        self._threads = threading.local()
        self._lock = threading.Lock()
        self._passed = Passed()
        self._seen: set[int] = set()  # threads that had a point; one that has ended may still compute, for all we know
        self._resting: dict[int, int] = {}  # those that wait, and since when
        self._whole_s = 0.0  # when the bucket of tokens is, or was, whole

    def obey(self, command: Command) -> None:
        self._command = command

    def queued(self) -> int:
        return 0

    def passed(self) -> Passed:
        with self._lock:
            if not self._seen or not self._seen <= self._resting.keys():
                return self._passed
            return replace(self._passed, resting_ns=max(self._resting.values()))

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
            was = self._passed
            self._passed = Passed(
                was.points + 1, was.waits + (waited_s > 0), was.waited_s + waited_s,
                was.worked_s + (busy_s if full else 0.0), was.tokens + (tokens or 0),
                was.ended_s if tokens is None else self._clock_ns() * 1e-9,
            )  # fmt: skip

    def _wait(self, began_ns: int, whole_s: Callable[[], float]) -> float:
        """Sleep in short pieces, so that a new command (or the end) counts at once; seconds slept."""
        me = threading.get_ident()
        with self._lock:
            self._resting[me] = began_ns
        try:
            while True:
                slept_s = (self._clock_ns() - began_ns) * 1e-9
                left_s = min(whole_s(), LONGEST_S) - slept_s
                if left_s <= 0:
                    return max(slept_s, 0.0) if self._command.ratio else 0.0
                self._sleep(min(left_s, _LOOK_S))
        finally:
            with self._lock:
                self._resting.pop(me, None)

    def _spend(self, began_ns: int, busy_s: float, tokens: int) -> float:
        """As the kernel does it (pace_kernel.py); seconds slept."""

        def cost_s() -> float:
            return min(self._command.cost_s(tokens, busy_s), LONGEST_S)

        cost, began_s, slept_s = cost_s(), began_ns * 1e-9, 0.0
        with self._lock:
            before_s = max(self._whole_s, began_s - busy_s - self._command.saved_s)
            self._whole_s = before_s + cost
        if cost > 0 and before_s + cost - began_s >= self._command.slice_s:
            slept_s = self._wait(began_ns, lambda: before_s + now_s - began_s if (now_s := cost_s()) else 0.0)
        newest, now = cost_s(), self._clock_ns() * 1e-9
        with self._lock:
            # released: nothing is owed
            self._whole_s = min(self._whole_s + newest - cost, now + LONGEST_S if self._command.ratio else now)
        return slept_s


class StreamPacer:
    """Waits in the current stream of one CUDA device, without the host: see pace_kernel.py.

    The host's side makes no CUDA call but the launch itself: commands and counts go through pinned memory.
    """

    where = "in the stream between launches"

    def __init__(self, device: Any) -> None:
        import torch

        from . import pace_kernel as kernel

        if torch.cuda.is_current_stream_capturing():
            raise _captured()
        self.ahead = AHEAD[1]

        self._kernel, self.device = kernel, device
        self._lock = threading.Lock()
        self._control = torch.zeros(kernel.WORDS, dtype=torch.int64, device="cpu").pin_memory()
        self._stats = torch.zeros(STREAMS, kernel.WORDS, dtype=torch.int64, device="cpu").pin_memory()
        self._state = torch.zeros(STREAMS, kernel.WORDS, dtype=torch.int64, device=device)
        self._bucket = torch.zeros(kernel.WORDS, dtype=torch.int64, device=device)
        self._spends = False  # whether the kernel of tokens is loaded
        # numpy sees the same memory, and needs no torch call (which a function mode would see) to read it
        self._words, self._counts = self._control.numpy(), self._stats.numpy()
        self._points = self._counts[:, kernel.POINTS]
        self._slots: dict[int, tuple[Any, Any]] = {}
        self._bound: dict[tuple[int, str], Callable[..., None]] = {}
        self._home = 0  # the stream in which work last began
        self._launched = 0
        self._words[kernel.LIMIT_NS] = round(LIMIT_S * 1e9)
        self._words[kernel.LONGEST_NS] = round(LONGEST_S * 1e9)
        self.obey(Command())
        for restart in (True, False) * 2:  # compiled, loaded and bound now: not while a graph is captured
            self.point(restart=restart)
        torch.cuda.synchronize(device)
        if self._ran() < self._launched:
            raise ScheduleError(
                f"pace points do not run on {torch.cuda.get_device_name(device)}",
                why="the kernel's counts in pinned host memory do not reach the host",
                fix='cap_policy="driver" with permission to set the power limit',
            )

    def obey(self, command: Command) -> None:
        self._words[self._kernel.SLICE_NS] = round(command.slice_s * 1e9)
        self._words[self._kernel.RATIO] = round(command.ratio * self._kernel.ONE)
        self._words[self._kernel.SAVED_NS] = round(command.saved_s * 1e9)
        self._words[self._kernel.TOKEN] = round(min(command.token_ns, LONGEST_S * 1e9) * self._kernel.ONE_NS)

    def point(self, *, restart: bool = False, tokens: int | None = None) -> None:
        torch: Any = sys.modules["torch"]
        # A backward hook may come with another device current, and with the launch mode active, which must not take
        # what a launch asks of its tensors for launches.
        with torch.cuda.device(self.device), torch._C.DisableTorchFunction():
            captured = torch.cuda.is_current_stream_capturing()
            if captured and tokens is not None and not self._spends:
                raise _captured()
            if captured and restart:
                return
            ran = self._ran()  # before the launch: what is counted beyond it has yet to run
            self._put(restart, tokens, captured=captured)
        if captured:  # runs at every replay, as often as that may be: not counted as launched
            return
        with self._lock:  # replays run points that were never counted; beyond them the count goes on
            self._launched = max(self._launched, ran) + 1
        if self._launched - ran > self.ahead:
            self._hold_host()

    def _put(self, restart: bool, tokens: int | None, *, captured: bool) -> None:
        torch: Any = sys.modules["torch"]
        # What is captured runs where it is replayed, mostly the stream in which the schedule was entered: it is timed
        # together with what stands between replays.
        here = torch.cuda.current_stream().cuda_stream
        stream = self._home if captured else here
        if restart:
            self._home = stream
        kind = "spends" if tokens is not None else "restarts" if restart else "times"
        bound = self._bound.get((stream, kind))
        if bound is None:
            self._put_first(stream, kind, restart, tokens)
        elif tokens is None:
            bound(here)
        else:
            bound(here, tokens, int(restart))

    def _put_first(self, stream: int, kind: str, restart: bool, tokens: int | None) -> None:
        """The first point of its kind in a stream; the next are launched with the same words."""
        state, stats = self._slot(stream)
        words: tuple[Any, ...]
        if tokens is None:
            compiled = self._kernel.launch(self._control, state, stats, restart=restart)
            words = (self._control, state, stats, restart)
        else:
            compiled = self._kernel.spend(self._control, self._bucket, state, stats, tokens, restart=restart)
            words = (self._control, self._bucket, state, stats)
            self._spends = True
        if compiled is not None:
            self._bound[stream, kind] = self._kernel.launcher(compiled, *words)

    def _slot(self, stream: int) -> tuple[Any, Any]:
        """The words of a stream. More streams than slots share: their points then time each other's work."""
        found = self._slots.get(stream)
        if found is None:
            with self._lock:
                i = len(self._slots) % STREAMS
                found = self._slots.setdefault(stream, (self._state[i], self._stats[i]))
        return found

    def _hold_host(self) -> None:
        """Wait until the queue is half as long. Only looks at memory; gives up where a graph's points confuse it."""
        give_up = time.monotonic() + GIVE_UP_S
        while self.queued() > self.ahead // 2 and time.monotonic() < give_up:
            time.sleep(0.0005)
        if time.monotonic() >= give_up:
            self._launched = self._ran()

    def _ran(self) -> int:
        return int(sum(self._points.tolist()))

    def queued(self) -> int:
        return max(self._launched - self._ran(), 0)

    def passed(self) -> Passed:
        kernel, total = self._kernel, self._counts.sum(axis=0)
        return Passed(
            int(total[kernel.POINTS]), int(total[kernel.WAITS]), float(total[kernel.WAITED_NS]) * 1e-9,
            float(total[kernel.BUSY_NS]) * 1e-9, int(total[kernel.TOKENS]),
            float(self._counts[:, kernel.RESUME_NS].max()) * 1e-9,
        )  # fmt: skip


def _captured() -> ScheduleError:
    return ScheduleError(
        "a power cap begins while a CUDA graph is captured",
        why="its memory and kernel must be there before",
        fix="enter the schedule before the capture, or once before it",
    )


def pacer_of(device: int) -> Pacer:
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
