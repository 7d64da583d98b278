"""A board whose true power is known at every half millisecond, and the two sensors that an H200 has: ring and counter.

    true power ──► response (boxcar, exponential) ──► a look every 20.00 ms ──► stamps, noise ──► ring samples
         └───────► its running sum, held every 100 ms, read about once a second ──────────────► counter ticks

The looks are regular and the stamps are not, as recorded (tests/fakes/plant.py, benchmarks/fit/fit_response.py). Loads
are functions of a random generator and a number of seconds; each gives watts on the grid. Programs are the same for
kernels: which kernel ran when, each with watts of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.sensors._nvml_counter import CounterPace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

GRID_S = 0.0005
LOOK_S = 0.020
TICK_S = 0.1
T0_NS = 1_790_000_000_000_000_000
IDLE_W, BUSY_W = 110.0, 640.0


@dataclass(frozen=True, kw_only=True)
class Ring:
    """How this ring differs from the truth; the defaults are an H200's (benchmarks/fit/fit_response.py)."""

    tau_s: float = 0.011
    box_s: float = 0.010
    gain: float = 1.0
    noise: float = 0.004  # of one sample, as a share: steady copies on the H200 scatter by so much
    look_s: float = LOOK_S
    regular: bool = True  # whether it looks at regular times, or when its stamps say (recorded mixtures have both)

    @property
    def lag_s(self) -> float:
        return self.tau_s + 0.5 * self.box_s

    @property
    def blur_s(self) -> float:
        """Standard deviation of the response."""
        return math.hypot(self.tau_s, self.box_s / math.sqrt(12.0))


@dataclass(frozen=True, kw_only=True)
class Board:
    """The truth, and what the sensors showed of it. Times are epoch nanoseconds."""

    watts: Floats
    times_ns: Ints
    samples_w: Floats
    ticks_ns: Ints
    ticks_j: Floats
    grid_s: float = GRID_S
    _so_far: Floats = field(repr=False, default_factory=lambda: np.zeros(0))

    def true_j(self, start_ns: int, end_ns: int) -> float:
        """Joules that were really drawn between two times."""
        return self._joules_at(end_ns) - self._joules_at(start_ns)

    def _joules_at(self, time_ns: int) -> float:
        cell, part = divmod((time_ns - T0_NS) * 1e-9 / self.grid_s, 1.0)
        a, b = self._so_far[int(cell) : int(cell) + 2]
        return float(a + part * (b - a))


def make_board(watts: Floats, rng: Any, ring: Ring | None = None, *, grid_s: float = GRID_S) -> Board:
    """Show a true power to the sensors, from a random phase of their looks and ticks on."""
    ring = ring or Ring()
    seconds = len(watts) * grid_s
    so_far = np.concatenate([[0.0], np.cumsum(watts) * grid_s])
    seen = _smear(watts, ring, grid_s)
    train = np.arange(rng.uniform(0.1, 0.1 + ring.look_s), seconds - 0.02, ring.look_s)
    # Stamps: three quarters within 2 ms of the train, the others up to 8 ms off (of 4,118 recorded spacings).
    near, far = rng.normal(0, 0.001, len(train)), rng.uniform(-0.008, 0.008, len(train))
    stamps = train + np.where(rng.random(len(train)) < 0.75, near, far)
    looks = train if ring.regular else stamps + rng.normal(0, 0.001, len(train))
    samples = ring.gain * np.interp(looks, (np.arange(len(seen)) + 1) * grid_s, seen)
    samples = samples * (1 + ring.noise * rng.standard_normal(len(samples)))
    stamps_ns = np.maximum.accumulate(np.round(stamps * 1e9).astype(np.int64) + np.arange(len(stamps)))
    # The phase of the ticks is known to +-2 ms (fit_response.json), the same 2 ms for all of them.
    phase = rng.uniform(0.0, TICK_S)
    ticks = phase + TICK_S * np.arange(int((seconds - phase) / TICK_S))
    joules = np.interp(ticks / grid_s, np.arange(len(so_far)), so_far)
    sampled = np.concatenate([[0.0], np.cumsum(0.5 * (samples[1:] + samples[:-1]) * np.diff(stamps))])
    read = _pick_reads(joules, np.interp(ticks + ring.lag_s, stamps, sampled), rng)
    ticks, joules = ticks[read], joules[read]
    placed = np.round((ticks + rng.uniform(-0.002, 0.002)) * 1e9).astype(np.int64)
    return Board(
        watts=watts, times_ns=T0_NS + stamps_ns, samples_w=np.round(samples, 3), ticks_ns=T0_NS + placed,
        ticks_j=np.round(joules, 3), grid_s=grid_s, _so_far=so_far,
    )  # fmt: skip


