"""op.all_reduce: one process, two processes over gloo, and what it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gloo_ranks import GlooRanks
from tessera import op, stream
from tessera.errors import ArgumentError

CPU = stream.create(name="work", device="cpu")


def test_one_process_reduces_to_itself():
    x = torch.randn(4)
    for how in ("sum", "mean", "avg", "max", "min", "prod"):
        assert op.all_reduce(x, how, stream=CPU) is x
    assert op.all_reduce(x, async_op=True).wait() is x
    leaf = torch.ones(2, requires_grad=True)
    assert op.all_reduce(leaf * 2, op="mean").requires_grad


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: op.all_reduce(torch.ones(2), "total"), "op='total'"),
        (lambda: op.all_reduce([1.0]), "x is a list"),
        (lambda: op.all_reduce(torch.ones(2, dtype=torch.int64), "mean"), "op='mean' of torch.int64"),
        (lambda: op.all_reduce(torch.ones(2, requires_grad=True), "max"), "requires gradients"),
        (lambda: op.all_reduce(torch.ones(2, requires_grad=True), async_op=True), "async_op"),
    ],
)
def test_wrong_reductions_are_named(call, said):
    with pytest.raises(ArgumentError, match=said):
        call()


def test_ranks_that_were_launched_and_not_connected_are_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ArgumentError, match="4 ranks were launched"):
        op.all_reduce(torch.ones(2))


def reduce_every_way(rank: int) -> None:
    s = stream.create(name="reduce", device="cpu")
    mine = torch.arange(6.0) + 10 * rank
    wanted = {
        "sum": 2 * torch.arange(6.0) + 10,
        "mean": torch.arange(6.0) + 5,
        "max": torch.arange(6.0) + 10,
        "min": torch.arange(6.0),
        "prod": torch.arange(6.0) * (torch.arange(6.0) + 10),
    }
    wanted["avg"] = wanted["mean"]
    for how, result in wanted.items():
        x = mine.clone()
        assert op.all_reduce(x, how, stream=s) is x and torch.equal(x, result), (how, x)
        x = mine.clone()
        pending = op.all_reduce(x, how, async_op=True)
        assert pending.wait() is x and pending.wait() is x and torch.equal(x, result), (how, x)
    x = mine.clone().reshape(2, 3).t()  # not dense: in place all the same
    assert op.all_reduce(x) is x and torch.equal(x, wanted["sum"].reshape(2, 3).t())
    assert torch.equal(op.all_reduce(torch.tensor([3 + rank]), "max"), torch.tensor([4]))
    for how, factor in (("sum", 1.0), ("mean", 0.5)):
        leaf = mine.clone().requires_grad_()
        out = op.all_reduce(leaf, how)
        assert out is not leaf and torch.equal(leaf.detach(), mine) and torch.equal(out.detach(), wanted[how])
        (out * (rank + 1)).sum().backward()  # the ranks' losses weigh it by 1 and 2: summed 3
        assert torch.equal(leaf.grad, torch.full((6,), 3.0 * factor)), leaf.grad
    alone = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="not in the group"):
            op.all_reduce(torch.ones(1), group=alone)
    else:
        assert op.all_reduce(torch.ones(1), group=alone).item() == 1


def test_two_processes_reduce_over_gloo():
    with GlooRanks(2) as ranks:
        ranks.run(reduce_every_way)
