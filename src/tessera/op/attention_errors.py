"""What is wrong with attention's arguments where torch has refused them without naming one."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from ..errors import ArgumentError
from . import arguments


def explain(refused: Exception, q: Any, k: Any, v: Any, scale: Any, mask: Any, gqa: bool) -> None:
    """Raise the error that names the argument torch stumbled over; return where none is found."""
    try:
        check_scale(scale)
        lead = _lead("k", k, q, gqa)
        _lead("v", v, q, gqa)
        if mask is not None:
            check_mask_dtype(q, mask)
            check_mask_shape(mask, (*lead, q.shape[-2], k.shape[-2]))
    except ArgumentError as e:
        raise e from refused


def check_scale(scale: Any) -> None:
    """`scale` is a number or None."""
    if scale is None or torch.compiler.is_compiling() or isinstance(scale, numbers.Real):
        return
    raise ArgumentError(f"op.flash_attention: scale={scale!r}", fix="a number, or None for 1/sqrt(dim)")


def check_mask_dtype(q: Any, mask: Any, *, tiled: bool = False) -> None:
    """The mask is boolean or floating, and without a tile of a dtype that torch takes."""
    if mask.dtype is torch.bool or mask.dtype in (q.dtype, torch.float32) or arguments.autocasts(q):
        return
    if tiled and mask.is_floating_point():
        return
    raise ArgumentError(
        f"op.flash_attention: attn_mask is {mask.dtype}",
        why=f"q is {q.dtype}: a mask is bool (True is seen), or added to the scores in q's dtype or fp32",
        fix=f"attn_mask.bool() or attn_mask.to({q.dtype})",
    )


def _lead(name: str, x: Any, q: Any, gqa: bool) -> tuple[int, ...]:
    """What the leading dimensions of q and another broadcast to; with grouped heads those of q."""
    given = (*x.shape[:-3], q.shape[-3]) if gqa and x.ndim > 2 and x.shape[-3] else x.shape[:-2]
    try:
        return tuple(torch.broadcast_shapes(q.shape[:-2], given))
    except RuntimeError as e:
        why = f"q is {arguments.shape(q)}: batches and heads are equal, or 1"
        raise ArgumentError(
            f"op.flash_attention: {name} is {arguments.shape(x)}", why=why, fix=f"expand {name}, or enable_gqa=True"
        ) from e


def check_mask_shape(mask: Any, scores: tuple[int, ...], least: int = 2) -> None:
    """The mask broadcasts to the scores, and has the dimensions that torch wants of it."""
    if mask.ndim < least or not arguments.broadcasts(mask, scores):
        raise ArgumentError(
            f"op.flash_attention: attn_mask is {arguments.shape(mask)}",
            why=f"the scores are {'x'.join(map(str, scores))}",
            fix="a mask of (queries, keys), or one that broadcasts to the scores",
        )
