"""What a calibration measures: a few kernels for each group, and two small networks that are bound by the host.

A point makes the same callable and inputs on any device: on "meta" to be predicted, on "cuda" to be measured. Operands
are random, as the energy constants assume (zeros draw 40% less).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ..device import Device
from .calibration import LIMIT
from .kernel_time import chip

Call = tuple[Callable[..., Any], tuple[Any, ...]]
Shape = tuple[int, ...]

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16} | {
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
_MIB = 1 << 20
# Tensors stay below this, so that a card of 8 GB can be calibrated too.
_LARGEST_BYTES = 768 * _MIB

# (m, n, k): square, the two products of a transformer's MLP at many and at few tokens, a decode step's.
_PRODUCTS = ((4096, 4096, 4096), (8192, 3072, 768), (2048, 1024, 4096), (512, 4096, 1024), (16, 4096, 4096))


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPoint:
    """A callable to compare; `make(device)` returns it with its inputs. `tf32` lets fp32 products use TF32.

    `host_share` is what its host takes of what the model of hosts says, where whole models take all of it.
    """

    name: str
    group: str
    make: Callable[[str], Call]
    tf32: bool = False
    host_share: float = 1.0

    @contextlib.contextmanager
    def set_tf32(self) -> Iterator[None]:
        """Set torch's switch for TF32 as this point needs it, and restore it afterwards."""
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


def kernel_points(device: Device) -> list[CalibrationPoint]:
    """Single operators for every group that the chip supports."""
    half, cache = half_of(device), chip(device).cache_bytes
    points = [_product(p, *size, f"gemm.{p}") for p in precisions(device) for size in _PRODUCTS]
    points += [*_copies(cache, half), *_attention(half), *_elementwise(cache, half), *_norms(half), *_reductions(half)]
    return [*points, *_convolutions(half)]


def precisions(device: Device) -> list[str]:
    """Formats of a matrix product that the chip has units for and torch has kernels for."""
    return [*(p for p in ("bf16", "fp16", "tf32", "fp8") if p in device.matrix), "fp32"]


def half_of(device: Device) -> str:
    """The 16-bit format the other points run in; fp32 where the chip has none."""
    return next((p for p in ("bf16", "fp16") if device.peak(p) is not None), "fp32")


def limit_point(device: Device) -> CalibrationPoint:
    """The product that draws the most power: large, in 16 bits."""
    return _product(half_of(device), 8192, 8192, 8192, LIMIT)


def repeat(fn: Callable[..., Any], times: int) -> Callable[..., Any]:
    """A callable that calls `fn` so many times, so that a short kernel fills a graph."""
    if times == 1:
        return fn

    def many(*inputs: Any) -> None:
        for _ in range(times):
            fn(*inputs)

    return many


def _random(shape: Shape, precision: str, device: str) -> torch.Tensor:
    if precision == "fp8":
        return torch.randn(shape, device=device, dtype=torch.bfloat16).to(DTYPES[precision])
    return torch.randn(shape, device=device, dtype=DTYPES[precision])


def _of(fn: Callable[..., Any], precision: str, *shapes: Shape) -> Callable[[str], Call]:
    return lambda device: (fn, tuple(_random(shape, precision, device) for shape in shapes))


def _point(name: str, group: str, fn: Callable[..., Any], precision: str, *shapes: Shape) -> CalibrationPoint:
    return CalibrationPoint(name=name, group=group, make=_of(fn, precision, *shapes))


# -- matrix products ----------------------------------------------------------------------------------------------


def _product(precision: str, m: int, n: int, k: int, group: str) -> CalibrationPoint:
    make = _of(F.linear, precision, (m, k), (n, k))
    if precision == "fp8":
        make = functools.partial(_fp8, m, n, k)
    return CalibrationPoint(name=f"{m}x{n}x{k} {precision}", group=group, make=make, tf32=precision == "tf32")


