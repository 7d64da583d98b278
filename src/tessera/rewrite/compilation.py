"""What was observed of a compilation, as plain data: operators before, kernels after, and what our passes changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ..graph.ir import DTYPE_BYTES, TensorSpec
from .eager_ops import EagerOp, make_spec

_DTYPES = {"float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16"}
_SMALL = 1 / 64  # share of the largest operand
# The parameters by which two attentions are recognised as the same.
_ATTENTION_SHAPE = ("batch", "heads", "q_len", "kv_len", "head_dim")
# A fused kernel costs what its heaviest part costs with all its operands. The heaviest kinds first: products, then what
# needs whole rows.
_HEAVY = ("gemm", "conv", "softmax", "norm", "batch_norm", "reduce", "pool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """One place that a pass of ours changed: what eager torch would have launched there, and what it launches now."""

    rule: str
    before: str
    after: str
    graph: int = 0
    where: str = ""
    why: str = ""
    ops_before: tuple[EagerOp, ...] = ()
    ops_after: tuple[EagerOp, ...] = ()
    saved_s: float | None = None
    saved_j: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InductorKernel:
    """One kernel that Inductor generated or calls: the aten nodes it computes, the buffers it reads and writes (bytes).

    `origins` are all nodes it comes from, `nodes` those that no earlier kernel computed; `call` is set for a library's
    kernel.
    """

    name: str
    nodes: tuple[str, ...]
    origins: tuple[str, ...]
    reads: Mapping[str, float]
    writes: Mapping[str, float]
    dtype: str
    backward: bool
    graph: int = 0
    call: EagerOp | None = None


@dataclass(slots=True)
class Compilation:
    """One program's compilation, graph by graph; without `observe`, only our passes' replacements are noted.

    A program has several of Dynamo's graphs, counted in `graphs`. Each becomes one or more aten graphs; an aten graph's
    number comes before the names of its nodes ("0/addmm"), and `graph_of` maps it to Dynamo's graph. `ran` are Dynamo's
    graphs that ran since it was cleared. `replaced` maps nodes that our passes inserted to what they replaced, if `ops`
    has the original operators (`put_back_replaced`).
    """

    observe: bool = True
    ops: list[EagerOp] = field(default_factory=list)
    nodes: list[frozenset[str]] = field(default_factory=list)
    graph_of: list[int] = field(default_factory=list)
    kernels: list[InductorKernel] = field(default_factory=list)
    remaining_nodes: set[str] = field(default_factory=set)
    replacements: list[Replacement] = field(default_factory=list)
    replaced: dict[str, Replacement] = field(default_factory=dict)
    lowered: list[tuple[int, Any]] = field(default_factory=list)
    reused_bytes: list[tuple[int, float]] = field(default_factory=list)
    graphs: int = 0
    ran: set[int] = field(default_factory=set)
    closed: bool = False
    missing: list[str] = field(default_factory=list)
    broken: bool = False
    held: list[tuple[list[Any], Any]] = field(default_factory=list, repr=False)

    @property
    def complete(self) -> bool:
        """Return whether all graphs were seen before and after: half a program cannot be priced."""
        return bool(self.ops and self.kernels) and not self.broken

    def release(self) -> None:
        """Release the compiled code, with its CUDA graphs. If Dynamo calls it again, its graph runs as it is."""
        self.closed = True
        for held, module in self.held:
            held[0] = module.forward
        self.held.clear()

    def select_graphs_that_ran(self) -> Compilation:
        """Drop graphs that were compiled for a first iteration only, such as an optimizer's before it has any state."""
        numbers = {str(n) for n, graph in enumerate(self.graph_of) if graph in self.ran}
        return replace(
            self,
            ops=[op for op in self.ops if op.nodes[0].partition("/")[0] in numbers],
            kernels=[k for k in self.kernels if k.graph in self.ran],
            replacements=[r for r in self.replacements if r.graph in self.ran],
            reused_bytes=[r for r in self.reused_bytes if str(r[0]) in numbers],
        )

    def put_back_replaced(self) -> Compilation:
        """Return the compilation with the operators that our passes replaced, as eager torch runs them.

        They get the nodes of the operators that replaced them. Replacements that are not found in the program stay in
        `replacements`.
        """
        free = [i for i, op in enumerate(self.ops) if op.launches]
        originals: dict[int, list[EagerOp]] = {}
        replaced, left = dict[str, Replacement](), list[Replacement]()
        for n, each in enumerate(self.replacements):
            places: list[int] = []
            for op in each.ops_after:
                places += [i for i in free if i not in places and _is_same_attention(self.ops[i], op)][:1]
            if not places or not each.ops_before or len(places) < len(each.ops_after):
                left.append(each)
                continue
            free = [i for i in free if i not in places]
            for i in places:
                here = self.ops[i]
                own = [op for op in each.ops_before if op.backward == here.backward]
                originals[i] = [replace(op.add_prefix(f"replaced {n}"), nodes=here.nodes) for op in own]
                replaced |= dict.fromkeys(here.nodes, each)
        ops = [op for i, here in enumerate(self.ops) for op in originals.get(i, [here])]
        return replace(self, ops=ops, replacements=left, replaced=replaced)

    def note_missing(self, what: str, why: BaseException | str) -> None:
        """Note something that Inductor did not tell."""
        reason = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
        line = f"Inductor did not say {what} ({reason})"
        if line not in self.missing:
            self.missing.append(line)

    def assign_ops(self) -> tuple[dict[int, list[int]], list[list[int]]]:
        """Return the operators that each kernel computes, and those that no kernel computes any more, in groups."""
        kernel_of: dict[str, int] = {}
        for k, kernel in enumerate(self.kernels):
            for node in kernel.nodes:
                kernel_of.setdefault(node, k)
        owned: dict[int, list[int]] = {}
        vanished = []
        for i, op in enumerate(self.ops):
            votes = Counter(kernel_of[node] for node in op.nodes if node in kernel_of)
            if votes:
                owned.setdefault(votes.most_common(1)[0][0], []).append(i)
            elif op.launches and not any(node in self.remaining_nodes for node in op.nodes):
                vanished.append(i)
        return owned, _group_connected(self.ops, vanished)

    def list_launching_ops(self) -> dict[int, list[int]]:
        """Return, for each kernel, the operators it computes for which eager torch launches something."""
        return {k: [i for i in own if self.ops[i].launches] for k, own in self.assign_ops()[0].items()}

    def list_ops_after(self) -> list[EagerOp]:
        """Return one operator for every kernel, in the order they run."""
        owned, _ = self.assign_ops()
        return [
            kernel.call or _describe_kernel(kernel, [self.ops[i] for i in owned.get(k, [])])
            for k, kernel in enumerate(self.kernels)
        ]


