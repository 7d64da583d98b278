"""Seconds of a matrix product: tiles in waves over the SMs against bytes over the bandwidth.

    t = t0 + (Tc^p + Tm^p)^(1/p)

Tc is the best over tile shapes and split-K factors of waves x (products and operand feed of one tile, plus its
prologue and epilogue); Tm is device-memory bytes at the achieved bandwidth plus cache bytes at the cache's. SM
latencies are counted in cycles and rates per SM and cycle, so that constants fitted on the H200 carry over to another
chip by its SM count, clock, per-SM peak, bandwidth and cache. Chips with timings have constants of their own
(chip_fits.py). What was learned beside it corrects the logarithm of its seconds. `benchmarks/fit/fit_kernels.py` and
`fit_chips.py` write both.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..device import Device
from ..errors import ArgumentError
from ..joules import Floats
from .chip_fits import KernelFit, find_fit
from .kernel_time import (
    CARRIED_OVER,
    ELEMENT_BYTES,
    Chip,
    KernelTime,
    Trees,
    check_narrow_format,
    chip,
    find_correction,
    kernel_error,
    load_fit,
    stack_columns,
)

# The tiles of cuBLAS and CUTLASS kernels for Hopper and Ampere; small ones serve skinny products (swapped, a row of 8
# is the narrowest that a warp-group multiply takes). Split-K and stream-K divide k.
_TILES = (
    *[(256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64)],
    *[(128, 32), (32, 128), (64, 32), (32, 64), (128, 16), (16, 128), (64, 16), (16, 64)],
    *[(128, 8), (8, 128), (64, 8), (8, 64), (32, 1), (1, 32)],
)
_SPLITS = (1, 2, 4, 8, 16)
_TM, _TN, _SPLIT = np.array([(a, b, s) for a, b in _TILES for s in _SPLITS], float).T
_VECTOR = np.minimum(_TM, _TN) == 1  # a product with a vector has kernels of its own
_NARROW = np.minimum(_TM, _TN) <= 8
_RESIDENT = np.clip(128.0 * 128.0 / (_TM * _TN), 1.0, 8.0)  # blocks that an SM holds at once
# Cycles that a block of an fp32 kernel takes for one element of k, however small its tile: 32x32 tiles of an H200 take
# 13.8 us for 384, 26 us for 768, be they one or three on an SM (h200_dev_traces, sm80_xmma_gemm_f32..32x32x8_stage3).
_VECTOR_STEP_CYCLES = 61.0
# A kernel for few rows (gemmSN of 8 and 12; from 16 on another) needs less: 16 us for 1536, 6 for 384 (h200_heldout).
_FEW_ROWS, _FEW_ROWS_STEP_CYCLES = 16, 19.0
# With a bias cuBLASLt divides k of fp32 products only among SMs that have no tile of 32x32: 197 rows by 768 columns
# take 98 us for k=3072, 49 rows 47 (sgemm_largek_lds64), where 49 rows without a bias take 14 for 1536. The least k of
# a part where all parts run at once, and where they do not (h200_dev and heldout traces).
_BIASED_DEPTHS = (192.0, 512.0)
# Those kernels keep more SMs busy than their share of tiles: four times, by the watts of seven small models (h200_dev).
_BIASED_PARTS = 4.0
_AS_FAST = 1.05  # times by which the formula cannot tell tiles apart: its own error on an H200 is 4%
# Chips that run one set of fp32 kernels: those of an H200 are named sm80_xmma_gemm_f32 (h200_dev_traces).
_FP32_KERNELS = ("ampere", "ada", "hopper", "blackwell")
# FLOPs an SM does in a cycle with rows that are not of whole 16 bytes, however large their pieces: Hopper's own kernels
# cannot load them, and those of Ampere reach 240 TFLOP/s on an H200 (k or n of 7020 and 30522; h200 traces).
_OLDER_FLOPS_PER_CYCLE = 920.0
_STEP = 32.0  # elements of k that the shortest pipeline stage holds
_PADDED_ROWS = 256  # up to the tallest tile, a kernel of more rows can take the place of one of fewer
_LAYOUTS = ("nt", "nn", "tn")
_SOURCES = ("torch", "vllm")
_DATA = "h200_gemm.json"
_FORMATS = ("bf16", "fp8", "fp8_block", "fp4")


@dataclass(frozen=True, slots=True)
class Product:
    """One product, or many: dimensions are numbers, or arrays of one length."""

    m: Any
    n: Any
    k: Any
    batch: Any
    precision: str
    layout: str = "nt"
    source: str = "torch"
    weight_bytes: float | None = None  # of an element of the right factor, where it is stored in another format
    bias: bool = False  # added by the same call


def gemm_time(
    device: Device,
    m: int,
    n: int,
    k: int,
    batch: int = 1,
    precision: str = "bf16",
    *,
    out_bytes: float | None = None,
    hbm_bytes: float | None = None,
    layout: str = "nt",
    source: str = "torch",
    weight_bytes: float | None = None,
    bias: bool = False,
) -> KernelTime:
    """The time of `batch` products (m x k) by (k x n), uncapped at the boost clock.

    `hbm_bytes` is what comes from device memory; by default what a warm loop leaves out of the cache. A cold call
    passes the operands' bytes. `out_bytes` is the size of an output element. `layout` says how the operands lie, row by
    row: "nt" for a linear layer (the right one transposed, both contiguous along k), "nn" for a plain product or a
    gradient of inputs, "tn" for a gradient of weights (the left one transposed). `source` "vllm" adds the host time of
    its fp8 calls. `weight_bytes` is the size of an element of the right factor where it is stored in another format.
    `bias`: the call adds one, as a linear layer does.
    """
    if min(m, n, k, batch) < 1:
        raise ArgumentError(f"a matrix product has dimensions of at least 1, not {m}x{n}x{k}, batch {batch}")
    for value, choices in ((source, _SOURCES), (layout, _LAYOUTS), (precision, ELEMENT_BYTES)):
        if value not in choices:
            raise ArgumentError(f"no matrix products in {value!r}", fix=f"one of {', '.join(choices)}")
    check_narrow_format(device, precision)
    product = Product(m, n, k, batch, precision, layout, source, weight_bytes, bias)
    return _gemm(chip(device), product, out_bytes, hbm_bytes)


@functools.lru_cache(maxsize=65536)
def _gemm(of: Chip, p: Product, out_bytes: float | None, hbm_bytes: float | None) -> KernelTime:
    """The product, or the one padded to the next power of two of rows where that is faster.

    Timings of a chip's own stand as they are: vLLM's products of one row take 4% longer than those of two on an H200.
    The public tables of other chips have one row of small weights only.
    """
    constants, fit = find_constants(of, p)
    kernel = _gemm_of_rows(of, p, constants, fit, out_bytes, hbm_bytes)
    timed = of.calibrated or (fit is not None and fit.own and p.m > 1)
    if timed or p.m >= _PADDED_ROWS or p.layout == "tn":  # which has rows side by side, and cannot pad them in place
        return kernel
    more = p.m + 1 if p.m & (p.m - 1) == 0 else 2 ** int(p.m).bit_length()
    padded = _gemm(of, replace(p, m=more), out_bytes, hbm_bytes)
    share = min(1.0, padded.seconds / kernel.seconds)
    parts = ("seconds", "overhead_s", "compute_s", "memory_s", "clock_s")
    return kernel if share == 1.0 else replace(kernel, **{name: share * getattr(kernel, name) for name in parts})


def _gemm_of_rows(
    of: Chip,
    p: Product,
    constants: Mapping[str, Any],
    fit: KernelFit | None,
    out_bytes: float | None,
    hbm_bytes: float | None,
) -> KernelTime:

    def parts_on(chip: Chip) -> dict[str, Floats]:
        return formula(constants, chip, p, out_bytes, hbm_bytes)

    parts = parts_on(of)
    t = {name: float(value) for name, value in parts.items()}
    flops, factor = 2.0 * p.m * p.n * p.k * p.batch, 1.0
    source = CARRIED_OVER if fit is None else fit.provenance
    if fit is None:
        shared = of.architecture in _FP32_KERNELS and of.peak(p.precision)[1] == "vector.fp32"
        learned = find_correction(
            of, _trees(), lambda on: features(p, parts if on is of else parts_on(on)), same_kernels=shared
        )
    else:  # learned from loops that leave out of the cache what they always do: by shape, whatever comes from it here
        learned = fit.correct(features(p, formula(constants, of, p, out_bytes)))
    if learned is not None:
        source = learned.source
        # No correction makes a kernel faster than the chip.
        factor = max(float(np.exp(learned.log)), of.fastest_s(flops, t["hbm_bytes"], p.precision) / t["body_s"])
    body, floor_s = t["body_s"] * factor, float(host_floor_s(constants, p))
    if fit is None:
        overhead = max(t["overhead_s"], floor_s - body)
    else:  # corrected with all that the call takes
        overhead = max(t["overhead_s"], floor_s - t["body_s"]) * factor
    seconds = overhead + body
    unit, native = of.peak(p.precision)[1:]
    if fit is None:
        width = kernel_error(load_fit(_DATA)["interval"], of, native, seconds, find_interval(p))
    else:
        width = fit.relative_error(of, seconds, native=native)
    return KernelTime(
        seconds=seconds,
        overhead_s=overhead,
        compute_s=t["compute_s"] * factor,
        memory_s=t["memory_s"] * factor,
        clock_s=min(seconds, t["clock_s"] * factor),
        busy=t["busy_s"] * factor / seconds,
        flops=flops,
        unit=unit,
        hbm_bytes=t["hbm_bytes"],
        l2_bytes=t["l2_bytes"],
        relative_error=width,
        provenance=f"tile and wave model, {source}",
        activity=min(max(factor, 0.85), 1.15),
    )


def find_interval(p: Product) -> str:
    """Name the measured spread that a product's interval comes from.

    cuBLAS's choice is less well known for batches of products, and where a side is no multiple of 8.
    """
    uneven = p.batch > 1 or any(side % 8 for side in (p.m, p.n, p.k))
    return "torch_uneven" if p.source == "torch" and uneven else p.source


def find_constants(of: Chip, p: Product) -> tuple[Mapping[str, Any], KernelFit | None]:
    """The constants of a product on a chip, and the fit they come from; None: the H200's.

    The public timings are those of vLLM's kernels. Its 16-bit products are torch's.
    """
    _, unit, native = of.peak(p.precision)
    kernel = p.precision if native else unit.partition(".")[2]
    kernel = "bf16" if kernel == "fp16" else kernel
    fit = find_fit(of, "gemm", kernel) if p.source == "vllm" or kernel == "bf16" else None
    own = load_fit(_DATA)["constants"]
    return (own, None) if fit is None else ({**own, **fit.constants}, fit)


@functools.cache
def _trees() -> Trees:
    return Trees.of(load_fit(_DATA)["trees"])


def formula(
    constants: Mapping[str, Any], of: Chip, p: Product, out_bytes: float | None = None, hbm_bytes: Any = None
) -> dict[str, Floats]:
    """The physical model without the learned correction: seconds, bytes and busy seconds by name.

    `hbm_bytes` None, or NaN for one product of many: what a warm loop leaves out of the cache.
    """
    c, size = constants, ELEMENT_BYTES[p.precision]
    out = max(size, 2.0) if out_bytes is None else out_bytes
    m, n, k, batch = (np.asarray(value, float) for value in (p.m, p.n, p.k, p.batch))
    compute_s, load, best, fed_bytes = _compute(c, of, p)
    right = size if p.weight_bytes is None else p.weight_bytes
    total = batch * (size * m * k + right * n * k + out * m * n)
    overhead_s = c["launch_us"][p.source] * 1e-6 * of.launch_factor + 0.0 * m
    cast = c["cast"].get(p.precision) if p.source == "vllm" or p.precision == "fp8_block" else None
    if cast is not None:  # a kernel of its own reads the 16-bit operand, row by row, and writes it scaled
        rows_s = batch * m * cast["row_cycles"] / (of.units * of.clock_hz)
        overhead_s = overhead_s + cast["us"] * 1e-6 * of.launch_factor + rows_s
        total = total + cast["bytes"] * batch * m * k
    hbm = _warm_hbm_bytes(c, of, total, batch * right * n * k)
    if hbm_bytes is not None:
        hbm = np.where(np.isnan(hbm_bytes), hbm, hbm_bytes)
    hbm_s = hbm / (c["bandwidth"] * of.bandwidth)
    memory_s = hbm_s + np.maximum(0.0, total - hbm) / of.cache_rate(c["cache_bytes_per_cycle"])
    exponent = c["exponent"]
    whole = compute_s**exponent + memory_s**exponent
    body_s = whole ** (1 / exponent)
    tm, tn = _TM[best], _TN[best]
    reads = 0.75 * fed_bytes  # blocks in clusters of two share one operand
    biased = p.bias and not of.peak(p.precision)[1].startswith("matrix")
    at_work = load * _BIASED_PARTS if biased else load
    filled = np.maximum(at_work / np.ceil(at_work), _overlap(c, of) * (at_work > 1))
    # An SM with a small tile has few warps at work, and draws less: by the fourth root of what it holds (fitted).
    held = tm * tn * np.minimum(_RESIDENT[best], np.maximum(1.0, load))
    filled = filled * np.minimum(1.0, held / 8192.0) ** 0.25
    return {
        "body_s": body_s,
        "overhead_s": overhead_s,
        "compute_s": compute_s,
        "memory_s": memory_s,
        "clock_s": body_s * (1.0 - hbm_s / memory_s * memory_s**exponent / whole),
        "busy_s": body_s * np.minimum(1.0, filled),
        "hbm_bytes": hbm,
        "l2_bytes": reads + batch * out * m * n,
        "load": load,
        "tile": tm * tn,
        "split": _SPLIT[best],
    }


def _warm_hbm_bytes(c: Mapping[str, Any], of: Chip, total: Floats, weights: Floats) -> Floats:
    """Bytes of device memory in a loop of the same product.

    The public loops fit as if they went round several copies of the weights, so that a cache must hold all of them to
    have one again (`weight_copies`); operands and results are the same each time.
    """

    def crossing(between: Floats) -> Any:  # by the bytes that pass between two uses
        return np.clip((between / of.cache_bytes - c["cache_kept"]) / c["cache_spill"], 0.0, 1.0)

    again = total + (c.get("weight_copies", 1.0) - 1.0) * weights
    return np.asarray(weights * crossing(again) + (total - weights) * crossing(total))


def _compute(c: Mapping[str, Any], of: Chip, p: Product) -> tuple[Floats, Floats, Any, Floats]:
    """Seconds of the best tile and split, SMs' worth of its blocks, its number, and the bytes that SMs load."""
    m, n, k, batch = (np.asarray(value, float)[..., None] for value in (p.m, p.n, p.k, p.batch))
    size, (quoted, unit, _) = ELEMENT_BYTES[p.precision], of.peak(p.precision)
    matrix = unit.startswith("matrix")
    own = c["matrix" if matrix else "vector"]
    peak = quoted * (of.boost_over_quoted if matrix else 1.0) / of.units
    load = np.ceil(m / _TM) * np.ceil(n / _TN) * batch * _SPLIT / of.units
    depth = np.ceil(k / (_SPLIT * _STEP)) * _STEP
    # Products with a few vectors have kernels of their own on the vector units, which waste nothing.
    wasted = np.where(_VECTOR | ((not matrix) & _NARROW), 0.0, 1000.0 * own["tile_cost"])
    rate = peak * _efficiency(c, of, p.precision)
    if matrix and size < 4.0:
        rate = np.minimum(rate, _misaligned_rate(c, of, size, n, m if p.layout == "tn" else k))
    multiply = 2.0 * (_TM * _TN + wasted) * depth / rate
    # A unit that multiplies more in a cycle than an SM of the H200 is fed in proportion.
    wide = max(1.0, peak / of.clock_hz / c["flops_per_cycle"][p.precision])
    feed = np.minimum(c["sm_bytes_per_cycle"], c["feed_bytes_per_cycle"] / np.minimum(load, 1.0)) * wide * of.clock_hz
    q, cache_rate = c["tile_exponent"], of.cache_rate(c["cache_bytes_per_cycle"])
    right = size if p.weight_bytes is None else p.weight_bytes
    tile_s = (multiply**q + ((_TM * size + _TN * right) * depth / feed) ** q) ** (1 / q)
    waves = np.maximum(1.0, load + (1.0 - _overlap(c, of)) * (np.ceil(load) - load))
    # Prologue and epilogue show once; in later waves they hide behind the SM's other blocks, more so of small tiles.
    shown_s = (1.0 + (waves - 1.0) * own["tile_shown"] / _RESIDENT) * own["tile_cycles"] / of.clock_hz
    merge_s = own["split_cycles"] / of.clock_hz + 4.0 * _SPLIT * m * n * batch / cache_rate
    # However few blocks there are, each goes through its part of k step by step; without a bias more parts hide it.
    biased = p.bias and not matrix
    step = np.where(m < _FEW_ROWS, _FEW_ROWS_STEP_CYCLES, _VECTOR_STEP_CYCLES)
    least_s = np.where(_VECTOR, 0.0, depth * step / of.clock_hz) if biased else 0.0
    all_s = np.maximum(waves * tile_s, least_s) + shown_s + np.where(_SPLIT > 1, merge_s, 0.0)
    refused = ((_SPLIT > 1) & (depth < 128.0)) | (_VECTOR & ((_TM > 1) | (m > 1)) & ((_TN > 1) | (n > 1)))
    if biased:
        tiles = np.ceil(m / 32.0) * np.ceil(n / 32.0) * batch
        shortest = np.where(_SPLIT * tiles <= of.units, *_BIASED_DEPTHS)
        whole = (m < _FEW_ROWS) | (depth < shortest)
        refused = refused | (np.ceil(of.units / tiles) < _SPLIT) | ((_SPLIT > 1) & whole)
    if p.source == "vllm" and p.precision in c["tiles"]:  # its quantised kernels have few tiles, and do not divide k
        narrowest, most_split = c["tiles"][p.precision]
        refused = refused | (np.minimum(_TM, _TN) < narrowest) | (most_split < _SPLIT)
    all_s = np.where(refused, np.inf, all_s)
    best = np.argmin(all_s, axis=-1)
    taken = best[..., None]
    fastest_s = np.take_along_axis(all_s, taken, -1)
    # Of tiles that are as fast, a library takes the one that loads least: by the formula a tile of 8 columns ties with
    # one of 256 in a large fp32 product, and would load fourteen times the bytes.
    fed = batch * k * (size * m * np.ceil(n / _TN) + right * n * np.ceil(m / _TM))
    fed_bytes = np.where(all_s <= _AS_FAST * fastest_s, fed, np.inf).min(axis=-1)
    return fastest_s[..., 0], np.take_along_axis(load, taken, -1)[..., 0], best, fed_bytes


