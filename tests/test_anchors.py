"""The energy counter rules: joules of windows by its ticks, and by samples that are read as the ticks show."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from tessera.anchors import KEPT_ANCHORS, CounterHistory
from tessera.joules import DomainSamples
from tessera.schema import Domain, Energy

S = 1_000_000_000
MS = 1_000_000
RING = Domain(
    name="gpu0", source="ring", resolution_s=0.02, blur_s=0.012, sample_noise=0.012, gain_error=0.005
)  # fmt: skip


def board(
    true_w: Callable[[float], float], *, seen: float = 1.0, ticks: Callable[[int, float], float] = lambda _, j: j,
    hole: tuple[float, float] = (0, 0), seconds: float = 20.0,
) -> DomainSamples:  # fmt: skip
    """Samples every 20 ms that show `seen` times the true power; a counter of the truth that is read each second."""
    fine = np.arange(round(seconds / 0.001)) * 0.001 + 0.0005
    so_far = np.concatenate([[0.0], np.cumsum([true_w(t) * 0.001 for t in fine.tolist()])])
    times = np.arange(round(seconds / 0.02) + 1)
    watts = np.array([seen * true_w(i * 0.02) for i in times.tolist()])
    at = times * 0.02
    watts = np.where((at > hole[0]) & (at <= hole[1]), np.nan, watts)
    read = np.arange(1, int(seconds))
    joules = [ticks(int(k), float(so_far[k * 1000])) for k in read]
    return DomainSamples(RING, times * 20 * MS, watts, watts, read * S, np.array(joules))


def energy(column: DomainSamples, start_s: float, end_s: float) -> Energy:
    return column.energy(round(start_s * S), round(end_s * S))


def in_step(t: float) -> float:
    """640 W and 110 W, 10 ms each: samples every 20 ms see only the one."""
    return 640.0 if (t + 0.003) % 0.02 < 0.01 else 110.0


@pytest.mark.parametrize("window", [(3.1, 11.3), (3.0, 4.25), (5.3, 5.7)])
def test_a_load_in_step_with_the_samples_has_the_joules_of_the_counter(window: tuple[float, float]) -> None:
    """The samples show 640 W, the counter 375 W: it was not believed above 5%, and windows kept the 640 W."""
    found = energy(board(in_step), *window)
    assert found.energy_j == pytest.approx(375.0 * (window[1] - window[0]), rel=0.04)
    assert abs(found.energy_j - 375.0 * (window[1] - window[0])) <= found.error_j
    assert found.source == "ring+counter"


def test_a_window_in_step_says_so() -> None:
    note = board(in_step).counter.note_step(3 * S, 9 * S)
    assert note is not None and "in step with the sensor" in note and "71% more" in note
    assert board(lambda t: 300.0).counter.note_step(3 * S, 9 * S) is None


def test_a_ring_that_reads_high_is_corrected_in_short_windows_too() -> None:
    column = board(lambda t: 400.0 + 100.0 * math.sin(t), seen=1.03)
    found = energy(column, 10.2, 10.5)
    plain = energy(DomainSamples.of(RING, column.times_ns, column.watts), 10.2, 10.5)
    assert found.energy_j == pytest.approx(plain.energy_j / 1.03, rel=0.003)
    assert found.error_j < 0.02 * found.energy_j


def test_another_load_than_the_one_in_step_is_not_corrected_by_it_without_saying_so() -> None:
    column = board(lambda t: in_step(t) if t < 10 else 150.0)
    found = energy(column, 10.2, 10.6)
    assert abs(found.energy_j - 60.0) <= found.error_j


def test_the_interval_widens_when_the_samples_scatter_around_the_counter() -> None:
    rng = np.random.default_rng(0)
    levels = rng.uniform(-0.15, 0.15, 30)
    steady, beating = board(lambda t: 300.0), board(lambda t: 300.0)
    watts = beating.watts * (1 + levels[(beating.times_ns // S).astype(int)])
    beating = DomainSamples(RING, beating.times_ns, watts, watts, beating.ticks_ns, beating.ticks_j)
    narrow, wide = energy(steady, 10.1, 10.6), energy(beating, 10.1, 10.6)
    assert wide.error_j > 5 * narrow.error_j


def test_a_late_sensor_is_found_out() -> None:
    """It shows power 30 ms later than its domain says."""
    rng = np.random.default_rng(1)
    levels = np.repeat(rng.uniform(100, 700, 400), 3)  # each lasts 60 ms

    def true_w(t: float) -> float:
        return float(levels[min(int(max(t, 0.0) / 0.02), len(levels) - 1)])

    column = board(true_w)
    late = DomainSamples(RING, column.times_ns + 30 * MS, column.watts, column.watts, column.ticks_ns, column.ticks_j)
    assert late.counter._lag.off_s == pytest.approx(0.030, abs=0.006)
    assert column.counter._lag.off_s == pytest.approx(0.0, abs=0.006)


def test_the_counter_fills_a_hole_of_the_samples() -> None:
    column = board(lambda t: 300.0, hole=(6.0, 9.0))
    rows = energy(column, 2.5, 12.5)
    assert rows.energy_j == pytest.approx(2100.0, rel=0.01) and rows.coverage == pytest.approx(0.7, abs=0.01)
    found = column.energy(round(2.5 * S), round(12.5 * S), fill_gaps=True)
    assert found.energy_j == pytest.approx(3000.0, rel=1e-3)
    assert found.coverage == pytest.approx(1.0, abs=0.001)
    assert found.error_j < 0.01 * found.energy_j


def test_a_stuck_counter_is_not_live() -> None:
    """From 5 s to 9 s it counts nothing, and goes on from there: the samples give the joules of such a window."""
    column = board(lambda t: 300.0, ticks=lambda k, j: j if k <= 5 else 1500.0 if k <= 9 else j - 1200.0)
    found = energy(column, 2.5, 15.5)
    assert found.energy_j == pytest.approx(13 * 300.0, rel=0.01)
    after = energy(column, 10.5, 18.5)
    assert after.energy_j == pytest.approx(8 * 300.0, rel=0.01)


def test_a_reset_begins_anew() -> None:
    column = board(lambda t: 300.0, ticks=lambda k, j: j if k < 10 else j - 2900.0)
    assert len({anchor.epoch for anchor in column.counter.anchors}) == 2
    assert energy(column, 5.5, 15.5).energy_j == pytest.approx(3000.0, rel=0.01)


def test_a_counter_that_jumps_is_not_live() -> None:
    column = board(lambda t: 300.0, ticks=lambda k, j: j if k < 10 else j + 1e6)
    assert energy(column, 5.5, 15.5).energy_j == pytest.approx(3000.0, rel=0.01)


def test_after_a_restart_higher_values_are_not_subtracted() -> None:
    history, column = CounterHistory(RING), board(lambda t: 300.0)
    for k in range(1, 10):
        history.add(k * S, 300.0 * k, column.mark(k * S))
    history.restart()
    for k in range(10, 19):
        history.add(k * S, 500.0 + 300.0 * k, column.mark(k * S))
    found = history.energy(5 * S, column.mark(5 * S), 15 * S, column.mark(15 * S))
    assert found.energy_j == pytest.approx(3000.0, rel=0.01)


def test_first_and_last_are_inclusive() -> None:
    history = board(lambda t: 300.0).counter
    first, last = history.first_after(S), history.last_before(2 * S)
    assert first is not None and first.time_ns == S
    assert last is not None and last.time_ns == 2 * S
    assert history.first_after(100 * S) is None and history.last_before(0) is None


def test_the_memory_of_ticks_is_bounded_and_a_long_window_keeps_its_first() -> None:
    history, mark = CounterHistory(RING), board(lambda t: 300.0).mark(0)
    history.add(S, 300.0, mark)
    first = history.first_after(0)
    for k in range(2, 3 * KEPT_ANCHORS):
        history.add(k * S, 300.0 * k, mark)
    assert KEPT_ANCHORS <= len(history.anchors) <= 2 * KEPT_ANCHORS
    end_ns = (3 * KEPT_ANCHORS - 1) * S
    found = history.energy(0, mark, end_ns, mark, first)
    assert found.energy_j == pytest.approx(300.0 * (3 * KEPT_ANCHORS - 2), rel=1e-6)
