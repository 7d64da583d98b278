"""What a schedule asks of our own kernels: pipeline depth, warps, tiles, precisions. By default it asks nothing.

A schedule that counts launches sets `listener`, which is called for each one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """The hints of a schedule; None leaves the choice to the operator.

    `cp_async_depth` is the number of tiles in flight to shared memory (Triton's num_stages); `warp_mma_concurrency` is
    the number of warp groups of four that issue tensor-core instructions in one block (num_warps = 4 x this). `tiles`
    and `precisions` are by operator name ("matmul", "flash_attention" ...).
    """

    cp_async_depth: int | None = None
    warp_mma_concurrency: int | None = None
    tiles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    precisions: Mapping[str, str] = field(default_factory=dict)


COPY_BYTES = 16
"""The most bytes that one cp.async copies (PTX ISA, cp-size of cp.async.cg)."""

listener: Callable[[int, int, int], None] | None = None
"""Called after each launch, on any thread: blocks, warps of a block, copies that a block keeps in flight."""


@dataclass(slots=True)
class _Block:
    """A block under `use`. It may end before blocks within it, or in another thread: a generator may be in one."""

    hints: Hints
    outer: _Block | None
    ended: bool = False


_NONE = Hints()
_block: ContextVar[_Block | None] = ContextVar("tessera_op_hints", default=None)


def current() -> Hints:
    """The hints in force."""
    block = _find_block()
    return _NONE if block is None else block.hints


def _find_block() -> _Block | None:
    block = _block.get()
    while block is not None and block.ended:
        block = block.outer
    return block


@contextlib.contextmanager
def use(hints: Hints) -> Iterator[None]:
    """Put hints in force for the body."""
    block = _Block(hints, _find_block())
    _block.set(block)
    try:
        yield
    finally:
        block.ended = True
        _block.set(_find_block())


def announce_launch(blocks: int, warps: int, *, stages: int = 1, tile_bytes: int = 0) -> None:
    """Tell the listener of a launch; `tile_bytes` are loaded in each step of a loop of `stages`.

    Launch functions check `listener` first, so that nothing is computed if nobody listens.
    """
    heard = listener
    if heard is not None:
        heard(blocks, warps, (stages - 1) * tile_bytes // COPY_BYTES)