# Of the fp32 peak that large products reach on SMs with 64 lanes: 0.92 on a V100 (14.4 TFLOP/s), 0.97 on Turing
# (zzc0721/torch-performance-test-data, issues 140 and 90), 0.91 on an A100 (17.7: gist dirkgr/25aac9f8dc24, without
# TF32). An SM with 128 lanes is fed no faster: 0.77 on an H100 (issue 79 there) and on our H200, 0.63 on an RTX 5090.
_NARROW_EFFICIENCY = 0.95


def _efficiency(c: Mapping[str, Any], of: Chip, precision: str) -> float:
    """The share of a unit's peak that large tiles reach; a fallback runs as its unit does."""
    _, unit, native = of.peak(precision)
    if unit == "vector.fp32" and of.narrow:
        return _NARROW_EFFICIENCY
    share = float(c["efficiency"][precision if native else unit.partition(".")[2]])
    return of.scale_efficiency(share, c) if unit.startswith("matrix") else share


def _overlap(c: Mapping[str, Any], of: Chip) -> float:
    """Persistent kernels even out the last wave; the older kernels of other chips wait for it."""
    return float(c["overlap"]) if of.asynchronous else 0.0


def _misaligned_rate(c: Mapping[str, Any], of: Chip, size: float, n: Floats, k: Floats) -> Any:
    """FLOP/s of one SM whose rows are loaded in the pieces their alignment allows; no limit from 16 bytes on."""
    whole = 16.0 / size
    if not np.any(n % whole) and not np.any(k % whole):
        return np.inf
    piece = np.ones_like(n * k)
    for elements in (2.0, 4.0, 8.0, 16.0):
        piece = np.where((n % elements == 0) & (k % elements == 0), min(elements, whole), piece)
    # Where only rows of the result are misaligned, operands are loaded whole: 30522 columns run at 240 TFLOP/s, 650 by
    # 650 at 124 to 159, both in pieces of two (H200; a vocabulary of 50257 at 95).
    exponent = np.where(k % whole == 0, c["misaligned_out_exponent"], c["misaligned_exponent"])
    slow = of.clock_hz * np.minimum(c["misaligned_flops_per_cycle"] * piece**exponent, _OLDER_FLOPS_PER_CYCLE)
    return np.where(piece < whole, slow, np.inf)


