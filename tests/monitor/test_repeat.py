"""Commands measured in turns: the order, the statistics, outliers and the verdict."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tessera.monitor import Monitor, repeat
from tessera.monitor.command import CommandRun
from tessera.monitor.repeat import RepeatedCommand, RepeatedRuns, find_outliers, label_of, measure_repeatedly
from tessera.report.console import plain_console
from tessera.report.repeat import renderable
from tessera.schema import Domain, Energy, EnergyReport


def report(energy_j: float, time_s: float = 1.0, coverage: float = 1.0, level: float = 0.0) -> EnergyReport:
    common_j = level * energy_j
    total = Energy(
        energy_j=energy_j, error_j=0.1 + common_j, common_error_j=common_j, time_s=time_s, source="script",
        coverage=coverage,
    )  # fmt: skip
    return EnergyReport(name="x", total=total, by_domain={})


class FakeMachine:
    """Runs commands without running them; the joules of each are played from a list."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        domain = SimpleNamespace(counted=True, resolution_s=0.02)
        self.monitor: Any = SimpleNamespace(sampler=SimpleNamespace(domains=[domain]))
        self.order: list[str] = []
        self.spend = lambda name, run: report(100.0)
        self.fails: dict[int, int] = {}
        monkeypatch.setattr(repeat, "measure_command", self.run)

    def run(self, argv: Any, monitor: Any, **_: Any) -> CommandRun:
        run = len(self.order)
        self.order.append(argv[0])
        got = self.spend(argv[0], run)
        return CommandRun(report=got, trace=None, telemetry={}, returncode=self.fails.get(run, 0))  # type: ignore[arg-type]

    def measure(self, *names: str, runs: int = 10, warmup: int = 0) -> RepeatedRuns:
        return measure_repeatedly([[n] for n in names], self.monitor, runs=runs, warmup=warmup)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMachine]:
    yield FakeMachine(monkeypatch)


def test_every_second_turn_is_reversed(machine: FakeMachine) -> None:
    result = machine.measure("a", "b", runs=3, warmup=1)
    assert "".join(machine.order) in ("baabbaab", "abbaabba")
    assert [len(c.reports) for c in result.commands] == [3, 3]


def test_drift_cancels_in_the_comparison(machine: FakeMachine) -> None:
    """Every run costs 1 J more than the one before: b is 10% cheaper all the same."""
    machine.spend = lambda name, run: report((100.0 + run) * (0.9 if name == "b" else 1.0))
    (found,) = machine.measure("a", "b").comparisons
    assert found.significant
    assert found.energy_share.value == pytest.approx(-0.10, abs=0.003)
    assert found.energy_share.error is not None and found.energy_share.error < 0.01
    assert (
        found.text.startswith("B uses 10.0 ± ") and "fewer joules than A, and takes as long within noise" in found.text
    )


def test_a_multiple_is_said_as_one(machine: FakeMachine) -> None:
    machine.spend = lambda name, run: report(100.0 + run % 3, 1.0) if name == "a" else report(420.0 + run % 3, 0.5)
    (found,) = machine.measure("a", "b").comparisons
    assert found.text.startswith("B uses 4.1")
    assert found.text.endswith(" times the joules of A, and takes 50.0 ± 0.1% less time than A")


def test_an_interval_holds_the_truth_nine_times_in_ten(machine: FakeMachine) -> None:
    rng = np.random.default_rng(4)
    held = 0
    for _ in range(300):
        machine.order.clear()
        machine.spend = lambda name, run: report((120.0 if name == "b" else 100.0) * rng.normal(1.0, 0.05))
        share = machine.measure("a", "b", runs=8).comparisons[0].energy_share
        assert share.error is not None
        held += abs(share.value - 0.2) <= share.error
    assert 0.85 <= held / 300 <= 0.97


def test_no_difference_says_how_many_runs_would_show_one(machine: FakeMachine) -> None:
    noise = np.random.default_rng(1).normal(1.0, 0.05, 20)
    machine.spend = lambda name, run: report(100.0 * noise[run])
    (found,) = machine.measure("a", "b").comparisons
    assert not found.significant
    assert found.energy_share.error is not None
    assert f"--runs 40 would show a difference of about {found.energy_share.error / 2:.1%}" in found.text


def test_the_level_of_the_sensor_widens_a_mean_and_not_a_comparison(machine: FakeMachine) -> None:
    machine.spend = lambda name, run: report(90.0 if name == "b" else 100.0 + run % 3, level=0.5)
    result = machine.measure("a", "b")
    assert result.commands[0].energy_j.error == pytest.approx(0.5 * result.commands[0].energy_j.value, rel=0.01)
    assert result.comparisons[0].significant


def test_one_run_has_the_error_of_its_measurement_and_no_verdict(machine: FakeMachine) -> None:
    result = machine.measure("a", "b", runs=1)
    assert result.commands[0].energy_j.error == 0.1
    assert result.commands[0].time_s.error is None
    assert "one run of each" in result.comparisons[0].text and not result.comparisons[0].significant


