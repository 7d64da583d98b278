"""The forward kernel of attention: online softmax over tiles of keys, loaded into shared memory ahead of use.

A program takes BM queries of one head and walks the keys BN at a time. Exponentials are base 2 (one instruction), so
`lse` is the log2 of a row's sum. A row that sees no key gives zeros and an `lse` of +inf.

Dropout costs one hash per score: a number of the query and one of the key, mixed by multiplications. Philox, which
torch's kernels use, takes some hundred instructions for four numbers, and with it cuDNN's forward kernel takes 4.8
times as long (results/compiled_profile.json, ops_rows.json). The backward pass hashes again: no mask is stored.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ...errors import MissingExtra
from .. import hints
from . import TRITON_TYPE, compile_for, pad_head

try:
    import triton
    import triton.language as tl
except ImportError as e:
    raise MissingExtra("triton", "triton", "Tessera's own GPU kernels") from e

NO_MASK, BOOL_MASK, ADDED_MASK = 0, 1, 2


class AttentionLaunch(NamedTuple):
    """Queries and keys of a tile, tiles in flight, warps, and how fp32 is multiplied ("tf32" or "ieee")."""

    bm: int
    bn: int
    stages: int
    warps: int
    precision: str = "tf32"


class Dropout(NamedTuple):
    """The probability to drop, and the seed: one int64 on the device, so that a CUDA graph draws a new one."""

    p: float
    seed: Any


NO_DROPOUT = Dropout(0.0, None)


@triton.jit
def _load(at, outer, inner, outer_end, inner_end, OUTER: tl.constexpr, INNER: tl.constexpr):
    """A tile whose outer and inner indices are checked only where asked."""
    if OUTER and INNER:
        return tl.load(at, mask=(outer < outer_end) & (inner < inner_end), other=0.0)
    if OUTER:
        return tl.load(at, mask=outer < outer_end, other=0.0)
    if INNER:
        return tl.load(at, mask=inner < inner_end, other=0.0)
    return tl.load(at)


@triton.jit
def _apply_mask(scores, mask, row, col, queries, keys, mask_row, mask_col, CAUSAL: tl.constexpr, MASK: tl.constexpr):
    """Scores (base 2) with minus infinity where a query may not look, and the mask added; `row`, `col` broadcast."""
    visible = col < keys
    if CAUSAL:
        visible = visible & (col <= row)
    if MASK != 0:
        inside = (row < queries) & (col < keys)
        value = tl.load(mask + row.to(tl.int64) * mask_row + col.to(tl.int64) * mask_col, mask=inside, other=0)
        if MASK == 1:
            visible = visible & (value != 0)
        else:
            scores += value.to(tl.float32) * 1.4426950408889634
    return tl.where(visible, scores, -float("inf"))


@triton.jit
def _mix_bits(x):
    """A 32-bit number whose every bit depends on every bit of `x` (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _hash_row(seed, row):
    """The hash of a query, by its index among those of all heads."""
    drawn = tl.load(seed)
    low, high = (drawn & 0xFFFFFFFF).to(tl.uint32), ((drawn >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return _mix_bits(_mix_bits(row.to(tl.uint32) + low) ^ high)


@triton.jit
def _survives(row_hash, col, limit):
    """Whether a score survives dropout, by the hash of its query and its key, which broadcast.

    `limit` is 2^32 times the probability to drop, less 2^31: compared as signed numbers are.
    """
    x = (row_hash ^ (col.to(tl.uint32) * 0x9E3779B1)) * 0x85EBCA6B
    x = (x ^ (x >> 15)) * 0xC2B2AE35
    return x.to(tl.int32, bitcast=True) >= limit


@triton.jit
def _scan_keys(
    acc, total, top, q, k, v, mask, row, begin, end, queries, keys, dims, k_row, v_row, mask_row, mask_col, factor,
    row_hash, limit,
    EDGE: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, EVEN: tl.constexpr, DROP: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):
    """Walk the keys from `begin` to `end`; EDGE tiles may hold keys that some query must not see."""
    dim = tl.arange(0, D)
    for start in tl.range(begin, end, BN):
        col = start + tl.arange(0, BN)
        k_at = k + col.to(tl.int64)[None, :] * k_row + dim[:, None]
        scores = tl.dot(
            q, _load(k_at, col[None, :], dim[:, None], keys, dims, EDGE, not EVEN), input_precision=PRECISION
        )
        if EDGE:
            scores = _apply_mask(
                scores * factor, mask, row[:, None], col[None, :], queries, keys, mask_row, mask_col, CAUSAL, MASK
            )
            higher = tl.maximum(top, tl.max(scores, 1))
            # A row that has seen nothing yet has a top of -inf: subtract 0 there, or -inf - -inf is NaN.
            pivot = tl.where(higher == -float("inf"), 0.0, higher)
            weight = tl.exp2(scores - pivot[:, None])
        else:  # the factor is positive, so it may wait until after the maximum: one multiply-add per element
            higher = tl.maximum(top, tl.max(scores, 1) * factor)
            pivot = higher
            weight = tl.exp2(scores * factor - pivot[:, None])
        shrink = tl.exp2(top - pivot)
        total = total * shrink + tl.sum(weight, 1)
        if DROP:
            weight = tl.where(_survives(row_hash[:, None], col[None, :], limit), weight, 0.0)
        v_at = v + col.to(tl.int64)[:, None] * v_row + dim[None, :]
        tile = _load(v_at, col[:, None], dim[None, :], keys, dims, EDGE, not EVEN)
        acc = tl.dot(weight.to(tile.dtype), tile, acc * shrink[:, None], input_precision=PRECISION)
        top = higher
    return acc, total, top


@triton.jit(do_not_specialize=["limit"])
def attention_kernel(
    q, k, v, mask, out, lse, seed, heads, group, queries, keys, dims,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_col, out_batch, out_head, out_row, limit, factor, gain,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, EVEN: tl.constexpr, DROP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):
    """BM queries of one head; EVEN says that D is the head's own size, `gain` is 1 / (1 - dropout probability)."""
    blocks = tl.cdiv(queries, BM)
    # Of a causal head the last queries have the most keys: they go first, so that no long program starts last.
    first = (blocks - 1 - tl.program_id(0) % blocks) * BM
    which = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = which // heads, which % heads
    q += batch * q_batch + head * q_head
    k += batch * k_batch + (head // group) * k_head
    v += batch * v_batch + (head // group) * v_head
    out += batch * out_batch + head * out_head
    if MASK != 0:
        mask += batch * mask_batch + head * mask_head
    row, dim = first + tl.arange(0, BM), tl.arange(0, D)
    at = row.to(tl.int64)[:, None]
    tile = _load(q + at * q_row + dim[None, :], row[:, None], dim[None, :], queries, dims, True, not EVEN)
    acc = tl.zeros((BM, D), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), -float("inf"), tl.float32)
    row_hash = row
    if DROP:
        row_hash = _hash_row(seed, which * queries + row)
    end, plain = keys, (keys // BN) * BN
    if CAUSAL:
        end = tl.minimum(keys, first + BM)
        plain = tl.minimum(plain, ((first + 1) // BN) * BN)
    if MASK != 0:
        plain = 0
    else:
        acc, total, top = _scan_keys(
            acc, total, top, tile, k, v, mask, row, 0, plain, queries, keys, dims, k_row, v_row, mask_row, mask_col,
            factor, row_hash, limit, False, CAUSAL, MASK, EVEN, DROP, BN, D, PRECISION,
        )
    acc, total, top = _scan_keys(
        acc, total, top, tile, k, v, mask, row, plain, end, queries, keys, dims, k_row, v_row, mask_row, mask_col,
        factor, row_hash, limit, True, CAUSAL, MASK, EVEN, DROP, BN, D, PRECISION,
    )
    blind = total == 0.0
    acc *= (gain / tl.where(blind, 1.0, total))[:, None]
    tl.store(out + at * out_row + dim[None, :], acc, mask=(row < queries)[:, None] & (dim < dims)[None, :])
    tl.store(lse + which * queries + row, tl.where(blind, float("inf"), top + tl.log2(total)), mask=row < queries)


def run_attention(
    q: Any, k: Any, v: Any, mask: Any, out: Any, scale: float, causal: bool, launch: AttentionLaunch,
    dropout: Dropout = NO_DROPOUT,
) -> Any:
    """Fill `out` from (batch, heads, sequence, dim) tensors; return log2 of the rows' sums. k, v may have fewer heads.

    A boolean mask is True where a query sees a key; another mask is added to the scores. Masks broadcast.
    """
    if scale < 0:  # the kernel takes maxima before it scales
        q, scale = -q, -scale
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch, heads, queries, dims = q.shape
    lse = torch.empty(batch, heads, queries, device=q.device, dtype=torch.float32)
    if not out.numel():
        return lse.fill_(float("inf"))
    kind, mask_strides = NO_MASK, (0, 0, 0, 0)
    if mask is not None:
        mask = mask.expand(batch, heads, queries, k.shape[2])
        kind, mask_strides = (BOOL_MASK if mask.dtype == torch.bool else ADDED_MASK), mask.stride()
        mask = mask.view(torch.uint8) if kind == BOOL_MASK else mask
    block, blocks = pad_head(dims), -(-queries // launch.bm) * batch * heads
    attention_kernel[(blocks,)](
        q, k, v, mask, out, lse, dropout.seed, heads, heads // max(k.shape[1], 1), queries, k.shape[2], dims,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *mask_strides, *out.stride()[:3],
        round(dropout.p * 2**32) - 2**31, scale * math.log2(math.e), 1.0 / (1.0 - dropout.p),
        causal, kind, block == dims, dropout.seed is not None, launch.bm, launch.bn, block, launch.precision,
        num_warps=launch.warps, num_stages=launch.stages,
    )
    if hints.listener is not None:
        step = 2 * launch.bn * block * k.element_size()  # keys and values
        hints.announce_launch(blocks, launch.warps, stages=launch.stages, tile_bytes=step)
    return lse


def compile_attention(
    sides: tuple[int, int, int], dtype: str, stages: int, warps: int, target: Any, masked: bool = False,
    drops: bool = False,
) -> Any:
    """The kernel of a tile (BM, BN, D) for causal, aligned heads and a target; a mask is of their dtype, and added."""
    bm, bn, block = sides
    constants = {
        "CAUSAL": True, "MASK": ADDED_MASK if masked else NO_MASK, "EVEN": True, "BM": bm, "BN": bn, "D": block,
        "PRECISION": "tf32", "DROP": drops, **({} if masked else {"mask": None}), **({} if drops else {"seed": None}),
    }
    known = dict.fromkeys(("q", "k", "v", "mask", "out"), f"*{TRITON_TYPE[dtype]}")
    known |= {"lse": "*fp32", "factor": "fp32", "gain": "fp32", "seed": "*i64"}
    types = {name: known.get(name, "i32") for name in attention_kernel.arg_names if name not in constants}
    counts = ("heads", "group", "queries", "keys", "mask_col", "limit")
    return compile_for(attention_kernel, types, constants, counts, stages=stages, warps=warps, target=target)
