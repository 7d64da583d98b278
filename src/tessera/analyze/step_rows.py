"""What every row spent in every step: rows of a step are what lies inside it, and sum to it.

::

    timeline.energy_j ──by (name, step)──┐
    self time, shared by what overlaps ──┼──► Series of each row: joules, seconds, calls by step
    the steps' own joules, less those ───┘    and of idle, the rest
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..attribute.activity import shares, summed
from ..attribute.host import host_activity
from ..attribute.ledger import NO_OP
from ..attribute.table import EnergyRow, EnergyTable
from ..record import CODE
from ..timeline.columns import NONE, Timeline

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Series:
    """One row, step by step."""

    joules: Floats
    seconds: Floats
    calls: Floats


@dataclass(frozen=True, slots=True)
class Stepped:
    """The steps of a recording whose rows are known one by one; `places` are those of `table.steps` among all steps.

    `windows` (epoch) are what the table is of.
    """

    timeline: Timeline
    table: EnergyTable
    places: Ints
    windows: Sequence[tuple[int, int]] = ()

    def rows(self, view: str) -> dict[str, Series]:
        """Every row of a view. Operators and kernels sum to the steps, with "idle"; regions and modules are nested."""
        if view in ("ops", "kernels"):
            return self._leaves(view)
        return self._nested(view)

    def _leaves(self, view: str) -> dict[str, Series]:
        timeline, links = self.timeline, self.timeline.linked
        rows, seconds = _self_time(timeline)
        if view == "kernels" and not len(timeline.device_rows):
            return {}
        joules = np.full(len(rows), math.nan)
        if not math.isnan(self.table.total_j) and timeline.energy_j is not None:
            joules = np.nan_to_num(timeline.energy_j[rows])
        owner = rows if view == "kernels" else links.op[rows]
        keys = np.where(owner == NONE, NONE, timeline["name"][owner])
        steps = self._numbers()[links.step[rows]]
        # A call is one kernel, or one operator however many kernels it launched.
        first = np.unique(np.where(owner == NONE, -2 - rows, owner), return_index=True)[1]
        calls = np.zeros(len(rows))
        calls[first] = 1.0
        inside = steps != NONE
        parts = self._by_name(keys[inside], steps[inside], joules[inside], seconds[inside], calls[inside])
        found = {name: Series(*values) for name, values in parts.items()}
        return {**found, **self._idle(found)} if found else {}

    def _numbers(self) -> Ints:
        """For every step of the timeline, and for none, its place among those of the table."""
        numbers = np.full(len(self.timeline.linked.steps) + 1, NONE, np.int64)  # one more, for NONE
        numbers[self.places] = np.arange(len(self.places))
        return numbers

    def _by_name(self, keys: Ints, steps: Ints, *values: Floats) -> dict[str, list[Floats]]:
        """Each of the values summed by name and step."""
        count = len(self.places)
        used, where = np.unique(keys, return_inverse=True)
        flat = [np.bincount(where * count + steps, v, minlength=len(used) * count).reshape(-1, count) for v in values]
        names = [NO_OP if key == NONE else self.timeline.names[key] for key in used.tolist()]
        return {name: [part[i] for part in flat] for i, name in enumerate(names)}

    def _idle(self, found: Mapping[str, Series]) -> dict[str, Series]:
        """What no row has of the steps."""
        wall_s, spent_j = (np.array([pick(s) for s in self.table.steps]) for pick in (wall, lambda s: s.energy_j))
        joules = spent_j - sum(s.joules for s in found.values())
        seconds = wall_s - sum(s.seconds for s in found.values())
        if seconds.sum() < 0:  # of several devices, whose seconds are more than the clock's
            seconds = np.zeros(len(seconds))
        if not seconds.any() and not np.nan_to_num(joules).any():
            return {}
        return {"idle": Series(joules, seconds, np.zeros(len(seconds)))}

    def _nested(self, view: str) -> dict[str, Series]:
        """Each row's joules and calls by the time of its passes, of which those inside steps count."""
        timeline, links = self.timeline, self.timeline.linked
        if view == "regions":
            passes = timeline.rows("region")
        else:
            named = np.isin(timeline["name"], list(timeline.meta.get("modules", ())))
            passes = np.flatnonzero((timeline["kind"] == CODE["op"]) & named)
        length_s = self._within(timeline["start_ns"][passes], timeline["end_ns"][passes])
        passes, length_s = passes[length_s > 0], length_s[length_s > 0]
        names, steps = timeline["name"][passes], self._numbers()[links.step[passes]]
        inside = steps != NONE
        by_step = self._by_name(names[inside], steps[inside], length_s[inside], np.ones(int(inside.sum())))
        whole_s = {timeline.names[n]: float(length_s[names == n].sum()) for n in np.unique(names).tolist()}
        found = {}
        for row in self.table.rows(view):
            if row.name in by_step:
                seconds, calls = by_step[row.name]
                share = seconds / whole_s[row.name]
                found[row.name] = Series(row.energy_j * share, wall(row) * share, calls)
        return found

    def _within(self, start_ns: Ints, end_ns: Ints) -> Floats:
        """Seconds of some stretches that lie in the windows."""
        if not self.windows:
            return np.asarray(np.maximum(end_ns - start_ns, 1) * 1e-9, np.float64)
        inside = sum(np.maximum(np.minimum(end_ns, b) - np.maximum(start_ns, a), 0) for a, b in self.windows)
        return np.asarray(inside, np.float64) * 1e-9


def stepped(timeline: Timeline, table: EnergyTable, windows: Sequence[tuple[int, int]] = ()) -> Stepped | None:
    """The steps of a table found again in its timeline; None where one is not there."""
    places, at = [], 0
    names = [s.name for s in timeline.linked.steps]
    for row in table.steps:
        while at < len(names) and names[at] != row.name:
            at += 1
        if at == len(names):
            return None
        places.append(at)
        at += 1
    return Stepped(timeline, table, np.array(places, np.int64), windows) if places else None


def wall(row: EnergyRow) -> float:
    """The seconds a row took by the clock; of one that has none, those on its device."""
    return row.wall_s if row.wall_s is not None else row.time_s


def _self_time(timeline: Timeline) -> tuple[Ints, Floats]:
    """Rows of devices (of the host, where nothing ran on one) with the seconds each has to itself."""
    rows = timeline.device_rows
    if not len(rows):
        found = host_activity(timeline, timeline.linked)
        used, where = np.unique(found.rows, return_inverse=True)
        return used, summed(where.reshape(-1), found.share_s, len(used))
    seconds = np.zeros(len(rows))
    for own in timeline.by_device(rows).values():
        seconds[np.searchsorted(rows, own)] = shares(timeline["start_ns"][own], timeline["end_ns"][own])
    return rows, seconds
