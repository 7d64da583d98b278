"""The bucket, its controller and its zone, against a plant with an H200's duty curve on a virtual clock."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.clock import Clock
from tessera.monitor.sampler import Sampler
from tessera.runtime import power_zone
from tessera.runtime.cap_report import FIRST_S, MeanPower, PowerMeter
from tessera.runtime.controller import (
    AGAIN_S,
    MIN_DUTY,
    SHARED_S,
    STUCK_DUTY,
    STUCK_GPU_DUTY,
    TARGET,
    Bucket,
    Cap,
    Controller,
    PaceCommand,
)
from tessera.runtime.pacer import HostPacer
from tessera.runtime.power_zone import PowerZone, guess_power
from tessera.schema import Domain, Hold
from tessera.sensors.base import Batch

from fakes.plant import (
    BURST_W,
    GEMM_S,
    IDLE_W,
    Bench,
    Op,
    Plant,
    counter_window_w,
    gemms,
    mean_w,
    phases,
    training,
    worst_window_w,
)
from fakes.programs import (
    Shared,
    bursty,
    compiled_bert,
    gpt2_training,
    graphs,
    host_bound,
    saturated,
    synchronising,
    wandering,
)


def bench(ops, cap_w, *, seconds=4.0, every=8, seed=0, window_s=0.2, **plant):
    made = Bench(Plant(ops, every=every, rng=random.Random(seed), **plant), Cap(cap_w, window_s))
    made.run(seconds)
    return made


# -- the bucket itself ------------------------------------------------------------------------------------------


def test_waiting_by_the_bucket_is_the_controllers_ratio():
    """The formula at the top of controller.py: after work of b the bucket is full after b x ratio."""
    controller = Controller(Cap(400.0, 0.2), idle_w=IDLE_W, burst_w=BURST_W)
    bucket = Bucket(controller.target_w, depth_j=0.0)
    busy_s = 0.003
    bucket.pass_time(busy_s, BURST_W * busy_s)
    wait_s = busy_s * controller.command.ratio
    bucket.pass_time(wait_s, IDLE_W * wait_s)
    assert bucket.level_j == pytest.approx(0.0, abs=1e-9)


def test_an_op_larger_than_the_bucket_runs_and_then_pays():
    bucket = Bucket(300.0, depth_j=1.0)
    bucket.pass_time(0.5, 500.0)  # it ran: 500 J out of a bucket of 1 J
    assert bucket.level_j == pytest.approx(-350.0)
    bucket.pass_time(350.0 / 300.0)
    assert bucket.level_j == pytest.approx(0.0, abs=1e-9)


@given(st.lists(st.tuples(st.floats(-1.0, 10.0), st.floats(0.0, 1e4)), max_size=50))
def test_the_level_stays_within_its_bounds_whatever_the_clock_does(passes):
    bucket = Bucket(300.0, depth_j=5.0, debt_j=50.0)
    for seconds, joules in passes:
        before = bucket.level_j
        after = bucket.pass_time(seconds, joules)
        assert -50.0 <= after <= 5.0
        if seconds <= 0:
            assert after <= before  # a clock that steps back refills nothing


# -- the controller ---------------------------------------------------------------------------------------------


@given(
    cap=st.floats(150.0, 900.0),
    knee=st.floats(0.2, 1.0),
    slope=st.floats(100.0, 1200.0),
    start=st.floats(0.05, 1.0),
)
def test_the_secant_comes_nearer_from_one_side_on_any_concave_curve(cap, knee, slope, start):
    """Clocks that rise to fill pauses make a curve that is concave: no step may pass the cap's own duty."""
    idle = 100.0

    def power(duty):
        return idle + slope * min(duty, knee) + 0.1 * slope * max(duty - knee, 0.0)

    wanted = min(max((cap - idle) / slope, 0.0), 1.0) if cap <= power(knee) else 1.0
    if cap > power(knee):
        wanted = min(knee + (cap - power(knee)) / (0.1 * slope), 1.0)
    duty = start
    for _ in range(60):
        burst = idle + (power(duty) - idle) / duty
        after = min(max((cap - idle) / max(burst - idle, 1e-9), 1e-6), 1.0)
        assert min(duty, wanted) - 1e-9 <= after <= max(duty, wanted) + 1e-9
        duty = after
    assert power(duty) == pytest.approx(min(cap, power(1.0)), rel=0.02)


