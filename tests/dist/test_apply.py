"""A module divided over ranks computes the losses and gradients of the whole module in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from decoders import make_gpt, make_words, next_word_loss
from gloo_ranks import GlooRanks
from tessera import dist
from tessera.dist import Layout, apply_layout
from tessera.dist.pipeline_stages import choose_bounds
from tessera.errors import ArgumentError


@pytest.fixture(scope="module")
def two() -> Iterator[GlooRanks]:
    with GlooRanks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[GlooRanks]:
    with GlooRanks(4) as ranks:
        yield ranks


def compare(rank: int, settings: dict[str, Any], kind: str, options: dict[str, Any]) -> tuple[float, float]:
    """The largest errors of the loss and of a gradient, relative to the largest gradient, against one process."""
    layout = Layout(**settings)
    whole, words = make_gpt(kind, **options), make_words(8)
    expected = next_word_loss(whole(words), words)
    expected.backward()
    parallel = apply_layout(make_gpt(kind, **options), layout, split_logits=kind == "grouped")
    mine = parallel.local_batch(words)
    loss = parallel.step(mine, mine, next_word_loss)
    gradients = parallel.gradients()
    wanted = {n: p.grad for n, p in whole.named_parameters(remove_duplicate=False) if p.grad is not None}
    assert set(gradients) == set(wanted), set(gradients) ^ set(wanted)
    errors = [(gradients[n] - g).abs().max() / g.abs().max() for n, g in wanted.items()]
    return float((loss - expected).detach()), float(max(errors))


def check(ranks: GlooRanks, kind: str = "fused", options: dict[str, Any] | None = None, **settings: Any) -> None:
    for loss_error, gradient_error in ranks.run(compare, settings, kind, options or {}):
        assert abs(loss_error) < 1e-5
        assert gradient_error < 1e-4


@pytest.mark.parametrize("kind", ["fused", "grouped", "experts"])
def test_tensor_parallel(two, kind):
    check(two, kind, {"tied": kind == "fused"}, tp=2, microbatches=2)


@pytest.mark.parametrize("sharding", ["none", "zero1", "zero2", "zero3"])
def test_data_parallel(two, sharding):
    check(two, dp=2, microbatches=2, sharding=sharding)


@pytest.mark.parametrize("tied", [False, True])
def test_pipeline(two, tied):
    check(two, options={"tied": tied}, pp=2, microbatches=4)


@pytest.mark.parametrize(
    "settings",
    [
        {"tp": 2, "pp": 2, "microbatches": 4, "recompute": "full"},
        {"dp": 2, "tp": 2, "microbatches": 2, "sharding": "zero3", "recompute": "selective"},
        {"dp": 2, "pp": 2, "microbatches": 4, "sharding": "zero1", "vp": 2},
        {"dp": 2, "pp": 2, "microbatches": 2, "sharding": "none", "schedule": "gpipe"},
    ],
    ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items() if k != "microbatches"),
)
def test_two_axes(four, settings):
    check(four, "grouped" if "pp" in settings else "fused", {"tied": True}, **settings)


def read_timeout_of_ends(rank: int) -> float:
    parallel = apply_layout(make_gpt(tied=True), Layout(pp=2, microbatches=2))
    return parallel._ends_group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_a_tied_embedding_is_summed_with_the_timeout_of_the_job():
    with GlooRanks(2, timeout_s=77.0) as ranks:
        assert ranks.run(read_timeout_of_ends) == [77.0, 77.0]


def compare_steps(rank: int, settings: dict[str, Any]) -> list[float]:
    parallel = apply_layout(make_gpt(tied=True), Layout(**settings))
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.01)
    words = parallel.local_batch(make_words(8, seq=6))
    losses = []
    for seq in (6, 6, 4):  # the last batch has other shapes
        optimizer.zero_grad()
        losses.append(float(parallel.step(words[:, :seq], words[:, :seq], next_word_loss)))
        losses.append(float(parallel.clip_gradients(0.5)))
        optimizer.step()
    losses.append(float(parallel.evaluate(words, words, next_word_loss)))
    whole = make_gpt(tied=True)
    whole.load_state_dict(parallel.state_dict())
    losses.append(next_word_loss(whole(make_words(8)), make_words(8)).item())
    return losses


def test_the_same_loop_trains_the_same_model_with_every_layout(two, four):
    expected = two.run(compare_steps, {"dp": 2, "sharding": "none"})[0]
    assert expected[0] > expected[2]
    for ranks, settings in (
        (two, {"tp": 2}),
        (four, {"pp": 2, "dp": 2, "sharding": "zero2", "microbatches": 2}),
        (four, {"tp": 2, "dp": 2, "sharding": "zero3", "microbatches": 2}),
    ):
        for losses in ranks.run(compare_steps, settings):
            assert losses == pytest.approx(expected, rel=1e-4)


def compare_stack(rank: int, settings: dict[str, Any]) -> tuple[float, list[str]]:
    """An MLP without words, a root that is its own stack."""

    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(*[nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 8)) for _ in range(4)])

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (output - targets).square().mean()

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(5))
    whole = make()
    loss_fn(whole(x), x).backward()
    parallel = apply_layout(make(), Layout(**settings), example_inputs=x)
    parallel.step(x, x, loss_fn)
    gradients = parallel.gradients()
    errors = [(gradients[n] - p.grad).abs().max() for n, p in whole.named_parameters()]
    return float(max(errors)), [split.how for split in parallel.splits]


@pytest.mark.parametrize("settings", [{"tp": 2}, {"pp": 2, "microbatches": 2}])
def test_a_stack_of_mlps(two, settings):
    for error, how in two.run(compare_stack, settings):
        assert error < 1e-5
        assert "columns" in how or how[0].startswith("stage")


def step_with_dropout(rank: int) -> tuple[float, float]:
    torch.manual_seed(100 + rank)
    model = make_gpt()
    torch.manual_seed(200 + rank)  # as in a program that seeds nothing
    for block in model.blocks:
        block.mlp.append(nn.Dropout(0.5))
    parallel = apply_layout(model, Layout(tp=2))
    loss = parallel.step(make_words(4), make_words(4), next_word_loss)
    return loss.item(), model.norm.weight.grad.sum().item()


def test_ranks_of_tensor_parallel_draw_the_same_dropout(two):
    first, second = two.run(step_with_dropout)
    assert first == second


class UnusualGPT(nn.Module):
    """Places of the root used at both ends, a look at an attribute of a block, a frozen embedding that is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.places = nn.Parameter(torch.randn(64, 32))
        self.h = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(3))
        self.embedding.weight.requires_grad_(False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words) + self.places[: words.shape[1]] * (1 + self.h[0].norm1.eps)
        for block in self.h:
            x = block(x)
        return (x + self.places[: words.shape[1]]) @ self.embedding.weight.T


