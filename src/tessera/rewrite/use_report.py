"""What variants took in the user's own loop, and which of them was the best there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec


class VariantInUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one variant took in the user's loop, per call of `calls`; the promises are from its trial. None: not known.

    Errors are half-widths of 90% intervals; `error_s` is that of calls in which nothing was compiled.
    """

    variant: str
    calls: int
    time_s: float
    error_s: float = 0.0
    promised_s: float | None = None
    energy_j: float | None = None
    error_j: float | None = None
    promised_j: float | None = None
    compilations: int = 0
    recordings: int = 0
    estimated: bool = False
    """Whether the time is the trial's, scaled to the pace of the loop, because each call here had to get memory from
    the driver.
    """


class UseReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a choice did in use: trials chose `chosen`, and `runs` runs now.

    "confirmed": the variant kept its promise. "compared": it did not, or its promise does not say what a loop takes,
    and the variants were compared in the loop. "shared": several threads call the program, so nothing could be told.
    The decision came `after_calls`. `provisional`: most calls had new shapes, which cost more than known ones; the
    variants are compared once more if shapes come again.
    """

    outcome: Literal["confirmed", "compared", "shared"]
    chosen: str
    runs: str
    variants: list[VariantInUse] = []
    after_calls: int = 0
    provisional: bool = False

    def find_cost(self) -> tuple[VariantInUse, VariantInUse] | None:
        """Return the costs in use of the program as it was and of the variant that runs now; None if not compared."""
        now = [v for v in self.variants if v.variant == self.runs]
        return (self.variants[-1], now[0]) if self.outcome == "compared" and now else None

    @property
    def fell_back(self) -> bool:
        """Return whether another variant runs than the chosen one."""
        return self.runs != self.chosen


def find_best_in_use(figures: Sequence[VariantInUse], *, by: Sequence[Literal["energy", "time"]]) -> int:
    """Return the index of the best; an earlier one stays unless a later one is better by more than chance.

    `by` are the figures that decide: the first of them that tells two variants apart.
    """
    best = 0
    for at, figure in enumerate(figures):
        best = at if _is_better(figure, figures[best], by) else best
    return best


def _is_better(a: VariantInUse, b: VariantInUse, by: Sequence[Literal["energy", "time"]]) -> bool:
    for what in by:
        pairs = [(v.energy_j, v.error_j) if what == "energy" else (v.time_s, v.error_s) for v in (a, b)]
        (x, x_error), (y, y_error) = pairs
        if x is not None and y is not None and abs(x - y) > math.hypot(x_error or 0.0, y_error or 0.0):
            return x < y
    return False
