"""One launch casts an operand of an fp8 product by a guessed scale, and a second one repairs what did not fit.

A scale from the largest value needs a whole read of the matrix before the cast. But e4m3 is a floating format: between
2^-6, its smallest normal value, and 448, its largest, a value's place does not matter. So the scale is guessed from a
sample: it is the power of two that brings the mean magnitude to 2 to 4, in the middle of the range. Values up to 112
times the mean then fit, and values down to a hundredth of the mean are still normal numbers. Much smaller rows lose
digits that scales of their own (`fp8_row`) would keep. The cast notes the largest magnitude of each tile, and the
second launch reads these notes. If one is beyond 448, or if an eighth of the tiles have nothing above 1/4 (the sample
was not like the rest), the second launch casts the matrix again by its largest finite value, as `quantize` does;
otherwise it does nothing.

Bytes of an n x n bf16 matrix: 2n^2 read, n^2 written, in either layout; two launches.
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

# A sample has CHUNKS runs of CHUNK values along memory: one run for each warp, 8 values a thread.
CHUNK, CHUNKS = 256, 8
# (rows, cols) of a tile. Along rows: runs of 1 kB. If columns are contiguous: 256 bytes read and 128 written.
ALONG, ACROSS = (32, 512), (128, 128)
# Registers of a thread: three programs of `WARPS` then share an SM. Both casts of 4096 took 30.0 us and 17.2 mJ on an
# H200; with 64 registers, which spill, 38.3 us and 21.4 mJ (results/ops_precision.json).
REGISTERS = 80
REPAIR_PROGRAMS = 132  # one for each SM of an H200
_READ = 2048  # notes that a repair program reads at a time


@triton.jit
def _centre(x, rows, cols, stride_row, stride_col, ACROSS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Return the exponent of a power of two for the least mean magnitude of some runs along memory.

    Zeros do not count. The least mean is taken because a scale that is too large overflows, which is noticed and
    repaired.
    """
    long, runs = cols, rows
    step, jump = stride_col, stride_row
    if ACROSS:
        long, runs = rows, cols
        step, jump = stride_row, stride_col
    i = tl.arange(0, CHUNKS)
    run = (2 * i + 1).to(tl.int64) * runs // (2 * CHUNKS) + i % 2  # even and odd runs, because some data alternate
    run = tl.minimum(run, runs - 1)
    # Not side by side: an odd step visits every eighth of a run once.
    start = (tl.maximum(long - CHUNK, 0) // CHUNKS * (3 * i % CHUNKS)) // 16 * 16
    at = start[:, None] + tl.arange(0, CHUNK)[None, :]
    where = x + run[:, None] * jump + at.to(tl.int64) * step
    value = tl.abs(tl.load(where, mask=at < long, other=0.0).to(tl.float32))
    mean = tl.sum(tl.where(value < float("inf"), value, 0.0), 1) / tl.minimum(long, CHUNK)
    least = tl.min(tl.where(mean > 0, mean, float("inf")), 0)
    # The sample has only zeros: take a scale so large that anything except zeros overflows.
    return tl.where(least < float("inf"), exponent_of(least, 1, 0x7FFFFF), 126)


@triton.jit
def guessed_cast(
    x, y, notes, guess, rows, cols, stride_row, stride_col, y_rows, y_cols,
    ACROSS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):
    """Cast a tile by the guessed scale, and note its largest magnitude."""
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
    """Cast again what did not fit the guessed scale, and write the scale."""
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
        if strange > 0:  # every program reads those tiles again: slow, but there are rarely many
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
    """Return matrices in fp8, each as `(y, descale)` like `quantize`; no matrix may be empty."""
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
    """Return the same matrix with two different strides; the stride of a dimension of size one does not matter."""
    rows, cols = x.shape
    if cols == 1:
        return x.as_strided(x.shape, (1, max(2, rows)))
    return x.as_strided(x.shape, (max(2, cols), 1)) if rows == 1 else x.contiguous()
