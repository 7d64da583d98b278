"""Cut a module between its blocks into the stages of a pipeline, which torch's schedules run.

Each stage runs the module's own forward. Blocks of other stages pass on their input. The last block before this stage's
own blocks returns what was received, and the first one after them ends the forward. So everything that the forward
computes before the blocks (masks, rotary tables) is computed on every stage, from the inputs, with parameters of no
size.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ..errors import ArgumentError
from .block_stack import BlockStack

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackTrace:
    """What a forward without values showed: the tensors between the blocks, and which parameters are used where."""

    boundaries: tuple[torch.Tensor, ...]
    tuple_size: int | None
    before: frozenset[str]
    after: frozenset[str]


class StackTracer:
    """A copy of a module without values, which tells the shapes between blocks for any inputs."""

    def __init__(self, module: nn.Module, stack: BlockStack) -> None:
        tensors = list(itertools.chain(module.parameters(), module.buffers()))
        found = detect_fake_mode(tensors)
        self._mode = found or FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode:
            twins = {id(t): _make_twin(t if found else self._mode.from_tensor(t)) for t in tensors}
        self._twin = copy.deepcopy(module, twins)
        self._blocks = list(self._twin.get_submodule(stack.path).children())
        self._path = stack.path
        self._known: dict[Any, StackTrace] = {}

    def trace(self, batch: Batch) -> StackTrace:
        """Return the trace for inputs of these shapes."""
        leaves, spec = pytree.tree_flatten(batch)
        key = (str(spec), *((x.shape, x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves))
        if key not in self._known:
            with self._mode, torch.enable_grad():
                leaves = [self._mode.from_tensor(x) if _is_real(x) else x for x in leaves]
                self._known[key] = self._run(*pytree.tree_unflatten(leaves, spec))
        return self._known[key]

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StackTrace:
        seen: list[tuple[Any, Any]] = []
        hooks = [b.register_forward_hook(functools.partial(self._note, seen), with_kwargs=True) for b in self._blocks]
        try:
            output = self._twin(*args, **kwargs)
        except ArgumentError:
            raise
        except Exception as e:  # raised by the module's own code
            raise _no_chain(f"its forward does not run without values: {type(e).__name__}: {str(e)[:160]}") from e
        finally:
            for hook in hooks:
                hook.remove()
        if len(seen) != len(self._blocks):
            raise _no_chain(f"{len(seen)} blocks ran of {len(self._blocks)} in {self._path or 'the sequence'}")
        for number, ((_, left), (right, _)) in enumerate(itertools.pairwise(seen)):
            if _first_tensor(left) is not right:
                raise _no_chain(f"block {number + 1} does not get what block {number} returned")
        last = seen[-1][1]
        ends = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad]
        return StackTrace(
            boundaries=(seen[0][0], *(_first_tensor(result) for _, result in seen)),
            tuple_size=len(last) if isinstance(last, tuple) else None,
            before=self._names_used([seen[0][0]]),
            after=self._names_used(ends),
        )

    def _note(self, seen: list[tuple[Any, Any]], block: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        hidden = find_hidden_state(args, kwargs)
        others = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x is not hidden]
        if any(x.requires_grad for x in others):
            raise _no_chain("its blocks share a second tensor that has a gradient (a bias, or the embedding)")
        if len(seen) == len(self._blocks) - 1:  # stop here: what follows shows the parameters after the blocks
            cut = _first_tensor(result).detach().requires_grad_()
            result = (cut, *result[1:]) if isinstance(result, tuple) else cut
        seen.append((hidden, result))
        return result

    def _names_used(self, results: Sequence[torch.Tensor]) -> frozenset[str]:
        named = dict(self._twin.named_parameters(remove_duplicate=False))
        distinct = list({id(p): p for p in named.values() if p.is_floating_point()}.values())
        results = [r for r in results if r.requires_grad]
        if not results:
            return frozenset()
        ones = [torch.ones_like(r) for r in results]
        gradients = torch.autograd.grad(results, distinct, ones, allow_unused=True, retain_graph=True)
        used = {id(p) for p, gradient in zip(distinct, gradients, strict=True) if gradient is not None}
        return frozenset(name for name, p in named.items() if id(p) in used)


def _make_twin(value: torch.Tensor) -> torch.Tensor:
    """Return the same tensor; a frozen parameter gets a gradient too, because gradients show where it is used."""
    return nn.Parameter(value.detach()) if isinstance(value, nn.Parameter) and value.is_floating_point() else value


def _is_real(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and detect_fake_mode(x) is None


def _no_chain(why: str) -> ArgumentError:
    return ArgumentError(
        "this module cannot be cut into the stages of a pipeline",
        why=why,
        fix="pp=1, or blocks that are called one after the other, each with what the one before returned",
    )


def find_hidden_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the first tensor that a block is given."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
    raise _no_chain("a block is called without a tensor")


def _first_tensor(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


# -- the stages --------------------------------------------------------------------------------------------------


class _StageEnd(BaseException):
    """Ends a forward after the last block of a stage. No `except Exception` of the module's own code stops it."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class AbsentBlock:
    """Stands for a block of another stage: it passes on its input or the received tensor, or ends the forward."""

    def __init__(self, tuple_size: int | None, *, ends: bool) -> None:
        self.tuple_size, self.ends = tuple_size, ends
        self.received: torch.Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = find_hidden_state(args, kwargs)
        if self.ends:
            raise _StageEnd(hidden)
        hidden = hidden if self.received is None else self.received
        return hidden if self.tuple_size is None else (hidden, *[None] * (self.tuple_size - 1))


