"""When an H200's power sensor looks, and when its samples are stamped: recorded mixtures and square waves. Needs no GPU.

    python benchmarks/measure/look_times.py [--waves WAVES.json] [--json OUT.json]

NVML's ring has a sample every 20.000 ms. Most stamps lie on a grid of 10 ms, the others are late, and the power they show
is that of the last point of the grid. `on grid` is the share of stamps within 0.5 ms of it, `late` the quartiles of the
others' distance behind it. `left` is the residual (W, root mean square and median) of the best fit of what ran to the
samples as they are stamped, and to those placed on the grid. The waves were recorded on another day than the mixtures, and
nothing was fitted to them.
Attribution takes the stamps as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tessera.attribute import learn_response as response_module
from tessera.attribute.activity import activity
from tessera.attribute.fit import response_of
from tessera.attribute.prior import board_of
from tessera.attribute.solve import _Problem

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import attribution
import learn_sensor
from result_file import write_result

GRID_NS, NEAR_NS = 10_000_000, 500_000
"""The grid of the sensor, and how far a stamp that is not late lies from it at the most."""
LEAST_NEAR = 0.4
"""The share of stamps that must lie on the grid: a sensor whose stamps scatter otherwise has another one, or none."""
_BLOCK = 250
"""Samples of 5 s, in which the grid moves by less than 0.1 ms against the clock of the stamps."""


def find_looks(times_ns: Any) -> Any:
    """The times at which the samples were taken; None where the stamps show no grid.

    All are later by what the stamps are late in the mean: a sensor's lag is that of its stamps, here as everywhere.
    """
    looks = times_ns.copy()
    for begin in range(0, len(times_ns), _BLOCK):
        block = slice(max(min(begin, len(times_ns) - _BLOCK), 0), begin + _BLOCK)
        phase = _find_phase(times_ns[block])
        if phase is None:
            return None
        late_ns = (times_ns[block] - phase + NEAR_NS) % GRID_NS - NEAR_NS
        looks[block] = times_ns[block] - np.where(late_ns > NEAR_NS, late_ns, 0)
    return looks + round(float(np.mean(times_ns - looks))) if len(looks) else None


def _find_phase(times_ns: Any) -> int | None:
    """Where in the grid most stamps lie."""
    places = np.sort(times_ns % GRID_NS)
    around = np.concatenate([places, places + GRID_NS])
    near = np.searchsorted(around, places + NEAR_NS, side="right") - np.arange(len(places))
    first = int(np.argmax(near))
    if near[first] < LEAST_NEAR * len(places):
        return None
    return int(around[first + near[first] // 2])


def describe_stamps(times_ns: Any) -> dict[str, Any]:
    """The share of stamps on the grid, and how late the others are."""
    looks = find_looks(times_ns)
    if looks is None:
        return {"samples": len(times_ns), "on_grid_pct": None}
    late_ms = (times_ns - looks - np.min(times_ns - looks)) * 1e-6
    late = late_ms[late_ms > 0.5]
    spacing = np.unique(np.round(np.diff(looks) * 1e-7), return_counts=True)
    return {
        "samples": len(times_ns), "on_grid_pct": 100 * float(np.mean(late_ms <= 0.5)),
        "late_ms": [float(np.percentile(late, q)) for q in (25, 50, 75, 99)],
        "spacing_ms": {str(10 * int(k)): int(n) for k, n in zip(*spacing, strict=True)},
    }  # fmt: skip


def summarize(residuals_w: Any) -> list[float]:
    return [float(np.sqrt(np.mean(residuals_w**2))), float(np.median(np.abs(residuals_w)))]


def measure_mixture(path: Path) -> dict[str, Any]:
    found = attribution.recording(path)
    timeline, column = attribution.timeline_of(found), attribution.power_of(found).columns["gpu0"]
    ran = activity(timeline, timeline.device_rows, timeline.linked)
    board, response = board_of("NVIDIA H200", column.watts), response_of(attribution.RING, 0.02)
    seen = [(max(found["start_ns"], int(ran.start_ns[0])), found["end_ns"])]
    problem = _Problem.of(timeline, timeline.linked, ran, seen, board, response, column.times_ns, column.watts)
    left = {}
    for name, times_ns in (("stamps", problem.times_ns), ("looks", find_looks(problem.times_ns))):
        problem.times_ns = times_ns
        problem.design = problem.expose(response)
        fit = problem._solve(problem.design, [problem.expose(v) for v in response.variants()], response)
        left[name] = summarize(problem.samples_w - problem.design @ fit.watts)
    return {**describe_stamps(column.times_ns), "left_w": left}


def measure_wave(wave: dict[str, Any]) -> dict[str, Any]:
    times_ns = np.array([t * 1000 for t, _ in wave["samples_mw"]], np.int64)
    watts, marks = np.array([mw / 1e3 for _, mw in wave["samples_mw"]]), np.array(wave["on_us"]) * 1000
    left = {}
    for name, placed in (("stamps", times_ns), ("looks", find_looks(times_ns))):
        use, ran = learn_sensor.expose_marks(placed, marks)
        solver = response_module._ResponseSolver(placed[use], watts[use], ran, 1e-3)
        solver.solve()
        left[name] = summarize(solver._residuals)
    return {**describe_stamps(times_ns), "left_w": left}


def show(name: str, row: dict[str, Any]) -> None:
    late, left = row["late_ms"], row["left_w"]
    print(f"{name:<16}{row['samples']:>5}{row['on_grid_pct']:>8.0f}%   {late[0]:.1f} {late[1]:.1f} {late[2]:.1f} ms"
          f"{left['stamps'][0]:>10.1f}{left['stamps'][1]:>7.1f}{left['looks'][0]:>10.1f}{left['looks'][1]:>7.1f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waves", type=Path, default=learn_sensor.WAVES)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{'':<16}{'n':>5}{'on grid':>9}   {'late':<14}{'left by stamps':>17}{'by looks':>17}")
    out = {}
    for path in sorted(attribution.DATA.glob("h200_mixture_*.json.gz")):
        out[path.name.removeprefix("h200_mixture_").removesuffix(".json.gz")] = measure_mixture(path)
    for wave in json.loads(args.waves.read_text()) if args.waves.exists() else []:
        out[f"wave of {wave['period_s']:g} s"] = measure_wave(wave)
    for name, row in out.items():
        show(name, row)
    if args.json:
        write_result(args.json, out)


if __name__ == "__main__":
    main()
