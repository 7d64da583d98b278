"""Matrix products: `matmul`, `gemm`, `linear`.

Without options, they are torch's own calls after a few cheap checks, except that unaligned products are padded where
that is faster (`padding`). `tile_shape` runs our Triton kernel of that tile. `precision` rounds the operands to a
number format. `error_tolerance` takes the cheapest format whose relative error (Frobenius norm) is within it. All three
may be given together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError, check_choice
from ..stream import Stream
from . import arguments, hints, lowprec, padding, tiled_matmul
from .arguments import HALVES
from .casting import FULL, PRECISIONS
from .dispatch import needs_gradient
from .tile import Tile

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
"""The activations of `linear`; "gelu" is the exact one, as torch's default."""

# the activations of cuBLASLt's epilogue, each with torch's flag for it (use_gelu)
_FUSED = {"relu": False, "gelu_tanh": True}


class _Plan(NamedTuple):
    """How a product runs: torch's way if all are None. With a `tolerance`, the precision is chosen when it runs."""

    tile_shape: Any = None
    precision: str | None = None
    accumulate: str | None = None
    tolerance: float | None = None


_PLAIN = _Plan()


def matmul(
    a: Any,
    b: Any,
    *,
    tile_shape: tuple[int, int, int] | None = None,
    precision: str | None = None,
    accumulate: str | None = None,
    error_tolerance: float | None = None,
    stream: Stream | None = None,
) -> Any:
    """Return the product a b, with torch.matmul's shapes: vectors, matrices, stacks that broadcast.

    `tile_shape=(BM, BN, BK)` runs our kernel of that tile; a tile that cannot work raises `TileError`, which names the
    nearest that does. `precision` ("fp8", "bf16", "fp16", "tf32", "fp32") rounds the operands. `error_tolerance` takes
    the cheapest precision within it; given both, `precision` is the coarsest allowed. Sums are fp32, or as the library
    prefers with `accumulate="fast"`; a tolerance may take fp8's fast sums unless `accumulate` is given. A large
    unaligned 16-bit product comes back as a view with padded rows.
    """
    arguments.check_product("matmul", a, b)
    with arguments.use_stream(stream, a, b):
        plan = _plan("matmul", a, b, tile_shape, precision, accumulate, error_tolerance)
        return _multiply("matmul", a, b, plan)


def gemm(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    tile_shape: tuple[int, int, int] | None = None,
    precision: str | None = None,
    accumulate: str | None = None,
    error_tolerance: float | None = None,
    stream: Stream | None = None,
) -> Any:
    """Return the sum alpha a b + beta c; `c` broadcasts to the product, None leaves it out. Options as `matmul`."""
    arguments.check_product("gemm", a, b)
    full = _result_shape(a, b)
    if c is not None:
        arguments.check_addend("gemm", a, c, full)
    if not (type(alpha) is type(beta) is float and a.is_floating_point()):
        alpha, beta = arguments.check_factors("gemm", a, alpha=alpha, beta=beta)
    with arguments.use_stream(stream, a, b, c):
        plan = _plan("gemm", a, b, tile_shape, precision, accumulate, error_tolerance)
        if plan == _PLAIN and c is not None and a.ndim == b.ndim:
            if a.ndim == 2:
                return torch.addmm(c, a, b, alpha=alpha, beta=beta)
            if a.ndim == 3 and a.shape[0] == b.shape[0]:
                return torch.baddbmm(c.expand(full), a, b, alpha=alpha, beta=beta)
        out = _multiply("gemm", a, b, plan)
        out = out if alpha == 1.0 else alpha * out
        if beta == 0 and c is not None:  # as in torch, a factor of zero removes `c`, NaN included
            c = torch.where(c.isfinite(), c, 0) if needs_gradient(c) else None
        return out if c is None else torch.add(out, c.to(out.dtype), alpha=beta)


def linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    activation: str | None = None,
    tile_shape: tuple[int, int, int] | None = None,
    precision: str | None = None,
    accumulate: str | None = None,
    error_tolerance: float | None = None,
    stream: Stream | None = None,
) -> Any:
    """Return the layer act(x weight^T + bias), as torch's linear: `weight` is (out, in). Options as `matmul`.

    `activation` is "relu", "gelu" (exact), "gelu_tanh" or "silu". If no gradient is needed, it is fused into the
    product's epilogue: by cuBLASLt for "relu" and "gelu_tanh", by our kernel with a tile.
    """
    _check_linear(x, weight, bias, activation)
    with arguments.use_stream(stream, x, weight, bias):
        plan = _plan("linear", x, weight, tile_shape, precision, accumulate, error_tolerance)
        if plan != _PLAIN:
            out = _multiply("linear", x, weight.mT, plan)
            return _activate(out if bias is None else out + bias.to(out.dtype), activation)
        if activation in _FUSED and _can_fuse(x, weight, bias):
            flat = x.reshape(-1, x.shape[-1])
            out = torch._addmm_activation(bias, flat, weight.t(), use_gelu=_FUSED[activation])
            return out.unflatten(0, x.shape[:-1])
        return _activate(padding.linear(x, weight, bias), activation)


def _activate(x: Any, activation: str | None) -> Any:
    functional = torch.nn.functional
    if activation is None:
        return x
    if activation in ("gelu", "gelu_tanh"):
        return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    return torch.relu(x) if activation == "relu" else functional.silu(x)


