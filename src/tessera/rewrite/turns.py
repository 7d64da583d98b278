"""Compare things that were measured in turns: what all things in a round share, such as a slower host, cancels.

The host of a GPU in a cloud runs 10 to 30% faster or slower from one minute to the next (seen on an H200's host).
Variants of a host-bound program differ by less than that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_QUANTILE = 1.645  # of the normal distribution, for 90%


@dataclass(frozen=True, slots=True)
class Level:
    """A mean and its 90% half-width, as if all rounds had been equally fast."""

    mean: float
    error: float


def compare_rounds(rounds: Sequence[Sequence[Sequence[float]]]) -> list[Level]:
    """Return the level of each thing; `rounds` has, for each round, every thing's values, all of them positive."""
    pace = [math.exp(statistics.fmean(math.log(statistics.fmean(values)) for values in each)) for each in rounds]
    usual = math.exp(statistics.fmean(map(math.log, pace)))
    levels = []
    for at in range(len(rounds[0])):
        values = [value / own * usual for each, own in zip(rounds, pace, strict=True) for value in each[at]]
        spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        levels.append(Level(statistics.fmean(values), _QUANTILE * spread))
    return levels


def order_turns(count: int, rounds: int) -> list[list[int]]:
    """Return the order of each round: forwards, then backwards, so that a steady drift affects all alike."""
    return [list(range(count))[:: -1 if at % 2 else 1] for at in range(rounds)]
