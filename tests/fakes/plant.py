"""A GPU that is only arithmetic: ops with watts, pauses, clocks that fall at the limit, a late sensor.

Fitted to an H200's duty curve (shared/design.md, bursts of 2.4 ms): 690 W at duty 1.0 and 0.75, 510 W at 0.5, 304 W at
0.25 lie on min(690, 100 + 818 duty). One op takes 0.190 ms at full clocks and 0.204 ms when limited (0.141 J). After a
step the board needs about 100 ms to come down to its limit (shared/h200/waves.json).

The sensor is the ring as the square waves of 10 and 20 ms in waves.json show it: looks every 20.00 ms that are regular
(the stamps are not, by a few milliseconds) at power behind a filter of 11 ms. That is no mean of 20 ms: what switches
every few milliseconds is let through in part, and beats with the looks where its period divides 20 ms. The ring then
shows windows, even means, that were never drawn. That explains 0.77 and 0.91 of the variance of those recordings.

What the filter is given are moments, one every `ADC_S`, not the power between them: they beat with slices of half a
millisecond, and the energy counter, which adds up the same moments, has the beats too. That is inferred from the runs
of 2026-11-15: with a continuous filter the counter's windows at fixed duties would lie 0-8 W above their mean, they lay
6-15 W above it, and a cap at 500 W, in slices of 0.7 ms every 1.63 ms, showed windows of +43 W by the ring and +26 W by
the counter. Moments 0.3 to 0.7 ms apart give windows of that size; the waves of 20 ms exclude more than 1.5 ms. Not
explained: a fixed duty of 0.17 that drew 8% more than its line by both, and one with +43 W by the counter alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from tessera.clock import Clock
from tessera.errors import SensorLost
from tessera.monitor.sampler import Sampler
from tessera.runtime.cap_report import MeanPower, PowerMeter
from tessera.runtime.control_loop import FRESH_NS, WATCH_NS
from tessera.runtime.controller import Cap, PaceCommand
from tessera.runtime.gpu_pacer import LONGEST_PAUSE_S, vary_slice
from tessera.runtime.pacer import LIMIT_S, LONGEST_S, PaceCounts
from tessera.runtime.power_zone import PowerZone, TokenTally
from tessera.schema import Capability, Domain
from tessera.sensors.base import Batch

T0_NS = 1_000_000_000_000
FRESH_S, WATCH_S = FRESH_NS * 1e-9, WATCH_NS * 1e-9
IDLE_W, BURST_W, LIMIT_W = 100.0, 918.0, 690.0
GEMM_S = 0.000190
LIMITER_S = 0.04
# 0.190 ms at 818 W above idle, 0.204 ms at 590 W: speed goes with this power of the watts.
SPEED = 0.22
STEP_S = 0.0005
ADC_S = 0.00055
TICK_S = 0.1  # of the energy counter


# A launch of our thread comes late by up to this; once in a hundred the interpreter's lock is held by others.
LATE_S, STALLED_S = 0.00015, 0.003


@dataclass
class Op:
    """A piece of work: seconds at full clocks, the watts it draws there, and the tokens it spends.

    The host has launched it at `ready_s`. `block_s`: its blocks, which a pause waits for, take this long at most.
    """

    seconds: float = GEMM_S
    power_w: float = BURST_W
    tokens: int = 1
    ready_s: float = 0.0
    block_s: float = 0.0001


@dataclass
class Plant:
    """Runs ops in order, paused as GpuPacer does it; power is kept in steps of half a millisecond.

    With `spends`, a wait for tokens follows every `every` ops instead.
    """

    ops: Iterator[Op]
    every: int = 4
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    sample_s: float = 0.020
    filter_s: float = 0.011
    blur_s: float = 0.003
    delay_s: float = 0.004
    stamp_s: float = 0.004  # stamps are off by up to this
    noise: float = 0.012
    adc_s: float = ADC_S
    idle_w: float = IDLE_W
    paused_w: float = 0.0  # while paused; 0: as idle
    limit_w: float = LIMIT_W
    held_s: float = 0.0  # the program holds the interpreter's lock: a launch is late by so much on average
    spends: bool = False  # whether waits are for tokens

    def __post_init__(self) -> None:
        self.now_s = self.at_s = 0.0
        self._launch_s, self._drained_s = math.inf, math.inf
        self._jitter = random.Random(1)
        self.command = PaceCommand()
        self.power_w: list[float] = []  # one per step
        self.done = 0
        self.waited_s = 0.0
        self.points = self.waits = 0
        self._shown_w: list[float] = []  # behind the sensor's filter
        self._filtered_w, self._moment_s = self.idle_w, self.adc_s * self.rng.random()
        self.counted_j: list[float] = []  # by the energy counter, at each tick
        self._counted_j = 0.0
        self._mean_w = self.idle_w
        self._scale = 1.0
        self._left_s = 0.0
        self._op: Op | None = None
        self._since = 0
        self._resume_s = 0.0
        self._waiting: tuple[float, float] | None = None
        self.tokens = 0
        self.worked_s = self.ended_s = 0.0
        self._spent, self._busy_s, self._whole_s, self._before_s = 0, 0.0, 0.0, 0.0
        self._next_sample_s = self.sample_s

    def run_until(self, time_s: float) -> list[tuple[float, float]]:
        """Go on to a time; the sensor's samples (stamp, watts) that came meanwhile."""
        samples = []
        while self.now_s < time_s:
            self._step()
            if self.now_s >= self._next_sample_s:
                samples.append((self.now_s + self.rng.uniform(-1.0, 1.0) * self.stamp_s, self._sampled()))
                self._next_sample_s += self.sample_s
        return samples

    def _sampled(self) -> float:
        hi = max(int((self.now_s - self.delay_s) / STEP_S), 1)
        lo = max(hi - max(int(self.blur_s / STEP_S), 1), 0)
        seen = self._shown_w[lo:hi] or [self.idle_w]
        return sum(seen) / len(seen) * self.rng.gauss(1.0, self.noise)

    def _step(self) -> None:
        """Half a millisecond: works and waits fill it in order."""
        end, at, joules = self.now_s + STEP_S, self.now_s, 0.0
        while at < end - 1e-12:
            self.at_s = at
            if self._waiting is not None:
                until = self._until(*self._waiting)
                upto = min(max(until, at), end)
                joules += self._draw(self.paused_w or self.idle_w, at, upto)
                self.waited_s += upto - at
                at = upto
                if at >= until:
                    self._end_point(at)
                continue
            if self._op is None:
                self._op = next(self.ops)
                self._left_s = self._op.seconds
            upto = min(end, self._begin_pause(at))
            if self._waiting is not None:
                continue
            if self._op.ready_s > at:
                upto = min(upto, self._op.ready_s)
                joules += self._draw(self.idle_w, at, upto)
                at = upto
                continue
            draw_w = self.idle_w + (self._op.power_w - self.idle_w) * self._scale
            speed = self._scale**SPEED
            ran = min(upto - at, self._left_s / speed)
            joules += self._draw(draw_w, at, at + ran)
            at += ran
            self._left_s -= ran * speed
            if self._left_s <= 1e-9:
                self._finish(at)
        self._account(joules / STEP_S)
        self.now_s = end

    def _begin_pause(self, at: float) -> float:
        """Until when work goes on: to the next launch of a pause, then to the end of the blocks that run."""
        if self.spends or self.command.ratio <= 0:
            self._launch_s = self._drained_s = math.inf
            return math.inf
        if self._launch_s == math.inf:
            late_s = STALLED_S if self._jitter.random() < 0.01 else LATE_S * self._jitter.random()
            late_s += 2.0 * self.held_s * self._jitter.random() if self.held_s else 0.0
            self._launch_s = at + vary_slice(self.command.slice_s, self._jitter) + late_s
        if at < self._launch_s - 1e-12:
            return self._launch_s
        if self._drained_s == math.inf:
            assert self._op is not None
            block_s = 0.0 if self._op.ready_s > at else min(self._op.block_s, self._left_s)
            self._drained_s = at + block_s * self._jitter.random()
        if at >= self._drained_s - 1e-12:
            self._busy_s = min(at - self._resume_s, LIMIT_S)
            self._waiting = (at, self._busy_s)
            self._launch_s = self._drained_s = math.inf
            self.waits += 1
        return self._drained_s

    def _draw(self, power_w: float, start_s: float, end_s: float) -> float:
        """So much for a while, of which the sensor sees the moments it looks at; joules."""
        while self._moment_s < end_s:
            kept = math.exp(-self.adc_s / self.filter_s) if self.filter_s else 0.0
            self._filtered_w = power_w + (self._filtered_w - power_w) * kept
            self._counted_j += power_w * self.adc_s
            self._moment_s += self.adc_s
        return power_w * (end_s - start_s)

    def _finish(self, at: float) -> None:
        assert self._op is not None
        tokens, self._op = self._op.tokens, None
        self.done += 1
        if not self.spends or not tokens:  # what is not ours is not heard of
            return
        self._spent += tokens
        self._since += 1
        if self._since >= self.every:
            self._since = 0
            self._spend(at, min(at - self._resume_s, LIMIT_S))

    def _spend(self, at: float, busy: float) -> None:
        """The rule of `tessera_spend` (wait_kernel.py)."""
        self._busy_s = busy
        self._before_s = max(self._whole_s, at - busy - self.command.saved_s)
        if self._cost_s() > 0 and self._before_s + self._cost_s() - at >= self.command.slice_s:
            self._waiting = (at, 0.0)
        else:
            self._end_point(at)

    def _cost_s(self) -> float:
        return min(self.command.cost_s(self._spent, self._busy_s), LONGEST_S)

    def _until(self, began: float, busy: float) -> float:
        """When a wait ends by the newest command, as in the kernel."""
        if not self.spends:
            return began + min(busy * self.command.ratio, LONGEST_PAUSE_S)
        cost_s = self._cost_s()
        return began + min(self._before_s + cost_s - began, LONGEST_S) if cost_s else began

    def _end_point(self, at: float) -> None:
        self._waiting, self._resume_s, self.ended_s = None, at, at
        cost_s = self._cost_s()
        self._whole_s = min(self._before_s + cost_s, at + LONGEST_S if self.command.ratio else at)
        self.tokens, self._spent = self.tokens + self._spent, 0
        self.worked_s, self._busy_s = self.worked_s + self._busy_s, 0.0
        self.points += 1

    def _account(self, power_w: float) -> None:
        """The board's limiter: clocks fall while the mean is above the limit, and rise again."""
        self.power_w.append(power_w)
        self._shown_w.append(self._filtered_w if self.filter_s else power_w)
        if len(self.power_w) % round(TICK_S / STEP_S) == 0:
            self.counted_j.append(self._counted_j)
        self._mean_w += (power_w - self._mean_w) * STEP_S / LIMITER_S
        error = (self.limit_w - self._mean_w) / self.limit_w
        self._scale = min(max(self._scale + 8.0 * error * STEP_S, 0.3), 1.0)


