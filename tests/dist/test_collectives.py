"""Every collective on real gloo ranks: equal to the plain sum, or within the bound it states."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._local_tensor import LocalTensor

from gloo_ranks import GlooRanks
from tessera import dist, op, stream
from tessera.dist.collectives import all_reduce
from tessera.dist.mesh import find_mesh
from tessera.dist.reduction import node_groups
from tessera.errors import ArgumentError


@pytest.fixture(scope="module", params=(2, 3, 4, 8))
def ranks(request: pytest.FixtureRequest) -> Iterator[GlooRanks]:
    with GlooRanks(request.param, node_size=2) as pool:
        yield pool


@pytest.fixture(scope="module", params=(1, 5, 6, 7))
def odd_ranks(request: pytest.FixtureRequest) -> Iterator[GlooRanks]:
    with GlooRanks(request.param, node_size=2) as pool:
        yield pool


def make(rank: int, seed: int, shape: tuple[int, ...], dtype: torch.dtype, strided: bool = False) -> torch.Tensor:
    """The tensor of a rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(*shape, generator=generator) * 10.0 ** ((rank * 7 + seed) % 5 - 2)
    if dtype.is_complex:
        x = torch.complex(x, x.flip(0))
    elif dtype == torch.bool:
        x = x > 0
    x = (x * 10).remainder(50).to(dtype) if dtype in INTEGERS else x.to(dtype)
    return torch.stack([x, x], -1)[..., 0] if strided else x


def reduced(rank: int, seed: int, shape: tuple[int, ...], dtype: torch.dtype, strided: bool, options: Any) -> Any:
    x = make(rank, seed, shape, dtype, strided)
    with dist.record_collectives() as records:
        out = all_reduce(x, **options)
    assert out is x
    return out.contiguous(), records[-1] if records else None


def widen(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.complex128) if x.is_complex() else x.double() if x.is_floating_point() else x


def expected(count: int, op: str, *made: Any) -> torch.Tensor:
    parts = [widen(make(r, *made)) for r in range(count)]
    total = parts[0].clone()
    for part in parts[1:]:
        total = {"sum": torch.add, "mean": torch.add, "max": torch.maximum, "min": torch.minimum, "prod": torch.mul}[
            op
        ](total, part)
    return total / count if op == "mean" else total


