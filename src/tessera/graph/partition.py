"""Cut a captured program into the pieces that launch something: `Subgraph`s in a `PartitionReport`.

Unfused, a piece is one kernel-launching operator (or one fx node with everything it dispatches); views, reshapes and
eval-mode dropout launch nothing and are not pieces. Fused, operators that a compiler would run as one kernel are one
piece (`fusion.py`), and what stays inside it never crosses device memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from ..errors import ArgumentError
from .ir import Graph, Op, TensorSpec

TILE = 128
"""Rows and columns of outputs one block of a matrix product computes: what cuBLAS and cuDNN choose most."""
ELEMENTS = 1024
"""Elements one block of a pointwise kernel handles: torch's 128 threads of 4 to 8."""

Piece = tuple[str, tuple[Op, ...]]
_Moved = dict[
    tuple[int, tuple[int, ...], tuple[int, ...]], tuple[TensorSpec, int]
]  # bytes of tensors, by what they view
_FIELDS = """
    index name kind pattern flops input_bytes output_bytes weight_bytes total_bytes arithmetic_intensity precision unit
    depends_on parallelism tiles"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subgraph:
    """Operators that run as one piece, and the bytes that cross its border.

    `input_bytes` are activations, gradients and states it reads, `weight_bytes` parameters and buffers it reads,
    `output_bytes` what it writes; in a fused piece only what comes from or goes to another one. `depends_on` are the
    indices of pieces that must have run before. `parallelism` is the number of output elements that can be computed
    independently, `tiles` the number of blocks a chip would schedule for them.
    """

    index: int
    name: str
    ops: tuple[Op, ...]
    kind: str
    pattern: str
    flops: int
    input_bytes: int
    output_bytes: int
    weight_bytes: int
    precision: str
    unit: Literal["matrix", "vector"]
    depends_on: tuple[int, ...] = ()
    parallelism: int = 1
    tiles: int = 1
    reads: tuple[TensorSpec, ...] = ()
    writes: tuple[TensorSpec, ...] = ()

    @property
    def total_bytes(self) -> int:
        """All bytes that cross the border of the piece if nothing is in a cache."""
        return self.input_bytes + self.weight_bytes + self.output_bytes

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs per byte; 0 if nothing is counted in FLOPs."""
        return self.flops / self.total_bytes if self.total_bytes else 0.0

    @property
    def main(self) -> Op:
        """The operator that decides what the piece costs."""
        return main_op(self.ops)

    @property
    def kernels(self) -> tuple[Op, ...]:
        """Its operators that launch something."""
        return tuple(op for op in self.ops if op.kernels)

    @property
    def is_fused(self) -> bool:
        """Whether several launches became one."""
        return "+" in self.pattern

    def to_dict(self) -> dict[str, Any]:
        """Plain data: operators by name, tensors left out."""
        return {**{key: getattr(self, key) for key in _FIELDS.split()}, "ops": [op.name for op in self.ops]}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionReport:
    """A program as pieces in the order they run."""

    graph: Graph
    subgraphs: tuple[Subgraph, ...]
    fused: bool = False
    notes: tuple[str, ...] = ()

    @property
    def total_flops(self) -> int:
        """FLOPs of all pieces."""
        return sum(s.flops for s in self.subgraphs)

    @property
    def total_bytes(self) -> int:
        """Bytes that cross the borders of all pieces."""
        return sum(s.total_bytes for s in self.subgraphs)

    def __len__(self) -> int:
        return len(self.subgraphs)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "name": self.graph.name,
            "mode": self.graph.mode,
            "fused": self.fused,
            "total_flops": self.total_flops,
            "total_bytes": self.total_bytes,
            "subgraphs": [s.to_dict() for s in self.subgraphs],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """The report as JSON."""
        import msgspec

        return msgspec.json.encode(self.to_dict()).decode()


@dataclass(frozen=True, slots=True)
class GraphPartitioner:
    """Cuts a program into subgraphs: our own `Graph`, a `torch.fx.GraphModule`, an exported program or a module.

    An fx graph needs the shapes of its inputs: `inputs=` as for `capture`, or placeholders that carry them (after
    `ShapeProp`, or in an exported program). `fusion` joins what any compiler could run as one kernel, with `inductor`
    what torch.compile's default mode does.
    """

    fusion: bool = False
    inductor: bool = False

    def partition(self, graph: Any, inputs: Any = None) -> PartitionReport:
        """The program as pieces, in an order in which they can run."""
        captured, returned = _to_graph(graph, inputs)
        pieces = _split(captured)
        if self.fusion:
            from .fusion import fuse

            groups = fuse(captured, [ops for _, ops in pieces], returned, inductor=self.inductor)
            pieces = [_join([pieces[i] for i in group]) for group in groups]
        flow = Flow.of([ops for _, ops in pieces])
        subgraphs = tuple(_subgraph(captured, flow, i, *piece, fused=self.fusion) for i, piece in enumerate(pieces))
        return PartitionReport(
            graph=captured, subgraphs=subgraphs, fused=self.fusion, notes=tuple(captured.assumptions)
        )


