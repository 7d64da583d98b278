"""The response of a sensor is learnt where the load shows it, and not where it does not: known truth.

The short form of benchmarks/measure/learn_sensor.py.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np
import pytest

from tessera.attribute.fit import Response, response_of
from tessera.attribute.learn_response import Exposed, LearntResponse, horizon_s, learn_response
from tessera.attribute.solve import attribute
from tessera.errors import MeasurementError
from tessera.sensors._nvml_power import OTHER_LAG_ERROR_S, RING_BLUR_S, RING_LAG_ERROR_S, RING_LAG_S, RingReader
from tessera.sensors.response_store import ResponseFit, combine, find, keep_learnt

from places import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks" / "measure"))
import known_truth as truth  # type: ignore[import-not-found]
import learn_sensor as measure  # type: ignore[import-not-found]

KNOWN = Response(tau_s=0.011, box_s=0.010, delay_error_s=0.010)
SEED = 103


def measure_one(name: str, look_s: float, seed: int = SEED) -> tuple[Any, ResponseFit | None]:
    ring = dataclasses.replace(measure.BOARDS[name], look_s=look_s)
    ran, _, board = truth.run_program(measure.training(seed), np.random.default_rng(seed), measure.SECONDS, ring)
    return ring, measure.learn(measure.describe(ring), ran, board)


@pytest.mark.parametrize("look_s", measure.LOOKS_S)
@pytest.mark.parametrize("name", ["5 ms", "15 ms", "40 ms, boxcar"])
def test_lag_and_blur_are_learnt_from_a_training_run(name: str, look_s: float) -> None:
    ring, fit = measure_one(name, look_s)
    assert fit is not None
    assert fit.lag_s == pytest.approx(ring.lag_s, abs=measure.GOAL_S)
    assert fit.blur_s == pytest.approx(ring.blur_s, abs=measure.GOAL_S)
    assert abs(fit.lag_s - ring.lag_s) < 2 * fit.lag_error_s, "its own error says how far off it may be"
    assert fit.idle_w is None or abs(fit.idle_w - truth.STATIC_W) < 2 * fit.idle_error_w
    assert 15.0 < fit.seconds <= measure.SECONDS


def test_power_that_wanders_over_seconds_does_not_pass_for_a_longer_tail() -> None:
    """As noise of single samples it moved lag and blur of this load by 2.5 ms."""
    ring = dataclasses.replace(measure.BOARDS["40 ms"], regular=False)
    ran, _, board = truth.run_program(measure.training(100), np.random.default_rng([100, 2]), measure.SECONDS, ring)
    fit = measure.learn(measure.describe(ring), ran, board)
    assert fit is not None
    assert fit.lag_s == pytest.approx(ring.lag_s, abs=0.001)
    assert fit.blur_s == pytest.approx(ring.blur_s, abs=0.001)


@pytest.mark.parametrize("seed", [105, 111])
def test_stamps_that_are_far_off_do_not_widen_the_response(seed: int) -> None:
    """A quarter of the stamps is up to 8 ms off: by least squares the blur of 3.2 ms was 0.8 and 1.1 ms more."""
    ring, fit = measure_one("5 ms", 0.020, seed)
    assert fit is not None
    assert fit.blur_s == pytest.approx(ring.blur_s, abs=0.0005)


def test_windows_without_a_trace_are_closer_with_the_learnt_lag() -> None:
    ring, fit = measure_one("5 ms, boxcar", 0.020)
    assert fit is not None
    rng = np.random.default_rng(1)
    board = truth.make_board(truth.square(0.3)(rng, measure.SECONDS), rng, ring)
    domain = measure.describe(ring)
    before, after = (np.mean(measure.window_errors(d, board)) for d in (domain, combine([fit]).apply(domain)))
    assert after < 0.7 * before


@pytest.mark.parametrize("name", ["5 ms", "40 ms, boxcar"])
def test_windows_of_a_traced_run_are_within_three_percent(name: str) -> None:
    ring, fit = measure_one(name, 0.100)
    assert fit is not None
    ran, _, board = truth.run_program(measure.training(SEED), np.random.default_rng(1), measure.SECONDS, ring)
    known = combine([fit]).apply(measure.describe(ring))
    assert np.median(measure.traced_errors(known, ran, board)) < 3.0


def test_mixtures_recorded_on_an_h200_agree_with_one_another() -> None:
    fits = measure.learn_mixtures()
    together = combine(list(fits.values()))
    assert len(fits) >= 6
    assert together.lag_s == pytest.approx(RING_LAG_S, abs=RING_LAG_ERROR_S)
    assert together.blur_s == pytest.approx(RING_BLUR_S, abs=0.002)
    assert together.lag_error_s < 0.0012
    assert all(abs(fit.lag_s - together.lag_s) < 0.0015 for fit in fits.values())


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (truth.loop(0.020, 4, jitter=0.0), "a loop that the sensor smears"),
        (truth.loop(0.060, 5, jitter=0.0), "a loop looks the same a period later"),
        (truth.layers(12, 3, 5e-4, 0.010), "kernels shorter than the sensor's memory"),
    ],
)
def test_loops_that_cannot_tell_teach_nothing(program: Any, why: str) -> None:
    ran, _, board = truth.run_program(program, np.random.default_rng(4), 6.0, truth.Ring())
    assert measure.learn(measure.describe(truth.Ring()), ran, board) is None, why


# -- what is refused -------------------------------------------------------------------------------------------------


def learn(times_s: Any, watts: Any, on_s: list[tuple[float, float]], seconds: float = 10.0) -> LearntResponse:
    """Learn from a load that is on between some times."""
    start, end = (np.array([t[i] for t in on_s]) for i in (0, 1))
    off = np.concatenate([[-1.0], end]), np.concatenate([start, [seconds]])
    begin, stop = np.concatenate([start, off[0]]), np.concatenate([end, off[1]])
    ran = Exposed(
        start_ns=np.round(begin * 1e9).astype(np.int64), end_ns=np.round(stop * 1e9).astype(np.int64),
        seconds=stop - begin, cls=np.repeat([0, 1], [len(start), len(off[0])]), prior_w=np.array([500.0, 120.0]),
        sd_w=np.array([200.0, 40.0]),
    )  # fmt: skip
    return learn_response(np.round(times_s * 1e9).astype(np.int64), watts, ran, KNOWN)


def show(on_s: list[tuple[float, float]], response: Response, seconds: float = 10.0) -> tuple[Any, Any]:
    """A sensor's samples of a load that is on between some times."""
    times = np.arange(0.3, seconds, 0.02)
    share = sum(response.step_response(times - a) - response.step_response(times - b) for a, b in on_s)
    return times, 120.0 + 480.0 * share + np.random.default_rng(0).normal(0, 2, len(times))


