"""Run a program and observe what it does: results, gradients and updates, on the same inputs and state each time.

What the runs change is put back (`state.py`). The original runs twice with different random numbers, and a difference
between these two runs is not blamed on a rewrite. `compare.py` compares the values.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, RewriteError
from ..graph.nested import find_leaves
from ..graph.surroundings import Surroundings, find_models
from .compare import GRADIENT, RESULT, TOLERANCE, UPDATE, Reference, drop_variations
from .state import Inputs, State, list_addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One iteration of a model or a step: how it is run and observed.

    A "call" runs like a "step", but is seen from outside only, because a replayed CUDA graph runs no hooks that would
    note gradients. `state` is put back after each run; if it is None, what was there before the run is put back.
    `outside` are variables around the call that are put back as its arguments are.
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
        """Make a program of a module in this mode, or of a callable with the models and optimizers it works with."""
        if isinstance(call, torch.nn.Module):
            program = cls(call=call, modules=(call,), optimizers=(), mode=mode)
        else:
            modules, optimizers = find_models(call, tuple(args), dict(kwargs))
            around = Surroundings(call)
            program = cls(call=call, modules=tuple(modules), optimizers=tuple(optimizers), mode="step", outside=around)
            around.skip_large(list_addresses(program))
        if any(is_lazy(t) for m in program.modules for t in (*m.parameters(), *m.buffers())):
            raise ArgumentError(
                "the model has a lazy layer whose shape is not known yet",
                why="its parameters are made at its first call",
                fix="call the model once, then optimize it",
            )
        return program

    def run(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one iteration with `call` in the model's place, and return what it returned."""
        if self.mode == "infer":
            with torch.no_grad():
                return call(*args, **kwargs)
        if self.mode != "train":
            return call(*args, **kwargs)
        with torch.enable_grad():  # the caller may be under no_grad while preparing
            out = call(*args, **kwargs)
            make_scalar(out).backward()
        return out

    def wrap(self, call: Callable[..., Any] | None) -> Callable[..., Any]:
        """Return `call` in the model's place as its user calls it: in mode "infer" without gradients."""
        assert call is not None
        return torch.no_grad()(call) if self.mode == "infer" else call

    def make_reference(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], tolerance: float | None = None, *, retyped: bool = False
    ) -> Reference:
        """Run the original twice and return the reference that variants are compared with."""
        with _note_formats() as formats:  # autocast may be inside a forward
            first = self.observe(self.call, args, kwargs)
            try:
                other = self.observe(self.call, args, kwargs, seed=1)
            except Exception as e:
                raise cannot_repeat(e) from e
        first = drop_variations(first, other)
        inputs = [*pytree.tree_leaves((tuple(args), dict(kwargs))), *(p for _, p in self._list_named("parameters"))]
        formats |= {t.dtype for t in (*inputs, *first.values()) if isinstance(t, torch.Tensor)}
        formats |= {torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}
        rounding = max((TOLERANCE.get(dtype, 0.0) for dtype in formats), default=0.0)
        plain = Reference(
            observed=first,
            tolerance=tolerance,
            retyped=retyped,
            float_tolerance=max(TOLERANCE[torch.float32], rounding),
            exact_tolerance=rounding,
        )
        spread = {c.where: c.relative for c in plain.compare_each(other)}
        return replace(plain, spread=spread, random=not plain.compare(other).ok)

    def observe(
        self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], seed: int = 0
    ) -> dict[str, Any]:
        """Run once and return every value that must not change: results, gradients, buffers, updates of parameters.

        Inputs and outside variables are included if the run wrote into them.
        """
        with self.restoring(seed) as state, self.save_inputs(args, kwargs, state) as inputs:
            for generator in inputs.generators:
                generator.manual_seed(seed)
            observed: dict[str, Any] = {}
            with self._note_gradients(observed, inputs):
                result = self.run(call, args, kwargs)
            observed |= {k: _copy(v) for k, v in find_leaves(result, RESULT).items()}
            observed |= inputs.find_changes()
            observed |= self._measure_update(state)
            buffers = [(n, b) for n, b in self._list_named("buffers") if self.mode != "infer" or state.has_changed(b)]
            observed |= {name: buffer.detach().clone() for name, buffer in buffers}
        return observed

    def save_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any], state: State) -> Inputs:
        """Save arguments and outside variables for one run."""
        return Inputs(args, kwargs, self.outside, state.memory)

    def _list_named(self, what: Literal["parameters", "buffers"]) -> list[tuple[str, torch.Tensor]]:
        """Return all trained parameters (also those that only optimizers have) or all buffers, each once."""
        named: dict[int, tuple[str, torch.Tensor]] = {}
        for i, module in enumerate(self.modules):
            for name, t in getattr(module, f"named_{what}")():
                if what == "buffers" or t.requires_grad:
                    named.setdefault(id(t), (f"{i}.{name}" if len(self.modules) > 1 else name, t))
        for optimizer in self.optimizers if what == "parameters" else ():
            for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                if p.requires_grad:
                    named.setdefault(id(p), (f"{type(optimizer).__name__}'s parameter {i}", p))
        return list(named.values())

    def _measure_update(self, state: State) -> dict[str, torch.Tensor]:
        """Return how far the parameters moved in all, or each one's update if gradients are not observed.

        The parameters themselves are not compared: Adam turns a gradient that is only rounding into a full step, in one
        direction or the other.
        """
        parameters = self._list_named("parameters")
        if self.mode == "call" and self.optimizers:
            return {UPDATE + name: state.get_update(p) for name, p in parameters}
        if self.mode != "step" or not parameters:
            return {}
        lengths = [_length(state.get_update(p)) for _, p in parameters]
        return {"size of the update": torch.stack(lengths).norm().to(parameters[0][1].dtype.to_real())}

    @contextlib.contextmanager
    def _note_gradients(self, observed: dict[str, Any], inputs: Inputs) -> Iterator[None]:
        """Note every gradient as soon as it exists, those of inputs too: a step may clear it before the step ends."""

        @torch.compiler.disable  # a compiled step would include the hooks in its code
        def note(name: str, parameter: torch.Tensor, *_: Any) -> None:
            if parameter.grad is not None:  # compiled code also calls this for a weight behind detach()
                observed[GRADIENT + name] = parameter.grad.detach().clone()

        if self.mode not in ("train", "step"):
            yield
            return
        named = [*inputs.differentiable.items(), *self._list_named("parameters")]
        watched = {id(t): (name, t) for name, t in named}
        for _, tensor in watched.values():
            tensor.grad = None
        # Hooks are registered on the node that adds a gradient up, and go with that node. Hooks of the tensor itself
        # would stay for good, as an empty list that every later backward pass reads: Python cannot remove it (torch
        # 2.11 to 2.13).
        nodes = [(get_gradient_edge(t).node, name, t) for name, t in watched.values()] if self.mode == "step" else []
        hooks = [node.register_hook(functools.partial(note, name, t)) for node, name, t in nodes]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if self.mode == "train":  # nothing has cleared the gradients
            for name, tensor in watched.values():
                note(name, tensor)

    @contextlib.contextmanager
    def restoring(self, seed: int = 0) -> Iterator[State]:
        """Put back everything that the body changes: state, gradients, random generators."""
        state = self.state or State(self)
        try:
            for _, p in self._list_named("parameters") if self.mode != "call" else ():  # a "call" may add gradients up
                p.grad = None
            torch.manual_seed(seed)
            yield state
        finally:
            state.restore(flags=self.state is None)  # a state from earlier knows nothing of flags changed since then

    @contextlib.contextmanager
    def in_eval_mode(self) -> Iterator[None]:
        """Put all modules in eval mode for the body."""
        flags = [(m, m.training) for root in self.modules for m in root.modules()]
        for root in self.modules:
            root.eval()
        try:
            yield
        finally:
            for module, training in flags:
                module.training = training


