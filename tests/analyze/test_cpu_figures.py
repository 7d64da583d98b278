"""Figures of a run without a power sensor: rows that sum up, lie within the model, and are each of one thing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.analyze.graph_profile import profile_operators
from tessera.analyze.roofline import roofline
from tessera.analyze.run_energy import OLDER, RunTotals, from_summary
from tessera.attribute.share import running_joules
from tessera.attribute.solve import attribute
from tessera.attribute.table import EnergyRow, EnergyTable
from tessera.joules import DomainSamples
from tessera.profile.summary_mode import RunSummary
from tessera.report.run_analyses import roofline as drawn
from tessera.schema import Domain, Hold
from tessera.timeline import Builder, Timeline
from tessera.trace import PowerTrace

T0 = 1_790_000_000_000_000_000
MS = 1_000_000
LEAST_W, MOST_W = 2.0, 8.0
MODEL = Domain(
    name="cpu0", source="modelled", resolution_s=0.1, basis="modelled", hold=Hold.MEAN, gain_error=0.8, label="a CPU"
)  # fmt: skip
LINEAR = dataclasses.replace(MODEL, hold=Hold.LINEAR)
watts = st.floats(LEAST_W, MOST_W)


def power_of(levels: Sequence[float], domain: Domain = MODEL) -> PowerTrace:
    """A sample every 100 ms, the first of which knows nothing."""
    times = T0 + 100 * MS * np.arange(len(levels) + 1)
    column = DomainSamples.of(domain, times, [math.nan, *levels])
    return PowerTrace({"cpu0": column}, start_ns=int(times[0]), end_ns=int(times[-1]))


@st.composite
def programs(draw: st.DrawFn) -> Timeline:
    """Calls one after another on two threads, each with some inside it; regions around them, and a step or two."""
    b = Builder()
    for thread in (1, 2):
        now = T0 + draw(st.integers(1, 60)) * MS
        for _ in range(draw(st.integers(1, 6))):
            begun = now
            lasts, before = draw(st.integers(1, 80)) * MS, draw(st.integers(0, 5)) * MS
            shapes = b.intern(f"[{draw(st.integers(1, 3))},64]f32 [64,64]f32")
            b.add("op", "aten::matmul", now, now + lasts, thread=thread, shapes=shapes)
            if lasts > 2 * MS:
                b.add("op", "aten::mm", now + MS // 2, now + lasts - MS // 2, thread=thread, shapes=shapes)
                b.add("op", "aten::empty", now + MS, now + MS + MS // 4, thread=thread)
            now += lasts + draw(st.integers(0, 30)) * MS
            b.add("region", draw(st.sampled_from(["load", "train"])), begun - before, now, thread=thread)
            now += 6 * MS
    return b.build()


def solved(timeline: Timeline, levels: Sequence[float], domain: Domain = MODEL) -> EnergyTable:
    while len(levels) * 100 * MS < timeline.end_ns - T0:  # power of all of it
        levels = [*levels, *levels]
    power = power_of(levels, domain)
    return attribute(timeline, power, start_ns=power.start_ns, end_ns=power.end_ns)


def within(row: EnergyRow, low_w: float, high_w: float) -> bool:
    power_w = row.power_w
    return power_w is None or low_w * (1 - 1e-6) <= power_w <= high_w * (1 + 1e-6)


@given(programs(), st.lists(watts, min_size=1, max_size=20))
def test_a_step_is_its_operators_and_what_lies_between_them(timeline: Timeline, levels: list[float]) -> None:
    """Rows of `graph.profile` are calls from outside: their joules are, like their seconds, of all they call."""
    table = solved(timeline, levels)
    rows = profile_operators(timeline).rows
    assert {r.op for r in rows} == {"aten::matmul"}
    assert sum(r.energy_j or 0.0 for r in rows) + table.idle_j == pytest.approx(table.energy_j)
    assert sum(r.error_j or 0.0 for r in rows) == pytest.approx(float(np.nansum(timeline.error_j)))


@given(programs(), st.lists(watts, min_size=1, max_size=20), st.sampled_from([MODEL, LINEAR]))
def test_no_row_leaves_the_curve_of_the_model(timeline: Timeline, levels: list[float], domain: Domain) -> None:
    table = solved(timeline, levels, domain)
    assert sum(r.energy_j for r in table.ops) + table.idle_j == pytest.approx(table.energy_j)
    # A mean over operators and waiting is no bound for either: work may take all joules of its samples, or none.
    low, high = (min(levels), max(levels)) if domain is LINEAR else (0.0, math.inf)
    assert all(within(r, low, high) and r.energy_j <= table.energy_j for r in (*table.ops, *table.regions))
    assert table.idle_w is None or low * (1 - 1e-6) <= table.idle_w <= high * (1 + 1e-6)
    assert all(r.error_j >= 0.8 * r.energy_j * (1 - 1e-6) for r in table.ops)  # no better than the level
    assert any("modelled" in note for note in table.notes)


@given(
    st.lists(st.one_of(watts, st.just(math.nan)), min_size=2, max_size=9),
    st.lists(st.integers(0, 1000), max_size=9),
    st.sampled_from([MODEL, LINEAR]),
)
def test_the_running_sum_is_that_of_the_trace(levels: list[float], at_ms: list[int], domain: Domain) -> None:
    column = power_of(levels, domain).columns["cpu0"]
    at = np.array([T0, *(T0 + ms * MS for ms in sorted(at_ms))])
    found = running_joules(column, at)
    for t, joules in zip(at[1:].tolist(), (found[1:] - found[0]).tolist(), strict=True):
        want = column.energy(T0, t).energy_j
        assert joules == pytest.approx(0.0 if math.isnan(want) else want, abs=1e-9)


def test_idle_time_has_the_watts_of_its_samples() -> None:
    b = Builder()
    b.add("op", "aten::mm", T0, T0 + 500 * MS, thread=1)
    b.add("region", "wait", T0 + 500 * MS, T0 + 1000 * MS, thread=1)
    table = solved(b.build(), [8.0] * 5 + [2.0] * 5)
    assert table.ops[0].power_w == pytest.approx(8.0) and table.ops[0].energy_j == pytest.approx(4.0)
    assert table.idle_w == pytest.approx(2.0) and table.idle_j == pytest.approx(1.0)
    (wait,) = table.regions  # a region in which no operator ran has the idle joules of its time
    assert wait.energy_j == pytest.approx(1.0) and wait.power_w == pytest.approx(2.0) and wait.calls == 1


# -- roofline -------------------------------------------------------------------------------------------------------


@given(programs(), st.lists(watts, min_size=1, max_size=20))
def test_seconds_flops_and_joules_of_a_point_are_of_the_same_calls(timeline: Timeline, levels: list[float]) -> None:
    solved(timeline, levels, LINEAR)  # by time: no fit tells operators and waiting apart
    low, high = min(levels), max(levels)
    for row in roofline(timeline, by="op").rows:
        drawn_w = row["energy_j"] / row["time_s"]
        assert low / 2 * (1 - 1e-6) <= drawn_w <= high * (1 + 1e-6)  # two threads share what the host draws
        assert row["flop_per_j"] * drawn_w == pytest.approx(row["flop_per_s"])


def test_calls_outside_the_power_log_lend_it_no_flops() -> None:
    b = Builder()
    shapes = b.intern("[64,64]f32 [64,64]f32")
    for i in range(10):
        b.add("op", "aten::mm", T0 + i * 100 * MS, T0 + i * 100 * MS + 50 * MS, thread=1, shapes=shapes)
    timeline = b.build()
    power = power_of([8.0] * 5)  # half of the calls
    attribute(timeline, power, start_ns=power.start_ns, end_ns=power.end_ns)
    found = roofline(timeline, by="kernel")
    assert [c.key for c in found.columns][:5] == ["name", "calls", "time_s", "share_pct", "flop_per_s"]
    assert "op" not in {c.key for c in found.columns}  # it is the name
    assert "A point is an operator" in drawn(found) and "no lines" in drawn(found)
    (row,) = found.rows
    assert row["flop_per_j"] == pytest.approx(row["flop_per_s"] / 8.0)


# -- a summary ------------------------------------------------------------------------------------------------------

rows = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["aten::mm", "aten::add", "aten::relu"]), "calls": st.integers(1, 50),
         "self_s": st.floats(0.0, 3.0), "time_s": st.floats(0.0, 9.0)}
    ), max_size=6,
)  # fmt: skip


@given(rows, st.floats(0.0, 4.0), st.floats(0.0, 12.0), st.floats(0.1, 60.0), st.booleans())
def test_rows_of_a_summary_and_the_rest_are_the_run(
    found: list[dict[str, Any]], traced_s: float, steps_s: float, imports_s: float, kernels: bool
) -> None:
    seconds = steps_s + imports_s
    run = RunTotals(energy_j=5.0 * seconds, time_s=seconds, since_j=8.0 * min(traced_s, seconds),
                since_s=min(traced_s, seconds))  # fmt: skip
    steps = {"name": "step_N", "calls": 40, "time_s": steps_s, "min_ns": 0}
    summary = {"traced_s": run.since_s, "kernels" if kernels else "ops": found, "regions": [steps]}
    said = from_summary(summary, run)
    assert said is not None
    spent = [*said.ops, *said.kernels]
    assert said.rest_j >= 0 and sum(r.energy_j for r in spent) + said.rest_j == pytest.approx(run.energy_j)
    if steps_s >= run.since_s and steps_s > 0:
        assert sum(r.energy_j for r in spent) <= said.steps_j * (1 + 1e-9)  # imports are no operator's
    assert all(r.power_w is None or r.power_w <= 8.0 * (1 + 1e-9) for r in spent)
    assert (said.steps, said.whole_steps) == (40, 39) and said.regions == []


def test_a_summary_speaks_of_all_steps_though_it_saw_a_few() -> None:
    ops = [{"name": "aten::conv2d", "calls": 3, "time_s": 0.3, "self_s": 0.0},
           {"name": "aten::mkldnn_convolution", "calls": 3, "time_s": 0.3, "self_s": 0.15}]  # fmt: skip
    regions = [{"name": "step_N", "calls": 40, "time_s": 4.0, "min_ns": 5},
               {"name": "DataLoader", "calls": 3, "time_s": 0.03, "traced": True},
               {"name": "mine", "calls": 40, "time_s": 2.0, "traced": False}]  # fmt: skip
    run = RunTotals(energy_j=50.0, time_s=10.0, since_j=2.4, since_s=0.3)
    said = from_summary({"traced_s": 0.3, "ops": ops, "regions": regions}, run)
    assert said is not None and said.steps_j == pytest.approx(32.0)
    whole, inner = said.ops
    assert whole.energy_j == 0.0 and inner.energy_j == pytest.approx(16.0) and inner.calls == 40
    assert inner.power_w == pytest.approx(8.0) and inner.share == pytest.approx(0.32)
    loader, mine = said.regions
    assert loader.calls == mine.calls == 40 and mine.time_s == 2.0
    assert loader.time_s == pytest.approx(0.4)


def test_a_summary_without_times_of_operators_in_themselves_gives_them_no_joules() -> None:
    ops = [{"name": "aten::conv2d", "calls": 3, "time_s": 0.3}]
    steps = [{"name": "step_N", "calls": 3, "time_s": 0.3}]
    run = RunTotals(energy_j=5.0, time_s=1.0, since_j=2.0, since_s=0.3)
    said = from_summary({"traced_s": 0.3, "ops": ops, "regions": steps}, run)
    assert said is not None and said.ops == [] and said.note == OLDER
    assert from_summary(None, run) is None and from_summary({"traced_s": 1.0}, run) is None


@given(programs())
def test_a_summary_keeps_the_time_of_operators_in_themselves(timeline: Timeline) -> None:
    kept = RunSummary()
    kept.add_window(timeline, T0, timeline.end_ns)
    kept.add_row("region", "mine", 5)
    data = kept.to_json()
    outer_s = next(r["time_s"] for r in data["ops"] if r["name"] == "aten::matmul")  # everything else is inside these
    assert sum(r["self_s"] for r in data["ops"]) == pytest.approx(outer_s)
    assert all(0 <= r["self_s"] <= r["time_s"] * (1 + 1e-9) for r in data["ops"])
    assert {r["name"]: r["traced"] for r in data["regions"]} == {"mine": False} | {
        timeline.name(int(r)): True for r in timeline.rows("region")
    }
    run = RunTotals(energy_j=100.0, time_s=20.0, since_j=1.0, since_s=0.2)
    said = from_summary(data, run)
    assert said is not None and sum(r.energy_j for r in said.ops) + said.rest_j == pytest.approx(100.0)
