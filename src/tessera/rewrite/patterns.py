"""Attention that Inductor has no rule for, replaced by one call before torch.compile sees it.

::

    softmax(q @ k^T [* or / scale] [+ mask | masked_fill | where] [in fp32, cast back]) [dropout] @ v
        ->  scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale, enable_gqa)

Whether Inductor has a rule is not guessed: the piece is traced alone and given to Inductor's own passes. They are asked
about inference; their rules for training are made from the same patterns. Rewriting before autograd gives the backward
too. A mask made of constants alone is computed, and becomes `is_causal` where it is a lower triangle.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import fx

from .alone import alone, inductor_has_a_rule, pieces_after, pieces_before
from .attention import Attention, argument, constant, find, name_of, value_of
from .pieces import size_of
from .watch import Found


def attention(module: fx.GraphModule, *, ask: bool = True) -> list[Found]:
    """Replace every attention Inductor has no rule for (every one where it is not asked); a `Pass`.

    What is left to Inductor is in the result too, so that it can be seen whether it kept its promise.
    """
    found = []
    for node in list(module.graph.nodes):
        match = find(node)
        if match is None:
            continue
        piece = alone(match)
        # No rule of Inductor's leaves out the copies of keys and values that grouped heads share.
        if ask and piece is not None and _grouped(match) is None and inductor_has_a_rule(*piece):
            found.append(Found(rule="flash_attention", by="inductor", before=" + ".join(reversed(match.written)),
                               after="scaled_dot_product_attention"))  # fmt: skip
        else:
            found.append(_replace(module, match, piece))
    return found


def _replace(module: fx.GraphModule, match: Attention, piece: tuple[fx.GraphModule, list[Any]] | None) -> Found:
    before = " + ".join(reversed(match.written))
    causal = _is_causal(match)
    gqa = _grouped(match) if match.mask is None or causal else None
    k, v = gqa or (match.k, match.v)
    train = torch.is_grad_enabled() and any(getattr(value_of(n), "requires_grad", False) for n in (match.q, k, v))
    was = pieces_before(piece, train) if piece is not None else ()
    graph = module.graph
    with graph.inserting_before(match.out):
        if not match.k_transposed:
            k = graph.call_method("transpose", (k, -2, -1))
            k.meta["example_value"] = value_of(match.k).transpose(-2, -1)
        q, mask = (match.q, None) if causal or match.mask is None else _masked(graph, match)
        keywords = {"attn_mask": mask, "dropout_p": match.dropout, "is_causal": causal, "scale": match.scale}
        if gqa is not None:
            keywords["enable_gqa"] = True
        call = graph.call_function(F.scaled_dot_product_attention, (q, k, v), keywords)
    call.meta.update(match.out.meta)
    match.out.replace_all_uses_with(call)
    for node in match.nodes:  # the last one first; torch.fx's own clean-up would take writes into tensors away too
        if not node.users:
            graph.erase_node(node)
    how = ["causal"] if causal else ["masked"] if mask is not None else []
    how += ["grouped"] if gqa is not None else []
    return Found(
        rule="flash_attention", before=before, where=_where(match.out), pieces_before=was,
        after=f"scaled_dot_product_attention{' (' + ', '.join(how) + ')' if how else ''}",
        pieces_after=pieces_after(match, k, v, causal, mask, train), why="Inductor has no rule for it",
    )  # fmt: skip


def _where(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]).replace("L['self'].", "") if stack else ""


def _masked(graph: fx.Graph, match: Attention) -> tuple[fx.Node, fx.Node]:
    """The queries, and the mask as numbers to add in their format."""
    dtype, mask, queries = value_of(match.q).dtype, match.mask, match.q
    assert mask is not None
    if match.fill is None:
        added = mask if value_of(mask).dtype == dtype else graph.call_method("to", (mask, dtype))
    else:
        hidden = graph.call_function(torch.logical_not, (mask,)) if match.keeps else mask
        fill = max(match.fill, torch.finfo(dtype).min)
        if match.fill == float("-inf"):
            fill = match.fill
        elif _may_hide_all(match):
            # A query that sees no key had the same score for each, and no gradient came back through them. Added to
            # its scores the fill would leave them apart; a query of zeros that sees all has the same for each, and no
            # gradient. With the fill on top of those, fused backwards lose log(keys) beside it: weights of 1, not 1/n.
            blind = graph.call_method("all", (hidden, -1), {"keepdim": True})
            queries = graph.call_method("masked_fill", (queries, blind, 0.0))
            hidden = graph.call_method("masked_fill", (hidden, blind, False))
        zeros = graph.call_function(torch.zeros_like, (hidden,), {"dtype": dtype})
        added = graph.call_method("masked_fill", (zeros, hidden, fill))
    if value_of(mask).dim() == 1:  # the fused call takes none of one dimension
        added = graph.call_method("unsqueeze", (added, 0))
    return queries, added


def _may_hide_all(match: Attention) -> bool:
    """Whether the mask may leave a query no key: one made of data may."""
    assert match.mask is not None
    mask = constant(match.mask)
    if mask is None:
        return True
    hidden = ~mask if match.keeps else mask
    return bool(hidden.all(-1).any())


def _is_causal(match: Attention) -> bool:
    """Whether the mask is a constant lower triangle: position i sees 0 to i."""
    if match.mask is None:
        return False
    mask = constant(match.mask)
    if mask is None or mask.dim() < 2 or mask.numel() != mask.shape[-1] * mask.shape[-2]:
        return False
    mask = mask.reshape(mask.shape[-2:])
    if match.fill is not None:
        seen = mask if match.keeps else ~mask
    elif bool(((mask == 0) | (mask < -1e4)).all()):
        seen = mask == 0
    else:
        return False
    keys = value_of(match.k).shape[-2 if match.k_transposed else -1]
    square = size_of(value_of(match.q).shape[-2]), size_of(keys)
    return tuple(seen.shape) == square and bool(torch.equal(seen, torch.ones_like(seen).tril()))


def _grouped(match: Attention) -> tuple[fx.Node, fx.Node] | None:
    """Keys and values before they were repeated for groups of query heads, if both were."""
    if not match.k_transposed:
        return None
    k, v = _unrepeated(match.k), _unrepeated(match.v)
    if k is None or v is None or value_of(k).shape[1] != value_of(v).shape[1]:
        return None
    return k, v


def _unrepeated(node: fx.Node) -> fx.Node | None:
    """The x of x.repeat_interleave(n, dim=1), or of x[:, :, None].expand(...).reshape(...)."""
    value = value_of(node)
    if value is None or value.dim() != 4:
        return None
    if name_of(node) == "repeat_interleave" and isinstance(argument(node, 1, "repeats", None), int):
        return node.args[0] if argument(node, 2, "dim", None) in (1, -3) else None
    if name_of(node) not in ("reshape", "view", "flatten"):
        return None
    expand = node.args[0]
    if name_of(expand) != "expand" or not isinstance(expand, fx.Node) or not isinstance(expand.args[0], fx.Node):
        return None
    inserted = expand.args[0]
    source = inserted.args[0] if name_of(inserted) in ("getitem", "unsqueeze") else None
    before, after = value_of(source), value_of(inserted)
    if before is None or after is None or before.dim() != 4:
        return None
    wanted = (*before.shape[:2], 1, *before.shape[2:])
    return source if tuple(after.shape) == wanted and before.shape[0] == value.shape[0] else None
