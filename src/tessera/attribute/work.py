"""Computes what an operator does, from its name and recorded shapes: FLOPs, least bytes, and the unit that runs it.

A multiply-add counts as two FLOPs, as in `torch.utils.flop_counter`. Bytes are the least that must be moved: each
tensor once. Shapes do not tell everything: attention counts as causal only if the trace has the argument; the output of
a convolution is found elsewhere on the timeline (`analyze.kernel_work`). What is unknown is None, never 0.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ..graph.flops import attention_flops, conv_flops, gemm_flops, gemm_sizes
from ..graph.ir import TensorSpec
from ..graph.op_kinds import KINDS
from ..timeline.shapes import CAUSAL, parse

Shape = tuple[int, ...]
Tensor = tuple[Shape, str]

BYTES = {
    "f64": 8, "i64": 8, "c64": 8, "c128": 16, "f32": 4, "i32": 4, "f16": 2, "bf16": 2, "i16": 2, "i8": 1, "u8": 1,
    "bool": 1, "f8e4m3": 1, "f8e5m2": 1, "f8e4m3fnuz": 1, "f8e5m2fnuz": 1,
}  # fmt: skip
"""Bytes of an element, by the dtype names of `timeline.shapes`."""
PRECISION = {
    "f64": "fp64", "f32": "fp32", "f16": "fp16", "bf16": "bf16", "i8": "int8", "u8": "int8", "f8e4m3": "fp8",
    "f8e5m2": "fp8", "f8e4m3fnuz": "fp8", "f8e5m2fnuz": "fp8",
}  # fmt: skip
"""The dtype names of `timeline.shapes` -> the catalogue's names of number formats."""

_ADD_FORMS = ("addmm", "baddbmm", "addbmm", "_addmm_activation")
_CONV = re.compile(
    r"_?(?:slow_|thnn_)?conv(?:olution|[123]d|_transpose[123]d|_depthwise[23]d)|(?:cudnn|miopen|mkldnn)_conv"
)
# These take [batch, rows, heads, width]; all other attention operators have heads before rows.
_ROWS_FIRST = ("_flash_attention_forward", "_flash_attention_backward", "_efficient_attention_forward",
               "_efficient_attention_backward", "_fmha")  # fmt: skip
# Operations per element, counted in the formulas: softmax max, subtract, exp, sum, divide; its backward multiply, sum,
# multiply-subtract, multiply; a norm mean, square, variance, subtract, scale, weight, bias; everything else one.
_PER_ELEMENT = {"softmax": 5.0, "norm": 7.0, "batch_norm": 7.0, "random": 2.0, "copy": 0.0, "fill": 0.0, "gather": 0.0,
                "scatter": 1.0, "transfer": 0.0}  # fmt: skip
# These move nothing themselves: if a copy is needed they call one, which is counted.
_MAY_COPY = frozenset({"to", "contiguous", "type_as"})
_IN_PLACE = re.compile(r"[a-z0-9]_$")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWork:
    """One call of an operator. `sizes` are (batch, m, n, k) of a matrix product; `dtype` is that of its operands.

    `out_bytes` is what it writes, `elements` the number in its largest tensor; both only for operators that stream.
    """

    family: str
    dtype: str
    flops: float | None = None
    bytes: float | None = None
    matrix: bool = False
    sizes: tuple[int, int, int, int] | None = None
    out_bytes: float | None = None
    elements: int | None = None

    @property
    def precision(self) -> str | None:
        """The catalogue's name of the number format; None if the catalogue has no peak for it."""
        return PRECISION.get(self.dtype)


@functools.lru_cache(maxsize=65536)
def work_of(op: str, shapes: str | None, output: Shape | None = None, *, input_grad: bool = True) -> OpWork | None:
    """Return the work of an operator by its name ("aten::addmm") and compact shapes; None if they tell nothing.

    `output` is the shape of a forward convolution's output. `input_grad`: whether its backward computes the input's
    gradient (that of the first layer does not).
    """
    name = op.rpartition("::")[2]
    tensors = parse(shapes or "")
    if not op.startswith("aten::") or not tensors or all(not dtype for _, dtype in tensors):
        return None  # autograd's nodes and regions have shapes, but the operators inside do the work
    if KINDS.get(name) == "view" or name in _MAY_COPY:
        return None
    if "attention" in name:
        return _attention(name, tensors, causal=(shapes or "").endswith(CAUSAL))
    if _CONV.match(name):
        return _convolution(name, tensors, output, input_grad)
    if KINDS.get(name) == "gemm":
        return _product(name, tensors)
    return _stream(name, tensors)


