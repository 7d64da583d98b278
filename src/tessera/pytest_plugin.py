"""The pytest plugin: measures the joules of marked tests, enforces limits on them, and prints a table at the end.

::

    @pytest.mark.energy(max_j=20, runs=5, warmup=1)
    def test_inference(model): ...

    pytest --energy-json energy.json

A test fails if it uses more than `max_j` joules a run by more than the measurement's error. pytest loads this module at
every start, so it imports nothing but pytest until a marked test runs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from .schema import Energy

PROPERTY = "tessera_energy"
"""User property of a test's report that has its figures; pytest-xdist passes it to the main process."""
_ARGUMENTS = {"max_j": None, "runs": 1, "warmup": 0}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our option."""
    group = parser.getgroup("tessera", "energy of tests (tessera)")
    group.addoption("--energy-json", metavar="FILE", help="Write the joules of the tests marked with energy as JSON.")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    text = "energy(max_j=None, runs=1, warmup=0): measure the test's joules; fail if a run uses more than max_j."
    config.addinivalue_line("markers", text)
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist pass their reports to the main process
        config.pluginmanager.register(EnergyResults(config.getoption("--energy-json")), "tessera-energy-results")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Measure a marked test, as often as its marker asks."""
    marker = pyfuncitem.get_closest_marker("energy")
    if marker is None:
        return (yield)
    asked = _read_marker(marker)
    spent: list[Energy] = []
    test = pyfuncitem.obj
    pyfuncitem.obj = _repeat(test, pyfuncitem.nodeid, asked["runs"], asked["warmup"], spent)
    failed = True
    try:
        result = yield
        failed = False
    except pytest.skip.Exception:
        spent.clear()
        raise
    finally:
        pyfuncitem.obj = test
        figures = _summarize(spent, pyfuncitem.nodeid, asked["max_j"], failed=failed) if spent else None
        if figures is not None:
            pyfuncitem.user_properties.append((PROPERTY, figures))
    if figures is not None and figures["above"]:
        pytest.fail(f"a run used {_joules(figures)}, above the limit of {asked['max_j']:g} J", pytrace=False)
    return result


def _read_marker(marker: pytest.Mark) -> dict[str, Any]:
    from .errors import did_you_mean

    names = ", ".join(_ARGUMENTS)
    for name in marker.kwargs:
        if name not in _ARGUMENTS:
            _fail(f"mark.energy has no argument {name!r}{did_you_mean(name, _ARGUMENTS)} ({names})")
    if marker.args:
        _fail(f"mark.energy takes arguments by name only: {names}")
    asked = {**_ARGUMENTS, **marker.kwargs}
    limit, runs, warmup = (asked[name] for name in _ARGUMENTS)
    whole = isinstance(runs, int) and isinstance(warmup, int) and runs >= 1 and warmup >= 0
    if not whole or not (limit is None or (isinstance(limit, int | float) and limit > 0)):
        _fail("mark.energy needs max_j above 0 (joules), runs of at least 1 and warmup of at least 0, all as numbers")
    return asked


def _fail(text: str) -> NoReturn:
    """Fail the test with only this text: a traceback of ours would not help."""
    pytest.fail(text, pytrace=False)


def _repeat(test: Callable[..., Any], name: str, runs: int, warmup: int, spent: list[Energy]) -> Callable[..., Any]:
    """Return a function that runs the test several times and measures the runs after the warm-up."""
    from .monitor import energy_scope

    @contextlib.contextmanager
    def keep_energy() -> Iterator[None]:
        try:
            with energy_scope(name, sync=True) as scope:
                yield
        finally:
            spent.append(scope.energy)

    @functools.wraps(test)
    def run(**arguments: Any) -> Any:
        for _ in range(warmup):
            test(**arguments)
        for _ in range(runs):
            with keep_energy():
                result = test(**arguments)
        return result

    @functools.wraps(test)
    async def run_async(**arguments: Any) -> Any:
        for _ in range(warmup):
            await test(**arguments)
        for _ in range(runs):
            with keep_energy():
                result = await test(**arguments)
        return result

    return run_async if inspect.iscoroutinefunction(test) else run


def _summarize(spent: list[Energy], nodeid: str, max_j: float | None, *, failed: bool) -> dict[str, Any]:
    """Return the means of a run. The error is the sensor's for one run, combined with the scatter of the runs.

    A test that failed is measured up to its failure, and is not held to its limit.
    """
    import numpy as np

    from .monitor.steady_state import mean_interval

    joules = mean_interval(np.array([e.energy_j for e in spent]))
    error_j = float(np.hypot(np.mean([e.error_j for e in spent]), joules.error or 0.0))
    return {
        "test": nodeid,
        "runs": len(spent),
        "energy_j": None if np.isnan(joules.value) else joules.value,  # None: no sensor saw the test
        "error_j": None if np.isnan(error_j) else error_j,
        "time_s": float(np.mean([e.time_s for e in spent])),
        "max_j": max_j,
        "above": bool(max_j is not None and joules.value - error_j > max_j and not failed),
        "failed": failed,
        "basis": spent[0].basis,
        "source": spent[0].source,
    }


class EnergyResults:
    """Shows the figures of all tests: in the terminal's summary, and in a file. Runs in the main process."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.tests: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.tests += [v for name, v in report.user_properties if name == PROPERTY and isinstance(v, dict)]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the joules of each test, most first."""
        if self.tests:
            terminalreporter.section("energy, a run of each test (90% intervals)")
            for figures in sorted(self.tests, key=lambda f: -(f["energy_j"] or 0.0)):
                terminalreporter.line(_describe(figures), red=figures["above"])

    def pytest_sessionfinish(self) -> None:
        if self.path is not None:
            Path(self.path).write_text(json.dumps({"tests": self.tests}, indent=1) + "\n", encoding="utf-8")


def _describe(figures: dict[str, Any]) -> str:
    from .units import format_duration

    parts = [_joules(figures), format_duration(figures["time_s"], 3), figures["test"]]
    if figures["runs"] > 1:
        parts.append(f"{figures['runs']} runs")
    if figures["failed"]:
        parts.append("failed: the joules up to then")
    elif figures["max_j"] is not None:
        parts.append(f"{_compare(figures)} the limit of {figures['max_j']:g} J")
    return "   ".join(parts) + ("" if figures["basis"] == "measured" else f"   {figures['basis'].upper()}")


def _compare(figures: dict[str, Any]) -> str:
    """Return how a test's joules compare with its limit, as far as their error allows."""
    energy_j, error_j, max_j = figures["energy_j"], figures["error_j"] or 0.0, figures["max_j"]
    if figures["above"]:
        return "above"
    if energy_j is None:
        return "joules unknown, not held to"
    if energy_j > max_j:
        return "not surely above"
    return "within" if energy_j + error_j <= max_j else "not surely within"


def _joules(figures: dict[str, Any]) -> str:
    from .units import format_energy_error

    energy_j = figures["energy_j"]
    return format_energy_error(float("nan") if energy_j is None else energy_j, figures["error_j"])
