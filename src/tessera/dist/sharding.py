"""`ShardSpec` and `tensor`: how a tensor is cut over a mesh, and a tensor that is only described until it is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import ArgumentError, check_choice, is_integer
from .mesh import Mesh, list_names

NAMED_DIMENSIONS = {"row": 0, "col": 1, "batch": 0, "sequence": 1, "head": 1, "expert": 0}
"""Dimensions by word. Matrices have rows and columns; activations are (batch, sequence or head, ...)."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """`ShardSpec(partition=("row", "col"), mesh_axes=("tp", "pp"))`: rows are cut over tp, columns over pp.

    `partition` names dimensions of the tensor ("row", "col", or numbers; negative ones from the end), `mesh_axes` the
    axis that cuts each. Axes that are not named hold copies. One dimension may be cut by two axes, in this order.
    """

    partition: Sequence[str | int] = ()
    mesh_axes: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("partition", "mesh_axes"):
            list_names(name, getattr(self, name))
        if len(self.partition) != len(self.mesh_axes):
            raise ArgumentError(
                f"a ShardSpec of {len(self.partition)} dimensions over {len(self.mesh_axes)} axes",
                why="each dimension in `partition` is cut by the axis at the same place in `mesh_axes`",
            )
        if len(set(self.mesh_axes)) < len(self.mesh_axes):
            raise ArgumentError(f"mesh_axes={tuple(self.mesh_axes)}: an axis can cut one dimension only")

    def cuts(self, rank_of_tensor: int) -> list[tuple[int, str]]:
        """Return (dimension, axis) pairs for a tensor of so many dimensions."""
        pairs = []
        for name, axis in zip(self.partition, self.mesh_axes, strict=True):
            dimension = NAMED_DIMENSIONS.get(name) if isinstance(name, str) else name
            if dimension is None:
                raise ArgumentError(f"{name!r} is not a dimension", fix=f"a number, or {', '.join(NAMED_DIMENSIONS)}")
            if not -rank_of_tensor <= dimension < rank_of_tensor:
                raise ArgumentError(f"dimension {name!r} of a tensor with {rank_of_tensor} dimensions")
            pairs.append((dimension % rank_of_tensor, axis))
        return pairs

    def local_shape(self, shape: Sequence[int], mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Return the shape of one device's part.

        As in torch, the first parts are the largest, the last may be empty.
        """
        return tuple(stop - start for start, stop in self.local_slices(shape, mesh, rank))

    def local_slices(self, shape: Sequence[int], mesh: Mesh, rank: int) -> list[tuple[int, int]]:
        """Return (start, stop) of one device's part along each dimension."""
        at = mesh.coordinate(rank)
        bounds = [(0, size) for size in shape]
        for dimension, axis in self._cuts_in_mesh_order(len(shape), mesh):
            start, stop = bounds[dimension]
            length = -(-(stop - start) // mesh.size(axis))
            begin = min(start + at[axis] * length, stop)
            bounds[dimension] = (begin, min(begin + length, stop))
        return bounds

    def _cuts_in_mesh_order(self, rank_of_tensor: int, mesh: Mesh) -> list[tuple[int, str]]:
        """Return the cuts in the mesh's order: torch cuts a dimension axis by axis in that order."""
        return sorted(self.cuts(rank_of_tensor), key=lambda cut: mesh.index_of(cut[1]))

    def placements(self, rank_of_tensor: int, mesh: Mesh) -> list[Any]:
        """Return torch's placements of the spec, one for each axis of the mesh."""
        from torch.distributed.tensor import Replicate, Shard

        by_axis = {axis: dimension for dimension, axis in self.cuts(rank_of_tensor)}
        for axis in by_axis:
            mesh.index_of(axis)
        return [Shard(by_axis[axis]) if axis in by_axis else Replicate() for axis in mesh.axes]


class ShardedTensor:
    """A tensor over a mesh. Nothing is allocated until `dtensor` is called, and then only this rank's part."""

    def __init__(
        self, shape: Sequence[int], layout: ShardSpec, mesh: Mesh, dtype: str, fill: _Fill, seed: int = 0
    ) -> None:
        self.shape, self.layout, self.mesh, self.dtype = tuple(shape), layout, mesh, dtype
        self._fill, self._seed = fill, seed
        layout.cuts(len(self.shape))
        for axis in layout.mesh_axes:
            mesh.index_of(axis)

    def __repr__(self) -> str:
        return f"ShardedTensor(shape={self.shape}, dtype={self.dtype}, {self.layout}, {self.mesh!r})"

    @property
    def nbytes(self) -> int:
        """Return bytes of the whole tensor, once."""
        return math.prod(self.shape) * bytes_of(self.dtype)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a device's part."""
        return self.layout.local_shape(self.shape, self.mesh, rank)

    def local_nbytes(self, rank: int) -> int:
        """Return bytes of a device's part."""
        return math.prod(self.local_shape(rank)) * bytes_of(self.dtype)

    @cached_property
    def dtensor(self) -> Any:
        """Return this rank's part as torch's `DTensor`: made and filled at the first call."""
        from torch.distributed import tensor as dtensors

        placements = self.layout.placements(len(self.shape), self.mesh)
        make = getattr(dtensors, self._fill if self._fill in ("zeros", "ones") else "empty")
        whole = make(
            self.shape, dtype=torch_dtype(self.dtype), device_mesh=self.mesh.device_mesh, placements=placements
        )
        if callable(self._fill):
            self._fill(whole)
        elif self._fill in _RANDOM:
            self._draw(whole.to_local())
        return whole

    def _draw(self, part: Any) -> None:
        """Draw random numbers that are equal in copies of a part. DTensor's own generator is for GPUs only."""
        import torch

        if type(part).__name__ == "LocalTensor":  # all ranks in one process
            from torch.distributed._local_tensor import tensor_map

            part.copy_(tensor_map(part, lambda rank, own: self._draw_part(own.clone(), rank)))
        else:
            self._draw_part(part, torch.distributed.get_rank())

    def _draw_part(self, part: Any, rank: int) -> Any:
        import torch

        at, place = self.mesh.coordinate(rank), 0
        for axis in self.mesh.axes:
            if axis in self.layout.mesh_axes:
                place = place * self.mesh.size(axis) + at[axis]
        source = torch.Generator(part.device).manual_seed((self._seed * 0x9E3779B1 + place) % 2**63)
        return part.uniform_(generator=source) if self._fill == "rand" else part.normal_(generator=source)


_Fill = str | Callable[[Any], object]
_RANDOM = ("rand", "randn")
_FILLS = ("empty", "zeros", "ones", *_RANDOM)


def tensor(
    shape: Sequence[int],
    layout: ShardSpec,
    mesh: Mesh,
    *,
    dtype: str = "float32",
    fill: _Fill = "zeros",
    seed: int = 0,
) -> ShardedTensor:
    """Return a tensor cut over a mesh, only described: 4 TB take no bytes until a rank asks for its part (`.dtensor`).

    `fill` is "zeros", "ones", "empty", "rand", "randn", or a function that gets the DTensor and fills it. Random
    numbers depend on `seed` and the place of the part in the mesh; copies of a part are equal.
    """
    if isinstance(fill, str) and fill not in _FILLS:
        raise ArgumentError(f"fill={fill!r}", fix=f"one of {', '.join(_FILLS)}, or a function")
    if isinstance(shape, int) or not all(is_integer(n) and n >= 0 for n in shape):
        raise ArgumentError(f"shape={shape!r}", fix="a whole number for each dimension: shape=(4096, 4096)")
    bytes_of(dtype)
    return ShardedTensor(shape, layout, mesh, dtype, fill, seed)


_SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


def bytes_of(dtype: str) -> int:
    """Return the bytes of one element, by torch's name of its type."""
    name = str(dtype).removeprefix("torch.")
    check_choice("dtype", name, _SIZES)
    return _SIZES[name]


def torch_dtype(dtype: str) -> Any:
    """Return torch's type by name."""
    import torch

    return getattr(torch, str(dtype).removeprefix("torch."))
