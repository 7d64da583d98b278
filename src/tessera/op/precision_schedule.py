"""A precision for each step of a training run, higher early and lower later, with a guard on the loss.

::

    schedule = precision_schedule("fp32 until 100, bf16 until 1000, then fp8")
    for x, y in batches:
        with schedule.applied():                # forward products of this step
            loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.observe(loss)                  # counts the step; NaN or a jump steps back up

The guard keeps the last losses and compares each new one with their median: above it by more than `band` robust
deviations (1.48 times the median absolute one), or not finite, the run steps up one precision for `hold` steps, twice
as long each time it happens again. A falling loss widens the deviations, so a band of 6 is seldom left by chance.
Reading a loss from a GPU waits for it: `observe_every` says how often that is done.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import ArgumentError
from . import hints, lowprec
from .arguments import whole
from .dual import Dual, dual_precision

_MAD_TO_DEVIATION = 1.4826  # of a normal law
_LEAST = 8  # losses before the guard says anything
# bf16 and fp16 are of one height, one by its range and the other by its mantissa; so are the scalings of fp8.
_HEIGHT = {"fp64": 4, "fp32": 3, "tf32": 2, "bf16": 1, "fp16": 1, "fp8": 0, "fp8_row": 0}
_OPS = ("matmul", "gemm", "linear")


@dataclass(frozen=True, slots=True)
class Stage:
    """A precision and the step it holds until; None for ever."""

    precision: str
    until: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A step at which the precision changed, and why."""

    step: int
    before: str
    after: str
    why: str


def parse(text: str) -> tuple[Stage, ...]:
    """Stages from words: "fp32 until 100, then bf16 until 500, then fp8"."""
    stages = []
    for part in text.split(","):
        words = re.fullmatch(r"\s*(?:then\s+)?(\w+)(?:\s+until\s+(\d+))?\s*", part)
        if words is None:
            raise ArgumentError(
                f"cannot read {part.strip()!r} of {text!r}", fix='"fp32 until 100, bf16 until 500, then fp8"'
            )
        stages.append(Stage(words[1], None if words[2] is None else int(words[2])))
    return tuple(stages)


