"""A job of several ranks: what each rank spent, computed and waited, and what each kind of collective took.

::

    rank 0   ──compute──[ waits ····· ][ moves ]──      busy: operators or kernels that compute
    rank 1   ──compute (longer)───────[ moves ]──      waiting: from its own start until the last rank has come
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..profile.ranks.collectives import Meeting, computing_spans, find_waits, measure_overlap, sum_delays
from ..record import CODE, ON_DEVICE
from ..recording import Recording
from ..timeline.columns import NONE, Ints, Timeline
from ..timeline.intervals import covered_ns
from ..timeline.link import Step
from .collectives import find_meetings, list_collectives, sum_by_group, sum_by_step
from .devices import busy_spans, whole_span

STRAGGLES = 0.05
"""A rank is called the straggler if the others together wait for it this share of the time, and most for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank. Shares are of `watched_s`: its traced steps, or all that was traced; None if nothing was.

    `wait_s` is how long its own collectives waited for the last rank: several at a time count once, and it may compute
    meanwhile. `last` is how often it came last to a collective that several ranks traced, in steps or not, and
    `delays_s` how long the others together waited for it then. `energy_j` is None if its joules cannot be separated
    from other ranks'; `no_energy` says why. `failed_first` is the rank that ended first with an exit code: others often
    fail because it is gone.
    """

    rank: int
    host: str = ""
    energy_j: float | None = None
    error_j: float | None = None
    no_energy: str | None = None
    time_s: float | None = None
    watched_s: float = 0.0
    busy_share: float | None = None
    wait_s: float | None = None
    wait_share: float | None = None
    steps: int | None = None
    steps_per_s: float | None = None
    last: int = 0
    delays_s: float = 0.0
    straggler: bool = False
    returncode: int | None = None
    failed_first: bool = False
    crashed: bool = False
    limited: bool = False
    """Whether its tracing stopped at the time limit: then the tables of all ranks end there."""

    @property
    def power_w(self) -> float | None:
        """Return mean watts over its time."""
        return self.energy_j / self.time_s if self.energy_j is not None and self.time_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """The ranks of a job, and its collectives by kind and group, and by step (`analyze.collectives`).

    `missing` are the ranks without a recording, if the number of ranks is known.
    """

    ranks: Sequence[RankRow]
    collectives: Sequence[Mapping[str, Any]]
    steps: Sequence[Mapping[str, Any]] = ()
    missing: Sequence[int] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        ranks = [{**dataclasses.asdict(row), "power_w": row.power_w} for row in self.ranks]
        found = {"collectives": list(self.collectives), "steps": list(self.steps)}
        return {"ranks": ranks, **found, "missing_ranks": list(self.missing)}


def summarize_job(recording: Recording) -> JobSummary | None:
    """Return the summary of a merged recording; None for one rank."""
    timeline = recording.timeline
    told = [m for m in timeline.meta.get("ranks") or () if isinstance(m, Mapping) and isinstance(m.get("rank"), int)]
    if len(told) < 2:
        return None
    met = find_meetings(recording)
    overlaps = measure_overlap(timeline, met)
    rows = list_collectives(recording, met, overlaps)
    delays_s = sum_delays(met)
    told.sort(key=lambda m: int(m["rank"]))
    ranks = _mark_straggler([_describe(timeline, m, met, delays_s.get(m["rank"], 0.0)) for m in told])
    sizes = [m["world_size"] for m in told if isinstance(m.get("world_size"), int)]
    seen = {row.rank for row in ranks}
    missing = [r for r in range(min(max(sizes, default=0), 1 << 16)) if r not in seen]
    steps = sum_by_step(timeline, met, overlaps)
    return JobSummary(ranks=ranks, collectives=sum_by_group(rows, met), steps=steps, missing=missing)


def _mark_straggler(rows: Sequence[RankRow]) -> list[RankRow]:
    """Return the rows, and mark the rank for which the others wait more than for all the rest together."""
    worst = max(rows, key=lambda row: row.delays_s)
    lost_s, watched_s = sum(row.delays_s for row in rows), max(row.watched_s for row in rows)
    is_straggler = worst.delays_s > max(0.5 * lost_s, STRAGGLES * watched_s)
    return [dataclasses.replace(row, straggler=is_straggler and row is worst) for row in rows]


def _describe(timeline: Timeline, told: Mapping[str, Any], met: Sequence[Meeting], delays_s: float) -> RankRow:
    number = int(told["rank"])
    rows = np.flatnonzero(timeline["rank"] == number)
    steps = [s for s in timeline.linked.steps if s.row != NONE and timeline["rank"][s.row] == number]
    start_ns, end_ns = _watched_span(timeline, rows, steps)
    seconds = (end_ns - start_ns) * 1e-9
    own = [m for m in met if number in m.ranks and start_ns <= m.start_ns <= end_ns]
    waits = find_waits(own, number)
    wait_s = float(covered_ns(waits, np.array([start_ns]), np.array([end_ns]))[0]) * 1e-9 if own else None
    stepped_s = sum(s.end_ns - s.start_ns for s in steps) * 1e-9
    return RankRow(
        rank=number,
        host=str(told.get("host") or ""),
        energy_j=told.get("energy_j"),
        error_j=told.get("energy_error_j"),
        no_energy=told.get("no_energy"),
        time_s=told.get("time_s"),
        watched_s=seconds,
        busy_share=_busy_s(timeline, rows, start_ns, end_ns) / seconds if seconds > 0 else None,
        wait_s=wait_s,
        wait_share=wait_s / seconds if wait_s is not None and seconds > 0 else None,
        steps=len(steps) or None,
        steps_per_s=len(steps) / stepped_s if stepped_s > 0 else None,
        last=sum(m.straggler == number for m in met),
        delays_s=delays_s,
        returncode=told.get("returncode"),
        failed_first=bool(told.get("failed_first")),
        crashed=bool(told.get("crashed")),
        limited=bool(told.get("limited")),
    )


def _watched_span(timeline: Timeline, rows: Ints, steps: Sequence[Step]) -> tuple[int, int]:
    """Return the span of rows that a tracer made; if there are steps, of those in steps, without setup."""
    traced = rows[np.isin(timeline["kind"][rows], [CODE[kind] for kind in (*ON_DEVICE, "op", "runtime")])]
    if not len(traced):
        return 0, 0
    start_ns, end_ns = whole_span(timeline, traced)
    if not steps:
        return start_ns, end_ns
    first, last = max(start_ns, steps[0].start_ns), min(end_ns, max(s.end_ns for s in steps))
    return (first, last) if first < last else (start_ns, end_ns)


def _busy_s(timeline: Timeline, rows: Ints, start_ns: int, end_ns: int) -> float:
    """Return the seconds in which kernels ran; for a rank without a device, operators that compute."""
    kernels = rows[timeline["kind"][rows] == CODE["kernel"]]
    busy = busy_spans(timeline, kernels) if len(kernels) else computing_spans(timeline, rows)
    return float(covered_ns(busy, np.array([start_ns]), np.array([end_ns]))[0]) * 1e-9
