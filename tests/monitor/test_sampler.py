"""The sampler: by hand on a simulated clock, and its thread on the real one."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import pytest

from tessera.clock import Clock
from tessera.errors import SensorLost, SensorPermission, SensorUnavailable
from tessera.monitor.sampler import KEPT_EVENTS, KEPT_TELEMETRY, Sampler
from tessera.schema import Domain, Gap, PowerEvent, Telemetry
from tessera.sensors.base import Batch

from fakes.sensor import ScriptSensor
from waiting import wait_until

S = 1_000_000_000


class SimulatedClock:
    """Time that passes when told."""

    def __init__(self, now_ns: int = 100 * S) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

    @property
    def clock(self) -> Clock:
        return Clock(self, lambda: self.now_ns + 1_790_000_000 * S)


def drive(sampler: Sampler, time_: SimulatedClock, seconds: float) -> None:
    """What the thread does, in simulated time."""
    end = time_.now_ns + round(seconds * S)
    while time_.now_ns < end:
        delay_s = sampler.read_due()
        time_.now_ns = min(end, time_.now_ns + max(round(delay_s * S), 1_000_000))
    sampler.read_due()


class BatchSensor(ScriptSensor):
    """A script sensor whose batches are completed by a function."""

    def __init__(self, more: Callable[[Batch, int], None], **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.more = more

    def read(self) -> Batch:
        batch = super().read()
        self.more(batch, self.clock())
        return batch


def domain(name: str = "gpu0", **kwargs: object) -> Domain:
    return Domain(name=name, source="script", resolution_s=0.02, **kwargs)  # type: ignore[arg-type]


@pytest.fixture
def time_() -> SimulatedClock:
    return SimulatedClock()


def joules(sampler: Sampler, start_ns: int, end_ns: int, name: str = "gpu0") -> float:
    series = sampler.series[name]
    return series.mark(end_ns).joules - series.mark(start_ns).joules


def test_each_sensor_is_read_at_its_own_period(time_: SimulatedClock) -> None:
    fast = ScriptSensor(clock=time_, period_s=0.1)
    slow = ScriptSensor(clock=time_, period_s=1.0, domain=domain("cpu0"))
    sampler = Sampler([fast, slow], clock=time_.clock)
    drive(sampler, time_, 10.0)
    assert fast.reads == pytest.approx(100, abs=3)
    assert slow.reads == pytest.approx(10, abs=2)
    assert joules(sampler, 100 * S, 109 * S) == pytest.approx(900.0)


def test_a_lost_sensor_is_a_gap_is_retried_and_comes_back(time_: SimulatedClock) -> None:
    sensor = ScriptSensor(lambda t: 200.0, clock=time_)
    sampler = Sampler([sensor], clock=time_.clock)
    drive(sampler, time_, 3.0)
    sensor.fail = SensorLost("the GPU fell off the bus", why="Xid 79")
    drive(sampler, time_, 4.0)
    assert len(sampler.gaps) == 1, "one loss is one gap, however often it is retried"
    gap = sampler.gaps[0]
    assert gap.end_ns is None
    assert gap.domain == "gpu0" and "fell off" in gap.reason and "Xid 79" in gap.reason
    assert gap.start_ns == pytest.approx(103 * S, abs=0.1 * S)
    sensor.fail = None
    drive(sampler, time_, 9.0)
    gap = sampler.gaps[0]
    assert gap.end_ns is not None and gap.end_ns > 107 * S
    lost_s = (gap.end_ns - gap.start_ns) * 1e-9
    series = sampler.series["gpu0"]
    seen_s = series.mark(1 << 62).covered_s
    assert seen_s == pytest.approx(16.0 - lost_s, abs=0.1)
    assert series.mark(1 << 62).joules == pytest.approx(200.0 * seen_s), "nothing is made up for the gap"
    # A second loss is a second gap.
    sensor.fail = SensorLost("again")
    drive(sampler, time_, 1.0)
    assert len(sampler.gaps) == 2


def test_retries_slow_down_but_never_end(time_: SimulatedClock) -> None:
    sensor = ScriptSensor(clock=time_)
    sampler = Sampler([sensor], clock=time_.clock)
    drive(sampler, time_, 1.0)
    starts = 0

    def start() -> None:
        nonlocal starts
        starts += 1
        raise SensorUnavailable("the driver is not loaded")

    sensor.start = start  # type: ignore[method-assign]
    sensor.fail = SensorLost("gone")
    drive(sampler, time_, 60.0)
    assert 10 <= starts <= 16  # after 0.5, 1, 2, then every 5 s


def test_one_lost_sensor_does_not_disturb_the_others(time_: SimulatedClock) -> None:
    bad, good = ScriptSensor(clock=time_), ScriptSensor(clock=time_, domain=domain("cpu0"))
    sampler = Sampler([bad, good], clock=time_.clock)
    drive(sampler, time_, 1.0)
    bad.fail = SensorPermission("no longer allowed")
    drive(sampler, time_, 5.0)
    assert [g.domain for g in sampler.gaps] == ["gpu0"]
    assert "no longer allowed" in sampler.gaps[0].reason
    assert joules(sampler, 101 * S, 106 * S, "cpu0") == pytest.approx(500.0)


def test_an_open_gap_of_the_sensor_itself_ends_with_its_next_sample(time_: SimulatedClock) -> None:
    mute = False

    def more(batch: Batch, now: int) -> None:
        if mute:
            batch.samples.clear()
            batch.gaps.append(Gap(domain="gpu0", start_ns=103 * S, end_ns=None, reason="0 W"))

    sampler = Sampler([BatchSensor(more, clock=time_)], clock=time_.clock)
    drive(sampler, time_, 3.0)
    mute = True
    drive(sampler, time_, 2.0)
    assert [(g.start_ns, g.end_ns) for g in sampler.gaps] == [(103 * S, None)], "said forty times, kept once"
    mute = False
    drive(sampler, time_, 3.0)
    assert len(sampler.gaps) == 1
    assert sampler.gaps[0].end_ns == pytest.approx(105 * S, abs=0.1 * S)
    assert sampler.series["gpu0"].mark(1 << 62).covered_s == pytest.approx(6.0, abs=0.1)


def test_domains_learnt_later_are_taken_in_with_their_first_samples(time_: SimulatedClock) -> None:
    """A BMC may name a chassis only after the sampler has begun: its samples must not be lost or break the thread."""
    sensor = ScriptSensor(clock=time_)
    known = [sensor._domain]

    def more(batch: Batch, now: int) -> None:
        if now >= 100 * S + S // 2:
            batch.add("chassis", now, 900.0)

    sensor = BatchSensor(more, clock=time_)
    sensor.domains = lambda: known  # type: ignore[method-assign]
    sampler = Sampler([sensor], clock=time_.clock)
    drive(sampler, time_, 0.4)
    assert sampler.counted_domains() == ["gpu0"]
    known.append(domain("chassis", counted=False))
    drive(sampler, time_, 4.0)
    assert [d.name for d in sampler.domains] == ["gpu0", "chassis"]
    assert sampler.counted_domains() == ["gpu0"]
    assert joules(sampler, 101 * S, 104 * S, "chassis") == pytest.approx(2700.0)


def test_what_a_sensor_learns_of_its_domain_is_taken_over(time_: SimulatedClock) -> None:
    sensor = ScriptSensor(clock=time_)
    sampler = Sampler([sensor], clock=time_.clock)
    drive(sampler, time_, 0.1)
    sensor._domain = domain(note="10 Hz, as was found out")
    drive(sampler, time_, 3.0)
    assert sampler.domains[0].note == "10 Hz, as was found out"


def test_telemetry_and_events_are_bounded(time_: SimulatedClock) -> None:
    def more(batch: Batch, now: int) -> None:
        batch.telemetry += [Telemetry(time_ns=now + i, domain="gpu0", temperature_c=float(i)) for i in range(500)]
        batch.events += [PowerEvent(time_ns=now, domain="gpu0", kind="x", message="") for _ in range(200)]

    sampler = Sampler([BatchSensor(more, clock=time_)], clock=time_.clock)
    drive(sampler, time_, 2.0)
    assert len(sampler.telemetry["gpu0"]) == KEPT_TELEMETRY
    assert len(sampler.events) == KEPT_EVENTS
    newest = sampler.latest("gpu0")
    assert newest is not None and newest.temperature_c == 499.0
    assert sampler.latest("nothing") is None


def test_a_simulated_day_with_default_memory_is_bounded(time_: SimulatedClock) -> None:
    sensor = ScriptSensor(lambda t: 300.0, clock=time_, step_ms=250.0, period_s=30.0)
    sampler = Sampler([sensor], clock=time_.clock)
    begin = time_.now_ns
    drive(sampler, time_, 86_400.0)
    assert sampler.nbytes < 5_000_000
    assert joules(sampler, begin, time_.now_ns) == pytest.approx(300.0 * 86_400.0)


# -- waiting, with the thread --------------------------------------------------------------------------------


def test_waiting_wakes_the_thread_before_its_period() -> None:
    sampler = Sampler([ScriptSensor(clock=time.monotonic_ns, period_s=30.0)])
    sampler.start()
    now = time.monotonic_ns()
    begin = time.monotonic()
    assert sampler.wait_for(now, 20.0)
    assert time.monotonic() - begin < 29.0
    assert sampler.covers(now)
    sampler.stop()


def test_waiting_gives_up_in_time_and_the_sensor_is_left_in_peace_again() -> None:
    sensor = ScriptSensor(lambda t: 100.0, clock=lambda: 50 * S, period_s=10.0)  # its clock stands still
    sampler = Sampler([sensor])
    sampler.start()
    begin = time.monotonic()
    assert not sampler.wait_for(time.monotonic_ns() + 3600 * S, 0.2)
    assert 0.15 < time.monotonic() - begin < 60.0
    # While somebody waits it is asked more often than every 10 s.
    wait_until(lambda: sensor.reads > 1, lambda: sampler.wait_for(time.monotonic_ns() + 3600 * S, 0.2), 9.0)
    time.sleep(0.05)
    reads = sensor.reads
    time.sleep(0.2)
    assert sensor.reads <= reads + 1, "nobody waits any more"
    sampler.stop()


def test_nobody_waits_for_a_dead_sensor() -> None:
    sensor = ScriptSensor(clock=time.monotonic_ns, period_s=0.01)
    other = ScriptSensor(clock=time.monotonic_ns, period_s=0.01, domain=domain("cpu0"))
    sampler = Sampler([sensor, other])
    sampler.start()
    sensor.fail = SensorLost("gone")
    wait_until(lambda: sampler.gaps)
    assert sampler.wait_for(time.monotonic_ns(), 60.0), "the other one has delivered"
    sampler.stop()


def test_nobody_waits_for_a_domain_of_another_sampler_and_the_thread_lives_on() -> None:
    """A schedule that still holds the last monitor's domains asks this one for them."""
    sampler = Sampler([ScriptSensor(clock=time.monotonic_ns, period_s=0.01)])
    sampler.start()
    with sampler.lock:  # as a waiter leaves it for a moment: wanted, and not yet given up
        sampler._wanted["gpu7"] = 1 << 62
    assert sampler.wait_for(1 << 62, 20.0, ["gpu7"])
    assert sampler.wait_for(time.monotonic_ns(), 20.0)
    assert sampler._thread is not None and sampler._thread.is_alive()
    sampler.stop()


