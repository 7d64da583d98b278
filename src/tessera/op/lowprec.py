"""One matrix product in a chosen number format: fp8, bf16, fp16, tf32, fp32, fp64.

Operands are rounded to the format, multiplied exactly, and summed in fp32. (`accumulate="fast"` allows what the library
prefers: fp8's short accumulator, split sums in 16 bits.) On CUDA, the product is cuBLAS's. On a CPU, and for fp8 on a
GPU without fp8 units, the rounded operands are multiplied in a wider format that holds them exactly. Then the numbers
are the same (except for the scale that fp8 has on a GPU), nothing is saved, and "fast" is the same as "fp32".
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from ..errors import ArgumentError, MissingExtra, check_choice
from .arguments import without_autocast
from .casting import FULL, PRECISIONS, STORED_AS, cast, find_prepared, multiplies_fp8, quantize
from .dispatch import force_fp32_sums, is_unobserved, make_differentiable, needs_gradient, set_tf32

ACCUMULATES = ("fp32", "fast")
# rows and columns of a small product that is tried to find out whether the build has it: a tile of every kernel
_PROBE = 128
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
    """Return `a @ b` with operands rounded to `precision`; the result has `out_dtype`, by default that of `a`.

    `a` is (..., m, k), `b` (k, n) or (..., k, n). If only `a` has leading dimensions, they are folded into m. If both
    have some, 16-bit and wider formats run batched, and fp8 runs matrix by matrix, each with its own scales. Gradients
    are products in `backward`, by default in the same precision; fp8's default is bf16, summed in fp32.
    """
    check(a, b, precision, accumulate)
    back = backward or ("bf16" if precision in ("fp8", "fp8_row") else precision)
    check_choice("backward", back, PRECISIONS)
    options = (precision, accumulate, out_dtype or a.dtype, back)
    if a.dim() == 2 and b.dim() == 2:
        return _run(a, b, *options)
    if b.dim() == 2:
        flat = _run(a.reshape(a.shape[:-1].numel(), a.shape[-1]), b, *options)
        return flat.reshape(*a.shape[:-1], b.shape[-1])
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    stacks = (x.expand(*lead, *x.shape[-2:]).reshape(lead.numel(), *x.shape[-2:]) for x in (a, b))
    return _run(*stacks, *options).reshape(*lead, a.shape[-2], b.shape[-1])


def check(a: Any, b: Any, precision: str, accumulate: str = "fp32") -> None:
    """Raise a clear error for operands that cannot be multiplied."""
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, torch.Tensor) or x.dtype not in FULL or x.dim() < 2:
            what = f"{x.dtype}, {x.dim()} dimensions" if isinstance(x, torch.Tensor) else type(x).__name__
            fix = "fp64, fp32, fp16 or bf16, 2-d"
            raise ArgumentError(f"{name} is not a matrix of floating-point numbers: {what}", fix=fix)
    if a.dtype != b.dtype or a.device != b.device:
        raise ArgumentError(f"a is {a.dtype} on {a.device}, b {b.dtype} on {b.device}", fix="one type, one device")
    if a.shape[-1] != b.shape[-2]:
        raise ArgumentError(f"a is {tuple(a.shape)}, b {tuple(b.shape)}", why="a's columns are not b's rows")
    check_choice("precision", precision, PRECISIONS)
    check_choice("accumulate", accumulate, ACCUMULATES)


# -- the operator that torch sees -----------------------------------------------------------------------------------


def _run(a: torch.Tensor, b: torch.Tensor, *options: Any) -> torch.Tensor:
    """Call the operator, or its function if nothing observes it: an operator's first call imports the compiler."""
    real = a.is_cpu or a.is_cuda  # a meta tensor has no product to run
    if real and is_unobserved(a, b) and not needs_gradient(a, b):
        return _multiply(a, b, *options)
    return _product(a, b, *options)


