"""Runs a few kernels in random order with pauses, under a session: its edges show how a power sensor responds.

`tessera calibrate` learns the sensor from this load; `tessera selftest` compares its joules with each kernel's alone.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..attribute.table import EnergyTable
from .region import region
from .session import session

Kernels = Mapping[str, Callable[[], Any]]
# A run of one kernel lasts 2 to 60 ms, as the phases of a training step do; after a quarter of them comes such a pause.
SHORTEST_S, LONGEST, PAUSES = 0.002, 30.0, 0.25
_TIMED_CALLS = 20


def make_kernels(torch: Any) -> Kernels:
    """Return a product, a copy and a softmax on the current CUDA device; each takes a fraction of a millisecond."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(64 << 20, device="cuda", dtype=torch.bfloat16)
    c, d = torch.empty_like(b), torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    return {"product": lambda: a @ a, "copy": lambda: c.copy_(b), "softmax": lambda: d.softmax(-1)}


def time_kernels(torch: Any, kernels: Kernels) -> dict[str, float]:
    """Return the seconds of one call of each kernel."""
    seconds = {}
    for name, kernel in kernels.items():
        kernel()
        torch.cuda.synchronize()
        start_s = time.monotonic()
        for _ in range(_TIMED_CALLS):
            kernel()
        torch.cuda.synchronize()
        seconds[name] = (time.monotonic() - start_s) / _TIMED_CALLS
    return seconds


def run_mixture(
    torch: Any, kernels: Kernels, each_s: Mapping[str, float], seconds: float
) -> tuple[EnergyTable, dict[str, int]]:
    """Run the kernels for `seconds`. Return the joules by region (one per kernel) and the number of calls of each."""
    rng, names, calls = random.Random(7), list(kernels), dict.fromkeys(kernels, 0)
    with tempfile.TemporaryDirectory() as folder:
        with session(mode="operators", record_shapes=False, path=Path(folder, "mixture.tessera")) as sess:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                name = rng.choice(names)
                times = max(1, round(SHORTEST_S * LONGEST ** rng.random() / each_s[name]))
                with region(name):
                    for _ in range(times):
                        kernels[name]()
                calls[name] += times
                torch.cuda.synchronize()
                if rng.random() < PAUSES:
                    time.sleep(SHORTEST_S * LONGEST ** rng.random())
        return sess.energy(), calls
