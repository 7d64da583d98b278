"""Softmax, layer norm and RMS norm: torch's kernel or ours, by rules that are data; with or without a residual.

Statistics are fp32 whatever the tensors are, and the result is rounded once. A call without a residual goes to torch
unless `RULES` says that our kernel is better for such rows. With `residual=`, the sum and its norm are one kernel.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documents write it

from ..errors import ArgumentError, is_integer
from ..stream import Stream
from . import arguments
from .dispatch import in_transform


class RowRule(NamedTuple):
    """Rows for which our kernel runs: of a range of lengths and a dtype, with or without a backward pass to come."""

    least_cols: int
    most_cols: int
    dtype: torch.dtype
    training: bool
    least_rows: int = 1024

    def covers(self, rows: int, cols: int, dtype: torch.dtype, training: bool) -> bool:
        """Return whether the rule is for such rows."""
        fits = self.least_cols <= cols <= self.most_cols and rows >= self.least_rows
        return fits and dtype is self.dtype and training is self.training


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
# Rows for which our kernels took at most 0.98 of torch's time and joules, as printed by
# `benchmarks/device/ops_rows.py`: 59 cases in CUDA graphs on an H200, 2026-11-15, torch 2.11
# (benchmarks/results/ops_rows.json: "kernels", "rules"). Ranges end at widths that were measured; a width that did not
# win divides them (softmax of 197 columns, RMS norm of 5,120). Host time is not included ("host" there;
# benchmarks/measure/op_host_cost.py).
RULES: dict[str, tuple[RowRule, ...]] = {
    "softmax": (
        RowRule(128, 128, _BF16, False),
        RowRule(512, 32768, _BF16, False),
        RowRule(4096, 4096, _FP16, False),
        RowRule(8192, 8192, _FP32, False),
        RowRule(1024, 4096, _BF16, True),
    ),
    "layer_norm": (
        RowRule(384, 16384, _BF16, False),
        RowRule(4096, 4096, _FP16, False),
        RowRule(1024, 4096, _FP32, False),
        RowRule(768, 4096, _BF16, True),
        RowRule(4096, 4096, _FP32, True),
    ),
    "rms_norm": (
        RowRule(384, 4096, _BF16, False),
        RowRule(8192, 16384, _BF16, False),
        RowRule(4096, 4096, _FP16, False),
        RowRule(1024, 4096, _FP32, False),
        RowRule(768, 4096, _BF16, True),
        RowRule(4096, 4096, _FP32, True),
    ),
}

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_COLS = 32768
"""The longest row that our kernels hold in the registers of one block: 32 fp32 values in each of 1024 threads.

