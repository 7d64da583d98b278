"""The pytest plugin, run by pytest inside pytest, with a sensor of known watts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator

import pytest

from tessera import monitor, pytest_plugin

from fakes.sensor import ScriptSensor
from places import REPOSITORY

pytest_plugins = ["pytester"]
PLUGIN = ("-p", "no:tessera", "-p", "tessera.pytest_plugin", "-p", "no:cacheprovider")


@pytest.fixture(autouse=True)
def watts() -> Iterator[None]:
    """100 W, always."""
    watching = monitor.Monitor([ScriptSensor(clock=time.monotonic_ns, step_ms=5, period_s=0.01)]).start()
    monitor.use(watching)
    yield
    monitor.use(None)
    watching.stop()


def run(pytester: pytest.Pytester, code: str, *args: str) -> tuple[pytest.RunResult, list[dict[str, object]]]:
    pytester.makepyfile(f"import pytest, time\n{code}")
    result = pytester.runpytest_inprocess(*PLUGIN, "--strict-markers", "--energy-json", "e.json", *args)
    return result, json.loads((pytester.path / "e.json").read_text())["tests"]


def test_a_marked_test_is_measured(pytester: pytest.Pytester) -> None:
    code = """
@pytest.fixture
def nap(): return 0.1
@pytest.mark.energy
def test_sleep(nap): time.sleep(nap)
def test_plain(): pass
"""
    result, tests = run(pytester, code)
    result.assert_outcomes(passed=2)
    (figures,) = tests
    assert figures["test"] == "test_a_marked_test_is_measured.py::test_sleep"
    assert figures["energy_j"] == pytest.approx(100 * figures["time_s"], rel=0.2)  # type: ignore[operator]
    assert (figures["runs"], figures["above"], figures["basis"]) == (1, False, "measured")
    result.stdout.fnmatch_lines(["*energy, a run of each test*", "* J * test_a_*::test_sleep"])


def test_runs_and_warmup_are_counted(pytester: pytest.Pytester) -> None:
    code = """
calls = []
@pytest.mark.energy(runs=3, warmup=2)
def test_sleep():
    calls.append(1)
    time.sleep(0.03)
def test_after(): assert len(calls) == 5
"""
    result, tests = run(pytester, code)
    result.assert_outcomes(passed=2)
    assert tests[0]["runs"] == 3


def test_more_than_the_limit_fails_with_the_joules(pytester: pytest.Pytester) -> None:
    code = """
@pytest.mark.energy(max_j=1)
def test_over(): time.sleep(0.2)
@pytest.mark.energy(max_j=1000)
def test_under(): time.sleep(0.03)
@pytest.mark.energy(max_j=1)
def test_broken(): assert False
"""
    result, tests = run(pytester, code)
    result.assert_outcomes(passed=1, failed=2)
    found = {str(t["test"]).split("::")[1]: (t["above"], t["failed"]) for t in tests}
    assert found == {"test_over": (True, False), "test_under": (False, False), "test_broken": (False, True)}
    result.stdout.fnmatch_lines(["*::test_broken   failed: the joules up to then"])
    result.stdout.fnmatch_lines(["a run used * J, above the limit of 1 J", "*above the limit of 1 J"])


def test_coroutines_are_awaited(pytester: pytest.Pytester) -> None:
    conftest = """
import asyncio, inspect, pytest
@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):  # as pytest-asyncio does
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        asyncio.run(pyfuncitem.obj())
        return True
"""
    pytester.makeconftest(conftest)
    code = "import asyncio\n@pytest.mark.energy(runs=2)\nasync def test_nap(): await asyncio.sleep(0.02)"
    result, tests = run(pytester, code)
    result.assert_outcomes(passed=1)
    assert tests[0]["runs"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("maxj=3", "no argument 'maxj'; did you mean 'max_j'?"),
        ("3", "by name only"),
        ("runs=0", "runs of at least 1"),
        ("max_j=-1", "max_j above 0"),
        ("max_j='5kJ'", "max_j above 0 (joules)"),
        ("runs=2.5", "all as numbers"),
    ],
)
def test_a_wrong_marker_is_said(pytester: pytest.Pytester, arguments: str, words: str) -> None:
    result, _ = run(pytester, f"@pytest.mark.energy({arguments})\ndef test_x(): pass")
    assert result.ret != 0
    assert words in result.stdout.str() and "pytest_plugin.py" not in result.stdout.str()


@pytest.mark.parametrize(
    ("energy_j", "said"),
    [(2.0, "not surely above"), (0.5, "not surely within"), (0.3, "within"), (9.0, "above"), (None, "joules unknown")],
)
def test_the_table_says_no_more_than_the_error_lets_it(energy_j: float | None, said: str) -> None:
    figures = {"energy_j": energy_j, "error_j": 0.6 if energy_j and energy_j < 1 else 1.6, "max_j": 1.0}
    figures |= {"time_s": 0.5, "test": "t", "runs": 1, "failed": False, "above": energy_j == 9.0, "basis": "measured"}
    assert f"   {said}" in pytest_plugin._describe(figures) and "the limit of 1 J" in pytest_plugin._describe(figures)


def test_a_skipped_test_has_no_joules(pytester: pytest.Pytester) -> None:
    result, tests = run(pytester, "@pytest.mark.energy\ndef test_x(): pytest.skip('not here')")
    result.assert_outcomes(skipped=1)
    assert not tests


def test_pytest_finds_it_by_its_entry_point() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"tessera": "tessera.pytest_plugin"}


def test_loading_it_imports_nothing_else() -> None:
    """pytest loads the plugin at every start, also where no test is marked."""
    code = "import pytest, sys; b = set(sys.modules); import tessera.pytest_plugin; print(*(set(sys.modules) - b))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(out.split()) == {"tessera", "tessera.pytest_plugin"}