def test_nothing_waits_while_the_load_is_below_the_cap():
    controller = Controller(Cap(800.0, 0.2), idle_w=100.0, burst_w=500.0)
    for _ in range(50):
        command = controller.observe(500.0, 0.02, duty=1.0)
    assert command.ratio == 0.0


def test_readings_that_make_no_sense_change_nothing():
    controller = Controller(Cap(400.0, 0.2), idle_w=100.0, burst_w=900.0)
    before = controller.command
    for power_w, seconds in ((math.nan, 0.02), (400.0, 0.0), (400.0, -1.0), (math.inf, 0.02)):
        assert controller.observe(power_w, seconds, duty=0.5) == before


def test_idling_for_a_minute_does_not_allow_a_minutes_burst():
    controller = Controller(Cap(400.0, 0.2), idle_w=100.0, burst_w=900.0)
    for _ in range(3000):
        controller.observe(100.0, 0.02, duty=1.0, active=False)
    assert controller.bucket.level_j <= 0.015 * 400.0 + 1e-9
    assert controller.burst_w == 900.0  # and nothing was learnt of a load that was not there
    assert controller.command.duty == pytest.approx((400 * TARGET - 100) / 800, rel=0.05)


def test_a_slice_is_as_short_as_the_window_asks():
    wide = Controller(Cap(400.0, 1.0), idle_w=100.0, burst_w=918.0).command
    narrow = Controller(Cap(400.0, 0.2), idle_w=100.0, burst_w=918.0).command
    assert narrow.ratio == wide.ratio
    assert narrow.slice_s < wide.slice_s / 1.5


# -- the zone and the plant -------------------------------------------------------------------------------------


def test_the_plant_has_the_h200s_duty_curve():
    for duty, power_w, within in ((1.0, 690.0, 0.02), (0.75, 691.0, 0.04), (0.5, 510.0, 0.02), (0.25, 304.0, 0.02)):
        plant = Plant(gemms())
        plant.command = PaceCommand((1 - duty) / duty, 0.0024)
        plant.run_until(3.0)
        assert mean_w(plant.power_w, 1.0) == pytest.approx(power_w, rel=within)


@pytest.mark.parametrize(("period_s", "spread_w"), [(0.010204, 46.0), (0.020215, 78.0), (0.100265, 258.0)])
def test_the_plants_ring_beats_with_what_switches_as_the_h200s_does(period_s, spread_w):
    """h200/waves.json: 125 to 840 W, half of the time; the standard deviation of the samples at three periods."""
    ops = (Op(period_s / 2, w) for w in itertools.cycle((840.0, 125.0)))
    plant = Plant(ops, every=10**9, idle_w=125.0, limit_w=2000.0)
    shown = [w for _, w in plant.run_until(4.0)]
    assert math.sqrt(sum((w - sum(shown) / len(shown)) ** 2 for w in shown) / len(shown)) == pytest.approx(
        spread_w, rel=0.2
    )
    if period_s < 0.05:  # slowly: neighbours are alike, so that a window does not average it away
        mean = sum(shown) / len(shown)
        alike = sum((a - mean) * (b - mean) for a, b in itertools.pairwise(shown))
        assert alike > 0.6 * sum((w - mean) ** 2 for w in shown)


def run_program(program, cap_w, *, seed=0, seconds=4.0, adc_s=0.0001):
    """By a sensor whose moments are close together, unless told: what else there is to hold."""
    plant = Plant(iter(()), rng=random.Random(seed), idle_w=118.0, adc_s=adc_s)
    plant.ops = program(plant)
    made = Bench(plant, Cap(cap_w, 0.2))
    made.run(seconds)
    return made


@pytest.mark.parametrize("adc_s", [0.00042, 0.00053, 0.000545, 0.00064])
@pytest.mark.parametrize("cap_w", [600.0, 500.0, 400.0])
def test_moments_that_the_sensor_looks_at_do_not_lock_to_slices(cap_w, adc_s):
    """Slices of 0.7 ms every 1.6 ms did, three moments each: windows of +8.5% by the ring, +10.5% by the counter."""
    made = run_program(saturated(), cap_w, adc_s=adc_s)
    assert made.mean_w() == pytest.approx(cap_w, rel=0.03)
    assert made.ring.peak_w <= 1.05 * cap_w
    assert counter_window_w(made.plant.counted_j, 1.0) <= 1.05 * cap_w


