"""Reads sensors that use the network or run a program on a thread of their own, so that they do not stall the others.

The sampler reads everything on one thread, and NVML's ring holds 2.4 s: a BMC that takes 5 s to time out would cost
GPU samples. So each slow sensor is read on its own thread, and the sampler only collects the batches. That thread also
starts the sensor, so a service that describes itself slowly or for ever delays nobody.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from ..errors import ArgumentError, SensorError, SensorLost
from ..schema import Capability, Domain
from .base import Batch, Sensor

_KEPT_BATCHES = 256
WAIT_S = 3.0
"""How long `start` waits for a sensor; a slower one is started in the background."""


class SlowSensor:
    """Wraps a sensor whose `read` may block: reads it in the background, and hands over what has come."""

    def __init__(self, inner: Sensor, *, wait_s: float = WAIT_S) -> None:
        self.inner = inner
        self._wait_s = wait_s
        self._ready = threading.Event()
        self._refusal: Exception | None = None
        self._batches: deque[Batch] = deque(maxlen=_KEPT_BATCHES)
        self._lost: SensorLost | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def period_s(self) -> float:
        """Return the wrapped sensor's period; collecting more often would give nothing new."""
        return self.inner.period_s

    def start(self) -> None:
        """Start the wrapped sensor, and the thread that reads it.

        The first call waits a moment, and raises the error that occurred by then. After a loss the sampler calls, which
        must not wait: the thread starts the sensor again, and `read` goes on raising the loss until it has succeeded.
        """
        if self._lost is not None and not self._stop.is_set():
            if self._thread is None or not self._thread.is_alive():
                self._spawn()
            return
        self.stop()
        if self._thread is not None:  # hangs in a time-out: two threads must not use one connection
            self._thread.join()
        self._lost = None
        self._batches.clear()
        thread = self._spawn()
        if self._ready.wait(self._wait_s) and self._refusal is not None:
            thread.join()
            self._thread = None
            raise self._refusal

    @property
    def pending(self) -> bool:
        """Return whether the sensor is still being started, and has no domains yet."""
        return not self._ready.is_set()

    def _spawn(self) -> threading.Thread:
        self._stop, self._ready, self._refusal = threading.Event(), threading.Event(), None
        self._thread = threading.Thread(
            target=self._run, args=(self._stop, self._ready), name=f"tessera-{self.name}", daemon=True
        )
        self._thread.start()
        return self._thread

    def _run(self, stop: threading.Event, ready: threading.Event) -> None:
        try:
            try:
                self.inner.start()
            except Exception as exc:
                self._refusal = exc
                raise
            self._lost = None
            ready.set()
            while not stop.is_set():
                self._batches.append(self.inner.read())
                stop.wait(self.inner.period_s)
        except SensorError as exc:
            self._lost = exc if isinstance(exc, SensorLost) else SensorLost(exc.what, why=exc.why, fix=exc.fix)
        except ArgumentError as exc:  # wrong settings, such as a CA file that cannot be read
            self._lost = SensorLost(exc.what, why=exc.why, fix=exc.fix)
        finally:
            ready.set()
            if stop.is_set():  # `stop` may not have waited for us
                self.inner.stop()

    def domains(self) -> Sequence[Domain]:
        return self.inner.domains()

    def capabilities(self) -> Sequence[Capability]:
        return self.inner.capabilities()

    def read(self) -> Batch:
        """Return what has come since the last read."""
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
        """Ask the thread to end. If it hangs in a time-out, it ends after that; this does not wait for it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=0.2)
        if self._thread is None or not self._thread.is_alive():
            self._thread = None
            self.inner.stop()
