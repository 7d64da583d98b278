"""Lag and blur of a power sensor, learnt from ordinary training on simulated boards and from recordings of an H200.

    python benchmarks/measure/learn_sensor.py [--seeds 8] [--json OUT.json] [--waves WAVES.json]

Boards have lags of 5, 15 and 40 ms, of two shapes each, and sensors that look every 20 or 100 ms. Each seed is 20 s of
a training loop of its own (steps of 30 to 300 ms, three to seven kernels, pauses that vary), through `attribute`, as
in a run. `windows` are stretches of 100 ms of another 20 s on the same board: how far their joules are off (median, and
the highest of nine in ten) by the samples alone with an H200's response (`before`) and with the learnt one (`after`), and
by what ran in them (`traced`). A sensor that looks every 20 or 100 ms misses most of a load that changes faster than it
smears: what is left after learning is that. The truth is that of known_truth.py.
The recordings are mixtures of kernels on an H200 (benchmarks/data); what they teach stands beside the fit of square
waves of known times on the same board, recorded on another day, which was not used for anything else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tessera.attribute.fit import response_of
from tessera.attribute.learn_response import Exposed, learn_response
from tessera.attribute.solve import attribute
from tessera.errors import MeasurementError
from tessera.joules import DomainSamples
from tessera.schema import Domain
from tessera.sensors._nvml_power import RingReader
from tessera.sensors.response_store import ResponseFit, SensorResponse, combine
from tessera.trace import PowerTrace

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import attribution
from interval_coverage import timeline_of
from known_truth import T0_NS, Board, Program, Ran, Ring, call_kernel, pick_kernels, run_program
from result_file import write_result

WAVES = Path(__file__).parents[3] / "shared" / "h200" / "waves.json"
SECONDS, WINDOW_NS = 20.0, 100_000_000
BOARDS = {
    "5 ms": Ring(tau_s=0.003, box_s=0.004),
    "5 ms, boxcar": Ring(tau_s=0.0, box_s=0.010),
    "15 ms": Ring(tau_s=0.010, box_s=0.010),
    "15 ms, boxcar": Ring(tau_s=0.0, box_s=0.030),
    "40 ms": Ring(tau_s=0.030, box_s=0.020),
    "40 ms, boxcar": Ring(tau_s=0.0, box_s=0.080),
}
LOOKS_S = (0.020, 0.100)
GOAL_S = 0.002


def training(seed: int) -> Program:
    """A loop of some kernels with pauses: its length, kernels and pauses are the seed's."""
    draw = np.random.default_rng([seed, 1])
    step_s, kernels, pause_s = 0.03 * 10 ** draw.random(), int(draw.integers(3, 8)), float(draw.uniform(0.002, 0.03))

    def program(rng: Any, seconds: float) -> list[tuple[int, float, float]]:
        order, share = pick_kernels(rng, kernels)
        out: list[tuple[int, float, float]] = []
        now = 0.2
        while now < seconds:
            for kernel, part in zip(order, share, strict=True):
                lasts_s = part * step_s * (1 + 0.01 * rng.standard_normal())
                now = call_kernel(out, int(kernel), now, lasts_s, max(2e-4, step_s / 500))
            now += pause_s * rng.lognormal(0.0, 0.5)
        return out

    return program


def describe(ring: Ring) -> Domain:
    """The sensor before anything is learnt: a board that nobody has seen."""
    domain = RingReader(None, None).domain("a board", "")
    return dataclasses.replace(domain, resolution_s=ring.look_s, driver="1")


def power_of(domain: Domain, board: Board) -> PowerTrace:
    column = DomainSamples.of(domain, board.times_ns, board.samples_w)
    return PowerTrace({"gpu0": column}, start_ns=int(board.times_ns[0]), end_ns=int(board.times_ns[-1]))


def learn(domain: Domain, ran: Ran, board: Board) -> ResponseFit | None:
    return next((fit for _, fit in attribute(timeline_of(ran), power_of(domain, board)).learnt), None)


def list_windows(board: Board) -> tuple[Any, Any]:
    """Starts of windows of 100 ms, and their true joules."""
    starts = np.arange(T0_NS + 3 * 10**9, T0_NS + round((SECONDS - 1.0) * 1e9), 130_000_000)
    return starts, np.array([board.true_j(int(start), int(start) + WINDOW_NS) for start in starts])


