"""Waits in a stream: one warp that sleeps until the bucket of tokens is full again, or for a given time.

`%globaltimer` counts nanoseconds at any SM clock (torch's `_sleep` counts SM cycles, so its length changes with the
clock). The kernel reads its command from host memory when it runs, not when it is launched: queued launches and
captured graphs follow the newest command, and a ratio of 0 releases one that waits.
"""

# Triton reads the annotations of its kernels itself, and accepts only its own:
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import needs_extra

with needs_extra("triton", "triton", "waiting in a CUDA stream"):
    import triton
    import triton.language as tl

# Words of the three arrays, int64 each. CONTROL and STATS are in pinned host memory, STATE on the device.
RATIO, SLICE_NS, LIMIT_NS, LONGEST_NS, TOKEN, SAVED_NS = range(6)  # CONTROL
RESUME_NS, POINTS, WAITS, WAITED_NS, BUSY_NS, TOKENS = range(6)  # STATE; STATS has the same order
WORDS = 8  # one slot of STATE or STATS: a cache line
ONE = 1024  # ratios are integers in units of 1/1024
ONE_NS = 1 << 20  # a token's nanoseconds are in units of 1/1048576: one copy of a large product may cost a thousandth
# Nanoseconds between two reads of the control word, which is across PCIe (~1 us); nanosleep may take twice its
# argument.
NAP_NS = 20_000
# Naps after which the loop ends, in case the timer stands still or is set back: 20 s.
MOST_NAPS = 1_000_000

_ONE, _NAP_NS, _MOST_NAPS = tl.constexpr(ONE), tl.constexpr(NAP_NS), tl.constexpr(MOST_NAPS)
_ONE_NS = tl.constexpr(float(ONE_NS))


@triton.jit
def _now_ns():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _nap(nap_ns):
    """Sleep, then read the time: one block of assembly, so that the compiler cannot separate them."""
    asm: tl.constexpr = "nanosleep.u32 $1; mov.u64 $0, %globaltimer;"
    return tl.inline_asm_elementwise(asm, "=l,r", [nap_ns], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _add(state, stats, amount):
    """Add to a word of STATE, and show the sum to the host."""
    total = tl.load(state) + amount
    tl.store(state, total)
    tl.store(stats, total)


def make_launcher(compiled: Any, *args: Any) -> Callable[..., None]:
    """Return a function that launches a compiled kernel on the stream it gets, with `args` and then its own arguments.

    `kernel[(1,)](...)` looks at every argument to find the compiled code, which takes the host longer than the launch.
    The first arguments are always the same, so this makes the final call directly.
    """
    run = compiled[(1, 1, 1)]

    def launch_on(stream: int, *more: int) -> None:
        run(*args, *more, stream=stream)

    return launch_on


@triton.jit
def _cost_ns(control, tokens, busy, longest):
    """Return how long the bucket takes to regain the tokens; while their cost is unknown, by the time of the work."""
    cost = tokens.to(tl.float64) * tl.load(control + 4, volatile=True).to(tl.float64) / _ONE_NS
    ratio = tl.load(control, volatile=True)
    by_time = tl.where(ratio > 0, busy * (ratio + _ONE) // _ONE, 0).to(tl.float64)
    return tl.minimum(tl.where(cost > 0, cost, by_time), longest.to(tl.float64)).to(tl.int64)


@triton.jit(do_not_specialize=["tokens", "restart"])
def tessera_spend(control, bucket, state, stats, tokens: tl.int64, restart: tl.int64):
    """Spend tokens, and wait until the bucket has regained them.

    `bucket` holds the time when it is full again: one word for all streams of a device. The arguments are not
    specialised, so that there is only one kernel, which is loaded before a graph is captured.
    """
    began = _now_ns()
    resume = tl.load(state)
    resume = tl.where((resume == 0) | (restart != 0), began, resume)
    busy = tl.minimum(tl.maximum(began - resume, 0), tl.load(control + 2, volatile=True))
    slice_ns = tl.load(control + 1, volatile=True)
    longest = tl.load(control + 3, volatile=True)
    tl.atomic_max(bucket, began - busy - tl.load(control + 5, volatile=True))  # no more than this is saved
    cost = _cost_ns(control, tokens, busy, longest)
    before = tl.atomic_add(bucket, cost)
    now = began
    naps = 0
    newest = cost
    if (before + cost - began >= slice_ns) & (cost > 0):
        while (now - began < tl.minimum(before + newest - began, longest)) & (naps < _MOST_NAPS) & (newest > 0):
            left = before + newest - now
            now = _nap(tl.minimum(left // 2 + 1, _NAP_NS).to(tl.int32))
            newest = _cost_ns(control, tokens, busy, longest)  # at the newest cost
            naps += 1
    tl.atomic_add(bucket, newest - cost)
    released = tl.load(control, volatile=True) == 0
    tl.atomic_min(bucket, tl.where(released, now, now + longest))  # if released, nothing is owed
    tl.store(state, now)
    tl.store(stats, now)
    _add(state + 2, stats + 2, tl.where(naps > 0, 1, 0))
    _add(state + 3, stats + 3, now - began)
    _add(state + 4, stats + 4, busy)
    _add(state + 5, stats + 5, tokens)
    _add(state + 1, stats + 1, 1)


def spend(control: Any, bucket: Any, state: Any, stats: Any, tokens: int, *, restart: bool = False) -> Any:
    """Make the current stream spend tokens here and wait for them.

    Returns the compiled kernel (None in Triton's interpreter).
    """
    return tessera_spend[(1,)](control, bucket, state, stats, tokens, int(restart), num_warps=1, num_stages=1)


@triton.jit(do_not_specialize=["wait_ns"])
def tessera_wait(wait_ns: tl.int64):
    """Keep the stream waiting for this many nanoseconds."""
    began = _now_ns()
    now = began
    naps = 0
    while (now - began < wait_ns) & (naps < _MOST_NAPS):
        now = _nap(tl.minimum((wait_ns - (now - began)) // 2 + 1, _NAP_NS).to(tl.int32))
        naps += 1


def wait_in_stream(wait_ns: int) -> None:
    """Make the current stream wait, but not the host."""
    tessera_wait[(1,)](wait_ns, num_warps=1, num_stages=1)