def draw_bursts(count: int) -> list[tuple[float, float]]:
    at = np.sort(np.random.default_rng(1).uniform(0.5, 9.5, count))
    return [(float(a), float(a) + 0.03 + 0.3 / count) for a in at if a < 9.4]


def test_bursts_show_the_response() -> None:
    bursts = [(0.5 + 0.173 * k, 0.5 + 0.173 * k + 0.03 + 0.002 * k) for k in range(50)]
    learnt = learn(*show(bursts, Response(tau_s=0.006, box_s=0.004, dead_s=0.002)), bursts)
    assert learnt.fit.lag_s == pytest.approx(0.010, abs=0.001)
    assert learnt.gain > 30.0
    assert learnt.corrects(dataclasses.replace(KNOWN, delay_error_s=0.0025)), "an H200's 16 ms are plainly wrong"
    assert learnt.combine(KNOWN).delay_s == pytest.approx(0.010, abs=0.001)


def test_a_response_that_fits_is_not_replaced() -> None:
    bursts = [(0.5 + 0.173 * k, 0.5 + 0.173 * k + 0.03 + 0.002 * k) for k in range(50)]
    learnt = learn(*show(bursts, KNOWN), bursts)
    assert not learnt.corrects(dataclasses.replace(KNOWN, delay_error_s=0.0025))
    assert learnt.corrects(KNOWN), "a delay that is not known is better learnt"


@pytest.mark.parametrize(
    ("on_s", "words"),
    [
        ([(-1.0, 10.0)], "edge|explains|known to"),
        ([(3.0, 6.0)], "edge|known to"),
        ([], "edge|explains|known to"),
    ],
)
def test_a_steady_load_and_few_edges_are_refused(on_s: list[tuple[float, float]], words: str) -> None:
    with pytest.raises(MeasurementError) as caught:
        learn(*show(on_s, KNOWN), on_s or [(20.0, 20.1)])
    assert caught.value.why is not None
    assert any(word in caught.value.why for word in words.split("|")), caught.value.why


def test_power_of_another_program_is_refused() -> None:
    bursts = [(0.5 + 0.2 * k, 0.55 + 0.2 * k + 0.002 * k) for k in range(40)]
    others = [(0.4 + 0.37 * k, 0.5 + 0.37 * k + 0.003 * k) for k in range(24)]
    times, _ = show(bursts, KNOWN)
    with pytest.raises(MeasurementError, match="cannot be learnt"):
        learn(times, show(others, KNOWN)[1], bursts)


