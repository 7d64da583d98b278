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
import time
from datetime import date
from pathlib import Path

os.environ["TESSERA_CONTROL"] = "0"  # limits and clocks of this GPU are never changed here, whatever the shell says

import torch

from schedule_caps import Run, Step, few_in_flight, load_row, text
from tessera import op, schedule
from tessera.op import hints
from tessera.runtime.controller import PaceCommand
from tessera.runtime.pacer import make_pacer

KINDS = ("joules", "launches", "warps", "cp_async")
SECONDS = 6.0


def products(run: Run) -> Step:
    """20 products of a tile (some 5 ms), at most three such batches in flight."""
    n = 64 if run.quick else 4096
    a, b = (torch.randn(n, n, device=run.device, dtype=torch.bfloat16) for _ in range(2))
    queued = few_in_flight(run)

    def step() -> int:
        for _ in range(20):
            op.matmul(a, b, tile_shape=(128, 128, 64) if run.cuda else (16, 16, 16))
            announce(run, 1024, 4)
        queued()
        return 20

    return step


def in_turn(run: Run, heavy: Step, period_s: float = 0.3) -> Step:
    """Products, then softmax of a large matrix, by the clock: a jump of the load at each change."""
    x = torch.randn(64 if run.quick else 16384, 1024, device=run.device, dtype=torch.bfloat16)

    def step() -> int:
        if int(time.monotonic() / period_s) % 2:
            return heavy()
        for _ in range(20):
            op.softmax(x)
            announce(run, 512, 4)
        run.sync()
        return 0

    return step


def announce(run: Run, blocks: int, warps: int) -> None:
    if not run.cuda:  # torch computed it: no kernel of ours was launched
        hints.announce_launch(blocks, warps, stages=3, tile_bytes=8192)


def held(run: Run, step: Step, cap_w: float, kind: str) -> dict[str, object]:
    scheduled = schedule(power_cap=cap_w, tokens=kind)(step)
    row: dict[str, object] = dict(load_row(run, scheduled, SECONDS))
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


def first_calls(run: Run, step: Step) -> dict[str, float]:
    """Seconds of the first call as it is, which compiles its kernel, and of the first under a cap."""
    took = {}
    for name, call in (("plain_s", step), ("capped_s", schedule(power_cap=10_000.0)(step)), ("again_s", step)):
        begun = time.perf_counter()
        call()
        run.sync()
        took[name] = time.perf_counter() - begun
    return took


def point_cost(run: Run) -> dict[str, float]:
    """Host microseconds of a point that spends and has nothing to wait for; device microseconds of a thousand in line."""
    pacer = make_pacer(0 if run.cuda else -1)
    pacer.obey(PaceCommand())
    pacer.point(restart=True, tokens=0)
    pacer.ahead = 1 << 20
    run.sync()
    n = 1000
    begun = time.perf_counter()
    for _ in range(n):
        pacer.point(tokens=4096)
    host_s = time.perf_counter() - begun
    run.sync()
    return {"host_us": host_s / n * 1e6, "device_us": (time.perf_counter() - begun) / n * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--budget-s", type=float, default=90.0)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        os.environ["TESSERA_SENSORS"] = "modelled"
    faulthandler.dump_traceback_later(args.budget_s + 60.0, exit=True)  # what hangs must not take the others' time
    run = Run(Path(args.out), args.budget_s, args.quick)
    run.rows["machine"] = {
        "gpu": torch.cuda.get_device_name() if run.cuda else "cpu",
        "torch": torch.__version__,
        "date": str(date.today()),
        "quick": args.quick,
    }
    run.row("points", 3.0, lambda: point_cost(run))
    heavy = run.built("products", lambda: products(run))
    if heavy is not None:
        run.row("first calls", 10.0, lambda: first_calls(run, heavy))
        run.row("products, no cap", run.s(3.0) + 1.5, lambda: load_row(run, heavy, 3.0))
        for cap_w in (6.0,) if run.quick else (500.0, 300.0):
            for kind in KINDS:
                name = f"products capped at {cap_w:g} W by {kind}"
                run.row(name, run.s(SECONDS) + 1.5, lambda c=cap_w, k=kind: held(run, heavy, c, k))  # type: ignore[misc]
        both = run.built("in turn", lambda: in_turn(run, heavy))
        for _ in range(2 if both is not None else 0):  # softmax is compiled before it is measured
            both()
            time.sleep(0.3)
        for kind in ("joules", "warps") if both is not None else ():
            name = f"products and softmax in turn at {6 if run.quick else 400} W by {kind}"
            run.row(name, run.s(SECONDS) + 1.5, lambda k=kind: held(run, both, 6.0 if run.quick else 400.0, k))  # type: ignore[misc]
    for name, row in run.rows.items():
        print(f"{name:56s} {text(row)}")


if __name__ == "__main__":
    main()
