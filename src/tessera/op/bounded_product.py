"""`bounded_mm`: choose and multiply in one operator, so that torch.compile need not look into the choice.

The choice is made when the operator runs, inside a compiled graph too. Gradients are bounded products themselves, each
within the same tolerance, and chosen for themselves; where no precision keeps it, in the operands' own type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import lowprec
from .bounded import choose, multiplied
from .eager import composed


def bounded_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    tolerance: float,
    allowed: Sequence[str] | None = None,
    first: str | None = None,
    accumulate: str | None = None,
    out_dtype: torch.dtype | None = None,
    tile: tuple[str, Sequence[int]] | None = None,
) -> torch.Tensor:
    """`a @ b` in the cheapest precision within a relative Frobenius error; arguments as in `bounded.choose`."""
    names = ",".join(lowprec.PRECISIONS if allowed is None else allowed)
    out = a.dtype if out_dtype is None else out_dtype
    cut = "" if tile is None else " ".join((tile[0], *map(str, tile[1])))
    return _product(a, b, float(tolerance), names, first or "", accumulate or "", out, False, cut)


@torch.library.custom_op("tessera::bounded_mm", mutates_args=())
def product(
    a: torch.Tensor,
    b: torch.Tensor,
    tolerance: float,
    allowed: str,
    first: str,
    accumulate: str,
    out_dtype: torch.dtype,
    gradient: bool = False,
    tile: str = "",
) -> torch.Tensor:
    """The operator that torch sees. A `gradient` that no precision keeps within the tolerance runs in its own type.

    `tile` is an operator's name and the sides of its tile, "matmul 128 128 64"; gradients have none.
    """
    names, (name, *sides) = tuple(allowed.split(",")), tile.split(" ")
    cut = (name, tuple(map(int, sides))) if sides else None
    choice = choose(
        "matmul", a, b, tolerance=tolerance, allowed=names, first=first or None, accumulate=accumulate or None,
        out_dtype=out_dtype, refuse=not gradient,  # nobody can do anything about it in the middle of a backward
        tile=cut,
    )  # fmt: skip
    return multiplied(a, b, choice.precision, choice.accumulate, out_dtype, cut)


@product.register_fake
def _(
    a: Any, b: Any, tolerance: float, allowed: str, first: str, accumulate: str, out_dtype: Any, gradient: bool = False,
    tile: str = "",
) -> Any:  # fmt: skip
    lead = a.shape[:-2] if b.dim() == 2 else torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty((*lead, a.shape[-2], b.shape[-1]), dtype=out_dtype)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, *how = inputs[:6]
    ctx.save_for_backward(a, b)
    ctx.how = how


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    to_a = to_b = None
    wide = torch.promote_types(grad.dtype, a.dtype)
    grad = grad.to(wide)
    if ctx.needs_input_grad[0]:
        to_a = _product(grad, b.mT.to(wide), *ctx.how, a.dtype, True).sum_to_size(a.shape)
    if ctx.needs_input_grad[1]:
        left, right = a.mT.to(wide), grad
        if b.dim() == 2 and a.dim() > 2:  # the rows of all batches went through one matrix
            rows = a.shape[:-1].numel()
            left, right = a.reshape(rows, a.shape[-1]).mT.to(wide), grad.reshape(rows, grad.shape[-1])
        to_b = _product(left, right, *ctx.how, b.dtype, True).sum_to_size(b.shape)
    return to_a, to_b, *[None] * 7


product.register_autograd(_gradients, setup_context=_save)
_product = composed(product, _save, _gradients, "matmul, gemm or linear", "error_tolerance")
