"""Attention as a torch custom operator (`tessera::attention`): our Triton kernels on CUDA, the same by torch elsewhere.

(batch, heads, sequence, dim) tensors; keys and values may have fewer heads. `bm`, `bn` are the tile of the forward
kernel; `stages` and `warps` 0 mean the kernel's own choice. Tiles are checked when the operator runs, on any device.
With a `seed` (one int64, drawn by the caller) probabilities are dropped: which ones, it alone decides, here and there.
The operators take it late: `graph/flops.py` reads what stands before it, and the last one, by position.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from . import arguments, hints, tile
from .eager import at, composed, differentiated, function, straight, transformed
from .layouts import alike, block_dim

LOG2E = math.log2(math.e)
STAGES = 2  # double-buffered: the next tile of keys and values loads while one is multiplied
PLAIN, MASKED = "flash_attention", "flash_attention with attn_mask"


def forward_bytes(shape: tile.Tile, dtype: str, stages: int) -> int:
    """Shared memory of the forward kernel: the queries, and `stages` tiles of keys and values."""
    return (shape.bm + 2 * max(1, stages) * shape.bn) * shape.bk * tile.ITEM_BYTES[dtype]


def masked_bytes(shape: tile.Tile, dtype: str, stages: int) -> int:
    """The same with a mask of that dtype, whose tiles come ahead too."""
    return forward_bytes(shape, dtype, stages) + stages * shape.bm * shape.bn * tile.ITEM_BYTES[dtype]


def _compiled(masked: bool) -> Any:
    def compiled(shape: tile.Tile, dtype: str, stages: int, warps: int, target: Any) -> Any:
        from .kernels import attention

        return attention.compile_forward(shape.sides, dtype, stages, warps, target, masked).metadata

    return compiled


tile.register(PLAIN, _compiled(False), free=(True, True, False), formula=forward_bytes, sides=2)
tile.register(MASKED, _compiled(True), free=(True, True, False), formula=masked_bytes, sides=2)


def pipeline(bm: int, bn: int, dims: int) -> tuple[int, int]:
    """(stages, warps) of the forward kernel: what a schedule hints, else what keeps the accumulators in registers."""
    asked = hints.current()
    # fp32 scores and sums of a program in at most 128 of a thread's 255 registers: tests compile them without spills.
    warps = 4 if bm * (bn + block_dim(dims)) <= 32 * 4 * 128 else 8
    return asked.cp_async_depth or STAGES, 4 * asked.warp_mma_concurrency if asked.warp_mma_concurrency else warps


def checked(q: Tensor, masked: bool, bm: int, bn: int, stages: int, warps: int) -> tile.Fit:
    """The fit of a tile on the tensors' device (Hopper, for a CPU's); TileError where there is none."""
    return _fit(q.dtype, q.device, q.shape[-1], masked, bm, bn, stages, warps)


@functools.lru_cache(maxsize=256)
def _fit(
    dtype: torch.dtype, device: torch.device, dims: int, masked: bool, bm: int, bn: int, stages: int, warps: int
) -> tile.Fit:
    shape = tile.Tile(bm, bn, block_dim(dims))
    # fp64 runs on a CPU alone: the tile is checked as for fp32.
    dtype = torch.float32 if dtype == torch.float64 else dtype
    return tile.check(MASKED if masked else PLAIN, shape, dtype, stages, warps, tile.arch_of(device))


# Tiles of the backward kernels by the bytes of a head's row: (owned, walked at a time). The largest whose dK and dV
# stay in the registers of 8 warps (compiled for sm_90: 120 bytes of spills at 512, none below) and whose shared memory
# is below 99 KiB, the smallest limit since Ampere.
_BACKWARD = ((128, (128, 64)), (256, (128, 32)), (512, (64, 16)), (1024, (32, 16)))
_BACKWARD_WARPS = 8
# With dropout, whose hash wants registers too, at the narrowest rows: 231 us for 8x12x1024x64 on an H200, where twice
# the keys and warps took 289 (results/dropout.json). At 256 bytes a smaller tile was slower.
_DROPPING = (64, 32, STAGES, 4)


def backward_launch(dims: int, dtype: torch.dtype, drops: bool = False) -> tuple[int, int, int, int]:
    """(owned, walked, stages, warps) of the backward kernels."""
    row_bytes = block_dim(dims) * dtype.itemsize
    owned, walked = next(cut for most, cut in _BACKWARD if row_bytes <= most)
    if drops and row_bytes <= _BACKWARD[0][0]:
        return _DROPPING
    return owned, walked, STAGES, _BACKWARD_WARPS


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """Imported at the first launch: they need Triton."""
    from .kernels import attention, attention_backward

    return attention, attention_backward


@torch.library.custom_op("tessera::attention", mutates_args=())
def attention_op(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool, bm: int, bn: int,
    stages: int, warps: int, seed: Tensor | None, dropout_p: float, precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output, log2 of the sum of each row's exponentials; +inf of a row that sees no key)."""
    checked(q, mask is not None, bm, bn, *_resolved(q, bm, bn, stages, warps))
    with arguments.uncast(q):
        scores = _scores(q, k, mask, scale, causal)
        lse = torch.logsumexp(scores, -1)
        p = _probabilities(scores)
        if seed is not None:
            p = p * _kept(seed, dropout_p, p.shape, p.dtype)
        out = alike(q).copy_(torch.einsum("bhgqk,bhkd->bhgqd", p, v.to(p.dtype)).reshape(q.shape))
    return out, torch.where(lse == -math.inf, math.inf, lse * LOG2E).reshape(q.shape[:3])


