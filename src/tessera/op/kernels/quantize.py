"""Kernels that cast a matrix to a narrow format with power-of-two scales: find the largest finite value, then cast.

A power of two changes no mantissa, so the scale adds no error. Values that are not finite do not count for the scale
and become NaN, never a finite number.

Bytes of an n x n bf16 matrix cast to fp8, and launches (n = 4096: 33.6 MB read, 16.8 MB written):

    one scale, either layout             2n^2 read for the largest value, 2n^2 read again, n^2 written   2 launches
    a scale per row, contiguous rows     2n^2 read once (a row waits in registers), n^2 written          1 launch
    a scale per row, contiguous columns  as one scale, and 4 bytes per strip and row between the two     2 launches

The second read comes from the L2 as far as the matrix fits there. The first launch hands largest values to the second
as partial ones, one for each program or strip: nothing has to be zeroed before, and no two programs write one address.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...errors import needs_extra
from .. import hints

with needs_extra("triton", "triton", "Tessera's own GPU kernels"):
    import triton
    import triton.language as tl


class NarrowFormat(NamedTuple):
    """A target format: values are scaled below (1 + threshold / 2^23) x 2^top, the largest that stays finite in it."""

    dtype: Any
    top: int
    threshold: int


FORMATS = {
    "fp8": NarrowFormat(torch.float8_e4m3fn, 8, 0x600000),  # 448 = 1.75 x 2^8, e4m3's largest (OCP 8-bit formats, 2023)
    "fp16": NarrowFormat(torch.float16, 14, 0x7FFFFF),  # below 2^15, a step below 65504, so that no rounding overflows
}
WARPS = 8


@triton.jit
def is_finite(x):
    """Return whether values are finite numbers."""
    return tl.abs(x) < float("inf")


@triton.jit
def magnitude(x):
    """Return magnitudes, 0 for values that are not finite."""
    return tl.where(is_finite(x), tl.abs(x), 0.0)


@triton.jit
def exponent_of(amax, TOP: tl.constexpr, THRESHOLD: tl.constexpr):
    """Return the exponent of the power of two that brings `amax` just below the format's largest; 0 if all are zero."""
    bits = amax.to(tl.int32, bitcast=True)
    power = TOP - ((bits >> 23) - 127)
    power -= ((bits & 0x7FFFFF) > THRESHOLD).to(tl.int32)
    power = tl.minimum(tl.maximum(power, -126), 126)  # both 2^power and 2^-power are normal numbers
    return tl.where(amax > 0, power, 0)


@triton.jit
def power_of_two(exponent):
    """Return 2 to the exponent, from -126 to 127, in fp32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def locate_tile(at, y_rows, y_cols, ACROSS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the rows and columns of a tile: consecutive numbers are neighbours along the memory that is read."""
    down, across = tl.cdiv(y_rows, ROWS), tl.cdiv(y_cols, COLS)
    if ACROSS:
        at_row, at_col = at % down, at // down
    else:
        at_row, at_col = at // across, at % across
    return at_row * ROWS + tl.arange(0, ROWS), at_col * COLS + tl.arange(0, COLS)


@triton.jit
def load_tile(x, row, col, rows, cols, stride_row, stride_col):
    """Load values of some rows and columns as fp32, 0 outside the matrix."""
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    at = row.to(tl.int64)[:, None] * stride_row + col.to(tl.int64)[None, :] * stride_col
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def to_bits(scaled, EIGHT: tl.constexpr):
    """Return the bits of values that fit the format, rounded; NaN stays NaN."""
    if EIGHT:
        bits = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = scaled.to(tl.float16).to(tl.int16, bitcast=True)
    return bits


@triton.jit
def round_to_format(value, scale, LARGEST: tl.constexpr, EIGHT: tl.constexpr):
    """Return the bits of the scaled, clamped and rounded values; NaN where a value was not finite.

    Bits, because some ways to run a kernel (Triton's interpreter) do not cast NaN to e4m3's NaN.
    """
    bits = to_bits(tl.minimum(tl.maximum(value * scale, -LARGEST), LARGEST), EIGHT)
    return tl.where(is_finite(value), bits, 0x7F if EIGHT else 0x7E00).to(bits.dtype)


