"""Where pace points are put: after every few operators, mirrored in the backward pass, and after each call.

A torch function mode sees what Python calls (benchmarks/measure/schedule_cost.py prints the cost; a dispatch mode costs
about three times as much). Most of it launches nothing (views, attributes, the optimizer's Python) and is not counted;
a call on much data counts as several launches, so that a point follows the long ones. The mode is thread-local and does
not see the C++ nodes that autograd runs, so each point of the forward pass hangs one on the backward node beside it.
Code under `torch.compile` is traced through the mode without a point, and a CUDA graph's replay is one launch: for both
the grain is the call. A graph that is captured inside a schedule has its points inside and obeys them at every replay.

Where tokens of our own kernels are spent there is no mode: their launches are heard of (op/hints.py) wherever they come
from, compiled code and autograd's threads included, and a point follows every few of them.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..op import hints
from .bucket import Command
from .pace import AHEAD, AHEAD_S, Pacer, Passed
from .tokens import spent

# Points per slice: enough that a slice ends near its length (where the sensor beats with it, it has to become another),
# few enough that launching them costs little.
PER_SLICE = 3
# While nothing has to wait, a point this often (device seconds) keeps the counts going.
SLACK_S = 0.005
MOST = 1024
# Nothing had to wait for so many ticks of the loop (one second): calls are then entered without the mode.
SLACK_TICKS = 50
# How often points come is by the work of about this long (device seconds): a training step's parts differ.
RECENT_S = 0.25
# As many elements take about as long as a launch takes anyway (16 MB to read and write, 5 us of an H200's memory).
LAUNCH_ELEMENTS = 1 << 22
# Calls that launch nothing: attributes, views, questions, and what surrounds regions.
FREE = frozenset((
    "__get__", "__set__", "__len__", "__repr__", "__hash__", "size", "stride", "dim", "ndimension", "numel",
    "nelement", "storage_offset", "data_ptr", "element_size", "get_device", "is_complex", "is_floating_point",
    "is_contiguous", "is_signed", "is_pinned", "is_shared", "view", "view_as", "reshape", "reshape_as", "transpose",
    "swapaxes", "t", "permute", "movedim", "unsqueeze", "squeeze", "expand", "expand_as", "split", "chunk", "unbind",
    "narrow", "select", "unfold", "flatten", "unflatten", "detach", "item", "requires_grad_", "retain_grad",
    "register_hook", "_set_grad_enabled", "_record_function_enter_new", "_record_function_exit._RecordFunction",
))  # fmt: skip
# A host that was away for longer than this, with nothing queued, has left the device idle.
AWAY_NS = 2_000_000


class Countdown(threading.local):
    """Launches until the next point, of each thread; over all its calls, as one may be a single launch."""

    left = of = 1

    def end(self, cadence: Cadence) -> int:
        """Put a point here and count anew; the launches since the last one."""
        launches = self.of - self.left
        cadence.point(launches)
        self.left = self.of = cadence.every
        return launches


class Cadence:
    """How many launches there are between two points of one pacer; the loop adapts it to the time they take."""

    def __init__(self, pacer: Pacer) -> None:
        self.pacer = pacer
        self.every = 1
        self.left_ns = 0
        self._put: deque[int] = deque(maxlen=4096)  # the launches before each point that has yet to run
        self._seen = Passed()
        self._recent = (0.0, 0.0, 0.0, 0.0)  # launches, seconds worked, points, seconds
        self._free_ticks = 0
        self._lock = threading.Lock()
        self._tokens, self._left = 0, 1  # spent since the last point, and launches until the next
        self._spends = False

    def point(self, launches: int = 1) -> None:
        """Put a point here, after so many launches."""
        self._put.append(launches)
        self.pacer.point()

    def spend(self, tokens: int) -> None:
        """One of our kernels was launched: a point here if it is time for one."""
        with self._lock:
            self._tokens += tokens
            self._left -= 1
            if self._left > 0:
                return
            tokens, self._tokens, self._left = self._tokens, 0, self.every
            self._put.append(self.every)
        self.pacer.point(tokens=tokens)

    def entered(self, *, spends: bool = False) -> None:
        """A call begins: time in which the device had nothing to do is not work."""
        away = self.left_ns == 0 or (time.monotonic_ns() - self.left_ns > AWAY_NS and self.pacer.queued() == 0)
        if away or (spends and not self._spends):
            self._put.append(0)
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
        was, self._seen = self._seen, passed
        points, worked_s = passed.points - was.points, passed.worked_s - was.worked_s
        known = points <= len(self._put)  # not those of a graph that is replayed, nor the pacer's first
        launches = sum(self._put.popleft() for _ in range(min(max(points, 0), len(self._put))))
        if not known or worked_s < 0:
            return
        kept = 0.5 ** (worked_s / RECENT_S)
        new = (launches, worked_s, points, worked_s + passed.waited_s - was.waited_s)
        self._recent = launches, worked_s, points, past_s = tuple(
            kept * a + b for a, b in zip(self._recent, new, strict=True)
        )
        if launches <= 0 or worked_s <= 0:
            return
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
            self._countdown.end(self._here())
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
                self._countdown.end(cadence)
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

    compiling, tensor = torch.compiler.is_compiling, torch.Tensor

    class LaunchMode(TorchFunctionMode):
        """Counts the calls of torch functions, and puts a point after every few of them."""

        def __init__(self, here: Callable[..., Cadence], countdown: Countdown) -> None:
            super().__init__()
            self._here, self._countdown = here, countdown

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **kwargs) if kwargs else func(*args)
            if compiling():  # a trace must not see points, nor depend on our counts
                return out
            if getattr(func, "__name__", "") in FREE:
                return out
            countdown = self._countdown
            countdown.left -= _worth(out, args)
            if countdown.left <= 0:
                cadence = self._here(out)
                launches = countdown.end(cadence)
                node = getattr(out, "grad_fn", None)
                if node is not None:
                    node.register_prehook(functools.partial(_in_backward, cadence, launches))
            return out

    def _worth(out: Any, args: Sequence[Any]) -> int:
        """How many small launches a call is like, by the data that goes in or comes out."""
        most = out.numel() if isinstance(out, tensor) else 0
        if args:
            first = args[0]
            if isinstance(first, tensor):
                most = max(most, first.numel())
            elif isinstance(first, (list, tuple)):  # as many tensors at once
                return max(len(first), 1)
        return 1 + most // LAUNCH_ELEMENTS if type(most) is int else 1

    return LaunchMode


def _in_backward(cadence: Cadence, launches: int, _grads: Any) -> None:
    """On autograd's thread, in the stream of the forward operator."""
    cadence.point(launches)
