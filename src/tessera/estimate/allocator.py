"""torch's caching allocator, replayed: which blocks an order of allocations and frees ends up in.

`torch.cuda.max_memory_allocated` counts blocks, not tensors: a block that is cut from a larger free one keeps up to a
MiB more than was asked for. Sizes and rules are those of c10/cuda/CUDACachingAllocator (default settings).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIN_BLOCK = 512
SMALL = 1 << 20
"""Requests up to this size share small segments."""
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_LARGE_REQUEST = 10 << 20
_ROUND_LARGE = 2 << 20


def rounded(nbytes: int) -> int:
    """Bytes of a request as the allocator counts them."""
    return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)


@dataclass(slots=True, eq=False)
class _Block:
    size: int
    address: int
    small: bool
    before: _Block | None = None
    after: _Block | None = None
    free: bool = False


class Allocator:
    """Allocations by key; `allocated` and `reserved` are bytes now. Segments are never given back to the device."""

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._by_address: dict[int, _Block] = {}
        self._held: dict[int, _Block] = {}
        self._next_address = 0

    def allocate(self, key: int, nbytes: int) -> int:
        """Take a block and say how large it is; nothing at all for an empty tensor, or for a key that has one."""
        if nbytes <= 0 or key in self._held:
            return 0
        size = rounded(nbytes)
        block = self._best_fit(size) or self._segment(size)
        rest = block.size - size
        if rest >= MIN_BLOCK if block.small else rest > SMALL:
            self._split(block, size)
        block.free = False
        self._held[key] = block
        self.allocated += block.size
        return block.size

    def release(self, key: int) -> None:
        """Give a block back; it grows together with free neighbours of its segment."""
        block = self._held.pop(key, None)
        if block is None:
            return
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.free:
                block = self._merge(block, other)
        block.free = True
        insort(self._free[block.small], (block.size, block.address))

    def _best_fit(self, size: int) -> _Block | None:
        small = size <= SMALL
        free = self._free[small]
        at = bisect_left(free, (size, -1))
        if at == len(free):
            return None
        return self._by_address[free.pop(at)[1]]

    def _segment(self, size: int) -> _Block:
        small = size <= SMALL
        if small:
            whole = _SMALL_SEGMENT
        else:
            whole = _LARGE_SEGMENT if size < _LARGE_REQUEST else -(-size // _ROUND_LARGE) * _ROUND_LARGE
        block = _Block(whole, self._next_address, small)
        self._by_address[block.address] = block
        self._next_address += whole + 1  # segments are never neighbours
        self.reserved += whole
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, block.address + size, block.small, block, block.after, free=True)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._by_address[rest.address] = rest
        insort(self._free[rest.small], (rest.size, rest.address))

    def _merge(self, block: _Block, other: _Block) -> _Block:
        """One block of two neighbours, the second of which is on the free list."""
        free = self._free[other.small]
        free.pop(bisect_left(free, (other.size, other.address)))
        first, second = (other, block) if other.address < block.address else (block, other)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        del self._by_address[second.address]
        return first
