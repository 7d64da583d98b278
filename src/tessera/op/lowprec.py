"""One matrix product in a chosen number format: fp8, bf16, fp16, tf32, fp32, fp64.

Operands are rounded to the format, multiplied exactly, and summed in fp32 (`accumulate="fast"` allows what the library
likes: fp8's short accumulator, split sums in 16 bits). On CUDA the product is cuBLAS's; on a CPU, and for fp8 on a GPU
without fp8 units, the rounded operands are multiplied in a wider format that holds them exactly: the same numbers (but
for the scale that fp8 has on a GPU), no saving, and "fast" is the same as "fp32". fp8 is e4m3 with one power-of-two
scale a matrix, `fp8_row` with one for each row of `a` and column of `b`, which the product itself multiplies by where
torch has that; fp16 from a wider type is scaled the same way, so neither overflows: in scaled formats values that are
not finite come out as NaN.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from ..errors import ArgumentError, MissingExtra, did_you_mean
from .arguments import uncast
from .eager import composed, differentiated, unseen
from .prepared import find
from .switches import fp32_products, fp32_sums

PRECISIONS = ("fp8", "fp8_row", "bf16", "fp16", "tf32", "fp32", "fp64")
"""What a product may run in, coarsest first; bf16 before fp16 and tf32, which round 8 times finer."""
FULL = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""The precision that loses nothing of operands of a type."""
ACCUMULATES = ("fp32", "fast")
_STORED = {
    "fp8": torch.float8_e4m3fn, "fp8_row": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16,
    "tf32": torch.float32, "fp32": torch.float32, "fp64": torch.float64,
}  # fmt: skip
_E4M3_MAX = 448.0
_PROBED = 128  # rows and columns of the product that asks whether there is one: a tile of every kernel
_AT_ONCE = 16384  # elements of a row that one program holds (`kernels/quantize.py`, HELD)
_ALIGN = 16  # cuBLAS takes fp8 matrices whose rows are multiples of 16 bytes


def mm(
    a: torch.Tensor,
    b: torch.Tensor,
    precision: str,
    accumulate: str = "fp32",
    out_dtype: torch.dtype | None = None,
    *,
    backward: str | None = None,
) -> torch.Tensor:
    """`a @ b` with operands rounded to `precision`; the result has `out_dtype`, by default that of `a`.

    `a` is (..., m, k), `b` (k, n) or (..., k, n). Leading dimensions of `a` alone are folded into m; where both have
    some, 16-bit and wider formats run batched, fp8 matrix by matrix, each with its own scales. Gradients are products
    in `backward`: by default the same precision, but bf16 for fp8, and then summed in fp32.
    """
    check(a, b, precision, accumulate)
    out = a.dtype if out_dtype is None else out_dtype
    back = backward or ("bf16" if precision in ("fp8", "fp8_row") else precision)
    if back not in PRECISIONS:
        raise unknown("backward", back)
    if a.dim() == 2 and b.dim() == 2:
        return _run(a, b, precision, accumulate, out, back)
    if b.dim() == 2:
        flat = _run(a.reshape(a.shape[:-1].numel(), a.shape[-1]), b, precision, accumulate, out, back)
        return flat.reshape(*a.shape[:-1], b.shape[-1])
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    many = (x.expand(*lead, *x.shape[-2:]).reshape(lead.numel(), *x.shape[-2:]) for x in (a, b))
    return _run(*many, precision, accumulate, out, back).reshape(*lead, a.shape[-2], b.shape[-1])


def cast(a: torch.Tensor, precision: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensor rounded to a precision and the scale to multiply by afterwards; None where there is none.

    `fp8_row` scales the last dimension's rows. fp8 values are stored in e4m3, tf32's in fp32.
    """
    if precision not in PRECISIONS:
        raise unknown("precision", precision)
    if precision == "tf32":
        return _tf32(a.float()), None
    if precision in ("fp8", "fp8_row") or (precision == "fp16" and a.dtype != torch.float16):
        return _scaled(a, precision)
    return a.to(_STORED[precision]), None


def cast_each(stack: torch.Tensor, precision: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A stack of matrices in fp8 or fp16, each with a scale of its own: (batch,) of them."""
    size = stack.shape[1:].numel()
    if size <= _AT_ONCE or not stack.is_cuda:  # a matrix is a row here, which one program casts whole
        values, scale = _quantized(stack.reshape(len(stack), size), precision, True, (1, 1))
        return values.reshape(stack.shape), scale
    each = [_quantized(matrix, precision, False, (1, 1)) for matrix in stack]
    bits = torch.uint8 if precision == "fp8" else torch.int16  # autocast would have its own opinion of a stack of fp8
    values = torch.stack([y.view(bits) for y, _ in each]).view(_STORED[precision])
    return values, torch.cat([scale for _, scale in each])


def check(a: Any, b: Any, precision: str, accumulate: str = "fp32") -> None:
    """A clear error for what cannot be multiplied."""
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, torch.Tensor) or x.dtype not in FULL or x.dim() < 2:
            what = f"{x.dtype}, {x.dim()} dimensions" if isinstance(x, torch.Tensor) else type(x).__name__
            raise ArgumentError(f"{name} is no matrix of floating numbers: {what}", fix="fp64, fp32, fp16 or bf16, 2-d")
    if a.dtype != b.dtype or a.device != b.device:
        raise ArgumentError(f"a is {a.dtype} on {a.device}, b {b.dtype} on {b.device}", fix="one type, one device")
    if a.shape[-1] != b.shape[-2]:
        raise ArgumentError(f"a is {tuple(a.shape)}, b {tuple(b.shape)}", why="a's columns are not b's rows")
    if precision not in PRECISIONS:
        raise unknown("precision", precision)
    if accumulate not in ACCUMULATES:
        raise ArgumentError(f"accumulate={accumulate!r}{did_you_mean(accumulate, ACCUMULATES)}", fix='"fp32" or "fast"')


