"""Kernels that cast a matrix to a narrow format with power-of-two scales: the largest finite value, then the cast.

A power of two changes no mantissa, so the scale itself adds no error, and a floating format loses nothing by it but at
most one step of range. Values that are not finite do not count for the scale and become NaN: never a finite number.
"""

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
# Tiles whose longer side lies along memory: 128 bytes and more in a run. The rows that all programs hold at once then
# fit the L2 (132 SMs x 2 x 8 rows of 4096 fp32 are 35 MB of an H200's 60), so a second pass does not go to memory.
TILES = {"rows": (8, 512), "columns": (64, 64)}
WARPS = 4


@triton.jit
def _finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _exponent(amax, TOP: tl.constexpr, THRESHOLD: tl.constexpr):
    """The power of two that brings `amax` just under the format's largest; 0 for nothing but zeros."""
    bits = amax.to(tl.int32, bitcast=True)
    power = TOP - ((bits >> 23) - 127)
    power -= ((bits & 0x7FFFFF) > THRESHOLD).to(tl.int32)
    power = tl.minimum(tl.maximum(power, -126), 126)  # both 2^power and 2^-power are normal numbers
    return tl.where(amax > 0, power, 0)


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _tile(x, row, col, rows, cols, stride_row, stride_col):
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = row.to(tl.int64)[:, None] * stride_row + col.to(tl.int64)[None, :] * stride_col
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _narrow(value, scale, LARGEST: tl.constexpr, EIGHT: tl.constexpr):
    """The bits of the scaled, clamped and rounded values; NaN where a value was not finite.

    Bits, because not every way to run a kernel (Triton's interpreter) casts NaN to e4m3's NaN.
    """
    scaled = tl.minimum(tl.maximum(value * scale, -LARGEST), LARGEST)
    if EIGHT:
        bits = tl.where(_finite(value), scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True), 0x7F)
    else:
        bits = tl.where(_finite(value), scaled.to(tl.float16).to(tl.int16, bitcast=True), 0x7E00)
    return bits


