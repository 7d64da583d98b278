"""What tracing did to the program it traced: longer steps, and a device that waited for the tracer.

::

    steps       | | | |   |   |   |   |   |·······|··|··| | | | |
    Kineto              w |<---- window ---->| stop, read |            w: its warm-up
    counted       u u       t   t   t   t                 u u u        u: untraced, t: traced, the others neither

Kineto makes an event of every operator and launch, on the thread that runs it. A step whose kernels take longer than
its launches hides that cost; if the launches take longer, every kernel waits for the tracer. Untraced steps of the same
run show how much. If there are too few of them, the number of events gives an upper bound, which is never more than the
device waited.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..attribute.table import EnergyTable
from ..joules import Floats, sum_windows
from ..record import Kind
from ..recording import Recording
from ..schema import Energy
from ..timeline.columns import Ints, Timeline
from ..timeline.intervals import EMPTY, Spans, covered_ns, difference, intersection, union
from ..timeline.link import steps_of
from ..trace import PowerTrace
from ..units import format_duration, format_energy
from .devices import busy_spans, whole_span
from .mean_step import BLOCKS, independent_error, mean_error
from .run_energy import accounted_energies

Bools = NDArray[np.bool_]
By = Literal["steps", "events"]

HOST: tuple[Kind, ...] = ("op", "runtime", "graph_launch")
# Seconds that one event of the host costs at most: the highest of benchmarks/device/overhead_why.py. On an H200's host,
# 6,500 events a step of GPT-2 made steps of 36 ms (only the launches, while they run ahead of the device) take 51 to 70
# ms; on 2 cores of a Xeon without a device, 2,100 events a step made 1.5 ms take 2.7 to 3.5 ms.
EVENT_S = {"device": 5.5e-6, "host": 1.0e-6}
LAUNCH_S = 6.6e-6
"""Extra seconds that a launch costs the host if CUPTI records kernels and Kineto has recorded operators before, after
which CUPTI watches every call: a loop of small kernels on an H200's host (benchmarks/device/launch_cost.py). Hosts
differ.
"""
FIRST = 3
"""First steps of a run that do not count: they compile, allocate and warm up."""
UNTRACED, TRACED = 5, 3
"""Fewer steps are not enough to tell."""
MANY = 10
"""With this many times as many undisturbed steps, what the few steps with operators took is not worth a line."""
SURE = 0.1
"""A ratio with a larger relative error (90%) counts as unknown: the program's steps differ too much, or are too few."""
PAUSED_S = 0.1
"""Seconds: a shorter pause is not worth a line, because nobody would notice it beside a program's other pauses."""
MATTERS = 1.05
"""A smaller slowdown is not worth a line."""
LAUNCHES_MATTER = 1.1
"""Hosts differ by a factor of two in what a launch costs, so less than this is not worth a line."""
BOUNDED = 0.75
"""If events may have cost more than this share of the time, they bound no factor."""
SEEN = 0.98
"""Steps of which the sensor saw less than this share have no joules."""
# Factors: 90% of a normal distribution; a median's error over a mean's; a deviation over its median absolute one.
_HALF_WIDTH = 1.645 * math.sqrt(math.pi / 2) * 1.4826


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """How much longer the program took for being traced: `slowdown` 1.4 is 40% longer; None where it is not known.

    `is_brief`: operators were traced in these few steps only, and all others ran as without a tracer.
    `basis` "steps": traced steps against untraced ones of the run, with the half-width of a 90% interval. "events":
    the most it can have been, from the events that were made. `reason` says why untraced steps do not tell. `idle_s`
    and `idle_j` are what the devices waited for the tracer, of the time that was traced. `launches` recorded by CUPTI
    made the run longer by about `launches_s`, no more than the devices waited: `launches_slowdown`. `pauses` times the
    program stood still for its operators to be collected, for `paused_s` in all, longest in the step `paused_step`;
    the run's joules contain the `paused_j` of that time.
    """

    slowdown: float | None
    basis: By
    slowdown_error: float | None = None
    traced_step_s: float | None = None
    untraced_step_s: float | None = None
    traced_steps: int = 0
    untraced_steps: int = 0
    untraced_step_j: float | None = None
    untraced_step_error_j: float | None = None
    untraced_steps_per_s: float | None = None
    untraced_step_error_s: float | None = None
    idle_s: float = 0.0
    idle_j: float = 0.0
    reason: str | None = None
    is_brief: bool = False
    launches: int = 0
    launches_s: float = 0.0
    launches_slowdown: float = 1.0
    pauses: int = 0
    paused_s: float = 0.0
    paused_j: float | None = None
    paused_step: str | None = None

    @property
    def matters(self) -> bool:
        """Return whether a reader must know: slower by 5% or more, and not by chance, or by an unknown factor."""
        if self.slowdown is None:
            return True
        return self.slowdown > MATTERS and self.slowdown - 1.0 > (self.slowdown_error or 0.0)

    @property
    def text(self) -> str | None:
        """Return one line for a reader; None if it does not matter."""
        return "; ".join(filter(None, (self._tell_slowdown(), self._tell_launches(), self._tell_pauses()))) or None

    def _tell_launches(self) -> str | None:
        if self.launches_slowdown < LAUNCHES_MATTER:
            return None
        each = format_duration(self.launches_s / self.launches, 2)
        return (
            f"recording {self.launches:,} launches took about {each} of the host each, and the device waited for it: "
            f"the program took about {self.launches_slowdown:.2f}x as long; --operator-steps 0 costs less, --mode "
            "sampling nothing"
        )

    def _tell_pauses(self) -> str | None:
        if self.paused_s < PAUSED_S:
            return None
        lasted = format_duration(self.paused_s, 2)
        spent = f", and {format_energy(self.paused_j, 2)} were used meanwhile" if self.paused_j is not None else ""
        times = f"once for {lasted}" if self.pauses == 1 else f"{self.pauses} times for {lasted} in all, longest"
        where = f" in {self.paused_step}" if self.paused_step is not None else ""
        times = times if where else times.removesuffix(", longest")
        return f"collecting operators paused the program {times}{where}{spent}"

    def _tell_slowdown(self) -> str | None:
        if not self.matters or (self.is_brief and self.untraced_steps > MANY * max(self.traced_steps, TRACED)):
            return None
        at_most = self.basis == "events"
        what = "steps" if self.traced_step_s is not None else "the program"
        lasted = [format_duration(s, 3) for s in (self.traced_step_s, self.untraced_step_s) if s is not None]
        took = f" (median: {lasted[0]} traced{f', {lasted[1]} untraced' if len(lasted) > 1 else ''})" if lasted else ""
        times = f"{'up to ' * at_most}{self.slowdown:.2f}x as long" if self.slowdown else "longer, unknown by how much"
        if self.is_brief:
            return (
                f"tracing operators made {self.traced_steps or 'a few'} steps {times}{took}; all others ran untouched"
            )
        line = f"tracing made {what} {times}{took}"
        if self.idle_j > 0:
            spent = format_energy(self.idle_j, 3)
            line += f": {'up to' if at_most else 'about'} {spent} of idle are the tracer's, which no advice counts"
        return line

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: what `--json` has as "tracing"."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def slowdown_of(recording: Recording, table: EnergyTable | None) -> Slowdown | None:
    """Return what tracing cost a run; None if hardly anything was traced, and for several ranks.

    For a trace alone, only the events tell. Without a table or power, the joules are not known.
    """
    timeline, power, facts = recording.timeline, recording.power, recording.facts
    if recording.ranks or facts.mode == "summary" or not len(timeline.rows(*HOST)):
        return None
    of_run = facts.kind == "run"
    windows = _spans(facts.operator_windows or facts.windows if of_run else [(timeline.start_ns, timeline.end_ns)])
    tracing_s = facts.tracing_s if of_run else None
    if not windows.total_ns > 0:
        return None
    steps = _StepTimes(timeline, windows, tracing_s)
    slowdown = dataclasses.replace(
        steps.by_steps() or steps.by_events(), is_brief=bool(facts.operator_windows), **_sum_pauses(recording)
    )
    slowdown = dataclasses.replace(slowdown, **_sum_launches(recording))
    if table is not None and table.idle_j > 0:
        idle_s = max(table.time_s * steps.devices - table.busy_s, slowdown.idle_s)
        idle_j = table.idle_j * slowdown.idle_s / idle_s if idle_s > 0 else 0.0
        slowdown = dataclasses.replace(slowdown, idle_j=idle_j)
    return _add_joules(slowdown, steps, power) if power is not None and slowdown.basis == "steps" else slowdown


