"""Accuracy and cost of measured energy on the GPU at hand, with Zeus beside it, in one run.

    PYTHONPATH=src:.carry/site python benchmarks/device/accuracy.py RESULTS.json [--zeus .carry/zeus]

Prints one table per goal. The true value is the energy counter at its ticks (`loads.CounterTruth`, written apart
from the package); where windows are shorter than the ticks, the mean power of a load that is not throttled.
No clock, limit or mode is changed.
"""

from __future__ import annotations

import argparse
import random
import statistics as st
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import torch

from loads import CounterTruth, Loads, windows_between_ticks
from tessera import monitor

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

COUNTER_LAG_NS = 9_000_000  # the counter at tick T holds the energy up to T - 9 ms (benchmarks/fit/fit_response.py)
results: dict[str, Any] = {}


def pct(errors: list[float]) -> dict[str, float]:
    """Median, 90th percentile and maximum of absolute relative errors, in percent."""
    absolute = sorted(abs(e) * 100 for e in errors)
    return {
        "median": st.median(absolute),
        "p90": absolute[int(0.9 * (len(absolute) - 1))],
        "max": absolute[-1],
        "n": len(absolute),
    }


def show(title: str, rows: dict[str, Any]) -> None:
    print(f"\n== {title}", flush=True)
    for name, row in rows.items():
        text = (
            "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
            if isinstance(row, dict)
            else row
        )
        print(f"  {name:34s} {text}", flush=True)
    results[title] = rows


class Busy:
    """A load on another thread, deep enough in flight that the device never waits for the host."""

    def __init__(self, loads: Loads, kind: str) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=loads.run, args=(kind, 600.0, 40, self._stop))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()


def zeus_monitor(folder: str | None) -> Any:
    """Zeus from a folder of its own; its one import from scikit-learn is replaced where that is missing."""
    if folder is None:
        return None
    sys.path.append(folder)
    try:
        import sklearn.metrics  # noqa: F401
    except ImportError:
        import types

        metrics = types.ModuleType("sklearn.metrics")
        metrics.auc = None  # type: ignore[attr-defined]
        sys.modules["sklearn"], sys.modules["sklearn.metrics"] = types.ModuleType("sklearn"), metrics
    from zeus.monitor import ZeusMonitor

    return ZeusMonitor(gpu_indices=[0])


def scope_cost(loads: Loads, zeus: Any) -> None:
    """Time on the user's thread of entering and leaving, while the device is busy."""
    rows: dict[str, Any] = {}
    for name, launches, pause_s in (
        ("back to back", 0, 0.0),
        ("launches between", 40, 0.0),
        ("asleep between", 6, 0.0012),
    ):
        times = []
        for _ in range(1200):
            for _ in range(launches):
                loads.kinds["small"]()
            if pause_s:
                time.sleep(pause_s)
            t0 = time.perf_counter_ns()
            with monitor.energy_scope("cost"):
                pass
            times.append((time.perf_counter_ns() - t0) / 1e3)
        torch.cuda.synchronize()
        time.sleep(1.5)
        times.sort()
        rows[f"tessera, {name}"] = {"median_us": st.median(times), "p99_us": times[int(0.99 * len(times))]}
    if zeus:
        times = []
        for i in range(40):
            t0 = time.perf_counter_ns()
            zeus.begin_window(f"w{i}", sync_execution=False)
            zeus.end_window(f"w{i}", sync_execution=False)
            times.append((time.perf_counter_ns() - t0) / 1e3)
        rows["zeus begin+end"] = {"median_us": st.median(times), "p99_us": max(times)}
        rows["ratio zeus / tessera"] = (
            rows["zeus begin+end"]["median_us"] / rows["tessera, launches between"]["median_us"]
        )
    show("scope cost on the user's thread", rows)


