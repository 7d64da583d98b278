"""Finds the best of many settings with few measurements.

Each knob is tried in turn, with the others at the best so far, until a round changes nothing. Knobs that pay do so
mostly on their own (a layout, a padded product, a compile mode). A second round finds those that pay only together; it
leaves out what was far from the best (eager mode beside a compile mode that takes half). Small spaces are then measured
whole. A change stays only where it is better by more than both measurements' errors. What won is measured once more at
the end, and so is the function as it is: a machine that became slower or faster between two trials is no gain.

The order uses the time well. Compile modes come first, because the best other knobs depend on them; then what can run
with the code compiled so far; then what needs another compilation, as long as enough time is left for it. Within each
group, the largest predicted gain comes first. No setting is tried in which one knob excludes another, or lacks one that
it needs.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from .plan import Setting, TuningTrial, Value, is_same

ROUNDS = 3
EXHAUSTIVE = 12
"""Spaces of at most this many settings are measured whole."""
COUNTED = 10_000
"""In spaces with more combinations than this, settings that exclude each other are counted too."""
POWER_POLICIES = ("peak_power", "temperature")
"""Policies that minimise mean power.

A chip's temperature follows its power, but settles long after a trial has ended.
"""
EXCUSED = 0.02
"""The share of the time by which a setting may seem slower than `max_slowdown` allows, because that may be noise."""
HOPELESS = 1.25
"""A value is not tried in a further round if the score with it was more than this many times the best."""
QUANTILE = 1.645
"""Of the normal distribution, for 90%."""
COMPILE = "compile"
"""The knob whose values take long to prepare, and whose code must be compiled again for some other knobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One thing that can be changed. `values[0]` is the function as it is; `gain` is the predicted share saved.

    `compiled_gain`: the gain for compiled code, where it differs. `recompiles`: the knob needs other compiled code.
    `needs`: knobs without which this one does nothing. `instead`: values of other knobs that exclude this one, each
    with its replacement (None: as it is). `along`: values of other knobs with which this one pays most; it is first
    tried with them if they are not set otherwise.
    """

    name: str
    values: tuple[Value, ...]
    why: str = ""
    gain: float = 0.0
    compiled_gain: float | None = None
    recompiles: bool = False
    needs: tuple[str, ...] = ()
    instead: Mapping[str, Mapping[Value, Value]] = field(default_factory=dict)
    along: Mapping[str, Value] = field(default_factory=dict)

    def replacements(self, setting: Mapping[str, Value]) -> dict[str, Value]:
        """Return the knobs of a setting that exclude this one, with their replacements."""
        return {k: by[setting[k]] for k, by in self.instead.items() if k in setting and setting[k] in by}


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningGoal:
    """What to minimise, and the limits. `max_slowdown` 0.02 means at most 2% slower than the function as it was."""

    policy: str
    max_slowdown: float | None = None
    max_temp_c: float | None = None

    def score(self, trial: TuningTrial) -> float:
        """Return the figure to minimise; infinite for a trial that cannot be used."""
        if trial.refused or trial.time_s is None:
            return math.inf
        if self.policy == "latency":
            return trial.time_s
        value = trial.power_w if self.policy in POWER_POLICIES else trial.energy_j
        return math.inf if value is None else value

    def error(self, trial: TuningTrial) -> float:
        """Return the half-width of the score's 90% interval."""
        if self.policy == "latency":
            return trial.error_s or 0.0
        if self.policy in POWER_POLICIES:
            known = (trial.error_j or 0.0) / trial.energy_j if trial.energy_j else 0.0
            return max(0.01, known) * (trial.power_w or 0.0)
        return trial.error_j or 0.0

    def violation(self, trial: TuningTrial, baseline: TuningTrial) -> str:
        """Return why a measured setting may not be used; empty where it may."""
        if self.max_temp_c is not None and trial.temp_c is not None and trial.temp_c > self.max_temp_c:
            return f"{trial.temp_c:.0f} °C, above max_temp_c={self.max_temp_c:g}"
        if self.max_slowdown is None or not trial.time_s or not baseline.time_s:
            return ""
        # Only a little is allowed for noise: a trial with a large error must not count as a fast one.
        noise = min(math.hypot(trial.error_s or 0.0, baseline.error_s or 0.0), EXCUSED * baseline.time_s)
        slower = (trial.time_s - noise) / baseline.time_s - 1.0
        return f"{100 * slower:.1f}% slower, max_slowdown={self.max_slowdown:g}" if slower > self.max_slowdown else ""

    def is_better(self, a: TuningTrial, b: TuningTrial) -> bool:
        """Return whether `a` is better than `b` by more than chance."""
        x, y = self.score(a), self.score(b)
        if math.isinf(x):
            return False
        return math.isinf(y) or y - x > math.hypot(self.error(a), self.error(b))


