"""From kernels to an iteration: the device's time and the host's, the clock under the power limit, joules, peak power.

Everything is solved for the sustained steady state: iterations follow each other without a pause, and the clock is the
highest at which the average power stays within the limit. A burst runs at the boost clock.

The peak is the highest power a sensor would show. A limiter holds the mean over about half a second, not every moment.
Recorded on an H200 limited to 700 W under sustained mixed loads (`benchmarks/measure/limit_windows.py`): the highest
mean over 20 ms is 965 W, over 50 ms 942 W, over 100 ms 846 W, over 200 ms 766 W, over 500 ms 682 W, over a second
670 W. Nobody measured it on other boards: there the peak is held at the limit, and a note says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..joules import Floats
from .kernel_time import KernelTime
from .power import DeviceWork, PowerModel, highest_clock

WINDOW_S = 0.02
"""A predicted peak is a mean over this: one power sample of the H200 covers it (docs/measuring.md)."""

# The 965 W above over the 691 W that the same board sustains (`limit_fraction` of its 700 W).
_BURST = 965.0 / 690.9
_NOTED = 1.03  # a peak closer to the limit needs no note: an iteration that is bound by the limit lies at it


@dataclass(frozen=True, slots=True)
class SolvedIteration:
    """An iteration, operator by operator: seconds running and waiting, joules by component."""

    device_s: Floats
    wait_s: Floats
    static_j: Floats
    compute_j: Floats
    memory_j: Floats
    clock: float
    host_s: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole iteration."""
        return float(self.device_s.sum() + self.wait_s.sum())

    @property
    def energy_j(self) -> float:
        """Joules of the whole iteration."""
        return float((self.static_j + self.compute_j + self.memory_j).sum())


class Iteration:
    """The kernels of an iteration as arrays, ready to be evaluated at any clock."""

    def __init__(self, kernels: Sequence[KernelTime], gaps_s: Sequence[float], power: PowerModel) -> None:
        self.power = power
        works = [DeviceWork.of(k) for k in kernels]
        self.clock_s = _array(w.clock_s for w in works)
        self.fixed_s = _array(w.fixed_s for w in works) + _array(gaps_s)
        self.busy_s = _array(w.busy_s for w in works)
        self.flops_j = _array(power.flops_j(w) for w in works)
        self.hbm_j = _array(k.hbm_bytes for k in kernels) * power.hbm_j_per_byte
        self.l2_j = _array(k.l2_bytes for k in kernels) * power.l2_j_per_byte

    def device_s(self, clock: float) -> Floats:
        """Seconds on the device at a clock relative to boost."""
        seconds: Floats = self.clock_s / clock + self.fixed_s
        return seconds

    def dynamic_j(self, clock: float) -> tuple[Floats, Floats]:
        """(compute, memory) joules of each kernel."""
        square = self.power.voltage(clock) ** 2
        at_boost = self.clock_s + self.fixed_s
        stretch = np.divide(self.device_s(clock), at_boost, out=np.ones_like(at_boost), where=at_boost > 0)
        compute = square * (self.power.active_w * self.busy_s * clock * stretch + self.flops_j)
        return compute, self.hbm_j + square * self.l2_j

    def watts(self, clock: float, least_s: float) -> float:
        """Average power when the iteration takes at least `least_s` (the host's time)."""
        seconds = max(float(self.device_s(clock).sum()), least_s)
        compute, memory = self.dynamic_j(clock)
        return self.power.static_w + float(compute.sum() + memory.sum()) / seconds if seconds > 0 else 0.0

    def solve(
        self, host_s: Floats | None, *, synced: Sequence[bool] = (), drained: bool = False, burst: bool = False
    ) -> SolvedIteration:
        """The iteration under the power limit; `host_s` is the host's time up to each kernel's launch, or None.

        `synced` marks the kernels before which the host waits for the device; `drained`: it also waits at the end.
        """
        least = float(host_s.sum()) if host_s is not None else 0.0
        most = self.power.most_clock
        clock = most if burst else highest_clock(lambda f: self.watts(f, least), self.power.limit_w, most)
        device = self.device_s(clock)
        compute, memory = self.dynamic_j(clock)
        wait = _waits(device, host_s, synced, drained)
        static = self.power.static_w * (device + wait)
        return SolvedIteration(device, wait, static, compute, memory, clock, least)


