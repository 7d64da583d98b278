"""A trace that keeps every thread from running: its window has all its samples, and the counter knows the rest."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest

from tessera import monitor, profile
from tessera.analyze import run_energy
from tessera.analyze.run_energy import whole_of
from tessera.attribute.account import account_samples
from tessera.joules import DomainSamples
from tessera.monitor import Monitor
from tessera.monitor.sampler import Sampler
from tessera.profile import power_feed
from tessera.profile.kineto_collector import Finished, KinetoCollector
from tessera.profile.power_feed import PowerFeed
from tessera.profile.runfile import RunFile, RunWriter
from tessera.profile.tracing import Tracing
from tessera.schema import Domain
from tessera.timeline.columns import Builder, Timeline

from fakes.driven import Driven
from fakes.nvml import FakeNvml, Scenario
from fakes.sensor import ScriptSensor

S = 1_000_000_000
STOP_S = 5.0
"""Longer than the driver's ring, which holds 2.4 s."""


class Stalling:
    """Kineto as it is: nobody reads a sensor while it stops, nor while it exports."""

    recording = starting = False

    def __init__(self, fake: FakeNvml) -> None:
        self.notes: list[str] = []
        self.stalls_ns: list[int] = []
        self._fake = fake

    def start(self) -> None:
        self.recording = True

    def stop(self) -> Stalling:
        self.recording = False
        self.stalls_ns.append(self._fake.monotonic_ns())
        self._fake.advance(STOP_S)
        return self

    def timeline(self) -> Timeline:
        self.stalls_ns.append(self._fake.monotonic_ns())
        self._fake.advance(STOP_S)
        return Builder().build()


