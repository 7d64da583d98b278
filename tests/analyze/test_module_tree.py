"""The tree of modules of a trace, and two of them side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tessera import analyze
from tessera.analyze.time_answer import answer_by_time
from tessera.cli.main import cli
from tessera.profile.open_recording import open_recording
from tessera.report.analysis import text


def write(path: Path, linear_us: float, *, first: int = 0, steps: int = 2, extra: bool = False) -> Path:
    """Steps of a model of two blocks with two linear layers each; modules are numbered from `first` on."""
    events: list[dict[str, Any]] = []

    def span(cat: str, name: str, ts: float, dur: float, **args: Any) -> None:
        events.append({"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": 1, "ts": ts, "dur": dur, "args": args})

    number = 0
    for step in range(steps):
        at = 10_000.0 * step
        span("user_annotation", f"ProfilerStep#{step}", at, 9000)
        span("python_function", f"nn.Module: GPT_{first}", at + 1, 8000)
        for block in range(2):
            begin = at + 100 + 3000 * block
            span("python_function", f"nn.Module: Block_{first + block}", begin, 2500)
            for layer in range(2):
                inside = begin + 10 + 1000 * layer
                span("python_function", f"nn.Module: Linear_{first + 2 * block + layer}", inside, 900)
                number += 1
                span("cpu_op", "aten::mm", inside + 5, 50, **{"External id": number})
                kernel = {"device": 0, "stream": 7, "External id": number}
                span("kernel", "gemm", inside + 100, linear_us, **kernel)
            number += 1
            span("cpu_op", "aten::add", begin + 2200, 50, **{"External id": number})
            span("kernel", "add", begin + 2260, 20, **{"device": 0, "stream": 7, "External id": number})
        if extra:
            number += 1
            span("python_function", f"nn.Module: LayerNorm_{first}", at + 7000, 300)
            span("cpu_op", "aten::layer_norm", at + 7010, 50, **{"External id": number})
            span("kernel", "norm", at + 7100, 60, **{"device": 0, "stream": 7, "External id": number})
    path.write_text(json.dumps({"baseTimeNanoseconds": 1_790_000_000_000_000_000, "traceEvents": events}))
    return path


def test_modules_of_one_class_in_one_place_are_one_line(tmp_path):
    found = analyze.modules(write(tmp_path / "a.json", 100.0))
    rows = {r["path"]: r for r in found.rows}
    assert list(rows) == ["GPT", "GPT/Block", "GPT/Block/Linear"]
    block = rows["GPT/Block"]
    assert (block["instances"], block["calls"]) == (2, 4)
    assert block["time_s"] == pytest.approx(2 * 2 * 220e-6) and block["self_s"] == pytest.approx(2 * 2 * 20e-6)
    assert rows["GPT"]["share_pct"] == pytest.approx(100.0) and rows["GPT"]["self_s"] == pytest.approx(0.0)
    assert "    Linear" in text(found)


def test_a_module_that_launches_nothing_itself_has_no_seconds_of_its_own(tmp_path):
    """Not the rounding that is left of a difference: a screen showed it as -1.776e-06 ns."""
    found = analyze.modules(write(tmp_path / "a.json", 100.0, steps=7, extra=True))
    rows = {r["path"]: r for r in found.rows}
    assert rows["GPT"]["self_s"] == 0.0
    assert rows["GPT/LayerNorm"]["self_s"] == pytest.approx(7 * 60e-6)


def test_trees_match_whatever_their_modules_are_numbered(tmp_path):
    before, after = write(tmp_path / "a.json", 100.0), write(tmp_path / "b.json", 150.0, first=7, steps=3, extra=True)
    found = analyze.modules(before, against=after)
    rows = {r["path"]: r for r in found.rows}
    assert found.facts["per"] == "step"
    assert rows["GPT/Block/Linear"]["change_s"] == pytest.approx(4 * 50e-6)  # 2 and 3 steps: per step
    assert rows["GPT/Block"]["self_change_s"] == pytest.approx(0.0, abs=1e-9)
    new = rows["GPT/LayerNorm"]
    assert new["before_s"] == 0.0 and new["change_pct"] is None and new["after_s"] == pytest.approx(60e-6)
    assert list(rows)[1] == "GPT/Block"  # what changed most comes first
    words = ["analyze", "modules", str(before), "--against", str(after), "--json"]
    assert json.loads(CliRunner().invoke(cli, words).stdout)["facts"]["per"] == "step"


def test_tables_of_modules_contain_what_is_inside_them(tmp_path):
    """As tables of joules do: the same word means the same."""
    before = write(tmp_path / "a.json", 100.0)
    modules = {r.name: r for r in answer_by_time(open_recording(before)).modules}
    assert modules["nn.Module: Block_1"].time_s == pytest.approx(2 * 220e-6)
    assert modules["nn.Module: GPT_0"].time_s == pytest.approx(4 * 220e-6)
    after = write(tmp_path / "b.json", 150.0)
    rows = {r.name: r for r in analyze.diff(before, after, by="modules").subgraphs}
    assert rows["nn.Module: Block_0"].change_s == pytest.approx(100e-6)


def test_a_module_inside_one_of_its_name_counts_once(tmp_path):
    """As vLLM's compiled GraphModule_0, which calls others of this name: 103% of all kernels were in it."""
    path = write(tmp_path / "a.json", 100.0)
    path.write_text(path.read_text().replace("Linear_0", "Block_0"))
    modules = {r.name: r for r in answer_by_time(open_recording(path)).modules}
    assert modules["nn.Module: Block_0"].time_s == pytest.approx(2 * 220e-6)
    assert modules["nn.Module: Block_0"].calls == 4


def test_a_trace_without_modules_says_how_to_get_them(tmp_path):
    path = tmp_path / "none.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2}]}))
    assert "with_modules=True" in analyze.modules(path).missing["modules"]
