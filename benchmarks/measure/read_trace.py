"""Reading a trace: events per second and peak memory, beside `json.load` of the same file in the same run.

Two files: a million synthetic events in Kineto's layout, and the recording of a GPT-2 training where it is present.
Each reader runs in a process of its own, so that its peak is its own; the best of some runs is given.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

BENCHMARKS = Path(__file__).resolve().parents[1]
RECORDING = BENCHMARKS.parents[1] / "shared" / "h200" / "gpt2_train.kineto.json.gz"
RUNS = 3

_CHILD = """
import gc, gzip, json, resource, sys, time
from tessera.timeline.kineto import read
from tessera.timeline.link import link
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
path, how = sys.argv[1:]
before = peak()
t0, c0 = time.perf_counter(), time.process_time()
if how == "json":
    with (gzip.open if path.endswith(".gz") else open)(path, "rb") as f:
        events = len(json.load(f)["traceEvents"])
    print(json.dumps({"s": time.perf_counter() - t0, "cpu_s": time.process_time() - c0, "peak_mib": peak() - before, "events": events}))
else:
    timeline = read(path)
    s, cpu_s, high = time.perf_counter() - t0, time.process_time() - c0, peak() - before
    t0 = time.perf_counter()
    link(timeline)
    columns = sum(c.nbytes for c in timeline.columns.values()) / 2**20
    print(json.dumps({"s": s, "cpu_s": cpu_s, "peak_mib": high, "rows": len(timeline), "columns_mib": columns,
                      "link_s": time.perf_counter() - t0}))
"""


def synthetic(path: Path, events: int) -> None:
    """Kineto's layout: per launch two nested operators, the call, the kernel and the two ends of an arrow."""
    with path.open("w") as f:
        f.write('{\n  "schemaVersion": 1,\n  "traceEvents": [\n')
        us = 3848228121637.309
        for i in range(events // 6):
            t = us + i * 20
            sep = "," if i + 1 < events // 6 else ""
            f.write(
                f'  {{\n    "ph": "X", "cat": "cpu_op", "name": "aten::linear", "pid": 398, "tid": 398,\n'
                f'    "ts": {t:.3f}, "dur": 18.500,\n    "args": {{\n      "External id": {2 * i + 1},"Record function id": 0, '
                f'"Sequence number": {i}, "Fwd thread id": 0, "Concrete Inputs": ["", "", ""], "Input type": '
                f'["c10::BFloat16", "c10::BFloat16", ""], "Input Strides": [[786432, 768, 1], [768, 1], []], '
                f'"Input Dims": [[8, 1024, 768], [{768 + i % 50}, 768], []], "Ev Idx": {2 * i}\n    }}\n  }},\n'
                f'  {{\n    "ph": "X", "cat": "cpu_op", "name": "aten::addmm", "pid": 398, "tid": 398,\n'
                f'    "ts": {t + 1:.3f}, "dur": 16.250,\n    "args": {{\n      "External id": {2 * i + 2},"Record function id": 0, '
                f'"Concrete Inputs": ["", ""], "Input type": ["c10::BFloat16", "c10::BFloat16"], "Input Strides": '
                f'[[768, 1], [768, 1]], "Input Dims": [[8192, 768], [{768 + i % 50}, 768]], "Ev Idx": {2 * i + 1}\n    }}\n  }},\n'
                f'  {{\n    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 398, "tid": 398,\n'
                f'    "ts": {t + 5:.3f}, "dur": 4.125,\n    "args": {{\n      "External id": {2 * i + 2}, "cbid": 211, '
                f'"correlation": {i + 1}\n    }}\n  }},\n'
                f'  {{\n    "ph": "s", "id": {i + 1}, "pid": 398, "tid": 398, "ts": {t + 5:.3f},\n'
                f'    "cat": "ac2g", "name": "ac2g"\n  }},\n'
                f'  {{\n    "ph": "X", "cat": "kernel", "name": "nvjet_hsh_{i % 40}_64x8_2x1_v_bz_coopB_TNT", "pid": 0, "tid": 7,\n'
                f'    "ts": {t + 9:.3f}, "dur": 7.648,\n    "args": {{\n      "External id": {2 * i + 2}, "queued": 0, "device": 0, '
                f'"context": 1,\n      "stream": 7, "correlation": {i + 1},\n      "registers per thread": 168,\n      '
                f'"shared memory": 214016,\n      "blocks per SM": 1.000000,\n      "warps per SM": 12.000000,\n      '
                f'"grid": [{i % 30 + 1}, 132, 1],\n      "block": [384, 1, 1],\n      "est. achieved occupancy %": 19\n    }}\n  }},\n'
                f'  {{\n    "ph": "f", "id": {i + 1}, "pid": 0, "tid": 7, "ts": {t + 9:.3f},\n'
                f'    "cat": "ac2g", "name": "ac2g", "bp": "e"\n  }}{sep}\n'
            )
        f.write('  ],\n  "baseTimeNanoseconds": 1790857026000000000,\n  "traceName": "trace.json"\n}\n')


def best(path: Path, how: str, runs: int) -> dict[str, float]:
    """The fastest of some runs."""
    found = []
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, str(path), how], check=True, capture_output=True, text=True
        )
        found.append(json.loads(done.stdout))
    return min(found, key=lambda r: r["s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--save", type=Path, help="write the figures to this JSON file")
    given = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "synthetic.json"
        synthetic(made, given.events)
        files = {"synthetic": made} | ({"gpt2_train": RECORDING} if RECORDING.exists() else {})
        for name, path in files.items():
            plain, ours = best(path, "json", 1), best(path, "tessera", RUNS)
            events = plain["events"]
            figures[name] = {
                "events": events, "events_per_s": events / ours["s"], "events_per_cpu_s": events / ours["cpu_s"],
                "json_events_per_s": events / plain["s"], "json_events_per_cpu_s": events / plain["cpu_s"],
                "peak_mib": ours["peak_mib"], "json_peak_mib": plain["peak_mib"], "columns_mib": ours["columns_mib"],
                "link_s": ours["link_s"], "rows": ours["rows"],
            }  # fmt: skip
            print(f"{name}: {events:,.0f} events, {path.stat().st_size / 2**20:.0f} MiB   (goal >= 400,000 events/s)")
            for label, run in (("json.load", plain), ("kineto.read", ours)):
                rate = f"{events / run['s']:9,.0f} events/s ({events / run['cpu_s']:9,.0f} per second of CPU)"
                print(f"  {label:12} {rate}   peak {run['peak_mib']:6,.0f} MiB")
            print(f"  columns {ours['columns_mib']:,.0f} MiB for {ours['rows']:,.0f} rows; link {ours['link_s']:.2f} s")
    if given.save:
        write_result(given.save, figures)


if __name__ == "__main__":
    main()
