"""A slow sensor never keeps its reader waiting, loses nothing on the way, and tells of its end."""

from __future__ import annotations

import threading
import time

import pytest

from tessera.errors import SensorLost, SensorPermission, SensorUnavailable
from tessera.schema import Capability, Domain, Gap, PowerEvent, Telemetry
from tessera.sensors.base import Batch, Sensor
from tessera.sensors.slow import SlowSensor

from waiting import wait_until


class Bmc:
    """A sensor that answers when it is let: each `answer` is a batch, or an exception to raise."""

    name = "bmc"

    def __init__(self, *answers, period_s=0.001):
        self.period_s = period_s
        self.answers = list(answers)
        self.on_start: Exception | None = None
        self.hold_start = threading.Event()
        self.hold_start.set()
        self.hold_read = threading.Event()
        self.hold_read.set()
        self.in_read = threading.Event()
        self.starts = self.stops = self.users = 0
        self.shared = False

    def start(self):
        self.hold_start.wait(120)
        self.starts += 1
        if self.on_start:
            raise self.on_start

    def domains(self):
        return [Domain(name="node", source="bmc", resolution_s=1.0)]

    def capabilities(self):
        return [Capability(name="events", available=False)]

    def read(self):
        self.users += 1
        self.shared |= self.users > 1
        self.in_read.set()
        self.hold_read.wait(120)
        self.users -= 1
        answer = self.answers.pop(0) if self.answers else Batch()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self):
        self.stops += 1


def sample(t, watts=1.0):
    batch = Batch()
    batch.add("node", t, watts)
    return batch


def is_lost(slow):
    try:
        slow.read()
    except SensorLost:
        return True
    return False


@pytest.fixture
def run():
    """Starts a wrapped sensor, and stops it at the end, whatever happened."""
    made = []

    def start(inner):
        slow = SlowSensor(inner)
        made.append(slow)
        slow.start()
        return slow

    yield start
    for slow in made:
        slow.inner.hold_read.set()
        slow.inner.hold_start.set()
        slow.stop()


def test_it_is_what_it_wraps():
    inner = Bmc(period_s=0.7)
    slow = SlowSensor(inner)
    assert isinstance(slow, Sensor)
    assert (slow.name, slow.period_s) == ("bmc", 0.7)
    assert slow.domains() == inner.domains()
    assert slow.capabilities() == inner.capabilities()


def test_everything_of_all_batches_arrives_once_and_in_order(run):
    full = sample(1)
    full.anchors["node"] = [(1, 5.0)]
    full.telemetry.append(Telemetry(time_ns=1, domain="node"))
    full.gaps.append(Gap(domain="node", start_ns=0, end_ns=1, reason="?"))
    full.events.append(PowerEvent(time_ns=1, domain="node", kind="psu_fault", message="!"))
    more = sample(2)
    more.anchors["node"] = [(2, 6.0)]
    inner = Bmc(full, more, *[sample(t) for t in range(3, 50)])
    slow = run(inner)
    wait_until(lambda: not inner.answers)
    slow.stop()
    batch = slow.read()
    assert [t for t, _ in batch.samples["node"]] == list(range(1, 50))
    assert batch.anchors["node"] == [(1, 5.0), (2, 6.0)]
    assert (len(batch.telemetry), len(batch.gaps), len(batch.events)) == (1, 1, 1)
    assert slow.read() == Batch()


def test_reading_never_waits_for_the_wrapped_sensor(run):
    inner = Bmc()
    inner.hold_read.clear()
    slow = run(inner)
    assert inner.in_read.wait(60)
    begin = time.monotonic()
    assert slow.read() == Batch()
    assert time.monotonic() - begin < 60.0  # held for 120 s


def test_memory_is_bounded_and_the_newest_stays(run):
    inner = Bmc(*[sample(t) for t in range(400)], period_s=0.0)
    slow = run(inner)
    inner.hold_read.set()
    wait_until(lambda: not inner.answers)
    slow.stop()
    # what came behind the last answer is empty, so at most the newest samples of the kept batches are left
    assert sum(len(s) for s in slow.read().samples.values()) < 400


def test_what_came_before_a_loss_is_handed_over_first(run):
    """Also when it is no samples: a breaker that tripped must not be lost with the BMC behind it."""
    last_words = Batch(events=[PowerEvent(time_ns=1, domain="node", kind="breaker_tripped", message="!")])
    inner = Bmc(last_words, SensorLost("gone", why="power cut", fix="wait"))
    slow = run(inner)
    wait_until(lambda: not slow._thread.is_alive())
    assert len(slow.read().events) == 1
    for _ in range(3):  # and it stays lost
        with pytest.raises(SensorLost) as caught:
            slow.read()
        assert (caught.value.what, caught.value.why, caught.value.fix) == ("gone", "power cut", "wait")


