"""What matching ranks speaks in: the collectives of a group on one rank, the line from its clock to another's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...timeline.columns import Ints, Timeline

TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that nobody leaves before all have given their part; the root of a broadcast may."""
ONE_TO_ONE = ("send", "recv", "send_recv")
STRIDE = 1 << 48
"""Numbers that tie rows together count from 0 on every rank: in a merged timeline each rank has a range of its own."""
Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class CollectiveSequence:
    """The collectives of one group on one rank, in the order they ran. `what` numbers type and bytes.

    `on_host`: they ran on a thread of the host, not as kernels. `numbers` are theirs in the group, the same on all its
    ranks, where torch told them.
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
    """The process groups that a trace states, as it states them, and their ranks."""
    info = timeline.meta.get("distributedInfo")
    config = info.get("pg_config") if isinstance(info, dict) else None
    found = []
    for group in config if isinstance(config, list) else ():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, list) and ranks and all(isinstance(rank, int) for rank in ranks):
            found.append((group, tuple(ranks)))
    return found
