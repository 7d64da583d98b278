"""A sensor that plays a script."""

from __future__ import annotations

import math
from collections.abc import Callable

from tessera.schema import Capability, Domain
from tessera.sensors.base import Batch


class ScriptSensor:
    """A sensor whose power is a function of (monotonic) time: one sample every `step_ms` up to now."""

    name = "script"

    def __init__(
        self,
        power_w: Callable[[float], float] = lambda t: 100.0,
        *,
        clock: Callable[[], int],
        step_ms: float = 20.0,
        period_s: float = 0.05,
        domain: Domain | None = None,
        anchors: bool = False,
    ) -> None:
        self.power_w = power_w
        self.clock = clock
        self.step_ns = round(step_ms * 1e6)
        self.period_s = period_s
        self._domain = domain or Domain(name="gpu0", source="script", resolution_s=step_ms * 1e-3)
        self._next_ns: int | None = None
        self.fail: Exception | None = None
        self.reads = 0
        self.anchors = anchors

    def start(self) -> None:
        if self.fail:
            raise self.fail
        self._next_ns = None

    def domains(self) -> list[Domain]:
        return [self._domain]

    def capabilities(self) -> list[Capability]:
        return []

    def read(self) -> Batch:
        self.reads += 1
        if self.fail:
            raise self.fail
        batch = Batch()
        now = self.clock()
        if self._next_ns is None:
            self._next_ns = now - now % self.step_ns
        while self._next_ns <= now:
            power = self.power_w(self._next_ns * 1e-9)
            batch.add(self._domain.name, self._next_ns, power if power else math.nan)
            self._next_ns += self.step_ns
        return batch

    def stop(self) -> None:
        pass
