"""Migration: a job that is moved between steps trains as if it had never stopped."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as c10d
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gloo_ranks import GlooRanks
from tessera.errors import ArgumentError, GovernorError, MigrationError
from tessera.fleet.job_checkpoint import find_newest, read_json
from tessera.fleet.leases import JobState, JobStatus
from tessera.fleet.migration import MigratableJob, Migration, migratable
from tessera.fleet.migration_order import OrderFile, OrderWatch, OverheatSource, ShedSource
from tessera.fleet.node_floor import NodeShare, PlacementJob, PlacementNode
from tessera.fleet.placement_file import FleetFile
from tessera.fleet.relaunch import CoolNodeChooser, run_until_done
from tessera.policy import ThermalPolicy

TOTAL, LEAVE_AT = 14, 4
Curve = list[tuple[int, float, float]]


def make_model(dropout: float) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 4))


def train(rank: int, folder: str, leave_at: int | None) -> tuple[Curve, Migration | None]:
    """A rank of a sharded training; rank 1 orders the move. Each step's loss, and a random number of the rank."""
    random_x = torch.Generator().manual_seed(5)
    x, y = torch.randn(96, 16, generator=random_x), torch.randint(0, 4, (96,), generator=random_x)
    model = make_model(0.0)
    fully_shard(model, mesh=init_device_mesh("cpu", (c10d.get_world_size(),)))
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TOTAL)
    job = migratable(model, optimizer, folder=folder, states={"schedule": schedule}, seed=3, signals=())
    seen: Curve = []
    try:
        for step in job.steps(TOTAL):
            if step == leave_at and rank == 1:
                job.request_move()
            at = job.indices(len(x), batch=32)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[at]), y[at])
            loss.backward()
            optimizer.step()
            schedule.step()
            mean = loss.detach().clone()
            c10d.all_reduce(mean)
            seen.append((step, mean.item() / job.ranks, torch.rand(()).item()))
    except SystemExit as ending:
        assert ending.code == 0
    return seen, job.migration


def run_ranks(count: int, folder: Path, leave_at: int | None = None) -> list[tuple[Curve, Migration | None]]:
    with GlooRanks(count) as ranks:
        return ranks.run(train, str(folder), leave_at)


def test_a_job_of_four_ranks_goes_on_in_four_or_two_other_processes(tmp_path: Path) -> None:
    whole = [curve for curve, _ in run_ranks(4, tmp_path / "whole")]
    first = [curve for curve, _ in run_ranks(4, tmp_path / "job", LEAVE_AT)]
    assert {len(curve) for curve in first} == {LEAVE_AT + 2}  # the vote takes a step, and all ranks leave at the same
    assert (read_json(tmp_path / "job" / "status.json") or {})["phase"] == "moved"
    shutil.copytree(tmp_path / "job", tmp_path / "smaller")
    four = run_ranks(4, tmp_path / "job")
    for rank in range(4):  # losses and random numbers, to the last bit; no step is lost, none is done twice
        assert first[rank] + four[rank][0] == whole[rank]
    assert (read_json(tmp_path / "job" / "status.json") or {})["phase"] == "done"
    migration = four[0][1]
    assert migration is not None
    assert (migration.order, migration.ranks_before, migration.ranks_after) == ("request", 4, 4)
    assert migration.lost_s > migration.load_s > 0
    two = run_ranks(2, tmp_path / "smaller")
    assert two[0][1] is not None and two[0][1].ranks_after == 2
    losses = np.array([[a[1], b[1]] for a, b in zip(first[0] + two[0][0], whole[0], strict=True)])
    # The same samples, summed in another order: single precision rounds at 6e-8, and eight steps add to that.
    assert np.max(np.abs(losses[:, 0] / losses[:, 1] - 1.0)) < 1e-5


# -- one process: everything but the ranks ----------------------------------------------------------------------------


