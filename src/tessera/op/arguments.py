"""The checks that all operators make of their arguments: cheap for good arguments; an error names the bad one."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Collection
from typing import Any

import torch

from ..errors import ArgumentError, check_choice, is_integer
from ..stream import Stream
from ..stream import on as stream_on

PRECISION_OF = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
}
"""The name of a number format by its dtype."""

HALVES = (torch.bfloat16, torch.float16)
"""The formats of 16 bits."""


_HERE = contextlib.nullcontext()


def use_stream(stream: Stream | None, *named: Any) -> contextlib.AbstractContextManager[None]:
    """Return `stream.on(stream, ...)`; nothing is done, at no cost, if no stream was given."""
    return _HERE if stream is None else stream_on(stream, *named)


def check_tensors(
    op: str,
    *,
    one_dtype: bool = True,
    floating: bool = True,
    real: bool = False,
    optional: Collection[str] = ("bias",),
    **named: Any,
) -> None:
    """Check that each is a tensor (`optional` ones may be None), all on one device and of one floating dtype.

    Complex counts as floating, except where `real` numbers are asked for.
    """
    first = where = None
    for name, value in named.items():
        if value is None and name in optional:
            continue
        if value is None:
            raise ArgumentError(f"op.{op}: {name} is None", why="it is needed", fix=f"a tensor for {name}")
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"op.{op}: {name} is a {type(value).__name__}, not a tensor", fix=f"torch.as_tensor({name})"
            )
        if first is None:
            first, where = value, name
            if floating and not value.dtype.is_floating_point and not value.dtype.is_complex:
                raise _dtype(op, name, value, "a floating dtype is needed", f"{name}.float()")
            if real and value.dtype.is_complex:
                raise _dtype(
                    op, name, value, "it is defined for real numbers", f"{name}.real, {name}.imag or {name}.abs()"
                )
            continue
        if value.device != first.device:
            raise ArgumentError(
                f"op.{op}: {name} is on {value.device}, {where} on {first.device}",
                why="an operator runs on one device",
                fix=f"{name}.to({str(first.device)!r})",
            )
        if one_dtype and value.dtype is not first.dtype:
            raise _dtype(op, name, value, f"{where} is {first.dtype}", f"{name}.to({first.dtype})")


def _dtype(op: str, name: str, value: Any, why: str, fix: str) -> ArgumentError:
    return ArgumentError(f"op.{op}: {name} is {value.dtype}", why=why, fix=fix)


def check_product(op: str, a: Any, b: Any) -> None:
    """Check that torch.matmul can multiply `a` and `b`: one device, one dtype, and inner dimensions that agree."""
    # The usual case comes first, in as few calls as possible: this runs before every product of a program.
    try:
        fits = a.dtype is b.dtype and a.device == b.device and a.shape[-1] == b.shape[-2 if b.ndim > 1 else 0]
    except (AttributeError, IndexError):
        fits = False
    if fits:
        if a.ndim > 2 and b.ndim > 2 and a.shape[:-2] != b.shape[:-2]:
            broadcast_batches(op, a, b)
        return
    check_tensors(op, one_dtype=not is_autocast(a), a=a, b=b)
    for name, value in (("a", a), ("b", b)):
        if value.ndim == 0:
            raise ArgumentError(
                f"op.{op}: {name} has no dimension", why="a product needs at least vectors", fix="use *"
            )
    inner = b.shape[-2 if b.ndim > 1 else 0]
    if a.shape[-1] == inner:  # they have two dtypes, which autocast will make one
        return
    fix = "make the two inner dimensions equal"
    if b.ndim > 1 and a.shape[-1] == b.shape[-1]:
        fix = "b.mT would fit"
    elif a.ndim > 1 and a.shape[-2] == inner:
        fix = "a.mT would fit"
    raise ArgumentError(
        f"op.{op}: a is {format_shape(a)}, b is {format_shape(b)}",
        why=f"the last dimension of a is {a.shape[-1]}, but the inner dimension of b is {inner}",
        fix=fix,
    )


def is_autocast(tensor: Any) -> bool:
    """Return whether torch's autocast is enabled on this tensor's device."""
    where = tensor.device.type if isinstance(tensor, torch.Tensor) else ""
    return where in ("cuda", "cpu") and bool(torch.is_autocast_enabled(where))


def cast_like_autocast(x: Any, *others: Any) -> tuple[Any, ...]:
    """Return tensors as torch's autocast would cast them for a product, if it is on for `x`; fp64 and None stay."""
    if not is_autocast(x):
        return x, *others
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(
        t if t is None or t.dtype is torch.float64 or not t.is_floating_point() else t.to(dtype) for t in (x, *others)
    )