@triton.jit
def tensor_amax(x, out, rows, cols, stride_row, stride_col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The largest finite magnitude of a matrix, into a zeroed scalar."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    value = _tile(x, row, col, rows, cols, stride_row, stride_col)
    largest = tl.max(tl.max(tl.where(_finite(value), tl.abs(value), 0.0), 1), 0)
    tl.atomic_max(out, largest)


@triton.jit
def tensor_cast(
    x, amax, y, descale, rows, cols, stride_row, stride_col, y_rows, y_cols,
    TOP: tl.constexpr, THRESHOLD: tl.constexpr, LARGEST: tl.constexpr, EIGHT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Cast by the scale that `amax` asks for, into a contiguous matrix that may be padded: the padding is zero."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    exponent = _exponent(tl.load(amax), TOP, THRESHOLD)
    value = _tile(x, row, col, rows, cols, stride_row, stride_col)
    narrow = _narrow(value, _power_of_two(exponent), LARGEST, EIGHT).to(y.dtype.element_ty)
    inside = (row < y_rows)[:, None] & (col < y_cols)[None, :]
    tl.store(y + row.to(tl.int64)[:, None] * y_cols + col[None, :], narrow, mask=inside)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(descale, _power_of_two(-exponent))


@triton.jit
def row_cast(
    x, y, descale, rows, cols, stride_row, stride_col, y_rows, y_cols,
    TOP: tl.constexpr, THRESHOLD: tl.constexpr, LARGEST: tl.constexpr, EIGHT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Both passes for a block of rows, one scale for each row: the second read finds the rows in the cache."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    largest = tl.zeros((ROWS,), tl.float32)
    for start in range(0, cols, COLS):
        value = _tile(x, row, start + tl.arange(0, COLS), rows, cols, stride_row, stride_col)
        largest = tl.maximum(largest, tl.max(tl.where(_finite(value), tl.abs(value), 0.0), 1))
    exponent = _exponent(largest, TOP, THRESHOLD)
    scale = _power_of_two(exponent)[:, None]
    for start in range(0, y_cols, COLS):
        col = start + tl.arange(0, COLS)
        value = _tile(x, row, col, rows, cols, stride_row, stride_col)
        narrow = _narrow(value, scale, LARGEST, EIGHT).to(y.dtype.element_ty)
        inside = (row < y_rows)[:, None] & (col < y_cols)[None, :]
        tl.store(y + row.to(tl.int64)[:, None] * y_cols + col[None, :], narrow, mask=inside)
    tl.store(descale + row, _power_of_two(-exponent), mask=row < y_rows)


@triton.jit
def row_unscale(
    c, row_scale, col_scale, y, rows, cols, stride_row, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """A product brought back by the scales of its rows and columns, in one pass, without its padding."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    value = _tile(c, row, col, rows, cols, stride_row, 1)
    left = tl.load(row_scale + row, mask=row < rows, other=0.0)
    right = tl.load(col_scale + col, mask=col < cols, other=0.0)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = row.to(tl.int64)[:, None] * cols + col[None, :]
    tl.store(y + at, value * left[:, None] * right[None, :], mask=inside)


def constants(name: str) -> dict[str, Any]:
    """The compile-time values of a format's kernels."""
    form = FORMATS[name]
    largest = (1.0 + form.threshold / 2**23) * 2.0**form.top
    return {"TOP": form.top, "THRESHOLD": form.threshold, "LARGEST": largest, "EIGHT": name == "fp8"}


def quantize(x: torch.Tensor, name: str, *, by_row: bool, pad: tuple[int, int] = (1, 1)) -> Any:
    """`(y, descale)` with x = y x descale up to rounding; y is contiguous, its sizes multiples of `pad`."""
    rows, cols = x.shape
    if not x.numel():  # nothing to launch, so nobody would write the scale
        return x.new_empty(x.shape, dtype=FORMATS[name].dtype), x.new_ones(rows if by_row else 1, dtype=torch.float32)
    y_rows, y_cols = (-(-size // to) * to for size, to in zip((rows, cols), pad, strict=True))
    y = torch.empty((y_rows, y_cols), device=x.device, dtype=FORMATS[name].dtype)
    descale = torch.empty((y_rows if by_row else 1,), device=x.device, dtype=torch.float32)
    bits = y.view(torch.uint8 if name == "fp8" else torch.int16)
    common = (rows, cols, x.stride(0), x.stride(1))
    tile = TILES["rows" if x.stride(1) <= x.stride(0) else "columns"]
    down, across = triton.cdiv(y_rows, tile[0]), triton.cdiv(y_cols, tile[1])
    sizes = {"ROWS": tile[0], "COLS": tile[1], "num_warps": WARPS}
    with torch.cuda.device_of(x):  # Triton launches on the current device
        if by_row:
            row_cast[(down,)](x, bits, descale, *common, y_rows, y_cols, **constants(name), **sizes)
            if hints.listener is not None:
                hints.launched(down, WARPS)
            return y, descale
        amax = torch.zeros((1,), device=x.device, dtype=torch.float32)
        tensor_amax[down, across](x, amax, *common, **sizes)
        tensor_cast[down, across](x, amax, bits, descale, *common, y_rows, y_cols, **constants(name), **sizes)
        if hints.listener is not None:
            for _ in range(2):
                hints.launched(down * across, WARPS)
    return y, descale


def unscale(c: torch.Tensor, by_row: torch.Tensor, by_col: torch.Tensor, rows: int, cols: int, dtype: Any) -> Any:
    """`c[:rows, :cols] * by_row[:, None] * by_col[None, :]` in a type of its own."""
    y = torch.empty((rows, cols), device=c.device, dtype=dtype)
    tile = TILES["rows"]
    grid = triton.cdiv(rows, tile[0]), triton.cdiv(cols, tile[1])
    with torch.cuda.device_of(c):
        row_unscale[grid](
            c, by_row, by_col, y, rows, cols, c.stride(0), ROWS=tile[0], COLS=tile[1], num_warps=WARPS
        )  # fmt: skip
        if hints.listener is not None:
            hints.launched(grid[0] * grid[1], WARPS)
    return y
