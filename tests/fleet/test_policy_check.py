"""What `tessera policy check` computes: each flag comes and goes with the job's figures, not with words in the file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.cli.policy import command
from tessera.errors import ArgumentError, PolicyError
from tessera.fleet.facility import Facility, NodeKind
from tessera.fleet.jobs import FleetJob
from tessera.fleet.lockstep import LockstepJob, shape_wave
from tessera.fleet.policy_check import PolicyFinding, check_policies
from tessera.fleet.power_quality import Verdict as SpecVerdict
from tessera.fleet.scenario import Scenario, parse_scenario
from tessera.fleet.simulation import Simulation
from tessera.fleet.simulator import simulate
from tessera.fleet.supplies import Feed, NodeSupply
from tessera.fleet.waves import make_square
from tessera.hardware import lookup
from tessera.policy import (
    PhaseShift,
    Policies,
    PowerShaper,
    RackPowerGovernor,
    ThermalPolicy,
    UtilitySpec,
    parse_policies,
)

from command_line import invoke

FREE = LockstepJob(synchronous=False)
SYNC = LockstepJob()


def find(policies: Policies, job: LockstepJob, part: str) -> PolicyFinding:
    return next(f for f in check_policies(policies, job).findings if part in f.setting)


def shaper(**options: object) -> Policies:
    return Policies(power_shaper=PowerShaper(**options))  # type: ignore[arg-type]


def test_jitter_alone_does_not_reduce_a_lockstep_swing_unless_it_is_as_long_as_the_pause() -> None:
    short = find(shaper(jitter_s=(0.0, 0.005)), FREE, "jitter")
    assert short.verdict == "cannot" and "100% of the swing" in short.text
    fast = LockstepJob(period_s=0.02, microbatches=1, synchronous=False)  # starts scatter over more than its pauses
    assert find(shaper(jitter_s=(0.0, 0.01)), fast, "jitter").verdict != "ok"
    assert shape_wave(fast, PowerShaper(jitter_s=(0.0, 0.01))).swing_w < 0.8 * shape_wave(fast, PowerShaper()).swing_w


def test_jitter_beside_a_shift_is_not_flagged_and_its_common_part_is() -> None:
    both = shaper(jitter_s=(0.001, 0.005), phase_shift=PhaseShift(dp_groups="auto"))
    found = [f for f in check_policies(both, FREE).findings if "jitter" in f.setting]
    assert [f.verdict for f in found] == ["costs", "costs"]
    assert found[1].fix is not None and "[0, 4] saves 4 ms" in found[1].fix


def test_jitter_that_costs_more_than_may_be_lost_cannot_work() -> None:
    found = find(shaper(jitter_s=(0.0, 0.2)), SYNC, "jitter")
    assert found.verdict == "cannot" and "may be lost" in found.text


@pytest.mark.parametrize(
    ("replicas", "duty", "verdict"), [(8, 0.75, "ok"), (8, 0.5, "ok"), (8, 0.7, "costs"), (3, 0.5, "costs")]
)
def test_a_shift_cancels_only_when_groups_times_duty_is_whole(replicas: int, duty: float, verdict: str) -> None:
    job = LockstepJob(replicas=replicas, duty=duty, synchronous=False)
    found = find(shaper(phase_shift=PhaseShift(dp_groups="auto")), job, "dp_groups")
    assert found.verdict == verdict
    assert ("not a whole number" in found.text) is (verdict == "costs")


def test_a_synchronous_job_cannot_be_shifted_against_itself() -> None:
    found = find(shaper(phase_shift=PhaseShift(dp_groups="auto")), SYNC, "dp_groups")
    assert found.verdict == "cannot" and "synchronous" in found.text
    assert find(shaper(phase_shift=PhaseShift(dp_groups="auto")), FREE, "dp_groups").verdict == "ok"
    lost = shape_wave(SYNC, PowerShaper(phase_shift=PhaseShift(dp_groups="auto"))).loss
    assert lost == pytest.approx(0.05 / 1.05)


def test_a_floor_costs_its_joules_and_takes_its_part_of_the_swing() -> None:
    found = find(shaper(power_floor_w=425.0), SYNC, "power_floor")
    assert found.verdict == "costs" and "50% of the swing" in found.text
    wave = shape_wave(SYNC, PowerShaper(power_floor_w=425.0))
    assert wave.ballast_w == pytest.approx(0.25 * 225.0, rel=1e-3)
    assert find(shaper(power_floor_w=150.0), SYNC, "power_floor").verdict == "cannot"
    assert find(shaper(power_floor_w=700.0), SYNC, "power_floor").verdict == "cannot"


def test_a_ramp_slower_than_the_period_is_a_floor() -> None:
    slow = find(shaper(max_ramp_w_per_s=100.0), SYNC, "max_ramp")  # 450 W take 4.5 s, a step 2 s
    assert slow.verdict == "cannot" and "never gets down" in slow.text
    assert shape_wave(SYNC, PowerShaper(max_ramp_w_per_s=100.0)).power_w.min() == pytest.approx(600.0, abs=1.0)
    assert find(shaper(max_ramp_w_per_s=5000.0), SYNC, "max_ramp").verdict == "costs"


def test_caps_that_contradict_each_other_or_the_machine() -> None:
    both = Policies(
        power_shaper=PowerShaper(cap_rate=0.85, psu_limit_w=10e3), rack_power_governor=RackPowerGovernor(rack_cap_w=8e3)
    )
    assert find(both, SYNC, "rack_cap and cap_rate").verdict == "cannot"
    below_idle = Policies(power_shaper=PowerShaper(cap_rate=0.5, psu_limit_w=3e3))
    assert find(below_idle, SYNC, "cap_rate").verdict == "cannot"
    floor = shaper(cap_rate=0.5, psu_limit_w=6e3, power_floor_w=400.0)
    assert "contradict" in find(floor, SYNC, "cap_rate").text
    assert find(shaper(cap_rate=0.85), SYNC, "cap_rate").verdict == "unclear"
    slows = find(shaper(cap_rate=0.8, psu_limit_w=6e3), SYNC, "cap_rate")
    assert slows.verdict == "costs" and "steps take +" in slows.text


def simulate_ideal(policies: Policies, *, period_s: float = 2.0, steps: int = 10, host_w: float = 0.0) -> Simulation:
    """The job of the check on nodes without losses."""
    ideal = Facility(rows=1, row_racks=2, rack_nodes=4, feed=Feed(ups_efficiency=1.0))
    ideal = dataclasses.replace(ideal, node=NodeKind(gpus=8, host_w=host_w, supply=NodeSupply(grade="ideal")))
    wave = make_square(period_s=period_s, duty=0.75, high_w=650, low_w=200)
    job = FleetJob(name="a", gpus=64, replicas=8, waves=(wave,))
    return simulate(
        Scenario(facility=ideal, jobs=(job,), policies=policies, duration_s=steps * period_s), engine="numpy"
    )


@pytest.mark.parametrize(("limit_kw", "host_w"), [(5.27, 0.0), (3.0, 0.0), (6.0, 1450.0)])
def test_a_cap_costs_what_it_costs_in_the_simulator(limit_kw: float, host_w: float) -> None:
    policies = shaper(cap_rate=0.85, psu_limit_w=1e3 * limit_kw)
    simulated = simulate_ideal(policies, steps=12, host_w=host_w)
    checked = check_policies(policies, LockstepJob(host_w=host_w))
    assert checked.after.loss == pytest.approx(simulated.jobs[0].lost_share, abs=0.005)
    for name in ("peak_w", "low_w", "mean_w"):
        assert getattr(checked.quality_after, name) == pytest.approx(getattr(simulated.quality, name), rel=0.01), name
    assert f"{checked.after.loss:.1%} of throughput lost" in find(policies, LockstepJob(host_w=host_w), "cap_rate").text
    assert not checked.works  # more is lost than may be


def test_a_cap_below_idle_is_answered() -> None:
    checked = check_policies(shaper(cap_rate=0.5, psu_limit_w=1e3), SYNC)
    assert not checked.works and checked.after.loss > 0.5


def test_start_and_cooling_count_hosts_and_caps() -> None:
    policies = Policies(
        rack_power_governor=RackPowerGovernor(rack_cap_w=20e3, soft_start_s=10.0),
        thermal_policy=ThermalPolicy(cooling_budget_w={"aisle1": 40e3}),
    )
    assert "41.6 kW come at 4.16 kW/s" in find(policies, SYNC, "soft_start").text
    assert find(policies, SYNC, "cooling_budget").verdict == "ok"  # 34.3 kW
    hosts = LockstepJob(host_w=1450.0)
    assert "53.2 kW come at 5.32 kW/s" in find(policies, hosts, "soft_start").text
    assert find(policies, hosts, "cooling_budget").verdict == "cannot"  # 45.9 kW
    capped = dataclasses.replace(policies, power_shaper=PowerShaper(cap_rate=0.8, psu_limit_w=6e3))
    assert "38.4 kW come at 3.84 kW/s" in find(capped, SYNC, "soft_start").text


def test_nodes_that_fit_into_a_rack_are_counted_with_their_hosts_where_those_are_known() -> None:
    policies = parse_policies({"rack_power_governor": {"rack_cap_kw": 20, "breaker_margin": 0.8}})
    assert "3 nodes of 5.2 kW fit" in (bare := find(policies, SYNC, "rack_cap").text) and "GPUs only" in bare
    whole = find(policies, LockstepJob(host_w=1450.0), "rack_cap").text
    assert "2 nodes of 6.65 kW fit into a rack; the job needs 4 racks" in whole
    assert "GPUs only" not in whole


def test_start_heat_and_utility_are_compared_with_the_jobs_figures() -> None:
    big = LockstepJob(gpus=100_000, synchronous=False)
    rack, utility = (
        RackPowerGovernor(rack_cap_w=20e3, soft_start_s=5.0),
        UtilitySpec(ramp_w_per_s=10e6, crest_factor=1.1),
    )
    policies = Policies(rack_power_governor=rack, utility_spec=utility)
    assert find(policies, big, "soft_start").verdict == "cannot"  # 65 MW in 5 s
    assert find(policies, LockstepJob(gpus=64), "soft_start").verdict == "ok"
    assert find(policies, big, "crest_factor").verdict == "cannot"
    shifted = Policies(power_shaper=PowerShaper(phase_shift=PhaseShift(dp_groups="auto")), utility_spec=utility)
    assert find(shifted, big, "crest_factor").verdict == "ok"
    hot = Policies(thermal_policy=ThermalPolicy(redistribute=True, cooling_budget_w={"a": 10e3}))
    assert find(hot, SYNC, "redistribute").verdict == "cannot"
    assert find(hot, SYNC, "cooling_budget").verdict == "cannot"
    assert find(hot, LockstepJob(gpus=8), "cooling_budget").verdict == "ok"


@pytest.mark.parametrize("gpus", [8, 16, 40, 64, 1000])
def test_the_soft_start_that_is_advised_is_long_enough(gpus: int) -> None:
    job, utility = LockstepJob(gpus=gpus), UtilitySpec(ramp_w_per_s=1e4)
    soft_start_s = 0.1
    for _ in range(2):
        rack = RackPowerGovernor(rack_cap_w=20e3, soft_start_s=soft_start_s)
        found = find(Policies(rack_power_governor=rack, utility_spec=utility), job, "soft_start")
        if found.verdict == "cannot":
            assert soft_start_s == 0.1, "its own advice is refused"
            soft_start_s = float(str(found.fix).removeprefix("soft_start: ").partition("s")[0])
    assert found.verdict == "ok"


def test_the_band_of_a_square_wave_is_that_of_its_harmonics() -> None:
    wave = shape_wave(SYNC, PowerShaper())
    first = 2 * (np.sin(np.pi * 0.75) / np.pi) ** 2 / (0.75 * 0.25)  # 0.5 Hz, of the variance of a square wave
    assert wave.measure(64, (0.4, 0.6)).band_of_swing == pytest.approx(first, rel=0.01)


@pytest.mark.parametrize(("period_s", "floor_w"), [(2.0, None), (0.4, None), (3.0, 400.0)])
def test_figures_and_verdicts_are_those_of_a_simulated_feed(period_s: float, floor_w: float | None) -> None:
    spec = {"ramp": "25kW/s", "dynamic_range": "20kW", "band_hz": [0.1, 20], "band_share": 0.3, "crest_factor": 1.1}
    given = {"utility_spec": spec} | ({} if floor_w is None else {"power_shaper": {"power_floor": f"{floor_w:g}W"}})
    policies = parse_policies(given)
    simulated = simulate_ideal(policies, period_s=period_s)
    checked = check_policies(policies, LockstepJob(period_s=period_s))
    for line in simulated.verdicts:
        found = next(f for f in checked.findings if f.setting == line.what.replace(" ", "_"))
        assert (found.verdict == "ok") is line.passed, found
    for name in ("ramp_w_per_s", "range_w", "band_share", "crest_factor", "mean_w"):
        assert getattr(checked.quality_after, name) == pytest.approx(getattr(simulated.quality, name), rel=0.01), name


def test_cooling_takes_the_heat_of_the_shaped_job_and_joules_are_those_of_the_work() -> None:
    policies = Policies(
        power_shaper=PowerShaper(power_floor_w=400.0, phase_shift=PhaseShift(dp_groups="auto")),
        thermal_policy=ThermalPolicy(hotspot_threshold_c=85, redistribute=True, cooling_budget_w={"aisle1": 36e3}),
    )
    assert find(policies, SYNC, "cooling_budget").verdict == "cannot"  # 34.4 kW without the floor, 37.6 kW with it
    wave = check_policies(policies, SYNC).after
    # each step waits 100 ms at the floor: 40 J more than the ballast's 100 J, of 1075 J
    assert wave.step_j / SYNC.step_j - 1 == pytest.approx(140 / 1075, rel=0.01)


def test_the_shortest_step_is_still_measured() -> None:
    ramp = shape_wave(LockstepJob(period_s=0.001), PowerShaper()).measure(1).ramp_w_per_s
    assert ramp == pytest.approx(450.0, rel=0.01)  # the whole swing within one second


@settings(deadline=None, max_examples=25)
@given(st.floats(0.1, 0.9), st.integers(1, 9), st.floats(0.0, 0.3), st.none() | st.floats(0.0, 800.0))
def test_shaping_never_changes_the_work_nor_widens_the_swing(
    duty: float, replicas: int, jitter_s: float, floor_w: float | None
) -> None:
    job = LockstepJob(duty=duty, replicas=replicas, synchronous=False)
    shaped = PowerShaper(jitter_s=(0.0, jitter_s), phase_shift=PhaseShift(dp_groups="auto"), power_floor_w=floor_w)
    before, after = shape_wave(job, PowerShaper()), shape_wave(job, shaped)
    assert after.power_w.mean() - after.ballast_w == pytest.approx(before.power_w.mean(), rel=0.01)
    assert after.swing_w <= before.swing_w + 1e-6
    if (
        floor_w is None or floor_w <= job.high_w
    ):  # the crest factor may rise: edges that are less steep lower the mean square
        assert after.power_w.max() <= before.power_w.max() + 1e-6


def test_impossible_jobs_are_refused() -> None:
    for wrong in ({"duty": 1.0}, {"period_s": 0.0}, {"low_w": 700.0}, {"gpus": 0}):
        with pytest.raises(ArgumentError):
            LockstepJob(**wrong)  # type: ignore[arg-type]


def test_the_command_exits_1_where_something_cannot_work(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("power_shaper: {phase_shift: {dp_groups: auto}}\n")
    said = invoke(command, "check", file)
    assert said.code == 1 and "cannot work" in said.output and "next: tessera" in said.output
    free = invoke(command, "check", file, "--independent", "--json")
    table = json.loads(free.output)
    assert free.code == 0 and table["works"] and table["after"]["peak_w"] < table["before"]["peak_w"]


def test_the_watts_of_a_chip_are_those_of_the_catalogue(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("power_shaper: {phase_shift: {dp_groups: auto}}\n")
    peaks = []
    for typed in (["--chip", "b200"], ["--high", "1kW", "--low", "200W"], ["--chip", "b200", "--high", "800W"]):
        peaks.append(json.loads(invoke(command, "check", file, "--json", *typed).output)["before"]["peak_w"])
    tdp_w = lookup("b200").tdp_w
    assert tdp_w is not None and tdp_w.value == 1000.0
    assert peaks[0] == peaks[1] and peaks[2] == pytest.approx(0.8 * peaks[1]), "what is typed counts"
    assert isinstance(invoke(command, "check", file, "--chip", "nothing").code, ArgumentError)


@pytest.mark.parametrize(
    ("typed", "gpu", "high_w", "low_w"),
    [
        (["--chip", "b200"], {"chip": "b200"}, 1000.0, 137.0),
        (["--high", "800W"], {"limit": "800W", "idle": "77W"}, 800.0, 200.0),
        (["--chip", "h200", "--high", "800W"], {"chip": "h200"}, 800.0, None),
    ],
)
def test_the_gpu_of_the_check_is_the_gpu_of_the_simulator(
    tmp_path: Path, typed: list[str], gpu: dict[str, str], high_w: float, low_w: float | None
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("power_shaper: {cap_rate: 0.85, psu_limit: 12kW}")
    said = json.loads(invoke(command, "check", file, "--json", "--host", "1450W", *typed).output)
    assert said["job"]["high_w"] == high_w and low_w in (None, said["job"]["low_w"])
    shape = {"period": "2s", "duty": "75%", "high": f"{high_w}W", "low": f"{said['job']['low_w']}W"}
    scenario = parse_scenario(
        {
            "gpus": gpu,
            "nodes": {"gpus": 8, "host": "1450W", "supplies": {"grade": "ideal"}},
            "racks": {"nodes": 2},
            "rows": {"count": 1, "racks": 4},
            "feed": {"ups_efficiency": "100%"},
            "policies": {"power_shaper": {"cap_rate": 0.85, "psu_limit": "12kW"}},
            "jobs": [{"name": "train", "gpus": 64, "replicas": 8, "shape": shape}],
            "duration": "24s",
        }
    )
    simulated = simulate(scenario, engine="numpy")
    assert said["job"]["gpu"]["limit_w"] == scenario.facility.gpu.limit_w
    assert said["after"]["throughput_loss"] == pytest.approx(simulated.jobs[0].lost_share, abs=0.005)
    assert said["before"] == said["after"], "10.2 kW is above what any of these nodes draws"
    for name in ("peak_w", "low_w", "mean_w"):
        assert said["after"][name] == pytest.approx(getattr(simulated.quality, name), rel=0.01), name


def test_a_replica_has_a_gpu() -> None:
    with pytest.raises(ArgumentError, match="7 GPUs cannot be 8 replicas") as said:
        LockstepJob(gpus=7, replicas=8)
    assert said.value.fix == "--replicas 7"


def test_what_no_rack_and_no_gpu_can_be_is_flagged() -> None:
    wide = parse_policies({"rack_power_governor": {"rack_cap_kw": 20_000}})
    assert "52 nodes at most" in (said := find(wide, LockstepJob(gpus=8, replicas=8), "rack_cap")).text
    assert said.verdict == "cannot" and "the job needs 1 rack." in said.text
    cold = parse_policies({"thermal_policy": {"hotspot_threshold": "15C", "redistribute": True}})
    assert find(cold, SYNC, "hotspot_threshold").verdict == "cannot"
    warm = parse_policies({"thermal_policy": {"hotspot_threshold": "85C", "redistribute": True}})
    assert find(warm, SYNC, "hotspot_threshold").verdict == "ok"


def test_a_figure_that_fails_by_little_shows_why() -> None:
    near = SpecVerdict(what="crest factor", found=1.3004, limit=1.3, unit="")
    assert near.show() == ("1.3004", "1.3000") and not near.passed
    assert SpecVerdict(what="crest factor", found=1.2996, limit=1.3, unit="").show() == ("1.30", "1.30")
    assert SpecVerdict(what="dynamic range", found=15_000_400.0, limit=15e6, unit="W").show() == ("15.0004 MW", "15 MW")


def test_a_file_without_a_shaper_has_no_row_with_it(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("rack_power_governor: {rack_cap_kw: 20}")
    assert "without the shaper" in (said := invoke(command, "check", file).stdout) and "with it " not in said
    file.write_text("power_shaper: {max_ramp_kw_per_s: 50}")
    assert "with it " in invoke(command, "check", file).stdout


def test_a_suggested_key_is_among_those_that_may_be_used(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("power_shaper: {max_ramp_kw_s: 50}")
    error = invoke(command, "check", file).code
    assert isinstance(error, PolicyError) and "did you mean 'max_ramp_kw_per_s'?" in error.what
    assert error.fix is not None and error.fix.endswith("max_ramp; or with its unit in the key, as max_ramp_kw_per_s")


def test_replicas_that_do_not_divide_the_gpus_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("power_shaper: {cap_rate: 0.9}\n")
    with pytest.raises(ArgumentError, match="7 replicas do not divide 60 GPUs") as caught:
        raise invoke(command, "check", str(path), "--gpus", "60", "--replicas", "7").code
    assert "10" in str(caught.value.fix)
