"""One launch that casts an operand of an fp8 product by a guessed scale, and one that repairs what did not fit.

A scale from the largest value needs a whole read of the matrix before the cast. But e4m3 is a floating format: between
2^-6, its smallest normal value, and 448, its largest, it does not matter where a value lies. So the scale is guessed
from a sample: the power of two that brings the mean magnitude to 2 to 4, in the middle of the range. What is 112 times
the mean still fits; what is a hundredth of it is still a normal number. Much smaller rows lose digits that scales of
their own (`fp8_row`) would keep. The cast notes the largest magnitude of each tile. The second launch reads these:
where one is beyond 448, or an eighth of the tiles hold nothing above 1/4 (the sample was not like the rest), it casts
the matrix again by its largest finite value, as `quantize` does; else it does nothing.

Bytes of an n x n bf16 matrix: 2n^2 read, n^2 written, either layout; two launches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import needs_extra
from .quantize import (
    FORMATS,
    WARPS,
    announce,
    exponent_of,
    format_constants,
    load_tile,
    locate_tile,
    magnitude,
    power_of_two,
    round_to_format,
    store_tile,
    to_bits,
)

with needs_extra("triton", "triton", "Tessera's own GPU kernels"):
    import triton
    import triton.language as tl

# A sample: so many runs along memory of so many values, one for each warp, 8 values a thread.
CHUNK, CHUNKS = 256, 8
# (rows, cols) of a tile: runs of 1 kB along rows; where columns lie along memory, 256 bytes read and 128 written.
ALONG, ACROSS = (32, 512), (128, 128)
# Of a thread: three programs of `WARPS` share an SM then. Both casts of 4096 took 30.0 us and 17.2 mJ on an H200; with
# 64, which spill, 38.3 and 21.4 (results/ops_precision.json).
REGISTERS = 80
REPAIR_PROGRAMS = 132  # one for each SM of an H200
_READ = 2048  # notes that one of them reads at a time


@triton.jit
def _centre(x, rows, cols, stride_row, stride_col, ACROSS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """The exponent of a power of two for the least mean magnitude of some runs along memory; zeros do not count.

    The least: a scale that is too large overflows, which is noticed and repaired.
    """
    long, runs = cols, rows
    step, jump = stride_col, stride_row
    if ACROSS:
        long, runs = rows, cols
        step, jump = stride_row, stride_col
    i = tl.arange(0, CHUNKS)
    run = (2 * i + 1).to(tl.int64) * runs // (2 * CHUNKS) + i % 2  # even and odd ones: some come in turns
    run = tl.minimum(run, runs - 1)
    # Not side by side: an odd step visits every eighth of a run once.
    start = (tl.maximum(long - CHUNK, 0) // CHUNKS * (3 * i % CHUNKS)) // 16 * 16
    at = start[:, None] + tl.arange(0, CHUNK)[None, :]
    where = x + run[:, None] * jump + at.to(tl.int64) * step
    value = tl.abs(tl.load(where, mask=at < long, other=0.0).to(tl.float32))
    mean = tl.sum(tl.where(value < float("inf"), value, 0.0), 1) / tl.minimum(long, CHUNK)
    least = tl.min(tl.where(mean > 0, mean, float("inf")), 0)
    # Only zeros: so large a scale that anything but zeros overflows.
    return tl.where(least < float("inf"), exponent_of(least, 1, 0x7FFFFF), 126)


@triton.jit
def guessed_cast(
    x, y, notes, guess, rows, cols, stride_row, stride_col, y_rows, y_cols,
    ACROSS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):
    """A tile by the guessed scale; its largest magnitude is noted."""
    tile = tl.program_id(0)
    row, col = locate_tile(tile, y_rows, y_cols, ACROSS, ROWS, COLS)
    value = load_tile(x, row, col, rows, cols, stride_row, stride_col)
    exponent = _centre(x, rows, cols, stride_row, stride_col, ACROSS, CHUNK, CHUNKS)
    scaled = value * power_of_two(exponent)
    store_tile(y, to_bits(scaled, True), row, col, y_rows, y_cols)
    tl.store(notes + tile, tl.max(tl.abs(value)))
    if tile == 0:
        tl.store(guess, exponent)


@triton.jit(do_not_specialize=["count"])
def repair_cast(
    x, y, descale, notes, guess, count, rows, cols, stride_row, stride_col, y_rows, y_cols,
    TOP: tl.constexpr, THRESHOLD: tl.constexpr, LARGEST: tl.constexpr, EIGHT: tl.constexpr,
    ACROSS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, READ: tl.constexpr,
):
    """What the guessed scale did not fit, cast again; and the scale."""
    exponent = tl.load(guess)
    scale = power_of_two(exponent)
    over, small, strange, largest = 0, 0, 0, 0.0
    for start in range(0, count, READ):
        at = start + tl.arange(0, READ)
        note = tl.load(notes + at, mask=at < count, other=0.0)
        over += tl.sum(((note * scale <= LARGEST) == 0).to(tl.int32), 0)
        small += tl.sum(((note > 0) & (note * scale < 0.25)).to(tl.int32), 0)
        strange += tl.sum((note == float("inf")).to(tl.int32), 0)
        largest = tl.maximum(largest, tl.max(magnitude(note), 0))
    if (over > 0) | (8 * small > count):
        if strange > 0:  # every program looks at those tiles again: slow, and seldom many
            for tile in range(count):
                if tl.load(notes + tile) == float("inf"):
                    row, col = locate_tile(tile, y_rows, y_cols, ACROSS, ROWS, COLS)
                    value = load_tile(x, row, col, rows, cols, stride_row, stride_col)
                    largest = tl.maximum(largest, tl.max(magnitude(value)))
        exponent = exponent_of(largest, TOP, THRESHOLD)
        for tile in range(tl.program_id(0), count, tl.num_programs(0)):
            row, col = locate_tile(tile, y_rows, y_cols, ACROSS, ROWS, COLS)
            value = load_tile(x, row, col, rows, cols, stride_row, stride_col)
            store_tile(y, round_to_format(value, power_of_two(exponent), LARGEST, EIGHT), row, col, y_rows, y_cols)
    if tl.program_id(0) == 0:
        tl.store(descale, power_of_two(-exponent))


def cast_by_guess(
    matrices: Sequence[torch.Tensor], pad: tuple[int, int] = (1, 1)
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Matrices in fp8, each with `(y, descale)` as `quantize` gives them; no matrix may be empty."""
    with torch.cuda.device_of(matrices[0]):  # Triton launches on the current device
        return [_cast_one(x, pad) for x in matrices]


