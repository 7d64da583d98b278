"""`DiffSide`: one of two things compared, per unit of work; `Cell`: one line of it, with its errors.

::

    all have steps ──────────► per step: the mean of the steps, rows inside them, "outside" apart
    all state other work ────► per sample, token: whole runs, divided
    else ────────────────────► whole runs, from their start to their end; traces with what was traced of runs
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..attribute.table import IDLE_NAMES, EnergyRow
from ..errors import ArgumentError
from ..estimate.prediction_errors import PredictionErrors
from ..schema import Basis
from ..units import format_energy_error
from .mean_step import MeanStep, StepRows, mean_of, mean_step, select_steps, wall_s

Span = Literal["run", "trace", ""]
TRACING = "added by tracing"
"""The row that subtracts the tracer's part from rows of traced steps, if the total is that of untraced ones."""
UNTRACED = "more in all steps than in the traced"
"""The row that makes rows of traced steps sum to the mean of all steps of a run, of which only some were traced."""
OUTSIDE = "outside the trace"
"""The row of what a run spent while nothing was traced."""
_NAN = float("nan")


@dataclass(frozen=True, slots=True)
class RunScatter:
    """Scatter of a mean of several runs: their number, its standard errors, and the sensor's error beside them."""

    count: int
    joules: float
    seconds: float
    watts: float
    sensor_j: float
    sensor_w: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of one side: joules and seconds with 90% half-widths (NaN: unknown), calls, and its kind.

    `once`: it was measured once, so its half-width is the sensor's alone and its scatter is not known. `error_w` is the
    half-width of its mean watts, whose joules and seconds err together; None if that is not known.
    """

    energy_j: float
    error_j: float
    seconds: float
    error_s: float
    calls: float
    kind: str = ""
    errors: PredictionErrors | None = None  # for a prediction: the parts of its half-widths
    once: bool = False
    runs: RunScatter | None = None
    error_w: float | None = None

    @property
    def power_w(self) -> float:
        """Return mean watts; NaN without seconds."""
        return self.energy_j / self.seconds if self.seconds > 0 else _NAN

    @property
    def power_error_w(self) -> float:
        """Return the half-width of the watts; without a common error, as if the seconds were exact."""
        return self.error_w if self.error_w is not None else self.error_j / self.seconds if self.seconds > 0 else _NAN

    def __add__(self, other: Cell) -> Cell:
        return Cell(
            self.energy_j + other.energy_j,
            math.hypot(self.error_j, other.error_j),
            self.seconds + other.seconds,
            math.hypot(self.error_s, other.error_s),
            self.calls + other.calls,
            self.kind,
            self.errors + other.errors if self.errors and other.errors else None,
            self.once or other.once,
        )

    def scale(self, factor: float) -> Cell:
        """Return the cell for a part of the work."""
        return Cell(
            self.energy_j * factor,
            self.error_j * factor,
            self.seconds * factor,
            self.error_s * factor,
            self.calls * factor,
            self.kind,
            self.errors.scale(factor) if self.errors else None,
            self.once,
            error_w=self.error_w,
        )

    def __sub__(self, part: Cell) -> Cell:
        """Return the rest without a part; its sensor error is its share."""
        left_j = self.energy_j - part.energy_j
        level = self.error_j / self.energy_j if self.energy_j > 0 else 0.0
        return Cell(left_j, level * abs(left_j), max(self.seconds - part.seconds, 0.0), _NAN, 0.0, once=True)


ZERO = Cell(0.0, 0.0, 0.0, 0.0, 0.0, errors=PredictionErrors({}))
UNSTATED = Cell(_NAN, _NAN, _NAN, _NAN, 0.0, "idle")
"""A row that a side may have spent but does not state: neither zero nor known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffSide:
    """One of two things compared. `work` has its steps, samples, tokens; `steps` each step where they were recorded.

    `total` is all of it, `traced` the part that its rows cover where that is less than the run, `stepped` its rows step
    by step. `span` says what the whole is: a "run" from its start to its end, a "trace" of a part of one, or "" where
    it is not known. `gain` is the share of the joules by which their level may be off, a part of `total.error_j`; sides
    of equal `sensors` are off by the same factor. `untraced` is a step that was not traced, where tracing slowed the
    others; `every` all steps that count (`calls`), where only some of them were traced and `steps` lacks the others.
    `model` is what predicted it: equal ones have the same errors.
    `crowded` is the share of its time that its main thread waited for a core because of other programs.
    `from_start`: the start of the interpreter is in it, as `tessera measure` counts; a recorded run begins later.
    `command` is what was run, word by word, `chip` where it ran; empty where that is not recorded.
    """

    name: str
    basis: Basis
    total: Cell
    work: Mapping[str, float] = field(default_factory=dict)
    steps: Sequence[EnergyRow] = ()
    stepped: StepRows | None = None
    untraced: Cell | None = None
    every: Cell | None = None
    traced: Cell | None = None
    span: Span = ""
    views: Mapping[str, Mapping[str, Cell]] = field(default_factory=dict)
    components: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()
    sensors: str = ""
    gain: float = 0.0
    model: str = ""
    command: Sequence[str] = ()
    chip: str = ""
    crowded: float = 0.0
    from_start: bool = False

    @property
    def has_steps(self) -> bool:
        """Whether the joules of each of its steps are known, traced or not."""
        return bool(self.steps) or self.every is not None

    @property
    def is_prediction(self) -> bool:
        """Return whether this is a prediction, whose rows are subgraphs, not operators."""
        return self.basis == "predicted"


