"""Calibration against a bench whose truth is known; its file; the command."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

import torch

from tessera.errors import ArgumentError, MeasurementError, MissingExtra, RecordingError, TesseraError
from tessera.estimate import calibrate, calibration
from tessera.estimate import calibration_bench as benches
from tessera.estimate.calibration import Calibration, Scale, Watts
from tessera.estimate.calibration_bench import Machine, NvmlBoard, Sample
from tessera.estimate.calibration_fit import (
    ALONE,
    DATASHEET,
    FITTED,
    HOST,
    Ratio,
    calibrated_outcome,
    calibration_alone,
    case_of,
    group_scale,
    scale,
    time_ratio,
)
from tessera.estimate.calibration_kernels import CalibrationPoint, kernel_points, precisions
from tessera.estimate.host import HostModel
from tessera.estimate.iteration import Iteration
from tessera.estimate.kernel_time import chip
from tessera.estimate.ops import OpModel
from tessera.estimate.power import PowerModel
from tessera.graph.capture import capture
from tessera.hardware import identify_board, lookup
from tessera.monitor import Monitor

from fakes.nvml import FakeNvml, Scenario
from fakes.sensor import ScriptSensor

TIME = {
    "gemm.bf16": 1.1, "gemm.fp16": 0.93, "gemm.fp32": 1.25, "gemm.tf32": 1.04, "gemm.fp8": 0.85, "attention": 1.3,
    "elementwise": 0.9, "copy": 1.07, "norm": 1.4, "reduce": 0.8, "conv": 1.2,
}  # fmt: skip
ENERGY = {
    "gemm.bf16": 0.9, "gemm.fp16": 1.1, "gemm.fp32": 0.95, "gemm.tf32": 1.05, "gemm.fp8": 1.0, "attention": 1.15,
    "elementwise": 1.2, "copy": 0.92, "norm": 1.08, "reduce": 1.0, "conv": 0.88,
}  # fmt: skip
HOST_FACTOR, LIMIT_W, STATIC_W = 0.7, 640.0, 118.0


def watts(value: float | None = None) -> Watts:
    return Watts(value=value, how="a test")


def scales(factors: dict[str, float], spread: float | None = 0.05, points: int = 5) -> dict[str, Scale]:
    return {name: Scale(factor=f, spread=spread, points=points) for name, f in factors.items()}


def made(**changes: Any) -> Calibration:
    given: dict[str, Any] = {
        "device": "h200", "board": "NVIDIA H200", "driver": "580.95.05", "torch": "2.13.0", "date": "2026-10-01",
        "host_cpu": "a Xeon", "host_scale": Scale(factor=HOST_FACTOR, spread=0.15, points=2),
        "time_scale": scales(TIME), "energy_scale": scales(ENERGY), "idle_w": watts(75.0),
        "idle_context_w": watts(98.0), "static_w": watts(STATIC_W), "limit_w": watts(LIMIT_W), "notes": ("a note",),
    }  # fmt: skip
    return Calibration(**{**given, **changes})


def altered(key: str, value: Any) -> bytes:
    """A file in which one value is wrong."""
    return msgspec.json.encode({**msgspec.to_builtins(made()), key: value})


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config folder of its own: no test may read or write the user's."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


# Some fifteen calibrations capture the same sixty programs, three times each; what is captured and predicted of a
# program hangs on nothing else, so each is looked at once, by the bench and by the calibration for themselves.
_cases: dict[Any, Any] = {}


def program(fn: Any) -> Any:
    """What decides what a callable does: its code and what that closes over; of a network its layers."""
    if isinstance(fn, torch.nn.Module):
        return repr(fn), frozenset(p.dtype for p in fn.parameters())
    if not hasattr(fn, "__code__"):
        return fn
    held = (cell.cell_contents for cell in fn.__closure__ or ())
    return fn.__code__, tuple(program(h) if callable(h) else h for h in held)


def looked_at(fn: Any, inputs: tuple[Any, ...], launch: Any, device: Any) -> Any:
    """The program as the catalogue predicts it."""
    shapes = tuple((tuple(x.shape), x.stride(), x.dtype) for x in inputs)
    key = program(fn), shapes, launch, device.name, torch.backends.cuda.matmul.allow_tf32
    if key not in _cases:
        _cases[key] = case_of(device, capture(fn, inputs, replay=launch == "graph"), launch)
    return _cases[key]


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
    _cases.clear()


class FakeBench:
    """A machine that follows the model exactly, with a calibration for its truth. Inputs stay on meta."""

    where = "meta"

    def __init__(
        self, truth: Calibration, *, sensor: bool = True, clocks: bool = True, reason: str | None = None
    ) -> None:
        self.truth, self.sensor, self.clocks, self.reason = truth, sensor, clocks, reason
        self.board = truth.board
        self.ran: list[tuple[str, float]] = []
        self.fail: Callable[[str, tuple[Any, ...]], bool] = lambda _launch, _inputs: False
        self.device = lookup(truth.device)

    def __enter__(self) -> FakeBench:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def machine(self) -> Machine:
        return Machine(board=self.board, driver="580.95.05", torch="2.13.0", host_cpu="a Xeon")

    def busy(self) -> str | None:
        return self.reason

    def idle(self, seconds: float, *, context: bool) -> Watts:
        return self.truth.idle_context_w if context else self.truth.idle_w

    def run(self, fn: Any, inputs: tuple[Any, ...], *, launch: Any, seconds: float) -> Sample:
        self.ran.append((launch, seconds))
        if self.fail(launch, inputs):
            raise RuntimeError("CUDA error: no kernel image\nmore")
        case = looked_at(fn, inputs, launch, self.device)
        then = calibrated_outcome(case, calibration_alone(self.truth) if launch == "graph" else self.truth)
        hz = then.clock * chip(self.device).clock_hz
        return Sample(
            seconds=then.seconds,
            joules=then.joules if self.sensor else None,
            clock_hz=hz if self.clocks else None,
            capped=then.clock < 1.0 if self.clocks else None,
        )


@pytest.fixture(scope="module")
def recovered() -> calibrate.CalibrationResult:
    """Of a chip known from its datasheet: its factors are believed nearly in full."""
    return calibrate.calibrate(FakeBench(made(device="h100", board="NVIDIA H100 80GB HBM3")), seconds=60)


@pytest.fixture(scope="module")
def measured() -> calibrate.Measurements:
    """Of the chip whose figures are fitted."""
    return calibrate.measure(FakeBench(made()), seconds=60)


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


def test_kernels_alone_are_faster_than_in_a_model_whatever_was_measured() -> None:
    found = calibration_alone(made(time_scale=scales({"copy": 1.2})))
    assert found.time_scale["copy"].factor == pytest.approx(1.2 * ALONE)
    assert {s.factor for group, s in found.time_scale.items() if group != "copy"} == {ALONE}
    assert set(found.time_scale) == set(calibration.GROUPS)


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
        return dataclasses.replace(m, case=case_of(unfitted, m.case.graph, m.case.launch))

    kernels, nets = (tuple(map(predict_again, points)) for points in (measured.kernels, measured.nets))
    limit = predict_again(measured.limit)
    again = dataclasses.replace(measured, device=unfitted, kernels=kernels, nets=nets, limit=limit)
    found = calibrate.fit_measurements(again)
    assert found.calibration.device == "h200-unfitted"
    assert found.calibration.time_scale["gemm.bf16"].spread is not None, "not fitted: the points decide"
    assert [row.measured_s for row in found.rows] == [row.measured_s for row in on_fitted.rows]
    assert [row.predicted_s for row in found.rows] != [row.predicted_s for row in on_fitted.rows]


def test_the_factor_of_an_uncapped_copy_by_hand() -> None:
    point = next(p for p in kernel_points(lookup("h200")) if p.group == "copy")
    case = case_of(lookup("h200"), capture(*point.make("meta"), replay=True), "graph")
    (kernel,) = case.estimate.kernels
    seconds = 1.5 * kernel.seconds + float(case.gaps_s.sum())
    found = time_ratio(case, Sample(seconds=seconds))
    assert found.value == pytest.approx(1.5 / ALONE), "in a model it would have taken longer still"
    assert found.interval == kernel.relative_error
    assert float(case.gaps_s.sum()) == pytest.approx(0.25e-6 + 0.9e-6), "the gap and the replay, as predict counts them"


def test_without_a_power_sensor_time_is_calibrated_all_the_same() -> None:
    found = calibrate.calibrate(FakeBench(made(), sensor=False), seconds=60).calibration
    assert found.energy_scale == {}
    assert found.static_w.value is None and found.static_w.how
    assert found.limit_w.value is None and "doctor" in found.limit_w.how
    assert any("no joules" in note for note in found.notes)
    assert found.time_scale["copy"].mean == pytest.approx(TIME["copy"], rel=0.02)
    assert found.scale_power(PowerModel.from_device(lookup("h200"))).limit_w == pytest.approx(690.9)


def test_without_clocks_uncapped_groups_are_still_right() -> None:
    found = calibrate.calibrate(FakeBench(made(), clocks=False), seconds=60).calibration
    for group in ("copy", "norm", "reduce"):
        assert found.time_scale[group].mean == pytest.approx(TIME[group], rel=0.02)
    assert found.limit_w.value is None, "nobody says that the limit was reached"


# -- how much of it is believed -----------------------------------------------------------------------------------


def test_the_factor_of_a_group_by_hand() -> None:
    """Two points at 1.21 and 1.0: mean log 0.0953, squares about it 0.01817; three degrees with the two known ones."""
    found = scale([1.21, 1.0], DATASHEET)
    variance = (2 * 0.17**2 + 0.01817) / 3
    weight = 0.25**2 / (0.25**2 + variance / 2)
    assert found.mean == pytest.approx(1.1)
    assert math.log(found.factor) == pytest.approx(weight * math.log(1.1), rel=1e-3)
    off = (1 - weight) * math.log(1.1)
    half = 2.353 * math.sqrt(variance + weight * variance / 2 + off**2)
    assert found.spread == pytest.approx(math.expm1(half), rel=1e-3)


def test_what_was_known_before_decides_how_much_is_believed() -> None:
    shares = [math.log(scale([1.2] * 5, prior).factor) / math.log(1.2) for prior in (FITTED, DATASHEET, HOST)]
    assert shares[0] < 0.5 < 0.95 < shares[1] < shares[2] < 1.0
    shares = [math.log(scale([1.2] * n, FITTED).factor) / math.log(1.2) for n in (1, 2, 5, 50)]
    assert shares == sorted(shares) and shares[0] < 0.1 and shares[-1] > 0.9, "the more points, the more of it"
    scattered = scale([0.9, 1.6, 1.2, 1.44, 1.0], DATASHEET)
    assert scattered.factor < scale([scattered.mean or 1.0] * 5, DATASHEET).factor, "the less they agree, the less"


def test_scatter_widens_the_spread() -> None:
    one = scale([1.1], DATASHEET)
    assert one.spread is None and one.points == 1
    assert 1.0 < one.factor < 1.1
    tight, wide = scale([1.0, 1.02, 0.98, 1.0], DATASHEET), scale([0.6, 1.5, 1.0, 1.1], DATASHEET)
    assert tight.spread is not None and wide.spread is not None
    assert tight.spread < 0.35 < 0.6 < wide.spread <= 0.95
    assert scale([0.5, 2.0], DATASHEET).factor == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([1.3], True),  # one point contradicts nobody
        ([1.3, 1.0], True),
        ([1.3, 1.3], False),
        ([1.3, 1.3, 1.0, 1.0], True),  # half of them: by chance once in twenty
        ([1.3, 0.7, 1.3, 1.0, 1.0], False),
    ],
)
def test_few_points_replace_a_fitted_interval_only_if_they_contradict_it(values: list[float], kept: bool) -> None:
    found = group_scale([Ratio(value=v, interval=0.2) for v in values], fitted=True)
    assert (found.spread is None) is kept
    assert found.factor == scale(values, FITTED if kept else DATASHEET).factor
    on_another = group_scale([Ratio(value=v, interval=0.2) for v in values], fitted=False)
    assert (on_another.spread is None) is (len(values) == 1)


def test_what_a_gpu_cannot_run_is_left_out_and_noted() -> None:
    bench = FakeBench(made())
    bench.fail = lambda launch, inputs: len(inputs) == 3 and "float8" in str(inputs[0].dtype)
    found = calibrate.calibrate(bench, seconds=60).calibration
    assert "gemm.fp8" not in found.time_scale
    assert sum("no kernel image" in note for note in found.notes) == 5
    assert "\n" not in "".join(found.notes)


def test_nothing_measurable_is_an_error() -> None:
    bench = FakeBench(made())
    bench.fail = lambda _launch, _inputs: True
    with pytest.raises(MeasurementError, match="no kernel could be measured"):
        calibrate.calibrate(bench, seconds=60)


@pytest.mark.parametrize(("name", "absent"), [("t4", {"bf16", "tf32", "fp8"}), ("a100", {"fp8"}), ("h200", set())])
def test_only_precisions_the_chip_has(name: str, absent: set[str]) -> None:
    device = lookup(name)
    groups = {p.group for p in kernel_points(device)}
    assert {f"gemm.{p}" for p in precisions(device)} <= groups
    assert not {f"gemm.{p}" for p in absent} & groups
    assert {"copy", "attention", "elementwise", "norm", "reduce", "conv"} <= groups


def test_a_calibration_fits_its_time() -> None:
    bench = FakeBench(made())
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
    bench = FakeBench(made(), reason="its utilisation is 96% while this process is idle")
    with pytest.raises(MeasurementError, match="busy") as error:
        calibrate.calibrate(bench, seconds=60)
    assert "96%" in str(error.value) and "--force" in str(error.value)
    assert bench.ran == []
    assert calibrate.calibrate(bench, seconds=60, force=True).calibration.time_scale


def test_an_unknown_gpu_says_how_to_describe_it(config: Path) -> None:
    bench = FakeBench(made())
    bench.board = "NVIDIA Zeta 9000"
    with pytest.raises(ArgumentError, match="Zeta 9000") as error:
        calibrate.calibrate(bench, seconds=60)
    assert str(config / "tessera" / "hardware") in str(error.value)
    assert "aliases = ['nvidia zeta 9000']" in str(error.value)


@pytest.mark.parametrize(
    ("board", "device"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb-sxm"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
    ],
)
def test_boards_by_the_names_drivers_give(board: str, device: str) -> None:
    assert identify_board(board).id == device


@pytest.mark.parametrize("board", ["NVIDIA H200 MaxQ", "NVIDIA A100-SXM4-96GB", "Tesla V100-SXM2-16GB", ""])
def test_a_sister_board_is_not_taken_for_the_known_one(board: str) -> None:
    with pytest.raises(ArgumentError):
        identify_board(board)


@pytest.mark.parametrize("seconds", [0.0, 9.9, -1.0, math.nan])
def test_too_few_seconds(seconds: float) -> None:
    with pytest.raises(ArgumentError, match="too few"):
        calibrate.calibrate(FakeBench(made()), seconds=seconds)


# -- the file -----------------------------------------------------------------------------------------------------


def test_round_trip_in_the_config_folder(config: Path) -> None:
    path = calibration.save(made())
    assert path == config / "tessera" / "calibration" / "h200.json"
    assert calibration.find("h200") == made()
    assert list(path.parent.iterdir()) == [path], "no half-written file is left"
    assert json.loads(path.read_text())["schema_version"] == 1


def test_home_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert calibration.path_of("h200") == tmp_path / ".config" / "tessera" / "calibration" / "h200.json"


def test_none_where_nothing_was_calibrated() -> None:
    assert calibration.find("h200") is None
    calibration.save(made())
    assert calibration.find("a100") is None


def test_found_again_without_reading_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    path = calibration.save(made())
    first = calibration.find("h200")
    reads: list[Path] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda p: (reads.append(p), real(p))[1])
    assert calibration.find("h200") is first
    assert reads == []
    calibration.save(made(board="another"))
    found = calibration.find("h200")
    assert found is not None and found.board == "another"
    assert reads == [path]
    path.unlink()
    assert calibration.find("h200") is None


def test_a_newer_schema_is_refused() -> None:
    path = calibration.save(made())
    data = json.loads(path.read_text())
    path.write_text(json.dumps({"schema_version": data["schema_version"] + 1, "other": True}))
    with pytest.raises(RecordingError, match="newer Tessera") as error:
        calibration.find("h200")
    assert "upgrade" in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"\xff\xfe", b'{"schema_version": 1}', b'{"schema_version": "one"}',
        altered("time_scale", {"copy": {"factor": -1, "spread": 0.1, "points": 3}}),
        altered("limit_w", {"value": 0, "how": "x"}), altered("board", 3),
    ],
)  # fmt: skip
def test_a_file_that_makes_no_sense_names_the_fix(text: bytes) -> None:
    path = calibration.save(made())
    path.write_bytes(text)
    with pytest.raises(RecordingError, match="cannot be read") as error:
        calibration.find("h200")
    assert str(path) in str(error.value)
    assert "tessera calibrate" in str(error.value) and "delete" in str(error.value)


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(blocked))
    with pytest.raises(RecordingError, match="could not be written"):
        calibration.save(made())
    assert calibration.find("h200") is None


@pytest.mark.parametrize("name", ["../h200", "a/b", "", ".hidden"])
def test_a_device_id_never_leaves_the_folder(name: str) -> None:
    with pytest.raises(ArgumentError):
        calibration.path_of(name)


def test_calibration_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, tessera.estimate.calibration; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# -- laying it over -----------------------------------------------------------------------------------------------


def a_kernel() -> Any:
    graph = capture(*kernel_points(lookup("h200"))[0].make("meta"), replay=True)
    return OpModel(lookup("h200")).time(graph.kernels[0])


def test_apply_scales_time_and_says_so() -> None:
    kernel = a_kernel()
    found = made().scale_kernel(kernel, "gemm", "bf16")
    assert found.seconds == pytest.approx(1.1 * kernel.seconds)
    assert found.clock_s == pytest.approx(1.1 * kernel.clock_s)
    assert found.relative_error == 0.05
    assert found.provenance == "calibrated on this machine, 2026-10-01"
    same = {"seconds": kernel.seconds, "clock_s": kernel.clock_s, "relative_error": kernel.relative_error}
    assert dataclasses.replace(found, **same, provenance=kernel.provenance) == kernel


def test_apply_leaves_alone_what_was_not_measured() -> None:
    kernel = a_kernel()
    assert made().scale_kernel(kernel, "gemm", "int8") is kernel
    assert made().scale_kernel(kernel, "fft", "fp32") is kernel


def test_kinds_like_a_group_take_its_factor_but_not_its_interval() -> None:
    kernel = a_kernel()
    found = made().scale_kernel(kernel, "softmax", "bf16")
    assert found.seconds == pytest.approx(TIME["norm"] * kernel.seconds)
    assert found.relative_error == kernel.relative_error
    assert "like norm" in found.provenance and "2026-10-01" in found.provenance


def test_a_spread_replaces_the_interval_and_none_keeps_it() -> None:
    assert Scale(factor=1.0, spread=0.5, points=4).error(0.1) == 0.5
    assert Scale(factor=1.0, spread=0.05, points=3).error(0.1) == 0.05
    assert Scale(factor=1.0, spread=None, points=5).error(0.1) == 0.1


def test_groups_whose_energy_interval_stays_count_with_it() -> None:
    model = PowerModel.from_device(lookup("h200"))
    mixed = {**scales({"copy": 1.0, "norm": 1.0}, spread=0.6), **scales({"conv": 1.0, "reduce": 1.0}, spread=None)}
    expected = math.sqrt((2 * 0.6**2 + 2 * model.relative_error**2) / 4)
    assert made(energy_scale=mixed).scale_power(model).relative_error == pytest.approx(expected)


def test_charge_scales_dynamic_energy_only() -> None:
    kernel, power = a_kernel(), PowerModel.from_device(lookup("h200"))
    plain, scaled = (Iteration([kernel, kernel], [0.0, 0.0], power) for _ in range(2))
    made().scale_energy(scaled, [("gemm", "bf16"), ("fft", "fp32")])
    before, then = plain.solve(None, burst=True), scaled.solve(None, burst=True)
    for name in ("compute_j", "memory_j"):
        assert list(getattr(then, name)) == pytest.approx([0.9 * getattr(before, name)[0], getattr(before, name)[1]])
    assert list(then.static_j) == pytest.approx(list(before.static_j))


def test_power_takes_the_measured_watts() -> None:
    model = PowerModel.from_device(lookup("h200"))
    found = made().scale_power(model)
    assert (found.limit_w, found.static_w) == (LIMIT_W, STATIC_W)
    assert found.relative_error == pytest.approx(0.05)
    assert "2026-10-01" in found.provenance
    empty = made(limit_w=watts(), static_w=watts(), energy_scale={})
    assert empty.scale_power(model) is model
    assert made(static_w=watts(900.0)).scale_power(model).static_w < LIMIT_W


def test_host_scales_every_time() -> None:
    default = HostModel.default()
    found = made().scale_host(default)
    assert found.kernel_s == pytest.approx(HOST_FACTOR * default.kernel_s)
    assert found.extra_s["conv"] == pytest.approx(HOST_FACTOR * default.extra_s["conv"])
    assert found.relative_error == 0.15
    assert "calibrated on this machine, 2026-10-01" in found.provenance
    assert made(host_scale=None).scale_host(default) is default


# -- points -------------------------------------------------------------------------------------------------------


def test_the_tf32_switch_is_put_back() -> None:
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    point = CalibrationPoint(name="x", group="gemm.tf32", make=lambda _device: (torch.mm, ()), tf32=not before)
    with pytest.raises(RuntimeError), point.set_tf32():
        assert torch.backends.cuda.matmul.allow_tf32 is not before
        raise RuntimeError
    assert torch.backends.cuda.matmul.allow_tf32 is before


def test_every_point_is_of_its_group() -> None:
    for point in kernel_points(lookup("h200")):
        with point.set_tf32():
            graph = capture(*point.make("meta"), replay=True)
        (op,) = graph.kernels
        assert calibration.group_of(op.kind, op.precision) == (point.group, True), point.name


# -- the real bench, as far as it goes without a GPU --------------------------------------------------------------


@pytest.fixture
def board(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., NvmlBoard]]:
    """Opens the first board of a fake NVML."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    opened: list[NvmlBoard] = []

    def open_board(index: int = 0, **scenario: Any) -> NvmlBoard:
        fake_nvml.set(Scenario(**scenario))
        found = NvmlBoard.open(index)
        assert found is not None
        opened.append(found)
        return found

    yield open_board
    for one in opened:
        one.close()


