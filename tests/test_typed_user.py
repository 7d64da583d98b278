"""A user's program under `mypy --strict`: the public API is typed, and its types say what the guide shows."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

pytest.importorskip("mypy")

PROGRAM = """
from collections.abc import Callable
from pathlib import Path

import tessera
from tessera import EnergyBenchmark, PowerTrace, analyze, errors, hardware, monitor, profile, units
from tessera.schema import Energy, EnergyReport


def measured() -> float:
    with monitor.energy_scope("step") as scope:
        pass
    total: Energy = scope.energy
    return total.joules + total.error_j


bench = EnergyBenchmark(target=0.05)


@bench.measure(samples=64)
def workload(count: int) -> list[int]:
    return list(range(count))


answer: list[int] = workload(3)


def traced() -> PowerTrace:
    with monitor.power_trace(interval_ms=10) as trace:
        pass
    print(trace.mean_w, trace.to_csv("power.csv"))
    return trace


@profile.region("forward")
def forward(x: int) -> str:
    return str(x)


said: str = forward(1)


def session() -> Path:
    with profile.session(activities=["power"]) as sess:
        with profile.region("inner"):
            profile.mark("batch")
            profile.counter("loss", 0.5)
        sess.step()
    print(sess.energy())
    return sess.path


def chips() -> list[str]:
    device = hardware.lookup("h200")
    return [device.id, *hardware.catalogue()]


def watts(text: str) -> float:
    try:
        return units.parse_power(text)
    except errors.UnitError as error:
        print(error.what, error.fix, error.position)
        raise


def compared(a: EnergyReport, b: EnergyReport) -> float:
    return a.diff(b).total.change_j


def explained(path: str) -> str:
    return str(analyze.breakdown(path)) + str(analyze.diff(path, path).significant)


def predicted(model: Callable[..., object], inputs: object) -> float:
    report: EnergyReport = tessera.predict(model, inputs, on="h200", precision="bf16")
    return report.total_energy_j + report.total_latency_s


@tessera.schedule(power_cap="275W")
def step(batch: int) -> float:
    return 1.0 * batch


loss: float = step(3)
version: str = tessera.__version__
"""
WRONG = """
from tessera import analyze, monitor, profile, units

with monitor.energy_scope(5) as scope:
    text: str = scope.energy.joules

units.parse_power(None)
profile.session(mode=3)


@profile.region("f")
def f(x: int) -> str:
    return str(x)


f("one")
analyze.brekdown("trace.json")
"""
# torch is Any, as for everybody who does not want to wait for it: following it takes half a minute.
CONFIG = """
[mypy]
strict = True
follow_imports = normal
warn_unused_ignores = True

[mypy-torch.*,transformers.*,triton.*,pandas.*,pyarrow.*,opentelemetry.*,tensorboard.*,prometheus_client.*]
follow_imports = skip
ignore_missing_imports = True
"""


def checked(folder: Path, program: str) -> list[str]:
    (folder / "user.py").write_text(program)
    (folder / "mypy.ini").write_text(CONFIG)
    argv = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "user.py"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return [line for line in done.stdout.splitlines() if ": error:" in line or ": note: " in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("typed")


def test_the_package_says_that_it_is_typed() -> None:
    assert resources.files("tessera").joinpath("py.typed").is_file()


def test_a_strict_program_passes(folder: Path) -> None:
    assert checked(folder, PROGRAM) == []


def test_a_wrong_program_does_not(folder: Path) -> None:
    """So that the test above can fail: were the package not found or not typed, everything would be Any."""
    lines = {int(found.split(":")[1]) for found in checked(folder, WRONG) if ": error:" in found}
    assert {4, 5, 7, 8, 16, 17} <= lines