def unknown(name: str, precision: Any) -> ArgumentError:
    """The error for a precision that does not exist."""
    hint = did_you_mean(str(precision), PRECISIONS)
    return ArgumentError(f"{name}={precision!r} is no precision{hint}", fix=f"one of {', '.join(PRECISIONS)}")


# -- the operator that torch sees ----------------------------------------------------------------------------------


def _run(a: torch.Tensor, b: torch.Tensor, *how: Any) -> torch.Tensor:
    """The operator; its function alone where nobody would see it: an operator's first call imports torch's compiler."""
    if (a.is_cpu or a.is_cuda) and unseen(a, b) and not differentiated(a, b):  # a meta tensor has no product to run
        return _multiply(a, b, *how)
    return _product(a, b, *how)


def _multiply(
    a: torch.Tensor, b: torch.Tensor, precision: str, accumulate: str, out_dtype: torch.dtype, backward: str
) -> torch.Tensor:
    """One product, or a batch of them: (m, k) by (k, n), or (batch, m, k) by (batch, k, n)."""
    with uncast(a):
        if precision in ("fp8", "fp8_row"):
            if a.dim() == 3:
                each = [_fp8(x, y, precision, accumulate, out_dtype) for x, y in zip(a, b, strict=True)]
                return torch.stack(each) if each else a.new_empty((0, a.shape[1], b.shape[2]), dtype=out_dtype)
            return _fp8(a, b, precision, accumulate, out_dtype)
        if a.device.type == "cuda":
            return _on_cuda(a, b, precision, accumulate, out_dtype)
        return _emulated(a, b, precision, out_dtype)


product = torch.library.custom_op("tessera::lowprec_mm", _multiply, mutates_args=())


@product.register_fake
def _(a: Any, b: Any, precision: str, accumulate: str, out_dtype: Any, backward: str) -> Any:
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=out_dtype)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, precision, accumulate, _, backward = inputs
    ctx.save_for_backward(a, b)
    # fp8's fast sums may be a tolerance's choice, which looked at fp8 only: nobody asked for split sums in 16 bits.
    ctx.how = (backward, accumulate if backward == precision else "fp32")


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (a, b), (precision, accumulate) = ctx.saved_tensors, ctx.how
    grad = grad.to(torch.promote_types(grad.dtype, a.dtype))
    wide_a, wide_b = a.to(grad.dtype), b.to(grad.dtype)
    to_a = to_b = None
    if ctx.needs_input_grad[0]:
        to_a = _product(grad, wide_b.mT, precision, accumulate, a.dtype, precision)
    if ctx.needs_input_grad[1]:
        to_b = _product(wide_a.mT, grad, precision, accumulate, b.dtype, precision)
    return to_a, to_b, None, None, None, None


product.register_autograd(_gradients, setup_context=_save)
_product = composed(product, _save, _gradients, "matmul, gemm or linear", "a precision or tolerance")


# -- fp8 -----------------------------------------------------------------------------------------------------------


