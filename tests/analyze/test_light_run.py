"""A light run: every kernel, operators of three steps. All that reads it says the same as of the run traced whole."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tessera import analyze, profile
from tessera.analyze.answer import answer
from tessera.cli import report
from tessera.profile.export import Chrome
from tessera.profile.open_recording import open_recording
from tessera.record import CODE
from tessera.recording import Recording
from tessera.timeline import Timeline
from tessera.timeline.columns import NONE

from command_line import invoke
from synthetic_run import START_NS, make

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "measure"))
from operator_alignment import make_light

STEPS = 16


def add_modules(timeline: Timeline) -> None:
    """A module around each block and one around each forward pass."""
    rows = np.flatnonzero(np.isin(timeline["name"], [timeline.names.index(name) for name in ("block", "forward")]))
    names = {timeline.names.index(of): len(timeline.names) + i for i, of in enumerate(("block", "forward"))}
    timeline.names += ["nn.Module: Block_0", "nn.Module: Model_0"]
    added = {name: values[rows] for name, values in timeline.columns.items()}
    added["kind"] = np.full(len(rows), CODE["op"])
    added["name"] = np.array([names[name] for name in added["name"].tolist()])
    timeline.columns = {name: np.concatenate([values, added[name]]) for name, values in timeline.columns.items()}
    timeline.meta["modules"] = list(names.values())
    timeline.links = None


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same run, light and traced whole."""
    folder = tmp_path_factory.mktemp("runs")
    made = make(steps=STEPS, layers=3, data_ms=12.0)
    made.timeline.energy_j = made.timeline.error_j = None
    add_modules(made.timeline)
    windows = [(START_NS, made.end_ns)]
    made.write(folder / "whole.tessera", mode="operators", windows=windows, tracing_s=0.0).close()
    steps = made.timeline.linked.steps
    found = make_light(made.timeline)
    assert found is not None
    first = (STEPS - 3) // 2
    traced = [(steps[first].start_ns, steps[first + 2].end_ns)]
    light = dataclasses.replace(made, timeline=found[0])
    facts = {"mode": "light", "windows": windows, "operator_windows": traced, "tracing_s": 0.0}
    light.write(folder / "light.tessera", **facts).close()
    return folder / "light.tessera", folder / "whole.tessera"


def open_both(runs: tuple[Path, Path]) -> tuple[Recording, Recording]:
    light, whole = (open_recording(path) for path in runs)
    return light, whole


@pytest.mark.parametrize("view", ["kernels", "ops", "regions", "modules", "steps"])
def test_its_table_is_that_of_the_run_traced_whole(runs: tuple[Path, Path], view: str) -> None:
    light, whole = (recording.energy().rows(view) for recording in open_both(runs))
    assert light
    assert [(row.name, row.calls) for row in light] == [(row.name, row.calls) for row in whole]
    for field in ("energy_j", "error_j", "time_s"):
        own, theirs = ([getattr(row, field) for row in rows] for rows in (light, whole))
        assert own == pytest.approx(theirs, rel=1e-6)


def test_regions_that_only_a_tracer_names_are_counted_in_every_step(runs: tuple[Path, Path]) -> None:
    """torch names the step of an optimizer while it is traced: in the other steps nothing has that region."""
    light, whole = open_both(runs)
    timeline = light.timeline
    first_ns, last_ns = light.facts.operator_windows[0]
    optimizer = timeline["name"] == timeline.names.index("optimizer.step")
    inside = (timeline["start_ns"] >= first_ns) & (timeline["end_ns"] <= last_ns)
    keep = np.flatnonzero(~optimizer | inside)
    timeline.columns = {name: values[keep] for name, values in timeline.columns.items()}
    timeline.links = None
    own, theirs = (
        next(row for row in recording.energy().regions if row.name == "optimizer.step") for recording in (light, whole)
    )
    assert own.calls == theirs.calls == STEPS
    assert own.energy_j == pytest.approx(theirs.energy_j, rel=0.02)
    assert own.wall_s == pytest.approx(theirs.wall_s, rel=0.02)


def test_how_much_was_aligned_is_stated(runs: tuple[Path, Path]) -> None:
    light, whole = open_both(runs)
    known = light.energy().operators
    assert known is not None
    kernels = len(light.timeline.device_rows)
    assert (known.traced_kernels, known.aligned_kernels, known.unknown_kernels) == (
        3 * kernels // STEPS,
        kernels - 3 * kernels // STEPS,
        0,
    )
    assert known.share == 1.0
    assert whole.energy().operators is None
    data = json.loads(invoke(report.command, runs[0], "--json").output)
    assert data["operators"]["aligned_kernels"] == known.aligned_kernels
    assert data["operators"]["share"] == 1.0
    screen = invoke(report.command, runs[0]).output
    assert "every kernel, 100% with operators" in " ".join(screen.split())


