"""A floor and a ramp held on a simulated H200 (tests/fakes/ballast_plant.py): the swing that is left, and its joules.

    PYTHONPATH=src python benchmarks/measure/ballast_plant.py [RESULTS.json]

The real control (runtime/ballast_control.py) with a sensor that is as late as an H200's: samples of 20 ms behind a filter of
11 ms, seen 15 ms later. The load is 700 W for 75% of each period and 125 W for the rest; the control believes that ballast
can add 500 W. What it really adds is less or more: the real loop measures it once before the first work, within a few percent;
rows of 0.7 and 1.4 are without that.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result
from tessera.runtime.ballast_control import BallastControl

from fakes.ballast_plant import FILTER_S, STEP_S, BallastPlant, wave

HIGH_W, LOW_W, DUTY, SECONDS, FROM_S = 700.0, 125.0, 0.75, 40.0, 10.0
HALF_W = (HIGH_W + LOW_W) / 2


def run(floor_w: float | None, ramp: float | None, period_s: float, gain: float) -> dict[str, float]:
    control = BallastControl(
        floor_w=floor_w, max_ramp_w_per_s=ramp, idle_w=LOW_W, full_w=LOW_W + 500.0, blur_s=FILTER_S
    )
    plant = BallastPlant(wave(HIGH_W, period_s, DUTY), control, low_w=LOW_W, gain_w=500.0 * gain)
    plant.run(SECONDS)
    power_w = np.array(plant.power_w)
    settled = power_w[round(FROM_S / STEP_S) :]
    windows = settled[: len(settled) // 20 * 20].reshape(-1, 20).mean(axis=1)
    work_j = float(power_w.sum()) * STEP_S - plant.ballast_j
    fall = float(-np.diff(settled[: len(settled) // 200 * 200].reshape(-1, 200).mean(axis=1)).min()) / 0.2
    return {
        "swing_left": float(np.ptp(windows)) / (HIGH_W - LOW_W),
        "lowest_w": float(windows.min()),
        "fall_w_per_s": fall,
        "joules_added": plant.ballast_j / work_j,
        "joules_reported_off": control.energy_j / plant.ballast_j - 1 if plant.ballast_j else 0.0,
    }


def main() -> None:
    rows = {"nothing": run(None, None, 2.0, 1.0)}
    for period_s, gains in ((0.5, (1.0,)), (2.0, (0.7, 0.9, 1.0, 1.1, 1.4)), (5.0, (1.0,))):
        for gain in gains:
            rows[f"floor {HALF_W:g} W, {period_s:g} s, ballast x {gain:g}"] = run(HALF_W, None, period_s, gain)
    for ramp in (200.0, 800.0):
        for gain in (0.9, 1.0, 1.1):
            rows[f"ramp {ramp:g} W/s, 5 s, ballast x {gain:g}"] = run(None, ramp, 5.0, gain)
    rows[f"floor {HALF_W:g} W and ramp 800 W/s, 5 s"] = run(HALF_W, 800.0, 5.0, 1.0)
    heads = ("swing_left", "lowest_w", "fall_w_per_s", "joules_added", "joules_reported_off")
    print(f"{'':44}" + "".join(f"{head:>21}" for head in heads))
    for name, row in rows.items():
        print(f"{name:44}" + "".join(f"{row[head]:21.3g}" for head in heads))
    print("goal: the swing is halved by a floor half-way, its joules are printed")
    if len(sys.argv) > 1:
        write_result(Path(sys.argv[1]), {"rows": rows})


if __name__ == "__main__":
    main()
