"""Pinned host memory, the only kind that is copied while kernels run: bounded, and reused.

Torch's caching host allocator decides which block may be reused: it keeps a block until the events of all copies from
and to it have passed, whoever made them. A free list of our own would know only our copies. This module adds a bound on
what is handed out (pinned memory cannot be swapped), and statistics.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ArgumentError, is_integer

LIMIT_BYTES = 8 << 30
"""Default of `limit` in bytes: a few batches of anything, and a small part of a training machine's memory."""
_MAX_ADDRESSES = 1 << 16  # addresses of blocks that are remembered, to count those that are reused


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedStats:
    """What `empty_pinned` has handed out.

    `live_bytes` now and `peak_bytes` at most; `taken` is the number of calls, of which `reused` got a block seen before
    and `over_limit` got pageable memory because the limit was reached.
    """

    live_bytes: int = 0
    peak_bytes: int = 0
    taken: int = 0
    reused: int = 0
    over_limit: int = 0
    limit_bytes: int = LIMIT_BYTES


class PinnedPool:
    """Hands out host memory and counts it until its last view is gone."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._stats = PinnedStats(limit_bytes=limit_bytes)
        self._addresses: set[int] = set()
        # finalizers run anywhere, even while we hold the lock, so they only append
        self._returned: deque[int] = deque()
        self._lock = threading.Lock()

    def take(self, sizes: tuple[int, ...], dtype: Any) -> Any:
        """Return an empty tensor, pinned if there is CUDA and room below the limit."""
        import torch

        size = math.prod(sizes) * dtype.itemsize
        if not self._reserve(size):
            return torch.empty(sizes, dtype=dtype, device="cpu")  # even after torch.set_default_device
        try:
            made = torch.empty(sizes, dtype=dtype, device="cpu", pin_memory=torch.cuda.is_available())
        except BaseException:
            self._returned.append(size)
            raise
        # The storage and not the tensor, because a view may outlive the tensor it was cut from.
        weakref.finalize(made.untyped_storage(), self._returned.append, size)
        with self._lock:
            known = made.data_ptr() in self._addresses
            self._stats = replace(self._stats, reused=self._stats.reused + known)
            if len(self._addresses) < _MAX_ADDRESSES:
                self._addresses.add(made.data_ptr())
        return made

    def _reserve(self, size: int) -> bool:
        with self._lock:
            now = self._subtract_returned()
            live = now.live_bytes + size
            fits = live <= now.limit_bytes
            now = replace(now, taken=now.taken + 1, over_limit=now.over_limit + (not fits))
            self._stats = replace(now, live_bytes=live, peak_bytes=max(now.peak_bytes, live)) if fits else now
        return fits

    def _subtract_returned(self) -> PinnedStats:
        back = 0
        while self._returned:
            back += self._returned.popleft()
        return replace(self._stats, live_bytes=self._stats.live_bytes - back)

    def stats(self) -> PinnedStats:
        """Return the figures now."""
        with self._lock:
            self._stats = self._subtract_returned()
            return self._stats

    def limit(self, limit_bytes: int) -> None:
        """Change the bound; what was handed out stays valid."""
        with self._lock:
            self._stats = replace(self._subtract_returned(), limit_bytes=limit_bytes)


_pool = PinnedPool()


def empty_pinned(shape: int | Sequence[int], dtype: Any = None) -> Any:
    """Return an empty host tensor in pinned memory; plain memory without a CUDA device, or over the limit.

    It is freed when its last view is gone, and reused once the copies from and to it have passed.
    """
    import torch

    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(is_integer(size) and size >= 0 for size in sizes):
        raise ArgumentError(
            f"shape={shape!r}", fix="whole numbers: memcpy.empty_pinned((256, 3, 224, 224), torch.uint8)"
        )
    kind = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(kind, torch.dtype):
        raise ArgumentError(f"dtype={dtype!r} is not a torch dtype", fix="dtype=torch.float32")
    return _pool.take(sizes, kind)


def stats() -> PinnedStats:
    """Return what `empty_pinned` has handed out so far."""
    return _pool.stats()


def limit(limit_bytes: int) -> None:
    """Hand out at most so many pinned bytes at once; further calls get pageable memory, and are counted."""
    if not is_integer(limit_bytes) or limit_bytes < 0:
        raise ArgumentError(f"limit_bytes={limit_bytes!r}", fix="a whole number of bytes, 0 to pin nothing")
    _pool.limit(limit_bytes)