def _sum_launches(recording: Recording) -> dict[str, Any]:
    """Return what CUPTI's records of the whole run cost, as `Slowdown` has it; nothing if it kept none."""
    timeline, collectors = recording.timeline, recording.facts.collectors
    if collectors.get("kernels") != "cupti" or not recording.facts.operator_windows:
        return {}
    rows = timeline.device_rows
    rows = rows[timeline["graph_node"][rows] <= 0]  # a graph is one launch of many kernels
    if not len(rows):
        return {}
    begin_ns, end_ns = whole_span(timeline, rows)
    busy_ns = _busiest(timeline).total_ns
    whole_s = (end_ns - begin_ns) * 1e-9
    cost_s = min(len(rows) * LAUNCH_S, max(whole_s - busy_ns * 1e-9, 0.0), BOUNDED * whole_s)
    return {"launches": len(rows), "launches_s": cost_s, "launches_slowdown": whole_s / (whole_s - cost_s)}


def _sum_pauses(recording: Recording) -> dict[str, Any]:
    """Return how often, how long and at what cost the program stood still, and the step of the longest pause."""
    pauses, power = recording.facts.pauses, recording.power
    edges = [(pause.start_ns, pause.start_ns + round(pause.seconds * 1e9)) for pause in pauses]
    spent = _sum_energy(accounted_energies(power, recording.timeline, edges)) if power is not None and edges else None
    longest_ns = max(pauses, key=lambda pause: pause.seconds).start_ns if pauses else 0
    steps = steps_of(recording.timeline) if pauses else ()
    inside = [step.name for step in steps if step.start_ns <= longest_ns < step.end_ns]
    return {
        "pauses": len(pauses),
        "paused_s": sum(pause.seconds for pause in pauses),
        "paused_j": spent.energy_j if spent is not None else None,
        "paused_step": inside[-1] if inside else None,
    }