def _cast_one(x: torch.Tensor, pad: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    if x.stride() == (1, 1):  # Triton 3.6 left the padding of such a matrix unwritten on an H200
        x = _separate_strides(x)
    shape = [-(-size // to) * to for size, to in zip(x.shape, pad, strict=True)]
    y = torch.empty(shape, device=x.device, dtype=torch.uint8)
    descale = torch.empty((1,), device=x.device, dtype=torch.float32)
    across = x.stride(1) > x.stride(0)
    rows, cols = ACROSS if across else ALONG
    count = -(-shape[0] // rows) * -(-shape[1] // cols)
    notes = torch.empty((count,), device=x.device, dtype=torch.float32)
    guess = torch.empty((1,), device=x.device, dtype=torch.int32)
    sizes, cut = (*x.shape, *x.stride(), *shape), {"ACROSS": across, "ROWS": rows, "COLS": cols, "num_warps": WARPS}
    guessed_cast[(count,)](x, y, notes, guess, *sizes, **cut, CHUNK=CHUNK, CHUNKS=CHUNKS, maxnreg=REGISTERS)
    announce(count)
    programs = min(REPAIR_PROGRAMS, count)
    repair_cast[(programs,)](x, y, descale, notes, guess, count, *sizes, **format_constants("fp8"), **cut, READ=_READ)
    announce(programs)
    return y.view(FORMATS["fp8"].dtype), descale


def _separate_strides(x: torch.Tensor) -> torch.Tensor:
    """The same matrix with two different strides; that of a dimension of size one does not matter."""
    rows, cols = x.shape
    if cols == 1:
        return x.as_strided(x.shape, (1, max(2, rows)))
    return x.as_strided(x.shape, (max(2, cols), 1)) if rows == 1 else x.contiguous()
