"""A million kernels through the run file and out again: seconds and peak memory of each part, in its own process.

python benchmarks/measure/export_million.py [KERNELS]
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tessera.profile.export import Chrome, SummaryCsv
from tessera.profile.runfile import RunFile, RunWriter
from tessera.schema import Domain
from tessera.timeline.columns import Builder, Launch, Timeline

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

T0 = 1_790_000_000_000_000_000


def make_timeline(kernels: int) -> Timeline:
    """Kernels of 200 classes on 4 streams with 300 launch configurations, and a copy or collective now and then."""
    rng = np.random.default_rng(0)
    b = Builder()
    for i in range(200):
        b.intern(f"void cutlass::Kernel<cutlass_80_tensorop_bf16_s16816gemm_bf16_{i}x128_32x5_nn_align8>(Params)")
    for i in range(300):
        b.intern_launch(Launch(grid=(i + 1, 4, 1), block=(128, 1, 1), registers=i % 256, shared_bytes=1024 * (i % 100)))
    start = T0 + np.cumsum(rng.integers(1_000, 20_000, kernels))
    kind = rng.choice([0, 1, 3], kernels, p=[0.97, 0.02, 0.01])
    b.extend(
        {
            "kind": kind, "name": rng.integers(0, 200, kernels), "start_ns": start,
            "end_ns": start + rng.integers(800, 30_000, kernels), "device": np.zeros(kernels),
            "stream": rng.integers(7, 11, kernels), "correlation": np.arange(1, kernels + 1),
            "external": np.arange(kernels) // 2 + 1, "launch": rng.integers(0, 300, kernels),
            "bytes": np.where(kind == 0, -1, rng.integers(1, 1 << 30, kernels)),
        },
        kernels,
    )  # fmt: skip
    return b.build()


def measure(part: str, folder: Path, kernels: int) -> dict[str, float]:
    """One part, in this process: seconds, and how much the resident memory rose above what it was before."""
    path = folder / "million.tessera"
    timeline = make_timeline(kernels) if part == "write" else None
    before_mib = peak_mib()
    start = time.perf_counter()
    if part == "write":
        assert timeline is not None
        with RunWriter(path, meta={}) as run:
            run.add_timeline(timeline)
            handed_s = time.perf_counter() - start
            seconds = T0 + np.arange(0, 20) * 1_000_000_000
            run.add_samples(Domain(name="gpu0", source="benchmark", resolution_s=1.0), seconds, np.full(20, 500.0))
    else:
        with RunFile(path) as made:
            if part == "read":
                assert len(made.timeline()) == kernels
            elif part == "csv":
                SummaryCsv(folder / "summary.csv").write(made.recording())
            else:
                Chrome(folder / ("trace.json.gz" if part == "chrome_gz" else "trace.json")).write(made.recording())
    result = {"seconds": time.perf_counter() - start, "peak_mib": peak_mib(), "rise_mib": peak_mib() - before_mib}
    made_file = {"write": "million.tessera", "csv": "summary.csv", "chrome": "trace.json", "chrome_gz": "trace.json.gz"}
    if part in made_file:
        result["file_mb"] = (folder / made_file[part]).stat().st_size * 1e-6
    if part == "write":
        result["callers_thread_s"] = handed_s
    return result


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def row_cost_us() -> dict[str, float]:
    """What `add_row` costs the caller: its own CPU time and the wall clock, in bursts of 100 rows and at full speed.

    At full speed (hundreds of thousands of rows a second) the caller also waits for the writer to let go of the
    interpreter; a program that opens a region now and then does not.
    """
    with tempfile.TemporaryDirectory() as folder, RunWriter(Path(folder) / "rows.tessera", meta={}) as run:

        def rows(count: int) -> tuple[float, float]:
            start, cpu = time.perf_counter(), time.thread_time()
            for i in range(count):
                run.add_row("region", "forward", T0 + i, T0 + i + 1, thread=1)
            return (time.perf_counter() - start) / count * 1e6, (time.thread_time() - cpu) / count * 1e6

        bursts = []
        for _ in range(200):
            bursts.append(rows(100))
            time.sleep(0.005)
        wall_us, cpu_us = rows(200_000)
    found = np.array(bursts)
    return {
        "burst_wall_median": float(np.median(found[:, 0])), "burst_cpu_median": float(np.median(found[:, 1])),
        "full_speed_wall_mean": wall_us, "full_speed_cpu_mean": cpu_us,
    }  # fmt: skip


def main() -> None:
    if len(sys.argv) == 4:
        print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
        return
    kernels = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    parts: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in ("write", "read", "chrome", "chrome_gz", "csv"):
            # A process each: the peak of one must not hide that of the next.
            done = subprocess.run(
                [sys.executable, __file__, part, folder, str(kernels)], capture_output=True, check=True
            )
            parts[part] = json.loads(done.stdout)
            print(f"{part:10s} {parts[part]['seconds']:6.2f} s   peak {parts[part]['peak_mib']:5.0f} MiB"
                  f" (+{parts[part]['rise_mib']:.0f})   {parts[part].get('file_mb', 0):7.1f} MB")  # fmt: skip
    cost_us = row_cost_us()
    print("add_row    " + ", ".join(f"{name} {us:.2f} us" for name, us in cost_us.items()))
    result = {
        "kernels": kernels, "parts": parts, "add_row_us": cost_us,
        "machine": {
            "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "python": platform.python_version(),
            "load_average": os.getloadavg()[0],
        },
    }  # fmt: skip
    write_result(Path(__file__).parents[1] / "results" / "export_million.json", result)


if __name__ == "__main__":
    main()
