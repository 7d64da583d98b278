"""Fit the NVML ring's and counter's response from the project's own H200 recording.

    python benchmarks/fit/fit_response.py [RECORDING.json.gz]

The mixture phase has runs of 2-60 ms of four kernels and pauses, each with known times and (unlike a throttled
GEMM's) nearly constant power. Each sample is modelled as the true power, delayed and smeared by a boxcar and an
exponential; the level of each kernel is solved for, the response is scanned. What is printed are the best fits: the
shape is not unique, the mean delay is (±1 ms), and only that enters the lag.
The counter's delay is found relative to the ring's: where integrals between its ticks agree best.
"""

from __future__ import annotations

import gzip
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

RECORDING = Path(__file__).parents[1] / "data" / "h200_sensor.json.gz"
RESULT = Path(__file__).parents[1] / "results" / "fit_response.json"
STEP_MS = 0.25


def load(path: Path) -> dict[str, Any]:
    """The recording, with times in milliseconds since its first ring sample."""
    with gzip.open(path, "rt") as f:
        data: dict[str, Any] = json.load(f)
    if "ticks" not in data:  # as record_sensor.py wrote it: every poll of the counter
        polls = data["counter"]
        data["ticks"] = [[a[0], b[1], b[2]] for a, b in itertools.pairwise(polls) if a[2] != b[2]]
    origin = data["ring"][0][0]
    data["ring"] = np.array([[(t - origin) / 1e3, mw / 1e3] for t, mw in data["ring"]])
    data["ticks"] = np.array([[(a - origin) / 1e3, (b - origin) / 1e3, mj / 1e3] for a, b, mj in data["ticks"]])
    data["phases"] = {
        p["name"]: [(k, (a - origin) / 1e3, (b - origin) / 1e3) for k, a, b, _ in p["marks"]] for p in data["phases"]
    }
    return data


def activity(marks: list[tuple[str, float, float]], grid: np.ndarray) -> np.ndarray:
    """One row per kernel (and one for pauses): 1 while it runs."""
    kinds = sorted({k for k, _, _ in marks})
    rows = np.zeros((len(kinds) + 1, len(grid)))
    for kind, start, end in marks:
        rows[kinds.index(kind), np.searchsorted(grid, start) : np.searchsorted(grid, end)] = 1.0
    rows[-1] = 1.0 - rows[:-1].sum(axis=0)
    return rows


def smear(rows: np.ndarray, tau_ms: float) -> np.ndarray:
    """Exponential low-pass of every row."""
    if tau_ms == 0:
        return rows
    out, state, a = np.empty_like(rows), rows[:, 0].copy(), STEP_MS / tau_ms
    for i in range(rows.shape[1]):
        state += a * (rows[:, i] - state)
        out[:, i] = state
    return out


def fit_ring(data: dict[str, Any]) -> list[tuple[float, float, float, float, float]]:
    """(rms residual W, exponential ms, boxcar ms, delay ms, mean delay ms), best first."""
    marks = data["phases"]["mixture"]
    start, end = marks[0][1], marks[-1][2]
    grid = np.arange(start - 300, end + 300, STEP_MS)
    samples = data["ring"][(data["ring"][:, 0] > start + 100) & (data["ring"][:, 0] < end)]
    found = []
    for tau in (0.0, 4.0, 6.0, 8.0, 10.0, 12.0):
        rows = smear(activity(marks, grid), tau)
        sums = np.concatenate([np.zeros((len(rows), 1)), np.cumsum(rows, axis=1) * STEP_MS], axis=1)
        edges = np.append(grid, grid[-1] + STEP_MS)
        for box in (1.0, 8.0, 16.0, 20.0, 24.0):
            for delay in np.arange(-4.0, 12.0, 1.0):
                x = samples[:, 0] - delay
                design = np.array([np.interp(x, edges, s) - np.interp(x - box, edges, s) for s in sums]).T / box
                level, *_ = np.linalg.lstsq(design, samples[:, 1], rcond=None)
                rms = float(np.sqrt(np.mean((design @ level - samples[:, 1]) ** 2)))
                found.append((rms, tau, box, float(delay), float(delay) + box / 2 + tau))
    return sorted(found)


