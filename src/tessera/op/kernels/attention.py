"""The forward kernel of attention: online softmax over tiles of keys, loaded into shared memory ahead of use.

A program takes BM queries of one head and walks the keys BN at a time. Exponentials are base 2 (one instruction).
"""

from __future__ import annotations

import math
from typing import Any

from ...errors import needs_extra
from .. import hints
from . import TRITON_TYPE, compile_for, pad_head

with needs_extra("triton", "triton", "Tessera's own GPU kernels"):
    import triton
    import triton.language as tl


@triton.jit
def _scan_keys(
    acc, total, top, q, k, v, row, begin, end, keys, dims, k_row, v_row, factor,
    EDGE: tl.constexpr, CAUSAL: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):
    """Walk the keys from `begin` to `end`; EDGE tiles may hold keys that some queries must not see."""
    dim = tl.arange(0, D)
    for start in tl.range(begin, end, BN):
        col = start + tl.arange(0, BN)
        k_at = k + col.to(tl.int64)[None, :] * k_row + dim[:, None]
        v_at = v + col.to(tl.int64)[:, None] * v_row + dim[None, :]
        key = tl.load(k_at, mask=(col < keys)[None, :] & (dim < dims)[:, None], other=0.0)
        scores = tl.dot(q, key, input_precision=PRECISION) * factor
        if EDGE:
            visible = (col < keys)[None, :]
            if CAUSAL:
                visible = visible & (col[None, :] <= row[:, None])
            scores = tl.where(visible, scores, -float("inf"))
        # a query sees its first key in its first tile, so this is never -inf
        higher = tl.maximum(top, tl.max(scores, 1))
        weight = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weight, 1)
        value = tl.load(v_at, mask=(col < keys)[:, None] & (dim < dims)[None, :], other=0.0)
        acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision=PRECISION)
        top = higher
    return acc, total, top


@triton.jit
def attention_kernel(
    q, k, v, out, heads, group, queries, keys, dims,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row, factor,
    CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute BM queries of one head; `group` heads of q share one of k and v."""
    blocks = tl.cdiv(queries, BM)
    # In a causal head, the last queries have the most keys. They go first, so that no long program starts last.
    first = (blocks - 1 - tl.program_id(0) % blocks) * BM
    which = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = which // heads, which % heads
    k += batch * k_batch + (head // group) * k_head
    v += batch * v_batch + (head // group) * v_head
    row, dim = first + tl.arange(0, BM), tl.arange(0, D)
    at, inside = row.to(tl.int64)[:, None], (row < queries)[:, None] & (dim < dims)[None, :]
    tile = tl.load(q + batch * q_batch + head * q_head + at * q_row + dim[None, :], mask=inside, other=0.0)
    acc = tl.zeros((BM, D), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), -float("inf"), tl.float32)
    end, plain = keys, (keys // BN) * BN
    if CAUSAL:
        end = tl.minimum(keys, first + BM)
        plain = tl.minimum(plain, ((first + 1) // BN) * BN)
    acc, total, top = _scan_keys(
        acc, total, top, tile, k, v, row, 0, plain, keys, dims, k_row, v_row, factor, False, CAUSAL, BN, D, PRECISION
    )
    acc, total, top = _scan_keys(
        acc, total, top, tile, k, v, row, plain, end, keys, dims, k_row, v_row, factor, True, CAUSAL, BN, D, PRECISION
    )
    acc /= total[:, None]
    tl.store(out + batch * out_batch + head * out_head + at * out_row + dim[None, :], acc, mask=inside)


def run_attention(
    q: Any, k: Any, v: Any, out: Any, *, scale: float, causal: bool, tile: tuple[int, int], stages: int, warps: int,
    precision: str = "tf32",
) -> None:
    """Fill `out` from (batch, heads, sequence, dim) tensors whose last dimension is contiguous.

    k and v have at least one key, and may have fewer heads. `precision` is how fp32 is multiplied: "tf32" or "ieee".
    """
    batch, heads, queries, dims = q.shape
    if not out.numel():
        return
    block, blocks = pad_head(dims), -(-queries // tile[0]) * batch * heads
    attention_kernel[(blocks,)](
        q, k, v, out, heads, heads // k.shape[1], queries, k.shape[2], dims, *q.stride()[:3], *k.stride()[:3],
        *v.stride()[:3], *out.stride()[:3], scale * math.log2(math.e), causal, *tile, block, precision,
        num_warps=warps, num_stages=stages,
    )
    if hints.listener is not None:
        step = 2 * tile[1] * block * k.element_size()  # keys and values
        hints.announce_launch(blocks, warps, stages=stages, tile_bytes=step)


def compile_attention(sides: tuple[int, int, int], dtype: str, stages: int, warps: int, target: Any) -> Any:
    """Return the kernel of a tile (BM, BN, D) for causal, aligned heads and a target."""
    constants = {"CAUSAL": True, "BM": sides[0], "BN": sides[1], "D": sides[2], "PRECISION": "tf32"}
    known = dict.fromkeys(("q", "k", "v", "out"), f"*{TRITON_TYPE[dtype]}") | {"factor": "fp32"}
    types = {name: known.get(name, "i32") for name in attention_kernel.arg_names if name not in constants}
    counts = ("heads", "group", "queries", "keys")
    return compile_for(attention_kernel, types, constants, counts, stages=stages, warps=warps, target=target)