def _probabilities(scores: Tensor) -> Tensor:
    """Softmax; zeros in the row of a query that sees no key. Not exp(scores - lse): beside 1e9 the lse has no room."""
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)  # NaN would have NaN as gradient


def _spread(x: Tensor) -> Tensor:
    """As the kernels': 32-bit numbers, held in int64."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ (x >> 16)


def _kept(seed: Tensor, dropout_p: float, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """0 where the kernels drop, elsewhere what a probability that stays counts for, as the scores are laid out."""
    keys = shape[-1]
    rows = torch.arange(math.prod(shape[:-1]), device=seed.device)
    number = _spread(_spread((rows + (seed & 0xFFFFFFFF)) & 0xFFFFFFFF) ^ (seed >> 32 & 0xFFFFFFFF))
    key = torch.arange(keys, device=seed.device) * 0x9E3779B1 & 0xFFFFFFFF
    x = (number[:, None] ^ key) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0xC2B2AE35 & 0xFFFFFFFF
    signed = (x ^ 2**31) - 2**31  # the kernels compare signed numbers: -2^31 and up
    return ((signed >= round(dropout_p * 2**32) - 2**31).to(dtype) / (1.0 - dropout_p)).reshape(shape)


def _resolved(q: Tensor, bm: int, bn: int, stages: int, warps: int) -> tuple[int, int]:
    if stages and warps:
        return stages, warps
    own = pipeline(bm, bn, q.shape[-1])
    return stages or own[0], warps or own[1]


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Masked scores, (batch, key heads, group, queries, keys), at least in fp32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    batch, heads, queries, dims = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    grouped = q.to(wide).reshape(batch, kv_heads, heads // kv_heads, queries, dims)
    scores = torch.einsum("bhgqd,bhkd->bhgqk", grouped, k.to(wide)) * scale
    if causal:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is None:
        return scores
    given = mask.expand(batch, heads, queries, keys).reshape(scores.shape)
    return scores.masked_fill(~given, -math.inf) if mask.dtype == torch.bool else scores + given


@attention_op.register_kernel("cuda")
def _attention_cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool, bm: int, bn: int,
    stages: int, warps: int, seed: Tensor | None, dropout_p: float, precision: str,
) -> Any:  # fmt: skip
    kernel, _ = _kernels()
    stages, warps = _resolved(q, bm, bn, stages, warps)
    checked(q, mask is not None, bm, bn, stages, warps)
    with at(q):
        launch = kernel.Launch(bm, bn, stages, warps, precision)
        return kernel.forward(q, k, v, mask, scale, causal, launch, kernel.Drop(dropout_p, seed))


@attention_op.register_fake
def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool, bm: int, bn: int,
    stages: int, warps: int, seed: Tensor | None, dropout_p: float, precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return alike(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("tessera::attention_backward", mutates_args=())
def attention_backward_op(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, scale: float,
    causal: bool, seed: Tensor | None, dropout_p: float, precision: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv); on CUDA the probabilities are made again from `lse`."""
    dq, dk, dv = _by_torch(dout, q, k, v, mask, scale, causal, seed, dropout_p)
    return alike(q).copy_(dq), alike(k).copy_(dk), alike(v).copy_(dv)


