"""Statistics of repeated batches, on synthetic data."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tessera.monitor.steady_state import (
    MeasuredBatch,
    Uncertain,
    count_warm_up,
    find_drift,
    find_steady_state,
    mean_interval,
    t90,
)


def batches(seconds: list[float], joules: list[float], calls: int = 10) -> list[MeasuredBatch]:
    pairs = zip(seconds, joules, strict=True)
    return [MeasuredBatch(calls=calls, time_s=calls * s, energy_j=calls * j) for s, j in pairs]


def test_warm_up_is_found_not_guessed() -> None:
    rng = np.random.default_rng(0)
    for cold in (0, 3, 8):
        values = 1.0 + 0.01 * rng.normal(size=40)
        values[:cold] += np.linspace(1.0, 0.3, cold)
        assert abs(count_warm_up(values) - cold) <= (2 if cold else 8)
        if cold:
            assert np.mean(values[count_warm_up(values) :]) == pytest.approx(1.0, rel=0.01)


def test_at_most_half_is_warm_up() -> None:
    assert count_warm_up(np.linspace(2, 1, 20)) <= 10
    assert count_warm_up(np.array([5.0, 1.0, 1.0])) == 0
    assert count_warm_up(np.ones(12)) == 0


@pytest.mark.parametrize("n", [6, 12, 40])
def test_ninety_percent_intervals_hold_ninety_percent_of_the_truths(n: int) -> None:
    rng = np.random.default_rng(n)
    inside = 0
    for _ in range(1500):
        found = mean_interval(rng.normal(5.0, 0.3, n))
        assert found.error is not None
        inside += abs(found.value - 5.0) <= found.error
    assert 0.87 <= inside / 1500 <= 0.96


def test_the_interval_of_batches_that_resemble_their_neighbours_is_wider() -> None:
    """AR(1) with 0.6: treating the batches as independent would hold under 70%."""
    rng = np.random.default_rng(3)
    inside = naive = 0
    for _ in range(600):
        values, x = np.empty(40), rng.normal() / 0.8
        for i in range(40):
            x = 0.6 * x + rng.normal()
            values[i] = 50 + x
        found = mean_interval(values)
        assert found.error is not None
        inside += abs(found.value - 50) <= found.error
        naive += abs(found.value - 50) <= t90(39) * float(np.std(values, ddof=1)) / math.sqrt(40)
    assert naive / 600 < 0.70
    assert 0.80 <= inside / 600 <= 0.96


@pytest.mark.parametrize(("n", "ramp"), [(9, []), (24, [2.0, 1.2, 0.7, 0.4])])
def test_the_whole_summary_holds_its_intervals(n: int, ramp: list[float]) -> None:
    """Choosing the cut by the data must not make the interval a lie."""
    rng = np.random.default_rng(5)
    inside = 0
    for _ in range(3000):
        joules = 4.0 + 0.1 * rng.normal(size=n)
        joules[: len(ramp)] += ramp
        found = find_steady_state(batches([0.01] * n, joules.tolist()))
        assert found.energy_j.error is not None
        inside += abs(found.energy_j.value - 4.0) <= found.energy_j.error
    assert 0.87 <= inside / 3000 <= 0.95


def test_t_quantiles() -> None:
    assert t90(1) == pytest.approx(6.314)
    assert t90(30) == pytest.approx(1.697)
    assert t90(31) == pytest.approx(1.696, abs=0.003)
    assert t90(10_000) == pytest.approx(1.645, abs=0.001)
    assert t90(0) == math.inf


def test_a_single_value_has_no_interval() -> None:
    assert mean_interval(np.array([3.0])) == Uncertain(3.0, None)
    one = find_steady_state(batches([1.0], [5.0]))
    assert one.energy_j.error is None
    assert not one.within(0.5)
    assert any("only one batch" in n for n in one.notes)


def test_a_drift_is_noticed_and_noise_is_not_called_one() -> None:
    rng = np.random.default_rng(7)
    noise = rng.normal(0, 0.01, 40)
    rising = find_drift(1.0 + np.linspace(0, 0.2, 40) + noise)
    assert rising == pytest.approx(0.2 / 1.1, rel=0.15)
    falling = find_drift(1.0 - np.linspace(0, 0.2, 40) + noise)
    assert falling is not None and falling < 0
    assert find_drift(np.linspace(1.0, 1.01, 40)) is None, "1% is not worth a word"
    assert find_drift(np.array([1.0, 2.0, 3.0])) is None
    false_alarms = sum(find_drift(1.0 + rng.normal(0, 0.05, 30)) is not None for _ in range(300))
    assert false_alarms < 10
    found = find_steady_state(batches([0.01] * 40, (1.0 + np.linspace(0, 0.3, 40)).tolist()))
    assert any("energy per call drifts by +" in n for n in found.notes)
    assert not any("time per call" in n for n in found.notes)


def test_no_joules_at_all_is_no_crash() -> None:
    found = find_steady_state(batches([0.01] * 12, [0.0] * 12))
    assert found.energy_j.value == 0.0
    assert not found.within(0.5)


def test_time_and_energy_must_both_have_settled() -> None:
    seconds = [1.0] * 30
    joules = [9.0, 8.0, 7.0, 6.0, *([5.0, 5.01] * 13)]
    found = find_steady_state(batches(seconds, joules, calls=3))
    assert found.skipped >= 4
    assert found.calls == 3 * (30 - found.skipped)
    assert found.time_s.value == pytest.approx(1.0)
    assert found.energy_j.value == pytest.approx(5.005, rel=1e-3)
    assert found.power_w.value == pytest.approx(5.005, rel=1e-3)
