"""The critical path of one step, and its drawing in a Chrome trace."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tessera import analyze
from tessera.analyze.critical_path import find_path
from tessera.cli.main import cli
from tessera.errors import ArgumentError
from tessera.profile.export import Chrome
from tessera.profile.open_recording import open_recording
from tessera.timeline import kineto

BASE_NS = 1_790_000_000_000_000_000


def event(cat: str, name: str, ts: float, dur: float, tid: int = 7, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two steps of 100 us; each launches two kernels, the second of which ends after its step."""
    events = []
    for step, at in enumerate((1000.0, 1100.0), 4):
        events.append(event("user_annotation", f"ProfilerStep#{step}", at, 100))
        events.append(event("user_annotation", "forward", at + 1, 40 + step))
        for i, (launched, begins, lasts) in enumerate(((10, 20, 30), (30, 50, 70))):
            number = 10 * step + i
            events.append(event("cpu_op", f"aten::op{i}", at + launched - 2, 8))
            events.append(event("cuda_runtime", "cudaLaunchKernel", at + launched, 5, correlation=number))
            name = f"kernel{i}_of_{step}"
            events.append(event("kernel", name, at + begins, lasts, device=0, stream=7, correlation=number))
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"baseTimeNanoseconds": BASE_NS, "traceEvents": events}))
    return path


def test_a_step_ends_with_its_last_kernel_and_begins_with_itself(trace):
    for step, start_us in (("ProfilerStep#4", 1000), ("4", 1000), (5, 1100)):
        found = analyze.critical_path(trace, step=step)
        assert found.facts["length_s"] == pytest.approx(120e-6)
        assert sum(r["ns"] for r in found.rows) == 120_000
        pieces = find_path(open_recording(trace), step)
        assert (pieces[0].start_ns - BASE_NS) / 1e3 == start_us
        assert all(a.end_ns == b.start_ns for a, b in itertools.pairwise(pieces))
        kernels = [p.name for p in pieces if p.on == "device"]
        own = [f"kernel{i}_of_{step if step == 5 else 4}" for i in (0, 1)]
        assert kernels == (["kernel1_of_4", *own] if step == 5 else own)  # the step before still held the device up
    assert analyze.critical_path(trace).facts["length_s"] > 200e-6  # the whole trace is two of them


def test_a_region_is_the_longest_of_its_name(trace):
    pieces = find_path(open_recording(trace), "forward")
    assert (pieces[0].start_ns - BASE_NS) / 1e3 == 1101 and pieces[-1].name == "kernel1_of_5"


@pytest.mark.parametrize("step", ["ProfilerStep#6", "77"])
def test_an_unknown_step_is_answered_with_those_that_exist(trace, step):
    with pytest.raises(ArgumentError, match="no step") as caught:
        analyze.critical_path(trace, step=step)
    assert "ProfilerStep#4" in caught.value.fix


def test_the_path_is_drawn_above_the_rows_and_read_back_without_it(trace, tmp_path):
    out = tmp_path / "path.json"
    words = ["export", str(trace), "--chrome", str(out), "--critical-path", "--step", "5"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    events = json.loads(out.read_text())["traceEvents"]
    drawn = [e for e in events if e.get("cat") == "critical_path"]
    assert sum(e["dur"] for e in drawn) == pytest.approx(120.0)
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert "critical path" in names
    critical = {e["name"] for e in events if e.get("args", {}).get("critical")}
    assert {"kernel0_of_5", "kernel1_of_5"} <= critical and "kernel0_of_4" not in critical
    again = kineto.read(out)
    plain = tmp_path / "plain.json"
    Chrome(plain).write(open_recording(trace))
    assert len(again) == len(kineto.read(plain)) and not [n for n in again.notes if "critical" in str(n)]


@pytest.mark.parametrize("words", [["--csv", "x.csv", "--critical-path"], ["--chrome", "x.json", "--step", "5"]])
def test_options_that_need_each_other_say_so(trace, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="needs"):
        CliRunner().invoke(cli, ["export", str(trace), *words], standalone_mode=False, catch_exceptions=False)
