"""Types for matching ranks: the collectives of a group on one rank, and the line from one clock to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...timeline.columns import Ints, Timeline

TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that no rank leaves before all have begun. A broadcast is not one: its root may leave early."""
ONE_TO_ONE = ("send", "recv", "send_recv")
STRIDE = 1 << 48
"""Range of identifiers for each rank in a merged timeline: on every rank by itself they count from 0."""
Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class CollectiveSequence:
    """The collectives of one group on one rank, in the order they ran. `what` has one number per type and size.

    `on_host`: they ran on a thread of the host, not as kernels. `numbers` are torch's numbers of the collectives in the
    group, equal on all its ranks; None if torch did not give them.
    """

    rows: Ints
    what: Ints
    together: NDArray[np.bool_]
    starts: Ints
    ends: Ints
    on_host: bool = False
    numbers: Ints | None = None
    label: str | None = None


@dataclass(frozen=True, slots=True)
class ClockFit:
    """offset = `offset_ns` + `drift` * (time - `at_ns`), with the half-width of a 90% interval anywhere in the run."""

    offset_ns: float
    drift: float
    drift_error: float
    error_ns: float
    at_ns: int


def process_groups(timeline: Timeline) -> list[tuple[dict[str, Any], tuple[int, ...]]]:
    """Return the process groups that a trace names, unchanged, and their ranks."""
    info = timeline.meta.get("distributedInfo")
    config = info.get("pg_config") if isinstance(info, dict) else None
    found = []
    for group in config if isinstance(config, list) else ():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, list) and ranks and all(isinstance(rank, int) for rank in ranks):
            found.append((group, tuple(ranks)))
    return found
