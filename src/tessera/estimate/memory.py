"""Peak memory of an iteration as `torch.cuda.max_memory_allocated` counts it, and what it is used for.

Tensor lifetimes come from the capture, and kernels' scratch memory is added to them: copies in another layout, partial
sums, cuDNN's reserve, cuBLAS's workspace. Both go through a replay of torch's caching allocator until the iteration
repeats itself. The allocator counts blocks, not tensors: a block that is cut from a larger free one may be up to a MiB
larger than the request. Sizes and rules are those of c10/cuda/CUDACachingAllocator (default settings).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, get_args

import msgspec

from ..device import Device
from ..graph.ir import DTYPE_BYTES, Category, Graph, Op, Storage
from ..graph.partition import PartitionReport
from ..hardware import lookup

CATEGORIES: tuple[str, ...] = get_args(Category)

# Keys of blocks that are not tensors of the program.
_SCRATCH, _WORKSPACE, _RESERVE = -1, -10, -100

_WARM = 2  # iterations until the freed blocks are where they are in every later one


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Memory of one iteration, in bytes as torch's allocator counts them.

    `timeline[i]` is the most that is allocated while operator i runs, `by_category` the split at the peak,
    `reserved_bytes` what the allocator took from the device. `fits` is None where the capacity is not known.
    """

    name: str
    peak_bytes: int
    reserved_bytes: int
    peak_index: int
    peak_op: str
    timeline: tuple[int, ...]
    by_category: Mapping[str, int]
    static_bytes: int
    on: str | None = None
    capacity_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the device's memory."""
        return None if self.capacity_bytes is None else self.peak_bytes <= self.capacity_bytes

    @property
    def headroom_bytes(self) -> int | None:
        """Bytes left at the peak; negative where it does not fit."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.peak_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {**plain, "fits": self.fits, "headroom_bytes": self.headroom_bytes}

    def to_json(self) -> str:
        """The report as JSON."""
        return msgspec.json.encode(self.to_dict()).decode()


@dataclass(frozen=True, slots=True)
class MemoryEstimator:
    """Estimates peak memory; `on` (a `Device` or a name of the catalogue) gives the capacity."""

    on: Device | str | None = None

    def estimate(self, graph: Graph | PartitionReport) -> MemoryReport:
        """Memory of one steady iteration; in a fused partition, values that never leave a kernel take none."""
        device = lookup(self.on) if isinstance(self.on, str) else self.on
        program, inside = (graph.graph, _inside(graph)) if isinstance(graph, PartitionReport) else (graph, set[int]())
        storages = [s for s in program.storages.values() if s.id not in inside]
        replay = _Replay(program, storages, workspaces(program, device))
        replay.run()
        capacity = device.memory.capacity_bytes if device else None
        index = replay.peak_index
        return MemoryReport(
            name=program.name,
            peak_bytes=replay.peak_bytes,
            reserved_bytes=replay.reserved_bytes,
            peak_index=index,
            peak_op=program.ops[index].label if program.ops else "",
            timeline=tuple(replay.timeline),
            by_category=replay.at_peak,
            static_bytes=replay.static_bytes,
            on=device.id if device else None,
            capacity_bytes=round(capacity.value) if capacity else None,
            notes=program.assumptions,
        )


def _inside(report: PartitionReport) -> set[int]:
    """Storages that only exist within fused kernels."""
    if not report.fused:
        return set()
    touched = {t.storage for s in report.subgraphs for op in s.ops for t in (*op.inputs, *op.outputs)}
    return touched - {t.storage for s in report.subgraphs for t in (*s.reads, *s.writes)}


# -- scratch memory of kernels ----------------------------------------------------------------------------------

# torch's default for cuBLAS (aten/src/ATen/cuda/CublasHandlePool.cpp): 32 MiB on sm90 and sm100, else :4096:2:16:8.
_HOPPER_WORKSPACE = 32 << 20
_OTHER_WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8
# cublasLt, which adds the bias, has another one (seen on the H200 with torch 2.11).
_LT_WORKSPACE = 1 << 20


def workspaces(graph: Graph, device: Device | None) -> list[int]:
    """Bytes that cuBLAS never frees: one workspace per thread that multiplies, and backward has its own thread."""
    products = [op for op in graph.ops if op.kind == "gemm"]
    if not products or (device is not None and (device.kind == "cpu" or device.vendor.lower() != "nvidia")):
        return []
    digits = "".join(c for c in (device.compute_capability if device else None) or "" if c.isdigit())
    size = _HOPPER_WORKSPACE if not digits or 90 <= int(digits) < 110 else _OTHER_WORKSPACE
    with_bias = any("addmm" in op.name for op in products)
    return [size] * len({op.phase == "backward" for op in products}) + [_LT_WORKSPACE] * with_bias


def scratch_bytes(op: Op) -> int:
    """Bytes an operator uses for itself while it runs."""
    return _conv_scratch(op) if op.kind == "conv" and len(op.params["x"]) == 4 else 0


def rnn_reserves(graph: Graph) -> list[tuple[int, int, int]]:
    """(from operator, to operator, bytes) of what cuDNN's recurrent layers keep for their backward."""
    spans: list[tuple[int, int, int]] = []
    waiting: list[Op] = []
    for op in graph.ops:
        if op.kind != "rnn":
            continue
        if not op.params.get("backward"):
            waiting.append(op)
        elif waiting:
            forward = waiting.pop()  # backward meets the layers in the reverse order
            p = forward.params
            cells = p["layers"] * p["directions"] * p["steps"] * p["batch"] * p["hidden"]
            # The gates and the cell of every step, layer and direction (an LSTM's 4 + 1; an H200 kept 5.0).
            nbytes = int(cells * (p["gates"] + 1) * DTYPE_BYTES.get(forward.inputs[0].dtype, 4))
            spans.append((forward.index, op.index + 1, nbytes))
    return spans