def test_stopping_ends_the_thread_the_sensors_and_those_who_wait() -> None:
    sensor = ScriptSensor(clock=lambda: 50 * S, period_s=10.0)
    stopped = []
    sensor.stop = lambda: stopped.append(True)  # type: ignore[method-assign]
    sampler = Sampler([sensor])
    others = set(threading.enumerate())  # another test's default monitor may still sample
    sampler.start()
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(sampler.wait_for(1 << 62, 30.0)))
    waiter.start()
    time.sleep(0.05)
    sampler.stop()
    waiter.join(25.0)
    assert answers == [False]
    assert stopped == [True]
    left = set(threading.enumerate()) - others
    assert not any(t.name == "tessera-sampler" and t.is_alive() for t in left)
    sampler.stop()
    assert stopped == [True]
    assert not math.isnan(sampler.series["gpu0"].mark(1 << 62).joules), "what was read stays readable"


def test_without_a_thread_waiting_reads_by_itself() -> None:
    sampler = Sampler([ScriptSensor(clock=time.monotonic_ns, period_s=10.0)])
    assert sampler.wait_for(time.monotonic_ns(), 2.0)


def test_a_sampler_without_sensors_waits_for_nothing() -> None:
    sampler = Sampler([])
    assert sampler.read_due() > 0
    assert sampler.wait_for(time.monotonic_ns(), 0.1)
    assert sampler.domains == []


