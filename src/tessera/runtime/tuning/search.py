"""Which of many settings is best, from few measurements.

Each knob is tried in turn with the others at the best so far, until a round changes nothing: knobs that pay do so
mostly on their own (a layout, a padded product, a compile mode), and a second round finds those that pay only together.
Small spaces are measured whole after that. A change stays only where it is better by more than both measurements'
errors: noise does not decide.

The order spends the time well: compile modes first, for what is best beside them depends on them; then what the code
compiled so far can be run with; then what needs it compiled anew, as long as the time left is enough for that. Within
each, by predicted gain. Knobs that exclude or need each other are never tried in vain.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .plan import Setting, Trial, Value, same

ROUNDS = 3
EXHAUSTIVE = 12
"""Spaces up to this many settings are measured whole."""
COUNTED = 10_000
"""Spaces with more combinations than this are not searched for those that exclude each other."""
COMPILE = "compile"
"""The knob whose values take long to make, and whose code others need made anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One thing that can be changed. `values[0]` is the function as it is; `gain` is the predicted share saved.

    `compiled_gain`: the same for compiled code, where it is another. `recompiles`: compiled code is another with it.
    `needs`: knobs without which it does nothing. `instead`: values of other knobs that exclude it, and what takes their
    place beside it (None: as it is). `along`: what it pays with most, and is first tried with where that is not set.
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

    def excluded(self, setting: Mapping[str, Value]) -> dict[str, Value]:
        """The knobs of a setting that exclude this one, with what takes their place."""
        return {k: by[setting[k]] for k, by in self.instead.items() if k in setting and setting[k] in by}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is to be least, and what must hold. `max_slowdown` 0.02: at most 2% slower than the function as it was."""

    policy: str
    max_slowdown: float | None = None
    max_temp_c: float | None = None

    def score(self, trial: Trial) -> float:
        """Less is better; infinite for what cannot be used."""
        if trial.refused or trial.seconds is None:
            return math.inf
        if self.policy == "latency":
            return trial.seconds
        if self.policy == "peak_power":
            return math.inf if trial.power_w is None else trial.power_w
        return math.inf if trial.energy_j is None else trial.energy_j

    def error(self, trial: Trial) -> float:
        """Half-width of the score's 90% interval."""
        if self.policy == "latency":
            return trial.seconds_error or 0.0
        if self.policy == "peak_power":
            return 0.01 * (trial.power_w or 0.0)
        return trial.energy_error_j or 0.0

    def violation(self, trial: Trial, baseline: Trial) -> str:
        """Why a measured setting may not be used; empty where it may."""
        if self.max_temp_c is not None and trial.temp_c is not None and trial.temp_c > self.max_temp_c:
            return f"{trial.temp_c:.0f} °C, above max_temp_c={self.max_temp_c:g}"
        if self.max_slowdown is None or not trial.seconds or not baseline.seconds:
            return ""
        noise = math.hypot(trial.seconds_error or 0.0, baseline.seconds_error or 0.0)
        slower = (trial.seconds - noise) / baseline.seconds - 1.0
        return f"{100 * slower:.1f}% slower, max_slowdown={self.max_slowdown:g}" if slower > self.max_slowdown else ""


@dataclass(slots=True)
class Found:
    """What a search came to."""

    best: Trial
    trials: list[Trial]
    why: dict[str, str] = field(default_factory=dict)
    cut: bool = False


def size(knobs: Sequence[Knob]) -> int:
    """How many settings there are; those that exclude each other are counted where there are very many."""
    every = math.prod(len(k.values) for k in knobs)
    return every if every > COUNTED else sum(1 for _ in _every(knobs))


