"""A bench that follows a calibration exactly, and calibrations for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.estimate.calibration import Calibration, Scale, Watts
from tessera.estimate.calibration_bench import Machine, Sample
from tessera.estimate.calibration_fit import (
    calibrated_outcome,
    calibration_alone,
    case_of,
)
from tessera.estimate.calibration_kernels import host_points, kernel_points
from tessera.estimate.kernel_time import chip
from tessera.estimate.ops import OpModel
from tessera.graph.capture import capture
from tessera.hardware import lookup

TIME = {
    "gemm.bf16": 1.1,
    "gemm.fp16": 0.93,
    "gemm.fp32": 1.25,
    "gemm.tf32": 1.04,
    "gemm.fp8": 0.85,
    "attention": 1.3,
    "elementwise": 0.9,
    "copy": 1.07,
    "norm": 1.4,
    "reduce": 0.8,
    "conv": 1.2,
}
ENERGY = {
    "gemm.bf16": 0.9,
    "gemm.fp16": 1.1,
    "gemm.fp32": 0.95,
    "gemm.tf32": 1.05,
    "gemm.fp8": 1.0,
    "attention": 1.15,
    "elementwise": 1.2,
    "copy": 0.92,
    "norm": 1.08,
    "reduce": 1.0,
    "conv": 0.88,
}
HOST_FACTOR, LIMIT_W, STATIC_W = 0.7, 640.0, 118.0


def watts(value: float | None = None) -> Watts:
    return Watts(value=value, how="a test")


def scales(factors: dict[str, float], spread: float | None = 0.05, points: int = 5) -> dict[str, Scale]:
    return {name: Scale(factor=f, spread=spread, points=points) for name, f in factors.items()}


def make_calibration(**changes: Any) -> Calibration:
    given: dict[str, Any] = {
        "device": "h200",
        "board": "NVIDIA H200",
        "driver": "580.95.05",
        "torch": "2.13.0",
        "date": "2026-10-01",
        "host_cpu": "a Xeon",
        "host_scale": Scale(factor=HOST_FACTOR, spread=0.15, points=2),
        "time_scale": scales(TIME),
        "energy_scale": scales(ENERGY),
        "idle_w": watts(75.0),
        "idle_context_w": watts(98.0),
        "static_w": watts(STATIC_W),
        "limit_w": watts(LIMIT_W),
        "notes": ("a note",),
    }
    return Calibration(**{**given, **changes})


@pytest.fixture
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


def predict_case(fn: Any, inputs: tuple[Any, ...], launch: Any, device: Any) -> Any:
    """The program as the catalogue predicts it."""
    shapes = tuple((tuple(x.shape), x.stride(), x.dtype) for x in inputs)
    key = program(fn), shapes, launch, device.name, torch.backends.cuda.matmul.allow_tf32
    if key not in _cases:
        networks = host_points(device) if launch == "eager" else []
        point = next((p for p in networks if program(p.make("meta")[0]) == program(fn)), None)
        _cases[key] = case_of(device, capture(fn, inputs, launch=launch), launch, point)
    return _cases[key]


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
        case = predict_case(fn, inputs, launch, self.device)
        then = calibrated_outcome(case, calibration_alone(self.truth) if launch == "graph" else self.truth)
        hz = then.clock * chip(self.device).clock_hz
        return Sample(
            seconds=then.seconds,
            joules=then.joules if self.sensor else None,
            clock_hz=hz if self.clocks else None,
            capped=then.clock < 1.0 if self.clocks else None,
        )


def a_kernel() -> Any:
    graph = capture(*kernel_points(lookup("h200"))[0].make("meta"), launch="graph")
    return OpModel(lookup("h200")).time(graph.kernels[0])
