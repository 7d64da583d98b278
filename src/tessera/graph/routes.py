"""Which rows go where when the values do not exist: a mask of one expert among many is as full as all others.

A program that sends tokens to experts asks where `indices == expert` holds. Indices that come of an argmax or a top-k
over C scores are spread evenly: such a mask is 1/C full, and so is a row of a one-hot tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_CHOICES = frozenset({"argmax", "argmin", "topk", "max", "min", "multinomial"})
_COPIES = frozenset({"index", "clone", "_to_copy", "index_select"})


class Routes:
    """How full masks are, and among how many an index was chosen, by storage."""

    def __init__(self, id_of: Callable[[torch.Tensor], int]) -> None:
        self._id_of = id_of
        self._density: dict[int, float] = {}
        self._classes: dict[int, int] = {}

    def one_hot(self, tensor: torch.Tensor, classes: int) -> None:
        """A one-hot tensor of C classes is 1/C full."""
        self._density[self._id_of(tensor)] = 1.0 / max(1, classes)

    def density(self, tensor: torch.Tensor) -> float | None:
        """How full a mask is, None where nothing is known."""
        return self._density.get(self._id_of(tensor))

    def follow(self, short: str, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[torch.Tensor]) -> None:
        """After an operator: what its result has of what it was given."""
        if not outs or not args or not isinstance(args[0], torch.Tensor):
            return
        given, out = args[0], outs[0]
        if short in _CHOICES and outs[-1].dtype == torch.int64 and given.dim():
            self._classes[self._id_of(outs[-1])] = _among(short, given, args, kwargs)
        elif short in _COPIES and (self._density or self._classes):
            before, after = self._id_of(given), self._id_of(out)
            if before in self._density:
                self._density[after] = self._density[before]
            if before in self._classes:
                self._classes[after] = self._classes[before]
        elif short == "eq" and self._classes:
            classes = self._classes.get(self._id_of(given))
            if classes is not None and (not isinstance(args[1], torch.Tensor) or args[1].numel() == 1):
                self._density[self._id_of(out)] = 1.0 / max(1, classes)
        elif short == "any" and self._density:
            density = self._density.get(self._id_of(given))
            if density is not None:  # one of several choices, or of all
                self._density[self._id_of(out)] = min(1.0, density * given.numel() / max(1, out.numel()))


def _among(short: str, given: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Of how many a choice was made: the dimension that is gone through."""
    place = 2 if short == "topk" else 1
    dim = args[place] if len(args) > place else kwargs.get("dim", -1)
    return int(given.shape[dim] if isinstance(dim, int) and short != "multinomial" else given.shape[-1])
