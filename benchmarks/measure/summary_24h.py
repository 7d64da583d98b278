"""Memory and file of a simulated day: summary mode, and light mode at 30,000 kernels a second.

    python benchmarks/measure/summary_24h.py [HOURS] [--light]

Summary mode: a window of the trace a minute, 8 GPUs at 50 Hz, regions, counters. The clock and the windows are simulated
(2 000 kernels and operators each, a few of them under names never seen before); the aggregator, the power feed, the
sampler and the run file are the real ones. Light mode: a fake collector's kernels of 250 names, a step every 50 ms, in
pieces of 0.8 s as CUPTI gives them; what keeps them in bounds and the run file are the real ones.
"""

from __future__ import annotations

import dataclasses
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
from tessera.record import CODE
from tessera.timeline.columns import Builder, Launch, Timeline

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result
from tessera.profile.summary_mode import RunSummary

ROWS, NAMES, STEPS_PER_S = 2_000, 300, 20
KERNELS_PER_S, PIECE_S = 30_000, 0.8


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


class Kernels:
    """A fake collector: a step of kernels, repeated; `take` gives those of the next 0.8 s."""

    def __init__(self, start_ns: int) -> None:
        rng = np.random.default_rng(0)
        built = Builder()
        count = round(PIECE_S * KERNELS_PER_S)
        launches = [built.intern_launch(Launch(grid=(i, 1, 1), block=(128, 1, 1))) for i in range(1, 401)]
        names = [built.intern(f"kernel_{i}") for i in range(250)]
        which = np.resize(rng.integers(0, 400, 1_500), count)  # a step of 1,500 launches
        length_ns = np.resize(rng.integers(2_000, 60_000, 1_500), count)
        period_ns = round(1e9 / KERNELS_PER_S)
        start = start_ns + np.arange(count) * period_ns
        columns = {
            "kind": np.full(count, CODE["kernel"]),
            "name": np.array(names)[which % len(names)],
            "launch": np.array(launches)[which],
            "device": np.zeros(count, np.int64),
            "stream": np.full(count, 7),
            "correlation": np.arange(count),
            "start_ns": start,
            "end_ns": start + np.minimum(length_ns, period_ns - 100),
        }
        built.extend(columns, count)
        self._piece, self._taken = built.build(), 0

    def take(self) -> Timeline:
        ahead_ns = round(self._taken * PIECE_S * 1e9)
        self._taken += 1
        moved = {c: self._piece.columns[c] + ahead_ns for c in ("start_ns", "end_ns")}
        return dataclasses.replace(self._piece, columns={**self._piece.columns, **moved})


def simulate_light(hours: float) -> None:
    """A day of kernels into a run file: what it takes in memory and on disk, and that no kernel is lost."""
    day_ns, t0 = 1_790_000_000_000_000_000, time.process_time()
    kernels, marks, rows = Kernels(day_ns), [0.05, 0.25, 1, 2, 4, 8, 12, 16, 20, 24], {}
    with tempfile.TemporaryDirectory() as folder:
        path, done = Path(folder) / "run.tessera", 0
        with RunWriter(path, meta={"mode": "light"}) as writer:
            print(f"{'simulated':>10s}  {'kernels':>14s}  {'resident':>11s}  {'file':>9s}")
            for hour in [m for m in marks if m <= hours]:
                while done * PIECE_S < hour * 3600:
                    writer.add_timeline(kernels.take(), may_shrink=True)
                    done += 1
                    if done % 8 == 0:
                        writer.flush()
                size = sum(f.stat().st_size for f in Path(folder).iterdir()) / 2**20
                count = round(done * PIECE_S * KERNELS_PER_S)
                print(f"{hour:8.2f} h  {count:14,d}  {resident_mib():7.1f} MiB  {size:5.1f} MiB", flush=True)
                rows[f"{hour:g}"] = {"resident_mib": resident_mib(), "file_mib": size, "kernels": count}
        used_s = time.process_time() - t0
        with RunFile(path) as run:
            found = rows_read = 0
            for chunk in run.chunks(["count"]):
                found += int(np.where(chunk["count"] < 0, 1, chunk["count"]).sum())
                rows_read += len(chunk)
    print(f"{found:,} kernels in {rows_read:,} rows; {1e6 * used_s / found:.2f} us of CPU time a kernel", flush=True)
    if found != count:
        sys.exit(f"{count - found:,} kernels are lost")
    if hours >= 24:
        out = Path(__file__).parents[1] / "results" / "light_24h.json"
        write_result(out, {"hours": rows, "rows": rows_read, "kernels": found, "us_per_kernel": 1e6 * used_s / found})


def main() -> None:
    given = [a for a in sys.argv[1:] if a != "--light"]
    hours = float(given[0]) if given else 24.0
    if "--light" in sys.argv:
        simulate_light(hours)
        return
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
