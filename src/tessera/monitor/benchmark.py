"""`EnergyBenchmark`: joules and seconds per call of a function, at steady state, with an interval on each.

The function is called in batches long enough for the sensor. Batches from before the steady state are dropped, and
batches are added until time and energy repeat within the target. If the time is over before that, the result says so.
The error of the sensor's level does not show in repetitions: it is part of every ±, and has a note of its own if it is
wider than the target.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar, overload

from ..config import Config, load
from ..errors import ArgumentError, check_positive, is_number, needs_extra
from ..joules import sum_windows
from ..schema import Basis, Energy, Work, works
from ..units import J_PER_KWH, format_duration, format_energy_error
from .core import Monitor, Window, default
from .scope import synchronize
from .steady_state import MeasuredBatch, SteadyState, Uncertain, find_steady_state

P = ParamSpec("P")
R = TypeVar("R")

# A batch should span this many samples, so that the edges of a window matter little (see `sums.window_error_j`). Fewer
# are enough if the level is less certain than the target, or if the budget would otherwise not hold five batches.
BATCH_S = 0.25
BATCH_RESOLUTIONS = 10
LEAST_RESOLUTIONS = 3
MIN_BATCHES = 9
# Five batches of this length (a slow sensor) are enough if all of them agree twice as well as needed. There is then no
# search for the steady state, which would make so few look too good (see steady_state.NEAR_BEST).
LONG_S = 0.5
FEW_BATCHES = 5
# Between batches there is a random pause of up to one sample spacing, but no more than this. Otherwise calls that take
# as long as the sensor's period would be met at the same phase in every batch, and no scatter would show it.
DITHER_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """One measured function: figures per call, with 90% half-widths. `converged`: they repeat within `target`."""

    name: str
    calls: int
    time_per_call_s: Uncertain
    energy_per_call_j: Uncertain
    power_w: Uncertain
    utilization_pct: float | None
    work: Mapping[str, Work]
    by_domain: Mapping[str, Uncertain]
    converged: bool
    target: float
    basis: Basis
    source: str
    factors: Config = field(default_factory=Config)
    nodes: int | None = None
    notes: Sequence[str] = ()
    spread_j: float | None = None
    """Half-width of the joules per call by scatter alone; results of one sensor share the rest of the error."""
    level_error: float = 0.0
    """Relative 90% half-width of the sensor's level: part of every ± of joules and watts, but not of `converged`."""

    def __repr__(self) -> str:
        energy, time_s = self.energy_per_call_j, self.time_per_call_s.value
        spent = f"{format_energy_error(energy.value, energy.error)} in {format_duration(time_s, 3)}"
        return f"<BenchmarkResult {self.name}: {spent} a call, {self.basis}; {self.calls} calls>"

    def _amount(self, unit: str) -> float | None:
        return self.work[unit].amount if unit in self.work else None

    @property
    def tflops(self) -> Uncertain | None:
        """10^12 floating-point operations per second."""
        flops = self._amount("FLOP")
        return None if flops is None else self.time_per_call_s.inverse(flops * 1e-12)

    @property
    def tflops_per_w(self) -> Uncertain | None:
        """TFLOPS per watt, which is 10^12 operations per joule."""
        flops = self._amount("FLOP")
        return None if flops is None else self.energy_per_call_j.inverse(flops * 1e-12)

    def per_joule(self, unit: str) -> Uncertain | None:
        """Return the work of a unit ("sample", "token", your own) per joule; None if the benchmark does not know it."""
        amount = self._amount(unit)
        return None if amount is None else self.energy_per_call_j.inverse(amount)

    @property
    def samples_per_j(self) -> Uncertain | None:
        """Samples per joule."""
        return self.per_joule("sample")

    @property
    def tokens_per_j(self) -> Uncertain | None:
        """Tokens per joule."""
        return self.per_joule("token")

    @property
    def kwh_per_call(self) -> Uncertain:
        """Kilowatt-hours of one call, with the PUE of the data centre if it is known."""
        return self.energy_per_call_j.times((self.factors.pue or 1.0) / J_PER_KWH)

    @property
    def node_hours_per_call(self) -> Uncertain:
        """Node-hours of one call."""
        return self.time_per_call_s.times((self.nodes or 1) / 3600.0)

    @property
    def gco2e_per_call(self) -> Uncertain | None:
        """Grams of CO2 equivalent of one call; None without a factor of the grid."""
        factor = self.factors.gco2e_per_kwh
        return None if factor is None else self.kwh_per_call.times(factor)

    @property
    def cost_per_call(self) -> Uncertain | None:
        """Price of the energy of one call; None without a price."""
        price = self.factors.price_per_kwh
        return None if price is None else self.kwh_per_call.times(price)

    def measures(self) -> dict[str, Uncertain]:
        """Return every known figure by name; kWh, node-hours, CO2 and cost if any factor was given."""
        any_factor = self.factors != Config() or self.nodes is not None
        measures: dict[str, Uncertain | None] = {
            "power_w": self.power_w,
            "energy_per_call_j": self.energy_per_call_j,
            "time_per_call_s": self.time_per_call_s,
            "tflops": self.tflops,
            "tflops_per_w": self.tflops_per_w,
            **{f"{unit}_per_j": self.per_joule(unit) for unit in self.work if unit != "FLOP"},
            "kwh_per_call": self.kwh_per_call if any_factor else None,
            "node_hours_per_call": self.node_hours_per_call if any_factor else None,
            "gco2e_per_call": self.gco2e_per_call,
            "cost_per_call": self.cost_per_call,
        }
        return {k: v for k, v in measures.items() if v is not None}

    def to_row(self) -> dict[str, Any]:
        """Return a flat dictionary for a table: each measure and its `_error`."""
        row: dict[str, Any] = {"name": self.name, "calls": self.calls}
        for key, value in self.measures().items():
            row[key], row[f"{key}_error"] = value.value, value.error
        rest = ("utilization_pct", "converged", "basis", "source")
        return {**row, **{key: getattr(self, key) for key in rest}}

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain data, for JSON."""
        return {
            **self.to_row(),
            "target": self.target,
            "level_error": self.level_error,
            "by_domain": {k: {"energy_per_call_j": v.value, "error_j": v.error} for k, v in self.by_domain.items()},
            "notes": list(self.notes),
        }


class EnergyBenchmark:
    """Measures decorated functions; each call of one adds a row to `results`.

    `target` is how well the figures must repeat: the relative half-width of the 90% intervals of time and energy, by
    their scatter alone. The result's ± also includes the error of the sensor's level, which repetition does not make
    smaller. A function is measured for at least `min_s` (2, or a smaller budget) and at most about `budget_s` seconds.
    Results have money, CO2 and node-hours if you pass the factors or set them once (`tessera.config`).

    >>> bench = EnergyBenchmark()
    >>> @bench.measure(samples=64)
    ... def my_workload(): ...
    >>> my_workload(); bench.print_results()
    """

    def __init__(
        self,
        *,
        target: float = 0.02,
        min_s: float | None = None,
        budget_s: float = 30.0,
        price_per_kwh: float | None = None,
        gco2e_per_kwh: float | None = None,
        nodes: int | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        if not (is_number(target) and 0 < target < 1):
            raise ArgumentError(f"target={target!r} is not a relative error", fix="give e.g. target=0.02 for 2%")
        check_positive("budget_s", budget_s, fix="seconds: budget_s=30")
        min_s = min(2.0, budget_s) if min_s is None else min_s
        check_positive("min_s", min_s, fix="seconds: min_s=2")
        if min_s > budget_s:
            what = f"min_s={min_s!r} and budget_s={budget_s!r} leave no time to measure"
            raise ArgumentError(what, fix="give min_s <= budget_s")
        self.target = target
        self.min_s = min_s
        self.budget_s = budget_s
        stated = load()
        self.factors = replace(
            stated,
            price_per_kwh=stated.price_per_kwh if price_per_kwh is None else price_per_kwh,
            gco2e_per_kwh=stated.gco2e_per_kwh if gco2e_per_kwh is None else gco2e_per_kwh,
        )
        self.nodes = nodes
        self._monitor = monitor
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

        `flops`, `samples`, `tokens` and `work` (in your own `unit`) are the work of one call.
        """
        named = {"FLOP": flops, "sample": samples, "token": tokens}
        work_per_call = works(named, work, unit, 'measure(work=5000, unit="image")')

        def decorate(target: Callable[..., Any]) -> Callable[..., Any]:
            _check_target(target)
            label = name or str(getattr(target, "__name__", type(target).__name__))  # a partial has no name

            @functools.wraps(target)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                result, value = self._run(lambda: target(*args, **kwargs), label, work_per_call)
                self.results.append(result)
                return value

            return wrapper

        return decorate if fn is None else decorate(fn)

    # -- measuring ------------------------------------------------------------------------------------------

    def _run(self, call: Callable[[], Any], name: str, work: dict[str, Work]) -> tuple[BenchmarkResult, Any]:
        monitor = self._monitor or default()
        begin = time.monotonic()
        call()  # compiles, allocates, fills caches, and is never part of the result
        synchronize()
        first_s = time.monotonic() - begin
        windows: list[tuple[Window, int]] = []
        per_batch = 1
        while True:
            if len(windows) == 1 and 2 * windows[0][1] < per_batch:
                windows.clear()  # the first call only served to choose the size of a batch; it is too short by itself
            time.sleep(random.random() * min(_resolution_s(monitor), DITHER_S))
            batch_start = time.monotonic()
            window, value = _run_batch(monitor, call, per_batch)
            took_s = time.monotonic() - batch_start
            windows.append((window, per_batch))
            per_batch = _batch_size(monitor, took_s / per_batch, self.target, self.budget_s)
            spent_s = time.monotonic() - begin
            steady = self._converge(monitor, windows, took_s) if spent_s - first_s >= self.min_s else None
            if steady is None and spent_s + took_s > self.budget_s:
                steady = _find_steady_state(monitor, windows)
            if steady is not None:
                return self._result(monitor, name, windows, steady, work, spent_s), value

    def _converge(self, monitor: Monitor, windows: list[tuple[Window, int]], took_s: float) -> SteadyState | None:
        """Return the steady state if the batches agree well enough, else None."""
        if len(windows) >= MIN_BATCHES and len(windows) % 3 == 0:
            steady = _find_steady_state(monitor, windows)
            return steady if steady.within(self.target) else None
        if took_s >= LONG_S and FEW_BATCHES <= len(windows) < MIN_BATCHES:
            steady = _find_steady_state(monitor, windows, warm=True)
            return steady if steady.within(self.target / 2) else None
        return None

    def _result(
        self,
        monitor: Monitor,
        name: str,
        windows: list[tuple[Window, int]],
        steady: SteadyState,
        work: dict[str, Work],
        spent_s: float,
    ) -> BenchmarkResult:
        counted = [w for w, _ in windows[steady.skipped :]]
        total = [monitor.total(w) for w in counted]
        start, end = counted[0].start, counted[-1].end or counted[-1].start
        gain = find_level_error(total)
        notes = [*steady.notes, *_note_convergence(steady, self.target, gain, spent_s)]
        notes += monitor.note_steps(start, end, period_s=steady.time_s.value)
        if steady.skipped:
            notes.append(f"{steady.skipped} of {len(windows)} batches were before the steady state and are not counted")
        coverage = min((e.coverage for e in total), default=0.0)
        if coverage < 0.99:
            notes.append(f"the sensor saw only {coverage:.0%} of the time")
        return BenchmarkResult(
            name=name,
            calls=steady.calls,
            time_per_call_s=steady.time_s,
            energy_per_call_j=_add_sensor_error(steady.energy_j, total, gain),
            power_w=_add_sensor_error(steady.power_w, total, gain),
            utilization_pct=_mean_utilization(monitor, counted),
            work=work,
            by_domain=_energy_by_domain(monitor, counted, steady.energy_j.value, total),
            converged=steady.within(self.target),
            target=self.target,
            basis=total[-1].basis,
            source=total[-1].source,
            factors=self.factors,
            nodes=self.nodes,
            notes=notes,
            spread_j=steady.energy_j.error,
            level_error=gain,
        )

    # -- what was measured ----------------------------------------------------------------------------------

    def print_results(self) -> None:
        """Print the results as a table."""
        from ..report.measure import print_benchmark

        print_benchmark(self.results)

    def to_json(self) -> str:
        """Return the results as JSON."""
        import msgspec

        return msgspec.json.encode([r.to_dict() for r in self.results]).decode()

    def to_frame(self) -> Any:
        """Return the results as a pandas DataFrame, one row each."""
        with needs_extra("pandas", "frame", "EnergyBenchmark.to_frame"):
            import pandas as pd
        return pd.DataFrame([r.to_row() for r in self.results])


