"""The simulator's GPU against recorded power waves of an H200: joules, peak and swing of waves that it did not see.

    python benchmarks/measure/fleet_waves.py /work/shared/h200/waves.json

The recording has seven square waves (periods of 10 ms to 1 s, half of each at full load) with their on/off marks, the
driver's samples every 20 ms and the energy counter. Three of them (1 s, 0.2 s, 0.05 s) choose the two numbers that the
simulator needs besides the chip's limit: what the load wants before the limit holds it, and how fast the limit takes hold.
The other four are predicted and compared. The driver's samples lag and blur (docs/measuring.md): of peaks it shows less
than there is.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path[0] = str(
    Path(__file__).parents[1]
)  # not this folder: numba imports `coverage`, and a script here has that name
import tessera.fleet.engine as engine_module
from result_file import write_result
from tessera.fleet.facility import Facility, GpuKind, NodeKind
from tessera.fleet.jobs import FleetJob
from tessera.fleet.scenario import Scenario
from tessera.fleet.simulator import simulate
from tessera.fleet.supplies import Feed, NodeSupply
from tessera.fleet.waves import make_wave

CHOSEN = (1.0, 0.2, 0.05)
LIMIT_W = 700.0


def predict(wave: dict[str, Any], high_w: float, low_w: float) -> dict[str, float]:
    """Joules and watts of one GPU over the stretch between the two reads of the counter."""
    start_us, end_us = wave["energy_mj"][0][0], wave["energy_mj"][1][0]
    phases: list[tuple[str, float, float]] = []
    at = start_us
    for on, off in wave["on_us"]:
        if on > at:
            phases.append(("pause", (on - at) * 1e-6, low_w))
        # The recording launched work until a time was over, not so much work: a lower clock does not stretch it.
        phases.append(("burst", (off - on) * 1e-6, high_w))
        at = off
    phases.append(("pause", (end_us - at) * 1e-6, low_w))
    duration_s = (end_us - start_us) * 1e-6
    node = NodeKind(gpus=1, host_w=0.0, supply=NodeSupply(grade="ideal"))
    facility = Facility(
        rows=1,
        row_racks=1,
        rack_nodes=1,
        gpu=GpuKind(idle_w=77.0, limit_w=LIMIT_W),
        node=node,
        feed=Feed(ups_efficiency=1.0),
    )
    job = FleetJob(name="wave", gpus=1, waves=(make_wave(phases, synchronous=False),))
    scenario = Scenario(facility=facility, jobs=(job,), duration_s=duration_s, judge_from_s=0.0)
    result = simulate(scenario, engine="numpy")
    return {"energy_j": result.gpu_j, "peak_w": result.quality.peak_w, "band_share": result.quality.band_share}


def measure(wave: dict[str, Any]) -> dict[str, float]:
    """The same from the recording."""
    start_us, end_us = wave["energy_mj"][0][0], wave["energy_mj"][1][0]
    samples = np.array([s for s in wave["samples_mw"] if start_us <= s[0] <= end_us], dtype=float)
    return {
        "energy_j": (wave["energy_mj"][1][1] - wave["energy_mj"][0][1]) * 1e-3,
        "peak_w": float(samples[:, 1].max()) * 1e-3,
    }


def find_low(waves: list[dict[str, Any]]) -> float:
    """What the GPU draws between bursts of the slowest wave: the median of samples 100 ms after a burst."""
    wave = max(waves, key=lambda w: w["period_s"])
    samples = np.array(wave["samples_mw"], dtype=float)
    low = [
        samples[(samples[:, 0] > off + 1e5) & (samples[:, 0] < on), 1]
        for (_, off), (on, _) in zip(wave["on_us"], wave["on_us"][1:], strict=False)
    ]
    return float(np.median(np.concatenate(low))) * 1e-3


def score(waves: list[dict[str, Any]], high_w: float, limit_s: float, low_w: float) -> float:
    engine_module.LIMIT_S = limit_s
    return float(np.mean([(predict(w, high_w, low_w)["energy_j"] / measure(w)["energy_j"] - 1.0) ** 2 for w in waves]))


def choose(waves: list[dict[str, Any]], low_w: float) -> tuple[float, float]:
    grid = [(high, tau) for high in range(760, 961, 20) for tau in (0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15)]
    return min(grid, key=lambda pair: score(waves, pair[0], pair[1], low_w))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("waves", type=Path)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    waves = json.loads(args.waves.read_text())
    low_w = find_low(waves)
    shipped_s = engine_module.LIMIT_S
    high_w, limit_s = choose([w for w in waves if w["period_s"] in CHOSEN], low_w)
    engine_module.LIMIT_S = limit_s
    rows = []
    for wave in waves:
        found, real = predict(wave, high_w, low_w), measure(wave)
        error = found["energy_j"] / real["energy_j"] - 1.0
        seen = wave["period_s"] in CHOSEN
        rows.append(
            {
                "period_s": wave["period_s"],
                "chosen_on": seen,
                "simulated_j": found["energy_j"],
                "measured_j": real["energy_j"],
                "error": error,
                "simulated_peak_w": found["peak_w"],
                "measured_peak_w": real["peak_w"],
            }
        )
        print(
            f"{wave['period_s']:5.2f} s {'chosen on' if seen else 'unseen   '}  simulated {found['energy_j']:7.1f} J, "
            f"counter {real['energy_j']:7.1f} J ({error:+.1%});  peak {found['peak_w']:.0f} W, sensor {real['peak_w']:.0f} W"
        )
    unseen = [abs(r["error"]) for r in rows if not r["chosen_on"]]
    print(f"load wants {high_w} W, idles at {low_w:.0f} W, the limit takes hold within {limit_s * 1e3:.0f} ms")
    print(
        f"unseen waves: mean error {np.mean(unseen):.1%}, worst {max(unseen):.1%} (the simulator ships {shipped_s * 1e3:.0f} ms)"
    )
    if args.write:
        write_result(
            args.write,
            {
                "high_w": high_w,
                "low_w": low_w,
                "limit_s": limit_s,
                "shipped_limit_s": shipped_s,
                "waves": rows,
                "unseen_mean_error": float(np.mean(unseen)),
                "unseen_worst_error": max(unseen),
                "unseen": len(unseen),
            },
        )


if __name__ == "__main__":
    main()
