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
from . import arguments, hints, padding, tiled
from .arguments import HALVES, PRECISION_OF
from .eager import differentiated, unseen
from .tile import Tile

_FUSED = {"relu": False, "gelu_tanh": True}  # what cuBLASLt's epilogue does, and torch's name for it (use_gelu)


class _How(NamedTuple):
    """How a product was asked for: all None is torch's way.

    `tolerance` is there where the product chooses for itself: under torch.compile, and where gradients are to be
    bounded as well.
    """

    tile_shape: Any = None
    precision: str | None = None
    accumulate: str | None = None
    tolerance: float | None = None

    @property
    def own(self) -> bool:
        """Whether the operands are multiplied as they are."""
        return self.precision is None and self.tolerance is None

    @property
    def tiled(self) -> bool:
        """Whether our kernel of a tile runs in a precision that is known."""
        return self.tile_shape is not None and self.tolerance is None


_PLAIN = _How()


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
    that holds; given both, the coarsest allowed is `precision`. Sums are fp32, or as the library likes them with
    `accumulate="fast"`; a tolerance may take fp8's fast sums unless `accumulate` is given. A large unaligned 16-bit
    product comes back as a view with padded rows.
    """
    arguments.product("matmul", a, b)
    with arguments.on(stream, a, b):
        how = _how("matmul", a, b, tile_shape, precision, accumulate, error_tolerance)
        if a.dtype is not b.dtype and not how.own:
            a, b = _one_dtype(a, b)
        if how.tiled:
            return tiled.product("matmul", a, b, how.tile_shape, precision=how.precision or "")
        try:
            return _product(a, b, how)
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
    arguments.product("gemm", a, b)
    full = _result_shape(a, b)
    if c is not None:
        arguments.addend("gemm", a, c, full)
    if not (type(alpha) is type(beta) is float and a.is_floating_point()):
        alpha, beta = arguments.factors("gemm", a, alpha=alpha, beta=beta)
    with arguments.on(stream, a, b, c):
        how = _how("gemm", a, b, tile_shape, precision, accumulate, error_tolerance)
        if a.dtype is not b.dtype and not how.own:
            a, b = _one_dtype(a, b)
        try:
            return _added(a, b, c, alpha, beta, how, full)
        except NotImplementedError as e:
            arguments.explain_dtype("gemm", "a", a, e)
            raise


def _added(a: Any, b: Any, c: Any, alpha: Any, beta: Any, how: _How, full: tuple[int, ...]) -> Any:
    if how == _PLAIN and c is not None and a.ndim == b.ndim and a.ndim in (2, 3):
        if a.ndim == 2:
            return torch.addmm(c, a, b, alpha=alpha, beta=beta)
        if a.shape[0] == b.shape[0]:
            return torch.baddbmm(c.expand(full), a, b, alpha=alpha, beta=beta)
    if beta == 0 and c is not None:  # as in torch's own: what is multiplied by zero does not count, NaN neither
        c = torch.where(c.isfinite(), c, 0) if differentiated(c) else None
    if how.tiled:
        return tiled.product(
            "gemm", a, b, how.tile_shape, precision=how.precision or "", residual=c, alpha=alpha, beta=beta
        )
    out = _product(a, b, how)
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
    with arguments.on(stream, x, weight, bias):
        try:
            return _linear(x, weight, bias, activation or "none", tile_shape, precision, accumulate, error_tolerance)
        except NotImplementedError as e:
            arguments.explain_dtype("linear", "x", x, e)
            raise


def _check_linear(x: Any, weight: Any, bias: Any, activation: str | None) -> None:
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        arguments.tensors("linear", weight=weight)
        raise _misshapen("weight", weight, "it has the dimensions (out, in)", "weight.reshape")
    if not isinstance(x, torch.Tensor) or x.dtype is not weight.dtype or x.device != weight.device:
        arguments.tensors("linear", one_dtype=not arguments.autocasts(weight), x=x, weight=weight)
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise _misshapen(
            "x", x, f"weight is {arguments.shape(weight)}: its rows meet those of x", "weight is (out, in)"
        )
    if bias is not None:
        if not isinstance(bias, torch.Tensor) or bias.dtype is not x.dtype or bias.device != x.device:
            arguments.tensors("linear", one_dtype=not arguments.autocasts(x), x=x, bias=bias)
        if bias.shape != weight.shape[:1]:
            raise _misshapen("bias", bias, f"weight has {weight.shape[0]} rows", "one value a row of weight")
    if activation is not None:
        arguments.one_of("linear", "activation", activation, tiled.ACTIVATIONS)


def _misshapen(name: str, value: Any, why: str, fix: str) -> ArgumentError:
    return ArgumentError(f"op.linear: {name} is {arguments.shape(value)}", why=why, fix=fix)


def _result_shape(a: Any, b: Any) -> tuple[int, ...]:
    if a.ndim == b.ndim == 2:
        return a.shape[0], b.shape[1]
    lead = arguments.batches("gemm", a, b) if a.ndim > 1 and b.ndim > 1 else (*a.shape[:-2], *b.shape[:-2])
    return (*lead, *a.shape[-2:-1], *(b.shape[-1:] if b.ndim > 1 else ()))


def _linear(
    x: Any, weight: Any, bias: Any, activation: str, tile_shape: Any, precision: str | None, accumulate: str | None,
    error_tolerance: float | None,
) -> Any:  # fmt: skip
    how = _how("linear", x, weight, tile_shape, precision, accumulate, error_tolerance)
    if how.tile_shape is None and how.own:
        if activation in _FUSED and _fusible(x, weight, bias):
            flat = x.reshape(-1, x.shape[-1])
            out = torch._addmm_activation(bias, flat, weight.t(), use_gelu=_FUSED[activation])
            return out.unflatten(0, x.shape[:-1])
        return tiled.activated(padding.linear(x, weight, bias), activation)
    if x.dtype is not weight.dtype and not how.own:
        x, weight = _one_dtype(x, weight)
    if how.tiled:
        fused = "none" if differentiated(x, weight, bias) else activation
        out = tiled.product(
            "linear", x, weight.mT, how.tile_shape, precision=how.precision or "", bias=bias, activation=fused
        )
        return out if fused == activation else tiled.activated(out, activation)
    out = _product(x, weight.mT, how)
    return tiled.activated(out if bias is None else out + bias.to(out.dtype), activation)


def _fusible(x: Any, weight: Any, bias: Any) -> bool:
    """Whether cuBLASLt's epilogue is the best way: on CUDA, aligned, without a gradient (it has none)."""
    return bool(
        x.is_cuda
        and bias is not None
        and x.ndim > 1
        and x.dtype in HALVES
        and not (weight.shape[0] | weight.shape[1]) % 8
        and not torch.compiler.is_compiling()
        and not arguments.autocasts(x)
        and not differentiated(x, weight, bias)
    )