def steady(loads: Loads, zeus: Any, kind: str, windows: int = 16) -> None:
    """Windows of one length on a load that does not throttle; truth: its mean power by the counter."""
    rows: dict[str, Any] = {}
    with Busy(loads, kind):
        time.sleep(4.0)
        with CounterTruth() as truth:
            begin = time.monotonic_ns()
            found: dict[str, list[tuple[float, float]]] = {}
            for length in (0.05, 0.1, 0.2, 1.0):
                scopes = []
                for _ in range(windows):
                    with monitor.energy_scope(f"{kind}-{length}") as scope:
                        time.sleep(length)
                    scopes.append(scope)
                    time.sleep(0.013)
                found[f"tessera {length * 1e3:g} ms"] = [(s.energy_j, s.time_s) for s in scopes]
                inside = [s.energy for s in scopes]
                found[f"error {length * 1e3:g} ms"] = [(e.error_j, e.joules) for e in inside]
            end = time.monotonic_ns()
        if zeus:  # after the truth was taken: Zeus reads the counter itself
            for length in (0.05, 0.1, 0.2, 1.0):
                pairs = []
                for i in range(windows):
                    zeus.begin_window(f"z{length}-{i}", sync_execution=False)
                    time.sleep(length)
                    m = zeus.end_window(f"z{length}-{i}", sync_execution=False)
                    pairs.append((m.total_energy, m.time))
                    time.sleep(0.013)
                found[f"zeus {length * 1e3:g} ms"] = pairs
        inside_ticks = [t for t in truth.ticks() if begin <= t[0] <= end]
        watts = (inside_ticks[-1][1] - inside_ticks[0][1]) / ((inside_ticks[-1][0] - inside_ticks[0][0]) * 1e-9)
    rows["truth, W"] = watts
    for name, pairs in found.items():
        if name.startswith("error"):
            continue
        errors = [j / s / watts - 1 for j, s in pairs]
        rows[name] = pct(errors)
        if name.startswith("tessera"):
            half = found["error" + name.removeprefix("tessera")]
            rows[name]["within_90pct_interval"] = sum(
                abs(j - watts * s) <= h for (j, s), (h, _) in zip(pairs, half, strict=True)
            ) / len(pairs)
    show(f"steady load: {kind}", rows)


def against_ticks(
    trace: Any, ticks: list[tuple[int, float]], start_ns: int, end_ns: int, counts: tuple[int, ...]
) -> dict[str, Any]:
    """Unscaled trace against the counter, in all windows of so many ticks."""
    rows: dict[str, Any] = {}
    for count in counts:
        errors, covered = [], []
        for a, b, joules in windows_between_ticks(ticks, start_ns, end_ns, count):
            e = trace.energy("gpu0", *(trace.to_epoch(t - COUNTER_LAG_NS) for t in (a, b)))
            errors.append(e.joules / joules - 1)
            covered.append(abs(e.joules - joules) <= e.error_j)
        rows[f"{count * 100} ms"] = pct(errors) | {"within_90pct_interval": sum(covered) / len(covered)}
    return rows


def changing(loads: Loads) -> None:
    """Square waves, and the throttled GEMM whose power hunts around the limit: windows between counter ticks."""
    for name, job in (
        ("square wave 100 ms", lambda: loads.wave("gemm", 0.1, 8.0)),
        ("square wave 200 ms", lambda: loads.wave("gemm", 0.2, 8.0)),
        ("square wave 400 ms", lambda: loads.wave("gemm", 0.4, 8.0)),
        ("steady, power-capped GEMM", lambda: loads.run("gemm", 8.0)),
    ):
        with CounterTruth() as truth, monitor.power_trace() as trace:
            start = time.monotonic_ns()
            job()
            end = time.monotonic_ns()
            time.sleep(0.2)
        show(
            f"against the counter: {name}", against_ticks(trace, truth.ticks(), start + 300_000_000, end, (1, 2, 4, 10))
        )


