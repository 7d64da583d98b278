"""Seconds of convolutions: an implicit matrix product or a direct kernel, and the cost of the layout around it.

The physical part is a floor (the product by tiles at tensor-core speed, the bytes, the layout transforms). How far
cuDNN stays above it was learned from convolutions measured on an H200 (`benchmarks/device/record_convs.py`); other
chips use the same multiple of their floor.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..device import Device
from ..graph.ir import Op
from ..hardware import lookup
from ..joules import Floats
from .data_movement import DataMovement, movement_time
from .kernel_time import CALIBRATED, ELEMENT_BYTES, Chip, KernelTime, Trees, chip, load_fit

DATA = "h200_conv.json"
PASSES = ("forward", "data", "weight")


@dataclass(frozen=True, slots=True)
class Conv:
    """One pass of a convolution: `x` is what it reads forward, `w` its weight, `out` what it writes forward."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    out: tuple[int, ...]
    which: str
    groups: int
    stride: int
    dilation: int
    transposed: bool
    channels_last: bool
    precision: str

    @property
    def flops(self) -> float:
        """Floating-point operations of the pass: the same for each of the three."""
        points = prod(self.x[2:] if self.transposed else self.out[2:])
        return 2.0 * self.out[0] * points * prod(self.w)

    def product(self, pad: int = 1) -> tuple[int, int, int]:
        """(m, n, k) of the matrix product of one group, with its summed channels padded to a multiple of `pad`."""
        x, out, which = self.x, self.out, self.which
        if self.transposed:
            x, out, which = out, x, {"forward": "data", "data": "forward"}.get(which, which)
        taps, cin, cout = prod(self.w[2:]), x[1] // self.groups, out[1] // self.groups
        wide_in, wide_out = -(-cin // pad) * pad, -(-cout // pad) * pad
        if which == "data":
            return x[0] * prod(x[2:]), cin, wide_out * taps
        if which == "weight":
            return cout, wide_in * taps, out[0] * prod(out[2:])
        return out[0] * prod(out[2:]), cout, wide_in * taps

    def kernel_product(self) -> tuple[int, int, float]:
        """(m, n, k) as a kernel computes it: matrix units pad channels to 16 bytes, strided gradients skip zeros."""
        size = ELEMENT_BYTES.get(self.precision, 2.0)
        m, n, k = self.product(1 if self.without_matrix_units else max(1, round(16 / size)))
        if self.which == "weight":
            return max(1, m), n, k
        skipped = self.which == ("forward" if self.transposed else "data") and prod(self.w[2:]) > 1
        return max(1, m), max(1, n), k / self.stride ** len(self.w[2:]) if skipped else k

    @property
    def io_bytes(self) -> float:
        """Bytes of the input and the output."""
        return (prod(self.x) + prod(self.out)) * ELEMENT_BYTES.get(self.precision, 2.0)

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weight, which every pass reads or writes."""
        return prod(self.w) * ELEMENT_BYTES.get(self.precision, 2.0)

    @property
    def in_turn(self) -> bool:
        """Whether cuDNN runs the groups one after another: those it cannot pad, and channels-last ones."""
        return self._odd_groups and (self.channels_last or self._long_window)

    @property
    def padded(self) -> bool:
        """Whether cuDNN copies the groups into wider ones first."""
        return self._odd_groups and not self.in_turn

    @property
    def _odd_groups(self) -> bool:
        """Whether there are groups that cuDNN has no kernel for: it has them for widths of 4, 8, 16, ... only."""
        width = min(self.x[1], self.out[1]) // self.groups
        return self.groups > 1 and not self.depthwise and width & (width - 1) != 0

    @property
    def _long_window(self) -> bool:
        """Whether a window is longer than the 32 samples that CUTLASS's optimised iterators have bits for."""
        return max(self.w[2:]) > 32

    @property
    def without_matrix_units(self) -> bool:
        """Whether cuDNN multiplies 16-bit numbers on the vector units, with fp32 sums.

        So it does where no kernel of the matrix units fits: long windows (TF32 has another kernel for them), and the
        first layer over a video, whose channels do not fill 16 bytes.
        """
        video = len(self.x) > 4 and self.x[1] // self.groups < 8
        return self.precision in ("bf16", "fp16") and not self.depthwise and (video or self._long_window)

    @property
    def depthwise(self) -> bool:
        """Whether every channel is its own group."""
        return self.groups > 1 and self.groups == self.x[1]

    @property
    def kind(self) -> str:
        """By how well cuDNN's choice of a kernel is known: "grouped", "video", "odd" channels or "plain".

        For some groups, three dimensions and rows that are not of 16 bytes it falls back to kernels without matrix
        units, up to 50 times as slow, and no rule was found for when.
        """
        if self.groups > 1 and not self.depthwise:
            return "grouped"
        if len(self.x) > 4:
            return "video"
        return "odd" if (self.x[1] % 8 or self.out[1] % 8) and not self.depthwise else "plain"


def conv_time(device: Device, op: Op, precision: str, hbm_bytes: float | None) -> KernelTime:
    """A convolution forward, or the gradients that were asked for."""
    p = op.params
    which = ["forward"]
    if p["backward"]:
        needs = p.get("needs", (True, True, False))
        which = [name for name, wanted in zip(("data", "weight"), needs, strict=False) if wanted] or ["weight"]
    share = None if hbm_bytes is None else hbm_bytes / len(which)
    parts = [pass_time(device, conv_of(op, name, precision), share) for name in which]
    if p.get("bias") or (p["backward"] and len(p.get("needs", ())) > 2 and p["needs"][2]):
        parts.append(_bias_time(chip(device), op))
    return add_kernels(parts)


def conv_of(op: Op, which: str, precision: str) -> Conv:
    """One pass of an operator as a `Conv`."""
    p = op.params
    layout = any(t.channels_last for t in op.inputs[: 3 if p["backward"] else 2])
    groups, stride, dilation = (int(_first(p.get(name, 1))) for name in ("groups", "stride", "dilation"))
    shapes = tuple(p["x"]), tuple(p["w"]), tuple(p["out"])
    return Conv(*shapes, which, max(1, groups), stride, dilation, bool(p.get("transposed")), layout, precision)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) else value


