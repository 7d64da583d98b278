"""The operators that eager torch would launch, read off an aten graph: a program before Inductor fused it.

Inductor is given a graph in which a layer norm is already split into sums and products. Every node names the operator
it came from (`original_aten`), so the nodes of one operator are put together again, with the tensors that go in and
come out, and are costed like any operator of a captured graph.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..graph import flops
from ..graph.ir import DTYPE_BYTES, Graph, Op, Storage, TensorSpec, size_of
from ..graph.op_kinds import kind_of

_ROWWISE = frozenset({"norm", "softmax", "reduce", "batch_norm"})
_ATTENTION = "_scaled_dot_product"
_BOOKKEEPING = ("getitem", "sym_", "detach", "alias", "lift_fresh", "inductor_seeds", "inductor_lookup_seed", "_assert")


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerOp:
    """One eager operator: its nodes, and the tensors it reads and writes by the name of their memory.

    `silent`: the operator is a write that eager torch does within another one (`p.add_(...)` becomes add and copy
    here).
    """

    name: str
    nodes: tuple[str, ...]
    reads: tuple[tuple[str, TensorSpec], ...]
    writes: tuple[tuple[str, TensorSpec], ...]
    backward: bool = False
    scope: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    silent: bool = False

    def add_prefix(self, prefix: str) -> EagerOp:
        """Prefix the names of nodes and tensors, because every graph has its own mul_1."""
        reads, writes = (tuple((f"{prefix}/{n}", t) for n, t in side) for side in (self.reads, self.writes))
        return replace(self, nodes=tuple(f"{prefix}/{n}" for n in self.nodes), reads=reads, writes=writes)

    @property
    def kind(self) -> str:
        """Return the family of operators that decides how this one is costed."""
        short = self.name.partition(".")[2]
        if self.silent or short.startswith(_BOOKKEEPING):
            return "view"
        return "attention" if short.startswith(_ATTENTION) else kind_of(self.name)

    @property
    def launches(self) -> bool:
        """Return whether eager torch would launch a kernel for the operator."""
        return self.kind not in ("view", "host")

    @property
    def reduces(self) -> bool:
        """Return whether the operator sums over rows or channels; a batch norm with fixed statistics does not."""
        return self.kind in _ROWWISE and "no_training" not in self.name

    @property
    def short(self) -> str:
        """Return the operator's name for people: layer_norm, softmax, mm."""
        short = self.name.partition(".")[2].strip("_").removeprefix("native_")
        return short.removesuffix("_legit_no_training").removesuffix("_data")

    @property
    def channels_last(self) -> bool:
        """Return whether the images of the operator have their channels last in memory."""
        return any(tensor.channels_last for _, tensor in self.reads)


def make_spec(shape: Sequence[int], stride: Sequence[int], dtype: str) -> TensorSpec:
    """Describe a tensor that has no storage yet; an expanded dimension is stored once."""
    stored = (size for size, step in zip(shape, stride, strict=True) if step != 0 or size == 0)
    return TensorSpec(0, tuple(shape), tuple(stride), dtype, int(math.prod(stored) * DTYPE_BYTES.get(dtype, 4)))


def spec_of(value: Any) -> TensorSpec | None:
    """Describe a fake or real tensor; None for anything else."""
    if not hasattr(value, "shape") or not hasattr(value, "stride"):
        return None
    from ..graph.recorder import dtype_name

    shape, stride = [size_of(s) for s in value.shape], [size_of(s) for s in value.stride()]
    return make_spec(shape, stride, dtype_name(value.dtype))


def name_of(target: Any) -> str:
    """Return the operator of a node's target, without its overload: aten.addmm."""
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return str(schema.name).replace("::", ".")
    return f"python.{getattr(target, '__name__', target)}"


def list_eager_ops(graph: Any) -> list[EagerOp]:
    """Return the eager operators that an aten graph stands for, in order."""
    groups: list[list[Any]] = []
    group_of: dict[Any, list[Any]] = {}
    last: Any = None
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        key = _group_key(node)
        if node.target is operator.getitem and node.args[0] in group_of:
            group = group_of[node.args[0]]  # it takes one of the values that this group returns
            group.append(node)
        elif key is not None and key == last:
            group = groups[-1]
            group.append(node)
        else:
            group = [node]
            groups.append(group)
            last = key
        group_of[node] = group
    return [_make_eager_op(nodes) for nodes in groups]


def _group_key(node: Any) -> Any:
    """Return what the nodes of one operator share; None for a node that is an operator of its own."""
    original = node.meta.get("original_aten")
    if original is None or name_of(node.target) == name_of(original):
        return None  # mm and mm_1 of one backward share their sequence number, but are two products
    source = node.meta.get("from_node") or ()
    line = getattr(source[0], "name", None) if source else None
    return name_of(original), node.meta.get("seq_nr"), node.meta.get("partitioner_tag"), line


