"""Products of matrices whose rows do not start at 16 bytes, at the speed of those whose rows do.

A tensor core is fed in pieces of 16 bytes. A vocabulary of 50257 bf16 columns gives rows of 100514 bytes, and cuBLAS
falls back to kernels that move two bytes at a time (docs/operators.md has the figures). So operands are copied to
padded rows where the predictor says that it still pays, and the caller gets a view of a padded result: same shape, same
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
"""What TMA, cp.async and ldmatrix move at a time (PTX ISA): rows must start at a multiple of it."""

_COPY_LAUNCH_S = 3e-6  # a copy's launch and tail; assumed, not yet measured on a GPU
_COPY_BANDWIDTH = 0.8  # of the datasheet's, what a copy with rows of odd bytes reaches; not yet measured on a GPU
_HOST_S = 2e-5  # what the padded call costs the host beyond torch.matmul: less is not worth it
_GAIN = 1.15  # the predictor's products are good to about a tenth (benchmarks/results/predict_kernels.json)

Mode = Literal["auto", "always", "never"]
_MODES = ("auto", "always", "never")
_mode: ContextVar[Mode] = ContextVar("tessera_op_padding", default="auto")


@contextlib.contextmanager
def use(mode: Mode) -> Iterator[None]:
    """Pad where it pays ("auto"), wherever rows are unaligned on any device ("always", for tests), or "never"."""
    check_choice("op.padding.use: mode", mode, _MODES)
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def matmul(a: Any, b: Any) -> Any:
    """As torch.matmul, padded where rows are unaligned and it pays."""
    if a.dtype in HALVES and b.ndim == 2 and a.ndim > 1 and _is_unaligned(a, b):
        out = _try_padded(a, b, None)
        if out is not None:
            return out
    return torch.matmul(a, b)


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """As torch's linear, padded where rows are unaligned and it pays."""
    if x.dtype in HALVES and x.ndim > 1 and _is_unaligned(x, weight, -2):
        out = _try_padded(x, weight.t(), bias)
        if out is not None:
            return out
    return torch.nn.functional.linear(x, weight, bias)


def linear_for_compiler(x: Any, weight: Any, bias: Any = None) -> Any:
    """As torch's linear, written so that torch.compile makes aligned products of it, forward and backward.

    Zeros are appended to the weight's unaligned dimensions and the result is a view without them. The compiler writes
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
        return None  # autocast makes them one, inside torch's call
    if in_transform():  # torch.func, or forward mode: torch's call has the rules for them
        return None
    flat = a.reshape(-1, a.shape[-1]) if a.ndim > 2 else a
    if not _pays(flat, b):
        return None
    out = _PaddedProduct.apply(flat, b, bias)
    return out.unflatten(0, a.shape[:-1]) if a.ndim > 2 else out


def _is_unaligned(a: Any, b: Any, columns: int = -1) -> bool:
    """Whether a row of a, b or their product starts off 16 bytes; `columns` is the dimension of b the product keeps."""
    # Inductor pads by itself (its `shape_padding` pass), and shapes need no guard of ours in its graphs.
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
        if torch.is_grad_enabled():  # a gradient of this gradient will be asked for: products that have one
            return matmul(g, b.t()) if to_a else None, matmul(a.t(), g) if to_b else None, g.sum(0) if to_bias else None
        wide = g
        if (to_a and _pays(g, b.t())) or (to_b and _pays(a.t(), g)):
            wide = pad_matrix(g, g.shape[0], _round_up(g.shape[1]))  # once: both products read it
        by_a = multiply_padded(wide, b.t()) if to_a else None
        # The gradient lies in memory as its operand does, as torch's own: optimizers and AccumulateGrad copy nothing.
        by_b = None
        if to_b:
            by_b = (
                multiply_padded(wide.t(), a)[: b.shape[1]].t()
                if b.stride(0) == 1
                else multiply_padded(a.t(), wide)[:, : b.shape[1]]
            )
        return by_a, by_b, g.sum(0) if to_bias else None


def multiply_padded(a: Any, b: Any, bias: Any = None) -> Any:
    """The product a b + bias of two matrices, every row aligned inside and in the result (a view of a padded buffer).

    An operand may already be filled with zeros along the depth: the other is then filled to meet it.
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
    """(m, n, k) the product is made with: those that lie contiguously in a, b or the result, rounded up.

    Padding only the distance between rows was faster for none of eight forward products on an H200
    (benchmarks/results/ops_gemm.json, ways "extents" and "rows").
    """
    m, n, k = a.shape[0], b.shape[1], max(a.shape[1], b.shape[0])
    wide_m = _round_up(m) if a.stride(0) == 1 and a.stride(1) != 1 else m
    return wide_m, _round_up(n), _round_up(k) if 1 in (a.stride(1), b.stride(0)) else k


def pad_matrix(x: Any, rows: int, cols: int) -> Any:
    """`x` with aligned rows (columns, for a transposed matrix), filled with zeros to a size; itself where it is so."""
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
    """An empty matrix whose rows start at 16 bytes: a view of a wider one where the columns do not fill them."""
    return torch.empty((rows, _round_up(cols)), dtype=like.dtype, device=like.device)[:, :cols]


def _round_up(extent: int) -> int:
    """The next extent a fast kernel takes: whole cache lines where they cost little, whole pieces of 16 bytes else."""
    whole = 64 if extent >= 2048 else 8
    return math.ceil(extent / whole) * whole


def _has_aligned_rows(x: Any) -> bool:
    """Whether the rows of a matrix (or its columns, if those are contiguous) start at 16 bytes."""
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
    """Whether the padded product of two matrices, with the copies it needs, is predicted to be faster on a chip."""
    m, n, k = _padded_sides(a, b)
    if min(m, n, k) == 0:
        return False
    copied = sum(x.numel() for x, at in ((a, (m, k)), (b, (k, n))) if x.shape != at or not _has_aligned_rows(x))
    layout = "tn" if a.stride(0) == 1 and a.stride(1) != 1 else "nt" if b.stride(0) == 1 else "nn"
    return _is_faster_padded(chip, a.shape[0], b.shape[1], a.shape[1], layout, copied * a.element_size())


@functools.lru_cache(maxsize=4096)
def _is_faster_padded(chip: str, m: int, n: int, k: int, layout: str, copied_bytes: int) -> bool:
    """Whether the predictor sees the padded product, copies included, well before the plain one."""
    from ..estimate.gemm import gemm_time
    from .product_cost import lookup_chip

    device = lookup_chip(chip)
    try:
        plain_s = gemm_time(device, m, n, k, layout=layout).seconds
    except PredictionError:  # the catalogue lacks a figure of it
        device = lookup_chip("")
        plain_s = gemm_time(device, m, n, k, layout=layout).seconds
    padded_s = gemm_time(device, _round_up(m), _round_up(n), _round_up(k), layout=layout).seconds
    bandwidth = device.memory.bandwidth_bytes_per_s
    if copied_bytes and bandwidth:
        padded_s += 2 * copied_bytes / (_COPY_BANDWIDTH * bandwidth.value) + 2 * _COPY_LAUNCH_S
    return plain_s > max(_GAIN * padded_s, padded_s + _HOST_S)
