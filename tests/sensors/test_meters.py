"""Polled power as a property: whatever the rates, repeats are not data, new readings are, gaps open once and close."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.clock import Clock
from tessera.monitor.sampler import Sampler
from tessera.schema import Capability, Domain
from tessera.sensors._meters import ASSUMED_REFRESH_S, EARLY, STALE_S, PolledPower
from tessera.sensors.base import Batch

S = 1_000_000_000
MS = 1_000_000

# Steps between polls (ms) and readings (W) of which many are the same.
polls = st.lists(st.tuples(st.integers(1, 3000), st.sampled_from([100.0, 200.0, 300.0])), min_size=1, max_size=120).map(
    lambda steps: [(sum(ms for ms, _ in steps[: i + 1]) * MS, w) for i, (_, w) in enumerate(steps)]
)
refreshes = st.one_of(st.none(), st.floats(0.02, 2.0))


def kept(batch: Batch) -> list[tuple[int, float]]:
    return [(t, w) for t, w in batch.samples.get("x", []) if not math.isnan(w)]


def hold_s(power: PolledPower, refresh_s: float | None) -> float:
    """How long a value that stays is the same measurement, as the docstring of the module has it."""
    return refresh_s if refresh_s is not None else min(power.resolution_s, ASSUMED_REFRESH_S)


@given(readings=polls, refresh_s=refreshes)
def test_no_repeat_is_data_and_no_reading_after_a_refresh_is_lost(readings, refresh_s):
    power, last = PolledPower("x", started_ns=0, refresh_s=refresh_s), None
    for time_ns, power_w in readings:
        hold = hold_s(power, refresh_s)
        batch = Batch()
        power.observe(batch, power_w=power_w, time_ns=time_ns)
        assert not batch.gaps
        assert kept(batch) == batch.samples.get("x", []), "nothing is unknown where nothing failed"
        since_s = math.inf if last is None else (time_ns - last[0]) / S
        if kept(batch):
            assert kept(batch) == [(time_ns, power_w)]
            assert last is None or power_w != last[1] or since_s >= (1 - EARLY) * hold * (1 - 1e-9)
            last = (time_ns, power_w)
        else:
            assert last is not None
            assert power_w == last[1]
            assert since_s < hold


@given(readings=polls, stamps=st.lists(st.sampled_from("ab"), min_size=120, max_size=120))
def test_the_stamp_alone_tells_whether_a_value_is_new(readings, stamps):
    power, last = PolledPower("x", started_ns=0), None
    for (time_ns, power_w), stamp in zip(readings, stamps, strict=False):
        batch = Batch()
        power.observe(batch, power_w=power_w, time_ns=time_ns, stamp=stamp)
        assert bool(kept(batch)) == ((power_w, stamp) != last)
        last = (power_w, stamp)


@given(
    refresh_ms=st.integers(20, 5000),
    polls_per_refresh=st.floats(1.5, 40.0),
    jitter=st.lists(st.floats(-0.2, 0.2), min_size=20, max_size=20),
    phase=st.floats(0.0, 1.0),
)
def test_the_refresh_is_learnt_to_within_a_poll(refresh_ms, polls_per_refresh, jitter, phase):
    power, batch = PolledPower("x", started_ns=0), Batch()
    refresh_ns, poll_ns = refresh_ms * MS, refresh_ms * MS / polls_per_refresh
    assert power.resolution_s == ASSUMED_REFRESH_S
    assert not power.refresh_seen
    for i in range(math.ceil(40 * polls_per_refresh)):
        time_ns = round((i + jitter[i % 20]) * poll_ns + phase * refresh_ns) + S
        power.observe(batch, power_w=100.0 + time_ns // refresh_ns % 7, time_ns=time_ns)
    assert power.refresh_seen
    assert power.resolution_s * S == pytest.approx(refresh_ns, abs=1.4 * poll_ns)


@given(
    refresh_ms=st.integers(20, 1000),
    polls_per_refresh=st.integers(2, 10),
    steady=st.lists(st.integers(1, 3), min_size=16),
)
def test_a_load_that_skips_changes_does_not_hide_the_refresh(refresh_ms, polls_per_refresh, steady):
    """A value that holds for up to three refreshes: enough quick changes are left as long as a quarter is quick."""
    holds = [1 if i % 2 else n for i, n in enumerate(steady)]
    power, batch, time_ns = PolledPower("x", started_ns=0), Batch(), 0
    for i, refreshes_held in enumerate(holds):
        for _ in range(refreshes_held * polls_per_refresh):
            power.observe(batch, power_w=100.0 + i % 7, time_ns=time_ns)
            time_ns += refresh_ms * MS // polls_per_refresh
    assert power.resolution_s == pytest.approx(refresh_ms * 1e-3, rel=1e-3)


def test_changes_of_a_steady_load_are_not_a_slow_sensor():
    power, batch = PolledPower("x", started_ns=0), Batch()
    for i in range(12):
        power.observe(batch, power_w=100.0 + i, time_ns=i * 61 * S)
    assert not power.refresh_seen
    assert power.resolution_s == ASSUMED_REFRESH_S


def test_a_known_refresh_is_not_unlearnt():
    power, batch = PolledPower("x", started_ns=0, refresh_s=0.1), Batch()
    for i in range(12):
        power.observe(batch, power_w=100.0 + i, time_ns=i * S)
    assert power.refresh_seen
    assert power.resolution_s == 0.1


@pytest.mark.parametrize("early_ms", [0, 60])
def test_a_poll_a_little_early_is_the_next_refresh(early_ms):
    power, batch = PolledPower("x", started_ns=0), Batch()
    for i in range(20):
        power.observe(batch, power_w=100.0, time_ns=i * (1000 - early_ms) * MS)
    assert len(kept(batch)) == 20


# What may happen at a poll: a reading, or a failure of one of two kinds.
happenings = st.lists(
    st.tuples(st.integers(1, 3000), st.sampled_from([100.0, 200.0, "denied", "timeout"])), min_size=1, max_size=120
)


@given(steps=happenings, started=st.booleans(), refresh_s=refreshes)
def test_gaps_open_once_for_a_reason_and_end_with_a_sample(steps, started, refresh_s):
    power = PolledPower("x", started_ns=0 if started else None, refresh_s=refresh_s)
    time_ns, last_ns, reason = 0, 0 if started else None, None
    unknown = not started
    for step_ms, what in steps:
        time_ns += step_ms * MS
        batch = Batch()
        if isinstance(what, str):
            power.fail(batch, time_ns, what)
            start_ns = time_ns if last_ns is None else last_ns
            told = [(g.domain, g.start_ns, g.end_ns, g.reason) for g in batch.gaps]
            assert told == ([] if what == reason else [("x", start_ns, None, what)])
            assert not batch.samples
            reason, unknown = what, True
            continue
        power.observe(batch, power_w=what, time_ns=time_ns)
        assert not batch.gaps
        if unknown:
            (before_ns, nan), after = batch.samples["x"]
            assert before_ns == time_ns - 1
            assert math.isnan(nan)
            assert after == (time_ns, what), "the first reading after a gap is new, whatever it is"
        if batch.samples:
            last_ns, reason, unknown = time_ns, None, False


@given(readings=polls, hole_s=st.floats(0.2, 2.5))
def test_a_hole_is_a_closed_gap_between_the_samples(readings, hole_s):
    power, batch = PolledPower("x", started_ns=0, refresh_s=0.1, hole_s=hole_s), Batch()
    for time_ns, power_w in readings:
        power.observe(batch, power_w=power_w, time_ns=time_ns)
    pairs = list(itertools.pairwise(t for t, _ in kept(batch)))
    holes = [(a, b) for a, b in pairs if (b - a) / S > hole_s]
    assert [(g.start_ns, g.end_ns) for g in batch.gaps] == holes
    assert all("not read for" in g.reason for g in batch.gaps)
    assert [t for t, w in batch.samples["x"] if math.isnan(w)] == [b - 1 for _, b in holes]


def test_no_hole_in_a_gap_that_is_open():
    power, batch = PolledPower("x", started_ns=0, refresh_s=0.1, hole_s=1.0), Batch()
    power.observe(batch, power_w=100.0, time_ns=S)
    power.fail(batch, 2 * S, "denied")
    power.observe(batch, power_w=100.0, time_ns=9 * S)
    assert [g.reason for g in batch.gaps] == ["denied"]


@given(stands_s=st.integers(1, 90), step_ms=st.integers(200, 5000))
def test_a_stamp_that_stands_still_is_one_gap_until_it_moves(stands_s, step_ms):
    power, batch = PolledPower("x", started_ns=0), Batch()
    times = range(S, S + stands_s * S + 1, step_ms * MS)
    for time_ns in times:
        power.observe(batch, power_w=100.0, time_ns=time_ns, stamp="12:00")
    assert kept(batch) == [(S, 100.0)]
    stale = times[-1] - S > STALE_S * S
    assert [(g.start_ns, g.end_ns) for g in batch.gaps] == ([(S, None)] if stale else [])
    assert all("12:00" in g.reason for g in batch.gaps)
    back = Batch()
    power.observe(back, power_w=100.0, time_ns=100 * S, stamp="12:01")
    assert not back.gaps
    assert [math.isnan(w) for _, w in back.samples["x"]] == ([True, False] if stale else [False])


def test_after_a_failure_a_stamp_seen_before_is_still_the_old_measurement():
    power, batch = PolledPower("x", started_ns=0), Batch()
    power.observe(batch, power_w=100.0, time_ns=S, stamp="a")
    power.fail(batch, 2 * S, "timeout")
    power.observe(batch, power_w=100.0, time_ns=3 * S, stamp="a")
    assert len(kept(batch)) == 1
    power.observe(batch, power_w=100.0, time_ns=4 * S, stamp="b")
    assert len(kept(batch)) == 2
    assert len(batch.gaps) == 1


def test_changes_across_a_gap_teach_nothing():
    power, batch = PolledPower("x", started_ns=0), Batch()
    for i in range(20):
        power.observe(batch, power_w=100.0 + i, time_ns=i * 10 * S)
        power.fail(batch, i * 10 * S + S, "timeout")
    assert not power.refresh_seen


class _Polled:
    """A sensor of one polled reading, which says what the test wants it to say."""

    name, period_s = "polled", 0.0

    def __init__(self) -> None:
        self.time_ns, self.says = 0, 100.0
        self.power = PolledPower("x", started_ns=0, refresh_s=0.1, hole_s=2.0)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def domains(self) -> list[Domain]:
        return [Domain(name="x", source="test", resolution_s=0.1)]

    def capabilities(self) -> list[Capability]:
        return []

    def read(self) -> Batch:
        batch = Batch()
        if isinstance(self.says, str):
            self.power.fail(batch, self.time_ns, self.says)
        else:
            self.power.observe(batch, power_w=self.says, time_ns=self.time_ns)
        return batch


@given(steps=happenings)
def test_in_the_sampler_gaps_are_apart_closed_by_data_and_never_covered(steps):
    sensor = _Polled()
    sampler = Sampler([sensor], clock=Clock(lambda: sensor.time_ns, lambda: sensor.time_ns))
    for step_ms, sensor.says in [*steps, (1000, 100.0)]:
        sensor.time_ns += step_ms * MS
        sampler.read_due()
        assert sampler.is_silent("x") == isinstance(sensor.says, str)
    gaps = list(sampler.gaps)
    assert all(g.end_ns is not None for g in gaps)
    assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(gaps))
    series = sampler.series["x"]
    column = series.column(0, 1 << 62)
    first_ns = int(column.times_ns[~np.isnan(column.watts)][0])
    gap_s = sum(g.end_ns - max(g.start_ns, first_ns) for g in gaps if g.end_ns > first_ns) / S
    known_s = (sensor.time_ns - first_ns) / S - gap_s
    assert series.mark(1 << 62).covered_s == pytest.approx(known_s, abs=1e-6)
