"""`tessera.optimize`: apply the rewrites that pay, check that nothing changed, and tell what was done.

::

    model = tessera.optimize(model, inputs)       # still callable, still a model: parameters(), state_dict(), eval()
    print(model)                                  # what was rewritten, bytes and joules saved, the variants tried
    model = model.undo()                          # the original

    fast = tessera.optimize(train_step)           # a callable that does its own step

Rewrites are torch's own where torch has them (Inductor's passes and fusion, CUDA graphs). Our passes run before them,
for what they miss (`passes.py`). Which of torch.compile's modes runs is decided by measuring.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ..errors import ArgumentError, MeasurementError, RewriteError, TesseraError, check_choice, needs_extra
from ..graph.rewrites import Rewrite, announce_rewrites
from ..units import format_duration
from .notice import announce_if_long
from .options import OptimizeMode, OptimizeOptions

if TYPE_CHECKING:
    from ..device import Device
    from ..monitor import EnergyScope
    from .inductor import Pass
    from .kernel_times import KernelProfile
    from .program_cost import HostWork
    from .savings import RewriteTrace
    from .use_report import UseReport
    from .variants import Variant, VariantSearch

# The iterations of a profile may always take this many seconds in all, and more only if the budget has time left.
_PROFILE_S = 1.0


def optimize(
    model_or_step: Callable[..., Any],
    inputs: Any = None,
    *,
    mode: OptimizeMode = "infer",
    tolerance: float | None = None,
    on: str | Device | None = None,
    explain: bool | Literal["modelled"] = True,
    budget_s: float = 120.0,
    variants: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Optimized:
    """Rewrite a model, or a callable that does its own step, so that it takes fewer joules; see `Optimized`.

    `inputs` are a tensor, a tuple of positional or a dict of keyword arguments; without them the first call's are used.
    With `mode="infer"` a module runs without gradients; "train" compiles and checks the backward too. A callable that
    is not a module runs as it is. `tolerance` is the relative Frobenius error allowed of results and gradients (None:
    by number format). `on` is the chip that savings are priced for (None: the one of this machine). `variants` are the
    names of the variants to try. Compiling and measuring take about `budget_s` (0: take the first variant that computes
    the same, and measure nothing); `progress` is called with what is being done. `explain=False` leaves the trace out
    and lets torch's compilation cache work. "modelled" prices the trace without profiling the kernels; profiling makes
    later launches of this process more expensive.

    The program runs many times meanwhile. Models and optimizers that it holds, the inputs, and the variables around it
    (those that it closes over, is bound to, or names in its module) are put back as they were. Batches that a data
    loader or an iterator has given out are lost: pass a step that works on one batch.
    """
    if not callable(model_or_step):
        raise ArgumentError(
            f"model_or_step is {_describe(model_or_step)}, which cannot be called",
            fix="optimize(model, inputs): an nn.Module or a function, then its inputs",
        )
    check_choice("mode", mode, ("infer", "train"))
    if tolerance is not None and not 0 < tolerance < 1:
        raise ArgumentError(f"tolerance={tolerance!r} is not a relative error", fix="e.g. tolerance=1e-2")
    if explain not in (True, False, "modelled"):
        raise ArgumentError(f"explain={explain!r}", fix="True, False or 'modelled'")
    if isinstance(model_or_step, Optimized):
        model_or_step = model_or_step.undo()
    model_or_step = getattr(model_or_step, "_orig_mod", model_or_step)  # what torch.compile(model) wraps
    options = OptimizeOptions(
        mode=mode,
        tolerance=tolerance,
        on=on,
        explain=explain,
        budget_s=budget_s,
        variants=variants,
        progress=progress,
    )
    optimized = Optimized(model_or_step, options)
    if inputs is not None:
        optimized.prepare(*_split_inputs(inputs))
    return optimized


def _describe(value: Any) -> str:
    """Describe a value in a few words, even a tensor with millions of elements."""
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if isinstance(shape, tuple) else "")


def _split_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


class Optimized:
    """A rewritten program. It is called like the original, and everything else is the original's.

    Attributes and methods of the original pass through (`parameters()`, `state_dict()`, `train()`, `eval()`).
    `rewrites` lists the changes, `undone` those that were tried and taken back, with the reason. `variants` lists every
    variant that was tried, with its seconds and joules; `chosen` is the one that runs. `priced_for` is the chip that
    savings are priced for, `trace` what they add up to; `spent_s` and `spent_j` are the cost of the search. `str()`
    shows all of it. The first calls are watched: `in_use` tells whether the variant does what its trial promised and,
    if it does not, which variant runs since then (None: not known yet, or eager). Compiled code belongs to one model:
    a copy, or a pickle read again (without `progress`), has the same options and tries the variants again.
    """

    def __init__(self, original: Callable[..., Any], options: OptimizeOptions) -> None:
        vars(self).update(original=original, rewrites=[], undone=[], variants=[], chosen="", trace=None, notes=[])
        vars(self).update(priced_for=None, in_use=None, spent_s=0.0, _scope=None)
        vars(self).update(_options=options, _call=None, _undone=False)

    original: Callable[..., Any]
    rewrites: list[Rewrite]
    undone: list[Rewrite]
    variants: list[Variant]
    chosen: str
    trace: RewriteTrace | None
    notes: list[str]
    priced_for: Device | None
    in_use: UseReport | None
    spent_s: float
    _scope: EnergyScope | None
    _options: OptimizeOptions
    _call: Callable[..., Any] | None
    _undone: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is None:
            self.prepare(args, kwargs, wrap_errors=False)  # the program's own errors pass through, as in any other call
        if self.rewrites:
            announce_rewrites(self.rewrites)
        assert self._call is not None
        return self._call(*args, **kwargs)

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, wrap_errors: bool = True) -> None:
        """Try the variants on these inputs and keep the best; the first call does this if `optimize` had no inputs."""
        with needs_extra("torch", "torch", "tessera.optimize"):
            import torch
            from torch.utils import _pytree as pytree

        from ..monitor import EnergyScope
        from ..monitor.iteration import has_sensor
        from .kernel_times import PROFILED_S
        from .program import Program
        from .program_cost import find_chip
        from .variants import VariantSearch, choose_modes

        options, program = self._options, Program.of(self.original, args, kwargs, self._options.mode)
        held = (*pytree.tree_leaves((args, kwargs)), *(p for m in program.modules for p in m.parameters()))
        cuda = any(isinstance(t, torch.Tensor) and t.is_cuda for t in held)
        self.priced_for = find_chip(options.on, cuda)
        modes = choose_modes(program, options.variants, cuda)
        search = VariantSearch(
            program=program,
            args=tuple(args),
            kwargs=dict(kwargs),
            tolerance=options.tolerance,
            budget_s=options.budget_s,
            say=options.progress or (lambda _line: None),
            observe=bool(options.explain),
        )
        if PROFILED_S and cuda:
            note = "a profiler ran in this process before: variants that launch were measured slower than alone"
            search.notes.append(note)
        self._scope = EnergyScope("tessera.optimize") if has_sensor() else None
        name = getattr(self.original, "__name__", type(self.original).__name__)
        notice = f"optimizing {name}: compiling and measuring, about {format_duration(options.budget_s)} at most"
        with self._scope or contextlib.nullcontext(), announce_if_long(notice if options.progress is None else None):
            best = self._find_best(search, modes, wrap_errors=wrap_errors)
            self.variants, self.chosen, self.notes = search.tried, best.name, search.notes
            self._explain(search, best)
        self.spent_s = time.monotonic() - search.start_s
        self._run(search, best, cuda=cuda)

    def _find_best(self, search: VariantSearch, modes: Sequence[str], *, wrap_errors: bool) -> Variant:
        from .program import first_line

        try:
            return search.run(modes, self._list_passes())
        except Exception as e:
            if not wrap_errors or search.reference is not None or isinstance(e, TesseraError):
                raise
            raise RewriteError(  # the original has not run once
                "the program does not run on these inputs",
                why=first_line(e),
                fix="inputs it can be called with: a tensor, a tuple of positional or a dict of keyword arguments",
            ) from e

    # -- running ----------------------------------------------------------------------------------------------------

    def _run(self, search: VariantSearch, best: Variant, *, cuda: bool) -> None:
        """Run the best variant from now on, watched at first; drop the others with their graphs and memory."""
        from ..monitor import default
        from .call_clock import HostClock, StreamClock
        from .use_report import find_best_in_use
        from .variants import EAGER, find_cheapest
        from .watch import MOST_CALLS, WatchedCall, WatchedVariant, describe_inputs

        # A replayed variant cannot replace another replayed one: what breaks one replay breaks the other.
        others = [v for v in search.tried[1:] if v is not best and v.ok and v.time_s and not v.is_replayed]
        candidates = [best, *([find_cheapest(others)] if others else []), search.tried[0]]
        if best.mode == EAGER or self._options.budget_s <= 0:
            candidates = [best]  # there is nothing to compare with, or nothing may be measured
        calls = {v.name: search.program.wrap(v.call) for v in candidates}
        for variant in search.tried:
            variant.call = None
            if variant.compilation is not None:
                variant.compilation.closed = True
            if variant.name not in calls:
                variant.release()
        if len(candidates) == 1:
            self._settle(None, calls[best.name])
            return
        made = {best.name: (self.rewrites, self.trace)}
        self._call = WatchedCall(
            [
                WatchedVariant(name=v.name, enter=functools.partial(calls.__getitem__, v.name), promise=v)
                for v in candidates
            ],
            functools.partial(find_best_in_use, by=("energy", "time")),
            lambda report: self._settle(report, calls[report.runs], made),
            clock=StreamClock(2 * MOST_CALLS) if cuda else HostClock(),
            monitor=default() if self._scope is not None else None,
            between=search.program.mode == "train",
            inputs=describe_inputs(search.args, search.kwargs),
        )

    def _settle(
        self, report: UseReport | None, call: Callable[..., Any], explained: Mapping[str, Any] | None = None
    ) -> None:
        """Run this call from now on; while `report` is provisional, only note what it says."""
        import gc

        self.in_use = report
        if report is not None:
            from .savings import replacement_to_rewrite

            variant = next(v for v in self.variants if v.name == report.runs)
            made = variant.compilation.replacements if variant.compilation is not None else []
            rewrites = [replacement_to_rewrite(r, "another variant was explained") for r in made]
            self.chosen = report.runs
            self.rewrites, self.trace = (explained or {}).get(report.runs, (rewrites, None))
            if report.provisional:
                return
            for variant in self.variants:
                if variant.name != report.runs:
                    variant.release()
        self._call = call
        # Compiled code, and a backward pass of a trial, are reference cycles that hold device memory. Collecting them
        # gives the memory back to torch's cache, so later calls need not ask the driver for theirs.
        gc.collect()

    @property
    def spent_j(self) -> float | None:
        """Return the joules that trying the variants took; None without a sensor."""
        return self._scope.energy_j if self._scope is not None else None

    @property
    def paid_after_calls(self) -> int | None:
        """Return after how many calls the search has saved what it took; None if a call saves nothing.

        Costs are those in use if the variants were compared there, else those of their trials.
        """
        from .search_cost import count_calls_to_pay

        used = self.in_use.find_cost() if self.in_use is not None else None
        tried = [v for v in self.variants if v.name == self.chosen]
        if used is None and not tried:
            return None
        return count_calls_to_pay(self.spent_s, self.spent_j, *(used or (self.variants[0], tried[0])))

    def _list_passes(self) -> list[Pass]:
        from .passes import drop_known_masks, fuse_attention, make_spectral_pass

        return [drop_known_masks, fuse_attention, make_spectral_pass(self.priced_for)]

    # -- explaining -------------------------------------------------------------------------------------------------

    def _explain(self, search: VariantSearch, best: Variant) -> None:
        from .savings import make_graph_rewrite, replacement_to_rewrite, trace_rewrites
        from .variants import EAGER

        self.undone = [replacement_to_rewrite(replacement, why) for replacement, why in best.undone]
        if best.mode == EAGER:
            self.notes.append("no rewrite pays: the program runs as it is")
        elif best.compilation is None:
            self.rewrites.append(make_graph_rewrite(best, self.variants))
        elif not self._options.explain:
            replacements = best.compilation.replacements
            self.rewrites.extend(replacement_to_rewrite(r, "explain=False") for r in replacements)
        else:
            search.run_to_steady_state(best)
            compilation = best.compilation.select_graphs_that_ran()
            self.trace = trace_rewrites(
                compilation,
                self.priced_for,
                replayed=best.is_replayed,
                eager_s=self._get_eager_s(),
                host=self._count_host_work(search) if self.priced_for is not None else None,
                profiles=self._profile(search, best) if compilation.complete else None,
            )
            self.rewrites.extend(self.trace.rewrites)
            self.notes.extend(self.trace.notes)

    def _get_eager_s(self) -> float | None:
        """Return the measured time of the eager program, if it ran on the chip that savings are priced for."""
        return self.variants[0].time_s if self._options.on is None else None

    def _profile(self, search: VariantSearch, best: Variant) -> tuple[KernelProfile, KernelProfile] | None:
        """Profile the kernels, eager and as chosen; None on another chip, or with the reason in a note."""
        from .kernel_times import profile_kernels

        eager, eager_s, best_s = self.variants[0], self._get_eager_s(), best.time_s
        if eager_s is None or best_s is None or best.call is None or self.priced_for is None:
            return None  # priced for another chip, or nothing is measured
        if self._options.explain == "modelled":
            return None
        # CUPTI stays loaded, and slows every later launch of the process: device/cupti_after.py
        if not best.is_replayed:
            self.notes.append("savings are modelled alone: profiling would slow the launches of this variant")
            return None
        # each program runs once to warm up and once to be profiled
        if 2 * (eager_s + best_s) > max(_PROFILE_S, search.left_s):
            self.notes.append("savings are modelled alone: budget_s leaves no time to profile the kernels")
            return None
        measured = eager.energy_j and best.energy_j  # joules of both, or of neither
        profiles = []
        try:
            for variant, call in ((eager, search.program.call), (best, best.call)):
                with search.restoring():
                    run = functools.partial(search.run_iteration, call)
                    joules = variant.energy_j if measured else None
                    profiles.append(profile_kernels(run, variant.time_s or 0.0, joules))
        except MeasurementError as e:
            self.notes.append(f"savings are modelled alone: {e.what} ({e.why})")
            return None
        self.notes.append("the kernels were profiled; launches of this process cost its host more since")
        return profiles[0], profiles[1]

    def _count_host_work(self, search: VariantSearch) -> HostWork | None:
        """Return the work of eager Python besides dispatching, from a capture on meta tensors."""
        from .program_cost import count_host_work

        is_step = search.program.mode == "step"
        try:
            return count_host_work(self.original, search.kwargs or search.args, self._options.mode, is_step=is_step)
        except TesseraError as e:
            self.notes.append(f"the host's work besides dispatching is unknown: {e.what}")
            return None

    # -- what else a program has ------------------------------------------------------------------------------------

    def undo(self) -> Callable[..., Any]:
        """Return the original, unchanged; this object runs it from now on too."""
        vars(self).update(_call=self.original, rewrites=[], chosen="eager", _undone=True)
        return self.original

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimized:
        import copy

        twin = _recreate(copy.deepcopy(self.original, memo), self._options, self._undone)
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return _recreate, (self.original, replace(self._options, progress=None), self._undone)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: the rewrites, those undone, and the variants tried."""

        def to_row(variant: Variant) -> dict[str, Any]:
            names = ("name", "compile_s", "time_s", "energy_j", "error_j", "why")
            error = variant.comparison.relative if variant.comparison else None
            return {**{name: getattr(variant, name) for name in names}, "relative_error": error}

        return {
            "chosen": self.chosen,
            "rewrites": [asdict(r) for r in self.rewrites],
            "undone": [asdict(r) for r in self.undone],
            "variants": [to_row(variant) for variant in self.variants],
            "in_use": None if self.in_use is None else msgspec.to_builtins(self.in_use),
            "spent_s": self.spent_s,
            "spent_j": self.spent_j,
            "paid_after_calls": self.paid_after_calls,
            "notes": list(self.notes),
            "device": self.priced_for.id if self.priced_for else None,
        }

    def to_json(self) -> str:
        """Return `to_dict()` as JSON."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        from ..report.rewrite import optimized_text

        return optimized_text(self)

    def __repr__(self) -> str:
        state = f"{self.chosen}, {len(self.rewrites)} rewrites" if self.chosen else "not yet run"
        return f"Optimized({type(self.original).__name__}: {state})"

    def __getattr__(self, name: str) -> Any:
        if "original" not in vars(self):  # it is being copied or unpickled
            raise AttributeError(name)
        value = getattr(self.original, name)
        if not callable(value) or getattr(value, "__self__", None) is not self.original:
            return value

        @functools.wraps(value)
        def through(*args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            return self if result is self.original else result  # model.eval() stays optimized

        return through

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self.original, name, value)


def _recreate(original: Callable[..., Any], options: OptimizeOptions, undone: bool) -> Optimized:
    """Return an `Optimized` that has not been prepared yet, or that stays undone."""
    optimized = Optimized(original, options)
    if undone:
        optimized.undo()
    return optimized
