"""Finding a counter's ticks from reads of it, in a simulated world where the ticks are known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.sensors._nvml_counter import EAGER_READS, CounterPace, TickFinder

MS = 1_000_000
S = 1_000 * MS
T0_NS = 86_400 * S


class Counter:
    """Ticks every `period_ms` (of a clock `ppm` off ours), read by calls that cost time."""

    def __init__(self, period_ms, phase_ms=0.0, *, seed=0, cost_ms=(2.0, 4.0), pause_ms=(2.5, 4.0), ppm=0.0):
        self.period_ns = period_ms * MS * (1 + ppm * 1e-6)
        self.phase_ns = T0_NS + phase_ms * MS
        self.cost_ms, self.pause_ms = cost_ms, pause_ms
        self.random = random.Random(seed)
        self.now_ns = T0_NS
        self.last: tuple[int, int] | None = None

    def ticks_by(self, t_ns):
        return int((t_ns - self.phase_ns) // self.period_ns)

    def tick_before(self, t_ns):
        return self.phase_ns + self.ticks_by(t_ns) * self.period_ns

    def read(self):
        """Begin, end and value of one call; the counter is looked at somewhere within it."""
        begin = self.now_ns
        end = begin + round(self.random.uniform(*self.cost_ms) * MS)
        looked = begin + round(self.random.random() * (end - begin))
        self.now_ns = end
        return begin, end, self.ticks_by(looked)

    def teach(self, finder):
        begin, end, value = self.read()
        if self.last is not None and value != self.last[1]:
            finder.add_tick(self.last[0], end)
        self.last = (begin, value)
        return begin, end, value

    def learn(self, finder, seconds=3.0):
        limit = self.now_ns + seconds * S
        while not finder.is_known and self.now_ns < limit:
            self.teach(finder)
            self.now_ns += round(self.random.uniform(*self.pause_ms) * MS)
        return finder.is_known

    def check(self, finder):
        """One read, dated: the tick it was dated to is the true one, or None. Whether it was dated."""
        begin, end, value = self.read()
        dated = finder.last_tick_ns(begin, end)
        if dated is None:
            return False
        true = self.phase_ns + value * self.period_ns
        assert abs(dated - true) < 0.16 * self.period_ns, f"dated {(dated - true) / MS:.1f} ms from its tick"
        return True


def learned(**kwargs):
    counter, finder = Counter(**kwargs), TickFinder()
    assert counter.learn(finder, seconds=5.0)
    return counter, finder


def test_the_counter_of_the_h200():
    counter, finder = learned(period_ms=100, phase_ms=37.0)
    assert counter.now_ns - T0_NS < 1.2 * S, "the sensor gives up after 1.2 s"
    assert finder.period_ns == 100 * MS
    assert finder.uncertainty_ns < 5 * MS
    assert abs(finder.next_tick_ns(T0_NS + 10 * S) - (T0_NS + 10_037 * MS)) <= finder.uncertainty_ns + 20e-6 * 10 * S


@settings(max_examples=60, deadline=None)
@given(
    period_ms=st.sampled_from([50, 80, 95, 100, 105, 200, 250, 500]),
    phase=st.floats(min_value=0.0, max_value=1.0),
    cost_ms=st.floats(min_value=0.1, max_value=3.0),
    jitter_ms=st.floats(min_value=0.0, max_value=2.0),
    ppm=st.floats(min_value=-8, max_value=8),
    seed=st.integers(min_value=0, max_value=1 << 30),
)
def test_ticks_are_found_whatever_the_reads_cost(period_ms, phase, cost_ms, jitter_ms, ppm, seed):
    counter, finder = learned(
        period_ms=period_ms,
        phase_ms=phase * period_ms,
        cost_ms=(cost_ms, cost_ms + jitter_ms),
        pause_ms=(1.0, 1.0 + jitter_ms),
        ppm=ppm,
        seed=seed,
    )
    assert finder.period_ns == period_ms * MS
    found = finder.next_tick_ns(counter.now_ns)
    true = counter.tick_before(counter.now_ns) + counter.period_ns
    off = (found - true + counter.period_ns / 2) % counter.period_ns - counter.period_ns / 2
    assert abs(off) <= finder.uncertainty_ns + 0.1 * MS
    assert abs(off) < 5 * MS
    for _ in range(60):  # the next minute, a read a second at a quiet time: all are dated, and right
        counter.now_ns = finder.next_quiet_ns(counter.now_ns + S)
        counter.check(finder)


@settings(max_examples=60, deadline=None)
@given(
    # Round periods, as vendors have them, and some that are 3% and more from any round one.
    period_ms=st.sampled_from([20, 25, 30, 50, 75, 95, 100, 130, 250, 400, 22.5, 33.3, 47.5]),
    cost_ms=st.floats(min_value=0.1, max_value=8.0),
    pause_ms=st.floats(min_value=0.5, max_value=40.0),
    seed=st.integers(min_value=0, max_value=1 << 30),
)
def test_whoever_reads_is_told_the_right_tick_or_none(period_ms, cost_ms, pause_ms, seed):
    """However slow the reads, and even if they are too slow to learn anything."""
    counter = Counter(period_ms, seed=seed, cost_ms=(cost_ms, 1.5 * cost_ms), pause_ms=(pause_ms, 1.5 * pause_ms))
    finder = TickFinder()
    counter.learn(finder, seconds=2.0)
    for _ in range(100):
        begin, end, value = counter.teach(finder)
        dated = finder.last_tick_ns(begin, end)
        true = counter.phase_ns + value * counter.period_ns
        assert dated is None or abs(dated - true) < 0.5 * counter.period_ns
        counter.now_ns += round(pause_ms * MS)


@pytest.mark.parametrize("cost_ms", [6.0, 10.0, 16.0])
def test_slow_reads_do_not_teach_a_wrong_period(cost_ms):
    """Under load a read takes 6 ms, at worst 16: the four ticks that do for quick ones leave 95 or 105 ms open."""
    for seed in range(200):
        _, finder = learned(period_ms=100, cost_ms=(cost_ms, cost_ms + 1), pause_ms=(3.0, 4.0), seed=seed)
        assert finder.period_ns == 100 * MS


@pytest.mark.parametrize("pause_ms", [70.0, 130.0, 190.0, 1000.0])
def test_reads_further_apart_than_the_ticks_teach_nothing(pause_ms):
    counter, finder = Counter(100, pause_ms=(pause_ms, pause_ms)), TickFinder()
    assert not counter.learn(finder, seconds=30.0)
    assert finder.last_tick_ns(counter.now_ns, counter.now_ns + MS) is None


def test_most_quiet_reads_are_dated():
    counter, finder = learned(period_ms=100, phase_ms=12.3)
    dated = 0
    for _ in range(300):
        counter.now_ns = finder.next_quiet_ns(counter.now_ns + S)
        dated += counter.check(finder)
    assert dated == 300, "at 20 ppm the phase is good for half an hour between two ticks 100 ms apart"


def test_a_read_across_a_tick_is_not_dated():
    _, finder = learned(period_ms=100)
    tick = finder.next_tick_ns(T0_NS + 5 * S)
    assert finder.last_tick_ns(tick - 3 * MS, tick + 3 * MS) is None
    assert finder.last_tick_ns(tick - 50 * MS, tick + 60 * MS) is None
    assert finder.last_tick_ns(tick + 40 * MS, tick + 43 * MS) == pytest.approx(tick, abs=2)
    assert finder.last_tick_ns(tick - 43 * MS, tick - 40 * MS) == pytest.approx(tick - 100 * MS, abs=2)


@pytest.mark.parametrize("ppm", [15.0, -15.0, 0.0])
def test_hours_of_drift_are_followed_by_watching_a_tick_now_and_then(ppm):
    """As the sensor does: two reads around a tick every 15 s, dense reads when the ticks are no longer known."""
    counter, finder = learned(period_ms=100, phase_ms=61.0, ppm=ppm)
    dated = 0
    for _ in range(720):  # 3 hours: 160 ms of drift
        counter.now_ns = finder.next_tick_ns(counter.now_ns + 15 * S) - round(finder.uncertainty_ns) - 6 * MS
        counter.last = None
        counter.teach(finder)
        counter.now_ns = max(counter.now_ns, finder.next_tick_ns(counter.now_ns) + round(finder.uncertainty_ns) + MS)
        counter.teach(finder)
        if not finder.is_known:
            assert counter.learn(finder)
        counter.now_ns = finder.next_quiet_ns(counter.now_ns + S)
        dated += counter.check(finder)
    assert dated == 720
    assert finder.relearned < 30


def test_unwatched_for_hours_it_knows_that_it_no_longer_knows():
    counter, finder = learned(period_ms=100, ppm=15.0)
    counter.now_ns += 3 * 3600 * S
    for _ in range(50):
        counter.now_ns += 37 * MS
        assert finder.last_tick_ns(counter.now_ns, counter.now_ns + MS) is None


@pytest.mark.parametrize("change", ["period", "phase"])
def test_ticks_that_are_elsewhere_are_learned_anew(change):
    counter, finder = learned(period_ms=100)
    counter.now_ns += 30 * S
    if change == "period":
        counter.period_ns = 50 * MS
    else:
        counter.phase_ns += 50 * MS
    counter.last = None
    for _ in range(200):
        counter.teach(finder)
        counter.now_ns += 3 * MS
        if finder.relearned and finder.is_known:
            break
    assert finder.relearned == 1
    assert finder.period_ns == (50 if change == "period" else 100) * MS
    for _ in range(20):
        counter.now_ns = finder.next_quiet_ns(counter.now_ns + S)
        assert counter.check(finder)


def test_ticks_out_of_step_while_learning_do_no_harm():
    """A driver that restarts in the middle: the third tick lies where it cannot."""
    finder = TickFinder()
    for at_ms in (0, 100, 230, 300, 400, 500, 600, 700, 800):
        finder.add_tick(T0_NS + at_ms * MS, T0_NS + (at_ms + 5) * MS)
    assert finder.is_known
    assert finder.period_ns == 100 * MS
    assert finder.next_tick_ns(T0_NS + 1000 * MS) <= T0_NS + 1005 * MS


def test_a_pause_while_learning_is_not_counted_through():
    """The sensor gives up after 1.2 s and comes back after a minute; 600 ticks cannot be told from 590."""
    finder = TickFinder()
    for start_s in (0, 60):
        for k in range(3):
            at = T0_NS + start_s * S + k * 103 * MS
            finder.add_tick(at, at + 4 * MS)
    assert not finder.is_known


def test_before_anything_is_known():
    finder = TickFinder()
    assert not finder.is_known
    assert finder.last_tick_ns(T0_NS, T0_NS + MS) is None
    assert finder.next_quiet_ns(T0_NS) == T0_NS


@settings(max_examples=50)
@given(after_ms=st.floats(min_value=-500, max_value=50_000))
def test_quiet_times_and_ticks_to_come(after_ms):
    _, finder = learned(period_ms=100, phase_ms=20.0)
    after = T0_NS + round(after_ms * MS)
    quiet, tick = finder.next_quiet_ns(after), finder.next_tick_ns(after)
    assert after <= quiet <= after + 100 * MS
    assert after <= tick <= after + 100 * MS
    assert abs(quiet - tick) == pytest.approx(50 * MS, abs=2)


def test_a_tick_that_does_not_come_is_noticed() -> None:
    finder = TickFinder()
    for k in range(12):
        finder.add_tick(k * 100_000_000 + 40_000_000, k * 100_000_000 + 44_000_000)
    assert finder.is_known
    finder.add_quiet(1_250_000_000, 1_330_000_000)
    assert finder.is_known, "no tick was due there"
    finder.add_quiet(1_320_000_000, 1_360_000_000)
    assert not finder.is_known, "one was due at 1.342 s"


# -- how often it is read --------------------------------------------------------------------------------------------


def read_for(pace: CounterPace, reads: int, counted_w: float, sampled_w: float, start_j: float = 0.0) -> list[float]:
    """Seconds between reads while counter and samples show so many watts."""
    pauses, now_s = [], 0.0
    for _ in range(reads):
        pace.compare(start_j + counted_w * now_s, start_j + sampled_w * now_s)
        pauses.append(pace.next_pause_ns() * 1e-9)
        now_s += pauses[-1]
    return pauses


def test_a_counter_that_agrees_with_the_samples_is_read_seldom():
    pauses = read_for(CounterPace(), 30, 400.0, 401.0)
    assert max(pauses[: EAGER_READS - 1]) < 1.3
    assert min(pauses[EAGER_READS:]) >= 4.0


def test_a_counter_that_disagrees_is_read_often_until_it_agrees():
    pace = CounterPace()
    assert max(read_for(pace, 60, 400.0, 380.0)) < 1.3, "a load in step with the samples"
    after = read_for(pace, 30, 400.0, 400.0, start_j=1e6)
    assert min(after[-5:]) >= 4.0


def test_a_disagreement_is_noticed_at_the_next_read():
    pace = CounterPace()
    read_for(pace, 20, 400.0, 400.0)
    after = read_for(pace, 3, 400.0, 350.0, start_j=1e6)
    assert after[-1] < 1.3


def test_without_samples_the_pace_is_slow_and_nothing_is_compared():
    pace = CounterPace()
    for _ in range(30):
        pace.compare(1.0, None)
        pause_ns = pace.next_pause_ns()
    assert pause_ns >= 4e9
