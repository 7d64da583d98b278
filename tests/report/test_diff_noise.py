"""Noise told from change: what was measured once, what steps and repeated runs say, rows that sum, like with like."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera import analyze
from tessera.analyze.compare import side_of
from tessera.analyze.mean_step import independent_error, mean_error
from tessera.analyze.sides import span_of
from tessera.cli import report as report_command
from tessera.cli.diff import command
from tessera.errors import ArgumentError
from tessera.joules import DomainSamples
from tessera.report.diff import text
from tessera.report.diff_html import page
from tessera.schema import Domain, Energy, EnergyReport, Work
from tessera.timeline import Builder, Timeline
from tessera.trace import PowerTrace

import synthetic_run
from command_line import invoke

T0 = 1_790_000_000_000_000_000
US = 1000
MODEL = Domain(name="cpu0", source="modelled", resolution_s=0.01, gain_error=0.3, basis="modelled")
RING = Domain(name="gpu0", source="nvml-samples", resolution_s=0.02, label="NVIDIA H200")


def measured(joules: float, seconds: float = 10.0, **work: float) -> EnergyReport:
    energy = Energy(energy_j=joules, error_j=0.001 * joules, time_s=seconds, source="nvml-samples")
    return EnergyReport(
        name="python work.py", total=energy, by_domain={"gpu0": energy},
        work=[Work(amount=n, unit=u) for u, n in work.items()],
    )  # fmt: skip


def saved(path: Path, given: Any) -> Path:
    path.write_bytes(msgspec.json.encode({"returncode": 0, "report": given}))
    return path


@pytest.fixture
def run() -> Callable[..., Any]:
    return functools.partial(invoke, command)


# -- measured once --------------------------------------------------------------------------------------------------


def test_what_was_measured_once_is_unknown(run: Callable[..., Any], tmp_path: Path) -> None:
    a, b = (saved(tmp_path / f"{n}.json", measured(j, s)) for n, j, s in (("a", 100.0, 10.0), ("b", 152.0, 15.0)))
    found = analyze.diff(a, b)
    assert math.isnan(found.total.error_j) and math.isnan(found.total.error_s) and math.isnan(found.whole.error_j)
    assert not found.significant and not found.total.significant_s
    verdict = found.verdict(fail_above=0.5)
    assert not verdict.known and not verdict.failed and verdict.text.startswith("unknown: each was measured once")
    assert "the limit of 50.0% was not applied" in verdict.text
    for metric in ("energy", "time"):
        shown = run(a, b, "--fail-above", "50%", "--metric", metric)
        assert shown.code == 0 and "unknown: each was measured once" in shown.output
        assert "more than noise" not in shown.output
    assert "--by ops" not in shown.output.splitlines()[-1], "there are none"
    assert json.loads(run(a, b, "--json").output)["verdict"]["known"] is False
    assert "unknown: measured once" in page(found)


def test_stated_steps_are_measured_once_too() -> None:
    found = analyze.diff(measured(100.0, step=10), measured(150.0, step=10))
    assert found.per == "step" and found.total.before_j == 10.0 and not found.verdict().known


# -- several runs ---------------------------------------------------------------------------------------------------


def test_repeated_runs_decide_by_their_scatter(run: Callable[..., Any], tmp_path: Path) -> None:
    files = {
        name: [saved(tmp_path / f"{name}{i}.json", measured(j)) for i, j in enumerate(values)]
        for name, values in (("a", (100, 104, 97)), ("same", (99, 103, 106)), ("dear", (130, 128, 134)))
    }
    same = run(*files["a"], "--", *files["same"], "--fail-above", "1%")
    assert same.code == 0 and "noise, within" in same.output and "3 and 3 runs" in same.output
    dear = run(*files["a"], "--fail-above", "5%", "--", *files["dear"])
    assert dear.code == 1 and "from 3 and 3 runs" in " ".join(dear.output.split())
    assert " -- " in dear.output.splitlines()[-1], "the next command has both"
    assert run(*files["a"], "--", *files["dear"], "--metric", "time", "--fail-above", "0%").code == 0
    one = run(*files["a"], "--", files["dear"][0], "--fail-above", "5%")
    assert one.code == 1, "one run scatters as those before"
    assert run(*files["a"], "--", files["same"][2], "--fail-above", "1%").code == 0


def test_usage_of_several_files(run: Callable[..., Any], tmp_path: Path) -> None:
    a = saved(tmp_path / "a.json", measured(1.0))
    for words in ((a, a, a), (a,), (a, "--"), (a, "--", tmp_path / "none.json"), ()):
        found = run(*words)
        assert found.code == 2 and found.output.startswith("error: ") and "  fix: " in found.output
    assert run(a, "--", a).code == 0


def test_intervals_of_repeated_runs_hold() -> None:
    """Two sets of runs of one program differ by less than the half-width nine times of ten."""
    rng, outside = np.random.default_rng(2), 0
    for _ in range(400):
        sets = [[dataclasses.replace(measured(j)) for j in rng.normal(100.0, 9.0, 4)] for _ in range(2)]
        outside += analyze.diff(*sets).significant
    assert 0.05 < outside / 400 < 0.14


def test_a_side_is_some_runs_or_a_prediction() -> None:
    with pytest.raises(ArgumentError, match="nothing before"):
        analyze.diff([], measured(1.0))
    guess = dataclasses.replace(side_of(measured(1.0)), basis="predicted")
    with pytest.raises(ArgumentError, match="mixed in what is after"):
        analyze.diff(measured(1.0), [measured(1.0), guess])


# -- how steps scatter ----------------------------------------------------------------------------------------------


def test_one_step_has_no_scatter() -> None:
    assert math.isnan(mean_error([1.0])) and math.isnan(independent_error([1.0])) and mean_error([1.0, 1.0]) == 0.0


def test_a_drifting_run_is_less_sure_than_its_steps_say() -> None:
    rng = np.random.default_rng(0)
    steady = 1.0 + 0.02 * rng.normal(size=40)
    drifting = steady + np.repeat([0.0, 0.1, 0.05, -0.1, -0.05], 8)
    naive = 1.684 * float(np.std(drifting, ddof=1)) / math.sqrt(40)
    assert mean_error(drifting) > 2 * naive


@pytest.mark.parametrize("count", [6, 12, 40])
def test_scatter_holds_the_mean_of_steady_steps(count: int) -> None:
    rng = np.random.default_rng(count)
    missed = sum(abs(float(x.mean())) > mean_error(x) for x in rng.normal(size=(1000, count)))
    assert 0.02 < missed / 1000 < 0.125  # the wider of two intervals: rather too wide than too narrow


# -- rows by step ---------------------------------------------------------------------------------------------------


class Program:
    """Operators of a host or kernels of a device, one after the other, some in steps, with a power curve."""

    def __init__(self, *, device: bool) -> None:
        self.build, self.device, self.now, self.number = Builder(), device, T0, 0

    def op(self, name: str, us: int) -> None:
        start, self.number = self.now, self.number + 1
        if not self.device:
            self.now += us * US
            self.build.add("op", name, start, self.now, thread=1)
            return
        self.now += 5 * US
        at = self.build.add("op", name, start, self.now, thread=1)
        self.build.add("runtime", "cudaLaunchKernel", start + US, self.now - US, thread=1, correlation=self.number)
        self.build.add(
            "kernel", f"k_{name}", self.now, self.now + us * US, device=0, stream=7, correlation=self.number, parent=at
        )
        self.now += us * US

    def step(self, number: int, ops: list[tuple[str, int]]) -> None:
        start = self.now
        for name, us in ops:
            self.op(name, us)
        self.now += 20 * US
        self.build.add("region", f"step_{number}", start, self.now, thread=1)

    def timeline(self) -> Timeline:
        return self.build.build()

    def power(self, watts: float = 50.0) -> PowerTrace:
        times = np.arange(T0 - 20_000_000, self.now + 40_000_000, 10_000_000)
        domain = RING if self.device else MODEL
        curve = watts * (1.0 + 0.3 * np.sin(np.arange(len(times))))
        return PowerTrace(
            {domain.name: DomainSamples.of(domain, times, curve)}, start_ns=int(times[0]), end_ns=int(times[-1])
        )


OPS = st.lists(st.tuples(st.sampled_from(["mm", "add", "mul", "cat"]), st.integers(200, 20_000)), max_size=5)


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(OPS.filter(bool), min_size=1, max_size=6), before=OPS, between_steps=OPS,
    after=OPS, device=st.booleans(), view=st.sampled_from(["ops", "kernels"]),
)  # fmt: skip
def test_rows_of_steps_sum_to_the_step_and_with_the_outside_to_the_run(
    steps: list[Any], before: list[Any], between_steps: list[Any], after: list[Any], device: bool, view: str
) -> None:
    program = Program(device=device)
    for name, us in before:
        program.op(name, us)
    for i, ops in enumerate(steps):
        program.step(i, ops)
        for name, us in between_steps:
            program.op(name, us)
    for name, us in after:
        program.op(name, us)
    timeline = program.timeline()
    found = analyze.diff(timeline, timeline, power_a=program.power(), power_b=program.power(), by=view)
    t, count = found.total, found.work[0]
    assert found.per == "step" and found.outside is not None
    for field in ("before_j", "after_j", "before_s", "after_s"):
        rows = math.fsum(getattr(r, field) for r in found.rows)
        assert rows == pytest.approx(getattr(t, field), rel=1e-6, abs=1e-12)
        whole = getattr(t, field) * count + getattr(found.outside, field)
        assert whole == pytest.approx(getattr(found.whole, field), rel=1e-6)
    first = len(steps) - int(count)  # a far dearer first step is left out
    called = sum(len(ops) for ops in steps[first:])
    assert sum(r.before_calls for r in found.rows) * count == pytest.approx(called)


def noisy(seed: int, names: list[str], slower: str = "") -> tuple[Timeline, PowerTrace]:
    rng, program = np.random.default_rng(seed), Program(device=False)
    for name in names:  # set up, in no step
        program.op(name, 3000)
    for i in range(30):
        program.step(i, [(n, round((700 if n == slower else 300) * rng.lognormal(0.0, 0.4))) for n in names])
    return program.timeline(), program.power()


def test_rows_of_one_program_twice_are_noise_but_for_one_in_ten() -> None:
    names = [f"aten::op{i}" for i in range(40)]
    sure = sure_s = 0
    for seed in range(4):
        (a, power_a), (b, power_b) = noisy(seed, names), noisy(seed + 100, names)
        found = analyze.diff(a, b, power_a=power_a, power_b=power_b)
        assert len(found.rows) == 41
        sure += sum(r.significant for r in found.rows)
        sure_s += sum(r.significant_s for r in found.rows)
    assert sure <= 0.13 * 164 and sure_s <= 0.13 * 164
    (a, power_a), (b, power_b) = noisy(0, names), noisy(9, names, "aten::op7")
    changed = analyze.diff(a, b, power_a=power_a, power_b=power_b)
    assert changed.rows[0].name == "aten::op7" and changed.rows[0].significant and changed.rows[0].significant_s
    assert "steps within one run each" in changed.notes[0] or not changed.significant
    (a, power_a), (b, power_b) = noisy(0, names), noisy(9, [*names, *names])
    single = analyze.diff(a, b, power_a=power_a, power_b=power_b)
    assert single.significant and single.verdict().text.endswith("one run of each: repeat both before you trust this")


def test_rows_of_a_stored_report_sum_too_and_are_unknown(tmp_path: Path) -> None:
    a, power = noisy(0, ["mm", "add"])
    live = side_of(a, power)
    stored = dataclasses.replace(live, stepped=None)
    found = analyze.diff(stored, live)
    assert math.fsum(r.before_j for r in found.rows) == pytest.approx(found.total.before_j)
    assert math.fsum(r.before_s for r in found.rows) == pytest.approx(found.total.before_s)
    assert all(math.isnan(r.error_j) and r.change_j == 0.0 for r in found.rows) and found.verdict().known
    assert any("not by step" in n for n in found.notes) and "~ unknown: the scatter of the rows" in text(found)


def test_regions_count_inside_steps() -> None:
    program = Program(device=False)
    program.op("mm", 5000)
    program.build.add("region", "load", T0, program.now, thread=1)  # a pass of 5 ms in no step
    for i in range(4):
        start = program.now
        program.op("mm", 1000)
        program.build.add("region", "load", start, program.now, thread=1)
        program.step(i, [("add", 1000)])
        program.build.add("region", f"step_{i + 10}", start, program.now, thread=1)
    found = analyze.diff(program.timeline(), program.timeline(), power_a=program.power(), power_b=program.power(),
                         by="regions")  # fmt: skip
    load = next(r for r in found.rows if r.name == "load")
    assert load.before_calls < 1.0 and load.before_s < 2.5e-3


# -- like with like -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which half was traced."""
    path = tmp_path_factory.mktemp("part") / "part.tessera"
    made = synthetic_run.make(20)
    middle = (synthetic_run.START_NS + made.end_ns) // 2
    made.write(path, windows=[[synthetic_run.START_NS, middle]], mode="timeline").close()
    return path


