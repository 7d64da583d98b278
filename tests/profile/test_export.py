from __future__ import annotations

import csv
import dataclasses
import gzip
import json
import math
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from recordings import with_table
from tessera.attribute.table import EnergyRow, EnergyTable
from tessera.cli.export import command
from tessera.errors import ArgumentError, MissingExtra, TesseraError
from tessera.profile.export import Chrome, Exporter, Otlp, Parquet, SummaryCsv, TensorBoard
from tessera.profile.export.chrome_rows import Overlap
from tessera.profile.export.summary import lines as summary_lines
from tessera.profile.runfile import RunFile, RunWriter
from tessera.record import CODE
from tessera.schema import Domain, Telemetry
from tessera.timeline import kineto
from tessera.timeline.columns import NONE, Builder, Launch, Timeline

T0 = 1_790_000_000_000_000_000
MS = 1_000_000
GEMM, NCCL = 'gemm<float, "x">', "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
COPY = "Memcpy HtoD (Pinned -> Device)"
GPU = Domain(name="gpu0", source="nvml-samples", resolution_s=0.02, lag_s=0.015, gain_error=0.02, label="NVIDIA H200")


def make_timeline() -> Timeline:
    """Two steps: an operator, its launch, a kernel; a copy under it; a collective half beside it; a graph."""
    b = Builder()
    gemm = b.intern_launch(Launch(grid=(8, 2, 1), block=(128, 1, 1), registers=64, shared_bytes=4096))
    copy = b.intern_launch(Launch(memcpy_dir="HtoD", pinned=True))
    reduce = b.intern_launch(
        Launch(collective_type="all_reduce", collective_bytes=4096, group="0", group_size=8, dtype="BFloat16")
    )
    shapes = b.intern("[8,1024]bf16 ([2] [3,4]) []f32")
    for step in range(2):
        t, c = T0 + step * 10 * MS, 10 * step
        b.add("region", f"step_{step}", t, t + 9 * MS, thread=77)
        b.add("op", "aten::mm", t + 100, t + MS, thread=77, external=c + 1, sequence=c + 5, shapes=shapes)
        b.add("op", "MmBackward0", t + MS, t + 2 * MS, thread=78, external=c + 2, sequence=c + 5, forward_thread=1)
        b.add("runtime", "cudaLaunchKernel", t + 200, t + 5_201, thread=77, external=c + 1, correlation=c + 1)
        b.add(
            "kernel",
            GEMM,
            t + MS,
            t + 3 * MS + step,
            device=0,
            stream=7,
            external=c + 1,
            correlation=c + 1,
            launch=gemm,
        )
        b.add("runtime", "cudaMemcpyAsync", t + 300, t + 400, thread=77, external=c + 1, correlation=c + 2)
        b.add(
            "memcpy", COPY, t + 2 * MS, t + 4 * MS, device=0, stream=8, external=c + 1, correlation=c + 2,
            bytes=1 << 20, launch=copy,
        )  # fmt: skip
        b.add("op", "record_param_comms", t + 500, t + 600, thread=77, external=c + 3)
        b.add("graph_launch", "cudaGraphLaunch", t + 650, t + 660, thread=77, correlation=c + 3)
        b.add(
            "collective", NCCL, t + 2 * MS, t + 6 * MS, device=0, stream=9, external=c + 3, correlation=c + 3,
            launch=reduce, bytes=4096,
        )  # fmt: skip
        b.add("memset", "Memset (Device)", t + 7 * MS, t + 7 * MS + 10, device=0, stream=7, bytes=64)
    return b.build()


def make_table(total_j: float = 100.0) -> EnergyTable:
    def row(name, kind, calls, time_s, joules, wall_s=None):
        return EnergyRow(
            name=name, kind=kind, calls=calls, time_s=time_s, energy_j=joules, error_j=joules / 10,
            share=joules / total_j, wall_s=wall_s,
        )  # fmt: skip

    return EnergyTable(
        energy_j=total_j, error_j=2.0, idle_j=10.0, idle_error_j=1.0, time_s=2.0, busy_s=1.0,
        kernels=[
            row(GEMM, "kernel", 2, 4e-3, 50.0), row(COPY, "memcpy", 2, 4e-3, 15.0),
            row(NCCL, "collective", 2, 8e-3, 25.0),
        ],
        ops=[row("aten::mm", "op", 2, 8e-3, 65.0)],
        regions=[row("step_0", "region", 1, 8e-3, 45.0, 9e-3), row("step_1", "region", 1, 8e-3, 45.0, 9e-3)],
        modules=[row("Net/Linear_0", "module", 2, 8e-3, 65.0)],
        steps=[row("step_0", "step", 1, 8e-3, 48.0, 10e-3), row("step_1", "step", 1, 8e-3, 52.0, 10e-3)],
    )  # fmt: skip


