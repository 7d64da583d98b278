"""Dry runs count every collective, whoever calls it, and agree with formulas by hand."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
import torch.distributed as c10d

from tessera import dist
from tessera.dist.reduction import gather_into, reduce_scatter_into

from places import REPOSITORY


@pytest.fixture(scope="module")
def dry_script() -> Any:
    """benchmarks/measure/dist_dry.py with a small model."""
    path = REPOSITORY / "benchmarks" / "measure" / "dist_dry.py"
    spec = importlib.util.spec_from_file_location("dist_dry", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["dist_dry"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.HIDDEN, module.LAYERS, module.HEADS, module.KV_HEADS, module.FFN = 256, 3, 16, 8, 768
    module.HEAD, module.SEQ = 16, 64
    return module


@pytest.mark.parametrize(
    "cut",
    [
        {"gpus": 72, "tp": 8, "pp": 3},
        {"gpus": 96, "tp": 4, "pp": 3, "sequence": False},
        {"gpus": 48, "tp": 1, "pp": 3},
    ],
)
def test_a_dry_training_step_moves_the_bytes_computed_by_hand(dry_script: Any, cut: dict[str, Any]) -> None:
    layout = dry_script.TrainingLayout(**cut)
    counted = {axis: kinds for axis, kinds in dry_script.run_training(layout).items() if kinds}
    assert counted == dry_script.expected_training_bytes(layout)


def test_the_seeds_chain_moves_the_bytes_computed_by_hand(dry_script: Any) -> None:
    counted = {axis: kinds for axis, kinds in dry_script.run_chain(72).items() if kinds}
    assert counted == dry_script.expected_chain_bytes(72)


def test_collectives_that_are_called_directly_are_counted_too() -> None:
    mesh = dist.Mesh(["tp", "dp"], 8, (4, 2))
    with dist.dry(8) as counted:
        x = torch.ones(16)
        c10d.all_reduce(x)
        gather_into(torch.empty(128), x, None)
        reduce_scatter_into(torch.empty(2), x, "sum", None)
        c10d.all_to_all_single(torch.empty(16), x)
        c10d.send(x, 1)
        dist.all_reduce(x, mesh=mesh, axis="tp", deterministic=True)
        dist.broadcast(x)
    assert counted.calls == {
        "all_reduce": 1, "all_gather": 2, "reduce_scatter": 1, "all_to_all": 2, "send": 1, "broadcast": 1
    }  # fmt: skip
    assert counted.bytes["all_reduce"] == 64
    assert counted.bytes_along(mesh, "tp") == {"all_to_all": 64, "all_gather": 16}
