"""Caps held on a simulated H200 (tests/fakes/plant.py): the mean, the worst window, and the fixed duty cycle beside it.

    PYTHONPATH=src python benchmarks/measure/schedule_plant.py [RESULTS.json]

The real controller, zone and series on the plant's own clock; sixteen seconds each, from the second second on. Rows of
tokens are a bucket of what our own kernels launch (runtime/power_zone.py), beside the same fixed duty cycle. "Launched" rows
have the real cadence, which puts points among what a host launches ahead, and the constants of the loads as they were
measured on 2026-11-15, and are the worst of several distances of the moments that the sensor looks at, which are not
known. "Two processes" take turns on one GPU, of lengths that are not known either. The last rows are fixed duties, whose
windows by the ring and the counter are those of their beats with them.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from tessera.runtime.cap_report import MeanPower, PowerMeter
from tessera.runtime.controller import Cap, PaceCommand

from fakes.launching import Host, Shared, gemm_step, gpt2_step
from fakes.plant import (
    ADC_S,
    BURST_W,
    GEMM_S,
    IDLE_W,
    Bench,
    Op,
    Plant,
    counter_window_w,
    gemms,
    mean_w,
    phases,
    training,
    worst_window_w,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

SECONDS, WINDOW_S, SEEDS = 16.0, 0.2, 3
GEMM = Op(0.000171, 976.0)  # 4096 a side, as measured between waits
WAITING_W = 118.0
MOMENTS_S = (0.00036, 0.00047, 0.00053, ADC_S, 0.00059, 0.00064)
TURNS_S = (0.001, 0.002, 0.005)
Load = Callable[[], Iterator[Op]]


def fixed(load: Load, power_w: float) -> Plant:
    """The load at the fixed duty that draws this power, found by bisection."""
    low, high = 0.02, 1.0
    for _ in range(9):
        duty = (low + high) / 2
        plant = Plant(load(), every=4)
        plant.command = PaceCommand((1 - duty) / duty, 0.0024)
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
        found.append(bench)
    same = fixed(load, found[0].mean_w(0.0))
    return {
        **worst(found),
        "fixed_duty_worst_window_off_pct": 100 * (worst_window_w(same.power_w, WINDOW_S, 1.0) / cap_w - 1),
        "of_fixed_duty_throughput_pct": 100 * found[0].plant.done / same.done,
    }


def worst(found: list[Bench]) -> dict[str, float]:
    """The mean and the windows that are furthest off, as drawn and as the ring shows them."""
    cap_w = found[0].cap.power_w
    return {
        "mean_off_pct": 100 * max((b.mean_w() / cap_w - 1 for b in found), key=abs),
        "worst_window_off_pct": 100 * (max(b.worst_w() for b in found) / cap_w - 1),
        "ring_window_off_pct": 100 * (max(b.ring.peak_w or 0.0 for b in found) / cap_w - 1),
        "counter_window_off_pct": 100 * (max(counter_window_w(b.plant.counted_j, 1.0) for b in found) / cap_w - 1),
    }


def launched(step: Callable[[Host], list[Op]], cap_w: float) -> dict[str, float]:
    """What a host launches ahead, with points by the real cadence."""
    found = []
    for seed, adc_s in enumerate(MOMENTS_S):
        plant = Plant(iter(()), rng=random.Random(seed), idle_w=WAITING_W, adc_s=adc_s)
        bench = Bench(plant, Cap(cap_w, WINDOW_S), cadence=Host(plant, step).cadence)
        bench.run(SECONDS)
        found.append(bench)
    plant = found[0].plant
    over = sum((b.ring.peak_w or 0.0) > 1.05 * cap_w for b in found) / len(found)
    return {
        **worst(found),
        "ring_over_5_pct_share": over,
        "waits_per_s": plant.waits / SECONDS,
        "points_per_s": plant.points / SECONDS,
    }


def pausing(pause_s: float) -> Callable[[Host], list[Op]]:
    """The GEMM loop, whose host has nothing to launch for a while after every sixty steps."""
    steps = itertools.count(1)

    def step(host: Host) -> list[Op]:
        queue = gemm_step(host)
        if next(steps) % 60 == 0:
            host.launched(queue, Op(pause_s, WAITING_W))
        return queue

    return step


def shared(cap_w: float) -> dict[str, float]:
    """Two processes of GEMMs under one cap, on one GPU."""
    found, shares = [], []
    for seed, turn_s in enumerate(TURNS_S):
        plant = Shared(itertools.repeat(GEMM), every=2, rng=random.Random(seed), idle_w=WAITING_W)
        plant.turn_s = turn_s
        bench = Bench(plant, Cap(cap_w, WINDOW_S))
        assert bench.zone.controller is not None
        bench.zone.controller.shared = True
        bench.run(SECONDS)
        found.append(bench)
        done = [p.done for p in plant.processes]
        shares.append(min(done) / max(done))
    return {**worst(found), "fairness": min(shares)}


def beating(duty: float, slice_s: float) -> dict[str, float]:
    """A fixed duty: its worst window above its own mean, as drawn and as the ring shows it; the ring's mean above it."""
    plant = Plant(itertools.repeat(GEMM), every=1, idle_w=WAITING_W)
    plant.command = PaceCommand((1 - duty) / duty, slice_s)
    ring = PowerMeter(WINDOW_S)
    for (t0, w0), (t1, w1) in itertools.pairwise(plant.run_until(SECONDS)):
        ring.add(MeanPower(round(t1 * 1e9), t1 - t0, (w0 + w1) / 2))
    drawn_w = mean_w(plant.power_w, 1.0)
    return {
        "window_above_mean_pct": 100 * (worst_window_w(plant.power_w, WINDOW_S, 1.0) / drawn_w - 1),
        "ring_window_above_mean_pct": 100 * ((ring.peak_w or 0.0) / drawn_w - 1),
        "ring_mean_off_pct": 100 * ((ring.mean_w or 0.0) / drawn_w - 1),
        "counter_window_above_mean_pct": 100 * (counter_window_w(plant.counted_j, 1.0) / drawn_w - 1),
    }


