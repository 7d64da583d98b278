"""Variants of a program: torch.compile's modes with our passes before them, and a CUDA graph of the eager program.

`VariantSearch` compiles each one, checks it against the original, measures it, and chooses the best. A variant whose
results differ is tried again without our passes, then dropped. Variants with changes by our passes are also measured
against torch's passes alone, so that a rewrite of ours that does not pay does not stay.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ..errors import ArgumentError, RewriteError, check_choice
from ..graph.nested import map_tensors
from ..monitor.iteration import IterationMeasurement, has_sensor, measure_iteration
from .compare import OUTSIDE, Comparison, Reference
from .compilation import Compilation, Replacement
from .compile_events import CompileEvents
from .cudagraph import ReplayedProgram
from .inductor import PRIVATE_ERRORS, Pass, make_backend
from .other_inputs import OtherInputs
from .program import Program, cannot_repeat, first_line
from .search_cost import CallCost, guess_compile_s
from .turns import compare_rounds, order_turns

EAGER = "eager"
REPLAYED_EAGER = "eager + cuda graph"
AUTOTUNE = "max-autotune-no-cudagraphs"
MODES = ("default", "reduce-overhead", AUTOTUNE, REPLAYED_EAGER)
_REPLAYED = frozenset({"reduce-overhead", REPLAYED_EAGER})
# Seconds that "max-autotune" may take: tuning every product took 333 s for a training step of GPT-2 small on an H200
# (benchmarks/device/optimize.py). It cannot be stopped half-way, so it only begins if this much time is left.
_AUTOTUNE_S = 350.0
# Torch warms up a CUDA graph in the first call and records it in the second, so the third is the first replay.
_CALLS_TO_REPLAY = 3
# Variants are measured in _ROUNDS turns. The seconds of a turn, at least and at most, are _TURN_S with a sensor, whose
# batches need half a second, and _TIMED_S with a clock alone.
_ROUNDS = 4
# After the first _SHORT_ROUNDS rounds, which are short, variants that took _FAR times the best's joules are left out.
_SHORT_ROUNDS, _FAR = 2, 1.25
_TURN_S, _TIMED_S = (0.6, 1.5), (0.05, 0.05)


@dataclass(slots=True, kw_only=True)
class Variant:
    """One variant of the program, and the result of its trial. `ours` tells whether our passes were allowed.

    `unsettled` is what the variant compiles and records again with every other batch of data.
    """

    mode: str
    ours: bool = True
    call: Callable[..., Any] | None = None
    passes: Sequence[Pass] = ()
    compilation: Compilation | None = None
    comparison: Comparison | None = None
    compile_s: float = 0.0
    time_s: float | None = None
    energy_j: float | None = None
    error_j: float | None = None
    turns: list[IterationMeasurement] = field(default_factory=list)
    unsettled: CompileEvents | None = None
    undone: list[tuple[Replacement, str]] = field(default_factory=list)
    out_of_budget: bool = False
    why: str = ""

    @property
    def name(self) -> str:
        """Return the variant's name in reports."""
        return self.mode if self.ours else f"{self.mode}, torch's passes alone"

    @property
    def ok(self) -> bool:
        """Return whether the variant compiled and, as far as it was checked, computes the same."""
        return self.call is not None and (self.comparison is None or self.comparison.ok)

    def release(self) -> None:
        """Drop the variant's compiled code and graphs; the result of its trial stays."""
        self.call = None
        if self.compilation is not None:
            self.compilation.release()

    @property
    def is_replayed(self) -> bool:
        """Return whether the variant's kernels are replayed as CUDA graphs."""
        return self.mode in _REPLAYED


def choose_modes(program: Program, wanted: Sequence[str] | None, cuda: bool) -> list[str]:
    """Return the modes to try, the most promising first."""
    for name in wanted or ():
        check_choice("variant", name, MODES)
    replays = [name for name in wanted or () if name in _REPLAYED]
    if not cuda and replays:
        raise ArgumentError(
            f"variants={replays!r} need a CUDA device",
            why="the program's tensors are on the CPU",
            fix="leave variants= out, or move the model to a GPU",
        )
    modes = wanted or (MODES if cuda else ("default",))
    # A replayed eager program must return the same tensors each time, which a step with its own backward may not do.
    return [name for name in modes if name != REPLAYED_EAGER or program.mode == "infer"]


def build_variant(program: Program, variant: Variant, *, observe: bool = True) -> None:
    """Make the callable of a variant; it is compiled when first called. Observed compilations use no cache."""
    if variant.mode == REPLAYED_EAGER:
        variant.call = ReplayedProgram(program)
        return
    from torch._inductor import list_mode_options

    variant.compilation = Compilation(observe=observe)
    backend = make_backend(variant.compilation, variant.passes, list_mode_options(variant.mode))
    compiled = torch.compile(_copy_frame(program.call), backend=backend)
    variant.call = _copy_results(compiled) if variant.is_replayed and program.mode == "infer" else compiled


