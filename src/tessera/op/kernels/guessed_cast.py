"""One launch that casts both operands of an fp8 product by a guessed scale, and one that repairs what did not fit.

A scale from the largest value needs a whole read of the matrix before the cast. But e4m3 is a floating format: between
2^-6, its smallest normal value, and 448, its largest, it does not matter where a value lies. So the scale is guessed
from a sample: the power of two that brings the mean magnitude to 2 to 4, in the middle of the range. What is 112 times
the mean still fits; what is a hundredth of it is still a normal number. Much smaller rows lose digits that scales of
their own (`fp8_row`) would keep. The cast notes the largest magnitude of each tile. The second launch reads these:
where one is beyond 448, or an eighth of the tiles hold nothing above 1/4 (the sample was not like the rest), it casts
the matrix again by its largest finite value, as `quantize` does; else it does nothing.

Bytes of an n x n bf16 matrix: 2n^2 read, n^2 written, either layout; two launches for one matrix or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...errors import MissingExtra
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

try:
    import triton
    import triton.language as tl
except ImportError as e:
    raise MissingExtra("triton", "triton", "Tessera's own GPU kernels") from e

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
def _first_cast(
    x, y, note, guess, tile, rows, cols, stride_row, stride_col, y_rows, y_cols,
    ACROSS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):
    row, col = locate_tile(tile, y_rows, y_cols, ACROSS, ROWS, COLS)
    value = load_tile(x, row, col, rows, cols, stride_row, stride_col)
    exponent = _centre(x, rows, cols, stride_row, stride_col, ACROSS, CHUNK, CHUNKS)
    scaled = value * power_of_two(exponent)
    store_tile(y, to_bits(scaled, True), row, col, y_rows, y_cols)
    tl.store(note, tl.max(tl.abs(value)))
    if tile == 0:
        tl.store(guess, exponent)


@triton.jit(do_not_specialize=["count_a"])
def guessed_cast(
    a, ya, rows_a, cols_a, a_row, a_col, ya_rows, ya_cols, b, yb, rows_b, cols_b, b_row, b_col, yb_rows, yb_cols,
    notes, guesses, count_a,
    A_ACROSS: tl.constexpr, A_ROWS: tl.constexpr, A_COLS: tl.constexpr,
    B_ACROSS: tl.constexpr, B_ROWS: tl.constexpr, B_COLS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):
    """A tile of one matrix or the other, by the guessed scale; its largest magnitude is noted."""
    at = tl.program_id(0)
    if at < count_a:
        _first_cast(
            a, ya, notes + at, guesses, at, rows_a, cols_a, a_row, a_col, ya_rows, ya_cols,
            A_ACROSS, A_ROWS, A_COLS, CHUNK, CHUNKS,
        )
    else:
        _first_cast(
            b, yb, notes + at, guesses + 1, at - count_a, rows_b, cols_b, b_row, b_col, yb_rows, yb_cols,
            B_ACROSS, B_ROWS, B_COLS, CHUNK, CHUNKS,
        )


@triton.jit
def _repair(
    x, y, descale, notes, guess, count, rows, cols, stride_row, stride_col, y_rows, y_cols,
    TOP: tl.constexpr, THRESHOLD: tl.constexpr, LARGEST: tl.constexpr, EIGHT: tl.constexpr,
    ACROSS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, READ: tl.constexpr,
):
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


@triton.jit(do_not_specialize=["count_a", "count"])
def repair_cast(
    a, ya, descale_a, rows_a, cols_a, a_row, a_col, ya_rows, ya_cols,
    b, yb, descale_b, rows_b, cols_b, b_row, b_col, yb_rows, yb_cols, notes, guesses, count_a, count,
    TOP: tl.constexpr, THRESHOLD: tl.constexpr, LARGEST: tl.constexpr, EIGHT: tl.constexpr,
    A_ACROSS: tl.constexpr, A_ROWS: tl.constexpr, A_COLS: tl.constexpr,
    B_ACROSS: tl.constexpr, B_ROWS: tl.constexpr, B_COLS: tl.constexpr, READ: tl.constexpr,
):
    """What the guessed scales did not fit, cast again; and the scales."""
    _repair(
        a, ya, descale_a, notes, guesses, count_a, rows_a, cols_a, a_row, a_col, ya_rows, ya_cols,
        TOP, THRESHOLD, LARGEST, EIGHT, A_ACROSS, A_ROWS, A_COLS, READ,
    )
    if count > count_a:
        _repair(
            b, yb, descale_b, notes + count_a, guesses + 1, count - count_a, rows_b, cols_b, b_row, b_col, yb_rows,
            yb_cols, TOP, THRESHOLD, LARGEST, EIGHT, B_ACROSS, B_ROWS, B_COLS, READ,
        )


class _CastOperand(NamedTuple):
    """A matrix, where it goes, and how it is cut."""

    x: torch.Tensor
    y: torch.Tensor
    descale: torch.Tensor
    across: bool
    tile: tuple[int, int]

    @property
    def programs(self) -> int:
        rows, cols = (int(size) for size in self.y.shape)
        return -(-rows // self.tile[0]) * -(-cols // self.tile[1])

    @property
    def sizes(self) -> tuple[int, ...]:
        return (*self.x.shape, *self.x.stride(), *self.y.shape)


def cast_by_guess(
    matrices: Sequence[torch.Tensor], pad: tuple[int, int] = (1, 1)
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One or two matrices in fp8, each with `(y, descale)` as `quantize` gives them; no matrix may be empty."""
    operands = [_operand(x, pad) for x in matrices]
    first, second = operands[0], operands[-1]
    count_a = first.programs
    count = sum(each.programs for each in operands)
    device = first.x.device
    notes = torch.empty((count,), device=device, dtype=torch.float32)
    guesses = torch.empty((2,), device=device, dtype=torch.int32)
    cut: dict[str, Any] = {"num_warps": WARPS}
    for side, each in (("A", first), ("B", second)):
        cut |= {f"{side}_ACROSS": each.across, f"{side}_ROWS": each.tile[0], f"{side}_COLS": each.tile[1]}
    with torch.cuda.device_of(first.x):  # Triton launches on the current device
        guessed_cast[(count,)](
            first.x, first.y, *first.sizes, second.x, second.y, *second.sizes, notes, guesses, count_a,
            **cut, CHUNK=CHUNK, CHUNKS=CHUNKS, maxnreg=REGISTERS,
        )
        announce(count)
        programs = min(REPAIR_PROGRAMS, count)
        repair_cast[(programs,)](
            first.x, first.y, first.descale, *first.sizes, second.x, second.y, second.descale, *second.sizes,
            notes, guesses, count_a, count, **format_constants("fp8"), **cut, READ=_READ,
        )
        announce(programs)
    return [(each.y.view(FORMATS["fp8"].dtype), each.descale) for each in operands]


def _separate_strides(x: torch.Tensor) -> torch.Tensor:
    """The same matrix with two different strides; that of a dimension of size one does not matter."""
    rows, cols = x.shape
    if cols == 1:
        return x.as_strided(x.shape, (1, max(2, rows)))
    return x.as_strided(x.shape, (max(2, cols), 1)) if rows == 1 else x.contiguous()


def _operand(x: torch.Tensor, pad: tuple[int, int]) -> _CastOperand:
    shape = tuple(-(-size // to) * to for size, to in zip(x.shape, pad, strict=True))
    if x.stride() == (1, 1):  # Triton 3.6 left the padding of such a matrix unwritten on an H200
        x = _separate_strides(x)
    y: Any = torch.empty(shape, device=x.device, dtype=torch.uint8)
    descale = torch.empty((1,), device=x.device, dtype=torch.float32)
    across = x.stride(1) > x.stride(0)
    return _CastOperand(x, y, descale, across, ACROSS if across else ALONG)
