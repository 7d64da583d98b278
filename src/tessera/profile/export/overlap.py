"""How much of a row's time something else of the same device ran beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...integral import Ints
from ...record import CODE
from ...timeline.intervals import Spans, covered_ns, union


class Overlap:
    """Per device: of a copy or collective the share of its time that kernels ran too, and the other way round."""

    def __init__(self, parts: Sequence[Sequence[NDArray[Any]]]) -> None:
        """Take (kind, start_ns, end_ns, device) of device rows, in any number of pieces."""
        self._unions: dict[tuple[int, bool], Spans] = {}
        # One device and sort at a time, so that no copy of everything is made.
        for number in sorted({n for part in parts for n in np.unique(part[3]).tolist()}):
            for is_kernel in (True, False):
                chosen = [((p[3] == number) & ((p[0] == CODE["kernel"]) == is_kernel), p[1], p[2]) for p in parts]
                start, end = (np.concatenate([part[i][part[0]] for part in chosen]) for i in (1, 2))
                if len(start):
                    self._unions[number, is_kernel] = union(start, end)

    def pct(self, kind: NDArray[Any], start: Ints, end: Ints, device: NDArray[Any]) -> NDArray[np.float64]:
        """Percent for each row; NaN where the device has nothing of the other sort, or the row took no time."""
        out = np.full(len(kind), np.nan)
        kernels = kind == CODE["kernel"]
        for (number, is_kernel), spans in self._unions.items():
            these = np.flatnonzero((device == number) & (kernels != is_kernel) & (end > start))
            if these.size:
                s, e = start[these], end[these]
                out[these] = 100.0 * covered_ns(spans, s, e) / (e - s)
        return out
