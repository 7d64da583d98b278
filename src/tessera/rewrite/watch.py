"""Watch a chosen variant in the user's own loop, and fall back where it does not keep what its trial promised.

A trial runs on the inputs that it was given; the loop brings others, with other shapes among them.

    calls   1 2 | 3 ... 12 | as fast as promised, nothing compiled again: confirmed, and nothing is watched any more
            warm   chosen  | else 2 + 10 of the next best | 2 + 10 of the program as it was | the best of them runs on

Times are CUDA events in the stream (the host's clock without a GPU), joules a window over a turn: nothing waits for
them before the turn ends. A turn in which code was compiled begins again a few times, since the first call with a new
shape may compile; code that is compiled or recorded again and again counts with the time that takes.
"""

from __future__ import annotations

import functools
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from ..monitor.scope import is_capturing
from .compile_events import CompileEvents, count_events
from .search_cost import CallCost

if TYPE_CHECKING:
    from ..monitor import Monitor
    from ..monitor.core import Window
    from ..schema import Energy

Call = Callable[..., Any]
WARM, CALLS, SPARE = 2, 10, 12
"""Calls of a turn that only warm up, calls that are measured, and calls that may be measured again: 3 turns make 48."""
# How much slower than its trial a call may be: half of what the next best would have cost more, within these bounds.
_LEAST, _MOST = 0.01, 0.05
# How much faster it may be: beyond, the machine is another than in the trial, and other variants may be faster still.
_FASTER = 0.1
# A pause (an evaluation between two calls, a process that had to wait for a core) counts as no more than so many calls.
_PAUSE = 3.0
# Joules of a turn are used where it was that long, and known that well: ten samples of an H200's ring (20 ms).
_LEAST_S, _LEAST_SURE = 0.2, 0.05
# Joules of a turn include what the user does between calls: they are held against the trial's where that is little.
_BUSY = 0.9
_READ_S = 2.0
_QUANTILE = 1.645  # of the normal distribution, for 90%


class VariantInUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one variant took in the user's loop, per call of `calls`; promises are its trial's. None: not known.

    Errors are half-widths of 90% intervals; `error_s` is that of calls in which nothing was compiled.
    """

    variant: str
    calls: int
    time_s: float
    error_s: float = 0.0
    promised_s: float | None = None
    energy_j: float | None = None
    error_j: float | None = None
    promised_j: float | None = None
    compilations: int = 0
    recordings: int = 0


class UseReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a choice did in use: `chosen` by trials, `runs` now.

    "confirmed": it kept its promise. "compared": it did not, or its promise does not say what a loop takes, and the
    variants were compared there. "shared": several threads call the program, so that nothing could be told.
    """

    outcome: Literal["confirmed", "compared", "shared"]
    chosen: str
    runs: str
    variants: list[VariantInUse] = []

    def find_cost(self) -> tuple[VariantInUse, VariantInUse] | None:
        """What the program as it was and the variant that runs now took in use; None where they were not compared."""
        now = [v for v in self.variants if v.variant == self.runs]
        return (self.variants[-1], now[0]) if self.outcome == "compared" and now else None

    @property
    def fell_back(self) -> bool:
        """Whether another variant runs than was chosen."""
        return self.runs != self.chosen


def find_best_in_use(figures: Sequence[VariantInUse], *, by: Sequence[Literal["energy", "time"]]) -> int:
    """Return the place of the best; an earlier one stays unless a later one is better by more than chance.

    `by` are the figures that decide, the first one that tells them apart.
    """
    best = 0
    for at, figure in enumerate(figures):
        best = at if _is_better(figure, figures[best], by) else best
    return best


def _is_better(a: VariantInUse, b: VariantInUse, by: Sequence[Literal["energy", "time"]]) -> bool:
    for what in by:
        pairs = [(v.energy_j, v.error_j) if what == "energy" else (v.time_s, v.error_s) for v in (a, b)]
        (x, x_error), (y, y_error) = pairs
        if x is not None and y is not None and abs(x - y) > math.hypot(x_error or 0.0, y_error or 0.0):
            return x < y
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedVariant:
    """A variant that may run: `enter` makes it the one that does. `promise` is its trial; None: it had none."""

    name: str
    enter: Callable[[], Call]
    promise: CallCost | None = None


