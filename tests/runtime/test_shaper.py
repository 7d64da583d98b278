"""The shaper of a running job: where a rank is, what it waits, and the validation by rule 9.4."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tessera
from gloo_ranks import GlooRanks
from tessera.dist import Mesh
from tessera.errors import ArgumentError, MeasurementError, ScheduleError
from tessera.policy import PhaseShift, PowerShaper
from tessera.runtime.shaper import LEARN, JobShaper, find_place, shaper
from tessera.runtime.shaper_validation import PowerCurve, ShapedBlock, ShaperValidation, judge_trial, sum_windows
from tessera.runtime.shaping import LOSS, GroupPlace

AUTO = PhaseShift(dp_groups="auto")


class SimulatedTime:
    """A clock that moves only by waits and by work."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s
        self.waits: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now_s += seconds


def make(policy: PowerShaper, at: SimulatedTime, replica: int = 0, replicas: int = 4, **options: object) -> JobShaper:
    place = GroupPlace(replica=replica, replicas=replicas)
    return JobShaper(policy, place, clock=at.clock, wait=at.wait, **options)  # type: ignore[arg-type]


def run(job: JobShaper, at: SimulatedTime, steps: int, work_s: float = 2.0, microbatches: int = 4) -> list[float]:
    """The times at which the steps' own work begins."""
    begun = []
    for _ in range(steps):
        job.step()
        begun.append(at.now_s)
        for _ in range(microbatches):
            job.microbatch()
            at.now_s += work_s / microbatches
    return begun


def test_ranks_of_a_synchronous_job_wait_at_most_the_allowed_loss_in_every_step() -> None:
    for replica in range(4):
        at = SimulatedTime()
        job = make(PowerShaper(phase_shift=AUTO), at, replica)
        run(job, at, LEARN + 11)
        assert job.offset_s == pytest.approx(LOSS * 2.0 * replica / 3)
        assert job.report().phase_wait_s == pytest.approx(11 * job.offset_s, abs=1e-6)
        assert job.report().waited_share <= LOSS


def test_independent_groups_stay_at_their_phases_of_a_shared_clock() -> None:
    starts = []
    for replica in range(4):
        at = SimulatedTime(1000.0 + 0.01 * replica)
        job = make(PowerShaper(phase_shift=AUTO), at, replica, synchronous=False, period_s=2.02)
        starts.append(run(job, at, 80)[-1] % 2.02)  # 2 s of work: each gains 20 ms a step on the clock
    gaps = np.diff([*sorted(starts), min(starts) + 2.02])
    assert gaps.max() < 2.02 / 4 + 0.05 and gaps.min() > 2.02 / 4 - 0.05


def test_jitter_is_that_of_the_seed_and_of_the_group() -> None:
    def waits(seed: int, tp_group: int) -> list[float]:
        at = SimulatedTime()
        place = GroupPlace(tp_group=tp_group, tp_groups=4)
        run(JobShaper(PowerShaper(jitter_s=(0.001, 0.005)), place, seed=seed, clock=at.clock, wait=at.wait), at, 3)
        return at.waits

    assert waits(1, 2) == waits(1, 2) and len(waits(1, 2)) == 12
    assert waits(1, 2) != waits(1, 3) and waits(1, 2) != waits(2, 2)
    assert all(0.001 <= w <= 0.005 for w in waits(1, 2))


def test_places_come_from_a_mesh_or_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    place, mesh = find_place()
    assert (place.replica, place.replicas, mesh) == (5, 8, None)
    made = Mesh(["dp", "pp", "tp"], 8, (2, 2, 2))
    place, found = find_place(made)
    at = made.coordinate(5)
    assert found is made and (place.replica, place.stage) == (at["dp"], at["pp"])
    assert (place.replicas, place.stages, place.tp_groups) == (2, 2, 4)
    assert place.tp_group == made.group_number("tp", 5)


def test_collectives_are_paced_by_the_policy_only_where_the_mesh_has_groups() -> None:
    policy = PowerShaper(jitter_s=(0.001, 0.005), phase_shift=PhaseShift(dp_groups="auto"))
    job = JobShaper(policy, GroupPlace(), mesh=Mesh(["dp", "tp"], 8, (4, 2)))
    pace = job.collective_pace()
    assert pace["phase"].axis == "dp" and pace["jitter_ms"] == pytest.approx(4.0)
    assert "phase" not in JobShaper(policy, GroupPlace()).collective_pace()
    job.active = False
    assert job.collective_pace() == {}


