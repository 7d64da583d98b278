"""Seconds of fused attention: prefill, decode with split keys, short sequences, backward.

One block holds a tile of queries (grouped query heads are packed into it) and walks over the keys it sees. A key step
costs the matrix products and the exponentials, whichever is slower; blocks run in waves over the SMs; with few blocks
the keys are split and merged. Keys and values come at the achieved bandwidth. Rates are per SM and cycle, so that the
H200's constants carry over to another chip. PyTorch's kernels ("torch": SDPA under graph replay) and vLLM's ("vllm":
paged FlashAttention) have constants of their own, vLLM's also those of other chips (chip_fits.py).
`benchmarks/fit/fit_kernels.py` and `fit_chips.py` fit them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
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

_DATA = "h200_attention.json"
_SPLITS = np.array([1, 2, 4, 8, 16, 32, 64, 128], float)
_VECTOR_KEYS = 64.0  # fmha_cutlassF_f32_aligned_64x64: the tile of PyTorch's fp32 kernels
_KEYS = 128.0  # keys of one step: sequences of 16, 64 and 128 take the same time per block
# Kernels beside the backward: rows of gradient times output (2 x 2 bytes an element), queries' gradients summed in fp32
# (cleared, then narrowed: 4 + 4 + 2); heads that share keys have their gradients added up.
_BESIDE_BYTES = 14.0
_BACKWARD_FLOPS = 2.5  # five products of the backward against two of the forward


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call, or many: sizes, flags and windows are numbers, or arrays of one length."""

    batch: Any
    heads: Any
    kv_heads: Any
    q_len: Any
    kv_len: Any
    head_dim: Any
    causal: Any
    precision: str
    kv_precision: str
    window: Any = np.inf
    mask: bool = False
    backward: bool = False
    source: str = "torch"

    def numbers(self) -> list[Floats]:
        """Batch, heads, heads of keys, queries, keys and head size as floats."""
        sizes = (self.batch, self.heads, self.kv_heads, self.q_len, self.kv_len, self.head_dim)
        return [np.asarray(value, float) for value in sizes]


def attention_time(
    device: Device,
    batch: int,
    heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    causal: bool,
    precision: str = "bf16",
    *,
    backward: bool = False,
    mask: bool = False,
    window: int | None = None,
    hbm_bytes: float | None = None,
    source: str = "torch",
    kv_precision: str | None = None,
) -> KernelTime:
    """The time of one scaled dot-product attention, uncapped at the boost clock; `backward` is the backward alone.

    `mask` is a dense mask or bias given as a tensor; each query sees at most `window` keys. `hbm_bytes`: what comes
    from device memory, by default what a warm loop leaves out of the cache. `source` says whose kernels: "torch" or
    "vllm". `kv_precision` is that of keys and values, where it differs.
    """
    sizes = (batch, heads, kv_heads, q_len, kv_len, head_dim, window or 1)
    if min(sizes) < 1:
        raise ArgumentError(f"attention has sizes of at least 1, not {sizes}")
    names = ((source, ("torch", "vllm")), (precision, ELEMENT_BYTES), (kv_precision or "fp32", ELEMENT_BYTES))
    for value, choices in names:
        if value not in choices:
            raise ArgumentError(f"no attention in {value!r}", fix=f"one of {', '.join(choices)}")
    check_narrow_format(device, precision)
    how = (bool(causal), precision, kv_precision or precision, float(window or np.inf), mask, backward, source)
    call = AttentionCall(batch, heads, kv_heads, q_len, kv_len, head_dim, *how)
    return _attention(chip(device), call, hbm_bytes)


