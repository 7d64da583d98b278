"""A program as `torch.compile` runs it: fused by the partition, launched kernel by kernel by generated code.

Products, convolutions and attention stay the libraries' kernels. Inductor pads 16-bit products whose rows do not start
at 16 bytes (a vocabulary of 50,257). Everything else that it generates is one kernel for each fused piece, whose bytes
are those that cross its border; a move of data is pointwise code. Compared with three programs recorded on an H200, in
`torch.compile`'s default mode (benchmarks/predict/predict_compiled.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..graph.ir import Graph, Op
from ..graph.partition import GraphPartitioner, PartitionReport, Subgraph
from .host import HostModel

_ALIGNED = 8  # elements of 16 bits that make 16 bytes
_PADDED_ROWS = 128  # products of fewer rows wait for memory, not for the multiplication
# Families that become pointwise code. Norms, softmax and sums keep their own rates, which hold whole rows.
_GENERATED = ("elementwise", "copy", "random", "batch_norm", "fill", "gather")
_NAMED = 3  # operators of a fused kernel that its label names
# Constants of eager launches are used for the launches of generated code: they were fitted on no compiled program. Of
# what was recorded, BERT-base waits for its host and took 1.0 and 1.3 times as long in two sessions, a small decoder
# whose cache grows 1.5 to 2.4 times (results/plans_in_use.json): its code has symbolic sizes.
_HOST_ERROR = 0.9


def compile_program(graph: Graph) -> tuple[Graph, PartitionReport]:
    """The program whose operators are the kernels of the compiled one, and the pieces it was fused into."""
    report = GraphPartitioner(fusion=True, inductor=True).partition(graph)
    launches = [op for piece in report.subgraphs for op in _list_launches(piece)]
    return replace(graph, ops=tuple(launches)), report


def _list_launches(piece: Subgraph) -> Sequence[Op]:
    """The kernels of a piece: each of its operators, or the one they are fused into."""
    main, kernels = piece.main, piece.kernels
    generated = main.kind in _GENERATED
    if not piece.is_fused and main.kind != "copy":
        plain = [replace(op, host_modules=0, host_functions=0) for op in kernels]
        return [launch for op in plain for launch in _pad_product(op)]
    names = [op.name.rpartition(".")[2] for op in kernels]
    more = f"+{len(names) - _NAMED}" if len(names) > _NAMED else ""
    label = "+".join(names[:_NAMED]) + more
    return [
        replace(
            main,
            kind="elementwise" if generated else main.kind,
            inputs=piece.reads,
            outputs=piece.writes,
            index=piece.ops[-1].index,
            node=f"{main.scope}.{label}" if main.scope else label,
            # A pointwise kernel of Inductor's goes through its operands as they lie, one element of each at a time.
            params={**main.params, "generated": len(kernels)} if generated else _count_from_end(main),
            host_modules=0,
            host_functions=0,
            sync=any(op.sync for op in kernels),
            hooked=False,
        )
    ]


def _count_from_end(op: Op) -> Mapping[str, Any]:
    """The operator's dimensions counted from the last: what its fused piece reads may have more before them."""
    dims, rank = op.params.get("dim"), len(op.inputs[0].shape) if op.inputs else 0
    if isinstance(dims, int):
        return {**op.params, "dim": dims % rank - rank if rank else dims}
    return {**op.params, "dim": [d % rank - rank for d in dims]} if dims and rank else op.params


def _pad_product(op: Op) -> list[Op]:
    """A product, or the copies of its operands into aligned rows and the product of those."""
    p = op.params
    if op.kind != "gemm" or op.precision not in ("bf16", "fp16") or "k" not in p or p["m"] < _PADDED_ROWS:
        return [op]
    n, k = (-(-p[name] // _ALIGNED) * _ALIGNED for name in ("n", "k"))
    m = -(-p["m"] // _ALIGNED) * _ALIGNED if op.inputs[-2].stride[:1] == (1,) else p["m"]  # a weight's gradient
    if (m, n, k) == (p["m"], p["n"], p["k"]):
        return [op]
    odd = [t for t in op.inputs[-2:] if any(size % _ALIGNED for size in t.shape[-2:])]
    copies = [
        replace(op, name="aten.constant_pad_nd", kind="copy", inputs=(t,), outputs=(t,), flops=0, params={})
        for t in odd
    ]
    return [*copies, replace(op, params={**p, "m": m, "n": n, "k": k})]


def host_of_compiled(host: HostModel) -> HostModel:
    """The host of a compiled program: what one launch takes, without the Python of modules and functions."""
    return replace(
        host,
        recording_s=0.0,
        provenance=f"{host.provenance}; the same for a kernel of generated code",
        relative_error=max(_HOST_ERROR, host.relative_error),
    )
