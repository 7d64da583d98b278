"""Masks that attention adds to its scores, made such that gradients of queries without a key are right.

Fused backward passes, torch's and ours, make probabilities again from the logarithm of their sum. In the row of a query
that sees no key it stands beside the mask's -1e9, where fp32 has no room for it: each probability comes out as 1, and
gradients as many times too large as there are keys (torch 2.13 on a CPU; not yet measured on a GPU). A softmax
does not change if a row is shifted, so such rows are shifted to zero. No value is looked at, so nothing waits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from .eager import differentiated, transformed, unseen

_FAR = 1024.0  # beyond it a sum's logarithm, kept in fp32 beside such a number, is wrong by 6e-5 and more
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class _Kept(NamedTuple):
    of: tuple[Any, ...]
    levelled: TensorWeakRef


# By the tensor, or the one it is a view of: layers share their mask, and each would save a copy for its backward pass.
# Only as long as one of them has saved it: a mask may be written where no version tells (by numpy, `.data`, the replay
# of a graph), and one that lives long would have a copy for ever.
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def levelled(mask: Any, q: Any, k: Any, v: Any, causal: bool) -> Any:
    """The mask, rows that lie far from zero shifted there; itself where no gradient is to come."""
    if mask.dtype not in _DTYPES or not (mask.ndim and k.shape[-2] and q.shape[-2]):
        return mask
    if not (differentiated(q, k, v, mask) or transformed()):
        return mask
    sizes = (q.shape[-2], k.shape[-2]) if causal else None
    if mask.requires_grad:
        return _level(mask, sizes)
    found = _shared(mask, sizes) if _is_shareable(mask) else _level(_unexpanded(mask), sizes)
    full = mask.shape if sizes is None else torch.broadcast_shapes(mask.shape, sizes)
    return found if found.shape == full else found.expand(full)


def _is_shareable(mask: Any) -> bool:
    if not unseen(mask) or mask.is_inference():
        return False
    # A graph under capture makes its own: at a replay there may be other values in the mask.
    return not (mask.is_cuda and torch.cuda.is_current_stream_capturing())


def _shared(mask: Any, sizes: tuple[int, int] | None) -> Any:
    base = mask if mask._base is None else mask._base
    stream = torch.cuda.current_stream(mask.device) if mask.is_cuda else None  # another's need not be done yet
    of = (mask._version, mask.data_ptr(), mask.dtype, mask.shape, mask.stride(), sizes, stream)
    kept = _kept.get(base)
    found = kept.levelled() if kept is not None and kept.of == of else None
    if found is None:
        found = _level(_unexpanded(mask), sizes)
        _kept[base] = _Kept(of, TensorWeakRef(found))
    return found


def _unexpanded(mask: Any) -> Any:
    """Without what `expand` repeats: that has no memory, and a difference would."""
    for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if stride == 0 and size > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _level(mask: Any, sizes: tuple[int, int] | None) -> Any:
    seen = mask.detach()
    if sizes is not None:  # causal: what lies behind a query does not count for its row
        seen = seen.masked_fill(~torch.ones(sizes, dtype=torch.bool, device=mask.device).tril(), -math.inf)
    most, limits = seen.amax(-1, keepdim=True), torch.finfo(mask.dtype)
    # The difference of numbers that near each other is exact, and others do not count in the softmax.
    return mask - torch.where(most.abs() < _FAR, 0.0, most.clamp(limits.min, limits.max))
