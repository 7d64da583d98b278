"""Loads whose times are known, and the energy counter as the truth beside them. Used by the device benchmarks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pynvml
import torch


class Loads:
    """Kernels of a fraction of a millisecond each, so that a load can stop when the host says so."""

    def __init__(self) -> None:
        n = 4096
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        x = torch.randn(64 << 20, device="cuda")
        y = torch.empty_like(x)
        f = torch.randn(2048, 2048, device="cuda")
        fo = torch.empty_like(f)
        s = torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16)
        q, k, v = (torch.randn(8, 12, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        img = torch.randn(64, 64, 56, 56, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        w = torch.randn(64, 64, 3, 3, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        self.kinds: dict[str, Callable[[], object]] = {
            "gemm": lambda: torch.mm(a, b, out=out),
            "copy": lambda: y.copy_(x),
            "fp32": lambda: torch.mm(f, f, out=fo),
            "small": lambda: fo[:64].add_(1.0),
            "softmax": lambda: torch.softmax(s, -1),
            "attention": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
            "conv": lambda: torch.nn.functional.conv2d(img, w, padding=1),
        }
        for fn in self.kinds.values():
            fn()
        torch.cuda.synchronize()

    def run(self, kind: str, seconds: float, in_flight: int = 3, stop: threading.Event | None = None) -> int:
        """Keep the device busy for a while; the number of kernels. At most `in_flight` batches of two are queued."""
        fn, events, n = self.kinds[kind], deque[Any](), 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end and not (stop and stop.is_set()):
            fn()
            fn()
            n += 2
            ev = torch.cuda.Event()
            ev.record()
            events.append(ev)
            if len(events) >= in_flight:
                events.popleft().synchronize()
        torch.cuda.synchronize()
        return n

    def wave(self, kind: str, period_s: float, seconds: float) -> None:
        """A square wave of power."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.run(kind, period_s / 2)
            time.sleep(period_s / 2)


class CounterTruth:
    """Polls the energy counter densely on a thread, and dates its ticks afterwards: the ground truth.

    Written independently of tessera.sensors: the phase of the ticks is the one that violates no enclosure
    (a tick lies between the start of the last read of the old value and the end of the first read of the new).
    """

    PERIOD_NS = 100_000_000

    def __init__(self, index: int = 0) -> None:
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self._reads: list[tuple[int, int, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def _loop(self) -> None:
        while not self._stop.wait(0.004):
            t0 = time.monotonic_ns()
            value = pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
            self._reads.append((t0, time.monotonic_ns(), value))

    def __enter__(self) -> CounterTruth:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def ticks(self) -> list[tuple[int, float]]:
        """(monotonic ns, joules) of every tick that was enclosed."""
        changes = [(a[0], b[1], b[2]) for a, b in zip(self._reads, self._reads[1:], strict=False) if a[2] != b[2]]
        changes = [c for c in changes if c[1] - c[0] < 0.9 * self.PERIOD_NS]
        origin = changes[0][0]
        folded = [((lo - origin) % self.PERIOD_NS, hi - lo) for lo, hi, _ in changes]
        best, phase = -1, 0
        for candidate in range(0, self.PERIOD_NS, 250_000):
            inside = sum((candidate - lo) % self.PERIOD_NS <= width for lo, width in folded)
            if inside > best:
                best, phase, last = inside, candidate, candidate
            elif inside == best:
                last = candidate
        middle = (phase + last) // 2 if last - phase < self.PERIOD_NS // 2 else phase
        out = []
        for lo, hi, value in changes:
            tick = origin + middle + round(((lo + hi) / 2 - origin - middle) / self.PERIOD_NS) * self.PERIOD_NS
            out.append((tick, value * 1e-3))
        return out


def windows_between_ticks(
    ticks: list[tuple[int, float]], start_ns: int, end_ns: int, count: int
) -> list[tuple[int, int, float]]:
    """(start, end, joules) of all windows of `count` ticks within a span, with no tick missing."""
    inside = [t for t in ticks if start_ns <= t[0] <= end_ns]
    found = []
    for a, b in zip(inside, inside[count:], strict=False):
        if abs(b[0] - a[0] - count * CounterTruth.PERIOD_NS) < 1_000_000:
            found.append((a[0], b[0], b[1] - a[1]))
    return found
