"""Where pace points go: after every few operators, mirrored in the backward pass, and after each call.

A torch function mode sees what Python calls (benchmarks/measure/schedule_cost.py prints the cost; a dispatch mode is
about three times as slow). Most calls launch nothing (views, attributes, the optimizer's Python) and are not counted; a
call on much data counts as several launches, so that a point follows the long ones. The mode is thread-local and does
not see autograd's C++ nodes, so each point of the forward pass puts another on the backward node beside it. Code under
`torch.compile` is traced through the mode without a point, and a CUDA graph's replay is one launch: both are paced
between calls. A graph captured inside a schedule contains its points and follows them at every replay.

Where tokens of Tessera's own kernels are spent there is no mode: those kernels announce their launches (op/hints.py)
from anywhere, also from compiled code and autograd's threads, and a point follows every few of them.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..op import hints
from .controller import PaceCommand
from .pacer import AHEAD, AHEAD_S, PaceCounts, Pacer

# Points per slice: enough that a slice ends near its length (which must be able to change where the sensor beats with
# it), few enough that launching them costs little.
PER_SLICE = 3
# While nothing has to wait, a point this often (device seconds) keeps the counts up to date.
SLACK_S = 0.005
MOST = 1024
# After this many ticks of the loop without a wait (one second), calls run without the mode.
SLACK_TICKS = 50
# The distance of points follows the work of about this long (device seconds): a training step's parts differ.
RECENT_S = 0.25
# This many elements take about as long as a launch takes anyway (16 MB to read and write, 5 us of an H200's memory).
LAUNCH_ELEMENTS = 1 << 22
# Calls that launch nothing: attributes, views, questions, and what surrounds regions.
_FREE = """__get__ __set__ __len__ __repr__ __hash__ size stride dim ndimension numel nelement storage_offset data_ptr
    element_size get_device is_complex is_floating_point is_contiguous is_signed is_pinned is_shared view view_as
    reshape reshape_as transpose swapaxes t permute movedim unsqueeze squeeze expand expand_as split chunk unbind
    narrow select unfold flatten unflatten detach item requires_grad_ retain_grad register_hook _set_grad_enabled
    _record_function_enter_new _record_function_exit._RecordFunction"""
FREE = frozenset(_FREE.split())
# After longer than this without a call, and with nothing queued, the device was idle.
AWAY_NS = 2_000_000


def count_tokens(kind: str, blocks: int, warps: int, copies: int) -> int:
    """The tokens of one launch, as op/hints.py announces it."""
    if kind == "launches":
        return 1
    return blocks * (warps if kind == "warps" else copies)


class Countdown(threading.local):
    """Launches until the next point, for each thread; across calls, as a call may be a single launch."""

    left = of = 1

    def end(self, cadence: Cadence) -> int:
        """Put a point here and start again; returns the launches since the last one."""
        launches = self.of - self.left
        cadence.point(launches)
        self.left = self.of = cadence.every
        return launches


class Cadence:
    """How many launches there are between two points of one pacer; adapted to the time they take."""

    def __init__(self, pacer: Pacer) -> None:
        self.pacer = pacer
        self.every = 1
        self.left_ns = 0
        self._put: deque[int] = deque(maxlen=4096)  # the launches before each point that has yet to run
        self._seen = PaceCounts()
        self._recent = (0.0, 0.0, 0.0, 0.0)  # launches, seconds worked, points, seconds
        self._free_ticks = 0
        self._lock = threading.Lock()
        self._tokens, self._left = 0, 1  # spent since the last point, and launches until the next
        self._spends = False

    def point(self, launches: int = 1) -> None:
        """Put a point here, after this many launches."""
        self._put.append(launches)
        self.pacer.point()

    def spend(self, tokens: int) -> None:
        """One of our kernels was launched: put a point here if one is due."""
        with self._lock:
            self._tokens += tokens
            self._left -= 1
            if self._left > 0:
                return
            tokens, self._tokens, self._left = self._tokens, 0, self.every
            self._put.append(self.every)
        self.pacer.point(tokens=tokens)

    def enter_call(self, *, spends: bool = False) -> None:
        """A call begins: time in which the device had nothing to do is not work."""
        away = self.left_ns == 0 or (time.monotonic_ns() - self.left_ns > AWAY_NS and self.pacer.count_queued() == 0)
        if not away and (self._spends or not spends):
            return
        self._put.append(0)
        self._spends = self._spends or spends
        # The first point with tokens loads their kernel, which cannot happen while a graph is captured.
        self.pacer.point(restart=True, tokens=0 if spends else None)

    def leave_call(self) -> None:
        """A call has ended."""
        self.left_ns = time.monotonic_ns()

    @property
    def slack(self) -> bool:
        """Whether nothing has had to wait for a while: a point after each call is then enough."""
        return self._free_ticks >= SLACK_TICKS

    def adapt(self, counts: PaceCounts, command: PaceCommand) -> None:
        """Set how often points come, from the work since the last time."""
        self._free_ticks = 0 if command.ratio > 0 else self._free_ticks + 1
        new, self._seen = counts - self._seen, counts
        ours = new.points <= len(self._put)  # not those of a replayed graph, nor the pacer's first
        launches = sum(self._put.popleft() for _ in range(min(max(new.points, 0), len(self._put))))
        if not ours or new.worked_s < 0:
            return
        fade = 0.5 ** (new.worked_s / RECENT_S)
        latest = (launches, new.worked_s, new.points, new.worked_s + new.waited_s)
        self._recent = tuple(fade * a + b for a, b in zip(self._recent, latest, strict=True))
        recent_launches, worked_s, points, past_s = self._recent
        if recent_launches <= 0 or worked_s <= 0:
            return
        self.pacer.ahead = min(max(round(AHEAD_S * points / past_s), AHEAD[0]), AHEAD[1])
        apart_s = command.slice_s / PER_SLICE if command.ratio > 0 else SLACK_S
        self.every = min(max(round(apart_s * recent_launches / worked_s), 1), MOST)


class PointPlacer:
    """Puts points while a call runs: among the launches of its thread, after it, or by our own kernels' launches.

    `here` finds the cadence of the device that work goes to, from a result where there is one.
    """

    def __init__(
        self, here: Callable[..., Cadence], countdown: Countdown, *, each_call: bool = False, tokens: bool = False
    ) -> None:
        self._here, self._countdown, self._each_call, self._tokens = here, countdown, each_call, tokens
        self._mode: Any = None

    def __enter__(self) -> None:
        cadence = self._here()
        cadence.enter_call(spends=self._tokens)
        if not self._tokens and not self._each_call and not cadence.slack:
            self._mode = _mode_class()(self._here, self._countdown)
            self._mode.__enter__()

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: Any) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(kind, exc, trace)
        if kind is not None:
            return  # after a device error a launch would raise again and hide the first
        if not self._tokens:
            self._countdown.left -= 1  # the end of a call counts as a launch, and may be all that is seen of it
            if mode is None or self._countdown.left <= 0:
                self._countdown.end(self._here())
        self._here().leave_call()


class OwnLaunches:
    """Hears of launches of Tessera's own kernels on every thread, and puts a point after every few of them."""

    def __init__(self, here: Callable[..., Cadence], countdown: Countdown) -> None:
        self._here, self._countdown = here, countdown
        self.tokens = "joules"

    def enable(self, wanted: bool) -> None:
        """Start or stop listening."""
        hints.listener = self._on_launch if wanted else None

    def _on_launch(self, blocks: int, warps: int, copies: int) -> None:
        cadence = self._here()
        if self.tokens == "joules":  # another schedule counts joules: a launch like any other
            self._countdown.left -= 1
            if self._countdown.left <= 0:
                self._countdown.end(cadence)
        elif tokens := count_tokens(self.tokens, blocks, warps, copies):
            cadence.spend(tokens)


