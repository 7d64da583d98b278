"""`flash_attention`: torch's best backend or, with a tile, our Triton kernel of that tile.

Layouts and meaning are those of `torch.nn.functional.scaled_dot_product_attention`. For what our kernel cannot do
(masks, dropout, broadcasting), torch's runs, and a warning says so.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documents write it
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ..errors import ArgumentError, check_choice
from ..stream import Stream
from . import arguments, hints, tile
from .dispatch import in_transform, is_unobserved, needs_gradient
from .kernels import pad_head

DTYPE_OF = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_TILE = (128, 64)  # used where a precision needs our kernel and no tile is given
MOST_DIM = 256


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    tile_shape: Sequence[int] | None = None,
    precision: str | None = None,
    stream: Stream | None = None,
) -> Any:
    """Return softmax(q k^T * scale) v without storing the scores; `scale` is 1/sqrt(dim) by default.

    `tile_shape=(BM, BN)` or `(BM, BN, D)` runs our kernel with BM queries and BN keys at a time. `precision` ("bf16",
    "fp16", "fp32") casts q, k and v and gives the result in q's dtype; "tf32" multiplies fp32 tensors by our kernel's
    TF32. `enable_gqa`: k and v have fewer heads, each shared by a group of q's heads.

    Raises TileError for a tile that does not fit the chip, ArgumentError for any other argument that does not fit.
    """
    _check(q, k, v, attn_mask, dropout_p, scale, enable_gqa)
    if not torch.compiler.is_compiling():  # torch.compile cannot trace a context variable: hints do not apply there
        asked = hints.current()
        tile_shape = tile_shape or asked.tiles.get("flash_attention")
        precision = precision or asked.precisions.get("flash_attention")
    with arguments.use_stream(stream, q, k, v, attn_mask):
        dtype, autocast = q.dtype, arguments.use_stream(None)
        if precision is not None:
            q, k, v, attn_mask = _cast(q, k, v, attn_mask, precision)
            autocast = arguments.without_autocast(q)
        if precision == "tf32" and tile_shape is None and q.is_cuda:  # torch multiplies fp32 heads as fp32
            tile_shape = DEFAULT_TILE
        refused = tile_shape is not None and _why_without_tile(q, k, v, attn_mask, dropout_p)
        if refused:
            tile.warn_once(f"op.flash_attention: tile_shape={tile_shape} is not used: {refused}; torch's kernel runs")
        with autocast:
            if tile_shape is None or refused or not k.shape[-2]:
                out = _attend(q, k, v, causal, scale, attn_mask, dropout_p, enable_gqa)
            else:
                q, k, v = arguments.cast_like_autocast(q, k, v)
                fp32 = "tf32" if precision == "tf32" else "ieee"
                out = attend_by_tile(q, k, v, causal, scale, tile_shape, fp32)
            return out if precision is None else out.to(dtype)


def _is_self_attention(q: Any, k: Any, v: Any) -> bool:
    """Return whether the tensors have one shape, dtype and device: the usual case, in as few calls as possible."""
    try:
        return (
            q.shape == k.shape == v.shape
            and q.dtype is k.dtype is v.dtype
            and q.device == k.device == v.device
            and bool(q.is_floating_point())
            and q.ndim > 2
        )
    except AttributeError:
        return False


def _check(q: Any, k: Any, v: Any, mask: Any, dropout_p: Any, scale: Any, enable_gqa: bool) -> None:
    usual = mask is None and not dropout_p and scale is None and not enable_gqa
    if usual and _is_self_attention(q, k, v):
        return
    arguments.check_tensors("flash_attention", one_dtype=not arguments.is_autocast(q), real=True, q=q, k=k, v=v)
    for name, value in (("q", q), ("k", k), ("v", v)):
        if value.ndim < 2:
            raise _wrong(name, value, "attention is over (..., sequence, dim)", "add the missing dimensions")
    if q.shape[-1] != k.shape[-1]:
        raise _wrong("k", k, f"q is {arguments.format_shape(q)}: their last dimensions are multiplied", "one head size")
    if k.shape[-2] != v.shape[-2]:
        raise _wrong("v", v, f"k is {arguments.format_shape(k)}: each key has a value", "one sequence length for both")
    if enable_gqa and (min(q.ndim, k.ndim, v.ndim) < 3 or k.shape[-3] == 0 or q.shape[-3] % k.shape[-3]):
        why = f"q is {arguments.format_shape(q)}: its heads must be a multiple of k's"
        raise _wrong("k", k, why, "repeat heads, or drop some")
    lead = q.shape[:-2]
    for name, x in (("k", k), ("v", v)):
        grouped = (*x.shape[:-3], q.shape[-3]) if enable_gqa else x.shape[:-2]
        try:
            lead = torch.broadcast_shapes(lead, grouped)
        except RuntimeError as e:
            why = f"q is {arguments.format_shape(q)}: batches and heads are equal, or 1"
            raise _wrong(name, x, why, f"expand {name}, or enable_gqa=True") from e
    if dropout_p is None or isinstance(dropout_p, str) or not 0.0 <= dropout_p < 1.0:
        raise ArgumentError(f"op.flash_attention: dropout_p={dropout_p!r}", fix="from 0 up to, not including, 1")
    if not (scale is None or torch.compiler.is_compiling() or isinstance(scale, numbers.Real)):
        raise ArgumentError(f"op.flash_attention: scale={scale!r}", fix="a number, or None for 1/sqrt(dim)")
    if mask is not None:
        _check_mask(q, mask, (*lead, q.shape[-2], k.shape[-2]))


def _check_mask(q: Any, mask: Any, scores: tuple[int, ...]) -> None:
    arguments.check_tensors("flash_attention", one_dtype=False, q=q, attn_mask=mask)
    if mask.dtype not in (torch.bool, q.dtype, torch.float32) and not arguments.is_autocast(q):
        raise ArgumentError(
            f"op.flash_attention: attn_mask is {mask.dtype}",
            why=f"q is {q.dtype}: a mask is bool (True: visible), or added to the scores in q's dtype or fp32",
            fix=f"attn_mask.bool() or attn_mask.to({q.dtype})",
        )
    if mask.ndim < 2 or not arguments.can_broadcast(mask, scores):
        why = f"the scores are {'x'.join(map(str, scores))}"
        raise _wrong("attn_mask", mask, why, "a mask of (queries, keys), or one that broadcasts to the scores")


def _wrong(name: str, value: Any, why: str, fix: str) -> ArgumentError:
    return arguments.shape_error("flash_attention", name, value, why, fix)


def _cast(q: Any, k: Any, v: Any, mask: Any, precision: str) -> tuple[Any, Any, Any, Any]:
    if precision == "fp8":
        why = "neither torch nor Tessera has an fp8 attention kernel"
        raise ArgumentError("op.flash_attention: precision='fp8'", why=why, fix="precision='bf16'")
    check_choice("op.flash_attention: precision", precision, DTYPE_OF)
    dtype = DTYPE_OF[precision]
    if mask is not None and mask.is_floating_point() and mask.dtype is not dtype:
        mask = mask.float()  # fp32 goes with every dtype of q, and holds what fp16 does not
    return q.to(dtype), k.to(dtype), v.to(dtype), mask


def _attend(q: Any, k: Any, v: Any, causal: bool, scale: float | None, mask: Any, dropout_p: float, gqa: bool) -> Any:
    if k.shape[-2] == 0:  # without any key the result is zeros; torch's backends differ there
        if gqa:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        return (q @ k.mT) @ v
    if mask is not None:
        mask = level_mask(mask, q, k, v, causal)
    extra = {"enable_gqa": True} if gqa else {}  # the keyword came with torch 2.5
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, causal, scale=scale, **extra)


def attend_by_tile(q: Any, k: Any, v: Any, causal: bool, scale: float | None, tile_shape: Any, fp32: str) -> Any:
    """Compute attention by our kernel of a tile, or by torch with the same meaning if there is no CUDA device."""
    from . import attention_ops

    bm, bn = _to_tile(tile_shape, q)
    stages = warps = 0
    if not torch.compiler.is_compiling():
        stages, warps = attention_ops.pipeline(bm, bn, q.shape[-1])
        attention_ops.check_tile(q.dtype, q.device, q.shape[-1], bm, bn, stages, warps)
        dtype = torch.float32 if q.dtype == torch.float64 else q.dtype
        tile.advise("flash_attention", tile.Tile(bm, bn, pad_head(q.shape[-1])), dtype)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    return attention_ops.attention(q, k, v, factor, causal, bm, bn, stages, warps, fp32)


def _to_tile(tile_shape: Any, q: Any) -> tuple[int, int]:
    sides = tuple(tile_shape) if isinstance(tile_shape, Sequence) else ()
    if len(sides) not in (2, 3) or any(not isinstance(side, int) or isinstance(side, bool) for side in sides):
        fix = "tile_shape is (BM, BN) or (BM, BN, D), such as (128, 64)"
        raise ArgumentError(f"op.flash_attention: tile_shape={tile_shape!r}", fix=fix)
    if len(sides) == 3 and sides[2] != q.shape[-1]:
        why = f"a tile holds whole heads, and theirs are {q.shape[-1]}"
        raise ArgumentError(f"op.flash_attention: tile_shape={sides}", why=why, fix="leave D out")
    return sides[0], sides[1]


def _why_without_tile(q: Any, k: Any, v: Any, mask: Any, dropout_p: float) -> str:
    """Return what torch's kernels can do and ours cannot, for this call; empty if ours can run it."""
    if mask is not None or dropout_p:
        return f"our kernel has no {'dropout' if mask is None else 'masks'}"
    if q.ndim != 4 or k.shape != v.shape or v.ndim != 4:
        return "our kernel takes (batch, heads, sequence, dim) tensors, k and v of one shape"
    if k.shape[0] != q.shape[0] or not k.shape[1] or q.shape[1] % k.shape[1]:
        return "our kernel does not broadcast batches and heads"
    if not 0 < q.shape[-1] <= MOST_DIM or (q.dtype == torch.float64 and q.is_cuda):
        return f"our kernel takes heads of up to {MOST_DIM} in fp32, bf16 and fp16"
    return ""


