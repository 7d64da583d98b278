"""Orders that keep every dependency and lower the peak of power; operators that write over what nobody reads again."""

from __future__ import annotations

import itertools
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from tessera.errors import ArgumentError, RewriteError
from tessera.estimate.predict import predict
from tessera.graph.capture import capture
from tessera.rewrite import fxorder, inplace, ordering, reorder
from tessera.rewrite.effects import has_effect
from tessera.rewrite.ordering import Buffer, Task

from models import Block, Branches, Residual, mlp


@st.composite
def programs(draw):
    """Random tasks that need only earlier ones, and buffers among them."""
    count = draw(st.integers(1, 14))
    tasks = [
        Task(
            draw(st.floats(0.0, 5.0)),
            draw(st.sampled_from([0.0, 0.001, 0.004, 0.01])),
            frozenset(draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else ()),
        )
        for i in range(count)
    ]
    users = st.sets(st.integers(0, count - 1), min_size=1, max_size=4)
    buffers = draw(st.lists(st.builds(Buffer, st.integers(1, 50), users.map(frozenset), st.booleans()), max_size=6))
    return tasks, buffers


@settings(max_examples=150, deadline=None)
@given(programs(), st.sampled_from([0.002, 0.02]), st.none() | st.integers(0, 200))
def test_orders_keep_dependencies_memory_and_never_raise_the_peak(program, window_s, memory):
    tasks, buffers = program
    found = ordering.best(tasks, buffers, window_s=window_s, memory_bytes=memory)
    place = {task: at for at, task in enumerate(found.order)}
    assert sorted(place) == list(range(len(tasks)))
    assert all(place[j] < place[i] for i, task in enumerate(tasks) for j in task.after)
    assert found.peak_w_after <= found.peak_w_before
    assert found.peak_w_after == pytest.approx(ordering.peak_w(tasks, found.order, window_s))
    bound = found.peak_bytes_before if memory is None else max(memory, found.peak_bytes_before)
    assert ordering.peak_bytes(buffers, found.order) == found.peak_bytes_after <= bound
    if not found.free:
        assert found.moved == 0


def test_hot_and_cool_work_is_interleaved():
    """Ten hot tasks, then ten cool ones, all independent: the mean over two of them can be had everywhere."""
    tasks = [Task(0.7, 0.001, frozenset())] * 10 + [Task(0.2, 0.001, frozenset())] * 10
    found = ordering.best(tasks, [], window_s=0.002)
    assert found.peak_w_before == pytest.approx(700.0)
    assert found.peak_w_after == pytest.approx(450.0)
    assert found.rewrites[0].rule == "reorder" and "450 W" in found.rewrites[0].after
    assert str(found).startswith("peak 700 W before, 450 W after (mean over 2 ms); ")
    assert len(str(found)) < 140  # the places of all operators are not in it


def test_a_chain_has_one_order():
    tasks = [Task(float(i % 2), 0.001, frozenset({i - 1} if i else ())) for i in range(12)]
    found = ordering.best(tasks, [], window_s=0.002)
    assert (found.free, found.moved, found.rewrites) == (0, 0, [])
    assert "chain" in found.why


def test_an_iteration_shorter_than_the_window_cannot_be_shaped():
    found = ordering.best([Task(1.0, 0.001, frozenset()), Task(0.1, 0.001, frozenset())], [], window_s=0.02)
    assert found.moved == 0 and "fits the window" in found.why
    with pytest.raises(ArgumentError, match="window_s"):
        ordering.best([], [], window_s=0.0)


