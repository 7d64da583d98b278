"""One block of steps, compiled by numba: the same arithmetic as step_numpy, device by device.

A device runs through several steps at once, with its state in registers: as many steps as pass before a group of ranks
can be released. Nodes and breakers follow step by step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from .arrays import EDGE, TICK_S, BlockResult, FleetArrays, StepSettings

_MOST_TRIPS = 4096
_EARLY = 0.01  # share of a step: a rank so near counts as there, whatever was rounded


def advance_block(fleet: FleetArrays, steps: int, settings: StepSettings) -> BlockResult:
    """Advance the arrays by `steps`."""
    feed_w = np.zeros(steps)
    row_w = np.zeros((steps, len(fleet.rows.closed)))
    trips = np.zeros((_MOST_TRIPS, 3), dtype=np.int64)
    load_w = np.empty((len(fleet.nodes.alive), steps))
    count = _advance(fleet, steps, settings, load_w, feed_w, row_w, trips)
    return BlockResult(feed_w=feed_w, row_w=row_w, trips=trips[:count])


@njit(cache=True)  # type: ignore[untyped-decorator]
def _advance(fleet: Any, steps: int, settings: Any, load_w: Any, feed_w: Any, row_w: Any, trips: Any) -> Any:
    found, at = np.int64(0), np.int64(0)  # not literals: numba would compile the called functions once more for them
    while at < steps:
        span = _count_safe_steps(fleet.gpus, fleet.groups, settings.step_s, steps - at)
        fleet.groups.lowest_s[:] = np.inf
        _run_gpus(fleet.gpus, fleet.waves, fleet.groups.lowest_s, load_w, span, settings)
        found = _run_feed(fleet, settings, at, span, load_w, feed_w, row_w, trips, found)
        _release(fleet.gpus, fleet.groups)
        at += span
    return found


@njit(cache=True)  # type: ignore[untyped-decorator]
def _count_safe_steps(gpus: Any, groups: Any, step_s: float, most: int) -> int:
    """Return the least number of steps until the slowest rank of any group comes to where the others wait."""
    _find_lowest(gpus, groups)
    span = most
    for g in range(len(groups.sync_s)):
        left = (groups.sync_s[g] - groups.lowest_s[g]) / step_s - _EARLY
        if left < span:
            span = max(1, int(np.ceil(left)))
    return span


@njit(cache=True)  # type: ignore[untyped-decorator]
def _find_lowest(gpus: Any, groups: Any) -> None:
    groups.lowest_s[:] = np.inf
    for i in range(len(gpus.place_s)):
        g = gpus.group[i]
        if g >= 0:
            place = gpus.place_s[i] if gpus.alive[i] else -np.inf
            groups.lowest_s[g] = min(groups.lowest_s[g], place)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _run_gpus(gpus: Any, waves: Any, lowest_s: Any, load_w: Any, span: int, settings: Any) -> None:
    load_w[:, :span] = 0.0
    bent = settings.limited or settings.ramped
    step_s, one = settings.step_s, np.float32(1.0)
    wave_w, wave_compute = waves.watts, waves.compute
    for i in range(len(gpus.place_s)):
        if not gpus.alive[i]:
            gpus.last_w[i] = np.float32(0.0)
            if gpus.group[i] >= 0:
                lowest_s[gpus.group[i]] = -np.inf
            continue
        # Copy everything into registers, because numba cannot know that the arrays do not overlap.
        place, delay, later = gpus.place_s[i], gpus.delay_s[i], gpus.next_delay_s[i]
        base, last_cell, rate = gpus.base[i], gpus.cells[i] - 1, gpus.cells_per_s[i]
        period, sync, group = gpus.period_s[i], gpus.sync_s[i], gpus.group[i]
        count, loads = gpus.copies[i], load_w[gpus.node[i]]
        start, end = place, min(sync, period)
        if place < -TICK_S:
            start, end = place + delay + period, period
        if not bent and (place >= -TICK_S or place < -delay - TICK_S) and start + span * step_s < end:
            watts, total = _run_plain(wave_w[base + 1 : base + 2 + last_cell], start, rate, step_s, count, loads[:span])
            gpus.last_w[i] = watts
            gpus.sum_w[i] += total
            place += span * step_s
            gpus.place_s[i] = place
            if group >= 0:
                lowest_s[group] = min(lowest_s[group], place)
            continue
        watts, total, work = np.float32(0.0), np.float32(0.0), 0.0
        for k in range(span):
            place = min(place, sync)
            cell = base + _find_cell(place, delay, period, sync, rate, last_cell)
            watts = wave_w[cell]
            if bent:
                watts, speed = _limit(gpus, i, watts, waves.speed, settings)
                place += step_s * (one - wave_compute[cell] * (one - speed))
            else:
                place += step_s
            total += watts
            loads[k] += count * watts
            if group < 0 and place >= period - TICK_S:
                place -= period + later
                delay = later
                work += period
        gpus.place_s[i], gpus.delay_s[i], gpus.last_w[i] = place, delay, watts
        gpus.sum_w[i] += total
        gpus.work_s[i] += work
        if group >= 0:
            lowest_s[group] = min(lowest_s[group], place)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _find_cell(place: Any, delay: Any, period: Any, sync: Any, rate: Any, last_cell: Any) -> Any:
    """Return the cell of its wave that a rank is in, from 1; 0 while it waits."""
    at = place
    if place >= sync - TICK_S or -delay - TICK_S <= place < -TICK_S:
        return np.int32(0)
    if place < -TICK_S:
        at = place + delay + period
    return np.int32(1) + min(np.int32(at * rate + EDGE), last_cell)


@njit(cache=True, fastmath=True)  # type: ignore[untyped-decorator]
def _run_plain(wave_w: Any, start: Any, rate: Any, step_s: Any, count: Any, loads: Any) -> Any:
    """Run a GPU that neither waits nor is held through the cells of its wave; return its last watts and their sum."""
    total, watts, last_cell = np.float32(0.0), np.float32(0.0), np.int32(len(wave_w) - 1)
    for k in range(len(loads)):
        # Unsigned, so that numba need not test for a negative index.
        watts = wave_w[np.uint32(min(np.int32((start + k * step_s) * rate + EDGE), last_cell))]
        loads[k] += count * watts
        total += watts
    return watts, total


@njit(cache=True)  # type: ignore[untyped-decorator]
def _limit(gpus: Any, i: int, watts: Any, speeds: Any, settings: Any) -> Any:
    """Return the watts under caps, slow-down by heat, floors and ramps, and the remaining clock."""
    one, zero, half = np.float32(1.0), np.float32(0.0), np.float32(0.5)
    scale = np.float32(len(speeds) - 1)
    idle = gpus.idle_w[i]
    dynamic = watts - idle
    speed = one
    if settings.limited:
        target = gpus.gain_limit[i]
        if dynamic > zero:
            target = min(target, max(zero, (gpus.cap_w[i] - idle) / dynamic))
        gpus.gain[i] = gpus.gain[i] + (target - gpus.gain[i]) * np.float32(settings.follow)
        watts = idle + dynamic * gpus.gain[i]
        speed = speeds[np.int32(gpus.gain[i] * scale + half)]
    if settings.ramped:
        wanted, last = watts, gpus.last_w[i]
        if watts > last + gpus.up_w[i]:
            watts = last + gpus.up_w[i]
            if dynamic > zero:
                share = min(one, max(zero, (watts - idle) / dynamic))
                speed = min(speed, speeds[np.int32(share * scale + half)])
        # As `runtime.shaping.hold_power`, which the numpy engine calls; tests check that both give the same watts.
        held = min(max(watts, gpus.floor_w[i], last - gpus.down_w[i]), gpus.most_w[i])
        watts = max(watts, held)
        gpus.ballast_w[i] += max(zero, watts - wanted)
    gpus.last_w[i] = watts
    return watts, speed


@njit(cache=True)  # type: ignore[untyped-decorator]
def _release(gpus: Any, groups: Any) -> None:
    """Let the ranks of a group go on when the slowest has come."""
    any_come = False
    for g in range(len(groups.sync_s)):
        if groups.lowest_s[g] >= groups.sync_s[g] - TICK_S:
            groups.iterations[g] += 1
            any_come = True
    if any_come:
        for i in range(len(gpus.place_s)):
            g = gpus.group[i]
            if g >= 0 and groups.lowest_s[g] >= groups.sync_s[g] - TICK_S:
                gpus.place_s[i] -= gpus.period_s[i] + gpus.next_delay_s[i]
                gpus.delay_s[i] = gpus.next_delay_s[i]


@njit(cache=True)  # type: ignore[untyped-decorator]
def _run_feed(
    fleet: Any, settings: Any, at: int, span: int, load_w: Any, feed_w: Any, row_w: Any, trips: Any, found: int
) -> int:
    """Compute nodes, racks, rows and feed over the steps of a span."""
    racks, rows = fleet.racks, fleet.rows
    before = found
    for k in range(span):
        step, known = at + k, found
        found = _step_nodes(fleet, settings, load_w[:, k], step, trips, found)
        found = _step_breakers(racks, step, np.int64(1), trips, found)
        rows.draw_w[:] = 0.0
        for i in range(len(racks.closed)):
            rows.draw_w[racks.parent[i]] += racks.copies[i] * racks.draw_w[i]
        found = _step_breakers(rows, step, np.int64(2), trips, found)
        total = 0.0
        for i in range(len(rows.closed)):
            row_w[step, i] = rows.draw_w[i]
            total += rows.copies[i] * rows.draw_w[i]
        feed_w[step] = total
        if found > known:
            _switch_off(fleet, load_w, k, span)
    if found > before:
        for i in range(len(fleet.gpus.alive)):
            if not fleet.nodes.alive[fleet.gpus.node[i]]:
                fleet.gpus.alive[i] = False
                if fleet.gpus.group[i] >= 0:
                    fleet.groups.lowest_s[fleet.gpus.group[i]] = -np.inf
    return found


@njit(cache=True)  # type: ignore[untyped-decorator]
def _step_nodes(fleet: Any, settings: Any, load_w: Any, step: int, trips: Any, found: int) -> int:
    nodes, racks = fleet.nodes, fleet.racks
    a, b, c, d = settings.loss
    racks.draw_w[:] = 0.0
    for i in range(len(nodes.alive)):
        nodes.draw_w[i] = 0.0
        if not nodes.alive[i]:
            continue
        load = load_w[i] + nodes.host_w[i]
        x = load / settings.supply_w
        nodes.draw_w[i] = load + settings.supply_w * max(0.0, a + x * (b + x * (c + x * d)))
        racks.draw_w[nodes.rack[i]] += nodes.copies[i] * nodes.draw_w[i]
        nodes.over_s[i] = nodes.over_s[i] + settings.step_s if x >= settings.limit_at else 0.0
        if x >= settings.off_at or nodes.over_s[i] >= settings.limit_s:
            nodes.alive[i] = False
            found = _note_trip(trips, found, step, np.int64(0), i)
    return found


@njit(cache=True)  # type: ignore[untyped-decorator]
def _step_breakers(level: Any, step: int, number: int, trips: Any, found: int) -> int:
    for i in range(len(level.closed)):
        if not level.closed[i]:
            level.draw_w[i] = 0.0
            continue
        draw = level.draw_w[i]
        level.sum_w[i] += draw
        level.max_w[i] = max(level.max_w[i], draw)
        load = draw / level.rating_w[i]
        level.heat[i] += (load * load - level.heat[i]) * level.follow[i]
        if load >= level.magnetic[i] or level.heat[i] >= level.hold[i]:
            level.closed[i] = False
            found = _note_trip(trips, found, step, number, i)
    return found


@njit(cache=True)  # type: ignore[untyped-decorator]
def _note_trip(trips: Any, found: int, step: int, level: int, number: int) -> int:
    if found == len(trips):
        return found
    trips[found, 0], trips[found, 1], trips[found, 2] = step, level, number
    return found + 1


@njit(cache=True)  # type: ignore[untyped-decorator]
def _switch_off(fleet: Any, load_w: Any, k: int, span: int) -> None:
    """Remove the power of everything behind a breaker or a supply that opened in step k of a span.

    The GPUs have already run to the end of the span, so what they drew after the step is subtracted again.
    """
    gpus, nodes = fleet.gpus, fleet.nodes
    for i in range(len(fleet.racks.closed)):
        if not fleet.rows.closed[fleet.racks.parent[i]]:
            fleet.racks.closed[i] = False
    for i in range(len(nodes.alive)):
        if not fleet.racks.closed[nodes.rack[i]]:
            nodes.alive[i] = False
    drawn_w = np.zeros(len(nodes.alive))
    for i in range(len(gpus.alive)):
        if not nodes.alive[gpus.node[i]] and gpus.alive[i]:
            drawn_w[gpus.node[i]] += gpus.copies[i] * gpus.sum_w[i]
    for i in range(len(gpus.alive)):
        node = gpus.node[i]
        if not nodes.alive[node] and gpus.alive[i] and drawn_w[node] > 0:
            gpus.sum_w[i] *= 1.0 - np.sum(load_w[node, k + 1 : span]) / drawn_w[node]
    for i in range(len(nodes.alive)):
        if not nodes.alive[i]:
            load_w[i, k + 1 : span] = 0.0
