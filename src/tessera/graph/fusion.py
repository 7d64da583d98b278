"""Which pieces a compiler would run as one kernel, following true data dependencies by storage.

A product or convolution takes what follows it element by element (bias, batch norm with fixed statistics, activation,
residual add, dropout, cast) into its epilogue; pointwise operators, norms and softmax chain with each other. A value
may stay inside only if its one reader is inside too.

`inductor=True` follows torch.compile's default mode instead: products, convolutions and attention keep to themselves,
sums take what feeds them, a value with more readers is written and still read inside, and forward, backward and
optimizer are separate programs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .ir import Graph, Op
from .op_kinds import MATRIX_KINDS
from .partition import Flow, main_op, outlives

_ROWWISE = frozenset({"norm", "softmax"})
# Moves of data that Inductor writes as pointwise code, with an index for each element it reads.
_COPIES = frozenset({"clone", "copy_", "_to_copy", "contiguous", "constant_pad_nd", "flip", "roll", "repeat"})
_GENERATED_MOVES = _COPIES | {"cat", "stack", "embedding", "index_select", "gather"}


@dataclass(slots=True)
class _Group:
    """Pieces that are one kernel so far; `tail` computes the value that leaves it."""

    members: list[int]
    tail: int
    matrix: bool
    rowwise: bool


def fuse(
    graph: Graph, pieces: Sequence[Sequence[Op]], returned: frozenset[str], *, inductor: bool = False
) -> list[list[int]]:
    """Groups of pieces, in an order in which they can run. `returned`: fx nodes whose values leave the program."""
    return (_InductorFuser if inductor else _Fuser)(graph, pieces, returned).run()


class _Fuser:
    def __init__(self, graph: Graph, pieces: Sequence[Sequence[Op]], returned: frozenset[str]) -> None:
        self._graph = graph
        self._pieces = pieces
        self._returned = returned
        self._flow = Flow.of(pieces)
        self._group: dict[int, _Group] = {}
        self._touches = [{t.storage for op in ops if op.kernels for t in (*op.inputs, *op.outputs)} for ops in pieces]
        self._writers: dict[int, list[int]] = {}
        for i, ops in enumerate(pieces):
            for storage in {t.storage for op in ops if op.kernels for t in op.outputs}:
                self._writers.setdefault(storage, []).append(i)

    def run(self) -> list[list[int]]:
        for i in range(len(self._pieces)):
            self._group[i] = self._place(i)
        groups = {id(g): g for g in self._group.values()}
        return [sorted(g.members) for g in sorted(groups.values(), key=lambda g: max(g.members))]

    def _place(self, i: int) -> _Group:
        """Join the groups whose only reader this piece is, or start a new one."""
        main = main_op(self._pieces[i])
        rowwise = main.kind in _ROWWISE
        alone = _Group([i], i, main.kind in MATRIX_KINDS, rowwise)
        if not (rowwise or _is_pointwise(self._pieces[i])):
            return alone
        joined = alone
        for group in self._candidates(i):
            matrix, rows = joined.matrix or group.matrix, joined.rowwise or group.rowwise
            # One product per kernel, and a norm needs whole rows, which the tiles of a product do not hold.
            if (joined.matrix and group.matrix) or (matrix and rows) or not self._can_move(group, i):
                continue
            joined = _Group([*group.members, *joined.members], i, matrix, rows)
        for member in joined.members:
            self._group[member] = joined
        return joined

    def _candidates(self, i: int) -> list[_Group]:
        """Groups whose value goes to piece i alone, in the order in which it reads them."""
        sizes = _numel(self._pieces[i])
        groups: dict[int, _Group] = {}
        for source in sorted(self._flow.sources[i], reverse=True):
            group = self._group[source]
            fits = group.matrix or group.rowwise or _is_pointwise(self._pieces[source])
            if (
                fits
                and group.tail == source
                and self._flow.users[source] == {i}
                and not self._escapes(source)
                and _numel(self._pieces[source]) == sizes
            ):
                groups[id(group)] = group
        return list(groups.values())

    def _escapes(self, piece: int) -> bool:
        """Whether a value of this piece is needed after the program, so that it must reach memory anyway."""
        ops = self._pieces[piece]
        if any(op.node in self._returned for op in ops if op.node):
            return True
        written = (t for op in ops if op.kernels for t in op.outputs if t.nbytes)
        return any(outlives(self._graph, t.storage) for t in written)

    def _can_move(self, group: _Group, to: int, inside: Collection[int] = ()) -> bool:
        """Whether the group may run as late as piece `to`, with those `inside`: nothing overwrites what it reads."""
        members = {*group.members, *inside}
        for member in group.members:
            for storage in self._touches[member]:
                writers = self._writers.get(storage, [])
                for writer in writers[bisect_right(writers, member) :]:
                    if writer >= to:
                        break
                    if writer not in members:
                        return False
        return True


class _InductorFuser(_Fuser):
    """Fusion as torch.compile's default mode does it.

    Constants are written into the code that reads them; smaller pointwise values are computed where they are broadcast;
    a sum over rows shares its loop with what reads the rows, before it and after it.
    """

    def _place(self, i: int) -> _Group:
        ops = self._pieces[i]
        main = main_op(ops)
        rowwise = main.kind in _ROWWISE or main.kind == "reduce"
        joined = _Group([i], i, matrix=False, rowwise=rowwise)
        if not rowwise and not _is_generated(ops):
            return joined
        for group in self._movable(self._candidates(i), i):
            joined = _Group([*group.members, *joined.members], i, False, joined.rowwise or group.rowwise)
        for member in joined.members:
            self._group[member] = joined
        return joined

    def _candidates(self, i: int) -> list[_Group]:
        """Groups of its phase whose value piece i reads first, in the loop over its elements."""
        main = main_op(self._pieces[i])
        size = _loop_size(self._pieces[i])
        groups: dict[int, _Group] = {}
        for source in sorted(self._flow.sources[i], reverse=True):
            group, ops = self._group[source], self._pieces[source]
            made = main_op(ops)
            if made.phase != main.phase or group.tail != source or min(self._flow.users[source]) != i:
                continue
            if self._escapes(source) and made.kind == "fill":
                continue
            if made.kind in _ROWWISE or made.kind == "reduce" or group.rowwise:
                fits = size in (_loop_size(ops), _numel(ops))
            else:  # a smaller value is computed once more for each element that reads it
                fits = _is_generated(ops) and _numel(ops) <= size
            if fits:
                groups[id(group)] = group
        return list(groups.values())

    def _movable(self, groups: list[_Group], to: int) -> list[_Group]:
        """The groups that may run as late as piece `to`, as one with it: whoever else reads them runs later still."""
        while True:
            inside = {to, *(member for group in groups for member in group.members)}
            late = [
                group
                for group in groups
                if all(user >= to for m in group.members for user in self._flow.users[m] if user not in inside)
                and self._can_move(group, to, inside)
            ]
            if len(late) == len(groups):
                return groups
            groups = late


def _is_generated(ops: Sequence[Op]) -> bool:
    """Whether Inductor generates the piece as part of a pointwise kernel: also copies into another layout."""
    return all(
        _is_pointwise_op(op) or op.kind == "fill" or op.name.rpartition(".")[2] in _GENERATED_MOVES
        for op in ops
        if op.kernels
    )


def _is_pointwise(ops: Sequence[Op]) -> bool:
    """Whether a piece computes each output element from the input elements at the same place."""
    return all(_is_pointwise_op(op) for op in ops if op.kernels)


def _is_pointwise_op(op: Op) -> bool:
    if op.kind == "batch_norm":
        return not op.params.get("training", "no_training" not in op.name) and "backward" not in op.name
    if op.kind == "copy":  # a cast; moves and concatenations change places
        return op.name.endswith("._to_copy") and bool(op.inputs) and op.inputs[0].shape == op.outputs[0].shape
    return op.kind in ("elementwise", "random")


def _loop_size(ops: Sequence[Op]) -> int:
    """Elements that the loop over a piece visits: of a sum, those that it adds up."""
    main = main_op(ops)
    return max((t.numel for t in main.inputs), default=0) if main.kind == "reduce" else _numel(ops)


def _numel(ops: Sequence[Op]) -> int:
    """Elements of the value a piece computes."""
    return max((t.numel for t in main_op(ops).outputs), default=0)
