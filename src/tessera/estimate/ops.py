"""How long one operator of a graph runs on a device: `OpModel` turns an `Op` into a `KernelTime`.

`Precision` names the number formats; `recast` changes an operator from one to another.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ..device import PRECISIONS, Device
from ..errors import ArgumentError, PredictionError, did_you_mean
from ..graph.ir import DTYPE_BYTES, WEIGHT_ONLY, WHAT_IFS, Graph, Op, TensorSpec
from ..graph.op_kinds import MATRIX_KINDS
from .attention import attention_time
from .cache import CACHE_SHARE
from .conv import add_kernels, conv_time
from .data_movement import DataMovement, movement_time
from .data_work import movement_of, power_family
from .gemm import gemm_time
from .kernel_time import ELEMENT_BYTES, STREAM_SHARE, Chip, KernelTime, chip, correction_chip, lacks_units, load_fit

QUANTISED = ("fp8", "int8")
"""What-if precisions in which the matrix products run while everything between them stays in 16 bits."""

# Dropout draws a random number for every score: a fused 16-bit kernel takes this many times as long forward and
# backward (GPT-2 and BART in training steps on an H200); the fp32 kernels hide it.
DROPOUT = {False: 2.1, True: 1.3}

# torch's grouped products of experts over a batched product of as many even groups: 85 us against 51 for 8 groups of
# 256 x 7168 x 1024, 44 against 26 for 256 x 1024 x 3584 (bf16, a small Mixtral in h200_dev_traces). Only the
# arithmetic is slower: 64 groups of 64 x 2048 x 2048 wait for their weights (155 us; OLMoE in h200_heldout_traces).
GROUPED = 1.7

# The half-width of an operator without a model: that of the widest family that was measured, and the widest of a chip
# known from its datasheet. A note in the report names such operators.
UNMODELLED = 0.95
# Bytes of scales for one weight: torchao's int4 has a scale and a zero of 16 bits for 32 weights, fp4 (NVFP4) one byte
# for 16, int8 and fp8 a scale for a row, which is next to nothing.
_SCALE_BYTES = {"int8": 0.0, "fp8": 0.0, "int4": 4.0 / 32, "fp4": 1.0 / 16}
_BY_BYTES = ("fft", "solve")


def store_weights(graph: Graph, stored: str) -> Graph:
    """The program whose linear layers keep their weights in another format, 32 to 128 of them with one 16-bit scale.

    Weights that something else reads too (an embedding that is also the head) stay as they are.
    """
    share = (DTYPE_BYTES[stored] + _SCALE_BYTES[stored]) / 2.0
    weights = {s.id for s in graph.storages.values() if s.category == "weights"}
    others = {t.storage for op in graph.kernels if op.kind != "gemm" for t in op.inputs}
    chosen = {
        t.storage for op in graph.kernels if op.kind == "gemm" for t in op.inputs if len(t.shape) > 1
    } & weights - others

    def shrink(op: Op) -> Op:
        if not op.kernels or not any(t.storage in chosen for t in op.inputs):
            return op
        inputs = tuple(replace(t, nbytes=round(t.nbytes * share)) if t.storage in chosen else t for t in op.inputs)
        return replace(op, inputs=inputs, params={**op.params, "weight_only": stored})

    storages = {i: replace(s, nbytes=round(s.nbytes * share)) if i in chosen else s for i, s in graph.storages.items()}
    return replace(graph, ops=tuple(map(shrink, graph.ops)), storages=storages)


def is_unmodelled(op: Op) -> bool:
    """Whether only the bytes of an operator are known: it is in no table, a transform, or a factorisation."""
    return bool(op.params.get("unmodelled")) or op.kind in _BY_BYTES


class OpModel:
    """The cost of operators on one device; `precision` is a what-if for its matrix products (fp8, int8)."""

    def __init__(self, device: Device, *, precision: str | None = None) -> None:
        self.device = device
        self.chip = chip(device)
        self.precision = precision
        check_precision(device, precision)

    def time(self, op: Op, hbm_bytes: float | None = None) -> KernelTime:
        """The kernel time at the boost clock. `hbm_bytes` None: decided by size."""
        empty = bool(op.outputs) and all(0 in t.shape for t in op.outputs)
        if empty or (op.kind in MATRIX_KINDS and op.flops == 0):
            return self._empty_time(op)
        time, data = self._time(op, hbm_bytes), load_fit("h200_models.json")
        draw = float(data["draw"].get(op.kind, data["draw"]["other"])) * _by_family(data["family"], power_family(op))
        level = float(data["level"].get(op.kind, 1.0)) if correction_chip(self.chip) is not None else 1.0
        # Nothing learned makes a kernel faster than the chip: a fill of gigabytes was learned from small ones.
        reached = 1.0 if op.kind in MATRIX_KINDS else STREAM_SHARE
        memory_s = time.hbm_bytes / (reached * self.chip.bandwidth)
        seconds = max(time.seconds * level, self.chip.least_s(op.flops, time.unit), memory_s)
        time = replace(time, seconds=seconds, clock_s=min(seconds, time.clock_s * level), draw=draw)
        if not is_unmodelled(op):
            return time
        wide = max(time.relative_error, UNMODELLED)
        return replace(time, relative_error=wide, provenance="counted by the bytes it moves: no model, no measurement")

    def _time(self, op: Op, hbm_bytes: float | None) -> KernelTime:
        if op.kind in MATRIX_KINDS and self.precision_of(op) not in ELEMENT_BYTES:
            raise PredictionError(
                f"{op.label} multiplies {op.precision}",
                why="a GPU has neither kernels nor units for it",
                fix="cast its operands to a floating-point format",
            )
        if op.kind == "gemm" and op.name in ("aten.dot", "aten.vdot"):
            return self._dot(op, hbm_bytes)
        if op.kind == "gemm" and "m" in op.params:
            return self._gemm(op, hbm_bytes)
        if op.kind == "conv":
            return conv_time(self.device, op, self.precision_of(op), hbm_bytes)
        if op.kind == "attention":
            return self._attention(op, hbm_bytes)
        if op.kind == "rnn":
            return rnn_time(self.device, op, self.precision_of(op), hbm_bytes)
        return movement_time(self.chip, movement_of(op, self._crossing(op, hbm_bytes)), self._vector(op))

    def _empty_time(self, op: Op) -> KernelTime:
        """An operator on no elements: a launch and nothing else."""
        return movement_time(self.chip, DataMovement("elementwise", 1.0, 1.0, 0.0, 1.0), self._vector(op))

    def precision_of(self, op: Op) -> str:
        """The format an operator runs in, with the what-if applied."""
        quantised = self.precision in QUANTISED and not op.params.get("complex")
        if quantised and op.precision in ("bf16", "fp16"):  # what is wider beside 16-bit tensors is so on purpose
            return str(self.precision)
        return op.precision

    def _gemm(self, op: Op, hbm_bytes: float | None) -> KernelTime:
        p, precision = op.params, self.precision_of(op)
        if hbm_bytes is not None:
            shrink = float(DTYPE_BYTES.get(precision, 2)) / float(DTYPE_BYTES.get(op.precision, 2))
            hbm_bytes = min(hbm_bytes, float(op.bytes_in + op.bytes_out)) * shrink
        out = float(DTYPE_BYTES.get(op.outputs[0].dtype, 2)) if op.outputs else None
        m, n, k = p["m"], p["n"], p["k"]
        if p.get("complex"):
            # Real and imaginary parts side by side: (m x 2k) by (2k x 2n) has as many FLOPs and results, and the larger
            # factor is read once. None was measured: the error is that of a product on another unit.
            (m, n), k, out = ((m, 2 * n) if n <= m else (2 * m, n)), 2 * k, out / 2 if out else None
        stored = p.get("weight_only")
        right = DTYPE_BYTES[stored] + _SCALE_BYTES[stored] if stored else None
        time = gemm_time(
            self.device,
            m,
            n,
            k,
            p["batch"],
            precision,
            out_bytes=out,
            hbm_bytes=hbm_bytes,
            layout=_layout(op),
            weight_bytes=right,
            bias=op.name in _BIASED,
        )
        if op.name == "aten._grouped_mm":
            more_s = (GROUPED - 1.0) * min(time.compute_s, time.seconds)
            time = replace(time, seconds=time.seconds + more_s, clock_s=time.clock_s + more_s)
        told = "; complex as four real products" if p.get("complex") else ""
        told = told or ("; weights widened on the way, which nobody measured" if p.get("weight_only") else "")
        if not told:
            return time
        return replace(time, relative_error=min(0.95, 1.5 * time.relative_error), provenance=f"{time.provenance}{told}")

    def _dot(self, op: Op, hbm_bytes: float | None) -> KernelTime:
        """One number from two vectors: cuBLAS sums them up as a reduction does, without tiles."""
        n, moved = float(op.params["k"]), float(op.bytes_in + op.bytes_out)
        work = DataMovement("reduce.all.sum", n, moved, self._crossing(op, hbm_bytes), max(1.0, n / 8192))
        return replace(movement_time(self.chip, work, self._vector(op)), flops=float(op.flops))

    def _attention(self, op: Op, hbm_bytes: float | None) -> KernelTime:
        p = op.params
        precision = op.inputs[0].dtype if op.inputs[0].dtype in ("bf16", "fp16", "fp32", "fp64") else "bf16"
        if op.precision == "tf32":  # our kernel may; torch's keep fp32
            precision = "tf32"
        # Heads of keys and values may differ in size, and each makes one of the two products.
        head_dim, backward = -(-(int(p["head_dim"]) + int(p["v_dim"])) // 2), bool(p.get("backward"))
        sizes = max(1, p["batch"]), p["heads"], p["kv_heads"], p["q_len"], p["kv_len"], head_dim
        time = attention_time(
            self.device, *sizes, p["causal"], precision, backward=backward, mask=p["mask"], hbm_bytes=hbm_bytes
        )
        if max(p["head_dim"], p["v_dim"]) > 256 or p["head_dim"] != p["v_dim"] or p.get("flexible"):
            time = replace(time, relative_error=UNMODELLED)  # other kernels than those that were measured
        if not p.get("dropout") or precision not in ("bf16", "fp16"):
            return time
        return replace(time, seconds=time.seconds * DROPOUT[backward], clock_s=time.clock_s * DROPOUT[backward])

    def _crossing(self, op: Op, hbm_bytes: float | None) -> float:
        if hbm_bytes is not None:
            return hbm_bytes
        total = float(op.bytes_in + op.bytes_out)
        return total if total > self.chip.cache_bytes else 0.0

    def _vector(self, op: Op) -> str:
        names = [n for n, _, kind in self.chip.peaks if kind == "vector"]
        wanted = op.precision if op.precision in names else "fp32"
        return f"vector.{wanted}" if wanted in names else self.chip.peak("fp32")[1]


def check_precision(device: Device, precision: str | None) -> None:
    """Refuse a what-if precision that the chip has no units for. torch runs a 16-bit model anyway, on wider ones."""
    if precision in (None, "bf16", "fp16") or precision in WEIGHT_ONLY or device.peak(precision) is not None:
        return
    raise lacks_units(device, precision)


_BIASED = ("aten.addmm", "aten._addmm_activation")


def _by_family(table: Mapping[str, float], family: str) -> float:
    """The value of the longest part of a dotted name that the table has, else 1."""
    while family not in table and "." in family:
        family = family.rpartition(".")[0]
    return float(table.get(family, 1.0))


def _layout(op: Op) -> str:
    """The layout of a product's operands: "nt" for a linear layer, "nn" plain, "tn" for a weight's gradient."""
    a, b = op.inputs[-2], op.inputs[-1]
    if len(a.shape) < 2 or len(b.shape) < 2 or (b.stride[-2] == 1 and b.stride[-1] != 1):
        return "nt"
    return "tn" if a.stride[-2] == 1 and a.stride[-1] != 1 else "nn"


# -- recurrent layers -------------------------------------------------------------------------------------------

# A step's time beside its product, and backward over forward (LSTM and GRU rows of benchmarks/data/h200_ops, an H200:
# 256 steps of 512 hidden, batch 64: 6.8 us a step; 650 hidden, batch 32: 9.2 us). Backward in 16 bits takes 1.36 times
# the forward time predicted for two single layers, in fp32 2.05 to 3.0 times, in the middle 2.2, for those and three
# models (h200_heldout, heldout2 and heldout4 traces).
RNN_STEP_S = 3.0e-6
RNN_BACKWARD, RNN_BACKWARD_NARROW = 2.2, 1.4
# cuDNN runs both directions at once: 2.1 ms together where their kernels add up to 3.1 ms (GRU, 512 hidden, batch 64).
RNN_BOTH_WAYS = 0.6


def rnn_time(device: Device, op: Op, precision: str, hbm_bytes: float | None) -> KernelTime:
    """A stack of recurrent layers as cuDNN runs it: one product for all inputs, then one step at a time."""
    p = op.params
    width, batch, steps = p["gates"] * p["hidden"], max(1, p["batch"]), max(1, p["steps"])
    seconds = busy_s = flops_s = 0.0
    out = p.get("out", p["hidden"])
    again = _reread_bytes(width * out * ELEMENT_BYTES[precision] * p["directions"], chip(device)) / p["directions"]
    step = gemm_time(device, batch, width, out, 1, precision, hbm_bytes=again)
    if out != p["hidden"]:  # a projection: one more product in every step
        step = add_kernels([step, gemm_time(device, batch, out, p["hidden"], 1, precision, hbm_bytes=0.0)])
    for layer in range(p["layers"]):
        inner = p["input"] if layer == 0 else out * p["directions"]
        inputs = gemm_time(device, batch * steps, width, inner, 1, precision)
        repeats = steps * p["directions"]
        seconds += inputs.seconds * p["directions"] + repeats * (RNN_STEP_S + step.seconds)
        busy_s += inputs.busy * inputs.seconds * p["directions"] + repeats * step.busy * step.seconds
        flops_s += inputs.compute_s + repeats * step.compute_s
    back = RNN_BACKWARD if ELEMENT_BYTES[precision] > 2 else RNN_BACKWARD_NARROW
    times = (back if p.get("backward") else 1.0) * (RNN_BOTH_WAYS if p["directions"] == 2 else 1.0)
    weights = p["layers"] * p["directions"] * width * out * ELEMENT_BYTES[precision]
    moved = float(sum(t.nbytes for t in (*op.inputs, *op.outputs))) if hbm_bytes is None else hbm_bytes
    moved += (steps - 1) * p["layers"] * p["directions"] * again
    return KernelTime(
        seconds=max(seconds * times, moved / chip(device).bandwidth),
        overhead_s=RNN_STEP_S * steps * p["layers"] * times,
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


def _reread_bytes(nbytes: float, of: Chip) -> float:
    """Bytes of recurrent weights that every step reads again: those of one layer, less what the cache kept of them."""
    kept = CACHE_SHARE * of.cache_bytes
    return nbytes - kept * kept / nbytes if nbytes > kept else 0.0


# -- number formats ---------------------------------------------------------------------------------------------


class Precision(enum.StrEnum):
    """A number format; its value is the string every `precision=` takes."""

    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    FP6 = "fp6"
    FP4 = "fp4"
    INT8 = "int8"
    INT4 = "int4"


STORED: Mapping[str, str] = {**WHAT_IFS, "fp6": "bf16", "fp4": "bf16", "int4": "bf16"}
"""The format tensors are stored in: between quantised products everything stays in 16 bits."""

_FLOATS = frozenset({"fp64", "fp32", "tf32", "bf16", "fp16"})


def precision_name(precision: Any, known: Collection[str] = WHAT_IFS) -> str:
    """Our name of a number format: a string, a `Precision`, or a torch dtype."""
    text = str(getattr(precision, "value", precision)).lower().removeprefix("torch.")
    name = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}.get(text, text)
    if name not in known:
        alone = f"{name}wo"  # where products in it are not modelled, its weights are
        told = f"; did you mean {alone!r}?" if alone in known else did_you_mean(name, known)
        raise ArgumentError(f"there is no precision {name!r}{told}", fix=f"one of {', '.join(known)}")
    return name


def parse_precision(precision: str | Precision | None, device: Device) -> str | None:
    """The precision as a plain string; a precision that the chip lacks is refused, with those it has."""
    name = None if precision is None else precision_name(precision, PRECISIONS)
    check_precision(device, name)
    return name


def recast(op: Op, precision: str | None) -> Op:
    """An operator as if the model were cast: its floats in the new format, its products on other units.

    fp32 means what it means to torch: fp32 tensors, convolutions in TF32 where they were captured so.
    """
    if precision is None:
        return op
    stored = STORED[precision]
    inputs, outputs = (tuple(_recast(t, stored) for t in side) for side in (op.inputs, op.outputs))
    if op.precision not in _FLOATS or op.params.get("complex"):  # there are no 16-bit complex numbers to cast to
        return replace(op, inputs=inputs, outputs=outputs)
    if op.kind not in MATRIX_KINDS:
        return replace(op, inputs=inputs, outputs=outputs, precision=stored)
    name = stored if op.kind == "attention" and precision not in ("fp32", "tf32") else precision
    if precision == "fp32":
        # cuDNN uses TF32 by default, cuBLAS does not (torch.backends, defaults of 2.x).
        name = op.precision if op.precision in ("fp32", "tf32") else "tf32" if op.kind in ("conv", "rnn") else "fp32"
    return replace(op, inputs=inputs, outputs=outputs, precision=name, unit="vector" if name == "fp32" else "matrix")


def _recast(t: TensorSpec, stored: str) -> TensorSpec:
    if t.dtype not in _FLOATS or t.dtype == stored:
        return t
    return replace(t, dtype=stored, nbytes=round(t.nbytes * DTYPE_BYTES[stored] / DTYPE_BYTES[t.dtype]))