def _multiply(
    a: torch.Tensor, b: torch.Tensor, precision: str, accumulate: str, out_dtype: torch.dtype, backward: str
) -> torch.Tensor:
    """Compute one product or a batch of them: (m, k) by (k, n), or (batch, m, k) by (batch, k, n)."""
    with without_autocast(a):
        if precision in ("fp8", "fp8_row"):
            if a.dim() == 3:
                each = [_multiply_fp8(x, y, precision, accumulate, out_dtype) for x, y in zip(a, b, strict=True)]
                return torch.stack(each) if each else a.new_empty((0, a.shape[1], b.shape[2]), dtype=out_dtype)
            return _multiply_fp8(a, b, precision, accumulate, out_dtype)
        if a.device.type == "cuda":
            return _multiply_on_cuda(a, b, precision, accumulate, out_dtype)
        (left, left_scale), (right, right_scale) = cast(a, precision), cast(b, precision)
        wide = torch.float64 if precision == "fp64" else torch.float32
        with set_tf32(False):
            c = torch.matmul(left.to(wide), right.to(wide))
        if left_scale is not None and right_scale is not None:
            c = c * left_scale * right_scale
        return c.to(out_dtype)


lowprec_mm = torch.library.custom_op("tessera::lowprec_mm", _multiply, mutates_args=())


@lowprec_mm.register_fake
def _(a: Any, b: Any, precision: str, accumulate: str, out_dtype: Any, backward: str) -> Any:
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=out_dtype)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    a, b, precision, accumulate, _, backward = inputs
    ctx.save_for_backward(a, b)
    # A tolerance may have chosen fp8's fast sums, and looked at fp8 only: split sums in 16 bits were not asked for.
    ctx.options = (backward, accumulate if backward == precision else "fp32")


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (a, b), (precision, accumulate) = ctx.saved_tensors, ctx.options
    grad = grad.to(torch.promote_types(grad.dtype, a.dtype))
    wide_a, wide_b = a.to(grad.dtype), b.to(grad.dtype)
    to_a = to_b = None
    if ctx.needs_input_grad[0]:
        to_a = _product(grad, wide_b.mT, precision, accumulate, a.dtype, precision)
    if ctx.needs_input_grad[1]:
        to_b = _product(wide_a.mT, grad, precision, accumulate, b.dtype, precision)
    return to_a, to_b, None, None, None, None


_product = make_differentiable(lowprec_mm, _save, _backward, "matmul, gemm or linear", "a precision or tolerance")


# -- fp8 ------------------------------------------------------------------------------------------------------------


def _multiply_fp8(a: torch.Tensor, b: torch.Tensor, precision: str, accumulate: str, out: torch.dtype) -> torch.Tensor:
    by_row = precision == "fp8_row"
    m, n = a.shape[0], b.shape[1]
    if min(m, n, a.shape[1]) == 0:
        return a.new_zeros((m, n), dtype=out)
    native = multiplies_fp8(a.device)
    (left, left_scale), (right, right_scale) = _cast_operands(a, b, by_row, native)
    written = out if out in (torch.float32, torch.bfloat16, torch.float16) else torch.float32
    if native and not by_row:
        c = _scaled_mm(left, right, left_scale.reshape(()), right_scale.reshape(()), accumulate, written)
    elif native and has_row_scaling(a.device, written):
        c = _scaled_mm(left, right, left_scale[:, None], right_scale[None, :], accumulate, written)
    elif native:
        one = torch.ones((), device=a.device, dtype=torch.float32)
        # A row's scale could overflow an fp16 result before the scale is applied, so those results are wider.
        c = _scaled_mm(left, right, one, one, accumulate, torch.float32 if out == torch.float16 else written)
        c = c[:m, :n] * left_scale[:m, None] * right_scale[None, :n]
    else:
        exact = torch.bfloat16 if a.device.type == "cuda" else torch.float32  # both hold every e4m3 value
        c = multiply_wide(left.to(exact), right.mT.to(exact), torch.float32)
        c = c * (left_scale[:, None] if by_row else left_scale) * right_scale
    return c[:m, :n].to(out).contiguous()


