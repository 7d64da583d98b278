"""A function that is tuned to a policy at its first call, and follows the plan from then on.

The first call runs the function as it is and returns its result. Then the tuner calls it again and again with the same
arguments under other settings; weights, optimizers and random numbers are restored afterwards. Other effects of the
function (printing, reading from an iterator) happen at every call: do not tune such a function.
"""

from __future__ import annotations

import datetime
import functools
import gc
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ...errors import ArgumentError, ScheduleError, TesseraError
from ...estimate.predict import predict
from ...hardware import identify_board, lookup
from ...monitor import Monitor
from ...monitor.core import default
from ...monitor.iteration import measure_iteration
from ...rewrite.state import State
from ...units import format_duration
from ..options import ScheduleOptions
from .changes import apply_setting
from .knobs import find_knobs, watch_call
from .parts import Call, FunctionParts, NotApplicable, find_parts
from .plan import OpPlan, Plan, Setting, TuningTrial, load_plan, plan_key, store_plan
from .search import SearchResult, TuningGoal, search

if TYPE_CHECKING:
    from ...rewrite.compare import Reference
    from ...rewrite.program import Program

_log = logging.getLogger("tessera")

# The default `max_slowdown`: work per joule at the same speed except for noise; a lower peak costs time.
_SLOWDOWN = {"latency": None, "throughput_per_watt": 0.01, "energy": None, "peak_power": 0.1}
# An operator that spends this many times more joules on moving bytes than on arithmetic loses little at a lower clock.
_MEMORY_SHARE = 2.0
_OPERATORS = 12

Progress = Callable[[int, int, TuningTrial], None]


