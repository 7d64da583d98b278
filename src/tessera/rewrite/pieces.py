"""Nodes of an aten graph as the operators eager torch would launch: what a program was before Inductor fused it.

Inductor is given a graph in which a layer norm is already taken apart into sums and products. Every node says which
operator it came from (`original_aten`), so the nodes of one operator are put together again, with the tensors that go
in and come out, and are costed like any operator of a captured graph.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..graph import flops
from ..graph.ir import DTYPE_BYTES, Graph, Op, Storage, TensorSpec
from ..graph.op_kinds import kind_of

_ROWWISE = frozenset({"norm", "softmax", "reduce", "batch_norm"})
_ATTENTION = "_scaled_dot_product"
_BOOKKEEPING = ("getitem", "sym_", "detach", "alias", "lift_fresh", "inductor_seeds", "inductor_lookup_seed", "_assert")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One eager operator: its nodes, and the tensors at its border by the name of their memory.

    `silent`: it stands for a write that eager torch does on the way (`p.add_(...)` becomes add and copy here).
    """

    name: str
    nodes: tuple[str, ...]
    reads: tuple[tuple[str, Tensor], ...]
    writes: tuple[tuple[str, Tensor], ...]
    backward: bool = False
    scope: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    silent: bool = False

    @property
    def kind(self) -> str:
        """The family that decides how it is costed."""
        if self.silent:
            return "view"
        if self.name.partition(".")[2].startswith(_ATTENTION):
            return "attention"
        short = self.name.partition(".")[2]
        return "view" if short.startswith(_BOOKKEEPING) else kind_of(self.name)

    @property
    def launches(self) -> bool:
        """Whether eager torch would launch a kernel for it."""
        return self.kind not in ("view", "host")

    @property
    def sums(self) -> bool:
        """Whether it sums over rows or channels; a batch norm with fixed statistics does not."""
        return self.kind in _ROWWISE and "no_training" not in self.name

    @property
    def short(self) -> str:
        """Its name for people: layer_norm, softmax, mm."""
        short = self.name.partition(".")[2].strip("_").removeprefix("native_")
        return short.removesuffix("_legit_no_training").removesuffix("_data")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's shape, strides and our name of its number format."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """What is really there: an expanded dimension is stored once."""
        stored = (size for size, step in zip(self.shape, self.stride, strict=True) if step != 0 or size == 0)
        return int(math.prod(stored) * DTYPE_BYTES.get(self.dtype, 4))


def tensor_of(value: Any) -> Tensor | None:
    """A fake or real tensor as data; None for anything else."""
    if not hasattr(value, "shape") or not hasattr(value, "stride"):
        return None
    from ..graph.recorder import dtype_name

    shape, stride = tuple(size_of(s) for s in value.shape), tuple(size_of(s) for s in value.stride())
    return Tensor(shape, stride, dtype_name(value.dtype))


def size_of(size: Any) -> int:
    """A size as a number; of a symbolic one the value it was traced with."""
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(hint if hint is not None else size)


def name_of(target: Any) -> str:
    """The operator of a node's target, without its overload: aten.addmm."""
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return str(schema.name).replace("::", ".")
    return f"python.{getattr(target, '__name__', target)}"


def pieces_of(graph: Any) -> list[Piece]:
    """The eager operators an aten graph stands for, in order."""
    groups: list[list[Any]] = []
    group_of: dict[Any, list[Any]] = {}
    last: Any = None
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        key = _key(node)
        if node.target is operator.getitem and node.args[0] in group_of:
            group = group_of[node.args[0]]  # one of the values of the operator before
            group.append(node)
        elif key is not None and key == last:
            group = groups[-1]
            group.append(node)
        else:
            group = [node]
            groups.append(group)
            last = key
        group_of[node] = group
    return [_piece(nodes) for nodes in groups]


def _key(node: Any) -> Any:
    """What nodes of one operator share; None for a node that is an operator of its own."""
    original = node.meta.get("original_aten")
    if original is None or name_of(node.target) == name_of(original):
        return None  # mm and mm_1 of one backward share their sequence number and are two products all the same
    source = node.meta.get("from_node") or ()
    line = getattr(source[0], "name", None) if source else None
    return name_of(original), node.meta.get("seq_nr"), node.meta.get("partitioner_tag"), line


def _piece(nodes: Sequence[Any]) -> Piece:
    first, inside = nodes[0], set(nodes)
    reads: dict[str, Tensor] = {}
    writes: dict[str, Tensor] = {}
    for node in nodes:
        for given in node.all_input_nodes:
            found = tensor_of(given.meta.get("val"))
            if given not in inside and found is not None:
                reads[memory_of(given)] = found
        if not node.users or any(user not in inside for user in node.users):
            found = tensor_of(node.meta.get("val"))
            if found is not None:
                writes[memory_of(node)] = found
    original = first.meta.get("original_aten")
    whole = [n for n in nodes if n.target is not operator.getitem]
    return Piece(
        name=name_of(original if original is not None else first.target),
        nodes=tuple(n.name for n in nodes), reads=tuple(reads.items()), writes=tuple(writes.items()),
        backward=first.meta.get("partitioner_tag") == "is_backward", scope=_scope(first),
        params=params_of(first) if len(whole) == 1 else {}, silent=_only_writes(first),
    )  # fmt: skip


