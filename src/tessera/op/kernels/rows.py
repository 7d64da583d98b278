"""Kernels over rows: softmax, layer norm, RMS norm, the last two with a residual added on the way.

A program holds whole rows in registers, so each element is read once and written once. Statistics are fp32 whatever the
tensors are. Gradients of weights are summed by few programs into fp32 rows of their own and then added up: no atomics,
so the same input gives the same bits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from ...errors import needs_extra
from .. import hints

with needs_extra("triton", "triton", "Tessera's own GPU kernels"):
    import triton
    import triton.language as tl

TILE = 2048  # elements a program of four warps takes; short rows are taken several at a time


class RowBlock(NamedTuple):
    """How a program is cut: the rows it takes at a time, columns (a power of two), warps."""

    rows: int
    cols: int
    warps: int


@functools.lru_cache(maxsize=1024)
def row_block(cols: int) -> RowBlock:
    """Return the block for rows of `cols` elements: 16 elements a thread or more, and at most 32 warps."""
    block = max(triton.next_power_of_2(cols), 16)
    return RowBlock(max(TILE // block, 1), block, min(max(block // 512, 4), 32))


@triton.jit
def _softmax_forward(x, y, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = row.to(tl.int64)[:, None] * cols + col[None, :]
    value = tl.load(x + at, mask=inside, other=-float("inf")).to(tl.float32)
    power = tl.exp(value - tl.max(value, 1)[:, None])
    tl.store(y + at, power * (1.0 / tl.sum(power, 1))[:, None], mask=inside)


@triton.jit
def _softmax_backward(dy, y, dx, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = row.to(tl.int64)[:, None] * cols + col[None, :]
    gradient = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    dot = tl.sum(gradient * value, 1)
    tl.store(dx + at, value * (gradient - dot[:, None]), mask=inside)


@triton.jit
def _norm_forward(
    x, residual, weight, bias, y, summed, mean, rstd, rows, cols, eps,
    CENTERED: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    in_row = col < cols
    inside = (row < rows)[:, None] & in_row[None, :]
    at = row.to(tl.int64)[:, None] * cols + col[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        # The sum is rounded once, and the norm is of the stored sum, because the backward pass reads it back.
        rounded = value.to(summed.dtype.element_ty)
        tl.store(summed + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if CENTERED:
        middle = tl.sum(value, 1) / cols
        tl.store(mean + row, middle, mask=row < rows)
        value = tl.where(inside, value - middle[:, None], 0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(value * value, 1) / cols + eps)
    tl.store(rstd + row, inverse, mask=row < rows)
    value *= inverse[:, None]
    if WEIGHT:
        value *= tl.load(weight + col, mask=in_row, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        value += tl.load(bias + col, mask=in_row, other=0.0).to(tl.float32)[None, :]
    tl.store(y + at, value, mask=inside)


@triton.jit
def _norm_backward(
    dy, dsummed, x, weight, mean, rstd, dx, dweight, dbias, rows, cols, blocks,
    CENTERED: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):
    col = tl.arange(0, COLS)
    in_row = col < cols
    if WEIGHT:
        factor = tl.load(weight + col, mask=in_row, other=0.0).to(tl.float32)[None, :]
    weight_sum = tl.zeros((ROWS, COLS), tl.float32)
    bias_sum = tl.zeros((ROWS, COLS), tl.float32)
    # The next rows load while these are reduced, because a program has no other to run in its place.
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & in_row[None, :]
        at = row.to(tl.int64)[:, None] * cols + col[None, :]
        gradient = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        if CENTERED:
            value = tl.where(inside, value - tl.load(mean + row, mask=row < rows, other=0.0)[:, None], 0.0)
        value *= inverse
        if DWEIGHT:
            weight_sum += gradient * value
        if DBIAS:
            bias_sum += gradient
        if WEIGHT:
            gradient *= factor
        through = gradient - value * (tl.sum(gradient * value, 1) / cols)[:, None]
        if CENTERED:
            through -= (tl.sum(gradient, 1) / cols)[:, None]
        through *= inverse
        if RESIDUAL:
            through += tl.load(dsummed + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, through, mask=inside)
    part = tl.program_id(0).to(tl.int64) * cols + col
    if DWEIGHT:
        tl.store(dweight + part, tl.sum(weight_sum, 0), mask=in_row)
    if DBIAS:
        tl.store(dbias + part, tl.sum(bias_sum, 0), mask=in_row)


def softmax_forward(x: Any, dtype: Any) -> Any:
    """Return the softmax of the rows (the last dimension) of a contiguous tensor, written as `dtype`."""
    cols = x.shape[-1]
    y, block = torch.empty_like(x, dtype=dtype), row_block(cols)
    _softmax(_softmax_forward, (x, y), x.numel(), cols, block)
    return y


def softmax_backward(dy: Any, y: Any, dtype: Any) -> Any:
    """Return the gradient of softmax's input, from its output; both are contiguous matrices."""
    cols = y.shape[-1]
    dx, block = torch.empty_like(y, dtype=dtype), row_block(cols)
    _softmax(_softmax_backward, (dy, y, dx), y.numel(), cols, block)
    return dx


