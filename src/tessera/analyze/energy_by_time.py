"""Joules shared out by time, where nothing was attributed: a summarised run, a sampled one, a CPU.

It is a rough model beside attribution: everything is taken to draw the same watts. The rows have no error.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..attribute.table import EnergyRow
from ..recording import Stack
from ..trace import PowerTrace

FUNCTION = "function"
"""The kind of a row that is a Python function of sampled stacks; its calls are samples."""
OLDER = "this summary has no time in each operator alone, so no operator has joules of its own: record it again"
_STEPS = re.compile(r"ProfilerStep#N|(?:train_|training_)?(?:step|iteration|iter)[\s_#:/-]*N", re.IGNORECASE)
_NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """Rows whose joules are shares of a total, and by what. Operators, or kernels, and `rest_j` sum to the total.

    `steps` are those a summary counted, `whole_steps` those whose begin is known too: theirs are `steps_s`, `steps_j`.
    """

    by: str
    ops: Sequence[EnergyRow] = ()
    kernels: Sequence[EnergyRow] = ()
    regions: Sequence[EnergyRow] = ()
    rest_j: float = 0.0
    steps: int | None = None
    whole_steps: int = 0
    steps_s: float = 0.0
    steps_j: float = 0.0
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """A run that a summary is of: its joules and seconds, and those from its first traced window to its last."""

    total_j: float
    seconds: float
    traced_j: float
    traced_s: float

    @property
    def working_w(self) -> float:
        """Mean watts while work was traced; of the run where that is not known."""
        if self.traced_s > 0 and self.traced_j > 0:
            return self.traced_j / self.traced_s
        return self.total_j / self.seconds if self.seconds > 0 else 0.0


def from_summary(summary: Any, run: RunTotals) -> TimeShares | None:
    """From the totals a summary-mode session keeps: its windows stand for all steps, and what came before for none.

    Kernels, or operators of a host alone, have the share of the steps' joules that their time was of the traced time:
    operators by the time in themselves, not in those they call. Calls and seconds are of all steps, as joules are.
    Regions are counted all the time, but for those that torch itself names, which are seen in windows.
    """
    if not isinstance(summary, Mapping):
        return None
    seen_s = float(summary.get("traced_s") or 0.0)
    seen_s = seen_s if seen_s > 1e-9 else 0.0  # times are whole nanoseconds
    step = next((r for r in _with_names(summary.get("regions")) if _STEPS.fullmatch(str(r["name"]))), {})
    steps, steps_s = int(step.get("calls", 0)), float(step.get("time_s", 0.0))
    worked_s = min(max(steps_s or run.traced_s or run.seconds, seen_s), run.seconds)
    work = _TracedWork(seconds=worked_s, energy_j=min(worked_s * run.working_w, run.total_j), seen_s=seen_s, run=run)
    regions = [work.region(r) for r in _with_names(summary.get("regions")) if r is not step]
    kernels = work.rows(summary.get("kernels"), "kernel", "time_s")
    ops = [] if kernels else work.rows(summary.get("ops"), "op", "self_s")
    if not kernels and not ops and not regions and not steps:
        return None
    older = None if kernels or ops or not summary.get("ops") else OLDER
    by = "the time of each kernel" if kernels else "the time in each operator itself"
    rest_j = run.total_j - math.fsum(r.energy_j for r in (*kernels, *ops))
    return TimeShares(
        by=by if kernels or ops else "time",
        ops=ops,
        kernels=kernels,
        regions=regions,
        rest_j=max(rest_j, 0.0),
        steps=steps or None,
        whole_steps=steps - (step.get("min_ns") == 0),
        steps_s=steps_s,
        steps_j=min(steps_s * run.working_w, run.total_j),
        note=older,
    )


def weigh_stacks(stacks: Sequence[Stack], power: PowerTrace, total_j: float, pid: int) -> list[tuple[str, int, float]]:
    """(stack, samples, joules) of the main thread: each sample weighted with the watts at its time.

    Every thread is in every sample, and most of them wait: the main one (its number is the process's) is what counts.
    """
    if not stacks or not total_j > 0:
        return []
    threads: Counter[int | str] = Counter()
    for _, thread, _, count in stacks:
        threads[thread] += count
    main = pid if pid in threads else threads.most_common(1)[0][0]
    samples = [(time_ns, stack, count) for time_ns, thread, stack, count in stacks if thread == main]
    times, watts = power.total()
    at = np.array([time_ns for time_ns, _, _ in samples], np.int64)
    level = np.interp(at, times, watts) if len(times) else np.ones(len(samples))
    weights = level * np.array([count for _, _, count in samples], np.float64)
    joules = total_j * weights / (weights.sum() or 1.0)
    return [(stack, count, j) for (_, stack, count), j in zip(samples, joules.tolist(), strict=True)]


def from_stacks(stacks: Sequence[tuple[str, int, float]], total_j: float) -> TimeShares | None:
    """Rows by the innermost function of weighted stacks."""
    if not stacks:
        return None
    spent: dict[str, float] = {}
    samples: Counter[str] = Counter()
    for stack, count, joules in stacks:
        leaf = stack.rsplit(";", 1)[-1]
        spent[leaf] = spent.get(leaf, 0.0) + joules
        samples[leaf] += count
    rows = [
        EnergyRow(
            name=leaf,
            kind=FUNCTION,
            calls=samples[leaf],
            time_s=0.0,
            energy_j=joules,
            energy_error_j=_NAN,
            share=joules / total_j,
        )
        for leaf, joules in spent.items()
    ]
    return TimeShares(by="the watts at each sampled Python stack", ops=rows)


def _with_names(rows: Any) -> list[Mapping[str, Any]]:
    return [r for r in rows or () if isinstance(r, Mapping) and r.get("name")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TracedWork:
    """The part of a run that its traced windows stand for, and how much of it they are."""

    seconds: float
    energy_j: float
    seen_s: float
    run: RunTotals

    def rows(self, summary: Any, kind: str, key: str) -> list[EnergyRow]:
        """Rows that are parts of the traced time: together they never exceed it, however many ran at once."""
        rows = [r for r in _with_names(summary) if r.get(key) is not None]
        base_s = max(self.seen_s, math.fsum(float(r[key]) for r in rows))
        if not base_s > 0:
            return []
        return [self._row(r, kind, float(r[key]) / base_s * self.seconds) for r in rows]

    def region(self, row: Mapping[str, Any]) -> EnergyRow:
        """A region's, which overlap: over all its passes, or those in windows scaled to all of the work."""
        seconds = float(row.get("time_s", 0.0))
        if row.get("traced") and self.seen_s > 0:
            return self._row(row, "region", min(seconds * self.seconds / self.seen_s, self.run.seconds))
        return self._row(row, "region", min(seconds, self.run.seconds), whole=True)

    def _row(self, row: Mapping[str, Any], kind: str, seconds: float, *, whole: bool = False) -> EnergyRow:
        """One row, of so many seconds of the work; `whole`: its calls are all there were."""
        factor = 1.0 if whole or not self.seen_s > 0 else self.seconds / self.seen_s
        watts = self.energy_j / self.seconds if self.seconds > 0 else 0.0
        joules = min(seconds * watts, self.run.total_j)
        return EnergyRow(
            name=str(row["name"]),
            kind=str(row.get("kind", kind)),
            calls=round(int(row.get("calls", 0)) * factor),
            time_s=seconds,
            energy_j=joules,
            energy_error_j=_NAN,
            share=joules / self.run.total_j if self.run.total_j > 0 else 0.0,
        )