def _check_target(target: object) -> None:
    if not callable(target):
        raise ArgumentError(f"{target!r} is not a function", fix="name the work of a call: measure(samples=64)")
    if inspect.iscoroutinefunction(target):
        raise ArgumentError(
            f"{target!r} is a coroutine function", why="calling it runs nothing", fix="measure lambda: asyncio.run(...)"
        )


def _run_batch(monitor: Monitor, call: Callable[[], Any], calls: int) -> tuple[Window, Any]:
    window = monitor.open("benchmark")
    value = None
    try:
        for _ in range(calls):
            value = call()
        synchronize()
    finally:
        monitor.close(window)
    return window, value


def _resolution_s(monitor: Monitor) -> float:
    """Return the period of the slowest sensor that counts."""
    return max((d.resolution_s for d in monitor.sampler.domains if d.counted), default=0.0)


def _batch_size(monitor: Monitor, call_s: float, target: float, budget_s: float) -> int:
    slowest = _resolution_s(monitor)
    least_s, best_s = LEAST_RESOLUTIONS * slowest, BATCH_RESOLUTIONS * slowest
    level_error = max((d.gain_error for d in monitor.sampler.domains if d.counted), default=0.0)
    room_s = 0.0 if level_error > target else budget_s / (FEW_BATCHES + 1)
    return max(1, round(max(BATCH_S, min(best_s, max(least_s, room_s))) / max(call_s, 1e-9)))


