"""Sensors that talk to a network or run a program, kept from stalling the others.

The sampler reads everything on one thread, and NVML's ring holds 2.4 s: a BMC that takes 5 s to time out would
cost GPU samples. A slow sensor is therefore read on a thread of its own, and the sampler only collects.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from ..errors import SensorLost
from ..schema import Capability, Domain
from .base import Batch, Sensor

_KEPT_BATCHES = 256


class SlowSensor:
    """Wraps a sensor whose `read` may block: reads it in the background and hands over what has come."""

    def __init__(self, inner: Sensor) -> None:
        self.inner = inner
        self._batches: deque[Batch] = deque(maxlen=_KEPT_BATCHES)
        self._lost: SensorLost | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """The wrapped sensor's name."""
        return self.inner.name

    @property
    def period_s(self) -> float:
        """Collecting costs nothing: as often as the wrapped sensor has something new."""
        return self.inner.period_s

    def start(self) -> None:
        """Start the wrapped sensor (this may block) and the thread that reads it."""
        self.stop()
        self._stop = threading.Event()
        self._lost = None
        self.inner.start()
        self._thread = threading.Thread(target=self._run, args=(self._stop,), name=f"tessera-{self.name}", daemon=True)
        self._thread.start()

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            try:
                self._batches.append(self.inner.read())
            except SensorLost as exc:
                self._lost = exc
                return
            stop.wait(self.inner.period_s)

    def domains(self) -> Sequence[Domain]:
        return self.inner.domains()

    def capabilities(self) -> Sequence[Capability]:
        return self.inner.capabilities()

    def read(self) -> Batch:
        """What has come since the last read."""
        merged = Batch()
        while self._batches:
            batch = self._batches.popleft()
            for name, samples in batch.samples.items():
                merged.samples.setdefault(name, []).extend(samples)
            for name, ticks in batch.anchors.items():
                merged.anchors.setdefault(name, []).extend(ticks)
            merged.telemetry.extend(batch.telemetry)
            merged.gaps.extend(batch.gaps)
            merged.events.extend(batch.events)
        if self._lost is not None and not merged.samples:
            raise self._lost
        return merged

    def stop(self) -> None:
        """Ask the thread to end; one that hangs in a time-out ends after it, without us."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=0.2)
            self._thread = None
            self.inner.stop()
