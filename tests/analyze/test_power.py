"""Peaks, percentiles, ramps and spectra of power whose truth is known: sines, squares, steps, an H200 that trains."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera import analyze
from tessera.analyze.power import TOTAL, PowerResult
from tessera.analyze.spectrum import (
    BAND_HZ,
    MIN_POINTS,
    EvenSamples,
    alias_hz,
    compute_spectrum,
    even_parts,
    find_ramps,
    sensor_gain,
)
from tessera.analyze.spikes import make_curve
from tessera.attribute.fit import Response
from tessera.errors import ArgumentError, MeasurementError
from tessera.joules import DomainSamples
from tessera.schema import Domain, Hold, Telemetry
from tessera.timeline import Builder, Timeline
from tessera.trace import PowerTrace

import synthetic_run
from places import REPOSITORY

MS = 1_000_000
PLAIN = Domain(name="gpu0", source="test", resolution_s=0.02)
MEANS = Domain(name="cpu0", source="rapl", resolution_s=0.02, hold=Hold.MEAN)
RECORDING = REPOSITORY.parent / "shared" / "h200"


def trace(watts: object, *, step_ms: float = 20.0, domain: Domain = PLAIN, jitter_ms: float = 0.0) -> PowerTrace:
    """Samples of a function of seconds, or given ones, evenly or with jitter."""
    count = len(watts) if isinstance(watts, (list, np.ndarray)) else 3000
    times = np.arange(count) * step_ms * MS
    times = times + np.random.default_rng(0).uniform(-jitter_ms, jitter_ms, count) * MS
    times = times.astype(np.int64)
    values = watts(times * 1e-9) if callable(watts) else watts
    return PowerTrace(
        {domain.name: DomainSamples.of(domain, times, values)}, start_ns=int(times[0]), end_ns=int(times[-1])
    )


def sine(mean_w: float, amplitude_w: float, hz: float) -> object:
    return lambda t: mean_w + amplitude_w * np.sin(2.0 * np.pi * hz * t + 0.3)


def square(low_w: float, high_w: float, hz: float, duty: float = 0.5) -> object:
    return lambda t: np.where((t * hz) % 1.0 < duty, high_w, low_w)


# -- the spectrum ---------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(10.0, 900.0), min_size=16, max_size=200), st.sampled_from([PLAIN, MEANS]),
    st.sampled_from([5.0, 20.0, 100.0]),
)  # fmt: skip
def test_the_lines_sum_to_the_variance_whatever_the_samples(
    values: list[float], domain: Domain, step_ms: float
) -> None:
    power = trace(np.array(values), domain=domain, step_ms=step_ms)
    for part in even_parts(make_curve(power, None, power.start_ns, power.end_ns)):
        found = compute_spectrum(part)
        assert (found is None) == (len(part.watts) < MIN_POINTS)
        if found is not None:
            assert found.ac_w2 == pytest.approx(float(np.var(part.watts)), rel=1e-9, abs=1e-6)
            assert found.band_w2(0.0, 1e9) == pytest.approx(found.ac_w2, rel=1e-9)


def test_a_power_log_needs_no_trace(tmp_path: Path) -> None:
    rows = "".join(f"{1_790_000_000_000_000 + i * 100_000},gpu0,{200 + i % 7}\n" for i in range(60))
    (tmp_path / "power.csv").write_text("epoch_us,domain,watts\n" + rows)
    for log in (tmp_path / "power.csv", str(tmp_path / "power.csv")):
        assert analyze.power(log).rows[0]["peak_w"] == 206.0


@pytest.mark.parametrize("hz", [0.5, 3.0, 10.0, 19.0])
@pytest.mark.parametrize("domain", [PLAIN, MEANS])
def test_a_sine_is_half_its_amplitude_squared_at_its_frequency(hz: float, domain: Domain) -> None:
    row = analyze.power(trace(sine(400.0, 100.0, hz), domain=domain)).rows[0]
    assert row["band_w2"] == pytest.approx(5000.0, rel=0.01)
    assert row["band_pct"] > 99.0
    assert row["dominant_hz"] == pytest.approx(hz, abs=0.02)


@pytest.mark.parametrize(("hz", "lost"), [(0.5, 0.01), (3.0, 0.03), (10.0, 0.15)])
def test_jitter_of_the_samples_costs_little(hz: float, lost: float) -> None:
    row = analyze.power(trace(sine(400.0, 100.0, hz), jitter_ms=2.0)).rows[0]
    assert 5000.0 * (1.0 - lost) < row["band_w2"] < 5050.0
    assert row["dominant_hz"] == pytest.approx(hz, abs=0.02)


def test_what_lies_outside_the_band_is_not_in_it() -> None:
    both = trace(lambda t: sine(400.0, 100.0, 22.0)(t) + sine(0.0, 50.0, 2.0)(t))  # type: ignore[operator]
    row = analyze.power(both).rows[0]
    assert row["band_w2"] == pytest.approx(1250.0, rel=0.02)
    assert row["band_pct"] == pytest.approx(20.0, abs=0.5)
    assert row["dominant_hz"] == pytest.approx(22.0, abs=0.02)


def test_the_band_that_can_be_resolved_is_said() -> None:
    fast = analyze.power(trace(sine(400.0, 100.0, 2.0)))
    assert fast.facts["resolvable_to_hz"] == pytest.approx(25.0)
    assert not any("can be resolved" in note for note in fast.notes)
    ten_s = analyze.power(trace(sine(400.0, 100.0, 2.0)(np.arange(1990) * 5e-3), step_ms=5.0))  # type: ignore[operator]
    assert not any("can be resolved" in note for note in ten_s.notes), "only 0.1-20 Hz of 0.1-20 Hz"
    slow = analyze.power(trace(sine(400.0, 100.0, 0.4), step_ms=100.0))
    assert slow.facts["resolvable_to_hz"] == pytest.approx(5.0)
    assert any("of 0.1-20 Hz only 0.1-5 Hz can be resolved" in note for note in slow.notes)
    assert any("too few samples" in note for note in analyze.power(trace(np.array([100.0, 200.0, 150.0]))).notes)


def test_noise_and_constants_have_no_dominant_frequency() -> None:
    noise = np.random.default_rng(1).normal(400.0, 4.0, 3000)
    assert analyze.power(trace(noise)).rows[0]["dominant_hz"] is None
    flat = analyze.power(trace(np.full(200, 300.0)))
    assert flat.rows[0]["dominant_hz"] is None and flat.rows[0]["ramp_up_w_per_s"] is None
    assert flat.rows[0]["crest_factor"] == pytest.approx(1.0)
    # One cycle in the whole recording is its shape, not a frequency.
    assert analyze.power(trace(sine(400.0, 100.0, 1 / 60))).rows[0]["dominant_hz"] is None


def test_a_gap_leaves_its_longest_stretch() -> None:
    power = trace(sine(400.0, 100.0, 2.0))
    column = power.columns["gpu0"]
    watts = column.watts.copy()
    watts[900:1000] = np.nan
    gappy = PowerTrace({"gpu0": DomainSamples.of(PLAIN, column.times_ns, watts)}, start_ns=0, end_ns=power.end_ns)
    found = analyze.power(gappy)
    assert any("longest stretch without a gap, 40 s" in note for note in found.notes)
    assert found.rows[0]["band_w2"] == pytest.approx(5000.0, rel=0.01)


def test_what_the_sensor_shows_of_a_swing() -> None:
    assert sensor_gain(Response(tau_s=0.0, box_s=0.0), 20.0) == 1.0
    assert sensor_gain(Response(tau_s=0.011, box_s=0.0), 1 / (2 * math.pi * 0.011)) == pytest.approx(math.sqrt(0.5))
    assert sensor_gain(Response(tau_s=0.0, box_s=0.05), 20.0) == pytest.approx(
        0.0, abs=1e-9
    )  # a whole cycle is averaged
    assert alias_hz(10.0, 0.02) == 10.0 and alias_hz(30.0, 0.02) == pytest.approx(20.0)


# -- levels ---------------------------------------------------------------------------------------------------------


def test_crest_factors_that_are_known() -> None:
    assert _crest(square(0.0, 500.0, 0.5), MEANS) == pytest.approx(math.sqrt(2.0), rel=0.01)
    assert _crest(square(0.0, 500.0, 0.5, duty=0.1), MEANS) == pytest.approx(math.sqrt(10.0), rel=0.02)
    m, a = 400.0, 100.0
    assert _crest(sine(m, a, 0.7)) == pytest.approx((m + a) / math.sqrt(m * m + a * a / 2.0), rel=1e-3)
    assert _crest(sine(m, m, 0.7)) == pytest.approx(2.0 / math.sqrt(1.5), rel=1e-3)  # from 0 to twice its mean


def _crest(watts: object, domain: Domain = PLAIN) -> float:
    value = analyze.power(trace(watts, domain=domain)).rows[0]["crest_factor"]
    assert isinstance(value, float)
    return value


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_percentiles_are_by_time(seed: int, mean: bool) -> None:
    """Uneven samples: against ten thousand moments, evenly spaced."""
    rng = np.random.default_rng(seed)
    gaps_ms = rng.uniform(5.0, 60.0, 400)
    times = (np.cumsum(gaps_ms) * MS).astype(np.int64)
    watts = np.abs(300.0 + np.cumsum(rng.normal(0.0, 8.0, 400)))
    domain = MEANS if mean else PLAIN
    power = PowerTrace(
        {domain.name: DomainSamples.of(domain, times, watts)}, start_ns=int(times[0]), end_ns=int(times[-1])
    )
    row = analyze.power(power).rows[0]
    moments = np.linspace(times[0], times[-1], 10_000)[1:]
    seen = watts[np.searchsorted(times, moments)] if mean else np.interp(moments, times, watts)
    spread = float(np.ptp(watts))
    for key, q in (("p50_w", 50.0), ("p99_w", 99.0)):
        # Where hardly any moment is near a percentile, it is known by its rank and not by its value.
        rank = 100.0 * float(np.mean(seen <= row[key]))
        near = row[key] == pytest.approx(float(np.percentile(seen, q)), abs=0.03 * spread)
        assert near or rank == pytest.approx(q, abs=0.5)
    assert row["mean_w"] == pytest.approx(float(np.mean(seen)), abs=0.01 * spread)
    assert row["p50_w"] <= row["p99_w"] <= row["peak_w"]


def test_a_merged_rows_peak_counts() -> None:
    column = trace(np.full(100, 300.0)).columns["gpu0"]
    merged = DomainSamples(column.domain, column.times_ns, column.watts, np.where(np.arange(100) == 50, 700.0, 300.0))
    row = analyze.power(PowerTrace({"gpu0": merged}, start_ns=0, end_ns=int(column.times_ns[-1]))).rows[0]
    assert row["peak_w"] == 700.0 and row["crest_factor"] == pytest.approx(700.0 / 300.0)


# -- ramps ----------------------------------------------------------------------------------------------------------


def test_ramps_are_over_one_step_of_the_sensor() -> None:
    watts = np.full(200, 200.0)
    watts[50:] = 600.0
    watts[120:] = 500.0
    row = analyze.power(trace(watts)).rows[0]
    assert row["ramp_up_w_per_s"] == pytest.approx(400.0 / 0.02, rel=0.01)
    assert row["ramp_down_w_per_s"] == pytest.approx(-100.0 / 0.02, rel=0.01)
    up, down = find_ramps([EvenSamples(start_ns=0, step_s=0.02, watts=watts)])
    assert up is not None and up.start_ns == pytest.approx(49 * 20 * MS) and down is not None
    assert find_ramps([]) == (None, None)


def test_ramps_of_noise_are_called_noise() -> None:
    domain = Domain(name="gpu0", source="test", resolution_s=0.02, sample_noise=0.01)
    flat = np.random.default_rng(2).normal(400.0, 4.0, 2000)
    assert any("within the sensor's noise" in note for note in analyze.power(trace(flat, domain=domain)).notes)
    flat[1000:] += 300.0
    assert not any("within the sensor's noise" in n for n in analyze.power(trace(flat, domain=domain)).notes)


# -- with what ran --------------------------------------------------------------------------------------------------


def stepping(hz: float, seconds: float = 30.0) -> tuple[Timeline, PowerTrace]:
    """Steps of half a period of work and half of waiting, as a sensor of 20 ms without lag sees them."""
    b = Builder()
    apart = 1.0 / hz
    for i in range(int(seconds * hz)):
        start = round(i * apart * 1e9)
        b.add("region", f"step_{i}", start, round((i + 1) * apart * 1e9), thread=1)
        b.add("kernel", "gemm" if i % 2 else "conv", start, start + round(0.5e9 * apart), device=0, stream=7)
    grid = np.arange(0.0, seconds, 0.0005)
    level = np.where((grid * hz) % 1.0 < 0.5, 600.0, 150.0)
    seen = level.reshape(-1, 40).mean(axis=1)
    times = ((np.arange(len(seen)) + 0.5) * 20 * MS).astype(np.int64)
    return b.build(), PowerTrace(
        {"gpu0": DomainSamples.of(PLAIN, times, seen)}, start_ns=0, end_ns=round(seconds * 1e9)
    )


def test_the_step_rate_is_that_of_the_median_step() -> None:
    b = Builder()
    at = 0
    for i in range(20):
        lasts = 40 * MS if i == 9 else 10 * MS
        b.add("region", f"step_{i}", at, at + lasts, thread=1)
        b.add("op", "aten::mm", at, at + lasts, thread=1)
        at += lasts
    times = np.arange(0, at, 2 * MS, dtype=np.int64)
    power = PowerTrace({"gpu0": DomainSamples.of(PLAIN, times, np.full(len(times), 300.0))}, start_ns=0, end_ns=at)
    found = analyze.power(b.build(), power=power)
    assert found.facts["step_hz"] == pytest.approx(100.0) and "median step 100 Hz" in str(found)


def test_the_dominant_frequency_is_the_step_rate() -> None:
    timeline, power = stepping(2.0)
    found = analyze.power(timeline, power=power)
    assert found.rows[0]["dominant_hz"] == pytest.approx(2.0, abs=0.04)
    assert found.facts["step_hz"] == pytest.approx(2.0)
    assert found.facts["dominant_is"] == "the step rate"
    assert "start after idle" in found.facts["during"]["ramp_up"]
    assert any(note.startswith("steepest rise") for note in found.notes)
    assert found.correlation is not None and found.facts["checklist"]["throttle"] == "no"  # no spike
    spiky = analyze.power(timeline, power=power, threshold_w=500.0)
    assert spiky.facts["spikes"] == len(spiky.spikes) == 60 and spiky.spikes[0].kernels
    assert spiky.facts["checklist"]["throttle"] == "unknown"
    assert "throttle" in spiky.missing and "checklist: throttle" not in spiky.missing  # said once
    assert "first kernel to the last" in spiky.title and spiky.facts["window_s"] <= spiky.facts["recorded_s"]
    whole = power.energy("gpu0", max(0, timeline.start_ns), min(power.end_ns, timeline.end_ns))
    assert spiky.facts["recorded_j"] == pytest.approx(whole.energy_j) and "w2" not in str(spiky)


def test_steps_too_fast_for_the_sensor_fold_back() -> None:
    timeline, power = stepping(30.0)
    found = analyze.power(timeline, power=power)
    assert found.rows[0]["dominant_hz"] == pytest.approx(20.0, abs=0.1)
    assert found.facts["dominant_is"].startswith("the step rate, folded back")


def test_another_rhythm_is_not_the_steps() -> None:
    timeline, _ = stepping(2.0)
    found = analyze.power(timeline, power=trace(sine(400.0, 100.0, 3.3), step_ms=20.0))
    assert found.facts["dominant_is"] == "not the step rate (2 Hz)"


def test_throttling_is_told_in_episodes() -> None:
    power = trace(sine(400.0, 100.0, 2.0))
    told = [
        Telemetry(time_ns=i * 100 * MS, domain="gpu0", throttle=("power cap",) if 10 <= i < 15 or i == 30 else ())
        for i in range(100)
    ]
    found = analyze.power(power, telemetry=told)
    assert [(t.start_ns, t.end_ns) for t in found.throttled] == [(10**9, 1_500 * MS), (3 * 10**9, 3_100 * MS)]
    assert found.facts["throttled_s"] == pytest.approx(0.6) and found.facts["throttle_reasons"] == "power cap"
    assert analyze.power(power, telemetry={"gpu0": told}).facts["throttled_s"] == pytest.approx(0.6)
    silent = analyze.power(power)
    assert silent.facts["throttled_s"] is None and "throttle" in silent.missing


def test_every_domain_has_a_row_and_the_counted_ones_together() -> None:
    gpu, cpu = trace(sine(400.0, 100.0, 2.0)), trace(np.full(3000, 80.0), domain=MEANS)
    inner = Domain(name="gpu0.memory", source="test", resolution_s=0.02, counted=False)
    memory = DomainSamples.of(inner, gpu.columns["gpu0"].times_ns, np.full(3000, 60.0))
    both = PowerTrace({**gpu.columns, **cpu.columns, "gpu0.memory": memory}, start_ns=0, end_ns=gpu.end_ns)
    found = analyze.power(both)
    rows = {r["domain"]: r for r in found.rows}
    assert found.domain == "gpu0" and list(rows) == ["gpu0", "cpu0", "gpu0.memory", TOTAL]
    assert rows[TOTAL]["mean_w"] == pytest.approx(480.0, abs=1.0)
    assert rows["cpu0"]["energy_j"] == pytest.approx(80.0 * both.seconds, rel=0.01)
    assert analyze.power(both, domain="cpu0").domain == "cpu0"


@pytest.mark.parametrize("boards", [1, 3, 4, 8])
def test_a_log_of_many_boards_has_a_row_for_each(tmp_path: Path, boards: int) -> None:
    """From four on, their sum has a short name: `gpu0 to gpu7 (8)`."""
    path = tmp_path / "smi.csv"
    rows = [f"2026/03/01 10:00:{s:02d}.000, {gpu}, 700.00 W" for s in range(30) for gpu in range(boards)]
    path.write_text("timestamp, index, power.draw.instant [W]\n" + "\n".join(rows) + "\n")
    result = analyze.power(path)
    summed, *others = result.rows
    assert summed["mean_w"] == pytest.approx(700.0 * boards, rel=1e-6)
    assert summed["peak_w"] == pytest.approx(700.0 * boards, rel=1e-6)
    if boards > 1:
        assert summed["domain"] == TOTAL
        assert [r["domain"] for r in others] == [f"gpu{i}" for i in range(boards)]
        assert sum(r["energy_j"] for r in others) == pytest.approx(summed["energy_j"])


def test_a_run_file_brings_everything(tmp_path: Path) -> None:
    run = synthetic_run.make(40).write(tmp_path / "run.tessera")
    found = analyze.power(tmp_path / "run.tessera", threshold_w=430.0)
    assert isinstance(found, PowerResult) and found.correlation is not None
    assert found.rows[0]["energy_j"] == pytest.approx(run.power().mean_w * 0.83, rel=0.1)
    data = json.loads(found.to_json())
    assert data["kind"] == "power" and data["spikes"][0]["kernels"] and data["checklist"]
    assert len(found.to_frame()) == len(found.rows)
    for key in ("peak_w", "p99_w", "crest_factor", "ramp_up_w_per_s", "band_w2", "dominant_hz"):
        assert key in found.rows[0]


def test_what_is_wrong_is_said() -> None:
    timeline, power = stepping(2.0, 4.0)
    with pytest.raises(MeasurementError, match="no power was recorded"):
        analyze.power(timeline)
    with pytest.raises(ArgumentError, match="given twice"):
        analyze.power(power, power=power)
    with pytest.raises(ArgumentError, match="threshold_w"):
        analyze.power(power, threshold_w=-1.0)
    with pytest.raises(MeasurementError, match="no domain 'gpu7'"):
        analyze.power(power, domain="gpu7")


@pytest.mark.skipif(not (RECORDING / "gpt2_train.power.json").exists(), reason="the recording is not here")
def test_gpt2_on_an_h200() -> None:
    from analyze.test_correlate import RING

    samples = json.loads((RECORDING / "gpt2_train.power.json").read_text())["samples_mw"]
    times, watts = np.array([t for t, _ in samples]) * 1000, np.array([w for _, w in samples]) * 1e-3
    power = PowerTrace({"gpu0": DomainSamples.of(RING, times, watts)}, start_ns=int(times[0]), end_ns=int(times[-1]))
    found = analyze.power(RECORDING / "gpt2_train.kineto.json.gz", power=power)
    row = found.rows[0]
    assert row["mean_w"] == pytest.approx(484, abs=2) and row["peak_w"] == pytest.approx(609.6, abs=0.1)
    assert row["crest_factor"] == pytest.approx(1.24, abs=0.01)
    assert found.facts["step_hz"] == pytest.approx(17.1, abs=0.1)
    assert found.facts["shown_at_20_hz_pct"] == pytest.approx(55, abs=1)
    assert BAND_HZ == (0.1, 20.0) and any("only 1.46-20 Hz" in note for note in found.notes)