def _one_dtype(a: Any, b: Any) -> tuple[Any, Any]:
    """Operands that autocast would have made one: in the wider dtype, since a precision or tolerance was asked for."""
    wide = torch.promote_types(a.dtype, b.dtype)
    return a.to(wide), b.to(wide)


def _how(
    op: str, a: Any, b: Any, tile_shape: Any, precision: str | None, accumulate: str | None,
    error_tolerance: float | None,
) -> _How:  # fmt: skip
    """What runs: what was asked, else what a schedule hints; hints are not read under torch.compile (see docs)."""
    if not torch.compiler.is_compiling():
        hinted = hints.current()
        if hinted.tiles or hinted.precisions:
            tile_shape = tile_shape or hinted.tiles.get(op)
            precision = precision or hinted.precisions.get(op)
    if precision is None and error_tolerance is None and accumulate is None:
        return _PLAIN if tile_shape is None else _How(tile_shape)
    _check_words(op, a, precision, accumulate, tile_shape)
    if precision is None and error_tolerance is None:
        if not (accumulate == "fp32" and tile_shape is None and a.dtype in HALVES and a.dtype is b.dtype):
            return _How(tile_shape)
        precision = PRECISION_OF[a.dtype]  # whose sums a library may split and round to 16 bits, unless it is told
    if error_tolerance is not None and _chooses(a, b, error_tolerance, tile_shape):
        sides = None if tile_shape is None else Tile.of(op, tile_shape).sides
        return _How(sides, precision, accumulate, float(error_tolerance))
    b = b.mT if op == "linear" else b
    if a.dtype is not b.dtype:
        a, b = _one_dtype(a, b)
    return _How(tile_shape, *_chosen(op, a, b, precision, accumulate, error_tolerance, tile_shape))


