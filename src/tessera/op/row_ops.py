"""Softmax and the norms as torch operators (`tessera::softmax`, `tessera::norm`): our kernels on CUDA.

They take matrices, one row per line; without CUDA, torch computes the same. Autograd, torch.compile, meta tensors and
profilers see the registered operators; if none of them is active, `softmax` and `norm` call the kernels directly
(dispatch.py). `normalize.py` decides which rows come here at all.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .dispatch import autograd_function, device_of, may_skip_dispatcher, needs_gradient


@functools.cache
def _kernels() -> Any:
    """Import the kernels at the first launch, because that needs Triton."""
    from .kernels import rows

    return rows


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type of statistics: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def _dense(*tensors: Tensor | None) -> list[Tensor | None]:
    """Make tensors contiguous, as the kernels read them."""
    return [None if t is None else t.contiguous() for t in tensors]


# -- softmax --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("tessera::softmax", mutates_args=())
def softmax_op(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the softmax of each row of a matrix, written as `dtype`."""
    return torch.softmax(x, 1, dtype=_wide(x.dtype)).to(dtype)


@softmax_op.register_kernel("cuda")
def _softmax_cuda(x: Tensor, dtype: torch.dtype) -> Tensor:
    with device_of(x):
        return _kernels().softmax_forward(x.contiguous(), dtype)


