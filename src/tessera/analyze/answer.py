"""The one-screen answer of a recorded run, as data: what it cost, where the joules went, what to do about it.

Computed from the run file and its `EnergyTable`; `report.run` and `report.run_html` only lay it out.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..advice import Advice
from ..attribute.table import EnergyRow, EnergyTable, IdleName, OperatorCoverage, name_idle
from ..config import find_cost
from ..notes import order_notes
from ..recording import CpuUse, Facts, Recording
from ..schema import Basis, Scope
from ..trace import PowerTrace
from ..units import format_duration, format_energy_error
from .advise import find_advice
from .evidence import HostGap, RunEvidence, find_run_gaps
from .job_summary import JobSummary, summarize_job
from .kernel_names import CATEGORIES, category
from .mean_step import StepSpread, mean_step, select_steps, spread_steps
from .outside_steps import OutsideSteps, find_outside_steps
from .run_energy import (
    Outside,
    RunTotals,
    TimeShares,
    Whole,
    accounted_power,
    find_own_functions,
    find_own_lines,
    from_stacks,
    from_summary,
    is_partial,
    outside,
    sort_by_energy,
    stacks_of,
    whole_of,
)
from .run_steps import find_every_step
from .slowdown import FIRST, Slowdown, slowdown_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PerWork:
    """Joules of one step, sample, token, and how many there were a second.

    `without` names first steps that were left out, `left_out` says which do not count and why. With `traced_j`, these
    are steps that were not traced, because tracing slowed the traced ones, which cost `traced_j`. With `traced_steps`,
    these are all steps of the run, of which only so many were traced. `spread`: how the steps that count differ.
    """

    unit: str
    amount: float
    energy_j: float
    error_j: float
    rate_per_s: float
    without: str | None = None
    left_out: str | None = None
    traced_j: float | None = None
    traced_steps: int | None = None
    spread: StepSpread | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryShare:
    """The joules of one kind of work in the whole run: matrix products, attention, copies, idle."""

    name: str
    energy_j: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a run cost. Joules are those of its `EnergyTable`; every error is the half-width of a 90% interval.

    `whole` is the run from end to end. Where only a part of it was traced (`partial`), every other figure describes
    that part, as the table does; it has `traced_steps` of the steps, and `limited` says that a time limit ended it. The
    part, what is `outside`, and what only the energy counter saw in a gap of the samples sum to the whole. `ops` and
    `kernels` are all rows, most joules first. Where nothing was attributed (a sampled or summarised run), `shared_by`
    says how the joules were shared out instead: those rows have no error (sampled ones that of their share), and
    `rest_j` is in no row. `functions` and `lines` are those of the user's own code with what they call, of the whole
    run, where stacks were sampled. `cut` says why the file ends early, where it does. `scope` says whether CPU joules
    are those of the program and its children, or of everything on the machine; `children_j` and `beside_j` are the
    parts of the children and of the Python threads beside the main one, by CPU time. `tracing` is what tracing did to
    the program, `operators` how much of a light run has operators, `job` what each rank and collective of several ranks
    took, `outside_steps` what the table has in no step.
    """

    name: str
    device: str
    mode: str
    basis: Basis
    source: str
    coverage: float
    scope: Scope
    energy_j: float
    error_j: float
    time_s: float
    power_w: float | None
    error_w: float | None
    peak_w: float | None
    busy_s: float | None
    busy_j: float | None
    busy_error_j: float | None
    idle_s: float | None
    idle_j: float | None
    idle_error_j: float | None
    idle_share: float | None
    whole: Whole
    partial: bool = False
    traced_steps: int | None = None
    limited: bool = False
    outside: Sequence[Outside] = ()
    rest_j: float = 0.0
    parts: Sequence[CategoryShare] = ()
    per_work: Sequence[PerWork] = ()
    ops: Sequence[EnergyRow] = ()
    kernels: Sequence[EnergyRow] = ()
    regions: Sequence[EnergyRow] = ()
    modules: Sequence[EnergyRow] = ()
    functions: Sequence[EnergyRow] = ()
    lines: Sequence[EnergyRow] = ()
    steps: StepSpread | None = None
    outside_steps: OutsideSteps | None = None
    shared_by: str | None = None
    advice: Sequence[Advice] = ()
    gaps: Sequence[HostGap] = ()
    tracing: Slowdown | None = None
    operators: OperatorCoverage | None = None
    cpu_use: CpuUse | None = None
    children_j: float | None = None
    beside_j: float | None = None
    job: JobSummary | None = None
    cut: str | None = None
    returncode: int | None = None
    notes: Sequence[str] = ()

    def __repr__(self) -> str:
        spent = format_energy_error(self.whole.energy_j, self.whole.error_j)
        return f"<Answer {self.name}: {spent} in {format_duration(self.whole.time_s, 3)}, {self.basis}>"

    @property
    def idle_name(self) -> IdleName:
        """Return the name of `idle_j`: on a host alone, idle time is between operators."""
        return name_idle(self.ops, self.kernels)

    def rows(self, by: str) -> Sequence[EnergyRow]:
        """Return the rows of one view, most joules first."""
        rows: Sequence[EnergyRow] = getattr(self, by)
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without the rows that the table has already."""
        rows = ("ops", "kernels", "regions", "modules") if self.shared_by is None else ()
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in rows}
        cost = find_cost(self.whole.energy_j, self.whole.error_j)
        job = self.job.to_dict() if self.job is not None else None
        return {**data, "notes": [str(note) for note in self.notes], "cost": cost, "job": job}


def _busy_and_idle(table: EnergyTable, boards: int, is_attributed: bool) -> dict[str, Any]:
    """Busy and idle time and joules; all None where nothing was attributed."""
    figures = {
        "busy_s": table.busy_s,
        "busy_j": table.energy_j - table.idle_j,
        "busy_error_j": table.busy_error_j,
        "idle_s": max(table.time_s * max(boards, 1) - table.busy_s, 0.0),
        "idle_j": table.idle_j,
        "idle_error_j": table.idle_error_j,
        "idle_share": table.idle_j / table.energy_j if table.energy_j > 0 else None,
    }
    return figures if is_attributed else dict.fromkeys(figures)


def answer(recording: Recording) -> Answer:
    """Compute everything that the screen and the page show."""
    table, lines, power, facts = recording.energy(), recording.timeline, recording.power, recording.facts
    is_attributed = bool(table.kernels or table.ops)
    gaps = find_run_gaps(recording, table)
    shared = None if is_attributed else _share_by_time(recording, table)
    spent = table if shared is None else _fill_rows(table, shared)
    seen_s = table.time_s * table.coverage if table.energy_j >= 0 else 0.0
    steps = {s.name for s in table.steps} | {s.name for s in lines.linked.steps}
    partial = is_partial(recording, table)
    tracing = slowdown_of(recording, table)
    whole = whole_of(recording, table, partial, shared)
    stacks = stacks_of(recording, whole.energy_j)
    evidence = RunEvidence.of_recording(recording, table=spent, gaps=gaps, tracing=tracing)
    notes = [*([shared.note] if shared and shared.note else []), *_notes(recording, table)]
    traced = is_attributed or len(lines.device_rows) or len(lines.rows("op"))
    return Answer(
        name=name_of(recording),
        device=describe_device(recording),
        mode=str(facts.mode or ("operators" if traced else "sampling")),
        basis=table.basis,
        source=table.source,
        coverage=table.coverage,
        scope=_scope(power),
        energy_j=table.energy_j,
        error_j=table.error_j,
        time_s=table.time_s,
        power_w=table.energy_j / seen_s if seen_s > 0 else None,
        error_w=table.error_j / seen_s if seen_s > 0 else None,
        peak_w=_peak_w(recording, table, whole),
        **_busy_and_idle(table, len(lines.devices), is_attributed),
        whole=whole,
        partial=partial,
        traced_steps=len(table.steps) if whole.steps is not None and not shared else None,
        limited=facts.time_limit_reached,
        outside=outside(recording, table.energy_j, whole) if partial else (),
        rest_j=shared.rest_j if shared else 0.0,
        parts=_parts(spent),
        per_work=_per_work(facts.work, table, whole, shared, _per_step(recording, table, whole, tracing)),
        ops=sort_by_energy(spent.ops),
        kernels=sort_by_energy(spent.kernels),
        regions=sort_by_energy([r for r in spent.regions if r.name not in steps]),
        modules=sort_by_energy(table.modules),
        functions=find_own_functions(stacks, whole.energy_j),
        lines=find_own_lines(stacks, whole.energy_j),
        steps=spread_steps(table.steps),
        outside_steps=find_outside_steps(recording, table),
        shared_by=shared.by if shared else None,
        advice=find_advice(evidence),
        cpu_use=facts.cpu_use,
        children_j=_cpu_j(recording, lambda use: use.children_s),
        beside_j=_cpu_j(recording, lambda use: use.beside_s),
        job=summarize_job(recording),
        gaps=gaps,
        tracing=tracing,
        operators=table.operators,
        cut=_explain_cut(facts),
        returncode=facts.returncode,
        notes=notes,
    )


def _scope(power: PowerTrace | None) -> Scope:
    """Return "process" if any of the power is of the program alone."""
    domains = power.domains if power is not None else ()
    return "process" if any(d.counted and d.scope == "process" for d in domains) else "machine"


def _cpu_j(recording: Recording, seconds_of: Callable[[CpuUse], float]) -> float | None:
    """Return the CPU joules of children or threads, by their CPU seconds; None if they cannot be separated."""
    use, power = recording.facts.cpu_use, recording.power
    if use is None or power is None or not use.cpu_s > 0:
        return None
    own = [d.name for d in power.domains if d.counted and d.scope == "process"]
    joules = sum(power.energy(name).energy_j for name in own)
    return joules * seconds_of(use) / use.cpu_s if own and joules >= 0 else None


def _peak_w(recording: Recording, table: EnergyTable, whole: Whole) -> float | None:
    """The highest sample of the devices the table is about. Of a model there is none: its curve knows means only."""
    if recording.power is None or table.basis != "measured":
        return None
    peak_w = accounted_power(recording.power, recording.timeline).peak_w
    return None if peak_w is None else max(peak_w, whole.power_w or 0.0)


def name_of(recording: Recording) -> str:
    """Return the command as it was typed, or else the file's name."""
    facts = recording.facts
    command = facts.command
    if isinstance(command, str) and command:
        return command
    if isinstance(command, Sequence) and command:
        return shlex.join(str(part) for part in command)
    return facts.title


