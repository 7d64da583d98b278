"""A mixture of experts, exact: every token goes to its `top_k` experts; no token is dropped and none is padded.

::

    logits ── softmax, top k ──► (token, expert, weight) ── sort by expert ──► rows of expert 0 | 1 | 2 ...
    rows ── w1, w3, activation, w2: one grouped product each ──► rows ── back to the tokens' order ── weighted sum

On Hopper in bf16, torch's grouped products run, which need not know on the host how many rows an expert has. Elsewhere
there is one product for each expert, and the host waits for those numbers. Rows go back by a permutation, not by
atomics, so the same input gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ..errors import ArgumentError, check_choice, is_integer
from ..stream import Stream
from ..stream import on as stream_on
from .arguments import (
    cast_like_autocast,
    check_tensors,
    format_shape,
    is_autocast,
    shape_error,
    without_autocast,
)
from .dispatch import READS_VALUES, make_differentiable

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}
RowProduct = Callable[[Any, Any], Any]
"""Multiplies rows, sorted by expert, by the transposed weights of their experts."""
_ALIGNED = 8  # rows of a grouped product must start at 16 bytes: 8 elements of bf16


def moe(
    x: Any,
    router: Any,
    w1: Any,
    w2: Any,
    w3: Any = None,
    *,
    top_k: int = 2,
    activation: str = "silu",
    normalize: bool = True,
    stream: Stream | None = None,
) -> torch.Tensor:
    """Return each token's `top_k` experts, weighted by the router: sum of weight * w2 (activation(w1 x) * w3 x).

    x is (..., D); `router` the logits (..., E) of the same tokens, or else the gate's weight (E, D). Weights have the
    layout of nn.Linear: w1 and w3 (E, H, D), w2 (E, D, H). Without w3, nothing multiplies the activation. `normalize`
    makes a token's weights sum to one (Mixtral); without it they are the softmax's own (Switch). Routing is in fp32
    (fp64 for fp64).
    """
    check_tensors("moe", one_dtype=not is_autocast(x), real=True, optional=("w3",), x=x, w1=w1, w2=w2, w3=w3)
    check_tensors("moe", one_dtype=False, x=x, router=router)
    check_tensors("moe", real=True, floating=False, router=router)
    _check(x, router, w1, w2, w3, top_k, activation)
    with stream_on(stream, x, router, w1, w2, w3):
        rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
        is_logits = router.shape == (*x.shape[:-1], w1.shape[0])
        logits = router if is_logits else F.linear(rows, router.to(rows.dtype))
        weights, experts = route(logits.reshape(-1, w1.shape[0]), top_k, normalize)
        rows, w1, w2, w3 = cast_like_autocast(rows, w1, w2, w3)  # torch's grouped product does not cast
        out = _mix(rows, weights, experts, w1, w2, w3, ACTIVATIONS[activation])
        return out.reshape(x.shape).to(x.dtype)


def route(logits: Any, top_k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights (fp32, or fp64 for fp64) and numbers of each token's experts."""
    shares, experts = torch.softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1).topk(top_k, -1)
    return (shares / shares.sum(-1, keepdim=True) if normalize else shares), experts


def _check(x: Any, router: Any, w1: Any, w2: Any, w3: Any, top_k: Any, activation: Any) -> None:
    check_choice("op.moe: activation", activation, ACTIVATIONS)
    for name, value in (("x", x), ("router", router)):
        if value.dtype.itemsize == 1:
            raise ArgumentError(f"op.moe: {name} is {value.dtype}", why="fp8 needs scales", fix=f"{name}.bfloat16()")
    if x.ndim < 1:
        raise ArgumentError(f"op.moe: x is {format_shape(x)}", fix="x is (..., D)")
    for name, w in (("w1", w1), ("w2", w2), ("w3", w3)):
        if w is not None and (w.ndim != 3 or not w.shape[0]):
            raise shape_error("moe", name, w, "weights have three dimensions", "experts first, and at least one")
    experts, hidden, width = w1.shape
    if width != x.shape[-1]:
        fix = "w1.mT would fit" if w1.shape[1] == x.shape[-1] else f"make D of w1 {x.shape[-1]}"
        raise shape_error("moe", "w1", w1, f"w1 is (E, H, D), x (..., D): {format_shape(x)}", fix)
    for name, w, wanted in (("w2", w2, (experts, width, hidden)), ("w3", w3, tuple(w1.shape))):
        if w is not None and tuple(w.shape) != wanted:
            raise shape_error("moe", name, w, f"w1 is {format_shape(w1)}", f"{name} is {'x'.join(map(str, wanted))}")
    logits, gate = (*x.shape[:-1], experts), (experts, width)
    if tuple(router.shape) not in (logits, gate):
        fix = f"logits for each token, {'x'.join(map(str, logits))}, or the gate's weight, {experts}x{width}"
        raise shape_error("moe", "router", router, f"x is {format_shape(x)}, w1 {format_shape(w1)}", fix)
    if not is_integer(top_k) or not 1 <= top_k <= experts:
        raise ArgumentError(f"op.moe: top_k={top_k!r}", fix=f"between 1 and the number of experts, {experts}")


