"""`tessera.optimize`: apply the rewrites that pay, check that nothing changed, and say what was done.

::

    model = tessera.optimize(model, inputs)       # still callable, still a model: parameters(), state_dict(), eval()
    print(model.report())                         # what was rewritten, bytes and joules saved, the ways tried
    model = model.undo()                          # the original

    fast = tessera.optimize(train_step)           # a callable that does its own step

Rewrites are torch's own wherever it has them (Inductor's passes and fusion, CUDA graphs); ours come before them for
what they miss (`patterns.py`, `spectral.py`). Which of torch.compile's modes runs is decided by measuring.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ArgumentError, MeasurementError, MissingExtra, RewriteError, TesseraError, did_you_mean
from ..graph.rewrites import Rewrite, announce_rewrites

if TYPE_CHECKING:
    from ..device import Device
    from .candidates import Trial
    from .check import Program
    from .inductor import Pass
    from .prices import Host
    from .savings import Trace
    from .seen import Seen
    from .ways import Way

Mode = Literal["infer", "train"]
Launch = Literal["auto", "eager", "graph"]

# Iterations may take this long in all while kernels are looked at, and longer only where the budget has room.
_LOOK_S = 1.0


def optimize(
    model_or_step: Callable[..., Any],
    inputs: Any = None,
    *,
    mode: Mode = "infer",
    tolerance: float | None = None,
    device: str | Device | None = None,
    launch: Launch = "auto",
    explain: bool | Literal["modelled"] = True,
    budget_s: float = 120.0,
    ways: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Optimized:
    """Rewrite a model, or a callable that does its own step, so that it takes fewer joules; see `Optimized`.

    `inputs` are a tensor, a tuple of positional or a dict of keyword arguments; without them the first call's count.
    With `mode="infer"` a module runs without gradients; "train" compiles and checks the backward too. A callable that
    is no module runs as it is. `tolerance` is the relative Frobenius error allowed of results and gradients (by number
    format where None). `launch` restricts to ways with or without CUDA graphs, `ways` to the named ones. `device` is
    the chip savings are priced for: the one at hand where None. Compiling and measuring take about `budget_s` (0: take
    the first way that computes the same, measure nothing); `progress` hears what is being done. `explain=False` leaves
    the trace out and lets torch's compilation cache work; "modelled" prices it without a look at the kernels, which
    makes later launches of this process dearer.

    The program runs many times meanwhile. Models and optimizers it holds, the inputs and the variables around it (what
    it closes over, is bound to, or names in its module) are put back as they were. What a data loader or an iterator
    has handed out is gone: hand over a step that works on one batch.
    """
    if not callable(model_or_step):
        raise ArgumentError(
            f"model_or_step is {_described(model_or_step)}, which cannot be called",
            fix="optimize(model, inputs): an nn.Module or a function, then its inputs",
        )
    if mode not in ("infer", "train"):
        raise ArgumentError(f"no mode {mode!r}{did_you_mean(mode, ('infer', 'train'))}", fix="mode='infer' or 'train'")
    if tolerance is not None and not 0 < tolerance < 1:
        raise ArgumentError(f"tolerance={tolerance!r} is no relative error", fix="e.g. tolerance=1e-2")
    if explain not in (True, False, "modelled"):
        raise ArgumentError(f"explain={explain!r}", fix="True, False or 'modelled'")
    if isinstance(model_or_step, Optimized):
        model_or_step = model_or_step.undo()
    model_or_step = getattr(model_or_step, "_orig_mod", model_or_step)  # what torch.compile(model) wraps
    found = Optimized(
        model_or_step, mode=mode, tolerance=tolerance, device=device, launch=launch, explain=explain,
        budget_s=budget_s, ways=ways, progress=progress,
    )  # fmt: skip
    if inputs is not None:
        found.prepare(*_split(inputs))
    return found


def _described(value: Any) -> str:
    """In a few words, though it be a tensor of millions."""
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if isinstance(shape, tuple) else "")


def _split(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


class Optimized:
    """A rewritten program. It is called like the original, and everything else is the original's.

    Attributes and methods of the original pass through (`parameters()`, `state_dict()`, `train()`, `eval()`).
    `rewrites` says what was changed, `undone` what was tried and taken back with the reason, `ways` every way tried
    with its seconds and joules, `chosen` the one that runs, `priced_for` the chip savings are priced for, `trace` what
    they add up to. Compiled code belongs to one model: a copy, or one read from a pickle, is a copy of the original
    with the same options (a pickle leaves `progress` out), and its first call tries the ways anew.
    """

    def __init__(self, original: Callable[..., Any], **options: Any) -> None:
        vars(self).update(
            original=original, rewrites=[], undone=[], ways=[], chosen="", trace=None, notes=[], priced_for=None,
            _options=options, _call=None, _undone=False,
        )  # fmt: skip

    original: Callable[..., Any]
    rewrites: list[Rewrite]
    undone: list[Rewrite]
    ways: list[Way]
    chosen: str
    trace: Trace | None
    notes: list[str]
    priced_for: Device | None
    _options: dict[str, Any]
    _call: Callable[..., Any] | None
    _undone: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is None:
            self._prepare(args, kwargs)  # an error of the program's own stays what it is, as in any call of it
        announce_rewrites(self.rewrites)
        assert self._call is not None
        return self._call(*args, **kwargs)

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Try the ways on these inputs and keep the best; done by the first call where `optimize` had no inputs."""
        self._prepare(args, kwargs, explained=True)

    def _prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, explained: bool = False) -> None:
        try:
            import torch
        except ImportError as e:
            raise MissingExtra("torch", "torch", "tessera.optimize") from e

        from . import seen
        from .candidates import Trial
        from .check import Program
        from .ways import modes

        options, program = self._options, Program.of(self.original, args, kwargs, self._options["mode"])
        cuda = any(t.is_cuda for t in _tensors(program, args, kwargs))
        self.priced_for = _chip(options["device"], cuda)
        names = modes(program, options["launch"], options["ways"], cuda)
        trial = Trial(
            program=program, args=tuple(args), kwargs=dict(kwargs), tolerance=options["tolerance"],
            budget_s=options["budget_s"], say=options["progress"] or (lambda _line: None), explained=options["explain"],
        )  # fmt: skip
        slowed = bool(seen.LOOKS)  # before this one: of its own look it has a note
        try:
            best = trial.run(names, self._passes())
        except Exception as e:
            if not explained or trial.reference is not None or isinstance(e, TesseraError):
                raise
            raise _does_not_run(e) from e  # the original has not run through once
        if slowed and cuda:
            trial.notes.append(
                "a profiler ran in this process before: ways that launch were measured slower than alone"
            )
        self.ways, self.chosen, self.notes = trial.tried, best.name, trial.notes
        self._call = _as_called(program, best)
        self._explain(trial, best)
        if best.watch is not None:
            best.watch.closed = True
        for way in trial.tried:  # what was not chosen may go, with its graphs and their memory
            way.call = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _passes(self) -> list[Pass]:
        from .masks import masks
        from .patterns import attention
        from .spectral import spectral

        return [masks, attention, spectral(self.priced_for)]

    def _explain(self, trial: Trial, best: Way) -> None:
        from .ways import EAGER

        self.undone = [
            Rewrite(rule=f.rule, before=f.before, after=f.after, by="tessera", where=f.where, why=why)
            for f, why in best.undone
        ]
        if best.mode == EAGER:
            self.notes.append("no rewrite pays: the program runs as it is")
            return
        if best.watch is None:
            self.rewrites.append(_one_graph(best, self.ways))
        elif self._options["explain"]:
            from .savings import trace

            trial.settle(best)
            watch = best.watch.of_those_that_ran()
            self.trace = trace(
                watch, self.priced_for, replayed=best.replayed, eager_s=self._measured_here(),
                host=self._host(trial) if self.priced_for is not None else None,
                seen=self._look(trial, best) if watch.complete else None,
            )  # fmt: skip
            self.rewrites.extend(self.trace.rewrites)
            self.notes.extend(self.trace.notes)
        else:
            self.rewrites.extend(
                Rewrite(rule=f.rule, before=f.before, after=f.after, by="tessera", where=f.where, why="explain=False")
                for f in best.watch.found
            )

    def _measured_here(self) -> float | None:
        """Seconds of the eager program, where it ran on the chip that savings are priced for."""
        from .ways import EAGER

        eager = next((w.seconds for w in self.ways if w.mode == EAGER), None)
        return eager if self._options["device"] is None else None

    def _look(self, trial: Trial, best: Way) -> tuple[Seen, Seen] | None:
        """The kernels of some iterations, eager and as chosen; None elsewhere than here, else a note says why."""
        from .seen import look
        from .ways import EAGER

        eager_s, best_s = self._measured_here(), best.seconds
        if eager_s is None or best_s is None or best.call is None or self.priced_for is None:
            return None  # elsewhere, or nothing is to be measured
        if self._options["explain"] == "modelled":
            return None
        if not best.replayed:  # CUPTI stays, and slows every later launch of the process: device/cupti_after.py
            self.notes.append("savings are modelled alone: looking at the kernels would slow the launches of this way")
            return None
        if 2 * (eager_s + best_s) > max(_LOOK_S, trial.left_s):  # each is run to warm up and to be seen
            self.notes.append("savings are modelled alone: budget_s leaves no time to look at the kernels")
            return None
        seen = []
        try:
            eager_j = next((way.joules for way in self.ways if way.mode == EAGER), None)
            both_j = (eager_j, best.joules) if eager_j and best.joules else (None, None)  # of one basis, or neither
            for call, seconds, joules in zip((trial.program.call, best.call), (eager_s, best_s), both_j, strict=True):
                with trial.untouched():
                    seen.append(look(functools.partial(trial._iteration, call), seconds, joules))
        except MeasurementError as e:
            self.notes.append(f"savings are modelled alone: {e.what} ({e.why})")
            return None
        self.notes.append("a profiler looked at the kernels; launches of this process cost its host more since")
        return seen[0], seen[1]

    def _host(self, trial: Trial) -> Host | None:
        """What eager Python does beside dispatching, by a capture on meta tensors."""
        from ..graph.capture import capture
        from .prices import Host

        mode: Any = "infer" if trial.program.mode == "step" else trial.program.mode
        try:
            graph = capture(self.original, trial.kwargs or trial.args, mode=mode)
        except TesseraError as e:
            self.notes.append(f"the host's work beside dispatching is not known: {e.what}")
            return None
        ops = [op for op in graph.ops if op.phase != "optimizer" or trial.program.mode == "step"]
        return Host(modules=sum(op.host_modules for op in ops), functions=sum(op.host_functions for op in ops))

    def undo(self) -> Callable[..., Any]:
        """The original, untouched; this object runs it from now on too."""
        vars(self).update(_call=self.original, rewrites=[], chosen="eager", _undone=True)
        return self.original

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimized:
        import copy

        twin = _anew(copy.deepcopy(self.original, memo), self._options, self._undone)
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return _anew, (self.original, {**self._options, "progress": None}, self._undone)

    def report(self) -> str:
        """What was done, as text."""
        from ..report.optimize import text

        return text(self)

    def to_json(self) -> dict[str, Any]:
        """Plain data: the rewrites, those undone, the ways tried."""
        import dataclasses

        def row(way: Way) -> dict[str, Any]:
            plain = ("name", "compile_s", "seconds", "joules", "error_j", "why")
            error = way.verdict.relative if way.verdict else None
            return {**{key: getattr(way, key) for key in plain}, "relative_error": error}

        return {
            "chosen": self.chosen, "rewrites": [dataclasses.asdict(r) for r in self.rewrites],
            "undone": [dataclasses.asdict(r) for r in self.undone], "ways": [row(w) for w in self.ways],
            "notes": list(self.notes), "device": self.priced_for.id if self.priced_for else None,
        }  # fmt: skip

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        state = f"{self.chosen}, {len(self.rewrites)} rewrites" if self.chosen else "not yet run"
        return f"Optimized({type(self.original).__name__}: {state})"

    def __getattr__(self, name: str) -> Any:
        if "original" not in vars(self):  # being copied or unpickled
            raise AttributeError(name)
        found = getattr(self.original, name)
        if not callable(found) or getattr(found, "__self__", None) is not self.original:
            return found

        @functools.wraps(found)
        def through(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            return self if result is self.original else result  # model.eval() stays optimized

        return through

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self.original, name, value)


