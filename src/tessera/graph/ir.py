"""A captured program as data (`Graph`), without torch.

A graph is the ordered list of operators that one iteration dispatches, each with the tensors it reads and writes, the
module it was called from, its floating-point work, and what the host did to get there. Tensors name the storage they
live in, so that views cost nothing, re-use in a cache can be followed, and memory has a timeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

Phase = Literal["forward", "backward", "optimizer"]
Launch = Literal["eager", "graph", "compile"]
Category = Literal["weights", "gradients", "optimizer", "activations", "workspace", "inputs"]

DTYPE_BYTES: Mapping[str, float] = {
    "complex128": 16,
    **dict.fromkeys(("fp64", "int64", "complex64"), 8),
    **dict.fromkeys(("fp32", "tf32", "int32", "complex32"), 4),
    **dict.fromkeys(("bf16", "fp16", "int16"), 2),
    **dict.fromkeys(("fp8", "int8", "uint8", "bool"), 1),
    **dict.fromkeys(("fp4", "int4"), 0.5),
}
"""Bytes of one element, by our names of the number formats."""

WHAT_IFS: Mapping[str, str] = {
    "fp64": "fp64",
    "fp32": "fp32",
    "tf32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": "bf16",
    "int8": "bf16",
    **dict.fromkeys(("int8wo", "int4wo", "fp8wo", "fp4wo"), "bf16"),
}
"""Formats a model can be asked to run in, and the format of its tensors then: bf16 between quantised products.

"int8wo" and the like are torchao's names of weight-only formats: linear layers keep their weights in it, and multiply
in bf16.
"""

WEIGHT_ONLY: Mapping[str, str] = {name: name[:-2] for name in WHAT_IFS if name.endswith("wo")}
"""Weight-only formats, and the format that weights are stored in then."""


def size_of(size: Any) -> int:
    """Return a size as a number; for a symbolic one the value it was traced with."""
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint if hint is not None else size)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as an operator sees it: its storage, shape, strides and number format.

    `nbytes` counts what is really stored: an expanded dimension (stride 0) is stored once.
    """

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements, expanded ones counted."""
        return prod(self.shape)

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
    module it was called from ("layer1.0.conv1"), `node` the fx node if the program was an fx graph. `flops` are those
    of matrix products, convolutions and attention, as torch's counter counts them, and `unit` is the part of the chip
    that runs them. `kernels` is the number of kernels it launches, 0 for views. `host_modules` and `host_functions`
    count the module calls and torch functions that Python ran since the operator before. `sync` says that the host
    waited for it, `hooked` that autograd called Python for the tensors it saves, as in a checkpoint: such an operator
    of the backward phase is recomputed.
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
        return _count_bytes(self.inputs)

    @property
    def bytes_out(self) -> int:
        """Bytes written."""
        return _count_bytes(self.outputs)

    @property
    def looked_up_bytes(self) -> int:
        """Bytes that a look-up (kind "gather") reads of its table: what it returns, or every row that a bag adds up."""
        if "_embedding_bag" not in self.name:
            return self.bytes_out
        table, indices = self.inputs[:2]
        return indices.numel * table.nbytes // max(1, table.shape[0])


def _count_bytes(tensors: Sequence[TensorSpec]) -> int:
    """Bytes of tensors without repeats: `x * x` reads x once."""
    return sum({(t.storage, t.shape, t.stride): t.nbytes for t in reversed(tensors)}.values())


@dataclass(frozen=True, slots=True)
class Storage:
    """A piece of memory: its size, what it holds, the op at its birth, and the op after its last use (`death`).

    `birth` is -1 if it existed before the iteration, `death` None if it outlives it. Both: state that the iteration
    replaces (a cache that grows).
    """

    id: int
    nbytes: int
    category: Category
    birth: int
    death: int | None
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A captured iteration. `samples` is the batch size if the inputs have one; `assumptions` what capture assumed.

    `precision` is the what-if it was captured in: its operators are in that format already, but for those that the
    program itself casts to another one. `compiled_parts`: it has compiled modules, captured as if they were not.
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
    precision: str | None = None
    compiled_parts: bool = False

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products, convolutions and attention (a multiply-add is two)."""
        return sum(op.flops for op in self.ops)

    @property
    def kernels(self) -> tuple[Op, ...]:
        """The operators that launch something."""
        return tuple(op for op in self.ops if op.kernels)
