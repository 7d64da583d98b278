"""Programs for the plant, by how their host behaves; and two processes on one plant, whose contexts take turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .plant import SPEED, STEP_S, Op, Plant

Program = Callable[[Plant], Iterator[Op]]


def saturated(seconds: float = 0.000171, power_w: float = 976.0, block_s: float = 0.0001) -> Program:
    """Products of 4096 a side, as an H200 ran them between waits on 2026-11-15: 118 W + 858 W x duty."""

    def ops(_plant: Plant) -> Iterator[Op]:
        while True:
            yield Op(seconds, power_w, block_s=block_s)

    return ops


def host_bound(host_s: float = 0.000012, seconds: float = 0.000007, power_w: float = 260.0) -> Program:
    """The host needs longer for a launch than the device for the kernel; while it is paused, launches queue up."""

    def ops(plant: Plant) -> Iterator[Op]:
        host = plant.at_s
        while True:
            host = max(host, plant.at_s - 1000 * host_s)  # a stream takes about a thousand launches
            host += host_s * plant.rng.uniform(0.5, 1.5)  # not in step with the moments that the sensor looks at
            yield Op(seconds * plant.rng.uniform(0.5, 1.5), power_w, ready_s=host, block_s=seconds)

    return ops


def launching(
    host_s: float,
    seconds: float,
    power_w: float,
    *,
    depth: int = 1000,
    each: int = 0,
    begin_s: float = 0.0,
    held_s: float = 0.0,
) -> Program:
    """A host that needs `host_s` for a launch, is at most `depth` of them ahead, and waits for the device after `each`.

    `begin_s`: what it does before the first. `held_s`: see Plant.
    """

    def ops(plant: Plant) -> Iterator[Op]:
        plant.held_s = held_s
        host, count = plant.at_s + begin_s, 0
        while True:
            host = max(host, plant.at_s - depth * host_s) + host_s * plant.rng.uniform(0.5, 1.5)
            yield Op(seconds * plant.rng.uniform(0.5, 1.5), power_w, ready_s=host, block_s=seconds)
            count += 1
            if each and count % each == 0:
                host = max(host, plant.at_s)

    return ops


def decode(**more: float) -> Program:
    """Eager decoding on an H200 (2026-11-18): 184 W; the host's launches leave the GPU idle for 72% of the time.

    Fixed duties of 0.5 and 0.3 drew 169 and 168 W. Four kernels are one op, and a stream takes 1024 launches.
    """
    return launching(0.000048, 0.0000136, 351.0, depth=256, each=5300, **{"held_s": 0.003, **more})  # type: ignore[arg-type]


def compiled_bert(**more: float) -> Program:
    """Compiled BERT on an H200 (2026-11-18): 394 W at duties of 1.0 and 0.75, 361 W at 0.5, 265 W at 0.3."""
    return launching(0.00004, 0.000024, 578.0, each=4000, **{"held_s": 0.0018, **more})  # type: ignore[arg-type]


def wandering(dwell_s: float = 0.3, *, seed: int = 3, each: int = 4000, held_s: float = 0.0018) -> Program:
    """A program whose host is fast enough now and then: compiled BERT on an H200 in the afternoon of 2026-11-18.

    Without a pause it drew 440 W for a tenth of a second up to a whole one, then 620 W for as long.
    """

    def ops(plant: Plant) -> Iterator[Op]:
        rng = random.Random(seed)
        plant.held_s = held_s
        seconds, host, count, slow, changes_s = 0.000024, plant.at_s, 0, False, 0.0
        while True:
            if plant.at_s >= changes_s:
                slow, changes_s = not slow, plant.at_s + rng.expovariate(1.0 / dwell_s)
            host_s = seconds * (1.56 if slow else 0.7)
            host = max(host, plant.at_s - 1000 * host_s) + host_s * plant.rng.uniform(0.5, 1.5)
            yield Op(seconds * plant.rng.uniform(0.5, 1.5), 620.0, ready_s=host, block_s=seconds)
            count += 1
            if each and count % each == 0:
                host = max(host, plant.at_s)

    return ops


def synchronising(
    calls: int, seconds: float = 0.0185, power_w: float = 820.0, host_s: float = 0.004, gap_s: float = 0.003
) -> Program:
    """Calls of many kernels; after every few of them the host waits for the device, then does something else."""

    def ops(plant: Plant) -> Iterator[Op]:
        host = plant.at_s
        while True:
            for _ in range(calls):
                host += host_s
                for _ in range(100):
                    yield Op(seconds / 100, power_w * plant.rng.uniform(0.9, 1.1), ready_s=host)
            host = max(host, plant.at_s) + gap_s

    return ops


def bursty(on_s: float, off_s: float, power_w: float = 900.0) -> Program:
    """Work for a while, then none: the host loads data."""

    def ops(plant: Plant) -> Iterator[Op]:
        while True:
            begin = plant.at_s
            for _ in range(round(on_s / 0.0002)):
                yield Op(0.0002, power_w, ready_s=begin)
            yield Op(1e-6, 200.0, ready_s=plant.at_s + off_s)

    return ops


def uneven(heavy_w: float = 720.0, light_w: float = 330.0, busy_s: float = 0.02) -> Program:
    """Heavy and light work in turn, of lengths that differ, with a host that is late now and then: as MoE training."""

    def ops(plant: Plant) -> Iterator[Op]:
        rng = random.Random(5)
        host = plant.at_s
        while True:
            for power_w in (light_w, heavy_w):
                for _ in range(round(busy_s / 0.0002 * rng.uniform(0.5, 1.5))):
                    yield Op(0.0002, power_w * rng.uniform(0.9, 1.1), ready_s=host)
            late_s = 0.02 * rng.random() if rng.random() < 0.2 else 0.0
            host = max(host + 2 * busy_s, plant.at_s - 0.02) + late_s

    return ops


# Kernels of a layer's forward pass in microseconds, with the heavy ones' watts (h200/gpt2_train.kineto.json.gz); the
# others draw 450 W, so that all of it draws the 540 W that were measured.
_LAYER = (
    8, 12, (47, 720), 41, 41, (104, 640), (18, 720), 11, 8, 19, (57, 720), 24, 25, 25, 38, 23, 28, 24, 37,
    (51, 720), 12,
)  # fmt: skip
_HEAD = (6620, 560), (1168, 470), (1488, 470)  # the product with the vocabulary, and the loss
_HEAD_BACK = (1738, 470), (562, 450), (351, 450), (4496, 560), (4259, 560)


def gpt2_training(plant: Plant) -> Iterator[Op]:
    """Steps of GPT-2 small, eager, 8 x 1024: 45 ms, of which the head's kernels are half."""
    rng = random.Random(1)

    def op(us: float, power_w: float) -> Op:
        return Op(us * 1.02e-6 * rng.uniform(0.97, 1.03), power_w)

    layer = [k if isinstance(k, tuple) else (k, 450) for k in _LAYER]
    while True:
        yield from (op(*kernel) for _ in range(12) for kernel in layer)
        yield from (op(*kernel) for kernel in _HEAD + _HEAD_BACK)
        for us, power_w in reversed(layer * 12):
            heavy = power_w > 500
            yield from [op(0.9 * us, power_w)] * 2 + [op(12, 430)] if heavy else [op(1.5 * us, 430)]
        yield from (op(185, 480) for _ in range(9))  # the optimizer


