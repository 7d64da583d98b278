"""Products of matrices whose rows do not start at 16 bytes, at the speed of those whose rows do.

A tensor core is fed in pieces of 16 bytes. A vocabulary of 50257 bf16 columns gives rows of 100514 bytes, for which
cuBLAS uses kernels that move two bytes at a time (docs/operators.md has the figures). So operands are copied to padded
rows where the predictor says that this is still faster, and the caller gets a view of a padded result: same shape, same
values, not contiguous. Aligned products are torch.matmul's.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal

import torch

from ..errors import PredictionError, check_choice
from .arguments import HALVES
from .dispatch import in_transform

PIECE_BYTES = 16
"""Bytes that TMA, cp.async and ldmatrix move at a time (PTX ISA): rows must start at a multiple of this."""

_COPY_LAUNCH_S = 3e-6  # seconds of a copy's launch and tail; assumed, not yet measured on a GPU
# share of the datasheet's bandwidth that a copy with rows of odd bytes reaches; not yet measured on a GPU
_COPY_BANDWIDTH = 0.8
_HOST_S = 2e-5  # seconds of the host that the padded call costs beyond torch.matmul; a smaller gain is not worth it
_GAIN = 1.15  # least gain: the predictor's products are good to about a tenth (benchmarks/results/predict_kernels.json)

Mode = Literal["auto", "always", "never"]
_MODES = ("auto", "always", "never")
_mode: ContextVar[Mode] = ContextVar("tessera_op_padding", default="auto")


@contextlib.contextmanager
def use(mode: Mode) -> Iterator[None]:
    """Pad where it is faster ("auto"), wherever rows are unaligned on any device ("always", for tests), or "never"."""
    check_choice("op.padding.use: mode", mode, _MODES)
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def matmul(a: Any, b: Any) -> Any:
    """Multiply as torch.matmul, padded if rows are unaligned and padding is faster."""
    if a.dtype in HALVES and b.ndim == 2 and a.ndim > 1 and _is_unaligned(a, b):
        out = _try_padded(a, b, None)
        if out is not None:
            return out
    return torch.matmul(a, b)


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """Compute torch's linear, padded if rows are unaligned and padding is faster."""
    if x.dtype in HALVES and x.ndim > 1 and _is_unaligned(x, weight, -2):
        out = _try_padded(x, weight.t(), bias)
        if out is not None:
            return out
    return torch.nn.functional.linear(x, weight, bias)


def linear_for_compiler(x: Any, weight: Any, bias: Any) -> Any:
    """Compute torch's linear in a form of which torch.compile makes aligned products, forward and backward.

    Zeros are appended to the weight's unaligned dimensions, and the result is a view without them. The compiler writes
    the gradient of that view with its zeros, so that none of the three products needs a copy.
    """
    pad = torch.nn.functional.pad
    rows, cols = weight.shape
    more_rows, more_cols = (_round_up(size) - size if size % 8 else 0 for size in (rows, cols))
    if more_cols:
        x = pad(x, (0, more_cols))
    wide = None if bias is None else pad(bias, (0, more_rows))
    out = torch.nn.functional.linear(x, pad(weight, (0, more_cols, 0, more_rows)), wide)
    return out[..., :rows]


def _try_padded(a: Any, b: Any, bias: Any) -> Any:
    if b.dtype is not a.dtype or (bias is not None and bias.dtype is not a.dtype):
        return None  # autocast gives them one dtype, inside torch's call
    if in_transform():  # torch.func, or forward mode: torch's call has the rules for them
        return None
    flat = a.reshape(-1, a.shape[-1]) if a.ndim > 2 else a
    if not _pays(flat, b):
        return None
    out = _PaddedProduct.apply(flat, b, bias)
    return out.unflatten(0, a.shape[:-1]) if a.ndim > 2 else out


def _is_unaligned(a: Any, b: Any, columns: int = -1) -> bool:
    """Return whether a row of a, b or their product does not start at 16 bytes.

    `columns` is the dimension of b that the product keeps.
    """
    # Inductor pads by itself (its `shape_padding` pass), and its graphs need no guard on shapes for ours.
    if torch.compiler.is_compiling():
        return False
    return bool((a.shape[-1] | b.shape[columns]) % 8) or not (_has_aligned_rows(a) and _has_aligned_rows(b))


