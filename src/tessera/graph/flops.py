"""What an operator has to compute: the parameters that decide its cost, its FLOPs, and the unit that runs them.

A multiply-add counts as two FLOPs, as in `torch.utils.flop_counter`, with four intended differences: causal attention
counts only the half that is computed, grouped products and groups in a convolution's backward are counted, recurrent
layers are counted, and a complex multiply-add is four real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from .ir import TensorSpec

# What complex products run in: cuBLAS has kernels for complex fp32 and fp64, on the units of the real ones.
REAL_OF = {"complex32": "fp16", "complex64": "fp32", "complex128": "fp64"}
_CONV_ARGS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
_ADD_FORMS = frozenset({"addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation"})  # an added matrix comes first


@dataclass(frozen=True, slots=True)
class OpFlops:
    """FLOPs of an operator, the precision and unit they run in, and its parameters as plain data."""

    flops: int = 0
    precision: str = "fp32"
    unit: Literal["matrix", "vector"] = "vector"
    kernels: int = 1
    params: Mapping[str, Any] = field(default_factory=dict)


def work_of(
    name: str,
    kind: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    params: dict[str, Any],
    tf32: bool,
) -> OpFlops:
    """FLOPs, precision and unit of an operator."""
    if kind == "view":
        return OpFlops(kernels=0, params=params)
    short = name.rpartition(".")[2]
    floats = [t.dtype for t in (*inputs, *outputs) if t.dtype.startswith(("fp", "bf"))]
    precision = floats[0] if floats else "fp32"
    count = 0
    if kind == "gemm" and len(inputs) >= 2:
        sizes = gemm_sizes(short, inputs)
        params, count = {**params, **sizes}, gemm_flops(sizes)
        precision = inputs[1 if short in _ADD_FORMS else 0].dtype  # an added bias may be wider
        if precision in REAL_OF:  # a complex multiply-add is four real ones
            params, count, precision = {**params, "complex": True}, 4 * count, REAL_OF[precision]
    elif kind == "conv":
        params, count = _conv_work(short, inputs, outputs, params)
        precision = inputs[0].dtype
    elif kind == "attention":
        count, tf32 = attention_flops(params), bool(params.get("tf32"))
    elif kind == "rnn":
        count = rnn_flops(params)
    else:
        return OpFlops(precision=precision, params=params)
    if precision == "fp32" and tf32:
        precision = "tf32"
    unit: Literal["matrix", "vector"] = "vector" if precision == "fp32" else "matrix"
    return OpFlops(count, precision, unit, 1, params)


def _conv_work(
    short: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], params: dict[str, Any]
) -> tuple[dict[str, Any], int]:
    """A convolution's geometry and FLOPs; backward computes one product for each gradient that is asked for."""
    backward = short == "convolution_backward"
    out, x, w = (inputs[0], inputs[1], inputs[2]) if backward else (outputs[0], inputs[0], inputs[1])
    one = conv_flops(x.shape, w.shape, out.shape, bool(params.get("transposed")))
    needs = params.get("needs", (True, True, False))
    times = int(needs[0]) + int(needs[1]) if backward else 1
    bias = len(inputs) > 2 and not backward
    return {**params, "x": x.shape, "w": w.shape, "out": out.shape, "backward": backward, "bias": bias}, one * times


# -- parameters -------------------------------------------------------------------------------------------------


# Operators whose cost depends on one argument: its name here, its position, and its type.
_ONE_ARGUMENT: Mapping[str, tuple[str, int, Callable[[Any], Any]]] = {
    "native_layer_norm": ("normalized", 1, tuple),
    "native_layer_norm_backward": ("normalized", 2, tuple),
    "native_group_norm": ("groups", 6, int),
    "native_group_norm_backward": ("groups", 8, int),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), ("dim", 1, int)),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), ("dim", 2, int)),
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d"), ("window", 1, tuple)),
    **dict.fromkeys(("_fft_r2c", "_fft_c2r", "_fft_c2c"), ("dims", 1, tuple)),
}
_TRAINING_ARGUMENT = {
    **dict.fromkeys(("_native_batch_norm_legit", "native_batch_norm", "cudnn_batch_norm"), 5),
    **dict.fromkeys(("native_batch_norm_backward", "batch_norm_backward"), 7),
}
# Reductions by where their dimensions stand: a norm's order comes first.
_REDUCTIONS = {
    **dict.fromkeys(("sum", "nansum", "mean", "prod", "var", "std", "var_mean", "logsumexp", "all", "any"), 1),
    **dict.fromkeys(("amax", "amin", "max", "min", "argmax", "argmin"), 1),
    **dict.fromkeys(("linalg_vector_norm", "norm"), 2),
}