def test_memory_bounds_the_freedom():
    """To interleave, the cool halves' buffers must all be there at once: a bound forbids it."""
    tasks = [Task(0.7, 0.001, frozenset({2 * (i // 2)} - {i})) if i % 2 == 0 else
             Task(0.1, 0.001, frozenset({i - 1})) for i in range(12)]  # fmt: skip
    buffers = [Buffer(100, frozenset({i, i + 1})) for i in range(0, 12, 2)]
    assert ordering.best(tasks, buffers, window_s=0.003).peak_bytes_after <= 100
    assert ordering.peak_bytes(buffers, [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]) == 600


def test_the_peak_is_that_of_a_sliding_window():
    tasks = [Task(1.0, 0.01, frozenset()), Task(7.0, 0.01, frozenset()), Task(1.0, 0.02, frozenset())]
    assert ordering.peak_w(tasks, [0, 1, 2], 0.01) == pytest.approx(700.0)
    assert ordering.peak_w(tasks, [0, 1, 2], 0.02) == pytest.approx(400.0)
    assert ordering.peak_w(tasks, [1, 2, 0], 0.02) == pytest.approx(400.0)  # iterations follow each other
    assert ordering.peak_w(tasks, [0, 1, 2], 1.0) == pytest.approx(9.0 / 0.04)


def test_a_wrong_order_is_refused():
    tasks = [Task(1.0, 1.0, frozenset()), Task(1.0, 1.0, frozenset({0}))]
    for order in ([1, 0], [0], [0, 0]):
        with pytest.raises(RewriteError):
            ordering.check(tasks, order)


# -- captured programs ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def training_step():
    with torch.device("meta"):
        model = nn.Sequential(*(Block(512, 8) for _ in range(3)), nn.Linear(512, 1000))
    return capture(model, torch.empty(16, 512, 512, device="meta"), mode="train", precision="bf16", optimizer="adamw")


def test_a_captured_step_is_reordered_within_its_dependencies(training_step):
    graph = training_step
    found = reorder.plan(graph, window_s=0.001)
    assert found.peak_w_after <= found.peak_w_before
    assert found.peak_bytes_after <= found.peak_bytes_before
    assert found.free > 0  # gradients of weights and of activations
    place = {op: at for at, op in enumerate(found.order)}
    # Whatever an operator reads was written by the same operator as before: the last writer ahead of it.
    last: dict[int, int] = {}
    for op in graph.ops:
        for t in op.inputs:
            if t.storage in last:
                assert place[last[t.storage]] < place[op.index]
        for t in op.outputs if op.kernels else ():
            last[t.storage] = op.index
    moved = reorder.reordered(graph, found.order)
    before, after = (predict(g, on="h200", check_memory=False) for g in (graph, moved))
    assert after.total_energy_j == pytest.approx(before.total_energy_j, rel=0.02)
    assert after.prediction.flops == before.prediction.flops


def test_reads_come_before_the_write_that_overwrites_them():
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2.0
        z = y + 1.0
        y.add_(5.0)
        return z * y

    graph = capture(program, torch.randn(64, 64))
    needs = reorder.dependencies(graph)
    names = [op.name for op in graph.ops]
    write, read = names.index("aten.add_"), names.index("aten.add")
    assert read in needs[write] and write in needs[names.index("aten.mul", write)]


def test_random_numbers_are_drawn_in_turn():
    def program(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5) + nn.functional.dropout(x * 2.0, 0.5)

    graph = capture(program, torch.randn(64, 64))
    first, second = (op.index for op in graph.ops if op.kind == "random")
    assert first in reorder.dependencies(graph)[second]


# -- fx graphs ------------------------------------------------------------------------------------------------------


class Towers(nn.Module):
    """A tower of products and a tower of additions that only meet at the end."""

    def __init__(self, width: int = 2048, depth: int = 6) -> None:
        super().__init__()
        self.products = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.products:
            x = layer(x)
        for i in range(24):
            y = y + float(i)
        return x.sum() + y.sum()


def test_an_fx_graph_of_two_towers_draws_less_at_its_peak():
    with torch.device("meta"):
        big = fx.symbolic_trace(Towers().to(torch.bfloat16))
    wide = (torch.empty(8192, 2048, dtype=torch.bfloat16, device="meta"), torch.empty(1 << 25, device="meta"))
    found = fxorder.reorder(big, wide, window_s=0.0003, memory_bytes=1e12)
    assert found.moved and found.peak_w_after < 0.98 * found.peak_w_before
    torch.manual_seed(0)
    small = fx.symbolic_trace(Towers(width=8))
    small.graph = _same_order(big, small)
    small.recompile()
    x, y = torch.randn(4, 8), torch.randn(16)
    plain = fx.symbolic_trace(Towers(width=8))
    plain.load_state_dict(small.state_dict())
    assert torch.equal(small(x, y), plain(x, y))


def _same_order(big: fx.GraphModule, small: fx.GraphModule) -> fx.Graph:
    """The small graph's nodes in the big one's order."""
    nodes = {n.name: n for n in small.graph.nodes}
    order = [nodes[n.name] for n in big.graph.nodes]
    for a, b in itertools.pairwise(order):
        a.append(b)
    small.graph.lint()
    return small.graph


def test_an_fx_graph_keeps_its_results():
    torch.manual_seed(0)
    module = fx.symbolic_trace(Branches(16))
    x = torch.randn(4, 16)
    expected = module(x)
    found = fxorder.reorder(module, (x,), window_s=1e-6, memory_bytes=1e12)
    assert torch.equal(module(x), expected)
    assert found.free > 0


class Effects(nn.Module):
    """In-place writes and random numbers between plain operators."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = x * 2.0
        b = x + 1.0
        a.add_(b)
        c = nn.functional.dropout(a, 0.5, True)
        d = x - 3.0
        return nn.functional.dropout(d, 0.5, True) + c * a


def test_nothing_passes_a_write_or_a_random_number():
    module = fx.symbolic_trace(Effects())
    nodes = list(module.graph.nodes)
    needs = fxorder.dependencies(module)
    marked = [i for i, n in enumerate(nodes) if has_effect(n, module)]
    assert [has_effect(nodes[i], module) for i in marked] == ["writes", "random", "random"]
    before: list[set[int]] = []
    for i in range(len(nodes)):
        before.append(set().union(needs[i], *(before[j] for j in needs[i])))
    for mark in marked:
        assert set(range(mark)) <= before[mark]
        assert all(mark in before[i] for i in range(mark + 1, len(nodes)))
    x = torch.randn(8, 8)
    torch.manual_seed(1)
    expected = module(x)
    fxorder.reorder(module, (x,), window_s=1e-7, memory_bytes=1e12)
    torch.manual_seed(1)
    assert torch.equal(module(x), expected)


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
    assert has_effect(node, module) == effect


def test_operators_that_assign_write():
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(operator.iadd, (x, 1))
    assert has_effect(node, nn.Module()) == "writes"
    assert has_effect(graph.call_function(test_operators_that_assign_write, ()), nn.Module()) == "unknown"


@pytest.mark.parametrize(
    ("layer", "effect"),
    [
        (nn.BatchNorm1d(4), "writes"), (nn.BatchNorm1d(4).eval(), None), (nn.Dropout(0.2), "random"),
        (nn.Dropout(0.2).eval(), None), (nn.ReLU(inplace=True), "writes"), (nn.Linear(4, 4), None),
        (Branches(4), "unknown"), (nn.Embedding(4, 4, max_norm=1.0), "writes"),
    ],
)  # fmt: skip
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
    assert has_effect(node, module) == effect


# -- in place -------------------------------------------------------------------------------------------------------


def turned(model: nn.Module, *inputs: torch.Tensor, training: bool = False) -> tuple[fx.GraphModule, list[str]]:
    module = fx.symbolic_trace(model)
    with torch.set_grad_enabled(training):
        done = inplace.rewrite(module, inputs, training=training)
    assert all(r.rule == "in_place" and r.saved_bytes > 0 for r in done)
    return module, [r.after for r in done]


def test_relu_after_linear_writes_over_its_input():
    torch.manual_seed(0)
    model, x = mlp(8, 16, 16, 4), torch.randn(5, 8)
    with torch.no_grad():
        expected = model(x)
        module, done = turned(model, x)
        assert done == ["relu_", "relu_"]
        assert torch.equal(module(x), expected)


def test_a_residual_network_is_exact_in_both_modes():
    torch.manual_seed(0)
    model, x = Residual(8, 3), torch.randn(2, 3, 8, 8)
    for m in model.modules():
        if isinstance(m, nn.ReLU):
            m.inplace = False
    model.eval()
    module, done = turned(model, x)
    assert "relu_" in done and "add_" in done
    with torch.no_grad():
        assert torch.equal(module(x), model(x))

    module, done = turned(model, x, training=True)
    assert "relu_" in done  # convolution and frozen batch norm keep their inputs, not their results
    assert _gradients(module, x) == _gradients(model, x)


def _gradients(module: nn.Module, x: torch.Tensor) -> list[list[float]]:
    module.zero_grad()
    x = x.clone().requires_grad_(True)
    module(x).square().sum().backward()
    return [t.flatten().tolist() for t in (x.grad, *(p.grad for p in module.parameters() if p.grad is not None))]


def program(fn):
    class Program(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))
            self.line = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fn(self, x)

    torch.manual_seed(0)
    return Program()


def read_again(m, x):
    y = m.line(x) * 1.0
    return torch.relu(y) - y


def view_read_again(m, x):
    y = m.line(x)
    v = y.t()
    return torch.relu(y) @ v


def same_twice(m, x):
    y = m.line(x)
    return y * y


def factor_needed(m, x):
    y = m.line(x)
    return (y * m.weight) @ x + y.tanh()


LEFT_ALONE = {
    "an input of the program": lambda m, x: torch.relu(x),
    "a parameter": lambda m, x: torch.relu(m.weight) + x,
    "read again later": read_again,
    "a view of it is read again": view_read_again,
    "a view of an input": lambda m, x: torch.relu(x.view(4, 4)),
    "a wider result": lambda m, x: (m.line(x)[0] @ x) + x,
    "the same twice": same_twice,
    "expanded": lambda m, x: torch.relu(m.line(x)[:1].expand(4, 4)),
}


@pytest.mark.parametrize("why", LEFT_ALONE)
def test_what_is_read_again_is_not_overwritten(why):
    model, x = program(LEFT_ALONE[why]), torch.randn(4, 4)
    with torch.no_grad():
        kept, expected = x.clone(), model(x)
        module, done = turned(model, x)
        assert torch.equal(module(x), expected)
        assert torch.equal(x, kept)
    assert "relu_" not in done and (why == "read again later" or "mul_" not in done)


FOR_BACKWARD = {
    "sigmoid keeps its result": (lambda m, x: torch.relu(torch.sigmoid(m.line(x))), []),
    "a product keeps its factors": (factor_needed, []),
    "relu keeps its own result": (lambda m, x: torch.relu(m.line(x)) @ m.weight, ["relu_"]),
    "a sum keeps nothing": (lambda m, x: m.line(x) + m.weight, ["add_"]),
    "the next product keeps it": (lambda m, x: torch.relu(m.line(x)) @ m.weight, ["relu_"]),
}


@pytest.mark.parametrize("why", FOR_BACKWARD)
def test_what_backward_needs_is_not_overwritten(why):
    fn, must = FOR_BACKWARD[why]
    model, x = program(fn), torch.randn(4, 4)
    expected = _gradients(model, x)
    module, done = turned(model, x, training=True)
    assert _gradients(module, x) == expected
    assert set(must) <= set(done)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_programs_are_exact(data):
    """Programs of random elementwise operators and views over a few values: the same results, forward and backward."""
    training = data.draw(st.booleans())
    graph = fx.Graph()
    x = graph.placeholder("x")
    values = [graph.call_function(torch.mul, (x, 0.5))]
    unary = (torch.relu, torch.sigmoid, torch.tanh, torch.neg, torch.exp)
    for _ in range(data.draw(st.integers(1, 9))):
        a, b = data.draw(st.sampled_from(values)), data.draw(st.sampled_from(values))
        kind = data.draw(st.integers(0, 3))
        if kind == 0:
            values.append(graph.call_function(data.draw(st.sampled_from(unary)), (a,)))
        elif kind == 1:
            values.append(graph.call_function(data.draw(st.sampled_from((torch.add, torch.sub, operator.mul))), (a, b)))
        elif kind == 2:
            values.append(graph.call_method("t", (a,)))
        else:
            values.append(graph.call_function(torch.mul, (a, 0.5)))
    graph.output(tuple(dict.fromkeys((values[-1], data.draw(st.sampled_from(values))))))
    module = fx.GraphModule(nn.Module(), graph)
    torch.manual_seed(0)
    x0 = torch.randn(4, 4, requires_grad=training)

    def run() -> list[torch.Tensor]:
        given_x = x0.detach().clone().requires_grad_(training)
        out = module(given_x)
        grads = torch.autograd.grad(sum(o.sum() for o in out), given_x) if training else ()
        return [*(o.detach() for o in out), *grads]

    expected = run()
    inplace.rewrite(module, (x0,), training=training)
    assert all(torch.equal(a, b) for a, b in zip(expected, run(), strict=True))


def test_inputs_that_do_not_run_are_an_error():
    with pytest.raises(RewriteError, match="does not run"):
        inplace.rewrite(fx.symbolic_trace(mlp(8, 4, 2)), (torch.randn(3, 5),))
