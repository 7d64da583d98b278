"""Ways tried on a set of inputs: compiled, checked against the original, measured, and the best one chosen.

A way whose results differ is tried again without our passes, then dropped. What our passes changed is also measured
against torch's passes alone, so that a rewrite of ours that does not pay does not stay.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import RewriteError
from .check import Program, first_line, not_again
from .inductor import Pass
from .measured import measure
from .patterns import attention
from .reference import OUTSIDE, Reference
from .ways import EAGER, TUNED, Way, build

# Tuning every product took 333 s for a training step of GPT-2 small on an H200 (shared/design.md): it cannot be stopped
# half-way, so it is only begun where that much is left.
_AUTOTUNE_S = 350.0
# Torch warms a CUDA graph up with the first call and records it with the second: the third is the first replayed.
_BEFORE_REPLAY = 3
# What Dynamo, Inductor or a C++ compiler raise for programs they cannot take: such a way is dropped and named.
_REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, ImportError, OSError, AssertionError)


@functools.cache
def refusals() -> tuple[type[Exception], ...]:
    """... and Triton, whose errors are of their own kind, where it is installed."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return _REFUSALS
    return (*_REFUSALS, TritonError)


@dataclass(slots=True, kw_only=True)
class Trial:
    """Tries ways on one set of inputs; `budget_s` 0 measures nothing."""

    program: Program
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tolerance: float | None
    budget_s: float
    say: Callable[[str], None]
    explained: bool = True
    random: bool = False
    reference: Reference | None = None
    tried: list[Way] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    begun_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """What is left of the budget."""
        return self.budget_s - (time.monotonic() - self.begun_s)

    def run(self, modes: Sequence[str], passes: Sequence[Pass]) -> Way:
        """Try the modes and choose."""
        self.look()
        self.tried = [Way(mode=EAGER, call=self.program.call)]
        for mode in modes:
            way = self.attempt(mode, passes)
            self.tried.append(way)
            if self.budget_s <= 0 and way.ok and (way := self._confirmed(way)).ok:
                first = "computes the same" if way.verdict is not None else "compiles"
                self.notes.append(f"nothing was measured (budget_s=0): the first way that {first} was taken")
                return way
        while any(way.ok for way in self.tried[1:]):
            best = self._least([way for way in self.tried if way.ok])
            if best.watch is not None and best.watch.found:
                best = self._without_ours(best)
            best = self._confirmed(best)
            if best.ok:
                return best
        if all(way.why.startswith("not tried") for way in self.tried[1:]):
            if modes:
                self.notes.append("budget_s was over before a way could be tried")
            return self.tried[0]
        why = "; ".join(f"{way.name}: {way.why}" for way in self.tried[1:])
        if not any(way.verdict for way in self.tried):
            part = "the model alone, mode='train' where it is trained"
            fix = f"run it as it is, or hand over a part that compiles: {part}"
            raise RewriteError("no way to run this program compiles", why=why, fix=fix)
        fix = "a wider tolerance=, other ways=, or run it as it is"
        raise RewriteError("no way to run this program computes what it did", why=why, fix=fix)

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """What the body changes is put back, inputs too."""
        with self.program.untouched() as state, self.program.inputs(self.args, self.kwargs, state):
            yield

    # -- compiling and checking -------------------------------------------------------------------------------------

    def look(self) -> None:
        """Run the original: its results to compare with, and whether it draws random numbers."""
        known = functools.partial(self.program.reference, self.args, self.kwargs, self.tolerance)
        self.reference = known()
        self.random = self.reference.random
        if self.random:
            self.notes.append("the program draws random numbers: it was checked in eval mode")
            with self.program.evaluating():
                self.reference = known()
        self.notes.extend(self.reference.unknown)
        left = self.program.outside.skipped if self.program.outside is not None else {}
        self.notes.extend(f"{name} outside {why}: what is written there is not put back" for name, why in left.items())

    def attempt(self, mode: str, passes: Sequence[Pass], *, ours: bool = True) -> Way:
        """Compile and check a way; where our passes changed the result, without them."""
        way = Way(mode=mode, ours=ours, passes=passes)
        if mode == TUNED and self.left_s < _AUTOTUNE_S:
            way.why = f"not tried: tuning may take {_AUTOTUNE_S:.0f} s, which budget_s does not leave"
            return way
        if self.budget_s > 0 and self.left_s <= 0:
            way.why = "not tried: budget_s was over"
            return way
        self.say(f"compiling: {way.name}")
        self._compile(way)
        if way.watch is not None and way.watch.left and not way.watch.counters.get("fuse_attention"):
            # Inductor takes the piece alone but not in this program (its backward, its strides): then ours does.
            forced = [functools.partial(attention, ask=False) if p is attention else p for p in passes]
            way = Way(mode=mode, ours=ours, passes=forced)
            self._compile(way)
        return way if way.ok else self._torch_alone(way)

    def _torch_alone(self, way: Way) -> Way:
        """A way that failed with something of ours in it, without that."""
        if way.watch is None or not way.watch.found:
            return way
        alone = Way(mode=way.mode, ours=False, undone=[(found, way.why) for found in way.watch.found])
        self._compile(alone)
        return alone

    def _compile(self, way: Way) -> None:
        begin = time.monotonic()
        try:
            build(self.program, way, explained=self.explained)
            assert way.call is not None
            for _ in range(_BEFORE_REPLAY if way.replayed else 1):
                seen = self.program.observe(way.call, self.args, self.kwargs)
            if not self.random:
                self._judge(way, seen)
        except refusals() as e:
            way.call, way.why = None, f"it did not compile: {first_line(e)}"
        way.compile_s = time.monotonic() - begin

    def _judge(self, way: Way, seen: Mapping[str, Any]) -> None:
        assert self.reference is not None  # `look` came first
        found = self.reference.compare(seen)
        if not found.ok and found.where.startswith(OUTSIDE):  # a clock may have decided that: now the original as well
            again = self.program.observe(self.program.call, self.args, self.kwargs)
            self.reference = self.reference.beside(again)
            found = self.reference.compare(seen)
        way.verdict = found if found.checked else None
        if not found.ok:
            whose = "" if way.watch is None or way.watch.found else "torch.compile, without a rewrite of ours, "
            way.why = f"{whose or 'it '}changed the result: {found.why}"
        else:
            way.why = "" if found.checked else "not checked: nothing to compare"

    def _confirmed(self, way: Way) -> Way:
        """A program that draws random numbers, compiled once more in eval mode and checked there: only the chosen one.

        Where ours changed the result, the way without them.
        """
        if not self.random or way.mode == EAGER:
            return way
        self.say(f"checking in eval mode: {way.name}")
        twin = Way(mode=way.mode, ours=way.ours, passes=way.passes)
        with self.program.evaluating():
            try:
                build(self.program, twin, explained=False)
                assert twin.call is not None
                self._judge(way, self.program.observe(twin.call, self.args, self.kwargs))
            except refusals() as e:
                way.call, way.why = None, f"it did not compile in eval mode: {first_line(e)}"
        if way.ok:
            return way
        alone = self._torch_alone(way)
        if alone is way:
            return way
        self.tried.append(alone)
        return self._confirmed(alone) if alone.ok else alone

    def settle(self, way: Way) -> None:
        """Two iterations one after the other: what runs in the second is the steady state, and is explained."""
        assert way.call is not None
        assert way.watch is not None
        with self.untouched():
            self._iteration(way.call)
            way.watch.ran.clear()
            self._iteration(way.call)

    # -- measuring and choosing -------------------------------------------------------------------------------------

    def _measure(self, way: Way) -> None:
        assert way.call is not None
        self.say(f"measuring: {way.name}")
        run = functools.partial(self._iteration, way.call)
        try:
            with self.untouched():
                found = measure(run, max(1.2, self.left_s / (1 + len(self.tried))))
        except Exception as e:
            if way.mode == EAGER:
                raise not_again(e) from e
            way.call, way.why = None, f"it failed when it was run again: {first_line(e)}"
            return
        way.seconds, way.joules, way.error_j = found.seconds, found.joules, found.error_j

    def _iteration(self, call: Callable[..., Any]) -> None:
        self.program.run(call, self.args, self.kwargs)
        if self.program.mode == "train":
            for module in self.program.modules:
                module.zero_grad(set_to_none=True)

    def _least(self, good: Sequence[Way]) -> Way:
        """The way with the fewest joules, or seconds where none were measured."""
        for way in good:
            if way.seconds is None:
                self._measure(way)
        good = [way for way in good if way.ok]
        if all(way.joules is not None for way in good):
            return min(good, key=lambda way: way.joules or 0.0)
        note = "no sensor measures joules here: the fastest way was taken"
        if note not in self.notes:
            self.notes.append(note)
        return min(good, key=lambda way: way.seconds or 0.0)

    def _without_ours(self, best: Way) -> Way:
        """The same mode with torch's passes alone: ours stay only where they pay."""
        alone = self.attempt(best.mode, (), ours=False)
        self.tried.append(alone)
        if not alone.ok:
            return best
        if self._least([best, alone]) is best:
            return best
        assert best.watch is not None
        alone.undone = [(found, "it does not pay: torch's passes alone take less") for found in best.watch.found]
        return alone
