"""The noun `Precision`: number formats by the names people know, and operators recast from one to another."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import replace

from ..device import PRECISIONS, Device
from ..errors import ArgumentError, did_you_mean
from ..graph.ir import DTYPE_BYTES, WHAT_IFS, Op, TensorSpec
from ..graph.op_kinds import MATRIX_KINDS
from .ops import check_precision


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
"""What tensors are kept in: between quantised products everything stays in 16 bits."""

_FLOATS = frozenset({"fp64", "fp32", "tf32", "bf16", "fp16"})


def resolved(precision: str | Precision | None, device: Device) -> str | None:
    """The precision as our string; one that the chip lacks is refused, with what it has."""
    if precision is None:
        return None
    name = str(precision.value if isinstance(precision, Precision) else precision).lower()
    if name not in PRECISIONS:
        raise ArgumentError(
            f"no precision {name!r}{did_you_mean(name, PRECISIONS)}", fix=f"one of {', '.join(PRECISIONS)}"
        )
    check_precision(device, name)
    return name


def recast(op: Op, precision: str | None) -> Op:
    """An operator as it would be were the model cast: its floats in the new format, its products on other units.

    fp32 means what it means to torch: fp32 tensors, convolutions in TF32 where they were captured so.
    """
    if precision is None:
        return op
    stored = STORED[precision]
    inputs, outputs = (tuple(_recast(t, stored) for t in side) for side in (op.inputs, op.outputs))
    if op.precision not in _FLOATS or op.params.get("complex"):  # there are no complex numbers of 16 bits to cast to
        return replace(op, inputs=inputs, outputs=outputs)
    if op.kind not in MATRIX_KINDS:
        return replace(op, inputs=inputs, outputs=outputs, precision=stored)
    name = stored if op.kind == "attention" and precision not in ("fp32", "tf32") else precision
    if precision == "fp32":
        # cuDNN uses TF32 unless it is told not to, cuBLAS only if it is (torch.backends, defaults of 2.x).
        name = op.precision if op.precision in ("fp32", "tf32") else "tf32" if op.kind in ("conv", "rnn") else "fp32"
    return replace(op, inputs=inputs, outputs=outputs, precision=name, unit="vector" if name == "fp32" else "matrix")


def _recast(t: TensorSpec, stored: str) -> TensorSpec:
    if t.dtype not in _FLOATS or t.dtype == stored:
        return t
    return replace(t, dtype=stored, nbytes=round(t.nbytes * DTYPE_BYTES[stored] / DTYPE_BYTES[t.dtype]))
