"""Finds the steps of a program that does not report them, by the steps of its optimizers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from ..monitor.scope import is_capturing

_RAREST = 16
"""An optimizer that steps less often than once in this many steps of another does not end the program's steps."""


class OptimizerSteps:
    """Calls `call` after every step of the program, as its optimizers show it.

    If several optimizers take turns (a GAN's, an actor's and a critic's), the one that steps least often ends the
    program's steps. An optimizer takes over that role if the present one has twice made the same number of steps
    between its steps (2 to 16), or if it makes more than 16 steps while the present one makes none. `made` is called
    when there is an optimizer, before its first step; `changed` when another optimizer takes over.

    A step that is captured into a CUDA graph does not run then, but with every replay. The graph is taken to be the one
    that is replayed first after it.
    """

    def __init__(
        self,
        call: Callable[[], None],
        made: Callable[[], None] = lambda: None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._call = call
        self._made = made
        self._changed = changed
        self._original: Any = None
        self._last: weakref.ref[Any] | None = None  # the optimizer that ends the program's steps
        self._steps = 0  # its steps
        self._turns: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._alone: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._handles: list[Any] = []
        self._replay: Any = None  # torch's own
        self._was_captured = False
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.is_stepping = False
        """Whether an optimizer is within its step."""

    def install(self) -> None:
        from torch.optim.optimizer import (
            Optimizer,
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        before, after = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
        self._handles = [before(self._before), after(self._after)]
        self._original, made = Optimizer.__init__, self._made

        @functools.wraps(Optimizer.__init__)
        def __init__(this: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            made()
            self._original(this, *args, **kwargs)

        Optimizer.__init__ = __init__
        self._watch_replays()

    def _watch_replays(self) -> None:
        from torch.cuda import CUDAGraph

        self._replay = CUDAGraph.replay

        @functools.wraps(CUDAGraph.replay)
        def replay(this: Any) -> None:
            self._replay(this)
            if self._was_captured:
                self._was_captured = False
                self._graphs.add(this)
            if this in self._graphs:
                self._call()

        CUDAGraph.replay = replay

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.is_stepping = True

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.is_stepping = False
        if is_capturing():
            self._was_captured = True
            return
        last = None if self._last is None else self._last()
        if last is not optimizer and (last is None or self._takes_over(optimizer)):
            self._last, self._steps = weakref.ref(optimizer), 0
            self._turns.clear()
            if last is not None:
                self._changed()
            last = optimizer
        if last is optimizer:
            self._steps += 1
            self._alone.clear()
            self._call()

    def _takes_over(self, optimizer: Any) -> bool:
        """Return whether an optimizer that has just stepped ends the program's steps from now on."""
        self._alone[optimizer] = alone = self._alone.get(optimizer, 0) + 1
        stepped, before = self._turns.get(optimizer, (0, 0))
        between = self._steps - stepped
        self._turns[optimizer] = (self._steps, between)
        return alone > _RAREST or (1 < between == before <= _RAREST)

    def remove(self) -> None:
        if self._handles:
            from torch.cuda import CUDAGraph
            from torch.optim.optimizer import Optimizer

            while self._handles:
                self._handles.pop().remove()
            Optimizer.__init__ = self._original
            CUDAGraph.replay = self._replay
