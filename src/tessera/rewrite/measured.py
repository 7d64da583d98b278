"""Seconds and joules of an iteration at steady state: by `EnergyBenchmark` where a sensor measures, else a clock."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

_LEAST_TIMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One iteration; joules are None where nothing measures them."""

    seconds: float
    joules: float | None = None
    error_j: float | None = None


def measure(iteration: Callable[[], object], within_s: float) -> Measured:
    """Run an iteration until its figures are steady, for a few seconds and not much longer than `within_s`."""
    if not _a_sensor_measures():
        return Measured(seconds=_timed(iteration, min(0.2, within_s)))
    from ..monitor import EnergyBenchmark

    least_s = min(1.5, max(0.3, within_s / 3))
    bench = EnergyBenchmark(target=0.01, min_seconds=least_s, max_seconds=3 * least_s)
    bench.measure(name="iteration")(iteration)()
    found = bench.results[0]
    if found.basis != "measured":
        return Measured(seconds=found.seconds_per_call.value)
    joules = found.joules_per_call
    return Measured(seconds=found.seconds_per_call.value, joules=joules.value, error_j=joules.error)


@functools.cache
def _a_sensor_measures() -> bool:
    """Whether anything but the modelled sensor is here."""
    from ..sensors.discover import discover

    found = discover()
    for sensor in found.sensors:
        sensor.stop()
    return not found.modelled_only


def _timed(iteration: Callable[[], object], least_s: float) -> float:
    """The median of as many iterations as fit."""
    iteration()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _LEAST_TIMED or time.perf_counter() - begin < least_s:
        start = time.perf_counter()
        iteration()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
