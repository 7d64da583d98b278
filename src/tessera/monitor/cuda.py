"""When the GPU really did it: CUDA events placed on the host's monotonic clock.

Kernels run later than they are launched, so the edges of a scope are marked in the stream, by events, without
any synchronisation. Events carry no time of their own, only the (float32 millisecond) distance to another event.
The sampler's thread therefore keeps anchors: an event on a stream of its own whose host time it knows to some
tens of microseconds, renewed every `RENEW_NS` so that a float32 still resolves a microsecond.

    host     ──┬──────launch──────────────────┬────► monotonic ns
               anchor (record + synchronize)   anchor
    device   ──●───────────■■■ kernels ■■■─────●───►
               └─elapsed_time(anchor, edge)─┘
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections import deque
from typing import Any

# float32 has 24 bits: at 4 s (4000 ms) a step is 0.24 µs, far below the anchor's own ~20-50 µs.
RENEW_NS = 4_000_000_000
_ANCHOR_TRIES = 5
_KEPT_ANCHORS = 32
_POOL = 256
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, cuda.h


def cuda() -> Any | None:
    """`torch.cuda` if this process has initialised CUDA through torch; never imports or initialises anything."""
    torch = sys.modules.get("torch")
    module = getattr(torch, "cuda", None)
    if module is None or not getattr(module, "is_initialized", bool)():
        return None
    return module


class Edge:
    """One edge of a window: when the host was there and, once the device has passed it, when the device was."""

    __slots__ = ("device", "device_ns", "event", "host_ns")

    def __init__(self, host_ns: int, event: Any | None = None, device: int = 0) -> None:
        self.host_ns = host_ns
        self.event = event
        self.device = device
        self.device_ns: int | None = None

    def time_ns(self, on_device: bool) -> int:
        """The time for a GPU domain or for a host domain."""
        return self.device_ns if on_device and self.device_ns is not None else self.host_ns


class DeviceClocks:
    """Event pools and anchors of every CUDA device this process uses."""

    def __init__(self) -> None:
        self._pool: dict[int, list[Any]] = {}
        self._anchors: dict[int, deque[tuple[int, Any]]] = {}
        self._streams: dict[int, Any] = {}
        self._relaxed = False

    def edge(self) -> Edge:
        """Note the host's time and mark the current stream; a few microseconds, no synchronisation."""
        module = cuda()
        if module is None or module.is_current_stream_capturing():
            # An event recorded into a CUDA graph has no time of its own: the host's edge must do.
            return Edge(time.monotonic_ns())
        device = module.current_device()
        pool = self._pool.get(device)
        event = pool.pop() if pool else module.Event(enable_timing=True)
        event.record()
        return Edge(time.monotonic_ns(), event, device)

    def renew(self) -> None:
        """On the sampler's thread: renew anchors that have grown old, of the devices that have been used."""
        module = cuda()
        if module is None:
            return
        if not self._relaxed:
            self._relaxed = _relax_capture_mode()
        devices = set(self._pool) | set(self._anchors) | {module.current_device()}
        for device in devices:
            anchors = self._anchors.get(device)
            if not anchors or time.monotonic_ns() - anchors[-1][0] > RENEW_NS:
                self._anchor(module, device)

    def _anchor(self, module: Any, device: int) -> None:
        """Record events on an otherwise empty stream and keep the one with the shortest round trip."""
        if device not in self._streams:
            self._streams[device] = module.Stream(device=device)
        best: tuple[int, int, Any] | None = None
        with module.device(device):
            for _ in range(_ANCHOR_TRIES):
                event = module.Event(enable_timing=True)
                before = time.monotonic_ns()
                event.record(self._streams[device])
                event.synchronize()
                after = time.monotonic_ns()
                if best is None or after - before < best[0]:
                    best = (after - before, (before + after) // 2, event)
        if best is not None:
            self._anchors.setdefault(device, deque(maxlen=_KEPT_ANCHORS)).append((best[1], best[2]))

    def resolve(self, edge: Edge, wait: bool = False) -> bool:
        """Find the device's time of an edge; False while the device has not passed it yet."""
        event = edge.event
        if event is None:
            return True
        if wait:
            event.synchronize()
        elif not event.query():
            return False
        module = cuda()
        if module is None:
            return True
        if not self._anchors.get(edge.device):
            self._anchor(module, edge.device)
        host_ns, anchor = self._nearest(edge)
        edge.device_ns = host_ns + round(anchor.elapsed_time(event) * 1e6)
        edge.event = None
        pool = self._pool.setdefault(edge.device, [])
        if len(pool) < _POOL:
            pool.append(event)
        return True

    def _nearest(self, edge: Edge) -> tuple[int, Any]:
        """The last anchor before the edge was launched (the device passes it later), else the oldest kept."""
        anchors: deque[tuple[int, Any]] = self._anchors[edge.device]
        return next((a for a in reversed(anchors) if a[0] <= edge.host_ns), anchors[0])


def _relax_capture_mode() -> bool:
    """Keep this thread's event calls from invalidating a CUDA graph that another thread is capturing.

    `torch.cuda.graph` captures in global mode, in which event synchronisation on *any* thread is an error unless
    that thread has opted out (cuThreadExchangeStreamCaptureMode in the CUDA driver API).
    """
    try:
        mode = ctypes.c_int(_RELAXED)
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    except (OSError, AttributeError):
        return False
    return True
