"""Clusters: the package's files with a source for each figure, files of one's own, and mistakes in them."""

from __future__ import annotations

import pytest

from tessera.dist.cluster import list_clusters, load_cluster
from tessera.errors import ArgumentError


@pytest.mark.parametrize("name", list_clusters())
def test_every_figure_of_a_cluster_has_a_source_and_every_guess_an_error(name: str) -> None:
    cluster = load_cluster(f"{name}:2")
    assert cluster.gpus == 2 * cluster.node_gpus.value
    assert cluster.can_offload
    for key, figure in cluster.list_figures().items():
        assert len(figure.source) > 10, key
        assert figure.assumed == figure.source.startswith("assumed"), key
        assert not figure.assumed or (figure.error or 0) >= 0.29 * figure.value, key


def test_the_clusters_that_people_ask_for_are_there() -> None:
    assert {load_cluster(n).gpus for n in ("gb200-nvl72", "gb300-nvl72")} == {72}
    assert load_cluster("hgx-h100:3").gpus == 24
    assert load_cluster("dgx-a100-40gb").device.id == "a100-40gb-sxm"
    assert list(load_cluster("pcie-h100").device.interconnect) == ["pcie"]  # no bridge joins eight of them


@pytest.mark.parametrize("suffix", ["toml", "json", "yaml"])
def test_a_file_of_ones_own_gives_plain_numbers(tmp_path, suffix: str) -> None:
    texts = {
        "toml": 'chip = "h200"\nnode_gpus = 4\nnetwork_bytes_per_s = 25e9\nnodes = 2\n',
        "json": '{"chip": "h200", "node_gpus": 4, "network_bytes_per_s": 25e9, "nodes": 2}',
        "yaml": "chip: h200\nnode_gpus: 4\nnetwork_bytes_per_s: 25e9\nnodes: 2\n",
    }
    if suffix == "yaml":
        pytest.importorskip("yaml")
    path = tmp_path / f"mine.{suffix}"
    path.write_text(texts[suffix])
    cluster = load_cluster(f"{path}:3")
    assert (cluster.id, cluster.gpus, cluster.domain) == ("mine", 24, 4)
    assert cluster.network_bytes_per_s is not None
    assert cluster.network_bytes_per_s.source == f"given in {path}"
    assert cluster.host_w is None
    assert (cluster.link, cluster.host_link, cluster.can_offload) == ("nvlink", "pcie", False)


def test_a_yaml_file_has_the_limits_of_every_other(tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("chip: h200\nnode_gpus: 8\nnode_gpus: 4\n")
    with pytest.raises(ArgumentError, match="'node_gpus' stands twice"):
        load_cluster(str(path))
    lists = "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(9))
    path.write_text(f"chip: h200\na0: &a0 [1]\n{lists}")
    with pytest.raises(ArgumentError, match="more than"):
        load_cluster(str(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chip = 'h200'\nnode_gpu = 8", "did you mean 'node_gpus'"),
        ("node_gpus = 8", "chip: is missing"),
        ("chip = 'h2000'\nnode_gpus = 8", "no device 'h2000'"),
        ("chip = 'h200'\nnode_gpus = 8\nlink = 'nvlnk'", "did you mean 'nvlink'"),
        ("chip = 'h200'\nnode_gpus = 2.5", "whole number"),
        ("chip = 'h200'\nnode_gpus = 'eight'", "must be a number"),
        ("chip = 'h200'\nnode_gpus = 8\nnodes = 0", "at least 1"),
        ("chip = 3\nnode_gpus = 8", "must be text"),
        ("chip = ", "cannot be read"),
        ("chip = 'jetson-orin'\nnode_gpus = 8", "no link between chips"),
        ("chip = 'h200'\nnode_gpus = 8\nhost_w = -3", "positive number"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path, text: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=words):
        load_cluster(str(path))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dgx-h20", "did you mean"),
        ("dgx-h200:0", "no cluster of 0 nodes"),
        ("nowhere.toml", "cannot read"),
        ("", "no cluster"),
    ],
)
def test_a_name_that_is_not_known_gets_the_nearest(name: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        load_cluster(name)