def _mix(rows: Any, weights: Any, experts: Any, w1: Any, w2: Any, w3: Any, act: Callable[[Any], Any]) -> torch.Tensor:
    top_k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)  # stable, so that a token's place in a product is always the same
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    sorted_rows = rows[order // top_k]
    product = _row_product(sorted_rows, experts.flatten()[order], w1)
    inner = act(product(sorted_rows, w1))
    if w3 is not None:
        inner = inner * product(sorted_rows, w3)
    out = product(inner, w2)[back].view(rows.shape[0], top_k, rows.shape[1])
    # Weighted and summed in fp32 or wider; otherwise the outputs of a token's experts would be rounded twice.
    wide = torch.promote_types(weights.dtype, out.dtype)
    return (out.to(wide) * weights[..., None]).sum(1).to(rows.dtype)


def _row_product(rows: Any, experts: Any, w1: Any) -> RowProduct:
    # Find by search where each expert's rows end: torch's bincount would wait for the device to know its largest
    # number.
    numbers = torch.arange(w1.shape[0], device=experts.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    grouped = _grouped_mm()
    if grouped is not None and can_group(rows, w1):
        return lambda rows, w: grouped(rows, w.transpose(-2, -1), offs=ends)
    if torch.compiler.is_compiling():
        return lambda rows, w: multiply_experts(rows, w, ends)
    if rows.is_meta:  # there are no numbers to sort by, so rows are taken to be spread evenly
        each, more = divmod(len(rows), len(w1))
        return _one_by_one([each + (i < more) for i in range(len(w1))])
    try:
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    except RuntimeError:  # under vmap, and for tensors that are only shapes, the numbers cannot be read
        return lambda rows, w: multiply_experts(rows, w, ends)
    return _one_by_one(sizes)


def can_group(rows: Any, w1: Any) -> bool:
    """Return whether torch's grouped product takes these operands; the meta device counts as a Hopper."""
    aligned = rows.shape[1] % _ALIGNED == 0 and w1.shape[1] % _ALIGNED == 0
    return bool(
        (rows.is_cuda or rows.is_meta)
        and rows.dtype == torch.bfloat16
        and aligned
        and len(rows)
        and w1.is_contiguous()
        and _grouped_mm() is not None
        # On Hopper only: on Blackwell, experts without a token get gradients that are not zero (pytorch issue 172439).
        and (rows.is_meta or torch.cuda.get_device_capability(rows.device)[0] == 9)
    )


def _grouped_mm() -> Callable[..., Any] | None:
    return getattr(torch, "_grouped_mm", None) or getattr(F, "grouped_mm", None)


def _one_by_one(sizes: list[int]) -> RowProduct:
    """Return a product that runs once for each expert that has rows."""

    def product(rows: Any, w: Any) -> Any:
        parts = zip(rows.split(sizes), w.unbind(0), sizes, strict=True)
        results = [F.linear(part, weight) for part, weight, size in parts if size]
        # Without any row, the shape is still needed, and a gradient of zeros.
        return torch.cat(results) if results else F.linear(rows, w[0])

    return product


# -- products as operators that read the numbers of rows when they run: a compiled graph stays one graph -------------


def _parts(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the experts that have rows, and which rows."""
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            yield expert, slice(begin, end)
        begin = end


@torch.library.custom_op("tessera::expert_products", mutates_args=(), **READS_VALUES)
def expert_products(rows: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows (r, d), sorted by expert, by the transposed weights (e, h, d), to (r, h).

    `ends` is where each expert's rows end.
    """
    out = rows.new_empty((rows.shape[0], w.shape[1]))
    with without_autocast(rows):
        for expert, part in _parts(ends):
            torch.mm(rows[part], w[expert].t(), out=out[part])
    return out


@expert_products.register_fake
def _(rows: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], w.shape[1]))


@torch.library.custom_op("tessera::expert_weights", mutates_args=(), **READS_VALUES)
def expert_weights(g: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient of the weights, (e, h, d): each expert's g^T by its rows (r, d); zeros without rows."""
    out = rows.new_zeros((ends.shape[0], g.shape[1], rows.shape[1]))
    with without_autocast(rows):
        for expert, part in _parts(ends):
            torch.mm(g[part].t(), rows[part], out=out[expert])
    return out


@expert_weights.register_fake
def _(g: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((ends.shape[0], g.shape[1], rows.shape[1]))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _products_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    rows, w, ends = ctx.saved_tensors
    to_rows, to_w, _ = ctx.needs_input_grad
    by_rows = multiply_experts(g, w.mT, ends) if to_rows else None
    return by_rows, multiply_weights(g, rows, ends) if to_w else None, None


def _weights_backward(ctx: Any, v: Tensor) -> tuple[Any, ...]:
    g, rows, ends = ctx.saved_tensors
    to_g, to_rows, _ = ctx.needs_input_grad
    by_g = multiply_experts(rows, v, ends) if to_g else None
    return by_g, multiply_experts(g, v.mT, ends) if to_rows else None, None


_OPTIONS = "routing that cannot be read (vmap)"
multiply_experts = make_differentiable(expert_products, _save, _products_backward, "moe", _OPTIONS)
multiply_weights = make_differentiable(expert_weights, _save, _weights_backward, "moe", _OPTIONS)
