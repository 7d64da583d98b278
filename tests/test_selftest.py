"""`tessera selftest`: what it checks is checked, and what fails says so."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from tessera import selftest
from tessera.cli.main import cli
from tessera.errors import MeasurementError
from tessera.monitor import Monitor
from tessera.report.console import Console
from tessera.report.doctor import print_checks

from fakes.driven import Driven
from fakes.nvml import FakeNvml, Scenario


def test_the_simulated_board_is_told_apart() -> None:
    assert [selftest.simulate_worst_error(seed) < 5 for seed in (1, 2)] == [True, True]


def test_a_wrong_attribution_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "simulate_worst_error", lambda: 23.0)
    assert selftest.check_simulated().verdict == "fail"
    assert selftest.judge("x", "x", float("nan"), 1.0).verdict == "fail"


def test_a_check_that_breaks_is_a_failure_with_its_reason() -> None:
    def broken() -> selftest.SelfCheck:
        raise MeasurementError("the sensor went away")

    found = selftest._run_check("integral", broken)
    assert found.verdict == "fail" and "went away" in found.why
    other = selftest._run_check("mixture", lambda: next(iter(())))  # nor may another kind of error end the others
    assert (other.verdict, other.why) == ("fail", "StopIteration: ")
    out = Console(file=io.StringIO(), width=100)
    print_checks([found, selftest.skip("mixture", "joules", "no CUDA device")], "here", out)
    shown = out.file.getvalue()
    assert "FAIL" in shown and "0 passed, 1 failed, 1 skipped on this machine" in shown


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "SCOPE_US", 1e6)  # a busy machine is not what is tested here
    monkeypatch.setattr(selftest, "SAMPLER_PCT", 100.0)
    result = CliRunner().invoke(cli, ["selftest", "--seconds", "5", "--json"], standalone_mode=False)
    told = json.loads(result.output.splitlines()[-1])
    by = {c["name"]: c for c in told["checks"]}
    assert set(by) == {"scope", "simulated", "integral", "sampler", "mixture", "prediction"}
    assert told["passed"] and by["simulated"]["value"] < 5
    for name in ("mixture", "prediction"):
        assert by[name]["verdict"] != "skipped" or by[name]["why"]


def _on_the_fake(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, scenario: Scenario) -> tuple[Monitor, Driven]:
    """A monitor of the fake board; the load, and whoever sleeps, lets virtual time pass."""
    fake.set(scenario)
    own, sampler = Monitor([]), Driven(fake)
    own.sampler = sampler
    virtual = SimpleNamespace(monotonic=lambda: fake.monotonic_ns() * 1e-9, sleep=sampler.run)
    monkeypatch.setattr("time.monotonic_ns", fake.monotonic_ns)
    monkeypatch.setattr(selftest, "time", virtual)
    monkeypatch.setattr(selftest, "_load", sampler.run)
    return own, sampler


def test_nvmls_samples_are_checked_against_its_counter(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    own, sampler = _on_the_fake(fake_nvml, monkeypatch, Scenario(wave="square:100:700:0.5", hbm="off"))
    selftest._find_ticks(own)
    assert len(sampler.anchors["gpu0"]) == 1, "no longer than needed"
    found = selftest.check_integral(own, 8.0)
    assert found.verdict == "pass" and found.value is not None and found.value < 1.5


def test_a_board_without_a_counter_is_not_waited_for_long(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = _on_the_fake(fake_nvml, monkeypatch, Scenario(wave="const:300", hbm="off", energy="off"))
    begun_ns = fake_nvml.monotonic_ns()
    selftest._find_ticks(own)
    assert 3.9 < (fake_nvml.monotonic_ns() - begun_ns) * 1e-9 < 4.2
    found = selftest.check_integral(own, 4.0)
    assert found.verdict == "skipped" and "counter whose ticks" in found.why
    begun_ns = fake_nvml.monotonic_ns()
    selftest._find_ticks(Monitor([]))
    assert fake_nvml.monotonic_ns() == begun_ns, "nobody waits where there is no board"


def test_torch_is_loaded_before_the_counters_ticks_are_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def default() -> Monitor:
        order.append("sampling")
        raise InterruptedError

    monkeypatch.setattr(selftest, "_warm_up", lambda: order.append("torch"))
    monkeypatch.setattr(selftest, "default", default)
    with pytest.raises(InterruptedError):
        selftest.run_checks()
    assert order == ["torch", "sampling"]
