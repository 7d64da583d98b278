"""Caps on a simulated H200 (tests/fakes/plant.py): what the controller holds by pauses, and what a fixed duty draws.

    PYTHONPATH=src python benchmarks/measure/schedule_plant.py [RESULTS.json]

Programs by how their host behaves, at 0.85, 0.7 and 0.5 of what they draw freely: the mean from half a second on, the
worst 200 ms window as it was drawn and as the ring and the counter show it, that of the first half second, throughput
against the fixed duty of the same mean. The constants of `controller.py` were chosen with those named "seen"; those
named "kept apart" were looked at afterwards, except by `MOVED` and `AGREED_S`, for which two of them were used. Then
buckets of tokens, loads that jump or pause, and two processes on one GPU. The worst of a few seeds and of several
distances of the sensor's moments, which are not known.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from tessera.runtime.controller import Cap, PaceCommand

from fakes.plant import (
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
from fakes.programs import (
    Program,
    Shared,
    bursty,
    compiled_bert,
    decode,
    gpt2_training,
    graphs,
    host_bound,
    launching,
    saturated,
    synchronising,
    uneven,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

SECONDS, WINDOW_S, SETTLED_S = 8.0, 0.2, 0.5
WAITING_W = 118.0
MOMENTS_S = (0.00047, 0.00055, 0.00064)
TURNS_S = (0.001, 0.002, 0.005)
SHARES = (0.85, 0.7, 0.5)
SEEN: dict[str, Program] = {
    "saturated": saturated(),
    "saturated, kernels of 1.4 ms": saturated(0.0014, 950.0, 0.0014),
    "GPT-2 training": gpt2_training,
    "graph replays": graphs,
    "host-bound": host_bound(0.00002, 0.000015, 420.0),
    "synchronised at each call": synchronising(1),
    "synchronised every 8 calls": synchronising(8),
    "bursts of 30 ms": bursty(0.03, 0.01),
    "heavy and light in turn, uneven": uneven(),
    "compiled BERT, begins after 0.12 s": compiled_bert(begin_s=0.12),
    "eager decode, 184 W": decode(),
}
KEPT_APART: dict[str, Program] = {
    "saturated, 700 W": saturated(0.0004, 700.0, 0.0002),
    "host-bound, 330 W": host_bound(0.00001, 0.000008, 330.0),
    "synchronised every 3 calls": synchronising(3, 0.03, 650.0, 0.02, 0.006),
    "bursts of 5 ms": bursty(0.005, 0.002, 800.0),
    "a host that leaves 80% idle": launching(0.00006, 0.000012, 500.0, depth=300, each=3000, held_s=0.002),
    "begins after 0.07 s, 25% idle": launching(0.00004, 0.00003, 640.0, each=2500, begin_s=0.07, held_s=0.001),
}
Load = Callable[[], Iterator[Op]]


def run_plant(program: Program, command: PaceCommand, seconds: float) -> Plant:
    plant = Plant(iter(()), idle_w=WAITING_W)
    plant.ops, plant.command = program(plant), command
    plant.run_until(seconds)
    return plant


def find_fixed(run: Callable[[PaceCommand], Plant], power_w: float) -> Plant:
    """The plant at the fixed duty that draws this power, found by bisection."""
    low, high = 0.02, 1.0
    for _ in range(9):
        duty = (low + high) / 2
        plant = run(PaceCommand((1 - duty) / duty, 0.0024))
        low, high = (duty, high) if mean_w(plant.power_w, SETTLED_S) < power_w else (low, duty)
    return plant


def program_row(program: Program, share: float) -> dict[str, float]:
    """A program under a cap that is a share of its free power."""
    cap_w = share * mean_w(run_plant(program, PaceCommand(), 3.0).power_w, 1.0)
    found = []
    for seed, adc_s in enumerate(MOMENTS_S):
        plant = Plant(iter(()), rng=random.Random(seed), idle_w=WAITING_W, adc_s=adc_s)
        plant.ops = program(plant)
        bench = Bench(plant, Cap(cap_w, WINDOW_S))
        bench.run(SECONDS)
        found.append(bench)
    same = find_fixed(lambda command: run_plant(program, command, 4.0), found[0].mean_w(SETTLED_S))
    first = [worst_window_w(b.plant.power_w[:1000], WINDOW_S, 0.0) for b in found]
    return {
        "cap_w": cap_w,
        "waiting_w": WAITING_W,  # no pause draws less: a cap below it cannot be held
        **worst(found, SETTLED_S),
        "first_window_off_pct": 100 * (max(first) / cap_w - 1),
        "fixed_duty_worst_window_off_pct": 100 * (worst_window_w(same.power_w, WINDOW_S, SETTLED_S) / cap_w - 1),
        "of_fixed_duty_throughput_pct": 100 * (found[0].plant.done / SECONDS) / (same.done / 4.0),
        "waits_per_s": found[0].plant.waits / SECONDS,
    }


def worst(found: list[Bench], start_s: float) -> dict[str, float]:
    """The mean and the windows that are furthest off, as drawn and as the sensors show them."""
    cap_w = found[0].cap.power_w
    return {
        "mean_off_pct": 100 * max((b.mean_w(start_s) / cap_w - 1 for b in found), key=abs),
        "worst_window_off_pct": 100 * (max(b.worst_w(start_s) for b in found) / cap_w - 1),
        "ring_window_off_pct": 100 * (max(b.ring.peak_w or 0.0 for b in found) / cap_w - 1),
        "counter_window_off_pct": 100 * (max(counter_window_w(b.plant.counted_j, start_s) for b in found) / cap_w - 1),
    }


def load_row(load: Load, cap_w: float, *, spends: bool = False) -> dict[str, float]:
    """The worst of a few seeds of the sensor's noise."""
    found = []
    for seed in range(3):
        bench = Bench(Plant(load(), rng=random.Random(seed), spends=spends), Cap(cap_w, WINDOW_S))
        bench.run(SECONDS)
        found.append(bench)

    def at(command: PaceCommand) -> Plant:
        plant = Plant(load())
        plant.command = command
        plant.run_until(SECONDS)
        return plant

    same = find_fixed(at, found[0].mean_w(0.0))
    return {
        **worst(found, 1.0),
        "fixed_duty_worst_window_off_pct": 100 * (worst_window_w(same.power_w, WINDOW_S, 1.0) / cap_w - 1),
        "of_fixed_duty_throughput_pct": 100 * found[0].plant.done / same.done,
    }


