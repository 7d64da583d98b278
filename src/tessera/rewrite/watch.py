"""Watch a chosen variant in the user's own loop, and fall back if it does not keep what its trial promised.

A trial runs on the inputs that it was given; the loop brings others, some with other shapes.

    calls   settle | 8 of the chosen: as fast as promised, nothing compiled again: confirmed, watched no more
            else: the others settle | all in turns, there and back: A B C, C B A, ... | the best of them runs on
            where most shapes were new: when they come again, all settle on them and take turns once more

A variant settles while its code is compiled for the loop's shapes, until two calls in a row compile nothing. Without
that, it is judged with what compiling costs it. Times are CUDA events in the stream (the host's clock without a GPU),
joules are windows over the turns: nothing waits for them before the comparison. In turns, as a host's speed drifts.

A shape costs most at first: a library plans for it, and reduce-overhead warms up at the first call and records at the
second. On an H200, a decoder took some 40 ms at each new length of its cache, and 3 ms when that length came again. A
loop whose shapes never come again pays that at every call, so such calls count; in a loop whose shapes come again, only
later calls count.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ..monitor.scope import is_capturing
from .call_clock import CallClock
from .compile_events import CompileEvents, count_events
from .search_cost import CallCost
from .turns import Level, compare_rounds, order_turns
from .use_report import UseReport, VariantInUse

if TYPE_CHECKING:
    from ..monitor import Monitor
    from ..monitor.core import Window
    from ..schema import Energy

Call = Callable[..., Any]
MOST_CALLS = 48
"""Calls after which a watched call has decided; if its shapes keep changing, it may decide once more later."""
CALLS = 8
"""Calls that are compared with the promise."""
# Code has settled after _SETTLED calls in a row without a compilation, which must come within _SETTLE_WITHIN calls.
# Sizes that change become dynamic at the second change, frame by frame.
_SETTLED, _SETTLE_WITHIN = 2, 10
ROUNDS = 4
"""Rounds of turns if entering a variant is free; half as many if it captures a graph or moves weights."""
# How much slower than its trial a call may be: half of what the next best would have cost more, within these bounds.
_LEAST, _MOST = 0.01, 0.05
# How much faster than its trial a call may be. If it is faster, the machine differs from the trial's, and other
# variants may be faster still.
_FASTER = 0.1
# A pause counts as at most this many usual calls of its variant: an evaluation between two calls, a process that waits
# for a core, the collection of what a compiler left.
_PAUSE = 2.0
# Joules of a variant are used if its turns took _LEAST_S (ten samples of an H200, 20 ms each) and the error is at most
# _LEAST_SURE.
_LEAST_S, _LEAST_SURE = 0.2, 0.05
# Joules of a turn include what the user does between calls. They are compared with the trial's if calls took at least
# this share of the turn.
_BUSY = 0.9
_READ_S = 2.0
# A variant knows a shape after _KNOWN calls of it (the next call replays). The shapes of a loop come again when _AGAIN
# calls in a row had known shapes; that is waited for during _WAIT_CALLS. With more shapes than _MOST_SHAPES, graphs
# would fill the memory.
_KNOWN, _AGAIN, _WAIT_CALLS, _MOST_SHAPES = 2, 16, 1000, 128
# An estimate from a trial, scaled to the pace of the loop, may be off by this share.
_UNSURE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedVariant:
    """A variant that may run; `enter` makes it run. `promise` is its trial's cost; None: it had no trial."""

    name: str
    enter: Callable[[], Call]
    promise: CallCost | None = None


