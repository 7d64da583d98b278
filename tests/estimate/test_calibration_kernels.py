"""The kernels and networks that a calibration measures."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from tessera.estimate import calibration
from tessera.estimate.calibration_kernels import CalibrationPoint, kernel_points, precisions
from tessera.graph.capture import capture
from tessera.hardware import lookup


@pytest.mark.parametrize(("name", "absent"), [("t4", {"bf16", "tf32", "fp8"}), ("a100", {"fp8"}), ("h200", set())])
def test_only_precisions_the_chip_has(name: str, absent: set[str]) -> None:
    device = lookup(name)
    groups = {p.group for p in kernel_points(device)}
    assert {f"gemm.{p}" for p in precisions(device)} <= groups
    assert not {f"gemm.{p}" for p in absent} & groups
    assert {"copy", "attention", "elementwise", "norm", "reduce", "conv"} <= groups


def test_the_tf32_switch_is_put_back() -> None:

    before = torch.backends.cuda.matmul.allow_tf32
    point = CalibrationPoint(name="x", group="gemm.tf32", make=lambda _device: (torch.mm, ()), tf32=not before)
    with pytest.raises(RuntimeError), point.set_tf32():
        assert torch.backends.cuda.matmul.allow_tf32 is not before
        raise RuntimeError
    assert torch.backends.cuda.matmul.allow_tf32 is before


def test_every_point_is_of_its_group() -> None:
    for point in kernel_points(lookup("h200")):
        with point.set_tf32():
            graph = capture(*point.make("meta"), launch="graph")
        (op,) = graph.kernels
        assert calibration.group_of(op.kind, op.precision) == (point.group, True), point.name
