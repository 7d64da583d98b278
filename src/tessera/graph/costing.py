"""What an operator is asked to do: the parameters that decide its cost, its FLOPs, and the unit that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from . import flops
from .ir import TensorSpec

# What complex products run in: cuBLAS has kernels for complex fp32 and fp64, on the units of the real ones.
REAL_OF = {"complex32": "fp16", "complex64": "fp32", "complex128": "fp64"}
_CONV_ARGS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


@dataclass(frozen=True, slots=True)
class WorkOf:
    """FLOPs of an operator, the precision and unit they run in, and its parameters as plain data."""

    flops: int = 0
    precision: str = "fp32"
    unit: Literal["matrix", "vector"] = "vector"
    kernels: int = 1
    params: Mapping[str, Any] = field(default_factory=dict)


def params_of(short: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operator that decide its cost, by name."""
    if short in ("convolution", "_convolution"):
        return dict(zip(_CONV_ARGS, args[3:9], strict=False))
    if short == "convolution_backward":
        params = dict(zip(_CONV_ARGS, args[4:10], strict=False))
        return {**params, "needs": tuple(args[10])}
    if short in ("native_layer_norm", "native_layer_norm_backward"):
        return {"normalized": tuple(args[1] if short == "native_layer_norm" else args[2])}
    if short in ("native_group_norm", "native_group_norm_backward"):
        return {"groups": int(args[6] if short == "native_group_norm" else args[8])}
    if short in ("_native_batch_norm_legit", "native_batch_norm", "cudnn_batch_norm"):
        return {"training": bool(args[5] if len(args) > 5 else True)}
    if short in ("native_batch_norm_backward", "batch_norm_backward"):
        return {"training": bool(args[7] if len(args) > 7 else True)}
    if short in (
        "sum",
        "mean",
        "amax",
        "amin",
        "var_mean",
        "var",
        "linalg_vector_norm",
        "max",
        "min",
        "argmax",
        "argmin",
    ):
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        return {"dim": dim if isinstance(dim, (int, list, tuple)) else None}
    if short in ("_softmax", "_log_softmax", "_safe_softmax"):
        return {"dim": args[1]}
    if short in ("_softmax_backward_data", "_log_softmax_backward_data"):
        return {"dim": args[2]}
    if short in ("cat", "stack", "cumsum", "sort", "topk"):
        ints = [a for a in args[1:] if isinstance(a, int)]
        return {"dim": ints[-1] if ints else 0}
    if short in ("max_pool2d_with_indices", "avg_pool2d"):
        return {"window": tuple(args[1])}
    if short == "_to_copy":
        return {"dtype": str(kwargs.get("dtype"))}
    return _params_of_rare(short, args)


def _params_of_rare(short: str, args: Sequence[Any]) -> dict[str, Any]:
    if short in ("_fft_r2c", "_fft_c2r", "_fft_c2c"):
        return {"dims": tuple(args[1])}
    if short == "_cdist_forward":
        return {"coordinates": args[0].shape[-1]}
    return {}


def params_of_ours(short: str, args: Sequence[Any]) -> dict[str, Any]:
    """The same for operators of `tessera.op`, in the words of the operators of torch that do the same."""
    if short == "attention":
        q, k, v, mask, _, causal = args[:6]
        return attention_params(q, k, v, mask, causal, dropout=args[-2], tf32=args[-1] == "tf32")
    if short == "attention_backward":
        q, k, v, mask, _, _, _, causal = args[1:9]
        known = attention_params(q, k, v, mask, causal, dropout=args[-2], tf32=args[-1] == "tf32")
        return {**known, "backward": True}
    if short in ("softmax", "softmax_backward"):
        return {"dim": 1}  # rows of a matrix
    if short == "norm":
        return {"normalized": (args[0].shape[1],), "centered": bool(args[5])}
    if short == "norm_backward":
        return {"normalized": (args[2].shape[1],), "centered": bool(args[6])}
    if short == "tiled_conv2d":
        return {**dict(zip(("stride", "padding", "dilation", "groups"), args[3:7], strict=True)), "transposed": False}
    return {}


def attention_params(
    q: Any, k: Any, v: Any, mask: Any, causal: bool, *, dropout: float = 0.0, tf32: bool = False
) -> dict[str, Any]:
    """What decides the cost of one attention over (..., heads, sequence, dim)."""
    return {
        "batch": prod(q.shape[:-3]), "heads": q.shape[-3] if q.dim() > 2 else 1,
        "kv_heads": k.shape[-3] if k.dim() > 2 else 1, "q_len": q.shape[-2], "kv_len": k.shape[-2],
        "head_dim": q.shape[-1], "v_dim": v.shape[-1], "causal": bool(causal), "mask": mask is not None,
        "dropout": float(dropout), **({"tf32": True} if tf32 else {}),
    }  # fmt: skip


def work_of(
    name: str,
    kind: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    params: dict[str, Any],
    tf32: bool,
) -> WorkOf:
    """FLOPs, precision and unit of an operator."""
    if kind == "view":
        return WorkOf(kernels=0, params=params)
    short = name.rpartition(".")[2]
    floats = [t.dtype for t in (*inputs, *outputs) if t.dtype.startswith(("fp", "bf"))]
    precision = floats[0] if floats else "fp32"
    count = 0
    if kind == "gemm" and len(inputs) >= 2:
        sizes = flops.gemm_sizes(short, inputs)
        params, count = {**params, **sizes}, flops.gemm_flops(sizes)
        precision = _operand(short, inputs)
        if precision in REAL_OF:  # a complex multiply-add is four real ones
            params, count, precision = {**params, "complex": True}, 4 * count, REAL_OF[precision]
    elif kind == "conv":
        params, count = _conv(short, inputs, outputs, params)
        precision = inputs[0].dtype
    elif kind == "attention":
        count, tf32 = flops.attention_flops(params), bool(params.get("tf32"))
    elif kind == "rnn":
        count = flops.rnn_flops(params)
    else:
        return WorkOf(precision=precision, params=params)
    if precision == "fp32" and tf32:
        precision = "tf32"
    unit: Literal["matrix", "vector"] = "vector" if precision == "fp32" else "matrix"
    return WorkOf(count, precision, unit, 1, params)


def _operand(short: str, inputs: Sequence[TensorSpec]) -> str:
    """The number format of the factors (an added bias may be wider)."""
    return inputs[1 if short in ("addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation") else 0].dtype


def _conv(
    short: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], params: dict[str, Any]
) -> tuple[dict[str, Any], int]:
    """A convolution's geometry and FLOPs; backward computes one product for each gradient that is asked for."""
    backward = short == "convolution_backward"
    out, x, w = (inputs[0], inputs[1], inputs[2]) if backward else (outputs[0], inputs[0], inputs[1])
    one = flops.conv_flops(x.shape, w.shape, out.shape, bool(params.get("transposed")))
    needs = params.get("needs", (True, True, False))
    times = int(needs[0]) + int(needs[1]) if backward else 1
    geometry = {
        "x": x.shape,
        "w": w.shape,
        "out": out.shape,
        "backward": backward,
        "bias": len(inputs) > 2 and not backward,
    }
    return {**params, **geometry}, one * times
