"""Dry runs count every collective, whoever calls it, and agree with formulas by hand."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from torch.distributed.tensor.debug import CommDebugMode

from tessera import dist
from tessera.dist.agreement import LINE, SIZE_BYTES
from tessera.dist.reduction import gather_into, reduce_scatter_into
from tessera.errors import ArgumentError

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


@pytest.mark.parametrize("name", ["product", "linear", "softmax", "transposed sum", "gradient"])
def test_what_dtensor_moves_by_itself_is_counted_as_torch_counts_it(name: str) -> None:
    run: dict[str, Callable[[Any], Any]] = {
        "product": lambda a: a @ a,
        "linear": lambda a: torch.nn.functional.linear(a, a),
        "softmax": lambda a: a.softmax(-1),
        "transposed sum": lambda a: a + a.t(),
        "gradient": lambda a: (a.requires_grad_() @ a).sum().backward(),
    }
    mesh = dist.Mesh(["tp", "dp"], 64, (8, 8))
    layout = dist.ShardSpec(partition=("row", "col"), mesh_axes=("tp", "dp"))
    with dist.dry(64) as counted:
        run[name](dist.tensor(shape=(512, 512), layout=layout, mesh=mesh).dtensor)
    with dist.dry(64):  # again: torch's counting would let ours see more
        a = dist.tensor(shape=(512, 512), layout=layout, mesh=mesh).dtensor
        with CommDebugMode() as seen:
            run[name](a)
    assert counted.calls.total() == seen.get_total_counts() > 0
    if name == "product":  # the left factor's columns and the right one's rows: a part of 64 x 64 floats each
        part = 64 * 64 * 4
        assert counted.bytes_along(mesh, "tp") == counted.bytes_along(mesh, "dp") == {"all_gather": part}


def test_collectives_that_exchange_sizes_or_bounds_are_counted() -> None:
    mesh = dist.Mesh(["tp", "dp"], 64, (8, 8))
    with dist.dry(64, rank=9) as counted, dist.record_collectives() as records:
        group = mesh.process_group("tp")
        x = torch.ones(32, 16)
        assert dist.all_gather(x, group=group).shape == (256, 16)
        assert counted.bytes_along(mesh, "tp") == {"all_gather": 32 * 16 * 4 + LINE + SIZE_BYTES}
        assert dist.all_gather(x).shape == (2048, 16)
        assert dist.all_gather(torch.ones(4, 2, device="meta"), group=group).shape == (32, 2)
        rows, received = dist.all_to_all(x, [0, 18, 2, 2, 2, 2, 2, 4], group=group)
        assert received == [18] * 8 and rows.shape == (144, 16)  # all ranks call as rank 1 of the group does
        dist.all_reduce(x, mesh=mesh, axis="dp", compress="fp8")
        dist.reduce_scatter(x, group=group, compress="bf16")
        assert [r.error_bound for r in records[-2:]] == [None, None]
        with pytest.raises(ArgumentError, match="cannot be counted"):
            dist.all_reduce(x, sparse=True)
    # 512 floats in 8 parts: 64 bytes, a scale and a bound each; then the own part to all.
    assert counted.bytes_along(mesh, "dp") == {"all_to_all": 8 * (64 + 4 + 4), "all_gather": 64 + 4 + 4}


def test_a_hierarchical_sum_is_counted_along_its_axis() -> None:
    mesh = dist.Mesh(["tp", "dp"], 64, (8, 8))
    with dist.dry(64, rank=13) as counted:
        dist.all_reduce(torch.ones(1024), mesh=mesh, axis="tp", algorithm="hierarchical", node_size=4)
    # Inside the node all of it is scattered, a quarter is added across the two nodes and gathered again.
    assert counted.bytes_along(mesh, "tp") == {"reduce_scatter": 4096, "all_reduce": 1024, "all_gather": 1024}
    assert counted.bytes_along(mesh, "dp") == {}
