"""Before two sides are compared: how often a run did what a prediction predicts, and on which chips they ran."""

from __future__ import annotations

import dataclasses

from .diff_rows import align_rows
from .sides import DiffSide

PASSES_ALIKE = 0.02
"""Operators must agree on the number of passes within this share."""


def compare_chips(one: DiffSide, two: DiffSide) -> list[str]:
    """Return a note if the two ran on different chips, which the difference then includes."""
    if not one.chip or not two.chip or one.chip == two.chip:
        return []
    return [f"the chips differ: {one.chip} before, {two.chip} after"]


def count_passes(
    before: list[DiffSide], after: list[DiffSide], notes: list[str]
) -> tuple[list[DiffSide], list[DiffSide]]:
    """Count for runs without steps how often they ran what a prediction predicts, by the calls of their operators.

    A prediction is one pass. A run of inference has no named steps, and the whole run is not one pass.
    """
    predicted = [side for side in (*before, *after) if side.is_prediction]
    if len(predicted) != 1 or len(before) + len(after) < 2:
        return before, after

    def count(side: DiffSide) -> DiffSide:
        if side.is_prediction:  # one pass, whatever else it counts
            return dataclasses.replace(side, work={"step": 1.0, **side.work})
        if "step" in side.work or any(unit in side.work for unit in predicted[0].work):
            return side
        expected, found = align_rows(predicted[0].views.get("ops") or {}, side.views.get("ops") or {})
        both = [(found[name].calls, cell.calls) for name, cell in expected.items() if name in found]
        ratios = sorted(ran / meant for ran, meant in both if ran > 0 and meant > 0)
        passes = round(ratios[len(ratios) // 2]) if ratios else 0
        alike = sum(abs(ratio - passes) <= PASSES_ALIKE * passes for ratio in ratios)
        if passes < 1 or alike < 0.5 * len(ratios):
            notes.append(f"{side.name} states no steps: its whole is compared with one predicted pass")
            return side
        notes.append(f"{side.name} ran the predicted program {passes:,} times, by the calls of its operators")
        return dataclasses.replace(side, work={**side.work, "step": float(passes)})

    return [count(side) for side in before], [count(side) for side in after]
