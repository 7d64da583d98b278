"""A trace in, everything out: report, export, diff and merge take a Kineto trace as they take a run file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tessera import analyze
from tessera.analyze.lanes import LANES
from tessera.analyze.overview import overview
from tessera.analyze.passes import count_passes
from tessera.analyze.sides import Cell, DiffSide
from tessera.analyze.time_answer import answer_by_time
from tessera.cli.analyze import command as explain
from tessera.cli.export import command as export
from tessera.cli.main import cli
from tessera.cli.merge import command as merge
from tessera.cli.report import command as report
from tessera.profile.open_recording import open_recording
from tessera.report.time_html import time_page

from command_line import invoke

BASE_NS = 1_790_000_000_000_000_000


def write_trace(
    path: Path, *, rank: int | None = None, late_us: float = 0.0, streams: int = 1, chip: str = "NVIDIA H200",
    steps: int = 4, kernels: int = 5,
) -> Path:  # fmt: skip
    """Steps of a few products and an all-reduce; rank `rank` is `late_us` late to each."""
    events: list[dict[str, Any]] = []
    number = 0

    def add(cat: str, name: str, ts: float, dur: float, pid: int = 9, tid: int = 9, **args: Any) -> None:
        events.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args})

    for step in range(steps):
        start = 10_000.0 * step
        add("user_annotation", f"ProfilerStep#{step}", start, 9_900)
        at = start + 50
        for k in range(kernels):
            number += 1
            add("cpu_op", "aten::mm", at - 20, 10, **{"External id": number})
            add("cuda_runtime", "cudaLaunchKernel", at - 15, 4, correlation=number, **{"External id": number})
            long = (5000 + late_us) / kernels
            stream = 7 + k % streams
            add("kernel", "gemm", at, long, 0, stream, device=0, stream=stream, correlation=number)
            at += long + 5
        number += 1
        add("cuda_runtime", "cudaLaunchKernel", at - 15, 4, correlation=number)
        lasts = start + 8_000 - at
        reduce = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
        add("kernel", reduce, at, lasts, 0, 40, device=0, stream=40, correlation=number)
    whole: dict[str, Any] = {"baseTimeNanoseconds": BASE_NS, "deviceProperties": [{"id": 0, "name": chip}]}
    if rank is not None:
        whole["distributedInfo"] = {"rank": rank, "world_size": 8}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**whole, "traceEvents": events}))
    return path


def write_power(path: Path) -> Path:
    """A power log of the trace's time: 500 W, every 5 ms."""
    lines = ["epoch_us,domain,watts", *(f"{BASE_NS // 1000 + 5000 * i},gpu0,500.0" for i in range(12))]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_trace_without_power_is_reported_in_seconds(tmp_path):
    trace = write_trace(tmp_path / "trace.json")
    shown = invoke(report, trace).output
    assert "compute" in shown and "aten::mm" in shown and " J" not in shown and (tmp_path / "trace.html").exists()
    data = json.loads(invoke(report, trace, "--json").output)
    parts = analyze.breakdown(trace).facts
    assert data["shares"]["compute"] == pytest.approx(parts["compute_s"] / parts["span_s"])
    assert data["shares"]["idle"] == pytest.approx(parts["idle_s"] / parts["span_s"])
    assert data["kernels"][0]["name"] == "gemm" and data["kernels"][0]["time_s"] == pytest.approx(20e-3)
    assert data["steps"] == 4 and "energy_j" not in json.dumps(data["kernels"])
    assert "gemm" in invoke(report, trace, "--by", "kernels").output


def write_host_trace(path: Path, rank: int | None = None) -> Path:
    """Three steps of a CPU: "fwd", which calls itself, the optimizer, and Gloo's thread beside it. Times in us."""
    events: list[dict[str, Any]] = []

    def add(cat: str, name: str, ts: float, dur: float, tid: int = 9, **args: Any) -> None:
        events.append({"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": ts, "dur": dur, "args": args})

    for step in range(3):
        start = 1_000.0 * step
        add("user_annotation", f"ProfilerStep#{step}", start, 900)
        add("user_annotation", "fwd", start + 10, 400)
        add("user_annotation", "fwd", start + 20, 300)
        for k in range(20):
            add("cpu_op", "aten::mm", start + 30 + 10 * k, 5)
        add("user_annotation", "SGD.step", start + 500, 100)
        add("cpu_op", "aten::add_", start + 510, 20)
        add("cpu_op", "gloo:all_reduce", start + 505, 380, tid=10)
    whole: dict[str, Any] = {"baseTimeNanoseconds": BASE_NS}
    if rank is not None:
        whole["distributedInfo"] = {"rank": rank, "world_size": 2, "backend": "gloo"}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**whole, "traceEvents": events}))
    return path


