"""Attention as a torch operator, `tessera::attention`: our Triton kernel on CUDA, the same by torch elsewhere.

(batch, heads, sequence, dim) tensors; keys and values may have fewer heads. `bm`, `bn` are the kernel's tile; `stages`
and `warps` of 0 leave the choice to us. With a `seed` (one int64) probabilities are dropped; the seed alone decides
which ones, on every device. Gradients recompute the scores with torch, a block of queries at a time. The order of the
arguments matters: `graph/flops.py` reads the first ones and the last two by position.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from . import arguments, hints, tile
from .dispatch import device_of, with_transforms
from .kernels import pad_head

STAGES = 2  # double-buffered: the next tile of keys and values loads while one is multiplied
PLAIN, MASKED = "flash_attention", "flash_attention with attn_mask"
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, int bm, int bn, int stages, int warps, "
    "Tensor? seed, float dropout_p, str precision) -> (Tensor, Tensor)"
)
_GRADIENT_SCORES = 1 << 26  # scores that the backward pass holds at a time: 256 MiB in fp32


def forward_bytes(shape: tile.Tile, dtype: str, stages: int) -> int:
    """Shared memory of the kernel: the queries, and `stages` tiles of keys and values."""
    return (shape.bm + 2 * max(1, stages) * shape.bn) * shape.bk * tile.ITEM_BYTES[dtype]


def masked_bytes(shape: tile.Tile, dtype: str, stages: int) -> int:
    """The same with a mask of that dtype, whose tiles are loaded ahead too."""
    return forward_bytes(shape, dtype, stages) + stages * shape.bm * shape.bn * tile.ITEM_BYTES[dtype]


def _compile(shape: tile.Tile, dtype: str, stages: int, warps: int, target: Any, masked: bool = False) -> Any:
    from .kernels.attention import compile_attention

    return compile_attention(shape.sides, dtype, stages, warps, target, masked).metadata


tile.register(PLAIN, _compile, free=(True, True, False), formula=forward_bytes, sides=2)
tile.register(MASKED, functools.partial(_compile, masked=True), free=(True, True, False), formula=masked_bytes, sides=2)


def pipeline(bm: int, bn: int, dims: int) -> tuple[int, int]:
    """(stages, warps) of the kernel: what a schedule hints, else what keeps the accumulators in registers."""
    asked = hints.current()
    # fp32 scores and sums of a program in at most 128 of a thread's 255 registers: tests compile them without spills.
    warps = 4 if bm * (bn + pad_head(dims)) <= 32 * 4 * 128 else 8
    return asked.cp_async_depth or STAGES, 4 * asked.warp_mma_concurrency if asked.warp_mma_concurrency else warps


@functools.lru_cache(maxsize=256)
def check_tile(
    dtype: torch.dtype, device: torch.device, dims: int, masked: bool, bm: int, bn: int, stages: int, warps: int
) -> None:
    """Raise TileError for a tile that does not fit the device (for a CPU: Hopper)."""
    dtype = torch.float32 if dtype == torch.float64 else dtype  # fp64 runs on a CPU alone, and is checked as fp32
    shape = tile.Tile(bm, bn, pad_head(dims))
    tile.check(MASKED if masked else PLAIN, shape, dtype, stages, warps, tile.arch_of(device))


def empty_like_heads(x: Tensor) -> Tensor:
    """An empty, dense tensor like `x`; a token's heads lie side by side where those of `x` do.

    A model that made `x` by splitting the rows of a product joins the result again: in that order without a copy.
    """
    batch, heads, length, dim = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(batch, length, heads, dim).transpose(1, 2)
    return x.new_empty(batch, heads, length, dim)


def dropout_factors(seed: Tensor, p: float, rows: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """0 where the kernel drops a score of these rows, 1 / (1 - p) elsewhere: (rows, keys)."""

    def mix_bits(x: Tensor) -> Tensor:  # 32-bit numbers, held in int64
        x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
        x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
        return x ^ (x >> 16)

    row_hash = mix_bits(mix_bits((rows + (seed & 0xFFFFFFFF)) & 0xFFFFFFFF) ^ (seed >> 32 & 0xFFFFFFFF))
    key = torch.arange(keys, device=seed.device) * 0x9E3779B1 & 0xFFFFFFFF
    x = (row_hash[:, None] ^ key) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0xC2B2AE35 & 0xFFFFFFFF
    signed = (x ^ 2**31) - 2**31  # the kernel compares signed numbers: -2^31 and up
    return (signed >= round(p * 2**32) - 2**31).to(dtype) / (1.0 - p)


def _factors(seed: Tensor | None, p: float, q: Tensor, start: int, scores: Tensor) -> Tensor | float:
    """Dropout factors of the scores (batch, key heads, group, queries from `start` on, keys)."""
    if seed is None:
        return 1.0
    heads = torch.arange(q.shape[0] * q.shape[1], device=q.device)
    rows = heads[:, None] * q.shape[2] + torch.arange(start, start + scores.shape[3], device=q.device)
    return dropout_factors(seed, p, rows.flatten(), scores.shape[4], scores.dtype).reshape(scores.shape)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, causal: bool, rows: slice = slice(None)) -> Tensor:
    """Masked scores of some queries, (batch, key heads, group, queries, keys), at least in fp32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q[:, :, rows].to(wide).unflatten(1, (k.shape[1], q.shape[1] // k.shape[1]))
    scores = torch.einsum("bhgqd,bhkd->bhgqk", grouped, k.to(wide)) * scale
    if causal:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible[rows], -math.inf)
    if mask is None:
        return scores
    own = mask.expand(*q.shape[:3], k.shape[2])[:, :, rows].reshape(scores.shape)
    return scores.masked_fill(~own, -math.inf) if mask.dtype == torch.bool else scores + own


def _probabilities(scores: Tensor) -> Tensor:
    """Softmax; zeros in the row of a query that sees no key, where NaN would have NaN as its gradient."""
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)


