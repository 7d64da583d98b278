"""Attention as people write it, recognised in a Dynamo graph: from the product with v back to that of q and k."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from .pieces import size_of

MATMUL = frozenset({"matmul", "bmm", "__matmul__"})
_CAST = frozenset({"to", "float", "half", "bfloat16", "type", "type_as", "_to_copy"})
_SAME = frozenset({"contiguous", "clone"})
_CONSTANT_MASK = 4096 * 4096  # elements of a mask we compute to look at it
STRANGE = (AttributeError, KeyError, IndexError, TypeError, ValueError, NotImplementedError, RuntimeError,
           AssertionError)  # fmt: skip
"""What tracing a piece of somebody's program may raise; it then stays as it is."""


@dataclass(frozen=True, slots=True)
class Attention:
    """A match: the nodes that go in, what is done to the scores, and the nodes that are replaced."""

    out: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    k_transposed: bool = True
    scale: float = 1.0
    mask: fx.Node | None = None
    fill: float | None = None  # the mask says where scores are set to this
    keeps: bool = False  # ... or where they are kept
    dropout: float = 0.0
    nodes: tuple[fx.Node, ...] = ()
    written: tuple[str, ...] = ()


def name_of(node: Any) -> str:
    """What a node calls, whether as a function, an operator or a method."""
    if not isinstance(node, fx.Node):
        return ""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    return str(getattr(node.target, "__name__", "")).rstrip("_")


def value_of(node: Any) -> Any:
    """The fake tensor Dynamo traced a node with."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def find(out: fx.Node) -> Attention | None:
    """The attention that ends in this product, if it is one."""
    if name_of(out) not in MATMUL or len(out.args) != 2:
        return None
    weights, v = out.args
    step = _after_softmax(weights)
    if step is None or not isinstance(v, fx.Node):
        return None
    softmax, dropout, nodes, written = step
    begun = Attention(out, out, out, v, dropout=dropout, nodes=(out, *nodes), written=("matmul", *written))
    found = _before_softmax(softmax.args[0] if softmax.args else softmax.kwargs.get("input"), begun)
    if found is None or not _fits(found):
        return None
    return found


def _after_softmax(node: Any) -> tuple[fx.Node, float, tuple[fx.Node, ...], tuple[str, ...]] | None:
    """From the product with v back to the softmax: casts and a dropout may lie between."""
    dropout, nodes, written = 0.0, list[fx.Node](), list[str]()
    while isinstance(node, fx.Node) and len(node.users) == 1:
        name = name_of(node)
        nodes.append(node)
        if name == "softmax":
            return (node, dropout, tuple(nodes), (*written, "softmax")) if _over_last(node) else None
        if name == "dropout":
            p = argument(node, 1, "p", 0.5)
            training = argument(node, 2, "training", True)
            if not isinstance(p, float | int) or not isinstance(training, bool):
                return None
            dropout = float(p) if training else 0.0
        elif name not in _CAST | _SAME:
            return None
        written.append(name)
        node = node.args[0]
    return None


def argument(node: fx.Node, place: int, name: str, default: Any) -> Any:
    """An argument of a call, given by place or by name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _over_last(softmax: fx.Node) -> bool:
    value, dim = value_of(softmax), argument(softmax, 1, "dim", None)
    return value is not None and dim in (-1, value.dim() - 1)


