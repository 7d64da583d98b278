"""Fourier transforms, and convolution through them: conv2d's result at a cost that hardly grows with the kernel.

::

    x ── pad to a fast size ── rfft2 ──┐
                                       ├── product at each frequency, summed over channels ── irfft2 ── cut ── + bias
    w ── dilate, pad ──────── rfft2 ───┘   (conjugate: conv2d correlates)

`spectral_wins` says, from the model of `predict`, where that is cheaper: large kernels, depthwise ones first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812

from ..errors import ArgumentError, check_choice, is_integer
from ..stream import Stream
from ..stream import on as stream_on
from .arguments import HALVES, check_convolution, check_tensors, find_padding, format_shape, to_pair

if TYPE_CHECKING:
    from ..device import Device

_NORMS = (None, "forward", "backward", "ortho")


def fft(
    x: Any, dims: int | Sequence[int] = -1, *, norm: str | None = None, stream: Stream | None = None
) -> torch.Tensor:
    """Return the discrete Fourier transform over one or several dimensions, complex.

    Half precision is computed in fp32.
    """
    return _transform("fft", torch.fft.fftn, x, dims, norm, stream)


def ifft(
    x: Any, dims: int | Sequence[int] = -1, *, norm: str | None = None, stream: Stream | None = None
) -> torch.Tensor:
    """Return the inverse of `fft`, complex; take `.real` if the original was real."""
    return _transform("ifft", torch.fft.ifftn, x, dims, norm, stream)


def _transform(op: str, run: Any, x: Any, dims: Any, norm: Any, stream: Stream | None) -> torch.Tensor:
    check_tensors(op, x=x)
    over = tuple(dims) if isinstance(dims, Sequence) else (dims,)
    if not x.ndim:
        raise ArgumentError(
            f"op.{op}: x is {format_shape(x)}", why="there is no dimension to transform", fix="x.reshape(1)"
        )
    if not over or any(not is_integer(d) or not -x.ndim <= d < x.ndim for d in over):
        raise ArgumentError(
            f"op.{op}: dims={dims!r}, x is {format_shape(x)}", fix=f"dims between {-x.ndim} and {x.ndim - 1}"
        )
    if len({d % x.ndim for d in over}) < len(over):
        raise ArgumentError(f"op.{op}: dims={dims!r} names a dimension twice", fix="each once")
    if not all(x.shape[d] for d in over):
        raise ArgumentError(f"op.{op}: x is {format_shape(x)}, dims={dims!r}", why="of no points", fix="at least one")
    if norm not in _NORMS:
        raise ArgumentError(f"op.{op}: norm={norm!r}", fix='norm is None, "forward", "backward" or "ortho"')
    with stream_on(stream, x):
        # cuFFT has half precision for powers of two only, and CPU libraries have none.
        x = x.float() if x.dtype in HALVES else x
        if x.dtype.itemsize == 1:
            raise ArgumentError(f"op.{op}: x is {x.dtype}", why="fp8 has no transforms", fix="x.float()")
        if not x.numel():  # there are no rows; MKL refuses that
            return torch.complex(x, x) if x.is_floating_point() else x.clone()
        result: torch.Tensor = run(x, dim=over, norm=norm)
        return result


def spectral_conv2d(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    stream: Stream | None = None,
) -> torch.Tensor:
    """Return conv2d with stride 1, by Fourier transforms: x (N, C, H, W) or (C, H, W), w (O, C / groups, kh, kw).

    For half inputs, transforms and products are in fp32 (the result is rounded once); for fp64, in fp64. The error is
    that of fp32, relative to the largest outputs rather than to each output. Autograd is torch's.
    """
    check_convolution("spectral_conv2d", x, w, bias, groups, "w")
    if x.is_complex():
        why = "its transforms are of real images"
        raise ArgumentError(f"op.spectral_conv2d: x is {x.dtype}", why=why, fix="op.conv2d")
    dilated = to_pair("spectral_conv2d", "dilation", dilation, 1)
    before, after = find_padding("spectral_conv2d", w, padding, dilated)
    _check_reach(x, w, dilated, before, after)
    with stream_on(stream, x, w, bias):
        if not x.numel():  # MKL refuses transforms of nothing
            return F.conv2d(x, w, bias, padding=padding, dilation=dilated, groups=groups)
        out = _convolve(x if x.ndim == 4 else x[None], w, dilated, before, after, groups)
        if bias is not None:
            out = out + bias.to(out.dtype)[:, None, None]
        out = out.to(x.dtype)
        return out if x.ndim == 4 else out[0]


def _check_reach(x: Any, w: Any, dilation: Any, before: Any, after: Any) -> None:
    for i in (0, 1):
        reach, padded = dilation[i] * (w.shape[2 + i] - 1) + 1, x.shape[-2 + i] + before[i] + after[i]
        if not 0 < reach <= padded:
            raise ArgumentError(
                f"op.spectral_conv2d: w reaches over {reach}, x and its padding have {padded}", fix="more padding="
            )


def _convolve(x: Any, w: Any, dilation: Any, before: Any, after: Any, groups: int) -> torch.Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    padded = [x.shape[2 + i] + before[i] + after[i] for i in (0, 1)]
    # A circle of the padded length is enough: there is no output where the kernel would wrap around.
    size = [fast_size(n) for n in padded]
    top, left = before
    x = F.pad(x.to(wide), (left, size[1] - x.shape[3] - left, top, size[0] - x.shape[2] - top))
    kernel = w.to(wide)
    if dilation != (1, 1):
        reach = [dilation[i] * (w.shape[2 + i] - 1) + 1 for i in (0, 1)]
        kernel = kernel.new_zeros(*w.shape[:2], *reach)
        kernel[..., :: dilation[0], :: dilation[1]] = w.to(wide)
    xs, ws = torch.fft.rfft2(x), torch.fft.rfft2(kernel, s=size).conj()
    out = torch.fft.irfft2(_products(xs, ws, groups), s=size)
    rows, columns = (padded[i] - dilation[i] * (w.shape[2 + i] - 1) for i in (0, 1))
    return out[..., :rows, :columns]


def _products(xs: Any, ws: Any, groups: int) -> torch.Tensor:
    """Sum over the channels of a group, at each frequency."""
    batch, channels, *plane = xs.shape
    xs = xs.reshape(batch, groups, channels // groups, *plane)
    ws = ws.reshape(groups, ws.shape[0] // groups, channels // groups, *plane)
    if channels == groups:  # depthwise: there is nothing to sum, and products of 1 by 1 matrices would be a waste
        return (xs * ws[None, :, :, 0]).reshape(batch, -1, *plane)
    return torch.einsum("bgihw,goihw->bgohw", xs, ws).reshape(batch, -1, *plane)


# -- whether it is cheaper ------------------------------------------------------------------------------------------

MARGIN = 0.75
"""The spectral way must take less than this share of the direct way's joules and seconds.