def _is_same_attention(a: EagerOp, b: EagerOp) -> bool:
    shapes = [tuple(op.params.get(key) for key in _ATTENTION_SHAPE) for op in (a, b)]
    return (a.kind, a.backward) == (b.kind, b.backward) and shapes[0] == shapes[1]


def _group_connected(ops: Sequence[EagerOp], chosen: Sequence[int]) -> list[list[int]]:
    """Group the chosen operators that pass values to each other."""
    makers = {name: i for i in chosen for name, _ in ops[i].writes}
    parent = {i: i for i in chosen}

    def find_root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i in chosen:
        for name, _ in ops[i].reads:
            if name in makers:
                parent[find_root(i)] = find_root(makers[name])
    groups: dict[int, list[int]] = {}
    for i in chosen:
        groups.setdefault(find_root(i), []).append(i)
    return list(groups.values())


def _describe_kernel(kernel: InductorKernel, ops: Sequence[EagerOp]) -> EagerOp:
    """Describe a generated kernel as one operator: its heaviest part with all its operands."""
    main = _find_heaviest([op for op in ops if op.launches])
    if main is not None and main.kind in ("gemm", "conv"):
        return main  # a template with an epilogue: the product decides its cost
    reads, writes = (sorted(side.items(), key=lambda item: -item[1]) for side in (kernel.reads, kernel.writes))
    if main is None:  # a bias or a channel's scale stays in the cache, and does not slow down a generated kernel
        reads = [(name, nbytes) for name, nbytes in reads if nbytes > _SMALL * reads[0][1]]
    like = max((t for _, t in main.reads), key=lambda t: prod(t.shape), default=None) if main else None
    dtype = _DTYPES.get(kernel.dtype, kernel.dtype)
    return EagerOp(
        name=main.name if main else "aten.add",
        nodes=kernel.nodes,
        backward=kernel.backward,
        reads=tuple((name, _guess_shape(nbytes, dtype, like)) for name, nbytes in reads),
        writes=tuple((name, _guess_shape(nbytes, dtype, like)) for name, nbytes in writes),
        params=main.params if main else {},
    )


def _find_heaviest(ops: Sequence[EagerOp]) -> EagerOp | None:
    for kind in _HEAVY:
        # in a generated kernel, a batch norm with fixed statistics is elementwise, whatever torch's own kernel costs
        heavy = [op for op in ops if op.kind == kind and (op.reduces or kind != "batch_norm")]
        if heavy:
            return max(heavy, key=lambda op: sum(t.nbytes for _, t in op.reads))
    return None


def _guess_shape(nbytes: float, dtype: str, like: TensorSpec | None) -> TensorSpec:
    """Describe a buffer of known size: in rows as long as those of the heaviest operand, or else flat."""
    if like is not None and like.shape and nbytes == like.nbytes:
        strides = [prod(like.shape[i + 1 :]) for i in range(len(like.shape))]
        return make_spec(like.shape, strides, like.dtype)
    count = max(1, round(nbytes / DTYPE_BYTES.get(dtype, 4)))
    width = like.shape[-1] if like is not None and like.shape else count
    if width == count or count % width:
        return make_spec((count,), (1,), dtype)
    return make_spec((count // width, width), (width, 1), dtype)
