"""`Mesh`: devices arranged along named axes, so that the axis with the most traffic is on the fastest links.

A mesh is a description: it needs neither torch nor a process group until `device_mesh` is asked for.
"""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, cached_property
from typing import Any, Self

from ..errors import ArgumentError, is_integer

TRAFFIC = ("tp", "cp", "ep", "fsdp", "dp", "pp")
"""Axes by the bytes they move in a step, most first: neighbours along the first axis are neighbours in the machine.

Tensor and context parallel exchange activations in every layer, experts twice in every MoE layer, data parallel
exchanges gradients once a step, and a pipeline one activation for each microbatch.
"""
WIDEST_TP = 8
"""The widest tensor parallel axis that is chosen: beyond eight GPUs, a layer's slices are too thin (Megatron-LM's
advice).
"""
DEEPEST_PP = 4
_entered: ContextVar[tuple[Mesh, ...]] = ContextVar("tessera_meshes", default=())
_whole_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


class Mesh:
    """`Mesh(axes=["tp", "pp", "dp"], devices=range(72))`, or with `axes={"tp": 8, ...}` or `shape=(8, 3, 3)`.

    Without sizes, `choose_shape` chooses them. `devices` are global ranks, in the order of the machine (those
    of one node together). Axes are placed by `TRAFFIC`; `order` names them from the nearest to the farthest instead.
    Collectives without a mesh take the one of `with mesh:` around them, or the only one of the program.
    """

    def __init__(
        self,
        axes: Sequence[str] | Mapping[str, int],
        devices: Iterable[int] | int,
        shape: Sequence[int] | None = None,
        *,
        order: Sequence[str] | None = None,
    ) -> None:
        self.axes = list_names("axes", axes)
        if isinstance(axes, Mapping):
            if shape is not None:
                raise ArgumentError(f"axes={dict(axes)} has the sizes already", fix="leave out shape=")
            shape = tuple(axes.values())
        self.devices = tuple(range(devices) if isinstance(devices, int) else devices)
        if not self.axes or len(set(self.axes)) < len(self.axes):
            raise ArgumentError(f"axes={list(axes)} of a mesh", why="each axis needs a name of its own")
        if not self.devices or len(set(self.devices)) < len(self.devices):
            raise ArgumentError("the devices of a mesh are missing or named twice", fix="devices=range(8)")
        if not all(is_integer(d) and d >= 0 for d in self.devices):
            raise ArgumentError(f"devices={devices!r} of a mesh are not ranks", fix="devices=range(8)")
        self.shape = tuple(shape) if shape is not None else choose_shape(self.axes, len(self.devices))
        if not all(is_integer(n) and n > 0 for n in self.shape):
            raise ArgumentError(f"shape={self.shape} of a mesh", fix="a whole number of devices for each axis")
        if len(self.shape) != len(self.axes) or math.prod(self.shape) != len(self.devices):
            raise ArgumentError(
                f"a mesh of shape {self.shape} over {', '.join(self.axes)} does not have {len(self.devices)} devices",
                why=f"its sizes multiply to {math.prod(self.shape)}",
                fix=f"for example shape={choose_shape(self.axes, len(self.devices))}",
            )
        self.order = tuple(order) if order is not None else tuple(sorted(self.axes, key=_traffic_rank))
        if set(self.order) != set(self.axes):
            raise ArgumentError(f"order={list(self.order)} must name the axes {list(self.axes)}, each once")
        strides, step = {}, 1
        for axis in self.order:
            strides[axis] = step
            step *= self.size(axis)
        self._strides = tuple(strides[axis] for axis in self.axes)
        self._connected: tuple[Any, Any] | None = None
        self._parent: Mesh | None = None
        _whole_meshes.add(self)

    @classmethod
    def from_device_mesh(cls, device_mesh: Any) -> Mesh:
        """Return the same mesh as a torch `DeviceMesh`, which becomes its `device_mesh`."""
        from torch.distributed import group

        names = device_mesh.mesh_dim_names
        if names is None:
            raise ArgumentError("the axes of this DeviceMesh have no names", fix='mesh_dim_names=("tp", "dp")')
        mesh = cls(names, device_mesh.mesh.flatten().tolist(), tuple(device_mesh.mesh.shape), order=names[::-1])
        mesh._connected = (group.WORLD, device_mesh)
        return mesh

    def __enter__(self) -> Self:
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _entered.set(_entered.get()[:-1])

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.shape, strict=True))
        return f"Mesh({sizes})"

    def size(self, axis: str | None = None) -> int:
        """Return the number of devices along an axis; without an axis, of the whole mesh."""
        return len(self.devices) if axis is None else self.shape[self.index_of(axis)]

    def index_of(self, axis: str) -> int:
        """Return the index of an axis in `axes`."""
        if axis not in self.axes:
            raise ArgumentError(f"the mesh has no axis {axis!r}", fix=f"one of: {', '.join(self.axes)}")
        return self.axes.index(axis)

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Return the device at a coordinate, one number for each axis."""
        return self.devices[sum(c * s for c, s in zip(coordinate, self._strides, strict=True))]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return a device's place along each axis."""
        if rank not in self._places:
            raise ArgumentError(f"rank {rank} is not in {self!r}", fix=f"its devices are {_span(self.devices)}")
        place = self._places[rank]
        return {
            axis: place // stride % size
            for axis, size, stride in zip(self.axes, self.shape, self._strides, strict=True)
        }

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.devices)}

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return the groups of devices that differ along one axis only: each is the process group of a collective."""
        at = self.index_of(axis)
        others = [range(n) if i != at else range(1) for i, n in enumerate(self.shape)]
        return [
            tuple(self.rank_at([*c[:at], k, *c[at + 1 :]]) for k in range(self.shape[at]))
            for c in itertools.product(*others)
        ]

    def group_number(self, axis: str, rank: int) -> int:
        """Return which of `groups(axis)` a device is in."""
        self.index_of(axis)  # raises if the mesh has no such axis
        at = self.coordinate(rank)
        number = 0
        for name, size in zip(self.axes, self.shape, strict=True):
            if name != axis:
                number = number * size + at[name]
        return number

    def sub(self, axis: str, at: int | Sequence[int]) -> Mesh:
        """Return a part of the mesh: one place along an axis, which it then lacks, or several (`range(2)`)."""
        places = [at] if isinstance(at, int) else list(at)
        here = self.index_of(axis)
        if not places or not all(0 <= p < self.shape[here] for p in places):
            raise ArgumentError(f"{self!r} has no {axis}={at}", fix=f"0 to {self.shape[here] - 1}")
        devices = sorted((r for r in self.devices if self.coordinate(r)[axis] in places), key=self._places.__getitem__)
        keep = [i for i, name in enumerate(self.axes) if not (i == here and isinstance(at, int))]
        sizes = [len(places) if i == here else self.shape[i] for i in keep]
        names = [self.axes[i] for i in keep]
        if not names:  # it is a single device of a mesh with one axis
            names, sizes = [axis], [1]
        part = Mesh(names, devices, sizes, order=[a for a in self.order if a in names])
        part._parent = self
        _whole_meshes.discard(part)
        return part

    def crossings(self, axis: str, node_size: int) -> float:
        """Return the share of an axis's neighbours that are on different nodes: their traffic leaves the node."""
        pairs = [(a, b) for group in self.groups(axis) for a, b in itertools.pairwise(group)]
        if not pairs:
            return 0.0
        return sum(self._places[a] // node_size != self._places[b] // node_size for a, b in pairs) / len(pairs)

    @property
    def device_mesh(self) -> Any:
        """Return torch's `DeviceMesh` of this mesh.

        Needs a process group: torchrun's, `dist.dry`'s or `dist.simulate`'s.
        """
        from torch.distributed import get_world_size, group, is_initialized

        if not is_initialized():
            raise ArgumentError(
                f"{self!r} is only a description here: no process group exists",
                fix="start the program with torchrun and call torch.distributed.init_process_group(), "
                f"or use `with dist.dry({max(self.devices) + 1}):`",
            )
        if max(self.devices) >= get_world_size():
            raise ArgumentError(
                f"{self!r} has devices up to {max(self.devices)}, and the job has {get_world_size()} ranks",
                fix=f"start {max(self.devices) + 1} ranks, or make a mesh of devices=range({get_world_size()})",
            )
        if self._connected is None or self._connected[0] is not group.WORLD:
            self._connected = (group.WORLD, self._make_device_mesh())
        return self._connected[1]

    def _make_device_mesh(self) -> Any:
        import torch
        from torch._subclasses.fake_tensor import unset_fake_temporarily
        from torch.distributed.device_mesh import DeviceMesh

        with unset_fake_temporarily():  # the ranks are real numbers, also in a dry run
            ranks = torch.tensor([self.rank_at(c) for c in itertools.product(*map(range, self.shape))], dtype=torch.int)
            made = DeviceMesh(device_type(), ranks.reshape(self.shape), mesh_dim_names=self.axes)
        if made.get_coordinate() is not None:
            for axis in self.axes:
                _copy_timeout(made.get_group(axis))
        return made

    def process_group(self, axis: str) -> Any:
        """Return the process group of this rank along an axis.

        A part of a mesh has the mesh's groups if they are whole.
        """
        if self._parent is None:
            self.index_of(axis)
            connected = self.device_mesh
            if connected.get_coordinate() is None:
                from torch.distributed import get_rank

                self.coordinate(get_rank())  # raises if the rank is not in the mesh
            return connected.get_group(axis)
        if self.size(axis) == self._parent.size(axis):
            return self._parent.process_group(axis)
        return self._make_part_of_a_group(axis)

    @cache  # noqa: B019  (a mesh lives as long as its groups)
    def _make_part_of_a_group(self, axis: str) -> Any:
        """Return a group of some places along an axis: only its own ranks make it."""
        from torch.distributed import get_rank

        from .groups import make_group

        here = self.coordinate(get_rank())
        ranks = [self.rank_at([*{**here, axis: k}.values()]) for k in range(self.size(axis))]
        return make_group(ranks, like=None)


def list_names(option: str, names: Iterable[Any]) -> tuple[Any, ...]:
    """Return the names that an option lists. One word is refused: it would be a list of its letters."""
    if isinstance(names, str):
        raise ArgumentError(f"{option}={names!r} is one word", fix=f"a list: {option}=[{names!r}]")
    return tuple(names)


def find_mesh(mesh: Any, axis: str) -> Mesh:
    """Return the mesh of a call: its own, that of `with mesh:`, torch's current one, or the only one with the axis."""
    if mesh is not None:
        return mesh if isinstance(mesh, Mesh) else Mesh.from_device_mesh(mesh)
    if _entered.get():
        return _entered.get()[-1]
    torch_meshes = getattr(sys.modules.get("torch.distributed.device_mesh"), "_mesh_resources", None)
    if entered := getattr(torch_meshes, "mesh_stack", None):
        return Mesh.from_device_mesh(entered[-1])
    found = {(m.axes, m.shape, m.devices, m.order): m for m in _whole_meshes if axis in m.axes}
    if len(found) > 1:
        raise ArgumentError(
            f"{len(found)} meshes have an axis {axis!r}",
            why="without mesh= the only mesh of the program is taken",
            fix="pass mesh=, or call it in `with mesh:`",
        )
    if not found:
        raise ArgumentError(f"no mesh has an axis {axis!r}", fix=f"make one, dist.Mesh([{axis!r}], ...), or pass mesh=")
    return next(iter(found.values()))


def _copy_timeout(group: Any) -> None:
    """Give a group the timeout of `init_process_group`, because torch gives it half an hour."""
    import torch.distributed as c10d

    from .groups import read_timeout

    if c10d.get_backend() != "fake":
        c10d.distributed_c10d._set_pg_timeout(read_timeout(None), group)


def device_type() -> str:
    """Return where the tensors of this process group are: "cuda" if NCCL connects it, else "cpu"."""
    import torch

    backend = torch.distributed.get_backend()
    return "cuda" if "nccl" in backend or (backend == "fake" and torch.cuda.is_available()) else "cpu"


def choose_shape(axes: Sequence[str], count: int) -> tuple[int, ...]:
    """Choose sizes for axes without a model: tensor parallel up to 8, a pipeline up to 4, the rest data parallel.

    `dist.plan` chooses by cost instead. Axes with other names take the remaining devices, the last axis first.
    """
    sizes, left = dict.fromkeys(axes, 1), count
    for axis, most in (("tp", WIDEST_TP), ("pp", DEEPEST_PP)):
        if axis in sizes and (len(axes) > 1 or count <= most):
            sizes[axis] = max(d for d in range(1, most + 1) if left % d == 0)
            left //= sizes[axis]
    rest = [a for a in axes if a not in ("tp", "pp")] or list(axes)
    taker = "dp" if "dp" in rest else rest[-1]
    sizes[taker] *= left
    return tuple(sizes[axis] for axis in axes)


def _traffic_rank(axis: str) -> int:
    return TRAFFIC.index(axis) if axis in TRAFFIC else len(TRAFFIC)


def _span(devices: Sequence[int]) -> str:
    whole = list(devices) == list(range(devices[0], devices[0] + len(devices)))
    return f"{devices[0]} to {devices[-1]}" if whole and len(devices) > 2 else ", ".join(map(str, devices[:8]))
