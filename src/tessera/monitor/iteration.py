"""Measures time and energy of an iteration at steady state: with `EnergyBenchmark` if a sensor works, else a clock."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from .benchmark import EnergyBenchmark
from .scope import synchronize

# How precise a figure should be (relative half-width of the 90% interval), and after how many seconds to give up.
TARGET, MAX_S = 0.01, 6.0
_MIN_TIMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationMeasurement:
    """One iteration; errors are half-widths of 90% intervals, None if nothing was measured.

    `spread_j` is the part of `error_j` that differs between two measurements by the same sensor.
    """

    time_s: float
    error_s: float | None = None
    energy_j: float | None = None
    error_j: float | None = None
    spread_j: float | None = None
    power_w: float | None = None
    basis: str = ""


def measure_iteration(
    iteration: Callable[[], object], budget_s: float, *, modelled: bool = False
) -> IterationMeasurement:
    """Run an iteration until its figures are steady, for a few seconds and not much longer than `budget_s`.

    Modelled joules are returned only with `modelled=True`.
    """
    if not modelled and not has_sensor():
        return IterationMeasurement(time_s=_time_iteration(iteration, min(0.2, budget_s)))
    max_s = min(MAX_S, budget_s)
    bench = EnergyBenchmark(target=TARGET, min_s=max_s / 4, budget_s=max_s)
    bench.measure(name="iteration")(iteration)()
    result = bench.results[0]
    duration, joules = result.time_per_call_s, result.energy_per_call_j
    if not (math.isfinite(joules.value) and (modelled or result.basis == "measured")):
        return IterationMeasurement(time_s=duration.value, error_s=duration.error, basis=result.basis)
    return IterationMeasurement(
        time_s=duration.value,
        error_s=duration.error,
        energy_j=joules.value,
        error_j=joules.error,
        spread_j=result.spread_j,
        power_w=result.power_w.value,
        basis=result.basis,
    )


@functools.cache
def has_sensor() -> bool:
    """Return whether there is any sensor except the modelled one."""
    from ..sensors.discover import discover

    discovery = discover()
    for sensor in discovery.sensors:
        sensor.stop()
    return not discovery.modelled_only


def _time_iteration(iteration: Callable[[], object], min_s: float) -> float:
    """Return the median time of as many iterations as fit into `min_s`."""
    iteration()
    synchronize()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _MIN_TIMED or time.perf_counter() - begin < min_s:
        start = time.perf_counter()
        iteration()
        synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
