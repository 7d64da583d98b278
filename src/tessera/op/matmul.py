"""Matrix products: `matmul`, `gemm`, `linear`.

Without options they are torch's own calls after a few cheap checks, except that unaligned products are padded where it
pays (`padding`). `tile_shape` runs our Triton kernel of that tile, `precision` a number format, `error_tolerance` the
cheapest format whose relative error (Frobenius norm) stays within it; all three may be given together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError
from ..stream import Stream
from . import arguments, hints, padding, tiled_matmul
from .arguments import HALVES, PRECISION_OF
from .dispatch import is_unobserved, needs_gradient
from .tile import Tile

_FUSED = {"relu": False, "gelu_tanh": True}  # what cuBLASLt's epilogue does, and torch's name for it (use_gelu)


class _Plan(NamedTuple):
    """How a product runs: all None is torch's way.

    `tolerance` is set where the product chooses its precision when it runs: under torch.compile, and where gradients
    are bounded as well.
    """

    tile_shape: Any = None
    precision: str | None = None
    accumulate: str | None = None
    tolerance: float | None = None

    @property
    def keeps_operands(self) -> bool:
        """Whether the operands are multiplied as they are."""
        return self.precision is None and self.tolerance is None

    @property
    def has_tile(self) -> bool:
        """Whether our kernel of a tile runs, in a precision that is known."""
        return self.tile_shape is not None and self.tolerance is None


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
    """The product a b, with torch.matmul's shapes: vectors, matrices, stacks that broadcast.

    `tile_shape=(BM, BN, BK)` runs our kernel of that tile; one that cannot work is a `TileError` with the nearest that
    does. `precision` ("fp8", "bf16", "fp16", "tf32", "fp32") rounds the operands, `error_tolerance` takes the cheapest
    that holds; given both, the coarsest allowed is `precision`. Sums are fp32, or as the library prefers with
    `accumulate="fast"`; a tolerance may take fp8's fast sums unless `accumulate` is given. A large unaligned 16-bit
    product comes back as a view with padded rows.
    """
    arguments.check_product("matmul", a, b)
    with arguments.use_stream(stream, a, b):
        plan = _plan("matmul", a, b, tile_shape, precision, accumulate, error_tolerance)
        if not plan.keeps_operands:
            a, b = _unify_dtypes(a, b)
        if plan.has_tile:
            return tiled_matmul.multiply_by_tile("matmul", a, b, plan.tile_shape, precision=plan.precision or "")
        try:
            return _multiply(a, b, plan)
        except NotImplementedError as e:
            arguments.explain_dtype("matmul", "a", a, e)
            raise


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
    """The sum alpha a b + beta c; `c` broadcasts to the product, None leaves it out. Options as `matmul`."""
    arguments.check_product("gemm", a, b)
    full = _result_shape(a, b)
    if c is not None:
        arguments.check_addend("gemm", a, c, full)
    if not (type(alpha) is type(beta) is float and a.is_floating_point()):
        alpha, beta = arguments.check_factors("gemm", a, alpha=alpha, beta=beta)
    with arguments.use_stream(stream, a, b, c):
        plan = _plan("gemm", a, b, tile_shape, precision, accumulate, error_tolerance)
        if not plan.keeps_operands:
            a, b = _unify_dtypes(a, b)
        try:
            return _multiply_add(a, b, c, alpha, beta, plan, full)
        except NotImplementedError as e:
            arguments.explain_dtype("gemm", "a", a, e)
            raise


def _multiply_add(a: Any, b: Any, c: Any, alpha: Any, beta: Any, plan: _Plan, full: tuple[int, ...]) -> Any:
    if plan == _PLAIN and c is not None and a.ndim == b.ndim and a.ndim in (2, 3):
        if a.ndim == 2:
            return torch.addmm(c, a, b, alpha=alpha, beta=beta)
        if a.shape[0] == b.shape[0]:
            return torch.baddbmm(c.expand(full), a, b, alpha=alpha, beta=beta)
    if beta == 0 and c is not None:  # as in torch: what is multiplied by zero does not count, not even NaN
        c = torch.where(c.isfinite(), c, 0) if needs_gradient(c) else None
    if plan.has_tile:
        epilogue = {"residual": c, "alpha": alpha, "beta": beta}
        return tiled_matmul.multiply_by_tile("gemm", a, b, plan.tile_shape, precision=plan.precision or "", **epilogue)
    out = _multiply(a, b, plan)
    out = out if alpha == 1.0 else alpha * out
    return out if c is None else torch.add(out, c if c.dtype is out.dtype else c.to(out.dtype), alpha=beta)


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
    """The layer act(x weight^T + bias), as torch's linear: `weight` is (out, in). Options as `matmul`.

    `activation` is "relu", "gelu" (exact), "gelu_tanh" or "silu". It is fused into the product's epilogue where no
    gradient is needed: by cuBLASLt for "relu" and "gelu_tanh", by our kernel with a tile.
    """
    _check_linear(x, weight, bias, activation)
    with arguments.use_stream(stream, x, weight, bias):
        plan = _plan("linear", x, weight, tile_shape, precision, accumulate, error_tolerance)
        try:
            return _linear(x, weight, bias, activation or "none", plan)
        except NotImplementedError as e:
            arguments.explain_dtype("linear", "x", x, e)
            raise


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
        arguments.check_choice("linear", "activation", activation, tiled_matmul.ACTIVATIONS)


def _result_shape(a: Any, b: Any) -> tuple[int, ...]:
    if a.ndim == b.ndim == 2:
        return a.shape[0], b.shape[1]
    lead = arguments.broadcast_batches("gemm", a, b) if a.ndim > 1 and b.ndim > 1 else (*a.shape[:-2], *b.shape[:-2])
    return (*lead, *a.shape[-2:-1], *(b.shape[-1:] if b.ndim > 1 else ()))


def _linear(x: Any, weight: Any, bias: Any, activation: str, plan: _Plan) -> Any:
    if plan.tile_shape is None and plan.keeps_operands:
        if activation in _FUSED and _can_fuse(x, weight, bias):
            flat = x.reshape(-1, x.shape[-1])
            out = torch._addmm_activation(bias, flat, weight.t(), use_gelu=_FUSED[activation])
            return out.unflatten(0, x.shape[:-1])
        return tiled_matmul.activate(padding.linear(x, weight, bias), activation)
    if not plan.keeps_operands:
        x, weight = _unify_dtypes(x, weight)
    if plan.has_tile:
        fused = "none" if needs_gradient(x, weight, bias) else activation
        epilogue = {"precision": plan.precision or "", "bias": bias, "activation": fused}
        out = tiled_matmul.multiply_by_tile("linear", x, weight.mT, plan.tile_shape, **epilogue)
        return out if fused == activation else tiled_matmul.activate(out, activation)
    out = _multiply(x, weight.mT, plan)
    return tiled_matmul.activate(out if bias is None else out + bias.to(out.dtype), activation)


def _can_fuse(x: Any, weight: Any, bias: Any) -> bool:
    """Whether cuBLASLt's epilogue is the best way: on CUDA, aligned, without a gradient (it has none)."""
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


