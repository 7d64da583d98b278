"""Lay the kernels a GPU really ran beside the operators capture says would run. Used by the fits and the checks.

A recorded trace (record_models.py) is a list of kernels with the operator that launched each; a captured graph is a
list of operators. Both are brought to the same short names and aligned as two texts are, so that every captured
operator gets the kernels, and the microseconds, that were its own; what only one side has is told.
"""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]

SAME = {
    "cudnn_convolution": "conv", "convolution": "conv", "_convolution": "conv", "_conv_depthwise2d": "conv",
    "cudnn_convolution_transpose": "conv", "conv_depthwise3d": "conv", "slow_conv_dilated2d": "conv", "conv2d": "conv",
    "convolution_overrideable": "conv", "cudnn_convolution_relu": "conv", "_slow_conv2d_forward": "conv",
    "convolution_backward": "conv_backward", "cudnn_convolution_backward": "conv_backward",
    "sdpa": "sdpa", "_flash_attention_forward": "sdpa", "_efficient_attention_forward": "sdpa",
    "_scaled_dot_product_flash_attention": "sdpa", "_scaled_dot_product_efficient_attention": "sdpa",
    "_scaled_dot_product_cudnn_attention": "sdpa", "_cudnn_attention_forward": "sdpa",
    "_scaled_dot_product_fused_attention_overrideable": "sdpa",
    "sdpa_backward": "sdpa_backward", "_flash_attention_backward": "sdpa_backward",
    "_efficient_attention_backward": "sdpa_backward", "_scaled_dot_product_flash_attention_backward": "sdpa_backward",
    "_scaled_dot_product_efficient_attention_backward": "sdpa_backward", "_cudnn_attention_backward": "sdpa_backward",
    "_scaled_dot_product_cudnn_attention_backward": "sdpa_backward",
    "clone": "copy", "copy": "copy", "_to_copy": "copy", "contiguous": "copy", "expand_copy": "copy",
    "zero": "fill", "zeros": "fill", "ones": "fill", "full": "fill", "fill": "fill", "zeros_like": "fill",
    "ones_like": "fill", "full_like": "fill", "new_zeros": "fill", "new_ones": "fill", "scalar_tensor": "fill",
    "cudnn_batch_norm": "batch_norm", "native_batch_norm": "batch_norm", "_native_batch_norm_legit": "batch_norm",
    "_native_batch_norm_legit_no_training": "batch_norm", "_batch_norm_impl_index": "batch_norm",
    "cudnn_batch_norm_backward": "batch_norm_backward", "native_batch_norm_backward": "batch_norm_backward",
    "_cudnn_rnn": "rnn", "rnn": "rnn", "_cudnn_rnn_backward": "rnn_backward", "rnn_backward": "rnn_backward",
    "_adaptive_avg_pool2d": "mean", "adaptive_avg_pool2d": "mean", "mean": "mean", "stack": "cat",
    "addmm": "mm", "mm": "mm", "linear": "mm", "_addmm_activation": "mm", "_fused_rms_norm": "rms_norm",
    "bmm": "bmm", "baddbmm": "bmm", "_grouped_mm": "grouped_mm", "__xor__": "bitwise_xor", "embedding": "gather", "index_select": "gather",
    "gather": "gather", "arange": "arange", "__and__": "bitwise_and", "__or__": "bitwise_or", "_embedding_bag": "embedding_bag",
    "_weight_norm_interface": "_weight_norm", "_safe_softmax": "_softmax",
}  # fmt: skip


def short(name: str) -> str:
    """The name both sides share: "aten::add_" and "aten.add" are "add"."""
    plain = name.replace("::", ".").rpartition(".")[2]
    if not plain.startswith("__"):
        plain = plain.rstrip("_")
    return SAME.get(plain, plain)


