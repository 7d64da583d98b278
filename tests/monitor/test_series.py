"""Samples and counter ticks of a domain: exact for ever, bounded for days; when the counter corrects the samples."""

from __future__ import annotations

import dataclasses
import math
import resource
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.monitor.series import CounterAnchors, PowerSeries
from tessera.schema import Domain, Hold
from tessera.sensors.processes import OwnCpu, OwnCpuReading
from tessera.trace import PowerTrace

from brute_force import brute

S = 1_000_000_000


def domain(**kwargs: object) -> Domain:
    return Domain(name="gpu0", source="test", resolution_s=0.02, **kwargs)  # type: ignore[arg-type]


def fill(
    series: PowerSeries, power_w: Callable[[float], float], *, seconds: float, step_s: float = 0.02, batch: int = 50
) -> list[tuple[int, float]]:
    """Append samples in batches as a sampler would; returns them all."""
    step_ns = round(step_s * S)
    samples = [(i * step_ns, power_w(i * step_s)) for i in range(round(seconds / step_s) + 1)]
    for i in range(0, len(samples), batch):
        series.extend(samples[i : i + batch])
    return samples


def joules(series: PowerSeries, start_ns: int, end_ns: int) -> float:
    return series.mark(end_ns).joules - series.mark(start_ns).joules


def wave(t: float) -> float:
    return 400.0 + 200.0 * math.sin(t / 7.0) + (300.0 if int(t) % 60 == 0 else 0.0)


def test_repeats_and_old_samples_are_dropped_and_counted() -> None:
    series = PowerSeries(domain())
    assert series.extend([(10, 1.0), (20, 2.0)]) == 2
    assert series.extend([(10, 9.0), (20, 9.0), (30, 3.0), (25, 9.0), (30, 9.0)]) == 1
    assert series.extend([]) == 0
    column = series.column(0, 100)
    assert column.times_ns.tolist() == [10, 20, 30]
    assert column.watts.tolist() == [1.0, 2.0, 3.0]
    assert (series.last_ns, series.last_w) == (30, 3.0)


def cpu_reading(own_s: float) -> OwnCpuReading:
    return own_s, resource.struct_rusage([0.0] * 16)


