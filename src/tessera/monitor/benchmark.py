"""`EnergyBenchmark`: joules and seconds per call of a function, at steady state, with an interval on each.

The function is called in batches long enough for the sensor. Batches from before the steady state are dropped
(they are found, not guessed), and batches are added until time and energy repeat within the target or the time is
over; then the result says that they do not. Repeating says nothing of the sensor's level: its error is in every ±, and
said apart where it is wider than the target.
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

# A batch must span several samples: the edges of a window then matter little (see integral.window_error_j). Fewer are
# enough where the level is less sure than the target, and where the time would not hold five batches else.
BATCH_S = 0.25
BATCH_RESOLUTIONS = 10
LEAST_RESOLUTIONS = 3
MIN_BATCHES = 9
# Of batches this long (a slow sensor) five are enough, if all of them agree twice as well as they have to: without a
# search for the steady state, which among so few would flatter (see steady.NEAR_BEST).
LONG_S = 0.5
FEW_BATCHES = 5


class EnergyBenchmark:
    """Measures decorated functions; each call of one becomes a row of `results`.

    `target` is how well the figures are to repeat: the relative half-width of the 90% intervals of time and energy by
    their scatter alone. The error of the sensor's level is in the result's ± as well, and no repetition makes it
    smaller. `min_seconds` and `max_seconds` bound the time spent on one function. Money, CO2 and node-hours are given
    where you give the factors; nothing is looked up in a network.

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
        while True:
            if len(windows) == 1 and 2 * windows[0][1] < per_batch:
                windows.clear()  # the first call alone only served to size the batches: too short for the sensor
            started = time.monotonic()
            window, value = _batch(monitor, call, per_batch)
            took_s = time.monotonic() - started
            windows.append((window, per_batch))
            per_batch = _batch_size(monitor, took_s / per_batch, self.target, self.max_seconds)
            spent_s = time.monotonic() - begin
            out_of_time = spent_s + took_s > self.max_seconds
            summary = self._settled(monitor, windows, took_s) if spent_s - first_s >= self.min_seconds else None
            if summary is None and out_of_time:
                summary = self._summary(monitor, windows)
            if summary is not None:
                return self._result(monitor, name, windows, summary, work, spent_s), value

    def _settled(self, monitor: Monitor, windows: list[tuple[Window, int]], took_s: float) -> steady.Summary | None:
        """What the batches say, if that is enough."""
        if len(windows) >= MIN_BATCHES and len(windows) % 3 == 0:
            summary = self._summary(monitor, windows)
            return summary if summary.within(self.target) else None
        if took_s >= LONG_S and FEW_BATCHES <= len(windows) < MIN_BATCHES:
            summary = self._summary(monitor, windows, warm=True)
            return summary if summary.within(self.target / 2) else None
        return None

    def _summary(self, monitor: Monitor, windows: list[tuple[Window, int]], *, warm: bool = False) -> steady.Summary:
        rows = []
        for window, calls in windows:
            monitor.read(window)
            energy = monitor.total(window)
            rows.append(steady.Row(calls=calls, seconds=energy.seconds, joules=energy.joules, error_j=energy.error_j))
        return steady.summarize(rows, warm=warm)

    def _result(
        self,
        monitor: Monitor,
        name: str,
        windows: list[tuple[Window, int]],
        summary: steady.Summary,
        work: dict[str, Work],
        spent_s: float,
    ) -> BenchmarkResult:
        kept = [w for w, _ in windows[summary.skipped :]]
        total = [monitor.total(w) for w in kept]
        gain = _level_error(monitor)
        notes = [*summary.notes, *_convergence(summary, self.target, gain, spent_s)]
        if summary.skipped:
            notes.append(
                f"{summary.skipped} of {len(windows)} batches were before the steady state and are not counted"
            )
        coverage = min((e.coverage for e in total), default=0.0)
        if coverage < 0.99:
            notes.append(f"the sensor saw only {coverage:.0%} of the time")
        return BenchmarkResult(
            name=name,
            calls=summary.calls,
            seconds_per_call=summary.seconds,
            joules_per_call=_with_sensor(summary.joules, total, gain),
            power_w=_with_sensor(summary.watts, total, gain),
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
            level_error=gain,
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


def _batch_size(monitor: Monitor, call_s: float, target: float, max_seconds: float) -> int:
    slowest = max((d.resolution_s for d in monitor.sampler.domains if d.counted), default=0.0)
    least_s, best_s = LEAST_RESOLUTIONS * slowest, BATCH_RESOLUTIONS * slowest
    room_s = 0.0 if _level_error(monitor) > target else max_seconds / (FEW_BATCHES + 1)
    return max(1, round(max(BATCH_S, min(best_s, max(least_s, room_s))) / max(call_s, 1e-9)))


def _level_error(monitor: Monitor) -> float:
    return max((d.gain_error for d in monitor.sampler.domains if d.counted), default=0.0)


def _convergence(summary: steady.Summary, target: float, gain: float, spent_s: float) -> list[str]:
    """What repeating has shown, and what it cannot show: how far the sensor's level is off."""
    level = f"the level is known to ±{gain:.0%} (the sensor's own error, which no repetition makes smaller)"
    known = [level] if gain > target else []
    if summary.within(target):
        return [f"repeats within {100 * target:g}%; {level}"] if known else []
    if summary.seconds.error is None:
        return known  # a single batch, which is said already
    spread = f"time is known to {summary.seconds.relative:.1%}, energy to {summary.joules.relative:.1%}"
    return [f"does not repeat within {100 * target:g}%: after {spent_s:.2g} s {spread}", *known]


def _with_sensor(found: Uncertain, energies: list[Energy], gain: float) -> Uncertain:
    """With the error of the sensor's level; a single batch has what the sensor says of that one window."""
    if found.error is None and len(energies) == 1 and energies[0].joules:
        return Uncertain(found.value, abs(found.value * energies[0].error_j / energies[0].joules))
    return found.with_level(gain)


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
