"""What the sampler costs on this GPU, call by call, and the sensor's response learnt from a training run beside waves.

    PYTHONPATH=src:.carry/site python benchmarks/device/sensor_here.py RESULTS.json [--seconds 60] [--run RUN.tessera]

The sampler runs beside a GPT-2 small training under `profile.session(mode="kernels")`: CPU time of its thread by call of
NVML, and the share of a core. The trace and the samples of those seconds teach lag and blur (`attribute`); square waves of
a copy, of random lengths and with the host's marks, teach them on their own (`learn_sensor.learn_marks`). RESULTS.json
has the samples and marks of the waves, RUN.tessera those of the training.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pynvml
import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "measure"), str(Path(__file__).parents[1]), str(Path(__file__).parent)]
from cupti_light import make_training
from learn_sensor import learn_marks
from loads import Loads
from result_file import write_result
from tessera import profile
from tessera.attribute import solve
from tessera.errors import MeasurementError
from tessera.monitor import power_trace
from tessera.monitor.core import default

Costs = dict[str, list[float]]


def count_calls() -> Costs:
    """Calls of NVML by the sampler's thread from now on: how many, their CPU seconds, their wall seconds."""
    costs: Costs = collections.defaultdict(lambda: [0.0, 0.0, 0.0])

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            if threading.current_thread().name != "tessera-sampler":
                return call(*args)
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return call(*args)
            finally:
                for i, spent in enumerate((1.0, time.thread_time() - cpu, time.perf_counter() - wall)):
                    costs[name][i] += spent

        return counted

    for name in dir(pynvml):
        if name.startswith("nvml") and callable(getattr(pynvml, name)):
            setattr(pynvml, name, wrap(name, getattr(pynvml, name)))
    return costs


def measure_sampler(costs: Costs, seconds: float, work: Callable[[], None]) -> dict[str, Any]:
    """Share of a core that the sampler takes while `work` is called again and again."""
    sampler, rounds = default().sampler, 0

    def count_round() -> None:
        nonlocal rounds
        rounds += 1

    sampler.on_read(count_round)
    costs.clear()
    begin, cpu = time.monotonic(), sampler.cpu_time_s
    while time.monotonic() < begin + seconds:
        work()
    took = time.monotonic() - begin
    share = 100 * (sampler.cpu_time_s - cpu) / took
    calls = {n: {"per_s": c / took, "cpu_us": 1e6 * u / c, "wall_us": 1e6 * w / c} for n, (c, u, w) in costs.items()}
    print(f"sampler: {share:.3f}% of a core over {took:.0f} s, {rounds / took:.2f} rounds/s", flush=True)
    for name, call in sorted(calls.items(), key=lambda item: -item[1]["per_s"] * item[1]["cpu_us"]):
        print(
            f"  {name:<42}{call['per_s']:6.2f}/s  CPU {call['cpu_us']:8.1f} us  wall {call['wall_us']:8.1f} us",
            flush=True,
        )
    return {"share_pct": share, "rounds_per_s": rounds / took, "calls": calls}


def say_refusals() -> None:
    """Print why a run has taught nothing."""
    learn = solve.learn_response

    def told(*args: Any) -> Any:
        try:
            return learn(*args)
        except MeasurementError as exc:
            print(f"  refused: {exc.why}", flush=True)
            raise

    solve.learn_response = told


def learn_training(costs: Costs, seconds: float, path: Path) -> dict[str, Any]:
    step = make_training(12, 768, 12)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    rng = random.Random(1)

    def work() -> None:
        for _ in range(rng.randrange(2, 8)):
            step()
        torch.cuda.synchronize()
        time.sleep(rng.uniform(0.0, 0.06))  # as when data come late

    with profile.session(mode="kernels", path=path) as sess:
        time.sleep(3.0)  # the ticks of the counter are found
        cost = measure_sampler(costs, seconds, work)
    begin = time.monotonic()
    table = sess.energy()
    found = [describe(fit) for _, fit in table.learnt]
    print(f"learnt from the training ({time.monotonic() - begin:.1f} s): {found or 'nothing'}", flush=True)
    return {"sampler": cost, "learnt": found}


def describe(fit: Any) -> dict[str, float]:
    names = ("lag_s", "lag_error_s", "blur_s", "blur_error_s", "idle_w", "idle_error_w", "seconds")
    return {name: round(getattr(fit, name) or 0.0, 5) for name in names}


def learn_waves(seconds: float) -> dict[str, Any]:
    loads, rng, marks = Loads(), random.Random(2), []
    with power_trace() as trace:
        time.sleep(0.5)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            start = time.time_ns()
            loads.run("copy", rng.uniform(0.02, 0.15))
            marks.append((start, time.time_ns()))
            time.sleep(rng.uniform(0.02, 0.15))
    column = trace.columns["gpu0"]
    times_ns, watts = column.times_ns[column.known], column.watts[column.known]
    lags_s = np.arange(-0.3, 0.5, 0.005)
    on = [np.mean([_is_on(marks, t - round(lag * 1e9)) * w for t, w in zip(times_ns.tolist(), watts.tolist(), strict=True)]) for lag in lags_s]  # fmt: skip
    print(f"{len(times_ns)} samples of {watts.min():.0f} to {watts.max():.0f} W; most alike at a lag of "
          f"{1e3 * lags_s[int(np.argmax(on))]:.0f} ms", flush=True)  # fmt: skip
    fit = learn_marks(times_ns, watts, np.array(marks))
    found = [describe(fit)] if fit else []
    print(f"learnt from {len(marks)} waves of a copy: {found or 'nothing'}", flush=True)
    return {"learnt": found, "marks_ns": marks, "samples": list(zip(times_ns.tolist(), watts.tolist(), strict=True))}


def _is_on(marks: list[tuple[int, int]], time_ns: int) -> bool:
    return any(start <= time_ns < end for start, end in marks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--run", type=Path, default=Path(tempfile.mkdtemp()) / "run.tessera")
    args = parser.parse_args()
    costs = count_calls()
    say_refusals()
    print(f"domains: {[d.name for d in default().sampler.domains]}", flush=True)
    out: dict[str, Any] = {"waves": learn_waves(0.2 * args.seconds)}
    write_result(args.results, out)
    out["training"] = learn_training(costs, 0.6 * args.seconds, args.run)
    write_result(args.results, out)


if __name__ == "__main__":
    main()
