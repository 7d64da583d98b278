"""Memory of summary mode over a simulated day: a window of the trace a minute, 8 GPUs at 50 Hz, regions, counters.

    python benchmarks/measure/summary_24h.py [HOURS]

The clock and the windows are simulated (2 000 kernels and operators each, a few of them under names never seen
before); the aggregator, the power feed, the sampler and the run file are the real ones.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from memory_24h import GPUS, HZ, Day
from tessera.clock import Clock
from tessera.monitor.sampler import Sampler
from tessera.profile.power_feed import PowerFeed
from tessera.profile.runfile import RunFile, RunWriter
from tessera.timeline.columns import Builder

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result
from tessera.profile.summary_mode import RunSummary

ROWS, NAMES, STEPS_PER_S = 2_000, 300, 20


def window(number: int, start_ns: int, rng: np.random.Generator) -> Builder:
    """A window's rows; autotuning makes some names that never come again."""
    built = Builder()
    names = [f"kernel_{i}" for i in range(NAMES)] + [f"triton_{number}_{i}" for i in range(5)]
    for i, ns in enumerate(rng.integers(1_000, 100_000, ROWS).tolist()):
        kind = "kernel" if i % 2 else "op"
        built.add(kind, names[i % len(names)], start_ns + i * 1_000, start_ns + i * 1_000 + ns, device=0)
    return built


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    hours = float(sys.argv[1]) if len(sys.argv) > 1 else 24.0
    day, rng, summary = Day(), np.random.default_rng(0), RunSummary()
    sampler = Sampler([day], clock=Clock(lambda: day.now_ns, lambda: day.now_ns))
    sampler.read_due()
    marks, rows, done, t0 = [0.25, 1, 2, 4, 8, 12, 16, 20, 24, 48], {}, 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.tessera"
        with RunWriter(path, meta={"mode": "summary"}) as writer:
            feed = PowerFeed(writer, sampler, thin=True, clock=lambda: day.now_ns)
            print(f"{'simulated':>10s}  {'names':>6s}  {'resident':>11s}  {'file':>9s}")
            for hour in [m for m in marks if m <= hours]:
                while done < hour * 3600:
                    day.now_ns += 1_000_000_000
                    sampler.read_due()
                    feed.take()
                    for i in range(STEPS_PER_S):
                        summary.add_row("region", f"step_{done * STEPS_PER_S + i}", 50_000_000)
                    summary.add_counter("loss", 1.0 / (1 + done), "")
                    if done % 60 == 0:
                        summary.add_window(window(done, day.now_ns, rng).build(), day.now_ns, day.now_ns + 2_000_000)
                        writer.set("summary", summary.to_json())
                        writer.flush()
                    done += 1
                size = sum(f.stat().st_size for f in Path(folder).iterdir()) / 2**20
                print(f"{hour:8.2f} h  {len(summary):6d}  {resident_mib():7.1f} MiB  {size:5.1f} MiB", flush=True)
                rows[f"{hour:g}"] = resident_mib()
            feed.finish(day.now_ns - 1_000_000_000)
        with RunFile(path) as run:
            found = run.get("summary")
            joules, true_j = (
                run.power().energy_j,
                sum(s.mark(day.now_ns - 2 * 10**9).joules for s in sampler.series.values() if s.domain.counted),
            )
            regions = {r["name"]: r["calls"] for r in found["regions"]}
    first, last = rows["1" if "1" in rows else min(rows)], list(rows.values())[-1]
    print(
        f"{found['windows']} windows, {regions['step_N']:,} steps in {time.perf_counter() - t0:.0f} s; {last - first:+.1f} MiB since the first hour"
    )
    print(f"joules from the file {joules:.6g}, from the sampler {true_j:.6g}")
    if hours >= 24:
        out = Path(__file__).parents[1] / "results" / "summary_24h.json"
        write_result(out, {"resident_mib": rows, "windows": found["windows"], "gpus": GPUS, "hz": HZ})


if __name__ == "__main__":
    main()
