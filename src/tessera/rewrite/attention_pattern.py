"""Recognise attention as people write it in a Dynamo graph: from the product with v back to that of q and k."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from ..graph.ir import size_of
from .inductor import PRIVATE_ERRORS

MATMUL = frozenset({"matmul", "bmm", "__matmul__"})
_CAST = frozenset({"to", "float", "half", "bfloat16", "type", "type_as", "_to_copy"})
_SAME = frozenset({"contiguous", "clone"})
_CONSTANT_MASK = 4096 * 4096  # largest number of elements of a mask that is computed to look at it


@dataclass(frozen=True, slots=True)
class AttentionMatch:
    """The nodes of an attention: its inputs, what is done to the scores, and the nodes that are replaced.

    With `fill`, the mask tells where scores are set to that value, or with `keeps` where they are not.
    """

    out: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    k_transposed: bool = True
    scale: float = 1.0
    mask: fx.Node | None = None
    fill: float | None = None
    keeps: bool = False
    dropout: float = 0.0
    nodes: tuple[fx.Node, ...] = ()
    written: tuple[str, ...] = ()


def name_of(node: Any) -> str:
    """Return what a node calls, whether as a function, an operator or a method."""
    if not isinstance(node, fx.Node):
        return ""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    return str(getattr(node.target, "__name__", "")).rstrip("_")


def value_of(node: Any) -> Any:
    """Return the fake tensor Dynamo traced a node with."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def find_attention(out: fx.Node) -> AttentionMatch | None:
    """Return the attention that ends in this product, if it is one: go back from v to the softmax, then to q and k."""
    if name_of(out) not in MATMUL or len(out.args) != 2 or not isinstance(out.args[1], fx.Node):
        return None
    match = AttentionMatch(out, out, out, out.args[1], nodes=(out,), written=("matmul",))
    node: Any = out.args[0]
    match_step = _match_weights
    while isinstance(node, fx.Node) and len(node.users) == 1:
        name = name_of(node)
        match = replace(match, nodes=(*match.nodes, node), written=(*match.written, name))
        if match_step is _match_weights and name == "softmax":
            if not _is_over_last(node):
                return None
            match_step = _match_scores
            node = node.args[0] if node.args else node.kwargs.get("input")
            continue
        if match_step is _match_scores and name in MATMUL and len(node.args) == 2:
            whole = _match_keys(node, match)
            return whole if whole is not None and _is_supported(whole) else None
        step = match_step(name, node, match)
        if step is None:
            return None
        node, match = step
    return None


