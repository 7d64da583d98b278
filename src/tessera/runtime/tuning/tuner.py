"""A function that is tuned to a policy at its first call, and follows the plan from then on.

The first call runs the function as it is and returns its result. But before it returns, the tuner calls it again and
again with the same arguments under other settings; weights, optimizers and random numbers are restored afterwards.
Other effects of the function (printing, reading from an iterator) happen at every call: do not tune such a function.
"""

from __future__ import annotations

import datetime
import functools
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast

import msgspec

from ...errors import ScheduleError
from ...monitor import EnergyScope, default
from ...monitor.iteration import has_sensor
from ...rewrite.call_clock import HostClock, StreamClock
from ...rewrite.notice import announce_if_long
from ...rewrite.search_cost import guess_compile_s
from ...rewrite.state import State
from ...rewrite.use_report import UseReport, VariantInUse, find_best_in_use
from ...rewrite.watch import MOST_CALLS, ROUNDS, WatchedCall, WatchedVariant, describe_inputs
from ...units import format_duration
from ..options import ScheduleOptions
from .changes import apply_setting
from .knobs import find_knobs, watch_call
from .operators import follow_setting, plan_operators
from .parts import REDUCE_OVERHEAD, Call, FunctionParts, NotApplicable, find_parts
from .plan import OpPlan, Plan, Setting, TuningTrial, format_setting, is_same, load_plan, plan_key, store_plan
from .search import POWER_POLICIES, SearchResult, TuningGoal, search
from .trial import TrialBench

_log = logging.getLogger("tessera")

# The default `max_slowdown` of each policy. Work per joule must not cost speed, except for noise; a lower peak, or less
# heat, costs time.
_SLOWDOWN = {"latency": None, "throughput_per_watt": 0.01, "energy": None, "peak_power": 0.1, "temperature": 0.1}
# A trial is measured for at least TRIAL_S and at most four times that; with a short budget, for this share of it.
TRIAL_S, _TRIAL_SHARE = 0.6, 1 / 30
# Capturing and predicting the operators of GPT-2 takes about this many seconds; most of it is loading torch's tracer.
_CAPTURE_S = 5.0

Progress = Callable[[int, int, TuningTrial], None]