class PrecisionSchedule:
    """See the module. `stages` is a text, or `Stage`s or pairs; the last one has no end.

    `applied()` holds for torch's products (through `dual_precision`, with `backward`) and for `op.matmul` and its kin
    (through hints). `attach` sets the `forward` of a `Dual` instead, whose scope is the caller's. With `autocast=True`
    bf16 and fp16 stages are torch.autocast, which also takes convolutions; other stages run as above.
    """

    def __init__(
        self,
        stages: str | Sequence[Stage | tuple[str, int | None]],
        *,
        backward: str = "fp32",
        band: float = 6.0,
        window: int = 32,
        hold: int = 50,
        observe_every: int = 1,
        autocast: bool = False,
    ) -> None:
        self.stages = _checked(stages)
        if not (band > 0 and window >= _LEAST and hold >= 1 and observe_every >= 1):
            raise ArgumentError(
                f"band={band}, window={window}, hold={hold}, observe_every={observe_every}",
                fix=f"band > 0, window >= {_LEAST}, hold >= 1, observe_every >= 1",
            )
        self.step, self.changes = 0, list[Change]()
        self._backward, self._autocast = backward, autocast
        self._band, self._hold, self._every = band, hold, observe_every
        self._losses: deque[float] = deque(maxlen=window)
        self._up, self._until, self._alarms = 0, 0, 0
        self._duals: list[Dual] = []
        self._now = self._wanted()

    def __repr__(self) -> str:
        plan = ", ".join(s.precision if s.until is None else f"{s.precision} until {s.until}" for s in self.stages)
        held = ", held up by the guard" if self.held else ""
        return f"PrecisionSchedule({plan!r}: step {self.step} in {self._now}{held})"

    @property
    def precision(self) -> str:
        """What the next step runs in."""
        return self._now

    @property
    def held(self) -> bool:
        """Whether the guard holds a higher precision than the plan."""
        return self._up > 0

    def attach(self, dual: Dual) -> None:
        """Set the forward precision of a dual scope from now on."""
        self._duals.append(dual)
        dual.forward = self._now

    @contextlib.contextmanager
    def applied(self, device: str | None = None) -> Iterator[str]:
        """Run the body's products in the precision of this step; `device` is autocast's, "cuda" where there is one."""
        hinted = hints.current()
        precisions = {**hinted.precisions, **dict.fromkeys(_OPS, self._now)}
        with contextlib.ExitStack() as scopes:
            if self._autocast and self._now in ("bf16", "fp16"):
                dtype = torch.bfloat16 if self._now == "bf16" else torch.float16
                where = device or ("cuda" if torch.cuda.is_available() else "cpu")
                scopes.enter_context(torch.autocast(where, dtype=dtype))
            else:
                scopes.enter_context(hints.use(replace(hinted, precisions=precisions)))
                scopes.enter_context(dual_precision(forward=self._now, backward=self._backward))
            yield self._now

    def observe(self, loss: Any) -> Change | None:
        """Count a step and look at its loss (a number or a tensor); the change it led to."""
        self.step += 1
        alarm = None
        if self.step % self._every == 0:
            alarm = self._alarm(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))
        if alarm is not None:
            return self._step_up(alarm)
        if self._up and self.step >= self._until:
            self._up = 0
            return self._changed(f"{self._hold_steps()} steps without alarm are over")
        return self._changed(f"planned at step {self.step}")

    def _alarm(self, loss: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        above = None
        if len(self._losses) >= _LEAST:
            middle = statistics.median(self._losses)
            spread = _MAD_TO_DEVIATION * statistics.median(abs(x - middle) for x in self._losses)
            spread = max(spread, 1e-3 * abs(middle))  # a loss that stands still has no spread of its own
            if loss > middle + self._band * spread:
                above = (
                    f"the loss is {loss:.4g}, {(loss - middle) / spread:.0f} deviations above the median {middle:.4g}"
                )
        self._losses.append(loss)
        return above

    def _step_up(self, why: str) -> Change | None:
        ladder = [stage.precision for stage in self.stages]
        if ladder.index(self._now) == 0:
            return None  # the highest there is; the loss is the program's own affair
        if self.step >= self._until or not self._up:
            self._alarms += 1
        self._up += 1
        self._until = self.step + self._hold_steps()
        self._losses.clear()  # losses of the precision that failed say nothing about the next
        return self._changed(f"{why}: one precision up for {self._hold_steps()} steps")

    def _hold_steps(self) -> int:
        return int(self._hold * 2 ** min(max(self._alarms - 1, 0), 10))

    def _changed(self, why: str) -> Change | None:
        wanted = self._wanted()
        if wanted == self._now:
            return None
        change = Change(step=self.step, before=self._now, after=wanted, why=why)
        self.changes.append(change)
        self._now = wanted
        for dual in self._duals:
            dual.forward = wanted
        return change

    def _wanted(self) -> str:
        """The plan's precision for this step, as many up as the guard says."""
        planned = next(i for i, s in enumerate(self.stages) if s.until is None or self.step < s.until)
        return self.stages[max(0, planned - self._up)].precision


def precision_schedule(stages: str | Sequence[Any], **options: Any) -> PrecisionSchedule:
    """A `PrecisionSchedule`: "fp32 until 100, bf16 until 1000, then fp8"; its options by keyword."""
    return PrecisionSchedule(stages, **options)


def _staged(stages: Any) -> tuple[Stage, ...]:
    """`Stage`s from stages and pairs."""
    made: tuple[Any, ...] = ()
    with contextlib.suppress(TypeError):  # nothing to iterate over, or more than two things in one
        made = tuple(s if isinstance(s, Stage) else Stage(*s) for s in stages)
    if not made or not all(isinstance(s.precision, str) and (s.until is None or whole(s.until)) for s in made):
        raise ArgumentError(
            f"stages={stages!r}",
            why="each stage is a precision and the step it holds until, None for ever",
            fix='"fp32 until 100, then fp8", or [("fp32", 100), ("fp8", None)]',
        )
    return made


def _checked(stages: Any) -> tuple[Stage, ...]:
    made = parse(stages) if isinstance(stages, str) else _staged(stages)
    for stage in made:
        if stage.precision not in lowprec.PRECISIONS:
            raise lowprec.unknown("stages", stage.precision)
    ends = [s.until for s in made]
    if (
        not made
        or ends[-1] is not None
        or None in ends[:-1]
        or any(x >= y for x, y in itertools.pairwise(e for e in ends if e is not None))
    ):
        raise ArgumentError(
            f"stages end at {ends}",
            why="each ends later than the one before, the last never",
            fix='[("bf16", 100), ("fp8", None)]',
        )
    names = [s.precision for s in made]
    if len(set(names)) != len(names):
        raise ArgumentError(f"stages name a precision twice: {', '.join(names)}", fix="each once, higher before lower")
    if any(_HEIGHT[low] > _HEIGHT[high] for high, low in itertools.pairwise(names)):
        why = "the guard answers an alarm with the stage before, which must not be a lower precision"
        raise ArgumentError(f"stages go up: {', '.join(names)}", why=why, fix="higher before lower")
    return made
