"""Joules attributed to kernels and regions of recorded mixtures, beside what each takes alone. Needs no GPU.

    python benchmarks/measure/attribution.py [RECORDING ...] [--json OUT.json] [--fit]

Recordings are those of `benchmarks/device/record_mixture.py` (by default `benchmarks/data/h200_mixture_*.json.gz`). Two
truths stand beside each load: `alone`, back to back for more than a second, and `bursts`, alone in runs of 2-60 ms with
pauses. A load that the power limit holds runs at a lower clock in the first than in a mixture (`time` is its duration
in the mixture over the one alone): slower and cheaper per call. `here` is the truth at the mixture's own speed, read
between those two by the duration of a call. Plain non-negative least squares (`nnls`) is the peer.
`--fit` prints how well other sensor responses and speed exponents fit the recordings.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tessera.attribute import activity as activity_module
from tessera.attribute import fit as response_module
from tessera.attribute.fit import Response, response_of
from tessera.attribute.solve import _Problem, attribute
from tessera.attribute.table import EnergyTable
from tessera.joules import DomainSamples
from tessera.record import CODE
from tessera.schema import Domain
from tessera.timeline import Builder, Launch, Timeline
from tessera.trace import PowerTrace

sys.path.insert(0, str(Path(__file__).parents[1]))
from result_file import write_result

# Which kernels a load launches: parts of their names, or of name and grid. Memsets belong to the kernel they go before.
LOADS = {
    "dev": {"gemm": ["nvjet"], "attention": ["sdpa"], "copy": ["DtoD"], "softmax": ["SoftMax"], "conv": ["implicit_gemm"]},
    "more": {
        "gemm.small": ["nvjet_sm90_tst_128x64", "nvjet_sm90_tst_128x128"], "gemm.tf32-off": ["sm80_xmma_gemm"],
        "gelu": ["Gelu"], "layer_norm": ["layer_norm"], "sum": ["reduce_kernel"], "attention": ["sdpa"],
        "transpose": ["elementwise_kernel<128"], "conv1x1": ["128x192", "192x192"], "fill": ["FillFunctor"],
    },
    "pairs": {
        "gemm+fill": ["[2, 64, 1]", "FillFunctor"], "softmax+copy": ["SoftMax", "DtoD"], "gemm": ["[2, 66, 1]"],
        "silu": ["silu"],
    },
    "final": {
        "gemm": ["nvjet"], "attention": ["sdpa"], "copy": ["DtoD"], "softmax": ["oftMax"],
        "conv": ["implicit_gemm", "xmma_fprop", "cudnn_infer"], "rms_norm": ["rms_norm", "RMSNorm", "layer_norm"],
    },
}  # fmt: skip
LOADS |= dict.fromkeys(("regions5", "regions20", "regions100"), LOADS["dev"])
SAME_SPEED = 0.03
DATA = Path(__file__).parents[1] / "data"
KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
RING = Domain(
    name="gpu0", source="nvml-samples", label="NVIDIA H200", resolution_s=0.02, lag_s=0.015, blur_s=0.012,
    sample_noise=0.012, gain_error=0.005,
)  # fmt: skip


def recording(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as f:
        return json.load(f)


def timeline_of(found: dict[str, Any]) -> Timeline:
    """The recorded kernels; each run of a load is a region named after it, so that loads can be told from kernels."""
    build = Builder()
    kernels = found["kernels"]
    rows = np.array(kernels["rows"], dtype=np.int64)
    parts = [name.split("|") for name in kernels["names"]]
    name = np.array([build.intern(p[1]) for p in parts])
    kind = np.array([CODE[KINDS[p[0]]] for p in parts])
    launch = np.array(
        [build.intern_launch(Launch(grid=tuple(json.loads(p[2])) if p[2] != "None" else None)) for p in parts]
    )
    start = rows[:, 1] + kernels["first_ns"]
    build.extend(
        {
            "kind": kind[rows[:, 0]], "name": name[rows[:, 0]], "start_ns": start, "end_ns": start + rows[:, 2],
            "device": np.zeros(len(rows)), "stream": np.full(len(rows), 7), "launch": launch[rows[:, 0]],
        },
        len(rows),
    )  # fmt: skip
    for load, _, begin, end in found["runs"]:
        if load == "region":  # the host waited for the device on both sides: its times are the device's
            build.add("region", load, begin, end, thread=1)
    return build.build()


def power_of(found: dict[str, Any]) -> PowerTrace:
    times = np.array([int(t) for t, _ in found["samples"]])
    column = DomainSamples.of(RING, times, np.array([w for _, w in found["samples"]]))
    return PowerTrace({"gpu0": column}, start_ns=found["start_ns"], end_ns=found["end_ns"])


def rows_of(timeline: Timeline, patterns: list[str]) -> Any:
    """Device rows whose name (with its grid) holds one of the patterns."""
    keys = {}
    found = []
    for row in timeline.device_rows.tolist():
        key = (int(timeline["name"][row]), int(timeline["launch"][row]))
        if key not in keys:
            text = f"{timeline.names[key[0]]} {list(timeline.launches[key[1]].grid or ())}"
            keys[key] = any(p in text for p in patterns)
        if keys[key]:
            found.append(row)
    return np.array(found, dtype=np.int64)


def load_rows(found: dict[str, Any], timeline: Timeline, table: EnergyTable) -> list[dict[str, Any]]:
    """Joules per call of every load: attributed, alone, in bursts."""
    lines = []
    for load, patterns in LOADS[found["set"]].items():
        rows = rows_of(timeline, patterns)
        if len(rows) == 0:
            print(f"  {load}: no kernel of {patterns} in the recording")
            continue
        names = np.unique(timeline["name"][rows])
        calls = max(np.count_nonzero(timeline["name"][rows] == n) for n in names)
        joules = float(np.nansum(timeline.energy_j[rows])) / calls
        seconds = float(np.sum(timeline["end_ns"][rows] - timeline["start_ns"][rows])) * 1e-9 / calls
        alone = found["steady"][load]
        burst = found.get("bursts", {}).get(load)
        lines.append(
            {
                "load": load, "attributed_j": joules, "error_j": half_width(timeline, table, rows) / calls,
                "alone_j": alone["joules"], "time_ratio": seconds / alone["seconds"],
                "burst_j": burst["joules"] if burst else None, "calls": int(calls),
                "here_j": at_this_speed(alone, burst, seconds),
            }
        )  # fmt: skip
    return lines


def at_this_speed(alone: dict[str, float], burst: dict[str, float] | None, seconds: float) -> float | None:
    """Joules per call at the duration the load had in the mixture: between the two states it was measured alone in."""
    if burst is None:
        return None
    total_j = burst["joules"] * burst["calls"] + 140.0 * burst["idle_s"]
    burst_s = (total_j / burst["watts"] - burst["idle_s"]) / burst["calls"]
    if abs(burst_s / alone["seconds"] - 1) < 0.01:
        return 0.5 * (burst["joules"] + alone["joules"])
    share = min(max((seconds - alone["seconds"]) / (burst_s - alone["seconds"]), 0.0), 1.0)
    return alone["joules"] + share * (burst["joules"] - alone["joules"])


def half_width(timeline: Timeline, table: EnergyTable, rows: Any) -> float:
    """Of a load's joules: its kernel's, or its group's where the samples cannot tell its kernels apart."""
    names = {timeline.names[int(n)] for n in np.unique(timeline["name"][rows])}
    if len(names) == 1:
        mine = {(timeline.names[int(n)]) for n in np.unique(timeline["name"][rows])}
        single = [r for r in table.kernels if r.name in mine]
        share = float(np.nansum(timeline.energy_j[rows])) / single[0].energy_j
        return single[0].error_j * share
    together = [g for g in table.groups if names <= set(g.name.split(" + "))]
    return together[0].error_j if together else sum(r.error_j for r in table.kernels if r.name in names)


