"""Record mixtures of kernels with the power beside them, and each kernel alone in steady state as the truth.

    PYTHONPATH=src:.carry/site python benchmarks/device/record_mixture.py FOLDER SET [SET ...] [--seconds 5]

Per set: every load alone (0.4 s to settle, 1.2 s measured: joules per call), then `--seconds` of a random mixture under
torch.profiler: runs of 2-60 ms of one load, pauses of 2-60 ms after a quarter of them. Kernels (name, start, end, in
epoch ns), the driver's samples and the counter's ticks are kept. `benchmarks/measure/attribution.py` solves them. A set named
`regionsN` repeats a region of N ms 50 times between random other runs. No clock, limit or mode is changed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from tessera import monitor

Load = Callable[[], object]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def mm(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Load:
    a, b, out = randn(m, k, dtype=dtype), randn(k, n, dtype=dtype), torch.empty(m, n, device="cuda", dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


def attention(b: int, h: int, s: int, d: int, causal: bool) -> Load:
    q, k, v = (randn(b, h, s, d) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def copy(mib: int) -> Load:
    x = torch.randn(mib << 18, device="cuda")
    y = torch.empty_like(x)
    return lambda: y.copy_(x)


def conv(n: int, c: int, hw: int, size: int) -> Load:
    x, w = (t.to(memory_format=torch.channels_last) for t in (randn(n, c, hw, hw), randn(c, c, size, size)))
    return lambda: F.conv2d(x, w, padding=size // 2)


def on(fn: Callable[[torch.Tensor], object], *shape: int, dtype: torch.dtype = torch.bfloat16) -> Load:
    x = randn(*shape, dtype=dtype)
    return lambda: fn(x)


def tied(first: Load, second: Load) -> Load:
    def both() -> None:
        first()
        second()

    return both


def dev() -> dict[str, Load]:
    return {
        "gemm": mm(4096, 4096, 4096), "attention": attention(8, 16, 2048, 64, True), "copy": copy(256),
        "softmax": on(lambda x: x.softmax(-1), 16384, 4096), "conv": conv(64, 256, 28, 3),
    }  # fmt: skip


def more() -> dict[str, Load]:
    """Nine loads, of which some are alike in power."""
    return {
        "gemm.small": mm(2048, 2048, 1024), "gemm.tf32-off": mm(1024, 2048, 1024, torch.float32),
        "gelu": on(F.gelu, 1 << 26), "layer_norm": on(lambda x: F.layer_norm(x, (2048,)), 32768, 2048),
        "sum": on(lambda x: x.sum(-1), 32768, 4096), "attention": attention(4, 32, 1024, 128, False),
        "transpose": on(lambda x: x.t().contiguous(), 8192, 4096), "conv1x1": conv(256, 512, 14, 1),
        "fill": on(lambda x: x.zero_(), 1 << 26),
    }  # fmt: skip


def pairs() -> dict[str, Load]:
    """Two kernels always launched together, beside loads that are not."""
    return {
        "gemm+fill": tied(mm(2048, 2048, 4096), on(lambda x: x.zero_(), 1 << 24)),
        "softmax+copy": tied(on(lambda x: x.softmax(-1), 8192, 4096), copy(64)),
        "gemm": mm(4096, 2048, 4096), "silu": on(F.silu, 1 << 26),
    }  # fmt: skip


def final() -> dict[str, Load]:
    """Looked at once, after everything was fitted."""
    return {
        "gemm": mm(8192, 2048, 4096, torch.float16), "attention": attention(2, 32, 4096, 64, False), "copy": copy(512),
        "softmax": on(lambda x: x.softmax(-1), 8192, 8192, dtype=torch.float32), "conv": conv(32, 128, 56, 3),
        "rms_norm": on(lambda x: F.rms_norm(x, (4096,)), 16384, 4096),
    }  # fmt: skip


SETS = {"dev": dev, "more": more, "pairs": pairs, "final": final, "regions5": dev, "regions20": dev, "regions100": dev}


class Paced:
    """Launches with at most a few batches in flight, so that the host is never far ahead of the device."""

    def __init__(self, ahead: int = 4) -> None:
        self._events: deque[Any] = deque()
        self._ahead = ahead

    def run(self, fn: Load, times: int) -> None:
        for i in range(times):
            fn()
            if i % 4 == 3 or i == times - 1:
                event = torch.cuda.Event()
                event.record()
                self._events.append(event)
                if len(self._events) > self._ahead:
                    self._events.popleft().synchronize()

    def wait(self) -> None:
        torch.cuda.synchronize()
        self._events.clear()


def seconds_of(fn: Load) -> float:
    for _ in range(5):
        fn()
    torch.cuda.synchronize()
    t0 = time.perf_counter()
    for _ in range(20):
        fn()
    torch.cuda.synchronize()
    return (time.perf_counter() - t0) / 20


def steady(fn: Load, each_s: float, seconds: float) -> Callable[[], dict[str, float]]:
    """Run one load alone; what it took can be asked later, when the sensor has caught up by itself."""
    paced = Paced()
    paced.run(fn, max(1, round(0.4 / each_s)))
    calls = max(1, round(seconds / each_s))
    with monitor.energy_scope("steady") as scope:
        paced.run(fn, calls)
        paced.wait()
    return lambda: {"joules": scope.energy_j / calls, "error_j": scope.error_j / calls, "seconds": scope.time_s / calls,
            "watts": scope.power_w or 0.0, "calls": calls}  # fmt: skip


def bursts(fn: Load, each_s: float, seconds: float, rng: random.Random) -> Callable[[], dict[str, float]]:
    """The same load in runs of 2-60 ms with pauses that keep the mean near 600 W, as in a mixture.

    Under the board's limit for seconds on end its clock falls; in short runs it does not, and a call is faster and
    dearer. The pauses (140 W, the idle power the mixtures' own gaps show; +-10 W is 1% here) are taken off.
    """
    paced, calls, idle_s, end = Paced(), 0, 0.0, time.perf_counter() + seconds
    with monitor.energy_scope("bursts") as scope:
        while time.perf_counter() < end:
            length_s = 0.002 * 30 ** rng.random()
            count = max(1, round(length_s / each_s))
            paced.run(fn, count)
            paced.wait()
            t0 = time.perf_counter()
            time.sleep(0.6 * length_s)
            calls, idle_s = calls + count, idle_s + time.perf_counter() - t0
    return lambda: {"joules": (scope.energy_j - 140.0 * idle_s) / calls, "idle_s": idle_s, "calls": calls,
                    "watts": scope.power_w or 0.0}  # fmt: skip


def mixture(loads: dict[str, Load], each_s: dict[str, float], seconds: float, rng: random.Random) -> list[Any]:
    """Random runs; [load, calls, host epoch ns before, after] of each."""
    paced, runs, end = Paced(), [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        name = rng.choice(list(loads))
        length_s = 0.002 * 30 ** rng.random()
        calls = max(1, round(length_s / each_s[name]))
        t0 = time.time_ns()
        paced.run(loads[name], calls)
        runs.append([name, calls, t0, time.time_ns()])
        if rng.random() < 0.25:
            paced.wait()
            time.sleep(0.002 * 30 ** rng.random())
    paced.wait()
    return runs


def regions(loads: dict[str, Load], each_s: dict[str, float], length_s: float, rng: random.Random) -> list[Any]:
    """One region of a fixed mix, 50 times, with other runs and pauses between; region rows are named `region`."""
    paced, runs = Paced(), []
    mine, others = ("attention", "softmax"), ("gemm", "copy", "conv")
    calls = {name: max(1, round(0.5 * length_s / each_s[name])) for name in mine}
    for _ in range(50):
        paced.wait()
        t0 = time.time_ns()
        for name in mine:
            paced.run(loads[name], calls[name])
        paced.wait()
        runs.append(["region", 1, t0, time.time_ns()])
        other = rng.choice(others)
        paced.run(loads[other], max(1, round(0.002 * 20 ** rng.random() / each_s[other])))
        if rng.random() < 0.4:
            paced.wait()
            time.sleep(0.002 * 15 ** rng.random())
    paced.wait()
    runs.append(["calls", calls, 0, 0])
    return runs


def kernels_of(profiler: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        data = json.loads(path.read_bytes())
    base_ns = int(data.get("baseTimeNanoseconds", 0))
    names: dict[str, int] = {}
    rows = []
    for e in data["traceEvents"]:
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            args = e.get("args", {})
            key = "|".join([e["cat"], e["name"], str(args.get("grid")), str(args.get("block"))])
            start_ns = base_ns + round(e["ts"] * 1000)
            rows.append([names.setdefault(key, len(names)), start_ns, round(e["dur"] * 1000)])
    rows.sort(key=lambda r: r[1])
    first = rows[0][1]
    return {"names": list(names), "first_ns": first, "rows": [[n, s - first, d] for n, s, d in rows]}


def record(name: str, seconds: float, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    loads = SETS[name]()
    each_s = {n: seconds_of(fn) for n, fn in loads.items()}
    found: dict[str, Any] = {"set": name, "seed": seed, "each_s": each_s}
    alone = {n: steady(fn, each_s[n], 1.2) for n, fn in loads.items()}
    if name.startswith("regions"):
        length_s = float(name.removeprefix("regions")) * 1e-3
        calls = {n: max(1, round(0.5 * length_s / each_s[n])) for n in ("attention", "softmax")}

        def whole() -> None:
            for n, count in calls.items():
                for _ in range(count):
                    loads[n]()

        alone["region"] = steady(whole, sum(each_s[n] * c for n, c in calls.items()), 1.5)
    bursty = {n: bursts(fn, each_s[n], 1.5, rng) for n, fn in loads.items()}
    mixture(loads, each_s, 0.3, rng)
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profiler:
        time.sleep(0.2)
        with monitor.power_trace() as trace, monitor.energy_scope("mixture") as scope:
            if name.startswith("regions"):
                runs = regions(loads, each_s, float(name.removeprefix("regions")) * 1e-3, rng)
            else:
                runs = mixture(loads, each_s, seconds, rng)
            time.sleep(0.15)
    found["steady"] = {n: read() for n, read in alone.items()}
    found["bursts"] = {n: read() for n, read in bursty.items()}
    column = trace.columns["gpu0"]
    found["start_ns"], found["end_ns"] = trace.start_ns, trace.end_ns
    found["samples"] = [[int(t), float(w)] for t, w in zip(column.times_ns, column.watts, strict=True)]
    found["total"] = {"joules": scope.energy_j, "error_j": scope.error_j, "source": "scope"}
    found["runs"] = runs
    found["kernels"] = kernels_of(profiler)
    print(f"{name}: {len(found['kernels']['rows'])} kernels, {len(found['samples'])} samples, {scope.energy_j:.0f} J, "
          + ", ".join(f"{n} {s['watts']:.0f} W {s['seconds'] * 1e6:.0f} us" for n, s in found["steady"].items()), flush=True)  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", nargs="+", choices=list(SETS))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    meta = {"gpu": torch.cuda.get_device_name(), "torch": str(torch.__version__), "date": time.strftime("%Y-%m-%d")}
    for i, name in enumerate(args.sets):
        found = {**meta, **record(name, args.seconds, args.seed + i)}
        with gzip.open(args.out / f"{name}-{args.seed + i}.json.gz", "wt", compresslevel=5) as f:
            json.dump(found, f)


if __name__ == "__main__":
    main()
