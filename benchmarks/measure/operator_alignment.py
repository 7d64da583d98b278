"""Operators of untraced kernels beside the truth: whole traces with the operators of all but a few steps taken away.

    python benchmarks/measure/operator_alignment.py [TRACE ...] [--out FILE.json]

Three steps in the middle keep their operators; one, of a trace with fewer than five. Of every kernel of the others:
has it the operator, shapes, step and forward operator that the whole trace says? Shares are of kernels and of kernel
time. `shapes` are not known where the grid is another. `--million` times the alignment of a million kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result
from tessera.record import CODE
from tessera.timeline import Timeline, kineto
from tessera.timeline.columns import NONE, UNTRACED

RECORDING = Path(__file__).resolve().parents[3] / "shared" / "h200" / "gpt2_train.kineto.json.gz"
STEPS = 3
HOST = [CODE[kind] for kind in ("op", "runtime", "graph_launch")]


def make_light(timeline: Timeline, steps: int = STEPS) -> tuple[Timeline, np.ndarray] | None:
    """A timeline as a light run has it, some steps in its middle traced; and the row of each of its rows before."""
    links = timeline.linked
    if len(links.steps) < steps + 2:
        return None
    first = (len(links.steps) - steps) // 2
    begin, end = links.steps[first].start_ns, links.steps[first + steps - 1].end_ns
    device = np.zeros(len(timeline), bool)
    device[timeline.device_rows] = True
    traced = (links.launch_ns >= begin) & (links.launch_ns < end) & ~(device & (links.op == NONE))
    keep = np.flatnonzero(traced | ~np.isin(timeline["kind"], HOST))
    columns = {name: values[keep] for name, values in timeline.columns.items()}
    columns["external"] = np.where(device & ~traced, UNTRACED, timeline["external"])[keep]
    columns["parent"] = np.full(len(keep), NONE, np.int64)
    light = Timeline(columns, timeline.names, timeline.launches, meta=timeline.meta)
    return light, keep


def compare(timeline: Timeline, light: Timeline, rows: np.ndarray) -> dict[str, float]:
    """Shares of the untraced kernels whose operator is right, by count and by time."""
    before, after = timeline.linked, light.linked
    untraced = np.flatnonzero((light["external"] == UNTRACED) & (after.launch == NONE))
    untraced = untraced[
        before.op[rows[untraced]] != NONE
    ]  # the truth knows it: launched before tracing began, it does not
    was = rows[untraced]
    seconds = (light["end_ns"] - light["start_ns"])[untraced].astype(float)

    def named(source: Timeline, at: np.ndarray) -> np.ndarray:
        return np.where(at == NONE, NONE, source["name"][at])

    op = named(light, after.op[untraced]) == named(timeline, before.op[was])
    top = named(light, after.top_op[untraced]) == named(timeline, before.top_op[was])
    forward = named(light, after.forward_op[untraced]) == named(timeline, before.forward_op[was])
    shapes = after.shapes[untraced] == before.shapes[was]
    step = after.step[untraced] == before.step[was]
    region = named(light, after.region[untraced]) == named(timeline, before.region[was])
    found = after.op[untraced] != NONE
    weight = seconds / max(seconds.sum(), 1.0)
    out: dict[str, float] = {"kernels": len(untraced)}
    for name, right in (("aligned", found), ("operator", op), ("outermost", top), ("forward", forward),
                        ("shapes", shapes), ("step", step), ("region", region)):  # fmt: skip
        out[f"{name}_pct"] = 100 * float(right.mean())
        out[f"{name}_time_pct"] = 100 * float(right @ weight)
    return out


def measure_file(path: Path) -> dict[str, float] | None:
    timeline = kineto.read(path)
    steps = STEPS if len(timeline.linked.steps) >= STEPS + 2 else 1
    made = make_light(timeline, steps)
    return {"traced_steps": steps, **compare(timeline, *made)} if made else None


def time_million(path: Path) -> dict[str, float]:
    """The recorded steps again and again until there are a million kernels; CPU seconds of linking all of it."""
    timeline = kineto.read(path)
    made = make_light(timeline)
    assert made is not None
    light, _ = made
    device = light.device_rows
    span = light.end_ns - light.start_ns
    parts = [light.columns]
    while sum(len(p["kind"]) for p in parts) < 1_000_000 + len(light) - len(device):
        copy = {name: values[device].copy() for name, values in light.columns.items()}
        for edge in ("start_ns", "end_ns"):
            copy[edge] += len(parts) * span
        copy["external"][:], copy["correlation"][:] = UNTRACED, NONE
        parts.append(copy)
    columns = {name: np.concatenate([p[name] for p in parts]) for name in light.columns}
    whole = Timeline(columns, light.names, light.launches, meta=light.meta)
    begun = time.process_time()
    aligned = float((whole.linked.op[whole.device_rows] != NONE).mean())
    return {"kernels": len(whole.device_rows), "link_cpu_s": time.process_time() - begun, "aligned_pct": 100 * aligned}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path, default=[RECORDING])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--million", action="store_true")
    args = parser.parse_args()
    results = {}
    for path in args.traces:
        found = measure_file(path)
        print(path.name, json.dumps(found and {k: round(v, 2) for k, v in found.items()}))
        if found:
            results[path.name] = found
    if args.million:
        results["million"] = time_million(RECORDING)
        print("million", json.dumps(results["million"]))
    if args.out:
        write_result(args.out, results)


if __name__ == "__main__":
    main()
