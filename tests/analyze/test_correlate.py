"""Spikes tied to what ran: synthetic loads with known truth seen through a sensor, and a recording of an H200."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.analyze.correlate import Correlation, correlate
from tessera.analyze.spikes import Chance, choose_threshold, find_spikes, format_level, make_curve, p_values
from tessera.errors import ArgumentError, MeasurementError
from tessera.joules import DomainSamples
from tessera.schema import Domain, Hold, PowerEvent, Telemetry
from tessera.sensors._nvml_power import RING_BLUR_S, RING_LAG_S, RING_NOISE, RING_RESOLUTION_S
from tessera.timeline import Builder, Launch, Timeline
from tessera.timeline.intervals import union
from tessera.trace import PowerTrace

from places import REPOSITORY

T0 = 1_790_000_000_000_000_000  # epoch
MS = 1_000_000
RECORDING = REPOSITORY.parent / "shared" / "h200"
RING = Domain(
    name="gpu0", source="nvml-samples", resolution_s=RING_RESOLUTION_S, lag_s=RING_LAG_S, blur_s=RING_BLUR_S,
    sample_noise=RING_NOISE,
)  # fmt: skip
Intervals = Sequence[tuple[float, float]]


def power(levels: Sequence[tuple[float, float, float]], seconds: float, *, base_w: float = 400.0, seed: int = 0,
          noise: float = RING_NOISE, domain: Domain = RING) -> PowerTrace:  # fmt: skip
    """A load of (start s, end s, watts) as the ring shows it: late by 15 ms, smeared over 24 ms, every 20 ms."""
    grid = np.full(round(seconds * 1000) + 200, base_w)
    for start, end, watts in levels:
        grid[100 + round(start * 1000) : 100 + round(end * 1000)] = watts
    seen = np.convolve(grid, np.full(24, 1 / 24), mode="same")
    rng = np.random.default_rng(seed)
    times = np.arange(0, round(seconds * 1000) + 40, 20) + rng.integers(-2, 3, (round(seconds * 1000) + 40 + 19) // 20)
    at = np.clip(times + 100 - round(domain.lag_s * 1000), 0, len(grid) - 1)
    watts = seen[at] * (1.0 + rng.normal(0.0, noise, len(times)))
    ns = T0 + times * MS
    return PowerTrace({domain.name: DomainSamples.of(domain, ns, watts)}, start_ns=int(ns[0]), end_ns=int(ns[-1]))


def timeline(seconds: float, collectives: Intervals = (), copies: Intervals = (), step_s: float = 0.01) -> Timeline:
    """Kernels all the time, with collectives and copies beside them."""
    b = Builder()
    reduce = b.intern_launch(Launch(collective_type="all_reduce", collective_bytes=1 << 20, group="0"))
    upload = b.intern_launch(Launch(memcpy_dir="HtoD"))
    for i in range(round(seconds / step_s)):
        start = T0 + round(i * step_s * 1e9)
        b.add("kernel", f"gemm_{i % 2}", start, start + round(step_s * 0.9e9), device=0, stream=7)
    for start, end in collectives:
        b.add("collective", "ncclDevKernel_AllReduce", *_ns(start, end), device=0, stream=20, launch=reduce)
    for start, end in copies:
        b.add("memcpy", "Memcpy HtoD", *_ns(start, end), device=0, stream=9, launch=upload)
    return b.build()


def test_a_mean_that_the_end_of_the_timeline_cuts_off_is_no_spike() -> None:
    cpu = Domain(name="cpu0", source="modelled", resolution_s=0.1, hold=Hold.MEAN, basis="modelled")
    times = [T0 + k * 100 * MS for k in range(21)]
    column = DomainSamples.of(cpu, times, [math.nan, 8.0] + [2.0] * 9 + [8.0] + [2.0] * 9)
    trace = PowerTrace({"cpu0": column}, start_ns=T0, end_ns=times[-1])
    curve = make_curve(trace, None, T0 + 99 * MS, times[-1])
    (spike,) = find_spikes(curve, 5.0)
    assert spike.time_s == pytest.approx(0.1) and spike.start_ns == T0 + 1000 * MS
    assert len(find_spikes(make_curve(trace, None, T0, times[-1]), 5.0)) == 2


def _ns(start: float, end: float) -> tuple[int, int]:
    return T0 + round(start * 1e9), T0 + round(end * 1e9)


def bursts(rng: np.random.Generator, count: int, seconds: float, length: float = 0.08) -> list[tuple[float, float]]:
    """Stretches at random times, at least 0.1 s apart."""
    slots = np.sort(rng.choice(round(seconds / 0.2) - 1, count, replace=False))
    starts = slots * 0.2 + rng.uniform(0.0, 0.1, count) + 0.01
    return [(float(s), float(s) + length) for s in starts]


# -- Spikes ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.floats(80.0, 1200.0), st.floats(0.0, RING_NOISE), st.floats(2.0, 60.0))
def test_noise_on_a_flat_load_gives_no_spike(seed: int, watts: float, noise: float, seconds: float) -> None:
    trace = power([], seconds, base_w=watts, seed=seed, noise=noise)
    curve = make_curve(trace, "gpu0", T0, T0 + round(seconds * 1e9))
    assert find_spikes(curve, choose_threshold(curve, 95.0)) == []


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 8), st.floats(550.0, 900.0))
def test_every_burst_is_one_spike_where_it_was(seed: int, count: int, watts: float) -> None:
    rng = np.random.default_rng(seed)
    truth = bursts(rng, count, 10.0)
    trace = power([(a, b, watts) for a, b in truth], 10.0, seed=seed)
    curve = make_curve(trace, "gpu0", T0, T0 + 10**10)
    spikes = find_spikes(curve, (400.0 + watts) / 2)
    assert len(spikes) == count
    for spike, (start, end) in zip(spikes, truth, strict=True):
        # The lag is corrected: within the blur and half a sample of the truth.
        assert (spike.start_ns - T0) * 1e-9 == pytest.approx(start, abs=0.022)
        assert (spike.end_ns - T0) * 1e-9 == pytest.approx(end, abs=0.022)
        assert spike.peak_w == pytest.approx(watts, rel=0.06)
        assert spike.foot_ns <= spike.start_ns <= spike.peak_ns <= spike.end_ns
        assert spike.rise_w_per_s is not None and spike.rise_w_per_s > (watts - 400.0) / 0.08
    assert find_spikes(curve, (400.0 + watts) / 2, rise_w_per_s=1e6) == []


def test_a_dip_within_the_noise_does_not_split_a_spike() -> None:
    times = T0 + np.arange(12) * 20 * MS
    watts = np.array([400, 400, 600, 599, 590, 601, 600, 400, 400, 600, 400, 400.0])
    trace = PowerTrace({"gpu0": DomainSamples.of(RING, times, watts)}, start_ns=0, end_ns=1)
    spikes = find_spikes(make_curve(trace, None, T0 - 10**9, T0 + 10**9), 595.0)
    assert [s.number for s in spikes] == [1, 2]
    assert spikes[0].peak_w == 601.0 and spikes[1].peak_w == 600.0


def test_gaps_are_no_spikes_and_means_have_steps() -> None:
    domain = Domain(name="cpu0", source="rapl", resolution_s=0.1, hold=Hold.MEAN)
    times = T0 + np.arange(10) * 100 * MS
    watts = np.array([100, 100, 100, math.nan, 100, 300, 300, 100, 100, 100.0])
    trace = PowerTrace({"cpu0": DomainSamples.of(domain, times, watts)}, start_ns=0, end_ns=1)
    curve = make_curve(trace, None, T0, T0 + 10**9)
    assert curve.mean_w == pytest.approx((6 * 100 + 2 * 300) / 8) and curve.crest_factor == pytest.approx(
        300 / 173.2, rel=0.01
    )
    (spike,) = find_spikes(curve, 200.0)
    assert (spike.start_ns - T0, spike.end_ns - T0) == (400 * MS, 600 * MS)
    assert spike.rise_w_per_s == pytest.approx(2000.0)


# -- What they fall on ----------------------------------------------------------------------------------------------


def test_spikes_of_collectives_are_found_out() -> None:
    rng = np.random.default_rng(5)
    truth = bursts(rng, 12, 12.0)
    found = correlate(timeline(12.0, truth), power([(a, b, 712.0) for a, b in truth], 12.0), threshold_w=600.0)
    assert len(found.spikes) == 12 and found.domain == "gpu0" and found.lag_s == RING_LAG_S
    all_of_them = next(a for a in found.aligned if a.name == "collectives")
    assert all_of_them.verdict == "aligned" and all_of_them.p_value < 0.01
    assert all_of_them.in_spikes > 0.6 and all_of_them.outside < 0.01
    assert found.answer("aligned").verdict == "yes" and "collectives" in found.answer("aligned").evidence
    for gemm in ("gemm_0", "gemm_1"):  # runs all the time: no reason
        assert next(a for a in found.aligned if a.name == gemm).verdict != "aligned"
    for spike in found.spikes:
        reduce = next(k for k in spike.kernels if k.kind == "collective")
        assert reduce.share > 0.6 and (reduce.lift is None or reduce.lift > 5)
    text = str(found)
    assert "12 spikes above 600 W" in text and "ncclDevKernel_AllReduce (overlap" in text and "[yes]" in text


def test_spikes_of_something_else_are_not_blamed_on_collectives() -> None:
    """Under the null the p-value is what it says: of a hundred innocent runs few are called aligned."""
    called = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        spikes, late = bursts(rng, 8, 7.8), float(rng.uniform(0.0, 0.2))  # or both would keep to one grid of 0.2 s
        innocent = [(a + late, b + late) for a, b in bursts(rng, 8, 7.8)]
        trace = power([(a, b, 700.0) for a, b in spikes], 8.0, seed=seed)
        found = correlate(timeline(8.0, innocent, step_s=0.05), trace, threshold_w=550.0)
        called += next(a for a in found.aligned if a.name == "collectives").verdict == "aligned"
    assert called <= 12  # 5 expected; more than 12 by chance in one of a thousand


def test_a_periodic_load_is_judged_by_its_phase_alone() -> None:
    """Twenty steps in lock step are one coincidence, not twenty."""
    spikes = [(i * 0.5 + 0.1, i * 0.5 + 0.2) for i in range(20)]
    trace = power([(a, b, 700.0) for a, b in spikes], 10.0)
    same = correlate(timeline(10.0, [(a, b) for a, b in spikes]), trace, threshold_w=550.0)
    half = correlate(timeline(10.0, [(i * 0.5, i * 0.5 + 0.3) for i in range(20)]), trace, threshold_w=550.0)
    assert same.aligned[0].verdict == "aligned"
    assert half.aligned[0].verdict == "cannot tell" and half.aligned[0].p_value > 0.3
    assert half.answer("aligned").verdict == "unknown" and half.answer("aligned").needs


def test_too_few_spikes_say_nothing() -> None:
    found = correlate(timeline(5.0, [(1.0, 1.1)]), power([(1.0, 1.1, 700.0)], 5.0), threshold_w=550.0)
    assert len(found.spikes) == 1
    assert found.aligned[0].verdict == "cannot tell" and "only 1 spike" in found.aligned[0].reason
    assert found.answer("aligned").verdict == "unknown"


def test_a_flat_load_has_no_spike_and_says_so() -> None:
    found = correlate(timeline(4.0, [(1.0, 1.1)]), power([], 4.0))
    assert found.spikes == () and str(found).startswith("no spike above")
    assert {a.key: a.verdict for a in found.checklist} == {
        "aligned": "no", "throttle": "no", "feeds": "unknown", "links": "no"
    }  # fmt: skip


@pytest.mark.parametrize("threshold_w", [8.4837, 0.25, 412.449, 1234.5])
def test_one_threshold_is_written_one_way(threshold_w: float) -> None:
    level = format_level(threshold_w)
    flat = correlate(timeline(4.0), power([], 4.0, base_w=threshold_w / 2), threshold_w=threshold_w)
    assert f"no spike above {level} " in str(flat) and f"nothing exceeds {level}\n" in str(flat)
    held = correlate(timeline(4.0), power([], 4.0, base_w=threshold_w * 2), threshold_w=threshold_w)
    assert f"1 spike above {level}," in str(held) and f"the power is above {level} for" in str(held)


def test_spikes_that_rise_after_idling_are_tied_to_it() -> None:
    rng = np.random.default_rng(2)
    truth = bursts(rng, 10, 10.0)
    b = Builder()
    for start, end in truth:
        b.add("kernel", "gemm", *_ns(start, end), device=0)
    b.add("region", "step_0", *_ns(0.0, truth[5][0] - 0.02), thread=1)
    b.add("region", "step_1", *_ns(truth[5][0] - 0.02, 10.0), thread=1)
    found = correlate(b.build(), power([(a, b, 700.0) for a, b in truth], 10.0, base_w=120.0), threshold_w=400.0)
    idle = next(a for a in found.aligned if a.kind == "start after idle")
    assert idle.verdict == "aligned" and idle.in_spikes > 0.8
    assert found.answer("aligned").verdict == "yes"
    near = [b for s in found.spikes for b in s.boundaries]
    assert sum(b.kind == "start after idle" for b in near) >= 8 and any(b.kind == "step" for b in near)
    assert all(abs(b.offset_s) < 0.1 for b in near)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6), st.integers(1, 6))
def test_p_values_are_shares_and_the_best_of_many_is_held_to_all(seed: int, count: int, things: int) -> None:
    rng = np.random.default_rng(seed)
    curve = make_curve(power([], 5.0, seed=seed), None, T0, T0 + 5 * 10**9)
    chance = Chance(curve)

    def spans(n: int):
        return union(*np.array([_ns(a, b) for a, b in bursts(rng, n, 5.0)]).T)

    above = spans(count)
    scores = [chance.overlap(above, spans(3)) for _ in range(things)]
    together, alone = p_values(scores), [p_values([s])[0] for s in scores]
    assert all(0.0 < a <= t <= 1.0 for a, t in zip(alone, together, strict=True))
    assert p_values([chance.overlap(above, above)])[0] < 0.2
    everywhere = union(np.array([curve.start_ns - 10**9]), np.array([curve.end_ns + 10**9]))
    assert p_values([chance.overlap(above, everywhere)]) == [1.0]


# -- The checklist --------------------------------------------------------------------------------------------------


def telemetry(seconds: float, hot: Intervals, *, every: float = 0.05, **fields: object) -> list[Telemetry]:
    """Rows by the monotonic clock; within `hot` the board is capped and slow."""
    rows = []
    for i in range(round(seconds / every)):
        t = i * every
        slow = any(a <= t <= b for a, b in hot)
        rows.append(
            Telemetry(
                time_ns=T0 + round(t * 1e9), domain="gpu0", temperature_c=61.0,
                clocks_mhz={"sm": 1500.0 if slow else 1980.0, "memory": 3201.0},
                throttle=("power cap",) if slow else ("application clocks",), **fields,
            )
        )  # fmt: skip
    return rows


def spiky(**options: object) -> Correlation:
    truth = [(0.5 + i, 0.6 + i) for i in range(6)]
    copies = options.pop("copies", ())
    return correlate(timeline(7.0, copies=copies), power([(a, b, 700.0) for a, b in truth], 7.0), threshold_w=550.0,
                     **options)  # fmt: skip


def test_throttling_after_spikes() -> None:
    after = [(0.58 + i, 0.75 + i) for i in range(6)]
    found = spiky(telemetry=telemetry(7.0, after))
    answer = found.answer("throttle")
    assert answer.verdict == "yes" and "6 of 6" in answer.evidence and "power cap" in answer.evidence
    assert "outside spikes 0%" in answer.evidence and "falls by 24%" in answer.evidence and "61 °C" in answer.evidence
    assert found.spikes[0].throttle == ("power cap",) and found.spikes[0].clock_after_mhz == 1500.0
    calm = spiky(telemetry={"gpu0": telemetry(7.0, [])}).answer("throttle")
    assert calm.verdict == "no" and "clock stays" in calm.evidence
    always = spiky(telemetry=telemetry(7.0, [(0.0, 7.0)])).answer("throttle")
    assert always.verdict == "yes" and "not more common" in always.evidence
    coarse = spiky(telemetry=telemetry(7.0, [], every=3.0)).answer("throttle")
    assert coarse.verdict == "unknown" and "apart" in coarse.needs
    assert spiky().answer("throttle").verdict == "unknown" and "telemetry" in spiky().answer("throttle").needs


def test_counted_throttle_seconds_tell_what_no_look_caught() -> None:
    rows = [
        Telemetry(time_ns=T0 + i * 100 * MS, domain="gpu0", throttled_s={"power cap": 0.01 * (i > 6)})
        for i in range(70)
    ]
    found = spiky(telemetry=rows)
    assert found.spikes[0].throttle == ("power cap",) and found.spikes[1].throttle == ()
    assert "1 of 6" in found.answer("throttle").evidence


def test_feeds() -> None:
    event = PowerEvent(time_ns=T0 + 10**9, domain="pdu1", kind="over_current", message="phase L2 above 30 A")
    found = spiky(events=[event]).answer("feeds")
    assert found.verdict == "yes" and "phase L2" in found.evidence and "crest factor of" in found.evidence
    long_ago = PowerEvent(time_ns=0, domain="pdu1", kind="over_current", message="long ago")
    old = spiky(events=[long_ago]).answer("feeds")
    assert old.verdict == "unknown" and "TESSERA_REDFISH_URL" in old.needs
    amps = [Telemetry(time_ns=T0, domain="pdu1", current_a=10.0, peak_current_a=p) for p in (11.0, 18.0)]
    assert spiky(telemetry=amps).answer("feeds").verdict == "yes"
    assert spiky(telemetry=amps[:1]).answer("feeds").verdict == "no"


def test_links() -> None:
    quiet = spiky().answer("links")
    assert quiet.verdict == "no" and "GPM" in quiet.needs
    copied = spiky(copies=[(0.5 + i, 0.55 + i) for i in range(6)]).answer("links")
    assert copied.verdict == "yes" and "copies or collectives" in copied.evidence
    rates = telemetry(7.0, [], activity_pct={"nvlink_rx": 3000.0, "nvlink_tx": 2000.0, "sm": 90.0})
    busy = spiky(telemetry=rates).answer("links")
    assert busy.verdict == "yes" and "nvlink 5000 MiB/s in spikes" in busy.evidence
    slow = spiky(telemetry=telemetry(7.0, [], activity_pct={"pcie_tx": 2.0})).answer("links")
    assert slow.verdict == "no" and not slow.needs


# -- The whole ------------------------------------------------------------------------------------------------------


def test_what_comes_out_can_be_kept_and_shown() -> None:
    found = spiky(telemetry=telemetry(7.0, []))
    data = json.loads(found.to_json())
    assert data["spikes"][0]["kernels"][0]["name"].startswith("gemm") and data["checklist"][0]["key"] == "aligned"
    assert {"lift", "p_value", "verdict"} <= set(data["aligned"][0])
    frame = found.to_frame()
    assert len(frame) == 6 and {"peak_w", "start_ns", "top", "top_lift", "rise_w_per_s"} <= set(frame.columns)
    page = found._repr_html_()
    assert "<table>" in page and "spike 6" in page and "<script" not in page
    with pytest.raises(ArgumentError, match="no 'colour'"):
        found.answer("colour")
    assert spiky().spikes == timeline(7.0).correlate(
        power([(0.5 + i, 0.6 + i, 700.0) for i in range(6)], 7.0), threshold_w=550.0).spikes  # fmt: skip


def test_what_is_wrong_is_said() -> None:
    trace = power([], 4.0)
    with pytest.raises(MeasurementError, match="do not overlap in time"):
        late = timeline(1.0)
        late.columns["start_ns"] += 10**12
        late.columns["end_ns"] += 10**12
        correlate(late, trace)
    with pytest.raises(MeasurementError, match="nothing that could explain spikes"):
        correlate(Builder().build(), trace)
    for wrong in ({"threshold_w": -1.0}, {"percentile": 100.0}, {"rise_w_per_s": 0.0}):
        with pytest.raises(ArgumentError):
            correlate(timeline(4.0), trace, **wrong)
    with pytest.raises(MeasurementError, match="no domain 'gpu7'"):
        correlate(timeline(4.0), trace, domain="gpu7")
    level = correlate(timeline(4.0), trace, threshold_w=100.0)
    assert "a level, not spikes" in level.notes[0]
    dead = PowerTrace(
        {"gpu0": DomainSamples.of(RING, trace.columns["gpu0"].times_ns, [math.nan] * 202)}, start_ns=0, end_ns=1
    )
    with pytest.raises(MeasurementError):
        correlate(timeline(4.0), dead)


def test_of_several_boards_each_has_its_own_kernels() -> None:
    b = Builder()
    for device in (0, 1):
        for i in range(40):
            b.add("kernel", f"on{device}", *_ns(i * 0.1, i * 0.1 + 0.09), device=device)
    two = power([(1.0, 1.2, 700.0)], 4.0)
    both = PowerTrace({**two.columns, "gpu1": DomainSamples.of(board("gpu1"), two.columns["gpu0"].times_ns,
                      two.columns["gpu0"].watts)}, start_ns=0, end_ns=1)  # fmt: skip
    one = correlate(b.build(), both, domain="gpu1", threshold_w=550.0)
    assert {k.name for s in one.spikes for k in s.kernels} == {"on1"}
    total = correlate(b.build(), both, threshold_w=1100.0)
    assert total.domain == "gpu0+gpu1" and {k.name for s in total.spikes for k in s.kernels} == {"on0", "on1"}


def board(name: str) -> Domain:
    return Domain(name=name, source="t", resolution_s=0.02, lag_s=RING_LAG_S, blur_s=RING_BLUR_S)


@pytest.mark.skipif(not (RECORDING / "gpt2_train.power.json").exists(), reason="the recording is not here")
def test_gpt2_on_an_h200_spikes_in_its_backward_pass() -> None:
    from tessera.timeline import kineto

    samples = json.loads((RECORDING / "gpt2_train.power.json").read_text())["samples_mw"]
    times, watts = np.array([t for t, _ in samples]) * 1000, np.array([w for _, w in samples]) * 1e-3
    trace = PowerTrace({"gpu0": DomainSamples.of(RING, times, watts)}, start_ns=int(times[0]), end_ns=int(times[-1]))
    found = correlate(kineto.read(RECORDING / "gpt2_train.kineto.json.gz"), trace, percentile=60.0)
    assert found.mean_w == pytest.approx(484, abs=2) and len(found.spikes) == 8
    work = {a.name: a for a in found.aligned}
    assert work["backward pass"].verdict == "aligned" and work["backward pass"].lift > 4
    assert work["device busy"].verdict == "aligned"
    # Steps of 57 ms against samples of 20 ms that smear over 25: whether spikes rise at steps cannot be told.
    assert next(a for a in found.aligned if a.kind == "step").verdict == "cannot tell"
    assert {a.key: a.verdict for a in found.checklist} == {
        "aligned": "unknown", "throttle": "unknown", "feeds": "unknown", "links": "no"
    }  # fmt: skip


def test_a_live_trace_brings_its_own_clock_and_telemetry() -> None:
    from tessera.monitor import Monitor, power_trace
    from tessera.sensors.base import Batch

    from fakes.sensor import ScriptSensor

    class Talking(ScriptSensor):
        def read(self) -> Batch:
            batch = super().read()
            batch.telemetry.append(Telemetry(time_ns=self.clock(), domain="gpu0", throttle=("power cap",)))
            return batch

    begin = 1 << 62
    sensor = Talking(lambda t: 600.0 if 0.2 < t - begin * 1e-9 < 0.3 else 200.0, clock=time.monotonic_ns, step_ms=10.0)
    monitor = Monitor([sensor]).start()
    try:
        with power_trace(monitor=monitor) as trace:
            begin = time.monotonic_ns()
            time.sleep(0.5)
        offset = trace.to_epoch(0)
        b = Builder()
        b.add("kernel", "calm", begin + offset, begin + offset + 200 * MS, device=0)
        b.add("kernel", "storm", begin + offset + 200 * MS, begin + offset + 300 * MS, device=0)
        b.add("kernel", "calm", begin + offset + 300 * MS, begin + offset + 450 * MS, device=0)
        found = correlate(b.build(), trace, threshold_w=400.0)
    finally:
        monitor.stop()
    (spike,) = found.spikes
    assert spike.kernels[0].name == "storm" and spike.kernels[0].share > 0.7
    assert spike.throttle == ("power cap",) and found.answer("throttle").verdict == "yes"
