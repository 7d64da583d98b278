"""Every collective on real gloo ranks: equal to the plain sum, or within the bound it states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gloo_ranks import GlooRanks
from tessera import dist
from tessera.dist.collectives import all_reduce
from tessera.errors import ArgumentError

SIZES = (1, 2, 3, 4, 8)


@pytest.fixture(scope="module", params=SIZES[1:])
def ranks(request: pytest.FixtureRequest) -> Iterator[GlooRanks]:
    with GlooRanks(request.param, node_size=2) as pool:
        yield pool


def make(rank: int, seed: int, shape: tuple[int, ...], dtype: torch.dtype, strided: bool = False) -> torch.Tensor:
    """The tensor of a rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(*shape, generator=generator) * 10.0 ** ((rank * 7 + seed) % 5 - 2)
    x = (x * 10).to(dtype) if not dtype.is_floating_point else x.to(dtype)
    return torch.stack([x, x], -1)[..., 0] if strided else x


def reduced(rank: int, seed: int, shape: tuple[int, ...], dtype: torch.dtype, strided: bool, options: Any) -> Any:
    x = make(rank, seed, shape, dtype, strided)
    with dist.record_collectives() as records:
        out = all_reduce(x, **options)
    assert out is x
    return out.contiguous(), records[-1]


def expected(count: int, op: str, *made: Any) -> torch.Tensor:
    parts = [make(r, *made).double() if made[2].is_floating_point else make(r, *made) for r in range(count)]
    total = parts[0].clone()
    for part in parts[1:]:
        total = {"sum": torch.add, "mean": torch.add, "max": torch.maximum, "min": torch.minimum, "prod": torch.mul}[
            op
        ](total, part)
    return total / count if op == "mean" else total


SHAPES = st.sampled_from([(7,), (1,), (64,), (5, 3), (4, 2, 9), (0,), (3, 0), (257,)])
FLOATS = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64])
ALGORITHMS = st.sampled_from(["flat", "two_step", "hierarchical"])


@settings(max_examples=25)
@given(st.integers(0, 50), SHAPES, DTYPES, ALGORITHMS, st.booleans(), st.booleans(), st.integers(1, 3), st.data())
def test_every_way_gives_the_sum(ranks, seed, shape, dtype, algorithm, deterministic, strided, chunks, data):
    ops = ["sum", "max", "min", *(["mean"] if dtype.is_floating_point else [])]
    op = data.draw(st.sampled_from(ops))
    options = {"op": op, "algorithm": algorithm, "deterministic": deterministic, "chunks": chunks}
    results = ranks.run(reduced, seed, shape, dtype, strided, options)
    truth = expected(ranks.count, op, seed, shape, dtype, strided)
    for out, _record in results:
        assert out.dtype == dtype and out.shape == truth.shape
        scale = sum(make(r, seed, shape, dtype).double().abs() for r in range(ranks.count))
        epsilon = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        bound = scale * epsilon * (1 if deterministic and algorithm == "flat" else 2 * ranks.count) + 1e-300
        assert torch.all((out.double() - truth.double()).abs() <= bound)
    if deterministic:
        assert all(torch.equal(out, results[0][0]) for out, _ in results), "ranks differ"


@settings(max_examples=10)
@given(st.integers(0, 50), SHAPES, FLOATS)
def test_a_deterministic_sum_has_the_same_bits_as_the_sum_in_rank_order(ranks, seed, shape, dtype):
    truth = expected(ranks.count, "sum", seed, shape, dtype, False).to(dtype)
    for out, _ in ranks.run(reduced, seed, shape, dtype, False, {"deterministic": True}):
        assert torch.equal(out, truth)


@settings(max_examples=20)
@given(st.integers(0, 50), SHAPES, st.sampled_from(["fp16", "bf16", "bf16-stochastic", "fp8"]), st.integers(1, 2))
def test_a_compressed_sum_is_within_the_bound_it_states(ranks, seed, shape, compress, chunks):
    results = ranks.run(reduced, seed, shape, torch.float32, False, {"compress": compress, "chunks": chunks})
    truth = expected(ranks.count, "sum", seed, shape, torch.float32, False)
    plain = torch.zeros(shape).numel() * 4
    for out, record in results:
        error = float((out.double() - truth).abs().max()) if out.numel() else 0.0
        assert error <= record.error_bound * (1 + 1e-5) + 1e-30
        assert torch.equal(out, results[0][0])
        if plain >= 1000:
            assert record.sent_bytes < 0.6 * 2 * plain * (ranks.count - 1) / ranks.count


