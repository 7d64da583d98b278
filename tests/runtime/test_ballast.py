"""Floor and ramp: the control on a simulated GPU, and ballast that really runs on this machine's CPUs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.runtime.ballast_control import BINS, BallastControl
from tessera.schema import Domain

from fakes.ballast_plant import FILTER_S, STEP_S, BallastPlant, wave

HIGH_W, LOW_W = 700.0, 125.0


def run_wave(
    floor_w: float | None,
    ramp: float | None,
    *,
    gain_w: float = 500.0,
    slow: float = 0.0,
    period_s: float = 2.0,
    seconds: float = 20.0,
) -> BallastPlant:
    control = BallastControl(
        floor_w=floor_w, max_ramp_w_per_s=ramp, idle_w=LOW_W, full_w=LOW_W + 500.0, blur_s=FILTER_S
    )
    plant = BallastPlant(wave(HIGH_W, period_s, 0.75), control, low_w=LOW_W, gain_w=gain_w, slow=slow)
    plant.run(seconds)
    return plant


def settled(plant: BallastPlant) -> np.ndarray:
    return np.array(plant.power_w[round(6.0 / STEP_S) :])


@settings(deadline=None, max_examples=12)
@given(st.floats(0.7, 1.4), st.floats(200.0, 400.0))
def test_a_floor_is_held_whatever_the_ballast_really_draws(off: float, floor_w: float) -> None:
    plant = run_wave(floor_w, None, gain_w=500.0 * off)
    power = settled(plant)
    assert power.min() >= 0.88 * floor_w
    low = power[power < HIGH_W - 1]
    assert np.median(low) == pytest.approx(floor_w, rel=0.08)
    assert plant.control.energy_j == pytest.approx(plant.ballast_j, rel=0.45)  # by the guessed watts of the ballast


def test_a_floor_halves_the_swing_and_its_joules_are_those_that_were_added() -> None:
    floor_w = (HIGH_W + LOW_W) / 2
    plant = run_wave(floor_w, None)
    power = settled(plant)
    assert np.ptp(power) <= 0.55 * (HIGH_W - LOW_W)
    assert plant.ballast_j == pytest.approx((floor_w - LOW_W) * 0.25 * 20.0, rel=0.1)
    assert plant.control.energy_j == pytest.approx(plant.ballast_j, rel=0.1)


def test_what_ballast_lacks_right_after_the_work_is_learnt_from_pause_to_pause() -> None:
    """A chip that was slowed down draws less with the same ballast; pauses of 0.25 s are too short to correct in."""
    floor_w, seen = 350.0, {}
    for seconds in (1.0, 12.0):
        plant = run_wave(floor_w, None, slow=0.4, period_s=1.0, seconds=seconds)
        power = np.array(plant.power_w[-round(0.25 / STEP_S) :])
        seen[seconds] = power.reshape(-1, 25).mean(axis=1).min()
    assert seen[1.0] < 0.85 * floor_w and seen[12.0] > 0.95 * floor_w


@pytest.mark.parametrize("ramp", [400.0, 800.0])
def test_power_falls_no_faster_than_the_ramp(ramp: float) -> None:
    plant = run_wave(None, ramp, period_s=4.0)
    power = settled(plant)
    spans = power[: len(power) // 200 * 200].reshape(-1, 200).mean(axis=1)  # means of 0.2 s
    above_w = HIGH_W - (LOW_W + 500.0)  # ballast cannot draw as much as the work: that much falls at once
    assert np.diff(spans).min() >= -(1.2 * ramp * 0.2 + above_w)
    bare = settled(run_wave(None, None, period_s=4.0))
    assert np.diff(bare).min() == LOW_W - HIGH_W  # without it the fall is a step


def test_nothing_asked_is_nothing_added() -> None:
    plant = run_wave(None, None, seconds=4.0)
    assert plant.ballast_j == 0.0 and not any(plant.control.levels)
    below = run_wave(100.0, None, seconds=8.0)
    assert below.ballast_j < 5.0  # a floor below what the device draws anyway


def test_noisy_samples_leave_no_holes_in_a_floor() -> None:
    """A correction shows two readings later: if each of them asked for all of it again, later levels would swing."""
    floor_w = 577.0
    control = BallastControl(floor_w=floor_w, max_ramp_w_per_s=None, idle_w=LOW_W, full_w=725.0, blur_s=FILTER_S)
    plant = BallastPlant(wave(HIGH_W, 1.0, 0.77), control, low_w=LOW_W, gain_w=600.0, slow=0.2, noise_w=25.0)
    plant.run(40.0)
    power = settled(plant)
    samples = power[: len(power) // 20 * 20].reshape(-1, 20).mean(axis=1)
    assert samples.min() > 0.93 * floor_w  # 0.90 where a reading corrects all later levels as much as its own


def start(control: BallastControl, watts: Sequence[float]) -> list[float]:
    """Work begins and draws these watts without pauses, a reading every 20 ms: the duties at those times."""
    control.begin_work()
    duties = [control.get_start_duty((at + 0.5) * 0.02) for at in range(len(watts))]
    for at, (alone_w, duty) in enumerate(zip(watts, duties, strict=True)):
        shown_w = control.idle_w + duty * (alone_w - control.idle_w)
        control.observe(shown_w, 0.02, 0.0, None, (at + 0.5) * 0.02)
    return duties


def test_a_start_that_draws_more_than_usual_is_paced_the_next_time() -> None:
    control = BallastControl(floor_w=None, max_ramp_w_per_s=2000.0, idle_w=LOW_W, full_w=720.0)
    watts = [950.0, 950.0, 850.0, 750.0, 720.0, *[720.0] * 20]
    assert set(start(control, watts)) == {1.0}  # nothing is known of it yet
    for _ in range(3):  # seen through its own pauses, a start looks the same
        duties = start(control, watts)
        assert control.start_w == pytest.approx(950.0)
        assert duties[0] == pytest.approx((720.0 + 20.0 - LOW_W) / (950.0 - LOW_W), rel=0.01)
        assert duties == sorted(duties) and duties[6:] == [1.0] * len(duties[6:])
    calm = [720.0] * 25
    for _ in range(6):
        duties = start(control, calm)
    assert duties[0] > 0.95  # work that begins calmly is left alone
    floor_only = BallastControl(floor_w=400.0, max_ramp_w_per_s=None, idle_w=LOW_W, full_w=720.0)
    assert [set(start(floor_only, watts)) for _ in range(3)] == [{1.0}] * 3


def test_after_the_work_has_ended_a_ramp_ends_too() -> None:
    control = BallastControl(floor_w=None, max_ramp_w_per_s=200.0, idle_w=LOW_W, full_w=625.0, blur_s=FILTER_S)
    plant = BallastPlant(lambda at_s: HIGH_W if at_s < 2.0 else None, control, low_w=LOW_W)
    plant.run(12.0)
    assert plant.power_w[round(2.3 / STEP_S)] > 400.0
    assert plant.power_w[-1] == pytest.approx(LOW_W, abs=15.0)


def test_cpu_ballast_burns_the_share_of_cpu_time_that_its_level_asks_for() -> None:
    from tessera.runtime.ballast import HostBallast

    ballast = HostBallast(workers=1)
    try:
        ballast.set_levels([0.5] * BINS)
        deadline = time.monotonic() + 600.0
        while ballast.ran_s() < 0.1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert ballast.ran_s() >= 0.1
        ballast.begin_work()
        assert ballast.ended_ns() is None
        before_s, now_s = 0.0, ballast.ran_s()
        while now_s > before_s + 0.002 and time.monotonic() < deadline:  # looking at its level takes time, too
            time.sleep(0.02)
            before_s, now_s = now_s, ballast.ran_s()
        assert now_s <= before_s + 0.002
        ballast.end_work()
        before_s = ballast.ran_s()
        while ballast.ran_s() < before_s + 0.05 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert ballast.ran_s() >= before_s + 0.05 and ballast.ended_ns() <= time.monotonic_ns()
    finally:
        ballast.close()
    assert all(worker.poll() is not None for worker in ballast._workers)


# -- the loop, the options and the kernel ---------------------------------------------------------------------------


class CountingBallast:
    """Ballast that only notes its levels."""

    where = "nowhere"

    def __init__(self) -> None:
        self.levels: list[float] = []
        self.closed, self.calls = False, 0
        self._level, self._since, self._ran = 0.0, time.monotonic(), 0.0

    def set_levels(self, levels: Sequence[float]) -> None:
        self._ran, self._since = self.ran_s(), time.monotonic()
        self._level = levels[0]
        self.levels.append(levels[0])

    def ran_s(self) -> float:
        return self._ran + self._level * (time.monotonic() - self._since)

    def begin_work(self) -> None:
        self.calls += 1

    def end_work(self) -> None:
        self.calls -= 1

    def ended_ns(self) -> int | None:
        return None if self.calls else time.monotonic_ns()

    def close(self) -> None:
        self.closed = True


class FakeCuda:
    """The streams that StreamBallast asks torch for: which waited for which."""

    def __init__(self) -> None:
        self.cuda, self.waits, self.events = self, [], []

    def current_stream(self, device: object) -> str:
        return "the user's"

    def wait_stream(self, other: str) -> None:
        self.waits.append(other)

    def Event(self, *, blocking: bool) -> Any:
        self.events.append(SimpleNamespace(record=lambda stream: None, synchronize=lambda: None))
        return self.events[-1]


def test_ballast_of_a_gpu_never_runs_beside_the_work_of_a_call() -> None:
    """Beside it, products took six times as long on an H200."""
    from tessera.runtime.ballast import StreamBallast

    ballast, torch = StreamBallast.__new__(StreamBallast), FakeCuda()
    kernel = SimpleNamespace(ONE=1024, WORKS=0, BEGAN_NS=1, LEVELS=2)
    ballast._torch, ballast._kernel, ballast.device, ballast.stream = torch, kernel, 0, torch
    ballast._wanted = ballast._words = ballast._control = np.zeros(5, dtype=np.int64)
    ballast._wake, ballast._end, ballast._ended_ns, told = threading.Event(), None, 0, []
    ballast._copy = lambda to, source: told.append(source.tolist())
    ballast._calls, ballast._lock = 0, threading.Lock()
    ballast.begin_work()
    assert told == [[0, 0, 0, 0, 0]] and ballast.ended_ns() is None
    ballast.set_levels([0.5, 0.25, 0.75])  # a reading that comes meanwhile
    ballast.begin_work()  # of another thread
    ballast.end_work()
    assert torch.waits == [] and not ballast._wake.is_set() and not ballast._may_work()
    ballast.end_work()
    assert torch.waits == ["the user's"] and ballast._wake.is_set() and ballast._may_work()
    assert told[1:] == [[512, 256, 768], [0, 0, 512, 256, 768], [1, 0, 512, 256, 768]]  # the device hears of each
    ballast._wait_for_end()
    assert ballast.ended_ns() is not None
    ballast.begin_work()
    ballast._end = torch.events[0]  # work that began while the thread waited for the end of the work before it
    torch.events[0].synchronize = lambda: setattr(ballast, "_end", None)
    ballast._wait_for_end()
    assert ballast.ended_ns() is None


def test_the_loop_sets_levels_reports_joules_and_ends_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    from tessera import monitor
    from tessera.runtime import ballast_loop

    from fakes.sensor import ScriptSensor

    monkeypatch.setattr(ballast_loop, "LINGER_S", 0.05)
    domain = Domain(name="cpu0", source="script", resolution_s=0.02)
    sensor = ScriptSensor(lambda _t: 60.0, clock=time.monotonic_ns, domain=domain)
    made = monitor.Monitor([sensor]).start()
    made_ballast = CountingBallast()
    try:
        loop = ballast_loop.BallastLoop(150.0, None, make=lambda _device: made_ballast, sampler=made.sampler)
        loop.enter()
        deadline = time.monotonic() + 600.0
        while len(made_ballast.levels) < 10 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert made_ballast.calls == 1
        loop.leave()
        assert made_ballast.calls == 0
        while not made_ballast.closed and time.monotonic() < deadline:
            time.sleep(0.02)
        report = loop.report()
    finally:
        made.stop()
    assert made_ballast.closed and max(made_ballast.levels) > 0.0
    assert report.ran_s > 0 and report.energy_j > 0 and report.total_j > 0 and report.where == "nowhere"


def test_work_that_begins_after_a_pause_is_paced_until_the_ramp_allows_all_of_it() -> None:
    from tessera.runtime.ballast_loop import BallastLoop
    from tessera.runtime.controller import PaceCommand
    from tessera.runtime.pacer import PaceCounts

    commands: list[PaceCommand] = []
    loop = BallastLoop(None, 1000.0)
    loop._pacer = SimpleNamespace(obey=commands.append, counts=lambda: PaceCounts(waited_s=0.25))
    loop._control = BallastControl(floor_w=None, max_ramp_w_per_s=1000.0, idle_w=LOW_W, full_w=720.0, start_w=950.0)
    loop._began_ns = 10**9
    for ended_ns in (None, loop._began_ns - 10**6):  # work still runs, or has only just ended
        loop._note_start(ended_ns)
        loop._pace_start(loop._began_ns)
    assert commands == []
    loop._note_start(loop._began_ns - 10**8)
    for after_s in (0.1, 0.5):
        loop._pace_start(loop._began_ns + round(after_s * 1e9))
    first, later, last = (command.ratio for command in commands)
    assert first == pytest.approx((950.0 - LOW_W) / (720.0 - LOW_W) - 1.0) and first > later > last == 0.0
    assert loop.report().paused_s == 0.25


def test_before_the_first_work_the_watts_of_ballast_are_measured() -> None:
    from tessera import monitor
    from tessera.runtime.ballast_loop import BallastLoop

    from fakes.sensor import ScriptSensor

    ballast = CountingBallast()
    domain = Domain(name="cpu0", source="script", resolution_s=0.02)
    sensor = ScriptSensor(lambda _t: 60.0 + 100.0 * ballast._level, clock=time.monotonic_ns, domain=domain)
    made = monitor.Monitor([sensor]).start()
    loop = BallastLoop(110.0, None, make=lambda _device: ballast, sampler=made.sampler)
    try:
        loop.enter()
        control = loop._control
        assert control is not None
        # a busy machine delays the sensor's thread: readings then mix two levels
        guessed = "guess" in loop._notes
        assert guessed or (50.0 <= control.idle_w <= 110.0 and 30.0 <= control.gain_w <= 200.0)
    finally:
        loop.leave()
        loop._until_s = 0.0
        made.stop()


def test_a_floor_at_or_above_the_cap_is_refused() -> None:
    import tessera
    from tessera.errors import ArgumentError, UnitError

    with pytest.raises(ArgumentError, match="not below power_cap"):
        tessera.schedule(power_cap="300W", power_floor="300W")
    with pytest.raises(UnitError):
        tessera.schedule(max_ramp="200W")
    assert tessera.schedule(power_floor="0.3kW", max_ramp="12kW/min").options.ramp_w_per_s == pytest.approx(200.0)
    said = tessera.schedule(power_floor="300W", max_ramp="200W/s", dry_run=True).actions()
    assert any("ballast" in line and "200 W/s" in line for line in said)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernels_compile_for_gpus_that_are_not_here(capability: int) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tessera.runtime import ballast_kernel, wait_kernel

    target = GPUTarget("cuda", capability, 32)
    words = dict.fromkeys(("control", "stats"), "*i64") | dict.fromkeys(("left", "right"), "*fp16")
    numbers = dict.fromkeys(("slot_ns", "slots", "bin_ns", "bins"), "i64")
    sizes = {"SIZE": ballast_kernel.SIZE, "DEPTH": ballast_kernel.DEPTH}
    types = words | numbers | dict.fromkeys(sizes, "constexpr")
    aligned = {(at,): [["tt.divisibility", 16]] for at in range(len(words))}  # torch's memory is
    source = ASTSource(fn=ballast_kernel.tessera_ballast, signature=types, constexprs=sizes, attrs=aligned)
    options = {"num_warps": ballast_kernel.WARPS, "num_stages": ballast_kernel.STAGES}
    made = triton.compile(source, target=target, options=options)
    assert "ld.global" not in made.asm["ptx"]  # tiles come beside the products, as in a real one
    product = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[capability]
    assert product in made.asm["ptx"] and "%globaltimer" in made.asm["ptx"]
    assert made.metadata.shared <= 99 << 10  # what every GPU has for a block
    wait = ASTSource(fn=wait_kernel.tessera_wait, signature={"wait_ns": "i64"}, constexprs={})
    assert "nanosleep.u32" in triton.compile(wait, target=target, options={"num_warps": 1}).asm["ptx"]