@pytest.fixture
def recorded(fake_nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run: 9 s, the end of its trace, 8 s. With its span, the end of its window, and when the stalls began."""
    monkeypatch.setattr(power_feed, "CATCH_UP_S", 60.0)  # this waits in virtual time, and the machine may be slow
    fake_nvml.set(Scenario(wave="square:150:650:0.7"))
    sampler, collector, path = Driven(fake_nvml), Stalling(fake_nvml), tmp_path / "run.tessera"
    with RunWriter(path) as writer:
        feed = PowerFeed(writer, sampler, clock=fake_nvml.monotonic_ns)
        tracing = Tracing(collector, lambda *_: None, before_stall=feed.catch_up)  # type: ignore[arg-type]
        start_ns = fake_nvml.monotonic_ns()
        tracing.begin()
        sampler.run(8.0, feed.take)
        fake_nvml.advance(0.9)  # the ring is read once a second
        closed_ns = fake_nvml.monotonic_ns()
        tracing.end()
        sampler.run(8.0, feed.take)
        end_ns = fake_nvml.monotonic_ns()
        feed.finish(end_ns)
        writer.set("start_ns", start_ns)
        writer.set("end_ns", end_ns)
    assert not tracing.notes
    with RunFile(path) as run:
        yield run, start_ns, end_ns, closed_ns, collector.stalls_ns


def test_a_window_has_all_its_samples_however_long_its_end_takes(recorded) -> None:
    run, start_ns, _, closed_ns, (stop_ns, export_ns) = recorded
    power = run.power()
    assert power.energy("gpu0", start_ns, closed_ns).coverage > 0.9999
    assert stop_ns - closed_ns < 0.1 * S, "the program waits for that"
    assert power.energy("gpu0", stop_ns, stop_ns + S).coverage < 0.1, "else nothing was lost, and nothing is tested"
    # What the ring still held after the stop was read before the export began.
    assert power.energy("gpu0", export_ns - 2 * S, export_ns).coverage > 0.9
    assert [round((g.end_ns - g.start_ns) / S) for g in power.gaps if g.domain == "gpu0"] == [3, 3]


def test_the_counter_knows_the_joules_of_the_holes(recorded, fake_nvml: FakeNvml) -> None:
    run, start_ns, end_ns, closed_ns, _ = recorded
    column = run.power().columns["gpu0"]
    truth = fake_nvml.true_joules(start_ns // 1000, end_ns // 1000)
    sampled = run.power().energy("gpu0", start_ns, end_ns)
    found = column.energy(start_ns, end_ns, fill_gaps=True)
    assert sampled.coverage < 0.85 and sampled.error_j > 0.15 * truth
    assert found.source == "nvml-samples+counter"
    assert found.coverage == pytest.approx(1.0, abs=0.001)
    assert found.error_j < 0.01 * truth
    assert abs(found.joules - truth) < found.error_j
    # Where the samples have no hole they stand: rows are shared out of them.
    seen = column.energy(start_ns, closed_ns, fill_gaps=True)
    assert seen == run.power().energy("gpu0", start_ns, closed_ns)


def test_the_sum_of_a_run_has_the_joules_of_the_holes_too(recorded, fake_nvml: FakeNvml) -> None:
    run, start_ns, end_ns, _, _ = recorded
    truth = fake_nvml.true_joules(start_ns // 1000, end_ns // 1000)
    recording = run.recording()
    found = whole_of(recording, recording.energy(), True, None)
    assert abs(found.energy_j - truth) < found.error_j < 0.01 * truth


def test_what_no_row_has_is_told_with_the_holes(recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    run, start_ns, _, closed_ns, _ = recorded
    recording = run.recording()
    power = recording.power
    recording.facts = dataclasses.replace(recording.facts, windows=[(start_ns, closed_ns)])
    traced = power.energy("gpu0", start_ns, closed_ns)
    all_of_it = whole_of(recording, account_samples(recording.timeline, power), True, None)
    parts = {p.where: p for p in run_energy.outside(recording, traced.joules, all_of_it)}
    assert parts.keys() == {"after", "unsampled"}
    holes_s = sum(g.end_ns - g.start_ns for g in power.gaps if g.domain == "gpu0") / S
    assert parts["unsampled"].time_s == pytest.approx(holes_s) and holes_s > 5.0
    assert sum(p.energy_j for p in parts.values()) + traced.joules == pytest.approx(all_of_it.energy_j)
    assert sum(p.time_s for p in parts.values()) + traced.time_s == pytest.approx(all_of_it.time_s, abs=0.2)


@pytest.mark.parametrize("power", [True, False])
def test_a_session_has_its_sensors_read_before_each_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, power: bool
) -> None:
    order: list[str] = []

    def noting(owner: type, name: str, word: str) -> None:
        before = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self: (order.append(word), before(self))[1])

    noting(PowerFeed, "catch_up", "sensors")
    noting(KinetoCollector, "stop", "stop")
    noting(Finished, "timeline", "export")
    monitor.use(Monitor([ScriptSensor(clock=time.monotonic_ns)]).start())
    try:
        with profile.session(activities=["cpu", "power"] if power else ["cpu"], path=tmp_path / "a.tessera"):
            pass
    finally:
        monitor.use(None)
    assert order == (["sensors", "stop", "sensors", "export"] if power else ["stop", "export"])


@pytest.mark.parametrize(
    ("ticks", "filled_s"),
    [
        ([(1, 100.0), (9, 2500.0)], 2),
        ([(1, 100.0), (5, 20.0), (9, 2500.0)], 0),  # reset
        ([(4, 1000.0), (5, 1300.0)], 1),
        ([(5, 1300.0)], 0),
        ([], 0),
        ([(-3, 0.0), (1, 100.0), (9, 2500.0), (30, 9000.0)], 2),  # what lies outside says nothing
    ],
)
def test_only_ticks_that_can_be_subtracted_fill_a_hole(ticks: list[tuple[int, float]], filled_s: int) -> None:
    times = np.arange(0, 10 * S + 1, S // 50)
    hole = (times > 4 * S) & (times <= 6 * S)
    column = DomainSamples.of(
        Domain(name="gpu0", source="made", resolution_s=0.02), times, np.where(hole, np.nan, 300.0)
    )
    at = np.array([t * S for t, _ in ticks], dtype=np.int64)
    counted = dataclasses.replace(column, ticks_ns=at, ticks_j=np.array([j for _, j in ticks], dtype=float))
    found = counted.energy(0, 10 * S, fill_gaps=True)
    assert found.source == ("made+counter" if filled_s else "made")
    assert found.joules == pytest.approx((8 + filled_s) * 300.0)
    assert found.coverage == pytest.approx(0.8 + 0.1 * filled_s)


def test_whoever_holds_the_lock_is_never_surprised_by_data() -> None:
    """A trace is also ended between two bytecodes of a program that is just reading a window."""
    now_ns = [100 * S]
    sampler = Sampler([ScriptSensor(clock=lambda: now_ns[0])])
    sampler.start()
    try:
        assert sampler.wait_for(now_ns[0], 60.0, ["gpu0"], keep_lock=True)
        with sampler.lock:
            before, now_ns[0] = sampler.series["gpu0"].last_ns, 101 * S
            assert not sampler.wait_for(now_ns[0], 0.05, ["gpu0"], keep_lock=True)
            assert sampler.series["gpu0"].last_ns == before
        assert sampler.wait_for(now_ns[0], 60.0, ["gpu0"], keep_lock=True)
    finally:
        sampler.stop()
