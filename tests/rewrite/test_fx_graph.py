"""Which nodes of an fx graph may write into a tensor that others read."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn

from tessera.rewrite.fx_graph import may_write

from models import Branches

F = nn.functional


@pytest.mark.parametrize(
    ("call", "writes"),
    [
        (torch.relu_, True),
        (lambda x: F.relu(x, True), True),
        (lambda x: F.relu(x, inplace=True), True),
        (lambda x: torch.add(x, x, out=x), True),
        (lambda x: x.relu_(), True),
        (torch.ops.aten.relu_.default, True),
        (torch.ops.aten.relu.default, False),
        (lambda x: F.relu(x, False), False),
        (lambda x: x.relu(), False),
        (lambda x: x + 1, False),
        (lambda x: torch.cat([x, x]), False),
    ],
)
def test_functions_that_write(call, writes):
    module = fx.symbolic_trace(lambda x: call(x))  # noqa: PLW0108 - a builtin cannot be traced
    node = [n for n in module.graph.nodes if n.op.startswith("call")][-1]
    assert may_write(node, module) == writes


def test_operators_that_assign_write():
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert may_write(graph.call_function(operator.iadd, (x, 1)), nn.Module())
    assert may_write(graph.call_function(test_operators_that_assign_write, ()), nn.Module()), "an unknown function may"
    assert not may_write(x, nn.Module())


@pytest.mark.parametrize(
    ("layer", "writes"),
    [
        (nn.BatchNorm1d(4).eval(), False),
        (nn.Dropout(0.2).eval(), False),
        (nn.ReLU(inplace=True), True),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), True),
        (nn.Linear(4, 4), False),
        (Branches(4), True),
    ],
)
def test_layers_that_write(layer, writes):
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    class Leaves(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, qualified: str) -> bool:
            return True

    outer = Around()
    graph = Leaves().trace(outer)
    node = next(n for n in graph.nodes if n.op == "call_module")
    assert may_write(node, fx.GraphModule(outer, graph)) == writes
