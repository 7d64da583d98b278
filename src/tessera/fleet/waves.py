r"""`Wave`: what one GPU draws over one iteration of a job, and where it waits for the others.

::

    watts  ████████████████████▁▁▁▁▁▁        compute: stretches when the clock falls
           0                   sync  period   sync: here a rank waits until the slowest rank of its job has come

A wave is a row of equal cells. `compute` is the share of a cell that follows the clock: 1 in a matrix product, 0 in a
collective. A wave without `sync_s` repeats by itself, as a server or a recording does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ArgumentError, RecordingError
from ..joules import Floats
from ..trace import PowerTrace

if TYPE_CHECKING:
    from ..dist.planner import ParallelPlan
    from ..schema import EnergyReport

_FINE_S, _LEAST, _MOST = 1e-3, 16, 65536
"""Length of a cell where the period allows it, and how many cells a wave has."""
_GRID_S = 0.005  # seconds, for a recording's power: a step of the simulation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wave:
    """Watts by cell, the share of each that follows the clock, the period, and the moment of synchronisation."""

    watts: Floats
    compute: Floats
    period_s: float
    sync_s: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if not 0.0 < self.period_s < math.inf or len(self.watts) != len(self.compute) or not len(self.watts):
            raise ArgumentError("a wave needs a period above 0, and watts and compute of the same length")
        if not np.all(np.isfinite(self.watts)) or float(np.min(self.watts)) < 0:
            raise ArgumentError("the watts of a wave must be numbers from 0 on")
        if self.sync_s is not None and not 0.0 < self.sync_s <= self.period_s:
            raise ArgumentError(f"the synchronisation must lie in the period, not at {self.sync_s:g} s")

    @property
    def peak_w(self) -> float:
        """Return the watts of the highest cell."""
        return float(np.max(self.watts))

    @property
    def mean_w(self) -> float:
        """Return the mean watts over the period."""
        return float(np.mean(self.watts))

    @property
    def wait_w(self) -> float:
        """Return what a waiting rank draws: the cell where it synchronises, or else the lowest."""
        if self.sync_s is None or self.sync_s >= self.period_s:
            return float(np.min(self.watts))
        return float(self.watts[min(int(self.sync_s / self.period_s * len(self.watts)), len(self.watts) - 1)])


def make_square(*, period_s: float, duty: float, high_w: float, low_w: float, synchronous: bool = True) -> Wave:
    """Make a wave that computes at `high_w` for `duty` of the period, then waits at `low_w` in a collective."""
    if not 0.0 < duty < 1.0:
        raise ArgumentError(f"the duty is between 0 and 1, not {duty:g}")
    if not low_w <= high_w:
        raise ArgumentError(f"the low power ({low_w:g} W) is above the high one ({high_w:g} W)")
    phases = [("compute", duty * period_s, high_w), ("communicate", (1.0 - duty) * period_s, low_w)]
    return make_wave(phases, synchronous=synchronous, source="a shape of the file")


def make_wave(phases: Sequence[tuple[str, float, float]], *, synchronous: bool = True, source: str = "") -> Wave:
    """Return a wave of phases (kind, seconds, watts); the first phase of another kind than "compute" synchronises."""
    seconds = np.array([p[1] for p in phases], dtype=float)
    if not len(seconds) or not np.all(seconds > 0):
        raise ArgumentError("a wave needs phases, each longer than 0 s")
    edges = np.concatenate([[0.0], np.cumsum(seconds)])
    period_s = float(edges[-1])
    is_compute = np.array([p[0] == "compute" for p in phases], dtype=float)
    grid = np.linspace(0.0, period_s, _count_cells(period_s) + 1)
    watts = _average(edges, np.array([p[2] for p in phases], dtype=float), grid)
    sync = next((float(edges[i]) for i in range(1, len(phases)) if not is_compute[i]), None)
    return Wave(
        watts=watts,
        compute=_average(edges, is_compute, grid),
        period_s=period_s,
        sync_s=(sync or period_s) if synchronous else None,
        source=source,
    )


def _count_cells(period_s: float) -> int:
    """Return so many cells that the edges of most phases fall on the edge of a cell."""
    return int(np.clip(round(period_s / _FINE_S), _LEAST, _MOST))


def _average(edges: Floats, values: Floats, grid: Floats) -> Floats:
    """Return means of a staircase over the cells of a grid."""
    sums = np.concatenate([[0.0], np.cumsum(values * np.diff(edges))])
    return np.asarray(np.diff(np.interp(grid, edges, sums)) / np.diff(grid))


# -- from other sources -------------------------------------------------------------------------------------------


def read_wave(path: Path, domain: str | None) -> Wave:
    """Return the power of one GPU in a recording (a .tessera run or a power CSV), repeated while the job runs."""
    trace = _read_trace(path)
    name = domain or next((d.name for d in trace.domains if d.device.is_gpu), trace.domains[0].name)
    times_ns, watts = trace.total(name)
    if len(times_ns) < 2:
        raise RecordingError(f"{name} has fewer than two samples", fix="record it for longer")
    seconds = (times_ns - times_ns[0]) * 1e-9
    count = int(np.clip(round(float(seconds[-1]) / _GRID_S), 1, _MOST))
    grid = np.linspace(0.0, float(seconds[-1]), count, endpoint=False)
    even = np.interp(grid + 0.5 * seconds[-1] / count, seconds, watts)
    return Wave(watts=even, compute=np.ones(count), period_s=float(seconds[-1]), source=f"{path.name}, {name}")


def _read_trace(path: Path) -> PowerTrace:
    trace: PowerTrace | None
    if path.suffix == ".csv":
        from ..profile.powerlog import read_power

        trace, how = read_power(path), "measure"
    else:
        from ..profile.open_recording import open_recording

        trace, how = open_recording(path).power, "run"
    if trace is None or not trace.domains:
        raise RecordingError(f"{path} has no power", fix=f"record it again: tessera {how} --help")
    return trace


def report_to_wave(report: EnergyReport) -> Wave:
    """Return the wave of a predicted iteration: its subgraphs one after another, each at its mean watts."""
    parts = [d for d in report.descriptors if d.latency_s > 0]
    if not parts:
        raise ArgumentError("this report has no subgraphs", fix="give one that `tessera.predict` made")
    phases = [("compute", d.latency_s, d.total_energy_j / d.latency_s) for d in parts]
    return make_wave(phases, synchronous=False, source=f"predicted: {report.name}")


_COMPUTE_KINDS = ("forward", "backward", "optimizer")


def plan_to_waves(plan: ParallelPlan) -> list[Wave]:
    """Return the waves of a planned training step, one for each pipeline stage, with the joules of the plan's GPUs.

    All ranks synchronise where the data-parallel reduction begins, or at the end of the step.
    """
    timeline, best = plan.timeline, plan.best
    scale = best.time_s / timeline.time_s  # microbatches may have been left out of the drawing
    waiting_w, busy_w = _find_levels(plan, scale)
    ends = [s.start_s for s in timeline.spans if s.kind == "data parallel"]
    sync_s = (min(ends) if ends else timeline.time_s) * scale
    count = _count_cells(best.time_s)
    grid = np.linspace(0.0, best.time_s, count + 1)
    waves = []
    for stage in range(timeline.stages):
        busy = np.zeros(count)
        for span in timeline.spans:
            if span.stage == stage and span.kind in _COMPUTE_KINDS:
                edges = np.array([0.0, span.start_s * scale, span.end_s * scale, best.time_s + 1e-9])
                busy += _average(edges, np.array([0.0, 1.0, 0.0]), grid)
        busy = np.clip(busy, 0.0, 1.0)
        watts = waiting_w + (busy_w - waiting_w) * busy
        name = f"plan: {best.layout}, stage {stage}"
        waves.append(Wave(watts=watts, compute=busy, period_s=best.time_s, sync_s=sync_s, source=name))
    return waves


def _find_levels(plan: ParallelPlan, scale: float) -> tuple[float, float]:
    """Return the watts of a waiting and of a computing GPU, so that a step takes the plan's joules."""
    from ..dist.training import WAITING
    from ..estimate.power import PowerModel

    best, timeline = plan.best, plan.timeline
    spans = [s for s in timeline.spans if s.kind in _COMPUTE_KINDS]
    busy_s = sum(s.end_s - s.start_s for s in spans) * scale / timeline.stages
    gpu_j = sum(j for part, j in best.energy_parts.items() if part not in ("host", "idle")) / best.layout.gpus
    waiting_w = WAITING * PowerModel.from_device(plan.problem.cluster.device).static_w
    busy_w = (gpu_j - waiting_w * (best.time_s - busy_s)) / busy_s if busy_s > 0 else waiting_w
    return waiting_w, max(busy_w, waiting_w)