def window_errors(domain: Domain, board: Board) -> Any:
    """How far windows are off by the samples alone, in percent."""
    starts, truths = list_windows(board)
    power = power_of(domain, board)
    found = [power.energy("gpu0", int(start), int(start) + WINDOW_NS).energy_j for start in starts]
    return 100 * np.abs(np.array(found) / truths - 1)


def traced_errors(domain: Domain, ran: Ran, board: Board) -> Any:
    """How far windows are off by the joules of what ran in them, in percent."""
    starts, truths = list_windows(board)
    timeline = timeline_of(ran)
    table = attribute(timeline, power_of(domain, board))
    begin, end = timeline["start_ns"], timeline["end_ns"]
    found = []
    for start in starts:
        inside_ns = np.clip(np.minimum(end, start + WINDOW_NS) - np.maximum(begin, start), 0, None)
        idle_s = (WINDOW_NS - int(inside_ns.sum())) * 1e-9
        found.append(np.nansum(timeline.energy_j * inside_ns / np.maximum(end - begin, 1)) + idle_s * table.idle_w)
    return 100 * np.abs(np.array(found) / truths - 1)


def measure_board(name: str, look_s: float, seeds: Sequence[int]) -> dict[str, Any]:
    """Errors of lag and blur, how often they were inside their interval, and of windows before and after."""
    ring = dataclasses.replace(BOARDS[name], look_s=look_s)
    true = ring.lag_s, ring.blur_s
    rows, refused = [], 0
    windows: dict[str, list[Any]] = {"before": [], "after": [], "traced": []}
    for seed in seeds:
        ring = dataclasses.replace(ring, regular=bool(seed % 2))
        rng = np.random.default_rng([seed, 2])
        ran, _, board = run_program(training(seed), rng, SECONDS, ring)
        fit = learn(describe(ring), ran, board)
        if fit is None:
            refused += 1
            continue
        rows.append((fit.lag_s - true[0], fit.lag_error_s, fit.blur_s - true[1], fit.blur_error_s))
        ran, _, board = run_program(training(seed), np.random.default_rng([seed, 3]), SECONDS, ring)
        known = combine([fit]).apply(describe(ring))
        windows["before"].append(window_errors(describe(ring), board))
        windows["after"].append(window_errors(known, board))
        windows["traced"].append(traced_errors(known, ran, board))
    lag, lag_error, blur, blur_error = np.array(rows).T
    return {
        "board": name, "look_ms": 1e3 * look_s, "lag_ms": 1e3 * true[0], "blur_ms": 1e3 * true[1], "n": len(rows),
        "refused": refused, "lag_off_ms": 1e3 * float(np.max(np.abs(lag))),
        "blur_off_ms": 1e3 * float(np.max(np.abs(blur))),
        "half_width_ms": [1e3 * float(np.median(e)) for e in (lag_error, blur_error)],
        "inside": [float(np.mean(np.abs(x) <= e)) for x, e in ((lag, lag_error), (blur, blur_error))],
        "default_off_ms": [1e3 * (describe(ring).lag_s - true[0]), 1e3 * (describe(ring).blur_s - true[1])],
        "windows_pct": {k: [float(np.percentile(np.concatenate(v), q)) for q in (50, 90)] for k, v in windows.items()},
    }  # fmt: skip


def learn_mixtures() -> dict[str, ResponseFit]:
    """What each recorded mixture of an H200 teaches."""
    found = {}
    for path in sorted(attribution.DATA.glob("h200_mixture_*.json.gz")):
        recorded = attribution.recording(path)
        table = attribute(
            attribution.timeline_of(recorded), attribution.power_of(recorded), start_ns=recorded["start_ns"],
            end_ns=recorded["end_ns"],
        )  # fmt: skip
        found |= {path.name.removeprefix("h200_mixture_").removesuffix(".json.gz"): fit for _, fit in table.learnt}
    return found


def expose_marks(times_ns: Any, marks: Any) -> tuple[Any, Exposed]:
    """A load whose times are known, on between marks and off between them: which samples to use, and what ran."""
    start, end = marks[:, 0], marks[:, 1]
    edge = np.concatenate([[start[0] - 300_000_000], end]), np.concatenate([start, [end[-1] + 100_000_000]])
    ran = Exposed(
        start_ns=np.concatenate([start, edge[0]]), end_ns=np.concatenate([end, edge[1]]),
        seconds=np.concatenate([end - start, edge[1] - edge[0]]) * 1e-9,
        cls=np.repeat([0, 1], [len(start), len(edge[0])]), prior_w=np.array([600.0, 130.0]), sd_w=np.array([200.0, 40.0]),
    )  # fmt: skip
    return (times_ns - 200_000_000 >= edge[0][0]) & (times_ns <= edge[1][-1]), ran


