"""A sampler of the fake NVML without a thread: time passes, virtually, only when it reads."""

from __future__ import annotations

from collections.abc import Callable

from tessera.clock import Clock
from tessera.monitor.sampler import Sampler
from tessera.sensors.nvml import NvmlSensor

from .nvml import FakeNvml

STEP_S = 0.02


class Driven(Sampler):
    """Read by whoever waits for data, each time `STEP_S` of virtual time later. `run` lets some time pass."""

    def __init__(self, fake: FakeNvml) -> None:
        self._fake = fake
        clock = Clock(fake.monotonic_ns, fake.epoch_ns)
        sensor = NvmlSensor(environ={}, clock=clock)
        sensor.start()
        super().__init__([sensor], clock=clock)

    def read_due(self) -> float:
        self._fake.advance(STEP_S)
        return super().read_due()

    def run(self, seconds: float, beside: Callable[[], None] = lambda: None) -> None:
        """Read as the thread would for so long, and do something beside it each time."""
        end_ns = self._fake.monotonic_ns() + round(seconds * 1e9)
        while self._fake.monotonic_ns() < end_ns:
            self.read_due()
            beside()
