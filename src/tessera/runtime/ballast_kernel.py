"""The kernel of ballast: each block multiplies and adds for `level` of a slot, and sleeps for the rest of it.

One block has few registers and no shared memory, so that the blocks of a matrix product fit beside it.
"""

# Triton reads the annotations of its kernels itself, and accepts only its own:
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: ANN001, ANN201, N803

from __future__ import annotations

from typing import Any

from .wait_kernel import NAP_NS, _nap, _now_ns  # isort: skip  (says what is missing where there is no Triton)

import triton
import triton.language as tl

ONE = 1024  # the level is in 1/1024
BLOCKS_PER_SM = 2
WARPS = 8
_ONE, _NAP_NS = tl.constexpr(ONE), tl.constexpr(NAP_NS)


@triton.jit(do_not_specialize=["slot_ns"])
def tessera_ballast(control, stats, slot_ns: tl.int64, SIZE: tl.constexpr):
    """`control` is the level, in host memory; `stats` the nanoseconds of work of all blocks."""
    level = tl.load(control, volatile=True)
    if level > 0:
        began = _now_ns()
        until = slot_ns * level // _ONE
        a = tl.arange(0, SIZE).to(tl.float32) * 1e-3
        b, c, d = a + 0.25, a + 0.5, a + 0.75
        now = began
        while now - began < until:
            for _ in range(32):  # four chains of multiply-adds that do not wait for each other
                a = a * 0.999 + 0.001
                b = b * 0.999 + 0.002
                c = c * 0.999 + 0.003
                d = d * 0.999 + 0.004
            now = _now_ns()
        # Values that nobody reads would be removed by the compiler; they stay below 10, so nothing is added here.
        total = tl.sum(a + b + c + d, axis=0)
        tl.atomic_add(stats, now - began + tl.where(total > 1e9, 1, 0))
        while now - began < slot_ns:
            now = _nap(tl.minimum(slot_ns - (now - began), _NAP_NS).to(tl.int32))


def launch(control: Any, stats: Any, blocks: int, slot_ns: int) -> Any:
    """Put ballast on the current stream."""
    return tessera_ballast[(blocks,)](control, stats, slot_ns, SIZE=WARPS * 32 * 4, num_warps=WARPS, num_stages=1)
