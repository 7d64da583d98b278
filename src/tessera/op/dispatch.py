"""How a call reaches its kernel: whether torch's dispatcher may be skipped, gradients, torch.func, tf32 switches.

Compilers, modes, transforms, tracers and profilers work with the operators that are registered with torch. If none of
them is active, the dispatcher and `torch.library`'s wrappers change nothing. They are most of the host time of a small
call (benchmarks/measure/op_host_cost.py), so they are skipped then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
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
    _profiling = torch._C._autograd._profiler_enabled
    _tracing = torch._C._get_tracing_state
    KNOWN = hasattr(_profiler, "_is_profiler_enabled")
except AttributeError:  # this torch cannot tell, so every call takes the dispatcher
    KNOWN = False

# Operators that wait for values cannot run while a CUDA graph is captured. With this tag Inductor leaves them out of
# its graphs. Older torch has no such tag.
READS_VALUES: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}


def may_skip_dispatcher(x: Any, *others: Any) -> bool:
    """Return whether a call with these tensors (None is ignored) may go straight to its CUDA kernel."""
    return is_unobserved(x, *others) and x.is_cuda


def is_unobserved(x: Any, *others: Any) -> bool:
    """Return whether the tensors are plain and nothing would see or change the operator, on any device."""
    # Modes come first, because under a function mode every attribute of a tensor is a call of its own.
    if _compiling() or not KNOWN or _function_mode() or _dispatch_modes():
        return False
    # The profiler's flag is for the process, the function for its thread: a profiler that was started on another thread
    # may record this one too.
    if _transforms() or _profiler._is_profiler_enabled or _profiling() or _tracing() is not None:
        return False
    if forward_ad._current_level >= 0:  # a tangent would be lost
        return False
    if type(x) not in _TYPES or x.is_neg():
        return False
    for t in others:  # noqa: SIM110 - half the time of all()
        if t is not None and (type(t) not in _TYPES or t.is_neg()):
            return False
    return True


def in_transform() -> bool:
    """Return whether a torch.func transform or forward-mode differentiation is active."""
    if _compiling():
        return False
    return forward_ad._current_level >= 0 or (KNOWN and bool(_transforms()))


def has_no_values(x: Any) -> bool:
    """Return whether a tensor's values cannot be read here: it is only a shape, or one of many under a transform."""
    return x.is_meta or isinstance(x, torch._subclasses.FakeTensor) or in_transform()


def needs_gradient(*tensors: Any) -> bool:
    """Return whether autograd needs a gradient of one of these (None is ignored)."""
    if not torch.is_grad_enabled():
        return False
    for t in tensors:  # noqa: SIM110
        if t is not None and t.requires_grad:
            return True
    return False


def device_of(x: Any) -> contextlib.AbstractContextManager[Any]:
    """Make the tensor's device the current one: Triton launches there."""
    index = x.get_device()
    return _HERE if index == torch.cuda.current_device() else torch.cuda.device(index)


def make_differentiable(
    operator: Any, setup: Callable[..., None], gradient: Callable[..., Any], name: str, options: str
) -> Any:
    """Register an operator's gradient; return the operator in a form that torch.func's transforms can call.

    A gradient that torch.library registers is for autograd only: torch.func.grad refuses it, vmap warns of its speed,
    and forward mode silently drops the tangent (torch 2.13). Under a transform, the operator therefore runs as an
    autograd function. `name` and `options` are for the error message.
    """
    operator.register_autograd(gradient, setup_context=setup)

    class Transformable(torch.autograd.Function):
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
            # One by one, because scales and routings belong to one matrix.
            each = [
                x.unbind(dim) if isinstance(x, torch.Tensor) and dim is not None else [x] * info.batch_size
                for x, dim in zip(inputs, in_dims, strict=True)
            ]
            results = [call(*one) for one in zip(*each, strict=True)]
            if isinstance(results[0], tuple):
                return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])
            return torch.stack(results), 0

    def call(*inputs: Any) -> Any:
        return Transformable.apply(*inputs) if in_transform() else operator(*inputs)

    return call


def autograd_function(
    forward: Callable[..., Any], setup: Callable[[Any, tuple[Any, ...], Any], None], gradient: Callable[..., Any]
) -> Any:
    """Return an operator's forward and backward pass for autograd, without the operator.

    It saves the same tensors as the operator, so that a checkpoint may take either way the second time.
    """

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = forward(*inputs)
            setup(ctx, inputs, output)
            return output

        backward = staticmethod(gradient)

    return Straight.apply


# -- torch's switches for products ------------------------------------------------------------------------------------

# These switches belong to the process. The lock keeps our own launches apart. A product that another thread launches
# meanwhile sees the switch as we set it: at worst it runs in tf32 instead of fp32, or the reverse.
_lock = threading.RLock()


def is_tf32_allowed() -> bool:
    """Return whether the program lets fp32 products on CUDA run in tf32."""
    matmul = torch.backends.cuda.matmul
    # Since torch 2.9 each backend has a switch of its own, which kernels read; reading the older switch may then be an
    # error.
    if hasattr(matmul, "fp32_precision"):
        return bool(matmul.fp32_precision == "tf32")
    return bool(torch.get_float32_matmul_precision() != "highest")


def _is_rounded_on_cpu() -> bool:
    """Return whether oneDNN may round fp32 operands to bf16 or tf32: CPUs with AMX do if the program allows it."""
    switch = getattr(torch.backends.mkldnn, "matmul", None)  # since torch 2.9; before, it followed CUDA's switch
    return getattr(switch, "fp32_precision", "none") not in ("none", "ieee")


@contextlib.contextmanager
def set_tf32(allowed: bool) -> Iterator[None]:
    """Let fp32 products on CUDA run in tf32, or keep all of them in fp32, in the body; restore the state afterwards."""
    with _lock:
        if is_tf32_allowed() == allowed and (allowed or not _is_rounded_on_cpu()):
            yield
            return
        # The older switch sets those of all backends.
        backends: tuple[Any, Any] = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
        own = [(b, b.fp32_precision) for b in backends if hasattr(b, "fp32_precision")]
        try:
            older = torch.get_float32_matmul_precision()
        except RuntimeError:  # the program uses the newer switches, and reading the older one is then an error
            older = None
        try:
            if older is None:
                for backend in backends[:1] if allowed else backends:
                    backend.fp32_precision = "tf32" if allowed else "ieee"
            else:
                torch.set_float32_matmul_precision("high" if allowed else "highest")
            yield
        finally:
            if older is not None:
                torch.set_float32_matmul_precision(older)
            for backend, before in own:
                backend.fp32_precision = before


@contextlib.contextmanager
def force_fp32_sums(precision: str) -> Iterator[None]:
    """Keep split sums of bf16 or fp16 products in fp32, where torch may not; restore the state afterwards."""
    name = f"allow_{precision}_reduced_precision_reduction"
    matmul = torch.backends.cuda.matmul
    with _lock:
        before = getattr(matmul, name)
        if not before:
            yield
            return
        split = getattr(matmul, f"{name}_split_k", None)  # a second switch under the same name, since torch 2.10
        try:
            setattr(matmul, name, False)
            yield
        finally:
            setattr(matmul, name, before if split is None else (before, split))