def test_a_run_that_fails_ends_the_measurement(machine: FakeMachine) -> None:
    machine.fails = {3: 7}
    result = machine.measure("a", "b", runs=10)
    assert result.returncode == 7 and result.failed == "A, run 2"
    assert len(machine.order) == 4
    assert [len(c.reports) for c in result.commands] == [1, 2]
    machine.order.clear()
    machine.fails = {0: 1}
    assert machine.measure("a").commands == []


def test_an_interrupt_keeps_what_was_measured(machine: FakeMachine) -> None:
    def spend(name: str, run: int) -> EnergyReport:
        if run == 4:
            raise KeyboardInterrupt
        return report(100.0)

    machine.spend = spend
    result = machine.measure("a")
    assert result.returncode == 130 and len(result.commands[0].reports) == 4


@pytest.mark.parametrize(
    ("odd", "at", "warmup", "words"),
    [
        (report(200.0, 2.0), 0, 0, "--warmup 1"),
        (report(200.0, 2.0), 0, 1, "slowed this run down"),
        (report(200.0, 1.0), 4, 0, "another program used power"),
        (report(50.0, 0.5), 4, 0, "same work each time"),
        (report(50.0, 1.0, coverage=0.5), 4, 0, "saw only 50%"),
    ],
)
def test_an_outlier_has_a_cause(odd: EnergyReport, at: int, warmup: int, words: str) -> None:
    rng = np.random.default_rng(3)
    reports = [report(100.0 * rng.normal(1, 0.01), rng.normal(1, 0.01)) for _ in range(10)]
    assert find_outliers(reports, warmup) == []
    reports[at] = odd
    (found,) = find_outliers(reports, warmup)
    assert found.run == at + 1 and words in found.cause
    assert find_outliers(reports[: at + 1][-4:], warmup) == []


@pytest.mark.parametrize(("energy_j", "word"), [(50.0, "less"), (200.0, "more")])
def test_an_outlier_that_is_modelled_from_cpu_time_is_not_blamed_on_other_programs(energy_j: float, word: str) -> None:
    cpu = Domain(name="cpu0", source="modelled", resolution_s=0.1, basis="modelled", scope="process")
    reports = [dataclasses.replace(report(100.0 + 0.1 * i), domains=[cpu]) for i in range(10)]
    reports[4] = dataclasses.replace(reports[4], total=report(energy_j).total)
    (found,) = find_outliers(reports, 0)
    assert f"used {word} CPU time" in found.cause and "another program" not in found.cause


def test_short_and_drifting_commands_are_said(machine: FakeMachine) -> None:
    machine.spend = lambda name, run: report(100.0 + 3 * run, 0.03)
    notes = " ".join(machine.measure("a").commands[0].notes)
    assert "give it more work" in notes and "drift by" in notes


def test_labels_go_on_after_z() -> None:
    assert [label_of(i) for i in (0, 25, 26)] == ["A", "Z", "#27"]


def test_output_holds_only_the_last_run(tmp_path: Path) -> None:
    monitor = Monitor([]).start()
    try:
        with tempfile.TemporaryFile() as log:
            result = measure_repeatedly([["sh", "-c", "echo out; echo err >&2"]], monitor, runs=2, output=log)
            log.seek(0)
            assert sorted(log.read().split()) == [b"err", b"out"]
    finally:
        monitor.stop()
    assert result.returncode == 0


def test_the_json_has_every_run(machine: FakeMachine) -> None:
    data = machine.measure("a", "b", runs=3).to_dict()
    assert [c["label"] for c in data["commands"]] == ["A", "B"]
    assert data["commands"][0]["reports"][0] == dataclasses.replace(report(100.0))
    assert data["comparisons"][0]["energy_share"] == 0.0


def test_the_commands_are_on_a_narrow_screen_too(machine: FakeMachine) -> None:
    result = machine.measure("python train.py --epochs 1 --batch 32", "python train.py --epochs 1 --batch 64", runs=3)
    for width in (50, 80, 200):
        shown = plain_console(width).text(renderable(result))
        assert all(command.name in shown for command in result.commands), width
        assert "not shown: command" not in shown and ", command" not in shown
    assert "not shown: fastest … slowest (" in " ".join(plain_console(50).text(renderable(result)).split())


def test_the_watts_of_a_row_are_its_joules_over_its_seconds() -> None:
    reports = [report(10.0, 1.0), report(12.0, 4.0)]
    row = RepeatedCommand(label="A", command=["a"], reports=reports, level_error=0.0)
    assert row.power_w.value == pytest.approx(row.energy_j.value / row.time_s.value)
    assert RepeatedCommand(label="A", command=["a"], reports=reports[:1], level_error=0.0).power_w.error is None


def test_nothing_is_known_to_no_percent_at_all(machine: FakeMachine) -> None:
    """Modelled joules count ticks: runs of equal ones differ by less than the digits that are shown."""
    machine.spend = lambda name, run: report((200.0 if name == "b" else 100.0) + 0.001 * run)
    assert "0.0%" not in machine.measure("a", "b").comparisons[0].text
    machine.spend = lambda name, run: report(100.0 + 0.001 * (run % 2 if name == "b" else 1 - run % 2))
    assert "0.0%" not in machine.measure("a", "b").comparisons[0].text.partition("within")[2]