@dataclass(kw_only=True)
class StagePart:
    """One stage on this rank: the module with its own blocks, from `first` up to but not including `last`."""

    module: nn.Module
    index: int
    first: int
    last: int
    shared: tuple[str, ...]
    entry: AbsentBlock | None = None


def choose_bounds(costs: Sequence[float], stages: int, *, end_cost: float = 0.0) -> list[int]:
    """Return where each stage begins (and the last ends), so that the most expensive stage costs least."""

    @functools.cache
    def place(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        if left == 1:
            return sum(costs[start:]) + end_cost, (start, len(costs))
        found: tuple[float, tuple[int, ...]] = (float("inf"), ())
        for stop in range(start + 1, len(costs) - left + 2):
            rest, bounds = place(stop, left - 1)
            found = min(found, (max(sum(costs[start:stop]), rest), (start, *bounds)))
        return found

    return list(place(0, stages)[1])


def cut_stages(
    module: nn.Module, stack: BlockStack, trace: StackTrace, *, indices: Sequence[int], stages: int
) -> list[StagePart]:
    """Return this rank's stages of a module, without what other stages hold; several for an interleaved pipeline."""
    named = dict(module.named_parameters(remove_duplicate=False))
    blocks = [block for _, block in stack.named_blocks()]
    if len(blocks) < stages:
        raise ArgumentError(
            f"{len(blocks)} blocks in {stack.path or 'the sequence'} are too few for {stages} stages of a pipeline",
            fix=f"pp x vp of at most {len(blocks)}",
        )
    costs = [float(sum(p.numel() for p in block.parameters())) for block in blocks]
    end = sum(p.numel() for name, p in named.items() if name in trace.after)
    bounds = choose_bounds(costs, stages, end_cost=float(end))
    shared = tuple(sorted(trace.before & trace.after))
    keep = {id(t): t for t in itertools.chain(module.parameters(), module.buffers())}
    parts = []
    for index in indices:
        part = module if len(indices) == 1 else copy.deepcopy(module, dict(keep))
        first, last = bounds[index], bounds[index + 1]
        absent = _remove_blocks(part.get_submodule(stack.path), first, last, trace.tuple_size)
        used = (trace.before if index == 0 else frozenset()) | (trace.after if index == stages - 1 else frozenset())
        outside = trace.before | trace.after
        lost = outside - used
        if index and stack.path:  # parameters without a gradient stay on the first stage
            lost |= {name for name in named if name not in outside and not name.startswith(f"{stack.path}.")}
        _remove_parameters(part, lost)
        entry = absent.get(first - 1)
        parts.append(StagePart(module=part, index=index, first=first, last=last, shared=shared, entry=entry))
    return parts


def _remove_blocks(container: nn.Module, first: int, last: int, tuple_size: int | None) -> dict[int, AbsentBlock]:
    """Remove the parameters of other stages' blocks. Attributes stay, because a forward may read them."""
    absent = {}
    for number, block in enumerate(container.children()):
        if not first <= number < last:
            absent[number] = AbsentBlock(tuple_size, ends=number == last)
            block.forward = absent[number]
            _remove_parameters(block, frozenset(name for name, _ in block.named_parameters(remove_duplicate=False)))
    return absent


def _remove_parameters(module: nn.Module, names: frozenset[str]) -> None:
    """Replace parameters of other stages by zeros that take no memory."""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        holder = module.get_submodule(parent)
        value = holder._parameters.pop(leaf)
        if value is not None:
            zeros = torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)
            holder.register_buffer(leaf, zeros, persistent=False)


def make_stage_forward(part: StagePart, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a stage: (received, inputs, targets) to the next stage's input, or to the loss.

    `run(module_forward, inputs, targets)` computes the loss of a microbatch.
    """
    forward = part.module.forward

    def run_stage(received: torch.Tensor, inputs: Batch, targets: Any) -> Any:
        if part.entry is not None:
            part.entry.received = received
        try:
            return run(forward, inputs, targets)
        except _StageEnd as end:
            return end.hidden
        finally:
            if part.entry is not None:
                part.entry.received = None

    return run_stage


def restrict_stack(stack: BlockStack, module: nn.Module) -> BlockStack:
    """Return the stack of blocks in a stage of the module."""
    return dataclasses.replace(stack, blocks=module.get_submodule(stack.path))