# Rules read off kernel traces of an H200 (cuDNN 9, torch 2.11, benchmarks/data/h200_dev_traces.jsonl.gz).


def _conv_scratch(op: Op) -> int:
    """Tensor-core kernels of cuDNN need channels last: they copy other tensors."""
    p = op.params
    x, w, out = tuple(p["x"]), tuple(p["w"]), tuple(p["out"])
    first, weight = op.inputs[1:3] if p.get("backward") else op.inputs[:2]
    depthwise = int(p.get("groups") or 1) == x[1] > 1
    if op.precision == "fp32" or depthwise or first.channels_last or weight.channels_last:
        return 0
    size = DTYPE_BYTES.get(first.dtype, 4)
    copies = {name: int(prod(shape) * size) for name, shape in (("x", x), ("w", w), ("out", out))}
    if prod(w[2:]) == 1:
        return _pointwise_scratch(op, x, w, copies)
    if x[1] < 16 and (max(w[2:]) < 5 or tuple(p.get("stride", ())) == w[2:]):
        return 0  # an image's three channels: direct kernels, but for the large windows of a stem
    return sum(copies.values())


def _pointwise_scratch(op: Op, x: tuple[int, ...], w: tuple[int, ...], copies: dict[str, int]) -> int:
    """A 1x1 convolution is a plain product for each image, unless it strides or its rows are not aligned."""
    strided = max(op.params.get("stride") or (1,)) > 1
    if not op.params.get("backward"):
        unaligned = prod(x[2:]) % 8 > 0 and x[1] >= 1024
        return copies["x"] + copies["out"] if strided or unaligned else 0
    if not op.params.get("needs", (True, True))[1]:
        return 0
    # The gradient of the weights: one product per image, summed afterwards, until there are too many images.
    partial = x[0] * prod(w) * 4
    both = copies["x"] + copies["out"]
    return both if strided or (x[0] >= 128 and partial > both) else partial


# -- torch's caching allocator ----------------------------------------------------------------------------------

MIN_BLOCK = 512
SMALL = 1 << 20
"""Requests up to this size share small segments."""
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_LARGE_REQUEST = 10 << 20
_ROUND_LARGE = 2 << 20


def round_size(nbytes: int) -> int:
    """Bytes of a request as the allocator counts them."""
    return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)


