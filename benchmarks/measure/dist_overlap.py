"""The time of a training step on two Gloo ranks: gradients reduced after the backward pass, beside it, and by DDP.

The ranks talk over a loopback of their own that carries `--mbit` megabits a second (a network namespace with tc; where
that is not permitted, over the machine's loopback, and the result says so). The ways take turns, so that a busy machine
slows all of them; what counts is the median of the ratios within a turn.

    python benchmarks/measure/dist_overlap.py [--mbit 400]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as c10d
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]
from gloo_ranks import GlooRanks
from result_file import write_result
from tessera import dist

RESULT = Path(__file__).resolve().parents[1] / "results" / "dist_overlap.json"
RANKS, LAYERS, WIDTH, BATCH, BUCKET_MB, STEPS = 2, 8, 512, 768, 2.0, 2
BASE = "after backward"
WAYS: dict[str, dict[str, Any]] = {
    BASE: {},
    "beside backward": {},
    "beside backward, deferred": {"defer": True},
    "beside backward, fp8": {"compress": "fp8"},
    "DDP": {},
    "DDP, fp8 by our hook": {"compress": "fp8"},
}
SHAPED = "TESSERA_SHAPED_MBIT"


def make_step(way: str, x: torch.Tensor) -> tuple[Callable[[], None], Any]:
    """One training step in a way, and what reports on it."""
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model: nn.Module = nn.Sequential(*layers)
    if way.startswith("DDP"):
        model = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    is_ours = way not in (BASE, "DDP")
    sync = dist.overlap_gradients(model, bucket_mb=BUCKET_MB, **WAYS[way]) if is_ours else None
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(x).square().mean().backward()
        if way == BASE:
            reduce_in_buckets(list(model.parameters()))
        if "deferred" in way and sync is not None:
            sync.step(optimizer)
        else:
            optimizer.step()
            optimizer.zero_grad()

    return step, sync


def reduce_in_buckets(parameters: list[nn.Parameter]) -> None:
    """The same buckets, once all gradients are there."""
    gradients = [p.grad for p in reversed(parameters) if p.grad is not None]
    while gradients:
        size, bucket = 0, []
        while gradients and (not bucket or size + gradients[0].nbytes <= BUCKET_MB * 2**20):
            bucket.append(gradients.pop(0))
            size += bucket[-1].nbytes
        flat = torch.cat([g.view(-1) for g in bucket]).div_(RANKS)
        c10d.all_reduce(flat)
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def run_rank(rank: int, rounds: int) -> dict[str, Any]:
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))
    made = {way: make_step(way, x) for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way, (step, sync) in made.items():
            c10d.barrier()
            begun = time.perf_counter()
            for _ in range(STEPS):
                step()
            if sync is not None:
                sync.wait()
            if number:  # the first builds buckets
                times[way].append((time.perf_counter() - begun) / STEPS)
    reports = {way: sync.report().to_dict() for way, (_, sync) in made.items() if sync is not None}
    return {"times": times, "reports": reports, "bytes": LAYERS * (WIDTH * WIDTH + WIDTH) * 4}


def enter_shaped_network(mbit: int) -> None:
    """Start again in a network namespace whose loopback is that slow; return where that is not permitted."""
    if SHAPED in os.environ:
        return
    shape = f"ip link set lo up && tc qdisc add dev lo root tbf rate {mbit}mbit burst 256k latency 400ms"
    enter = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c"]
    if subprocess.run([*enter, shape], capture_output=True, check=False).returncode == 0:
        os.environ[SHAPED] = str(mbit)
        os.execvp("unshare", [*enter, f'{shape} && exec "$@"', "sh", sys.executable, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", type=Path, default=RESULT)
    given = parser.parse_args()
    enter_shaped_network(given.mbit)
    with GlooRanks(RANKS, wait_s=3600.0) as group:
        found = group.run(run_rank, given.rounds)[0]
    mbit = int(os.environ[SHAPED]) if SHAPED in os.environ else None
    link = f"{mbit} Mbit/s" if mbit else "the machine's loopback, not slowed down: shaping is not permitted here"
    print(f"{RANKS} ranks, {found['bytes'] / 1e6:.1f} MB of gradients, {given.rounds} turns; link: {link}")
    print(f"{'way':28} {'step':>9} {'against after':>14} {'hidden':>8}")
    rows = {}
    for way, times in found["times"].items():
        ratios = sorted(t / base for t, base in zip(times, found["times"][BASE], strict=True))
        report = found["reports"].get(way)
        rows[way] = {"step_s": median(times), "ratio": median(ratios), "ratios": ratios, "report": report}
        hidden = f"{report['overlap_pct']:7.0f}%" if report else "       -"
        print(f"{way:28} {1e3 * median(times):6.0f} ms {median(ratios):13.2f}x {hidden}")
    write_result(given.save, {"ranks": RANKS, "link_mbit": mbit, "gradient_bytes": found["bytes"], "ways": rows})


if __name__ == "__main__":
    main()