def test_the_board_says_name_driver_and_clock(board: Callable[..., NvmlBoard]) -> None:
    found = board(clock_sm=1500)
    assert (found.name, found.driver, found.mig) == ("NVIDIA H200", "580.95.05", False)
    hz, reasons = found.state()
    assert hz == 1500e6
    assert isinstance(reasons, int)


def test_what_a_board_does_not_say_is_not_known(board: Callable[..., NvmlBoard]) -> None:
    assert board(clocks="off").state()[0] is None


def test_utilisation_is_looked_at_a_few_times(board: Callable[..., NvmlBoard]) -> None:
    assert board(utilization_pct=83).utilization_pct(looks=2, every_s=0.0) == 83


def test_visible_devices_are_respected(board: Callable[..., NvmlBoard], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert board(gpus=2).number == 1
    assert NvmlBoard.open(1) is None


def test_a_working_board_is_busy(board: Callable[..., NvmlBoard]) -> None:
    found = board(utilization_pct=0, wave="const:500", before_w=500.0)
    assert found.power_share() == pytest.approx(500 / 700, rel=0.05)
    assert found.others() == [] or all(isinstance(pid, int) for pid in found.others())


class FakeCuda:
    """`torch.cuda` as far as the bench uses it: work takes real time on the calling thread, events note when."""

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.at_s = math.nan

        def record(self) -> None:
            self.at_s = time.perf_counter()

        def synchronize(self) -> None:
            assert not math.isnan(self.at_s), "waited for an event nobody recorded"

        def elapsed_time(self, end: Any) -> float:
            return (end.at_s - self.at_s) * 1e3

    class Stream:
        def wait_stream(self, _other: Any) -> None: ...

    class CUDAGraph:
        def __init__(self) -> None:
            self.captured: Callable[[], Any] | None = None
            self.replays = 0

        def replay(self) -> None:
            self.replays += 1
            time.sleep(0.002)

    def __init__(self) -> None:
        self.initialized = False
        self.emptied = 0
        self.graphs: list[Any] = []

    def is_initialized(self) -> bool:
        return self.initialized

    def synchronize(self, _device: int | None = None) -> None: ...

    def empty_cache(self) -> None:
        self.emptied += 1

    def current_stream(self) -> Any:
        return self.Stream()

    def stream(self, _stream: Any) -> Any:
        return contextlib.nullcontext()

    def device(self, _index: int) -> Any:
        return contextlib.nullcontext()

    def graph(self, graph: Any, capture_error_mode: str) -> Any:
        assert capture_error_mode == "thread_local"
        self.graphs.append(graph)
        return contextlib.nullcontext()

    def get_device_properties(self, _index: int) -> Any:
        return SimpleNamespace(uuid="00000000-0000-0000-0000-000000000000")


class FakeBoard:
    name, driver, number, mig = "NVIDIA H200", "580.95.05", 0, False
    uuid = "GPU-00000000-0000-0000-0000-000000000000"

    def __init__(self) -> None:
        self.looks = 0
        self.reasons = 0x4

    def state(self) -> tuple[float, int]:
        self.looks += 1
        return 1.5e9, self.reasons

    def utilization_pct(self) -> float:
        return 0.0

    def power_share(self) -> float:
        return 0.5

    def others(self) -> list[int]:
        return [4711]

    def close(self) -> None: ...


@pytest.fixture
def cuda_bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[benches.CudaBench, FakeCuda, FakeBoard]]:
    """The real bench on a torch that sleeps and a board of a constant 300 W."""
    cuda, board = FakeCuda(), FakeBoard()

    def zeros(*_: Any, **__: Any) -> None:
        cuda.initialized = True

    import torch as real

    torch = SimpleNamespace(cuda=cuda, no_grad=contextlib.nullcontext, zeros=zeros, __version__=real.__version__)
    monitor = Monitor([ScriptSensor(lambda _t: 300.0, clock=time.monotonic_ns)]).start()
    monkeypatch.setattr(benches, "_torch_with_cuda", lambda _index: torch)
    monkeypatch.setattr(benches, "_REST_S", 0.0)
    monkeypatch.setattr(NvmlBoard, "open", lambda _index: board)
    monkeypatch.setattr(benches.CudaBench, "_start_monitor", lambda _self: monitor)
    with benches.CudaBench(0) as bench:
        yield bench, cuda, board


