"""Run a sharded program without its cluster: `dry` counts on a process group of any size, `simulate` computes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as c10d
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ArgumentError
from .mesh import Mesh

_KINDS = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall_base": "all_to_all",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
}
"""Kinds by torch's names of collectives: functional ones, and those of c10d (which end with an underscore: in place).
"""
_OUTPUT_FIRST = ("all_gather", "reduce_scatter", "all_to_all")


@dataclass(slots=True)
class CountedCollectives:
    """The collectives of one rank in a dry run, by kind: their number, and the bytes of the tensors they were given."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    _by_group: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)

    def add(self, kind: str, nbytes: int, ranks: Sequence[int]) -> None:
        """Count one call on a group."""
        self.calls[kind] += 1
        self.bytes[kind] += nbytes
        self._by_group[kind, tuple(ranks)] += nbytes

    def bytes_along(self, mesh: Mesh, axis: str) -> dict[str, int]:
        """Return bytes by kind, of collectives on a group of an axis or on a part of such a group."""
        groups = [set(group) for group in mesh.groups(axis)]
        found: Counter[str] = Counter()
        for (kind, ranks), nbytes in self._by_group.items():
            whole = next((group for group in groups if ranks[0] in group), set())
            # A single rank is a part of every axis, but the whole group only of axes of size one.
            if whole.issuperset(ranks) and (len(ranks) > 1 or len(whole) == 1):
                found[kind] += nbytes
        return dict(found)


class _Counting(TorchDispatchMode):
    """Sees every collective that torch dispatches, DTensor's and FSDP's included."""

    def __init__(self, counted: CountedCollectives) -> None:
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor goes first; what it does with the parts comes here again
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            kind = _KINDS.get(func._overloadpacket.__name__.removesuffix("_"))
            if kind is not None:
                is_c10d = func.namespace == "c10d"
                given = args[1] if is_c10d and kind in _OUTPUT_FIRST else args[0]
                self._counted.add(kind, _count_bytes(given), _find_ranks([*args, *(kwargs or {}).values()]))
        elif all(type(a) is torch.Tensor for a in args if isinstance(a, torch.Tensor)) and _is_of_ranks(args):
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _is_of_ranks(args: Any) -> bool:
    """Return whether an operation is on existing whole numbers: a DeviceMesh's ranks, whose values torch needs."""
    return bool(args) and isinstance(args[0], torch.Tensor) and not args[0].is_floating_point()


def _count_bytes(given: Any) -> int:
    """Return the bytes that a rank hands in, lists of tensors included."""
    if isinstance(given, (list, tuple)):
        return sum(map(_count_bytes, given))
    return given.numel() * given.element_size() if isinstance(given, torch.Tensor) else 0


def _find_ranks(args: Sequence[Any]) -> list[int]:
    """Return the ranks of the group among the arguments of a collective: an object, or a name at the end."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in arg._type().qualified_name():
            return list(c10d.get_process_group_ranks(c10d.ProcessGroup.unbox(arg)))
    name = next(arg for arg in reversed(args) if isinstance(arg, str))
    return list(c10d.get_process_group_ranks(c10d.distributed_c10d._resolve_process_group(name)))


@contextlib.contextmanager
def dry(ranks: int, *, rank: int = 0) -> Iterator[CountedCollectives]:
    """Act as one rank of a fake process group of any size: shapes and bytes are exact, and no memory is taken.

    Tensors made inside have shapes but no values (torch's fake tensors); collectives are counted and move nothing.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    counted = CountedCollectives()
    with _fake_group(ranks, rank), FakeTensorMode(allow_non_fake_inputs=True), _Counting(counted):
        yield counted


@contextlib.contextmanager
def simulate(ranks: int) -> Iterator[None]:
    """Act as all ranks of a process group at once, in this process: collectives compute, for tests of small meshes.

    A tensor made inside has the values of every rank (torch's `LocalTensor`).
    """
    from torch.distributed._local_tensor import LocalTensorMode

    with _fake_group(ranks, 0), LocalTensorMode(ranks):
        yield


@contextlib.contextmanager
def _fake_group(ranks: int, rank: int) -> Iterator[None]:
    if c10d.is_initialized():
        raise ArgumentError(
            "a process group exists already", why="a dry or simulated run needs one of its own", fix="run it elsewhere"
        )
    if ranks < 1 or not 0 <= rank < ranks:
        raise ArgumentError(f"rank {rank} of {ranks} ranks", fix=f"rank=0 to {max(ranks - 1, 0)}")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    c10d.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        c10d.destroy_process_group()