def _fp8(a: torch.Tensor, b: torch.Tensor, precision: str, accumulate: str, out: torch.dtype) -> torch.Tensor:
    by_row = precision == "fp8_row"
    m, n = a.shape[0], b.shape[1]
    if min(m, n, a.shape[1]) == 0:
        return a.new_zeros((m, n), dtype=out)
    native = _native(a.device)
    pad = (_ALIGN, _ALIGN) if native else (1, 1)
    (left, left_scale), (right, right_scale) = _operands(a, b, by_row, pad, native)
    if native and not by_row:
        c = _multiplied(left, right, left_scale.reshape(()), right_scale.reshape(()), accumulate, _written(out))
    elif native and rows_in_product(a.device, _written(out)):
        c = _multiplied(left, right, left_scale[:, None], right_scale[None, :], accumulate, _written(out))
    elif native:
        one = torch.ones((), device=a.device, dtype=torch.float32)
        # A row's scale could overflow or leave an fp16 result before it is put right, so those come out wider.
        wide = _written(torch.float32 if out == torch.float16 else out)
        c = _multiplied(left, right, one, one, accumulate, wide)
        return _unscaled(c, left_scale, right_scale, m, n, out)
    else:
        exact = torch.bfloat16 if a.device.type == "cuda" else torch.float32  # both hold every e4m3 value
        c = _widely(left.to(exact), right.mT.to(exact), torch.float32)
        if by_row:
            return _unscaled(c, left_scale, right_scale, m, n, out)
        c = c * (left_scale * right_scale)
    return c[:m, :n].to(out).contiguous()


def _multiplied(left: Any, right: Any, left_scale: Any, right_scale: Any, accumulate: str, out: torch.dtype) -> Any:
    return torch._scaled_mm(
        left, right.mT, scale_a=left_scale, scale_b=right_scale, out_dtype=out, use_fast_accum=accumulate == "fast"
    )


def _unscaled(c: torch.Tensor, by_row: Any, by_col: Any, m: int, n: int, out: torch.dtype) -> torch.Tensor:
    if c.device.type == "cuda" and out != torch.float64:
        with contextlib.suppress(MissingExtra):
            from .kernels.quantize import unscale

            return unscale(c, by_row, by_col, m, n, out)
    return (c[:m, :n] * by_row[:m, None] * by_col[None, :n]).to(out).contiguous()


def _operands(a: torch.Tensor, b: torch.Tensor, by_row: bool, pad: tuple[int, int], native: bool) -> list[Any]:
    """Left and right in fp8, the right one transposed: as it was prepared, where it was."""
    kept = find(b, by_row)
    fresh = [a, b.mT] if kept is None else [a]
    if native and a.is_cuda and not by_row and a.dtype != torch.float64:
        with contextlib.suppress(MissingExtra):
            from .kernels import centred

            return [*centred.cast(fresh, pad), *([] if kept is None else [_prepared(kept, b, by_row, pad)])]
    cast = [_quantized(x, "fp8", by_row, pad) for x in fresh]
    return [*cast, *([] if kept is None else [_prepared(kept, b, by_row, pad)])]


