"""How fast the simulator is: 100,000 GPUs in steps of 5 ms with decisions every 100 ms, alike and all distinct.

    python benchmarks/measure/fleet_speed.py

Times are of one processor (CPU seconds of one thread), so that a busy machine does not count; the memory is the process's
highest. Decisions: faults, starts, delays of ranks, temperatures of every GPU and rack, clocks; in the cohorts' run also
the jitter of eight replicas.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(
    Path(__file__).parents[1]
)  # not this folder: numba imports `coverage`, and a script here has that name
from result_file import write_result
from tessera.fleet.breakers import Breaker
from tessera.fleet.facility import Facility
from tessera.fleet.jobs import FleetJob
from tessera.fleet.scenario import Scenario
from tessera.fleet.simulator import Run
from tessera.fleet.waves import make_square
from tessera.policy import parse_policies

GPUS = 100_000


def make_scenario(duration_s: float, *, jitter: bool) -> Scenario:
    facility = Facility(
        rows=125,
        row_racks=25,
        rack_nodes=4,
        rack_breaker=Breaker(rating_a=80),
        row_breaker=Breaker(rating_a=2000),
    )
    wave = make_square(period_s=2.0, duty=0.75, high_w=650.0, low_w=200.0)
    job = FleetJob(name="train", gpus=GPUS, waves=(wave,), replicas=8)
    policies = parse_policies({"power_shaper": {"jitter": ["1ms", "5ms"]}} if jitter else {})
    return Scenario(facility=facility, jobs=(job,), duration_s=duration_s, policies=policies)


def measure(engine: str, *, distinct: bool, duration_s: float, jitter: bool = False) -> dict[str, Any]:
    warm = Run(make_scenario(0.5, jitter=jitter), distinct=distinct, engine=engine)
    warm.finish()  # numba compiles, or reads what it compiled before
    run = Run(make_scenario(duration_s, jitter=jitter), distinct=distinct, engine=engine)
    cpu_s, wall_s = time.thread_time(), time.perf_counter()
    result = run.finish()
    cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {
        "engine": engine,
        "distinct": distinct,
        "classes": result.classes["gpus"],
        "simulated_s": duration_s,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "speed": duration_s / cpu_s,
        "speed_by_wall": duration_s / wall_s,
        "memory_bytes": memory,
        "mean_w": result.quality.mean_w,
    }
    kind = "all distinct" if distinct else f"{found['classes']} classes"
    print(
        f"{engine:5s} {kind:13s} {duration_s:5g} s in {cpu_s:6.2f} CPU s: {found['speed']:7.1f} times real time "
        f"({found['speed_by_wall']:.1f} by the wall clock of this machine), {memory / 2**20:.0f} MiB"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0, help="simulated, all distinct")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    rows = [
        measure("numba", distinct=False, duration_s=30 * args.seconds, jitter=True),
        measure("numba", distinct=True, duration_s=args.seconds),
        measure("numpy", distinct=False, duration_s=3 * args.seconds),
        measure("numpy", distinct=True, duration_s=0.3 * args.seconds),
    ]
    print("goal: alike >= 100 times real time, all distinct >= 12, on two cores")
    if args.write:
        write_result(args.write, {"gpus": GPUS, "step_s": 0.005, "decide_s": 0.1, "rows": rows})


if __name__ == "__main__":
    main()