def get_argument(node: fx.Node, place: int, name: str, default: Any) -> Any:
    """Return an argument of a call, passed by place or by name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _is_over_last(softmax: fx.Node) -> bool:
    value, dim = value_of(softmax), get_argument(softmax, 1, "dim", None)
    return value is not None and dim in (-1, value.dim() - 1)


def _match_weights(name: str, node: fx.Node, match: AttentionMatch) -> tuple[Any, AttentionMatch] | None:
    """Match one operation on the weights, a cast or a dropout, and return the node before it; None for another."""
    if name in _CAST | _SAME:
        return node.args[0], match
    p, training = get_argument(node, 1, "p", 0.5), get_argument(node, 2, "training", True)
    if name != "dropout" or not isinstance(p, float | int) or not isinstance(training, bool):
        return None
    return node.args[0], replace(match, dropout=float(p) if training else 0.0)


def _match_scores(name: str, node: fx.Node, match: AttentionMatch) -> tuple[Any, AttentionMatch] | None:
    """Match one operation on the scores: at most one mask, and before it a scale."""
    args = node.args
    if name in _CAST | _SAME:
        return args[0], match
    if name in ("mul", "truediv", "div") and len(args) == 2 and isinstance(args[1], float | int):
        if name != "mul" and args[1] == 0:
            return None
        return args[0], replace(match, scale=match.scale * (args[1] if name == "mul" else 1.0 / args[1]))
    # Walking back, the mask comes before the scale: if the scores were scaled after masking, the result is not the
    # same.
    if match.mask is not None or match.scale != 1.0:
        return None
    if name in ("add", "iadd") and len(args) == 2 and isinstance(args[0], fx.Node) and isinstance(args[1], fx.Node):
        scores, mask = (args[0], args[1]) if _is_scores(args[0]) else (args[1], args[0])
        return scores, replace(match, mask=mask)
    if name == "masked_fill" and len(args) == 3:
        return _match_fill(args[0], args[1], args[2], match, keeps=False)
    if name == "where" and len(args) == 3:
        return _match_fill(args[1], args[0], args[2], match, keeps=True)
    return None


def _match_fill(
    scores: Any, mask: Any, fill: Any, match: AttentionMatch, *, keeps: bool
) -> tuple[Any, AttentionMatch] | None:
    if isinstance(fill, fx.Node):  # torch.full([], -inf), torch.tensor(-inf)
        value = compute_constant(fill)
        fill = value.item() if value is not None and value.numel() == 1 else None
    # A value that is not far below every score is a value of its own, not a mask.
    if not isinstance(fill, float | int) or fill > -1e4 or not isinstance(mask, fx.Node):
        return None
    return scores, replace(match, mask=mask, fill=float(fill), keeps=keeps)


def _is_scores(node: Any) -> bool:
    """Tell whether the scores come from this side of an addition, which then leads to a product within a few nodes."""
    for _ in range(4):
        if not isinstance(node, fx.Node):
            return False
        if name_of(node) in MATMUL:
            return True
        if name_of(node) not in _CAST | _SAME | {"mul", "truediv", "div"}:
            return False
        node = node.args[0]
    return False


def _match_keys(product: fx.Node, match: AttentionMatch) -> AttentionMatch | None:
    q, kt = product.args
    if not isinstance(q, fx.Node) or not isinstance(kt, fx.Node):
        return None
    value = value_of(kt)
    if value is None:
        return None
    last = value.dim() - 1
    dims = {d % value.dim() for d in kt.args[1:] if isinstance(d, int)}
    if name_of(kt) in ("transpose", "swapaxes") and dims == {last, last - 1} and isinstance(kt.args[0], fx.Node):
        return replace(match, q=q, k=kt.args[0])
    return replace(match, q=q, k=kt, k_transposed=False)


def _is_supported(match: AttentionMatch) -> bool:
    """Tell whether the fused call takes these shapes and formats."""
    q, k, v = (value_of(n) for n in (match.q, match.k, match.v))
    if any(t is None for t in (q, k, v)) or not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        return False
    if q.dim() not in (3, 4) or not q.dim() == k.dim() == v.dim() or q.shape[:-2] != v.shape[:-2]:
        return False
    out = value_of(match.out)  # broadcasting a mask may have made it larger than queries and keys do
    if match.scale <= 0 or out is None or tuple(out.shape) != (*q.shape[:-1], v.shape[-1]):
        return False  # with such a scale and is_causal torch 2.13 gives NaNs on a CPU
    mask = value_of(match.mask) if match.mask is not None else None
    if match.mask is None or mask is None:
        return match.mask is None
    return mask.dim() > 0 and (match.fill is None or mask.dtype == torch.bool)


def compute_constant(node: fx.Node) -> torch.Tensor | None:
    """Compute a node that depends only on constants, on the CPU; None where that is not certain.

    Dynamo's graph does not show writes into a tensor (`mask[:, 0] = False`) as users of the node; the version of its
    fake tensor does. Random numbers and uninitialised memory are not constants.
    """
    needed, stack = set[fx.Node](), [node]
    while stack:
        here = stack.pop()
        if here.op in ("placeholder", "get_attr") or len(needed) > 32:
            return None
        if here not in needed:
            needed.add(here)
            stack += here.all_input_nodes
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    try:
        if not all(_is_unwritten(here) for here in needed):
            return None
        for here in node.graph.nodes:
            if here in needed:
                copies[here] = graph.node_copy(here, lambda n: copies[n])
                if "device" in copies[here].kwargs:
                    copies[here].kwargs = {**copies[here].kwargs, "device": "cpu"}
        graph.output(copies[node])
        value = _run_certain(graph)
    except (ImportError, *PRIVATE_ERRORS):
        return None
    return value.cpu() if isinstance(value, torch.Tensor) else None


def _is_unwritten(node: fx.Node) -> bool:
    """Tell whether a node's value is no larger than a mask may be, and nothing writes into it."""
    value = value_of(node)
    if any(name_of(user) == "_get_data_attr" for user in node.users):  # writes through .data are not counted
        return False
    if not isinstance(value, torch.Tensor):
        return True
    if value.is_inference():  # such tensors do not count writes
        return False
    return prod(size_of(s) for s in value.shape) <= _CONSTANT_MASK and value._version == 0


def _run_certain(graph: fx.Graph) -> Any:
    """Run a graph, but raise for random numbers and uninitialised memory."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode

    class Certain(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if torch.Tag.nondeterministic_seeded in func.tags or "empty" in str(func):
                raise RuntimeError(f"{func} is not a constant")
            return func(*args, **(kwargs or {}))

    with unset_fake_temporarily(), Certain():
        return fx.GraphModule(torch.nn.Module(), graph).forward()