def without_autocast(tensor: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a block without autocast on this tensor's device."""
    return torch.autocast(tensor.device.type, enabled=False) if is_autocast(tensor) else _HERE


def broadcast_batches(op: str, a: Any, b: Any) -> tuple[int, ...]:
    """Return what the leading dimensions of two stacks of matrices broadcast to."""
    if a.shape[:-2] == b.shape[:-2] or b.ndim < 3:
        return tuple(a.shape[:-2])
    try:
        return tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    except RuntimeError as e:
        raise ArgumentError(
            f"op.{op}: a is {format_shape(a)}, b is {format_shape(b)}",
            why="their leading dimensions do not broadcast",
            fix="equal sizes, or 1 in one of them",
        ) from e


def can_broadcast(value: Any, to: tuple[int, ...]) -> bool:
    """Return whether a tensor broadcasts to a shape."""
    short = len(to) - value.ndim
    # Not `in (1, whole)`: torch.compile finds no number there that is equal to one of its symbols.
    sizes = zip(value.shape, to[short:], strict=True)
    return short >= 0 and all(size == 1 or size == whole for size, whole in sizes)  # noqa: PLR1714


def check_addend(op: str, a: Any, c: Any, to: tuple[int, ...]) -> None:
    """Check that `c` can be added to a product of `a` that has the shape `to`."""
    try:  # the usual case
        if c.dtype is a.dtype and c.device == a.device and (c.shape == to or c.shape == to[-1:]):
            return
    except AttributeError:
        pass
    check_tensors(op, one_dtype=not is_autocast(a), floating=False, a=a, c=c)
    if not can_broadcast(c, to):
        raise shape_error(op, "c", c, f"the result is {'x'.join(map(str, to)) or 'a scalar'}", "reshape c")


def check_factors(op: str, a: Any, **named: Any) -> list[Any]:
    """Check numbers to multiply by, and return them.

    For integer tensors they must be whole: torch would truncate them.
    """
    checked = []
    integers = not (a.dtype.is_floating_point or a.dtype.is_complex)
    for name, value in named.items():
        scalar = isinstance(value, (numbers.Number, torch.SymFloat, torch.SymInt))
        if not scalar and not (isinstance(value, torch.Tensor) and value.ndim == 0):
            raise ArgumentError(f"op.{op}: {name}={value!r}", fix=f"{name} is a number")
        if integers and not _has_no_fraction(value):
            raise ArgumentError(f"op.{op}: {name}={value!r}", why=f"a is {a.dtype}", fix="a whole number, or a.float()")
        checked.append(int(value) if integers else value)
    return checked


def _has_no_fraction(value: Any) -> bool:
    try:
        return bool(value == int(value))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # complex, NaN, infinite
        return False


def to_pair(op: str, name: str, value: Any, least: int) -> tuple[int, int]:
    """Return one int for both directions as two, or two ints as they are."""
    if type(value) is int and value >= least:
        return value, value
    both = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(both) != 2 or any(not is_integer(v) or v < least for v in both):
        raise ArgumentError(f"op.{op}: {name}={value!r}", fix=f"{name} is an int of at least {least}, or two of them")
    return int(both[0]), int(both[1])


def find_padding(
    op: str, weight: Any, padding: Any, dilation: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the zeros before (top, left) and after (bottom, right) an image, as torch's conv2d places them."""
    if not isinstance(padding, str):
        both = to_pair(op, "padding", padding, 0)
        return both, both
    check_choice(f"op.{op}: padding", padding, ("same", "valid"))
    reach = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, weight.shape[-2:], strict=True)]
    before = (reach[0] // 2, reach[1] // 2)
    return before, (reach[0] - before[0], reach[1] - before[1])


def check_convolution(op: str, x: Any, w: Any, bias: Any, groups: Any, w_name: str = "weight") -> None:
    """Check that images (n, channels, height, width) fit filters (out, channels / groups, height, width)."""
    check_tensors(op, one_dtype=not is_autocast(x), **{"x": x, w_name: w, "bias": bias})
    if x.ndim not in (3, 4):
        raise shape_error(op, "x", x, "images are (n, channels, height, width)", "x.unsqueeze or x.reshape")
    if w.ndim != 4:
        why = "filters are (out, channels / groups, height, width)"
        raise shape_error(op, w_name, w, why, f"{w_name}.reshape")
    if not is_integer(groups) or groups < 1 or w.shape[0] % groups:
        raise ArgumentError(f"op.{op}: groups={groups!r}", fix=f"groups divides the {w.shape[0]} filters")
    if x.shape[-3] != w.shape[1] * groups:
        raise ArgumentError(
            f"op.{op}: x is {format_shape(x)}, {w_name} is {format_shape(w)}",
            why=f"{w_name} takes {w.shape[1]} channels in each of {groups} groups",
            fix=f"x has {w.shape[1] * groups} channels, or other groups",
        )
    if bias is not None and bias.shape != w.shape[:1]:
        raise shape_error(op, "bias", bias, f"there are {w.shape[0]} filters", "one value for each filter")


def shape_error(op: str, name: str, value: Any, why: str, fix: str) -> ArgumentError:
    """Return the error for an argument of the wrong shape."""
    return ArgumentError(f"op.{op}: {name} is {format_shape(value)}", why=why, fix=fix)


def format_shape(tensor: Any) -> str:
    """Return a tensor's shape as a person writes it: 4x8."""
    return "x".join(map(str, tensor.shape)) or "a scalar"