def training() -> Callable[[float], None]:
    """A small transformer trained for so many seconds: bursts of kernels, gaps where the host is behind."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, 256, 512, device="cuda", dtype=torch.bfloat16)

    def run(seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()

    return run


def requests(loads: Loads, seconds: float) -> None:
    """Serving: bursts of 5-80 ms of one kernel or another, with random pauses."""
    rng = random.Random(5)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        loads.run(rng.choice(["gemm", "attention", "copy", "conv"]), rng.uniform(0.005, 0.08))
        time.sleep(rng.uniform(0.0, 0.06))


def integrals(title: str, jobs: dict[str, Callable[[], object]]) -> None:
    """The integral of the unscaled trace against the counter over at least 5 s."""
    rows: dict[str, Any] = {}
    for name, job in jobs.items():
        with CounterTruth() as truth, monitor.power_trace() as trace:
            start = time.monotonic_ns()
            job()
            end = time.monotonic_ns()
            time.sleep(0.12)
        inside = [t for t in truth.ticks() if start <= t[0] <= end]
        (a, ja), (b, jb) = inside[0], inside[-1]
        e = trace.energy("gpu0", *(trace.to_epoch(t - COUNTER_LAG_NS) for t in (a, b)))
        rows[name] = {
            "seconds": (b - a) * 1e-9,
            "counter_W": (jb - ja) / ((b - a) * 1e-9),
            "error_pct": 100 * (e.joules / (jb - ja) - 1),
        }
    rows["worst, %"] = max(abs(r["error_pct"]) for r in rows.values())
    show(title, rows)


def ten_workloads(loads: Loads) -> None:
    """Seven kernels, idling, training, serving; and square waves in step with the sensor, its worst case."""
    train = training()
    train(0.5)
    jobs: dict[str, Callable[[], object]] = {k: (lambda k=k: loads.run(k, 5.6)) for k in loads.kinds}
    jobs["idle with context"] = lambda: time.sleep(5.6)
    jobs["training"] = lambda: train(5.6)
    jobs["serving"] = lambda: requests(loads, 5.6)
    integrals("integral of the unscaled trace against the counter, >= 5 s", jobs)
    waves = {f"wave {p} s": (lambda p=p: loads.wave("gemm", p, 5.6)) for p in (0.1, 0.3)}
    integrals("the same on square waves in step with the 20 ms samples", waves)


def asynchronous(loads: Loads) -> None:
    """Edges in the stream: a scope around launches that return at once must see the device's time, not the host's."""
    fn = loads.kinds["gemm"]
    rows = {}
    watts = None
    for batch in (250, 1000):
        with monitor.energy_scope("async") as scope:
            for _ in range(batch):
                fn()
        rows[f"{batch} GEMMs, no sync"] = {
            "host_ms": scope.host_time_s * 1e3,
            "device_ms": scope.time_s * 1e3,
            "W": scope.power_w or 0.0,
        }
        watts = scope.power_w
    a = torch.cuda.CUDAGraph()
    monitor.default().clocks._anchors.clear()  # renew during the capture
    with torch.cuda.graph(a):
        for _ in range(20):
            with monitor.energy_scope("captured"):
                fn()
            time.sleep(0.06)
    a.replay()
    torch.cuda.synchronize()
    rows["CUDA graph captured while sampling"] = "ok"
    assert watts is not None
    show("edges in the stream", rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--zeus")
    args = parser.parse_args()
    pynvml.nvmlInit()
    loads = Loads()
    zeus = zeus_monitor(args.zeus)
    results["machine"] = {
        "gpu": torch.cuda.get_device_name(),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "torch": torch.__version__,
        "zeus": getattr(sys.modules.get("zeus"), "__version__", None),
    }
    monitor.default()
    time.sleep(1.5)
    scope_cost(loads, zeus)
    asynchronous(loads)
    steady(loads, zeus, "fp32")
    changing(loads)
    ten_workloads(loads)
    sampler = monitor.default().sampler
    results["sampler"] = {
        "cpu_s": sampler.cpu_time_s,
        "bytes": sampler.nbytes,
        "anchors": len(sampler.anchors["gpu0"]),
        "gaps": [g.reason for g in sampler.gaps],
    }
    print("\nsampler", results["sampler"])
    write_result(args.out, results)


if __name__ == "__main__":
    main()
