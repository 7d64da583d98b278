"""Seconds and joules of an iteration at steady state: by `EnergyBenchmark` where a sensor measures, else a clock."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..monitor import EnergyBenchmark, Monitor
from ..monitor.scope import synchronize

# How well a figure is to be known, relative half-width of the 90% interval, and after how long that is given up.
TARGET, MOST_S = 0.01, 6.0
_LEAST_TIMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One iteration; errors are half-widths of 90% intervals. What nothing measures is None.

    `spread_j` is the part of `error_j` that differs between two measurements by the same sensor.
    """

    seconds: float
    seconds_error: float | None = None
    joules: float | None = None
    error_j: float | None = None
    spread_j: float | None = None
    power_w: float | None = None
    basis: str = ""


def measure(
    iteration: Callable[[], object], within_s: float, *, monitor: Monitor | None = None, modelled: bool = False
) -> Measured:
    """Run an iteration until its figures are steady, for a few seconds and not much longer than `within_s`.

    Joules that are `modelled` count only where that is asked for.
    """
    if not modelled and not _a_sensor_measures():
        return Measured(seconds=_timed(iteration, min(0.2, within_s)))
    most_s = min(MOST_S, within_s)
    bench = EnergyBenchmark(target=TARGET, min_seconds=most_s / 4, max_seconds=most_s, monitor=monitor)
    bench.measure(name="iteration")(iteration)()
    found = bench.results[0]
    took, joules = found.seconds_per_call, found.joules_per_call
    if not (math.isfinite(joules.value) and (modelled or found.basis == "measured")):
        return Measured(seconds=took.value, seconds_error=took.error, basis=found.basis)
    return Measured(
        seconds=took.value, seconds_error=took.error, joules=joules.value, error_j=joules.error,
        spread_j=found.spread_j, power_w=found.power_w.value, basis=found.basis,
    )  # fmt: skip


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
    synchronize()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _LEAST_TIMED or time.perf_counter() - begin < least_s:
        start = time.perf_counter()
        iteration()
        synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
