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
from .dispatch import device_of, is_tf32_allowed, with_transforms
from .tile import Tile

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
"""What `linear` may end with; "gelu" is the exact one, as torch's default."""

_SCHEMA = (
    "(Tensor a, Tensor b, Tensor? bias, Tensor? residual, float alpha, float beta, str activation, str precision, "
    "int[] tile_shape, int stages, int warps) -> Tensor"
)


def _compile(shape: Tile, dtype: str, stages: int, warps: int, target: Any) -> Any:
    from .kernels.matmul import compile_matmul

    return compile_matmul(shape, dtype, stages, warps, target).metadata


tile.register("matmul", _compile)


def multiply_by_tile(
    op: str,
    a: Any,
    b: Any,
    tile_shape: Any,
    *,
    precision: str = "",
    bias: Any = None,
    residual: Any = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str = "none",
    advise: bool = True,
) -> Any:
    """act(alpha a b + beta residual + bias) by the kernel of a tile, with torch.matmul's shapes.

    `advise` warns of a tile that works and is slow.
    """
    shape = Tile.of(op, tile_shape)
    if not precision:  # a precision that was asked for holds under autocast too
        a, b, bias, residual = arguments.cast_like_autocast(a, b, bias, residual)
    check_dtype(op, "x" if op == "linear" else "a", a, precision)
    stages = warps = 0  # under torch.compile the fake checks, and the launch decides
    if not torch.compiler.is_compiling():
        stages, warps = tile.plan_launch("matmul", shape, _checked_dtype(a, precision), a.device, op=op, warn=advise)
    left, right = a.unsqueeze(0) if a.ndim == 1 else a, b.unsqueeze(-1) if b.ndim == 1 else b
    lead = arguments.broadcast_batches(op, left, right)
    if right.ndim == 2:  # one product of all rows
        stack_a, stack_b = left.reshape(1, left.shape[:-1].numel(), left.shape[-1]), right.unsqueeze(0)
    else:
        stack_a, stack_b = _stack(left, lead), _stack(right, lead)
    full = (*lead, left.shape[-2], right.shape[-1])
    if residual is not None:
        arguments.check_broadcast(op, "c", residual, full)
        residual = residual.expand(full).reshape(_count(stack_a, stack_b), stack_a.shape[1], full[-1])
    options = (alpha, beta, activation, precision, list(shape.sides), stages, warps)
    out = _product(stack_a, stack_b, bias, residual, *options).reshape(full)
    out = out.squeeze(-2) if a.ndim == 1 else out
    return out.squeeze(-1) if b.ndim == 1 else out


def check_dtype(op: str, name: str, x: Any, precision: str = "") -> None:
    """Refuse a dtype that our kernels do not multiply; where torch computes, fp64 is fine."""
    wide = x.dtype is torch.float64 and x.is_cuda
    if (precision == "" and x.dtype not in PRECISION_OF) or (wide and precision in ("", "fp64")):
        raise ArgumentError(
            f"op.{op}: {name} is {x.dtype}",
            why="a tile is of fp32, bf16, fp16 or fp8 operands, summed in fp32",
            fix=f"leave tile_shape out, or {name}.float()",
        )


def dtype_to_check(dtype: Any) -> Any:
    """What a tile of operands of a dtype is checked for: tf32 where the program allows it; fp64 (CPU alone) as fp32."""
    if dtype is torch.float64:
        return torch.float32
    return "tf32" if dtype is torch.float32 and is_tf32_allowed() else dtype


def _checked_dtype(a: Any, precision: str) -> Any:
    return dtype_to_check(a.dtype) if precision in ("", "fp64") else precision


def _stack(x: Any, lead: tuple[int, ...]) -> Any:
    """(batch, rows, cols); one matrix alone stays one, and is read for all."""
    if x.ndim == 2:
        return x.unsqueeze(0)
    return x.expand(*lead, *x.shape[-2:]).reshape(math.prod(lead), *x.shape[-2:])


@torch.library.custom_op("tessera::tiled_mm", mutates_args=(), schema=_SCHEMA)
def tiled_mm(a: Any, b: Any, bias: Any, residual: Any, *options: Any) -> Any:
    """A stack of products (batch or 1, m, k) x (batch or 1, k, n) -> (batch, m, n)."""
    alpha, beta, activation, precision, tile_shape, stages, warps = options
    epilogue = {"bias": bias, "residual": residual, "alpha": alpha, "beta": beta, "activation": activation}
    if not (a.is_cuda and a.numel() and b.numel()):  # with nothing to multiply the epilogue alone
        return multiply_by_torch(a, b, precision, **epilogue)
    from .kernels.matmul import launch_matmul

    shape = Tile(*tile_shape)
    if not stages:
        stages, warps = tile.pipeline(shape)
    out = a.new_empty((_count(a, b), a.shape[1], b.shape[2]), dtype=_result_dtype(a.dtype))
    left, right, scales = _round(a, b, precision)
    dot = "tf32" if precision == "tf32" or (not precision and is_tf32_allowed()) else "ieee"
    with device_of(a):
        launch_matmul(left, right, out, tile=shape, stages=stages, warps=warps, scales=scales, dot=dot, **epilogue)
    return out


