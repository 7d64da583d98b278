"""Gradients reduced beside the backward pass are the same as those reduced after it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from gloo_ranks import GlooRanks
from tessera import dist
from tessera.dist.gradient_report import WAIT_RANGE
from tessera.errors import ArgumentError


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[GlooRanks]:
    with GlooRanks(request.param, node_size=2) as pool:
        yield pool


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[GlooRanks]:
    with GlooRanks(2) as pool:
        yield pool


class Branches(nn.Module):
    """A weight that is used twice, one that is frozen, one that only rank 0 uses, one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(7, 3)  # registered first, used last
        self.twice = nn.Linear(7, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.some = nn.Linear(7, 7)
        self.nobody = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, use_some: bool) -> torch.Tensor:
        x = self.twice(torch.tanh(self.twice(self.frozen(x))))
        return self.head(self.some(x) if use_some else x)


def make_module(dtype: torch.dtype = torch.float32) -> Branches:
    torch.manual_seed(0)
    return Branches().to(dtype)


def make_batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def reduce_after_backward(module: nn.Module) -> None:
    """What everybody would write."""
    for p in module.parameters():
        if p.requires_grad:
            users = dist.all_reduce(torch.tensor([float(p.grad is not None)]))
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(grad, "mean")
            p.grad = grad if users else None


