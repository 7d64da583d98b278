"""Every analysis against a plain computation nanosecond by nanosecond, and on real recordings."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import sys
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera import analyze
from tessera.analyze.collectives import bus_factor, sum_by_step
from tessera.analyze.critical_path import BETWEEN, PathWalk
from tessera.analyze.result import Result, ResultColumn
from tessera.analyze.stream_waits import StreamWaits
from tessera.attribute.table import EnergyTable
from tessera.cli.analyze import command
from tessera.errors import ArgumentError, RecordingError
from tessera.joules import DomainSamples as Samples
from tessera.notes import Note
from tessera.profile.ranks.collectives import measure_overlap
from tessera.profile.ranks.merge import merge
from tessera.recording import Facts, Recording
from tessera.report import analysis
from tessera.schema import Domain
from tessera.timeline import Builder, Launch, Timeline, kineto
from tessera.trace import PowerTrace

from places import TESTS

RANKS = TESTS / "data" / "ranks"
SHARED = TESTS.parents[1] / "shared" / "h200"
GPT2 = SHARED / "gpt2_train.kineto.json.gz"
needs_gpt2 = pytest.mark.skipif(not GPT2.exists(), reason="the shared recording is not here")
T0 = 1_790_000_000_000_000_000
GAP = 6  # ns: the longest kernel gap in these tests
BREAKDOWN = importlib.import_module("tessera.analyze.breakdown")  # the attribute of the package is the function
SILENT = 15

sys.path.insert(0, str(TESTS.parent / "benchmarks" / "fuzz"))

# -- Random timelines -----------------------------------------------------------------------------------------------

KIND = {"compute": "kernel", "communication": "collective", "copies": "memcpy"}
ROW = st.fixed_dictionaries(
    {
        "sort": st.sampled_from(["kernel", "kernel", "collective", "memcpy", "memset"]), "device": st.integers(0, 1),
        "name": st.sampled_from("abc"), "start": st.integers(0, 150), "lasts": st.integers(0, 25),
        "kind": st.integers(0, 2), "bytes": st.integers(-1, 1000),
        "call": st.none() | st.tuples(st.integers(0, 150), st.integers(0, 20), st.integers(1, 2)),
    }
)  # fmt: skip
HOST = st.tuples(
    st.sampled_from(["aten::add", "cudaStreamSynchronize", "enumerate(DataLoader)#x", "aten::mul"]),
    st.integers(0, 170), st.integers(0, 30), st.integers(1, 2),
)  # fmt: skip
COLLECTIVES = ("all_reduce", "all_gather", None)
COPIES = (("HtoD", True), ("HtoD", False), ("DtoD", None))


def made(rows: list[dict[str, Any]], host: list[Any]) -> Timeline:
    b = Builder()
    for i, r in enumerate(rows):
        launch = -1
        if r["sort"] == "collective":
            launch = b.intern_launch(
                Launch(
                    collective_type=COLLECTIVES[r["kind"]],
                    collective_bytes=r["bytes"] if r["bytes"] > 0 else None,
                    group_size=4,
                )
            )
        elif r["sort"] == "memcpy":
            launch = b.intern_launch(Launch(memcpy_dir=COPIES[r["kind"]][0], pinned=COPIES[r["kind"]][1]))
        start = T0 + r["start"]
        b.add(
            r["sort"], r["name"], start, start + r["lasts"], device=r["device"], stream=7 + r["kind"],
            correlation=i + 1, launch=launch, bytes=r["bytes"],
        )  # fmt: skip
        if r["call"]:
            at, lasts, thread = r["call"]
            b.add("runtime", "cudaLaunchKernel", T0 + at, T0 + at + lasts, thread=thread, correlation=i + 1)
    for name, at, lasts, thread in host:
        kind = "runtime" if name.startswith("cuda") else "op" if name.startswith("aten") else "region"
        b.add(kind, name, T0 + at, T0 + at + lasts, thread=thread)
    return b.build()


TIMELINE = st.tuples(st.lists(ROW, min_size=1, max_size=14), st.lists(HOST, max_size=10))
SORT = {"kernel": "compute", "collective": "communication", "memcpy": "copies", "memset": "copies"}


def running(rows: list[dict[str, Any]], device: int, t: int) -> set[str]:
    return {SORT[r["sort"]] for r in rows if r["device"] == device and r["start"] <= t < r["start"] + r["lasts"]}


def part_of(rows: list[dict[str, Any]], host: list[Any], device: int, t: int) -> str:
    """Which part a nanosecond belongs to, by looking at everything."""
    now = running(rows, device, t)
    if now:
        return " + ".join(s for s in ("compute", "communication", "copies") if s in now)
    mine = [r for r in rows if r["device"] == device]
    ended = [r["start"] + r["lasts"] for r in mine if r["lasts"] and r["start"] <= t]
    gap_start = max(ended) if ended else min(r["start"] for r in mine)
    after = [r for r in mine if r["start"] > t and r["lasts"]]
    gap_end = min(r["start"] for r in after) if after else max(r["start"] + r["lasts"] for r in mine)
    follows = next(r for r in mine if r["start"] == gap_end)
    if follows["call"] is None:
        return "idle: kernel gap" if gap_end - gap_start <= GAP else "idle: waiting"
    at, lasts, thread = follows["call"]
    if at + lasts <= gap_start:
        return "idle: kernel gap" if gap_end - gap_start <= GAP else "idle: waiting"
    if t >= (at + lasts if gap_end - (at + lasts) > GAP else gap_end):
        return "idle: waiting"
    waits = [h for h in host if ("Sync" in h[0] or "DataLoader" in h[0]) and h[3] == thread]
    if any(h[1] <= t < h[1] + h[2] for h in waits):
        return "idle: waiting"
    active = [(h[1], h[1] + h[2]) for h in host if "DataLoader" not in h[0]]
    active += [(r["call"][0], r["call"][0] + r["call"][1]) for r in rows if r["call"]]
    before, later = [e for s, e in active if s <= t], [s for s, _ in active if s > t]
    if before and later and max(before) <= t and min(later) - max(before) > SILENT:
        return "idle: waiting"
    return "idle: host-bound"


@given(TIMELINE)
@settings(max_examples=300, deadline=None)
def test_the_parts_of_a_breakdown_are_those_of_every_nanosecond(drawn: Any) -> None:
    rows, host = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BREAKDOWN, "SILENT_NS", SILENT)
        patch.setattr(BREAKDOWN, "_BLOCK", 4)
        found = analyze.breakdown(trace=made(rows, host), kernel_gap_s=GAP * 1e-9)
    for device in {r["device"] for r in rows}:
        mine = [r for r in rows if r["device"] == device]
        first, last = min(r["start"] for r in mine), max(r["start"] + r["lasts"] for r in mine)
        expected: dict[str, int] = defaultdict(int)
        for t in range(first, last):
            expected[part_of(rows, host, device, t)] += 1
        got = {r["part"]: r["ns"] for r in found.rows if r["device"] == device}
        assert got == dict(expected)
        assert sum(got.values()) == last - first
    for part in {r["part"] for r in found.rows if r["where"] == "all"}:
        total = sum(r["ns"] for r in found.rows if r["part"] == part and r["where"] != "all")
        assert total == next(r["ns"] for r in found.rows if r["part"] == part and r["where"] == "all")


@given(TIMELINE)
@settings(max_examples=200, deadline=None)
def test_overlap_is_that_of_every_nanosecond(drawn: Any) -> None:
    rows, host = drawn
    found = {(r["device"], r["what"]): r for r in analyze.overlap(made(rows, host)).rows}
    want: dict[tuple[int, str], list[int]] = {}
    for device in {r["device"] for r in rows}:
        for r in rows:
            if r["device"] == device and r["sort"] != "kernel":
                what = {
                    "collective": COLLECTIVES[r["kind"]] or "other collective",
                    "memset": "memset",
                    "memcpy": f"copies {COPIES[r['kind']][0]}",
                }[r["sort"]]
                for name in (what,) if r["sort"] == "memset" else (SORT[r["sort"]], what):  # which copies nothing
                    want.setdefault((device, name), [0, 0])
        for t in range(180):
            at = [r for r in rows if r["device"] == device and r["start"] <= t < r["start"] + r["lasts"]]
            names = {SORT[r["sort"]] for r in at if r["sort"] != "memset"} | {
                COLLECTIVES[r["kind"]] or "other collective" for r in at if r["sort"] == "collective"
            }
            names |= {"memset" for r in at if r["sort"] == "memset"} | {
                f"copies {COPIES[r['kind']][0]}" for r in at if r["sort"] == "memcpy"
            }
            for name in names - {"compute"}:
                want[device, name][0] += 1
                want[device, name][1] += "compute" in names
    assert {k: [r["ns"], round(r["overlapped_s"] * 1e9)] for k, r in found.items()} == want


@given(TIMELINE)
@settings(max_examples=200, deadline=None)
def test_kernels_are_summed_as_by_hand(drawn: Any) -> None:
    rows, host = drawn
    found = {(r["kind"], r["name"]): r for r in analyze.kernels(made(rows, host)).rows}
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    own: dict[tuple[str, str], Fraction] = defaultdict(Fraction)
    for r in rows:
        groups[r["sort"], r["name"]].append(r["lasts"])
    for device in (0, 1):
        for t in range(180):
            at = [r for r in rows if r["device"] == device and r["start"] <= t < r["start"] + r["lasts"]]
            for r in at:
                own[r["sort"], r["name"]] += Fraction(1, len(at))
    assert set(found) == set(groups)
    for key, lasts in groups.items():
        got, ranked = found[key], sorted(lasts)
        assert (got["calls"], got["total_ns"]) == (len(lasts), sum(lasts))
        assert round(got["min_s"] * 1e9) == ranked[0] and round(got["max_s"] * 1e9) == ranked[-1]
        for percent in (50, 99):  # the smallest that so many percent do not exceed
            rank = next(x for x in ranked if 100 * sum(y <= x for y in ranked) >= percent * len(ranked))
            assert round(got[f"p{percent}_s"] * 1e9) == rank
        assert got["self_s"] == pytest.approx(float(own[key]) * 1e-9, abs=1e-15)


@given(TIMELINE)
@settings(max_examples=200, deadline=None)
def test_copies_are_summed_as_by_hand(drawn: Any) -> None:
    rows, host = drawn
    found = {(r["direction"], r["pinned"]): r for r in analyze.memcpy(made(rows, host)).rows}
    want: dict[Any, list[int]] = {}
    for r in rows:
        if r["sort"] in ("memcpy", "memset"):
            line = want.setdefault(COPIES[r["kind"]] if r["sort"] == "memcpy" else ("memset", None), [0, 0, 0, 0])
            beside = sum("compute" in running(rows, r["device"], t) for t in range(r["start"], r["start"] + r["lasts"]))
            for i, n in enumerate((1, max(r["bytes"], 0), r["lasts"], beside)):
                line[i] += n
    got = {k: [r["calls"], r["bytes"] or 0, r["ns"], r["overlapped_ns"]] for k, r in found.items()}
    assert got == want


@given(TIMELINE)
@settings(max_examples=200, deadline=None)
def test_the_overlap_of_each_collective_is_that_of_every_nanosecond(drawn: Any) -> None:
    rows, host = drawn
    found = analyze.collectives(made(rows, host), min_bytes=0)
    want = []
    for r in rows:
        if r["sort"] == "collective":
            beside = sum("compute" in running(rows, r["device"], t) for t in range(r["start"], r["start"] + r["lasts"]))
            size = r["bytes"] if r["bytes"] > 0 else None
            want.append((r["start"], r["lasts"], size, 100.0 * beside / r["lasts"] if r["lasts"] else None))
    first = min([r["start"] for r in rows] + [r["call"][0] for r in rows if r["call"]] + [h[1] for h in host])
    got = [(round(r["start_s"] * 1e9) + first, r["ns"], r["bytes"], r["overlap_pct"]) for r in found.rows]
    assert sorted(map(repr, got)) == sorted(map(repr, want))
    assert found.facts["count"] == len(want)


@given(TIMELINE, st.lists(st.tuples(st.integers(0, 150), st.integers(1, 60)), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_steps_tile_the_span_of_a_device(drawn: Any, steps: list[tuple[int, int]]) -> None:
    rows, host = drawn
    timeline = made(rows, host)
    b = Builder()
    for i, (at, lasts) in enumerate(steps):
        b.add("region", f"ProfilerStep#{i}", T0 + at, T0 + at + lasts, thread=1)
    with_steps = merged(timeline, b.build())
    whole = analyze.breakdown(with_steps)
    found = analyze.breakdown(with_steps, by="step")
    for device in {r["device"] for r in rows}:
        for part in {r["part"] for r in whole.rows}:
            total = sum(r["ns"] for r in found.rows if r["device"] == device and r["part"] == part)
            assert total == sum(r["ns"] for r in whole.rows if r["device"] == device and r["part"] == part)


def merged(a: Timeline, b: Timeline) -> Timeline:
    """Rows of two timelines as one."""
    columns = {c: np.concatenate((a[c], b[c])) for c in a.columns}
    columns["name"] = np.concatenate((a["name"], b["name"] + len(a.names)))
    return Timeline(columns=columns, names=[*a.names, *b.names], launches=a.launches)


@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 500), st.integers(0, 10**6)), max_size=30))
def test_memory_is_the_largest_counter(points: list[tuple[int, int, int]]) -> None:
    b = Builder()
    for device, at, size in points:
        b.add("counter", "memory allocated", T0 + at, T0 + at, value=float(size), device=device)
    found = {(-1 if r["device"] is None else r["device"]): r for r in analyze.memory(b.build()).rows}
    assert set(found) == {d for d, _, _ in points}
    for device, row in found.items():
        own = sorted((at, i, size) for i, (d, at, size) in enumerate(points) if d == device)
        assert row["peak_bytes"] == max(s for *_, s in own) and row["last_bytes"] == own[-1][2]
        if own[-1][0] > own[0][0]:
            area = sum(a[2] * (b[0] - a[0]) for a, b in itertools.pairwise(own))
            assert row["mean_bytes"] == pytest.approx(area / (own[-1][0] - own[0][0]))


# -- The critical path ----------------------------------------------------------------------------------------------

STEP = st.tuples(
    st.sampled_from(["launch", "launch", "work", "sync"]), st.integers(0, 1), st.integers(1, 40), st.integers(1, 60)
)


@given(st.lists(STEP, min_size=1, max_size=25))
@settings(max_examples=400, deadline=None)
def test_the_critical_path_is_that_of_a_simulated_program(steps: list[Any]) -> None:
    """A program is run forwards, each time carrying what it is made of; the analysis walks it backwards."""
    b = Builder()
    now = (0, 0, 0)  # when, of which on the host, of which on the device
    streams: dict[int, tuple[int, int, int]] = {}
    correlation = 0
    for what, stream, cost, lasts in steps:
        begin = now[0]
        if what == "work":
            now = (begin + cost, now[1] + cost, now[2])
            b.add("op", "aten::work", T0 + begin, T0 + now[0], thread=1)
        elif what == "launch":
            correlation += 1
            now = (begin + cost, now[1] + cost, now[2])
            b.add("runtime", "cudaLaunchKernel", T0 + begin, T0 + now[0], thread=1, correlation=correlation)
            ready = streams.get(stream, (-1, 0, 0))
            ready = ready if ready[0] >= now[0] else now
            streams[stream] = (ready[0] + lasts, ready[1], ready[2] + lasts)
            b.add("kernel", "k", T0 + ready[0], T0 + ready[0] + lasts, device=0, stream=stream, correlation=correlation)
        else:
            done = max(streams.values(), default=(-1, 0, 0))
            done = done if done[0] > begin else now
            now = (done[0] + cost, done[1] + cost, done[2])
            b.add("runtime", "cudaDeviceSynchronize", T0 + begin, T0 + now[0], thread=1)
    end = max([now, *streams.values()])
    if [s for s in streams.values() if s[0] == end[0]] and (
        now[0] == end[0] or sum(s[0] == end[0] for s in streams.values()) > 1
    ):
        return  # two chains end at once: either is right
    if len({s[0] for s in streams.values()}) < len(streams) and any(s[0] == "sync" for s in steps):
        return
    found = analyze.critical_path(b.build())
    assert round(found.facts["length_s"] * 1e9) == end[0]
    assert round(found.facts["device_s"] * 1e9) == end[2]
    assert round(found.facts["host_s"] * 1e9) == end[1]
    assert sum(r["ns"] for r in found.rows) == end[0]


@given(TIMELINE)
@settings(max_examples=200, deadline=None)
def test_a_critical_path_has_no_holes(drawn: Any) -> None:
    rows, host = drawn
    timeline = made(rows, host)
    segments = PathWalk(timeline, {}, StreamWaits(timeline)).walk()
    for a, b in itertools.pairwise(segments):
        assert a[1] == b[0] and a[0] < a[1]
    device = timeline.device_rows
    for start, end, on, _, name, _ in segments:
        if on == "device":
            held = [r for r in device.tolist() if timeline.name(r) == name and timeline["start_ns"][r] <= start]
            assert any(timeline["end_ns"][r] >= start for r in held) and end > start


def test_a_path_over_two_threads_follows_who_woke_whom() -> None:
    b = Builder()
    b.add("op", "forward", T0, T0 + 100_000, thread=1)
    b.add("op", "backward", T0 + 101_000, T0 + 300_000, thread=2)
    b.add("op", "optimizer", T0 + 302_000, T0 + 400_000, thread=1)
    found = {r["name"]: r["ns"] for r in analyze.critical_path(b.build()).rows}
    assert found == {"forward": 100_000, "backward": 199_000, "optimizer": 98_000, BETWEEN: 3_000}


# -- Ranks ----------------------------------------------------------------------------------------------------------


def kineto_of(rank: int, clock_us: float, late_us: float) -> dict[str, Any]:
    """Ten steps: a kernel, then an all-reduce of 128 MiB in which all end together; rank 1 comes late to it."""
    rng = random.Random(7)
    events = []
    for i in range(40):
        at = 1000.0 + 5000 * i + rng.uniform(0, 500)
        ready = at + 900 + max(late_us, 0)
        mine = at + 900 + (late_us if rank == 1 else 0.0)
        comm = {"Collective name": "allreduce", "In msg nelems": 1 << 25, "Out msg nelems": 1 << 25, "dtype": "Float",
                "Group size": 2, "Process Group Name": "0", "device": 0, "stream": 20}  # fmt: skip
        for cat, name, tid, ts, dur, args in (
            ("kernel", "gemm", 7, at, mine - at, {"device": 0, "stream": 7}),
            ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING", 20, mine, ready + 1000 - mine, comm),
            ("kernel", "other", 7, ready + 500, 250.0, {"device": 0, "stream": 7}),
        ):
            events.append(
                {
                    "ph": "X",
                    "cat": cat,
                    "name": name,
                    "pid": 0,
                    "tid": tid,
                    "ts": ts + clock_us,
                    "dur": dur,
                    "args": args,
                }
            )
    return {"distributedInfo": {"rank": rank, "world_size": 2}, "host_name": f"node{rank}", "traceEvents": events,
            "baseTimeNanoseconds": 1790857026000000000}  # fmt: skip


def test_ranks_of_a_folder_have_skew_stragglers_and_bandwidth(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(kineto_of(rank, rank * 12_345.678, 300.0)))
    source = merge(tmp_path)
    assert source.timeline.meta["ranks"][1]["offset_ns"] == pytest.approx(-12_345_678, abs=10)
    found = analyze.collectives(source)
    assert len(found) == 40 and {r["straggler"] for r in found.rows} == {1}
    for row in found.rows:
        assert row["skew_s"] == pytest.approx(300e-6, abs=2e-8) and row["time_s"] == pytest.approx(1e-3, abs=2e-8)
        assert row["bytes"] == 128 << 20
        assert row["bytes_per_s"] == pytest.approx((128 << 20) / 1e-3, rel=1e-4)
        assert row["bus_bytes_per_s"] == row["bytes_per_s"]  # 2 (n - 1) / n of two ranks
        assert row["overlap_pct"] == pytest.approx(25.0, abs=0.01) and row["path"] == "between nodes"
    assert found.facts["by_kind"]["all_reduce"]["count"] == 40
    assert found.facts["across_ranks"]["stragglers"][1]["times"] == 40
    same = analyze.collectives(tmp_path)
    assert [r["ns"] for r in same.rows] == [r["ns"] for r in found.rows]
    assert not analyze.collectives(source, min_bytes=1 << 30).rows
    path = analyze.critical_path(source)
    assert path.facts["length_s"] <= path.facts["traced_s"] <= path.facts["recorded_s"]
    parts = analyze.breakdown(source)
    assert {r["where"] for r in parts.rows} == {"rank 0 GPU 0", "rank 1 GPU 0", "all"}


def test_a_critical_path_goes_on_at_the_rank_that_came_last(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(kineto_of(rank, 0.0, 2000.0)))
    found = analyze.critical_path(merge(tmp_path))
    moving = next(r["ns"] for r in found.rows if r["name"].startswith("nccl"))
    assert moving == pytest.approx(40 * 1e6, rel=0.06)  # what the others waited is not on the path


@pytest.mark.parametrize(
    ("kind", "ranks", "factor"),
    [("all_reduce", 8, 1.75), ("all_gather", 4, 0.75), ("reduce_scatter", 2, 0.5), ("all_to_all", 8, 0.875),
     ("broadcast", 8, 1.0), ("reduce", 8, 1.0), ("send", 2, 1.0), ("all_reduce", 1, None), (None, 8, None)],
)  # fmt: skip
def test_bus_bandwidth_has_the_factors_of_nccl_tests(kind: str | None, ranks: int, factor: float | None) -> None:
    assert bus_factor(kind, ranks) == factor


@pytest.mark.parametrize(
    ("groups", "ranks", "factor"), [([[0, 1]], 2, 1.0), ([[0, 1, 2, 3], [0, 1]], None, None), ([], None, None)]
)
def test_collectives_of_an_unknown_group_have_no_bus_bandwidth(groups, ranks, factor) -> None:
    b = Builder()
    b.add("op", "gloo:all_reduce", 0, 1_000_000, thread=7, shapes=b.intern("[250]f32"))
    b.meta["distributedInfo"] = {"world_size": 4, "pg_config": [{"backend_config": "gloo", "ranks": g} for g in groups]}
    (row,) = analyze.collectives(b.build()).rows
    assert (row["bytes"], row["ranks"]) == (1000, ranks)
    assert row["bus_bytes_per_s"] == (None if factor is None else pytest.approx(factor * row["bytes_per_s"]))


def test_two_gloo_processes_as_they_were_recorded() -> None:
    """Two processes on one CPU, 4 steps of 3 all-reduces, an all-gather, a barrier; rank 1 sleeps 4 ms a step."""
    found = analyze.collectives(RANKS, min_bytes=0)
    by_group = {r["name"]: r for r in found.facts["by_group"]}
    assert {k: v["count"] for k, v in by_group.items()} == {
        "AllGather[0, 1]": 1,
        "AllReduce[0, 1]": 12,
        "Barrier[0, 1]": 1,
    }
    assert {tuple(r["recorded_by"]) for r in found.rows} == {(0, 1)}
    # Of the three all-reduces of a step, rank 1 sleeps before the first.
    late = [r for r in found.rows if r["straggler"] == 1 and r["skew_s"] > 0.003]
    assert len(late) == 4 and by_group["AllReduce[0, 1]"]["path"] == "within a node"
    memory = analyze.memory(RANKS)
    assert [r["where"] for r in memory.rows] == ["rank 0 host", "rank 1 host"]
    assert all(r["peak_bytes"] > 100_000 and r["peak_op"] for r in memory.rows)
    path = analyze.critical_path(RANKS / "rank0.json.gz")
    assert path.facts["host_pct"] == 100.0 and path.rows[0]["name"] == "gloo:all_reduce"
    parts = analyze.breakdown(RANKS)
    assert not parts.rows and "nothing ran on a GPU" in parts.missing["device"]
    for kind in ("overlap", "kernels", "memcpy"):
        assert getattr(analyze, kind)(RANKS).missing


# -- The recording of an H200 ---------------------------------------------------------------------------------------


@needs_gpt2
def test_the_joules_of_gpt2_are_conserved() -> None:
    power = json.loads((SHARED / "gpt2_train.power.json").read_text())
    times, milliwatts = (np.array(v) for v in zip(*power["samples_mw"], strict=True))
    domain = Domain(name="gpu0", source="nvml-samples", resolution_s=0.02)
    log = PowerTrace(
        {"gpu0": Samples.of(domain, times * 1000, milliwatts / 1e3)},
        start_ns=int(times[0]) * 1000, end_ns=int(times[-1]) * 1000,
    )  # fmt: skip
    source = Recording(kineto.read(GPT2), log)
    parts = analyze.breakdown(source)
    busy_j = sum(r["energy_j"] for r in parts.rows if not r["part"].startswith(("idle", "outside")))
    assert busy_j == pytest.approx(parts.facts["energy_j"] - parts.facts["idle_j"], rel=1e-9)
    idle_j = sum(r["energy_j"] for r in parts.rows if r["part"].startswith("idle"))
    assert 0.0 < idle_j <= parts.facts["idle_j"] * (1 + 1e-9)
    for by in (None, "step"):
        rows = analyze.breakdown(source, by=by).rows
        assert sum(r["energy_j"] for r in rows) == pytest.approx(parts.facts["energy_j"], rel=1e-9)
    (outside,) = [r for r in parts.rows if r["part"].startswith("outside")]
    assert outside["time_s"] == pytest.approx(0.2303, abs=1e-3) and outside["pct"] is None
    (compute,) = [r for r in parts.rows if r["part"] == "compute"]
    assert compute["error_j"] <= parts.facts["error_j"] + parts.facts["idle_error_j"]
    assert all(r["error_j"] >= 0 and 50 < r["power_w"] < 800 for r in parts.rows)
    computed = {r["step"]: r for r in analyze.breakdown(source, by="step").rows if r["part"] == "compute"}
    for step in source.energy().steps:  # a step's compute is known as the step is, not as all of the run
        error_j = computed[step.name]["error_j"]
        assert error_j <= step.error_j + parts.facts["idle_error_j"] / parts.facts["idle_j"] * 0.2 * step.energy_j
        assert error_j < 0.2 * compute["error_j"]
    kernels = analyze.kernels(source, sort="energy")
    assert sum(r["energy_j"] for r in kernels.rows) == pytest.approx(busy_j, rel=1e-9)
    spent = [r["energy_j"] for r in kernels.rows]
    assert spent == sorted(spent, reverse=True) and " ± " in str(kernels)


@needs_gpt2
def test_gpt2_on_an_h200() -> None:
    parts = analyze.breakdown(GPT2)
    assert sum(r["ns"] for r in parts.rows) == round(parts.facts["span_s"] * 1e9) == 680440784
    assert {r["part"]: r["ns"] for r in parts.rows}["compute"] == 529209107
    steps = analyze.breakdown(GPT2, by="step")
    assert len({r["step"] for r in steps.rows}) == 12 and sum(r["ns"] for r in steps.rows) == 680440784
    kernels = analyze.kernels(GPT2)
    assert kernels.facts["calls"] == 11184 and kernels.rows[0]["calls"] == 12
    path = analyze.critical_path(GPT2)
    assert path.facts["length_s"] >= 0.680 and path.facts["host_pct"] > 50.0
    copies = analyze.memcpy(GPT2)
    assert [r["kind"] for r in copies.rows] == ["memset"] and copies.facts["calls"] == 0
    assert copies.facts["memsets"] == 1428 and "no copies" in copies.missing["copies"]
    assert [r["what"] for r in analyze.overlap(GPT2).rows] == ["memset"]
    assert "segments" in path.rows[0] and "on the host 506.6 ms (74.4%)" in str(path)
    assert "profile_memory=True" in analyze.memory(GPT2).missing["memory"]


# -- How results look -----------------------------------------------------------------------------------------------

RESULT = Result(
    kind="x",
    title="A <b>title</b>",
    columns=[
        ResultColumn(key="name", title="name"), ResultColumn(key="t_s", title="t", unit="s"),
        ResultColumn(key="energy_j", title="E", unit="J"), ResultColumn(key="error_j", title="±", unit="J"),
        ResultColumn(key="r", title="rate", unit="B/s"), ResultColumn(key="p", title="%", unit="%"),
    ],
    rows=[
        {"name": "<script>alert(1)</script>", "t_s": 0.0123, "energy_j": 4.1, "error_j": 0.2, "r": 3.2e12,
         "p": 12.0},
        {"name": "b\x1b[31m", "t_s": None, "energy_j": None, "r": 1e3, "p": 0.01},
    ],
    facts={"span_s": 1.5, "bus_bytes_per_s": 4e11, "devices": 2, "by_kind": {}},
    notes=["be <careful>"],
    missing={"y": "needs z"},
)  # fmt: skip


def test_text_has_units_notes_and_what_is_missing() -> None:
    said = str(RESULT)
    assert "12.3 ms" in said and "4.10 ± 0.20 J" in said and "3.2 TB/s" in said and "12.0%" in said and "<0.1%" in said
    assert "note  be <careful>" in said and "missing  y: needs z" in said
    assert "by_kind" not in said and "\x1b" not in said


def test_html_is_escaped_and_fetches_nothing() -> None:
    page = RESULT._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;" in page and "be &lt;careful&gt;" in page
    assert "http" not in page and "src=" not in page and "color:inherit" in page


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_numbers_are_never_cut(width: int) -> None:
    said = analysis.text(RESULT, width=width)
    assert all(len(line) <= width for line in said.splitlines())
    assert "12.3 ms" in said and "…m" not in said


@pytest.mark.parametrize(
    ("given", "unit", "said"),
    [(None, "s", "-"), (1.2e12, "FLOP/s", "1.2 TFLOP/s"), (0, "s", "0 s"), (float("nan"), "J", "-"),
     (True, "", "yes"), (12345, "", "12,345"), (64 << 20, "B", "64 MiB"), (-0.5, "s", "-500 ms"),
     ([0, 1], "", "0, 1"), (999.6, "B/s", "999.6 B/s"), (999.96, "B/s", "1 kB/s")],
)  # fmt: skip
def test_values_are_written_with_their_units(given: Any, unit: str, said: str) -> None:
    assert analysis.format_value(given, unit) == said


# -- The command ----------------------------------------------------------------------------------------------------


def run(*args: object) -> Any:
    return CliRunner().invoke(command, [str(a) for a in args])


def test_the_command_prints_json_and_tables() -> None:
    told = run("memory", RANKS, "--json")
    assert told.exit_code == 0 and json.loads(told.stdout)["kind"] == "memory"
    assert "rank 1 host" in run("memory", RANKS).stdout
    assert "gloo" in run("critical-path", RANKS / "rank0.json.gz", "--top", 3).stdout
    assert len(json.loads(run("collectives", RANKS, "--min-bytes", "0", "--json").stdout)["rows"]) == 14


@pytest.mark.parametrize(
    ("args", "said"),
    [(("brekdown", RANKS), "did you mean 'breakdown'"), (("memory", RANKS, "--sort", "time"), "no option --sort"),
     (("collectives", RANKS, "--min-bytes", "64 parsecs"), "unit"), (("memory", "nowhere.json"), "nowhere.json"),
     (("breakdown", RANKS, "--power", RANKS / "rank0.json.gz"), "give a CSV power log")],
)  # fmt: skip
def test_wrong_arguments_end_in_2_and_say_why(
    args: tuple[object, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from tessera.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(["analyze", *map(str, args)])
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_errors_name_the_options_of_the_command() -> None:
    told = run("kernels", RANKS / "rank0.json.gz", "--sort", "moon")
    assert isinstance(told.exception, ArgumentError) and told.exception.fix == "sort by 'time' or 'energy'"
    told = run("kernels", RANKS / "rank0.json.gz", "--sort", "energy")
    assert "--power power.csv" in str(told.exception) and "activities" not in str(told.exception)


def test_other_json_in_a_folder_of_ranks_is_skipped_and_named(tmp_path: Path) -> None:
    for file in RANKS.glob("*.json.gz"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"lr": 1e-4}))
    found = analyze.memory(tmp_path)
    assert len(found.rows) == 2 and any("skipped: config.json" in n for n in found.notes)
    (tmp_path / "rank1.json.gz").unlink()
    with pytest.raises(ArgumentError) as caught:
        merge(tmp_path)
    assert str(tmp_path) in caught.value.what and "config.json" in (caught.value.why or "")
    assert "rank0.json.gz" in (caught.value.fix or "")


def test_every_fact_shown_has_a_label() -> None:
    for kind, known in analysis.FACTS.items():
        facts = dict.fromkeys(known, 1.0) | {"raw_w2": 8153.0}
        said = " ".join(analysis.text(Result(kind=kind, title="t", columns=[], rows=[], facts=facts)).split())
        assert "raw" not in said and "w2" not in said and all(label in said for label in known.values())


@pytest.mark.parametrize("kind", ["breakdown", "kernels", "collectives", "overlap", "memcpy"])
def test_a_run_on_a_cpu_is_told_where_its_operators_are(kind: str) -> None:
    b = Builder()
    b.add("op", "aten::mm", 0, 1000, thread=1)
    source = Recording(b.build(), facts=Facts(name="cpu.tessera", kind="run", path=Path("cpu.tessera")))
    source._energy = EnergyTable(
        energy_j=47.0, error_j=1.0, idle_j=7.0, idle_error_j=1.0, time_s=1.0, busy_s=0.5, kernels=[]
    )  # fmt: skip
    found = getattr(analyze, kind)(source)
    assert list(found.missing.values()) == [
        "nothing ran on a GPU in this run: `tessera analyze critical_path cpu.tessera` shows where the time of the CPU "
        "went, `tessera report cpu.tessera --by ops` where the joules went"
    ]
    assert "47 J" not in str(found)


def test_a_breakdown_of_a_cpu_is_one_sentence() -> None:
    b = Builder()
    b.add("op", "aten::mm", 0, 1000, thread=1)
    notes = [Note("torch sees no accelerator", "no_accelerator"), "the file was cut"]
    facts = Facts(name="cpu.tessera", kind="run", path=Path("cpu.tessera"), notes=notes)
    source = Recording(b.build(), facts=facts)
    title, *said = str(analyze.breakdown(source)).splitlines()
    assert title == "Where the time of cpu.tessera went"
    assert " ".join(said) == f"{analyze.breakdown(source).missing['device']} note  the file was cut"
    shown = analysis.html(analyze.breakdown(source))
    assert "<b>device</b>" not in shown and "critical_path" in shown
    trace = analyze.breakdown(b.build()).missing["device"]
    assert "critical_path TRACE" in trace and "ProfilerActivity.CUDA" in trace
    assert analyze.critical_path(b.build()).rows  # what it says to run has an answer


@pytest.mark.parametrize("kind", ["breakdown", "kernels", "roofline", "critical_path", "stalls"])
def test_an_empty_trace_is_called_empty(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    path.write_text('{"traceEvents": []}')
    _, said = str(getattr(analyze, kind)(path)).split("\n", 1)
    assert said.replace("\n", " ").startswith("e.json is empty: it contains no event; record again")
    only_regions = Builder()
    only_regions.add("region", "step", 0, 1000, thread=1)
    assert "it has neither kernels nor operators" in str(getattr(analyze, kind)(only_regions.build()))


def test_wrong_values_say_what_is_right(tmp_path: Path) -> None:
    timeline = made([], [])
    for call in (
        lambda: analyze.breakdown(timeline, by="moon"),
        lambda: analyze.kernels(timeline, sort="x"),
        lambda: analyze.kernels(timeline, sort="energy"),
        lambda: analyze.collectives(timeline, min_bytes=-1),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.fix
    with pytest.raises(RecordingError):
        merge(tmp_path)
    b = Builder()
    b.add("kernel", "k", -(2**62), -(2**62) + 1, device=0)
    b.add("kernel", "k", 2**62, 2**62 + 1, device=0)
    with pytest.raises(RecordingError, match="years"):
        analyze.breakdown(b.build())


@pytest.mark.parametrize(
    "kind", ["breakdown", "overlap", "kernels", "critical_path", "collectives", "memcpy", "memory"]
)
def test_nothing_at_all_is_said_to_be_missing(kind: str) -> None:
    found = getattr(analyze, kind)(trace=Builder().build())
    assert not found.rows and found.missing and str(found) and found._repr_html_()


# -- Damaged traces -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_damaged_traces_end_in_a_result_or_our_own_error(first: int) -> None:
    import fuzz_traces

    for number in range(first, first + 125):  # `fuzz_traces.py 100000` tries the rest
        assert fuzz_traces.run(number) in ("result", "result with a note", "error"), number


def test_the_overlap_of_each_step_is_told() -> None:
    b, ms = Builder(), 1_000_000
    for step, computes in enumerate((0, 5, 10)):  # of the 10 ms in which bytes move
        at = T0 + step * 40 * ms
        b.add("region", f"ProfilerStep#{step}", at, at + 40 * ms, thread=1)
        b.add("op", "aten::mm", at, at + (20 + computes) * ms, thread=1)
        b.add("op", "gloo:all_reduce", at + 20 * ms, at + 30 * ms, thread=7, shapes=b.intern("[1000]f32"))
    timeline = b.build()
    steps = sum_by_step(timeline, [], measure_overlap(timeline, []))
    assert [s["step"] for s in steps] == [f"ProfilerStep#{n}" for n in range(3)]
    assert [s["overlap_pct"] for s in steps] == pytest.approx([0.0, 50.0, 100.0])
    assert all(s["calls"] == 1 and s["time_s"] == pytest.approx(0.01) for s in steps)
