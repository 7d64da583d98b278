"""Floating-point operations of matrix products, convolutions, attention and recurrent layers.

A multiply-add counts as two, as in `torch.utils.flop_counter`, from which four differences are intended: causal
attention is counted at the half that is computed, grouped products and groups in a convolution's backward are counted,
recurrent layers are counted at all, and a complex multiply-add is four real ones (`costing.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from .ir import TensorSpec


def gemm_sizes(short: str, inputs: Sequence[TensorSpec]) -> dict[str, int]:
    """(batch, m, n, k) of a matrix product, from its operands; the first operand of the add forms is skipped."""
    operands = inputs[1:] if short in ("addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation") else inputs
    a, b = operands[0].shape, operands[1].shape
    if short in ("dot", "vdot"):
        return {"batch": 1, "m": 1, "n": 1, "k": a[0]}
    if short in ("mv", "addmv"):
        return {"batch": 1, "m": a[0], "n": 1, "k": a[1]}
    if short in ("_grouped_mm", "_scaled_grouped_mm"):
        return _grouped(a, b)
    if len(a) == 3 and len(b) == 3:
        return {"batch": max(a[0], b[0]), "m": a[1], "n": b[2], "k": a[2]}  # one may stand for all
    return {"batch": 1, "m": prod(a[:-1]), "n": b[-1], "k": a[-1]}


def touched_groups(groups: int, rows: int) -> float:
    """How many of `groups` experts get any of `rows` rows, when each row goes to any of them alike."""
    return groups * (1.0 - (1.0 - 1.0 / max(1, groups)) ** rows)


def _grouped(a: Sequence[int], b: Sequence[int]) -> dict[str, int]:
    """A grouped product: rows sorted by expert. Rows are taken to be spread evenly over the groups."""
    if len(a) == 2 and len(b) == 3:
        groups = max(1, round(touched_groups(b[0], a[0])))
        return {"batch": groups, "m": max(1, a[0] // groups), "n": b[2], "k": a[1], "rows": a[0]}
    if len(a) == 3 and len(b) == 3:
        return {"batch": a[0], "m": a[1], "n": b[2], "k": a[2]}
    return {"batch": 1, "m": a[0], "n": b[-1], "k": a[-1]}


def gemm_flops(sizes: dict[str, int]) -> int:
    """2 b m n k; a grouped product has its true number of rows."""
    rows = sizes.get("rows", sizes["batch"] * sizes["m"])
    return 2 * rows * sizes["n"] * sizes["k"]


def conv_flops(x: Sequence[int], w: Sequence[int], out: Sequence[int], transposed: bool) -> int:
    """2 x (outputs) x (weights per output channel); a transposed convolution swaps input and output."""
    points = prod(x[2:] if transposed else out[2:])
    return 2 * out[0] * points * prod(w)


def attention_flops(p: dict[str, Any]) -> int:
    """Two products per head; the lower triangle only where causal. Backward does five products instead of two."""
    q, kv = p["q_len"], p["kv_len"]
    pairs = q * kv
    if p["causal"]:
        # Row i of the last q rows of a square sees kv - q + i + 1 keys (torch aligns the triangle top left).
        seen = min(q, kv)
        pairs = seen * (seen + 1) // 2 + max(0, q - kv) * kv
    per_head = 2 * pairs * (p["head_dim"] + p["v_dim"])
    total = int(p["batch"] * p["heads"] * per_head)
    return total * 5 // 2 if p.get("backward") else total


def rnn_flops(p: dict[str, Any]) -> int:
    """Gates x (input + what it put out) products for every layer, direction and step, and a projection's."""
    gates, hidden, steps, batch = p["gates"], p["hidden"], p["steps"], p["batch"]
    out = p.get("out", hidden)
    total = 0
    for layer in range(p["layers"]):
        inputs = p["input"] if layer == 0 else out * p["directions"]
        each = gates * hidden * (inputs + out) + (hidden * out if out != hidden else 0)
        total += p["directions"] * 2 * batch * steps * each
    return total * 2 if p.get("backward") else total
