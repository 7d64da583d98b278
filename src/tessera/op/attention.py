"""Attention: torch's best backend, or with a tile our double-buffered Triton kernel of that tile, forward and backward.

Layouts and alignment are those of `torch.nn.functional.scaled_dot_product_attention`: (batch, heads, sequence, dim),
and `causal` lets query i see the keys 0..i also where the lengths differ. With a tile, a query that may see no key gets
zeros; a plain call gives what torch's backend gives (on an H200 with torch 2.11 and a boolean mask: not zeros). A mask
that is added hides nothing from a query whose keys all have its -1e9: they are weighed as without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documents write it

from ..errors import ArgumentError
from ..stream import Stream
from ..stream import on as stream_on
from . import arguments, hints, tile
from .attention_errors import check_mask_dtype, check_mask_shape, check_scale, explain
from .layouts import block_dim
from .masks import levelled

DTYPE_OF = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_TILE = (128, 64)  # used where a precision needs our kernel and no tile is given
MOST_DIM = 256
_SEEDS = 1 << 62  # of dropout; drawn from the device's generator, so that seeding torch repeats it


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Calls for which another backend of torch goes first ("cudnn", "flash", "efficient"), without mask or dropout."""

    backend: str
    least_queries: int = 1
    most_queries: int = 1 << 62
    dims: tuple[int, ...] = (64, 96, 128)
    causal: bool | None = None
    training: bool | None = None

    def covers(self, q: Any, causal: bool) -> bool:
        """Whether such a call is meant."""
        training = torch.is_grad_enabled() and q.requires_grad
        return (
            self.least_queries <= q.shape[-2] <= self.most_queries
            and q.shape[-1] in self.dims
            and self.causal in (None, causal)
            and self.training in (None, training)
        )


# Where torch's own order is not the best: nowhere on the H200, where its first choice is cuDNN's kernel, and flash took
# 1.39 to 1.95 times as long for 16 shapes (results/ops_rows.json; benchmarks/device/ops_rows.py prints these lines).
# With dropout ours is quicker forward (76 us against 112 at 8x12x1024x64) and slower backward (231 against 180), so it
# stays torch's too (results/dropout.json).
RULES: tuple[Rule, ...] = ()


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
    """softmax(q k^T * scale) v without storing the scores; `scale` is 1/sqrt(dim) by default.

    `tile_shape=(BM, BN)` or `(BM, BN, D)` runs our kernel with BM queries and BN keys at a time. `precision` ("bf16",
    "fp16", "fp32") casts q, k and v and gives the result in q's dtype; "tf32" multiplies fp32 tensors by our kernel's
    TF32. `enable_gqa`: k and v have fewer heads, each shared by a group of q's.

    Raises TileError for a tile that does not fit the chip, ArgumentError for anything else that does not fit.
    """
    _check(q, k, v, attn_mask, dropout_p, enable_gqa)
    if not torch.compiler.is_compiling():  # torch.compile cannot trace a context variable: no schedule holds there
        asked = hints.current()
        tile_shape = tile_shape or asked.tiles.get("flash_attention")
        precision = precision or asked.precisions.get("flash_attention")
    if stream is None:
        return _run(q, k, v, causal, scale, attn_mask, dropout_p, enable_gqa, tile_shape, precision)
    with stream_on(stream, q, k, v, attn_mask):
        return _run(q, k, v, causal, scale, attn_mask, dropout_p, enable_gqa, tile_shape, precision)


def _alike(q: Any, k: Any, v: Any) -> bool:
    """Self-attention of one dtype and device: the way that is always taken, in as few calls as it can be."""
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