def _unify_dtypes(a: Any, b: Any) -> tuple[Any, Any]:
    """Both operands in the wider of their dtypes; autocast, which would make them one, does not apply here."""
    if a.dtype is b.dtype:
        return a, b
    wide = torch.promote_types(a.dtype, b.dtype)
    return a.to(wide), b.to(wide)


def _plan(
    op: str,
    a: Any,
    b: Any,
    tile_shape: Any,
    precision: str | None,
    accumulate: str | None,
    tolerance: float | None,
) -> _Plan:
    """What runs: what was asked, else what a schedule hints; hints are not read under torch.compile (see docs)."""
    if not torch.compiler.is_compiling():
        hinted = hints.current()
        if hinted.tiles or hinted.precisions:
            tile_shape = tile_shape or hinted.tiles.get(op)
            precision = precision or hinted.precisions.get(op)
    if precision is None and tolerance is None and accumulate is None:
        return _PLAIN if tile_shape is None else _Plan(tile_shape)
    _check_words(op, a, precision, accumulate, tile_shape)
    if precision is None and tolerance is None:
        if not (accumulate == "fp32" and tile_shape is None and a.dtype in HALVES and a.dtype is b.dtype):
            return _Plan(tile_shape)
        precision = PRECISION_OF[a.dtype]  # whose sums a library may split and round to 16 bits, unless it is told
    if tolerance is not None and _chooses_late(a, b, tolerance, tile_shape):
        sides = None if tile_shape is None else Tile.of(op, tile_shape).sides
        return _Plan(sides, precision, accumulate, float(tolerance))
    a, b = _unify_dtypes(a, b.mT if op == "linear" else b)
    return _choose(op, a, b, tile_shape, precision, accumulate, tolerance)