def _to_graph(program: Any, inputs: Any) -> tuple[Graph, frozenset[str]]:
    """The program as a `Graph`, and the fx nodes whose values it returns."""
    if not isinstance(program, Graph):
        from .fx_capture import capture_fx

        return capture_fx(program, inputs)
    if inputs is not None:
        raise ArgumentError("a captured graph has its inputs already", fix="leave inputs out")
    return program, frozenset()


# -- pieces -----------------------------------------------------------------------------------------------------


def _split(graph: Graph) -> list[Piece]:
    """Unfused pieces: by fx node (and phase) if operators have one, else by operator; named as fx does: add, add_1."""
    groups: dict[Any, list[Op]] = {}
    by_node = any(op.node for op in graph.ops)
    for op in graph.ops:
        groups.setdefault((op.node or f"{op.label}#{op.index}", op.phase) if by_node else op.index, []).append(op)
    pieces, counts = [], Counter[str]()
    for ops in groups.values():
        if any(op.kernels for op in ops):
            name = ops[0].label
            pieces.append((f"{name}_{counts[name]}" if counts[name] else name, tuple(ops)))
            counts[name] += 1
    return pieces


def _join(parts: Sequence[Piece]) -> Piece:
    ops = sorted((op for _, ops in parts for op in ops), key=lambda op: op.index)
    return "+".join(name for name, _ in parts), tuple(ops)


def main_op(ops: Sequence[Op]) -> Op:
    """The operator with most FLOPs, else the one that moves most bytes."""
    launched = [op for op in ops if op.kernels] or list(ops)
    return max(launched, key=lambda op: (op.flops, op.bytes_in + op.bytes_out))


