"""Monitors without a thread, on a clock that goes when it is told: the times of their windows are exact."""

from __future__ import annotations

import types

import pytest

from monitor.test_sampler import SimulatedClock
from tessera.monitor import Monitor, core, cuda

from fakes.sensor import ScriptSensor

MS = 1_000_000


class TimeByHand:
    """While it goes, the sensors of its monitors are read where they are due, and windows are settled."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.clock = SimulatedClock()
        self.monitors: list[Monitor] = []
        known = types.SimpleNamespace(monotonic_ns=self.clock, monotonic=self.seconds)
        for module in (cuda, core):
            patch.setattr(module, "time", known)

    def seconds(self) -> float:
        return self.clock.now_ns * 1e-9

    def monitor(self, *sensors: ScriptSensor) -> Monitor:
        for sensor in sensors:
            sensor.clock = self.clock
        self.monitors.append(Monitor(sensors))
        self.monitors[-1].sampler._clock = self.clock
        return self.monitors[-1]

    def go(self, ms: int) -> None:
        for _ in range(ms):
            for m in self.monitors:
                m.sampler.read_due()
                m._after_read()
            self.clock.now_ns += MS