def tick_times(ticks: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """Each tick's time, by the one phase (of a 100 ms period) that lies inside every enclosure; and how well it holds."""
    low, high = ticks[:, 0], ticks[:, 1]
    candidates = np.arange(0.0, 100.0, 0.1)
    inside = [np.mean(np.mod(c - low, 100.0) <= high - low) for c in candidates]
    best = candidates[np.flatnonzero(np.array(inside) >= max(inside))]
    phase = float(np.median(best))
    known_ms = float(np.ptp(best)) / 2
    print(
        f"counter ticks: period 100 ms, {max(inside):.1%} of {len(ticks)} enclosures hold one phase, known to ±{known_ms:.1f} ms"
    )
    held = {"period_ms": 100.0, "hold_one_phase": float(max(inside)), "enclosures": len(ticks), "known_to_ms": known_ms}
    return phase + np.round(((low + high) / 2 - phase) / 100.0) * 100.0, held


def fit_counter(data: dict[str, Any]) -> dict[str, Any]:
    """How far ahead of the ring the counter is, by agreement over one and two ticks."""
    times, watts = data["ring"][:, 0], data["ring"][:, 1]
    sums = np.concatenate([[0.0], np.cumsum((watts[1:] + watts[:-1]) / 2 * np.diff(times))]) / 1e3
    (ticks, found), joules = tick_times(data["ticks"]), data["ticks"][:, 2]
    found["median_error_pct_by_delay_ms"] = {}
    print("ring delayed by d ms against the counter: median |error| % over 100 ms and 200 ms windows")
    for d in range(0, 13, 2):
        cells = []
        for name in ("wave-0.2", "wave-0.4", "mixture"):
            marks = data["phases"][name]
            for count in (1, 2):
                i = np.flatnonzero((ticks > marks[0][1] + 100) & (ticks < marks[-1][2]))[:-count]
                i = i[np.abs(ticks[i + count] - ticks[i] - 100 * count) < 1]
                truth = joules[i + count] - joules[i]
                got = np.interp(ticks[i + count] + d, times, sums) - np.interp(ticks[i] + d, times, sums)
                cells.append(float(np.median(np.abs(got / truth - 1))) * 100)
        found["median_error_pct_by_delay_ms"][d] = cells
        print(f"  d = {d:2d} ms   " + " ".join(f"{c:5.1f}" for c in cells))
    return found


def describe(data: dict[str, Any]) -> dict[str, Any]:
    """The figures that docs/measuring.md and the comments in the code quote from the recording."""
    low, median, high = np.percentile(np.diff(data["ring"][:, 0]), [0, 50, 100])
    print(f"ring: a sample every {median:.1f} ms ({low:.0f}-{high:.0f} ms)")
    print("calls, median ms on an idle / a busy device:")
    for name, idle in data["costs_idle"].items():
        busy = data["costs_busy"][name]
        print(f"  {name:14s} {idle['median_us'] / 1e3:6.2f} / {busy['median_us'] / 1e3:.2f}")
    host_ns, round_trip_ns, device_ms = (np.array(c) for c in zip(*data["event_clock"], strict=True))
    slope = np.polyfit(host_ns / 1e6, device_ms, 1)[0]
    print(
        f"CUDA event round trip {min(round_trip_ns) / 1e3:.0f}-{max(round_trip_ns) / 1e3:.0f} us, clock {1e6 * (slope - 1):+.1f} ppm"
    )
    ticks, joules = data["ticks"][:, :2].mean(axis=1), data["ticks"][:, 2]
    _, start, end = data["phases"]["steady-gemm"][0]
    watts = [
        np.diff(joules[(ticks > start + a * 1e3) & (ticks < start + b * 1e3)]) / 0.1
        for a, b in ((0.2, 3), (3, 6), (6, (end - start) / 1e3))
    ]
    spread = ", ".join(f"{w.min():.0f}-{w.max():.0f}" for w in watts)
    print(f"GEMM at the power limit, W by 100 ms ticks in its first 3 s, then 3-6 s, then on: {spread}")
    return {
        "ring_ms": {"median": float(median), "min": float(low), "max": float(high)},
        "calls_ms": {
            n: {"idle": i["median_us"] / 1e3, "busy": data["costs_busy"][n]["median_us"] / 1e3}
            for n, i in data["costs_idle"].items()
        },
        "event_round_trip_us": [float(min(round_trip_ns)) / 1e3, float(max(round_trip_ns)) / 1e3],
        "gemm_at_the_limit_w": {
            name: [float(w.min()), float(w.max())]
            for name, w in zip(("first 3 s", "3-6 s", "after 6 s"), watts, strict=True)
        },
    }


def main() -> None:
    recording = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDING
    data = load(recording)
    figures = describe(data)
    print("ring response: rms W, exponential, boxcar, delay, mean delay (ms)")
    best = fit_ring(data)[:8]
    for row in best:
        print("  " + "  ".join(f"{v:6.1f}" for v in row))
    names = ("rms_w", "exponential_ms", "boxcar_ms", "delay_ms", "mean_delay_ms")
    figures["ring_response"] = [dict(zip(names, row, strict=True)) for row in best]
    figures["counter"] = fit_counter(data)
    if recording == RECORDING:
        write_result(RESULT, figures)


if __name__ == "__main__":
    main()
