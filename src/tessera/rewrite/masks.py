"""A mask made of constants that says what `is_causal` says, or nothing at all: attention without it.

Models of transformers leave such a mask out when they run eagerly, and make it where they are compiled (5.17 looks at
`is_tracing`, for exported programs' sake; 5.22 no longer with torch 2.14). Attention then reads a mask and computes
both halves of the scores: compiled GPT-2 small's kernels took 225 and 320 us, 112 and 180 with `is_causal`
(results/compiled_profile.json, dropout.json).
Dynamo guards the sizes that a mask was made for, so what is known here stays true for the compiled code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional

from .attention import STRANGE, argument, constant, name_of, value_of
from .pieces import size_of
from .watch import Found

_ATTENTION = "scaled_dot_product_attention"
_MASK, _CAUSAL = 3, 5  # where its arguments stand
NOTHING, CAUSAL = "nothing", "causal"


def masks(module: fx.GraphModule) -> list[Found]:
    """Take masks that are known out of every attention; a `Pass`."""
    found, known = [], dict[tuple[fx.Node, int, int], str | None]()
    for node in module.graph.nodes:
        attends = node.op == "call_function" and node.target is functional.scaled_dot_product_attention
        mask = argument(node, _MASK, "attn_mask", None) if attends else None
        if not isinstance(mask, fx.Node) or argument(node, _CAUSAL, "is_causal", False) is not False:
            continue
        try:
            lengths = _lengths(node)
            if lengths is None:
                continue
            key = (_unexpanded(mask), *lengths)
            if key not in known:
                known[key] = said(*key)
        except STRANGE:  # a size that only the data tells, a mask in somebody's vmap: it stays as it is
            continue
        if known[key] is None:
            continue
        _set(node, _MASK, "attn_mask", None)
        _set(node, _CAUSAL, "is_causal", known[key] == CAUSAL)
        after = f"{_ATTENTION} ({CAUSAL})" if known[key] == CAUSAL else _ATTENTION
        found.append(Found(rule="known mask", before=f"{_ATTENTION} (masked)", after=after, where=str(node),
                           why="the mask is made of constants"))  # fmt: skip
    return found


def said(mask: fx.Node, queries: int, keys: int) -> str | None:
    """What a constant mask says: every query sees every key, or those up to its own; None for anything else."""
    value = constant(mask)
    if value is None or not value.numel():
        return None
    if value.dtype == torch.bool:
        seen = value
    elif value.is_floating_point() and bool(((value == 0) | (value == -torch.inf)).all()):
        seen = value == 0
    else:
        return None
    if bool(seen.all()):
        return NOTHING
    if tuple(seen.shape[-2:]) == (queries, keys) and bool((seen == torch.ones(queries, keys).tril().bool()).all()):
        return CAUSAL
    return None


def _lengths(node: fx.Node) -> tuple[int, int] | None:
    q, k = (value_of(argument(node, place, name, None)) for place, name in ((0, "query"), (1, "key")))
    if not isinstance(q, torch.Tensor) or not isinstance(k, torch.Tensor) or q.dim() < 2 or k.dim() < 2:
        return None
    return size_of(q.shape[-2]), size_of(k.shape[-2])


def _unexpanded(mask: fx.Node) -> fx.Node:
    """The mask before it was repeated, which changes nothing that it says and may make it very large."""
    while name_of(mask) == "expand" and isinstance(mask.args[0], fx.Node):
        mask = mask.args[0]
    return mask


def _set(node: fx.Node, place: int, name: str, value: Any) -> None:
    if len(node.args) > place:
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)