class TunedFunction:
    """The function under its plan; `plan()` is what was chosen."""

    def __init__(self, fn: Call, options: ScheduleOptions, progress: Progress | None = None) -> None:
        self._fn = fn
        self._options = options
        self._progress = progress
        self._plan: Plan | None = None
        self._parts: FunctionParts | None = None
        self._stack = ExitStack()
        self._call: Call | None = None
        self._now: Call = fn
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is not None:
            try:
                return self._call(*args, **kwargs)
            except NotApplicable as exc:
                self._drop_knob(exc)
                return self(*args, **kwargs)
        with self._lock:
            if self._plan is not None:  # another thread has tuned it
                return self(*args, **kwargs)
            result = self._fn(*args, **kwargs)  # from here on, the optimizer has its state
            self._tune(args, kwargs)
            return result

    def plan(self) -> Plan:
        """Return what was chosen, what was tried, and why; it may change during the first calls: see `Plan.in_use`."""
        if self._plan is None:
            raise ScheduleError(
                "there is no plan yet",
                why="the function is tuned at its first call, for the inputs of that call",
                fix="call the function once",
            )
        return self._plan

    @property
    def chosen(self) -> Plan | None:
        """Return the plan; None before the first call."""
        return self._plan

    def use(self, plan: Plan, *args: Any, **kwargs: Any) -> None:
        """Follow a plan that was loaded, without a search; the arguments are those of a call."""
        self._adopt(plan, find_parts(self._fn, args, kwargs), describe_inputs(args, kwargs))

    def close(self) -> None:
        """Restore the function, its modules and its optimizers."""
        self._call, self._plan = None, None
        self._stack.close()

    def _drop_knob(self, why: NotApplicable) -> None:
        """Continue without one knob, because these inputs cannot be captured or gradients are on."""
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
        self._adopt(plan, parts, describe_inputs(args, kwargs))

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

        reserve_s = _CAPTURE_S if options.budget_s >= 4 * _CAPTURE_S else 0.0
        # On a terminal each trial is shown; elsewhere one line says why this call takes long.
        shown = self._progress is not None or sys.stderr.isatty()
        notice = f"tuning {name} for {options.policy}: this call takes {format_duration(options.budget_s)} at most"
        scope = EnergyScope("tessera.tune")
        with scope, announce_if_long(None if shown else notice):
            bench = self._make_bench(parts, args, kwargs)
            try:
                traits = watch_call(lambda: self._fn(*args, **kwargs), parts)
            finally:  # Ctrl-C as well
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
                seconds_left=lambda: seconds_left() - reserve_s,
                compile_s=guess_compile_s(parts.modules, trains=parts.trains),
            )
            ops, notes = list[OpPlan](), ["no operators in the plan: budget_s left no time to capture the function"]
            if seconds_left() >= _CAPTURE_S:
                try:
                    ops, notes = plan_operators(self._fn, args, kwargs, key["device"])
                finally:
                    bench.state.restore()  # planning ran the function's Python code once more
        spent_s = time.monotonic() - begun
        _show_progress(f"tuned {name} in {format_duration(spent_s)}: {len(result.trials)} trials", end="\n")
        if result.trials[0].refused:
            raise ScheduleError(
                "the function cannot be measured",
                why=result.trials[0].refused,
                fix="call it once without a schedule: the error comes from the function",
            ) from bench.failure
        return self._make_plan(result, key, follow_setting(ops, result.best.setting), notes, spent_s, scope.energy_j)

    def _make_bench(self, parts: FunctionParts, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TrialBench:
        return TrialBench(
            fn=self._fn,
            args=args,
            kwargs=dict(kwargs),
            parts=parts,
            state=State(parts),
            own=self._options.search,
            tolerance=self._options.error_tolerance,
            trial_s=min(TRIAL_S, _TRIAL_SHARE * self._options.budget_s),
            work=self._amount_of_work,
        )

    def _amount_of_work(self, setting: Setting) -> float:
        per = self._options.per
        return 1.0 if per is None else float(setting.get(per, self._options.search[per][0]) or 1.0)

    def _make_plan(
        self,
        result: SearchResult,
        key: dict[str, str],
        ops: list[OpPlan],
        notes: list[str],
        spent_s: float,
        spent_j: float,
    ) -> Plan:
        if result.cut:
            notes.append(f"budget_s={self._options.budget_s:g} ended before every setting was tried")
        basis = result.trials[0].basis
        if basis not in ("measured", ""):
            notes.append(f"joules are {basis} here: they follow from the CPU time, not from a sensor")
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
            spent_j=spent_j if spent_j > 0 else None,
            made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )

    # -- in use -------------------------------------------------------------------------------------------------------

    def _adopt(self, plan: Plan, parts: FunctionParts, inputs: tuple[Any, ...] | None = None) -> None:
        """Follow a plan, and watch it in its first calls; `inputs` are the shapes that it was tuned for."""
        self._plan, self._parts = plan, parts
        settings = self._find_fallbacks(plan)
        if len(settings) == 1:
            self._call = self._enter(plan.setting)
            return
        cuda = parts.device is not None and parts.device.type == "cuda"
        self._call = WatchedCall(
            [
                WatchedVariant(
                    name=format_setting(setting),
                    enter=functools.partial(self._enter, setting),
                    promise=self._find_promise(plan, setting),
                )
                for setting in settings
            ],
            functools.partial(find_best_in_goal, make_goal(self._options)),
            lambda report: self._settle(report, settings),
            clock=StreamClock(2 * MOST_CALLS) if cuda else HostClock(),
            monitor=default() if cuda and has_sensor() else None,
            inputs=inputs,
            # entering a setting moves weights, and captures its graph again, so there are few rounds
            rounds=ROUNDS // 2,
        )

    def _enter(self, setting: Setting) -> Call:
        """Return the function under a setting, after leaving the setting before."""
        self._stack.close()
        assert self._parts is not None
        self._now = self._stack.enter_context(apply_setting(self._fn, self._parts, setting, self._options.search))
        return self._now

    def _find_fallbacks(self, plan: Plan) -> list[Setting]:
        """Return the plan's setting, the next best that replays no graph, and the function as it is."""
        own = {k: v for k, v in plan.setting.items() if k in self._options.search}
        if is_same(plan.setting, own):
            return [plan.setting]
        goal = make_goal(self._options)

        def may_follow(trial: TuningTrial) -> bool:
            mine = {k: v for k, v in trial.setting.items() if k in self._options.search}
            replays = trial.setting.get("graph") or trial.setting.get("compile") == REDUCE_OVERHEAD
            known = is_same(trial.setting, plan.setting) or is_same(trial.setting, own)
            return mine == own and not (trial.refused or replays or known)

        others = sorted(filter(may_follow, plan.trials), key=goal.score)[:1]
        return [plan.setting, *(t.setting for t in others), own]

    def _find_promise(self, plan: Plan, setting: Setting) -> TuningTrial | None:
        """Return what a whole call took in the trial of a setting; None where it was not measured."""
        trial = next((t for t in reversed(plan.trials) if is_same(t.setting, setting) and t.time_s), None)
        work = self._amount_of_work(setting)
        if trial is None or trial.time_s is None:
            return None
        joules = None if trial.energy_j is None or trial.basis != "measured" else work * trial.energy_j
        return msgspec.structs.replace(trial, time_s=work * trial.time_s, energy_j=joules)

    def _settle(self, report: UseReport, settings: Sequence[Setting]) -> None:
        """Follow the setting that kept its promise, or that was best in use; the next process begins with it."""
        assert self._plan is not None
        if not report.provisional:
            self._call = self._now
        runs = next(s for s in settings if format_setting(s) == report.runs)
        if report.fell_back:
            _log.warning("%s: in use %s was better than %s", self._plan.function, report.runs, report.chosen)
        ops = follow_setting(self._plan.ops, runs)
        self._plan = msgspec.structs.replace(self._plan, setting=runs, ops=ops, in_use=report)
        if self._options.cache and self._plan.key:
            store_plan(self._plan)


