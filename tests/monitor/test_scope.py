"""energy_scope and power_trace: nesting, threads, coroutines, long windows, lost sensors, CUDA time, forks."""

from __future__ import annotations

import asyncio
import gc
import importlib
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from monitor.test_sampler import SimulatedClock, drive
from tessera import monitor as tm
from tessera.clock import Clock
from tessera.device import Device, Figure
from tessera.errors import ArgumentError, MeasurementError, SensorLost
from tessera.monitor import Monitor, core, cuda, energy_scope, power_trace
from tessera.monitor import regions as regions_module
from tessera.monitor.core import Window
from tessera.monitor.cuda import DeviceClocks, Edge
from tessera.monitor.regions import read_regions
from tessera.monitor.sampler import Sampler
from tessera.schema import Domain, Hold, Telemetry
from tessera.sensors.base import Batch
from tessera.sensors.modelled import ModelledSensor
from tessera.sensors.nvml import NvmlSensor
from tessera.sensors.processes import ProcessTree

from fakes.by_hand import TimeByHand
from fakes.nvml import FakeNvml, Scenario
from fakes.sensor import ScriptSensor

S = 1_000_000_000
MS = 1_000_000


def sensor(
    power_w: Callable[[float], float] = lambda t: 100.0, name: str = "gpu0", *, step_ms: float = 5.0, **kwargs: object
) -> ScriptSensor:
    made = Domain(name=name, source="script", resolution_s=step_ms * 1e-3, **kwargs)  # type: ignore[arg-type]
    return ScriptSensor(power_w, clock=time.monotonic_ns, step_ms=step_ms, period_s=0.02, domain=made)


Started = Callable[..., Monitor]


@pytest.fixture
def started() -> Iterator[Started]:
    """Makes monitors of script sensors, and stops them afterwards."""
    made: list[Monitor] = []

    def start(*sensors: ScriptSensor) -> Monitor:
        made.append(Monitor(sensors or [sensor()]).start())
        return made[-1]

    yield start
    for m in made:
        m.stop()


@pytest.fixture
def as_default(started: Started) -> Iterator[Monitor]:
    m = started()
    tm.use(m)
    yield m
    tm.use(None)


# -- the block -----------------------------------------------------------------------------------------------


def test_a_block_has_joules_with_error_seconds_source(started: Started) -> None:
    m = started(sensor(lambda t: 250.0, gain_error=0.02))
    before = time.monotonic_ns()
    with energy_scope("step", monitor=m) as energy:
        time.sleep(0.1)
    after = time.monotonic_ns()
    assert energy.energy_j == pytest.approx(250.0 * energy.time_s)
    assert energy.error_j == pytest.approx(0.02 * energy.energy_j, rel=1e-3)
    assert 0.1 <= energy.time_s <= (after - before) * 1e-9
    assert energy.time_s == energy.host_time_s
    assert energy.power_w == pytest.approx(250.0)
    assert energy.coverage == pytest.approx(1.0)
    assert energy.source == "script"
    assert energy.basis == "measured"
    assert before <= energy.start_ns < energy.end_ns <= after
    assert "step" in repr(energy) and " J in " in repr(energy)


def test_the_edges_are_exact_for_a_ramp(started: Started) -> None:
    """100 W/s: the joules of a window follow from its two times."""
    begin = time.monotonic()
    m = started(sensor(lambda t: 100.0 * (t - begin) + 50.0, step_ms=50.0))
    with energy_scope(monitor=m) as energy:
        time.sleep(0.12)
    a, b = energy.start_ns * 1e-9 - begin, energy.end_ns * 1e-9 - begin
    assert energy.energy_j == pytest.approx(50.0 * (b * b - a * a) + 50.0 * (b - a), rel=1e-6)


def test_scopes_nest_and_overlap(started: Started) -> None:
    m = started(sensor(lambda t: 100.0 + 50.0 * math.sin(20 * t)))
    one, two = energy_scope("one", monitor=m), energy_scope("two", monitor=m)
    with energy_scope("outer", monitor=m) as outer:
        one.__enter__()
        time.sleep(0.04)
        two.__enter__()
        time.sleep(0.04)
        one.__exit__(None, None, None)
        time.sleep(0.04)
        two.__exit__(None, None, None)
    assert one.start_ns < two.start_ns < one.end_ns < two.end_ns
    around_s = outer.time_s - (two.end_ns - one.start_ns) * 1e-9  # at 50 to 150 W
    assert outer.energy_j < one.energy_j + two.energy_j + 150.0 * around_s, "the overlap counts in both"
    assert max(one.energy_j, two.energy_j) < outer.energy_j
    with energy_scope("again", monitor=m) as whole:
        with energy_scope("a", monitor=m) as a:
            time.sleep(0.03)
        with energy_scope("b", monitor=m) as b:
            time.sleep(0.03)
    between_s = whole.time_s - a.time_s - b.time_s
    between_j, slack_j = whole.energy_j - a.energy_j - b.energy_j, 0.02 * whole.energy_j
    assert -slack_j <= between_j <= 150.0 * between_s + slack_j


def test_scopes_in_threads_are_their_own(started: Started) -> None:
    m = started()
    found: dict[int, tuple[float, float]] = {}

    def work(i: int) -> None:
        with energy_scope(f"thread{i}", monitor=m) as energy:
            time.sleep(0.02 * (i + 1))
        found[i] = (energy.energy_j, energy.time_s)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 6
    for i, (joules, seconds) in found.items():
        assert seconds >= 0.02 * (i + 1)
        assert joules == pytest.approx(100.0 * seconds)


def test_an_exception_passes_through_and_the_joules_are_there(started: Started) -> None:
    m = started()
    scope = energy_scope("failing", monitor=m)
    with pytest.raises(RuntimeError, match="boom"), scope:
        time.sleep(0.03)
        raise RuntimeError("boom")
    assert scope.energy_j == pytest.approx(100.0 * scope.time_s)
    assert scope.time_s >= 0.03


