"""A function that is tuned to a policy at its first call, and runs by the plan from then on.

The first call runs the function as it is, and its result is returned. Then the tuner calls it again and again with the
same arguments under other settings; weights, optimizers and random numbers are put back afterwards. What else the
function does (printing, reading from an iterator) happens as often as it is called: such a function is not for tuning.
"""

from __future__ import annotations

import datetime
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import ArgumentError, ScheduleError, did_you_mean
from ..hardware import identify_board
from ..rewrite.state import State
from .tuning.changes import NotHere, applied
from .tuning.found import Reach, reach
from .tuning.operators import operators
from .tuning.plan import Plan, Setting, Trial, Value
from .tuning.search import Found, Goal, Knob, search
from .tuning.seen import look
from .tuning.space import knobs
from .tuning.store import find, keep, key_of
from .tuning.trial import Bench

_log = logging.getLogger("tessera")

POLICIES = ("latency", "throughput_per_watt", "energy", "peak_power")
# What may get slower where nothing was said: work per joule at the same speed, but for noise; a lower peak costs time.
_SLOWDOWN = {"latency": None, "throughput_per_watt": 0.01, "energy": None, "peak_power": 0.1}
Progress = Callable[[int, int, Trial], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked of the tuner.

    `search` names arguments of the function itself that may be varied, with their values; `per` is the one of them that
    says how much work a call does (a batch size). `budget_s` bounds the search; `slow_compile` adds the compile mode
    that takes minutes.
    """

    policy: str
    max_slowdown: float | None = None
    max_temp_c: float | None = None
    error_tolerance: float | None = None
    budget_s: float = 120.0
    search: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    per: str | None = None
    slow_compile: bool = False
    compile_modes: bool = True
    cache: bool = True

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ArgumentError(
                f"there is no policy {self.policy!r}{did_you_mean(self.policy, POLICIES)}",
                fix=f"one of: {', '.join(POLICIES)}",
            )
        if not self.budget_s > 0:
            raise ArgumentError(
                f"budget_s={self.budget_s!r} is not a time", fix="seconds the tuner may take: budget_s=120"
            )
        if self.per is not None and self.per not in self.search:
            raise ArgumentError(
                f"per={self.per!r} is not among the arguments of search=", fix=f'search={{"{self.per}": [8, 16]}}'
            )

    @property
    def goal(self) -> Goal:
        """What is to be least."""
        slower = _SLOWDOWN[self.policy] if self.max_slowdown is None else self.max_slowdown
        return Goal(policy=self.policy, max_slowdown=slower, max_temp_c=self.max_temp_c)

    def asked(self) -> dict[str, Any]:
        """What a stored plan must agree with."""
        return {"policy": self.policy, "max_slowdown": self.max_slowdown, "tolerance": self.error_tolerance,
                "search": {k: list(v) for k, v in self.search.items()}, "per": self.per}  # fmt: skip


class Tuned:
    """The function by its plan. Call it; `plan()` is what was chosen."""

    def __init__(
        self, fn: Callable[..., Any], wish: Wish, progress: Progress | None = None, monitor: Any = None
    ) -> None:
        self._fn = fn
        self._wish = wish
        self._progress = progress
        self._monitor = monitor
        self._plan: Plan | None = None
        self._reach: Reach | None = None
        self._held = ExitStack()
        self._call: Callable[..., Any] | None = None
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is not None:
            try:
                return self._call(*args, **kwargs)
            except NotHere as exc:
                self._give_up(exc)
                return self(*args, **kwargs)
        with self._lock:
            if self._plan is not None:  # another thread was first
                return self(*args, **kwargs)
            result = self._fn(*args, **kwargs)  # the optimizer has its state from here on
            self._tune(args, kwargs)
            return result

    def plan(self) -> Plan:
        """What was chosen, what was tried, and why."""
        if self._plan is None:
            raise ScheduleError(
                "there is no plan yet", why="the function is tuned at its first call, for the inputs it is given",
                fix="call the function once",
            )  # fmt: skip
        return self._plan

    def use(self, plan: Plan, *args: Any, **kwargs: Any) -> None:
        """Run by a plan that was loaded, without a search; the arguments are those of a call."""
        self._adopt(plan, reach(self._fn, args, kwargs))

    def close(self) -> None:
        """The function as it was: modules and optimizers are put back."""
        self._call, self._plan = None, None
        self._held.close()

    def _give_up(self, why: NotHere) -> None:
        """The plan but for one knob: inputs other than it was tuned with cannot be captured, or gradients are on."""
        assert self._plan is not None and self._reach is not None
        knob = why.knob
        if knob not in self._plan.setting:
            raise why
        _log.warning("%s: %s: it goes on without %s", self._plan.function, why, knob)
        setting = {k: v for k, v in self._plan.setting.items() if k != knob}
        notes = [*self._plan.notes, f"{knob} was given up: {why}"]
        self._adopt(msgspec.structs.replace(self._plan, setting=setting, notes=notes), self._reach)

    def _tune(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        found = reach(self._fn, args, kwargs)
        key = key_of(self._fn, found, args, kwargs, self._wish.asked())
        plan = find(key) if self._wish.cache else None
        if plan is None:
            plan = self._searched(found, args, kwargs, key)
            if self._wish.cache:
                keep(plan)
        self._adopt(plan, found)

    def _searched(self, found: Reach, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: dict[str, str]) -> Plan:
        wish, begun = self._wish, time.monotonic()
        bench = Bench(
            fn=self._fn, args=args, kwargs=dict(kwargs), reach=found, state=State(found), own=wish.search,
            tolerance=wish.error_tolerance, monitor=self._monitor, work=self._work,
        )  # fmt: skip
        seen = look(lambda: self._fn(*args, **kwargs), found)
        bench.state.restore()
        space = knobs(
            found, tolerance=wish.error_tolerance, own=wish.search, slow_compile=wish.slow_compile,
            compile_modes=wish.compile_modes, seen=seen,
        )  # fmt: skip
        result = search(
            space, bench, wish.goal, progress=self._progress or _said,
            seconds_left=lambda: wish.budget_s - (time.monotonic() - begun),
        )  # fmt: skip
        if result.trials[0].refused:
            raise ScheduleError(
                "the function cannot be measured", why=result.trials[0].refused,
                fix="call it once without a schedule: the error is its own",
            )  # fmt: skip
        try:
            return self._written(result, space, found, args, kwargs, key, time.monotonic() - begun)
        finally:
            bench.state.restore()  # capturing the operators runs the function's Python once more

    def _work(self, setting: Setting) -> float:
        if self._wish.per is None:
            return 1.0
        return float(setting.get(self._wish.per, self._wish.search[self._wish.per][0]) or 1.0)

    def _written(
        self, result: Found, space: Sequence[Knob], found: Reach, args: tuple[Any, ...], kwargs: Mapping[str, Any],
        key: dict[str, str], spent_s: float,
    ) -> Plan:  # fmt: skip
        ops, notes = operators(self._fn, args, kwargs, _chip(key["device"]), result.best.setting)
        if result.cut:
            notes.append(f"budget_s={self._wish.budget_s:g} ran out before every setting was tried")
        if result.trials[0].basis not in ("measured", ""):
            notes.append(f"joules are {result.trials[0].basis} here: seconds decided as much as they did")
        return Plan(
            function=getattr(self._fn, "__qualname__", type(self._fn).__name__), policy=self._wish.policy,
            setting=result.best.setting, why=result.why, trials=result.trials, ops=ops, device=key["device"], key=key,
            notes=notes, spent_s=spent_s, made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )  # fmt: skip

    def _adopt(self, plan: Plan, found: Reach) -> None:
        self._held.close()
        self._call = self._held.enter_context(applied(self._fn, found, plan.setting, self._wish.search))
        self._plan, self._reach = plan, found


def _chip(name: str) -> str | None:
    """The catalogue's name of the device; None where it has none."""
    try:
        return None if name == "cpu" else identify_board(name).id
    except ArgumentError:
        return None


def tuned(fn: Callable[..., Any], wish: Wish, progress: Progress | None = None, monitor: Any = None) -> Tuned:
    """The function, tuned to a wish when it is first called."""
    return Tuned(fn, wish, progress, monitor)


def _said(done: int, total: int, trial: Trial) -> None:
    """Progress for people: a line on a terminal, the log elsewhere."""
    what = ", ".join(f"{k}={v}" for k, v in trial.setting.items()) or "as it is"
    figures = trial.refused or f"{(trial.seconds or 0) * 1e3:.3g} ms" + (
        f", {trial.energy_j:.3g} J" if trial.energy_j is not None else ""
    )
    line = f"tuning {done}/{total}: {what}: {figures}"
    _log.info(line)
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{line[:118]}" + ("\n" if done >= total else ""))