# Operators that only call others: their kernels are told by the inner operator.
COMPOSITE = {
    "matmul", "reshape", "contiguous", "to", "flatten", "_native_multi_head_attention", "_transformer_encoder_layer_fwd",
    "cross_entropy_loss", "nll_loss_nd", "type_as", "float", "einsum", "rms_norm", "conv_tbc", "_batch_norm_impl_index",
    "where", "min", "max", "one_hot", "unflatten", "item", "is_nonzero", "chunk", "linalg_vector_norm",
    "scaled_dot_product_attention", "fft_rfft2", "fft_irfft2", "fft_rfft", "fft_irfft", "repeat_interleave",
}  # fmt: skip
OUTER = {
    "conv2d": "conv", "conv1d": "conv", "conv3d": "conv", "conv_transpose2d": "conv", "conv_transpose1d": "conv",
    "layer_norm": "native_layer_norm", "group_norm": "native_group_norm", "embedding_backward": "embedding_dense_backward",
    "dropout": "native_dropout", "max_pool2d": "max_pool2d_with_indices", "softmax": "_softmax", "lstm": "rnn", "gru": "rnn",
    "log_softmax": "_log_softmax", "pad": "constant_pad_nd", "linear": "mm", "cudnn_batch_norm": "batch_norm",
    "adaptive_avg_pool1d": "mean", "avg_pool2d": "avg_pool2d", "_index_put_impl": "index_put",
}  # fmt: skip


@dataclass
class Kernel:
    """One kernel of a trace with the token of the operator it belongs to."""

    token: str
    op: int
    name: str
    us: float
    start_us: float
    outer: str | None


def kernels_of(trace: Row) -> list[Kernel]:
    """The kernels of a trace in the GPU's order."""
    found = []
    for op, outer, name, us, start, _ in trace["kernels"]:
        inner, around = trace["ops"][op][0], trace["names"][outer] if outer is not None else None
        token = token_of(inner, around)
        if token != "batch_norm" and _casts(trace["ops"][op]):
            token = "copy"
        found.append(Kernel(token, op, trace["names"][name], us, start, around))
    return found


def _casts(op: Any) -> bool:
    """Whether a kernel's operator copies into another number format: autocast's casts lie inside the operator it casts for."""
    return op[0] in ("aten::copy_", "aten::_to_copy") and len(op) > 2 and len(op[2]) > 1 and op[2][0] != op[2][1]


def token_of(inner: str | None, outer: str | None) -> str:
    """What both sides call the operator a kernel belongs to."""
    out, own = short(outer) if outer else "", short(inner) if inner else "?"
    if outer and "scaled_dot_product_attention" in outer and own not in ("sdpa",):
        return own  # the unfused path: told by its parts
    out = OUTER.get(out, out)
    return own if not out or out in COMPOSITE else out


@dataclass
class Pair:
    """A captured operator with the kernels that are its own."""

    op: Any
    kernels: list[Kernel]

    @property
    def us(self) -> float:
        return sum(x.us for x in self.kernels)


def shows_same_sizes(pair: Pair, trace: Row) -> bool:
    """Whether a captured operator and the one that was traced have a tensor of the same size, where the trace tells."""
    dims = [d for k in pair.kernels for d in trace["ops"][k.op][1] if d and all(isinstance(n, int) for n in d)]
    sizes = {t.numel for t in (*pair.op.inputs, *pair.op.outputs)}
    return not dims or any(math.prod(d) in sizes for d in dims)


def _runs(tokens: list[str]) -> list[tuple[str, int, int]]:
    runs: list[tuple[str, int, int]] = []
    for i, token in enumerate(tokens):
        if runs and runs[-1][0] == token:
            runs[-1] = (token, runs[-1][1], i + 1)
        else:
            runs.append((token, i, i + 1))
    return runs


def align(graph: Any, trace: Row) -> tuple[list[Pair], list[Any], list[Kernel]]:
    """(pairs, captured operators without kernels, kernels without an operator)."""
    ops, ran = list(graph.kernels), kernels_of(trace)
    left, right = _runs([OUTER.get(short(o.name), short(o.name)) for o in ops]), _runs([k.token for k in ran])
    pairs: list[Pair] = []
    lone_ops: list[Any] = []
    lone: list[Kernel] = []
    i = k = 0
    for a, b in [*_common(left, right), (len(left), len(right))]:
        for _, begin, end in left[i:a]:
            lone_ops += ops[begin:end]
        for _, begin, end in right[k:b]:
            lone += ran[begin:end]
        i, k = a + 1, b + 1
        if a == len(left):
            break
        (_, begin, end), (_, first, last) = left[a], right[b]
        shares = _by_shape(ran[first:last], ops[begin:end], trace) or _share(ran[first:last], end - begin)
        if shares is None:
            lone_ops += ops[begin:end]
            lone += ran[first:last]
        else:
            pairs += [Pair(op, share) for op, share in zip(ops[begin:end], shares, strict=True)]
    return pairs, lone_ops, lone


