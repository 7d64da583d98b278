"""The errors of regions and steps of a host whose power is modelled, by the samples between their edges.

::

    samples     |    |    |  |    |    |  |    |       a sample ends wherever a session saw a region or a step begin or
    region                   |------------|            end: what lies between is the region's, however many operators
    operators                  mm  add  mm             share it

The classes of operators have the doubt of how samples are divided among them. A region that holds whole samples does
not have it: of a sample that it cuts, at most what fits into the part on either side is in doubt.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ..joules import FULL, DomainSamples, Floats, Ints
from ..schema import Hold
from ..timeline import Timeline
from ..timeline.distinct import rank_values
from ..timeline.intervals import union_by_key
from ..trace import PowerTrace
from .share import running_joules
from .table import EnergyRow, EnergyTable


def narrow_errors(
    table: EnergyTable, timeline: Timeline, power: PowerTrace, windows: Sequence[tuple[int, int]], threads: int | None
) -> EnergyTable:
    """Return the table with narrower errors of regions and steps, where the samples between their edges know more."""
    column = _find_host(table, timeline, power)
    if column is None:
        return table
    most_w = max(float(np.nanmax(column.watts)), (column.domain.core_w or 0.0) * (threads or 1))
    level = table.error_j / table.energy_j
    passes, steps = timeline.rows("region"), timeline.linked.steps
    edges = np.array([(s.start_ns, s.end_ns) for s in steps], np.int64).reshape(-1, 2)
    of_step = _sum_between(column, np.arange(len(steps)), edges[:, 0], edges[:, 1], windows, most_w)
    starts_ns, ends_ns = timeline["start_ns"][passes], timeline["end_ns"][passes]
    of_region = _sum_between(column, timeline["name"][passes], starts_ns, ends_ns, windows, most_w)
    by_step = {steps[i].name: found for i, found in of_step.items()}
    by_region = {timeline.names[i]: found for i, found in of_region.items()}
    return dataclasses.replace(
        table,
        steps=[_narrow(row, by_step.get(row.name), level) for row in table.steps],
        regions=[_narrow(row, by_region.get(row.name), level) for row in table.regions],
    )


def _find_host(table: EnergyTable, timeline: Timeline, power: PowerTrace) -> DomainSamples | None:
    """Return the modelled samples of the one host whose operators have the joules; None where it is not that."""
    counted = [c for c in power.columns.values() if c.domain.counted]
    if len(counted) != 1 or table.basis != "modelled" or table.coverage < FULL or not table.energy_j > 0:
        return None
    several = len(rank_values(timeline["rank"])[0]) > 1
    (column,) = counted
    is_host = column.domain.hold is Hold.MEAN and not column.domain.device.is_gpu
    return column if is_host and not several and not len(timeline.device_rows) else None


def _narrow(row: EnergyRow, found: tuple[float, float] | None, level: float) -> EnergyRow:
    """Return a row with the error of the level and of the cut samples, if that is narrower.

    A row may have other joules than its samples (two threads side by side): the difference is doubt.
    """
    if found is None:
        return row
    between_j, cut_j = found
    error_j = math.hypot(level * row.energy_j, cut_j + abs(row.energy_j - between_j))
    return dataclasses.replace(row, error_j=min(row.error_j, error_j))


def _sum_between(
    column: DomainSamples, keys: Ints, start_ns: Ints, end_ns: Ints, windows: Sequence[tuple[int, int]], most_w: float
) -> dict[int, tuple[float, float]]:
    """Return by key the joules between the edges of its passes in the windows, and how far cut samples may be off.

    A moment in several passes counts once. Samples are cut at the same place in every pass of a loop, so that what they
    are off by adds up.
    """
    inside = np.zeros(len(keys), bool)
    for begin_ns, stop_ns in windows:
        inside |= (start_ns >= begin_ns) & (end_ns <= stop_ns)
    if not inside.any():
        return {}
    of_key, covered = union_by_key(keys[inside], start_ns[inside], end_ns[inside])
    joules = running_joules(column, covered.end_ns) - running_joules(column, covered.start_ns)
    cut_j = _doubt_at(column, covered.start_ns, most_w) + _doubt_at(column, covered.end_ns, most_w)
    used, where = np.unique(of_key, return_inverse=True)
    sums = (np.bincount(where, values, len(used)) for values in (joules, cut_j))
    return dict(zip(used.tolist(), zip(*(s.tolist() for s in sums), strict=True), strict=True))


def _doubt_at(column: DomainSamples, at_ns: Ints, most_w: float) -> Floats:
    """Return how many joules the sides of a sample that is cut there may differ from their shares by time."""
    times = column.times_ns - column.lag_ns
    i = np.clip(np.searchsorted(times, at_ns, side="right") - 1, 0, len(times) - 2)
    lasts_s = (times[i + 1] - times[i]) * 1e-9
    before_s = np.clip((at_ns - times[i]) * 1e-9, 0.0, lasts_s)
    sample_j = np.nan_to_num(column.watts[i + 1]) * lasts_s
    share_j = sample_j * np.divide(before_s, lasts_s, out=np.zeros(len(at_ns)), where=lasts_s > 0)
    most_j = np.minimum(sample_j, most_w * before_s)
    least_j = np.maximum(sample_j - most_w * (lasts_s - before_s), 0.0)
    return np.asarray(np.maximum(np.maximum(most_j - share_j, share_j - least_j), 0.0), np.float64)
