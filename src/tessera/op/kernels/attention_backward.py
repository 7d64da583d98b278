"""The backward kernels of attention: one walks the queries for dK and dV, one the keys for dQ; there are no atomics.

Both recompute the probabilities from the saved `lse`, so the scores are never stored. With fewer heads of keys than of
queries, the program of a key head walks every query head of its group: the sum is exact and has one order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .. import hints
from ..layouts import alike, block_dim
from .attention import LOG2E, NONE_DROPPED, Drop, Launch, _kept, _load, _masked, _number_of, mask_of, rows_of
from .direct import Kernel

ROWS = 32  # queries of a program of `_row_products`: 32 elements a thread at a head of 128
ROWS_WARPS = 4


@triton.jit
def _row_products(
    out, dout, delta, heads, queries, dims, out_batch, out_head, out_row, dout_batch, dout_head, dout_row,
    BM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The product of each row of the output with its gradient: what the softmax takes off every gradient of a score."""
    blocks = tl.cdiv(queries, BM)
    row, dim = (tl.program_id(0) % blocks) * BM + tl.arange(0, BM), tl.arange(0, D)
    which = (tl.program_id(0) // blocks).to(tl.int64)
    out += (which // heads) * out_batch + (which % heads) * out_head
    dout += (which // heads) * dout_batch + (which % heads) * dout_head
    inside = (row < queries)[:, None] & (dim < dims)[None, :]
    at = row.to(tl.int64)[:, None]
    gradient = tl.load(dout + at * dout_row + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    value = tl.load(out + at * out_row + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(delta + which * queries + row, tl.sum(gradient * value, 1), mask=row < queries)


@triton.jit
def _walk_queries(
    k_sum, v_sum, k, v, q, mask, dout, lse, delta, col, begin, end, queries, keys, dims,
    q_row, dout_row, mask_row, mask_col, factor, seed, first, limit, gain,
    EDGE: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, EVEN: tl.constexpr, DROP: tl.constexpr,
    BM: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the queries from `begin` to `end` give to dK and dV of the keys `col`; scores are kept key by query.

    `first` is the index among those of all heads that this head's queries start from.
    """
    dim = tl.arange(0, D)
    for start in tl.range(begin, end, BM):
        row = start + tl.arange(0, BM)
        far = row.to(tl.int64)[:, None]
        q_tile = _load(q + far * q_row + dim[None, :], row[:, None], dim[None, :], queries, dims, True, not EVEN)
        scores = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION) * factor
        if EDGE:
            scores = _masked(scores, mask, row[None, :], col[:, None], queries, keys, mask_row, mask_col, CAUSAL, MASK)
        # Queries past the end get an infinite sum, so a probability of zero. Keys past the end are never stored.
        p = tl.exp2(scores - tl.load(lse + row, mask=row < queries, other=float("inf"))[None, :])
        d_tile = _load(dout + far * dout_row + dim[None, :], row[:, None], dim[None, :], queries, dims, True, not EVEN)
        change = tl.dot(v, tl.trans(d_tile), input_precision=PRECISION)
        weight = p
        if DROP:
            kept = _kept(_number_of(seed, first + row)[None, :], col[:, None], limit)
            weight, change = tl.where(kept, p, 0.0), tl.where(kept, change * gain, 0.0)
        v_sum = tl.dot(weight.to(d_tile.dtype), d_tile, v_sum, input_precision=PRECISION)
        change -= tl.load(delta + row, mask=row < queries, other=0.0)[None, :]
        k_sum = tl.dot((p * change).to(q_tile.dtype), q_tile, k_sum, input_precision=PRECISION)
    return k_sum, v_sum


@triton.jit(do_not_specialize=["limit"])
def _keys_backward(
    q, k, v, mask, dout, lse, delta, dk, dv, seed, kv_heads, group, queries, keys, dims,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_col, dout_batch, dout_head, dout_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, limit, factor, scale, gain,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, EVEN: tl.constexpr, DROP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(keys, BN)
    first = (tl.program_id(0) % blocks) * BN  # the first keys are seen by the most queries, so they go first
    which = (tl.program_id(0) // blocks).to(tl.int64)
    batch, kv_head = which // kv_heads, which % kv_heads
    col, dim = first + tl.arange(0, BN), tl.arange(0, D)
    at = col.to(tl.int64)[:, None]
    k_at = k + batch * k_batch + kv_head * k_head + at * k_row + dim[None, :]
    v_at = v + batch * v_batch + kv_head * v_head + at * v_row + dim[None, :]
    k_tile = _load(k_at, col[:, None], dim[None, :], keys, dims, True, not EVEN)
    v_tile = _load(v_at, col[:, None], dim[None, :], keys, dims, True, not EVEN)
    k_sum = tl.zeros((BN, D), tl.float32)
    v_sum = tl.zeros((BN, D), tl.float32)
    begin, plain = 0, 0
    if CAUSAL:
        begin = (first // BM) * BM
        plain = tl.minimum(begin + tl.cdiv(first + BN - begin, BM) * BM, tl.cdiv(queries, BM) * BM)
    if MASK != 0:
        plain = tl.cdiv(queries, BM) * BM
    for member in range(group):
        head = kv_head * group + member
        q_here = q + batch * q_batch + head * q_head
        dout_here = dout + batch * dout_batch + head * dout_head
        sums = (batch * kv_heads * group + head) * queries
        mask_here = mask
        if MASK != 0:
            mask_here += batch * mask_batch + head * mask_head
        if CAUSAL or MASK != 0:
            k_sum, v_sum = _walk_queries(
                k_sum, v_sum, k_tile, v_tile, q_here, mask_here, dout_here, lse + sums, delta + sums, col,
                begin, plain, queries, keys, dims, q_row, dout_row, mask_row, mask_col, factor,
                seed, sums, limit, gain, True, CAUSAL, MASK, EVEN, DROP, BM, D, PRECISION,
            )  # fmt: skip
        if MASK == 0:
            k_sum, v_sum = _walk_queries(
                k_sum, v_sum, k_tile, v_tile, q_here, mask_here, dout_here, lse + sums, delta + sums, col,
                plain, queries, queries, keys, dims, q_row, dout_row, mask_row, mask_col, factor,
                seed, sums, limit, gain, False, CAUSAL, MASK, EVEN, DROP, BM, D, PRECISION,
            )  # fmt: skip
    stored = (col < keys)[:, None] & (dim < dims)[None, :]
    dk_at = dk + batch * dk_batch + kv_head * dk_head + at * dk_row + dim[None, :]
    dv_at = dv + batch * dv_batch + kv_head * dv_head + at * dv_row + dim[None, :]
    tl.store(dk_at, k_sum * scale, mask=stored)
    tl.store(dv_at, v_sum * gain, mask=stored)


@triton.jit
def _walk_keys(
    q_sum, q, dout, lse, delta, k, v, mask, row, begin, end, queries, keys, dims,
    k_row, v_row, mask_row, mask_col, factor, number, limit, gain,
    EDGE: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, EVEN: tl.constexpr, DROP: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the keys from `begin` to `end` give to dQ of the queries `row`."""
    dim = tl.arange(0, D)
    for start in tl.range(begin, end, BN):
        col = start + tl.arange(0, BN)
        far = col.to(tl.int64)[:, None]
        k_tile = _load(k + far * k_row + dim[None, :], col[:, None], dim[None, :], keys, dims, EDGE, not EVEN)
        v_tile = _load(v + far * v_row + dim[None, :], col[:, None], dim[None, :], keys, dims, EDGE, not EVEN)
        scores = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION) * factor
        if EDGE:
            scores = _masked(scores, mask, row[:, None], col[None, :], queries, keys, mask_row, mask_col, CAUSAL, MASK)
        change = tl.dot(dout, tl.trans(v_tile), input_precision=PRECISION)
        if DROP:
            change = tl.where(_kept(number[:, None], col[None, :], limit), change * gain, 0.0)
        ds = tl.exp2(scores - lse[:, None]) * (change - delta[:, None])
        q_sum = tl.dot(ds.to(k_tile.dtype), k_tile, q_sum, input_precision=PRECISION)
    return q_sum


@triton.jit(do_not_specialize=["limit"])
def _queries_backward(
    q, k, v, mask, dout, lse, delta, dq, seed, heads, group, queries, keys, dims,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_col, dout_batch, dout_head, dout_row, dq_batch, dq_head, dq_row,
    limit, factor, scale, gain,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, EVEN: tl.constexpr, DROP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(queries, BM)
    first = (blocks - 1 - tl.program_id(0) % blocks) * BM
    which = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = which // heads, which % heads
    k += batch * k_batch + (head // group) * k_head
    v += batch * v_batch + (head // group) * v_head
    if MASK != 0:
        mask += batch * mask_batch + head * mask_head
    row, dim = first + tl.arange(0, BM), tl.arange(0, D)
    at = row.to(tl.int64)[:, None]
    q_at = q + batch * q_batch + head * q_head + at * q_row + dim[None, :]
    d_at = dout + batch * dout_batch + head * dout_head + at * dout_row + dim[None, :]
    q_tile = _load(q_at, row[:, None], dim[None, :], queries, dims, True, not EVEN)
    d_tile = _load(d_at, row[:, None], dim[None, :], queries, dims, True, not EVEN)
    known = tl.load(lse + which * queries + row, mask=row < queries, other=float("inf"))
    mean = tl.load(delta + which * queries + row, mask=row < queries, other=0.0)
    q_sum = tl.zeros((BM, D), tl.float32)
    number = row
    if DROP:
        number = _number_of(seed, which * queries + row)
    end, plain = keys, (keys // BN) * BN
    if CAUSAL:
        end = tl.minimum(keys, first + BM)
        plain = tl.minimum(plain, ((first + 1) // BN) * BN)
    if MASK != 0:
        plain = 0
    else:
        q_sum = _walk_keys(
            q_sum, q_tile, d_tile, known, mean, k, v, mask, row, 0, plain, queries, keys, dims,
            k_row, v_row, mask_row, mask_col, factor, number, limit, gain,
            False, CAUSAL, MASK, EVEN, DROP, BN, D, PRECISION,
        )  # fmt: skip
    q_sum = _walk_keys(
        q_sum, q_tile, d_tile, known, mean, k, v, mask, row, plain, end, queries, keys, dims,
        k_row, v_row, mask_row, mask_col, factor, number, limit, gain,
        True, CAUSAL, MASK, EVEN, DROP, BN, D, PRECISION,
    )  # fmt: skip
    stored = (row < queries)[:, None] & (dim < dims)[None, :]
    dq_at = dq + batch * dq_batch + head * dq_head + at * dq_row + dim[None, :]
    tl.store(dq_at, q_sum * scale, mask=stored)


_ROW_PRODUCTS, _KEYS_BACKWARD, _QUERIES_BACKWARD = (
    Kernel(kernel) for kernel in (_row_products, _keys_backward, _queries_backward)
)


def backward(
    dout: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, lse: Any, scale: float, causal: bool, launch: Launch,
    drop: Drop = NONE_DROPPED,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(dq, dk, dv). A program owns `launch.bm` queries or keys and walks the others by `launch.bn`."""
    dq, dk, dv = alike(q), alike(k), alike(v)
    q, k, v, dout, out = (rows_of(x) for x in (q, k, v, dout, out))
    batch, heads, queries, dims = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    block = block_dim(dims)
    delta = torch.empty_like(lse)
    row_blocks = -(-queries // ROWS) * batch * heads
    sizes = heads, queries, dims, *out.stride()[:3], *dout.stride()[:3]
    _ROW_PRODUCTS.launch(row_blocks, (out, dout, delta), sizes, (), (ROWS, block), warps=ROWS_WARPS)
    mask, kind, mask_strides = mask_of(mask, q, k)
    read = q, k, v, mask, dout, lse, delta
    numbers = (
        heads // kv_heads, queries, keys, dims,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *mask_strides, *dout.stride()[:3],
    )  # fmt: skip
    limit, gain = drop.arguments()
    free, flags = (scale * LOG2E, scale, gain), (causal, kind, block == dims, drop.seed is not None)
    own, walked = launch.bm, launch.bn
    key_blocks, query_blocks = -(-keys // own) * batch * kv_heads, -(-queries // own) * batch * heads
    _KEYS_BACKWARD.launch(
        key_blocks, (*read, dk, dv, drop.seed), (kv_heads, *numbers, *dk.stride()[:3], *dv.stride()[:3], limit), free,
        (*flags, walked, own, block, launch.precision), warps=launch.warps, stages=launch.stages,
    )  # fmt: skip
    _QUERIES_BACKWARD.launch(
        query_blocks, (*read, dq, drop.seed), (heads, *numbers, *dq.stride()[:3], limit), free,
        (*flags, own, walked, block, launch.precision), warps=launch.warps, stages=launch.stages,
    )  # fmt: skip
    if hints.listener is not None:
        step = 2 * walked * block * q.element_size()  # queries and their gradients, then keys and values
        hints.launched(row_blocks, ROWS_WARPS)
        hints.launched(key_blocks, launch.warps, stages=launch.stages, tile_bytes=step)
        hints.launched(query_blocks, launch.warps, stages=launch.stages, tile_bytes=step)
    return dq, dk, dv
