"""One block of steps in numpy: all devices at once, step by step."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ..runtime.shaping import hold_power
from .arrays import (
    EDGE,
    F32,
    F64,
    TICK_S,
    BlockResult,
    BreakerArrays,
    Flags,
    FleetArrays,
    GpuArrays,
    StepSettings,
    WaveTable,
)

_ONE, _ZERO, _HALF = np.float32(1.0), np.float32(0.0), np.float32(0.5)


def advance_block(fleet: FleetArrays, steps: int, settings: StepSettings) -> BlockResult:
    """Advance the arrays by `steps`."""
    feed_w = np.zeros(steps)
    row_w = np.zeros((steps, len(fleet.rows.closed)))
    trips: list[tuple[int, int, int]] = []
    stepper = _Stepper(fleet, settings)
    for step in range(steps):
        before = len(trips)
        stepper.step_gpus()
        trips += [(step, 0, int(i)) for i in np.flatnonzero(stepper.step_nodes())]
        _add_children(fleet.racks, fleet.nodes.rack, fleet.nodes.copies * fleet.nodes.draw_w)
        trips += [(step, 1, int(i)) for i in np.flatnonzero(_step_breakers(fleet.racks))]
        _add_children(fleet.rows, fleet.racks.parent, fleet.racks.copies * fleet.racks.draw_w)
        trips += [(step, 2, int(i)) for i in np.flatnonzero(_step_breakers(fleet.rows))]
        row_w[step] = fleet.rows.draw_w
        feed_w[step] = np.dot(fleet.rows.copies, fleet.rows.draw_w)
        if len(trips) > before:
            switch_off(fleet)
    return BlockResult(feed_w=feed_w, row_w=row_w, trips=np.array(trips, dtype=np.int64).reshape(-1, 3))


class _Stepper:
    """GPUs and nodes, with what stays the same during a block of steps."""

    def __init__(self, fleet: FleetArrays, settings: StepSettings) -> None:
        self.fleet, self.settings = fleet, settings
        gpus = fleet.gpus
        self.delayed = bool(np.any(gpus.delay_s > 0) or np.any(gpus.next_delay_s > 0))
        self.last_cell = gpus.cells - np.int32(1)
        self.node_starts = _find_starts(gpus.node)
        self.node_numbers = gpus.node[self.node_starts]
        self.run_starts = _find_starts(gpus.group)
        self.run_groups = gpus.group[self.run_starts]
        self.free = gpus.group < 0
        self.any_free = bool(np.any(self.free))
        self.all_alike = bool(np.all(gpus.copies == 1))

    def step_gpus(self) -> None:
        gpus, waves, settings = self.fleet.gpus, self.fleet.waves, self.settings
        cell, place = self._find_cells()
        watts = waves.watts[cell]
        advance: F64 | float = settings.step_s
        if settings.limited or settings.ramped:
            watts, speed = _limit(gpus, waves, watts, settings)
            advance = advance * (_ONE - waves.compute[cell] * (_ONE - speed))
        if not np.all(gpus.alive):
            watts = np.where(gpus.alive, watts, _ZERO)
        np.copyto(gpus.last_w, watts)
        gpus.sum_w[:] += watts
        np.add(place, advance, out=gpus.place_s, where=gpus.alive)
        self._release()
        counted = watts if self.all_alike else gpus.copies * watts
        self.fleet.nodes.load_w[:] = 0.0
        self.fleet.nodes.load_w[self.node_numbers] = np.add.reduceat(counted, self.node_starts, dtype=np.float64)

    def _find_cells(self) -> tuple[np.ndarray, F64]:
        """Return the cell of its wave that each GPU is in, and its place, limited to where it waits."""
        gpus = self.fleet.gpus
        place = np.minimum(gpus.place_s, gpus.sync_s)
        before = place < -TICK_S
        at = np.where(before, place + gpus.delay_s + gpus.period_s, place) if before.any() else place
        cell = (at * gpus.cells_per_s + EDGE).astype(np.int32)
        np.minimum(cell, self.last_cell, out=cell)
        cell += np.int32(1)
        waits = place >= gpus.sync_s - TICK_S
        if self.delayed:
            waits |= before & (place >= -gpus.delay_s - TICK_S)
        if waits.any():
            cell[waits] = 0
        cell += gpus.base
        return cell, place

    def _release(self) -> None:
        """Let the ranks of a group go on when the slowest has come; ranks without a group begin again at once."""
        gpus, groups = self.fleet.gpus, self.fleet.groups
        if len(groups.sync_s):
            place = gpus.place_s if np.all(gpus.alive) else np.where(gpus.alive, gpus.place_s, -np.inf)
            lowest = np.minimum.reduceat(place, self.run_starts)
            groups.lowest_s[:] = np.inf
            of_groups = self.run_groups >= 0
            np.minimum.at(groups.lowest_s, self.run_groups[of_groups], lowest[of_groups])
            come = groups.lowest_s >= groups.sync_s - TICK_S
            if come.any():
                groups.iterations[come] += 1
                self._begin_again(come[gpus.group] & ~self.free)
        if self.any_free:
            over = self.free & (gpus.place_s >= gpus.period_s - TICK_S) & gpus.alive
            if over.any():
                gpus.work_s[over] += gpus.period_s[over]
                self._begin_again(over)

    def _begin_again(self, chosen: Flags) -> None:
        gpus = self.fleet.gpus
        gpus.place_s[chosen] -= gpus.period_s[chosen] + gpus.next_delay_s[chosen]
        gpus.delay_s[chosen] = gpus.next_delay_s[chosen]

    def step_nodes(self) -> Flags:
        """Compute the watts at the plug of each node; return which of them switched off."""
        nodes, s = self.fleet.nodes, self.settings
        a, b, c, d = s.loss
        load = nodes.load_w + nodes.host_w
        x = load / s.supply_w
        draw = load + s.supply_w * np.maximum(0.0, a + x * (b + x * (c + x * d)))
        nodes.draw_w[:] = np.where(nodes.alive, draw, 0.0)
        nodes.over_s[:] = np.where((x >= s.limit_at) & nodes.alive, nodes.over_s + s.step_s, 0.0)
        off: Flags = nodes.alive & ((x >= s.off_at) | (nodes.over_s >= s.limit_s))
        if off.any():
            nodes.alive[off] = False
        return off


def _limit(gpus: GpuArrays, waves: WaveTable, watts: F32, settings: StepSettings) -> tuple[F32, F32]:
    """Return the watts under caps, slow-down by heat, floors and ramps, and the remaining clock."""
    scale = np.float32(len(waves.speed) - 1)
    dynamic = watts - gpus.idle_w
    positive = dynamic > 0
    speed: F32 = np.ones_like(watts)
    if settings.limited:
        room = np.maximum(_ZERO, (gpus.cap_w - gpus.idle_w) / np.where(positive, dynamic, _ONE))
        target = np.where(positive, np.minimum(gpus.gain_limit, room), gpus.gain_limit)
        gain = gpus.gain + (target - gpus.gain) * np.float32(settings.follow)
        np.copyto(gpus.gain, gain, where=gpus.alive)
        watts = gpus.idle_w + dynamic * gain
        speed = waves.speed[(gain * scale + _HALF).astype(np.int32)]
    if settings.ramped:
        wanted = watts
        highest = gpus.last_w + gpus.up_w
        steep = watts > highest
        if steep.any():
            watts = np.where(steep, highest, watts)
            share = np.clip((watts - gpus.idle_w) / np.where(positive, dynamic, _ONE), _ZERO, _ONE)
            slower = np.minimum(speed, waves.speed[(share * scale + _HALF).astype(np.int32)])
            speed = np.where(steep & positive, slower, speed)
        # Here the unit of time is one step: `down_w` is the most that power may fall in a step.
        limits: Any = {"floor_w": gpus.floor_w, "max_ramp_w_per_s": gpus.down_w, "most_w": gpus.most_w}
        before: Any = gpus.last_w
        watts = cast("F32", hold_power(cast("Any", watts), before, 1.0, **limits))
        gpus.ballast_w[:] += np.where(gpus.alive, np.maximum(_ZERO, watts - wanted), _ZERO)
    return watts, speed


def _find_starts(numbers: np.ndarray) -> np.ndarray:
    """Return where each stretch of equal numbers begins."""
    return np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]]))


def _add_children(level: BreakerArrays, parent: np.ndarray, watts: np.ndarray) -> None:
    level.draw_w[:] = np.bincount(parent, weights=watts, minlength=len(level.closed))


def _step_breakers(level: BreakerArrays) -> Flags:
    """Warm the breakers by their load; return which of them opened."""
    level.draw_w[~level.closed] = 0.0
    level.sum_w[:] += level.draw_w
    np.maximum(level.max_w, level.draw_w, out=level.max_w)
    load = level.draw_w / level.rating_w
    level.heat[:] += np.where(level.closed, (load * load - level.heat) * level.follow, 0.0)
    opened: Flags = level.closed & ((load >= level.magnetic) | (level.heat >= level.hold))
    if opened.any():
        level.closed[opened] = False
    return opened


def switch_off(fleet: FleetArrays) -> None:
    """Remove the power of everything behind a breaker or a supply that opened."""
    fleet.racks.closed[~fleet.rows.closed[fleet.racks.parent]] = False
    fleet.nodes.alive[~fleet.racks.closed[fleet.nodes.rack]] = False
    fleet.gpus.alive[~fleet.nodes.alive[fleet.gpus.node]] = False
