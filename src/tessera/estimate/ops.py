"""How long one operator of a graph runs on a device: the one place that turns an `Op` into a `KernelTime`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..device import Device
from ..errors import PredictionError
from ..graph.ir import DTYPE_BYTES, Op
from ..graph.op_kinds import MATRIX_KINDS
from .attention import attention_time
from .conv import conv_time
from .families import power_family, stream_of
from .gemm import gemm_time
from .kernel_time import ELEMENT_BYTES, KernelTime, chip, learnt_on
from .residual import fitted
from .rnn import rnn_time
from .stream import Stream, stream_time

QUANTISED = ("fp8", "int8")
"""What-if precisions in which the matrix products run while everything between them stays in 16 bits."""


# Dropout draws a random number for every score: a fused 16-bit kernel takes this many times as long forward and
# backward (GPT-2 and BART in training steps on an H200); the fp32 kernels hide it.
DROPOUT = {False: 2.1, True: 1.3}


# The half-width of what nobody modelled, beside a note that says so: as of the widest family that was measured, and
# the widest that a chip from its datasheet has.
UNMODELLED = 0.95
_BY_BYTES = ("fft", "solve")


def unmodelled(op: Op) -> bool:
    """Whether nothing but the bytes of an operator is known: one that no table lists, a transform, a factorisation."""
    return bool(op.params.get("unmodelled")) or op.kind in _BY_BYTES


class OpModel:
    """The cost of operators on one device; `precision` is a what-if for its matrix products (fp8, int8)."""

    def __init__(self, device: Device, *, precision: str | None = None) -> None:
        self.device = device
        self.chip = chip(device)
        self.precision = precision
        check_precision(device, precision)

    def time(self, op: Op, hbm_bytes: float | None = None) -> KernelTime:
        """Seconds at the boost clock, and what power needs to know. `hbm_bytes` None: decided by size."""
        empty = bool(op.outputs) and all(0 in t.shape for t in op.outputs)
        if empty or (op.kind in MATRIX_KINDS and op.flops == 0):
            return self._nothing(op)
        found, data = self._time(op, hbm_bytes), fitted("h200_models.json")
        draw = float(data["draw"].get(op.kind, data["draw"]["other"])) * _by_family(data["family"], power_family(op))
        level = level_of(data["level"], op) if learnt_on(self.chip) is not None else 1.0
        # No residual makes a kernel faster than the memory: a fill of gigabytes was learnt from small ones.
        seconds = max(found.seconds * level, found.hbm_bytes / self.chip.bandwidth)
        found = replace(found, seconds=seconds, clock_s=min(seconds, found.clock_s * level), draw=draw)
        if not unmodelled(op):
            return found
        wide = max(found.relative_error, UNMODELLED)
        return replace(found, relative_error=wide, provenance="counted by the bytes it moves: no model, no measurement")

    def _time(self, op: Op, hbm_bytes: float | None) -> KernelTime:
        if op.kind in MATRIX_KINDS and self._precision(op) not in ELEMENT_BYTES:
            raise PredictionError(
                f"{op.label} multiplies {op.precision}",
                why="there are no such kernels on a GPU, and no units for them",
                fix="cast its operands to a floating-point format",
            )
        if op.kind == "gemm" and op.name in ("aten.dot", "aten.vdot"):
            return self._dot(op, hbm_bytes)
        if op.kind == "gemm" and "m" in op.params:
            return self._gemm(op, hbm_bytes)
        if op.kind == "conv":
            return conv_time(self.device, op, self._precision(op), hbm_bytes)
        if op.kind == "attention":
            return self._attention(op, hbm_bytes)
        if op.kind == "rnn":
            return rnn_time(self.device, op, self._precision(op), hbm_bytes)
        return stream_time(self.chip, stream_of(op, self._crossing(op, hbm_bytes)), self._vector(op))

    def _nothing(self, op: Op) -> KernelTime:
        """An operator on no elements: a launch, and that is all."""
        return stream_time(self.chip, Stream("elementwise", 1.0, 1.0, 0.0, 1.0), self._vector(op))

    def precision_of(self, op: Op) -> str:
        """The format an operator runs in, the what-if considered."""
        return self._precision(op)

    def _precision(self, op: Op) -> str:
        quantised = self.precision in QUANTISED and not op.params.get("complex")
        if quantised and op.precision in ("bf16", "fp16", "fp32", "tf32"):
            return str(self.precision)
        return op.precision

    def _gemm(self, op: Op, hbm_bytes: float | None) -> KernelTime:
        p, precision = op.params, self._precision(op)
        if hbm_bytes is not None:
            shrink = _shrink(op.precision, precision)
            hbm_bytes = min(hbm_bytes, float(op.bytes_in + op.bytes_out)) * shrink
        out = float(DTYPE_BYTES.get(op.outputs[0].dtype, 2)) if op.outputs else None
        m, n, k = p["m"], p["n"], p["k"]
        if p.get("complex"):
            # Real and imaginary parts side by side: (m x 2k) by (2k x 2n) is as many FLOPs and results, and the larger
            # factor is read once. Nobody measured one: as wide as a product on a unit that is not its own.
            (m, n), k, out = ((m, 2 * n) if n <= m else (2 * m, n)), 2 * k, out / 2 if out else None
        found = gemm_time(
            self.device, m, n, k, p["batch"], precision, out_bytes=out, hbm_bytes=hbm_bytes, layout=_layout(op)
        )
        if not p.get("complex"):
            return found
        wide = min(0.95, 1.5 * found.relative_error)
        return replace(found, relative_error=wide, provenance=f"{found.provenance}; complex as four real products")

    def _dot(self, op: Op, hbm_bytes: float | None) -> KernelTime:
        """One number from two vectors: cuBLAS sums them up as a reduction does, and has no tiles."""
        n, moved = float(op.params["k"]), float(op.bytes_in + op.bytes_out)
        work = Stream("reduce.all.sum", n, moved, self._crossing(op, hbm_bytes), max(1.0, n / 8192))
        return replace(stream_time(self.chip, work, self._vector(op)), flops=float(op.flops))

    def _attention(self, op: Op, hbm_bytes: float | None) -> KernelTime:
        p = op.params
        precision = op.inputs[0].dtype if op.inputs[0].dtype in ("bf16", "fp16", "fp32", "fp64") else "bf16"
        if op.precision == "tf32":  # our kernel may; torch's keep fp32
            precision = "tf32"
        found = attention_time(
            self.device, max(1, p["batch"]), p["heads"], p["kv_heads"], p["q_len"], p["kv_len"], _head(p), p["causal"],
            precision, backward=bool(p.get("backward")), mask=p["mask"], hbm_bytes=hbm_bytes,
        )  # fmt: skip
        if max(p["head_dim"], p["v_dim"]) > 256 or p["head_dim"] != p["v_dim"] or p.get("flexible"):
            found = replace(found, relative_error=UNMODELLED)  # other kernels than those that were measured
        if not p.get("dropout") or precision not in ("bf16", "fp16"):
            return found
        times = DROPOUT[bool(p.get("backward"))]
        return replace(found, seconds=found.seconds * times, clock_s=found.clock_s * times)

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
    """A what-if needs units for it: nothing is gained, or known, by running fp8 on a chip that has none."""
    if precision is None or device.peak(precision) is not None:
        return
    has = sorted({*device.vector, *device.matrix})
    raise PredictionError(
        f"{device.id} has no {precision} units",
        why=f"the catalogue gives {device.name} peaks for {', '.join(has) or 'nothing'}",
        fix="choose one of those, or another chip: tessera hardware list",
    )


FEW_ROWS = "gemm.fp32.few_rows"


def few_rows(op: Op) -> float:
    """How much an operator is an fp32 product of few rows: 1 up to 256 rows, 0 from 1024 on."""
    if op.kind != "gemm" or op.precision != "fp32" or op.params.get("batch") != 1:
        return 0.0
    return min(1.0, max(0.0, (10.0 - math.log2(max(1, op.params["m"]))) / 2.0))


def level_of(levels: Mapping[str, float], op: Op) -> float:
    """The factor that put the sums of whole models right; fp32 products of few rows have one of their own."""
    return float(levels.get(op.kind, 1.0)) * (1.0 + few_rows(op) * (float(levels.get(FEW_ROWS, 1.0)) - 1.0))


def _by_family(table: Mapping[str, float], family: str) -> float:
    """The value of the longest part of a dotted name that the table has, else 1."""
    while family not in table and "." in family:
        family = family.rpartition(".")[0]
    return float(table.get(family, 1.0))


def _head(p: Mapping[str, Any]) -> int:
    """The size of a head: keys and values may differ, and each makes one of the two products."""
    return -(-(int(p["head_dim"]) + int(p.get("v_dim", p["head_dim"]))) // 2)


def _layout(op: Op) -> str:
    """How the operands of a product lie: "nt" for a linear layer, "nn" plain, "tn" a weight's gradient."""
    a, b = op.inputs[-2], op.inputs[-1]
    if len(a.shape) < 2 or len(b.shape) < 2 or (b.stride[-2] == 1 and b.stride[-1] != 1):
        return "nt"
    return "tn" if a.stride[-2] == 1 and a.stride[-1] != 1 else "nn"


def _shrink(before: str, after: str) -> float:
    return float(DTYPE_BYTES.get(after, 2)) / float(DTYPE_BYTES.get(before, 2)) if before != after else 1.0
