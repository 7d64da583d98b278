"""benchmarks/page/build.py: goals without a figure say so, figures are those the scripts write, rehearsals are none."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DEVICE_RESULTS = (
    "ops_gemm", "ops_rows", "ops_precision", "ops_streams", "optimize", "checkpointing", "schedule_caps", "tune",
    "overhead_profile", "cupti_light",
)  # fmt: skip
H200 = {"gpu": "NVIDIA H200", "torch": "2.11.0+cu130"}


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The page's modules, reading a folder of results that has none of the device scripts' files."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "page"))
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        if path.stem not in DEVICE_RESULTS:
            shutil.copy(path, tmp_path)
    goal = importlib.import_module("goal")
    monkeypatch.setattr(goal, "RESULTS", tmp_path)
    names = ("measuring", "predicting", "profiling", "analysing", "operators", "schedules", "first_hour")
    return {n: importlib.import_module(n) for n in names}


def rows_of(module: ModuleType, part: str) -> list[Any]:
    return [g for g in module.goals() if part in g.what]


def test_goals_without_results_are_open_and_name_their_script(pages: dict[str, ModuleType]) -> None:
    every = [g for module in pages.values() for g in module.goals()]
    still = [g for g in every if not g.reached and "benchmarks/device/" in g.command]
    assert {re.search(r"device/(\w+)\.py", g.command)[1] for g in still} == set(DEVICE_RESULTS)  # type: ignore[index]
    table = importlib.import_module("goal").table(still, whole=False)
    assert len(table) == len(still) + 2
    assert all("not yet measured on a GPU: `benchmarks/device/" in line and "| open |" in line for line in table[2:])


def test_every_command_of_the_page_is_there(pages: dict[str, ModuleType]) -> None:
    for module in pages.values():
        for g in module.goals():
            for script in re.findall(r"(?:benchmarks|tests)/[\w/]+\.py", g.command):
                assert (ROOT / script).exists(), g
            assert g.reached == "" or g.where, g


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").rglob("*.json")), ids=lambda p: p.stem)
def test_every_result_carries_its_machine_date_and_commit(path: Path) -> None:
    stamp = json.loads(path.read_text())["stamp"]
    assert all(stamp[key] for key in ("machine", "date", "commit"))


def test_a_result_is_stamped_when_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    result_file = importlib.import_module("result_file")
    content = {"rows": [{"way": "torch", "ms": 1.5}] * 90, "empty": [], 3: "µs"}
    result_file.write_result(tmp_path / "x.json", content)
    assert result_file.read_result(tmp_path / "x.json") == {"rows": content["rows"], "empty": [], "3": "µs"}
    assert set(json.loads((tmp_path / "x.json").read_text())["stamp"]) == {"machine", "date", "commit"}


def write(folder: Path, name: str, content: Any) -> None:
    stamp = {"machine": "NVIDIA H200", "date": "2026-11-20", "commit": "abcdef0"}
    (folder / f"{name}.json").write_text(json.dumps({**content, "stamp": stamp}))


def test_a_rehearsal_is_refused(pages: dict[str, ModuleType], tmp_path: Path) -> None:
    for content in (
        {"rows": [], "quick": True, "machine": H200}, {"rows": [], "machine": {"quick": True, "device": "cpu"}},
        {"torch": "2.13.0+cpu", "device": "cpu", "rows": []}, {"rows": []},
    ):  # fmt: skip
        write(tmp_path, "ops_rows", content)
        with pytest.raises(SystemExit, match="rehearsal"):
            pages["operators"].goals()


# -- figures, in the shape the scripts write them ------------------------------------------------------------------


def gemm(joules: float, count: int = 12) -> dict[str, Any]:
    rows = [{"group": "gemm", "name": f"matmul {i}", "time_ratio": 1.0, "joule_ratio": joules} for i in range(count)]
    wins = [{"group": "unaligned", "name": f"linear {i}", "time_ratio": 0.5, "joule_ratio": 0.5} for i in range(3)]
    worst = {f"{k}_worst": [2e-3, "3x5x7"] for k in ("matmul", "conv2d", "padding")}
    cases = {f"{k}_cases": 10 for k in ("matmul", "conv2d", "padding")}
    return {"rows": rows + wins, "numerics": {**worst, **cases, "failed": [], "not_written": 0}, "machine": H200}


def rows(ms: float) -> dict[str, Any]:
    base = {"stage": "op", "op": "softmax", "cols": 1024, "dtype": "bf16", "training": False, "J": 0.1}
    found = [
        {**base, "rows": i, "way": way, "ms": 1.0 if way == "torch" else ms}
        for i in range(12)
        for way in ("torch", "op")
    ]
    return {"rows": found, "numerics": [{"case": "softmax 3x17", "errors": {"y": 3e-3}}], "machine": H200}


def test_operators_against_torch(pages: dict[str, ModuleType], tmp_path: Path) -> None:
    write(tmp_path, "ops_gemm", gemm(1.01))
    write(tmp_path, "ops_rows", rows(1.2))
    ops = pages["operators"]
    matmul, softmax = (rows_of(ops, f"op.{name} ")[0] for name in ("matmul", "softmax"))
    assert matmul.met and "1.000 (1.000) / 1.010 (1.010), 12 shapes" in matmul.reached
    assert softmax.met is False and softmax.reached.startswith("1.200 (1.200) / 1.000")
    assert rows_of(ops, "op.rms_norm ")[0].reached == ""
    assert rows_of(ops, "named wins")[0].met and matmul.where == "NVIDIA H200, 2026-11-20"
    numerics = rows_of(ops, "numerics")[0]
    assert numerics.met and numerics.reached.startswith("3.0e-03 (softmax 3x17 y), 0 of 31")
    write(tmp_path, "ops_gemm", gemm(1.01, count=11))
    assert rows_of(ops, "op.matmul ")[0].met is False  # too few shapes


def test_turns_are_averaged_and_not_taken_for_shapes(pages: dict[str, ModuleType], tmp_path: Path) -> None:
    found = rows(1.04)
    found["rows"] += [{**row, "turn": 1, "ms": row["ms"] + 0.04} for row in found["rows"] if row["rows"] == 0]
    found["skipped"] = [
        "op: softmax rows=1 cols=1024 dtype=bf16 training=False op",  # its first turn is there
        "op: softmax rows=99 cols=1024 dtype=bf16 training=False op",
    ]
    write(tmp_path, "ops_rows", found)
    softmax = rows_of(pages["operators"], "op.softmax ")[0]
    assert softmax.reached.startswith("1.040 (1.040) / 1.000 (1.000), 12 shapes (1 not reached)")
    found["rows"][-1]["ms"] += 0.1
    write(tmp_path, "ops_rows", found)
    assert (
        "(1.088) / 1.000 (1.000), 12 shapes (1 not reached), 1 over 1.05"
        in rows_of(pages["operators"], "op.softmax ")[0].reached
    )


def test_precision_and_whole_models(pages: dict[str, ModuleType], tmp_path: Path) -> None:
    joules = {"bf16": "bf16 operands", "fp8": "bf16 operands, both cast"}
    found = [
        {"part": "joules", "n": n, "precision": p, "counted": c, "J": 1.0 if p == "bf16" else 0.6}
        for n in (2048, 4096) for p, c in joules.items()
    ]  # fmt: skip
    summary = {
        "random_cases": 300,
        "random_violations": 0,
        "random_chosen_0.05": {"fp8": 100},
        "random_chosen_0.01": {"fp8": 2},
    }
    found += [{"part": "layer", "shape": [8, 8, 8], "tolerance": 5e-2, "chosen": "fp8"}]
    layers = (("fp8", 0.6), ("bf16", 1.0), ("fp32", 12.0))
    found += [{"part": "layer joules", "shape": [8, 8, 8], "precision": p, "J": j} for p, j in layers]
    write(tmp_path, "ops_precision", {"rows": found, "summary": summary, "machine": H200})
    off = {name: {"ms": 0.3, "J": 0.05, "peak_bytes": -0.02} for name in ("none", "chosen", "all")}
    write(tmp_path, "checkpointing", {"off": off, "device": "NVIDIA H200"})
    ways = {
        "eager": {"ms": 50.0, "j": 26.0},
        "optimize": {"ms": 30.0, "j": 17.0, "explained_j": 0.95, "explained_s": 0.92, "chosen": "x"},
        "optimize over best mode": {"best_mode": "reduce-overhead", "j_ratio": 0.99, "s_ratio": 1.03},
    }
    write(tmp_path, "optimize", {"torch": "2.11.0+cu130", "models": {"gpt2": ways, "bert": {"eager": {"error": "x"}}}})
    ops = pages["operators"]
    prepared, cast = rows_of(ops, "fp8 against bf16")
    assert prepared.reached == "" and cast.reached == "4096, fp8: 40.0" and cast.met
    assert rows_of(ops, "the same layers")[0].reached == "0.05: 40 / 95"
    assert rows_of(ops, "GPU, random")[0].reached == "0 of 300 (fp8 102)"
    assert rows_of(ops, "checkpointing")[0].met
    assert rows_of(ops, "GPT-2-small")[0].met is False  # 3% slower than the best mode
    assert rows_of(ops, "BERT inference")[0].reached == ""


def test_schedules(pages: dict[str, ModuleType], tmp_path: Path) -> None:
    capped = {
        "mean_off_pct": -1.0,
        "worst_window_off_pct": 4.0,
        "of_best_fixed_duty_pct": 98.0,
        "joules_per_call": 30.0,
    }
    caps = {"machine": H200, "two processes on one GPU, 450 W": {**capped, "calls_per_s": [90.0, 100.0]}}
    for name, row in (("MoE training", capped), ("compiled BERT", {**capped, "worst_window_off_pct": 6.0})):
        caps |= {f"{name} free": {"mean_w": 690.0, "joules_per_call": 20.0}}
        caps |= {f"{name} at {share}": row for share in (0.85, 0.7, 0.5)}
    caps |= {"GPT-2 training free": {"skipped": "no time"}}
    for name in pages["schedules"].UNREACHED:
        caps[f"{name} under a cap that is not reached"] = {"over_pct": 0.4}
    write(tmp_path, "schedule_caps", caps)
    both = (("best_mode", 17.5), ("eager", 26.5), ("chosen", 16.0))
    modes = {k: {"setting": {"compile": "x"}, "energy_j": j} for k, j in both}
    models = [
        {"model": "gpt2", "saved_pct": 41.0, "speedup": 1.9, "below_best_mode_pct": 6.0, "again": modes},
        {"model": "bert", "saved_pct": 30.0, "speedup": 0.9, "below_best_mode_pct": 6.0, "again": modes},
        {"model": "resnet", "error": "out of memory"},
    ]
    write(
        tmp_path,
        "tune",
        {"device": "NVIDIA H200", "models": models, "regret": {"regret_pct": 1.0, "settings": 6}},
    )
    page = pages["schedules"]
    assert [rows_of(page, f"of free, {name}")[0].met for name in ("MoE", "compiled", "GPT-2")] == [True, False, None]
    assert rows_of(page, "of free, MoE")[0].reached == "-1.0, +4.0, 98; -1.0, +4.0, 98; -1.0, +4.0, 98"
    assert [rows_of(page, m)[0].met for m in ("GPT-2-small training", "BERT-base", "ResNet-50")] == [True, False, None]
    assert rows_of(page, "GPT-2-small training")[0].reached == "41.0; 1.90; 6.0 (compile=x: 16.00 J)"
    assert rows_of(page, "at least 5% below")[0].reached == "2 of 2 (gpt2, bert)"
    assert (
        rows_of(page, "node bucket")[0].met and rows_of(page, "regret")[0].met and rows_of(page, "not reached")[0].met
    )


def test_a_run_cut_off_is_compared_by_its_trials(pages: dict[str, ModuleType], tmp_path: Path) -> None:
    trials = [
        {"setting": {}, "energy_j": 2.0},
        {"setting": {"compile": "default"}, "energy_j": None},
        {"setting": {"compile": "reduce-overhead"}, "energy_j": 1.5},
        {"setting": {"compile": "default", "graph": True}, "energy_j": 1.0},
    ]
    bert = {"model": "bert", "trials": trials, "chosen": trials[-1]["setting"], "compared_by": "its trials"}
    bert |= {"saved_pct": 50.0, "speedup": 2.0, "below_best_mode_pct": 33.3}
    write(tmp_path, "tune", {"device": "NVIDIA H200", "models": [bert]})
    row = rows_of(pages["schedules"], "BERT-base")[0]
    assert row.reached == "50.0; 2.00; 33.3 (compile=default, graph: 1.00 J); by the trials of its search, once each"
    assert row.beside == "torch.compile reduce-overhead: 1.50 J; eager 2.00 J" and row.met


def test_profilers_overhead(pages: dict[str, ModuleType], tmp_path: Path) -> None:
    parts = {
        how: {
            "over_pct": v,
            "low_pct": -0.1,
            "high_pct": 2.5,
            "step_ms": 60.0,
            "units": 8,
            "beside": beside,
            "beside_ms": 59.0,
        }
        for how, beside, v in (("sampling", "plain", 0.6), ("timeline", "torch", 1.0))
    }
    write(tmp_path, "overhead_profile", {**H200, **parts})
    sampling, timeline = pages["profiling"].goals()[:2]
    assert sampling.met is False and timeline.met and "torch 59.0" in timeline.beside


# What the page reads, by script: a key renamed there must be renamed here.
READ = {
    "ops_gemm": ("time_ratio", "joule_ratio", "_worst", "_cases", "failed", "group"),
    "ops_rows": ("stage", "way", "numerics", "errors", "case"),
    "ops_precision": ("_violations", "_cases", "_chosen_", "counted", "bf16 operands", "layer joules"),
    "ops_streams": ("hidden", "host_memory", "model_wins", "section"),
    "optimize": ("j_ratio", "s_ratio", "explained_", "best_mode", "optimize over best mode"),
    "checkpointing": ("off", "peak_bytes"),
    "schedule_caps": (
        "mean_off_pct", "worst_window_off_pct", "of_best_fixed_duty_pct", "joules_per_call", "calls_per_s", "over_pct",
        "two processes on one GPU, 450 W", " under a cap that is not reached", " at {share}", " free",
    ),
    "tune": ("saved_pct", "speedup", "below_best_mode_pct", "regret_pct", "best_mode", "again"),
    "cupti_light": ("programs", "over_pct", "tied", "stop_s"),
    "overhead_profile": ("over_pct", "low_pct", "high_pct", "beside_ms", "sampling", "timeline"),
}  # fmt: skip


@pytest.mark.parametrize("script", DEVICE_RESULTS)
def test_the_scripts_write_what_the_page_reads(script: str) -> None:
    source = (ROOT / "benchmarks" / "device" / f"{script}.py").read_text()
    assert [key for key in READ[script] if key not in source] == []


# -- the first screen ----------------------------------------------------------------------------------------------


def test_the_first_look_is_one_screen_and_leaves_its_pages(tmp_path: Path) -> None:
    """The job of `make run`, with fewer steps: what it prints fits a screen, and what it names is there."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100"}
    script = ["sh", "examples/first_look.sh", "--steps", "8"]
    done = subprocess.run(script, cwd=tmp_path, env=env, text=True, stdout=-1, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, done.stdout
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    # Up to ten lines hang on how busy this machine is: that it is busy (two), advice on an operator with 30% of the
    # joules (here a product has about that), on its format (two), a first step that was disturbed, what is in no table
    # and why (three), and a straggler.
    assert len(lines) <= 56 and max(map(len, lines)) <= 100, done.stdout
    assert [line.split()[2] for line in lines if line.startswith("$ tessera ")] == [
        "run",
        "report",
        "predict",
        "predict",
        "diff",
    ]
    for chip in ("h200", "a100", "jetson-orin"):
        assert any(line.lstrip("* ").startswith(f"{chip} ") for line in lines), done.stdout
    assert any(line.startswith("energy ") for line in lines) and any(line.startswith("next ") for line in lines)
    made = {path.name for path in (tmp_path / "runs").iterdir()}
    assert made >= {"look1.tessera", "look1.html", "look1-chips.html", "look1-h200.html"}