def printed(path: Path) -> Path:
    shown = CliRunner().invoke(report_command.command, [str(path), "--json"])
    out = path.with_suffix(".json")
    out.write_text(shown.output[shown.output.index("{") :])
    return out


def test_whole_runs_are_whole(part: Path) -> None:
    stored = printed(part)
    told = json.loads(stored.read_text())
    assert told["run"]["energy_j"] > 1.5 * told["energy_j"], "half of it was traced"
    found = analyze.diff(measured(100.0), part)
    assert found.per == "run" and found.span == "run" and found.whole.after_j == found.total.after_j
    assert found.total.after_j == pytest.approx(told["run"]["energy_j"])
    assert found.total.after_s == pytest.approx(told["run"]["time_s"]) and "whole runs" in text(found)
    assert analyze.diff(part, part).to_dict()["whole"]["before_j"] == pytest.approx(told["run"]["energy_j"])
    assert analyze.diff(measured(100.0), stored).total.after_j == pytest.approx(told["run"]["energy_j"])
    rows = analyze.diff(dataclasses.replace(side_of(part), steps=(), work={}), part).rows
    outside = next(r for r in rows if r.name == "outside the trace")
    assert math.fsum(r.after_j for r in rows) == pytest.approx(told["run"]["energy_j"]) and outside.after_j > 0