def make_run(path: Path, timeline: Timeline | None = None, **facts: object) -> RunFile:
    with RunWriter(path, meta={"host": "node7", "start_ns": T0, "end_ns": T0 + 2_000 * MS, **facts}) as run:
        run.add_timeline(make_timeline() if timeline is None else timeline)
        run.flush()  # so that its rows come first
        run.add_row("mark", "checkpoint", T0 + MS, T0 + MS, thread=77)
        for i in range(5):
            run.add_row("counter", "loss", T0 + i * MS, T0 + i * MS, value=1.0 / (i + 1), unit="nats")
        run.add_row("counter", "tokens", T0 + MS, T0 + MS, value=math.nan)
        times = T0 + np.arange(101) * 20 * MS
        run.add_samples(GPU, times, np.where(np.arange(101) == 50, np.nan, 500.0))
        run.add_samples(Domain(name="cpu", source="rapl", resolution_s=0.1), times[::5], np.full(21, 100.0))
        run.add_samples(Domain(name="node", source="ipmi", resolution_s=1.0, counted=False), times[::50], [900.0] * 3)
        run.add_telemetry(
            [
                Telemetry(
                    time_ns=i * 500 * MS, domain="gpu0", temperature_c=50.0 + i, clocks_mhz={"sm": 1980.0},
                    utilization_pct=80.0, memory_used_bytes=1 << 30, memory_total_bytes=4 << 30, power_limit_w=700.0,
                )
                for i in range(4)
            ],
            T0,
        )  # fmt: skip
    return RunFile(path)


@pytest.fixture
def run(tmp_path) -> Iterator[RunFile]:
    with make_run(tmp_path / "train.tessera") as made:
        yield made


# Chrome ---------------------------------------------------------------------------------------------------------------


def checked(path: Path) -> dict:
    """Strictly by the Trace Event Format, and by torch's own validator."""
    opener = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as f:
        trace = json.load(f, parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
    assert isinstance(trace["baseTimeNanoseconds"], int)
    assert trace["displayTimeUnit"] == "ms"
    flows: dict[object, Counter[str]] = {}
    for e in trace["traceEvents"]:
        assert isinstance(e["name"], str)
        assert type(e["pid"]) is int
        assert type(e["tid"]) is int
        assert e["ph"] in "XMCisf"
        assert e["ts"] >= 0
        if e["ph"] == "X":
            assert e["dur"] >= 0
            assert e["cat"]
        elif e["ph"] == "C":
            assert e["args"]
            assert all(v is None or isinstance(v, (int, float)) for v in e["args"].values())
        elif e["ph"] in "sf":
            assert e["cat"] == "ac2g"
            flows.setdefault(e["id"], Counter())[e["ph"]] += 1
        elif e["ph"] == "i":
            assert e["s"] in "gpt"
    assert all(c["s"] and c["f"] for c in flows.values())
    validator = pytest.importorskip("torch.profiler._trace_validator", reason="torch < 2.13 has no trace validator")
    passed, violations = validator.validate_trace(str(path))
    assert passed, violations
    return trace


def spans(trace: dict, category: str) -> list[dict]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] == category]


def test_collectives_of_the_host_keep_their_group(tmp_path):
    b = Builder()
    wanted = [
        Launch(collective_type="all_reduce", collective_bytes=1 << 20, group="3", group_size=2, dtype="Float",
               group_label="dp"),
        Launch(collective_type="all_gather", collective_bytes=256, group="0", group_size=4, dtype="Byte",
               group_label="world"),
    ]  # fmt: skip
    for n, launch in enumerate(wanted):
        at = T0 + n * MS
        b.add("op", f"gloo:{launch.collective_type}", at, at + MS // 2, thread=7, correlation=5 + n,
              bytes=launch.collective_bytes, launch=b.intern_launch(launch))  # fmt: skip
    b.add("op", "gloo:barrier", T0 + 2 * MS, T0 + 3 * MS, thread=7)
    with make_run(tmp_path / "rank0.tessera", b.build()) as made:
        Chrome(tmp_path / "t.json").write(with_table(made, None))
    checked(tmp_path / "t.json")
    read = kineto.read(tmp_path / "t.json")
    rows = [i for i in range(len(read)) if read.name(i).startswith("gloo:")]
    assert [read.launches[read["launch"][i]] for i in rows[:2]] == wanted and read["launch"][rows[2]] == NONE
    assert (read["correlation"][rows].tolist(), read["bytes"][rows].tolist()) == ([5, 6, NONE], [1 << 20, 256, NONE])


