"""Scratch memory of kernels: copies in another layout, partial sums, cuDNN's reserve, cuBLAS's workspace.

None of it is a tensor of the program, all of it counts in `torch.cuda.max_memory_allocated`.
"""

from __future__ import annotations

from math import prod

from ..device import Device
from ..graph.ir import DTYPE_BYTES, Graph, Op

# torch's default for cuBLAS (aten/src/ATen/cuda/CublasHandlePool.cpp): 32 MiB on sm90 and sm100, else :4096:2:16:8.
_HOPPER = 32 << 20
_OTHERS = 4096 * 1024 * 2 + 16 * 1024 * 8
# cublasLt, which adds the bias, has one of its own (seen on the H200 with torch 2.11).
_LT = 1 << 20


def workspaces(graph: Graph, device: Device | None) -> list[int]:
    """Bytes cuBLAS keeps for good: a workspace per thread that multiplies, and backward has a thread of its own."""
    products = [op for op in graph.ops if op.kind == "gemm"]
    size = _workspace(device)
    if not products or not size:
        return []
    with_bias = any("addmm" in op.name for op in products)
    return [size] * len({op.phase == "backward" for op in products}) + [_LT] * with_bias


def _workspace(device: Device | None) -> int:
    if device is None:
        return _HOPPER
    if device.kind == "cpu" or device.vendor.lower() != "nvidia":
        return 0
    digits = "".join(c for c in device.compute_capability or "" if c.isdigit())
    return _HOPPER if not digits or 90 <= int(digits) < 110 else _OTHERS


def scratch(op: Op) -> int:
    """Bytes an operator takes for itself while it runs."""
    return _conv(op) if op.kind == "conv" and len(op.params["x"]) == 4 else 0


def reserves(graph: Graph) -> list[tuple[int, int, int]]:
    """(from operator, to operator, bytes) of what cuDNN's recurrent layers keep for their backward."""
    found: list[tuple[int, int, int]] = []
    waiting: list[Op] = []
    for op in graph.ops:
        if op.kind != "rnn":
            continue
        if not op.params.get("backward"):
            waiting.append(op)
        elif waiting:
            forward = waiting.pop()  # backward meets the layers in the reverse order
            found.append((forward.index, op.index + 1, _rnn_reserve(forward)))
    return found


def _rnn_reserve(op: Op) -> int:
    """The gates and the cell of every step, layer and direction (an LSTM's 4 + 1; what an H200 kept was 5.0)."""
    p = op.params
    cells = p["layers"] * p["directions"] * p["steps"] * p["batch"] * p["hidden"]
    return int(cells * (p["gates"] + 1) * DTYPE_BYTES.get(op.inputs[0].dtype, 4))


# -- convolutions -----------------------------------------------------------------------------------------------

# Rules read off kernel traces of an H200 (cuDNN 9, torch 2.11, benchmarks/data/h200_dev_traces.jsonl.gz).


def _conv(op: Op) -> int:
    """Tensor-core kernels of cuDNN want channels last: of other tensors they make copies."""
    p = op.params
    x, w, out = tuple(p["x"]), tuple(p["w"]), tuple(p["out"])
    first, weight = op.inputs[1:3] if p.get("backward") else op.inputs[:2]
    depthwise = int(p.get("groups") or 1) == x[1] > 1
    if op.precision == "fp32" or depthwise or first.channels_last or weight.channels_last:
        return 0
    size = DTYPE_BYTES.get(first.dtype, 4)
    copies = {name: int(prod(shape) * size) for name, shape in (("x", x), ("w", w), ("out", out))}
    if prod(w[2:]) == 1:
        return _pointwise(op, x, w, copies)
    if x[1] < 16 and (max(w[2:]) < 5 or tuple(p.get("stride", ())) == w[2:]):
        return 0  # an image's three channels: direct kernels, but for the large windows of a stem
    return sum(copies.values())


def _pointwise(op: Op, x: tuple[int, ...], w: tuple[int, ...], copies: dict[str, int]) -> int:
    """A 1x1 convolution is a plain product for each image, unless it strides or its rows are not aligned."""
    strided = max(op.params.get("stride") or (1,)) > 1
    if not op.params.get("backward"):
        unaligned = prod(x[2:]) % 8 > 0 and x[1] >= 1024
        return copies["x"] + copies["out"] if strided or unaligned else 0
    if not op.params.get("needs", (True, True))[1]:
        return 0
    # The gradient of the weights: one product per image, summed afterwards, until there are too many images.
    partial = x[0] * prod(w) * 4
    both = copies["x"] + copies["out"]
    return both if strided or (x[0] >= 128 and partial > both) else partial
