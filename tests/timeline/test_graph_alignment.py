"""Operators of CUDA graphs: kernels of replays tied to the calls that put them into their graph."""

from __future__ import annotations

import random

import pytest

from tessera.timeline.columns import NONE, UNTRACED, Builder, Launch, Timeline

GEMM, NORM, ADD, FLASH = "gemm", "norm", "add", "flash"
FORWARD = [
    (NORM, "aten::layer_norm", 8), (GEMM, "aten::addmm", 24), (FLASH, "aten::sdpa", 16), (GEMM, "aten::addmm", 8),
    (ADD, "aten::add", 8), (NORM, "aten::layer_norm", 8), (GEMM, "aten::mm", 32),
]  # fmt: skip
BACKWARD = [(GEMM, "aten::mm", 32), (ADD, "aten::sum", 8), (FLASH, "aten::sdpa_backward", 16), (GEMM, "aten::mm", 24)]
Kernel = tuple[str, str, int]  # name, operator, grid


def add_capture(builder: Builder, graph: list[Kernel], at_ns: int) -> None:
    for number, (name, op, grid) in enumerate(graph):
        start_ns = at_ns + 1_000 * number
        builder.add("op", op, start_ns, start_ns + 900, thread=1)
        shape = builder.intern_launch(Launch(grid=(grid, 1, 1), block=(128, 1, 1)))
        what = {"captured": builder.intern(name), "launch": shape, "thread": 1}
        builder.add("runtime", "cudaLaunchKernel", start_ns + 100, start_ns + 200, **what)


def add_replay(builder: Builder, graph: list[Kernel], at_ns: int, stream: int = 7) -> list[tuple[int, str]]:
    """The rows, and the operator of each."""
    rows = []
    for number, (name, op, grid) in enumerate(graph):
        shape = builder.intern_launch(Launch(grid=(grid, 1, 1), block=(128, 1, 1), registers=40))
        row = builder.add(
            "kernel", name, at_ns + 1_000 * number, at_ns + 1_000 * number + 800, device=0, stream=stream,
            external=UNTRACED, graph_node=1_000 * len(graph) + number, launch=shape, correlation=at_ns // 1_000,
        )  # fmt: skip
        rows.append((row, op))
    return rows


def name_op(timeline: Timeline, row: int) -> str | None:
    op = int(timeline.linked.op[row])
    return None if op == NONE else timeline.name(op)


@pytest.mark.parametrize("seed", range(4))
def test_replays_of_two_graphs_have_the_operators_of_their_captures(seed: int) -> None:
    rng, builder = random.Random(seed), Builder()
    add_capture(builder, 6 * FORWARD, 0)
    add_capture(builder, 6 * BACKWARD, 1_000_000)
    truth: list[tuple[int, str]] = []
    at_ns = 10_000_000
    for _ in range(40):
        graph = 6 * (FORWARD if rng.random() < 0.6 else BACKWARD)
        truth += add_replay(builder, graph, at_ns)
        at_ns += 1_000_000
        builder.add("kernel", "adam", at_ns - 1_000, at_ns - 500, device=0, stream=7, external=UNTRACED)  # in no graph
    timeline = builder.build()
    right = [name_op(timeline, row) == op for row, op in truth]
    assert all(right)
    assert all(timeline.linked.op[row] == NONE for row in timeline.rows("kernel") if timeline.name(row) == "adam")


def test_shapes_are_those_of_the_capture_only_where_the_grid_is() -> None:
    builder = Builder()
    add_capture(builder, FORWARD, 0)
    rows = add_replay(builder, [(name, op, grid + 1) for name, op, grid in FORWARD], 1_000_000)
    timeline = builder.build()
    links = timeline.linked
    assert [name_op(timeline, row) for row, _ in rows] == [op for _, op, _ in FORWARD]
    assert all(links.shapes[row] == NONE for row, _ in rows)


def test_kernels_of_a_graph_that_was_not_captured_here_have_only_what_their_names_say() -> None:
    builder = Builder()
    add_capture(builder, FORWARD, 0)
    rows = add_replay(builder, [("unknown", "", 1), (ADD, "aten::add", 8), ("other", "", 1)], 1_000_000)
    timeline = builder.build()
    assert [name_op(timeline, row) for row, _ in rows] == [None, "aten::add", None]


def test_a_replay_whose_branches_run_in_another_order_keeps_its_operators() -> None:
    builder = Builder()
    add_capture(builder, FORWARD, 0)
    rows = add_replay(builder, FORWARD, 1_000_000)
    timeline = builder.build()
    swapped = [rows[1][0], rows[2][0]]
    for edge in ("start_ns", "end_ns"):
        timeline.columns[edge][swapped] = timeline.columns[edge][swapped[::-1]]
    assert [name_op(timeline, row) for row, _ in rows] == [op for _, op, _ in FORWARD]


def test_a_replay_that_was_cut_off_is_followed() -> None:
    builder = Builder()
    add_capture(builder, 4 * FORWARD, 0)
    rows = add_replay(builder, 4 * FORWARD, 1_000_000)
    timeline = builder.build()
    lost = [rows[i][0] for i in (0, 1, 9)]
    timeline.columns["kind"][lost] = 4  # no kernels: CUPTI had no buffer
    right = [name_op(timeline, row) == op for row, op in rows if row not in lost]
    assert all(right)


def test_a_call_is_of_the_operator_that_is_open_in_its_middle() -> None:
    """CUPTI's clock and Kineto's are a microsecond apart: a launch seems to begin before `empty` has ended."""
    builder = Builder()
    builder.add("op", "aten::index_copy_", 0, 10_000, thread=1)
    builder.add("op", "aten::empty", 1_000, 3_100, thread=1)
    call = builder.add("runtime", "cudaLaunchKernel", 3_000, 8_000, thread=1)
    assert name_op(builder.build(), call) == "aten::index_copy_"
