"""One setting measured: does it give the same result, and what do a call's seconds and joules come to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import TesseraError
from ...monitor import EnergyBenchmark, Monitor
from ...monitor.core import default
from .changes import NotHere, applied
from .found import Reach
from .plan import Setting, Trial
from .state import State

# How far a result may be from the untouched function's where no tolerance was given: reordering of sums, and what a
# compiler fuses, by the dtype the result has (a few ulp of a chain of operators).
SAME = {"bfloat16": 3e-2, "float16": 5e-3, "float32": 2e-3, "float64": 1e-6}
# How far one training step's update of the weights may be from it: optimizers that divide by the gradient's size turn
# rounding of the smallest gradients into whole steps, so this only catches what is wrong (no step is 1.0).
SAME_UPDATE = 0.3
# Of two draws of dropout's masks: so many times their distance may lie between a third draw and the first.
SPREADS = 4.0
# How well a trial is to be known, relative half-width of the 90% interval.
TARGET = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a call did: the tensors it returned and, where it trains, how it moved the weights."""

    outputs: list[Any]
    updates: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The untouched function's outcome, and how far that is its own: `spread` between two draws of random numbers."""

    first: Outcome
    spread: float
    random: bool
    tolerance: float | None

    def compare(self, given: Outcome) -> tuple[float, str]:
        """How far an outcome is from it, and why that is too far; empty where it is not."""
        if len(given.outputs) != len(self.first.outputs):
            return math.inf, "it returns other tensors"
        worst = _worst(given, self.first)
        allowed = max((SAME.get(str(t.dtype).rpartition(".")[2], 0.0) for t in self.first.outputs), default=0.0)
        allowed = max(allowed, self.tolerance or 0.0, SPREADS * self.spread)
        if not worst <= allowed:
            return worst, f"the result differs by {worst:.1e}, allowed {allowed:.0e}"
        moved, wanted = _norm(given.updates), _norm(self.first.updates)
        apart = abs(moved / wanted - 1.0) if self.random and wanted else _apart(given.updates, self.first.updates)
        if not apart <= SAME_UPDATE:
            return worst, f"the step moves the weights differently, by {apart:.0%}"
        return worst, ""


@dataclass(slots=True, kw_only=True)
class Bench:
    """Everything a trial needs. `work` says what a setting's call achieves, where calls differ in that."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    reach: Reach
    state: State
    own: Mapping[str, Any]
    tolerance: float | None = None
    trial_s: float = 0.6
    monitor: Monitor | None = None
    work: Callable[[Setting], float] = lambda setting: 1.0
    reference: Reference | None = None

    def __call__(self, setting: Setting) -> Trial:
        """Apply, check, measure, undo, and put the state back. What fails is a trial that was refused."""
        begun = time.monotonic()
        try:
            with applied(self.fn, self.reach, setting, self.own) as call:
                return self._measured(call, setting, begun)
        except NotHere as exc:
            return Trial(setting=dict(setting), refused=str(exc))
        except TesseraError as exc:
            return Trial(setting=dict(setting), refused=exc.what)
        except Exception as exc:  # noqa: BLE001  (a compiler may fail in any way; the function still runs without it)
            return Trial(setting=dict(setting), refused=f"{type(exc).__name__}: {_first_line(exc)}")
        finally:
            self.state.restore()

    def _measured(self, call: Callable[..., Any], setting: Setting, begun: float) -> Trial:
        if self.reference is None:
            self.reference = self._reference()
        deviation = 0.0
        if not any(k in self.own for k in setting):  # given other arguments it gives other results
            deviation, why = self.reference.compare(self._outcome(call))
            if why:
                return Trial(setting=dict(setting), deviation=deviation, refused=why)
        prepared_s = time.monotonic() - begun
        bench = EnergyBenchmark(
            target=TARGET, min_seconds=self.trial_s, max_seconds=4 * self.trial_s, monitor=self.monitor
        )
        bench.measure(call)(*self.args, **self.kwargs)
        row, work = bench.results[-1], self.work(setting)
        joules = row.joules_per_call.value / work
        known = math.isfinite(joules)
        return Trial(
            setting=dict(setting), seconds=row.seconds_per_call.value / work,
            seconds_error=_or_unsure(row.seconds_per_call.error, row.seconds_per_call.value) / work,
            energy_j=joules if known else None,
            energy_error_j=_or_unsure(row.spread_j, joules * work) / work if known else None,
            power_w=row.power_w.value if known else None, temp_c=self._temperature(), deviation=deviation,
            prepared_s=prepared_s, basis=row.basis,
        )  # fmt: skip

    def _outcome(self, call: Callable[..., Any], seed: int | None = None) -> Outcome:
        """What one call does from the state that was kept."""
        import torch

        self.state.restore()
        if seed is not None:
            torch.manual_seed(seed)
        leaves = torch.utils._pytree.tree_leaves(call(*self.args, **self.kwargs))
        outputs = [t.detach().clone() for t in leaves if torch.is_tensor(t) and t.is_floating_point()]
        return Outcome(outputs=outputs, updates=self.state.updates() if self.reach.trains else [])

    def _reference(self) -> Reference:
        """The untouched function, twice with other random numbers: dropout differs, and a compiler draws its own."""
        first, other = self._outcome(self.fn), self._outcome(self.fn, seed=20261115)
        return Reference(first=first, spread=_worst(other, first), tolerance=self.tolerance,
                         random=_worst(other, first) > 0 or _apart(other.updates, first.updates) > 0)  # fmt: skip

    def _temperature(self) -> float | None:
        kept = (self.monitor or default()).sampler.telemetry.values()
        last = [t[-1].temperature_c for t in kept if len(t) and t[-1].temperature_c is not None]
        return max(last) if last else None


def deviation(a: Any, b: Any) -> float:
    """Relative Frobenius distance of two tensors; infinite where shapes differ or either is not finite alone."""
    import torch

    if a.shape != b.shape:
        return math.inf
    x, y = a.detach().to(torch.float64), b.detach().to(torch.float64)
    size = float(torch.linalg.vector_norm(y))
    apart = float(torch.linalg.vector_norm(x - y))
    if not math.isfinite(apart):
        return 0.0 if bool(torch.equal(torch.isfinite(x), torch.isfinite(y))) and not math.isfinite(size) else math.inf
    return apart / size if size > 0 else apart


def _or_unsure(error: float | None, value: float) -> float:
    """A single batch has no interval: then a twentieth is taken."""
    return 0.05 * value if error is None else error


def _worst(a: Outcome, b: Outcome) -> float:
    return max((deviation(x, y) for x, y in zip(a.outputs, b.outputs, strict=True)), default=0.0)


def _norm(tensors: list[Any]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def _apart(mine: list[Any], theirs: list[Any]) -> float:
    """Relative Frobenius distance of two lists of tensors taken as one vector."""
    size, apart = _norm(theirs), _norm([m - t for m, t in zip(mine, theirs, strict=True)])
    return apart / size if size > 0 else apart


def _first_line(exc: BaseException) -> str:
    return next((line.strip() for line in str(exc).splitlines() if line.strip()), "no message")