def _pick_reads(joules: Floats, sampled_j: Floats, rng: Any) -> list[int]:
    """Which ticks are read, at the pace of sensors/_nvml_counter.py."""
    pace, reads, at = CounterPace(), [], int(rng.integers(5, 13))
    while at < len(joules):
        reads.append(at)
        pace.compare(float(joules[at]), float(sampled_j[at]))
        at += max(round(pace.next_pause_ns() / (TICK_S * 1e9)), 1)
    return reads


def _smear(watts: Floats, ring: Ring, grid_s: float) -> Floats:
    """The power behind a boxcar and an exponential, at the end of each cell."""
    box = max(round(ring.box_s / grid_s), 1)
    padded = np.concatenate([np.full(box, watts[0]), watts])
    flat = np.diff(np.cumsum(np.concatenate([[0.0], padded])), n=1)
    total = np.cumsum(np.concatenate([[0.0], flat]))
    boxed = (total[box:] - total[:-box])[-len(watts) :] / box
    lags = np.arange(0.0, 9 * ring.tau_s + grid_s, grid_s)
    weights = np.exp(-lags / ring.tau_s) if ring.tau_s > 0 else np.array([1.0])
    long = np.concatenate([np.full(len(weights), boxed[0]), boxed])
    return np.convolve(long, weights / weights.sum())[len(weights) : len(weights) + len(watts)]


# -- loads ---------------------------------------------------------------------------------------------------------

Load = Callable[[Any, float], Floats]


def _cells(seconds: float) -> int:
    return round(seconds / GRID_S)


def steady(rng: Any, seconds: float) -> Floats:
    """One level that wanders by a percent over seconds, as temperature and clocks do."""
    knots = rng.normal(0, 0.01, max(int(seconds), 2) + 1)
    wander = np.interp(np.arange(_cells(seconds)) * GRID_S, np.arange(len(knots)), knots)
    return rng.uniform(250, 650) * (1 + wander)


def square(period_s: float, duty: float = 0.5) -> Load:
    def load(rng: Any, seconds: float) -> Floats:
        phase = (np.arange(_cells(seconds)) * GRID_S / period_s + rng.random()) % 1.0
        high = rng.uniform(500, 750)
        return np.where(phase < duty, high, IDLE_W)

    return load


def sine(period_s: float) -> Load:
    def load(rng: Any, seconds: float) -> Floats:
        t = np.arange(_cells(seconds)) * GRID_S
        return 375.0 + rng.uniform(100, 250) * np.sin(2 * np.pi * (t / period_s + rng.random()))

    return load


def spikes(width_s: float, every_s: float) -> Load:
    """Short peaks at regular times that are no multiple of the looks, on a low level."""
    return lambda rng, seconds: square(every_s, width_s / every_s)(rng, seconds) * 1.2


