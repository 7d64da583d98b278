"""Caps held by launches, warps and cp.async copies of our own kernels on the GPU at hand, beside a bucket of joules.

    PYTHONPATH=src:.carry/site python benchmarks/device/schedule_tokens.py RESULTS.json [--budget-s 90] [--quick]

Products of a given tile at 500 and 300 W by each kind of token: the mean, the worst 200 ms window after the first second,
what a token cost, and the throughput against a bucket of joules. Then products and softmax in turn every 0.3 s, where a
token's joules differ. And what a point that spends costs. No clock, limit or mode is changed.

`--quick` runs the logic on a CPU, where the step announces launches itself; its watts are modelled and say nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TESSERA_CONTROL"] = "0"  # limits and clocks of this GPU are never changed here, whatever the shell says

import torch

import schedule_caps
from schedule_caps import Ring, Rows, Step, measure, synchronize
from tessera import op, schedule
from tessera.op import hints
from tessera.runtime.controller import PaceCommand
from tessera.runtime.gpu_pacer import make_pacer

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

KINDS = ("joules", "launches", "warps", "cp_async")
SECONDS = 6.0
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def products() -> Step:
    """20 products of a tile (some 5 ms)."""
    n = 4096 if CUDA else 64
    a, b = (torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))

    def step() -> None:
        for _ in range(20):
            op.matmul(a, b, tile_shape=(128, 128, 64) if CUDA else (16, 16, 16))
            announce(1024, 4)

    return step


def in_turn(heavy: Step, period_s: float = 0.3) -> Step:
    """Products, then softmax of a large matrix, by the clock: a jump of the load at each change."""
    x = torch.randn(16384 if CUDA else 64, 1024, device=DEVICE, dtype=torch.bfloat16)

    def step() -> None:
        if int(time.monotonic() / period_s) % 2:
            heavy()
            return
        for _ in range(20):
            op.softmax(x)
            announce(512, 4)
        synchronize()

    return step


def announce(blocks: int, warps: int) -> None:
    if not CUDA:  # torch computed it: no kernel of ours was launched
        hints.announce_launch(blocks, warps, stages=3, tile_bytes=8192)


def held(ring: Ring, step: Step, cap_w: float, kind: str, seconds: float) -> dict[str, object]:
    scheduled = schedule(power_cap=cap_w, tokens=kind)(step)
    row: dict[str, object] = dict(measure(ring, scheduled, seconds))
    report = scheduled.report()
    row["mean_off_pct"] = 100.0 * (float(row["mean_w"]) / cap_w - 1.0)  # type: ignore[arg-type]
    row["worst_window_off_pct"] = 100.0 * (float(row["worst_window_w"]) / cap_w - 1.0)  # type: ignore[arg-type]
    row |= {"waits": report.waits, "waited_s": report.waited_s, "notes": list(report.notes)}
    if report.tokens is not None:
        row |= {
            "spent": report.tokens.spent,
            "per_s": report.tokens.per_s,
            "joules_each": report.tokens.energy_per_token_j,
        }
    return row


def first_calls(step: Step) -> dict[str, float]:
    """Seconds of the first call as it is, which compiles its kernel, and of the first under a cap."""
    took = {}
    for name, call in (("plain_s", step), ("capped_s", schedule(power_cap=10_000.0)(step)), ("again_s", step)):
        begun = time.perf_counter()
        call()
        synchronize()
        took[name] = time.perf_counter() - begun
    return took


def wait_cost() -> dict[str, float]:
    """Host microseconds of a wait that has nothing to wait for; device microseconds of a thousand in line."""
    pacer = make_pacer(0 if CUDA else -1)
    pacer.pace_by_tokens(True)
    pacer.obey(PaceCommand())
    pacer.spend(0, restart=True)
    synchronize()
    n = 200
    begun = time.perf_counter()
    for _ in range(n):
        pacer.spend(4096)
    host_s = time.perf_counter() - begun
    synchronize()
    return {"host_us": host_s / n * 1e6, "device_us": (time.perf_counter() - begun) / n * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget-s", type=float, default=90.0)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        os.environ["TESSERA_SENSORS"] = "modelled"
        schedule_caps.QUICK = True
    faulthandler.dump_traceback_later(args.budget_s + 60.0, exit=True)  # what hangs must not take the others' time
    rows, ring, heavy = Rows(args.budget_s), Ring(), products()
    rows.rows["machine"] = {
        "gpu": torch.cuda.get_device_name() if CUDA else "cpu",
        "torch": torch.__version__,
        "quick": args.quick,
    }
    seconds = 1.5 if args.quick else SECONDS

    def add(name: str, takes_s: float, fn: Callable[[], dict[str, object]]) -> None:
        rows.add(name, takes_s, fn)
        write_result(args.out, rows.rows)

    try:
        add("waits", 3.0, wait_cost)
        add("first calls", 10.0, lambda: first_calls(heavy))
        add("products, no cap", 4.0, lambda: dict(measure(ring, heavy, seconds / 2)))
        for cap_w in (6.0,) if args.quick else (500.0, 300.0):
            for kind in KINDS:
                name = f"products capped at {cap_w:g} W by {kind}"
                add(name, seconds + 1.5, lambda c=cap_w, k=kind: held(ring, heavy, c, k, seconds))  # type: ignore[misc]
        both, cap_w = in_turn(heavy), 6.0 if args.quick else 400.0
        for _ in range(2):  # softmax is compiled before it is measured
            both()
            time.sleep(0.3)
        for kind in ("joules", "warps"):
            name = f"products and softmax in turn at {cap_w:g} W by {kind}"
            add(name, seconds + 1.5, lambda c=cap_w, k=kind: held(ring, both, c, k, seconds))  # type: ignore[misc]
    finally:
        ring.close()


if __name__ == "__main__":
    main()
