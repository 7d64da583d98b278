"""Seconds of a recurrent layer as cuDNN runs it: one product for all inputs, then a step at a time."""

from __future__ import annotations

from ..device import Device
from ..graph.ir import Op
from .conv import add
from .gemm import gemm_time
from .kernel_time import ELEMENT_BYTES, KernelTime, chip

# A step beside its product, and backward over forward, from LSTM and GRU rows on an H200 (benchmarks/data/h200_ops:
# 256 steps of 512 hidden, batch 64: 6.8 us a step; 650 hidden, batch 32: 9.2 us; backward 1.4-1.9 times forward alone,
# 2.3 times in training steps of whole models).
STEP_S = 3.0e-6
BACKWARD = 1.9
# cuDNN runs both directions at once: 2.1 ms together where their kernels add up to 3.1 ms (GRU, 512 hidden, batch 64).
BOTH_WAYS = 0.6


def rnn_time(device: Device, op: Op, precision: str, hbm_bytes: float | None) -> KernelTime:
    """The whole stack of layers, forward or backward."""
    p = op.params
    width, batch, steps = p["gates"] * p["hidden"], max(1, p["batch"]), max(1, p["steps"])
    seconds = busy_s = flops_s = 0.0
    out = p.get("out", p["hidden"])
    step = gemm_time(device, batch, width, out, 1, precision, hbm_bytes=0.0)
    if out != p["hidden"]:  # a projection: one more product in every step
        step = add([step, gemm_time(device, batch, out, p["hidden"], 1, precision, hbm_bytes=0.0)])
    for layer in range(p["layers"]):
        inner = p["input"] if layer == 0 else out * p["directions"]
        inputs = gemm_time(device, batch * steps, width, inner, 1, precision)
        repeats = steps * p["directions"]
        seconds += inputs.seconds * p["directions"] + repeats * (STEP_S + step.seconds)
        busy_s += inputs.busy * inputs.seconds * p["directions"] + repeats * step.busy * step.seconds
        flops_s += inputs.compute_s + repeats * step.compute_s
    times = (BACKWARD if p.get("backward") else 1.0) * (BOTH_WAYS if p["directions"] == 2 else 1.0)
    weights = p["layers"] * p["directions"] * width * out * ELEMENT_BYTES[precision]
    moved = float(sum(t.nbytes for t in (*op.inputs, *op.outputs))) if hbm_bytes is None else hbm_bytes
    return KernelTime(
        seconds=seconds * times,
        overhead_s=STEP_S * steps * p["layers"] * times,
        compute_s=flops_s * times,
        memory_s=moved / chip(device).bandwidth,
        clock_s=seconds * times * 0.8,
        busy=min(1.0, busy_s / seconds),
        flops=float(op.flops),
        unit=step.unit,
        hbm_bytes=moved,
        l2_bytes=times * steps * weights,
        relative_error=0.4,
        provenance="products and a time per step, from ten rows on an H200",
    )
