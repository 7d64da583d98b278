"""The highest mean power over windows of 20 ms to a second, of the recorded mixtures on an H200 limited to 700 W.

    python benchmarks/measure/limit_windows.py [RESULTS.json]

It says how long the board goes above its limit: `estimate/iteration.py` rests on it. The first half second of each recording
is left out: the step from idle.
"""

from __future__ import annotations

import functools
import gzip
import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

BENCHMARKS = Path(__file__).parents[1]
RECORDED = sorted((BENCHMARKS / "data").glob("h200_mixture_*.json.gz"))
WINDOWS_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@functools.cache
def recorded() -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """(seconds, watts) of the samples of each recording."""
    found = []
    for path in RECORDED:
        data = json.loads(gzip.decompress(path.read_bytes()))
        time_s, watts = np.array(data["samples"], float).T
        time_s = (time_s - data["start_ns"]) * 1e-9
        found.append((time_s[time_s > 0.5], watts[time_s > 0.5]))
    return found


def highest_w(window_s: float) -> float:
    """The highest mean over any such window of any recording."""
    found = []
    for time_s, watts in recorded():
        energy = np.concatenate(([0.0], np.cumsum(watts[1:] * np.diff(time_s))))
        starts = time_s[time_s + window_s <= time_s[-1]]
        ends = np.interp(starts + window_s, time_s, energy)
        found += list((ends - np.interp(starts, time_s, energy)) / window_s)
    return float(max(found))


def main() -> None:
    rows = {f"{window_s * 1e3:g} ms": round(highest_w(window_s), 1) for window_s in WINDOWS_S}
    for window, watts in rows.items():
        print(f"{window:>8}  {watts:6.1f} W")
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else BENCHMARKS / "results" / "limit_windows.json"
    write_result(out, {"recordings": len(RECORDED), "limit_w": 700, "highest_mean_w": rows})


if __name__ == "__main__":
    main()
