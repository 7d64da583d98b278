"""Where pace points are put: after every few operators, mirrored in the backward pass, and after each call.

A torch function mode sees what Python calls (benchmarks/schedule_cost.py prints what that costs; a dispatch mode costs
about three times as much). It is thread-local and does not see the C++ nodes that autograd runs, so each point of the
forward pass hangs one on the backward node beside it. Code under `torch.compile` is traced through the mode without a
point, and a CUDA graph's replay is one launch: for both the grain is the call. A graph that is captured inside a
schedule has its points inside and obeys them at every replay.

Where tokens of our own kernels are spent there is no mode: their launches are heard of (op/hints.py) wherever they come
from, compiled code and autograd's threads included, and a point follows every few of them.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from ..op import hints
from .bucket import Command
from .pace import AHEAD, AHEAD_S, Pacer, Passed
from .tokens import spent

# Points per slice: enough that a slice ends near its length, few enough that launching them costs little.
PER_SLICE = 2
# While nothing has to wait, a point this often (device seconds) keeps the counts going.
SLACK_S = 0.005
MOST = 256
# Nothing had to wait for so many ticks of the loop (one second): calls are then entered without the mode.
SLACK_TICKS = 50
# A host that was away for longer than this, with nothing queued, has left the device idle.
AWAY_NS = 2_000_000


class Countdown(threading.local):
    """Launches until the next point, of each thread; over all its calls, as one may be a single launch."""

    left = 1


class Cadence:
    """How many launches there are between two points of one pacer; the loop adapts it to the time they take."""

    def __init__(self, pacer: Pacer) -> None:
        self.pacer = pacer
        self.every = 1
        self.left_ns = 0
        self._launches = 0
        self._seen = (0, 0.0)
        self._points, self._waited_s = 0, 0.0
        self._free_ticks = 0
        self._lock = threading.Lock()
        self._tokens, self._left = 0, 1  # spent since the last point, and launches until the next
        self._spends = False

    def point(self) -> int:
        """Put a point here; how many launches until the next."""
        self._launches += self.every
        self.pacer.point()
        return self.every

    def spend(self, tokens: int) -> None:
        """One of our kernels was launched: a point here if it is time for one."""
        with self._lock:
            self._tokens += tokens
            self._left -= 1
            if self._left > 0:
                return
            tokens, self._tokens, self._left = self._tokens, 0, self.every
            self._launches += self.every
        self.pacer.point(tokens=tokens)

    def entered(self, *, spends: bool = False) -> None:
        """A call begins: time in which the device had nothing to do is not work."""
        away = self.left_ns == 0 or (time.monotonic_ns() - self.left_ns > AWAY_NS and self.pacer.queued() == 0)
        if spends and (away or not self._spends):  # the first loads the kernel, which a captured graph could not
            self._spends = True
            self.pacer.point(restart=True, tokens=0)
        elif away:
            self.pacer.point(restart=True)

    def left(self) -> None:
        """A call has ended."""
        self.left_ns = time.monotonic_ns()

    @property
    def slack(self) -> bool:
        """Whether nothing has had to wait for a while: a point after each call will do."""
        return self._free_ticks >= SLACK_TICKS

    def adapt(self, passed: Passed, command: Command) -> None:
        """Set how often points come, from the work that was done since the last time."""
        self._free_ticks = 0 if command.ratio > 0 else self._free_ticks + 1
        launches, worked_s = self._launches - self._seen[0], passed.worked_s - self._seen[1]
        if launches <= 0 or worked_s <= 0:
            return
        points, past_s = passed.points - self._points, (worked_s + passed.waited_s - self._waited_s)
        self._seen, self._points, self._waited_s = (self._launches, passed.worked_s), passed.points, passed.waited_s
        if points > 0:
            self.pacer.ahead = min(max(round(AHEAD_S * points / past_s), AHEAD[0]), AHEAD[1])
        apart_s = command.slice_s / PER_SLICE if command.ratio > 0 else SLACK_S
        self.every = min(max(round(apart_s * launches / worked_s), 1), MOST)


class Launches:
    """Sees the launches of the thread it is entered on.

    `here` finds the cadence of the device they go to, by a result where there is one.
    """

    def __init__(self, here: Callable[..., Cadence], countdown: Countdown, *, each_call: bool) -> None:
        self._here, self._countdown, self._each_call = here, countdown, each_call
        self._mode: Any = None

    def __enter__(self) -> None:
        cadence = self._here()
        cadence.entered()
        if not self._each_call and not cadence.slack:
            self._mode = _mode_class()(self._here, self._countdown)
            self._mode.__enter__()

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: Any) -> None:
        seen_all, self._mode = self._mode, None
        if seen_all is not None:
            seen_all.__exit__(kind, exc, trace)
        if kind is not None:
            return  # after an error of the device's a launch would raise again and hide the first
        self._countdown.left -= 1  # the end of a call is a launch too, and may be all that is seen of it
        if self._each_call or seen_all is None or self._countdown.left <= 0:
            self._countdown.left = self._here().point()
        self._here().left()


class OwnLaunches:
    """Hears of launches of our own kernels on every thread (op/hints.py), and puts a point after every few of them."""

    def __init__(self, here: Callable[..., Cadence], countdown: Countdown) -> None:
        self._here, self._countdown = here, countdown
        self.tokens = "joules"

    def hear(self, wanted: bool) -> None:
        """Hear from now on, or no more."""
        hints.listener = self._heard if wanted else None

    def _heard(self, blocks: int, warps: int, copies: int) -> None:
        cadence = self._here()
        if self.tokens == "joules":  # as another schedule counts: a launch like any other
            self._countdown.left -= 1
            if self._countdown.left <= 0:
                self._countdown.left = cadence.point()
        elif tokens := spent(self.tokens, blocks, warps, copies):
            cadence.spend(tokens)


class OwnCall:
    """Around a call in which our own launches are heard of: nothing stands between it and torch."""

    def __init__(self, here: Callable[..., Cadence]) -> None:
        self._here = here

    def __enter__(self) -> None:
        self._here().entered(spends=True)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: Any) -> None:
        if kind is None:
            self._here().left()


@functools.cache
def _mode_class() -> type:
    """The mode; made late, because torch is imported late."""
    import torch
    from torch.overrides import TorchFunctionMode

    compiling = torch.compiler.is_compiling

    class LaunchMode(TorchFunctionMode):
        """Counts the calls of torch functions, and puts a point after every few of them."""

        def __init__(self, here: Callable[..., Cadence], countdown: Countdown) -> None:
            super().__init__()
            self._here, self._countdown = here, countdown

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **kwargs) if kwargs else func(*args)
            if compiling():  # a trace must not see points, nor depend on our counts
                return out
            countdown = self._countdown
            countdown.left -= 1
            if countdown.left <= 0:
                cadence = self._here(out)
                countdown.left = cadence.point()
                node = getattr(out, "grad_fn", None)
                if node is not None:
                    node.register_prehook(functools.partial(_in_backward, cadence))
            return out

    return LaunchMode


def _in_backward(cadence: Cadence, _grads: Any) -> None:
    """On autograd's thread, in the stream of the forward operator."""
    cadence.point()
