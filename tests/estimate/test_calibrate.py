"""Calibrating against a bench whose truth is known, and the command."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from tessera.errors import ArgumentError, MeasurementError
from tessera.estimate import calibrate, calibration
from tessera.estimate import calibration_bench as benches
from tessera.estimate.calibration_fit import (
    case_of,
)
from tessera.estimate.calibration_kernels import CalibrationPoint
from tessera.estimate.host import HostModel
from tessera.estimate.power import PowerModel
from tessera.hardware import lookup

from fakes.calibration import ENERGY, HOST_FACTOR, LIMIT_W, STATIC_W, TIME, FakeBench, a_kernel, make_calibration
from fakes.calibration import config as config

pytestmark = pytest.mark.usefixtures("config")


@pytest.fixture(autouse=True, scope="module")
def predicted_once() -> Iterator[None]:
    """A point of a chip is predicted once."""
    known: dict[Any, Any] = {}
    honest = calibrate.predict_point

    def predicted(device: Any, point: CalibrationPoint, launch: Any, copies: int | None = None) -> Any:
        key = device.name, point.name, point.tf32, launch, copies
        if key not in known:
            known[key] = honest(device, point, launch, copies)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "predict_point", predicted)
        yield


@pytest.fixture(scope="module")
def recovered() -> calibrate.CalibrationResult:
    """Of a chip known from its datasheet: its factors are believed nearly in full."""
    return calibrate.calibrate(FakeBench(make_calibration(device="h100", board="NVIDIA H100 80GB HBM3")), seconds=60)


@pytest.fixture(scope="module")
def measured() -> calibrate.Measurements:
    """Of the chip whose figures are fitted."""
    return calibrate.measure(FakeBench(make_calibration()), seconds=60)


@pytest.fixture(scope="module")
def on_fitted(measured: calibrate.Measurements) -> calibrate.CalibrationResult:
    return calibrate.fit_measurements(measured)


# -- known factors come back ------------------------------------------------------------------------------------


def test_kernel_factors_are_recovered(recovered: calibrate.CalibrationResult) -> None:
    found = recovered.calibration.time_scale
    assert set(found) == set(TIME) == set(calibration.GROUPS)
    for group, factor in TIME.items():
        assert found[group].mean == pytest.approx(factor, rel=0.01), group
        assert found[group].factor == pytest.approx(factor, rel=0.02), group
        assert found[group].points >= 4
        spread = found[group].spread
        assert spread is not None and 0.15 < spread < 0.3, "every ratio is the same, yet five do not prove it"


def test_energy_factors_static_power_and_limit_are_recovered(recovered: calibrate.CalibrationResult) -> None:
    found = recovered.calibration
    assert found.static_w.value == pytest.approx(STATIC_W, rel=0.02)
    assert found.limit_w.value == pytest.approx(LIMIT_W, rel=0.02)
    for group, factor in ENERGY.items():
        if group in found.energy_scale:
            assert found.energy_scale[group].mean == pytest.approx(factor, rel=0.02), group
            assert found.energy_scale[group].factor == pytest.approx(factor, rel=0.03), group
    assert {"gemm.bf16", "gemm.fp32", "attention", "copy", "conv"} <= set(found.energy_scale)
    assert found.idle_w.value == 75.0
    assert found.idle_context_w.value == 98.0


def test_the_host_factor_is_recovered(recovered: calibrate.CalibrationResult) -> None:
    found = recovered.calibration.host_scale
    assert found is not None
    assert found.mean == pytest.approx(HOST_FACTOR, rel=0.01)
    assert found.factor == pytest.approx(HOST_FACTOR, rel=0.03)
    assert found.points == 2 * calibrate.LOOKS
    assert found.spread is not None and 0.15 < found.spread < HostModel.default().relative_error


def test_predictions_with_the_calibration_give_what_was_measured(recovered: calibrate.CalibrationResult) -> None:
    assert len(recovered.rows) > 40
    assert any(abs(row.ratio - 1) > 0.2 for row in recovered.rows)
    assert {row.group for row in recovered.rows} == {*calibration.GROUPS, calibration.LIMIT, "host"}
    for row in recovered.rows:
        assert row.after_s == pytest.approx(row.measured_s, rel=0.03), row
        assert row.measured_j is not None
        assert row.after_j == pytest.approx(row.measured_j, rel=0.04), row


def test_capped_kernels_are_not_mistaken_for_slow_ones(recovered: calibrate.CalibrationResult) -> None:
    """Under a low limit a large product takes far longer than its factor says: the clock explains the rest."""
    large = next(row for row in recovered.rows if row.name.startswith("4096x4096x4096 bf16"))
    assert large.capped and large.clock_hz is not None
    assert large.ratio > 1.02 * TIME["gemm.bf16"] or large.ratio < 0.98 * TIME["gemm.bf16"]
    assert large.ratio_after == pytest.approx(1.0, abs=0.02)


def test_a_fitted_chip_is_moved_a_little_and_keeps_its_intervals(on_fitted: calibrate.CalibrationResult) -> None:
    found = on_fitted.calibration
    for group in ("gemm.bf16", "gemm.tf32", "elementwise", "copy", "reduce"):
        one = found.time_scale[group]
        assert one.mean == pytest.approx(TIME[group], rel=0.01)
        assert 0.3 < math.log(one.factor) / math.log(TIME[group]) < 0.6, group
        assert one.spread is None
    kernel = a_kernel()
    assert found.scale_kernel(kernel, "gemm", "bf16").relative_error == kernel.relative_error
    model = PowerModel.from_device(lookup("h200"))
    assert found.scale_power(model).relative_error == model.relative_error


def test_a_fitted_chip_that_is_contradicted_is_taken_as_measured(on_fitted: calibrate.CalibrationResult) -> None:
    """Attention 1.3 times as long where 12% were predicted: this is not the board that was fitted."""
    one = on_fitted.calibration.time_scale["attention"]
    assert one.factor == pytest.approx(TIME["attention"], rel=0.02)
    assert one.spread is not None and one.spread > 0.12


def test_measurements_can_be_laid_beside_another_view_of_the_chip(
    measured: calibrate.Measurements, on_fitted: calibrate.CalibrationResult
) -> None:
    unfitted = dataclasses.replace(measured.device, id="h200-unfitted")

    def predict_again(m: Any) -> Any:
        return dataclasses.replace(m, case=case_of(unfitted, m.case.graph, m.case.launch, m.point))

    kernels, nets = (tuple(map(predict_again, points)) for points in (measured.kernels, measured.nets))
    limit = predict_again(measured.limit)
    again = dataclasses.replace(measured, device=unfitted, kernels=kernels, nets=nets, limit=limit)
    found = calibrate.fit_measurements(again)
    assert found.calibration.device == "h200-unfitted"
    assert found.calibration.time_scale["gemm.bf16"].spread is not None, "not fitted: the points decide"
    assert [row.measured_s for row in found.rows] == [row.measured_s for row in on_fitted.rows]
    assert [row.predicted_s for row in found.rows] != [row.predicted_s for row in on_fitted.rows]


def test_without_a_power_sensor_time_is_calibrated_all_the_same() -> None:
    found = calibrate.calibrate(FakeBench(make_calibration(), sensor=False), seconds=60).calibration
    assert found.energy_scale == {}
    assert found.static_w.value is None and found.static_w.how
    assert found.limit_w.value is None and "doctor" in found.limit_w.how
    assert any("no joules" in note for note in found.notes)
    assert found.time_scale["copy"].mean == pytest.approx(TIME["copy"], rel=0.02)
    assert found.scale_power(PowerModel.from_device(lookup("h200"))).limit_w == pytest.approx(690.9)


def test_without_clocks_uncapped_groups_are_still_right() -> None:
    found = calibrate.calibrate(FakeBench(make_calibration(), clocks=False), seconds=60).calibration
    for group in ("copy", "norm", "reduce"):
        assert found.time_scale[group].mean == pytest.approx(TIME[group], rel=0.02)
    assert found.limit_w.value is None, "nobody says that the limit was reached"


def test_what_a_gpu_cannot_run_is_left_out_and_noted() -> None:
    bench = FakeBench(make_calibration())
    bench.fail = lambda launch, inputs: len(inputs) == 3 and "float8" in str(inputs[0].dtype)
    found = calibrate.calibrate(bench, seconds=60).calibration
    assert "gemm.fp8" not in found.time_scale
    assert sum("no kernel image" in note for note in found.notes) == 5
    assert "\n" not in "".join(found.notes)


def test_nothing_measurable_is_an_error() -> None:
    bench = FakeBench(make_calibration())
    bench.fail = lambda _launch, _inputs: True
    with pytest.raises(MeasurementError, match="no kernel could be measured"):
        calibrate.calibrate(bench, seconds=60)


def test_a_calibration_fits_its_time() -> None:
    bench = FakeBench(make_calibration())
    steps: list[tuple[int, int, str]] = []
    calibrate.calibrate(bench, seconds=60, progress=lambda *step: steps.append(step))
    assert 30 < sum(seconds for _, seconds in bench.ran) < 55, "the rest is idling and preparing"
    assert [done for done, _, _ in steps] == list(range(steps[0][1]))
    launches = [launch for launch, _ in bench.ran]
    eager = [i for i, launch in enumerate(launches) if launch == "eager"]
    assert len(eager) == 2 * calibrate.LOOKS
    assert eager[0] > 15 and eager[-1] > 50, "the host is looked at all along, but not in the first seconds"
    assert len(bench.ran) == steps[0][1] - 2


# -- refusals -----------------------------------------------------------------------------------------------------


def test_a_busy_gpu_is_refused_unless_forced() -> None:
    bench = FakeBench(make_calibration(), reason="its utilisation is 96% while this process is idle")
    with pytest.raises(MeasurementError, match="busy") as error:
        calibrate.calibrate(bench, seconds=60)
    assert "96%" in str(error.value) and "--force" in str(error.value)
    assert bench.ran == []
    assert calibrate.calibrate(bench, seconds=60, force=True).calibration.time_scale


def test_an_unknown_gpu_says_how_to_describe_it(config: Path) -> None:
    bench = FakeBench(make_calibration())
    bench.board = "NVIDIA Zeta 9000"
    with pytest.raises(ArgumentError, match="Zeta 9000") as error:
        calibrate.calibrate(bench, seconds=60)
    assert str(config / "tessera" / "hardware") in str(error.value)
    assert "aliases = ['nvidia zeta 9000']" in str(error.value)


@pytest.mark.parametrize("seconds", [0.0, 9.9, -1.0, math.nan])
def test_too_few_seconds(seconds: float) -> None:
    with pytest.raises(ArgumentError, match="too few"):
        calibrate.calibrate(FakeBench(make_calibration()), seconds=seconds)


# -- the command --------------------------------------------------------------------------------------------------


def command(monkeypatch: pytest.MonkeyPatch, bench: FakeBench, *args: str) -> int:
    """`tessera calibrate` in this process, with a bench in place of the GPU's."""
    from tessera.cli.main import main

    monkeypatch.setattr(benches, "CudaBench", lambda _index: bench)
    with pytest.raises(SystemExit) as exit_:
        main(["calibrate", *args])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_the_command_writes_and_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert command(monkeypatch, FakeBench(make_calibration())) == 0
    out, err = capsys.readouterr()
    path = config / "tessera" / "calibration" / "h200.json"
    assert f"written to {path}" in out
    assert "h200 calibrated in" in out.splitlines()[0]
    assert "gemm.bf16" in out and "1.100" in out and "640.0 W" in out
    assert "1.0" in next(line for line in out.splitlines() if line.startswith("gemm.bf16")).split()[3]
    assert "tessera predict resnet18 --on h200" in out
    assert "[1/" in err and "idle" in err and "\x1b" not in err
    found = calibration.find("h200")
    assert found is not None and found.host_scale is not None
    assert found.host_scale.mean == pytest.approx(HOST_FACTOR, rel=0.02)


def test_a_dry_run_writes_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(monkeypatch, FakeBench(make_calibration()), "--dry-run", "--json", "--seconds", "20") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["path"] is None
    assert data["calibration"]["device"] == "h200"
    assert {"name", "predicted_s", "measured_s", "after_s", "measured_j"} <= set(data["points"][0])
    assert calibration.find("h200") is None


def test_a_busy_gpu_ends_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(monkeypatch, FakeBench(make_calibration(), reason="its utilisation is 96%")) == 1
    assert "--force" in capsys.readouterr().err


def test_the_command_without_a_gpu(config: Path) -> None:

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    out = subprocess.run(
        [sys.executable, "-m", "tessera", "calibrate"],
        check=False,
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    assert out.returncode == 1
    assert "why:" in out.stderr and "fix:" in out.stderr
    assert "Traceback" not in out.stderr
    assert not config.exists()