def _chooses(a: Any, b: Any, tolerance: Any, tile_shape: Any) -> bool:
    """Whether the product chooses for itself: graphs and maps have values when it runs; gradients are bounded too.

    With a tile only graphs do: its gradients are products in the operands' own type.
    """
    if not arguments.number(tolerance):
        return False
    if tile_shape is not None:
        return bool(torch.compiler.is_compiling())
    return not unseen(a, b) or differentiated(a, b)


def _check_words(op: str, a: Any, precision: str | None, accumulate: str | None, tile_shape: Any) -> None:
    from . import lowprec

    if precision is not None and (precision not in lowprec.PRECISIONS or tile_shape is not None):
        arguments.one_of(op, "precision", precision, _precisions(tile_shape))
    if accumulate is not None:
        arguments.one_of(op, "accumulate", accumulate, lowprec.ACCUMULATES if tile_shape is None else ("fp32",))
    if a.dtype not in lowprec.FULL:
        name = "x" if op == "linear" else "a"
        why = "precision, accumulate and error_tolerance are for fp64, fp32, fp16 and bf16"
        raise ArgumentError(f"op.{op}: {name} is {a.dtype}", why=why, fix=f"{name}.float(), or leave them out")


def _precisions(tile_shape: Any) -> tuple[str, ...]:
    """What may be asked for: our kernel has no scales for rows, and sums in fp32."""
    from . import lowprec

    return tuple(p for p in lowprec.PRECISIONS if tile_shape is None or p not in ("fp8_row", "fp64"))


def _chosen(
    op: str, a: Any, b: Any, precision: str | None, accumulate: str | None, error_tolerance: float | None,
    tile_shape: Any,
) -> tuple[str | None, str]:  # fmt: skip
    """The precision that runs, None for the operands' own, which needs no rounding; and how it is summed."""
    from . import lowprec

    # Sums in fp32 are what was asked for, or what the check found within the tolerance: a library's own may be coarser.
    sums = tile_shape is None and a.dtype in HALVES and (accumulate == "fp32" or error_tolerance is not None)
    if accumulate is None and (error_tolerance is None or tile_shape is not None):
        accumulate = "fp32"
    if error_tolerance is not None:
        from .bounded import choose

        # An explicit precision is tried first: where it does not hold, the next finer one does.
        allowed = None if tile_shape is None else _precisions(tile_shape)
        left, right = a.unsqueeze(0) if a.ndim == 1 else a, b.unsqueeze(-1) if b.ndim == 1 else b
        choice = choose(
            "matmul", left, right, tolerance=error_tolerance, allowed=allowed, first=precision, accumulate=accumulate,
            tile=None if tile_shape is None else (op, Tile.of(op, tile_shape).sides),
        )  # fmt: skip
        precision, accumulate = choice.precision, choice.accumulate
    # fp32 that was promised is said: torch's own path may be switched to tf32. So is all that autocast would change.
    said = precision == "fp32" or precision != lowprec.FULL[a.dtype] or arguments.autocasts(a)
    said = said or (sums and accumulate != "fast")
    return precision if said else None, accumulate or "fp32"


def _product(a: Any, b: Any, how: _How) -> Any:
    if how.own:
        return padding.matmul(a, b)
    left, right = a.unsqueeze(0) if a.ndim == 1 else a, b.unsqueeze(-1) if b.ndim == 1 else b
    if how.tolerance is not None:
        from .bounded_product import bounded_mm

        cut = None if how.tile_shape is None else ("matmul", how.tile_shape)
        out = bounded_mm(
            left, right, tolerance=how.tolerance, first=how.precision, accumulate=how.accumulate, tile=cut,
            allowed=None if cut is None else _precisions(how.tile_shape),
        )  # fmt: skip
    else:
        from .lowprec import mm

        out = mm(left, right, how.precision or "", how.accumulate or "fp32")
    out = out.squeeze(-2) if a.ndim == 1 else out
    return out.squeeze(-1) if b.ndim == 1 else out