def describe_device(recording: Recording) -> str:
    """Return the chips of a recording, by name; empty where it names none."""
    if recording.facts.device:
        return recording.facts.device
    domains = recording.power.domains if recording.power is not None else ()
    labels = [d.label for d in domains if d.counted and d.label]
    names = labels or [str(p.get("name") or "") for p in recording.timeline.device_properties]
    return ", ".join(name if n == 1 else f"{n} x {name}" for name, n in Counter(names).items() if name)


def _explain_cut(facts: Facts) -> str | None:
    return next(iter(facts.notes), "the file was never closed") if facts.crashed else None


def _notes(recording: Recording, table: EnergyTable) -> list[str]:
    """Return what a reader should know, each once; what is missing from a trace comes last."""
    notes = [*table.notes, *recording.notes]
    if table.coverage < 0.98 and table.energy_j >= 0:
        notes.insert(0, f"the sensors saw only {table.coverage:.0%} of the run: see `tessera doctor`")
    return order_notes(notes)


def _parts(table: EnergyTable) -> list[CategoryShare]:
    """Return shares by what kernels do, in a fixed order so that runs can be compared; idle time is last."""
    spent: dict[str, float] = {}
    for r in table.kernels or [r for r in table.ops if not math.isnan(r.error_j)]:
        name = category(r.name, r.kind)
        spent[name] = spent.get(name, 0.0) + r.energy_j
    if table.idle_j > 0:
        spent[table.idle_name] = table.idle_j
    whole = table.energy_j if table.energy_j > 0 else 1.0
    order = [name for name in (*CATEGORIES, table.idle_name) if spent.get(name, 0.0) > 0]
    return [CategoryShare(name=name, energy_j=spent[name], share=spent[name] / whole) for name in order]


