"""The governor on a real local Ray cluster: a node is killed, then the head. Skipped where Ray is not installed."""

from __future__ import annotations

import pytest

from tessera.errors import MissingExtra
from tessera.fleet.governor import ray_adapter


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingExtra, match="'ray'"):
        ray_adapter.import_ray()


@pytest.mark.slow
def test_a_node_and_the_head_are_killed_and_the_cap_holds(tmp_path):
    pytest.importorskip("ray", exc_type=ImportError)
    from ray_cluster import POLICY, run_scenario

    result = run_scenario(tmp_path)
    assert result["cap_held"]
    assert result["lost_node_w"] > POLICY.limit_w / 8
    assert result["nodes_remembered"] == 4