def find_level_error(windows: Sequence[Energy]) -> float:
    """Return the relative 90% half-width of the level that all windows share."""
    whole = sum_windows(windows)
    return whole.common_error_j / whole.energy_j if whole.energy_j > 0 else 0.0


def _find_steady_state(monitor: Monitor, windows: list[tuple[Window, int]], *, warm: bool = False) -> SteadyState:
    batches = []
    for window, calls in windows:
        monitor.read(window)
        window.settle_again(monitor.sampler)  # corrects early batches by what the counter has shown since
        energy = monitor.total(window)
        batches.append(MeasuredBatch(calls=calls, time_s=energy.time_s, energy_j=energy.energy_j))
    return find_steady_state(batches, warm=warm)


def _note_convergence(steady: SteadyState, target: float, gain: float, spent_s: float) -> list[str]:
    """Return notes on what repetition has shown, and on what it cannot show: the error of the sensor's level."""
    level = f"the level is known to ±{gain:.0%} (the sensor's own error, which no repetition makes smaller)"
    notes = [level] if gain > target else []
    if steady.within(target):
        return [f"repeats within {100 * target:g}%; {level}"] if notes and not steady.drifts else notes
    if steady.time_s.error is None:
        return notes  # a single batch; it already has a note
    spread = f"time is known to {steady.time_s.relative:.1%}, energy to {steady.energy_j.relative:.1%}"
    return [f"does not repeat within {100 * target:g}%: after {spent_s:.2g} s {spread}", *notes]


