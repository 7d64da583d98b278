"""The slow, obvious integral that the fast ones are compared with."""

from __future__ import annotations

import math
from itertools import pairwise


def brute(times: list[int], watts: list[float], start: int, end: int, *, mean: bool) -> tuple[float, float]:
    """Joules and seen seconds between two times, from the overlap of the window with each interval."""
    joules = covered = 0.0
    for (t0, w0), (t1, w1) in pairwise(zip(times, watts, strict=True)):
        lo, hi = max(start, t0), min(end, t1)
        if hi <= lo or math.isnan(w1):
            continue
        flat = mean or math.isnan(w0)
        level = w1 if flat else w0 + (w1 - w0) * (((lo - t0) + (hi - t0)) / 2 / (t1 - t0))
        joules += level * (hi - lo) * 1e-9
        covered += (hi - lo) * 1e-9
    return joules, covered
