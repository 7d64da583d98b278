"""The joules of a run from its start to its end: what was traced, what is outside the trace, and shares by time.

If nothing was attributed (a summarised run, a sampled one, a CPU), joules are shared out by time. Compared with
attribution, that is a rough model: everything is assumed to draw the same watts. The rows have no error; those of
sampled stacks have the error of their share, from the number of samples.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..attribute.table import EnergyRow, EnergyTable
from ..joules import sum_domains, sum_windows
from ..recording import Recording, Stack
from ..schema import Energy
from ..timeline.columns import Timeline
from ..timeline.link import Step
from ..trace import PowerTrace

FULLY = 0.98
"""A run counts as traced if at least this share of it was."""
FUNCTION = "function"
"""The kind of a row for a Python function in sampled stacks; its calls are samples."""
BY_STACKS = "the watts at each sampled Python stack"
"""How joules are shared out among functions and lines."""
OLDER = "this summary has no time in each operator alone, so no operator has joules of its own: record it again"
FEW_SAMPLES = 100
"""With fewer samples of stacks than this, a share may be wrong by more than 8%: a note gives their number."""
_Z90 = 1.645  # of the normal distribution: 90% are within so many standard deviations
_STEPS = re.compile(r"ProfilerStep#N|(?:train_|training_)?(?:step|iteration|iter)[\s_#:/-]*N", re.IGNORECASE)
_LINE = re.compile(r":\d+ ")
_NAN = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Joules of a run that no row has: "before" what was traced, "between" its windows, "after" it.

    It has the steps there, too. "unsampled": while no sensor was read. The counter knows how many joules there were,
    but not where.
    """

    where: str
    energy_j: float
    time_s: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The run from its start to its end, whether traced or not. `steps` is None if it has none.

    `whole_steps` are those whose beginning and end are known: for the first step of a script, only the end is.
    """

    energy_j: float
    error_j: float
    time_s: float
    power_w: float | None
    error_w: float | None
    steps: int | None
    whole_steps: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: what `--json` has as "run"."""
        return {"energy_j": self.energy_j, "error_j": self.error_j, "time_s": self.time_s, "steps": self.steps}


def is_partial(recording: Recording, table: EnergyTable) -> bool:
    """Return whether the table covers only a part of the run: no row contains what was not traced."""
    start_ns, end_ns = recording.span_ns
    traced_s = sum(b - a for a, b in recording.accounted_windows) * 1e-9
    return bool(table.kernels or table.ops) and max(traced_s, table.time_s) < FULLY * (end_ns - start_ns) * 1e-9


def whole_of(recording: Recording, table: EnergyTable, partial: bool, shared: TimeShares | None) -> Whole:
    """Return the table's figures if it covers all; else those from the samples of the table's devices."""
    timed = recording.timeline.linked.steps
    several = len(np.unique(recording.timeline["rank"])) > 1  # ranks take a step together
    whole_steps = len({s.name for s in timed}) if several else len(timed)
    steps = whole_steps + _unbegun(recording, timed)
    if shared is not None and shared.steps:
        steps, whole_steps = shared.steps, shared.whole_steps
    spent = Energy(
        energy_j=table.energy_j,
        error_j=table.error_j,
        time_s=table.time_s,
        coverage=table.coverage,
        source=table.source,
        basis=table.basis,
    )
    if partial and recording.power is not None:
        spent = _fill_gaps(recording.power, recording.timeline)
    seen_s = spent.time_s * spent.coverage if spent.energy_j >= 0 else 0.0
    return Whole(
        energy_j=spent.energy_j,
        error_j=spent.error_j,
        time_s=spent.time_s,
        steps=steps or None,
        power_w=spent.energy_j / seen_s if seen_s > 0 else None,
        error_w=spent.error_j / seen_s if seen_s > 0 else None,
        whole_steps=whole_steps if steps else None,
    )


def _unbegun(recording: Recording, steps: Sequence[Step]) -> int:
    """Return 1 if the script's first step has no row: its optimizer shows when a step ends, but not when it begins.

    Steps that are counted by optimizers follow one another without a gap (except for evaluation), which regions that a
    program names itself never do.
    """
    if recording.facts.meta.get("command") is None or not steps or steps[0].name != "step_1":
        return 0
    ranks = recording.timeline["rank"]
    steps = [s for s in steps if ranks[s.row] == ranks[steps[0].row]]
    return int(len(steps) == 1 or any(a.end_ns == b.start_ns for a, b in pairwise(steps)))


