"""The nouns `Subgraph` and `PartitionReport`: a captured program cut into the pieces that launch something.

Unfused, a piece is one kernel-launching operator (or one fx node with everything it dispatches); views, reshapes and
eval-mode dropout launch nothing and are no pieces. Fused, operators that a compiler would run as one kernel are one
piece (`fusion.py`), and what stays inside it never crosses device memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import ArgumentError
from .ir import Graph, Op, TensorSpec
from .tiles import tiles_of

View = tuple[int, tuple[int, ...], tuple[int, ...]]


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
        """All bytes that cross the border of the piece, were nothing of them in a cache."""
        return self.input_bytes + self.weight_bytes + self.output_bytes

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs per byte; 0 where nothing is counted in FLOPs."""
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
    def fused(self) -> bool:
        """Whether several launches became one."""
        return "+" in self.pattern

    def to_dict(self) -> dict[str, Any]:
        """Plain data: operators by name, tensors left out."""
        plain = ("index", "name", "kind", "pattern", "flops", "input_bytes", "output_bytes", "weight_bytes",
                 "total_bytes", "arithmetic_intensity", "precision", "unit", "depends_on", "parallelism",
                 "tiles")  # fmt: skip
        return {**{key: getattr(self, key) for key in plain}, "ops": [op.name for op in self.ops]}


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
    `ShapeProp`, or in an exported program).
    """

    fusion: bool = False

    def partition(self, graph: Any, inputs: Any = None) -> PartitionReport:
        """The program as pieces, in an order in which they can run."""
        captured, kept = _captured(graph, inputs)
        pieces = _pieces(captured)
        if self.fusion:
            from .fusion import fuse

            groups = fuse(captured, [ops for _, ops in pieces], kept)
            pieces = [_joined([pieces[i] for i in group]) for group in groups]
        flow = Flow.of([ops for _, ops in pieces])
        subgraphs = tuple(_subgraph(captured, flow, i, *piece, fused=self.fusion) for i, piece in enumerate(pieces))
        return PartitionReport(
            graph=captured, subgraphs=subgraphs, fused=self.fusion, notes=tuple(captured.assumptions)
        )


def _captured(graph: Any, inputs: Any) -> tuple[Graph, frozenset[str]]:
    """The program as a `Graph`, and the fx nodes whose values it returns."""
    if isinstance(graph, Graph):
        if inputs is not None:
            raise ArgumentError("a captured graph has its inputs already", fix="leave inputs out")
        return graph, frozenset()
    if type(graph).__module__.partition(".")[0] == "builtins":
        raise ArgumentError(
            f"cannot partition {type(graph).__name__}",
            fix="pass a tessera Graph, a torch.fx.GraphModule, an exported program or an nn.Module with inputs=",
        )
    from .fx_capture import capture_fx

    return capture_fx(graph, inputs)


# -- pieces -----------------------------------------------------------------------------------------------------


def _pieces(graph: Graph) -> list[tuple[str, tuple[Op, ...]]]:
    """Unfused pieces: by fx node (and phase) where operators have one, else by operator."""
    if not any(op.node for op in graph.ops):
        names = _Names()
        return [(names.unique(op.label), (op,)) for op in graph.ops if op.kernels]
    found: dict[tuple[str, str], list[Op]] = {}
    for op in graph.ops:
        key = (op.node, op.phase) if op.node else (f"{op.label}#{op.index}", op.phase)
        found.setdefault(key, []).append(op)
    names = _Names()
    by_first = [ops for ops in found.values() if any(op.kernels for op in ops)]
    return [(names.unique(ops[0].label), tuple(ops)) for ops in by_first]


class _Names:
    """Names made unique as fx does it: add, add_1, add_2."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def unique(self, name: str) -> str:
        count = self._taken.get(name)
        self._taken[name] = 0 if count is None else count + 1
        return name if count is None else f"{name}_{count + 1}"


def _joined(parts: Sequence[tuple[str, tuple[Op, ...]]]) -> tuple[str, tuple[Op, ...]]:
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


def _view(t: TensorSpec) -> View:
    return (t.storage, t.shape, t.stride)