def test_read_inside_the_block_gives_so_far_and_does_not_end_it(started: Started) -> None:
    m = started()
    with energy_scope(monitor=m) as energy:
        time.sleep(0.03)
        first = energy.energy_j
        time.sleep(0.03)
        second, seconds = energy.energy_j, energy.time_s
        assert "open" in repr(energy)
        assert energy.power_w == pytest.approx(100.0)
    assert 3.0 <= first < second < energy.energy_j
    assert seconds < energy.time_s
    assert energy.energy_j == pytest.approx(100.0 * energy.time_s)
    assert m.regions()[0].calls == 1


def test_a_scope_that_was_never_entered_says_so() -> None:
    scope = energy_scope("idle")
    for read in (lambda: scope.energy_j, lambda: scope.by_domain, scope.report, lambda: scope.start_ns):
        with pytest.raises(MeasurementError, match="never entered") as caught:
            read()
        assert caught.value.fix
    assert "not entered" in repr(scope)


def test_a_scope_may_be_entered_again_and_then_means_the_last_time(started: Started) -> None:
    m = started()
    scope = energy_scope("twice", monitor=m)
    with scope:
        time.sleep(0.06)
    begin = time.monotonic()
    with scope:
        time.sleep(0.01)
    assert 0.01 <= scope.time_s <= time.monotonic() - begin
    assert scope.energy_j == pytest.approx(100.0 * scope.time_s)


def test_an_empty_block_is_no_error(started: Started) -> None:
    with energy_scope(monitor=started()) as energy:
        pass
    assert energy.energy_j == pytest.approx(100.0 * energy.time_s, abs=0.1)
    assert 0 <= energy.error_j < 0.1 + 0.1 * energy.energy_j


# -- functions and coroutines --------------------------------------------------------------------------------


def test_a_decorated_function_is_a_region_with_every_call(as_default: Monitor) -> None:
    @energy_scope("work")
    def work(a: int, *, b: int) -> int:
        """Says what it does."""
        time.sleep(0.01)
        return a + b

    assert [work(i, b=1) for i in range(4)] == [1, 2, 3, 4]
    assert work.__name__ == "work" and work.__doc__ == "Says what it does."
    as_default.settle_all()
    (region,) = as_default.regions()
    assert (region.name, region.calls) == ("work", 4)
    assert region.energy.time_s >= 0.04
    assert region.energy.joules == pytest.approx(100.0 * region.energy.time_s)


def test_a_recursive_function_is_one_call_with_all_that_it_calls(as_default: Monitor) -> None:
    @energy_scope("down")
    def down(n: int) -> int:
        time.sleep(0.01)
        return n if n == 0 else down(n - 1)

    begun = time.monotonic()
    assert down(2) == 0
    took = time.monotonic() - begun
    as_default.settle_all()
    (region,) = as_default.regions()
    assert region.calls == 1
    assert 0.03 <= region.energy.time_s <= took


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600.0
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def test_a_forgotten_scope_takes_nothing_from_later_ones(as_default: Monitor) -> None:
    energy_scope("same").__enter__()
    gc.collect()
    with energy_scope("same"), energy_scope("other"), energy_scope("same"):
        pass
    with energy_scope("same"):
        pass
    as_default.settle_all()
    assert {r.name: r.calls for r in as_default.regions()} == {"same": 2, "other": 1}


def test_a_scope_may_be_asynchronous(as_default: Monitor) -> None:
    async def main() -> float:
        async with energy_scope("async") as energy:
            await asyncio.sleep(0.01)
        return energy.time_s

    assert asyncio.run(main()) >= 0.01
    as_default.settle_all()
    assert [r.name for r in as_default.regions()] == ["async"]