def compare_unusual(rank: int, settings: dict[str, Any]) -> float:
    def make() -> nn.Module:
        torch.manual_seed(4)
        return UnusualGPT()

    whole, words = make(), make_words(4)
    next_word_loss(whole(words), words).backward()
    parallel = apply_layout(make(), Layout(**settings))
    parallel.step(words, words, next_word_loss)
    gradients = parallel.gradients()
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    assert set(gradients) == set(wanted), set(gradients) ^ set(wanted)
    return max(float((gradients[n] - g).abs().max() / g.abs().max()) for n, g in wanted.items())


@pytest.mark.parametrize("settings", [{"tp": 2}, {"pp": 2, "microbatches": 2}])
def test_an_unusual_module(two, settings):
    assert max(two.run(compare_unusual, settings)) < 1e-4


class Ladder(nn.Module):
    """Every block also gets the embedding, which a pipeline would have to send along."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 8)
        self.blocks = nn.ModuleList(nn.Bilinear(8, 8, 8) for _ in range(4))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = start = self.words(words)
        for block in self.blocks:
            x = block(x, start)
        return x


REFUSALS = [
    ({"tp": 8}, make_gpt, "tp=8 does not divide the 4 heads of blocks.0"),
    ({"tp": 4}, lambda: make_gpt("grouped"), "tp=4 does not divide the 2 heads of keys"),
    ({"cp": 2}, make_gpt, "cp=2 cannot be applied"),
    ({"dp": 2, "ep": 2}, lambda: make_gpt("experts"), "ep=2 cannot be applied"),
    ({"pp": 2, "microbatches": 2}, lambda: nn.Linear(2, 2), "has no stack of blocks"),
    ({"tp": 2}, lambda: nn.Linear(2, 2), "has no stack of blocks"),
    ({"pp": 8, "microbatches": 8}, make_gpt, "4 blocks in blocks are too few for 8 stages"),
    ({"pp": 2}, make_gpt, "1 microbatches are too few for 1f1b"),
    ({"pp": 2, "microbatches": 2}, Ladder, "cannot be cut into the stages"),
    ({"pp": 2, "microbatches": 2}, lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "needs example_inputs"),
    ({"dp": 2, "offload": ("optimizer",)}, make_gpt, "cannot be applied"),
]


@pytest.mark.parametrize(("settings", "make", "message"), REFUSALS, ids=[message for _, _, message in REFUSALS])
def test_what_cannot_be_divided_is_refused_with_a_reason(settings, make, message):
    layout = Layout(**settings)
    with dist.dry(layout.gpus):
        module = make()
        with pytest.raises(ArgumentError, match=message):
            apply_layout(module, layout)


def test_a_plan_is_applied():
    model = make_gpt()
    plan = dist.plan(model, cluster="dgx-h200", gpus=4, seq=8, global_batch=8)
    with dist.dry(4):
        assert plan.apply(make_gpt()).layout == plan.best.layout


def test_one_rank_needs_no_torchrun():
    words = make_words(2)
    try:
        loss = apply_layout(make_gpt(), Layout(microbatches=2)).step(words, words, next_word_loss)
    finally:
        torch.distributed.destroy_process_group()
    assert loss.item() == pytest.approx(next_word_loss(make_gpt()(words), words).item(), rel=1e-5)


def test_a_layout_needs_its_ranks():
    with pytest.raises(ArgumentError, match="this process is alone"):
        apply_layout(make_gpt(), Layout(dp=2))
    with dist.dry(4), pytest.raises(ArgumentError, match="is for 2 ranks, and 4 run"):
        apply_layout(make_gpt(), Layout(dp=2))


def dry_step(layout: Layout, rank: int = 0) -> tuple[Any, dict[str, int], dict[str, int]]:
    with dist.dry(layout.gpus, rank=rank) as counted:
        parallel = apply_layout(make_gpt(width=64), layout)
        counted.calls.clear()
        counted.bytes.clear()
        words = torch.zeros((layout.microbatches, 8), dtype=torch.int64)
        parallel.step(words, words, next_word_loss)
        return parallel, dict(counted.calls), dict(counted.bytes)


def test_a_dry_run_counts_what_tensor_parallel_sends():
    parallel, calls, nbytes = dry_step(Layout(tp=4))
    assert parallel.module.blocks[0].attn.c_attn[0].weight.to_local().shape == (16, 64)
    # Megatron's four for each of the 4 layers, one for the embedding, one for the gradient of the head's input.
    assert calls == {"all_reduce": 18, "all_gather": 1}
    assert nbytes == {"all_reduce": 18 * 8 * 64 * 4, "all_gather": 8 * 16 * 4}


def test_a_dry_run_of_many_ranks_counts_every_axis():
    layout = Layout(tp=2, pp=4, dp=64, microbatches=4, sharding="zero1")
    parallel, calls, nbytes = dry_step(layout, rank=3)
    assert calls["send"] == 4 and nbytes["send"] == 4 * 8 * 64 * 4
    assert calls["reduce_scatter"] == 2  # of the block and of the embedding, once a step
    assert "stage 0" in str(parallel) and "dp: zero1" in str(parallel)


def test_stages_are_balanced():
    assert choose_bounds([1, 1, 1, 1], 2) == [0, 2, 4]
    assert choose_bounds([1, 1, 1, 1, 1, 1], 2, end_cost=2) == [0, 4, 6]
    assert choose_bounds([5, 1, 1, 1], 3) == [0, 1, 2, 4]
