"""A sensor over a device whose work is a sleep: what runs in real time can be tested without a device."""

from __future__ import annotations

import threading
import time

from tessera.schema import Capability, Domain
from tessera.sensors.base import Batch


class BusySensor:
    """100 W, and 800 W more for the share of time in which `working` is on: a device whose work is a sleep.

    `clock` is the device's own, in seconds. A device that is paused stops it: the sleep goes on, the work does not.
    """

    name, period_s = "busy", 0.02

    def __init__(self, domain="cpu0", clock=time.monotonic, scope="machine"):
        self._clock = clock
        self._domain = Domain(name=domain, source="busy", resolution_s=0.02, label="a sleep", scope=scope)
        self._lock, self._since, self._busy_s, self.dead = threading.Lock(), None, 0.0, False
        self._last = (0.0, 0.0)

    def work(self, seconds):
        with self._lock:
            self._since = self._clock()
        time.sleep(seconds)
        with self._lock:
            self._busy_s += self._clock() - self._since
            self._since = None

    @property
    def worked_s(self):
        return self._busy_s

    def start(self):
        self._last = (time.monotonic(), self._busy_s)

    def domains(self):
        return [self._domain]

    def capabilities(self):
        return [Capability(name="busy", available=True)]

    def read(self):
        batch = Batch()
        with self._lock:
            now = time.monotonic()
            busy = self._busy_s + (self._clock() - self._since if self._since else 0.0)
        then, was = self._last
        if now - then >= 0.018 and not self.dead:
            batch.add(self._domain.name, round(now * 1e9), 100.0 + 800.0 * (busy - was) / (now - then))
            self._last = (now, busy)
        return batch

    def stop(self):
        pass