def test_who_shares_a_gpu_has_slices_of_a_turn():
    controller = Controller(Cap(450.0, 0.2), idle_w=118.0, burst_w=976.0)
    controller.shared = True
    assert controller.observe(443.0, 0.02, duty=0.38).slice_s >= SHARED_S


PROGRAMS = {
    "GEMMs": saturated(),
    "kernels longer than a slice": saturated(0.0014, 950.0, 0.0014),
    "GPT-2 training": gpt2_training,
    "graph replays": graphs,
    "host-bound": host_bound(0.00002, 0.000015, 420.0),
    "a synchronisation at each call": synchronising(1),
    "one every eight calls": synchronising(8),
    "bursts": bursty(0.03, 0.01),
}


@pytest.mark.parametrize("share", [0.85, 0.7, 0.5])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_every_kind_are_held_from_half_a_second_on(name, share):
    """Mean within 3%, no window of 200 ms above the cap by 5%, whatever the host does."""
    free = Plant(iter(()), idle_w=118.0)
    free.ops = PROGRAMS[name](free)
    free.run_until(2.0)
    cap_w = share * mean_w(free.power_w, 1.0)
    made = run_program(PROGRAMS[name], cap_w)
    assert made.ring.mean_w == pytest.approx(cap_w, rel=0.03)
    assert made.mean_w() == pytest.approx(cap_w, rel=0.03)
    assert made.worst_w(0.5) <= 1.05 * cap_w


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_window_is_bounded_by_the_first_samples(name):
    """Nothing is guessed, so the work before the first samples draws what it draws: some 50 ms of 200."""
    free = Plant(iter(()), idle_w=118.0)
    free.ops = PROGRAMS[name](free)
    free.run_until(2.0)
    cap_w = 0.7 * mean_w(free.power_w, 1.0)
    made = run_program(PROGRAMS[name], cap_w, seconds=0.6)
    assert made.worst_w(0.0) <= 1.25 * cap_w
    assert made.mean_w(0.0) >= 0.85 * cap_w  # and work is not halved meanwhile


@pytest.mark.parametrize(("program", "free_w"), [(compiled_bert(), 393.0), (host_bound(1e-5, 8e-6, 330.0), 288.0)])
def test_a_host_bound_program_reaches_a_cap_that_was_raised(program, free_w):
    """What a low duty taught is wrong at a higher one: a host catches up in long pauses, not in short ones."""
    made = run_program(program, 0.5 * free_w, seconds=3.2)
    raised = Cap(0.85 * free_w, 0.2)
    made.zone.caps[0], begun = raised, len(made.plant.power_w)
    made.run(3.2)
    assert mean_w(made.plant.power_w[begun:], 0.5) == pytest.approx(raised.power_w, rel=0.03)


def test_below_the_cap_nothing_waits_from_the_first_moment():
    made = run_program(host_bound(), 270.0, seconds=1.0)
    assert made.plant.waits == 0
    assert not made.zone.is_near_cap(made.now_ns())


def test_a_host_that_is_fast_enough_now_and_then_is_watched_meanwhile():
    """Looked at ten times a second while it was slow, it drew 9% too much in a window when it was fast again."""
    free_w = mean_w(run_program(wandering(1.0), 2000.0, seconds=3.0).plant.power_w, 1.0)
    made = run_program(wandering(1.0), 0.85 * free_w, seconds=6.0)
    assert made.worst_w(0.5) <= 1.07 * 0.85 * free_w


@pytest.mark.parametrize("turn_s", [0.001, 0.002, 0.005])
@pytest.mark.parametrize("cap_w", [450.0, 350.0])
def test_two_processes_that_take_turns_on_a_gpu_are_held(cap_w, turn_s):
    """What each times as its work has the other's in it; the power of both is what the duty is corrected by."""
    plant = Shared(itertools.repeat(Op(0.000171, 976.0)), idle_w=118.0)
    plant.turn_s = turn_s
    made = Bench(plant, Cap(cap_w, 0.2))
    made.zone.controller.shared = True
    made.run(4.0)
    assert made.mean_w() == pytest.approx(cap_w, rel=0.035)
    assert made.worst_w() <= 1.07 * cap_w
    shares = [p.done for p in plant.processes]
    assert min(shares) >= 0.95 * max(shares)