def one_process(folder: Path, leave_at: int | None = None, **options: Any) -> tuple[list[float], MigratableJob]:
    random.seed(7)
    np.random.seed(7)
    model = make_model(0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = migratable(model, optimizer, folder=folder, signals=(), **options)
    x = torch.ones(8, 16)
    seen: list[float] = []
    try:
        for step in job.steps(8):
            if step == leave_at:
                job.request_move()
            optimizer.zero_grad()
            loss = model(x * random.random() * float(np.random.rand())).square().mean()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    except SystemExit:
        pass
    return seen, job


def test_random_numbers_of_python_numpy_and_torch_go_on(tmp_path: Path) -> None:
    whole, _ = one_process(tmp_path / "whole")
    first, _ = one_process(tmp_path / "job", leave_at=3)
    second, job = one_process(tmp_path / "job")
    assert len(first) == 4 and first + second == whole
    assert job.migration is not None and job.migration.step == 4


def test_a_checkpoint_without_its_manifest_is_not_used(tmp_path: Path) -> None:
    one_process(tmp_path, every=3)
    found = find_newest(tmp_path)
    assert found is not None and found[1].step == 6
    (found[0] / "manifest.json").unlink()  # killed while it was written
    _, job = one_process(tmp_path)
    assert job.migration is not None and job.migration.step == 3


def test_only_two_checkpoints_are_kept(tmp_path: Path) -> None:
    one_process(tmp_path, every=1)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000006", "step-00000007"]


def test_another_model_is_refused_with_a_reason(tmp_path: Path) -> None:
    one_process(tmp_path, leave_at=3)
    other = nn.Linear(3, 3)
    with pytest.raises(MigrationError, match="does not fit this model"):
        migratable(other, torch.optim.SGD(other.parameters(), lr=0.1), folder=tmp_path, signals=())


def test_a_state_that_cannot_be_read_again_is_refused_before_the_job_stops(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> Any:
            return {"self": self}

        def load_state_dict(self, state_dict: Any) -> None: ...

    with pytest.raises(MigrationError, match="not plain data"):
        one_process(tmp_path, leave_at=1, states={"odd": Odd()})
    assert find_newest(tmp_path) is None


def test_batches_depend_on_the_step_and_not_on_the_ranks(tmp_path: Path) -> None:
    job = migratable(make_model(0.0), folder=tmp_path, signals=(), seed=11)
    for step in (0, 5, 6, 20):
        job.step = step
        whole = job.indices(50, batch=8).tolist()
        for ranks in (2, 4):
            parts = [job.indices(50, batch=8, rank=r, ranks=ranks).tolist() for r in range(ranks)]
            assert [i for part in parts for i in part] == whole
    with pytest.raises(ArgumentError, match="a multiple"):
        job.indices(50, batch=9, rank=0, ranks=2)


# -- orders -----------------------------------------------------------------------------------------------------------


def test_a_node_is_left_only_after_it_was_hot_for_a_while() -> None:
    now, temperature = [0.0], [80.0]
    source = OverheatSource(lambda: temperature[0], 85.0, hold_s=10.0, clock_s=lambda: now[0])
    answers = []
    for now[0], temperature[0] in ((0, 90), (9, 90), (9.5, 84), (10, 90), (19, 90), (20, 90)):
        answers.append(source())
    assert answers == [None, None, None, None, None, "overheat"]
    assert OverheatSource(lambda: None, 85.0, hold_s=0.0)() is None


def test_a_signal_and_a_file_order_a_move(tmp_path: Path) -> None:
    watch = OrderWatch([], [signal.SIGUSR1])
    with watch.watch():
        signal.raise_signal(signal.SIGUSR1)
    assert watch.order == "signal"
    order = OrderFile(tmp_path)
    assert order() is None
    order.write(ranks=2, node="n7")
    assert order() == "request" and order.take() == {"ranks": 2, "node": "n7"}
    assert order() is None


def test_a_job_that_the_governor_sheds_leaves() -> None:
    state = [JobState.ACTIVE]

    class Governor:
        def show_job(self, job: str) -> JobStatus:
            return JobStatus(job=job, state=state[0], asked_w=1.0, granted_w=0.0, ends_in_s=1.0)

    source = ShedSource(Governor(), "job7")
    assert source() is None
    state[0] = JobState.SHED
    assert source() == "request"


def test_a_source_that_fails_orders_nothing() -> None:
    asked = threading.Event()

    def away() -> None:
        asked.set()
        raise GovernorError("the governor cannot be asked")

    watch = OrderWatch([away], poll_s=0.001)
    with watch.watch():
        assert asked.wait(600.0)
    assert watch.order is None


def test_a_job_is_started_again_where_the_order_says(tmp_path: Path) -> None:
    answers = iter([("moved", {"node": "n7", "ranks": 2}), ("moved", {}), ("done", {})])

    def run(command: Any) -> int:
        phase, order = next(answers)
        (tmp_path / "status.json").write_text(json.dumps({"phase": phase, "step": 3, "order": order}))
        return 0

    launches = run_until_done(
        ["ssh", "{node}", "torchrun", "--nproc-per-node={ranks}"],
        tmp_path,
        node="n1",
        ranks=4,
        choose_node=lambda left: f"not-{left}",
        run=run,
    )
    started = [(launch.command[1], launch.command[3]) for launch in launches]
    assert started == [
        ("n1", "--nproc-per-node=4"),
        ("n7", "--nproc-per-node=2"),
        ("not-n7", "--nproc-per-node=2"),
    ]


def test_a_job_that_moves_gets_the_coolest_node_that_may_take_it() -> None:
    nodes = [PlacementNode(name=f"n{i}", gpus=8, idle_w=1000.0, temperature_c=40.0 + 10 * i) for i in range(4)]
    busy = PlacementJob(name="other", gpus=8, power_w=1.0, on=(NodeShare(node="n1", gpus=8),))
    policy = ThermalPolicy(prefer_cool_nodes=True, hotspot_threshold_c=65.0)
    choose = CoolNodeChooser(FleetFile(nodes=tuple(nodes), jobs=(busy,)), policy, gpus=8, power_w=4000.0)
    assert choose(None) == "n0"
    assert choose("n0") == "n2"  # n1 is full, and n3 above the threshold
    with pytest.raises(MigrationError, match="no node may take the job"):
        CoolNodeChooser(FleetFile(nodes=tuple(nodes[:1])), policy, gpus=8, power_w=1.0)("n0")


def test_a_job_that_fails_or_says_nothing_is_not_started_again(tmp_path: Path) -> None:
    with pytest.raises(MigrationError, match="exit code 3"):
        list(run_until_done([sys.executable, "-c", "raise SystemExit(3)"], tmp_path))
    with pytest.raises(MigrationError, match="without saying"):
        list(run_until_done([sys.executable, "-c", ""], tmp_path))
    with pytest.raises(ArgumentError, match="--ranks"):
        list(run_until_done(["x", "{ranks}"], tmp_path))
