"""What a schedule asks of our own kernels: pipeline depth, warps, tiles. Read at each launch; nothing by default."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
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