def find_best_in_goal(goal: TuningGoal, figures: Sequence[VariantInUse]) -> int:
    """Return the index of the best by a goal, among settings in use; the last one is the function as it is.

    Watts are not compared in use: they depend on what else the loop does.
    """
    trials = [
        TuningTrial(setting={}, time_s=f.time_s, error_s=f.error_s, energy_j=f.energy_j, error_j=f.error_j)
        for f in figures
    ]
    usable = [i for i, t in enumerate(trials) if not goal.violation(t, trials[-1])]
    if goal.policy in POWER_POLICIES:
        return usable[0]
    best = find_best_in_use(
        [figures[i] for i in usable], by=("time",) if goal.policy == "latency" else ("energy", "time")
    )
    return usable[best]


def make_goal(options: ScheduleOptions) -> TuningGoal:
    """Return what the search minimises, from checked options."""
    policy = str(options.policy)
    slowdown = _SLOWDOWN[policy] if options.max_slowdown is None else options.max_slowdown
    # ScheduleOptions has parsed both
    return TuningGoal(
        policy=policy, max_slowdown=cast("float | None", slowdown), max_temp_c=cast("float | None", options.max_temp_c)
    )


def _describe_trial(trial: TuningTrial) -> str:
    figures = trial.refused or f"{(trial.time_s or 0) * 1e3:.3g} ms" + (
        f", {trial.energy_j:.3g} J" if trial.energy_j is not None else ""
    )
    return f"{format_setting(trial.setting)}: {figures}"


def _show_progress(line: str, end: str = "") -> None:
    """Show one line that is written over on a terminal; elsewhere, log it at INFO."""
    _log.info(line)
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[Ktessera: {line[: shutil.get_terminal_size().columns - 10]}{end}")
        sys.stderr.flush()
