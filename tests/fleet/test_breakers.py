"""Breakers against the points of their standards, supplies against their grades, storage against its joules."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tessera.errors import ArgumentError
from tessera.fleet.breakers import MAGNETIC, STANDARDS, Breaker
from tessera.fleet.supplies import GRADES, LOADS, Battery, BatteryState, NodeSupply


@pytest.mark.parametrize("standard", STANDARDS)
@pytest.mark.parametrize("rating_a", [16, 63, 400])
def test_thermal_release_is_between_the_limits_of_the_standard(standard: str, rating_a: float) -> None:
    breaker = Breaker(rating_a=rating_a, standard=standard)
    limits = breaker.limits
    assert breaker.trip_s(limits.holds_at) == math.inf
    assert breaker.trip_s(1.0) == math.inf
    # The conventional time of both IEC standards is one hour up to 63 A, above that two.
    assert 0 < breaker.trip_s(limits.opens_at) < (3600.0 if rating_a <= 63 else 7200.0)
    low_s, high_s = limits.check_s
    assert low_s < breaker.trip_s(limits.check_at) < high_s


@pytest.mark.parametrize("curve", MAGNETIC)
def test_magnetic_release(curve: str) -> None:
    breaker = Breaker(rating_a=32, curve=curve)
    low, high = MAGNETIC[curve]
    assert breaker.trip_s(high) == 0.0
    assert breaker.trip_s(low) > 0.1  # the standard: not within 0.1 s
    assert low < breaker.magnetic_at < high


def test_a_warm_breaker_opens_sooner_and_higher_loads_open_it_sooner() -> None:
    breaker = Breaker(rating_a=32)
    assert breaker.trip_s(1.6, warm=1.0) < breaker.trip_s(1.6)
    times = [breaker.trip_s(load) for load in (1.3, 1.6, 2.0, 3.0, 4.0)]
    assert times == sorted(times, reverse=True)


def test_watts_and_amperes() -> None:
    assert Breaker(rating_a=100, voltage_v=400, power_factor=1.0).rating_w == pytest.approx(69282, rel=1e-4)
    assert Breaker(rating_a=10, voltage_v=230, phases=1, power_factor=1.0).rating_w == pytest.approx(2300)


def test_wrong_curve_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match="curve='X' is not known"):
        Breaker(rating_a=10, curve="X")


@pytest.mark.parametrize("grade", GRADES)
def test_supplies_pass_through_their_grade(grade: str) -> None:
    supply = NodeSupply(grade=grade)
    loads = np.array(LOADS) * supply.capacity_w
    assert loads / supply.draw_w(loads) == pytest.approx(np.array(GRADES[grade]))
    some = np.linspace(0.0, 1.2, 50) * supply.capacity_w
    assert np.all(np.diff(supply.draw_w(some)) > 0)
    assert supply.find_load(supply.draw_w(some)) == pytest.approx(some, abs=2.0)


def test_storage_smooths_and_keeps_its_joules() -> None:
    rng = np.random.default_rng(3)
    load = 1e6 + 3e5 * (np.arange(8000) % 400 < 300) + 1e4 * rng.random(8000)
    state = BatteryState(Battery(power_w=5e5, energy_j=5e6, smoothing_s=5.0, efficiency=1.0))
    before = state.stored_j
    feed = np.concatenate([state.smooth(part, 0.005) for part in np.split(load, 80)])
    assert np.ptp(feed[4000:]) < 0.2 * np.ptp(load)
    assert (feed.sum() - load.sum()) * 0.005 == pytest.approx(state.stored_j - before, rel=1e-6, abs=1.0)


def test_storage_that_is_too_small_gives_no_more_than_it_has() -> None:
    state = BatteryState(Battery(power_w=1e5, energy_j=1e3, smoothing_s=5.0))
    feed = state.smooth(np.concatenate([np.zeros(200), np.full(2000, 1e6)]), 0.005)
    assert feed[-1] == pytest.approx(1e6, rel=0.01)
    assert 0.0 <= state.stored_j <= 1e3
    assert np.all(feed >= 0)


def test_losses_of_a_round_trip_cost_joules() -> None:
    load = np.tile(np.repeat([1e6, 5e5], 200), 20)
    states = [BatteryState(Battery(power_w=1e6, energy_j=2e6, smoothing_s=5.0, efficiency=e)) for e in (1.0, 0.8)]
    feeds = [state.smooth(load, 0.005).sum() * 0.005 - state.stored_j for state in states]
    assert feeds[1] > feeds[0]