def _bias_time(of: Chip, op: Op) -> KernelTime:
    """CuDNN leaves the bias to a separate kernel: added forward, summed over all but the channels backward."""
    p = op.params
    n, size = float(prod(p["out"])), ELEMENT_BYTES.get(op.precision, 2.0)
    if p["backward"]:
        return movement_time(of, DataMovement("reduce.outer.sum", n, n * size, 0.0, max(p["out"][1], n / 8192)))
    return movement_time(of, DataMovement("elementwise.strided.add", n, 2 * n * size, 0.0, n / 1024))


def add_kernels(parts: list[KernelTime]) -> KernelTime:
    """Kernels that run one after another, as one."""
    if len(parts) == 1:
        return parts[0]
    summed = ("seconds", "overhead_s", "compute_s", "memory_s", "clock_s", "hbm_bytes", "l2_bytes")
    sums = {name: sum(getattr(t, name) for t in parts) for name in summed}
    return KernelTime(
        **sums,
        busy=sum(t.busy * t.seconds for t in parts) / sums["seconds"],
        flops=sum(t.flops for t in parts if t.unit == parts[0].unit),
        unit=parts[0].unit,
        relative_error=sum(t.relative_error * t.seconds for t in parts) / sums["seconds"],
        provenance=parts[0].provenance,
    )