def is_convolution(op: str) -> bool:
    """Return whether an operator is a convolution, forward or backward."""
    return _CONV.match(op.rpartition("::")[2]) is not None


def _size(tensor: Tensor) -> float:
    """Return the bytes of a tensor; an unknown number format counts as 4 bytes, which most have."""
    return float(prod(tensor[0]) * BYTES.get(tensor[1], 4))


def _specs(tensors: Sequence[Tensor]) -> list[TensorSpec]:
    return [TensorSpec(i, shape, (), dtype, 0) for i, (shape, dtype) in enumerate(tensors)]


def _product(name: str, tensors: Sequence[Tensor]) -> OpWork | None:
    """Return a matrix product. Its operands are the first two tensors; in the add forms, the second and third."""
    first = 1 if name in (*_ADD_FORMS, "addmv") else 0
    if len(tensors) < first + 2:
        return None
    (a, dtype), (b, _) = tensors[first], tensors[first + 1]
    if name == "linear" and a and len(b) == 2 and a[-1] == b[-1]:
        sizes = {"batch": 1, "m": prod(a[:-1]), "n": b[0], "k": a[-1]}
    elif name in ("dot", "vdot", "mv", "addmv"):
        if not a or not b or a[-1] != b[0]:
            return None
        sizes = gemm_sizes(name, _specs(tensors))
    elif len(a) >= 2 and len(b) >= 2 and a[-1] == b[-2] and (len(a) == len(b) or len(b) == 2 or "grouped" in name):
        if len(a) > 3:  # matmul with more than one batch dimension
            sizes = {"batch": prod(a[:-2]), "m": a[-2], "n": b[-1], "k": a[-1]}
        else:
            sizes = gemm_sizes(name, _specs(tensors))
    else:
        return None
    batch, m, n, k = (sizes[key] for key in ("batch", "m", "n", "k"))
    # Products of 8-bit numbers write 16 bits.
    out = batch * m * n * max(BYTES.get(dtype, 4), 2)
    moved = sum(_size(t) for t in tensors[: first + 2]) + out
    return OpWork(
        family="gemm", dtype=dtype, flops=float(gemm_flops(sizes)), bytes=moved, matrix=True, sizes=(batch, m, n, k)
    )  # fmt: skip


def _attention(name: str, tensors: Sequence[Tensor], *, causal: bool) -> OpWork | None:
    """Return attention: two products per head forward, five backward, whose first tensor is the output's gradient."""
    backward = "backward" in name
    taken = tensors[1:4] if backward else tensors[:3]
    if len(taken) < 3 or any(len(shape) != 4 for shape, _ in taken):
        return None  # sequences packed into one: a tensor has their lengths
    (q, dtype), (k, _), (v, _) = taken
    heads, rows = (2, 1) if name.startswith(_ROWS_FIRST) else (1, 2)
    params = {
        "batch": q[0], "heads": q[heads], "q_len": q[rows], "kv_len": k[rows], "head_dim": q[3], "v_dim": v[3],
        "causal": causal, "backward": backward,
    }  # fmt: skip
    out = prod(q[:3]) * v[3] * BYTES.get(dtype, 4)
    operands = sum(_size(t) for t in taken)
    # Backward reads the output and its gradient, and writes a gradient for each operand.
    moved = 2.0 * operands + 2.0 * out if backward else operands + out
    return OpWork(family="attention", dtype=dtype, flops=float(attention_flops(params)), bytes=moved, matrix=True)