SHAPES = st.sampled_from([(7,), (1,), (64,), (5, 3), (4, 2, 9), (0,), (3, 0), (257,)])
FLOATS = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
INTEGERS = [torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = st.one_of(FLOATS, st.sampled_from([*INTEGERS, torch.bool, *COMPLEX]))
ALGORITHMS = st.sampled_from(["flat", "two_step", "hierarchical"])


WAYS = st.tuples(
    st.integers(0, 50), SHAPES, DTYPES, ALGORITHMS, st.booleans(), st.booleans(), st.integers(1, 3), st.integers(0, 3)
)


@settings(max_examples=25)
@given(WAYS)
def test_every_way_gives_the_sum(ranks, way):
    check_one_way(ranks, *way)


@settings(max_examples=6)
@given(WAYS)
def test_every_way_gives_the_sum_on_odd_numbers_of_ranks(odd_ranks, way):
    check_one_way(odd_ranks, *way)


def check_one_way(ranks, seed, shape, dtype, algorithm, deterministic, strided, chunks, which):
    ops = ["sum", *(["mean"] if dtype.is_floating_point else []), *([] if dtype.is_complex else ["max", "min"])]
    op = ops[which % len(ops)]
    options = {"op": op, "algorithm": algorithm, "deterministic": deterministic, "chunks": chunks}
    results = ranks.run(reduced, seed, shape, dtype, strided, options)
    truth = expected(ranks.count, op, seed, shape, dtype, strided)
    for out, _record in results:
        assert out.dtype == dtype and out.shape == truth.shape
        assert_near(out, truth, ranks.count, seed, in_rank_order=deterministic and algorithm == "flat")
    if deterministic:
        assert all(torch.equal(out, results[0][0]) for out, _ in results), "ranks differ"


def assert_near(out: torch.Tensor, truth: torch.Tensor, count: int, seed: int, *, in_rank_order: bool) -> None:
    if not (out.is_floating_point() or out.is_complex()):
        assert torch.equal(out, truth.to(out.dtype))
        return
    scale = sum(widen(make(r, seed, tuple(out.shape), out.dtype)).abs() for r in range(count))
    bound = scale * torch.finfo(out.dtype).eps * (1 if in_rank_order else 2 * count) + 1e-300
    assert torch.all((widen(out) - truth).abs() <= bound)


SIMULATED = {
    "flat": {},
    "two_step": {"algorithm": "two_step"},
    "rank_order": {"deterministic": True},
    "hierarchical": {"algorithm": "hierarchical", "node_size": 2},
    "hierarchical in order": {"algorithm": "hierarchical", "node_size": 2, "deterministic": True},
    "chunks": {"chunks": 3},
    "fp16": {"compress": "fp16"},
    "bf16": {"compress": "bf16"},
    "fp8": {"compress": "fp8"},
}


@pytest.mark.parametrize("count", range(1, 9))
def test_every_way_gives_the_sum_in_one_process(count):
    parts = {r: make(r, 3, (7, 3), torch.float32) for r in range(count)}
    truth = expected(count, "sum", 3, (7, 3), torch.float32)
    for name, options in SIMULATED.items():
        if name.startswith("hierarchical") and count % 2:
            continue
        with dist.simulate(count), dist.record_collectives() as records:
            x = LocalTensor({r: part.clone() for r, part in parts.items()})
            outs = all_reduce(x, **options)._local_tensors
        bound = records[-1].error_bound if records else 0.0
        for out in outs.values():
            if "compress" in options:
                assert torch.all((out - truth).abs() <= bound + 1e-4), name
            else:
                assert_near(out, truth, count, 3, in_rank_order=name == "rank_order")


def test_what_needs_different_shapes_is_refused_in_one_process():
    with dist.simulate(2):
        x = LocalTensor({r: torch.ones(5) for r in range(2)})
        for call in (
            lambda: all_reduce(x, sparse=True),
            lambda: dist.reduce_scatter(x),
            lambda: dist.all_to_all(x, [2, 3]),
        ):
            with pytest.raises(ArgumentError, match=r"does not work in dist\.simulate"):
                call()


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


@pytest.mark.parametrize("codec", [dist.Codec("bf16"), dist.Codec("bf16", stochastic=True), dist.Codec("fp8")])
def test_a_nan_of_any_bits_arrives_as_nan(codec):
    x = torch.tensor([0x7F800001, -0x00700001, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    assert x.isnan().all() and codec.decode(codec.encode(x), len(x)).isnan().all()


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


def move_one(rank: int, dtype: torch.dtype) -> list[Any]:
    x = torch.ones(1, 2).to(dtype)[:, 0]  # dense, with a stride of 2
    moved = [dist.broadcast(x), dist.all_gather(x), dist.all_reduce(x.clone())]
    return [float(y.float().sum()) for y in moved]


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.float8_e4m3fn])
def test_a_single_element_of_any_stride_is_moved(ranks, dtype):
    count = float(ranks.count)
    assert ranks.run(move_one, dtype)[0] == [1.0, count, 1.0 if dtype == torch.bool else count]


def reduce_overflow(rank: int, compress: str) -> Any:
    feedback = dist.ErrorFeedback()
    x = torch.ones(300)
    if rank == 0:
        x[7] = torch.inf
    first = all_reduce(x, compress=compress, feedback=feedback)
    return first, all_reduce(torch.ones(300), compress=compress, feedback=feedback)


@pytest.mark.parametrize("compress", ["fp16", "bf16", "fp8"])
def test_an_overflow_is_seen_by_all_and_gone_in_the_next_step(ranks, compress):
    for first, second in ranks.run(reduce_overflow, compress):
        assert not torch.isfinite(first[7]), "a loss scaler looks for it"
        assert torch.allclose(first[8:], torch.full((292,), float(ranks.count)))
        assert torch.allclose(second, torch.full((300,), float(ranks.count)))


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


def test_one_number_is_a_sparse_sum_too(ranks):
    assert ranks.run(all_reduce_one_number) == [torch.tensor(sum(range(ranks.count)))] * ranks.count


def all_reduce_one_number(rank: int) -> torch.Tensor:
    return all_reduce(torch.tensor(rank), sparse=True)


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


def test_gather_scatter_exchange_and_broadcast_on_odd_numbers_of_ranks(odd_ranks):
    odd_ranks.run(others, odd_ranks.count)


def move(rank: int, count: int, dtype: torch.dtype) -> None:
    """What only moves keeps all bits of any type."""
    parts = [make(r, 1, (6, 2), dtype, strided=True) for r in range(count)]
    own = parts[rank].as_subclass(torch.Tensor)
    assert_same(dist.all_gather(own), torch.cat(parts))
    counts = [6 - (count - 1), *[1] * (count - 1)]
    starts = [0, *range(6 - (count - 1), 6), 6]
    arrived, _ = dist.all_to_all(own, counts)
    assert_same(arrived, torch.cat([part[starts[rank] : starts[rank + 1]] for part in parts]))
    assert_same(dist.broadcast(own.clone(), count - 1), parts[-1])


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype and a.tolist() == b.tolist()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float8_e4m3fn, torch.complex64, torch.bfloat16])
def test_every_type_can_be_moved(odd_ranks, dtype):
    if odd_ranks.count == 5:
        odd_ranks.run(move, odd_ranks.count, dtype)