@triton.jit
def store_tile(y, bits, row, col, y_rows, y_cols):
    """Store a tile into a contiguous matrix, its padding included."""
    inside = (row < y_rows)[:, None] & (col < y_cols)[None, :]
    tl.store(y + row.to(tl.int64)[:, None] * y_cols + col[None, :], bits.to(y.dtype.element_ty), mask=inside)


def format_constants(name: str) -> dict[str, Any]:
    """Return the compile-time values of a format's kernels."""
    form = FORMATS[name]
    largest = (1.0 + form.threshold / 2**23) * 2.0**form.top
    return {"TOP": form.top, "THRESHOLD": form.threshold, "LARGEST": largest, "EIGHT": name == "fp8"}


def announce(programs: int) -> None:
    """Tell the listener of a launch, if there is one."""
    if hints.listener is not None:
        hints.announce_launch(programs, WARPS)


# Elements of a program's tile: 64 a thread are eight loads of 16 bytes in bf16, and leave registers for two programs on
# an SM. 132 x 2 x 256 threads x 128 bytes are 8.7 MB in flight, twice what 4.8 TB/s at 0.8 us needs. (For fp32, one or
# two programs of twice the bytes.)
HELD = 16384
# Rows that are cast whole: shorter rows share a program, up to so many elements. On an H200, a cast of 4096 x 4096 took
# 15.7 us with twice as many elements, 12.7 us with these and 13.4 us with half of them; a cast of 8192 x 8192 took
# 53.4, 48.1 and 48.1 us (results/ops_precision.json).
AT_ONCE = 8192
# (rows, cols) of the tiles of casts. Along rows: runs of 512 bytes read and 256 written. If columns are contiguous, a
# tile goes through shared memory, and runs are 256 bytes read, 128 written.
TILES = {"rows": (64, 256), "columns": (128, 128)}
# Tiles of the search for the largest values, which keeps a register for each element beside the loads: half as large.
AMAX_TILES = {"rows": (8, 1024), "columns": (64, 128)}
PARTS = 512  # programs that search for the largest value of a matrix; the cast reads 2 kB of their results
# strips of each row, for many rows and for few; a cast reads 4 bytes for each strip and row of its tile
STRIPS = (8, 64)