# -- data flow --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Flow:
    """Which piece reads what which other piece wrote, by storage.

    `sources[i]` are the pieces whose values piece i reads, `users[i]` those that read what i wrote, `order[i]` those
    that must come before it for any reason: also a read before a write in place, and two writes.
    """

    sources: list[set[int]] = field(default_factory=list)
    users: list[set[int]] = field(default_factory=list)
    order: list[set[int]] = field(default_factory=list)
    users_of: dict[tuple[int, int], set[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, pieces: Sequence[Sequence[Op]]) -> Flow:
        """Follow every storage through the pieces in order."""
        flow = cls([set() for _ in pieces], [set() for _ in pieces], [set() for _ in pieces])
        writer: dict[int, int] = {}
        readers: dict[int, set[int]] = {}
        for piece, op in _in_order(pieces):
            for storage in {t.storage for t in op.inputs}:
                source = writer.get(storage)
                if source is not None and source != piece:
                    flow.sources[piece].add(source)
                    flow.users[source].add(piece)
                    flow.order[piece].add(source)
                    flow.users_of.setdefault((source, storage), set()).add(piece)
                readers.setdefault(storage, set()).add(piece)
            for storage in {t.storage for t in op.outputs}:
                before = readers.pop(storage, set()) | ({writer[storage]} if storage in writer else set())
                flow.order[piece] |= before - {piece}
                writer[storage] = piece
        return flow


def _in_order(pieces: Sequence[Sequence[Op]]) -> Iterable[tuple[int, Op]]:
    """Launching operators with their piece, piece by piece: the order in which the pieces run."""
    return ((i, op) for i, ops in enumerate(pieces) for op in ops if op.kernels)


# -- bytes ------------------------------------------------------------------------------------------------------


def _moved_bytes(op: Op) -> tuple[_Moved, _Moved]:
    """Bytes an operator really reads and writes of each tensor: of a table only the rows it looks up."""
    if not op.kernels:
        return {}, {}
    written = {t.storage for t in op.outputs}
    reads, writes = (
        {(t.storage, t.shape, t.stride): (t, t.nbytes) for t in tensors if t.nbytes}
        for tensors in (op.inputs, op.outputs)
    )
    if op.kind == "gather" and op.inputs and op.inputs[0].nbytes:
        table = op.inputs[0]
        reads[table.storage, table.shape, table.stride] = (table, min(table.nbytes, op.looked_up_bytes))
    elif op.kind == "scatter" and any(t.storage in written for t in op.inputs):
        rows = sum(n for t, n in reads.values() if t.storage not in written)
        for side in (reads, writes):
            side.update({v: (t, min(n, rows)) for v, (t, n) in side.items() if t.storage in written})
    return reads, writes


Border = tuple[list[tuple[TensorSpec, int]], list[tuple[TensorSpec, int]]]


def _border_of_launches(ops: Sequence[Op]) -> Border:
    """What crosses the border of a piece in which every operator reads from memory and writes to it."""
    moved = [_moved_bytes(op) for op in ops]
    return [r for reads, _ in moved for r in reads.values()], [w for _, writes in moved for w in writes.values()]


def _border_of_kernel(graph: Graph, piece: int, ops: Sequence[Op], flow: Flow) -> Border:
    """The same for a piece that is one kernel.

    What was written inside is not read from memory, and what is only read inside is not written.
    """
    reads: _Moved = {}
    writes: _Moved = {}
    unread: dict[int, bool] = {}  # storages written inside: whether the value is still unread
    for op in ops:
        own_reads, own_writes = _moved_bytes(op)
        for view, (t, nbytes) in own_reads.items():
            if t.storage in unread:
                unread[t.storage] = False
            else:
                reads[view] = (t, max(nbytes, reads[view][1] if view in reads else 0))
        for view, (t, nbytes) in own_writes.items():
            writes[view] = (t, max(nbytes, writes[view][1] if view in writes else 0))
            unread[t.storage] = True
    leaving = [
        (t, nbytes)
        for t, nbytes in writes.values()
        if unread[t.storage] or outlives(graph, t.storage) or flow.users_of.get((piece, t.storage))
    ]
    return list(reads.values()), leaving


def outlives(graph: Graph, storage: int) -> bool:
    """Whether a storage is there before or after the program, so that its value must be in memory."""
    found = graph.storages.get(storage)
    return found is None or found.birth < 0 or found.death is None


def _subgraph(graph: Graph, flow: Flow, index: int, name: str, ops: tuple[Op, ...], *, fused: bool) -> Subgraph:
    launched = [op for op in ops if op.kernels]
    fused = fused and len(launched) > 1
    reads, writes = _border_of_kernel(graph, index, ops, flow) if fused else _border_of_launches(ops)
    weights = {t.storage for t, _ in reads if (s := graph.storages.get(t.storage)) and s.category == "weights"}
    main = main_op(ops)
    return Subgraph(
        index=index,
        name=name,
        ops=ops,
        kind=main.kind,
        pattern="+".join(op.kind for op in launched) if fused else main.kind,
        flops=sum(op.flops for op in ops),
        input_bytes=sum(nbytes for t, nbytes in reads if t.storage not in weights),
        output_bytes=sum(nbytes for _, nbytes in writes),
        weight_bytes=sum(nbytes for t, nbytes in reads if t.storage in weights),
        precision=main.precision,
        unit=main.unit,
        depends_on=tuple(sorted(flow.order[index])),
        parallelism=max((t.numel for t in main.outputs), default=1) or 1,
        tiles=_count_tiles(main),
        reads=tuple(_moved_part(t, nbytes) if fused else t for t, nbytes in reads),
        writes=tuple(_moved_part(t, nbytes) if fused else t for t, nbytes in writes),
    )


def _moved_part(t: TensorSpec, nbytes: int) -> TensorSpec:
    """The part of a tensor that a kernel moves: of a table, as many rows as it looks up, side by side."""
    if nbytes >= t.nbytes:
        return t
    elements = t.numel * nbytes // t.nbytes
    return replace(t, shape=(elements,), stride=(1,), nbytes=nbytes)


# -- tiles ------------------------------------------------------------------------------------------------------


def _count_tiles(op: Op) -> int:
    """Blocks of a launch: tiles of a product, rows of queries in attention, rows of a norm, stretches of elements."""
    p = op.params
    if op.kind == "gemm" and "m" in p:
        return int(p["batch"]) * _product_tiles(p["m"], p["n"])
    if op.kind == "conv" and "w" in p:
        return _conv_tiles(p)
    if op.kind == "attention":
        return int(p["batch"] * p["heads"]) * -(-int(p["q_len"]) // TILE)
    if op.kind == "rnn":
        # One step after the other: what is parallel is one step of one layer.
        return int(p["directions"]) * _product_tiles(p["batch"], p["gates"] * p["hidden"])
    if op.kind in ("norm", "softmax") and op.inputs and op.inputs[0].shape:
        return max(1, op.inputs[0].numel // max(1, op.inputs[0].shape[-1]))
    elements = max((t.numel for t in (*op.outputs, *op.inputs)), default=1)
    return max(1, -(-elements // ELEMENTS))


def _product_tiles(m: int, n: int) -> int:
    return max(1, -(-int(m) // TILE)) * max(1, -(-int(n) // TILE))


def _conv_tiles(p: Mapping[str, Any]) -> int:
    """A convolution as the product it is: (batch x points) by (output channels), each group on its own."""
    x, w, out, groups = p["x"], p["w"], p["out"], int(p.get("groups") or 1)
    if not p.get("backward"):
        return groups * _product_tiles(out[0] * prod(out[2:]), w[0] // groups)
    data, weight = _product_tiles(x[0] * prod(x[2:]), w[1]), _product_tiles(w[0] // groups, w[1] * prod(w[2:]))
    return groups * max(data, weight)
