"""A job of 512 GPUs that starts at once, and one that the rack governors start softly: its ramp and the time it loses.

    python benchmarks/measure/fleet_soft_start.py

Simulated: 16 racks of four nodes of eight H200, each rack with a budget (fleet/budget.py, the governor's own decisions), every
GPU by itself. The job computes at 650 W without pauses, so that the ramp is the start's. The limit of 20 kW/s within any
second is what 10 MW/s of a site of 256,000 GPUs leaves for 512.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(
    Path(__file__).parents[1]
)  # not this folder: numba imports `coverage`, and a script here has that name
from result_file import write_result
from tessera.fleet.facility import Facility
from tessera.fleet.jobs import FleetJob
from tessera.fleet.scenario import Scenario
from tessera.fleet.simulator import simulate
from tessera.fleet.waves import make_wave
from tessera.policy import parse_policies

GPUS, LIMIT_W_PER_S, DURATION_S = 512, 20e3, 180.0


def measure(soft_start_s: float | None) -> dict[str, Any]:
    wave = make_wave([("compute", 2.0, 650.0)], synchronous=True)
    policies: dict[str, Any] = {}
    if soft_start_s is not None:
        policies["rack_power_governor"] = {"rack_cap": "45kW", "soft_start": f"{soft_start_s}s", "breaker_margin": 0.8}
    job = FleetJob(name="train", gpus=GPUS, waves=(wave,), start_s=10.0)
    facility = Facility(rows=1, row_racks=16, rack_nodes=4)
    scenario = Scenario(facility=facility, jobs=(job,), policies=parse_policies(policies), duration_s=DURATION_S)
    result = simulate(scenario, distinct=True, engine="numba")
    done = result.jobs[0]
    lost_s = (DURATION_S - 10.0) - done.iterations * job.period_s
    row = {
        "soft_start_s": soft_start_s,
        "ramp_w_per_s": result.quality.ramp_up_w_per_s,
        "ramp_kw": result.quality.ramp_up_w_per_s / 1e3,
        "lost_s": lost_s,
        "state": done.state,
        "within": result.quality.ramp_up_w_per_s <= LIMIT_W_PER_S,
        "peak_w": result.quality.peak_w,
    }
    name = "at once" if soft_start_s is None else f"over {soft_start_s:g} s"
    print(
        f"{name:12s} ramp {row['ramp_w_per_s'] / 1e3:6.1f} kW/s (limit {LIMIT_W_PER_S / 1e3:.0f}), "
        f"{'inside' if row['within'] else 'outside'}; time lost {lost_s:5.1f} s"
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    rows = [measure(s) for s in (None, 30.0, 60.0, 120.0)]
    if args.write:
        write_result(args.write, {"gpus": GPUS, "limit_w_per_s": LIMIT_W_PER_S, "rows": rows})


if __name__ == "__main__":
    main()
