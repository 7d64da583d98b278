"""Joules of the ten largest kernels of a minute's light run, beside their truth: the recorded GPT-2 on a made board.

    python benchmarks/measure/light_joules.py [--seconds 60] [--step-ms 46] [--out FILE.json]

The 12 recorded steps of GPT-2's training follow each other for a minute, operators known in three of them. Each step
is squeezed to `--step-ms` (kernels as they were, the waits for the profiler shorter) and varies by a percent. Every
kernel with its grid and operator draws watts of its own (attribute/prior.py's, off by a random factor); the ring and
counter are those of known_truth.py. Printed: half-widths, errors, CPU seconds and memory of linking and solving.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from known_truth import GRID_S, T0_NS, Board, make_board
from operator_alignment import RECORDING, make_light
from result_file import write_result
from tessera.attribute.activity import activity
from tessera.attribute.prior import board_of, prior
from tessera.joules import DomainSamples
from tessera.recording import Facts, Recording
from tessera.schema import Domain
from tessera.timeline import Timeline, kineto
from tessera.timeline.columns import NONE, UNTRACED
from tessera.trace import PowerTrace

STATIC_W = 118.0
SCATTER = 0.25
"""Of a kernel's watts around the prior, of what it draws above a waiting board: as attribute/prior.py assumes."""
RING = Domain(name="gpu0", source="nvml-samples", resolution_s=0.02, sample_noise=0.004, label="NVIDIA H200")


def extend_run(light: Timeline, seconds: float, step_s: float, rng: Any) -> Timeline:
    """The steps of a light run again and again; those that were traced once, where they were."""
    links = light.linked
    device = light.device_rows
    in_step = [device[links.step[device] == i] for i in range(len(links.steps))]
    first = [s.start_ns for s in links.steps]
    parts: list[dict[str, Any]] = []
    host = np.setdiff1d(np.arange(len(light)), device)
    regions, at_ns = [], T0_NS + 200_000_000
    for number in range(int(seconds / step_s)):
        index = number if number < len(in_step) else number % len(in_step)
        rows = in_step[index]
        own = {name: values[rows].copy() for name, values in light.columns.items()}
        spans = own["end_ns"] - own["start_ns"]
        wait_ns = np.maximum(np.diff(own["start_ns"], prepend=own["start_ns"][0]) - np.r_[0, spans[:-1]], 0)
        spans = (spans * min(step_s * 1e9 / float(spans.sum()), 1.0)).astype(np.int64)
        room_ns = max(step_s * 1e9 - float(spans.sum()), 0.0)
        squeeze = min(room_ns / max(float(wait_ns.sum()), 1.0), 1.0)
        lasts = (spans * rng.normal(1.0, 0.01)).astype(np.int64)
        starts = at_ns + np.cumsum((wait_ns * squeeze).astype(np.int64)) + np.r_[0, np.cumsum(lasts[:-1])]
        own["start_ns"], own["end_ns"] = starts, starts + lasts
        if number >= len(in_step):
            own["external"][:], own["correlation"][:] = UNTRACED, NONE
        else:  # its operators and calls keep their places around the launches
            near = host[
                (light["start_ns"][host] >= first[index]) & (light["start_ns"][host] < links.steps[index].end_ns)
            ]
            moved = {name: values[near].copy() for name, values in light.columns.items()}
            for edge in ("start_ns", "end_ns"):
                moved[edge] += at_ns - first[index]
            moved = {k: v[moved["kind"] != light.columns["kind"][links.steps[index].row]] for k, v in moved.items()}
            parts.append(moved)
        parts.append(own)
        end_ns = int(own["end_ns"][-1])
        regions.append((at_ns, end_ns))
        at_ns = end_ns + 50_000
    names = list(light.names)
    step = {name: np.full(len(regions), NONE, values.dtype) for name, values in light.columns.items()}
    step["kind"][:] = light["kind"][links.steps[0].row]
    step["name"] = np.arange(len(regions)) + len(names)
    step["start_ns"], step["end_ns"] = np.array(regions, np.int64).T
    parts.append(step)
    columns = {name: np.concatenate([p[name] for p in parts]) for name in light.columns}
    names += [f"ProfilerStep#{i}" for i in range(len(regions))]
    return Timeline(columns, names, light.launches, meta=light.meta)