def _per_work(
    work: Any, table: EnergyTable, all_of_it: Whole, shared: TimeShares | None, per_step: PerWork | None
) -> list[PerWork]:
    """Return joules by the work that the user stated, over the whole run; by steps if none was stated."""
    if shared is not None and shared.whole_steps > 0 and shared.steps_s > 0 and "step" not in work_amounts(work):
        of_steps = PerWork(
            unit="step",
            amount=float(shared.whole_steps),
            energy_j=shared.steps_j / shared.whole_steps,
            error_j=math.nan,
            rate_per_s=shared.whole_steps / shared.steps_s,
            left_out=None if shared.steps == shared.whole_steps else "without the first: its begin is not known",
        )
        return [of_steps, *_per_work(work, table, all_of_it, None, per_step)]
    amounts = {unit.removesuffix("s"): n for unit, n in work_amounts(work).items()}
    counted = per_step is not None and amounts.get("step", len(table.steps)) in (len(table.steps), all_of_it.steps)
    whole = [
        PerWork(
            unit=unit,
            amount=n,
            energy_j=all_of_it.energy_j / n,
            error_j=all_of_it.error_j / n,
            rate_per_s=n / all_of_it.time_s if all_of_it.time_s > 0 else 0.0,
        )
        for unit, n in amounts.items()
        if not (counted and unit == "step")
    ]
    return [per_step, *whole] if counted and per_step is not None else whole


