"""Joules shared out by time, where nothing was attributed: a summarised run, a sampled one, a CPU.

It is a model, and a poor one beside attribution: everything is taken to draw the same watts. The rows have no error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..attribute.table import EnergyRow
from ..profile.runfile import Stack
from ..trace import PowerTrace

FUNCTION = "function"
"""The kind of a row that is a Python function of sampled stacks; its calls are samples."""
_NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Rows whose joules are shares of a total, and by what."""

    by: str
    ops: Sequence[EnergyRow] = ()
    kernels: Sequence[EnergyRow] = ()
    regions: Sequence[EnergyRow] = ()


def from_summary(summary: Any, total_j: float, seconds: float) -> Shared | None:
    """From the totals a summary-mode session keeps, by the share of the traced time each kernel ran.

    A host alone has operators instead, which contain one another: theirs do not sum to the whole. Regions are counted
    all the time, not only while tracing.
    """
    if not isinstance(summary, Mapping):
        return None
    traced_s = float(summary.get("traced_s") or 0.0)
    kernels = _rows(summary.get("kernels"), "kernel", traced_s, total_j, whole=True)
    regions = _rows(summary.get("regions"), "region", seconds, total_j, whole=False)
    if kernels:
        return Shared(by="the time of each kernel", kernels=kernels, regions=regions)
    ops = _rows(summary.get("ops"), "op", traced_s, total_j, whole=False)
    by = "the time inside each operator, with those it calls"
    return Shared(by=by, ops=ops, regions=regions) if ops or regions else None


def weighed(stacks: Sequence[Stack], power: PowerTrace, total_j: float, pid: int) -> list[tuple[str, int, float]]:
    """(stack, samples, joules) of the main thread: each sample weighed with the watts at its time.

    Every thread is in every sample, and most of them wait: the main one (its number is the process's) is what counts.
    """
    if not stacks or not total_j > 0:
        return []
    threads: Counter[int | str] = Counter()
    for _, thread, _, count in stacks:
        threads[thread] += count
    main = pid if pid in threads else threads.most_common(1)[0][0]
    mine = [(time_ns, stack, count) for time_ns, thread, stack, count in stacks if thread == main]
    times, watts = power.total()
    at = np.array([time_ns for time_ns, _, _ in mine], np.int64)
    level = np.interp(at, times + power.epoch_offset_ns, watts) if len(times) else np.ones(len(mine))
    weights = level * np.array([count for _, _, count in mine], np.float64)
    joules = total_j * weights / (weights.sum() or 1.0)
    return [(stack, count, j) for (_, stack, count), j in zip(mine, joules.tolist(), strict=True)]


def from_stacks(found: Sequence[tuple[str, int, float]], total_j: float) -> Shared | None:
    """Rows by the innermost function of weighed stacks."""
    if not found:
        return None
    spent: dict[str, float] = {}
    samples: Counter[str] = Counter()
    for stack, count, joules in found:
        leaf = stack.rsplit(";", 1)[-1]
        spent[leaf] = spent.get(leaf, 0.0) + joules
        samples[leaf] += count
    rows = [
        EnergyRow(
            name=leaf, kind=FUNCTION, calls=samples[leaf], time_s=0.0, energy_j=joules, energy_error_j=_NAN,
            share=joules / total_j,
        )
        for leaf, joules in spent.items()
    ]  # fmt: skip
    return Shared(by="the watts at each sampled Python stack", ops=rows)


def _rows(found: Any, kind: str, traced_s: float, total_j: float, *, whole: bool) -> list[EnergyRow]:
    """Rows by time. `whole`: they are parts of the time (kernels), so that together they never exceed it."""
    rows = [r for r in found or () if isinstance(r, Mapping) and r.get("name")]
    took_s = sum(float(r.get("time_s", 0.0)) for r in rows)
    base_s = max(traced_s, took_s) if whole else max(traced_s, 1e-9)
    out = []
    for r in rows:
        seconds = float(r.get("time_s", 0.0))
        share = min(seconds / base_s, 1.0) if base_s > 0 else 0.0
        out.append(
            EnergyRow(
                name=str(r["name"]), kind=str(r.get("kind", kind)), calls=int(r.get("calls", 0)), time_s=seconds,
                energy_j=total_j * share, energy_error_j=_NAN, share=share,
            )
        )  # fmt: skip
    return out
