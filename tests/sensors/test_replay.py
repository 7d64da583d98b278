"""Recordings played again: every sample once, in order, at its time."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.errors import ArgumentError, RecordingError
from tessera.joules import DomainSamples
from tessera.monitor.sampler import Sampler
from tessera.schema import Domain, Hold
from tessera.sensors.base import Sensor
from tessera.sensors.replay import ReplaySensor
from tessera.trace import PowerTrace

from waiting import wait_until

MS = 1_000_000
S = 1000 * MS
RECORDED_NS = 1_790_000_000 * S
NOW_NS = 5000 * S


class Clock:
    def __init__(self):
        self.ns = NOW_NS

    def __call__(self):
        return self.ns


def column(name, offsets_ms, watts=None, **domain):
    times = [RECORDED_NS + round(o * MS) for o in offsets_ms]
    values = [100.0 + i for i in range(len(times))] if watts is None else watts
    return DomainSamples.of(Domain(name=name, source="nvml-samples", resolution_s=0.02, **domain), times, values)


def player(columns, clock, **kwargs):
    sensor = ReplaySensor({c.domain.name: c for c in columns}, clock=clock, **kwargs)
    sensor.start()
    return sensor


def test_in_real_time_samples_come_when_their_time_has_come():
    clock = Clock()
    sensor = player([column("gpu0", [0, 20, 40, 60])], clock)
    assert isinstance(sensor, Sensor)
    assert sensor.read().samples["gpu0"] == [(NOW_NS, 100.0)]
    clock.ns += 45 * MS
    assert sensor.read().samples["gpu0"] == [(NOW_NS + 20 * MS, 101.0), (NOW_NS + 40 * MS, 102.0)]
    assert sensor.read().samples["gpu0"] == []
    clock.ns += 15 * MS
    assert sensor.read().samples["gpu0"] == [(NOW_NS + 60 * MS, 103.0)]
    clock.ns += 100 * S
    assert sensor.read().samples["gpu0"] == [], "after the end there is nothing more"


@pytest.mark.parametrize("speed", [0.5, 2.0, 10.0])
def test_faster_and_slower(speed):
    clock = Clock()
    sensor = player([column("gpu0", [0, 100])], clock, speed=speed)
    clock.ns += round(100 * MS / speed) - 1
    assert len(sensor.read().samples["gpu0"]) == 1
    clock.ns += 1
    assert sensor.read().samples["gpu0"] == [(NOW_NS + round(100 * MS / speed), 101.0)]


def test_all_at_once_the_recording_has_just_ended():
    clock = Clock()
    sensor = player([column("gpu0", [0, 20, 40]), column("cpu0", [10, 50])], clock, speed=None)
    samples = sensor.read().samples
    assert [t - NOW_NS for t, _ in samples["gpu0"]] == [-50 * MS, -30 * MS, -10 * MS]
    assert [t - NOW_NS for t, _ in samples["cpu0"]] == [-40 * MS, 0]
    assert sensor.read().samples == {"gpu0": [], "cpu0": []}


def test_domains_keep_their_times_to_each_other():
    clock = Clock()
    sensor = player([column("gpu0", [0, 20]), column("cpu0", [7, 27])], clock)
    clock.ns += S
    samples = sensor.read().samples
    assert samples["cpu0"][0][0] - samples["gpu0"][0][0] == 7 * MS


def test_started_again_it_plays_from_the_beginning():
    clock = Clock()
    sensor = player([column("gpu0", [0, 20])], clock)
    clock.ns += S
    assert len(sensor.read().samples["gpu0"]) == 2
    sensor.start()
    assert sensor.read().samples["gpu0"] == [(clock.ns, 100.0)]


@given(
    spacings_ms=st.lists(st.integers(min_value=1, max_value=50), min_size=1, max_size=40),
    reads_ms=st.lists(st.integers(min_value=0, max_value=400), max_size=12),
    speed=st.sampled_from([None, 1.0, 3.0, 0.7]),
)
def test_every_sample_comes_once_in_order_and_never_early(spacings_ms, reads_ms, speed):
    clock = Clock()
    offsets = list(itertools.accumulate(spacings_ms))
    sensor = player([column("gpu0", offsets)], clock, speed=speed)
    got = []
    for wait_ms in (*reads_ms, 10_000):
        clock.ns += wait_ms * MS
        batch = sensor.read().samples["gpu0"]
        assert all(t <= clock.ns for t, _ in batch)
        got += batch
    assert [w for _, w in got] == [100.0 + i for i in range(len(offsets))]
    times = [t for t, _ in got]
    assert all(a < b for a, b in itertools.pairwise(times))
    scale = 1.0 if speed is None else speed
    assert np.allclose((np.diff(times)) * scale, np.diff(offsets) * MS, atol=2 * scale)


def test_unknown_stretches_stay_unknown():
    clock = Clock()
    sensor = player([column("gpu0", [0, 20, 40], [100.0, math.nan, 300.0])], clock, speed=None)
    assert math.isnan(sensor.read().samples["gpu0"][1][1])


def test_domains_say_that_they_are_replayed_and_keep_the_rest():
    clock = Clock()
    sensor = player([column("gpu0", [0, 1], lag_s=0.015, hold=Hold.MEAN, basis="modelled")], clock)
    (domain,) = sensor.domains()
    assert domain.source == "replay:nvml-samples"
    assert (domain.name, domain.lag_s, domain.hold, domain.basis) == ("gpu0", 0.015, Hold.MEAN, "modelled")
    trace = PowerTrace({"gpu0": DomainSamples.of(domain, [1, 2], [1.0, 2.0])}, start_ns=1, end_ns=2)
    assert ReplaySensor(trace.columns).domains()[0].source == "replay:nvml-samples", "not replay:replay:"


def test_a_csv_comes_back_as_it_was_written(tmp_path):
    trace = PowerTrace(
        {c.domain.name: c for c in (column("gpu0", [0, 20, 41]), column("gpu0.memory", [0, 100], [9.5, 10.25]))},
        start_ns=RECORDED_NS,
        end_ns=RECORDED_NS + 100 * MS,
    )
    sensor = ReplaySensor.from_csv(trace.to_csv(tmp_path / "power.csv"), speed=None)
    sensor.start()
    samples = sensor.read().samples
    assert [w for _, w in samples["gpu0"]] == [100.0, 101.0, 102.0]
    assert np.diff([t for t, _ in samples["gpu0"]]).tolist() == [20 * MS, 21 * MS]
    assert [w for _, w in samples["gpu0.memory"]] == [9.5, 10.25]
    domains = {d.name: d for d in sensor.domains()}
    assert domains["gpu0"].resolution_s == pytest.approx(0.0205)
    assert domains["gpu0"].source == "replay:csv"
    assert domains["gpu0"].counted
    assert not domains["gpu0.memory"].counted, "the HBM is part of the board"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is missing"),
        ("epoch_us,domain\n1,gpu0\n", "'watts' is missing"),
        ("epoch_us,domain,watts\n", "no samples"),
        ("epoch_us,domain,watts\n1,gpu0,abc\n", "line 2"),
        ("epoch_us,domain,watts\n1,gpu0\n", "line 2"),
    ],
)
def test_a_file_that_is_no_recording(tmp_path, text, says):
    path = tmp_path / "power.csv"
    path.write_text(text)
    with pytest.raises(RecordingError, match=says):
        ReplaySensor.from_csv(path)


def test_a_replay_does_not_advise_columns_that_it_does_not_read(tmp_path):
    path = tmp_path / "power.csv"
    path.write_text("timestamp,power_w\n1790000000.0,42\n")
    with pytest.raises(RecordingError) as refused:
        ReplaySensor.from_csv(path)
    assert "epoch_us, domain, watts" in str(refused.value.fix) and "timestamp" not in str(refused.value.fix)


def test_no_file(tmp_path):
    with pytest.raises(RecordingError, match=r"nothing\.csv"):
        ReplaySensor.from_csv(tmp_path / "nothing.csv")


@pytest.mark.parametrize("columns", [{}, {"gpu0": column("gpu0", [])}])
def test_nothing_to_play(columns):
    with pytest.raises(RecordingError, match="no samples"):
        ReplaySensor(columns)


def test_an_empty_domain_beside_a_full_one():
    clock = Clock()
    sensor = player([column("gpu0", [0]), column("gpu1", [])], clock, speed=None)
    assert sensor.read().samples == {"gpu0": [(NOW_NS, 100.0)], "gpu1": []}


@pytest.mark.parametrize("speed", [0, -1.0, math.nan, math.inf])
def test_impossible_speeds(speed):
    with pytest.raises(ArgumentError, match="speed"):
        ReplaySensor({"gpu0": column("gpu0", [0, 1])}, speed=speed)


def test_nobody_waits_for_a_recording_that_is_over(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    rows = "".join(f"{1_790_000_000_000_000 + 20_000 * k},gpu0,100.0\n" for k in range(10))
    path.write_text("epoch_us,domain,watts\n" + rows)
    sensor = ReplaySensor.from_csv(path)
    sensor.start()
    sampler = Sampler([sensor])
    sampler.start()
    wait_until(lambda: sampler.gaps)
    begun = time.monotonic()
    sampler.wait_for(time.monotonic_ns(), timeout_s=600.0)
    assert time.monotonic() - begun < 300.0
    assert any("over" in g.reason for g in sampler.gaps)
    sampler.stop()