def pass_time(device: Device, conv: Conv, hbm_bytes: float | None) -> KernelTime:
    """One pass of a convolution at the boost clock."""
    of = chip(device)
    here = floor(of, conv)
    # The multiple of the floor was learned on the H200, and is the same elsewhere.
    factor = _multiple(conv)
    seconds = here.seconds * factor
    io, moved = conv.io_bytes, conv.io_bytes + conv.weight_bytes
    if hbm_bytes is None:
        hbm_bytes = moved if moved >= of.cache_bytes else 0.0
    crossing = min(moved, hbm_bytes)
    # The multiple was learned with small weights: a small batch of wide layers waits for its weights.
    extra = max(0.0, crossing / (0.85 * of.bandwidth) - seconds)
    on_vectors = conv.depthwise or conv.without_matrix_units
    product, native = of.peak("fp32", "vector")[1:] if on_vectors else of.peak(conv.precision)[1:]
    width = float(load_fit(DATA)["relative_error"][conv.kind])
    width *= (1.0 if of.calibrated else 1.8) * (1.0 if native else 1.5)
    provenance = "tiles and cuDNN's choices, fitted on the H200"
    return KernelTime(
        seconds=seconds + extra,
        overhead_s=here.start_s,
        compute_s=here.direct_s if conv.depthwise else here.product_s,
        memory_s=here.memory_s + here.layout_s,
        clock_s=seconds * (here.product_s**2 / (here.product_s**2 + here.memory_s**2 + 1e-18)),
        busy=here.busy * max(0.0, 1.0 - here.start_s / (seconds + extra)),
        flops=conv.flops,
        unit=product,
        hbm_bytes=crossing,
        # A third of what the tiles read comes from the cache, the rest from the SM's own memory (fitted on joules).
        l2_bytes=io * (1.0 if here.layout_s == 0 else 3.0) + 0.3 * here.reads_bytes,
        relative_error=min(0.9, width),
        provenance=provenance if of.calibrated else provenance + ", carried over as a multiple of the floor",
    )


# Tiles that cuDNN's kernels use, as seen in their names.
_TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64), (128, 32), (64, 32))
_SPLITS = (1, 4, 16, 64, 256)
# The kernels without matrix units have 128 threads for a tile, too few to hide their latency: 0.29 of the fp32 peak of
# an SM in a convolution over 128 samples, 0.20 to 0.34 in those of three videos (h200_heldout and heldout4 traces).
_VECTOR_TILES = ((128, 64), (64, 128))
_VECTOR_SHARE = 0.3
# Three more kernels around a grouped one: 21 us for 24 groups of 24 channels of 14 x 14, where the product takes 3
# (h200_heldout4_traces: regnet_y_3_2gf_b1; drawn convolutions of 7 x 7 and 16 x 16 took 21 to 24).
_PADDING_S = 14e-6


@dataclass(frozen=True, slots=True)
class Floor:
    """The least a pass can take: the product by tiles, the bytes, layout transforms, a direct kernel."""

    product_s: float
    memory_s: float
    layout_s: float
    direct_s: float
    start_s: float
    busy: float
    reads_bytes: float
    seconds: float


@functools.lru_cache(maxsize=65536)
def floor(of: Chip, conv: Conv) -> Floor:
    """The physical part of a pass on a chip."""
    size = ELEMENT_BYTES.get(conv.precision, 2.0)
    m, n, k = conv.kernel_product()
    product_s, busy, reads = _find_tile(of, conv, m, n, k, 1 if conv.in_turn else conv.groups)
    in_turn = conv.groups if conv.in_turn else 1
    product_s, reads = product_s * in_turn, reads * in_turn
    io = conv.io_bytes
    # Rates of an H200 as shares: 5 TB/s through the cache, 3.8 TB/s of its 4.8 across device memory.
    memory_s = io / (9.6 * of.units * of.clock_hz * 2.0 if io < 0.64 * of.cache_bytes else 0.79 * of.bandwidth)
    taps = prod(conv.w[2:])
    plain = taps == 1 and conv.stride == 1
    layout_s = 0.0 if conv.channels_last or plain or conv.depthwise else 2.0 * io / (0.83 * of.bandwidth)
    if conv.in_turn and conv.channels_last:  # each group is cut out of the channels and put back: 4 us for a MB
        layout_s = 20.0 * io / of.bandwidth
    direct_s = prod(conv.out) * taps / (10.0 * of.units * of.clock_hz)
    if conv.depthwise:
        start_s, seconds = 2e-6, math.hypot(direct_s, memory_s)
        busy = min(1.0, prod(conv.out) / 1024.0 / of.units)
        reads = 0.0  # neighbouring windows overlap in the SM's own memory
    else:
        start_s = 1.5e-6 * in_turn + (_PADDING_S if conv.padded else 0.0)
        seconds = math.hypot(product_s, memory_s) + layout_s
    return Floor(product_s, memory_s, layout_s, direct_s, start_s, busy, reads * size, start_s + seconds)


