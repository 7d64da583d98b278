"""Products of a mixture's rows with their experts' weights, as operators whose shapes need no look at the routing.

How many rows an expert has is known when the operator runs: so a compiled graph stays one graph, vmap has a rule, and
tensors that are only shapes have one. `moe.py` takes them where its own products, which wait for those numbers, cannot
be traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .arguments import uncast
from .eager import composed

# They wait for the numbers, which nobody can while a CUDA graph is captured: Inductor leaves them out of its graphs.
# Older torch has no such word.
_TAGS: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}


def _parts(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, and which ones."""
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            yield expert, slice(begin, end)
        begin = end


@torch.library.custom_op("tessera::expert_products", mutates_args=(), **_TAGS)
def expert_products(rows: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Rows (r, d), sorted by expert, by the transposed weights (e, h, d): (r, h). `ends` is where each expert's end."""
    out = rows.new_empty((rows.shape[0], w.shape[1]))
    with uncast(rows):
        for expert, part in _parts(ends):
            torch.mm(rows[part], w[expert].t(), out=out[part])
    return out


@expert_products.register_fake
def _(rows: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], w.shape[1]))


@torch.library.custom_op("tessera::expert_weights", mutates_args=(), **_TAGS)
def expert_weights(g: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """The gradient of the weights, (e, h, d): each expert's g^T (r, h) by its rows (r, d), zeros where it has none."""
    out = rows.new_zeros((ends.shape[0], g.shape[1], rows.shape[1]))
    with uncast(rows):
        for expert, part in _parts(ends):
            torch.mm(g[part].t(), rows[part], out=out[expert])
    return out


@expert_weights.register_fake
def _(g: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((ends.shape[0], g.shape[1], rows.shape[1]))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _products_gradient(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    rows, w, ends = ctx.saved_tensors
    of_rows, of_w, _ = ctx.needs_input_grad
    by_rows = products(g, w.mT, ends) if of_rows else None
    return by_rows, weights(g, rows, ends) if of_w else None, None


def _weights_gradient(ctx: Any, v: Tensor) -> tuple[Any, ...]:
    g, rows, ends = ctx.saved_tensors
    of_g, of_rows, _ = ctx.needs_input_grad
    by_g = products(rows, v, ends) if of_g else None
    return by_g, products(g, v.mT, ends) if of_rows else None, None


expert_products.register_autograd(_products_gradient, setup_context=_save)
expert_weights.register_autograd(_weights_gradient, setup_context=_save)
_OPTIONS = "routing that cannot be looked at (vmap)"
products = composed(expert_products, _save, _products_gradient, "moe", _OPTIONS)
weights = composed(expert_weights, _save, _weights_gradient, "moe", _OPTIONS)
