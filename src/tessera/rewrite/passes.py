"""Our passes over a Dynamo graph, before torch.compile sees it: fused attention, known masks, spectral convolutions.

::

    softmax(q @ k^T [* or / scale] [+ mask | masked_fill | where] [in fp32, cast back]) [dropout] @ v
        ->  scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale, enable_gqa)

Inductor has rules of its own for some of these; `variants.py` measures whether ours save anything beside them. Because
our passes run before autograd, the backward changes too.

When they run eagerly, models of transformers make no mask where `is_causal` is enough; when they are compiled, they
make it (5.17 looks at `is_tracing`, for exported programs; 5.22 no longer does with torch 2.14). Attention then reads a
mask and computes both halves of the scores: compiled GPT-2 small's kernels took 225 and 320 us, 112 and 180 with
`is_causal` (results/compiled_profile.json, dropout.json). Dynamo guards the sizes that a mask was made for, so what
this module finds stays true for the compiled code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import fx

from ..device import Device
from ..graph.flops import attention_params
from ..graph.ir import size_of
from .attention_pattern import AttentionMatch, compute_constant, find_attention, get_argument, name_of, value_of
from .compilation import Replacement
from .eager_ops import EagerOp, list_eager_ops, spec_of
from .inductor import PRIVATE_ERRORS, Pass

_SDPA = "scaled_dot_product_attention"
_MASK, _CAUSAL = 3, 5  # the positions of its arguments
_SPECTRAL_DTYPES = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}


# -- attention -----------------------------------------------------------------------------------------------------


def fuse_attention(module: fx.GraphModule) -> list[Replacement]:
    """Replace every attention that a graph writes out by torch's fused call; a `Pass`."""
    matches = (find_attention(node) for node in list(module.graph.nodes))
    return [_replace_attention(module, match) for match in matches if match is not None]


def _replace_attention(module: fx.GraphModule, match: AttentionMatch) -> Replacement:
    causal = _is_causal(match)
    ungrouped = _find_ungrouped(match) if match.mask is None or causal else None
    k, v = ungrouped or (match.k, match.v)
    train = torch.is_grad_enabled() and any(getattr(value_of(n), "requires_grad", False) for n in (match.q, k, v))
    ops_before = _list_ops_before(match, train)
    graph = module.graph
    with graph.inserting_before(match.out):
        if not match.k_transposed:
            k = graph.call_method("transpose", (k, -2, -1))
            k.meta["example_value"] = value_of(match.k).transpose(-2, -1)
        q, mask = (match.q, None) if causal or match.mask is None else _make_additive_mask(graph, match)
        keywords = {"attn_mask": mask, "dropout_p": match.dropout, "is_causal": causal, "scale": match.scale}
        if ungrouped is not None:
            keywords["enable_gqa"] = True
        call = graph.call_function(F.scaled_dot_product_attention, (q, k, v), keywords)
    call.meta.update(match.out.meta)
    match.out.replace_all_uses_with(call)
    for node in match.nodes:  # the last one first; torch.fx's own clean-up would also remove writes into tensors
        if not node.users:
            graph.erase_node(node)
    how = ["causal"] if causal else ["masked"] if mask is not None else []
    how += ["grouped"] if ungrouped is not None else []
    return Replacement(
        rule="flash_attention",
        before=" + ".join(reversed(match.written)),
        after=f"{_SDPA} ({', '.join(how)})" if how else _SDPA,
        where=_find_module(match.out),
        ops_before=ops_before,
        ops_after=_list_ops_after(match, k, v, causal, mask, train),
    )


def _find_module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]).replace("L['self'].", "") if stack else ""


def _make_additive_mask(graph: fx.Graph, match: AttentionMatch) -> tuple[fx.Node, fx.Node]:
    """Return the queries, and the mask as numbers to add, in the format of the queries."""
    dtype, mask, queries = value_of(match.q).dtype, match.mask, match.q
    assert mask is not None
    if match.fill is None:
        added = mask if value_of(mask).dtype == dtype else graph.call_method("to", (mask, dtype))
    else:
        hidden = graph.call_function(torch.logical_not, (mask,)) if match.keeps else mask
        fill = max(match.fill, torch.finfo(dtype).min)
        if match.fill == float("-inf"):
            fill = match.fill
        elif _may_hide_all_keys(match):
            # A query that sees no key had the same score for every key, and no gradient came back through the scores.
            # If the fill were added to its scores, they would differ. A query of zeros that sees all keys has the same
            # score for each, and no gradient. With the fill added on top, fused backwards would lose log(keys) beside
            # it: weights of 1, not 1/n.
            blind = graph.call_method("all", (hidden, -1), {"keepdim": True})
            queries = graph.call_method("masked_fill", (queries, blind, 0.0))
            hidden = graph.call_method("masked_fill", (hidden, blind, False))
        zeros = graph.call_function(torch.zeros_like, (hidden,), {"dtype": dtype})
        added = graph.call_method("masked_fill", (zeros, hidden, fill))
    if value_of(mask).dim() == 1:  # the fused call takes no mask of one dimension
        added = graph.call_method("unsqueeze", (added, 0))
    return queries, added


