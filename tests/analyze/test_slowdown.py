"""What tracing did to the program: told from untraced steps, bounded by events, and kept out of the advice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tessera import analyze
from tessera.analyze.answer import Answer, answer
from tessera.analyze.diff import diff
from tessera.analyze.evidence import PREPARING
from tessera.analyze.rules_host import BESIDE
from tessera.analyze.slowdown import EVENT_S, FIRST, LAUNCH_S, TRACED, UNTRACED, Slowdown, slowdown_of
from tessera.cli.report import command
from tessera.profile.runfile import RunFile, RunWriter
from tessera.record import CODE
from tessera.recording import Recording
from tessera.report.run import text
from tessera.report.run_html import page
from tessera.schema import Domain
from tessera.timeline import kineto
from tessera.timeline.columns import Builder
from tessera.units import format_energy_error

from places import REPOSITORY
from rendered import text_of

SHARED = REPOSITORY.parent / "shared" / "h200"
START_NS = 1_790_000_000_000_000_000
BUSY_W, IDLE_W = 500.0, 100.0
GPU = Domain(name="gpu0", source="nvml-samples", resolution_s=0.005, label="NVIDIA H200")


@dataclass
class Program:
    """A training run: the host launches, and the device runs `kernels` of equal length at the end of each step."""

    busy_ms: float = 44.0
    kernels: int = 4
    events: int = 3000
    """Operators of a traced step."""

    def __post_init__(self) -> None:
        self.b = Builder()
        self.now = START_NS
        self.busy: list[tuple[int, int]] = []
        self.steps = self.launches = 0
        self.windows: list[tuple[int, int]] = []

    def wait(self, ms: float) -> None:
        self.now += round(ms * 1e6)

    def step(self, ms: float, *, traced: bool) -> None:
        begin, end = self.now, self.now + round(ms * 1e6)
        first = end - round(self.busy_ms * 1e6)
        each = (end - first) // self.kernels
        self.b.add("region", f"step_{self.steps}", begin, end, thread=1)
        if traced:
            at = np.linspace(begin, first, self.events, endpoint=False).astype(int)
            known = {"kind": CODE["op"], "name": self.b.intern("aten::mul"), "thread": 1}
            self.b.extend({**known, "start_ns": at, "end_ns": at + 100}, self.events)
            for k in range(self.kernels):
                self.launches += 1
                at = first + k * each
                self.b.add("runtime", "cudaLaunchKernel", begin + k, begin + k + 1, thread=1, correlation=self.launches)
                self.b.add("kernel", "gemm", at, at + each, device=0, stream=7, correlation=self.launches)
        self.busy.append((first, end))
        self.steps, self.now = self.steps + 1, end

    def train(self, many: int, ms: float | Sequence[float], *, traced: bool = False) -> Program:
        for i in range(many):
            self.step(ms if isinstance(ms, float) else ms[i % len(ms)], traced=traced)
        return self

    def trace(self, many: int, ms: float | Sequence[float], *, closing_ms: float = 400.0) -> Program:
        """A window of so many steps, and the step in which it is closed."""
        begin = self.now + 1
        self.train(many, ms, traced=True)
        self.windows.append((begin, self.now + 1000))
        self.step(closing_ms, traced=False)
        return self

    def write(self, path: Path, domain: Domain = GPU, **facts: Any) -> RunFile:
        writer = RunWriter(path, meta={"command": ["python", "train.py"]})
        writer.add_timeline(self.b.build())
        edges = np.array([START_NS, *(t for pair in self.busy for t in pair), self.now], np.int64)
        watts = np.array([IDLE_W, *(w for _ in self.busy for w in (BUSY_W, IDLE_W))])
        sums = np.concatenate([[0.0], np.cumsum(np.diff(edges) * watts)])
        times = np.arange(START_NS, self.now + 1, 5_000_000)
        writer.add_samples(domain, times[1:], np.diff(np.interp(times, edges, sums)) / np.diff(times))
        told = {"start_ns": START_NS, "end_ns": self.now, "windows": self.windows, "tracing_s": 0.5, **facts}
        for key, value in told.items():
            writer.set(key, value)
        writer.close()
        return RunFile(path)


def said_of(run: RunFile) -> Answer:
    return answer(run.recording())


def tracing_of(run: RunFile) -> Slowdown:
    found = said_of(run).tracing
    assert found is not None
    return found


def screen(run: RunFile) -> str:
    return " ".join(text_of(text(run.recording())).split())


@pytest.fixture(scope="module")
def slowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFile]:
    """Bound by its device, 45 ms a step; 65 ms while traced; 90 ms while the trace is read."""
    program = Program().train(10, 45.0).trace(20, 65.0).train(8, 90.0).train(20, 45.0)
    with program.write(tmp_path_factory.mktemp("runs") / "slowed.tessera", tracing_s=1.1) as run:
        yield run


def test_untraced_steps_tell(slowed: RunFile) -> None:
    found = tracing_of(slowed)
    assert found.basis == "steps" and found.reason is None
    assert found.slowdown == pytest.approx(65 / 45) and found.slowdown_error == pytest.approx(0.0)
    assert (found.traced_step_s, found.untraced_step_s) == (pytest.approx(0.065), pytest.approx(0.045))
    # Not the first steps, nor those of Kineto's warm-up and of a window's begin and end, nor while it was read.
    assert found.traced_steps == 19
    assert found.untraced_steps == (10 - FIRST - 1) + 20
    assert found.idle_s == pytest.approx(20 * 0.020, rel=0.01)
    assert found.idle_j == pytest.approx(20 * 0.020 * IDLE_W, rel=0.02)


def test_steps_that_are_apart_are_off_by_the_level_of_the_sensor_alike(tmp_path: Path) -> None:
    """As `report` has it, and `diff` of two such runs."""
    program = Program().train(10, 45.0).trace(20, 65.0).train(8, 90.0)
    for _ in range(25):
        program.wait(30.0)
        program.train(1, 45.0)
    with program.write(tmp_path / "apart.tessera", replace(GPU, gain_error=0.2), tracing_s=1.1) as run:
        (step,) = said_of(run).per_work
        change = diff(run, run).total
    assert step.traced_j is not None and step.error_j == pytest.approx(0.2 * step.energy_j, rel=0.02)
    assert change.before_error_j == pytest.approx(0.2 * change.before_j, rel=0.02)


def test_untraced_steps_scatter_too(slowed: RunFile, tmp_path: Path) -> None:
    """The ± of an untraced step is made as that of a traced one: the sensor's error, and how the steps differ."""
    uneven = Program().train(10, 45.0).trace(20, 65.0).train(8, 90.0)
    for length_ms in (42.0, 48.0, 44.0, 46.0):
        uneven.train(5, length_ms)
    with uneven.write(tmp_path / "uneven.tessera", tracing_s=1.1) as run:
        found = tracing_of(run)
    even_j, uneven_j = tracing_of(slowed).untraced_step_error_j, found.untraced_step_error_j
    assert found.basis == "steps" and even_j is not None and uneven_j is not None and uneven_j > 3 * even_j


