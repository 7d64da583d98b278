"""What a product costs in each precision, by the energy model of `predict`; and the precisions, cheapest first.

A cast is a pass over its matrix. It is priced as `predict` prices elementwise kernels, times a factor measured on an
H200.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..device import Device
from ..errors import ArgumentError, check_choice
from ..estimate.cache import CACHE_SHARE
from ..estimate.data_movement import DataMovement, movement_time
from ..estimate.gemm import gemm_time
from ..estimate.kernel_time import ELEMENT_BYTES, Chip, KernelTime, chip, load_fit
from ..estimate.power import DeviceWork, PowerModel
from ..hardware import lookup
from . import lowprec
from .casting import FULL, PRECISIONS, find_prepared, has_fp8_units, multiplies_fp8

# Without fast accumulation, the tensor core's short sums go to fp32 registers every so many products along k: one fp32
# addition each time (DeepSeek-V3 technical report, 2024, 3.3.2: 128 is the least that is hidden behind the products).
_PROMOTED_EVERY = 128
# Joules of casts over those of one elementwise pass, by precision: (without, with transposing). Mean of 4096 and 8192,
# H200, 2026-11-16 (benchmarks/device/ops_precision.py; fp16 and bf16 by their passes). A row that is contiguous waits
# in registers for its scale; where columns are contiguous, the row is read twice.
_CASTS = {"fp8": (0.80, 0.93), "fp8_row": (0.77, 1.60), "fp16": (1.40, 1.40), "bf16": (0.80, 0.80)}
_UNSCALE = 0.82  # the same factor for a result that is multiplied by the scales of its rows and columns


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
    """Return the precisions of a product, cheapest first; full precision is the last.

    With `accumulate` None, fp8 is tried with fast sums too, if the device has them. `costs` replaces the predicted
    joules of a precision, and of "fp8 fast" if it has that key. Without it, only `first` may be narrower than full
    where the device would emulate it.
    """
    full = FULL[a.dtype]
    for name in allowed or ():
        check_choice("allowed", name, PRECISIONS)
    names = [p for p in PRECISIONS if p == full or (_is_useful(p, a, full) and (allowed is None or p in allowed))]
    if first is not None:
        names = names[names.index(first) :] if first in names else [full]
    if costs is None and not saves_energy(a.device):
        names = [name for name in names if name in (first, full)]
    candidates = []
    for name in names:
        both = accumulate is None and name in ("fp8", "fp8_row") and multiplies_fp8(a.device)
        for sums in ("fast", "fp32") if both else (accumulate or "fp32",):
            candidates.append(PricedPrecision(name, sums, _price(a, b, out, name, sums, costs or {})))
    candidates.sort(key=lambda candidate: (candidate.precision != first, candidate.energy_j))
    return candidates[: [candidate.precision for candidate in candidates].index(full) + 1]


def saves_energy(device: torch.device) -> bool:
    """Return whether narrower formats can be cheaper on a device; a CPU emulates them, which is slower."""
    return bool(device.type != "cpu")


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
        lookup_chip(torch.cuda.get_device_name(a.device.index) if on_cuda else "").id,
        accumulate=sums,
        layout=layout_of(a, b),
        prepared=precision in ("fp8", "fp8_row") and find_prepared(b, precision == "fp8_row") is not None,
        row_scaling=lowprec.has_row_scaling(a.device, out) if precision == "fp8_row" and on_cuda else None,
    )


def _is_useful(precision: str, a: Any, full: str) -> bool:
    """Return whether a precision can be cheaper than full on this device: narrower, and with units of its own."""
    wider = {"bf16": ("bf16",), "fp16": ("fp16",), "fp32": PRECISIONS[:6], "fp64": PRECISIONS}
    if precision not in (*wider[full], "fp8", "fp8_row"):
        return False
    if a.device.type != "cuda":
        return True
    if precision in ("fp8", "fp8_row"):
        return has_fp8_units(a.device.index)
    return precision not in ("bf16", "tf32") or bool(torch.cuda.get_device_capability(a.device.index) >= (8, 0))


@functools.cache
def lookup_chip(name: str) -> Device:
    """Return the catalogue's entry of a chip; if it has none, the H200's, whose products were measured."""
    try:
        return lookup(name)
    except ArgumentError:
        return lookup("h200")


def layout_of(a: torch.Tensor, b: torch.Tensor) -> str:
    """Return the operands' layout in `gemm_time`'s words: "nn", "nt" (right one transposed) or "tn" (left one)."""
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
    """Return the predicted joules of a product in a precision: the product, and the casts of its operands from `dtype`.

    `layout` is that of the operands (fp8's casts transpose them into the layout that its product takes). A `prepared`
    right operand is in fp8 already. `row_scaling` is `lowprec.has_row_scaling` of the device; None assumes it for bf16
    results, which every torch with such products writes.
    """
    if min(m, n, k, batch) == 0:
        return 0.0
    device, name = lookup(on), precision.removesuffix("_row")
    gpu, model, out_bytes = chip(device), PowerModel.from_device(device), float(out_dtype.itemsize)
    work = _product(device, name, m, n, k, batch, out_bytes, layout)
    lossless = FULL[dtype] == name or (name == "tf32" and dtype == torch.float32)
    if not lossless:
        along = (layout != "tn", layout == "nt")
        for count, is_along in list(zip((batch * m * k, batch * n * k), along, strict=True))[: 1 if prepared else 2]:
            cast = _movement(gpu, count, count * dtype.itemsize, count * ELEMENT_BYTES[name])
            work = work + DeviceWork.of(cast, _CASTS.get(precision, (1.0, 1.0))[not is_along])
        inside = out_dtype == torch.bfloat16 if row_scaling is None else row_scaling
        if name == "fp16" or (precision == "fp8_row" and not inside):
            result = batch * m * n * out_bytes
            work = work + DeviceWork.of(_movement(gpu, batch * m * n, result, result), _UNSCALE)
    joules = model.estimate(work).energy_j
    if name == "fp8" and accumulate == "fast":
        joules -= float(batch) * m * n * k / _PROMOTED_EVERY * model.j_per_flop.get("vector.fp32", 0.0)
    return joules


def _product(
    device: Device, name: str, m: int, n: int, k: int, batch: int, out_bytes: float, layout: str
) -> DeviceWork:
    if name == "fp8":  # fp8 runs matrix by matrix
        return DeviceWork.of(gemm_time(device, m, n, k, 1, name, out_bytes=out_bytes, layout="nt"), batch)
    product = gemm_time(device, m, n, k, batch, name, out_bytes=out_bytes, layout=layout)
    if product.unit.startswith("vector"):
        # The formula may assume a narrow tile for a large product, whose reads exceed what the cache delivers in that
        # time.
        rate = float(load_fit("h200_gemm.json")["constants"]["cache_bytes_per_cycle"])
        most = rate * chip(device).units * chip(device).clock_hz * product.seconds
        product = replace(product, l2_bytes=min(product.l2_bytes, most))
    return DeviceWork.of(product)


def _movement(gpu: Chip, elements: float, read: float, written: float) -> KernelTime:
    """Return a kernel that reads and writes so many bytes once, in blocks of 1024 elements like torch's."""
    total = read + written
    crossing = total if total > CACHE_SHARE * gpu.cache_bytes else 0.0
    return movement_time(
        gpu, DataMovement("elementwise", elements, total, crossing, max(1.0, elements / 1024), itemsize=4.0)
    )
