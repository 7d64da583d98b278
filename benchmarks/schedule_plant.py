"""Caps held on a simulated H200 (tests/fakes/plant.py): the mean, the worst window, and the fixed duty cycle beside it.

    PYTHONPATH=src python benchmarks/schedule_plant.py [RESULTS.json]

The real controller, zone and series on the plant's own clock; sixteen seconds each, from the second second on. Rows of
tokens are a bucket of what our own kernels launch (runtime/tokens.py), beside the same fixed duty cycle.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from tessera.runtime.bucket import Cap, Command

from fakes.plant import BURST_W, GEMM_S, IDLE_W, Bench, Op, Plant, gemms, mean_w, phases, training, worst_window_w

SECONDS, WINDOW_S, SEEDS = 16.0, 0.2, 3
Load = Callable[[], Iterator[Op]]


def fixed(load: Load, power_w: float) -> Plant:
    """The load at the fixed duty that draws this power, found by bisection."""
    low, high = 0.02, 1.0
    for _ in range(9):
        duty = (low + high) / 2
        plant = Plant(load(), every=4)
        plant.command = Command((1 - duty) / duty, 0.0024)
        plant.run_until(SECONDS)
        low, high = (duty, high) if mean_w(plant.power_w, 1.0) < power_w else (low, duty)
    return plant


def priced(period_s: float, off: float) -> Iterator[Op]:
    """`phases`, whose tokens go with their joules but for the light work's, that spends `off` times as many."""
    while True:
        for power_w, factor in ((BURST_W, 1.0), (350.0, off)):
            tokens = round((power_w - IDLE_W) * factor)
            yield from (Op(GEMM_S, power_w, tokens) for _ in range(int(period_s / GEMM_S)))


def row(load: Load, cap_w: float, *, spends: bool = False) -> dict[str, float]:
    """The worst of a few seeds of the sensor's noise."""
    found = []
    for seed in range(SEEDS):
        bench = Bench(Plant(load(), every=4, rng=random.Random(seed), spends=spends), Cap(cap_w, WINDOW_S))
        bench.run(SECONDS)
        found.append((bench.mean_w() / cap_w - 1, bench.worst_w() / cap_w - 1, bench.plant.done, bench.mean_w(0.0)))
    same = fixed(load, found[0][3])
    return {
        "mean_off_pct": 100 * max((f[0] for f in found), key=abs),
        "worst_window_off_pct": 100 * max(f[1] for f in found),
        "fixed_duty_worst_window_off_pct": 100 * (worst_window_w(same.power_w, WINDOW_S, 1.0) / cap_w - 1),
        "of_fixed_duty_throughput_pct": 100 * found[0][2] / same.done,
    }


def main() -> None:
    rows: dict[str, dict[str, float]] = {}
    for cap_w in (600.0, 500.0, 400.0, 300.0):
        rows[f"GEMM loop, {cap_w:g} W"] = row(gemms, cap_w)
    for cap_w in (500.0, 400.0, 300.0):
        rows[f"training-like, {cap_w:g} W"] = row(lambda: training(random.Random(1)), cap_w)
    for period_s in (0.05, 0.2, 1.0):
        rows[f"918 and 350 W every {period_s:g} s, 400 W"] = row(lambda p=period_s: phases(p), 400.0)  # type: ignore[misc]
    for cap_w in (600.0, 500.0, 400.0, 300.0):
        rows[f"tokens, GEMM loop, {cap_w:g} W"] = row(gemms, cap_w, spends=True)
    for cap_w in (500.0, 400.0, 300.0):
        rows[f"tokens, training-like, {cap_w:g} W"] = row(lambda: training(random.Random(1)), cap_w, spends=True)
    for period_s in (0.05, 0.2, 1.0):
        for off in (1.0, 1.2, 2.0):
            name = f"tokens x {off:g}, 918 and 350 W every {period_s:g} s, 400 W"
            rows[name] = row(lambda p=period_s, o=off: priced(p, o), 400.0, spends=True)  # type: ignore[misc]
    print(f"{'':52s} {'mean':>8s} {'window':>8s} {'window, fixed duty':>20s} {'throughput of fixed':>20s}")
    for name, r in rows.items():
        print(
            f"{name:52s} {r['mean_off_pct']:+7.1f}% {r['worst_window_off_pct']:+7.1f}% "
            f"{r['fixed_duty_worst_window_off_pct']:+19.1f}% {r['of_fixed_duty_throughput_pct']:19.1f}%"
        )
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