@functools.lru_cache(maxsize=65536)
def _attention(of: Chip, call: AttentionCall, hbm_bytes: float | None) -> KernelTime:
    constants, fit = find_constants(of, call)

    def parts_on(chip: Chip) -> dict[str, Floats]:
        return formula(constants, chip, call, hbm_bytes)

    parts = parts_on(of)
    t = {name: float(value) for name, value in parts.items()}
    factor, source, learned = 1.0, CARRIED_OVER if fit is None else fit.provenance, None
    if fit is not None:
        # Learned from loops that leave out of the cache what they always do: by shape, whatever comes from it here.
        learned = fit.correct(features(call, formula(constants, of, call)))
    else:
        trees = _trees(call.source)
        learned = find_correction(
            of,
            trees,
            lambda on: features(call, parts if on is of else parts_on(on)),
            same_kernels=of.architecture == "hopper",
        )
    if learned is not None:
        source = learned.source
        # No correction makes a kernel faster than the chip.
        fastest_s = of.fastest_s(t["flops"], t["hbm_bytes"], call.precision)
        factor = max(float(np.exp(learned.log)), fastest_s / (t["overhead_s"] + t["body_s"]))
    seconds = (t["overhead_s"] + t["body_s"]) * factor
    unit, native = _rate(of, call.precision)[1:]
    if fit is None:
        width = kernel_error(load_fit(_DATA)["interval"], of, native, seconds, find_interval(call))
    else:
        width = fit.relative_error(of, seconds, native=native)
    return KernelTime(
        seconds=seconds,
        overhead_s=t["overhead_s"] * factor,
        compute_s=t["compute_s"] * factor,
        memory_s=t["memory_s"] * factor,
        clock_s=t["clock_s"] * factor,
        busy=min(1.0, t["busy_s"] * factor / seconds),
        flops=t["flops"],
        unit=unit,
        vector_flops=t["scores"] * load_fit("h200_power.json")["softmax_flops_per_score"],
        hbm_bytes=t["hbm_bytes"],
        l2_bytes=t["l2_bytes"],
        relative_error=width,
        provenance=f"tile model of attention, {source}",
        activity=min(max(factor, 0.85), 1.15),
    )


def find_interval(call: AttentionCall) -> str:
    """Name the measured spread that a call's interval comes from: gradients and masks are less well known."""
    return "torch_other" if call.source == "torch" and (call.backward or call.mask) else call.source


def find_constants(of: Chip, call: AttentionCall) -> tuple[Mapping[str, Any], KernelFit | None]:
    """The constants of a call on a chip, and the fit they come from; None: the H200's.

    The public timings are those of vLLM's kernels, forward, in 16 bits.
    """
    own = load_fit(_DATA)["constants"][call.source]
    if call.source != "vllm" or call.backward or call.precision not in ("bf16", "fp16"):
        return own, None
    fit = find_fit(of, "attention", name_kernel(call)) or find_fit(of, "attention", name_kernel(call, usual=True))
    return (own, None) if fit is None else ({**own, **fit.constants}, fit)


def name_kernel(call: AttentionCall, *, usual: bool = False) -> str:
    """What vLLM calls: by phase, format of keys, and whether heads of a usual size have a kernel of their own."""
    phase = "decode" if call.q_len == 1 and not call.causal else "prefill"
    narrow = call.kv_precision != call.precision
    odd = narrow and not usual and call.head_dim not in (64, 128, 256)
    return f"{phase}.{'fp8' if narrow else 'bf16'}{'.odd' if odd else ''}"


@functools.cache
def _trees(source: str) -> Trees:
    return Trees.of(load_fit(_DATA)["trees"][source])


def _rate(of: Chip, precision: str) -> tuple[float, str, bool]:
    """fp32 attention runs on the vector units where a chip has them: PyTorch keeps TF32 off by default."""
    return of.peak(precision, "vector") if precision == "fp32" else of.peak(precision)


def count_pairs(q: Floats, kv: Floats, causal: Any, window: Any) -> Floats:
    """Query-key pairs of one head; causal queries are the last of the keys, a window counts the query's own key."""
    first = np.maximum(1.0, np.minimum(kv, kv - q + 1.0))  # keys the first query sees
    rows = np.minimum(q, kv)
    all_pairs = np.where(causal, rows * (first + kv) / 2.0, q * kv)
    # Queries before the window fills see first..window keys, the others the whole window.
    limit = np.minimum(window, kv)
    filling = np.clip(limit - first, 0.0, rows)
    windowed = np.where(causal, filling * (first + limit - 1.0) / 2.0 + (rows - filling) * limit, q * limit)
    pairs: Floats = np.minimum(windowed, all_pairs)
    return pairs


