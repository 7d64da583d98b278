"""A matched piece as a program of its own: asked about at Inductor, and priced before and after."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .attention import MATMUL, STRANGE, Attention, name_of, value_of
from .pieces import Piece, pieces_of, size_of, tensor_of


def alone(match: Attention) -> tuple[fx.GraphModule, list[Any]] | None:
    """The matched nodes as a program of their own, and fake inputs for it; None where something is not traced."""
    inside, graph = set(match.nodes), fx.Graph()
    edge = [n for p in match.nodes if name_of(p) in MATMUL for n in p.all_input_nodes if n not in inside]
    while edge:  # Inductor's rules begin before the heads are transposed
        node = edge.pop()
        if name_of(node) in ("transpose", "permute", "swapaxes"):
            inside.add(node)
            edge += node.all_input_nodes
    made: dict[fx.Node, fx.Node] = {}
    order = [n for n in match.out.graph.nodes if n in inside]
    outside = [n for n in dict.fromkeys(i for node in order for i in node.all_input_nodes) if n not in inside]
    values = [value_of(n) for n in outside]
    if any(not isinstance(v, torch.Tensor) for v in values):
        return None
    for node in outside:
        made[node] = graph.placeholder(node.name)
    for node in order:
        made[node] = graph.node_copy(node, lambda n: made[n])
    graph.output(made[match.out])
    return fx.GraphModule(torch.nn.Module(), graph), values


def inductor_has_a_rule(program: fx.GraphModule, values: list[Any]) -> bool:
    """Whether Inductor's passes turn the piece into a fused attention; False too where they cannot be asked."""
    try:
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes

        traced = _traced(program, values, select_decomp_table())
        joint_graph_passes(traced)
        return any("scaled_dot_product" in str(n.target) for n in traced.graph.nodes)
    except (ImportError, *STRANGE):
        return False


def _traced(program: Any, values: list[Any], table: Any = None, *, backward: bool = False) -> Any:
    """A program as an aten graph, on fake tensors like those it was traced with."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def both(*given: Any) -> Any:
        out = program(*given)
        wanted = [g for g in given if g.is_floating_point()]
        return torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)

    with FakeTensorMode(), torch.set_grad_enabled(backward):
        fakes = [torch.empty_strided([size_of(s) for s in v.shape], [size_of(s) for s in v.stride()], dtype=v.dtype,
                                     device=v.device).requires_grad_(backward and v.is_floating_point())
                 for v in values]  # fmt: skip
        return make_fx(both if backward else program, decomposition_table=table)(*fakes)


def pieces_before(piece: tuple[fx.GraphModule, list[Any]], train: bool) -> tuple[Piece, ...]:
    """What eager torch launches for the piece as written; forward and backward in training."""
    try:
        return tuple(pieces_of(_traced(*piece, backward=train).graph))
    except STRANGE:
        return ()


def pieces_after(match: Attention, k: Any, v: Any, causal: bool, mask: Any, train: bool) -> tuple[Piece, ...]:
    """The fused call as one kernel forward, and one backward in training."""
    q, key, value = (tensor_of(value_of(n)) for n in (match.q, k, v))
    if q is None or key is None or value is None:
        return ()
    batch, heads, q_len, head_dim = (*(1,) * (4 - len(q.shape)), *q.shape)
    params = {
        "batch": batch, "heads": heads, "kv_heads": key.shape[-3], "q_len": q_len, "kv_len": key.shape[-2],
        "head_dim": head_dim, "v_dim": value.shape[-1], "causal": causal, "mask": mask is not None,
        "backward": False, "dropout": match.dropout,
    }  # fmt: skip
    forward = Piece(
        name="aten._scaled_dot_product_flash_attention", nodes=("fused",), params=params,
        reads=(("q", q), ("k", key), ("v", value)), writes=(("out", q),),
    )  # fmt: skip
    if not train:
        return (forward,)
    backward = Piece(
        name="aten._scaled_dot_product_flash_attention_backward", nodes=("fused_backward",), backward=True,
        params={**params, "backward": True}, reads=(("grad", q), ("q", q), ("k", key), ("v", value), ("out", q)),
        writes=(("dq", q), ("dk", key), ("dv", value)),
    )  # fmt: skip
    return forward, backward