@pytest.mark.parametrize("cap_w", [600.0, 500.0, 400.0, 300.0])
def test_a_gemm_loop_is_held(cap_w):
    """The goals of issue 7: mean within 3%, no 200 ms window above the cap by 5%, after the first second."""
    made = bench(gemms(), cap_w)
    assert made.mean_w() == pytest.approx(cap_w, rel=0.03)
    assert made.worst_w() <= 1.05 * cap_w
    # and what the meter reports from the sensor is what the plant drew
    assert made.meter.mean_w == pytest.approx(made.mean_w(), rel=0.02)
    assert made.meter.peak_w == pytest.approx(made.worst_w(), rel=0.06)  # it beats with the slices


@pytest.mark.parametrize("cap_w", [500.0, 400.0, 300.0])
def test_training_is_held(cap_w):
    made = bench(training(random.Random(3)), cap_w, every=4)
    assert made.mean_w() == pytest.approx(cap_w, rel=0.03)
    assert made.worst_w() <= 1.06 * cap_w  # the steps themselves are 5% of a window at 300 W, at any fixed duty


@pytest.mark.parametrize("load", ["gemm", "training"])
@pytest.mark.parametrize(
    ("sensor", "window_s"),
    [
        ({"sample_s": 0.1, "blur_s": 0.02, "delay_s": 0.003}, 0.2),  # nvml-instant: a moment, ten times a second
        ({"sample_s": 0.1, "blur_s": 1.0, "delay_s": 0.05}, 1.0),  # nvml-usage: a mean of a second
        ({"sample_s": 1.0, "blur_s": 1.0, "delay_s": 0.05}, 1.0),
    ],
)
def test_slower_sensors_hold_steady_loads_too(load, sensor, window_s):
    ops = gemms() if load == "gemm" else training(random.Random(1))
    made = bench(ops, 300.0, seconds=12.0, every=4, seed=1, window_s=window_s, filter_s=0.0, **sensor)
    assert 0.96 * 300.0 <= made.mean_w(2.0) <= 1.03 * 300.0
    assert made.worst_w(2.0) <= 1.07 * 300.0


@pytest.mark.parametrize("cap_w", [500.0, 300.0])
def test_throughput_is_that_of_the_fixed_duty_at_the_same_power(cap_w):
    made = bench(gemms(), cap_w)
    duty = (made.mean_w(0.0) - IDLE_W) / (BURST_W - IDLE_W)
    fixed = Plant(gemms(), every=12)
    fixed.command = PaceCommand((1 - duty) / duty, 0.002)
    fixed.run_until(4.0)
    assert made.plant.done >= 0.95 * fixed.done


