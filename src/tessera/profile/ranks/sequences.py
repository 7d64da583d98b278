"""What matching ranks speaks in: the collectives of a group on one rank, the line from its clock to another's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...timeline.columns import Ints

TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that nobody leaves before all have given their part; the root of a broadcast may."""
ONE_TO_ONE = ("send", "recv", "send_recv")
Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class CollectiveSequence:
    """The collectives of one group on one rank, in the order they ran. `what` numbers type and bytes.

    `on_host`: they ran on a thread of the host, not as kernels.
    """

    rows: Ints
    what: Ints
    together: NDArray[np.bool_]
    starts: Ints
    ends: Ints
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class ClockFit:
    """offset = `offset_ns` + `drift` * (time - `at_ns`), with the half-width of a 90% interval anywhere in the run."""

    offset_ns: float
    drift: float
    drift_error: float
    error_ns: float
    at_ns: int