def _convolution(name: str, tensors: Sequence[Tensor], output: Shape | None, input_grad: bool) -> OpWork | None:
    backward, transposed = "backward" in name, "transpose" in name
    need = 3 if backward else 2
    if len(tensors) < need:
        return None
    out = tensors[0][0] if backward else output
    (x, dtype), (w, _) = tensors[need - 2], tensors[need - 1]
    if len(x) != len(w) or len(x) < 3:
        return None
    if out is None or len(out) != len(x):
        return OpWork(family="conv", dtype=dtype, matrix=True)
    # A transposed weight has the input's channels first. If both fit, a larger output means that it is transposed.
    transposed = transposed or (x[1] == w[0] and (out[1] != w[0] or prod(out[2:]) > prod(x[2:])))
    forward = float(conv_flops(x, w, out, transposed))
    moved = _size((x, dtype)) + _size((w, dtype)) + _size((out, dtype))
    if not backward:
        return OpWork(family="conv", dtype=dtype, flops=forward, bytes=moved, matrix=True)
    moved += _size((w, dtype)) + (_size((x, dtype)) if input_grad else 0.0)
    return OpWork(family="conv", dtype=dtype, flops=forward * (2.0 if input_grad else 1.0), bytes=moved, matrix=True)


def _stream(name: str, tensors: Sequence[Tensor]) -> OpWork:
    """Return the work of an operator that streams tensors: read inputs once, write the (broadcast) output once."""
    bare = name.rstrip("_")
    by_name = "softmax" if "softmax" in name else "norm" if "_norm" in name else "elementwise"
    family = KINDS.get(name) or KINDS.get(bare) or by_name
    largest = max(tensors, key=lambda t: prod(t[0]))
    count, dtype = prod(largest[0]), largest[1]
    flops = _PER_ELEMENT.get(family, 1.0) * count
    if family == "fill":
        return OpWork(family=family, dtype=dtype, flops=0.0, bytes=_size(tensors[0]))
    if bare == "copy" and len(tensors) >= 2:
        to, source = (_size(t) for t in tensors[:2])
        return OpWork(
            family="copy", dtype=tensors[1][1], flops=0.0, bytes=to + source, out_bytes=to, elements=count
        )  # fmt: skip
    if family == "gather":
        return _gather_work(name, tensors)
    read = sum(_size(t) for t in tensors)
    if family == "norm" and name.endswith("_backward"):
        flops *= 2.0  # gradients of the input and of the weights
    if family == "reduce" or (family == "pool" and not name.endswith("backward")):
        written = 0.0  # much smaller than what is read; its shape is not recorded
    elif name == "native_dropout":
        written = _size(largest) + count  # plus the mask with one byte per element
    elif family in ("norm", "batch_norm"):
        written = _size(largest)
    else:
        written = float(count * BYTES.get(_promote_dtype(tensors, in_place=bool(_IN_PLACE.search(name))), 4))
    return OpWork(
        family=family, dtype=dtype, flops=flops, bytes=read + written, out_bytes=written, elements=count
    )  # fmt: skip


def _gather_work(name: str, tensors: Sequence[Tensor]) -> OpWork:
    """Return the work of picking rows of a table by an index; the size of the table does not matter."""
    (source, dtype), index = tensors[0], next((t for t in tensors if t[1] in ("i64", "i32")), None)
    if index is None:
        return OpWork(family="gather", dtype=dtype, flops=0.0)
    rows = prod(index[0]) * (prod(source[1:]) if name in ("embedding", "index_select") else 1)
    return OpWork(
        family="gather", dtype=dtype, flops=0.0, bytes=2.0 * rows * BYTES.get(dtype, 4) + _size(index)
    )  # fmt: skip


def _promote_dtype(tensors: Sequence[Tensor], *, in_place: bool) -> str:
    """Return the number format of the output: that of the tensor written to, else the widest with dimensions.

    A 0-dimensional f64 is a Python number, which does not widen anything.
    """
    if in_place:
        return tensors[0][1]
    dtypes = [dtype for shape, dtype in tensors if shape and dtype != "bool"] or [tensors[0][1]]
    floats = [d for d in dtypes if d.startswith(("f", "bf", "c"))]
    return max(floats or dtypes, key=lambda d: BYTES.get(d, 4))
