"""Placement: cool nodes first, aisles within their cooling budget, no new hot spots, packing, relief of hot spots."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from tessera.cli.fleet import command
from tessera.errors import ArgumentError
from tessera.fleet import node_metrics
from tessera.fleet.node_floor import MARGIN_C, NodeShare, PlacementJob, PlacementNode
from tessera.fleet.packing import compare_packing, cooling_cop
from tessera.fleet.placement import place_jobs
from tessera.fleet.relief import plan_moves, settle_moves
from tessera.policy import ThermalPolicy
from tessera.report.fleet_place import describe_choice, describe_refusal

from command_line import invoke

COOL = ThermalPolicy(hotspot_threshold_c=85.0, prefer_cool_nodes=True, redistribute=True, migration_on_overheat=True)


def node(name: str, temperature_c: float | None, **more: object) -> PlacementNode:
    values = {"gpus": 8, "idle_w": 1000.0, "aisle": "a"} | more
    return PlacementNode(name=name, temperature_c=temperature_c, **values)  # type: ignore[arg-type]


def job(name: str, gpus: int = 8, power_w: float = 4000.0, **more: object) -> PlacementJob:
    return PlacementJob(name=name, gpus=gpus, power_w=power_w, **more)  # type: ignore[arg-type]


def running(name: str, on: str, gpus: int = 8, power_w: float = 4000.0, **more: object) -> PlacementJob:
    return job(name, gpus, power_w, on=(NodeShare(node=on, gpus=gpus),), **more)


def where(placement: object) -> dict[str, list[str]]:
    return {p.job: [s.node for s in p.on] for p in placement.placed}  # type: ignore[attr-defined]


def test_the_coolest_node_is_taken_first_and_an_unknown_one_last() -> None:
    nodes = [node("hot", 80.0), node("unknown", None), node("cool", 40.0), node("warm", 60.0)]
    found = place_jobs(nodes, [job("a"), job("b"), job("c"), job("d")], COOL)
    assert [n for p in found.placed for n in where(found)[p.job]] == ["cool", "warm", "hot", "unknown"]
    assert [p.rule for p in found.placed] == ["coolest", "coolest", "coolest", "unknown"]
    assert "not known" in describe_choice(found.placed[-1])


def test_no_job_makes_a_new_hot_spot() -> None:
    # 4 kW at 0.005 K/W are 20 K: the node at 70 °C would reach 90 °C.
    nodes = [node("n", 70.0, c_per_w=0.005)]
    found = place_jobs(nodes, [job("a")], COOL)
    assert not found.placed
    (refusal,) = found.waiting[0].refused
    assert (refusal.kind, refusal.node, refusal.value, refusal.limit) == ("hot_spot", "n", pytest.approx(90.0), 85.0)


def test_a_job_larger_than_the_fleet_is_told_so() -> None:
    nodes = [node("a", 40.0), node("b", 40.0)]
    (large,) = place_jobs(nodes, [job("large", 64)], COOL).waiting
    assert [describe_refusal(r) for r in large.refused] == ["the fleet has too few GPUs (16, needs 64)"]
    (waits,) = place_jobs(nodes, [running("old", "a", 4), job("wide", 16)], COOL).waiting
    assert [describe_refusal(r) for r in waits.refused] == ["the fleet has too few free GPUs (12, needs 16)"]


def test_an_aisle_stays_within_its_cooling_budget() -> None:
    policy = dataclasses.replace(COOL, cooling_budget_w={"a": 11_000.0})
    nodes = [node("a1", 30.0), node("a2", 31.0), node("b1", 60.0, aisle="b")]
    found = place_jobs(nodes, [job("one"), job("two"), job("three")], policy)
    # Aisle a has 2 kW of idle nodes: two jobs of 4 kW fit under 11 kW, the third goes to the warmer aisle.
    assert where(found) == {"one": ["a1"], "three": ["a2"], "two": ["b1"]}
    assert {a.aisle: a.heat_w for a in found.aisles} == {"a": 10_000.0, "b": 5000.0}
    refused = {p.job: {r.kind for r in p.refused} for p in found.placed}
    assert refused["two"] == {"no_free_gpus"}  # both are full before the budget is asked


def test_a_node_that_sleeps_is_woken_and_its_idle_watts_count() -> None:
    policy = dataclasses.replace(COOL, cooling_budget_w={"a": 5500.0})
    nodes = [node("n", 30.0, asleep_w=100.0), node("m", 35.0, asleep_w=100.0)]
    found = place_jobs(nodes, [job("one", power_w=4000.0), job("two", power_w=500.0)], policy)
    assert where(found) == {"one": ["n"]}
    (refusal,) = [r for r in found.waiting[0].refused if r.kind == "aisle_budget"]
    assert refusal.value == pytest.approx(5000.0 + 1000.0 + 500.0)


def test_a_job_of_several_nodes_takes_whole_ones_or_waits() -> None:
    nodes = [node("a", 30.0), node("b", 40.0), node("c", 50.0)]
    busy = running("small", "a", gpus=2, power_w=500.0)
    found = place_jobs(nodes, [busy, job("big", gpus=16, power_w=8000.0)], COOL)
    assert where(found) == {"big": ["b", "c"]}
    waits = place_jobs(nodes, [busy, job("huge", gpus=24, power_w=8000.0)], COOL)
    assert [w.job for w in waits.waiting] == ["huge"]
    assert [n.free_gpus for n in waits.nodes] == [6, 8, 8]  # nothing is half placed


def test_priority_decides_who_gets_the_last_node() -> None:
    found = place_jobs([node("n", 30.0)], [job("large", power_w=6000.0), job("urgent", power_w=1.0, priority=1)], COOL)
    assert where(found) == {"urgent": ["n"]}


def test_packing_puts_moderate_jobs_together_and_leaves_hot_jobs_to_cool_nodes() -> None:
    nodes = [node(f"n{i}", 40.0 + i, max_w=9000.0) for i in range(4)]
    jobs = [job(f"small{i}", gpus=2, power_w=600.0) for i in range(4)] + [job("hot", gpus=8, power_w=7000.0)]
    packed = place_jobs(nodes, jobs, COOL, order="pack")
    assert where(packed) == {"hot": ["n0"], **{f"small{i}": ["n1"] for i in range(4)}}
    assert {p.rule for p in packed.placed} == {"coolest", "fullest"}
    spread = place_jobs(nodes, jobs, COOL, order="spread")
    assert len({n for on in where(spread).values() for n in on}) == 4


def test_the_order_of_the_input_decides_nothing_but_ties() -> None:
    rng = random.Random(7)
    nodes = [node(f"n{i:02d}", rng.uniform(30.0, 80.0), c_per_w=0.002) for i in range(20)]
    jobs = [job(f"j{i:02d}", gpus=rng.choice([1, 2, 8]), power_w=rng.uniform(200.0, 6000.0)) for i in range(30)]
    first = place_jobs(nodes, jobs, COOL)
    for _ in range(3):
        rng.shuffle(jobs)
        assert place_jobs(nodes, jobs, COOL) == first


@pytest.mark.parametrize("order", ["cool", "pack", "spread"])
def test_limits_hold_whatever_is_asked(order: str) -> None:
    rng = random.Random(order)
    policy = dataclasses.replace(COOL, cooling_budget_w={"a": 30_000.0, "b": 20_000.0})
    for _ in range(20):
        nodes = [
            node(f"n{i}", rng.uniform(30, 84), aisle=rng.choice("ab"), c_per_w=rng.choice([None, 0.004]), max_w=7000.0)
            for i in range(12)
        ]
        jobs = [job(f"j{i}", rng.choice([1, 4, 8, 20]), rng.uniform(100, 9000)) for i in range(20)]
        found = place_jobs(nodes, jobs, policy, order=order)  # type: ignore[arg-type]
        assert {p.job for p in found.placed} | {w.job for w in found.waiting} == {j.name for j in jobs}
        assert all(n.free_gpus >= 0 and n.power_w <= 7000.0 for n in found.nodes)
        assert all(n.expected_c is not None and n.expected_c <= 85.0 for n in found.nodes)
        for aisle in found.aisles:
            before_w = sum(n.idle_w for n in nodes if n.aisle == aisle.aisle)
            assert aisle.heat_w <= max(policy.cooling_budget_w[aisle.aisle], before_w)


def test_no_rack_gets_above_what_its_feed_carries() -> None:
    nodes = [node("n1", 30.0, rack="r1"), node("n2", 40.0, rack="r1"), node("n3", 60.0, rack="r2")]
    found = place_jobs(nodes, [job("a"), job("b"), job("c")], COOL, rack_limits_w={"r1": 6500.0, "r2": 4000.0})
    assert where(found) == {"a": ["n1"]}  # r1: 2 kW idle and 4 kW of `a`
    refused = {r.node: (r.value, r.limit) for r in found.waiting[0].refused if r.kind == "rack_limit"}
    assert refused == {"n2": (10_000.0, 6500.0)}
    assert {r.rack: (r.power_w, r.over_w) for r in found.racks} == {"r1": (6000.0, 0.0), "r2": (1000.0, 0.0)}


def test_a_rack_above_its_limit_already_is_told_and_gets_nothing() -> None:
    nodes = [node("n1", 30.0, rack="r1", power_w=3000.0)]
    found = place_jobs(nodes, [job("a", power_w=1.0)], COOL, rack_limits_w={"r1": 2500.0})
    assert not found.placed
    assert found.racks[0].over_w == 500.0


def test_a_move_keeps_the_limit_of_the_rack_and_may_stay_within_it() -> None:
    nodes = [node("hot", 90.0, rack="r1"), node("cool", 40.0, rack="r1"), node("other", 30.0, rack="r2")]
    jobs = [running("a", "hot", can_migrate=True)]
    plan = plan_moves(nodes, jobs, COOL, rack_limits_w={"r1": 6000.0, "r2": 4999.0})
    assert [(m.job, m.takes[0].node) for m in plan.moves] == [("a", "cool")]
    stays = plan_moves(nodes, jobs, COOL, rack_limits_w={"r1": 5999.0, "r2": 4999.0})
    assert not stays.moves
    assert stays.hot_spots[0].unmoved == "no cool node has room"


# -- relief ------------------------------------------------------------------------------------------------------------


def test_the_smallest_job_that_cools_a_hot_node_enough_moves_to_the_coolest_with_room() -> None:
    nodes = [node("hot", 90.0, c_per_w=0.005), node("warm", 79.0, c_per_w=0.005), node("cool", 50.0, c_per_w=0.005)]
    jobs = [
        running("small", "hot", 2, 500.0, can_migrate=True),
        running("middle", "hot", 3, 2000.0, can_migrate=True),
        running("large", "hot", 3, 3000.0, can_migrate=True),
    ]
    plan = plan_moves(nodes, jobs, COOL)
    # From 90 °C to 82 °C (3 K below the threshold) are 1.6 kW.
    (move,) = plan.moves
    assert (move.job, move.leaves, move.takes) == ("middle", "hot", (NodeShare(node="cool", gpus=3),))
    assert move.expected_c == pytest.approx(60.0)
    (spot,) = plan.hot_spots
    assert (spot.node, spot.over_c, spot.shed_w, spot.unmoved) == ("hot", pytest.approx(5.0), 0.0, "")


def test_a_hot_node_whose_jobs_cannot_move_says_how_many_watts_to_shed() -> None:
    nodes = [node("hot", 90.0, c_per_w=0.005), node("cool", 50.0)]
    (spot,) = plan_moves(nodes, [running("a", "hot")], COOL).hot_spots
    assert (spot.unmoved, spot.shed_w) == ("no job can migrate", pytest.approx((90.0 - 85.0 + MARGIN_C) / 0.005))
    still = dataclasses.replace(COOL, migration_on_overheat=False)
    assert plan_moves(nodes, [running("a", "hot", can_migrate=True)], still).hot_spots[0].unmoved == "migration is off"


def test_nothing_moves_to_a_node_that_would_become_hot_itself() -> None:
    nodes = [node("hot", 90.0, c_per_w=0.005), node("other", 70.0, c_per_w=0.005)]
    plan = plan_moves(nodes, [running("a", "hot", can_migrate=True)], COOL)
    assert (plan.moves, plan.hot_spots[0].unmoved) == ((), "no cool node has room")


def test_an_aisle_above_its_budget_is_relieved_by_another_aisle() -> None:
    policy = dataclasses.replace(COOL, cooling_budget_w={"a": 8000.0})
    nodes = [node("a1", 60.0), node("a2", 50.0), node("b1", 70.0, aisle="b")]
    jobs = [running("one", "a1", can_migrate=True), running("two", "a2", can_migrate=True)]
    plan = plan_moves(nodes, jobs, policy)
    assert [(m.job, m.leaves, m.takes[0].node) for m in plan.moves] == [("one", "a1", "b1")]
    assert len(plan.hot_spots) == 1  # with the first move the aisle is within its budget


def test_after_the_moves_nothing_is_left_to_move() -> None:
    nodes = [node("hot", 95.0, c_per_w=0.002), *(node(f"n{i}", 50.0, c_per_w=0.002) for i in range(3))]
    jobs = [running(f"j{i}", "hot", 2, 2000.0, can_migrate=True) for i in range(4)]
    plan = plan_moves(nodes, jobs, COOL)
    settled, moved = settle_moves(nodes, jobs, plan)
    assert settled[0].temperature_c == pytest.approx(95.0 - 0.002 * sum(m.power_w for m in plan.moves))
    assert plan.moves and plan_moves(settled, moved, COOL).hot_spots == ()
    assert sum(s.node == "hot" for j in moved for s in j.on) == 4 - len(plan.moves)


# -- packing -----------------------------------------------------------------------------------------------------------


def test_packing_saves_the_idle_watts_of_the_nodes_that_sleep_and_their_cooling() -> None:
    nodes = [node(f"n{i}", 40.0, asleep_w=100.0, max_w=9000.0) for i in range(4)]
    jobs = [job(f"j{i}", 2, 600.0, duration_s=100.0) for i in range(4)]
    saved = compare_packing(nodes, jobs, supply_c=20.0)
    # Spread: 4 nodes awake. Packed: one, three asleep.
    assert saved.spread.it_j == pytest.approx(100.0 * (4 * 1000.0 + 2400.0))
    assert saved.packed.it_j == pytest.approx(100.0 * (1000.0 + 3 * 100.0 + 2400.0))
    assert saved.saved_cooling_j == pytest.approx(100.0 * 2700.0 / cooling_cop(20.0))
    assert (saved.packed.nodes_used, saved.spread.nodes_used) == (1, 4)


def test_packing_saves_nothing_where_nodes_cannot_sleep_and_costs_where_fans_or_sharing_do() -> None:
    nodes = [node(f"n{i}", 40.0, max_w=9000.0) for i in range(4)]
    jobs = [job(f"j{i}", 2, 600.0, duration_s=100.0) for i in range(4)]
    assert compare_packing(nodes, jobs).saved_j == pytest.approx(0.0)
    blown = [dataclasses.replace(n, fan_max_w=1500.0) for n in nodes]
    assert compare_packing(blown, jobs).saved_j < 0
    assert compare_packing(nodes, jobs, sharing_slowdown=0.1).saved_j < 0


def test_cooling_is_cheaper_with_warmer_air() -> None:
    assert cooling_cop(15.0) == pytest.approx(2.0, abs=0.01)  # the paper's own example: a COP of 2 at 15 °C
    assert cooling_cop(25.0) > cooling_cop(20.0)


def test_wrong_input_is_refused_with_a_fix() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'n1'"):
        place_jobs([node("n1", 30.0)], [running("a", "n11")], COOL)
    with pytest.raises(ArgumentError, match="has no duration"):
        compare_packing([node("n1", 30.0)], [job("a")])
    with pytest.raises(ArgumentError, match="jobs use 16 GPUs"):
        place_jobs([node("n1", 30.0)], [running("a", "n1"), running("b", "n1")], COOL)
    with pytest.raises(ArgumentError, match="same name, 'n1'"):
        place_jobs([node("n1", 30.0), node("n1", 30.0)], [], COOL)


@pytest.mark.parametrize(
    ("figures", "part"),
    [({"max_w": 900.0}, "draws 1 kW when idle, and 900 W at most"), ({"c_per_w": -3.0}, "c_per_w=-3.0")],
)
def test_a_node_with_impossible_figures_is_refused(figures: dict[str, float], part: str) -> None:
    with pytest.raises(ArgumentError, match=part):
        node("n1", 30.0, **figures)


def test_a_node_that_does_not_answer_counts_with_its_maximum(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "defaults: {gpus: 8, idle: 2kW, max: 7kW, asleep: 100W}\n"
        "racks: {r1: 13kW}\n"
        "nodes:\n"
        "  - {name: n1, rack: r1, temperature: 40C}\n"
        '  - {name: n2, rack: r1, temperature: 50C, metrics: "http://127.0.0.1:9/metrics"}\n'
        "jobs: [{name: train, gpus: 8, power: 4.5kW}]\n"
    )
    said = invoke(command, "place", file, "--json")
    placed = json.loads(said.output)
    assert said.code == 1  # 7 kW of the silent node and 6.5 kW of n1 are more than the feed carries
    assert placed["waiting"][0]["job"] == "train"
    assert "n2: no answer" in placed["notes"][0] and "counts with its maximum of 7 kW" in placed["notes"][0]


def test_the_next_command_of_place_keeps_the_policy_and_quotes_the_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    file, policy = tmp_path / "a fleet.yaml", tmp_path / "policy.yaml"
    file.write_text("nodes: [{name: n1, gpus: 8, idle: 2kW, temperature: 40C}]\n")
    policy.write_text("thermal_policy: {hotspot_threshold: 85C}\n")
    said = invoke(command, "place", file, "--policy", policy).stdout
    assert f"next  tessera fleet place '{file}' --policy {policy} --order pack --compare" in said


def test_a_node_whose_sensors_see_less_than_its_idle_watts_counts_with_those(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"cpu-only": 8.0, "whole": 2500.0}
    monkeypatch.setattr(node_metrics, "ask_endpoint", lambda url: node_metrics.NodeReading(power_w=seen[url]))
    nodes, notes = node_metrics.fill_nodes([node("n1", 30.0), node("n2", 30.0)], {"n1": "cpu-only", "n2": "whole"})
    assert [n.power_w for n in nodes] == [1000.0, 2500.0]
    assert notes == ["n1: its sensors see 8 W of it; it counts with its idle 1 kW"]
