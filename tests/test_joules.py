"""Joules from samples, against an integration that sums interval by interval instead of subtracting running sums."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.joules import ZERO, DomainSamples, Mark, accumulate, mark, sum_domains, sum_windows, window_error_j
from tessera.schema import Domain, Energy, Hold

from brute_force import brute

EPOCH = 1_790_000_000_000_000_000
S = 1_000_000_000


watt = st.one_of(st.floats(0.0, 1000.0), st.just(math.nan))


@st.composite
def trains(draw: st.DrawFn) -> tuple[list[int], list[float], list[int], bool]:
    """Times, watts (with gaps), four cuts in order that may lie outside the samples, and the hold."""
    first = draw(st.sampled_from([0, 5_000_000_000, EPOCH]))
    steps = draw(st.lists(st.integers(1, 400_000_000), min_size=0, max_size=12))
    times = [first]
    for step in steps:
        times.append(times[-1] + step)
    watts = draw(st.lists(watt, min_size=len(times), max_size=len(times)))
    margin = 300_000_000
    cuts = draw(st.lists(st.integers(first - margin, times[-1] + margin), min_size=4, max_size=4))
    return times, watts, sorted(cuts), draw(st.booleans())


def marks(times: list[int], watts: list[float], at: list[int], *, mean: bool) -> list[Mark]:
    t, w = np.array(times, dtype=np.int64), np.array(watts)
    sums = accumulate(t, w, mean=mean)
    return [mark(t, w, sums, x, mean=mean) for x in at]


@settings(max_examples=300, deadline=None)
@given(trains())
def test_any_window_is_the_sum_of_its_intervals(train: tuple[list[int], list[float], list[int], bool]) -> None:
    times, watts, cuts, mean = train
    found = marks(times, watts, cuts, mean=mean)
    for (a, start), (b, end) in pairwise(zip(cuts, found, strict=True)):
        joules, covered = brute(times, watts, a, b, mean=mean)
        assert end.joules - start.joules == pytest.approx(joules, rel=1e-9, abs=1e-8)
        assert end.covered_s - start.covered_s == pytest.approx(covered, rel=1e-9, abs=1e-10)
        assert end.variance_j2 - start.variance_j2 >= -1e-12
    whole = brute(times, watts, cuts[0], cuts[-1], mean=mean)[0]
    assert found[-1].joules - found[0].joules == pytest.approx(whole, rel=1e-9, abs=1e-8)


def test_the_edges_of_a_ramp_are_exact() -> None:
    times = [0, 20_000_000, 60_000_000]
    watts = [100.0, 300.0, 300.0]
    start, end = marks(times, watts, [5_000_000, 15_000_000], mean=False)
    assert end.joules - start.joules == pytest.approx(0.010 * 200.0)  # 150 W to 250 W
    start, end = marks(times, watts, [15_000_000, 30_000_000], mean=False)
    assert end.joules - start.joules == pytest.approx(0.005 * 275.0 + 0.010 * 300.0)


def test_a_mean_holds_back_to_the_sample_before_it() -> None:
    times, watts = [0, 1_000_000_000, 2_000_000_000], [math.nan, 100.0, 400.0]
    start, end = marks(times, watts, [500_000_000, 1_250_000_000], mean=True)
    assert end.joules - start.joules == pytest.approx(0.5 * 100 + 0.25 * 400)


def test_nanoseconds_count_at_epoch_size() -> None:
    """A float64 of 1.8e18 ns has steps of 256 ns: differences must be taken as integers."""
    times, watts = [EPOCH, EPOCH + 10_000], [1e6, 1e6]
    start, end = marks(times, watts, [EPOCH + 1_001, EPOCH + 1_011], mean=False)
    assert end.joules - start.joules == pytest.approx(1e6 * 10e-9)


def test_nothing_is_added_beyond_the_samples_or_without_any() -> None:
    assert marks([], [], [0, 10], mean=False) == [ZERO, ZERO]
    start, end = marks([0, 1_000_000_000], [100.0, 100.0], [-5_000_000_000, 9_000_000_000], mean=False)
    assert end.joules - start.joules == pytest.approx(100.0)
    assert end.covered_s - start.covered_s == pytest.approx(1.0)
    one = marks([7], [100.0], [0, 100], mean=False)
    assert one[1].joules - one[0].joules == 0


def test_accumulate_goes_on_from_where_it_was() -> None:
    t = np.arange(10, dtype=np.int64) * 20_000_000
    w = np.linspace(50, 500, 10)
    whole = accumulate(t, w, mean=False, noise=0.01)
    first = accumulate(t[:6], w[:6], mean=False, noise=0.01)
    start = Mark(first.joules[-1], first.covered_s[-1], first.variance_j2[-1], 0.0)
    second = accumulate(t[5:], w[5:], mean=False, noise=0.01, start=start)
    np.testing.assert_allclose(second.joules, whole.joules[5:])
    np.testing.assert_allclose(second.variance_j2, whole.variance_j2[5:])


def test_noise_widens_the_error_and_averages_out() -> None:
    t = np.arange(101, dtype=np.int64) * 20_000_000
    w = np.full(101, 300.0)
    sums = accumulate(t, w, mean=False, noise=0.05)
    relative = [math.sqrt(sums.variance_j2[n]) / sums.joules[n] for n in (1, 100)]
    assert relative[0] == pytest.approx(0.05)
    assert relative[1] == pytest.approx(0.005)  # a hundred independent samples


def error(low: float, high: float, *, seconds: float = 1.0, gain: float = 0.0, blur_s: float = 0.02) -> float:
    n = round(seconds / 0.02) + 1
    times = [20_000_000 * i for i in range(n)]
    watts = [low if i % 2 else high for i in range(n)]
    start, end = marks(times, watts, [0, times[-1]], mean=False)
    return window_error_j(start, end, gain_error=gain, edge_s=blur_s / math.sqrt(12))


def test_the_error_grows_with_the_swing_and_the_level() -> None:
    assert error(300, 300) == 0
    assert 0 < error(290, 310) < error(200, 400) < error(100, 500)
    assert error(300, 300, gain=0.01) == pytest.approx(3.0)
    assert error(100, 500, gain=0.05) > error(100, 500)
    assert error(100, 500, blur_s=0.05) > error(100, 500, blur_s=0.0)


def test_the_edge_error_is_never_more_than_the_window_is_long() -> None:
    """A window of 1 ms with a blur of a second cannot be wrong by a second's joules."""
    times, watts = [0, 20_000_000, 40_000_000], [100.0, 700.0, 100.0]
    start, end = marks(times, watts, [20_000_000, 21_000_000], mean=False)
    assert 0 < window_error_j(start, end, gain_error=0.0, edge_s=0.3) < 600 * 0.001 * 1.65