def _fp8(m: int, n: int, k: int, device: str) -> Call:
    def product(x: torch.Tensor, w: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    operands = _random((m, k), "fp8", device), _random((n, k), "fp8", device)
    return product, (*operands, torch.ones((), device=device))


def _attention(half: str) -> list[CalibrationPoint]:
    sizes = [("full", 32, 12, 512, 512, 64), ("full", 4, 16, 2048, 2048, 64)]
    sizes += [("causal", 2, 32, 2048, 2048, 128), ("full", 16, 32, 1, 4096, 128)]
    points = []
    for which, b, h, q, kv, d in sizes:
        fn = functools.partial(F.scaled_dot_product_attention, is_causal=which == "causal")
        name = f"attention {which} {b}x{h}x{q}/{kv}x{d} {half}"
        points.append(_point(name, "attention", fn, half, (b, h, q, d), (b, h, kv, d), (b, h, kv, d)))
    return points


def _convolutions(half: str) -> list[CalibrationPoint]:
    sizes = [(half, 64, 128, 128, 28, 3), (half, 64, 256, 64, 56, 1), (half, 32, 512, 512, 14, 3)]
    sizes += [("fp32", 32, 64, 64, 56, 3), ("fp32", 32, 256, 64, 56, 1)]
    return [_convolution(*size) for size in sizes]


def _convolution(precision: str, batch: int, inputs: int, outputs: int, size: int, window: int) -> CalibrationPoint:
    layout = torch.contiguous_format if precision == "fp32" else torch.channels_last

    def make(device: str) -> Call:
        x = _random((batch, inputs, size, size), precision, device).to(memory_format=layout)
        w = _random((outputs, inputs, window, window), precision, device).to(memory_format=layout)
        return functools.partial(F.conv2d, padding=window // 2), (x, w)

    name = f"conv {window}x{window} {inputs}->{outputs} {batch}x{size}x{size} {precision}"
    return CalibrationPoint(name=name, group="conv", make=make)


# -- kernels that move data ------------------------------------------------------------------------------------------


def _sizes(cache_bytes: float, *shares: float) -> list[int]:
    """Bytes as shares of the last-level cache: well inside it or far beyond, never at its edge."""
    return [int(min(_LARGEST_BYTES, max(_MIB / 4, s * cache_bytes)) // 4096) * 4096 for s in shares]


def _copies(cache_bytes: float, half: str) -> list[CalibrationPoint]:
    """Plain copies (a memcpy), and the copies that models make: to another order, another format, or side by side."""
    # One plain size within the cache and one beyond: more would add nothing new, and would outweigh the others.
    cases: list[tuple[str, Any, tuple[Shape, ...]]] = [
        (f"copy {size / _MIB:.3g} MiB", torch.clone, ((size // DTYPES[half].itemsize,),))
        for size in _sizes(cache_bytes, 1 / 8, 6)
    ]
    cases += [
        ("transpose 4096x4096", lambda x: x.t().contiguous(), ((4096, 4096),)),
        ("heads 32x512x12x64", lambda x: x.transpose(1, 2).contiguous(), ((32, 512, 12, 64),)),
        ("cast 8192x4096", lambda x: x.double() if x.dtype == torch.float32 else x.float(), ((8192, 4096),)),
        ("cat 2 of 8192x2048", lambda x, y: torch.cat((x, y), -1), ((8192, 2048),) * 2),
    ]
    return [_point(f"{name} {half}", "copy", fn, half, *shapes) for name, fn, shapes in cases]


def _elementwise(cache_bytes: float, half: str) -> list[CalibrationPoint]:
    small, middle, large = _sizes(cache_bytes, 1 / 12, 3, 6)
    cases = [("gelu", F.gelu, half, 1, large), ("add", torch.add, half, 2, middle)]
    cases += [("mul", torch.mul, "fp32", 2, middle), ("silu", F.silu, half, 1, small)]
    cases += [("relu", torch.relu, "fp32", 1, small)]
    points = []
    for name, fn, p, operands, size in cases:
        shapes = [(size // DTYPES[p].itemsize,)] * operands
        points.append(_point(f"{name} {size / _MIB:.3g} MiB {p}", "elementwise", fn, p, *shapes))
    return points


def _norms(half: str) -> list[CalibrationPoint]:
    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, weight.shape, weight, bias)

    cases = ((8192, 768, half), (32768, 1024, half), (16384, 4096, half), (16384, 1024, "fp32"))
    return [
        _point(f"layer_norm {rows}x{width} {p}", "norm", norm, p, (rows, width), (width,), (width,))
        for rows, width, p in cases
    ]


def _reductions(half: str) -> list[CalibrationPoint]:
    cases: list[tuple[str, Callable[..., Any], int, int, str]] = [
        ("sum", lambda x: x.sum(-1), 65536, 1024, half),
        ("amax", lambda x: x.amax(-1), 16384, 4096, half),
        ("mean", lambda x: x.mean(-1), 32768, 2048, "fp32"),
        ("mean", lambda x: x.mean(-1), 8192, 1024, half),
        ("column sum", lambda x: x.sum(0), 16384, 2048, half),
    ]
    return [_point(f"{name} {rows}x{width} {p}", "reduce", fn, p, (rows, width)) for name, fn, rows, width, p in cases]


# -- the host -----------------------------------------------------------------------------------------------------


def _conv_chain() -> nn.Module:
    """Convolution, batch norm, ReLU, repeated on an image of a few pixels: many launches, little work."""
    layers = ((nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True)) for _ in range(12))
    return nn.Sequential(*(layer for group in layers for layer in group))


class Block(nn.Module):  # type: ignore[misc]  # torch is not followed
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and MLP, each with its residual."""
        b, s, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, w)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def host_points(device: Device) -> list[CalibrationPoint]:
    """Two networks that are bound by the host on any GPU.

    A few lines of Python that are called again and again stay in the host's caches, those of whole models do not. The
    shares were measured beside an H200, in turns with 13 models (results/earlier/host_turns_1.json). The session in
    which the calibration was then checked found 0.72 and 0.74 (results/host_turns.json).
    """
    half = half_of(device)
    chain = _network("conv-bn-relu chain", _conv_chain, (1, 16, 8, 8), "fp32", host_share=0.75)

    def blocks() -> nn.Module:  # too narrow to keep a GPU busy
        return nn.Sequential(*(Block(64, 4) for _ in range(6)))

    return [chain, _network("transformer blocks", blocks, (1, 16, 64), half, host_share=0.83)]


def _network(
    name: str, kind: Callable[[], nn.Module], shape: Shape, precision: str, *, host_share: float
) -> CalibrationPoint:
    def make(device: str) -> Call:
        with torch.device(device):
            net = kind().to(DTYPES[precision]).eval()
        return net, (_random(shape, precision, device),)

    return CalibrationPoint(name=f"{name} {precision}, eager", group="host", make=make, host_share=host_share)


def copies_to_fill(seconds: float, wanted_s: float = 1e-3, most: int = 48) -> int:
    """How often a kernel is repeated in one graph, so that the cost of a replay does not matter."""
    return max(1, min(most, math.ceil(wanted_s / max(seconds, 1e-9))))