def host_floor_s(constants: Mapping[str, Any], p: Product) -> Any:
    """Seconds under which a call of vLLM does not go: the host work of block-scaled fp8.

    By how m is padded, and longer where n or k does not divide into blocks, for which another kernel is called.
    """
    if p.source != "vllm" or p.precision not in constants["host_floor_s"]:
        return 0.0
    m, n, k = (np.asarray(value) for value in (p.m, p.n, p.k))
    low, even, odd, unaligned = constants["host_floor_s"][p.precision]
    whole = np.where(m < 64, low, np.where(m % 4 == 0, even, odd))
    return np.where((n % 64 == 0) & (k % 128 == 0), whole, unaligned)


def _log_alignment(size: Floats) -> Any:
    """The logarithm of the largest power of two that divides a size, up to 512."""
    return np.log2(np.gcd(size.astype(np.int64), 512))


def features(p: Product, t: Mapping[str, Floats]) -> Floats:
    """The inputs of the learned correction, one row per product."""
    m, n, k, batch = (np.atleast_1d(np.asarray(value, float)) for value in (p.m, p.n, p.k, p.batch))
    log_m, log_n, log_k, log_batch = np.log2(m), np.log2(n), np.log2(k), np.log2(batch)
    log_out, load = log_m + log_n + log_batch, t["load"]
    columns = [
        *(log_m, log_n, log_k, log_batch, ELEMENT_BYTES[p.precision], p.source == "vllm", np.log2(t["body_s"])),
        *(np.log2(t["compute_s"] / t["memory_s"]), np.log2(load), load / np.ceil(load), np.log2(t["tile"])),
        *(np.log2(t["split"]), m % 8 == 0, log_out, log_out + log_k, _LAYOUTS.index(p.layout), p.precision == "fp32"),
        _FORMATS.index(p.precision) if p.precision in _FORMATS else 0,
        *(np.log2(t["overhead_s"] / t["body_s"]), _log_alignment(m), _log_alignment(n), _log_alignment(k)),
        p.bias,
    ]
    return stack_columns(columns, len(m))
