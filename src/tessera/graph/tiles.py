"""How many blocks of threads an operator gives a chip to spread over its units."""

from __future__ import annotations

from math import prod

from .ir import Op

TILE = 128
"""Rows and columns of outputs one block of a matrix product computes: what cuBLAS and cuDNN choose most."""
ELEMENTS = 1024
"""Elements one block of a pointwise kernel handles: torch's 128 threads of 4 to 8."""


def tiles_of(op: Op) -> int:
    """Blocks of a launch: tiles of a product, rows of queries in attention, rows of a norm, stretches of elements."""
    p = op.params
    if op.kind == "gemm" and "m" in p:
        return int(p["batch"]) * _tiles(p["m"], p["n"])
    if op.kind == "conv" and "w" in p:
        return _conv(op)
    if op.kind == "attention":
        return int(p["batch"] * p["heads"]) * -(-int(p["q_len"]) // TILE)
    if op.kind == "rnn":
        # One step after the other: what is parallel is one step of one layer.
        return int(p["directions"]) * _tiles(p["batch"], p["gates"] * p["hidden"])
    elements = max((t.numel for t in (*op.outputs, *op.inputs)), default=1)
    if op.kind in ("norm", "softmax") and op.inputs and op.inputs[0].shape:
        return max(1, op.inputs[0].numel // max(1, op.inputs[0].shape[-1]))
    return max(1, -(-elements // ELEMENTS))


def _tiles(m: int, n: int) -> int:
    return max(1, -(-int(m) // TILE)) * max(1, -(-int(n) // TILE))


def _conv(op: Op) -> int:
    """A convolution as the product it is: (batch x points) by (output channels), each group on its own."""
    x, w, out = op.params["x"], op.params["w"], op.params["out"]
    groups = int(op.params.get("groups") or 1)
    forward = groups * _tiles(out[0] * prod(out[2:]), w[0] // groups)
    if not op.params.get("backward"):
        return forward
    return max(groups * _tiles(x[0] * prod(x[2:]), w[1]), groups * _tiles(w[0] // groups, w[1] * prod(w[2:])))
