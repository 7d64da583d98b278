"""Programs cut into subgraphs: one per launch or fx node, or fused as a compiler would, with true dependencies."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.passes.shape_prop import ShapeProp

from tessera.errors import ArgumentError
from tessera.graph.capture import capture
from tessera.graph.partition import GraphPartitioner, PartitionReport

from models import Block, Branches, Residual, Words, hugging_face, mlp, vision

IMAGE = (2, 3, 16, 16)


def traced(model: nn.Module) -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(model)


def pieces(model: nn.Module, *shape: int, fusion: bool = False) -> PartitionReport:
    return GraphPartitioner(fusion=fusion).partition(capture(model, torch.randn(*shape)))


def names(report: PartitionReport) -> list[str]:
    return [s.name for s in report.subgraphs]


# -- unfused ----------------------------------------------------------------------------------------------------


def test_one_subgraph_for_each_node_that_launches() -> None:
    report = GraphPartitioner().partition(traced(Residual()), inputs=torch.randn(*IMAGE))
    assert " ".join(names(report)) == "stem bn0 relu conv1 bn1 relu_1 conv2 bn2 add relu_2 pool head"
    assert not report.fused and report.graph.mode == "infer"


def test_fx_export_and_capture_agree() -> None:
    model, x = Residual().eval(), torch.randn(*IMAGE)
    own = GraphPartitioner().partition(capture(model, x))
    for program in (traced(model), torch.export.export(model, (x,))):
        other = GraphPartitioner().partition(program, inputs=x if isinstance(program, nn.Module) else None)
        assert [s.kind for s in other.subgraphs] == [s.kind for s in own.subgraphs]
        assert (other.total_flops, other.total_bytes) == (own.total_flops, own.total_bytes)
        assert [s.depends_on for s in other.subgraphs] == [s.depends_on for s in own.subgraphs]


def test_exported_attention_is_one_kernel() -> None:
    model, x = Block().eval(), torch.randn(2, 8, 64)
    report = GraphPartitioner().partition(torch.export.export(model, (x,)))
    assert [s.kind for s in report.subgraphs].count("attention") == 1
    assert report.total_flops == GraphPartitioner().partition(capture(model, x)).total_flops


def test_shapes_from_shape_prop() -> None:
    graph = traced(Residual().eval())
    ShapeProp(graph).propagate(torch.randn(*IMAGE))
    assert len(GraphPartitioner().partition(graph)) == 12


def test_shapes_must_be_known() -> None:
    with pytest.raises(ArgumentError, match="'x' is not known") as caught:
        GraphPartitioner().partition(traced(Residual()))
    assert "inputs=" in str(caught.value.fix)


class TwoInputs(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y


def test_inputs_by_name_and_missing_ones() -> None:
    graph = traced(TwoInputs())
    given_by_name = {"y": torch.randn(4, 8), "x": torch.randn(2, 4)}
    assert GraphPartitioner().partition(graph, inputs=given_by_name).total_flops == 2 * 2 * 4 * 8
    with pytest.raises(ArgumentError, match="'y' of the graph is missing"):
        GraphPartitioner().partition(graph, inputs=torch.randn(2, 4))


@pytest.mark.parametrize("wrong", [3, "resnet18", [1], object()])
def test_what_is_no_program(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="cannot partition"):
        GraphPartitioner().partition(wrong)


def test_the_graph_module_is_left_as_it_was() -> None:
    graph = traced(Residual())
    weight, x = graph.stem.weight, torch.randn(*IMAGE)
    GraphPartitioner().partition(graph, inputs=x)
    assert graph.training and graph.stem.weight is weight and "forward" not in graph.__dict__
    assert graph.eval()(x).shape == (2, 10)


def test_bytes_by_category() -> None:
    report = pieces(mlp(32, 64), 8, 32)
    (linear,) = report.subgraphs
    assert linear.input_bytes == 8 * 32 * 4
    assert linear.weight_bytes == (32 * 64 + 64) * 4
    assert linear.output_bytes == 8 * 64 * 4
    assert linear.arithmetic_intensity == pytest.approx(2 * 8 * 32 * 64 / linear.total_bytes)
    assert linear.parallelism == 8 * 64


def test_a_table_is_read_by_the_row() -> None:
    report = GraphPartitioner().partition(capture(Words(), torch.randint(0, 50_000, (4, 8))))
    assert report.subgraphs[0].kind == "gather"
    assert report.subgraphs[0].weight_bytes == 4 * 8 * 32 * 4


def test_json() -> None:
    report = pieces(Residual(), *IMAGE)
    loaded = json.loads(report.to_json())
    assert loaded["total_bytes"] == report.total_bytes
    assert loaded["subgraphs"][0]["name"] == report.subgraphs[0].name


def test_names_of_captured_operators_are_unique() -> None:
    report = pieces(Block(), 2, 8, 64)
    assert len(set(names(report))) == len(report)


# -- dependencies -----------------------------------------------------------------------------------------------


def test_dependencies_follow_the_data() -> None:
    report = GraphPartitioner().partition(traced(Branches()), inputs=torch.randn(4, 64))
    by_name = {s.name: s for s in report.subgraphs}
    assert by_name["a"].depends_on == by_name["b"].depends_on == by_name["c"].depends_on == ()
    assert by_name["d"].depends_on == (by_name["c"].index,)
    assert set(by_name["add_1"].depends_on) == {by_name["add"].index, by_name["d"].index}


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y.exp()
        y.add_(1)
        return z * y


def test_a_write_in_place_waits_for_readers() -> None:
    report = GraphPartitioner().partition(traced(InPlace()), inputs=torch.randn(4, 4))
    double, exp, add, product = report.subgraphs
    assert exp.depends_on == (double.index,)
    assert add.depends_on == (double.index, exp.index)
    assert product.depends_on == (exp.index, add.index)


def test_views_pass_dependencies_on() -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 1).view(-1).unsqueeze(0).exp()

    report = pieces(Views(), 4, 4)
    assert [s.depends_on for s in report.subgraphs] == [(), (0,)]


# -- fused ------------------------------------------------------------------------------------------------------


def test_convolutions_take_what_follows_them() -> None:
    report = GraphPartitioner(fusion=True).partition(traced(Residual()), inputs=torch.randn(*IMAGE))
    assert names(report) == ["stem+bn0+relu", "conv1+bn1+relu_1", "conv2+bn2+add+relu_2", "pool", "head"]
    residual = report.subgraphs[2]
    assert residual.pattern == "conv+batch_norm+elementwise+elementwise" and residual.kind == "conv"
    assert residual.depends_on == (0, 1)
    activation = 2 * 16 * 16 * 16 * 4
    assert residual.input_bytes == 2 * activation  # the convolution's input and the skip: nothing in between
    assert activation <= residual.output_bytes < 1.01 * activation


def test_fusing_keeps_the_flops_and_the_order() -> None:
    for model, shape in ((Residual(), IMAGE), (Branches(), (4, 64)), (Block(), (2, 8, 64))):
        plain, fused = pieces(model, *shape), pieces(model, *shape, fusion=True)
        assert fused.total_flops == plain.total_flops and len(fused) <= len(plain)
        assert sum(len(s.kernels) for s in fused.subgraphs) == len(plain)
        assert all(d < s.index for s in fused.subgraphs for d in s.depends_on)


def test_a_value_with_two_readers_reaches_memory() -> None:
    class Fork(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            return y.sum(0) + y.amax(0)

    report = pieces(Fork(), 8, 8, fusion=True)
    assert report.subgraphs[0].pattern == "elementwise"


def test_what_an_fx_graph_returns_reaches_memory() -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x.exp()
            return y, y * 2

    assert len(GraphPartitioner(fusion=True).partition(traced(Both()), inputs=torch.randn(4, 4))) == 2


def test_training_batch_norm_is_not_an_epilogue() -> None:
    graph = capture(Residual(), torch.randn(*IMAGE), mode="train")
    report = GraphPartitioner(fusion=True).partition(graph)
    assert {s.pattern for s in report.subgraphs if "batch_norm" in s.pattern} == {"batch_norm"}


def test_a_group_does_not_run_after_its_input_is_overwritten() -> None:
    class Overwrites(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            y = x.exp()
            x.zero_()
            return y.neg()

    report = pieces(Overwrites(), 4, 4, fusion=True)
    order = [op.name for s in report.subgraphs for op in s.kernels]
    assert order.index("aten.exp") < order.index("aten.zero_")


def test_norms_do_not_join_products() -> None:
    report = pieces(Block(), 2, 8, 64, fusion=True)
    assert all(not {"gemm", "norm"} <= set(s.pattern.split("+")) for s in report.subgraphs)
    assert "gemm+elementwise" in {s.pattern for s in report.subgraphs}


_ACTS = {"relu": torch.relu, "exp": torch.exp, "neg": torch.neg, "square": lambda t: t * t, "twice": lambda t: t + t}


class Random(nn.Module):
    """Layers, activations, skips and norms in a random order."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(nn.Linear(16, 16) if s == "linear" else nn.LayerNorm(16) for s in steps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = x
        for step, layer in zip(self.steps, self.layers, strict=True):
            if step in _ACTS:
                x = _ACTS[step](x)
            elif step == "skip":
                x = x + skip
                skip = x
            elif step == "softmax":
                x = torch.softmax(x, -1)
            elif step == "inplace":
                x = x * 2
                x.add_(1)
            else:
                x = layer(x)
        return x


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([*_ACTS, "skip", "softmax", "linear", "norm", "inplace"]), min_size=1, max_size=12))
def test_fused_never_moves_more_bytes(steps: list[str]) -> None:
    plain, fused = pieces(Random(steps), 8, 16), pieces(Random(steps), 8, 16, fusion=True)
    assert fused.total_bytes <= plain.total_bytes
    assert fused.total_flops == plain.total_flops
    assert sum(len(s.kernels) for s in fused.subgraphs) == sum(len(s.kernels) for s in plain.subgraphs)
    assert all(d < s.index for s in fused.subgraphs for d in s.depends_on)


# -- models people know -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count", "fused"), [("resnet18", 68, 23), ("mobilenet_v2", 151, 54)])
def test_torchvision(name: str, count: int, fused: int) -> None:
    model, x = vision(name), torch.randn(1, 3, 224, 224)
    graph = traced(model)
    assert len(GraphPartitioner().partition(graph, inputs=x)) == count
    assert len(GraphPartitioner().partition(capture(model, x))) == count
    assert len(GraphPartitioner(fusion=True).partition(graph, inputs=x)) == fused
    ShapeProp(graph).propagate(x)
    assert len(GraphPartitioner().partition(graph)) == count


def test_hugging_face() -> None:
    model = hugging_face("BertModel", "BertConfig", num_hidden_layers=2)
    graph = capture(model, {"input_ids": torch.randint(0, 1000, (1, 16))})
    plain, fused = GraphPartitioner().partition(graph), GraphPartitioner(fusion=True).partition(graph)
    assert len(fused) < len(plain) and fused.total_bytes < plain.total_bytes
    assert [s.kind for s in plain.subgraphs].count("attention") == 2