@pytest.mark.parametrize(("bad_w", "said"), [(4_294_967.295, "4,294,967 W"), (-5.0, "-5 W")])
def test_a_sample_that_no_board_can_draw_is_a_gap(time_: SimulatedClock, bad_w: float, said: str) -> None:
    """One reading of 0xFFFFFFFF mW turned 400 J into 86 kJ, a negative one 98 J into 0."""
    wrong_ns = time_.now_ns + 2 * S
    sensor = ScriptSensor(
        lambda t: bad_w if round(t * 1e9) == wrong_ns else 100.0, clock=time_, domain=domain(limit_w=700.0)
    )
    sampler = Sampler([sensor], clock=time_.clock)
    start_ns = time_.now_ns
    drive(sampler, time_, 4.1)
    assert joules(sampler, start_ns, start_ns + 4 * S) == pytest.approx(398.0, abs=0.1)
    (gap,) = sampler.gaps
    assert said in gap.reason and gap.end_ns == wrong_ns


def test_waiting_for_data_that_are_there_wakes_nobody(time_: SimulatedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session asks a few times a second: each would cost a round of the thread."""
    sampler = Sampler([ScriptSensor(clock=time_)], clock=time_.clock)
    drive(sampler, time_, 1.0)
    last_ns = sampler.series["gpu0"].last_ns
    assert last_ns is not None

    def refuse(*_: object) -> bool:
        raise AssertionError("the thread was woken")

    monkeypatch.setattr(sampler, "_wait", refuse)
    assert sampler.wait_for(last_ns - 500_000_000, 0.1, ["gpu0"])