The backward pass holds more than one row, and spills above 8192.
"""
FUSED_RMS_NORM = hasattr(torch.ops.aten, "_fused_rms_norm")  # from torch 2.8 on; before it F.rms_norm is 7 kernels


@functools.cache
def _row_ops() -> Any:
    """Import the operators when our kernel is first used: importing registers them with torch."""
    from . import row_ops

    return row_ops


@functools.cache
def has_triton() -> bool:
    """Return whether our kernels can be built here."""
    return importlib.util.find_spec("triton") is not None


def can_run_kernel(x: Any, cols: int) -> bool:
    """Return whether our kernel can take such rows.

    Not while compiling, because Inductor fuses more than one norm; nor under torch.func's transforms or in forward
    mode, for which torch's own kernels have the rules.
    """
    return (
        x.is_cuda
        and 0 < cols <= MAX_COLS
        and x.dtype in KERNEL_DTYPES
        and not torch.compiler.is_compiling()
        and not in_transform()
        and has_triton()
    )


def _uses_kernel(op: str, x: Any, cols: int) -> bool:
    rules = RULES[op]
    if not rules or not can_run_kernel(x, cols):
        return False
    rows, dtype, training = x.numel() // cols, x.dtype, torch.is_grad_enabled() and x.requires_grad
    for rule in rules:
        if rule.covers(rows, cols, dtype, training):
            return not arguments.is_autocast(x)  # under autocast, torch's results are fp32
    return False


def softmax(x: Any, dim: int = -1, *, dtype: Any = None, stream: Stream | None = None) -> Any:
    """Return the softmax along `dim`; with `dtype`, `x` is cast to it first, as in torch.

    Raises ArgumentError for an `x` that is not a floating tensor (with `dtype`: a real one), or a `dim` that it does
    not have.
    """
    if not _on_one_device(x):
        arguments.check_tensors("softmax", floating=dtype is None, real=True, x=x)
    if not (is_integer(dim) and -max(x.ndim, 1) <= dim < max(x.ndim, 1)):
        raise ArgumentError(
            f"op.softmax: dim={dim}",
            why=f"x is {arguments.format_shape(x)}",
            fix=f"dim is from {-x.ndim} to {x.ndim - 1}",
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(f"op.softmax: dtype={dtype!r}", fix="a floating dtype, such as torch.float32")
    with arguments.use_stream(stream, x):
        return _softmax(x, dim, dtype)


def _softmax(x: Any, dim: int, dtype: Any) -> Any:
    written = dtype is None or dtype in KERNEL_DTYPES
    if written and x.ndim and dim in (-1, x.ndim - 1) and _uses_kernel("softmax", x, x.shape[-1]):
        return softmax_rows(x, dtype)
    return torch.softmax(x, dim, dtype=dtype)


def softmax_rows(x: Any, dtype: Any = None) -> Any:
    """Return the softmax of the last dimension by our kernel, whatever the rules say."""
    return _row_ops().softmax(x, dtype or x.dtype)


def layer_norm(
    x: Any,
    normalized_shape: int | Sequence[int] | None = None,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    residual: Any = None,
    stream: Stream | None = None,
) -> Any:
    """Return the layer norm over the last dimensions.

    They are given by `normalized_shape`; by default the last one, or the weight's shape. With `residual` (of the shape
    and dtype of `x`), the result is (norm(x + residual), x + residual): the sum is rounded once to that dtype and is
    the next residual. Raises ArgumentError, which names the argument that does not fit.
    """
    shape = _check_norm("layer_norm", x, normalized_shape, weight, bias, residual)
    with arguments.use_stream(stream, x, weight, bias, residual):
        return _norm("layer_norm", x, shape, weight, bias, eps, residual)


def rms_norm(
    x: Any,
    weight: Any = None,
    eps: float | None = None,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    residual: Any = None,
    stream: Stream | None = None,
) -> Any:
    """Return the RMS norm over the last dimensions (by default the last one, or the weight's shape).

    `eps` None means fp32's. The product with the weight is fp32 and rounded once; Llama's own code rounds before it.
    `residual` as in layer_norm. Raises ArgumentError, which names the argument that does not fit.
    """
    shape = _check_norm("rms_norm", x, normalized_shape, weight, None, residual)
    if eps is None:
        eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    with arguments.use_stream(stream, x, weight, residual):
        return _norm("rms_norm", x, shape, weight, None, eps, residual)


def _on_one_device(x: Any, *others: Any) -> bool:
    """Return whether these are floating tensors on one device: the usual case, in as few calls as possible."""
    try:
        where = x.device
        for t in others:
            if t is not None and t.device != where:
                return False
        return bool(x.is_floating_point())
    except AttributeError:
        return False


def _check_norm(op: str, x: Any, normalized: Any, weight: Any, bias: Any, residual: Any) -> tuple[int, ...]:
    """Return the dimensions to norm over; raise ArgumentError for an argument that does not fit them."""
    if not _on_one_device(x, weight, bias, residual):
        if op == "rms_norm" and isinstance(weight, (int, tuple, list)):  # torch's second argument is the shape
            raise ArgumentError(
                f"op.rms_norm: weight={weight!r} is a shape",
                why="as in torch's order of arguments; here the weight is second",
                fix=f"op.rms_norm(x, weight, eps, normalized_shape={weight!r})",
            )
        named = {"x": x, "weight": weight, "bias": bias, "residual": residual}
        real = op == "layer_norm"  # torch has RMS norms of complex numbers
        arguments.check_tensors(op, one_dtype=False, real=real, optional=("weight", "bias", "residual"), **named)
    if normalized is None:
        shape: tuple[int, ...] = x.shape[-1:] if weight is None else weight.shape
    elif isinstance(normalized, torch.Tensor):  # a weight by position: torch's second argument is the shape too
        what = f"op.{op}: normalized_shape is a tensor of {arguments.format_shape(normalized)}"
        raise ArgumentError(what, why="it is an int or several", fix=f"op.{op}(x, weight=w)")
    else:
        shape = tuple(normalized) if isinstance(normalized, Iterable) else (normalized,)
    if not shape or x.shape[-len(shape) :] != shape:
        what = "normalized_shape" if normalized is not None or weight is None else "weight"
        size = "x".join(map(str, shape)) or "a scalar"
        why = f"x is {arguments.format_shape(x)}"
        raise ArgumentError(f"op.{op}: {what} is {size}", why=why, fix="the last dimensions of x")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.shape != shape:
            why = f"the norm is over {'x'.join(map(str, shape))}"
            raise arguments.shape_error(op, name, value, why, f"reshape {name}")
    if residual is not None and (residual.shape != x.shape or residual.dtype is not x.dtype):
        raise ArgumentError(
            f"op.{op}: residual is {arguments.format_shape(residual)} {residual.dtype}",
            why=f"x is {arguments.format_shape(x)} {x.dtype}, and their sum is the next residual",
            fix="give both one shape and dtype",
        )
    return shape


def _norm(op: str, x: Any, shape: tuple[int, ...], weight: Any, bias: Any, eps: float, residual: Any) -> Any:
    cols = shape[0] if len(shape) == 1 else math.prod(shape)
    # torch has no single kernel for these: a sum with its norm, weights of another dtype, RMS norm in an old version.
    mixed = _has_other_dtype(x, weight, bias)
    for name, value in (("weight", weight), ("bias", bias)) if mixed else ():
        if value is not None and value.is_complex():  # no imaginary part is dropped silently
            raise ArgumentError(f"op.{op}: {name} is {value.dtype}", why=f"x is {x.dtype}", fix=f"{name}.real")
    alone = residual is not None or mixed or (op == "rms_norm" and not FUSED_RMS_NORM)
    # Under autocast, torch's norms give fp32; for mixed dtypes, both ways give the dtype of `x`.
    alone = alone and can_run_kernel(x, cols) and (mixed or not arguments.is_autocast(x))
    if alone or _uses_kernel(op, x, cols):
        return norm_rows(op, x, weight, bias, eps, residual, cols)
    summed = x if residual is None else x + residual
    # With several dtypes, everything is computed in the widest and rounded to that of `x`.
    wide = functools.reduce(torch.promote_types, (t.dtype for t in (weight, bias) if t is not None), x.dtype)
    value, weight, bias = (t if t is None or not mixed else t.to(wide) for t in (summed, weight, bias))
    y = F.layer_norm(value, shape, weight, bias, eps) if op == "layer_norm" else F.rms_norm(value, shape, weight, eps)
    y = y.to(x.dtype) if mixed else y
    return y if residual is None else (y, summed)


def _has_other_dtype(x: Any, weight: Any, bias: Any) -> bool:
    return (weight is not None and weight.dtype is not x.dtype) or (bias is not None and bias.dtype is not x.dtype)


def norm_rows(op: str, x: Any, weight: Any, bias: Any, eps: float, residual: Any, cols: int) -> Any:
    """Return the norm of rows of `cols` elements by our kernel; with a residual, also the sum."""
    if x.shape[-1] == cols and (weight is None or weight.ndim == 1) and (bias is None or bias.ndim == 1):
        y, summed = _row_ops().norm(x, residual, weight, bias, eps, op == "layer_norm")
        return y if residual is None else (y, summed)
    flat = (None if t is None else t.reshape(-1, cols) for t in (x, residual))
    line = (None if t is None else t.reshape(cols) for t in (weight, bias))
    y, summed = _row_ops().norm(*flat, *line, eps, op == "layer_norm")
    return y.view(x.shape) if residual is None else (y.view(x.shape), summed.view(x.shape))