def test_the_joules_of_a_step_are_those_of_an_untraced_one(slowed: RunFile) -> None:
    said = said_of(slowed)
    step = said.per_work[0]
    assert step.unit == "step" and step.amount == 26
    assert step.energy_j == pytest.approx(0.044 * BUSY_W + 0.001 * IDLE_W, rel=0.01)
    assert step.traced_j == pytest.approx(0.044 * BUSY_W + 0.021 * IDLE_W, rel=0.02)
    assert step.rate_per_s == pytest.approx(1 / 0.045)
    out = screen(slowed)
    left_out = "without the run's first 3 and those the tracer disturbed"
    assert f"22.2 steps/s (of 26 untraced, {left_out}; 24.1 J traced)" in out
    assert "note tracing made steps 1.44x as long (median: 65 ms traced, 45 ms untraced): about 40 J of idle" in out
    assert "are the tracer's, which no advice counts" in out


def test_a_diff_and_a_report_give_one_step_the_same_joules(slowed: RunFile) -> None:
    step = said_of(slowed).per_work[0]
    found = diff(slowed.path, slowed.path)
    assert found.per == "step" and found.total.before_j == pytest.approx(step.energy_j)
    assert found.total.before_error_j == pytest.approx(step.error_j)
    assert found.total.before_s == pytest.approx(1 / step.rate_per_s)
    tracing = next(row for row in found.subgraphs if row.name == "added by tracing")
    assert tracing.before_j == pytest.approx(step.energy_j - step.traced_j)
    assert sum(row.before_j for row in found.subgraphs) == pytest.approx(step.energy_j, rel=1e-6)
    spent = format_energy_error(step.energy_j, step.error_j)
    assert any(f"the total is of steps without tracing ({spent})" in note for note in found.notes)