def _may_hide_all_keys(match: AttentionMatch) -> bool:
    """Tell whether the mask may hide all keys from a query; a mask made of data may."""
    visible = _read_visible(match)
    return visible is None or not bool(visible.any(-1).all())


def _is_causal(match: AttentionMatch) -> bool:
    """Tell whether the mask is a constant lower triangle: position i sees 0 to i."""
    visible = _read_visible(match)
    keys = value_of(match.k).shape[-2 if match.k_transposed else -1]
    return visible is not None and _is_triangle(visible, size_of(value_of(match.q).shape[-2]), size_of(keys))


def _read_visible(match: AttentionMatch) -> torch.Tensor | None:
    """Return which keys each query sees, if the mask is made of constants."""
    mask = compute_constant(match.mask) if match.mask is not None else None
    if mask is not None and match.fill is not None:
        return mask if match.keeps else ~mask
    return mask == 0 if mask is not None and bool(((mask == 0) | (mask < -1e4)).all()) else None


def _is_triangle(visible: torch.Tensor, queries: int, keys: int) -> bool:
    triangle = torch.ones(queries, keys).tril().bool()
    return tuple(visible.shape[-2:]) == (queries, keys) and bool((visible == triangle).all())


def _find_ungrouped(match: AttentionMatch) -> tuple[fx.Node, fx.Node] | None:
    """Return keys and values before they were repeated for groups of query heads, if both were repeated."""
    if not match.k_transposed:
        return None
    k, v = _find_unrepeated(match.k), _find_unrepeated(match.v)
    if k is None or v is None or value_of(k).shape[1] != value_of(v).shape[1]:
        return None
    return k, v


def _find_unrepeated(node: fx.Node) -> fx.Node | None:
    """Return the x of x.repeat_interleave(n, dim=1), or of x[:, :, None].expand(...).reshape(...)."""
    value = value_of(node)
    if value is None or value.dim() != 4:
        return None
    if name_of(node) == "repeat_interleave" and isinstance(get_argument(node, 1, "repeats", None), int):
        return node.args[0] if get_argument(node, 2, "dim", None) in (1, -3) else None
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
    expected = (*before.shape[:2], 1, *before.shape[2:])
    return source if tuple(after.shape) == expected and before.shape[0] == value.shape[0] else None


