"""Tells when torch.compile compiles, or records a CUDA graph: minutes of a run that no later step repeats."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Compilations:
    """Calls `call` with the begin and the end of every outermost compilation.

    Torch reports when Dynamo begins and ends to compile a frame or a backward pass, and when reduce-overhead records a
    graph (`torch._dynamo.callback`, the same in 2.11 and 2.13). `torch._dynamo.reset()` removes these callbacks.
    """

    def __init__(self, call: Callable[[int, int], None]) -> None:
        self._call = call
        self._begun_ns = 0
        self._handler: Any = None

    def install(self, module: Any) -> None:
        """Register the callbacks; `module` is `torch._dynamo.callback`."""
        self._handler = module.callback_handler
        self._handler.register_start_callback(self._begin)
        self._handler.register_end_callback(self._end)

    def remove(self) -> None:
        if self._handler is None:
            return
        handler, self._handler = self._handler, None
        for registered, ours in ((handler.start_callbacks, self._begin), (handler.end_callbacks, self._end)):
            if ours in registered:
                registered.remove(ours)

    def _begin(self, _: Any) -> None:
        self._begun_ns = time.time_ns()

    def _end(self, _: Any) -> None:
        if self._begun_ns:
            self._call(self._begun_ns, time.time_ns())
            self._begun_ns = 0