def show(rows: dict[str, dict[str, float]]) -> None:
    heads = {
        "mean_off_pct": "mean",
        "worst_window_off_pct": "window",
        "ring_window_off_pct": "by ring",
        "counter_window_off_pct": "by counter",
        "fixed_duty_worst_window_off_pct": "fixed duty's",
        "of_fixed_duty_throughput_pct": "throughput of fixed",
    }
    print(f"{'':52s} " + " ".join(f"{head:>{max(len(head), 8)}s}" for head in heads.values()))
    for name, r in rows.items():
        cells = [f"{r[k]:{'.0f' if 'throughput' in k else '+.1f'}}%" if k in r else "" for k in heads]
        more = "  ".join(f"{k} {v:.3g}" for k, v in r.items() if k not in heads)
        print(
            f"{name:52s} " + " ".join(f"{c:>{max(len(h), 8)}s}" for c, h in zip(cells, heads.values(), strict=True)),
            more,
        )


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
    for cap_w in (600.0, 500.0, 400.0, 300.0):
        rows[f"launched, GEMM loop, {cap_w:g} W"] = launched(gemm_step, cap_w)
    for cap_w in (500.0, 400.0, 300.0):
        rows[f"launched, GPT-2 training, {cap_w:g} W"] = launched(gpt2_step, cap_w)
    for pause_s in (0.02, 0.2, 0.5):
        rows[f"launched, GEMM loop that pauses for {pause_s:g} s, 300 W"] = launched(pausing(pause_s), 300.0)
    rows["two processes on one GPU, 450 W"] = shared(450.0)
    for slice_s in (0.0003, 0.001, 0.0024, 0.01):
        rows[f"fixed duty 0.5 x {slice_s * 1e3:g} ms"] = beating(0.5, slice_s)
    show(rows)
    if len(sys.argv) > 1:
        write_result(Path(sys.argv[1]), rows)


if __name__ == "__main__":
    main()
