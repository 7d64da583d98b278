"""Weights quantised once: `prepare(layer.weight.mT)`, and fp8 products with it cast their other operand alone.

What is kept is found by the weight's address, layout and version, and dropped when the weight goes. Every in-place
change that torch counts (an optimizer's step, `load_state_dict`) makes the copy stale, and it is made anew at the next
use; a write through `.data` or from another library is not counted and goes unseen: `forget` the weight after one.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from ..errors import ArgumentError

_kept: dict[tuple[Any, ...], _Kept] = {}
_lock = threading.Lock()


class _Kept:
    """A quantised weight, the version it was made of, and the tensor whose life it shares."""

    __slots__ = ("address", "owner", "scale", "values", "version")

    def __init__(self, owner: Any) -> None:
        self.owner = weakref.ref(owner)
        self.address, self.version = owner.data_ptr(), -1
        self.values: Any = None
        self.scale: Any = None


def prepare(b: torch.Tensor, precision: str = "fp8") -> None:
    """Keep the right operand of a product in fp8 (or `fp8_row`) from its first use on: one byte a weight more.

    `fp8_row` is the cheaper where the product multiplies by the scales of rows itself (`lowprec.rows_in_product`).
    """
    if not isinstance(b, torch.Tensor):
        raise ArgumentError(f"b is a {type(b).__name__}, not a tensor", fix="a weight, such as layer.weight.mT")
    if precision not in ("fp8", "fp8_row"):
        raise ArgumentError(f"precision={precision!r} needs no preparing", fix='"fp8" or "fp8_row"')
    if b.dim() != 2 or b.is_inference():
        raise ArgumentError(
            f"b has {b.dim()} dimensions" if b.dim() != 2 else "b is an inference tensor",
            why="a kept copy is told from a stale one by torch's count of changes to a matrix",
            fix="a weight of two dimensions, made outside torch.inference_mode",
        )
    owner = b if b._base is None else b._base
    key = _key(b, precision == "fp8_row")
    with _lock:
        _kept[key] = _Kept(owner)
    weakref.finalize(owner, _kept.pop, key, None)


def forget(b: torch.Tensor) -> None:
    """Drop what is kept of a weight."""
    with _lock:
        for by_row in (False, True):
            _kept.pop(_key(b, by_row), None)


def find(b: torch.Tensor, by_row: bool) -> _Kept | None:
    """The entry of a weight, to be filled or read; None for a tensor that nobody prepared."""
    if not _kept or b.is_inference():
        return None
    entry = _kept.get(_key(b, by_row))
    if entry is None:
        return None
    owner = entry.owner()
    if owner is None or owner.data_ptr() != entry.address:  # given other memory: somebody else may live there now
        return None
    return entry


def which(b: torch.Tensor) -> tuple[bool, bool]:
    """Whether a weight is kept in `fp8`, and in `fp8_row`."""
    return (find(b, False) is not None, find(b, True) is not None) if _kept else (False, False)


def _key(b: torch.Tensor, by_row: bool) -> tuple[Any, ...]:
    return (b.data_ptr(), tuple(b.shape), b.stride(), b.dtype, b.device, by_row)