def test_a_sample_is_divided_at_the_edges_in_it_by_cpu_time() -> None:
    series = PowerSeries(domain(hold=Hold.MEAN))
    for at, (watts, own_s) in enumerate([(math.nan, 0.0), (60.0, 0.6), (0.0, 0.6)]):
        series.extend([(at * S, watts)])
        series.note_cpu(OwnCpu(own_s, 0.0), 100.0)
    column = series.column(0, 2 * S)
    edges = [(S // 2, cpu_reading(0.1)), (S, cpu_reading(0.6)), (S // 4, cpu_reading(0.1)), (S // 4, cpu_reading(0.1))]
    times, watts = series.divide_samples(column.times_ns, column.watts, edges)
    assert times.tolist() == [0, S // 4, S // 2, S, 2 * S]
    assert math.isnan(watts[0]) and watts[1:].tolist() == pytest.approx([40.0, 0.0, 100.0, 0.0])
    many = [(k * S // 1000, cpu_reading(0.6e-3 * k)) for k in range(1, 1000)]
    times, watts = series.divide_samples(column.times_ns[1:2], column.watts[1:2], many)
    assert len(times) < 80 and watts.tolist() == pytest.approx([60.0] * len(times))


@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.floats(0, 1000) | st.just(math.nan)), min_size=2, max_size=20),
    st.sampled_from(list(Hold)),
)
def test_samples_one_by_one_are_summed_as_many_at_once(steps: list[tuple[int, float]], hold: Hold) -> None:
    times = np.cumsum([step_ns for step_ns, _ in steps]).tolist()
    samples = [(t, w) for t, (_, w) in zip(times, steps, strict=True)]
    one, many = (PowerSeries(domain(hold=hold, sample_noise=0.02)) for _ in range(2))
    for sample in samples:
        one.extend([sample])
    many.extend(samples)
    for at_ns in range(times[0], times[-1] + 1, max((times[-1] - times[0]) // 7, 1)):
        assert dataclasses.astuple(one.mark(at_ns)) == pytest.approx(dataclasses.astuple(many.mark(at_ns)))


def test_samples_of_a_series_without_cpu_time_are_not_divided() -> None:
    series = PowerSeries(domain(hold=Hold.MEAN))
    series.extend([(0, math.nan), (S, 60.0)])
    times, watts = series.divide_samples(np.array([0, S]), np.array([math.nan, 60.0]), [(S // 2, cpu_reading(0.1))])
    assert times.tolist() == [0, S] and watts[1] == 60.0


def test_samples_that_replace_others_leave_those_before_them() -> None:
    series = PowerSeries(domain(hold=Hold.MEAN))
    series.extend([(0, math.nan), (S, 1.0), (2 * S, 0.0), (3 * S, 0.0)])
    assert series.extend([(2 * S, 4.0), (3 * S, 4.0), (4 * S, 2.0)], replaces=True) == 3
    assert [joules(series, 0, k * S) for k in (1, 2, 3, 4)] == pytest.approx([1.0, 5.0, 9.0, 11.0])


def test_an_empty_series_knows_nothing() -> None:
    series = PowerSeries(domain())
    assert series.last_ns is None and series.last_w is None
    assert not series.covers(0)
    assert series.mark(5).joules == 0
    assert len(series.column(0, 10).times_ns) == 0


def test_the_newest_power_after_a_gap_is_unknown() -> None:
    series = PowerSeries(domain())
    series.extend([(0, 100.0), (10, math.nan)])
    assert series.last_w is None


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 10**8), st.floats(0, 900) | st.just(math.nan)), min_size=1, max_size=60),
    st.integers(1, 7),
    st.booleans(),
    st.integers(0, 50_000_000),
)
def test_appending_in_any_batches_gives_the_brute_integral(
    steps: list[tuple[int, float]], batch: int, mean: bool, lag_ns: int
) -> None:
    times = np.cumsum([dt for dt, _ in steps]).tolist()
    watts = [w for _, w in steps]
    series = PowerSeries(domain(hold=Hold.MEAN if mean else Hold.LINEAR, lag_s=lag_ns * 1e-9))
    samples = list(zip(times, watts, strict=True))
    for i in range(0, len(samples), batch):
        series.extend(samples[i : i + batch])
    a, b = times[0] - 5, (times[0] + times[-1]) // 2
    expected = brute(times, watts, a + lag_ns, b + lag_ns, mean=mean)
    assert joules(series, a, b) == pytest.approx(expected[0], rel=1e-9, abs=1e-8)
    assert series.mark(b).covered_s - series.mark(a).covered_s == pytest.approx(expected[1], abs=1e-9)


def test_covers_counts_the_lag() -> None:
    series = PowerSeries(domain(lag_s=0.015))
    series.extend([(0, 1.0), (20_000_000, 1.0)])
    assert series.covers(5_000_000)
    assert not series.covers(5_000_001)


def test_marks_taken_fresh_stay_exact_when_the_samples_are_forgotten() -> None:
    thin, whole = PowerSeries(domain(), fine=256, coarse=64), PowerSeries(domain(), fine=1 << 20)
    step, marks = 20_000_000, []
    samples = [(i * step, wave(i * 0.02)) for i in range(20_000)]
    for i in range(0, len(samples), 50):
        thin.extend(samples[i : i + 50])
        whole.extend(samples[i : i + 50])
        at = samples[i][0] + 7_000_000
        if thin.covers(at):
            marks.append((at, thin.mark(at)))
    for at, mark in marks:
        assert mark.joules == pytest.approx(whole.mark(at).joules, rel=1e-12)
        assert mark.covered_s == pytest.approx(whole.mark(at).covered_s, rel=1e-12)
    assert len(thin.column(0, 1 << 60).times_ns) < 400


def test_a_day_at_ten_hertz_is_bounded_and_its_sum_exact() -> None:
    series = PowerSeries(domain())
    step_s, batch, hours = 0.1, 1000, 24
    total, most = 0.0, 0
    n = round(hours * 3600 / step_s)
    for i in range(0, n, batch):
        t = np.arange(i, i + batch) * step_s
        watts = 400 + 200 * np.sin(t / 700.0)
        series.extend(list(zip((np.arange(i, i + batch) * 100_000_000).tolist(), watts.tolist(), strict=True)))
        most = max(most, series.nbytes)
    end_s = (n - 1) * step_s
    total = 400 * end_s + 200 * 700 * (1 - math.cos(end_s / 700.0))
    assert joules(series, 0, 1 << 60) == pytest.approx(total, rel=1e-6)
    assert series.mark(1 << 60).covered_s == pytest.approx(end_s)
    assert most < 4_000_000
    # What is long past is still known, coarsely: an hour in the middle of the day.
    a, b = 5 * 3600, 6 * 3600
    hour = 400 * 3600 + 200 * 700 * (math.cos(a / 700.0) - math.cos(b / 700.0))
    assert joules(series, a * S, b * S) == pytest.approx(hour, rel=1e-3)


def test_marks_within_merged_rows_add_up_and_those_outside_add_nothing() -> None:
    series = PowerSeries(domain(), fine=256, coarse=64)
    fill(series, lambda t: 300.0, seconds=120)
    cuts = [-10 * S, 0, 13 * S + 12345, 60 * S, round(119.99 * S), 120 * S, 500 * S]
    found = [series.mark(c).joules for c in cuts]
    assert found[0] == found[1] == 0
    assert found[-1] == pytest.approx(300 * 120)
    for cut, value in zip(cuts[1:-1], found[1:-1], strict=True):
        assert value == pytest.approx(300.0 * cut / S, rel=1e-9)


def test_no_joules_are_lost_between_the_last_row_and_the_first_fine_sample() -> None:
    """A slow sensor: the one interval at the seam is 5 s long."""
    series = PowerSeries(domain(), fine=8, coarse=64)
    fill(series, lambda t: 100.0, seconds=500, step_s=5.0, batch=1)
    for t in range(500):
        assert series.mark(t * S).joules == pytest.approx(100.0 * t)


def test_the_column_of_a_window_has_one_sample_beyond_each_edge() -> None:
    series = PowerSeries(domain(lag_s=0.02))
    fill(series, lambda t: 100.0 + t, seconds=2)
    column = series.column(S, S + 50_000_000)
    first, last = int(column.times_ns[0]), int(column.times_ns[-1])
    assert first <= S + 20_000_000 < first + 20_000_000
    assert last - 20_000_000 < S + 70_000_000 <= last
    np.testing.assert_array_equal(column.peaks_w, column.watts)


def test_the_column_over_merged_rows_keeps_peaks_and_energy() -> None:
    series = PowerSeries(domain(), fine=512, coarse=256)
    spike = 40.0  # long merged by the end
    fill(series, lambda t: 900.0 if abs(t - spike) < 0.001 else 300.0, seconds=100)
    column = series.column(0, 100 * S)
    assert len(column.times_ns) < 800
    assert np.nanmax(column.peaks_w) == 900.0
    assert np.nanmax(column.watts) < 400.0, "the mean of a second is not its peak"
    pwr = PowerTrace({"gpu0": column}, start_ns=0, end_ns=100 * S)
    assert pwr.peak_w == 900.0
    assert pwr.energy_j == pytest.approx(300 * 100, rel=0.01)
    crest = pwr.crest_factor()
    assert crest is not None and crest == pytest.approx(3.0, rel=0.02)


def test_a_window_wholly_in_the_past_reads_the_rows_around_it_only() -> None:
    """50 W in the first minute, 500 W ever after: what comes later must not leak into the past."""
    series = PowerSeries(domain(), fine=256, coarse=1024)
    fill(series, lambda t: 50.0 if t < 60 else 500.0, seconds=600)
    column = series.column(20 * S, 30 * S)
    assert column.times_ns[0] <= 20 * S and 30 * S <= column.times_ns[-1] <= 33 * S
    pwr = PowerTrace({"gpu0": column}, start_ns=20 * S, end_ns=30 * S)
    assert pwr.energy().energy_j == pytest.approx(500.0, rel=1e-6)
    assert pwr.energy().coverage == pytest.approx(1.0)
    assert pwr.peak_w == 50.0


def test_a_trace_that_begins_in_the_rows_is_covered_from_its_first_moment() -> None:
    series = PowerSeries(domain(), fine=256, coarse=1024)
    fill(series, lambda t: 200.0, seconds=60)
    column = series.column(round(10.7 * S), 60 * S)
    energy = PowerTrace({"gpu0": column}, start_ns=round(10.7 * S), end_ns=60 * S).energy()
    assert energy.coverage == pytest.approx(1.0, abs=1e-6)
    assert energy.energy_j == pytest.approx(200 * 49.3, rel=1e-6)


def test_a_gap_is_still_a_gap_after_merging() -> None:
    series = PowerSeries(domain(), fine=256, coarse=1024)
    fill(series, lambda t: math.nan if 20 <= t < 30 else 200.0, seconds=60)
    column = series.column(0, 60 * S)
    inside = (column.times_ns > 21 * S) & (column.times_ns < 29 * S)
    assert inside.any()
    assert np.isnan(column.watts[inside]).all(), "nothing known is not 0 W"
    assert np.nanmin(column.watts) == pytest.approx(200.0)
    assert series.mark(60 * S).covered_s == pytest.approx(50.0, abs=0.05)


def test_memory_is_bounded_when_every_sample_is_its_own_second() -> None:
    series = PowerSeries(domain(), fine=128, coarse=64)
    samples = fill(series, lambda t: 100.0, seconds=20_000, step_s=2.0, batch=3)
    assert len(series.column(0, 1 << 60).times_ns) < 128 + 64 + 3
    assert joules(series, 0, samples[-1][0]) == pytest.approx(100.0 * 20_000)


def test_what_the_sensor_has_learnt_of_its_domain_is_taken_over() -> None:
    series = PowerSeries(domain())
    series.extend([(0, 100.0), (S, 200.0)])
    series.update(domain(lag_s=0.5, note="learnt"))
    assert series.domain.note == "learnt"
    assert series.covers(S // 2) and not series.covers(S // 2 + 1)


# -- the counter ---------------------------------------------------------------------------------------------


def test_a_tick_waits_for_the_samples_to_reach_it() -> None:
    series = PowerSeries(Domain(name="gpu0", source="test", resolution_s=0.02, lag_s=0.015))
    anchors = CounterAnchors(series)
    anchors.add(100_000_000, 50.0)
    assert len(anchors) == 0
    series.extend([(0, 100.0), (110_000_000, 100.0)])
    anchors.catch_up()
    assert len(anchors) == 0, "the sample at 110 ms shows what was at 95 ms"
    series.extend([(130_000_000, 100.0)])
    anchors.catch_up()
    assert len(anchors) == 1
    found = anchors.history.last_before(1 << 62)
    assert found is not None and found.mark.joules == pytest.approx(11.5)