def test_the_error_covers_the_truth_of_a_random_power() -> None:
    """90% intervals of windows over a random walk, sampled at a fiftieth of its steps, hold most of the truths."""
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(400):
        fine = np.clip(np.cumsum(rng.normal(0, 12, 2001)) + 400, 50, 900)  # every 0.4 ms
        t = np.arange(2001, dtype=np.int64) * 400_000
        times, watts = t[::50].tolist(), fine[::50].tolist()
        a, b = sorted(rng.integers(0, 2000, 2).tolist())
        start, end = marks(times, watts, [int(t[a]), int(t[b])], mean=False)
        truth = float(np.sum((fine[a:b] + fine[a + 1 : b + 1]) / 2) * 0.4e-3)
        error_j = window_error_j(start, end, gain_error=0, edge_s=0.01 / math.sqrt(12))
        inside += abs(end.joules - start.joules - truth) <= error_j
    assert inside >= 0.82 * 400


@pytest.mark.parametrize(("common_j", "expected"), [(0.0, 10.0), (3.0, math.hypot(12.0, 8.0)), (5.0, 20.0)])
def test_a_sum_adds_common_errors_linearly_and_the_rest_in_quadrature(common_j: float, expected: float) -> None:
    parts = [Energy(energy_j=100.0, error_j=5.0, common_error_j=common_j, time_s=1.0, source="x") for _ in range(4)]
    whole = sum_windows(parts)
    assert (whole.error_j, whole.common_error_j) == (pytest.approx(expected), 4 * common_j)
    assert sum_windows([sum_windows(parts[:2]), sum_windows(parts[2:])]).error_j == pytest.approx(expected)


@pytest.mark.parametrize("with_counter", [False, True])
@pytest.mark.parametrize("hold", [Hold.LINEAR, Hold.MEAN])
def test_windows_of_one_sensor_are_off_by_its_level_alike(with_counter: bool, hold: Hold) -> None:
    """However a stretch is cut, the sum of its windows is no surer than the sensor's level."""
    domain = Domain(name="gpu0", source="ring", resolution_s=0.02, sample_noise=0.01, gain_error=0.05, hold=hold)
    times = np.arange(EPOCH, EPOCH + 60_000_000_000, 20_000_000)
    ticks = times[::50] if with_counter else times[:0]
    watts = np.full(len(times), 300.0)
    column = DomainSamples(domain, times, watts, watts, ticks, 300.0 * (ticks - EPOCH) * 1e-9)
    edges = np.linspace(EPOCH + 1_000_000_000, EPOCH + 59_000_000_000, 401).astype(np.int64).tolist()
    parts = [column.energy(a, b) for a, b in pairwise(edges)]
    whole = sum_windows([sum_domains([part], part.time_s) for part in parts])
    level = parts[200].common_error_j / parts[200].energy_j
    assert 0.003 <= level < 0.006 if with_counter else level == pytest.approx(0.05)
    assert all(0.0 < p.common_error_j <= p.error_j for p in parts)
    assert 0.95 * level < whole.error_j / whole.energy_j < 1.2 * level


def test_samples_finer_than_their_average_show_how_far_an_edge_swings() -> None:
    """A pulse of two seconds through an average of one second, ten rows a second (`nvidia-smi -lms 100`).

    Ten rows, not the two next to it, show an edge: windows that begin and end near the pulse's edges.
    """
    times = np.arange(0, 12 * S, S // 10)
    covers = np.minimum(times, 7 * S) - np.maximum(times - S, 5 * S)  # the pulse, within the second before
    watts = 100.0 + 300.0 * np.maximum(covers, 0) / S
    domain = Domain(name="gpu0", source="x", resolution_s=0.1, lag_s=0.5, blur_s=1.0 / math.sqrt(12.0))
    column = DomainSamples.of(domain, times, watts)
    covered = []
    for start_s in np.arange(4.5, 5.5, 0.05):
        for end_s in np.arange(6.5, 7.5, 0.05):
            energy = column.energy(round(start_s * S), round(end_s * S))
            inside_s = min(end_s, 7.0) - max(start_s, 5.0)
            covered.append(abs(energy.energy_j - 100.0 * (end_s - start_s) - 300.0 * inside_s) <= energy.error_j)
    assert np.mean(covered) >= 0.9