class Allocator:
    """Allocations by key; `allocated` and `reserved` are bytes now. Segments are never returned to the device."""

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0
        self._in_use: dict[int, tuple[bool, int, int]] = {}  # small, size and address, by key
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # size and address, in order
        self._sizes: dict[int, int] = {}  # of free blocks, by address
        self._starts: dict[int, int] = {}  # of free blocks, by their end
        self._next_address = 0

    def allocate(self, key: int, nbytes: int) -> int:
        """Allocate a block and return its size: 0 for an empty tensor, or for a key that has a block."""
        if nbytes <= 0 or key in self._in_use:
            return 0
        wanted = round_size(nbytes)
        small = wanted <= SMALL
        best = bisect_left(self._free[small], (wanted, -1))
        if best < len(self._free[small]):
            size, address = self._free[small][best]
            self._unlist(small, size, address)
        else:
            size, address = self._make_segment(wanted)
        rest = size - wanted
        if rest >= MIN_BLOCK if small else rest > SMALL:
            self._list(small, rest, address + wanted)
            size = wanted
        self._in_use[key] = (small, size, address)
        self.allocated += size
        return size

    def release(self, key: int) -> None:
        """Free a block; it merges with free neighbours of its segment."""
        if key not in self._in_use:
            return
        small, size, address = self._in_use.pop(key)
        self.allocated -= size
        before, after = self._starts.get(address), self._sizes.get(address + size)
        if after is not None:
            self._unlist(small, after, address + size)
            size += after
        if before is not None:
            self._unlist(small, address - before, before)
            size, address = size + address - before, before
        self._list(small, size, address)

    def _make_segment(self, size: int) -> tuple[int, int]:
        large = _LARGE_SEGMENT if size < _LARGE_REQUEST else -(-size // _ROUND_LARGE) * _ROUND_LARGE
        whole, address = _SMALL_SEGMENT if size <= SMALL else large, self._next_address
        self._next_address += whole + 1  # segments are never neighbours
        self.reserved += whole
        return whole, address

    def _list(self, small: bool, size: int, address: int) -> None:
        insort(self._free[small], (size, address))
        self._sizes[address], self._starts[address + size] = size, address

    def _unlist(self, small: bool, size: int, address: int) -> None:
        self._free[small].pop(bisect_left(self._free[small], (size, address)))
        del self._sizes[address], self._starts[address + size]


def _is_replaced(s: Storage) -> bool:
    """Whether it is state that each iteration frees, having made the next one's: a cache that grows."""
    return s.birth < 0 and s.death is not None and s.category == "inputs"


# -- the replay --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Replay:
    """Runs one iteration after another through the allocator and records the last."""

    graph: Graph
    storages: list[Storage]
    workspaces: Sequence[int]
    timeline: list[int] = field(default_factory=list)
    at_peak: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    peak_index: int = 0
    reserved_bytes: int = 0
    static_bytes: int = 0
    _allocator: Allocator = field(default_factory=Allocator)
    _live: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _sizes: dict[int, tuple[str, int]] = field(default_factory=dict)
    _replaced: list[Storage] = field(default_factory=list)

    def run(self) -> None:
        """Allocate what lives before the iteration, then iterate until the last one counts."""
        before, born, dies = self._lives()
        self._replaced = [s for s in before if _is_replaced(s)]
        for s in before:
            self._allocate(s.id, s.category, s.nbytes)
        for i, nbytes in enumerate(self.workspaces):
            self._allocate(_WORKSPACE - i, "workspace", nbytes)
        self.static_bytes = self.peak_bytes = self._allocator.allocated
        self.at_peak = self._split()
        for i in range(_WARM + 1):
            self._iterate(born, dies, last=i == _WARM)
        self.reserved_bytes = self._allocator.reserved

    def _iterate(self, born: Mapping[int, list[Storage]], dies: Mapping[int, list[int]], *, last: bool) -> None:
        for s in (s for some in born.values() for s in some):
            self._release(s.id)  # storages that outlived the last iteration are replaced in this one
        for s in self._replaced:  # ... or are its state, which it replaces
            self._allocate(s.id, s.category, s.nbytes)
        for op in self.graph.ops:
            for key in dies.get(op.index, ()):
                self._release(key)
            for s in born.get(op.index, ()):
                self._allocate(s.id, s.category, s.nbytes)
            self._allocate(_SCRATCH, "workspace", scratch_bytes(op) if op.kernels else 0)
            if last:
                self._record(op.index)
            self._release(_SCRATCH)
        for key in dies.get(len(self.graph.ops), ()):
            self._release(key)

    def _record(self, index: int) -> None:
        now = self._allocator.allocated
        self.timeline.append(now)
        if now > self.peak_bytes:
            self.peak_bytes, self.peak_index, self.at_peak = now, index, self._split()

    def _split(self) -> dict[str, int]:
        return {name: self._live[name] for name in CATEGORIES if self._live[name]}

    def _lives(self) -> tuple[list[Storage], dict[int, list[Storage]], dict[int, list[int]]]:
        """Storages that live before the iteration, and by operator those it creates and those that died before it."""
        before: list[Storage] = []
        born: defaultdict[int, list[Storage]] = defaultdict(list)
        dies: defaultdict[int, list[int]] = defaultdict(list)
        reserves = [
            Storage(_RESERVE - i, nbytes, "workspace", start, end, "cuDNN reserve")
            for i, (start, end, nbytes) in enumerate(rnn_reserves(self.graph))
        ]
        for s in (*self.storages, *reserves):
            exists = s.birth < 0 or self._exists_before(s)
            (before if exists else born[s.birth]).append(s)
            if s.death is not None and (not exists or _is_replaced(s)):
                dies[s.death].append(s.id)
        return before, born, dies

    def _exists_before(self, s: Storage) -> bool:
        """Whether it is read before it is ever written: a cache that the program holds."""
        if s.birth >= len(self.graph.ops):
            return False
        first = self.graph.ops[s.birth]
        return any(t.storage == s.id for t in first.inputs) and all(t.storage != s.id for t in first.outputs)

    def _allocate(self, key: int, category: str, nbytes: int) -> None:
        size = self._allocator.allocate(key, nbytes)
        if size:
            self._sizes[key] = (category, size)
            self._live[category] += size

    def _release(self, key: int) -> None:
        if key in self._sizes:
            category, size = self._sizes.pop(key)
            self._live[category] -= size
            self._allocator.release(key)
