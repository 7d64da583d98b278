"""The product of a given tile as an operator torch knows: `tessera::tiled_mm`, with a fake and a gradient.

On CUDA it is our Triton kernel; on a CPU torch computes the same (operands rounded alike, sums in fp32). Its gradients
are products of the same tile: the rows of dA follow the rows of C and the columns of dB its columns, so BM and BN keep
their meaning, and what fitted in shared memory fits again.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import ArgumentError
from . import arguments, tile
from .arguments import PRECISION_OF
from .eager import at, composed, differentiated, straight
from .switches import tf32_allowed
from .tile import Tile

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
"""What `linear` may end with; "gelu" is the exact one, as torch's default."""

_SCHEMA = (
    "(Tensor a, Tensor b, Tensor? bias, Tensor? residual, float alpha, float beta, str activation, str precision, "
    "int[] tile_shape, int stages, int warps) -> Tensor"
)


def _compile(shape: Tile, dtype: str, stages: int, warps: int, target: Any) -> Any:
    from .kernels.matmul import compile_product

    return compile_product(shape, dtype, stages, warps, target).metadata


tile.register("matmul", _compile)


def product(
    op: str, a: Any, b: Any, tile_shape: Any, *, precision: str = "", bias: Any = None, residual: Any = None,
    alpha: float = 1.0, beta: float = 1.0, activation: str = "none", advise: bool = True,
) -> Any:  # fmt: skip
    """act(alpha a b + beta residual + bias) by the kernel of a tile, with torch.matmul's shapes.

    `advise` warns of a tile that works and is slow.
    """
    shape = Tile.of(op, tile_shape)
    if not precision:  # one that was asked for stays
        a, b, bias, residual = arguments.autocast(a, b, bias, residual)
    check_dtype(op, "x" if op == "linear" else "a", a, precision)
    stages, warps = _checked(op, shape, precision, a, advise)
    left, right = a.unsqueeze(0) if a.ndim == 1 else a, b.unsqueeze(-1) if b.ndim == 1 else b
    lead = arguments.batches(op, left, right)
    if right.ndim == 2:  # one product of all rows
        stack_a, stack_b = left.reshape(1, left.shape[:-1].numel(), left.shape[-1]), right.unsqueeze(0)
    else:
        stack_a, stack_b = _stack(left, lead), _stack(right, lead)
    full = (*lead, left.shape[-2], right.shape[-1])
    if residual is not None:
        arguments.expandable(op, "c", residual, full)
        stack = _batch(stack_a, stack_b)
        residual = residual.expand(full).reshape(stack, stack_a.shape[1], full[-1])
    given = stack_a, stack_b, bias, residual
    if straight(*given) and not differentiated(*given):  # nobody would see the operator (eager.py)
        epilogue = {"bias": bias, "residual": residual, "alpha": alpha, "beta": beta, "activation": activation}
        out = _launched(stack_a, stack_b, precision, shape, stages, warps, epilogue).reshape(full)
    else:
        sides = list(shape.sides)
        out = _product(*given, alpha, beta, activation, precision, sides, stages, warps).reshape(full)
    out = out.squeeze(-2) if a.ndim == 1 else out
    return out.squeeze(-1) if b.ndim == 1 else out


def check_dtype(op: str, name: str, x: Any, precision: str = "") -> None:
    """`x` is of a dtype that our kernels multiply, or will be rounded to one; where torch computes, fp64 too."""
    wide = x.dtype is torch.float64 and x.is_cuda
    if (precision == "" and x.dtype not in PRECISION_OF) or (wide and precision in ("", "fp64")):
        raise ArgumentError(
            f"op.{op}: {name} is {x.dtype}",
            why="a tile is of fp32, bf16, fp16 or fp8 operands, summed in fp32",
            fix=f"leave tile_shape out, or {name}.float()",
        )


def _named(a: Any, precision: str) -> Any:
    return runs_in(a.dtype) if precision in ("", "fp64") else precision


def _stack(x: Any, lead: tuple[int, ...]) -> Any:
    """(batch, rows, cols); one matrix alone stays one, and is read for all."""
    if x.ndim == 2:
        return x.unsqueeze(0)
    return x.expand(*lead, *x.shape[-2:]).reshape(math.prod(lead), *x.shape[-2:])


def _checked(op: str, shape: Tile, precision: str, a: Any, advise: bool) -> tuple[int, int]:
    """(stages, warps) of a tile that fits; zeros under torch.compile, where the fake checks and the launch decides."""
    if torch.compiler.is_compiling():
        return 0, 0
    stages, warps = tile.pipeline(shape)
    dtype, arch = _named(a, precision), tile.arch_of(a.device)
    tile.check("matmul", shape, dtype, stages, warps, arch, op=op)
    if advise:
        tile.advise(op, shape, dtype, arch)
    return stages, warps


@torch.library.custom_op("tessera::tiled_mm", mutates_args=(), schema=_SCHEMA)
def tiled_mm(
    a: Any, b: Any, bias: Any, residual: Any, alpha: float, beta: float, activation: str, precision: str,
    tile_shape: Any, stages: int, warps: int,
) -> Any:  # fmt: skip
    """A stack of products (batch or 1, m, k) x (batch or 1, k, n) -> (batch, m, n)."""
    epilogue = {"bias": bias, "residual": residual, "alpha": alpha, "beta": beta, "activation": activation}
    if a.is_cuda:
        shape = Tile(*tile_shape)
        if not stages:
            stages, warps = tile.pipeline(shape)
        return _launched(a, b, precision, shape, stages, warps, epilogue)
    return _computed(a, b, precision, **epilogue)