def learn_marks(times_ns: Any, watts: Any, marks: Any) -> ResponseFit | None:
    """The response that a load shows whose times are known."""
    use, ran = expose_marks(times_ns, marks)
    try:
        return learn_response(times_ns[use], watts[use], ran, response_of(describe(Ring()), 0.02)).fit
    except MeasurementError as exc:
        print(f"  a wave teaches nothing: {exc.why}")
        return None


def learn_waves(path: Path) -> dict[str, ResponseFit]:
    """What each recorded square wave shows."""
    found = {}
    for wave in json.loads(path.read_text()):
        times = np.array([t * 1000 for t, _ in wave["samples_mw"]], np.int64)
        fit = learn_marks(times, np.array([mw / 1e3 for _, mw in wave["samples_mw"]]), np.array(wave["on_us"]) * 1000)
        found |= {f"wave of {wave['period_s']:g} s": fit} if fit else {}
    return found


def show_board(row: dict[str, Any]) -> None:
    lag, blur = row["half_width_ms"]
    print(
        f"{row['board']:<15}{row['look_ms']:>5.0f}{row['lag_ms']:>7.1f}{row['blur_ms']:>6.1f}"
        f"{row['lag_off_ms']:>10.2f} (±{lag:.1f}, in {row['inside'][0]:.0%})"
        f"{row['blur_off_ms']:>8.2f} (±{blur:.1f}, in {row['inside'][1]:.0%})"
        f"{row['default_off_ms'][0]:>+9.1f}{row['default_off_ms'][1]:>+7.1f}"
        + "".join(f"{median:>8.1f}{p90:>6.1f}" for median, p90 in row["windows_pct"].values())
        + f"{row['n']:>4} of {row['n'] + row['refused']}"
    )


def show_fits(title: str, fits: dict[str, ResponseFit]) -> SensorResponse:
    print(f"\n{title}")
    for name, f in fits.items():
        print(f"  {name:<18} lag {1e3 * f.lag_s:5.1f} ±{1e3 * f.lag_error_s:.1f} ms   "
              f"blur {1e3 * f.blur_s:5.1f} ±{1e3 * f.blur_error_s:.1f} ms")  # fmt: skip
    both = combine(list(fits.values()))
    print(f"  {'together':<18} lag {1e3 * both.lag_s:5.1f} ±{1e3 * both.lag_error_s:.1f} ms   "
          f"blur {1e3 * both.blur_s:5.1f} ±{1e3 * both.blur_error_s:.1f} ms")  # fmt: skip
    return both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--waves", type=Path, default=WAVES)
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    print("simulated boards: worst error of the seeds (ms) and of an H200's response; windows: median and p90, %")
    print(f"{'board':<15}{'look':>5}{'lag':>7}{'blur':>6}{'lag off':>12}{'blur off':>24}{'default':>25}"
          f"{'before':>12}{'after':>13}{'traced':>15}")  # fmt: skip
    boards = []
    for name in BOARDS:
        for look_s in LOOKS_S:
            boards.append(measure_board(name, look_s, seeds))
            show_board(boards[-1])
    out: dict[str, Any] = {"boards": boards}
    waves = learn_waves(args.waves) if args.waves.exists() else {}  # they lie beside the developers' checkouts
    for title, fits in (("H200, mixtures", learn_mixtures()), *([("H200, waves", waves)] if waves else [])):
        both = show_fits(title, fits)
        out[title] = {n: {"lag_ms": 1e3 * f.lag_s, "blur_ms": 1e3 * f.blur_s} for n, f in fits.items()} | {
            "together": {
                "lag_ms": 1e3 * both.lag_s,
                "lag_error_ms": 1e3 * both.lag_error_s,
                "blur_ms": 1e3 * both.blur_s,
                "blur_error_ms": 1e3 * both.blur_error_s,
            }
        }
    if args.json:
        write_result(args.json, out)


if __name__ == "__main__":
    main()
