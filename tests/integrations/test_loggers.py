"""Joules to W&B and MLflow: against fakes of their API. They were not tried against the services."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from tessera.analyze.answer import answer
from tessera.errors import ArgumentError, MissingExtra
from tessera.monitor import EnergyScope, Monitor
from tessera.profile.open_recording import open_recording
from tessera.schema import Energy, EnergyReport, Work

import synthetic_run
from fakes.sensor import ScriptSensor

TOTAL = Energy(energy_j=50.0, error_j=1.0, time_s=0.5, source="x")


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "x.tessera"
    synthetic_run.make(3, 3).write(path).close()
    return path


def load(name: str, monkeypatch: pytest.MonkeyPatch, fake: Any) -> Any:
    """Our module, with a fake in place of the package."""
    monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.delitem(sys.modules, f"tessera.integrations.{name}", raising=False)
    module = importlib.import_module(f"tessera.integrations.{name}")
    monkeypatch.delitem(sys.modules, f"tessera.integrations.{name}")  # the next test gets its own fake
    return module


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    class Run:  # wandb.sdk.wandb_run.Run: log(data, step=None), define_metric(name, step_metric=), summary.update
        def __init__(self) -> None:
            self.points: list[tuple[dict[str, float], int | None]] = []
            self.axes: dict[str, str] = {}
            self.summary: dict[str, float] = {}

        def log(self, data: dict[str, float], step: int | None = None) -> None:
            self.points.append((data, step))

        def define_metric(self, name: str, step_metric: str | None = None) -> None:
            self.axes[name] = str(step_metric)

    fake = ModuleType("wandb")
    fake.run = Run()  # type: ignore[attr-defined]
    yield load("wandb", monkeypatch, fake)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    fake = ModuleType("mlflow")
    fake.log_metrics = mock.create_autospec(  # type: ignore[attr-defined]
        lambda metrics, step=None, synchronous=None, run_id=None, timestamp=None, model_id=None, dataset=None: None
    )
    yield load("mlflow", monkeypatch, fake)


def test_a_scope_is_one_point(wandb: Any, mlflow: Any) -> None:
    watching = Monitor([ScriptSensor(clock=time.monotonic_ns, step_ms=5, period_s=0.01)]).start()
    try:
        with EnergyScope("x", monitor=watching) as scope:
            time.sleep(0.05)
        figures = wandb.log_energy(scope, step=7)
        assert mlflow.log_energy(scope, step=7, run_id="r") == figures
    finally:
        watching.stop()
    assert set(figures) == {"energy/energy_j", "energy/error_j", "energy/power_w", "energy/time_s"}
    assert figures["energy/power_w"] == pytest.approx(100.0, rel=0.1)
    assert wandb.wandb.run.points == [(figures, 7)]
    mlflow.mlflow.log_metrics.assert_called_once_with(figures, step=7, run_id="r")


def test_work_and_the_users_factors_are_logged(wandb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_PRICE_PER_KWH", "3.6e6")
    report = EnergyReport(name="x", total=TOTAL, by_domain={}, work=[Work(amount=10, unit="step")])
    figures = wandb.log_energy(report, prefix="")
    assert figures["j_per_step"] == 5.0 and figures["cost"] == pytest.approx(50.0)
    assert "gco2e" not in figures, "no factor was given"


def test_a_recording_has_totals_and_steps(run_file: Path, wandb: Any, mlflow: Any) -> None:
    with open_recording(run_file) as recording:
        expected, steps = answer(recording), recording.energy().steps
        figures = wandb.log_energy(recording)
    assert figures["energy/energy_j"] == expected.whole.energy_j
    run = wandb.wandb.run
    assert run.summary == figures and run.axes == {"energy/step_*": "energy/step"}
    assert [p["energy/step_j"] for p, _ in run.points] == [s.energy_j for s in steps]
    assert [p["energy/step"] for p, _ in run.points] == [0, 1, 2]
    assert mlflow.log_energy(str(run_file)) == figures
    assert [c.kwargs["step"] for c in mlflow.mlflow.log_metrics.call_args_list] == [None, 0, 1, 2]


def test_unknown_joules_are_left_out(wandb: Any) -> None:
    unknown = Energy(energy_j=float("nan"), error_j=float("nan"), time_s=0.1, source="x", coverage=0.0)
    assert wandb.log_energy(unknown) == {"energy/time_s": 0.1}


def test_mistakes_are_explained(wandb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="int has no joules"):
        wandb.log_energy(3)
    wandb.wandb.run = None
    with pytest.raises(ArgumentError, match=r"wandb\.init"):
        wandb.log_energy(TOTAL)
    for name in ("wandb", "mlflow"):
        with pytest.raises(MissingExtra, match=f"'{name}'"):
            load(name, monkeypatch, None)