def backward(rank: int, module: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> None:
    module(make_batch(rank, step, dtype), rank == 0).square().sum().backward()


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def compare_steps(rank: int, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[float, Any]:
    """Three steps without an optimizer: the largest difference, and the report."""
    plain, overlapped = make_module(dtype), make_module(dtype)
    worst = 0.0
    with dist.overlap_gradients(overlapped, bucket_mb=1e-4, **options) as sync:
        for step in range(3):
            plain.zero_grad()
            overlapped.zero_grad()
            backward(rank, plain, step, dtype)
            reduce_after_backward(plain)
            backward(rank, overlapped, step, dtype)
            sync.wait()
            worst = max(worst, compare(gradients_of(plain), gradients_of(overlapped)))
        return worst, sync.report()


def compare(a: dict[str, torch.Tensor | None], b: dict[str, torch.Tensor | None]) -> float:
    assert a.keys() == b.keys()
    assert {n for n, g in a.items() if g is None} == {n for n, g in b.items() if g is None}
    return max(float((g.double() - b[n].double()).abs().max()) for n, g in a.items() if g is not None)


@pytest.mark.parametrize(
    ("dtype", "defer"),
    [(torch.float32, False), (torch.float32, True), (torch.float64, False), (torch.bfloat16, True)],
)
def test_gradients_equal_those_reduced_after_backward(ranks: GlooRanks, dtype: torch.dtype, defer: bool) -> None:
    for worst, report in ranks.run(compare_steps, {"defer": defer}, dtype):
        assert worst <= 100 * torch.finfo(dtype).eps
        assert report.steps == 3 and report.reductions > 6
        assert report.saved_bytes == 0 and report.error_bound == 0 and report.sent_bytes > 0
        assert 0 <= report.overlap_pct <= 100


@pytest.mark.parametrize(
    "options",
    [
        {"deterministic": True},
        {"algorithm": "hierarchical"},
        {"phase": "group_offset(node)"},
        {"compress": "fp16"},
        {"compress": "bf16"},
        {"compress": "fp8"},
        {"compress": "fp8", "defer": True},
    ],
)
def test_every_way_stays_within_its_bound(ranks: GlooRanks, options: dict[str, Any]) -> None:
    for worst, report in ranks.run(compare_steps, {**options, "feedback": False}):
        assert worst <= report.error_bound + 1e-4
        if "compress" in options:
            assert report.error_bound > 0
        else:
            assert report.error_bound == 0


def reduce_twice(rank: int) -> list[dict[str, torch.Tensor | None]]:
    found = []
    for options in ({"deterministic": True}, {"deterministic": True, "bucket_mb": 1.0}):
        module = make_module()
        with dist.overlap_gradients(module, **options):
            backward(rank, module, 0)
        found.append(gradients_of(module))
    return found


def test_a_deterministic_reduction_has_the_same_bits_in_any_bucket(ranks: GlooRanks) -> None:
    results = ranks.run(reduce_twice)
    assert compare(results[0][0], results[0][1]) == 0
    assert all(compare(results[0][0], result[0]) == 0 for result in results)


def accumulate(rank: int, options: dict[str, Any]) -> float:
    plain, overlapped = make_module(), make_module()
    for step in range(3):
        backward(rank, plain, step)
    reduce_after_backward(plain)
    with dist.overlap_gradients(overlapped, **options) as sync:
        with sync.no_sync():
            backward(rank, overlapped, 0)
            backward(rank, overlapped, 1)
        backward(rank, overlapped, 2)
        sync.wait()
        assert sync.report().steps == 1
    return compare(gradients_of(plain), gradients_of(overlapped))


@pytest.mark.parametrize("options", [{}, {"defer": True}, {"deterministic": True}])
def test_microbatches_are_reduced_once(ranks: GlooRanks, options: dict[str, Any]) -> None:
    assert max(ranks.run(accumulate, options)) < 1e-4


def run_two_losses(rank: int, options: dict[str, Any]) -> float:
    """Two backward passes before anyone looks: the second adds to means that may be on their way."""
    plain, overlapped = make_module(), make_module()
    with dist.overlap_gradients(overlapped, **options) as sync:
        for module in (plain, overlapped):
            out = module(make_batch(rank, 0), rank == 0)
            out.sum().backward(retain_graph=True)
            out.square().sum().backward()
        sync.wait()
        reduce_after_backward(plain)
    return compare(gradients_of(plain), gradients_of(overlapped))


@pytest.mark.parametrize("options", [{}, {"defer": True}, {"defer": True, "deterministic": True}])
def test_two_losses_of_one_forward_add_up(ranks: GlooRanks, options: dict[str, Any]) -> None:
    assert max(ranks.run(run_two_losses, options)) < 1e-4


def run_checkpointed(rank: int, reentrant: bool) -> float:
    from torch.utils.checkpoint import checkpoint

    found = []
    for is_overlapped in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(7, 7) for _ in range(4)))
        sync = dist.overlap_gradients(module, bucket_mb=1e-4) if is_overlapped else None
        x = make_batch(rank, 0).requires_grad_()
        for layer in module:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        x = module[0](x)  # once more: with reentrant checkpoints its gradient comes in two parts
        x.square().sum().backward()
        if sync is None:
            reduce_after_backward(module)
        else:
            sync.remove()
        found.append(gradients_of(module))
    return compare(*found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_work(two_ranks: GlooRanks, reentrant: bool) -> None:
    assert max(two_ranks.run(run_checkpointed, reentrant)) < 1e-5


def train(rank: int, options: dict[str, Any] | None, late_step: bool) -> list[torch.Tensor]:
    module = make_module()
    module.nobody = nn.MultiheadAttention(7, 1)  # uses the weight of its out_proj without calling it
    forward = module.forward
    module.forward = lambda x, use_some: (
        module.nobody(*[forward(x, use_some).new_ones(2, 7)] * 3)[0].sum() + forward(x, use_some)
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    sync = None if options is None else dist.overlap_gradients(module, bucket_mb=1e-4, **options)
    for step in range(4):
        backward(rank, module, step)
        if sync is None:
            reduce_after_backward(module)
        if late_step and sync is not None:
            sync.step(optimizer)
        else:
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    if sync is not None:
        sync.remove()
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("late_step", [False, True])
@pytest.mark.parametrize("options", [{}, {"defer": True}, {"defer": True, "deterministic": True}])
def test_training_ends_with_the_same_weights(two_ranks: GlooRanks, options: dict[str, Any], late_step: bool) -> None:
    expected = two_ranks.run(train, None, False)[0]
    for weights in two_ranks.run(train, options, late_step):
        for a, b in zip(expected, weights, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def reduce_along_an_axis(rank: int) -> tuple[float, tuple[int, ...], Any]:
    mesh = dist.Mesh(axes=["tp", "dp"], devices=range(4), shape=(2, 2))
    module = nn.Linear(3, 1, bias=False)
    with dist.overlap_gradients(module, mesh=mesh, axis="dp", phase="group_offset(dp)") as sync:
        module(torch.full((1, 3), float(rank))).sum().backward()
        return module.weight.grad[0, 0].item(), mesh.groups("dp")[mesh.group_number("dp", rank)], sync.report()


def test_a_mesh_axis_has_means_of_its_own_ranks() -> None:
    with GlooRanks(4) as pool:
        for mean, group, report in pool.run(reduce_along_an_axis):
            assert mean == sum(group) / 2 and len(group) == 2
            assert report.steps == 1


def profile_a_step(rank: int) -> tuple[dict[str, int], Any]:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with dist.overlap_gradients(module, bucket_mb=0.01) as sync:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            module(torch.ones(2, 64)).sum().backward()
        names = [e.name for e in profile.events()]
        return {name: names.count(name) for name in ("gloo:all_reduce", WAIT_RANGE)}, sync.report(last_step=True)


def test_a_profile_shows_the_reductions_and_the_waiting(two_ranks: GlooRanks) -> None:
    for counts, report in two_ranks.run(profile_a_step):
        assert counts["gloo:all_reduce"] == report.reductions + 1, "one more: who has a gradient"
        assert counts[WAIT_RANGE] == report.reductions + 1


def sum_with_feedback(rank: int, feedback: bool) -> tuple[float, Any]:
    """The same gradient many times: with feedback the errors do not add up."""
    torch.manual_seed(0)
    module, x = nn.Linear(64, 8), make_batch(rank, 0).new_ones(1, 64) * torch.linspace(1, 3, 64)
    total = torch.zeros(8, 64)
    with dist.overlap_gradients(module, compress="fp8", feedback=feedback) as sync:
        for _ in range(40):
            module.zero_grad()
            (module(x) * torch.linspace(0.1, 1, 8)).sum().backward()
            total += module.weight.grad
        truth = 40 * torch.linspace(0.1, 1, 8)[:, None] * torch.linspace(1, 3, 64)
        return float((total - truth).abs().max()), sync.report()


def test_feedback_keeps_errors_from_adding_up(two_ranks: GlooRanks) -> None:
    without, _ = two_ranks.run(sum_with_feedback, False)[0]
    error, report = two_ranks.run(sum_with_feedback, True)[0]
    assert error < without / 5
    assert report.saved_bytes > 0.6 * (report.sent_bytes + report.saved_bytes)


def run_power_sgd(rank: int, in_ddp: bool) -> tuple[float, Any]:
    torch.manual_seed(0)
    module: nn.Module = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    if in_ddp:
        module = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    sync = dist.overlap_gradients(module, power_sgd_rank=2, power_sgd_start=2, bucket_mb=0.005)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))
    for _ in range(60):
        optimizer.zero_grad()
        loss = (module(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
    report = sync.report()
    sync.remove()
    return loss.item(), report


@pytest.mark.parametrize("in_ddp", [False, True])
def test_power_sgd_sends_less(two_ranks: GlooRanks, in_ddp: bool) -> None:
    results = two_ranks.run(run_power_sgd, in_ddp)
    for loss, report in results:
        assert loss < 1.5
        assert report.saved_bytes > 0.5 * (report.saved_bytes + report.sent_bytes)
        assert report.error_bound is None and "PowerSGD" in report.missing["error_bound"]


def compare_ddp(rank: int, options: dict[str, Any], static_graph: bool) -> tuple[float, Any]:
    modules = [DistributedDataParallel(make_module(), find_unused_parameters=not static_graph) for _ in range(2)]
    if static_graph:
        modules = [
            DistributedDataParallel(nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 3)), static_graph=True)
            for _ in range(2)
        ]
        modules[1].load_state_dict(modules[0].state_dict())
    sync = dist.overlap_gradients(modules[1], feedback=False, **options)
    worst = 0.0
    for step in range(3):
        for module in modules:
            module.zero_grad()
            inputs = (make_batch(rank, step),) if static_graph else (make_batch(rank, step), rank == 0)
            module(*inputs).square().sum().backward()
        worst = max(worst, compare(*map(gradients_of, modules)))
    report = sync.report()
    with sync.no_sync():
        modules[1](*inputs).sum().backward()
    assert sync.report().steps == report.steps
    sync.remove()
    modules[1](*inputs).sum().backward()
    return worst, report


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"deterministic": True}, {"compress": "bf16"}, {"compress": "fp8"}, {"algorithm": "hierarchical"}]
)
def test_ddp_reduces_in_the_way_asked_for(two_ranks: GlooRanks, options: dict[str, Any], static_graph: bool) -> None:
    for worst, report in two_ranks.run(compare_ddp, options, static_graph):
        assert worst <= report.error_bound + 1e-4
        assert (report.saved_bytes > 0) == ("compress" in options)
        assert report.steps == 3


