"""Single operators with random shapes, traced on the H200, beside the predicted time of each.

    python benchmarks/predict/operator_accuracy.py [operator_kept|operator] [--worst N] [--cache FILE]

`operator_kept` (device/operator_kept_cases.py) is in no fit; `operator` is fitted on. Each case is a program of forty
operators of one kind, in training with their gradients. An operator's kernels are found by fit/align.py. Prints, for
each kind: the mean error of an operator, that of a whole program's kernels, the share inside the 90% interval, and the
datasheet roofline's error beside. Writes benchmarks/results/SET.json for the kept set.
"""

from __future__ import annotations

import argparse
import collections
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BENCHMARKS = Path(__file__).parents[1]
sys.path.insert(0, str(BENCHMARKS))
sys.path.insert(0, str(BENCHMARKS / "fit"))
import align
import fit_ops
from result_file import write_result
from tessera.estimate.kernel_time import KernelTime
from tessera.estimate.ops import OpModel
from tessera.estimate.predict import estimate
from tessera.hardware import lookup

H200 = lookup("h200")


@dataclass
class Row:
    kind: str
    case: str
    op: Any
    predicted: KernelTime
    seconds: float
    roofline_s: float

    @property
    def error(self) -> float:
        return self.predicted.seconds / self.seconds - 1

    @property
    def inside(self) -> bool:
        return abs(self.seconds / self.predicted.seconds - 1) <= self.predicted.relative_error


def captures(which: str, cache: Path | None) -> dict[str, Any]:
    """The captured graph of each case; kept in a file where one is given."""
    if cache is not None and cache.exists():
        return pickle.loads(cache.read_bytes())
    cases = align.load_cases(BENCHMARKS / f"device/{which}_cases.py")
    graphs = {name: fit_ops.captured(case) for name, case in cases.items()}
    if cache is not None:
        cache.write_bytes(pickle.dumps(graphs))
    return graphs


def rows(which: str, graphs: dict[str, Any]) -> tuple[list[Row], float]:
    """Every operator whose kernels were found, and the share of the GPU's time that they are."""
    found: list[Row] = []
    traced_us = 0.0
    for trace in align.read(BENCHMARKS / f"data/h200_{which}_traces.jsonl.gz"):
        graph = graphs[trace["name"]]
        solved = estimate(graph, H200, OpModel(H200), launch="graph")
        predicted = {op.index: k for op, k in zip(solved.ops, solved.kernels, strict=True)}
        traced_us += trace["gpu_us"]
        kind = trace["name"].removeprefix("operators_").rsplit("_", 1)[0]
        for pair in align.align(graph, trace)[0]:
            if pair.us > 0 and align.shows_same_sizes(pair, trace):
                k = predicted[pair.op.index]
                found.append(Row(kind, trace["name"], pair.op, k, 1e-6 * pair.us, roofline_s(k)))
    return found, 1e6 * sum(r.seconds for r in found) / traced_us


def roofline_s(k: KernelTime) -> float:
    """The datasheet's answer: bytes at the full bandwidth or FLOPs at the peak."""
    peak, bandwidth = H200.peak(k.unit.rpartition(".")[2]), H200.memory.bandwidth_bytes_per_s
    assert bandwidth is not None
    return max(k.hbm_bytes / bandwidth.value, k.flops / peak.value if peak is not None else 0.0)


def figures(some: list[Row]) -> dict[str, Any]:
    error, seconds = np.array([r.error for r in some]), np.array([r.seconds for r in some])
    whole: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for r in some:
        whole[r.case][0] += r.predicted.seconds
        whole[r.case][1] += r.seconds
    return {
        "operators": len(some),
        "mean_abs_error": round(float(np.abs(error).mean()), 4),
        "median_abs_error": round(float(np.median(np.abs(error))), 4),
        "by_time": round(float((np.abs(error) * seconds).sum() / seconds.sum()), 4),
        "programs": len(whole),
        "program_mean_abs_error": round(float(np.mean([abs(p / m - 1) for p, m in whole.values()])), 4),
        "coverage_90": round(float(np.mean([r.inside for r in some])), 3),
        "roofline_mean_abs_error": round(float(np.mean([abs(r.roofline_s / r.seconds - 1) for r in some])), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="?", default="operator_kept", choices=("operator_kept", "operator"))
    parser.add_argument("--worst", type=int, default=0, help="also print the operators that are furthest off by time")
    parser.add_argument("--cache", type=Path)
    given = parser.parse_args()
    fit_ops.quiet()
    found, share = rows(given.which, captures(given.which, given.cache))
    kinds = sorted({r.kind.split("_")[0] for r in found})
    table = {kind: figures([r for r in found if r.kind.split("_")[0] == kind]) for kind in kinds}
    table["all"] = figures(found)
    print(f"{share:.1%} of the GPU's time is of operators whose kernels were found")
    for kind, f in table.items():
        print(
            f"{kind:12s} n {f['operators']:5d}  mean {f['mean_abs_error']:6.1%}  median {f['median_abs_error']:6.1%}  "
            f"by time {f['by_time']:6.1%}  programs {f['program_mean_abs_error']:6.1%}  "
            f"in the interval {f['coverage_90']:5.1%}  roofline {f['roofline_mean_abs_error']:6.1%}"
        )
    if given.worst:
        print_worst(found, given.worst)
    if given.which == "operator_kept":
        write_result(BENCHMARKS / "results/operator_kept.json", {"share_of_time": round(share, 4), "kinds": table})


def print_worst(found: list[Row], count: int) -> None:
    """Operators by name, dtype and phase, those first that are furthest off in the logarithm."""
    groups: dict[tuple[str, ...], list[Row]] = collections.defaultdict(list)
    for r in found:
        groups[r.op.name, r.op.precision, r.op.phase].append(r)
    off = {k: sum(abs(np.log1p(r.error)) for r in v) for k, v in groups.items()}
    for key in sorted(groups, key=lambda k: -off[k])[:count]:
        some = groups[key]
        e = np.array([r.error for r in some])
        print(
            f"{' '.join(map(str, key)):55s} n {len(e):4d} mean {np.abs(e).mean():7.1%} "
            f"from {e.min():+.0%} by {np.median(e):+.0%} to {e.max():+.0%}"
        )


if __name__ == "__main__":
    main()