def train(rank: int, steps: int, with_feedback: bool) -> float:
    """The sum of what arrived over many steps, against what should have."""
    feedback = dist.ErrorFeedback() if with_feedback else None
    x = make(rank, 3, (300,), torch.float32)
    total, truth = torch.zeros(300), torch.zeros(300)
    for _ in range(steps):
        total += all_reduce(x.clone(), compress="fp8", feedback=feedback)
        truth += all_reduce(x.clone(), deterministic=True)
    return float((total - truth).abs().max() / steps)


def test_with_error_feedback_rounding_does_not_add_up(ranks):
    plain, fed = ranks.run(train, 20, False)[0], ranks.run(train, 20, True)[0]
    assert fed < 0.2 * plain


def sparse_rows(rank: int, rows: int, every: int) -> Any:
    x = torch.zeros(rows, 5)
    x[rank::every] = torch.arange(5.0) + rank
    truth = all_reduce(x.clone(), deterministic=True)
    with dist.record_collectives() as records:
        out = all_reduce(x, sparse=True)
    return torch.equal(out, truth), records[-1].sent_bytes, truth.numel() * 4


def test_a_sparse_sum_is_exact_and_sends_only_rows_that_changed(ranks):
    for is_exact, sent, whole in ranks.run(sparse_rows, 400, 40):
        assert is_exact
        assert sent < 0.2 * whole * ranks.count
    assert all(row[0] for row in ranks.run(sparse_rows, 0, 1))


def others(rank: int, count: int) -> None:
    gathered = dist.all_gather(torch.full((rank, 2), float(rank)))
    assert torch.equal(gathered, torch.cat([torch.full((r, 2), float(r)) for r in range(count)]))
    for deterministic in (False, True):
        part = dist.reduce_scatter(torch.arange(7.0).repeat(2, 1).T * (rank + 1), deterministic=deterministic)
        whole = dist.all_gather(part)
        assert torch.equal(whole, torch.arange(7.0).repeat(2, 1).T * sum(range(1, count + 1)))
    counts = [(rank + r) % 3 for r in range(count)]
    rows = torch.cat([torch.full((n, 2), 10.0 * rank + r) for r, n in enumerate(counts)] or [torch.zeros(0, 2)])
    arrived, from_each = dist.all_to_all(rows, counts)
    assert from_each == [(r + rank) % 3 for r in range(count)]
    assert torch.equal(arrived, torch.cat([torch.full((n, 2), 10.0 * r + rank) for r, n in enumerate(from_each)]))
    x = torch.full((3,), float(rank))
    assert torch.equal(dist.broadcast(x, count - 1), torch.full((3,), count - 1.0))


def test_gather_scatter_exchange_and_broadcast(ranks):
    ranks.run(others, ranks.count)


def bytes_between_nodes(rank: int) -> float | None:
    with dist.record_collectives() as records:
        all_reduce(torch.ones(1000), algorithm="hierarchical")
    return records[-1].between_nodes


def test_across_nodes_goes_one_ranks_part(ranks):
    between = ranks.run(bytes_between_nodes)
    nodes = -(-ranks.count // 2)
    if ranks.count in (4, 8):
        assert between == [pytest.approx(2 * 500 * 4 * (nodes - 1) / nodes)] * ranks.count
    if ranks.count == 2:
        assert between == [None, None], "one node: nothing leaves it"


def gradient(rank: int) -> Any:
    x = torch.full((2,), rank + 1.0, requires_grad=True)
    all_reduce(x, deterministic=True).pow(2).sum().backward()
    return x.grad


def test_gradients_are_reduced_in_the_same_way(ranks):
    total = sum(range(1, ranks.count + 1))
    for grad in ranks.run(gradient):
        assert torch.equal(grad, torch.full((2,), 2.0 * total * ranks.count))


def paced(rank: int, count: int) -> float:
    mesh = dist.Mesh(["tp", "dp"], count, (2, count // 2))
    with dist.record_collectives() as records:
        all_reduce(torch.ones(8), phase="group_offset(tp, 3ms)", mesh=mesh, axis="tp", chunks=2, gap_ms=1)
    return records[-1].delay_s


def test_groups_of_an_axis_start_one_after_the_other(ranks):
    if ranks.count % 2:
        pytest.skip("two by two")
    delays = ranks.run(paced, ranks.count)
    assert delays == [pytest.approx(0.003 * (rank // 2)) for rank in range(ranks.count)]


def test_one_process_is_itself():
    x = torch.ones(3)
    assert all_reduce(x, deterministic=True, phase="group_offset(tp)") is x


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"op": "median"}, "op='median' is not known"),
        ({"algorithm": "magic"}, "algorithm='magic'"),
        ({"compress": "fp8", "op": "max"}, "cannot be compressed"),
        ({"axis": "tp"}, "axis='tp' without a mesh"),
    ],
)
def test_wrong_arguments_say_what_is_right(options, part):
    with pytest.raises(ArgumentError, match=part):
        all_reduce(torch.ones(2), **options)