def test_a_part_is_not_compared_with_a_whole(part: Path) -> None:
    trace = dataclasses.replace(side_of(synthetic_run.make(4).timeline), steps=(), work={})
    with pytest.raises(ArgumentError, match="cannot be compared with python work"):
        analyze.diff(trace, measured(100.0))
    run = dataclasses.replace(side_of(part), steps=(), work={})
    found = analyze.diff(trace, run)
    assert found.span == "trace" and span_of([run, run]) == "run" and "the traced part of each" in text(found)
    assert run.traced is not None and found.total.after_s == run.traced.seconds < run.total.seconds


def test_recorded_steps_are_not_compared_with_stated_ones(part: Path) -> None:
    found = analyze.diff(measured(100.0, step=20), part)
    assert found.per == "run" and any("not the energy of each" in n for n in found.notes)


# -- what our commands print ----------------------------------------------------------------------------------------


def test_what_report_prints_is_read(part: Path) -> None:
    found = analyze.diff(printed(part), part)
    assert found.per == "step" and found.total.change_j == pytest.approx(0.0, abs=1e-9) and "part.json" in found.before
    assert found.outside is not None and found.outside.change_j == pytest.approx(0.0, abs=1e-6)


def test_what_run_prints_is_read(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text("sum(range(10_000))\n")
    words = ["run", "--json", "--mode", "sampling", "--out", str(tmp_path / "w.tessera"), str(tmp_path / "work.py")]
    done = subprocess.run([sys.executable, "-m", "tessera", *words], capture_output=True, text=True, check=True)
    (tmp_path / "w.json").write_text(done.stdout)
    shown = run(tmp_path / "w.json", tmp_path / "w.tessera")
    assert shown.code == 0 and "no change" in shown.output and "work.py (w.json)" in shown.output


def test_a_measured_command_beside_a_recorded_run_is_told_to_count_its_start(part: Path, tmp_path: Path) -> None:
    told = "counts the interpreter's start"
    one, two = (saved(tmp_path / f"{n}.json", measured(j)) for n, j in (("a", 100.0), ("b", 101.0)))
    several = {"returncode": 0, "commands": [{"reports": [msgspec.to_builtins(measured(100.0 + i)) for i in range(3)]}]}
    (tmp_path / "several.json").write_bytes(msgspec.json.encode(several))
    for runs in (one, tmp_path / "several.json", [one, two]):
        assert any(told in note for note in analyze.diff(runs, part).notes)
    assert not any(told in note for note in analyze.diff(one, two).notes)
    assert not any(told in note for note in analyze.diff(part, printed(part)).notes)
