"""Inputs of the same shapes with other data, to find what a variant repeats when the data changes.

A model that routes tokens, or drops padding, has inner shapes that depend on the data. For the next batch, code that
was compiled for some of these shapes is compiled again, and graphs are recorded again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .compile_events import CompileEvents, count_events

# The first _SETTLE calls with other data may compile code for any data; the next _LOOKED_AT calls should find it
# compiled.
_SETTLE, _LOOKED_AT = 2, 2
_ROWS = 4  # with fewer rows than this (the two rows of a list of edges), rows have different meanings
_MASK_DTYPES = (torch.bool, *(getattr(torch, name) for name in dir(torch) if name.startswith("float8")))


class OtherInputs:
    """Makes inputs with other data; false if nothing can be changed.

    Each element takes the value that another row has at the same place, so values stay in the range of their column (a
    feature's, an index's). With fewer rows, values change their order within a row. Not changed: booleans and integers
    of 0 and 1 (masks), sorted integers (positions, offsets), integers in few rows, and tensors that need a gradient.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._leaves, self._spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self._changing = {i for i, leaf in enumerate(self._leaves) if _may_change(leaf)}
        devices = {self._leaves[i].device for i in self._changing}
        self._random = {device: torch.Generator(device).manual_seed(0) for device in devices}

    def __bool__(self) -> bool:
        return bool(self._changing)

    @classmethod
    def find(cls, args: Sequence[Any], kwargs: Mapping[str, Any], call: Callable[..., Any]) -> OtherInputs | None:
        """Return other inputs for a call; None if nothing can be changed, or if the call does not take them."""
        others = cls(args, kwargs)
        try:
            if others:
                others.pass_next(call)
        except Exception:  # noqa: BLE001 (the user's program may refuse its inputs in any way)
            return None
        return others or None

    def make(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the next inputs."""
        leaves = [self._change(leaf) if i in self._changing else leaf for i, leaf in enumerate(self._leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs

    def pass_next(self, call: Callable[..., Any]) -> None:
        """Call with the next inputs."""
        args, kwargs = self.make()
        call(*args, **kwargs)

    def find_events(self, call: Callable[..., Any]) -> CompileEvents:
        """Return what calls compile and record, each with other data, once they should have settled."""
        before = CompileEvents()
        for i in range(_SETTLE + _LOOKED_AT):
            before = count_events() if i == _SETTLE else before
            self.pass_next(call)
        return count_events() - before

    def _change(self, leaf: torch.Tensor) -> torch.Tensor:
        rows, device = leaf.shape[0], leaf.device
        # drawn on the device, because a copy would wait
        drawn: dict[str, Any] = {"generator": self._random[device], "device": device}
        if rows < _ROWS or leaf.dim() == 1:
            changed = leaf.index_select(-1, torch.randperm(leaf.shape[-1], **drawn))
        else:
            flat = leaf.reshape(rows, -1)
            shift = torch.randint(rows, (flat.shape[1],), **drawn)
            at = (torch.arange(rows, device=device)[:, None] + shift) % rows
            changed = flat.gather(0, at).view_as(leaf)
        # Keep the layout: code would be compiled for another one.
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device).copy_(changed)


def _may_change(leaf: Any) -> bool:
    if type(leaf) is not torch.Tensor or not leaf.dim() or leaf.shape[-1] < 2 or leaf.requires_grad:
        return False
    if leaf.layout != torch.strided or leaf.dtype in _MASK_DTYPES or not all(leaf.stride()):
        return False
    if leaf.is_floating_point() or leaf.is_complex():
        return True
    if leaf.dim() > 1 and leaf.shape[0] < _ROWS:
        return False
    lowest, highest = torch.aminmax(leaf)
    return bool(lowest < 0 or highest > 1) and bool((leaf[..., 1:] < leaf[..., :-1]).any())
