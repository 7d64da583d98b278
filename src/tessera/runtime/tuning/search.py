"""Which of many settings is best, from few measurements.

Small spaces are measured whole. In larger ones each knob is tried in turn with the others at the best so far, in the
order their gain is predicted, until a round changes nothing: knobs that pay do so mostly on their own (a layout, a
padded product, a compile mode), and a second round finds those that pay only together. A change stays only where it is
better by more than both measurements' errors: noise does not decide.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from .plan import Setting, Trial, Value, same

ROUNDS = 3
EXHAUSTIVE = 12
"""Spaces up to this many settings are measured whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One thing that can be changed. `values[0]` is the function as it is; `gain` is the predicted share saved."""

    name: str
    values: tuple[Value, ...]
    why: str = ""
    gain: float = 0.0


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
    """How many settings there are."""
    return math.prod(len(k.values) for k in knobs)


def search(
    knobs: Sequence[Knob],
    measure: Callable[[Setting], Trial],
    goal: Goal,
    *,
    time_left: Callable[[], bool] = lambda: True,
    progress: Callable[[int, int, Trial], None] | None = None,
) -> Found:
    """Measure settings until the best is known or time is up. The first trial is the function as it is."""
    seen: list[Trial] = []
    total = size(knobs) if size(knobs) <= EXHAUSTIVE else 1 + sum(len(k.values) - 1 for k in knobs)

    def tried(setting: Setting) -> Trial:
        for trial in seen:
            if same(trial.setting, setting):
                return trial
        trial = measure(setting)
        if seen and not trial.refused and (why := goal.violation(trial, seen[0])):
            import msgspec

            trial = msgspec.structs.replace(trial, refused=why)
        seen.append(trial)
        if progress:
            progress(len(seen), max(total, len(seen)), trial)
        return trial

    found = Found(best=tried({}), trials=seen)
    pick = _whole if size(knobs) <= EXHAUSTIVE else _descent
    for setting in pick(knobs, found, goal):
        if not time_left():
            found.cut = True
            break
        trial = tried(setting)
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


def _whole(knobs: Sequence[Knob], found: Found, goal: Goal) -> Iterator[Setting]:
    for values in itertools.product(*(k.values for k in knobs)):
        yield {k.name: v for k, v in zip(knobs, values, strict=True) if v != k.values[0]}


def _descent(knobs: Sequence[Knob], found: Found, goal: Goal) -> Iterator[Setting]:
    """Knob by knob around the best so far; `found` moves on while the caller measures."""
    for _ in range(ROUNDS):
        before = found.best
        for knob in sorted(knobs, key=lambda k: -k.gain):
            here = dict(found.best.setting)
            for value in knob.values:
                setting = {**here, knob.name: value}
                if value == knob.values[0]:
                    setting.pop(knob.name)
                yield setting
        if found.best is before:
            return
