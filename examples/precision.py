"""What a lower precision saves: FLOP per joule of a product, and joules until a small model reaches the same loss.

python examples/precision.py [CHIP]

FLOP per joule (which is FLOP/s per watt) is predicted for the chip, and measured beside it where a GPU is here. The
small model is trained here, its products rounded as the chip would (emulated on a CPU), and the steps to a given loss
are counted. The joules of a step are modelled: its products only, at the model's own size, and as if its layers and its
batch were 64 times larger. That the steps would be the same at that size is an assumption, not a finding.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tessera import monitor
from tessera.hardware import lookup
from tessera.op import lowprec
from tessera.op.product_cost import predict_energy_j
from tessera.op.training import PrecisionSchedule, dual_precision, precision_schedule

SIZES = (1024, 4096, 8192)
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")
WIDTH, BATCH, WIDER, MOST_STEPS, SEEDS = 64, 256, 64, 600, 2
GOAL = 0.005  # of the loss at the start: near enough to the floor of fp8's noise that precision shows
Plan = tuple[str, str, str]  # name, forward, backward; a plan with commas is a schedule
PLANS: tuple[Plan, ...] = (
    ("fp32", "fp32", "fp32"),
    ("tf32", "tf32", "tf32"),
    ("bf16 forward, fp32 backward", "bf16", "fp32"),
    ("bf16", "bf16", "bf16"),
    ("fp8 forward, bf16 backward", "fp8", "bf16"),
    ("fp32, then bf16, then fp8", "fp32 until 10, bf16 until 30, then fp8", "bf16"),
)


def flop_per_joule(chip: str) -> None:
    print(f"GFLOP per joule of a square product, casts from 16 bits to fp8 included, predicted for {chip}")
    print(f"  {'':6}" + "".join(f"{n:>9}" for n in SIZES) + ("   measured here" if torch.cuda.is_available() else ""))
    for precision in PRECISIONS:
        dtype = (
            torch.float32 if precision in ("fp32", "tf32") else torch.float16 if precision == "fp16" else torch.bfloat16
        )
        predicted = [2.0 * n**3 / predict_energy_j(precision, n, n, n, 1, dtype, dtype, chip) for n in SIZES]
        cells = "".join(f"{value * 1e-9:9.0f}" for value in predicted)
        found = (
            "".join(f"{measured(precision, n, dtype) * 1e-9:9.0f}" for n in SIZES) if torch.cuda.is_available() else ""
        )
        print(f"  {precision:6}{cells}   {found}")


def measured(precision: str, n: int, dtype: torch.dtype, seconds: float = 1.0) -> float:
    """FLOP per joule on the GPU here: the product over and over, once the board is warm."""
    a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))

    def run(seconds: float) -> int:
        end, count = time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            for _ in range(8):
                lowprec.mm(a, b, precision)
            torch.cuda.synchronize()
            count += 8
        return count

    run(0.3)
    with monitor.energy_scope("product") as energy:
        count = run(seconds)
    return 2.0 * n**3 * count / energy.energy_j


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def steps_to_goal(forward: str, backward: str, seed: int) -> tuple[int, list[str]]:
    """How many steps until the loss is a given share of its start, and the precision of each."""
    model = network(seed)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = precision_schedule(forward, backward=backward) if "," in forward else None
    rng = torch.Generator().manual_seed(100 + seed)
    used: list[str] = []
    start = None
    for step in range(MOST_STEPS):
        x = torch.randn(BATCH, 16, generator=rng)
        y = torch.sin(x[:, :1]) + 0.5 * x[:, 1:2]
        used.append(schedule.precision if schedule else forward)
        with scope_of(schedule, forward, backward):
            loss = F.mse_loss(model(x), y)
        value = float(loss.detach())
        start = value if start is None else start
        if value < GOAL * start:
            return step + 1, used
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if schedule:
            schedule.observe(loss)
    return MOST_STEPS, used


def scope_of(schedule: PrecisionSchedule | None, forward: str, backward: str) -> AbstractContextManager[Any]:
    if schedule is not None:
        return schedule.apply()
    return nullcontext() if forward == "fp32" else dual_precision(forward=forward, backward=backward)


def step_joules(forward: str, backward: str, width: int, chip: str) -> float:
    """Modelled joules of the products of a step: each layer once forward, and twice (input, weight) backward."""
    cost: Callable[..., float] = predict_energy_j
    joules, batch = 0.0, BATCH * width // WIDTH
    for inputs, outputs in ((16, width), (width, width), (width, 1)):
        joules += cost(forward, batch, outputs, inputs, 1, torch.float32, torch.float32, chip)
        joules += cost(backward, batch, inputs, outputs, 1, torch.float32, torch.float32, chip)
        joules += cost(backward, inputs, outputs, batch, 1, torch.float32, torch.float32, chip)
    return joules


def joules_to_goal(chip: str) -> None:
    print(f"\nSteps until the loss is {GOAL:.1%} of its start: counted here, {SEEDS} seeds, products rounded as asked;")
    print(f"joules of their products on {chip}: modelled, the larger width assuming the same steps")
    print(f"  {'':30}{'steps':>7}{f'width {WIDTH}':>13}{f'width {WIDER * WIDTH}':>13}{'of fp32':>9}")
    base = None
    for name, forward, backward in PLANS:
        runs = [steps_to_goal(forward, backward, seed) for seed in range(SEEDS)]
        steps = sum(count for count, _ in runs) / SEEDS
        reached = all(count < MOST_STEPS for count, _ in runs)
        small, wide = (
            sum(step_joules(p, backward, width, chip) for _, used in runs for p in used) / SEEDS
            for width in (WIDTH, WIDER * WIDTH)
        )
        base = wide if base is None else base
        note = "" if reached else "  (goal not reached)"
        print(f"  {name:30}{steps:7.0f}{small:11.3f} J{wide:11.1f} J{wide / base:9.0%}{note}")


def main() -> None:
    chip = lookup(sys.argv[1] if len(sys.argv) > 1 else "h200").id
    flop_per_joule(chip)
    joules_to_goal(chip)


if __name__ == "__main__":
    main()
