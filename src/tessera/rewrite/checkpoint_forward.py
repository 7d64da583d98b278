"""The forward of a block that is recomputed in backward, as a whole or except for operators whose results are saved.

torch.utils.checkpoint does the work (`use_reentrant=False`, which keeps the state of the random numbers and autocast).
This module adds what torch leaves to its user: batch norms must not count a batch twice, caches of generation must not
grow twice, lists must be as they were the first time, and saved operators are identified by name and number.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..errors import RewriteError, did_you_mean
from ..graph.recorder import Recorder

if TYPE_CHECKING:
    from .checkpoint_search import BlockChoice, OpKey

# Seconds of the host that no operator shows: of a checkpointed call with its backward, and of an operator seen by the
# mode that saves selectively. From benchmarks/device/checkpointing.py --host-cost (a CPU, torch 2.13): 174 us a block,
# 16 us an operator in forward and 18 us when recomputed. They are charged to a capture as so many torch functions of
# 0.58 us, the host model's constant (estimate/data/host.json, function_s).
BLOCK_S, SELECTED_S, FUNCTION_S = 1.7e-4, 1.7e-5, 5.8e-7

# Arguments with which a layer of transformers gets the cache of generation. Forward appends to it, so a recomputed
# layer would append twice.
_CACHES = ("past_key_values", "past_key_value", "layer_past")


class AppliedPlan:
    """A model whose blocks recompute; leaving the context, or `undo()`, gives them their own forward back."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = list(modules)

    def undo(self) -> None:
        """Put the model back as it was; safe to call twice."""
        while self._modules:
            self._modules.pop().__dict__.pop("forward", None)

    def __enter__(self) -> AppliedPlan:
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()


def apply_choices(model: torch.nn.Module, choices: Mapping[str, BlockChoice]) -> AppliedPlan:
    """Replace the forward of every block that is not kept; after an error the model is as it was."""
    modules = dict(model.named_modules())
    recomputed = {name: choice for name, choice in choices.items() if choice.name != "keep"}
    missing = next((name for name in choices if name not in modules), None)
    if missing is not None:
        raise RewriteError(
            f"the plan has a block {missing!r}, {type(model).__name__} has not{did_you_mean(missing, modules)}",
            why="a plan belongs to the model it was made for",
            fix="make one for this model: checkpoint.plan(model, inputs)",
        )
    twice = next((name for name in recomputed if "forward" in modules[name].__dict__), None)
    if twice is not None:
        raise RewriteError(
            f"the forward of {twice!r} has already been replaced",
            why="a block that recomputes twice would only cost twice",
            fix="undo() what was applied before",
        )
    if recomputed and getattr(model, "is_gradient_checkpointing", False):
        raise RewriteError(
            f"{type(model).__name__} checkpoints its blocks itself",
            why="both together would recompute each block twice",
            fix="model.gradient_checkpointing_disable() first",
        )
    for name, choice in recomputed.items():
        modules[name].__dict__["forward"] = CheckpointedForward(modules[name].forward, choice.saves)
    return AppliedPlan([modules[name] for name in recomputed])


def unify_attention_name(name: str) -> str:
    """Return one name for all attention kernels among which torch chooses by device, dtype and mask."""
    return "attention" if name.startswith(("_scaled_dot_product", "sdpa", "scaled_dot_product")) else name


class SavePolicy:
    """The policy of one call of a block: it saves the operators in `saves` and recomputes the others."""

    def __init__(self, saves: frozenset[OpKey]) -> None:
        self._saves = saves
        # Older torch asks again while it recomputes, so those operators are counted apart.
        self._counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
        self._recorder = _find_recorder()

    def __call__(self, ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Answer torch, which asks for every operator of the block."""
        if not ctx.is_recompute:
            _charge_host(self._recorder, 2.0 * SELECTED_S)  # newer torch does not ask again, but runs its mode
        name = unify_attention_name(func.__name__.partition(".")[0])
        counts = self._counts[bool(ctx.is_recompute)]
        number = counts[name]
        counts[name] += 1
        return CheckpointPolicy.MUST_SAVE if (name, number) in self._saves else CheckpointPolicy.PREFER_RECOMPUTE


def _make_contexts(saves: frozenset[OpKey]) -> Any:
    """Return the two contexts of a selective checkpoint, with a policy that counts from zero."""
    return create_selective_checkpoint_contexts(SavePolicy(saves))


class CheckpointedForward:
    """Replaces `module.forward`.

    Without gradients, it is the forward itself. It is copied and pickled with its block.
    """

    def __init__(self, forward: Any, saves: frozenset[OpKey]) -> None:
        self.forward = forward
        self.saves = saves

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's forward and remember its inputs."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        kwargs = drop_caches(kwargs)
        options = {"context_fn": functools.partial(_make_contexts, self.saves)} if self.saves else {}
        if torch.compiler.is_compiling():
            # The compiler recomputes what it traced once: no Python runs twice, and nothing here may break its graph.
            run = functools.partial(self.forward, **kwargs) if kwargs else self.forward
            return checkpoint(run, *args, use_reentrant=False, **options)
        _charge_host(_find_recorder(), BLOCK_S)
        return checkpoint(_RepeatableForward(self.forward, kwargs), *args, use_reentrant=False, **options)


class _RepeatableForward:
    """A forward with its keyword arguments, to be run twice.

    The second run changes no statistics, and finds lists and dicts as they were in the first run, whatever was added to
    them since (the features of a DenseNet).
    """

    def __init__(self, forward: Any, kwargs: dict[str, Any]) -> None:
        self._forward, self._kwargs = forward, kwargs
        self._first: tuple[dict[int, Any], dict[str, Any]] | None = None

    def __call__(self, *args: Any) -> Any:
        if self._first is None:
            lists = {i: a for i, a in enumerate(args) if type(a) in (list, dict)}
            self._first = _copy_containers((lists, self._kwargs))
            return self._forward(*args, **self._kwargs)
        lists, kwargs = _copy_containers(self._first)
        with freeze_statistics(self._forward.__self__):
            return self._forward(*(lists.get(i, a) for i, a in enumerate(args)), **kwargs)


def _copy_containers(thing: Any) -> Any:
    """Make new lists, tuples and dicts around the same things."""
    return pytree.tree_map(lambda leaf: leaf, thing)


@contextlib.contextmanager
def freeze_statistics(block: torch.nn.Module) -> Iterator[None]:
    """Let batch norms of a block use the batch's statistics without updating the running ones."""
    # With a momentum of 0, the kernel writes the running statistics back unchanged. Passing none would change what the
    # kernel saves for backward, which torch checks against the first run.
    norms = [m for m in block.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm) and m.training]
    before = [(m, m.momentum, m._buffers.get("num_batches_tracked")) for m in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm._buffers["num_batches_tracked"] = None
    try:
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum = momentum
            norm._buffers["num_batches_tracked"] = count


def drop_caches(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Drop the cache of generation from keyword arguments, as transformers itself does when it checkpoints."""
    if not any(kwargs.get(name) is not None for name in _CACHES):
        return kwargs
    dropped = {name: None for name in _CACHES if name in kwargs}
    return {**kwargs, **dropped, **({"use_cache": False} if "use_cache" in kwargs else {})}


def _find_recorder() -> Recorder | None:
    """Return the capture that is recording, if there is one."""
    return next((m for m in _get_current_dispatch_mode_stack() if isinstance(m, Recorder)), None)


def _charge_host(recorder: Recorder | None, seconds: float) -> None:
    """Charge host time that no operator shows to the next operator."""
    if recorder is not None and recorder.active:
        recorder.functions += round(seconds / FUNCTION_S)
