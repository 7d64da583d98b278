"""`tessera selftest`: what it checks is checked, and what fails says so."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from tessera import selftest
from tessera.cli.main import cli
from tessera.cli.selftest import command as selftest_command
from tessera.errors import MeasurementError
from tessera.monitor import Monitor
from tessera.report.console import Console
from tessera.report.doctor import print_checks
from tessera.schema import Domain

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
    monkeypatch.setattr("tessera.cli.selftest.MOST", 1000)
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


def test_progress_is_told_before_anything_is_loaded_and_no_check_begins_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, told = [0.0], []

    def pass_time(seconds: float) -> None:
        now_s[0] += seconds

    monkeypatch.setattr(selftest, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(selftest, "_warm_up", lambda: pass_time(40.0))  # CUDA of a cold machine
    for name in ("scope", "simulated", "integral", "sampler", "mixture", "prediction"):
        made = selftest.judge(name, name, 0.0, 1.0)
        monkeypatch.setattr(selftest, f"check_{name}", lambda *_, made=made: (pass_time(12.0), made)[1])
    checks = selftest.run_checks(
        budget_s=45.0, limit_s=90.0, progress=lambda *step: told.append((now_s[0], *step)), monitor=Monitor([])
    )
    assert told[0] == (0.0, 0, selftest.STEPS, "loading torch and the sensors")
    assert [step for _, step, *_ in told] == list(range(selftest.STEPS))
    assert [c.verdict for c in checks] == ["pass"] * 4 + ["skipped"] * 2
    assert "--seconds 90" in checks[-1].why
    assert now_s[0] <= 90.0


def test_the_command_says_at_once_how_long_it_takes_and_each_step_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def run_checks(*, budget_s: float, limit_s: float, progress: selftest.Progress) -> list[selftest.SelfCheck]:
        seen.append(sys.stderr.getvalue())  # type: ignore[attr-defined]
        progress(3, 7, "integral, about 14 s")
        return [selftest.judge("scope", "x", 1.0, 2.0)]

    monkeypatch.setattr(selftest, "run_checks", run_checks)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr("tessera.cli.selftest._describe_machine", lambda: "here")
    selftest_command.callback(seconds=45.0, as_json=False)  # type: ignore[misc]
    assert "about 45 s" in seen[0] and "90 s" in seen[0]
    assert "4/7 integral, about 14 s ...\n" in sys.stderr.getvalue()  # type: ignore[attr-defined]


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


@pytest.mark.parametrize(("names", "limit"), [(["gpu0", "gpu1"], 1.0), (["gpu0"], 0.5), (["cpu0"], 1.0)])
def test_the_sampler_may_take_so_much_for_each_gpu(
    monkeypatch: pytest.MonkeyPatch, names: list[str], limit: float
) -> None:
    monkeypatch.setattr(selftest, "_SAMPLER_S", 0.01)
    domains = [Domain(name=name, source="stub", resolution_s=0.02) for name in names]
    monitor = SimpleNamespace(sampler=SimpleNamespace(cpu_time_s=0.0, domains=domains))
    found = selftest.check_sampler(monitor)  # type: ignore[arg-type]
    assert (found.verdict, found.limit) == ("pass", limit)


def test_a_kernel_that_the_power_limit_slows_alone_does_not_count() -> None:
    """As on an H200: the product's call takes 16% more joules in a mixture, where it is 17% faster."""
    alone = {"product": (0.1400, 203e-6), "copy": (0.0797, 129e-6), "softmax": (0.1171, 210e-6)}
    together = {"product": (0.1624, 172e-6), "copy": (0.0813, 130e-6), "softmax": (0.1160, 217e-6)}
    found = selftest.judge_mixture(alone, together)
    assert found.value is not None and found.value < 2.0
    assert "copy +2%, softmax -1%; at another clock" in found.why and "product +16%" in found.why
    assert selftest.judge_mixture(alone, {"product": together["product"]}).verdict == "skipped"
    wrong = {**together, "copy": (0.12, 130e-6)}
    assert selftest.judge_mixture(alone, wrong).verdict == "fail"