# Counts that no vector load depends on are not specialised, because each would double the variants to compile.
@triton.jit(do_not_specialize=["rows", "tiles"])
def tensor_amax(x, parts, rows, cols, stride_row, stride_col, tiles, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Find the largest finite magnitude of each program's tiles: every n-th tile, so that neighbours run at a time."""
    largest = tl.zeros((ROWS, COLS), tl.float32)
    across = tl.cdiv(cols, COLS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = (tile // across) * ROWS + tl.arange(0, ROWS)
        col = (tile % across) * COLS + tl.arange(0, COLS)
        largest = tl.maximum(largest, magnitude(load_tile(x, row, col, rows, cols, stride_row, stride_col)))
    tl.store(parts + tl.program_id(0), tl.max(tl.max(largest, 1), 0))


@triton.jit
def row_amax(
    x, parts, rows, cols, stride_row, stride_col, STRIPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Find the largest finite magnitude of each row in every `STRIPS`-th tile of it: (strips, rows) values."""
    down = tl.cdiv(rows, ROWS)
    row = (tl.program_id(0) % down) * ROWS + tl.arange(0, ROWS)
    strip = tl.program_id(0) // down
    largest = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(strip * COLS, cols, STRIPS * COLS):
        value = load_tile(x, row, start + tl.arange(0, COLS), rows, cols, stride_row, stride_col)
        largest = tl.maximum(largest, magnitude(value))
    tl.store(parts + strip.to(tl.int64) * rows + row, tl.max(largest, 1), mask=row < rows)


@triton.jit(do_not_specialize=["count"])
def tensor_cast(
    x, parts, y, descale, rows, cols, stride_row, stride_col, y_rows, y_cols, count,
    TOP: tl.constexpr, THRESHOLD: tl.constexpr, LARGEST: tl.constexpr, EIGHT: tl.constexpr,
    PARTS: tl.constexpr, DOWN_FIRST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):
    """Cast by one scale, into a contiguous matrix that may be padded; the padding is zero."""
    row, col, first = _place(y_rows, y_cols, DOWN_FIRST, ROWS, COLS)
    value = load_tile(x, row, col, rows, cols, stride_row, stride_col)
    part = tl.arange(0, PARTS)
    exponent = exponent_of(tl.max(tl.load(parts + part, mask=part < count, other=0.0), 0), TOP, THRESHOLD)
    store_tile(y, round_to_format(value, power_of_two(exponent), LARGEST, EIGHT), row, col, y_rows, y_cols)
    if first:
        tl.store(descale, power_of_two(-exponent))


@triton.jit
def strip_cast(
    x, parts, y, descale, rows, cols, stride_row, stride_col, y_rows, y_cols,
    TOP: tl.constexpr, THRESHOLD: tl.constexpr, LARGEST: tl.constexpr, EIGHT: tl.constexpr,
    STRIPS: tl.constexpr, DOWN_FIRST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):
    """Cast by a scale for each row; the largest values of the row's strips are known."""
    row, col, _ = _place(y_rows, y_cols, DOWN_FIRST, ROWS, COLS)
    value = load_tile(x, row, col, rows, cols, stride_row, stride_col)
    at = tl.arange(0, STRIPS).to(tl.int64)[:, None] * rows + row[None, :]
    exponent = exponent_of(tl.max(tl.load(parts + at, mask=(row < rows)[None, :], other=0.0), 0), TOP, THRESHOLD)
    store_tile(y, round_to_format(value, power_of_two(exponent)[:, None], LARGEST, EIGHT), row, col, y_rows, y_cols)
    tl.store(descale + row, power_of_two(-exponent), mask=(row < y_rows) & (tl.min(col, 0) == 0))


@triton.jit
def _place(y_rows, y_cols, DOWN_FIRST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return a program's rows and columns, and whether they are the first.

    From the end to the beginning: what the launch before read last is still in the cache, however large the matrix is.
    """
    at = tl.num_programs(0) - 1 - tl.program_id(0)
    row, col = locate_tile(at, y_rows, y_cols, DOWN_FIRST, ROWS, COLS)
    return row, col, at == 0


@triton.jit(do_not_specialize=["rows", "y_rows"])
def row_cast(
    x, y, descale, rows, cols, stride_row, stride_col, y_rows, y_cols,
    TOP: tl.constexpr, THRESHOLD: tl.constexpr, LARGEST: tl.constexpr, EIGHT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):
    """Cast whole rows at once, with a scale for each, so that they are read a single time."""
    row, col = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    value = load_tile(x, row, col, rows, cols, stride_row, stride_col)
    largest = tl.max(tl.abs(value), 1)
    exponent = exponent_of(largest, TOP, THRESHOLD)
    if tl.max(largest, 0) < float("inf"):  # nearly always, and then no single value needs a check
        bits = to_bits(value * power_of_two(exponent)[:, None], EIGHT)
    else:
        exponent = exponent_of(tl.max(magnitude(value), 1), TOP, THRESHOLD)
        bits = round_to_format(value, power_of_two(exponent)[:, None], LARGEST, EIGHT)
    store_tile(y, bits, row, col, y_rows, y_cols)
    tl.store(descale + row, power_of_two(-exponent), mask=row < y_rows)


def quantize(x: torch.Tensor, name: str, *, by_row: bool, pad: tuple[int, int] = (1, 1)) -> Any:
    """Return `(y, descale)` with x = y x descale up to rounding; y is contiguous, its sizes are multiples of `pad`."""
    rows, cols = x.shape
    if not x.numel():  # there is nothing to launch, so no kernel would write the scale
        return x.new_empty(x.shape, dtype=FORMATS[name].dtype), x.new_ones(rows if by_row else 1, dtype=torch.float32)
    y_rows, y_cols = (-(-size // to) * to for size, to in zip((rows, cols), pad, strict=True))
    y = torch.empty((y_rows, y_cols), device=x.device, dtype=FORMATS[name].dtype)
    descale = torch.empty((y_rows if by_row else 1,), device=x.device, dtype=torch.float32)
    bits = y.view(torch.uint8 if name == "fp8" else torch.int16)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        if not by_row:
            _by_tensor(x, bits, descale, format_constants(name))
        elif x.stride(1) <= x.stride(0) and triton.next_power_of_2(y_cols) <= HELD:
            _by_whole_rows(x, bits, descale, format_constants(name))
        else:
            _by_strips(x, bits, descale, format_constants(name))
    return y, descale


def _by_tensor(x: torch.Tensor, y: torch.Tensor, descale: torch.Tensor, known: dict[str, Any]) -> None:
    along = x if x.stride(1) <= x.stride(0) else x.mT  # the transposed matrix has the same largest value
    tile = AMAX_TILES["rows"]
    tiles = triton.cdiv(along.shape[0], tile[0]) * triton.cdiv(along.shape[1], tile[1])
    count = min(tiles, PARTS)
    parts = torch.empty((count,), device=x.device, dtype=torch.float32)
    sizes = {"ROWS": tile[0], "COLS": tile[1], "num_warps": WARPS}
    tensor_amax[(count,)](along, parts, *along.shape, *along.stride(), tiles, **sizes)
    announce(count)
    programs, sizes = _grid_of_cast(x, y)
    tensor_cast[(programs,)](
        x, parts, y, descale, *x.shape, *x.stride(), *y.shape, count, **known, PARTS=PARTS, **sizes
    )
    announce(programs)


def _by_whole_rows(x: torch.Tensor, y: torch.Tensor, descale: torch.Tensor, known: dict[str, Any]) -> None:
    rows, cols = y.shape
    wide = max(256, triton.next_power_of_2(cols))
    # Several rows a program only if enough programs remain for two on each SM.
    held = max(1, AT_ONCE // wide) if rows * wide >= 256 * HELD else 1
    programs = triton.cdiv(rows, held)
    row_cast[(programs,)](
        x, y, descale, *x.shape, *x.stride(), rows, cols, **known, ROWS=held, COLS=wide, num_warps=WARPS
    )
    announce(programs)


def _by_strips(x: torch.Tensor, y: torch.Tensor, descale: torch.Tensor, known: dict[str, Any]) -> None:
    rows, cols = x.shape
    tile = AMAX_TILES["rows" if x.stride(1) <= x.stride(0) else "columns"]
    down, across = triton.cdiv(rows, tile[0]), triton.cdiv(cols, tile[1])
    # Two programs for each SM; no other numbers, because each is a variant to compile. An empty strip's largest is 0.
    strips = STRIPS[1] if down < 32 and across > STRIPS[0] else STRIPS[0]
    parts = torch.empty((strips, rows), device=x.device, dtype=torch.float32)
    sizes = {"ROWS": tile[0], "COLS": tile[1], "num_warps": WARPS}
    row_amax[(down * strips,)](x, parts, rows, cols, *x.stride(), STRIPS=strips, **sizes)
    announce(down * strips)
    programs, sizes = _grid_of_cast(x, y)
    strip_cast[(programs,)](x, parts, y, descale, rows, cols, *x.stride(), *y.shape, **known, STRIPS=strips, **sizes)
    announce(programs)


def _grid_of_cast(x: torch.Tensor, y: torch.Tensor) -> tuple[int, dict[str, Any]]:
    """Return the number of programs of a cast, and their tile."""
    transposing = x.stride(1) > x.stride(0)
    tile = TILES["columns" if transposing else "rows"]
    programs = triton.cdiv(y.shape[0], tile[0]) * triton.cdiv(y.shape[1], tile[1])
    return programs, {"DOWN_FIRST": transposing, "ROWS": tile[0], "COLS": tile[1], "num_warps": WARPS}
