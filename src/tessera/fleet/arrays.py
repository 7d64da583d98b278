"""The state of a simulated fleet as arrays, one entry for each class of GPUs, nodes, racks and rows.

These are plain named tuples of arrays, because both engines change them in place and numba accepts them. Watts are
those of one member of a class; `copies` says how many of them are in one of its parent's class.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
Flags = NDArray[np.bool_]

SPEEDS = 256
"""Steps of the table that turns a share of the dynamic power into a share of the clock."""


EDGE = np.float32(0.01)
"""Share of a cell: a place so near to the next cell counts as in it, so that rounding does not move the edge of a wave.
"""


TICK_S = 1e-6
"""Seconds: a rank so near to a place counts as there, because sums of steps are rounded."""


class GpuArrays(NamedTuple):
    """GPUs. `place_s` is a rank's place in its iteration; see engine.py."""

    place_s: F64
    delay_s: F64
    next_delay_s: F64
    gain: F32
    last_w: F32
    idle_w: F32
    cap_w: F32
    gain_limit: F32
    floor_w: F32
    most_w: F32
    up_w: F32
    down_w: F32
    base: I32
    cells: I32
    cells_per_s: F64
    period_s: F64
    sync_s: F64
    group: I32
    node: I32
    copies: F32
    alive: Flags
    sum_w: F64
    ballast_w: F64
    work_s: F64


class NodeArrays(NamedTuple):
    """Nodes: watts at the plug, and how long their supplies have been over their limit."""

    rack: I32
    copies: F64
    host_w: F64
    over_s: F64
    alive: Flags
    load_w: F64
    draw_w: F64


class BreakerArrays(NamedTuple):
    """Racks or rows, and the breaker of each. `rating_w` is infinite if there is none."""

    parent: I32
    copies: F64
    rating_w: F64
    hold: F64
    follow: F64
    magnetic: F64
    heat: F64
    closed: Flags
    draw_w: F64
    sum_w: F64
    max_w: F64


class GroupArrays(NamedTuple):
    """Ranks that wait for each other."""

    sync_s: F64
    lowest_s: F64
    iterations: NDArray[np.int64]


class WaveTable(NamedTuple):
    """All waves one after another: a cell for waiting, then the cells of the period; and the clock for each gain."""

    watts: F32
    compute: F32
    speed: F32


class StepSettings(NamedTuple):
    """The settings that stay the same within a block of steps."""

    step_s: float
    follow: float
    limited: bool
    ramped: bool
    supply_w: float
    loss: tuple[float, float, float, float]
    limit_at: float
    limit_s: float
    off_at: float


class FleetArrays(NamedTuple):
    """All arrays of a fleet."""

    gpus: GpuArrays
    nodes: NodeArrays
    racks: BreakerArrays
    rows: BreakerArrays
    groups: GroupArrays
    waves: WaveTable


class BlockResult(NamedTuple):
    """One block of steps: watts of the feed and of each row by step, and what switched off.

    `trips` has a row for each: step, level (0 node, 1 rack, 2 row), class.
    """

    feed_w: F64
    row_w: F64
    trips: NDArray[np.int64]


def make_breakers(parent: I32, copies: F64) -> BreakerArrays:
    """Return breakers that never open."""
    size = len(parent)
    return BreakerArrays(
        parent=parent,
        copies=copies,
        rating_w=np.full(size, np.inf),
        hold=np.ones(size),
        follow=np.zeros(size),
        magnetic=np.full(size, np.inf),
        heat=np.zeros(size),
        closed=np.ones(size, dtype=np.bool_),
        draw_w=np.zeros(size),
        sum_w=np.zeros(size),
        max_w=np.zeros(size),
    )