@tiled_mm.register_fake
def _(a: Any, b: Any, bias: Any, residual: Any, *options: Any) -> Any:
    *_, precision, tile_shape, stages, _warps = options
    if not stages:
        tile.plan_launch("matmul", Tile(*tile_shape), _checked_dtype(a, precision), a.device, warn=False)
    return a.new_empty((_count(a, b), a.shape[1], b.shape[2]), dtype=_result_dtype(a.dtype))


def _count(a: Any, b: Any) -> Any:
    """How many matrices two stacks make: one alone meets all of the other."""
    return b.shape[0] if a.shape[0] == 1 else a.shape[0]


def _result_dtype(dtype: Any) -> Any:
    return torch.bfloat16 if dtype is torch.float8_e4m3fn else dtype


def _round(a: Any, b: Any, precision: str) -> tuple[Any, Any, tuple[Any, Any] | None]:
    """Both stacks in a precision, and the scales that bring their matrices back: (batch or 1,) each."""
    if not (precision and a.numel() and b.numel()):
        return a, b, None
    left, left_scale = _cast(a, precision)
    right, right_scale = _cast(b.mT, precision)  # fp8 reads the right operand by columns
    return left, right.mT, None if left_scale is None or right_scale is None else (left_scale, right_scale)


def _cast(stack: Any, precision: str) -> tuple[Any, Any]:
    """A stack rounded with a scale for each matrix, as a tolerance was checked for; None where nothing is scaled."""
    from .casting import cast, cast_each

    if len(stack) > 1 and precision in ("fp8", "fp16") and PRECISION_OF.get(stack.dtype) != precision:
        return cast_each(stack, precision)
    values, scale = cast(stack, precision)
    return values, scale if scale is None else scale.reshape(1)


def multiply_by_torch(
    a: Any, b: Any, precision: str, *, bias: Any, residual: Any, alpha: float, beta: float, activation: str
) -> Any:
    """What the kernel computes, by torch: operands rounded, sums in fp32 (fp64 for fp64)."""
    left, right, scales = _round(a, b, precision)
    wide = torch.float64 if a.dtype is torch.float64 else torch.float32
    with arguments.without_autocast(a):
        acc = torch.matmul(left.to(wide), right.to(wide)) * alpha
    if scales is not None:
        acc = acc * (scales[0] * scales[1])[:, None, None]
    if residual is not None:
        acc = acc + beta * residual.to(wide)
    if bias is not None:
        acc = acc + bias.to(wide)
    return activate(acc, activation).to(_result_dtype(a.dtype))


def activate(x: Any, activation: str) -> Any:
    """Apply one of our activations, by torch."""
    functional = torch.nn.functional
    if activation == "none":
        return x
    if activation in ("gelu", "gelu_tanh"):
        return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    return torch.relu(x) if activation == "relu" else functional.silu(x)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, _, _, ctx.alpha, ctx.beta, ctx.activation, _, *ctx.tile = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx: Any, g: Any) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    if ctx.activation != "none":
        raise ArgumentError(
            f"tessera::tiled_mm has no gradient through its fused {ctx.activation}",
            why="the values before the activation are not kept",
            fix="op.linear, which applies the activation apart where a gradient is needed",
        )

    def multiply(x: Any, y: Any, like: Any) -> Any:
        gradient = _product(x, y, None, None, ctx.alpha, 0.0, "none", "", *ctx.tile)
        return gradient.sum(0, keepdim=True) if like.shape[0] != gradient.shape[0] else gradient

    g = g.to(a.dtype)
    to_a, to_b, to_bias, to_residual = ctx.needs_input_grad[:4]
    return (
        multiply(g, b.mT, a) if to_a else None,
        multiply(a.mT, g, b) if to_b else None,
        g.sum((0, 1)) if to_bias else None,
        ctx.beta * g if to_residual else None,
        *(None,) * 7,
    )


tiled_mm.register_autograd(_backward, setup_context=_save)
_product = with_transforms(tiled_mm, _save, _backward, "matmul, gemm or linear", "tile_shape")
