"""Whether a convolution is cheaper through Fourier transforms: both ways on the kernel models of `predict`.

The direct way is predicted as any conv2d. The spectral way is counted kernel by kernel as torch runs it: pad, a pass
over each direction for every transform, two changes of layout round the products, the products, cut. Transforms are
taken as kernels that move their data twice; that was not fitted on a GPU (`benchmarks/device/ops_streams.py` compares).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ArgumentError

if TYPE_CHECKING:
    from ..device import Device
    from ..estimate.kernel_time import Chip, KernelTime

MARGIN = 0.75
"""Of the direct way's joules and seconds the spectral one must take less than this: its own model is not fitted."""
_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


class Verdict(NamedTuple):
    """Which way is cheaper, and what each takes; true where the spectral one wins."""

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
) -> Verdict:
    """Whether `spectral_conv2d` is modelled to take at least a quarter less joules and seconds than conv2d, forward.

    >>> op.spectral_wins((8, 256, 64, 64), (256, 1, 31, 31), padding=15, groups=256)
    """
    x, w = tuple(map(int, x_shape)), tuple(map(int, w_shape))
    if len(x) != 4 or len(w) != 4 or min(*x, *w) < 1:
        raise ArgumentError(f"op.spectral_wins: x_shape={x}, w_shape={w}", fix="four sizes each: (N, C, H, W)")
    if dtype not in _BYTES:
        raise ArgumentError(f"op.spectral_wins: dtype={dtype!r}", fix=f"one of {', '.join(_BYTES)}")
    from ..hardware import lookup

    device = lookup(on) if isinstance(on, str) else on
    pads, holes = (v if isinstance(v, tuple) else (v, v) for v in (padding, dilation))
    direct_s, direct_j = _direct(device, x, w, dtype, pads, holes, groups)
    spectral_s, spectral_j = _spectral(device, x, w, dtype, pads, groups)
    wins = spectral_j < MARGIN * direct_j and spectral_s < MARGIN * direct_s
    reason = (
        f"modelled on {device.id}: conv2d {direct_j * 1e3:.3g} mJ in {direct_s * 1e6:.3g} us, "
        f"spectral {spectral_j * 1e3:.3g} mJ in {spectral_s * 1e6:.3g} us"
        + ("" if wins else f"; a win is less than {MARGIN:.0%} of both")
    )
    return Verdict(wins, reason, direct_s, direct_j, spectral_s, spectral_j)


def _direct(
    device: Device, x: tuple[int, ...], w: tuple[int, ...], dtype: str, pads: Any, holes: Any, groups: int
) -> tuple[float, float]:
    import torch

    from ..estimate.predict import predict

    kind = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    operands = (torch.empty(x, dtype=kind, device="meta"), torch.empty(w, dtype=kind, device="meta"))

    def conv(a: Any, b: Any) -> Any:
        return torch.nn.functional.conv2d(a, b, padding=pads, dilation=holes, groups=groups)

    total = predict(conv, operands, on=device, launch="graph", check_memory=False).total
    return total.seconds, total.joules


def _spectral(
    device: Device, x: tuple[int, ...], w: tuple[int, ...], dtype: str, pads: tuple[int, int], groups: int
) -> tuple[float, float]:
    from ..estimate.kernel_time import chip
    from ..estimate.power import DeviceWork, PowerModel
    from ..estimate.predict import GAP_S, replay_s

    kernels = _kernels(device, chip(device), x, w, dtype, pads, groups)
    gaps_s = len(kernels) * GAP_S["graph"]
    work = DeviceWork(idle_s=gaps_s + replay_s(gaps_s + sum(kernel.seconds for kernel in kernels)))
    for kernel in kernels:
        work = work + DeviceWork.of(kernel)
    found = PowerModel.from_device(device).estimate(work)
    return found.seconds, found.energy_j


def _kernels(
    device: Device, of: Chip, x: tuple[int, ...], w: tuple[int, ...], dtype: str, pads: tuple[int, int], groups: int
) -> list[KernelTime]:
    from ..estimate.gemm import gemm_time

    batch, channels, *plane = x
    rows, columns = (fast_size(n + 2 * p) for n, p in zip(plane, pads, strict=True))
    real, half = rows * columns, rows * (columns // 2 + 1)
    wide = 8 if dtype == "fp64" else 4
    each = channels // groups
    maps = (batch * channels, w[0] * w[1], batch * w[0])  # planes of x, w and the result

    def moved(family: str, elements: float, read: float, written: float) -> KernelTime:
        return _moved(of, family, elements, read, written)

    kernels = [  # pads of x and w, from their own dtype
        moved("copy.constant_pad_nd", n * real, n * area * _BYTES[dtype], n * real * wide)
        for n, area in ((maps[0], math.prod(plane)), (maps[1], w[2] * w[3]))
    ]
    for n in maps:  # a pass along the rows (real on one side), one along the columns
        kernels.append(moved("elementwise", n * real, n * real * wide, n * half * 2 * wide))
        kernels.append(moved("elementwise", n * half, n * half * 2 * wide, n * half * 2 * wide))
    if each == 1:
        kernels.append(
            moved("elementwise", maps[2] * half, (maps[0] + maps[1]) * half * 2 * wide, maps[2] * half * 2 * wide)
        )
    else:
        for n in maps:  # frequencies outermost for the products, and back
            kernels.append(moved("copy.transpose", n * half, n * half * 2 * wide, n * half * 2 * wide))
        # A complex product is four real ones of as many bytes: the same m and n, four times the k.
        precision = "fp64" if dtype == "fp64" else "fp32"
        kernels.append(gemm_time(device, batch, w[0] // groups, 4 * each, half * groups, precision, layout="nn"))
    out = maps[2] * math.prod(plane)
    kernels.append(moved("copy", out, out * wide, out * _BYTES[dtype]))
    return kernels


def _moved(of: Chip, family: str, elements: float, read: float, written: float) -> KernelTime:
    from ..estimate.cache import CACHE_SHARE
    from ..estimate.data_movement import DataMovement, movement_time

    total = read + written
    crossing = total if total > CACHE_SHARE * of.cache_bytes else 0.0
    # Blocks of 256 threads that take four elements each, as torch's own kernels.
    return movement_time(of, DataMovement(family, elements, total, crossing, max(1.0, elements / 1024), itemsize=4.0))


def fast_size(n: int) -> int:
    """The least size of at least n with no prime factors but 2, 3, 5 and 7, for which cuFFT has kernels (its guide)."""
    while not _smooth(n):  # plain loops, which torch.compile follows; among such sizes the next is never far
        n += 1
    return n


def _smooth(n: int) -> bool:
    for prime in (2, 3, 5, 7):
        while n % prime == 0:
            n //= prime
    return n == 1
