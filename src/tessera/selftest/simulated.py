"""A board that never was: kernels of known watts, in random runs, seen through the ring's lag, blur and noise."""

from __future__ import annotations

import numpy as np

from ..attribute.response import RING_BOX_S, RING_TAU_S, Response
from ..attribute.solve import attribute
from ..joules import DomainSamples
from ..schema import Domain
from ..timeline.columns import Builder, Launch
from ..trace import PowerTrace

# Microseconds and watts of kernels as they were recorded on an H200 (shared/h200/kernels.jsonl), rounded.
KERNELS = {
    "gemm": (170, 690.0),
    "softmax": (220, 515.0),
    "copy": (128, 590.0),
    "attention": (185, 640.0),
    "conv": (80, 620.0),
}
IDLE_W = 118.0
SECONDS = 5.0
_CELL_NS = 100_000
_START_NS = 1_790_000_000_000_000_000
_NOISE = 0.02


def worst_error_pct(seed: int = 7) -> float:
    """The worst kernel's joules against the truth."""
    rng = np.random.default_rng(seed)
    rows, now = [], _START_NS
    names = list(KERNELS)
    while now < _START_NS + SECONDS * 1e9:
        name = names[int(rng.integers(len(names)))]
        each_us, _ = KERNELS[name]
        for _ in range(max(1, round(2000 * 30 ** rng.random() / each_us))):
            rows.append((name, now, now + each_us * 1000))
            now += each_us * 1000 + 1000
        if rng.random() < 0.25:
            now += round(2e6 * 30 ** rng.random())
    build = Builder()
    launch = build.intern_launch(Launch(grid=(1,)))
    for name, start, end in rows:
        build.add("kernel", name, start, end, device=0, stream=7, launch=launch)
    table = attribute(build.build(), _seen(rows, now, rng))
    truth = {name: watts for name, (_, watts) in KERNELS.items()}
    return max(100 * abs(r.energy_j / (truth[r.name] * r.time_s) - 1) for r in table.kernels)


def _seen(rows: list[tuple[str, int, int]], end_ns: int, rng: np.random.Generator) -> PowerTrace:
    """The samples of a ring beside these kernels."""
    grid = np.arange(_START_NS - 200_000_000, end_ns + 200_000_000, _CELL_NS)
    drawn = np.full(len(grid), IDLE_W)
    for name, start, end in rows:
        a, b = (start - grid[0]) / _CELL_NS, (end - grid[0]) / _CELL_NS
        for cell in range(int(a), int(b) + 1):  # shares of a cell: kernels may be shorter than one
            drawn[cell] += (KERNELS[name][1] - IDLE_W) * max(0.0, min(b, cell + 1) - max(a, cell))
    lags = np.arange(0, 0.1, _CELL_NS * 1e-9)
    weights = np.diff(Response(tau_s=RING_TAU_S, box_s=RING_BOX_S).shown(np.append(lags, 0.1)))
    shown = np.convolve(drawn, weights / weights.sum())[: len(grid)]
    picks = np.arange(1200, len(grid) - 100, 200)
    picks = picks + rng.integers(-60, 60, len(picks))
    watts = shown[picks] * (1 + _NOISE * rng.standard_normal(len(picks)))
    domain = Domain(name="gpu0", source="nvml-samples", resolution_s=0.02)
    column = DomainSamples.of(domain, grid[picks], watts)
    return PowerTrace({"gpu0": column}, start_ns=int(grid[picks[0]]), end_ns=int(grid[picks[-1]]))
