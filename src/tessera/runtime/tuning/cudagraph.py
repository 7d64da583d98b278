"""A function captured as one CUDA graph: launched once, however many kernels it has.

Its results are in the graph's memory and the next call overwrites them, as with torch.compile's reduce-overhead. Tensor
arguments are copied into the graph's own tensors; everything else must stay as it was when captured.

A graph repeats the numbers it was captured with. So once a learning rate has changed between calls, graphs read it from
device memory. If any other optimizer setting changes, another graph is captured.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...rewrite import cudagraph
from ...rewrite.state import State
from .changes import move_steps, move_steps_back
from .parts import FunctionParts, NotApplicable

# These optimizers take a learning rate in device memory (torch's documentation of their `lr`); for others nothing is
# documented.
_TENSOR_RATE = ("Adam", "AdamW")


class GraphedFunction:
    """A function that is captured at the first call and replayed later; another shape or argument is captured anew.

    Every call does the function's work once, also the first: what warming up did to weights, optimizers and random
    numbers is undone before the capture, which itself runs nothing.
    """

    def __init__(self, call: Callable[..., Any], parts: FunctionParts) -> None:
        if not torch.cuda.is_available():
            raise NotApplicable("CUDA graphs need a CUDA device")
        self._call = call
        self._parts = parts
        self._optimizers = CapturableOptimizers(parts)
        self._graphs: dict[Any, tuple[Any, list[Any], Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._optimizers.ready:
            return self._call(*args, **kwargs)
        if self._optimizers.update_rates():
            self._graphs.clear()
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (spec, tuple(map(cudagraph.make_key, leaves)), self._optimizers.settings())
        entry = self._graphs.get(key)
        if entry is None:
            entry = self._graphs[key] = self._capture(leaves, spec)
        graph, static, result = entry
        for own, leaf in zip(static, leaves, strict=True):
            if torch.is_tensor(own) and own.data_ptr() != leaf.data_ptr():
                own.copy_(leaf, non_blocking=True)
        graph.replay()
        return result

    def _capture(self, leaves: list[Any], spec: Any) -> tuple[Any, list[Any], Any]:
        static = [self._make_static(leaf) for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(static, spec)
        call = functools.partial(self._call, *args, **kwargs)
        with self._optimizers.prepare():
            state, before = State(self._parts), (self._optimizers.settings(), self._optimizers.rates())
            with self._preserve_versions():
                try:
                    with warnings.catch_warnings():  # warming up is not captured, and is not meant to be
                        warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
                        cudagraph.warm_up(call)
                    if (self._optimizers.settings(), self._optimizers.rates()) != before:
                        raise NotApplicable("it changes the optimizer's settings, which a graph would not")
                finally:
                    state.restore()
            graph, result = self._record(call, state)
        return graph, static, result

    @contextlib.contextmanager
    def _preserve_versions(self) -> Iterator[None]:
        """Hide changes that are undone. If they were seen, each replay would make copies of weights again."""
        preserve = torch.autograd._unsafe_preserve_version_counter
        with contextlib.ExitStack() as stack:
            for tensor in self._parts.weights():
                if not tensor.is_inference():
                    stack.enter_context(preserve(tensor))
            yield

    def _record(self, call: Callable[[], Any], state: State) -> tuple[Any, Any]:
        try:
            return cudagraph.record_graph(call)
        except RuntimeError as exc:
            state.restore()  # gradients may point to the failed graph's memory
            # the second error only says that the capture ended
            first = exc.__context__ if isinstance(exc.__context__, RuntimeError) else exc
            raise NotApplicable(f"it cannot be captured: {(str(first).splitlines() or ['no message'])[0]}") from exc

    def _make_static(self, leaf: Any) -> Any:
        if not torch.is_tensor(leaf):
            return leaf
        if not leaf.is_cuda:
            raise NotApplicable("an argument is a tensor in host memory, which a graph would read only once")
        if leaf.requires_grad:
            raise NotApplicable("an argument requires a gradient, which the graph's copy of it would get")
        return leaf.clone()

    def release(self) -> None:
        """Free the graphs' memory, and restore the optimizers."""
        self._graphs.clear()
        self._optimizers.release()


class CapturableOptimizers:
    """The optimizers of a function, prepared for capture; `release` restores them."""

    def __init__(self, parts: FunctionParts) -> None:
        self._optimizers = parts.optimizers
        self._groups = [g for o in parts.optimizers for g in o.param_groups]
        if any("capturable" not in g for g in self._groups):
            raise NotApplicable("the optimizer cannot be captured: it has no `capturable`")
        self._before = [(g, g["capturable"]) for g in self._groups]
        self._moved: list[Any] = []
        self._tensors: list[Any] | None = None  # learning rates in device memory; None until a rate changes
        self._seen = self.rates()

    @property
    def ready(self) -> bool:
        """Return whether the optimizers have their state: a graph that makes it would make it in every replay."""
        return all(o.state for o in self._optimizers)

    def settings(self) -> tuple[Any, ...]:
        """Return the settings that a graph keeps fixed, without the learning rates."""
        free = ("params", "lr", "initial_lr", "capturable")
        items = [(k, v) for g in self._groups for k, v in g.items() if k not in free]
        return tuple((k, v) for k, v in items if isinstance(v, (int, float, str, tuple)))

    def update_rates(self) -> bool:
        """Set the learning rates that graphs read; return True if the existing graphs cannot read them."""
        rates = self.rates()
        if rates == self._seen:
            return False
        self._seen = rates
        if self._tensors is None:
            if any(type(o).__name__ not in _TENSOR_RATE for o in self._optimizers):
                raise NotApplicable("its learning rate changes, and a graph of this optimizer would keep the old one")
            self._tensors = [self._put_on_device(g) for g in self._groups]
            return True
        for group, tensor in zip(self._groups, self._tensors, strict=True):
            if tensor is not None:
                tensor.fill_(group["lr"])
        return False

    def rates(self) -> list[float | None]:
        """Return the learning rates as plain numbers; None for one that is a tensor, which a graph reads as it is."""
        return [g["lr"] if isinstance(g.get("lr"), (int, float)) else None for g in self._groups]

    def _put_on_device(self, group: Any) -> Any:
        if not isinstance(group["lr"], (int, float)):
            return None
        return torch.tensor(float(group["lr"]), dtype=torch.float32, device=group["params"][0].device)

    @contextlib.contextmanager
    def prepare(self) -> Iterator[None]:
        """Set `capturable` for warming up and capturing; step counts and changing rates are on the device meanwhile."""
        for group in self._groups:
            group["capturable"] = True
        for optimizer in self._optimizers:
            if move_steps(optimizer, to_device=True) and not any(optimizer is o for o in self._moved):
                self._moved.append(optimizer)
        plain = [g.get("lr") for g in self._groups]
        for group, tensor in zip(self._groups, self._tensors or [None] * len(plain), strict=True):
            if tensor is not None:
                group["lr"] = tensor
        try:
            yield
        finally:
            for group, rate in zip(self._groups, plain, strict=True):
                if rate is not None:
                    group["lr"] = rate

    def release(self) -> None:
        """Restore the optimizers."""
        for group, capturable in self._before:
            group["capturable"] = capturable
        move_steps_back(self._moved)
        self._moved.clear()