def test_a_run_without_untraced_steps_is_compared_by_traced_ones(slowed: RunFile, tmp_path: Path) -> None:
    step = said_of(slowed).per_work[0]
    with Program().trace(30, 65.0).write(tmp_path / "all.tessera") as all_traced:
        found = diff(slowed.path, all_traced.path)
    assert found.total.before_j == pytest.approx(step.traced_j)
    assert "traced steps are compared, as" in found.notes[0]


def test_what_waits_for_the_tracer_is_no_advice(slowed: RunFile) -> None:
    said = said_of(slowed)
    assert said.idle_share is not None and said.idle_share > 0.08  # the table has it all the same
    assert not {"idle", "launch"} & {f.kind for f in said.advice}
    rows = analyze.advise(slowed).rows
    assert not {"idle", "launch"} & {row["kind"] for row in rows}
    for kind in ("breakdown", "critical_path", "advise"):
        assert any("tracing made steps 1.44x as long" in note for note in getattr(analyze, kind)(slowed).notes), kind


def test_the_page_says_it(slowed: RunFile) -> None:
    html = page(slowed.recording())
    assert "Tracing made steps 1.44x as long (median: 65 ms traced, 45 ms untraced)" in html
    assert "per step (of 26 untraced; 24.1 J traced)" in html
    assert "of it are caused by tracing; which gaps is unknown" in html
    assert "1.44x ± 0.00: 19 traced steps compared with 26 untraced" in html


def test_json_has_it(slowed: RunFile) -> None:
    done = CliRunner().invoke(command, [str(slowed.path), "--json"])
    data = json.loads(done.stdout)
    assert data["tracing"]["slowdown"] == pytest.approx(65 / 45) and data["tracing"]["basis"] == "steps"
    assert data["tracing"]["reason"] is None and data["answer"]["tracing"] == data["tracing"]


def test_without_untraced_steps_the_events_bound_it(tmp_path: Path) -> None:
    with Program().trace(30, 65.0).write(tmp_path / "all.tessera") as run:
        found, out, said = tracing_of(run), screen(run), said_of(run)
    assert found.basis == "events" and found.untraced_step_s is None and found.slowdown_error is None
    assert found.slowdown == pytest.approx(65 / (65 - 3004 * EVENT_S["device"] * 1e3), rel=1e-3)
    assert found.reason is not None and "too few" in found.reason
    assert "tracing made steps up to 1.34x as long (median: 65 ms traced): up to" in out and "--steps 10:20" in out
    assert said.per_work[0].traced_j is None  # nobody knows what an untraced one costs
    assert "launch" not in {f.kind for f in said.advice}
    idle = next(f for f in said.advice if f.kind == "idle")  # much of it, though tracing may have caused a part
    assert idle.confidence == "low" and "may be the tracer's" in idle.evidence


@pytest.mark.skipif(not SHARED.exists(), reason="recordings of an H200 are not here")
def test_the_bound_holds_on_an_h200() -> None:
    """GPT-2's training, whose steps were timed without the profiler and with it."""
    timed = json.loads((SHARED / "gpt2_train.power.json").read_text())
    found = slowdown_of(Recording(kineto.read(SHARED / "gpt2_train.kineto.json.gz")), None)
    assert found is not None and found.slowdown is not None and found.basis == "events"
    assert timed["step_profiled_s"] / timed["step_s"] <= found.slowdown <= 1.3


def test_a_busy_device_bounds_it(tmp_path: Path) -> None:
    with Program(events=20_000).trace(12, 65.0).write(tmp_path / "busy.tessera") as run:
        found = tracing_of(run)
    assert found.slowdown == pytest.approx(65 / 44, rel=1e-3)  # a step is never shorter than its kernels
    assert found.idle_s == pytest.approx(12 * 0.021, rel=0.01)


def test_events_that_bound_nothing_say_so(tmp_path: Path) -> None:
    with Program(events=20_000, busy_ms=4.0).trace(12, 65.0).write(tmp_path / "vague.tessera") as run:
        found = tracing_of(run)
    assert found.slowdown is None and found.basis == "events" and found.matters
    assert found.text is not None and "unknown by how much" in found.text


def test_tracing_that_is_free_goes_unsaid(tmp_path: Path) -> None:
    program = Program(busy_ms=20.0).train(10, 45.0).trace(20, 45.0).train(40, 45.0)
    with program.write(tmp_path / "free.tessera") as run:
        found, out, said = tracing_of(run), screen(run), said_of(run)
    assert found.slowdown == pytest.approx(1.0) and found.idle_s == 0.0 and not found.matters
    assert found.text is None and "tracing made" not in out and "untraced" not in out
    (idle,) = (f for f in said.advice if f.kind == "idle")
    assert BESIDE not in idle.evidence
    assert idle.saves_s == pytest.approx(19 * 0.025, rel=0.01)  # what comes before the first kernel is apart


