"""Whether a call may go straight to its kernel: plain CUDA tensors, and nobody who would see or change the operator.

What is registered with torch is what compilers, modes, transforms, tracers and profilers work with, and each of those
gets it. Without any of them the way through the dispatcher and `torch.library`'s wrappers changes nothing and is most
of what a small call costs the host (benchmarks/measure/op_host_cost.py), so it is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from ..errors import ArgumentError

_HERE = contextlib.nullcontext()
_TYPES = (torch.Tensor, torch.nn.Parameter)
_compiling, _profiler = torch.compiler.is_compiling, torch.autograd.profiler

try:
    _function_mode = torch._C._is_torch_function_mode_enabled
    _dispatch_modes = torch._C._len_torch_dispatch_stack
    _transforms = torch._C._are_functorch_transforms_active
    _profiled = torch._C._autograd._profiler_enabled
    _tracing = torch._C._get_tracing_state
    KNOWN = hasattr(_profiler, "_is_profiler_enabled")
except AttributeError:  # a torch that cannot be asked: everything goes by the dispatcher
    KNOWN = False


def straight(x: Any, *others: Any) -> bool:
    """Whether a call with these tensors (None is left out) may leave the dispatcher out; the first decides where."""
    return unseen(x, *others) and x.is_cuda


def unseen(x: Any, *others: Any) -> bool:
    """The same on any device: plain tensors, and nobody who would see or change the operator."""
    # Modes first: under one of functions every question to a tensor is a call of its own.
    if _compiling() or not KNOWN or _function_mode() or _dispatch_modes():
        return False
    # The profiler's flag is the process's, the function its thread's: one started elsewhere may record this thread too.
    if _transforms() or _profiler._is_profiler_enabled or _profiled() or _tracing() is not None:
        return False
    if forward_ad._current_level >= 0:  # a tangent would be lost
        return False
    if type(x) not in _TYPES or x.is_neg():
        return False
    for t in others:  # noqa: SIM110 - half the time of all()
        if t is not None and (type(t) not in _TYPES or t.is_neg()):
            return False
    return True


def transformed() -> bool:
    """Whether torch.func maps or differentiates here, or somebody does in forward mode."""
    if _compiling():
        return False
    return forward_ad._current_level >= 0 or (KNOWN and bool(_transforms()))


def valueless(x: Any) -> bool:
    """Whether nobody can look at a tensor's values here: it is only a shape, or one of many under a transform."""
    return x.is_meta or isinstance(x, torch._subclasses.FakeTensor) or transformed()


def differentiated(*tensors: Any) -> bool:
    """Whether autograd will want a gradient by one of these (None is left out)."""
    if not torch.is_grad_enabled():
        return False
    for t in tensors:  # noqa: SIM110
        if t is not None and t.requires_grad:
            return True
    return False


def at(x: Any) -> contextlib.AbstractContextManager[Any]:
    """The tensor's device as the current one: Triton launches there, whatever the tensors' is."""
    index = x.get_device()
    return _HERE if index == torch.cuda.current_device() else torch.cuda.device(index)


def composed(operator: Any, setup: Callable[..., None], gradient: Callable[..., Any], name: str, options: str) -> Any:
    """An operator that torch.func's transforms take too: `name` is ours, `options` what else would be torch's own call.

    What torch.library registers has a gradient for autograd only. torch.func.grad refuses it, vmap warns of its speed,
    and in forward mode the tangent is dropped without a word (torch 2.13). So there the same goes as a function.
    """

    class Composed(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            return operator(*inputs)

        setup_context = staticmethod(setup)
        backward = staticmethod(gradient)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise ArgumentError(
                f"op.{name} is differentiated in forward mode",
                why=f"with {options} it has gradients in reverse mode only",
                fix=f"torch.func.vjp, jacrev or grad; or leave {options} out",
            )

        @staticmethod
        def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
            return one_after_the_other(call, info.batch_size, in_dims, inputs)

    def call(*inputs: Any) -> Any:
        return Composed.apply(*inputs) if transformed() else operator(*inputs)

    return call


def one_after_the_other(call: Callable[..., Any], size: int, in_dims: Any, inputs: tuple[Any, ...]) -> Any:
    """A rule for vmap: each of the batch by itself, as scales and routings are."""
    each = [
        x.unbind(at) if isinstance(x, torch.Tensor) and at is not None else [x] * size
        for x, at in zip(inputs, in_dims, strict=True)
    ]
    found = [call(*one) for one in zip(*each, strict=True)]
    if isinstance(found[0], tuple):
        return tuple(map(torch.stack, zip(*found, strict=True))), (0,) * len(found[0])
    return torch.stack(found), 0


def function(
    forward: Callable[..., Any], setup: Callable[[Any, tuple[Any, ...], Any], None], gradient: Callable[..., Any]
) -> Any:
    """An operator's forward and backward pass for autograd, without the operator.

    What is saved is the operator's too, so that a checkpoint may take either way the second time.
    """

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = forward(*inputs)
            setup(ctx, inputs, output)
            return output

        backward = staticmethod(gradient)

    return Straight.apply