def search(
    knobs: Sequence[Knob],
    measure: Callable[[Setting], Trial],
    goal: Goal,
    *,
    seconds_left: Callable[[], float] = lambda: math.inf,
    progress: Callable[[int, int, Trial], None] | None = None,
) -> Found:
    """Measure settings until the best is known or time is up. The first trial is the function as it is."""
    seen: list[Trial] = []
    whole = size(knobs) <= EXHAUSTIVE
    total = size(knobs) if whole else 1 + sum(len(k.values) - 1 for k in knobs)
    compiling_s: dict[Code, float] = {}

    def tried(setting: Setting) -> Trial:
        trial = measure(setting)
        if seen and not trial.refused and (why := goal.violation(trial, seen[0])):
            import msgspec

            trial = msgspec.structs.replace(trial, refused=why)
        seen.append(trial)
        if progress:
            progress(len(seen), max(total, len(seen)), trial)
        return trial

    found = Found(best=tried({}), trials=seen)
    for setting in itertools.chain(_descent(knobs, found), _every(knobs) if whole else ()):
        if any(same(t.setting, setting) for t in seen):
            continue
        left, code = seconds_left(), _code(knobs, setting)
        if left <= 0:
            found.cut = True
            break
        if code and code not in compiling_s and compiling_s and statistics.median(compiling_s.values()) > left:
            found.cut = True  # it would end long after the time: what needs no compiling still fits
            continue
        trial = tried(setting)
        if code:
            compiling_s.setdefault(code, trial.prepared_s)
        if better(trial, found.best, goal):
            found.best = trial
    found.why = {k.name: k.why for k in knobs if found.best.setting.get(k.name) not in (None, k.values[0])}
    return found


def better(a: Trial, b: Trial, goal: Goal) -> bool:
    """Whether `a` is better than `b` by more than chance."""
    x, y = goal.score(a), goal.score(b)
    if math.isinf(x):
        return False
    return math.isinf(y) or y - x > math.hypot(goal.error(a), goal.error(b))


Code = frozenset[tuple[str, Value]]


def _code(knobs: Sequence[Knob], setting: Setting) -> Code:
    """What compiled code of a setting depends on: equal, and it is run again. Empty where nothing is compiled."""
    if not setting.get(COMPILE):
        return frozenset()
    made_of = {COMPILE, *(k.name for k in knobs if k.recompiles)}
    return frozenset((k, v) for k, v in setting.items() if k in made_of)


def _every(knobs: Sequence[Knob]) -> Iterator[Setting]:
    """All settings but those in which a knob excludes another or lacks one that it needs."""
    by_name = {k.name: k for k in knobs}
    for values in itertools.product(*(k.values for k in knobs)):
        setting = {k.name: v for k, v in zip(knobs, values, strict=True) if v != k.values[0]}
        used = [by_name[name] for name in setting]
        if all(not k.excluded(setting) and set(k.needs) <= setting.keys() for k in used):
            yield setting


def _descent(knobs: Sequence[Knob], found: Found) -> Iterator[Setting]:
    """Knob by knob around the best so far; `found` moves on while the caller measures."""
    for round_ in range(ROUNDS):
        before, left = found.best, list(knobs)
        while left:
            knob = min(left, key=lambda k: _turn(k, found.best.setting, first=not round_))
            left.remove(knob)
            here = dict(found.best.setting)
            for value in knob.values:
                along = {k: v for k, v in knob.along.items() if any(k == o.name and v in o.values for o in knobs)}
                if along and value != knob.values[0]:
                    yield _with(knobs, {**along, **here}, knob, value)
                yield _with(knobs, here, knob, value)
        if found.best is before:
            return


def _turn(knob: Knob, setting: Setting, *, first: bool) -> tuple[int, float]:
    """When a knob is tried: the function's own arguments and compile modes, then the quick ones, then the others."""
    compiled = bool(setting.get(COMPILE))
    leads = first and (knob.name == COMPILE or knob.gain >= 1.0)
    slow = knob.name == COMPILE or (knob.recompiles and (compiled or COMPILE in knob.needs))
    gain = knob.gain if knob.compiled_gain is None or not compiled else knob.compiled_gain
    return (0 if leads else 2 if slow else 1), -gain


def _with(knobs: Sequence[Knob], here: Setting, knob: Knob, value: Value) -> Setting:
    """A setting with one knob turned; what then excludes it, or needs what is gone, is taken back."""
    setting = {k: v for k, v in here.items() if k != knob.name}
    if value != knob.values[0]:
        setting |= {knob.name: value, **knob.excluded(setting)}
    for other in knobs:
        if other is not knob and other.name in setting and other.excluded(setting):
            del setting[other.name]
    setting = {k: v for k, v in setting.items() if v is not None}
    while lacking := [k.name for k in knobs if k.name in setting and not set(k.needs) <= setting.keys()]:
        setting = {k: v for k, v in setting.items() if k not in lacking}
    return setting
