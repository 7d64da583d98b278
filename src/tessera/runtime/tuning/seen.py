"""What one call of a function shows before it is tuned: whether gradients are kept, and which attention it takes.

Knobs that cannot matter are not searched: a compilation takes up to a minute, a look one call.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .arithmetic import ATTENTIONS, preferred
from .found import Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """`infers`: its modules ran without gradients and left their weights alone. `attentions`: worth preferring.

    `attends`: it calls torch's attention. As made without arguments: nothing was seen.
    """

    infers: bool = False
    attentions: tuple[str, ...] = ()
    attends: bool = False


def look(call: Callable[[], Any], reach: Reach) -> Seen:
    """Run the function once and watch. What the call changes is for the caller to put back."""
    weights = [t for m in reach.modules for t in (*m.parameters(), *m.buffers()) if not t.is_inference()]
    before = [t._version for t in weights]
    try:
        with _eagerly(), _gradients(reach) as kept, _attentions() as taken:
            call()
    except Exception:  # noqa: BLE001  (the user's function may fail in any way: the search's first trial says it)
        return Seen()
    same = before == [t._version for t in weights]
    infers = bool(kept) and not any(kept) and same
    return Seen(infers=infers, attentions=_new(taken), attends=bool(taken[None]))


@contextlib.contextmanager
def _eagerly() -> Iterator[None]:
    """What the user compiled runs as it was written: watched, it would be compiled once more."""
    import torch

    stance = getattr(torch.compiler, "set_stance", None) if "torch._dynamo" in sys.modules else None  # since torch 2.6
    with stance("force_eager") if stance is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _gradients(reach: Reach) -> Iterator[list[bool]]:
    """Whether gradients were on, at each call of an outermost module."""
    import torch

    found: list[bool] = []

    def note(module: Any, args: Any) -> None:
        found.append(torch.is_grad_enabled())

    handles = [m.register_forward_pre_hook(note) for m in reach.modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _attentions() -> Iterator[dict[str | None, list[int]]]:
    """The kernel of each attention, by what is preferred; None for nothing."""
    from torch.nn import attention, functional
    from torch.overrides import TorchFunctionMode

    if "set_priority" not in inspect.signature(attention.sdpa_kernel).parameters:  # before torch 2.6
        yield {None: []}
        return
    found: dict[str | None, list[int]] = {value: [] for value in (None, *ATTENTIONS)}

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is functional.scaled_dot_product_attention:
                for value, taken in found.items():
                    with preferred(value) if value is not None else contextlib.nullcontext():
                        taken.append(_kernel(*args, **kwargs))
            return func(*args, **kwargs)

    with Watch():
        yield found


def _kernel(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> int:  # fmt: skip
    """The kernel that torch chooses for these tensors."""
    import torch

    return int(torch._fused_sdp_choice(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    ))  # fmt: skip


def _new(taken: dict[str | None, list[int]]) -> tuple[str, ...]:
    """Preferences that lead to other kernels than nothing does, and than one another."""
    seen, found = [taken[None]], []
    for value, kernels in taken.items():
        if value is not None and kernels not in seen:
            seen.append(kernels)
            found.append(value)
    return tuple(found)
