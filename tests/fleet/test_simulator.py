"""The simulator: joules and watts between levels, two engines, cohorts, seeds, waiting, limits, faults, policies."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera import analyze
from tessera.cli.analyze import command as analyze_command
from tessera.cli.simulate import command
from tessera.errors import ArgumentError, MissingExtra
from tessera.fleet.breakers import Breaker
from tessera.fleet.facility import Facility, GpuKind, read_facility
from tessera.fleet.faults import Fault
from tessera.fleet.heat import AisleHeat
from tessera.fleet.jobs import FleetJob, copy_job
from tessera.fleet.power_quality import measure_quality
from tessera.fleet.scenario import Scenario, load_scenario, parse_scenario
from tessera.fleet.simulation import AIR_HELD, Simulation
from tessera.fleet.simulator import simulate
from tessera.fleet.supplies import Battery, Feed, NodeSupply
from tessera.fleet.waves import make_square, make_wave, report_to_wave
from tessera.policy import parse_policies
from tessera.report.simulate import describe_above_breaker, describe_trips, simulation_text

from command_line import invoke
from places import REPOSITORY

EXAMPLES = sorted((REPOSITORY / "examples" / "fleet").glob("*.yaml"))
WAVE = make_square(period_s=0.4, duty=0.75, high_w=650, low_w=200)


def make_job(**changes: Any) -> FleetJob:
    return FleetJob(**{"name": "train", "gpus": 32, "waves": (WAVE,), **changes})


def make_scenario(*jobs: FleetJob, policies: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    facility = changes.pop("facility", Facility(rows=2, row_racks=2, rack_nodes=2))
    made = parse_policies(policies) if policies else parse_policies({})
    options = {"facility": facility, "jobs": jobs or (make_job(),), "policies": made, "duration_s": 4.0, **changes}
    return Scenario(**options)


def both_engines(scenario: Scenario, **options: Any) -> tuple[Simulation, Simulation]:
    return simulate(scenario, engine="numpy", **options), simulate(scenario, engine="numba", **options)


# -- conservation -----------------------------------------------------------------------------------------------------


def test_watts_of_levels_add_up() -> None:
    facility = Facility(rows=2, row_racks=2, rack_nodes=2, feed=Feed(ups_efficiency=0.9))
    result = simulate(make_scenario(facility=facility), engine="numpy")
    assert result.row_w @ np.array(result.row_counts) == pytest.approx(result.load_w)
    assert result.feed_w == pytest.approx(result.load_w / 0.9)
    racks = sum(rack.mean_w * rack.count for rack in result.racks)
    assert racks == pytest.approx(float(np.mean(result.load_w)))


def test_joules_of_gpus_are_those_of_their_wave() -> None:
    result = simulate(make_scenario(), engine="numpy")
    job = result.jobs[0]
    assert job.energy_j == pytest.approx(32 * WAVE.mean_w * 4.0, rel=1e-6)
    idle_j = (64 - 32) * 77.0 * 4.0
    assert result.gpu_j == pytest.approx(job.energy_j + idle_j, rel=1e-6)


def test_plug_watts_are_load_plus_the_supplies_losses() -> None:
    ideal = Facility(rows=1, row_racks=1, rack_nodes=1, feed=Feed(ups_efficiency=1.0))
    ideal = dataclasses.replace(ideal, node=dataclasses.replace(ideal.node, supply=NodeSupply(grade="ideal")))
    result = simulate(make_scenario(make_job(gpus=8), facility=ideal), engine="numpy")
    assert result.energy_j == pytest.approx(result.gpu_j + 1450.0 * 4.0, rel=1e-6)


def test_trace_and_report_are_labelled_simulated_and_agree() -> None:
    result = simulate(make_scenario(), engine="numpy")
    report = result.report()
    assert report.basis == "simulated"
    assert report.total_energy_j == pytest.approx(result.energy_j, rel=1e-6)
    assert report.total.error_j > 0
    power = analyze.power(result.power, domain="feed")
    row = power.rows[0]
    assert row["peak_w"] == pytest.approx(result.quality.peak_w, rel=1e-6)
    assert row["energy_j"] == pytest.approx(result.energy_j, rel=1e-6)
    other = simulate(make_scenario(make_job(gpus=16)), engine="numpy").report()
    row = report.diff(other).total
    assert row.after_j < row.before_j


# -- engines, cohorts, seeds ------------------------------------------------------------------------------------------

HARD: dict[str, Any] = {
    "power_shaper": {"jitter": ["5ms", "40ms"], "power_floor": "300W", "max_ramp": "800W/s", "cap_rate": 0.3},
}


@pytest.mark.parametrize("distinct", [False, True])
def test_numba_gives_what_numpy_gives(distinct: bool) -> None:
    pytest.importorskip("numba")
    free = make_job(
        name="serve", gpus=16, waves=(make_square(period_s=0.9, duty=0.3, high_w=690, low_w=120, synchronous=False),)
    )
    facility = Facility(rows=2, row_racks=2, rack_nodes=2, gpu=GpuKind(limit_w=500, smooth_up_w_per_s=4000.0))
    scenario = make_scenario(make_job(replicas=4), free, policies=HARD, facility=facility, faults=(
        Fault(at_s=2.0, kind="breaker_trip", place="row2/rack2"),
    ))  # fmt: skip
    a, b = both_engines(scenario, distinct=distinct)
    assert a.load_w == pytest.approx(b.load_w, rel=1e-5)
    assert a.gpu_j == pytest.approx(b.gpu_j, rel=1e-5)
    assert a.ballast_j == pytest.approx(b.ballast_j, rel=1e-4)
    assert a.ballast_j > 0
    for one, two in zip(a.jobs, b.jobs, strict=True):
        assert one.iterations == pytest.approx(two.iterations, rel=1e-4)


def test_numba_gives_what_numpy_gives_when_things_trip() -> None:
    pytest.importorskip("numba")
    facility = Facility(rows=1, row_racks=2, rack_nodes=2, rack_breaker=Breaker(rating_a=8))
    scenario = make_scenario(facility=facility, duration_s=20.0)
    a, b = both_engines(scenario)
    assert a.trips == b.trips
    assert a.trips
    assert a.load_w == pytest.approx(b.load_w, rel=1e-6)
    assert a.gpu_j == pytest.approx(b.gpu_j, rel=1e-5)


@pytest.mark.parametrize("example", [p for p in EXAMPLES if p.stem != "site"], ids=lambda p: p.stem)
def test_cohorts_give_what_distinct_gpus_give(example: Path) -> None:
    scenario = load_scenario(example)
    scenario = dataclasses.replace(scenario, duration_s=3.0)
    a, b = (simulate(scenario, engine="numpy", distinct=d) for d in (False, True))
    assert b.classes["gpus"] == scenario.facility.gpus
    assert a.classes["gpus"] < b.classes["gpus"]
    assert a.load_w == pytest.approx(b.load_w, rel=1e-6)
    assert a.energy_j == pytest.approx(b.energy_j, rel=1e-6)
    assert max(r.hottest_c for r in a.racks) == pytest.approx(max(r.hottest_c for r in b.racks), abs=0.01)


def test_same_seed_same_result_other_seed_another() -> None:
    scenario = make_scenario(make_job(replicas=4), policies={"power_shaper": {"jitter": ["0ms", "60ms"]}})
    one, two, other = (simulate(scenario, engine="numpy", seed=s) for s in (5, 5, 6))
    assert np.array_equal(one.feed_w, two.feed_w)
    assert not np.array_equal(one.feed_w, other.feed_w)


# -- ranks wait -------------------------------------------------------------------------------------------------------


def test_the_slowest_rank_sets_the_pace() -> None:
    """One replica is late by up to 60 ms in each iteration of 400 ms, and all others wait for it at low power."""
    quiet = simulate(make_scenario(make_job(replicas=4)), engine="numpy")
    late = simulate(
        make_scenario(make_job(replicas=4), policies={"power_shaper": {"jitter": ["59ms", "60ms"]}}), engine="numpy"
    )
    assert quiet.jobs[0].lost_share == pytest.approx(0.0, abs=1e-6)
    assert late.jobs[0].lost_share == pytest.approx(60 / 460, abs=0.01)
    assert late.jobs[0].mean_w < quiet.jobs[0].mean_w


def test_a_period_that_is_no_multiple_of_the_step_loses_nothing() -> None:
    wave = make_square(period_s=0.3337, duty=0.61, high_w=600, low_w=150)
    result = simulate(make_scenario(make_job(waves=(wave,)), duration_s=20.0), engine="numpy")
    assert result.jobs[0].iterations == pytest.approx(20.0 / 0.3337, rel=1e-3)
    assert result.jobs[0].energy_j == pytest.approx(32 * wave.mean_w * 20.0, rel=5e-3)


def test_a_power_limit_slows_compute_and_takes_hold_within_some_steps() -> None:
    wave = make_wave([("compute", 2.0, 650.0), ("communicate", 0.5, 150.0)])
    facility = Facility(rows=1, row_racks=1, rack_nodes=4, gpu=GpuKind(limit_w=400.0))
    result = simulate(make_scenario(make_job(waves=(wave,)), facility=facility, duration_s=10.0), engine="numpy")
    node_w = result.load_w / 4
    assert node_w[:4].max() > node_w[200:380].max() * 1.2  # at first it draws what it wants
    assert result.jobs[0].lost_share > 0.05
    assert result.jobs[0].mean_w / 32 < 405


def test_copies_of_a_job_cancel_when_they_are_shifted() -> None:
    """Four independent jobs with a duty of 3/4: as many are high at every moment."""
    wave = make_square(period_s=2.0, duty=0.75, high_w=650, low_w=200)
    one = FleetJob(name="train", gpus=16, waves=(wave,))
    together = simulate(make_scenario(*copy_job(one, 4), duration_s=8.0), engine="numpy")
    shifted = simulate(make_scenario(*copy_job(one, 4, "auto"), duration_s=8.0), engine="numpy")
    assert shifted.quality.range_w < 0.02 * together.quality.range_w
    assert shifted.energy_j == pytest.approx(together.energy_j, rel=0.01)


# -- faults, trips, heat ----------------------------------------------------------------------------------------------


def test_a_lost_node_stalls_its_job_and_no_other() -> None:
    other = make_job(name="other", gpus=16)
    fault = Fault(at_s=2.0, kind="node_lost", place="row1/rack1/node1")
    result = simulate(make_scenario(make_job(gpus=16), other, faults=(fault,)), engine="numpy")
    states = {job.name: job for job in result.jobs}
    assert states["train"].state == "stalled"
    assert states["train"].iterations == pytest.approx(5, abs=0.8)
    assert states["other"].state == "running"
    assert states["other"].lost_share == pytest.approx(0.0, abs=1e-6)
    assert [e.kind for e in result.events if e.time_s == 2.0] == ["node lost"]
    assert (states["train"].reason, states["other"].reason) == ("row1/rack1/node1 is off", "")
    assert "train: row1/rack1/node1 is off" in simulation_text(result)


def test_what_comes_back_is_an_event_and_a_fault_that_is_not_reached_is_told() -> None:
    lost = [
        Fault(at_s=1.0, kind="cooling_lost", place="row1", for_s=1.0),
        Fault(at_s=1.0, kind="sensor_lost", place="row2/rack1", for_s=2.0),
        Fault(at_s=9.0, kind="node_lost", place="row1/rack1/node1"),
    ]
    result = simulate(make_scenario(faults=tuple(lost)), engine="numpy")
    happened = [(e.time_s, e.kind) for e in result.events if not e.kind.startswith("job")]
    assert happened == [(1.0, "cooling lost"), (1.0, "sensor lost"), (2.0, "cooling back"), (3.0, "sensor back")]
    assert result.late_faults == [lost[2]]
    assert "not reached: node_lost at 9 s" in simulation_text(result)


def test_an_overload_opens_the_breaker_when_its_curve_says() -> None:
    steady = make_wave([("compute", 1.0, 650.0)], synchronous=False)
    facility = Facility(rows=1, row_racks=1, rack_nodes=4, feed=Feed(ups_efficiency=1.0))
    draw_w = float(simulate(make_scenario(make_job(waves=(steady,)), facility=facility), engine="numpy").load_w[-1])
    amperes = draw_w / Breaker(rating_a=1.0).rating_w
    breaker = Breaker(rating_a=amperes / 2.2)
    tight = dataclasses.replace(facility, rack_breaker=breaker)
    result = simulate(make_scenario(make_job(waves=(steady,)), facility=tight, duration_s=20.0), engine="numpy")
    (trip,) = result.trips
    assert trip.kind == "rack breaker tripped" and not result.racks_above_breaker
    short = simulate(make_scenario(make_job(waves=(steady,)), facility=tight, duration_s=2.0), engine="numpy")
    assert not short.trips and describe_above_breaker(short).startswith("1 rack up to 220% of what the breaker is")
    assert trip.time_s == pytest.approx(breaker.trip_s(2.2), rel=0.02)
    assert result.load_w[-1] == 0.0


def test_a_rack_may_have_a_breaker_of_its_own() -> None:
    table = {
        "nodes": 2,
        "breaker": {"rating_a": 80},
        "breakers": {"row1/rack2": {"rating_a": 4}, "row2": {"curve": "D"}},
    }
    facility = read_facility({"rows": {"count": 2, "racks": 3}, "racks": table})
    rated = [facility.find_breaker(rack) for rack in range(6)]
    assert [b.rating_a for b in rated] == [80, 4, 80, 80, 80, 80] and [b.curve for b in rated] == [*"CCCDDD"]
    steady = make_wave([("compute", 1.0, 650.0)], synchronous=False)
    job = make_job(gpus=facility.gpus, waves=(steady,))
    result = simulate(make_scenario(job, facility=facility, duration_s=20.0), engine="numpy")
    assert {trip.place for trip in result.trips} == {"row1/rack2"}
    assert {r.name: r.load > 1 for r in result.racks}["row1/rack2"]
    for wrong, said in (({"row1/rack9": {}}, "no place"), ({"row1/rack1/node1": {}}, "is a node"), ([], "not a table")):
        with pytest.raises(ArgumentError, match=said):
            read_facility({"racks": {"nodes": 2, "breakers": wrong or [1]}})


def test_supplies_latch_off_above_their_limit() -> None:
    facility = Facility(rows=1, row_racks=1, rack_nodes=4)
    small = NodeSupply(count=4, needed=4, rating_w=1400.0)
    facility = dataclasses.replace(facility, node=dataclasses.replace(facility.node, supply=small))
    result = simulate(make_scenario(facility=facility), engine="numpy")
    assert not result.trips  # 19% too much, but for 0.3 s at a time
    lasting = make_wave([("compute", 1.0, 650.0)], synchronous=False)
    result = simulate(make_scenario(make_job(waves=(lasting,)), facility=facility), engine="numpy")
    assert {e.kind for e in result.trips} == {"supply switched off"}
    assert min(e.time_s for e in result.trips) == pytest.approx(small.limit_s, abs=0.02)


def test_lost_cooling_heats_one_row_and_slows_its_gpus() -> None:
    steady = make_wave([("compute", 1.0, 690.0)], synchronous=False)
    air = AisleHeat(heat_capacity_j_per_c=8e3)
    facility = Facility(rows=2, row_racks=1, rack_nodes=2, aisle=air)
    fault = Fault(at_s=2.0, kind="cooling_lost", place="row2")
    job = make_job(waves=(steady,), scatter=False)
    result = simulate(make_scenario(job, facility=facility, faults=(fault,), duration_s=55.0), engine="numpy")
    by_row = {rack.row: rack for rack in result.racks}
    assert by_row["row2"].inlet_c > by_row["row1"].inlet_c + 10
    assert by_row["row2"].hottest_c > 85
    assert result.throttled_s > 0
    assert result.jobs[0].lost_share > 0.01


def test_air_that_the_model_holds_is_told() -> None:
    facility = Facility(rows=2, row_racks=1, rack_nodes=2, aisle=AisleHeat(heat_capacity_j_per_c=500.0))
    fault = Fault(at_s=1.0, kind="cooling_lost", place="row1")
    result = simulate(make_scenario(facility=facility, faults=(fault,)), engine="numpy")
    held = [e for e in result.events if e.kind == AIR_HELD]
    assert [e.place for e in held] == ["row1"] and held[0].time_s > 1.0
    assert "holds the air at 60" in " ".join(str(result).split())
    assert not simulate(make_scenario(facility=facility), engine="numpy").is_air_held


def test_a_breaker_that_a_fault_opens_is_counted() -> None:
    fault = Fault(at_s=2.0, kind="breaker_trip", place="row1/rack2")
    result = simulate(make_scenario(faults=(fault,)), engine="numpy")
    assert describe_trips(result) == "none by overload, 1 by a fault of the file"
    assert describe_trips(simulate(make_scenario(), engine="numpy")) == "none"


@pytest.mark.parametrize("seconds", [13, 19, 33, 34])
def test_the_strongest_frequency_is_the_jobs_also_in_half_a_period_more(seconds: int) -> None:
    at_s = np.arange(0, seconds, 0.005)
    watts = np.where(at_s % 2.0 < 1.5, 650.0, 200.0)
    assert measure_quality(watts, 0.005).dominant_hz == pytest.approx(0.5, abs=0.01)


def test_warm_air_comes_round() -> None:
    airs = [AisleHeat(recirculation=r) for r in (0.0, 0.3)]
    results = [
        simulate(make_scenario(facility=Facility(rows=1, row_racks=2, rack_nodes=2, aisle=air)), engine="numpy")
        for air in airs
    ]
    inlets = [max(r.inlet_c for r in result.racks) for result in results]
    assert inlets[0] == pytest.approx(22.0)
    assert inlets[1] > 23.0


# -- policies ---------------------------------------------------------------------------------------------------------


def test_a_floor_holds_power_up_and_reports_its_joules() -> None:
    plain = simulate(make_scenario(), engine="numpy")
    held = simulate(make_scenario(policies={"power_shaper": {"power_floor": "600W"}}), engine="numpy")
    assert held.quality.range_w < 0.2 * plain.quality.range_w
    assert held.ballast_j == pytest.approx(32 * 400.0 * 0.25 * 4.0, rel=0.01)
    assert held.jobs[0].lost_share == pytest.approx(0.0, abs=1e-6)


def test_a_governor_admits_starts_softly_and_holds_the_rack() -> None:
    facility = Facility(rows=1, row_racks=1, rack_nodes=4)
    policies = {"rack_power_governor": {"rack_cap": "24kW", "soft_start": "15s", "breaker_margin": 0.9}}
    result = simulate(make_scenario(facility=facility, policies=policies, duration_s=40.0), engine="numpy")
    rack_w = result.rack_mean_w[:, 0]
    assert result.jobs[0].state == "running"
    assert rack_w[30] < 0.8 * rack_w[300:].mean()
    assert rack_w[200:].max() < 24e3
    assert result.jobs[0].lost_share > 0.02


def govern_tight(duration_s: float, *jobs: FleetJob) -> Simulation:
    """4 racks of 4 nodes under a cap of 20 kW, where a full rack asks for 28 kW."""
    table = {"rack_cap_kw": 20, "breaker_margin": 0.8, "soft_start": "60s"}
    policies = {"rack_power_governor": table, "utility_spec": {"ramp_kw_per_s": 500}}
    facility = Facility(rows=1, row_racks=4, rack_nodes=4)
    jobs = jobs or (make_job(gpus=128),)
    return simulate(make_scenario(*jobs, facility=facility, policies=policies, duration_s=duration_s), engine="numpy")


def test_a_job_that_a_governor_holds_is_told_with_what_it_got_and_a_fix() -> None:
    result = govern_tight(20.0)
    job = result.jobs[0]
    assert job.state == "held" and job.iterations < 0.1
    assert job.granted_w is not None and job.asked_w is not None
    assert job.granted_w < 0.4 * job.asked_w
    screen = " ".join(simulation_text(result).split())
    assert "train by rack_power_governor" in screen and "soft_start of 60 s" in screen
    assert f"rack_cap of {result.rack_asked_w / 0.8e3:.1f} kW" in screen
    assert "judged without its work" in screen
    assert "Hz: 0 W rms" in screen  # a flat feed has no swing in the band


def test_a_job_that_gets_what_it_asks_for_is_not_held() -> None:
    assert not simulate(make_scenario(), engine="numpy").held_jobs
    policies = {"rack_power_governor": {"rack_cap": "60kW", "soft_start": "0s"}}
    result = simulate(make_scenario(policies=policies, duration_s=160.0), engine="numpy")
    assert result.jobs[0].state == "running"
    # Its grant comes with the second heartbeat, after 2 s.
    assert not result.held_jobs and not result.racks_above_cap


def test_a_soft_start_is_told_apart_from_what_is_held_for_good() -> None:
    wide = {"rack_power_governor": {"rack_cap": "60kW", "soft_start": "4s"}}
    free = simulate(make_scenario(policies=wide, duration_s=10.0), engine="numpy")
    job = free.jobs[0]
    assert job.lost_share is not None and job.lost_share > 0.05  # its start
    assert job.steady_lost_share == pytest.approx(0.0, abs=0.01) and job.is_granted_all
    screen = " ".join(simulation_text(free).split())
    assert "all of it since its soft start was over" in screen and "by rack_power_governor" not in screen
    tight = {"rack_power_governor": {"rack_cap": "12kW", "soft_start": "4s"}}
    held = simulate(make_scenario(policies=tight, duration_s=10.0), engine="numpy").jobs[0]
    assert held.steady_lost_share is not None and held.steady_lost_share > 0.02 and not held.is_granted_all


def test_a_cap_above_a_breaker_is_told() -> None:
    facility = Facility(rows=2, row_racks=2, rack_nodes=2, rack_breaker=Breaker(rating_a=80.0))
    policies = {"rack_power_governor": {"rack_cap": "50kW", "soft_start": "0s"}}
    fine = simulate(make_scenario(policies=policies, facility=facility, duration_s=0.5), engine="numpy")
    assert fine.cap_above_breaker is None
    weak = dataclasses.replace(facility, own_breakers={3: Breaker(rating_a=50.0)})
    result = simulate(make_scenario(policies=policies, facility=weak, duration_s=0.5), engine="numpy")
    assert result.cap_above_breaker == ("row2/rack2", pytest.approx(Breaker(rating_a=50.0).rating_w))
    assert "that the breaker of row2/rack2 carries" in " ".join(simulation_text(result).split())


def test_racks_are_held_from_the_first_step_whenever_their_first_heartbeat_comes() -> None:
    # Racks that differ send their heartbeats at different times within 2 s.
    result = govern_tight(4.0, *(make_job(name=f"job{i}") for i in range(4)))
    assert len(result.racks) == 4
    assert max(rack.peak_w for rack in result.racks) < 16e3
    assert not result.racks_above_cap


STEADY = make_job(waves=(make_square(period_s=0.4, duty=0.75, high_w=650, low_w=649),))


@pytest.mark.parametrize("held", [{"limit_w": 500.0}, {"smooth_up_w_per_s": 200.0}, {}], ids=["limit", "board", "free"])
def test_a_job_that_starts_with_the_simulation_is_no_ramp_and_one_that_starts_later_is(held) -> None:
    facility = Facility(rows=2, row_racks=2, rack_nodes=2, gpu=GpuKind(**held))
    begun = simulate(make_scenario(STEADY, facility=facility), engine="numpy")
    assert begun.quality.ramp_w_per_s < 0.005 * begun.quality.mean_w
    later = simulate(make_scenario(dataclasses.replace(STEADY, start_s=1.0), facility=facility), engine="numpy")
    assert later.quality.ramp_up_w_per_s > 0.1 * later.quality.mean_w


def test_a_cap_of_the_shaper_and_a_lease_hold_together_from_0_s_on() -> None:
    rack = {"rack_cap": "60kW", "soft_start": "6s"}
    both = {"rack_power_governor": rack, "power_shaper": {"cap_rate": 0.5, "psu_limit": "9kW"}}
    leased = simulate(make_scenario(policies={"rack_power_governor": rack}, duration_s=12.0), engine="numpy")
    capped = simulate(make_scenario(policies=both, duration_s=12.0), engine="numpy")
    assert capped.feed_w[:200].max() <= leased.feed_w[:200].max()  # the cap does not undo the soft start
    alone = simulate(make_scenario(policies={"power_shaper": both["power_shaper"]}, duration_s=12.0), engine="numpy")
    late = slice(-400, None)  # the lease is wide by now, and does not undo the cap
    assert capped.feed_w[late].mean() == pytest.approx(alone.feed_w[late].mean(), rel=0.01)
    assert leased.feed_w[late].mean() > 1.1 * capped.feed_w[late].mean()


def test_a_governed_job_is_a_ramp_also_at_0_s() -> None:
    policies = {"rack_power_governor": {"rack_cap": "60kW", "soft_start": "0s"}}
    result = simulate(make_scenario(STEADY, policies=policies), engine="numpy")
    assert result.jobs[0].start_s == 0.0
    assert result.quality.ramp_up_w_per_s > 0.1 * result.quality.mean_w


def test_a_rack_above_its_cap_is_told() -> None:
    result = govern_tight(75.0)
    assert [rack.count for rack in result.racks_above_cap] == [4]
    assert "above rack_cap 4 racks up to" in " ".join(simulation_text(result).split())


def test_a_lost_sensor_changes_nothing_but_what_the_governor_sees() -> None:
    facility = Facility(rows=1, row_racks=2, rack_nodes=2)
    policies = {"rack_power_governor": {"rack_cap": "13kW", "soft_start": "5s"}}
    fault = Fault(at_s=3.0, kind="sensor_lost", place="row1/rack1", for_s=5.0)
    scenario = make_scenario(facility=facility, policies=policies, duration_s=20.0, faults=(fault,))
    result = simulate(scenario, engine="numpy")
    assert result.rack_mean_w[100:].max() < 13e3  # within 100 ms; at first a GPU overshoots its limit
    assert not result.trips


def test_thermal_policy_places_jobs_where_the_cooling_is() -> None:
    facility = Facility(rows=2, row_racks=1, rack_nodes=2)
    policies = {"thermal_policy": {"prefer_cool_nodes": True, "cooling_budget": {"aisle1": "5kW", "aisle2": "90kW"}}}
    result = simulate(make_scenario(make_job(gpus=16), facility=facility, policies=policies), engine="numpy")
    watts = {rack.row: rack.mean_w for rack in result.racks}
    assert watts["row2"] > 2 * watts["row1"]


def test_a_job_that_no_node_may_take_stays_queued() -> None:
    policies = {"thermal_policy": {"prefer_cool_nodes": True, "cooling_budget": {"aisle1": "6kW"}}}
    facility = Facility(rows=1, row_racks=1, rack_nodes=2)
    result = simulate(make_scenario(make_job(gpus=16), facility=facility, policies=policies), engine="numpy")
    (job,) = result.jobs
    assert job.state == "queued"
    assert job.energy_j == 0.0
    assert "no node may take the job" in [e.kind for e in result.events]


def test_without_numba_the_engine_in_numpy_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tessera.fleet.step_numba", None)
    scenario = make_scenario(duration_s=0.5)
    assert simulate(scenario).engine == "numpy"
    with pytest.raises(MissingExtra, match="numba"):
        simulate(scenario, engine="numba")


def test_too_long_a_simulation_is_refused() -> None:
    with pytest.raises(ArgumentError, match="too many values"):
        simulate(
            make_scenario(facility=Facility(rows=300, row_racks=1, rack_nodes=1), duration_s=80000.0), distinct=True
        )


def test_storage_and_utility_spec() -> None:
    spec = {
        "utility_spec": {
            "dynamic_range": "6kW",
            "ramp": "100kW/s",
            "band_hz": [0.1, 20],
            "band_share": "5%",
            "crest_factor": 1.3,
        }
    }
    plain = simulate(make_scenario(policies=spec, duration_s=20.0), engine="numpy")
    assert plain.passed is False
    storage = Battery(power_w=50e3, energy_j=5e5, smoothing_s=4.0)
    facility = Facility(rows=2, row_racks=2, rack_nodes=2, feed=Feed(storage=storage))
    smooth = simulate(
        make_scenario(policies=spec, facility=facility, duration_s=20.0, judge_from_s=10.0), engine="numpy"
    )
    assert smooth.passed, smooth.verdicts
    assert smooth.load_quality.range_w > 5 * smooth.quality.range_w
    screen = " ".join(simulation_text(smooth).split())
    assert "what the rows draw: the feed adds what storage and UPS (5.0%) lose" in screen


# -- files and the command --------------------------------------------------------------------------------------------


SHAPE = {"period": "2s", "duty": 0.5, "high": "600W", "low": "100W"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": {"chip": "h20O"}}, "h20"),
        ({"racks": {"nodez": 4}}, "did you mean 'nodes'"),
        ({"jobs": [{"name": "a", "gpus": 8}]}, "needs one of: shape"),
        ({"jobs": [{"gpus": 8, "shape": {"period": "2x", "duty": 0.5, "high": "1W", "low": "1W"}}]}, "unknown unit"),
        ({"faults": [{"at": "1s", "kind": "node_gone", "place": "row1"}]}, "did you mean 'node_lost'"),
        ({"faults": [{"at": "1s", "kind": "node_lost", "place": "row9/rack1/node1"}]}, "no place 'row9/rack1/node1'"),
        ({"duration": "0s"}, "duration_s=0.0 is not a positive number"),
        ({"duration": 60}, "the file.duration.*has no unit"),
        ({"rows": {"cooling": 160}}, "rows.cooling.*has no unit"),
        ({"rows": {"supply": 22}}, "rows.supply.*has no unit"),
        ({"jobs": [{"gpus": 8, "shape": SHAPE | {"period": 2}}]}, "shape.period.*has no unit"),
        ({"jobs": [{"gpus": 8, "shape": SHAPE | {"high": 650}}]}, "shape.high.*has no unit"),
        ({"jobs": [{"gpus": 8, "copies": 2, "offset": 1, "shape": SHAPE}]}, "offset.*has no unit"),
        ({"faults": [{"at": 1, "kind": "node_lost", "place": "row1/rack1/node1"}]}, "at.*has no unit"),
        ({"jobs": [{"gpus": 8, "shape": SHAPE | {"high": "650kW"}}]}, "650 kW a GPU, and .*h200.* limit of 700 W"),
        ({"jobs": [{"gpus": 8, "shape": SHAPE | {"period": "9ms"}}]}, "period of 9 ms: too short for steps of 5 ms"),
        ({"polices": {}}, "did you mean 'policies'"),
        ({"jobs": [{"gpus": 9999, "shape": {"period": "2s", "duty": 0.5, "high": "2W", "low": "1W"}}]}, "9,999 GPUs"),
    ],
)
def test_mistakes_in_a_file_are_named(change: dict[str, Any], words: str) -> None:
    table = {"gpus": {"chip": "h200"}, "racks": {"nodes": 4}, "rows": {"count": 1, "racks": 2}, **change}
    with pytest.raises(ArgumentError, match=words):
        parse_scenario(table)


def test_a_recording_becomes_a_wave(tmp_path: Path) -> None:
    log = tmp_path / "power.csv"
    lines = [f"{1_700_000_000_000_000 + i * 20_000},gpu0,{650 if i % 50 < 30 else 120}" for i in range(500)]
    log.write_text("epoch_us,domain,watts\n" + "\n".join(lines) + "\n")
    table = {"gpus": {"chip": "h200"}, "rows": {"racks": 1}, "racks": {"nodes": 2}, "duration": "10s"}
    scenario = parse_scenario({**table, "jobs": [{"name": "serve", "gpus": 16, "recording": "power.csv"}]}, tmp_path)
    result = simulate(scenario, engine="numpy")
    assert result.jobs[0].energy_j / 160 == pytest.approx(0.6 * 650 + 0.4 * 120, rel=0.03)


def test_a_planned_job_draws_the_joules_of_its_plan(tmp_path: Path) -> None:
    from tessera.dist.planner import plan
    from tessera.fleet.waves import plan_to_waves

    sizes = {"layers": 16, "hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 8192, "vocab": 32000}
    made = plan(sizes, None, "dgx-h200:2", seq=2048, global_batch=64)
    waves = plan_to_waves(made)
    assert len(waves) == made.best.layout.pp
    gpu_j = sum(j for part, j in made.best.energy_parts.items() if part not in ("host", "idle"))
    each_j = sum(wave.mean_w * wave.period_s for wave in waves) / len(waves)
    assert each_j == pytest.approx(gpu_j / made.best.layout.gpus, rel=0.02)
    assert all(wave.sync_s is not None and 0 < wave.sync_s <= wave.period_s for wave in waves)


def test_a_predicted_iteration_becomes_a_wave() -> None:
    from tessera.schema import Energy, EnergyDescriptor, EnergyReport

    def part(name: str, joules: float, seconds: float) -> EnergyDescriptor:
        return EnergyDescriptor(
            subgraph_name=name, compute_energy_j=joules, memory_energy_j=0.0, static_energy_j=0.0, latency_s=seconds,
            error_j=0.0, device_s=seconds,
        )  # fmt: skip

    total = Energy(energy_j=20.0, error_j=1.0, time_s=0.05, source="predicted", basis="predicted")
    report = EnergyReport(
        name="m", total=total, by_domain={}, descriptors=[part("a", 14.0, 0.02), part("b", 6.0, 0.03)]
    )
    wave = report_to_wave(report)
    assert wave.period_s == pytest.approx(0.05)
    assert wave.mean_w == pytest.approx(400.0)
    assert wave.watts[0] == pytest.approx(700.0)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_examples_load(example: Path) -> None:
    assert load_scenario(example).jobs


def test_command_screen_json_page_and_csv(tmp_path: Path) -> None:
    page, log = tmp_path / "row.html", tmp_path / "a row.csv"
    file = REPOSITORY / "examples" / "fleet" / "row.yaml"
    short = ("--duration", "5s", "--engine", "numpy")
    done = invoke(command, file, *short, "--html", page, "--power", log)
    assert done.code == 0
    assert "utility spec" in done.stdout
    assert "FAIL" in done.stdout
    assert "tessera analyze power '" in done.stdout, "a path with a space, in quotes"
    text = page.read_text()
    assert "<svg" in text
    assert "http:" not in text
    assert log.read_text().splitlines()[1].endswith(",simulated,")
    feed = simulate(file, duration_s=5.0, engine="numpy")
    said = " ".join(done.stdout.split())
    assert f"from {feed.quality.from_s:g} s on" in said and "its start is no ramp" in said
    # The command that the screen names: the feed, and nothing within it again.
    assert re.search(r"ramp up \S+ kW/s, down \S+ kW/s within 1 s; \S+ MW/s over one step of 5 ms", said)
    assert "ramps are over one sample of 5 ms" in " ".join(invoke(analyze_command, "power", log).stdout.split())
    row = json.loads(invoke(analyze_command, "power", log, "--json").stdout)["rows"][0]
    assert row["energy_j"] == pytest.approx(feed.energy_j, rel=0.01)
    done = invoke(command, file, *short, "--json", "--check")
    assert done.code == 1
    found = json.loads(done.stdout)
    assert found["basis"] == "simulated"
    assert found["passed"] is False
    bare = tmp_path / "bare.yaml"
    bare.write_text(re.sub(r"policies:\n.*\n", "", file.read_text()))
    with pytest.raises(ArgumentError, match="no utility_spec"):  # a gate that cannot fail is no gate
        raise invoke(command, bare, *short, "--check").code


@pytest.mark.parametrize("supply_c", [222.0, 60.0, -5.0])
def test_air_that_no_cooling_supplies_is_refused(supply_c: float) -> None:
    with pytest.raises(ArgumentError, match="supplied air") as caught:
        AisleHeat(supply_c=supply_c)
    assert caught.value.fix
