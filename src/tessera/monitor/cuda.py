"""Places CUDA events on the host's monotonic clock: when the GPU really reached the edges of a scope.

Kernels run later than they are launched, so the edges of a scope are marked in the stream by events, without
synchronisation. An event has no time of its own, only a distance to another event (in float32 milliseconds). So the
sampler's thread keeps anchors: events on its own stream whose host time is known to some tens of microseconds. They are
renewed every `RENEW_NS`, so that a float32 still resolves a microsecond.

    host     ──┬──────launch──────────────────┬────► monotonic ns
               anchor (record + synchronize)   anchor
    device   ──●───────────■■■ kernels ■■■─────●───►
               └─elapsed_time(anchor, edge)─┘
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from ..sensors.processes import OwnCpuReading

# float32 has 24 bits: at 8 s (8000 ms) a step is 0.5 µs, far below the anchor's own error of ~20-50 µs.
RENEW_NS = 8_000_000_000
_ANCHOR_TRIES = 5
# A round trip took 24-136 µs on the H200 (benchmarks/fit/fit_response.py); half of one is the anchor's uncertainty.
_ROUND_TRIP_NS = 200_000
_SHORT_TRIP_NS = 50_000  # a shorter round trip is unlikely in another try
_POLL_NS = 300_000
_KEPT_ANCHORS = 32
_POOL = 8192
# Events are made in advance, since making one costs the user's thread more than taking one; only a few per round, so
# that the sampler's thread never holds the interpreter for long.
_READY = 1024
_FILL = 64
_KNOWN_STREAMS = 256
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, cuda.h


def cuda() -> Any | None:
    """Return `torch.cuda` if this process has initialised CUDA through torch; never imports or initialises anything."""
    torch = sys.modules.get("torch")
    module = getattr(torch, "cuda", None)
    if module is None or not getattr(module, "is_initialized", bool)():
        return None
    return module


class Edge:
    """One edge of a window: when the host was there and, once the device has passed it, when the device was."""

    __slots__ = ("cpu", "device", "device_ns", "event", "host_ns")

    def __init__(self, host_ns: int, event: Any | None = None, device: int = 0) -> None:
        self.host_ns = host_ns
        self.event = event
        self.device = device
        self.device_ns: int | None = None
        self.cpu: OwnCpuReading | None = None  # set if a domain is divided by this process's CPU time

    def time_ns(self, on_device: bool) -> int:
        """Return the time for a GPU domain or for a host domain."""
        return self.device_ns if on_device and self.device_ns is not None else self.host_ns

    def copy_resolved(self) -> Edge:
        """Return a copy with the times known by now; it does not ask the device again."""
        copy = Edge(self.host_ns, device=self.device)
        copy.device_ns, copy.cpu = self.device_ns, self.cpu
        return copy


class _CurrentStream:
    """Finds the current CUDA stream fast: torch's own look-up makes a new object each time."""

    __slots__ = ("_cuda", "by_key", "capturing", "key")

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda
        # torch.cuda itself calls these two; they have been in torch._C since 1.x (-1: the current device). Without
        # them the public functions do the same, but more slowly.
        self.capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
        self.key = getattr(torch._C, "_cuda_getCurrentStream", self._public_key)
        self.by_key: dict[Any, Any] = {}

    def _public_key(self, _device: int) -> tuple[Any, int]:
        """Return the current stream, which identifies itself, and its device, as the private look-up does."""
        return self._cuda.current_stream(), self._cuda.current_device()

    def look_up(self, key: Any) -> Any:
        """Return the current stream as an object, and remember it by its key."""
        if len(self.by_key) >= _KNOWN_STREAMS:
            self.by_key.clear()
        stream = self.by_key[key] = self._cuda.current_stream()
        return stream


