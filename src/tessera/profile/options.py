"""The options of a session, checked when they are made: a wrong word is answered with the nearest right one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import ArgumentError, check_choice, check_positive, did_you_mean

Activity = Literal["cpu", "gpu", "memcpy", "collective", "power", "stack", "memory"]
Mode = Literal["light", "operators", "sampling", "summary"]
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)
MODES: tuple[Mode, ...] = get_args(Mode)
ON_DEVICE: tuple[Activity, ...] = ("gpu", "memcpy", "collective")
DEFAULT: dict[Mode, tuple[Activity, ...]] = {
    **dict.fromkeys(("light", "operators", "summary"), ("cpu", "gpu", "memcpy", "collective", "power")),
    "sampling": ("power", "stack"),
}
FORMER: dict[str, tuple[Mode, int | None]] = {"timeline": ("operators", None), "kernels": ("light", 0)}
"""Former names of modes -> today's mode, and its steps with operators."""
OPERATOR_STEPS = 3
DEFAULT_INTERVAL_MS = 10.0


def choose_mode(mode: str | None, operator_steps: int | None, *, for_all: bool) -> tuple[Mode, int]:
    """Return the mode and the number of steps with operators, for today's or former names.

    If no mode is given: `operators` if something is asked for that only Kineto records (`for_all`), else `light`.
    """
    if mode is None:
        mode = "operators" if for_all else "light"
    known, steps = FORMER.get(mode, (mode, None))
    check_choice("mode", known, MODES)
    if operator_steps is not None and operator_steps < 0:
        raise ArgumentError(f"operator_steps={operator_steps!r} is not a number of steps", fix="0 or more")
    chosen = next(m for m in MODES if m == known)
    return chosen, next(n for n in (operator_steps, steps, OPERATOR_STEPS) if n is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """How a session records. `activities` None: what the mode needs.

    In the mode "light", every kernel of an NVIDIA GPU is recorded, but operators only in `operator_steps` steady steps.

    Operators ("cpu") are always recorded with device activities, since kernels are linked to them. "memory" records
    every allocation of torch (`analyze.memory`), one more event for each. `sample_interval_ms` is the period of the
    Python stacks (10 by default); power samples are as fine as their sensor, whatever is asked. `flush_s` writes the
    trace to the file that often (for the cost see `tracing`). `limit_s` ends tracing that long after the first step
    (after the start, if there are no steps), or after 20 steps per second of it; power is still recorded.
    `align_clocks` compares this rank's clock with rank 0's when the session starts and ends, so that ranks of several
    hosts can be merged to within microseconds. Every rank of the job must do it, after `init_process_group`.
    """

    mode: Mode = "light"
    operator_steps: int = OPERATOR_STEPS
    activities: tuple[Activity, ...] | None = None
    record_shapes: bool = True
    with_stack: bool = False
    with_modules: bool = False
    sample_interval_ms: float | None = None
    flush_s: float | None = None
    limit_s: float | None = None
    align_clocks: bool = False

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES)
        for activity in self.activities or ():
            check_choice("activity", activity, ACTIVITIES)
        check_positive("sample_interval_ms", self.interval_ms, fix="milliseconds, or leave it out for 10")
        if self.interval_ms < 1:
            warnings.warn(
                f"sample_interval_ms={self.interval_ms:g}: stacks more than a thousand times per second slow "
                "the program, and no board measures power that often",
                stacklevel=4,  # the caller of profile.session
            )
        for name in ("flush_s", "limit_s"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name), fix="seconds, or None")

    @property
    def interval_ms(self) -> float:
        """The period of the Python stacks: 10 ms by default."""
        return DEFAULT_INTERVAL_MS if self.sample_interval_ms is None else self.sample_interval_ms

    @property
    def enabled_activities(self) -> tuple[Activity, ...]:
        """The activities that were given, or those of the mode."""
        return DEFAULT[self.mode] if self.activities is None else self.activities

    @property
    def traces(self) -> bool:
        """Whether operators or kernels are traced one by one."""
        return self.mode != "sampling" and any(a in self.enabled_activities for a in ("cpu", *ON_DEVICE))


def check_keywords(unknown: Mapping[str, Any], options: Sequence[str]) -> None:
    """Raise ArgumentError for a keyword that does not exist."""
    for name in unknown:
        raise ArgumentError(
            f"a session has no option {name!r}{did_you_mean(name, options)}", fix=f"one of: {', '.join(options)}"
        )