@pytest.mark.parametrize("error", [SensorUnavailable("no answer"), SensorPermission("password changed")])
def test_any_error_of_the_sensor_is_a_loss(run, error):
    slow = run(Bmc(error))
    wait_until(lambda: is_lost(slow))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_even_a_bug_is_a_loss_and_not_silence(run):
    slow = run(Bmc(ZeroDivisionError("a bug")))
    wait_until(lambda: is_lost(slow))
    slow.start()
    wait_until(lambda: not is_lost(slow))


def test_a_first_start_that_fails_says_why_and_starts_no_thread():
    inner = Bmc()
    inner.on_start = SensorPermission("who are you?", fix="log in")
    slow = SlowSensor(inner)
    with pytest.raises(SensorPermission, match="who are you"):
        slow.start()
    assert not any(t.name == "tessera-bmc" for t in threading.enumerate())
    slow.stop()
    assert inner.stops, "what a failed start took is released too"


def test_a_start_that_takes_long_goes_on_in_the_background():
    inner = Bmc(sample(7))
    inner.hold_start.clear()
    slow = SlowSensor(inner, wait_s=0.0)
    slow.start()
    assert slow.pending and slow.read() == Batch() and not inner.starts
    inner.hold_start.set()
    wait_until(lambda: not slow.pending)
    wait_until(lambda: slow.read().samples)
    slow.stop()


def test_a_start_that_fails_late_is_a_loss():
    inner = Bmc()
    inner.hold_start.clear()
    inner.on_start = SensorUnavailable("no answer", fix="look")
    slow = SlowSensor(inner, wait_s=0.0)
    slow.start()
    inner.hold_start.set()
    wait_until(lambda: is_lost(slow))
    slow.stop()


def test_after_a_loss_starting_again_does_not_block_and_stays_lost_until_it_works(run):
    """The sampler calls start on the thread that reads the GPUs: a BMC that times out must not cost samples."""
    inner = Bmc(SensorLost("gone"))
    slow = run(inner)
    wait_until(lambda: is_lost(slow))
    inner.hold_start.clear()
    for _ in range(3):
        begin = time.monotonic()
        slow.start()
        assert is_lost(slow)
        assert time.monotonic() - begin < 60.0  # held for 120 s
    inner.answers.append(sample(7))
    inner.hold_start.set()
    wait_until(lambda: not is_lost(slow))
    assert inner.starts == 2, "one attempt at a time"


def test_a_restart_that_fails_is_tried_again(run):
    inner = Bmc(SensorLost("gone"))
    slow = run(inner)
    wait_until(lambda: is_lost(slow))
    inner.on_start = SensorUnavailable("still booting")
    slow.start()
    wait_until(lambda: inner.starts == 2 and not slow._thread.is_alive())
    with pytest.raises(SensorLost, match="still booting"):
        slow.read()
    inner.on_start = None
    slow.start()
    wait_until(lambda: not is_lost(slow))


def test_stop_does_not_wait_for_a_hanging_sensor_which_is_closed_when_it_returns(run):
    inner = Bmc()
    inner.hold_read.clear()
    slow = run(inner)
    assert inner.in_read.wait(60)
    begin, stops = time.monotonic(), inner.stops
    slow.stop()
    assert time.monotonic() - begin < 60.0  # held for 120 s
    assert inner.stops == stops, "its connection is in use"
    inner.hold_read.set()
    wait_until(lambda: inner.stops > stops)


def test_started_while_an_old_read_hangs_there_are_never_two_users(run):
    inner = Bmc(SensorLost("an old story"))
    inner.hold_read.clear()
    slow = run(inner)
    assert inner.in_read.wait(60)
    slow.stop()
    threading.Timer(0.05, inner.hold_read.set).start()
    slow.start()
    time.sleep(0.02)
    assert not inner.shared
    assert not is_lost(slow), "the end of the old thread is not that of the new one"


def test_stopping_twice_and_never_started():
    inner = Bmc()
    slow = SlowSensor(inner)
    slow.stop()
    slow.start()
    slow.stop()
    slow.stop()
    assert not any(t.name == "tessera-bmc" for t in threading.enumerate())
    assert inner.starts == 1
