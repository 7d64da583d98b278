"""A GPU with a load that comes and goes, ballast that runs where the load does not, and an H200's late sensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tessera.runtime.ballast_control import BallastControl

STEP_S = 0.001
SAMPLE_S, FILTER_S, DELAY_S = 0.020, 0.011, 0.015  # tests/fakes/plant.py; the last with a tick of the loop


@dataclass
class BallastPlant:
    """`load` says the watts of the work at a time, None where it has none; ballast at level 1 adds `gain_w`."""

    load: Callable[[float], float | None]
    control: BallastControl
    low_w: float = 125.0
    gain_w: float = 500.0
    power_w: list[float] = field(default_factory=list)  # one for each step
    ballast_j: float = 0.0

    def run(self, seconds: float) -> None:
        """Let time pass; the control sees each sample once, late."""
        for late in self._samples(seconds):
            self.control.observe(*late)

    def _samples(self, seconds: float) -> Iterator[tuple[float, float, float]]:
        seen_w, worked = self.low_w, 0.0
        pending: list[tuple[int, tuple[float, float, float]]] = []
        every = round(SAMPLE_S / STEP_S)
        for i in range(len(self.power_w), len(self.power_w) + round(seconds / STEP_S)):
            work_w = self.load(i * STEP_S)
            level = 0.0 if work_w is not None else self.control.level
            power_w = work_w if work_w is not None else self.low_w + level * self.gain_w
            self.power_w.append(power_w)
            self.ballast_j += level * self.gain_w * STEP_S
            seen_w += (power_w - seen_w) * STEP_S / FILTER_S
            worked += level / every
            if (i + 1) % every == 0:
                pending.append((i + round(DELAY_S / STEP_S), (seen_w, SAMPLE_S, worked)))
                worked = 0.0
            if pending and pending[0][0] <= i:
                yield pending.pop(0)[1]


def wave(high_w: float, period_s: float, duty: float) -> Callable[[float], float | None]:
    """Work at `high_w` for `duty` of each period."""
    return lambda at_s: high_w if at_s % period_s < duty * period_s else None