def test_calls_of_a_region_are_its_passes(tmp_path):
    data = json.loads(invoke(report, write_host_trace(tmp_path / "cpu.json"), "--json").output)
    assert {r["name"]: r["calls"] for r in data["regions"]} == {"ProfilerStep": 3, "fwd": 3, "SGD.step": 3}
    data = json.loads(invoke(report, write_trace(tmp_path / "gpu.json"), "--json").output)
    assert {r["name"]: r["calls"] for r in data["regions"]} == {"ProfilerStep": 4}


@pytest.fixture
def host_ranks(tmp_path):
    """Two ranks of a CPU; the second does not name its optimizer."""
    for rank in (0, 1):
        write_host_trace(tmp_path / "hosts" / f"rank{rank}.json", rank)
    second = tmp_path / "hosts" / "rank1.json"
    second.write_text(second.read_text().replace("SGD.step", "update"))
    return tmp_path / "hosts"


def test_a_thread_without_regions_works_for_one_of_its_own_rank(host_ranks):
    timeline = open_recording(host_ranks).timeline
    [gloo] = [n for n, name in enumerate(timeline.names) if name == "gloo:all_reduce"]
    rows = (timeline["name"] == gloo).nonzero()[0]
    regions = timeline.linked.region[rows]
    assert len(rows) == 6 and timeline["rank"][regions].tolist() == timeline["rank"][rows].tolist()


def test_time_of_a_region_of_a_host_is_from_its_begin_to_its_end(host_ranks):
    """Not the operators inside; and Gloo's thread, which has no region of its own, adds nothing to the optimizer's."""
    recording = open_recording(host_ranks)
    result = answer_by_time(recording)
    times = {r.name: r.time_s for r in result.regions}
    assert times == pytest.approx({"ProfilerStep": 5.4e-3, "fwd": 2.4e-3, "SGD.step": 0.3e-3, "update": 0.3e-3})
    assert result.regions[0].share == pytest.approx(5.4e-3 / (2 * result.time_s))
    told = json.loads(invoke(report, host_ranks, "--json").output)
    assert {r["name"]: r["time_s"] for r in told["regions"]} == times and "begin to its end" in told["region_time"]
    assert "begin to its end" in " ".join(invoke(report, host_ranks, "--by", "regions").output.split())
    assert "begin to its end" in time_page(recording, result)


def test_what_collectives_of_a_host_overlap_is_the_same_everywhere(host_ranks, tmp_path):
    invoke(merge, host_ranks, "-o", tmp_path / "job.tessera")
    told = [
        json.loads(invoke(explain, "collectives", path, "--json").output)
        for path in (host_ranks, tmp_path / "job.tessera")
    ]
    shares = [t["facts"]["by_kind"]["all_reduce"]["overlap_pct"] for t in told]
    [reported] = json.loads(invoke(report, host_ranks, "--json").output)["job"]["collectives"]
    assert [*shares, reported["overlap_pct"]] == pytest.approx([100 * 20 / 380] * 3)
    assert [[r["start_s"] for r in t["rows"]] for t in told] == [pytest.approx([505e-6, 1505e-6, 2505e-6])] * 2


def test_a_bandwidth_is_not_called_an_algorithm(ranks):
    columns = {c.key: c.title for c in analyze.collectives(ranks).columns}
    assert columns["bytes_per_s"] == "bandwidth" and "algorithm" not in invoke(explain, "collectives", ranks).output


def test_an_operator_that_launches_two_kernels_is_called_once(tmp_path):
    trace = write_trace(tmp_path / "trace.json", steps=1, kernels=2)
    data = json.loads(trace.read_text())
    data["traceEvents"] = [e for e in data["traceEvents"] if e["cat"] != "cpu_op" or e["args"]["External id"] == 1]
    for event in data["traceEvents"]:
        if event["args"].get("External id") == 2:
            event["args"]["External id"] = 1
    trace.write_text(json.dumps(data))
    [product] = [r for r in answer_by_time(open_recording(trace)).ops if r.name == "aten::mm"]
    assert product.calls == 1 and product.time_s == pytest.approx(5e-3)


