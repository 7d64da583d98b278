"""The host in front of the plant: it launches steps ahead and puts points among them by the real cadence.

And two processes on one plant, whose contexts take turns.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tessera.runtime.launches import Cadence, Countdown

from .plant import SPEED, STEP_S, Op, Plant, PlantPacer


class Queue(PlantPacer):
    """A point that is launched stands in the queue, and runs when its turn comes."""

    def point(self, *, restart: bool = False, tokens: int | None = None) -> None:
        pass


class Host:
    """PointPlacer steps ahead of the plant and counts them down to points, as the launch mode does (launches.py)."""

    def __init__(self, plant: Plant, step: Callable[[Host], list[Op]], *, ahead: int = 3) -> None:
        self.cadence, self._countdown, self._step, self._ahead = Cadence(Queue(plant)), Countdown(), step, ahead
        self.rng = random.Random(1)
        plant.ops = self._ops()

    def launched(self, queue: list[Op], op: Op, worth: int = 1) -> int:
        """One more in the queue; if a point follows, how many launches it stands for."""
        queue.append(op)
        op.point = False
        self._countdown.left -= worth
        if self._countdown.left > 0:
            return 0
        op.point = True
        return self._countdown.end(self.cadence)

    def mirror(self, queue: list[Op], launches: int) -> None:
        """A point in the backward pass, for one of the forward pass."""
        if launches:
            queue[-1].point = True
            self.cadence.point(launches)

    def _ops(self) -> Iterator[Op]:
        queued = deque(self._step(self) for _ in range(self._ahead))
        while True:
            yield from queued.popleft()
            queued.append(self._step(self))


def gemm_step(host: Host, seconds: float = 0.000171, power_w: float = 976.0) -> list[Op]:
    """A hundred products of 4096 a side, as the H200 ran them between waits on 2026-11-15: 118 W + 858 W x duty."""
    queue: list[Op] = []
    for _ in range(100):
        host.launched(queue, Op(seconds, power_w), worth=5)
    return queue


# Kernels of a layer's forward pass in microseconds, with the heavy ones' watts (h200/gpt2_train.kineto.json.gz); the
# others draw 450 W, so that all of it draws the 540 W that were measured.
_LAYER = (
    8, 12, (47, 720), 41, 41, (104, 640), (18, 720), 11, 8, 19, (57, 720), 24, 25, 25, 38, 23, 28, 24, 37,
    (51, 720), 12,
)  # fmt: skip
_HEAD = (6620, 560), (1168, 470), (1488, 470)  # the product with the vocabulary, and the loss
_HEAD_BACK = ((1738, 470), (562, 450), (351, 450)), (), ((4496, 560), (4259, 560))


def gpt2_step(host: Host) -> list[Op]:
    """A training step of GPT-2 small, eager, 8 x 1024: 45 ms, of which the head's kernels are half."""
    queue: list[Op] = []
    points: list[int] = []

    def op(us: float, power_w: float) -> Op:
        return Op(us * 1.02e-6 * host.rng.uniform(0.97, 1.03), power_w, point=False)

    layer = [k if isinstance(k, tuple) else (k, 450) for k in _LAYER]
    for _ in range(12):
        for i, (us, power_w) in enumerate(layer):
            points.append(host.launched(queue, op(us, power_w), worth=6 if 10 <= i <= 18 else 2))
    head = [host.launched(queue, op(us, power_w), worth=98) for us, power_w in _HEAD]
    for launches, kernels in zip(reversed(head), _HEAD_BACK, strict=True):
        host.mirror(queue, launches)
        queue += [op(us, power_w) for us, power_w in kernels]
    for i in reversed(range(len(points))):
        host.mirror(queue, points[i])
        us, power_w = layer[i % len(layer)]
        heavy = power_w > 500
        queue += [op(0.9 * us, power_w)] * 2 + [op(12, 430)] if heavy else [op(1.5 * us, 430)]
    for _ in range(9):  # the optimizer
        host.launched(queue, op(185, 480), worth=148)
    return queue


TURN_S = 0.002  # how long a context of several runs at a time; not known of an H200
_QUANTUM_S = 0.00005


@dataclass
class Process:
    """One of those that share a plant; `waits` is its last wait's begin and the work before it."""

    every: int
    left_s: float
    since: int = 0
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
        self.processes = [Process(self.every, self._op.seconds) for _ in range(2)]
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
            process.done, process.since = process.done + 1, process.since + 1
            if process.since >= process.every:
                process.since = 0
                self._point(process, at)
        return self.idle_w + (self._op.power_w - self.idle_w) * self._scale

    def _point(self, process: Process, at: float) -> None:
        if at - process.resume_s >= self.command.slice_s:
            process.waits = (at, at - process.resume_s)
            self.waits += 1
        else:
            self.points += 1
