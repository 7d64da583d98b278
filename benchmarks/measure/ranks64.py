"""64 ranks of 40 MB each: read by several processes, clocks aligned by their collectives, who was late; time and memory.

The ranks are the recording of a GPT-2 training (one GPU) with all-reduces of 128 MiB put in: each rank with a clock of
its own (off by up to 50 ms), starts that scatter by 50 us, and one rank that always comes 500 us late. What is known is
compared with what is found. The files are gzip, as torch.profiler writes them when asked to.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

BENCHMARKS = Path(__file__).resolve().parents[1]
RECORDING = BENCHMARKS.parents[1] / "shared" / "h200" / "gpt2_train.kineto.json.gz"
LATE, LATE_US, SCATTER_US, END_US, LASTS_US = 17, 500.0, 50.0, 3.0, 2000.0
CLOCK_NS = 50_000_000

_CHILD = """
import json, resource, sys, time
from tessera import analyze
from tessera.profile.ranks.merge import merge
from tessera.record import ON_DEVICE
start = time.perf_counter()
source = merge(sys.argv[1], kinds=ON_DEVICE, workers=int(sys.argv[3]), collectives=False)
read_s = time.perf_counter() - start
found = analyze.collectives(source)
parts = analyze.overlap(source)
main, workers = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
json.dump({
    "read_s": read_s, "seconds": time.perf_counter() - start, "rows": len(source.timeline),
    "cpu_s": sum(u.ru_utime + u.ru_stime for u in (main, workers)), "main_mib": main.ru_maxrss / 1024,
    "worker_mib": workers.ru_maxrss / 1024, "collectives": len(found), "overlaps": len(parts),
    "offsets": [m["offset_ns"] for m in source.timeline.meta["ranks"]],
    "errors": [m["error_ns"] for m in source.timeline.meta["ranks"]],
    "skews": [r["skew_s"] for r in found.rows], "stragglers": [r["straggler"] for r in found.rows],
}, open(sys.argv[2], "w"))
"""


def pieces() -> tuple[str, list[str | float], str]:
    """The recording as text around the places where a collective's event goes (its time in us), with head and tail."""
    text = gzip.decompress(RECORDING.read_bytes()).decode()
    head, rest = text.split('"traceEvents": [', 1)
    at = [
        (m.start(), float(m[1]))
        for m in re.finditer(r'  \{\n    "ph": "X", "cat": "kernel".*?"ts": ([\d.]+)', rest, re.S)
    ]
    found: list[str | float] = []
    before = 0
    for place, us in at[100::200]:
        found += [rest[before:place], us]
        before = place
    body, tail = rest[before:].rsplit("]", 1)
    return head, [*found, body], tail


def event(us: float, lasts_us: float) -> str:
    return (
        '  {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", '
        f'"pid": 0, "tid": 20, "ts": {us:.3f}, "dur": {lasts_us:.3f}, "args": {{"device": 0, "stream": 20, "Collective name": '
        '"allreduce", "In msg nelems": 67108864, "Out msg nelems": 67108864, "dtype": "BFloat16", "Group size": 64, '
        '"Process Group Name": "0"}},\n'
    )


def write(folder: Path, ranks: int) -> tuple[list[int], list[float], int]:
    """The files; returns the clocks (ns), the skew of each collective (s), and the size of one file before packing."""
    head, parts, tail = pieces()
    rng = random.Random(64)
    clocks = [0] + [rng.randint(-CLOCK_NS, CLOCK_NS) for _ in range(ranks - 1)]
    times = [p for p in parts if isinstance(p, float)]
    late = [[rng.uniform(0, SCATTER_US) + (LATE_US if r == LATE else 0.0) for _ in times] for r in range(ranks)]
    size = 0
    for rank in range(ranks):
        own = iter(late[rank])
        body = "".join(
            p if isinstance(p, str) else event(p + (wait := next(own)), LASTS_US - wait + rng.uniform(0, END_US))
            for p in parts
        )
        base = re.sub(
            r'"baseTimeNanoseconds": (\d+)',
            lambda m, rank=rank: f'"baseTimeNanoseconds": {int(m[1]) + clocks[rank]}',
            head,
        )
        text = base.replace(
            '"displayTimeUnit"',
            f'"distributedInfo": {{"backend": "nccl", "rank": {rank}, "world_size": {ranks}}},\n"displayTimeUnit"',
        )
        data = (text + '"traceEvents": [' + body + "]" + tail).encode()
        size = len(data)
        (folder / f"rank{rank:02d}.json.gz").write_bytes(gzip.compress(data, 1))
    by_time = sorted(zip(times, zip(*late, strict=True), strict=True))  # kernels are not written in time order
    skews = [(max(own) - min(own)) * 1e-6 for _, own in by_time]
    return clocks, skews, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", type=Path, default=BENCHMARKS / "results" / "ranks64.json")
    given = parser.parse_args()
    if not RECORDING.exists():
        raise SystemExit(f"{RECORDING} is not here")
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name) / "ranks"
        folder.mkdir()
        clocks, skews, size = write(folder, given.ranks)
        out = Path(name) / "found.json"
        pid = os.spawnv(
            os.P_NOWAIT, sys.executable, [sys.executable, "-c", _CHILD, str(folder), str(out), str(given.workers)]
        )
        _, status = os.waitpid(pid, 0)
        if status:
            raise SystemExit(f"ended with status {status}")
        found: dict[str, Any] = json.loads(out.read_text())
    off = np.array([o + c for o, c in zip(found.pop("offsets"), clocks, strict=True)])
    errors = np.array(found.pop("errors"))
    apart = np.abs(np.array(found.pop("skews")) - np.array(skews)) * 1e6
    stragglers = found.pop("stragglers")
    figures = {
        "ranks": given.ranks, "megabytes_each": size * 1e-6, "workers": given.workers, **found,
        "clock_worst_us": float(np.abs(off).max()) * 1e-3, "clock_within_error": bool((np.abs(off) <= np.maximum(errors, 1)).all()),
        "skew_worst_us": float(apart.max()), "skew_true_us": [min(skews) * 1e6, max(skews) * 1e6],
        "straggler_found": sum(s == LATE for s in stragglers), "straggler_wrong": sum(s not in (LATE, None) for s in stragglers),
    }  # fmt: skip
    print(
        f"{given.ranks} ranks of {size * 1e-6:.0f} MB, {given.workers} processes: {found['seconds']:.1f} s, {found['cpu_s']:.1f} s of CPU"
    )
    print(
        f"  memory: {found['main_mib']:,.0f} MiB, and {found['worker_mib']:,.0f} MiB in each worker; {found['rows']:,} rows kept"
    )
    print(
        f"  clocks (off by up to {CLOCK_NS * 1e-6:.0f} ms) recovered to {figures['clock_worst_us']:.2f} us, within their error: {figures['clock_within_error']}"
    )
    print(
        f"  skew of {found['collectives']} collectives recovered to {figures['skew_worst_us']:.2f} us; rank {LATE} named {figures['straggler_found']} times, another {figures['straggler_wrong']}"
    )
    write_result(given.save, figures)


if __name__ == "__main__":
    main()