def disagree(rank: int, case: str) -> Any:
    """Rank 1 does something else than the others; the group works afterwards."""
    odd, x = rank == 1, torch.ones(6, 2)
    calls = {
        "shape": lambda: all_reduce(torch.ones(5 if odd else 7), deterministic=True),
        "type": lambda: all_reduce(x.double() if odd else x),
        "way": lambda: all_reduce(x, algorithm="two_step" if odd else "flat"),
        "kind": lambda: dist.broadcast(x) if odd else all_reduce(x),
        "width": lambda: dist.all_gather(torch.ones(2, 3 if odd else 4)),
        "source": lambda: dist.broadcast(x, int(odd)),
        "meta": lambda: all_reduce(x.to("meta") if odd else x),
        "meta broadcast": lambda: dist.broadcast(x.to("meta") if odd else x),
        "operation": lambda: dist.reduce_scatter(x, "median" if odd else "sum"),
        "counts": lambda: dist.all_to_all(x, [7, *[0] * (count - 1)] if odd else [6, *[0] * (count - 1)]),
        "negative count": lambda: dist.all_to_all(x, [7 if odd else 6, -1 if odd else 0, *[0] * (count - 2)]),
        "feedback": lambda: all_reduce(x, compress="fp8", feedback=True if odd else None),
        "gap": lambda: all_reduce(x, gap_ms="1ms" if odd else 1),
        "jitter": lambda: all_reduce(x, jitter_ms=None if odd else 1),
        "text": lambda: dist.broadcast(x, "0" if odd else 0),
        "one number": lambda: dist.reduce_scatter(torch.tensor(1.0) if odd else x),
    }
    count = torch.distributed.get_world_size()
    try:
        calls[case]()
    except (dist.CollectiveError, ArgumentError) as exc:
        all_reduce(x)
        assert float(x[0, 0]) == count
        return type(exc).__name__, str(exc)
    return None


@pytest.mark.parametrize("case", ["shape", "type", "way", "kind", "width", "source"])
def test_ranks_that_call_different_things_are_told_which(ranks, case):
    for kind, text in ranks.run(disagree, case):
        assert kind == "CollectiveError"
        assert "the ranks do not call the same" in text and "rank 0: " in text and "rank 1: " in text


REFUSED = ["meta", "meta broadcast", "operation", "counts", "negative count", "feedback", "gap", "jitter", "text"]


@pytest.mark.parametrize("case", [*REFUSED, "one number"])
def test_a_rank_that_refuses_does_not_let_the_others_wait(ranks, case):
    results = ranks.run(disagree, case)
    assert [kind for kind, _ in results] == [
        "CollectiveError",
        "ArgumentError",
        *["CollectiveError"] * (ranks.count - 2),
    ]
    assert "refused: " in results[0][1]


def scatter_compressed(rank: int, count: int, compress: str) -> tuple[torch.Tensor, torch.Tensor, Any]:
    x = make(rank, 1, (4 * count, 300), torch.float32)
    exact = dist.reduce_scatter(x, deterministic=True)
    with dist.record_collectives() as records:
        return exact, dist.reduce_scatter(x, compress=compress), records[-1]


