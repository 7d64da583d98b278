"""Numbers for the distinct values of columns, without sorting where they lie close together, as names and kinds do."""

from __future__ import annotations

import numpy as np

from .columns import Ints


def rank_values(values: Ints) -> tuple[Ints, Ints]:
    """`np.unique(values, return_inverse=True)`; without sorting where the numbers lie close together, as names do."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if high - low > 4 * len(values) + 1024:
        distinct_values, which = np.unique(values, return_inverse=True)
        return distinct_values, which
    if low == high:
        return values[:1], np.zeros(len(values), np.int64)
    place = values - low
    there = np.zeros(high - low + 1, bool)
    there[place] = True
    return np.flatnonzero(there) + low, (np.cumsum(there) - 1)[place]


def rank_combinations(*columns: Ints) -> tuple[Ints, int]:
    """For each place the number of its combination of values, in the order of the values; and how many there are.

    One column at a time: sorting rows of several columns at once takes five times as long.
    """
    number, kinds = rank_values(columns[0])[1], 0
    kinds = int(number.max(initial=-1)) + 1
    for column in columns[1:]:
        values, which = rank_values(column)
        if len(values) > 1:
            combinations, number = rank_values(number * len(values) + which)
            kinds = len(combinations)
    return number, kinds


def argsort_small(numbers: Ints, count: int) -> Ints:
    """`np.argsort(numbers, kind="stable")` of numbers from 0 to below `count`: by their digits where they are short."""
    return np.argsort(numbers.astype(np.uint16) if count < 2**16 else numbers, kind="stable")


def distinct(*columns: Ints) -> tuple[Ints, Ints]:
    """The first place of every combination of values, and for each place the number of its combination."""
    number, kinds = rank_combinations(*columns)
    first = np.full(kinds, len(number), np.int64)
    np.minimum.at(first, number, np.arange(len(number)))
    return first, number
