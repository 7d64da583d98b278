"""Times of collectives before they run: never faster than the link, and growing with bytes and ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.dist.cost import KINDS, CollectiveCost, choose_all_reduce, collective_cost, find_link
from tessera.errors import ArgumentError
from tessera.hardware import lookup

CHIPS = st.sampled_from(["a100", "h100", "h200", "b200", "gb200", "l40s", "mi300x", "v100", "h20"])


@given(st.sampled_from(KINDS), st.integers(1, 1 << 34), st.integers(2, 16), CHIPS)
def test_no_collective_is_faster_than_its_link(kind, nbytes, ranks, on):
    cost = collective_cost(kind, nbytes, ranks, on=on)
    _, link = find_link(lookup(on))
    assert cost.time_s > cost.sent_bytes / link.one_way_bytes_per_s
    assert 0 < cost.error_s < cost.time_s
    assert collective_cost(kind, 2 * nbytes, ranks, on=on).time_s > cost.time_s


def test_a_chip_with_the_same_link_takes_the_measured_systems_figures():
    assert collective_cost("all_reduce", 1 << 26, 8, on="h200").source == "NCCL on h100"
    assert collective_cost("all_reduce", 1 << 26, 8, on="mi300x").source.startswith("mean of")


def test_published_timings_are_met():
    """NCCL on 8 H100: 256 MiB, measured 1,379 us; on 8 B200 752 us."""
    assert collective_cost("all_reduce", 268435456, 8, on="h100").time_s == pytest.approx(1379e-6, rel=0.15)
    assert collective_cost("all_reduce", 268435456, 8, on="b200").time_s == pytest.approx(752e-6, rel=0.15)


def test_one_rank_sends_nothing_and_unknown_kinds_are_refused():
    assert collective_cost("all_reduce", 1e9, 1, on="h100").time_s == 0.0
    with pytest.raises(ArgumentError, match="scan"):
        collective_cost("scan", 1e9, 2, on="h100")
    with pytest.raises(ArgumentError, match="no link"):
        collective_cost("all_reduce", 1e9, 2, on="m3-max")


@given(st.sampled_from(KINDS), st.integers(1, 1 << 34), st.integers(1, 8), st.sampled_from([2, 3, 8, 64]), CHIPS)
def test_several_nodes_are_never_faster_than_their_cards_and_slower_cards_never_faster(kind, nbytes, here, nodes, on):
    def cost(card: float, algorithm: str | None = None) -> CollectiveCost:
        how = {"nodes": nodes, "network_bytes_per_s": card, "algorithm": algorithm}
        return collective_cost(kind, nbytes, here * nodes, on=on, **how)

    fast = cost(50e9)
    assert fast.time_s > fast.network_bytes / 50e9
    assert fast.network_bytes > 0
    assert cost(25e9).time_s >= fast.time_s
    assert fast.time_s == min(cost(50e9, a).time_s for a in ("ring", "tree"))


def test_published_timings_between_nodes_are_met():
    """nccl-tests all_reduce: two p5.48xlarge 16 GiB in 66.1 ms, 256 MiB in 1.47 ms; two p4de 2 GiB in 51.4 ms."""

    def seconds(nbytes: int, on: str, card: float) -> float:
        return collective_cost("all_reduce", nbytes, 16, on=on, nodes=2, network_bytes_per_s=card).time_s

    assert seconds(1 << 34, "h100", 50e9) == pytest.approx(66.1e-3, rel=0.25)
    assert seconds(1 << 28, "h100", 50e9) == pytest.approx(1.468e-3, rel=0.25)
    assert seconds(1 << 31, "a100", 6.25e9) == pytest.approx(51.4e-3, rel=0.25)


def test_small_messages_take_the_tree_and_large_ones_the_hierarchy_where_the_network_is_slow():
    far = {"on": "h100", "nodes": 64, "network_bytes_per_s": 12.5e9}
    assert collective_cost("all_reduce", 1 << 10, 512, **far).algorithm == "tree"
    best = choose_all_reduce(1 << 32, 512, **far)
    assert best.time_s <= collective_cost("all_reduce", 1 << 32, 512, **far).time_s
    flat = collective_cost("all_reduce", 1 << 30, 16, on="h100", nodes=2, algorithm="ring")
    levels = collective_cost("all_reduce", 1 << 30, 16, on="h100", nodes=2, algorithm="hierarchical")
    assert levels.network_bytes < 0.6 * flat.network_bytes


def test_a_pcie_box_without_data_sends_through_its_host_or_a_switch():
    """NVIDIA/nccl issue 1639: eight RTX 5090 reach 28 GB/s where the host or a switch lets peers through."""

    def bus_bytes_per_s(ranks: int, path: str | None = None) -> float:
        cost = collective_cost("all_reduce", 2**32, ranks, on="rtx-5090", path=path)
        return cost.sent_bytes / cost.time_s

    assert bus_bytes_per_s(8) < 0.6 * bus_bytes_per_s(4) < 0.2 * 63e9
    assert bus_bytes_per_s(8, "switch") == pytest.approx(28e9, rel=0.15)


def test_words_and_nodes_that_make_no_sense_are_refused():
    with pytest.raises(ArgumentError, match="algorithm='snail' is not known"):
        collective_cost("all_reduce", 1, 8, on="h100", algorithm="snail")
    with pytest.raises(ArgumentError, match="do not fill"):
        collective_cost("all_reduce", 1, 8, on="h100", nodes=9)