@functools.cache
def _mode_class() -> type:
    """The mode; made late, because torch is imported late."""
    import torch
    from torch.overrides import TorchFunctionMode

    is_compiling, tensor = torch.compiler.is_compiling, torch.Tensor

    class LaunchMode(TorchFunctionMode):
        """Counts the calls of torch functions, and puts a point after every few of them."""

        def __init__(self, here: Callable[..., Cadence], countdown: Countdown) -> None:
            super().__init__()
            self._here, self._countdown = here, countdown

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **kwargs) if kwargs else func(*args)
            # A trace must not contain points, nor depend on our counts.
            if is_compiling() or getattr(func, "__name__", "") in FREE:
                return out
            countdown = self._countdown
            countdown.left -= _count_launches(out, args)
            if countdown.left <= 0:
                cadence = self._here(out)
                launches = countdown.end(cadence)
                node = getattr(out, "grad_fn", None)
                if node is not None:  # runs on autograd's thread, in the stream of the forward operator
                    node.register_prehook(lambda _grads: cadence.point(launches))
            return out

    def _count_launches(out: Any, args: Sequence[Any]) -> int:
        """How many small launches a call is worth, from the data that goes in or comes out."""
        most = out.numel() if isinstance(out, tensor) else 0
        if args:
            first = args[0]
            if isinstance(first, tensor):
                most = max(most, first.numel())
            elif isinstance(first, (list, tuple)):  # that many tensors at once
                return max(len(first), 1)
        return 1 + most // LAUNCH_ELEMENTS if type(most) is int else 1

    return LaunchMode
