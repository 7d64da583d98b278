"""Put a power budget through a million random events: the limit, lost and doubled leases, jobs that starve.

    python benchmarks/measure/governor_storm.py [--events N] [--jobs N] [--seed N ...] [--load 0.45 ...] [--write FILE]

Messages are lost, late, doubled and reordered; daemons and the governor die and come back with what a store had; the
nodes' clocks run apart, and the governor's looks back. Time is simulated; the budget and the node's side are the real
code.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1]
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent / "tests")]
from result_file import write_result

from message_storm import MessageStorm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--seed", type=int, nargs="+", default=[2026])
    parser.add_argument("--load", type=float, nargs="+", default=[0.45], help="what jobs need, as a share of the limit")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    storms = [run_storm(args, seed, load) for load in args.load for seed in args.seed]
    if args.write:  # the first storm, and the others beside it
        write_result(args.write, {**storms[0], "others": storms[1:]})
    sys.exit(any(storm["problems"] for storm in storms))


def run_storm(args: argparse.Namespace, seed: int, load: float) -> dict[str, Any]:
    """One storm, printed. Above saturation it has a fifth of the jobs: those that wait ask again all the time."""
    part = 5 if load > 1 else 1
    storm = MessageStorm(nodes=args.nodes, jobs=args.jobs // part, events=args.events // part, seed=seed, load=load)
    started_s = time.process_time()
    result = storm.run()
    cpu_s = time.process_time() - started_s
    content = {
        "load": load,
        "events": result.events,
        "jobs": len(storm.jobs),
        "jobs_admitted": result.jobs_admitted,
        "jobs_ended": result.jobs_ended,
        "jobs_unfinished": sum(not job.done for job in storm.jobs.values()),
        "nodes": args.nodes,
        "simulated_s": result.sim_s,
        "highest_share_of_limit": result.highest_share,
        "longest_wait_s": result.longest_wait_s,
        "counts": dict(result.counts),
        "problems": result.problems[:20],
        "events_per_cpu_s": result.events / cpu_s,
        "seed": seed,
    }
    for name, value in content.items():
        print(f"{name:>24}  {value}", flush=True)
    return content


if __name__ == "__main__":
    main()
