"""Where work on a CPU may wait: between its operators, mirrored in the backward pass, and after each call.

A CPU computes on the thread that calls, so no other thread can make it wait. A torch function mode sees what Python
calls. Views, attributes and an optimizer's Python code take no time and are passed over. The mode is thread-local and
does not see autograd's C++ nodes, so each operator of the forward pass adds a point to its backward node. Under a mode,
code of `torch.compile` would be compiled once more, so it waits only between calls.
"""

from __future__ import annotations

import functools
import threading
import time
from types import TracebackType
from typing import Any

from .pacer import HostPacer

# Calls that compute nothing: attributes, views, questions about a tensor, and the profiler's region marks.
_FREE = """__get__ __set__ __len__ __repr__ __hash__ size stride dim ndimension numel nelement storage_offset data_ptr
    element_size get_device is_complex is_floating_point is_contiguous is_signed is_pinned is_shared view view_as
    reshape reshape_as transpose swapaxes t permute movedim unsqueeze squeeze expand expand_as split chunk unbind
    narrow select unfold flatten unflatten detach item requires_grad_ retain_grad register_hook _set_grad_enabled
    _record_function_enter_new _record_function_exit._RecordFunction"""
FREE = frozenset(_FREE.split())
# After longer than this without a call, the thread is taken to have done something else.
AWAY_NS = 2_000_000
# Operators this far apart add a point to the backward pass: less than a slice.
APART_NS = 200_000


class CpuPoints:
    """A context that puts points between the operators of this thread (not with `each_call`), and one at the end."""

    def __init__(self, pacer: HostPacer, *, each_call: bool) -> None:
        self._pacer, self._each_call = pacer, each_call
        self._mode: Any = None
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        if time.monotonic_ns() - self._pacer.left_ns > AWAY_NS:
            self._pacer.point(restart=True)
        if not self._each_call and not self._pacer.slack:
            self._mode = _mode_class()(self._pacer)
            self._mode.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        mode, self._mode = self._mode, None
        if mode is not None and self._thread == threading.get_ident():
            mode.__exit__(kind, exc, trace)
        elif mode is not None:  # nothing can take it from another thread's stack
            mode.ended = True
        if kind is None:
            self._pacer.point()
            self._pacer.left_ns = time.monotonic_ns()


@functools.cache
def _mode_class() -> type:
    """Return the class of the mode; made late, because torch is imported late."""
    import torch
    from torch.overrides import TorchFunctionMode

    is_compiling = torch.compiler.is_compiling

    class OperatorMode(TorchFunctionMode):
        """Puts a point after every operator."""

        def __init__(self, pacer: HostPacer) -> None:
            super().__init__()
            self._pacer, self._hooked_ns, self.ended = pacer, 0, False

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **kwargs) if kwargs else func(*args)
            if self.ended or is_compiling() or getattr(func, "__name__", "") in FREE:  # a trace must not contain points
                return out
            pacer = self._pacer
            pacer.point()
            node = getattr(out, "grad_fn", None)
            if node is not None and (now := time.monotonic_ns()) - self._hooked_ns > APART_NS:
                self._hooked_ns = now
                node.register_prehook(lambda _grads: pacer.point())  # on autograd's thread
            return out

    return OperatorMode