_frames = itertools.count()


def _copy_frame(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a call in a function with its own code object and name.

    Dynamo keeps compiled code by code object, up to a limit. By file, line and name it keeps the sizes that it has
    seen: without a new name, sizes that differ from the last program's would count as dynamic, and rewrites that need
    fixed sizes would be lost.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    name = f"run_{next(_frames)}"
    code = run.__code__.replace(co_name=name, co_qualname=name)
    return types.FunctionType(code, run.__globals__, name, None, run.__closure__)


def _copy_results(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that copies the results of a replay, which the next replay overwrites."""

    def run(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return map_tensors(torch.clone, compiled(*args, **kwargs))

    return run


@functools.cache
def _list_compile_errors() -> tuple[type[Exception], ...]:
    """Return what Dynamo, Inductor, Triton or a C++ compiler raise for programs that they cannot compile."""
    errors = (*PRIVATE_ERRORS, ImportError, OSError)
    with contextlib.suppress(ImportError):
        from triton.errors import TritonError

        return (*errors, TritonError)
    return errors


@dataclass(slots=True, kw_only=True)
class VariantSearch:
    """Tries variants on one set of inputs; with `budget_s` 0, nothing is measured."""

    program: Program
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tolerance: float | None
    budget_s: float
    say: Callable[[str], None]
    observe: bool = True
    random: bool = False
    reference: Reference | None = None
    others: OtherInputs | None = None
    tried: list[Variant] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    start_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Return the seconds that remain of the budget."""
        return self.budget_s - (time.monotonic() - self.start_s)

    def run(self, modes: Sequence[str], passes: Sequence[Pass]) -> Variant:
        """Try the modes and choose a variant."""
        self.run_original()
        self.tried = [Variant(mode=EAGER, call=self.program.call)]
        for mode in modes:
            variant = self.try_mode(mode, passes)
            self.tried.append(variant)
            if self.budget_s <= 0 and variant.ok and (variant := self._check_in_eval_mode(variant)).ok:
                first = "computes the same" if variant.comparison is not None else "compiles"
                self.notes.append(f"nothing was measured (budget_s=0): the first variant that {first} was taken")
                return variant
        while any(variant.ok for variant in self.tried[1:]):
            best = self._find_cheapest([variant for variant in self.tried if variant.ok])
            if best.compilation is not None and best.compilation.replacements:
                best = self._drop_ours_unless_cheaper(best)
            best = self._check_in_eval_mode(best)
            if best.ok:
                return best
        if all(variant.out_of_budget for variant in self.tried[1:]):
            if modes:
                self.notes.append("budget_s was over before a variant could be tried")
            return self.tried[0]
        why = "; ".join(f"{variant.name}: {variant.why}" for variant in self.tried[1:])
        if not any(variant.comparison for variant in self.tried):
            part = "the model alone, mode='train' where it is trained"
            fix = f"run it as it is, or pass a part that compiles: {part}"
            raise RewriteError("no variant of this program compiles", why=why, fix=fix)
        fix = "a wider tolerance=, other variants=, or run it as it is"
        raise RewriteError("no variant of this program gives the same result", why=why, fix=fix)

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Put back what the body changes, inputs too."""
        with self.program.restoring() as state, self.program.save_inputs(self.args, self.kwargs, state):
            yield

    # -- compiling and checking -------------------------------------------------------------------------------------

    def run_original(self) -> None:
        """Run the original for the reference results, and find out whether it draws random numbers."""
        make_reference = functools.partial(self.program.make_reference, self.args, self.kwargs, self.tolerance)
        self.reference = make_reference()
        self.random = self.reference.random
        if self.random:
            self.notes.append("the program draws random numbers: it was checked in eval mode")
            with self.program.in_eval_mode():
                self.reference = make_reference()
        with self.restoring():
            run = functools.partial(self.run_iteration, self.program.call)
            self.others = OtherInputs.find(self.args, self.kwargs, run)
        self.notes.extend(self.reference.notes)
        skipped = self.program.outside.skipped if self.program.outside is not None else {}
        self.notes.extend(
            f"{name} outside {why}: what is written there is not put back" for name, why in skipped.items()
        )

    def try_mode(self, mode: str, passes: Sequence[Pass], *, ours: bool = True) -> Variant:
        """Compile and check a variant; if our passes changed the result, try it without them."""
        variant = Variant(mode=mode, ours=ours, passes=passes)
        if mode == AUTOTUNE and self.left_s < _AUTOTUNE_S:
            variant.why = f"not tried: tuning may take {_AUTOTUNE_S:.0f} s, which budget_s does not leave"
        elif self.budget_s > 0 and self.left_s < (needs_s := self._guess_compile_s(mode)):
            variant.why = f"not tried: compiling may take {needs_s:.0f} s, which budget_s does not leave"
        if variant.why:
            variant.out_of_budget = True
            return variant
        self.say(f"compiling: {variant.name}")
        self._compile(variant)
        return variant if variant.ok else self._retry_without_ours(variant)

    def _guess_compile_s(self, mode: str) -> float:
        """Return how long trying a mode will take: as long as the longest so far, or a guess before the first."""
        if mode == REPLAYED_EAGER:
            return 0.0
        tried = max((variant.compile_s for variant in self.tried), default=0.0)
        return tried or guess_compile_s(self.program.modules, trains=self.program.mode != "infer")

    def _retry_without_ours(self, variant: Variant) -> Variant:
        """Compile a variant that failed again, without our passes if they changed anything."""
        if variant.compilation is None or not variant.compilation.replacements:
            return variant
        undone = [(replacement, variant.why) for replacement in variant.compilation.replacements]
        alone = Variant(mode=variant.mode, ours=False, undone=undone)
        self._compile(alone)
        return alone

    def _compile(self, variant: Variant) -> None:
        begin = time.monotonic()
        try:
            build_variant(self.program, variant, observe=self.observe)
            assert variant.call is not None
            for _ in range(_CALLS_TO_REPLAY if variant.is_replayed else 1):
                observed = self.program.observe(variant.call, self.args, self.kwargs)
            if not self.random:
                self._compare(variant, observed)
        except _list_compile_errors() as e:
            variant.call, variant.why = None, f"it did not compile: {first_line(e)}"
        variant.compile_s = time.monotonic() - begin

    def _compare(self, variant: Variant, observed: Mapping[str, Any]) -> None:
        assert self.reference is not None  # made by `run_original`
        comparison = self.reference.compare(observed)
        # a clock may have decided that, so run the original again
        if not comparison.ok and comparison.where.startswith(OUTSIDE):
            again = self.program.observe(self.program.call, self.args, self.kwargs)
            self.reference = self.reference.without_variations(again)
            comparison = self.reference.compare(observed)
        variant.comparison = comparison if comparison.checked else None
        if not comparison.ok:
            blameless = variant.compilation is not None and not variant.compilation.replacements
            who = "torch.compile, without a rewrite of ours," if blameless else "it"
            variant.why = f"{who} changed the result: {comparison.why}"
        else:
            variant.why = "" if comparison.checked else "not checked: nothing to compare"

    def _check_in_eval_mode(self, variant: Variant) -> Variant:
        """Compile a program that draws random numbers once more in eval mode, and check it there.

        If our passes changed the result, return the variant without them.
        """
        if not self.random or variant.mode == EAGER:
            return variant
        self.say(f"checking in eval mode: {variant.name}")
        twin = Variant(mode=variant.mode, ours=variant.ours, passes=variant.passes)
        with self.program.in_eval_mode():
            try:
                build_variant(self.program, twin, observe=False)
                assert twin.call is not None
                self._compare(variant, self.program.observe(twin.call, self.args, self.kwargs))
            except _list_compile_errors() as e:
                variant.call, variant.why = None, f"it did not compile in eval mode: {first_line(e)}"
        if variant.ok:
            return variant
        alone = self._retry_without_ours(variant)
        if alone is variant:
            return variant
        self.tried.append(alone)
        return self._check_in_eval_mode(alone) if alone.ok else alone

    def run_to_steady_state(self, variant: Variant) -> None:
        """Run two iterations: the graphs that run in the second one are the steady state."""
        assert variant.call is not None and variant.compilation is not None
        with self.restoring():
            self.run_iteration(variant.call)
            variant.compilation.ran.clear()
            self.run_iteration(variant.call)

    # -- measuring and choosing -------------------------------------------------------------------------------------

    def _measure(self, variant: Variant) -> None:
        """Measure one turn of a variant."""
        assert variant.call is not None
        run = functools.partial(self.run_iteration, variant.call)
        try:
            with self.restoring():
                if self.others is not None and variant.mode != EAGER and not variant.turns:
                    variant.unsettled = self.others.find_events(run)
                iteration = run
                if self.others is not None and variant.unsettled:
                    iteration = functools.partial(self.others.pass_next, run)
                shortest, longest = _TURN_S if has_sensor() else _TIMED_S
                turn_s = min(max(self.left_s / (_ROUNDS * (1 + len(self.tried))), shortest), longest)
                turn_s = shortest if len(variant.turns) < _SHORT_ROUNDS else turn_s
                variant.turns.append(measure_iteration(iteration, turn_s))
        except Exception as e:
            if variant.mode == EAGER:
                raise cannot_repeat(e) from e
            variant.call, variant.why = None, f"it failed when it was run again: {first_line(e)}"

    def _measure_in_turns(self, variants: Sequence[Variant]) -> None:
        for variant in variants:
            variant.turns.clear()
        self.say(f"measuring in turns: {', '.join(variant.name for variant in variants)}")
        running = list(range(len(variants)))
        for done, order in enumerate(order_turns(len(variants), _ROUNDS)):
            running = self._find_near(variants) if done == _SHORT_ROUNDS else running
            if len(running) == 1:
                break
            begun_s = self.left_s
            for variant in [variants[at] for at in order if at in running]:
                if variant.call is not None:
                    self._measure(variant)
            if begun_s - self.left_s > self.left_s:  # an iteration takes minutes: one round is enough
                break
        self._sum_up_turns(variants)
        self._sum_up_turns([variants[at] for at in running])

    def _find_near(self, variants: Sequence[Variant]) -> list[int]:
        """Return the indices of variants that are not far from the best; eager stays if a trace begins with it."""
        measured = [at for at, variant in enumerate(variants) if variant.call is not None and variant.turns]
        known = all(turn.energy_j for at in measured for turn in variants[at].turns)
        costs = {
            at: [(turn.energy_j if known else turn.time_s) or 0.0 for turn in variants[at].turns] for at in measured
        }
        best = min(costs.values(), key=sum, default=[])
        far = [at for at, own in costs.items() if all(x > _FAR * y for x, y in zip(own, best, strict=True))]
        kept = [at for at, variant in enumerate(variants) if self.observe and variant.mode == EAGER]
        return [at for at in range(len(variants)) if at not in far or at in kept]

    def _sum_up_turns(self, variants: Sequence[Variant]) -> None:
        """Set what the variants took, from the rounds that they have in common."""
        measured = [variant for variant in variants if variant.call is not None and variant.turns]
        rounds = min((len(variant.turns) for variant in measured), default=0)
        by_round = list(zip(*(variant.turns[:rounds] for variant in measured), strict=True))
        times = compare_rounds([[[turn.time_s] for turn in each] for each in by_round]) if measured else []
        for variant, level in zip(measured, times, strict=True):
            variant.time_s = level.mean
        known_rounds = [each for each in by_round if all(turn.energy_j for turn in each)]  # a turn may be too short
        if known_rounds:
            joules = compare_rounds([[[turn.energy_j or 0.0] for turn in each] for each in known_rounds])
            for variant, level in zip(measured, joules, strict=True):
                known = max(turn.error_j or 0.0 for turn in variant.turns)
                variant.energy_j, variant.error_j = level.mean, max(level.error, known)

    def run_iteration(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Run one iteration with `call` in the model's place, with the search's inputs if none are given."""
        self.program.run(call, args or self.args, kwargs or self.kwargs)
        if self.program.mode == "train":
            for module in self.program.modules:
                module.zero_grad(set_to_none=True)

    def _find_cheapest(self, variants: Sequence[Variant]) -> Variant:
        """Measure variants in turns, unless that was done already, and return the cheapest."""
        if any(variant.time_s is None for variant in variants):
            self._measure_in_turns(variants)
        variants = [variant for variant in variants if variant.ok]
        note = "no sensor measures joules here: the fastest variant was taken"
        if note not in self.notes and any(variant.energy_j is None for variant in variants):
            self.notes.append(note)
        return find_cheapest(variants)

    def _drop_ours_unless_cheaper(self, best: Variant) -> Variant:
        """Measure the same mode with torch's passes alone, and return the cheaper of the two."""
        alone = self.try_mode(best.mode, (), ours=False)
        self.tried.append(alone)
        if not alone.ok or self._find_cheapest([best, alone]) is best:
            return best
        assert best.compilation is not None
        why = "it does not pay: torch's passes alone take less"
        alone.undone = [(replacement, why) for replacement in best.compilation.replacements]
        return alone


C = TypeVar("C", bound=CallCost)


def find_cheapest(variants: Sequence[C]) -> C:
    """Return the variant with the fewest joules, or seconds if not all joules are known."""
    if all(variant.energy_j is not None for variant in variants):
        return min(variants, key=lambda variant: variant.energy_j or 0.0)
    return min(variants, key=lambda variant: variant.time_s or 0.0)