@settings(max_examples=25, deadline=None)
@given(
    cap_w=st.floats(220.0, 650.0),
    op_s=st.floats(0.00005, 0.004),
    burst_w=st.floats(300.0, 918.0),
    sample_s=st.sampled_from([0.02, 0.1]),
    every=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_random_loads_are_held_or_run_free(cap_w, op_s, burst_w, sample_s, every, seed):
    rng = random.Random(seed)
    ops = (Op(op_s * rng.uniform(0.5, 1.5), burst_w * rng.uniform(0.9, 1.0)) for _ in itertools.repeat(0))
    sensor = {} if sample_s == 0.02 else {"sample_s": sample_s, "filter_s": 0.0, "blur_s": sample_s}
    made = bench(ops, cap_w, seconds=5.0, every=every, seed=seed, **sensor)
    free = Plant((Op(op_s, 0.95 * burst_w) for _ in itertools.repeat(0)), every=every)
    free.run_until(2.0)
    free_w = mean_w(free.power_w, 1.0)
    slack = 0.03 + op_s * every * 5  # points that lie 10 ms apart cannot do better than that in a window
    if free_w < 0.95 * cap_w:
        # Nothing to hold: next to nothing is lost once a few readings have told so, which a slow sensor does later.
        known_s, waited_s = (1.5, 0.7) if sample_s == 0.02 else (2.5, 1.8)
        assert made.mean_w(known_s) == pytest.approx(free_w, rel=0.06)
        assert made.plant.waited_s < waited_s
    else:
        assert made.mean_w(1.5) <= cap_w * (1.0 + slack)
        assert made.mean_w(1.5) >= min(cap_w, free_w) * (0.95 - slack)
        grain = 1.5 * burst_w * op_s * every / 0.2 / cap_w  # what one slice more or less is in a window
        assert made.worst_w(1.5) <= cap_w * (1.11 + grain)


@pytest.mark.parametrize("pause_s", [0.01, 0.02, 0.1, 0.3, 0.7])
def test_work_does_not_burst_after_a_pause(pause_s):
    """A host that loads data, another process that ends: nothing is learnt of the load while it does not run."""
    made = run_program(bursty(1.0, pause_s, 976.0), 300.0, seconds=8.0)
    assert made.worst_w() <= 1.05 * 300.0
    assert made.mean_w() >= 0.85 * 300.0


def test_a_load_that_stays_light_is_believed_after_a_second():
    controller = Controller(Cap(400.0, 0.2), idle_w=100.0, burst_w=900.0)
    for _ in range(100):
        controller.observe(394.0, 0.02, duty=controller.command.duty)
    heavy = controller.command.duty
    for _ in range(40):  # 0.8 s
        controller.observe(100.0 + 120.0 * heavy, 0.02, duty=controller.command.duty)
    assert controller.command.duty <= 1.1 * heavy
    for _ in range(40):
        controller.observe(100.0 + 120.0 * controller.command.duty, 0.02, duty=controller.command.duty)
    assert controller.command.duty == 1.0


def test_points_that_never_end_in_the_tick_of_a_reading_count_too():
    """Slices that take as long as the sensor's period: nothing was learnt, for as long as they stayed in step."""
    rng = random.Random(0)
    ops = (Op(0.0024066 * rng.uniform(0.5, 1.5), 285.0) for _ in itertools.repeat(0))
    made = bench(ops, 313.0, every=11, seconds=4.0, sample_s=0.1, filter_s=0.0, blur_s=0.1)
    assert made.mean_w(2.0) == pytest.approx(285.0, rel=0.05)  # it runs free


def test_a_load_that_changes_is_caught_again():
    changed_s = []

    def changing():
        for power_w in (918.0, 350.0, 700.0, 918.0, 450.0):
            changed_s.append(made.plant.now_s)
            for _ in range(int(1.0 / GEMM_S)):
                yield Op(GEMM_S, power_w)
        changed_s.append(made.plant.now_s)
        yield from gemms()

    made = Bench(Plant(changing(), every=8), Cap(400.0, 0.2))
    made.run(14.0)
    assert len(changed_s) == 6
    for begin, end in itertools.pairwise([*changed_s, 14.0]):
        settled = made.plant.power_w[: round(end / 0.0005)]
        assert worst_window_w(settled, 0.2, begin + 0.5) <= 1.05 * 400.0  # half a second after each change
        # The sensor needs some 80 ms to tell of the change; then work stops until the window has room again.
        assert worst_window_w(settled, 0.2, begin) <= 1.5 * 400.0


def test_light_and_heavy_phases_keep_the_mean_under_the_cap():
    """A sensor that is late cannot hold every window of such a load; the mean it can."""
    for period_s in (0.05, 0.2, 1.0):
        assert bench(phases(period_s), 400.0, every=6, seconds=6.0).mean_w() <= 400.0


def test_ops_longer_than_any_window_run_one_by_one_and_are_paid_for():
    made = bench(iter(lambda: Op(0.5, BURST_W), None), 400.0, every=1, seconds=40.0)
    assert made.plant.done >= 10  # no deadlock
    assert 0.6 * 400.0 <= made.mean_w(10.0) <= 1.03 * 400.0


def test_a_sensor_that_dies_leaves_the_cap_to_prediction():
    made = Bench(Plant(gemms(), every=8), Cap(400.0, 0.2))
    made.run(2.0)
    made.sensor.dead = True
    made.run(3.0)
    assert made.zone.blind
    assert "prediction" in made.zone.notes["blind"]
    assert mean_w(made.plant.power_w, 3.0) == pytest.approx(400.0, rel=0.06)
    made.sensor.dead = False
    made.run(2.0)
    assert not made.zone.blind


def test_a_cap_below_idle_is_said_with_its_floor():
    made = bench(gemms(), 90.0)
    assert made.zone.controller is not None and made.zone.controller.floor_w == pytest.approx(116.0, rel=0.1)
    assert "cannot be held" in made.zone.notes["floor"]
    assert made.plant.done > 100  # it still runs
    assert made.zone.command.duty == pytest.approx(STUCK_GPU_DUTY)  # and makes progress
    assert "it now has 5%" in made.zone.notes["floor"]


def resting(power_w, *, seconds=0.1, stuck_duty=STUCK_DUTY):
    """A controller under 5 W whose work waits while so many watts are drawn, for a number of readings."""
    controller = Controller(Cap(5.0, 0.2), idle_w=4.0, burst_w=20.0, stuck_duty=stuck_duty)
    for watts in power_w:
        controller.observe(watts, seconds, duty=MIN_DUTY, moved=False, rested=True)
    return controller


def test_what_others_draw_is_told_by_the_first_wait_and_work_goes_on():
    assert resting([8.0] * 4).floor_w is None
    found = resting([8.0, 7.0, 8.0, 7.0, 8.0])
    assert found.floor_w == pytest.approx(7.6) and found.command.duty == pytest.approx(STUCK_DUTY)
    assert resting([8.0] * 3 + [4.9] + [8.0] * 4).floor_w is None  # the others paused: the cap can be held
    board = resting([8.0] * 6, stuck_duty=MIN_DUTY)  # of a GPU waiting goes on: what it saves is the board's
    assert board.floor_w == pytest.approx(8.0) and board.command.duty < 0.1


def test_whether_others_have_gone_is_looked_at_again():
    found = resting([8.0] * 5)
    for _ in range(round(AGAIN_S / 0.1) + 1):  # at work for half of the time
        assert found.command.duty >= STUCK_DUTY
        found.observe(9.0, 0.1, duty=0.5)
    assert found.command.duty < 0.1
    for _ in range(100):  # they have: the cap is held by what the work draws
        found.observe(4.0 + 16.0 * found.command.duty, 0.1, duty=found.command.duty)
    assert 4.0 + 16.0 * found.command.duty == pytest.approx(5.0 * TARGET, rel=0.02)


@pytest.mark.parametrize(
    ("key", "says"), [("cpu", "the CPUs of this machine draw 5.21 W"), ("gpu0", "the GPU draws 5.21 W with 2% of")]
)
def test_a_cap_that_is_too_low_is_said_of_what_is_capped_with_digits_that_differ(key, says):
    said = PowerZone(key, [key], [])._describe_floor(Cap(5.0, 0.2), 5.2142)
    assert said.startswith(f"{key}: 5 W cannot be held: {says}") and "Raise the cap above 5.21 W" in said


def test_a_host_rests_while_all_its_threads_wait():
    time = Time()
    seen = []

    def sleep(seconds):
        time.sleep(seconds)
        seen.append(pacer.counts().resting_ns)

    pacer = HostPacer(time.clock, sleep)
    pacer.obey(PaceCommand(9.0, 0.001))
    pacer.point(restart=True)
    time.sleep(0.01)
    began = time.clock()
    pacer.point()
    assert set(seen) == {began} and pacer.counts().resting_ns is None
    other = threading.Thread(target=lambda: pacer.point(restart=True))  # it may be at work, whatever the first does
    other.start()
    other.join()
    seen.clear()
    time.sleep(0.01)
    pacer.point()
    assert seen and set(seen) == {None}


def test_the_tightest_of_several_caps_holds_and_the_next_after_it():
    made = Bench(Plant(gemms(), every=8), Cap(500.0, 0.2))
    made.run(2.0)
    made.zone.caps[7] = Cap(300.0, 0.1)
    made.run(2.0)
    assert mean_w(made.plant.power_w, 3.0) == pytest.approx(300.0, rel=0.05)
    del made.zone.caps[7]
    made.run(2.0)
    assert mean_w(made.plant.power_w, 5.0) == pytest.approx(500.0, rel=0.04)


class ProcessSensor:
    """A program's own watts by its CPU time, every 100 ms: 8 W at work, 0 W while it waits."""

    name, period_s = "process", 0.1

    def __init__(self):
        self.batch = Batch()

    def start(self):
        pass

    def stop(self):
        pass

    def domains(self):
        return [
            Domain(name="cpu0", source="modelled", resolution_s=0.1, basis="modelled", hold=Hold.MEAN, scope="process")
        ]

    def capabilities(self):
        return []

    def read(self):
        self.batch, batch = Batch(), self.batch
        return batch


@pytest.mark.parametrize("neighbours", [0.0, 0.4])
def test_a_programs_own_watts_reach_the_cap_though_the_machine_idles_at_most_of_it(monkeypatch, neighbours):
    """The machine's idling was taken for the program's own: beside neighbours it was left with 79% of its 3 W."""
    monkeypatch.setattr(power_zone, "guess_power", lambda *_: (2.7, 16.0))
    sensor, now, rng, drawn = ProcessSensor(), [10**9], random.Random(0), []
    sampler = Sampler([sensor], clock=Clock(lambda: now[0], lambda: now[0]))
    pacer = HostPacer(lambda: now[0])
    zone = PowerZone("cpu", ["cpu0"], [pacer])
    zone.caps[0], zone.running = Cap(3.0, 0.2), True
    zone.restart(now[0])
    zone.begin(sampler, now[0])
    for _ in range(600):
        now[0] += 100_000_000
        pacer.point(restart=True)
        power_w = 8.0 * zone.command.duty * (1.0 - rng.uniform(0.0, 2.0) * neighbours)
        sensor.batch.add("cpu0", now[0], power_w)
        drawn.append(power_w)
        sampler.read_due()
        zone.steer(sampler, zone.read(sampler), now[0])
    assert sum(drawn[50:]) / len(drawn[50:]) == pytest.approx(3.0 * TARGET, rel=0.05)


@pytest.mark.parametrize("scope", ["process", "machine"])
def test_a_cap_that_cannot_be_held_is_said_in_words_of_its_scope(monkeypatch, scope):
    """Of a program's own watts, the machine was said to draw them, and work for half of the time drew far more."""
    domain = ProcessSensor().domains()[0]
    monkeypatch.setattr(ProcessSensor, "domains", lambda self: [dataclasses.replace(domain, scope=scope)])
    sensor, now = ProcessSensor(), [10**9]
    sampler = Sampler([sensor], clock=Clock(lambda: now[0], lambda: now[0]))
    pacer = HostPacer(lambda: now[0])
    zone = PowerZone("cpu", ["cpu0"], [pacer])
    zone.caps[0], zone.running = Cap(0.3, 0.2), True
    zone.restart(now[0])
    zone.begin(sampler, now[0])
    for _ in range(60):
        now[0] += 100_000_000
        pacer.point(restart=True)
        sensor.batch.add("cpu0", now[0], 0.32 + 4.0 * zone.command.duty)
        sampler.read_due()
        zone.steer(sampler, zone.read(sampler), now[0])
    said = zone.notes["floor"]
    assert said.startswith("cpu: 300 mW cannot be held: ") and "400 mW" in said
    if scope == "process":
        assert zone.command.duty == pytest.approx(MIN_DUTY)
        assert "this program and its children draw 400 mW" in said and "machine" not in said
    else:
        assert zone.command.duty == pytest.approx(STUCK_DUTY)
        assert "the CPUs of this machine draw" in said and "half of what the program draws" in said


def test_another_leader_goes_on_from_the_same_duty():
    first = bench(gemms(), 400.0).zone.controller
    assert first is not None
    second = Controller(Cap(400.0, 0.2), idle_w=100.0, burst_w=2000.0)
    second.continue_from(first.command)
    assert second.command.duty == pytest.approx(first.command.duty, rel=0.01)
    for _ in range(25):  # half a second in which the other's context is taken off the GPU
        second.observe(105.0, 0.02, duty=second.command.duty)
    assert second.command.duty <= 1.1 * first.command.duty


def test_duty_between_is_the_mean_of_what_was_commanded():
    zone = PowerZone("gpu0", ["gpu0"], [])
    for time_ns, ratio in ((100, 1.0), (200, 3.0), (400, 0.0)):
        zone.follow(PaceCommand(ratio), time_ns)
    assert zone.duty_between(100, 200) == pytest.approx(0.5)
    assert zone.duty_between(150, 300) == pytest.approx((0.5 * 50 + 0.25 * 100) / 150)
    assert zone.duty_between(300, 500) == pytest.approx((0.25 * 100 + 1.0 * 100) / 200)
    assert zone.duty_between(0, 50) == 1.0


def test_unknown_hardware_begins_careful():
    idle_w, burst_w = guess_power([("gpu0", "NVIDIA Unheard Of")], 300.0)
    assert (idle_w, burst_w) == (0.0, 600.0)
    idle_w, burst_w = guess_power([("gpu0", "NVIDIA H200")], 300.0)
    assert (idle_w, burst_w) == (100.0, 700.0)


# -- the meter --------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(50.0, 900.0), min_size=80, max_size=200))
def test_the_meters_worst_window_is_that_of_the_samples(watts):
    meter = PowerMeter(0.2)
    for i, power_w in enumerate(watts):
        meter.add(MeanPower((i + 1) * 20_000_000, 0.02, power_w))
    skipped = round(FIRST_S / 0.02)
    windows = [sum(watts[i : i + 10]) / 10 for i in range(len(watts) - 9)]
    assert meter.energy_j == pytest.approx(sum(watts) * 0.02)
    assert meter.windows == len(windows)
    late = [w for i, w in enumerate(windows) if i >= skipped]
    assert meter.peak_w == (pytest.approx(max(late)) if late else None)


def test_a_gap_starts_the_window_anew():
    meter = PowerMeter(0.2)
    for i in range(100):
        meter.add(MeanPower((i + 1) * 20_000_000 + (5_000_000_000 if i >= 50 else 0), 0.02, 100.0 if i < 50 else 900.0))
    assert meter.peak_w == pytest.approx(900.0)
    assert meter.windows == 2 * 41  # none of them spans the gap


# -- waits on the host ------------------------------------------------------------------------------------------


class Time:
    def __init__(self):
        self.now_ns, self.slept = 1, []

    def clock(self):
        return self.now_ns

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now_ns += round(seconds * 1e9)


def test_a_host_point_waits_by_the_ratio_once_a_slice_is_full():
    time = Time()
    pacer = HostPacer(time.clock, time.sleep)
    pacer.obey(PaceCommand(2.0, 0.003))
    pacer.point(restart=True)
    for _ in range(3):
        time.now_ns += 1_000_000
        pacer.point()
    assert sum(time.slept) == pytest.approx(0.006)
    passed = pacer.counts()
    assert (passed.points, passed.waits) == (4, 1)
    assert passed.waited_s == pytest.approx(0.006)
    assert passed.worked_s == pytest.approx(0.003)


def test_idle_time_before_a_call_is_not_paid_for():
    time = Time()
    pacer = HostPacer(time.clock, time.sleep)
    pacer.obey(PaceCommand(2.0, 0.003))
    pacer.point(restart=True)
    time.now_ns += 10_000_000_000
    pacer.point(restart=True)
    pacer.point()
    assert not time.slept


def test_a_new_command_releases_who_waits():
    time = Time()
    pacer = HostPacer(time.clock, lambda s: (time.sleep(s), pacer.obey(PaceCommand())))
    pacer.point(restart=True)
    pacer.obey(PaceCommand(40.0, 0.001))
    time.now_ns += 100_000_000
    pacer.point()
    assert sum(time.slept) < 0.01


@given(st.integers(-(10**12), 10**12))
def test_a_clock_that_jumps_neither_hangs_nor_owes(jump_ns):
    time = Time()
    pacer = HostPacer(time.clock, time.sleep)
    pacer.obey(PaceCommand(1.0, 0.001))
    pacer.point(restart=True)
    time.now_ns += jump_ns
    pacer.point()
    assert sum(time.slept) <= 0.26


def test_a_cap_that_can_be_held_again_is_no_longer_said_not_to_be():
    made = Controller(Cap(100.0, 0.2), idle_w=20.0, burst_w=200.0, stuck_duty=0.5)
    for _ in range(30):
        made.observe(150.0, 0.02, duty=0.0, rested=True)
    assert made.floor_w == pytest.approx(150.0) and made.command.duty >= 0.5
    for _ in range(1500):
        made.observe(60.0, 0.02, duty=0.5)
    assert made.floor_w is None


def test_a_thread_that_waits_does_not_speak_for_one_that_works():
    pacer = HostPacer()
    pacer.obey(PaceCommand(9.0, 0.0005, 0.001))
    pacer.point(tokens=0)  # this thread goes on working
    other = threading.Thread(target=pacer.point, kwargs={"tokens": 20_000})
    other.start()
    time.sleep(0.05)
    assert other.is_alive() and pacer.counts().resting_ns is None
    pacer.obey(PaceCommand())
    other.join()