def plain(found: dict[str, Any], timeline: Timeline) -> dict[str, float]:
    """The peer: non-negative least squares of the lag-shifted samples on what ran, no prior, no response."""
    power = power_of(found).columns["gpu0"]
    device = timeline.device_rows
    names = np.unique(timeline["name"][device])
    box = Response(tau_s=0.0, box_s=0.020, dead_s=RING.lag_s - 0.010)
    from tessera.attribute.fit import exposure

    keep = (power.times_ns > found["start_ns"] + 60_000_000) & (power.times_ns < found["end_ns"])
    start, end = timeline["start_ns"][device], timeline["end_ns"][device]
    cls = np.searchsorted(names, timeline["name"][device])
    design = exposure(power.times_ns[keep], start, end, (end - start) * 1e-9, cls, len(names), box)
    design = np.column_stack([design, 1.0 - design.sum(axis=1)])
    watts = nnls(design, power.watts[keep])
    return {timeline.names[int(n)]: float(w) for n, w in zip(names, watts, strict=False)}


def nnls(design: Any, samples: Any) -> Any:
    """Non-negative least squares by coordinate descent (small, convex)."""
    gram, right = design.T @ design, design.T @ samples
    x = np.full(design.shape[1], 300.0)
    for _ in range(20000):
        for k in range(len(x)):
            if gram[k, k] > 0:
                x[k] = max(0.0, x[k] + (right[k] - gram[k] @ x) / gram[k, k])
    return x


