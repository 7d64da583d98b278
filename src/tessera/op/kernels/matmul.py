"""The kernels of a given tile: a matrix product, and a 2-d convolution as an implicit matrix product. Sums are fp32.

A block computes BM x BN of the result. Tiles of the operands arrive in shared memory while earlier ones are multiplied
(num_stages in flight). Blocks are numbered in groups of GROUP rows, so that those at work at one time share columns of
the right operand in the L2. What lies outside is loaded as zero and not stored.

The convolution's rows are output pixels, its columns output channels; the depth runs over taps of the filter and input
channels. The image has its channels innermost (NHWC), the filter is (out, height, width, in): no patch is written out.
"""

from __future__ import annotations

from typing import Any

from ...errors import MissingExtra, TileError
from .. import hints
from ..tile import Tile
from . import TRITON_TYPE, compile_for

try:
    import triton
    import triton.language as tl
except ImportError as e:
    raise MissingExtra("triton", "triton", "a product of a given tile") from e

GROUP = 8  # rows of tiles in one group: with 132 SMs the tiles at work are about 8 x 16, the least operands to load


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 0.5 x (1 + tanh(u)) = x sigmoid(2u)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


@triton.jit
def _place(block, rows, cols, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of tiles of a block."""
    down, across = tl.cdiv(rows, BM), tl.cdiv(cols, BN)
    first = block // (GROUP * across) * GROUP
    height = min(down - first, GROUP)
    within = block % (GROUP * across)
    return first + within % height, within // height


@triton.jit
def matmul_kernel(
    a, b, c, bias, residual, scale_a, scale_b, rows, cols, depth,
    a_batch, a_row, a_col, b_batch, b_row, b_col, c_batch, c_row, c_col, r_batch, r_row, r_col,
    scale_a_batch, scale_b_batch, alpha, beta,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SCALED: tl.constexpr, ACTIVATION: tl.constexpr, DOT: tl.constexpr,
):
    """One tile of the product; EVEN says that BK divides the depth, DOT how fp32 is multiplied (tf32 or ieee)."""
    # Batches are numbered along the first axis of the grid too: the others end at 65535.
    tiles = tl.cdiv(rows, BM) * tl.cdiv(cols, BN)
    down, across = _place(tl.program_id(0) % tiles, rows, cols, BM, BN, GROUP)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    row, col, k = down * BM + tl.arange(0, BM), across * BN + tl.arange(0, BN), tl.arange(0, BK)
    row_in, col_in = (row < rows)[:, None], (col < cols)[None, :]
    # 64-bit offsets: rows times a stride may pass 2^31 (16384 x 151936 logits do). They are added once.
    at_a = a + batch * a_batch + row.to(tl.int64)[:, None] * a_row + k.to(tl.int64)[None, :] * a_col
    at_b = b + batch * b_batch + k.to(tl.int64)[:, None] * b_row + col.to(tl.int64)[None, :] * b_col
    step_a, step_b = tl.cast(a_col, tl.int64) * BK, tl.cast(b_row, tl.int64) * BK
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(tl.cdiv(depth, BK)):
        if EVEN:
            left = tl.load(at_a, mask=row_in, other=0.0)
            right = tl.load(at_b, mask=col_in, other=0.0)
        else:
            rest = depth - step * BK
            left = tl.load(at_a, mask=row_in & (k < rest)[None, :], other=0.0)
            right = tl.load(at_b, mask=(k < rest)[:, None] & col_in, other=0.0)
        if left.dtype == tl.float8e4nv:  # Hopper's fp8 units keep 14 bits of a sum: added up in fp32 once a step
            acc = tl.dot(left, right, acc, max_num_imprecise_acc=BK)
        else:
            acc = tl.dot(left, right, acc, input_precision=DOT)
        at_a += step_a
        at_b += step_b
    acc *= alpha
    if SCALED:
        acc *= tl.load(scale_a + batch * scale_a_batch) * tl.load(scale_b + batch * scale_b_batch)
    inside = row_in & col_in
    if RESIDUAL:
        at_r = residual + batch * r_batch + row.to(tl.int64)[:, None] * r_row + col.to(tl.int64)[None, :] * r_col
        acc += beta * tl.load(at_r, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        acc += tl.load(bias + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    acc = _activate(acc, ACTIVATION)
    at_c = c + batch * c_batch + row.to(tl.int64)[:, None] * c_row + col.to(tl.int64)[None, :] * c_col
    tl.store(at_c, acc.to(c.dtype.element_ty), mask=inside)


@triton.jit
def conv_kernel(
    x, w, out, bias, pixels, filters, depth, height, width, out_height, out_width,
    x_image, x_row, x_col, x_channel, w_filter, out_pixel, out_filter,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    CHANNELS: tl.constexpr, TAPS_W: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr, DOT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):
    """One tile of one group, whose `filters` and CHANNELS are meant. WHOLE: BK divides CHANNELS, a step is one tap."""
    down, across = _place(tl.program_id(0), pixels, filters, BM, BN, GROUP)
    group = tl.program_id(1).to(tl.int64)
    pixel, column, k = down * BM + tl.arange(0, BM), across * BN + tl.arange(0, BN), tl.arange(0, BK)
    pixel_in, column_in = (pixel < pixels)[:, None], (column < filters)[None, :]
    image, place = pixel // (out_height * out_width), pixel % (out_height * out_width)
    top = place // out_width * stride_h - pad_h
    left = place % out_width * stride_w - pad_w
    at_image = x + (group * CHANNELS * x_channel + image.to(tl.int64) * x_image)[:, None]
    at_filter = w + ((group * filters + column.to(tl.int64)) * w_filter)[None, :]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(tl.cdiv(depth, BK)):
        at = step * BK + k
        if WHOLE:  # one tap for the whole step: scalars
            tap = step * BK // CHANNELS
            channel = (at - tap * CHANNELS)[None, :]
            row = (top + tap // TAPS_W * dilation_h)[:, None]
            col = (left + tap % TAPS_W * dilation_w)[:, None]
        else:
            tap = at // CHANNELS
            channel = (at - tap * CHANNELS)[None, :]
            row = top[:, None] + (tap // TAPS_W * dilation_h)[None, :]
            col = left[:, None] + (tap % TAPS_W * dilation_w)[None, :]
        seen = pixel_in & (row >= 0) & (row < height) & (col >= 0) & (col < width) & (at < depth)[None, :]
        patch = tl.load(at_image + row * x_row + col * x_col + channel * x_channel, mask=seen, other=0.0)
        taps = tl.load(at_filter + at[:, None], mask=(at < depth)[:, None] & column_in, other=0.0)
        acc = tl.dot(patch, taps, acc, input_precision=DOT)
    if BIAS:
        acc += tl.load(bias + group * filters + column, mask=column < filters, other=0.0).to(tl.float32)[None, :]
    at_out = out + pixel.to(tl.int64)[:, None] * out_pixel + (group * filters + column)[None, :] * out_filter
    tl.store(at_out, acc.to(out.dtype.element_ty), mask=pixel_in & column_in)


def launch_matmul(
    a: Any, b: Any, out: Any, *, tile: Tile, stages: int, warps: int, bias: Any = None, residual: Any = None,
    scales: tuple[Any, Any] | None = None, alpha: float = 1.0, beta: float = 0.0, activation: str = "none",
    dot: str = "tf32",
) -> None:
    """Fill `out` (batch, rows, cols) from `a` (batch or 1, rows, depth) and `b` (batch or 1, depth, cols).

    `residual` has the shape of `out` (strides of 0 broadcast), `bias` one value a column, `scales` one for each
    matrix of `a` and of `b`, or one for all.
    """
    batch, rows, cols = out.shape
    depth = a.shape[2]
    if out.numel() == 0:
        return
    extra = residual if residual is not None else out
    scale_a, scale_b = scales or (out, out)
    steps = (0, 0) if scales is None else (int(scale_a.numel() > 1), int(scale_b.numel() > 1))
    grid = (triton.cdiv(rows, tile.bm) * triton.cdiv(cols, tile.bn) * batch,)
    try:
        matmul_kernel[grid](
            a, b, out, bias if bias is not None else out, extra, scale_a, scale_b, rows, cols, depth,
            a.stride(0) if a.shape[0] > 1 else 0, a.stride(1), a.stride(2),
            b.stride(0) if b.shape[0] > 1 else 0, b.stride(1), b.stride(2), *out.stride(), *extra.stride(),
            *steps, float(alpha), float(beta), BM=tile.bm, BN=tile.bn, BK=tile.bk, GROUP=GROUP,
            EVEN=depth % tile.bk == 0, BIAS=bias is not None, RESIDUAL=residual is not None, SCALED=scales is not None,
            ACTIVATION=activation, DOT=dot, num_stages=stages, num_warps=warps,
        )
    except triton.runtime.errors.OutOfResources as e:
        raise _too_large("matmul", tile, e) from e
    if hints.listener is not None:
        step = tile.bk * (tile.bm * a.element_size() + tile.bn * b.element_size())
        hints.announce_launch(grid[0], warps, stages=stages, tile_bytes=step)


def launch_conv(
    x: Any, w: Any, bias: Any, out: Any, *, stride: tuple[int, int], padding: tuple[int, int],
    dilation: tuple[int, int], groups: int, tile: Tile, stages: int, warps: int, dot: str = "tf32",
) -> None:
    """Fill `out` (n, out_height, out_width, filters, contiguous) from `x` (n, height, width, channels, any strides).

    `w` is (filters, taps_h, taps_w, channels of a group), contiguous.
    """
    if out.numel() == 0:
        return
    pixels, filters = out.shape[0] * out.shape[1] * out.shape[2], out.shape[3] // groups
    channels = w.shape[3]
    grid = (triton.cdiv(pixels, tile.bm) * triton.cdiv(filters, tile.bn), groups)
    try:
        conv_kernel[grid](
            x, w, out, bias if bias is not None else out, pixels, filters, w.shape[1] * w.shape[2] * channels,
            x.shape[1], x.shape[2], out.shape[1], out.shape[2], *x.stride(), w.stride(0), out.shape[3], 1,
            *stride, *padding, *dilation, CHANNELS=channels, TAPS_W=w.shape[2], WHOLE=channels % tile.bk == 0,
            BIAS=bias is not None, DOT=dot, BM=tile.bm, BN=tile.bn, BK=tile.bk, GROUP=GROUP,
            num_stages=stages, num_warps=warps,
        )
    except triton.runtime.errors.OutOfResources as e:
        raise _too_large("conv2d", tile, e) from e
    if hints.listener is not None:
        step = tile.bk * (tile.bm + tile.bn) * x.element_size()
        hints.announce_launch(grid[0] * groups, warps, stages=stages, tile_bytes=step)


def _too_large(op: str, tile: Tile, refused: Any) -> TileError:
    """The error for a launch that the driver refused: these strides need more than the aligned ones checked before."""
    return TileError(
        f"op.{op}: tile_shape={tile} does not fit this call",
        why=f"these strides need {refused.required:,} of {refused.name}; the chip has {refused.limit:,}",
        fix="half a side of the tile, or contiguous operands",
    )


def compile_matmul(tile: Tile, dtype: str, stages: int, warps: int, target: Any, activation: str = "none") -> Any:
    """The kernel of a tile for a target, for aligned operands as they come: row by row, fp8's right one by columns."""
    kind, inner, outer = TRITON_TYPE[dtype], *(("b_row", "b_col") if dtype == "fp8" else ("b_col", "b_row"))
    result = "bf16" if dtype == "fp8" else kind
    pointers = {"a": f"*{kind}", "b": f"*{kind}"} | dict.fromkeys(("c", "bias", "residual"), f"*{result}")
    pointers |= {"scale_a": "*fp32", "scale_b": "*fp32", "alpha": "fp32", "beta": "fp32"}
    numbers = ("rows", "cols", "depth", "a_batch", "a_row", "b_batch", outer, "c_batch", "c_row", "r_batch", "r_row")
    constants = {
        "a_col": 1, inner: 1, "c_col": 1, "r_col": 1, "BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "GROUP": GROUP,
        "scale_a_batch": 0, "scale_b_batch": 0, "EVEN": False, "BIAS": True, "RESIDUAL": False,
        "SCALED": dtype == "fp8", "ACTIVATION": activation, "DOT": "ieee" if dtype == "fp32" else "tf32",
    }
    types = pointers | dict.fromkeys(numbers, "i32")
    return compile_for(matmul_kernel, types, constants, stages=stages, warps=warps, target=target)


def compile_conv(tile: Tile, dtype: str, stages: int, warps: int, target: Any) -> Any:
    """The kernel of a tile for a target, for a 3x3 filter over aligned channels: its compiled form."""
    kind = f"*{TRITON_TYPE[dtype]}"
    numbers = (
        "pixels", "filters", "depth", "height", "width", "out_height", "out_width", "x_image", "x_row", "x_col",
        "w_filter", "out_pixel", "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w",
    )
    types = dict.fromkeys(("x", "w", "out", "bias"), kind) | dict.fromkeys(numbers, "i32")
    constants = {
        "x_channel": 1, "out_filter": 1, "CHANNELS": max(64, tile.bk), "TAPS_W": 3, "WHOLE": True, "BIAS": True,
        "DOT": "ieee" if dtype == "fp32" else "tf32", "BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "GROUP": GROUP,
    }
    small = ("height", "width", "out_height", "out_width", *numbers[-6:])
    return compile_for(conv_kernel, types, constants, small, stages=stages, warps=warps, target=target)
