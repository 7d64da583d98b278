"""A mixture of experts, exactly: every token goes to its `top_k` experts, none is dropped, none is padded.

::

    logits ── softmax, top k ──► (token, expert, weight) ── sort by expert ──► rows of expert 0 | 1 | 2 ...
    rows ── w1, w3, activation, w2: one grouped product each ──► rows ── back to the tokens' order ── weighted sum

Grouped products are torch's on Hopper in bf16, without asking the device how many rows an expert has; elsewhere one
product for each expert, which waits for those numbers. Rows go back by a permutation, not by atomics: the same input
gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from ..errors import ArgumentError
from ..stream import Stream
from ..stream import on as stream_on
from .arguments import autocast, autocasts, one_of, shape, tensors, whole

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}
Product = Callable[[Any, Any], Any]
"""Rows, sorted by expert, by the transposed weights of their experts."""
_ALIGNED = 8  # elements of bf16 in the 16 bytes that rows of a grouped product must start at


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
    """Each token's `top_k` experts, weighted by the router: sum of weight * w2 (activation(w1 x) * w3 x).

    x is (..., D); `router` the logits (..., E) of the same tokens, or else the gate's weight (E, D). Weights lie as in
    nn.Linear: w1 and w3 (E, H, D), w2 (E, D, H); without w3 nothing multiplies the activation. `normalize` makes a
    token's weights sum to one (Mixtral); without it they are the softmax's own (Switch). Routing is in fp32
    (fp64 for fp64).
    """
    tensors("moe", one_dtype=not autocasts(x), real=True, optional=("w3",), x=x, w1=w1, w2=w2, w3=w3)
    tensors("moe", one_dtype=False, x=x, router=router)
    tensors("moe", real=True, floating=False, router=router)
    _check(x, router, w1, w2, w3, top_k, activation)
    with stream_on(stream, x, router, w1, w2, w3):
        rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
        given = router.shape == (*x.shape[:-1], w1.shape[0])
        logits = router if given else F.linear(rows, router.to(rows.dtype))
        weights, experts = route(logits.reshape(-1, w1.shape[0]), top_k, normalize)
        rows, w1, w2, w3 = autocast(rows, w1, w2, w3)  # here: a grouped product does not see to it
        out = _mixed(rows, weights, experts, w1, w2, w3, ACTIVATIONS[activation])
        return out.reshape(x.shape).to(x.dtype)


def route(logits: Any, top_k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights (fp32, or fp64 for fp64) and numbers of each token's experts."""
    shares, experts = torch.softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1).topk(top_k, -1)
    return (shares / shares.sum(-1, keepdim=True) if normalize else shares), experts


def _check(x: Any, router: Any, w1: Any, w2: Any, w3: Any, top_k: Any, activation: Any) -> None:
    one_of("moe", "activation", activation, ACTIVATIONS)
    for name, value in (("x", x), ("router", router)):
        if value.dtype.itemsize == 1:
            raise ArgumentError(f"op.moe: {name} is {value.dtype}", why="fp8 needs scales", fix=f"{name}.bfloat16()")
    if x.ndim < 1:
        raise ArgumentError(f"op.moe: x is {shape(x)}", fix="x is (..., D)")
    for name, w in (("w1", w1), ("w2", w2), ("w3", w3)):
        if w is not None and w.ndim != 3:
            raise ArgumentError(f"op.moe: {name} is {shape(w)}", fix=f"{name} has three dimensions, experts first")
    experts, hidden, width = w1.shape
    if not experts:
        raise ArgumentError(f"op.moe: w1 is {shape(w1)}", why="there is no expert", fix="w1 is (E, H, D), E at least 1")
    if width != x.shape[-1]:
        raise ArgumentError(
            f"op.moe: w1 is {shape(w1)}, x {shape(x)}", why="w1 is (E, H, D), x (..., D)", fix=_turned("w1", w1, x)
        )
    if tuple(w2.shape) != (experts, width, hidden):
        raise ArgumentError(f"op.moe: w2 is {shape(w2)}", fix=f"w2 is (E, D, H): {experts}x{width}x{hidden}")
    if w3 is not None and w3.shape != w1.shape:
        raise ArgumentError(f"op.moe: w3 is {shape(w3)}", fix=f"w3 is shaped as w1: {shape(w1)}")
    logits, gate = (*x.shape[:-1], experts), (experts, width)
    if tuple(router.shape) not in (logits, gate):
        raise ArgumentError(
            f"op.moe: router is {shape(router)}",
            fix=f"logits for each token, {'x'.join(map(str, logits))}, or the gate's weight, {experts}x{width}",
        )
    if not whole(top_k) or not 1 <= top_k <= experts:
        raise ArgumentError(f"op.moe: top_k={top_k!r}", fix=f"between 1 and the number of experts, {experts}")


