"""What a product costs in each precision, by the energy model of `predict`; and the precisions, cheapest first.

Casts are counted in passes over memory, each with a launch: the largest value of a matrix, the cast by its scale, and,
where the product cannot multiply by the scales of its rows and columns itself, the result by them. A pass is bound by
the bytes that cross device memory and the cache, at the rates fitted for products (`h200_gemm.json`), times what an
H200 took more (`_MORE`). With that, casts of 4096 and 8192 come within 3% of their joules there; the product by rows
itself costs what the one by matrices does (within 6%).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..device import Device
from ..errors import ArgumentError
from ..estimate.gemm import gemm_time
from ..estimate.kernel_time import ELEMENT_BYTES, Chip, chip, load_fit
from ..estimate.power import DeviceWork, PowerModel
from ..hardware import lookup
from . import lowprec
from .casting import FULL, PRECISIONS, find_prepared, has_fp8_units, multiplies_fp8, unknown_precision

# Without fast accumulation the tensor core's short sums go to fp32 registers every so many products along k: one fp32
# addition each (DeepSeek-V3 technical report, 2024, 3.3.2: 128 is the least that hides behind the products).
_PROMOTED_EVERY = 128
_LAUNCH_S = 1.5e-6  # from the end of a kernel to the work of the next in a CUDA graph, by the casts of 2048 on the H200
_EXPONENT = 3.0  # of device memory against cache, as in `estimate/data_movement.py`
# fp32 operations on an element: its magnitude, whether it is finite, the maximum; and then the scale, two clamps, the
# comparison, the choice and the conversion.
_AMAX_FLOPS, _CAST_FLOPS = 3.0, 6.0
# Measured joules of casts alone over those of their passes, the mean of 4096 and 8192 (H200, 2026-11-16,
# ops_precision.py), by (a scale a row?, does it transpose?). What transposes goes through shared memory, and by rows
# reads short runs for the largest values. Under one: the operations above are those of a value that is looked at
# closely, and most are not since.
_MORE = {(False, False): 0.97, (False, True): 1.13, (True, False): 0.95, (True, True): 1.34}


class PricedPrecision(NamedTuple):
    """A precision, how its products are summed ("fp32" or "fast"), and its predicted joules."""

    precision: str
    accumulate: str
    energy_j: float


def order_candidates(
    a: Any,
    b: Any,
    out: Any,
    *,
    allowed: Sequence[str] | None,
    first: str | None,
    accumulate: str | None,
    costs: Mapping[str, float] | None,
) -> list[PricedPrecision]:
    """The precisions of a product, cheapest first; full precision is the last.

    `accumulate` None tries fp8 with fast sums too, where the device has them. `costs` replaces the predicted joules of
    a precision, and of "fp8 fast" where it has that.
    """
    full = FULL[a.dtype]
    for name in allowed or ():
        if name not in PRECISIONS:
            raise unknown_precision("allowed", name)
    names = [p for p in PRECISIONS if p == full or (_is_useful(p, a, full) and (allowed is None or p in allowed))]
    if first is not None:
        names = names[names.index(first) :] if first in names else [full]
    candidates = []
    for name in names:
        both = accumulate is None and name in ("fp8", "fp8_row") and multiplies_fp8(a.device)
        for sums in ("fast", "fp32") if both else (accumulate or "fp32",):
            candidates.append(PricedPrecision(name, sums, _price(a, b, out, name, sums, costs or {})))
    candidates.sort(key=lambda candidate: (candidate.precision != first, candidate.energy_j))
    return candidates[: [candidate.precision for candidate in candidates].index(full) + 1]


def _price(a: Any, b: Any, out: Any, precision: str, sums: str, costs: Mapping[str, float]) -> float:
    fixed = costs.get(f"{precision} {sums}", costs.get(precision))
    if fixed is not None:
        return fixed
    on_cuda = a.device.type == "cuda"
    return predict_energy_j(
        precision,
        a.shape[-2],
        b.shape[-1],
        a.shape[-1],
        math.prod(a.shape[:-2]),
        a.dtype,
        out,
        chip_of(a.device.index if on_cuda else None),
        accumulate=sums,
        layout=layout_of(a, b),
        prepared=precision in ("fp8", "fp8_row") and find_prepared(b, precision == "fp8_row") is not None,
        row_scaling=lowprec.has_row_scaling(a.device, out) if precision == "fp8_row" and on_cuda else None,
    )


def _is_useful(precision: str, a: Any, full: str) -> bool:
    """Whether a precision can be cheaper than full on this device: narrower, and with units of its own."""
    wider = {"bf16": ("bf16",), "fp16": ("fp16",), "fp32": PRECISIONS[:6], "fp64": PRECISIONS}
    if precision not in (*wider[full], "fp8", "fp8_row"):
        return False
    if a.device.type != "cuda":
        return True
    if precision in ("fp8", "fp8_row"):
        return has_fp8_units(a.device.index)
    return precision not in ("bf16", "tf32") or bool(torch.cuda.get_device_capability(a.device.index) >= (8, 0))


@functools.cache
def chip_of(index: int | None) -> str:
    """The catalogue's name of a CUDA device; an H200 for a CPU, or for a device the catalogue does not have."""
    if index is not None:
        try:
            return lookup(torch.cuda.get_device_name(index)).id
        except ArgumentError:
            pass
    return "h200"


