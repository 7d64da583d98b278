"""The map from the wall clock to the one monotonic clock, across steps and slews of the wall clock."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.clock import REAL, STEP_NS, Clock, EpochMap, now_ns

MS = 1_000_000
S = 1_000 * MS
T0_NS = 500 * S
EPOCH_NS = 1_790_000_000 * S


class World:
    """A monotonic clock, and a wall clock that is stepped and slewed against it. Reading costs nothing."""

    def __init__(self, slew_ppm: float = 0.0):
        self.now_ns = T0_NS
        self.offset_ns = EPOCH_NS
        self.slew_ppm = slew_ppm

    def wall_ns(self) -> int:
        return self.now_ns + self.offset_ns + round((self.now_ns - T0_NS) * self.slew_ppm * 1e-6)

    def clock(self) -> Clock:
        return Clock(lambda: self.now_ns, self.wall_ns)

    def run(self, seconds: float) -> None:
        self.now_ns += round(seconds * S)

    def stamp(self) -> tuple[int, int]:
        """What a driver writes beside a sample now, and when that truly is."""
        return self.wall_ns(), self.now_ns


def off_by(epoch: EpochMap, stamps: list[tuple[int, int]]) -> int:
    return max(abs(epoch.to_monotonic(wall) - true) for wall, true in stamps)


def record(world: World, seconds: float, every_s: float = 0.02) -> list[tuple[int, int]]:
    stamps = []
    for _ in range(round(seconds / every_s)):
        world.run(every_s)
        stamps.append(world.stamp())
    return stamps


def test_without_a_step_times_are_exact_both_ways():
    world = World()
    epoch = EpochMap(world.clock())
    stamps = record(world, 3.0)
    assert not epoch.observe()
    assert off_by(epoch, stamps) == 0
    assert all(epoch.to_epoch(true) == wall for wall, true in stamps)
    assert epoch.steps == 0


@pytest.mark.parametrize("step_s", [3600.0, -3600.0, 60.0, -60.0, 5.0, -5.0, 86400.0 * 365, -86400.0 * 365])
def test_a_big_step_is_noticed_once_and_both_sides_of_it_are_placed(step_s):
    world = World()
    epoch = EpochMap(world.clock())
    record(world, 1.0)
    epoch.observe()
    before = record(world, 0.4)
    world.offset_ns += round(step_s * S)
    after = record(world, 0.6)
    assert epoch.observe()
    assert off_by(epoch, before + after) == 0
    assert not epoch.observe()
    assert epoch.steps == 1
    assert epoch.to_epoch(world.now_ns) == world.wall_ns()


@pytest.mark.parametrize("step_s", [3600.0, -3600.0, 5.0, -5.0])
def test_samples_from_before_the_last_observation_stay_where_they_were(step_s):
    """After a step the driver's whole ring is read again: 2.4 s of it, older than the observation before."""
    world = World()
    epoch = EpochMap(world.clock())
    ring = record(world, 2.0)
    epoch.observe()
    ring += record(world, 0.2)
    world.offset_ns += round(step_s * S)
    ring += record(world, 0.2)
    assert epoch.observe()
    assert off_by(epoch, ring) == 0


@pytest.mark.parametrize("step_ms", [30, -30, 100, -100, 700, -700])
def test_a_small_step_misplaces_by_no_more_than_itself(step_ms):
    world = World()
    epoch = EpochMap(world.clock())
    before = record(world, 0.5)
    world.offset_ns += step_ms * MS
    after = record(world, 0.5)
    assert epoch.observe()
    assert off_by(epoch, before) <= abs(step_ms) * MS
    assert off_by(epoch, after) <= abs(step_ms) * MS
    later = record(world, 1.0)
    epoch.observe()
    assert off_by(epoch, later) == 0, "the step is over: what comes now is exact"


@pytest.mark.parametrize("step_ms", [15, -15])
def test_less_than_a_step_is_followed_without_a_word(step_ms):
    world = World()
    epoch = EpochMap(world.clock())
    world.offset_ns += step_ms * MS
    assert abs(step_ms * MS) < STEP_NS
    assert not epoch.observe()
    world.run(0.1)
    assert off_by(epoch, [world.stamp()]) == 0


