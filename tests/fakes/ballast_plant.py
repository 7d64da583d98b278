"""A GPU with a load that comes and goes, ballast that runs where the load does not, and an H200's late sensor."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tessera.runtime.ballast_control import BIN_S, BINS, BallastControl

STEP_S = 0.001
SLOW_S = 0.030
SAMPLE_S, FILTER_S, DELAY_S = 0.020, 0.011, 0.015  # tests/fakes/plant.py; the last with a tick of the loop


@dataclass
class BallastPlant:
    """`load` says the watts of the work at a time, None where it has none; ballast at level 1 adds `gain_w`.

    Right after the work it adds `slow` of that less: a chip that was slowed down to keep its limit speeds up in 30 ms.
    """

    load: Callable[[float], float | None]
    control: BallastControl
    low_w: float = 125.0
    gain_w: float = 500.0
    slow: float = 0.0
    noise_w: float = 0.0  # of a sample
    late_s: float = 0.0  # by how much samples are older than the control believes
    power_w: list[float] = field(default_factory=list)  # one for each step
    ballast_j: float = 0.0

    def run(self, seconds: float) -> None:
        """Let time pass; the control sees each sample once, late."""
        for late in self._samples(seconds):
            self.control.observe(*late)

    def _samples(self, seconds: float) -> Iterator[tuple[float, float, float, float | None]]:
        seen_w, before_w, worked, free_steps = self.low_w, self.low_w, 0.0, 0
        pending: list[tuple[int, tuple[float, float, float, float | None]]] = []
        every, chance = round(SAMPLE_S / STEP_S), random.Random(1)
        for i in range(len(self.power_w), len(self.power_w) + round(seconds / STEP_S)):
            work_w = self.load(i * STEP_S)
            free_steps = 0 if work_w is not None else free_steps + 1
            since_s = free_steps * STEP_S
            level = 0.0 if work_w is not None else self.control.levels[min(int(since_s / BIN_S + 1e-9), BINS - 1)]
            added_w = level * self.gain_w * (1.0 - self.slow * math.exp(-since_s / SLOW_S))
            power_w = work_w if work_w is not None else self.low_w + added_w
            self.power_w.append(power_w)
            self.ballast_j += added_w * STEP_S * (work_w is None)
            seen_w += (power_w - seen_w) * STEP_S / FILTER_S
            worked += level / every
            if (i + 1) % every == 0:  # what it shows is as old as its filter: the reader knows that
                middle_s = since_s - SAMPLE_S / 2 - FILTER_S + self.late_s
                shown_w = (before_w + seen_w) / 2 + chance.gauss(0.0, self.noise_w)
                reading = (shown_w, SAMPLE_S, worked, middle_s if middle_s >= 0 else None)
                pending.append((i + round(DELAY_S / STEP_S), reading))
                before_w, worked = seen_w, 0.0
            if pending and pending[0][0] <= i:
                yield pending.pop(0)[1]


def wave(high_w: float, period_s: float, duty: float) -> Callable[[float], float | None]:
    """Work at `high_w` for `duty` of each period."""
    return lambda at_s: high_w if at_s % period_s < duty * period_s else None
