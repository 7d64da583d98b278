"""Reads sensors that use the network or run a program on a thread of their own, so that they do not stall the others.

The sampler reads everything on one thread, and NVML's ring holds 2.4 s: a BMC that takes 5 s to time out would cost
GPU samples. A slow sensor is therefore read on a thread of its own, and the sampler only collects the batches.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from ..errors import SensorError, SensorLost
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
        """Start the wrapped sensor, and the thread that reads it.

        The first time this may block, and raises what is wrong. After a loss it is the sampler that calls, and must
        not wait: the thread starts the sensor again, and `read` goes on raising the loss until it has.
        """
        if self._lost is not None and not self._stop.is_set():
            if self._thread is None or not self._thread.is_alive():
                self._spawn(again=True)
            return
        self.stop()
        if self._thread is not None:  # hangs in a time-out: two threads must not use one connection
            self._thread.join()
        self._lost = None
        self._batches.clear()
        self.inner.start()
        self._spawn(again=False)

    def _spawn(self, *, again: bool) -> None:
        self._stop = threading.Event()
        arguments = (self._stop, again)
        self._thread = threading.Thread(target=self._run, args=arguments, name=f"tessera-{self.name}", daemon=True)
        self._thread.start()

    def _run(self, stop: threading.Event, again: bool) -> None:
        try:
            if again:
                self.inner.start()
                self._lost = None
            while not stop.is_set():
                self._batches.append(self.inner.read())
                stop.wait(self.inner.period_s)
        except SensorError as exc:
            self._lost = exc if isinstance(exc, SensorLost) else SensorLost(exc.what, why=exc.why, fix=exc.fix)
        finally:
            if stop.is_set():  # `stop` may not have waited for us
                self.inner.stop()

    def domains(self) -> Sequence[Domain]:
        return self.inner.domains()

    def capabilities(self) -> Sequence[Capability]:
        return self.inner.capabilities()

    def read(self) -> Batch:
        """What has come since the last read."""
        merged = Batch()
        came = False
        while self._batches:
            batch, came = self._batches.popleft(), True
            for name, samples in batch.samples.items():
                merged.samples.setdefault(name, []).extend(samples)
            for name, ticks in batch.anchors.items():
                merged.anchors.setdefault(name, []).extend(ticks)
            merged.telemetry.extend(batch.telemetry)
            merged.gaps.extend(batch.gaps)
            merged.events.extend(batch.events)
        if not came:
            self._raise_loss()
        return merged

    def _raise_loss(self) -> None:
        ended = self._thread is not None and not self._thread.is_alive() and not self._stop.is_set()
        if ended and self._lost is None:
            self._lost = SensorLost(
                f"the thread that reads {self.name} has ended", why="an error it did not expect", fix="see stderr"
            )
        if self._lost is not None:  # a new one each time: raising one object again and again makes it grow
            raise SensorLost(self._lost.what, why=self._lost.why, fix=self._lost.fix) from self._lost

    def stop(self) -> None:
        """Ask the thread to end; one that hangs in a time-out ends after it, without us."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=0.2)
        if self._thread is None or not self._thread.is_alive():
            self._thread = None
            self.inner.stop()
