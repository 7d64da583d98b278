"""The forward of a block that is recomputed in backward, in whole or but for the operators whose results are saved.

torch.utils.checkpoint does the work (`use_reentrant=False`, which keeps the state of the random numbers and autocast).
Around it stand the things it leaves to its user: batch norms must not count a batch twice, caches of generation must
not grow twice, lists must not have grown in between, and which operator is saved is said by name and number.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..graph.recorder import Recorder

Key = tuple[str, int]
"""An operator of a block: its name without namespace and overload, and the how-manieth of that name (from 0)."""

# Host seconds that no operator shows: a checkpointed call with its backward, and an operator seen by the mode that
# saves selectively. By benchmarks/device/checkpointing.py --host-cost (a CPU, torch 2.13): 174 us a block, 16 us an
# operator in forward and 18 when recomputed. Charged to a capture in torch functions of 0.58 us, the host model's
# constant (estimate/data/host.json, function_s).
BLOCK_S, SELECTED_S, FUNCTION_S = 1.7e-4, 1.7e-5, 5.8e-7

# What a layer of transformers is handed for generation: appended to in forward, so twice when recomputed.
_CACHES = ("past_key_values", "past_key_value", "layer_past")


def attention_name(name: str) -> str:
    """One name for the kernels torch may choose among: which it is depends on device, dtype and mask."""
    return "attention" if name.startswith(("_scaled_dot_product", "sdpa", "scaled_dot_product")) else name


class Saving:
    """The policy of one call of a block: saves the operators of `saves`, recomputes the others."""

    def __init__(self, saves: frozenset[Key]) -> None:
        self._saves = saves
        # Older torch asks again while it recomputes: counted apart.
        self._seen: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
        self._recorder = _recorder()

    def __call__(self, ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """What torch asks for every operator of the block."""
        if not ctx.is_recompute:
            charge(self._recorder, 2.0 * SELECTED_S)  # newer torch does not ask again, but runs its mode all the same
        name = attention_name(func.__name__.partition(".")[0])
        seen = self._seen[bool(ctx.is_recompute)]
        nth = seen[name]
        seen[name] += 1
        return CheckpointPolicy.MUST_SAVE if (name, nth) in self._saves else CheckpointPolicy.PREFER_RECOMPUTE


def contexts(saves: frozenset[Key]) -> Any:
    """The two contexts of a selective checkpoint, with a policy that counts from zero."""
    return create_selective_checkpoint_contexts(Saving(saves))


class Checkpointed:
    """Stands in for `module.forward`. Without gradients it is the forward itself. Copies and pickles with its block."""

    def __init__(self, forward: Any, saves: frozenset[Key]) -> None:
        self.forward = forward
        self.saves = saves

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's forward, remembered by its inputs."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        kwargs = without_cache(kwargs)
        options = {"context_fn": functools.partial(contexts, self.saves)} if self.saves else {}
        if torch.compiler.is_compiling():
            # The compiler recomputes what it traced once: nothing runs twice, and nothing here may break its graph.
            run = functools.partial(self.forward, **kwargs) if kwargs else self.forward
            return checkpoint(run, *args, use_reentrant=False, **options)
        charge(_recorder(), BLOCK_S)
        return checkpoint(_Runs(self.forward, kwargs), *args, use_reentrant=False, **options)


class _Runs:
    """A forward with its keyword arguments, to be run twice.

    The second time changes no statistics, and finds lists and dicts as they were the first time, whatever was put into
    them since (the features of a DenseNet).
    """

    def __init__(self, forward: Any, kwargs: dict[str, Any]) -> None:
        self._forward, self._kwargs = forward, kwargs
        self._before: tuple[dict[int, Any], dict[str, Any]] | None = None

    def __call__(self, *args: Any) -> Any:
        if self._before is None:
            self._before = (
                {i: _copied(a) for i, a in enumerate(args) if type(a) in (list, dict)},
                {name: _copied(a) for name, a in self._kwargs.items()},
            )
            return self._forward(*args, **self._kwargs)
        held, kwargs = self._before
        with still(self._forward.__self__):
            return self._forward(*(_copied(held.get(i, a)) for i, a in enumerate(args)), **_copied(kwargs))


def _copied(thing: Any) -> Any:
    """New lists and dicts around the same things."""
    if type(thing) is list:
        return [_copied(item) for item in thing]
    return {key: _copied(item) for key, item in thing.items()} if type(thing) is dict else thing


@contextlib.contextmanager
def still(block: torch.nn.Module) -> Iterator[None]:
    """Batch norms of a block use the batch's statistics without adding them to the running ones."""
    # With a momentum of 0 the kernel writes the running statistics as they are. To hand it none would change what it
    # saves for backward, which torch checks against the first run.
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


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments without the cache of generation, as transformers itself does when it checkpoints."""
    if not any(kwargs.get(name) is not None for name in _CACHES):
        return kwargs
    dropped = {name: None for name in _CACHES if name in kwargs}
    return {**kwargs, **dropped, **({"use_cache": False} if "use_cache" in kwargs else {})}


def _recorder() -> Recorder | None:
    """The capture this runs in, if it does."""
    return next((m for m in _get_current_dispatch_mode_stack() if isinstance(m, Recorder)), None)


def charge(recorder: Recorder | None, seconds: float) -> None:
    """Python of the host that no operator shows, put on the account of the next one."""
    if recorder is not None and recorder.active:
        recorder.functions += round(seconds / FUNCTION_S)