def formula(c: Mapping[str, Any], of: Chip, call: AttentionCall, hbm_bytes: float | None = None) -> dict[str, Floats]:
    """The physical model without the learned correction: seconds, bytes and busy seconds by name."""
    batch, heads, kv_heads, q, kv, d = call.numbers()
    window = np.asarray(call.window, float)
    size, kv_size = ELEMENT_BYTES[call.precision], ELEMENT_BYTES[call.kv_precision]
    pairs = count_pairs(q, kv, np.asarray(call.causal), window)
    compute_s, load, loaded = _compute(c, of, call, pairs)
    times = _BACKWARD_FLOPS if call.backward else 1.0
    moved = batch * d * (2.0 * heads * q * size + 2.0 * kv_heads * np.minimum(kv, q + window) * kv_size)
    total = moved * times + (batch * heads * pairs * size if call.mask else 0.0)
    spill = np.clip((total / of.cache_bytes - c["cache_kept"]) / c["cache_spill"], 0.0, 1.0)
    hbm = total * spill if hbm_bytes is None else np.full_like(total, hbm_bytes)
    hbm_s = hbm / (c["bandwidth"] * of.bandwidth)
    memory_s = hbm_s + np.maximum(0.0, total - hbm) / of.cache_rate(c["cache_bytes_per_cycle"])
    p = c["exponent"]
    whole = compute_s**p + memory_s**p
    body_s = whole ** (1 / p)
    fixed_s = body_s * hbm_s / memory_s * memory_s**p / whole  # bound by device memory
    if call.backward:
        beside, beside_s, crossing_s = _beside(c, of, call)
        body_s, fixed_s, total = body_s + beside_s, fixed_s + crossing_s, total + beside
        hbm = hbm + np.where(crossing_s > 0, beside, 0.0)
    return {
        "body_s": body_s,
        "overhead_s": np.asarray((c["backward_us"] if call.backward else c["launch_us"]) * 1e-6 * of.launch_factor),
        "compute_s": compute_s,
        "memory_s": memory_s,
        "clock_s": body_s - fixed_s,
        "busy_s": body_s * np.minimum(1.0, load),
        "flops": 4.0 * batch * heads * pairs * d * times,
        "scores": batch * heads * pairs * times,
        "hbm_bytes": hbm,
        "l2_bytes": total + kv_size * loaded * times,
        "load": load,
    }


def _beside(c: Mapping[str, Any], of: Chip, call: AttentionCall) -> tuple[Floats, Floats, Floats]:
    """Bytes and seconds of the kernels beside the backward, and the seconds of those that cross device memory."""
    batch, heads, kv_heads, q, kv, d = call.numbers()
    moved = batch * heads * d * (_BESIDE_BYTES * q + np.where(heads > kv_heads, 8.0 * kv, 0.0))
    crosses = moved > of.cache_bytes
    seconds = moved / np.where(crosses, c["bandwidth"] * of.bandwidth, of.cache_rate(c["cache_bytes_per_cycle"]))
    return moved, seconds, np.where(crosses, seconds, 0.0)


