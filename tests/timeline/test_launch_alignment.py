"""Kernels of untraced steps get the operators of the traced ones they repeat: made programs beside their truth."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.timeline import Timeline
from tessera.timeline.columns import NONE, UNTRACED, Builder, Launch
from tessera.timeline.launch_alignment import follow_launches

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "measure"))
from operator_alignment import compare, make_light

STEPS = 20


@dataclass(frozen=True)
class Kernel:
    """One launch: the operator and region around it, and what runs."""

    op: str
    name: str
    grid: int = 64
    us: float = 20.0
    stream: int = 7
    region: str = "forward"
    module: str = ""


def dense(layers: int) -> Iterator[Kernel]:
    """A stack of equal blocks, forward and backward: only the place in the step tells one layer from another."""
    for _ in range(layers):
        yield Kernel("aten::native_layer_norm", "norm")
        yield Kernel("aten::addmm", "gemm_tn", 96, 60)
        yield Kernel("aten::gelu", "elementwise<gelu>")
        yield Kernel("aten::addmm", "gemm_tn", 32, 50)
        yield Kernel("aten::add", "elementwise<add>")
    yield Kernel("aten::nll_loss_forward", "nll")
    for _ in range(layers):
        yield Kernel("aten::mm", "gemm_nt", 96, 90, region="backward")
        yield Kernel("aten::sum", "reduce", region="backward")
        yield Kernel("aten::gelu_backward", "elementwise<dgelu>", region="backward")
    yield Kernel("aten::_foreach_add_", "multi_tensor", region="optimizer")


def mixture(layers: int, rng: random.Random) -> Iterator[Kernel]:
    """Experts that get as many tokens as the router says, some of them none: grids, kernels and counts change."""
    for _ in range(layers):
        yield Kernel("aten::native_layer_norm", "norm")
        yield Kernel("aten::mm", "gemm_tn", 96, 60)
        yield Kernel("aten::topk", "sort", 8)
        for _ in range(8):
            tokens = rng.choice((0, rng.randrange(1, 200)))
            if tokens:
                yield Kernel("aten::index", "gather", tokens, 5)
                yield Kernel("aten::mm", "gemm_small" if tokens < 40 else "gemm_large", tokens, 30)
                yield Kernel("aten::silu", "elementwise<silu>", tokens, 5)
                yield Kernel("aten::index_add_", "scatter", tokens, 5)
        yield Kernel("aten::add", "elementwise<add>")
    yield Kernel("aten::_foreach_add_", "multi_tensor")


def resized(layers: int, size: int) -> Iterator[Kernel]:
    """Batches of another length each: every grid differs, and products run as another kernel."""
    for k in dense(layers):
        name = f"{k.name}_{size % 3}" if k.name.startswith("gemm") else k.name
        yield Kernel(k.op, name, k.grid * size, k.us, region=k.region)


def make_run(
    step: Callable[[int], list[Kernel]], *, ahead_us: float = 0.0, steps: int = STEPS,
    evaluate: Callable[[int], list[Kernel]] = lambda _: [],
) -> Timeline:  # fmt: skip
    """A whole trace: operators, calls and kernels, regions in every step, and a device that runs behind its host.

    What `evaluate` gives runs after a step and is part of none.
    """
    builder = Builder()
    host_ns = 10**18
    free_ns: dict[int, int] = {}
    number = 0
    for index in range(steps):
        begun_ns, regions = host_ns, [("", host_ns)]
        own, more = step(index), evaluate(index)
        for at, kernel in enumerate([*own, *more]):
            if at == len(own):
                host_ns = max(host_ns, *free_ns.values())
                builder.add("region", f"step_{index}", begun_ns, host_ns, thread=1)
            number += 1
            if kernel.region != regions[-1][0]:
                regions.append((kernel.region, host_ns))
            host_ns += 3_000
            for name in kernel.module.split("/") if kernel.module else ():
                builder.add("op", name, host_ns - 100, host_ns + 2_100, thread=1)
            builder.add("op", kernel.op, host_ns, host_ns + 2_000, thread=1, external=number)
            call_ns = host_ns + 500
            builder.add("runtime", "cudaLaunchKernel", call_ns, call_ns + 1_000, thread=1, correlation=number)
            start_ns = max(call_ns + 2_000, free_ns.get(kernel.stream, 0) + 500)
            end_ns = start_ns + round(kernel.us * 1e3)
            free_ns[kernel.stream] = end_ns
            launch = builder.intern_launch(Launch(grid=(kernel.grid, 1, 1), block=(128, 1, 1)))
            builder.add(
                "kernel", kernel.name, start_ns, end_ns, device=0, stream=kernel.stream, correlation=number,
                external=number, launch=launch,
            )  # fmt: skip
            host_ns += 3_000
        for (name, from_ns), (_, to_ns) in pairwise([*regions[1:], ("", host_ns)]):
            builder.add("region", name, from_ns, to_ns, thread=1)
        if ahead_us == 0.0:
            host_ns = max(host_ns, *free_ns.values())  # it waits for the device
        else:
            host_ns = max(host_ns, max(free_ns.values()) - round(ahead_us * 1e3))
        if not more:
            builder.add("region", f"step_{index}", begun_ns, host_ns, thread=1)
        host_ns += 1_000
    timeline = builder.build()
    timeline.meta["modules"] = [at for at, name in enumerate(timeline.names) if name.startswith("module ")]
    return timeline


def check(step: Callable[[int], list[Kernel]], *, ahead_us: float = 0.0, steps: int = STEPS) -> dict[str, float]:
    timeline = make_run(step, ahead_us=ahead_us, steps=steps)
    made = make_light(timeline)
    assert made is not None
    return compare(timeline, *made)


@settings(max_examples=8, deadline=None)
@given(layers=st.integers(1, 12), ahead_us=st.sampled_from([0.0, 500.0, 5_000.0]))
def test_a_program_that_repeats_is_known_to_the_last_kernel(layers: int, ahead_us: float) -> None:
    found = check(lambda _: list(dense(layers)), ahead_us=ahead_us)
    wrong = {key: value for key, value in found.items() if key.endswith("_pct") and value < 100.0 - 1e-9}
    assert not wrong


@settings(max_examples=6, deadline=None)
@given(layers=st.integers(1, 8), seed=st.integers(0, 10**6))
def test_experts_that_are_routed_at_random_keep_their_operators(layers: int, seed: int) -> None:
    rng = random.Random(seed)
    found = check(lambda _: list(mixture(layers, rng)), ahead_us=1_000.0)
    assert found["operator_time_pct"] >= 98.0
    assert found["step_time_pct"] >= 98.0


@settings(max_examples=6, deadline=None)
@given(layers=st.integers(1, 8), seed=st.integers(0, 10**6))
def test_batches_of_other_lengths_keep_their_operators_and_lose_their_shapes(layers: int, seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randrange(1, 60) for _ in range(STEPS)]
    timeline = make_run(lambda i: list(resized(layers, sizes[i])))
    made = make_light(timeline)
    assert made is not None
    light, rows = made
    assert compare(timeline, light, rows)["operator_time_pct"] >= 98.0
    links = light.linked
    other_grid = (links.twin != NONE) & (light["launch"] != light["launch"][links.twin])
    assert (links.shapes[other_grid] == NONE).all()


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), lost=st.floats(0.0, 0.05))
def test_launches_that_are_left_out_do_not_move_the_others(seed: int, lost: float) -> None:
    rng = random.Random(seed)
    found = check(lambda _: [k for k in dense(6) if rng.random() >= lost], ahead_us=500.0)
    assert found["operator_time_pct"] >= 98.0
    assert found["step_time_pct"] >= 75.0  # where the kernels that count the steps are among those left out


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_streams_are_followed_apart(seed: int) -> None:
    """Copies and collectives run beside the kernels, and come between them as chance has it."""

    def step(index: int) -> list[Kernel]:
        rng = random.Random(seed + index)
        own = list(dense(4))
        for name, op in (("nccl", "c10d::allreduce_"), ("prefetch", "aten::copy_"), ("nccl", "c10d::allgather_")):
            own.insert(rng.randrange(len(own)), Kernel(op, name, stream=20, us=30.0))
        order = {id(k): i for i, k in enumerate(k for k in own if k.stream == 20)}
        beside = iter(sorted((k for k in own if k.stream == 20), key=lambda k: (k.name, k.op)))
        return [next(beside) if id(k) in order else k for k in own]

    found = check(step)
    assert found["operator_pct"] == 100.0


def test_a_validation_between_the_steps_is_given_what_looks_alike() -> None:
    def step(index: int) -> list[Kernel]:
        return [*dense(4), *([Kernel("aten::eq", "compare")] * 3 + list(dense(4))[:20] if index == 15 else [])]

    found = check(step)
    assert found["operator_time_pct"] >= 98.0


def test_a_kernel_known_by_its_name_alone_belongs_to_what_encloses_all_layers_that_run_it() -> None:
    """Evaluation runs the layers' products among kernels that were never traced: nobody knows which layer's."""

    def step(_: int) -> list[Kernel]:
        kernels = []
        for layer in range(5):
            inside = f"module Net/module layers.{layer}"
            kernels += [
                Kernel("aten::native_layer_norm", "norm", module=inside),
                Kernel("aten::addmm", "gemm", module=f"{inside}/module layers.{layer}.linear"),
            ]
        return [*kernels, Kernel("aten::sum", "reduce", module="module Net/module head")]

    def evaluate(index: int) -> list[Kernel]:
        names = ["gemm", "reduce", "gemm"] if index == 15 else []
        return [Kernel("aten::other", f"{n}_{i}" if i else n) for n in names for i in range(8)]

    made = make_light(make_run(step, evaluate=evaluate))
    assert made is not None
    light, _ = made
    links, kernels = light.linked, light.rows("kernel")
    begin, end = links.steps[15].end_ns, links.steps[16].start_ns
    between = kernels[(light["start_ns"][kernels] >= begin) & (light["start_ns"][kernels] < end)]
    modules = {light.name(row): links.module[row] for row in between.tolist()}
    assert light.name(modules["gemm"]) == "module Net"
    assert light.name(modules["reduce"]) == "module head"


def test_regions_of_a_tracer_go_to_untraced_steps_also_if_one_launch_of_theirs_was_lost() -> None:
    """A kernel inside a traced region whose call was not traced is no sign that the program itself has that region."""
    timeline = make_run(lambda _: list(dense(3)))
    made = make_light(timeline)
    assert made is not None
    light, rows = made
    links = timeline.linked
    regions, number = light.rows("region"), light.names.index("optimizer")
    regions = regions[light["name"][regions] == number]
    lost = rows[light.rows("kernel")[light["name"][light.rows("kernel")] == light.names.index("multi_tensor")][9]]
    keep = np.ones(len(light), bool)
    keep[regions] = np.isin(links.step[rows[regions]], [8, 9, 10])
    keep &= rows != links.launch[lost]
    light.columns["external"] = np.where(rows == lost, UNTRACED, light["external"])
    few = Timeline({k: v[keep] for k, v in light.columns.items()}, light.names, light.launches, meta=light.meta)
    kernels = few.rows("kernel")
    multi = kernels[few["name"][kernels] == few.names.index("multi_tensor")]
    assert [few.name(row) for row in few.linked.region[multi].tolist()] == ["optimizer"] * STEPS


@pytest.mark.parametrize("every", [1, 4])
def test_what_runs_between_two_steps_is_launched_in_neither(every: int) -> None:
    """Its kernels are those of a forward pass, so that no kernel counts the steps."""

    def evaluate(index: int) -> list[Kernel]:
        return [replace(k, region="evaluation") for k in list(dense(4))[:20] * 3] if index % every == every - 1 else []

    timeline = make_run(lambda _: list(dense(4)), evaluate=evaluate)
    made = make_light(timeline)
    assert made is not None
    light, rows = made
    links, truth = light.linked, timeline.linked
    device = light.device_rows
    assert len(device) == len(timeline.device_rows)
    own = [links.steps[s].name if s != NONE else "" for s in links.step[device]]
    assert own == [truth.steps[s].name if s != NONE else "" for s in truth.step[rows[device]]]


def test_a_long_stretch_of_strange_kernels_does_not_lose_the_place() -> None:
    """After it, experts leave no long run of equal names."""
    rng = random.Random(1)

    def step(index: int) -> list[Kernel]:
        strange = [Kernel("aten::other", f"strange_{i % 7}") for i in range(2_000)] if index == 14 else []
        return [*strange, *(rename(kernel) for kernel in mixture(3, rng))]

    def rename(kernel: Kernel) -> Kernel:
        if kernel.op in ("aten::silu", "aten::index"):
            return replace(kernel, name="elementwise", grid=64)
        return replace(kernel, name=f"gemm_{rng.randrange(40)}") if kernel.op == "aten::mm" else kernel

    timeline = make_run(step)
    made = make_light(timeline)
    assert made is not None
    light, _ = made
    links, kernels = light.linked, light.rows("kernel")
    after = kernels[(light["start_ns"][kernels] >= links.steps[15].start_ns)]
    assert (links.op[after] != NONE).mean() >= 0.8  # half of them, if it were lost


def test_kernels_of_a_replayed_graph_have_the_operator_it_was_launched_by() -> None:
    """One call launches them all, so that they share its correlation."""
    timeline = make_run(lambda _: [Kernel("graph", f"fused_{i}") for i in range(30)])
    device = timeline.device_rows
    calls = timeline.rows("runtime")
    for column in ("correlation", "external"):
        first = timeline[column][device].reshape(STEPS, 30)[:, :1]
        timeline.columns[column] = timeline[column].copy()
        timeline.columns[column][device] = np.repeat(first, 30, axis=1).reshape(-1)
    keep = np.setdiff1d(np.arange(len(timeline)), calls.reshape(STEPS, 30)[:, 1:])
    timeline = Timeline({k: v[keep] for k, v in timeline.columns.items()}, timeline.names, timeline.launches)
    made = make_light(timeline)
    assert made is not None
    found = compare(timeline, *made)
    assert (found["operator_pct"], found["step_pct"]) == (100.0, 100.0)


def test_kernels_of_a_rank_repeat_those_of_the_same_rank() -> None:
    """Also where a stream was never traced, and only their names tell."""
    one = make_run(lambda i: [*dense(2), *([Kernel("aten::sum", "reduce", stream=99)] if i > 14 else [])])
    made = make_light(one)
    assert made is not None
    light, _ = made
    columns = {name: np.concatenate([values, values]) for name, values in light.columns.items()}
    columns["rank"] = np.repeat([0, 1], len(light))
    for name in ("correlation", "external", "thread"):
        columns[name][len(light) :] += 10_000 * (columns[name][len(light) :] >= 0)
    both = Timeline(columns, light.names, light.launches)
    rows, twin = both.device_rows, both.linked.twin[both.device_rows]
    assert (both["stream"][rows] == 99).any()
    assert (both["rank"][twin] == both["rank"][rows]).all()


def test_a_kernel_that_nothing_resembles_is_not_aligned() -> None:
    timeline = make_run(lambda i: [*dense(2), *([Kernel("aten::new", "never_traced")] if i > 14 else [])])
    made = make_light(timeline)
    assert made is not None
    light, _ = made
    strange = light.rows("kernel")[light["name"][light.rows("kernel")] == light.names.index("never_traced")]
    assert (light.linked.twin[strange] == NONE).all()
    assert (light.linked.op[strange] == NONE).all()
    assert all(record.op is None for record in light.records(strange))


def test_without_a_traced_step_nothing_is_aligned() -> None:
    timeline = make_run(lambda _: list(dense(1)), steps=3)
    rows = timeline.rows("kernel", "region")
    columns = {name: values[rows] for name, values in timeline.columns.items()}
    columns["external"] = np.full(len(rows), UNTRACED)
    light = Timeline(columns, timeline.names, timeline.launches)
    assert (light.linked.twin == NONE).all()
    assert (light.linked.op == NONE).all()


def test_calls_that_were_traced_decide_whatever_the_collector_marks() -> None:
    """CUPTI lists the kernels of a traced step too: a call of the host with their number ties them to operators."""
    timeline = make_run(lambda _: list(dense(2)))
    before = timeline.linked.op.copy()
    timeline.columns["external"] = np.where(timeline["kind"] == 0, UNTRACED, timeline["external"])
    timeline.links = None
    kernels = timeline.rows("kernel")
    assert (timeline["name"][timeline.linked.op[kernels]] == timeline["name"][before[kernels]]).all()
    assert (timeline.linked.twin[kernels] == kernels).all()


@pytest.mark.parametrize(
    ("sequence", "places"),
    [
        ("abcdefabcdef", [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]),
        ("abcdabcdef", [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]),
        ("abxcdefabcdef", [0, 1, NONE, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]),
        ("xyz", [NONE, NONE, NONE]),
    ],
)
def test_a_cursor_goes_on_at_the_nearest_place(sequence: str, places: list[int]) -> None:
    found = follow_launches(_number("abcdef"), _number(sequence), np.zeros(len(sequence), np.int64))
    assert found.tolist() == places


def _number(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64)
