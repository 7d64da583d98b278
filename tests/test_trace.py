"""PowerTrace: windows, statistics weighted by time, several domains, CSV and frames."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.errors import MeasurementError, RecordingError
from tessera.joules import DomainSamples, sum_domains, sum_windows, worst_basis
from tessera.schema import Basis, Domain, Energy, Gap, Hold
from tessera.trace import PowerTrace, read_csv

from brute_force import brute

S = 1_000_000_000


def domain(name: str = "gpu0", **kwargs: object) -> Domain:
    return Domain(name=name, source=kwargs.pop("source", "test"), resolution_s=0.02, **kwargs)  # type: ignore[arg-type]


def trace(*columns: DomainSamples, end_s: float = 1.0, **kwargs: object) -> PowerTrace:
    return PowerTrace({c.domain.name: c for c in columns}, start_ns=0, end_ns=round(end_s * S), **kwargs)  # type: ignore[arg-type]


def square(low: float, high: float, *, n: int = 51, **kwargs: object) -> DomainSamples:
    """20 ms samples, alternating every 100 ms."""
    times = np.arange(n) * 20_000_000
    return DomainSamples.of(domain(**kwargs), times, np.where(np.arange(n) // 5 % 2, high, low).astype(float))


# -- energy --------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.floats(1, 1000) | st.just(math.nan)), min_size=2, max_size=10),
    st.floats(0, 0.5),
    st.booleans(),
    st.lists(st.floats(-0.2, 1.2), min_size=3, max_size=3),
)
def test_energy_is_the_brute_integral_of_the_window_moved_by_the_lag(
    steps: list[tuple[int, float]], lag_s: float, mean: bool, cuts: list[float]
) -> None:
    times = np.cumsum([dt for dt, _ in steps]).tolist()
    watts = [w for _, w in steps]
    hold = Hold.MEAN if mean else Hold.LINEAR
    pwr = trace(DomainSamples.of(domain(lag_s=lag_s, hold=hold), times, watts), end_s=times[-1] * 1e-9)
    lag_ns = round(lag_s * 1e9)
    at = sorted(round(c * times[-1]) for c in cuts)
    parts = []
    for a, b in pairwise(at):
        joules, covered = brute(times, watts, a + lag_ns, b + lag_ns, mean=mean)
        energy = pwr.energy(start_ns=a, end_ns=b)
        if covered == 0 and b > a:
            assert math.isnan(energy.energy_j), "unknown is not zero"
            continue
        assert energy.energy_j == pytest.approx(joules, rel=1e-9, abs=1e-8)
        assert energy.coverage == pytest.approx(covered / ((b - a) * 1e-9) if b > a else 0.0, abs=1e-6)
        assert energy.error_j >= 0
        parts.append(energy.energy_j)
    whole = pwr.energy(start_ns=at[0], end_ns=at[-1]).energy_j
    assert sum(parts) == pytest.approx(0.0 if math.isnan(whole) else whole, rel=1e-9, abs=1e-8)


def test_lag_moves_the_window() -> None:
    times = np.arange(0, 101) * 20_000_000
    seen = np.where(times >= 1.1 * S, 700.0, 100.0)  # a step at 1.0 s, shown 0.1 s late
    late = trace(DomainSamples.of(domain(lag_s=0.1), times, seen), end_s=1.5)
    assert late.energy(end_ns=S).energy_j == pytest.approx(100.0, abs=7)
    assert late.energy(start_ns=S, end_ns=round(1.5 * S)).energy_j == pytest.approx(350.0, abs=7)


def test_peaks_and_percentiles_of_a_modelled_cpu_are_at_its_resolution() -> None:
    """A recording divides its samples at regions: a part of a millisecond at full power is no peak of 100 ms."""
    times, watts = [0], [math.nan]
    for k in range(10):
        times += [(k * 100 + 99) * S // 1000, (k + 1) * S // 10]
        watts += [1.0, 100.0]
    cpu = Domain(name="cpu0", source="modelled", resolution_s=0.1, hold=Hold.MEAN, basis="modelled")
    divided = trace(DomainSamples.of(cpu, times, watts))
    assert divided.peak_w == pytest.approx(1.99, rel=0.01)
    assert divided.crest_factor() == pytest.approx(1.0, rel=0.01)
    assert divided.energy_j == pytest.approx(10 * 0.199)
    assert divided.energy("cpu0", 99 * S // 1000, S // 10).energy_j == pytest.approx(0.1)
    assert trace(DomainSamples.of(dataclasses.replace(cpu, basis="measured"), times, watts)).peak_w == 100.0


def test_a_gap_is_not_zero_watts() -> None:
    column = DomainSamples.of(domain(), [0, S, 2 * S, 3 * S, 4 * S], [100.0, 100.0, math.nan, 100.0, 100.0])
    pwr = trace(column, end_s=4, gaps=[Gap(domain="gpu0", start_ns=S, end_ns=2 * S, reason="driver restart")])
    energy = pwr.energy()
    assert energy.energy_j == pytest.approx(300.0)
    assert energy.coverage == pytest.approx(0.75)
    assert pwr.mean_w == pytest.approx(100.0)
    assert pwr.gaps[0].reason == "driver restart"


def test_mean_is_over_what_was_seen_of_each_domain() -> None:
    """A domain that was seen half the time must not double the others."""
    full = DomainSamples.of(domain("gpu0"), [0, 2 * S], [100.0, 100.0])
    half = DomainSamples.of(domain("cpu0"), [0, S], [50.0, 50.0])
    pwr = trace(full, half, end_s=2)
    assert pwr.energy().coverage == pytest.approx(0.5)
    assert pwr.mean_w == pytest.approx(150.0)


def test_errors_add_in_quadrature_and_are_positive() -> None:
    one, two = square(100, 300, gain_error=0.01), square(100, 300, name="gpu1", gain_error=0.01)
    assert trace(one).error_j > 0
    assert trace(one, two).error_j == pytest.approx(trace(one).error_j * math.sqrt(2))
    assert trace(square(100, 500)).error_j > trace(square(190, 410)).error_j > trace(square(250, 350)).error_j


def test_uncounted_domains_are_not_in_the_total() -> None:
    board, hbm = square(300, 300), square(60, 60, name="gpu0.memory", counted=False)
    pwr = trace(board, hbm)
    assert pwr.energy_j == pytest.approx(300.0)
    assert pwr.energy("gpu0.memory").energy_j == pytest.approx(60.0)
    assert pwr.peak_w == 300.0
    assert [d.name for d in pwr.domains] == ["gpu0", "gpu0.memory"]


def test_an_unknown_domain_is_answered_with_the_known_ones() -> None:
    with pytest.raises(MeasurementError, match="did you mean 'gpu0'") as caught:
        trace(square(1, 2)).energy("gpu00")
    assert "gpu0" in (caught.value.fix or "")


def test_one_modelled_part_makes_the_whole_modelled() -> None:
    pwr = trace(square(1, 2, source="nvml"), square(1, 2, name="cpu0", source="tdp", basis="modelled"))
    assert pwr.basis == "modelled"
    assert pwr.energy().basis == "modelled"
    assert pwr.energy().source == "nvml+tdp"
    assert trace(square(1, 2)).basis == "measured"
    bases: list[Basis] = ["simulated", "measured"]
    assert worst_basis(bases) == "simulated"
    assert worst_basis([]) == "measured"


def test_combine_of_nothing_says_so() -> None:
    empty = sum_domains([], 1.0)
    assert math.isnan(empty.energy_j) and math.isnan(empty.error_j), "nothing was measured, which is not 0 J"
    assert (empty.coverage, empty.source) == (0.0, "none")
    assert sum_domains([], 0.0).energy_j == 0.0, "no time, no joules"
    parts = [Energy(energy_j=1, error_j=3, time_s=1, source="a"), Energy(energy_j=2, error_j=4, time_s=1, source="a")]
    both = sum_domains(parts, 1.0)
    assert (both.energy_j, both.error_j, both.source) == (3.0, 5.0, "a")


# -- statistics ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lasts_ms", [2, 30, 130, 250])
def test_the_peak_of_a_short_modelled_trace_is_no_less_than_its_mean(lasts_ms: int) -> None:
    """`tessera measure -- false`: its 2 ms were diluted by the 98 ms of idleness before them."""
    times = np.array([0, 100, 200, 300, 300 + lasts_ms, 310 + lasts_ms]) * 1_000_000
    column = DomainSamples.of(domain("cpu0", basis="modelled", hold=Hold.MEAN), times, [0.0, 0.0, 0.0, 0.0, 5.0, 0.0])
    column = dataclasses.replace(column, domain=dataclasses.replace(column.domain, resolution_s=0.1))
    short = PowerTrace({"cpu0": column}, start_ns=int(times[3]), end_ns=int(times[4]))
    assert short.mean_w == pytest.approx(5.0)
    assert short.peak_w == pytest.approx(5.0)


def test_peak_and_crest_of_a_triangle() -> None:
    times = np.arange(5) * S
    pwr = trace(DomainSamples.of(domain(), times, [0.0, 300.0, 0.0, 300.0, 0.0]), end_s=4)
    assert pwr.peak_w == 300.0
    assert pwr.crest_factor() == pytest.approx(math.sqrt(3))  # the rms of a triangle is its peak by root three


def test_crest_of_a_constant_is_one() -> None:
    assert trace(square(250, 250)).crest_factor() == pytest.approx(1.0)


def test_crest_of_means_is_that_of_steps() -> None:
    column = DomainSamples.of(domain(hold=Hold.MEAN), [0, S, 2 * S], [math.nan, 100.0, 300.0])
    assert trace(column, end_s=2).crest_factor() == pytest.approx(300 / math.sqrt((100**2 + 300**2) / 2))


def test_a_gap_has_no_weight_in_the_statistics() -> None:
    """100 W for a second, nothing known for an hour, 300 W for a second."""
    hour = 3600 * S
    times = [0, S, hour - 1, hour, hour + S]
    pwr = trace(DomainSamples.of(domain(), times, [100.0, 100.0, math.nan, 300.0, 300.0]), end_s=3601)
    assert pwr.crest_factor() == pytest.approx(300 / math.sqrt((100**2 + 300**2) / 2), rel=1e-6)
    assert pwr.percentile(25) == pytest.approx(100.0)
    assert pwr.percentile(75) == pytest.approx(300.0)


def test_percentile_is_weighted_by_time_not_by_samples() -> None:
    """A hundred samples in a burst of 1 s at 700 W, ten in 9 s at 100 W: the median is 100 W."""
    burst = np.linspace(0, 1.0, 100)
    rest = np.linspace(1.01, 10.0, 10)
    times = (np.concatenate([burst, rest]) * 1e9).astype(np.int64)
    pwr = trace(DomainSamples.of(domain(), times, np.r_[np.full(100, 700.0), np.full(10, 100.0)]), end_s=10)
    assert pwr.percentile(50) == pytest.approx(100.0)
    assert pwr.percentile(85) == pytest.approx(100.0, abs=20)
    assert pwr.percentile(96) == pytest.approx(700.0)
    assert (pwr.percentile(0), pwr.percentile(100)) == (100.0, 700.0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1, 1000), min_size=2, max_size=30), st.floats(0, 100), st.floats(0, 100))
def test_percentiles_rise_and_stay_within_the_samples(watts: list[float], q: float, r: float) -> None:
    pwr = trace(DomainSamples.of(domain(), np.arange(len(watts)) * 20_000_000, watts))
    low, high = (pwr.percentile(v) for v in sorted((q, r)))
    assert low is not None and high is not None
    assert min(watts) - 1e-9 <= low <= high <= max(watts) + 1e-9


def test_percentile_of_a_ramp_is_its_share() -> None:
    pwr = trace(DomainSamples.of(domain(), np.arange(1001) * 1_000_000, np.linspace(0, 1000, 1001)))
    for q in (5, 50, 90):
        assert pwr.percentile(q) == pytest.approx(10 * q, abs=2)


def test_total_adds_domains_of_different_rates_where_both_are_known() -> None:
    fast = DomainSamples.of(domain("gpu0"), np.arange(0, 101) * 10_000_000, np.linspace(0, 100, 101))
    slow = DomainSamples.of(domain("cpu0", hold=Hold.MEAN), [S // 10, S // 2, 9 * S // 10], [math.nan, 50.0, 70.0])
    times, watts = trace(fast, slow).total()
    assert times[0] == S // 10 and times[-1] == 9 * S // 10
    assert np.all(np.diff(times) > 0)
    expected = times * 1e-7 + np.where(times <= S // 2, 50.0, 70.0)
    np.testing.assert_allclose(watts, expected)


def test_the_total_of_lagging_domains_lines_up() -> None:
    """Two sensors show the same 1 s pulse, one of them 0.2 s late: the sum is one pulse of double height."""
    t = np.arange(0, 201) * 20_000_000
    pulse = lambda x: np.where((x >= S) & (x < 2 * S), 500.0, 100.0)  # noqa: E731
    prompt = DomainSamples.of(domain("gpu0"), t, pulse(t))
    late = DomainSamples.of(domain("gpu1", lag_s=0.2), t, pulse(t - S // 5))
    pwr = trace(prompt, late, end_s=4)
    assert pwr.peak_w == 1000.0
    assert set(np.round(pwr.total()[1]).tolist()) == {200.0, 1000.0}


def test_statistics_of_several_domains() -> None:
    """Opposite squares add up to a flat line: the crest of the sum is 1, not that of either."""
    up, down = square(100, 500), square(500, 100, name="gpu1")
    pwr = trace(up, down)
    assert pwr.peak_w == pytest.approx(600.0)
    assert pwr.crest_factor() == pytest.approx(1.0)
    assert pwr.percentile(3) == pytest.approx(600.0)
    assert pwr.crest_factor("gpu0") == pytest.approx(500 / math.sqrt((500**2 + 100**2) / 2), rel=0.05)


@pytest.mark.parametrize("hold", list(Hold))
def test_a_domain_that_never_answered_does_not_break_the_others(hold: Hold) -> None:
    dead = DomainSamples.of(domain("gpu1", hold=hold), [0, S], [math.nan, math.nan])
    pwr = trace(square(100, 300), dead)
    assert pwr.peak_w == 300.0
    assert pwr.percentile(100) == 300.0
    assert pwr.energy().coverage == 0.0
    assert trace(dead).peak_w is None
    assert trace(dead).mean_w is None


def test_an_empty_trace_knows_nothing() -> None:
    for pwr in (trace(), trace(DomainSamples.of(domain(), [], []))):
        assert pwr.peak_w is None
        assert pwr.mean_w is None
        assert pwr.percentile(50) is None
        assert pwr.crest_factor() is None
        assert pwr.true_resolution_ms is None
        assert not pwr.energy_j > 0
        assert pwr.energy().coverage == 0.0
    one = trace(DomainSamples.of(domain(), [5], [100.0]))
    assert (one.peak_w, one.percentile(50), one.crest_factor()) == (100.0, 100.0, None)


def test_the_resolution_is_that_of_the_slowest_counted_domain() -> None:
    fast, slow = square(1, 2), DomainSamples.of(domain("cpu0"), np.arange(5) * S // 10, np.ones(5))
    hidden = DomainSamples.of(domain("gpu0.memory", counted=False), [0, S], [1.0, 1.0])
    assert trace(fast, slow, hidden).true_resolution_ms == pytest.approx(100.0)
    assert trace(fast).true_resolution_ms == pytest.approx(20.0)


def test_the_resolution_is_never_finer_than_the_sensor() -> None:
    short = DomainSamples.of(domain(), [0, 3_000_000], [100.0, 101.0])  # a block of 3 ms, read at its end
    assert trace(short).true_resolution_ms == pytest.approx(20.0)
    slow = DomainSamples.of(domain(), [0, 30_000_000], [100.0, 101.0])
    assert trace(slow).true_resolution_ms == pytest.approx(30.0), "what was really had may be coarser"


# -- files ---------------------------------------------------------------------------------------------------


def test_csv_round_trip(tmp_path: Path) -> None:
    offset = 1_790_000_000 * S
    times = [offset, offset + 20_000_000, offset + 40_123_000]
    one = DomainSamples.of(domain(), times, [100.0, math.nan, 300.25])
    two = DomainSamples.of(domain("cpu,0"), [offset + 1_000], [7.125])
    pwr = PowerTrace({"gpu0": one, "cpu,0": two}, start_ns=offset, end_ns=offset + S)
    back = read_csv(pwr.to_csv(tmp_path / "power.csv"))
    assert set(back) == {"gpu0", "cpu,0"}
    assert back["gpu0"][0].tolist() == times
    assert back["gpu0"][1].tolist() == pytest.approx([100.0, math.nan, 300.25], nan_ok=True)  # a gap stays a gap
    assert back["cpu,0"][1].tolist() == [7.125]


@pytest.mark.parametrize("hold", list(Hold))
@pytest.mark.parametrize("lag_s", [0.0, 0.03])
@pytest.mark.parametrize("holes", [(), (0,), (1,), (4,), (0, 1, 5), (8, 9)])
def test_the_integral_of_the_csv_is_the_energy(
    tmp_path: Path, hold: Hold, lag_s: float, holes: tuple[int, ...]
) -> None:
    times = np.arange(10) * 100_000_000
    watts = np.array([2600.0, 44, 41, 300, 310, 20, 700, 650, 90, 4000])
    watts[list(holes)] = math.nan
    column = DomainSamples.of(domain(hold=hold, lag_s=lag_s), times, watts)
    pwr = PowerTrace({"gpu0": column}, start_ns=50_000_000, end_ns=830_000_000)
    lag_ns = column.lag_ns
    at, back, _ = read_csv(pwr.to_csv(tmp_path / "power.csv"))["gpu0"]
    joules, covered = brute(at.tolist(), back.tolist(), int(at[0]), int(at[-1]), mean=hold is Hold.MEAN)
    assert joules == pytest.approx(pwr.energy_j, rel=1e-5)
    assert covered == pytest.approx(pwr.energy().coverage * pwr.seconds)
    assert at[0] >= pwr.start_ns + lag_ns and at[-1] <= pwr.end_ns + lag_ns, "no sample from outside the trace"
    assert not math.isnan(back[0]) and not math.isnan(back[-1])


def test_the_csv_of_a_mean_begins_with_the_first_mean_of_the_trace(tmp_path: Path) -> None:
    before = DomainSamples.of(domain("cpu0", hold=Hold.MEAN), [0, S], [2.6, 0.44])
    share = DomainSamples.of(domain("cpu0.idle_share", hold=Hold.MEAN, counted=False), [0, S], [math.nan, 0.2])
    never = DomainSamples.of(domain("gpu0"), [0, S], [math.nan, math.nan])
    lines = trace(before, share, never).to_csv(tmp_path / "power.csv").read_text().splitlines()
    assert lines == [
        "epoch_us,domain,watts,basis,part_of",
        "0,cpu0,0.440,measured,",
        "1000000,cpu0,0.440,measured,",
        "0,cpu0.idle_share,0.200,measured,cpu0",
        "1000000,cpu0.idle_share,0.200,measured,cpu0",
    ]


def test_a_csv_out_of_order_is_sorted(tmp_path: Path) -> None:
    file = tmp_path / "p.csv"
    file.write_text("watts,epoch_us,domain,extra\n2,20,gpu0,x\n1,10,gpu0,y\n")
    times, watts, _ = read_csv(file)["gpu0"]
    assert times.tolist() == [10_000, 20_000]
    assert watts.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "missing"),
        (b"epoch_us,dom", "missing"),
        (b"time,power\n1,2\n", "missing"),
        (b"epoch_us,domain,watts\n1790000000000000,gpu0,100.0\n17900000000", "line 3"),
        (b"epoch_us,domain,watts\n1790000000000000,gpu0,\n", "line 2"),
        (b"epoch_us,domain,watts\nnoon,gpu0,100\n", "line 2"),
        (b"epoch_us,domain,watts\n99999999999999999999999,gpu0,100\n", "line 2"),
        (b"epoch_us,domain,watts\n1790000000000000,gpu0,inf\n", "line 2"),
        (b"\xff\xfe\x00garbage\x80", "cannot read"),
        (b'epoch_us,domain,watts\n1,"' + b"x" * 200_000 + b'",1\n', "cannot read"),
    ],
)
def test_garbage_is_a_recording_error(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "p.csv"
    file.write_bytes(content)
    with pytest.raises(RecordingError, match=words) as caught:
        read_csv(file)
    assert "p.csv" in str(caught.value)


def test_a_missing_file_is_a_recording_error(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="nowhere"):
        read_csv(tmp_path / "nowhere.csv")


def test_frame() -> None:
    pwr = trace(square(100, 300), DomainSamples.of(domain("cpu0"), [5_000], [7.0]))
    frame = pwr.to_frame()
    assert list(frame.columns) == ["time_ns", "epoch_us", "domain", "watts"]
    assert len(frame) == 52
    row = frame[frame.domain == "cpu0"].iloc[0]
    assert (row.time_ns, row.epoch_us, row.watts) == (5_000, 5, 7.0)
    assert list(trace().to_frame().columns) == ["time_ns", "epoch_us", "domain", "watts"]


def test_repr_names_the_domains() -> None:
    assert repr(trace(square(1, 2), end_s=1.5)) == "<PowerTrace gpu0: 51 samples over 1.500 s>"


def test_the_peak_of_means_is_of_the_trace_and_not_of_before_it() -> None:
    column = DomainSamples.of(domain(hold=Hold.MEAN), [S, 2 * S, 3 * S], [500.0, 10.0, 12.0])
    assert PowerTrace({"gpu0": column}, start_ns=S + 50_000_000, end_ns=3 * S).peak_w == 12.0


def test_windows_of_which_nothing_is_known_widen_the_error_of_a_chain() -> None:
    known = Energy(energy_j=5.0, error_j=0.1, time_s=1.0, source="x")
    unknown = Energy(energy_j=math.nan, error_j=math.nan, time_s=9.0, source="x", coverage=0.0)
    whole = sum_windows([known, unknown])
    assert whole.energy_j == 5.0
    assert whole.error_j >= 45.0
    assert whole.coverage == pytest.approx(0.1)
