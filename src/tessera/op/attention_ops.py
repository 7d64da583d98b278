"""Attention as a torch custom operator (`tessera::attention`): our Triton kernels on CUDA, the same by torch elsewhere.

(batch, heads, sequence, dim) tensors; keys and values may have fewer heads. `bm`, `bn` are the tile of the forward
kernel; `stages` and `warps` 0 mean the kernel's own choice. Tiles are checked when the operator runs, on any device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import hints, tile

LOG2E = math.log2(math.e)
STAGES = 2  # double-buffered: the next tile of keys and values loads while one is multiplied
PLAIN, MASKED = "flash_attention", "flash_attention with attn_mask"


def block_dim(dims: int) -> int:
    """The width the kernels work with: a power of two that holds the head."""
    return max(16, 1 << (dims - 1).bit_length())


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


tile.register(PLAIN, _compiled(False), free=(True, True, False), formula=forward_bytes)
tile.register(MASKED, _compiled(True), free=(True, True, False), formula=masked_bytes)


def pipeline(bm: int, bn: int, dims: int) -> tuple[int, int]:
    """(stages, warps) of the forward kernel: what a schedule hints, else what keeps the accumulators in registers."""
    asked = hints.current()
    # fp32 scores and sums of a program in at most 128 of a thread's 255 registers: tests compile them without spills.
    warps = 4 if bm * (bn + block_dim(dims)) <= 32 * 4 * 128 else 8
    return asked.cp_async_depth or STAGES, 4 * asked.warp_mma_concurrency if asked.warp_mma_concurrency else warps


def checked(q: Tensor, masked: bool, bm: int, bn: int, stages: int, warps: int) -> tile.Fit:
    """The fit of a tile on the tensors' device (Hopper, for a CPU's); TileError where there is none."""
    shape = tile.Tile(bm, bn, block_dim(q.shape[-1]))
    # fp64 runs on a CPU alone: the tile is checked as for fp32.
    dtype = torch.float32 if q.dtype == torch.float64 else q.dtype
    return tile.check(MASKED if masked else PLAIN, shape, dtype, stages, warps, tile.arch_of(q.device))


# Tiles of the backward kernels by the bytes of a head's row: (owned, walked at a time). The largest whose dK and dV
# stay in the registers of 8 warps (compiled for sm_90: 120 bytes of spills at 512, none below) and whose shared memory
# is below 99 KiB, the smallest limit since Ampere.
_BACKWARD = ((128, (128, 64)), (256, (128, 32)), (512, (64, 16)), (1024, (32, 16)))
_BACKWARD_WARPS = 8


def backward_launch(dims: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(owned, walked, stages, warps) of the backward kernels."""
    row_bytes = block_dim(dims) * dtype.itemsize
    owned, walked = next(cut for most, cut in _BACKWARD if row_bytes <= most)
    return owned, walked, STAGES, _BACKWARD_WARPS


@torch.library.custom_op("tessera::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool, bm: int, bn: int,
    stages: int, warps: int, precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output, log2 of the sum of each row's exponentials; +inf of a row that sees no key)."""
    checked(q, mask is not None, bm, bn, *_resolved(q, bm, bn, stages, warps))
    scores = _scores(q, k, mask, scale, causal)
    lse = torch.logsumexp(scores, -1)
    blind = lse == -math.inf
    p = torch.exp(scores - torch.where(blind, math.inf, lse)[..., None])
    out = torch.einsum("bhgqk,bhkd->bhgqd", p, v.to(p.dtype)).reshape(q.shape).to(q.dtype)
    return out, torch.where(blind, math.inf, lse * LOG2E).reshape(q.shape[:3])


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


@attention.register_kernel("cuda")
def _attention_cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool, bm: int, bn: int,
    stages: int, warps: int, precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from .kernels import attention as kernel

    stages, warps = _resolved(q, bm, bn, stages, warps)
    checked(q, mask is not None, bm, bn, stages, warps)
    with torch.cuda.device(q.device):  # Triton launches on the current device, whatever the tensors' is
        return kernel.forward(q, k, v, mask, scale, causal, kernel.Launch(bm, bn, stages, warps, precision))


@attention.register_fake
def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool, bm: int, bn: int,
    stages: int, warps: int, precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("tessera::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, scale: float,
    causal: bool, precision: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), the probabilities made again from `lse`."""
    scores = _scores(q, k, mask, scale, causal)
    shape = scores.shape[:4]
    p = torch.exp(scores - lse.reshape(shape)[..., None] / LOG2E)
    gradient = dout.to(p.dtype).reshape(*shape, -1)
    delta = (gradient * out.to(p.dtype).reshape(*shape, -1)).sum(-1, keepdim=True)
    ds = p * (torch.einsum("bhgqd,bhkd->bhgqk", gradient, v.to(p.dtype)) - delta) * scale
    dq = torch.einsum("bhgqk,bhkd->bhgqd", ds, k.to(p.dtype)).reshape(q.shape)
    dk = torch.einsum("bhgqk,bhgqd->bhkd", ds, q.to(p.dtype).reshape(*shape, -1))
    dv = torch.einsum("bhgqk,bhgqd->bhkd", p, gradient)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@attention_backward.register_kernel("cuda")
def _attention_backward_cuda(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, scale: float,
    causal: bool, precision: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from .kernels import attention as kernel
    from .kernels import attention_backward as backward

    launch = kernel.Launch(*backward_launch(q.shape[-1], q.dtype), precision)
    with torch.cuda.device(q.device):
        return backward.backward(dout, q, k, v, mask, out, lse, scale, causal, launch)


@attention_backward.register_fake
def _attention_backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, scale: float,
    causal: bool, precision: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.scale, ctx.causal = inputs[:6]
    ctx.precision = inputs[-1]
    ctx.save_for_backward(q, k, v, mask, *output)
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, dout: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, mask, out, lse = ctx.saved_tensors
    return *attention_backward(dout, q, k, v, mask, out, lse, ctx.scale, ctx.causal, ctx.precision), *(None,) * 8


attention.register_autograd(_gradient, setup_context=_setup)