def draw_power(timeline: Timeline, seconds: float, rng: Any) -> tuple[np.ndarray, Board]:
    """The true joules of every row, and the board that drew them."""
    ran = activity(timeline, timeline.device_rows, timeline.linked)
    board = board_of("NVIDIA H200", np.zeros(0))
    lasted = (ran.end_ns - ran.start_ns) * 1e-9
    typical = np.bincount(ran.cls, lasted) / np.bincount(ran.cls)
    watts = prior(timeline, ran.first, typical, timeline.linked, board).watts
    watts = STATIC_W + (watts - STATIC_W) * np.clip(rng.normal(1.0, SCATTER, len(watts)), 0.4, 1.6)
    wander = np.interp(ran.start_ns, T0_NS + np.arange(seconds + 2) * 1e9, rng.standard_normal(int(seconds) + 2))
    drawn = watts[ran.cls] * (1 + 0.01 * wander)
    edges, so_far = np.empty(2 * len(drawn)), np.zeros(2 * len(drawn))
    edges[0::2], edges[1::2] = ran.start_ns - T0_NS, ran.end_ns - T0_NS
    so_far[1::2] = np.cumsum((drawn - STATIC_W) * lasted)
    so_far[2::2] = so_far[1:-1:2]
    grid = np.arange(round((seconds + 1) / GRID_S) + 1) * GRID_S
    power = STATIC_W + np.diff(np.interp(grid, edges * 1e-9, so_far)) / GRID_S
    true_j = np.full(len(timeline), np.nan)
    true_j[ran.rows] = drawn * lasted
    return true_j, make_board(power, rng)


def measure(seconds: float, step_s: float, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    made = make_light(kineto.read(RECORDING))
    assert made is not None
    timeline = extend_run(made[0], seconds, step_s, rng)
    true_j, board = draw_power(timeline, seconds, rng)
    column = DomainSamples.of(RING, board.times_ns, board.samples_w)
    column = dataclasses.replace(column, ticks_ns=board.ticks_ns, ticks_j=board.ticks_j)
    start_ns, end_ns = timeline.start_ns, timeline.end_ns
    power = PowerTrace({"gpu0": column}, start_ns=start_ns, end_ns=end_ns)
    timeline.links = None
    begun_s = time.process_time()
    links = timeline.linked
    linked_s = time.process_time() - begun_s
    facts = Facts(kind="run", span_ns=(start_ns, end_ns), windows=[(start_ns, end_ns)])  # type: ignore[arg-type]
    table = Recording(timeline, power, facts=facts).energy()
    solved_s = time.process_time() - begun_s - linked_s
    rows = timeline.device_rows
    top = []
    for row in table.top(10):
        own = rows[timeline["name"][rows] == timeline.names.index(row.name)]
        truth = float(true_j[own].sum())
        top.append({"name": row.name[:50], "energy_j": row.energy_j, "half_width_pct": 100 * row.error_j / row.energy_j,
                    "off_pct": 100 * (row.energy_j / truth - 1), "holds": abs(row.energy_j - truth) <= row.error_j})  # fmt: skip
    return {
        "kernels": len(rows),
        "operators_share": table.operators.share if table.operators else None,
        "samples": len(board.times_ns),
        "classes": activity(timeline, rows, links).classes,
        "link_cpu_s": linked_s,
        "solve_cpu_s": solved_s,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "top": top,
        "widest_half_width_pct": max(t["half_width_pct"] for t in top),
        "within": sum(t["holds"] for t in top),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--step-ms", type=float, default=46.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = measure(args.seconds, args.step_ms * 1e-3, args.seed)
    for row in found["top"]:
        print(f"{row['name']:50} {row['energy_j']:9.1f} J ± {row['half_width_pct']:5.1f}%  off {row['off_pct']:+5.1f}%")
    print(json.dumps({k: v for k, v in found.items() if k != "top"}))
    if args.out:
        write_result(args.out, found)


if __name__ == "__main__":
    main()