def worst_window_w(power_w: list[float], window_s: float, start_s: float) -> float:
    """The highest mean of any window after a time."""
    steps, first = round(window_s / STEP_S), round(start_s / STEP_S)
    kept = power_w[first:]
    total = sum(kept[:steps])
    worst = total
    for i in range(steps, len(kept)):
        total += kept[i] - kept[i - steps]
        worst = max(worst, total)
    return worst / steps


def mean_w(power_w: list[float], start_s: float) -> float:
    """The mean after a time."""
    kept = power_w[round(start_s / STEP_S) :]
    return sum(kept) / len(kept)


def counter_window_w(counted_j: list[float], start_s: float) -> float:
    """The highest mean between every second tick of the energy counter after a time."""
    kept = counted_j[round(start_s / TICK_S) :]
    return max((b - a) / (2 * TICK_S) for a, b in zip(kept, kept[2:], strict=False))


class PlantSensor:
    """The plant's samples as a sensor of the monitor, with the lag an H200's ring has."""

    name = "plant"
    period_s = 0.02

    def __init__(self, plant: Plant, name: str = "gpu0", label: str = "NVIDIA H200") -> None:
        self.plant, self.dead = plant, False
        lag_s = plant.delay_s + plant.blur_s / 2 + plant.filter_s
        self._domain = Domain(
            name=name, source="plant", label=label, resolution_s=plant.sample_s, lag_s=lag_s, blur_s=plant.blur_s
        )
        self._samples: list[tuple[float, float]] = []

    def start(self) -> None:
        pass

    def domains(self) -> list[Domain]:
        return [self._domain]

    def capabilities(self) -> list[Capability]:
        return []

    def saw(self, samples: list[tuple[float, float]]) -> None:
        self._samples += samples

    def read(self) -> Batch:
        batch = Batch()
        if self.dead:
            raise SensorLost("the plant's sensor is dead")
        for time_s, power_w in self._samples:
            batch.add(self._domain.name, round(time_s * 1e9) + T0_NS, power_w)
        self._samples = []
        return batch

    def stop(self) -> None:
        pass