class DeviceClocks:
    """Event pools and anchors of every CUDA device this process uses."""

    def __init__(self) -> None:
        self._streams: _CurrentStream | None = None
        self._pool: dict[int, list[Any]] = {}
        self._anchors: dict[int, deque[tuple[int, Any]]] = {}
        self._own: dict[int, Any] = {}
        self._relaxed = False
        self._lock = threading.Lock()

    def edge(self) -> Edge:
        """Note the host's time and mark the current stream; takes a few microseconds, without synchronisation."""
        streams = self._streams
        if streams is None:
            if cuda() is None:
                return Edge(time.monotonic_ns())
            streams = self._streams = _CurrentStream(sys.modules["torch"])
        try:  # all in one function, since this runs on the user's thread
            if streams.capturing():
                # An event recorded into a CUDA graph has no time of its own, so the host's edge must be enough.
                return Edge(time.monotonic_ns())
            key = streams.key(-1)
            device = key[1]
            stream = streams.by_key.get(key) or streams.look_up(key)
            pool = self._pool.get(device)
            event = pool.pop() if pool else self._new_event(device)
            event.record(stream)
        except (RuntimeError, IndexError):
            # The device has failed (the user gets that error elsewhere), or another thread took the last event of the
            # pool in this moment.
            return Edge(time.monotonic_ns())
        return Edge(time.monotonic_ns(), event, device)

    def _new_event(self, device: int) -> Any:
        self._pool.setdefault(device, [])
        return sys.modules["torch"].cuda.Event(enable_timing=True)

    def renew(self) -> None:
        """On the sampler's thread: renew old anchors and fill the pools, for devices that have been used."""
        module = cuda()
        if module is None:
            return
        if not self._relaxed:  # once is enough, since this thread is ours
            self._relaxed = _exchange_capture_mode(_RELAXED) is not None
        # A failed device must not end the sampler's thread: other sensors and the host's edges still work.
        with contextlib.suppress(RuntimeError):
            self._renew(module)

    def _renew(self, module: Any) -> None:
        # Only devices whose stream was marked: "the current device" on this thread would be device 0, and a context
        # there would cost memory and watts in every rank.
        for device in list(self._pool):
            anchors = self._anchors.get(device)
            if not anchors or time.monotonic_ns() - anchors[-1][0] > RENEW_NS:
                with self._lock:
                    self._anchor(module, device)
            self._fill(module, device)

    def _fill(self, module: Any, device: int) -> None:
        """Make events in advance; one that was recorded once costs the user's thread no creation."""
        pool = self._pool.setdefault(device, [])
        with module.device(device):
            for _ in range(min(_FILL, _READY - len(pool))):
                event = module.Event(enable_timing=True)
                event.record(self._own[device])
                pool.append(event)

    def _anchor(self, module: Any, device: int) -> None:
        """Record events on an otherwise empty stream and keep the one with the shortest round trip.

        The event is polled, not waited for: waiting gives up the interpreter, which a busy main thread then keeps for
        5 ms, and the anchor would be that late. An event that took long nevertheless (the thread was preempted, or the
        stream shares a hardware queue with the user's) is not kept, unless there is none yet.
        """
        if device not in self._own:
            self._own[device] = module.Stream(device=device)
        anchors = self._anchors.setdefault(device, deque(maxlen=_KEPT_ANCHORS))
        best: tuple[int, int, Any] | None = None
        with module.device(device):
            for _ in range(_ANCHOR_TRIES):
                event = module.Event(enable_timing=True)
                before = time.monotonic_ns()
                event.record(self._own[device])
                while not event.query() and time.monotonic_ns() - before < _POLL_NS:
                    pass
                event.synchronize()
                after = time.monotonic_ns()
                if best is None or after - before < best[0]:
                    best = (after - before, (before + after) // 2, event)
                if best[0] <= _SHORT_TRIP_NS:
                    break
        if best is not None and (best[0] <= _ROUND_TRIP_NS or not anchors):
            anchors.append((best[1], best[2]))

    def resolve(self, edge: Edge, wait: bool = False) -> bool:
        """Find the device's time of an edge; return False while the device has not passed it yet."""
        event = edge.event
        if event is None:
            return True
        try:
            if wait:
                with _relaxed_capture():
                    event.synchronize()
            elif not event.query():
                return False
            module = cuda()
            if module is not None:
                with self._lock:
                    self._place(module, edge)
        except RuntimeError:  # the device has failed: use the host's time of the edge
            edge.event = None
        return True

    def _place(self, module: Any, edge: Edge) -> None:
        """Find the time of a passed edge, and put its event back into the pool.

        The sampler's thread and a reader may both come here. The second one must not put the event back again, nor read
        a time from it that already belongs to another edge.
        """
        event = edge.event
        if event is None:
            return
        if not self._anchors.get(edge.device):
            self._anchor(module, edge.device)
        host_ns, anchor = self._nearest(edge)
        edge.device_ns = host_ns + round(anchor.elapsed_time(event) * 1e6)
        edge.event = None
        pool = self._pool.setdefault(edge.device, [])
        if len(pool) < _POOL:
            pool.append(event)

    def _nearest(self, edge: Edge) -> tuple[int, Any]:
        """Return the last anchor before the edge was launched (the device passes it later), else the oldest kept."""
        anchors: deque[tuple[int, Any]] = self._anchors[edge.device]
        return next((a for a in reversed(anchors) if a[0] <= edge.host_ns), anchors[0])


def _exchange_capture_mode(mode: int) -> int | None:
    """Set this thread's stream-capture mode and return the previous one; None if CUDA cannot be asked.

    `torch.cuda.graph` captures in global mode. In this mode, event synchronisation on *any* thread is an error, unless
    that thread has opted out (cuThreadExchangeStreamCaptureMode in the CUDA driver API).
    """
    value = ctypes.c_int(mode)
    try:
        status = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
    except (OSError, AttributeError):
        return None
    return value.value if status == 0 else None


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Keep this thread's event calls from breaking the capture of a CUDA graph on another thread."""
    before = _exchange_capture_mode(_RELAXED)
    try:
        yield
    finally:
        if before is not None:
            _exchange_capture_mode(before)