class CallClock(Protocol):
    """Marks moments, and tells what lies between two of them."""

    def mark(self) -> Any:
        """Mark this moment."""

    def measure_s(self, begin: Any, end: Any) -> float:
        """Seconds between two marks; it may wait for the second."""


class HostClock:
    """The host's clock."""

    def mark(self) -> float:
        """Read it."""
        return time.perf_counter()

    def measure_s(self, begin: float, end: float) -> float:
        """Seconds between two readings."""
        return end - begin


class StreamClock:
    """Events in the current CUDA stream: when the device was there. Those of one turn are made in advance."""

    def __init__(self) -> None:
        import torch

        self._make = functools.partial(torch.cuda.Event, enable_timing=True)
        self._ready = [self._make() for _ in range(2 * (WARM + CALLS))]
        for event in self._ready:
            event.record()  # torch makes it at its first use

    def mark(self) -> Any:
        """Record an event."""
        event = self._ready.pop() if self._ready else self._make()
        event.record()
        return event

    def measure_s(self, begin: Any, end: Any) -> float:
        """Seconds between two events; waits for the second."""
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def describe_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The shapes of tensors among the arguments."""
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    return tuple(tuple(leaf.shape) for leaf in leaves if hasattr(leaf, "shape"))


@dataclass(slots=True)
class _Span:
    begin: Any
    end: Any
    events: CompileEvents
    elements: int


@dataclass(slots=True)
class _Turn:
    """The calls of one variant that are measured."""

    warm: int = WARM
    spans: list[_Span] = field(default_factory=list)
    begun: tuple[Any, CompileEvents, int] | None = None
    window: Window | None = None
    familiar: bool = True  # all inputs had the shapes of the trial


class WatchedCall:
    """Calls the first candidate, then, where it does not keep its promise, the others; at last the best.

    The last candidate is the program as it was. `choose` is given what each took and returns the place of the best;
    `finish` is given the outcome once, and should then call the variant itself. With `between`, a call lasts until the
    next one begins: the program's work does not end with the call (a model whose backward pass follows), and no promise
    tells how long that takes. `inputs` are the shapes of the trial.
    """

    def __init__(
        self,
        candidates: Sequence[WatchedVariant],
        choose: Callable[[Sequence[VariantInUse]], int],
        finish: Callable[[UseReport], None],
        *,
        clock: CallClock,
        monitor: Monitor | None = None,
        between: bool = False,
        inputs: tuple[Any, ...] | None = None,
    ) -> None:
        self._candidates, self._choose, self._finish = candidates, choose, finish
        self._clock, self._monitor, self._between, self._inputs = clock, monitor, between, inputs
        self._lock = threading.Lock()
        self._shared = self._over = False
        self._spare = SPARE
        self._figures: list[VariantInUse] = []
        self._elements = 0
        self._call, self._turn = candidates[0].enter(), _Turn()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._over or is_capturing():
            return self._call(*args, **kwargs)
        if not self._lock.acquire(blocking=False):
            self._shared = True
            return self._call(*args, **kwargs)
        try:
            return self._watch(args, kwargs)
        finally:
            self._lock.release()

    def _watch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        turn, begin, events = self._turn, self._clock.mark(), count_events()
        if turn.begun is not None:
            self._add_span(*turn.begun, begin, events)
            turn.begun = None
        if self._shared or len(turn.spans) >= CALLS:
            self._end_turn()
            if self._over:
                return self._call(*args, **kwargs)
            turn, begin, events = self._turn, self._clock.mark(), count_events()
        shapes = describe_inputs(args, kwargs)
        turn.familiar = turn.familiar and shapes == self._inputs
        elements = sum(map(math.prod, shapes))
        if not turn.warm and turn.window is None and self._monitor is not None:
            turn.window = self._monitor.open("watch", nested=True)  # nested: no region of the user's report
        result = self._call(*args, **kwargs)
        if self._between:
            turn.begun = begin, events, elements
        else:
            self._add_span(begin, events, elements, self._clock.mark(), count_events())
        return result

    def _add_span(self, begin: Any, before: CompileEvents, elements: int, end: Any, after: CompileEvents) -> None:
        turn, events = self._turn, after - before
        if turn.warm:
            turn.warm -= 1
        elif events and self._spare > len(turn.spans):
            self._spare -= len(turn.spans) + 1
            turn.spans.clear()
            self._close_window(turn)
        else:
            turn.spans.append(_Span(begin, end, events, elements))

    def _close_window(self, turn: _Turn) -> Window | None:
        window, turn.window = turn.window, None
        if window is not None and self._monitor is not None:
            self._monitor.close(window)
        return window

    # -- judging ------------------------------------------------------------------------------------------------------

    def _end_turn(self) -> None:
        turn, at = self._turn, len(self._figures)
        window = self._close_window(turn)
        if self._shared:
            self._end("shared", at)
            return
        figures, busy = self._sum_up(turn, self._candidates[at], window)
        self._figures.append(figures)
        if at == 0 and turn.familiar and self._is_kept(figures, busy):
            self._end("confirmed", 0)
        elif at + 1 < len(self._candidates):
            self._call, self._turn = self._candidates[at + 1].enter(), _Turn()
        else:
            best = self._choose(self._figures)
            if best != at:
                self._call = self._candidates[best].enter()
            self._end("compared", best)

    def _end(self, outcome: Literal["confirmed", "compared", "shared"], at: int) -> None:
        self._over = True
        names = [c.name for c in self._candidates]
        self._finish(UseReport(outcome=outcome, chosen=names[0], runs=names[at], variants=list(self._figures)))

    def _sum_up(self, turn: _Turn, candidate: WatchedVariant, window: Window | None) -> tuple[VariantInUse, float]:
        """What a call of the turn took, and the share of the turn within calls.

        Where the inputs were larger or smaller than those of the first turn, nobody knows whether a call's cost grows
        with them: the figures lie between both answers, and their errors include both.
        """
        spans, count = turn.spans, len(turn.spans)
        times = [self._clock.measure_s(s.begin, s.end) for s in spans]
        energy = self._read_energy(window)
        busy = sum(times) / energy.time_s if energy is not None and energy.time_s else 1.0
        most_s = _PAUSE * statistics.median(times)
        times = [t if s.events else min(t, most_s) for t, s in zip(times, spans, strict=True)]
        elements = sum(s.elements for s in spans)
        self._elements = self._elements or elements
        scale = self._elements / elements if elements else 1.0
        middle, off = (1.0 + scale) / 2, abs(1.0 - scale) / 2
        plain = [t for t, s in zip(times, spans, strict=True) if not s.events]
        spread_s = _QUANTILE * statistics.stdev(plain) / math.sqrt(len(plain)) if len(plain) > 1 else 0.0
        events, mean_s = sum((s.events for s in spans), CompileEvents()), sum(times) / count
        joules = None if energy is None or not _is_sure(energy) else energy.joules / count
        figures = VariantInUse(
            variant=candidate.name,
            calls=count,
            time_s=mean_s * middle,
            error_s=spread_s * middle + mean_s * off,
            promised_s=candidate.promise.time_s if candidate.promise else None,
            energy_j=None if joules is None else joules * middle,
            error_j=None if joules is None or energy is None else energy.error_j / count * middle + joules * off,
            promised_j=candidate.promise.energy_j if candidate.promise else None,
            compilations=events.compilations,
            recordings=events.recordings,
        )
        return figures, busy

    def _read_energy(self, window: Window | None) -> Energy | None:
        if window is None or self._monitor is None:
            return None
        self._monitor.read(window, _READ_S)
        return self._monitor.total(window)

    def _is_kept(self, figures: VariantInUse, busy: float) -> bool:
        """Whether the first candidate does what its trial promised."""
        promised_s, promised_j = figures.promised_s, figures.promised_j
        if self._between or promised_s is None or figures.compilations or figures.recordings:
            return False
        others = [c.promise.time_s for c in self._candidates[1:] if c.promise and c.promise.time_s is not None]
        gap = min(others, default=math.inf) / promised_s - 1.0
        slower = figures.time_s / promised_s - 1.0
        if not -_FASTER <= slower <= min(max(gap / 2, _LEAST), _MOST):
            return False
        if figures.energy_j is None or promised_j is None or busy < _BUSY:
            return True
        return figures.energy_j - (figures.error_j or 0.0) <= promised_j * (1.0 + _MOST)


def _is_sure(energy: Energy) -> bool:
    """Whether the joules of a turn are known well enough to compare them."""
    known = energy.basis == "measured" and energy.joules > 0 and energy.error_j <= _LEAST_SURE * energy.joules
    return known and energy.time_s >= _LEAST_S