def test_functions_of_the_users_code_have_what_they_launched(tmp_path):
    """With frames of Python: kernels belong to the innermost own one, backward work to that of its forward."""

    def frame(name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "cat": "python_function", "name": name, "pid": 9, "tid": 1, "ts": ts, "dur": dur}

    def op(name: str, ts: float, tid: int, number: int, **args: Any) -> dict[str, Any]:
        said = {"External id": number, **args}
        return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 9, "tid": tid, "ts": ts, "dur": 9, "args": said}

    def kernel(ts: float, dur: float, number: int) -> dict[str, Any]:
        said = {"device": 0, "stream": 7, "External id": number}
        return {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": said}

    events = [
        frame("train.py(3): main", 0, 1000), frame("model.py(40): forward", 10, 50),
        frame("torch/nn/modules/linear.py(114): forward", 12, 40), frame("<built-in function linear>", 14, 30),
        op("aten::linear", 20, 1, 1, **{"Sequence number": 5, "Fwd thread id": 0}),
        op("AddmmBackward0", 400, 2, 2, **{"Sequence number": 5, "Fwd thread id": 1}),
        op("aten::add", 100, 1, 3), kernel(60, 30, 1), kernel(420, 70, 2), kernel(120, 10, 3),
    ]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"baseTimeNanoseconds": 1_790_000_000_000_000_000, "traceEvents": events}))
    words = ["report", str(path), "--by", "functions", "--html", str(tmp_path / "x.html")]
    result = CliRunner().invoke(cli, words)
    lines = [" ".join(line.split()[:4]) for line in result.output.splitlines()]
    assert "model.py(40): forward 100 µs" in lines and "train.py(3): main 10 µs" in lines, result.output
    assert not answer_by_time(open_recording(path)).functions  # they are most of a trace: read when asked for
    path.write_text(json.dumps({"traceEvents": [e for e in events if e["cat"] != "python_function"]}))
    assert "with_stack=True" in str(CliRunner().invoke(cli, words).exception.fix)


def test_its_page_leads_with_time_and_has_no_joule(tmp_path):
    recording = open_recording(write_trace(tmp_path / "trace.json"))
    page = time_page(recording, answer_by_time(recording))
    body = page[page.index("<main>") : page.index("<script type")]
    assert "What ran" in body and "Power and what ran" not in body and "Time by row" in body
    assert " J<" not in body and "mJ" not in body and body.index("traced") < body.index("compute")


def test_with_a_power_log_it_is_reported_as_a_run(tmp_path):
    trace, power = write_trace(tmp_path / "trace.json"), write_power(tmp_path / "power.csv")
    data = json.loads(invoke(report, trace, "--power", power, "--json").output)
    assert data["answer"]["energy_j"] > 0 and data["answer"]["basis"] == "measured"
    page = tmp_path / "page.html"
    shown = invoke(report, trace, "--power", power, "--html", page).output
    assert " J" in shown and "Power and what ran" in page.read_text()


@pytest.mark.parametrize("properties", [None, 5, [None, {"name": None}]])
@pytest.mark.parametrize("with_power", [False, True])
def test_a_trace_whose_device_properties_cannot_be_read_is_reported(tmp_path, properties, with_power):
    trace = write_trace(tmp_path / "trace.json")
    trace.write_text(json.dumps(json.loads(trace.read_text()) | {"deviceProperties": properties}))
    power = ["--power", write_power(tmp_path / "power.csv")] if with_power else []
    data = json.loads(invoke(report, trace, *power, "--json").output)
    assert (data["answer"] if with_power else data)["device"] == "" and "gemm" in json.dumps(data)


def test_one_long_gap_is_said_once(tmp_path):
    """There were "18.8 ms of it 18.8 ms while ..."."""
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "dur": 100.0}
    events = [kernel | {"ts": ts, "args": {"device": 0, "stream": 7}} for ts in (1000.0, 1110.0, 20_000.0)]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    (idle,) = [a for a in answer_by_time(open_recording(tmp_path / "t.json")).advice if a.kind == "idle"]
    assert ", 18.8 ms of it while" in idle.evidence


