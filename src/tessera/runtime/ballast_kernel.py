"""The kernel of ballast: each block multiplies matrices for `level` of each slot, and sleeps for the rest of it.

Matrix products, since nothing else draws as much; of values without a pattern, since equal ones toggle no wires (a
product of zeros draws 403 W on an H200, one of random values 689 W).
"""

# Triton reads the annotations of its kernels itself, and accepts only its own:
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202, N803

from __future__ import annotations

from typing import Any

from .wait_kernel import NAP_NS, _nap  # isort: skip  (says what is missing where there is no Triton)

import triton
import triton.language as tl

ONE = 1024  # the level is in 1/1024
BLOCKS_PER_SM = 2
WARPS, SIZE = 4, 128
_ONE, _NAP_NS, _THREADS = tl.constexpr(ONE), tl.constexpr(NAP_NS), tl.constexpr(WARPS * 32)


@triton.jit
def _read_level(control):
    """The level, the same for all warps of a block: they must take the same branches around a product."""
    return tl.max(tl.load(control + tl.zeros((_THREADS,), dtype=tl.int32), volatile=True), axis=0)


@triton.jit
def _read_time():
    """The time in nanoseconds, the same for all warps of a block."""
    each = tl.zeros((_THREADS,), dtype=tl.int64)
    asm: tl.constexpr = "mov.u64 $0, %globaltimer;"
    return tl.max(tl.inline_asm_elementwise(asm, "=l,l", [each], dtype=tl.int64, is_pure=False, pack=1), axis=0)


@triton.jit(do_not_specialize=["slot_ns", "slots"])
def tessera_ballast(control, stats, slot_ns: tl.int64, slots: tl.int64, SIZE: tl.constexpr):
    """`control` is the level; `stats` the nanoseconds of work of all blocks. Ends at a level of 0."""
    at = tl.arange(0, SIZE)
    mixed = at[:, None] * 7919 + at[None, :] * at[None, :] * 613
    a = (((mixed % 251) - 125).to(tl.float32) * 0.008).to(tl.float16)
    b = (((mixed % 241) - 120).to(tl.float32) * 0.008).to(tl.float16)
    level = _read_level(control)
    slot = tl.zeros((), dtype=tl.int64)
    while (slot < slots) & (level > 0):
        began = _read_time()
        until = slot_ns * level // _ONE
        total = tl.zeros((SIZE, SIZE), dtype=tl.float32)
        now = began
        while now - began < until:
            for _ in range(4):  # some 3 us
                total = tl.dot(a, b, total)
            now = _read_time()
        # A product that nobody reads would be removed by the compiler; it stays far below this, so nothing is added.
        largest = tl.max(tl.max(total, axis=1), axis=0)
        tl.atomic_add(stats, now - began + tl.where(largest > 1e30, 1, 0))
        while now - began < slot_ns:
            now = _nap(tl.minimum(slot_ns - (now - began), _NAP_NS).to(tl.int32))
        slot += 1
        level = _read_level(control)


def launch(control: Any, stats: Any, blocks: int, slot_ns: int, slots: int) -> Any:
    """Put ballast on the current stream."""
    return tessera_ballast[(blocks,)](control, stats, slot_ns, slots, SIZE=SIZE, num_warps=WARPS, num_stages=1)