def graphs(plant: Plant) -> Iterator[Op]:
    """Replays of 27 ms with a few microseconds between them: heavy and light kernels, some with long blocks."""
    rng = random.Random(2)
    kernels = [(rng.uniform(20e-6, 900e-6), rng.choice((420.0, 560.0, 760.0))) for _ in range(60)]
    while True:
        yield from (Op(s, w, block_s=s if s > 500e-6 else 0.0001) for s, w in kernels)
        yield Op(1e-6, 200.0, ready_s=plant.at_s + 6e-6)


TURN_S = 0.002  # how long a context of several runs at a time; not known of an H200
_QUANTUM_S = 0.00005


@dataclass
class Process:
    """One of those that share a plant; `waits` is its last wait's begin and the work before it."""

    left_s: float
    resume_s: float = 0.0
    waits: tuple[float, float] | None = None
    done: int = 0


class Shared(Plant):
    """A GPU of several processes without MPS: contexts take turns of about 2 ms, and one that waits keeps its turn.

    What a process times as its own work has the turns of the others in it, and its wait goes on during theirs.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._op = next(self.ops)
        self.processes = [Process(self._op.seconds) for _ in range(2)]
        self.turn_s = TURN_S
        self._turn, self._turn_ends_s = 0, TURN_S

    def _step(self) -> None:
        joules, at, end = 0.0, self.now_s, self.now_s + STEP_S
        while at < end - 1e-9:
            if at >= self._turn_ends_s:
                self._turn = (self._turn + 1) % len(self.processes)
                self._turn_ends_s = at + self.turn_s * self.rng.uniform(0.9, 1.1)
            for process in self.processes:
                if process.waits is not None and at >= self._until(*process.waits):
                    self._go_on(process, at)
            at += _QUANTUM_S
            joules += self._draw(self._run(self.processes[self._turn], at), at - _QUANTUM_S, at)
        self._account(joules / STEP_S)
        self.now_s = end

    def _go_on(self, process: Process, at: float) -> None:
        assert process.waits is not None
        began, busy = process.waits
        self.waited_s, self.worked_s = self.waited_s + at - began, self.worked_s + busy
        process.waits, process.resume_s = None, at
        self.points += 1

    def _run(self, process: Process, at: float) -> float:
        """One quantum of the process whose turn it is; the watts it draws."""
        if process.waits is not None:
            return self.idle_w
        assert self._op is not None
        process.left_s -= _QUANTUM_S * self._scale**SPEED
        if process.left_s <= 0:
            process.left_s += self._op.seconds
            process.done += 1
        if self.command.ratio > 0 and at - process.resume_s >= self.command.slice_s:
            process.waits = (at, at - process.resume_s)
            self.waits += 1
        return self.idle_w + (self._op.power_w - self.idle_w) * self._scale