@contextlib.contextmanager
def _note_formats() -> Iterator[set[torch.dtype]]:
    """Collect the number formats of what modules return in the body."""
    formats: set[torch.dtype] = set()

    def note(_module: Any, _args: Any, out: Any) -> None:
        formats.update(leaf.dtype for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor))

    handle = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        yield formats
    finally:
        handle.remove()


def first_line(error: Exception) -> str:
    """Return an error as part of a sentence."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:160]}"


def cannot_repeat(error: Exception) -> RewriteError:
    """Return the error for a program that ran once and fails when it runs again."""
    return RewriteError(
        "the program ran, and failed when it was run again",
        why=f"{first_line(error)}; it is run many times on the same inputs",
        fix="a step that works on one batch: leave data loaders, and schedules that come to an end, outside of it",
    )


def make_scalar(output: Any) -> torch.Tensor:
    """Return the model's own loss if it has one, else a weighted sum in which every element counts differently."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    leaves = find_leaves(output, RESULT).values()
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    parts = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    weighted = [(t.float() * torch.arange(t.numel(), device=t.device).cos().view(t.shape)).sum() for t in parts]
    return torch.stack(weighted).sum() if weighted else torch.zeros((), requires_grad=True)


def _length(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor if tensor.is_complex() else tensor.float()).float()


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