@given(slew_ppm=st.floats(min_value=-500, max_value=500), seconds=st.integers(min_value=1, max_value=200))
def test_the_fastest_slew_of_ntp_is_no_step(slew_ppm, seconds):
    world = World(slew_ppm)
    epoch = EpochMap(world.clock())
    for _ in range(seconds):
        world.run(1.0)
        stamps = [world.stamp()]
        assert not epoch.observe()
        assert off_by(epoch, stamps) <= 1000
    assert epoch.steps == 0


def test_two_steps_and_back_again():
    world = World()
    epoch = EpochMap(world.clock())
    for step_s in (3600, -3600, -3600, 7200):
        record(world, 1.0)
        epoch.observe()
        before = record(world, 0.5)
        world.offset_ns += step_s * S
        after = record(world, 0.5)
        assert epoch.observe()
        assert off_by(epoch, before + after) == 0
    assert epoch.steps == 4


@given(
    step_s=st.one_of(st.floats(min_value=4, max_value=1e8), st.floats(min_value=-1e8, max_value=-4)),
    at_s=st.floats(min_value=0.001, max_value=0.999),
    slew_ppm=st.floats(min_value=-500, max_value=500),
)
def test_wherever_the_step_falls_every_sample_of_the_ring_is_placed(step_s, at_s, slew_ppm):
    world = World(slew_ppm)
    epoch = EpochMap(world.clock())
    ring = record(world, 1.4, 0.1)
    epoch.observe()
    begin = world.now_ns
    while world.now_ns < begin + at_s * S:
        ring += record(world, 0.1, 0.1)
    world.offset_ns += round(step_s * S)
    ring += record(world, 0.2, 0.1)
    assert epoch.observe()
    assert off_by(epoch, ring) <= 3 * MS  # 500 ppm over the ring, never the step
    placed = [epoch.to_monotonic(wall) for wall, _ in ring]
    assert placed == sorted(placed)


@given(step_s=st.floats(min_value=-2, max_value=2), at_s=st.floats(min_value=0.0, max_value=1.0))
def test_no_sample_is_ever_off_by_more_than_the_step(step_s, at_s):
    world = World()
    epoch = EpochMap(world.clock())
    stamps = [(world.wall_ns(), world.now_ns)]
    world.run(at_s)
    stamps.append(world.stamp())
    world.offset_ns += round(step_s * S)
    stamps.append(world.stamp())
    world.run(1.0 - at_s)
    stamps.append(world.stamp())
    assert epoch.observe() is (abs(step_s * S) > STEP_NS)
    assert off_by(epoch, stamps) <= abs(step_s) * S + 1


@pytest.mark.parametrize("step_s", [-1.0, -5.0, 5.0])
def test_long_after_a_step_a_stamp_a_little_ahead_of_us_is_not_taken_for_an_old_one(step_s):
    """A thread that is kept from running between `observe` and reading the driver gets stamps newer than that."""
    world = World()
    epoch = EpochMap(world.clock())
    world.run(1.0)
    world.offset_ns += round(step_s * S)
    assert epoch.observe()
    for _ in range(20):
        world.run(1.0)
        assert not epoch.observe()
    world.run(0.2)
    assert off_by(epoch, [world.stamp()]) == 0


def test_the_tightest_of_several_readings_is_taken():
    """One reading between which the thread was descheduled for 50 ms does not count, and fakes no step."""
    world = World()
    epoch = EpochMap(world.clock())
    delays = iter([0, 50 * MS])

    def slow_wall() -> int:
        value = world.wall_ns()
        world.now_ns += next(delays, 0)
        return value

    world.run(1.0)
    other = EpochMap(Clock(lambda: world.now_ns, slow_wall))
    assert other.offset_ns == EPOCH_NS
    assert epoch.offset_ns == EPOCH_NS


def test_the_real_clocks():
    epoch = EpochMap()
    assert not epoch.observe()
    before_ns, placed_ns, after_ns = time.monotonic_ns(), epoch.to_monotonic(time.time_ns()), time.monotonic_ns()
    assert before_ns - 50 * MS < placed_ns < after_ns + 50 * MS
    assert now_ns() <= REAL.monotonic_ns() <= now_ns()
    before_ns, placed_ns, after_ns = time.time_ns(), epoch.to_epoch(now_ns()), time.time_ns()
    assert before_ns - 50 * MS < placed_ns < after_ns + 50 * MS