def _resolve(q: Tensor, masked: bool, bm: int, bn: int, stages: int, warps: int) -> tuple[int, int]:
    """(stages, warps) of a tile that fits."""
    own = pipeline(bm, bn, q.shape[-1])
    stages, warps = stages or own[0], warps or own[1]
    check_tile(q.dtype, q.device, q.shape[-1], masked, bm, bn, stages, warps)
    return stages, warps


@torch.library.custom_op("tessera::attention", mutates_args=(), schema=_SCHEMA)
def attention_op(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    """(output, log2 of the sum of each row's exponentials; +inf of a row that sees no key)."""
    scale, causal, bm, bn, stages, warps, seed, dropout_p, _ = options
    _resolve(q, mask is not None, bm, bn, stages, warps)
    with arguments.without_autocast(q):
        scores = _scores(q, k, mask, scale, causal)
        lse = torch.logsumexp(scores, -1)
        p = _probabilities(scores) * _factors(seed, dropout_p, q, 0, scores)
        out = empty_like_heads(q).copy_(torch.einsum("bhgqk,bhkd->bhgqd", p, v.to(p.dtype)).reshape(q.shape))
    return out, torch.where(lse == -math.inf, math.inf, lse * math.log2(math.e)).reshape(q.shape[:3])


@attention_op.register_kernel("cuda")
def _attention_cuda(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    from .kernels.attention import AttentionLaunch, Dropout, run_attention

    scale, causal, bm, bn, stages, warps, seed, dropout_p, precision = options
    launch = AttentionLaunch(bm, bn, *_resolve(q, mask is not None, bm, bn, stages, warps), precision)
    out = empty_like_heads(q)
    with device_of(q):
        return out, run_attention(q, k, v, mask, out, scale, causal, launch, Dropout(dropout_p, seed))


@attention_op.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_like_heads(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.scale, ctx.causal = inputs[:6]
    seed, ctx.dropout_p, _ = inputs[10:]
    ctx.save_for_backward(q, k, v, mask, seed)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
    """(dq, dk, dv, ...) by operations of torch, which have gradients and rules for vmap themselves."""
    q, k, v, mask, seed = ctx.saved_tensors
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = [], torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    step = max(1, _GRADIENT_SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    with arguments.without_autocast(q):
        for start in range(0, q.shape[2], step):
            rows = slice(start, start + step)
            scores = _scores(q, k, mask, ctx.scale, ctx.causal, rows)
            weights, kept = _probabilities(scores), _factors(seed, ctx.dropout_p, q, start, scores)
            gradient = dout[:, :, rows].to(wide).unflatten(1, heads)
            change = torch.einsum("bhgqd,bhkd->bhgqk", gradient, v.to(wide)) * kept
            ds = weights * (change - (weights * change).sum(-1, keepdim=True)) * ctx.scale
            dq.append(torch.einsum("bhgqk,bhkd->bhgqd", ds, k.to(wide)).flatten(1, 2))
            dk = dk + torch.einsum("bhgqk,bhgqd->bhkd", ds, q[:, :, rows].to(wide).unflatten(1, heads))
            dv = dv + torch.einsum("bhgqk,bhgqd->bhkd", weights * kept, gradient)
    to_q = torch.cat(dq, 2).to(q.dtype) if dq else torch.zeros_like(q)
    return to_q, dk.to(k.dtype), dv.to(v.dtype), *(None,) * 10


attention_op.register_autograd(_backward, setup_context=_save)
attention = with_transforms(attention_op, _save, _backward, "flash_attention", "tile_shape")