`predict` counts transforms by the bytes they move, which was not fitted on a GPU (`benchmarks/device/ops_streams.py`).
"""
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class SpectralVerdict(NamedTuple):
    """Which way is cheaper, and what each takes; true if the spectral one wins."""

    wins: bool
    reason: str
    direct_s: float
    direct_j: float
    spectral_s: float
    spectral_j: float

    def __bool__(self) -> bool:
        return self.wins


def spectral_wins(
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    *,
    on: str | Device = "h200",
    dtype: str = "bf16",
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> SpectralVerdict:
    """Return whether `spectral_conv2d` is modelled to win: a quarter less joules and seconds than conv2d, forward.

    >>> op.spectral_wins((8, 256, 64, 64), (256, 1, 31, 31), padding=15, groups=256)
    """
    x, w = tuple(map(int, x_shape)), tuple(map(int, w_shape))
    if len(x) != 4 or len(w) != 4 or min(*x, *w) < 1:
        raise ArgumentError(f"op.spectral_wins: x_shape={x}, w_shape={w}", fix="four sizes each: (N, C, H, W)")
    check_choice("op.spectral_wins: dtype", dtype, _DTYPES)
    from ..estimate.predict import predict
    from ..hardware import lookup

    device = lookup(on) if isinstance(on, str) else on
    operands = tuple(torch.empty(shape, dtype=_DTYPES[dtype], device="meta") for shape in (x, w))
    spectral_conv2d(*operands, padding=padding, dilation=dilation, groups=groups)  # checks the sizes
    found = []
    for convolve in (F.conv2d, spectral_conv2d):
        run = functools.partial(convolve, padding=padding, dilation=dilation, groups=groups)
        total = predict(run, operands, on=device, launch="graph", check_memory=False).total
        found += [total.time_s, total.energy_j]
    direct_s, direct_j, spectral_s, spectral_j = found
    wins = spectral_j < MARGIN * direct_j and spectral_s < MARGIN * direct_s
    reason = (
        f"modelled on {device.id}: conv2d {direct_j * 1e3:.3g} mJ in {direct_s * 1e6:.3g} us, "
        f"spectral {spectral_j * 1e3:.3g} mJ in {spectral_s * 1e6:.3g} us"
        + ("" if wins else f"; a win is less than {MARGIN:.0%} of both")
    )
    return SpectralVerdict(wins, reason, direct_s, direct_j, spectral_s, spectral_j)


def fast_size(n: int) -> int:
    """Return the next size from n up without prime factors other than 2, 3, 5 and 7, for which cuFFT has kernels."""
    while not _is_smooth(n):  # plain loops, which torch.compile follows; the next such size is never far
        n += 1
    return n


def _is_smooth(n: int) -> bool:
    for prime in (2, 3, 5, 7):
        while n % prime == 0:
            n //= prime
    return n == 1
