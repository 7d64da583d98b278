"""Whether a changed program computes what the original did: results, gradients, updates, on the same inputs and state.

What the runs change is put back (`State`, `Inputs`), and inputs must be changed alike. The original runs twice, with
other random numbers: what lies between these two is no fault of a change, and a compiler draws its own. How values are
compared: `reference.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, RewriteError
from ..graph.nested import find_leaves
from ..graph.surroundings import Surroundings, find_models
from .reference import GRADIENT, RESULT, TOLERANCE, UPDATE, Reference, steady
from .state import Inputs, State, memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """How one iteration of a model or a step is run, checked and measured.

    A "call" runs as a "step" does but is seen from outside alone: a replayed CUDA graph runs no hooks that would note
    gradients. `state` is put back after each run; where None, what was there before the run. `outside` are variables
    around the call that are put back as its arguments are.
    """

    call: Callable[..., Any]
    modules: tuple[torch.nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    mode: Literal["infer", "train", "step", "call"]
    state: State | None = None
    outside: Surroundings | None = None

    @classmethod
    def of(
        cls, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], mode: Literal["infer", "train"]
    ) -> Program:
        """A module in this mode; any other callable as a step, with the models and optimizers that it can reach."""
        if isinstance(call, torch.nn.Module):
            found = cls(call=call, modules=(call,), optimizers=(), mode=mode)
        else:
            outside = Surroundings(call)
            modules, optimizers = find_models(call, tuple(args), dict(kwargs))
            found = cls(
                call=call, modules=tuple(modules), optimizers=tuple(optimizers), mode="step", outside=outside
            )  # fmt: skip
            outside.skip_large(memory(found))
        if any(is_lazy(t) for m in found.modules for t in (*m.parameters(), *m.buffers())):
            raise ArgumentError(
                "the model has a lazy layer whose shape is not known yet",
                why="its parameters are made at its first call", fix="call the model once, then optimize it",
            )  # fmt: skip
        return found

    def run(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One iteration with `call` in the model's place; what it returned."""
        if self.mode == "infer":
            with torch.no_grad():
                return call(*args, **kwargs)
        if self.mode != "train":
            return call(*args, **kwargs)
        with torch.enable_grad():  # whoever trains may stand under no_grad while he prepares
            out = call(*args, **kwargs)
            scalar_of(out).backward()
        return out

    def reference(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], tolerance: float | None = None, *, retyped: bool = False
    ) -> Reference:
        """What the original does, to compare others with; see `Reference`."""
        with _formats_noted() as inside:  # autocast may stand in a forward, where nobody sees it
            first = self.observe(self.call, args, kwargs)
            try:
                other = self.observe(self.call, args, kwargs, seed=1)
            except Exception as e:
                raise not_again(e) from e
        first = steady(first, other)
        given = [*pytree.tree_leaves((tuple(args), dict(kwargs))), *(p for _, p in self._named("parameters"))]
        formats = [*inside, *(t.dtype for t in (*given, *first.values()) if isinstance(t, torch.Tensor))]
        formats += [torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        rounded = max((TOLERANCE.get(dtype, 0.0) for dtype in formats), default=0.0)
        plain = Reference(
            seen=first, tolerance=tolerance, retyped=retyped, numbers=max(TOLERANCE[torch.float32], rounded),
            decided=rounded,
        )  # fmt: skip
        spread = {v.where: v.relative for v in plain.verdicts(other)}
        return replace(plain, spread=spread, random=not plain.compare(other).ok)

    def observe(
        self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], seed: int = 0
    ) -> dict[str, Any]:
        """Run once and note every value that must not change: results, gradients, buffers, how parameters move.

        Also what became of the inputs and of the variables outside, where they were written into.
        """
        with self.untouched(seed) as state, self.inputs(args, kwargs, state) as inputs:
            for generator in inputs.generators:
                generator.manual_seed(seed)
            seen: dict[str, Any] = {}
            with self._gradients(seen, inputs):
                result = self.run(call, args, kwargs)
            seen |= {k: _copy(v) for k, v in find_leaves(result, RESULT).items()}
            seen |= inputs.changed()
            seen |= self._update(state)
            seen |= {n: b.detach().clone() for n, b in self._named("buffers") if self.mode != "infer" or state.wrote(b)}
        return seen

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any], state: State) -> Inputs:
        """Arguments and variables outside, kept for one run."""
        return Inputs(args, kwargs, self.outside, state.memory)

    def _named(self, what: Literal["parameters", "buffers"]) -> list[tuple[str, torch.Tensor]]:
        """All parameters that are trained, or all buffers, each once; of several models with the model's number.

        Optimizers may have parameters that no model has.
        """
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for i, module in enumerate(self.modules):
            for name, t in getattr(module, f"named_{what}")():
                if what == "buffers" or t.requires_grad:
                    found.setdefault(id(t), (f"{i}.{name}" if len(self.modules) > 1 else name, t))
        for optimizer in self.optimizers if what == "parameters" else ():
            for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                if p.requires_grad:
                    found.setdefault(id(p), (f"{type(optimizer).__name__}'s parameter {i}", p))
        return list(found.values())

    def _update(self, state: State) -> dict[str, torch.Tensor]:
        """How parameters moved: in all, or each where their gradients are not seen.

        The parameters themselves are not compared: Adam makes a full step of a gradient that is nothing but rounding,
        in one direction or the other.
        """
        parameters = self._named("parameters")
        if self.mode == "call" and self.optimizers:
            return {UPDATE + name: state.moved(p) for name, p in parameters}
        if self.mode != "step" or not parameters:
            return {}
        moved = torch.stack([_length(state.moved(p)) for _, p in parameters]).norm()
        return {"size of the update": moved.to(parameters[0][1].dtype.to_real())}

    @contextlib.contextmanager
    def _gradients(self, seen: dict[str, Any], inputs: Inputs) -> Iterator[None]:
        """Note every gradient when it is there: a step may clear it before it ends. Those of inputs count, too."""

        @torch.compiler.disable  # a compiled step would take its hooks in, too
        def note(name: str, parameter: torch.Tensor) -> None:
            if parameter.grad is not None:  # compiled code also says of a weight behind detach() that it has none
                seen[GRADIENT + name] = parameter.grad.detach().clone()

        watched = {}
        if self.mode in ("train", "step"):
            watched = {id(t): (name, t) for name, t in [*inputs.differentiable.items(), *self._named("parameters")]}
        for _, tensor in watched.values():
            tensor.grad = None
        hooks = [t.register_post_accumulate_grad_hook(functools.partial(note, name)) for name, t in watched.values()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def untouched(self, seed: int = 0) -> Iterator[State]:
        """Everything the body changes is put back: state, gradients, random generators."""
        state = self.state or State(self)
        try:
            for _, p in self._named("parameters") if self.mode != "call" else ():  # there they add up as they would
                p.grad = None
            torch.manual_seed(seed)
            yield state
        finally:
            state.restore(how=self.state is None)  # a state from before knows nothing of changes made since

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """All modules in eval mode; how each was before is put back."""
        flags = [(m, m.training) for root in self.modules for m in root.modules()]
        for root in self.modules:
            root.eval()
        try:
            yield
        finally:
            for module, training in flags:
                module.training = training


@contextlib.contextmanager
def _formats_noted() -> Iterator[set[torch.dtype]]:
    """The number formats of what modules return meanwhile."""
    found: set[torch.dtype] = set()

    def note(_module: Any, _args: Any, out: Any) -> None:
        found.update(leaf.dtype for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor))

    handle = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def first_line(error: Exception) -> str:
    """An error as a part of a sentence."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:160]}"


def not_again(error: Exception) -> RewriteError:
    """What to say of a program that ran, and fails when it runs again."""
    return RewriteError(
        "the program ran, and failed when it was run again",
        why=f"{first_line(error)}; it is run many times on the same inputs",
        fix="a step that works on one batch: leave data loaders, and schedules that come to an end, outside of it",
    )


def scalar_of(output: Any) -> torch.Tensor:
    """The model's own loss where it has one; else a weighted sum in which every element counts differently."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    tensors = [
        leaf for leaf in find_leaves(output, RESULT).values() if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    parts = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    weighted = [(t.float() * torch.arange(t.numel(), device=t.device).cos().view(t.shape)).sum() for t in parts]
    return torch.stack(weighted).sum() if weighted else torch.zeros((), requires_grad=True)


def _length(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor if tensor.is_complex() else tensor.float()).float()


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
