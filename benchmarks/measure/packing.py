"""What packing moderate jobs on fewer nodes saves against spreading them: joules and cooling, modelled.

    python benchmarks/measure/packing.py [--write]

Nothing is measured: nodes are DGX H200 by the catalogue's figures (host at the wall, idle and full GPUs, each with its
source), cooling is a published fit of a chilled-water plant, and the jobs are drawn from a seed. The table shows where
packing pays and where it does not: whether empty nodes sleep, what fans take, how much jobs on one node slow each other.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from tessera.dist.cluster import load_cluster
from tessera.fleet.node_floor import PlacementJob, PlacementNode
from tessera.fleet.packing import compare_packing

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

OUT = Path(__file__).parents[1] / "results" / "packing.json"
NODES, SEEDS = 32, 20
ASLEEP_W = 150.0
"""Assumed: a BMC, network cards and supplies of a server that is suspended."""
FANS_W = 1000.0
"""Assumed: the fans of an air-cooled 8-GPU server at full heat; nobody publishes them apart."""
SUPPLY_C = 20.0


def make_nodes(*, sleeps: bool, fans: bool) -> list[PlacementNode]:
    cluster = load_cluster("dgx-h200")
    gpu = cluster.device
    host_w, cpu_w = cluster.host_w.value, cluster.host_cpu_w.value
    idle_w = host_w + 8 * gpu.idle_w.value
    max_w = host_w + cpu_w + 8 * gpu.tdp_w.value
    return [
        PlacementNode(
            name=f"n{i:02d}", gpus=8, idle_w=idle_w, max_w=max_w, temperature_c=35.0 + i % 7,
            asleep_w=ASLEEP_W if sleeps else None, fan_max_w=FANS_W if fans else 0.0,
        )
        for i in range(NODES)
    ]  # fmt: skip


def make_jobs(load: float, seed: int) -> list[PlacementJob]:
    """Moderate jobs of 1 to 4 GPUs (150 to 300 W above idle each) until so much of the GPUs is asked for."""
    rng, jobs, left = random.Random(seed), [], load * NODES * 8
    while left >= 1:
        gpus = min(rng.choice((1, 1, 2, 2, 4)), int(left))
        power_w = gpus * rng.uniform(150.0, 300.0)
        jobs.append(
            PlacementJob(
                name=f"j{len(jobs)}", gpus=gpus, power_w=power_w, duration_s=rng.uniform(1800.0, 14400.0), moderate=True
            )
        )
        left -= gpus
    return jobs


CASES: dict[str, dict[str, Any]] = {
    "empty nodes sleep": {"sleeps": True, "fans": False, "slowdown": 0.0},
    "and fans follow the heat": {"sleeps": True, "fans": True, "slowdown": 0.0},
    "and each neighbour slows a job by 2%": {"sleeps": True, "fans": True, "slowdown": 0.02},
    "empty nodes cannot sleep": {"sleeps": False, "fans": True, "slowdown": 0.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write results/packing.json")
    arguments = parser.parse_args()
    rows = []
    for name, case in CASES.items():
        nodes = make_nodes(sleeps=case["sleeps"], fans=case["fans"])
        for load in (0.1, 0.3, 0.6):
            found = [
                compare_packing(nodes, make_jobs(load, seed), supply_c=SUPPLY_C, sharing_slowdown=case["slowdown"])
                for seed in range(SEEDS)
            ]
            saved, spread = sum(f.saved_j for f in found), sum(f.spread.total_j for f in found)
            cooling = sum(f.saved_cooling_j for f in found) / sum(f.spread.cooling_j for f in found)
            used = [sum(getattr(f, side).nodes_used for f in found) / SEEDS for side in ("packed", "spread")]
            rows.append({
                "case": name, "load": load, "saved_share": saved / spread, "saved_cooling_share": cooling,
                "saved_j": saved / SEEDS, "nodes_packed": used[0], "nodes_spread": used[1],
            })  # fmt: skip
            print(f"{name:>40}, {load:4.0%} of the GPUs: {saved / spread:+6.1%} joules, {cooling:+6.1%} cooling, "
                  f"{used[0]:.1f} nodes instead of {used[1]:.1f}")  # fmt: skip
    if arguments.write:
        write_result(OUT, {"basis": "modelled", "nodes": NODES, "seeds": SEEDS, "cop": found[0].cop, "rows": rows})
        print(f"wrote {OUT}")


if __name__ == "__main__":
    main()