def _by_torch(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool,
    seed: Tensor | None, dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) by operations that have gradients and rules for vmap themselves."""
    with arguments.uncast(q):
        p = _probabilities(_scores(q, k, mask, scale, causal))
        shape = p.shape[:4]
        gradient = dout.to(p.dtype).reshape(*shape, -1)
        change, weight = torch.einsum("bhgqd,bhkd->bhgqk", gradient, v.to(p.dtype)), p
        if seed is not None:
            kept = _kept(seed, dropout_p, p.shape, p.dtype)
            change, weight = change * kept, p * kept
        ds = p * (change - (p * change).sum(-1, keepdim=True)) * scale
        dq = torch.einsum("bhgqk,bhkd->bhgqd", ds, k.to(p.dtype)).reshape(q.shape)
        dk = torch.einsum("bhgqk,bhgqd->bhkd", ds, q.to(p.dtype).reshape(*shape, -1))
        dv = torch.einsum("bhgqk,bhgqd->bhkd", weight, gradient)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@attention_backward_op.register_kernel("cuda")
def _attention_backward_cuda(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, scale: float,
    causal: bool, seed: Tensor | None, dropout_p: float, precision: str,
) -> Any:  # fmt: skip
    kernel, backward = _kernels()
    launch = kernel.Launch(*backward_launch(q.shape[-1], q.dtype, drops=seed is not None), precision)
    drop = kernel.Drop(dropout_p, seed)
    with at(q):
        return backward.backward(dout, q, k, v, mask, out, lse, scale, causal, launch, drop)


@attention_backward_op.register_fake
def _attention_backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, scale: float,
    causal: bool, seed: Tensor | None, dropout_p: float, precision: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return alike(q), alike(k), alike(v)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.scale, ctx.causal = inputs[:6]
    seed, ctx.dropout_p, ctx.precision = inputs[10:]
    ctx.save_for_backward(q, k, v, mask, seed, *output)
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, mask, seed, out, lse = ctx.saved_tensors
    if differentiated(dout, q, k, v) or transformed():  # a gradient of these is wanted, or a map of them
        return *_by_torch(dout, q, k, v, mask, ctx.scale, ctx.causal, seed, ctx.dropout_p), *(None,) * 10
    given = (dout, q, k, v, mask, out, lse, ctx.scale, ctx.causal, seed, ctx.dropout_p, ctx.precision)
    way = _attention_backward_cuda if straight(q, dout, k, v, mask) else attention_backward_op
    return *way(*given), *(None,) * 10


attention_op.register_autograd(_gradient, setup_context=_setup)
_composed = composed(attention_op, _setup, _gradient, "flash_attention", "tile_shape")


_attention_function = function(
    lambda *given: _attention_cuda(*given),  # noqa: PLW0108 - looked up at the call, where tests put another
    _setup,
    _gradient,
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor | None, dropout_p: float, scale: float,
    causal: bool, bm: int, bn: int, stages: int, warps: int, precision: str,
) -> Any:  # fmt: skip
    """What the operator gives; straight by its kernel where nobody would see the operator (eager.py)."""
    given = (q, k, v, mask, scale, causal, bm, bn, stages, warps, seed, dropout_p, precision)
    if type(scale) is not float or type(dropout_p) is not float or not straight(q, k, v, mask, seed):
        return _composed(*given)
    return _attention_function(*given) if differentiated(q, k, v, mask) else _attention_cuda(*given)