def params_of(short: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one of torch's operators that decide its cost, by name."""
    if short in _ONE_ARGUMENT:
        name, place, convert = _ONE_ARGUMENT[short]
        return {name: convert(args[place])}
    if short in _TRAINING_ARGUMENT:
        place = _TRAINING_ARGUMENT[short]
        return {"training": bool(args[place] if len(args) > place else True)}
    if short in _REDUCTIONS:
        place = _REDUCTIONS[short]
        dim = args[place] if len(args) > place else kwargs.get("dim")
        return {"dim": dim if isinstance(dim, (int, list, tuple)) else None}
    match short:
        case "convolution" | "_convolution":
            return dict(zip(_CONV_ARGS, args[3:9], strict=False))
        case "convolution_backward":
            return {**dict(zip(_CONV_ARGS, args[4:10], strict=False)), "needs": tuple(args[10])}
        case "cat" | "stack" | "sort" | "topk" | "cumsum" | "cumprod" | "logcumsumexp" | "cummax" | "cummin":
            ints = [a for a in args[1:] if isinstance(a, int)]
            return {"dim": ints[-1] if ints else 0}
        case "_to_copy":
            return {"dtype": str(kwargs.get("dtype"))}
        case "_cdist_forward":
            return {"coordinates": args[0].shape[-1]}
        case "index_put" | "index_put_" | "_index_put_impl_" | "_unsafe_index_put":
            accumulate = bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))
            return {"accumulate": accumulate, "row": _named_row(args[0], args[1])}
    return {}


def _named_row(x: Any, indices: Sequence[Any]) -> int:
    """Elements that lie behind one index: those of the dimensions after the last one that is indexed."""
    masks = ("torch.bool", "torch.uint8")  # each stands for all its dimensions
    named = [1 if i is None or str(i.dtype) not in masks else max(1, i.dim()) for i in indices]
    last = max((n for n, i in enumerate(indices, 1) if i is not None), default=0)
    return prod(x.shape[sum(named[:last]) :])


def params_of_ours(short: str, args: Sequence[Any]) -> dict[str, Any]:
    """The same for operators of `tessera.op`, under the names that torch's operators have."""
    match short:
        case "attention":
            q, k, v, _, causal = args[:5]
            return attention_params(q, k, v, None, causal, tf32=args[-1] == "tf32")
        case "softmax" | "softmax_backward":
            return {"dim": 1}  # rows of a matrix
        case "norm":
            return {"normalized": (args[0].shape[1],), "centered": bool(args[5])}
        case "norm_backward":
            return {"normalized": (args[2].shape[1],), "centered": bool(args[6])}
        case "tiled_conv2d":
            geometry = zip(("stride", "padding", "dilation", "groups"), args[2:6], strict=True)
            return {**dict(geometry), "transposed": False}
    return {}


def attention_params(
    q: Any, k: Any, v: Any, mask: Any, causal: bool, *, dropout: float = 0.0, tf32: bool = False
) -> dict[str, Any]:
    """What decides the cost of one attention over (..., heads, sequence, dim)."""
    params = {
        "batch": prod(q.shape[:-3]),
        "heads": q.shape[-3] if len(q.shape) > 2 else 1,
        "kv_heads": k.shape[-3] if len(k.shape) > 2 else 1,
        "q_len": q.shape[-2],
        "kv_len": k.shape[-2],
        "head_dim": q.shape[-1],
        "v_dim": v.shape[-1],
        "causal": bool(causal),
        "mask": mask is not None,
        "dropout": float(dropout),
    }
    return {**params, "tf32": True} if tf32 else params


# -- FLOPs ------------------------------------------------------------------------------------------------------


def gemm_sizes(short: str, inputs: Sequence[TensorSpec]) -> dict[str, int]:
    """(batch, m, n, k) of a matrix product, from its operands; the first operand of the add forms is skipped."""
    operands = inputs[1:] if short in _ADD_FORMS else inputs
    a, b = operands[0].shape, operands[1].shape
    if short in ("dot", "vdot"):
        return {"batch": 1, "m": 1, "n": 1, "k": a[0]}
    if short in ("mv", "addmv"):
        return {"batch": 1, "m": a[0], "n": 1, "k": a[1]}
    grouped = short in ("_grouped_mm", "_scaled_grouped_mm")
    if grouped and len(a) == 2 and len(b) == 3:  # rows sorted by expert, taken to be spread evenly over the groups
        groups = max(1, round(touched_groups(b[0], a[0])))
        return {"batch": groups, "m": max(1, a[0] // groups), "n": b[2], "k": a[1], "rows": a[0]}
    if len(a) == 3 and len(b) == 3:  # one factor may be broadcast
        return {"batch": a[0] if grouped else max(a[0], b[0]), "m": a[1], "n": b[2], "k": a[2]}
    return {"batch": 1, "m": a[0] if grouped else prod(a[:-1]), "n": b[-1], "k": a[-1]}


def touched_groups(groups: int, rows: int) -> float:
    """How many of `groups` experts get any of `rows` rows, when each row goes to any of them alike."""
    return groups * (1.0 - (1.0 - 1.0 / max(1, groups)) ** rows)


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
        square = min(q, kv)
        pairs = square * (square + 1) // 2 + max(0, q - kv) * kv
    per_head = 2 * pairs * (p["head_dim"] + p["v_dim"])
    total = int(p["batch"] * p["heads"] * per_head)
    return total * 5 // 2 if p.get("backward") else total


def rnn_flops(p: dict[str, Any]) -> int:
    """Gates x (input + last output) products for every layer, direction and step, and those of a projection."""
    gates, hidden, steps, batch = p["gates"], p["hidden"], p["steps"], p["batch"]
    out = p.get("out", hidden)
    total = 0
    for layer in range(p["layers"]):
        inputs = p["input"] if layer == 0 else out * p["directions"]
        each = gates * hidden * (inputs + out) + (hidden * out if out != hidden else 0)
        total += p["directions"] * 2 * batch * steps * each
    return total * 2 if p.get("backward") else total
