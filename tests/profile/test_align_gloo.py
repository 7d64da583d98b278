"""Ranks over gloo: their clocks from collectives that ran on the host, within what must come before what."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from gloo_ranks import GlooRanks
from tessera.profile.ranks import merge
from tessera.profile.ranks.align import align
from tessera.profile.ranks.align_gloo import HOST_BIAS_NS, Bounds, host_lines
from tessera.timeline import kineto
from tessera.timeline.columns import Builder, Timeline

MS, SECOND = 1_000_000, 1_000_000_000
T0 = 1_790_000_000 * SECOND
OFFSET_NS, DRIFT_PPM = 3 * MS, 20.0
STEPS = 25
# Stamps of torch.profiler are of the CPU's counter, brought to the wall clock by each process for itself:
# microseconds apart, and some more where it is preempted at that moment.
STAMPS_NS = 500_000


def trace_steps(rank: int, folder: str) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    dist.barrier()
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        for step in range(STEPS):
            time.sleep(0.004 if rank == step % 2 else 0.001)  # late in turn
            dist.all_reduce(torch.ones(1000))
            dist.broadcast(torch.ones(10), 0)  # says nothing: its root need not wait
            dist.barrier()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json")


def shifted(path: Path) -> None:
    """The trace as a host would have written it whose clock is 3 ms ahead and fast by 20 ppm."""
    data = json.loads(path.read_text())
    data["host_name"] = "another"
    first = min(e["ts"] for e in data["traceEvents"] if e["ph"] == "X")
    for event in data["traceEvents"]:
        if "ts" in event:
            event["ts"] += OFFSET_NS * 1e-3 + (event["ts"] - first) * DRIFT_PPM * 1e-6
    path.write_text(json.dumps(data))


def test_two_processes_over_gloo_are_brought_to_one_clock(tmp_path: Path) -> None:
    with GlooRanks(2) as ranks:
        ranks.run(trace_steps, str(tmp_path))
    paths = [tmp_path / f"rank{r}.json" for r in (0, 1)]
    shifted(paths[1])
    merged = merge(paths)
    found = merged.offsets[1]
    assert found.source == "collectives" and found.matched == 2 * STEPS  # broadcasts are not among them
    numbers: dict[Any, int] = {}
    [a], [b] = (host_lines(kineto.read(p), numbers).values() for p in paths)
    both = a.together
    assert len(a.rows) == len(b.rows) == 3 * STEPS and np.array_equal(a.what, b.what)
    # What the data allow, however busy this machine is: at each collective the offset lies between these.
    bounds = Bounds.of(b.starts[both], b.ends[both], a.starts[both], a.ends[both])
    given_ns = found.apply(b.ends[both]) - b.ends[both]
    true_ns = -OFFSET_NS - (b.ends[both] - b.ends[0]) * DRIFT_PPM * 1e-6
    width_ns = bounds.high - bounds.low
    assert np.all(width_ns > 0)
    assert np.all(np.abs(given_ns - true_ns) <= width_ns + STAMPS_NS)
    assert found.error_ns is not None and found.error_ns <= np.max(width_ns) + HOST_BIAS_NS + STAMPS_NS


# -- Synthetic: what a quiet machine would show ---------------------------------------------------------------------


def rank_timeline(
    rank: int, *, steps: int = 100, step_s: float = 0.05, offset_ns: float = 0.0, drift_ppm: float = 0.0,
    late_ms: tuple[float, float] = (2.0, 2.0), scatter_us: float = 150.0, groups: Any = ((0, 1),), seed: int = 1,
) -> Timeline:  # fmt: skip
    """All-reduces of one of two ranks, by its own clock; each is late by up to `late_ms` of its own."""
    shared, own = np.random.default_rng(seed), np.random.default_rng(100 + 7 * rank + seed)
    builder = Builder()
    shapes = builder.intern("[1000]f32")

    def local(t: float) -> int:
        return T0 + round(t * 1e9 + offset_ns + t * drift_ppm * 1e3)

    for step in range(steps):
        begin = step_s * (step + shared.uniform(0.0, 0.3))
        starts = [begin + 1e-3 * late_ms[r] * shared.uniform() for r in (0, 1)]
        end = max(starts) + 100e-6 + 1e-6 * abs(own.normal(0.0, scatter_us))
        builder.add("op", "gloo:all_reduce", local(starts[rank]), local(end), thread=7, shapes=shapes)
    timeline = builder.build()
    timeline.rank = rank
    config = [{"pg_name": str(i), "backend_config": "cpu:gloo", "ranks": list(g)} for i, g in enumerate(groups)]
    timeline.meta["distributedInfo"] = {"pg_config": config}
    return timeline


@pytest.mark.parametrize("seed", range(5))
def test_offset_and_drift_of_a_long_run(seed: int) -> None:
    """Over 100 s the 20 ppm are 2 ms: more than the ends scatter."""
    args: dict[str, Any] = {"steps": 500, "step_s": 0.2, "seed": seed}
    slow = rank_timeline(1, offset_ns=OFFSET_NS, drift_ppm=DRIFT_PPM, **args)
    found = align([rank_timeline(0, **args), slow])[1]
    assert found.drift_ppm == pytest.approx(-DRIFT_PPM, abs=1.0) and found.error_ns is not None
    for t in (0.0, 50.0, 100.0):
        own = np.array([T0 + round(t * 1e9 + OFFSET_NS + t * DRIFT_PPM * 1e3)])
        assert abs(int(found.apply(own)[0]) - T0 - round(t * 1e9)) <= found.error_ns <= 0.3 * MS
    assert any("ahead of" in n for n in found.notes) and any("drifts" in n for n in found.notes)


def test_a_short_run_has_an_offset_and_no_drift() -> None:
    """Over a second 20 ppm are 20 us: the ends scatter by more, and no drift is made of that."""
    args: dict[str, Any] = {"steps": 20}
    found = align([rank_timeline(0, **args), rank_timeline(1, offset_ns=OFFSET_NS, drift_ppm=DRIFT_PPM, **args)])[1]
    assert found.drift_ppm == 0.0 and found.offset_ns == pytest.approx(-OFFSET_NS, abs=found.error_ns)


def test_a_rank_that_is_always_last_is_known_by_the_ends_alone() -> None:
    """Its lateness is the width of one side of the bounds; the half-width stays that of the ends."""
    args: dict[str, Any] = {"late_ms": (0.0, 8.0)}
    found = align([rank_timeline(0, **args), rank_timeline(1, offset_ns=OFFSET_NS, **args)])[1]
    assert found.offset_ns == pytest.approx(-OFFSET_NS, abs=0.2 * MS)
    assert found.error_ns is not None and found.error_ns < 0.3 * MS


def test_ends_that_mislead_are_held_by_the_bounds() -> None:
    """Four times of five a thread is woken a millisecond late: a line through ends is off, the fifth bounds it."""
    a, b = rank_timeline(0, scatter_us=10.0), rank_timeline(1, scatter_us=10.0)
    a.columns["end_ns"] = a["end_ns"] + np.where(np.arange(len(a)) % 5 > 0, MS, 0)
    assert np.median(a["end_ns"] - b["end_ns"]) > 0.9 * MS
    found = align([a, b])[1]
    assert abs(found.offset_ns) < 0.3 * MS


def test_groups_that_cannot_be_told_apart_are_not_matched() -> None:
    """A row does not say its group: with two sets of members, nothing is concluded."""
    several = ((0, 1), (0, 1, 2))
    found = align([rank_timeline(0, groups=several), rank_timeline(1, groups=several)])[1]
    assert found.source == "none" and found.error_ns is None
    again = ((0, 1), (0, 1))
    assert align([rank_timeline(0, groups=again), rank_timeline(1, groups=again)])[1].source == "collectives"


def test_two_in_flight_may_begin_in_either_order() -> None:
    """Two threads take buckets of other sizes at once: their order is that in which the program asked for them."""
    sides = []
    for rank in (0, 1):
        builder, own = Builder(), np.random.default_rng(rank)
        asked, big, small = (builder.intern(s) for s in ("([10])", "[4000]f32", "[10]f32"))
        calls = {big: builder.intern("([4000])"), small: asked}
        for step in range(40):
            now = T0 + round(step * 50 * MS + np.random.default_rng(step).uniform(0.0, 9.0) * MS)
            first = int(own.integers(0, 2))  # which of the two begins first
            for place, size in enumerate((big, small)):
                builder.add("op", "c10d::allreduce_", now + place * 1000, now + place * 1000 + 500, thread=1,
                            shapes=calls[size])  # fmt: skip
                start = now + 30_000 + (1000 if place == first else 0)
                builder.add("op", "gloo:all_reduce", start, start + 2 * MS, thread=7 + place, shapes=size)
        timeline = builder.build()
        timeline.rank = rank
        sides.append(timeline)
    numbers: dict[Any, int] = {}
    [a], [b] = (host_lines(t, numbers).values() for t in sides)
    assert np.array_equal(a.what, b.what) and not np.array_equal(np.argsort(a.starts), np.argsort(b.starts))
    assert align(sides)[1].matched == 80


@settings(max_examples=20, deadline=None)
@given(
    offset_ns=st.integers(-(10**15), 10**15), drift_ppm=st.floats(-80.0, 80.0), seed=st.integers(0, 50),
    late=st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 5.0)),
)  # fmt: skip
def test_the_line_never_breaks_causality(
    offset_ns: int, drift_ppm: float, seed: int, late: tuple[float, float]
) -> None:
    args: dict[str, Any] = {"steps": 30, "seed": seed, "late_ms": late}
    a, b = rank_timeline(0, **args), rank_timeline(1, offset_ns=offset_ns, drift_ppm=drift_ppm, **args)
    found = align([a, b])[1]
    starts, ends = found.apply(b["start_ns"]), found.apply(b["end_ns"])
    slack = 1000  # a microsecond, of float times within the run
    assert np.all(a["end_ns"] >= starts - slack) and np.all(ends >= a["start_ns"] - slack)