def _chooses_late(a: Any, b: Any, tolerance: Any, tile_shape: Any) -> bool:
    """Whether the product chooses when it runs: graphs and maps have values only then; gradients are bounded too.

    With a tile only graphs do: its gradients are products in the operands' own type.
    """
    if not arguments.is_number(tolerance):
        return False
    if tile_shape is not None:
        return bool(torch.compiler.is_compiling())
    return not is_unobserved(a, b) or needs_gradient(a, b)


def _check_words(op: str, a: Any, precision: str | None, accumulate: str | None, tile_shape: Any) -> None:
    from .casting import FULL, PRECISIONS
    from .lowprec import ACCUMULATES

    if precision is not None and (precision not in PRECISIONS or tile_shape is not None):
        arguments.check_choice(op, "precision", precision, _precisions(tile_shape))
    if accumulate is not None:
        arguments.check_choice(op, "accumulate", accumulate, ACCUMULATES if tile_shape is None else ("fp32",))
    if a.dtype not in FULL:
        name = "x" if op == "linear" else "a"
        why = "precision, accumulate and error_tolerance are for fp64, fp32, fp16 and bf16"
        raise ArgumentError(f"op.{op}: {name} is {a.dtype}", why=why, fix=f"{name}.float(), or leave them out")


def _precisions(tile_shape: Any) -> tuple[str, ...]:
    """The precisions that may be asked for: our kernel has no scales for rows, and sums in fp32."""
    from .casting import PRECISIONS

    return tuple(p for p in PRECISIONS if tile_shape is None or p not in ("fp8_row", "fp64"))


def _choose(
    op: str,
    a: Any,
    b: Any,
    tile_shape: Any,
    precision: str | None,
    accumulate: str | None,
    tolerance: float | None,
) -> _Plan:
    """The precision and sums that run; precision None is the operands' own, which needs no rounding."""
    from .casting import FULL

    # Sums in fp32 were asked for, or the check found them within the tolerance: a library's own may be coarser.
    sums = tile_shape is None and a.dtype in HALVES and (accumulate == "fp32" or tolerance is not None)
    if accumulate is None and (tolerance is None or tile_shape is not None):
        accumulate = "fp32"
    if tolerance is not None:
        from .bounded import choose

        # An explicit precision is tried first: where it does not hold, the next finer one does.
        choice = choose(
            a,
            b,
            tolerance=tolerance,
            allowed=None if tile_shape is None else _precisions(tile_shape),
            first=precision,
            accumulate=accumulate,
            tile=None if tile_shape is None else (op, Tile.of(op, tile_shape).sides),
        )
        precision, accumulate = choice.precision, choice.accumulate
    # A promised fp32 is named, since torch's own path may be switched to tf32; so is all that autocast would change.
    named = precision == "fp32" or precision != FULL[a.dtype] or arguments.is_autocast(a)
    named = named or (sums and accumulate != "fast")
    return _Plan(tile_shape, precision if named else None, accumulate or "fp32")


def _multiply(a: Any, b: Any, plan: _Plan) -> Any:
    if plan.keeps_operands:
        return padding.matmul(a, b)
    left, right = a.unsqueeze(0) if a.ndim == 1 else a, b.unsqueeze(-1) if b.ndim == 1 else b
    if plan.tolerance is not None:
        from .bounded import bounded_mm

        out = bounded_mm(
            left,
            right,
            tolerance=plan.tolerance,
            allowed=None if plan.tile_shape is None else _precisions(plan.tile_shape),
            first=plan.precision,
            accumulate=plan.accumulate,
            tile=None if plan.tile_shape is None else ("matmul", plan.tile_shape),
        )
    else:
        from .lowprec import mm

        out = mm(left, right, plan.precision or "", plan.accumulate or "fp32")
    out = out.squeeze(-2) if a.ndim == 1 else out
    return out.squeeze(-1) if b.ndim == 1 else out
