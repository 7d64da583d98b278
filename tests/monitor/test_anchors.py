"""The energy counter as an anchor: when it corrects the samples, by how much, and when it must not."""

from __future__ import annotations

import math

import pytest

from tessera.joules import Correction, correct_by_counter
from tessera.monitor.series import KEPT_ANCHORS, CounterAnchors, PowerSeries
from tessera.schema import Domain

S = 1_000_000_000


def made(
    seconds: float = 10.0, *, seen_w: float = 300.0, true_w: float = 300.0, gap: tuple[float, float] = (0, 0)
) -> tuple[PowerSeries, CounterAnchors]:
    """Samples of `seen_w` every 20 ms (none within the gap), and a counter of `true_w` that ticks every 100 ms."""
    series = PowerSeries(Domain(name="gpu0", source="test", resolution_s=0.02))
    for i in range(round(seconds / 0.02) + 1):
        series.extend([(i * 20_000_000, math.nan if gap[0] < i * 0.02 <= gap[1] else seen_w)])
    anchors = CounterAnchors(series)
    for k in range(1, round(seconds / 0.1) + 1):
        anchors.add(k * 100_000_000, 9_000 + true_w * k * 0.1)
    return series, anchors


def between(anchors: CounterAnchors, start_s: float, end_s: float) -> Correction | None:
    return correct_by_counter(anchors.first_after(round(start_s * S)), anchors.last_before(round(end_s * S)))


def test_the_counter_corrects_a_sensor_that_reads_low() -> None:
    _, anchors = made(seen_w=295.0)
    found = between(anchors, 1.0, 9.0)
    assert found is not None and found.used
    assert found.joules == pytest.approx(8 * 300.0)
    assert found.sampled.joules == pytest.approx(8 * 295.0)
    assert 0 < found.error_j < 0.01 * 8 * 300.0


def test_no_correction_under_two_seconds() -> None:
    _, anchors = made()
    assert between(anchors, 1.0, 2.9) is None
    assert between(anchors, 1.0, 3.0) is not None
    assert between(anchors, 20.0, 30.0) is None
    assert correct_by_counter(None, None) is None


def test_the_counter_fills_a_gap_of_the_samples() -> None:
    _, anchors = made(gap=(4.0, 7.0))
    found = between(anchors, 1.0, 9.0)
    assert found is not None and found.used
    assert found.joules == pytest.approx(8 * 300.0)
    assert found.sampled.joules == pytest.approx(5 * 300.0, rel=0.01)
    assert found.span_s - found.sampled.covered_s == pytest.approx(3.0, abs=0.03)


def test_a_counter_that_disagrees_is_not_believed_but_widens_the_error() -> None:
    _, anchors = made(seen_w=200.0, true_w=300.0)
    found = between(anchors, 1.0, 9.0)
    assert found is not None and not found.used
    assert found.joules == pytest.approx(8 * 200.0), "the samples' joules stand"
    assert found.error_j == pytest.approx(800.0)


def test_a_stuck_counter_is_no_anchor() -> None:
    _, anchors = made(true_w=0.0)
    assert between(anchors, 1.0, 9.0) is None


def test_a_reset_begins_a_new_epoch() -> None:
    _, anchors = made(10.0)
    series, _ = made(20.0)
    anchors._series = series
    for k in range(101, 200):
        anchors.add(k * 100_000_000, 30.0 * (k - 100))
    assert between(anchors, 5.0, 15.0) is None, "joules across a reset are not a difference"
    after = between(anchors, 11.0, 19.0)
    assert after is not None and after.joules == pytest.approx(8 * 300.0)


def test_after_a_restart_the_counter_begins_anew_even_if_it_reads_higher() -> None:
    """A driver that came back may have reset its counter: the joules since then are all that can be told."""
    _, anchors = made(10.0)
    anchors._series, _ = made(20.0)
    anchors.restart()
    for k in range(101, 200):
        anchors.add(k * 100_000_000, 50_000 + 30.0 * (k - 100))
    assert between(anchors, 5.0, 15.0) is None
    after = between(anchors, 11.0, 19.0)
    assert after is not None and after.joules == pytest.approx(8 * 300.0)


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
    found = anchors.last_before(1 << 62)
    assert found is not None and found.mark.joules == pytest.approx(11.5)


def test_first_and_last_are_inclusive() -> None:
    _, anchors = made(3.0)
    first, last = anchors.first_after(S), anchors.last_before(2 * S)
    assert first is not None and first.time_ns == S
    assert last is not None and last.time_ns == 2 * S
    assert anchors.first_after(100 * S) is None
    assert anchors.last_before(0) is None


def test_anchors_are_bounded() -> None:
    series = PowerSeries(Domain(name="gpu0", source="test", resolution_s=0.02))
    series.extend([(0, 100.0), (1 << 60, 100.0)])
    anchors = CounterAnchors(series)
    for k in range(KEPT_ANCHORS + 500):
        anchors.add(k * S, float(k))
    assert len(anchors) == KEPT_ANCHORS