def _fill_gaps(power: PowerTrace, timeline: Timeline) -> Energy:
    """Return the whole run's energy, gaps in the samples filled by the counter: only the sum can have those joules."""
    names = _accounted_domains(power, timeline)
    parts = [power.columns[n].energy(power.start_ns, power.end_ns, fill_gaps=True) for n in names]
    return sum_domains(parts, power.seconds)


def accounted_power(power: PowerTrace, timeline: Timeline) -> PowerTrace:
    """The power of the devices that the table is about: a log may be of more boards than ran anything."""
    columns = {name: power.columns[name] for name in _accounted_domains(power, timeline)}
    return PowerTrace(columns, start_ns=power.start_ns, end_ns=power.end_ns)


def accounted_energies(power: PowerTrace, timeline: Timeline, spans: Sequence[tuple[int, int]]) -> list[Energy]:
    """Return joules of some stretches of time, of the devices that the table is about."""
    columns = [power.columns[name] for name in _accounted_domains(power, timeline)]
    return [sum_domains([c.energy(start, end) for c in columns], (end - start) * 1e-9) for start, end in spans]


def outside(recording: Recording, table_j: float, whole: Whole) -> list[Outside]:
    """Return where the joules are that no row has; with the table's, they are the whole run's."""
    timeline, power = recording.timeline, recording.power
    if power is None:
        return []
    first, last = power.start_ns, power.end_ns
    windows = [(min(max(a, first), last), min(max(b, first), last)) for a, b in recording.accounted_windows]
    spans: dict[str, list[tuple[int, int]]] = {
        "before": [(first, windows[0][0])],
        "between": [(one[1], two[0]) for one, two in pairwise(windows)],
        "after": [(windows[-1][1], last)],
    }
    several = len(np.unique(timeline["rank"])) > 1  # ranks take a step together
    middles = {s.name if several else i: (s.start_ns + s.end_ns) // 2 for i, s in enumerate(timeline.linked.steps)}
    parts = []
    for where, stretches in spans.items():
        spent = accounted_energies(power, timeline, [(a, b) for a, b in stretches if b > a])
        part = sum_windows(spent) if spent else None
        if part is not None and part.energy_j > 0:
            steps = sum(a <= middle < b for a, b in stretches for middle in middles.values())
            seconds = part.time_s * part.coverage
            parts.append(Outside(where=where, energy_j=part.energy_j, time_s=seconds, steps=steps))
    rest_j = whole.energy_j - table_j - sum(p.energy_j for p in parts)
    if rest_j > max(whole.error_j, (1.0 - FULLY) * whole.energy_j):
        names = _accounted_domains(power, timeline)
        gaps = [(max(g.start_ns, first), min(g.end_ns or last, last)) for g in power.gaps if g.domain in names]
        blind_s = sum(max(0, end - start) for start, end in gaps) * 1e-9 / max(1, len(names))
        parts.append(Outside(where="unsampled", energy_j=rest_j, time_s=blind_s, steps=0))
    return parts


def _accounted_domains(power: PowerTrace, timeline: Timeline) -> list[str]:
    """Return the domains that attribution uses: boards on which something ran, else the first of the host's."""
    counted = {name: c.domain.device for name, c in power.columns.items() if c.domain.counted}
    boards = [name for name, device in counted.items() if device.is_gpu]
    used, by_rank = timeline.devices, [c.domain.name for c in power.by_rank.values()]
    if not used:
        hosts = [name for name in counted if name not in boards]
        # The ranks of each host share its first domain.
        return list(dict.fromkeys(n.rpartition(".")[0] for n in by_rank)) or hosts[:1] or boards
    boards = boards or list(counted)
    return [name for name in boards if counted[name] in used] or boards[:1]


# -- shares by time ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """Rows whose joules are shares of a total, and how they were shared.

    Operators, or kernels, and `rest_j` sum to the total. `steps` are those that a summary counted; `whole_steps` those
    whose beginning is known too, which took `steps_s` and `steps_j`.
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
    """Joules and seconds of a summarised run, and those from its first traced window on."""

    energy_j: float
    time_s: float
    since_j: float
    since_s: float

    @property
    def working_w(self) -> float:
        """Return the mean watts since work was first traced; of the run if that is not known."""
        if self.since_s > 0 and self.since_j > 0:
            return self.since_j / self.since_s
        return self.energy_j / self.time_s if self.time_s > 0 else 0.0


def from_summary(summary: Any, run: RunTotals) -> TimeShares | None:
    """Make rows from the totals of a summary-mode session: its windows stand for all steps, not for what came before.

    Without steps, the windows stand for everything since the first of them: the next one may come minutes later, or
    never. Kernels, or operators on a host alone, get the share of the steps' joules that their time has of the traced
    time; an operator's time excludes the operators that it calls. Calls and seconds are for all steps, like joules;
    calls are scaled by the number of traced steps, because tracing made those longer than the others. Regions are
    counted all the time, except those that torch itself names, which are seen in windows.
    """
    if not isinstance(summary, Mapping):
        return None
    seen_s = float(summary.get("traced_s") or 0.0)
    seen_s = seen_s if seen_s > 1e-9 else 0.0  # times are whole nanoseconds
    step = next((r for r in _with_names(summary.get("regions")) if _STEPS.fullmatch(str(r["name"]))), {})
    steps, steps_s = int(step.get("calls", 0)), float(step.get("time_s", 0.0))
    worked_s = min(max(steps_s or run.since_s or run.time_s, seen_s), run.time_s)
    scale = worked_s / seen_s if seen_s > 0 else 1.0
    traced_steps = float(summary.get("traced_steps") or 0.0)
    work = _TracedWork(
        seconds=worked_s,
        energy_j=min(worked_s * run.working_w, run.energy_j),
        seen_s=seen_s,
        repeats=max(steps / traced_steps, 1.0) if steps and traced_steps > 0 else scale,
        run=run,
    )
    regions = [work.region(r) for r in _with_names(summary.get("regions")) if r is not step]
    kernels = work.rows(summary.get("kernels"), "kernel", "time_s")
    ops = [] if kernels else work.rows(summary.get("ops"), "op", "self_s")
    if not kernels and not ops and not regions and not steps:
        return None
    older = None if kernels or ops or not summary.get("ops") else OLDER
    by = "the time of each kernel" if kernels else "the time in each operator itself"
    rest_j = run.energy_j - math.fsum(r.energy_j for r in (*kernels, *ops))
    return TimeShares(
        by=by if kernels or ops else "time",
        ops=ops,
        kernels=kernels,
        regions=regions,
        rest_j=max(rest_j, 0.0),
        steps=steps or None,
        whole_steps=steps - (step.get("min_ns") == 0),
        steps_s=steps_s,
        steps_j=min(steps_s * run.working_w, run.energy_j),
        note=older,
    )


def weigh_stacks(stacks: Sequence[Stack], power: PowerTrace, total_j: float, pid: int) -> list[tuple[str, int, float]]:
    """Return (stack, samples, joules) of the main thread: each sample weighted with its seconds and its time's watts.

    Every thread is in every sample, and most of them wait, so only the main thread (its number is the process's)
    counts.
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
    counts = np.array([count for _, _, count in samples], np.float64)
    weights = level * counts * _seconds_each(at, counts)
    joules = total_j * weights / (weights.sum() or 1.0)
    return [(stack, count, j) for (_, stack, count), j in zip(samples, joules.tolist(), strict=True)]


def _seconds_each(at_ns: NDArray[np.int64], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how long one sample of each row stands for; rows sampled at the same time share the interval."""
    starts_ns, which = np.unique(at_ns, return_inverse=True)
    samples = np.bincount(which, counts)
    if len(starts_ns) < 2:
        return np.ones(len(counts))
    lengths_s = np.diff(starts_ns) * 1e-9
    mean_s = lengths_s.sum() / samples[:-1].sum()  # for the last ones, whose end is not known
    each_s: NDArray[np.float64] = np.append(lengths_s / samples[:-1], mean_s)[which]
    return each_s


def stacks_of(recording: Recording, total_j: float) -> list[tuple[str, int, float]]:
    """Return the sampled stacks of the main thread with their joules; [] if none were recorded."""
    if recording.power is None:
        return []
    return weigh_stacks(recording.stacks, recording.power, total_j, recording.facts.pid)


def from_stacks(stacks: Sequence[tuple[str, int, float]], total_j: float) -> TimeShares | None:
    """Return rows by the innermost function of weighted stacks."""
    if not stacks:
        return None
    leaves = [(stack.rsplit(";", 1)[-1], count, joules) for stack, count, joules in stacks]
    taken = sum(count for _, count, _ in stacks)
    note = None
    if taken < FEW_SAMPLES:
        error = find_share_error(0.5, _effective_samples(stacks))
        note = f"only {taken} samples of Python stacks: a share of 50% is known to ± {error:.0%}; a longer run has more"
    return TimeShares(by=BY_STACKS, ops=_sum_by_name(leaves, total_j, _effective_samples(stacks)), note=note)


def find_share_error(share: float, samples: float) -> float:
    """Return the half-width around `share` that contains its binomial 90% interval.

    This is Wilson's interval (E. B. Wilson, J. Am. Stat. Assoc. 22, 1927), which is not zero if no sample, or every
    sample, is of this row.
    """
    if not samples > 0:
        return 1.0
    extra = _Z90**2 / samples
    middle = (share + extra / 2) / (1 + extra)
    half = _Z90 * math.sqrt(max(share * (1 - share), 0.0) / samples + extra / (4 * samples)) / (1 + extra)
    return half + abs(middle - share)


def _effective_samples(stacks: Sequence[tuple[str, int, float]]) -> float:
    """Return how many samples of equal weight tell as much as these (L. Kish, "Survey Sampling", 1965)."""
    squares = math.fsum(joules**2 / count for _, count, joules in stacks if count)
    return math.fsum(joules for _, _, joules in stacks) ** 2 / squares if squares > 0 else 0.0


def _sum_by_name(parts: Sequence[tuple[str, int, float]], total_j: float, samples: float) -> list[EnergyRow]:
    spent: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for name, count, joules in parts:
        spent[name] = spent.get(name, 0.0) + joules
        counts[name] += count
    return [
        EnergyRow(
            name=name,
            kind=FUNCTION,
            calls=counts[name],
            time_s=0.0,
            energy_j=joules,
            error_j=_NAN,
            share=joules / total_j,
            share_error=find_share_error(joules / total_j, samples),
        )
        for name, joules in spent.items()
    ]


def find_own_lines(stacks: Sequence[tuple[str, int, float]], total_j: float) -> list[EnergyRow]:
    """Return rows by the innermost line of the user's own code in each stack, with what it calls, most joules first."""
    own = [(_own_frames(stack), count, joules) for stack, count, joules in stacks]
    lines = [(frames[-1], count, joules) for frames, count, joules in own if frames]
    return sort_by_energy(_sum_by_name(lines, total_j, _effective_samples(stacks)))


def find_own_functions(stacks: Sequence[tuple[str, int, float]], total_j: float) -> list[EnergyRow]:
    """Return rows by function of the user's own code, with all that it calls, most joules first."""
    # Each function counts once in a stack, without its line: "./train.py:31 step" is "./train.py step".
    own = [({_LINE.sub(" ", f) for f in _own_frames(stack)}, count, joules) for stack, count, joules in stacks]
    functions = [(name, count, joules) for names, count, joules in own for name in names]
    return sort_by_energy(_sum_by_name(functions, total_j, _effective_samples(stacks)))


def _own_frames(stack: str) -> list[str]:
    return [frame for frame in stack.split(";") if frame.startswith(("./", "/"))]


def sort_by_energy(rows: Sequence[EnergyRow]) -> list[EnergyRow]:
    """Return rows, most joules first."""
    return sorted(rows, key=lambda r: r.energy_j, reverse=True)


def _with_names(rows: Any) -> list[Mapping[str, Any]]:
    return [r for r in rows or () if isinstance(r, Mapping) and r.get("name")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _TracedWork:
    """The part of a run that its traced windows stand for, how much of it they are, and how often calls occur in it."""

    seconds: float
    energy_j: float
    seen_s: float
    repeats: float
    run: RunTotals

    def rows(self, summary: Any, kind: str, key: str) -> list[EnergyRow]:
        """Return rows that are parts of the traced time: together they never exceed it, however many ran at once."""
        rows = [r for r in _with_names(summary) if r.get(key) is not None]
        base_s = max(self.seen_s, math.fsum(float(r[key]) for r in rows))
        if not base_s > 0:
            return []
        return [self._row(r, kind, float(r[key]) / base_s * self.seconds) for r in rows]

    def region(self, row: Mapping[str, Any]) -> EnergyRow:
        """Return a region's row: over all its passes, or those in windows scaled to all of the work.

        Regions overlap.
        """
        seconds = float(row.get("time_s", 0.0))
        if row.get("traced") and self.seen_s > 0:
            return self._row(row, "region", min(seconds * self.seconds / self.seen_s, self.run.time_s))
        return self._row(row, "region", min(seconds, self.run.time_s), whole=True)

    def _row(self, row: Mapping[str, Any], kind: str, seconds: float, *, whole: bool = False) -> EnergyRow:
        """Return one row with so many seconds of the work; `whole`: its calls are already complete."""
        watts = self.energy_j / self.seconds if self.seconds > 0 else 0.0
        joules = min(seconds * watts, self.run.energy_j)
        return EnergyRow(
            name=str(row["name"]),
            kind=str(row.get("kind", kind)),
            calls=round(int(row.get("calls", 0)) * (1.0 if whole else self.repeats)),
            time_s=seconds,
            energy_j=joules,
            error_j=_NAN,
            share=joules / self.run.energy_j if self.run.energy_j > 0 else 0.0,
        )