def test_few_samples_are_refused() -> None:
    times, watts = show([(1.0, 2.0)], KNOWN)
    with pytest.raises(MeasurementError, match="cannot be learnt"):
        learn(times[:30], watts[:30], [(1.0, 2.0)])


def test_many_classes_are_joined_without_losing_their_watts() -> None:
    """What 200 small classes should draw is in the one that they become."""
    count = 200
    start = np.arange(count, dtype=np.int64) * 10_000_000
    ran = Exposed(
        start_ns=start, end_ns=start + 5_000_000, seconds=np.full(count, 0.005), cls=np.arange(count),
        prior_w=np.linspace(150.0, 700.0, count), sd_w=np.full(count, 100.0),
    )  # fmt: skip
    joined = ran.join_small(40)
    assert len(joined.prior_w) == 40
    assert joined.prior_w[-1] == 700.0, "the idle board stays itself"
    before, after = (float(np.sum(r.seconds * r.prior_w[r.cls])) for r in (ran, joined))
    assert after == pytest.approx(before)


# -- how it is used --------------------------------------------------------------------------------------------------


def test_the_default_is_an_h200s_and_vague_elsewhere() -> None:
    here, elsewhere = (RingReader(None, None).domain(label, "") for label in ("NVIDIA H200", "NVIDIA L4"))
    assert (here.lag_error_s, elsewhere.lag_error_s) == (RING_LAG_ERROR_S, OTHER_LAG_ERROR_S)
    response = response_of(here, 0.02)
    assert response.delay_s == pytest.approx(RING_LAG_S)
    assert response.blur_s == pytest.approx(RING_BLUR_S)
    assert response_of(elsewhere, 0.02).delay_error_s == OTHER_LAG_ERROR_S


def test_a_domain_with_a_learnt_lag_has_its_response() -> None:
    domain = dataclasses.replace(RingReader(None, None).domain("NVIDIA L4", ""), lag_s=0.040, blur_s=0.020)
    response = response_of(domain, 0.02)
    assert (response.delay_s, response.blur_s) == (pytest.approx(0.040), pytest.approx(0.020))


def test_how_far_back_a_sample_may_look_grows_with_the_sensor() -> None:
    assert horizon_s(KNOWN) == pytest.approx(0.2)
    assert horizon_s(Response(tau_s=0.0, box_s=1.1)) > 1.5


def test_a_host_and_means_teach_nothing() -> None:
    """Only what samples a board at moments has a response to learn."""
    ran, _, board = truth.run_program(measure.training(SEED), np.random.default_rng(1), 8.0, truth.Ring())
    from tessera.schema import Hold

    domain = dataclasses.replace(measure.describe(truth.Ring()), hold=Hold.MEAN)
    assert not attribute(measure.timeline_of(ran), measure.power_of(domain, board)).learnt


def test_what_a_run_has_taught_is_found_by_the_next_sensor(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    ring = measure.BOARDS["5 ms"]
    ran, _, board = truth.run_program(measure.training(SEED), np.random.default_rng(SEED), measure.SECONDS, ring)
    domain = measure.describe(ring)
    table = keep_learnt(attribute(measure.timeline_of(ran), measure.power_of(domain, board)))
    found = find(domain)
    assert found is not None
    assert found.lag_s == table.learnt[0][1].lag_s == pytest.approx(ring.lag_s, abs=0.001)
    keep_learnt(table)
    assert find(domain) == found, "a run that is read twice counts once"


@pytest.mark.parametrize(("lag_error_s", "corrects"), [(0.002, True), (0.0135, False)])
def test_what_is_known_gives_way_only_to_what_is_known_better(lag_error_s: float, corrects: bool) -> None:
    """A loop of 46 ms passed for a lag of 92 ± 13.5 ms, of a sensor whose lag of 16 ms is known."""
    fit = ResponseFit(
        start_ns=0, seconds=40.0, lag_s=0.092, lag_error_s=lag_error_s, blur_s=0.041, blur_error_s=0.01
    )  # fmt: skip
    learnt = LearntResponse(response=Response(tau_s=0.04, box_s=0.01, dead_s=0.047), fit=fit, gain=45.0)
    assert learnt.corrects(dataclasses.replace(KNOWN, delay_error_s=0.0025)) == corrects
    assert learnt.corrects(KNOWN), "what is not known at all is better learnt"
