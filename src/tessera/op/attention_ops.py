"""Attention as a torch operator, `tessera::attention`: our Triton kernel on CUDA, torch's elsewhere.

(batch, heads, sequence, dim) tensors; keys and values may have fewer heads. `bm`, `bn` are the kernel's tile; with
`stages` and `warps` of 0, `pipeline` chooses. Gradients are those of torch's own attention. `graph/flops.py` reads
arguments by position.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import arguments, hints, tile
from .dispatch import device_of, in_transform, make_differentiable
from .kernels import pad_head

STAGES = 2  # double-buffered: the next tile of keys and values loads while one is multiplied
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, float scale, bool causal, int bm, int bn, int stages, int warps, str precision)"
    " -> Tensor"
)


def forward_bytes(shape: tile.Tile, dtype: str, stages: int) -> int:
    """Return the bytes of the kernel's shared memory: the queries, and `stages` tiles of keys and values."""
    return (shape.bm + 2 * max(1, stages) * shape.bn) * shape.bk * tile.ITEM_BYTES[dtype]


def _compile(shape: tile.Tile, dtype: str, stages: int, warps: int, target: Any) -> Any:
    from .kernels.attention import compile_attention

    return compile_attention(shape.sides, dtype, stages, warps, target).metadata


tile.register("flash_attention", _compile, free=(True, True, False), formula=forward_bytes, sides=2)


def pipeline(bm: int, bn: int, dims: int) -> tuple[int, int]:
    """Return (stages, warps) of the kernel: a schedule's hints, else those that keep accumulators in registers."""
    asked = hints.current()
    # fp32 scores and sums take at most 128 of a thread's 255 registers: tests compile the kernels without spills.
    warps = 4 if bm * (bn + pad_head(dims)) <= 32 * 4 * 128 else 8
    return asked.cp_async_depth or STAGES, 4 * asked.warp_mma_concurrency if asked.warp_mma_concurrency else warps


@functools.lru_cache(maxsize=256)
def check_tile(dtype: torch.dtype, device: torch.device, dims: int, bm: int, bn: int, stages: int, warps: int) -> None:
    """Raise TileError for a tile that does not fit the device (for a CPU: Hopper)."""
    dtype = torch.float32 if dtype == torch.float64 else dtype  # fp64 runs on CPUs only, and is checked as fp32
    shape = tile.Tile(bm, bn, pad_head(dims))
    tile.check("flash_attention", shape, dtype, stages, warps, tile.arch_of(device))


def _attend_by_torch(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    with arguments.without_autocast(q):
        gqa = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}  # the keyword came with torch 2.5
        result: Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, **gqa)
        return result


@torch.library.custom_op("tessera::attention", mutates_args=(), schema=_SCHEMA)
def attention_op(q: Any, k: Any, v: Any, scale: float, causal: bool, bm: int, bn: int, *launch: Any) -> Any:
    """Return softmax(q k^T * scale) v, in q's memory layout."""
    stages, warps, precision = launch
    own = pipeline(bm, bn, q.shape[-1])
    stages, warps = stages or own[0], warps or own[1]
    check_tile(q.dtype, q.device, q.shape[-1], bm, bn, stages, warps)
    out = torch.empty_like(q)
    if not q.is_cuda:
        return out.copy_(_attend_by_torch(q, k, v, scale, causal))
    from .kernels.attention import run_attention

    with device_of(q):
        options = {"scale": scale, "causal": causal, "tile": (bm, bn), "precision": precision}
        run_attention(q, k, v, out, stages=stages, warps=warps, **options)
    return out


@attention_op.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(q)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, ctx.scale, ctx.causal = inputs[:5]
    ctx.save_for_backward(q, k, v)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend_by_torch(q, k, v, ctx.scale, ctx.causal)

    # Torch's fused kernels have no second derivatives and no rules for vmap.
    fused = not (torch.is_grad_enabled() or in_transform())
    with contextlib.nullcontext() if fused else sdpa_kernel(SDPBackend.MATH):
        _, pull_back = torch.func.vjp(attend, *ctx.saved_tensors)
        return (*pull_back(gradient), *(None,) * 7)


attention = make_differentiable(attention_op, _save, _backward, "flash_attention", "tile_shape")
