"""Why the neighbours of a layout lost: each differs in one setting, and is slower, costs more, or does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .layout import Layout
from .plan_cost import PlanCandidate, evaluate_layout
from .plan_search import (
    PlanProblem,
    count_over_bytes,
    evaluate_variants,
    list_divisions,
    list_variants,
)

Verdict = Literal["does not fit", "worse", "too slow", "as good", "better"]
_AS_GOOD = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNeighbour:
    """A layout with one setting changed; if the setting is an axis, the other settings are chosen again.

    `change` is relative, in the goal; `part` is the part that grew most, by `part_change` seconds or joules.
    """

    setting: str
    value: str
    verdict: Verdict
    layout: Layout
    change: float | None = None
    part: str | None = None
    part_change: float | None = None
    over_bytes: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return dataclasses.asdict(self)


def list_neighbours(
    problem: PlanProblem, best: PlanCandidate, metric: str, most_time_s: float
) -> Iterator[PlanNeighbour]:
    """Yield what happens to the best layout when one setting changes."""
    yield from _other_divisions(problem, best, metric, most_time_s)
    layout = best.layout
    for variant in list_variants(problem, layout):
        changed = [name for name in ("vp", "sharding", "placement", "offload") if _differ(variant, layout, name)]
        if len(changed) != 1:
            continue
        setting = changed[0]
        trial = dataclasses.replace(variant, recompute=layout.recompute)
        yield _compare(problem, best, trial, setting, metric, most_time_s)
    for recompute in problem.recomputes:
        if recompute != layout.recompute:
            trial = dataclasses.replace(layout, recompute=recompute)
            yield _compare(problem, best, trial, "recompute", metric, most_time_s)


def _differ(one: Layout, other: Layout, name: str) -> bool:
    return bool(getattr(one, name) != getattr(other, name))


def _other_divisions(
    problem: PlanProblem, best: PlanCandidate, metric: str, most_time_s: float
) -> Iterator[PlanNeighbour]:
    """Yield the best layout with an axis or the microbatch doubled or halved; data parallel takes the rest.

    With another axis, the microbatch is chosen again, as in the table of candidates, so that both say the same of a
    layout.
    """
    layout, axes = best.layout, ("tp", "pp", "cp", "ep")
    bases = list(list_divisions(dataclasses.replace(problem, gpus=layout.gpus)))
    for setting in (*axes, "micro_batch"):
        kept = [name for name in axes if name != setting]
        for value in _list_near(problem, layout, setting):
            near = [
                base
                for base in bases
                if getattr(base, setting) == value and not any(_differ(base, layout, name) for name in kept)
            ]
            if near:
                yield _compare_best(problem, best, near, setting, metric, most_time_s)


def _list_near(problem: PlanProblem, layout: Layout, setting: str) -> list[float]:
    """Return twice and half of a setting; for the microbatch, the tried sizes above and below."""
    own = getattr(layout, setting)
    if setting != "micro_batch":
        return [own * 2, own / 2]
    sizes = problem.micro_batches
    return [*[n for n in sizes if n > own][:1], *[n for n in sizes if n < own][-1:]]


def _compare_best(
    problem: PlanProblem, best: PlanCandidate, bases: list[Layout], setting: str, metric: str, most_time_s: float
) -> PlanNeighbour:
    """Return the best layout of some divisions; if none fits, the most frugal one."""
    tried = [candidate for base in bases for candidate in evaluate_variants(problem, base)]
    if tried:
        allowed = [c for c in tried if c.time_s <= most_time_s]
        chosen = min(allowed or tried, key=lambda c: getattr(c, metric if allowed else "time_s"))
        return _judge(best, chosen, setting, metric, most_time_s)
    smallest = min(bases, key=lambda base: base.micro_batch)
    frugal = max(list_variants(problem, smallest), key=lambda v: (v.sharding, len(v.offload)))
    trial = dataclasses.replace(frugal, recompute=problem.recomputes[-1])
    return _compare(problem, best, trial, setting, metric, most_time_s)


def _compare(
    problem: PlanProblem, best: PlanCandidate, trial: Layout, setting: str, metric: str, most_time_s: float
) -> PlanNeighbour:
    over = count_over_bytes(problem, trial)
    if over > 0:
        value = _describe(trial, setting)
        return PlanNeighbour(setting=setting, value=value, verdict="does not fit", layout=trial, over_bytes=over)
    return _judge(best, evaluate_layout(problem, trial), setting, metric, most_time_s)


def find_growth(best: PlanCandidate, other: PlanCandidate, metric: str) -> tuple[str, float]:
    """Return the part of the step, or of its joules, that is larger than the best's by most, and by how much."""
    name = "parts" if metric == "time_s" else "energy_parts"
    mine, theirs = getattr(best, name), getattr(other, name)
    growth = {part: theirs.get(part, 0.0) - mine.get(part, 0.0) for part in {**mine, **theirs}}
    part = max(growth, key=growth.__getitem__)
    return part, growth[part]


def _judge(best: PlanCandidate, other: PlanCandidate, setting: str, metric: str, most_time_s: float) -> PlanNeighbour:
    change = getattr(other, metric) / getattr(best, metric) - 1.0
    part, grown = find_growth(best, other, "time_s" if other.time_s > most_time_s else metric)
    verdict: Verdict = "worse" if change > 0 else "better"
    if abs(change) < _AS_GOOD:
        verdict = "as good"
    if other.time_s > most_time_s:
        verdict = "too slow"
        change = other.time_s / best.time_s - 1.0
    return PlanNeighbour(
        setting=setting,
        value=_describe(other.layout, setting),
        verdict=verdict,
        layout=other.layout,
        change=change,
        part=part if grown > 0 else None,
        part_change=grown if grown > 0 else None,
    )


def _describe(layout: Layout, setting: str) -> str:
    value = getattr(layout, setting)
    if setting == "placement":
        return "-".join(value)
    if setting == "offload":
        return "+".join(value) or "nothing"
    return str(value)
