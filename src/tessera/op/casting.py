"""Number formats of products: what they are, rounding to them with power-of-two scales, and weights kept in fp8.

fp8 is e4m3 with one scale per matrix, `fp8_row` with one for each row of `a` and column of `b`; fp16 from a wider type
is scaled too, so neither overflows. In scaled formats, values that are not finite become NaN.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from typing import Any

import torch

from ..errors import ArgumentError, MissingExtra, check_choice

PRECISIONS = ("fp8", "fp8_row", "bf16", "fp16", "tf32", "fp32", "fp64")
"""The precisions of a product, coarsest first; bf16 comes before fp16 and tf32, which round 8 times finer."""
FULL = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""The precision that loses nothing of operands of each type."""
STORED_AS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_row": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_E4M3_MAX = 448.0


@functools.cache
def has_fp8_units(index: int | None) -> bool:
    """Return whether a CUDA device multiplies e4m3 itself: NVIDIA's do from compute capability 8.9 on."""
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (8, 9)


def multiplies_fp8(device: torch.device) -> bool:
    """Return whether fp8 products run in fp8 on a device; others multiply the rounded operands in a wider format."""
    return device.type == "cuda" and has_fp8_units(device.index)


def cast(a: torch.Tensor, precision: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the tensor rounded to a precision, and the scale to multiply by afterwards; None if there is none.

    `fp8_row` scales the rows of the last dimension. fp8 values are stored in e4m3, tf32 values in fp32.
    """
    check_choice("precision", precision, PRECISIONS)
    if precision == "tf32":
        return _round_to_tf32(a.float()), None
    if precision not in ("fp8", "fp8_row") and (precision != "fp16" or a.dtype == torch.float16):
        return a.to(STORED_AS[precision]), None
    flat = a.reshape(a.shape[:-1].numel(), a.shape[-1]) if a.dim() != 2 else a
    by_row = precision == "fp8_row"
    y, scale = quantize(flat, precision.removesuffix("_row"), by_row, (1, 1))
    return y.reshape(a.shape), scale.reshape(*a.shape[:-1], 1) if by_row else scale.reshape(())


def cast_each(stack: torch.Tensor, precision: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a stack of matrices in fp8 or fp16, and their scales, one for each matrix."""
    each = [quantize(matrix, precision, False, (1, 1)) for matrix in stack]
    # viewed as integers, because autocast would cast a stack of fp8
    bits = torch.uint8 if precision == "fp8" else torch.int16
    values = torch.stack([y.view(bits) for y, _ in each]).view(STORED_AS[precision])
    return values, torch.cat([scale for _, scale in each])


def quantize(x: torch.Tensor, name: str, by_row: bool, pad: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrix in fp8 or fp16, contiguous and padded to multiples of `pad`, and the scale(s) to undo it."""
    if x.device.type == "cuda" and x.dtype != torch.float64 and (name != "fp8" or multiplies_fp8(x.device)):
        with contextlib.suppress(MissingExtra):
            from .kernels import quantize as kernels

            values, scales = kernels.quantize(x, name, by_row=by_row, pad=pad)
            return values, scales
    wide = x if x.dtype == torch.float64 else x.float()
    finite = torch.isfinite(wide)
    size = torch.where(finite, wide.abs(), 0.0)
    amax = (size.amax(1) if by_row else size.amax().reshape(1)).float() if size.numel() else size.new_zeros(1).float()
    scale = power_of_two(amax, name)
    scaled = wide * (scale[:, None] if by_row else scale)
    if name == "fp8":
        scaled = scaled.clamp(-_E4M3_MAX, _E4M3_MAX)
    rounded = torch.where(finite, scaled, torch.nan).float()
    more = [-(-size // to) * to - size for size, to in zip(x.shape, pad, strict=True)]
    if any(more):
        rounded = torch.nn.functional.pad(rounded, (0, more[1], 0, more[0]))
        scale = torch.nn.functional.pad(scale, (0, more[0]), value=1.0) if by_row else scale
    return rounded.to(STORED_AS[name]).contiguous(), 1.0 / scale


def power_of_two(amax: torch.Tensor, name: str) -> torch.Tensor:
    """Return the power of two that brings `amax` just under the largest value of fp8 (448) or fp16 (2^15).

    It is never 0 or infinite.
    """
    fraction, exponent = torch.frexp(amax)  # amax = fraction x 2^exponent, fraction in [1/2, 1)
    top = 9 - (fraction > 0.875).int() if name == "fp8" else torch.full_like(exponent, 15)
    power = (top - exponent).clamp(-126, 126)  # 2^power and 2^-power both are normal numbers
    return torch.ldexp(torch.ones_like(amax), torch.where(amax > 0, power, 0))


def _round_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Round mantissas to 10 bits, to nearest, ties to even."""
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(torch.isfinite(x), rounded.view(torch.float32), x)


# -- weights kept in fp8 --------------------------------------------------------------------------------------------


class PreparedWeight:
    """A copy of a weight in fp8, with the version it was made from; it lives as long as the weight."""

    __slots__ = ("address", "owner", "scale", "values", "version")

    def __init__(self, owner: Any) -> None:
        self.owner = weakref.ref(owner)
        self.address, self.version = owner.data_ptr(), -1
        self.values: Any = None
        self.scale: Any = None

    def refresh(self, b: torch.Tensor, by_row: bool, pad: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight and its scale(s), cast again if the weight has changed."""
        if self.version != b._version:
            values, scale = quantize(b.mT, "fp8", by_row, pad)
            if self.values is None:
                self.values, self.scale = values, scale
            else:  # in place, because a CUDA graph that was captured with these tensors reads them at every replay
                self.values.copy_(values)
                self.scale.copy_(scale)
            self.version = b._version
        return self.values, self.scale


_weights: dict[tuple[Any, ...], PreparedWeight] = {}
_lock = threading.Lock()


def prepare(b: torch.Tensor, precision: str = "fp8") -> None:
    """Keep the right operand of a product in fp8 (or `fp8_row`) from its first use on: one more byte per weight.

    The copy is found by the weight's address, layout and version. It is made again after every change that torch counts
    (an optimizer's step, `load_state_dict`), and dropped with the weight. A write through `.data` or from another
    library is not counted: call `forget` after one. `fp8_row` is cheaper where `lowprec.has_row_scaling`.
    """
    if not isinstance(b, torch.Tensor):
        raise ArgumentError(f"b is a {type(b).__name__}, not a tensor", fix="a weight, such as layer.weight.mT")
    if precision not in ("fp8", "fp8_row"):
        raise ArgumentError(f"precision={precision!r} cannot be prepared", fix='"fp8" or "fp8_row"')
    if b.dim() != 2 or b.is_inference():
        raise ArgumentError(
            f"b has {b.dim()} dimensions" if b.dim() != 2 else "b is an inference tensor",
            why="a stale copy is recognized by torch's count of changes to a matrix",
            fix="a weight of two dimensions, made outside torch.inference_mode",
        )
    owner = b if b._base is None else b._base
    key = _key(b, precision == "fp8_row")
    with _lock:
        _weights[key] = PreparedWeight(owner)
    weakref.finalize(owner, _weights.pop, key, None)


def forget(b: torch.Tensor) -> None:
    """Drop the fp8 copies of a weight."""
    with _lock:
        for by_row in (False, True):
            _weights.pop(_key(b, by_row), None)


def find_prepared(b: torch.Tensor, by_row: bool) -> PreparedWeight | None:
    """Return the fp8 copy of a weight; None for a tensor that was not prepared."""
    if not _weights or b.is_inference():
        return None
    entry = _weights.get(_key(b, by_row))
    if entry is None:
        return None
    owner = entry.owner()
    if owner is None or owner.data_ptr() != entry.address:  # its memory may belong to another tensor now
        return None
    return entry


def _key(b: torch.Tensor, by_row: bool) -> tuple[Any, ...]:
    return (b.data_ptr(), tuple(b.shape), b.stride(), b.dtype, b.device, by_row)