@pytest.mark.parametrize("with_power", [False, True])
def test_a_trace_is_exported(tmp_path, with_power):
    trace = write_trace(tmp_path / "trace.json")
    words = ["--power", write_power(tmp_path / "power.csv")] if with_power else []
    targets = ["--chrome", tmp_path / "out.json", "--csv", tmp_path / "out.csv", "--tensorboard", tmp_path / "board"]
    told = json.loads(invoke(export, trace, *words, *targets, "--json").output)
    assert set(told["written"]) == {"chrome", "csv", "tensorboard"}
    assert "gemm" in (tmp_path / "out.json").read_text() and "gemm" in (tmp_path / "out.csv").read_text()
    assert len(open_recording(tmp_path / "out.json").timeline.rows("kernel")) == 20


@pytest.fixture
def ranks(tmp_path):
    for rank in range(8):
        write_trace(tmp_path / "ranks" / f"rank{rank}.json", rank=rank, late_us=400.0 if rank == 3 else 5.0 * rank)
    return tmp_path / "ranks"


def test_a_folder_of_ranks_has_a_row_and_a_band_for_each(ranks):
    recording = open_recording(ranks)
    result = answer_by_time(recording)
    assert [d.rank for d in result.devices] == list(range(8)) and result.steps == 4
    assert max(result.devices, key=lambda d: d.compute_s).rank == 3
    assert result.job is not None and [r.rank for r in result.job.ranks if r.straggler] == [3]
    view = overview(recording.timeline, None, {}, None)
    labels = [lane.label for lane in view.lanes if lane.label.startswith("rank ") and lane.kind == "device"]
    assert labels == [f"rank {r}" for r in range(8)] and view.hidden_lanes == 0
    for lane in view.lanes:  # nothing is drawn over something else
        assert (lane.start_ns[1:] >= lane.end_ns[:-1]).all() or lane.kind != "device"
    page = time_page(recording, result)
    assert "Each device" in page and "Who waited for whom" in page


def test_ranks_may_lie_in_subfolders(ranks, tmp_path):
    for file in ranks.iterdir():
        (tmp_path / "job" / file.stem).mkdir(parents=True)
        file.rename(tmp_path / "job" / file.stem / "trace.pt.trace.json")
    assert len(answer_by_time(open_recording(tmp_path / "job")).devices) == 8


def test_traces_of_ranks_are_merged_to_a_run(ranks, tmp_path):
    told = json.loads(invoke(merge, ranks, "-o", tmp_path / "all.tessera", "--json").output)
    assert told["collectives"]["stragglers"]["3"]["times"] == 4
    assert set(told["collectives"]["waits_s"]) == {str(r) for r in range(8) if r != 3}


def test_a_merged_run_of_kernels_without_operators_has_kernels(ranks, tmp_path):
    for file in ranks.iterdir():
        trace = json.loads(file.read_text())
        trace["traceEvents"] = [event for event in trace["traceEvents"] if event["cat"] != "cpu_op"]
        file.write_text(json.dumps(trace))
    invoke(merge, ranks, "-o", tmp_path / "all.tessera")
    shown = invoke(report, tmp_path / "all.tessera").output
    assert "every operator" in shown and "no kernels" not in shown


def test_watts_of_boards_that_were_seen_for_different_times_are_their_own(tmp_path):
    trace = json.loads(write_trace(tmp_path / "t.json", steps=400).read_text())
    for event in [e for e in trace["traceEvents"] if "device" in e.get("args", {})]:
        second = {**event, "pid": 1, "args": {**event["args"], "device": 1, "correlation": 0}}
        trace["traceEvents"].append(second)
    (tmp_path / "t.json").write_text(json.dumps(trace))
    rows = ["timestamp,index,power.draw.instant [W]"]
    for i in range(-20, 60):
        known = not 5 <= i <= 30  # the first board's sensor is silent for most of the 4 s
        rows.append(f"{BASE_NS / 1e9 + i / 10:.3f},0,{'300 W' if known else '[N/A]'}")
        rows.append(f"{BASE_NS / 1e9 + i / 10:.3f},1,200 W")
    (tmp_path / "power.csv").write_text("\n".join(rows))
    table = open_recording(tmp_path / "t.json", power=tmp_path / "power.csv").energy()
    assert 0.5 < table.coverage < 0.9
    assert table.energy_j / (table.time_s * table.coverage) == pytest.approx(500, rel=0.01)