def _scaled_mm(left: Any, right: Any, left_scale: Any, right_scale: Any, accumulate: str, out: torch.dtype) -> Any:
    fast = accumulate == "fast"
    return torch._scaled_mm(left, right.mT, scale_a=left_scale, scale_b=right_scale, out_dtype=out, use_fast_accum=fast)


def _cast_operands(a: torch.Tensor, b: torch.Tensor, by_row: bool, native: bool) -> list[Any]:
    """Return left and right in fp8, the right one transposed; a prepared weight is not cast again."""
    pad = (_ALIGN, _ALIGN) if native else (1, 1)
    prepared = find_prepared(b, by_row)
    fresh, last = ([a, b.mT], []) if prepared is None else ([a], [prepared.refresh(b, by_row, pad)])
    if native and a.is_cuda and not by_row and a.dtype != torch.float64:
        with contextlib.suppress(MissingExtra):
            from .kernels.guessed_cast import cast_by_guess

            return [*cast_by_guess(fresh, pad), *last]
    return [*(quantize(x, "fp8", by_row, pad) for x in fresh), *last]


def has_row_scaling(device: torch.device, out: torch.dtype) -> bool:
    """Return whether a device's product itself applies the scales of rows and columns before it writes its result."""
    return multiplies_fp8(device) and _try_row_scaling(device, out)


@functools.cache
def _try_row_scaling(device: torch.device, out: torch.dtype) -> bool:
    # cuBLAS does it from 12.9 and compute capability 9.0 on, into every type. Otherwise torch has kernels of its own
    # for some architectures, most versions of which write only bf16. No API tells what a build has, so a small product
    # is tried.
    values = torch.ones((_PROBE, _PROBE), device=device, dtype=torch.float32).to(torch.float8_e4m3fn)
    scale = torch.ones((_PROBE,), device=device, dtype=torch.float32)
    try:
        _scaled_mm(values, values, scale[:, None], scale[None, :], "fast", out)
    except torch.OutOfMemoryError:  # not a property of the build, so it is not remembered
        raise
    except (RuntimeError, ValueError):  # torch's checks raise either
        return False
    return True


# -- the other formats ----------------------------------------------------------------------------------------------


def _multiply_on_cuda(
    a: torch.Tensor, b: torch.Tensor, precision: str, accumulate: str, out: torch.dtype
) -> torch.Tensor:
    if precision in ("tf32", "fp32", "fp64"):
        wide = STORED_AS[precision]
        with set_tf32(precision == "tf32"):
            return torch.matmul(a.to(wide), b.to(wide)).to(out)
    if precision == "fp16" and a.dtype != torch.float16 and not has_wide_results():
        # an fp16 result could overflow; tf32 rounds to the same precision
        return _multiply_on_cuda(a, b, "tf32", accumulate, out)
    (left, left_scale), (right, right_scale) = cast(a, precision), cast(b, precision)
    scale = None if left_scale is None or right_scale is None else left_scale * right_scale
    written = out if scale is None and out in (torch.bfloat16, torch.float16) else torch.float32
    with force_fp32_sums(precision) if accumulate == "fp32" else contextlib.nullcontext():
        c = multiply_wide(left, right, written)
    return (c if scale is None else c * scale).to(out)


def has_wide_results() -> bool:
    """Return whether torch can write the fp32 sums of 16-bit operands: `out_dtype`, from 2.8 on."""
    return hasattr(torch.ops.aten.mm, "dtype")


def multiply_wide(left: torch.Tensor, right: torch.Tensor, out: torch.dtype) -> torch.Tensor:
    """Multiply 16-bit operands; fp32 sums are not rounded if `out` is wider and torch can write them."""
    if left.device.type != "cuda":
        return torch.matmul(left.float(), right.float()).to(out)
    if left.dtype == out:
        return torch.matmul(left, right)
    if out == torch.float32 and has_wide_results():
        multiply = torch.mm if left.dim() == 2 else torch.bmm
        return multiply(left, right, out_dtype=torch.float32)
    return torch.matmul(left, right).to(out)