# -- per unit of work --------------------------------------------------------------------------------------------------


def unit_of(sides: Sequence[DiffSide], notes: list[str]) -> str | None:
    """Return the unit of work: steps if all have them, else the first one they share; None if its amount is equal."""
    shared = [u for u in sides[0].work if all(side.work.get(u, 0) > 0 for side in sides)]
    recorded = [side for side in sides if side.has_steps]
    if "step" in shared:
        stated = [side for side in sides if not side.has_steps and not side.is_prediction]
        if not recorded or not stated:
            return "step"
        notes.append(f"{stated[0].name} has the number of steps, but not the energy of each: whole runs are compared")
    others = [u for u in shared if u != "step"]
    return next((u for u in others if len({side.work[u] for side in sides}) > 1), None)


def span_of(sides: Sequence[DiffSide]) -> Span:
    """Return what is compared as a whole: "run", or "trace" if one is a trace and the others were traced in part."""
    if all(side.span != "trace" for side in sides):
        return "run"
    lacking = [side for side in sides if side.span == "run" and not any(side.views.get(v) for v in ("ops", "kernels"))]
    if lacking:
        traced = next(side for side in sides if side.span == "trace")
        raise ArgumentError(
            f"{traced.name} cannot be compared with {lacking[0].name}",
            why="the first is the traced part of a run, the second a whole run without a trace",
            fix="compare run files (tessera run), which contain both",
        )
    return "trace"


def _counted_steps(side: DiffSide) -> list[EnergyRow]:
    """Return the steps that count."""
    return [side.steps[i] for i in select_steps(side.steps).places]


def amount(side: DiffSide, unit: str | None) -> float:
    """Return how many units a side did; for recorded steps, those that count."""
    if unit == "step" and side.has_steps:
        return side.every.calls if side.every is not None else float(len(_counted_steps(side)))
    return side.work[unit] if unit else 1.0


def total_of(side: DiffSide, unit: str | None, span: Span) -> Cell:
    """Return one unit's joules and seconds: the mean of steps with their scatter, or else the whole, divided."""
    if unit != "step" or not side.has_steps:
        return _whole(side, span).scale(1.0 / amount(side, unit))
    return _untraced_step(side) or _traced_step(side)


def _untraced_step(side: DiffSide) -> Cell | None:
    """Return the step that a run's report states, if that is not the mean of its traced ones."""
    return side.untraced or (side.every.scale(1.0 / side.every.calls) if side.every is not None else None)


def _traced_step(side: DiffSide) -> Cell:
    """Return the mean of the traced steps."""
    whole = side.traced or side.total
    return make_cell(
        mean_step(_counted_steps(side), whole.error_j / whole.energy_j if whole.energy_j > 0 else 0.0), 1.0
    )


def make_cell(mean: MeanStep, calls: float, kind: str = "") -> Cell:
    """Return the mean of some steps as a line of a side."""
    return Cell(
        mean.energy_j, mean.error_j, mean.seconds, mean.error_s, calls, kind, once=mean.once, error_w=mean.error_w
    )


def _whole(side: DiffSide, span: Span) -> Cell:
    return side.traced or side.total if span == "trace" else side.total


def rows_of(side: DiffSide, unit: str | None, view: str, span: Span, *, by_step: bool) -> dict[str, Cell]:
    """Return one unit's rows, which sum to its total. `by_step`: every side knows what is inside steps."""
    rows = side.views.get(view) or {}
    if unit == "step" and side.has_steps:
        cells = _inside(side, view) if by_step else _scale_to_step(side, rows)
        stated = _untraced_step(side)
        if cells and stated is not None and view in ("ops", "kernels"):
            cells[TRACING if side.untraced else UNTRACED] = _subtract_traced(_traced_step(side), stated)
        return cells
    cells = {name: cell.scale(1.0 / amount(side, unit)) for name, cell in rows.items()}
    if cells and view in ("ops", "kernels") and side.traced is not None and span == "run":
        cells[OUTSIDE] = (side.total - side.traced).scale(1.0 / amount(side, unit))
    return cells