def test_a_host_that_is_slow_by_itself_is_still_told(tmp_path: Path) -> None:
    program = Program(busy_ms=20.0).train(10, 45.0).trace(20, 65.0).train(8, 90.0).train(20, 45.0)
    with program.write(tmp_path / "both.tessera", tracing_s=1.1) as run:
        said = said_of(run)
    (idle,) = (f for f in said.advice if f.kind == "idle")
    assert BESIDE in idle.evidence
    assert idle.saves_s == pytest.approx(19 * 0.025, rel=0.05)  # of 45 ms, and not of 65
    assert said.idle_j is not None and idle.saves_j < 0.6 * said.idle_j


def test_steps_that_differ_say_nothing(tmp_path: Path) -> None:
    lengths = [45.0, 90.0, 60.0, 130.0, 50.0, 110.0, 70.0]
    program = Program(busy_ms=40.0).train(11, lengths).trace(9, lengths).train(20, lengths)
    with program.write(tmp_path / "vary.tessera", tracing_s=5.0) as run:
        found = tracing_of(run)
    assert found.untraced_steps >= UNTRACED and found.basis == "events" and found.untraced_step_s is None
    assert found.reason is not None and "differ too much" in found.reason


def test_of_a_run_that_was_cut_only_steps_before_a_window_count(tmp_path: Path) -> None:
    with Program().train(3, 45.0).trace(20, 65.0).train(30, 45.0).write(tmp_path / "a.tessera", tracing_s=None) as run:
        assert tracing_of(run).untraced_steps == 0
    with Program().train(12, 45.0).trace(20, 65.0).train(30, 45.0).write(tmp_path / "b.tessera", tracing_s=None) as run:
        found = tracing_of(run)
    assert found.untraced_steps == 12 - FIRST - 1 and found.slowdown == pytest.approx(65 / 45)


def test_several_windows(tmp_path: Path) -> None:
    program = Program()
    for _ in range(4):
        program.train(12, 45.0).trace(5, 65.0)
    with program.train(12, 45.0).write(tmp_path / "w.tessera", scheduled=True, tracing_s=0.4) as run:
        found = tracing_of(run)
    assert found.slowdown == pytest.approx(65 / 45) and found.traced_steps == 16
    assert found.idle_s == pytest.approx(4 * 5 * 0.020, rel=0.01)


def test_where_nothing_was_traced_there_is_nothing_to_say(tmp_path: Path) -> None:
    with Program().train(20, 45.0).write(tmp_path / "s.tessera") as run:
        assert said_of(run).tracing is None
        assert json.loads(CliRunner().invoke(command, [str(run.path), "--json"]).stdout)["tracing"] is None
    with Program().trace(20, 65.0).write(tmp_path / "m.tessera", mode="summary") as run:
        assert said_of(run).tracing is None


def test_preparing_is_not_waiting(tmp_path: Path) -> None:
    """What comes before the first whole step, its end aside: nobody would feed the device then."""
    program = Program()
    program.b.add("kernel", "fill", program.now, program.now + 1000, device=0, stream=7)
    program.windows.append((program.now, program.now + 3_000_000_000 + 20 * 45_000_000))
    program.wait(3000)
    program.train(20, 45.0, traced=True)
    with program.write(tmp_path / "p.tessera") as run:
        said = said_of(run)
    (gap,) = (g for g in said.gaps if g.during == PREPARING)
    assert gap.time_s == pytest.approx(3.0, rel=0.01)
    assert "idle" not in {f.kind for f in said.advice}
    (outside,) = (f for f in said.advice if f.kind == "outside")
    assert "before the first whole step" in outside.evidence


