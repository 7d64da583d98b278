"""The kernel of `runtime/pause_kernel.py`: whether it pauses a GPU, and what pausing costs the program.

    PYTHONPATH=src:.carry/site python benchmarks/device/pause_gpu.py RESULTS.json [--budget-s 110]

The device is paused half of the time while GEMMs run: eager, in a graph's replay, in two streams; and while a graph is
captured. Then pauses of no length, 470 a second, beside an eager decode and MoE training, in turns with none. No clock,
limit or mode is changed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics as st
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tessera import monitor
from tessera.runtime.pause_kernel import (
    LIMIT_NS,
    LONGEST_NS,
    ONE,
    POINTS,
    RATIO,
    PauseKernel,
)

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from cupti_light import make_decode, make_training
from result_file import write_result

PERIOD_S = 1 / 470
# "callback": libc's usleep between pauses, called by CUDA in our stream, without Python and its lock. A program that
# synchronises the device then waits for all of them, so it is not what the pacer does.
WAYS = ("python", "python, lock kept", "callback", "in stream")
USLEEP = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)


class Pausing:
    """Pauses on a thread of their own, in one of several ways."""

    def __init__(self, way: str, ratio: float, period_s: float = PERIOD_S) -> None:
        self.way, self.period_s = way, period_s
        self.kernel = PauseKernel(0)
        if way == "python, lock kept":
            self.kernel._cuda = ctypes.PyDLL("libcuda.so.1")
        if way == "in stream":  # one warp in the program's own stream, as a comparison
            self.kernel._stream = ctypes.c_void_p(0)
            self.kernel._grid = tuple(ctypes.c_uint(n) for n in (1, 1, 1, 1, 1, 1, 0))
            self.kernel._arguments[3].value = 1
        self.kernel.control[RATIO] = round(ratio * ONE)
        self.kernel.control[LONGEST_NS] = 250_000_000
        self.kernel.control[LIMIT_NS] = 50_000_000
        self.duty = 1 / (1 + ratio)
        self.launched = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.failed = ""

    def __enter__(self) -> Pausing:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        self.kernel.control[RATIO] = 0

    def _run(self) -> None:
        try:
            self.kernel.make_current()
            while not self._stop.is_set():
                if self.way == "callback":
                    if self.launched - self.kernel.stats[POINTS] < 12:
                        for _ in range(9):
                            microseconds = max(round(self.period_s * self.duty * 1e6) - 60, 1)
                            self.kernel._check("cuLaunchHostFunc", self.kernel._stream, USLEEP, microseconds)
                            self.kernel.launch()
                            self.launched += 1
                    time.sleep(0.01)
                    continue
                time.sleep(max(self.period_s - 0.00012, 0.0))
                if self.launched - self.kernel.stats[POINTS] < 4:
                    self.kernel.launch()
                    self.launched += 1
        except Exception as exc:  # noqa: BLE001
            self.failed = f"{type(exc).__name__}: {exc}"
            traceback.print_exc()

    def found(self, before: list[int], seconds: float) -> dict[str, Any]:
        points, waits, waited_ns, busy_ns = (b - a for a, b in zip(before, list(self.kernel.stats)[:4], strict=True))
        return {
            "pauses_per_s": points / seconds, "waits": waits, "waited_share": waited_ns * 1e-9 / seconds,
            "busy_share": busy_ns * 1e-9 / seconds, "failed": self.failed,
        }  # fmt: skip


def power_of(seconds: float, work: Callable[[], int]) -> dict[str, float]:
    """Units a second and watts, after the first 0.4 s."""
    with monitor.power_trace() as trace:
        begin, units = time.monotonic(), 0
        while time.monotonic() - begin < 0.4:
            work()
        torch.cuda.synchronize()
        t0 = time.monotonic()
        while time.monotonic() - t0 < seconds:
            units += work()
        torch.cuda.synchronize()
        t1 = time.monotonic()
        time.sleep(0.12)
    name = next(iter(monitor.default().sampler.counted_domains()))
    column = trace.columns[name]
    times = (column.times_ns - column.lag_ns - trace.to_epoch(0)) * 1e-9
    watts = [float(w) for t, w in zip(times, column.watts, strict=True) if t0 <= t <= t1 and w == w]
    return {"units_per_s": units / (t1 - t0), "mean_w": st.mean(watts) if watts else float("nan"), "samples": len(watts),
            "max_w": max(watts, default=float("nan"))}  # fmt: skip


def paused(way: str, ratio: float, work: Callable[[], int], seconds: float = 1.2, period_s: float = PERIOD_S) -> Any:
    with Pausing(way, ratio, period_s) as pausing:
        time.sleep(0.05)
        before, t0 = list(pausing.kernel.stats)[:4], time.monotonic()
        row = power_of(seconds, work)
        return row | pausing.found(before, time.monotonic() - t0)


def gemms(n: int, each: int, streams: int = 1) -> Callable[[], int]:
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    outs = [torch.empty_like(a) for _ in range(streams)]
    places = [torch.cuda.current_stream()] if streams == 1 else [torch.cuda.Stream() for _ in outs]
    pending: list[Any] = []

    def work() -> int:
        for place, out in zip(places, outs, strict=True):
            with torch.cuda.stream(place):
                for _ in range(each):
                    torch.mm(a, b, out=out)
                event = torch.cuda.Event()
                event.record()
                pending.append(event)
        while len(pending) > 3 * streams:
            pending.pop(0).synchronize()
        return each * streams

    return work


def replays(each: int) -> Callable[[], int]:
    inner = gemms(4096, each)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(each):
            torch.mm(a, a, out=out)
    del inner
    pending: list[Any] = []

    def work() -> int:
        graph.replay()
        event = torch.cuda.Event()
        event.record()
        pending.append(event)
        if len(pending) > 3:
            pending.pop(0).synchronize()
        return each

    return work


def captures(way: str) -> dict[str, Any]:
    """Graphs captured while pauses are launched: whether that fails, and whether the replays are what was captured."""
    x = torch.zeros(1024, device="cuda")
    errors, wrong, count = [], 0, 0
    with Pausing(way, 0.3) as pausing:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            count += 1
            graph = torch.cuda.CUDAGraph()
            try:
                x.zero_()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    for _ in range(300):
                        x.add_(1.0)
                for _ in range(3):
                    graph.replay()
                torch.cuda.synchronize()
                wrong += float(x[0]) != 900.0
            except Exception as exc:  # noqa: BLE001
                errors.append(f"{type(exc).__name__}: {exc}"[:200])
                break
        return {"captures": count, "wrong": wrong, "errors": errors, "failed": pausing.failed,
                "pauses": pausing.kernel.stats[POINTS]}  # fmt: skip


def setup_row() -> dict[str, float]:
    t0 = time.perf_counter()
    kernel = PauseKernel(0)
    t1 = time.perf_counter()
    kernel.make_current()
    kernel.control[LONGEST_NS] = kernel.control[LIMIT_NS] = 1_000_000
    kernel.launch()
    t2 = time.perf_counter()
    while kernel.stats[POINTS] < 1 and time.perf_counter() < t2 + 2:
        pass
    t3 = time.perf_counter()
    for _ in range(500):
        kernel.launch()
    t4 = time.perf_counter()
    while kernel.stats[POINTS] < 501 and time.perf_counter() < t4 + 2:
        pass
    t5 = time.perf_counter()
    return {"load_ms": (t1 - t0) * 1e3, "first_launch_ms": (t2 - t1) * 1e3, "first_done_ms": (t3 - t2) * 1e3,
            "launch_us": (t4 - t3) / 500 * 1e6, "kernel_us": (t5 - t3) / 500 * 1e6, "ran": kernel.stats[POINTS],
            "blocks": kernel.blocks}  # fmt: skip


class Sampling:
    """The sampler alone, asked fifty times a second as the loop of a cap asks it."""

    def __enter__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        sampler = monitor.default().sampler
        names = sampler.counted_domains()
        while not self._stop.wait(0.02):
            sampler.wait_for(time.monotonic_ns() - 30_000_000, timeout_s=0.1, names=names)


def cost(step: Callable[[], Any], steps: int, turns: int) -> dict[str, Any]:
    """Milliseconds of a step beside each way, over those without, in turns."""

    def timed() -> float:
        torch.cuda.synchronize()
        t0 = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - t0) / steps * 1e3

    for _ in range(5):
        step()
    ways: dict[str, Callable[[], Any]] = {w: (lambda w=w: Pausing(w, 0.0)) for w in WAYS}
    ways["callback, 940 a second"] = lambda: Pausing("callback", 0.0, PERIOD_S / 2)
    ways["sampling"] = Sampling
    ratios: dict[str, list[float]] = {w: [] for w in ways}
    plain = []
    for _ in range(turns):
        for way, make in ways.items():
            before = timed()
            with make():
                time.sleep(0.03)
                with_ms = timed()
            plain.append(before)
            ratios[way].append(with_ms / before)
    return {"plain_ms": st.median(plain), "plain_spread_pct": 100 * (max(plain) / min(plain) - 1)} | {
        f"{w} pct": [round(100 * (r - 1), 1) for r in each] for w, each in ratios.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget-s", type=float, default=110.0)
    args = parser.parse_args()
    end = time.monotonic() + args.budget_s
    rows: dict[str, Any] = {}

    def row(name: str, fn: Callable[[], Any], seconds: float = 2.5) -> None:
        if time.monotonic() + seconds > end:
            rows[name] = "no time"
        else:
            try:
                rows[name] = fn()
            except Exception as exc:  # noqa: BLE001
                traceback.print_exc()
                rows[name] = f"{type(exc).__name__}: {exc}"
        print(name, json.dumps(rows[name]), flush=True)
        write_result(args.out, rows)

    torch.zeros(1, device="cuda")
    row("setup", setup_row)

    def nothing() -> int:
        time.sleep(0.01)
        return 1

    row("idle", lambda: power_of(1.0, nothing))
    small = gemms(4096, 20)
    row("gemm free", lambda: power_of(1.2, small))
    for way in ("callback", "python", "in stream"):
        row(f"gemm 0.5 {way}", lambda way=way: paused(way, 1.0, small))
    row("gemm 0.25 callback", lambda: paused("callback", 3.0, small))
    row("gemm 0.25 in stream", lambda: paused("in stream", 3.0, small))
    row("empty, 0.05 callback", lambda: paused("callback", 19.0, nothing))
    row("empty, 0.05 in stream", lambda: paused("in stream", 19.0, nothing))
    for way in ("callback", "python"):
        row(f"capture {way}", lambda way=way: captures(way))
    long = gemms(8192, 4)
    row("gemm8192 free", lambda: power_of(1.0, long))
    row("gemm8192 0.5 callback", lambda: paused("callback", 1.0, long))
    graph = replays(100)
    row("graph free", lambda: power_of(1.0, graph))
    row("graph 0.5 callback", lambda: paused("callback", 1.0, graph))
    two = gemms(2048, 20, streams=2)
    row("two streams free", lambda: power_of(1.0, two))
    row("two streams 0.5 callback", lambda: paused("callback", 1.0, two))
    step = make_decode(graph=False)
    row("decode cost", lambda: cost(step, 12, 3), 20)
    step = make_training(12, 768, 12, moe_at=6)
    row("moe cost", lambda: cost(step, 20, 2), 20)


if __name__ == "__main__":
    main()