def layout_of(a: torch.Tensor, b: torch.Tensor) -> str:
    """How the operands lie, as `gemm_time` names it: "nn" row by row, "nt" the right transposed, "tn" the left."""
    if a.stride(-1) > a.stride(-2):
        return "tn"
    return "nt" if b.stride(-1) > b.stride(-2) else "nn"


@functools.lru_cache(maxsize=4096)
def predict_energy_j(
    precision: str,
    m: int,
    n: int,
    k: int,
    batch: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    on: str = "h200",
    *,
    accumulate: str = "fp32",
    layout: str = "nn",
    prepared: bool = False,
    row_scaling: bool | None = None,
) -> float:
    """Predicted joules of a product in a precision: the product, and the casts of its operands from `dtype`.

    `layout` is that of the operands (fp8's casts transpose them into the one its product takes). A `prepared` right
    operand is in fp8 already. `row_scaling` is `lowprec.has_row_scaling` of the device; None assumes it for bf16
    results, which every torch that has such products writes.
    """
    if min(m, n, k, batch) == 0:
        return 0.0
    device, name = lookup(on), precision.removesuffix("_row")
    gpu, model, out_bytes = chip(device), PowerModel.from_device(device), float(out_dtype.itemsize)
    work = _product(device, name, m, n, k, batch, out_bytes, layout)
    lossless = FULL[dtype] == name or (name == "tf32" and dtype == torch.float32)
    if not lossless:
        inside = out_dtype == torch.bfloat16 if row_scaling is None else row_scaling
        unscaled = name == "fp16" or (precision == "fp8_row" and not inside)
        work = work + _casts(gpu, precision, (m, n, k, batch), (dtype.itemsize, out_bytes), layout, prepared, unscaled)
    joules = model.estimate(work).energy_j
    if name == "fp8" and accumulate == "fast":
        joules -= float(batch) * m * n * k / _PROMOTED_EVERY * model.j_per_flop.get("vector.fp32", 0.0)
    return joules


def _product(
    device: Device, name: str, m: int, n: int, k: int, batch: int, out_bytes: float, layout: str
) -> DeviceWork:
    if name == "fp8":  # matrix by matrix
        return DeviceWork.of(gemm_time(device, m, n, k, 1, name, out_bytes=out_bytes, layout="nt"), batch)
    product = gemm_time(device, m, n, k, batch, name, out_bytes=out_bytes, layout=layout)
    if product.unit.startswith("vector"):
        # The formula may take a narrow tile for a large product, whose reads pass what the cache gives in the time.
        most = _cache_rate(chip(device)) * product.seconds
        product = replace(product, l2_bytes=min(product.l2_bytes, most))
    return DeviceWork.of(product)