def _softmax(kernel: Any, tensors: tuple[Any, ...], elements: int, cols: int, block: RowBlock) -> None:
    if not elements:
        return
    rows = elements // cols
    blocks = -(-rows // block.rows)
    kernel[(blocks,)](*tensors, rows, cols, block.rows, block.cols, num_warps=block.warps)
    if hints.listener is not None:
        hints.announce_launch(blocks, block.warps)


def norm_forward(
    x: Any, residual: Any, weight: Any, bias: Any, *, eps: float, centered: bool
) -> tuple[Any, Any | None, Any | None, Any]:
    """Return (y, x + residual or None, mean or None, 1/deviation) of the rows of a contiguous tensor."""
    cols, elements = x.shape[-1], x.numel()
    rows = elements // cols if cols else x.shape[:-1].numel()
    y, block = torch.empty_like(x), row_block(cols)
    summed = torch.empty_like(x) if residual is not None else None
    mean = torch.empty(rows, device=x.device, dtype=torch.float32) if centered else None
    rstd = torch.empty(rows, device=x.device, dtype=torch.float32)
    if elements:
        blocks = -(-rows // block.rows)
        flags = centered, residual is not None, weight is not None, bias is not None, block.rows, block.cols
        tensors = x, residual, weight, bias, y, summed, mean, rstd
        _norm_forward[(blocks,)](*tensors, rows, cols, eps, *flags, num_warps=block.warps)
        if hints.listener is not None:
            hints.announce_launch(blocks, block.warps)
    return y, summed, mean, rstd


def norm_backward(
    dy: Any, dsummed: Any, x: Any, weight: Any, *, mean: Any, rstd: Any, weight_grad: bool, bias_grad: bool
) -> tuple[Any, Any | None, Any | None]:
    """Return (dx, dweight, dbias), the last two in fp32; `mean` is None for RMS norm, `x` is what was normalized."""
    rows, cols = x.shape
    dx, block = torch.empty_like(x), row_block(cols)
    blocks = -(-rows // block.rows)
    programs = max(min(blocks, count_programs(x.device, block.warps)), 1)
    parts = [
        torch.empty(programs, cols, device=x.device, dtype=torch.float32) if g else None
        for g in (weight_grad, bias_grad)
    ]
    if not x.numel():
        return dx, *(None if p is None else p.new_zeros(cols) for p in parts)
    stages = count_stages(block, x.element_size())
    flags = mean is not None, dsummed is not None, weight is not None, weight_grad, bias_grad
    tensors = dy, dsummed, x, weight, mean, rstd, dx, *parts
    _norm_backward[(programs,)](
        *tensors, rows, cols, blocks, *flags, block.rows, block.cols, stages, num_warps=block.warps
    )
    if hints.listener is not None:
        step = (2 if dsummed is None else 3) * block.rows * block.cols * x.element_size()
        hints.announce_launch(programs, block.warps, stages=stages, tile_bytes=step)
    dweight, dbias = (None if p is None else p.sum(0) for p in parts)
    return dx, dweight, dbias


def count_stages(block: RowBlock, item_bytes: int) -> int:
    """Return 2 if the next rows of three tensors fit the shared memory of all chips since Ampere (99 KiB), else 1."""
    return 2 if 3 * block.rows * block.cols * item_bytes <= 96 << 10 else 1


@functools.lru_cache(maxsize=64)
def count_programs(device: Any, warps: int) -> int:
    """Return the programs that fill the device once: 16 warps on a multiprocessor, with 128 registers a thread."""
    if device.type != "cuda":
        return 4  # in Triton's interpreter, enough to exercise the sum of parts
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * max(16 // warps, 1)
