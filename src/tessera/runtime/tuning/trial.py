"""One setting measured: does it give the same result, and what do a call's seconds and joules come to."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import TesseraError
from ...monitor import Monitor
from ...monitor.core import default
from ...rewrite.measure import measure_iteration
from ...rewrite.state import State
from .changes import NotHere, applied
from .found import Reach
from .plan import Setting, Trial

if TYPE_CHECKING:
    from ...rewrite.compare import Reference
    from ...rewrite.program import Program


@dataclass(slots=True, kw_only=True)
class Bench:
    """Everything a trial needs. `work` says what a setting's call achieves, where calls differ in that.

    A trial is measured for `trial_s` at least and four times that at most.
    """

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
        found = self._tried(setting)
        if found.refused:
            # After a failed capture later trials ran slower (benchmarks/results/tune.json). What it leaves in cycles, a
            # backward pass whose last nodes belong to its stream, is the cause that torch's warning names.
            gc.collect()
        return found

    def _tried(self, setting: Setting) -> Trial:
        begun = time.monotonic()
        try:
            if self.reference is None:  # of the function as it is; a number format is only changed within a tolerance
                retyped = self.tolerance is not None
                self.reference = self.program.make_reference(self.args, self.kwargs, self.tolerance, retyped=retyped)
            with applied(self.fn, self.reach, setting, self.own) as call:
                return self._measured(call, setting, self.reference, begun)
        except NotHere as exc:
            return Trial(setting=dict(setting), refused=str(exc))
        except TesseraError as exc:
            return Trial(setting=dict(setting), refused=exc.what)
        except Exception as exc:  # noqa: BLE001  (a compiler may fail in any way; the function still runs without it)
            return Trial(setting=dict(setting), refused=f"{type(exc).__name__}: {_first_line(exc)}")
        finally:
            self.state.restore()

    @property
    def program(self) -> Program:
        """The function as what is checked: from the state that was kept, and from outside."""
        from ...rewrite.program import Program

        held = self.reach
        return Program(call=self.fn, modules=held.modules, optimizers=held.optimizers, mode="call", state=self.state)

    def _measured(self, call: Callable[..., Any], setting: Setting, reference: Reference, begun: float) -> Trial:
        deviation = 0.0
        if not any(k in self.own for k in setting):  # given other arguments it gives other results
            verdict = reference.compare(self.program.observe(call, self.args, self.kwargs))
            deviation = verdict.result
            if not verdict.ok:
                return Trial(
                    setting=dict(setting), deviation=deviation, refused=f"it changed the result: {verdict.why}"
                )
        prepared_s, work = time.monotonic() - begun, self.work(setting)
        again = functools.partial(call, *self.args, **self.kwargs)
        found = measure_iteration(again, 4 * self.trial_s, monitor=self.monitor, modelled=True)
        joules = found.energy_j
        return Trial(
            setting=dict(setting), seconds=found.time_s / work,
            seconds_error=_or_unsure(found.error_s, found.time_s) / work,
            energy_j=None if joules is None else joules / work,
            energy_error_j=None if joules is None else _or_unsure(found.spread_j, joules) / work,
            power_w=found.power_w, temp_c=self._temperature(), deviation=deviation, prepared_s=prepared_s,
            basis=found.basis,
        )  # fmt: skip

    def _temperature(self) -> float | None:
        kept = (self.monitor or default()).sampler.telemetry.values()
        last = [t[-1].temperature_c for t in kept if len(t) and t[-1].temperature_c is not None]
        return max(last) if last else None


def _or_unsure(error: float | None, value: float) -> float:
    """A single batch has no interval: then a twentieth is taken."""
    return 0.05 * value if error is None else error


def _first_line(exc: BaseException) -> str:
    return next((line.strip() for line in str(exc).splitlines() if line.strip()), "no message")