def _check(q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: Any, enable_gqa: bool) -> None:
    if attn_mask is None and not dropout_p and not enable_gqa and _alike(q, k, v):
        return
    arguments.tensors("flash_attention", one_dtype=not arguments.autocasts(q), real=True, q=q, k=k, v=v)
    if attn_mask is not None:
        arguments.tensors("flash_attention", one_dtype=False, q=q, attn_mask=attn_mask)
    for name, value in (("q", q), ("k", k), ("v", v)):
        if value.ndim < 2:
            raise _wrong(name, value, "attention is over (..., sequence, dim)", "add the missing dimensions")
    if q.shape[-1] != k.shape[-1]:
        raise _wrong("k", k, f"q is {arguments.shape(q)}: their last dimensions are multiplied", "one head dimension")
    if k.shape[-2] != v.shape[-2]:
        raise _wrong("v", v, f"k is {arguments.shape(k)}: each key has a value", "one sequence length for k and v")
    if q.ndim > 2 and not enable_gqa and k.ndim == q.ndim and k.shape[-3] not in (q.shape[-3], 1) and q.shape[-3] != 1:
        raise _wrong("k", k, f"q is {arguments.shape(q)}", "enable_gqa=True shares a head of k among several of q")
    if enable_gqa and (q.ndim < 3 or k.ndim < 3 or k.shape[-3] == 0 or q.shape[-3] % k.shape[-3] or v.ndim < 3):
        raise _wrong(
            "k", k, f"q is {arguments.shape(q)}: its heads must be a multiple of k's", "repeat heads, or drop some"
        )
    if dropout_p is None or isinstance(dropout_p, str) or not 0.0 <= dropout_p < 1.0:
        raise ArgumentError(f"op.flash_attention: dropout_p={dropout_p!r}", fix="from 0 up to, not including, 1")


def _wrong(name: str, value: Any, why: str, fix: str) -> ArgumentError:
    return ArgumentError(f"op.flash_attention: {name} is {arguments.shape(value)}", why=why, fix=fix)


def _run(
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    scale: float | None,
    mask: Any,
    dropout_p: float,
    gqa: bool,
    cut: Any,
    precision: Any,
) -> Any:
    if precision is not None:  # and autocast does not apply
        dtype = q.dtype
        q, k, v, mask, cut = _cast(q, k, v, mask, cut, precision)
        with arguments.uncast(q):
            out = _attend(q, k, v, causal, scale, mask, dropout_p, gqa, cut, precision)
        return out if out.dtype is dtype else out.to(dtype)
    if cut is not None:
        q, k, v = arguments.autocast(q, k, v)
    return _attend(q, k, v, causal, scale, mask, dropout_p, gqa, cut, None)