def test_the_chrome_trace_is_valid_and_says_everything(run, tmp_path):
    path = Chrome(tmp_path / "out" / "trace.json").write(with_table(run, make_table()))
    trace = checked(path)
    kinds = Counter(e["cat"] for e in trace["traceEvents"] if e["ph"] == "X")
    assert kinds == {
        "user_annotation": 2, "cpu_op": 6, "cuda_runtime": 6, "kernel": 2, "gpu_memcpy": 2, "collective": 2,
        "gpu_memset": 2,
    }  # fmt: skip
    kernel, copy, reduce = (spans(trace, c)[0] for c in ("kernel", "gpu_memcpy", "collective"))
    # Times are the wall clock's, to the nanosecond.
    assert trace["baseTimeNanoseconds"] + round(kernel["ts"] * 1000) == T0 + MS
    assert [round(k["dur"] * 1000) for k in spans(trace, "kernel")] == [2 * MS, 2 * MS + 1]
    assert (kernel["pid"], kernel["tid"]) == (0, 7)
    a = kernel["args"]
    assert (a["stream"], a["correlation"], a["External id"], a["grid"], a["registers per thread"]) == (
        7,
        1,
        1,
        [8, 2, 1],
        64,
    )
    assert a["overlap_pct"] == 50.0  # the copy and the collective begin half-way
    assert copy["args"]["overlap_pct"] == 50.0
    assert reduce["args"]["overlap_pct"] == 25.0
    assert copy["args"]["bytes"] == 1 << 20
    assert copy["args"]["memory bandwidth (GB/s)"] == pytest.approx((1 << 20) / (2 * MS), rel=1e-5)
    assert reduce["args"]["Collective name"] == "all_reduce"
    assert reduce["args"]["Out msg nelems"] == 2048
    # Class power times a row's time: the rows of a class sum to its joules.
    assert sum(k["args"]["energy_j"] for k in spans(trace, "kernel")) == pytest.approx(50.0, rel=1e-3)
    assert a["energy_error_j"] == pytest.approx(a["energy_j"] / 10, rel=0.01)
    assert spans(trace, "user_annotation")[0]["args"]["energy_j"] == 48.0
    op = spans(trace, "cpu_op")[0]["args"]
    assert op["Input Dims"] == [[8, 1024], [[2], [3, 4]], []]
    assert op["Input type"] == ["c10::BFloat16", "TensorList", "float"]
    counters = Counter(e["name"] for e in trace["traceEvents"] if e["ph"] == "C")
    assert counters["power gpu0"] == 100  # the one nobody saw is not drawn
    assert counters["power cpu"] == 21
    assert counters["clock sm gpu0"] == counters["temperature gpu0"] == 4
    assert counters["loss"] == 5
    power = next(e for e in trace["traceEvents"] if e["name"] == "power gpu0")
    assert power["pid"] == 0
    assert trace["baseTimeNanoseconds"] + round(power["ts"] * 1000) == T0 - 15 * MS  # when it was drawn, not when shown
    names = {(e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert (0, "GPU 0 NVIDIA H200") in names
    assert trace["tessera"]["energy"]["energy_j"] == 100.0
    arrows = [e for e in trace["traceEvents"] if e["ph"] in "sf"]
    assert Counter(e["ph"] for e in arrows) == {"s": 6, "f": 6}
    marks = [e for e in trace["traceEvents"] if e["ph"] == "i"]
    assert [m["name"] for m in marks] == ["checkpoint"]
    assert not list(path.parent.glob(".*"))  # nothing half-written is left


def test_compressed_and_plain_are_the_same(run, tmp_path):
    plain = Chrome(tmp_path / "t.json").write(with_table(run, None))
    packed = Chrome(str(tmp_path / "t.json.gz")).write(with_table(run, None))
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert packed.stat().st_size < plain.stat().st_size / 3
    again = Chrome(tmp_path / "again.json.gz").write(with_table(run, None))
    assert again.read_bytes() == packed.read_bytes()


def test_our_own_reader_reads_it_back(run, tmp_path):
    path = Chrome(tmp_path / "t.json").write(with_table(run, make_table()))
    before, after = run.timeline(), kineto.read(path)
    assert after.notes == []
    for kind in ("kernel", "memcpy", "memset", "collective", "runtime", "graph_launch", "op", "region", "mark"):
        old, new = before.rows(kind), after.rows(kind)
        assert [before.name(r) for r in old] == [after.name(r) for r in new], kind
        for column in (
            "start_ns",
            "end_ns",
            "device",
            "stream",
            "correlation",
            "external",
            "bytes",
            "sequence",
            "thread",
        ):
            assert before[column][old].tolist() == after[column][new].tolist(), (kind, column)
        assert [before.text("shapes", r) for r in old] == [after.text("shapes", r) for r in new]
        if kind in ("kernel", "memcpy", "collective"):
            launches = [[t.launches[t["launch"][r]] for r in rows] for t, rows in ((before, old), (after, new))]
            assert launches[0] == launches[1]
    loss = [r for r in after.rows("counter") if after.name(r) == "loss"]
    assert after["value"][loss].tolist() == [1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5]
    watts = [r for r in after.rows("counter") if after.name(r) == "power gpu0"]
    assert set(after["device"][watts].tolist()) == {0}
    assert {after.text("unit", r) for r in watts} == {"W"}


def test_a_trace_of_torch_comes_through(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, record_function

    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_modules=True, with_stack=True) as prof:
        for _ in range(2):
            with record_function("forward"):
                loss = model(torch.randn(8, 16)).sum()
            loss.backward()
    prof.export_chrome_trace(str(tmp_path / "kineto.json"))
    before = kineto.read(tmp_path / "kineto.json")
    with RunWriter(tmp_path / "a.tessera") as writer:
        writer.add_row("region", "first", before.start_ns, before.start_ns, thread=5)  # so that names get other numbers
        writer.flush()
        writer.add_timeline(before)
    with RunFile(tmp_path / "a.tessera") as made:
        kept = made.timeline()
        for meta in (before.meta, kept.meta):
            assert meta["modules"]
        assert [kept.names[n] for n in kept.meta["modules"]] == [before.names[n] for n in before.meta["modules"]]
        assert kept.meta["threads"] == before.meta["threads"]
        after = kineto.read(Chrome(tmp_path / "ours.json").write(with_table(made, None)))
    checked(tmp_path / "ours.json")
    for kind in ("op", "region"):
        old, new = kept.rows(kind), after.rows(kind)
        for column in ("start_ns", "end_ns", "thread", "external", "sequence", "forward_thread"):
            assert kept[column][old].tolist() == after[column][new].tolist(), column
        assert [kept.name(r) for r in old] == [after.name(r) for r in new]
        assert [kept.text("shapes", r) for r in old] == [after.text("shapes", r) for r in new]
    assert {after.names[n] for n in after.meta["modules"]} == {before.names[n] for n in before.meta["modules"]}


def test_odd_names_and_numbers_stay_valid_json(tmp_path):
    path = tmp_path / "odd.tessera"
    with RunWriter(path) as writer:
        for name in ('"', "\\", "\n\x00\x1f", "日本語 é", "</script>", ""):
            writer.add_row("kernel", name, T0, T0 + 1, device=0, stream=0)
            writer.add_row("region", name, T0 + 5, T0, thread=-7)  # ends before it begins; a track with a name only
        for value in (math.inf, -math.inf, 1e300, 5e-324):
            writer.add_row("counter", "odd", T0, T0, value=value, unit='"')
        writer.add_row("kernel", "nowhere", T0, T0)
    trace = checked(Chrome(tmp_path / "t.json").write(with_table(RunFile(path), None)))
    assert [e["name"] for e in spans(trace, "kernel")][:3] == ['"', "\\", "\n\x00\x1f"]
    assert {e["tid"] for e in spans(trace, "user_annotation")} == {(1 << 31) + 7}


def test_ranks_of_a_merged_run_stay_apart(tmp_path):
    b, far = Builder(), 1 << 48
    for rank in range(2):
        b.add("region", "step", T0, T0 + MS, thread=rank * far + 77, rank=rank)
        b.add("runtime", "launch", T0, T0 + 10, thread=rank * far + 77, correlation=rank * far + 1, rank=rank)
        b.add("kernel", "k", T0 + 10, T0 + 20, device=0, stream=7, correlation=rank * far + 1, rank=rank)
    b.add("collective", "c", T0 + 10, T0 + 20, device=0, stream=9, rank=1)
    with RunWriter(tmp_path / "m.tessera") as writer:
        writer.add_timeline(b.build())
    trace = checked(Chrome(tmp_path / "t.json").write(with_table(RunFile(tmp_path / "m.tessera"), None)))
    kernels = spans(trace, "kernel")
    assert len({k["pid"] for k in kernels} | {e["pid"] for e in spans(trace, "user_annotation")}) == 4
    assert {e["tid"] for e in spans(trace, "user_annotation")} == {77}
    assert [k["args"]["rank"] for k in kernels] == [0, 1]
    assert [k["args"].get("overlap_pct") for k in kernels] == [None, 100]  # the collective is the other rank's
    named = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert [named[k["pid"]] for k in kernels] == ["rank 0 GPU 0", "rank 1 GPU 0"]


def test_an_empty_run_makes_an_empty_trace(tmp_path):
    RunWriter(tmp_path / "e.tessera").close()
    empty = RunFile(tmp_path / "e.tessera")
    trace = checked(Chrome(tmp_path / "t.json").write(with_table(empty, None)))
    assert {e["ph"] for e in trace["traceEvents"]} == {"M"}
    assert read_csv(SummaryCsv(tmp_path / "s.csv").write(with_table(empty, None))) == []


def test_where_nothing_can_be_written(run, tmp_path):
    (tmp_path / "file").write_text("")
    for exporter in (Chrome(tmp_path / "file" / "t.json"), SummaryCsv(tmp_path / "file" / "s.csv"), Chrome(tmp_path)):
        with pytest.raises(ArgumentError, match="cannot write") as caught:
            exporter.write(with_table(run, None))
        assert caught.value.fix


def test_overlap_is_that_of_brute_force():
    rng = np.random.default_rng(0)
    n = 300
    kind, device = rng.integers(0, 4, n), rng.integers(0, 2, n)
    start = rng.integers(0, 2_000, n)
    end = start + rng.integers(0, 30, n)
    found = Overlap(
        [(kind[:100], start[:100], end[:100], device[:100]), (kind[100:], start[100:], end[100:], device[100:])]
    )
    percent = found.pct(kind, start, end, device)
    for i in range(n):
        if end[i] == start[i]:
            assert math.isnan(percent[i])
            continue
        other = (device == device[i]) & ((kind == CODE["kernel"]) != (kind[i] == CODE["kernel"]))
        inside = sum(((start[other] <= t) & (t < end[other])).any() for t in range(start[i], end[i]))
        assert percent[i] == pytest.approx(100 * inside / (end[i] - start[i]))


# CSV ------------------------------------------------------------------------------------------------------------------


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def test_the_summary_adds_up(run, tmp_path):
    rows = read_csv(SummaryCsv(tmp_path / "s.csv").write(with_table(run, make_table())))
    assert list(rows[0]) == [
        "name", "kind", "calls", "total_s", "active_s", "mean_us", "min_us", "max_us", "share_time_pct", "energy_j",
        "energy_error_j", "power_w", "j_per_call",
    ]  # fmt: skip
    by = {(r["kind"], r["name"]): r for r in rows}
    gemm = by["kernel", GEMM]
    assert (gemm["calls"], float(gemm["total_s"]), float(gemm["min_us"])) == ("2", 0.004000001, 2000.0)
    assert float(gemm["max_us"]) == 2000.001
    assert float(gemm["power_w"]) == pytest.approx(12_500.0, rel=1e-6)
    assert (gemm["energy_j"], gemm["j_per_call"]) == ("50", "25")
    device = [r for r in rows if r["kind"] in ("kernel", "memcpy", "memset", "collective")]
    assert sum(float(r["share_time_pct"]) for r in device) == pytest.approx(100.0)
    spent = sum(
        float(r["energy_j"]) for r in rows if r["energy_j"] and r["kind"] in ("kernel", "memcpy", "collective", "idle")
    )
    assert spent == pytest.approx(100.0)
    assert by["op", "aten::mm"]["energy_j"] == "65"
    assert ("region", "step_0") not in by  # listed once, as a step
    assert float(by["step", "step_1"]["total_s"]) == 0.01
    assert by["module", "Net/Linear_0"]["min_us"] == ""
    assert by["runtime", "cudaLaunchKernel"]["energy_j"] == ""
    assert not {"mark", "counter"} & {r["kind"] for r in rows}


def test_shares_of_time_are_of_the_traced_part_as_in_the_analyses(tmp_path):
    def shares(table: EnergyTable, **facts: object) -> dict[str, float | None]:
        recording = with_table(run, table)
        recording.facts = dataclasses.replace(recording.facts, **facts)
        return {line.name: line.share_time_pct for line in summary_lines(recording)}

    quarter, eighth = [(T0, T0 + 500 * MS)], [(T0, T0 + 250 * MS)]  # of a run of 2 s
    with make_run(tmp_path / "part.tessera") as run:
        whole, part = shares(make_table()), shares(make_table(), windows=quarter)
        for name in ("aten::mm", "cudaLaunchKernel", "step_1", "Net/Linear_0", "idle"):
            assert part[name] == pytest.approx(4 * whole[name]), name
        light = shares(make_table(), windows=quarter, operator_windows=eighth)
        assert light["aten::mm"] == pytest.approx(8 * whole["aten::mm"]) and light["step_1"] == part["step_1"]
        regions = dataclasses.replace(make_table(), steps=[])  # they go on while nothing is traced
        assert shares(regions, windows=quarter)["step_1"] == shares(regions)["step_1"]


def test_what_was_not_traced_is_not_idle(run):
    sampled = dataclasses.replace(make_table(), kernels=[], ops=[], busy_s=0.0)
    assert not any(line.kind == "idle" for line in summary_lines(with_table(run, sampled)))


def test_a_name_in_the_summary_is_no_formula(tmp_path):
    name = '=HYPERLINK("http://evil")'
    with RunWriter(tmp_path / "a.tessera") as writer:
        writer.add_row("region", name, 1_000, 2_000)
    rows = read_csv(SummaryCsv(tmp_path / "s.csv").write(with_table(RunFile(tmp_path / "a.tessera"), None)))
    assert [r["name"] for r in rows] == [f"'{name}"]


def test_the_summary_without_attribution_sums_rows(run, tmp_path):
    rows = read_csv(SummaryCsv(tmp_path / "s.csv").write(with_table(run, None)))
    assert all(r["energy_j"] == "" for r in rows)
    recording = with_table(run, None)
    timeline = recording.timeline
    timeline.energy_j = np.full(len(timeline), np.nan)
    timeline.energy_j[timeline.rows("kernel")] = [3.0, 4.0]
    timeline.error_j = timeline.energy_j * 0.1
    rows = read_csv(SummaryCsv(tmp_path / "s.csv").write(recording))
    gemm = next(r for r in rows if r["name"] == GEMM)
    assert (gemm["energy_j"], gemm["energy_error_j"]) == ("7", "0.7")


def test_a_summary_of_many_chunks(tmp_path):
    rng = np.random.default_rng(0)
    b, n = Builder(), 150_000
    for i in range(20):
        b.intern(f"k{i}")
    name, start, lasts = rng.integers(0, 20, n), T0 + np.arange(n) * 100, rng.integers(1, 100, n)
    b.extend({"kind": np.zeros(n), "name": name, "start_ns": start, "end_ns": start + lasts, "device": np.zeros(n)}, n)
    with RunWriter(tmp_path / "a.tessera") as writer:
        writer.add_timeline(b.build())
    rows = read_csv(SummaryCsv(tmp_path / "s.csv").write(with_table(RunFile(tmp_path / "a.tessera"), None)))
    assert len(rows) == 20
    for r in rows:
        mine = lasts[name == int(r["name"][1:])]
        assert (int(r["calls"]), round(float(r["total_s"]) * 1e9)) == (len(mine), mine.sum())
        assert (float(r["min_us"]), float(r["max_us"])) == (mine.min() / 1e3, mine.max() / 1e3)
    totals = [float(r["total_s"]) for r in rows]
    assert totals == sorted(totals, reverse=True)


# OTLP -----------------------------------------------------------------------------------------------------------------


class Collector:
    """A real HTTP endpoint that decodes what it is sent."""

    def __init__(self, status: int = 200, delay_s: float = 0.0) -> None:
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        kinds = {"/v1/metrics": ExportMetricsServiceRequest, "/v1/traces": ExportTraceServiceRequest}
        self.requests: list[tuple[str, dict[str, str], object]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                message = kinds[self.path]()
                message.ParseFromString(body)
                collector.requests.append((self.path, dict(self.headers), message))
                time.sleep(delay_s)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def metrics(self):
        found: dict[str, list] = {}
        for path, _, message in self.requests:
            if path == "/v1/metrics":
                for resource in message.resource_metrics:
                    for scope in resource.scope_metrics:
                        for metric in scope.metrics:
                            found.setdefault(metric.name, []).append(metric)
        return found

    def spans(self):
        messages = [m for path, _, m in self.requests if path == "/v1/traces"]
        return [s for m in messages for r in m.resource_spans for scope in r.scope_spans for s in scope.spans]


def attributes(thing) -> dict[str, object]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in thing.attributes}


def test_otlp_sends_metrics_and_spans_of_their_time(run):
    pytest.importorskip("opentelemetry.sdk")
    with Collector() as collector:
        said = Otlp(collector.url, headers={"x-key": "secret"}, period_s=0.5).write(with_table(run, make_table()))
        found, sent = collector.metrics(), collector.spans()
    assert collector.url in said
    assert "3 spans" in said
    assert all(headers.get("x-key") == "secret" for _, headers, _ in collector.requests)
    resource = attributes(collector.requests[0][2].resource_metrics[0].resource)
    assert (resource["service.name"], resource["host.name"]) == ("train", "node7")

    energy = {attributes(m.sum.data_points[0])["hw.id"]: m for m in found["hw.energy"]}
    gpu = energy["gpu0"]
    assert (gpu.unit, gpu.sum.is_monotonic, gpu.sum.aggregation_temporality) == ("J", True, 2)
    points = gpu.sum.data_points
    values = [p.as_double for p in points]
    assert values == sorted(values)
    # Samples at 0, 20 ms, ..., 2 s; the one at 1 s is NaN: of the 20 ms before it nothing is known.
    assert values[-1] == pytest.approx(500.0 * 1.98)
    assert points[0].start_time_unix_nano == T0 - 15 * MS
    assert points[-1].time_unix_nano == T0 + 2_000 * MS - 15 * MS
    about = attributes(points[0])
    assert (about["hw.type"], about["hw.name"], about["tessera.basis"]) == ("gpu", "NVIDIA H200", "measured")
    assert attributes(energy["cpu"].sum.data_points[0])["hw.type"] == "cpu"
    assert "node" not in energy  # a whole machine has its own, so that nothing is summed twice
    assert found["hw.host.energy"][0].sum.data_points[-1].as_double == pytest.approx(1800.0)
    power = next(m for m in found["hw.power"] if attributes(m.gauge.data_points[0])["hw.id"] == "gpu0")
    assert power.unit == "W"
    assert [p.as_double for p in power.gauge.data_points] == pytest.approx([500.0] * 4)
    temperature = found["hw.temperature"][0]
    assert temperature.unit == "Cel"
    assert [(p.time_unix_nano, p.as_double) for p in temperature.gauge.data_points] == [
        (T0 + i * 500 * MS, 50.0 + i) for i in range(4)
    ]
    assert found["hw.gpu.utilization"][0].gauge.data_points[0].as_double == 0.8
    assert attributes(found["hw.gpu.utilization"][0].gauge.data_points[0])["hw.gpu.task"] == "general"
    assert found["hw.gpu.memory.utilization"][0].gauge.data_points[0].as_double == 0.25
    usage = found["hw.gpu.memory.usage"][0]
    assert (usage.unit, usage.sum.data_points[0].as_int or usage.sum.data_points[0].as_double) == ("By", 1 << 30)
    assert not usage.sum.is_monotonic
    assert found["tessera.gpu.clock"][0].gauge.data_points[0].as_double == 1.98e9
    assert found["tessera.counter.loss"][0].unit == "nats"
    assert len(found["tessera.counter.loss"][0].gauge.data_points) == 5
    assert "tessera.counter.tokens" not in found
    kernels = {attributes(m.sum.data_points[0])["tessera.name"]: m for m in found["tessera.kernel.energy"]}
    assert kernels[GEMM].sum.data_points[0].as_double == 50.0

    by = {s.name: s for s in sent}
    root, step = by["train"], by["step_0"]
    assert step.parent_span_id == root.span_id
    assert step.trace_id == root.trace_id
    assert (step.start_time_unix_nano, step.end_time_unix_nano) == (T0, T0 + 9 * MS)
    assert attributes(step)["tessera.energy_j"] == pytest.approx(600.0 * 9e-3, rel=1e-3)
    assert attributes(step)["tessera.energy_error_j"] > 0
    assert attributes(step)["tessera.attributed_j_per_call"] == 48.0
    assert attributes(root)["tessera.energy_j"] == 100.0


@pytest.mark.parametrize(
    ("domain", "kind", "device"),
    [
        ("gpu3", "gpu", 3), ("gpu3.memory", "memory", 3), ("cpu0.core", "cpu", None), ("dram1", "memory", None),
        ("node", "host", None), ("node7.gpu0", "gpu", 0), ("chassis.1", "enclosure", None),
        ("pdu1", "power_supply", None), ("psys", "host", None), ("gpu1.module", "gpu", 1),
    ],
)  # fmt: skip
def test_what_a_domain_is(domain, kind, device):
    from tessera.profile.export.otlp_points import component
    from tessera.schema import DeviceId

    found = DeviceId.of_domain(domain)
    assert (component(domain), found.index if found.is_gpu else None) == (kind, device)


def test_otlp_without_power_or_table(tmp_path):
    pytest.importorskip("opentelemetry.sdk")
    path = tmp_path / "a.tessera"
    with RunWriter(path) as writer:
        writer.add_row("region", "outer", T0, T0 + 10, thread=1)
        writer.add_row("region", "inner", T0 + 1, T0 + 5, thread=1)
        writer.add_row("region", "elsewhere", T0 + 1, T0 + 5, thread=2)
        writer.add_row("region", "after", T0 + 6, T0 + 9, thread=1)
        for i in range(30):
            writer.add_row("region", "short", T0 + 2, T0 + 3, thread=100 + i)
    with Collector() as collector:
        said = Otlp(collector.url + "/v1/metrics", max_spans=4).write(with_table(RunFile(path), None))
        sent = {s.name: s for s in collector.spans()}
    assert "30 shorter regions were left out" in said
    assert set(sent) == {"a", "outer", "inner", "elsewhere", "after"}
    assert sent["inner"].parent_span_id == sent["after"].parent_span_id == sent["outer"].span_id
    assert sent["elsewhere"].parent_span_id == sent["a"].span_id
    assert "tessera.energy_j" not in attributes(sent["outer"])


def test_otlp_cuts_what_is_too_much_for_one_request(tmp_path):
    pytest.importorskip("opentelemetry.sdk")
    path = tmp_path / "a.tessera"
    with RunWriter(path) as writer:
        for i in range(4_500):
            writer.add_row("counter", "loss", T0 + i, T0 + i, value=float(i))
    with Collector() as collector:
        Otlp(collector.url).write(with_table(RunFile(path), None))
        parts = collector.metrics()["tessera.counter.loss"]
    assert [len(m.gauge.data_points) for m in parts] == [2_000, 2_000, 500]
    assert [p.as_double for m in parts for p in m.gauge.data_points] == list(range(4_500))


def test_otlp_says_why_it_failed_and_does_not_hang(run, capfd):
    pytest.importorskip("opentelemetry.sdk")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, nobody listens
        start = time.monotonic()
        with pytest.raises(TesseraError, match="no server answers") as caught:
            Otlp(f"http://127.0.0.1:{held.getsockname()[1]}").write(with_table(run, None))
        assert time.monotonic() - start < 60
        assert "refused" in str(caught.value.why)
        assert caught.value.fix
    with Collector(status=400) as collector, pytest.raises(TesseraError, match="did not take") as caught:
        Otlp(collector.url).write(with_table(run, None))
    assert "400" in str(caught.value.why)
    start = time.monotonic()
    with Collector(delay_s=2.5) as collector, pytest.raises(TesseraError, match="did not take"):
        Otlp(collector.url, timeout_s=0.4).write(with_table(run, None))
    assert time.monotonic() - start < 60
    for bad in ("localhost:4318", "ftp://x", "", "http://"):
        with pytest.raises(ArgumentError, match="is not an OTLP endpoint"):
            Otlp(bad).write(with_table(run, None))
    assert capfd.readouterr().err == ""


# Parquet and TensorBoard ----------------------------------------------------------------------------------------------


def test_parquet_has_nulls_for_what_nobody_knows(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    timeline = make_timeline()
    timeline.extra = {4: {"sm_occupancy": 61.5, "throttle_reason": "power"}}
    with make_run(tmp_path / "a.tessera", timeline) as made:
        table = pq.read_table(Parquet(tmp_path / "a.parquet").write(with_table(made, make_table())))
        rows = made.rows
    assert table.num_rows == rows
    assert table.schema.field("start_ns").type == pa.int64()
    records = table.to_pylist()
    kernel = records[4]
    assert (kernel["kind"], kernel["name"], kernel["start_ns"], kernel["end_ns"]) == (
        "kernel",
        GEMM,
        T0 + MS,
        T0 + 3 * MS,
    )
    assert (kernel["grid"], kernel["registers"], kernel["stream_id"], kernel["thread_id"]) == ([8, 2, 1], 64, 7, None)
    assert kernel["energy_j"] == pytest.approx(25.0)
    assert (kernel["sm_occupancy"], kernel["throttle_reason"]) == (61.5, "power")
    assert kernel["value"] is None
    assert records[6]["memcpy_dir"] == "HtoD"
    assert records[0]["grid"] is records[0]["device"] is records[0]["sm_occupancy"] is records[0]["energy_j"] is None
    loss = [r for r in records if r["name"] == "loss"]
    assert [(r["value"], r["unit"]) for r in loss][:2] == [(1.0, "nats"), (0.5, "nats")]
    assert json.loads(table.schema.metadata[b"tessera"])["meta"]["host"] == "node7"


def test_parquet_of_an_empty_run(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    RunWriter(tmp_path / "e.tessera").close()
    assert (
        pq.read_table(Parquet(tmp_path / "e.parquet").write(with_table(RunFile(tmp_path / "e.tessera"), None))).num_rows
        == 0
    )


def test_tensorboard_has_scalars_and_the_trace(run, tmp_path):
    pytest.importorskip("tensorboard")
    code = f"""
import json
from pathlib import Path
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
read = EventAccumulator({str(tmp_path / "tb")!r}, size_guidance={{"scalars": 0}})
read.Reload()
print(json.dumps({{t: [(s.step, s.wall_time, s.value) for s in read.Scalars(t)] for t in read.Tags()["scalars"]}}))
"""
    said = TensorBoard(tmp_path / "tb").write(with_table(run, make_table()))
    assert "scalars" in said
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    scalars = json.loads(done.stdout)
    assert [s[2] for s in scalars["energy_j/step"]] == [48.0, 52.0]
    assert [s[0] for s in scalars["energy_j/step"]] == [0, 1]
    assert len(scalars["power_w/gpu0"]) == 100
    assert scalars["power_w/gpu0"][0][1] == pytest.approx((T0 - 15 * MS) * 1e-9)
    assert [s[0] for s in scalars["counter/loss"]] == [0, 1, 2, 3, 4]
    (trace,) = (tmp_path / "tb").glob("*.pt.trace.json.gz")
    worker, _, rest = trace.name.partition(".")
    assert worker.endswith(f"_{run.about['pid']}")
    assert rest == f"{T0 // MS}.pt.trace.json.gz"
    checked(trace)


def test_what_is_not_installed_is_said(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(MissingExtra, match="pyarrow") as caught:
        Parquet(tmp_path / "a.parquet").write(with_table(run, None))
    assert "[parquet]" in str(caught.value.fix)
    with pytest.raises(MissingExtra, match="opentelemetry") as caught:
        Otlp("http://127.0.0.1:1").write(with_table(run, None))
    assert "[otel]" in str(caught.value.fix)
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "tensorboard" else real(name, *a))
    said = TensorBoard(tmp_path / "tb").write(with_table(run, None))
    assert "no scalars" in said
    assert len(list((tmp_path / "tb").glob("*.pt.trace.json.gz"))) == 1
    assert not list((tmp_path / "tb").glob("events.*"))


def test_exporters_are_values_and_load_nothing():
    exporters: list[Exporter] = [Chrome("a"), SummaryCsv("a"), Parquet("a"), Otlp("http://a"), TensorBoard("a")]
    assert exporters[0] == Chrome("a")
    code = "import sys; import tessera.profile.export as e; assert not {'numpy', 'torch', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code.replace("tessera.profile.export as e", "tessera")], check=True)


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_writes_several_at_once(run, tmp_path):
    args = [str(run.path), "--chrome", str(tmp_path / "t.json.gz"), "--csv", str(tmp_path / "s.csv"), "--json"]
    done = CliRunner().invoke(command, args, catch_exceptions=False)
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert said["written"] == {"chrome": str(tmp_path / "t.json.gz"), "csv": str(tmp_path / "s.csv")}
    checked(tmp_path / "t.json.gz")
    assert read_csv(tmp_path / "s.csv")
    plain = CliRunner().invoke(command, args[:-1], catch_exceptions=False)
    assert f"csv: {tmp_path / 's.csv'}" in plain.stdout


def test_an_export_that_fails_names_what_was_written(run, tmp_path):
    chrome, summary, book = tmp_path / "t.json.gz", tmp_path / "s.csv", tmp_path / "b.xlsx"
    args = [str(run.path), "--chrome", str(chrome), "--csv", str(summary), "--xlsx", str(book), "--otlp", "bad"]
    with pytest.raises(TesseraError) as caught:
        CliRunner().invoke(command, args, catch_exceptions=False)
    assert f"written before it: chrome: {chrome}, csv: {summary}; not written: otlp, xlsx" in str(caught.value)
    assert chrome.exists() and summary.exists() and not book.exists()
    with pytest.raises(TesseraError) as alone:
        CliRunner().invoke(command, [str(run.path), "--otlp", "bad"], catch_exceptions=False)
    assert "written" not in str(alone.value)


def test_the_command_wants_something_to_write(run, tmp_path):
    with pytest.raises(TesseraError, match="--chrome"):
        CliRunner().invoke(command, [str(run.path)], catch_exceptions=False)
    with pytest.raises(TesseraError, match="there is no file"):
        CliRunner().invoke(command, [str(tmp_path / "no"), "--csv", str(tmp_path / "s.csv")], catch_exceptions=False)