@dataclass(slots=True)
class SearchResult:
    """The outcome of a search."""

    best: TuningTrial
    trials: list[TuningTrial]
    why: dict[str, str] = field(default_factory=dict)
    cut: bool = False


def count_settings(knobs: Sequence[Knob]) -> int:
    """Return how many settings there are; very large spaces include those that exclude each other."""
    every = math.prod(len(k.values) for k in knobs)
    return every if every > COUNTED else sum(1 for _ in _all_settings(knobs))


def search(
    knobs: Sequence[Knob],
    measure: Callable[[Setting], TuningTrial],
    goal: TuningGoal,
    *,
    seconds_left: Callable[[], float] = lambda: math.inf,
    compile_s: float = 0.0,
    progress: Callable[[int, int, TuningTrial], None] | None = None,
) -> SearchResult:
    """Measure settings until the best is known or time is up. The first trial is the function as it is.

    A trial begins only if it fits into the time that is left. It is expected to take as long as those before it. Code
    that is not compiled yet is expected to take as long as other code did, or `compile_s` the first time.
    """
    trials: list[TuningTrial] = []
    size = count_settings(knobs)
    whole = size <= EXHAUSTIVE
    total = size if whole else 1 + sum(len(k.values) - 1 for k in knobs)
    compiling_s: dict[Code, float] = {}
    measuring_s: list[float] = []

    def run_trial(setting: Setting) -> TuningTrial:
        before_s = seconds_left()
        trial = measure(setting)
        if math.isfinite(before_s) and not trial.refused:
            measuring_s.append(max(before_s - seconds_left() - trial.prepared_s, 0.0))
        if trials and not trial.refused and (why := goal.violation(trial, trials[0])):
            trial = msgspec.structs.replace(trial, refused=why)
        trials.append(trial)
        if progress:
            progress(len(trials), max(total, len(trials)), trial)
        return trial

    result = SearchResult(best=run_trial({}), trials=trials)
    for setting in itertools.chain(_descend(knobs, result, goal), _all_settings(knobs) if whole else ()):
        if any(is_same(t.setting, setting) for t in trials):
            continue
        left, code = seconds_left(), _compiled_code(knobs, setting)
        needs_s = statistics.median(measuring_s) if measuring_s else 0.0
        if left <= needs_s:
            result.cut = True
            break
        if code and code not in compiling_s:
            needs_s += _guess_compile_s(code, compiling_s) if compiling_s else compile_s
        if needs_s > left:
            result.cut = True  # a setting that needs no compilation may still fit
            continue
        trial = run_trial(setting)
        if code:
            compiling_s.setdefault(code, trial.prepared_s)
        if goal.is_better(trial, result.best):
            result.best = trial

    def has_time(trial: TuningTrial) -> bool:
        return seconds_left() > (statistics.median(measuring_s) if measuring_s else 0.0) + trial.prepared_s

    _confirm_best(result, goal, measure, has_time)
    result.why = {k.name: k.why for k in knobs if result.best.setting.get(k.name) not in (None, k.values[0])}
    return result


def _confirm_best(
    result: SearchResult, goal: TuningGoal, measure: Callable[[Setting], TuningTrial], has_time: Callable[..., bool]
) -> None:
    """Measure the best setting and the function as it is once more; take the next best where no gain is left."""
    trials, repeated = result.trials, set[int]()
    while (at := next(i for i, t in enumerate(trials) if t is result.best)) != 0:
        for i in (at, 0):
            if i not in repeated and has_time(trials[i]):
                repeated.add(i)
                trials[i] = _join_trials(trials[i], measure(trials[i].setting))
        result.best, first = trials[at], trials[0]
        if at not in repeated or (goal.is_better(result.best, first) and not goal.violation(result.best, first)):
            return
        others = [t for i, t in enumerate(trials) if i not in repeated and goal.is_better(t, first)]
        result.best = min(others, key=goal.score, default=first)


def _join_trials(one: TuningTrial, other: TuningTrial) -> TuningTrial:
    """Return the mean of two trials of a setting; how far they differ is in its error."""
    if other.refused:
        return msgspec.structs.replace(one, refused=other.refused) if one.setting else one
    if not (one.time_s and other.time_s):
        return one
    time_s, error_s = _join_levels(one.time_s, one.error_s, other.time_s, other.error_s)
    joined = msgspec.structs.replace(one, time_s=time_s, error_s=error_s, temp_c=other.temp_c)
    if one.energy_j is not None and other.energy_j is not None:
        energy_j, error_j = _join_levels(one.energy_j, one.error_j, other.energy_j, other.error_j)
        joined = msgspec.structs.replace(joined, energy_j=energy_j, error_j=error_j)
    if one.power_w is not None and other.power_w is not None:
        joined = msgspec.structs.replace(joined, power_w=(one.power_w + other.power_w) / 2)
    return joined


