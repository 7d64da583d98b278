"""Small tensors whose values are known although nothing is computed: positions, masks, lengths, counters.

Capture runs on meta tensors, which have shapes and no values. Programs ask some tensors for values all the same
(`mask.all()`, `lengths.max().item()`). Those come from integers the user gave or from factories such as arange, so
their operators are also run for real on small CPU twins; what cannot be known stays unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

MAX_KNOWN_FLOATS = 1 << 16
MAX_KNOWN_INTS = 1 << 21  # a boolean mask of 1024 x 1024 tokens, with room

_RANDOM = ("rand", "bernoulli", "normal", "uniform", "dropout", "exponential", "multinomial", "empty")


class Known:
    """Meta tensors with known values, until something unknown is written into their storage."""

    def __init__(self) -> None:
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._versions: dict[int, int] = {}

    def note(self, meta: torch.Tensor, value: torch.Tensor) -> None:
        """Remember what a meta tensor would hold."""
        if value.numel() <= (MAX_KNOWN_FLOATS if value.dtype.is_floating_point else MAX_KNOWN_INTS):
            key = meta.untyped_storage()._cdata
            self._values[meta] = (value, key, self._versions.get(key, 0))

    def note_small(self, twins: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """What a model keeps of small integers and single numbers: strides, positions, scales."""
        for real, meta in twins:
            small = real.numel() == 1 or (not real.dtype.is_floating_point and real.numel() <= MAX_KNOWN_FLOATS)
            if small and real.device.type == "cpu" and real.layout == torch.strided and not real.is_quantized:
                self.note(meta, real.detach())

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor: itself on the CPU, its twin if known, else None."""
        if tensor.device.type != "meta":
            return tensor
        value, key, version = self._values.get(tensor, (None, 0, 0))
        return value if value is not None and self._versions.get(key, 0) == version else None

    def spoil(self, tensor: torch.Tensor) -> None:
        """Something was written into this tensor's storage."""
        key = tensor.untyped_storage()._cdata
        self._versions[key] = self._versions.get(key, 0) + 1

    def follow(self, func: Any, args: Any, kwargs: Any, outs: list[torch.Tensor]) -> None:
        """After an operator ran on meta tensors: run it on the twins too where all its operands are known."""
        name = func._schema.name
        if any(word in name for word in _RANDOM) or not outs:
            return
        if sum(t.numel() for t in outs) > MAX_KNOWN_INTS:
            return
        if outs[0].dtype.is_floating_point and outs[0].numel() > MAX_KNOWN_FLOATS:
            return
        flat, spec = pytree.tree_flatten((args, kwargs))
        values: list[Any] = []
        for leaf in flat:
            if isinstance(leaf, torch.Tensor):
                leaf = self.value(leaf)  # noqa: PLW2901 - the twin takes the leaf's place
                if leaf is None:
                    return
            elif isinstance(leaf, torch.device):
                leaf = torch.device("cpu")  # noqa: PLW2901
            values.append(leaf)
        args, kwargs = pytree.tree_unflatten(values, spec)
        try:
            real = func(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError, NotImplementedError):
            return  # the program would have failed too, or not: values are a help, never a requirement
        found = [t for t in pytree.tree_leaves(real) if isinstance(t, torch.Tensor)]
        for meta, twin in zip(outs, found, strict=False):
            self.note(meta, twin)