def test_what_is_not_aligned_has_no_operator_and_is_counted(runs: tuple[Path, Path]) -> None:
    light = open_both(runs)[0]
    timeline = light.timeline
    last = timeline.device_rows[-40:]
    timeline.columns["name"] = timeline["name"].copy()
    timeline.columns["name"][last] = len(timeline.names)
    timeline.names.append("never_traced")
    timeline.links = None
    table = light.energy()
    assert table.operators is not None
    assert table.operators.unknown_kernels == 40
    nobody = next(row for row in table.ops if row.name == "(no operator)")
    assert nobody.energy_j == pytest.approx(table.operators.unknown_j)
    assert table.operators.share < 1.0


def test_its_advice_is_that_of_the_run_traced_whole(runs: tuple[Path, Path]) -> None:
    """The tracer's silence is for the steps with operators: the data loader makes the device wait in all others."""
    light, whole = (answer(recording) for recording in open_both(runs))
    assert [a.kind for a in light.advice] == [a.kind for a in whole.advice]
    assert any(a.kind == "idle" and "DataLoader" in a.evidence for a in light.advice)
    ours, theirs = ({gap.during: gap.count for gap in found.gaps} for found in (light, whole))
    assert ours.keys() == theirs.keys()
    assert all(ours[during] <= theirs[during] for during in ours)
    assert sum(gap.energy_j for gap in light.gaps) < sum(gap.energy_j for gap in whole.gaps)


def test_its_roofline_counts_the_work_of_all_steps(runs: tuple[Path, Path]) -> None:
    light, whole = (analyze.roofline(str(path), by="op") for path in runs)
    assert [(r["name"], r["calls"]) for r in light.rows] == [(r["name"], r["calls"]) for r in whole.rows]
    assert [r["time_s"] for r in light.rows] == pytest.approx([r["time_s"] for r in whole.rows])


def test_its_idle_time_has_the_reasons_of_the_run_traced_whole(runs: tuple[Path, Path]) -> None:
    light, whole = (analyze.breakdown(str(path)).facts for path in runs)
    for reason in ("host_bound", "kernel_gap", "waiting"):
        assert light[f"idle_{reason}_s"] == pytest.approx(whole[f"idle_{reason}_s"], rel=0.05)


def test_its_critical_path_is_that_of_the_steps_with_operators(runs: tuple[Path, Path]) -> None:
    light, whole = (analyze.critical_path(str(path)).facts for path in runs)
    assert light["length_s"] == pytest.approx(whole["length_s"] * 3 / STEPS, rel=0.1)
    assert light["host_pct"] == pytest.approx(whole["host_pct"], abs=3.0)


def test_it_differs_in_nothing_from_the_run_traced_whole(runs: tuple[Path, Path]) -> None:
    result = analyze.diff(*map(str, runs))
    assert result.matched == (1.0, 1.0)
    assert len(result.rows) > 5
    for row in result.rows:
        assert row.state == "both"
        assert (row.after_calls, row.after_j) == pytest.approx((row.before_calls, row.before_j))


def test_modules_of_a_step_differ_in_nothing(runs: tuple[Path, Path]) -> None:
    result = analyze.diff(*map(str, runs), by="modules")
    assert [row.name for row in result.rows]
    for row in result.rows:
        assert (row.after_calls, row.after_j) == pytest.approx((row.before_calls, row.before_j), rel=0.02)


def test_sums_of_old_kernels_have_operators_by_what_they_are(runs: tuple[Path, Path]) -> None:
    """A long run keeps sums of its first minutes: rows that stand for many launches, in no order."""
    timeline = open_both(runs)[0].timeline
    gemm = next(i for i, name in enumerate(timeline.names) if name.startswith("nvjet_sm90_tst_256"))
    old = np.flatnonzero(timeline["name"] == gemm)[:3]
    count = np.full(len(timeline), NONE)
    count[old] = 1_000
    timeline.columns |= {"count": count, "external": timeline["external"].copy()}
    timeline.columns["external"][old] = NONE
    timeline.links = None
    links = timeline.linked
    assert [timeline.name(int(row)) for row in links.op[old]] == ["aten::addmm"] * 3


def test_an_exported_trace_has_the_same_operators(runs: tuple[Path, Path], tmp_path: Path) -> None:
    light = open_both(runs)[0]
    Chrome(tmp_path / "trace.json").write(light)
    again = profile.load(tmp_path / "trace.json").timeline

    def list_operators(timeline: object) -> list[tuple[str, str | None]]:
        return [(r.name, r.op) for r in timeline.records() if r.kind == "kernel"]  # type: ignore[attr-defined]

    assert list_operators(again) == list_operators(light.timeline)
    assert not np.any(light.timeline.linked.op[light.timeline.device_rows] == NONE)