def _add_sensor_error(mean: Uncertain, energies: list[Energy], gain: float) -> Uncertain:
    """Add the error of the sensor's level; a single batch gets the error of its one window instead."""
    if mean.error is None and len(energies) == 1 and energies[0].energy_j:
        return Uncertain(mean.value, abs(mean.value * energies[0].error_j / energies[0].energy_j))
    return mean.with_level(gain)


def _mean_utilization(monitor: Monitor, windows: list[Window]) -> float | None:
    first, last = windows[0].start.host_ns, windows[-1].end.host_ns if windows[-1].end else 0
    values = [
        t.utilization_pct
        for telemetry in list(monitor.sampler.telemetry.values())
        for t in list(telemetry)
        if t.utilization_pct is not None and first <= t.time_ns <= last
    ]
    return sum(values) / len(values) if values else None


def _energy_by_domain(
    monitor: Monitor, windows: list[Window], per_call_j: float, total: list[Energy]
) -> dict[str, Uncertain]:
    """Return joules per call by domain, including domains that do not count towards the total.

    They are scaled to `per_call_j`: if batches differ, that is not the mean over all calls.
    """
    all_j = sum(e.energy_j for e in total)
    calls = all_j / per_call_j if per_call_j > 0 < all_j else math.inf
    monitor.read(windows[-1], everything=True)  # wait only for the last one: data of earlier ones have come by then
    by_domain: dict[str, list[Energy]] = {}
    for window in windows:
        for name, energy in monitor.read(window, timeout_s=0.0, everything=True).items():
            by_domain.setdefault(name, []).append(energy)
    whole = {name: sum_windows(parts) for name, parts in by_domain.items() if len(parts) == len(windows)}
    return {name: Uncertain(e.energy_j / calls, e.error_j / calls) for name, e in whole.items()}