def test_a_policy_is_a_file_a_table_or_a_policy(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("power_shaper: {jitter_ms: [1, 5], cap_rate: 0.85}\n")
    made = tessera.fleet.shaper(file)
    assert made.policy.jitter_s == (0.001, 0.005)
    assert "psu_limit" in str(made.report())
    assert shaper({"power_shaper": {"power_floor": "300W"}}).policy.power_floor_w == 300.0
    file.write_text("utility_spec: {crest_factor: 1.3}\n")
    with pytest.raises(ScheduleError, match="no power_shaper"):
        shaper(file)
    with pytest.raises(ArgumentError):
        shaper(3)  # type: ignore[arg-type]


def test_each_call_of_a_scheduled_function_is_a_step_of_its_shaper(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "policy.yaml"
    file.write_text("power_shaper: {jitter_ms: [0, 1]}\n")

    @tessera.schedule(shaper=str(file))
    def step() -> None:
        step.schedule.shaper.microbatch()  # type: ignore[attr-defined]

    for _ in range(3):
        step()
    report = step.report()  # type: ignore[attr-defined]
    assert report.calls == 3 and report.shaper.steps == 3 and report.shaper.microbatches == 3
    assert "3 microbatches" in str(report)


def test_a_policys_cap_and_floor_become_those_of_the_schedule() -> None:
    policy = {"power_shaper": {"cap_rate": 0.5, "psu_limit": "2kW", "power_floor": "100W", "max_ramp": "50W/s"}}
    options = tessera.schedule(shaper=policy).options
    assert options.cap is not None and (options.cap.scope, options.cap.power_w) == ("node", 1000.0)
    assert (options.floor_w, options.ramp_w_per_s) == (100.0, 50.0)
    own = tessera.schedule(shaper=policy, power_cap="node:700W", power_floor="90W").options
    assert own.cap is not None and own.cap.power_w == 700.0 and own.floor_w == 90.0


def test_a_floor_of_0_w_in_a_policy_is_none() -> None:
    made = shaper({"power_shaper": {"power_floor": "0W", "jitter_ms": [0, 1]}})
    with made:
        made.step()
    assert tessera.schedule(shaper=made).options.floor_w is None


# -- validation -----------------------------------------------------------------------------------------------------


def block(shaped: bool, peak: float, step_s: float = 1.0, stalls: int = 0) -> ShapedBlock:
    return ShapedBlock(
        shaped=shaped, peak=peak, mean=5.0, crest_factor=peak / 5.0, ramp_per_s=1.0, step_s=step_s, stalls=stalls
    )


def validation(*blocks: ShapedBlock) -> ShaperValidation:
    return ShaperValidation(unit="W", ranks=8, window_s=0.02, blocks=blocks)


def test_the_three_rules_pass_and_fail_each_for_its_own_reason() -> None:
    off = [block(False, 10.0), block(False, 9.0)]
    good = validation(*off, block(True, 6.0, 1.02), block(True, 7.0, 1.02))
    assert good.passed and "PASS" in str(good) and good.loss == pytest.approx(1 - 1 / 1.02)
    spiky = validation(*off, block(True, 9.5))
    assert not spiky.spikes_down and not spiky.passed and "FAIL  spikes" in str(spiky)
    slow = validation(*off, block(True, 6.0, 1.2))
    assert not slow.loss_within and not slow.passed and "FAIL  throughput" in str(slow)
    stalled = validation(*off, block(True, 6.0, 1.0, stalls=2))
    assert stalled.new_stalls == 2 and not stalled.passed


def square(phase: float, end_s: float = 24.0) -> PowerCurve:
    """A curve of one rank: 1 a second for half of each second, from its phase on."""
    times = np.arange(0.0, end_s, 0.005)
    return PowerCurve(times, np.cumsum(((times - phase) % 1.0 < 0.5) * 0.005))


def test_curves_of_ranks_are_summed_by_their_times() -> None:
    together = sum_windows([square(0.0), square(0.0)], 0.0, 10.0)
    apart = sum_windows([square(0.0), square(0.5)], 1.0, 10.0)
    assert together.max() == pytest.approx(2.0, rel=0.05) and apart.max() == pytest.approx(1.0, rel=0.3)
    assert apart.mean() == pytest.approx(together.mean(), rel=0.05)


def test_blocks_of_a_trial_are_judged_without_their_first_step() -> None:
    def starts() -> list[list[float]]:
        return [[2.0 + b * 5.0 + k for k in range(6)] for b in range(4)]

    measured = [("CPUs", square(0.0), starts()), ("CPUs", square(0.0), starts())]
    found = judge_trial(measured)
    assert [b.shaped for b in found.blocks] == [False, True, False, True]
    assert found.ranks == 2 and found.loss == pytest.approx(0.0) and not found.passed
    assert all(math.isclose(b.step_s, 1.0) for b in found.blocks)


def test_blocks_that_are_too_short_say_so() -> None:
    starts = [[2.0 + b * 0.01 + k * 0.001 for k in range(6)] for b in range(2)]
    with pytest.raises(MeasurementError, match="too short") as caught:
        judge_trial([("CPUs", square(0.0), starts)])
    assert "steps=100" in str(caught.value)


def test_validate_runs_blocks_with_and_without_and_prints_pass_or_fail(capsys: pytest.CaptureFixture[str]) -> None:
    job = JobShaper(PowerShaper(jitter_s=(0.0, 0.002)), GroupPlace())
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        job.microbatch()
        time.sleep(0.01)

    found = job.validate(step, steps=6, pairs=2)
    assert count == LEARN + 2 + 4 * 6 and len(found.blocks) == 4 and found.unit == "CPUs"
    assert "rule 9.4" in capsys.readouterr().out
    assert job.report().validation is found
    with pytest.raises(ArgumentError):
        job.validate(step, steps=1)


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with GlooRanks(2) as made:
        yield made


def shift_two(rank: int) -> tuple[float, float, int]:
    job = shaper(PowerShaper(phase_shift=PhaseShift(dp_groups="round_robin")), synchronous=False)

    def step() -> None:
        job.microbatch()
        time.sleep(0.02)

    # On a busy machine one rank begins a block late: it must last until the other has some windows with it.
    found = job.validate(step, steps=60, pairs=1, show=False)
    return job.offset_s, job.report().period_s or 0.0, found.ranks


def place_on_device_mesh(rank: int) -> tuple[int, int, int]:
    from torch.distributed.device_mesh import init_device_mesh

    made = shaper(PowerShaper(), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    return made.place.replica, made.place.replicas, made.place.stages


def test_a_rank_finds_its_place_on_torchs_own_mesh(ranks: GlooRanks) -> None:
    assert ranks.run(place_on_device_mesh) == [(0, 2, 1), (1, 2, 1)]


def test_ranks_agree_on_the_period_and_measure_together(ranks: GlooRanks) -> None:
    (first, period, count), (second, same, _) = ranks.run(shift_two)
    assert first == 0.0 and second == pytest.approx(period / 2) and period == same and count == 2
