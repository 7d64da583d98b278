"""The matrix product of a given tile as a torch operator: `tessera::tiled_mm`, with a fake and a gradient.

On CUDA it is our Triton kernel; on a CPU torch computes the same (operands rounded alike, sums in fp32). Its gradients
are products of the same tile.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import ArgumentError
from . import arguments, tile
from .arguments import PRECISION_OF
from .casting import cast, cast_each
from .dispatch import device_of, is_tf32_allowed, make_differentiable
from .tile import Tile

PRECISIONS = ("fp8", "bf16", "fp16", "tf32", "fp32")
"""The precisions that a tile may run in: the kernel has no scales for rows, and sums in fp32."""

_SCHEMA = "(Tensor a, Tensor b, str precision, int[] tile_shape, int stages, int warps) -> Tensor"


def _compile(shape: Tile, dtype: str, stages: int, warps: int, target: Any) -> Any:
    from .kernels.matmul import compile_matmul

    return compile_matmul(shape, dtype, stages, warps, target).metadata


tile.register("matmul", _compile)


def multiply_by_tile(op: str, a: Any, b: Any, tile_shape: Any, *, precision: str = "") -> Any:
    """Return the product of matrices or stacks of matrices by the kernel of a tile, broadcast as torch.matmul does."""
    shape = Tile.of(op, tile_shape)
    if not precision:  # a precision that was asked for applies under autocast too
        a, b = arguments.cast_like_autocast(a, b)
    check_dtype(op, "x" if op == "linear" else "a", a, precision)
    stages = warps = 0  # under torch.compile, the fake operator checks and the launch decides
    if not torch.compiler.is_compiling():
        stages, warps = tile.plan_launch("matmul", shape, _checked_dtype(a, precision), a.device, op=op)
    lead = arguments.broadcast_batches(op, a, b)
    if b.ndim == 2:  # one product of all rows
        left, right = a.reshape(1, a.shape[:-1].numel(), a.shape[-1]), b.unsqueeze(0)
    else:
        left, right = _stack(a, lead), _stack(b, lead)
    out = _product(left, right, precision, list(shape.sides), stages, warps)
    return out.reshape(*lead, a.shape[-2], b.shape[-1])


def _stack(x: Any, lead: tuple[int, ...]) -> Any:
    """Return a stack (batch, rows, cols); one matrix alone stays one, and is read for all."""
    return x.unsqueeze(0) if x.ndim == 2 else x.expand(*lead, *x.shape[-2:]).reshape(math.prod(lead), *x.shape[-2:])


def check_dtype(op: str, name: str, x: Any, precision: str = "") -> None:
    """Refuse a dtype that our kernels do not multiply; fp64 is accepted where torch computes."""
    wide = x.dtype is torch.float64 and x.is_cuda
    if (precision == "" and x.dtype not in PRECISION_OF) or (wide and precision in ("", "fp64")):
        raise ArgumentError(
            f"op.{op}: {name} is {x.dtype}",
            why="a tile is of fp32, bf16, fp16 or fp8 operands, summed in fp32",
            fix=f"leave tile_shape out, or {name}.float()",
        )


def dtype_to_check(dtype: Any) -> Any:
    """Return the precision that a tile is checked for: fp32 may become tf32, fp64 (CPU only) counts as fp32."""
    if dtype is torch.float64:
        return torch.float32
    return "tf32" if dtype is torch.float32 and is_tf32_allowed() else dtype


def _checked_dtype(a: Any, precision: str) -> Any:
    return dtype_to_check(a.dtype) if precision in ("", "fp64") else precision


@torch.library.custom_op("tessera::tiled_mm", mutates_args=(), schema=_SCHEMA)
def tiled_mm(a: Any, b: Any, precision: str, tile_shape: Any, stages: int, warps: int) -> Any:
    """Return a stack of products (batch or 1, m, k) x (batch or 1, k, n) -> (batch, m, n)."""
    (left, left_scale), (right, right_scale) = _cast(a, precision), _cast(b.mT, precision)
    right = right.mT  # fp8 reads the right operand by columns
    scales = None if left_scale is None or right_scale is None else (left_scale, right_scale)
    if not (a.is_cuda and a.numel() and b.numel()):
        wide = torch.float64 if a.dtype is torch.float64 else torch.float32
        with arguments.without_autocast(a):
            out = torch.matmul(left.to(wide), right.to(wide))
        out = out if scales is None else out * (scales[0] * scales[1])[:, None, None]
        return out.to(_result_dtype(a.dtype))
    from .kernels.matmul import launch_matmul

    shape = Tile(*tile_shape)
    if not stages:
        stages, warps = tile.pipeline(shape)
    out = _empty_result(a, b)
    dot = "tf32" if precision == "tf32" or (not precision and is_tf32_allowed()) else "ieee"
    with device_of(a):
        launch_matmul(left, right, out, tile=shape, stages=stages, warps=warps, scales=scales, dot=dot)
    return out


@tiled_mm.register_fake
def _(a: Any, b: Any, precision: str, tile_shape: Any, stages: int, warps: int) -> Any:
    if not stages:
        tile.plan_launch("matmul", Tile(*tile_shape), _checked_dtype(a, precision), a.device, warn=False)
    return _empty_result(a, b)


def _empty_result(a: Any, b: Any) -> Any:
    batch = b.shape[0] if a.shape[0] == 1 else a.shape[0]  # a single matrix is multiplied with all of the other stack
    return a.new_empty((batch, a.shape[1], b.shape[2]), dtype=_result_dtype(a.dtype))


def _result_dtype(dtype: Any) -> Any:
    return torch.bfloat16 if dtype is torch.float8_e4m3fn else dtype


def _cast(stack: Any, precision: str) -> tuple[Any, Any]:
    """Return a stack rounded with a scale for each matrix, as a tolerance was checked for; None if unscaled."""
    if not (precision and stack.numel()):
        return stack, None
    if len(stack) > 1 and precision in ("fp8", "fp16") and PRECISION_OF.get(stack.dtype) != precision:
        return cast_each(stack, precision)
    values, scale = cast(stack, precision)
    return values, scale if scale is None else scale.reshape(1)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, _, *ctx.tile = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx: Any, g: Any) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors

    def multiply(x: Any, y: Any, like: Any) -> Any:
        gradient = _product(x, y, "", *ctx.tile)
        return gradient.sum(0, keepdim=True) if like.shape[0] != gradient.shape[0] else gradient

    g = g.to(a.dtype)
    to_a, to_b = ctx.needs_input_grad[:2]
    return multiply(g, b.mT, a) if to_a else None, multiply(a.mT, g, b) if to_b else None, *(None,) * 4


_product = make_differentiable(tiled_mm, _save, _backward, "matmul, gemm or linear", "tile_shape")
