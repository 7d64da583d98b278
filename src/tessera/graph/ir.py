"""The noun `Graph`: a captured program as data, free of torch.

A graph is the ordered list of operators one iteration dispatches, each with the tensors it reads and writes, the
module it was called from, its floating-point work, and what the host had to do to get there. Tensors name the storage
they live in, so that views cost nothing, re-use in a cache can be followed, and memory has a timeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal["forward", "backward", "optimizer"]
Category = Literal["weights", "gradients", "optimizer", "activations", "workspace", "inputs"]

DTYPE_BYTES: Mapping[str, float] = {
    "fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16, "complex32": 4, "int4": 0.5, "fp4": 0.5,
}  # fmt: skip
"""Bytes of one element, by our names of the number formats."""


WHAT_IFS: Mapping[str, str] = {
    "fp64": "fp64", "fp32": "fp32", "tf32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16", "int8": "bf16",
}  # fmt: skip
"""Formats a model can be asked to run in, and what its tensors are then kept in: bf16 between quantised products."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as an operator sees it: where it lives, its shape, strides and number format.

    `nbytes` counts what is really there: an expanded dimension (stride 0) is stored once.
    """

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements, expanded ones counted."""
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def contiguous(self) -> bool:
        """Whether elements lie in memory in the order of the dimensions."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True

    @property
    def channels_last(self) -> bool:
        """Whether a 4-d (or 5-d) tensor keeps its channels innermost and is not plainly contiguous too."""
        return (
            len(self.shape) in (4, 5)
            and self.shape[1] > 1
            and self.stride[1] == 1
            and any(size > 1 for size in self.shape[2:])
        )


@dataclass(frozen=True, slots=True)
class Op:
    """One dispatched operator.

    `name` is torch's ("aten.convolution"), `kind` the family that decides how it is costed, `scope` the path of the
    module it was called from ("layer1.0.conv1"), `node` the fx node where the program was an fx graph. `flops` are
    those of matrix products, convolutions and attention, as torch's counter counts them, and `unit` says which part of
    the chip runs them. `kernels` is the number of kernels it launches, 0 for views. `host_modules` and `host_functions`
    count what Python did on the way here since the operator before: module calls and torch functions. `sync` says that
    the host waited for it, `hooked` that autograd called Python for what it saves, as within a checkpoint: such an
    operator of the backward phase is one that is recomputed.
    """

    index: int
    name: str
    kind: str
    scope: str
    phase: Phase
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    flops: int = 0
    precision: str = "fp32"
    unit: Literal["matrix", "vector"] = "vector"
    kernels: int = 1
    params: Mapping[str, Any] = field(default_factory=dict)
    node: str | None = None
    host_modules: int = 0
    host_functions: int = 0
    sync: bool = False
    hooked: bool = False

    @property
    def label(self) -> str:
        """A name for people: the fx node, or the module's path with the operator."""
        short = self.name.removeprefix("aten.").removeprefix("tessera.")
        if self.phase == "backward" and "backward" not in short:
            short += "_backward"
        return self.node or (f"{self.scope}.{short}" if self.scope else short)

    @property
    def bytes_in(self) -> int:
        """Bytes read, each tensor once."""
        return sum(t.nbytes for t in _unique(self.inputs))

    @property
    def bytes_out(self) -> int:
        """Bytes written."""
        return sum(t.nbytes for t in _unique(self.outputs))


def _unique(tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Without the repeats: `x * x` reads x once."""
    seen: dict[tuple[int, tuple[int, ...], tuple[int, ...]], TensorSpec] = {}
    for t in tensors:
        seen.setdefault((t.storage, t.shape, t.stride), t)
    return list(seen.values())


@dataclass(frozen=True, slots=True)
class Storage:
    """A piece of memory: its size, what it holds, and from the birth op to the death op (index after its last use).

    `birth` is -1 where it existed before the iteration, `death` None where it outlives it.
    """

    id: int
    nbytes: int
    category: Category
    birth: int
    death: int | None
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A captured iteration. `samples` is the batch size where inputs have one; `assumptions` what capture guessed.

    `ends_synchronised`: the host waits for the device at the end (`loss.item()`), so that iterations do not overlap.
    """

    name: str
    ops: tuple[Op, ...]
    storages: Mapping[int, Storage]
    mode: Literal["infer", "train", "step"] = "infer"
    samples: int | None = None
    tokens: int | None = None
    parameters: int = 0
    assumptions: tuple[str, ...] = ()
    ends_synchronised: bool = False

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products, convolutions and attention (a multiply-add is two)."""
        return sum(op.flops for op in self.ops)

    @property
    def kernels(self) -> tuple[Op, ...]:
        """The operators that launch something."""
        return tuple(op for op in self.ops if op.kernels)