def _turned(name: str, w: Any, x: Any) -> str:
    return f"{name}.mT would fit" if w.shape[1] == x.shape[-1] else f"make D of {name} {x.shape[-1]}"


def _mixed(rows: Any, weights: Any, experts: Any, w1: Any, w2: Any, w3: Any, act: Callable[[Any], Any]) -> torch.Tensor:
    top_k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)  # stable: a token's place in a product does not depend on luck
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    mine = rows[order // top_k]
    product = _product(mine, experts.flatten()[order], w1)
    inner = act(product(mine, w1))
    if w3 is not None:
        inner = inner * product(mine, w3)
    out = product(inner, w2)[back].view(rows.shape[0], top_k, rows.shape[1])
    # Weighted and summed in fp32 or wider: a token's experts would else be rounded twice.
    wide = torch.promote_types(weights.dtype, out.dtype)
    return (out.to(wide) * weights[..., None]).sum(1).to(rows.dtype)


def _product(rows: Any, experts: Any, w1: Any) -> Product:
    # Where each expert's rows end, by search: torch's bincount would wait for the device to know its largest number.
    numbers = torch.arange(w1.shape[0], device=experts.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    if can_group(rows, w1):
        return _grouped(ends)
    if torch.compiler.is_compiling():
        return _unseen(ends)
    if rows.is_meta:  # no numbers to sort by: rows are taken to be spread evenly
        return _one_by_one(_evenly(len(rows), len(w1)))
    try:
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    except RuntimeError:  # under vmap, and of tensors that are only shapes, nobody can ask
        return _unseen(ends)
    return _one_by_one(sizes)


def _evenly(rows: int, experts: int) -> list[int]:
    return [rows // experts + (i < rows % experts) for i in range(experts)]


def can_group(rows: Any, w1: Any) -> bool:
    """Whether torch's grouped product takes these operands; the meta device is taken to be a Hopper."""
    aligned = rows.shape[1] % _ALIGNED == 0 and w1.shape[1] % _ALIGNED == 0
    return bool(
        (rows.is_cuda or rows.is_meta) and rows.dtype == torch.bfloat16 and aligned and len(rows)
        and w1.is_contiguous() and _grouped_mm() is not None
        # Hopper alone: on Blackwell experts without a token get gradients that are not zero (pytorch issue 172439).
        and (rows.is_meta or torch.cuda.get_device_capability(rows.device)[0] == 9)
    )  # fmt: skip


def _grouped_mm() -> Callable[..., Any] | None:
    found: Callable[..., Any] | None = getattr(torch, "_grouped_mm", None) or getattr(F, "grouped_mm", None)
    return found


def _grouped(ends: Any) -> Product:
    """In one launch."""
    grouped = _grouped_mm()
    assert grouped is not None
    return lambda rows, w: grouped(rows, w.transpose(-2, -1), offs=ends)


def _unseen(ends: Any) -> Product:
    """By operators that ask for the numbers when they run: a compiled graph stays one graph."""
    from .experts import products

    return lambda rows, w: products(rows, w, ends)


def _one_by_one(sizes: list[int]) -> Product:
    """A launch for each expert that has rows."""

    def product(rows: Any, w: Any) -> Any:
        parts = zip(rows.split(sizes), w.unbind(0), sizes, strict=True)
        found = [F.linear(part, weight) for part, weight, size in parts if size]
        # Of no rows at all the shape is still wanted, and a gradient of zeros.
        return torch.cat(found) if found else F.linear(rows, w[0])

    return product