def compare_fsdp(rank: int, options: dict[str, Any]) -> tuple[float, Any]:
    found, report = [], None
    for is_ours in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3))
        for layer in (*module, module):
            fully_shard(layer)
        sync = dist.overlap_gradients(module, feedback=False, **options) if is_ours else None
        if sync is not None:
            with sync.no_sync():
                module(make_batch(rank, 0)).square().sum().backward()
        else:
            module.set_requires_gradient_sync(False)
            module(make_batch(rank, 0)).square().sum().backward()
            module.set_requires_gradient_sync(True)
        module(make_batch(rank, 1)).square().sum().backward()
        found.append({n: p.grad.to_local().clone() for n, p in module.named_parameters()})
        if sync is not None:
            report = sync.report()
            sync.remove()
            module(make_batch(rank, 1)).sum().backward()
    return compare(*found), report


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"compress": "bf16"}, {"compress": "fp8"}])
def test_fsdp2_reduces_in_the_way_asked_for(two_ranks: GlooRanks, options: dict[str, Any]) -> None:
    for worst, report in two_ranks.run(compare_fsdp, options):
        assert worst <= report.error_bound + 1e-4
        assert report.steps == 1 and report.overlap_pct == 0
        assert (report.saved_bytes > 0) == ("compress" in options)