def describe_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the shapes of the tensors among the arguments."""
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
    """Calls of one variant in a row: until `quiet` of them compiled nothing (at most `within`), then `calls` more.

    With `settles`, a compilation among the latter calls starts the turn anew, and a turn that is not quiet in time is
    over. With `knows`, the turn is only quiet once `knows()` is true: the variant knows the shapes of the loop.
    """

    at: int
    calls: int
    quiet: int
    within: int
    settles: bool = False
    knows: Callable[[], bool] | None = None
    warm: list[_Span] = field(default_factory=list)
    spans: list[_Span] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    familiar: bool = True  # all inputs had the shapes of the trial

    @property
    def is_settled(self) -> bool:
        last = self.warm[-self.quiet :] if self.quiet else []
        return len(last) == self.quiet and not any(s.events for s in last)

    @property
    def warming(self) -> bool:
        ready = self.is_settled and (self.knows is None or self.knows())
        return not ready and len(self.warm) < self.within

    @property
    def over(self) -> bool:
        return not self.warming and (len(self.spans) >= self.calls or (self.settles and not self.is_settled))

    def add(self, span: _Span) -> None:
        if self.warming:
            self.warm.append(span)
            return
        self.spans.append(span)
        if self.settles and span.events:
            self.warm, self.spans = [*self.warm, *self.spans], []


@dataclass(slots=True)
class _Wait:
    """Calls that are not timed, until shapes come again."""

    at: int
    calls: int = 0
    known: int = 0  # calls in a row with known shapes
    windows: list[Window] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.comes_again or self.calls >= _WAIT_CALLS

    @property
    def comes_again(self) -> bool:
        return self.known >= _AGAIN


class WatchedCall:
    """Calls the first candidate; if it does not keep its promise, all of them in turns; finally the best.

    The last candidate is the program as it was. `choose` gets what each took and returns the index of the best.
    `finish` gets the outcome, and should then call the variant itself; a provisional outcome is followed by another.
    With `between`, a call lasts until the next one begins: the program's work does not end with the call (a model whose
    backward pass follows), and no promise tells how long that takes. `inputs` are the shapes of the trial.
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
        rounds: int = ROUNDS,
    ) -> None:
        self._candidates, self._choose, self._finish = candidates, choose, finish
        self._clock, self._monitor, self._between, self._inputs = clock, monitor, between, inputs
        self._rounds, self._calls, self._used = rounds, 0, 0
        self._lock = threading.Lock()
        self._shared = self._over = False
        self._figures: list[VariantInUse] = []
        self._shapes: set[Any] = set()  # shapes of the loop
        self._known = [Counter({inputs: _KNOWN} if c.promise is not None else {}) for c in candidates]
        self._provisional: UseReport | None = None
        self._begun: tuple[Any, CompileEvents, int] | None = None
        self._at, self._call = 0, candidates[0].enter()
        self._turns = self._take_turns()
        self._turn = next(self._turns)

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
        shapes = describe_inputs(args, kwargs)
        if isinstance(self._turn, _Wait) and not (self._turn.over or self._shared):
            self._turn.calls += 1
            self._turn.known = self._turn.known + 1 if shapes in self._shapes else 0
            self._note_shapes(shapes)
            return self._call(*args, **kwargs)
        begin, events = self._clock.mark(), count_events()
        if self._begun is not None:
            self._add_span(*self._begun, begin, events)
            self._begun = None
        if self._shared:
            self._end("shared", self._at)
        elif self._turn.over:
            self._begin_turn()
            begin, events = self._clock.mark(), count_events()
        if self._over:
            return self._call(*args, **kwargs)
        self._note_shapes(shapes)
        turn = self._turn
        if isinstance(turn, _Wait):
            return self._call(*args, **kwargs)
        turn.familiar = turn.familiar and shapes == self._inputs
        elements = sum(map(math.prod, shapes))
        if turn.calls and not turn.warming and not turn.windows and self._monitor is not None:
            # nested, so that it is no region of the user's report
            turn.windows.append(self._monitor.open("watch", nested=True))
        result = self._call(*args, **kwargs)
        if self._between:
            self._begun = begin, events, elements
        else:
            self._add_span(begin, events, elements, self._clock.mark(), count_events())
        return result

    def _note_shapes(self, shapes: tuple[Any, ...]) -> None:
        self._shapes.add(shapes)
        self._calls += 1
        self._known[self._at][shapes] += 1

    def _knows_shapes(self) -> bool:
        """Return whether the variant that runs has had every shape of the loop often enough."""
        known = self._known[self._at]
        return all(known[shapes] >= _KNOWN for shapes in self._shapes)

    def _add_span(self, begin: Any, before: CompileEvents, elements: int, end: Any, after: CompileEvents) -> None:
        assert isinstance(self._turn, _Turn)
        self._used += 1
        self._turn.add(_Span(begin, end, after - before, elements))
        if not self._turn.spans:
            self._close_windows()  # no call counts so far

    # -- whose turn it is ---------------------------------------------------------------------------------------------

    def _close_windows(self) -> list[Window]:
        windows, self._turn.windows = self._turn.windows, []
        for window in windows:
            assert self._monitor is not None
            self._monitor.close(window)
        return windows

    def _begin_turn(self) -> None:
        self._turn.windows = self._close_windows()
        try:
            self._turn = next(self._turns)
            self._enter(self._turn.at)
        except StopIteration as decided:
            outcome, at = decided.value
            self._enter(at)
            self._end(outcome, at)

    def _enter(self, at: int) -> None:
        if at != self._at:
            self._at, self._call = at, self._candidates[at].enter()

    def _end(self, outcome: Literal["confirmed", "compared", "shared"], at: int) -> None:
        self._over = True
        if self._provisional is not None and outcome == "shared":  # the provisional outcome stays
            self._enter([c.name for c in self._candidates].index(self._provisional.runs))
            self._finish(msgspec.structs.replace(self._provisional, provisional=False))
        else:
            self._finish(self._make_report(outcome, at))

    def _make_report(self, outcome: Literal["confirmed", "compared", "shared"], at: int) -> UseReport:
        names, figures = [c.name for c in self._candidates], list(self._figures)
        return UseReport(outcome=outcome, chosen=names[0], runs=names[at], variants=figures, after_calls=self._calls)

    def _take_turns(self) -> Generator[_Turn | _Wait, None, tuple[Literal["confirmed", "compared"], int]]:
        """Yield turns, each complete when the generator goes on; return the outcome and the index of the best."""
        settling = {}
        for at in range(len(self._candidates)):
            calls = CALLS if at == 0 and not self._between else 0
            settling[at] = turn = _Turn(at, calls, _SETTLED, _SETTLE_WITHIN, settles=True)
            yield turn
            if turn.spans:
                self._figures = self._sum_up({0: [turn]})
                if turn.familiar and self._is_kept(turn, self._figures[0]):
                    return "confirmed", 0
        best = yield from self._compare_in_turns(settling, max(MOST_CALLS - self._used, 0))
        if len(self._shapes) > self._calls / 2:
            best = yield from self._compare_again(best)
        return "compared", best

    def _compare_again(self, best: int) -> Generator[_Turn | _Wait, None, int]:
        """Run the best so far until shapes come again; then compare all variants on shapes that they know."""
        self._provisional = msgspec.structs.replace(self._make_report("compared", best), provisional=True)
        self._finish(self._provisional)
        wait = _Wait(best)
        yield wait
        if not wait.comes_again or len(self._shapes) > _MOST_SHAPES:
            return best
        settling, within = {}, _KNOWN * len(self._shapes) + _SETTLE_WITHIN
        for at in range(len(self._candidates)):
            settling[at] = turn = _Turn(at, 0, _SETTLED, within, settles=True, knows=self._knows_shapes)
            yield turn
        return (yield from self._compare_in_turns(settling, 2 * MOST_CALLS))

    def _compare_in_turns(self, settling: Mapping[int, _Turn], left: int) -> Generator[_Turn | _Wait, None, int]:
        """Give turns to the variants that settled, with about `left` calls in all; return the index of the best."""
        ready = [at for at, turn in settling.items() if turn.is_settled] or [len(self._candidates) - 1]
        taken: dict[int, list[_Turn]] = {at: [] for at in ready}
        rounds = max(2, min(self._rounds, left // (3 * len(ready))) // 2 * 2)  # as often there as back
        calls = max(1, left // (rounds * len(ready)) - 1)  # the first call after a change warms up
        for order in order_turns(len(ready), rounds):
            for at in order:
                yield (turn := _Turn(ready[at], calls, 1, 2))
                taken[ready[at]].append(turn)
        for at, turn in settling.items():
            if at not in taken:  # it goes on compiling: judge it by its later calls, with what compiling costs
                taken[at] = [_Turn(at, 0, 0, 0, spans=turn.warm[len(turn.warm) // 2 :])]
        self._figures = self._sum_up(dict(sorted(taken.items())))
        return self._choose(self._figures)

    # -- judging ------------------------------------------------------------------------------------------------------

    def _sum_up(self, taken: Mapping[int, Sequence[_Turn]]) -> list[VariantInUse]:
        """Return what a call of each variant took, over all of its turns.

        If a variant's inputs were larger or smaller than the first variant's, nobody knows whether a call's cost grows
        with them. Then the figures are half-way between both answers, and their errors include both.
        """
        times = {at: self._time_turns(turns) for at, turns in taken.items()}
        levels = self._compare(times)
        figures, first = [], 0.0
        for at, turns in taken.items():
            spans = [span for turn in turns for span in turn.spans]
            level = levels.get(at) or self._estimate(at, levels) or _pool(self._time_turns(turns, all_of_them=True))
            elements = sum(s.elements for s in spans) / len(spans)
            first = first or elements
            scale = first / elements if elements else 1.0
            made = self._make_figures(self._candidates[at], turns, level, scale)
            estimated = at not in levels and made.promised_s is not None
            figures.append(msgspec.structs.replace(made, estimated=estimated))
        return figures

    def _compare(self, times: Mapping[int, Sequence[Sequence[float]]]) -> dict[int, Level]:
        """Return what variants took in the same rounds; a variant with no common round counts by all of its calls."""
        known = {at: turns for at, turns in times.items() if any(turns)}
        most = max((len(turns) for turns in known.values()), default=0)
        together = [at for at, turns in known.items() if len(turns) == most]
        rounds = [[known[at][i] for at in together] for i in range(most)]
        rounds = [each for each in rounds if all(each)]
        compared = dict(zip(together, compare_rounds(rounds), strict=True)) if rounds else {}
        return compared | {at: _pool(turns) for at, turns in known.items() if at not in compared}

    def _estimate(self, at: int, levels: Mapping[int, Level]) -> Level | None:
        """Return what a variant would take: its trial, scaled by how the original's pace changed from trial to loop."""
        last = len(self._candidates) - 1
        promises = [self._candidates[i].promise for i in (at, last)]
        mine, plain = (None if p is None else p.time_s for p in promises)
        if mine is None or not plain or last not in levels:
            return None
        mean_s = mine * levels[last].mean / plain
        return Level(mean_s, _UNSURE * mean_s)

    def _time_turns(self, turns: Sequence[_Turn], *, all_of_them: bool = False) -> list[list[float]]:
        """Return the seconds of calls, except of those that only had to get memory."""
        times = [
            [
                (self._clock.measure_s(s.begin, s.end), s.events)
                for s in turn.spans
                if all_of_them or s.events or not s.events.allocations
            ]
            for turn in turns
        ]
        most_s = _PAUSE * statistics.median([t for turn in times for t, _ in turn] or [0.0])
        return [[t if events else min(t, most_s) for t, events in turn] for turn in times]

    def _make_figures(
        self, candidate: WatchedVariant, turns: Sequence[_Turn], level: Level, scale: float
    ) -> VariantInUse:
        spans = [span for turn in turns for span in turn.spans]
        middle, off = (1.0 + scale) / 2, abs(1.0 - scale) / 2
        events = sum((s.events for s in spans), CompileEvents())
        known = self._read_energies(turns) if level.mean * len(spans) >= _LEAST_S else []
        joules = sum(e.joules for e in known) / len(spans) if known else None
        error_j = sum(e.error_j for e in known) / len(spans)
        return VariantInUse(
            variant=candidate.name,
            calls=len(spans),
            time_s=level.mean * middle,
            error_s=level.error * middle + level.mean * off,
            promised_s=candidate.promise.time_s if candidate.promise else None,
            energy_j=None if joules is None else joules * middle,
            error_j=None if joules is None else error_j * middle + joules * off,
            promised_j=candidate.promise.energy_j if candidate.promise else None,
            compilations=events.compilations,
            recordings=events.recordings,
        )

    def _read_energies(self, turns: Sequence[_Turn]) -> list[Energy]:
        """Return the joules of all turns; nothing if they are not known well enough to compare them."""
        if self._monitor is None:
            return []
        windows = [window for turn in turns for window in turn.windows]
        for window in windows:
            self._monitor.read(window, _READ_S)
        energies = [self._monitor.total(window) for window in windows]
        known = [e for e in energies if e.basis == "measured" and e.joules > 0]
        sure = sum(e.error_j for e in known) <= _LEAST_SURE * sum(e.joules for e in known)
        return known if sure and 0 < len(known) == len(turns) else []

    def _is_kept(self, turn: _Turn, figures: VariantInUse) -> bool:
        """Return whether the first candidate does what its trial promised."""
        promised_s, promised_j = figures.promised_s, figures.promised_j
        if promised_s is None or figures.compilations or figures.recordings:
            return False
        others = [c.promise.time_s for c in self._candidates[1:] if c.promise and c.promise.time_s is not None]
        gap = min(others, default=math.inf) / promised_s - 1.0
        slower = figures.time_s / promised_s - 1.0
        if not -_FASTER <= slower <= min(max(gap / 2, _LEAST), _MOST):
            return False
        if figures.energy_j is None or promised_j is None or self._share_within_calls(turn) < _BUSY:
            return True
        return figures.energy_j - (figures.error_j or 0.0) <= promised_j * (1.0 + _MOST)

    def _share_within_calls(self, turn: _Turn) -> float:
        energies = self._read_energies([turn])
        within_s = sum(self._clock.measure_s(s.begin, s.end) for s in turn.spans)
        return within_s / energies[0].time_s if energies and energies[0].time_s else 1.0


def _pool(turns: Sequence[Sequence[float]]) -> Level:
    """Return the level of all calls of a variant alone."""
    return compare_rounds([[[t for turn in turns for t in turn]]])[0]