def region_row(found: dict[str, Any], lines: list[dict[str, Any]], table: EnergyTable) -> dict[str, Any]:
    """Joules per pass of the repeated region, beside the same content back to back."""
    calls = next(r[1] for r in found["runs"] if r[0] == "calls")
    row = next(r for r in table.regions if r.name == "region")
    here = {r["load"]: r["here_j"] for r in lines}
    return {
        "set": found["set"], "calls": row.calls, "attributed_j": row.energy_j / row.calls,
        "error_j": row.error_j / row.calls, "alone_j": found["steady"]["region"]["joules"],
        "here_j": sum(here[n] * c for n, c in calls.items()) if all(here[n] for n in calls) else None,
    }  # fmt: skip


def show(
    found: dict[str, Any], lines: list[dict[str, Any]], table: EnergyTable, peer: dict[str, float], timeline: Timeline
) -> None:
    total = found["total"]["joules"]
    print(f"\n{found['set']} (seed {found['seed']}): {table.energy_j:.0f} J attributed of {total:.0f} J by the counter's scope, "
          f"idle {table.idle_w:.0f} W")  # fmt: skip
    print(
        f"  {'load':<16}{'J/call':>9}{'+- %':>7}{'alone':>9}{'off %':>8}{'bursts':>9}{'off %':>8}{'time':>7}{'nnls off %':>12}"
    )
    for r in lines:
        rows = rows_of(timeline, LOADS[found["set"]][r["load"]])
        seconds = (timeline["end_ns"][rows] - timeline["start_ns"][rows]) * 1e-9
        naive = (
            sum(peer[timeline.names[int(n)]] * s for n, s in zip(timeline["name"][rows], seconds, strict=True))
            / r["calls"]
        )
        r["nnls_j"] = naive
        burst = (
            f"{r['burst_j']:>9.4f}{100 * (r['attributed_j'] / r['burst_j'] - 1):>+8.1f}" if r["burst_j"] else " " * 17
        )
        print(f"  {r['load']:<16}{r['attributed_j']:>9.4f}{100 * r['error_j'] / r['attributed_j']:>7.1f}{r['alone_j']:>9.4f}"
              f"{100 * (r['attributed_j'] / r['alone_j'] - 1):>+8.1f}{burst}{r['time_ratio']:>7.3f}"
              f"{100 * (naive / r['alone_j'] - 1):>+12.1f}")  # fmt: skip