def test_the_bench_replays_a_graph(cuda_bench: tuple[benches.CudaBench, FakeCuda, FakeBoard]) -> None:
    bench, cuda, board = cuda_bench
    sample = bench.run(lambda x: x, (1,), launch="graph", seconds=0.5)
    assert 0.002 <= sample.seconds < 0.004
    assert sample.watts == pytest.approx(300, rel=0.1)
    assert sample.clock_hz == 1.5e9 and sample.capped is True
    assert 0.35 < cuda.graphs[0].replays * sample.seconds < 0.9
    assert board.looks > 5 and cuda.emptied == 1


def test_the_bench_leaves_the_host_alone_in_eager_runs(
    cuda_bench: tuple[benches.CudaBench, FakeCuda, FakeBoard],
) -> None:
    bench, cuda, board = cuda_bench
    board.reasons = 0
    calls: list[int] = []
    sample = bench.run(lambda x: (calls.append(x), time.sleep(0.001)), (7,), launch="eager", seconds=0.3)
    assert 0.001 <= sample.seconds < 0.003
    assert sample.capped is False
    assert board.looks == 2, "once after settling, once after measuring"
    assert cuda.graphs == [] and set(calls) == {7}


def test_the_bench_measures_idle_before_and_with_a_context(
    cuda_bench: tuple[benches.CudaBench, FakeCuda, FakeBoard],
) -> None:
    bench, cuda, _ = cuda_bench
    bare = bench.idle(0.3, context=False)
    assert bare.value == pytest.approx(300, rel=0.1) and "without" in bare.how
    held = bench.idle(0.3, context=True)
    assert held.value == pytest.approx(300, rel=0.1) and cuda.initialized
    late = bench.idle(0.3, context=False)
    assert late.value is None and "already held" in late.how


