"""Which bytes cross device memory and which stay in the last-level cache, in the steady state of an iteration.

The cache is simulated as a list of blocks, least recently used first. A new tensor takes over the block of a freed one
of the same rounded size, as torch's caching allocator does, so that short-lived tensors stay where the last ones were.
The bytes that cross are reads of what is not in the cache and write-backs of what is evicted.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..graph.flops import touched_groups
from ..graph.ir import Graph, Op, TensorSpec

# Share of the last-level cache that keeps earlier data: the rest is lost to its two halves and to hashing.
CACHE_SHARE = 0.6

_ROUND = 512  # torch's allocator hands out multiples of this
_LARGE = 1 << 20  # ... and above this size multiples of 2 MiB, of which the same block is given again
_LARGE_ROUND = 2 << 20


@dataclass(slots=True)
class _CacheBlock:
    nbytes: float
    dirty: float = 0.0


class Cache:
    """A last-level cache that evicts the least recently used block first."""

    def __init__(self, capacity_bytes: float) -> None:
        self._capacity = max(1.0, capacity_bytes)
        self._blocks: OrderedDict[int, _CacheBlock] = OrderedDict()
        self._held = 0.0

    def touch(self, key: int, nbytes: float, *, write: bool) -> float:
        """Read or write a block; the bytes that cross device memory, write-backs included."""
        written = nbytes if write else 0.0
        block = self._blocks.pop(key, None)
        held = min(block.nbytes, nbytes) if block else 0.0
        dirty = block.dirty if block else 0.0
        # A tensor larger than the cache pushes out its own beginning: what is left of it is hit only in part.
        hit = held if nbytes <= self._capacity else held * held / nbytes
        crossed = nbytes - hit if written == 0.0 else 0.0
        size = min(max(nbytes, block.nbytes if block else 0.0), self._capacity)
        self._held += size - (block.nbytes if block else 0.0)
        if written > self._capacity:
            crossed += written - self._capacity  # the rest streams straight through
        self._blocks[key] = _CacheBlock(size, min(size, max(dirty, written)))
        return crossed + self._evict(key)

    def _evict(self, keep: int) -> float:
        back = 0.0
        while self._held > self._capacity and self._blocks:
            key, block = next(iter(self._blocks.items()))
            if key == keep:
                break
            cut = min(block.nbytes, self._held - self._capacity)
            share = cut / block.nbytes if block.nbytes > 0 else 1.0
            back += block.dirty * share
            self._held -= cut
            if cut >= block.nbytes:
                del self._blocks[key]
            else:
                block.dirty -= block.dirty * share
                block.nbytes -= cut
        return back


class _Addresses:
    """Blocks of memory by storage, handed on from freed storages to new ones of the same rounded size."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._block: dict[int, int] = {}
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._next = 0
        mortal = [s for s in graph.storages.values() if s.death is not None and s.birth >= 0]
        self._deaths = sorted(mortal, key=lambda s: s.death or 0)
        self._dead = 0

    def of(self, storage: int) -> int:
        """The block a storage lives in."""
        block = self._block.get(storage)
        if block is None:
            free = self._free[self._rounded_size(storage)]
            if free:
                block = free.pop()
            else:
                block, self._next = self._next, self._next + 1
            self._block[storage] = block
        return block

    def begin(self) -> None:
        """A new iteration: all that dies in it is alive again."""
        self._dead = 0

    def before(self, index: int) -> None:
        """Free what died before this operator, at a view or a kernel."""
        while self._dead < len(self._deaths) and (self._deaths[self._dead].death or 0) <= index:
            storage = self._deaths[self._dead].id
            self._dead += 1
            block = self._block.pop(storage, None)
            if block is not None:
                self._free[self._rounded_size(storage)].append(block)

    def _rounded_size(self, storage: int) -> int:
        size = self._graph.storages[storage].nbytes if storage in self._graph.storages else 0
        step = _LARGE_ROUND if size > _LARGE else _ROUND
        return -(-size // step) * step


def count_traffic(graph: Graph, ops: Sequence[Op], capacity_bytes: float) -> list[float]:
    """Bytes of each operator that cross device memory (read misses, write-backs), in the second of two iterations."""
    cache = Cache(capacity_bytes)
    addresses = _Addresses(graph)
    crossing: list[float] = []
    for _ in range(2):
        crossing = []
        addresses.begin()
        for op in ops:
            addresses.before(op.index)
            crossing.append(_op_traffic(op, cache, addresses))
        addresses.before(len(graph.ops))
    return crossing


def _op_traffic(op: Op, cache: Cache, addresses: _Addresses) -> float:
    reads = _by_storage(op.inputs)
    writes = _by_storage(op.outputs)
    if op.kind == "gather" and op.inputs and op.outputs:  # a look-up reads rows, not the table
        table = op.inputs[0].storage
        reads[table] = min(reads[table], op.looked_up_bytes)
    if op.name == "aten._grouped_mm" and len(op.inputs) > 1 and len(op.inputs[1].shape) == 3:
        # Only the experts that get rows are read.
        rows, experts = op.inputs[0].shape[0], op.inputs[1].shape[0]
        weights = op.inputs[1].storage
        reads[weights] = reads[weights] * touched_groups(experts, rows) / max(1, experts)
    if op.kind == "scatter" and len(op.inputs) > 1 and op.outputs and op.outputs[0].storage == op.inputs[0].storage:
        # Rows are written into something that is there already: the rest of it is not touched.
        target, rows_bytes = op.inputs[0].storage, 2.0 * sum(t.nbytes for t in op.inputs[1:])
        reads[target] = min(reads[target], rows_bytes)
        writes[target] = min(writes[target], rows_bytes)
    if "nll_loss" in op.name:  # one number a row
        reads = {storage: min(nbytes, 64.0 * 1024) for storage, nbytes in reads.items()}
    crossing = 0.0
    for storage, nbytes in reads.items():
        crossing += cache.touch(addresses.of(storage), nbytes, write=False)
    for storage, nbytes in writes.items():
        crossing += cache.touch(addresses.of(storage), nbytes, write=True)
    return crossing


def _by_storage(tensors: Sequence[TensorSpec]) -> dict[int, float]:
    """Bytes by storage; two views of one storage are read once where they are the same view, else both."""
    sizes: dict[int, float] = {}
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for t in tensors:
        view = (t.storage, t.shape, t.stride)
        if view not in seen:
            seen.add(view)
            sizes[t.storage] = sizes.get(t.storage, 0.0) + t.nbytes
    return sizes
