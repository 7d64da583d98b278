"""Metrics of kernels that CUPTI's range profiler replayed (torch.profiler with `profiler_metrics`): sums by kernel.

Such a trace has no times of kernels. Its ranges are in the order of the launches: if there are as many ranges as
launches, each range belongs to the operator of its launch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..recording import Recording
from ..timeline.columns import NONE
from .devices import explain_no_device
from .result import Result, columns

_LAUNCH = "LaunchKernel"


def list_ranges(recording: Recording) -> Result:
    """Return all kernels with the operators that launched them and the sum of each metric, most work first."""
    timeline = recording.timeline
    ranges: list[tuple[str, dict[str, float]]] = timeline.meta["profiler_ranges"]
    launches = timeline.rows("runtime")
    starts_kernel = np.array([_LAUNCH in name for name in timeline.names] or [False])
    launches = launches[starts_kernel[timeline["name"][launches]]]
    launches = launches[np.argsort(timeline["start_ns"][launches], kind="stable")]
    ops: list[int] = [NONE] * len(ranges)
    if len(launches) == len(ranges):
        ops = timeline.linked.op[launches].tolist()
    sums: dict[tuple[str, str | None], dict[str, float]] = {}
    for (name, metrics), op in zip(ranges, ops, strict=True):
        line = sums.setdefault((name, None if op == NONE else timeline.name(op)), {"calls": 0})
        line["calls"] += 1
        for metric, value in metrics.items():
            line[metric] = line.get(metric, 0) + value
    rows: list[dict[str, Any]] = [{"name": n, "op": op, **line} for (n, op), line in sums.items()]
    totals: dict[str, float] = {}
    for _, metrics in ranges:
        totals |= {metric: totals.get(metric, 0) + value for metric, value in metrics.items()}
    order = sorted(totals, key=lambda metric: -totals[metric])
    rows.sort(key=lambda r: -sum(r.get(metric, 0) for metric in order))
    return Result(
        kind="kernels",
        title=f"Kernels of {recording.facts.name}, replayed for their metrics",
        columns=columns(("name", "kernel"), ("op", "operator"), ("calls", "calls"), *_title_metrics(order)),
        rows=rows,
        facts={"calls": len(ranges), "names": len({name for name, _ in ranges})},
        notes=recording.notes,
        missing={"times": explain_no_device(recording)},
    )


def _title_metrics(metrics: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return the metrics with titles that tell them apart: CUPTI's names are long, and begin and end alike."""
    begin, end = _common_length(metrics), _common_length([m[::-1] for m in metrics])
    cut = len(metrics) > 1 and all(len(m) > begin + end for m in metrics)
    return [(m, m[begin : len(m) - end] if cut else m, m) for m in metrics]


def _common_length(texts: Sequence[str]) -> int:
    """Return how many letters all texts have in common at the start."""
    return sum(1 for _ in itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False)))