def priced(period_s: float, off: float) -> Iterator[Op]:
    """`phases`, whose tokens go with their joules but for the light work's, that spends `off` times as many."""
    while True:
        for power_w, factor in ((BURST_W, 1.0), (350.0, off)):
            tokens = round((power_w - IDLE_W) * factor)
            yield from (Op(GEMM_S, power_w, tokens) for _ in range(int(period_s / GEMM_S)))


def shared_row(cap_w: float) -> dict[str, float]:
    """Two processes of GEMMs under one cap, on one GPU."""
    found, shares = [], []
    for seed, turn_s in enumerate(TURNS_S):
        plant = Shared(itertools.repeat(Op(0.000171, 976.0)), rng=random.Random(seed), idle_w=WAITING_W)
        plant.turn_s = turn_s
        bench = Bench(plant, Cap(cap_w, WINDOW_S))
        assert bench.zone.controller is not None
        bench.zone.controller.shared = True
        bench.run(SECONDS)
        found.append(bench)
        done = [p.done for p in plant.processes]
        shares.append(min(done) / max(done))
    return {**worst(found, SETTLED_S), "fairness": min(shares)}


HEADS = {
    "mean_off_pct": "mean",
    "worst_window_off_pct": "window",
    "ring_window_off_pct": "by ring",
    "counter_window_off_pct": "by counter",
    "first_window_off_pct": "first",
    "fixed_duty_worst_window_off_pct": "fixed duty's",
    "of_fixed_duty_throughput_pct": "throughput of fixed",
}


def show(name: str, row: dict[str, float]) -> None:
    cells = [f"{row[k]:{'.0f' if 'throughput' in k else '+.1f'}}%" if k in row else "" for k in HEADS]
    more = "  ".join(f"{k} {v:.3g}" for k, v in row.items() if k not in HEADS)
    widths = [max(len(h), 8) for h in HEADS.values()]
    print(f"{name:52s} " + " ".join(f"{c:>{w}s}" for c, w in zip(cells, widths, strict=True)), more, flush=True)


def main() -> None:
    rows: dict[str, dict[str, float]] = {}

    def add(name: str, row: dict[str, float]) -> None:
        rows[name] = row
        show(name, row)

    print(f"{'':52s} " + " ".join(f"{h:>{max(len(h), 8)}s}" for h in HEADS.values()))
    for kind, programs in (("seen", SEEN), ("kept apart", KEPT_APART)):
        for title, program in programs.items():
            for share in SHARES:
                add(f"{kind}: {title}, at {share}", program_row(program, share))
    for period_s in (0.05, 0.2, 1.0):
        add(f"918 and 350 W every {period_s:g} s, 400 W", load_row(lambda p=period_s: phases(p), 400.0))  # type: ignore[misc]
    for cap_w in (600.0, 500.0, 400.0, 300.0):
        add(f"tokens, GEMM loop, {cap_w:g} W", load_row(gemms, cap_w, spends=True))
    for cap_w in (500.0, 400.0, 300.0):
        add(f"tokens, training-like, {cap_w:g} W", load_row(lambda: training(random.Random(1)), cap_w, spends=True))
    for period_s, off in itertools.product((0.05, 0.2, 1.0), (1.0, 1.2, 2.0)):
        name = f"tokens x {off:g}, 918 and 350 W every {period_s:g} s, 400 W"
        add(name, load_row(lambda p=period_s, o=off: priced(p, o), 400.0, spends=True))  # type: ignore[misc]
    for pause_s in (0.02, 0.2, 0.5):
        name = f"GEMM loop that pauses for {pause_s:g} s, 300 W"
        program = bursty(1.0, pause_s, 976.0)
        free_w = mean_w(run_plant(program, PaceCommand(), 3.0).power_w, 1.0)
        add(name, program_row(program, 300.0 / free_w))
    add("two processes on one GPU, 450 W", shared_row(450.0))
    if len(sys.argv) > 1:
        write_result(Path(sys.argv[1]), rows)


if __name__ == "__main__":
    main()
