"""How many servers run under one budget with the governor, against provisioning by nameplate, on recorded H200 traces.

    python benchmarks/measure/fleet_oversubscribe.py --waves /work/shared/h200

Simulated: servers of eight GPUs under one rack budget of 100 kW, of which 80% is given out. Every server plays a recorded
power trace (training of GPT-2, mixtures of kernels; 20 ms samples of one H200) from a place of its own; its eight GPUs play it
together. Servers are added until the governor's throttling costs more than 5% of the work, or the rack draws more than its
limit in any second. Nameplate: 10.2 kW of a DGX H200 (NVIDIA's user guide); beside it eight GPUs at their limit and the host.
The recordings are one GPU busy most of the time: servers with less to do leave more room.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path[0] = str(
    Path(__file__).parents[1]
)  # not this folder: numba imports `coverage`, and a script here has that name
from result_file import ROOT, write_result
from tessera.fleet.facility import Facility
from tessera.fleet.jobs import FleetJob
from tessera.fleet.scenario import Scenario
from tessera.fleet.simulator import simulate
from tessera.fleet.waves import Wave
from tessera.policy import parse_policies

CAP_W, MARGIN, NAMEPLATE_W, MOST_LOST = 100e3, 0.8, 10_200.0, 0.05
DATA = ROOT / "benchmarks" / "data"
POLCA = 0.30


def to_wave(times_s: Any, watts: Any, name: str) -> Wave:
    """A recording on the simulator's grid. It was made under a limit of 700 W already: its peaks are real."""
    seconds = np.asarray(times_s, dtype=float)
    seconds = seconds - seconds[0]
    count = round(float(seconds[-1]) / 0.005)
    grid = (np.arange(count) + 0.5) * seconds[-1] / count
    even = np.interp(grid, seconds, np.asarray(watts, dtype=float))
    return Wave(watts=even, compute=np.ones(count), period_s=float(seconds[-1]), source=name)


def read_waves(folder: Path) -> dict[str, Wave]:
    training = json.loads((folder / "gpt2_train.power.json").read_text())
    samples = np.array(training["samples_mw"], dtype=float)
    waves = {"GPT-2 training": to_wave(samples[:, 0] * 1e-6, samples[:, 1] * 1e-3, "gpt2_train.power.json")}
    for name in ("dev-1", "dev-11", "final-12", "pairs-2"):
        recording = json.loads(gzip.decompress((DATA / f"h200_mixture_{name}.json.gz").read_bytes()))
        samples = np.array(recording["samples"], dtype=float)
        waves[f"kernels {name}"] = to_wave(samples[:, 0] * 1e-9, samples[:, 1], f"h200_mixture_{name}")
    return waves


def run(waves: list[Wave], servers: int, governed: bool) -> dict[str, float]:
    policies: dict[str, Any] = {}
    if governed:
        policies["rack_power_governor"] = {"rack_cap_w": CAP_W, "soft_start": "5s", "breaker_margin": MARGIN}
    facility = Facility(rows=1, row_racks=1, rack_nodes=servers)
    jobs = tuple(
        FleetJob(name=f"server{i}", gpus=8, waves=(waves[i % len(waves)],), scatter=True, least_share=0.3)
        for i in range(servers)
    )
    scenario = Scenario(
        facility=facility, jobs=jobs, policies=parse_policies(policies), duration_s=60.0, judge_from_s=20.0
    )
    result = simulate(scenario, engine="numpy")
    steady = result.load_w[round(20.0 / result.step_s) :]
    per_s = steady.reshape(-1, 200).mean(axis=1)
    lost = [1.0 if job.start_s is None else job.lost_share or 0.0 for job in result.jobs]
    # The soft start costs each job some seconds once: what is judged is what throttling costs from then on.
    return {
        "servers": servers,
        "highest_w": float(per_s.max()),
        "mean_w": float(per_s.mean()),
        "lost": float(np.mean(lost)),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--waves", type=Path, required=True)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    waves = list(read_waves(args.waves).values())
    limit_w = CAP_W * MARGIN
    full_w = Facility(rows=1, row_racks=1, rack_nodes=1).node_limit_w
    by_plate, by_limit = int(limit_w // NAMEPLATE_W), int(limit_w // full_w)
    start = run(waves, by_plate, True)["lost"]  # nothing throttles here: the soft start alone
    rows, best = [], by_plate
    for servers in range(by_plate, 3 * by_plate):
        free, held = run(waves, servers, False), run(waves, servers, True)
        row = {**held, "throttling_lost": held["lost"] - start, "ungoverned_w": free["highest_w"]}
        row["holds"] = row["throttling_lost"] <= MOST_LOST and held["highest_w"] <= limit_w
        rows.append(row)
        print(
            f"{servers:3d} servers: highest second {held['highest_w'] / 1e3:6.1f} kW governed, {free['highest_w'] / 1e3:6.1f} "
            f"without (limit {limit_w / 1e3:.0f}); throttling costs {row['throttling_lost']:.1%} {'' if row['holds'] else '  no'}"
        )
        if not row["holds"]:
            break
        best = servers
    gain, gain_limit = best / by_plate - 1.0, best / by_limit - 1.0
    print(
        f"{best} servers instead of {by_plate} by nameplate ({gain:+.0%}), or of {by_limit} by the limits of their GPUs "
        f"({gain_limit:+.0%}); POLCA: +{POLCA:.0%} for inference"
    )
    if args.write:
        content = {"cap_w": CAP_W, "limit_w": limit_w, "by_nameplate": by_plate, "by_limits": by_limit, "servers": best}
        write_result(
            args.write, {**content, "gain": gain, "gain_over_limits": gain_limit, "polca": POLCA, "rows": rows}
        )


if __name__ == "__main__":
    main()