class _PaddedProduct(torch.autograd.Function):
    """a b + bias of two matrices with every row at 16 bytes; its gradients are such products again."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, bias: Any) -> Any:
        ctx.save_for_backward(a, b)
        return multiply_padded(a, b, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, Any, Any]:
        a, b = ctx.saved_tensors
        (g,) = gradients
        to_a, to_b, to_bias = ctx.needs_input_grad
        if torch.is_grad_enabled():  # a second derivative may be needed, so use products that have one
            return matmul(g, b.t()) if to_a else None, matmul(a.t(), g) if to_b else None, g.sum(0) if to_bias else None
        wide = g
        if (to_a and _pays(g, b.t())) or (to_b and _pays(a.t(), g)):
            wide = pad_matrix(g, g.shape[0], _round_up(g.shape[1]))  # once: both products read it
        by_a = multiply_padded(wide, b.t()) if to_a else None
        # The gradient has its operand's memory layout, as torch's own has: optimizers and AccumulateGrad need not copy.
        by_b = None
        if to_b:
            by_b = (
                multiply_padded(wide.t(), a)[: b.shape[1]].t()
                if b.stride(0) == 1
                else multiply_padded(a.t(), wide)[:, : b.shape[1]]
            )
        return by_a, by_b, g.sum(0) if to_bias else None


def multiply_padded(a: Any, b: Any, bias: Any = None) -> Any:
    """Return a b + bias of two matrices, with aligned rows in operands and result (a view of a padded buffer).

    An operand may already be filled with zeros along the depth; the other one is then filled to match.
    """
    m, n = a.shape[0], b.shape[1]
    wide_m, wide_n, wide_k = _padded_sides(a, b)
    left, right, out = pad_matrix(a, wide_m, wide_k), pad_matrix(b, wide_k, wide_n), _empty_matrix(wide_m, wide_n, a)
    if bias is None:
        torch.mm(left, right, out=out)
    else:
        torch.addmm(torch.nn.functional.pad(bias, (0, wide_n - n)), left, right, out=out)
    return out if (wide_m, wide_n) == (m, n) else out[:m, :n]


def _padded_sides(a: Any, b: Any) -> tuple[int, int, int]:
    """Return (m, n, k) of the padded product: sides that are contiguous in a, b or the result are rounded up.

    Padding only the distance between rows was faster for none of eight forward products on an H200
    (benchmarks/results/ops_gemm.json, ways "extents" and "rows").
    """
    m, n, k = a.shape[0], b.shape[1], max(a.shape[1], b.shape[0])
    wide_m = _round_up(m) if a.stride(0) == 1 and a.stride(1) != 1 else m
    return wide_m, _round_up(n), _round_up(k) if 1 in (a.stride(1), b.stride(0)) else k


def pad_matrix(x: Any, rows: int, cols: int) -> Any:
    """Return `x` with aligned rows (columns, if transposed), filled with zeros to a size; `x` itself if it fits."""
    if x.shape == (rows, cols) and _has_aligned_rows(x):
        return x
    if x.stride(0) == 1 and x.stride(1) != 1:
        return pad_matrix(x.t(), cols, rows).t()
    out = _empty_matrix(rows, cols, x)
    out[: x.shape[0], : x.shape[1]].copy_(x)
    out[:, x.shape[1] :].zero_()
    out[x.shape[0] :, : x.shape[1]].zero_()
    return out


def _empty_matrix(rows: int, cols: int, like: Any) -> Any:
    """Return an empty matrix whose rows start at 16 bytes; it may be a view of a wider one."""
    return torch.empty((rows, _round_up(cols)), dtype=like.dtype, device=like.device)[:, :cols]


def _round_up(extent: int) -> int:
    """Return the next size that a fast kernel takes: whole cache lines if cheap, else multiples of 16 bytes."""
    whole = 64 if extent >= 2048 else 8
    return math.ceil(extent / whole) * whole


def _has_aligned_rows(x: Any) -> bool:
    """Return whether the rows of a matrix (or its columns, if those are contiguous) start at 16 bytes."""
    outer, inner = x.stride()[-2:]
    if inner != 1:
        if outer != 1:
            return True  # strided both ways: torch copies it anyway
        outer = inner
    return not (outer | x.storage_offset()) * x.element_size() % PIECE_BYTES


def _pays(a: Any, b: Any) -> bool:
    mode = _mode.get()
    if mode != "auto":
        return mode == "always"
    if a.device.type != "cuda" or torch.version.hip is not None:  # what AMD's libraries do is not known here
        return False
    return is_worth_padding(a, b, torch.cuda.get_device_name(a.device))


def is_worth_padding(a: Any, b: Any, chip: str) -> bool:
    """Return whether the padded product, with the copies it needs, is predicted to be faster on a chip."""
    m, n, k = _padded_sides(a, b)
    if min(m, n, k) == 0:
        return False
    copied = sum(x.numel() for x, at in ((a, (m, k)), (b, (k, n))) if x.shape != at or not _has_aligned_rows(x))
    layout = "tn" if a.stride(0) == 1 and a.stride(1) != 1 else "nt" if b.stride(0) == 1 else "nn"
    return _is_faster_padded(chip, a.shape[0], b.shape[1], a.shape[1], layout, copied * a.element_size())


@functools.lru_cache(maxsize=4096)
def _is_faster_padded(chip: str, m: int, n: int, k: int, layout: str, copied_bytes: int) -> bool:
    """Return whether the predictor sees the padded product, copies included, well before the plain one."""
    from ..estimate.gemm import gemm_time
    from .product_cost import lookup_chip

    device = lookup_chip(chip)
    try:
        plain_s = gemm_time(device, m, n, k, layout=layout).seconds
    except PredictionError:  # the catalogue lacks a figure of the chip
        device = lookup_chip("")
        plain_s = gemm_time(device, m, n, k, layout=layout).seconds
    padded_s = gemm_time(device, _round_up(m), _round_up(n), _round_up(k), layout=layout).seconds
    bandwidth = device.memory.bandwidth_bytes_per_s
    if copied_bytes and bandwidth:
        padded_s += 2 * copied_bytes / (_COPY_BANDWIDTH * bandwidth.value) + 2 * _COPY_LAUNCH_S
    return plain_s > max(_GAIN * padded_s, padded_s + _HOST_S)