def summary(lines: list[dict[str, Any]], truth: str) -> dict[str, Any]:
    """Mean and worst error against one truth, and the share of truths inside the 90% interval."""
    known = [r for r in lines if r[truth]]
    if not known:
        return {}
    off = [abs(r["attributed_j"] / r[truth] - 1) for r in known]
    inside = [abs(r["attributed_j"] - r[truth]) <= r["error_j"] for r in known]
    return {"mean_pct": 100 * float(np.mean(off)), "worst_pct": 100 * max(off), "inside_pct": 100 * float(np.mean(inside)), "n": len(off)}  # fmt: skip


def fit(paths: list[Path]) -> None:
    """Root mean square residual (W) of other responses and exponents, mean over the recordings."""
    found = [recording(p) for p in paths]
    lines = []
    for tau, box, dead, speed in itertools.product((7, 9, 11, 13), (2, 6, 10, 16), (0, 2), (0.0, 1.0, 1.7, 2.5)):
        activity_module.SPEED_EXPONENT = speed
        response_module.RING_TAU_S, response_module.RING_BOX_S = tau * 1e-3, box * 1e-3
        noise = []
        for f in found:
            timeline = timeline_of(f)
            activity = activity_module.activity(timeline, timeline.device_rows, timeline.linked)
            column = power_of(f).columns["gpu0"]
            response = response_of(RING, 0.02).later(dead * 1e-3)
            from tessera.attribute.prior import board_of

            links = type("L", (), {"op": np.full(len(timeline), -1)})()
            begin = max(f["start_ns"], int(activity.start_ns[0]))
            problem = _Problem.of(timeline, links, activity, [(begin, f["end_ns"])], board_of("NVIDIA H200", column.watts), response, column.times_ns, column.watts)  # fmt: skip
            noise.append(problem.solve_with(response).noise_w)
        lines.append((float(np.mean(noise)), tau, box, dead, speed, noise))
    for mean, tau, box, dead, speed, noise in sorted(lines)[:12]:
        print(f"tau {tau} ms, box {box} ms, dead {dead} ms, exponent {speed}: {mean:.1f} W  {np.round(noise, 1)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="*", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fit", action="store_true")
    args = parser.parse_args()
    paths = args.recordings or sorted(DATA.glob("h200_mixture_*.json.gz"))
    if args.fit:
        return fit(paths)
    out: dict[str, Any] = {"sets": {}, "regions": []}
    for path in paths:
        found = recording(path)
        timeline, power = timeline_of(found), power_of(found)
        table = attribute(timeline, power, start_ns=found["start_ns"], end_ns=found["end_ns"])
        lines = load_rows(found, timeline, table)
        show(found, lines, table, plain(found, timeline), timeline)
        conserved = 100 * (table.energy_j / found["total"]["joules"] - 1)
        part = {"loads": lines, "conserved_pct": conserved, "date": found["date"], "gpu": found["gpu"]}
        part |= {truth: summary(lines, f"{truth}_j") for truth in ("alone", "burst", "here")}
        same = [r for r in lines if abs(r["time_ratio"] - 1) <= SAME_SPEED]
        part["alone_same_speed"] = summary(same, "alone_j")
        part["nnls_mean_pct"] = 100 * float(np.mean([abs(r["nnls_j"] / r["alone_j"] - 1) for r in lines]))
        print(f"  conserved {conserved:+.2f}%;", *[f"{k}: {({a: round(b, 1) for a, b in part[k].items()})}" for k in ("alone", "burst", "here", "alone_same_speed")])  # fmt: skip
        if found["set"].startswith("regions"):
            row = region_row(found, lines, table)
            out["regions"].append(row)
            print(f"  region: {row['attributed_j']:.3f} +- {row['error_j']:.3f} J a pass, alone {row['alone_j']:.3f} "
                  f"({100 * (row['attributed_j'] / row['alone_j'] - 1):+.1f}%), at this speed {row['here_j']}")  # fmt: skip
        out["sets"][f"{found['set']}-{found['seed']}"] = part
    if args.json:
        write_result(args.json, out)
    return None


if __name__ == "__main__":
    main()
