"""Softmax and the norms as torch custom operators (`tessera::softmax`, `tessera::norm`): our kernels on CUDA.

They take matrices, one row a line; off CUDA torch computes the same. What is registered here is what autograd,
torch.compile, meta tensors and the profiler see; `softmax` and `norm` leave it out where none of them does (eager.py).
Which rows come here at all is decided in `normalize.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .eager import at, differentiated, function, straight


@functools.cache
def _kernels() -> Any:
    """Imported at the first launch: it needs Triton."""
    from .kernels import rows

    return rows


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Statistics are at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def _dense(*tensors: Tensor | None) -> list[Tensor | None]:
    """As the kernels read them: row after row."""
    return [None if t is None else t.contiguous() for t in tensors]


@torch.library.custom_op("tessera::softmax", mutates_args=())
def softmax_op(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax of each row of a matrix, written as `dtype`."""
    return torch.softmax(x, 1, dtype=_wide(x.dtype)).to(dtype)


@softmax_op.register_kernel("cuda")
def _softmax_cuda(x: Tensor, dtype: torch.dtype) -> Tensor:
    with at(x):
        return _kernels().softmax_forward(x.contiguous(), dtype)


@softmax_op.register_fake
def _softmax_fake(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("tessera::softmax_backward", mutates_args=())
def softmax_backward_op(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient by the input, from the output."""
    return _softmax_backward(dy, y, dtype)


def _softmax_backward(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """By operations that have gradients themselves."""
    dy, y = dy.to(_wide(y.dtype)), y.to(_wide(y.dtype))
    return (y * (dy - (dy * y).sum(1, keepdim=True))).to(dtype)


@softmax_backward_op.register_kernel("cuda")
def _softmax_backward_cuda(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    with at(y):
        return _kernels().softmax_backward(dy.contiguous(), y, dtype)


@softmax_backward_op.register_fake
def _softmax_backward_fake(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    return y.new_empty(y.shape, dtype=dtype)


def _softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.dtype = inputs[0].dtype


def _softmax_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    y, dtype = ctx.saved_tensors[0], ctx.dtype
    if differentiated(dy, y):
        return _softmax_backward(dy, y, dtype), None
    way = _softmax_backward_cuda if straight(y, dy) else softmax_backward_op
    return way(dy, y, dtype), None


softmax_op.register_autograd(_softmax_gradient, setup_context=_softmax_setup)


_softmax_function = function(
    lambda *given: _softmax_cuda(*given),  # noqa: PLW0108 - looked up at the call, where tests put another
    _softmax_setup,
    _softmax_gradient,
)


def softmax(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax of the last dimension, written as `dtype`."""
    here = straight(x)
    if here and not differentiated(x):
        return _softmax_cuda(x, dtype)
    way = _softmax_function if here else softmax_op
    return way(x, dtype) if x.ndim == 2 else way(x.reshape(-1, x.shape[-1]), dtype).view(x.shape)


@torch.library.custom_op("tessera::norm", mutates_args=())
def norm_op(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, x + residual, mean, 1/deviation) of each row, empty if not there: layer norm if `centered`, else RMS norm."""
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
    """Mean (empty if there is none) and 1/deviation of each row."""
    value = x.to(_wide(x.dtype))
    mean = value.mean(1) if centered else value.new_empty(0)
    if centered:
        value = value - mean[:, None]
    return mean, (value.square().mean(1) + eps).rsqrt()


def _normed(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> Any:
    """As `norm_op`, None for what is not there."""
    with at(x):
        return _kernels().norm_forward(*_dense(x, residual, weight, bias), eps=eps, centered=centered)


@norm_op.register_kernel("cuda")
def _norm_cuda(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, summed, mean, rstd = _normed(x, residual, weight, bias, eps, centered)
    return y, x.new_empty(0) if summed is None else summed, rstd.new_empty(0) if mean is None else mean, rstd


@norm_op.register_fake
def _norm_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rstd = x.new_empty(x.shape[0], dtype=_wide(x.dtype))
    summed = x.new_empty(x.shape if residual is not None else 0)
    return x.new_empty(x.shape), summed, torch.empty_like(rstd) if centered else rstd.new_empty(0), rstd


@torch.library.custom_op("tessera::norm_backward", mutates_args=())
def norm_backward_op(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    centered: bool, weight_grad: bool, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dweight, dbias) of a norm, the last two fp32 or wider, empty where not asked; `x` is what was normalized."""
    return _norm_backward(dy, dsummed, x, weight, mean, rstd, centered, weight_grad, bias_grad)


def _norm_backward(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    centered: bool, weight_grad: bool, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """By operations that have gradients themselves."""
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


def _normed_backward(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    centered: bool, weight_grad: bool, bias_grad: bool,
) -> Any:  # fmt: skip
    """As `norm_backward_op`, None for what was not asked."""
    middle = mean if centered else None
    with at(x):
        return _kernels().norm_backward(
            *_dense(dy, dsummed, x, weight), mean=middle, rstd=rstd, weight_grad=weight_grad, bias_grad=bias_grad
        )


@norm_backward_op.register_kernel("cuda")
def _norm_backward_cuda(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    centered: bool, weight_grad: bool, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx, dweight, dbias = _normed_backward(dy, dsummed, x, weight, mean, rstd, centered, weight_grad, bias_grad)
    nothing = rstd.new_empty(0)
    return dx, nothing if dweight is None else dweight, nothing.clone() if dbias is None else dbias


@norm_backward_op.register_fake
def _norm_backward_fake(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    centered: bool, weight_grad: bool, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    cols = x.shape[1]
    return x.new_empty(x.shape), rstd.new_empty(cols if weight_grad else 0), rstd.new_empty(cols if bias_grad else 0)


def _norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, ctx.eps, ctx.centered = inputs
    _, summed, mean, rstd = output
    ctx.save_for_backward(x if residual is None else summed, weight, mean, rstd)
    ctx.dtypes = [None if t is None else t.dtype for t in (residual, weight, bias)]
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)  # a sum nobody uses costs no row of zeros


def _norm_gradient(ctx: Any, dy: Tensor | None, dsummed: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    residual_dtype, weight_dtype, bias_dtype = ctx.dtypes
    if residual_dtype is None:
        dsummed = None
    if dy is None:
        dy = torch.zeros_like(x)
    dweight_asked, dbias_asked = ctx.needs_input_grad[2:4]
    if differentiated(dy, dsummed, x, weight):  # a gradient of this one is wanted: by the statistics as well
        mean, rstd = _statistics(x, ctx.eps, ctx.centered)
        way: Any = _norm_backward
    else:
        way = _normed_backward if straight(x, dy, dsummed, weight) else norm_backward_op
    dx, dweight, dbias = way(dy, dsummed, x, weight, mean, rstd, ctx.centered, dweight_asked, dbias_asked)
    return (
        dx,
        None if residual_dtype is None else dx.to(residual_dtype),
        dweight.to(weight_dtype) if dweight_asked else None,
        dbias.to(bias_dtype) if dbias_asked else None,
        None,
        None,
    )


norm_op.register_autograd(_norm_gradient, setup_context=_norm_setup)


_norm_function = function(
    lambda *given: _norm_cuda(*given),  # noqa: PLW0108
    _norm_setup,
    _norm_gradient,
)


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor | None]:
    """(y, x + residual or None) of the last dimension: layer norm if `centered`, else RMS norm."""
    here = type(eps) is float and straight(x, residual, weight, bias)
    if here and not differentiated(x, residual, weight, bias):
        y, summed, _, _ = _normed(x, residual, weight, bias, eps, centered)
        return y, summed
    way = _norm_function if here else norm_op
    if x.ndim == 2:
        y, summed, _, _ = way(x, residual, weight, bias, eps, centered)
        return y, None if residual is None else summed
    flat = (None if t is None else t.reshape(-1, x.shape[-1]) for t in (x, residual))
    y, summed, _, _ = way(*flat, weight, bias, eps, centered)
    return y.view(x.shape), None if residual is None else summed.view(x.shape)