def _make_eager_op(nodes: Sequence[Any]) -> EagerOp:
    first, inside = nodes[0], set(nodes)
    reads: dict[str, TensorSpec] = {}
    writes: dict[str, TensorSpec] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            spec = spec_of(source.meta.get("val"))
            if source not in inside and spec is not None:
                reads[memory_of(source)] = spec
        if not node.users or any(user not in inside for user in node.users):
            spec = spec_of(node.meta.get("val"))
            if spec is not None:
                writes[memory_of(node)] = spec
    original = first.meta.get("original_aten")
    whole = [n for n in nodes if n.target is not operator.getitem]
    return EagerOp(
        name=name_of(original if original is not None else first.target),
        nodes=tuple(n.name for n in nodes),
        reads=tuple(reads.items()),
        writes=tuple(writes.items()),
        backward=first.meta.get("partitioner_tag") == "is_backward",
        scope=_scope_of(first),
        params=read_params(first) if len(whole) == 1 else {},
        silent=_only_writes(first),
    )


def _only_writes(node: Any) -> bool:
    """Tell whether a node copies what this graph computed, in the same format: the end of an in-place operation."""
    if name_of(node.target) not in ("aten.copy", "aten.copy_") or len(node.all_input_nodes) != 2:
        return False
    target, source = node.all_input_nodes
    old, new = spec_of(target.meta.get("val")), spec_of(source.meta.get("val"))
    return source.op == "call_function" and old is not None and new is not None and old.dtype == new.dtype


def memory_of(node: Any) -> str:
    """Return the name of the memory that holds a node's value; for a view, of the tensor it shows."""
    while node.op == "call_function" and node.all_input_nodes:
        source = node.all_input_nodes[0]
        if node.target is operator.getitem and kind_of(name_of(source.target)) != "view":
            break  # one of several values: memory of its own
        if node.target is not operator.getitem and kind_of(name_of(node.target)) != "view":
            break
        node = source
    return str(node.name)


def _scope_of(node: Any) -> str:
    """Return the path of the module that called the node."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = re.sub(r"^L\['\w+'\]", "", str(list(stack.values())[-1][0]))
    return path.replace("._modules", "").replace("['", ".").replace("']", "").strip(".")


def read_params(node: Any) -> dict[str, Any]:
    """Return the arguments of a node that decide its cost."""
    short = name_of(node.target).partition(".")[2]
    if short.startswith(_ATTENTION):
        return _read_attention_params(node, short)
    try:
        return flops.params_of(short, node.args, node.kwargs)
    except (IndexError, TypeError):  # an overload with another order of arguments
        return {}


def _read_attention_params(node: Any, short: str) -> dict[str, Any]:
    backward = short.endswith("_backward")
    tensors = [spec for source in node.all_input_nodes if (spec := spec_of(source.meta.get("val")))]
    q, k = (tensors[1], tensors[2]) if backward else (tensors[0], tensors[1])
    flags = [a for a in node.args if isinstance(a, bool)]
    # Beside q, k and v, a forward reads only a mask; what it saves for a backward is output, not input.
    masked = not backward and len([t for t in tensors if len(t.shape) >= 2]) > 3
    causal = any(flags) and not masked
    mask = tensors[3] if masked else None
    return flops.attention_params(q, k, q, mask, causal) | {"backward": backward}


def make_graph(name: str, ops: Sequence[EagerOp]) -> Graph:
    """Make a `Graph` that `predict` can solve; lifetimes follow from which nodes read which."""
    ids: dict[str, int] = {}
    size: dict[str, int] = {}
    born: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, op in enumerate(ops):
        for key, tensor in (*op.reads, *op.writes):
            ids.setdefault(key, len(ids))
            size[key] = max(size.get(key, 0), tensor.nbytes)
            last[key] = i
        for key, _ in op.reads:
            born.setdefault(key, -1)
        for key, _ in op.writes:
            born.setdefault(key, i)
    storages = {}
    for key, number in ids.items():
        given = born[key] < 0
        category, death = ("inputs", None) if given else ("activations", last[key] + 1)
        storages[number] = Storage(number, size[key], category, born[key], death, key)  # type: ignore[arg-type]
    return Graph(name=name, ops=tuple(_make_op(op, i, ids) for i, op in enumerate(ops)), storages=storages, mode="step")


def _make_op(op: EagerOp, index: int, storages: Mapping[str, int]) -> Op:
    """Make an operator of a `Graph`."""
    from ..graph.recorder import uses_tf32

    inputs, outputs = (
        tuple(replace(tensor, storage=storages[name]) for name, tensor in side) for side in (op.reads, op.writes)
    )
    kind = op.kind
    tf32 = kind in ("gemm", "conv") and uses_tf32(kind)
    work = flops.work_of(op.name, kind, inputs, outputs, dict(op.params), tf32)
    return Op(
        index=index,
        name=op.name,
        kind=kind,
        scope=op.scope,
        phase="backward" if op.backward else "forward",
        inputs=inputs,
        outputs=outputs,
        flops=work.flops,
        precision=work.precision,
        unit=work.unit,
        kernels=work.kernels,
        params=work.params,
    )