def _common(left: list[tuple[str, int, int]], right: list[tuple[str, int, int]]) -> list[tuple[int, int]]:
    """The longest common subsequence of two lists of runs, as pairs of positions; runs as long as each other count more.

    Solved along antidiagonals: a model repeats its layers, and a greedy match would lay one layer beside another.
    """
    codes = {token: i for i, token in enumerate({t for t, *_ in (*left, *right)})}
    a, b = (np.array([codes[t] for t, *_ in runs], np.int64) for runs in (left, right))
    la, lb = (np.array([j - i for _, i, j in runs], np.int64) for runs in (left, right))
    n, m = len(a), len(b)
    took = np.zeros((n + 1, m + 1), np.int8)  # 1: both, 2: skip left, 3: skip right
    before, last = np.zeros(n + 1, np.float32), np.zeros(n + 1, np.float32)
    for d in range(2, n + m + 1):
        i = np.arange(max(1, d - m), min(n, d - 1) + 1)
        j = d - i
        both = np.where(a[i - 1] == b[j - 1], before[i - 1] + 1.0 + 0.25 * (la[i - 1] == lb[j - 1]), -1.0)
        up, aside = last[i - 1], last[i]
        best = np.maximum(both, np.maximum(up, aside))
        took[i, j] = np.where(both >= best, 1, np.where(up >= aside, 2, 3))
        now = np.zeros(n + 1, np.float32)
        now[i] = best
        before, last = last, now
    found: list[tuple[int, int]] = []
    i, j = n, m
    while i and j:
        step = int(took[i, j])
        if step == 1:
            found.append((i - 1, j - 1))
        i, j = i - (step != 3), j - (step != 2)
    return found[::-1]


def _by_shape(kernels: list[Kernel], ops: list[Any], trace: Row) -> list[list[Kernel]] | None:
    """Kernels of a run of like operators, dealt out by the shapes their operators had; None where those do not tell."""
    if len(ops) == 1:
        return None
    shapes = [[tuple(t.shape) for t in (*op.inputs, *op.outputs)] for op in ops]
    if any(a == b for a, b in itertools.pairwise(shapes)):
        return None
    groups: list[list[Kernel]] = [[] for _ in ops]
    at = 0
    for kernel in kernels:
        dims = {tuple(d) for d in trace["ops"][kernel.op][1] if d and all(isinstance(n, int) for n in d)}
        if at + 1 < len(ops) and groups[at]:
            here, there = (sum(d in s for d in dims) for s in shapes[at : at + 2])
            at += there > here
        groups[at].append(kernel)
    return groups if all(groups) else None


def _share(kernels: list[Kernel], among: int) -> list[list[Kernel]] | None:
    """Kernels of a run of like operators, dealt out: evenly, else at changes of the operator's arguments."""
    if among == 1:
        return [kernels]
    if len(kernels) % among == 0:
        each = len(kernels) // among
        return [kernels[i * each : (i + 1) * each] for i in range(among)]
    groups: list[list[Kernel]] = []
    for kernel in kernels:
        fresh = not groups or groups[-1][-1].op != kernel.op or kernel.name == groups[-1][0].name
        if fresh:
            groups.append([kernel])
        else:
            groups[-1].append(kernel)
    return groups if len(groups) == among else None


def read(path: Path | str) -> Iterator[Row]:
    """Rows of a .jsonl.gz."""
    with gzip.open(path, "rt") as f:
        for line in f:
            yield json.loads(line)


def load_cases(path: Path | str) -> dict[str, Any]:
    """The cases of a file, by name."""
    spec = importlib.util.spec_from_file_location("cases", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cases"] = module
    spec.loader.exec_module(module)
    return {case.name: case for case in module.CASES}