def test_scopes_that_are_never_left_wait_for_nothing(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is looked at until its start is known, and then no more: this sensor has no counter whose tick may come."""
    monkeypatch.setattr(core, "GIVE_UP_NS", 1 << 62)
    m = started()
    left = [energy_scope("never", monitor=m).__enter__() for _ in range(300)]
    until(lambda: not m._pending)
    left[0].__exit__(None)
    until(lambda: [r.calls for r in m.regions()] == [1])
    assert left[8].energy_j >= 0.0


def test_open_scopes_are_looked_at_again_when_the_counter_ticks(started: Started) -> None:
    m = started()
    window = m.open("open")
    until(lambda: not m._pending)
    assert list(m._waiting.values()) == [window] and not window._firsts
    name = next(iter(m.sampler.anchors))
    with m.sampler.lock:
        m.sampler.anchors[name].history.add(time.monotonic_ns(), 1.0, m.sampler.series[name].mark(time.monotonic_ns()))
    until(lambda: name in window._firsts and not m._waiting)


def test_a_decorated_function_that_raises_is_counted(as_default: Monitor) -> None:
    @energy_scope("bad")
    def bad() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        bad()
    as_default.settle_all()
    assert as_default.regions()[0].calls == 1


def test_a_decorated_coroutine_is_measured_until_it_is_done(as_default: Monitor) -> None:
    @energy_scope("fetch")
    async def fetch(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    async def main() -> list[float]:
        with energy_scope("all"):
            return await asyncio.gather(fetch(0.06), fetch(0.03), fetch(0.06))

    assert asyncio.run(main()) == [0.06, 0.03, 0.06]
    as_default.settle_all()
    regions = {r.name: r for r in as_default.regions()}
    assert regions["fetch"].calls == 3
    assert 0.06 <= regions["fetch"].energy.time_s <= regions["all"].energy.time_s, "a moment counts once"
    assert regions["fetch"].overlaps


@pytest.mark.parametrize("kept", [256, 1])
def test_windows_of_one_name_count_each_moment_once_in_any_order(
    started: Started, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Two that overlap in part, one inside both, and one apart; however they settle."""
    monkeypatch.setattr(regions_module, "MAX_RECENT", kept)
    m = started()
    begun = time.monotonic_ns()
    until(lambda: time.monotonic_ns() > begun + 60 * MS)
    for order in itertools.permutations([(0, 20), (10, 30), (12, 18), (40, 50)]):
        for start_ms, end_ms in order:
            window = Window(str(order), Edge(begun + start_ms * MS))
            window.end = Edge(begun + end_ms * MS)
            m.read(window)
    for region in m.regions():
        assert region.calls == 4 and region.overlaps
        assert region.energy.energy_j == pytest.approx(100.0 * region.energy.time_s, rel=0.01)
        assert region.energy.time_s == pytest.approx(0.04) if kept > 1 else region.energy.time_s < 0.0401


# -- domains -------------------------------------------------------------------------------------------------


def test_several_gpus_are_summed_and_uncounted_domains_are_not(started: Started) -> None:
    m = started(
        sensor(lambda t: 100.0, gain_error=0.03),
        sensor(lambda t: 250.0, "gpu1", gain_error=0.04),
        sensor(lambda t: 40.0, "gpu0.memory", counted=False),
        sensor(lambda t: 30.0, "cpu0"),
    )
    with energy_scope(monitor=m) as energy:
        time.sleep(0.05)
    assert energy.energy_j == pytest.approx(380.0 * energy.time_s)
    assert energy.power_w == pytest.approx(380.0)
    assert energy.error_j == pytest.approx(math.hypot(3.0, 10.0) * energy.time_s, rel=1e-3)
    parts = energy.by_domain
    assert set(parts) == {"gpu0", "gpu1", "gpu0.memory", "cpu0"}
    assert parts["gpu0.memory"].joules == pytest.approx(40.0 * energy.time_s)
    report = energy.report()
    assert report.total == energy.energy
    assert {d.name for d in report.domains} == set(parts)


def test_the_total_waits_for_no_uncounted_domain(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """HBM power is a one-second average: a scope read must not take that long."""
    slow = sensor(lambda t: 40.0, "gpu0.memory", counted=False, step_ms=600_000.0)
    m = started(sensor(), slow)
    waited: list[object] = []
    wait_for = m.sampler.wait_for
    monkeypatch.setattr(m.sampler, "wait_for", lambda *given: waited.append(given[2]) or wait_for(*given))
    with energy_scope(monitor=m) as energy:
        time.sleep(0.02)
    assert energy.energy_j == pytest.approx(100.0 * energy.time_s)
    assert waited and all(names is not None and "gpu0.memory" not in names for names in waited)


def test_work_beside_sleep_within_one_modelled_sample_gets_the_joules_of_its_cpu_time() -> None:
    cpu = Device(
        id="cpu", name="A CPU", kind="cpu", vendor="?", tdp_w=Figure(value=100.0, source="x"),
        idle_w=Figure(value=20.0, source="x"),
    )  # fmt: skip
    scoped = Monitor([ModelledSensor(cpu, tree=ProcessTree())]).start()
    core_w, work_s = 100.0 / (os.cpu_count() or 1), 0.0
    works, sleeps = [], []
    try:
        with energy_scope("all", monitor=scoped) as whole:
            for _ in range(8):
                before_s = time.process_time()
                with energy_scope("work", monitor=scoped) as work:
                    while time.process_time() < before_s + 0.02:
                        pass
                work_s += time.process_time() - before_s
                with energy_scope("sleep", monitor=scoped) as sleep:
                    time.sleep(0.05)
                works.append(work)
                sleeps.append(sleep)
        work_j, sleep_j = sum(w.energy_j for w in works), sum(s.energy_j for s in sleeps)
        assert work_j == pytest.approx(core_w * work_s, rel=0.05)
        assert sleep_j < 0.2 * work_j  # the sampler's own thread, and what runs it
        assert work_j + sleep_j == pytest.approx(whole.energy_j, rel=0.05)
    finally:
        scoped.stop()


def test_one_modelled_domain_makes_the_scope_modelled(started: Started) -> None:
    with energy_scope(monitor=started(sensor(), sensor(name="cpu0", basis="modelled"))) as energy:
        pass
    assert energy.basis == "modelled"


def test_a_sensor_that_dies_leaves_the_joules_so_far(started: Started) -> None:
    one, two = sensor(), sensor(lambda t: 50.0, "cpu0")
    m = started(one, two)
    with energy_scope(monitor=m) as energy:
        time.sleep(0.15)
        one.fail = SensorLost("the GPU fell off the bus", why="Xid 79")
        until(lambda: m.sampler.gaps)
        time.sleep(0.15)
    assert m.sampler.is_silent("gpu0"), "nobody waits for a dead sensor"
    parts = energy.by_domain
    assert parts["cpu0"].coverage == pytest.approx(1.0)
    assert parts["cpu0"].joules == pytest.approx(50.0 * energy.time_s)
    assert 0.0 < parts["gpu0"].coverage < 1.0 - 0.1 / energy.time_s, "of the last 150 ms nothing is known"
    assert parts["gpu0"].joules == pytest.approx(100.0 * energy.time_s * parts["gpu0"].coverage)
    assert energy.coverage == parts["gpu0"].coverage
    (gap,) = energy.report().gaps
    assert gap.domain == "gpu0" and "Xid 79" in gap.reason


def test_a_stopped_monitor_still_answers_for_what_it_measured(started: Started) -> None:
    m = started()
    with energy_scope(monitor=m) as energy:
        time.sleep(0.05)
    m.sampler.wait_for(time.monotonic_ns())
    m.stop()
    assert energy.energy_j == pytest.approx(100.0 * energy.time_s)


def test_a_monitor_without_sensors_answers_with_nothing_seen(started: Started) -> None:
    m = Monitor([]).start()
    with energy_scope(monitor=m) as energy:
        time.sleep(0.01)
    assert math.isnan(energy.energy_j) and math.isnan(energy.error_j), "nothing was measured, which is not 0 J"
    assert (energy.coverage, energy.source, energy.power_w) == (0.0, "none", None)
    m.stop()


# -- long windows, in simulated time -------------------------------------------------------------------------


class CounterSensor(ScriptSensor):
    """Samples that read `gain` times the true power, and a counter of the truth that ticks every 100 ms."""

    def __init__(self, true_w: Callable[[float], float], *, gain: float = 1.0, **kwargs: object) -> None:
        super().__init__(lambda t: gain * true_w(t), **kwargs)  # type: ignore[arg-type]
        self.true_w = true_w
        self.joules = 0.0
        self.tick_ns: int | None = None

    def read(self) -> Batch:
        batch = super().read()
        now = self.clock()
        if self.tick_ns is None:
            self.tick_ns = now - now % (100 * MS)
        while self.tick_ns + 100 * MS <= now:
            steps = [self.tick_ns + 5 * MS + 10 * MS * i for i in range(10)]
            self.joules += sum(self.true_w(t * 1e-9) * 0.01 for t in steps)
            self.tick_ns += 100 * MS
            batch.anchors.setdefault("gpu0", []).append((self.tick_ns, self.joules))
        return batch


def close(window: Window, time_: SimulatedClock) -> None:
    window.end = Edge(time_.now_ns)


def wave(t: float) -> float:
    return 400.0 + 300.0 * math.sin(t)


def truth(start_ns: int, end_ns: int) -> float:
    a, b = start_ns * 1e-9, end_ns * 1e-9
    return 400.0 * (b - a) - 300.0 * (math.cos(b) - math.cos(a))


def test_a_window_longer_than_the_fine_memory_stays_exact() -> None:
    """Two hours: eleven minutes are kept sample by sample."""
    time_ = SimulatedClock()
    sampler = Sampler([ScriptSensor(wave, clock=time_, period_s=2.0)], clock=time_.clock)
    drive(sampler, time_, 1.003)
    window = Window("long", Edge(time_.now_ns))
    clocks = DeviceClocks()
    for _ in range(720):
        drive(sampler, time_, 10.0)
        assert not window.settle(sampler, clocks, ["gpu0"])
    time_.now_ns += 7 * MS
    close(window, time_)
    drive(sampler, time_, 5.0)
    assert window.settle(sampler, clocks, ["gpu0"])
    energy = window.energies["gpu0"]
    end = window.end
    assert end is not None
    assert energy.time_s == pytest.approx(7200.007)
    assert energy.coverage == pytest.approx(1.0)
    # Trapezia of 20 ms under a sine of 1 rad/s are short by dt²/12 of it.
    assert energy.joules == pytest.approx(truth(window.start.host_ns, end.host_ns), rel=1e-6)


def test_the_counter_corrects_long_windows_and_what_it_shows_corrects_short_ones() -> None:
    time_ = SimulatedClock()
    domain = Domain(name="gpu0", source="samples", resolution_s=0.02, gain_error=0.05)
    sensor_ = CounterSensor(wave, gain=0.97, clock=time_, domain=domain)
    sampler = Sampler([sensor_], clock=time_.clock)
    drive(sampler, time_, 2.0)
    found = {}
    for seconds in (1.0, 10.0):
        window = Window("w", Edge(time_.now_ns))
        drive(sampler, time_, seconds)
        close(window, time_)
        drive(sampler, time_, 0.5)
        assert window.settle(sampler, DeviceClocks(), ["gpu0"])
        end = window.end
        assert end is not None
        found[seconds] = (window.energies["gpu0"], truth(window.start.host_ns, end.host_ns))
    short, true_short = found[1.0]
    assert short.source == "samples+counter"
    assert short.joules == pytest.approx(true_short, rel=0.01), "most of the 3% is gone"
    long, true_long = found[10.0]
    assert long.source == "samples+counter"
    assert long.joules == pytest.approx(true_long, rel=2e-3), "the 3% are gone but for the rests at both ends"
    assert max(long.error_j / long.joules, short.error_j / short.joules) < 0.005 < domain.gain_error


def test_a_counter_that_agrees_exactly_was_used_too() -> None:
    time_ = SimulatedClock()
    sampler = Sampler([CounterSensor(lambda t: 256.0, clock=time_)], clock=time_.clock)
    drive(sampler, time_, 1.0)
    window = Window("w", Edge(time_.now_ns))
    drive(sampler, time_, 5.0)
    close(window, time_)
    drive(sampler, time_, 1.0)
    assert window.settle(sampler, DeviceClocks(), ["gpu0"])
    assert window.energies["gpu0"].source == "script+counter"
    assert window.energies["gpu0"].joules == pytest.approx(256.0 * 5.0)


def test_the_counter_fills_what_the_samples_missed() -> None:
    """Two seconds in which the samples say nothing: the counter has counted on."""
    time_ = SimulatedClock()
    sensor_ = CounterSensor(wave, clock=time_)
    sensor_.power_w = lambda t: 0.0 if 105.0 < t < 107.0 else wave(t)  # the script sensor's 0 W is "not known"
    sampler = Sampler([sensor_], clock=time_.clock)
    drive(sampler, time_, 1.0)
    window = Window("w", Edge(time_.now_ns))
    drive(sampler, time_, 15.0)
    close(window, time_)
    drive(sampler, time_, 1.0)
    assert window.settle(sampler, DeviceClocks(), ["gpu0"])
    energy, end = window.energies["gpu0"], window.end
    assert end is not None
    assert sampler.series["gpu0"].mark(end.host_ns).covered_s < 14.5
    assert energy.coverage == pytest.approx(1.0, abs=1e-3)
    assert energy.joules == pytest.approx(truth(window.start.host_ns, end.host_ns), rel=2e-3)


def test_a_sensor_lost_mid_scope_and_back_leaves_a_hole_and_a_wider_error() -> None:
    time_ = SimulatedClock()
    sensor_ = ScriptSensor(lambda t: 200.0, clock=time_)
    sampler = Sampler([sensor_], clock=time_.clock)
    drive(sampler, time_, 1.0)
    window = Window("w", Edge(time_.now_ns))
    drive(sampler, time_, 5.0)
    sensor_.fail = SensorLost("driver restart")
    drive(sampler, time_, 2.0)
    sensor_.fail = None
    drive(sampler, time_, 8.0)
    close(window, time_)
    drive(sampler, time_, 1.0)
    assert window.settle(sampler, DeviceClocks(), ["gpu0"])
    energy = window.energies["gpu0"]
    assert 0.7 < energy.coverage < 0.9
    assert energy.joules == pytest.approx(200.0 * 15.0 * energy.coverage)
    assert energy.power_w == pytest.approx(200.0)
    assert energy.joules + energy.error_j >= 200.0 * 15.0 - 1e-6, "what was not seen may have gone on as before"


def test_so_far_uses_the_counter_as_well() -> None:
    time_ = SimulatedClock()
    sampler = Sampler([CounterSensor(wave, gain=0.97, clock=time_)], clock=time_.clock)
    drive(sampler, time_, 1.0)
    window = Window("w", Edge(time_.now_ns))
    drive(sampler, time_, 8.0)
    window.settle(sampler, DeviceClocks(), ["gpu0"])
    energy = window.so_far(sampler, Edge(time_.now_ns))["gpu0"]
    assert energy.source.endswith("+counter")
    assert energy.joules == pytest.approx(truth(window.start.host_ns, time_.now_ns), rel=3e-3)
    assert window.end is None and not window.energies


# -- regions and the process's monitor -----------------------------------------------------------------------


def test_regions_add_up_by_name_and_keep_the_level_error(started: Started) -> None:
    m = started(sensor(gain_error=0.05))
    for name in ("a", "b", "a", "a"):
        with energy_scope(name, monitor=m):
            time.sleep(0.02)
    m.settle_all()
    regions = {r.name: r for r in m.regions()}
    assert (regions["a"].calls, regions["b"].calls) == (3, 1)
    assert [r.name for r in m.regions()] == ["a", "b"], "the most joules first"
    a = regions["a"].energy
    assert a.joules == pytest.approx(100.0 * a.time_s)
    assert a.error_j == pytest.approx(0.05 * a.joules, rel=1e-6), "repeating does not average a level error away"
    assert a.coverage == pytest.approx(1.0)


@pytest.mark.parametrize(("spare_s", "settled"), [(0.0, 5), (0.05, 51), (3.0, 401)])
def test_settling_ends_when_a_sensor_is_due(monkeypatch: pytest.MonkeyPatch, spare_s: float, settled: int) -> None:
    """Ten thousand scopes at once must not keep a counter from being read while its ticks are sought."""
    now_ns, calls = [0], []

    def settle(*_: object, **__: object) -> bool:
        now_ns[0] += MS
        calls.append(1)
        return False

    own = Monitor([])
    own.sampler = types.SimpleNamespace(spare_s=spare_s, counted_domains=list, anchors={})  # type: ignore[assignment]
    window = types.SimpleNamespace(end=None, settle=settle, is_marked=lambda *_: False)
    own._pending = dict.fromkeys(range(1000), window)  # type: ignore[arg-type]
    monkeypatch.setattr(core, "time", types.SimpleNamespace(monotonic_ns=lambda: now_ns[0]))
    own._after_read()
    assert len(calls) == settled
    own._pending.clear()


def test_settled_windows_are_forgotten(started: Started) -> None:
    m = started()
    for _ in range(200):
        with energy_scope("many", monitor=m):
            pass
    until(lambda: not m._pending)
    assert m.regions()[0].calls == 200


def test_use_replaces_the_monitor_and_stops_the_old_one(started: Started) -> None:
    one, two = started(), started(sensor(lambda t: 300.0))
    scope = energy_scope("reused")
    tm.use(one)
    with scope:
        time.sleep(0.02)
    assert scope.power_w == pytest.approx(100.0)
    tm.use(two)
    assert not one.sampler.wait_for(time.monotonic_ns() + S, 0.2), "the old one is stopped"
    with scope:
        time.sleep(0.02)
    assert scope.power_w == pytest.approx(300.0)
    tm.use(None)


def script(body: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", body],
        env={**os.environ, "TESSERA_SENSORS": "modelled", **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_forked_child_makes_its_own_monitor() -> None:
    done = script("""
import os, sys, time
from tessera.monitor import default, energy_scope
scope = energy_scope("both")
with scope:
    time.sleep(0.02)
parent = default()
pid = os.fork()
with scope:
    time.sleep(0.1)
good = scope.coverage > 0.5 and scope.energy_j > 0 and (default() is parent) == (pid != 0)
if pid == 0:
    os._exit(0 if good else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) or (0 if good else 4))
""")
    assert done.returncode == 0, done.stderr


def test_regions_are_written_at_exit(tmp_path: Path) -> None:
    body = """
import time
from tessera.monitor import energy_scope
for name in ("load", "train", "train"):
    with energy_scope(name):
        time.sleep(0.02)
"""
    done = script(body, TESSERA_REGIONS_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text())["schema_version"] == 1
    regions = {r.name: r for r in read_regions(tmp_path)}
    assert regions["train"].calls == 2 and regions["load"].calls == 1
    assert regions["train"].energy.joules > 0
    assert regions["train"].energy.basis == "modelled"
    # A folder that is gone is no error, and neither is none at all.
    assert script(body, TESSERA_REGIONS_DIR=str(tmp_path / "gone")).returncode == 0


# -- power_trace ---------------------------------------------------------------------------------------------


def test_a_power_trace_has_the_samples_of_its_block(started: Started) -> None:
    m = started(sensor(lambda t: 200.0))
    with power_trace(monitor=m) as pwr:
        time.sleep(0.1)
        assert pwr.energy_j > 0, "so far"
    assert pwr.energy_j == pytest.approx(200.0 * pwr.seconds)
    assert pwr.true_resolution_ms == pytest.approx(5.0)
    assert len(pwr.columns["gpu0"].times_ns) == pytest.approx(pwr.seconds / 5e-3, abs=8)
    assert pwr.peak_w == 200.0
    seconds = pwr.seconds
    time.sleep(0.03)
    assert pwr.seconds == seconds, "it ended with the block"
    assert pwr.end_ns == pytest.approx(time.time_ns(), abs=60 * S), "times are epoch times"


def test_a_trace_finer_than_the_sensor_says_what_is_true(started: Started) -> None:
    m = started(sensor(step_ms=20.0), sensor(name="cpu0", basis="modelled", note="TDP"))
    with power_trace(interval_ms=5, monitor=m) as pwr:
        time.sleep(0.05)
    assert any("asked for 5 ms" in n and "20 ms" in n for n in pwr.notes)
    assert any("cpu0: modelled" in n for n in pwr.notes)
    with power_trace(interval_ms=20, monitor=m) as coarse:
        pass
    assert not any("asked" in n for n in coarse.notes)


@pytest.mark.parametrize("interval_ms", [0, -5, math.nan])
def test_a_wrong_interval_is_refused(interval_ms: float) -> None:
    with pytest.raises(ArgumentError, match="interval_ms"):
        power_trace(interval_ms=interval_ms)


def test_a_trace_has_the_gaps_and_telemetry_of_its_block_only(started: Started) -> None:
    s = sensor()
    m = started(s)
    s.fail = SensorLost("first")
    until(lambda: len(m.sampler.gaps) == 1)
    s.fail = None
    m.sampler._slots[0].due_ns = 0
    assert m.sampler.wait_for(time.monotonic_ns(), 60.0)
    time.sleep(0.7)
    rows = m.sampler.telemetry.setdefault("gpu0", deque())
    rows.append(Telemetry(time_ns=time.monotonic_ns(), domain="gpu0", temperature_c=1.0))
    with power_trace(monitor=m) as pwr:
        rows.append(Telemetry(time_ns=time.monotonic_ns(), domain="gpu0", temperature_c=2.0))
        s.fail = SensorLost("second")
        until(lambda: len(m.sampler.gaps) == 2)
    rows.append(Telemetry(time_ns=time.monotonic_ns(), domain="gpu0", temperature_c=3.0))
    assert [g.reason for g in pwr.gaps] == ["second"]
    assert [t.temperature_c for t in pwr.telemetry("gpu0")] == [2.0]
    assert pwr.telemetry("cpu0") == []
    assert pwr.energy().coverage < 1


def test_a_trace_that_was_not_entered_is_empty() -> None:
    pwr = power_trace()
    assert (pwr.energy_j, pwr.peak_w, list(pwr.gaps), pwr.telemetry("gpu0")) == (0.0, None, [], [])


# -- CUDA ----------------------------------------------------------------------------------------------------


class FakeStream:
    """A queue on the simulated device: work runs after what was launched before it."""

    def __init__(self, device: int | None = None) -> None:
        self.busy_until_ns = 0


class FakeEvent:
    """Takes the device's time when its stream reaches it."""

    gpu: FakeGpu

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at_ns = 0
        self.gpu.created[threading.get_ident()] = self.gpu.created.get(threading.get_ident(), 0) + 1

    def record(self, stream: FakeStream) -> None:
        self.gpu.check()
        assert not (self.gpu.capturing and stream is self.gpu.stream), "recorded into a graph"
        self.at_ns = max(self.gpu.clock(), stream.busy_until_ns)

    def query(self) -> bool:
        self.gpu.check()
        return self.gpu.clock() >= self.at_ns

    def synchronize(self) -> None:
        self.gpu.check()
        assert self.gpu.clock is time.monotonic_ns or self.query(), "who waits for simulated time waits for ever"
        time.sleep(max(self.at_ns - self.gpu.clock(), 0) * 1e-9)

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.query() and other.query()
        return float(np.float32((other.at_ns - self.at_ns) * 1e-6 * self.gpu.speed))


class FakeGpu:
    """Enough of torch.cuda for the monitor; `speed` is that of the device's clock against the host's."""

    def __init__(self) -> None:
        self.clock: Callable[[], int] = time.monotonic_ns
        self.stream = FakeStream()
        self.created: dict[int, int] = {}
        self.capturing = False
        self.speed = 1.0
        self.synchronized = 0
        self.failed = False

    def launch(self, ms: float) -> None:
        self.stream.busy_until_ns = max(self.stream.busy_until_ns, self.clock()) + round(ms * MS)

    def check(self) -> None:
        if self.failed:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def module(self) -> types.ModuleType:
        torch = types.ModuleType("torch")
        event = type("Event", (FakeEvent,), {"gpu": self})

        class DeviceGuard:
            def __init__(self, index: int) -> None: ...
            def __enter__(self) -> None: ...
            def __exit__(self, *args: object) -> None: ...

        def synchronize() -> None:
            self.synchronized += 1
            time.sleep(max(self.stream.busy_until_ns - time.monotonic_ns(), 0) * 1e-9)

        torch._C = types.SimpleNamespace()  # type: ignore[attr-defined]
        torch.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
            is_initialized=lambda: True,
            current_device=lambda: 0,
            current_stream=lambda: self.stream,
            is_current_stream_capturing=lambda: self.capturing,
            Event=event,
            Stream=FakeStream,
            device=DeviceGuard,
            synchronize=synchronize,
        )
        return torch


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    monkeypatch.setitem(sys.modules, "torch", fake.module())
    return fake


@pytest.fixture
def by_hand(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> TimeByHand:
    made = TimeByHand(monkeypatch)
    gpu.clock = made.clock
    return made


def test_the_window_is_when_the_device_worked(gpu: FakeGpu, by_hand: TimeByHand) -> None:
    """600 ms of earlier work in the queue, then 200 ms in the scope, which the host leaves after 10 ms."""
    begin = by_hand.seconds()
    m = by_hand.monitor(sensor(lambda t: 100.0 + 1000.0 * (t - begin)), sensor(lambda t: 50.0, "cpu0"))
    by_hand.go(100)
    gpu.launch(600)
    queued_until = gpu.stream.busy_until_ns
    with energy_scope(monitor=m) as energy:
        gpu.launch(200)
        by_hand.go(10)
    assert gpu.synchronized == 0
    by_hand.go(1000)
    assert energy.time_s == pytest.approx(0.2)
    assert energy.start_ns == pytest.approx(queued_until, abs=1000)  # a float32 of milliseconds
    a, b = energy.start_ns * 1e-9 - begin, energy.end_ns * 1e-9 - begin
    parts = energy.by_domain
    assert parts["gpu0"].joules == pytest.approx(100.0 * (b - a) + 500.0 * (b * b - a * a), rel=1e-5)
    assert parts["cpu0"].time_s == pytest.approx(0.01), "the host's domains go by the host's clock"
    assert parts["cpu0"].time_s == pytest.approx(energy.host_time_s)
    assert parts["cpu0"].joules == pytest.approx(50.0 * 0.01)


def test_so_far_while_the_device_is_still_behind(gpu: FakeGpu, by_hand: TimeByHand) -> None:
    m = by_hand.monitor(sensor())
    gpu.launch(40)
    with energy_scope(monitor=m) as energy:
        gpu.launch(60)
        by_hand.go(20)
        assert energy.energy_j == pytest.approx(100.0 * 0.02), "the device has not come to the scope: the host's time"
        by_hand.go(60)
        assert energy.energy_j == pytest.approx(100.0 * 0.04)
    by_hand.go(100)
    assert energy.time_s == pytest.approx(0.06)
    assert energy.energy_j == pytest.approx(100.0 * 0.06)


def test_sync_waits_for_the_device_at_both_ends_but_not_after_an_error(gpu: FakeGpu, started: Started) -> None:
    m = started()
    gpu.launch(30)
    begin = time.monotonic()
    with energy_scope(sync=True, monitor=m) as energy:
        gpu.launch(30)
    assert gpu.synchronized == 2
    assert 0.03 <= energy.host_time_s <= time.monotonic() - begin
    with pytest.raises(RuntimeError), energy_scope(sync=True, monitor=m):
        raise RuntimeError("device-side assert")
    assert gpu.synchronized == 3


def test_events_come_from_the_pool_and_go_back(gpu: FakeGpu, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_READY", 400)
    m = started()
    with energy_scope("first", monitor=m):
        pass  # from here on the device is known to be used
    mine = threading.get_ident()
    until(lambda: sum(gpu.created.values()) >= 300)
    before, total = gpu.created.get(mine, 0), 0
    for _ in range(15):
        for _ in range(100):
            with energy_scope("s", monitor=m):
                total += 1
        m.settle_all()
    assert gpu.created.get(mine, 0) == before, "the user's thread made no event"
    assert sum(gpu.created.values()) < 2 * total, "and they are used again"


def test_one_event_never_serves_two_edges(gpu: FakeGpu) -> None:
    """The sampler's thread resolves an edge just while a reader waits for it: the event may go back once only."""
    clocks = DeviceClocks()
    edge = clocks.edge()
    event = edge.event
    assert event is not None

    def meanwhile() -> None:
        sampler_thread = threading.Thread(target=clocks.resolve, args=(edge,))
        sampler_thread.start()
        sampler_thread.join()

    event.synchronize = meanwhile
    assert clocks.resolve(edge, wait=True)
    first, second = clocks.edge(), clocks.edge()
    assert first.event is not second.event


def test_an_edge_within_a_graph_capture_is_the_hosts(gpu: FakeGpu, started: Started) -> None:
    m = started()
    gpu.capturing = True
    with energy_scope(monitor=m) as energy:
        time.sleep(0.03)
    gpu.capturing = False
    assert energy.time_s == energy.host_time_s >= 0.03
    assert energy.energy_j == pytest.approx(100.0 * energy.time_s)


def test_anchors_are_renewed_so_that_a_drifting_device_clock_does_not_matter(
    gpu: FakeGpu, by_hand: TimeByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20% fast: without new anchors an edge after 0.6 s would be 120 ms off."""
    monkeypatch.setattr(cuda, "RENEW_NS", 50 * MS)
    gpu.speed = 1.2
    m = by_hand.monitor(sensor())
    with energy_scope(monitor=m):
        pass  # from here on the device is known to be used
    by_hand.go(600)
    entered_ns = by_hand.clock.now_ns
    with energy_scope(monitor=m) as energy:
        gpu.launch(20)
    by_hand.go(100)
    assert energy.start_ns == pytest.approx(entered_ns, abs=12 * MS)  # 20% of 50 ms, and a little


def test_a_failed_device_neither_hides_the_error_nor_ends_the_measuring(gpu: FakeGpu, started: Started) -> None:
    """After a device-side assert every CUDA call raises: the scopes go on by the host's clock."""
    m, begin = started(), time.monotonic()
    with pytest.raises(IndexError, match="mine"), energy_scope("bad", monitor=m) as energy:
        gpu.launch(10)
        time.sleep(0.03)
        gpu.failed = True
        raise IndexError("mine")
    assert energy.energy_j == pytest.approx(100.0 * energy.time_s, rel=0.01)
    assert 0.03 <= energy.time_s <= time.monotonic() - begin
    time.sleep(0.1)
    with energy_scope("after", monitor=m) as after:
        time.sleep(0.02)
    assert after.energy_j == pytest.approx(100.0 * after.time_s)
    assert m.sampler._thread is not None and m.sampler._thread.is_alive()


def test_without_cuda_in_the_process_nothing_of_it_is_touched(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(is_initialized=lambda: False)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    with energy_scope(sync=True, monitor=started()) as energy:
        time.sleep(0.01)
    assert energy.time_s == energy.host_time_s


def test_the_counter_alone_still_gives_joules_when_the_ring_is_silent(fake_nvml: FakeNvml) -> None:
    """A frozen ring leaves no samples; the counter's ticks between the edges are joules all the same."""
    fake_nvml.set(Scenario(wave="const:400", before_w=400, ring_freeze_at_s=3))
    clock = Clock(fake_nvml.monotonic_ns, fake_nvml.epoch_ns)
    board = NvmlSensor(environ={}, clock=clock)
    board.start()
    sampler = Sampler([board], clock=clock)

    def run(seconds: float) -> None:
        end = fake_nvml.monotonic_ns() + round(seconds * 1e9)
        while fake_nvml.monotonic_ns() < end:
            fake_nvml.advance(max(min(sampler.read_due(), (end - fake_nvml.monotonic_ns()) * 1e-9), 0.0005))

    run(8.0)
    window = Window("w", Edge(fake_nvml.monotonic_ns()))
    window.settle(sampler, DeviceClocks(), ["gpu0"])
    run(8.0)
    window.end = Edge(fake_nvml.monotonic_ns())
    run(1.2)
    window.settle(sampler, DeviceClocks(), ["gpu0"], force=True)
    energy = window.energies["gpu0"]
    assert energy.source.endswith("+counter")
    assert energy.joules == pytest.approx(400 * 8.0, rel=0.3)
    assert abs(energy.joules - 400 * 8.0) <= energy.error_j
    assert 0.7 < energy.coverage <= 1.0


def test_a_scope_is_a_region_of_the_session_that_records(started: Started) -> None:
    from tessera.monitor import scope

    region = importlib.import_module("tessera.profile.region")  # the package's `region` is the class

    class Recorder:
        def __init__(self) -> None:
            self.found: list[tuple[str, int, int, int]] = []

        def compiling(self) -> bool:
            return False

        def abandon(self) -> None: ...

        def add_region(self, name: str, start_ns: int, end_ns: int, thread: int, *, is_apart: bool) -> None:
            self.found.append((name, start_ns, end_ns, thread))
            assert is_apart

    monitor, recorder = started(), Recorder()
    early = energy_scope("before", monitor=monitor).__enter__()
    began = time.time_ns()
    region.install(recorder)
    try:
        early.__exit__(None, None, None)
        with energy_scope("step", monitor=monitor), energy_scope("forward", monitor=monitor):
            time.sleep(0.01)
    finally:
        region.install(None)
    assert scope.on_close is None
    with energy_scope("after", monitor=monitor):
        pass
    assert [name for name, *_ in recorder.found] == ["forward", "step"]
    for _, start_ns, end_ns, thread in recorder.found:
        assert began - MS < start_ns < end_ns < time.time_ns() + MS
        assert end_ns - start_ns >= 10 * MS
        assert thread == threading.get_native_id()


def test_scopes_of_several_threads_say_that_each_contains_all(started: Started) -> None:
    monitor = started()
    both = threading.Barrier(2)
    scopes = [energy_scope(f"thread {i}", monitor=monitor) for i in range(2)]

    def work(scope: tm.EnergyScope) -> None:
        with scope:
            both.wait(300)
            both.wait(300)

    threads = [threading.Thread(target=work, args=(scope,)) for scope in scopes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for scope in scopes:
        assert any("scopes of other threads" in note for note in scope.report().notes)
    assert all(r.overlaps for r in monitor.regions())


def test_scopes_inside_each_other_or_one_after_another_do_not(started: Started) -> None:
    monitor = started()
    inner, after = energy_scope("inner", monitor=monitor), energy_scope("after", monitor=monitor)
    with energy_scope("outer", monitor=monitor) as outer, inner:
        pass

    def work() -> None:
        with after:
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not any(scope.report().notes for scope in (outer, inner, after))
    assert not any(r.overlaps for r in monitor.regions())


@pytest.mark.parametrize(("hold", "told"), [(Hold.MEAN, False), (Hold.LINEAR, True)])
def test_means_since_the_sample_before_are_in_step_with_nothing(hold: Hold, told: bool) -> None:
    class Unanchored(list[None]):
        history = types.SimpleNamespace(note_step=lambda begin, end: None)

    domain = Domain(name="cpu0", source="script", resolution_s=0.1, hold=hold)
    sampler = types.SimpleNamespace(
        lock=threading.Lock(),
        counted_domains=lambda: ["cpu0"],
        series={"cpu0": types.SimpleNamespace(domain=domain)},
        anchors={"cpu0": Unanchored()},
    )
    edge = types.SimpleNamespace(time_ns=lambda device: 0)
    notes = Monitor.note_steps(types.SimpleNamespace(sampler=sampler), edge, edge, 0.05)  # type: ignore[arg-type]
    assert bool(notes) == told