def _list_ops_before(match: AttentionMatch, train: bool) -> tuple[EagerOp, ...]:
    """Return what eager torch launches for the attention as written; forward and backward in training."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    order = [node for node in match.out.graph.nodes if node in match.nodes]
    outside = [n for n in dict.fromkeys(i for node in order for i in node.all_input_nodes) if n not in order]
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in outside}
    for node in order:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(copies[match.out])
    program = fx.GraphModule(torch.nn.Module(), graph)

    def run(*inputs: Any) -> Any:
        out = program(*inputs)
        wanted = [x for x in inputs if x.requires_grad]
        return torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True) if train else out

    def make_fake(value: Any) -> Any:
        shape, stride = [size_of(s) for s in value.shape], [size_of(s) for s in value.stride()]
        fake = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
        return fake.requires_grad_(train and value.is_floating_point())

    try:
        with FakeTensorMode(), torch.set_grad_enabled(train):
            ops = list_eager_ops(make_fx(run)(*(make_fake(value_of(n)) for n in outside)).graph)
    except PRIVATE_ERRORS:  # something that is not a tensor, or not traced
        return ()
    turn = next((i for i, op in enumerate(ops) if op.name == "aten.ones_like"), len(ops))  # the gradient that comes in
    return (*ops[:turn], *(replace(op, backward=True) for op in ops[turn + 1 :]))


def _list_ops_after(match: AttentionMatch, k: Any, v: Any, causal: bool, mask: Any, train: bool) -> tuple[EagerOp, ...]:
    """Return the fused call as one kernel forward, and one backward in training."""
    q, key, value = (spec_of(value_of(n)) for n in (match.q, k, v))
    if q is None or key is None or value is None:
        return ()
    params = attention_params(q, key, value, mask, causal, dropout=match.dropout)
    forward = EagerOp(
        name="aten._scaled_dot_product_flash_attention",
        nodes=("fused",),
        params=params,
        reads=(("q", q), ("k", key), ("v", value)),
        writes=(("out", q),),
    )
    if not train:
        return (forward,)
    backward = EagerOp(
        name="aten._scaled_dot_product_flash_attention_backward",
        nodes=("fused_backward",),
        backward=True,
        params={**params, "backward": True},
        reads=(("grad", q), *forward.reads, ("out", q)),
        writes=(("dq", q), ("dk", key), ("dv", value)),
    )
    return forward, backward


# -- masks ---------------------------------------------------------------------------------------------------------


def drop_known_masks(module: fx.GraphModule) -> list[Replacement]:
    """Remove constant masks from attention where `is_causal`, or no mask, computes the same; a `Pass`."""
    replacements, known = [], dict[tuple[fx.Node, int, int], str | None]()
    for node in module.graph.nodes:
        attends = node.op == "call_function" and node.target is F.scaled_dot_product_attention
        mask = get_argument(node, _MASK, "attn_mask", None) if attends else None
        if not isinstance(mask, fx.Node) or get_argument(node, _CAUSAL, "is_causal", False) is not False:
            continue
        try:
            lengths = _read_lengths(node)
            if lengths is None:
                continue
            key = (_find_unexpanded(mask), *lengths)
            if key not in known:
                known[key] = _classify_mask(*key)
        except PRIVATE_ERRORS:  # a size that depends on the data, or a mask inside vmap: leave it
            continue
        if known[key] is None:
            continue
        causal = known[key] == "causal"
        _set_argument(node, _MASK, "attn_mask", None)
        _set_argument(node, _CAUSAL, "is_causal", causal)
        replacement = Replacement(
            rule="known mask",
            before=f"{_SDPA} (masked)",
            after=f"{_SDPA} (causal)" if causal else _SDPA,
            where=str(node),
            why="the mask is made of constants",
        )
        replacements.append(replacement)
    return replacements


def _classify_mask(mask: fx.Node, queries: int, keys: int) -> str | None:
    """Return "none" if every query sees all keys, "causal" if each sees those up to its own, None for other masks."""
    value = compute_constant(mask)
    if value is None or not value.numel():
        return None
    if value.dtype == torch.bool:
        visible = value
    elif value.is_floating_point() and bool(((value == 0) | (value == -torch.inf)).all()):
        visible = value == 0
    else:
        return None
    if bool(visible.all()):
        return "none"
    return "causal" if _is_triangle(visible, queries, keys) else None


def _read_lengths(node: fx.Node) -> tuple[int, int] | None:
    q, k = (value_of(get_argument(node, place, name, None)) for place, name in ((0, "query"), (1, "key")))
    if not isinstance(q, torch.Tensor) or not isinstance(k, torch.Tensor) or q.dim() < 2 or k.dim() < 2:
        return None
    return size_of(q.shape[-2]), size_of(k.shape[-2])


def _find_unexpanded(mask: fx.Node) -> fx.Node:
    """Return the mask before it was expanded, which may make it very large."""
    while name_of(mask) == "expand" and isinstance(mask.args[0], fx.Node):
        mask = mask.args[0]
    return mask


def _set_argument(node: fx.Node, place: int, name: str, value: Any) -> None:
    if len(node.args) > place:
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)


# -- convolutions --------------------------------------------------------------------------------------------------


def make_spectral_pass(device: Device | None) -> Pass:
    """Return a pass that computes conv2d by Fourier transforms where `op.spectral_wins` on this chip, at inference."""

    def run(module: fx.GraphModule) -> list[Replacement]:
        # The model of spectral_wins covers the forward only, so conv2d stays in training.
        if device is None or torch.is_grad_enabled():
            return []
        nodes = [node for node in module.graph.nodes if node.op == "call_function" and node.target is torch.conv2d]
        replacements = [_replace_convolution(module, node, device) for node in nodes]
        return [replacement for replacement in replacements if replacement is not None]

    return run


def _replace_convolution(module: fx.GraphModule, node: fx.Node, device: Device) -> Replacement | None:
    call = _read_convolution(node)
    if call is None:
        return None
    from .. import op

    x, w = (n.meta.get("example_value") for n in (call["input"], call["weight"]))
    if x is None or w is None or x.dim() != 4 or x.dtype not in _SPECTRAL_DTYPES:
        return None
    if not all(isinstance(size, int) for size in (*x.shape, *w.shape)):
        return None  # dynamic sizes: what wins for one may lose for another
    options = {name: call[name] for name in ("padding", "dilation", "groups")}
    verdict = op.spectral_wins(list(x.shape), list(w.shape), on=device, dtype=_SPECTRAL_DTYPES[x.dtype], **options)
    if not verdict:
        return None
    with module.graph.inserting_before(node):
        new = module.graph.call_function(op.spectral_conv2d, (call["input"], call["weight"], call["bias"]), options)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    module.graph.erase_node(node)
    return Replacement(
        rule="spectral_conv",
        before=f"conv2d of a {w.shape[-2]}x{w.shape[-1]} kernel",
        after="fft, product, ifft",
        saved_s=verdict.direct_s - verdict.spectral_s,
        saved_j=verdict.direct_j - verdict.spectral_j,
        why=verdict.reason,
    )


def _read_convolution(node: fx.Node) -> dict[str, Any] | None:
    """Return conv2d's arguments by name if transforms can compute it: stride 1, padding in numbers."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    call: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    call.update(zip(names, node.args, strict=False))
    call.update(node.kwargs)
    pairs = {name: _to_pair(call[name]) for name in ("stride", "padding", "dilation")}
    if pairs["stride"] != (1, 1) or None in pairs.values() or not isinstance(call["groups"], int):
        return None
    return {**call, **pairs}


def _to_pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int):
        return value, value
    if isinstance(value, (tuple, list)) and len(value) in (1, 2) and all(isinstance(v, int) for v in value):
        return int(value[0]), int(value[-1])
    return None