def _join_levels(one: float, error: float | None, other: float, other_error: float | None) -> tuple[float, float]:
    within = math.hypot(error or 0.0, other_error or 0.0) / 2
    return (one + other) / 2, math.hypot(within, QUANTILE * (one - other) / 2)


Code = frozenset[tuple[str, Value]]
# Torch finds much of the same code in its caches when it compiles another mode: on an H200, the second mode took 0.32
# to 0.66 of the first mode's time (optimize's trials of six programs, 2026-11-18).
_ANOTHER_MODE = 0.7


def _guess_compile_s(code: Code, took_s: Mapping[Code, float]) -> float:
    """Guess how long code will take to compile, from what other code took."""
    others = {entry for entry in code if entry[0] != COMPILE}
    same = [s for known, s in took_s.items() if {entry for entry in known if entry[0] != COMPILE} == others]
    return _ANOTHER_MODE * max(same) if same else statistics.median(took_s.values())


def _compiled_code(knobs: Sequence[Knob], setting: Setting) -> Code:
    """Return what the compiled code of a setting depends on: where equal, it is run again.

    Empty if nothing is compiled.
    """
    if not setting.get(COMPILE):
        return frozenset()
    relevant = {COMPILE, *(k.name for k in knobs if k.recompiles)}
    return frozenset((k, v) for k, v in setting.items() if k in relevant)


def _all_settings(knobs: Sequence[Knob]) -> Iterator[Setting]:
    """Yield all settings except those in which a knob excludes another or lacks one that it needs."""
    by_name = {k.name: k for k in knobs}
    for values in itertools.product(*(k.values for k in knobs)):
        setting = {k.name: v for k, v in zip(knobs, values, strict=True) if v != k.values[0]}
        used = [by_name[name] for name in setting]
        if all(not k.replacements(setting) and set(k.needs) <= setting.keys() for k in used):
            yield setting


def _descend(knobs: Sequence[Knob], result: SearchResult, goal: TuningGoal) -> Iterator[Setting]:
    """Yield settings knob by knob around the best so far; the caller updates `result` meanwhile."""
    hopeless: set[tuple[str, Value, Value]] = set()
    for round_ in range(ROUNDS):
        before, left = result.best, list(knobs)
        while left:
            knob = min(left, key=lambda k: _priority(k, result.best.setting, first=not round_))
            left.remove(knob)
            here = dict(result.best.setting)
            beside = None if knob.name == COMPILE else here.get(COMPILE)  # compiled code may need other knobs
            values = [value for value in knob.values if (knob.name, value, beside) not in hopeless]
            for value in values:
                along = {k: v for k, v in knob.along.items() if any(k == o.name and v in o.values for o in knobs)}
                if along and value != knob.values[0]:
                    yield _turn_knob(knobs, {**along, **here}, knob, value)
                yield _turn_knob(knobs, here, knob, value)
            for value in values:
                if _is_hopeless(_turn_knob(knobs, here, knob, value), result, goal):
                    hopeless.add((knob.name, value, beside))
        if result.best is before:
            return


def _is_hopeless(setting: Setting, result: SearchResult, goal: TuningGoal) -> bool:
    """Return whether a setting was measured, and is far from the best."""
    scores = [goal.score(t) for t in result.trials if is_same(t.setting, setting) and not t.refused]
    return any(score > HOPELESS * goal.score(result.best) for score in scores)


def _priority(knob: Knob, setting: Setting, *, first: bool) -> tuple[int, float]:
    """Return the key that orders knobs: the function's arguments and compile modes first, then quick knobs."""
    compiled = bool(setting.get(COMPILE))
    leads = first and (knob.name == COMPILE or knob.gain >= 1.0)
    slow = knob.name == COMPILE or (knob.recompiles and (compiled or COMPILE in knob.needs))
    gain = knob.gain if knob.compiled_gain is None or not compiled else knob.compiled_gain
    return (0 if leads else 2 if slow else 1), -gain


def _turn_knob(knobs: Sequence[Knob], here: Setting, knob: Knob, value: Value) -> Setting:
    """Return a setting with one knob changed; knobs that it excludes, or that need one that is gone, are reset."""
    setting = {k: v for k, v in here.items() if k != knob.name}
    if value != knob.values[0]:
        setting |= {knob.name: value, **knob.replacements(setting)}
    for other in knobs:
        if other is not knob and other.name in setting and other.replacements(setting):
            del setting[other.name]
    setting = {k: v for k, v in setting.items() if v is not None}
    while lacking := [k.name for k in knobs if k.name in setting and not set(k.needs) <= setting.keys()]:
        setting = {k: v for k, v in setting.items() if k not in lacking}
    return setting