def find_untouched(recording: Recording) -> list[tuple[int, int]]:
    """Return the stretches of a run whose idle time is the program's own: in a light run, those without operators.

    In any other run, all that is accounted for: there is nothing else to look at.
    """
    facts = recording.facts
    windows = recording.accounted_windows
    if not facts.operator_windows:
        return windows
    traced = _spans(facts.operator_windows)
    touched = union(traced.start_ns, _find_reading(traced, facts.tracing_s).clip(max=windows[-1][1]))
    untouched = difference(_spans(windows), touched)
    return list(zip(*(edge.tolist() for edge in untouched), strict=True)) or windows


class _StepTimes:
    """The steps of a run, which of them were traced, and what its devices and host did meanwhile."""

    def __init__(self, timeline: Timeline, windows: Spans, tracing_s: float | None) -> None:
        self.timeline = timeline
        edges = np.array([(s.start_ns, s.end_ns) for s in steps_of(timeline)], np.int64).reshape(-1, 2)
        self.begins, self.ends = edges[:, 0], edges[:, 1]
        self.seconds: Floats = np.asarray((self.ends - self.begins) * 1e-9, np.float64)
        self.traced, self.untraced = _sort_steps(self.begins, self.ends, windows, tracing_s)
        self.devices = len(timeline.devices)
        self.busy = _busiest(timeline)
        self.host_ns = np.sort(timeline["start_ns"][timeline.rows(*HOST)])
        whole = union(*windows)
        self.spans = intersection(whole, union(self.begins, self.ends)) if self.traced.any() else whole
        """What tracing made longer: the steps; in a run without steps, all that was traced."""
        self.passes = float((covered_ns(whole, self.begins, self.ends) / np.maximum(self.ends - self.begins, 1)).sum())
        """How many steps were traced, including parts of some."""

    def waited_s(self, spans: Spans) -> float:
        """Return how long even the busiest device had nothing to do."""
        return (spans.total_ns - int(covered_ns(self.busy, *spans).sum())) * 1e-9

    def by_steps(self) -> Slowdown | None:
        """Compare traced steps with untraced ones; None if they do not tell."""
        if self.reason is not None:
            return None
        traced_s, untraced_s = (float(np.median(self.seconds[m])) for m in (self.traced, self.untraced))
        lost_s = max(traced_s - untraced_s, 0.0) * self.passes
        return Slowdown(
            slowdown=traced_s / untraced_s,
            slowdown_error=traced_s / untraced_s * self.doubt,
            basis="steps",
            traced_step_s=traced_s,
            untraced_step_s=untraced_s,
            traced_steps=int(self.traced.sum()),
            untraced_steps=int(self.untraced.sum()),
            idle_s=self.devices * min(lost_s, self.waited_s(self.spans)),
        )

    def by_events(self) -> Slowdown:
        """Return an upper bound.

        The factor is that of whole steps, because the first steps of a run do other things too.
        """
        clean = union(self.begins[self.traced], self.ends[self.traced]) if self.traced.any() else self.spans
        whole_s, lost_s = clean.total_ns * 1e-9, self._cost_s(clean)
        return Slowdown(
            slowdown=whole_s / (whole_s - lost_s) if lost_s < BOUNDED * whole_s else None,
            traced_step_s=float(np.median(self.seconds[self.traced])) if self.traced.any() else None,
            traced_steps=int(self.traced.sum()),
            untraced_steps=int(self.untraced.sum()),
            idle_s=self.devices * self._cost_s(self.spans),
            basis="events",
            reason=self.reason,
        )

    def _cost_s(self, spans: Spans) -> float:
        """Return what the events in some spans cost at most; a busy device hides it."""
        first, last = (np.searchsorted(self.host_ns, edge) for edge in spans)
        cost_s = int((last - first).sum()) * EVENT_S["device" if self.devices else "host"]
        return min(cost_s, self.waited_s(spans) if self.devices else spans.total_ns * 1e-9)

    @property
    def doubt(self) -> float:
        """Return the half-width of the 90% interval of the ratio, relative to it."""
        return math.hypot(*(_doubt(self.seconds[m]) for m in (self.traced, self.untraced)))

    @property
    def reason(self) -> str | None:
        """Return why untraced steps do not tell; None if they do."""
        traced, untraced = int(self.traced.sum()), int(self.untraced.sum())
        if not len(self.begins):
            return "the run has no steps"
        if traced < TRACED or untraced < UNTRACED:
            least = f"it takes {TRACED} and {UNTRACED} whole ones, without the first {FIRST} of the run"
            return f"{traced} traced and {untraced} untraced steps are too few: {least}"
        if self.doubt > SURE:
            return f"the steps differ too much: their ratio is known to ± {self.doubt:.0%}"
        return None