@tiled_mm.register_fake
def _(
    a: Any, b: Any, bias: Any, residual: Any, alpha: float, beta: float, activation: str, precision: str,
    tile_shape: Any, stages: int, warps: int,
) -> Any:  # fmt: skip
    if not stages:
        shape = Tile(*tile_shape)
        tile.check("matmul", shape, _named(a, precision), *tile.pipeline(shape), tile.arch_of(a.device))
    return a.new_empty((_batch(a, b), a.shape[1], b.shape[2]), dtype=_result_dtype(a.dtype))


def _batch(a: Any, b: Any) -> Any:
    """How many matrices two stacks make: one alone meets all of the other, none where there is none."""
    return b.shape[0] if a.shape[0] == 1 else a.shape[0]


def _result_dtype(dtype: Any) -> Any:
    return torch.bfloat16 if dtype is torch.float8_e4m3fn else dtype


def _launched(a: Any, b: Any, precision: str, shape: Tile, stages: int, warps: int, epilogue: dict[str, Any]) -> Any:
    if not (a.numel() and b.numel()):  # nothing to multiply: the epilogue alone
        return _computed(a, b, precision, **epilogue)
    from .kernels.matmul import launch

    out = a.new_empty((_batch(a, b), a.shape[1], b.shape[2]), dtype=_result_dtype(a.dtype))
    left, right, scales = _rounded(a, b, precision)
    dot = "tf32" if precision == "tf32" or (not precision and tf32_allowed()) else "ieee"
    with at(a):
        launch(left, right, out, tile=shape, stages=stages, warps=warps, scales=scales, dot=dot, **epilogue)
    return out


def _rounded(a: Any, b: Any, precision: str) -> tuple[Any, Any, tuple[Any, Any] | None]:
    """Both stacks in a precision, and the scales that bring their matrices back: (batch or 1,) each."""
    if not (precision and a.numel() and b.numel()):
        return a, b, None
    left, by_left = _cast(a, precision)
    right, by_right = _cast(b.mT, precision)  # the right operand's columns: fp8 is multiplied from there
    return left, right.mT, (by_left, by_right) if by_left is not None and by_right is not None else None


def _cast(stack: Any, precision: str) -> tuple[Any, Any]:
    """A stack rounded with a scale for each matrix, as a tolerance was checked for; None where nothing is scaled."""
    from .lowprec import cast, cast_each

    if len(stack) > 1 and precision in ("fp8", "fp16") and PRECISION_OF.get(stack.dtype) != precision:
        return cast_each(stack, precision)
    values, scale = cast(stack, precision)
    return values, scale if scale is None else scale.reshape(1)


def runs_in(dtype: Any) -> Any:
    """What a tile of operands of a dtype is checked for: tf32 where the program allows that for fp32.

    fp64 runs on a CPU alone, and is checked as fp32.
    """
    if dtype is torch.float64:
        return torch.float32
    return "tf32" if dtype is torch.float32 and tf32_allowed() else dtype


def _computed(
    a: Any, b: Any, precision: str, *, bias: Any, residual: Any, alpha: float, beta: float, activation: str
) -> Any:
    left, right, scales = _rounded(a, b, precision)
    wide = torch.float64 if a.dtype is torch.float64 else torch.float32
    with arguments.uncast(a):
        acc = torch.matmul(left.to(wide), right.to(wide)) * alpha
    if scales is not None:
        acc = acc * (scales[0] * scales[1])[:, None, None]
    if residual is not None:
        acc = acc + beta * residual.to(wide)
    if bias is not None:
        acc = acc + bias.to(wide)
    return activated(acc, activation).to(_result_dtype(a.dtype))


def activated(x: Any, activation: str) -> Any:
    """One of our activations by torch."""
    functional = torch.nn.functional
    if activation == "none":
        return x
    if activation in ("gelu", "gelu_tanh"):
        return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    return torch.relu(x) if activation == "relu" else functional.silu(x)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, _, _, ctx.alpha, ctx.beta, ctx.activation, _, ctx.tile_shape, ctx.stages, ctx.warps = inputs
    ctx.save_for_backward(a, b)


def _gradients(ctx: Any, g: Any) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    if ctx.activation != "none":
        raise ArgumentError(
            f"tessera::tiled_mm has no gradient through its fused {ctx.activation}",
            why="the values before the activation are not kept",
            fix="op.linear, which applies the activation apart where a gradient is needed",
        )

    def again(x: Any, y: Any) -> Any:
        return _product(x, y, None, None, ctx.alpha, 0.0, "none", "", ctx.tile_shape, ctx.stages, ctx.warps)

    g = g.to(a.dtype)
    by_a = by_b = None
    if ctx.needs_input_grad[0]:
        by_a = again(g, b.mT)
        by_a = by_a.sum(0, keepdim=True) if a.shape[0] != by_a.shape[0] else by_a
    if ctx.needs_input_grad[1]:
        by_b = again(a.mT, g)
        by_b = by_b.sum(0, keepdim=True) if b.shape[0] != by_b.shape[0] else by_b
    by_bias = g.sum((0, 1)) if ctx.needs_input_grad[2] else None
    by_residual = ctx.beta * g if ctx.needs_input_grad[3] else None
    return by_a, by_b, by_bias, by_residual, None, None, None, None, None, None, None


tiled_mm.register_autograd(_gradients, setup_context=_save)
_product = composed(tiled_mm, _save, _gradients, "matmul, gemm or linear", "tile_shape")
