"""The Triton kernel of ballast: each block multiplies matrices for `level` of each slot, and sleeps for the rest.

It multiplies matrices because nothing else draws as much power. Their values have no pattern, because equal values
toggle no wires (a product of zeros draws 403 W on an H200, one of random values 689 W). They are in memory, as those of
real products are: blocks that multiplied values in registers drew 613 W at clocks at which a real product draws 956 W.
"""

# Triton reads the annotations of its kernels itself, and accepts only its own:
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, N803

from __future__ import annotations

from typing import Any

from .wait_kernel import NAP_NS, _nap  # isort: skip  (says what is missing where there is no Triton)

import triton
import triton.language as tl

ONE = 1024  # levels are integers in units of 1/1024
# Words of CONTROL, int64 each: whether to work, when the first block after the work began, and the levels since then.
WORKS, BEGAN_NS, LEVELS = range(3)
WARPS, STAGES, SIZE, DEPTH = 4, 3, 128, 64
STEPS = 8
"""Steps of `DEPTH` between two looks at the clock: together some 5 us."""
SHARED_BYTES = STAGES * 2 * SIZE * DEPTH * 2
ROWS, COLUMNS = 2048, 4096
"""Shape of the matrices: 16 MiB each, which an L2 cache holds, as it holds the tiles of a real product."""
_ONE, _NAP_NS, _THREADS = tl.constexpr(ONE), tl.constexpr(NAP_NS), tl.constexpr(WARPS * 32)
_WORKS, _BEGAN_NS, _LEVELS = tl.constexpr(WORKS), tl.constexpr(BEGAN_NS), tl.constexpr(LEVELS)
_ROWS, _COLUMNS, _STEPS = tl.constexpr(ROWS), tl.constexpr(COLUMNS), tl.constexpr(STEPS)


@triton.jit
def _read(word):
    """Read a word, the same value for all warps of a block: they must take the same branches around a product."""
    return tl.max(tl.load(word + tl.zeros((_THREADS,), dtype=tl.int32), volatile=True), axis=0)


@triton.jit
def _read_time():
    """Read the time in nanoseconds, the same value for all warps of a block."""
    each = tl.zeros((_THREADS,), dtype=tl.int64)
    asm: tl.constexpr = "mov.u64 $0, %globaltimer;"
    return tl.max(tl.inline_asm_elementwise(asm, "=l,l", [each], dtype=tl.int64, is_pure=False, pack=1), axis=0)


@triton.jit(do_not_specialize=["slot_ns", "slots", "bin_ns", "bins"])
def tessera_ballast(
    control, stats, left, right, slot_ns: tl.int64, slots: tl.int64, bin_ns: tl.int64, bins: tl.int64,
    SIZE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Run ballast for `slots` slots, or until `control` says stop. `stats` sums the nanoseconds of work of blocks."""
    rows = (tl.program_id(0) % (_ROWS // SIZE)) * SIZE + tl.arange(0, SIZE)
    columns = (tl.program_id(0) // (_ROWS // SIZE) % (_ROWS // SIZE)) * SIZE + tl.arange(0, SIZE)
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    works = _read(control + _WORKS)
    if works > 0:
        tl.atomic_cas(control + _BEGAN_NS, tl.zeros((), dtype=tl.int64), _read_time())
    slot = tl.zeros((), dtype=tl.int64)
    chunk = tl.zeros((), dtype=tl.int32)
    while (slot < slots) & (works > 0):
        began = _read_time()
        since = began - _read(control + _BEGAN_NS)
        until = slot_ns * _read(control + _LEVELS + tl.minimum(tl.maximum(since // bin_ns, 0), bins - 1)) // _ONE
        now = began
        while now - began < until:
            at = chunk % (_COLUMNS // (_STEPS * DEPTH)) * (_STEPS * DEPTH)  # a multiple, which the compiler must see
            for step in range(_STEPS):
                along = at + step * DEPTH + depth
                a = tl.load(left + rows[:, None] * _COLUMNS + along[None, :])
                b = tl.load(right + along[:, None] * _ROWS + columns[None, :])
                total = tl.dot(a, b, total)
            chunk += 1
            now = _read_time()
        # The compiler would remove a product that nobody reads. The largest value stays far below 1e30, so nothing is
        # added.
        largest = tl.max(tl.max(total, axis=1), axis=0)
        tl.atomic_add(stats, now - began + tl.where(largest > 1e30, 1, 0))
        while now - began < slot_ns:
            now = _nap(tl.minimum(slot_ns - (now - began), _NAP_NS).to(tl.int32))
        slot += 1
        works = _read(control + _WORKS)


def make_matrices(torch: Any, device: Any) -> tuple[Any, Any]:
    """Make the two matrices of random values, whose sums stay far below what fp16 and fp32 hold."""
    shapes = ((ROWS, COLUMNS), (COLUMNS, ROWS))
    left, right = (0.1 * torch.randn(*shape, device=device, dtype=torch.float16) for shape in shapes)
    return left, right


def launch(
    control: Any, stats: Any, matrices: tuple[Any, Any], *, blocks: int, slot_ns: int, slots: int, bin_ns: int
) -> Any:
    """Launch ballast in the current stream."""
    bins = control.numel() - LEVELS
    return tessera_ballast[(blocks,)](
        control, stats, *matrices, slot_ns, slots, bin_ns, bins,
        SIZE=SIZE, DEPTH=DEPTH, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
