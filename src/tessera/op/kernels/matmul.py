"""The kernels of a given tile: a matrix product, and a 2-d convolution as an implicit matrix product. Sums are fp32.

A block computes BM x BN of the result. Tiles of the operands arrive in shared memory while earlier ones are multiplied
(num_stages in flight). Blocks are numbered in groups of GROUP rows, so that blocks that run at the same time share
columns of the right operand in the L2. Elements outside a matrix are loaded as zero and not stored.

The convolution's rows are output pixels, its columns output channels; the depth runs over taps of the filter and input
channels. The image has its channels innermost (NHWC), the filter is (out, height, width, in): no patch is written out.
"""

from __future__ import annotations

from typing import Any

from ...errors import TileError, needs_extra
from .. import hints
from ..tile import Tile
from . import TRITON_TYPE, compile_for

with needs_extra("triton", "triton", "a product of a given tile"):
    import triton
    import triton.language as tl

GROUP = 8  # rows of tiles in one group: with 132 SMs, about 8 x 16 tiles run at a time, which need the fewest operands


@triton.jit
def _place(block, rows, cols, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Return the row and column of a block in tiles."""
    down, across = tl.cdiv(rows, BM), tl.cdiv(cols, BN)
    first = block // (GROUP * across) * GROUP
    height = min(down - first, GROUP)
    within = block % (GROUP * across)
    return first + within % height, within // height


@triton.jit
def matmul_kernel(
    a, b, c, scale_a, scale_b, rows, cols, depth, a_batch, a_row, a_col, b_batch, b_row, b_col, c_batch, c_row,
    scale_a_batch, scale_b_batch, SCALED: tl.constexpr, DOT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):
    """Compute one tile of the product; DOT is how fp32 is multiplied (tf32 or ieee)."""
    # Batches are numbered along the first axis of the grid too, because the other axes end at 65535.
    tiles = tl.cdiv(rows, BM) * tl.cdiv(cols, BN)
    down, across = _place(tl.program_id(0) % tiles, rows, cols, BM, BN, GROUP)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    row, col, k = down * BM + tl.arange(0, BM), across * BN + tl.arange(0, BN), tl.arange(0, BK)
    row_in, col_in = (row < rows)[:, None], (col < cols)[None, :]
    # 64-bit offsets: rows times a stride may exceed 2^31 (for logits of 16384 x 151936 it does). They are added once.
    at_a = a + batch * a_batch + row.to(tl.int64)[:, None] * a_row + k.to(tl.int64)[None, :] * a_col
    at_b = b + batch * b_batch + k.to(tl.int64)[:, None] * b_row + col.to(tl.int64)[None, :] * b_col
    step_a, step_b = tl.cast(a_col, tl.int64) * BK, tl.cast(b_row, tl.int64) * BK
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(tl.cdiv(depth, BK)):
        rest = depth - step * BK
        left = tl.load(at_a, mask=row_in & (k < rest)[None, :], other=0.0)
        right = tl.load(at_b, mask=(k < rest)[:, None] & col_in, other=0.0)
        if left.dtype == tl.float8e4nv:  # Hopper's fp8 units keep 14 bits of a sum, so add up in fp32 once a step
            acc = tl.dot(left, right, acc, max_num_imprecise_acc=BK)
        else:
            acc = tl.dot(left, right, acc, input_precision=DOT)
        at_a += step_a
        at_b += step_b
    if SCALED:
        acc *= tl.load(scale_a + batch * scale_a_batch) * tl.load(scale_b + batch * scale_b_batch)
    at_c = c + batch * c_batch + row.to(tl.int64)[:, None] * c_row + col[None, :]
    tl.store(at_c, acc.to(c.dtype.element_ty), mask=row_in & col_in)


@triton.jit
def conv_kernel(
    x, w, out, pixels, filters, depth, height, width, out_height, out_width,
    x_image, x_row, x_col, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    CHANNELS: tl.constexpr, TAPS_W: tl.constexpr, DOT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):
    """Compute one tile of one group of filters; `filters` and CHANNELS are those of a group."""
    down, across = _place(tl.program_id(0), pixels, filters, BM, BN, GROUP)
    group = tl.program_id(1).to(tl.int64)
    pixel, column, k = down * BM + tl.arange(0, BM), across * BN + tl.arange(0, BN), tl.arange(0, BK)
    pixel_in, column_in = (pixel < pixels)[:, None], (column < filters)[None, :]
    image, place = pixel // (out_height * out_width), pixel % (out_height * out_width)
    top = (place // out_width * stride_h - pad_h)[:, None]
    left = (place % out_width * stride_w - pad_w)[:, None]
    at_image = x + (group * CHANNELS + image.to(tl.int64) * x_image)[:, None]
    at_filter = w + ((group * filters + column.to(tl.int64)) * depth)[None, :]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(tl.cdiv(depth, BK)):
        at = step * BK + k
        tap = at // CHANNELS
        row, col = top + (tap // TAPS_W * dilation_h)[None, :], left + (tap % TAPS_W * dilation_w)[None, :]
        seen = pixel_in & (row >= 0) & (row < height) & (col >= 0) & (col < width) & (at < depth)[None, :]
        patch = tl.load(at_image + row * x_row + col * x_col + (at % CHANNELS)[None, :], mask=seen, other=0.0)
        taps = tl.load(at_filter + at[:, None], mask=(at < depth)[:, None] & column_in, other=0.0)
        acc = tl.dot(patch, taps, acc, input_precision=DOT)
    at_out = out + pixel.to(tl.int64)[:, None] * (filters * tl.num_programs(1)) + (group * filters + column)[None, :]
    tl.store(at_out, acc.to(out.dtype.element_ty), mask=pixel_in & column_in)


def launch_matmul(
    a: Any, b: Any, out: Any, *, tile: Tile, stages: int, warps: int, scales: tuple[Any, Any] | None = None,
    dot: str = "tf32",
) -> None:
    """Fill `out` (batch, rows, cols; rows contiguous) with the products of `a` (batch or 1, rows, depth) and `b`.

    `scales` has one number for each matrix of `a` and of `b`, or one for all.
    """
    batch, rows, cols = out.shape
    scale_a, scale_b = scales or (out, out)
    steps = (0, 0) if scales is None else (int(scale_a.numel() > 1), int(scale_b.numel() > 1))
    strides = [(x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), x.stride(2)) for x in (a, b)]
    arguments = a, b, out, scale_a, scale_b, rows, cols, a.shape[2], *strides[0], *strides[1], *out.stride()[:2], *steps
    grid = (triton.cdiv(rows, tile.bm) * triton.cdiv(cols, tile.bn) * batch, 1)
    step = tile.bk * (tile.bm * a.element_size() + tile.bn * b.element_size())
    known = {"SCALED": scales is not None, "DOT": dot}
    _launch("matmul", matmul_kernel, grid, arguments, known, tile, stages, warps, step)


def launch_conv(
    x: Any, w: Any, out: Any, *, stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int],
    groups: int, tile: Tile, stages: int, warps: int, dot: str = "tf32",
) -> None:
    """Fill `out` (n, out_height, out_width, filters; contiguous) with the convolution.

    `x` is (n, height, width, channels), innermost last; `w` is (filters, taps_h, taps_w, channels of a group),
    contiguous.
    """
    pixels, filters = out.shape[0] * out.shape[1] * out.shape[2], out.shape[3] // groups
    arguments = (
        x, w, out, pixels, filters, w.shape[1] * w.shape[2] * w.shape[3], *x.shape[1:3], *out.shape[1:3],
        *x.stride()[:3], *stride, *padding, *dilation,
    )
    grid = (triton.cdiv(pixels, tile.bm) * triton.cdiv(filters, tile.bn), groups)
    known = {"CHANNELS": w.shape[3], "TAPS_W": w.shape[2], "DOT": dot}
    step = tile.bk * (tile.bm + tile.bn) * x.element_size()
    _launch("conv2d", conv_kernel, grid, arguments, known, tile, stages, warps, step)


def _launch(
    op: str, kernel: Any, grid: tuple[int, int], arguments: tuple[Any, ...], known: dict[str, Any], tile: Tile,
    stages: int, warps: int, step: int,
) -> None:
    if not grid[0] * grid[1]:
        return
    sides = {"BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "GROUP": GROUP}
    try:
        kernel[grid](*arguments, **known, **sides, num_stages=stages, num_warps=warps)
    except triton.runtime.errors.OutOfResources as e:
        raise _too_large(op, tile, e) from e
    if hints.listener is not None:
        hints.announce_launch(grid[0] * grid[1], warps, stages=stages, tile_bytes=step)


def _too_large(op: str, tile: Tile, refused: Any) -> TileError:
    """Return the error for a launch that the driver refused: its strides need more than the checked aligned ones."""
    return TileError(
        f"op.{op}: tile_shape={tile} does not fit this call",
        why=f"these strides need {refused.required:,} of {refused.name}; the chip has {refused.limit:,}",
        fix="half a side of the tile, or contiguous operands",
    )


def compile_matmul(tile: Tile, dtype: str, stages: int, warps: int, target: Any) -> Any:
    """Return a tile's kernel for a target and aligned operands: row by row, fp8's right operand by columns."""
    kind, inner, outer = TRITON_TYPE[dtype], *(("b_row", "b_col") if dtype == "fp8" else ("b_col", "b_row"))
    types = {"a": f"*{kind}", "b": f"*{kind}", "c": "*bf16" if dtype == "fp8" else f"*{kind}"}
    types |= {"scale_a": "*fp32", "scale_b": "*fp32"}
    types |= dict.fromkeys(("rows", "cols", "depth", "a_batch", "a_row", "b_batch", outer, "c_batch", "c_row"), "i32")
    constants = {"a_col": 1, inner: 1, "scale_a_batch": 0, "scale_b_batch": 0, "SCALED": dtype == "fp8"}
    return _compile(matmul_kernel, types, constants, (), tile, dtype, stages, warps, target)


def compile_conv(tile: Tile, dtype: str, stages: int, warps: int, target: Any) -> Any:
    """Return a tile's kernel for a target, for a 3x3 filter over aligned channels."""
    large = ("pixels", "filters", "depth", "x_image", "x_row", "x_col")
    small = tuple(f"{name}{side}" for name in ("stride_", "pad_", "dilation_") for side in "hw")
    small += ("height", "width", "out_height", "out_width")
    types = dict.fromkeys(("x", "w", "out"), f"*{TRITON_TYPE[dtype]}") | dict.fromkeys((*large, *small), "i32")
    constants = {"CHANNELS": max(64, tile.bk), "TAPS_W": 3}
    return _compile(conv_kernel, types, constants, small, tile, dtype, stages, warps, target)


def _compile(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], unaligned: tuple[str, ...], tile: Tile, dtype: str,
    stages: int, warps: int, target: Any,
) -> Any:
    sides = {"BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "GROUP": GROUP, "DOT": "ieee" if dtype == "fp32" else "tf32"}
    return compile_for(kernel, types, constants | sides, unaligned, stages=stages, warps=warps, target=target)