def test_lanes_are_those_with_most_time_and_others_are_counted(tmp_path):
    trace = open_recording(write_trace(tmp_path / "t.json", streams=14, kernels=14)).timeline
    view = overview(trace, None, {}, None)
    assert len([lane for lane in view.lanes if lane.kind == "device"]) == LANES and view.hidden_lanes == 15 - LANES
    assert any("40" in lane.label for lane in view.lanes)  # four collectives, and more time than any other stream


def test_idle_of_a_step_is_the_devices_own(tmp_path):
    """The host ran ahead: kernels of a step end after its region, which is no reason for idle to be gone."""
    a, b = (
        write_trace(tmp_path / f"{name}.json", steps=6, chip=chip)
        for name, chip in (("a", "NVIDIA H200"), ("b", "NVIDIA A100-SXM4-80GB"))
    )
    data = json.loads(b.read_text())
    for event in data["traceEvents"]:
        if event["cat"] == "user_annotation":
            event["dur"] = 3_000.0  # all launches are made in it
        elif event["cat"] in ("cpu_op", "cuda_runtime"):
            step, offset = divmod(event["ts"], 10_000.0)
            event["ts"] = step * 10_000.0 + offset / 4
    b.write_text(json.dumps(data))
    found = analyze.diff(a, b, by="kernels")
    idle = next(r for r in found.subgraphs if r.name == "idle")
    assert idle.state == "both" and idle.after_s == pytest.approx(idle.before_s, rel=0.05)
    assert any("chips differ" in note and "H200" in note and "A100" in note for note in found.notes)


def test_a_run_of_inference_is_compared_by_pass():
    def cells(times: float) -> dict[str, Cell]:
        names = {"aten::mm": 4.0, "aten::add": 2.0, "aten::relu": 3.0}
        return {name: Cell(1.0, 0.1, 1e-3, 1e-5, calls * times, "op") for name, calls in names.items()}

    total = Cell(3.0, 0.1, 3e-3, 1e-5, 1.0)
    predicted = DiffSide(name="p", basis="predicted", total=total, views={"ops": cells(1)}, work={"sample": 8.0})
    run = DiffSide(name="r", basis="measured", total=total.scale(50.0), views={"ops": cells(50)}, span="run")
    notes: list[str] = []
    (one,), (two,) = count_passes([run], [predicted], notes)
    assert one.work["step"] == 50.0 and two.work["step"] == 1.0 and "50 times" in notes[0]


def test_the_peak_is_that_of_the_boards_that_the_joules_are_of(tmp_path: Path) -> None:
    """A log of all boards of a node, of which the program used one."""
    trace, log = write_trace(tmp_path / "t.json"), tmp_path / "power.csv"
    first_us = BASE_NS // 1000
    rows = [f"{first_us + t},gpu{i},{300 + 200 * i}" for t in range(-100_000, 200_000, 20_000) for i in range(2)]
    log.write_text("epoch_us,domain,watts\n" + "\n".join(rows) + "\n")
    answer = json.loads(invoke(report, trace, "--power", log, "--json").output)["answer"]
    assert answer["power_w"] == pytest.approx(300.0, rel=0.01)
    assert answer["peak_w"] == pytest.approx(300.0, rel=0.01)


def test_a_folder_of_ranks_and_a_log_are_analysed_as_they_are_reported(tmp_path: Path) -> None:
    ranks, log = tmp_path / "ranks", tmp_path / "power.csv"
    ranks.mkdir()
    for rank in range(2):
        write_trace(ranks / f"rank{rank}.json", rank=rank)
    first_us = BASE_NS // 1000
    rows = [f"{first_us + t},gpu0,300" for t in range(-100_000, 200_000, 20_000)]
    log.write_text("epoch_us,domain,watts\n" + "\n".join(rows) + "\n")
    told = json.loads(invoke(report, ranks, "--power", log, "--json").output)
    found = json.loads(invoke(explain, "power", ranks, "--power", log, "--json").output)
    assert found["facts"]["recorded_j"] == pytest.approx(told["energy_j"])