@pytest.mark.parametrize("compress", ["bf16", "fp8"])
def test_a_compressed_reduce_scatter_states_its_error(ranks, compress):
    for exact, out, record in ranks.run(scatter_compressed, ranks.count, compress):
        error = float((exact - out).abs().max())
        assert 0 < error <= record.error_bound < 100 * error
        assert record.sent_bytes < 0.55 * record.tensor_bytes * (ranks.count - 1) / ranks.count


def timeouts_of_node_groups(rank: int) -> list[float]:
    groups = [g for g in node_groups(None, 2) if g is not None]
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]


def test_groups_of_nodes_have_the_timeout_of_the_job():
    """Torch gives a new group 30 minutes: a rank that is stopped was waited for that long."""
    with GlooRanks(4, node_size=2, timeout_s=77.0) as pool:
        assert pool.run(timeouts_of_node_groups) == [[77.0, 77.0]] * 4


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


def call_as_the_seeds_do(rank: int, count: int, how: str) -> Any:
    x = torch.full((4,), rank + 1.0)
    mesh = dist.Mesh(["tp", "dp"], count, (2, count // 2))
    part = mesh.sub("tp", 0)
    s = stream.create(name="comm", device="cpu")
    around = {"made": contextlib.nullcontext(), "with": mesh, "torch": mesh.device_mesh}[how]
    other = dist.Mesh(["tp"], count) if how != "made" else None
    with around, dist.record_collectives() as records:
        y = op.all_reduce(x, op="sum", deterministic=True, phase="group_offset(tp)", stream=s)
        z = op.all_reduce(torch.full((1,), float(rank)), axis="tp")
    del part, other
    return float(y[0]), float(z), records[0].delay_s


@pytest.mark.parametrize("how", ["made", "with", "torch"])
def test_a_call_without_a_mesh_takes_the_current_one(ranks, how):
    if ranks.count % 2:
        pytest.skip("two by two")
    for rank, (total, pair, delay_s) in enumerate(ranks.run(call_as_the_seeds_do, ranks.count, how)):
        assert total == sum(range(1, ranks.count + 1))
        assert pair == 2 * (rank // 2 * 2) + 1 if how != "torch" else pair is not None
        assert delay_s == pytest.approx(0.001 * (rank // 2))


def jitter(rank: int, count: int) -> list[float]:
    mesh = dist.Mesh(["tp", "dp"], count, (2, count // 2))
    with dist.record_collectives() as records:
        for _ in range(3):
            all_reduce(torch.ones(1), mesh=mesh, axis="tp", jitter_ms=2)
    return [record.delay_s for record in records]


def test_groups_do_not_jitter_in_step(ranks):
    if ranks.count % 2:
        pytest.skip("two by two")
    delays = ranks.run(jitter, ranks.count)
    assert all(delays[r] == delays[r + 1] for r in range(0, ranks.count, 2)), "the ranks of a group wait equally long"
    assert len({tuple(d) for d in delays}) == ranks.count // 2


def test_one_process_is_itself():
    x = torch.ones(3)
    assert all_reduce(x, deterministic=True, phase="group_offset(tp)") is x


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"op": "median"}, "op='median' is not known"),
        ({"algorithm": "magic"}, "algorithm='magic'"),
        ({"compress": "fp8", "op": "max"}, "cannot be compressed"),
        ({"axis": "nowhere"}, "no mesh has an axis 'nowhere'"),
        ({"op": "max"}, "complex numbers have no order"),
    ],
)
def test_wrong_arguments_say_what_is_right(options, part):
    with pytest.raises(ArgumentError, match=part):
        all_reduce(torch.ones(2, dtype=torch.complex64 if "complex" in part else torch.float32), **options)


def test_an_error_names_the_collective_that_was_called():
    with pytest.raises(ArgumentError, match="reduce_scatter: op='median' is not known"):
        dist.reduce_scatter(torch.ones(2), "median")


def test_two_meshes_with_an_axis_are_no_current_mesh():
    one, two = dist.Mesh(["twice"], 2), dist.Mesh(["twice"], 4)
    with pytest.raises(ArgumentError, match="2 meshes have an axis 'twice'"):
        all_reduce(torch.ones(2), axis="twice")
    with two:
        assert find_mesh(None, "twice") is two
    assert find_mesh(one, "twice") is one