@softmax_op.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("tessera::softmax_backward", mutates_args=())
def softmax_backward_op(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of the input, from the output."""
    return _softmax_backward(dy, y, dtype)


def _softmax_backward(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the gradient by operations that have gradients themselves."""
    dy, y = dy.to(_wide(y.dtype)), y.to(_wide(y.dtype))
    return (y * (dy - (dy * y).sum(1, keepdim=True))).to(dtype)


@softmax_backward_op.register_kernel("cuda")
def _softmax_backward_cuda(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    with device_of(y):
        return _kernels().softmax_backward(dy.contiguous(), y, dtype)


@softmax_backward_op.register_fake
def _(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    return y.new_empty(y.shape, dtype=dtype)


def _softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.dtype = inputs[0].dtype


def _softmax_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    y, dtype = ctx.saved_tensors[0], ctx.dtype
    if needs_gradient(dy, y):
        return _softmax_backward(dy, y, dtype), None
    backward = _softmax_backward_cuda if may_skip_dispatcher(y, dy) else softmax_backward_op
    return backward(dy, y, dtype), None


softmax_op.register_autograd(_softmax_gradient, setup_context=_softmax_setup)
_softmax_function = autograd_function(
    lambda *inputs: _softmax_cuda(*inputs),  # noqa: PLW0108 - looked up at the call, where tests replace it
    _softmax_setup,
    _softmax_gradient,
)


def softmax(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the softmax of the last dimension, written as `dtype`."""
    direct = may_skip_dispatcher(x)
    if direct and not needs_gradient(x):
        return _softmax_cuda(x, dtype)
    run = _softmax_function if direct else softmax_op
    return run(x, dtype) if x.ndim == 2 else run(x.reshape(-1, x.shape[-1]), dtype).view(x.shape)


# -- norms ----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("tessera::norm", mutates_args=())
def norm_op(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (y, x + residual, mean, 1/deviation) of each row; an absent one is empty.

    Layer norm if `centered`, else RMS norm.
    """
    summed = x + residual if residual is not None else x
    mean, rstd = _statistics(summed, eps, centered)
    value = summed.to(rstd.dtype)
    if centered:
        value = value - mean[:, None]
    value = value * rstd[:, None]
    if weight is not None:
        value = value * weight
    if bias is not None:
        value = value + bias
    return value.to(x.dtype), summed if residual is not None else x.new_empty(0), mean, rstd


def _statistics(x: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """Return the mean (empty if there is none) and 1/deviation of each row."""
    value = x.to(_wide(x.dtype))
    mean = value.mean(1) if centered else value.new_empty(0)
    if centered:
        value = value - mean[:, None]
    return mean, (value.square().mean(1) + eps).rsqrt()


def _run_norm(*inputs: Any) -> Any:
    """Run the kernel of `norm_op`; None for absent values."""
    *tensors, eps, centered = inputs
    with device_of(tensors[0]):
        return _kernels().norm_forward(*_dense(*tensors), eps=eps, centered=centered)


@norm_op.register_kernel("cuda")
def _norm_cuda(x: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, summed, mean, rstd = _run_norm(x, *inputs)
    return y, x.new_empty(0) if summed is None else summed, rstd.new_empty(0) if mean is None else mean, rstd


@norm_op.register_fake
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rstd = x.new_empty(x.shape[0], dtype=_wide(x.dtype))
    summed = x.new_empty(x.shape if residual is not None else 0)
    return x.new_empty(x.shape), summed, torch.empty_like(rstd) if centered else rstd.new_empty(0), rstd


@torch.library.custom_op(
    "tessera::norm_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor? dsummed, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, bool centered, "
    "bool weight_grad, bool bias_grad) -> (Tensor, Tensor, Tensor)",
)
def norm_backward_op(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx, dweight, dbias) of a norm, the last two fp32 or wider, empty if not asked for.

    `x` is what was normalized.
    """
    return _norm_backward(*inputs)


def _norm_backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients by operations that have gradients themselves."""
    dy, dsummed, x, weight, mean, rstd, centered, weight_grad, bias_grad = inputs
    gradient, value = dy.to(rstd.dtype), x.to(rstd.dtype)
    value = (value - mean[:, None] if centered else value) * rstd[:, None]
    dweight = (gradient * value).sum(0) if weight_grad else rstd.new_empty(0)
    dbias = gradient.sum(0) if bias_grad else rstd.new_empty(0)
    if weight is not None:
        gradient = gradient * weight
    dx = gradient - value * (gradient * value).mean(1, keepdim=True)
    if centered:
        dx = dx - gradient.mean(1, keepdim=True)
    dx = dx * rstd[:, None]
    if dsummed is not None:
        dx = dx + dsummed
    return dx.to(x.dtype), dweight, dbias


def _run_norm_backward(*inputs: Any) -> Any:
    """Run the kernel of `norm_backward_op`; None for gradients that were not asked for."""
    dy, dsummed, x, weight, mean, rstd, centered, weight_grad, bias_grad = inputs
    own_mean = mean if centered else None
    with device_of(x):
        return _kernels().norm_backward(
            *_dense(dy, dsummed, x, weight), mean=own_mean, rstd=rstd, weight_grad=weight_grad, bias_grad=bias_grad
        )


@norm_backward_op.register_kernel("cuda")
def _norm_backward_cuda(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = _run_norm_backward(*inputs)
    nothing = inputs[5].new_empty(0)
    return dx, nothing if dweight is None else dweight, nothing.clone() if dbias is None else dbias


@norm_backward_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, rstd, (weight_grad, bias_grad) = inputs[2], inputs[5], inputs[7:]
    cols = x.shape[1]
    return x.new_empty(x.shape), rstd.new_empty(cols if weight_grad else 0), rstd.new_empty(cols if bias_grad else 0)


def _norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, ctx.eps, ctx.centered = inputs
    _, summed, mean, rstd = output
    ctx.save_for_backward(x if residual is None else summed, weight, mean, rstd)
    ctx.dtypes = [None if t is None else t.dtype for t in (residual, weight, bias)]
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)  # a sum that nobody uses then costs no zeros


def _norm_gradient(ctx: Any, dy: Tensor | None, dsummed: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    residual_dtype, weight_dtype, bias_dtype = ctx.dtypes
    if residual_dtype is None:
        dsummed = None
    if dy is None:
        dy = torch.zeros_like(x)
    to_weight, to_bias = ctx.needs_input_grad[2:4]
    if needs_gradient(dy, dsummed, x, weight):  # a second derivative is needed, through the statistics too
        mean, rstd = _statistics(x, ctx.eps, ctx.centered)
        run: Any = _norm_backward
    else:
        run = _run_norm_backward if may_skip_dispatcher(x, dy, dsummed, weight) else norm_backward_op
    dx, dweight, dbias = run(dy, dsummed, x, weight, mean, rstd, ctx.centered, to_weight, to_bias)
    return (
        dx,
        None if residual_dtype is None else dx.to(residual_dtype),
        dweight.to(weight_dtype) if to_weight else None,
        dbias.to(bias_dtype) if to_bias else None,
        None,
        None,
    )


norm_op.register_autograd(_norm_gradient, setup_context=_norm_setup)
_norm_function = autograd_function(lambda *inputs: _norm_cuda(*inputs), _norm_setup, _norm_gradient)  # noqa: PLW0108


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor | None]:
    """Return (y, x + residual or None) of the last dimension: layer norm if `centered`, else RMS norm."""
    direct = type(eps) is float and may_skip_dispatcher(x, residual, weight, bias)
    if direct and not needs_gradient(x, residual, weight, bias):
        y, summed, _, _ = _run_norm(x, residual, weight, bias, eps, centered)
        return y, summed
    run = _norm_function if direct else norm_op
    if x.ndim == 2:
        y, summed, _, _ = run(x, residual, weight, bias, eps, centered)
        return y, None if residual is None else summed
    flat = (None if t is None else t.reshape(-1, x.shape[-1]) for t in (x, residual))
    y, summed, _, _ = run(*flat, weight, bias, eps, centered)
    return y.view(x.shape), None if residual is None else summed.view(x.shape)