def test_fsdp2_refuses_what_it_cannot_do(two_ranks: GlooRanks) -> None:
    texts = two_ranks.run(catch, fsdp_by_node)
    assert all("algorithm with FSDP2" in text for text in texts)


def fsdp_by_node(rank: int) -> None:
    dist.overlap_gradients(fully_shard(nn.Linear(4, 4)), algorithm="hierarchical")


def catch(rank: int, function: Callable[[int], None]) -> str:
    try:
        function(rank)
    except ArgumentError as exc:
        return str(exc)
    return ""


def different_modules(rank: int) -> None:
    dist.overlap_gradients(nn.Linear(4, 4 + rank))


def unfrozen_later(rank: int) -> None:
    module = make_module()
    with dist.overlap_gradients(module):
        module.frozen.requires_grad_()
        backward(rank, module, 0)


def tensor_parallel(rank: int) -> None:
    module = nn.Linear(4, 4)
    plan = ColwiseParallel()
    dist.overlap_gradients(parallelize_module(module, init_device_mesh("cpu", (2,)), plan))


def test_parameters_that_are_dtensors_are_refused(two_ranks: GlooRanks) -> None:
    assert all("DTensors" in text for text in two_ranks.run(catch, tensor_parallel))


def test_ranks_with_other_parameters_are_refused(two_ranks: GlooRanks) -> None:
    assert all("other parameters" in text for text in two_ranks.run(catch, different_modules))
    assert all("frozen" in text for text in two_ranks.run(catch, unfrozen_later))


def fail_and_go_on(rank: int) -> float:
    """A backward pass that fails on every rank leaves nothing behind."""
    plain, overlapped = make_module(), make_module()
    with dist.overlap_gradients(overlapped, bucket_mb=1e-4):
        handle = overlapped.twice.register_full_backward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            backward(rank, overlapped, 0)
        handle.remove()
        overlapped.zero_grad()
        backward(rank, overlapped, 1)
    backward(rank, plain, 1)
    reduce_after_backward(plain)
    return compare(gradients_of(plain), gradients_of(overlapped))


def fail(*_: object) -> None:
    raise ZeroDivisionError


def test_a_backward_pass_that_failed_is_forgotten(two_ranks: GlooRanks) -> None:
    assert max(two_ranks.run(fail_and_go_on)) < 1e-4


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="meta device"):
        dist.overlap_gradients(nn.Linear(2, 2, device="meta"))
    with pytest.raises(ArgumentError, match="PowerSGD"):
        dist.overlap_gradients(nn.Linear(2, 2), power_sgd_rank=2, compress="fp8")
    with pytest.raises(ArgumentError, match="sparse=True"):
        dist.overlap_gradients(nn.Embedding(4, 4, sparse=True))
    with pytest.raises(ArgumentError, match="less than 2"):
        dist.overlap_gradients(nn.Linear(2, 2), power_sgd_rank=1, power_sgd_start=1)
    with pytest.raises(ArgumentError, match="bucket_mb"):
        dist.overlap_gradients(nn.Linear(2, 2), bucket_mb=0)


def test_one_process_needs_no_reduction() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters())
    with dist.overlap_gradients(module, compress="fp8") as sync:
        module(torch.ones(1, 2)).sum().backward()
        sync.step(optimizer)
    assert sync.report().sent_bytes == 0 and sync.report().overlap_pct is None


def test_a_dry_run_has_the_shapes() -> None:
    with dist.dry(64):
        module = nn.Linear(1000, 100)
        for options in ({}, {"deterministic": True}):
            with dist.overlap_gradients(module, **options) as sync:
                for _ in range(2):
                    module(torch.ones(1, 1000)).sum().backward()
            assert module.weight.grad.shape == (100, 1000)
            assert sync.report().gradient_bytes == 2 * 4 * 100_100


def lose_a_rank(rank: int, in_ddp: bool, options: dict[str, Any]) -> object:
    module: nn.Module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    if in_ddp:
        module = DistributedDataParallel(module)
    sync = dist.overlap_gradients(module, bucket_mb=0.02, **options)
    first = (module.module if in_ddp else module)[0]
    for step in range(10**6):
        if rank == 1 and step == 3:
            first.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        try:
            module(torch.ones(2, 64)).sum().backward()
            sync.wait()
        except dist.CollectiveError as exc:
            return exc.missing
    return None


@pytest.mark.parametrize(("in_ddp", "options"), [(False, {}), (True, {"compress": "fp8"})])
def test_a_rank_that_dies_in_backward_is_named(in_ddp: bool, options: dict[str, Any]) -> None:
    ranks = GlooRanks(2)
    assert ranks.run_without(1, lose_a_rank, in_ddp, options) == [(1,)]