@given(
    untraced=st.lists(st.floats(45.0, 47.0), min_size=UNTRACED, max_size=12),
    traced=st.lists(st.floats(45.0, 90.0), min_size=TRACED, max_size=12),
    busy_ms=st.floats(1.0, 45.0),
    tracing_s=st.floats(0.0, 3.0),
)
def test_what_is_said_can_be(
    untraced: list[float], traced: list[float], busy_ms: float, tracing_s: float, tmp_path_factory: Any
) -> None:
    program = (
        Program(busy_ms=busy_ms, events=50, kernels=1).train(FIRST, 300.0).train(len(untraced) + 1, [*untraced, 45.0])
    )
    program.trace(len(traced) + 1, [*traced, 60.0])
    with program.write(tmp_path_factory.mktemp("p") / "p.tessera", tracing_s=tracing_s) as run:
        recording = run.recording()
        table = recording.energy()
        found = slowdown_of(recording, table)
    assert found is not None
    waited_s = table.time_s - table.busy_s
    assert 0.0 <= found.idle_s <= waited_s * (1 + 1e-9) + 1e-6
    assert found.idle_j <= table.idle_j * (1 + 1e-9)
    if found.basis == "steps":
        assert found.traced_step_s is not None and found.untraced_step_s is not None
        assert found.slowdown == pytest.approx(found.traced_step_s / found.untraced_step_s)
        assert 0.045 <= found.untraced_step_s <= 0.047 and found.reason is None
    else:
        assert found.reason is not None and (found.slowdown is None or found.slowdown >= 1.0)
        assert found.untraced_step_j is None


def test_a_pause_for_operators_is_told_once_with_its_step(tmp_path: Path) -> None:
    """By one fact: the screen, the page and `--json` have the same line."""
    program = Program().train(10, 45.0).trace(3, 46.0, closing_ms=845.0).train(60, 45.0)
    facts = {"operator_windows": program.windows, "pauses": [(program.windows[0][1], 0.8)]}
    line = "collecting operators paused the program once for 800 ms in step_13, and 81 J were used meanwhile"
    with program.write(tmp_path / "paused.tessera", tracing_s=0.9, **facts) as run:
        found, shown, html = tracing_of(run), screen(run), page(run.recording())
    assert (found.pauses, found.paused_s, found.paused_step) == (1, 0.8, "step_13")
    assert found.text == line and line in shown and f"C{line[1:]}" in html
    assert found.to_dict()["paused_s"] == 0.8 and found.paused_j == pytest.approx(81, rel=0.05)


@pytest.mark.parametrize(
    ("pauses", "line"),
    [
        ([], None),
        ([(START_NS, 0.05)], None),
        ([(START_NS - 1, 0.5)], "collecting operators paused the program once for 500 ms"),
        (
            [(START_NS + 1, 0.5), (START_NS + 2, 0.2)],
            "collecting operators paused the program 2 times for 700 ms in all",
        ),
    ],
)
def test_short_pauses_are_not_told(pauses: list[tuple[int, float]], line: str | None, tmp_path: Path) -> None:
    program = Program().train(10, 45.0).trace(3, 46.0).train(60, 45.0)
    facts = {"operator_windows": program.windows, "pauses": pauses}
    with program.write(tmp_path / "paused.tessera", **facts) as run:
        told = tracing_of(run).text
    assert told == line if line is None else told is not None and told.startswith(line)


@pytest.mark.parametrize(("busy_ms", "slower"), [(1.0, 9.0 / (9.0 - 200 * LAUNCH_S * 1e3)), (9.0, 1.0)])
def test_launches_that_are_recorded_slow_a_program_that_waits_for_its_host(
    tmp_path: Path, busy_ms: float, slower: float
) -> None:
    """A loop of small kernels took 1.2 to 1.5 times as long on an H200, and nothing said so."""
    program = Program(busy_ms=busy_ms, kernels=200, events=10).train(5, 9.0, traced=True).trace(3, 9.0, closing_ms=9.0)
    program.train(40, 9.0, traced=True)
    facts = {
        "operator_windows": program.windows,
        "collectors": {"kernels": "cupti", "operators": "kineto", "why": None},
    }
    with program.write(tmp_path / "rl.tessera", windows=[(START_NS, program.now)], **facts) as run:
        found, shown = tracing_of(run), screen(run)
    assert found.launches == 48 * 200
    assert found.launches_slowdown == pytest.approx(slower, rel=0.03)
    assert ("recording 9,600 launches took about 6.6 µs of the host each" in shown) == (slower > 1.0)


def test_a_step_that_stood_still_for_the_tracer_is_in_no_mean(tmp_path: Path) -> None:
    program = Program().train(3, 45.0).trace(10, 45.0, closing_ms=445.0).train(6, 45.0)
    pauses = [(program.windows[0][1], 0.4)]
    with program.write(tmp_path / "paused.tessera", pauses=pauses, tracing_s=9.0) as run:
        step = said_of(run).per_work[0]
    assert step.rate_per_s == pytest.approx(1 / 0.045)
    assert step.spread is not None and step.spread.factor < 1.1