def _array(values: Any) -> Floats:
    return np.fromiter(values, float)


def _waits(device: Floats, host_s: Floats | None, synced: Sequence[bool], drained: bool) -> Floats:
    """How long the device waits before each kernel in the steady state.

    The host runs ahead while it can. Where the device needs longer in all, it never waits; otherwise iterations begin
    with an idle device, and each kernel starts when it was launched and the one before it is done. A host that waits
    for the device cannot run ahead of it.
    """
    waits = np.zeros_like(device)
    stops = drained or any(synced)
    if host_s is None or not len(device) or (not stops and host_s.sum() <= device.sum()):
        return waits
    launched, free = 0.0, 0.0
    for i, (host, runs) in enumerate(zip(host_s, device, strict=True)):
        if synced and synced[i]:
            launched = max(launched, free)
        launched += host
        start = max(launched, free)
        waits[i] = start - free
        free = start + runs
    if stops:
        return waits
    # The last kernels run past the host's own end and overlap with the next iteration's launches.
    over = free - float(host_s.sum())
    if over > 0 and waits.sum() > 0:
        waits *= max(0.0, 1.0 - over / waits.sum())
    return waits


def find_peak(
    solved: SolvedIteration, power: PowerModel, *, measured: bool, burst: bool = False
) -> tuple[float | None, list[str]]:
    """The highest mean over `WINDOW_S` in watts, and notes; `measured`: the limiter is the H200's, as recorded."""
    waits_j = power.static_w * solved.wait_s
    runs_j = solved.static_j + solved.compute_j + solved.memory_j - waits_j
    # The wait comes before its kernel: the two alternate.
    seconds = np.stack((solved.wait_s, solved.device_s), axis=1).ravel()
    joules = np.stack((waits_j, runs_j), axis=1).ravel()
    mean_w = highest_mean_w(seconds, joules)
    if mean_w is None:
        return None, []
    ceiling_w = math.inf if burst else _BURST * power.limit_w if measured else power.limit_w
    average_w = float(joules.sum() / seconds.sum())
    notes = [_note_above_limit(mean_w, measured, burst)] if mean_w > _NOTED * power.limit_w else []
    return max(average_w, min(mean_w, ceiling_w)), notes


def _note_above_limit(mean_w: float, measured: bool, burst: bool) -> str:
    if burst:
        return "the peak is above the power limit: a burst ends before the limit acts"
    if measured:
        return "the peak is above the power limit, which holds only the mean over half a second (recorded on an H200)"
    highest = f"the most expensive {1e3 * WINDOW_S:.0f} ms would draw {mean_w:.3g} W"
    return f"{highest}: the peak is limited to the power limit, because overshoot was not measured on this board"


def highest_mean_w(
    seconds: Sequence[float] | Floats, joules: Sequence[float] | Floats, window_s: float = WINDOW_S
) -> float | None:
    """The highest mean power over any window of endlessly repeated work; None where it takes no time."""
    took, spent = np.asarray(seconds, float), np.asarray(joules, float)
    whole_s = float(took.sum())
    if not whole_s > 0:
        return None
    average_w = float(spent.sum()) / whole_s
    # A window of many iterations holds whole ones, at the average, and a rest: the most expensive part of one.
    rest_s = window_s % whole_s
    if rest_s <= 1e-9 * whole_s:
        return average_w
    times = np.concatenate(([0.0], np.cumsum(np.tile(took, 2))))
    energy = np.concatenate(([0.0], np.cumsum(np.tile(spent, 2))))
    # The joules within a window are linear between the moments at which either of its ends meets an edge.
    starts = np.concatenate((times, times - rest_s))
    starts = starts[(starts >= 0) & (starts + rest_s <= times[-1])]
    rest_j = float((np.interp(starts + rest_s, times, energy) - np.interp(starts, times, energy)).max())
    return (average_w * (window_s - rest_s) + rest_j) / window_s