def _casts(
    gpu: Chip, precision: str, sizes: tuple[int, ...], item_bytes: tuple[int, float], layout: str, *flags: bool
) -> DeviceWork:
    """The passes before and after a product of rounded operands; `item_bytes` are those of operands and result."""
    (m, n, k, batch), (size, out_bytes), (prepared, unscaled) = sizes, item_bytes, flags
    name = precision.removesuffix("_row")
    narrow, launches = ELEMENT_BYTES[name], batch if name == "fp8" else 1
    elements = [batch * m * k] if prepared else [batch * m * k, batch * n * k]
    result = batch * m * n * out_bytes
    touched = sum(elements) * (size + narrow) + (batch * n * k * narrow if prepared else 0.0) + result
    uncached = _uncached_share(gpu, touched)
    scaled = name in ("fp8", "fp16")
    work = DeviceWork()
    # One scale is guessed: no pass for the largest value, one launch to repair (`kernels/guessed_cast.py`).
    guessed = precision == "fp8"
    for index, count in enumerate(elements):
        read, written = float(count * size), float(count * narrow)
        # A row that lies along memory waits in registers for its scale; every other cast reads its matrix again, of
        # which the cache still holds what it can.
        along = layout != "tn" if index == 0 else layout == "nt"
        by_row = precision == "fp8_row"
        twice = scaled and not guessed and not (by_row and along)
        passes = DeviceWork()
        if twice:
            passes = passes + _pass(gpu, read, read * uncached, _AMAX_FLOPS * count, launches)
        again = max(0.0, read - _cached_bytes(gpu)) if twice else read * uncached
        passes = passes + _pass(gpu, read + written, again + written * uncached, _CAST_FLOPS * count, launches)
        work = work + (_scale(passes, _MORE[by_row, not along]) if name == "fp8" else passes)
    if guessed:
        work = work + DeviceWork(fixed_s=launches * _LAUNCH_S * gpu.launch_factor)
    if unscaled:  # the result is multiplied by its scales
        fresh = max(0.0, result - _cached_bytes(gpu))
        work = work + _pass(gpu, 2.0 * result, fresh + result * uncached, 2.0 * batch * m * n, launches)
    return work


def _scale(work: DeviceWork, factor: float) -> DeviceWork:
    """The same work times a factor."""
    names = ("clock_s", "fixed_s", "busy_s", "hbm_bytes", "l2_bytes")
    flops = {unit: factor * value for unit, value in work.flops.items()}
    return replace(work, flops=flops, **{name: factor * getattr(work, name) for name in names})


def _cached_bytes(gpu: Chip) -> float:
    """Bytes of what was touched last that are still in the cache."""
    return float(load_fit("h200_gemm.json")["constants"]["cache_kept"]) * gpu.cache_bytes


def _uncached_share(gpu: Chip, touched: float) -> float:
    """The share of what a warm loop touches that is not in the cache when its turn comes again."""
    c = load_fit("h200_gemm.json")["constants"]
    return float(min(1.0, max(0.0, (touched / gpu.cache_bytes - c["cache_kept"]) / c["cache_spill"])))


def _cache_rate(gpu: Chip) -> float:
    """Bytes a second between cache and SMs."""
    return float(load_fit("h200_gemm.json")["constants"]["cache_bytes_per_cycle"]) * gpu.units * gpu.clock_hz


def _pass(gpu: Chip, moved: float, crossing: float, flops: float, launches: int) -> DeviceWork:
    """A kernel that goes over memory once: `moved` bytes through the cache, `crossing` of them from or to memory."""
    hbm_s = crossing / (load_fit("h200_gemm.json")["constants"]["bandwidth"] * gpu.bandwidth)
    cache_s = moved / _cache_rate(gpu)
    whole = hbm_s**_EXPONENT + cache_s**_EXPONENT
    body_s = whole ** (1 / _EXPONENT)
    clock_s = body_s * (1.0 - hbm_s**_EXPONENT / whole)
    return DeviceWork(
        clock_s=clock_s,
        fixed_s=launches * _LAUNCH_S * gpu.launch_factor + body_s - clock_s,
        busy_s=body_s,
        flops={"vector.fp32": flops},
        hbm_bytes=crossing,
        l2_bytes=moved,
    )