# -- added masks far below zero -------------------------------------------------------------------------------------

# Fused backward passes recompute probabilities from the logarithm of their sum. Beside a mask of -1e9, fp32 has no
# precision left for that logarithm: in the row of a query that sees no key, each probability comes out as 1 (torch 2.13
# on a CPU; not yet measured on a GPU). A softmax does not change when a row is shifted, so such rows are shifted to
# zero.
_FAR = 1024.0  # above this, the logarithm of a sum, kept in fp32 beside such a number, is wrong by 6e-5 and more
_MASK_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class _LevelMask(NamedTuple):
    key: tuple[Any, ...]
    mask: TensorWeakRef


# Layers share their mask, and each would save a copy for its backward pass. A copy is kept only while a layer has saved
# it, because a mask may be written where no version tells (by numpy, `.data`, the replay of a graph).
_level_masks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def level_mask(mask: Any, q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Return the mask with rows that are far from zero shifted to zero; the same mask if no gradient is needed."""
    if mask.dtype not in _MASK_DTYPES or not (mask.ndim and k.shape[-2] and q.shape[-2]):
        return mask
    if not (needs_gradient(q, k, v, mask) or in_transform()):
        return mask
    sizes = (q.shape[-2], k.shape[-2]) if causal else None
    if mask.requires_grad:
        return _level(mask, sizes)
    own = mask  # without the dimensions that `expand` repeats: they take no memory, but a difference would
    for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if stride == 0 and size > 1:
            own = own.narrow(dim, 0, 1)
    shared = is_unobserved(mask) and not mask.is_inference()
    # A graph under capture makes its own copy: at a replay, the mask may hold other values.
    shared = shared and not (mask.is_cuda and torch.cuda.is_current_stream_capturing())
    level = _level_shared(mask, own, sizes) if shared else _level(own, sizes)
    full = mask.shape if sizes is None else torch.broadcast_shapes(mask.shape, sizes)
    return level if level.shape == full else level.expand(full)


def _level_shared(mask: Any, own: Any, sizes: tuple[int, int] | None) -> Any:
    base = mask if mask._base is None else mask._base
    # the copy may not be ready for another stream
    stream = torch.cuda.current_stream(mask.device) if mask.is_cuda else None
    key = (mask._version, mask.data_ptr(), mask.dtype, mask.shape, mask.stride(), sizes, stream)
    entry = _level_masks.get(base)
    level = entry.mask() if entry is not None and entry.key == key else None
    if level is None:
        level = _level(own, sizes)
        _level_masks[base] = _LevelMask(key, TensorWeakRef(level))
    return level


def _level(mask: Any, sizes: tuple[int, int] | None) -> Any:
    visible = mask.detach()
    if sizes is not None:  # causal: what lies behind a query does not count for its row
        visible = visible.masked_fill(~torch.ones(sizes, dtype=torch.bool, device=mask.device).tril(), -math.inf)
    most, limits = visible.amax(-1, keepdim=True), torch.finfo(mask.dtype)
    # The difference of numbers near each other is exact, and others do not count in the softmax.
    return mask - torch.where(most.abs() < _FAR, 0.0, most.clamp(limits.min, limits.max))
