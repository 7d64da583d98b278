"""Meshes and shards: sizes, groups and shapes, compared with torch's own on a fake process group."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera import dist
from tessera.dist.pacing import Pace, Phase
from tessera.errors import ArgumentError


def test_the_seeds_example_is_a_description_on_a_laptop():
    mesh = dist.Mesh(axes=["tp", "pp", "dp"], devices=range(72))
    layout = dist.ShardSpec(partition=("row", "col"), mesh_axes=("tp", "pp"))
    w = dist.tensor(shape=(1_000_000, 1_000_000), layout=layout, mesh=mesh)
    assert mesh.shape == (8, 3, 3)
    assert w.nbytes == 4 * 10**12
    assert w.local_shape(0) == (125_000, 333_334)
    with pytest.raises(ArgumentError, match="only a description"):
        _ = w.dtensor


def test_a_mapping_has_the_sizes_of_its_axes():
    mesh = dist.Mesh(axes={"tp": 4, "dp": 2}, devices=range(8))
    assert (mesh.axes, mesh.shape) == (("tp", "dp"), (4, 2))
    with pytest.raises(ArgumentError, match="does not have 8 devices"):
        dist.Mesh({"tp": 4, "dp": 4}, 8)
    with pytest.raises(ArgumentError, match="has the sizes already"):
        dist.Mesh({"tp": 4, "dp": 2}, 8, (2, 4))


def test_tensor_parallel_ranks_are_neighbours():
    mesh = dist.Mesh(["pp", "dp", "tp"], 32, (2, 4, 4))
    assert mesh.groups("tp")[0] == (0, 1, 2, 3)
    assert mesh.crossings("tp", 8) == 0.0
    assert mesh.crossings("pp", 8) == 1.0
    assert mesh.groups("dp")[0] == (0, 4, 8, 12)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_groups_part_the_mesh_and_know_their_number(shape):
    axes = ["tp", "dp", "pp", "other"][: len(shape)]
    count = 1
    for n in shape:
        count *= n
    mesh = dist.Mesh(axes, count, shape)
    for axis in axes:
        groups = mesh.groups(axis)
        assert sorted(itertools.chain(*groups)) == list(range(count))
        for number, group in enumerate(groups):
            assert {mesh.group_number(axis, r) for r in group} == {number}
            assert [mesh.coordinate(r)[axis] for r in group] == list(range(mesh.size(axis)))
    for rank in range(count):
        assert mesh.rank_at(list(mesh.coordinate(rank).values())) == rank


def test_a_phase_over_an_axis_that_the_mesh_does_not_have_is_an_error():
    mesh = dist.Mesh(["tp", "dp"], 8, (4, 2))
    with pytest.raises(ArgumentError, match="no axis 'zz'"):
        mesh.group_number("zz", 3)
    with pytest.raises(ArgumentError, match="no axis 'zz'"):
        Phase.parse("group_offset(zz)").delay_s(mesh, 3, node_size=8)


def test_jitter_is_a_most_or_a_pair():
    assert Pace.make(None, 5, 1, 0.0).jitter_s == (0.0, 5e-3) and Pace.make(None, 0.0, 1, 0.0) == Pace()
    pace = Pace.make(None, [1, 2], 1, 0.0)
    assert all(1e-3 <= pace.wait_to_start(None, 0, 1, f"{n}") <= 2e-3 for n in range(5))
    for wrong in ([5, 1], [1, 2, 3], -1):
        with pytest.raises(ArgumentError, match="jitter"):
            Pace.make(None, wrong, 1, 0.0)


def test_experts_are_pinned_to_sub_meshes():
    mesh = dist.Mesh(["ep", "tp"], 16, (4, 4))
    second = mesh.sub("ep", 1)
    assert second.axes == ("tp",) and second.devices == (4, 5, 6, 7)
    half = mesh.sub("ep", [2, 3])
    assert half.shape == (2, 4) and half.devices == tuple(range(8, 16))
    assert half.sub("ep", 0).devices == (8, 9, 10, 11)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: dist.Mesh(["tp", "dp"], 6, (4, 2)), r"multiply to 8"),
        (lambda: dist.Mesh(["tp", "tp"], 4), "name of its own"),
        (lambda: dist.Mesh(["tp"], []), "missing"),
        (lambda: dist.Mesh(["tp"], 4).size("pp"), "no axis 'pp'"),
        (lambda: dist.Mesh("tp", 4), "is one word"),
        (lambda: dist.Mesh(["tp"], "cuda"), "are not ranks"),
        (lambda: dist.Mesh(["tp"], [-1, 0]), "are not ranks"),
        (lambda: dist.Mesh(["tp", "dp"], 4, (-2, -2)), "shape"),
        (lambda: dist.Mesh(["tp", "dp"], 4, (2.0, 2.0)), "shape"),
        (lambda: dist.ShardSpec("row", "tp"), "partition='row' is one word"),
        (lambda: dist.ShardSpec(("row", "col"), "tp"), "mesh_axes='tp' is one word"),
        (lambda: dist.tensor((-4, 4), dist.ShardSpec(), dist.Mesh(["tp"], 4)), "shape"),
        (lambda: dist.tensor((4.5,), dist.ShardSpec(), dist.Mesh(["tp"], 4)), "shape"),
        (lambda: dist.tensor(4, dist.ShardSpec(), dist.Mesh(["tp"], 4)), "shape=4"),
        (lambda: dist.ShardSpec(("row",), ("tp", "dp")), "1 dimensions over 2 axes"),
        (lambda: dist.tensor((4, 4), dist.ShardSpec(("depth",), ("tp",)), dist.Mesh(["tp"], 4)), "not a dimension"),
        (lambda: dist.tensor((4,), dist.ShardSpec(("col",), ("tp",)), dist.Mesh(["tp"], 4)), "1 dimensions"),
        (lambda: dist.tensor((4,), dist.ShardSpec(("row",), ("pp",)), dist.Mesh(["tp"], 4)), "no axis 'pp'"),
    ],
)
def test_wrong_meshes_and_shards(make, part):
    with pytest.raises(ArgumentError) as caught:
        make()
    assert part in str(caught.value)


@settings(max_examples=20)
@given(st.sampled_from([(8,), (2, 4), (2, 2, 2), (3, 2)]), st.tuples(st.integers(1, 20), st.integers(1, 20)), st.data())
def test_local_shapes_are_torchs(shape, size, data):
    axes = ["tp", "pp", "dp"][: len(shape)]
    count = 1
    for n in shape:
        count *= n
    cut = data.draw(st.lists(st.sampled_from(axes), unique=True, max_size=len(axes)))
    layout = dist.ShardSpec([data.draw(st.sampled_from(["row", "col", -1])) for _ in cut], cut)
    rank = data.draw(st.integers(0, count - 1))
    mesh = dist.Mesh(axes, count, shape)
    with dist.dry(count, rank=rank):
        w = dist.tensor(size, layout, mesh, fill="empty")
        assert tuple(w.dtensor.to_local().shape) == w.local_shape(rank)


def test_a_dry_run_counts_the_bytes_of_collectives():
    mesh = dist.Mesh(["tp", "dp"], 1024, (8, 128))
    with dist.dry(1024) as counted:
        w = dist.tensor((4096, 8192), dist.ShardSpec(("col",), ("tp",)), mesh, dtype="bfloat16").dtensor
        x = dist.tensor((512, 4096), dist.ShardSpec(), mesh, dtype="bfloat16").dtensor
        y = (x @ w).redistribute(placements=dist.ShardSpec().placements(2, mesh))
        assert y.shape == (512, 8192)
    assert counted.calls == {"all_gather": 1}
    assert counted.bytes["all_gather"] == 512 * 1024 * 2, "this rank's part of y: 512 x 8192 / 8 numbers of 2 bytes"


def test_a_simulated_run_has_the_values_of_all_ranks():
    import torch

    mesh = dist.Mesh(["tp", "dp"], 4, (2, 2))
    torch.manual_seed(0)
    a, b = torch.randn(6, 8), torch.randn(8, 5)
    with dist.simulate(4):
        from torch.distributed.tensor import distribute_tensor

        left = distribute_tensor(a, mesh.device_mesh, dist.ShardSpec(("row", "col"), ("tp", "dp")).placements(2, mesh))
        right = distribute_tensor(b, mesh.device_mesh, dist.ShardSpec(("row",), ("dp",)).placements(2, mesh))
        product = (left @ right).full_tensor().reconcile()
    assert torch.allclose(product, a @ b, atol=1e-5)


@pytest.mark.parametrize("fill", ["rand", "randn"])
def test_copies_of_a_random_part_are_equal_and_other_parts_are_not(fill):
    import torch

    mesh = dist.Mesh(["tp", "dp"], 4, (2, 2))
    with dist.simulate(4):
        w = dist.tensor((4, 6), dist.ShardSpec(("row",), ("tp",)), mesh, fill=fill).dtensor.to_local()
        other = dist.tensor((4, 6), dist.ShardSpec(("row",), ("tp",)), mesh, fill=fill, seed=1).dtensor.to_local()
    parts, others = w._local_tensors, other._local_tensors
    by_place = {mesh.coordinate(rank)["tp"]: part for rank, part in parts.items()}
    assert all(torch.equal(part, by_place[mesh.coordinate(rank)["tp"]]) for rank, part in parts.items())
    assert not torch.equal(by_place[0], by_place[1]) and not torch.equal(parts[0], others[0])


@pytest.mark.parametrize(("devices", "part"), [(range(72), "the job has 4 ranks"), (range(1, 3), "rank 0 is not in")])
def test_a_mesh_of_other_ranks_is_refused(devices, part):
    mesh = dist.Mesh(["tp"], devices)
    with dist.dry(4, rank=0), pytest.raises(ArgumentError, match=part):
        mesh.process_group("tp")
