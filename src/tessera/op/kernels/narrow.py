"""What the casts to narrow formats share: the formats, tiles in and out, scales as exponents, and rounding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...errors import MissingExtra
from .. import hints

try:
    import triton
    import triton.language as tl
except ImportError as e:
    raise MissingExtra("triton", "triton", "Tessera's own GPU kernels") from e


class Format(NamedTuple):
    """A target: values are scaled under (1 + threshold / 2^23) x 2^top, the largest that stays finite in it."""

    dtype: Any
    top: int
    threshold: int


FORMATS = {
    "fp8": Format(torch.float8_e4m3fn, 8, 0x600000),  # 448 = 1.75 x 2^8: the largest e4m3 (OCP 8-bit formats, 2023)
    "fp16": Format(torch.float16, 14, 0x7FFFFF),  # under 2^15: a step below 65504, so that no rounding overflows
}
WARPS = 8


@triton.jit
def finite(x):
    """Whether values are numbers."""
    return tl.abs(x) < float("inf")


@triton.jit
def magnitude(x):
    """Magnitudes, 0 for what is not finite."""
    return tl.where(finite(x), tl.abs(x), 0.0)


@triton.jit
def exponent_of(amax, TOP: tl.constexpr, THRESHOLD: tl.constexpr):
    """The power of two that brings `amax` just under the format's largest; 0 for nothing but zeros."""
    bits = amax.to(tl.int32, bitcast=True)
    power = TOP - ((bits >> 23) - 127)
    power -= ((bits & 0x7FFFFF) > THRESHOLD).to(tl.int32)
    power = tl.minimum(tl.maximum(power, -126), 126)  # both 2^power and 2^-power are normal numbers
    return tl.where(amax > 0, power, 0)


@triton.jit
def power_of_two(exponent):
    """2 to the exponent, from -126 to 127, in fp32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def spot(at, y_rows, y_cols, ACROSS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The rows and columns of a tile: neighbours in number are neighbours along the memory that is read."""
    down, across = tl.cdiv(y_rows, ROWS), tl.cdiv(y_cols, COLS)
    if ACROSS:
        at_row, at_col = at % down, at // down
    else:
        at_row, at_col = at // across, at % across
    return at_row * ROWS + tl.arange(0, ROWS), at_col * COLS + tl.arange(0, COLS)


@triton.jit
def load_tile(x, row, col, rows, cols, stride_row, stride_col):
    """Values of some rows and columns in fp32, 0 outside the matrix."""
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = row.to(tl.int64)[:, None] * stride_row + col.to(tl.int64)[None, :] * stride_col
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def bits_of(scaled, EIGHT: tl.constexpr):
    """The bits of values that fit the format, rounded; NaN stays NaN."""
    if EIGHT:
        bits = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = scaled.to(tl.float16).to(tl.int16, bitcast=True)
    return bits


@triton.jit
def narrowed(value, scale, LARGEST: tl.constexpr, EIGHT: tl.constexpr):
    """The bits of the scaled, clamped and rounded values; NaN where a value was not finite.

    Bits, because not every way to run a kernel (Triton's interpreter) casts NaN to e4m3's NaN.
    """
    bits = bits_of(tl.minimum(tl.maximum(value * scale, -LARGEST), LARGEST), EIGHT)
    return tl.where(finite(value), bits, 0x7F if EIGHT else 0x7E00).to(bits.dtype)


@triton.jit
def store_tile(y, bits, row, col, y_rows, y_cols):
    """Into a contiguous matrix, its padding included."""
    inside = (row < y_rows)[:, None] & (col < y_cols)[None, :]
    tl.store(y + row.to(tl.int64)[:, None] * y_cols + col[None, :], bits.to(y.dtype.element_ty), mask=inside)


def constants(name: str) -> dict[str, Any]:
    """The compile-time values of a format's kernels."""
    form = FORMATS[name]
    largest = (1.0 + form.threshold / 2**23) * 2.0**form.top
    return {"TOP": form.top, "THRESHOLD": form.threshold, "LARGEST": largest, "EIGHT": name == "fp8"}


def told(programs: int) -> None:
    """Whoever counts launches hears of one."""
    if hints.listener is not None:
        hints.launched(programs, WARPS)