def _compute(c: Mapping[str, Any], of: Chip, call: AttentionCall, pairs: Floats) -> tuple[Floats, Floats, Floats]:
    """Seconds of the blocks, SMs' worth of blocks, and key and value elements they load."""
    batch, heads, kv_heads, q, kv, d = call.numbers()
    matrix = _rate(of, call.precision)[1].startswith("matrix")
    if call.backward and matrix and not call.mask:  # a block holds keys and walks over the queries that see them
        q, kv = kv, q
    tile = np.where(d > 256, 64.0, 128.0) if matrix else np.full_like(d, 64.0)
    # Heads that share keys share a block where that makes fewer blocks, and few blocks split the keys: FlashAttention-3
    # always, cuDNN and others for a single query, FlashAttention-2 for one that sees all keys and shares them.
    how = c["packing"]
    if how == "by library":  # chips before Hopper, and Blackwell for workstations, run FlashAttention-2 in 16 bits
        how = "always" if of.asynchronous or call.kv_precision != call.precision else "grouped"
    packs = (np.asarray(q == 1) & (not call.backward)) | (how == "always")
    if how == "grouped":
        packs = packs & (heads > kv_heads) & np.isinf(np.asarray(call.window))
    blocks = heads * np.ceil(q / tile)
    blocks = batch * np.where(packs, np.minimum(blocks, kv_heads * np.ceil(q * heads / kv_heads / tile)), blocks)
    rows = np.minimum(tile, np.where(q * heads / kv_heads <= 64, 64.0, 128.0))  # a warp group multiplies 64 rows
    keys = _KEYS if matrix else _VECTOR_KEYS
    reach = np.ceil(np.minimum(kv, np.asarray(call.window) + tile) / keys) * keys
    seen = np.where(np.asarray(call.causal), np.minimum(reach, pairs / q + tile / 2), reach)  # on average
    # cuDNN pads heads to 64, 128 or 256: 80, 96 and 128 take the same time.
    padded = np.maximum(64.0, 2.0 ** np.ceil(np.log2(d)) if call.source == "torch" else d)
    step_s = _step_s(c, of, call, padded, rows)
    if call.mask and matrix:
        # With a mask torch leaves cuDNN for its own kernels, written for Ampere.
        step_s = step_s * np.where(q > 1, c["mask_backward" if call.backward else "mask_factor"], 1.0)
    if call.backward:
        step_s = step_s * (_BACKWARD_FLOPS / c["backward"])
    fixed_s = (c["block_cycles"] + c["block_cycles_per_dim"] * d) / of.clock_hz

    splits = np.where(packs[..., None], _SPLITS, 1.0)
    load = blocks[..., None] * splits / of.units
    mean_s, longest_s = (
        length[..., None] / splits * step_s[..., None] + fixed_s[..., None] for length in (seen, reach)
    )
    waves = load + (1.0 - c["overlap"]) * (np.ceil(load) - load)
    all_s = np.maximum(waves * mean_s, longest_s) + np.where(splits > 1, c["split_cycles"] / of.clock_hz, 0.0)
    all_s = np.where((splits > 1) & (reach[..., None] / splits < 64), np.inf, all_s)
    best = np.argmin(all_s, axis=-1)[..., None]
    compute_s, load = (np.take_along_axis(value, best, -1)[..., 0] for value in (all_s, load))
    return compute_s, load, 2.0 * d * blocks * seen


def _step_s(c: Mapping[str, Any], of: Chip, call: AttentionCall, d: Floats, rows: Floats) -> Floats:
    """Seconds a block of query rows takes for one key: products and exponentials per row, getting the key."""
    peak, unit, _ = _rate(of, call.precision)
    matrix = unit.startswith("matrix")
    peak *= of.boost_over_quoted if matrix else 1.0
    efficiency = of.scale_efficiency(c["efficiency"], c) if matrix else c["vector_efficiency"]
    multiply = 4.0 * (d + c["head_cost"]) * rows / (peak * efficiency / of.units)
    # A unit that multiplies more in a cycle than an SM of the H200 has as much more beside its multiplier.
    wide = max(1.0, peak / (of.units * of.clock_hz) / c["flops_per_cycle"]) if matrix else 1.0
    scalar = rows * c["score_cycles"] / (of.clock_hz * wide)
    load_cycles = c["load_cycles" if call.kv_precision == call.precision else "convert_cycles"]
    load = d * load_cycles / (of.clock_hz * wide)
    # Only asynchronous matrix units multiply while the exponentials of the last step are taken.
    q = c["step_exponent"] if of.asynchronous or not of.nvidia else 1.0
    return np.asarray((multiply**q + scalar**q + load**q) ** (1 / q))


def features(call: AttentionCall, t: Mapping[str, Floats]) -> Floats:
    """The inputs of the learned correction, one row per call."""
    batch, heads, kv_heads, q, kv, d = (np.atleast_1d(value) for value in call.numbers())
    columns = [
        *(np.log2(batch), np.log2(heads), np.log2(kv_heads), np.log2(heads / kv_heads), np.log2(q), np.log2(kv), d),
        *(np.log2(np.minimum(call.window, 1e6)), np.asarray(call.causal), np.log2(batch * kv_heads)),
        *(np.log2(batch * heads), call.kv_precision != call.precision, call.precision == "fp32", call.mask),
        *(np.log2(t["body_s"]), np.log2(t["compute_s"] / t["memory_s"]), np.log2(t["load"]), call.backward),
    ]
    return stack_columns(columns, len(q))
