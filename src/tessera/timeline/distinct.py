"""Numbers the distinct values of columns, without sorting if the values lie close together, as names and kinds do."""

from __future__ import annotations

import numpy as np

from ..joules import Ints


def rank_values(values: Ints) -> tuple[Ints, Ints]:
    """Return `np.unique(values, return_inverse=True)`; without sorting if the values lie close together."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if high - low > _most(len(values)):
        distinct_values, which = np.unique(values, return_inverse=True)
        return distinct_values, which
    if low == high:
        return values[:1], np.zeros(len(values), np.int64)
    place = values - low
    there = np.zeros(high - low + 1, bool)
    there[place] = True
    return np.flatnonzero(there) + low, (np.cumsum(there) - 1)[place]


def rank_combinations(*columns: Ints) -> tuple[Ints, int]:
    """Return for each row the number of its combination of values, in order of the values; and how many there are.

    This goes column by column: sorting rows of several columns at once takes five times as long.
    """
    number, size, most = np.zeros(len(columns[0]), np.int64), 1, _most(len(columns[0]))
    for column in columns if len(number) else ():
        low = int(column.min())
        values, width = column - low, int(column.max()) - low + 1
        if width > 1 and size * width > most:  # too far apart for a table: rank the values first
            (combinations, number), (apart, values) = rank_values(number), rank_values(values)
            size, width = len(combinations), len(apart)
        if width > 1:
            number, size = number * width + values, size * width
    combinations, number = rank_values(number)
    return number, len(combinations)


def _most(count: int) -> int:
    """Return the range of values up to which a table of all of them is less work than sorting `count` values."""
    return 4 * count + 1024


def argsort_small(numbers: Ints, count: int) -> Ints:
    """Return `np.argsort(numbers, kind="stable")` for numbers from 0 to below `count`; by radix sort if short."""
    return np.argsort(numbers.astype(np.uint16) if count < 2**16 else numbers, kind="stable")


def distinct(*columns: Ints) -> tuple[Ints, Ints]:
    """Return the first row of every combination of values, and for each row the number of its combination."""
    number, kinds = rank_combinations(*columns)
    first = np.full(kinds, len(number), np.int64)
    np.minimum.at(first, number, np.arange(len(number)))
    return first, number