class TunedFunction:
    """The function under its plan. Call it; `plan()` is what was chosen."""

    def __init__(
        self, fn: Call, options: ScheduleOptions, progress: Progress | None = None, monitor: Monitor | None = None
    ) -> None:
        self._fn = fn
        self._options = options
        self._progress = progress
        self._monitor = monitor
        self._plan: Plan | None = None
        self._parts: FunctionParts | None = None
        self._stack = ExitStack()
        self._call: Call | None = None
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is not None:
            try:
                return self._call(*args, **kwargs)
            except NotApplicable as exc:
                self._drop_knob(exc)
                return self(*args, **kwargs)
        with self._lock:
            if self._plan is not None:  # another thread was first
                return self(*args, **kwargs)
            result = self._fn(*args, **kwargs)  # from here on the optimizer has its state
            self._tune(args, kwargs)
            return result

    def plan(self) -> Plan:
        """What was chosen, what was tried, and why."""
        if self._plan is None:
            raise ScheduleError(
                "there is no plan yet",
                why="the function is tuned at its first call, for the inputs of that call",
                fix="call the function once",
            )
        return self._plan

    @property
    def chosen(self) -> Plan | None:
        """The plan; None before the first call."""
        return self._plan

    def use(self, plan: Plan, *args: Any, **kwargs: Any) -> None:
        """Follow a plan that was loaded, without a search; the arguments are those of a call."""
        self._adopt(plan, find_parts(self._fn, args, kwargs))

    def close(self) -> None:
        """Restore the function: modules and optimizers are as they were."""
        self._call, self._plan = None, None
        self._stack.close()

    def _drop_knob(self, why: NotApplicable) -> None:
        """Continue without one knob: these inputs cannot be captured, or gradients are on."""
        assert self._plan is not None and self._parts is not None
        knob = why.knob
        if knob not in self._plan.setting:
            raise why
        _log.warning("%s: %s: it continues without %s", self._plan.function, why, knob)
        setting = {k: v for k, v in self._plan.setting.items() if k != knob}
        notes = [*self._plan.notes, f"{knob} was dropped: {why}"]
        self._adopt(msgspec.structs.replace(self._plan, setting=setting, notes=notes), self._parts)

    def _tune(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        options, parts = self._options, find_parts(self._fn, args, kwargs)
        wanted = {
            "policy": options.policy,
            "max_slowdown": options.max_slowdown,
            "tolerance": options.error_tolerance,
            "search": {k: list(v) for k, v in options.search.items()},
            "per": options.per,
        }
        key = plan_key(self._fn, parts, args, kwargs, wanted)
        plan = load_plan(key) if options.cache else None
        if plan is None:
            plan = self._search(parts, args, kwargs, key)
            if options.cache:
                store_plan(plan)
        self._adopt(plan, parts)

    def _search(
        self, parts: FunctionParts, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: dict[str, str]
    ) -> Plan:
        options, begun = self._options, time.monotonic()
        name = getattr(self._fn, "__name__", type(self._fn).__name__)
        _show_progress(f"tuning {name} for {options.policy}: at most {format_duration(options.budget_s)}")

        def seconds_left() -> float:
            return options.budget_s - (time.monotonic() - begun)

        def show_trial(done: int, total: int, trial: TuningTrial) -> None:
            left = format_duration(max(seconds_left(), 0.0))
            _show_progress(f"tuning {name} {done}/{total}, at most {left} more: {_describe_trial(trial)}")

        bench = TrialBench(
            fn=self._fn,
            args=args,
            kwargs=dict(kwargs),
            parts=parts,
            state=State(parts),
            own=options.search,
            tolerance=options.error_tolerance,
            monitor=self._monitor,
            work=self._amount_of_work,
        )
        traits = watch_call(lambda: self._fn(*args, **kwargs), parts)
        bench.state.restore()
        knobs = find_knobs(
            parts,
            tolerance=options.error_tolerance,
            own=options.search,
            compile_modes=options.compile_modes,
            traits=traits,
        )
        result = search(
            knobs,
            bench,
            make_goal(options),
            progress=self._progress or show_trial,
            seconds_left=seconds_left,
        )
        took = format_duration(time.monotonic() - begun)
        _show_progress(f"tuned {name} in {took}: {len(result.trials)} trials", end="\n")
        if result.trials[0].refused:
            raise ScheduleError(
                "the function cannot be measured",
                why=result.trials[0].refused,
                fix="call it once without a schedule: the error comes from the function",
            )
        try:
            return self._make_plan(result, args, kwargs, key, time.monotonic() - begun)
        finally:
            bench.state.restore()  # capturing the operators runs the function's Python once more

    def _amount_of_work(self, setting: Setting) -> float:
        per = self._options.per
        return 1.0 if per is None else float(setting.get(per, self._options.search[per][0]) or 1.0)

    def _make_plan(
        self,
        result: SearchResult,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        key: dict[str, str],
        spent_s: float,
    ) -> Plan:
        ops, notes = _plan_operators(self._fn, args, kwargs, _find_chip(key["device"]), result.best.setting)
        if result.cut:
            notes.append(f"budget_s={self._options.budget_s:g} ended before every setting was tried")
        basis = result.trials[0].basis
        if basis not in ("measured", ""):
            notes.append(f"joules are {basis} here: they follow from the time")
        return Plan(
            function=getattr(self._fn, "__qualname__", type(self._fn).__name__),
            policy=str(self._options.policy),
            setting=result.best.setting,
            why=result.why,
            trials=result.trials,
            ops=ops,
            device=key["device"],
            key=key,
            notes=notes,
            spent_s=spent_s,
            made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )

    def _adopt(self, plan: Plan, parts: FunctionParts) -> None:
        self._stack.close()
        self._call = self._stack.enter_context(apply_setting(self._fn, parts, plan.setting, self._options.search))
        self._plan, self._parts = plan, parts


def make_goal(options: ScheduleOptions) -> TuningGoal:
    """What the search minimises, from checked options."""
    policy = str(options.policy)
    slowdown = _SLOWDOWN[policy] if options.max_slowdown is None else options.max_slowdown
    # ScheduleOptions has parsed both
    return TuningGoal(
        policy=policy, max_slowdown=cast("float | None", slowdown), max_temp_c=cast("float | None", options.max_temp_c)
    )


def _describe_trial(trial: TuningTrial) -> str:
    what = ", ".join(f"{k}={v}" for k, v in trial.setting.items()) or "as it is"
    figures = trial.refused or f"{(trial.time_s or 0) * 1e3:.3g} ms" + (
        f", {trial.energy_j:.3g} J" if trial.energy_j is not None else ""
    )
    return f"{what}: {figures}"


def _show_progress(line: str, end: str = "") -> None:
    """One line that is written over on a terminal; elsewhere the log, which shows it if the program asks for INFO."""
    _log.info(line)
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[Ktessera: {line[: shutil.get_terminal_size().columns - 10]}{end}")
        sys.stderr.flush()


# -- one trial --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class TrialBench:
    """Measures settings: whether the result is the same, and a call's seconds and joules.

    `work` says how much a call does under a setting, where that differs. A trial is measured for `trial_s` at least
    and four times that at most.
    """

    fn: Call
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    parts: FunctionParts
    state: State
    own: Mapping[str, Any]
    tolerance: float | None = None
    trial_s: float = 0.6
    monitor: Monitor | None = None
    work: Callable[[Setting], float] = lambda setting: 1.0
    reference: Reference | None = None

    def __call__(self, setting: Setting) -> TuningTrial:
        """Apply, check, measure, undo, and restore the state. A failure gives a refused trial."""
        trial = self._run(setting)
        if trial.refused:
            # After a failed capture later trials ran slower (benchmarks/results/tune.json). Cycles that it leaves, a
            # backward pass whose last nodes belong to its stream, are the cause that torch's warning names.
            gc.collect()
        return trial

    def _run(self, setting: Setting) -> TuningTrial:
        begun = time.monotonic()
        try:
            if self.reference is None:  # of the function as it is; number formats change only within a tolerance
                retyped = self.tolerance is not None
                self.reference = self.program.make_reference(self.args, self.kwargs, self.tolerance, retyped=retyped)
            with apply_setting(self.fn, self.parts, setting, self.own) as call:
                return self._measure(call, setting, self.reference, begun)
        except NotApplicable as exc:
            refused = str(exc)
        except TesseraError as exc:
            refused = exc.what
        except Exception as exc:  # noqa: BLE001  (a compiler may fail in any way; the function still runs without it)
            first = next((line.strip() for line in str(exc).splitlines() if line.strip()), "no message")
            refused = f"{type(exc).__name__}: {first}"
        finally:
            self.state.restore()
        return TuningTrial(setting=dict(setting), refused=refused)

    @property
    def program(self) -> Program:
        """The function as a program to check, from the stored state."""
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
        prepared_s, work = time.monotonic() - begun, self.work(setting)
        again = functools.partial(call, *self.args, **self.kwargs)
        figures = measure_iteration(again, 4 * self.trial_s, monitor=self.monitor, modelled=True)
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
        telemetry = (self.monitor or default()).sampler.telemetry.values()
        last = [t[-1].temperature_c for t in telemetry if len(t) and t[-1].temperature_c is not None]
        return max(last, default=None)


def _error_or_default(error: float | None, value: float) -> float:
    """A single batch has no interval: a twentieth is assumed."""
    return 0.05 * value if error is None else error


# -- the operators of a plan ------------------------------------------------------------------------------------------


def _find_chip(board: str) -> str | None:
    """The catalogue's name of the device; None where it has none."""
    try:
        return None if board == "cpu" else identify_board(board).id
    except ArgumentError:
        return None


def _plan_operators(
    fn: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any], chip: str | None, setting: Setting
) -> tuple[list[OpPlan], list[str]]:
    """The operators of one call by predicted joules; and notes, such as why there are none."""
    try:
        report = predict(lambda *a: fn(*a, **dict(kwargs)), args, on=lookup(chip or "h200"), check_memory=False)
    except TesseraError as exc:
        return [], [f"no operators in the plan: {exc.what.splitlines()[0]}"]
    except Exception as exc:  # noqa: BLE001  (the user's function, run on tensors without data, may fail in any way)
        return [], [f"no operators in the plan: it cannot be captured ({type(exc).__name__})"]
    total = sum(d.total_energy_j for d in report.descriptors) or 1.0
    by_kind: dict[str, list[Any]] = {}
    for d in report.descriptors:
        by_kind.setdefault(d.kind or d.subgraph_name, []).append(d)
    rows = [_plan_operator(kind, group, total, setting) for kind, group in by_kind.items()]
    rows.sort(key=lambda r: -r.share_pct)
    notes = [] if chip else ["the operators' shares are predicted for an H200: this machine's chip is not catalogued"]
    return rows[:_OPERATORS], notes


def _plan_operator(kind: str, group: Sequence[Any], total: float, setting: Setting) -> OpPlan:
    memory_bound = sum(d.memory_energy_j for d in group) > _MEMORY_SHARE * sum(d.compute_energy_j for d in group)
    return OpPlan(
        op=kind,
        calls=sum(d.calls for d in group),
        share_pct=100 * sum(d.total_energy_j for d in group) / total,
        clock="low" if memory_bound else "high",
        why="it mostly moves bytes: a lower clock costs little time"
        if memory_bound
        else "it computes: it needs the clock",
        precision=None if setting.get("precision") is None else str(setting["precision"]),
    )
