"""What a schedule asks of our own kernels: pipeline depth, warps, tiles. Read at each launch; nothing by default.

And the other way round: what a schedule hears of their launches, where one counts them (`listener`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """None: the operator's own choice stands.

    `cp_async_depth` is the number of tiles in flight to shared memory (Triton's num_stages); `warp_mma_concurrency` the
    number of warp groups of four that issue tensor-core instructions in one block (num_warps = 4 x this). `tiles` and
    `precisions` are by operator name ("matmul", "flash_attention" ...).
    """

    cp_async_depth: int | None = None
    warp_mma_concurrency: int | None = None
    tiles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    precisions: Mapping[str, str] = field(default_factory=dict)


# One cp.async copies at most 16 bytes (PTX ISA, cp-size of cp.async.cg).
COPY_BYTES = 16
# Called after each launch with its blocks, warps of a block and copies a block keeps in flight; set by a schedule whose
# bucket is of those. It hears every thread: a backward pass runs on autograd's own.
listener: Callable[[int, int, int], None] | None = None

_NONE = Hints()
_current: ContextVar[Hints] = ContextVar("tessera_op_hints", default=_NONE)


def current() -> Hints:
    """What holds here."""
    return _current.get()


@contextlib.contextmanager
def use(hints: Hints) -> Iterator[None]:
    """Let `hints` hold in the body."""
    token = _current.set(hints)
    try:
        yield
    finally:
        _current.reset(token)


def launched(blocks: int, warps: int, *, stages: int = 1, tile_bytes: int = 0) -> None:
    """Tell of a launch of ours; `tile_bytes` are loaded in each step of a loop of `stages` (0: it loads none ahead).

    Launch functions look whether `listener` is None first, so that nothing is computed for nobody.
    """
    heard = listener
    if heard is not None:
        heard(blocks, warps, (stages - 1) * tile_bytes // COPY_BYTES)
