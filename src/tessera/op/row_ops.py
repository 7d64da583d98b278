"""Softmax and the norms as torch custom operators (`tessera::softmax`, `tessera::norm`): our kernels on CUDA.

They take matrices, one row a line; off CUDA torch computes the same. What is registered here is what autograd,
torch.compile, meta tensors and the profiler see; which rows come here at all is decided in `normalize.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Statistics are at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def _dense(*tensors: Tensor | None) -> Any:
    """As the kernels read them: row after row."""
    return (None if t is None else t.contiguous() for t in tensors)


@torch.library.custom_op("tessera::softmax", mutates_args=())
def softmax(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax of each row of a matrix, written as `dtype`."""
    return torch.softmax(x, 1, dtype=_wide(x.dtype)).to(dtype)


@softmax.register_kernel("cuda")
def _softmax_cuda(x: Tensor, dtype: torch.dtype) -> Tensor:
    from .kernels import rows

    with torch.cuda.device(x.device):  # Triton launches on the current device, whatever the tensors' is
        return rows.softmax_forward(x.contiguous(), dtype)


@softmax.register_fake
def _softmax_fake(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("tessera::softmax_backward", mutates_args=())
def softmax_backward(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient by the input, from the output."""
    dy, y = dy.to(_wide(y.dtype)), y.to(_wide(y.dtype))
    return (y * (dy - (dy * y).sum(1, keepdim=True))).to(dtype)


@softmax_backward.register_kernel("cuda")
def _softmax_backward_cuda(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    from .kernels import rows

    with torch.cuda.device(y.device):
        return rows.softmax_backward(dy.contiguous(), y, dtype)


@softmax_backward.register_fake
def _softmax_backward_fake(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    return y.new_empty(y.shape, dtype=dtype)


def _softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.dtype = inputs[0].dtype


def _softmax_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    return softmax_backward(dy, ctx.saved_tensors[0], ctx.dtype), None


softmax.register_autograd(_softmax_gradient, setup_context=_softmax_setup)


@torch.library.custom_op("tessera::norm", mutates_args=())
def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, x + residual, mean, 1/deviation) of each row, empty if not there: layer norm if `centered`, else RMS norm."""
    summed = x + residual if residual is not None else x
    value = summed.to(_wide(x.dtype))
    mean = value.mean(1) if centered else value.new_empty(0)
    if centered:
        value = value - mean[:, None]
    rstd = (value.square().mean(1) + eps).rsqrt()
    value = value * rstd[:, None]
    if weight is not None:
        value = value * weight
    if bias is not None:
        value = value + bias
    return value.to(x.dtype), summed if residual is not None else x.new_empty(0), mean, rstd


@norm.register_kernel("cuda")
def _norm_cuda(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from .kernels import rows

    with torch.cuda.device(x.device):
        y, summed, mean, rstd = rows.norm_forward(*_dense(x, residual, weight, bias), eps=eps, centered=centered)
    return y, x.new_empty(0) if summed is None else summed, rstd.new_empty(0) if mean is None else mean, rstd


@norm.register_fake
def _norm_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rstd = x.new_empty(x.shape[0], dtype=_wide(x.dtype))
    summed = x.new_empty(x.shape if residual is not None else 0)
    return x.new_empty(x.shape), summed, torch.empty_like(rstd) if centered else rstd.new_empty(0), rstd


@torch.library.custom_op("tessera::norm_backward", mutates_args=())
def norm_backward(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    centered: bool, weight_grad: bool, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dweight, dbias) of `norm`, the last two fp32 or wider, empty where not asked; `x` is what was normalized."""
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


@norm_backward.register_kernel("cuda")
def _norm_backward_cuda(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    centered: bool, weight_grad: bool, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from .kernels import rows

    middle = mean if centered else None
    with torch.cuda.device(x.device):
        dx, dweight, dbias = rows.norm_backward(
            *_dense(dy, dsummed, x, weight), mean=middle, rstd=rstd, weight_grad=weight_grad, bias_grad=bias_grad
        )
    nothing = rstd.new_empty(0)
    return dx, nothing if dweight is None else dweight, nothing.clone() if dbias is None else dbias


@norm_backward.register_fake
def _norm_backward_fake(
    dy: Tensor, dsummed: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    centered: bool, weight_grad: bool, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    cols = x.shape[1]
    return x.new_empty(x.shape), rstd.new_empty(cols if weight_grad else 0), rstd.new_empty(cols if bias_grad else 0)


def _norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, _, ctx.centered = inputs
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
    dx, dweight, dbias = norm_backward(dy, dsummed, x, weight, mean, rstd, ctx.centered, dweight_asked, dbias_asked)
    return (
        dx,
        None if residual_dtype is None else dx.to(residual_dtype),
        dweight.to(weight_dtype) if dweight_asked else None,
        dbias.to(bias_dtype) if dbias_asked else None,
        None,
        None,
    )


norm.register_autograd(_norm_gradient, setup_context=_norm_setup)
