"""A 2-d convolution of a tile as an implicit matrix product: no patch of the image is ever written out.

Rows are output pixels, columns output channels, the depth runs over taps of the filter and input channels. The image
lies with its channels innermost (NHWC), the filter as (out, height, width, in): both are then read along the depth.
Taps outside the image are loaded as zero. Sums are fp32.
"""

from __future__ import annotations

from typing import Any

from ...errors import MissingExtra
from .. import hints
from ..tile import Tile
from . import TRITON_TYPE, compiled
from .matmul import GROUP, _place, too_large

try:
    import triton
    import triton.language as tl
except ImportError as e:
    raise MissingExtra("triton", "triton", "a convolution of a given tile") from e


@triton.jit
def conv_kernel(
    x, w, out, bias, pixels, filters, depth, height, width, out_height, out_width,
    x_image, x_row, x_col, x_channel, w_filter, out_pixel, out_filter,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    CHANNELS: tl.constexpr, TAPS_W: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr, DOT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
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


def launch(
    x: Any, w: Any, bias: Any, out: Any, *, stride: tuple[int, int], padding: tuple[int, int],
    dilation: tuple[int, int], groups: int, tile: Tile, stages: int, warps: int, dot: str = "tf32",
) -> None:  # fmt: skip
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
        )  # fmt: skip
    except triton.runtime.errors.OutOfResources as e:
        raise too_large("conv2d", tile, e) from e
    if hints.listener is not None:
        step = tile.bk * (tile.bm + tile.bn) * x.element_size()
        hints.launched(grid[0] * groups, warps, stages=stages, tile_bytes=step)


def compile_conv(tile: Tile, dtype: str, stages: int, warps: int, target: Any) -> Any:
    """The kernel of a tile for a target, for a 3x3 filter over aligned channels: its compiled form."""
    kind = f"*{TRITON_TYPE[dtype]}"
    numbers = (
        "pixels", "filters", "depth", "height", "width", "out_height", "out_width", "x_image", "x_row", "x_col",
        "w_filter", "out_pixel", "stride_h", "stride_w", "pad_h", "pad_w", "dilation_h", "dilation_w",
    )  # fmt: skip
    types = dict.fromkeys(("x", "w", "out", "bias"), kind) | dict.fromkeys(numbers, "i32")
    constants = {
        "x_channel": 1, "out_filter": 1, "CHANNELS": max(64, tile.bk), "TAPS_W": 3, "WHOLE": True, "BIAS": True,
        "DOT": "ieee" if dtype == "fp32" else "tf32", "BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "GROUP": GROUP,
    }  # fmt: skip
    small = ("height", "width", "out_height", "out_width", *numbers[-6:])
    return compiled(conv_kernel, types, constants, small, stages=stages, warps=warps, target=target)