def _subtract_traced(traced: Cell, untraced: Cell) -> Cell:
    """Return what makes the rows of traced steps sum to the stated step; less than zero for an untraced one."""
    return Cell(
        untraced.energy_j - traced.energy_j,
        math.hypot(untraced.error_j, traced.error_j),
        untraced.seconds - traced.seconds,
        math.hypot(untraced.error_s, traced.error_s),
        0.0,
        "idle",
    )


def choose_steps(sides: Sequence[DiffSide], notes: list[str]) -> list[DiffSide]:
    """Return the same steps of all runs as their reports state: untraced steps if every run knows them, or all.

    If tracing slowed one run, and another has no steps without tracing, use traced ones of both. Notes say where the
    rows of a side, or its report, are of other steps.
    """
    runs = [side for side in sides if not side.is_prediction]
    known = [side.untraced is not None for side in runs]
    chosen = list(sides)
    untraced = next((side for side in runs if side.has_steps and not side.steps), None)
    if untraced is not None:
        notes.append(f"only the total can be compared: {untraced.name} has no step that was traced from begin to end")
        return chosen
    if any(known) and not all(known):
        chosen = [dataclasses.replace(side, untraced=None, every=None) for side in sides]
        notes.append(_explain_traced(sides))
        return chosen
    texts = [_explain_steps(side) for side in sides]
    notes += [f"{side.name}: {text}" for side, text in zip(sides, texts, strict=True) if text]
    return chosen


def _explain_traced(sides: Sequence[DiffSide]) -> str:
    """Say that only traced steps can be compared, why, and what the reports of the runs state instead."""
    lacking = next(side.name for side in sides if side.untraced is None and not side.is_prediction)
    stated = [
        f"{format_energy_error(step.energy_j, step.error_j)} {'without tracing' if side.untraced else 'over all steps'}"
        f" ({side.name})"
        for side in sides
        if (step := _untraced_step(side)) is not None
    ]
    return f"traced steps are compared, as {lacking} knows too few others; reports state, per step, {', '.join(stated)}"


def _explain_steps(side: DiffSide) -> str | None:
    """Say which steps the total of a side is of; None if it is of the same steps as its rows."""
    step = _untraced_step(side)
    if step is None:
        return None
    spent = format_energy_error(step.energy_j, step.error_j)
    if side.untraced or side.every is None:
        return f"the total is of steps without tracing ({spent}), the rows are of traced ones"
    return (
        f"the total is of {side.every.calls:,.0f} steps ({spent}), the rows are of the {len(side.steps):,} traced ones"
    )


def _inside(side: DiffSide, view: str) -> dict[str, Cell]:
    """Return rows by what they spent in each step, which shows their scatter."""
    rows, places = side.views.get(view) or {}, list(select_steps(side.steps).places)
    if side.stepped is None or not rows:
        return {}
    cells = {}
    for name, series in side.stepped.rows(view).items():
        joules, seconds, calls = series.joules[places], series.seconds[places], series.calls[places]
        whole = rows.get(name)
        level = whole.error_j / whole.energy_j if whole and whole.energy_j > 0 else 0.0
        kind = whole.kind if whole else "idle" if name in IDLE_NAMES else "op"
        mean = mean_of(joules, seconds, level * abs(float(np.mean(joules))))
        cells[name] = make_cell(mean, float(np.mean(calls)), kind)
    return {n: c for n, c in cells.items() if c.calls > 0 or c.kind == "idle"}


def _scale_to_step(side: DiffSide, rows: Mapping[str, Cell]) -> dict[str, Cell]:
    """Return rows of all that was traced, scaled to one step; their scatter from step to step is not known."""
    whole, steps = side.traced or side.total, _counted_steps(side)
    part_j = math.fsum(s.energy_j for s in steps) / whole.energy_j if whole.energy_j > 0 else _NAN
    part_s = math.fsum(wall_s(s) for s in steps) / whole.seconds if whole.seconds > 0 else _NAN
    per_j, per_s = part_j / len(steps), part_s / len(steps)
    return {
        name: Cell(c.energy_j * per_j, c.error_j * per_j, c.seconds * per_s, _NAN, c.calls * per_s, c.kind, once=True)
        for name, c in rows.items()
    }


def outside_of(side: DiffSide) -> Cell:
    """Return everything that a run spent outside the steps that are compared."""
    if side.every is not None:
        return side.total - side.every
    steps = _counted_steps(side)
    inside = Cell(math.fsum(s.energy_j for s in steps), 0.0, math.fsum(wall_s(s) for s in steps), 0.0, 0.0)
    return side.total - inside