def _before_softmax(node: Any, match: Attention) -> Attention | None:
    """From the softmax back to the product of q and k: a scale, then at most one mask on top of it."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        name = name_of(node)
        match = replace(match, nodes=(*match.nodes, node), written=(*match.written, name))
        if name in MATMUL and len(node.args) == 2:
            return _keys(node, match)
        step = _step(name, node, match)
        if step is None:
            return None
        node, match = step
    return None


def _step(name: str, node: fx.Node, match: Attention) -> tuple[Any, Attention] | None:
    """One operation on the scores, and the node before it; None for one we do not know."""
    args = node.args
    if name in _CAST | _SAME:
        return args[0], match
    if name in ("mul", "truediv", "div") and len(args) == 2 and isinstance(args[1], float | int):
        if name != "mul" and args[1] == 0:
            return None
        return args[0], replace(match, scale=match.scale * (args[1] if name == "mul" else 1.0 / args[1]))
    # Walking back, the mask comes first: one that is scaled after it was put on is not the same.
    if match.mask is not None or match.scale != 1.0:
        return None
    if name in ("add", "iadd") and len(args) == 2 and isinstance(args[0], fx.Node) and isinstance(args[1], fx.Node):
        scores, mask = (args[0], args[1]) if _is_scores(args[0]) else (args[1], args[0])
        return scores, replace(match, mask=mask)
    if name == "masked_fill" and len(args) == 3:
        return _filled(args[0], args[1], args[2], match, keeps=False)
    if name == "where" and len(args) == 3:
        return _filled(args[1], args[0], args[2], match, keeps=True)
    return None


def _filled(scores: Any, mask: Any, fill: Any, match: Attention, *, keeps: bool) -> tuple[Any, Attention] | None:
    if isinstance(fill, fx.Node):  # torch.full([], -inf), torch.tensor(-inf)
        value = constant(fill)
        fill = value.item() if value is not None and value.numel() == 1 else None
    # Anything that is not far below every score is no mask but a value of its own.
    if not isinstance(fill, float | int) or fill > -1e4 or not isinstance(mask, fx.Node):
        return None
    return scores, replace(match, mask=mask, fill=float(fill), keeps=keeps)


def _is_scores(node: Any) -> bool:
    """Whether the scores come from this side of an addition: it leads to a product within a few nodes."""
    for _ in range(4):
        if not isinstance(node, fx.Node):
            return False
        if name_of(node) in MATMUL:
            return True
        if name_of(node) not in _CAST | _SAME | {"mul", "truediv", "div"}:
            return False
        node = node.args[0]
    return False


def _keys(product: fx.Node, match: Attention) -> Attention | None:
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


def _fits(match: Attention) -> bool:
    """Shapes and formats that the fused call takes."""
    q, k, v = (value_of(n) for n in (match.q, match.k, match.v))
    if any(t is None for t in (q, k, v)) or not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        return False
    if q.dim() not in (3, 4) or not q.dim() == k.dim() == v.dim() or q.shape[:-2] != v.shape[:-2]:
        return False
    out = value_of(match.out)  # a mask may have made it larger than queries and keys did
    if match.scale <= 0 or out is None or tuple(out.shape) != (*q.shape[:-1], v.shape[-1]):
        return False  # with such a scale and is_causal torch 2.13 gives NaNs on a CPU
    mask = value_of(match.mask) if match.mask is not None else None
    if match.mask is None or mask is None:
        return match.mask is None
    return mask.dim() > 0 and (match.fill is None or mask.dtype == torch.bool)


def constant(node: fx.Node) -> torch.Tensor | None:
    """The value of a node that depends on constants alone, computed on the CPU; None where that is not certain.

    Writes into tensors (`mask[:, 0] = False`) have no user, so they are not among what a node depends on: Dynamo's fake
    tensors counted them. What chance or unwritten memory decides is no constant either.
    """
    needed, stack = set[fx.Node](), [node]
    while stack:
        here = stack.pop()
        if here.op in ("placeholder", "get_attr") or len(needed) > 32:
            return None
        if here not in needed:
            needed.add(here)
            stack += here.all_input_nodes
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    try:
        if not all(_plain(here) for here in needed):
            return None
        for here in node.graph.nodes:
            if here in needed:
                made[here] = graph.node_copy(here, lambda n: made[n])
                if "device" in made[here].kwargs:
                    made[here].kwargs = {**made[here].kwargs, "device": "cpu"}
        graph.output(made[node])
        found = _computed(graph)
    except (ImportError, *STRANGE):
        return None
    return found.cpu() if isinstance(found, torch.Tensor) else None


def _plain(node: fx.Node) -> bool:
    """Whether a node's value is no larger than a mask may be, and nobody writes into it."""
    value = value_of(node)
    if any(name_of(user) == "_get_data_attr" for user in node.users):  # what is written through .data is not counted
        return False
    if not isinstance(value, torch.Tensor):
        return True
    if value.is_inference():  # such tensors do not count what is written into them
        return False
    return prod(size_of(s) for s in value.shape) <= _CONSTANT_MASK and value._version == 0


def _computed(graph: fx.Graph) -> Any:
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode

    class Certain(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if torch.Tag.nondeterministic_seeded in func.tags or "empty" in str(func):
                raise RuntimeError(f"{func} is no constant")
            return func(*args, **(kwargs or {}))

    with unset_fake_temporarily(), Certain():
        return fx.GraphModule(torch.nn.Module(), graph).forward()
