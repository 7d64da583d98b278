"""`tessera selftest`: what it checks is checked, and what fails says so."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from tessera.cli.main import cli
from tessera.errors import MeasurementError
from tessera.report.selftest import text
from tessera.selftest import checks
from tessera.selftest.simulated import worst_error_pct


def test_the_simulated_board_is_told_apart() -> None:
    assert [worst_error_pct(seed) < 5 for seed in (1, 2)] == [True, True]


def test_a_wrong_attribution_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "worst_error_pct", lambda: 23.0)
    assert checks.simulated().verdict == "fail"
    assert checks.judged("x", "x", float("nan"), 1.0).verdict == "fail"


def test_a_check_that_breaks_is_a_failure_with_its_reason() -> None:
    def broken() -> checks.Check:
        raise MeasurementError("the sensor went away")

    found = checks._guarded("integral", broken)
    assert found.verdict == "fail" and "went away" in found.why
    other = checks._guarded("mixture", lambda: next(iter(())))  # nor may another kind of error end the others
    assert (other.verdict, other.why) == ("fail", "StopIteration: ")
    shown = text([found, checks.skipped("mixture", "joules", "no CUDA device")], "here")
    assert "FAIL" in shown and "0 passed, 1 failed, 1 could not be made here" in shown


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SCOPE_US", 1e6)  # a busy machine is not what is tested here
    monkeypatch.setattr(checks, "SAMPLER_PCT", 100.0)
    result = CliRunner().invoke(cli, ["selftest", "--seconds", "5", "--json"], standalone_mode=False)
    told = json.loads(result.output.splitlines()[-1])
    by = {c["name"]: c for c in told["checks"]}
    assert set(by) == {"scope", "simulated", "integral", "sampler", "mixture", "prediction"}
    assert told["passed"] and by["simulated"]["value"] < 5
    for name in ("mixture", "prediction"):
        assert by[name]["verdict"] != "skipped" or by[name]["why"]
