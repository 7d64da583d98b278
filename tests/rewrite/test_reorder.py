"""Orders that keep every dependency and lower the peak of power."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tessera.errors import ArgumentError
from tessera.graph.capture import capture
from tessera.rewrite import reorder
from tessera.rewrite.reorder import ScheduledTask, TaskBuffer

from models import Block


@st.composite
def programs(draw):
    """Random tasks that need only earlier ones, and buffers among them."""
    count = draw(st.integers(1, 14))
    tasks = [
        ScheduledTask(
            draw(st.floats(0.0, 5.0)),
            draw(st.sampled_from([0.0, 0.001, 0.004, 0.01])),
            frozenset(draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else ()),
        )
        for i in range(count)
    ]
    users = st.sets(st.integers(0, count - 1), min_size=1, max_size=4)
    buffers = draw(st.lists(st.builds(TaskBuffer, st.integers(1, 50), users.map(frozenset), st.booleans()), max_size=6))
    return tasks, buffers


@settings(max_examples=150, deadline=None)
@given(programs(), st.sampled_from([0.002, 0.02]), st.none() | st.integers(0, 200))
def test_orders_keep_dependencies_memory_and_never_raise_the_peak(program, window_s, memory):
    tasks, buffers = program
    found = reorder.find_order(tasks, buffers, window_s=window_s, memory_bytes=memory)
    place = {task: at for at, task in enumerate(found.order)}
    assert sorted(place) == list(range(len(tasks)))
    assert all(place[j] < place[i] for i, task in enumerate(tasks) for j in task.after)
    assert found.peak_w_after <= found.peak_w_before
    assert found.peak_w_after == pytest.approx(reorder.compute_peak_w(tasks, found.order, window_s))
    bound = found.peak_bytes_before if memory is None else max(memory, found.peak_bytes_before)
    assert reorder.compute_peak_bytes(buffers, found.order) == found.peak_bytes_after <= bound
    if not found.free:
        assert found.moved == 0


def test_hot_and_cool_work_is_interleaved():
    """Ten hot tasks, then ten cool ones, all independent: the mean over two of them can be had everywhere."""
    tasks = [ScheduledTask(0.7, 0.001, frozenset())] * 10 + [ScheduledTask(0.2, 0.001, frozenset())] * 10
    found = reorder.find_order(tasks, [], window_s=0.002)
    assert found.peak_w_before == pytest.approx(700.0)
    assert found.peak_w_after == pytest.approx(450.0)
    assert str(found).startswith("peak 700 W before, 450 W after (mean over 2 ms); ")
    assert len(str(found)) < 140  # the places of all operators are not in it


def test_a_chain_has_one_order():
    tasks = [ScheduledTask(float(i % 2), 0.001, frozenset({i - 1} if i else ())) for i in range(12)]
    found = reorder.find_order(tasks, [], window_s=0.002)
    assert (found.free, found.moved) == (0, 0)
    assert "chain" in found.why


def test_an_iteration_shorter_than_the_window_cannot_be_shaped():
    found = reorder.find_order(
        [ScheduledTask(1.0, 0.001, frozenset()), ScheduledTask(0.1, 0.001, frozenset())], [], window_s=0.02
    )
    assert found.moved == 0 and "fits the window" in found.why
    with pytest.raises(ArgumentError, match="window_s"):
        reorder.find_order([], [], window_s=0.0)


def test_memory_bounds_the_freedom():
    """To interleave, the cool halves' buffers must all be there at once: a bound forbids it."""
    tasks = [
        ScheduledTask(0.7, 0.001, frozenset({2 * (i // 2)} - {i}))
        if i % 2 == 0
        else ScheduledTask(0.1, 0.001, frozenset({i - 1}))
        for i in range(12)
    ]
    buffers = [TaskBuffer(100, frozenset({i, i + 1})) for i in range(0, 12, 2)]
    assert reorder.find_order(tasks, buffers, window_s=0.003).peak_bytes_after <= 100
    assert reorder.compute_peak_bytes(buffers, [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]) == 600


def test_the_peak_is_that_of_a_sliding_window():
    tasks = [
        ScheduledTask(1.0, 0.01, frozenset()),
        ScheduledTask(7.0, 0.01, frozenset()),
        ScheduledTask(1.0, 0.02, frozenset()),
    ]
    assert reorder.compute_peak_w(tasks, [0, 1, 2], 0.01) == pytest.approx(700.0)
    assert reorder.compute_peak_w(tasks, [0, 1, 2], 0.02) == pytest.approx(400.0)
    assert reorder.compute_peak_w(tasks, [1, 2, 0], 0.02) == pytest.approx(400.0)  # iterations follow each other
    assert reorder.compute_peak_w(tasks, [0, 1, 2], 1.0) == pytest.approx(9.0 / 0.04)


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


def test_reads_come_before_the_write_that_overwrites_them():
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2.0
        z = y + 1.0
        y.add_(5.0)
        return z * y

    graph = capture(program, torch.randn(64, 64))
    needs = reorder.find_dependencies(graph)
    names = [op.name for op in graph.ops]
    write, read = names.index("aten.add_"), names.index("aten.add")
    assert read in needs[write] and write in needs[names.index("aten.mul", write)]


def test_random_numbers_are_drawn_in_turn():
    def program(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5) + nn.functional.dropout(x * 2.0, 0.5)

    graph = capture(program, torch.randn(64, 64))
    first, second = (op.index for op in graph.ops if op.kind == "random")
    assert first in reorder.find_dependencies(graph)[second]
