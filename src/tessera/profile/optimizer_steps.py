"""The steps of a program that says nothing of them, by those of its optimizers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

_RAREST = 16
"""Steps of one optimizer for one of another that both are part of: what is rarer is no part of every iteration."""


class OptimizerSteps:
    """Calls something after every step of the program, which its optimizers tell.

    Of optimizers that take turns (a GAN's, an actor's and its critic's) the one that steps least often ends the steps:
    it takes over when the one that did has stepped as often between its own steps twice, 2 to 16 times; so does
    another that steps more often than that alone. `made` is called when there is an optimizer, before its first step;
    `changed` when another ends the steps from now on.
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
        self._last: weakref.ref[Any] | None = None  # whose step is the last of the program's
        self._steps = 0  # of that one
        self._turns: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._alone: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._handle: Any = None

    def install(self) -> None:
        from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

        self._handle = register_optimizer_step_post_hook(self._after)
        self._original, made = Optimizer.__init__, self._made

        @functools.wraps(Optimizer.__init__)
        def __init__(this: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            made()
            self._original(this, *args, **kwargs)

        Optimizer.__init__ = __init__

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
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
        """After a step of another optimizer than the one that ends the steps."""
        self._alone[optimizer] = alone = self._alone.get(optimizer, 0) + 1
        stepped, before = self._turns.get(optimizer, (0, 0))
        between = self._steps - stepped
        self._turns[optimizer] = (self._steps, between)
        return alone > _RAREST or (1 < between == before <= _RAREST)

    def remove(self) -> None:
        if self._handle is not None:
            from torch.optim.optimizer import Optimizer

            self._handle.remove()
            self._handle = None
            Optimizer.__init__ = self._original