def _find_tile(of: Chip, conv: Conv, m: int, n: int, k: float, groups: int) -> tuple[float, float, float]:
    """(seconds, occupied share of the SMs, elements read through the cache) of the product with its best tile."""
    on_vectors = conv.without_matrix_units
    tiles: tuple[tuple[int, int], ...] = _VECTOR_TILES if on_vectors else _TILES
    if on_vectors:
        peak = of.peak("fp32", "vector")[0] / of.units * _VECTOR_SHARE
    else:
        peak = of.peak(conv.precision)[0] * of.boost_over_quoted / of.units * 0.8
    best = (math.inf, 1.0, 0.0)
    for tm, tn in tiles:
        across, down = -(-m // tm), -(-n // tn)
        for split in _SPLITS if conv.which == "weight" else (1,):
            if split > 1 and k / split < 64:
                continue
            blocks = across * down * groups * split
            load = blocks / of.units
            waves = max(1.0, math.ceil(load)) if load < 6 else load
            efficiency = 1.0 if on_vectors else min(1.0, (tm * tn / 16384.0) ** 0.35)
            seconds = waves * (2.0 * tm * tn * math.ceil(k / split / 32) * 32 / (peak * efficiency) + 1e-6)
            if split > 1:
                seconds += 2e-6 + 4.0 * m * n * groups * split / (0.52 * of.bandwidth)
            if seconds < best[0]:
                best = (seconds, min(1.0, load / math.ceil(load)), groups * k * (m * down + n * across))
    return best


@functools.lru_cache(maxsize=65536)
def _multiple(conv: Conv) -> float:
    if conv.without_matrix_units:  # too few were measured to learn from: 0.9 to 1.4 times their floor
        return 1.0
    here = floor(chip(lookup(CALIBRATED)), conv)
    return math.exp(float(_trees()(features(conv, here)[None])[0]))


def features(conv: Conv, least: Floor) -> Floats:
    """The inputs of the trees."""
    m, n, k = (max(1, v) for v in conv.product())
    x, w, out = conv.x, conv.w, conv.out
    log, whole, size = math.log2, least.seconds, ELEMENT_BYTES.get(conv.precision, 2.0)
    # Planes that 1x1 convolutions multiply in place: Hopper's kernels load them only from multiples of 16 bytes.
    in_place = prod(w[2:]) == 1 and conv.stride == 1 and conv.groups == 1 and not conv.channels_last
    values = [
        *(log(m), log(n), log(k), log(conv.groups), log(prod(w[2:])), conv.stride, conv.dilation),
        *(conv.channels_last, size, PASSES.index(conv.which), conv.depthwise, log(prod(x))),
        *(log(prod(out)), log(x[1]), log(out[1]), log(x[0]), log(max(1, prod(x[2:]))), conv.transposed),
        *(log(conv.flops), log(whole), len(x), conv.precision == "fp16"),
        *(log(max(1, x[1] // conv.groups)), log(max(1, prod(out[2:])))),
        *(log(least.product_s / whole), log(least.memory_s / whole), least.layout_s / whole),
        *(log(least.direct_s / whole), conv.in_turn, least.start_s / whole),
        *(_halvings(prod(x[2:])), _halvings(prod(out[2:]))),
        *(_halvings(x[1] // conv.groups), _halvings(out[1] // conv.groups)),
        (1 + _halvings(prod(x[2:]))) if in_place else 0,
    ]
    return np.array(values, float)


def _halvings(size: int) -> int:
    """How often a size can be halved, up to 3: the alignment of rows that are that many elements long."""
    return next(n for n in (3, 2, 1, 0) if size % 2**n == 0)


@functools.cache
def _trees() -> Trees:
    return Trees.of(load_fit(DATA)["trees"])
