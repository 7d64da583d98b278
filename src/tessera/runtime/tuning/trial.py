"""One trial: apply a setting, check its result, measure the seconds and joules of a call, and restore everything."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import TesseraError
from ...monitor.core import default
from ...monitor.iteration import measure_iteration
from ...rewrite.state import State
from .changes import apply_setting
from .parts import Call, FunctionParts, NotApplicable
from .plan import Setting, TuningTrial

if TYPE_CHECKING:
    from ...rewrite.compare import Reference
    from ...rewrite.other_inputs import OtherInputs
    from ...rewrite.program import Program


@dataclass(slots=True, kw_only=True)
class TrialBench:
    """Measures settings: whether the result is the same, and the seconds and joules of a call.

    `work` says how much a call does under a setting, where that differs. A trial is measured for at least `trial_s`,
    and at most four times that. If code is compiled, or a graph recorded, again for other data, then every call is
    measured with other data. `failure` is what the function as it is raised.
    """

    fn: Call
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    parts: FunctionParts
    state: State
    own: Mapping[str, Any]
    tolerance: float | None = None
    trial_s: float = 0.6
    work: Callable[[Setting], float] = lambda setting: 1.0
    reference: Reference | None = None
    others: OtherInputs | None = None
    failure: Exception | None = None

    def __call__(self, setting: Setting) -> TuningTrial:
        """Apply a setting, check, measure, undo it, and restore the state. A failure gives a refused trial."""
        trial = self._run(setting)
        if trial.refused:
            # After a failed capture, later trials ran slower (benchmarks/results/tune.json). Torch's warning names the
            # cause: reference cycles that the capture leaves, a backward pass whose last nodes belong to its stream.
            gc.collect()
        return trial

    def _run(self, setting: Setting) -> TuningTrial:
        from ...rewrite.other_inputs import OtherInputs

        begun = time.monotonic()
        try:
            # the reference is the function as it is; number formats may change only within a tolerance
            if self.reference is None:
                retyped = self.tolerance is not None
                self.reference = self.program.make_reference(self.args, self.kwargs, self.tolerance, retyped=retyped)
                self.others = OtherInputs.find(self.args, self.kwargs, self.fn)
                self.state.restore()
            with apply_setting(self.fn, self.parts, setting, self.own) as call:
                return self._measure(call, setting, self.reference, begun)
        except NotApplicable as exc:
            refused = str(exc)
        except TesseraError as exc:
            refused = exc.what
        except Exception as exc:  # noqa: BLE001  (a compiler may fail in any way; the function still runs without it)
            first = next((line.strip() for line in str(exc).splitlines() if line.strip()), "no message")
            refused = f"{type(exc).__name__}: {first}"
            self.failure = exc if not setting else self.failure
        finally:
            self.state.restore()
        return TuningTrial(setting=dict(setting), refused=refused)

    @property
    def program(self) -> Program:
        """Return the function as a program to check, from the stored state."""
        from ...rewrite.program import Program

        parts = self.parts
        return Program(call=self.fn, modules=parts.modules, optimizers=parts.optimizers, mode="call", state=self.state)

    def _measure(self, call: Call, setting: Setting, reference: Reference, begun: float) -> TuningTrial:
        deviation = 0.0
        if not any(k in self.own for k in setting):  # other arguments give other results
            verdict = reference.compare(self.program.observe(call, self.args, self.kwargs))
            deviation = verdict.result
            if not verdict.ok:
                refused = f"it changed the result: {verdict.why}"
                return TuningTrial(setting=dict(setting), deviation=deviation, refused=refused)
        again = functools.partial(call, *self.args, **self.kwargs)
        compiles = setting.get("compile") or setting.get("graph")
        if compiles and self.others is not None and self.others.find_events(call):
            again = functools.partial(self.others.pass_next, call)
        prepared_s, work = time.monotonic() - begun, self.work(setting)
        figures = measure_iteration(again, 4 * self.trial_s, modelled=True)
        joules = figures.energy_j
        return TuningTrial(
            setting=dict(setting),
            time_s=figures.time_s / work,
            error_s=_error_or_default(figures.error_s, figures.time_s) / work,
            energy_j=None if joules is None else joules / work,
            error_j=None if joules is None else _error_or_default(figures.spread_j, joules) / work,
            power_w=figures.power_w,
            temp_c=self._read_temperature(),
            deviation=deviation,
            prepared_s=prepared_s,
            basis=figures.basis,
        )

    def _read_temperature(self) -> float | None:
        telemetry = default().sampler.telemetry.values()
        last = [t[-1].temperature_c for t in telemetry if len(t) and t[-1].temperature_c is not None]
        return max(last, default=None)


def _error_or_default(error: float | None, value: float) -> float:
    """Return the error; for a single batch, which has no interval, a twentieth of the value."""
    return 0.05 * value if error is None else error
