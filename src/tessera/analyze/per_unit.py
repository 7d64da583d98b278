"""Like with like: what of two sides is compared, per what, and the joules and seconds of that.

::

    all have steps ──────────► per step: the mean of the steps, rows inside them, "outside" apart
    all state other work ────► per sample, token: whole runs, divided
    else ────────────────────► whole runs, from their start to their end; traces with what was traced of runs
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..attribute.table import EnergyRow
from ..errors import ArgumentError
from .mean_step import MeanStep, counted, mean_of, mean_step
from .side import OUTSIDE, Cell, Side, Span
from .step_rows import wall

_NAN = float("nan")


def unit_of(sides: Sequence[Side], notes: list[str]) -> str | None:
    """The work all did: steps where all have them, else the first unit they share; None where that is the same."""
    shared = [u for u in sides[0].work if all(side.work.get(u, 0) > 0 for side in sides)]
    recorded = [side for side in sides if side.steps]
    if "step" in shared:
        stated = [side for side in sides if not side.steps and not side.predicted]
        if not recorded or not stated:
            return "step"
        notes.append(f"{stated[0].name} says how many steps it did, not what each cost: whole runs are compared")
    others = [u for u in shared if u != "step"]
    return next((u for u in others if len({side.work[u] for side in sides}) > 1), None)


def span_of(sides: Sequence[Side]) -> Span:
    """What whole things are compared: "run", or "trace" where one is a trace and of the others a part was traced."""
    if all(side.span != "trace" for side in sides):
        return "run"
    lacking = [side for side in sides if side.span == "run" and not any(side.views.get(v) for v in ("ops", "kernels"))]
    if lacking:
        traced = next(side for side in sides if side.span == "trace")
        raise ArgumentError(
            f"{traced.name} cannot be compared with {lacking[0].name}",
            why="the one is what was traced, a part of a run, the other a whole run of which nothing was",
            fix="compare run files (tessera run), which hold both",
        )
    return "trace"


def _kept(side: Side) -> list[EnergyRow]:
    """The steps that count."""
    return [side.steps[i] for i in counted(side.steps).places]


def amount(side: Side, unit: str | None) -> float:
    """How many units a side did: of recorded steps, those that count."""
    if unit == "step" and side.steps:
        return float(len(_kept(side)))
    return side.work[unit] if unit else 1.0


def total_of(side: Side, unit: str | None, span: Span) -> Cell:
    """One unit's joules and seconds: of steps their mean, with how they scatter; else the whole, divided."""
    if unit != "step" or not side.steps:
        return _whole(side, span).scaled(1.0 / amount(side, unit))
    whole = side.traced or side.total
    return _cell(mean_step(_kept(side), whole.error_j / whole.energy_j if whole.energy_j > 0 else 0.0), 1.0)


def _cell(mean: MeanStep, calls: float, kind: str = "") -> Cell:
    return Cell(
        mean.energy_j, mean.error_j, mean.seconds, mean.error_s, calls, kind, once=mean.once, error_w=mean.error_w
    )


def _whole(side: Side, span: Span) -> Cell:
    return side.traced or side.total if span == "trace" else side.total


def rows_of(side: Side, unit: str | None, view: str, span: Span, *, by_step: bool) -> dict[str, Cell]:
    """One unit's rows, which sum to its total. `by_step`: what lies inside steps is known of every side."""
    rows = side.views.get(view) or {}
    if unit == "step" and side.steps:
        return _inside(side, view) if by_step else _shared(side, rows)
    found = {name: cell.scaled(1.0 / amount(side, unit)) for name, cell in rows.items()}
    if found and view in ("ops", "kernels") and side.traced is not None and span == "run":
        found[OUTSIDE] = (side.total - side.traced).scaled(1.0 / amount(side, unit))
    return found


def _inside(side: Side, view: str) -> dict[str, Cell]:
    """Rows by what they spent in each step, which is how they scatter."""
    rows, kept = side.views.get(view) or {}, list(counted(side.steps).places)
    if side.stepped is None or not rows:
        return {}
    found = {}
    for name, series in side.stepped.rows(view).items():
        joules, seconds, calls = series.joules[kept], series.seconds[kept], series.calls[kept]
        known = rows.get(name)
        level = known.error_j / known.energy_j if known and known.energy_j > 0 else 0.0
        kind = known.kind if known else "idle" if name == "idle" else "op"
        mean = mean_of(joules, seconds, level * abs(float(np.mean(joules))))
        found[name] = _cell(mean, float(np.mean(calls)), kind)
    return {n: c for n, c in found.items() if c.calls > 0 or c.kind == "idle"}


def _shared(side: Side, rows: Mapping[str, Cell]) -> dict[str, Cell]:
    """Rows of all that was traced, scaled to one step: how they lie in steps, and scatter, nobody says."""
    whole, steps = side.traced or side.total, _kept(side)
    part_j = math.fsum(s.energy_j for s in steps) / whole.energy_j if whole.energy_j > 0 else _NAN
    part_s = math.fsum(wall(s) for s in steps) / whole.seconds if whole.seconds > 0 else _NAN
    per_j, per_s = part_j / len(steps), part_s / len(steps)
    return {
        name: Cell(c.energy_j * per_j, c.error_j * per_j, c.seconds * per_s, _NAN, c.calls * per_s, c.kind, once=True)
        for name, c in rows.items()
    }


def outside_of(side: Side) -> Cell:
    """What a run spent outside the steps that are compared, in all."""
    steps = _kept(side)
    inside = Cell(math.fsum(s.energy_j for s in steps), 0.0, math.fsum(wall(s) for s in steps), 0.0, 0.0)
    return side.total - inside