def noise(cell_s: float) -> Load:
    """A new level every millisecond or so."""

    def load(rng: Any, seconds: float) -> Floats:
        each = max(round(cell_s / GRID_S), 1)
        levels = rng.uniform(IDLE_W, BUSY_W, _cells(seconds) // each + 1)
        return np.repeat(levels, each)[: _cells(seconds)]

    return load


def telegraph(shortest_s: float, longest_s: float) -> Load:
    """Levels that last between two times, by chance: phases of a program."""

    def load(rng: Any, seconds: float) -> Floats:
        out = np.zeros(0)
        parts = []
        have = 0
        while have < _cells(seconds):
            lasts = max(round(shortest_s * (longest_s / shortest_s) ** rng.random() / GRID_S), 1)
            parts.append(np.full(lasts, rng.uniform(IDLE_W, 750.0)))
            have += lasts
        return np.concatenate([out, *parts])[: _cells(seconds)]

    return load


def training(step_s: float) -> Load:
    """Steps of four phases, each a level; every step lasts a little longer or shorter."""

    def load(rng: Any, seconds: float) -> Floats:
        levels, lengths = rng.uniform(150, 700, 4), rng.dirichlet(np.full(4, 3.0)) * step_s
        parts, have = [], 0
        while have < _cells(seconds):
            for level, length in zip(levels, lengths, strict=True):
                lasts = max(round(length * rng.normal(1.0, 0.01) / GRID_S), 1)
                parts.append(np.full(lasts, level))
                have += lasts
        return np.concatenate(parts)[: _cells(seconds)]

    return load


def takes_turns(one: Load, other: Load, each_s: float) -> Load:
    """Two loads that alternate every few seconds: what was learnt in one is wrong in the other."""

    def load(rng: Any, seconds: float) -> Floats:
        a, b = one(rng, seconds), other(rng, seconds)
        t = np.arange(_cells(seconds)) * GRID_S
        return np.where((t / each_s + rng.random()) % 2 < 1, a, b)

    return load


def idle(rng: Any, seconds: float) -> Floats:
    return np.full(_cells(seconds), rng.uniform(75, 135))


@dataclass(frozen=True, kw_only=True)
class LoadClass:
    """A load and the ring that sees it. Held-out classes were not looked at while intervals were made."""

    load: Load
    ring: Ring = field(default_factory=Ring)
    held_out: bool = False


SLOW = Ring(tau_s=0.030, box_s=0.010)  # mean delay 35 ms, 40 ms with the tail: as on an older board
CLASSES: dict[str, LoadClass] = {
    "idle": LoadClass(load=idle),
    "steady": LoadClass(load=steady),
    "square 10 ms": LoadClass(load=square(0.010)),
    "square 20 ms": LoadClass(load=square(0.020)),
    "square 40 ms": LoadClass(load=square(0.040)),
    "square 100 ms": LoadClass(load=square(0.100)),
    "square 1 s": LoadClass(load=square(1.0)),
    "spikes 5 of 200 ms": LoadClass(load=spikes(0.005, 0.2)),
    "noise of 1 ms": LoadClass(load=noise(0.001)),
    "phases of 2-60 ms": LoadClass(load=telegraph(0.002, 0.06)),
    "phases of 0.1-2 s": LoadClass(load=telegraph(0.1, 2.0)),
    "training, 130 ms steps": LoadClass(load=training(0.130)),
    "ring 3% high, phases": LoadClass(load=telegraph(0.05, 0.5), ring=Ring(gain=1.03)),
    "ring 3% high, steady": LoadClass(load=steady, ring=Ring(gain=1.03)),
    "response 40 ms, square 200 ms": LoadClass(load=square(0.2), ring=SLOW),
    "response 40 ms, phases": LoadClass(load=telegraph(0.02, 0.3), ring=SLOW),
    "20 ms square and idle in turns": LoadClass(load=takes_turns(square(0.020), idle, 4.0)),
    # Held out.
    "square 20.05 ms": LoadClass(load=square(0.02005), held_out=True),
    "square 30 ms": LoadClass(load=square(0.030), held_out=True),
    "sine 6.67 ms": LoadClass(load=sine(1 / 150), held_out=True),
    "square 66 ms, 30% duty": LoadClass(load=square(0.066, 0.3), held_out=True),
    "square 300 ms": LoadClass(load=square(0.3), held_out=True),
    "spikes 3 of 333 ms": LoadClass(load=spikes(0.003, 0.333), held_out=True),
    "noise of 3 ms": LoadClass(load=noise(0.003), held_out=True),
    "phases of 5-20 ms": LoadClass(load=telegraph(0.005, 0.02), held_out=True),
    "training, 47 ms steps": LoadClass(load=training(0.047), held_out=True),
    "training, 400 ms steps": LoadClass(load=training(0.4), held_out=True),
    "ring 2% low, training": LoadClass(load=training(0.2), ring=Ring(gain=0.98), held_out=True),
    "response 25 ms, training": LoadClass(load=training(0.15), ring=Ring(tau_s=0.02, box_s=0.01), held_out=True),
    "training and 20 ms square in turns": LoadClass(load=takes_turns(training(0.1), square(0.02), 3.0), held_out=True),
}


# -- kernels -------------------------------------------------------------------------------------------------------

KERNELS = (
    "nvjet_gemm", "sdpa_flash", "softmax", "copy_kernel", "elementwise", "layer_norm", "reduce", "xmma_conv",
)  # fmt: skip
MATRIX = (0, 1, 7)
STATIC_W, LIMIT_W = 135.0, 700.0
KERNEL_GRID_S = 1e-4
# The responses that fit the recordings of an H200 equally well (docs/measuring.md), with both kinds of stamps.
RINGS = (
    Ring(), Ring(tau_s=0.008, box_s=0.014, regular=False), Ring(tau_s=0.006, box_s=0.020), Ring(regular=False),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What ran: the number of the kernel, start and end in seconds."""

    kernel: Ints
    start_s: Floats
    end_s: Floats


Program = Callable[[Any, float], list[tuple[int, float, float]]]


def call_kernel(out: list[tuple[int, float, float]], kernel: int, at_s: float, lasts_s: float, each_s: float) -> float:
    """Call a kernel for so long, a microsecond apart; returns when it is over."""
    count = max(1, round(lasts_s / each_s))
    for _ in range(count):
        out.append((kernel, at_s, at_s + lasts_s / count))
        at_s += lasts_s / count + 1e-6
    return at_s


def pick_kernels(rng: Any, count: int) -> tuple[Ints, Floats]:
    """Some kernels in the order of a step, and the share of the step that each takes."""
    return rng.permutation(len(KERNELS))[:count], rng.dirichlet(np.full(count, 2.0))


def loop(step_s: float, kernels: int, *, jitter: float = 0.002, pause_s: float = 0.0) -> Program:
    """A fixed sequence of kernels, each for its share of the step: the usual training."""

    def program(rng: Any, seconds: float) -> list[tuple[int, float, float]]:
        order, share = pick_kernels(rng, kernels)
        each_s, out, now = max(2e-4, step_s / 500), [], 0.2
        while now < seconds:
            for kernel, part in zip(order, share, strict=True):
                now = call_kernel(out, int(kernel), now, part * step_s * (1 + jitter * rng.standard_normal()), each_s)
            now += pause_s
        return out

    return program


def layers(depth: int, kernels: int, each_s: float, tail_s: float) -> Program:
    """Layers that are all alike, of kernels much shorter than the sensor's memory, and two more kernels at the end."""

    def program(rng: Any, seconds: float) -> list[tuple[int, float, float]]:
        order, lasts = rng.permutation(len(KERNELS)), each_s * rng.uniform(0.5, 1.5, kernels)
        out, now = [], 0.2
        while now < seconds:
            slower = 1 + 0.002 * rng.standard_normal()
            for kernel, lasts_s in list(zip(order[:kernels], lasts, strict=True)) * depth:
                now = call_kernel(out, int(kernel), now, lasts_s * slower, 1.0)
            for kernel in order[kernels : kernels + 2]:
                now = call_kernel(out, int(kernel), now, tail_s / 2, 5e-4)
        return out

    return program


def shuffled(shortest_s: float, longest_s: float) -> Program:
    """Kernels in random order, each for a random time, with pauses."""

    def program(rng: Any, seconds: float) -> list[tuple[int, float, float]]:
        chosen, out, now = rng.permutation(len(KERNELS))[:5], [], 0.2
        while now < seconds:
            lasts_s = shortest_s * (longest_s / shortest_s) ** rng.random(2)
            now = call_kernel(out, int(rng.choice(chosen)), now, lasts_s[0], 2e-4)
            now += lasts_s[1] if rng.random() < 0.25 else 0.0
        return out

    return program


@dataclass(frozen=True, kw_only=True)
class ProgramClass:
    """A program. Held-out ones were not looked at while intervals were made."""

    program: Program
    held_out: bool = False


PROGRAMS: dict[str, ProgramClass] = {
    "random order": ProgramClass(program=shuffled(0.002, 0.06)),
    "loop of 8 ms": ProgramClass(program=loop(0.008, 4)),
    "loop of 20 ms, exact": ProgramClass(program=loop(0.020, 4, jitter=0.0)),
    "loop of 40 ms, exact": ProgramClass(program=loop(0.040, 5, jitter=0.0)),
    "loop of 47 ms": ProgramClass(program=loop(0.047, 5)),
    "loop of 50 ms with pauses": ProgramClass(program=loop(0.050, 4, pause_s=0.010)),
    "loop of 130 ms": ProgramClass(program=loop(0.130, 6)),
    "12 layers of 3, 30 ms": ProgramClass(program=layers(12, 3, 5e-4, 0.010)),
    # Held out.
    "random order, short": ProgramClass(program=shuffled(0.001, 0.02), held_out=True),
    "loop of 25 ms": ProgramClass(program=loop(0.025, 5), held_out=True),
    "loop of 60 ms, exact": ProgramClass(program=loop(0.060, 5, jitter=0.0), held_out=True),
    "loop of 73 ms with pauses": ProgramClass(program=loop(0.073, 4, pause_s=0.020), held_out=True),
    "loop of 210 ms": ProgramClass(program=loop(0.210, 7), held_out=True),
    "24 layers of 5, 100 ms": ProgramClass(program=layers(24, 5, 7e-4, 0.020), held_out=True),
}


def run_program(program: Program, rng: Any, seconds: float, ring: Ring) -> tuple[Ran, Floats, Board]:
    """What ran, the true joules of each kernel (those that ran), and the board that drew them.

    Products draw 50-115% of the room between a waiting board and its limit, the others 30-95%, as steady kernels of an
    H200 do (attribute/prior.py); all wander by a percent over seconds.
    """
    calls = [call for call in program(rng, seconds) if call[2] < seconds - 0.2]
    kernel = np.array([c[0] for c in calls])
    start, end = np.array([c[1] for c in calls]), np.array([c[2] for c in calls])
    low, high = (np.where(np.isin(np.arange(len(KERNELS)), MATRIX), *pair) for pair in ((0.5, 0.3), (1.15, 0.95)))
    watts = STATIC_W + (LIMIT_W - STATIC_W) * rng.uniform(low, high)
    wander = np.interp(start, np.arange(seconds + 2), rng.standard_normal(int(seconds) + 2))
    drawn = watts[kernel] * (1 + 0.01 * wander)
    edges, so_far = np.empty(2 * len(calls)), np.zeros(2 * len(calls))
    edges[0::2], edges[1::2] = start, end
    so_far[1::2] = np.cumsum((drawn - STATIC_W) * (end - start))
    so_far[2::2] = so_far[1:-1:2]
    grid = np.arange(round(seconds / KERNEL_GRID_S) + 1) * KERNEL_GRID_S
    power = STATIC_W + np.diff(np.interp(grid, edges, so_far)) / KERNEL_GRID_S
    true_j = np.bincount(kernel, drawn * (end - start), minlength=len(KERNELS))
    board = make_board(power, rng, ring, grid_s=KERNEL_GRID_S)
    return Ran(kernel=kernel, start_s=start, end_s=end), true_j, board