def _spans(windows: Sequence[Sequence[int]]) -> Spans:
    """Return windows as spans, each on its own, even if one begins as another ends."""
    edges = np.array(sorted((int(a), int(b)) for a, b in windows), np.int64).reshape(-1, 2)
    return Spans(edges[:, 0], edges[:, 1]) if len(edges) else EMPTY


def _sort_steps(begins: Ints, ends: Ints, windows: Spans, tracing_s: float | None) -> tuple[Bools, Bools]:
    """Return which steps were traced whole and undisturbed, and which not at all.

    Steps after a window are disturbed while it is read.
    """
    reading = _find_reading(windows, tracing_s)
    inside, touched, disturbed = (np.zeros(len(begins), bool) for _ in range(3))
    for begin, end, until in zip(windows.start_ns.tolist(), windows.end_ns.tolist(), reading.tolist(), strict=True):
        inside |= (begins >= begin) & (ends <= end)
        touched |= (ends > begin) & (begins < end)
        disturbed |= (ends > end) & (begins < until)
    warming = np.r_[touched[1:], False] & ~touched  # Kineto is prepared in the step before a window
    later = (np.arange(len(begins)) >= FIRST) & (ends > begins)
    return inside & ~disturbed & later, ~touched & ~disturbed & ~warming & later


