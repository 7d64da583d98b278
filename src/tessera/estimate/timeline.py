"""From operators to an iteration: the device's time and the host's, the clock the power limit leaves, and the joules.

Everything is solved for the sustained steady state: iterations follow each other without a pause, and the clock is the
highest at which the average power stays within the limit. A burst runs at the boost clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kernel_time import KernelTime
from .power import PowerModel, Work, highest_clock

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Solved:
    """An iteration, operator by operator: seconds on the device and waiting, joules by component."""

    device_s: Array
    wait_s: Array
    static_j: Array
    compute_j: Array
    memory_j: Array
    clock: float
    host_s: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole iteration."""
        return float(self.device_s.sum() + self.wait_s.sum())


class Iteration:
    """The kernels of an iteration as arrays, ready to be evaluated at any clock."""

    def __init__(self, kernels: Sequence[KernelTime], gaps_s: Sequence[float], power: PowerModel) -> None:
        self.power = power
        works = [Work.of(k) for k in kernels]
        self.clock_s = _array(w.clock_s for w in works)
        self.fixed_s = _array(w.fixed_s for w in works) + _array(gaps_s)
        self.busy_s = _array(w.busy_s for w in works)
        dearest = max(power.j_per_flop.values(), default=0.0)  # a unit nobody measured is not taken to be cheap
        cost = power.j_per_flop
        self.flops_j = _array(sum(cost.get(unit, dearest) * n for unit, n in w.flops.items()) for w in works)
        self.hbm_j = _array(k.hbm_bytes for k in kernels) * power.hbm_j_per_byte
        self.l2_j = _array(k.l2_bytes for k in kernels) * power.l2_j_per_byte

    def device_s(self, clock: float) -> Array:
        """Seconds on the device at a clock relative to boost."""
        found: Array = self.clock_s / clock + self.fixed_s
        return found

    def dynamic_j(self, clock: float, switching: float) -> tuple[Array, Array]:
        """(compute, memory) joules of each kernel."""
        square = self.power.voltage(clock) ** 2
        at_boost = self.clock_s + self.fixed_s
        stretch = np.divide(self.device_s(clock), at_boost, out=np.ones_like(at_boost), where=at_boost > 0)
        compute = square * (self.power.active_w * self.busy_s * clock * stretch + switching * self.flops_j)
        memory = switching * (self.hbm_j + square * self.l2_j)
        return compute, memory

    def watts(self, clock: float, least_s: float, switching: float) -> float:
        """Average power when the iteration takes at least `least_s` (the host's time)."""
        seconds = max(float(self.device_s(clock).sum()), least_s)
        compute, memory = self.dynamic_j(clock, switching)
        return self.power.static_w + float(compute.sum() + memory.sum()) / seconds if seconds > 0 else 0.0

    def solve(
        self,
        host_s: Array | None,
        *,
        synced: Sequence[bool] = (),
        drained: bool = False,
        burst: bool = False,
        switching: float = 1.0,
    ) -> Solved:
        """The iteration under the power limit; `host_s` is the host's time to each kernel's launch, or None.

        `synced` says before which kernels the host waits for the device, `drained` that it does so at the end.
        """
        least = float(host_s.sum()) if host_s is not None else 0.0
        clock = 1.0 if burst else highest_clock(lambda f: self.watts(f, least, switching), self.power.limit_w)
        device = self.device_s(clock)
        compute, memory = self.dynamic_j(clock, switching)
        wait = _waits(device, host_s, synced, drained)
        limit = self.power.limit_w
        total = float((compute + memory).sum())
        seconds = float(device.sum() + wait.sum())
        # Memory traffic alone may exceed the limit at the lowest clock: then it waits, evenly.
        if not burst and total > 0 and self.power.static_w + total / max(seconds, 1e-12) > limit * (1 + 1e-9):
            needed = total / (limit - self.power.static_w)
            device = device + (needed - seconds) * device / max(float(device.sum()), 1e-12)
        static = self.power.static_w * (device + wait)
        return Solved(device, wait, static, compute, memory, clock, least)


def _array(values: Any) -> Array:
    return np.fromiter(values, float)


def _waits(device: Array, host_s: Array | None, synced: Sequence[bool], drained: bool) -> Array:
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
