"""Which nodes of an fx graph do more than return a value."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn

from tessera.rewrite.fx_graph import find_effect

from models import Branches


@pytest.mark.parametrize(
    ("call", "effect"),
    [
        (torch.relu_, "writes"),
        (lambda x: nn.functional.relu(x, True), "writes"),
        (lambda x: nn.functional.relu(x, inplace=True), "writes"),
        (torch.rand_like, "random"),
        (lambda x: nn.functional.dropout(x, 0.1, False), None),
        (lambda x: x.item(), "host"),
        (torch.ops.aten.relu_.default, "writes"),
        (torch.ops.aten.bernoulli.default, "random"),
        (torch.ops.aten.relu.default, None),
        (lambda x: x.relu(), None),
        (lambda x: x + 1, None),
        (lambda x: nn.functional.batch_norm(x, x, x, training=True), "writes"),
        (lambda x: nn.functional.batch_norm(x, x, x, training=False), None),
        (lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1), "random"),
        (lambda x: nn.functional.scaled_dot_product_attention(x, x, x), None),
        (lambda x: torch.ops.aten.native_batch_norm.default(x, None, None, x, x, True, 0.1, 1e-5), "writes"),
    ],
)
def test_effects_of_a_node(call, effect):
    def program(x):
        return call(x)

    module = fx.symbolic_trace(program)
    node = [n for n in module.graph.nodes if n.op.startswith("call")][-1]
    assert find_effect(node, module) == effect


def test_operators_that_assign_write():
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(operator.iadd, (x, 1))
    assert find_effect(node, nn.Module()) == "writes"
    assert find_effect(graph.call_function(test_operators_that_assign_write, ()), nn.Module()) == "unknown"


@pytest.mark.parametrize(
    ("layer", "effect"),
    [
        (nn.BatchNorm1d(4), "writes"),
        (nn.BatchNorm1d(4).eval(), None),
        (nn.Dropout(0.2), "random"),
        (nn.Dropout(0.2).eval(), None),
        (nn.ReLU(inplace=True), "writes"),
        (nn.Linear(4, 4), None),
        (Branches(4), "unknown"),
        (nn.Embedding(4, 4, max_norm=1.0), "writes"),
    ],
)
def test_effects_of_a_layer(layer, effect):
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    class Leaves(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, qualified: str) -> bool:
            return True

    outer = Around().train(layer.training)
    graph = Leaves().trace(outer)
    module = fx.GraphModule(outer, graph)
    node = next(n for n in graph.nodes if n.op == "call_module")
    assert find_effect(node, module) == effect
