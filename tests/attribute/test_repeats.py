"""How often modules and operators were called in a run whose operators are known in a few steps: made programs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tessera.attribute.repeats import share_repeats
from tessera.attribute.solve import attribute
from tessera.attribute.table import EnergyTable
from tessera.joules import DomainSamples
from tessera.sensors._nvml_power import RingReader
from tessera.timeline import Builder, Timeline
from tessera.timeline.columns import UNTRACED
from tessera.trace import PowerTrace

STEPS, TRACED = 60, range(28, 31)
ALWAYS, EXPERT = ["norm", "gemm", "sort"], ["gather", "gemm_small", "scatter"]


def make_run(layers: int, seed: int) -> Timeline:
    """Layers of experts, of which each step runs as many as its tokens ask for; modules in the traced steps only."""
    rng, builder, now = random.Random(seed), Builder(), 10**18
    modules = [builder.intern(name) for name in ("nn.Module: Model_0", "nn.Module: Layer_0")]
    for step in range(STEPS):
        begun = now
        for _ in range(layers):
            layer_begun = now
            for name in [*ALWAYS, *EXPERT * rng.randrange(8), "add"]:
                number = now if step in TRACED else UNTRACED
                if step in TRACED:
                    builder.add("op", f"aten::{name}", now, now + 9_000, thread=1, external=number)
                builder.add("kernel", name, now + 1_000, now + 9_000, device=0, stream=7, external=number)
                now += 10_000
            if step in TRACED:
                builder.add("op", "nn.Module: Layer_0", layer_begun, now, thread=1)
        if step in TRACED:
            builder.add("op", "nn.Module: Model_0", begun, now, thread=1)
    timeline = builder.build()
    timeline.meta["modules"] = modules
    return timeline


def make_graphs(layers: int, replays: int) -> Timeline:
    """Two graphs of as many layers, captured once in modules; one is replayed twice as often as the other."""
    builder, now = Builder(), 10**18
    modules = [builder.intern(name) for name in ("nn.Module: Model_0", "nn.Module: Layer_0")]
    for graph in (ALWAYS, ALWAYS[::-1]):
        begun = now
        for _ in range(layers):
            layer_begun = now
            for name in graph:
                builder.add("op", f"aten::{name}", now, now + 9_000, thread=1)
                builder.add(
                    "runtime", "cudaLaunchKernel", now + 1_000, now + 2_000, thread=1, captured=builder.intern(name)
                )
                now += 10_000
            builder.add("op", "nn.Module: Layer_0", layer_begun, now, thread=1)
        builder.add("op", "nn.Module: Model_0", begun, now, thread=1)
    for replay in range(3 * replays):
        is_second = replay % 3 == 0
        for node, name in enumerate(ALWAYS[:: -1 if is_second else 1] * layers):
            builder.add(
                "kernel", name, now, now + 9_000, device=0, stream=7, external=UNTRACED, correlation=replay,
                graph_node=1_000 * is_second + node,
            )  # fmt: skip
            now += 10_000
    timeline = builder.build()
    timeline.meta["modules"] = modules
    return timeline


def account(timeline: Timeline) -> EnergyTable:
    times = np.arange(timeline.start_ns - 10**8, timeline.end_ns + 10**8, 20_000_000)
    column = DomainSamples.of(RingReader(None, None).domain("NVIDIA H200", ""), times, np.full(len(times), 400.0))
    return attribute(timeline, PowerTrace({"gpu0": column}, start_ns=int(times[0]), end_ns=int(times[-1])))


@pytest.mark.parametrize("layers", [1, 3])
def test_what_was_captured_is_called_by_every_replay(layers: int) -> None:
    table = account(make_graphs(layers, 40))
    calls = {row.name: row.calls for row in (*table.modules, *table.ops)}
    assert calls["nn.Module: Model_0"] == 120
    assert {calls[name] for name in ("nn.Module: Layer_0", "aten::norm", "aten::gemm")} == {120 * layers}


def test_a_kernel_that_ran_without_the_graph_too_is_one_kernel_of_its_call() -> None:
    """As torch asks for, a program runs three times before the capture; then its graph is replayed."""
    builder = Builder()
    builder.add("op", "nn.Module: Model_0", 0, 100, thread=1)
    for at, name in enumerate("abc"):
        builder.add("runtime", "cudaLaunchKernel", at, at + 1, thread=1, captured=builder.intern(name))
    for at, name in enumerate("abc"):
        builder.add("kernel", name, at, at + 1, device=0, stream=7)
    timeline = builder.build()
    rows, of_model = np.concatenate((timeline.rows("runtime"), timeline.rows("kernel"))), timeline.rows("op")
    calls, made = share_repeats(timeline, rows, np.repeat([3000.0, 3.0], 3), np.repeat(of_model, 6))
    assert (calls.tolist(), made.tolist()) == (of_model.tolist(), [3003.0])


@pytest.mark.parametrize("layers", [2, 8])
@pytest.mark.parametrize("seed", range(3))
def test_calls_are_counted_once_where_what_repeats_them_is_spread_over_traced_calls(layers: int, seed: int) -> None:
    table = account(make_run(layers, seed))
    assert table.operators is not None
    assert table.operators.share == 1.0
    calls = {row.name: row.calls for row in (*table.modules, *table.ops)}
    assert calls["nn.Module: Model_0"] == STEPS
    assert calls["nn.Module: Layer_0"] == calls["aten::norm"] == layers * STEPS
