"""Writes input shapes of an operator as one short text, '[8,1024,768]bf16 [768,2304]bf16', and reads it."""

from __future__ import annotations

import re
from typing import Any

import msgspec

DTYPES = {
    "float": "f32", "double": "f64", "c10::Half": "f16", "c10::BFloat16": "bf16", "long int": "i64", "long": "i64",
    "int": "i32", "short": "i16", "short int": "i16", "signed char": "i8", "unsigned char": "u8", "bool": "bool",
    "c10::Float8_e4m3fn": "f8e4m3", "c10::Float8_e5m2": "f8e5m2", "c10::Float8_e4m3fnuz": "f8e4m3fnuz",
    "c10::Float8_e5m2fnuz": "f8e5m2fnuz", "c10::complex<float>": "c64", "c10::complex<double>": "c128",
}  # fmt: skip
CAUSAL = "causal"
"""The word after the shapes of causal attention, which computes half of the products."""
# The argument of torch's attention operators that tells it: `is_causal`, or a `custom_mask_type` above 0.
_CAUSAL_AT = {
    "scaled_dot_product_attention": 5, "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_efficient_attention": 6, "_scaled_dot_product_cudnn_attention": 6,
    "_flash_attention_forward": 8, "_efficient_attention_forward": 9, "_cudnn_attention_forward": 10,
    "_scaled_dot_product_flash_attention_backward": 11, "_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention_backward": 11, "_scaled_dot_product_cudnn_attention_backward": 14,
    "_efficient_attention_backward": 14,
}  # fmt: skip
_NO_TENSOR = {"", "Scalar", "ScalarList", "Device", "Layout", "GenericList", "String"}
_SHAPE = re.compile(r"\[([\d,]*)\](\w*)")


def compact(dims: bytes, types: bytes) -> str:
    """Return Kineto's "Input Dims" and "Input type" as one text: the tensors in order, lists of them in parentheses."""
    try:
        shapes, kinds = msgspec.json.decode(dims), msgspec.json.decode(types) if types else []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    if not isinstance(shapes, list) or not isinstance(kinds, list):
        return ""
    parts = []
    for index, shape in enumerate(shapes):
        kind = kinds[index] if index < len(kinds) and isinstance(kinds[index], str) else None
        # Without types, an empty shape may be a scalar or a tensor without dimensions, so it is left out.
        if not isinstance(shape, list) or kind in _NO_TENSOR or (kind is None and not shape):
            continue
        parts.append(_one(shape, str(kind or "")))
    return " ".join(parts)


def is_causal(name: str, concrete: bytes) -> bool:
    """Return whether Kineto's "Concrete Inputs" of an attention operator say that it is causal."""
    at = _CAUSAL_AT.get(name.rpartition("::")[2])
    if at is None or not concrete:
        return False
    try:
        values = msgspec.json.decode(concrete)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    said = values[at] if isinstance(values, list) and len(values) > at else ""
    return str(said) not in ("", "0", "False", "None")


def _one(shape: list[Any], kind: str) -> str:
    if shape and isinstance(shape[0], list):
        return "(" + " ".join(_one(s, "") for s in shape) + ")"
    if kind == "TensorList":
        return "()"
    dtype = DTYPES.get(kind) or re.sub(r"\W+", "_", kind.removeprefix("c10::"))
    return f"[{','.join(map(str, shape))}]{dtype}"


def parse(text: str) -> list[tuple[tuple[int, ...], str]]:
    """Return shape and dtype ('' if unknown) of each tensor in a compact text; lists are flattened."""
    return [(tuple(int(d) for d in dims.split(",") if d), dtype) for dims, dtype in _SHAPE.findall(text)]
