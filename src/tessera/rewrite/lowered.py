"""Kernels of Inductor as pieces that can be costed, and which eager operators each of them replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from ..graph.ir import DTYPE_BYTES
from .pieces import Piece, Tensor
from .watch import Kernel, Watch

_DTYPES = {"float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16"}
_SMALL = 1 / 64  # of the largest operand
# A fused kernel costs what its heaviest part costs with all its operands: products first, then what needs whole rows.
_HEAVY = ("gemm", "conv", "softmax", "norm", "batch_norm", "reduce", "pool")


def owners(watch: Watch) -> tuple[dict[int, list[int]], list[list[int]]]:
    """Pieces by the kernel that computes them, and the pieces no kernel computes any more, in connected groups."""
    kernel_of: dict[str, int] = {}
    for k, kernel in enumerate(watch.kernels):
        for node in kernel.nodes:
            kernel_of.setdefault(node, k)
    owned: dict[int, list[int]] = {}
    vanished = []
    for i, piece in enumerate(watch.pieces):
        votes = Counter(kernel_of[node] for node in piece.nodes if node in kernel_of)
        if votes:
            owned.setdefault(votes.most_common(1)[0][0], []).append(i)
        elif piece.launches and not any(node in watch.kept for node in piece.nodes):
            vanished.append(i)
    return owned, _connected(watch.pieces, vanished)


def _connected(pieces: Sequence[Piece], chosen: Sequence[int]) -> list[list[int]]:
    """Groups of the chosen pieces that hand values to each other."""
    makers = {name: i for i in chosen for name, _ in pieces[i].writes}
    group = {i: i for i in chosen}

    def head(i: int) -> int:
        while group[i] != i:
            group[i] = group[group[i]]
            i = group[i]
        return i

    for i in chosen:
        for name, _ in pieces[i].reads:
            if name in makers:
                group[head(i)] = head(makers[name])
    found: dict[int, list[int]] = {}
    for i in chosen:
        found.setdefault(head(i), []).append(i)
    return list(found.values())


def after_pieces(watch: Watch) -> list[Piece]:
    """One piece for every kernel, in the order they run."""
    owned, _ = owners(watch)
    return [k.call or _fused(k, [watch.pieces[p] for p in owned.get(i, [])]) for i, k in enumerate(watch.kernels)]


def _fused(kernel: Kernel, pieces: Sequence[Piece]) -> Piece:
    main = _main([p for p in pieces if p.launches])
    if main is not None and main.kind in ("gemm", "conv"):
        return main  # a template with an epilogue: the product decides
    reads = _largest_first(kernel.reads.items())
    if (
        main is None
    ):  # a bias or a channel's scale stays in the cache; torch's own kernels slow down for one, these do not
        reads = [(name, nbytes) for name, nbytes in reads if nbytes > _SMALL * reads[0][1]]
    like = max((t for _, t in main.reads), key=lambda t: prod(t.shape), default=None) if main else None
    dtype = _DTYPES.get(kernel.dtype, kernel.dtype)
    return Piece(
        name=main.name if main else "aten.add", nodes=kernel.nodes, backward=kernel.backward,
        reads=tuple((name, _shaped(nbytes, dtype, like)) for name, nbytes in reads),
        writes=tuple((name, _shaped(nbytes, dtype, like)) for name, nbytes in _largest_first(kernel.writes.items())),
        params=main.params if main else {},
    )  # fmt: skip


def _main(pieces: Sequence[Piece]) -> Piece | None:
    for kind in _HEAVY:
        # a batch norm with fixed statistics is elementwise in a generated kernel, whatever torch's own takes for it
        found = [p for p in pieces if p.kind == kind and (p.sums or kind != "batch_norm")]
        if found:
            return max(found, key=lambda p: sum(t.nbytes for _, t in p.reads))
    return None


def _largest_first(sides: object) -> list[tuple[str, float]]:
    return sorted(sides, key=lambda side: -side[1])  # type: ignore[call-overload, no-any-return]


def _shaped(nbytes: float, dtype: str, like: Tensor | None) -> Tensor:
    """A buffer of which only the size is known: in rows as long as those of the heaviest operand, else flat."""
    if like is None or not like.shape:
        count = max(1, round(nbytes / DTYPE_BYTES.get(dtype, 4)))
        return Tensor((count,), (1,), dtype)
    if nbytes == like.nbytes:
        return Tensor(like.shape, _contiguous(like.shape), like.dtype)
    count, width = max(1, round(nbytes / DTYPE_BYTES.get(dtype, 4))), like.shape[-1]
    if count % width or count == width:
        return Tensor((count,), (1,), dtype)
    return Tensor((count // width, width), (width, 1), dtype)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    return tuple(reversed(steps))