def test_the_bench_refuses_another_board_than_nvmls(
    cuda_bench: tuple[benches.CudaBench, FakeCuda, FakeBoard],
) -> None:
    bench, _, board = cuda_bench
    board.uuid = "GPU-11111111-0000-0000-0000-000000000000"
    with pytest.raises(MeasurementError, match="another board"):
        bench.idle(0.1, context=True)


def test_the_bench_names_who_is_busy(cuda_bench: tuple[benches.CudaBench, FakeCuda, FakeBoard]) -> None:
    bench, _, _ = cuda_bench
    assert bench.busy() == "it draws 50% of its power limit while this process is idle (process 4711)"
    assert bench.machine().board == "NVIDIA H200" and bench.where == "cuda:0"


def test_the_machine_can_be_written_down(cuda_bench: tuple[benches.CudaBench, FakeCuda, FakeBoard]) -> None:
    """`torch.__version__` is a TorchVersion, which msgspec refuses."""
    import torch

    machine = cuda_bench[0].machine()
    assert type(machine.torch) is str and machine.torch == torch.__version__
    calibration.save(made(torch=machine.torch))
    found = calibration.find("h200")
    assert found is not None and found.torch == str(torch.__version__)


def test_torch_without_cuda_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(MeasurementError, match="NVIDIA GPU") as error:
        benches.CudaBench(0)
    assert "built without CUDA" in str(error.value)


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MeasurementError, match="no GPU to calibrate") as error:
        benches.CudaBench(0)
    assert "nvidia-smi" in str(error.value)


def test_no_such_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ArgumentError, match="no GPU 5"):
        benches.CudaBench(5)


def test_no_torch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match="torch"):
        benches.CudaBench(0)


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
    assert command(monkeypatch, FakeBench(made())) == 0
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
    assert command(monkeypatch, FakeBench(made()), "--dry-run", "--json", "--seconds", "20") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["path"] is None
    assert data["calibration"]["device"] == "h200"
    assert {"name", "predicted_s", "measured_s", "after_s", "measured_j"} <= set(data["points"][0])
    assert calibration.find("h200") is None


def test_a_busy_gpu_ends_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(monkeypatch, FakeBench(made(), reason="its utilisation is 96%")) == 1
    assert "--force" in capsys.readouterr().err


def test_the_command_without_a_gpu(config: Path) -> None:
    import torch

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


def test_errors_are_ours() -> None:
    for error in (MeasurementError, RecordingError, ArgumentError, MissingExtra):
        assert issubclass(error, TesseraError)