def _check_linear(x: Any, weight: Any, bias: Any, activation: str | None) -> None:
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        arguments.check_tensors("linear", weight=weight)
        raise arguments.shape_error("linear", "weight", weight, "it has the dimensions (out, in)", "weight.reshape")
    if not isinstance(x, torch.Tensor) or x.dtype is not weight.dtype or x.device != weight.device:
        arguments.check_tensors("linear", one_dtype=not arguments.is_autocast(weight), x=x, weight=weight)
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        why = f"weight is {arguments.format_shape(weight)}: its rows meet those of x"
        raise arguments.shape_error("linear", "x", x, why, "weight is (out, in)")
    if bias is not None:
        if not isinstance(bias, torch.Tensor) or bias.dtype is not x.dtype or bias.device != x.device:
            arguments.check_tensors("linear", one_dtype=not arguments.is_autocast(x), x=x, bias=bias)
        if bias.shape != weight.shape[:1]:
            raise arguments.shape_error(
                "linear", "bias", bias, f"weight has {weight.shape[0]} rows", "one value for each row of weight"
            )
    if activation is not None:
        check_choice("op.linear: activation", activation, ACTIVATIONS)


def _result_shape(a: Any, b: Any) -> tuple[int, ...]:
    if a.ndim == b.ndim == 2:
        return a.shape[0], b.shape[1]
    lead = arguments.broadcast_batches("gemm", a, b) if a.ndim > 1 and b.ndim > 1 else (*a.shape[:-2], *b.shape[:-2])
    return (*lead, *a.shape[-2:-1], *(b.shape[-1:] if b.ndim > 1 else ()))


def _can_fuse(x: Any, weight: Any, bias: Any) -> bool:
    """Return whether cuBLASLt's epilogue is the best way: on CUDA, aligned, and without a gradient (it has none)."""
    return bool(
        x.is_cuda
        and bias is not None
        and x.ndim > 1
        and x.dtype in HALVES
        and not (weight.shape[0] | weight.shape[1]) % 8
        and not torch.compiler.is_compiling()
        and not arguments.is_autocast(x)
        and not needs_gradient(x, weight, bias)
    )


def _plan(
    op: str, a: Any, b: Any, tile_shape: Any, precision: str | None, accumulate: str | None, tolerance: float | None
) -> _Plan:
    """Return how the product runs: as asked, or else as a schedule hints (hints are not read under torch.compile)."""
    if not torch.compiler.is_compiling():
        hinted = hints.current()
        if hinted.tiles or hinted.precisions:
            tile_shape = tile_shape or hinted.tiles.get(op)
            precision = precision or hinted.precisions.get(op)
    if precision is None and tolerance is None and accumulate is None:
        return _PLAIN if tile_shape is None else _Plan(tile_shape)
    _check_words(op, a, precision, accumulate, tile_shape)
    if tolerance is not None:
        from .bounded import check_tolerance

        check_tolerance(tolerance)
        sides = None if tile_shape is None else Tile.of(op, tile_shape).sides
        return _Plan(sides, precision, accumulate or ("fp32" if sides else None), float(tolerance))
    # A promised fp32 is named, because torch's own path may be switched to tf32. A precision is also named if autocast
    # would change it, and for 16 bits, whose sums a library may split and round unless it is told not to.
    own = FULL[torch.promote_types(a.dtype, b.dtype)]
    if precision is None and accumulate == "fp32" and tile_shape is None and a.dtype is b.dtype and a.dtype in HALVES:
        precision = own
    named = precision == "fp32" or precision != own or arguments.is_autocast(a)
    named = named or (accumulate == "fp32" and tile_shape is None and a.dtype in HALVES)
    return _Plan(tile_shape, precision if named else None, accumulate or "fp32")


def _check_words(op: str, a: Any, precision: str | None, accumulate: str | None, tile_shape: Any) -> None:
    if precision is not None:
        check_choice(f"op.{op}: precision", precision, PRECISIONS if tile_shape is None else tiled_matmul.PRECISIONS)
    if accumulate is not None:
        check_choice(f"op.{op}: accumulate", accumulate, lowprec.ACCUMULATES if tile_shape is None else ("fp32",))
    if a.dtype not in FULL:
        name = "x" if op == "linear" else "a"
        why = "precision, accumulate and error_tolerance are for fp64, fp32, fp16 and bf16"
        raise ArgumentError(f"op.{op}: {name} is {a.dtype}", why=why, fix=f"{name}.float(), or leave them out")


def _multiply(op: str, a: Any, b: Any, plan: _Plan) -> Any:
    tile_shape, precision, accumulate, tolerance = plan
    if tile_shape is None and precision is None and tolerance is None:
        return padding.matmul(a, b)
    if (precision or tolerance) and a.dtype is not b.dtype:
        wide = torch.promote_types(a.dtype, b.dtype)  # autocast, which would do so, does not apply here
        a, b = a.to(wide), b.to(wide)
    left, right = a.unsqueeze(0) if a.ndim == 1 else a, b.unsqueeze(-1) if b.ndim == 1 else b
    if tolerance is not None:
        from .bounded import bounded_mm

        allowed, tile = (None, None) if tile_shape is None else (tiled_matmul.PRECISIONS, (op, tile_shape))
        limits: Any = {"tolerance": tolerance, "allowed": allowed, "tile": tile}
        out = bounded_mm(left, right, first=precision, accumulate=accumulate, **limits)
    elif tile_shape is not None:
        out = tiled_matmul.multiply_by_tile(op, left, right, tile_shape, precision=precision or "")
    else:
        out = lowprec.mm(left, right, precision or "", accumulate or "fp32")
    out = out.squeeze(-2) if a.ndim == 1 else out
    return out.squeeze(-1) if b.ndim == 1 else out