def _attend(
    q: Any, k: Any, v: Any, causal: bool, scale: float | None, mask: Any, dropout_p: float, gqa: bool, cut: Any,
    precision: str | None,
) -> Any:  # fmt: skip
    if cut is not None:
        return tiled(q, k, v, causal, scale, mask, dropout_p, cut, precision)
    if k.shape[-2] == 0:  # no key at all: zeros, not left to what each of torch's backends makes of it
        return (q @ (k.repeat_interleave(q.shape[-3] // k.shape[-3], -3) if gqa else k).mT) @ (
            v.repeat_interleave(q.shape[-3] // v.shape[-3], -3) if gqa else v
        )
    extra = {"enable_gqa": True} if gqa else {}  # the keyword came with torch 2.5
    rule = _rule(q, causal, mask, dropout_p)
    try:
        if mask is not None:
            mask = levelled(mask, q, k, v, causal)
        if rule is None:
            return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, causal, scale=scale, **extra)
        from torch.nn.attention import sdpa_kernel

        with sdpa_kernel(_order(rule.backend), set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, causal, scale=scale, **extra)
    except NotImplementedError as e:
        arguments.explain_dtype("flash_attention", "q", q, e)
        raise
    except (RuntimeError, TypeError, IndexError) as e:
        explain(e, q, k, v, scale, mask, gqa)
        raise


def _rule(q: Any, causal: bool, mask: Any, dropout_p: float) -> Rule | None:
    if not RULES or not q.is_cuda or mask is not None or dropout_p or torch.compiler.is_compiling():
        return None
    if not hasattr(torch._C, "_set_sdp_priority_order"):  # torch 2.6 on
        return None
    return next((rule for rule in RULES if rule.covers(q, causal)), None)


def _order(first: str) -> list[Any]:
    """The backends of torch, one of them first and the others behind it for calls it cannot take."""
    from torch.nn.attention import SDPBackend

    known = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    return [known[first], *(backend for name, backend in known.items() if name != first)]


def _cast(q: Any, k: Any, v: Any, mask: Any, cut: Any, precision: str) -> tuple[Any, Any, Any, Any, Any]:
    if precision == "fp8":
        raise ArgumentError(
            "op.flash_attention: precision='fp8'",
            why="neither torch nor we have an fp8 attention kernel",
            fix="precision='bf16'",
        )
    arguments.one_of("flash_attention", "precision", precision, DTYPE_OF)
    dtype = DTYPE_OF[precision]
    # torch multiplies fp32 heads as fp32; TF32 is our kernel's.
    needs_ours = precision == "tf32" and cut is None and q.is_cuda
    if mask is not None and mask.is_floating_point() and mask.dtype is not dtype:
        mask = mask.float()  # was of q's own dtype, perhaps; fp32 goes with every one, and holds what fp16 does not
    return q.to(dtype), k.to(dtype), v.to(dtype), mask, DEFAULT_TILE if needs_ours else cut


def tiled(
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    scale: float | None,
    mask: Any,
    dropout_p: float,
    cut: Any,
    precision: str | None = None,
) -> Any:
    """By our kernel of the tile `cut`, or by torch with the same meaning where there is no CUDA device."""
    from . import attention_ops

    bm, bn = _tile(cut, q)
    _check_tiled(q, k, v, mask, scale)
    if mask is not None:
        mask = levelled(mask, q, k, v, causal).expand(*(q.shape[:-1]), k.shape[-2])
    stages = warps = 0
    if not torch.compiler.is_compiling():
        stages, warps = attention_ops.pipeline(bm, bn, q.shape[-1])
        attention_ops.checked(q, mask is not None, bm, bn, stages, warps)
        tile.advise("flash_attention", tile.Tile(bm, bn, block_dim(q.shape[-1])), _named(q))
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    fp32 = "tf32" if precision == "tf32" else "ieee"
    seed = torch.randint(_SEEDS, (1,), device=q.device) if dropout_p else None
    return attention_ops.attention(q, k, v, mask, seed, dropout_p, factor, causal, bm, bn, stages, warps, fp32)[0]


def _named(q: Any) -> Any:
    return torch.float32 if q.dtype == torch.float64 else q.dtype


def _tile(cut: Any, q: Any) -> tuple[int, int]:
    sides = tuple(cut) if isinstance(cut, Sequence) else ()
    if len(sides) not in (2, 3) or any(not isinstance(side, int) or isinstance(side, bool) for side in sides):
        raise ArgumentError(
            f"op.flash_attention: tile_shape={cut!r}", fix="tile_shape is (BM, BN) or (BM, BN, D), such as (128, 64)"
        )
    if len(sides) == 3 and sides[2] != q.shape[-1]:
        raise ArgumentError(
            f"op.flash_attention: tile_shape={sides}",
            why=f"a tile holds whole heads, and theirs are {q.shape[-1]}",
            fix="leave D out",
        )
    return sides[0], sides[1]


def _check_tiled(q: Any, k: Any, v: Any, mask: Any, scale: Any) -> None:
    """What torch's backends can and our kernel cannot."""
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise _wrong("q", q, "a tile is of (batch, heads, sequence, dim) tensors", "unsqueeze the missing dimensions")
    if k.shape[0] != q.shape[0] or v.shape[:3] != k.shape[:3] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise _wrong(
            "v", v, f"q is {arguments.shape(q)}, k {arguments.shape(k)}: tiles do not broadcast", "expand k and v"
        )
    if v.shape[-1] != q.shape[-1] or not 0 < q.shape[-1] <= MOST_DIM:
        raise _wrong("v", v, f"with a tile all heads have one dimension, at most {MOST_DIM}", "leave tile_shape out")
    check_scale(scale)
    if mask is not None:
        check_mask_dtype(q, mask, tiled=True)
    if mask is not None and mask.requires_grad:
        raise ArgumentError(
            "op.flash_attention: attn_mask wants a gradient",
            why="our kernel computes those of q, k and v",
            fix="leave tile_shape out",
        )
    if mask is not None:
        check_mask_shape(mask, (*q.shape[:-1], k.shape[-2]), least=0)
    if q.dtype == torch.float64 and q.is_cuda:
        raise ArgumentError(
            "op.flash_attention: q is torch.float64",
            why="our kernel is for fp32, bf16, fp16",
            fix="leave tile_shape out",
        )
