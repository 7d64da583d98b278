"""Tokens sent to experts on other ranks come back as if all experts were here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from gloo_ranks import GlooRanks
from tessera import dist
from tessera.dist import experts as experts  # imported once, not by every rank
from tessera.errors import ArgumentError

WIDTH, CHOICES = 6, 3


@pytest.fixture(scope="module", params=(1, 2, 4))
def ranks(request: pytest.FixtureRequest) -> Iterator[GlooRanks]:
    with GlooRanks(request.param) as pool:
        yield pool


def assert_close(a: torch.Tensor | None, b: torch.Tensor | None) -> None:
    assert a is not None and b is not None and a.shape == b.shape
    assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def mix(rank: int, count: int) -> float:
    """Each rank has other tokens, also none; experts 2 a rank. Returns the bytes of tokens that left it."""
    experts = 2 * count + (2 if count == 1 else 0)
    matrices = torch.randn(experts, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    own = torch.Generator().manual_seed(rank + 1)
    number = 5 * rank
    tokens = torch.randn(number, WIDTH, generator=own).requires_grad_()
    chosen = torch.rand(number, experts, generator=own).argsort(1)[:, :CHOICES]
    weights = torch.rand(number, CHOICES, generator=own).requires_grad_()
    dense = torch.einsum("th,tkhw,tk->tw", tokens, matrices[chosen], weights)
    dense.square().sum().backward()
    truth = [tokens.grad, weights.grad]
    tokens.grad = weights.grad = None

    first = rank * (experts // count)
    mine = [
        partial(torch.nn.functional.linear, weight=m.detach().T) for m in matrices[first : first + experts // count]
    ]
    sent = dist.dispatch_tokens(tokens, chosen, weights, count=experts)
    assert len(sent.tokens) <= 5 * sum(range(count)), "a token comes once, whatever number of experts it has here"
    out = dist.combine_tokens(sent, sent.run_experts(mine), count=number)
    assert_close(out, dense)
    out.square().sum().backward()
    assert_close(tokens.grad, truth[0])
    assert_close(weights.grad, truth[1])
    return float(len(sent.sent_from))


def test_experts_elsewhere_give_what_experts_here_would(ranks: GlooRanks) -> None:
    rows = ranks.run(mix, ranks.count)
    assert all(row <= 5 * rank * min(ranks.count, CHOICES) for rank, row in enumerate(rows))


def pin(rank: int) -> list[float]:
    """Experts on parts of the mesh, and parts of these: groups are made by their own ranks alone."""
    mesh = dist.Mesh(["ep", "tp"], 4, (2, 2))
    at = mesh.coordinate(rank)
    expert = mesh.sub("ep", at["ep"])
    one = dist.all_reduce(torch.tensor([float(rank)]), mesh=expert, axis="tp")
    inner = expert.sub("tp", [at["tp"]])
    two = dist.all_reduce(torch.tensor([float(rank)]), mesh=inner, axis="tp")
    return [float(one), float(two)]


def test_experts_are_pinned_to_parts_of_a_mesh_and_parts_of_those() -> None:
    with GlooRanks(4) as four:
        assert four.run(pin) == [[1.0, 0.0], [1.0, 1.0], [5.0, 2.0], [5.0, 3.0]]


@pytest.mark.parametrize(
    ("experts", "weights", "part"),
    [
        (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 1), "weights (3, 1)"),
        (torch.full((3, 2), 9), torch.zeros(3, 2), "experts 9 to 9 of 4"),
    ],
)
def test_wrong_choices(experts: torch.Tensor, weights: torch.Tensor, part: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        dist.dispatch_tokens(torch.zeros(3, WIDTH), experts, weights, count=4)
    assert part in str(caught.value)