class PlantPacer:
    """The plant's own pauses or waits, as the loop sees them."""

    where = "in the plant"

    def __init__(self, plant: Plant) -> None:
        self._plant = plant

    def obey(self, command: PaceCommand) -> None:
        self._plant.command = command

    def pace_by_tokens(self, wanted: bool) -> None:
        pass

    def spend(self, tokens: int, *, restart: bool = False) -> None:
        raise AssertionError("the plant spends by itself")

    def counts(self) -> PaceCounts:
        plant = self._plant
        return PaceCounts(plant.points, plant.waits, plant.waited_s, plant.worked_s, plant.tokens, plant.ended_s)

    def count_queued(self) -> int:
        return 1


@dataclass
class Bench:
    """A plant, its sensor and the real zone around them, on the plant's own clock; looked at as ControlLoop does."""

    plant: Plant
    cap: Cap
    tick_s: float = 0.020

    def __post_init__(self) -> None:
        self.sensor = PlantSensor(self.plant)
        self.ring = PowerMeter(self.cap.window_s)  # sample by sample, as benchmarks/device/schedule_caps.py looks at it
        self._last: tuple[float, float] | None = None
        self.jump_ns = 0
        clock = Clock(self.now_ns, self.now_ns)
        self.sampler = Sampler([self.sensor], clock=clock)
        self.pacer = PlantPacer(self.plant)
        self.zone = PowerZone("gpu0", ["gpu0"], [self.pacer], tally=TokenTally() if self.plant.spends else None)
        self.zone.caps[0] = self.cap
        self.zone.restart(self.now_ns())
        self.pacer.obey(self.zone.begin(self.sampler, self.now_ns()))
        self.meter = PowerMeter(self.cap.window_s)

    def now_ns(self) -> int:
        return round(self.plant.now_s * 1e9) + T0_NS

    def run(self, seconds: float) -> None:
        """Let the plant work and the zone steer it."""
        end = self.plant.now_s + seconds
        while self.plant.now_s < end - 1e-9:
            near = self.plant.now_s < FRESH_S or self.zone.is_near_cap(self.now_ns())
            samples = self.plant.run_until(self.plant.now_s + (self.tick_s if near else WATCH_S))
            self._look(samples)
            self.sensor.saw(samples)
            self.sampler.read_due()
            reading = self.zone.read(self.sampler)
            self.pacer.obey(self.zone.steer(self.sampler, reading, self.now_ns()))
            if reading is not None:
                self.meter.add(reading)

    def _look(self, samples: list[tuple[float, float]]) -> None:
        for time_s, power_w in samples:
            if self._last is not None:
                before_s, before_w = self._last
                self.ring.add(MeanPower(round(time_s * 1e9), time_s - before_s, (before_w + power_w) / 2))
            self._last = (time_s, power_w)

    def mean_w(self, start_s: float = 1.0) -> float:
        """The plant's true mean after a time."""
        return mean_w(self.plant.power_w, start_s)

    def worst_w(self, start_s: float = 1.0) -> float:
        """The plant's true worst window after a time."""
        return worst_window_w(self.plant.power_w, self.cap.window_s, start_s)


def gemms() -> Iterator[Op]:
    """The GEMM loop of the duty curve."""
    while True:
        yield Op()


def training(rng: random.Random, heavy_w: float = 709.0, light_w: float = 400.0) -> Iterator[Op]:
    """Steps of about 30 ms: 20 ms of matrix work, 10 ms of memory-bound work."""
    while True:
        for _ in range(60):
            yield Op(rng.uniform(0.0001, 0.0006), rng.uniform(0.75, 1.25) * heavy_w)
        for _ in range(20):
            yield Op(rng.uniform(0.0002, 0.0008), rng.uniform(0.75, 1.25) * light_w)


def phases(period_s: float, light_w: float = 350.0) -> Iterator[Op]:
    """GEMMs and light work in turn: the worst case for a late sensor."""
    while True:
        for power_w in (BURST_W, light_w):
            for _ in range(int(period_s / GEMM_S)):
                yield Op(GEMM_S, power_w)
