"""The pure decisions of the shaper: phases, jitter, floor and ramp, duty under a cap."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import ArgumentError
from tessera.policy import PhaseShift
from tessera.runtime import shaping
from tessera.runtime.shaping import GroupPlace

PERIOD_S = 2.0
DUTIES = st.floats(0.02, 0.98)


def wave_sum(duty: float, phases: list[float], points: int = 4000) -> tuple[int, int]:
    """The least and the most groups that are high, by looking at many moments."""
    at = (np.arange(points) + 0.5) / points
    high = sum(((at - p) % 1.0 < duty).astype(int) for p in phases)
    return int(np.min(high)), int(np.max(high))


def count_high(duty: float, phases: list[float]) -> tuple[int, int]:
    """The least and the most groups that are high at a time; `phases` are their starts as shares of a period."""
    edges = sorted({p % 1.0 for p in phases} | {(p + duty) % 1.0 for p in phases})
    middles = [(a + b) / 2 for a, b in zip(edges, [*edges[1:], edges[0] + 1.0], strict=True) if b - a > 1e-12]
    counts = [sum((at - p) % 1.0 < duty for p in phases) for at in middles or [0.0]]
    return min(counts), max(counts)


@given(st.integers(1, 12), DUTIES)
def test_equal_spacing_swings_by_at_most_one_group(groups: int, duty: float) -> None:
    phases = (shaping.group_offsets(groups, "round_robin", PERIOD_S, duty) / PERIOD_S).tolist()
    low, high = count_high(duty, phases)
    assert high - low <= 1
    assert low <= groups * duty + 1e-9 and high >= groups * duty - 1e-9


@given(st.integers(2, 12), st.integers(1, 11))
def test_groups_times_duty_that_is_whole_is_flat_and_with_the_fewest_phases(groups: int, high: int) -> None:
    duty = min(high, groups - 1) / groups
    offsets = shaping.group_offsets(groups, "auto", PERIOD_S, duty)
    low, most = count_high(duty, (offsets / PERIOD_S).tolist())
    assert low == most == round(groups * duty)
    assert offsets.max() <= shaping.group_offsets(groups, "round_robin", PERIOD_S, duty).max()


def test_eight_groups_of_three_quarters_need_four_phases() -> None:
    assert shaping.choose_phases(8, 0.75) == 4
    assert shaping.choose_phases(8, 0.5) == 2
    assert shaping.choose_phases(8, 0.3) == 8  # never whole: a phase for each
    assert shaping.choose_phases(8, None) == 8


@given(DUTIES, st.lists(st.floats(0.0, 0.999), min_size=1, max_size=6))
def test_count_high_agrees_with_looking_at_many_moments(duty: float, phases: list[float]) -> None:
    low, high = count_high(duty, phases)
    seen_low, seen_high = wave_sum(duty, phases)
    assert low <= seen_low and seen_high <= high  # narrow overlaps lie between two moments
    assert 0 <= low <= high <= len(phases)


def test_slots_off_and_one_group() -> None:
    assert shaping.group_offsets(3, 0.002, PERIOD_S).tolist() == [0.0, 0.002, 0.004]
    assert not shaping.group_offsets(3, None, PERIOD_S).any()
    assert not shaping.group_offsets(1, "auto", PERIOD_S).any()


@given(st.integers(1, 6), st.integers(1, 4), st.floats(0.0, 1.0))
def test_no_rank_starts_later_than_allowed_and_stages_fit_between_replicas(dp: int, pp: int, most_s: float) -> None:
    shift = PhaseShift(dp_groups="round_robin", pp_stages="round_robin")
    places = [GroupPlace(replica=d, replicas=dp, stage=s, stages=pp) for d in range(dp) for s in range(pp)]
    free = [shaping.rank_offset_s(shift, p, PERIOD_S) for p in places]
    assert len({round(o, 9) for o in free}) == dp * pp and max(free) < PERIOD_S
    limited = [shaping.rank_offset_s(shift, p, PERIOD_S, most_s=most_s) for p in places]
    assert max(limited) <= most_s + 1e-9
    assert limited == pytest.approx([o * min(1.0, most_s / max(free)) if max(free) else 0.0 for o in free])


def test_tensor_parallel_groups_are_numbered_over_the_job() -> None:
    shift = PhaseShift(dp_groups="auto", tp_groups="auto", pp_stages="round_robin")
    place = GroupPlace(replica=1, replicas=2, tp_group=3, tp_groups=4, stage=1, stages=2)
    assert shaping.rank_offset_s(shift, place, PERIOD_S) == pytest.approx(1.5)
    with pytest.raises(ArgumentError, match="group 4 of 4"):
        GroupPlace(tp_group=4, tp_groups=4)


@given(st.floats(0.0, 100.0), st.floats(0.0, 2.0), st.floats(0.05, 5.0))
def test_an_early_group_waits_until_its_phase_and_a_late_one_does_not(now: float, offset: float, period: float) -> None:
    wait = shaping.phase_wait_s(now, offset, period, math.inf)
    assert 0.0 <= wait <= period / 2 + 1e-9
    late = (now + wait - offset) % period
    on_time = min(late, period - late) < 1e-6 * max(1.0, now / period)
    assert on_time or (wait == 0.0 and late <= period / 2 + 1e-6)
    assert shaping.phase_wait_s(now, offset, period, 0.01) <= 0.01


@given(st.integers(0, 2**63), st.integers(0, 2**40), st.integers(0, 2**40))
def test_jitter_is_within_its_range_and_the_same_for_arrays(seed: int, unit: int, microbatch: int) -> None:
    drawn = shaping.draw_jitter_s((0.001, 0.005), seed, unit, microbatch)
    assert 0.001 <= drawn < 0.005
    units = np.array([unit, unit + 1], dtype=np.uint64)
    many = shaping.draw_jitter_s((0.001, 0.005), seed, units, np.uint64(microbatch))
    assert many[0] == drawn and many[1] != drawn


def test_jitter_is_uniform_and_independent_between_units() -> None:
    batches = np.arange(20_000, dtype=np.uint64)
    one, two = (shaping.draw_jitter_s((0.0, 1.0), 7, unit, batches) for unit in (0, 1))
    assert np.histogram(one, 10, (0.0, 1.0))[0].min() > 1800
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.03


def test_ranks_of_a_tensor_parallel_group_wait_equally_long() -> None:
    assert GroupPlace(tp_group=2, tp_groups=4).jitter_unit == 2
    assert GroupPlace(replica=1, replicas=2, stage=1, stages=2).jitter_unit == 3


@given(
    st.lists(st.floats(0.0, 900.0), min_size=2, max_size=60),
    st.none() | st.floats(0.0, 500.0),
    st.none() | st.floats(1.0, 5000.0),
)
def test_held_power_keeps_floor_and_ramp_and_never_takes_work_away(
    loads: list[float], floor_w: float | None, ramp: float | None
) -> None:
    dt_s, most_w = 0.02, 700.0
    held = [loads[0]]
    for load in loads[1:]:
        held.append(shaping.hold_power(load, held[-1], dt_s, floor_w=floor_w, max_ramp_w_per_s=ramp, most_w=most_w))
        assert held[-1] >= load
        if floor_w is not None:
            assert held[-1] >= floor_w - 1e-9
        if ramp is not None and held[-2] <= most_w:
            assert held[-1] >= held[-2] - ramp * dt_s - 1e-6
    if floor_w is None and ramp is None:
        assert held == loads
    many = shaping.hold_power(np.array([loads[-1]] * 3), np.array([held[-2]] * 3), dt_s, floor_w=floor_w)
    assert many.shape == (3,)
