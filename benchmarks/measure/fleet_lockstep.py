"""A training job in lockstep on 100,000 GPUs (650/200 W, 2 s, 75% duty): what each mitigation does to the feed, and its cost.

    python benchmarks/measure/fleet_lockstep.py

Simulated. Swing: highest less lowest over the mean, once steady. Band: root mean square of the swing within 0.1-20 Hz over
the mean; beside it the share of the swing's energy that lies in the band. Ramp: the largest change within a second.
Joules: of the feed for each iteration, against no mitigation. Lost: iterations against no mitigation.
Goal: swing <= 10%, band <= 20%, joules <= +5%.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(
    Path(__file__).parents[1]
)  # not this folder: numba imports `coverage`, and a script here has that name
from result_file import write_result
from tessera.fleet.facility import Facility, GpuKind
from tessera.fleet.jobs import FleetJob, copy_job
from tessera.fleet.scenario import Scenario
from tessera.fleet.simulation import Simulation
from tessera.fleet.simulator import simulate
from tessera.fleet.supplies import Battery, Feed
from tessera.fleet.waves import make_square
from tessera.policy import parse_policies

GPUS = 100_000
SWING, BAND, JOULES = 0.10, 0.20, 0.05
WAVE = make_square(period_s=2.0, duty=0.75, high_w=650.0, low_w=200.0)
FACILITY = Facility(rows=125, row_racks=25, rack_nodes=4)
JOB = FleetJob(name="train", gpus=GPUS, waves=(WAVE,), replicas=8)


def make(
    shaper: dict[str, Any] | None = None,
    *,
    jobs: int = 1,
    offset: str | None = None,
    gpu: GpuKind | None = None,
    storage: Battery | None = None,
) -> Scenario:
    one = dataclasses.replace(JOB, gpus=GPUS // jobs, replicas=8 if GPUS // jobs % 8 == 0 else 1)
    facility = dataclasses.replace(FACILITY, gpu=gpu or FACILITY.gpu, feed=Feed(storage=storage))
    return Scenario(
        facility=facility,
        jobs=tuple(copy_job(one, jobs, offset)),
        policies=parse_policies({"power_shaper": shaper} if shaper else {}),
        duration_s=240.0 if storage else 60.0,
        judge_from_s=180.0 if storage else 20.0,
    )


def store(joules_per_gpu: float, smoothing_s: float) -> Battery:
    """Storage of so many joules for each GPU, strong enough for the whole swing."""
    return Battery(power_w=60e6, energy_j=joules_per_gpu * GPUS, smoothing_s=smoothing_s)


CAPPED = GpuKind(limit_w=560.0)
SMOOTH = GpuKind(smooth_floor_w=500.0, smooth_up_w_per_s=1000.0, smooth_down_w_per_s=300.0)
CASES: dict[str, Scenario] = {
    "none": make(),
    "jitter 1-5 ms": make({"jitter": ["1ms", "5ms"]}),
    "jitter 0-500 ms": make({"jitter": ["0ms", "500ms"]}),
    "phase shift within the job": make({"phase_shift": {"dp_groups": "auto"}}),
    "4 independent jobs, not shifted": make(jobs=4),
    "4 independent jobs, shifted": make(jobs=4, offset="auto"),
    "5 independent jobs, shifted": make(jobs=5, offset="auto"),
    "floor 400 W": make({"power_floor": "400W"}),
    "floor 500 W": make({"power_floor": "500W"}),
    "floor 600 W": make({"power_floor": "600W"}),
    "ramp 200 W/s": make({"max_ramp": "200W/s"}),
    "cap 560 W": make(gpu=CAPPED),
    "cap 560 W, floor 500 W": make({"power_floor": "500W"}, gpu=CAPPED),
    "smoothing of the board: floor 500 W, ramps": make(gpu=SMOOTH),
    "storage 100 J/GPU": make(storage=store(100.0, 5.0)),
    "storage 200 J/GPU": make(storage=store(200.0, 5.0)),
    "storage 1 kJ/GPU": make(storage=store(1000.0, 10.0)),
    "floor 300 W, storage 200 J/GPU": make({"power_floor": "300W"}, storage=store(200.0, 3.0)),
    "5 jobs shifted, storage 50 J/GPU": make(jobs=5, offset="auto", storage=store(50.0, 2.0)),
}


def summarize(name: str, result: Simulation, base: dict[str, Any] | None) -> dict[str, Any]:
    q = result.quality
    work = sum(job.iterations * job.gpus for job in result.jobs) / GPUS / result.duration_s * WAVE.period_s
    each_j = result.energy_j / result.duration_s / work
    row = {
        "case": name,
        "swing": q.range_share,
        "swing_w": q.range_w,
        "band": q.band_share,
        "band_of_swing": q.band_of_swing,
        "ramp_w_per_s": max(q.ramp_up_w_per_s, q.ramp_down_w_per_s)
        if name == "none" or base is None
        else _steady_ramp(result),
        "crest_factor": q.crest_factor,
        "mean_w": q.mean_w,
        "joules": 0.0 if base is None else each_j / base["each_j"] - 1.0,
        "lost": 1.0 - work if base is None else 1.0 - work / base["work"],
        "each_j": each_j,
        "work": work,
    }
    row["ramp_mw_per_s"] = row["ramp_w_per_s"] / 1e6
    row["met"] = row["swing"] <= SWING and row["band"] <= BAND and row["joules"] <= JOULES
    return row


def _steady_ramp(result: Simulation) -> float:
    from tessera.fleet.power_quality import find_ramps_within

    steady = result.feed_w[round(result.quality.from_s / result.step_s) :]
    return max(find_ramps_within(steady, result.step_s))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'':44s} swing   band (of swing)    ramp    joules    lost")
    for name, scenario in CASES.items():
        row = summarize(name, simulate(scenario, engine="numba"), rows[0] if rows else None)
        rows.append(row)
        of_swing = "-" if row["band_of_swing"] is None else f"{row['band_of_swing']:.0%}"
        print(
            f"{name:44s} {row['swing']:5.1%}  {row['band']:5.1%} ({of_swing:>4s})  {row['ramp_w_per_s'] / 1e6:6.1f} MW/s  "
            f"{row['joules']:+6.1%}  {row['lost']:6.1%}  {'meets the goal' if row['met'] else ''}"
        )
    met = [r for r in rows if r["met"]]
    best = min(met, key=lambda r: (r["joules"] + r["lost"], r["swing"])) if met else None
    print(f"goal: swing <= 10%, band <= 20%, joules <= +5%: {len(met)} of {len(rows)} meet it")
    if args.write:
        write_result(args.write, {"gpus": GPUS, "rows": rows, "met": [r["case"] for r in met], "best": best})


if __name__ == "__main__":
    main()