def _anew(original: Callable[..., Any], options: dict[str, Any], undone: bool) -> Optimized:
    """One that has not been tried yet, or that stays undone."""
    found = Optimized(original, **options)
    if undone:
        found.undo()
    return found


def _does_not_run(error: Exception) -> RewriteError:
    from .check import first_line

    return RewriteError(
        "the program does not run on these inputs",
        why=first_line(error),
        fix="inputs it can be called with: a tensor, a tuple of positional or a dict of keyword arguments",
    )


def _as_called(program: Program, best: Way) -> Callable[..., Any]:
    import torch

    call = best.call
    assert call is not None
    if program.mode != "infer":
        return call

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return call(*args, **kwargs)

    return run


def _tensors(program: Program, args: Any, kwargs: Any) -> list[Any]:
    import torch
    from torch.utils import _pytree as pytree

    given = [leaf for leaf in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    return given + [p for m in program.modules for p in m.parameters()]


def _chip(device: str | Device | None, cuda: bool) -> Device | None:
    """The chip savings are priced for: the one named, else the one at hand where the catalogue has it."""
    from ..device import Device
    from ..hardware import lookup

    if isinstance(device, Device):
        return device
    if device is not None:
        return lookup(device)
    if not cuda:
        return None
    import torch

    from ..hardware import identify_board

    try:
        return identify_board(torch.cuda.get_device_name())
    except TesseraError:
        return None


def _one_graph(best: Way, tried: Sequence[Way]) -> Rewrite:
    """The eager program replayed: what it saves was measured beside it."""
    eager = tried[0]
    saved_s = eager.seconds - best.seconds if eager.seconds and best.seconds else None
    saved_j = eager.joules - best.joules if eager.joules and best.joules else None
    errors = [e for e in (eager.error_j, best.error_j) if e is not None]
    return Rewrite(
        rule="cuda_graph", before="eager launches", after="replayed", by="tessera", saved_s=saved_s, saved_j=saved_j,
        saved_error_j=sum(e * e for e in errors) ** 0.5 if saved_j is not None else None, saved_bytes=0.0,
        basis="measured" if saved_s is not None else "modelled",
    )  # fmt: skip
