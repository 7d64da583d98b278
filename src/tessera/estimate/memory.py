"""Peak memory of an iteration: what `torch.cuda.max_memory_allocated` would say, and where it goes.

The lives of tensors come from the capture, scratch space of kernels from `scratch.py`, and both go through a replay of
torch's caching allocator (`allocator.py`) until the iteration repeats itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from ..device import Device
from ..errors import ArgumentError, did_you_mean
from ..graph.ir import Category, Graph, Storage
from ..graph.partition import PartitionReport
from .allocator import Allocator
from .scratch import reserves, scratch, workspaces

CATEGORIES: tuple[str, ...] = get_args(Category)

STATES: Mapping[str, int] = {"none": 0, "sgd": 1, "adamw": 2}
"""Optimizers by the tensors they keep for each parameter (SGD with momentum)."""

# Keys of what is no tensor of the program.
_SCRATCH, _WORKSPACE, _RESERVE = -1, -10, -100

_WARM = 2  # iterations until freed blocks lie as they do in every later one


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Memory of one iteration, in bytes as torch's allocator counts them.

    `timeline[i]` is the most that is allocated while operator i runs, `by_category` the split at the peak,
    `reserved_bytes` what the allocator took from the device for it. `fits` is None where the capacity is not known.
    """

    name: str
    peak_bytes: int
    reserved_bytes: int
    peak_index: int
    peak_op: str
    timeline: tuple[int, ...]
    by_category: Mapping[str, int]
    static_bytes: int
    device: str | None = None
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
        plain = {key: getattr(self, key) for key in self.__slots__}
        return {
            **plain,
            "by_category": dict(self.by_category),
            "fits": self.fits,
            "headroom_bytes": self.headroom_bytes,
        }

    def to_json(self) -> str:
        """The report as JSON."""
        import msgspec

        return msgspec.json.encode(self.to_dict()).decode()


@dataclass(frozen=True, slots=True)
class MemoryEstimator:
    """Estimates peak memory; `device` (a `Device` or a name of the catalogue) says what there is."""

    device: Device | str | None = None

    def estimate(self, graph: Graph | PartitionReport, optimizer: str | None = None) -> MemoryReport:
        """Memory of one steady iteration.

        `optimizer` ("none", "sgd", "adamw") asks what another optimizer than the captured one would hold. Of a fused
        partition the values that never leave a kernel take no memory.
        """
        from ..hardware import lookup

        device = lookup(self.device) if isinstance(self.device, str) else self.device
        program, inside = (graph.graph, _inside(graph)) if isinstance(graph, PartitionReport) else (graph, set[int]())
        storages = [s for s in _with_optimizer(program, optimizer) if s.id not in inside]
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
            device=device.id if device else None,
            capacity_bytes=round(capacity.value) if capacity else None,
            notes=program.assumptions,
        )


def _inside(report: PartitionReport) -> set[int]:
    """Storages that only exist within fused kernels."""
    if not report.fused:
        return set()
    touched = {t.storage for s in report.subgraphs for op in s.ops for t in (*op.inputs, *op.outputs)}
    return touched - {t.storage for s in report.subgraphs for t in (*s.reads, *s.writes)}


def _with_optimizer(graph: Graph, optimizer: str | None) -> list[Storage]:
    """The program's storages, with another optimizer's state in place of the captured one's."""
    found = list(graph.storages.values())
    if optimizer is None:
        return found
    if optimizer not in STATES:
        raise ArgumentError(
            f"no optimizer {optimizer!r}{did_you_mean(optimizer, STATES)}", fix=f"one of {', '.join(STATES)}"
        )
    gradients = [s for s in found if s.category == "gradients"]
    if not gradients:
        raise ArgumentError(
            "optimizer= needs a captured training step", why="this graph has no gradients", fix="capture(mode='train')"
        )
    kept = [s for s in found if s.category != "optimizer"]
    free = max(graph.storages, default=0) + 1
    sizes = [s.nbytes for s in gradients for _ in range(STATES[optimizer])]
    return kept + [Storage(free + i, n, "optimizer", -1, None, "state") for i, n in enumerate(sizes)]


@dataclass(slots=True)
class _Replay:
    """One iteration after another through the allocator; what is kept is the last one's."""

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

    def run(self) -> None:
        """Everything that was there before, then iterations until the last counts."""
        before, born, dies = self._lives()
        for s in before:
            self._take(s.id, s.category, s.nbytes)
        for i, nbytes in enumerate(self.workspaces):
            self._take(_WORKSPACE - i, "workspace", nbytes)
        self.static_bytes = self.peak_bytes = self._allocator.allocated
        self.at_peak = self._split()
        for i in range(_WARM + 1):
            self._iterate(born, dies, last=i == _WARM)
        self.reserved_bytes = self._allocator.reserved

    def _iterate(self, born: Mapping[int, list[Storage]], dies: Mapping[int, list[int]], *, last: bool) -> None:
        for s in (s for some in born.values() for s in some):
            self._give(s.id)  # what outlived the iteration before is replaced in this one
        for op in self.graph.ops:
            for key in dies.get(op.index, ()):
                self._give(key)
            for s in born.get(op.index, ()):
                self._take(s.id, s.category, s.nbytes)
            self._take(_SCRATCH, "workspace", scratch(op) if op.kernels else 0)
            if last:
                self._note(op.index)
            self._give(_SCRATCH)
        for key in dies.get(len(self.graph.ops), ()):
            self._give(key)

    def _note(self, index: int) -> None:
        now = self._allocator.allocated
        self.timeline.append(now)
        if now > self.peak_bytes:
            self.peak_bytes, self.peak_index, self.at_peak = now, index, self._split()

    def _split(self) -> dict[str, int]:
        return {name: self._live[name] for name in CATEGORIES if self._live[name]}

    def _lives(self) -> tuple[list[Storage], dict[int, list[Storage]], dict[int, list[int]]]:
        """Storages there before the iteration, and by operator those it makes and those that have died before it."""
        before: list[Storage] = []
        born: defaultdict[int, list[Storage]] = defaultdict(list)
        dies: defaultdict[int, list[int]] = defaultdict(list)
        for s in (*self.storages, *self._reserves()):
            if s.birth < 0 or self._was_there(s):
                before.append(s)
                continue
            born[s.birth].append(s)
            if s.death is not None:
                dies[s.death].append(s.id)
        return before, born, dies

    def _was_there(self, s: Storage) -> bool:
        """Something read before it was ever written: a cache the program holds."""
        if s.birth >= len(self.graph.ops):
            return False
        first = self.graph.ops[s.birth]
        return any(t.storage == s.id for t in first.inputs) and all(t.storage != s.id for t in first.outputs)

    def _reserves(self) -> Iterator[Storage]:
        for i, (start, end, nbytes) in enumerate(reserves(self.graph)):
            yield Storage(_RESERVE - i, nbytes, "workspace", start, end, "cuDNN reserve")

    def _take(self, key: int, category: str, nbytes: int) -> None:
        size = self._allocator.allocate(key, nbytes)
        if size:
            self._sizes[key] = (category, size)
            self._live[category] += size

    def _give(self, key: int) -> None:
        if key in self._sizes:
            category, size = self._sizes.pop(key)
            self._live[category] -= size
            self._allocator.release(key)