def moved(op: Op) -> tuple[dict[View, tuple[TensorSpec, int]], dict[View, tuple[TensorSpec, int]]]:
    """Bytes an operator really reads and writes of each tensor: of a table only the rows it looks up."""
    if not op.kernels:
        return {}, {}
    written = {t.storage for t in op.outputs}
    reads = {_view(t): (t, t.nbytes) for t in op.inputs if t.nbytes}
    writes = {_view(t): (t, t.nbytes) for t in op.outputs if t.nbytes}
    if op.kind == "gather" and op.inputs and op.inputs[0].nbytes:
        table = _view(op.inputs[0])
        reads[table] = (op.inputs[0], min(op.inputs[0].nbytes, op.bytes_out))
    elif op.kind == "scatter" and any(t.storage in written for t in op.inputs):
        rows = sum(n for t, n in reads.values() if t.storage not in written)
        for side in (reads, writes):
            side.update({v: (t, min(n, rows)) for v, (t, n) in side.items() if t.storage in written})
    return reads, writes


@dataclass(slots=True)
class _Border:
    """Bytes across the border of a piece."""

    input_bytes: int = 0
    weight_bytes: int = 0
    output_bytes: int = 0
    reads: list[TensorSpec] = field(default_factory=list)
    writes: list[TensorSpec] = field(default_factory=list)

    def read(self, graph: Graph, t: TensorSpec, nbytes: int) -> None:
        storage = graph.storages.get(t.storage)
        if storage is not None and storage.category == "weights":
            self.weight_bytes += nbytes
        else:
            self.input_bytes += nbytes
        self.reads.append(t)

    def write(self, t: TensorSpec, nbytes: int) -> None:
        self.output_bytes += nbytes
        self.writes.append(t)


def _every_launch(graph: Graph, ops: Sequence[Op]) -> _Border:
    """Every operator goes to memory and back."""
    border = _Border()
    for op in ops:
        reads, writes = moved(op)
        for t, nbytes in reads.values():
            border.read(graph, t, nbytes)
        for t, nbytes in writes.values():
            border.write(t, nbytes)
    return border


def _one_kernel(graph: Graph, piece: int, ops: Sequence[Op], flow: Flow) -> _Border:
    """What was written inside is not read from memory, and what only the inside reads is not written."""
    border = _Border()
    reads: dict[View, tuple[TensorSpec, int]] = {}
    writes: dict[View, tuple[TensorSpec, int]] = {}
    open_ends: dict[int, bool] = {}  # storages written inside: whether the value is still unread
    for op in ops:
        own_reads, own_writes = moved(op)
        for view, (t, nbytes) in own_reads.items():
            if t.storage not in open_ends:
                reads[view] = (t, max(nbytes, reads[view][1] if view in reads else 0))
            else:
                open_ends[t.storage] = False
        for view, (t, nbytes) in own_writes.items():
            writes[view] = (t, max(nbytes, writes[view][1] if view in writes else 0))
            open_ends[t.storage] = True
    for t, nbytes in reads.values():
        border.read(graph, t, nbytes)
    for t, nbytes in writes.values():
        if open_ends[t.storage] or _outlives(graph, t.storage) or flow.users_of.get((piece, t.storage)):
            border.write(t, nbytes)
    return border


def _outlives(graph: Graph, storage: int) -> bool:
    found = graph.storages.get(storage)
    return found is None or found.birth < 0 or found.death is None


def _subgraph(graph: Graph, flow: Flow, index: int, name: str, ops: tuple[Op, ...], *, fused: bool) -> Subgraph:
    fused = fused and len([op for op in ops if op.kernels]) > 1
    border = _one_kernel(graph, index, ops, flow) if fused else _every_launch(graph, ops)
    main = main_op(ops)
    launched = [op for op in ops if op.kernels]
    return Subgraph(
        index=index,
        name=name,
        ops=ops,
        kind=main.kind,
        pattern="+".join(op.kind for op in launched) if fused else main.kind,
        flops=sum(op.flops for op in ops),
        input_bytes=border.input_bytes,
        output_bytes=border.output_bytes,
        weight_bytes=border.weight_bytes,
        precision=main.precision,
        unit=main.unit,
        depends_on=tuple(sorted(flow.order[index])),
        parallelism=max((t.numel for t in main.outputs), default=1) or 1,
        tiles=tiles_of(main),
        reads=tuple(border.reads),
        writes=tuple(border.writes),
    )