def _find_reading(windows: Spans, tracing_s: float | None) -> Ints:
    """Return the time until which each window was read.

    A closed window is exported and read on a thread that holds the interpreter's lock. The total time of that is known,
    and is divided by the windows' lengths. For a run that was cut it is not known, and what comes after a window tells
    nothing.
    """
    lengths = windows.end_ns - windows.start_ns
    if tracing_s is None or not lengths.sum() > 0:
        return np.full(len(lengths), np.iinfo(np.int64).max // 2)
    until: Ints = windows.end_ns + (tracing_s * 1e9 * lengths / lengths.sum()).astype(np.int64)
    return until


def _doubt(seconds: Floats) -> float:
    """Return the half-width of the 90% interval of some steps' median, relative to it.

    The wider of two estimates, as in `mean_error`: by the steps, and by stretches of them, because another program on
    the machine makes many steps in a row longer.
    """
    middle = float(np.median(seconds))
    by_step = _HALF_WIDTH * float(np.median(np.abs(seconds - middle))) / math.sqrt(len(seconds))
    stretches = np.array_split(seconds, min(BLOCKS, len(seconds) // 2))
    by_stretch = independent_error([float(np.median(part)) for part in stretches])
    return max(by_step, 0.0 if math.isnan(by_stretch) else by_stretch) / middle


def _busiest(timeline: Timeline) -> Spans:
    """Return when the device that waited least was busy: a step is never shorter than that."""
    spans = [busy_spans(timeline, rows) for rows in timeline.by_device().values()]
    return max([EMPTY, *spans], key=lambda s: s.total_ns)


def _add_joules(slowdown: Slowdown, steps: _StepTimes, power: PowerTrace) -> Slowdown:
    """Add the joules of an untraced step, if the sensor saw them: a traced step's extra joules are the tracer's."""
    traced, untraced = (_sum_joules(steps, chosen, power) for chosen in (steps.traced, steps.untraced))
    if untraced is None:
        return slowdown
    count = slowdown.untraced_steps
    own_j, scatter_j = untraced.error_j / count, mean_error(_each(steps, steps.untraced, power))
    idle_j = slowdown.idle_j
    if traced is not None:
        more_j = traced.energy_j / slowdown.traced_steps - untraced.energy_j / count
        idle_j = min(idle_j, max(more_j, 0.0) * steps.passes)
    return dataclasses.replace(
        slowdown,
        untraced_step_j=untraced.energy_j / count,
        untraced_step_error_j=own_j if math.isnan(scatter_j) else math.hypot(own_j, scatter_j),
        untraced_steps_per_s=count / untraced.time_s,
        untraced_step_error_s=mean_error(steps.seconds[steps.untraced]),
        idle_j=idle_j,
    )


def _each(steps: _StepTimes, chosen: Bools, power: PowerTrace) -> list[float]:
    """Return joules of some steps one by one, for their scatter: as in `mean_step`, where each has a row."""
    edges = np.stack([steps.begins[chosen], steps.ends[chosen]], axis=1)
    return [spent.energy_j for spent in accounted_energies(power, steps.timeline, edges.tolist())]


def _sum_joules(steps: _StepTimes, chosen: Bools, power: PowerTrace) -> Energy | None:
    """Return joules of some steps; None if the sensor did not see them."""
    # Merge consecutive steps: what is between two others (a validation, a data loader) belongs to no step.
    edges = np.stack(union(steps.begins[chosen], steps.ends[chosen]), axis=1)
    return _sum_energy(accounted_energies(power, steps.timeline, edges.tolist()))


def _sum_energy(windows: Sequence[Energy]) -> Energy | None:
    spent = sum_windows(windows)
    return spent if spent.coverage >= SEEN and spent.energy_j > 0 else None
