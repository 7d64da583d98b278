"""Snapshots: the power of the last moments, joules that never fall, and the history."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

import pytest

from tessera.errors import SensorLost
from tessera.monitor.core import Monitor
from tessera.monitor.series import PowerSeries
from tessera.monitor.snapshot import (
    CHUNK_NS,
    HISTORY,
    DomainReading,
    EnergyLedger,
    PowerWatch,
    Snapshot,
    _power_history,
)
from tessera.schema import Capability, Domain, Telemetry
from tessera.sensors.base import Batch
from tessera.sensors.discover import DiscoveredSensors

from fakes.sensor import ScriptSensor

SECOND = 1_000_000_000


def test_history_is_at_the_sensors_resolution():
    series = PowerSeries(Domain(name="gpu0", source="s", resolution_s=0.02))
    wave = [(t, 700.0 if t // 100_000_000 % 2 else 100.0) for t in range(0, 2 * SECOND + 1, 20_000_000)]
    series.extend(wave)
    fine = _power_history(series, 0.02, series.last_ns)
    assert len(fine) == HISTORY
    assert {round(w) for w in fine if w is not None} == {100, 400, 700}  # the levels, and the edges between them


def test_history_keeps_its_bars_when_time_goes_on_and_shows_the_gap():
    series = PowerSeries(Domain(name="gpu0", source="s", resolution_s=0.02))
    series.extend([(t, 100.0 + t * 1e-8) for t in range(0, 3 * SECOND, 20_000_000)])
    before = _power_history(series, 0.1, series.last_ns)
    series.extend([(5 * SECOND - 1, math.nan), (5 * SECOND, 300.0), (5 * SECOND + SECOND // 2, 300.0)])
    after = _power_history(series, 0.1, series.last_ns)
    assert after[5:34] == pytest.approx(before[31:]), "the bars from 0 to 2.9 s"
    assert after[36:54] == [None] * 18
    assert after[-5:] == pytest.approx([300.0] * 5)


def test_power_is_the_mean_of_an_interval_and_its_age_has_the_lag():
    domain = Domain(name="gpu0", source="script", resolution_s=0.02, lag_s=0.03)
    sensor = ScriptSensor(lambda t: 700.0 if t % 0.1 < 0.05 else 100.0, clock=time.monotonic_ns, domain=domain)
    with PowerWatch(DiscoveredSensors([sensor], []), 0.4) as watch:
        time.sleep(0.5)
        look = snapshot_when(watch, lambda r: r.power_w is not None and abs(r.power_w - 400.0) <= 60.0)
    (r,) = look.readings
    assert r.power_w == pytest.approx(400.0, rel=0.15), "one sample would be 100 or 700"
    assert r.age_s is not None and r.age_s >= 0.03
    assert look.energy_j == pytest.approx(look.time_s * r.coverage * 400, rel=0.3)
    assert r.error_j > 0 and look.basis == "measured" and look.sensors == {"script": True}


def snapshot_when(watch: PowerWatch, condition: Callable[[DomainReading], bool]) -> Snapshot:
    """The first snapshot whose domain meets a condition."""
    deadline = time.monotonic() + 600.0
    while not condition((look := watch.take_snapshot()).readings[0]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return look


def test_a_lost_sensor_is_shown_with_its_reason_and_joules_never_fall():
    sensor = ScriptSensor(clock=time.monotonic_ns)
    with PowerWatch(DiscoveredSensors([sensor], [Capability(name="rapl", available=False, reason="no")]), 0.1) as watch:
        looks = [snapshot_when(watch, lambda r: r.energy_j > 0)]
        sensor.fail = SensorLost("GPU is lost")
        looks.append(snapshot_when(watch, lambda r: r.lost is not None))
        sensor.fail = None
        looks.append(snapshot_when(watch, lambda r: r.lost is None and r.coverage < 0.95))
    whole, lost, back = (s.readings[0] for s in looks)
    assert whole.lost is None and whole.gaps == 0
    assert lost.lost == "GPU is lost" and lost.power_w is None and lost.gaps == 1 and lost.energy_j > 0
    assert looks[1].sensors == {"script": False}
    assert back.lost is None and back.power_w == pytest.approx(100.0) and back.gaps == 1 and back.coverage < 0.95
    assert whole.energy_j <= lost.energy_j <= back.energy_j
    assert None in back.history_w
    assert looks[0].missing == {"rapl": "no"}


def steady(monitor: Monitor, start_ns: int, end_ns: int, *, counter_j: float | None, reset: bool = False) -> None:
    """100 W of samples, and a counter that saw `counter_j` of it (or began anew in between)."""
    batch = Batch()
    for t in range(start_ns, end_ns + 1, SECOND // 10):
        batch.add("gpu0", t, 100.0)
    if counter_j is not None:
        first, last = (1000.0, 5.0) if reset else (1000.0, 1000.0 + counter_j)
        batch.anchors["gpu0"] = [(start_ns + SECOND, first), (end_ns - SECOND, last)]
    monitor.sampler._take(batch)


def ledger_since(seconds: float) -> tuple[Monitor, EnergyLedger, int]:
    """A ledger that began so long ago, without a thread."""
    sensor = ScriptSensor(clock=time.monotonic_ns, domain=Domain(name="gpu0", source="s", resolution_s=0.1))
    monitor = Monitor([sensor])
    ledger = EnergyLedger(monitor)
    start_ns = ledger._window.start.host_ns - round(seconds * SECOND)
    ledger._window.start.host_ns = start_ns
    return monitor, ledger, start_ns


def test_a_counter_reset_does_not_take_joules_back():
    monitor, ledger, start = ledger_since(40)
    steady(monitor, start, start + 20 * SECOND, counter_j=18 * 103.0)
    first = ledger.read(start + 20 * SECOND, calm=True)["gpu0"]
    assert first.energy_j == pytest.approx(20 * 103.0, abs=1)
    steady(monitor, start + 20 * SECOND, start + 21 * SECOND, counter_j=None)
    monitor.sampler._take(Batch(anchors={"gpu0": [(start + 20 * SECOND, 5.0)]}))
    second = ledger.read(start + 20 * SECOND + 10_000_000, calm=True)["gpu0"]
    assert second.energy_j >= first.energy_j
    steady(monitor, start + 21 * SECOND, start + 39 * SECOND, counter_j=None)
    assert ledger.read(start + 39 * SECOND, calm=True)["gpu0"].energy_j == pytest.approx(3900, rel=0.03)


def test_the_chain_of_windows_loses_nothing():
    long_s = CHUNK_NS * 1e-9 + 10
    monitor, ledger, start = ledger_since(long_s)
    now = time.monotonic_ns()
    steady(monitor, start - SECOND, now, counter_j=None)
    one = ledger.read(now, calm=True)["gpu0"]
    assert ledger._closing, "the first window is over"
    steady(monitor, now + SECOND // 10, now + 5 * SECOND, counter_j=None)
    monitor._after_read()
    two = ledger.read(now + 4 * SECOND, calm=True)["gpu0"]
    assert not ledger._closing, "and is settled by now"
    assert one.energy_j == pytest.approx(100 * long_s, rel=1e-3)
    assert two.energy_j - one.energy_j == pytest.approx(400, abs=15)
    assert two.time_s == pytest.approx(long_s + 4, abs=0.2) and two.coverage == pytest.approx(1.0, abs=0.01)


def test_no_window_ends_while_a_gap_is_open():
    monitor, ledger, start = ledger_since(CHUNK_NS * 1e-9 + 1)
    steady(monitor, start - SECOND, start + 5 * SECOND, counter_j=None)
    ledger.read(time.monotonic_ns(), calm=False)
    assert not ledger._closing


def test_a_watch_is_whole_once_its_telemetry_came_twice():
    sensor = ScriptSensor(lambda t: 100.0, clock=time.monotonic_ns)
    watch = PowerWatch(DiscoveredSensors([sensor], []), 0.4)
    sampler, name = watch._monitor.sampler, sensor.domains()[0].name
    sampler.series[name] = PowerSeries(sensor.domains()[0])
    assert not watch.is_whole, "nothing was read"
    sampler.series[name].extend([(1, 100.0), (2, 100.0)])
    assert watch.is_whole, "a sensor without telemetry"
    reading = Telemetry(time_ns=1, domain=name)
    for readings, whole in (([reading], False), ([reading, reading], True)):
        sampler.telemetry[name] = deque(readings)
        assert watch.is_whole == whole