def _prepared(kept: Any, b: torch.Tensor, by_row: bool, pad: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The right operand as it was prepared; made anew where it has changed since."""
    if kept.version != b._version:
        values, scale = _quantized(b.mT, "fp8", by_row, pad)
        if kept.values is None:
            kept.values, kept.scale = values, scale
        else:  # in place: a CUDA graph that was captured with them reads them at every replay
            kept.values.copy_(values)
            kept.scale.copy_(scale)
        kept.version = b._version
    return kept.values, kept.scale


def _written(out: torch.dtype) -> torch.dtype:
    return out if out in (torch.float32, torch.bfloat16, torch.float16) else torch.float32


def _native(device: torch.device) -> bool:
    return device.type == "cuda" and fp8_units(device.index)


def fast_sums(device: torch.device) -> bool:
    """Whether fp8's `accumulate="fast"` differs from fp32 on a device: only where it multiplies e4m3 itself."""
    return _native(device)


@functools.cache
def fp8_units(index: int | None) -> bool:
    """Whether a CUDA device multiplies e4m3 itself: NVIDIA from compute capability 8.9 on."""
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (8, 9)


def rows_in_product(device: torch.device, out: torch.dtype) -> bool:
    """Whether a device's product multiplies by the scales of rows and columns itself, before it writes its result."""
    return _native(device) and _asked_rows(device, out)


@functools.cache
def _asked_rows(device: torch.device, out: torch.dtype) -> bool:
    # cuBLAS does it from 12.9 and compute capability 9.0 on, into every type; else torch has kernels of its own for
    # some architectures, of which most versions write bf16 alone. Nothing names what a build has: a small one is tried.
    values = torch.ones((_PROBED, _PROBED), device=device, dtype=torch.float32).to(torch.float8_e4m3fn)
    scale = torch.ones((_PROBED,), device=device, dtype=torch.float32)
    try:
        _multiplied(values, values, scale[:, None], scale[None, :], "fast", out)
    except torch.OutOfMemoryError:  # says nothing of the build, and is not kept
        raise
    except (RuntimeError, ValueError):  # torch's checks raise either
        return False
    return True


def _scaled(a: torch.Tensor, precision: str) -> tuple[torch.Tensor, torch.Tensor]:
    flat = a.reshape(a.shape[:-1].numel(), a.shape[-1]) if a.dim() != 2 else a
    name, by_row = ("fp16" if precision == "fp16" else "fp8"), precision == "fp8_row"
    y, scale = _quantized(flat, name, by_row, (1, 1))
    return y.reshape(a.shape), scale.reshape(*a.shape[:-1], 1) if by_row else scale.reshape(())


def _quantized(x: torch.Tensor, name: str, by_row: bool, pad: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix in a scaled format, contiguous, and the scale(s) that bring it back."""
    if x.device.type == "cuda" and x.dtype != torch.float64 and (name != "fp8" or _native(x.device)):
        with contextlib.suppress(MissingExtra):
            from .kernels.quantize import quantize

            found: tuple[torch.Tensor, torch.Tensor] = quantize(x, name, by_row=by_row, pad=pad)
            return found
    wide = x if x.dtype == torch.float64 else x.float()
    finite = torch.isfinite(wide)
    size = torch.where(finite, wide.abs(), 0.0)
    amax = (size.amax(1) if by_row else size.amax().reshape(1)).float() if size.numel() else size.new_zeros(1).float()
    scale = power_of_two(amax, name)
    scaled = wide * (scale[:, None] if by_row else scale)
    if name == "fp8":
        scaled = scaled.clamp(-_E4M3_MAX, _E4M3_MAX)
    wanted = torch.where(finite, scaled, torch.nan).float()
    more = [-(-size // to) * to - size for size, to in zip(x.shape, pad, strict=True)]
    if any(more):
        wanted = torch.nn.functional.pad(wanted, (0, more[1], 0, more[0]))
        scale = torch.nn.functional.pad(scale, (0, more[0]), value=1.0) if by_row else scale
    return wanted.to(_STORED[name]).contiguous(), 1.0 / scale


def power_of_two(amax: torch.Tensor, name: str) -> torch.Tensor:
    """The power of two that brings `amax` just under the largest value of fp8 (448) or fp16 (2^15); never 0 or inf."""
    fraction, exponent = torch.frexp(amax)  # amax = fraction x 2^exponent, fraction in [1/2, 1)
    top = 9 - (fraction > 0.875).int() if name == "fp8" else torch.full_like(exponent, 15)
    power = (top - exponent).clamp(-126, 126)  # 2^power and 2^-power both are normal numbers
    return torch.ldexp(torch.ones_like(amax), torch.where(amax > 0, power, 0))


# -- the other formats ---------------------------------------------------------------------------------------------


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """Mantissas of 10 bits, nearest, ties to even."""
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(torch.isfinite(x), rounded.view(torch.float32), x)


def _emulated(a: torch.Tensor, b: torch.Tensor, precision: str, out: torch.dtype) -> torch.Tensor:
    """Round the operands, multiply and sum in fp32 (fp64 for fp64)."""
    (left, left_scale), (right, right_scale) = cast(a, precision), cast(b, precision)
    wide = torch.float64 if precision == "fp64" else torch.float32
    c = torch.matmul(left.to(wide), right.to(wide))
    if left_scale is not None and right_scale is not None:
        c = c * left_scale * right_scale
    return c.to(out)


def _on_cuda(a: torch.Tensor, b: torch.Tensor, precision: str, accumulate: str, out: torch.dtype) -> torch.Tensor:
    if precision in ("tf32", "fp32", "fp64"):
        wide = _STORED[precision]
        with fp32_products(tf32=precision == "tf32"):
            return torch.matmul(a.to(wide), b.to(wide)).to(out)
    if precision == "fp16" and a.dtype != torch.float16 and not _wide_results():
        return _on_cuda(a, b, "tf32", accumulate, out)  # an fp16 result could overflow; tf32 rounds the same
    (left, left_scale), (right, right_scale) = cast(a, precision), cast(b, precision)
    scale = None if left_scale is None or right_scale is None else left_scale * right_scale
    with fp32_sums(precision, wanted=accumulate == "fp32"):
        c = _widely(
            left, right, torch.float32 if scale is not None or out not in (torch.bfloat16, torch.float16) else out
        )
    return (c if scale is None else c * scale).to(out)


def _wide_results() -> bool:
    """Whether torch can write the fp32 sums of 16-bit operands: `out_dtype`, from 2.8 on."""
    return hasattr(torch.ops.aten.mm, "dtype")


def _widely(left: torch.Tensor, right: torch.Tensor, out: torch.dtype) -> torch.Tensor:
    """A product of 16-bit operands whose fp32 sums are not rounded where `out` is wider and torch can."""
    if left.device.type != "cuda":
        return torch.matmul(left.float(), right.float()).to(out)
    if left.dtype == out:
        return torch.matmul(left, right)
    if out == torch.float32 and _wide_results():
        multiply = torch.mm if left.dim() == 2 else torch.bmm
        return multiply(left, right, out_dtype=torch.float32)
    return torch.matmul(left, right).to(out)