def _per_step(recording: Recording, table: EnergyTable, whole: Whole, tracing: Slowdown | None) -> PerWork | None:
    """Return the mean of the steps that count, as in `analyze.diff`; None if no step was measured.

    For a partly traced run, the mean is of all its steps, because the traced ones need not be like the others.
    """
    is_measured = any(not math.isnan(s.energy_j) for s in table.steps)
    traced = _mean_of(table.steps, table.error_j, table.energy_j) if is_measured else None
    if traced is not None and tracing is not None and tracing.matters and tracing.untraced_step_j is not None:
        return _of_untraced(tracing, tracing.untraced_step_j, traced.energy_j)
    if every := find_every_step(recording, table):
        return dataclasses.replace(_mean_of(every, whole.error_j, whole.energy_j), traced_steps=len(table.steps))
    return traced


def _mean_of(steps: Sequence[EnergyRow], error_j: float, energy_j: float) -> PerWork:
    """Return the mean of the steps that count, with the sensor's error for all that they are a part of."""
    which = select_steps(steps)
    counted = [steps[i] for i in which.places]
    mean = mean_step(counted, error_j / energy_j if energy_j > 0 else 0.0)
    return PerWork(
        unit="step",
        amount=float(len(which.places)),
        energy_j=mean.energy_j,
        error_j=mean.error_j,
        rate_per_s=1.0 / mean.seconds if mean.seconds > 0 else 0.0,
        without=which.names,
        left_out=which.left_out,
        spread=spread_steps(counted),
    )


def _of_untraced(tracing: Slowdown, energy_j: float, traced_j: float) -> PerWork:
    """Return the mean of the steps that were not traced, if tracing slowed the others: they are the program's own."""
    return PerWork(
        unit="step",
        amount=float(tracing.untraced_steps),
        energy_j=energy_j,
        error_j=tracing.untraced_step_error_j or 0.0,
        rate_per_s=tracing.untraced_steps_per_s or 0.0,
        traced_j=traced_j,
        left_out=f"without the run's first {FIRST} and those the tracer disturbed",
    )


def work_amounts(work: Any) -> dict[str, float]:
    """Return work as {"token": 8192.0}, from that form or from rows {"unit": ..., "amount": ...}."""
    if isinstance(work, Mapping):
        pairs = list(work.items())
    elif isinstance(work, Sequence) and not isinstance(work, str):
        pairs = [(w.get("unit"), w.get("amount")) for w in work if isinstance(w, Mapping)]
    else:
        return {}
    return {str(unit): float(n) for unit, n in pairs if unit and isinstance(n, (int, float)) and n > 0}


def find_rows(recording: Recording, table: EnergyTable) -> EnergyTable:
    """Return the table with the rows that a screen shows; without attribution, those that are shared out by time."""
    shared = None if table.kernels or table.ops else _share_by_time(recording, table)
    return table if shared is None else _fill_rows(table, shared)


def _fill_rows(table: EnergyTable, shared: TimeShares) -> EnergyTable:
    regions = table.regions or shared.regions
    return dataclasses.replace(table, ops=shared.ops, kernels=shared.kernels, regions=regions)


def _share_by_time(recording: Recording, table: EnergyTable) -> TimeShares | None:
    """Return joules that are shared out by time, if no kernel was seen."""
    spent_j, power = table.energy_j, recording.power
    if not spent_j > 0 or power is None:
        return None
    (start_ns, _), *_ = recording.facts.windows or [recording.span_ns]
    since = power.energy(start_ns=start_ns, end_ns=recording.span_ns[1])
    is_seen = since.coverage > 0 and since.energy_j > 0
    spent = RunTotals(
        energy_j=spent_j,
        time_s=table.time_s,
        since_j=since.energy_j / since.coverage if is_seen else 0.0,
        since_s=since.time_s if is_seen else 0.0,
    )
    return from_summary(recording.facts.summary, spent) or from_stacks(stacks_of(recording, spent_j), spent_j)