def _only_writes(node: Any) -> bool:
    """A copy of what this graph computed, in the same format: the end of an operation in place, as a graph has it."""
    if name_of(node.target) not in ("aten.copy", "aten.copy_") or len(node.all_input_nodes) != 2:
        return False
    target, source = node.all_input_nodes
    same = tensor_of(target.meta.get("val")), tensor_of(source.meta.get("val"))
    return source.op == "call_function" and None not in same and same[0].dtype == same[1].dtype  # type: ignore[union-attr]


def memory_of(node: Any) -> str:
    """The name of the memory a node's value lies in: a view's is that of what it shows."""
    while node.op == "call_function" and node.all_input_nodes:
        source = node.all_input_nodes[0]
        if node.target is operator.getitem and kind_of(name_of(source.target)) != "view":
            break  # one of several values: memory of its own
        if node.target is not operator.getitem and kind_of(name_of(node.target)) != "view":
            break
        node = source
    return str(node.name)


def _scope(node: Any) -> str:
    """The path of the module that called it."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = re.sub(r"^L\['\w+'\]", "", str(list(stack.values())[-1][0]))
    return path.replace("._modules", "").replace("['", ".").replace("']", "").strip(".")


def params_of(node: Any) -> dict[str, Any]:
    """What of a node's arguments decides its cost."""
    short = name_of(node.target).partition(".")[2]
    if short.startswith(_ATTENTION):
        return _attention(node, short)
    try:
        return flops.params_of(short, node.args, node.kwargs)
    except (IndexError, TypeError):  # an overload that gives them in another order
        return {}


def _attention(node: Any, short: str) -> dict[str, Any]:
    backward = short.endswith("_backward")
    tensors = [found for given in node.all_input_nodes if (found := tensor_of(given.meta.get("val")))]
    q, k = (tensors[1], tensors[2]) if backward else (tensors[0], tensors[1])
    flags = [a for a in node.args if isinstance(a, bool)]
    # Beside q, k, v a forward reads only a mask; what it saves for a backward comes out, it does not go in.
    masked = not backward and len([t for t in tensors if len(t.shape) >= 2]) > 3
    batch, heads, q_len, head_dim = (*(1,) * (4 - len(q.shape)), *q.shape)
    return {
        "batch": batch, "heads": heads, "kv_heads": k.shape[-3] if len(k.shape) > 2 else 1, "q_len": q_len,
        "kv_len": k.shape[-2], "head_dim": head_dim, "v_dim": head_dim, "causal": any(flags) and not masked,
        "mask": masked, "backward": backward, "dropout": False,
    }  # fmt: skip


def op_of(piece: Piece, index: int, storages: Mapping[str, int], *, kernels: int | None = None) -> Op:
    """A piece as an operator of a `Graph`."""
    from ..graph.recorder import uses_tf32

    inputs = tuple(spec_of(t, storages[n]) for n, t in piece.reads)
    outputs = tuple(spec_of(t, storages[n]) for n, t in piece.writes)
    kind = piece.kind
    tf32 = kind in ("gemm", "conv") and uses_tf32(kind)
    work = flops.work_of(piece.name, kind, inputs, outputs, dict(piece.params), tf32)
    return Op(
        index, piece.name, kind, piece.scope, "backward" if piece.backward else "forward", inputs, outputs, work.flops,
        work.precision, work.unit, work.kernels if kernels is None else kernels, work.params,
    )  # fmt: skip


def spec_of(tensor: Tensor, storage: int = 0) -> TensorSpec:
    """A tensor as a `Graph` has it."""
    return TensorSpec(storage, tensor.shape, tensor.stride, tensor.dtype, tensor.nbytes)


def channels_last(piece: Piece) -> bool:
    """Whether its images have their channels last in memory."""
    return any(spec_of(tensor).channels_last for _, tensor in piece.reads)


def graph_of(name: str, pieces: Sequence[Piece]) -> Graph:
    """Pieces as a `Graph` that `predict` can solve: who lives from when to when is read off who reads what."""
    ids: dict[str, int] = {}
    size: dict[str, int] = {}
    born: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, piece in enumerate(pieces):
        for key, tensor in (*piece.reads, *piece.writes):
            ids.setdefault(key, len(ids))
            size[key] = max(size.get(key, 0), tensor.nbytes)
            last[key] = i
        for key, _ in piece.reads:
            born.setdefault(key, -1)
        for key, _ in piece.writes:
            born.setdefault(key, i)
    storages = {
        ids[k]: Storage(ids[k], size[k], "inputs" if born[k] < 0 else "activations", born[k], None if born[k] < 0 else
                        last[k] + 1, k)
        for k in ids
    }  # fmt: skip
    ops = tuple(op_of(piece, i, ids) for i, piece in enumerate(pieces))
    return Graph(name=name, ops=ops, storages=storages, mode="step")
