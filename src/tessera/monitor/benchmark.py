"""`EnergyBenchmark`: joules and seconds per call of a function, at steady state, with an interval on each.

The function is called in batches long enough for the sensor. Batches from before the steady state are dropped
(they are found, not guessed), and batches are added until the 90% intervals are under the target or the time is
over; then the result says that it did not converge.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from ..errors import ArgumentError, MissingExtra
from ..schema import Energy, Work, works
from . import steady
from .core import Monitor, default
from .result import BenchmarkResult, Factors, Uncertain
from .scope import synchronize
from .window import Window

P = ParamSpec("P")
R = TypeVar("R")

# A batch must span several samples: the edges of a window then matter little (see integral.window_error_j).
BATCH_S = 0.25
BATCH_RESOLUTIONS = 10
MIN_BATCHES = 9


class EnergyBenchmark:
    """Measures decorated functions; each call of one becomes a row of `results`.

    `target` is the relative half-width of the 90% intervals to reach, `min_seconds` and `max_seconds` bound the
    time spent on one function. Money, CO2 and node-hours are given where you give the factors; nothing is looked
    up in a network.

    >>> bench = EnergyBenchmark()
    >>> @bench.measure(samples=64)
    ... def my_workload(): ...
    >>> my_workload(); bench.print_results()
    """

    def __init__(
        self,
        *,
        target: float = 0.02,
        min_seconds: float = 2.0,
        max_seconds: float = 30.0,
        price_per_kwh: float | None = None,
        gco2e_per_kwh: float | None = None,
        nodes: int = 1,
        monitor: Monitor | None = None,
    ) -> None:
        if not 0 < target < 1:
            raise ArgumentError(f"target={target!r} is not a relative error", fix="give e.g. target=0.02 for 2%")
        if not 0 < min_seconds <= max_seconds:
            raise ArgumentError(
                f"min_seconds={min_seconds!r} and max_seconds={max_seconds!r} leave no time to measure",
                fix="give 0 < min_seconds <= max_seconds",
            )
        self.target = target
        self.min_seconds = min_seconds
        self.max_seconds = max_seconds
        self.factors = Factors(price_per_kwh=price_per_kwh, gco2e_per_kwh=gco2e_per_kwh, nodes=nodes)
        self._given = monitor
        self.results: list[BenchmarkResult] = []

    @overload
    def measure(self, fn: Callable[P, R]) -> Callable[P, R]: ...

    @overload
    def measure(
        self,
        *,
        flops: float | None = None,
        samples: float | None = None,
        tokens: float | None = None,
        work: float | None = None,
        unit: str | None = None,
        name: str | None = None,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...

    def measure(
        self,
        fn: Callable[..., Any] | None = None,
        *,
        flops: float | None = None,
        samples: float | None = None,
        tokens: float | None = None,
        work: float | None = None,
        unit: str | None = None,
        name: str | None = None,
    ) -> Any:
        """Decorate a function: calling it measures it, and returns what its last call returned.

        `flops`, `samples`, `tokens` and `work` (of your own `unit`) are what one call achieves.
        """
        named = {"FLOP": flops, "sample": samples, "token": tokens}
        done = works(named, work, unit, 'measure(work=5000, unit="image")')

        def decorate(target: Callable[..., Any]) -> Callable[..., Any]:
            _check_target(target)
            label = name or str(getattr(target, "__name__", type(target).__name__))  # a partial has no name

            @functools.wraps(target)
            def measured(*args: Any, **kwargs: Any) -> Any:
                result, value = self._run(lambda: target(*args, **kwargs), label, done)
                self.results.append(result)
                return value

            return measured

        return decorate if fn is None else decorate(fn)

    # -- measuring ------------------------------------------------------------------------------------------

    def _run(self, call: Callable[[], Any], name: str, work: dict[str, Work]) -> tuple[BenchmarkResult, Any]:
        monitor = self._given or default()
        begin = time.monotonic()
        call()  # compiles, allocates, warms caches: never part of the result
        synchronize()
        first_s = time.monotonic() - begin
        windows: list[tuple[Window, int]] = []
        per_batch = 1
        summary = None
        while True:
            if len(windows) == 1 and 2 * windows[0][1] < per_batch:
                windows.clear()  # the first call alone only served to size the batches: too short for the sensor
            started = time.monotonic()
            window, value = _batch(monitor, call, per_batch)
            took_s = time.monotonic() - started
            windows.append((window, per_batch))
            per_batch = _batch_size(monitor, took_s / per_batch)
            spent_s = time.monotonic() - begin
            out_of_time = spent_s + took_s > self.max_seconds
            enough = len(windows) >= MIN_BATCHES and spent_s - first_s >= self.min_seconds
            if out_of_time or (enough and len(windows) % 3 == 0):
                summary = self._summary(monitor, windows)
                if out_of_time or (enough and summary.within(self.target)):
                    break
        return self._result(monitor, name, windows, summary, work), value

    def _summary(self, monitor: Monitor, windows: list[tuple[Window, int]]) -> steady.Summary:
        rows = []
        for window, calls in windows:
            monitor.read(window)
            energy = monitor.total(window)
            rows.append(steady.Row(calls=calls, seconds=energy.seconds, joules=energy.joules, error_j=energy.error_j))
        return steady.summarize(rows)

    def _result(
        self,
        monitor: Monitor,
        name: str,
        windows: list[tuple[Window, int]],
        summary: steady.Summary,
        work: dict[str, Work],
    ) -> BenchmarkResult:
        kept = [w for w, _ in windows[summary.skipped :]]
        total = [monitor.total(w) for w in kept]
        notes = list(summary.notes)
        if not summary.within(self.target):
            notes.append(f"the intervals did not come under {self.target:.1%} within {self.max_seconds:g} s")
        if summary.skipped:
            notes.append(
                f"{summary.skipped} of {len(windows)} batches were before the steady state and are not counted"
            )
        coverage = min((e.coverage for e in total), default=0.0)
        if coverage < 0.99:
            notes.append(f"the sensor saw only {coverage:.0%} of the time")
        gain = max((d.gain_error for d in monitor.sampler.domains if d.counted), default=0.0)
        return BenchmarkResult(
            name=name,
            calls=summary.calls,
            seconds_per_call=summary.seconds,
            joules_per_call=summary.joules.with_level(gain),
            power_w=summary.watts.with_level(gain),
            utilization_pct=_utilization(monitor, kept),
            work=work,
            by_domain=_by_domain(monitor, kept, summary.calls),
            converged=summary.within(self.target),
            target=self.target,
            basis=total[-1].basis,
            source=total[-1].source,
            factors=self.factors,
            notes=notes,
            spread_j=summary.joules.error,
        )

    # -- what was measured ----------------------------------------------------------------------------------

    def print_results(self) -> None:
        """Print the results as a table."""
        from ..report.text import print_benchmark

        print_benchmark(self.results)

    def to_json(self) -> str:
        """The results as JSON."""
        import msgspec

        return msgspec.json.encode([r.to_dict() for r in self.results]).decode()

    def to_frame(self) -> Any:
        """The results as a pandas DataFrame, one row each."""
        try:
            import pandas as pd
        except ImportError as exc:
            raise MissingExtra("pandas", "frame", "EnergyBenchmark.to_frame") from exc
        return pd.DataFrame([r.to_row() for r in self.results])


def _check_target(target: object) -> None:
    if not callable(target):
        raise ArgumentError(f"{target!r} is not a function", fix="name the work of a call: measure(samples=64)")
    if inspect.iscoroutinefunction(target):
        raise ArgumentError(
            f"{target!r} is a coroutine function", why="calling it runs nothing", fix="measure lambda: asyncio.run(...)"
        )


def _batch(monitor: Monitor, call: Callable[[], Any], calls: int) -> tuple[Window, Any]:
    window = monitor.open("benchmark")
    value = None
    try:
        for _ in range(calls):
            value = call()
        synchronize()
    finally:
        monitor.close(window)
    return window, value


def _batch_size(monitor: Monitor, call_s: float) -> int:
    slowest = max((d.resolution_s for d in monitor.sampler.domains if d.counted), default=0.0)
    wanted_s = max(BATCH_S, BATCH_RESOLUTIONS * slowest)
    return max(1, round(wanted_s / max(call_s, 1e-9)))


def _utilization(monitor: Monitor, windows: list[Window]) -> float | None:
    first, last = windows[0].start.host_ns, windows[-1].end.host_ns if windows[-1].end else 0
    found = [
        t.utilization_pct
        for kept in list(monitor.sampler.telemetry.values())
        for t in list(kept)
        if t.utilization_pct is not None and first <= t.time_ns <= last
    ]
    return sum(found) / len(found) if found else None


def _by_domain(monitor: Monitor, windows: list[Window], calls: int) -> dict[str, Uncertain]:
    """Joules per call by domain; the domains that are not counted too, as far as they are known."""
    found: dict[str, list[Energy]] = {}
    monitor.read(windows[-1], everything=True)  # the only one to wait for: what has not come by now does not come
    for window in windows:
        for name, energy in monitor.read(window, timeout_s=0.0, everything=True).items():
            found.setdefault(name, []).append(energy)
    return {
        name: Uncertain(sum(e.joules for e in parts) / calls, sum(e.error_j**2 for e in parts) ** 0.5 / calls)
        for name, parts in found.items()
        if len(parts) == len(windows)
    }
